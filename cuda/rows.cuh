// Products of a few consecutive rows of a matrix, by one warp, with rows of activations.
//
// The warp copies the whole byte range of its rows to its part of shared memory at once, whatever the format and
// wherever they lie (device memory or mapped host memory), and computes from there. A matrix is 16-byte aligned and so
// padded that its last 16-byte piece can be read whole; k is a multiple of 32 unless the type is a float one.
#pragma once

#include "arithmetic.cuh"
#include "single.cuh"

// --- weights --------------------------------------------------------------------------------------

// How far a row begins behind a 16-byte boundary.
template <i32 row_bytes>
DEVICE i32 skew_of(const u8* row) {
    return row_bytes % 16 ? (i32)((u64)row & 15) : 0;
}

// Start copying n_bytes from `rows` to `stage` (16-byte aligned). Returns where in the stage the first row begins.
// A stage has room for its rows and 32 bytes: what alignment adds on both sides, and a word that is read beyond.
// `most` is the largest n_bytes that a call may have, `row_bytes` what one row has: constants make it straight code.
template <i32 most, i32 row_bytes>
DEVICE i32 stage_rows(u8* stage, const u8* rows, i32 n_bytes) {
    const i32 skew = skew_of<row_bytes>(rows), start = 16 * (threadIdx.x % WARP);
    const u8* const from = rows - skew;
    const i32 end = skew + n_bytes;
    if (n_bytes == most) { // nearly always: nothing to check but the last piece
        constexpr i32 WHOLE = most / (16 * WARP) * (16 * WARP);
#pragma unroll
        for (i32 i = 0; i < WHOLE; i += 16 * WARP)
            copy16_async(stage + start + i, from + start + i);
#pragma unroll
        for (i32 i = WHOLE; i < most + (row_bytes % 16 ? 15 : 0); i += 16 * WARP)
            if (start + i < end)
                copy16_async(stage + start + i, from + start + i);
    } else {
#pragma unroll 1
        for (i32 i = start; i < end; i += 16 * WARP)
            copy16_async(stage + i, from + i);
    }
    return skew;
}

// Until at most `pending` of the warp's groups of copies are under way.
template <i32 pending>
DEVICE void stage_wait() {
    copies_wait<pending>();
    __syncwarp();
}

// --- activations ----------------------------------------------------------------------------------

// Rows of activations. For a float matrix: x [T, k]. Else q, d and sums of blocks of 32: block b of a row has its first
// 16 bytes at q + stride * b and the others `half` bytes further. In global memory, q [T, k] and d, sums [T, k / 32],
// that is 32 and 16; a row in shared memory has two planes (16 and k / 2), which 32 lanes read without bank conflicts.
struct Input {
    const float* x;
    i8* q;
    float* d;
    i32* sums;
    i32 stride, half;
};

DEVICE Input global_input(const float* x, const i8* q, const float* d, const i32* sums) {
    return {x, (i8*)q, (float*)d, (i32*)sums, 32, 16};
}

// The same from row t of k elements on.
DEVICE Input row_of(const Input& x, i64 t, i32 k) {
    return {x.x + t * k, x.q + t * k, x.d + t * (k / 32), x.sums + t * (k / 32), x.stride, x.half};
}

// `tokens` rows of k elements at `base`, 16-byte aligned.
template <Type type>
DEVICE Input shared_input(u8* base, i32 k, i32 tokens = 1) {
    return {(const float*)base, (i8*)base, (float*)(base + tokens * k), (i32*)(base + tokens * (k + k / 8)), 16, k / 2};
}

// Bytes of shared_input, a multiple of 16.
template <Type type>
DEVICE i32 shared_input_bytes(i32 k, i32 tokens = 1) {
    return (tokens * (is_float(type) ? k * 4 : k + k / 4) + 15) / 16 * 16;
}

template <bool with_first>
DEVICE void load_activations(const Input& x, i32 token, i32 k, i32 b, Activations& a) {
    const i8* q = x.q + (i64)token * k + x.stride * b;
    const uint4 low = *(const uint4*)q, high = *(const uint4*)(q + x.half);
    const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (i32 i = 0; i < 8; i++)
        a.q[i] = (i32)words[i];
    const i64 block = (i64)token * (k / 32) + b;
    a.d = x.d[block];
    a.sum = x.sums[block];
    if constexpr (with_first) {
        a.first = 0;
#pragma unroll
        for (i32 i = 0; i < 4; i++)
            a.first = __dp4a(a.q[i], 0x01010101, a.first);
    }
}

