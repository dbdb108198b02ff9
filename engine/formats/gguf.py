"""A GGUF model: all its parts as one, typed metadata, tensors as views of the mapped files, and its two ids."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from engine.formats.gguf_header import (
    Header,
    StringArray,
    TensorInfo,
    UnfinishedHeaderError,
    describe,
    read_header,
)
from engine.formats.quants import QTensor, dequantize, without_ones
from engine.ground.errors import ModelFormatError
from engine.ground.unbacked import unbacked

__all__ = ["GGUFFile", "MISSING", "StringArray", "TensorInfo", "open_header", "open_model"]

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_ROUTER = re.compile(r"blk\.\d+\.ffn_gate_inp\.weight")
# Keys that every converter writes. Sizes that only some of them write show in the shapes of tensors anyway.
_SHAPING_KEYS = (
    "block_count", "embedding_length", "feed_forward_length", "expert_feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "expert_count", "expert_used_count",
)  # fmt: skip
_SAMPLE_BYTES = 1 << 20


class _Missing(Enum):
    MISSING = "missing"


MISSING: Final = _Missing.MISSING
T = TypeVar("T")
D = TypeVar("D")


class GGUFFile:
    """An open model, whatever number of files it is kept in.

    paths: the files in order. metadata: what the first of them says: int, float, bool, str, read-only arrays of
    numbers, and StringArray. tensors: name -> TensorInfo, in file order. size_bytes: of all files together.
    Views of the data stay valid after `close`: the mapping goes with the last of them.

    header_alone: tensors have no weights behind them, and the file has no ids. whole_bytes: of the same files when they
    are complete, up to the end of the last tensor; missing_bytes: what is not there yet of that. absent: parts of which
    not even the header is there.
    """

    def __init__(self, parts: Sequence[Header], header_alone: bool = False, absent: Sequence[Path] = ()) -> None:
        self.paths: tuple[Path, ...] = tuple(p.path for p in parts)
        self.metadata: Mapping[str, Any] = MappingProxyType(parts[0].metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType({t.name: t for p in parts for t in p.tensors})
        self.size_bytes: int = sum(len(p.data) for p in parts)
        self.whole_bytes: int = sum(p.end for p in parts)
        self.missing_bytes: int = sum(max(0, p.end - len(p.data)) for p in parts)
        self.header_alone, self.absent = header_alone, tuple(absent)
        self._parts = {p.path: p for p in parts}
        kind = self.metadata.get("general.type", "model")
        if "general.architecture" not in self.metadata and kind != "model" and isinstance(kind, str):
            raise ModelFormatError(
                f"{self.paths[0]}: is of type {kind!r:.60}, expected a model", hint="name the file of the model itself"
            )
        self.architecture: str = self.value("general.architecture", str)

    def tensor(self, name: str) -> QTensor:
        """The tensor as a read-only view of the file; ModelFormatError if there is none of that name."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelFormatError(
                f"{self.paths[0]}: tensor {name!r} is missing",
                hint=f"the model has {len(self.tensors)} tensors and says it is a {self.architecture!r}",
            )
        assert self._parts, f"{self.paths[0]} was closed"
        if self.header_alone:
            return QTensor(name, info.qtype, info.shape, unbacked(info.nbytes, np.uint8), backed=False)
        data = np.frombuffer(self._parts[info.path].data, np.uint8, info.nbytes, info.offset)
        return QTensor(name, info.qtype, info.shape, data)

    @overload
    def value(self, key: str, kind: type[T]) -> T: ...
    @overload
    def value(self, key: str, kind: type[T], default: D) -> T | D: ...
    def value(self, key: str, kind: type[Any], default: Any = MISSING) -> Any:
        """The value of `key`, which must be a `kind`; `default` if there is no such key.

        kind: int, float (integers are converted), bool, str, np.ndarray (numbers), StringArray, or list (a copy
        of either kind of array). A missing key or another type is a ModelFormatError that names the key.
        """
        found = self.metadata.get(key, default)
        if key not in self.metadata:
            if found is MISSING:
                raise ModelFormatError(
                    f"{self.paths[0]}: key {key!r} is missing",
                    hint="convert the model again with a newer converter",
                )
            return found
        if kind is list and isinstance(found, np.ndarray | StringArray):
            return _items(found)
        if kind is float and type(found) is int:
            return float(found)
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise ModelFormatError(f"{self.paths[0]}: key {key!r} is {describe(found)}, expected {kind.__name__}")
        return found

    @cached_property
    def model_id(self) -> str:
        """SHA-256 of architecture, sizes, tensor names and shapes, and router weights: 64 hex digits.

        The same for every quantization and splitting of a model, so one profile serves them all. Routers are
        hashed as BF16, so F32 and BF16 copies of one agree. A copy in F16 can differ where it lost small
        weights, and one in fewer bits does: then the ids differ too.
        """
        assert not self.header_alone, "a header does not say which model it is"
        sizes = {key: self.metadata.get(f"{self.architecture}.{key}") for key in _SHAPING_KEYS}
        identity = {
            "architecture": self.architecture,
            "sizes": {key: size for key, size in sizes.items() if size is not None},
            "tensors": sorted((t.name, without_ones(t.shape)) for t in self.tensors.values()),
        }
        text = json.dumps(identity, sort_keys=True, default=_items)
        digest = hashlib.sha256(b"spark model id 1\n" + text.encode())
        for name in sorted(filter(_ROUTER.fullmatch, self.tensors)):
            digest.update(_bf16_bits(dequantize(self.tensor(name))).data)
        return digest.hexdigest()

    @cached_property
    def file_id(self) -> str:
        """SHA-256 of metadata, tensor table, size and three 1 MiB samples of the data: 64 hex digits."""
        parts = self._parts.values()
        assert parts and not self.header_alone, f"{self.paths[0]} was closed, or its header read alone"
        digest = hashlib.sha256(b"spark file id 1\n")
        for part in parts:
            digest.update(struct.pack("<QQ", len(part.data), part.data_offset))
            digest.update(part.data[: part.data_offset])
        last = max(sum(len(p.data) - p.data_offset for p in parts) - _SAMPLE_BYTES, 0)
        for begin in (0, last // 2, last):
            base = 0  # where this part's data begin when the data of all parts lie end to end
            for part in parts:
                size = len(part.data) - part.data_offset
                lo, hi = (min(max(b - base, 0), size) for b in (begin, begin + _SAMPLE_BYTES))
                digest.update(part.data[part.data_offset + lo : part.data_offset + hi])
                base += size
        return digest.hexdigest()

    def close(self) -> None:
        """Let go of the mapped files; only views handed out before remain usable."""
        self._parts.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_model(path: str | Path) -> GGUFFile:
    """Open a GGUF model, given any of its parts; ModelFormatError for whatever is wrong with a file."""
    return _open(Path(path), header_alone=False)


def open_header(path: str | Path) -> GGUFFile:
    """As `open_model`, without the weights, which need not be there: what a download has so far.

    A header that is not whole yet is an UnfinishedHeaderError; of parts, the first one's must be there.
    """
    return _open(Path(path), header_alone=True)


def _open(given: Path, header_alone: bool) -> GGUFFile:
    part = read_header(given, header_alone)
    count = _split_number(part, "split.count", 1)
    if count == 1:
        return GGUFFile([part], header_alone)
    name = _SPLIT_NAME.fullmatch(given.name)
    if name is None or int(name["count"]) != count:
        raise ModelFormatError(
            f"{given}: key 'split.count' says that this is one of {count} parts, but its name does not",
            hint=f"name the parts NAME-00001-of-{count:05}.gguf, NAME-00002-of-{count:05}.gguf and so on",
        )
    parts, absent = [], []
    for no in range(count):
        other = given.with_name(f"{name['stem']}-{no + 1:05}-of-{count:05}.gguf")
        try:
            parts.append(part if other == given else _part(other, header_alone))
        except UnfinishedHeaderError:
            if not header_alone or no == 0:
                raise
            absent.append(other)
            continue
        found = (_split_number(parts[-1], "split.no", 0), _split_number(parts[-1], "split.count", 1))
        if found != (no, count):
            raise ModelFormatError(
                f"{other}: keys 'split.no' and 'split.count' are {found[0]} and {found[1]}, expected {no} and {count}",
                hint="the part was renamed, or belongs to another model",
            )
    model = GGUFFile(parts, header_alone, absent)
    n_tensors = sum(len(p.tensors) for p in parts)
    expected = model.value("split.tensors.count", int)
    if n_tensors != len(model.tensors) or (n_tensors != expected if not absent else n_tensors > expected):
        raise ModelFormatError(
            f"{given}: key 'split.tensors.count' is {expected}, but the {len(parts)} parts hold {n_tensors} tensors "
            f"with {len(model.tensors)} different names",
            hint="the parts belong to different models",
        )
    return model


def _part(path: Path, header_alone: bool) -> Header:
    """The header of another part than the one that was given."""
    if not path.exists():
        raise UnfinishedHeaderError(f"{path}: this part of the model is missing", hint="fetch it to that place")
    return read_header(path, header_alone)


def _split_number(part: Header, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int or not 0 <= value <= 0xFFFF:
        raise ModelFormatError(f"{part.path}: key {key!r} is {describe(value)}, expected a count of parts")
    return value


def _items(values: npt.NDArray[Any] | StringArray) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest even, in the bits of BF16."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
