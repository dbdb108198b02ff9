// Blocks of 32 weights of 16 rows as the tensor cores take them, of every type that has blocks (wide.cuh).
//
// Rows are read in runs of 256 columns from shared memory. A run's integer weights go to registers block by block, its
// scales to shared memory, once, where all lanes of a row find them.
#pragma once

#include "rows.cuh"

constexpr i32 TILE_ROWS = 16, PARTS = 4; // rows that four warps share
constexpr i32 RUN = 8;                   // blocks of 32 that a warp takes at a time

// Runs of rows of k columns, which were copied to shared memory in pieces of 16 bytes: row r is at r * PITCH, and begins as
// far behind that as its address behind a 32-byte boundary, since memory is read in sectors of so many.
template <Type type, i32 k>
struct Runs {
    static constexpr i32 BYTES = row_bytes_of(type, 32 * RUN), ROW_BYTES = row_bytes_of(type, k);
    static constexpr i32 N = (k / 32 + RUN - 1) / RUN;
    static constexpr i32 ALIGN = common_divisor(common_divisor(BYTES, ROW_BYTES), 16); // of their addresses
    static constexpr i32 PIECES = (BYTES + 32 - ALIGN + 31) / 32 * 2;
    // Lanes read four bytes of eight rows, or where rows are aligned eight bytes of four rows, without bank conflicts.
    static constexpr i32 PITCH = ALIGN == 16 ? 16 * PIECES + (96 - 16 * PIECES % 64) % 64 : 16 * (PIECES | 1);
    static constexpr i32 STAGE_BYTES = TILE_ROWS * PITCH + 16; // a word is read beyond
};

// What a term needs besides its integer sums, of a row and a block. scale, minimum: as in Block, less the shift of q;
// SIXTEENS has its second scale in place of the minimum. factor: of the halves (HALVES), then those of the minimum or,
// without a minimum, the scale.
struct Constants {
    float2 scale[TILE_ROWS][RUN + 2];  // (2 and 1 keep the rows in different banks)
    float4 factor[TILE_ROWS][RUN + 1]; // in shared memory where a type has halves
};
DEVICE constexpr i32 constants_bytes(bool halves) { return (i32)(halves ? sizeof(Constants) : sizeof(Constants::scale)); }

// A run of 16 rows in the warp's shared memory.
struct Tile {
    const u8* rows;
    Constants* constants;
    u8* unpacked; // 4 KiB
    u32 from;     // the low bits of the address of the first row's run
    i32 last;     // the last row that there is; those behind it are copies of it
    i32 n_blocks;
};

// Where a row's run begins; for words at multiples of four bytes from there a multiple of four before them and the bits
// between; the same for words two bytes further (where runs begin at even addresses).
struct Place {
    i32 at;
    const u8* base;
    i32 shift;
    const u8* base2;
    i32 shift2;
};

// `ahead`: the first byte that the lane reads of what it reads in words.
template <class R>
DEVICE Place place_of(const Tile& tile, i32 r, i32 ahead) {
    const u32 address = tile.from + (R::ROW_BYTES % 32 ? (u32)(min(r, tile.last) * R::ROW_BYTES) : 0);
    const i32 at = r * R::PITCH + (i32)(address & 31), shift = (at & 3) * 8;
    const u8* const base = kept_shared(tile.rows + (at & ~3) + ahead);
    return {at, base, shift, R::ALIGN == 2 ? kept_shared(base + (shift & 16 ? 4 : 0)) : base, shift ^ 16};
}

