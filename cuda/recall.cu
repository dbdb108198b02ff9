// Which blocks of its context each row of a step reads, by sketches of their keys. What follows from a choice is in chosen.cu.
// Twins: summarize and choose of engine/ops/reference.py (docs/arithmetic.md, "Recall"), bit for bit.
//
// Kernels.
//   summarize   (summarize.cu) sketches
//   weigh       (weigh.cu) masses [T, H, 2, W]: of each block before the tail, by its chunk's top; tops and sums of the chunks
//   choose      what a row reads. Grid (K, T), blocks of WARPS warps
// It writes chosen uint8 [T, K, W], left [T, H, 2], read int32 [T, K], how many blocks that are,
// and what attention goes by: list int32 [T, K, W], the blocks that are read one after the other, and last int32 [T, K], the
// row's position among them.
//
// Macros: HEAD_DIM; GROUP, query heads of a KV head, at most 16.
#include "recall.cuh"

constexpr i32 WARPS = 16, THREADS = WARPS * WARP;

// Of a head, for all lanes: the largest score of any key, the sum of all masses, and one by that. chunks: its largest and its sums.
struct Whole {
    float top, total, inverse;
};

DEVICE float factor_of(float top_of_chunk, float top) {
    return top_of_chunk == LEAST ? 0.0f : decay(top_of_chunk - top);
}

DEVICE Whole whole_of(const float* chunks, i32 n, i32 n_most) {
    constexpr i32 LOADS = 16; // under way, of both
    const i32 lane = threadIdx.x % WARP;
    float top = LEAST, sum = 0.0f, tops[LOADS], sums[LOADS];
    const auto load = [&](i32 from) {
#pragma unroll
        for (i32 i = 0; i < LOADS; i++) {
            const i32 c = from + i * WARP + lane;
            tops[i] = c < n ? chunks[c] : LEAST, sums[i] = c < n ? chunks[n_most + c] : 0.0f;
        }
    };
    for (i32 from = 0; from < n; from += LOADS * WARP) {
        load(from);
#pragma unroll
        for (i32 i = 0; i < LOADS; i++)
            top = largest(top, tops[i]);
    }
#pragma unroll
    for (i32 o = 16; o > 0; o >>= 1)
        top = largest(top, __shfl_xor_sync(FULL_WARP, top, o));
    for (i32 from = 0; from < n; from += LOADS * WARP) {
        if (n > LOADS * WARP)
            load(from);
#pragma unroll
        for (i32 i = 0; i < LOADS; i++)
            if (from + i * WARP < n) // what is behind the last chunk is +0
                sum = sum + sums[i] * factor_of(tops[i], top);
    }
    sum = fold(sum);
    return {top, sum, 1.0f / sum};
}

// The sum of what all threads of a block have, for all of them.
DEVICE i32 sum_of_block(i32 own, i32 (&sums)[WARPS]) {
    own = __reduce_add_sync(FULL_WARP, own);
    __syncthreads(); // nobody reads what was there before
    if (threadIdx.x % WARP == 0)
        sums[threadIdx.x / WARP] = own;
    __syncthreads();
    i32 sum = 0;
#pragma unroll
    for (i32 i = 0; i < WARPS; i++)
        sum += sums[i];
    return sum;
}

constexpr i32 DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS, MOST_OWN = CHUNK, LISTED = 1024;
static_assert(DIGITS == 4 * THREADS, "a thread has four counts");

// The scores of a row's blocks before its tail, -1: no candidate. A thread has `n` in a row, 1, 2, 4 or 8, all of one chunk. They
// stay in registers, unless there are more than all threads have: then they are in `list`, too.
struct Scores {
    i32* list;
    i32 behind, n, own[MOST_OWN];

    __device__ Scores(i32* list, i32 behind) : list(list), behind(behind), n(1), own{} {
        while (n < MOST_OWN && n * THREADS < behind)
            n *= 2;
    }
    __device__ i32 at_once() const { return n * THREADS; }
    __device__ bool in_registers() const { return behind <= at_once(); }
    __device__ i32 first(i32 from) const { return from + n * (i32)threadIdx.x; }

    __device__ void load(i32 from) {
        if (in_registers())
            return;
#pragma unroll
        for (i32 i = 0; i < MOST_OWN; i++)
            own[i] = first(from) + i < behind ? list[first(from) + i] : -1;
    }
    // f(block, score), of what is no candidate too.
    template <class F>
    __device__ void each(const F& f) {
#pragma unroll 1
        for (i32 from = 0; from < behind; from += at_once()) {
            load(from);
#pragma unroll
            for (i32 i = 0; i < MOST_OWN; i++)
                if (i < n)
                    f(first(from) + i, own[i]);
        }
    }
};

