"""Attention input and small-batch attention on the device, against their twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.ground.kv_types import pair_of
from engine.ops import KV_BLOCK_TOKENS, KVLayer, Limits, arithmetic, reference
from engine.ops.cuda.attention import Attention
from engine.ops.cuda.products import Quantized
from tests.op_cases import with_homes

NMSE = 1e-7  # probabilities, and values of q8_0, are rounded to halves


def limits(T: int, H: int, K: int, head_dim: int, n_ctx: int) -> Limits:
    return Limits(T, 64, H * head_dim, 64, 64, 1, 1, n_head=H, n_head_kv=K, head_dim=head_dim, n_ctx=n_ctx)


def empty_cache(n_slots: int, K: int, head_dim: int, kv_type: str) -> KVLayer:
    """What nobody wrote: NaN, or other numbers with scales that are NaN."""
    arrays: list[np.ndarray] = []
    scales: list[np.ndarray | None] = []
    for i, kind in enumerate(pair_of(kv_type)):
        arrays.append(np.full((n_slots, K, kind.n_elements(head_dim)), 77 + i if kind.block else np.nan, kind.dtype))
        shape = (n_slots, K, kind.n_scales(head_dim))
        scales.append(np.full(shape, np.nan, np.float16) if kind.block else None)
    return KVLayer(*arrays, *scales)


def copied(kv: KVLayer) -> KVLayer:
    return KVLayer(*(None if v is None else v.copy() for v in kv.arrays))


def upload(device: Any, kv: KVLayer) -> KVLayer:
    return KVLayer(*(None if v is None else device.upload(v) for v in kv.arrays))


def nmse(found: np.ndarray, expected: np.ndarray) -> float:
    return float(((found - expected) ** 2).sum() / (expected**2).sum())


def same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    nan = np.isnan(found)
    np.testing.assert_array_equal(nan, np.isnan(expected))
    bits = np.dtype(f"u{found.dtype.itemsize}")
    np.testing.assert_array_equal(found.view(bits)[~nan], expected.view(bits)[~nan])


# --- input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0", "f16,q4_0", "q4_0,q8_0"])
@pytest.mark.parametrize(
    ("T", "H", "K", "head_dim", "n_rot", "q_normed", "k_normed"),
    [
        (1, 8, 2, 128, 128, True, True),
        (5, 3, 1, 96, 96, True, False),
        (37, 4, 2, 64, 32, False, True),
        (2, 1, 1, 256, 256, True, True),
        (3, 5, 2, 512, 128, True, True),
    ],
)
def test_input(
    device: Any, kv_type: str, T: int, H: int, K: int, head_dim: int, n_rot: int, q_normed: bool, k_normed: bool
) -> None:
    rng = np.random.default_rng(T)
    q_raw, k_raw, v_raw = (rng.standard_normal((T, n * head_dim), np.float32) for n in (H, K, K))
    v_raw[0, :3] = 1e6, 1e-9, np.nan
    k_raw[-1, :32] *= np.float32(1e-33)
    q_norm = rng.standard_normal(head_dim, np.float32) if q_normed else None
    k_norm = rng.standard_normal(head_dim, np.float32) if k_normed else None
    rope = arithmetic.rope_table(300, n_rot, 1e4)
    positions = rng.integers(0, 300, T).astype(np.int32)
    n_slots = 64 * 3
    slots = rng.permutation(np.arange(1, n_slots, dtype=np.int32))[:T]
    slots[T // 2] = -1
    slots[0] = 0

    query, key = q_raw.reshape(T, H, head_dim), k_raw.reshape(T, K, head_dim)
    query = query if q_norm is None else arithmetic.rms_norm(query, q_norm, 1e-6)
    key = key if k_norm is None else arithmetic.rms_norm(key, k_norm, 1e-6)
    kept = slots >= 0
    with np.errstate(all="ignore"):
        expected_q = reference._rotate(query, rope, positions)
        rotated = reference._rotate(key, rope, positions)
        expected = empty_cache(n_slots, K, head_dim, kv_type)
        reference._store(expected.k, expected.k_scale, slots[kept], rotated[kept])
        reference._store(expected.v, expected.v_scale, slots[kept], v_raw.reshape(T, K, head_dim)[kept])

    kv = upload(device, empty_cache(n_slots, K, head_dim, kv_type))
    q = device.upload(np.full((T, H, head_dim), np.nan, np.float32))
    up = [None if a is None else device.upload(a) for a in (q_raw, k_raw, v_raw, q_norm, k_norm)]
    Attention(device, limits(T, H, K, head_dim, 64)).input(
        *up, 1e-6, device.upload(rope), device.upload(positions), kv, device.upload(slots), q
    )
    same_bits(device.read(q), expected_q)
    for found, want in zip(kv.arrays, expected.arrays, strict=True):
        if want is not None:
            same_bits(device.read(found), want)


# --- decode ---------------------------------------------------------------------------------------


class Scene:
    """A cache with random sequences in shuffled blocks, NaN where nothing was written, and queries."""

    def __init__(
        self, H: int, K: int, head_dim: int, kv_type: str, lengths: list[int], max_blocks: int, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.H, self.K, self.head_dim, self.max_blocks = H, K, head_dim, max_blocks
        used = [-(-n // KV_BLOCK_TOKENS) for n in lengths]
        order = rng.permutation(sum(used) + 1).astype(np.int32)
        self.cache = empty_cache(len(order) * KV_BLOCK_TOKENS, K, head_dim, kv_type)
        self.table = np.full((len(lengths), max_blocks), -1, np.int32)
        for i, n in enumerate(lengths):
            self.table[i, : used[i]] = order[sum(used[:i]) : sum(used[: i + 1])]
            at = np.arange(n)
            slots = self.table[i, at // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + at % KV_BLOCK_TOKENS
            for cache, scales in ((self.cache.k, self.cache.k_scale), (self.cache.v, self.cache.v_scale)):
                reference._store(cache, scales, slots, rng.standard_normal((n, K, head_dim), np.float32))
        self.rng = rng
        self.scale = float(head_dim**-0.5)

    def query(self, T: int) -> np.ndarray:
        return (3 * self.rng.standard_normal((T, self.H, self.head_dim))).astype(np.float32)

    def poison(self, sequence: int, n_blocks: int) -> None:
        """Take a sequence's first blocks away: every other one is none, the rest are another's, all NaN."""
        c = self.cache
        for cache in (c.k if c.k_scale is None else c.k_scale, c.v if c.v_scale is None else c.v_scale):
            for block in self.table[sequence, :n_blocks]:
                cache[block * KV_BLOCK_TOKENS : (block + 1) * KV_BLOCK_TOKENS] = np.nan
        self.table[sequence, :n_blocks:2] = -1

    def exact(self, q: np.ndarray, sequence: np.ndarray, positions: np.ndarray, window: int = 0) -> np.ndarray:
        """In binary64."""
        out = np.zeros((len(q), self.H * self.head_dim))
        for t, (s, p) in enumerate(zip(sequence, positions, strict=True)):
            at = np.arange(max(p + 1 - window, 0) if window else 0, p + 1)
            at = at[self.table[s, at // KV_BLOCK_TOKENS] >= 0]
            slots = self.table[s, at // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + at % KV_BLOCK_TOKENS
            k = reference._load(self.cache.k, self.cache.k_scale, slots).astype(np.float64)
            v = reference._load(self.cache.v, self.cache.v_scale, slots).astype(np.float64)
            heads = np.arange(self.H) * self.K // self.H
            with np.errstate(all="ignore"):
                score = np.einsum("hd,shd->hs", q[t].astype(np.float64), k[:, heads]) * np.float32(self.scale)
                p = np.exp(score - score.max(axis=1, keepdims=True))
                out[t] = (np.einsum("hs,shd->hd", p, v[:, heads]) / p.sum(axis=1, keepdims=True)).reshape(-1)
        return out

    def run(
        self,
        device: Any,
        q: np.ndarray,
        sequence: np.ndarray,
        positions: np.ndarray,
        quantized: Quantized | None = None,
        window: int = 0,
        gate: np.ndarray | None = None,
        gate_kind: str = "",
        apart: bool = False,
        as_block: bool = False,
        n_pool: int | None = None,
    ) -> np.ndarray:
        """n_pool: so many blocks are in the pool, the others at home."""
        T = len(q)
        n_ctx = self.max_blocks * KV_BLOCK_TOKENS
        attention = Attention(device, limits(T, self.H, self.K, self.head_dim, n_ctx))
        out = device.upload(np.full((T, self.H * self.head_dim), np.nan, np.float32))
        arrays = [device.upload(a) for a in (self.table, sequence, positions)]
        gates = None if gate is None else device.upload(gate)
        cache = upload(device, self.cache) if n_pool is None else with_homes(device, self.cache, n_pool)
        attention.decode(
            device.upload(q), cache, *arrays, self.scale, out, quantized, window, gates, gate_kind,
            apart, as_block,
        )  # fmt: skip
        found: np.ndarray = device.read(out)
        return found


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize(
    ("H", "K", "head_dim", "sequence", "positions"),
    [
        (8, 1, 128, ints(0), ints(299)),
        (6, 2, 96, ints(0, 0, 0), ints(62, 63, 64)),
        (2, 2, 64, ints(1, 1, 0), ints(130, 131, 0)),  # one head a group, two sequences
        (16, 1, 64, ints(0, 0, 0, 1, 1), ints(197, 198, 199, 63, 100)),  # four row tiles
        (7, 1, 256, ints(0, 0, 0), ints(70, 71, 72)),
        (8, 1, 512, ints(0, 0), ints(139, 140)),  # half a block at a time
        (10, 1, 512, ints(0, 0, 0), ints(70, 71, 72)),  # a quarter
        (4, 2, 384, ints(0), ints(66)),
    ],
)
def test_decode(
    device: Any, kv_type: str, H: int, K: int, head_dim: int, sequence: np.ndarray, positions: np.ndarray
) -> None:
    lengths = [int(positions[sequence == s].max()) + 1 for s in range(int(sequence.max()) + 1)]
    scene = Scene(H, K, head_dim, kv_type, lengths, max(lengths) // KV_BLOCK_TOKENS + 2)
    q = scene.query(len(sequence))
    found = scene.run(device, q, sequence, positions)
    assert nmse(found, scene.exact(q, sequence, positions)) < NMSE


@pytest.mark.parametrize("head_dim", [72, 80])
def test_decode_of_heads_that_end_within_a_step(device: Any, head_dim: int) -> None:
    scene = Scene(3, 1, head_dim, "f16", [90], 2)
    q = scene.query(2)
    found = scene.run(device, q, ints(0, 0), ints(88, 89))
    assert nmse(found, scene.exact(q, ints(0, 0), ints(88, 89))) < NMSE


def test_long_contexts_use_longer_splits(device: Any) -> None:
    scene = Scene(2, 1, 64, "f16", [8600], 140)
    q = scene.query(2)
    positions = ints(8599, 2100)
    found = scene.run(device, q, ints(0, 0), positions)
    assert nmse(found, scene.exact(q, ints(0, 0), positions)) < NMSE
    same_bits(scene.run(device, q[1:], ints(0), positions[1:])[0], found[1])


@pytest.mark.parametrize("H", [1, 8])  # one row tile, two
def test_infinite_values_that_all_rows_see(device: Any, H: int) -> None:
    scene = Scene(H, 1, 64, "f16", [128], 2)
    scene.cache.v[scene.table[0, 1] * KV_BLOCK_TOKENS + 100 - KV_BLOCK_TOKENS, 0, 7:9] = np.inf
    positions = np.arange(124, 128).astype(np.int32)  # of the same block, not of its quarter
    found = scene.run(device, scene.query(4), ints(0, 0, 0, 0), positions).reshape(4, H, 64)
    assert (np.isfinite(found) == ~np.isin(np.arange(64), (7, 8))).all()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_a_row_depends_on_nothing_but_itself(device: Any, kv_type: str) -> None:
    scene = Scene(8, 1, 64, kv_type, [330, 150], 6)
    sequence, positions = ints(0, 0, 0, 0, 0, 1, 0, 1, 1), ints(325, 326, 327, 328, 329, 149, 12, 3, 64)
    q = scene.query(len(sequence))
    together = scene.run(device, q, sequence, positions)
    for t in range(len(sequence)):
        alone = scene.run(device, q[t : t + 1], sequence[t : t + 1], positions[t : t + 1])
        same_bits(alone[0], together[t])
    same_bits(scene.run(device, q, sequence, positions, apart=True), together)

    # In another order of blocks, with a longer table, on another number of multiprocessors.
    moved = np.random.default_rng(5).permutation(len(scene.cache.k) // KV_BLOCK_TOKENS).astype(np.int32)
    slots = (moved[:, None] * KV_BLOCK_TOKENS + np.arange(KV_BLOCK_TOKENS)).reshape(-1)
    for array in (scene.cache.k, scene.cache.v, scene.cache.k_scale, scene.cache.v_scale):
        if array is not None:
            array[slots] = array.copy()
    wider = np.full((2, 50), -1, np.int32)
    wider[:, :6] = np.where(scene.table >= 0, moved[scene.table], -1)
    scene.table, scene.max_blocks = wider, 50
    device.n_sm = 3
    same_bits(scene.run(device, q, sequence, positions), together)


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_rows_of_many_sequences_share_a_launch(device: Any, kv_type: str) -> None:
    device.n_sm, device.max_shared_bytes = 12, 227 << 10
    device = Launches(device)
    lengths = [70, 1, 130, 64, 65, 5, 200, 128, 63, 33, 140, 2]
    T = len(lengths)
    scene = Scene(12, 4, 128, kv_type, lengths, 64)
    q, sequence, positions = scene.query(T), np.arange(T, dtype=np.int32), np.array(lengths, np.int32) - 1
    together = scene.run(device, q, sequence, positions, apart=True)
    assert device.grids["attention_splits"] == [(4, 9)] and device.grids["attention_combine"] == [(12, T)]
    for t in range(T):
        same_bits(scene.run(device, q[t : t + 1], sequence[t : t + 1], positions[t : t + 1])[0], together[t])


@pytest.mark.slow
def test_rows_of_one_sequence_share_a_launch(device: Any) -> None:
    device.n_sm = 12
    device = Launches(device)
    T, scene = 13, Scene(20, 4, 64, "f16", [300], 64)
    q, sequence, positions = scene.query(T), np.zeros(T, np.int32), np.arange(287, 300, dtype=np.int32)
    together = scene.run(device, q, sequence, positions)
    assert len(device.grids["attention_splits"]) == 1
    for t in range(T):
        same_bits(scene.run(device, q[t : t + 1], sequence[t : t + 1], positions[t : t + 1])[0], together[t])


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0", "f16,q4_0"])
@pytest.mark.parametrize(("H", "T"), [(3, 2), (5, 8)])  # one row tile, three
def test_what_a_row_does_not_see_may_be_anything(device: Any, kv_type: str, H: int, T: int) -> None:
    scene = Scene(H, 1, 96, kv_type, [130], 3)
    positions = np.arange(130 - T, 130).astype(np.int32)[::-1].copy()
    slots = scene.table[0, positions // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + positions % KV_BLOCK_TOKENS
    (scene.cache.k if scene.cache.k_scale is None else scene.cache.k_scale)[slots[0]] = np.nan
    if scene.cache.v_scale is None:
        scene.cache.v[slots[0]] = np.nan
        scene.cache.v[slots[T // 2], 0, 5:38] = -np.inf
    else:
        scene.cache.v_scale[slots[0]] = np.nan
        scene.cache.v_scale[slots[T // 2], 0, 1] = np.inf
    q, sequence = scene.query(T), np.zeros(T, np.int32)
    together = scene.run(device, q, sequence, positions)
    for t in range(T):
        alone = scene.run(device, q[t : t + 1], sequence[:1], positions[t : t + 1])[0]
        spoilt = ~np.isfinite(alone)
        np.testing.assert_array_equal(~np.isfinite(together[t]), spoilt)
        same_bits(together[t][~spoilt], alone[~spoilt])
        of_one = 33 if scene.cache.v_scale is None else 32
        assert spoilt.sum() == (H * 96 if t == 0 else 0 if t > T // 2 else H * of_one)


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize(
    ("H", "K", "head_dim", "window", "T"),
    [
        (8, 1, 64, 100, 8),  # of up to three blocks
        (6, 2, 96, 64, 3),
        (8, 1, 256, 129, 2),
        (8, 1, 512, 70, 2),
        (12, 1, 384, 66, 2),
        (3, 1, 32, 1, 5),
        (2, 1, 32, 1100, 4),  # splits of two blocks
    ],
)
def test_window(device: Any, kv_type: str, H: int, K: int, head_dim: int, window: int, T: int) -> None:
    length = window + 64 * 4 + 3
    scene = Scene(H, K, head_dim, kv_type, [length, 40], length // KV_BLOCK_TOKENS + 2)
    # Ascending positions over the edge of a block, where a window begins or where it ends; a row whose window is not
    # full; and a row far behind, whose blocks another row must not need.
    edges = [n // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS for n in (length, length - window)]
    edges[1] += window
    for edge in edges:
        end = min(edge + (T + 1) // 2, length)
        sequence = np.concatenate([np.zeros(T, np.int32), ints(1)])
        positions = np.concatenate([np.arange(end - T, end), [30]]).astype(np.int32)
        q = scene.query(T + 1)
        expected = scene.exact(q, sequence, positions, window)
        whole = scene.run(device, q, sequence, positions, window=window)
        assert nmse(whole, expected) < NMSE
        table, cache = scene.table.copy(), copied(scene.cache)
        scene.poison(0, (end - T - window + 1) // KV_BLOCK_TOKENS)
        together = scene.run(device, q, sequence, positions, window=window)
        same_bits(together, whole)
        for t in range(T + 1):
            one = slice(t, t + 1)
            same_bits(scene.run(device, q[one], sequence[one], positions[one], window=window)[0], together[t])
        scene.table, scene.cache = table, cache


# (blocks of a context, those of them that are not there): of a split some, whole ones, all but one of 64
ABSENT = [(7, (0, 2, 3, 5)), (70, (0, 1, 2, 3, 4, 5, 17, 18, 19, 33, 40, 41, 42, 43, 44)), (64, tuple(range(63)))]


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize(("n_blocks", "absent"), ABSENT, ids=["few", "whole splits", "all but the last"])
@pytest.mark.parametrize(("H", "K", "head_dim", "T"), [(8, 1, 64, 3), (4, 2, 384, 1)])
def test_blocks_that_are_not_there_are_passed_over(
    device: Any, kv_type: str, n_blocks: int, absent: tuple[int, ...], H: int, K: int, head_dim: int, T: int
) -> None:
    """Whatever lies in them and in block 0, and each row alone has the same bits."""
    length = 64 * n_blocks - 5
    scene = Scene(H, K, head_dim, kv_type, [length, 90], n_blocks + 1)
    c = scene.cache
    for cache in (c.k if c.k_scale is None else c.k_scale, c.v if c.v_scale is None else c.v_scale):
        for block in {*scene.table[0, list(absent)].tolist()}:
            cache[block * KV_BLOCK_TOKENS : (block + 1) * KV_BLOCK_TOKENS] = np.nan
    scene.table[0, list(absent)] = -1
    sequence = np.array([0] * T + [1], np.int32)
    positions = np.array([*range(length - T, length), 70], np.int32)
    q = scene.query(T + 1)
    together = scene.run(device, q, sequence, positions)
    assert nmse(together, scene.exact(q, sequence, positions)) < NMSE
    for t in range(T + 1):
        one = slice(t, t + 1)
        same_bits(scene.run(device, q[one], sequence[one], positions[one])[0], together[t])


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize(
    ("H", "K", "head_dim", "T", "window"), [(8, 1, 64, 3, 0), (6, 2, 96, 1, 0), (4, 2, 384, 2, 0), (6, 3, 128, 5, 500)]
)
def test_bits_do_not_depend_on_which_blocks_are_at_home(
    device: Any, kv_type: str, H: int, K: int, head_dim: int, T: int, window: int
) -> None:
    scene = Scene(H, K, head_dim, kv_type, [1250, 90], 21)
    sequence = np.array([0] * T + [1], np.int32)
    positions = np.array([*range(1250 - T, 1250), 70], np.int32)
    q = scene.query(T + 1)
    expected = scene.run(device, q, sequence, positions, window=window)
    for n_pool in (1, 9, 21):
        same_bits(scene.run(device, q, sequence, positions, window=window, n_pool=n_pool), expected)


def test_blocks_that_are_not_there_in_a_window(device: Any) -> None:
    scene = Scene(3, 1, 32, "f16", [1300], 22)
    c = scene.cache
    absent = [4, 5, 6, 7, 11, 19]
    for block in scene.table[0, absent]:
        c.k[block * KV_BLOCK_TOKENS : (block + 1) * KV_BLOCK_TOKENS] = np.nan
        c.v[block * KV_BLOCK_TOKENS : (block + 1) * KV_BLOCK_TOKENS] = np.nan
    scene.table[0, absent] = -1
    q, sequence, positions = scene.query(4), np.zeros(4, np.int32), np.arange(1296, 1300).astype(np.int32)
    together = scene.run(device, q, sequence, positions, window=1100)
    assert nmse(together, scene.exact(q, sequence, positions, 1100)) < NMSE


def test_a_row_that_sees_no_block_is_nan(device: Any) -> None:
    """As on the page, where its sum is none; and its neighbor is not."""
    scene = Scene(3, 1, 32, "f16", [200, 200], 4)
    scene.table[0] = -1
    found = scene.run(device, scene.query(2), ints(0, 1), ints(199, 199))
    assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()


@pytest.mark.slow
def test_rows_with_windows_far_apart(device: Any) -> None:
    scene = Scene(2, 1, 64, "f16", [800], 13)
    q, sequence, positions = scene.query(3), ints(0, 0, 0), ints(100, 799, 798)
    expected = scene.exact(q, sequence, positions, 80)
    scene.cache.v[scene.table[0, 5] * KV_BLOCK_TOKENS :][:KV_BLOCK_TOKENS] = np.nan
    scene.table[0, 6] = -1
    assert nmse(scene.run(device, q, sequence, positions, window=80), expected) < NMSE


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q8_0,q4_0", "q4_0,f16"])
def test_what_a_window_leaves_out_may_be_anything(device: Any, kv_type: str) -> None:
    scene = Scene(3, 1, 64, kv_type, [200], 4)
    window, T = 90, 8
    positions = np.arange(192, 200).astype(np.int32)
    first = positions - window + 1
    at = np.array([first[0] - 1, first[2], first[5], 196])  # before all windows, in the first three, six, the last four
    slots = scene.table[0, at // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + at % KV_BLOCK_TOKENS
    if scene.cache.v_scale is None:
        scene.cache.v[slots, 0, 5:38] = np.inf
    else:
        scene.cache.v_scale[slots, 0, 1] = np.nan
    q, sequence = scene.query(T), np.zeros(T, np.int32)
    together = scene.run(device, q, sequence, positions, window=window)
    for t in range(T):
        alone = scene.run(device, q[t : t + 1], sequence[:1], positions[t : t + 1], window=window)[0]
        spoilt = ~np.isfinite(alone)
        np.testing.assert_array_equal(~np.isfinite(together[t]), spoilt)
        same_bits(together[t][~spoilt], alone[~spoilt])
        assert spoilt.sum() == 3 * (33 if scene.cache.v_scale is None else 32)


@pytest.mark.slow
def test_a_window_takes_a_grid_of_its_own(device: Any) -> None:
    device = Launches(device)
    device.n_sm = 132
    scene = Scene(8, 8, 64, "f16", [1300], 70)
    for window, grid in ((0, (8, 16)), (512, (8, 9)), (1024, (8, 9))):  # splits of one block, and of two
        scene.run(device, scene.query(1), ints(0), ints(1299), window=window)
        assert device.grids["attention_splits"].pop() == grid


class Launches:
    """A device that remembers the grids of its launches."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.grids: dict[str, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def kernel(self, module: Any, name: str) -> Any:
        kernel = self._device.kernel(module, name)

        def launch(grid: Any, *arguments: Any, **named: Any) -> None:
            self.grids.setdefault(name, []).append(grid)
            kernel(grid, *arguments, **named)

        return launch


