"""A whole model on a device whose missed experts the CPU computes in part: its tokens do not say so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.formats.profile import Profile
from engine.formats.profile import save as save_profile
from engine.ground import cores
from engine.ground.config import EngineConfig
from engine.ground.cores import Cores
from engine.ground.errors import CapacityError, DeviceLostError, UsageError
from engine.ground.protocol import Done, Event, Generate, Tokens
from engine.ground.sampling import Sampling
from engine.ops.cuda.cpu_experts import CpuExperts
from engine.ops.jobs import Jobs
from engine.placing.division import COPY_US, Costs, divide
from engine.placing.misses import FEW_JOBS, RETRY_S, Part, Table, Tally
from engine.running import crowd, misses, several_misses
from engine.running.loaded import load
from engine.running.misses import CpuMisses
from engine.serving.scheduler import Engine
from tests.engine_runs import PROMPT, config, generate
from tests.tiny_models import k_quant_mix, tiny_path, write_tiny
from tests.uncrowded import Unlimited, leave_alone

L, E, A = 2, 11, 3
N_TOKENS = 6
SAMPLED = Sampling(temperature=0.9, top_p=0.9, seed=5)
# So that all that may be the CPU's is handed over, and a claim is waited for as long as an emulated step takes.
COSTS = Costs(1e7, (2e6, 4e6, 6e6), 1e6)
# An expert as quickly on either side, so that one of a layer's misses is divided; of the tiny model's rows.
IN_ROWS = Costs(1e7, (1e7, 2e7, 3e7), 1e6, n_ff=512)
QUICK = Costs(100, (10, 20, 30), 10)  # claims are waited for 20 us, which is no time here
MEASURE = misses.measure
on_the_device = pytest.mark.usefixtures("on_the_device")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", k_quant_mix, n_layer=L, n_expert_used=A)


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads on any core, costs with which the CPU gets something, and no thread that runs on afterwards."""
    leave_alone(monkeypatch)
    monkeypatch.setattr(cores, "find", lambda **_: Cores((-1, -1), "2 cores"))
    monkeypatch.setattr(misses, "measure", lambda *_: COSTS)
    monkeypatch.setattr(misses, "SPIN_US", 3e5)  # emulated steps take long
    # The rests of prompts, of several tokens, hand nothing over: they are test_cuda_several_misses.py.
    monkeypatch.setattr(several_misses, "divided", lambda _: (0,))
    before = n_threads()
    yield
    # A thread that was joined stays a task until the kernel is done with it, which takes a busy machine long.
    until_s = time.monotonic() + 20
    while n_threads() != before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert n_threads() == before


