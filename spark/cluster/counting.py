"""Calibration by the workers of a cluster: what `pipeline.calibrate.here` is to one daemon.

Windows are read in the order of the file, which decides what is recorded; they are counted in any order. A checkpoint
says which, so a run that goes on, with other workers or as many as it likes, ends with the profile of one machine.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.formats.trace import part_name
from engine.ground.errors import SparkError
from engine.ground.files import replacing
from spark.cluster.driver import Driver, Share
from spark.cluster.pool import Result, Task
from spark.cluster.schedule import SetAside
from spark.cluster.worker import Counts, Part, Recorded
from spark.console import clock, note
from spark.pipeline import calibrate, staged
from spark.pipeline.calibrate import Run
from spark.pipeline.checkpoints import Tally
from spark.pipeline.ledger import Ledger
from spark.pipeline.tokens import Window

PARTS = ".parts-"  # begins the name of a folder in a trace's, where workers leave parts
SAY_EVERY_S = 30.0
_SHOW_EVERY_S = 0.5
_MOST_NAMED = 8  # workers in a line of progress


def refusal(first: Mapping[str, Any], info: Mapping[str, Any], file_id: str = "") -> str:
    """Why a worker would count otherwise than the first, or than the driver's model file; empty where it would not."""
    ours, theirs = first["ready"], info["ready"]
    expected = file_id or ours["model"]["file_id"]
    if (found := theirs["model"]["file_id"]) != expected:
        return f"another model file lies there: found file id {found[:16]}, expected {expected[:16]}"
    if info["code"] != first["code"]:
        return f"other code is installed there: found {info['code']}, expected {first['code']}"
    for key in ("device", "kv_type", "ctx_tokens"):
        if theirs[key] != ours[key]:
            return f"its {key} is another: found {theirs[key]}, expected {ours[key]}"
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class _Counted:
    """All that is counted; a new one takes its place whole. numbers: of the windows that the ledger may lack yet."""

    counts: np.ndarray[Any, np.dtype[np.int64]]
    tokens: int
    generated_tokens: int
    parts: int
    numbers: tuple[int, ...]


class ClusterCounting:
    """A `calibrate.Counting` whose windows are counted by the workers of a driver, the first of which is ready.

    info: what it said. parts: `Counting.parts` of the workers.
    """

    def __init__(self, driver: Driver, info: Mapping[str, Any], parts: Path | None = None) -> None:
        self._driver, self._first, self._parts = driver, info, parts
        self._aside: tuple[SetAside, ...] = ()

    @property
    def info(self) -> Mapping[str, Any]:
        """What the first worker's daemon said when it was ready."""
        found: Mapping[str, Any] = self._first["ready"]
        return found

    @property
    def more(self) -> Mapping[str, Any]:
        """What `--json` has beside the figures of one machine."""
        shares = self._driver.shares
        return {
            "workers": [asdict(share) | {"tokens_per_s": share.rate} for share in shares],
            "set_aside": [{"window": each.task.name, "reasons": list(each.reasons)} for each in self._aside],
            "refused": dict(self._driver.refused),
        }

    def count(self, run: Run) -> Tally:
        """Count the windows of the file that the run's tally does not have; see `calibrate.Counting`."""
        job = _Job(run, self._parts)
        try:
            self._driver.run(job.tasks(), job)
        finally:
            self._aside = tuple(job.aside)
            if job.tally.windows or job.tally.ledger != Ledger():
                run.save(job.tally)
        return job.tally


