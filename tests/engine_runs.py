"""A small engine on the device of the tests, and ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.drafting.source import Draft
from engine.ground.config import EngineConfig
from engine.ground.protocol import Event, Generate, Tokens
from engine.running.decoding import Nothing
from engine.running.loaded import Loaded
from engine.running.reply import Reply
from engine.running.stepping import Span
from engine.serving.scheduler import Engine


class Says(Nothing):
    """Proposes what a function says may follow a reply's last token."""

    def __init__(self, follow: Callable[[Reply], tuple[int, ...]]) -> None:
        self.follow = follow

    def propose(self, replies: Sequence[Reply]) -> list[Draft | None] | None:
        tokens = [self.follow(reply) for reply in replies]
        return [Draft("said", 0, follow) if follow else None for follow in tokens]


PROMPT = np.random.default_rng(50).integers(0, 301, 97).astype(np.int32)


def config(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": path, "device": "cuda", "threads": 1, "ctx_tokens": 130, "chunk_tokens": 40, "poison": True}
        | options
    )


def generate(engine: Engine, prompt: tuple[int, ...], **options: Any) -> tuple[list[int], list[Event]]:
    engine.submit(Generate(1, prompt, **{"max_tokens": 7, "stop_tokens": ()} | options))
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    return [t for e in events if isinstance(e, Tokens) for t in e.tokens], events


def feed(loaded: Loaded, tokens: np.ndarray, chunks: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] (of 64 tokens at the end of a longer chunk) and experts [L, T, A] of tokens fed in chunks."""
    sequence, start, logits, experts = loaded.kv.sequence(), 0, [], []
    for n in chunks:
        part = tokens[start : start + n]
        result = loaded.steps.run([Span(sequence, part, np.ones(n, bool), tuple(range(max(0, n - 64), n)))])
        logits.append(result.logits.copy())
        experts.append(result.experts.copy())
        start += n
    sequence.release()
    return np.concatenate(logits), np.concatenate(experts, axis=1)
