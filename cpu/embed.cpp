// Rows of an embedding table. Twin: embed of engine/ops/reference.py. Grid: a token at a time; any type.
//
// Each weight is computed as the gguf package does, every product and difference rounded by itself.
#include "grids.h"
#include "half.h"
#include "workspace.h"

namespace spark {

namespace {

// dequantize_<name> of a record of block_types.h: one block.

void dequantize_F32(const uint8_t *b, float *y) { std::memcpy(y, b, 4); }
void dequantize_F16(const uint8_t *b, float *y) { *y = half_to_float(load_u16(b)); }
void dequantize_BF16(const uint8_t *b, float *y) { *y = bf16_to_float(load_u16(b)); }

void dequantize_Q8_0(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b));
    for (int i = 0; i < 32; i++)
        y[i] = float(int8_t(b[2 + i])) * d;
}

void dequantize_Q4_0(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b));
    for (int i = 0; i < 16; i++) {
        y[i] = d * float((b[2 + i] & 15) - 8);
        y[16 + i] = d * float((b[2 + i] >> 4) - 8);
    }
}

void dequantize_Q4_1(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b)), m = half_to_float(load_u16(b + 2));
    for (int i = 0; i < 16; i++) {
        y[i] = d * float(b[4 + i] & 15) + m;
        y[16 + i] = d * float(b[4 + i] >> 4) + m;
    }
}

// Code i of four bytes of fifth bits and 16 bytes of nibbles.
int five_bits(const uint8_t *b, int i) {
    return (b[4 + i % 16] >> i / 16 * 4 & 15) | (b[i / 8] >> i % 8 & 1) << 4;
}

void dequantize_Q5_0(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b));
    for (int i = 0; i < 32; i++)
        y[i] = d * float(five_bits(b + 2, i) - 16);
}

void dequantize_Q5_1(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b)), m = half_to_float(load_u16(b + 2));
    for (int i = 0; i < 32; i++)
        y[i] = d * float(five_bits(b + 4, i)) + m;
}

// Code i of those of two bits: bytes 32n..32n+31 have blocks 4n..4n+3, the lowest bits first.
int two_bits(const uint8_t *codes, int i) { return codes[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3; }

void dequantize_Q2_K(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b + 80)), dmin = half_to_float(load_u16(b + 82));
    for (int i = 0; i < 256; i++) {
        const int both = b[i / 16];
        y[i] = (d * float(both & 15)) * float(two_bits(b + 16, i)) - dmin * float(both >> 4);
    }
}

void dequantize_Q3_K(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b + 108));
    for (int i = 0; i < 256; i++) {
        const int j = i / 16; // of 16 scales: low bits in 8 bytes, low halves first; high bits in 4
        const int scale = (b[96 + j % 8] >> j / 8 * 4 & 15) | (b[104 + j % 4] >> j / 4 * 2 & 3) << 4;
        const int q = two_bits(b + 32, i) | (b[i % 32] >> i / 32 & 1) << 2;
        y[i] = (d * float(scale - 32)) * float(q - 4);
    }
}

struct SixBits {
    uint8_t scale[8], minimum[8];
};

SixBits six_bits(const uint8_t *s) {
    SixBits v;
    for (int i = 0; i < 4; i++) {
        v.scale[i] = s[i] & 63;
        v.minimum[i] = s[4 + i] & 63;
        v.scale[4 + i] = uint8_t((s[8 + i] & 15) | (s[i] >> 6) << 4);
        v.minimum[4 + i] = uint8_t((s[8 + i] >> 4) | (s[4 + i] >> 6) << 4);
    }
    return v;
}

// Q4_K, and Q5_K where `high` has the fifth bits.
void dequantize_q45_k(const uint8_t *b, const uint8_t *high, const uint8_t *nibbles, float *y) {
    const float d = half_to_float(load_u16(b)), dmin = half_to_float(load_u16(b + 2));
    const SixBits s = six_bits(b + 4);
    for (int block = 0; block < 8; block++) {
        const float scale = d * float(s.scale[block]), minimum = dmin * float(s.minimum[block]);
        for (int i = 0; i < 32; i++) {
            int q = nibbles[block / 2 * 32 + i] >> 4 * (block & 1) & 15;
            if (high)
                q |= (high[i] >> block & 1) << 4;
            y[32 * block + i] = scale * float(q) - minimum;
        }
    }
}

