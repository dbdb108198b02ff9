"""The header of one GGUF file: metadata and tensor table, parsed off a memory map.

Nothing that the file says is believed: every count and length is compared with the bytes that remain before anything
is read or allocated, so a malformed file costs one ModelFormatError, little time and no memory. Of a file that is still
being downloaded the header can be read as soon as it is there.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, Final, overload

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QType
from gguf import GGUFValueType as ValueType

from engine.formats.quants import row_bytes
from engine.ground.errors import ModelFormatError

# What no honest file exceeds: bounds on time and memory for files so large that their size is none.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit
_MAX_NAME_BYTES = 255
_MAX_STRING_BYTES = 1 << 26  # some converters keep a whole tokenizer.json in one
_MAX_STRINGS = 1 << 22
_MAX_STRINGS_BYTES = 1 << 28
_MAX_DIMS = 4
_MAX_ITEMS = 1 << 28  # of an array of numbers
_MAX_FILE_BYTES = 1 << 44  # that a header may speak of
_HOLE_BYTES = 64  # zeros where a name is expected: a download fills the file in from several places

_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one character, type, the smallest value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_SCALARS: Final = {
    ValueType.UINT8: "<B", ValueType.INT8: "<b", ValueType.UINT16: "<H", ValueType.INT16: "<h",
    ValueType.UINT32: "<I", ValueType.INT32: "<i", ValueType.UINT64: "<Q", ValueType.INT64: "<q",
    ValueType.FLOAT32: "<f", ValueType.FLOAT64: "<d", ValueType.BOOL: "<B",
}  # fmt: skip
_REMOVED_TYPES = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
_DAMAGED = "the file is truncated or damaged: download or copy it again"


class UnfinishedHeaderError(ModelFormatError):
    """A file that is not there, or ends inside its header."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table.

    shape: NumPy order, slowest axis first. path: the file that holds the data. offset, nbytes: where in it, in
    bytes from its beginning.
    """

    name: str
    qtype: QType
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


class StringArray(Sequence[str]):
    """The strings of a metadata array, decoded when asked for; invalid UTF-8 is a ModelFormatError then."""

    __slots__ = ("_data", "_offsets", "_where")

    def __init__(self, data: mmap.mmap, offsets: array[int], where: str) -> None:
        self._data, self._offsets, self._where = data, offsets, where

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def _decode(self, i: int) -> str:
        raw = self._data[self._offsets[i] + 8 : self._offsets[i + 1]]
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"{self._where}: string {i} is not valid UTF-8: {raw[:40]!r}") from error

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        at = range(len(self))[i]
        return self._decode(at) if isinstance(at, int) else [self._decode(j) for j in at]

    def __iter__(self) -> Iterator[str]:
        return map(self._decode, range(len(self)))


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says. data_offset: where its header ends and tensor data begins; end: where those end."""

    path: Path
    data: mmap.mmap
    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    data_offset: int
    end: int


def read_header(path: Path, partial: bool = False) -> Header:
    """Map a GGUF file and parse its header; ModelFormatError names the key or tensor that is wrong.

    partial: the tensors' data need not be there. A file that ends inside its header is an UnfinishedHeaderError then.
    """
    cursor = _Cursor(path, _map(path), partial)
    cursor.take(4, "the magic")
    version = cursor.scalar(ValueType.UINT32, "the version")
    if version & 0xFFFF == 0:
        raise cursor.error("is a big-endian GGUF file", "convert it to little-endian (gguf-convert-endian)")
    if version not in (2, 3):
        raise cursor.error(f"has GGUF version {version}, expected 2 or 3", "convert the model again")
    n_tensors = cursor.count("the number of tensors", _MAX_TENSORS, _MIN_TENSOR_BYTES)
    n_keys = cursor.count("the number of keys", _MAX_KEYS, _MIN_KEY_BYTES)

    metadata: dict[str, Any] = {}
    for i in range(n_keys):
        key = cursor.name(f"the name of key {i}", _MAX_KEY_BYTES)
        if not key or key in metadata:
            raise cursor.error(f"key {key!r} occurs twice" if key else f"key {i} has an empty name")
        metadata[key] = cursor.value(key)

    tensors: dict[str, TensorInfo] = {}
    for i in range(n_tensors):
        tensor = cursor.tensor(i)
        if tensor.name in tensors:
            raise cursor.error(f"tensor {tensor.name!r} occurs twice")
        tensors[tensor.name] = tensor

    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"key 'general.alignment' is {describe(alignment)}, expected a power of two")
    data_offset = (cursor.at + alignment - 1) // alignment * alignment
    placed = _place(cursor, tensors.values(), data_offset, alignment)
    end = max((t.offset + t.nbytes for t in placed), default=cursor.at)  # a vocabulary alone ends without padding
    return Header(path, cursor.data, metadata, placed, min(data_offset, cursor.end), end)


