"""What runs on a node: a daemon, fed with the windows of leases. Nothing here knows of the cluster's library."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import engine
import spark
from engine.formats.profile import Counted
from engine.formats.trace import part_paths, without_hidden
from engine.ground.config import EngineConfig
from engine.ground.errors import DaemonError, DeadlineError, DeviceLostError, SparkError
from engine.ground.files import scratch
from spark.cluster.inputs import UnreadError
from spark.cluster.pool import Result, Task
from spark.daemon.client import DaemonClient, Deadlines, engine_command, why
from spark.pipeline import replay, staged
from spark.pipeline.tokens import Window

Part: TypeAlias = bytes | str


@dataclass(frozen=True, slots=True)
class Counting:
    """What a worker counts: the fields of CalibrateOptions that windows depend on.

    parts: a folder that the driver makes, under a name that no other has. A worker that sees it leaves the parts of its
    traces there; those of one that does not are sent. staged, mark: where those of every window wait behind a URL, if
    they do, and how a worker tells that what it leaves there is seen (pipeline/staged.py); else it sends them.
    """

    count: Counted = "generated"
    generate_tokens: int = 0
    hidden: bool = False
    parts: Path | None = None
    staged: str = ""
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The payload of a task. recorded: its routing comes back, too. number: of the window in the file."""

    window: Window
    recorded: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted in some windows.

    counts: unsigned [L, E], their sum. parts: of each one's trace: what the files hold, or the names that they were
    left under in `Counting.parts`. staged: of each one's, for the driver to leave in `Counting.staged`.
    """

    counts: npt.NDArray[np.unsignedinteger[Any]]
    parts: tuple[tuple[Part, ...], ...] = ()
    staged: tuple[tuple[bytes, ...], ...] = ()


@cache
def code_id() -> str:
    """The version, and a digest of the engine's sources: nodes of one code count the same."""
    assert engine.__file__ is not None
    root = Path(engine.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return f"{spark.__version__}+{digest.hexdigest()[:12]}"


class Worker:
    """What does the tasks of leases on a node, in turn.

    A kind of worker says what becomes of a task (`_do`) and of several (`_together`), and who `close` ends, on the
    stack of contexts `_open`. `work` raises nothing; after a culprit the worker is closed and of no more use. `fed` and
    `close` may be called from other threads.
    """

    def __init__(self, config: EngineConfig, deadlines: Deadlines, asked: Any) -> None:
        self._config, self._deadlines = config, deadlines
        self._fed = 0
        self._open = contextlib.ExitStack()

    @property
    def info(self) -> Mapping[str, Any]:
        """What it says of itself when it is ready: the ids of its process, and of the code."""
        return {"pid": os.getpid(), "code": code_id()}

    @property
    def fed(self) -> int:
        """What it did of the lease, in the cost of its tasks."""
        return self._fed

    def work(self, tasks: Sequence[Task]) -> Result:
        """Do the tasks of a lease, up to one that fails."""
        began_s, done, values = time.monotonic(), [], []
        culprit, error, unread = None, None, None
        before = 0
        for task in tasks:
            try:
                value = self._do(task.payload, before)
            except (DaemonError, DeadlineError, DeviceLostError) as failed:
                culprit = task.number, why(failed)
                break
            except UnreadError as failed:
                unread = failed.message
                break
            except SparkError as failed:
                error = failed
                break
            done.append(task.number)
            values.append(value)
            before += task.cost
        self._fed = 0
        if culprit is not None:
            self.close()
        value = self._together(values) if values else None
        return Result(tuple(done), value, culprit, error, unread, time.monotonic() - began_s)

    def close(self) -> None:
        """End what it started."""
        self._open.close()

    def _do(self, payload: Any, before: int) -> Any:
        """Do a task; before: the cost of those that are done of the lease. Raises SparkError."""
        raise NotImplementedError

    def _together(self, values: Sequence[Any]) -> Any:
        """What is sent back of several tasks."""
        raise NotImplementedError


class FeedingWorker(Worker):
    """A worker that feeds windows to a daemon.

    Raises what the daemon raises that does not load, DeadlineError where that takes too long.
    """

    def __init__(self, config: EngineConfig, deadlines: Deadlines, asked: Any) -> None:
        super().__init__(config, deadlines, asked)
        self._folder: Path | None = None
        self._client = self._open.enter_context(self._start())

    @property
    def info(self) -> Mapping[str, Any]:
        """What the daemon said when it was ready, the ids of both processes, and of the code."""
        return {**super().info, "ready": dict(self._client.ready.info), "daemon": self._client.pid}

    def _start(self) -> DaemonClient:
        return DaemonClient(engine_command(self._config), deadlines=self._deadlines)

    def _score(
        self, window: Window, before: int, *, recorded: bool, hidden: bool = False, count: Counted = "generated"
    ) -> list[Path]:
        """Feed a window; the parts of its trace, which the next one's take the place of."""

        def fed(n_tokens: int) -> None:
            self._fed = before + n_tokens

        folder = self._trace() / "trace" if recorded else None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        replay.score(self._client, window, trace_dir=folder, hidden=hidden, count=count, fed=fed)
        return [] if folder is None else part_paths(folder)

    def _trace(self) -> Path:
        """The folder that a trace is written in; made when there is one, since a worker may be ended before."""
        if self._folder is None:
            self._folder = self._open.enter_context(scratch())
        return self._folder


@dataclass(frozen=True, slots=True)
class _One:
    """What was made of one window; as in Counts."""

    counts: npt.NDArray[np.int64]
    parts: tuple[Part, ...] = ()
    staged: tuple[bytes, ...] = ()


class CountingWorker(FeedingWorker):
    """A daemon that counts the routing of windows."""

    def __init__(self, config: EngineConfig, deadlines: Deadlines, asked: Counting) -> None:
        super().__init__(config, deadlines, asked)
        self._counting = asked
        self._own: Path | None = None
        self._n_left = 0
        self._unseen = ""
        if asked.staged:
            try:
                staged.require(asked.staged, asked.mark)
            except SparkError as error:
                self._unseen = error.message

    @property
    def info(self) -> Mapping[str, Any]:
        """See FeedingWorker; and why its traces go through the driver, where they do."""
        words = self._unseen and f"its parts of the trace go through the driver: {self._unseen}"
        return {**super().info, "unseen": words}

    def _do(self, payload: Recorded, before: int) -> _One:
        """The counts of one window, and the parts of its trace."""
        counting, window = self._counting, payload.window
        self._client.profile("reset")
        recorded = payload.recorded or bool(counting.staged)
        found = self._score(window, before, recorded=recorded, hidden=counting.hidden, count=counting.count)
        sent: tuple[bytes, ...] = ()
        if counting.staged and self._unseen:
            sent = tuple(path.read_bytes() for path in found)
        elif counting.staged:
            staged.leave(found, counting.staged, payload.number)
        parts = tuple(self._part(path) for path in found) if payload.recorded else ()
        if counting.generate_tokens:
            replay.go_on(self._client, window, counting.generate_tokens)
        return _One(np.asarray(self._client.profile("read")["counts"], np.int64), parts, sent)

    def _part(self, path: Path) -> Part:
        """A part for the driver; of one that waits behind a URL, what slots are chosen by."""
        if self._counting.staged and self._counting.hidden:
            return without_hidden(path, self._client.ready.info["model"]["model_id"])
        return path.read_bytes() if self._own is None else self._left(path)

    def _trace(self) -> Path:
        """See FeedingWorker; beside the driver's trace where that can be."""
        shared = self._counting.parts
        if self._own is None and shared is not None:
            own = shared / secrets.token_hex(8)
            with contextlib.suppress(OSError):  # another node's, or not to be written from here
                if shared.stat().st_uid == os.getuid():  # so that the driver can read what is left there
                    own.mkdir()
                    self._own = own
        return self._own or super()._trace()

    def _left(self, part: Path) -> str:
        """Leave a part for the driver; its name in the folder of parts."""
        assert self._own is not None
        name = f"{self._own.name}/{self._n_left}"
        part.rename(self._own.parent / name)
        self._n_left += 1
        return name

    def _together(self, values: Sequence[_One]) -> Counts:
        total = np.sum([one.counts for one in values], axis=0)
        counts = total.astype(np.min_scalar_type(int(total.max())))
        return Counts(counts, tuple(one.parts for one in values), tuple(one.staged for one in values))