DEVICE void load_activations(const Input& x, i32 k, i32 b, SplitActivations& a) {
    const i8* const half = x.q + (b & 1) * x.half;
    const uint4 own = *(const uint4*)(half + x.stride * b), other = *(const uint4*)(half + x.stride * (b ^ 1));
    a.own[0] = (i32)own.x, a.own[1] = (i32)own.y, a.own[2] = (i32)own.z, a.own[3] = (i32)own.w;
    a.other[0] = (i32)other.x, a.other[1] = (i32)other.y, a.other[2] = (i32)other.z, a.other[3] = (i32)other.w;
    a.d = x.d[b];
    a.sum = (float)x.sums[b];
}

DEVICE void load_activations(const Input& x, i32, i32 b, QuadActivations& a) {
    const i8* const eight = x.q + (b >> 1 & 1) * x.half + 8 * (b & 1);
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
        const uint2 v = *(const uint2*)(eight + x.stride * (b ^ i));
        a.x[2 * i] = (i32)v.x, a.x[2 * i + 1] = (i32)v.y;
        a.start[i] = -__dp4a((i32)v.y, 0x04040404, __dp4a((i32)v.x, 0x04040404, 0)) << quad_shift((b ^ i) & 3);
    }
    a.d = x.d[b];
}

// The one row of activations as a lane keeps it for all rows of a type that the warp multiplies: its first N blocks.
template <Type type, Kind kind = BlockType<type>::KIND>
struct HeldOf {
    typedef Activations Block;
};
template <Type type>
struct HeldOf<type, Kind::PAIRS> {
    typedef SplitActivations Block;
};
template <Type type>
struct HeldOf<type, Kind::FOURS> {
    typedef QuadActivations Block;
};
template <class A, class B>
struct Same {
    static constexpr bool VALUE = false;
};
template <class A>
struct Same<A, A> {
    static constexpr bool VALUE = true;
};
// Whether what is held for rows of one type is what rows of the other take.
DEVICE constexpr bool held_alike(Type a, Type b) {
    return is_paired(a) == is_paired(b) && is_quad(a) == is_quad(b);
}

DEVICE void settle(Activations& a) {
#pragma unroll
    for (i32 i = 0; i < 8; i++)
        settle(a.q[i]);
    settle(a.d);
    settle(a.sum);
}

DEVICE void settle(SplitActivations& a) {
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
        settle(a.own[i]);
        settle(a.other[i]);
    }
    settle(a.d);
    settle(a.sum);
}

DEVICE void settle(QuadActivations& a) {
#pragma unroll
    for (i32 i = 0; i < 8; i++)
        settle(a.x[i]);
#pragma unroll
    for (i32 i = 0; i < 4; i++)
        settle(a.start[i]);
    settle(a.d);
}

// The barrier at the end of hold_... keeps their loads, with `settle`, above the wait for weights: a latency less.
template <bool with_first, i32 N>
DEVICE void hold_activations(const Input& x, i32 k, Activations (&held)[N]) {
#pragma unroll
    for (i32 i = 0; i < N; i++) {
        const i32 b = i * WARP + threadIdx.x % WARP;
        load_activations<with_first>(x, 0, k, b < k / 32 ? b : 0, held[i]);
    }
#pragma unroll
    for (i32 i = 0; i < N; i++)
        settle(held[i]);
    __syncwarp();
}

template <bool with_first, class H, i32 N>
DEVICE void hold_activations(const Input& x, i32 k, H (&held)[N]) { // lanes without a block have one of the same place
#pragma unroll
    for (i32 i = 0; i < N; i++) {
        const i32 b = i * WARP + threadIdx.x % WARP;
        load_activations(x, k, b < k / 32 ? b : b % 8, held[i]);
    }
#pragma unroll
    for (i32 i = 0; i < N; i++)
        settle(held[i]);
    __syncwarp();
}

