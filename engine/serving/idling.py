"""Memory of slots and cache that goes back when nobody asks for anything, and comes again with the next request."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from engine.ground.errors import DeviceLostError, SparkError
from engine.memory.parking import Parking
from engine.ops.cuda.failures import translated
from engine.placing.plan import GIB

_log = logging.getLogger(__name__)


class Idling:
    """When memory goes back and comes again. after_s: seconds without a request; None: it stays."""

    def __init__(self, parking: Parking, after_s: float | None) -> None:
        self._parking, self._after_s = parking, after_s
        self._since_s = time.monotonic()
        self._returning: Iterator[None] | None = None

    @property
    def is_away(self) -> bool:
        """Whether memory has gone back."""
        return self._parking.is_parked

    @property
    def is_returning(self) -> bool:
        """Whether a part of it is to come again."""
        return self._returning is not None

    @property
    def left_s(self) -> float | None:
        """Seconds until memory goes back, if nobody asks for anything; None: it does not, or has."""
        if self._after_s is None or self.is_away:
            return None
        return max(0.0, self._since_s + self._after_s - time.monotonic())

    def begin(self) -> None:
        """Somebody asks for something, or is served: idle time begins anew."""
        self._since_s = time.monotonic()

    def release(self) -> None:
        """Give back what an idle engine does not need."""
        with translated():
            n_bytes = self._parking.park()
        _log.info("idle for %g s: %.2f GiB went back", self._after_s, n_bytes / GIB)

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