// The word at byte `to` of the row's run, for the lane: all but rows of odd bytes need no arithmetic but a shift.
template <i32 align>
DEVICE u32 word_of(const Place& p, i32 to) {
    if (align >= 4 || to % 4 == 0) {
        const u32* const w = (const u32*)(p.base + (to & ~3));
        const i32 shift = align >= 4 ? to % 4 * 8 : p.shift;
        return align >= 4 && to % 4 == 0 ? w[0] : __funnelshift_r(w[0], w[1], shift);
    }
    if (to % 2 == 0 && align == 2) {
        const u32* const w = (const u32*)(p.base2 + (to & ~3));
        return __funnelshift_r(w[0], w[1], p.shift2);
    }
    u32 w[1];
    load_run<1>(p.base, p.shift / 8 + to, w);
    return w[0];
}

// Byte i of a word as a float, by way of the bits of 2^23 + it.
DEVICE float byte_to_float(u32 word, i32 i) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u | i)) - 8388608.0f;
}

template <Type type>
DEVICE constexpr bool in_halves() { return has_halves(type) || is_kind(type, Kind::SIXTEENS); }

// A run as fragments of the mma. Lane 4 * g + t has of rows g and g + 8 words t and t + 4 of each block, or, PAIRED, words
// 2 * t and 2 * t + 1, in the order (g first, g + 8 first, g second, g + 8 second).
//   begin   by the whole warp, once a run: the constants; at: where rows lane % 16, g and g + 8 begin, of the latter two
//           the lane's first word
//   get     the fragment of block j; blocks come in ascending order
//
// A type without a specialization: lanes unpack whole blocks as for one token, and the warp exchanges them.
template <Type type>
struct Fragments {
    static constexpr bool PAIRED = !in_halves<type>();

    template <i32 align>
    DEVICE void begin(Fragments&, const Tile& tile, const Place (&at)[3]) {
        typedef BlockCode<type> Code;
        const i32 lane = threadIdx.x % WARP, row = lane % TILE_ROWS;
        Constants& to = *tile.constants;
#pragma unroll 1
        for (i32 j = lane / TILE_ROWS; j < tile.n_blocks; j += 2) {
            Block w;
            load_block<type>(tile.rows, at[0].at, j, w);
            if constexpr (has_halves(type)) {
                const float f0 = (float)w.factor[0], f1 = (float)w.factor[1];
                if constexpr (Code::MINIMUM)
                    to.factor[row][j] = make_float4(f0, f1, (float)w.minimum_factor[0], (float)w.minimum_factor[1]);
                else
                    to.factor[row][j] = make_float4(f0, f1, w.scale, 0.0f);
            }
            if constexpr (Code::MINIMUM)
                to.scale[row][j] = make_float2(w.scale * __uint_as_float((u32)(127 - w.shift) << 23), w.minimum);
            else if constexpr (is_kind(type, Kind::SIXTEENS))
                to.scale[row][j] = make_float2(w.scale, w.second);
            else if constexpr (!has_halves(type))
                to.scale[row][j] = make_float2(w.scale, 0.0f);
            uint4* const q = (uint4*)(tile.unpacked + row * 256 + (j ^ (row & 7)) * 32);
            q[0] = make_uint4(w.q[0], w.q[1], w.q[2], w.q[3]);
            q[1] = make_uint4(w.q[4], w.q[5], w.q[6], w.q[7]);
        }
    }

    template <i32 align>
    DEVICE void get(Fragments&, const Tile& tile, const Place (&)[3], i32 j, u32 (&a)[4]) {
        const i32 g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
        for (i32 r = 0; r < 2; r++) {
            const u8* const block = tile.unpacked + (g + 8 * r) * 256 + (j ^ g) * 32;
            a[r] = *(const u32*)(block + (PAIRED ? 8 : 4) * t);
            a[r + 2] = *(const u32*)(block + (PAIRED ? 8 * t + 4 : 4 * t + 16));
        }
    }
};

// --- types of 256 weights -------------------------------------------------------------------------

