// Which blocks of its context each row of a step reads, by sketches of their keys. What follows from a choice is in chosen.cu.
// Twin: choose of engine/ops/reference.py (docs/arithmetic.md, "Recall"), bit for bit.
//
// Kernels.
//   weigh       (weigh.cu) masses [T, H, 2, W]: of each block before the tail, by its chunk's top; tops and sums of the chunks
//   score       scores of these blocks, and of all of them the top and the sum                (ceil(W / SPAN), K, T)
//   choose      what a row reads                                                              (K, T)
// Blocks of the last two have WARPS warps. choose writes chosen uint8 [T, K, W], read int32 [T, K], how many blocks that are, and
// what attention goes by: list int32 [T, K, W], the blocks that are read one after the other, and last int32 [T, K], the row's
// position among them. Before, list is scratch for scores. left [T, H, 2] gets the top and the sum of all masses, or no mass where
// nothing is left out; combine.cu takes off what is read. Sketches, keep and all that says which rows there are is older than the
// step, so it is read before what the kernel ahead leaves is there.
//
// Macro: GROUP, query heads of a KV head, at most 16.
#include "recall.cuh"

constexpr i32 WARPS = 16, SPAN = WARPS * WARP; // blocks of a thread block of `score`

// Of a head, for all lanes: the largest score of any key, and the sum of all masses. chunks: its largest and its sums.
struct Whole {
    float top, total;
};

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
    return {top, fold(sum)};
}

