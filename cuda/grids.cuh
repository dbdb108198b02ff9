// The grids of the IQ2 and IQ3 types (engine/formats/grids.h), and weights of their entries.
//
// A table is a static array of the kernels that read it: in global memory, of which the first-level cache keeps its 1 to 4
// KiB (IQ2), 512 or 1,024 bytes (IQ3). All lanes read it at addresses of their own, which constant memory would serve one
// after the other. An entry is kept as selectors of __byte_perm, a nibble a weight.
#pragma once

#include "grids.h"
#include "types.cuh"

template <class T, i32 entries>
struct Grid {
    T entry[entries];
};

// Codes of eight weights, two bits each, to nibbles.
template <i32 entries>
DEVICE constexpr Grid<u32, entries> nibbles(const u16 (&grid)[entries]) {
    Grid<u32, entries> made{};
    for (i32 e = 0; e < entries; e++)
        for (i32 k = 0; k < 8; k++) made.entry[e] |= (u32)(grid[e] >> (2 * k) & 3) << (4 * k);
    return made;
}

// The same in bits 1 and 2 of nibbles: weights 3, 7, 2, 6, 1, 5, 0, 4 (Iq2Term of single.cuh).
template <i32 entries>
DEVICE constexpr Grid<u32, entries> spread(const u16 (&grid)[entries]) {
    Grid<u32, entries> made{};
    for (i32 e = 0; e < entries; e++)
        for (i32 m = 0; m < 4; m++)
            made.entry[e] |= (u32)(grid[e] >> (6 - 2 * m) & 3) << (8 * m + 1) | (u32)(grid[e] >> (14 - 2 * m) & 3) << (8 * m + 5);
    return made;
}

// Magnitudes of four weights, which nibbles name, as bytes from the last to the first.
template <i32 entries, i32 n>
DEVICE constexpr Grid<u32, entries> bytes_of(const u16 (&grid)[entries], const u8 (&level)[n]) {
    Grid<u32, entries> made{};
    for (i32 e = 0; e < entries; e++)
        for (i32 m = 0; m < 4; m++) made.entry[e] |= (u32)level[grid[e] >> (12 - 4 * m) & 15] << (8 * m);
    return made;
}

// Magnitudes as two words of bytes.
struct Levels {
    u32 low, high;
};
template <i32 n>
DEVICE constexpr Levels packed(const u8 (&level)[n]) {
    u32 words[2] = {};
    for (i32 i = 0; i < n; i++) words[i / 4] |= (u32)level[i] << (i % 4 * 8);
    return {words[0], words[1]};
}

DEVICE u32 half_word_at(const u8* raw, u32 at) { return *(const u16*)(raw + at); }
DEVICE u32 word_at(const u8* raw, u32 at) { return half_word_at(raw, at) | half_word_at(raw, at + 2) << 16; } // at even

// Seven sign bits in each byte, with their parity as the eighth.
DEVICE u32 with_parity(u32 seven) {
    // Shifts to the left are multiplications. What comes in from the byte below does not reach the top bits.
    u32 odd = seven ^ (seven << 4);
    odd ^= odd << 2;
    odd ^= odd << 1;
    return and_or(odd, 0x80808080u, seven);
}

// The signs of 32 weights of four times seven bits.
DEVICE u32 four_sevens(u32 v) {
    return with_parity((v & 0x7fu) | ((v << 1) & 0x7f00u) | ((v << 2) & 0x7f0000u) | ((v << 3) & 0x7f000000u));
}

// Lazy: tables of types that a module does not have are not made, which would be a third of the compiler's time.
template <Type type, class Lazy = void>
struct GridBlock;

DEVICE constexpr bool has_grid(Type type) {
    return type == IQ2_XXS || type == IQ2_XS || type == IQ2_S || type == IQ3_XXS || type == IQ3_S;
}

// The entries as the terms of one token take them (single.cuh), in shared memory: of the first-level cache a warp's 32
// addresses take as many cycles as the table has lines.
template <Type type>
DEVICE u32* entries() {
    __shared__ u32 made[sizeof(GridBlock<type>::ENTRIES) / 4];
    return made;
}

// An entry by its offset in bytes.
template <Type type>
DEVICE u32 entry_at(u32 offset) { return *(const u32*)((const u8*)entries<type>() + offset); }

