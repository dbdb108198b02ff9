// What the expert FFNs of one token (experts.cu) and of several (several.cu, tiled.cu) have in common.
//
// An expert that a step uses is a record of 64 bytes in `active`, n_active[0] of them:
//   u64 source[3]        where gate, up and down are read, which may be host memory
//   u64 target[3]        where they are written, too, as they enter a slot; 0: nowhere
//   i32 expert
//   i32 first, count     pairs[first .. first + count]: the (token, rank) that use it, as t * n_used + a
//   i32 job              above 0: of the CPU, or its last rows of gate and up are (jobs.cuh, several_jobs.cuh); below 0, with GUESSES: it misses, and
//                        where it may have landed (landing.cuh); 0: neither
// Sources and targets are 16-byte aligned and padded to 16.
//
// Macros of both.
//   GATE, UP, DOWN   types of the matrices; GATE and UP are both float or neither
//   DOWN_FLOAT       1: z are floats, else they are in 8 bits
//   COLS             columns: D in first halves, F in second ones
//   GELU             1: the activation is gelu, else silu
//   JOBS             1: experts of one token may be the CPU's (jobs.cuh): gate_up, down_one. 2: of several (several_jobs.cuh)
//   GUESSES          1: they may have landed before (landing.cuh): gate_up
//   WEIGHTED         1: products of gate are multiplied by gate_scales[expert]
//   BESIDE           1: there is one expert more, of the same F, that every token uses, of matrices beside_gate and
//                    beside_up. Its z follow those of the pairs
//   SHARED           the type of its gate, a float type: row_scale [T] = sigmoid(shared_gate h), from h [T, D] as floats
#pragma once

#include "rows.cuh"

#ifndef GELU
#define GELU 0
#endif
#ifndef BESIDE
#define BESIDE 0
#endif
#ifndef WEIGHTED
#define WEIGHTED 0
#endif
#ifndef JOBS
#define JOBS 0
#endif
#ifndef GUESSES
#define GUESSES 0
#endif

struct ActiveExpert {
    const u8* source[3];
    u8* target[3];
    i32 expert, first, count, job;
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
    record.job = (i32)(words[7] >> 32);
    return words[RECORD_WORDS - 1] != 0;
}

// Words of a record, each in a lane. All warps begin with the same few records: a load each, not one for every field.
DEVICE u64 record_word(const u8* active, i32 i) {
    const i32 lane = threadIdx.x % WARP;
    return lane < 8 ? load_fresh((const u64*)(active + (i64)i * 64) + lane) : 0;
}

DEVICE u64 word_of(u64 record, i32 i) { return __shfl_sync(FULL_WARP, record, i); }

// Uses of an expert: pairs[first .. first + count].
struct Uses {
    i32 first, count;
};

DEVICE Uses uses_of(u64 record) { return {(i32)(word_of(record, 6) >> 32), (i32)word_of(record, 7)}; }

// All of them, at most 32, a lane each, by one load: a use that looked its pair up by itself would wait for that, too.
DEVICE i32 own_pair(const i32* pairs, const Uses& uses) {
    const i32 lane = threadIdx.x % WARP;
    return lane < uses.count ? load_fresh(pairs + uses.first + lane) : 0;
}

#ifdef GATE

DEVICE float activate(float x) { return GELU ? gelu(x) : silu(x); }

// 16 bytes each, consecutive; none where there is nothing to copy.
struct Pieces {
    u8* to;
    const u8* from;
    i64 n;
};

