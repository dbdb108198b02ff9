"""Model architectures, one file each, found by the name that `general.architecture` holds.

A model module offers `Config.from_gguf(file)`, `load(file, config) -> Weights`, `forward(...)` and
`tiny(rng)`. To add one, read `qwen3moe.py` and CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy as np

from engine.errors import ModelFormatError, UnsupportedModelError
from engine.gguf import GGUFFile
from engine.ops import F32, I32, U8, Fetches
from engine.quants import QTensor, dequantize, require_native
from engine.residency import ExpertTensors

KEPT_TOKENS = 8  # of a step after which some can be taken back


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
class Widths:
    """The largest of any layer, which buffers are sized by; 0 where no layer has such a thing.

    n_head query heads, n_head_dim their dimensions together, n_head_kv and head_dim; n_ff of a dense or expert FFN;
    n_gate values of an attention gate; of DeltaNet layers n_mixed channels before the convolution, n_z values of the
    output gate, n_head_v heads of n_z / n_head_v dimensions.
    """

    n_head: int
    n_head_dim: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_gate: int = 0
    n_mixed: int = 0
    n_z: int = 0
    n_head_v: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of one forward pass: T tokens of one or more sequences, arrays of the backend's device.

    tokens, positions, sequence: int32 [T]: token id, position in its sequence, row of the block tables. slots[g]: int32
    [T], slot in the cache of KV group g. block_table[g]: int32 [n_sequence, max_blocks]. states: int32 [n_sequence, 2],
    the recurrent state to read and to write. counted: uint8 [T], whose routing enters the counters. rows: int32 [R],
    the tokens whose logits are wanted. n_positions: one more than the largest position, as the host knows it (0 in a
    captured graph).
    """

    tokens: I32
    positions: I32
    sequence: I32
    slots: tuple[I32, ...]
    block_table: tuple[I32, ...]
    states: I32
    counted: U8
    rows: I32
    n_positions: int = 0


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a forward pass writes; allocated once for the largest step, `first(T, R)` views it.

    x, h, y: float32 [T, D]; router [T, E]; experts int32 and weights float32 [L, T, A], L the MoE layers; logits
    [R, V]; hidden: float32 [n_layer, T, D], the residual entering each layer, or None when nobody asked for it.
    The rest is scratch of the widest layer, which `heads`, `attended`, `gate`, `z` and `delta` view in a layer's shape.
    """

    x: F32
    h: F32
    y: F32
    scratch_q: F32
    scratch_attended: F32
    scratch_gate: F32
    scratch_z: F32
    scratch_delta: F32
    router: F32
    experts: I32
    weights: F32
    logits: F32
    fetches: Fetches
    hidden: F32 | None = None

    def first(self, T: int, R: int) -> Buffers:
        """Contiguous views for a step of T tokens, R of which want logits."""
        return replace(
            self, x=self.x[:T], h=self.h[:T], y=self.y[:T], router=self.router[:T],
            experts=_layers_of(self.experts, T), weights=_layers_of(self.weights, T), logits=self.logits[:R],
            hidden=None if self.hidden is None else _layers_of(self.hidden, T),
        )  # fmt: skip

    def heads(self, n_head: int, head_dim: int) -> F32:
        """Queries [T, n_head, head_dim]."""
        return self._view(self.scratch_q, n_head * head_dim).reshape(-1, n_head, head_dim)

    def attended(self, width: int) -> F32:
        """What attention or a recurrence gives, [T, width]."""
        return self._view(self.scratch_attended, width)

    def gate(self, width: int) -> F32:
        """Values of an attention gate, [T, width]."""
        return self._view(self.scratch_gate, width)

    def z(self, width: int) -> F32:
        """Values of a DeltaNet output gate, [T, width]."""
        return self._view(self.scratch_z, width)

    def delta(self, layer: int, n_mixed: int, n_head_v: int) -> tuple[F32, F32, F32]:
        """Inputs of the recurrence of the DeltaNet layer of that number: [T, n_mixed], twice [T, n_head_v].

        In a step of at most KEPT_TOKENS they are the layer's own, so that tokens can be taken back.
        """
        T, width = len(self.x), n_mixed + 2 * n_head_v
        first = layer * KEPT_TOKENS * width if T <= KEPT_TOKENS else 0
        memory = self.scratch_delta.reshape(-1)[first : first + T * width]
        at = T * n_mixed, T * (n_mixed + n_head_v)
        mixed, beta, alpha = memory[: at[0]], memory[at[0] : at[1]], memory[at[1] :]
        return mixed.reshape(T, n_mixed), beta.reshape(T, n_head_v), alpha.reshape(T, n_head_v)

    def _view(self, scratch: F32, width: int) -> F32:
        T = len(self.x)
        return scratch.reshape(-1)[: T * width].reshape(T, width)


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


def float_matrix(file: GGUFFile, name: str, shape: tuple[int, ...]) -> QTensor:
    """A router or another matrix whose products are not quantized: F32, F16 or BF16."""
    tensor = matrix(file, name, shape)
    if tensor.qtype.name not in ("F32", "F16", "BF16"):
        raise UnsupportedModelError(f"tensor {name} is {tensor.qtype.name}; a router is F32, F16 or BF16")
    return tensor


def vector(file: GGUFFile, name: str, n: int) -> F32:
    """A small tensor (a norm) as float32 [n]."""
    return np.ascontiguousarray(dequantize(matrix(file, name, (n,))))


def number(file: GGUFFile, key: str, least: int = 1, default: int | None = None) -> int:
    """A whole number of the metadata, at least `least`; `default` if there is no such key and it is not None."""
    value = file.value(key, int) if default is None else file.value(key, int, default)
    if value < least:
        raise ModelFormatError(f"{key} is {value}, expected at least {least}")
    return int(value)


def per_layer(file: GGUFFile, key: str, n_layer: int) -> tuple[int, ...]:
    """Whole numbers of the metadata, one a layer, each at least 1; the file may hold one number for all layers."""
    if isinstance(file.metadata.get(key), int):
        return (number(file, key),) * n_layer
    values = [int(value) for value in file.value(key, list)]
    if len(values) < n_layer or min(values) < 1:
        raise ModelFormatError(f"{key} is {values}, expected {n_layer} numbers of at least 1")
    return tuple(values[:n_layer])


def refuse_unknown(
    file: GGUFFile, shapes: Collection[str], skipped: Callable[[str], bool] = lambda name: False
) -> None:
    """Refuse a tensor that is neither in `shapes` nor `skipped`: an ignored bias is a wrong model."""
    for name in file.tensors:
        if name not in shapes and not skipped(name):
            raise UnsupportedModelError(f"tensor {name} is not part of {file.architecture} as implemented here")


LayerT = TypeVar("LayerT")


@dataclass(frozen=True, slots=True)
class Weights(Generic[LayerT]):
    """Everything that is always in fast memory, and where the experts are in the file.

    output: `token_embd` itself where the two are tied.
    """

    token_embd: QTensor
    layers: tuple[LayerT, ...]
    output_norm: F32
    output: QTensor
    experts: tuple[ExpertTensors, ...] = ()

    @property
    def dense_bytes(self) -> int:
        """Bytes of the matrices outside the experts."""
        return matrix_bytes(self)


def load_ends(file: GGUFFile, n_vocab: int, n_embd: int) -> tuple[QTensor, QTensor]:
    """Embedding and output matrix, [V, D] each, which may be one."""
    token_embd = matrix(file, "token_embd.weight", (n_vocab, n_embd))
    tied = "output.weight" not in file.tensors
    return token_embd, token_embd if tied else matrix(file, "output.weight", (n_vocab, n_embd))


def matrix_bytes(record: Any) -> int:
    """Bytes of every matrix of a record of weights, one that is named twice once; stacked experts do not count."""
    found: dict[int, int] = {}

    def visit(item: Any) -> None:
        if isinstance(item, QTensor):
            found[id(item)] = item.nbytes if len(item.shape) == 2 else 0
        elif isinstance(item, tuple):
            for part in item:
                visit(part)
        elif is_dataclass(item):
            for field in fields(item):
                visit(getattr(item, field.name))

    visit(record)
    return sum(found.values())