// `more` + `by` times byte i of w, by the units that multiply: those that shift, mask and permute are what IQ2 waits for.
DEVICE u32 times_byte(u32 w, i32 i, u32 by, u32 more = 0) { return (u32)dot4_unsigned(w, (i32)(by << 8 * i), (i32)more); }

template <Type type>
DEVICE void fill_entries() {
    if constexpr (has_grid(type)) {
        constexpr i32 N = sizeof(GridBlock<type>::ENTRIES) / 4;
        for (i32 i = threadIdx.x; i < N; i += blockDim.x)
            entries<type>()[i] = GridBlock<type>::ENTRIES.entry[i];
    }
}

// The whole block, before its terms of one token of these types.
template <Type... types>
DEVICE void fill_grids() {
    (fill_entries<types>(), ...);
    if constexpr ((has_grid(types) || ...))
        __syncthreads();
}

// Block s of 32 weights in the superblock at `at`, an even address, a specialization each.
//   CODES     the entries as grids.h has them
//   LEVELS    its magnitudes
//   SHRINK    what scales are multiplied by, a power of two
//   scales    four bits of each half (HALVES), or four
//   load      the others are read of what it has read
//   entry     selectors of weights 16 * half + 4 * c ..., four of them, in the low 16 bits
//   signs     a bit for each weight
//   ENTRIES    what `entries` has; spread_entry, magnitudes: of its i-th entry

template <class Lazy>
struct GridBlock<IQ2_XXS, Lazy> {
    static constexpr u16 CODES[] = {IQ2_XXS_GRID};
    static constexpr Grid<u32, 256> ENTRIES = spread(CODES);
    static constexpr Levels LEVELS = packed({IQ2_LEVELS});
    static constexpr float SHRINK = 0.125f;
    u32 index, signs;

    DEVICE u32 scales(const u8* raw, u32 at, u32 s) { return half_word_at(raw, at + 8 + 8 * s) >> 12; }
    DEVICE void load(GridBlock& g, const u8* raw, u32 at, u32 s) {
        g.index = word_at(raw, at + 2 + 8 * s);
        g.signs = four_sevens(word_at(raw, at + 6 + 8 * s));
    }
    DEVICE u32 entry(const GridBlock& g, u32 half, u32 c) {
        static constexpr Grid<u32, 256> GRID = nibbles(CODES);
        return GRID.entry[(g.index >> (16 * half + 8 * (c >> 1))) & 255] >> (16 * (c & 1));
    }
    DEVICE u32 spread_entry(const GridBlock& g, u32 i) {
        return entry_at<IQ2_XXS>(times_byte(g.index, i, 4));
    }
};

template <class Lazy>
struct GridBlock<IQ2_XS, Lazy> {
    static constexpr u16 CODES[] = {IQ2_XS_GRID};
    static constexpr Grid<u32, 512> ENTRIES = spread(CODES);
    static constexpr Levels LEVELS = packed({IQ2_LEVELS});
    static constexpr float SHRINK = 0.125f;
    u32 index[2], signs;

    DEVICE u32 scales(const u8* raw, u32 at, u32 s) { return raw[at + 66 + s]; }
    DEVICE void load(GridBlock& g, const u8* raw, u32 at, u32 s) {
        g.index[0] = word_at(raw, at + 2 + 8 * s);
        g.index[1] = word_at(raw, at + 6 + 8 * s);
        // Seven signs are the upper bits of each half word.
        g.signs = with_parity((__byte_perm(g.index[0], g.index[1], 0x7531) >> 1) & 0x7f7f7f7fu);
    }
    DEVICE u32 entry(const GridBlock& g, u32 half, u32 c) {
        static constexpr Grid<u32, 512> GRID = nibbles(CODES);
        return GRID.entry[(g.index[half] >> (16 * (c >> 1))) & 511] >> (16 * (c & 1));
    }
    DEVICE u32 spread_entry(const GridBlock& g, u32 i) {
        return entries<IQ2_XS>()[(g.index[i >> 1] >> (16 * (i & 1))) & 511];
    }
};

template <class Lazy>
struct GridBlock<IQ2_S, Lazy> {
    static constexpr u16 CODES[] = {IQ2_S_GRID};
    static constexpr Grid<u32, 1024> ENTRIES = spread(CODES);
    static constexpr Levels LEVELS = packed({IQ2_LEVELS});
    static constexpr float SHRINK = 0.125f;
    u32 index, high, signs;

