"""Recall on a device: the emulated GPU by default, a real one with `pytest --gpu`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.ops import KV_BLOCK_TOKENS, MASS_UNITS, Limits, Recall, cpu, reference
from engine.ops.cuda import attention
from engine.ops.cuda import recall as recall_ops
from engine.ops.cuda.attention import COMBINE_THREADS
from engine.ops.cuda.device import Module
from engine.ops.sketches import sketch, sketch_bytes
from tests.device_ops import DeviceOps
from tests.ops.test_ops import same_bits, workspace
from tests.ops.test_recall import CASES, CHOICES, Context, blank, context, twin
from tests.tiny_models import nmse

N = KV_BLOCK_TOKENS


def ops_of(device: Any, here: Context) -> DeviceOps:
    (T, H, d), W = here.q.shape, here.table.shape[1]
    return DeviceOps(device, Limits(max(T, 2), 64, H * d, 96, 301, 0, 0, n_head=H, n_ctx=W * N))


def some(here: Context, rows: slice) -> Context:
    return replace(
        here, q=here.q[rows].copy(), sequence=here.sequence[rows].copy(), positions=here.positions[rows].copy(),
        most=here.most[rows].copy(),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in CASES if "odd heads" not in name])
def test_the_choice_is_the_twins_and_attention_is_near(device: Any, case: str) -> None:
    here = context(1, *CASES[case])
    ops = ops_of(device, here)
    for most, leave in CHOICES:
        sketches, out, recall = here.recalled(ops, None, most, leave)
        wanted_sketches, wanted, chosen = twin(case, most, leave)
        assert same_bits(sketches, wanted_sketches)
        for name in ("chosen", "left", "read"):
            assert same_bits(getattr(recall, name), getattr(chosen, name)), name
        assert nmse(out, wanted) < 1e-6
        np.testing.assert_allclose(recall.missed, chosen.missed, rtol=1e-4)
        blocks = recall.scores.view(np.int32)
        for (t, head), last in np.ndenumerate(recall.last):
            assert last % N == here.positions[t] % N
            assert blocks[t, head, : last // N + 1].tolist() == np.flatnonzero(chosen.chosen[t, head]).tolist()


@pytest.mark.parametrize(("case", "most"), [("f16", None), ("q8_0", 2), ("q8_0,q4_0", 0), ("q4_0", -1)])
def test_absent_blocks_that_are_read_are_the_twins(device: Any, case: str, most: int | None) -> None:
    """Of rows that share blocks, that read all, and that have chosen; for pools of all sizes."""
    here = context(1, *CASES[case])
    ops, n_all = ops_of(device, here), len(here.kv.k) // N
    _, _, recall = here.recalled(ops, None, most)
    for n_pool in (1, n_all // 2, n_all):
        kv = replace(here.kv, k=here.kv.k[: n_pool * N], v=here.kv.v[: n_pool * N])
        absent = np.array([n_all - n_pool, *range(n_all)], np.int32)
        found, wanted = (np.full((kv.k.shape[1], len(absent)), 99, np.int32) for _ in "ab")
        ops.find_absent(None, kv, here.table, here.sequence, recall, absent, found)
        reference.find_absent(None, kv, here.table, here.sequence, recall, absent, wanted)  # type: ignore[arg-type]
        for head, some in zip(found, wanted, strict=True):
            assert some[0] == len(set(some[1 : 1 + some[0]])) and same_bits(head[: 1 + head[0]], some[: 1 + some[0]])
        assert (wanted[:, 0] == 0).all() == (n_pool == n_all)


@pytest.mark.slow
def test_many_absent_blocks(device: Any) -> None:
    """More than a block of threads looks at in one go, of rows of one sequence and more than there are warps.

    Attention takes the rows in two launches.
    """
    here = context(3, "f16", (70_000,), (18,), 2, 1, 32)
    ops = ops_of(device, here)
    _, out, recall = here.recalled(ops, None, 700)
    _, others, chosen = here.recalled(cpu, workspace(cpu.supported_isas()[-1]), 700)
    assert same_bits(recall.left, chosen.left) and (recall.left[:, :, 1] > 0).all() and nmse(out, others) < 1e-6
    np.testing.assert_allclose(recall.missed, chosen.missed, rtol=1e-4)
    kv, absent = replace(here.kv, k=here.kv.k[: 5 * N]), np.array([1090, *range(1100)], np.int32)
    found, wanted = (np.zeros((1, len(absent)), np.int32) for _ in "ab")
    ops.find_absent(None, kv, here.table, here.sequence, recall, absent, found)
    reference.find_absent(None, kv, here.table, here.sequence, recall, absent, wanted)  # type: ignore[arg-type]
    assert 700 < wanted[0, 0] < 1090 and same_bits(found[:, : 1 + wanted[0, 0]], wanted[:, : 1 + wanted[0, 0]])


@pytest.mark.slow
def test_what_is_not_finite_is_as_in_the_twin(device: Any) -> None:
    here = context(2, "f16", (1030, 900), (3, 2), 6, 2, 48, size=30.0)
    here.q[1, 2, 3], here.q[2, 0], here.q[3, 1] = np.nan, 1e30, np.inf
    slot = here.table[1, 4] * N
    here.kv.k[slot + 5, 1, 2], here.kv.k[slot + 20, 0, 7] = np.nan, np.inf
    here.kv.k[here.table[0, 3] * N : here.table[0, 4] * N : 3] = 65504
    for most, leave in CHOICES:
        with np.errstate(all="ignore"):
            sketches, _, recall = here.recalled(ops_of(device, here), None, most, leave)
            wanted, _, chosen = here.recalled(cpu, workspace(cpu.supported_isas()[-1]), most, leave)
        assert same_bits(sketches, wanted)
        for name in ("chosen", "left", "read"):
            assert same_bits(getattr(recall, name), getattr(chosen, name)), name


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_step(device: Any) -> None:
    here = context(6, "q8_0", (1030, 1200), (5, 4), 6, 2, 64)
    ops = ops_of(device, here)
    _, out, recall = here.recalled(ops, None)
    for t in (0, 4, 7):
        _, one, chosen = some(here, slice(t, t + 1)).recalled(ops, None)
        assert same_bits(one, out[t : t + 1]) and same_bits(chosen.missed, recall.missed[t : t + 1])


def test_with_enough_blocks_attention_is_whole(device: Any) -> None:
    here = context(5, "q8_0", (700, 600), (2, 1), 6, 2, 64)
    ops = ops_of(device, here)
    whole = here.attended(ops, None)
    assert same_bits(here.recalled(ops, None, -1)[1], whole) and same_bits(here.recalled(ops, None, 8)[1], whole)
    assert not same_bits(here.recalled(ops, None, 3)[1], whole)


def test_lanes_of_four_elements_leave_out_the_same(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As steps of many rows have them."""
    here = context(5, "f16", (700, 600), (2, 1), 6, 2, 64)
    _, out, one = here.recalled(ops_of(device, here), None, 3)
    monkeypatch.setattr(attention, "FEW_ROWS", 1)
    _, found, four = here.recalled(ops_of(device, here), None, 3)
    assert same_bits(found, out) and same_bits(four.missed, one.missed) and same_bits(four.left, one.left)


