"""A warm start leaves nothing behind: tokens and counters after it are those of a cold one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.ground.errors import NumericalError
from engine.ground.protocol import Generate
from engine.ground.sampling import Sampling
from engine.running import warm
from engine.serving import schedule, scheduler
from engine.serving.scheduler import Engine
from tests.engine_runs import PROMPT, config
from tests.tiny_models import k_quant_mix, write_tiny

pytestmark = pytest.mark.usefixtures("on_the_device")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", k_quant_mix, n_layer=2, n_expert_used=3)


@pytest.fixture(autouse=True)
def whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which request goes on is decided by what work took: here all of it takes as long, on a busy machine, too."""
    monkeypatch.setattr(scheduler, "SLICE_S", 1e6)
    monkeypatch.setattr(scheduler, "owed", lambda work, owed_s, took_s: schedule.owed(work, owed_s, 1e-3))


def opened(model: Path, device: str) -> Engine:
    return Engine(config(model, device=device, policy="lru", residency_pct=50, ctx_tokens=200, draft="off"))


def trace(engine: Engine) -> list[Any]:
    """What a start could have left."""
    state, kv = engine.loaded.residency.pull(), engine.loaded.kv
    slots = [np.asarray(getattr(state, name)).tolist() for name in ("slot_of", "expert_of", "heat", "clock", "pinned")]
    counters = [np.asarray(getattr(state, name)).tolist() for name in ("counts", "hits", "misses")]
    stats = engine.stats()
    del stats["plan"]  # made before, of what a GPU has free
    return [*slots, *counters, stats, kv.free_blocks, None if kv.states is None else kv.states.free_blocks]


def said(engine: Engine) -> list[Any]:
    """The events of two requests, their times apart."""
    for i, sampling in enumerate((Sampling(), Sampling(0.9, seed=3))):
        engine.submit(Generate(i, tuple(PROMPT[: 9 + i].tolist()), 4, sampling, stop_tokens=()))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    while engine.busy:
        for event in engine.step():
            tokens[event.id] += getattr(event, "tokens", ())  # type: ignore[union-attr,index]
    return [tokens]


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_a_warm_start_is_a_cold_one(model: Path, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    found = []
    for is_warm in (False, True):
        engine = opened(model, backend)
        try:
            if is_warm:
                assert warm.warm_up(engine.loaded) > 0
            found.append([trace(engine), said(engine), trace(engine)])
        finally:
            engine.close()
    assert "not warmed up" not in caplog.text
    assert found[0] == found[1]
    assert found[0][0] != found[0][2]


@pytest.mark.slow
def test_a_pool_begins_with_steps_of_both_kinds(model: Path) -> None:
    """Those for which nothing is away, and those that something is staged for: neither is captured in a reply."""
    engine = Engine(config(model, ctx_tokens=512, kv_pool="448", parallel=1, draft="off"))
    try:
        assert engine.loaded.kv.is_pooled and warm.warm_up(engine.loaded) > 0 and not engine.loaded.kv.stages
        graphs = engine.loaded.steps.graphs
        assert graphs is not None
        captured = {*graphs._captured}
        tokens = tuple(np.resize(PROMPT, 460).tolist())
        for i, n in enumerate((30, 460)):
            engine.submit(Generate(i, tokens[:n], 6, Sampling(), stop_tokens=()))
            while engine.busy:
                engine.step()
            assert engine.loaded.kv.stages == (n == 460)
        assert {*graphs._captured} == captured and {kind for _, kind in captured} == {False, True}
    finally:
        engine.close()


def test_what_fails_leaves_no_trace_and_stops_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(loaded: object) -> None:
        raise NumericalError("not finite")

    engine = opened(model, "cpu")
    try:
        before = trace(engine)
        monkeypatch.setattr(warm, "_decode", fails)
        warm.warm_up(engine.loaded)
        assert trace(engine) == before
    finally:
        engine.close()
