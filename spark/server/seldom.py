"""Log lines that strangers can cause: once a minute of a kind, however often it happens."""

from __future__ import annotations

import logging
import threading
import time

EVERY_S = 60.0


class Seldom:
    """Warns of a kind of thing at most every `EVERY_S`; may be used by several threads."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # when it was last said, and how often it was not since

    def warning(self, kind: str, message: str) -> None:
        """Log a line, unless one of its kind was; the next says how many were left out."""
        now_s = time.monotonic()
        with self._lock:
            said_s, left_out = self._kinds.get(kind, (-EVERY_S, 0))
            if now_s < said_s + EVERY_S:
                self._kinds[kind] = said_s, left_out + 1
                return
            self._kinds[kind] = now_s, 0
        self._log.warning("%s%s", message, f" ({left_out} more like it since the last line)" if left_out else "")
