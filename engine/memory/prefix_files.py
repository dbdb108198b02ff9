"""Prefixes on disk: a folder with a file for the blocks of each chunk of tokens, and one for each snapshot.

A name is a hash of all that the content depends on, so a file is never stale nor overwritten with something else; the
folder needs no index, and several daemons and models can share one. Files appear whole or not at all, end in a
checksum, and the least recently used go first. What is in them: engine/formats/prefix_file.py.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.formats import prefix_file
from engine.formats.prefix_file import DIGEST_BYTES, FORMAT, LOCK, Key, Origin, Place
from engine.ground.errors import CapacityError, SparkError, UsageError
from engine.ground.files import hold, replacing, try_lock

WAITING_BYTES = 512 << 20  # what may wait to be written; what comes on top is missed
RETRY_S = 60.0  # how long nothing is saved after a file could not be written
ROOM_S = 0.05  # how often it is looked whether there is room to wait
END_S = 5.0  # how long files that wait are written at the end: whoever ends a daemon waits for ten seconds at most
AHEAD_BYTES = 256 << 20  # of files that are read before they are asked for, beside the largest
_TOGETHER = 8  # files that room is made for at a time, if there are: it is waited for
_READERS = 8  # threads at most that do
_MOST_MISSED = 1 << 14  # names
_LOCK_S = 10.0  # how long somebody may take who removes files from the folder
_STALE_S = 60.0  # a temporary file that nobody holds and that is so old was left behind by a crash
_LOOK_S = 5.0  # how often it is looked what other daemons have written, used and removed
_LOOK_SHARE = 20  # and no more than one in so many seconds of looking

_log = logging.getLogger(__name__)

Into = Callable[..., list[NDArray[np.uint8]]]  # gives memory of each of so many bytes
_Job = tuple[str, list[NDArray[Any]], Place | None]
_TIMES: _Job = ("", [], None)  # say which files were used


class PrefixFiles:
    """The files of one model in a folder that may hold those of others.

    key: what the bits depend on besides the tokens. budget_bytes: of the whole folder. model: what is said of it to who
    lists the folder. A thread writes, others read what is expected to be asked for (`expect`), since checksums take as
    long as a disk; `get` and the rest are for one other thread. Nothing but the constructor raises, and what gives
    memory to read into: what fails is a warning with a `reason`. Until it is closed nobody else may remove files, but
    daemons for room. What could not be written or had no room to wait is *missed*: it can be put again, when `missed_s`
    says so.
    """

    def __init__(self, folder: Path, key: Key, budget_bytes: int, model: Origin | None = None) -> None:
        self._folder, self._key, self._budget = folder, {"format": FORMAT, **key}, budget_bytes
        self._model: Origin = model or {}
        self.root = prefix_file.root(self._key)
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}  # the least recently used first
        self._doubted: set[str] = set()  # take room until they are written again
        self._waiting: dict[str, int] = {}
        self._missed: dict[str, int] = {}  # and bytes; the oldest first
        self._queue: Queue[_Job | None] = Queue()
        self._used: dict[str, int] = {}  # files whose times are to be set, in ns; nothing else says so to other daemons
        self._thread: threading.Thread | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._ahead: dict[str, tuple[Future[list[NDArray[Any]]], int]] = {}  # and bytes
        self._ahead_bytes = self._largest_bytes = 0  # of all; of one that was begun with since `expect`
        self._expected: deque[tuple[str, Many[int]]] = deque()  # behind those
        self._into: Into
        self._look_s = 0.0  # when the folder is looked at again
        self._again_s = 0.0  # when files are written again after one could not be
        self._end_s = math.inf  # when what waits is given up
        self._told = ""  # why none could be written, as was warned of last
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._held = hold(folder / LOCK, alone=False, patience_s=_LOCK_S)
            foreign = self._scan()
        except BlockingIOError as error:
            raise UsageError(
                f"--cache-dir {folder}: files are being removed from it for more than {_LOCK_S:g} s",
                hint="wait until `spark sessions drop` has ended",
            ) from error
        except OSError as error:
            why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror or error
            raise UsageError(f"--cache-dir {folder}: {why}", hint="name a folder that you may write to") from error

        if foreign:
            _warn("foreign_files", f"{self._folder}: {foreign} files that are not Spark's are left alone")

    def _scan(self) -> int:
        """Learn what is in the folder; how many files of others are."""
        self._set_times()
        began_s = time.monotonic()
        found, foreign = [], 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another daemon's
                    status = entry.stat(follow_symlinks=False)
                    if entry.name == LOCK:
                        continue
                    if prefix_file.NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        found.append((status.st_mtime_ns, entry.name, status.st_size))
                    elif not prefix_file.TEMPORARY.fullmatch(entry.name):
                        foreign += 1
                    elif time.time() - status.st_mtime > _STALE_S:
                        _remove_left(Path(entry.path))
        sizes = {name: n_bytes for _, name, n_bytes in sorted(found)}
        with self._lock:
            self._sizes = sizes
        now_s = time.monotonic()
        self._look_s = now_s + max(_LOOK_S, _LOOK_SHARE * (now_s - began_s))
        return foreign

    @property
    def n_bytes(self) -> int:
        """Bytes of the files in the folder, of all models."""
        with self._lock:
            return sum(self._sizes.values())

    def has(self, name: str) -> bool:
        """Whether there is such a file, though it may turn out damaged."""
        with self._lock:
            return name in self._sizes and name not in self._doubted

    def wants(self, name: str, n_bytes: int) -> bool:
        """Whether `put` would save it: it is not there, and there is room for it to wait; else it is missed."""
        with self._lock:
            there = name in self._waiting or (name in self._sizes and name not in self._doubted)
            if there or n_bytes > self._budget:
                self._missed.pop(name, None)
                return False
            if time.monotonic() >= self._again_s and self._has_room(n_bytes):
                return True
            self._miss(name, n_bytes)
            return False

    def _has_room(self, n_bytes: int) -> bool:
        waiting = sum(self._waiting.values())
        return not waiting or waiting + n_bytes <= WAITING_BYTES

    def _miss(self, name: str, n_bytes: int) -> None:
        self._missed[name] = n_bytes
        if len(self._missed) > _MOST_MISSED:
            del self._missed[next(iter(self._missed))]

    @property
    def missed(self) -> frozenset[str]:
        """The names of what is missed."""
        with self._lock:
            return frozenset(self._missed)

    def forget_missed(self, but: Iterable[str] = ()) -> None:
        """Nothing that is missed can be put again, but these."""
        with self._lock:
            self._missed = {name: self._missed[name] for name in but if name in self._missed}

    @property
    def missed_s(self) -> float | None:
        """Seconds after which something that is missed may be put again; None: nothing is missed."""
        with self._lock:
            if not self._missed:
                return None
            pause_s = self._again_s - time.monotonic()
            return pause_s if pause_s > 0 else 0.0 if self._has_room(min(self._missed.values())) else ROOM_S

    def put(self, name: str, arrays: Many[NDArray[Any]], place: Place | None = None) -> None:
        """Write a file soon; the arrays must not change any more. place: of a chunk."""
        n_bytes = sum(a.nbytes for a in arrays)
        if not self.wants(name, n_bytes):
            return
        with self._lock:
            self._waiting[name] = n_bytes
            self._missed.pop(name, None)
        self._ask((name, list(arrays), place))

    def _ask(self, job: _Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="prefix files", daemon=True)
            self._thread.start()
        self._queue.put(job)

    def get(self, name: str, sizes: Many[int], into: Into) -> list[NDArray[Any]] | None:
        """The arrays of a file, or None where there is none or it is not what its name says.

        sizes: bytes that each has, or all together. into: gives memory for all of them; what it raises is raised.
        """
        reading, n_bytes = self._ahead.pop(name, (None, 0))
        self._ahead_bytes -= n_bytes
        if reading is None and any(name == other for other, _ in self._expected):
            while self._expected.popleft()[0] != name:  # what was passed over is not asked for any more
                pass
        self._read_ahead()
        if not self.has(name):
            return None
        try:
            if reading is not None:
                return reading.result()
            return prefix_file.read(self._folder / name, self._key, sizes, lambda n: into(n)[0])
        except FileNotFoundError:  # another daemon needed the room
            with self._lock:
                self._sizes.pop(name, None)
        except (OSError, ValueError, MemoryError) as error:
            self.doubt([name])
            why = (isinstance(error, OSError) and error.strerror) or error
            _warn("damaged_file", f"{self._folder / name} is ignored, as a damaged file: {why}")
        finally:
            del reading  # it has the error, whose traceback has this frame: its memory would stay for a while
        return None

    def expect(self, files: Iterable[tuple[str, Many[int]]], into: Into) -> None:
        """Say what is asked for next, by names and sizes as `get` has them: it is read meanwhile, and nothing else.

        into: as for `get`, and asked in this thread; where it raises CapacityError, nothing is read ahead any more.
        """
        self.expect_nothing()
        self._expected, self._into = deque(files), into
        self._read_ahead()

    def expect_nothing(self) -> None:
        """Let what is read ahead be for nothing."""
        self._expected.clear()
        for reading, _ in self._ahead.values():
            reading.cancel()
        wait(reading for reading, _ in self._ahead.values())  # they write to memory that may be somebody else's next
        self._ahead.clear()
        self._ahead_bytes = self._largest_bytes = 0

    def _read_ahead(self) -> None:
        """Begin with what is expected, as far as there is room, and once there is for several files."""
        if not self._expected:
            return
        n_bytes, least = self._ahead_bytes, min(_TOGETHER * sum(self._expected[0][1]), AHEAD_BYTES // 2)
        if len(self._ahead) > 1 and n_bytes - self._largest_bytes + least > AHEAD_BYTES:
            return
        found: dict[str, Many[int]] = {}
        while self._expected and n_bytes - self._largest_bytes < AHEAD_BYTES:
            name, sizes = self._expected.popleft()
            if name not in self._ahead and self.has(name):
                found[name] = sizes
                n_bytes += sum(sizes)
                self._largest_bytes = max(self._largest_bytes, sum(sizes))
        if not found:
            return
        memory: list[NDArray[np.uint8]] = []
        while found and not memory:
            try:
                memory = self._into(*map(sum, found.values()))
            except CapacityError:  # fewer, and none behind these
                self._expected.clear()
                found = dict(itertools.islice(found.items(), len(found) // 2))
        if self._readers is None:
            self._readers = ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), "prefix reader")
        for (name, sizes), own in zip(found.items(), memory, strict=True):
            self._ahead[name] = self._readers.submit(self._read, name, sizes, own), sum(sizes)
            self._ahead_bytes += sum(sizes)

    def _read(self, name: str, sizes: Many[int], memory: NDArray[np.uint8]) -> list[NDArray[Any]]:
        return prefix_file.read(self._folder / name, self._key, sizes, lambda n_bytes: memory[:n_bytes])

    def doubt(self, names: Iterable[str]) -> None:
        """Let files be as if they were not there until they are written again."""
        with self._lock:
            self._doubted.update(names)

    def touch(self, names: Iterable[str]) -> None:
        """Say that files were used; the first name is the last to go."""
        with self._lock:
            is_asked, now = bool(self._used), time.time_ns()  # finer than the clock that files are written by
            for i, name in enumerate(reversed(list(names))):
                if name in self._sizes:
                    self._sizes[name] = self._sizes.pop(name)
                    self._used[name] = now + i
            is_asked |= not self._used
        if not is_asked:  # of many files it takes milliseconds, which the engine does not wait for
            self._ask(_TIMES)

    def _set_times(self) -> None:
        with self._lock:
            used, self._used = self._used, {}
        for name, ns in used.items():
            with contextlib.suppress(OSError):
                os.utime(self._folder / name, ns=(ns, ns))

    def flush(self) -> None:
        """Wait until everything that was put is written, and said of what was used."""
        self._queue.join()

    def close(self) -> None:
        """Write what waits, for no longer than END_S, and stop."""
        self.expect_nothing()
        if self._readers is not None:
            self._readers.shutdown()
            self._readers = None
        if self._thread is not None:
            self._end_s = min(self._end_s, time.monotonic() + END_S)
            self._queue.put(None)
            self._thread.join()
            self._thread = None
            if self._missed:
                _log.info("%d files of prefixes were not written before the end", len(self._missed))
        if self._held is not None:
            self._held.close()
            self._held = None

    # --- writing, in the thread -------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if job is _TIMES:
                self._set_times()
                self._queue.task_done()
                continue
            name, arrays, place = job
            written, failed = 0, time.monotonic() >= self._end_s
            try:
                written = 0 if failed else self._write(name, arrays, place)
            except (OSError, MemoryError, SparkError) as error:  # no reason to stop serving
                failed = True
                self._failed(error.message if isinstance(error, SparkError) else repr(error))
            with self._lock:
                n_bytes = self._waiting.pop(name)
                if failed:
                    self._miss(name, n_bytes)
                if written:
                    self._told = ""
                    self._doubted.discard(name)
                    self._sizes.pop(name, None)
                    self._sizes[name] = written
            del job, arrays
            self._queue.task_done()
        self._queue.task_done()

    def _failed(self, why: str) -> None:
        """Write nothing for a while; say so once for each reason, until a file is written again."""
        kind, is_paused = why.rpartition(": ")[2], time.monotonic() < self._again_s  # the names of files differ
        if kind != self._told and not is_paused:
            _warn("files_not_written", f"no prefixes are saved for {RETRY_S:g} s, then it is tried again: {why}")
        self._told, self._again_s = kind, time.monotonic() + RETRY_S

    def _write(self, name: str, arrays: list[NDArray[Any]], place: Place | None) -> int:
        first = prefix_file.opening(name, self._key, self._model, place, arrays)
        n_bytes = len(first) + sum(a.nbytes for a in arrays) + DIGEST_BYTES
        if not self._make_room(n_bytes) or not self._is_clear(self._folder / name):
            return 0
        with replacing(self._folder / name, "a cached prefix", mode=0o600) as file:
            for piece in prefix_file.encoded(first, arrays):
                file.write(piece)
        return n_bytes

    def _is_clear(self, path: Path) -> bool:
        """Remove what has the name of a file and is none; False for a folder, in whose place no file is written."""
        with contextlib.suppress(FileNotFoundError):
            kind = path.lstat().st_mode
            if stat.S_ISDIR(kind):
                if path.name not in self._doubted:
                    _warn("foreign_files", f"{path} is a folder: what it stands for is not saved")
                self.doubt([path.name])
                return False
            if not stat.S_ISREG(kind):  # a link would be followed, a pipe waited for
                path.unlink()
        return True

    def _make_room(self, n_bytes: int) -> bool:
        """Remove what was not used for longest, until there is room; False where that cannot be had."""
        if time.monotonic() >= self._look_s:
            self._scan()
        with self._lock:
            total, oldest = sum(self._sizes.values()), list(self._sizes)
        for name in oldest:
            if total + n_bytes <= self._budget:
                break
            with contextlib.suppress(OSError):  # one that stays is counted, and others go
                (self._folder / name).unlink(missing_ok=True)
                with self._lock:
                    total -= self._sizes.pop(name, 0)
        return total + n_bytes <= self._budget


def _remove_left(path: Path) -> None:
    """Remove a temporary file whose writer is gone."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if try_lock(file.fileno()):
            path.unlink()


def _warn(reason: str, message: str) -> None:
    _log.warning("%s", message, extra={"reason": reason})
