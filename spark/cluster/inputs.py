"""Token files that workers read themselves, where they see what the driver does: a folder that is mounted, a URL.

The driver says of each file where it lies and what its footer is, which tells another file under that name, and of each
window which row it is and what it holds. So what a worker reads is what the driver would have sent. Where it cannot, it
says so, and windows are sent to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from engine.ground.errors import SparkError
from spark import storage
from spark.pipeline.tokens import TokensFile, Window

_HELD = 8  # row groups, of some MB each: windows are not asked for in their order
_MAGIC = b"PAR1"


@dataclass(frozen=True, slots=True)
class Source:
    """A token file. where: its URL, or its whole path; rows: how many; footer: a digest of its end and its size."""

    where: str
    rows: int
    footer: bytes


@dataclass(frozen=True, slots=True)
class Row:
    """A window of files, by its number in all of them; holds: a digest of what it is."""

    sources: tuple[Source, ...]
    number: int
    holds: bytes


class UnreadError(SparkError):
    """A window that cannot be read here, and has to be sent; without a message where the file is merely not here."""


def sources(file: TokensFile) -> tuple[Source, ...]:
    """What workers look for."""
    found = []
    for each in file.files:
        here = str(each.path.absolute())
        is_url = storage.local(each.name) is None and str(each.name).endswith(each.path.suffix)
        with storage.opened(here) as opened:
            found.append(Source(str(each.name) if is_url else here, each.n_windows, _footer(opened)))
    return tuple(found)


def row(given: tuple[Source, ...], number: int, window: Window) -> Row:
    """What is sent of a window to those who read it themselves."""
    return Row(given, number, _digest(window))


class Inputs:
    """The files, open for as long as the stack lasts; UnreadError where one is not to be seen, or is another."""

    def __init__(self, given: tuple[Source, ...], stack: contextlib.ExitStack) -> None:
        self._sources = given
        self._ends = list(accumulate(source.rows for source in given))
        self._files: list[pq.ParquetFile] = []
        for source in given:
            path = storage.local(source.where)
            if path is not None and not path.exists():
                raise UnreadError("")
            with _reading(source.where):
                opened = stack.enter_context(storage.opened(source.where))
                if _footer(opened) != source.footer:
                    raise UnreadError(f"{source.where} is another file here")
                self._files.append(pq.ParquetFile(opened, page_checksum_verification=True))
        self._group = lru_cache(_HELD)(self._read_group)

    def window(self, asked: Row) -> Window:
        """A window. Raises UnreadError where it cannot be read, or is not what the driver read."""
        number = bisect_right(self._ends, asked.number)
        source, file = self._sources[number], self._files[number]
        at = asked.number - (self._ends[number] - source.rows)
        with _reading(source.where):
            group = 0
            while at >= (rows := file.metadata.row_group(group).num_rows):
                at, group = at - rows, group + 1
            session, window, tokens, generated = (column[at] for column in self._group(number, group).columns)
            found = Window(
                session.as_py(), window.as_py(), tokens.values.to_numpy(),
                generated.values.to_numpy(zero_copy_only=False),
            )  # fmt: skip
        if _digest(found) != asked.holds:
            raise UnreadError(f"{source.where}: window {window} of session {session} is not what the driver read")
        return found

    def _read_group(self, number: int, group: int) -> pa.RecordBatch:
        return self._files[number].read_row_group(group).combine_chunks().to_batches()[0]


def _footer(file: IO[bytes]) -> bytes:
    """A digest of a Parquet file's size and footer, which says where each row group begins, and how long it is."""
    size = file.seek(0, 2)
    file.seek(max(0, size - 8))
    length, magic = struct.unpack("<I4s", file.read(8).rjust(8, b"\0"))
    file.seek(max(0, size - 8 - length) if magic == _MAGIC else size)
    return hashlib.sha256(size.to_bytes(8, "little") + file.read()).digest()


def _digest(window: Window) -> bytes:
    made = hashlib.sha256(f"{window.session_id}\0{window.window}\0{len(window.tokens)}\0".encode())
    made.update(window.tokens.tobytes())
    made.update(window.generated.tobytes())
    return made.digest()


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    try:
        yield
    except UnreadError:
        raise
    except SparkError as error:
        raise UnreadError(error.message) from error
    except Exception as error:  # each storage has its own
        said = " ".join(str(error).split()) or type(error).__name__
        raise UnreadError(f"cannot read {where}: {said}") from error
