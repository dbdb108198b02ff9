// Copies of whole experts by warps: an expert's parts, gate, up and down, in pieces of 4 KiB (gather.cu, long_jobs.cu).
//
// Parts are aligned to 16 bytes, their sizes are even. A warp copies a piece with 8 loads of 16 bytes in flight a lane,
// and never waits for another.
#pragma once

#include "ptx.cuh"

#define LOADS 8
#define PIECE_BYTES (WARP * 16 * LOADS)
#define ALIGN_BYTES 256

DEVICE i64 aligned(i64 n) { return (n + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES; }

DEVICE int pieces_of(i64 n) { return (int)((n + PIECE_BYTES - 1) / PIECE_BYTES); }

// The part that piece `piece` of an expert lies in; `piece` becomes its number inside the part.
DEVICE int part_of(int& piece, const i64 (&bytes)[3]) {
    int part = 0;
    while (part < 2 && piece >= pieces_of(bytes[part]))
        piece -= pieces_of(bytes[part++]);
    return part;
}

// Bytes [0, min(n, PIECE_BYTES)) of a piece, by one warp.
DEVICE void copy_piece(u8* to, const u8* from, i64 n, int lane) {
    uint4 v[LOADS];
#pragma unroll
    for (int k = 0; k < LOADS; k++) {
        const int at = (k * WARP + lane) * 16;
        if (at + 16 <= n)
            v[k] = load_once16(from + at);
    }
#pragma unroll
    for (int k = 0; k < LOADS; k++) {
        const int at = (k * WARP + lane) * 16;
        if (at + 16 <= n)
            *(uint4*)(to + at) = v[k];
    }
    const i64 tail = n / 16 * 16;
    if (n < PIECE_BYTES && tail + lane * 2 < n)
        *(u16*)(to + tail + lane * 2) = *(const u16*)(from + tail + lane * 2);
}

// A piece of an expert to its place in staging memory. home: [3], where its parts lie.
DEVICE void stage_piece(u8* staging, i64 place, const u64* home, int piece, const i64 (&bytes)[3], int lane) {
    const i64 stride = aligned(bytes[0]) + aligned(bytes[1]) + aligned(bytes[2]);
    const int part = part_of(piece, bytes);
    u8* at = staging + place * stride;
    for (int p = 0; p < part; p++)
        at += aligned(bytes[p]);
    const i64 begin = (i64)piece * PIECE_BYTES;
    copy_piece(at + begin, (const u8*)home[part] + begin, bytes[part] - begin, lane);
}