// Scales and minimums of four blocks of Q4_K or Q5_K a lane, those of odd blocks times `odd`.
DEVICE void put_k_constants(const Tile& tile, i32 at, float odd) {
    const i32 lane = threadIdx.x % WARP, row = lane % TILE_ROWS;
    const uint4 head = *(const uint4*)(tile.rows + at);
    const bool own = lane < TILE_ROWS; // the first four have six bits in a byte of their own (load_k_scales)
    const u32 scales = own ? head.y & 0x3f3f3f3fu : and_or(head.w, 0x0f0f0f0fu, (head.y >> 2) & 0x30303030u);
    const u32 minimums = own ? head.z & 0x3f3f3f3fu : and_or(head.w >> 4, 0x0f0f0f0fu, (head.z >> 2) & 0x30303030u);
    const float d = half_to_float((u16)head.x), least = half_to_float((u16)(head.x >> 16)), d_odd = d * odd;
#pragma unroll
    for (i32 i = 0; i < 4; i += 2)
        *(float4*)&tile.constants->scale[row][(own ? 0 : 4) + i] =
            make_float4(d * byte_to_float(scales, i), least * byte_to_float(minimums, i),
                        d_odd * byte_to_float(scales, i + 1), least * byte_to_float(minimums, i + 1));
}

template <>
struct Fragments<Q4_K> {
    static constexpr bool PAIRED = true;
    uint2 codes[2]; // of two blocks

    template <i32 align>
    DEVICE void begin(Fragments&, const Tile& tile, const Place (&at)[3]) {
        put_k_constants(tile, at[0].at, 0.0625f);
    }
    template <i32 align>
    DEVICE void get(Fragments& f, const Tile& tile, const Place (&at)[3], i32 j, u32 (&a)[4]) {
#pragma unroll
        for (i32 r = 0; r < 2; r++) {
            if (j % 2 == 0)
                f.codes[r] = *(const uint2*)(at[1 + r].base + 16 + 16 * j);
            const u32 mask = 0x0f0f0f0fu << (4 * (j % 2)); // the scale makes up for bits that stay where they are
            a[r] = f.codes[r].x & mask;
            a[r + 2] = f.codes[r].y & mask;
        }
    }
};

template <>
struct Fragments<Q5_K> {
    static constexpr bool PAIRED = true;
    uint2 codes[2], high[2];

    template <i32 align>
    DEVICE void begin(Fragments& f, const Tile& tile, const Place (&at)[3]) {
        put_k_constants(tile, at[0].at, 1.0f);
#pragma unroll
        for (i32 r = 0; r < 2; r++)
            f.high[r] = *(const uint2*)(at[1 + r].base + 16);
    }
    DEVICE u32 joined(u32 codes, u32 high, i32 j) {
        return and_or(j < 4 ? high << (4 - j) : high >> (j - 4), 0x10101010u, (codes >> (4 * (j % 2))) & 0x0f0f0f0fu);
    }
    template <i32 align>
    DEVICE void get(Fragments& f, const Tile& tile, const Place (&at)[3], i32 j, u32 (&a)[4]) {
#pragma unroll
        for (i32 r = 0; r < 2; r++) {
            if (j % 2 == 0)
                f.codes[r] = *(const uint2*)(at[1 + r].base + 48 + 16 * j);
            a[r] = joined(f.codes[r].x, f.high[r].x, j);
            a[r + 2] = joined(f.codes[r].y, f.high[r].y, j);
        }
    }
};

template <>
struct Fragments<Q6_K> {
    static constexpr bool PAIRED = false;
    u32 codes[2][4], high[4]; // of four blocks

