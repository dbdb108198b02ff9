"""A whole model on a device, of whose steps of 2 to 32 tokens the CPU computes a part: its tokens do not say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.ground import cores
from engine.ground.cores import Cores
from engine.ground.errors import DeviceLostError
from engine.ground.protocol import Done, Event, Generate, Tokens
from engine.ops.jobs import MAX_RECORDS
from engine.placing.division import Costs
from engine.placing.handed import HandedTally
from engine.placing.misses import GOOD_WINDOWS, IDLE_STEPS, IDLE_TIMES, RETRY_S
from engine.running import misses, several_misses
from engine.running.several_misses import FOLLOW_STEPS, WINDOW_JOBS, SeveralMisses, divided
from engine.running.stepping import Span
from engine.running.together import Together
from engine.serving.scheduler import Engine
from tests.engine_runs import PROMPT
from tests.running.test_cuda_misses import COSTS, SAMPLED, opened, pool_of, were_planned
from tests.tiny_models import k_quant_mix, write_tiny
from tests.uncrowded import leave_alone

on_the_device = pytest.mark.usefixtures("on_the_device")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", k_quant_mix, n_layer=2, n_expert_used=3)


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    leave_alone(monkeypatch)
    monkeypatch.setattr(cores, "find", lambda **_: Cores((-1, -1), "2 cores"))
    monkeypatch.setattr(misses, "measure", lambda *_: COSTS)
    monkeypatch.setattr(several_misses, "AWAKE_S", 1.0)  # emulated steps take long
    yield


def told_by(engine: Engine, lengths: tuple[int, ...] = (9, 20, 15)) -> list[list[int]]:
    """Of requests that share steps."""
    for i, n in enumerate(lengths):
        engine.submit(Generate(i, tuple(PROMPT[:n].tolist()), 7 - i, SAMPLED, ()))
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    return [[t for e in events if isinstance(e, Tokens) and e.id == i for t in e.tokens] for i in range(len(lengths))]


def several_of(engine: Engine) -> SeveralMisses:
    found = engine.loaded.steps.misses
    assert found is not None and found.several is not None
    return found.several


@on_the_device
@pytest.mark.slow
@pytest.mark.parametrize("percent", [10, 60])
def test_tokens_do_not_say_who_computed(model: Path, percent: int) -> None:
    """Without; with the CPU; with nobody who claims; and again without, when it is idle."""
    plain = opened(model, "off", residency_pct=percent)
    expected = told_by(plain)
    plain.close()
    engine = opened(model, residency_pct=percent)
    assert told_by(engine) == expected
    first = engine.stats()["cpu_experts"]
    assert first["several"]["computed"] > 5 and first["several"]["layers"] > 3 and first["several"]["state"] == "on"
    assert first["computed"] >= first["several"]["computed"] and first["several"]["taken_back"] == 0
    assert were_planned(engine)
    cpu = several_of(engine).jobs.cpu
    cpu.divide(((0, 0),) * 4, bound_us=20.0)
    with pool_of(engine).held("before claim", 2):
        assert told_by(engine) == expected
    second = engine.stats()["cpu_experts"]["several"]
    assert second["taken_back"] > 5 and second["computed"] - first["several"]["computed"] <= 4
    handed_over = cpu.counts()["jobs"]
    several_of(engine).is_on, several_of(engine)._is_idle = False, True
    assert told_by(engine) == expected and cpu.counts()["jobs"] == handed_over
    engine.close()


@on_the_device
@pytest.mark.slow
def test_drafts_and_rests_of_prompts_hand_over_too(model: Path) -> None:
    told = []
    for cpu in ("off", "auto"):
        engine = opened(model, cpu, draft="lookup")
        prompt = tuple(PROMPT[:21].tolist())
        engine.submit(Generate(1, prompt, 12, SAMPLED, (), prediction=prompt * 2))
        events: list[Event] = []
        while engine.busy:
            events += engine.step()
        told.append([t for e in events if isinstance(e, Tokens) for t in e.tokens])
        if cpu == "auto":
            assert engine.stats()["cpu_experts"]["several"]["computed"] > 0
        engine.close()
    assert told[0] == told[1] and len(told[0]) == 12


@on_the_device
@pytest.mark.slow
def test_an_answer_that_never_comes_ends_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of the step that lacks it is told."""
    made = misses.CpuExperts
    monkeypatch.setattr(misses, "CpuExperts", lambda *given: made(*given, patience_s=0.05))
    monkeypatch.setattr(misses, "measure", lambda *_: Costs(1e6, (1e5, 2e5, 3e5), 1e5))  # a claim has 0.2 s
    engine = opened(model)
    for i, n in enumerate((9, 15)):
        engine.submit(Generate(i, tuple(PROMPT[:n].tolist()), 6, SAMPLED, ()))
    told: list[Tokens] = []
    with pytest.raises(DeviceLostError, match="did not answer for an expert"):
        while engine.busy:
            told += [e for e in engine.step() if isinstance(e, Tokens)]
            if {e.id for e in told} == {0, 1}:
                with pool_of(engine).held("item", 2):
                    while engine.busy:
                        told += [e for e in engine.step() if isinstance(e, Tokens)]
    assert told
    engine.close()


