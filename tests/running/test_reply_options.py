"""What a request may ask of its reply, on every backend: penalties and log-probabilities, alone and in shared steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.ground.protocol import Done, Error, Event, Generate, Tokens, format_line, parse_event
from engine.ground.sampling import Sampling
from engine.ops.likelihood import likelihood
from engine.running.sampling import Drawing, sample
from engine.running.stepping import Span
from engine.serving.scheduler import Engine
from tests.engine_runs import PROMPT, config
from tests.forms_here import FormHere
from tests.tiny_models import k_quant_mix, write_tiny

PENALIZED = Sampling(frequency_penalty=-0.8, presence_penalty=-1.9)  # rewards: random models repeat nothing
SAMPLED = Sampling(0.9, repetition_penalty=1.2, seed=7, frequency_penalty=-0.3, presence_penalty=1.5)
REQUESTS = [
    Generate(i, tuple(PROMPT[:n].tolist()), made, sampling, ())
    for i, (n, made, sampling) in enumerate([(36, 8, PENALIZED), (9, 10, SAMPLED), (21, 6, Sampling())], start=1)
]
Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", k_quant_mix, n_layer=2, n_expert_used=3)


@pytest.fixture(params=["cpu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reference", "cuda"))])
def opened(request: pytest.FixtureRequest, model: Path) -> Iterator[Open]:
    """A function that opens an engine on a backend."""
    if request.param == "cuda":
        request.getfixturevalue("on_the_device")
    engines = []

    def make(**options: Any) -> Engine:
        engines.append(Engine(config(model, **{"device": request.param, "ctx_tokens": 200, **options})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.loaded.prefixes.clear()
        assert engine.busy or engine.loaded.kv.free_blocks == engine.loaded.kv.n_blocks
        engine.close()


def drain(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    assert not [e for e in events if isinstance(e, Error)]
    return events


def tokens_of(events: list[Event], request_id: int) -> list[int]:
    return [t for e in events if isinstance(e, Tokens) and e.id == request_id for t in e.tokens]


def steps(engine: Engine, request: Generate) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Logits of one token after the other, and the tokens so far, to which the next is to be appended."""
    loaded, history = engine.loaded, list(request.tokens)
    sequence, tokens = loaded.kv.sequence(), np.asarray(history, np.int32)
    while sequence.length < len(tokens):
        part = tokens[sequence.length :][: loaded.prefixes.step_tokens(sequence, tokens)]
        result = loaded.steps.run([Span(sequence, part, np.zeros(len(part), bool), (len(part) - 1,))])
    for _ in range(request.max_tokens):
        yield result.logits[0].copy(), history
        result = loaded.steps.run([Span(sequence, np.asarray(history[-1:], np.int32), np.ones(1, bool), (0,))])
    sequence.release()


def literal(engine: Engine, request: Generate) -> list[int]:
    """The reply, one step and one draw after the other."""
    begin = len(request.tokens) if request.reply_from is None else request.reply_from
    for logits, history in steps(engine, request):
        history.append(sample(logits, request.sampling, len(history), history, None, history[begin:]))
    return history[len(request.tokens) :]


def test_penalties_are_the_twins_alone_and_in_shared_steps(opened: Open) -> None:
    engine = opened()
    expected = {request.id: literal(engine, request) for request in REQUESTS}
    for request in REQUESTS:
        engine.submit(request)
        assert tokens_of(drain(engine), request.id) == expected[request.id]
    for request in REQUESTS:
        engine.submit(request)
    events = drain(engine)
    assert {request.id: tokens_of(events, request.id) for request in REQUESTS} == expected
    plain = replace(REQUESTS[0], id=9, sampling=Sampling())
    engine.submit(plain)
    assert tokens_of(drain(engine), 9) != expected[1]  # or nothing would have been tested
    # One goes from running ahead to shared steps and back, and its counts with it.
    engine.submit(replace(REQUESTS[1], id=4, max_tokens=24))
    events = [event for _ in range(2) for event in engine.step()]
    engine.submit(replace(REQUESTS[0], id=5))
    events += drain(engine)
    assert tokens_of(events, 5) == expected[1]
    assert tokens_of(events, 4) == literal(engine, replace(REQUESTS[1], max_tokens=24))


def test_a_reply_that_goes_on_is_counted_from_where_it_began(opened: Open) -> None:
    again = (*PROMPT[:40].tolist(), 17, 17, 250, 250, 250, 3)
    request = Generate(1, again, 8, PENALIZED, (), reply_from=40)
    engine = opened()
    expected = literal(engine, request)
    for other in (None, replace(REQUESTS[2], max_tokens=12)):
        if other is not None:
            engine.submit(other)
        engine.submit(replace(request, id=7))
        assert tokens_of(drain(engine), 7) == expected
    engine.submit(replace(request, reply_from=None))
    events = drain(engine)
    assert tokens_of(events, 1) == literal(engine, replace(request, reply_from=None))
    assert isinstance(events[-1], Done)


@pytest.mark.usefixtures("short_units")
def test_a_request_that_waits_for_room_keeps_its_counts(opened: Open) -> None:
    """It is put back and goes on; the counts are those of its reply, not of its second prompt."""
    engine = opened(ctx_tokens=500, draft="off")  # room for both; a draft of what was said would be all of it
    most = 200 if engine.loaded.backend.name == "cpu" else 24  # more than the device draws in one unit of work
    waits = replace(REQUESTS[0], max_tokens=most)
    engine.submit(waits)
    expected = tokens_of(drain(engine), 1)
    engine.submit(waits)
    engine.submit(replace(REQUESTS[2], max_tokens=most))
    events = engine.step()
    while engine._ahead or len(engine._running[0].history) < 46:  # type: ignore[union-attr]
        events += engine.step()
        assert len(engine._running) == 2
    assert engine._running[0].id == waits.id
    engine._put_back(engine._running[0])  # type: ignore[arg-type]
    assert tokens_of(events + drain(engine), 1) == expected


