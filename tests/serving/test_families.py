"""Requests with one prompt: it is read once, and each says what it would have said alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.ground.protocol import Done, Error, Event, Generate, Progress, Tokens
from engine.ground.sampling import Sampling
from engine.memory.kv import Fork
from engine.serving.families import MOST_LEFT, Families
from engine.serving.scheduler import Engine

N = 150  # tokens of the prompt: two blocks and a part of one, longer than the windows of the tiny models
PROMPT = tuple(int(t) for t in np.random.default_rng(11).integers(0, 301, N))
ARCHS = ["qwen3moe", "gemma4", "laguna", "qwen35"]
# Every kind of layer, and no more of it than emulation has time for.
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "n_layer": 4, "n_head_kv": (3, 1, 3, 1), "windowed": (True, False) * 2, "n_ff": (512,) * 4, "n_expert_used": 2,
    },
    "laguna": {"n_layer": 3, "n_head": (20, 12, 12), "windowed": (False, True, True), "n_expert_used": 2, "n_ff": 512},
    "qwen35": {"n_layer": 3, "n_ff": 512},
}  # fmt: skip
EMULATED = [pytest.param("cuda", arch, marks=pytest.mark.slow) for arch in ARCHS]
BACKENDS = [("reference", "qwen3moe"), *(("cpu", arch) for arch in ARCHS), *EMULATED]
SHORT = ("qwen3moe", "qwen35")  # on the emulator
ON_A_GPU = [pytest.param("cuda", arch, marks=[pytest.mark.slow, pytest.mark.on_a_gpu]) for arch in ARCHS]
_OF = zip(ARCHS, EMULATED, ON_A_GPU, strict=True)
FEWER = [*BACKENDS[: -len(ARCHS)], *(short if arch in SHORT else long for arch, short, long in _OF)]


def family(n: int, prompt: tuple[int, ...] = PROMPT, made: int = 9, first: int = 1, **more: Any) -> list[Generate]:
    """Choices of one request, each with a seed of its own."""
    return [
        Generate(
            first + k, prompt, made, Sampling(0.9, seed=k), (), same_prompt_as=first if k else None, logprobs=2, **more
        )
        for k in range(n)
    ]


class Watched(Engine):
    """An engine that knows how many tokens of prompts were fed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fed = 0
        run = self.loaded.steps.run

        def counted(spans: Any) -> Any:
            self.fed += sum(len(span.tokens) for span in spans if not span.counted.any())
            return run(spans)

        self.loaded.steps.run = counted  # type: ignore[method-assign]


Open = Callable[..., Watched]
ENGINE, CTX_TOKENS = Watched, 800  # of the fixture `opened`
UNENFORCEABLE = '{"kind":"json_schema","schema":{"not":{}}}'


def drain(engine: Engine) -> list[Event]:
    events: list[Event] = []
    for _ in range(3000):
        if not engine.busy:
            return events
        events += engine.step()
    raise AssertionError("it does not end")


def until_tokens(engine: Engine, request_id: int) -> list[Event]:
    events: list[Event] = []
    while not any(isinstance(e, Tokens) and e.id == request_id for e in events):
        events += engine.step()
    assert not any(isinstance(e, Done) for e in events)
    return events


def replies(events: list[Event]) -> dict[int, list[Any]]:
    """Tokens of each request, with what is said of them."""
    found: dict[int, list[Any]] = {}
    for e in events:
        assert not isinstance(e, Error), e
        if isinstance(e, Tokens):
            assert e.logprobs is not None and e.top is not None
            found.setdefault(e.id, []).extend(zip(e.tokens, e.logprobs, e.top, strict=True))
    return found


def alone(engine: Engine, requests: list[Generate]) -> dict[int, list[Any]]:
    """What each says by itself, on a cache that knows nothing."""
    found = {}
    for request in requests:
        engine.loaded.prefixes.clear()
        engine.submit(replace(request, same_prompt_as=None))
        found |= replies(drain(engine))
    engine.loaded.prefixes.clear()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "arch"), FEWER)
def test_choices_say_what_they_would_alone_and_their_prompt_is_read_once(
    opened: Open, backend: str, arch: str
) -> None:
    engine = opened(backend, arch)
    n, length = (8, N) if backend == "cpu" else (2, 80)  # longer than windows; the other backends are slow
    requests = family(n, PROMPT[:length], made=5 if backend == "cpu" else 3)
    expected = alone(engine, requests)
    assert len({str(reply) for reply in expected.values()}) > 1
    engine.fed = 0
    for request in requests:
        engine.submit(request)
    events = drain(engine)
    assert replies(events) == expected
    assert engine.fed == length
    done = {e.id: e for e in events if isinstance(e, Done)}
    assert [done[r.id].usage.cached_tokens for r in requests] == [0] + [length] * (n - 1)
    for request in requests[1:]:
        told = [e for e in events if isinstance(e, Progress) and e.id == request.id]
        assert told == [Progress(request.id, length, length, length)]


