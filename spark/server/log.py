"""A log that makes nobody wait: a thread writes its lines, and what its reader does not take in time is left out.

A terminal that is stopped (Ctrl-S), a connection that stalls, or a parent that does not read its pipe would else stop
the server at the next line: a write to a full pipe waits, and everything on the event loop with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator

FORMAT = "%(asctime)s %(name)s: %(message)s"
MOST_LINES = 4096  # that wait to be written
_LAST_LINES_S = 1.0  # that the end waits for them


class _Handler(logging.Handler):
    """Hands lines to a thread that writes them to a descriptor, without a lock that the process's end needs."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_LINES)
        self._left_out = 0
        self._thread = threading.Thread(target=self._write_on, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line, if there is room for one."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._left_out += 1

    def finish(self) -> None:
        """Take no more, and wait for what is there, a little."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(_LAST_LINES_S)

    def _write_on(self) -> None:
        while (line := self._lines.get()) is not None:
            left_out, self._left_out = self._left_out, 0
            if left_out:
                line = f"{left_out} lines of the log were not taken in time, and are left out\n{line}"
            left = line.encode(errors="backslashreplace") + b"\n"
            with contextlib.suppress(OSError):  # of a full disk, or a reader that has left
                while left:
                    left = left[os.write(self._descriptor, left) :]


@contextlib.contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Log to stderr within the block."""
    handler = _Handler(sys.stderr.fileno())
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # what it warns of is a client that left in mid-reply
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.finish()
