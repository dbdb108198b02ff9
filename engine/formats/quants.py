"""Quantized tensors: how a block of weights is stored and read back.

Reading goes through the `gguf` package, which is the reference for the bits of every type.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as QType

from engine.formats import block_types
from engine.ground.errors import ModelFormatError, UnsupportedModelError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class QTensor:
    """A tensor in the bytes of its type, usually a view of a mapped file.

    shape: NumPy order, slowest axis first: (rows, cols), or (n_expert, rows, cols) for stacked experts.
    data: uint8 [nbytes], contiguous. stride_bytes: 0, or the distance of two experts in `data`, which then also holds
    what lies between them: gate and up of experts that a file keeps in one tensor (`halves`). scale: of a matrix, what
    its products are multiplied by.
    """

    name: str
    qtype: QType
    shape: tuple[int, ...]
    data: Bytes
    stride_bytes: int = 0
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

    def halves(self) -> tuple[QTensor, QTensor]:
        """The first and the second half of every slice's rows, without a copy: gate and up of fused experts."""
        n, rows, cols = self.shape
        assert rows % 2 == 0 and not self.stride_bytes, self.name
        stride = self.nbytes // n
        first, second = (
            QTensor(
                f"{self.name}[{half}]", self.qtype, (n, rows // 2, cols),
                self.data[half * stride // 2 : len(self.data) - (1 - half) * stride // 2], stride,
            )
            for half in range(2)
        )  # fmt: skip
        return first, second


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
