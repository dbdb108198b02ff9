"""Parts of a trace that wait behind a URL until all is counted; then they get their names, all of them or none.

Whoever counts a window leaves its parts in a folder `.parts-XXXX` of the trace's, under names that say which window and
which of how many parts: `000003/000012293-1-of-3.parquet`. A window that is counted again has the same parts under the
same names, so it is there once, whoever ended meanwhile. In the end those of windows that count are copied, in the
order of the file, to the names that one machine would have given them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.formats.trace import part_name
from engine.ground.errors import SparkError, UsageError
from spark import storage

_FOLDER = ".parts-"
_MARK = "seen"
_PER_FOLDER = 4096  # windows: what is listed, and copied, at a time
_NAME = re.compile(r"(\d{9,})-(\d+)-of-(\d+)\.parquet")


def place(trace_url: str, before: str = "") -> str:
    """Where parts wait: where they did before, if that was for the same trace, else in a folder of a new name.

    Raises UsageError for a URL that names nothing, or is a pattern: of one, storage would remove what it matches.
    """
    if not trace_url.partition("://")[2].strip("/"):
        raise UsageError(f"{trace_url}: expected where the trace goes, found the kind of storage alone")
    if magic := set("*?[") & set(trace_url):
        raise UsageError(f"{trace_url}: expected one folder for the trace, found the {min(magic)} of a pattern")
    folder = f"{trace_url.rstrip('/')}/{_FOLDER}"
    return before if before.startswith(folder) else folder + secrets.token_hex(8)


def begin(where: str, left: str = "") -> str:
    """Make the place, or see that it is there; a mark by which others tell that they see it.

    left: where parts of a run waited that has counted nothing; they go. Raises UsageError where those of another run
    wait for this trace, which may want to go on.
    """
    trace_url, _, own = where.rpartition("/")
    for name in storage.names(trace_url):
        other = f"{trace_url}/{name}"
        if not name.startswith(_FOLDER) or name == own:
            continue
        if other != left and set(storage.names(other)) - {_MARK}:
            raise UsageError(
                f"parts of another run wait in {other}",
                hint="go on with that run, name another folder for --trace, or remove that one",
            )
        storage.remove(other)
    mark = secrets.token_hex(16)
    storage.put_bytes(mark.encode(), f"{where}/{_MARK}")
    return mark


def require(where: str, mark: str) -> None:
    """Raise SparkError, or MissingExtraError, unless parts can be left here so that who made the mark sees them."""
    found = storage.get_bytes(f"{where}/{_MARK}")
    if found != mark.encode():
        raise SparkError(f"cannot read {where}: expected what the driver wrote there, found another mark")
    own = secrets.token_hex(8)
    storage.put_bytes(b"", f"{where}/{own}")
    storage.remove(where, [own])


def leave(parts: Sequence[Path] | Sequence[bytes], where: str, window: int) -> None:
    """Leave the parts of a window, by its number in the file."""
    names = [f"{window // _PER_FOLDER:06}/{window:09}-{i}-of-{len(parts)}.parquet" for i in range(len(parts))]
    files = [(part, name) for part, name in zip(parts, names, strict=True) if isinstance(part, Path)]
    if files:
        storage.put(files, where)
    for part, name in zip(parts, names, strict=True):
        if isinstance(part, bytes):
            storage.put_bytes(part, f"{where}/{name}")


def check(where: str, counted: Callable[[int], bool], end: int) -> None:
    """Raise SparkError where a part of a counted window, of those below end, is not there any more."""
    for first in range(0, end, _PER_FOLDER):
        for _ in _complete(where, range(first, min(first + _PER_FOLDER, end)), counted):
            pass


def publish(where: str, counted: Callable[[int], bool], end: int, progress: Callable[[int, int], None]) -> None:
    """Give the parts of windows that are counted, of those below end, their names in the trace.

    They are still where they waited, too, so that this can be done again. Raises SparkError where parts are missing;
    what was copied is then removed.
    """
    trace_url, _, own = where.rpartition("/")
    n_parts = 0
    try:
        for first in range(0, end, _PER_FOLDER):
            progress(first, end)
            found = list(_complete(where, range(first, min(first + _PER_FOLDER, end)), counted))
            before, n_parts = n_parts, n_parts + len(found)
            storage.copy([(f"{own}/{name}", part_name(before + i)) for i, name in enumerate(found)], trace_url)
        progress(end, end)
    except BaseException:
        storage.remove(trace_url, [part_name(i) for i in range(n_parts)])
        raise


def remove(where: str) -> None:
    """Remove all that waits."""
    storage.remove(where)


def _complete(where: str, windows: range, counted: Callable[[int], bool]) -> Iterator[str]:
    """Names of the parts of the windows that are counted, in order."""
    folder = f"{windows.start // _PER_FOLDER:06}"
    parts: dict[int, dict[int, tuple[int, str]]] = {}
    for name in storage.names(f"{where}/{folder}"):
        if (match := _NAME.fullmatch(name)) is not None:
            window, i, n = map(int, match.groups())
            parts.setdefault(window, {})[i] = n, f"{folder}/{name}"
    for window in filter(counted, windows):
        mine = [found for _, found in sorted(parts.get(window, {}).items())]
        if not mine or len(mine) != mine[0][0]:
            raise SparkError(
                f"{where}/{folder} has {len(mine)} parts of window {window}, which was counted, "
                f"expected {mine[0][0] if mine else 'at least 1'}",
                hint="remove the checkpoint and the trace, and start again",
            )
        yield from (name for _, name in mine)
