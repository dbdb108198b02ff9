// Rows of an embedding table. Twin: embed of engine/ops/reference.py. Grid: a token at a time; any type.
//
// Each weight is computed as the gguf package does, every product and difference rounded by itself.
#include "half.h"
#include "workspace.h"

namespace spark {

namespace {

void dequantize_q8_0(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b));
    for (int i = 0; i < 32; i++)
        y[i] = float(int8_t(b[2 + i])) * d;
}

void dequantize_q4_0(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b));
    for (int i = 0; i < 16; i++) {
        y[i] = d * float((b[2 + i] & 15) - 8);
        y[16 + i] = d * float((b[2 + i] >> 4) - 8);
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

void dequantize_q6_k(const uint8_t *b, float *y) {
    const float d = half_to_float(load_u16(b + 208));
    for (int i = 0; i < 256; i++) {
        const int half = i >> 7, quarter = i >> 5 & 3, l = i & 31;
        const int low = b[64 * half + 32 * (quarter & 1) + l] >> 4 * (quarter >> 1) & 15;
        const int high = b[128 + 32 * half + l] >> 2 * quarter & 3;
        y[i] = (d * float(int8_t(b[192 + i / 16]))) * float((low | high << 4) - 32);
    }
}

void dequantize_iq4_xs(const uint8_t *b, float *y) {
    static constexpr int8_t kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    const float d = half_to_float(load_u16(b));
    const int high = load_u16(b + 2);
    for (int block = 0; block < 8; block++) {
        const int scale = (b[4 + block / 2] >> 4 * (block & 1) & 15) | (high >> 2 * block & 3) << 4;
        const float ds = d * float(scale - 32);
        for (int i = 0; i < 16; i++) {
            const uint8_t q = b[8 + 16 * block + i];
            y[32 * block + i] = ds * float(kValues[q & 15]);
            y[32 * block + 16 + i] = ds * float(kValues[q >> 4]);
        }
    }
}

struct Format {
    int64_t elements, bytes;
};

Format format_of(int64_t type) {
    switch (type) {
    case SPARK_F32: return {1, 4};
    case SPARK_F16:
    case SPARK_BF16: return {1, 2};
    case SPARK_Q8_0: return {32, 34};
    case SPARK_Q4_0: return {32, 18};
    case SPARK_Q4_K: return {256, 144};
    case SPARK_Q5_K: return {256, 176};
    case SPARK_Q6_K: return {256, 210};
    default: return {256, 136}; // IQ4_XS
    }
}

} // namespace

int64_t row_bytes(int64_t type, int64_t cols) {
    const Format f = format_of(type);
    return cols / f.elements * f.bytes;
}

void dequantize_row(int64_t type, const uint8_t *row, int64_t cols, float *y) {
    const Format f = format_of(type);
    for (int64_t i = 0; i < cols; i += f.elements, row += f.bytes, y += f.elements)
        switch (type) {
        case SPARK_F32: std::memcpy(y, row, 4); break;
        case SPARK_F16: *y = half_to_float(load_u16(row)); break;
        case SPARK_BF16: *y = bf16_to_float(load_u16(row)); break;
        case SPARK_Q8_0: dequantize_q8_0(row, y); break;
        case SPARK_Q4_0: dequantize_q4_0(row, y); break;
        case SPARK_Q4_K: dequantize_q45_k(row, nullptr, row + 16, y); break;
        case SPARK_Q5_K: dequantize_q45_k(row, row + 16, row + 48, y); break;
        case SPARK_Q6_K: dequantize_q6_k(row, y); break;
        case SPARK_IQ4_XS: dequantize_iq4_xs(row, y); break;
        }
}

} // namespace spark

extern "C" int32_t spark_embed(spark_workspace *ws, const spark_matrix *table, const int32_t *tokens, int64_t T,
                               float *x, float scale) {
    using namespace spark;
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
