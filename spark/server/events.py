"""What the page at `/` is told, as server-sent events: the model when it is (re)started, and a sample each second.

One task asks the daemon, at most once a second and only while somebody watches. Counters are totals since the start;
who reads them takes differences, so samples may be missed and readers may come at any time. Nothing of a request is in
them but numbers, and words of ours (spark/server/board.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

from engine.ground.errors import OverloadedError, SparkError
from spark.server.board import Board
from spark.server.supervisor import Health, Supervisor, aside

_log = logging.getLogger(__name__)
MAX_WATCHERS = 16
EVERY_S = 1.0
_SHOWN = ("device", "isa", "threads", "ctx_tokens", "parallel", "chunk_tokens", "kv_type", "policy", "residency_pct",
          "draft", "kv_recall", "kv_recall_blocks", "kv_recall_from", "reasons", "warnings")  # fmt: skip
_COUNTED = ("running", "queued", "tokens", "hits", "misses", "hits_by_layer", "misses_by_layer", "map", "kv_blocks",
            "prefixes", "plan")  # fmt: skip


class Counters:
    """The engine's counters, asked for by one task however many want them."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._asking: asyncio.Task[dict[str, Any]] | None = None

    async def get(self, patience_s: float) -> dict[str, Any] | None:
        """The counters; None where the daemon does not answer in time, because it is in a long step, or is gone."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(aside(self._supervisor.stats))
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # it was looked at
        with contextlib.suppress(TimeoutError, SparkError):
            return await asyncio.wait_for(asyncio.shield(self._asking), patience_s)
        return None


class Feed:
    """The events. replies: how many are being made; name: what the model is called. Closed, it ends for all."""

    def __init__(
        self, supervisor: Supervisor, counters: Counters, replies: Callable[[], int], name: str, board: Board
    ) -> None:
        self._supervisor, self._counters, self._replies, self._name = supervisor, counters, replies, name
        self._board = board
        self._sampling: asyncio.Task[None] | None = None
        self._sample = b""
        self._number = 0
        self._sampled = asyncio.Condition()
        self._closed = False
        self.watchers = 0

    def close(self) -> None:
        """End it within a second; may be called by a signal handler."""
        self._closed = True

    @contextlib.contextmanager
    def place(self) -> Iterator[AsyncGenerator[bytes]]:
        """Take a place among the readers; its events, and a slow one misses samples. Raises OverloadedError."""
        if self.watchers >= MAX_WATCHERS:
            raise OverloadedError(f"{MAX_WATCHERS} pages are shown already")
        self.watchers += 1
        try:
            yield self._watch()
        finally:
            self.watchers -= 1
            if not self.watchers and self._sampling is not None:
                self._sampling.cancel()
                self._sampling = None

    async def _watch(self) -> AsyncGenerator[bytes]:
        if self._sampling is None:
            self._sampling = asyncio.create_task(self._sample_on())
        starts = -1
        while not self._closed:
            seen = self._number
            async with self._sampled:
                while self._number == seen and not self._closed:
                    await self._sampled.wait()
            if starts != self._supervisor.restarts:
                starts = self._supervisor.restarts
                yield _event("model", self._model())
            yield self._sample

    async def _sample_on(self) -> None:
        while not self._closed:
            began_s = time.monotonic()
            try:
                # Both wait at once, so that what is said of a daemon that does not answer costs no time of its own.
                stats, health = await asyncio.gather(self._counters.get(EVERY_S), self._supervisor.health(EVERY_S))
                self._sample = _event("sample", self._figures(stats, health))
            except Exception:  # whatever it was, there may be a next one
                _log.exception("a sample for the page could not be made")
            await self._tell()
            await asyncio.sleep(max(0.0, began_s + EVERY_S - time.monotonic()))
        await self._tell()

    async def _tell(self) -> None:
        async with self._sampled:
            self._number += 1
            self._sampled.notify_all()

    def _figures(self, stats: Mapping[str, Any] | None, health: Health) -> dict[str, Any]:
        """One sample; `engine` is left out where the daemon did not answer: what it counts is not known then."""
        alive = self._supervisor.alive
        state = health.state if not stats else "ready"  # it has answered since it was looked at
        made: dict[str, Any] = {
            "time_s": time.monotonic(),
            "up": alive,
            "daemon": state if alive else "down",
            "silent_s": round(health.silent_s, 1),
            "restarts": self._supervisor.restarts,
            "replies": self._replies(),
            "requests": self._board.figures(),
        }
        if alive and stats:
            made["engine"] = {key: stats[key] for key in _COUNTED if key in stats}
            if drafts := stats.get("drafts"):
                made["engine"]["drafts"] = drafts["tokens"]
            if recall := stats.get("recall"):
                made["engine"]["recall"] = recall
            if met := _met(stats):
                made["engine"]["met"] = met
        return made

    def _model(self) -> dict[str, Any]:
        info = self._supervisor.ready.info
        model = info.get("model", {})
        return {
            "name": self._name,
            "architecture": model.get("architecture", info.get("architecture")),
            "experts": model.get("n_expert", 0),
            "used": model.get("n_expert_used", 0),
            "layers": model.get("moe_layers", []),
            **{key: info[key] for key in _SHOWN if key in info},
        }


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _met(stats: Mapping[str, Any]) -> dict[str, float]:
    """What became of missed experts that did not cross PCIe when their layer asked; empty where all do.

    `computed` and `divided`: by the CPU, in whole or in part, of decoding steps. `useful`, `wasted`: guesses.
    """
    cpu, guesses = stats.get("cpu_experts") or {}, stats.get("guesses") or {}
    found: dict[str, float] = {key: cpu[key] for key in ("divided", "taken_back", "waited_s") if key in cpu}
    if cpu:
        found["computed"] = cpu["computed"] - (cpu.get("long") or {}).get("computed", 0)  # those are of prompts
    # On a CPU guesses are counted, and bring nothing.
    return found | {key: guesses[key] for key in ("useful", "wasted") if "on" in guesses}
