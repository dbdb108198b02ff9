// Products of a few consecutive rows of a matrix, by one warp, with rows of activations.
//
// The warp copies the whole byte range of its rows to its part of shared memory at once, whatever the format and
// wherever they lie (device memory or mapped host memory), and computes from there. A matrix is 16-byte aligned and so
// padded that its last 16-byte piece can be read whole; k is a multiple of 32 unless the type is a float one.
#pragma once

#include "arithmetic.cuh"
#include "blocks.cuh"

// --- weights --------------------------------------------------------------------------------------

// Start copying n_bytes from `rows` to `stage` (16-byte aligned). Returns where in the stage the first row begins.
// A stage has room for its rows and 32 bytes: what alignment adds on both sides, and a word that is read beyond.
// `most` is the largest n_bytes that a call may have: a constant makes it straight code.
template <i32 most>
DEVICE i32 stage_rows(u8* stage, const u8* rows, i32 n_bytes) {
    const i32 skew = (i32)((u64)rows & 15), start = 16 * (threadIdx.x % WARP);
    const u8* const from = rows - skew;
#pragma unroll 8
    for (i32 i = 0; i < most + 15; i += 16 * WARP)
        if (start + i < skew + n_bytes)
            copy16_async(stage + start + i, from + start + i);
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

// The first `N` blocks of a lane, kept in registers for all rows that the warp multiplies.
template <bool with_first, i32 N>
DEVICE void hold_activations(const Input& x, i32 k, Activations (&held)[N]) {
#pragma unroll
    for (i32 i = 0; i < N; i++) {
        const i32 b = i * WARP + threadIdx.x % WARP;
        if (b < k / 32)
            load_activations<with_first>(x, 0, k, b, held[i]);
    }
}

// So many are held of a row of k: two, which suffices for 2048 columns and leaves registers for the rest.
DEVICE constexpr i32 n_held(Type type, i32 k) { return is_float(type) ? 1 : k > 1024 ? 2 : 1; }

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

// Quantize a row x of k elements (16-byte aligned), or (x * scale) * weight where there is a weight; h, if any, gets
// the values that are quantized. Four blocks of 32 a warp; the caller's warps are `first`, `first + step`, ...
DEVICE void quantize_row(const Input& to, const float* x, const float* weight, float scale, float* h, i32 k, i32 first,
                         i32 step) {
    const i32 lane = threadIdx.x % WARP;
#pragma unroll 4
    for (i32 start = 128 * first; start < k; start += 128 * step) {
        const i32 i = start + 4 * lane;
        const bool valid = i < k;
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (valid) {
            const float4 a = *(const float4*)(x + i);
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
            if (weight) {
                const float4 w = *(const float4*)(weight + i);
                v[0] = (v[0] * scale) * w.x;
                v[1] = (v[1] * scale) * w.y;
                v[2] = (v[2] * scale) * w.z;
                v[3] = (v[3] * scale) * w.w;
            }
            if (h)
                *(float4*)(h + i) = make_float4(v[0], v[1], v[2], v[3]);
        }
        float d;
        i32 sum;
        const u32 q = quantize4(v, d, sum);
        if (valid) {
            const i32 b = i / 32;
            *(u32*)(to.q + b * to.stride + (i & 16 ? to.half : 0) + (i & 15)) = q;
            if (i % 32 == 0) {
                to.d[b] = d;
                to.sums[b] = sum;
            }
        }
    }
}

// --- products -------------------------------------------------------------------------------------

template <Type type, i32 rows, i32 tokens>
DEVICE void multiply_block(float* acc, const u8* stage, i32 offset, i32 k, i32 b, const Input& x,
                           const Activations* held, const i32 (&token)[tokens], i32 n) {
    Block w[rows];
#pragma unroll
    for (i32 r = 0; r < rows; r++)
        load_block<type>(stage, offset + r * row_bytes_of(type, k), b, w[r]);
#pragma unroll
    for (i32 t = 0; t < tokens; t++)
        if (tokens == 1 || t < n) {
            Activations loaded;
            if (!held)
                load_activations<type == Q6_K>(x, token[t], k, b, loaded);
            const Activations& a = held ? *held : loaded;
#pragma unroll
            for (i32 r = 0; r < rows; r++)
                acc[r * tokens + t] = __fmaf_rn(a.d, block_term<type>(w[r], a), acc[r * tokens + t]);
        }
}

// acc[r * tokens + t] += the lane's terms of row r of the stage and of activation row token[t], for t < n. k is a
// compile-time constant; the first N blocks of the one token are `held` where tokens is 1.
template <Type type, i32 rows, i32 tokens, i32 N>
DEVICE void multiply(float* acc, const u8* stage, i32 offset, i32 k, const Input& x, const Activations (&held)[N],
                     const i32 (&token)[tokens], i32 n) {
    const i32 lane = threadIdx.x % WARP;
    if constexpr (is_float(type)) {
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
        constexpr i32 HELD = tokens == 1 ? N : 0;
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
template <Type type, i32 k, i32 rows, i32 N>
DEVICE void hold_packed(const Input& x, Activations (&held)[N], float (&d)[Packed<type, k, rows>::STEPS]) {
    typedef Packed<type, k, rows> P;
    const i32 lane = threadIdx.x % WARP;
#pragma unroll
    for (i32 i = 0; i < N; i++)
        load_activations<type == Q6_K>(x, 0, k, (lane + i * WARP) % P::BLOCKS, held[i]);
#pragma unroll
    for (i32 i = 0; i < P::STEPS; i++)
        d[i] = lane + i * WARP < P::BLOCKS ? x.d[lane + i * WARP] : 0.0f;
}

// acc[r] = the lane's terms of row r. The blocks of all rows are dealt to the lanes without gaps, and their terms go to
// the lanes that add them by `terms`, shared memory for rows * k / 32 floats of the warp.
template <Type type, i32 k, i32 rows, i32 N>
DEVICE void multiply_packed(float (&acc)[rows], const u8* stage, i32 offset, const Activations (&held)[N],
                            const float (&d)[Packed<type, k, rows>::STEPS], float* terms) {
    typedef Packed<type, k, rows> P;
    const i32 lane = threadIdx.x % WARP;
#pragma unroll
    for (i32 i = 0; i < rows * P::BLOCKS / WARP; i++) {
        const i32 task = lane + i * WARP, r = task / P::BLOCKS;
        Block w;
        load_block<type>(stage, offset + r * row_bytes_of(type, k), task % P::BLOCKS, w);
        terms[task] = block_term<type>(w, held[i % N]);
    }
    __syncwarp();
#pragma unroll
    for (i32 i = 0; i < P::STEPS; i++)
#pragma unroll
        for (i32 r = 0; r < rows; r++)
            if (lane + i * WARP < P::BLOCKS)
                acc[r] = __fmaf_rn(d[i], terms[r * P::BLOCKS + lane + i * WARP], acc[r]);
}