void dequantize_Q4_K(const uint8_t *b, float *y) { dequantize_q45_k(b, nullptr, b + 16, y); }
void dequantize_Q5_K(const uint8_t *b, float *y) { dequantize_q45_k(b, b + 16, b + 48, y); }

void dequantize_Q6_K(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b + 208));
    for (int i = 0; i < 256; i++) {
        const int half = i >> 7, quarter = i >> 5 & 3, l = i & 31;
        const int low = b[64 * half + 32 * (quarter & 1) + l] >> 4 * (quarter >> 1) & 15;
        const int high = b[128 + 32 * half + l] >> 2 * quarter & 3;
        y[i] = (d * float(int8_t(b[192 + i / 16]))) * float((low | high << 4) - 32);
    }
}

// --- grids: grids.h says what an entry is

constexpr uint16_t kIQ2_XXS[] = {IQ2_XXS_GRID}, kIQ2_XS[] = {IQ2_XS_GRID}, kIQ2_S[] = {IQ2_S_GRID};
constexpr uint16_t kIQ3_XXS[] = {IQ3_XXS_GRID}, kIQ3_S[] = {IQ3_S_GRID};

// Eight weights of one or two entries.
void eight_weights(float scale, const float (&magnitude)[8], int signs, float *y) {
    for (int k = 0; k < 8; k++)
        y[k] = scale * (signs >> k & 1 ? -magnitude[k] : magnitude[k]);
}
void eight_weights(float scale, uint16_t entry, int signs, float *y) {
    static constexpr float kLevels[] = {IQ2_LEVELS, 0};
    float magnitude[8];
    for (int k = 0; k < 8; k++)
        magnitude[k] = kLevels[entry >> 2 * k & 3];
    eight_weights(scale, magnitude, signs, y);
}
void eight_weights(float scale, const float (&levels)[8], uint16_t first, uint16_t second, int signs, float *y) {
    float magnitude[8];
    for (int k = 0; k < 8; k++)
        magnitude[k] = levels[(k < 4 ? first : second) >> 4 * (k & 3) & 7];
    eight_weights(scale, magnitude, signs, y);
}

int with_parity(uint32_t seven) { return int(seven & 127) | __builtin_parity(seven & 127) << 7; }

uint32_t load_u32(const uint8_t *p) { return load_u16(p) | uint32_t(load_u16(p + 2)) << 16; }

void dequantize_IQ2_XXS(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b));
    for (int i = 0; i < 32; i++) {
        const uint8_t *block = b + 2 + i / 4 * 8;
        const uint32_t rest = load_u32(block + 4);
        const float scale = d * float(2 * (rest >> 28) + 1) * 0.125f;
        eight_weights(scale, kIQ2_XXS[block[i % 4]], with_parity(rest >> 7 * (i % 4)), y + 8 * i);
    }
}

void dequantize_IQ2_XS(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b));
    for (int i = 0; i < 32; i++) {
        const int word = load_u16(b + 2 + 2 * i), s = b[66 + i / 4] >> i / 2 % 2 * 4 & 15;
        eight_weights(d * float(2 * s + 1) * 0.125f, kIQ2_XS[word & 511], with_parity(word >> 9), y + 8 * i);
    }
}

void dequantize_IQ2_S(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b));
    for (int i = 0; i < 32; i++) {
        const int index = b[2 + i] | (b[66 + i / 4] >> i % 4 * 2 & 3) << 8, s = b[74 + i / 4] >> i / 2 % 2 * 4 & 15;
        eight_weights(d * float(2 * s + 1) * 0.125f, kIQ2_S[index], b[34 + i], y + 8 * i);
    }
}