def describe(value: Any) -> str:
    """A metadata value in an error message: its type, and the value where that is short."""
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype.name}"
    if isinstance(value, StringArray):
        return f"an array of {len(value)} strings"
    return f"the {type(value).__name__} {value!r:.60}"


def _map(path: Path) -> mmap.mmap:
    try:
        mode = path.stat().st_mode
        if not S_ISREG(mode):
            found = "a directory" if S_ISDIR(mode) else "not a regular file"
            raise ModelFormatError(f"{path}: is {found}, expected a GGUF file")
        with path.open("rb") as file:
            head = file.read(24)
            if head[:4] == b"GGUF" and len(head) == 24:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelFormatError(f"{path}: cannot be opened: {reason}") from error
    if not head:
        raise UnfinishedHeaderError(f"{path}: is empty", hint="the download may have failed: fetch it again")
    if head[:4] == b"GGUF"[: len(head)]:
        raise UnfinishedHeaderError(f"{path}: ends inside the GGUF header", hint=_DAMAGED)
    if not any(head):
        raise UnfinishedHeaderError(f"{path}: begins with zeros, not with a header", hint="let the download go on")
    pointer = head.startswith(b"version https://git-lfs")
    raise ModelFormatError(
        f"{path}: is not a GGUF file: it begins with {head[:4]!r}, expected b'GGUF'",
        hint="this is a Git LFS pointer: run `git lfs pull`" if pointer else "convert the model to GGUF first",
    )


