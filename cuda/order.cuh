// Floats as integers of the same order, for selections. Twin of the order: `top_experts` of engine/ops/reference.py.
#pragma once

#include "ptx.cuh"

// Larger floats give larger integers; -0 equals +0; NaN is 1, below all numbers, and 0 stands for nothing.
DEVICE u32 order_of(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return x != x ? 1 : bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEVICE float value_of(u32 order) {
    return __uint_as_float(order == 1 ? 0x7fc00000u : order >> 31 ? order ^ 0x80000000u : ~order);
}
