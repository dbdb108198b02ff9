"""The block types that have kernels: the records of block_types.h, which C++ and CUDA compile."""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass
from pathlib import Path

from gguf import GGMLQuantizationType as QType

from engine.ground.errors import UnsupportedModelError

FOLDER = Path(__file__).parent  # of block_types.h
_TABLE = re.compile(r"^#define BLOCK_TYPES\(X\) *\\\n((?:.*\\\n)*.*\n)", re.MULTILINE)
_RECORD = re.compile(r" *X\((\w+), (\d+), (\d+), (\d+), (\w+), (\d+), (\d+)\) *\\?")


class NoKernelsError(UnsupportedModelError):
    """A type that no kernel reads."""

    def __init__(self, message: str) -> None:
        types = ", ".join(qtype.name for qtype in NATIVE_TYPES)
        super().__init__(message, hint=f"use a file whose tensors have types among {types}")


@dataclass(frozen=True, slots=True)
class BlockType:
    """A record of block_types.h, where its fields are described; `bytes` is `n_bytes` here."""

    name: str
    id: int
    elements: int
    n_bytes: int
    kind: str
    stage: int
    scales: int

    def __str__(self) -> str:
        return ", ".join(map(str, astuple(self)))

    @property
    def halves(self) -> bool:
        """Whether each 16 weights have integer factors of their own."""
        return self.kind in ("HALVES", "FOURS")

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return self.stage // self.elements * self.n_bytes

    @property
    def align(self) -> int:
        """A row begins at a multiple of so many bytes, 16 at most: what divides a block's bytes."""
        return min(16, self.n_bytes & -self.n_bytes)


def parse(text: str) -> tuple[BlockType, ...]:
    """The records in the text of block_types.h, in their order; a line that is none is a ValueError."""
    found = []
    for line in "".join(_TABLE.findall(text)).splitlines():
        fields = _RECORD.fullmatch(line)
        if fields is None:
            raise ValueError(f"block_types.h: {line.strip()!r} is not one record, X(name, id, ...)")
        name, number, elements, n_bytes, kind, stage, scales = fields.groups()
        found.append(BlockType(name, int(number), int(elements), int(n_bytes), kind, int(stage), int(scales)))
    return tuple(found)


RECORDS = {QType(t.id): t for t in parse((FOLDER / "block_types.h").read_text(encoding="utf-8"))}
NATIVE_TYPES = tuple(RECORDS)
FLOAT_TYPES = tuple(qtype for qtype, t in RECORDS.items() if t.kind == "PLAIN")


def record(qtype: QType, name: str = "") -> BlockType:
    """The record of a type; NoKernelsError where it has none. name: of the tensor."""
    found = RECORDS.get(qtype)
    if found is None:
        of = f"tensor {name!r} has type" if name else "a tensor has type"
        raise NoKernelsError(f"{of} {qtype.name}, which has no kernels")
    return found
