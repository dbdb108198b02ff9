"""Sketches of blocks, the choice by them, attention over what was chosen: kernels, twin, float64, plain counting."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ground.kv_types import KV_TYPES
from engine.ops import KV_BLOCK_TOKENS, MASS_UNITS, TAIL_BLOCKS, KVLayer, Recall, cpu, reference
from engine.ops.sketches import NAN_HALF, parts, sketch_bytes
from engine.placing.summaries import Means, left_out, log_sum
from tests.op_cases import LIMITS, cache_values, empty_cache
from tests.ops.test_ops import same_bits, workspace

N = KV_BLOCK_TOKENS


def blank(T: int, H: int, K: int, W: int) -> Recall:
    """What nothing has been written to yet."""
    return Recall(
        np.full((T, K, W), 9, np.uint8), np.full((T, H, 2), np.nan, np.float32),
        np.full((T, H), np.nan, np.float32), np.full((T, K), -9, np.int32),
        np.full((T, H, 2, W), np.nan, np.float32), np.full((T, K, W), np.nan, np.float32),
        np.full((T, K), -1, np.int32),
    )  # fmt: skip


@dataclass
class Context:
    """Sequences of `lengths` positions, the last `new` of which are the step's rows; blocks and numbers shuffled."""

    kv: KVLayer
    q: np.ndarray
    table: np.ndarray
    numbers: np.ndarray
    sequence: np.ndarray
    positions: np.ndarray
    most: np.ndarray
    keep: np.ndarray
    scale: float

    def recalled(self, ops: Any, ws: Any, most: Any = None, leave: int = -1) -> tuple[np.ndarray, np.ndarray, Recall]:
        """Sketches, what attention gives, and what was chosen."""
        (T, H, d), W, K = self.q.shape, self.table.shape[1], self.kv.k.shape[1]
        sketches = np.full((self.numbers.max() + 2, K, sketch_bytes(d)), 7, np.uint8)
        there = self.table >= 0
        ops.summarize(ws, self.kv, self.table[there], self.numbers[there], sketches)
        recall = blank(T, H, K, W)
        most = self.most if most is None else np.full_like(self.most, most)
        ops.choose(
            ws, self.q, sketches, self.numbers, self.sequence, self.positions, most, np.full_like(most, leave),
            self.keep, self.scale, recall,
        )  # fmt: skip
        return sketches, self.attended(ops, ws, recall), recall

    def attended(self, ops: Any, ws: Any, recall: Recall | None = None) -> np.ndarray:
        (T, H, d) = self.q.shape
        out = np.full((T, H * d), np.nan, np.float32)
        ops.attention(ws, self.q, self.kv, self.table, self.sequence, self.positions, self.scale, out, recall=recall)
        return out


