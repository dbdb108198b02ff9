"""`spark serve`, or its daemon, with an engine that takes no time: what is left is what the programs around it cost.

    python benchmarks/instant.py serve|daemon PAUSE_S --ctx-tokens=N MODEL.gguf

The tokenizer and the template are the model's; every reply is the same word, as often as tokens are asked for. A prompt
takes no time, and each token after the first PAUSE_S.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine import daemon
from engine.ground import protocol
from engine.ground.config import EngineConfig
from engine.ground.errors import RequestError
from engine.ground.protocol import Done, Event, Generate, Score, Timing, Tokens, Usage
from engine.text import tokenizer
from spark.server import app


class InstantEngine:
    """Answers with a token of each request in turn a step; pause_s: before each that is not the first of its reply."""

    def __init__(
        self, config: EngineConfig, progress: Callable[[protocol.Stage, int, int], None], *, pause_s: float
    ) -> None:
        self._pause_s = pause_s
        self._ctx_tokens = config.ctx_tokens or 1 << 16
        self._word = tokenizer.load(config.model).encode(" word")[:1]
        self._running: deque[tuple[Generate, int]] = deque()  # and how many tokens it has

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._running)

    @property
    def idle_work(self) -> bool:
        """Nothing is done where nobody asks."""
        return False

    @property
    def idle_s(self) -> float | None:
        """Nothing ever is."""
        return None

    def hello(self) -> dict[str, Any]:
        """Say what it is."""
        return {"architecture": "instant"}

    def ready(self) -> dict[str, Any]:
        """Say how long prompts may be."""
        return {"ctx_tokens": self._ctx_tokens}

    def submit(self, request: Generate | Score) -> None:
        """Take a request."""
        if not isinstance(request, Generate):
            raise RequestError("an engine that takes no time gives no scores")
        self._running.append((request, 0))

    def step(self) -> list[Event]:
        """Make a token of the request whose turn it is, or its end."""
        request, n = self._running.popleft()
        if n and self._pause_s:
            time.sleep(self._pause_s)
        if n < request.max_tokens:
            self._running.append((request, n + 1))
            return [Tokens(request.id, tuple(self._word))]
        usage = Usage(len(request.tokens), n)
        return [Done(request.id, usage, Timing(0.0, 0.0), {}, "length")]

    def cancel(self, request_id: int) -> bool:
        """Forget a request."""
        found = [job for job in self._running if job[0].id == request_id]
        for job in found:
            self._running.remove(job)
        return bool(found)

    def stats(self) -> dict[str, Any]:
        """Count nothing."""
        return {}

    def profile(self, action: str, path: Path | None) -> dict[str, Any]:
        """Count nothing."""
        return {}

    def close(self) -> None:
        """Hold nothing."""


def command(config: EngineConfig, pause_s: float) -> list[str]:
    """What runs the daemon."""
    return [sys.executable, __file__, "daemon", str(pause_s), *protocol.command_line(config)]


def server(config: EngineConfig, pause_s: float) -> list[str]:
    """What runs the server, on a free port."""
    return [sys.executable, __file__, "serve", str(pause_s), *protocol.command_line(config)]


def main() -> int:
    what, pause, *arguments = sys.argv[1:]
    if what == "daemon":
        return daemon.run(functools.partial(InstantEngine, pause_s=float(pause)), arguments)
    app.engine_command = functools.partial(command, pause_s=float(pause))
    app.serve(app.ServeOptions(daemon.parse_arguments(arguments), port=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
