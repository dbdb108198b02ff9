"""The processes that a process has started, and theirs, as Linux tells it; elsewhere none are found.

Only those that stayed in the session of the first: one that has made a session of its own is meant to go on by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_LOOK_S = 0.05


class Process(NamedTuple):
    """A process; `started` tells it from a later one that got the same id."""

    pid: int
    started: int


class Descendants:
    """Remembers the descendants of a process, which nobody finds any more when it has ended."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._known: set[Process] = set()

    def look(self) -> None:
        """Look for those that there are now."""
        table = {pid: found for pid in _pids() if (found := _read(pid)) is not None}
        first = table.get(self._pid)
        if first is None:
            return
        children: dict[int, list[int]] = {}
        for pid, found in table.items():
            children.setdefault(found.parent, []).append(pid)
        left = [self._pid]
        while left:
            for pid in children.get(left.pop(), ()):
                left.append(pid)
                if table[pid].session == first.session:
                    self._known.add(Process(pid, table[pid].started))

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to those that are left, and SIGKILL after `grace_s`."""
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 0.0)):
            for process in self._alive():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, number)
            end_s = time.monotonic() + wait_s
            while self._alive() and time.monotonic() < end_s:
                time.sleep(_LOOK_S)

    def _alive(self) -> list[Process]:
        return [p for p in self._known if (found := _read(p.pid)) and found.started == p.started and found.runs]


class _Stat(NamedTuple):
    parent: int
    session: int
    started: int
    runs: bool


def _pids() -> list[int]:
    try:
        return [int(path.name) for path in _PROC.iterdir() if path.name.isdecimal()]
    except OSError:
        return []


def _read(pid: int) -> _Stat | None:
    """What /proc has of a process; None where there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 1 :].split()  # the name before it may hold anything
    return _Stat(int(fields[1]), int(fields[3]), int(fields[19]), fields[0] not in ("Z", "X"))
