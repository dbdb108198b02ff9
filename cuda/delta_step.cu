// The gated delta rule for at most 32 tokens, with the convolution, the norms and the gates before it. Twin: delta.
//
// -DDK, -DDV: of a head, multiples of 32, DK at most 256; -DTAPS: taps of the convolution, 2 or more. Shapes as in
// engine/ops/delta.py; positions of a sequence ascend by one.
//
// A block does 32 rows of a V head's state, [DV, DK], for one sequence: it loads them once, keeps them in registers
// through the sequence's tokens and stores them once. A row of the state is spread over 8 lanes. What follows from
// mixed and from the gates is made by each block for itself. A token's bits depend on its own inputs and the state.
//
// Grid (DV / 32, H_v, n_sequence), block 256, shared memory n_tokens * (2 * DK + 32) floats. arrivals [n_sequence,
// H_k]: zeros, and zeros again afterwards. May overlap the kernel ahead of it, which writes mixed, beta, alpha; state,
// conv_state, states and the arrays of the step are those of the last launch without overlap.
#include "arithmetic.cuh"

constexpr i32 THREADS = 256, WARPS = THREADS / WARP, ROWS = 32, LANES = THREADS / ROWS, MAX_TOKENS = 32;
constexpr i32 CHANNELS = 2 * DK + ROWS; // q, k and the block's part of v
constexpr i32 SHARES = (CHANNELS + THREADS - 1) / THREADS, KEPT = TAPS - 1, PIECES = DK / (4 * LANES);

DEVICE float dot4(const float4& a, const float4& b, float sum) {
    sum = __fmaf_rn(a.x, b.x, sum);
    sum = __fmaf_rn(a.y, b.y, sum);
    sum = __fmaf_rn(a.z, b.z, sum);
    return __fmaf_rn(a.w, b.w, sum);
}

DEVICE float sum_lanes(float v) {
#pragma unroll
    for (i32 o = LANES / 2; o > 0; o >>= 1)
        v = v + __shfl_xor_sync(FULL_WARP, v, o);
    return v;
}

