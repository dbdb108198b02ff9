"""Requests that are put back, and turns that go on after replies: the tokens, and their probabilities, are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.ground.errors import CapacityError
from engine.ground.protocol import Error, Event, Generate, Tokens
from engine.ground.sampling import Sampling
from engine.memory import swap
from engine.serving.scheduler import Engine
from engine.serving.tasks import GenerateTask
from tests.forms_here import FormHere

# Every kind of layer, and no more of it than emulation has time for.
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "n_layer": 4, "n_head_kv": (3, 1, 3, 1), "windowed": (True, False) * 2, "n_ff": (512,) * 4, "n_expert_used": 2,
    },
    "qwen35": {"n_layer": 2, "n_ff": 512, "interval": 2},
}  # fmt: skip
Open = Callable[..., Engine]
ENGINE, CTX_TOKENS = Engine, 400  # of the fixture `opened`
Replies = dict[int, list[Any]]


def tokens(seed: int, n: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, 301, n))


pytestmark = pytest.mark.usefixtures("short_units")


def asked(seed: int, n: int, made: int, **more: Any) -> Generate:
    return Generate(seed, tokens(seed, n), made, Sampling(0.9, seed=seed), (), logprobs=2, **more)


def said(events: list[Event]) -> Replies:
    found: Replies = {}
    for e in events:
        assert not isinstance(e, Error), e
        if isinstance(e, Tokens):
            assert e.logprobs is not None and e.top is not None
            found.setdefault(e.id, []).extend(zip(e.tokens, e.logprobs, e.top, strict=True))
    return found


def drain(engine: Engine, put_back: float = 0.0, rng: np.random.Generator | None = None) -> list[Event]:
    """All events; put_back: how probable it is that somebody is, after each unit of work."""
    events: list[Event] = []
    for _ in range(3000):
        if not engine.busy:
            return events
        events += engine.step()
        able = [t for t in engine._running if isinstance(t, GenerateTask) and t.sequence is not None]
        if rng is not None and able and engine._ahead is None and rng.random() < put_back:
            engine._put_back(able[int(rng.integers(0, len(able)))])
            engine._releases += 1  # as if somebody had ended: it may begin again at once
    raise AssertionError("it does not end")


def idle(engine: Engine) -> int:
    """Let time pass in which nobody wants anything; units of work."""
    for n in range(1000):
        if not engine.idle_work:
            return n
        assert engine.step() == []
    raise AssertionError("it does not end")


ARCHS = ["qwen3moe", "gemma4", "qwen35"]
EMULATED = [pytest.param("cuda", arch, marks=pytest.mark.slow) for arch in ARCHS]
LONG = {"gemma4": ("another", "put back", "small", "off"), "qwen35": ("another", "small", "off")}  # on the emulator
BACKENDS = [*(("cpu", arch) for arch in ARCHS), *EMULATED]
LONGEST = pytest.param("cuda", "gemma4", marks=[pytest.mark.slow, pytest.mark.on_a_gpu])
FEWER = [LONGEST if one is EMULATED[1] else one for one in BACKENDS]


@pytest.mark.slow
@pytest.mark.parametrize("gib", [0.0, 1.0])
@pytest.mark.parametrize(("backend", "arch"), FEWER)
def test_who_is_put_back_says_what_it_would_have_said(
    opened: Open, backend: str, arch: str, gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room in host memory all comes back as it was; without, what was drawn is fed in steps as short as before."""
    engine = opened(backend, arch, prefix_gib=gib)
    made = 40 if backend == "cpu" else 6
    requests = [asked(1, 70, made), asked(2, 100, made - 5), asked(3, 20, made)][:: 1 if backend == "cpu" else 2]
    expected: Replies = {}
    for request in requests:
        engine.loaded.prefixes.clear()
        engine.submit(request)
        expected |= said(drain(engine))
    rng, kept, fed = np.random.default_rng(0), [], []
    swap_out, run = swap.swap_out, engine.loaded.steps.run

    def kept_of(kv: Any, sequence: Any) -> Any:
        kept.append(swap_out(kv, sequence))
        return kept[-1]

    monkeypatch.setattr(swap, "swap_out", kept_of)

    def counted(spans: Any) -> Any:
        fed.extend(len(span.tokens) for span in spans if not span.counted.any())
        return run(spans)

    engine.loaded.steps.run = counted  # type: ignore[method-assign]
    engine.loaded.prefixes.clear()
    for request in requests:
        engine.submit(request)
    assert said(drain(engine, 0.4, rng)) == expected
    assert len(kept) > (3 if backend == "cpu" else 1) and all((k is not None) == (gib > 0) for k in kept)
    if gib:
        assert sum(fed) == sum(len(request.tokens) for request in requests)  # nothing was read twice


