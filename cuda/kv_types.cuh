// The types of keys and values in the cache, in the order of engine/ground/kv_types.py. -DK_TYPE and -DV_TYPE are one
// each.
#pragma once

#include "ptx.cuh"

#define KV_F16 0
#define KV_Q8_0 1
#define KV_Q4_0 2

// Bytes of a row of n dimensions in the cache, without scales: halves, bytes, or nibbles, of which byte j of 16 has
// dimension j of 32 below and 16 + j above.
template <i32 type, i32 n>
constexpr i32 KV_ROW_BYTES = type == KV_F16 ? 2 * n : type == KV_Q8_0 ? n : n / 2;

// Four nibbles from bit `shift` of each byte on, u = 0 .. 15, as bytes whose top bits are flipped: 128 + (u - 8).
DEVICE u32 nibbles_to_flipped(u32 packed, i32 shift) { return (packed >> shift & 0x0f0f0f0fu) + 0x78787878u; }