@pytest.mark.parametrize("n_tokens", [1, 63, 64, 65, 128])
def test_prompts_of_any_length(opened: Open, n_tokens: int) -> None:
    for arch in ("qwen3moe", "gemma4", "qwen35"):
        engine = opened("cpu", arch)
        requests = family(2, PROMPT[:n_tokens], made=9)
        expected = alone(engine, requests)
        engine.fed = 0
        for request in requests:
            engine.submit(request)
        assert replies(drain(engine)) == expected and engine.fed == len(requests[0].tokens)


@pytest.mark.parametrize("arch", ["qwen3moe", "gemma4", "qwen35"])
def test_choices_that_wait_in_the_queue_need_no_second_reading(opened: Open, arch: str) -> None:
    """The first has long ended when the last one begins, and others have come between."""
    engine = opened("cpu", arch, parallel=4)
    requests = family(12, made=4)
    other = replace(family(1, PROMPT[::-1], made=30, first=50)[0], sampling=Sampling())
    expected = alone(engine, [*requests, other])
    engine.fed = 0
    engine.submit(requests[0])
    engine.submit(other)
    for request in requests[1:]:
        engine.submit(request)
    assert replies(drain(engine)) == expected
    assert engine.fed == 2 * N


@pytest.mark.parametrize("arch", ["qwen3moe", "gemma4", "qwen35"])
@pytest.mark.usefixtures("short_units")
@pytest.mark.parametrize("late", [1, 2])
def test_those_that_come_while_the_first_reads_go_beside_it(opened: Open, arch: str, late: int) -> None:
    """As a server sends them: the first alone, the others when that is known."""
    engine = opened("cpu", arch)
    requests = family(4, made=40)
    expected = alone(engine, requests)
    engine.fed = 0
    engine.submit(requests[0])
    events = [event for _ in range(late) for event in engine.step()]
    assert 0 < engine.fed < N
    for request in requests[1:]:
        engine.submit(request)
    events += drain(engine)
    assert replies(events) == expected
    assert engine.fed == N
    first_end = next(i for i, e in enumerate(events) if isinstance(e, Done))
    assert {e.id for e in events[:first_end] if isinstance(e, Tokens)} == {request.id for request in requests}


@pytest.mark.parametrize("arch", ["gemma4", "qwen35"])
def test_a_prompt_that_was_cancelled_runs_when_it_comes_again(opened: Open, arch: str) -> None:
    """More than half a cache long: what was read of it, without a snapshot, must not stand in its way."""
    engine = opened("cpu", arch, ctx_tokens=640)
    (request,) = family(1, tuple(np.random.default_rng(8).integers(0, 301, 500).tolist()), made=4)
    expected = alone(engine, [request])
    engine.submit(request)
    for _ in range(5):
        engine.step()
    assert engine.cancel(1)
    for again in (2, 3):
        engine.submit(replace(request, id=again))
        assert replies(drain(engine))[again] == expected[1]


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_cancelled_the_others_go_on(opened: Open, seed: int) -> None:
    rng = np.random.default_rng(seed)
    engine = opened("cpu", ["qwen3moe", "gemma4", "qwen35"][seed % 3])
    requests = family(6, made=6) + family(3, PROMPT[:70], made=4, first=20)
    expected = alone(engine, requests)
    order = [*requests]
    events: list[Event] = []
    cancelled = set()
    for request in order:
        engine.submit(request)
        for _ in range(int(rng.integers(0, 2))):
            events += engine.step() if engine.busy else []
    victims = [1, *rng.choice([r.id for r in requests[1:]], 2, replace=False).tolist()]
    for victim in victims:
        for _ in range(int(rng.integers(0, 6))):
            events += engine.step() if engine.busy else []
        if engine.cancel(victim):
            cancelled.add(victim)
    events += drain(engine)
    found = replies(events)
    for request in requests:
        if request.id in cancelled:
            assert found.get(request.id, []) == expected[request.id][: len(found.get(request.id, []))]
        else:
            assert found[request.id] == expected[request.id], request.id