def n_threads() -> int:
    """Tasks of the process that are no threads of Python, nor those that a GPU's driver has from its first use on."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(not name.startswith("cuda") for name in names) - threading.active_count()


def opened(model: Path, cpu: str = "auto", **options: Any) -> Engine:
    more = {"policy": "uniform", "residency_pct": 30, "prefix_gib": 0.0, "draft": "off"} | options
    return Engine(config(model, cpu_experts=cpu, **more))


def misses_of(engine: Engine) -> CpuMisses:
    found = engine.loaded.steps.misses
    assert found is not None
    return found


def pool_of(engine: Engine) -> Jobs:
    return misses_of(engine).cpu.pool


def said_by(engine: Engine, *lengths: int, n_tokens: int = N_TOKENS) -> list[list[int]]:
    """Of prompts of so many tokens."""
    return [
        generate(engine, tuple(PROMPT[:n].tolist()), sampling=SAMPLED, max_tokens=n_tokens)[0] for n in lengths or (9,)
    ]


def in_graphs(engine: Engine) -> set[bool]:
    """Whether captured steps of one token have jobs."""
    graphs = engine.loaded.steps.graphs
    assert graphs is not None
    return {name[-2] for name, _ in graphs._captured if isinstance(name, tuple) and name[0] in ("ahead", 1)}


def fall_asleep(engine: Engine) -> None:
    """Wait until all threads sleep."""
    until_s = time.monotonic() + 20
    while pool_of(engine).counts()["asleep"] < pool_of(engine).n_threads:
        assert time.monotonic() < until_s, "threads are awake though nobody asks for anything"
        time.sleep(0.01)


@on_the_device
@pytest.mark.slow
def test_tokens_do_not_say_who_computed(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of one engine, whose slots are fixed: with the CPU; with nobody who claims, so that it is given up; without."""
    engine = opened(model)
    shared = misses_of(engine)
    ready = engine.ready()
    assert ready["cpu_experts"]["cpus"] == [-1, -1] and ready["cpu_experts"]["division"] == [0, 1, 2, 3]
    assert any("experts on the CPU: 2 cores; an expert takes" in reason for reason in ready["reasons"])
    tokens, first = said_by(engine), engine.stats()["cpu_experts"]
    assert were_planned(engine) and in_graphs(engine) == {True}
    assert first["state"] == "on" and first["computed"] > 5 and first["taken_back"] == 0 <= first["waited_s"]
    fall_asleep(engine)

    shared.gate.costs = QUICK
    shared._tell()
    with pool_of(engine).held("before claim", 2):
        assert said_by(engine) == tokens
        # A GPU runs the last steps when the host has looked for the last time: the next request's first look sees all.
        assert said_by(engine, n_tokens=2) == [tokens[0][:2]]
    second = engine.stats()["cpu_experts"]
    assert second["taken_back"] >= FEW_JOBS and second["computed"] - first["computed"] <= 2
    assert second["state"] == "off" and "were not claimed in time" in second["why"]
    warned = [r for r in caplog.records if getattr(r, "reason", "") == "cpu_experts"]
    assert len(warned) == 1 and "are off" in warned[0].getMessage()
    fall_asleep(engine)
    assert said_by(engine) == tokens and engine.stats()["cpu_experts"] == second  # and nobody was woken
    assert pool_of(engine).counts()["asleep"] == 2
    # What is off is in no step that is captured then; those with jobs are there for when it is tried again.
    assert were_planned(engine) and in_graphs(engine) == {True, False}
    handed_over, n_graphs = shared.cpu.counts()["jobs"], n_captured(engine)
    assert said_by(engine) == tokens and shared.cpu.counts()["jobs"] == handed_over
    shared.gate._retry_s = 0.0
    assert said_by(engine) == tokens and shared.cpu.counts()["jobs"] > handed_over
    assert engine.stats()["cpu_experts"]["state"] == "on" and n_captured(engine) == n_graphs
    engine.close()


def were_planned(engine: Engine) -> bool:
    """Whether all kernels that were launched were planned."""
    decision, device = engine.loaded.shares.decision, engine.loaded.backend.gpu
    launched = {(module, name) for module, name in vars(device)["_kernels"] if name != "poison"}
    return decision is not None and launched <= set(decision.kernels)


def n_captured(engine: Engine) -> int:
    assert engine.loaded.steps.graphs is not None
    return len(engine.loaded.steps.graphs._captured)


PERCENTS = [("uniform", 10.0), ("uniform", 60.0), ("spark", 60.0)]


@on_the_device
@pytest.mark.slow
def test_tokens_do_not_depend_on_residency(model: Path, tmp_path: Path) -> None:
    counts = np.random.default_rng(3).pareto(1.0, (L, E)) * 1000
    save_profile(Profile(counts.astype(np.int64), n_expert_used=A), tmp_path / "p.csv")
    plain = opened(model, "off", residency_pct=30)
    assert plain.ready()["cpu_experts"] is None and plain.stats()["cpu_experts"] == {}
    expected = said_by(plain, 41)  # whose prompt ends in a step of one token
    plain.close()
    for policy, percent in PERCENTS:
        more = {"profile": tmp_path / "p.csv", "cache_slots": 2} if policy == "spark" else {}
        engine = opened(model, residency_pct=percent, policy=policy, **more)
        assert said_by(engine, 41) == expected, (policy, percent)
        assert engine.stats()["cpu_experts"]["computed"] > 3
        engine.close()


