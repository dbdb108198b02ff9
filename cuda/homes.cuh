// Where a block of the cache lies: in the pool, or with -DHOMES=1 from block n_pool on in arrays of the same shape that are
// elsewhere, as in host memory (docs/kv.md). Twin: KVLayer of engine/ops/__init__.py.
#pragma once

#include "ptx.cuh"

#ifndef HOMES
#define HOMES 0
#endif

// Keys and values of a layer, and their scales.
struct KvArrays {
    const u8 *k, *v;
    const u16 *k_scale, *v_scale;
};

// A block by its index in the arrays that have it.
struct CachedBlock {
    i32 index;
    KvArrays in;
};

#if HOMES
#define HOME_PARAMETERS , i32 n_pool, const u8 *home_k, const u8 *home_v, const u16 *home_k_scale, const u16 *home_v_scale
#define HOME_ARGUMENTS , n_pool, {home_k, home_v, home_k_scale, home_v_scale}

DEVICE CachedBlock cached_block(i32 block, const KvArrays& pool, i32 n_pool, const KvArrays& homes) {
    return block < n_pool ? CachedBlock{block, pool} : CachedBlock{block - n_pool, homes};
}
#else
#define HOME_PARAMETERS
#define HOME_ARGUMENTS

DEVICE CachedBlock cached_block(i32 block, const KvArrays& pool) { return {block, pool}; }
#endif
