"""Experts of steps of several tokens that the CPU's threads compute beside a GPU: the bits do not say who did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from engine.ops.cuda.cpu_experts import CpuExperts, bank_of
from engine.ops.cuda.several_jobs import MOST_HANDED, SeveralJobs
from engine.ops.jobs import MAX_RECORDS, MAX_TOKENS
from tests.ops import test_cuda_experts
from tests.ops.test_cuda_cpu_experts import F16, K4, LONG_S, Q8, E, Layer
from tests.ops.test_cuda_experts import Types, shared_expert

D, F = 256, 96
ALL = tuple(range(E + 1))


@pytest.fixture(autouse=True)
def many_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_cuda_experts, "E", E)


@contextmanager
def handing(
    layer: Layer, bound_s: float, table: tuple[int, ...] = ALL, patience_s: float = LONG_S
) -> Iterator[SeveralJobs]:
    bank = bank_of(layer.experts(layer.state))
    cpu = CpuExperts(layer.device, layer.bank.limits, [bank], bound_s, patience_s)
    cpu.start([-1, -1], spin_us=2000, max_tokens=MAX_TOKENS)
    jobs = SeveralJobs(layer.device, layer.bank.limits, cpu)
    jobs.divide(table)
    layer.ws.hand_misses(jobs)
    yield jobs
    cpu.close()


def jobs_of(layer: Layer, T: int, table: tuple[int, ...] = ALL) -> Any:
    """Jobs that a step is to have, by what the layer is before it and did: called with what `step` chose."""
    resident = layer.host.slot_of[0] >= 0

    def found(chosen: np.ndarray[Any, Any]) -> int:
        used, counts = np.unique(chosen, return_counts=True)
        missed = used[~resident[used]]
        entered = set(np.flatnonzero((layer.host.slot_of[0] >= 0) & ~resident))
        free = [e for e in missed if e not in entered and counts[used == e][0] <= MOST_HANDED]
        return min(table[len(missed)], len(free))

    return found


def run(layer: Layer, jobs: SeveralJobs, T: int, table: tuple[int, ...] = ALL, **more: Any) -> int:
    """A step, compared with the twin; the jobs that it has to have."""
    found = jobs_of(layer, T, table)
    jobs.cpu.pool.wake()
    return int(found(layer.step(T=T, **more)))


@pytest.mark.slow
@pytest.mark.parametrize("percent", [10, 30, 60])
@pytest.mark.parametrize("claimed", ["all", "none", "some"])
def test_bits_do_not_say_who_computed(device: Any, percent: int, claimed: str) -> None:
    layer, n_jobs = Layer(device, percent, n_places=2), 0
    with handing(layer, {"all": LONG_S, "none": 1e-6, "some": 5e-3}[claimed]) as jobs:
        pool = jobs.cpu.pool
        with pool.held("before claim", 2) if claimed == "none" else nullcontext():
            for T in (2, 3, 5, 8, 17, 32, 2):
                stopped = int(layer.rng.integers(3)) if claimed == "some" else 0
                with pool.held("before claim", stopped) if stopped else nullcontext():
                    n_jobs += run(layer, jobs, T)
        counts = jobs.cpu.counts()
        assert counts["jobs"] == n_jobs > 8 and not counts["failed"]
        run(layer, jobs, 2)  # the host hears of a layer when the next one runs
        tally = jobs.tally
        assert tally.taken >= {"all": 0, "none": n_jobs, "some": 0}[claimed] and tally.layers >= 6
        if claimed == "all":
            assert tally.taken == 0 and tally.done >= n_jobs
        elif claimed == "none":
            assert tally.done <= jobs.cpu.counts()["jobs"] - n_jobs
        assert jobs.cpu.failed == 0


def test_the_table_says_how_many(device: Any) -> None:
    layer = Layer(device, 30)
    with handing(layer, LONG_S) as jobs:
        before = 0
        for table in ((0,), (0, 0, 1, 2), ALL):
            jobs.divide(table)
            full = (*table, *table[-1:] * (E + 1 - len(table)))
            for T in (2, 4, 9):
                before += run(layer, jobs, T, full)
                assert jobs.cpu.counts()["jobs"] == before
            assert (before > 0) == (table != (0,))
        for wrong in ((), (0, 2), (-1,), (*ALL, E + 2)):
            with pytest.raises(ValueError, match=f"up to {MAX_RECORDS} experts of 0, 1, ... misses"):
                jobs.divide(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("types", [(F16, F16, F16), (Q8, K4, F16)], ids=["floats", "mixed"])
def test_other_types_and_a_shared_expert(device: Any, types: Types) -> None:
    layer, shared = Layer(device, 30, types, n_places=3), shared_expert(types, D, F, F16)
    with handing(layer, LONG_S) as jobs:
        assert sum(run(layer, jobs, T, shared=shared) for T in (2, 3, 12)) == jobs.cpu.counts()["jobs"] > 0
        run(layer, jobs, 2)
        assert jobs.tally.taken == 0 < jobs.tally.done


def test_gates_have_scales(device: Any) -> None:
    scales = np.linspace(0.5, 1.5, E, dtype=np.float32)
    layer = Layer(device, 30, gate_scale=scales)
    with handing(layer, LONG_S) as jobs:
        assert sum(run(layer, jobs, T) for T in (2, 7)) > 0


def test_what_the_pool_declines_is_the_gpus(device: Any) -> None:
    layer = Layer(device, 30)
    with handing(layer, LONG_S) as jobs:
        assert jobs.cpu.pool.drain(LONG_S)  # and takes no more
        n_jobs = sum(run(layer, jobs, T) for T in (2, 4, 8))
        run(layer, jobs, 2)
        assert jobs.tally.taken >= n_jobs > 0 == jobs.tally.done


def test_a_job_that_is_never_answered_ends_the_step(device: Any) -> None:
    layer = Layer(device, 10)
    one = tuple(min(n, 1) for n in ALL)
    with handing(layer, LONG_S, one, patience_s=1e-3) as jobs:
        with jobs.cpu.pool.held("item", 2):
            assert run(layer, jobs, 2, one, compare=False) == 1
        assert jobs.cpu.failed > 0


def test_an_inactive_step_hands_nothing_over(device: Any) -> None:
    layer = Layer(device, 10)
    with handing(layer, LONG_S) as jobs:
        run(layer, jobs, 3)
        before = jobs.cpu.counts()["jobs"]
        layer.ws.active_step = device.upload(np.zeros(1, np.int32))
        posted = jobs.cpu._records.view(np.uint64).reshape(MAX_RECORDS, -1)[:, :24].copy()  # all but the CPU's line
        jobs.cpu.pool.wake()
        layer.idle(3)
        assert jobs.cpu.counts()["jobs"] == before and device.read(jobs.words)[5] == 0
        assert (jobs.cpu._records.view(np.uint64).reshape(MAX_RECORDS, -1)[:, :24] == posted).all()
