"""Experts of one token that the CPU's threads compute beside an emulated GPU: the bits do not say who did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.ops import I32, Experts, Fetches, Gating, reference
from engine.ops.cuda import ops
from engine.ops.cuda.cpu_experts import CpuExperts, bank_of, first_share, overlapping
from engine.placing import policy
from engine.placing.misses import Table
from tests.ops import test_cuda_experts
from tests.ops.test_cuda_experts import A, Bank, Types, shared_expert, uploaded
from tests.ops.test_cuda_products import check, normal
from tests.ops.test_cuda_routing import assert_same_state, on_device

E, D, F = 20, 256, 96
K4, Q8, F16 = QType.Q4_K, QType.Q8_0, QType.F16
LONG_S = 60.0


def whole(*n: int) -> Table:
    """A division without rows."""
    return tuple((experts, 0) for experts in n)


GATING = Gating()
ALL = whole(*range(A + 1))


@pytest.fixture(autouse=True)
def many_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_cuda_experts, "E", E)


class Layer:
    """A layer of a workspace on the device, its twin on the host, and what both did."""

    def __init__(
        self, device: Any, percent: int, types: Types = (K4, K4, Q8), n_places: int = 1, D: int = D, F: int = F,
        **more: Any,
    ) -> None:  # fmt: skip
        n_slots = E * percent // 100
        self.device, self.bank = device, Bank(device, types, D, F, n_slots, **more)
        scale = more.get("gate_scale")
        self.more = more | ({} if scale is None else {"gate_scale": device.upload(scale)})  # of Experts, on the device
        self.ws = ops.workspace(self.bank.limits, device)
        self.ws.routing.pass_through(self.bank.part_bytes, n_places)  # of one: of two, one is read where it lies
        host = policy.SlotState.empty((n_slots,), E)
        for e in range(E):
            host.home_ptr[0, e] = [device.pointer(self.bank.home) + self.bank.offset(e, part) for part in range(3)]
        for slot in range(n_slots):
            host.slot_ptr[slot] = [device.pointer(self.bank.slot(slot, part)) for part in range(3)]
            for part in range(3):
                device.write(self.bank.slot(slot, part), self.bank.parts[slot][part])
        host.expert_ptr[:] = host.home_ptr
        host.expert_ptr[0, :n_slots] = host.slot_ptr
        host.slot_of[0, :n_slots] = host.expert_of[:] = np.arange(n_slots)
        host.heat[0, : n_slots - 1] = 1 << 21  # a use is 1 << 16: what misses enters the last slot, and later others
        self.host, self.state = host, on_device(device, host)
        self.joins: bool | None = None  # the choice is made where the experts are read; None: in every other step
        self.rng, self.jobs, self.divided = np.random.default_rng(percent), 0, 0  # jobs that there have to be, so far
        self.parts = [[0, 0] for _ in range(A + 1)]  # layers that have some, and jobs, by how many are missed

    def experts(self, state: policy.SlotState) -> Experts:
        pointers = (state.expert_ptr[0], state.home_ptr[0], state.slot_ptr)
        more = self.bank.more if state is self.host else self.more
        return Experts(*self.bank.types, self.bank.D, self.bank.F, self.bank.part_bytes, *pointers, layer=0, **more)

    @contextmanager
    def cpu(self, bound_s: float, division: Table = ALL, patience_s: float = LONG_S) -> Iterator[CpuExperts]:
        bank = bank_of(self.experts(self.state))
        made = CpuExperts(self.device, self.bank.limits, [bank], bound_s, patience_s)
        made.start([-1, -1], spin_us=2000)
        made.divide(division)
        self.ws.share_misses(made)
        yield made
        made.close()

    def step(
        self, T: int = 1, division: Table = ALL, shared: Any = None, compare: bool = True, gating: Gating = GATING
    ) -> I32:
        """One, compared with the twin; what it chose."""
        device, rng, D = self.device, self.rng, self.bank.D
        self.ws.routing.joins = not self.ws.routing.joins if self.joins is None else self.joins
        logits = rng.standard_normal((T, E)).astype(np.float32)
        h, x = normal(T, D, seed=int(rng.integers(1 << 30))), normal(T, D, seed=5)
        counted = np.ones(T, np.uint8)
        want, want_weights = np.zeros((T, A), np.int32), np.zeros((T, A), np.float32)
        want_fetches = Fetches(np.zeros((E, 3), np.int32), np.zeros(1, np.int32))
        resident = self.host.slot_of[0] >= 0
        made = (want, want_weights, want_fetches)
        arguments = (logits, gating, self.host, self.experts(self.host), counted, policy.DEFAULT, *made)
        reference.route(None, *arguments)  # type: ignore[arg-type]
        experts, weights = device.empty((T, A), np.int32), device.empty((T, A), np.float32)
        fetches = Fetches(device.empty((E, 3), np.int32), device.empty(1, np.int32))
        arrays = {name: getattr(gating, name) for name in ("bias", "expert_scale")}
        there = replace(gating, **{name: None if a is None else device.upload(a) for name, a in arrays.items()})
        on_it, bank = device.upload(x), self.experts(self.state)
        device.write(self.ws.routing.settled, np.zeros(1, np.uint64))  # as `router`
        ops.route(
            self.ws, device.upload(logits), there, self.state, bank, device.upload(counted), policy.DEFAULT, experts,
            weights, fetches,
        )  # fmt: skip
        beside = None if shared is None else uploaded(device, shared)
        ops.expert_ffn(self.ws, device.upload(h), experts, weights, bank, fetches, on_it, shared=beside)
        assert_same_state(device, self.state, self.host)
        if compare:
            check(device.read(on_it), self.bank.expected(h, want, want_weights, x, shared))
        missing = int((~resident[np.unique(want)]).sum())
        if T == 1:
            (n, rows), free = division[missing], missing - int(want_fetches.count[0])
            is_divided = rows > 0 and free > n
            self.jobs, self.divided = self.jobs + min(n, free) + is_divided, self.divided + is_divided
            self.parts[missing][0] += min(n, free) + is_divided > 0
            self.parts[missing][1] += min(n, free) + is_divided
        return want

    def idle(self, T: int) -> None:
        """A step that nothing is to come of."""
        device, bank = self.device, self.experts(self.state)
        experts, weights = device.empty((T, A), np.int32), device.empty((T, A), np.float32)
        fetches = Fetches(device.empty((E, 3), np.int32), device.empty(1, np.int32))
        ops.route(
            self.ws, device.upload(np.zeros((T, E), np.float32)), Gating(), self.state, bank,
            device.upload(np.ones(T, np.uint8)), policy.DEFAULT, experts, weights, fetches,
        )  # fmt: skip
        h, x = (device.upload(normal(T, self.bank.D, seed=i)) for i in (3, 4))
        ops.expert_ffn(self.ws, h, experts, weights, bank, fetches, x)
        assert_same_state(device, self.state, self.host)


@pytest.mark.parametrize("percent", [10, 30, 60])
@pytest.mark.parametrize("claimed", ["all", "none", "some"])
def test_bits_do_not_say_who_computed(device: Any, percent: int, claimed: str) -> None:
    """No claim where all threads are stopped before it; every claim where none is and the bound is a minute."""
    layer = Layer(device, percent)
    with layer.cpu({"all": LONG_S, "none": 1e-6, "some": 5e-3}[claimed]) as cpu:
        with cpu.pool.held("before claim", 2) if claimed == "none" else nullcontext():
            for i in range(10):
                stopped = int(layer.rng.integers(3)) if claimed == "some" else 0
                cpu.pool.wake()
                with cpu.pool.held("before claim", stopped) if stopped else nullcontext():
                    layer.step(T=4 if i == 5 else 1)
        counts = cpu.counts()
        assert counts["jobs"] == layer.jobs > 3 and not counts["failed"]
        if claimed != "some":
            assert counts["taken_back"] == (0 if claimed == "all" else layer.jobs)
        assert cpu.pool.drain(LONG_S)
        assert cpu.pool.counts()["done"] == layer.jobs - counts["taken_back"]
        tally, n_done = cpu.tally, layer.jobs - counts["taken_back"]
        assert (tally.total.done, tally.total.taken) == (n_done, counts["taken_back"]) and tally.trips <= n_done
        assert [[part.layers, part.jobs] for part in tally.parts] == layer.parts
        assert all((part.waited_us > 0) == (part.jobs > 0) for part in tally.parts)
        assert cpu.failed == 0 and (tally.trips == 0) == (tally.trips_us == 0)
        assert (tally.total.waited_us > 0) == (layer.jobs > 0)
        assert sum(n for n, _ in cpu.spans()) == n_done and all(us > 0 for _, us in cpu.spans())
        if claimed == "none":
            assert tally.total.waited_us >= 1e-3 * layer.jobs


def test_the_division_says_how_many(device: Any) -> None:
    layer = Layer(device, 30)
    with layer.cpu(LONG_S) as cpu:
        for division in (whole(0, 0, 0, 0), whole(0, 0, 1, 1), ALL):
            cpu.divide(division)
            before = layer.jobs
            for _ in range(6):
                cpu.pool.wake()
                layer.step(division=division)
            assert cpu.counts()["jobs"] == layer.jobs and (layer.jobs > before) == (division != whole(0, 0, 0, 0))
        for wrong in (ALL[1:], whole(0, -1, 0, 0), whole(0, 0, 0, 256), (*ALL[1:], (0, F + 1)), (*ALL[1:], (0, -32))):
            with pytest.raises(ValueError, match=f"expected {A + 1} numbers of experts, and of rows up to 3 units"):
                cpu.divide(wrong)


@pytest.mark.parametrize("types", [(F16, F16, F16), (Q8, K4, F16)], ids=["floats", "mixed"])
def test_other_types_and_a_shared_expert(device: Any, types: Types) -> None:
    layer, shared = Layer(device, 30, types, n_places=A), shared_expert(types, D, F, F16)
    passed = layer.ws.routing._bypass_memory
    device.write(passed, np.full(passed.shape, 0xFF, np.uint8))
    with layer.cpu(LONG_S) as cpu:
        for _ in range(4):
            cpu.pool.wake()
            layer.step(shared=shared)
        assert cpu.counts()["jobs"] == layer.jobs > 0 == cpu.counts()["taken_back"]
    assert (device.read(passed) == 0xFF).all()  # nothing of what the CPU computed came over


def test_what_the_pool_declines_is_the_gpus(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(device, 30)
    with layer.cpu(LONG_S) as cpu:
        monkeypatch.setattr(cpu, "number_of", lambda bank: 7)
        for _ in range(3):
            cpu.pool.wake()
            layer.step()
        monkeypatch.undo()
        assert cpu.pool.drain(LONG_S)  # and takes no more
        monkeypatch.setattr(test_cuda_experts, "E", E)
        for _ in range(3):
            cpu.pool.wake()
            layer.step()
        assert cpu.counts()["taken_back"] == layer.jobs == cpu.counts()["jobs"] > 0
        assert cpu.pool.counts()["refused"] > 0 < cpu.pool.counts()["declined"]


@pytest.mark.parametrize(("percent", "one"), [(10, whole(0, 0, 1, 1)), (60, whole(0, 1, 0, 0))], ids=["with", "alone"])
def test_a_job_that_is_never_answered_ends_the_step(device: Any, percent: int, one: Table) -> None:
    layer, is_alone = Layer(device, percent), one[1][0] > 0
    with layer.cpu(LONG_S, one, patience_s=1e-3) as cpu:
        with cpu.pool.held("item", 2):
            while not layer.jobs:
                cpu.pool.wake()
                layer.step(division=one, compare=False)
        assert cpu.counts() == {"jobs": 1, "taken_back": 0, "failed": 1} and cpu.failed == 1
        assert cpu.tally.total.waited_us >= 1e3 and cpu.tally.trips == is_alone  # else it had others to wait for
        assert not is_alone or cpu.tally.trips_us >= cpu.tally.total.waited_us


def test_the_bound_is_changed_between_steps(device: Any) -> None:
    layer = Layer(device, 30)
    with layer.cpu(LONG_S) as cpu, cpu.pool.held("before claim", 2):
        cpu.divide(ALL, bound_us=2.0)
        while layer.jobs < 4:
            cpu.pool.wake()
            layer.step()
        assert cpu.counts()["taken_back"] == layer.jobs


def test_experts_at_once_are_timed(device: Any) -> None:
    layer = Layer(device, 30)
    with layer.cpu(LONG_S) as cpu:
        bank, sources = layer.experts(layer.state), [tuple(row) for row in layer.host.home_ptr[0, :3].tolist()]
        for n in (1, 3):
            took_us = cpu.timed(bank, sources[:n], LONG_S)
            assert took_us is not None and took_us > 0 and sum(k for k, _ in cpu.spans()) >= n
        before = sum(k for k, _ in cpu.spans())
        took_us = cpu.timed(bank, sources[:1], LONG_S, n_rows=64)
        share = first_share(bank_of(bank))
        assert share == sum(layer.bank.part_bytes[:2]) / sum(layer.bank.part_bytes)
        assert took_us and sum(k for k, _ in cpu.spans()) == pytest.approx(before + 64 / F * share)
        with cpu.pool.held("claimed", 2):
            assert cpu.timed(bank, sources[:1], 0.01) is None
        cpu.begin()
        layer.step()
        assert cpu.counts()["jobs"] == layer.jobs


def test_times_that_overlap_are_one() -> None:
    times = np.array([(50_000, 60_000), (0, 9_000), (59_000, 71_000), (9_000, 10_000), (52_000, 53_000)], np.int64)
    assert overlapping(times, np.ones(5)) == [(1, 9.0), (1, 1.0), (3, 21.0)]
    assert overlapping(times, np.array([0.25, 1.0, 1.0, 0.5, 1.0])) == [(1, 9.0), (0.5, 1.0), (2.25, 21.0)]
    assert overlapping(times[:0], np.ones(0)) == []


def test_without_it_nothing_is_the_cpus(device: Any) -> None:
    layer = Layer(device, 30)
    with layer.cpu(LONG_S) as cpu:
        layer.ws.share_misses(None)
        for _ in range(3):
            layer.step()
        assert cpu.counts()["jobs"] == 0 < layer.jobs