KERNEL __launch_bounds__(THREADS)
    delta_step(const float* mixed, const float* beta, const float* alpha, const float* conv, const float* dt_bias,
               const float* a, float eps, float* conv_state, float* state, const i32* states, const i32* sequence,
               const i32* positions, const i32* slots, i32* arrivals, float* out, i32 n_tokens, i32 n_head_k) {
    DYNAMIC_SHARED(float, convolved); // [n][CHANNELS]
    __shared__ float decays[MAX_TOKENS], rates[MAX_TOKENS], products[MAX_TOKENS];
    __shared__ i32 arrived_last;
    const i32 thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const i32 n_heads = gridDim.y, head = blockIdx.y, key_head = head % n_head_k, first_row = blockIdx.x * ROWS;
    const i64 n_mixed = 2 * n_head_k * DK + n_heads * DV;
    dependency_release();
    const bool mine = lane < n_tokens && slots[lane] >= 0 && sequence[lane] == (i32)blockIdx.z;
    const u32 tokens = __ballot_sync(FULL_WARP, mine);
    if (!tokens) {
        dependency_wait();
        return;
    }
    const i32 first = __ffs(tokens) - 1, n = __popc(tokens);
    const bool fresh = positions[first] == 0;
    const i64 source = states[2 * blockIdx.z], target = states[2 * blockIdx.z + 1];

    // What the kernel ahead does not make: the state, the last inputs of the convolution, its weights.
    const i32 row = first_row + thread / LANES, part = 4 * (thread % LANES);
    float4 s[PIECES];
#pragma unroll
    for (i32 i = 0; i < PIECES; i++)
        s[i] = fresh ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                     : *(const float4*)(state + ((source * n_heads + head) * DV + row) * DK + part + 4 * LANES * i);
    i32 channel[SHARES];
    float window[SHARES][KEPT], weights[SHARES][TAPS];
#pragma unroll
    for (i32 i = 0; i < SHARES; i++) {
        const i32 c = i * THREADS + thread;
        channel[i] = c < DK       ? key_head * DK + c
                     : c < 2 * DK ? (n_head_k + key_head) * DK + c - DK
                                  : 2 * n_head_k * DK + head * DV + first_row + c - 2 * DK;
        if (c < CHANNELS) {
#pragma unroll
            for (i32 j = 0; j < KEPT; j++)
                window[i][j] = fresh ? 0.0f : conv_state[(source * KEPT + j) * n_mixed + channel[i]];
#pragma unroll
            for (i32 j = 0; j < TAPS; j++)
                weights[i][j] = conv[(i64)channel[i] * TAPS + j];
        }
    }
    const float head_a = a[head], head_bias = dt_bias[head];
    dependency_wait();

    if (warp == WARPS - 1 && lane < n) {
        const i64 at = (i64)(first + lane) * n_heads + head;
        decays[lane] = exponential(head_a * softplus(alpha[at] + head_bias));
        rates[lane] = sigmoid(beta[at]);
    }
#pragma unroll 4
    for (i32 t = 0; t < n; t++)
#pragma unroll
        for (i32 i = 0; i < SHARES; i++)
            if (const i32 c = i * THREADS + thread; c < CHANNELS) {
                const float x = mixed[(first + t) * n_mixed + channel[i]];
                float sum = 0.0f;
#pragma unroll
                for (i32 j = 0; j < KEPT; j++)
                    sum = __fmaf_rn(window[i][j], weights[i][j], sum);
                convolved[t * CHANNELS + c] = silu(__fmaf_rn(x, weights[i][KEPT], sum));
#pragma unroll
                for (i32 j = 0; j < KEPT; j++)
                    window[i][j] = j + 1 < KEPT ? window[i][j + 1] : x;
            }
    __syncthreads();
    // Several blocks read the last inputs of q and k; the last one to have done so stores the new ones.
    if (thread == 0) {
        i32* const arrived = arrivals + blockIdx.z * n_head_k + key_head;
        const i32 n_blocks = gridDim.x * (n_heads / n_head_k);
        arrived_last = atomicAdd(arrived, 1) == n_blocks - 1;
        if (arrived_last)
            *arrived = 0;
    }

    for (i32 t = warp; t < n; t += WARPS) {
        float *const q = convolved + t * CHANNELS, *const k = q + DK;
        float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
        for (i32 i = lane; i < DK; i += WARP) {
            qq = __fmaf_rn(q[i], q[i], qq);
            kk = __fmaf_rn(k[i], k[i], kk);
            qk = __fmaf_rn(q[i], k[i], qk);
        }
        const float scale = 1.0f / __fsqrt_rn((float)DK);
        const float q_scale = (1.0f / __fsqrt_rn(fold(qq) + eps)) * scale, k_scale = 1.0f / __fsqrt_rn(fold(kk) + eps);
        qk = fold(qk);
#pragma unroll
        for (i32 i = lane; i < DK; i += WARP) {
            q[i] = q[i] * q_scale;
            k[i] = k[i] * k_scale;
        }
        if (lane == 0)
            products[t] = (qk * q_scale) * k_scale;
    }
    __syncthreads();

    // Both products with the state before the token: q (S' + k c) = q S' + (q k) c.
#pragma unroll 2
    for (i32 t = 0; t < n; t++) {
        const float* const q = convolved + t * CHANNELS;
        const float* const k = q + DK;
        const float decay = decays[t], v = q[2 * DK + thread / LANES];
        float4 keys[PIECES];
        float answer = 0.0f, result = 0.0f;
#pragma unroll
        for (i32 i = 0; i < PIECES; i++) {
            keys[i] = *(const float4*)(k + part + 4 * LANES * i);
            answer = dot4(s[i], keys[i], answer);
            result = dot4(s[i], *(const float4*)(q + part + 4 * LANES * i), result);
        }
        answer = sum_lanes(answer);
        result = sum_lanes(result);
        const float correction = (v - decay * answer) * rates[t];
        result = __fmaf_rn(products[t], correction, decay * result);
#pragma unroll
        for (i32 i = 0; i < PIECES; i++) {
            s[i].x = __fmaf_rn(keys[i].x, correction, s[i].x * decay);
            s[i].y = __fmaf_rn(keys[i].y, correction, s[i].y * decay);
            s[i].z = __fmaf_rn(keys[i].z, correction, s[i].z * decay);
            s[i].w = __fmaf_rn(keys[i].w, correction, s[i].w * decay);
        }
        if (thread % LANES == 0)
            out[((i64)(first + t) * n_heads + head) * DV + row] = result;
    }
#pragma unroll
    for (i32 i = 0; i < PIECES; i++)
        *(float4*)(state + ((target * n_heads + head) * DV + row) * DK + part + 4 * LANES * i) = s[i];
#pragma unroll
    for (i32 i = 0; i < SHARES; i++)
        if (const i32 c = i * THREADS + thread; c < CHANNELS && (c >= 2 * DK || arrived_last))
#pragma unroll
            for (i32 j = 0; j < KEPT; j++)
                conv_state[(target * KEPT + j) * n_mixed + channel[i]] = window[i][j];
}