@on_the_device
@pytest.mark.slow
def test_the_last_shared_step_is_checked_before_its_tokens_are_told(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no further step is enqueued that would look."""
    engine = opened(model)
    accept = Together._accept

    def fail_late(self: Together) -> bool:
        if all(self._drawn >= row.limit for row in self._rows):
            several_of(engine).jobs.cpu._board[0] = 7
        return accept(self)

    monkeypatch.setattr(Together, "_accept", fail_late)
    for i in range(2):
        engine.submit(Generate(i, tuple(PROMPT[: 9 + i].tolist()), 4, SAMPLED, ()))
    ended: list[Event] = []
    with pytest.raises(DeviceLostError, match="job 7"):
        while engine.busy:
            ended += [e for e in engine.step() if isinstance(e, Done)]
    assert not ended
    engine.close()


@on_the_device
@pytest.mark.slow
def test_what_a_step_computed_is_not_told_where_it_failed(model: Path) -> None:
    engine = opened(model)
    sequence = engine.loaded.kv.sequence()
    span = Span(sequence, PROMPT[:6].astype(np.int32), np.ones(6, np.bool_), (5,))
    result = engine.loaded.steps.run([span])
    several_of(engine).jobs.cpu._board[0] = 3
    for read in ("logits", "residual", "last_residual", "experts", "weights"):
        with pytest.raises(DeviceLostError, match="job 3"):
            getattr(result, read)
    engine.close()


class Said:
    """Stands for SeveralJobs and its threads: the host's side alone."""

    def __init__(self) -> None:
        self.tally, self.woken, self.table = HandedTally(), list[float](), ()
        self.cpu = self.pool = self

    def wake(self, awake_s: float) -> None:
        self.woken.append(awake_s)

    def divide(self, table: Any) -> None:
        self.table = table

    def takes(self, n_tokens: int) -> bool:
        return 1 < n_tokens <= 32

    def went(self, done: int, waited_us: float = 0.0, taken: int = 0) -> None:
        t = self.tally
        self.tally = HandedTally(t.layers + 1, t.done + done, t.taken + taken, t.waited_us + waited_us)


WORTH_IT = Costs(56, (45, 90, 130, 170), 6, busy_us=28)


def test_the_table_ends_both_sides_together() -> None:
    table = divided(WORTH_IT)
    assert len(table) == MAX_RECORDS + 1 and table[0] == 0 and all(n <= m for m, n in enumerate(table))
    assert list(table) == sorted(table) and 0.5 <= table[40] / 40 <= 0.6
    assert not any(divided(Costs(30, (2000, 4000, 6000), 5)))


def test_the_table_follows_what_layers_wait() -> None:
    jobs: Any = Said()
    several = SeveralMisses(jobs, WORTH_IT, n_layers=2)
    shares = []
    for waited_us in (0.0, 0.0, 0.0, 12.0, *[60.0] * 5):  # of a layer with a window of jobs
        jobs.went(WINDOW_JOBS, waited_us)
        for _ in range(FOLLOW_STEPS):
            several.begin()
        assert several.is_on and jobs.table == several.table
        shares.append(jobs.table[40])
    more, as_before, less = shares[:3], shares[3], shares[4:]
    assert divided(WORTH_IT)[40] <= more[0] < more[2] == as_before and more == sorted(more)
    assert less == sorted(less, reverse=True) and less[-1] < divided(WORTH_IT)[40]
    for _ in range(100 * FOLLOW_STEPS):
        jobs.went(WINDOW_JOBS, 0.0)
        several.begin()
    assert several._rate == pytest.approx(1 / 3)


def test_jobs_that_are_taken_back_give_the_cpu_less() -> None:
    jobs: Any = Said()
    several = SeveralMisses(jobs, WORTH_IT, n_layers=2)
    for _ in range(3):
        jobs.went(WINDOW_JOBS, taken=WINDOW_JOBS // 10)
        for _ in range(FOLLOW_STEPS):
            several.begin()
    assert several.is_on and jobs.table[40] < divided(WORTH_IT)[40]


def test_it_is_idle_where_hardly_anything_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: Any = Said()
    several = SeveralMisses(jobs, WORTH_IT, n_layers=48)
    assert jobs.table == divided(WORTH_IT) and several.takes(2) and not several.takes(1) and not several.takes(33)
    for _ in range(3 * IDLE_STEPS):
        several.begin()
        jobs.went(30)
    assert several.takes(32) and len(jobs.woken) == 3 * IDLE_STEPS and set(jobs.woken) == {1.0}
    for _ in range(2 * IDLE_STEPS):
        several.begin()
    assert not several.takes(2) and several.stats()["state"] == "idle"
    n_woken = len(jobs.woken)
    for _ in range(IDLE_TIMES * IDLE_STEPS - IDLE_STEPS - 1):
        several.begin()
    assert len(jobs.woken) == n_woken
    for _ in range(2 * IDLE_STEPS):
        several.begin()
    assert len(jobs.woken) > n_woken


def test_what_loses_or_is_crowded_is_off_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(several_misses, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    jobs: Any = Said()
    several = SeveralMisses(jobs, WORTH_IT, n_layers=2)
    jobs.went(WINDOW_JOBS, waited_us=57.0 * WINDOW_JOBS)
    several.begin()
    assert not several.is_on and several.stats()["state"] == "off"
    now_s[0] += RETRY_S[0]
    several.begin()
    assert several.is_on
    for retry_s in (RETRY_S[1], RETRY_S[2], RETRY_S[2]):  # longer and longer; but others may leave, so never for good
        several.begin("others have their cores")
        now_s[0] += retry_s - 1
        several.begin()
        assert not several.is_on and several.stats()["why"] == "others have their cores"
        now_s[0] += 1
        several.begin()
        assert several.is_on
    assert [getattr(r, "reason", "") for r in caplog.records if r.levelname == "WARNING"] == ["cpu_experts"] * 4
    for _ in range(GOOD_WINDOWS):
        jobs.went(WINDOW_JOBS)
        several.begin()
    several.begin("others have their cores")  # what was long ago is forgotten
    now_s[0] += RETRY_S[0]
    several.begin()
    assert several.is_on
    jobs.went(2 * WINDOW_JOBS // 3, taken=WINDOW_JOBS // 3 + 1)
    several.begin()
    assert not several.is_on and "were not claimed in time" in several.stats()["why"]
