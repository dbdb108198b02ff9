"""Blocks that predict a further token (`nextn`, MTP): what a file holds of one behind the model's layers, and its step.

x = eh_proj [rms(e) * enorm | rms(h) * hnorm], then a layer of full attention like the model's own, a norm and the head:
with e the embedding of the token at p + 1 and h the state at p, logits of the token at p + 2. h is the model's, after
its last norm, or the block's own after its norm, where drafts follow one another. The product with the two joined
vectors is computed as two, with the halves of the matrix, so that nothing has to be laid side by side.
The names are those of llama.cpp's files, `blk.N.nextn.*`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine.formats.block_types import NoKernelsError
from engine.formats.gguf import GGUFFile
from engine.formats.quants import QTensor, row_bytes
from engine.memory.kv import KVCache
from engine.memory.residency import ExpertTensors, slot_bytes
from engine.memory.shape import CacheShape, DeltaShape, KVGroup
from engine.models.conventions import mtp_blocks
from engine.models.layers import Architecture, ModelConfig, Pass
from engine.models.loading import LayerWeights, Shapes, Tensors, Weights, matrix_bytes
from engine.ops import F32, I32, DeltaLayer, KVLayer

_NAMED = 3  # tensors in one reason


class Predicting(Architecture, Protocol):
    """An architecture whose files may hold such a block."""

    def next_shapes(self, config: Any, p: str) -> Shapes:
        """The tensors of the layer in the block, whose names begin with p."""

    def next_layer(self, t: Tensors, config: Any) -> tuple[Any, tuple[ExpertTensors, ...]]:
        """That layer, which `layer` runs as layer 0, and its experts, if it has any."""


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of a block: its place among the blocks of the file, the norms before eh_proj, the halves of that [D, D].

    layer, experts: as `Predicting.next_layer` gives them. token_embd, output, output_norm: its own, None where the
    model's serve both.
    """

    number: int
    token_norm: F32
    hidden_norm: F32
    from_token: QTensor
    from_hidden: QTensor
    layer: LayerWeights
    experts: tuple[ExpertTensors, ...]
    token_embd: QTensor | None
    output: QTensor | None
    output_norm: F32 | None

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices, and of all its experts."""
        return matrix_bytes(self) + self.slots_bytes

    @property
    def slots_bytes(self) -> int:
        """Bytes of its experts, all of them in slots."""
        return sum(e.gate.shape[0] * slot_bytes(e) for e in self.experts)


@dataclass(frozen=True, slots=True)
class Found:
    """A block that can be run, or None; said: what the user should know of it, or why there is none."""

    block: Block | None
    said: str


def find(file: GGUFFile, arch: Architecture, config: ModelConfig) -> Found:
    """The first block of a file that predicts a further token.

    One that is not whole, as tools leave it that do not know its tensors, or that has types without kernels, is no
    reason to refuse the model; one with other shapes, or with tensors that nobody knows, is refused.
    """
    blocks = mtp_blocks(file.metadata, file.architecture)
    if not blocks:
        return Found(None, "the file has no block that predicts further tokens")
    p = f"blk.{blocks.start}"
    if not hasattr(arch, "next_layer"):
        return Found(None, f"{p} predicts further tokens, which is not implemented for {file.architecture}")
    if lacking := _Tensors(file, arch, config).lacking:
        more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        return Found(None, f"{p} predicts further tokens, but lacks {', '.join(lacking[:_NAMED])}{more}")
    try:
        block = load(file, arch, config)
    except NoKernelsError as error:
        return Found(None, f"{p} predicts further tokens, but {error.message}")
    said = f"{p} drafts tokens and takes {block.nbytes / 2**20:.0f} MiB"
    said += ", all its experts in fast memory" if block.experts else ""
    return Found(block, said + (f"; {len(blocks) - 1} behind it are left out" if len(blocks) > 1 else ""))


def load(file: GGUFFile, arch: Any, config: ModelConfig) -> Block:
    """Map every tensor of the first block with its shape checked; an unknown or a missing one is refused."""
    tensors = _Tensors(file, arch, config)
    t = tensors.layer(tensors.number)
    layer, experts = arch.next_layer(t, config)
    from_token, from_hidden = split_columns(t.matrix("nextn.eh_proj.weight"))
    embed, head, norm = (
        f"nextn.{name}.weight" for name in ("embed_tokens", "shared_head_head", "shared_head_norm")
    )  # fmt: skip
    return Block(
        tensors.number, t.values("nextn.enorm.weight"), t.values("nextn.hnorm.weight"), from_token, from_hidden, layer,
        experts, t.matrix(embed) if t.has(embed) else None, t.matrix(head) if t.has(head) else None,
        t.values(norm) if t.has(norm) else None,
    )  # fmt: skip


def shapes(arch: Any, config: ModelConfig, number: int) -> tuple[Shapes, Shapes]:
    """The tensors of a block that it must have, and those that it may have."""
    p, D = f"blk.{number}.", config.n_embd
    own = {"eh_proj": (D, 2 * D), "enorm": (D,), "hnorm": (D,)}
    may = {
        "embed_tokens": (config.n_vocab, D), "shared_head_head": (config.n_vocab, D), "shared_head_norm": (D,),
    }  # fmt: skip
    required, optional = ({f"{p}nextn.{name}.weight": shape for name, shape in of.items()} for of in (own, may))
    return required | arch.next_shapes(config, p), optional


class _Tensors(Tensors):
    """Those of the first block of a file. lacking: the required ones that the file does not have, alone or fused."""

    def __init__(self, file: GGUFFile, arch: Any, config: ModelConfig) -> None:
        self.number = mtp_blocks(file.metadata, file.architecture).start
        p = f"blk.{self.number}."
        required, optional = shapes(arch, config, self.number)
        super().__init__(file, required | optional, lambda name: not name.startswith(p), ahead=True)
        self.lacking = [name for name in required if name not in file.tensors and name not in self.fused]


def split_columns(joined: QTensor) -> tuple[QTensor, QTensor]:
    """The first and the second half of every row, as two matrices; halves are whole blocks, so bytes move."""
    rows, cols = joined.shape
    row_bytes(joined.qtype, cols // 2, joined.name)  # or they are not
    halves = joined.data.reshape(rows, 2, -1)
    first, second = (joined.reordered(f"{joined.name}[:,{i}]", (rows, cols // 2), halves[:, i]) for i in range(2))
    return first, second


# --- the cache ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WithBlock:
    """What the cache of a model keeps that has such a block: one more layer in the group of full attention.

    It has the blocks and slots of the model's own full layers, so whatever moves those moves it along.
    """

    config: CacheShape

    @property
    def n_layer(self) -> int:
        """Layers of the model, and the block's."""
        return self.config.n_layer + 1

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The model's, the first without a window being the block's, too."""
        groups = list(self.config.kv_groups)
        full = next(i for i, group in enumerate(groups) if not group.window)
        groups[full] = replace(groups[full], layers=(*groups[full].layers, self.config.n_layer))
        return tuple(groups)

    @property
    def delta(self) -> DeltaShape | None:
        """The model's recurrent layers."""
        return self.config.delta

    def kv_layer(self, layer: int) -> int | None:
        """The block's own cache, or what the model's layer reads."""
        return layer if layer == self.config.n_layer else self.config.kv_layer(layer)


