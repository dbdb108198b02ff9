// The expert FFN of at most 32 tokens, and the first half of a dense one. Twins: expert_ffn, dense_ffn.
//
// Inputs. An expert that a step uses is a record of 64 bytes in `active`, n_active[0] of them:
//   u64 source[3]        where gate, up and down are read, which may be host memory
//   u64 target[3]        where they are written, too, as they enter a slot; 0: nowhere
//   i32 expert
//   i32 first, count     pairs[first .. first + count]: the (token, rank) that use it, as t * n_used + a
//   i32 0
// With one token, record a is that of rank a. A record is worked on once for all its tokens, so a byte of its source is
// read once. Most records have one token or two, even of a step of 32; they are multiplied one after the other. Sources and targets are 16-byte aligned and padded to 16.
//
// Kernels.
//   kernel          writes                                           grid                                block
//   gate_up         z [T * A, F] = act(gate h) * (up h)              (records, copiers + ceil(F / 32))   WARPS warps
//   gate_up_dense   z [T, F] of the matrices `gate` and `up`         ceil(F / Z_ROWS), SHARED: + T       WARPS warps
//   down_one        x [D] += the fold over ranks, for one token      ceil(D / 8)                         a warp a rank
//   down            y [T * A, D]                                     (ceil(D / 8 / warps), records)      up to 8 warps
//   combine         x [T, D] += the fold of y over ranks             (ceil(D / block), T)                any
// act is silu, or with GELU = 1 gelu. z is in 8 bits (zq, zd, zsums), or floats with DOWN_FLOAT = 1. Where `add` is 0,
// x becomes the fold. What enters a slot is copied there first: a block's own rows of gate and up before it reads them
// there, and the down part by the first `copiers` blocks of a record meanwhile.
//
// Macros.
//   GATE, UP, DOWN   types of the matrices; GATE and UP are both float or neither
//   COLS             columns: D in gate_up and gate_up_dense, F in down_one and down
//   ROWS             of each matrix at a time a warp: 1, 2 or 4; in gate_up_dense 1 where TOKENS is 4. In down 4, or 1
//                    where rows are very long
//   STAGES           of those in flight
//   TOKENS           at a time: 1, or in gate_up_dense 4
//   MANY             1: a step of several tokens, in gate_up and down
//   WARPS            at most 8
//   USED             experts a token: A (down_one)
//   Z_ROWS           32, or with DOWN_FLOAT a smaller multiple of ROWS * WARPS: few rows on many multiprocessors
//   WEIGHTED         1: products of gate are multiplied by gate_scales[expert]; in gate_up_dense those of both matrices
//                    by gate_scale and up_scale
//   BESIDE           1: the grid has one record more, of the same F: an expert that every token uses, of matrices
//                    beside_gate and beside_up. Its z follow those of the pairs
//   SHARED           the type of its gate, a float type: the record's copiers (in gate_up_dense T more blocks) make
//                    row_scale [T] = sigmoid(shared_gate h), from h [T, D] as floats
//   BESIDE_DOWN      its type in down_one, a float one if DOWN is: a warp more, and then x += row_scale[0], if any,
//                    times the matrix `beside` times the last z
//
// Shared memory.
//   gate_up          for one token, unless registers hold it, the input as in product.cu; then 2 * STAGES * stage_bytes
//                    a warp, a stage being ROWS rows and 32 bytes or more; with SHARED 8 * D bytes at least
//   down_one, down   a warp: its z as in product.cu, COLS / 2 bytes rounded up to 16; then STAGES * stage_bytes, each
//                    four rows and 32; in down these are all of a warp's rows
#include "rows.cuh"

struct ActiveExpert {
    const u8* source[3];
    u8* target[3];
    i32 expert, first, count;
};

// Words of a record and a word that says whether the table has it, for threads that read them together and then meet:
// a thousand warps that each read every field would queue for a few lines of the L2 cache, for microseconds.
constexpr i32 RECORD_WORDS = 9;

