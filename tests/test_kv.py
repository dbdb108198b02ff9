"""Bookkeeping of the KV cache: no block has two owners, none is lost, slots follow the table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import CapacityError
from engine.kv import BlockPool, KVCache, Sequence, block_table, kv_bytes
from engine.ops.host import HostDevice


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 200)), max_size=40))
def test_blocks_have_one_owner_and_slots_follow_the_table(events: list[tuple[int, int]]) -> None:
    pool = BlockPool(13)
    sequences = [Sequence(pool) for _ in range(4)]
    for who, n in events:
        if who == 4:
            sequences[n % 4].release()
            continue
        sequence, before = sequences[who], sequences[who].length
        try:
            slots = sequence.extend(n)
        except CapacityError:
            sequence.release()
            continue
        assert sequence.length == before + n == before + len(slots)
        for position, slot in zip(range(before, before + n), slots, strict=True):
            assert slot == sequence.blocks[position // 64] * 64 + position % 64
        held = [b for s in sequences for b in s.blocks]
        assert len(set(held)) == len(held) == 13 - pool.free_blocks
    for sequence in sequences:
        sequence.release()
    assert pool.free_blocks == 13


def test_block_table_is_padded() -> None:
    pool = BlockPool(9)
    short, long = Sequence(pool), Sequence(pool)
    short.extend(3)
    long.extend(130)
    table = block_table([short, long], 4)
    assert table.tolist() == [[*short.blocks, -1, -1, -1], [*long.blocks, -1]]


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_the_plan_is_what_is_allocated(kv_type: str) -> None:
    cache = KVCache(HostDevice(), n_layer=3, n_head_kv=2, head_dim=96, n_tokens=130, kv_type=kv_type)
    arrays = [a for y in cache.layers for a in (y.k, y.v, y.k_scale, y.v_scale) if a is not None]
    assert sum(a.nbytes for a in arrays) == cache.nbytes == kv_bytes(3, 2, 96, 3, kv_type)
    assert all(a.shape[0] == 192 for a in arrays)


def test_a_full_pool_says_so() -> None:
    with pytest.raises(CapacityError, match="all 2 blocks"):
        Sequence(BlockPool(2)).extend(129)
    assert np.array_equal(Sequence(BlockPool(2)).extend(128), np.arange(128))
