"""What may happen to the threads of another process: they are stopped, moved to other cores, or get less of them.

A signal stops a process as a whole. A single thread is stopped by its tracer: who is the process's parent may trace it,
unless the system forbids it, and whatever was stopped goes on when the block, or the tracer, ends.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from engine.ground.cores import cpu_list
from engine.ops.jobs import THREAD_NAME

_DETACH, _SEIZE, _INTERRUPT = 17, 0x4206, 0x4207
_WALL = 0x40000000  # waits for threads, too
_STOP_S = 1.0  # that a thread has to stop
_PERIOD_US = 100_000
_GROUP = "spark-never-below"


def threads_of(pid: int, name: str = THREAD_NAME) -> list[int]:
    """Ids of a process's threads of that name, in ascending order."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            if path.read_text().strip() == name:
                found.append(int(path.parent.name))
    return sorted(found)


# --- stopped ------------------------------------------------------------------------------------------


@contextmanager
def stopped(threads: Iterable[int]) -> Iterator[None]:
    """Threads of a child process are stopped within the block, which one thread runs. OSError: it is not permitted."""
    with ExitStack() as stack:
        for thread in list(threads):
            _ptrace(_SEIZE, thread)
            stack.callback(_let_go, thread)
            _ptrace(_INTERRUPT, thread)
            _wait_stopped(thread)
        yield


def may_trace(pid: int) -> bool:
    """Whether threads of a child process can be stopped: its first one is, for a moment."""
    try:
        with stopped([pid]):
            return True
    except OSError:
        return False


def _wait_stopped(thread: int) -> None:
    until_s = time.monotonic() + _STOP_S
    while True:
        found, _ = os.waitpid(thread, _WALL | os.WNOHANG)
        if found == thread:
            return
        if time.monotonic() > until_s:
            raise TimeoutError(f"thread {thread} did not stop within {_STOP_S:g} s")
        time.sleep(1e-4)


def _let_go(thread: int) -> None:
    with suppress(OSError):  # it has ended
        _ptrace(_DETACH, thread)


def _ptrace(request: int, thread: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.argtypes, call.restype = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p), ctypes.c_long
    if call(request, thread, None, None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace of thread {thread}: {os.strerror(number)}")


# --- with less ----------------------------------------------------------------------------------------


@contextmanager
def moved(threads: Iterable[int], cpus: Iterable[int]) -> Iterator[None]:
    """Threads may run on these CPUs alone within the block, and then on those of before."""
    wanted, before = set(cpus), {}
    try:
        for thread in list(threads):
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, wanted)
        yield
    finally:
        for thread, allowed in before.items():
            with suppress(OSError):
                os.sched_setaffinity(thread, allowed)


@contextmanager
def quota(pid: int, n_cores: int = 1, root: Path = Path("/sys/fs/cgroup")) -> Iterator[str]:
    """A process has so many cores' time within the block; how that was done: by a cgroup, or else by affinity."""
    with ExitStack() as stack:
        for version in (_group_2, _group_1):
            try:
                yield stack.enter_context(version(pid, n_cores, root))
                return
            except _NoGroupError:
                continue
        threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
        cpus = sorted(os.sched_getaffinity(pid))[-n_cores:]
        stack.enter_context(moved(threads, cpus))
        yield f"affinity to {n_cores} of the cores: no cgroup can be made here"


class _NoGroupError(Exception):
    """No cgroup can be made, or nobody may be moved to it."""


def _group_2(pid: int, n_cores: int, root: Path):
    return _group(pid, root, {"cpu.max": f"{n_cores * _PERIOD_US} {_PERIOD_US}"}, "0", "cgroup 2")


def _group_1(pid: int, n_cores: int, root: Path):
    words = {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(n_cores * _PERIOD_US)}
    return _group(pid, root / "cpu", words, "cpu", "cgroup 1")


@contextmanager
def _group(pid: int, root: Path, words: dict[str, str], controller: str, what: str) -> Iterator[str]:
    folder, home = root / _GROUP, root / _path_of(pid, controller).lstrip("/")
    try:
        folder.mkdir(exist_ok=True)
        for name, text in words.items():
            if not (folder / name).exists():  # else a plain file would be made where no controller is
                raise OSError(f"{folder} has no {name}")
            (folder / name).write_text(text)
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        raise _NoGroupError(str(error)) from error
    try:
        yield what
    finally:
        with suppress(OSError):
            (home / "cgroup.procs").write_text(str(pid))
        with suppress(OSError):
            folder.rmdir()


def _path_of(pid: int, controller: str) -> str:
    """Where a process is among the cgroups of a controller; "0": of version 2."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            if number == controller or controller in names.split(","):
                return path
    return ""


def nodes(root: Path = Path("/sys/devices/system/node")) -> list[set[int]]:
    """The CPUs of each NUMA node that has any."""
    found = []
    for path in sorted(root.glob("node[0-9]*/cpulist")):
        if cpus := cpu_list(path.read_text()):
            found.append(cpus)
    return found