// Every thread has UNROLL reads under way and waits for all of them. To begin the next one when the first has come needs no more
// registers, but the compiler then has one counter for all of them, so that a thread has one read under way. Several tokens miss
// more experts at once: more reads only make a queue then, in which the CPU's answers wait.
DEVICE void copy_pieces(const Pieces& a, const Pieces& b, i32 block, i32 n_blocks) {
    constexpr i32 UNROLL = (JOBS == 2 ? 2 : 4) / (WARPS > 8 ? WARPS / 8 : 1);
    const i64 n = a.n + b.n, step = (i64)n_blocks * blockDim.x;
    const u8* const b_from = b.from - 16 * a.n; // both are addressed by the index among all
    u8* const b_to = b.to - 16 * a.n;
    auto load = [&](i64 i) {
        const u8* const from = (i < a.n ? a.from : b_from) + 16 * i;
        return GUESSES ? load_shared16(from) : load_once16(from);
    };
    auto store = [&](i64 i, const uint4& v) { *(uint4*)((i < a.n ? a.to : b_to) + 16 * i) = v; };
    uint4 v[UNROLL];
    i64 at = (i64)block * blockDim.x + threadIdx.x;
    for (; at + (UNROLL - 1) * step < n; at += UNROLL * step) {
#pragma unroll
        for (i32 i = 0; i < UNROLL; i++)
            v[i] = load(at + i * step);
#pragma unroll
        for (i32 i = 0; i < UNROLL; i++)
            store(at + i * step, v[i]);
    }
#pragma unroll
    for (i32 i = 0; i < UNROLL - 1; i++)
        if (at + i * step < n)
            v[i] = load(at + i * step);
#pragma unroll
    for (i32 i = 0; i < UNROLL - 1; i++)
        if (at + i * step < n)
            store(at + i * step, v[i]);
}
DEVICE void copy_part(u8* to, const u8* from, i64 n_bytes, i32 block, i32 n_blocks) {
    copy_pieces({to, from, (n_bytes + 15) / 16}, {}, block, n_blocks);
}

// The block's rows of gate and up, and where it may read them. A part that enters a slot is copied there first, in whole
// 16-byte pieces: the ones at both ends belong to other blocks too, which write the same bytes.
struct OwnRows {
    const u8 *gate, *up;
};
DEVICE Pieces own_pieces(const u8* source, u8* target, i64 offset, i32 n_bytes) {
    const i64 from = offset & ~(i64)15;
    return target ? Pieces{target + from, source + from, (offset - from + n_bytes + 15) / 16} : Pieces{};
}
DEVICE OwnRows own_rows(const u8* const (&source)[2], u8* const (&target)[2], i32 row0, i32 rows, i32 gate_bytes, i32 up_bytes) {
    const i64 gate = (i64)row0 * gate_bytes, up = (i64)row0 * up_bytes;
    if (target[0] || target[1])
        copy_pieces(own_pieces(source[0], target[0], gate, rows * gate_bytes),
                    own_pieces(source[1], target[1], up, rows * up_bytes), 0, 1);
    return {(target[0] ? target[0] : source[0]) + gate, (target[1] ? target[1] : source[1]) + up};
}

// The down parts that enter slots, of all records: by block `block` of n_blocks.
DEVICE void copy_downs(const u8* active, i32 n_active, i64 down_bytes, i32 block, i32 n_blocks) {
    const i32 lane = threadIdx.x % WARP;
    for (i32 i = 0; i < n_active; i += WARP) {
        const u64* const parts = (const u64*)(active + (i64)(i + lane) * 64);
        const bool enters = i + lane < n_active && load_fresh(parts + 5);
        for (u32 left = __ballot_sync(FULL_WARP, enters); left; left &= left - 1) {
            const u64* const found = (const u64*)(active + (i64)(i + __ffs((i32)left) - 1) * 64);
            copy_part((u8*)load_fresh(found + 5), (const u8*)load_fresh(found + 2), down_bytes, block, n_blocks);
        }
    }
}

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

// The products of some rows with gate and up, [count, 33] each: `rows` rows of each token that are there.
struct Halves {
    const float (*gs)[33];
    const float (*us)[33];
    i32 count, rows;

    __device__ float z(i32 t, i32 row) const { return activate(gs[t][row]) * us[t][row]; }
};

// Where z [rows, F] are stored: floats, or 8 bits.
struct Z {
    float* z;
    i8* q;
    float* d;
    i32* sums;
    i32 F;
};

