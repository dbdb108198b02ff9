"""What runs on a node: a daemon, fed with the windows of leases. Nothing here knows of the cluster's library."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import engine
import spark
from engine.formats.profile import Counted
from engine.formats.trace import part_paths
from engine.ground.config import EngineConfig
from engine.ground.errors import DaemonError, DeadlineError, DeviceLostError, SparkError
from engine.ground.files import scratch
from spark.cluster.pool import Result, Task
from spark.daemon.client import DaemonClient, Deadlines, engine_command
from spark.pipeline import replay
from spark.pipeline.tokens import Window


@dataclass(frozen=True, slots=True)
class Counting:
    """What a worker counts: the fields of CalibrateOptions that windows depend on."""

    count: Counted = "generated"
    generate_tokens: int = 0
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """The payload of a task. recorded: its routing comes back, too."""

    window: Window
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted in some windows. counts: unsigned [L, E], their sum. parts: the files of each one's trace."""

    counts: npt.NDArray[np.unsignedinteger[Any]]
    parts: tuple[tuple[bytes, ...], ...] = ()


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
        culprit, error = None, None
        before = 0
        for task in tasks:
            try:
                value = self._do(task.payload, before)
            except (DaemonError, DeadlineError, DeviceLostError) as failed:
                culprit = task.number, failed.message
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
        return Result(tuple(done), value, culprit, error, time.monotonic() - began_s)

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
    ) -> tuple[bytes, ...]:
        """Feed a window; the parts of its trace."""

        def fed(n_tokens: int) -> None:
            self._fed = before + n_tokens

        folder = self._trace() if recorded else None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        replay.score(self._client, window, trace_dir=folder, hidden=hidden, count=count, fed=fed)
        return () if folder is None else tuple(path.read_bytes() for path in part_paths(folder))

    def _trace(self) -> Path:
        """Where a trace is written; made when there is one, since a worker may be ended before."""
        if self._folder is None:
            self._folder = self._open.enter_context(scratch())
        return self._folder / "trace"


class CountingWorker(FeedingWorker):
    """A daemon that counts the routing of windows."""

    def __init__(self, config: EngineConfig, deadlines: Deadlines, asked: Counting) -> None:
        super().__init__(config, deadlines, asked)
        self._counting = asked

    def _do(self, payload: Recorded, before: int) -> tuple[npt.NDArray[np.int64], tuple[bytes, ...]]:
        """The counts of one window, and the parts of its trace."""
        counting, window = self._counting, payload.window
        self._client.profile("reset")
        parts = self._score(
            window, before, recorded=payload.recorded, hidden=counting.hidden, count=counting.count
        )
        if counting.generate_tokens:
            replay.go_on(self._client, window, counting.generate_tokens)
        return np.asarray(self._client.profile("read")["counts"], np.int64), parts

    def _together(self, values: Sequence[tuple[npt.NDArray[np.int64], tuple[bytes, ...]]]) -> Counts:
        total = np.sum([counts for counts, _ in values], axis=0)
        return Counts(total.astype(np.min_scalar_type(int(total.max()))), tuple(parts for _, parts in values))