FIRST, QUESTION = asked(1, 58, 8), tokens(7, 12)  # a chunk of 64 tokens that begins with the prompt


def turns(engine: Engine, between: Callable[[Engine], Any] = lambda engine: None, **more: Any) -> list[Any]:
    """What two turns of a conversation say; between: what happens meanwhile, more: of `drain`."""
    engine.submit(FIRST)
    replies = said(drain(engine, **more))[1]
    between(engine)
    engine.submit(replace(FIRST, id=2, tokens=(*FIRST.tokens, *(r[0] for r in replies), *QUESTION), max_tokens=4))
    return [*replies, *said(drain(engine, **more))[2]]


def forget(engine: Engine) -> None:
    """As if there were no prefixes."""
    engine.loaded.prefixes.clear()


def another(engine: Engine) -> None:
    """Somebody else comes."""
    engine.submit(asked(9, 66, 2))
    drain(engine)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], list[Any]]:
    """What the two turns say on a cache that knows nothing, by backend and architecture."""
    return {}


def expected_of(alone: dict[tuple[str, str], list[Any]], opened: Open, backend: str, arch: str) -> list[Any]:
    if (backend, arch) not in alone:
        alone[backend, arch] = turns(opened(backend, arch), forget)
    return alone[backend, arch]


@pytest.mark.parametrize("way", ["at once", "another", "put back", "small", "off"])
@pytest.mark.parametrize(("backend", "arch"), BACKENDS)
def test_exact_prefixes_say_what_is_said_without_any(
    request: pytest.FixtureRequest,
    opened: Open,
    alone: dict[tuple[str, str], list[Any]],
    backend: str,
    arch: str,
    way: str,
) -> None:
    """On, off and too small, with requests that are put back at random."""
    if backend == "cuda" and way in LONG.get(arch, ()) and not request.config.getoption("--gpu"):
        pytest.skip("takes minutes on the emulator; with --gpu it runs")
    expected = expected_of(alone, opened, backend, arch)
    more: dict[str, Any] = {"ctx_tokens": 128, "prefix_gib": 0.0} if way == "small" else {}
    engine = opened(backend, arch, exact_prefixes=True, **more)
    between = {"another": another, "small": another, "off": forget}.get(way, lambda engine: None)
    random = {"put_back": 0.2, "rng": np.random.default_rng(3)} if way == "put back" else {}
    assert turns(engine, between, **random) == expected
    waits = engine.stats()["waits"]
    assert (waits["moved_out"] + waits["read_again"] > 0) == (way == "put back")
    assert engine.loaded.prefixes.stats()["inexact_tokens"] == 0


@pytest.mark.parametrize("way", ["at once", "idle"])
@pytest.mark.parametrize(("backend", "arch"), FEWER)
def test_idle_time_makes_what_was_decoded_exact(
    opened: Open, alone: dict[tuple[str, str], list[Any]], backend: str, arch: str, way: str
) -> None:
    """A turn that comes before that has other bits, on a device, where it can go on after the reply; it is counted."""
    expected = expected_of(alone, opened, backend, arch)
    engine = opened(backend, arch)
    units: list[int] = []
    found = turns(engine, lambda engine: units.append(idle(engine) if way == "idle" else 0))
    inexact = way == "at once" and backend == "cuda" and arch == "qwen3moe"  # others begin only where a snapshot is
    assert found[: FIRST.max_tokens] == expected[: FIRST.max_tokens]
    assert (found != expected) == inexact
    assert engine.loaded.prefixes.stats()["inexact_tokens"] == (64 if inexact else 0)
    assert units == [2 if way == "idle" and backend == "cuda" else 0]  # a chunk, and that there is nothing more
    reused = 64 if arch == "qwen3moe" or (backend == "cuda" and way == "idle") else 0
    assert engine.stats()["tokens"]["reused"] == reused


