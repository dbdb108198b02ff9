// What follows from a choice of blocks (recall.cu): which of them are to be brought from host memory, and what is counted.
// Twin of find_absent: engine/ops/reference.py. Grids: find_absent K, blocks of WARPS warps; tally T, blocks of a warp.
//
// find_absent: wanted int32 [K, stride] gets, of each KV head, how many blocks from n_pool on the rows' tables have at a
// place that is listed, and which they are beyond it, in order. absent[0]: how many there are at most.
//
// tally: missed [n_layer, stride] has the shares of each row's heads[i] heads in layer i, 0: it reads all; reads [n_layer,
// read_stride] how many blocks each of its heads[n_layer + i] KV heads has read. total [T, 2] gets the largest share there
// was and the sum of the steps' means, total_read [T] the sum of blocks; nothing of a row for which controls [T, n_control]
// begins with 0. The host reads both, as they were behind step n = 0, 1 ..., from entry n % ring_size of its row of ring, two
// u64 each: blocks; the largest share, and the sum in the upper half. Draws that were made are n + 1, at step_at of a row's controls.
#include "arithmetic.cuh"

constexpr i32 KV_BLOCK = 64, WARPS = 16; // engine/ops/__init__.py, THREADS of engine/ops/cuda/recall.py

KERNEL __launch_bounds__(WARPS * WARP)
find_absent(const i32* list, const i32* last, const i32* block_table, const i32* sequence, const i32* absent, i32 n_rows,
            i32 width, i32 table_width, i32 n_pool, i32* wanted, i32 stride) {
    dependency_release();
    dependency_wait();
    __shared__ i32 sums[WARPS];
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_threads = WARPS * WARP;
    const i32 head = blockIdx.x, n_head_kv = gridDim.x, n = absent[0];
    i32* const found = wanted + (i64)head * stride + 1;
    for (i32 i = threadIdx.x; i < n; i += n_threads)
        found[i] = 0;
    __syncthreads();
    const i32 of_row = max(WARPS / n_rows, 1); // warps that go through a row's list together
    for (i32 t = warp / of_row; t < n_rows; t += WARPS / of_row) {
        const i32* const own = list + ((i64)t * n_head_kv + head) * width;
        const i32* const table = block_table + (i64)sequence[t] * table_width;
        const i32 end = last[t * n_head_kv + head] / KV_BLOCK;
        for (i32 i = warp % of_row * WARP + lane; i <= end; i += of_row * WARP) {
            const i32 block = table[own[i]] - n_pool;
            if (block >= 0)
                found[block] = 1; // whoever else says so writes the same
        }
    }
    __syncthreads();
    i32 n_found = 0;
    for (i32 i0 = 0; i0 < n; i0 += n_threads) {
        const i32 i = i0 + threadIdx.x;
        const bool is_read = i < n && found[i];
        const u32 alike = __ballot_sync(FULL_WARP, is_read);
        if (lane == 0)
            sums[warp] = __popc(alike);
        __syncthreads();
        i32 at = n_found;
        for (i32 w = 0; w < WARPS; w++) {
            at += w < warp ? sums[w] : 0;
            n_found += sums[w];
        }
        if (is_read) // never behind what was just looked at
            found[at + __popc(alike & ((1u << lane) - 1))] = i;
        __syncthreads();
    }
    if (threadIdx.x == 0)
        found[-1] = n_found;
}

KERNEL tally(const float* missed, i32 n_layer, i32 stride, const i32* reads, i32 read_stride, const i32* heads,
             const i32* controls, i32 n_control, i32 step_at, float* total, u64* total_read, u64* ring, i32 ring_size) {
    dependency_release();
    dependency_wait();
    const i32 t = blockIdx.x;
    total += 2 * t;
    float top = 0.0f, sum = 0.0f;
    i32 n = 0, n_read = 0;
    for (i32 layer = threadIdx.x; layer < n_layer; layer += WARP) {
        for (i32 h = 0; h < heads[layer]; h++, n++) {
            const float share = missed[(i64)layer * stride + t * heads[layer] + h];
            top = share > top ? share : top;
            sum += share;
        }
        const i32 n_head_kv = heads[n_layer + layer];
        for (i32 h = 0; h < n_head_kv; h++)
            n_read += reads[(i64)layer * read_stride + t * n_head_kv + h];
    }
#pragma unroll
    for (i32 o = 16; o > 0; o >>= 1)
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, o));
    sum = fold(sum);
    n = __reduce_add_sync(FULL_WARP, n);
    n_read = __reduce_add_sync(FULL_WARP, n_read);
    if (threadIdx.x == 0 && controls[t * n_control] && n) {
        total_read[t] += (u64)n_read;
        total[0] = fmaxf(total[0], top);
        total[1] += sum / (float)n;
        u64* const entry = ring + 2 * (t * ring_size + (controls[t * n_control + step_at] - 1) % ring_size);
        store_system(entry, total_read[t]);
        store_system(entry + 1, (u64)__float_as_uint(total[1]) << 32 | __float_as_uint(total[0]));
    }
}