def exact_gate(gate: np.ndarray, kind: str) -> np.ndarray:
    x = gate.astype(np.float64)
    return 1 / (1 + np.exp(-x)) if kind == "sigmoid" else np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@pytest.mark.parametrize("kind", ["softplus", "sigmoid"])
@pytest.mark.parametrize("by_head", [True, False], ids=["by head", "by element"])
def test_gate(device: Any, kind: str, by_head: bool) -> None:
    scene = Scene(6, 2, 32, "f16", [150], 3)
    q, sequence, positions = scene.query(9), ints(*[0] * 9), ints(*range(141, 150))
    gate = np.linspace(-80, 80, 9 * 6 * (1 if by_head else 32), dtype=np.float32).reshape(9, -1)
    gate[:, ::2] /= 40
    plain = scene.run(device, q, sequence, positions)
    to = Quantized(
        device.upload(np.full((9, 192), 99, np.int8)),
        device.upload(np.full((9, 6), np.nan, np.float32)),
        device.upload(np.full((9, 6), 99, np.int32)),
    )
    found = scene.run(device, q, sequence, positions, to, gate=gate, gate_kind=kind)
    factor = getattr(arithmetic, kind)(gate).reshape(9, 6, -1)
    with np.errstate(all="ignore"):
        same_bits(found, (plain.reshape(9, 6, 32) * factor).reshape(9, -1))
    relative = found / (plain.reshape(9, 6, 32) * exact_gate(gate, kind).reshape(9, 6, -1)).reshape(9, -1) - 1
    assert np.abs(relative).max() < 1e-6
    np.testing.assert_array_equal(device.read(to.q), arithmetic.quantize_activations(found)[0])