    template <i32 align>
    DEVICE void begin(Fragments&, const Tile& tile, const Place (&at)[3]) {
        const i32 lane = threadIdx.x % WARP, first = lane / TILE_ROWS * 4;
        const u8* const row = kept_shared(tile.rows + at[0].at + 192);
        const u8* const own = kept_shared(row + 2 * first);
        float4* const to = kept_shared(tile.constants->factor[lane % TILE_ROWS] + first);
        const float d = half_to_float(load_half(row, 16));
        u32 factors[4];
#pragma unroll
        for (i32 i = 0; i < 4; i++)
            factors[i] = load_half(own, 2 * i);
#pragma unroll
        for (i32 i = 0; i < 4; i++)
            to[i] = make_float4((float)(i8)factors[i], (float)(i8)(factors[i] >> 8), d, 0.0f);
    }
    template <i32 align>
    DEVICE void get(Fragments& f, const Tile& tile, const Place (&at)[3], i32 j, u32 (&a)[4]) {
        const i32 quarter = j % 4;
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            if (quarter < 2)
                f.codes[quarter][i] = word_of<align>(at[1 + i % 2], j / 4 * 64 + 32 * quarter + i / 2 * 16);
            if (quarter == 0)
                f.high[i] = word_of<align>(at[1 + i % 2], 128 + 8 * j + i / 2 * 16);
        }
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            const u32 high = quarter < 2 ? f.high[i] << (4 - 2 * quarter) : f.high[i] >> (2 * quarter - 4);
            a[i] = and_or(high, 0x30303030u, (f.codes[quarter % 2][i] >> (quarter / 2 * 4)) & 0x0f0f0f0fu);
        }
    }
};

template <>
struct Fragments<Q3_K> {
    static constexpr bool PAIRED = false;
    u32 codes[4], high[4];

    template <i32 align>
    DEVICE void begin(Fragments& f, const Tile& tile, const Place (&at)[3]) {
        const i32 lane = threadIdx.x % WARP, upper = lane / TILE_ROWS;
        const float d = half_to_float(load_half(tile.rows, at[0].at + 108));
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            const u32 four = load_half(tile.rows, at[0].at + 96 + 2 * i) >> (4 * upper);
            const u32 two = load_half(tile.rows, at[0].at + 104 + 2 * (i % 2)) >> (2 * (i / 2) + 4 * upper);
            const u32 factors = (four & 0x0f0fu) | ((two & 0x0303u) << 4);
            tile.constants->factor[lane % TILE_ROWS][4 * upper + i] =
                make_float4((float)((i32)(factors & 63) - 32), (float)((i32)(factors >> 8) - 32), d, 0.0f);
        }
#pragma unroll
        for (i32 i = 0; i < 4; i++)
            f.high[i] = word_of<align>(at[1 + i % 2], i / 2 * 16);
    }
    template <i32 align>
    DEVICE void get(Fragments& f, const Tile& tile, const Place (&at)[3], i32 j, u32 (&a)[4]) {
        if (j % 4 == 0)
#pragma unroll
            for (i32 i = 0; i < 4; i++)
                f.codes[i] = word_of<align>(at[1 + i % 2], 32 + 8 * j + i / 2 * 16);
#pragma unroll
        for (i32 i = 0; i < 4; i++)
            a[i] = and_or(j < 2 ? f.high[i] << (2 - j) : f.high[i] >> (j - 2), 0x04040404u,
                          (f.codes[i] >> (j % 4 * 2)) & 0x03030303u);
    }
};

template <>
struct Fragments<Q2_K> {
    static constexpr bool PAIRED = false;
    u32 codes[4];

