// binary16, bfloat16 and exponents in portable code, for compilers and processors without conversions; the values that
// codes of four bits stand for.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline float bits_to_float(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline uint32_t float_to_bits(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}

inline uint16_t load_u16(const void *p) {
    uint16_t v;
    std::memcpy(&v, p, 2);
    return v;
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16;
    const uint32_t magnitude = uint32_t(h & 0x7fff) << 13;
    if (magnitude >= 0x0f800000) // infinity or NaN
        return bits_to_float(sign | 0x70000000 | magnitude);
    // 2^112 moves the exponent from bias 15 to bias 127, subnormals included.
    return bits_to_float(sign | float_to_bits(bits_to_float(magnitude) * 0x1p112f));
}

// Round to nearest even.
inline uint16_t float_to_half(float f) {
    const uint32_t bits = float_to_bits(f);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return sign | 0x7e00;
    if (magnitude >= 0x477ff000) // rounds to 65536 or more
        return sign | 0x7c00;
    if (magnitude < 0x38800000) { // below 2^-14: adding 0.5 leaves the 10 bits rounded, at the bottom
        const float shifted = bits_to_float(magnitude) + 0.5f;
        return sign | uint16_t(float_to_bits(shifted) - 0x3f000000);
    }
    return sign | uint16_t((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
}

inline float bf16_to_float(uint16_t b) { return bits_to_float(uint32_t(b) << 16); }

// MXFP4: 2^(e - 128), half of what the exponent says, since kE2M1Values are doubled.
inline float e8m0_to_float(uint8_t e) { return bits_to_float(e < 2 ? 0x00200000u << e : (e - 1u) << 23); }

// NVFP4: half of what eight bits of UE4M3 say, 0x7f is 0.
inline float ue4m3_to_float(uint8_t e) { return e == 0x7f ? 0.0f : bits_to_float((e & 0x7fu) << 20) * 0x1p119f; }

constexpr int8_t kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kE2M1Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

} // namespace
