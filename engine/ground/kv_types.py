"""The types in which keys and values of the cache are stored: the one place that knows them (docs/kv.md).

A type of the cache is one name, of keys and values alike, or two: `q8_0,q4_0` has keys in q8_0 and values in q4_0.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class KVKind:
    """How one array of the cache is stored.

    name: as GGUF has it. dtype: of an element, by NumPy's name; it tells the kinds apart. packed: dimensions in an
    element. block: dimensions that share a scale, a half in an array of its own; 0: there are no scales. Its place in
    KINDS is its number in cpu/spark_cpu.h, and cuda/kv_types.cuh has its name.
    """

    name: str
    dtype: str
    element_bytes: int
    packed: int = 1
    block: int = 0

    def fits(self, head_dim: int) -> bool:
        """Whether heads of so many dimensions can be stored."""
        return head_dim % (self.block or 1) == 0

    def n_elements(self, head_dim: int) -> int:
        """Elements of a row: one head of one position."""
        return head_dim // self.packed

    def n_scales(self, head_dim: int) -> int:
        """Scales of a row."""
        return head_dim // self.block if self.block else 0

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a row, with its scales."""
        return self.n_elements(head_dim) * self.element_bytes + 2 * self.n_scales(head_dim)


class KVPair(NamedTuple):
    """Of keys, and of values."""

    k: KVKind
    v: KVKind

    def fits(self, head_dim: int) -> bool:
        """Whether both can store heads of so many dimensions."""
        return self.k.fits(head_dim) and self.v.fits(head_dim)

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a head of one position, key and value."""
        return self.k.row_bytes(head_dim) + self.v.row_bytes(head_dim)

    def __str__(self) -> str:
        return self.k.name if self.k is self.v else f"{self.k.name},{self.v.name}"


KINDS: dict[str, KVKind] = {
    kind.name: kind
    for kind in (
        KVKind("f16", "float16", 2),
        KVKind("q8_0", "int8", 1, block=32),
        KVKind("q4_0", "uint8", 1, packed=2, block=32),
    )
}
BY_DTYPE = {kind.dtype: kind for kind in KINDS.values()}
KV_TYPES: tuple[str, ...] = tuple(str(KVPair(k, v)) for k, v in product(KINDS.values(), repeat=2))
KV_WORDS = ", ".join(KINDS)  # of help and errors


def pair_of(kv_type: str) -> KVPair:
    """Read a type of the cache; ValueError for what is none."""
    k, _, v = kv_type.partition(",")
    names = (k, v if "," in kv_type else k)
    if not all(name in KINDS for name in names):
        raise ValueError(f"{kv_type!r}: expected one of {KV_WORDS}, or two as K,V")
    return KVPair(*(KINDS[name] for name in names))