def context(
    seed: int, kv_type: str, lengths: tuple[int, ...], new: tuple[int, ...], H: int, K: int, d: int, size: float = 1.0
) -> Context:
    rng = np.random.default_rng(seed)
    blocks = [-(-n // N) for n in lengths]
    kv = empty_cache(kv_type, sum(blocks) + 1, K, d)
    keys = rng.standard_normal((*kv.k.shape[:2], d)) * np.exp(rng.normal(0, 0.7, d))
    for cache, scale, x in ((kv.k, kv.k_scale, keys), (kv.v, kv.v_scale, rng.standard_normal(keys.shape))):
        reference._store(cache, scale, np.arange(len(cache)), x.astype(np.float32))
    W = max(blocks) + 2
    table, numbers = np.full((len(lengths), W), -1, np.int32), np.full((len(lengths), W), -1, np.int32)
    places, names = rng.permutation(sum(blocks) + 1), rng.permutation(sum(blocks) + 3)
    for s, n in enumerate(blocks):
        part = slice(sum(blocks[:s]), sum(blocks[:s]) + n)
        table[s, :n], numbers[s, :n] = places[part], names[part]
    keep = (rng.random((len(lengths), W)) < 0.2).astype(np.uint8)
    T = sum(new)
    return Context(
        kv, (size * rng.standard_normal((T, H, d))).astype(np.float32), table, numbers,
        np.repeat(np.arange(len(lengths)), new).astype(np.int32),
        np.concatenate([np.arange(n - m, n) for n, m in zip(lengths, new, strict=True)]).astype(np.int32),
        rng.integers(0, 4, T).astype(np.int32), keep, float(d) ** -0.5,
    )  # fmt: skip


CASES: dict[str, Any] = {
    "f16": ("f16", (1030,), (1,), 6, 2, 64),
    "f16 odd heads, three sequences": ("f16", (700, 45, 610), (3, 2, 2), 10, 5, 44),
    "f16 of one group": ("f16", (620,), (3,), 7, 1, 72),
    "q8_0": ("q8_0", (833, 641), (2, 1), 4, 2, 96),
    "q4_0": ("q4_0", (900,), (2,), 6, 3, 128),
    "q8_0,q4_0": ("q8_0,q4_0", (768, 575), (1, 6), 8, 4, 32),
    "f16 of sixteen heads": ("f16", (700,), (2,), 16, 1, 48),
    "f16 wide heads": ("f16", (800,), (2,), 2, 1, 512),
}


# Most and leave: so many blocks; what leaves a tenth of the mass, some of it, next to nothing, at most so many; all.
CHOICES = [(None, -1), (99, MASS_UNITS // 10), (99, MASS_UNITS // 3), (99, 2), (3, MASS_UNITS // 50), (99, MASS_UNITS)]


@functools.cache
def twin(name: str, most: int | None = None, leave: int = -1) -> tuple[np.ndarray, np.ndarray, Recall]:
    return context(1, *CASES[name]).recalled(reference, reference.workspace(LIMITS, 1), most, leave)


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_twin_bit_for_bit(case: str, isa: str) -> None:
    for most, leave in CHOICES:
        sketches, out, recall = context(1, *CASES[case]).recalled(cpu, workspace(isa), most, leave)
        wanted_sketches, wanted, chosen = twin(case, most, leave)
        assert same_bits(sketches, wanted_sketches) and same_bits(out, wanted)
        for name in ("chosen", "left", "missed", "read"):
            assert same_bits(getattr(recall, name), getattr(chosen, name)), name
        assert (recall.read == recall.chosen.sum(axis=2)).all() and np.isfinite(recall.missed).all()
        assert recall.missed.min() >= 0 and (leave not in (-1, MASS_UNITS) or recall.missed.max() > 0)
    assert (recall.read <= context(1, *CASES[case]).recalled(cpu, workspace(isa), 0)[2].read).all()  # with all left


@pytest.mark.slow
@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_what_is_not_finite_is_as_in_the_twin(isa: str) -> None:
    here = context(2, "f16", (1030, 900), (3, 2), 6, 2, 48, size=30.0)
    here.q[1, 2, 3], here.q[2, 0], here.q[3, 1] = np.nan, 1e30, np.inf
    slot = here.table[1, 4] * N
    here.kv.k[slot + 5, 1, 2], here.kv.k[slot + 20, 0, 7] = np.nan, np.inf
    here.kv.k[here.table[0, 3] * N : here.table[0, 4] * N : 3] = 65504
    for most, leave in CHOICES:
        with np.errstate(all="ignore"):
            found = here.recalled(cpu, workspace(isa), most, leave)
            wanted = here.recalled(reference, reference.workspace(LIMITS, 1), most, leave)
        for ours, theirs in zip(found[:2], wanted[:2], strict=True):
            assert same_bits(ours, theirs)
        for name in ("chosen", "left", "missed", "read"):
            assert same_bits(getattr(found[2], name), getattr(wanted[2], name)), name


@pytest.mark.parametrize(("kv_type", "d"), [*((name, 64) for name in KV_TYPES), ("f16", 44), ("f16", 23)])
def test_sketches_are_of_what_is_stored(kv_type: str, d: int) -> None:
    """Half of the channels, which vary most, are kept within half a step, of the others the means."""
    here = context(3, kv_type, (300,), (1,), 4, 2, d)
    first = here.table[0, 0] * N
    if kv_type == "f16":
        here.kv.k[first : first + N, 1] = 0  # nothing varies: the first channels
        here.kv.k[first : first + N : 2, 1, :3] = -0.0
        here.kv.k[first : first + 5, 0, 7] = np.inf
    sketches, _, _ = here.recalled(cpu, workspace(cpu.supported_isas()[-1]))
    keys, rows = cache_values(here.kv.k, here.kv.k_scale), np.arange(d)
    for place, number in zip(here.table[0, :5], here.numbers[0, :5], strict=True):
        block, kept = keys[place * N : (place + 1) * N], parts(sketches[number], d)
        for head in range(2):
            k, channels = block[:, head], kept.channels()[head]
            finite = np.isfinite(k).all(axis=0)
            with np.errstate(invalid="ignore"):
                spread = np.where(finite, k.max(axis=0) - k.min(axis=0), np.inf)
            # Of channels that vary alike in float64 as in f32.
            assert sorted(channels) == sorted(np.argsort(-spread.astype(np.float32), kind="stable")[: d // 2])
            assert (kept.base.view(np.uint16)[head, ~finite] == NAN_HALF).all()
            other = finite & ~np.isin(rows, channels)
            np.testing.assert_allclose(kept.base[head, other], k[:, other].mean(axis=0), rtol=2e-3, atol=2e-3)
            mine = channels[finite[channels]]
            levels, steps = (a[..., finite[channels]] for a in (kept.levels()[head], kept.step[head]))
            off = np.abs(kept.base[head, mine].astype(float) + levels * steps.astype(float) - k[:, mine])
            # A half of the least value, and of a step, is off by 2^-11 of it; so the largest key is by three of these.
            slack = 2**-11 * (np.abs(k[:, mine]).max(axis=0) + 3 * steps.astype(float))
            assert (off <= 0.5 * steps.astype(float) + slack + 1e-7).all()
            assert (steps[spread[mine] == 0] == 0).all() and set(levels[:, spread[mine] > 0].flat) <= {0, 1, 2, 3}
    unnamed = set(range(len(sketches))) - set(here.numbers[here.numbers >= 0].tolist())
    assert (sketches[list(unnamed)] == 7).all()


def estimated(sketches: np.ndarray, q: np.ndarray, scale: float) -> tuple[np.ndarray, float]:
    """Masses of blocks as sketched, [H', B], in float64 and with whole queries; what 8 bits can change of one."""
    kept = parts(sketches, q.shape[1])
    keys = np.repeat(kept.base[:, None].astype(np.float64), N, axis=1)
    at = np.broadcast_to(kept.channels()[:, None], kept.levels().shape)
    codes = kept.levels() * kept.step[:, None].astype(np.float64)
    np.put_along_axis(keys, at, np.take_along_axis(keys, at, 2) + codes, 2)
    counted = np.abs(q[:, kept.channels()] * kept.step.astype(np.float64))  # [H', B, n]
    unsure = scale * 3 * counted.shape[2] * 0.51 * counted.max() / 127
    return log_sum(scale * np.einsum("hd,bnd->hbn", q.astype(np.float64), keys)), float(unsure)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), kv_type=st.sampled_from(["f16", "q8_0", "q4_0"]),
    lengths=st.lists(st.integers(1, 1400), min_size=1, max_size=3), most=st.integers(-1, 22),
    shape=st.sampled_from([(6, 2, 32), (3, 1, 64), (8, 4, 96)]),
)  # fmt: skip
def test_the_choice_is_the_plain_one(
    seed: int, kv_type: str, lengths: list[int], most: int, shape: tuple[int, int, int]
) -> None:
    """Sinks, tail and what is kept, and of the others those with the largest share of any query, in float64."""
    (H, K, d), new = shape, [min(2, n) for n in lengths]
    here = context(seed, kv_type, tuple(lengths), tuple(new), H, K, d)
    sketches, _, recall = here.recalled(cpu, workspace(cpu.supported_isas()[-1]), most)
    for t, (s, p) in enumerate(zip(here.sequence, here.positions, strict=True)):
        last = p // N
        behind = max(0, last - TAIL_BLOCKS)
        read = recall.chosen[t].astype(bool)
        assert not read[:, last + 1 :].any() and read[:, behind : last + 1].all() and read[:, : min(1, behind)].all()
        kept = here.keep[s, :behind].astype(bool)
        assert read[:, :behind][:, kept].all()
        others = ~kept & (np.arange(behind) > 0)
        n = int(others.sum()) if most < 0 else min(most, int(others.sum()))
        assert (read[:, :behind][:, others].sum(axis=1) == n).all()
        if n == others.sum():
            assert (recall.left[t, :, 1] == 0).all() and (recall.missed[t] == 0).all()
            continue
        for head in range(K):
            group = slice(head * H // K, (head + 1) * H // K)
            masses, unsure = estimated(sketches[here.numbers[s, :behind], head], here.q[t, group], here.scale)
            share = (masses - log_sum(masses)[:, None]).max(axis=0)
            mine = others & read[head, :behind]
            if n:  # but for what f32, and queries in 8 bits, cannot tell apart
                assert share[mine].min() > share[others & ~mine].max() - 2 * unsure - 1e-4
            skipped = np.where(read[head, :behind], -np.inf, masses)
            keys = cache_values(here.kv.k, here.kv.k_scale)[:, head]
            at = np.arange(p + 1)[read[head, np.arange(p + 1) // N]]
            scores = here.q[t, group].astype(np.float64) @ keys[here.table[s, at // N] * N + at % N].T * here.scale
            wanted = left_out(log_sum(scores), log_sum(skipped))
            np.testing.assert_allclose(recall.missed[t, group], wanted, rtol=2e-3 + np.expm1(2 * unsure))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), kv_type=st.sampled_from(["f16", "q8_0"]), length=st.integers(300, 2300),
    left_out=st.one_of(st.floats(0.001, 0.6), st.floats(1e-7, 1e-3)), shape=st.sampled_from([(6, 2, 32), (3, 1, 64)]),
)  # fmt: skip
def test_no_more_is_read_than_leaves_so_much_out(
    seed: int, kv_type: str, length: int, left_out: float, shape: tuple[int, int, int]
) -> None:
    """Of no query of a group more is left, and without the worst block that is read of one it would be; in float64."""
    H, K, d = shape
    here = context(seed, kv_type, (length,), (1,), H, K, d)
    sketches, _, recall = here.recalled(
        cpu, workspace(cpu.supported_isas()[-1]), 1 << 24, int(left_out * MASS_UNITS)
    )  # fmt: skip
    behind = here.positions[0] // N - TAIL_BLOCKS
    others = (here.keep[0, :behind] == 0) & (np.arange(behind) > 0)
    for head in range(K):
        read = recall.chosen[0, head, :behind].astype(bool)
        masses, unsure = estimated(
            sketches[here.numbers[0, :behind], head], here.q[0, head * H // K : (head + 1) * H // K], here.scale
        )
        shares = np.exp(masses - log_sum(masses)[:, None])
        unread = shares[:, others & ~read].sum(axis=1)
        slack = np.expm1(4 * unsure) + 1e-4
        # What is less than a unit of a block counts nothing.
        assert unread.max() <= left_out * (1 + slack) + behind / MASS_UNITS + 1e-6
        if (mine := others & read).any():
            worst = np.flatnonzero(mine)[shares[:, mine].max(axis=0).argmin()]
            spared = shares[:, worst]
            assert (unread + spared).max() >= left_out * (1 - slack) - 2 * spared.max() * slack - 1e-6


@pytest.mark.parametrize("kv_type", ["f16", "q4_0"])
def test_the_one_key_that_is_looked_for_is_found(kv_type: str) -> None:
    """A key that copying heads look for weighs more than a block whose keys are all a little alike it."""
    here = context(10, kv_type, (1000,), (1,), 4, 2, 64)
    here.keep[:] = 0
    keys = 0.1 * np.random.default_rng(3).standard_normal((len(here.kv.k), 2, 64))
    for head in range(2):
        alike = here.q[0, 2 * head] / np.linalg.norm(here.q[0, 2 * head])
        block, other = (here.table[0, b] * N for b in (4 + head, 8 + head))
        keys[other : other + N, head] += 1.2 * alike
        keys[block + 37, head] += 9 * alike
    reference._store(here.kv.k, here.kv.k_scale, np.arange(len(keys)), keys.astype(np.float32))
    _, _, recall = here.recalled(cpu, workspace(cpu.supported_isas()[-1]), 1)
    stored = cache_values(here.kv.k, here.kv.k_scale).astype(np.float64)
    for head in range(2):
        assert np.flatnonzero(recall.chosen[0, head]).tolist() == [0, 4 + head, 12, 13, 14, 15]
        blocks = stored[:, head].reshape(-1, N, 64)[here.table[0, :12]]
        by_means = Means(4).masses(
            Means(4).of(blocks), here.q[0, 2 * head : 2 * head + 2].astype(np.float64), here.scale
        )
        assert by_means[0].max(axis=0).argmax() == 8 + head  # which is why they do not serve


def test_equal_blocks_are_read_from_the_first_on() -> None:
    here = context(4, "f16", (1000,), (1,), 4, 2, 64)
    keys = here.kv.k.reshape(-1, N, *here.kv.k.shape[1:])
    keys[:] = keys[:1]
    here.keep[:] = 0
    for ops, ws in ((cpu, workspace(cpu.supported_isas()[-1])), (reference, reference.workspace(LIMITS, 1))):
        _, _, recall = here.recalled(ops, ws, 5)
        assert np.flatnonzero(recall.chosen[0, 1]).tolist() == [0, 1, 2, 3, 4, 5, 12, 13, 14, 15]


@pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
def test_with_enough_blocks_attention_is_whole(ops: Any) -> None:
    here = context(5, "q8_0", (700, 600), (2, 1), 6, 2, 64)
    ws = workspace(cpu.supported_isas()[-1]) if ops is cpu else reference.workspace(LIMITS, 1)
    whole = here.attended(ops, ws)
    assert same_bits(here.recalled(ops, ws, -1)[1], whole) and same_bits(here.recalled(ops, ws, 8)[1], whole)
    assert not same_bits(here.recalled(ops, ws, 3)[1], whole)


def test_a_row_does_not_depend_on_its_step() -> None:
    """Neighbors in a step, of its own sequence and of others, and which threads there are."""
    here = context(6, "f16", (1030, 1200), (9, 7), 6, 2, 64)
    ws = workspace(cpu.supported_isas()[-1])
    _, out, recall = here.recalled(cpu, ws)
    for t in (0, 8, 12):
        rows = slice(t, t + 1)
        alone = Context(
            here.kv, here.q[rows].copy(), here.table, here.numbers, here.sequence[rows].copy(),
            here.positions[rows].copy(), here.most[rows].copy(), here.keep, here.scale,
        )  # fmt: skip
        _, one, chosen = alone.recalled(cpu, workspace(cpu.supported_isas()[-1], 3))
        assert same_bits(one, out[rows]) and same_bits(chosen.missed, recall.missed[rows])


def test_indices_are_checked() -> None:
    here = context(7, "f16", (1030,), (1,), 6, 2, 64)
    ws = workspace(cpu.supported_isas()[-1])
    for name, value in (("numbers", 99), ("sequence", 1), ("positions", 64 * 99)):
        before = getattr(here, name).copy()
        sketches, _, recall = here.recalled(cpu, ws)
        getattr(here, name).flat[0] = value
        with pytest.raises(IndexError, match="outside its table"):
            cpu.choose(
                ws, here.q, sketches, here.numbers, here.sequence, here.positions, here.most, here.most, here.keep,
                1.0, recall,
            )  # fmt: skip
        getattr(here, name)[...] = before
    with pytest.raises(IndexError, match="places or blocks"):
        cpu.summarize(ws, here.kv, np.array([99], np.int32), np.zeros(1, np.int32), sketches)