// N: what registers allow.
DEVICE constexpr i32 n_held(Type type, i32 k) {
    return is_float(type) ? 1 : shares_bytes(type) ? (k > 3072 ? 4 : (k + 1023) / 1024) : k > 1024 ? 2 : 1;
}

// n_threads threads copy row t in global memory, quantized or for a float type x, to row `to_t` in shared memory.
template <Type type>
DEVICE void copy_input(const Input& to, i32 to_t, const Input& from, i64 t, i32 k, i32 thread, i32 n_threads) {
    if constexpr (is_float(type)) {
#pragma unroll 4
        for (i32 i = thread; i < k; i += n_threads)
            ((float*)to.x)[to_t * k + i] = from.x[t * k + i];
    } else {
        const i8* const q = from.q + t * k;
        i8* const to_q = to.q + to_t * k;
        const i64 blocks = t * (k / 32);
#pragma unroll 4
        for (i32 start = 0; start < k / 16; start += n_threads)
            if (const i32 i = start + thread; i < k / 16)
                *(uint4*)(to_q + (i & 1) * to.half + (i >> 1) * to.stride) = *(const uint4*)(q + 16 * i);
#pragma unroll 2
        for (i32 start = 0; start < k / 32; start += n_threads)
            if (const i32 i = start + thread; i < k / 32) {
                to.d[to_t * (k / 32) + i] = from.d[blocks + i];
                to.sums[to_t * (k / 32) + i] = from.sums[blocks + i];
            }
    }
}

// The whole block copies n floats to shared memory (16-byte aligned), asynchronously where alignment allows it.
DEVICE void copy_floats(float* to, const float* from, i32 n) {
    const i32 whole = (u64)from % 16 ? 0 : n / 4 * 4;
    for (i32 i = 4 * threadIdx.x; i < whole; i += 4 * blockDim.x)
        copy16_async(to + i, from + i);
    for (i32 i = whole + threadIdx.x; i < n; i += blockDim.x)
        to[i] = from[i];
}

// Four elements a lane of 128 consecutive ones, from element i of a row of k on (a block of the lane's is whole or
// absent): v, or (v * scale) * w with a norm; h, if any, gets the values that are quantized.
DEVICE void quantize_four(const Input& to, const float4& x, bool normed, const float4& w, float scale, float* h, i32 k,
                          i32 i) {
    float v[4] = {x.x, x.y, x.z, x.w};
    if (normed) {
        v[0] = (v[0] * scale) * w.x;
        v[1] = (v[1] * scale) * w.y;
        v[2] = (v[2] * scale) * w.z;
        v[3] = (v[3] * scale) * w.w;
    }
    float d;
    i32 sum;
    const u32 q = quantize4(v, d, sum);
    if (i < k) {
        const i32 b = i / 32;
        if (h)
            *(float4*)(h + i) = make_float4(v[0], v[1], v[2], v[3]);
        *(u32*)(to.q + b * to.stride + (i & 16 ? to.half : 0) + (i & 15)) = q;
        if (i % 32 == 0) {
            to.d[b] = d;
            to.sums[b] = sum;
        }
    }
}