    template <i32 align>
    DEVICE void begin(Fragments&, const Tile& tile, const Place (&at)[3]) {
        const i32 lane = threadIdx.x % WARP, first = lane / TILE_ROWS * 4;
        const u32 both = *(const u32*)(tile.rows + at[0].at + 80);
        const float d = half_to_float((u16)both), least = half_to_float((u16)(both >> 16));
#pragma unroll
        for (i32 i = 0; i < 4; i += 2) {
            const u32 bytes = *(const u32*)(tile.rows + at[0].at + 2 * (first + i));
            const u32 factors = bytes & 0x0f0f0f0fu, minimums = (bytes >> 4) & 0x0f0f0f0fu;
#pragma unroll
            for (i32 b = 0; b < 2; b++)
                tile.constants->factor[lane % TILE_ROWS][first + i + b] =
                    make_float4(byte_to_float(factors, 2 * b), byte_to_float(factors, 2 * b + 1),
                                byte_to_float(minimums, 2 * b), byte_to_float(minimums, 2 * b + 1));
            // Codes stay where they are in a byte, as in Q4_K.
            *(float4*)&tile.constants->scale[lane % TILE_ROWS][first + i] =
                make_float4(d * (i ? 0.0625f : 1.0f), least, d * (i ? 0.015625f : 0.25f), least);
        }
    }
    template <i32 align>
    DEVICE void get(Fragments& f, const Tile& tile, const Place (&at)[3], i32 j, u32 (&a)[4]) {
        if (j % 4 == 0)
#pragma unroll
            for (i32 i = 0; i < 4; i++)
                f.codes[i] = word_of<4>(at[1 + i % 2], 16 + 8 * j + i / 2 * 16);
#pragma unroll
        for (i32 i = 0; i < 4; i++)
            a[i] = f.codes[i] & (0x03030303u << (j % 4 * 2));
    }
};

// --- types with a scale for 32 weights beside them ------------------------------------------------

// Four constants a lane: scale(j) and minimum(j) of block j.
template <class Scale, class Minimum>
DEVICE void put_scales(const Tile& tile, Scale scale, Minimum minimum) {
    const i32 lane = threadIdx.x % WARP, first = lane / TILE_ROWS * 4;
#pragma unroll
    for (i32 i = first; i < first + 4; i += 2)
        *(float4*)&tile.constants->scale[lane % TILE_ROWS][i] =
            make_float4(scale(i), minimum(i), scale(i + 1), minimum(i + 1));
}

template <>
struct Fragments<Q8_0> {
    static constexpr bool PAIRED = true;

    template <i32 align>
    DEVICE void begin(Fragments&, const Tile& tile, const Place (&at)[3]) {
        put_scales(tile, [&](i32 j) { return half_to_float(load_half(tile.rows, at[0].at + 34 * j)); },
                   [](i32) { return 0.0f; });
    }
    template <i32 align>
    DEVICE void get(Fragments&, const Tile& tile, const Place (&at)[3], i32 j, u32 (&a)[4]) {
#pragma unroll
        for (i32 i = 0; i < 4; i++)
            a[i] = word_of<align>(at[1 + i % 2], 34 * j + 2 + i / 2 * 4);
    }
};

// Blocks of a half d, a half m (where there is a minimum), a word of fifth bits (where codes have five), then 16 bytes of
// codes.
template <Type type>
struct NibbleFragments {
    static constexpr bool PAIRED = false, MINIMUM = BlockCode<type>::MINIMUM;
    static constexpr i32 BYTES = BlockType<type>::BLOCK_BYTES, CODES = BYTES - 16;

    template <i32 align>
    DEVICE void begin(NibbleFragments&, const Tile& tile, const Place (&at)[3]) {
        put_scales(tile, [&](i32 j) { return half_to_float(load_half(tile.rows, at[0].at + BYTES * j)); },
                   [&](i32 j) { return MINIMUM ? -half_to_float(load_half(tile.rows, at[0].at + BYTES * j + 2)) : 0.0f; });
    }
    template <i32 align>
    DEVICE void get(NibbleFragments&, const Tile& tile, const Place (&at)[3], i32 j, u32 (&a)[4]) {
        const i32 t = threadIdx.x % 4;
#pragma unroll
        for (i32 r = 0; r < 2; r++) {
            const u32 v = word_of<align>(at[1 + r], BYTES * j + CODES);
            if constexpr (type == IQ4_NL) {
                split_word<iq4_bytes>(v, a[r], a[r + 2]);
            } else {
                a[r] = v & 0x0f0f0f0fu;
                a[r + 2] = (v >> 4) & 0x0f0f0f0fu;
            }
            if constexpr (CODES > 4) {
                Place row = at[1 + r];
                row.base -= 4 * t, row.base2 -= 4 * t;
                const u32 bits = word_of<align>(row, BYTES * j + CODES - 4);
                a[r] |= fifth_bits(bits >> (4 * t));
                a[r + 2] |= fifth_bits(bits >> (4 * t + 16));
            }
        }
    }
};

