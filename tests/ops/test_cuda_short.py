"""Experts of the short rows of a long step: the bits of reference.expert_ffn, beside rows that have others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.ops import Fetches, SharedExpert, ShortRows
from engine.ops.cuda import ops
from engine.ops.cuda.products import QuantizedScratch
from tests.ops.test_cuda_experts import TYPES, A, Bank, E, Types, choices, shared_expert, uploaded
from tests.ops.test_cuda_prepared import Call
from tests.ops.test_cuda_products import check, normal

K4, K6, Q8 = QType.Q4_K, QType.Q6_K, QType.Q8_0


class Case:
    """A bank, and the inputs of a step of T rows; one expert has more than a tile of them, and one has none."""

    def __init__(self, device: Any, types: Types, D: int, F: int, T: int, **more: Any) -> None:
        self.device, self.bank = device, Bank(device, types, D, F, **more)
        rng = np.random.default_rng(T)
        self.experts, self.weights = choices(T, rng), rng.uniform(0.1, 1, (T, A)).astype(np.float32)
        self.h, self.x = normal(T, D, seed=1), normal(T, D, seed=2)
        self.T, self.limits = T, replace(self.bank.limits, max_tokens=max(T, 33))
        self.source = device.pointer(self.bank.home) + np.array(
            [[self.bank.offset(e, part) for part in range(3)] for e in range(E)], np.uint64
        )
        self.source[E - 1] = 0  # nobody chose it

    def expected(self, shared: SharedExpert | None = None) -> np.ndarray:
        return self.bank.expected(self.h, self.experts, self.weights, self.x, shared)

    def run(self, short: ShortRows | None, add: bool = True, shared: SharedExpert | None = None) -> np.ndarray:
        upload, ws = self.device.upload, ops.workspace(self.limits, self.device)
        self.device.write(ws.routing.source, self.source)
        more = {} if self.bank.more.get("gate_scale") is None else {"gate_scale": upload(self.bank.more["gate_scale"])}
        bank = replace(self.bank.experts(upload(np.zeros((E, 3), np.uint64))), **more)
        fetches = Fetches(upload(np.zeros((E, 3), np.int32)), upload(np.zeros(1, np.int32)))
        if short is not None and short.mask is not None:
            short = replace(short, mask=upload(short.mask))
        x = upload(self.x)
        inputs = (upload(a) for a in (self.h, self.experts, self.weights))
        beside = None if shared is None else uploaded(self.device, shared)
        ops.expert_ffn(ws, *inputs, bank, fetches, x, add, beside, short=short)
        return np.array(self.device.read(x))


def masked(mask: np.ndarray) -> ShortRows:
    return ShortRows(int(mask.sum()), int(mask.argmax()), mask.astype(np.uint8))


@pytest.mark.parametrize(
    "types", [pytest.param(t, marks=pytest.mark.slow if i > 1 else []) for i, t in enumerate(TYPES)],
    ids=lambda types: "-".join(t.name for t in types),
)  # fmt: skip
def test_all_types(device: Any, types: Types) -> None:
    case = Case(device, types, 256, 512, 33)
    check(case.run(ShortRows(33)), case.expected())


@pytest.mark.parametrize("T", [40, 79])
def test_rows_and_columns_of_odd_numbers(device: Any, T: int) -> None:
    case = Case(device, (QType.Q4_0, QType.Q4_0, Q8), 160, 96, T)  # ragged blocks, unaligned rows
    check(case.run(ShortRows(T)), case.expected())


@pytest.mark.slow
def test_floats_in_parts(device: Any) -> None:
    """z of floats takes more than there is room for, and neither width is a multiple of 32."""
    case = Case(device, (QType.F32, QType.F32, QType.F16), 42, 61, 70)
    case.limits = replace(case.limits, n_ff=61)
    check(case.run(ShortRows(70)), case.expected())


@pytest.mark.slow
def test_gelu_and_factors(device: Any) -> None:
    scale = np.random.default_rng(5).uniform(0.3, 3.0, E).astype(np.float32)
    case = Case(device, (Q8, Q8, QType.Q4_0), 64, 96, 45, activation="gelu", gate_scale=scale)
    check(case.run(ShortRows(45)), case.expected())


def test_the_sum_alone(device: Any) -> None:
    case = Case(device, (Q8, Q8, QType.Q4_0), 64, 96, 37)
    expected = case.run(ShortRows(37))
    before, case.x = case.x, np.full_like(case.x, np.nan)
    found = case.run(ShortRows(37), add=False)
    check((before + found).astype(np.float32), expected)


def test_results_of_some_columns_at_a_time(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(device, (Q8, Q8, QType.Q4_0), 192, 96, 37)
    monkeypatch.setattr("engine.ops.cuda.gemm.FOLD_BYTES", 1)  # 64 columns of floats
    check(case.run(ShortRows(37)), case.expected())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "D", "F"), [((K4, K4, K6), 256, 512), ((QType.F16, QType.BF16, Q8), 64, 96)], ids=["K", "F16"]
)
def test_rows_of_both_kinds(device: Any, types: Types, D: int, F: int) -> None:
    """Each row has the bits that it has where all rows are of its kind, wherever it is."""
    T = 71
    case = Case(device, types, D, F, T)
    long, short = case.run(None), case.expected()
    assert (long != short).any(axis=1).all()
    some = np.arange(T) % 3 == 1
    for rows in (ShortRows(T - 40, 40), ShortRows(1, T - 1), masked(some), masked(~some & (np.arange(T) < 60))):
        mask = np.arange(T) >= rows.first if rows.mask is None else rows.mask.astype(bool)
        found = case.run(rows)
        check(found[mask], short[mask])
        check(found[~mask], long[~mask])


@pytest.mark.slow
def test_a_shared_expert_is_that_of_a_long_step(device: Any) -> None:
    """It is added last, and the order of columns that tensor cores have depends on no row's kind."""
    types = (Q8, Q8, QType.Q4_0)
    case, shared = Case(device, types, 64, 96, 41), shared_expert(types, 64, 96, QType.F32)
    long, rows = case.run(None, shared=shared), case.run(ShortRows(20, 21), shared=shared)
    check(rows[:21], long[:21])
    case.x = case.expected()
    case.weights = np.zeros_like(case.weights)
    check(rows[21:], case.run(None, shared=shared)[21:])


