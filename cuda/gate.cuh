// The gate of attention's result. -DGATE=SOFTPLUS or SIGMOID (0: none), -DGATE_BY_HEAD=1 or 0. Twin: the end of
// `attention` of engine/ops/reference.py.
#pragma once

#include "arithmetic.cuh"

#define SOFTPLUS 1
#define SIGMOID 2

#ifndef GATE
#define GATE 0
#endif
#ifndef GATE_BY_HEAD
#define GATE_BY_HEAD 0
#endif

// A result times its gate; gate [T * H], or [T * H, HEAD_DIM] unless by head; head is t * H + h.
DEVICE float gated(float x, const float* gate, i64 head, i32 dimension) {
    if (GATE == 0)
        return x;
    const float g = gate[GATE_BY_HEAD ? head : head * HEAD_DIM + dimension];
    return x * (GATE == SOFTPLUS ? softplus(g) : sigmoid(g));
}
