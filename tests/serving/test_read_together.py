"""Prompts that are read in one step: what each says, to the bit, is what it says where it is read alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.ground.errors import CapacityError, SparkError
from engine.ground.protocol import Done, Error, Event, Generate, Tokens
from engine.ground.sampling import Sampling
from engine.serving.scheduler import Engine
from engine.serving.tasks import GenerateTask

# Every kind of layer, and no more of it than emulation has time for.
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "n_layer": 4, "n_head_kv": (3, 1, 3, 1), "windowed": (True, False) * 2, "n_ff": (512,) * 4, "n_expert_used": 2,
    },
    "qwen35moe": {"n_layer": 2, "interval": 2},
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
EMULATED = [pytest.param("cuda", arch, marks=pytest.mark.slow) for arch in ARCHS]


@pytest.mark.parametrize(("backend", "arch"), [*(("cpu", arch) for arch in ARCHS), *EMULATED])
def test_rests_of_every_kind_beside_others(opened: Open, backend: str, arch: str) -> None:
    """Prompts that are a rest, and prompts with a piece before it."""
    engine = opened(backend, arch, chunk_tokens=1536, parallel=16)
    requests = [asked(i + 1, tokens(i, n)) for i, n in enumerate(RESTS)]
    if backend == "cpu":
        requests += [asked(i + 20, tokens(i + 20, 512 + n)) for i, n in enumerate(RESTS)]
    else:
        requests += [asked(20, tokens(20, 545)), asked(21, tokens(21, 1500))]
    expected = alone(engine, requests)
    engine.chunks.clear()
    for request in requests:
        engine.submit(request)
    assert drain(engine) == expected
    check_steps(engine)
    shared = [chunks for chunks in engine.chunks if len(chunks) > 1]
    assert shared and len(engine.chunks) < len(requests)
    sizes = {n for chunks in shared for _, _, n in chunks}
    assert 33 in sizes and (arch != "qwen3moe" or {511, 512, 513} <= sizes)