def test_quantized_result(device: Any) -> None:
    scene = Scene(6, 2, 96, "f16", [150], 3)
    q, sequence, positions = scene.query(9), ints(*[0] * 9), ints(*range(141, 150))
    width = 6 * 96
    to = Quantized(
        device.upload(np.full((9, width), 99, np.int8)),
        device.upload(np.full((9, width // 32), np.nan, np.float32)),
        device.upload(np.full((9, width // 32), 99, np.int32)),
    )
    found = scene.run(device, q, sequence, positions, to)
    codes, d = arithmetic.quantize_activations(found)
    np.testing.assert_array_equal(device.read(to.q), codes)
    same_bits(device.read(to.d), d)
    np.testing.assert_array_equal(device.read(to.sums), codes.reshape(9, -1, 32).sum(axis=2, dtype=np.int32))


@pytest.mark.parametrize("value", [1e30, np.inf, np.nan])
def test_huge_queries(device: Any, value: float) -> None:
    scene = Scene(4, 2, 64, "f16", [70], 2)
    q = scene.query(2)
    q[0, 1] = value * np.sign(q[0, 1])
    found = scene.run(device, q, ints(0, 0), ints(68, 69))
    exact = scene.exact(q, ints(0, 0), ints(68, 69)).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(exact))
    assert np.isnan(found).sum() == (0 if value == 1e30 else 64)
    assert nmse(np.nan_to_num(found), np.nan_to_num(exact)) < NMSE


def test_a_position_past_the_table_reads_nothing_outside(device: Any) -> None:
    scene = Scene(2, 1, 64, "f16", [128], 2)
    q = scene.query(1)
    found = scene.run(device, q, ints(0), ints(5000))
    same_bits(found, scene.run(device, q, ints(0), ints(127)))


def test_refuses_what_it_cannot_do(device: Any) -> None:
    scene = Scene(2, 1, 64, "f16", [10], 1)
    with pytest.raises(ValueError, match="gate 'tanh'"):
        scene.run(device, scene.query(1), ints(0), ints(1), gate=np.zeros((1, 2), np.float32), gate_kind="tanh")
    with pytest.raises(ValueError, match="for heads of 320"):
        Scene(2, 1, 320, "f16", [10], 1).run(device, np.zeros((1, 2, 320), np.float32), ints(0), ints(1))
    scene.H = 34  # over 16 query heads for a kv head
    with pytest.raises(ValueError, match="34 heads"):
        scene.run(device, scene.query(1), ints(0), ints(1))


def test_a_block_reads_none_of_its_keys_ahead(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows have the last one's position, and keys before it are of the same step."""
    scene, launched, find = Scene(2, 1, 64, "f16", [128], 2), [], device.kernel

    def kernel(module: Any, name: str) -> Any:
        def launch(grid: Any, block: Any, args: Any, shared_bytes: int = 0, overlap: bool = False) -> None:
            launched.append((name, overlap))
            find(module, name)(grid, block, args, shared_bytes, overlap)

        return launch

    monkeypatch.setattr(device, "kernel", kernel)
    q, at = scene.query(3), (ints(0, 0, 0), ints(100, 100, 100))
    same_bits(scene.run(device, q, *at), scene.run(device, q, *at, as_block=True))
    assert [overlap for name, overlap in launched if name == "attention_splits"] == [True, False]