@on_the_device
@pytest.mark.slow
def test_tokens_do_not_say_who_computed_which_rows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU; with nobody who claims; without; the gate's costs keep what divides experts."""
    monkeypatch.setattr(misses, "measure", lambda *_: IN_ROWS)
    engine = opened(model, residency_pct=60)
    ready, shared = engine.ready()["cpu_experts"], misses_of(engine)
    assert ready["division"] == [0, 0, 1, 1] and ready["divided_rows"] == [0, 352, 0, 352]
    assert ready["layer_us"] == [0.0, *(round(divide(n, IN_ROWS).us, 2) for n in (1, 2, 3))]
    tokens, first = said_by(engine, 41), engine.stats()["cpu_experts"]
    assert first["divided"] > 3 and first["computed"] > 0 == first["taken_back"]
    assert first["divided_rows"] == ready["divided_rows"]
    counted = shared.cpu.tally
    assert counted.total.rows == 352 * counted.total.divided
    shared.gate._follow(counted, shared.cpu.spans(), 1.0)
    assert shared.gate.costs.n_ff == 512

    shared.cpu.divide(shared.gate.table, 20.0)
    with pool_of(engine).held("before claim", 2):
        assert said_by(engine, 41) == tokens
    assert engine.stats()["cpu_experts"]["taken_back"] > 0
    engine.close()
    plain = opened(model, "off", residency_pct=60)
    assert said_by(plain, 41) == tokens
    plain.close()


@on_the_device
@pytest.mark.slow
def test_requests_that_share_steps_and_ones_alone(model: Path) -> None:
    """With one thread, bound to a core that is there."""
    requests = [Generate(i, tuple(PROMPT[:n].tolist()), N_TOKENS - i, SAMPLED, ()) for i, n in enumerate((9, 20, 15))]
    told = []
    for cpu in ("off", "1"):
        engine = opened(model, cpu)
        for request in requests:
            engine.submit(request)
        events: list[Event] = []
        while engine.busy:
            events += engine.step()
        told.append([[t for e in events if isinstance(e, Tokens) and e.id == i for t in e.tokens] for i in range(3)])
        assert sum(isinstance(event, Done) for event in events) == 3
        if cpu == "1":
            assert len(misses_of(engine).found.cpus) == pool_of(engine).n_threads == 1
            shared = engine.stats()["cpu_experts"]["computed"]
            assert said_by(engine) == told[0][:1]
            assert engine.stats()["cpu_experts"]["computed"] > shared
        engine.close()
    assert told[0] == told[1]


