// Matrix products with at most four matrices that share their input. Twin: product (also rms_norm before it).
//
// y_m [T, n_m] = w_m [n_m, COLS] of x, or y_m += it where `add` is 1; before that, with WEIGHTED = 1, it is multiplied by
// scale_m, with SCALED = 1, row t is multiplied by row_scale[t], and with CAPPED = 1 each element becomes cap * tanh(element /
// cap). Types TYPE0, TYPE1, TYPE2 and, of a fourth matrix, TYPE3 are all block formats or all float ones. The input is q, d,
// sums (quantized) or x (for float types); with TOKENS = 1, x for any type, which is quantized here, after an RMS norm if
// `norm` is given: the blocks repeat that while their weights arrive, so few large ones are best.
//
// ENTERS = 1: what enters a layer is there, which is said to those who guess what the layer behind it needs (landing.cuh).
//
// Units of ROWS rows (1, 2, 4) are dealt to the warps in turn; a warp has STAGES of them in flight. TOKENS (1, 2, 4, 8)
// activation rows at a time; with SHARED = 1 and with KEPT = 1, the only ones. KEPT, of two tokens and block types: both rows
// are in registers, and take turns. Grid: (any, T / 32 rounded up); block: WARPS warps. Shared memory: with TOKENS = 1 or
// SHARED = 1 the input, rounded up to 16 bytes (COLS * 5 / 4 bytes a row, float types COLS * 4); then STAGES * stage_bytes a
// warp, each at least ROWS rows of the widest type, 32 and TARGET_BYTES. Rows of floats are 16-byte aligned where they are
// normed or quantized.
#include "landing.cuh"
#include "rows.cuh"

#ifndef ENTERS
#define ENTERS 0
#endif
#if ENTERS
#define LANDING , u64* landing_words, i32 entered_layer
#else
#define LANDING
#endif
#ifndef WEIGHTED
#define WEIGHTED 0
#endif
#ifndef SCALED
#define SCALED 0
#endif
#ifndef CAPPED
#define CAPPED 0
#endif
#ifndef KEPT
#define KEPT 0
#endif

constexpr bool FLOATS = is_float(TYPE0);
constexpr bool LOCAL = TOKENS == 1 || (SHARED && !FLOATS); // the input is in shared memory
#ifdef TYPE3
#define FOUR
#define OF_FOURTH const u8 *w3, i32 n3, float *y3,
#else
#define OF_FOURTH
#define TYPE3 TYPE2
#endif
constexpr bool FIRST = has_halves(TYPE0) || has_halves(TYPE1) || has_halves(TYPE2) || has_halves(TYPE3);

constexpr i32 BYTES0 = row_bytes_of(TYPE0, COLS), BYTES1 = row_bytes_of(TYPE1, COLS);
constexpr i32 BYTES2 = row_bytes_of(TYPE2, COLS), BYTES3 = row_bytes_of(TYPE3, COLS);
DEVICE constexpr i32 larger(i32 a, i32 b) { return a > b ? a : b; }
constexpr i32 MOST = ROWS * larger(larger(BYTES0, BYTES1), larger(BYTES2, BYTES3));

constexpr i32 SKEWED = BYTES0 % 16 || BYTES1 % 16 || BYTES2 % 16 || BYTES3 % 16; // 0: all rows are 16-byte aligned

// Rows row0 .. row0 + rows of a matrix of n.
struct Unit {
    const u8* w;
    float* y;
    i32 matrix, row0, n, row_bytes;
};

// At the head of a stage, what its rows' results need, since working that out again takes longer than multiplying a row.
struct Target {
    float* y[ROWS]; // of token 0; null beyond the last row
    i32 n;
    i16 matrix, skew;
};
constexpr i32 TARGET_BYTES = (i32)(sizeof(Target) + 15) / 16 * 16;

// `multiply` by the rows of one of the matrices.
template <i32 tokens, class H, i32 N>
DEVICE void multiply_rows(float* acc, const u8* rows, i32 offset, i32 matrix, const Input& x, const H (&held)[N],
                          const i32 (&token)[tokens], i32 n) {
    if constexpr (TYPE0 == TYPE1 && TYPE0 == TYPE2 && TYPE0 == TYPE3) {
        multiply<TYPE0, ROWS, tokens>(acc, rows, offset, COLS, x, held, token, n);
    } else {
        if (matrix == 0)
            multiply<TYPE0, ROWS, tokens>(acc, rows, offset, COLS, x, held, token, n);
        else if (matrix == 1)
            multiply<TYPE1, ROWS, tokens>(acc, rows, offset, COLS, x, held, token, n);
        else if (TYPE2 == TYPE3 || matrix == 2)
            multiply<TYPE2, ROWS, tokens>(acc, rows, offset, COLS, x, held, token, n);
        else
            multiply<TYPE3, ROWS, tokens>(acc, rows, offset, COLS, x, held, token, n);
    }
}

