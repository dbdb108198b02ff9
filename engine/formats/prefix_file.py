"""Files of prefixes: one of each chunk of tokens, and of the state behind some chunks (docs/formats.md).

A name is a hash of all that the content depends on, and a chunk's file says which chunk is before it and what its own
tokens are. So a file proves its place: nothing in it is believed unless name, key, sizes and checksum fit together.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from engine.ground.files import open_regular

FORMAT = 2  # to be raised when what a file holds changes; the code that computed it is part of the key
LOCK = ".spark-lock"  # held by whoever uses the folder
NAME = re.compile(r"[0-9a-f]{64}\.(blocks|state)")
TEMPORARY = re.compile(rf"\.{NAME.pattern}\..*\.tmp")
HEADER_BYTES = 1 << 16
DIGEST_BYTES = 32
_PIECE_BYTES = 1 << 22
_READ_BYTES = 1 << 21  # that are read before their checksum is made, and still in the processor's cache then
_TOKEN = np.dtype("<i4")

Key = Mapping[str, str | int | Sequence[str]]
Origin = Mapping[str, str | bool]
Array = NDArray[Any]


class OtherVersionError(ValueError):
    """A file of a version of the format that this is not."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk belongs. before: the hash of the chunk before it, or of the key; ids: its tokens, as int32."""

    before: str
    ids: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """What a file says before its arrays.

    key: what the bits depend on besides the tokens. model: `path`, `architecture`, and `needs_state`: whether a prompt
    goes on only where there is a state. place: of a chunk. arrays: type and shape of each. begin: where their bytes do.
    """

    name: str
    key: dict[str, Any]
    model: dict[str, Any]
    place: Place | None
    arrays: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
    begin: int

    @property
    def sizes(self) -> list[int]:
        """Bytes of each array."""
        return [math.prod(shape) * dtype.itemsize for dtype, shape in self.arrays]

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.begin + sum(self.sizes) + DIGEST_BYTES

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The ids of a chunk, int32; none of a state."""
        return np.frombuffer(b"" if self.place is None else self.place.ids, _TOKEN)


def root(key: Key) -> str:
    """The hash that stands before the first chunk."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def following(before: str, ids: bytes) -> str:
    """The hash of a chunk: of all tokens up to its end, and of what they were computed with."""
    return hashlib.sha256(before.encode() + ids).hexdigest()


def opening(name: str, key: Key, model: Origin, place: Place | None, arrays: Sequence[Array]) -> bytes:
    """The bytes of a file before those of its arrays."""
    header: dict[str, Any] = {"spark": "prefix", "name": name, "key": key, "model": model}
    if place is not None:
        header |= {"before": place.before, "tokens": len(place.ids) // _TOKEN.itemsize}
    header["arrays"] = [[a.dtype.str, list(a.shape)] for a in arrays]
    return json.dumps(header).encode() + b"\n" + (b"" if place is None else place.ids)


def encoded(first: bytes, arrays: Sequence[Array]) -> Iterator[Any]:
    """The bytes of a file that begins so, piece by piece, of which the last is the checksum."""
    digest = hashlib.sha256(first)
    yield first
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        digest.update(data)
        yield data
    yield digest.digest()


def read_head(path: Path) -> Head:
    """Read what a file says of itself, and see that its name, its place and its size are true.

    Raises ValueError, which says what is wrong, OtherVersionError among them, and OSError.
    """
    with open_regular(path) as file:
        return _head(path.name, file)


def check(path: Path) -> Head:
    """The same, and its checksum."""
    with open_regular(path) as file:
        head = _head(path.name, file)
        file.seek(0)
        digest, left = hashlib.sha256(), head.n_bytes - DIGEST_BYTES
        while left and (piece := file.read(min(left, _PIECE_BYTES))):
            digest.update(piece)
            left -= len(piece)
        _compare(digest.digest(), file.read(DIGEST_BYTES + 1))
    return head


def read(path: Path, key: Key, sizes: Sequence[int], into: Callable[[int], Array]) -> list[Array]:
    """The arrays of a file that has this key and, each or all together, arrays of these sizes in bytes.

    into: asked once for memory, uint8 [n_bytes] of all arrays, which they are views of. Raises ValueError and OSError,
    before there is memory for more than that, and what `into` raises.
    """
    with open_regular(path) as file:
        head = _head(path.name, file)
        if head.key != key and head.key != json.loads(json.dumps(key)):  # one with tuples, say
            raise ValueError("it was made for something else")
        if list(sizes) not in (head.sizes, [sum(head.sizes)]):
            raise ValueError(f"its arrays have {sum(head.sizes)} bytes, and {sum(sizes)} were expected")
        file.seek(0)
        digest, data = hashlib.sha256(file.read(head.begin)), into(sum(head.sizes))
        for at in range(0, data.nbytes, _READ_BYTES):
            part = data[at : at + _READ_BYTES].data
            if file.readinto(part) != len(part):
                raise ValueError("its length is wrong")
            digest.update(part)
        _compare(digest.digest(), file.read(DIGEST_BYTES + 1))
    arrays, at = [], 0
    for (dtype, shape), n_bytes in zip(head.arrays, head.sizes, strict=True):
        arrays.append(data[at : at + n_bytes].view(dtype).reshape(shape))
        at += n_bytes
    return arrays


def _compare(made: bytes, found: bytes) -> None:
    if made != found:
        raise ValueError("its checksum is wrong")


def _head(name: str, file: IO[bytes]) -> Head:
    n_bytes, line = os.fstat(file.fileno()).st_size, file.readline(HEADER_BYTES)
    try:
        header = json.loads(line, parse_float=_refused, parse_constant=_refused)
        if header["spark"] != "prefix" or not line.endswith(b"\n"):
            raise ValueError
        key = header["key"]
        if key["format"] != FORMAT:
            raise OtherVersionError(f"it is of format {str(key['format'])[:20]}, and this version has {FORMAT}")
        if header["name"] != name:
            raise ValueError("it was made for something else")
        ids, place = b"", None
        if name.endswith(".blocks"):
            n_ids = _count(header["tokens"]) * _TOKEN.itemsize
            if n_ids > n_bytes:
                raise ValueError("its length is wrong")
            ids = file.read(n_ids)
            place = Place(_text(header["before"]), ids)
            if f"{following(place.before, ids)}.blocks" != name:
                raise ValueError("its name is not that of its tokens")
        arrays = tuple((_dtype(kind), tuple(map(_count, shape))) for kind, shape in header["arrays"])
        made = Head(name, dict(key), dict(header["model"]), place, arrays, len(line) + len(ids))
    except (KeyError, TypeError, RecursionError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError("it does not begin as a file of prefixes does") from error
    except ValueError as error:
        raise error if str(error) else ValueError("it does not begin as a file of prefixes does") from error
    if n_bytes != made.n_bytes:
        raise ValueError("its length is wrong")
    return made


def _refused(number: str) -> None:
    raise ValueError  # a header has no fractions, and those that are not finite would be no JSON


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise TypeError
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _dtype(kind: object) -> np.dtype[Any]:
    dtype = np.dtype(_text(kind))
    if dtype.kind not in "iuf":
        raise TypeError
    return dtype
