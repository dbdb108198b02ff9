// The work of attention of few rows: which tokens read the cache together, and the tiles that a block of threads visits.
// attention.cu has the macros. Tiles of a split lie in a row; so do the splits of all chunks, which the workers of a kv head
// take in turns.
#pragma once

#include "kv.cuh"
#include "splits.cuh"

constexpr i32 BLOCK_TILES = KV_BLOCK / KV_TILE; // of a block of the cache

// Neighboring tokens of one sequence whose splits are alike, as many as fit in ROWS, read its cache together.
struct Chunk {
    i32 first, n, sequence;    // first token, tokens
    i32 lowest, last, fresh;   // smallest and largest position; the smallest that this step stores
    i32 blocks, splits;        // of a split; up to the last position
};

// What a worker visits: splits worker, worker + n_workers ... of the chunks' splits in a row, tile by tile.
struct Cursor {
    i32 chunk, split, block, end; // the last two in tiles
};

DEVICE void seek(Cursor& at, const Chunk* chunks, i32 n_chunks) {
    while (at.chunk < n_chunks && at.split >= chunks[at.chunk].splits)
        at.split -= chunks[at.chunk++].splits;
    if (at.chunk < n_chunks) {
        const i32 tiles = chunks[at.chunk].blocks * BLOCK_TILES;
        at.block = (first_split(chunks[at.chunk].lowest) + at.split) * tiles;
        at.end = min(at.block + tiles, chunks[at.chunk].last / KV_TILE + 1);
        if (WINDOW)
            at.block = max(at.block, window_begin(chunks[at.chunk].lowest) / KV_TILE);
    }
}

// Whether the next tile begins another split.
DEVICE bool advance(Cursor& at, i32 n_workers, const Chunk* chunks, i32 n_chunks) {
    if (++at.block < at.end)
        return false;
    at.split += n_workers;
    seek(at, chunks, n_chunks);
    return true;
}

DEVICE i32 fresh_of(const i32* sequences, const i32* last, i32 T, i32 t) {
    i32 fresh = last[t];
    for (i32 i = 0; i < T; i++)
        if (sequences[i] == sequences[t])
            fresh = min(fresh, last[i]);
    return fresh;
}

DEVICE void count_splits(Chunk& chunk) {
    chunk.splits = count_splits(chunk.last);
    if (WINDOW)
        chunk.splits += first_split(chunk.last) - first_split(chunk.lowest);
}

// By the block's first warp; all of its lanes get how many there are.
DEVICE i32 find_chunks(Chunk* chunks, const i32* sequences, const i32* last, i32 T, i32 group) {
    const i32 lane = threadIdx.x % WARP;
    const i32 fresh = lane < T ? fresh_of(sequences, last, T, lane) : 0;
    i32 n = T;
    if (2 * group > ROWS) { // none has two tokens
        if (lane < T)
            chunks[lane] = {lane, 1, sequences[lane], last[lane], last[lane], fresh, split_blocks(last[lane]), 0};
    } else {
        n = 0;
#pragma unroll 1
        for (i32 t = 0; t < T; t++) {
            const i32 position = last[t], blocks = split_blocks(position), fresh_t = __shfl_sync(FULL_WARP, fresh, t);
            Chunk& chunk = chunks[max(n - 1, 0)];
            const bool joins = t > 0 && sequences[t] == chunk.sequence && blocks == chunk.blocks &&
                               (chunk.n + 1) * group <= ROWS &&
                               (!WINDOW || position == chunk.last + 1); // between windows apart there may be no blocks
            __syncwarp();
            n += !joins;
            if (lane == 0 && joins) {
                chunk.n++;
                chunk.lowest = min(chunk.lowest, position);
                chunk.last = max(chunk.last, position);
            } else if (lane == 0) {
                chunks[n - 1] = {t, 1, sequences[t], position, position, fresh_t, blocks, 0};
            }
            __syncwarp();
        }
    }
    __syncwarp();
    if (lane < n)
        count_splits(chunks[lane]);
    return n;
}