def test_the_reader_is_followed_by_the_next(opened: Open) -> None:
    engine = opened()
    requests = family(4)
    expected = alone(engine, requests)
    engine.fed = 0
    for request in requests:
        engine.submit(request)
    engine.step()
    assert engine.fed == 64 and engine.cancel(1)
    assert replies(drain(engine)) == {k: v for k, v in expected.items() if k != 1}
    assert engine.fed == N  # the chunk that was read before is remembered


def test_without_room_for_a_fork_each_reads_for_itself(opened: Open) -> None:
    engine = opened("cpu", "qwen35", prefix_gib=0.0)
    requests = family(3)
    expected = alone(engine, requests)
    engine.fed = 0
    for request in requests:
        engine.submit(request)
    assert replies(drain(engine)) == expected
    assert engine.fed == 3 * N


def test_a_fork_is_given_up_when_blocks_are_short(opened: Open) -> None:
    """What waits for a place reads again, and nothing else changes."""
    engine = opened(ctx_tokens=400)
    requests = family(3, made=4)
    long = Generate(30, tuple(reversed(PROMPT)), 100, Sampling(), (), logprobs=0)
    expected = alone(engine, [*requests, long])
    place = engine.loaded.limits.places
    for request in requests[:2]:
        engine.submit(request)
    while not (events := engine.step()) or not any(isinstance(e, Tokens) for e in events):
        pass
    assert engine.loaded.prefixes.forks._claims
    while engine.loaded.prefixes.reclaim():
        pass
    assert not engine.loaded.prefixes.forks._claims
    engine.submit(long)
    engine.submit(requests[2])
    found = replies(events + drain(engine))
    assert found == {r.id: expected[r.id] for r in (*requests, long)} and place == 16


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35"])
def test_one_that_comes_late_reads_for_itself(opened: Open, arch: str) -> None:
    engine = opened("cpu", arch)
    requests = family(4)
    expected = alone(engine, requests)
    engine.submit(requests[0])
    events = [e for _ in range(4) for e in engine.step()]
    for request in requests[1:]:
        engine.submit(request)
    engine.fed = 0
    assert replies(events + drain(engine)) == expected
    assert engine.fed <= N  # one of the three


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35"])
@pytest.mark.parametrize("ended", [0, 1])
def test_those_that_come_when_the_prompt_was_read_go_on_from_it(opened: Open, arch: str, ended: int) -> None:
    """Where the first said that they would; a short prompt is read before they can be sent."""
    engine = opened("cpu", arch)
    requests = family(4, made=150)
    expected = alone(engine, requests)
    engine.fed = 0
    engine.submit(replace(requests[0], shared_by=3))
    events = until_tokens(engine, 1)
    assert engine.fed == N
    engine.submit(requests[1])
    if ended:  # the others go on from it though the first has ended, as the second has not
        events += until_tokens(engine, 2)
        engine.cancel(1)
        expected[1] = expected[1][: len(replies(events)[1])]
    for request in requests[2:]:
        engine.submit(request)
    events += drain(engine)
    assert replies([e for e in events if not isinstance(e, Error)]) == expected
    assert engine.fed == N and not len(engine._families)


def test_nothing_is_kept_for_those_that_never_come(opened: Open) -> None:
    engine = opened("cpu")
    (request,) = family(1, made=40)
    for request_id in (1, 2):
        engine.submit(replace(request, id=request_id, shared_by=3))
        until_tokens(engine, request_id)
        assert len(engine._families) == 1
        engine.cancel(request_id)
        drain(engine)
        assert not len(engine._families)
    assert not engine.loaded.prefixes.forks.give_up()


def test_those_that_come_when_the_first_has_ended_go_on_from_its_prompt(opened: Open) -> None:
    """As it has where it writes one token; of such families no more are kept than a few."""
    engine = opened("cpu")
    requests = family(3, made=1)
    expected = alone(engine, requests)
    engine.fed = 0
    engine.submit(replace(requests[0], shared_by=2))
    events = drain(engine)
    for request in requests[1:]:
        engine.submit(request)
        events += drain(engine)
    assert replies(events) == expected and engine.fed == N and not len(engine._families)
    assert not engine.loaded.prefixes.forks.give_up()
    for request_id in (*range(10, 10 + 2 * MOST_LEFT), 10 + MOST_LEFT):
        engine.submit(replace(requests[0], id=request_id, shared_by=1))
        drain(engine)
        assert len(engine._families) <= MOST_LEFT
    for request_id in range(10 + MOST_LEFT, 10 + 2 * MOST_LEFT):
        engine.submit(replace(requests[1], id=100, same_prompt_as=request_id))
        drain(engine)
    assert not len(engine._families) and not engine.loaded.prefixes.forks.give_up()