KERNEL __launch_bounds__(WARPS * WARP, KEPT ? COLS <= 2048 ? 3 : 2 : 0)
    product(const u8* w0, i32 n0, float* y0, const u8* w1, i32 n1, float* y1, const u8* w2, i32 n2, float* y2,
            OF_FOURTH const float* x, const i8* q, const float* d, const i32* sums, const float* norm, float eps, i32 n_tokens,
            i32 add, const float* row_scale, float cap, i32 stage_bytes, float scale0, float scale1, float scale2,
            float scale3 LANDING) {
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i32 units0 = (n0 + ROWS - 1) / ROWS, units1 = (n1 + ROWS - 1) / ROWS, units2 = (n2 + ROWS - 1) / ROWS;
#ifdef FOUR
    const i32 units3 = (n3 + ROWS - 1) / ROWS;
#else
    const i32 units3 = 0;
#endif
    const i32 n_units = units0 + units1 + units2 + units3, step = gridDim.x * WARPS;
    auto unit_of = [&](i32 u) -> Unit {
        if (u < units0)
            return {w0, y0, 0, u * ROWS, n0, BYTES0};
        u -= units0;
        if (u < units1)
            return {w1, y1, 1, u * ROWS, n1, BYTES1};
        u -= units1;
#ifdef FOUR
        if (u >= units2)
            return {w3, y3, 3, (u - units2) * ROWS, n3, BYTES3};
#endif
        return {w2, y2, 2, u * ROWS, n2, BYTES2};
    };
    auto issue = [&](u8* stage, i32 u) {
        if (u < n_units) {
            const Unit unit = unit_of(u);
            const i32 rows = ROWS == 1 ? 1 : min(ROWS, unit.n - unit.row0);
            const u8* const from = unit.w + (i64)unit.row0 * unit.row_bytes;
            Target& target = *(Target*)stage;
            if (lane < ROWS)
                target.y[lane] = lane < rows ? unit.y + unit.row0 + lane : nullptr;
            if (lane == 0)
                target.n = unit.n, target.matrix = (i16)unit.matrix, target.skew = (i16)skew_of<SKEWED>(from);
            stage_rows<MOST, SKEWED>(stage + TARGET_BYTES, from, rows * unit.row_bytes);
        }
        copies_commit();
    };

    u8* stages = shared;
    if (LOCAL)
        stages += shared_input_bytes<TYPE0>(COLS, TOKENS);
    stages += warp * STAGES * stage_bytes;
    // What the kernel before this one did not make comes first: weights of the matrices and of the norm.
    i32 u = blockIdx.x * WARPS + warp;
    dependency_release();
#pragma unroll
    for (i32 i = 0; i < STAGES; i++)
        issue(stages + i * stage_bytes, u + i * step);
    if constexpr (TOKENS == 1 || KEPT)
        fill_grids<TYPE0, TYPE1, TYPE2, TYPE3>();
    constexpr i32 SHARES = (COLS + 128 * WARPS - 1) / (128 * WARPS); // of the row that a warp quantizes
    constexpr bool AHEAD = TOKENS == 1 && !FLOATS && SHARES <= 2;    // they fit in registers
    float4 xs[AHEAD ? SHARES : 1], norms[AHEAD ? SHARES : 1];
    auto element = [&](i32 share) { return (share * WARPS + warp) * 128 + 4 * lane; };
    if (AHEAD && x)
#pragma unroll
        for (i32 i = 0; i < SHARES; i++)
            norms[i] = four_of(norm, COLS, element(i));
#if ENTERS
    const bool says = blockIdx.x == 0 && threadIdx.x == 0;
    const u64 entered = says ? entered_of(landing_words, entered_layer) : 0;
#endif
    dependency_wait();
#if ENTERS
    if (says)
        say_entered(landing_words, entered);
#endif

    Input input = global_input(x, q, d, sums);
    typename HeldOf<TYPE0>::Block held[KEPT ? TOKENS : 1][n_held(TYPE0, COLS)];
    // All of a quantized row is in registers, straight from global memory.
    constexpr bool IN_REGISTERS = !FLOATS && COLS <= 1024 * n_held(TYPE0, COLS);
    static_assert(!KEPT || (TOKENS == 2 && !SHARED && IN_REGISTERS), "rows of activations that registers hold");
    if constexpr (KEPT) {
#pragma unroll
        for (i32 t = 0; t < TOKENS; t++)
            hold_activations<FIRST>(row_of(input, min(t, n_tokens - 1), COLS), COLS, held[t]);
    } else if (TOKENS == 1 && IN_REGISTERS && q) {
        if constexpr (TOKENS == 1 && IN_REGISTERS)
            hold_activations<FIRST>(input, COLS, held[0]);
    } else if constexpr (TOKENS == 1) {
        const Input local = shared_input<TYPE0>(shared, COLS);
        if (FLOATS || q) {
            copy_input<TYPE0>(local, 0, input, 0, COLS, threadIdx.x, blockDim.x);
            if (norm) {
                float* const row = (float*)local.x;
                __syncthreads();
                const float scale = norm_scale(square_sum(row, COLS), COLS, eps);
                __syncthreads(); // every warp has its sum
                for (i32 i = threadIdx.x; i < COLS; i += blockDim.x)
                    row[i] = (row[i] * scale) * norm[i];
            }
        } else {
            __shared__ float shared_scale;
            if (AHEAD)
#pragma unroll
                for (i32 i = 0; i < SHARES; i++)
                    xs[i] = four_of(x, COLS, element(i));
            float scale = 1.0f;
            if (norm) {
                if (warp == 0) { // the others would only compete with it
                    const float found = norm_scale(square_sum<32>(x, COLS), COLS, eps);
                    if (lane == 0)
                        shared_scale = found;
                }
                __syncthreads();
                scale = shared_scale;
            }
            if (AHEAD) {
#pragma unroll
                for (i32 i = 0; i < SHARES; i++)
                    if (element(i) - 4 * lane < COLS)
                        quantize_four(local, xs[i], norm, norms[i], scale, nullptr, COLS, element(i));
            } else {
                quantize_row(local, x, norm, scale, nullptr, COLS, warp, WARPS);
            }
        }
        __syncthreads();
        input = local;
        if constexpr (!FLOATS)
            hold_activations<FIRST>(input, COLS, held[0]);
    } else if constexpr (LOCAL) {
        const Input local = shared_input<TYPE0>(shared, COLS, TOKENS);
        for (i32 t = 0; t < n_tokens; t++)
            copy_input<TYPE0>(local, t, input, t, COLS, threadIdx.x, blockDim.x);
        __syncthreads();
        input = local;
    }

    constexpr i32 N = ROWS * TOKENS, EACH = WARP / N; // lanes that hold the same sum
    const i32 begin = TOKENS == 1 ? 0 : blockIdx.y * WARP, end = TOKENS == 1 ? 1 : min(n_tokens, begin + WARP);
    for (i32 i = 0; u < n_units; u += step, i = i + 1 < STAGES ? i + 1 : 0) {
        u8* const stage = stages + i * stage_bytes;
        __syncwarp(); // the target is written
        const Target& target = *(const Target*)stage;
        const u8* const rows = stage + TARGET_BYTES;
        const i32 offset = SKEWED ? target.skew : 0, matrix = target.matrix;
        float* const row = target.y[lane / EACH / TOKENS];
        for (i32 first = begin; first < end; first += TOKENS) {
            const i32 t = TOKENS == 1 ? 0 : first + lane / EACH % TOKENS;
            const bool valid = lane % EACH == 0 && row && t < end;
            float* const y = valid ? row + (i64)t * target.n : nullptr;
            const float old = add && valid ? *y : 0.0f;
            const float of_row = SCALED && valid ? row_scale[t] : 1.0f;
            if (first == begin)
                stage_wait<STAGES - 1>();
            float acc[N] = {};
            if constexpr (KEPT) {
#pragma unroll
                for (i32 t = 0; t < TOKENS; t++) {
                    float own[ROWS] = {};
                    const i32 token[1] = {0};
                    multiply_rows<1>(own, rows, offset, matrix, row_of(input, t, COLS), held[t], token, 1);
#pragma unroll
                    for (i32 r = 0; r < ROWS; r++)
                        acc[r * TOKENS + t] = own[r];
                }
            } else {
                i32 token[TOKENS];
#pragma unroll
                for (i32 j = 0; j < TOKENS; j++)
                    token[j] = first + j;
                multiply_rows<TOKENS>(acc, rows, offset, matrix, input, held[0], token, end - first);
            }
            float sum = fold_rows(acc);
            if (WEIGHTED)
                sum = (matrix == 0 ? scale0 : matrix == 1 ? scale1 : matrix == 2 ? scale2 : scale3) * sum;
            if (SCALED)
                sum = of_row * sum;
            if (CAPPED)
                sum = softcap(sum, cap);
            if (valid)
                *y = add ? old + sum : sum;
        }
        __syncwarp(); // the stage is free
        issue(stage, u + STAGES * step);
    }
}