class _Cursor:
    """Reads values off the mapped bytes, never past their end. `what` names them in the error."""

    def __init__(self, path: Path, data: mmap.mmap, partial: bool) -> None:
        self.path, self.data, self.at, self.end, self.partial = path, data, 0, len(data), partial

    def error(self, message: str, hint: str = "") -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {message}", hint=hint)

    def ended(self, message: str, there: int | None = None) -> ModelFormatError:
        """The error for what does not fit in the rest of the file; there: where the bytes end that it has."""
        if not self.partial:
            return self.error(message, _DAMAGED)
        found = self.end if there is None else there
        return UnfinishedHeaderError(
            f"{self.path}: {found:,} bytes are there, and its header is longer: more are needed",
            hint="let the download go on; headers take 5 to 30 MB",
        )

    def take(self, n_bytes: int, what: str) -> int:
        """Step over `n_bytes`; returns where they begin."""
        start = self.at
        if n_bytes > self.end - start:
            remain = f"only {self.end - start} remain"
            raise self.ended(f"{what} needs {n_bytes} bytes at byte {start}, but {remain}")
        self.at = start + n_bytes
        return start

    def scalar(self, kind: ValueType, what: str) -> Any:
        layout = _SCALARS[kind]
        (value,) = struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout), what))
        if kind != ValueType.BOOL:
            return value
        if value > 1:
            raise self.error(f"{what} is a bool with the value {value}")
        return value == 1

    def count(self, what: str, limit: int, item_bytes: int) -> int:
        """A count of things of at least `item_bytes` each, which can all still be there."""
        n: int = self.scalar(ValueType.UINT64, what)
        if n > (self.end - self.at) // item_bytes and not (self.partial and n > limit):
            raise self.ended(f"{what} is {n}, but only {self.end - self.at} bytes remain")
        if n > limit:
            raise self.error(f"{what} is {n}, more than the {limit} that are accepted")
        return n

    def string(self, what: str, limit: int) -> str:
        n = self.count(f"the length of {what}", limit, 1)
        start = self.take(n, what)
        raw = self.data[start : start + n]
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not valid UTF-8: {raw[:40]!r}") from error

    def name(self, what: str, limit: int) -> str:
        """A string that messages and tables can show as it is."""
        found = self.string(what, limit)
        if not found and self.partial and not any(self.data[self.at : self.at + _HOLE_BYTES]):
            raise self.ended(what, self.at)
        if not found.isprintable():
            raise self.error(f"{what} is not printable: {found[:40]!r}")
        return found

    def value_type(self, what: str) -> ValueType:
        number = self.scalar(ValueType.UINT32, f"the type of {what}")
        try:
            return ValueType(number)
        except ValueError as error:
            raise self.error(f"{what} has the unknown value type {number}") from error

    def value(self, key: str) -> Any:
        what = f"key {key!r}"
        kind = self.value_type(what)
        if kind == ValueType.STRING:
            return self.string(what, _MAX_STRING_BYTES)
        if kind != ValueType.ARRAY:
            return self.scalar(kind, what)
        item = self.value_type(f"the items of {what}")
        if item == ValueType.ARRAY:
            raise self.error(f"{what} is an array of arrays, which no known model has")
        if item == ValueType.STRING:
            return self.strings(key, self.count(f"the item count of {what}", _MAX_STRINGS, 8))
        dtype = np.dtype(np.bool_ if item == ValueType.BOOL else _SCALARS[item])
        n = self.count(f"the item count of {what}", _MAX_ITEMS, dtype.itemsize)
        start = self.take(n * dtype.itemsize, what)
        if item == ValueType.BOOL and np.frombuffer(self.data, np.uint8, n, start).max(initial=0) > 1:
            raise self.error(f"{what} holds bools that are neither 0 nor 1")
        return np.frombuffer(self.data, dtype, n, start)

    def strings(self, key: str, n: int) -> StringArray:
        """Step over `n` strings, keeping only where each begins. A large vocabulary spends its time here."""
        limit = self.at + _MAX_STRINGS_BYTES
        end = min(self.end, limit)
        data, at, offsets = self.data, self.at, array("q", [self.at])
        length_at, append = struct.Struct("<Q").unpack_from, offsets.append
        for i in range(n):
            if at + 8 <= end:
                at += 8 + length_at(data, at)[0]
            if at > end or at == offsets[i]:
                reaches = f"string {i} of key {key!r} reaches past byte {end}"
                raise self.ended(reaches) if end < limit and at <= limit else self.error(reaches, _DAMAGED)
            append(at)
        self.at = at
        return StringArray(data, offsets, f"{self.path}: key {key!r}")

    def tensor(self, i: int) -> TensorInfo:
        """A row of the tensor table; its offset still counts from the beginning of the tensor data."""
        name = self.name(f"the name of tensor {i}", _MAX_NAME_BYTES)
        what = f"tensor {name!r}"
        if not name:
            raise self.error(f"tensor {i} has an empty name")
        n_dims = self.scalar(ValueType.UINT32, what)
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self.error(f"{what} has {n_dims} dimensions, expected 1 to {_MAX_DIMS}")
        row = struct.Struct(f"<{n_dims}QIQ")
        *dims, number, offset = row.unpack_from(self.data, self.take(row.size, what))
        shape = tuple(reversed(dims))
        if number in _REMOVED_TYPES:
            raise self.error(f"{what} has type {_REMOVED_TYPES[number]} ({number}), which GGUF has dropped")
        try:
            qtype = QType(number)
        except ValueError as error:
            raise self.error(f"{what} has the unknown type {number}", "a newer gguf package may know it") from error
        if 0 in shape:
            raise self.error(f"{what} has the empty shape {shape}")
        try:
            nbytes = prod(shape[:-1]) * row_bytes(qtype, shape[-1], name)
        except ModelFormatError as error:
            raise self.error(error.message) from error
        return TensorInfo(name, qtype, shape, self.path, offset, nbytes)


def _place(cursor: _Cursor, tensors: Collection[TensorInfo], data_offset: int, alignment: int) -> list[TensorInfo]:
    """Make the offsets absolute: each aligned, inside the whole file, and no two tensors on the same bytes."""
    placed = [replace(t, offset=data_offset + t.offset) for t in tensors]
    previous: TensorInfo | None = None
    for t in sorted(placed, key=lambda t: t.offset):
        what = f"tensor {t.name!r}"
        if (t.offset - data_offset) % alignment:
            raise cursor.error(f"{what} lies at offset {t.offset - data_offset}, not a multiple of {alignment}")
        end = t.offset + t.nbytes
        if end > cursor.end and not cursor.partial:
            raise cursor.error(f"{what} ends at byte {end}, but the file has {cursor.end}", _DAMAGED)
        if end > _MAX_FILE_BYTES:
            raise cursor.error(f"{what} ends at byte {end}, more than the {_MAX_FILE_BYTES} that are accepted")
        if previous and t.offset < previous.offset + previous.nbytes:
            raise cursor.error(f"tensors {previous.name!r} and {t.name!r} overlap at byte {t.offset}")
        previous = t
    return placed
