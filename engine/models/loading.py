"""How the tensors of a model file are read, with every shape checked.

What all architectures share; what is one's own is in its file (engine/models/).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
from gguf import GGMLQuantizationType as QType

from engine.formats.block_types import FLOAT_TYPES
from engine.formats.gguf import GGUFFile
from engine.formats.quants import QTensor, dequantize, require_native, without_ones
from engine.ground.errors import ModelFormatError, UnsupportedModelError
from engine.memory.residency import ExpertTensors
from engine.models.conventions import mtp_blocks
from engine.ops import F32, Activation, AttentionInput, Gating, SharedExpert

PARTS = ("gate", "up", "down")
# What converters can join in one tensor of a layer.
FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
Shapes = dict[str, tuple[int, ...]]


# --- shapes -------------------------------------------------------------------------------------------


def ends(n_vocab: int, n_embd: int) -> Shapes:
    """Embedding, last norm and output matrix, which may be absent: tied."""
    return {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,), "output.weight": (n_vocab, n_embd)}


def attention_shapes(p: str, n_embd: int, q: int, kv: int, head_dim: int) -> Shapes:
    """Attention with norms of Q and K, of a layer whose tensors' names begin with p."""
    return {
        p + "attn_norm.weight": (n_embd,),
        p + "attn_q.weight": (q, n_embd),
        p + "attn_k.weight": (kv, n_embd),
        p + "attn_v.weight": (kv, n_embd),
        p + "attn_output.weight": (n_embd, q),
        p + "attn_q_norm.weight": (head_dim,),
        p + "attn_k_norm.weight": (head_dim,),
    }


def ffn_shapes(p: str, n_embd: int, n_ff: int, kind: str = "") -> Shapes:
    """A dense FFN, or a shared expert (kind "_shexp")."""
    return {
        f"{p}ffn_gate{kind}.weight": (n_ff, n_embd),
        f"{p}ffn_up{kind}.weight": (n_ff, n_embd),
        f"{p}ffn_down{kind}.weight": (n_embd, n_ff),
    }


def expert_shapes(p: str, n_embd: int, n_expert: int, n_ff: int) -> Shapes:
    """A router and its experts."""
    E, D, F = n_expert, n_embd, n_ff
    return {
        p + "ffn_gate_inp.weight": (E, D),
        p + "ffn_down_exps.weight": (E, D, F),
        p + "ffn_gate_exps.weight": (E, F, D),
        p + "ffn_up_exps.weight": (E, F, D),
    }


def fused_parts(shapes: Mapping[str, tuple[int, ...]], name: str) -> Shapes:
    """The tensors whose rows one of that name holds, one after the other; none if it is no such tensor."""
    *block, kind, ending = ("", *name.split("."))
    parts = [".".join((*block[1:], part, ending)) for part in FUSED.get(kind, ())]
    return {part: shapes[part] for part in parts} if name not in shapes and shapes.keys() >= set(parts) else {}


# --- weights ------------------------------------------------------------------------------------------


def matrix(file: GGUFFile, name: str, shape: tuple[int, ...]) -> QTensor:
    """A tensor of a type with kernels and exactly `shape`, or an error that names it."""
    if name not in file.tensors:
        raise ModelFormatError(f"tensor {name} is missing; a {file.architecture} model has it")
    tensor = file.tensor(name)
    if without_ones(tensor.shape) != without_ones(shape):
        raise ModelFormatError(f"tensor {name} has shape {tensor.shape}, the metadata asks for {shape}")
    require_native(tensor)
    return replace(tensor, shape=shape)


def float_matrix(file: GGUFFile, name: str, shape: tuple[int, ...]) -> QTensor:
    """A router or another matrix whose products are not quantized: F32, F16 or BF16."""
    tensor = matrix(file, name, shape)
    if tensor.qtype not in FLOAT_TYPES:
        raise UnsupportedModelError(f"tensor {name} is {tensor.qtype.name}; a router is F32, F16 or BF16")
    return tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Attention: what enters it, and wo [D, H * head_dim]."""

    inputs: AttentionInput
    wo: QTensor


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense FFN: gate, up [F, D], down [D, F]."""

    gate: QTensor
    up: QTensor
    down: QTensor


