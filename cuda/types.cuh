// The block types: engine/formats/block_types.h as CUDA reads it. -DTYPE=Q4_K names one; a name without a record does
// not compile.
#pragma once

#include "block_types.h"
#include "ptx.cuh"

#define RECORD(name, id, ...) name = id,
enum Type { BLOCK_TYPES(RECORD) };
#undef RECORD

#define RECORD(name) name,
enum class Kind { BLOCK_KINDS(RECORD) };
#undef RECORD

template <Type type>
struct BlockType;
#define RECORD(name, id, elements, bytes, kind, stage, scales)                                              \
    template <>                                                                                             \
    struct BlockType<name> {                                                                                   \
        static constexpr Kind KIND = Kind::kind;                                                            \
        static constexpr i32 BLOCK_ELEMENTS = elements, BLOCK_BYTES = bytes, STAGE = stage, WORDS = scales; \
    };
BLOCK_TYPES(RECORD)
#undef RECORD

#define RECORD(name, ...)                                                             \
    case name: return k / BlockType<name>::BLOCK_ELEMENTS * BlockType<name>::BLOCK_BYTES;
// Bytes of a row of k weights.
DEVICE constexpr i32 row_bytes_of(Type type, i32 k) {
    switch (type) { BLOCK_TYPES(RECORD) }
    return -1; // no value of Type comes here
}
#undef RECORD

#define RECORD(name, ...) case name: return BlockType<name>::KIND == kind;
DEVICE constexpr bool is_kind(Type type, Kind kind) {
    switch (type) { BLOCK_TYPES(RECORD) }
    return false; // nor here
}
#undef RECORD

// Bits 0..3 of `bits` in bit 4 of four bytes: fifth bits of codes.
DEVICE u32 fifth_bits(u32 bits) { return ((bits & 15) * 0x02040810u) & 0x10101010u; }

// Four codes of four bits (the low 16 of `codes`) to the bytes that they stand for, of a table in four words.
template <u32 v0, u32 v4, u32 v8, u32 v12>
DEVICE u32 look_up(u32 codes) {
    // A selector's top bit would ask for a sign, so each half of the table is looked up apart.
    const u32 index = codes & 0x7777u;
    return __byte_perm(__byte_perm(v0, v4, index), __byte_perm(v8, v12, index), 0x3210u | ((codes & 0x8888u) >> 1));
}

// MXFP4's scale 2^(e - 128): its values are doubled.
DEVICE float e8m0_to_float(u32 e) { return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23); }

// NVFP4's two neighboring scales, half of what UE4M3 says, as halves: the low 16 bits of `e` have them. 0x7f is 0.
DEVICE u32 ue4m3_to_halves(u32 e) {
    const u32 seven = e & 0x7f7fu, bits = __byte_perm(seven, 0, 0x4140u) << 7;
    const u32 dropped = permute_or_sign((seven + 0x0101u) & ~e, 0, 0x9988u); // the sign of a byte that was 0x7f, twice
    return half2_mul(bits & ~dropped, 0x58005800u); // 128
}

DEVICE constexpr bool is_float(Type type) { return is_kind(type, Kind::PLAIN); }
DEVICE constexpr bool is_quad(Type type) { return is_kind(type, Kind::FOURS); }
DEVICE constexpr bool has_halves(Type type) { return is_kind(type, Kind::HALVES) || is_quad(type); }
DEVICE constexpr bool is_paired(Type type) { return is_kind(type, Kind::PAIRS); }
DEVICE constexpr bool shares_bytes(Type type) { return is_paired(type) || is_quad(type); } // lanes do, for one token
