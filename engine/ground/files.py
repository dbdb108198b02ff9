"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO

from engine.ground.errors import SparkError, UsageError

_STALE_S = 60.0  # a temporary file that is older, and that nobody holds, is of a process that was killed
_LOOK_S = 0.02  # between two looks at a file that others hold


@contextlib.contextmanager
def replacing(path: Path, what: str, *, mode: int = 0o644, hint: str = "") -> Iterator[IO[bytes]]:
    """A binary file that takes the place of `path` when the block ends without an exception.

    It is written under a temporary name in the same folder, synced and renamed, so a reader, a crash or a
    full disk never meets half a file; what was there before stays until then. A symbolic link stays one.
    What a process that was killed left of the same file is removed.
    A device or a pipe, which nothing can take the place of, is written to as it is. An OSError becomes a
    SparkError that names `what` and the path.
    """
    target = path.resolve()
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        remove_stale(target)
        temporary = temporary_name(target)
        try:
            with make_private(temporary) as file:
                yield file
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SparkError(
            f"cannot write {what} {path}: {error.strerror or error}",
            hint=hint or "is there such a folder, may you write there, and is there room?",
        ) from error


def temporary_name(target: Path) -> Path:
    """A name beside `target` that no file has.

    It is known before the file is there, so a Ctrl-C at any moment leaves none behind.
    """
    return target.parent / f".{target.name}.{secrets.token_urlsafe(6)}.tmp"


def make_private(path: Path) -> IO[bytes]:
    """Make a file that only its owner may read, open to be written, and hold it by `try_lock`."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
    try_lock(file.fileno())
    return file


def open_regular(path: Path) -> BufferedReader:
    """Open a file to be read; OSError for a pipe or a device, which may never begin, never end or not come twice."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(None, "expected a regular file, found a pipe, a device or a folder")
    return file


def try_lock(descriptor: int) -> bool:
    """Hold a file for as long as it is open; whether it is held, or cannot be where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def hold(path: Path, *, alone: bool, patience_s: float = 0.0) -> IO[bytes] | None:
    """Hold a file, which is made where there is none, until what is returned is closed, or the process ends.

    alone: while nobody else does; else beside others that hold it so. None where the file system has no locks. Raises
    BlockingIOError where others keep it for longer than patience_s, and OSError where it cannot be made, is no file or
    is a symbolic link, which could make a file anywhere.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if path.is_symlink():
            raise OSError(error.errno, f"its {path.name} is a symbolic link; remove that") from error
        if path.is_dir():
            raise OSError(error.errno, f"its {path.name} is a folder; remove that") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"its {path.name} is no file; remove that")
    file = os.fdopen(descriptor, "r+b")
    how, until_s = fcntl.LOCK_EX if alone else fcntl.LOCK_SH, time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file.fileno(), how | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= until_s:
                file.close()
                raise
            time.sleep(_LOOK_S)
        except OSError:
            file.close()
            return None


@contextlib.contextmanager
def alone(path: Path, busy: str) -> Iterator[None]:
    """Hold a file of no contents for the block, where the file system has locks; it goes with the block.

    Raises UsageError, which says `busy`, where another process holds it, and what `hold` does else.
    """
    try:
        while (held := hold(path, alone=True)) is not None:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(held.fileno()).st_ino:
                    break
            held.close()  # whoever held it before has just removed it
    except BlockingIOError:
        raise UsageError(busy, hint="wait for its end, or write somewhere else") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        if held is not None:
            held.close()


@contextlib.contextmanager
def scratch(parent: Path | None = None, prefix: str = "spark-scratch-") -> Iterator[Path]:
    """A private folder that goes with the block; what processes that were killed left beside it goes as well.

    parent: where it lies; default: the folder for temporary files. A folder is held by a lock for as long as its
    process lives, so none that is used is removed.
    """
    where = Path(tempfile.gettempdir()) if parent is None else parent
    _sweep(prefix, where)
    folder, held = _made(prefix, where)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)
        _sweep(prefix, where)  # whoever shared the work may have been killed meanwhile


def _sweep(prefix: str, parent: Path) -> None:
    """Remove the folders whose processes are gone."""
    for left in parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):  # of others, or removed by another just now
            held = _open_folder(left)
            try:
                if try_lock(held):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(held)


def _made(prefix: str, parent: Path) -> tuple[Path, int]:
    """A new folder, and a descriptor that holds it; another process may take it for left until it is held."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.suppress(FileNotFoundError):
            held = _open_folder(folder)
            with contextlib.suppress(OSError):  # a file system without locks, where nothing is swept either
                fcntl.flock(held, fcntl.LOCK_EX)
            if folder.exists():
                return folder, held
            os.close(held)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def remove_stale(target: Path) -> None:
    """Remove the temporary files `.NAME.XXXXXXXX.tmp` of `target` that no process writes any more.

    Those are the ones that are older than a minute and that nobody holds by `try_lock`.
    """
    for found in target.parent.glob(f".{glob.escape(target.name)}.????????.tmp"):
        with contextlib.suppress(OSError), found.open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > _STALE_S and try_lock(file.fileno()):
                found.unlink()
