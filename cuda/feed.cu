// What a step is fed, from page-locked host memory to its places on the device, in one launch.
#include "ptx.cuh"

// packed: a row {address of the place, offset, bytes} for each block of the grid, 16 bytes; then what the rows speak of,
// which offsets count from. Offsets and places are multiples of 4.
KERNEL feed(const u8* packed) {
    const u64* const row = (const u64*)packed + 2 * blockIdx.x;
    u8* const to = (u8*)load_fresh(row);
    const u64 rest = load_fresh(row + 1);
    const u8* const from = packed + 16 * gridDim.x + (u32)rest;
    const i32 n_bytes = (i32)(rest >> 32), n_words = n_bytes / 4;
    for (i32 i = threadIdx.x; i < n_words; i += blockDim.x)
        ((i32*)to)[i] = load_fresh((const i32*)from + i);
    for (i32 i = 4 * n_words + threadIdx.x; i < n_bytes; i += blockDim.x)
        to[i] = *(const volatile u8*)(from + i);
}
