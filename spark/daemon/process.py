"""A child process that leads a process group of its own and cannot outlive its owner's interest.

Ending it ends the whole group and reaps the child. The tail of its stderr is kept by a thread, so a
child that floods stderr is never blocked; its stdin is written with a deadline, so a child that does
not read blocks nobody.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.ground.protocol import read_lines

_TAIL_BYTES = 16384
_TAIL_LINES = 12
_LAST_WORDS_S = 1.0  # how long the rest of a dead child's stderr is waited for
_REAP_S = 10.0  # a killed process that does not go is stuck in the kernel and is left behind
_LOOK_S = 0.2


class UnwantedError(Exception):
    """What was to be written was taken back before any of it was."""


class ChildProcess:
    """A running command; raises OSError where it cannot be started."""

    def __init__(self, command: Sequence[str]) -> None:
        self._popen = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._popen.stdin and self._popen.stdout and self._popen.stderr
        self._stdin, self._stdout, self._stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr
        os.set_blocking(self._stdin.fileno(), False)
        self._tail = b""
        self._writing = threading.Lock()
        self._ending = threading.Lock()
        self._reaped = False
        self._drainer = threading.Thread(target=self._drain, name="stderr", daemon=True)
        self._drainer.start()

    @property
    def pid(self) -> int:
        """Its process id, which is the id of its process group too."""
        return self._popen.pid

    def lines(self) -> Iterator[bytes | None]:
        """Read its output line by line, None for a line that is too long; to be called once."""
        with self._stdout:
            yield from read_lines(self._stdout.fileno())

    def status(self, wait_s: float = 0.0) -> int | None:
        """Exit status, negative for a signal; None for a child that still runs after `wait_s`."""
        try:
            status = self._popen.wait(wait_s) if wait_s else self._popen.poll()
        except subprocess.TimeoutExpired:
            return None
        if status is None:
            return None
        with self._ending:
            if not self._reaped:
                self._reaped = True
                self._signal_group(signal.SIGKILL)  # what the child left behind
        return status

    def activity(self) -> tuple[str, int]:
        """Its state, a letter as `ps` has it, and its ticks of CPU time; empty and 0 where there is no /proc."""
        try:
            fields = Path(f"/proc/{self._popen.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return "", 0
        return fields[0], int(fields[11]) + int(fields[12])

    def stderr_tail(self) -> str:
        """Return the last lines that it wrote to stderr."""
        if self.status() is not None:
            self._drainer.join(_LAST_WORDS_S)
        return "\n".join(self._tail.decode(errors="replace").splitlines()[-_TAIL_LINES:])

    def write(self, data: bytes, patience_s: float, wanted: Callable[[], bool] = lambda: True) -> None:
        """Write all of `data`, whole even if other threads write too.

        wanted: asked now and then until the first byte is written. Raises TimeoutError where it takes more than
        `patience_s`, BrokenPipeError where it cannot be, UnwantedError where it is not wanted any more.
        """
        end_s = time.monotonic() + patience_s
        while not self._writing.acquire(timeout=max(0.0, min(_LOOK_S, end_s - time.monotonic()))):
            if time.monotonic() > end_s:
                raise TimeoutError
            if not wanted():
                raise UnwantedError
        try:
            self._write_all(memoryview(data), end_s, wanted)
        finally:
            self._writing.release()

    def begin_write(self, data: bytes) -> memoryview | None:
        """Write what is taken without waiting; what is left then, which is nothing where all was.

        What is left is the caller's to write, with `end_write`, and meanwhile nobody else writes. None: nothing was
        written, since another thread writes or nothing is taken now. Raises BrokenPipeError where it cannot be written.
        """
        if not self._writing.acquire(blocking=False):
            return None
        held = False
        try:
            if self._stdin.closed:
                raise BrokenPipeError
            try:
                left = memoryview(data)[os.write(self._stdin.fileno(), data) :]
            except BlockingIOError:
                return None
            held = bool(left)
            return left
        finally:
            if not held:
                self._writing.release()

    def end_write(self, left: memoryview, patience_s: float) -> None:
        """Write what `begin_write` left; raises as `write`."""
        try:
            self._write_all(left, time.monotonic() + patience_s, None)
        finally:
            self._writing.release()

    def _write_all(self, left: memoryview, end_s: float, wanted: Callable[[], bool] | None) -> None:
        """Write, by the thread that may; wanted: asked until the first byte is written, None: some were."""
        if self._stdin.closed:
            raise BrokenPipeError
        poll = select.poll()
        poll.register(self._stdin, select.POLLOUT)
        n = len(left)
        while left:
            if time.monotonic() > end_s:
                raise TimeoutError
            if wanted is not None and len(left) == n and not wanted():
                raise UnwantedError
            # A process that the child left behind may hold the pipe open: look at the child itself.
            if not poll.poll(1000 * _LOOK_S) and self.status() is not None:
                raise BrokenPipeError
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(self._stdin.fileno(), left) :]

    def close_stdin(self, patience_s: float) -> None:
        """Tell it that nothing more comes, unless another thread is stuck writing."""
        if self._writing.acquire(timeout=patience_s):
            self._stdin.close()
            self._writing.release()

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to the group, SIGKILL after `grace_s`, and reap the child."""
        try:
            if self.status() is None:
                self._signal_group(signal.SIGTERM)
                self.status(grace_s)
        finally:
            if self.status() is None:
                self._signal_group(signal.SIGKILL)
                self.status(_REAP_S)
            self.close_stdin(_LAST_WORDS_S)
            self._drainer.join(_LAST_WORDS_S)

    def _signal_group(self, number: int) -> None:
        # The id is the group's own until its leader is reaped, and this is never called much later.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)

    def _drain(self) -> None:
        with self._stderr:
            while chunk := os.read(self._stderr.fileno(), 1 << 16):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