// A block's threads have SPAN blocks of keys; the first writes `left`, in which the sum is that of all masses.
KERNEL __launch_bounds__(WARPS * WARP)
score(const i32* blocks, const i32* sequence, const i32* positions, const i32* most, const u8* keep, i32 n_head,
      i32 width, const float* masses, float* left, i32* scores) {
    dependency_release();
    __shared__ float factors[GROUP][SPAN / CHUNK], inverse[GROUP]; // of chunks; one by the sum of all
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i32 head = blockIdx.y, n_head_kv = gridDim.y, t = blockIdx.z, s = sequence[t];
    const i32 behind = max(positions[t] / KV_BLOCK - TAIL_BLOCKS, 0), b = blockIdx.x * SPAN + threadIdx.x;
    const i32 n_chunks = (behind + CHUNK - 1) / CHUNK, most_chunks = (width + CHUNK - 1) / CHUNK;
    const bool is_read = most[t] >= 0 && behind > (i32)blockIdx.x * SPAN;
    const bool is_kept = b == 0 || b >= behind || keep[(i64)s * width + b] || blocks[(i64)s * width + b] < 0;
    dependency_wait();
    if (!is_read)
        return;
    masses += ((i64)t * n_head + head * GROUP) * 2 * width, left += ((i64)t * n_head + head * GROUP) * 2;
    float mass[GROUP]; // loads that nothing waits for yet
#pragma unroll
    for (i32 h = 0; h < GROUP; h++)
        mass[h] = b < behind ? masses[2 * h * width + b] : 0.0f;
    for (i32 h = warp; h < GROUP; h += WARPS) {
        const float* const chunks = masses + 2 * h * width + width;
        const Whole whole = whole_of(chunks, n_chunks, most_chunks);
        for (i32 i = lane; i < SPAN / CHUNK; i += WARP)
            if (const i32 chunk = blockIdx.x * (SPAN / CHUNK) + i; chunk < n_chunks)
                factors[h][i] = factor_of(chunks[chunk], whole.top);
        if (lane == 0)
            inverse[h] = 1.0f / whole.total;
        if (lane == 0 && blockIdx.x == 0)
            left[2 * h] = whole.top, left[2 * h + 1] = whole.total;
    }
    __syncthreads();
    if (b >= behind)
        return;
    float share = 0.0f; // the largest of any head
#pragma unroll
    for (i32 h = 0; h < GROUP; h++)
        share = larger_or_nan(share, mass[h] * factors[h][threadIdx.x / CHUNK] * inverse[h]);
    const i32 best = is_kept ? -1 : share == share ? __float_as_int(share) : (i32)NAN_BITS;
    scores[((i64)t * n_head_kv + head) * width + b] = best;
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

constexpr i32 DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS, OWN = 8;
static_assert(DIGITS == 4 * WARPS * WARP, "a thread has four counts");

// A row's scores: OWN of a thread in a row, in registers unless there are more than all threads have.
struct Scores {
    static constexpr i32 AT_ONCE = OWN * WARPS * WARP;
    const i32* list;
    i32 behind;
    bool aligned; // to 16 bytes
    i32 own[OWN];

    __device__ Scores(const i32* list, i32 behind, bool aligned) : list(list), behind(behind), aligned(aligned) { load(0); }

    __device__ void load(i32 from) {
        const i32 b = from + OWN * threadIdx.x;
        if (aligned && b + OWN <= behind) {
#pragma unroll
            for (i32 i = 0; i < OWN; i += 4) {
                const int4 four = *(const int4*)(list + b + i);
                own[i] = four.x, own[i + 1] = four.y, own[i + 2] = four.z, own[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (i32 i = 0; i < OWN; i++)
                own[i] = b + i < behind ? list[b + i] : -1;
        }
    }
    // f(block, score), of what is no candidate too.
    template <class F>
    __device__ __forceinline__ void each(const F& f) {
#pragma unroll 1
        for (i32 from = 0; from < behind; from += AT_ONCE) {
            if (behind > AT_ONCE)
                load(from);
#pragma unroll
            for (i32 i = 0; i < OWN; i++)
                f(from + OWN * (i32)threadIdx.x + i, own[i]);
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

KERNEL __launch_bounds__(WARPS * WARP, 1)
choose(const i32* sequence, const i32* positions, const i32* most, const i32* leave, i32 n_head, i32 width,
       const float* masses, u8* chosen, float* left, i32* read, i32* list, i32* last) {
    __shared__ i32 found[3], sums[WARPS];
    __shared__ u32 halves[2][WARPS];
    __shared__ int4 room[GROUP * 64 > DIGITS / 4 ? GROUP * 64 : DIGITS / 4]; // of one of these, then the other
    u32(*const units)[256] = (u32(*)[256])room;
    i32* const counts = (i32*)room;
    // Digits are loaded 16 bytes at a time, and nobody shall seem to read what lies beside them.
    alignas(16) __shared__ u32 below[GROUP], digits[(GROUP + 3) / 4 * 4];
    __shared__ float inverse[GROUP];
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_threads = WARPS * WARP;
    const i32 head = blockIdx.x, n_head_kv = gridDim.x, t = blockIdx.y, s = sequence[t];
    const i32 position = positions[t], row_block = position / KV_BLOCK, behind = max(row_block - TAIL_BLOCKS, 0);
    const i64 first = (i64)t * n_head + head * GROUP;
    chosen += ((i64)t * n_head_kv + head) * width, list += ((i64)t * n_head_kv + head) * width;
    masses += first * 2 * width, left += first * 2, read += t * n_head_kv + head, last += t * n_head_kv + head;

    const i32 most_read = most[t], may_leave = leave[t];
    i32 wanted = most_read; // of the candidates
    ((int4*)counts)[threadIdx.x] = make_int4(0, 0, 0, 0);
    __syncthreads();
    dependency_wait();
    Scores scores(list, most_read < 0 ? 0 : behind, width % 4 == 0);
    if (may_leave >= 0 && most_read >= 0) {
        u32 least = 0; // the largest, byte by byte, below which no head has more units than it may leave
        for (i32 h = threadIdx.x; h < GROUP; h += n_threads)
            below[h] = 0, inverse[h] = 1.0f / left[2 * h + 1];
#pragma unroll 1
        for (i32 shift = 24; shift >= 0; shift -= 8) {
            for (i32 i = threadIdx.x; i < GROUP * 256; i += n_threads)
                units[i / 256][i % 256] = 0;
            __syncthreads();
            scores.each([&](i32 b, i32 score) {
                if (score < 0 || (shift < 24 && score >> (shift + 8) != (i32)(least >> (shift + 8))))
                    return;
#pragma unroll 1
                for (i32 h = 0; h < GROUP; h++) {
                    const float *const mass = masses + 2 * h * width, factor = factor_of(mass[width + b / CHUNK], left[2 * h]);
                    const float share = mass[b] * factor * inverse[h];
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
        ((int4*)counts)[threadIdx.x] = make_int4(0, 0, 0, 0);
        __syncthreads();
    }

    // The `wanted`-th largest score, eleven bits at a time; how many of its like are read. Where all that begin alike are
    // read, nobody need have the bound.
    i32 candidates = 0, bound = 0, ties = 0;
#pragma unroll 1
    for (i32 above = 31; above;) { // bits from there on are known
        const i32 shift = max(above - DIGIT_BITS, 0), mask = (1 << (above - shift)) - 1;
        const i32 known = above < 31 ? bound >> above : 0;
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
        i32 larger = from - mine, all = 0;
#pragma unroll
        for (i32 i = 0; i < WARPS; i++) {
            larger += i > warp ? sums[i] : 0;
            all += sums[i];
        }
        if (above == 31) {
            candidates = all, wanted = ties = min(wanted, all);
            if (wanted <= 0 || (may_leave < 0 && all <= most_read)) {
                bound = 0x7fffffff;
                break;
            }
        }
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

    dependency_release(); // not at once: attention would come to multiprocessors that weigh has not left (docs/cuda.md)
    if (!candidates || (may_leave < 0 && candidates <= most_read)) {
#pragma unroll 1
        for (i32 b = threadIdx.x; b < width; b += n_threads)
            chosen[b] = b <= row_block;
#pragma unroll 1
        for (i32 b = threadIdx.x; b <= row_block; b += n_threads)
            list[b] = b;
        for (i32 h = threadIdx.x; h < GROUP; h += n_threads)
            left[2 * h] = LEAST, left[2 * h + 1] = 0.0f;
        if (threadIdx.x == 0)
            *last = position, *read = row_block + 1;
        return;
    }

    // The list, in order, in the place of scores: what a thread has of these it has read when the first is written over.
    const auto is_tie = [&](i32 score) { return score >= 0 && score == bound; };
    const auto is_sure = [&](i32 b, i32 score) { return b < behind && (score < 0 || score > bound); };
    i32 n_listed = 0, n_ties = 0;
#pragma unroll 1
    for (i32 from = 0, turn = 0; from < behind; from += Scores::AT_ONCE, turn++) {
        const i32 b0 = from + OWN * threadIdx.x;
        if (behind > Scores::AT_ONCE)
            scores.load(from);
        u32 own = 0, all_of; // ties; from bit 16 on what is read for sure
#pragma unroll
        for (i32 i = 0; i < OWN; i++)
            own += is_tie(scores.own[i]) ? 1u : is_sure(b0 + i, scores.own[i]) ? 1u << 16 : 0u;
        const u32 before = sum_before(own, halves[turn % 2], all_of);
        i32 tie = n_ties + (i32)(before & 0xffff), at = n_listed + (i32)(before >> 16) + min(tie, ties) - min(n_ties, ties);
        u32 flags = 0;
#pragma unroll
        for (i32 i = 0; i < OWN; i++) {
            const bool is = is_tie(scores.own[i]);
            flags |= (u32)(is ? tie < ties : is_sure(b0 + i, scores.own[i])) << i;
            tie += is;
        }
#pragma unroll 1
        for (u32 reads = flags; reads; reads &= reads - 1, at++)
            list[at] = b0 + __ffs((i32)reads) - 1;
        const auto bits_before = [&](i32 b) { return (1u << min(max(b - b0, 0), OWN)) - 1; };
        flags |= bits_before(row_block + 1) & ~bits_before(behind);
        if (width % 4 == 0) {
#pragma unroll
            for (i32 i = 0; i < OWN; i += 4)
                if (b0 + i < width)
                    *(u32*)(chosen + b0 + i) = (flags >> i & 15) * 0x00204081u & 0x01010101u; // a byte for each bit
        } else {
#pragma unroll 1
            for (i32 i = 0; i < OWN && b0 + i < width; i++)
                chosen[b0 + i] = flags >> i & 1;
        }
        const i32 ties_here = (i32)(all_of & 0xffff);
        n_listed += (i32)(all_of >> 16) + min(n_ties + ties_here, ties) - min(n_ties, ties);
        n_ties += ties_here;
    }
    const i32 covered = (behind + Scores::AT_ONCE - 1) / Scores::AT_ONCE * Scores::AT_ONCE;
#pragma unroll 1
    for (i32 b = covered + threadIdx.x; b < width; b += n_threads)
        chosen[b] = b <= row_block;
#pragma unroll 1
    for (i32 b = behind + threadIdx.x; b <= row_block; b += n_threads)
        list[n_listed + b - behind] = b;
    if (threadIdx.x == 0) {
        *last = (n_listed + row_block - behind) * KV_BLOCK + position % KV_BLOCK;
        *read = n_listed + row_block - behind + 1;
    }
    if (wanted == candidates) // nothing is left out
        for (i32 h = threadIdx.x; h < GROUP; h += n_threads)
            left[2 * h] = LEAST, left[2 * h + 1] = 0.0f;
}
