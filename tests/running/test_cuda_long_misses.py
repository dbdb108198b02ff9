"""A whole model on a device, of whose steps of 33 to 128 tokens the CPU computes a part: its tokens do not say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.ground import cores
from engine.ground.cores import Cores
from engine.ground.errors import DeviceLostError
from engine.ground.protocol import Generate
from engine.ops.cuda import long_jobs
from engine.placing.division import Costs
from engine.placing.handed import WINDOW_JOBS, HandedTally
from engine.placing.misses import RETRY_S
from engine.running import long_misses, misses
from engine.running.long_misses import AWAKE_S, LOOK_STEPS, QUIET_STEPS, LongMisses
from engine.serving.scheduler import Engine
from tests.engine_runs import PROMPT, config, generate
from tests.running.test_cuda_misses import SAMPLED, fall_asleep, pool_of
from tests.tiny_models import k_quant_mix, write_tiny
from tests.uncrowded import leave_alone

LENGTHS = (33, 64, 97)
# One token's gate finds nothing to gain, so that only long steps hand over.
COSTS = Costs(30, (200, 400, 600), 5)
pytestmark = [pytest.mark.usefixtures("on_the_device"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", k_quant_mix, n_layer=2, n_expert_used=3)


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    leave_alone(monkeypatch)
    monkeypatch.setattr(cores, "find", lambda **_: Cores((-1, -1), "2 cores"))
    monkeypatch.setattr(misses, "measure", lambda *_: COSTS)
    monkeypatch.setattr(long_jobs, "PACE_S", 0.1)  # emulated copies take long, and threads may get no processor
    yield


def opened(model: Path, cpu: str = "auto", **options: Any) -> Engine:
    more = {"policy": "uniform", "residency_pct": 30, "prefix_gib": 0.0, "draft": "off", "chunk_tokens": 128}
    return Engine(config(model, cpu_experts=cpu, ctx_tokens=160, **more | options))


def said_by(engine: Engine, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [generate(engine, tuple(PROMPT[:n].tolist()), sampling=SAMPLED, max_tokens=3)[0] for n in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("percent", [10, 60])
def test_tokens_do_not_say_who_computed(model: Path, percent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cores for it; with the CPU; with nobody who claims; with who was asleep."""
    with monkeypatch.context() as without:
        without.setattr(cores, "find", lambda **_: Cores((), "no cores"))
        plain = opened(model, residency_pct=percent)
    assert "experts on the CPU: none" in "; ".join(plain.ready()["reasons"])
    expected = said_by(plain)
    plain.close()
    engine = opened(model, residency_pct=percent)
    reasons = [reason for reason in engine.ready()["reasons"] if "experts on the CPU" in reason]
    assert len(reasons) == 1 and "of steps of one token none" in reasons[0]
    assert said_by(engine) == expected
    first = engine.stats()["cpu_experts"]
    decision, device = engine.loaded.shares.decision, engine.loaded.backend.gpu
    assert device is not None
    least = -1 if device.is_concurrent else 2  # a GPU brings such small experts sooner than a thread claims one
    assert first["long"]["computed"] == first["computed"] > least and first["long"]["layers"] > 3
    assert first["taken_back"] == 0
    launched = {(module, name) for module, name in vars(device)["_kernels"] if name != "poison"}
    assert decision is not None and launched <= set(decision.kernels)  # all of them were planned
    with pool_of(engine).held("before claim", 2):
        assert said_by(engine) == expected
    second = engine.stats()["cpu_experts"]["long"]
    assert second["taken_back"] > first["long"]["taken_back"] and second["state"] == "on"
    assert second["computed"] - first["long"]["computed"] <= 2
    fall_asleep(engine)
    assert said_by(engine) == expected
    engine.close()


@pytest.mark.slow
def test_an_answer_that_never_comes_ends_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = misses.CpuExperts
    monkeypatch.setattr(misses, "CpuExperts", lambda *given: made(*given, patience_s=0.05))
    engine = opened(model)
    device = engine.loaded.backend.gpu
    if device is not None and device.is_concurrent:
        engine.close()
        pytest.skip("a GPU brings such small experts sooner than a thread claims one")
    engine.submit(Generate(1, tuple(PROMPT[:40].tolist()), 2, SAMPLED, ()))
    with pytest.raises(DeviceLostError, match="did not answer for an expert"), pool_of(engine).held("item", 2):
        while engine.busy:
            assert not engine.step()
    engine.close()


class Said:
    """Stands for LongJobs and its threads: the host's side alone."""

    def __init__(self) -> None:
        self.tally, self.woken, self.is_on, self.n_rows = HandedTally(), list[float](), False, 128
        self.cpu = self.pool = self

    def wake(self, awake_s: float) -> None:
        self.woken.append(awake_s)


def test_threads_are_awake_while_it_pays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now_s = [100.0]
    monkeypatch.setattr(long_misses, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    jobs: Any = Said()
    long = LongMisses(jobs, 50.0)
    assert [long.takes(T) for T in (32, 33, 128, 129)] == [False, True, True, False]
    long.begin()
    assert jobs.is_on and jobs.woken == [AWAKE_S]
    with caplog.at_level("INFO"):
        jobs.tally = HandedTally(20, 0, WINDOW_JOBS, 0.0)
        long.begin()
        assert not jobs.is_on and jobs.woken == [AWAKE_S] and long.stats()["state"] == "off"
        now_s[0] += RETRY_S[0]
        long.begin()
        assert jobs.is_on and len(jobs.woken) == 2
    assert [getattr(r, "reason", "") for r in caplog.records] == ["cpu_experts", ""]
    assert long.stats()["taken_back"] == WINDOW_JOBS and long.stats()["layers"] == 20


def test_threads_sleep_where_nothing_misses_and_wake_with_the_next_step() -> None:
    jobs: Any = Said()
    long = LongMisses(jobs, 50.0)
    for _ in range(QUIET_STEPS + 4 * LOOK_STEPS):
        long.begin()
    assert QUIET_STEPS < len(jobs.woken) <= QUIET_STEPS + 5 and jobs.is_on
    before = len(jobs.woken)
    jobs.tally = HandedTally(3, 0, 3, 0.0)  # taken back, as nobody was awake
    long.begin()
    assert len(jobs.woken) == before + 1
