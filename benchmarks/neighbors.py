"""A neighbor of what is measured: `neighbors.py busy|copies|pcie [CPU]`, until it or its parent is killed.

busy: a loop that needs a core; copies: of host memory, as fast as it goes; pcie: from page-locked memory to a GPU and
back. CPU: the one that it is bound to. It says "ready" and waits for a line before it begins.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("busy", "copies", "pcie")
COPIED_BYTES = 64 << 20  # at once: more than a core's share of any cache
_PR_SET_PDEATHSIG = 1


class Neighbors:
    """Processes that do something in `at_work` alone; `ready` waits until they could begin. `close` when done.

    The thread that makes them must stay: they end with it.
    """

    def __init__(self, kind: str, n: int, cpus: Sequence[int] | None = None) -> None:
        self.kind, self._ready, self._began = kind, False, False
        command = [sys.executable, str(Path(__file__).resolve()), kind]
        words = [[str(cpu)] for cpu in cpus] if cpus is not None else [[]] * n
        self._processes = [
            subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stdin=subprocess.PIPE) for more in words
        ]

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._processes]

    def ready(self) -> None:
        """Wait until each has what it needs. RuntimeError: one has ended."""
        for process in [] if self._ready else self._processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"a neighbor ({self.kind}) ended with {process.wait(5)}")
        self._ready = True

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """They run within the block."""
        self.ready()
        try:
            for process in self._processes:
                self._begin(process)
            self._began = True
            yield
        finally:
            for process in self._processes:
                process.send_signal(signal.SIGSTOP)

    def _begin(self, process: subprocess.Popen[bytes]) -> None:
        if self._began:
            process.send_signal(signal.SIGCONT)
            return
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()

    def close(self) -> None:
        """End them; twice does no harm."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            for pipe in filter(None, (process.stdin, process.stdout)):
                with suppress(BrokenPipeError):
                    pipe.close()


def busy(is_wanted: Iterator[None]) -> None:
    for _ in is_wanted:
        for _ in range(100_000):
            pass


def copies(is_wanted: Iterator[None]) -> None:
    import numpy as np

    source, to = np.ones(COPIED_BYTES, np.uint8), np.zeros(COPIED_BYTES, np.uint8)
    for _ in is_wanted:
        np.copyto(to, source)


def pcie(is_wanted: Iterator[None]) -> None:
    sys.path.insert(0, str(ROOT))
    import numpy as np

    from engine.ops.cuda import gpu

    device = gpu.open_device(0)
    host, there = device.page_locked(COPIED_BYTES), device.empty((COPIED_BYTES,), np.uint8)
    places = device.pointer(host), device.pointer(there)
    for _ in is_wanted:
        for to, source in (places, places[::-1]):
            device.copy(to, source, COPIED_BYTES)
            device.synchronize()


def wanted(parent: int) -> Iterator[None]:
    """As long as there is who started this."""
    print("ready", flush=True)
    sys.stdin.readline()
    while os.getppid() == parent:
        yield


def main() -> None:
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in KINDS:
        sys.exit(f"usage: neighbors.py {'|'.join(KINDS)} [CPU]")
    parent = os.getppid()
    if sys.platform == "linux":  # one that is stopped would not see that nobody is there any more
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if len(sys.argv) == 3:
            os.sched_setaffinity(0, {int(sys.argv[2])})
    {"busy": busy, "copies": copies, "pcie": pcie}[sys.argv[1]](wanted(parent))


if __name__ == "__main__":
    main()