def test_a_name_with_other_tokens_is_not_of_the_family(opened: Open) -> None:
    engine = opened()
    requests = [*family(2), replace(family(1, PROMPT[1:], first=5)[0], same_prompt_as=1)]
    requests += [replace(family(1, first=6)[0], same_prompt_as=99), replace(family(1, first=7)[0], same_prompt_as=7)]
    expected = alone(engine, requests)
    for request in requests:
        engine.submit(request)
    assert replies(drain(engine)) == expected


def test_a_short_prompt_does_not_wait_for_a_family(opened: Open) -> None:
    engine = opened()
    for request in family(8, PROMPT * 4, made=2):
        engine.submit(request)
    engine.submit(Generate(20, PROMPT[:9], 2, Sampling(), (), logprobs=0))
    order = [e.id for e in drain(engine) if isinstance(e, Done)]
    assert order[0] == 20


def test_a_grammar_that_fails_fails_one_choice(opened: Open) -> None:
    engine = opened()
    requests = family(3)
    expected = alone(engine, requests)
    for request in (requests[0], replace(requests[1], grammar=UNENFORCEABLE), requests[2]):
        engine.submit(request)
    events = drain(engine)
    assert [e.id for e in events if isinstance(e, Error)] == [2]
    found = replies([e for e in events if not isinstance(e, Error)])
    assert found == {1: expected[1], 3: expected[3]}


def test_penalties_of_choices(opened: Open) -> None:
    engine = opened()
    penalized = Sampling(1.0, seed=3, frequency_penalty=-1.0, presence_penalty=-1.5)
    requests = [replace(request, sampling=replace(penalized, seed=request.id)) for request in family(4)]
    expected = alone(engine, requests)
    for request in requests:
        engine.submit(request)
    assert replies(drain(engine)) == expected


def test_cached_tokens_are_told_while_the_prompt_is_read(opened: Open) -> None:
    engine = opened("cpu", chunk_tokens=128, ctx_tokens=1200)
    (first,) = family(1, PROMPT * 2)
    alone(engine, [first])
    engine.submit(first)
    drain(engine)
    engine.submit(replace(first, id=2, tokens=(*PROMPT * 2, *PROMPT)))
    events = engine.step()
    assert events == [Progress(2, 384, 450, 256)]
    events += drain(engine)
    assert [e for e in events if isinstance(e, Progress)][-1] == Progress(2, 450, 450, 256)
    assert isinstance(events[-1], Done) and events[-1].usage.cached_tokens == 256


def test_families_are_forgotten() -> None:
    """Ids come back, requests name what has ended, and nothing is kept of what is over."""
    rng, dropped, made = np.random.default_rng(0), list[Fork](), list[Fork]()
    families, alive = Families(dropped.append), {}
    for _ in range(3000):
        request_id = int(rng.integers(0, 12))
        if request_id in alive:
            del alive[request_id]
            if rng.random() < 0.5:
                families.cancel(request_id)
            families.end(request_id)
        else:
            named = None if rng.random() < 0.3 else int(rng.integers(0, 12))
            tokens, shared_by = (1, int(rng.integers(0, 2))), int(rng.integers(0, 4))
            request = Generate(request_id, tokens, 1, same_prompt_as=named, shared_by=shared_by)
            families.add(request, alive.values())
            alive[request_id] = request
        for other in alive:
            family_of = families.of(other)
            if family_of is not None:
                assert family_of.tokens == alive[other].tokens and other in family_of.members
                assert set(family_of.pending) <= family_of.members <= set(alive)
                if rng.random() < 0.1 and families.reader(other) == other:
                    if family_of.wants(other):
                        made.append(Fork(2, [], [], None))
                        family_of.keep(type("Kept", (), {"fork": made[-1], "logits": None})())
                    family_of.begun(other)
        waiting = [other for other in alive if families.reader(other) != other]
        assert not waiting or any(families.reader(other) == other for other in alive)
        assert len(families) <= 2 * len(alive) + MOST_LEFT
    for request_id in alive:
        families.cancel(request_id)
        families.end(request_id)
    assert len(families) <= MOST_LEFT and len(made) - len(dropped) <= MOST_LEFT
    for request_id in range(12):  # ids that come again
        families.add(Generate(request_id, (2,), 1), ())
    assert len(families) == 0 and len(dropped) == len(made) > 0