def test_equal_blocks_are_read_from_the_first_on(device: Any) -> None:
    here = context(4, "f16", (1000,), (1,), 4, 2, 64)
    keys = here.kv.k.reshape(-1, N, *here.kv.k.shape[1:])
    keys[:] = keys[:1]
    here.keep[:] = 0
    _, _, recall = here.recalled(ops_of(device, here), None, 5)
    assert np.flatnonzero(recall.chosen[0, 1]).tolist() == [0, 1, 2, 3, 4, 5, 12, 13, 14, 15]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "most", "leave", "way"),
    [
        (600, 130, -1, 0), (3, 150, -1, 1), (40, 1, -1, 2), (600, 999, MASS_UNITS // 50, 3), (9, 999, 1000, 4),
        (600, 9, -1, 0),
    ],
)
def test_many_blocks(device: Any, monkeypatch: pytest.MonkeyPatch, kinds: int, most: int, leave: int, way: int) -> None:
    """Of so many kinds, so that some are equally good. way: of WEIGHERS. Warps that weigh have many chunks."""
    monkeypatch.setattr(recall_ops, "WEIGHERS", recall_ops.WEIGHERS[way : way + 1])
    monkeypatch.setattr(device, "n_sm", 3)
    here = context(8, "f16", (35_000,), (1,), 6, 2, 32)
    blocks = here.kv.k.reshape(-1, N, *here.kv.k.shape[1:])
    blocks[here.table[0, :540]] = blocks[here.table[0, np.arange(540) % kinds]]
    _, out, recall = here.recalled(ops_of(device, here), None, most, leave)
    _, wanted, chosen = here.recalled(cpu, workspace(cpu.supported_isas()[-1]), most, leave)
    assert same_bits(recall.chosen, chosen.chosen) and same_bits(recall.left, chosen.left)
    assert nmse(out, wanted) < 1e-6
    listed = recall.scores.view(np.int32)[0, 1]
    assert listed[: recall.last[0, 1] // N + 1].tolist() == np.flatnonzero(chosen.chosen[0, 1]).tolist()


def take_off(device: Any, recall: Recall, d: int) -> None:
    """What attention does to `left`: by its second kernel alone, which takes heads of any size."""
    (T, H, _), W = recall.left.shape, recall.chosen.shape[2]
    zeros = device.upload(np.zeros((T, H, d), np.float32))
    there = [device.upload(a) for a in (recall.last, recall.masses, recall.scores, recall.left, recall.missed)]
    module = Module("combine.cu", (("HEAD_DIM", str(d)), ("SPLITS", "1"), ("LISTED", "1")))
    out = device.upload(np.zeros((T, H * d), np.float32))
    arguments = zeros, zeros, there[0], H, H // recall.read.shape[1], W, 1, out
    kernel = device.kernel(module, "attention_combine")
    kernel((-(-H * d // 32), T), COMBINE_THREADS, (*arguments, None, None, None, None, *there[1:]))
    recall.left[...] = device.read(there[3])


def chosen_alone(
    device: Any, group: int, K: int, d: int, W: int, limits: list[tuple[int, int]], few: bool = False
) -> int:
    """Compare choices by sketches alone, of three rows of two sequences; how many blocks the first reads at most.

    limits: of the first sequence, most and leave. few: many blocks have equal sketches. Some numbers are of no block,
    and keys and queries have what is not finite.
    """
    rng, H = np.random.default_rng(W + d), group * K
    n = 24 if few else min(W, 200)
    keys = (rng.standard_normal((n, N, K, d)) * np.exp(rng.normal(0, 0.7, d))).astype(np.float16).astype(np.float32)
    keys[2, 5, 0, d // 2], keys[3, 1, -1, 0], keys[1, ::2] = np.nan, np.inf, 65504
    sketches = np.zeros((n, K, sketch_bytes(d)), np.uint8)
    for block, to in zip(keys, sketches, strict=True):
        sketch(block, to)
    q = (3 * rng.standard_normal((3, H, d))).astype(np.float32)
    q[1, 0], q[1, -1, 0] = 1e30, np.nan
    numbers, sequence = rng.integers(-1, n, (2, W)).astype(np.int32), np.array([0, 1, 0], np.int32)
    positions = np.array([W * N - 1, rng.integers(W * N), rng.integers(W * N)], np.int32)
    keep, most_read = (rng.random((2, W)) < 0.05).astype(np.uint8), 0
    ops = DeviceOps(device, Limits(3, 64, H * d, 96, 301, 0, 0, n_head=H, n_ctx=W * N))
    for most, leave in limits:
        made = []
        for of, ws in ((ops, None), (cpu, workspace(cpu.supported_isas()[-1]))):
            made.append(blank(3, H, K, W))
            bounds = np.array([most, 1, most], np.int32), np.array([leave, -1, leave], np.int32)
            with np.errstate(all="ignore"):
                of.choose(ws, q, sketches, numbers, sequence, positions, *bounds, keep, float(d) ** -0.5, made[-1])  # type: ignore[attr-defined]
        take_off(device, made[0], d)
        for name in ("chosen", "left", "read"):
            assert same_bits(getattr(made[0], name), getattr(made[1], name)), (name, most, leave)
        for (t, head), last in np.ndenumerate(made[0].last):
            listed = made[0].scores.view(np.int32)[t, head, : last // N + 1]
            assert listed.tolist() == np.flatnonzero(made[1].chosen[t, head]).tolist()
        most_read = max(most_read, int(made[0].read[0].max()))
    return most_read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "K", "d", "W"),
    [(1, 2, 23, 5), (3, 2, 44, 12), (5, 1, 20, 9), (16, 1, 264, 40), (12, 1, 512, 14), (9, 1, 130, 6), (8, 2, 256, 70)],
)
def test_a_choice_of_any_shape(device: Any, group: int, K: int, d: int, W: int) -> None:
    """Widths that attention does not take, too."""
    chosen_alone(device, group, K, d, W, [(0, -1), (2, -1), (-1, -1), (2**31 - 1, MASS_UNITS // 20), (0, 5), (1, 0)])


@pytest.mark.slow
@pytest.mark.parametrize(("W", "few"), [(4300, True), (4301, False), (8201, True)])
def test_more_blocks_than_the_threads_of_a_block_hold(device: Any, W: int, few: bool) -> None:
    """W: whose flags are words, and are not. Some rows are early in the table."""
    assert chosen_alone(device, 2, 1, 32, W, [(70, -1), (1500, -1), (3000, MASS_UNITS // 20)], few) > 1500


@pytest.mark.parametrize("kv_type", ["f16", "q4_0"])
def test_sketches_of_blocks_that_lie_at_home(device: Any, kv_type: str) -> None:
    here = context(9, kv_type, (400,), (1,), 4, 2, 64)
    kv, n = here.kv, 3 * N
    parts = [[None if a is None else a[own].copy() for a in kv.arrays] for own in (slice(0, n), slice(n, None))]
    pool, homes = (type(kv)(*part) for part in parts)
    ops = ops_of(device, here)
    places, numbers = np.array([5, 1, 3, 2], np.int32), np.array([0, 4, 2, 1], np.int32)
    found, wanted = (np.full((6, 2, sketch_bytes(64)), 7, np.uint8) for _ in "ab")
    ops.summarize(None, replace(pool, homes=homes), places, numbers, found)
    cpu.summarize(workspace(cpu.supported_isas()[-1]), kv, places, numbers, wanted)
    assert same_bits(found, wanted)