@pytest.mark.slow
def test_a_server_that_is_busy_does_no_idle_work(opened: Open) -> None:
    """On a host that is taken for inexact: what idle time would read, when, and that a request ends it."""
    engine = opened()
    prefixes = engine.loaded.prefixes
    prefixes.decoded_differ = True
    assert prefixes.chunk_tokens == 64
    assert not engine.idle_work
    units: list[int] = []
    run = engine.loaded.steps.run

    def watched(spans: Any) -> Any:
        if engine._idling._rereading is not None:
            units.append(len(spans[0].tokens))
            assert not engine._running and not engine._waiting
        return run(spans)

    engine.loaded.steps.run = watched  # type: ignore[method-assign]
    for i in (1, 2):
        engine.submit(asked(i, 20, 150))
    while engine.busy:
        assert not engine.idle_work
        engine.step()
    assert not units and engine.idle_work and prefixes.stats()["inexact_chunks"] == 4
    for _ in range(3):
        assert engine.step() == []
    assert units == [64] * 3
    held = engine.loaded.kv.free_blocks
    engine.submit(asked(3, 20, 100))  # whoever comes waits for nothing, and finds the memory that was held
    assert not engine.idle_work and engine._idling._rereading is None and engine.loaded.kv.free_blocks >= held
    drain(engine)
    assert idle(engine) and not engine.idle_work and prefixes.stats()["inexact_chunks"] == 0
    assert engine.step() == []
    engine.submit(asked(4, 20, 100))
    drain(engine)
    engine.loaded.steps.run = lambda spans: (_ for _ in ()).throw(CapacityError("none"))  # type: ignore[method-assign]
    idle(engine)  # what cannot be done is not tried for ever
    engine.loaded.steps.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35"])
def test_who_finds_no_room_when_it_comes_back_waits_again(
    opened: Open, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened("cpu", arch)
    requests = [asked(1, 70, 60), asked(2, 90, 60)]
    expected: Replies = {}
    for request in requests:
        engine.submit(request)
        expected |= said(drain(engine))
    for request in requests:
        engine.submit(request)
    events: list[Event] = []
    while len(engine._running) < 2 or not all(task.decoding for task in engine._running):
        events += engine.step()
    swap_in, refused = swap.swap_in, []

    def short(kv: Any, sequence: Any, kept: Any) -> None:
        if len(refused) < 2:
            refused.append(kept)
            raise CapacityError("all 9 blocks of the KV cache are in use")
        swap_in(kv, sequence, kept)

    monkeypatch.setattr(swap, "swap_in", short)
    back = engine._running[1]
    assert isinstance(back, GenerateTask)
    engine._put_back(back)
    while engine.busy:
        engine._put_back_at = -1  # room is said to be there
        events += engine.step()
        assert len(refused) < 2 or back.sequence is not None or back._swapped is not None or back.reason
    assert len(refused) == 2 and said(events) == expected


def test_a_mask_that_is_late_is_kept(opened: Open) -> None:
    """Who is put back while its next token is held draws it, and feeds nothing again."""

    class Late:
        is_done = False

        def mask(self) -> np.ndarray:
            return np.full(10, 0xFFFFFFFF, np.uint32)

        def accept(self, token: int) -> None:
            """Take anything."""

    engine = opened()
    engine.submit(asked(1, 70, 9))
    expected = said(drain(engine))[1]
    engine.loaded.prefixes.clear()
    engine.loaded.forms.open = lambda text, stop: FormHere(Late())  # type: ignore[method-assign,assignment,return-value]
    engine.submit(asked(1, 70, 9, grammar="{}"))
    events: list[Event] = []
    while not engine._running or not engine._running[0].decoding:
        events += engine.step()
    (task,) = engine._running
    assert isinstance(task, GenerateTask)
    proposal = engine.loaded.decoder.propose(task, None)
    task.held = engine.loaded.decoder.run([proposal]).logits[0].copy()
    engine._put_back(task)
    assert task.held is not None and engine.loaded.prefixes.host_bytes
    assert said(events + drain(engine))[1] == expected
