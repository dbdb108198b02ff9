// Copies of whole experts: from the slow tier to staging memory ahead of a prefill layer, into slots after it.
//
// -DEXPERTS=E (<= 512). Copies are those of pieces.cuh: 8 blocks of 512 threads keep 512 KiB under way, several times
// what PCIe needs, and leave the other multiprocessors alone.
#include "pieces.cuh"

DEVICE void poison_piece(u8* to, i64 n, int lane) {
    for (i64 at = lane * 2; at < min(n, (i64)PIECE_BYTES); at += WARP * 2)
        *(u16*)(to + at) = 0xffff;
}

// Copies the missing experts of a layer to `staging` [n_bytes] and writes `source` [E, 3]: where each part of each
// expert is then. An expert's place is its number among the missing ones, in order of index; those beyond the
// staging memory stay where they are. With `experts` [n_pairs], only those that occur in it are copied.
// Blocks of at least E threads; any grid.
KERNEL gather(const i32* slot_of, const u64* expert_ptr, const u64* home_ptr, i64 gate_bytes, i64 up_bytes,
              i64 down_bytes, const i32* experts, int n_pairs, u8* staging, i64 n_bytes, u64* source) {
    __shared__ u32 touched[EXPERTS];
    __shared__ i32 missing[EXPERTS];
    __shared__ i32 warp_count[WARP];
    const int i = threadIdx.x, lane = i % WARP, warp = i / WARP, n_warps = blockDim.x / WARP;
    const i64 bytes[3] = {gate_bytes, up_bytes, down_bytes};
    const bool is_missing = i < EXPERTS && slot_of[i] < 0;
    if (i < EXPERTS)
        touched[i] = experts == nullptr;
    __syncthreads();
    for (int pair = i; pair < n_pairs; pair += blockDim.x)
        touched[experts[pair]] = 1;
    __syncthreads();
    const bool wanted = is_missing && touched[i];
    const u32 mask = __ballot_sync(FULL_WARP, wanted);
    if (lane == 0)
        warp_count[warp] = __popc(mask);
    __syncthreads();
    int place = __popc(mask & ((1u << lane) - 1)), n = 0;
    for (int w = 0; w < n_warps; w++) {
        place += w < warp ? warp_count[w] : 0;
        n += warp_count[w];
    }
    const i64 stride = aligned(bytes[0]) + aligned(bytes[1]) + aligned(bytes[2]);
    n = (int)min((i64)n, n_bytes / stride);
    const bool copied = wanted && place < n;
    if (copied)
        missing[place] = i;
    if (blockIdx.x == 0 && i < EXPERTS) {
        u8* at = staging + place * stride;
        for (int part = 0; part < 3; part++) {
            source[i * 3 + part] = copied ? (u64)at : expert_ptr[i * 3 + part];
            at += aligned(bytes[part]);
        }
    }
    __syncthreads();
    const int per_expert = pieces_of(bytes[0]) + pieces_of(bytes[1]) + pieces_of(bytes[2]);
    for (int work = blockIdx.x * n_warps + warp; work < n * per_expert; work += gridDim.x * n_warps) {
        const int which = work / per_expert;
        stage_piece(staging, which, home_ptr + missing[which] * 3, work % per_expert, bytes, lane);
    }
}

// Copies each expert that enters a slot from where `source` [E, 3] says; rows [count, 3] are the step's fetches.
KERNEL fill(const i32* rows, const i32* count, const u64* source, const u64* slot_ptr, i64 gate_bytes, i64 up_bytes,
            i64 down_bytes) {
    const int lane = threadIdx.x % WARP, n_warps = gridDim.x * (blockDim.x / WARP);
    const i64 bytes[3] = {gate_bytes, up_bytes, down_bytes};
    const int per_expert = pieces_of(bytes[0]) + pieces_of(bytes[1]) + pieces_of(bytes[2]);
    const int n = *count * per_expert;
    for (int work = (blockIdx.x * blockDim.x + threadIdx.x) / WARP; work < n; work += n_warps) {
        const i32* const row = rows + work / per_expert * 3;
        int piece = work % per_expert;
        const int part = part_of(piece, bytes);
        const i64 begin = (i64)piece * PIECE_BYTES;
        copy_piece((u8*)slot_ptr[row[1] * 3 + part] + begin, (const u8*)source[row[0] * 3 + part] + begin,
                   bytes[part] - begin, lane);
    }
}

// 0xFF, which no block format reads as weights of a model, into the slots of the step's fetches; for tests.
KERNEL poison(const i32* rows, const i32* count, const u64* slot_ptr, i64 gate_bytes, i64 up_bytes, i64 down_bytes) {
    const int lane = threadIdx.x % WARP, n_warps = gridDim.x * (blockDim.x / WARP);
    const i64 bytes[3] = {gate_bytes, up_bytes, down_bytes};
    const int per_expert = pieces_of(bytes[0]) + pieces_of(bytes[1]) + pieces_of(bytes[2]);
    const int n = *count * per_expert;
    for (int work = (blockIdx.x * blockDim.x + threadIdx.x) / WARP; work < n; work += n_warps) {
        int piece = work % per_expert;
        const int part = part_of(piece, bytes);
        const i64 begin = (i64)piece * PIECE_BYTES;
        poison_piece((u8*)slot_ptr[rows[work / per_expert * 3 + 1] * 3 + part] + begin, bytes[part] - begin, lane);
    }
}