def test_experts_of_another_are_passed_over(device: Any) -> None:
    """Those whose matrices are nowhere: their results are there already, and stay."""
    case = Case(device, (Q8, Q8, Q8), 64, 96, 40)
    ws, upload = ops.workspace(case.limits, device), device.upload
    bank, h = case.bank.experts(upload(np.zeros((E, 3), np.uint64))), ws.short_experts._h.rows(40, 64)
    each = ws.short_experts.tiled.pairs_of(bank, 40 * A / E)
    groups = ws.gemm.group(upload(case.experts), E, each)
    source = case.source.copy()
    source[2] = 0
    y, made = (device.upload(np.full((40 * A, 64), 7, np.float32)) for _ in range(2))
    ws.products.quantize(upload(case.h), h)
    for where, to in ((case.source, made), (source, y)):
        tiles = groups.tiles, groups.n_tiles, 40 * A // each + E, groups.pairs, each
        z = QuantizedScratch(device, 40 * A, 96).rows(40 * A, 96)
        ws.short_experts.tiled.gate_up(h, A, bank, upload(where), *tiles, z)
        ws.short_experts.tiled.down(bank, upload(where), *tiles, z, to, 0, 64)
    mine = case.experts.reshape(-1) == 2
    check(device.read(y)[~mine], device.read(made)[~mine])
    assert mine.any() and (device.read(y)[mine] == 7).all() and (device.read(made) != 7).all()


def test_a_step_launches_what_its_rows_need() -> None:
    def launched(short: ShortRows | None) -> set[str]:
        c = Call(64)
        c.ws.device.kernels.clear()
        if short is not None and short.mask is not None:
            short = replace(short, mask=c.ws.device.upload(short.mask))
        ops.expert_ffn(c.ws, c.h, c.experts, c.weights, c.bank, c.fetches, c.x, short=short)
        return {name for _, name in c.ws.device.kernels}

    long = {"to_halves", "group_tokens", "gate_up", "join_exponents", "down", "fold_ranks"}
    rows = {"quantize", "group_tokens", "gate_up_tiled", "down_tiled", "fold_floats"}
    assert launched(None) == long
    assert launched(ShortRows(64)) == rows
    assert launched(ShortRows(20, 44)) == long | rows
    assert launched(masked(np.arange(64) % 2 == 1)) == long | rows
