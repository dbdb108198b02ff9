"""Prompts that are read in one step: what each says, to the bit, is what it says where it is read alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.ground.errors import CapacityError
from engine.ground.protocol import Done, Error, Event, Generate, Score, Tokens
from engine.ground.sampling import Sampling
from engine.running.stepping import Span, StepResult
from engine.serving.scheduler import Engine
from engine.serving.tasks import GenerateTask

# Every kind of layer, and no more of it than emulation has time for.
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "n_layer": 4, "n_head_kv": (3, 1, 3, 1), "windowed": (True, False) * 2, "n_ff": (512,) * 4, "n_expert_used": 2,
    },
    "qwen35moe": {"n_layer": 2, "interval": 2, "n_expert_used": 2, "n_ff_shared": 768},
}  # fmt: skip
Open = Callable[..., "Watched"]
RESTS = (1, 31, 32, 33, 511, 512, 513)  # behind whole pieces of 512 tokens


class Watched(Engine):
    """An engine that notes the chunks of each step of prompts: who, from where, how many tokens."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.chunks: list[list[tuple[int, int, int]]] = []

    def _read_together(self, tasks: list[GenerateTask]) -> list[Event]:
        self.chunks.append([(t.id, 0 if t.sequence is None else t.sequence.length, t.part_tokens) for t in tasks])
        return super()._read_together(tasks)


ENGINE, CTX_TOKENS = Watched, 4096  # of the fixture `opened`


def tokens(seed: int, n: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, 301, n))


def asked(seed: int, prompt: tuple[int, ...], made: int = 2, **more: Any) -> Generate:
    return Generate(seed, prompt, made, Sampling(), (), logprobs=3, **more)


def drain(engine: Engine) -> dict[int, list[Any]]:
    """What each says, with the logarithms of its likeliest tokens; none fails."""
    found: dict[int, list[Any]] = {}
    while engine.busy:
        for e in engine.step():
            assert not isinstance(e, Error), e
            if isinstance(e, Tokens):
                assert e.logprobs is not None and e.top is not None
                found.setdefault(e.id, []).extend(zip(e.tokens, e.logprobs, e.top, strict=True))
    return found


def alone(engine: Engine, requests: list[Generate]) -> dict[int, list[Any]]:
    expected: dict[int, list[Any]] = {}
    for request in requests:
        engine.loaded.prefixes.clear()
        engine.submit(request)
        expected |= drain(engine)
    engine.loaded.prefixes.clear()
    return expected


def check_steps(engine: Watched) -> None:
    """Every step is short or long, and each chunk is in it what it would be alone."""
    small, most = engine.loaded.small_tokens, engine.loaded.limits.max_tokens
    for chunks in engine.chunks:
        sizes = [n for _, _, n in chunks]
        assert sum(sizes) <= (min(small, most) if sizes[0] <= small else most)
        assert all((n <= small) == (sizes[0] <= small) for n in sizes)


ARCHS = ["qwen3moe", "gemma4", "qwen35moe"]
ON_A_DEVICE = (
    ("cuda", "qwen35moe"), *(pytest.param("cuda", arch, marks=pytest.mark.on_a_gpu) for arch in ARCHS[:2])
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "arch"), [*(("cpu", arch) for arch in ARCHS), *ON_A_DEVICE])
def test_rests_of_every_kind_beside_others(opened: Open, backend: str, arch: str) -> None:
    """Prompts that are a rest, and prompts with a piece before it."""
    engine = opened(backend, arch, chunk_tokens=2048, parallel=16)
    requests = [asked(i + 1, tokens(i, n)) for i, n in enumerate(RESTS)]
    if backend == "cpu":
        requests += [asked(i + 20, tokens(i + 20, 512 + n)) for i, n in enumerate(RESTS)]
    elif arch != "qwen3moe":
        requests = [asked(i + 1, tokens(i, n)) for i, n in enumerate((31, 1, 33, 545))]
    # New turns, which go on after a piece that was read in a step with others.
    turns = [asked(40 + i, (*tokens(RESTS.index(n), n), *tokens(40 + i, 33 + i))) for i, n in enumerate((512, 513))]
    turns = turns if arch == "qwen3moe" else []
    expected, later = alone(engine, requests), alone(engine, turns)
    engine.chunks.clear()
    for request in requests:
        engine.submit(request)
    assert drain(engine) == expected
    check_steps(engine)
    begun = len(engine.chunks)
    for turn in turns:
        engine.submit(turn)
    assert drain(engine) == later
    assert engine.chunks[begun:] == ([[(40, 512, 33), (41, 512, 35)]] if turns else [])
    del engine.chunks[begun:]
    shared = [chunks for chunks in engine.chunks if len(chunks) > 1]
    assert shared and len(engine.chunks) < len(requests)
    sizes = {n for chunks in shared for _, _, n in chunks}
    assert 33 in sizes and (arch != "qwen3moe" or {511, 512, 513} <= sizes)


