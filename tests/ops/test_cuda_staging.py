"""Blocks of the cache that come from host memory, on the device, against their twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.ground.kv_types import pair_of
from engine.ops import KV_BLOCK_TOKENS, KVLayer, reference
from engine.ops.cuda.attention import Attention
from tests.op_cases import with_homes
from tests.ops.test_cuda_attention import empty_cache, ints, limits, same_bits, upload


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0", "f16,q4_0", "q4_0,q8_0"])
@pytest.mark.parametrize(
    ("K", "head_dim", "blocks"), [(2, 96, (4, 0, 6, 5)), (1, 512, (3,)), (3, 40, ()), (5, 64, (1, 2))]
)
def test_staged_blocks_are_the_twins(device: Any, kv_type: str, K: int, head_dim: int, blocks: tuple[int, ...]) -> None:
    if not pair_of(kv_type).fits(head_dim):
        head_dim += 32 - head_dim % 32
    rng = np.random.default_rng(7)
    host = empty_cache(7 * KV_BLOCK_TOKENS, K, head_dim, kv_type)
    for array in host.arrays:
        if array is not None:
            array.view(np.uint8)[...] = rng.integers(0, 120, array.view(np.uint8).shape)
    absent = ints(len(blocks), *blocks, *([99] * (5 - len(blocks))))
    area = empty_cache(5 * KV_BLOCK_TOKENS, K, head_dim, kv_type)
    there, homes = upload(device, area), with_homes(device, host, 0).homes
    assert homes is not None
    Attention(device, limits(1, K, K, head_dim, 640)).stage(device.upload(absent), homes, there)
    reference.stage(None, absent, host, area)  # type: ignore[arg-type]
    for found, expected in zip(there.arrays, area.arrays, strict=True):
        if expected is not None:
            same_bits(device.read(found).view(np.uint8), expected.view(np.uint8))

    # Of the blocks in the area, each head has some that nobody reads, whose places stay as they are.
    wanted = np.full((K, len(absent)), 99, np.int32)
    for head, found in enumerate(wanted):
        some = [j for j in range(len(blocks)) if (j + head) % 3 != 1]
        found[0], found[1 : 1 + len(some)] = len(some), some
    area = empty_cache(5 * KV_BLOCK_TOKENS, K, head_dim, kv_type)
    for array in area.arrays:
        if array is not None:
            array.view(np.uint8)[...] = 7
    there = upload(device, area)
    attention = Attention(device, limits(1, K, K, head_dim, 640))
    attention.stage(device.upload(absent), homes, there, device.upload(wanted))
    reference.stage(None, absent, host, area, wanted)  # type: ignore[arg-type]
    for found, expected in zip(there.arrays, area.arrays, strict=True):
        if expected is not None:
            same_bits(device.read(found).view(np.uint8), expected.view(np.uint8))
            by_block = expected.view(np.uint8).reshape(5, KV_BLOCK_TOKENS, K, -1)
            for head, some in enumerate(wanted):
                others = [j for j in range(5) if j not in some[1 : 1 + some[0]]]
                assert (by_block[others, :, head] == 7).all()


def test_blocks_that_came_ahead_are_not_brought_again(device: Any) -> None:
    rng, absent = np.random.default_rng(8), ints(2, 4, 1, 0)
    caches = [empty_cache(6 * KV_BLOCK_TOKENS, 2, 64, "f16") for _ in "ab"]
    for cache in caches:
        cache.k[:], cache.v[:] = (rng.standard_normal(cache.k.shape).astype(np.float16) for _ in "kv")
    one, other = (with_homes(device, cache, 0).homes for cache in caches)
    assert one is not None and other is not None
    there, which = upload(device, empty_cache(3 * KV_BLOCK_TOKENS, 2, 64, "f16")), device.upload(absent)
    attention = Attention(device, limits(1, 2, 2, 64, 640))

    def has(cache: KVLayer | None) -> bool:
        """Whether the area has the blocks of a cache; then it has none."""
        found = device.read(there.k)[: 2 * KV_BLOCK_TOKENS].copy()
        device.write(there.k, np.full(there.k.shape, 9, np.float16))
        blocks = None if cache is None else cache.k.reshape(6, -1, 2, 64)[absent[1:3]].reshape(found.shape)
        return bool((found == (9 if blocks is None else blocks)).all())

    for ahead, asked, was_there in ((one, one, True), (one, other, False), (other, other, True)):
        attention.stage_ahead(which, ahead, there)
        device.synchronize()
        assert has(caches[ahead is other])
        attention.stage(which, asked, there)
        assert has(None if was_there else caches[asked is other])
        attention.stage(which, asked, there)
        assert has(caches[asked is other])
    attention.stage_ahead(which, one, there)
    attention.abandon()
    assert has(caches[0])
    attention.stage(which, one, there)
    assert has(caches[0])
