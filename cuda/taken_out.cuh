// Values that are not finite, in tiles of which some rows see a part (attention.cu).
#pragma once

#include "queries.cuh"

template <bool first, class A, class B>
struct Choice {
    typedef A Type;
};
template <class A, class B>
struct Choice<false, A, B> {
    typedef B Type;
};

DEVICE bool sees(i32 position, i32 limit) { return position <= limit && (!WINDOW || position > limit - WINDOW); }

// Zero times infinity is NaN, so a value that some row must not see spoils that row in a matrix product. In a part
// with positions that only some rows see, such values become zeros first, and the rows that do see them NaN later.
// taken_out[dimension] is the first such position, or KV_BLOCK; with a window a bit for each of them.
typedef Choice<WINDOW != 0, u16, u8>::Type TakenOut;

DEVICE void take_out_values(TakenOut* taken_out, u8* tile, u8* scales, i32 position0, i32 head, i32 n_head_kv) {
    for (i32 dimension = threadIdx.x % GROUP; dimension < HEAD_DIM; dimension += GROUP) {
        i32 found = WINDOW ? 0 : KV_BLOCK;
        const auto take_out = [&](i32 position) { found = WINDOW ? found | 1 << (position - position0) : position; };
        for (i32 position = position0 + PART - 1; position >= position0; position--) {
            if constexpr (Values::BYTES) {
                i8* const value = (i8*)tile + position * Values::STRIDE + dimension;
                const u16 bits = lone_kv_scale_bits<Values>(scales, position, dimension / 32, head, n_head_kv);
                const float d = half_to_float(bits);
                if ((float_to_half(d * (float)*value) & 0x7c00u) == 0x7c00u) {
                    take_out(position);
                    *value = 0;
                }
                __syncwarp(); // a warp has all dimensions of a scale, which is not finite for all of them or for none
                if (dimension % 32 == 0 && !(fabsf(d) < INFINITE))
                    set_kv_scale<Values>(scales, position, dimension / 32, head, n_head_kv, 0);
                __syncwarp();
            } else {
                u16* const value = (u16*)(tile + position * Values::STRIDE) + dimension;
                if ((*value & 0x7c00u) == 0x7c00u) {
                    take_out(position);
                    *value = 0;
                }
            }
        }
        taken_out[dimension] = (TakenOut)found;
    }
}

// Whether a row sees what was taken out of a dimension of a part, which begins at position0 of the tile at `base`.
DEVICE bool misses(i32 taken_out, i32 base, i32 position0, i32 limit) {
    if (!WINDOW)
        return taken_out < KV_BLOCK && base + taken_out <= limit;
    const i32 last = limit - (base + position0), first = last - WINDOW + 1;
    return last >= 0 && first < PART && (taken_out & 0xffff >> max(PART - 1 - last, 0) & 0xffff << max(first, 0)) != 0;
}
