// Where attention of small batches splits the positions that a row sees, counted in blocks of 64: into at most SPLITS
// (a macro) pieces of as many blocks, the last maybe shorter.
#pragma once

#include "ptx.cuh"

#define INFINITE __int_as_float(0x7f800000)

DEVICE i32 clamped_position(i32 position, i32 max_blocks) { return min(max(position, 0), max_blocks * 64 - 1); }

// Blocks of a split for a row whose last position is this one.
DEVICE i32 split_blocks(i32 position) { return (position / 64 + SPLITS) / SPLITS; }

DEVICE i32 count_splits(i32 position) {
    const i32 blocks = split_blocks(position);
    return (position / 64 + blocks) / blocks;
}