class _Job:
    """Windows as tasks, and what is counted of them."""

    def __init__(self, run: Run, parts: Path | None) -> None:
        self._run, self._parts = run, parts
        start = run.tally
        for left in run.routing.glob(f"{PARTS}*"):  # of a driver that was killed
            shutil.rmtree(left, ignore_errors=True)
        if parts is not None:
            _make(parts)
        self._ledger = start.ledger or Ledger.of_first(start.windows)
        self._before = start
        self._n_windows = run.file.n_windows
        self._now = _Counted(start.counts, start.tokens, start.generated_tokens, start.trace_parts, ())
        self._n_done = start.windows
        self._shown = 0
        self._saved_s = self._said_s = time.monotonic()
        self._shown_s = 0.0
        self.aside: list[SetAside] = []
        if run.options.staged:
            staged.check(run.options.staged, start.has, start.end)
        if run.options.trace is not None and not start.windows:
            run.save(self.tally)  # so that a trace belongs to a checkpoint from its first part on

    @property
    def tally(self) -> Tally:
        """What is counted, whole windows alone, wherever this is asked from."""
        now = self._now
        self._ledger.add(now.numbers)
        return Tally(now.counts, len(self._ledger), now.tokens, now.generated_tokens, now.parts, self._ledger)

    def tasks(self) -> Iterator[Task]:
        """The windows that are not counted, in the order of the file."""
        run, read = self._run, 0
        for number, window in enumerate(run.file):
            if read >= run.total:
                return
            read += len(window.tokens)
            recorded = run.sample.takes(window) or run.options.trace_dir is not None
            if number not in self._ledger and number not in self._ledger.aside:
                name = f"window {window.window} of session {window.session_id}"
                yield Task(number, len(window.tokens), name, Recorded(window, recorded, number))

    def add(self, tasks: Sequence[Task], result: Result) -> None:
        """Count windows in; what they recorded is written first."""
        found: Counts = result.value
        assert len(tasks) == len(result.done), "a lease is taken back whole"
        now, parts = self._now, self._now.parts
        for each in found.parts:
            for part in each:
                parts = self._write(part, parts)
        for task, sent in zip(tasks, found.staged, strict=bool(found.staged)):
            if sent:
                staged.leave(sent, self._run.options.staged, task.number)
        self._ledger.add(now.numbers)
        windows: list[Window] = [task.payload.window for task in tasks]
        # One assignment, as in calibrate.py.
        self._now = _Counted(
            now.counts + found.counts.astype(np.int64),
            now.tokens + sum(len(window.tokens) for window in windows),
            now.generated_tokens + sum(int(np.count_nonzero(window.generated)) for window in windows),
            parts,
            tuple(task.number for task in tasks),
        )
        self._n_done += len(tasks)
        if self._before.windows == 0 and self._n_done == len(tasks):
            self._save()  # from here on the trace is of counted windows

    def set_aside(self, found: SetAside) -> None:
        """Note that a window is not counted."""
        self.aside.append(found)
        self._ledger.aside[found.task.number] = f"{found.task.name}: {'; '.join(found.reasons)}"
        self._save()

    def tick(self, now_s: float, driver: Driver) -> None:
        """Show how far it is; a line with every worker's speed now and then; keep a checkpoint."""
        run = self._run
        if now_s > self._shown_s + _SHOW_EVERY_S:
            self._shown_s = now_s
            self._shown = max(self._shown, min(self._now.tokens + driver.fed, run.total))
            run.progress("calibrating", self._shown, run.total)
        if now_s > self._said_s + SAY_EVERY_S:
            self._said_s = now_s
            note(progress_line(driver.shares, self._n_windows - self._n_done, run.total - self._now.tokens))
        if now_s > self._saved_s + calibrate.CHECKPOINT_EVERY_S:
            self._save()

    def _save(self) -> None:
        self._run.save(self.tally)
        self._saved_s = time.monotonic()

    def _write(self, part: Part, parts: int) -> int:
        """Add a part to the trace; the number of parts then."""
        folder: Path = self._run.routing
        if not parts:
            _make(folder)
        path = folder / part_name(parts)
        if isinstance(part, bytes):
            with replacing(path, "the trace", mode=0o600) as file:
                file.write(part)
            return parts + 1
        assert self._parts is not None
        try:
            (self._parts / part).rename(path)
        except OSError as error:
            raise SparkError(
                f"cannot write the trace {path}: {error.strerror or error}",
                hint=f"a worker left it in {self._parts}; does that folder's storage show each node what others write?",
            ) from error
        return parts + 1


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SparkError(f"cannot make the trace folder {folder}: {error.strerror or error}") from error


def progress_line(shares: Sequence[Share], windows_left: int, tokens_left: int) -> str:
    """`1,200 windows left, 48,000 tokens/s, 1:40 left: gpu-a/0 23,990, gpu-b/0 24,010`; of many workers the slowest."""
    working = sorted((share for share in shares if share.busy_s), key=lambda share: share.rate)
    named = [f"{share.node}/{share.index} {share.rate:,.0f}" for share in working[:_MOST_NAMED]]
    more = f", and {len(working) - _MOST_NAMED} faster ones" if len(working) > _MOST_NAMED else ""
    total = sum(share.rate for share in working)
    left = f", {clock(tokens_left / total)} left" if total else ""
    return f"{windows_left:,} windows left, {total:,.0f} tokens/s{left}: {', '.join(named)}{more}"
