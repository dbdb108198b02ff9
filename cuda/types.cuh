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

DEVICE constexpr bool is_float(Type type) { return is_kind(type, Kind::PLAIN); }
DEVICE constexpr bool has_halves(Type type) { return is_kind(type, Kind::HALVES); }
DEVICE constexpr bool is_paired(Type type) { return is_kind(type, Kind::PAIRS); }