// The sums of what the threads of a block before this one have, and of what all have, in halves of a word.
DEVICE u32 sum_before(u32 own, u32 (&sums)[WARPS], u32& all) {
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 up_to = own;
#pragma unroll
    for (i32 o = 1; o < WARP; o <<= 1) {
        const u32 other = __shfl_sync(FULL_WARP, up_to, max(lane - o, 0));
        up_to += lane >= o ? other : 0;
    }
    if (lane == WARP - 1)
        sums[warp] = up_to;
    __syncthreads();
    u32 before = up_to - own;
    all = 0;
#pragma unroll
    for (i32 i = 0; i < WARPS; i++) {
        before += i < warp ? sums[i] : 0;
        all += sums[i];
    }
    return before;
}

KERNEL __launch_bounds__(THREADS)
choose(const i32* blocks, const i32* sequence, const i32* positions, const i32* most, const i32* leave, const u8* keep,
       i32 n_head, i32 width, const float* masses, u8* chosen, float* left, i32* read, i32* list, i32* last) {
    dependency_release();
    dependency_wait();
    __shared__ Whole whole[GROUP];
    __shared__ i32 found[3], sums[WARPS], order[LISTED]; // order: the first of the list
    __shared__ u32 halves[2][WARPS];
    __shared__ int4 room[GROUP * 64 > DIGITS / 4 ? GROUP * 64 : DIGITS / 4]; // of one of these, then the other
    u32(*const units)[256] = (u32(*)[256])room;
    i32* const counts = (i32*)room;
    __shared__ u32 below[GROUP], digits[GROUP];
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i32 head = blockIdx.x, n_head_kv = gridDim.x, t = blockIdx.y, s = sequence[t];
    const i32 position = positions[t], row_block = position / KV_BLOCK, behind = max(row_block - TAIL_BLOCKS, 0);
    const i32 n_chunks = (behind + CHUNK - 1) / CHUNK, most_chunks = (width + CHUNK - 1) / CHUNK;
    const i64 first = (i64)t * n_head + head * GROUP;
    chosen += ((i64)t * n_head_kv + head) * width, list += ((i64)t * n_head_kv + head) * width;
    masses += first * 2 * width, left += first * 2, read += t * n_head_kv + head, last += t * n_head_kv + head;
    blocks += (i64)s * width, keep += (i64)s * width;

    i32 wanted = most[s], candidates = 0;
    Scores scores(list, wanted < 0 ? 0 : behind);
    // A block's masses, and whether it is a candidate: of the next one under way, nothing waits for them yet.
    float coming[GROUP], tops[GROUP]; // tops: of its chunk
    bool coming_is = false;
    const auto load = [&](i32 b, bool new_chunk) {
        coming_is = b > 0 && b < scores.behind && !keep[b] && blocks[b] >= 0;
#pragma unroll
        for (i32 h = 0; h < GROUP; h++) {
            const float* const of = masses + 2 * h * width;
            coming[h] = b < scores.behind ? of[b] : 0.0f;
            if (new_chunk)
                tops[h] = b < scores.behind ? of[width + b / CHUNK] : LEAST;
        }
    };
    load(scores.first(0), true);
    if (wanted >= 0) {
        for (i32 h = warp; h < GROUP; h += WARPS) {
            const Whole of = whole_of(masses + (2 * h + 1) * width, n_chunks, most_chunks);
            if (lane == 0)
                whole[h] = of;
        }
        __syncthreads();
    }
#pragma unroll 1
    for (i32 from = 0; from < scores.behind; from += scores.at_once()) {
        const i32 b0 = scores.first(from);
        float factors[GROUP], inverse[GROUP];
#pragma unroll
        for (i32 h = 0; h < GROUP; h++)
            factors[h] = factor_of(tops[h], whole[h].top), inverse[h] = whole[h].inverse;
#pragma unroll 1
        for (i32 i = 0; i < scores.n; i++) { // the largest share of any head
            const bool is = coming_is;
            float mass[GROUP], share = 0.0f;
#pragma unroll
            for (i32 h = 0; h < GROUP; h++)
                mass[h] = coming[h];
            const bool last_one = i + 1 == scores.n;
            load(last_one ? scores.first(from + scores.at_once()) : b0 + i + 1, last_one);
#pragma unroll
            for (i32 h = 0; h < GROUP; h++)
                share = larger_or_nan(share, mass[h] * factors[h] * inverse[h]);
            const i32 best = !is ? -1 : share == share ? __float_as_int(share) : (i32)NAN_BITS;
            candidates += is;
#pragma unroll
            for (i32 j = 0; j < MOST_OWN; j++)
                scores.own[j] = j == i ? best : scores.own[j];
            if (!scores.in_registers() && b0 + i < behind)
                list[b0 + i] = best;
        }
    }
    candidates = sum_of_block(candidates, sums);
    const i32 may_leave = leave[s];
    const bool all = wanted < 0 || !candidates || (may_leave < 0 && candidates <= wanted);
    if (all) {
        for (i32 b = threadIdx.x; b < width; b += THREADS)
            chosen[b] = b <= row_block;
        for (i32 b = threadIdx.x; b <= row_block; b += THREADS)
            list[b] = b;
        for (i32 h = threadIdx.x; h < GROUP; h += THREADS)
            left[2 * h] = LEAST, left[2 * h + 1] = 0.0f;
        if (threadIdx.x == 0)
            *last = position, *read = row_block + 1;
        return;
    }

    wanted = min(wanted, candidates);
    if (may_leave >= 0) { // the largest `least`, byte by byte, below which no head has more units than it may leave
        u32 least = 0;
        for (i32 h = threadIdx.x; h < GROUP; h += THREADS)
            below[h] = 0;
#pragma unroll 1
        for (i32 shift = 24; shift >= 0; shift -= 8) {
            for (i32 i = threadIdx.x; i < GROUP * 256; i += THREADS)
                units[i / 256][i % 256] = 0;
            __syncthreads();
            scores.each([&](i32 b, i32 score) {
                if (score < 0 || (shift < 24 && score >> (shift + 8) != (i32)(least >> (shift + 8))))
                    return;
#pragma unroll 1
                for (i32 h = 0; h < GROUP; h++) {
                    const float* const of = masses + 2 * h * width;
                    const float share = of[b] * factor_of(of[width + b / CHUNK], whole[h].top) * whole[h].inverse;
                    atomicAdd(&units[h][score >> shift & 255],
                              share >= 1.0f ? 1u << 24 : share > 0.0f ? (u32)(share * 0x1p24f) : 0u);
                }
            });
            __syncthreads();
            for (i32 h = warp; h < GROUP; h += WARPS) { // a lane has eight digits, the largest ones in the last lane
                u32 mine = 0;
                for (i32 i = 0; i < 8; i++)
                    mine += units[h][lane * 8 + i];
                u32 up_to = mine;
#pragma unroll
                for (i32 o = 1; o < WARP; o <<= 1) {
                    const u32 other = __shfl_sync(FULL_WARP, up_to, max(lane - o, 0));
                    up_to += lane >= o ? other : 0;
                }
                u32 left_out = below[h] + up_to - mine;
                i32 n = 0; // digits with no more than that below them
                for (i32 i = 0; i < 8; i++) {
                    n += left_out <= (u32)may_leave;
                    left_out += units[h][lane * 8 + i];
                }
                n = __reduce_add_sync(FULL_WARP, n);
                if (lane == 0)
                    digits[h] = n - 1;
            }
            __syncthreads();
            u32 digit = 255;
            for (i32 h = 0; h < GROUP; h++)
                digit = min(digit, digits[h]);
            for (i32 h = warp; h < GROUP; h += WARPS) {
                u32 sum = 0;
                for (i32 i = lane; i < (i32)digit; i += WARP)
                    sum += units[h][i];
                sum = __reduce_add_sync(FULL_WARP, sum);
                if (lane == 0)
                    below[h] += sum;
            }
            least |= digit << shift;
            __syncthreads();
        }
        least = min(least, NAN_BITS);
        i32 needed = 0;
        scores.each([&](i32, i32 score) { needed += score >= (i32)least; });
        wanted = min(wanted, sum_of_block(needed, sums));
    }

    // The `wanted`-th largest score, eleven bits at a time; how many of its like are read. Where all that begin alike are
    // read, nobody need have the bound.
    i32 bound = wanted ? 0 : 0x7fffffff, ties = wanted;
    ((int4*)counts)[threadIdx.x] = make_int4(0, 0, 0, 0);
    __syncthreads();
#pragma unroll 1
    for (i32 above = 31; above && wanted;) { // bits from there on are known
        const i32 shift = max(above - DIGIT_BITS, 0), mask = (1 << (above - shift)) - 1, known = above < 31 ? bound >> above : 0;
        scores.each([&](i32, i32 score) {
            if (score >= 0 && (above == 31 || score >> above == known))
                atomicAdd(&counts[score >> shift & mask], 1);
        });
        __syncthreads();
        // A thread has four counts in a row, those of larger digits in later threads.
        const int4 four = ((const int4*)counts)[threadIdx.x];
        ((int4*)counts)[threadIdx.x] = make_int4(0, 0, 0, 0);
        const i32 mine = four.x + four.y + four.z + four.w;
        i32 from = mine; // of this lane and those behind it
#pragma unroll
        for (i32 o = 1; o < WARP; o <<= 1) {
            const i32 other = __shfl_sync(FULL_WARP, from, min(lane + o, WARP - 1));
            from += lane + o < WARP ? other : 0;
        }
        if (lane == 0)
            sums[warp] = from;
        __syncthreads();
        i32 larger = from - mine;
#pragma unroll
        for (i32 i = 0; i < WARPS; i++)
            larger += i > warp ? sums[i] : 0;
        if (larger < ties && larger + mine >= ties) {
            const i32 n[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (i32 i = 3; i >= 0; i--) {
                if (larger < ties && larger + n[i] >= ties)
                    found[0] = threadIdx.x * 4 + i, found[1] = larger, found[2] = n[i];
                larger += n[i];
            }
        }
        __syncthreads();
        bound |= found[0] << shift;
        ties -= found[1];
        above = shift;
        if (ties == found[2] && shift) {
            bound--, ties = 0;
            break;
        }
    }

    // The list, in order, in the place of scores: what a thread has of these it has read when the first is written over.
    const auto is_tie = [&](i32 score) { return score >= 0 && score == bound; };
    const auto is_sure = [&](i32 b, i32 score) { return b < behind && (score < 0 || score > bound); };
    i32 n_listed = 0, n_ties = 0;
#pragma unroll 1
    for (i32 from = 0, turn = 0; from < behind; from += scores.at_once(), turn++) {
        const i32 b0 = scores.first(from);
        scores.load(from);
        u32 own = 0, all_of; // ties; from bit 16 on what is read for sure
#pragma unroll
        for (i32 i = 0; i < MOST_OWN; i++)
            if (i < scores.n)
                own += is_tie(scores.own[i]) ? 1u : is_sure(b0 + i, scores.own[i]) ? 1u << 16 : 0u;
        const u32 before = sum_before(own, halves[turn % 2], all_of);
        i32 tie = n_ties + (i32)(before & 0xffff), at = n_listed + (i32)(before >> 16) + min(tie, ties) - min(n_ties, ties);
#pragma unroll
        for (i32 i = 0; i < MOST_OWN; i++) {
            if (i >= scores.n || b0 + i >= behind)
                continue;
            const bool is = is_tie(scores.own[i]), reads = is ? tie < ties : is_sure(b0 + i, scores.own[i]);
            tie += is;
            chosen[b0 + i] = reads;
            if (reads) {
                list[at] = b0 + i;
                if (at < LISTED)
                    order[at] = b0 + i;
                at++;
            }
        }
        const i32 ties_here = (i32)(all_of & 0xffff);
        n_listed += (i32)(all_of >> 16) + min(n_ties + ties_here, ties) - min(n_ties, ties);
        n_ties += ties_here;
    }
    for (i32 b = behind + threadIdx.x; b < width; b += THREADS) {
        chosen[b] = b <= row_block;
        if (b <= row_block)
            list[n_listed + b - behind] = b;
    }
    if (threadIdx.x == 0) {
        *last = (n_listed + row_block - behind) * KV_BLOCK + position % KV_BLOCK;
        *read = n_listed + row_block - behind + 1;
    }
    __syncthreads(); // the list is there
    if (wanted == candidates) {
        for (i32 h = threadIdx.x; h < GROUP; h += THREADS)
            left[2 * h] = LEAST, left[2 * h + 1] = 0.0f;
        return;
    }
    for (i32 h = warp; h < GROUP; h += WARPS) {
        const float *const mass = masses + 2 * h * width, *const chunks = mass + width;
        float sum = 0.0f;
#pragma unroll 4
        for (i32 i = lane; i < n_listed; i += WARP) {
            const i32 b = i < LISTED ? order[i] : list[i];
            sum = sum + mass[b] * factor_of(chunks[b / CHUNK], whole[h].top);
        }
        const float rest = whole[h].total - fold(sum);
        if (lane == 0)
            left[2 * h] = whole[h].top, left[2 * h + 1] = rest < 0.0f ? 0.0f : rest;
    }
}