class Grammar:
    """Allows the ids that are a multiple of three."""

    is_done = False

    def mask(self) -> np.ndarray:
        return np.packbits(np.arange(320) % 3 == 0, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        assert token % 3 == 0


def test_penalties_and_grammars_go_together(opened: Open) -> None:
    engine, mask = opened(), Grammar().mask()
    for logits, expected in steps(engine, REQUESTS[0]):
        expected.append(sample(logits, PENALIZED, len(expected), expected, mask, expected[36:]))
    engine.loaded.forms.open = lambda text, stop: FormHere(Grammar())  # type: ignore[assignment,return-value]
    for request in (*REQUESTS[1:], replace(REQUESTS[0], grammar="{}")):
        engine.submit(request)
    assert tokens_of(drain(engine), 1) == expected[36:]


def described(events: list[Event], request_id: int) -> list[tuple[int, float, tuple[tuple[int, float], ...]]]:
    """Each token of a reply with its log-probability and the likeliest."""
    found = []
    for e in events:
        if isinstance(e, Tokens) and e.id == request_id:
            assert e.logprobs is not None and e.top is not None
            found += list(zip(e.tokens, e.logprobs, e.top, strict=True))
    return found


def test_log_probabilities_are_the_twins_and_change_no_token(opened: Open) -> None:
    engine = opened()
    asking = [replace(r, logprobs=n) for r, n in zip(REQUESTS, (3, 20, 0), strict=True)]
    expected: dict[int, list[Any]] = {}
    for request in asking:
        found = expected[request.id] = []
        for logits, history in steps(engine, request):
            reply = history[len(request.tokens) :]
            history.append(sample(logits, request.sampling, len(history), history, None, reply))
            found.append((history[-1], *likelihood(logits, history[-1], request.logprobs or 0)))
            wide = logits.astype(np.float64)
            softmax = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
            assert abs(found[-1][1] - softmax[history[-1]]) < 1e-6
    for request in asking:
        engine.submit(request)
        assert described(drain(engine), request.id) == expected[request.id]
    engine.submit(replace(REQUESTS[0], id=9, max_tokens=12))  # who does not ask is told nothing
    for request in asking:
        engine.submit(request)
    events = drain(engine)
    assert {r.id: described(events, r.id) for r in asking} == expected
    assert {(e.logprobs, e.top) for e in events if isinstance(e, Tokens) and e.id == 9} == {(None, None)}
    for event in events:
        assert parse_event(format_line(event)) == event


def test_a_stop_token_is_not_described(opened: Open) -> None:
    engine = opened()
    request = replace(REQUESTS[0], sampling=Sampling(), logprobs=1)
    engine.submit(request)
    whole = described(drain(engine), 1)
    stop = whole[5][0]
    for grammar in (None, "{}"):
        engine.loaded.forms.open = lambda text, stop: FormHere(Anything())  # type: ignore[assignment,return-value]
        engine.submit(replace(request, stop_tokens=(stop,), grammar=grammar))
        events = drain(engine)
        assert described(events, 1) == whole[: [token for token, *_ in whole].index(stop)]


class Anything(Grammar):
    """Allows everything."""

    def mask(self) -> np.ndarray:
        return np.full(10, 0xFFFFFFFF, np.uint32)

    def accept(self, token: int) -> None:
        """Take it."""


def test_log_probabilities_do_not_look_at_the_grammar(opened: Open) -> None:
    engine = opened()
    engine.loaded.forms.open = lambda text, stop: FormHere(Grammar())  # type: ignore[assignment,return-value]
    engine.submit(replace(REQUESTS[0], sampling=Sampling(), grammar="{}", logprobs=20))
    for token, logprob, top in described(drain(engine), 1):
        assert token % 3 == 0 and logprob <= top[0][1]
        assert any(other % 3 for other, _ in top)


@pytest.mark.parametrize("sampling", [PENALIZED, SAMPLED], ids=["greedy", "sampled"])
def test_a_token_taken_back_is_counted_no_more(opened: Open, sampling: Sampling) -> None:
    """A draft's token gives way to another, so the history is as long as it was and not the same."""
    loaded = opened().loaded
    history, begin, sequence = PROMPT[:20].tolist(), 20, loaded.kv.sequence()
    result = loaded.steps.run([Span(sequence, PROMPT[:20], np.zeros(20, bool), (19,))])

    def draw() -> int:
        logits = result.logits[0].copy()
        ((drawn,),) = loaded.drawer.draw(result, [Drawing(0, 77, history, 0, sampling, begin, logprobs=2)], [()])
        assert drawn is not None and drawn.likelihood == likelihood(logits, drawn.token, 2)
        assert drawn.token == sample(logits, sampling, len(history), history, None, history[begin:])
        return drawn.token

    for other in (None, 5, None, 9, 9, None, None, 5):
        history.append(draw())
        span = Span(sequence, np.asarray(history[-1:], np.int32), np.ones(1, bool), (0,), keep=True)
        result = loaded.steps.run([span])
        if other is not None:
            draw()
            loaded.steps.take_back([span], [1])
            history[-1] = other
            result = loaded.steps.run([replace(span, tokens=np.asarray([other], np.int32))])
    draw()
    sequence.release()
