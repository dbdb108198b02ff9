"""What a daemon learns, and its profile's file, which other daemons may write too.

A daemon adds to the file as it is at that moment, and only what it counted since it last wrote there itself. So two
daemons of one profile end up with what one would have that had served the requests of both, except that what is old
fades in another order (`engine.formats.profile.merge`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.formats import profile as profiles
from engine.formats.profile import Profile
from engine.ground.errors import SparkError

PAST_WEIGHT = 0.5  # what a profile keeps at least when what was counted is merged in
_LOCK_S = 5.0  # how long another daemon may write; somebody else may hold the folder's lock for ever

Counts = npt.NDArray[np.int64]


class Learning:
    """Counts on top of a profile.

    base: the profile that the daemon began with, `path` its file; without one, an empty profile of the model and None:
    the first file that is written is the daemon's own then. counts: int64 [n_layer, n_expert], all uses since the start
    or since `reset`.
    """

    def __init__(self, base: Profile, path: Path | None) -> None:
        self._base = base  # what the daemon knows the uses before `_since` by
        self._path = path
        self._file = None if path is None else base  # as it was when it was last read or written
        self._since = self._written = np.zeros_like(base.counts)

    def learned(self, counts: Counts) -> Profile:
        """What is known by now: the base with the counts since merged in."""
        return profiles.merge(self._base, counts - self._since, PAST_WEIGHT)

    def reset(self) -> None:
        """Begin again with counts of 0."""
        self._since = self._written = np.zeros_like(self._since)

    def write(self, counts: Counts, path: Path, model_id: str) -> tuple[Profile, tuple[str, ...]]:
        """Write what is known to a file; it and warnings.

        If the file is the daemon's own and somebody else has changed it, it is taken for the base of what was counted
        since the last time. One that is no profile of this model any more is replaced, with a warning. Any other file
        becomes a copy. Raises SparkError where it cannot be written.
        """
        own = self._path is None or path.resolve() == self._path.resolve()
        with _locked(path.resolve().parent):
            found, warnings = self._changed(path, model_id) if own else (None, ())
            base, since = (self._base, self._since) if found is None else (found, self._written)
            made = profiles.merge(base, counts - since, PAST_WEIGHT)
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            made = replace(made, model_id=model_id, created=now)
            profiles.save(made, path)
        if own:
            self._base, self._since = base, since
            self._path, self._file, self._written = path, made, counts.copy()
        return made, warnings

    def _changed(self, path: Path, model_id: str) -> tuple[Profile | None, tuple[str, ...]]:
        """The profile in the file, None where it is the one that is known or there is none; warnings."""
        if not path.is_file():  # it was deleted, or never was, or is a device
            return None, ()
        n_layer, n_expert = self._base.counts.shape
        try:
            found, _ = profiles.load(path, model_id=model_id, shape=(n_layer, n_expert))
        except SparkError as error:
            return None, (f"what was at {path} is replaced by what this server knows: {error.message}",)
        return (None if found == self._file else found), ()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else who asks for it writes a profile in the folder meanwhile; on file systems that have such locks."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            # The folder, as the file is replaced and a lock of its own would be left lying about.
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, descriptor)
            end_s = time.monotonic() + _LOCK_S
            while time.monotonic() < end_s:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.01)
        yield
