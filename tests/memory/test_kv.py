"""The cache: blocks lie where tables say, copies are whole, the plan is what is allocated, states come back."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ground.errors import CapacityError
from engine.memory.blocks import WINDOW_MARGIN_TOKENS, block_table
from engine.memory.kv import KVCache
from engine.memory.shape import DeltaShape, KVGroup, group_blocks, group_bytes
from engine.ops.host import HostDevice

FULL, NARROW = KVGroup((0, 2), 2, 96), KVGroup((1, 3), 3, 64, window=70)
SHAPE = DeltaShape(layers=(4,), kernel=4, n_channels=40, n_head_v=3, d_k=5, d_v=7)


def config(delta: DeltaShape | None = None) -> SimpleNamespace:
    """Six layers: two full, two with a window, one recurrent or nothing, one that shares layer 3's cache."""
    reads = [0, 1, 2, 3, None, 3]
    return SimpleNamespace(n_layer=6, kv_groups=(FULL, NARROW), kv_layer=lambda i: reads[i], delta=delta)


def cache(n_tokens: int, kv_type: str = "f16", step: int = 40, n: int = 4, **options) -> KVCache:
    return KVCache(HostDevice(), config(**options), n_tokens, kv_type, step, n)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=60))
def test_blocks_have_one_owner_and_slots_follow_the_tables(events: list[tuple[int, int]]) -> None:
    kv = cache(13 * 64)
    sequences = [kv.sequence() for _ in range(4)]
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
        assert sequence.length == before + n
        for blocks, group_slots in zip(sequence.groups, slots, strict=True):
            for position, slot in zip(range(before, before + n), group_slots, strict=True):
                assert slot == blocks.held[position // 64] * 64 + position % 64
            reach = range(before + 1 - blocks.window if blocks.window else 0, before + n)
            assert all(blocks.held[p // 64] >= 0 for p in reach if p >= 0)
        for g, pool in enumerate(kv.pools):
            held = [b for s in sequences for b in s.groups[g].held if b >= 0]
            assert len(set(held)) == len(held) == pool.n_blocks - pool.free_blocks
    for sequence in sequences:
        sequence.release()
    assert kv.free_blocks == kv.n_blocks


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(1, 4))
def test_a_windows_pool_never_runs_out_before_the_full_one(steps: list[int], n_decoding: int) -> None:
    kv = cache(1 << 20, n=n_decoding + 1)
    others = [kv.sequence() for _ in range(n_decoding)]
    for other in others:
        other.extend(39)
    long = kv.sequence()
    for n in steps:
        long.extend(n)
        for other in others:
            other.extend(1)


def test_block_table_is_padded() -> None:
    kv = cache(9 * 64)
    short, long = kv.sequence(), kv.sequence()
    short.extend(3)
    long.extend(130)
    table = block_table([short, long], 0, 4)
    assert table.tolist() == [[*short.groups[0].held, -1, -1, -1], [*long.groups[0].held, -1]]


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0,f16", "q8_0,q4_0"])
def test_the_plan_is_what_is_allocated(kv_type: str) -> None:
    kv = cache(1000, kv_type, delta=SHAPE)
    assert kv.layers[5] is kv.layers[3] and kv.layers[4] is None and kv.group_of == (0, 1, 0, 1, 0, 1)
    arrays = [a for y in kv.layers[:4] for a in (y.k, y.v, y.k_scale, y.v_scale) if a is not None]
    states = [a for y in kv.delta if y is not None for a in (y.conv, y.state)]
    assert sum(a.nbytes for a in arrays + states) == kv.nbytes
    assert sum(a.nbytes for a in states) == 4 * SHAPE.state_bytes
    assert sum(group_bytes(g, p.n_blocks, kv_type) for g, p in zip(kv.groups, kv.pools, strict=True)) == sum(
        a.nbytes for a in arrays
    )
    assert kv.pools[0].n_blocks == 16 > kv.pools[1].n_blocks == group_blocks(NARROW, 1000, 40, 4)


def test_a_shared_block_is_not_written() -> None:
    kv = cache(640)
    first, second = kv.sequence(), kv.sequence()
    first.extend(40)
    first.extend(24)
    kv.begin(second, 64, [first.groups[0].held], kv.save(first, windows=True))
    assert second.groups[0].held == first.groups[0].held[:1]
    second.extend(3)
    second.length -= 4
    with pytest.raises(AssertionError, match="shared block"):
        second.extend(1)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0,f16", "q8_0,q4_0"])
def test_blocks_and_windows_are_copied_whole(kv_type: str) -> None:
    kv = cache(1280, kv_type, delta=SHAPE)
    rng = np.random.default_rng(1)
    arrays = [a for y in kv.layers[:4] for a in (y.k, y.v, y.k_scale, y.v_scale) if a is not None]
    for array in arrays:
        array[:] = rng.integers(-100, 100, array.shape)
    first, second = kv.sequence(), kv.sequence()
    for _ in range(8):
        first.extend(40)
    data = kv.read_blocks(0, first.groups[0].held)
    assert data.nbytes == 5 * kv.block_bytes(0)
    kv.write_blocks(0, [9, 8, 10, 11, 6], data)
    for y in (kv.layers[0], kv.layers[2]):
        for array in (y.k, y.v):
            by_block = array.reshape(-1, 64, *array.shape[1:])
            assert np.array_equal(by_block[[9, 8, 10, 11, 6]], by_block[first.groups[0].held])
    saved = kv.save(first, windows=True)
    assert saved.nbytes == kv.snapshot_bytes(320)
    kv.begin(second, 320, [first.groups[0].held], saved)
    assert second.length == 320 and second.reaches(320)
    seen = [blocks.seen(320) for blocks in (first.groups[1], second.groups[1])]
    assert not set(seen[0]) & set(seen[1]) and len(seen[0]) == 2
    for y in (kv.layers[1], kv.layers[3]):
        by_block = y.v.reshape(-1, 64, *y.v.shape[1:])
        assert np.array_equal(by_block[seen[0]], by_block[seen[1]])
    first.release()
    second.release()
    assert kv.free_blocks == kv.n_blocks


def test_states_are_kept_taken_back_and_given_back() -> None:
    kv = cache(640, delta=SHAPE)
    sequence = kv.sequence()
    first = sequence.state
    sequence.extend(5)
    assert sequence.next_states(keep=False) == (first, first)
    sequence.extend(4)
    read, written = sequence.next_states(keep=True)
    assert read == first != written == sequence.state
    assert sequence.take_back(1, 4) == (first, written) and sequence.length == 8
    sequence.extend(3)
    assert sequence.next_states(keep=True)[0] == written
    assert sequence.take_back(3, 3) is None and sequence.length == 8 and sequence.state == written
    sequence.release()
    assert kv.states.free_blocks == 4
    alive = [kv.sequence() for _ in range(4)]
    with pytest.raises(CapacityError, match="recurrent states"):
        kv.sequence()
    assert len({s.state for s in alive}) == 4


def test_a_saved_state_comes_back() -> None:
    kv = cache(640, delta=SHAPE)
    sequence, other = kv.sequence(), kv.sequence()
    rng = np.random.default_rng(0)
    for layer in kv.delta:
        if layer is not None:
            layer.conv[:], layer.state[:] = rng.normal(size=layer.conv.shape), rng.normal(size=layer.state.shape)
    sequence.extend(70)
    other.extend(90)
    saved = kv.save(sequence)
    assert saved.nbytes == SHAPE.state_bytes and saved.length == 70
    kv.restore(other, saved)
    assert other.length == 70
    assert all(np.array_equal(a, b) for a, b in zip(saved.states, kv.save(other).states, strict=True))


def test_a_snapshot_out_of_the_windows_reach_is_refused() -> None:
    kv = cache(6400, delta=SHAPE)
    sequence = kv.sequence()
    sequence.extend(40)
    saved = kv.save(sequence)
    for _ in range(20):
        sequence.extend(40)
    assert not sequence.reaches(40) and sequence.reaches(sequence.length - WINDOW_MARGIN_TOKENS)
    with pytest.raises(CapacityError, match="position 40 of a sequence of 840"):
        kv.restore(sequence, saved)