template <>
struct Fragments<Q4_0> : NibbleFragments<Q4_0> {};
template <>
struct Fragments<Q4_1> : NibbleFragments<Q4_1> {};
template <>
struct Fragments<Q5_0> : NibbleFragments<Q5_0> {};
template <>
struct Fragments<Q5_1> : NibbleFragments<Q5_1> {};
template <>
struct Fragments<IQ4_NL> : NibbleFragments<IQ4_NL> {};

template <>
struct Fragments<IQ4_XS> {
    static constexpr bool PAIRED = false;

    template <i32 align>
    DEVICE void begin(Fragments&, const Tile& tile, const Place (&at)[3]) {
        const uint2 head = *(const uint2*)(tile.rows + at[0].at);
        const float d = half_to_float((u16)head.x);
        put_scales(tile, [&](i32 j) {
            const u32 scale = ((head.y >> (4 * j)) & 15) | (((head.x >> (16 + 2 * j)) & 3) << 4);
            return d * (float)((i32)scale - 32);
        }, [](i32) { return 0.0f; });
    }
    template <i32 align>
    DEVICE void get(Fragments&, const Tile& tile, const Place (&at)[3], i32 j, u32 (&a)[4]) {
#pragma unroll
        for (i32 r = 0; r < 2; r++) {
            const u32 v = *(const u32*)(at[1 + r].base + 8 + 16 * j);
            split_word<iq4_bytes>(v, a[r], a[r + 2]);
        }
    }
};

template <>
struct Fragments<MXFP4> {
    static constexpr bool PAIRED = false;

    template <i32 align>
    DEVICE void begin(Fragments&, const Tile& tile, const Place (&at)[3]) {
        put_scales(tile, [&](i32 j) { return e8m0_to_float(tile.rows[at[0].at + 17 * j]); }, [](i32) { return 0.0f; });
    }
    template <i32 align>
    DEVICE void get(Fragments&, const Tile& tile, const Place (&at)[3], i32 j, u32 (&a)[4]) {
#pragma unroll
        for (i32 r = 0; r < 2; r++)
            split_word<e2m1_bytes>(word_of<align>(at[1 + r], 17 * j + 1), a[r], a[r + 2]);
    }
};

template <>
struct Fragments<NVFP4> {
    static constexpr bool PAIRED = false;

    template <i32 align>
    DEVICE void begin(Fragments&, const Tile& tile, const Place (&at)[3]) {
        auto scales = [&](i32 j) { return ue4m3_to_halves(load_half(tile.rows, at[0].at + j / 2 * 36 + j % 2 * 2)); };
        put_scales(tile, [&](i32 j) { return half_to_float((u16)scales(j)); },
                   [&](i32 j) { return half_to_float((u16)(scales(j) >> 16)); });
    }
    template <i32 align>
    DEVICE void get(Fragments&, const Tile& tile, const Place (&at)[3], i32 j, u32 (&a)[4]) {
        const i32 t = threadIdx.x % 4;
        const u32 which = t < 2 ? 0x6420u : 0x7531u; // of 16 elements, words 2 and 3 are in the high halves of bytes
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            Place row = at[1 + i % 2];
            row.base -= 4 * (t & 2);
            const u32 v = word_of<4>(row, j / 2 * 36 + 4 + j % 2 * 16 + i / 2 * 8);
            a[i] = __byte_perm(e2m1_bytes(v), e2m1_bytes(v >> 16), which);
        }
    }
};