// z of 32 rows of the matrices from row0 on, of one token, by the first warp of a block: row `place` of Z.
DEVICE void store_one(const Halves& made, const Z& to, i64 place, i32 row0) {
    const i32 lane = threadIdx.x % WARP;
    if (threadIdx.x >= WARP)
        return;
    float scale;
    i32 sum;
    const i32 value = quantize_one(made.z(0, lane), scale, sum);
    const i64 at = place * to.F + row0;
    to.q[at + lane] = (i8)value;
    if (lane == 0) {
        to.d[at / 32] = scale;
        to.sums[at / 32] = sum;
    }
}

// The same of any number of tokens, by `warps` warps; place(t): the row of Z. Floats may be of less than 32 rows.
template <i32 warps, class Place>
DEVICE void store_z(const Halves& made, const Z& to, const Place& place, i32 row0) {
#if DOWN_FLOAT
    for (i32 i = threadIdx.x; i < made.count * 32; i += warps * WARP)
        if (i % 32 < made.rows)
            to.z[place(i / 32) * to.F + row0 + i % 32] = made.z(i / 32, i % 32);
#else
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (i32 t0 = 4 * warp; t0 < made.count; t0 += 4 * warps) { // four tokens a warp, eight lanes each
        const i32 t = t0 + lane / 8, column = lane % 8 * 4;
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (t < made.count)
#pragma unroll
            for (i32 j = 0; j < 4; j++)
                v[j] = made.z(t, column + j);
        float scale;
        i32 sum;
        const u32 packed = quantize4(v, scale, sum);
        if (t < made.count) {
            const i64 at = place(t) * to.F + row0;
            *(u32*)(to.q + at + column) = packed;
            if (column == 0) {
                to.d[at / 32] = scale;
                to.sums[at / 32] = sum;
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

// A row of z as a warp keeps it while it multiplies rows of down matrices of the type.
template <Type type>
struct HeldRow {
    typedef Packed<type, COLS, ROWS> P;
    // All of it is in registers, straight from global memory, or else in shared memory.
    static constexpr bool IN_REGISTERS = P::APPLIES || (!is_float(type) && COLS <= 1024 * n_held(type, COLS));
    static constexpr i32 TERM_BYTES = (ROWS * COLS / 8 + 15) / 16 * 16;
    Input input;
    typename HeldOf<type>::Block held[P::APPLIES ? P::HELD : n_held(type, COLS)];
    float ds[P::STEPS];

    // Bytes that a warp needs at `base`, 16-byte aligned.
    static __device__ i32 base_bytes() { return shared_input_bytes<type>(COLS) + TERM_BYTES; }

    __device__ void take(const Input& z, i64 row, u8* base) {
        input = row_of(z, row, COLS);
        if constexpr (!IN_REGISTERS) {
            const Input from = input;
            input = shared_input<type>(base, COLS);
            __syncwarp(); // of the row before
            copy_input<type>(input, 0, from, 0, COLS, threadIdx.x % WARP, WARP);
        }
        __syncwarp();
        if constexpr (P::APPLIES)
            hold_packed<type, COLS, ROWS>(input, held, ds);
        else if constexpr (!is_float(type))
            hold_activations<has_halves(type)>(input, COLS, held);
    }

    // The products of ROWS rows at stage + offset: that of row r in the lanes from r * WARP / ROWS on.
    __device__ float products(const u8* stage, i32 offset, u8* base) const {
        float acc[ROWS] = {};
        if constexpr (P::APPLIES) {
            multiply_packed<type, COLS, ROWS>(acc, stage, offset, held, ds,
                                              (float*)(base + shared_input_bytes<type>(COLS)));
        } else {
            const i32 token[1] = {0};
            multiply<type, ROWS, 1>(acc, stage, offset, COLS, input, held, token, 1);
        }
        return fold_rows(acc);
    }
};

#endif
