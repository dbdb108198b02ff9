"""Requests at the same time: nobody starves, nobody's failure is another's, nothing is fed or counted twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import models
from engine.ground.config import EngineConfig
from engine.ground.errors import CapacityError, RequestError
from engine.ground.protocol import Done, Error, Event, Generate, Score, Tokens
from engine.serving.scheduler import Engine
from engine.serving.tasks import GenerateTask
from tests.forms_here import FormHere
from tests.tiny_models import k_quant_mix, write_tiny


def tokens(seed: int, n: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, 301, n))


class Watched(Engine):
    """An engine that remembers who was put back, whose prompt was read, and how many tokens were fed."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.put_back: list[int] = []
        self.read: list[tuple[int, ...]] = []  # whose prompts, in each step
        self.fed = 0
        run = self.loaded.steps.run

        def counted(spans: Any) -> Any:
            result = run(spans)
            self.fed += sum(len(span.tokens) for span in spans)
            return result

        self.loaded.steps.run = counted  # type: ignore[method-assign]

    def _put_back(self, task: GenerateTask) -> None:
        self.put_back.append(task.id)
        super()._put_back(task)

    def _read_together(self, tasks: list[GenerateTask]) -> list[Event]:
        self.read.append(tuple(task.id for task in tasks))
        return super()._read_together(tasks)

    def drain(self, steps: int = 2000) -> list[Event]:
        events: list[Event] = []
        while self.busy:
            events += self.step()
            steps -= 1
            assert steps, "it does not end"
        return events


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def opened(folder: Path) -> Iterator[Any]:
    """A function that opens an engine on the CPU."""
    engines: list[Watched] = []

    def make(arch: str = "qwen3moe", **options: Any) -> Watched:
        path = folder / f"{arch}.gguf"
        if not path.exists():
            variant = None if arch == "qwen3moe" else {"n_ctx_train": 8192}
            write_tiny(path, k_quant_mix, arch=models.find(arch), variant=variant)
        engines.append(Watched(EngineConfig(model=path, device="cpu", threads=2, **options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.loaded.prefixes.clear()
        assert engine.busy or engine.loaded.kv.free_blocks == engine.loaded.kv.n_blocks
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma4", "laguna"])
def test_prompts_read_in_turn_share_the_pool_of_a_window(opened: Any, arch: str) -> None:
    engine = opened(arch, ctx_tokens=4096, chunk_tokens=256)
    for i in range(1, 7):
        engine.submit(Generate(i, tokens(i, 600), 2, stop_tokens=()))
    events = engine.drain()
    assert sum(isinstance(e, Done) for e in events) == 6
    assert not engine.put_back


def test_no_more_begin_than_there_are_states_for(opened: Any) -> None:
    engine = opened("qwen35", ctx_tokens=600, chunk_tokens=64)
    for i in range(1, 9):
        engine.submit(Generate(i, tokens(i, 20 if i % 2 else 110), 20, stop_tokens=()))
    assert sum(isinstance(e, Done) for e in engine.drain()) == 8
    assert not engine.put_back


def test_long_prompts_wait_for_room_rather_than_be_read_twice(opened: Any) -> None:
    engine = opened(ctx_tokens=640, chunk_tokens=64)
    for i in range(1, 4):
        engine.submit(Generate(i, tokens(i, 500), 2, stop_tokens=()))
    engine.drain()
    assert engine.fed == 3 * 501 and not engine.put_back


def test_prompts_are_read_in_turn(opened: Any) -> None:
    engine = opened(ctx_tokens=640, chunk_tokens=64)
    for i, n in enumerate((20, 130, 20, 70, 20), start=1):
        engine.submit(Generate(i, tokens(i, n), 2, stop_tokens=()))
    engine.drain()
    # What fits beside the first joins it; whoever was passed over is first in the next step.
    assert engine.read == [(1, 3, 5), (2,), (4,), (2,), (4, 2)]


def test_a_score_runs_alone_and_counts_once(opened: Any) -> None:
    engine = opened(ctx_tokens=200, chunk_tokens=32)
    engine.submit(Generate(1, tokens(1, 120), 60, stop_tokens=()))
    engine.submit(Score(2, tokens(2, 190), count="all"))
    engine.submit(Generate(3, tokens(3, 190), 5, stop_tokens=()))
    events = engine.drain()
    assert [e.id for e in events if isinstance(e, Done)] == [1, 2, 3]
    experts = 3 * 5  # layers, active ones
    assert sum(map(sum, engine.profile("read")["counts"])) == (59 + 190 + 4) * experts


class Exhausted:
    """A grammar that fails in the middle of its reply."""

    is_done = False

    def __init__(self) -> None:
        self.left = 2

    def mask(self) -> np.ndarray:
        self.left -= 1
        if self.left < 0:
            raise RequestError("the grammar took more work than a token may")
        return np.full(10, 0xFFFFFFFF, np.uint32)

    def accept(self, token: int) -> None:
        """Take anything."""


def test_a_grammar_that_fails_fails_its_request_alone(opened: Any) -> None:
    engine = opened(ctx_tokens=400, chunk_tokens=32)
    engine.loaded.forms.open = lambda text, stop: FormHere(Exhausted())
    engine.submit(Generate(1, tokens(1, 20), 20, stop_tokens=()))
    engine.submit(Generate(2, tokens(2, 20), 20, stop_tokens=(), grammar="{}"))
    events = engine.drain()
    assert [e.id for e in events if isinstance(e, Error)] == [2]
    assert sum(len(e.tokens) for e in events if isinstance(e, Tokens) and e.id == 1) == 20


def test_a_chunk_that_failed_is_not_passed_over(opened: Any) -> None:
    """Out of memory in a step is the request's failure: its length has grown, and its cache holds nothing there."""
    engine = opened(ctx_tokens=400, chunk_tokens=32)
    run, steps = engine.loaded.forward.run, [0]

    def failing(step: Any, residency: Any) -> Any:
        steps[0] += 1
        if steps[0] == 3:
            raise CapacityError("the GPU is out of memory")
        return run(step, residency)

    engine.loaded.forward.run = failing
    for i in (1, 2):
        engine.submit(Generate(i, tokens(i, 100), 6, stop_tokens=()))
    events = engine.drain()
    assert [(e.id, e.code) for e in events if isinstance(e, Error)] == [(1, "capacity")]
    assert [e.id for e in events if isinstance(e, Done)] == [2]


def test_what_was_not_finite_is_not_reused(opened: Any) -> None:
    engine = opened(ctx_tokens=400, chunk_tokens=64)
    forward = engine.loaded.forward
    good = forward.weights
    broken = replace(good.layers[0], ffn_norm=np.full_like(good.layers[0].ffn_norm, np.nan))
    forward.weights = replace(good, layers=(broken, *good.layers[1:]))
    engine.submit(Generate(1, tokens(1, 130), 4, stop_tokens=()))
    assert isinstance(engine.drain()[-1], Error)
    forward.weights = good
    engine.submit(Generate(2, tokens(1, 130), 4, stop_tokens=()))
    assert isinstance(engine.drain()[-1], Done)