@dataclass(frozen=True, slots=True)
class LastLayer:
    """The last layer of a cache, as the only one: what the layer of the block reads as layer 0."""

    kv: KVCache

    @property
    def layers(self) -> tuple[KVLayer | None, ...]:
        """Its keys and values."""
        return self.kv.layers[-1:]

    @property
    def group_of(self) -> tuple[int, ...]:
        """Its group."""
        return self.kv.group_of[-1:]

    @property
    def delta(self) -> tuple[DeltaLayer | None, ...]:
        """It has no state."""
        return (None,)

    @property
    def stages(self) -> bool:
        """As `KVCache.stages`."""
        return self.kv.stages

    def staging(self, layer: int) -> tuple[I32, KVLayer, KVLayer] | None:
        """As `KVCache.staging`."""
        return self.kv.staging(len(self.kv.layers) - 1)


# --- a step -------------------------------------------------------------------------------------------


def forward(arch: Architecture, block: Block, weights: Weights[Any], p: Pass[Any], norm: F32) -> None:
    """One step of the block over `p.step`, whose tokens are those that follow its positions.

    `p.b.y` holds the residual of each position, which `norm` makes the state of, and keeps it. Then `p.b.x` is the
    block's own residual, and `p.b.logits` those of `p.step.rows`. weights: of the model. `p.residency` has the block's
    experts alone.
    """
    ops, ws, b, eps = p.ops, p.ws, p.b, p.config.eps
    if p.residency is not None:
        ops.fetch_ahead(ws, b.x, p.residency.live, p.residency.banks[0], p.step.short)
    embedded = b.attended(p.config.n_embd)
    ops.embed(ws, block.token_embd or weights.token_embd, p.step.tokens, embedded, scale=weights.embed_scale)
    ops.norm(ws, b.y, norm, eps, b.x)
    ops.norm(ws, b.x, block.hidden_norm, eps, b.h)
    ops.attention_output(ws, b.h, block.from_hidden, b.x, add=False)
    ops.norm(ws, embedded, block.token_norm, eps, b.h)
    ops.attention_output(ws, b.h, block.from_token, b.x)
    arch.layer(p, 0, block.layer)
    if len(p.step.rows):
        head(block, weights, p)


def head(block: Block, weights: Weights[Any], p: Pass[Any], output: QTensor | None = None) -> None:
    """`p.b.logits` of `p.step.rows` of the block's residual. output: another matrix than the block's."""
    output = output or block.output or weights.output
    p.ops.head(
        p.ws, p.b.x, p.step.rows, last_norm(block, weights), p.config.eps, output, p.b.logits, softcap=weights.softcap
    )  # fmt: skip


def last_norm(block: Block, weights: Weights[Any]) -> F32:
    """The norm that makes a state of the block's residual."""
    return weights.output_norm if block.output_norm is None else block.output_norm
