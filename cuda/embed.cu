// Rows of the embedding table: x [T, D] = scale * table[tokens]. Twin: `embed` of engine/ops/reference.py, bit for bit.
//
// -DTYPE=Q4_K and so on, a native type. Grid (T, ceil(D / 256)), blocks of 256 threads, an element each: a row is
// read once and is small beside what a layer reads. The table is aligned to 2 bytes, float tables to their type.
#include "grids.cuh"
#include "types.cuh"

DEVICE float half_at(const u8* p) { return half_to_float(*(const u16*)p); }

// Element i of a row, a specialization each: a type without one does not compile.
template <Type type>
struct Element;

template <>
struct Element<F32> {
    DEVICE float of(const u8* row, int i) { return ((const float*)row)[i]; }
};

template <>
struct Element<F16> {
    DEVICE float of(const u8* row, int i) { return half_to_float(((const u16*)row)[i]); }
};

template <>
struct Element<BF16> {
    DEVICE float of(const u8* row, int i) { return bfloat_to_float(((const u16*)row)[i]); }
};

// Code i of 16 bytes: the first 16 are the low halves, the others the high ones.
DEVICE u32 nibble_of(const u8* codes, int i) { return codes[i % 16] >> (i % 32 / 16 * 4) & 15u; }

template <>
struct Element<Q8_0> : BlockType<Q8_0> {
    DEVICE float of(const u8* row, int i) {
        const u8* const block = row + (i64)(i / 32) * BLOCK_BYTES;
        return half_at(block) * (float)(i8)block[2 + i % 32];
    }
};

template <>
struct Element<Q4_0> : BlockType<Q4_0> {
    DEVICE float of(const u8* row, int i) {
        const u8* const block = row + (i64)(i / 32) * BLOCK_BYTES;
        return half_at(block) * (float)((int)nibble_of(block + 2, i) - 8);
    }
};

template <>
struct Element<Q4_1> : BlockType<Q4_1> {
    DEVICE float of(const u8* row, int i) {
        const u8* const block = row + (i64)(i / 32) * BLOCK_BYTES;
        return half_at(block) * (float)nibble_of(block + 4, i) + half_at(block + 2);
    }
};

// Code i of four bytes of fifth bits and 16 bytes of the others.
DEVICE u32 five_bits(const u8* codes, int i) {
    return nibble_of(codes + 4, i) | (codes[i % 32 / 8] >> (i % 8) & 1u) << 4;
}

template <>
struct Element<Q5_0> : BlockType<Q5_0> {
    DEVICE float of(const u8* row, int i) {
        const u8* const block = row + (i64)(i / 32) * BLOCK_BYTES;
        return half_at(block) * (float)((int)five_bits(block + 2, i) - 16);
    }
};

template <>
struct Element<Q5_1> : BlockType<Q5_1> {
    DEVICE float of(const u8* row, int i) {
        const u8* const block = row + (i64)(i / 32) * BLOCK_BYTES;
        return half_at(block) * (float)five_bits(block + 4, i) + half_at(block + 2);
    }
};

// Code k of 256 of those of two bits: bytes 32n..32n+31 have blocks 4n..4n+3, the lowest bits first.
DEVICE u32 two_bits(const u8* codes, int k) { return codes[k / 128 * 32 + k % 32] >> (k / 32 % 4 * 2) & 3u; }

template <>
struct Element<Q2_K> : BlockType<Q2_K> {
    DEVICE float of(const u8* row, int i) {
        const u8* const block = row + (i64)(i / 256) * BLOCK_BYTES;
        const u32 both = block[i % 256 / 16];
        const float scale = half_at(block + 80) * (float)(both & 15u);
        return scale * (float)two_bits(block + 16, i % 256) - half_at(block + 82) * (float)(both >> 4);
    }
};

template <>
struct Element<Q3_K> : BlockType<Q3_K> {
    DEVICE float of(const u8* row, int i) {
        const int k = i % 256, j = k / 16; // scale j of 16: low bits in 8 bytes, low halves first; high bits in 4
        const u8* const block = row + (i64)(i / 256) * BLOCK_BYTES;
        const u32 scale = (block[96 + j % 8] >> (j / 8 * 4) & 15u) | (block[104 + j % 4] >> (j / 4 * 2) & 3u) << 4;
        const u32 code = two_bits(block + 32, k) | (block[k % 32] >> (k / 32) & 1u) << 2;
        return half_at(block + 108) * (float)((int)scale - 32) * (float)((int)code - 4);
    }
};

// Sub-block j of 8 in the 12 bytes of packed 6-bit scales and minimums.
DEVICE void scale_and_minimum(const u8* packed, int j, float& scale, float& minimum) {
    u32 sc, mn;
    if (j < 4) {
        sc = packed[j] & 63u;
        mn = packed[j + 4] & 63u;
    } else {
        sc = (packed[j + 4] & 15u) | (u32)(packed[j - 4] >> 6) << 4;
        mn = (u32)(packed[j + 4] >> 4) | (u32)(packed[j] >> 6) << 4;
    }
    scale = (float)sc;
    minimum = (float)mn;
}

