// Experts of tiles of up to 32 rows of activations, with the bits of docs/arithmetic.md. Twin: expert_ffn.
//
// A tile is {expert, first, count, 0}: pairs[first .. first + count] of its uses, as t * n_used + a, are multiplied by the
// matrices at source[expert][3]; where that is 0 somebody else does it. A warp multiplies one row of a matrix with the
// rows of the tile in turn: correct, and slow.
//
// Kernels.
//   kernel          writes                                    grid                          block
//   tiled_gate_up   z [T * A, F] = act(gate h) * (up h)       (ceil(F / 32), tiles)         WARPS warps
//   tiled_down      y [T * A, columns] = rows of down z       (ceil(columns / 32), tiles)   WARPS warps
//
// Macros, and those of experts.cuh: WARPS, of a block, 1, 2 or 4. Shared memory: stage_bytes a warp.
#include "experts.cuh"

// The product of a row of a matrix that is staged with a row of activations, in all lanes.
template <Type type>
DEVICE float row_product(const u8* stage, i32 skew, const Input& x) {
    typename HeldOf<type>::Block held[n_held(type, COLS)];
    if constexpr (!is_float(type))
        hold_activations<has_halves(type)>(x, COLS, held);
    const i32 token[1] = {0};
    float acc[1] = {};
    multiply<type, 1, 1>(acc, stage, skew, COLS, x, held, token, 1);
    return fold(acc[0]);
}

template <Type type>
DEVICE i32 stage_row(u8* stage, const u8* matrix, i32 row) {
    constexpr i32 BYTES = row_bytes_of(type, COLS);
    __syncwarp(); // of the row before
    const i32 skew = stage_rows<BYTES, BYTES>(stage, matrix + (i64)row * BYTES, BYTES);
    copies_commit();
    stage_wait<0>();
    return skew;
}

#ifdef GATE

KERNEL __launch_bounds__(WARPS * WARP)
    tiled_gate_up(const u64* source, const int4* tiles, const i32* n_tiles, const i32* pairs, i32 n_used, i32 F,
                  const float* x, const i8* q, const float* d, const i32* sums, float* z, i8* zq, float* zd, i32* zsums,
                  i32 stage_bytes, const float* gate_scales) {
    __shared__ float gs[32][33], us[32][33];
    DYNAMIC_SHARED(u8, shared);
    if ((i32)blockIdx.y >= *n_tiles)
        return;
    const int4 tile = tiles[blockIdx.y];
    const u8* const gate = (const u8*)source[3 * tile.x];
    const u8* const up = (const u8*)source[3 * tile.x + 1];
    if (!gate)
        return;
    fill_grids<GATE, UP>();
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row0 = blockIdx.x * 32, rows = min(32, F - row0);
    u8* const stage = shared + warp * stage_bytes;
    const Input input = global_input(x, q, d, sums);
    for (i32 r = warp; r < rows; r += WARPS)
        for (i32 is_up = 0; is_up < 2; is_up++) {
            const i32 skew = is_up ? stage_row<UP>(stage, up, row0 + r) : stage_row<GATE>(stage, gate, row0 + r);
            for (i32 i = 0; i < tile.z; i++) {
                const Input own = row_of(input, pairs[tile.y + i] / n_used, COLS);
                float sum = is_up ? row_product<UP>(stage, skew, own) : row_product<GATE>(stage, skew, own);
                if (WEIGHTED && !is_up)
                    sum = gate_scales[tile.x] * sum;
                if (lane == 0)
                    (is_up ? us : gs)[i][r] = sum;
            }
        }
    __syncthreads();
    const auto pair_of = [&](i32 i) -> i64 { return pairs[tile.y + i]; };
    store_z<WARPS>({gs, us, tile.z, rows}, {z, zq, zd, zsums, F}, pair_of, row0);
}

#endif
#ifdef DOWN

KERNEL __launch_bounds__(WARPS * WARP)
    tiled_down(const u64* source, const int4* tiles, const i32* n_tiles, const i32* pairs, const float* z, const i8* zq,
               const float* zd, const i32* zsums, float* y, i32 first, i32 columns, i32 stage_bytes) {
    DYNAMIC_SHARED(u8, shared);
    if ((i32)blockIdx.y >= *n_tiles)
        return;
    const int4 tile = tiles[blockIdx.y];
    const u8* const down = (const u8*)source[3 * tile.x + 2];
    if (!source[3 * tile.x])
        return;
    fill_grids<DOWN>();
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row0 = blockIdx.x * 32;
    u8* const stage = shared + warp * stage_bytes;
    const Input input = global_input(z, zq, zd, zsums);
    for (i32 r = row0 + warp; r < min(columns, row0 + 32); r += WARPS) {
        const i32 skew = stage_row<DOWN>(stage, down, first + r);
        for (i32 i = 0; i < tile.z; i++) {
            const i64 pair = pairs[tile.y + i];
            const float sum = row_product<DOWN>(stage, skew, row_of(input, pair, COLS));
            if (lane == 0)
                y[pair * columns + r] = sum;
        }
    }
}

#endif
