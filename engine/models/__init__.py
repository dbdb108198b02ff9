"""Model architectures, one file each, found by the name that `general.architecture` holds.

A model module offers `Config.from_gguf(file)`, `load(file, config) -> Weights`, `forward(...)` and
`tiny(rng)`. To add one, read `qwen3moe.py` and CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from engine.errors import ModelFormatError, UnsupportedModelError
from engine.gguf import GGUFFile
from engine.ops import F32, I32, U8, Fetches
from engine.quants import QTensor, dequantize, require_native


def known() -> list[str]:
    """Names of the architectures that this engine implements."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def find(architecture: str) -> ModuleType:
    """The module of an architecture; an unknown one raises UnsupportedModelError."""
    # The file's string is only ever compared with our own names, never imported.
    for name in known():
        if name == architecture:
            return importlib.import_module(f"{__name__}.{name}")
    raise UnsupportedModelError(
        f"the model's architecture is {architecture!r}; this engine implements {', '.join(known())}",
        hint="CONTRIBUTING.md says what a new architecture needs",
    )


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of one forward pass: T tokens of one or more sequences, arrays of the backend's device.

    tokens, positions, sequence, slots: int32 [T]: token id, position in its sequence, row of
    `block_table`, slot of the KV cache. block_table: int32 [n_sequence, max_blocks]. counted: uint8
    [T], whose routing enters the counters. rows: int32 [R], the tokens whose logits are wanted.
    n_positions: one more than the largest position, as the host knows it (0 in a captured graph).
    """

    tokens: I32
    positions: I32
    sequence: I32
    slots: I32
    block_table: I32
    counted: U8
    rows: I32
    n_positions: int = 0


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a forward pass writes; allocated once for the largest step, `first(T, R)` views it.

    x, h: float32 [T, D]; q [T, H, head_dim]; attended [T, H * head_dim]; router [T, E]; experts int32
    and weights float32 [L, T, A], L the MoE layers; logits [R, V]; hidden: float32 [n_layer, T, D], the
    residual entering each layer, or None when nobody asked for it.
    """

    x: F32
    h: F32
    q: F32
    attended: F32
    router: F32
    experts: I32
    weights: F32
    logits: F32
    fetches: Fetches
    hidden: F32 | None = None

    def first(self, T: int, R: int) -> Buffers:
        """Contiguous views for a step of T tokens, R of which want logits."""
        return Buffers(
            self.x[:T],
            self.h[:T],
            self.q[:T],
            self.attended[:T],
            self.router[:T],
            _layers_of(self.experts, T),
            _layers_of(self.weights, T),
            self.logits[:R],
            self.fetches,
            None if self.hidden is None else _layers_of(self.hidden, T),
        )


def _layers_of(array: Any, T: int) -> Any:
    """[L, max T, n] as a contiguous [L, T, n] at the beginning of the same memory."""
    L, _, n = array.shape
    return array.reshape(-1)[: L * T * n].reshape(L, T, n)


def matrix(file: GGUFFile, name: str, shape: tuple[int, ...]) -> QTensor:
    """A tensor of a type with kernels and exactly `shape`, or an error that names it."""
    if name not in file.tensors:
        raise ModelFormatError(f"tensor {name} is missing; a {file.architecture} model has it")
    tensor = file.tensor(name)
    if tensor.shape != shape:
        raise ModelFormatError(f"tensor {name} has shape {tensor.shape}, the metadata asks for {shape}")
    require_native(tensor)
    return tensor


def vector(file: GGUFFile, name: str, n: int) -> F32:
    """A small tensor (a norm) as float32 [n]."""
    return np.ascontiguousarray(dequantize(matrix(file, name, (n,))))