    DEVICE u32 scales(const u8* raw, u32 at, u32 s) { return raw[at + 74 + s]; }
    DEVICE void load(GridBlock& g, const u8* raw, u32 at, u32 s) {
        g.index = word_at(raw, at + 2 + 4 * s);
        g.high = raw[at + 66 + s];
        g.signs = word_at(raw, at + 34 + 4 * s);
    }
    DEVICE u32 entry(const GridBlock& g, u32 half, u32 c) {
        static constexpr Grid<u32, 1024> GRID = nibbles(CODES);
        const u32 i = 2 * half + (c >> 1);
        return GRID.entry[((g.index >> (8 * i)) & 255) | ((g.high >> (2 * i)) & 3) << 8] >> (16 * (c & 1));
    }
    DEVICE u32 spread_entry(const GridBlock& g, u32 i) {
        return entry_at<IQ2_S>(times_byte(g.index, i, 4, (g.high << (10 - 2 * i)) & 0xc00u));
    }
};

template <class Lazy>
struct GridBlock<IQ3_XXS, Lazy> {
    static constexpr u16 CODES[] = {IQ3_XXS_GRID};
    static constexpr Grid<u32, 256> ENTRIES = bytes_of(CODES, {IQ3_XXS_LEVELS});
    static constexpr Levels LEVELS = packed({IQ3_XXS_LEVELS});
    static constexpr float SHRINK = 0.25f;
    u32 index[2], signs;

    DEVICE u32 scales(const u8* raw, u32 at, u32 s) { return half_word_at(raw, at + 68 + 4 * s) >> 12; }
    DEVICE void load(GridBlock& g, const u8* raw, u32 at, u32 s) {
        g.index[0] = word_at(raw, at + 2 + 8 * s);
        g.index[1] = word_at(raw, at + 6 + 8 * s);
        g.signs = four_sevens(word_at(raw, at + 66 + 4 * s));
    }
    DEVICE u32 entry(const GridBlock& g, u32 half, u32 c) {
        return CODES[(g.index[half] >> (8 * c)) & 255];
    }
    DEVICE u32 magnitudes(const GridBlock& g, u32 i) {
        return entry_at<IQ3_XXS>(times_byte(g.index[i >> 2], i & 3, 4));
    }
};

template <class Lazy>
struct GridBlock<IQ3_S, Lazy> {
    static constexpr u16 CODES[] = {IQ3_S_GRID};
    static constexpr Grid<u32, 512> ENTRIES = bytes_of(CODES, {IQ3_S_LEVELS});
    static constexpr Levels LEVELS = packed({IQ3_S_LEVELS});
    static constexpr float SHRINK = 1.0f;
    u32 index[2], high, signs;

    DEVICE u32 scales(const u8* raw, u32 at, u32 s) { return (raw[at + 106 + (s >> 1)] >> (4 * (s & 1))) & 15; }
    DEVICE void load(GridBlock& g, const u8* raw, u32 at, u32 s) {
        g.index[0] = word_at(raw, at + 2 + 8 * s);
        g.index[1] = word_at(raw, at + 6 + 8 * s);
        g.high = raw[at + 66 + s];
        g.signs = word_at(raw, at + 74 + 4 * s);
    }
    DEVICE u32 entry(const GridBlock& g, u32 half, u32 c) {
        return CODES[((g.index[half] >> (8 * c)) & 255) | ((g.high >> (4 * half + c)) & 1) << 8];
    }
    DEVICE u32 magnitudes(const GridBlock& g, u32 i) {
        return entries<IQ3_S>()[and_or(g.high << (8 - i), 0x100u, __byte_perm(g.index[i >> 2], 0, 0x4440u + (i & 3)))];
    }
};

// The magnitudes of four weights as bytes: GridBlock::entry.
template <Type type>
DEVICE u32 four_magnitudes(const GridBlock<type>& g, u32 half, u32 c) {
    constexpr Levels levels = GridBlock<type>::LEVELS;
    return __byte_perm(levels.low, levels.high, GridBlock<type>::entry(g, half, c));
}

// The factor of a scale that four bits stand for.
DEVICE u32 odd_factor(u32 scale) { return 2 * (scale & 15) + 1; }
