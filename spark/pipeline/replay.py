"""Recorded windows through a daemon: the one place that calibration and validation feed a model from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from engine.formats.gguf import GGUFFile
from engine.ground.config import EngineConfig
from engine.ground.errors import FileFormatError, RequestError, UsageError
from engine.ground.protocol import Done, Event, Tokens
from engine.ground.protocol import Progress as Fed
from engine.ground.sampling import Sampling
from spark.console import note
from spark.daemon.client import DaemonClient, Deadlines, engine_command
from spark.pipeline.tokens import Window

Progress = Callable[[str, int, int], None]  # what is being done, done so far, in total


def open_daemon(config: EngineConfig, deadlines: Deadlines, progress: Progress) -> DaemonClient:
    """Start the daemon and wait until it is ready, reporting each stage of loading under its own name.

    What it chose where nothing was asked for, the device first, is noted with the reason.
    """
    client = DaemonClient(engine_command(config), deadlines=deadlines, on_loading=progress)
    for reason in client.ready.info["reasons"]:
        if ": asked for" not in reason:
            _note_once(reason)
    return client


@cache
def _note_once(text: str) -> None:
    """A command that starts many daemons says once what they all chose."""
    note(text)


def require_experts(model: Mapping[str, Any]) -> None:
    """Refuse a model, as a daemon describes it, without experts: there is no routing to count and nothing to place."""
    if not model["expert_bytes"]:
        raise _without_experts(model["architecture"])


def require_experts_in(file: GGUFFile) -> None:
    """Refuse a model whose file says that it has no experts, before anything is asked for that there can't be."""
    if not file.value(f"{file.architecture}.expert_count", int, 0):
        raise _without_experts(file.architecture)


def _without_experts(architecture: str) -> UsageError:
    return UsageError(
        f"a {architecture} model has no experts, so there is nothing to count or to place",
        hint="spark serve runs it as it is",
    )


def within(progress: Progress, label: str, before: int, total: int) -> Callable[[int], None]:
    """`fed` of a window that `before` tokens of the total come before."""
    return lambda done: progress(label, min(before + done, total), total)


def finish(events: Iterable[Event], fed: Callable[[int], None] = lambda done: None) -> tuple[list[int], Done]:
    """Wait for the end of a request: the tokens it produced and its Done; `fed` hears how much of it is read."""
    tokens: list[int] = []
    done = None
    for event in events:
        if isinstance(event, Tokens):
            tokens += event.tokens
        elif isinstance(event, Fed):
            fed(event.done_tokens)
        elif isinstance(event, Done):
            done = event
    assert done is not None, "a stream ends with Done or raises"
    return tokens, done


def score(
    client: DaemonClient,
    window: Window,
    *,
    trace_dir: Path | None = None,
    hidden: bool = False,
    count: Literal["generated", "all"] = "generated",
    fed: Callable[[int], None] = lambda done: None,
) -> Done:
    """Feed a window teacher-forced; its routing is counted, and traced where `trace_dir` is given.

    fed: called with the tokens of it that are read, while it lasts: a window of a slow model takes minutes. Raises
    FileFormatError for a window that the model cannot have.
    """
    try:
        _, done = finish(
            client.score(
                window.tokens.tolist(), generated=window.generated.tolist(), session_id=window.session_id,
                window=window.window, trace_dir=trace_dir, hidden=hidden, count=count,
            ),
            fed,
        )  # fmt: skip
    except RequestError as error:
        raise FileFormatError(
            f"window {window.window} of session {window.session_id!r}: {error.message}",
            hint="`spark tokenize` makes files of windows as the model has them",
        ) from error
    return done


def go_on(client: DaemonClient, window: Window, n_tokens: int) -> None:
    """Have the model continue a window by so many tokens, or as many as the context has room for; they are counted."""
    room = client.ready.info["ctx_tokens"] - len(window.tokens)
    if room > 0:
        # Sampled, since greedy text of a small model repeats itself; the seed makes it reproducible.
        sampling = Sampling(temperature=0.8, top_p=0.95, seed=window.window)
        tokens = window.tokens.tolist()
        finish(client.generate(tokens, max_tokens=min(n_tokens, room), sampling=sampling, stop_tokens=[]))
