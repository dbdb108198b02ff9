// Where attention of small batches splits the positions that a row sees, counted in blocks of 64: into at most SPLITS
// (a macro) pieces of as many blocks, the last maybe shorter. With -DWINDOW=n (0: all) a row sees its last n positions;
// pieces then begin at multiples of a number of blocks that follows from the window alone, and a row's are counted from
// the first that it sees. engine/ops/cuda/attention.py counts them, too.
#pragma once

#include "ptx.cuh"

#ifndef WINDOW
#define WINDOW 0
#endif

#define INFINITE __int_as_float(0x7f800000)

constexpr float P_SCALE = 0x1p14f; // of probabilities: keeps them in halves clear of subnormals; cancels in o / l

constexpr i32 WINDOW_BLOCKS = (WINDOW + 62) / 64 + 1; // that a row sees, at most
constexpr i32 WINDOW_SPLIT = (WINDOW_BLOCKS - 2) / (SPLITS > 1 ? SPLITS - 1 : 1) + 1; // blocks
constexpr i32 MOST_SPLITS = WINDOW ? (WINDOW_BLOCKS + WINDOW_SPLIT - 2) / WINDOW_SPLIT + 1 : SPLITS;

DEVICE i32 clamped_position(i32 position, i32 max_blocks) { return min(max(position, 0), max_blocks * 64 - 1); }

// The first position that a row at this one sees.
DEVICE i32 window_begin(i32 position) { return WINDOW ? max(position - WINDOW + 1, 0) : 0; }

// Blocks of a split for a row whose last position is this one.
DEVICE i32 split_blocks(i32 position) { return WINDOW ? WINDOW_SPLIT : (position / 64 + SPLITS) / SPLITS; }

// A row's first split, counted from position 0.
DEVICE i32 first_split(i32 position) { return WINDOW ? window_begin(position) / (64 * WINDOW_SPLIT) : 0; }

DEVICE i32 count_splits(i32 position) {
    const i32 blocks = split_blocks(position);
    return (position / 64 + blocks) / blocks - first_split(position);
}
