"""What an engine does while nobody asks for anything.

Files of prefixes are written that were missed, what was decoded is read again as a prompt, and at last the memory of
slots and cache goes back, to come again with the next request. All of it in units that a request waits for no longer
than it would for a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from engine.ground.errors import DeviceLostError, SparkError
from engine.memory.prefix_files import ROOM_S
from engine.ops.cuda.failures import translated
from engine.placing.plan import GIB
from engine.running.loaded import Loaded
from engine.serving.tasks import Rereading

_log = logging.getLogger(__name__)


class Idling:
    """The work of idle time: nothing of it is asked for, or done, while a request is unfinished.

    release_s: seconds without a request after which memory goes back; None: it stays.
    """

    def __init__(self, loaded: Loaded, release_s: float | None) -> None:
        self._parking, self._prefixes, self._loaded = loaded.parking, loaded.prefixes, loaded
        self._release_s = release_s
        self._since_s = time.monotonic()
        self._returning: Iterator[None] | None = None
        self._rereading: Rereading | None = None
        self._is_read = True  # nothing is left to be read again, as far as that can be done

    @property
    def is_away(self) -> bool:
        """Whether memory has gone back."""
        return self._parking.is_parked

    @property
    def is_returning(self) -> bool:
        """Whether a part of it is to come again."""
        return self._returning is not None

    @property
    def may_reread(self) -> bool:
        """Whether chunks that were decoded may be there to be read again."""
        return not self.is_away and self._prefixes.decoded_differ and not self._is_read

    @property
    def may_save(self) -> bool:
        """Whether a file that was missed can be written now."""
        return self._save_s == 0

    @property
    def may_release(self) -> bool:
        """Whether it is time for memory to go back; files that have to wait for long are no reason to keep it."""
        saves = self._save_s is not None and self._save_s <= ROOM_S
        return not saves and not self.may_reread and self._release_in_s == 0

    @property
    def has_work(self) -> bool:
        """Whether there is something to do now."""
        return self.may_save or self.may_reread or self.may_release or self.is_returning

    @property
    def wait_s(self) -> float | None:
        """Seconds until there may be; None: there is, or there will be nothing."""
        if self.has_work:
            return None
        return min((s for s in (self._release_in_s, self._save_s) if s), default=None)  # 0: it waits for the other

    @property
    def _save_s(self) -> float | None:
        return None if self.is_away else self._prefixes.missed_s

    @property
    def _release_in_s(self) -> float | None:
        if self._release_s is None or self.is_away:
            return None
        return max(0.0, self._since_s + self._release_s - time.monotonic())

    def begin(self) -> None:
        """Somebody asks for something, or is served: idle time begins anew."""
        self._since_s = time.monotonic()
        self._is_read = False
        self.close()

    def close(self) -> None:
        """Give back what is held to read again."""
        if self._rereading is not None:
            self._rereading.close()
            self._rereading = None

    def save(self) -> None:
        """Have a file written that was missed; where that fails, none of them is."""
        try:
            with translated():
                self._prefixes.save_missed()
        except DeviceLostError:
            raise
        except SparkError as error:
            _log.info("prefixes that were missed are not saved: %s", error)
            self._prefixes.forget_missed()

    def reread(self) -> None:
        """Read a chunk again that was decoded; where that fails, none before another request."""
        if self._rereading is None:
            tokens = self._prefixes.inexact()
            if tokens is None:
                self._is_read = True
                return
            self._rereading = Rereading(self._loaded, tokens)
        try:
            with translated():
                if self._rereading.read():
                    self.close()
        except DeviceLostError:
            raise
        except SparkError as error:
            _log.info("decoded chunks are not read again: %s", error)
            self.close()
            self._is_read = True

    def release(self) -> None:
        """Give back what an idle engine does not need."""
        with translated():
            n_bytes = self._parking.park()
        _log.info("idle for %g s: %.2f GiB went back", self._release_s, n_bytes / GIB)

    def take(self) -> SparkError | None:
        """Take some of it again; why it is not to be had: whoever waits is told, and the next one tries again."""
        if self._returning is None:
            self._returning = self._parking.unpark()
        try:
            next(self._returning)
        except StopIteration:
            self._returning = None
            _log.info("memory that had gone back is there again")
        except DeviceLostError:
            raise
        except SparkError as error:
            self._returning = None
            return error
        return None