DEVICE void fetch_record(u64* words, const u8* active, const i32* n_active, i32 i, i32 thread) {
    if (thread < RECORD_WORDS - 1)
        words[thread] = load_fresh((const u64*)(active + (i64)i * 64) + thread);
    else if (thread == RECORD_WORDS - 1)
        words[thread] = i < load_fresh(n_active);
}

DEVICE bool read_record(const u64* words, ActiveExpert& record) {
#pragma unroll
    for (i32 part = 0; part < 3; part++) {
        record.source[part] = (const u8*)words[part];
        record.target[part] = (u8*)words[3 + part];
    }
    record.expert = (i32)words[6];
    record.first = (i32)(words[6] >> 32);
    record.count = (i32)words[7];
    return words[RECORD_WORDS - 1] != 0;
}

#ifndef MANY
#define MANY 0
#endif

#ifdef GATE

// Every thread has UNROLL reads under way; a block reads 16 * UNROLL * blockDim.x consecutive bytes at once.
DEVICE void copy_part(u8* to, const u8* from, i64 n_bytes, i32 block, i32 n_blocks) {
    constexpr i32 UNROLL = 8;
    const i64 n = (n_bytes + 15) / 16, n_threads = blockDim.x, step = n_blocks * n_threads * UNROLL;
    for (i64 start = block * n_threads * UNROLL + threadIdx.x; start < n; start += step) {
        uint4 v[UNROLL];
#pragma unroll
        for (i32 i = 0; i < UNROLL; i++)
            if (start + i * n_threads < n)
                v[i] = load_once16(from + 16 * (start + i * n_threads));
#pragma unroll
        for (i32 i = 0; i < UNROLL; i++)
            if (start + i * n_threads < n)
                *(uint4*)(to + 16 * (start + i * n_threads)) = v[i];
    }
}

// The block's rows of gate or up: where it may read them. A part that enters a slot is copied there first, in whole
// 16-byte pieces: the ones at both ends belong to other blocks too, which write the same bytes.
DEVICE const u8* own_rows(const u8* source, u8* target, i64 offset, i32 n_bytes) {
    if (!target)
        return source + offset;
    const i32 skew = (i32)(offset & 15);
    copy_part(target + offset - skew, source + offset - skew, skew + n_bytes, 0, 1);
    return target + offset;
}

#ifndef GELU
#define GELU 0
#endif
#ifndef DENSE
#define DENSE 0
#endif

#ifndef BESIDE
#define BESIDE 0
#endif
#ifndef WEIGHTED
#define WEIGHTED 0
#endif
#ifndef Z_ROWS
#define Z_ROWS 32
#endif
static_assert(Z_ROWS == 32 || (DENSE && DOWN_FLOAT), "a block of activations is quantized where it is made");

DEVICE float activate(float x) { return GELU ? gelu(x) : silu(x); }

#ifdef SHARED
// A row's factor, by a block. The gate is loaded before the kernel ahead has ended, unless the caller waited for that.
DEVICE void shared_scale(float* shared, const u8* shared_gate, const float* h, float* row_scale) {
    constexpr i32 N = WARPS * WARP, EACH = (COLS + N - 1) / N;
    float* const ws = shared;
    float* const hs = shared + COLS;
    float held[EACH]; // all loads are under way before the first is stored
#pragma unroll
    for (i32 i = 0; i < EACH; i++)
        held[i] = threadIdx.x + i * N < COLS ? weight_of<SHARED>(shared_gate, threadIdx.x + i * N) : 0.0f;
#pragma unroll
    for (i32 i = 0; i < EACH; i++)
        if (threadIdx.x + i * N < COLS)
            ws[threadIdx.x + i * N] = held[i];
    dependency_wait();
#pragma unroll
    for (i32 i = 0; i < EACH; i++)
        held[i] = threadIdx.x + i * N < COLS ? h[threadIdx.x + i * N] : 0.0f;
#pragma unroll
    for (i32 i = 0; i < EACH; i++)
        if (threadIdx.x + i * N < COLS)
            hs[threadIdx.x + i * N] = held[i];
    __syncthreads();
    if (threadIdx.x >= WARP)
        return;
    float acc = 0.0f;
#pragma unroll 8
    for (i32 i = threadIdx.x; i < COLS; i += WARP)
        acc = __fmaf_rn(ws[i], hs[i], acc);
    const float s = sigmoid(fold(acc));
    if (threadIdx.x == 0)
        *row_scale = s;
}
#endif