def test_a_long_prompt_fills_what_is_left_and_is_cut_where_no_bit_depends_on_it(opened: Open) -> None:
    engine = opened("cpu", chunk_tokens=512)
    requests = [asked(1, tokens(1, 100)), asked(2, tokens(2, 1000)), asked(3, tokens(3, 90)), asked(4, tokens(4, 30))]
    expected = alone(engine, requests)
    engine.chunks.clear()
    for request in requests:
        engine.submit(request)
    assert drain(engine) == expected
    assert engine.chunks == [
        [(1, 0, 100), (2, 0, 384)],
        [(3, 0, 90), (4, 0, 30), (2, 384, 128)],
        [(2, 512, 488)],
    ]


def test_who_shares_a_beginning_waits_for_it_and_computes_it_once(opened: Open) -> None:
    engine = opened("cpu", chunk_tokens=512)
    common = tokens(9, 130)
    requests = [asked(i, (*common, *tokens(i, 40))) for i in (1, 2, 3)]
    other = asked(4, tokens(4, 60))
    expected = alone(engine, [*requests, other])
    engine.chunks.clear()
    for request in (*requests, other):
        engine.submit(request)
    done: dict[int, int] = {}
    while engine.busy:
        done |= {e.id: e.usage.cached_tokens for e in engine.step() if isinstance(e, Done)}
    assert engine.chunks == [[(1, 0, 170), (4, 0, 60)], [(2, 128, 42), (3, 128, 42)]]
    assert done == {1: 0, 2: 128, 3: 128, 4: 0}
    for request in (*requests, other):  # and one that has begun goes on beside it
        engine.submit(request)
    assert drain(engine) == expected