class LayerWeights(Protocol):
    """What the weights of a layer have, whatever the architecture."""

    @property
    def norm(self) -> F32:
        """By which the layer reads the residual stream first, [D]."""


class AttentionLayer:
    """A layer that begins with attention."""

    __slots__ = ()
    attention: AttentionWeights

    @property
    def norm(self) -> F32:
        """The one ahead of Q, K and V."""
        return self.attention.inputs.norm


LayerT = TypeVar("LayerT", bound=LayerWeights)


@dataclass(frozen=True, slots=True)
class Weights(Generic[LayerT]):
    """Everything that is always in fast memory, and where the experts are in the file.

    output: `token_embd` itself where the two are tied. embed_scale multiplies embeddings; softcap > 0: logits go
    through its tanh.
    """

    token_embd: QTensor
    layers: tuple[LayerT, ...]
    output_norm: F32
    output: QTensor
    experts: tuple[ExpertTensors, ...] = ()
    embed_scale: float = 1.0
    softcap: float = 0.0

    @property
    def dense_bytes(self) -> int:
        """Bytes of the matrices outside the experts."""
        return matrix_bytes(self)


def _split(file: GGUFFile, name: str, parts: Shapes) -> dict[str, QTensor]:
    """The parts of a fused tensor, by name, without a copy; one that a file has twice is a ModelFormatError."""
    *experts, _, columns = next(iter(parts.values()))
    n_rows = sum(shape[-2] for shape in parts.values())
    whole, first, found = matrix(file, name, (*experts, n_rows, columns)), 0, {}
    for part, shape in parts.items():
        if part in file.tensors:
            raise ModelFormatError(f"the file has {part} both alone and in {name}")
        found[part] = whole.rows(first, shape[-2])
        first += shape[-2]
    return found


# Tensors beside a matrix of NVFP4: a factor of its products, which converters take from the checkpoint, and what its
# activations were in training, for those who round them to four bits.
FACTOR, INPUT_FACTOR = "scale", "input_scale"


def _is_factor(file: GGUFFile, shapes: Mapping[str, tuple[int, ...]], name: str) -> bool:
    base, _, kind = name.rpartition(".")
    of = base + ".weight"
    found = of in file.tensors and file.tensors[of].qtype == QType.NVFP4 and (of in shapes or fused_parts(shapes, of))
    return bool(found) and kind in (FACTOR, INPUT_FACTOR) and base != "token_embd"


