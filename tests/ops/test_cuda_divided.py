"""Experts divided by rows between an emulated GPU and the CPU's threads: the bits do not say how."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.ops.cuda.cpu_experts import CpuExperts, bank_of, first_share
from engine.ops.cuda.products import Quantized
from engine.placing.misses import Table
from tests.ops import test_cuda_experts, test_cuda_landing
from tests.ops.test_cuda_cpu_experts import ALL, LONG_S, Layer, whole
from tests.ops.test_cuda_experts import A, Types, shared_expert

E = 20
K4, Q8, F16, F32 = QType.Q4_K, QType.Q8_0, QType.F16, QType.F32
NEVER_S = 1e-6  # that a claim is waited for
OWN_NS = 15  # JOBS_OWN_NS of jobs.cuh


@pytest.fixture(autouse=True)
def many_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_cuda_experts, "E", E)


def divided(rows: int, *experts: int) -> Table:
    """Last rows of one expert beside so many whole ones, where a layer misses more than these."""
    return tuple((n, rows if misses > n else 0) for misses, n in enumerate(experts))


def first_row(F: int, rows: int) -> int:
    """Of the CPU's units of so many last rows."""
    return (-(-F // 32) - -(-rows // 32)) * 32


def jobs_of(layer: Layer) -> list[tuple[int, int, bool]]:
    """Of the last step, by rank: an expert's job, its units, and whether it is free: it misses and enters no slot."""
    device, routing = layer.device, layer.ws.routing
    active = device.read(routing.active)[: int(device.read(routing.n_active)[0])]
    memory = range(device.pointer(layer.bank.slots), device.pointer(layer.bank.slots) + layer.bank.slots.nbytes)
    jobs = active[:, 6:].copy().view(np.int32)[:, 3].tolist()
    free = [int(source) not in memory and int(to) not in memory for source, to in active[:, [0, 3]].tolist()]
    return [(job & 255, job >> 8 & 0xFFFF, is_free) for job, is_free in zip(jobs, free, strict=True)]


# Types, D, F, rows of the CPU: the last unit, units from the middle on, all; of floats a unit of half as many rows.
CASES: list[tuple[Types, int, int, tuple[int, ...]]] = [
    ((Q8, Q8, K4), 96, 512, (32, 288, 512)),
    ((F16, F16, F16), 42, 80, (32, 64, 80)),
    ((Q8, K4, F32), 256, 80, (64,)),
    ((Q8, Q8, Q8), 64, 1120, (1120,)),  # more than a block's threads fetch at once
]


@pytest.mark.parametrize("claimed", ["all", "none", "some"])
@pytest.mark.parametrize(
    ("types", "D", "F", "rows"), [(t, D, F, r) for t, D, F, rows in CASES for r in rows],
    ids=lambda p: "-".join(t.name for t in p) if isinstance(p, tuple) else str(p),
)  # fmt: skip
def test_bits_do_not_say_who_computed_rows(device: Any, types: Types, D: int, F: int, rows: int, claimed: str) -> None:
    layer = Layer(device, 30, types, n_places=2, D=D, F=F)
    table = divided(rows, 0, 0, 0, 1)
    with layer.cpu({"all": LONG_S, "none": NEVER_S, "some": 5e-3}[claimed], table) as cpu:
        with cpu.pool.held("before claim", 2) if claimed == "none" else nullcontext():
            for i in range(7):
                stopped = int(layer.rng.integers(3)) if claimed == "some" else 0
                cpu.pool.wake()
                with cpu.pool.held("before claim", stopped) if stopped else nullcontext():
                    layer.step(T=3 if i == 4 else 1, division=table)
        assert cpu.pool.drain(LONG_S)
        counts, tally = cpu.counts(), cpu.tally
        assert counts["jobs"] == layer.jobs >= layer.divided > 2 and not counts["failed"]
        assert [[part.layers, part.jobs] for part in tally.parts] == layer.parts
        assert tally.total.jobs == layer.jobs and tally.total.taken == counts["taken_back"]
        assert cpu.pool.counts()["done"] == layer.jobs - tally.total.taken and not cpu.pool.counts()["refused"]
        assert tally.total.rows == tally.total.divided * -(-rows // 32) * 32
        if claimed == "all":
            assert tally.total.taken == 0 and tally.total.divided == layer.divided
            share = (F - first_row(F, rows)) / F * first_share(bank_of(layer.experts(layer.state)))
            assert sum(n for n, _ in cpu.spans()) == pytest.approx(tally.total.done + tally.total.divided * share)
        elif claimed == "none":
            assert tally.total.taken == layer.jobs and tally.total.divided == tally.total.rows == 0
            assert tally.total.waited_us >= NEVER_S * 1e6 * layer.jobs


@pytest.mark.slow
def test_which_expert_is_divided(device: Any) -> None:
    """By rank: the one before the whole ones, of those that enter no slot."""
    layer, seen = Layer(device, 30, n_places=A), set()
    for table in (divided(32, 0, 0, 0, 0), divided(96, 0, 0, 1, 1), divided(64, 0, 1, 1, 2), ALL, whole(0, 0, 0, 0)):
        with layer.cpu(LONG_S, table) as cpu:
            layer.jobs = layer.divided = 0
            for _ in range(9):
                cpu.pool.wake()
                layer.step(division=table)
                made = jobs_of(layer)
                free = [rank for rank, (*_, is_free) in enumerate(made) if is_free]
                n, rows = table[len(free) + entered(layer)]
                n = min(n, len(free))
                is_divided = rows > 0 and len(free) > n
                expected = {rank: (is_divided + i + 1, 0) for i, rank in enumerate(free[len(free) - n :])}
                if is_divided:
                    expected[free[-n - 1]] = (1, rows // 32)
                assert [job[:2] for job in made] == [expected.get(rank, (0, 0)) for rank in range(len(made))]
                seen.add((n, is_divided))
            assert cpu.counts()["jobs"] == layer.jobs and cpu.tally.total.divided == layer.divided
    assert {(0, True), (1, True), (2, True), (1, False), (3, False), (0, False)} <= seen


def entered(layer: Layer) -> int:
    """Experts that entered a slot in the last step."""
    device, routing = layer.device, layer.ws.routing
    active = device.read(routing.active)[: int(device.read(routing.n_active)[0])]
    begin = device.pointer(layer.bank.slots)
    return sum(begin <= int(to) < begin + layer.bank.slots.nbytes for to in active[:, 3].tolist())


def test_rows_of_the_cpu_do_not_come_over(device: Any) -> None:
    D, F, rows = 96, 512, 320
    layer = Layer(device, 10, (Q8, Q8, K4), n_places=A, D=D, F=F)
    passed, table = layer.ws.routing._bypass_memory, divided(rows, 0, 0, 0, 0)
    with layer.cpu(LONG_S, table) as cpu:
        while not layer.divided:
            device.write(passed, np.full(passed.shape, 0xFF, np.uint8))
            cpu.pool.wake()
            layer.step(division=table)
    (rank,) = [rank for rank, (_, units, _) in enumerate(jobs_of(layer)) if units]
    record = device.read(layer.ws.routing.active)[rank]
    places, base = device.read(passed), device.pointer(passed)
    for part, size in enumerate(layer.bank.part_bytes):
        at, home = int(record[3 + part]) - base, int(record[part]) - device.pointer(layer.bank.home)
        row_bytes = size // F
        came = size if part == 2 else (F - rows) * row_bytes
        assert (places[at : at + came] == layer.bank.home[home : home + came]).all()
        assert (places[at + came + 16 : at + size] == 0xFF).all()  # the last piece is of 16 bytes


@pytest.mark.parametrize("claimed", [True, False])
@pytest.mark.parametrize(
    ("types", "D", "F"), [((Q8, Q8, K4), 96, 512), ((F16, F16, F32), 42, 80)], ids=["blocks", "floats"]
)
def test_factors_gelu_and_a_shared_expert(device: Any, types: Types, D: int, F: int, claimed: bool) -> None:
    scale = np.random.default_rng(3).uniform(0.3, 3.0, E).astype(np.float32)
    layer = Layer(device, 30, types, n_places=A, D=D, F=F, activation="gelu", gate_scale=scale)
    shared, table = shared_expert(types, D, F, F16), divided(64, 0, 0, 1, 1)
    with layer.cpu(LONG_S if claimed else NEVER_S, table) as cpu:
        with nullcontext() if claimed else cpu.pool.held("before claim", 2):
            for _ in range(5):
                cpu.pool.wake()
                layer.step(division=table, shared=shared)
        assert cpu.counts()["jobs"] == layer.jobs and layer.divided > 1
        assert cpu.tally.total.divided == (layer.divided if claimed else 0)


def test_what_the_pool_declines_is_the_gpus(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, table = Layer(device, 30), divided(64, 0, 0, 0, 1)
    with layer.cpu(LONG_S, table) as cpu:
        with monkeypatch.context() as patched:
            patched.setattr(cpu, "number_of", lambda bank: 7)
            for _ in range(3):
                cpu.pool.wake()
                layer.step(division=table)
        assert cpu.pool.drain(LONG_S)  # and takes no more
        for _ in range(3):
            cpu.pool.wake()
            layer.step(division=table)
        assert cpu.counts()["taken_back"] == layer.jobs == cpu.counts()["jobs"] and layer.divided > 1
        assert cpu.tally.total.divided == 0 and cpu.pool.counts()["refused"] > 0 < cpu.pool.counts()["declined"]


@pytest.mark.parametrize(("types", "F"), [((K4, K4, Q8), 96), ((K4, K4, F16), 80)], ids=["blocks", "floats"])
def test_rows_that_never_come_end_the_step(device: Any, types: Types, F: int) -> None:
    """Their z are zeros."""
    layer, table = Layer(device, 10, types, F=F), divided(64, 0, 0, 0, 0)
    with layer.cpu(LONG_S, table, patience_s=1e-3) as cpu:
        with cpu.pool.held("item", 2):
            while not layer.jobs:
                cpu.pool.wake()
                layer.step(division=table, compare=False)
            (rank,) = [rank for rank, (_, units, _) in enumerate(jobs_of(layer)) if units]
            z = layer.ws.small_experts.z_of(layer.experts(layer.state), A)
            made = [z.q, z.d, z.sums] if isinstance(z, Quantized) else [z]
            for array in made:
                values = device.read(array).reshape(A, -1)[rank]
                first = first_row(F, 64) * len(values) // F
                assert (values[first:] == 0).all() and values[:first].any() and 0 < first < len(values)
        assert cpu.counts() == {"jobs": 1, "taken_back": 0, "failed": 1} and cpu.failed == 1
        assert cpu.tally.total.divided == 1


@contextmanager
def late_by(cpu: CpuExperts, seconds: float) -> Iterator[None]:
    """What the CPU is handed meanwhile is answered so much later than it is claimed."""
    over = threading.Event()

    def release(held: ExitStack) -> None:
        while not cpu.pool.counts()["held"] and not over.is_set():
            time.sleep(1e-3)
        time.sleep(seconds)
        held.close()

    with ExitStack() as held:
        held.enter_context(cpu.pool.held("item", 2))
        releasing = threading.Thread(target=release, args=(held,))
        releasing.start()
        try:
            yield
        finally:
            over.set()
            releasing.join()


@pytest.mark.slow
def test_a_layer_waits_no_longer_than_behind_its_own_copies(device: Any) -> None:
    """Nobody waits for rows that are there before what the GPU copies itself; all that is later counts."""
    layer, table = Layer(device, 60, n_places=A), ((0, 0), (0, 32), (0, 0), (0, 0))
    with layer.cpu(LONG_S, nothing := whole(0, 0, 0, 0)) as cpu:
        layer.step(division=nothing)  # kernels are compiled
        cpu.divide(table)
        while layer.divided < 2:  # a layer's last copies are those before the units of the CPU
            with late_by(cpu, 0.25):
                cpu.pool.wake()
                layer.step(division=table)
        tally = cpu.tally
        assert tally.total.divided == 2 and tally.total.done == tally.trips == 0
        assert tally.total.waited_us > 0.45e6
        device.write(cpu.words[OWN_NS : OWN_NS + 1], np.array([(1 << 63) - 1], np.uint64))
        while layer.divided < 4:
            cpu.pool.wake()
            layer.step(division=table)
        assert cpu.tally.total.divided == 4 and cpu.tally.total.waited_us == tally.total.waited_us


@pytest.mark.slow
@pytest.mark.parametrize("table", [((0, 0), (0, 32), (0, 0), (0, 0)), whole(0, 1, 0, 0)], ids=["rows", "whole"])
def test_what_is_late_beyond_some_bounds_is_a_stall(device: Any, table: Table) -> None:
    layer, bound_s, n_done = Layer(device, 60, n_places=A), 0.02, 0
    with layer.cpu(LONG_S, nothing := whole(0, 0, 0, 0)) as cpu:
        layer.step(division=nothing)  # kernels are compiled
    with layer.cpu(bound_s, table) as cpu:
        while n_done < 2:  # on a busy machine some are not claimed within the bound
            with late_by(cpu, 0.25):
                cpu.pool.wake()
                layer.step(division=table)
            n_done = cpu.tally.total.done + cpu.tally.total.divided
        seen = cpu.tally.total
        assert seen.stalled_us > 2 * (0.2 - 4 * bound_s) * 1e6
        assert 2 * 4 * bound_s * 0.9e6 < seen.waited_us < seen.layers * 5 * bound_s * 1e6


@pytest.mark.slow
@pytest.mark.parametrize("percent", [10, 40])
def test_guesses_and_divided_experts_at_once(device: Any, percent: int) -> None:
    if device.name != "emulated":
        pytest.skip("these experts lie where no CPU can read them")
    model = test_cuda_landing.Model(device, percent)
    cpu = CpuExperts(device, model.bank.limits, [bank_of(model.experts(model.state, 0))], LONG_S, LONG_S)
    cpu.start([-1, -1], spin_us=2000)
    cpu.divide(divided(64, 0, 0, 0, 1))
    model.ws.share_misses(cpu)
    try:
        while cpu.tally.total.divided < 4 or not model.landing.counts().useful:
            cpu.pool.wake()
            model.step()
        tally, counts = cpu.tally, model.landing.counts()
        assert tally.total.taken == 0 and cpu.failed == 0
        assert counts.taken_bytes == counts.useful * sum(model.bank.part_bytes)
    finally:
        cpu.close()