void dequantize_IQ3_XXS(const uint8_t *b, float *y) {
    static constexpr float kLevels[] = {IQ3_XXS_LEVELS};
    const float d = half_to_float(load_u16(b));
    for (int i = 0; i < 32; i++) {
        const uint32_t rest = load_u32(b + 66 + i / 4 * 4);
        const uint8_t *index = b + 2 + 2 * i;
        const float scale = d * float(2 * (rest >> 28) + 1) * 0.25f;
        eight_weights(scale, kLevels, kIQ3_XXS[index[0]], kIQ3_XXS[index[1]], with_parity(rest >> 7 * (i % 4)), y + 8 * i);
    }
}

void dequantize_IQ3_S(const uint8_t *b, float *y) {
    static constexpr float kLevels[] = {IQ3_S_LEVELS};
    const float d = half_to_float(load_u16(b));
    for (int i = 0; i < 32; i++) {
        const uint8_t *index = b + 2 + 2 * i;
        const int high = b[66 + i / 4] >> i % 4 * 2, s = b[106 + i / 8] >> i / 4 % 2 * 4 & 15;
        eight_weights(d * float(2 * s + 1), kLevels, kIQ3_S[index[0] | (high & 1) << 8], kIQ3_S[index[1] | (high & 2) << 7],
                      b[74 + i], y + 8 * i);
    }
}

// 32 weights that nibbles stand for.
void dequantize_values(const int8_t *values, float d, const uint8_t *nibbles, float *y) {
    for (int i = 0; i < 16; i++) {
        y[i] = d * float(values[nibbles[i] & 15]);
        y[16 + i] = d * float(values[nibbles[i] >> 4]);
    }
}

void dequantize_IQ4_NL(const uint8_t *b, float *y) {
    dequantize_values(kIQ4Values, half_to_float(load_u16(b)), b + 2, y);
}

void dequantize_IQ4_XS(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b));
    const int high = load_u16(b + 2);
    for (int block = 0; block < 8; block++) {
        const int scale = (b[4 + block / 2] >> 4 * (block & 1) & 15) | (high >> 2 * block & 3) << 4;
        dequantize_values(kIQ4Values, d * float(scale - 32), b + 8 + 16 * block, y + 32 * block);
    }
}

void dequantize_MXFP4(const uint8_t *b, float *y) { dequantize_values(kE2M1Values, e8m0_to_float(b[0]), b + 1, y); }

void dequantize_NVFP4(const uint8_t *b, float *y) {
    for (int i = 0; i < 64; i++)
        y[i] = ue4m3_to_float(b[i / 16]) * float(kE2M1Values[b[4 + i / 16 * 8 + i % 8] >> i / 8 % 2 * 4 & 15]);
}

} // namespace

void dequantize_row(int64_t type, const uint8_t *row, int64_t cols, float *y) {
    const BlockType block = block_type(type);
    for (int64_t i = 0; i < cols; i += block.elements, row += block.bytes, y += block.elements)
        switch (type) {
#define SPARK_CASE(name, ...) case SPARK_##name: dequantize_##name(row, y); break;
            BLOCK_TYPES(SPARK_CASE)
#undef SPARK_CASE
        }
}

} // namespace spark

extern "C" int32_t spark_embed(spark_workspace *ws, const spark_matrix *table, const int32_t *tokens, int64_t T,
                               float *x, float scale) {
    using namespace spark;
    if (!known(table))
        return SPARK_BAD_TYPE;
    if (out_of_range(tokens, T, table->rows))
        return SPARK_BAD_INDEX;
    const Weights w = weights_of(*table);
    ws->rows(T, double(w.cols), [&](int64_t first, int64_t last, int) {
        for (int64_t t = first; t < last; t++) {
            dequantize_row(w.type, w.data + tokens[t] * w.row_bytes, w.cols, x + t * w.cols);
            if (scale != 1.0f)
                ws->kernels.scale(x + t * w.cols, scale, w.cols);
        }
    });
    return SPARK_OK;
}
