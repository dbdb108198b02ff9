// Products of floats in about their own accuracy: each number in two parts of the tensor cores' 11 bits, the product
// of the two small parts dropped. Relative error about 2^-21.
#pragma once

#include "ptx.cuh"

// x = high + low, high of 11 significant bits.
DEVICE void split(float x, u32& high, u32& low) {
    high = __float_as_uint(x) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
}

// Fragments of m16n8k8, in two parts. a: (row g, column c), (g + 8, c), (g, c + 4), (g + 8, c + 4); b: (c, g),
// (c + 4, g); g = lane / 4, c = lane % 4. Which columns of a and rows of b are called c and c + 4 does not matter, if
// they are the same: neighbors are loaded together.
struct FragmentA {
    u32 high[4], low[4];
};

struct FragmentB {
    u32 high[2], low[2];
};

DEVICE FragmentA fragment_a(float a0, float a1, float a2, float a3) {
    FragmentA f;
    split(a0, f.high[0], f.low[0]);
    split(a1, f.high[1], f.low[1]);
    split(a2, f.high[2], f.low[2]);
    split(a3, f.high[3], f.low[3]);
    return f;
}

DEVICE FragmentB fragment_b(float b0, float b1) {
    FragmentB f;
    split(b0, f.high[0], f.low[0]);
    split(b1, f.high[1], f.low[1]);
    return f;
}

// d[i] [16, 8] += a[i / (N / NA)] [16, 8] b[i % NB] [8, 8] for i < n. A product waits for the one before it with the same
// sum, so the tiles take turns.
template <i32 N, i32 NA, i32 NB>
DEVICE void multiply_add(float (&d)[N][4], const FragmentA (&a)[NA], const FragmentB (&b)[NB], i32 n = N) {
    constexpr i32 EACH = N / NA;
#pragma unroll
    for (i32 i = 0; i < N; i++)
        if (i < n) mma_tf32(d[i], a[i / EACH].low, b[i % NB].high[0], b[i % NB].high[1]);
#pragma unroll
    for (i32 i = 0; i < N; i++)
        if (i < n) mma_tf32(d[i], a[i / EACH].high, b[i % NB].low[0], b[i % NB].low[1]);
#pragma unroll
    for (i32 i = 0; i < N; i++)
        if (i < n) mma_tf32(d[i], a[i / EACH].high, b[i % NB].high[0], b[i % NB].high[1]);
}