@on_the_device
@pytest.mark.slow
def test_memory_that_goes_back_leaves_the_threads_asleep(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(model, idle_release_s=1e-6)
    tokens = said_by(engine)
    while not engine.loaded.parking.is_parked:
        assert engine.idle_work and engine.step() == []
    fall_asleep(engine)
    before = engine.stats()["cpu_experts"]["computed"]
    assert said_by(engine) == tokens
    assert engine.stats()["cpu_experts"]["computed"] == 2 * before > 0
    engine.close()
    again = opened(model)
    assert said_by(again) == tokens
    again.close()
    again.close()


@on_the_device
@pytest.mark.slow
def test_an_answer_that_never_comes_ends_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of the step that lacks it is told."""
    made = misses.CpuExperts
    monkeypatch.setattr(misses, "CpuExperts", lambda *given: made(*given, patience_s=0.05))
    monkeypatch.setattr(misses, "measure", lambda *_: Costs(1e6, (1e5, 2e5, 3e5), 1e5))  # a claim has 0.2 s
    engine = opened(model)
    expected = said_by(engine)[0]
    engine.submit(Generate(1, tuple(PROMPT[:9].tolist()), N_TOKENS, SAMPLED, ()))
    told: list[int] = []
    with pytest.raises(DeviceLostError, match="did not answer for an expert") as error:
        while engine.busy:
            told += [t for e in engine.step() if isinstance(e, Tokens) for t in e.tokens]
            if told:
                with pool_of(engine).held("item", 2):
                    told += [t for e in engine.step() if isinstance(e, Tokens) for t in e.tokens]
    assert "--cpu-experts off" in error.value.hint and 0 < len(told) < N_TOKENS
    assert told == expected[: len(told)]
    with pytest.raises(DeviceLostError):
        engine.step()
    engine.close()


@on_the_device
@pytest.mark.slow
def test_what_is_measured_as_it_loads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Costs | None] = []
    monkeypatch.setattr(misses, "measure", lambda *given: made.append(MEASURE(*given)) or made[-1])
    engine = opened(model)
    reasons = [reason for reason in engine.ready()["reasons"] if "experts on the CPU" in reason]
    settings = engine.ready()["cpu_experts"]
    assert len(reasons) == 1
    if settings is None:  # as the emulator's PCIe is as fast as it likes
        assert "PCIe alone is as fast" in reasons[0] or "do not answer in time" in reasons[0]
    else:
        assert settings["pcie_us"] > 0 and len(settings["cpu_us"]) == A and settings["split_us"] >= COPY_US
    assert len(said_by(engine)[0]) == N_TOKENS
    costs = made[0]
    if costs is not None:
        sizes = [sum(bank.part_bytes[part] for bank in engine.loaded.residency.banks) for part in range(3)]
        assert costs.n_ff == 512 and costs.first_share == pytest.approx(sum(sizes[:2]) / sum(sizes))
        assert COPY_US <= costs.split_us < 1e6
    engine.close()


class Said:
    """Stands for CpuExperts and its threads: the host's side alone. n_missing: threads that are not there."""

    def __init__(self) -> None:
        self.tally, self.failed, self.told, self.n_woken = Tally(), 0, list[tuple[Table, float]](), 0
        self.n_threads, self.n_missing, self.n_long_missing, self.n_dismissed = 8, 0, 0, 0
        self.pool = self

    def wake(self) -> None:
        self.n_woken += 1

    def dismiss(self) -> None:
        self.n_dismissed += 1

    def missing(self, for_s: float) -> int:
        return self.n_missing if for_s < 2e-3 else self.n_long_missing

    def divide(self, table: Table, bound_us: float) -> None:
        self.told.append((table, bound_us))

    def spans(self) -> list[tuple[float, float]]:
        return [(1, 10.0)]


def whole(*experts: int) -> Table:
    return tuple((n, 0) for n in experts)


def looked(shared: CpuMisses) -> bool:
    """Whether anything is handed over, after a look."""
    shared.look()
    return shared.is_on


def test_threads_that_lose_their_cores_get_nothing(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Where a quarter is missing at two looks a while apart, half for long, or the quota is too small from one on."""
    monkeypatch.setattr(crowd, "MISSING_S", 1e-3)
    now_s = [100.0]
    monkeypatch.setattr("engine.running.misses.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    cpu: Any = Said()
    shared = CpuMisses(cpu, QUICK, Cores((4, 5), "2 cores"), A)
    looks = ((2, 0.0), (3, 0.0), (3, 0.5), (1, 2.0), (3, 0.0), (3, 0.9))  # missing, and ms since the look before
    for n, more_ms in looks:
        cpu.n_missing, now_s[0] = n, now_s[0] + more_ms / 1e3
        assert looked(shared), (n, more_ms)
    now_s[0] += 0.2e-3
    assert not looked(shared) and cpu.n_dismissed == 1 and cpu.told[-1][0] == whole(0, 0, 0, 0)
    assert shared.gate.state == "off" and shared.gate.why.startswith("3 of 8 threads are stopped")
    cpu.n_missing = 0
    now_s[0] += RETRY_S[0]
    assert looked(shared) and cpu.n_dismissed == 1
    cpu.n_missing, cpu.n_long_missing = 5, 4
    assert looked(shared)
    cpu.n_long_missing = 5
    assert not looked(shared) and cpu.n_dismissed == 2
    cpu.n_missing = 0
    now_s[0] += RETRY_S[1]

    monkeypatch.setattr(Unlimited, "n_cpus", 9.0)
    assert looked(shared)
    monkeypatch.setattr(Unlimited, "n_cpus", 8.5)
    assert not looked(shared) and cpu.n_dismissed == 3
    assert "quota of the cgroup is 8.5 CPUs now, for 8 threads" in shared.gate.why
    assert [r.getMessage() for r in caplog.records if getattr(r, "reason", "") == "cpu_experts"][2].endswith(
        shared.gate.why
    )
    now_s[0] += RETRY_S[2]
    for _ in range(2):  # tried, and nothing was handed over; never given up
        assert not looked(shared) and shared.gate.state == "off"
        now_s[0] += RETRY_S[2]
    shared.begin()
    assert cpu.n_woken == 0


def test_long_steps_offer_nothing_to_threads_without_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, told = [100.0], list[bool]()
    monkeypatch.setattr("engine.running.misses.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(crowd, "MISSING_S", 1e-3)
    cpu: Any = Said()
    long: Any = SimpleNamespace(takes=lambda n: n > 32, begin=told.append)
    shared = CpuMisses(cpu, QUICK, Cores((4, 5), "2 cores"), A, long=long)
    shared.begin_long(64)
    cpu.n_missing = cpu.n_long_missing = 8
    assert not looked(shared)
    shared.begin_long(64)
    cpu.n_missing = cpu.n_long_missing = 0
    now_s[0] += RETRY_S[0]
    assert looked(shared) and looked(shared)
    shared.begin_long(64)
    monkeypatch.setattr(Unlimited, "n_cpus", 1.0)
    shared.begin_long(64)
    shared.begin_long(32)
    assert told == [False, True, False, True]


def test_threads_are_awake_while_it_pays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now_s = [100.0]
    monkeypatch.setattr("engine.running.misses.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    cpu: Any = Said()
    shared = CpuMisses(cpu, QUICK, Cores((4, 5), "2 cores"), A)
    assert cpu.told == [(whole(0, 1, 2, 3), 20.0)] and cpu.n_woken == 0
    assert shared.settings()["cpus"] == [4, 5] and shared.settings()["division"] == [0, 1, 2, 3]
    for _ in range(3):
        assert looked(shared)
        shared.begin()
    assert cpu.n_woken == 3 and len(cpu.told) == 1
    with caplog.at_level("INFO"):
        cpu.tally = Tally((Part(), Part(9, 2, taken=FEW_JOBS, waited_us=400.0)))
        assert not looked(shared)
        shared.begin()
        assert cpu.told[-1][0] == whole(0, 0, 0, 0) and cpu.n_woken == 3 and not shared.is_on
        said = shared.stats()
        assert (said["computed"], said["taken_back"], said["waited_s"], said["state"]) == (2, FEW_JOBS, 0.0004, "off")
        assert not looked(shared)
        now_s[0] += RETRY_S[0]
        assert looked(shared)
        shared.begin()
        assert cpu.told[-1][0] == whole(0, 1, 2, 3) and cpu.n_woken == 4 and shared.is_on
    assert [getattr(r, "reason", "") for r in caplog.records] == ["cpu_experts", ""] and len(cpu.told) == 3
    cpu.failed = 7
    with pytest.raises(DeviceLostError, match="job 7"):
        shared.check()


def test_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = EngineConfig(model=tiny_path("qwen3moe"), device="cpu", threads=1, ctx_tokens=64, residency_pct=50)
    with pytest.raises(UsageError, match="beside a GPU, and this is the CPU"):
        load(replace(on_cpu, cpu_experts="2"))
    loaded = load(replace(on_cpu, cpu_experts="auto"))
    assert not any("experts on the CPU" in reason for reason in loaded.reasons)  # as nobody expects any
    loaded.close()


@pytest.mark.parametrize(
    ("options", "cpus", "why"),
    [
        ({}, (), "no core can be spared for them (0 cores"),
        ({"cpu_experts": "3"}, (4, 5), "2 can be spared (2 cores"),
        ({"policy": "lru"}, (4, 5), "all that misses enters a slot (LRU)"),
    ],
)
@on_the_device
@pytest.mark.slow
def test_why_there_are_none(
    model: Path, options: dict[str, Any], cpus: tuple[int, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "find", lambda **_: Cores(cpus, f"{len(cpus)} cores: the quota is 1 CPU"))
    asked = {"cpu_experts": "auto"} | options
    cpu = asked.pop("cpu_experts")
    if cpu == "auto":
        engine = opened(model, cpu, **asked)
        assert any(why in reason for reason in engine.ready()["reasons"]) and engine.ready()["cpu_experts"] is None
        engine.close()
        cpu = "1"
    with pytest.raises(UsageError) as error:
        opened(model, cpu, **asked)
    assert error.value.message.startswith(f"--cpu-experts {cpu}: ") and why in error.value.message


@on_the_device
@pytest.mark.slow
def test_threads_that_cannot_be_had(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[int]()

    class Refused(CpuExperts):
        def start(self, *given: Any) -> None:
            raise CapacityError("no memory for a ring")

        def close(self) -> None:
            closed.append(1)
            super().close()

    monkeypatch.setattr(misses, "CpuExperts", Refused)
    engine = opened(model)
    assert "experts on the CPU: none, no memory for a ring" in engine.ready()["reasons"] and closed == [1]
    engine.close()
    with pytest.raises(CapacityError, match="no memory for a ring"):
        opened(model, "1")
    assert closed == [1, 1]
