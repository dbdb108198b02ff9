"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from engine.errors import SparkError


@contextlib.contextmanager
def replacing(path: Path, what: str, *, mode: int = 0o644, hint: str = "") -> Iterator[IO[bytes]]:
    """A binary file that takes the place of `path` when the block ends without an exception.

    It is written under a temporary name in the same folder, synced and renamed, so a reader, a crash or a
    full disk never meets half a file; what was there before stays until then. A symbolic link stays one.
    A device or a pipe, which nothing can take the place of, is written to as it is. An OSError becomes a
    SparkError that names `what` and the path.
    """
    target = path.resolve()
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
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