#if DENSE
KERNEL __launch_bounds__(WARPS * WARP, 2)
    gate_up_dense(const u8* gate_matrix, const u8* up_matrix, i32 n_tokens, i32 F, const float* x, const i8* q,
                  const float* d, const i32* sums, float* z, i8* zq, float* zd, i32* zsums, const u8* shared_gate,
                  const float* h, float* row_scale, i32 stage_bytes, float gate_scale, float up_scale) {
#else
KERNEL __launch_bounds__(WARPS * WARP, 2)
    gate_up(const u8* active, const i32* n_active, const i32* pairs, i32 n_used, i32 F, const float* x, const i8* q,
            const float* d, const i32* sums, float* z, i8* zq, float* zd, i32* zsums, const u8* beside_gate,
            const u8* beside_up, i32 n_tokens, const u8* shared_gate, const float* h, float* row_scale, i32 copiers,
            i64 down_bytes, i32 stage_bytes, const float* gate_scales) {
#endif
    constexpr bool SINGLE = TOKENS == 1 && !MANY; // the step has one token
    constexpr i32 MAX_COUNT = SINGLE ? 1 : 32;
    constexpr i32 GATE_BYTES = row_bytes_of(GATE, COLS), UP_BYTES = row_bytes_of(UP, COLS);
    // All of a row of activations is in registers, straight from global memory.
    constexpr bool IN_REGISTERS =
        TOKENS == 1 && !is_float(GATE) && is_paired(GATE) == is_paired(UP) && COLS <= 1024 * n_held(GATE, COLS);
    __shared__ float gs[MAX_COUNT][33], us[MAX_COUNT][33];
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#if DENSE
    dependency_release();
    const i32 row0 = blockIdx.x * Z_ROWS, rows = min(Z_ROWS, F - row0), first = 0, count = SINGLE ? 1 : n_tokens;
#ifdef SHARED
    if (rows <= 0) {
        const i32 t = blockIdx.x - (F + Z_ROWS - 1) / Z_ROWS;
        shared_scale((float*)shared, shared_gate, h + (i64)t * COLS, row_scale + t);
        return;
    }
#endif
    const u8* const gate = gate_matrix + (i64)row0 * GATE_BYTES;
    const u8* const up = up_matrix + (i64)row0 * UP_BYTES;
#else
    // In this order: when the kernel behind begins, the table is complete (down_one reads it before it waits).
    dependency_wait();
    dependency_release();
    const bool beside = BESIDE && blockIdx.x + 1 == gridDim.x;
    ActiveExpert record = {{beside_gate, beside_up}, {}, -1, 0, n_tokens};
    if (!beside) {
        __shared__ u64 words[RECORD_WORDS];
        fetch_record(words, active, n_active, blockIdx.x, threadIdx.x);
        __syncthreads();
        if (!read_record(words, record))
            return;
    }
    if ((i32)blockIdx.y < copiers) {
        if (record.target[2])
            copy_part(record.target[2], record.source[2], down_bytes, blockIdx.y, copiers);
#ifdef SHARED
        if (beside)
            for (i32 t = blockIdx.y; t < n_tokens; t += copiers) {
                __syncthreads(); // of the row before
                shared_scale((float*)shared, shared_gate, h + (i64)t * COLS, row_scale + t);
            }
#endif
        return;
    }
    const i32 row0 = (blockIdx.y - copiers) * 32, rows = min(32, F - row0);
    const u8* const gate = own_rows(record.source[0], record.target[0], (i64)row0 * GATE_BYTES, rows * GATE_BYTES);
    const u8* const up = own_rows(record.source[1], record.target[1], (i64)row0 * UP_BYTES, rows * UP_BYTES);
    if (record.target[0] || record.target[1])
        __syncthreads();
    const i32 first = record.first, count = SINGLE ? 1 : record.count;
    const float gate_scale = WEIGHTED && !beside ? gate_scales[record.expert] : 1.0f, up_scale = 1.0f;
#endif
    u8* stages = shared + 2 * warp * STAGES * stage_bytes;
    if (SINGLE && !IN_REGISTERS)
        stages += shared_input_bytes<GATE>(COLS);
    auto issue = [&](i32 r, u8* stage) {
        if (r < rows)
            stage_rows<ROWS * GATE_BYTES, GATE_BYTES>(stage, gate + r * GATE_BYTES, min(ROWS, rows - r) * GATE_BYTES);
        copies_commit();
        if (r < rows)
            stage_rows<ROWS * UP_BYTES, UP_BYTES>(stage + stage_bytes, up + r * UP_BYTES,
                                                  min(ROWS, rows - r) * UP_BYTES);
        copies_commit();
    };
#pragma unroll
    for (i32 i = 0; i < STAGES; i++)
        issue((warp + i * WARPS) * ROWS, stages + 2 * i * stage_bytes);
    if constexpr (TOKENS == 1)
        fill_grids<GATE, UP>();
#if DENSE
    dependency_wait();
#endif

    Input input = global_input(x, q, d, sums);
    typename HeldOf<GATE>::Block held[n_held(GATE, COLS)];
    auto take = [&](i32 t) { // token t, one of many
        input = row_of(global_input(x, q, d, sums), t, COLS);
        if constexpr (!is_float(GATE))
            hold_activations<has_halves(GATE) || has_halves(UP)>(input, COLS, held);
    };
    if constexpr (MANY) {
    } else if constexpr (IN_REGISTERS) {
        hold_activations<has_halves(GATE) || has_halves(UP)>(input, COLS, held);
    } else if constexpr (TOKENS == 1) {
        const Input local = shared_input<GATE>(shared, COLS);
        copy_input<GATE>(local, 0, input, 0, COLS, threadIdx.x, blockDim.x);
        __syncthreads();
        input = local;
        if constexpr (!is_float(GATE))
            hold_activations<has_halves(GATE) || has_halves(UP)>(input, COLS, held);
    }

    // The token of the expert's i-th row, and where its z goes.
#if DENSE
    auto token_of = [&](i32 i) -> i32 { return i; };
    auto pair_of = [&](i32 i) -> i64 { return i; };
#else
    auto token_of = [&](i32 i) -> i32 { return SINGLE ? 0 : beside ? i : pairs[first + i] / n_used; };
    auto pair_of = [&](i32 i) -> i64 {
        return SINGLE ? blockIdx.x : beside ? n_tokens * n_used + i : pairs[first + i];
    };
#endif
    auto tokens_of = [&](i32 i0, i32(&token)[TOKENS]) {
#pragma unroll
        for (i32 j = 0; j < TOKENS; j++)
            token[j] = token_of(min(i0 + j, count - 1));
    };
    i32 token[TOKENS];
    tokens_of(0, token);
    if (MANY)
        take(token[0]);
    for (i32 r = warp * ROWS, i = 0; r < rows; r += WARPS * ROWS, i = i + 1 < STAGES ? i + 1 : 0) {
        constexpr i32 N = ROWS * TOKENS, EACH = WARP / 2 / N; // lanes that hold the same sum
        u8* const stage = stages + 2 * i * stage_bytes;
        const i32 skew_gate = skew_of<GATE_BYTES>(gate + r * GATE_BYTES);
        const i32 skew_up = skew_of<UP_BYTES>(up + r * UP_BYTES);
        for (i32 i0 = 0; i0 < count; i0 += TOKENS) {
            float acc[2 * N] = {};
            if (count > TOKENS && (i0 || r > warp * ROWS)) {
                tokens_of(i0, token);
                if (MANY)
                    take(token[0]);
            }
            i32 rows_of[TOKENS]; // of `input`
#pragma unroll
            for (i32 j = 0; j < TOKENS; j++)
                rows_of[j] = MANY ? 0 : token[j];
            stage_wait<2 * STAGES - 1>();
            multiply<GATE, ROWS, TOKENS>(acc, stage, skew_gate, COLS, input, held, rows_of, count - i0);
            stage_wait<2 * STAGES - 2>();
            multiply<UP, ROWS, TOKENS>(acc + N, stage + stage_bytes, skew_up, COLS, input, held, rows_of, count - i0);
            const float sum = fold_rows(acc); // of the gate in the lower half of the warp, of up in the other
            const i32 t = i0 + lane / EACH % TOKENS, row = r + lane / EACH / TOKENS % ROWS;
            if (lane % EACH == 0 && t < count && row < rows)
                (lane < WARP / 2 ? gs : us)[t][row] = WEIGHTED ? (lane < WARP / 2 ? gate_scale : up_scale) * sum : sum;
        }
        __syncwarp(); // the stage is free
        if (Z_ROWS > STAGES * ROWS * WARPS) {
            issue(r + STAGES * WARPS * ROWS, stage);
        } else { // a warp has no more rows, but its groups of copies are counted
            copies_commit();
            copies_commit();
        }
    }
    __syncthreads();

#if DOWN_FLOAT
    for (i32 i = threadIdx.x; i < count * 32; i += blockDim.x)
        if (i % 32 < rows)
            z[pair_of(i / 32) * F + row0 + i % 32] = activate(gs[i / 32][i % 32]) * us[i / 32][i % 32];
#elif TOKENS == 1 && !MANY
    if (warp == 0) {
        float scale;
        i32 sum;
        const i32 value = quantize(activate(gs[0][lane]) * us[0][lane], scale, sum);
        const i64 at = pair_of(0) * F + row0;
        zq[at + lane] = (i8)value;
        if (lane == 0) {
            zd[at / 32] = scale;
            zsums[at / 32] = sum;
        }
    }
#else
    for (i32 i0 = 4 * warp; i0 < count; i0 += 4 * WARPS) { // four tokens a warp, eight lanes each
        const i32 i = i0 + lane / 8, column = lane % 8 * 4;
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (i < count)
#pragma unroll
            for (i32 j = 0; j < 4; j++)
                v[j] = activate(gs[i][column + j]) * us[i][column + j];
        float scale;
        i32 sum;
        const u32 packed = quantize4(v, scale, sum);
        if (i < count) {
            const i64 at = pair_of(i) * F + row0;
            *(u32*)(zq + at + column) = packed;
            if (column == 0) {
                zd[at / 32] = scale;
                zsums[at / 32] = sum;
            }
        }
    }
#endif
}

#endif
#ifdef DOWN

#ifndef ROWS
#define ROWS 4
#endif
constexpr i32 UNITS = MANY ? STAGES : 2; // a warp's rows: units, one after the other

template <Type type>
DEVICE void issue(u8* stage, const u8* part, i32 row, i32 D) {
    constexpr i32 BYTES = row_bytes_of(type, COLS);
    if (row < D)
        stage_rows<ROWS * BYTES, BYTES>(stage, part + (i64)row * BYTES, min(ROWS, D - row) * BYTES);
    copies_commit();
}

// A warp's rows of one down matrix of the type: `begin` loads them, `finish` makes ys, the products with z. base: its
// shared memory, as said above.
template <Type type>
struct Rank {
    typedef Packed<type, COLS, ROWS> P;
    static constexpr i32 ROW_BYTES = row_bytes_of(type, COLS), TERM_BYTES = (ROWS * COLS / 8 + 15) / 16 * 16;
    u8* const base;
    const u8* const part;
    i32 row0, D, stage_bytes;

    __device__ u8* stage(i32 i) const {
        return base + shared_input_bytes<type>(COLS) + TERM_BYTES + i % STAGES * stage_bytes;
    }
    __device__ void begin() const {
#pragma unroll
        for (i32 i = 0; i < STAGES; i++)
            issue<type>(stage(i), part, row0 + i * ROWS, D);
    }
    // z: row `row` of the first halves' results. With `keep` the stages stay as they are, for another row.
    template <bool keep = false>
    __device__ void finish(const Input& z, i32 row, float* ys) const {
        // All of a row of activations is in registers, straight from global memory, or else in shared memory.
        constexpr bool IN_REGISTERS = P::APPLIES || (!is_float(type) && COLS <= 1024 * n_held(type, COLS));
        const i32 lane = threadIdx.x % WARP;
        float* const terms = (float*)(base + shared_input_bytes<type>(COLS));
        Input input = row_of(z, row, COLS);
        if constexpr (!IN_REGISTERS) {
            input = shared_input<type>(base, COLS);
            copy_input<type>(input, 0, z, row, COLS, lane, WARP);
        }
        __syncwarp();
        typename HeldOf<type>::Block held[P::APPLIES ? P::HELD : n_held(type, COLS)];
        float ds[P::STEPS];
        if constexpr (P::APPLIES)
            hold_packed<type, COLS, ROWS>(input, held, ds);
        else if constexpr (!is_float(type))
            hold_activations<has_halves(type)>(input, COLS, held);
        const i32 token[1] = {0};
#pragma unroll
        for (i32 i = 0; i < UNITS; i++) {
            const i32 first = row0 + i * ROWS, offset = skew_of<ROW_BYTES>(part + (i64)first * ROW_BYTES);
            if (!keep)
                stage_wait<STAGES - 1>();
            float acc[ROWS] = {};
            if constexpr (P::APPLIES)
                multiply_packed<type, COLS, ROWS>(acc, stage(i), offset, held, ds, terms);
            else
                multiply<type, ROWS, 1>(acc, stage(i), offset, COLS, input, held, token, 1);
            const float y = fold_rows(acc);
            if (lane % (WARP / ROWS) == 0 && (!keep || first + lane / (WARP / ROWS) < D))
                ys[i * ROWS + lane / (WARP / ROWS)] = y;
            __syncwarp(); // the stage and the terms are free
            if (keep)
                continue;
            if (i + STAGES < UNITS)
                issue<type>(stage(i), part, first + STAGES * ROWS, D);
            else
                copies_commit();
        }
    }
};

#if !MANY

#ifdef BESIDE_DOWN
constexpr i32 RANKS = USED + 1;
#else
constexpr i32 RANKS = USED;
#define BESIDE_DOWN DOWN
#endif

KERNEL __launch_bounds__(RANKS * WARP) down_one(const u8* active, const i32* n_active, const float* weights,
                                                i32 D, const float* z, const i8* zq, const float* zd, const i32* zsums,
                                                float* x, i32 add, const u8* beside, const float* row_scale,
                                                i32 stage_bytes) {
    __shared__ float ys[RANKS][UNITS * ROWS], ws[RANKS];
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i32 row0 = blockIdx.x * UNITS * ROWS, row = row0 + threadIdx.x;
    const i32 input_bytes = shared_input_bytes<DOWN>(COLS) + Rank<DOWN>::TERM_BYTES;
    u8* const base = shared + warp * (input_bytes + STAGES * stage_bytes);
    const bool valid = threadIdx.x < UNITS * ROWS && row < D, is_beside = RANKS > USED && warp == USED;
    dependency_release();
    // The source of the down part, its target, and whether there is such a record: as fetch_record, no more than needed.
    __shared__ u64 words[RANKS][3];
    if (!is_beside && lane < 2)
        words[warp][lane] = load_fresh((const u64*)(active + (i64)warp * 64) + (lane ? 5 : 2));
    else if (lane == 2)
        words[warp][2] = !is_beside && warp < load_fresh(n_active);
    __syncwarp();
    const bool active_rank = words[warp][2] != 0;
    const u8* const target = active_rank ? (const u8*)words[warp][1] : nullptr;
    const Rank<DOWN> rank{base, target ? target : (const u8*)words[warp][0], row0, D, stage_bytes};
    const Rank<BESIDE_DOWN> last{base, beside, row0, D, stage_bytes};
    if (!is_beside && (!active_rank || target)) // gate_up writes what enters a slot; the rest is there already
        dependency_wait();
    if (active_rank)
        rank.begin();
    if (is_beside)
        last.begin();
    fill_grids<DOWN, BESIDE_DOWN>();
    dependency_wait();
    const float old = add && valid ? x[row] : 0.0f;
    if (lane == 0)
        ws[warp] = active_rank ? weights[warp] : is_beside && row_scale ? *row_scale : 0.0f;
    const Input input = global_input(z, zq, zd, zsums);
    if (active_rank)
        rank.finish(input, warp, ys[warp]);
    else if (is_beside)
        last.finish(input, warp, ys[warp]);
    else if (lane < UNITS * ROWS) // a step that does nothing has an empty table
        ys[warp][lane] = 0.0f;
    __syncthreads();
    if (valid) {
        float r = 0.0f;
#pragma unroll
        for (i32 a = 0; a < USED; a++)
            r = __fmaf_rn(ws[a], ys[a][threadIdx.x], r);
        r = add ? old + r : r;
        if (RANKS > USED)
            r = r + (row_scale ? ws[RANKS - 1] * ys[RANKS - 1][threadIdx.x] : ys[RANKS - 1][threadIdx.x]);
        x[row] = r;
    }
}

#else

KERNEL __launch_bounds__(256) down(const u8* active, const i32* n_active, const i32* pairs, i32 D, const float* z,
                                   const i8* zq, const float* zd, const i32* zsums, float* y, i32 stage_bytes) {
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    const i32 row0 = (blockIdx.x * n_warps + warp) * UNITS * ROWS;
    dependency_release();
    __shared__ u64 words[RECORD_WORDS];
    fetch_record(words, active, n_active, blockIdx.y, threadIdx.x); // complete when gate_up began
    __syncthreads();
    ActiveExpert record;
    const bool works = read_record(words, record) && row0 < D;
    const i32 input_bytes = shared_input_bytes<DOWN>(COLS) + Rank<DOWN>::TERM_BYTES;
    u8* const base = shared + warp * (input_bytes + STAGES * stage_bytes);
    const Rank<DOWN> rank{base, record.target[2] ? record.target[2] : record.source[2], row0, D, stage_bytes};
    if (works && record.target[2]) // gate_up writes what enters a slot; the rest is there already
        dependency_wait();
    if (works)
        rank.begin();
    fill_grids<DOWN>();
    dependency_wait();
    if (!works)
        return;
    const Input input = global_input(z, zq, zd, zsums);
    stage_wait<0>();
    for (i32 i = 0; i < record.count; i++) {
        const i32 pair = pairs[record.first + i];
        rank.finish<true>(input, pair, y + (i64)pair * D + row0);
    }
}

KERNEL combine(const float* y, const float* weights, i32 n_used, i32 D, float* x, i32 add) {
    const i32 i = blockIdx.x * blockDim.x + threadIdx.x;
    const i64 t = blockIdx.y;
    dependency_release();
    dependency_wait();
    if (i >= D)
        return;
    float r = 0.0f;
#pragma unroll 8
    for (i32 a = 0; a < n_used; a++)
        r = __fmaf_rn(weights[t * n_used + a], y[(t * n_used + a) * D + i], r);
    x[t * D + i] = add ? x[t * D + i] + r : r;
}

#endif
#endif
