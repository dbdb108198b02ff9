"""Quantized tensors: how a block of weights is stored and read back.

Reading goes through the `gguf` package, which is the reference for the bits of every type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as QType

from engine.formats import block_types
from engine.ground.errors import ModelFormatError, UnsupportedModelError
from engine.ground.unbacked import unbacked

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class QTensor:
    """A tensor in the bytes of its type, usually a view of a mapped file.

    shape: NumPy order, slowest axis first: (rows, cols), or (n_expert, rows, cols) for stacked experts.
    data: uint8 [nbytes], contiguous. stride_bytes: 0, or the distance of two experts in `data`, which then also holds
    what lies between them: gate and up of experts that a file keeps in one tensor (`rows`). backed: whether there are
    weights behind `data`; of a header that was read alone there are none. scale: of a matrix, what its products are
    multiplied by.
    """

    name: str
    qtype: QType
    shape: tuple[int, ...]
    data: Bytes
    stride_bytes: int = 0
    backed: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        assert self.data.dtype == np.uint8 and self.data.ndim == 1 and self.data.flags.c_contiguous, self.name
        gaps = (self.shape[0] - 1) * (self.stride_bytes - self.nbytes // self.shape[0]) if self.stride_bytes else 0
        assert self.data.nbytes == self.nbytes + gaps, self.name

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, without what lies between its slices."""
        return prod(self.shape[:-1]) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (the last axis)."""
        return row_bytes(self.qtype, self.shape[-1], self.name)

    def expert(self, e: int) -> QTensor:
        """Slice `e` of the first axis, without a copy."""
        assert len(self.shape) > 1 and 0 <= e < self.shape[0], f"{self.name}: no slice {e} in {self.shape}"
        size = self.nbytes // self.shape[0]
        first = e * (self.stride_bytes or size)
        return QTensor(f"{self.name}[{e}]", self.qtype, self.shape[1:], self.data[first : first + size])

    def first(self, n: int) -> QTensor:
        """The first n rows of a matrix, without a copy."""
        assert len(self.shape) == 2 and n <= self.shape[0], f"{self.name}: {n} rows of {self.shape}"
        return replace(self, name=f"{self.name}[:{n}]", shape=(n, self.shape[1]), data=self.data[: n * self.row_bytes])

    def reordered(self, name: str, shape: tuple[int, ...], blocks: Bytes) -> QTensor:
        """A tensor of `blocks`, a view of this one's data in another order: a copy, unless there is nothing to copy."""
        data = np.ascontiguousarray(blocks).reshape(-1) if self.backed else unbacked(blocks.size, np.uint8)
        return replace(self, name=name, shape=shape, data=data)

    def rows(self, first: int, n: int) -> QTensor:
        """n rows from the first on, of every slice where there are several, without a copy: part of a fused tensor."""
        *slices, rows, cols = self.shape
        assert 0 <= first <= first + n <= rows and not self.stride_bytes and len(slices) < 2, self.name
        end = len(self.data) - (rows - first - n) * self.row_bytes
        return QTensor(
            f"{self.name}[{first}:{first + n}]", self.qtype, (*slices, n, cols),
            self.data[first * self.row_bytes : end], rows * self.row_bytes if slices else 0, self.backed,
        )  # fmt: skip


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without axes of one before the last: a vector may be a matrix of one row."""
    return tuple(n for n in shape[:-1] if n != 1) + shape[-1:]


def row_bytes(qtype: QType, cols: int, name: str) -> int:
    """Bytes of a row of `cols` weights; a row that does not fill its last block is a ModelFormatError.

    Of any type that a file may have, kernels or not, so the sizes are those of the `gguf` package.
    """
    block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    if cols % block:
        raise ModelFormatError(
            f"tensor {name!r}: a row of {cols} weights is not a multiple of {qtype.name}'s block of {block}"
        )
    return int(cols // block * block_bytes)


def require_native(t: QTensor) -> None:
    """Refuse a tensor whose type has no kernels (UnsupportedModelError)."""
    block_types.record(t.qtype, t.name)


def dequantize(t: QTensor) -> Floats:
    """The weights as float32 of `t.shape`, by the `gguf` package; those of an F32 tensor are a view.

    A type that the package cannot dequantize is an UnsupportedModelError. Scales that are NaN or infinite pass
    through: they show in the logits.
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            rows = gguf.dequantize(t.data.reshape(-1, t.row_bytes), t.qtype)
    except NotImplementedError as error:
        message = f"tensor {t.name!r} has type {t.qtype.name}, which cannot be dequantized"
        raise UnsupportedModelError(message, hint="a newer gguf package may know it") from error
    out: Floats = rows.reshape(t.shape)
    return out
