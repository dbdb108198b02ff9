// Where attention of small batches splits the positions of a sequence, counted in blocks of 64: a split is one block up
// to position 2048, two up to 8192, four up to 32768, then eight. Twin: `n_splits` of engine/ops/cuda/attention.py.
#pragma once

#include "ptx.cuh"

#define INFINITE __int_as_float(0x7f800000)

DEVICE i32 split_begin(i32 split) {
    return split < 32    ? split
           : split < 80  ? 32 + 2 * (split - 32)
           : split < 176 ? 128 + 4 * (split - 80)
                         : 512 + 8 * (split - 176);
}

DEVICE i32 split_of(i32 block) {
    return block < 32    ? block
           : block < 128 ? 32 + (block - 32) / 2
           : block < 512 ? 80 + (block - 128) / 4
                         : 176 + (block - 512) / 8;
}

DEVICE i32 clamped_position(i32 position, i32 max_blocks) { return min(max(position, 0), max_blocks * 64 - 1); }
