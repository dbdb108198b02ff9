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
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import engine
import spark
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

    count: Literal["generated", "all"] = "generated"
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


class CountingWorker:
    """A daemon that counts the routing of windows.

    Raises what the daemon raises that does not load, DeadlineError where that takes too long. `work` raises nothing of
    the kind; after a culprit the daemon is gone and so is the use of the worker. `fed` and `close` may be called from
    other threads.
    """

    def __init__(self, config: EngineConfig, deadlines: Deadlines, counting: Counting) -> None:
        self._counting = counting
        self._fed = 0
        self._folder: Path | None = None
        with contextlib.ExitStack() as stack:
            self._client = stack.enter_context(DaemonClient(engine_command(config), deadlines=deadlines))
            self._open = stack.pop_all()

    @property
    def info(self) -> Mapping[str, Any]:
        """What the daemon said when it was ready, the ids of both processes, and of the code."""
        ready = dict(self._client.ready.info)
        return {"ready": ready, "pid": os.getpid(), "daemon": self._client.pid, "code": code_id()}

    @property
    def fed(self) -> int:
        """Tokens of the lease that are read."""
        return self._fed

    def work(self, tasks: Sequence[Task]) -> Result:
        """Count the windows of a lease in turn, up to one that fails."""
        began_s, done, parts = time.monotonic(), [], []
        total: npt.NDArray[np.int64] | None = None
        culprit, error = None, None
        before = 0
        for task in tasks:
            try:
                counts, files = self._count(task.payload, before)
            except (DaemonError, DeadlineError, DeviceLostError) as failed:
                culprit = task.number, failed.message
                break
            except SparkError as failed:
                error = failed
                break
            total = counts if total is None else total + counts
            done.append(task.number)
            parts.append(files)
            before += task.cost
        self._fed = 0
        if culprit is not None:
            self.close()
        value = None
        if total is not None:
            value = Counts(total.astype(np.min_scalar_type(int(total.max()))), tuple(parts))
        return Result(tuple(done), value, culprit, error, time.monotonic() - began_s)

    def close(self) -> None:
        """End the daemon."""
        self._open.close()

    def _count(self, task: Recorded, before: int) -> tuple[npt.NDArray[np.int64], tuple[bytes, ...]]:
        """The counts of one window, and the parts of its trace."""

        def fed(n_tokens: int) -> None:
            self._fed = before + n_tokens

        client, counting = self._client, self._counting
        folder = self._trace() if task.recorded else None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        client.profile("reset")
        replay.score(client, task.window, trace_dir=folder, hidden=counting.hidden, count=counting.count, fed=fed)
        if counting.generate_tokens:
            replay.go_on(client, task.window, counting.generate_tokens)
        counts = np.asarray(client.profile("read")["counts"], np.int64)
        return counts, () if folder is None else tuple(path.read_bytes() for path in part_paths(folder))

    def _trace(self) -> Path:
        """Where a trace is written; made when there is one, since a worker may be ended before."""
        if self._folder is None:
            self._folder = self._open.enter_context(scratch())
        return self._folder / "trace"