def test_one_that_is_not_finite_fails_alone(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened("cpu", chunk_tokens=512)
    requests = [asked(i, tokens(i, 170)) for i in (1, 2, 3)]
    expected = alone(engine, requests)
    residual_at = StepResult.residual_at

    def broken(result: StepResult, token: int) -> Any:
        found = residual_at(result, token)
        return np.full_like(found, np.nan) if token == 339 else found

    monkeypatch.setattr(StepResult, "residual_at", broken)
    for request in requests:
        engine.submit(request)
    found: dict[int, list[Any]] = {}
    failed: list[tuple[int | None, str]] = []
    while engine.busy:
        for e in engine.step():
            if isinstance(e, Error):
                failed.append((e.id, e.code))
            if isinstance(e, Tokens):
                found.setdefault(e.id, []).extend(e.tokens)
    assert failed == [(2, "numerical")]
    assert found == {i: [token for token, *_ in expected[i]] for i in (1, 3)}
    assert engine.loaded.prefixes.match(np.array(requests[1].tokens, np.int32)).length == 0  # it is not gone on after
    assert engine.loaded.prefixes.match(np.array(requests[2].tokens, np.int32)).length == 128


def test_a_step_that_fails_fails_whoever_is_in_it(opened: Open) -> None:
    engine = opened("cpu", chunk_tokens=512)
    run = engine.loaded.forward.run

    def failing(step: Any, residency: Any) -> Any:
        engine.loaded.forward.run = run  # type: ignore[method-assign]
        raise CapacityError("the GPU is out of memory")

    engine.loaded.forward.run = failing  # type: ignore[method-assign]
    for i, n in ((1, 300), (2, 200), (3, 400)):
        engine.submit(asked(i, tokens(i, n)))
    events = [event for _ in range(200) if engine.busy for event in engine.step()]
    assert [(e.id, e.code) for e in events if isinstance(e, Error)] == [(1, "capacity"), (2, "capacity")]
    assert [e.id for e in events if isinstance(e, Done)] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("gib", [0.0, 1.0])
def test_what_requests_wait_for_is_counted(opened: Open, gib: float) -> None:
    """Replies that together are longer than the cache; whoever is put back is moved out, or read again."""
    engine = opened("cpu", ctx_tokens=640, chunk_tokens=512, parallel=3, prefix_gib=gib)
    requests = [asked(i, tokens(i, 30), made=400) for i in range(1, 6)]
    expected = alone(engine, requests)
    assert engine.stats()["waits"] == {"place": 0, "room": 0, "moved_out": 0, "read_again": 0}
    for request in requests:
        engine.submit(request)
    assert drain(engine) == expected
    waits = engine.stats()["waits"]
    assert waits["room"] == 3 and (waits["moved_out"] > 0) == (gib > 0) and (waits["read_again"] > 0) == (gib == 0)
    small = [asked(i, tokens(i, 9), made=3) for i in range(1, 8)]
    for request in small:
        engine.submit(request)
    drain(engine)
    assert engine.stats()["waits"] == waits | {"place": 4}


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_nine_of_a_model_with_recurrent_layers_run_at_once(opened: Open, backend: str) -> None:
    engine = opened(backend, "qwen35moe", ctx_tokens=640, parallel=9)
    requests = [asked(i, tokens(i, 3 + i % 4), made=3) for i in range(1, 11)]
    expected = alone(engine, requests)
    for request in requests:
        engine.submit(request)
    most = 0
    found: dict[int, list[Any]] = {}
    while engine.busy:
        for e in engine.step():
            if isinstance(e, Tokens):
                found.setdefault(e.id, []).extend(e.tokens)
        most = max(most, sum(task.decoding for task in engine._running))
    assert found == {i: [token for token, *_ in said] for i, said in expected.items()}
    assert engine.stats()["waits"]["place"] == 1 and most > 4


def test_chunks_say_which_of_their_rows_are_short(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many in all, wherever a prompt is cut or goes on; a token that is drawn is none, and a score is a prompt."""
    engine = opened("cpu", chunk_tokens=512, cpu_experts="auto")
    steps, chunk = engine.loaded.steps, engine.loaded.prefixes.chunk_tokens
    run, seen = steps.run, list[tuple[int, int, int]]()

    def noted(spans: list[Span]) -> StepResult:
        seen.extend((s.sequence.length, len(s.tokens), s.short) for s in spans)
        return run(spans)

    monkeypatch.setattr(steps, "run", noted)
    prompt = tokens(2, 8 * chunk - 24)
    for request in (asked(1, tokens(1, 100)), asked(2, prompt), asked(3, tokens(3, 90))):
        engine.submit(request)
    drain(engine)
    rows = [s for s in seen if s[1] > 1]
    assert {(0, 100, 100), (0, 90, 90)} <= set(rows)
    assert sum(n for _, _, n in rows) == 190 + chunk - 24 and not any(n for _, one, n in seen if one == 1)
    assert all(n == 0 or begin + length - n == 7 * chunk for begin, length, n in rows if length > 100)
    seen.clear()
    engine.submit(asked(4, (*prompt, *tokens(4, 30))))  # 6 more than whole chunks
    drain(engine)
    assert [n for _, _, n in seen if n] == [6]
    seen.clear()
    engine.submit(Score(5, prompt))
    while engine.busy:
        engine.step()
    assert seen == [(0, 512, 0), (512, len(prompt) - 512, chunk - 24)]
