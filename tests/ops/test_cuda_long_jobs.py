"""Experts of steps of 33 to 128 tokens that the CPU's threads take while an emulated GPU brings the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats.block_types import FLOAT_TYPES
from engine.formats.quants import QTensor
from engine.ops import Experts, Fetches, Gating, ShortRows, arithmetic, reference
from engine.ops.cuda import ops
from engine.ops.cuda.cpu_experts import CpuExperts, bank_of
from engine.ops.cuda.long_jobs import LongJobs
from engine.ops.cuda.products import Quantized
from engine.ops.cuda.routing import Routing, Staging, staging_bytes
from engine.ops.jobs import MAX_RECORDS, MAX_TOKENS
from engine.placing import policy
from engine.placing.handed import HandedTally
from tests.ops import test_cuda_experts
from tests.ops.test_cuda_experts import A, Bank, Types
from tests.ops.test_cuda_products import check, normal
from tests.ops.test_cuda_routing import assert_same_state, on_device

D, F = 256, 96
K4, Q8, F16 = QType.Q4_K, QType.Q8_0, QType.F16
SOME = -1  # experts of the CPU, at least, on a GPU: it brings such small ones sooner than a thread claims one
MARK = 7.0  # where the FFN of the others would have written
LONG_S = 60.0


@pytest.fixture(autouse=True)
def many_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_cuda_experts, "E", 20)


def least(device: Any, n: int) -> int:
    """More than so many experts are the CPU's."""
    return SOME if device.is_concurrent else n