// What quantize_four takes of a row.
DEVICE float4 four_of(const float* row, i32 k, i32 i) {
    return row && i < k ? *(const float4*)(row + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Quantize a row x of k elements (16-byte aligned), or (x * scale) * weight where there is a weight; h, if any, gets
// the values that are quantized. Four blocks of 32 a warp; the caller's warps are `first`, `first + step`, ...
DEVICE void quantize_row(const Input& to, const float* x, const float* weight, float scale, float* h, i32 k, i32 first,
                         i32 step) {
#pragma unroll 2
    for (i32 start = 128 * first; start < k; start += 128 * step) {
        const i32 i = start + 4 * (threadIdx.x % WARP);
        quantize_four(to, four_of(x, k, i), weight, four_of(weight, k, i), scale, h, k, i);
    }
}

// --- products -------------------------------------------------------------------------------------

template <Type type, i32 rows, i32 tokens>
DEVICE void multiply_block(float* acc, const u8* stage, i32 offset, i32 k, i32 b, const Input& x,
                           const Activations* held, const i32 (&token)[tokens], i32 n) {
    if constexpr (tokens == 1 && Single<type>::ARRANGED) {
        const i32 row_bytes = row_bytes_of(type, k);
        const bool alike = Single<type>::FIXED || row_bytes % 4 == 0; // known when it is compiled
        Activations loaded;
        if (!held)
            load_activations<has_halves(type)>(x, token[0], k, b, loaded);
        const Activations& a = held ? *held : loaded;
        Arranged arranged;
#pragma unroll
        for (i32 r = 0; r < rows; r++) {
            if (r == 0 || !alike)
                Single<type>::arrange(a, block_at<type>(offset + r * row_bytes, b), arranged);
            const float term = Single<type>::term(stage, offset + r * row_bytes, b, a, arranged);
            acc[r] = __fmaf_rn(a.d, term, acc[r]);
        }
        return;
    }
    Block w[rows];
#pragma unroll
    for (i32 r = 0; r < rows; r++)
        load_block<type>(stage, offset + r * row_bytes_of(type, k), b, w[r]);
#pragma unroll
    for (i32 t = 0; t < tokens; t++)
        if (tokens == 1 || t < n) {
            Activations loaded;
            if (!held)
                load_activations<has_halves(type)>(x, token[t], k, b, loaded);
            const Activations& a = held ? *held : loaded;
#pragma unroll
            for (i32 r = 0; r < rows; r++)
                acc[r * tokens + t] = __fmaf_rn(a.d, block_term<type>(w[r], a), acc[r * tokens + t]);
        }
}

// One token, and lanes that share bytes: acc[r] += the lane's terms of row r.
template <Type type, i32 rows, class H, i32 N>
DEVICE void multiply_shared(float* acc, const u8* stage, i32 offset, i32 k, const Input& x, const H (&held)[N]) {
    typedef typename HeldOf<type>::Block Own;
    const SharedTerm<type> term(stage, offset, k);
    auto add = [&](i32 i, const Own& a) {
        const bool valid = k % 1024 == 0 || i * WARP + (i32)threadIdx.x % WARP < k / 32;
#pragma unroll
        for (i32 r = 0; r < rows; r++) {
            const float made = term(r * row_bytes_of(type, k), i, valid, a);
            if (valid)
                acc[r] = __fmaf_rn(a.d, made, acc[r]);
        }
    };
    constexpr i32 HELD = Same<H, Own>::VALUE ? N : 0;
    if constexpr (HELD > 0)
#pragma unroll
        for (i32 i = 0; i < HELD; i++)
            add(i, held[i]);
#pragma unroll 2
    for (i32 i = HELD; i < (k + 1023) / 1024; i++) {
        const i32 b = i * WARP + threadIdx.x % WARP;
        Own a;
        load_activations(x, k, b < k / 32 ? b : b % 8, a);
        add(i, a);
    }
}

// acc[r * tokens + t] += the lane's terms of row r of the stage and of activation row token[t], for t < n. k is a
// compile-time constant; with one token, the first N blocks are `held` if they are of the type's kind.
template <Type type, i32 rows, i32 tokens, class H, i32 N>
DEVICE void multiply(float* acc, const u8* stage, i32 offset, i32 k, const Input& x, const H (&held)[N],
                     const i32 (&token)[tokens], i32 n) {
    const i32 lane = threadIdx.x % WARP;
    if constexpr (shares_bytes(type) && tokens == 1) {
        multiply_shared<type, rows>(acc, stage, offset, k, x, held);
    } else if constexpr (is_float(type)) {
#pragma unroll 8
        for (i32 i = lane; i < k; i += WARP) {
            float w[rows];
#pragma unroll
            for (i32 r = 0; r < rows; r++)
                w[r] = weight_of<type>(stage + offset + r * row_bytes_of(type, k), i);
#pragma unroll
            for (i32 t = 0; t < tokens; t++)
                if (tokens == 1 || t < n) {
                    const float v = x.x[(i64)token[t] * k + i];
#pragma unroll
                    for (i32 r = 0; r < rows; r++)
                        acc[r * tokens + t] = __fmaf_rn(w[r], v, acc[r * tokens + t]);
                }
        }
    } else {
        constexpr i32 HELD = tokens == 1 && Same<H, Activations>::VALUE ? N : 0;
        if constexpr (HELD > 0)
#pragma unroll
            for (i32 i = 0; i < HELD; i++)
                if ((i + 1) * 1024 <= k || i * WARP + lane < k / 32)
                    multiply_block<type, rows, tokens>(acc, stage, offset, k, i * WARP + lane, x, &held[i], token, n);
#pragma unroll 2
        for (i32 i = HELD; i < (k + 1023) / 1024; i++)
            if (k % 1024 == 0 || i * WARP + lane < k / 32)
                multiply_block<type, rows, tokens>(acc, stage, offset, k, i * WARP + lane, x, nullptr, token, n);
    }
}

DEVICE constexpr i32 common_divisor(i32 a, i32 b) { return b ? common_divisor(b, a % b) : a; }

// Rows of k columns in blocks of 32 that leave lanes without work are taken `rows` together: so many make whole warps.
template <Type type, i32 k, i32 rows>
struct Packed {
    static constexpr i32 BLOCKS = k / 32;
    static constexpr i32 HELD = BLOCKS / common_divisor(BLOCKS, WARP); // blocks of activations that a lane meets
    static constexpr bool APPLIES = !is_float(type) && BLOCKS % WARP && rows * BLOCKS % WARP == 0 && HELD <= 4;
    static constexpr i32 STEPS = (BLOCKS + WARP - 1) / WARP; // of the sum of a row
};

// What `multiply_packed` keeps in registers of the one row of activations.
template <Type type, i32 k, i32 rows, class H, i32 N>
DEVICE void hold_packed(const Input& x, H (&held)[N], float (&d)[Packed<type, k, rows>::STEPS]) {
    typedef Packed<type, k, rows> P;
    const i32 lane = threadIdx.x % WARP;
#pragma unroll
    for (i32 i = 0; i < N; i++) {
        const i32 b = (lane + i * WARP) % P::BLOCKS;
        if constexpr (shares_bytes(type))
            load_activations(x, k, b, held[i]);
        else
            load_activations<has_halves(type)>(x, 0, k, b, held[i]);
    }
#pragma unroll
    for (i32 i = 0; i < P::STEPS; i++)
        d[i] = lane + i * WARP < P::BLOCKS ? x.d[lane + i * WARP] : 0.0f;
#pragma unroll
    for (i32 i = 0; i < N; i++)
        settle(held[i]);
#pragma unroll
    for (i32 i = 0; i < P::STEPS; i++)
        settle(d[i]);
    __syncwarp();
}

// acc[r] = the lane's terms of row r. The blocks of all rows are dealt to the lanes without gaps, and their terms go to
// the lanes that add them by `terms`, shared memory for rows * k / 32 floats of the warp.
template <Type type, i32 k, i32 rows, class H, i32 N>
DEVICE void multiply_packed(float (&acc)[rows], const u8* stage, i32 offset, const H (&held)[N],
                            const float (&d)[Packed<type, k, rows>::STEPS], float* terms) {
    typedef Packed<type, k, rows> P;
    const i32 lane = threadIdx.x % WARP;
    constexpr i32 TASKS = rows * P::BLOCKS / WARP;
    float made[TASKS]; // all before the first is stored: a load could not go ahead of a store
#pragma unroll
    for (i32 i = 0; i < TASKS; i++) { // rows are contiguous, so is whatever K format: block `lane + i * WARP` of them all
        if constexpr (shares_bytes(type)) {
            made[i] = SharedTerm<type>(stage, offset, rows * k)(0, i, true, held[i % N]);
        } else {
            made[i] = single_term<type>(stage, offset, lane + i * WARP, held[i % N]);
        }
    }
#pragma unroll
    for (i32 i = 0; i < TASKS; i++)
        terms[lane + i * WARP] = made[i];
    __syncwarp();
#pragma unroll
    for (i32 i = 0; i < P::STEPS; i++)
#pragma unroll
        for (i32 r = 0; r < rows; r++)
            if (lane + i * WARP < P::BLOCKS)
                acc[r] = __fmaf_rn(d[i], terms[r * P::BLOCKS + lane + i * WARP], acc[r]);
}