// Q4_K, and Q5_K with a fifth bit.
template <Type type, int codes_at, bool fifth>
struct KElement : BlockType<type> {
    DEVICE float of(const u8* row, int i) {
        const int j = i % 256 / 32; // bytes 32m..32m+31 hold sub-blocks 2m (low halves) and 2m + 1
        const u8* const block = row + (i64)(i / 256) * BlockType<type>::BLOCK_BYTES;
        const u8* const codes = block + codes_at;
        float scale, minimum;
        scale_and_minimum(block + 4, j, scale, minimum);
        u32 code = codes[j / 2 * 32 + i % 32] >> (j % 2 * 4) & 15u;
        if (fifth)
            code |= (block[16 + i % 32] >> j & 1u) << 4;
        return half_at(block) * scale * (float)code - half_at(block + 2) * minimum;
    }
};

template <>
struct Element<Q4_K> : KElement<Q4_K, 16, false> {};

template <>
struct Element<Q5_K> : KElement<Q5_K, 48, true> {};

template <>
struct Element<Q6_K> : BlockType<Q6_K> {
    DEVICE float of(const u8* row, int i) {
        const int half = i % 256 / 128, quarter = i % 128 / 32, k = i % 32;
        const u8* const block = row + (i64)(i / 256) * BLOCK_BYTES;
        const u32 low = block[half * 64 + quarter % 2 * 32 + k] >> (quarter / 2 * 4) & 15u;
        const u32 high = block[128 + half * 32 + k] >> (quarter * 2) & 3u;
        const float scale = half_at(block + 208) * (float)(i8)block[192 + i % 256 / 16];
        return scale * (float)((int)(low | high << 4) - 32);
    }
};

DEVICE float iq4_value(u32 code) {
    constexpr i8 values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return (float)values[code];
}

template <>
struct Element<IQ4_NL> : BlockType<IQ4_NL> {
    DEVICE float of(const u8* row, int i) {
        const u8* const block = row + (i64)(i / 32) * BLOCK_BYTES;
        return half_at(block) * iq4_value(nibble_of(block + 2, i));
    }
};

template <>
struct Element<IQ4_XS> : BlockType<IQ4_XS> {
    DEVICE float of(const u8* row, int i) {
        const int j = i % 256 / 32;
        const u8* const block = row + (i64)(i / 256) * BLOCK_BYTES;
        const u32 low = block[4 + j / 2] >> (j % 2 * 4) & 15u, high = *(const u16*)(block + 2) >> (j * 2) & 3u;
        return half_at(block) * (float)((int)(low | high << 4) - 32) * iq4_value(nibble_of(block + 8 + j * 16, i));
    }
};

DEVICE float e2m1_value(u32 code) {
    constexpr i8 values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return (float)values[code];
}

template <>
struct Element<MXFP4> : BlockType<MXFP4> {
    DEVICE float of(const u8* row, int i) {
        const u8* const block = row + (i64)(i / 32) * BLOCK_BYTES;
        return e8m0_to_float(block[0]) * e2m1_value(nibble_of(block + 1, i));
    }
};

template <>
struct Element<NVFP4> : BlockType<NVFP4> {
    DEVICE float of(const u8* row, int i) {
        const u8* const block = row + (i64)(i / 64) * BLOCK_BYTES;
        const int part = i % 64 / 16;
        const u32 code = block[4 + 8 * part + i % 8] >> (i % 16 / 8 * 4) & 15u;
        return half_to_float((u16)ue4m3_to_halves(block[part])) * e2m1_value(code);
    }
};

// The types with a grid.
template <Type type>
struct GridElement : BlockType<type> {
    DEVICE float of(const u8* row, int i) {
        typedef GridBlock<type> G;
        const int s = i % 256 / 32, half = i % 32 / 16;
        const u8* const block = row + (i64)(i / 256) * BlockType<type>::BLOCK_BYTES;
        G g;
        G::load(g, block, 0, s);
        const int magnitude = four_magnitudes<type>(g, half, i % 16 / 4) >> (i % 4 * 8) & 255u;
        const u32 factor = odd_factor(G::scales(block, 0, s) >> (has_halves(type) ? 4 * half : 0));
        return half_at(block) * (float)(int)factor * G::SHRINK * (float)(g.signs >> (i % 32) & 1u ? -magnitude : magnitude);
    }
};

template <>
struct Element<IQ2_XXS> : GridElement<IQ2_XXS> {};
template <>
struct Element<IQ2_XS> : GridElement<IQ2_XS> {};
template <>
struct Element<IQ3_XXS> : GridElement<IQ3_XXS> {};
template <>
struct Element<IQ3_S> : GridElement<IQ3_S> {};
template <>
struct Element<IQ2_S> : GridElement<IQ2_S> {};

KERNEL embed(const u8* table, i64 row_bytes, const i32* tokens, int D, float scale, float* x) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < D)
        x[(i64)blockIdx.x * D + i] = Element<TYPE>::of(table + tokens[blockIdx.x] * row_bytes, i) * scale;
}
