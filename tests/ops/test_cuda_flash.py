"""Prefill attention on tensor cores (cuda/flash.cu) against the twin and a float64 loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ops import KV_BLOCK_TOKENS, KVLayer, Limits, arithmetic, reference
from engine.ops.cuda import flash
from engine.ops.cuda.flash import Flash
from tests.op_cases import empty_cache, with_homes

Span = tuple[int, int, int]  # sequence, first position, tokens

# (head_dim, H, K, type of the cache, spans); no two dimensions of a case alike.
CASES: dict[str, tuple[int, int, int, str, list[Span]]] = {
    "whole groups": (128, 16, 2, "f16", [(0, 0, 37)]),
    "q8_0": (128, 16, 2, "q8_0", [(0, 50, 21), (2, 0, 3), (1, 190, 17)]),
    "the tiny model's head, ragged groups": (96, 10, 2, "f16", [(1, 3, 19), (0, 61, 40)]),
    "the tiny model's head in q8_0": (96, 10, 2, "q8_0", [(0, 0, 70)]),
    "half a step of 16": (72, 3, 3, "f16", [(2, 127, 33), (0, 0, 1), (1, 64, 1)]),
    "large heads": (256, 6, 2, "f16", [(0, 20, 50)]),
    "large heads in q8_0, rows of 384 bytes": (160, 4, 1, "q8_0", [(1, 70, 35)]),
    "one row": (128, 16, 2, "f16", [(1, 100, 1)]),
    "spans of one sequence": (128, 16, 2, "f16", [(0, 80, 5), (0, 0, 9), (1, 9, 4)]),
    "every row of another sequence": (128, 16, 2, "f16", [(s, 11 * s, 1) for s in range(5)]),
    "splits": (128, 16, 2, "f16", [(1, 0, 3), (0, 601, 40)]),
    "splits of q8_0": (96, 10, 2, "q8_0", [(0, 700, 33)]),
    "many heads": (64, 22, 11, "f16", [(0, 1, 64), (1, 70, 3)]),
    "the largest heads": (512, 8, 1, "f16", [(0, 30, 37)]),
    "the largest heads in q8_0": (512, 6, 2, "q8_0", [(1, 70, 21), (0, 0, 2)]),
    "heads of 384 in splits": (384, 4, 1, "f16", [(0, 520, 34)]),
    "groups of eight large heads": (256, 16, 2, "f16", [(0, 100, 33)]),
    "pieces": (64, 6, 3, "f16", [(0, 70, 250)]),
    "pieces of q8_0": (96, 10, 2, "q8_0", [(0, 0, 200)]),
    "pieces of several": (64, 6, 3, "f16", [(0, 70, 250), (2, 0, 128), (1, 0, 290), (3, 200, 40)]),
    "q4_0": (128, 16, 2, "q4_0", [(0, 50, 21), (2, 0, 3), (1, 190, 17)]),
    "splits of q4_0": (96, 10, 2, "q4_0", [(0, 700, 33)]),
    "the largest heads in q4_0": (512, 6, 2, "q4_0", [(1, 70, 21), (0, 0, 2)]),
    "large heads, keys in q8_0, values in q4_0": (160, 4, 1, "q8_0,q4_0", [(1, 70, 35)]),
    "keys in f16, values in q4_0": (64, 6, 2, "f16,q4_0", [(1, 130, 40), (0, 200, 31)]),
    "keys in q4_0, values in f16": (224, 3, 1, "q4_0,f16", [(0, 65, 50), (1, 3, 20)]),
    "pieces of several in q8_0": (96, 10, 2, "q8_0", [(1, 128, 161), (0, 0, 256)]),
}

# The windows of cases: of several tiles, of less than one, not full; beginnings on the edges of blocks and off them.
WINDOWS: dict[str, int] = {
    "whole groups": 512,
    "splits": 100,
    "splits of q8_0": 64,
    "spans of one sequence": 5,
    "every row of another sequence": 20,
    "large heads": 33,
    "the largest heads": 40,
    "the largest heads in q8_0": 17,
    "many heads": 1,
}


@dataclass
class Step:
    """One step's inputs on the host; slots that no span covers hold 0xFF bytes, NaN scales among them."""

    q: Any
    kv: KVLayer
    table: Any
    sequence: Any
    positions: Any
    window: int = 0
    gate: Any = None
    gate_kind: str = ""

    def run(self, device: Any, spans: list[tuple[int, int]] | None = None, n_pool: int | None = None) -> Any:
        """n_pool: so many blocks are in the pool, the others at home."""
        T, H, head_dim = self.q.shape
        n_positions = int(self.positions.max()) + 1
        limits = Limits(T, 64, H * head_dim, 64, 64, 8, 2, H, self.kv.k.shape[1], head_dim, n_positions)
        out = device.empty((T, H * head_dim), np.float32)
        device.set_bytes(device.pointer(out), 0xFF, out.nbytes)
        kv = KVLayer(*[None if a is None else device.upload(a) for a in self.kv.arrays])
        if n_pool is not None:
            kv = with_homes(device, self.kv, n_pool)
        arrays = [device.upload(a) for a in (self.q, self.table, self.sequence, self.positions)]
        gate = None if self.gate is None else device.upload(self.gate)
        Flash(device, limits)(
            arrays[0], kv, *arrays[1:], scale_of(head_dim), out,
            n_positions=n_positions, window=self.window, gate=gate, gate_kind=self.gate_kind,
            spans=spans or (),
        )  # fmt: skip
        return device.read(out)

    def expected(self) -> Any:
        """The float64 attention of the stored keys and values: [T, H * head_dim]."""
        T, H, head_dim = self.q.shape
        out = np.empty((T, H, head_dim))
        for t, (s, p) in enumerate(zip(self.sequence, self.positions, strict=True)):
            at = np.arange(max(p + 1 - self.window, 0) if self.window else 0, p + 1)
            at = at[self.table[s, at // KV_BLOCK_TOKENS] >= 0]
            slots = self.table[s, at // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + at % KV_BLOCK_TOKENS
            k = reference._load(self.kv.k, self.kv.k_scale, slots).astype(np.float64)
            v = reference._load(self.kv.v, self.kv.v_scale, slots).astype(np.float64)
            group = H // k.shape[1]
            for h in range(H):
                score = k[:, h // group] @ self.q[t, h] * scale_of(head_dim)
                e = np.exp(score - score.max())
                out[t, h] = e @ v[:, h // group] / e.sum()
        return out.reshape(T, -1)


def scale_of(head_dim: int) -> float:
    return 1 / head_dim**0.5


def make_step(case: str, blocks_at: int = 0) -> Step:
    """Random inputs of a case; `blocks_at` chooses where the blocks lie, nothing else."""
    head_dim, H, K, kv_type, spans = CASES[case]
    rng = np.random.default_rng([len(case), head_dim])
    n_sequence = max(s for s, _, _ in spans) + 1
    max_blocks = max(-(-(p + n) // KV_BLOCK_TOKENS) for _, p, n in spans) + 1
    n_blocks = n_sequence * max_blocks + 2
    table = np.random.default_rng(blocks_at).permutation(n_blocks)[: n_sequence * max_blocks]
    table = table.reshape(n_sequence, max_blocks).astype(np.int32)
    kv = empty_cache(kv_type, n_blocks, K, head_dim)
    for array in kv.arrays:
        if array is not None:
            array.view(np.uint8)[...] = 0xFF
    for s, first, n in spans:
        at = np.arange(first + n)
        slots = table[s, at // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + at % KV_BLOCK_TOKENS
        reference._store(kv.k, kv.k_scale, slots, rng.normal(size=(first + n, K, head_dim)).astype(np.float32) * 2)
        reference._store(kv.v, kv.v_scale, slots, rng.normal(size=(first + n, K, head_dim)).astype(np.float32) + 0.3)
    T = sum(n for _, _, n in spans)
    q = rng.normal(size=(T, H, head_dim)).astype(np.float32)
    sequence = np.concatenate([np.full(n, s, np.int32) for s, _, n in spans])
    positions = np.concatenate([np.arange(p, p + n, dtype=np.int32) for _, p, n in spans])
    return Step(q, kv, table, sequence, positions)


def nmse(out: Any, expected: Any) -> float:
    return float(((out - expected) ** 2).sum() / (expected**2).sum())


@pytest.mark.parametrize("case", CASES)
def test_near_float64(device: Any, case: str) -> None:
    step = make_step(case)
    assert nmse(step.run(device), step.expected()) < 1e-6  # NaN fails


@pytest.mark.slow
@pytest.mark.parametrize("case", WINDOWS)
def test_window(device: Any, case: str) -> None:
    step = make_step(case)
    step.window = WINDOWS[case]
    whole = step.run(device)
    assert nmse(whole, step.expected()) < 1e-6
    # Blocks before all windows are none, or another's, all NaN.
    for s in set(step.sequence.tolist()):
        n_blocks = max(int(step.positions[step.sequence == s].min()) - step.window + 1, 0) // KV_BLOCK_TOKENS
        for block in step.table[s, :n_blocks]:
            slots = slice(block * KV_BLOCK_TOKENS, (block + 1) * KV_BLOCK_TOKENS)
            for cache in (step.kv.k, step.kv.v, step.kv.k_scale, step.kv.v_scale):
                if cache is not None:
                    cache[slots] = np.full(1, 0xFFFF, np.uint16).view(np.float16)[0] if cache.dtype != np.int8 else -1
        step.table[s, :n_blocks:2] = -1
    assert np.array_equal(step.run(device), whole)
    part = slice(len(step.q) // 2, len(step.q))
    rows = (step.table, step.sequence[part], step.positions[part], step.window)
    assert np.array_equal(Step(step.q[part].copy(), step.kv, *rows).run(device), whole[part])


@pytest.mark.parametrize(
    ("case", "window"),
    [
        *((case, 0) for case in ("q8_0", "one row", "splits", "splits of q8_0")),
        *((case, 0) for case in ("pieces", "the largest heads in q8_0", "heads of 384 in splits")),
        *((case, WINDOWS[case]) for case in ("splits", "splits of q8_0")),
    ],
)
def test_blocks_that_are_not_there_are_passed_over(device: Any, case: str, window: int) -> None:
    """Whatever lies in block 0: every other one back from that of a sequence's first row."""
    step = make_step(case)
    step.window = window
    for s in set(step.sequence.tolist()):
        for block in range(int(step.positions[step.sequence == s].min()) // KV_BLOCK_TOKENS - 1, -1, -2):
            at = step.table[s, block]
            slots = slice(at * KV_BLOCK_TOKENS, (at + 1) * KV_BLOCK_TOKENS)
            for cache in (step.kv.k, step.kv.v, step.kv.k_scale, step.kv.v_scale):
                if cache is not None:
                    cache[slots] = np.full(1, 0xFFFF, np.uint16).view(np.float16)[0] if cache.dtype != np.int8 else -1
            step.table[s, block] = -1
    assert (step.table < 0).any()
    whole = step.run(device)
    assert nmse(whole, step.expected()) < 1e-6
    part = slice(len(step.q) // 2, len(step.q))
    rows = (step.table, step.sequence[part], step.positions[part], step.window)
    assert np.array_equal(Step(step.q[part].copy(), step.kv, *rows).run(device), whole[part])


def test_a_row_that_sees_no_block_is_nan(device: Any) -> None:
    step = make_step("many heads")
    step.table[:] = -1
    assert np.isnan(step.run(device)).all()


@pytest.fixture
def cached_splits() -> Iterator[None]:
    """What is remembered of splits is of the device's real numbers before and after."""
    flash.split.cache_clear()
    yield
    flash.split.cache_clear()


@pytest.mark.parametrize(("case", "slots"), [("pieces", 24), ("pieces of q8_0", 16)])
@pytest.mark.usefixtures("cached_splits")
def test_a_long_step_has_the_bits_of_its_pieces(
    device: Any, case: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So few blocks at once that steps of different lengths split the same positions differently.
    for name, value in (("SLOTS", slots), ("MAX_BLOCKS", 3 * slots), ("SPLIT_COST", 0), ("COMBINE_COST", 0)):
        monkeypatch.setattr(flash, name, value)
    step = make_step(case)
    T, first = len(step.q), int(step.positions[0])
    monkeypatch.setattr(flash, "PIECE_TOKENS", 1 << 20)
    uncut = step.run(device)
    monkeypatch.setattr(flash, "PIECE_TOKENS", 128)
    whole = step.run(device)
    assert nmse(whole, step.expected()) < 1e-6
    assert not np.array_equal(whole, uncut)  # or there would be nothing to test
    for begin in (128, 256):
        if first < begin < first + T:
            rows = slice(begin - first, T)
            part = Step(step.q[rows].copy(), step.kv, step.table, step.sequence[rows], step.positions[rows])
            assert np.array_equal(part.run(device), whole[rows])


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 700))
def test_whole_pieces_are_not_split_whatever_is_around_them(T: int, first: int, more: int) -> None:
    def found(T: int) -> dict[int, tuple[int, int] | None]:
        """By position: the launch that a row is in, or None in one that is not split."""
        made = flash.launches([(T, first + T)])
        assert [a for a, *_ in made] == [0, *(b for _, b, *_ in made[:-1])] and made[-1][1] == T
        assert all(end == first + b for _, b, _, end in made)
        return {first + t: (first + a, first + b) if splits else None for a, b, splits, _ in made for t in range(a, b)}

    rows = found(T)
    for position, launch in rows.items():
        piece = position // 512 * 512
        assert (launch is None) == (piece >= first and piece + 512 <= first + T)
    longer = found(T + more)
    assert all(longer[p] is None for p, launch in rows.items() if launch is None)


@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 4000)), min_size=1, max_size=5))
def test_what_is_split_has_the_launches_that_it_has_alone(spans: list[tuple[int, int]]) -> None:
    """Of each sequence its tokens, and those before; what is not split shares launches, up to the last position."""
    together = flash.launches([(T, first + T) for T, first in spans])
    assert [a for a, *_ in together] == [0, *(b for _, b, *_ in together[:-1])]
    at, split, whole = 0, [], []
    for T, first in spans:
        for a, b, splits, end in flash.launches([(T, first + T)]):
            (split if splits else whole).append((at + a, at + b, splits, end))
        at += T
    assert [made for made in together if made[2]] == split and together[-1][1] == at
    for a, b, splits, end in together:
        if not splits:
            inside = [made for made in whole if a <= made[0] and made[1] <= b]
            assert sum(made[1] - made[0] for made in inside) == b - a and end == max(made[3] for made in inside)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "slots"), [("pieces of several", 24), ("pieces of several in q8_0", 16)])
@pytest.mark.usefixtures("cached_splits")
def test_sequences_of_a_long_step_have_the_bits_of_each_alone(
    device: Any, case: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SLOTS", slots), ("MAX_BLOCKS", 3 * slots), ("SPLIT_COST", 0), ("COMBINE_COST", 0)):
        monkeypatch.setattr(flash, name, value)
    monkeypatch.setattr(flash, "PIECE_TOKENS", 128)
    step, spans = make_step(case), CASES[case][4]
    together = step.run(device, [(n, first + n) for _, first, n in spans])
    assert nmse(together, step.expected()) < 1e-6
    assert not np.array_equal(together, step.run(device))  # or there would be nothing to test
    at = 0
    for _, _, n in spans:
        rows = slice(at, at + n)
        alone = Step(step.q[rows].copy(), step.kv, step.table, step.sequence[rows], step.positions[rows])
        own = [(n, int(step.positions[at + n - 1]) + 1)]
        assert np.array_equal(alone.run(device, own), together[rows])
        at += n
    with pytest.raises(ValueError, match="spans"):
        step.run(device, own)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind", "by_head"),
    [
        ("the tiny model's head, ragged groups", "softplus", True),
        ("whole groups", "sigmoid", False),
        ("splits", "softplus", False),
        ("splits of q8_0", "sigmoid", True),
        ("the largest heads in q8_0", "sigmoid", False),
        ("heads of 384 in splits", "softplus", True),
    ],
)
def test_gate(device: Any, case: str, kind: str, by_head: bool) -> None:
    step = make_step(case)
    T, H, head_dim = step.q.shape
    plain = step.run(device).reshape(T, H, head_dim)
    gate = np.linspace(-80, 80, T * H * (1 if by_head else head_dim), dtype=np.float32).reshape(T, -1)
    gate[:, ::2] /= 40
    step.gate, step.gate_kind = gate, kind
    factor = getattr(arithmetic, kind)(gate).reshape(T, H, -1)
    assert np.array_equal(step.run(device).reshape(T, H, head_dim), plain * factor)


def test_near_the_twin(device: Any) -> None:
    step = make_step("every row of another sequence")
    T, H, head_dim = step.q.shape
    twin = np.full((T, H * head_dim), np.nan, np.float32)
    ws = reference.Workspace(Limits(T, 64, H * head_dim, 64, 64, 8, 2), 1)
    reference.attention(ws, step.q, step.kv, step.table, step.sequence, step.positions, scale_of(head_dim), twin)
    assert nmse(twin, step.expected()) < 1e-10
    assert nmse(step.run(device), twin) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", ["q8_0", "splits"])
def test_bits_do_not_depend_on_where_blocks_lie(device: Any, case: str) -> None:
    first = make_step(case).run(device)
    assert np.array_equal(first, make_step(case, 1).run(device))
    assert np.array_equal(first, make_step(case, 1).run(device))


@pytest.mark.parametrize("case", ["q8_0", "spans of one sequence", "large heads in q8_0, rows of 384 bytes"])
def test_bits_do_not_depend_on_which_blocks_are_at_home(device: Any, case: str) -> None:
    step = make_step(case)
    expected, n_blocks = step.run(device), step.kv.k.shape[0] // KV_BLOCK_TOKENS
    for n_pool in {1, n_blocks // 2, n_blocks}:
        assert np.array_equal(step.run(device, n_pool=n_pool), expected)


@pytest.mark.parametrize(
    ("case", "part"), [("the tiny model's head, ragged groups", slice(30, 50)), ("many heads", slice(40, 66))]
)
def test_bits_of_a_row_do_not_depend_on_its_neighbors(device: Any, case: str, part: slice) -> None:
    step = make_step(case)
    alone = Step(step.q[part].copy(), step.kv, step.table, step.sequence[part], step.positions[part])
    assert np.array_equal(step.run(device)[part], alone.run(device))


def test_nan_and_infinity_show(device: Any) -> None:
    step = make_step("whole groups")
    T, H, head_dim = step.q.shape
    step.q[4, 3, 7] = np.nan
    step.q[9, 11, 127] = np.inf
    step.q[10, 0] = 1e30  # no half
    step.kv.k[step.table[0, 0] * KV_BLOCK_TOKENS + 21, 1, 5] = np.nan  # seen by the second kv head's rows from 21 on
    bad = np.zeros((T, H), bool)
    bad[4, 3] = bad[9, 11] = bad[10, 0] = True
    bad[21:, 8:] = True
    out = step.run(device).reshape(T, H, head_dim)
    assert np.isnan(out[bad]).all()
    assert np.isfinite(out[~bad]).all()
    step = make_step("splits")
    step.kv.v[step.table[0, 2] * KV_BLOCK_TOKENS + 3, 0, 5] = np.nan
    out = step.run(device).reshape(-1, H, head_dim)
    assert np.isnan(out[3:, :8, 5]).all()
    assert np.isfinite(out[:3]).all()
    assert np.isfinite(out[3:, 8:]).all()


@pytest.mark.slow
def test_large_scores(device: Any) -> None:
    """One position takes all the weight, whichever tile it lies in."""
    step = make_step("splits")
    step.q[:] = 40
    step.kv.k[:] = -40
    for t, position in ((3, 0), (20, 300), (42, 601)):
        slot = step.table[0, position // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + position % KV_BLOCK_TOKENS
        step.kv.k[slot] = 40
        out = step.run(device)[t].reshape(16, 128)
        assert np.array_equal(out, np.repeat(step.kv.v[slot], 8, axis=0).astype(np.float32))
        step.kv.k[slot] = -40


def test_split() -> None:
    """Splits fill the slots where there are few blocks, cover all positions and fit the scratch memory."""
    assert flash.split(1024, 4096) == (1, 64)
    assert flash.split(128, 512)[0] == 1
    assert flash.split(16, 16448)[0] == 16
    for n_blocks in (1, 2, 7, 16, 100, 128, 131, 200, 263, 265, 528, 529, 5000):
        for n_positions in (1, 64, 65, 1000, 4097, 131072):
            n, length = flash.split(n_blocks, n_positions)
            assert (n - 1) * length * KV_BLOCK_TOKENS < n_positions <= n * length * KV_BLOCK_TOKENS
            assert n == 1 or n * n_blocks <= flash.MAX_BLOCKS


def test_refuses_what_it_does_not_take(device: Any) -> None:
    run = Flash(device, Limits(40, 64, 640, 64, 64, 8, 2, 4, 2, 160, 64))
    table, rows = device.empty((1, 1), np.int32), device.empty((40,), np.int32)
    out = device.empty((40, 4 * 640), np.float32)
    refused = ((264, 4, 2, 40), (640, 4, 2, 40), (100, 4, 2, 40), (96, 4, 3, 40), (96, 4, 2, 65), (96, 4, 2, 0))
    for head_dim, H, K, n_positions in refused:
        kv = KVLayer(*[device.empty((64, K, head_dim), np.float16) for _ in range(2)])
        with pytest.raises(ValueError):
            run(device.empty((40, H, head_dim), np.float32), kv, table, rows, rows, 1.0, out, n_positions=n_positions)