class Tensors:
    """The tensors of a file, none of which may be unknown: an ignored bias is a wrong model.

    shapes: of those that an architecture knows, each apart; a file may hold some of them in one (`FUSED`). skipped:
    known ones that are not needed, besides blocks that predict further tokens. ahead: `shapes` are of one of those.
    prefix: what `name` stands behind in the methods.
    """

    def __init__(
        self, file: GGUFFile, shapes: Mapping[str, tuple[int, ...]],
        skipped: Callable[[str], bool] = lambda name: False, ahead: bool = False,
    ) -> None:  # fmt: skip
        self.file, self.shapes, self.prefix = file, shapes, ""
        self.fused: dict[str, QTensor] = {}  # parts of other tensors
        self._whole: dict[str, str] = {}  # and the names of those
        mtp = range(0) if ahead else mtp_blocks(file.metadata, file.architecture)
        for name in file.tensors:
            block = re.match(r"blk\.(\d+)\.", name)
            if parts := fused_parts(shapes, name):
                self.fused |= _split(file, name, parts)
                self._whole |= dict.fromkeys(parts, name)
            elif name not in shapes and not (
                (block and int(block[1]) in mtp) or skipped(name) or _is_factor(file, shapes, name)
            ):
                raise UnsupportedModelError(f"tensor {name} is not part of {file.architecture} as implemented here")

    def layer(self, i: int) -> Tensors:
        """Those of a layer."""
        tensors = copy(self)
        tensors.prefix = f"blk.{i}."
        return tensors

    def has(self, name: str) -> bool:
        """Whether the file has a tensor."""
        return self.prefix + name in self.file.tensors

    def matrix(self, name: str) -> QTensor:
        """A tensor of a type with kernels, as it is, and its factor, if it has one."""
        tensor = self._stacked(name)
        factor = self._factors(name, 1)
        return tensor if factor is None else replace(tensor, scale=float(factor[0]))

    def _stacked(self, name: str) -> QTensor:
        name = self.prefix + name
        return self.fused[name] if name in self.fused else matrix(self.file, name, self.shapes[name])

    def _factors(self, name: str, n: int) -> F32 | None:
        """What the products of an NVFP4 tensor, or of each of its n experts, are multiplied by; None: by nothing."""
        name = self.prefix + name
        key = self._whole.get(name, name).removesuffix("weight") + FACTOR
        if key in self.shapes or key not in self.file.tensors:
            return None
        return np.ascontiguousarray(dequantize(float_matrix(self.file, key, (n,))))

    def floats(self, name: str) -> QTensor:
        """A router or another matrix whose products are not quantized."""
        return float_matrix(self.file, self.prefix + name, self.shapes[self.prefix + name])

    def values(self, name: str) -> F32:
        """A small tensor (a norm, a convolution) as float32."""
        tensor = self.matrix(name)
        return np.ascontiguousarray(dequantize(tensor)) * np.float32(tensor.scale)

    def attention(self, gate: str | None = None) -> AttentionWeights:
        """Attention with norms of Q and K; without K, or V alone, where `shapes` has none."""
        k, v, k_norm = (
            self.prefix + name in self.shapes for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
        )
        inputs = AttentionInput(
            norm=self.values("attn_norm.weight"),
            wq=self.matrix("attn_q.weight"),
            wk=self.matrix("attn_k.weight") if k else None,
            wv=self.matrix("attn_v.weight") if v else None,
            q_norm=self.values("attn_q_norm.weight"),
            k_norm=self.values("attn_k_norm.weight") if k_norm else None,
            gate=None if gate is None else self.matrix(gate),
        )
        return AttentionWeights(inputs, self.matrix("attn_output.weight"))

    def ffn(self) -> Dense:
        """A dense FFN."""
        return Dense(*(self.matrix(f"ffn_{part}.weight") for part in PARTS))

    def shared(self, gate: QTensor | None = None) -> SharedExpert:
        """A shared expert."""
        first, up, down = (self.matrix(f"ffn_{part}_shexp.weight") for part in PARTS)
        return SharedExpert(first, up, down, gate)

    def experts(self, activation: Activation = "silu") -> ExpertTensors:
        """The experts."""
        gate, up, down = (self._stacked(f"ffn_{part}_exps.weight") for part in PARTS)
        factors = self._factors("ffn_gate_exps.weight", gate.shape[0])
        return ExpertTensors(gate, up, down, activation, factors)

    def gating(self, rule: Gating) -> Gating:
        """How experts are chosen and weighted; what the products of their up and down are multiplied by is in it."""
        n_expert = self.shapes[self.prefix + "ffn_down_exps.weight"][0]
        of_products = (self._factors(f"ffn_{part}_exps.weight", n_expert) for part in ("up", "down"))
        given = [f for f in (rule.expert_scale, *of_products) if f is not None]
        return replace(rule, expert_scale=np.prod(given, axis=0, dtype=np.float32) if given else None)

    def model(self, layers: list[LayerT], experts: list[ExpertTensors], **more: float) -> Weights[LayerT]:
        """The whole, with what stands before and after the layers; the output matrix may be the embedding."""
        token_embd = self.matrix("token_embd.weight")
        output = self.matrix("output.weight") if self.has("output.weight") else token_embd
        return Weights(token_embd, tuple(layers), self.values("output_norm.weight"), output, tuple(experts), **more)


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    rng: np.random.Generator,
    own: Callable[[str, F32], F32 | None] = lambda name, values: None,
) -> dict[str, F32]:
    """Every tensor of a tiny model: norms around one, matrices that keep activations in range.

    own: what an architecture makes of the normal values of a tensor instead, or None.
    """
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        made = own(name, values)
        if made is None and "norm" in name:
            made = 1 + np.float32(0.3) * values
        elif made is None:
            made = values * np.float32(1.0 if name == "token_embd.weight" else 1.2 / math.sqrt(shape[-1]))
        tensors[name] = made
    return tensors


def matrix_bytes(record: object) -> int:
    """Bytes of every matrix of a record of weights, one that is named twice once; stacked experts do not count."""
    found: dict[int, int] = {}

    def visit(item: object) -> None:
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