class Layer:
    """A layer whose experts are partly in slots, on the device and on the host, and threads for what misses."""

    def __init__(
        self, device: Any, percent: int, types: Types = (K4, K4, Q8), D: int = D, F: int = F, **more: Any
    ) -> None:
        self.device, self.E = device, test_cuda_experts.E
        self.bank = Bank(device, types, D, F, max(1, self.E * percent // 100), **more)
        self.limits = replace(self.bank.limits, max_tokens=256)
        scale = more.get("gate_scale")
        self.more = more | ({} if scale is None else {"gate_scale": device.upload(scale)})
        E, bank, n_slots = self.E, self.bank, self.E * percent // 100
        host = policy.SlotState.empty((n_slots,), E)
        for e in range(E):
            host.home_ptr[0, e] = [device.pointer(bank.home) + bank.offset(e, part) for part in range(3)]
        for slot in range(n_slots):
            host.slot_ptr[slot] = [device.pointer(bank.slot(slot, part)) for part in range(3)]
            for part in range(3):
                device.write(bank.slot(slot, part), bank.parts[slot][part])
        host.expert_ptr[:] = host.home_ptr
        host.expert_ptr[0, :n_slots] = host.slot_ptr[:n_slots]
        host.slot_of[0, :n_slots] = host.expert_of[:] = np.arange(n_slots)
        host.heat[0, : n_slots // 2] = 1 << 24  # a use is 1 << 16: some slots are left to what comes
        self.host, self.state = host, on_device(device, host)
        self.routing = Routing(device, self.limits)
        n_bytes = E * staging_bytes(bank.part_bytes)
        self.staging = Staging(device, self.limits, n_bytes)
        self.rng = np.random.default_rng(percent)

    def experts(self, state: policy.SlotState) -> Experts:
        pointers = (state.expert_ptr[0], state.home_ptr[0], state.slot_ptr)
        more = self.bank.more if state is self.host else self.more
        return Experts(*self.bank.types, self.bank.D, self.bank.F, self.bank.part_bytes, *pointers, layer=0, **more)

    @contextmanager
    def cpu(self, pace_s: float, patience_s: float = LONG_S, bound_s: float = LONG_S) -> Iterator[LongJobs]:
        cpu = CpuExperts(self.device, self.limits, [bank_of(self.experts(self.state))], bound_s, patience_s)
        cpu.start([-1, -1], spin_us=2000, max_tokens=MAX_TOKENS)
        try:
            yield LongJobs(self.device, self.limits, cpu, pace_s)
        finally:
            self.device.synchronize()
            cpu.close()

    def source_bytes(self, address: int, n: int) -> np.ndarray:
        """What lies at an address of the table."""
        for array in (self.bank.slots, self.staging.buffers[0], self.bank.home):
            at = address - self.device.pointer(array)
            if 0 <= at < array.nbytes:
                return np.asarray(array if array is self.bank.home else self.device.read(array))[at : at + n]
        raise AssertionError(f"nothing is at {address:#x}")

    def y(self, e: int, h: np.ndarray) -> np.ndarray:
        """Of an expert, for rows, by the twin."""
        shapes = ((self.bank.F, self.bank.D),) * 2 + ((self.bank.D, self.bank.F),)
        scale = 1.0 if "gate_scale" not in self.bank.more else float(self.bank.more["gate_scale"][e])
        gate, up, down = (
            QTensor("expert", t, shape, data, scale=s)
            for t, shape, data, s in zip(self.bank.types, shapes, self.bank.parts[e], (scale, 1.0, 1.0), strict=True)
        )
        activate = arithmetic.gelu if self.bank.more.get("activation") == "gelu" else arithmetic.silu
        return arithmetic.product(down, activate(arithmetic.product(gate, h)) * arithmetic.product(up, h))

    def step(
        self, jobs: LongJobs, T: int = 40, busy: Sequence[int] = (), compare: bool = True, parts: int = 1
    ) -> tuple[int, int]:
        """One step; experts that were the CPU's, and those that missed and entered no slot.

        busy: experts that all tokens use. parts: in which columns are collected; of more than one, rows are, too.
        """
        device, rng, bank = self.device, self.rng, self.bank
        logits = rng.standard_normal((T, self.E)).astype(np.float32)
        if not busy:  # some are used by many tokens, and others by few
            logits -= 0.3 * np.arange(self.E, dtype=np.float32)[::-1] * (np.arange(T) % 4 > 0)[:, None]
        logits[:, list(busy)] += 50
        h, counted = normal(T, bank.D, seed=int(rng.integers(1 << 30))), np.ones(T, np.uint8)
        want, want_weights = np.zeros((T, A), np.int32), np.zeros((T, A), np.float32)
        want_fetches = Fetches(np.zeros((self.E, 3), np.int32), np.zeros(1, np.int32))
        resident = self.host.slot_of[0] >= 0
        arguments = (logits, Gating(), self.host, self.experts(self.host), counted, policy.DEFAULT)
        reference.route(None, *arguments, want, want_weights, want_fetches)  # type: ignore[arg-type]

        experts, weights = device.empty((T, A), np.int32), device.empty((T, A), np.float32)
        fetches = Fetches(device.empty((self.E, 3), np.int32), device.empty(1, np.int32))
        given, on_it, source = self.experts(self.state), device.upload(counted), self.staging.source[0]
        self.routing.choose(device.upload(logits), Gating(), experts, weights)
        self.routing.advance(experts, on_it, self.state, 0, policy.DEFAULT, fetches, source)
        rows: Any = device.upload(h)
        if bank.types[0] not in FLOAT_TYPES:
            q, d = arithmetic.quantize_activations(h)
            rows = Quantized(device.upload(q), device.upload(d), device.empty(d.shape, np.int32))
        before = jobs.tally
        assert jobs.takes(T)
        assert jobs.share(rows, experts, given, fetches, self.staging, 0) is source
        found = np.full((T * A, bank.D), MARK, np.float32)
        for t, end in ((0, T),) if parts == 1 else ((0, T // 3), (T // 3, T)):
            for column in range(0, bank.D, bank.D // parts):
                part = (slice(t * A, end * A), slice(column, column + bank.D // parts))
                y = device.upload(np.ascontiguousarray(found[part]))
                jobs.collect(experts, y, t, column)
                found[part] = device.read(y)
        table = device.read(source).copy()
        device.synchronize()

        entered = want_fetches.rows[: want_fetches.count[0], 0]
        chosen, free = np.unique(want), []
        for e in chosen:
            uses, is_cpus = np.nonzero(want.reshape(-1) == e)[0], not table[e].any()
            if not resident[e] and e not in entered:
                free.append(e)
            else:
                assert not is_cpus
            if is_cpus:
                if compare:
                    np.testing.assert_array_equal(found[uses], self.y(e, h[uses // A]))
                assert len(uses) <= MAX_TOKENS
                continue
            assert (found[uses] == MARK).all()
            for part in range(3):
                at = self.source_bytes(int(table[e, part]), bank.part_bytes[part])
                np.testing.assert_array_equal(at, bank.parts[e][part])
        self.staging.fill(fetches, given, source)  # last: a token before the last 32 may use what leaves
        assert_same_state(device, self.state, self.host)
        for e, slot, _ in want_fetches.rows[: want_fetches.count[0]]:
            for part in range(3):
                np.testing.assert_array_equal(device.read(bank.slot(slot, part)), bank.parts[e][part])
        n_cpus = int((~table[chosen].any(1)).sum())
        new = jobs.tally.since(before)
        n_jobs = min(MAX_RECORDS, sum((want == e).sum() <= MAX_TOKENS for e in free))
        if compare:
            assert (new.done, new.taken) == (n_cpus, n_jobs - n_cpus) and new.layers == (n_jobs > 0)
        return n_cpus, len(free)


@pytest.mark.parametrize("percent", [10, 60])
@pytest.mark.parametrize("claimed", ["all", "none", "some"])
def test_every_pair_whoever_computed_it(device: Any, percent: int, claimed: str) -> None:
    """All where copies wait long for the threads; none where these are stopped before a claim; else who comes first."""
    layer = Layer(device, percent)
    with layer.cpu({"all": 0.3, "none": 1e-6, "some": 2e-3}[claimed]) as jobs:
        pool = jobs.cpu.pool
        n_cpus = n_free = 0
        for i, T in enumerate((33, 40, 64, 128, 48)):
            stopped = 2 if claimed == "none" else i % 3 if claimed == "some" else 0
            pool.wake()
            with pool.held("before claim", stopped) if stopped else nullcontext():
                cpus, free = layer.step(jobs, T)
            n_cpus, n_free = n_cpus + cpus, n_free + free
        assert n_free > 3
        assert n_cpus == 0 if claimed == "none" else n_cpus > least(device, 0)
        assert pool.drain(LONG_S) and pool.counts()["done"] == jobs.tally.done == n_cpus
        assert not jobs.cpu.failed


@pytest.mark.slow
def test_more_missing_experts_than_records_and_busy_ones(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 experts that miss and enter no slot 64 get a job; what all tokens use gets none."""
    monkeypatch.setattr(test_cuda_experts, "E", 120)
    layer = Layer(device, 5, D=64, F=32, types=(Q8, Q8, Q8))
    with layer.cpu(0.05) as jobs:
        for busy in ((119, 118), (3, 119)):
            jobs.cpu.pool.wake()
            n_cpus, n_free = layer.step(jobs, 128, busy)
            assert n_free > MAX_RECORDS >= n_cpus > least(device, 0)


def test_nothing_missing_and_everything_missing(device: Any) -> None:
    layer = Layer(device, 100)
    with layer.cpu(0.05) as jobs:
        for _ in range(2):
            assert layer.step(jobs) == (0, 0)
        assert jobs.tally == HandedTally() and jobs.cpu.counts()["jobs"] == 0
    layer = Layer(device, 0)
    with layer.cpu(0.05) as jobs:
        assert layer.step(jobs, 33)[1] > 10


@pytest.mark.parametrize(
    ("types", "more"),
    [((F16, F16, F16), {}), ((Q8, K4, F16), {"activation": "gelu"}), ((QType.F32, QType.BF16, Q8), {}),
     ((K4, K4, K4), {"gate_scale": np.linspace(0.5, 2, 20).astype(np.float32)})],
    ids=["floats", "gelu", "mixed", "scaled"],
)  # fmt: skip
def test_other_types(device: Any, types: Types, more: dict[str, Any]) -> None:
    layer = Layer(device, 30, types, F=256 if types[2] == K4 else F, **more)
    with layer.cpu(0.1) as jobs:
        assert sum(layer.step(jobs, 40)[0] for _ in range(3)) > least(device, 3)


def test_an_odd_number_of_columns(device: Any) -> None:
    layer = Layer(device, 30, (F16, F16, F16), D=45, F=50)
    with layer.cpu(0.1) as jobs:
        assert sum(layer.step(jobs, 40, parts=parts)[0] for parts in (1, 3, 5)) > least(device, 3)


def test_results_in_parts(device: Any) -> None:
    """Of columns and of tokens, as memory between the products of experts has room; counted once."""
    layer = Layer(device, 30)
    with layer.cpu(0.1) as jobs:
        assert sum(layer.step(jobs, 50, parts=parts)[0] for parts in (2, 4)) > least(device, 3)


@pytest.mark.slow
def test_what_the_pool_declines_crosses_pcie(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(device, 30)
    with layer.cpu(0.1) as jobs:
        monkeypatch.setattr(jobs.cpu, "number_of", lambda bank: 7)
        assert layer.step(jobs)[0] == 0 and jobs.cpu.pool.counts()["refused"] > least(device, 0)
        monkeypatch.undo()
        monkeypatch.setattr(test_cuda_experts, "E", 20)
        assert jobs.cpu.pool.drain(LONG_S)  # and takes no more
        assert layer.step(jobs)[0] == 0 and jobs.cpu.pool.counts()["declined"] > least(device, 0)


def test_threads_that_are_stopped_between_claims(device: Any) -> None:
    """One that has taken a number and not claimed its job: the jobs behind it are the CPU's, this one is taken back."""
    layer = Layer(device, 10)
    with layer.cpu(0.1, bound_s=1e-3) as jobs, jobs.cpu.pool.held("before claim", 1):
        jobs.cpu.pool.wake(LONG_S)
        n_cpus, n_free = layer.step(jobs)
        assert n_cpus == jobs.tally.done and jobs.tally.taken == n_free - n_cpus > 0
        assert device.is_concurrent or n_cpus == n_free - 1


@pytest.mark.slow
@pytest.mark.parametrize("place", ["item", "claimed"])
def test_a_job_that_is_never_answered_ends_the_step(device: Any, place: str) -> None:
    if device.is_concurrent:
        pytest.skip("a GPU brings such small experts sooner than a thread claims one")
    layer = Layer(device, 10)
    with layer.cpu(0.1, patience_s=0.02) as jobs:
        with jobs.cpu.pool.held(place, 2):
            layer.step(jobs, compare=False)
        assert jobs.cpu.failed == jobs.cpu.counts()["failed"] > 0
        assert jobs.tally.layers == 1 and jobs.tally.waited_us >= 2e4


def test_steps_of_one_token_go_on_where_long_ones_ended(device: Any) -> None:
    """Both number the jobs of one ring."""
    layer = Layer(device, 30)
    with layer.cpu(0.1) as jobs:
        layer.step(jobs)
        cpu, n = jobs.cpu, jobs.cpu.counts()["jobs"]
        assert n > 0
        cpu.ring.next = n + 1
        sources = [tuple(row) for row in layer.host.home_ptr[0, -2:].tolist()]
        assert cpu.timed(layer.experts(layer.state), sources, LONG_S) is not None
        assert sum(n for n, _ in cpu.spans()) == 2  # of long ones nothing is told
        device.write(cpu.words[1:2], np.array([n + 3], np.uint64))
        assert layer.step(jobs)[0] > least(device, 0)


def test_where_a_step_has_jobs(device: Any) -> None:
    layer = Layer(device, 30)
    with layer.cpu(0.1) as jobs:
        assert [jobs.takes(T) for T in (1, 32, 33, 128, 129)] == [False, False, True, True, False]
        jobs.is_on = False
        assert not jobs.takes(64)
        h, experts = device.empty((40, D), np.float32), device.empty((40, A), np.int32)
        fetches = Fetches(device.empty((20, 3), np.int32), device.empty(1, np.int32))
        with pytest.raises(ValueError, match=r"Q4_K experts of rows \[128, 256\]"):
            jobs.share(h, experts, layer.experts(layer.state), fetches, layer.staging, 0)
        with pytest.raises(ValueError, match=r"y \(40, 256\) of 40 tokens"):
            jobs.collect(experts, h)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "T", "most"), [((K4, K4, Q8), 40, 256), ((Q8, K4, F16), 120, 120), ((F16, F16, F16), 64, 64)]
)
@pytest.mark.parametrize("is_on", [True, False])
def test_ops_of_a_step_with_short_rows_alone(device: Any, types: Types, T: int, most: int, is_on: bool) -> None:
    """x of whole experts, whoever computed them; results between them may lie in parts."""
    layer = Layer(device, 30, types)
    layer.limits = replace(layer.limits, max_tokens=most)
    ws = ops.workspace(layer.limits, device)
    ws.stream_experts(layer.E * staging_bytes(layer.bank.part_bytes), layer.bank.part_bytes)
    with layer.cpu(0.1) as jobs:
        ws.offer_misses(jobs)
        jobs.is_on = is_on
        for _ in range(2):
            jobs.cpu.pool.wake()
            logits = layer.rng.standard_normal((T, layer.E)).astype(np.float32)
            h, x = normal(T, D, seed=int(layer.rng.integers(1 << 30))), normal(T, D, seed=5)
            made = [np.zeros((T, A), np.int32), np.zeros((T, A), np.float32)]
            rest = (np.ones(T, np.uint8), policy.DEFAULT)
            fetches = Fetches(np.zeros((layer.E, 3), np.int32), np.zeros(1, np.int32))
            args = (logits, Gating(), layer.host, layer.experts(layer.host), *rest, *made, fetches)
            reference.route(None, *args)  # type: ignore[arg-type]
            given, short, on_it = layer.experts(layer.state), ShortRows(T), device.upload(x)
            chosen = (device.empty((T, A), np.int32), device.empty((T, A), np.float32))
            fetched = Fetches(device.empty((layer.E, 3), np.int32), device.empty(1, np.int32))
            ops.fetch_ahead(ws, on_it, layer.state, given, short)
            logits, counted = device.upload(logits), device.upload(rest[0])
            ops.route(ws, logits, Gating(), layer.state, given, counted, policy.DEFAULT, *chosen, fetched, short)
            ops.expert_ffn(ws, device.upload(h), *chosen, given, fetched, on_it, short=short)
            check(device.read(on_it), layer.bank.expected(h, *made, x))
            assert_same_state(device, layer.state, layer.host)
        assert jobs.tally.done > least(device, 0) if is_on else jobs.tally == HandedTally()
