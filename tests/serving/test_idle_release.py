"""Memory that an idle engine gives back: what comes after says what it would have said, and nothing is read again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.ground.errors import CapacityError
from engine.ground.protocol import Done, Error, Event, Generate, Tokens
from engine.ground.sampling import Sampling
from engine.memory import prefix_files
from engine.memory.prefix_files import PrefixFiles
from engine.serving.scheduler import Engine

VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "n_layer": 4, "n_head_kv": (3, 1, 3, 1), "windowed": (True, False) * 2, "n_ff": (512,) * 4, "n_expert_used": 2,
    },
    "qwen35moe": {"n_layer": 4},
}  # fmt: skip
ENGINE, CTX_TOKENS = Engine, 600
Open = Callable[..., Engine]

pytestmark = pytest.mark.usefixtures("short_units")


def turns(arch: str) -> list[Generate]:
    """A conversation of three turns, each all that was asked before and more."""
    tokens = np.random.default_rng(5).integers(0, 301, 400).tolist()
    return [Generate(i, tuple(tokens[: 100 + 90 * i]), 9, Sampling(0.7, seed=i), (), logprobs=1) for i in range(3)]


def drained(engine: Engine) -> list[Event]:
    events: list[Event] = []
    for _ in range(3000):
        if not engine.busy:
            return events
        events += engine.step()
    raise AssertionError("it does not end")


def said(events: list[Event]) -> list[Any]:
    found: list[Any] = []
    for event in events:
        assert not isinstance(event, Error), event
        if isinstance(event, Tokens):
            found += zip(event.tokens, event.logprobs or (), strict=True)
        if isinstance(event, Done):
            found.append((event.usage.prompt_tokens, event.usage.cached_tokens))
    return found


def let_go(engine: Engine) -> None:
    """Let so much time pass that memory goes back."""
    for _ in range(1000):
        if engine.loaded.parking.is_parked:
            return
        assert engine.idle_work and engine.step() == []
    raise AssertionError("it keeps its memory")


BACKENDS = [("cpu", arch, pool) for arch in ("qwen3moe", "gemma4", "qwen35moe") for pool in ("auto", "448")]
EMULATED = [pytest.param("cuda", "qwen3moe", "448", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("backend", "arch", "pool"), [*BACKENDS, *EMULATED])
def test_after_a_pause_all_is_as_it_would_have_been(
    opened: Open, backend: str, arch: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more: dict[str, Any] = {"kv_pool": pool, "parallel": 1, "prefix_gib": 0.1, "poison": True}
    more |= {"residency_pct": 55.0, "policy": "lru"} if backend == "cpu" else {}
    plain = opened(backend, arch, **more)
    expected = []
    for request in turns(arch):
        plain.submit(request)
        expected.append(said(drained(plain)))
    assert any(reused for *_, (_, reused) in expected[1:])
    engine = opened(backend, arch, **more, idle_release_s=1e-6)
    monkeypatch.setattr("engine.memory.residency.REFILL_BYTES", 1)  # a part at a time
    for request, wanted in zip(turns(arch), expected, strict=True):
        let_go(engine)
        assert engine.idle_s is None and not engine.idle_work
        stats = engine.stats()  # and it can be looked at
        assert stats["released_bytes"] == engine.loaded.parking.released_bytes > 0
        engine.submit(request)
        assert said(drained(engine)) == wanted
        assert engine.stats()["released_bytes"] == 0


def test_memory_that_others_took_meanwhile_is_said_to_who_asks(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = turns("qwen3moe")
    plain, engine = (opened(idle_release_s=after, prefix_gib=0.1) for after in (None, 1e-6))
    plain.submit(first)
    wanted = said(drained(plain))
    let_go(engine)
    with monkeypatch.context() as short:

        def refuse() -> None:
            raise CapacityError("the GPU has no 5.00 GiB", hint="what else uses it?")

        short.setattr(engine.loaded.backend.device, "restore", refuse)
        engine.submit(second)
        engine.submit(third)
        errors = drained(engine)
        assert [(e.id, e.code) for e in errors if isinstance(e, Error)] == [(1, "capacity"), (2, "capacity")]
        assert engine.loaded.parking.is_parked and not engine.idle_work
    engine.submit(first)
    assert said(drained(engine)) == wanted


@pytest.mark.parametrize("error", [CapacityError, MemoryError])
def test_without_host_memory_for_copies_the_cache_stays(
    opened: Open, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(idle_release_s=1e-6, prefix_gib=0.1)
    first, second, _ = turns("qwen3moe")
    engine.submit(first)
    drained(engine)

    def refuse(*_: Any) -> None:
        raise error("no more host memory")

    with monkeypatch.context() as short:
        short.setattr(engine.loaded.kv, "read_blocks", refuse)
        let_go(engine)
    engine.submit(second)
    assert any(isinstance(e, Done) and e.usage.cached_tokens for e in drained(engine))


def test_who_leaves_while_it_comes_back_lets_it_come_back(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(idle_release_s=1e-6, prefix_gib=0.1)
    first, second, _ = turns("qwen3moe")
    monkeypatch.setattr("engine.memory.residency.REFILL_BYTES", 1)
    let_go(engine)
    engine.submit(first)
    assert engine.step() == [] and engine.loaded.parking.is_parked
    assert engine.cancel(first.id) and engine.idle_work
    engine.submit(second)
    assert said(drained(engine))


def test_a_server_that_is_asked_all_the_time_keeps_its_memory(opened: Open) -> None:
    engine = opened(idle_release_s=30.0)
    assert engine.idle_s is not None and 29 < engine.idle_s <= 30 and not engine.idle_work
    engine.submit(turns("qwen3moe")[0])
    assert engine.idle_s is None
    time.sleep(0.05)
    drained(engine)
    assert engine.idle_s is not None and engine.idle_s > 29.9
    assert opened().idle_s is None


@pytest.mark.parametrize("pool", ["auto", "448"])
def test_files_that_a_slow_disk_missed_are_written_before_memory_goes_back(
    opened: Open, pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a conversation is whole when another server begins, though it was read faster than its files were written."""
    gate, write = threading.Event(), PrefixFiles._write

    def later(self: PrefixFiles, *job: Any) -> int:
        gate.wait(9)
        return write(self, *job)

    monkeypatch.setattr(PrefixFiles, "_write", later)
    monkeypatch.setattr(prefix_files, "WAITING_BYTES", 1)
    more: dict[str, Any] = {"kv_pool": pool, "parallel": 1, "prefix_gib": 0.1, "cache_dir": tmp_path}
    request = Generate(1, tuple(np.random.default_rng(5).integers(0, 301, 500).tolist()), 9, Sampling(), ())
    engine = opened("cpu", "qwen35moe", **more, idle_release_s=1e-6)
    engine.submit(request)
    assert drained(engine) and engine.loaded.prefixes.missed_s
    time.sleep(0.01)
    assert not engine.idle_work and engine.idle_s  # a file is being written: it keeps its memory
    gate.set()
    until = time.monotonic() + 20
    while not engine.loaded.parking.is_parked:
        assert time.monotonic() < until
        if engine.idle_work:
            assert engine.step() == []
    assert engine.loaded.prefixes.missed_s is None
    other = opened("cpu", "qwen35moe", **more)
    other.submit(request)
    (done,) = (event for event in drained(other) if isinstance(event, Done))
    assert done.usage.cached_tokens == 448  # chunks of 64
