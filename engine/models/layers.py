"""What a step of a model is made of, and the loop over its layers, written once for all architectures.

An architecture gives `layer`, which is a list of ops and of the parts below; the loop embeds, goes through the layers
and makes logits. What concerns every layer of every model is done here: the residual that is kept for others, the
experts that a long step brings in ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from engine.formats.gguf import GGUFFile
from engine.formats.quants import QTensor
from engine.memory.residency import Residency
from engine.memory.shape import CacheShape
from engine.models.loading import AttentionWeights, Dense, LayerT, Weights
from engine.ops import (
    F32,
    I32,
    SMALL_TOKENS,
    U8,
    DeltaLayer,
    Fetches,
    Gating,
    KVLayer,
    Recall,
    SharedExpert,
    ShortRows,
)
from engine.ops.device import Array
from engine.ops.interface import Ops, Workspace

KEPT_TOKENS = SMALL_TOKENS  # of a step after which some can be taken back


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


class ModelConfig(CacheShape, Protocol):
    """What is read of any architecture's configuration, besides what the cache reads of it."""

    @property
    def n_embd(self) -> int:
        """D, the width of the residual stream."""

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""

    @property
    def n_ctx_train(self) -> int:
        """Positions that the model was trained on."""

    @property
    def n_expert(self) -> int:
        """E, 0 in a model without experts."""

    @property
    def n_expert_used(self) -> int:
        """A of a token, 0 in a model without experts."""

    @property
    def n_ff_exp(self) -> int:
        """F of an expert, 0 in a model without experts."""

    @property
    def eps(self) -> float:
        """Of the RMS norms."""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts, in order; an MoE layer's number is its place here."""

    @property
    def widths(self) -> Widths:
        """The widest of any layer."""

    def metadata(self) -> dict[str, Any]:
        """The GGUF keys that `from_gguf` reads back."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor and its shape, slowest dimension first."""


ConfigT = TypeVar("ConfigT", bound=ModelConfig)


@dataclass(frozen=True, slots=True)
class Recalled:
    """What a step has more whose rows read a part of their contexts, and scratch for SMALL_TOKENS rows of a layer.

    sketches[i]: what layer i chooses by; None: it reads all that it sees. blocks[g]: int32 [n_sequence, W], numbers of
    blocks by KV group; most, leave: int32 [rows]; keep: uint8 [n_sequence, W]: as the op `choose` takes them.
    missed: float32 [n_layer, rows * heads]; read: int32 [n_layer, rows * KV heads]; chosen, left, masses, scores, last:
    as in `Recall`, flat. absent: int32, flat: what the op `find_absent` finds.
    """

    sketches: tuple[U8 | None, ...]
    blocks: tuple[I32, ...]
    most: I32
    leave: I32
    keep: U8
    chosen: U8
    left: F32
    missed: F32
    read: I32
    masses: F32
    scores: F32
    last: I32
    absent: I32
    # Views are made once, as those of `Buffers`, and shared with the views for fewer sequences.
    _views: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False, compare=False)

    def first(self, n: int, T: int) -> Recalled:
        """The same for a step of T rows of n sequences."""
        key = "first", n, T
        if key not in self._views:
            blocks = tuple(table[:n] for table in self.blocks)
            self._views[key] = replace(
                self, blocks=blocks, most=self.most[:T], leave=self.leave[:T], keep=self.keep[:n]
            )
        made: Recalled = self._views[key]
        return made

    def missed_of(self, T: int, missed: F32) -> F32:
        """What the last step of T rows left out in all layers that choose, [T, heads of all]; missed: as was read."""
        chose = [key for key in self._views if len(key) == 4 and key[1] == T]
        found = [missed[layer, : T * H].reshape(T, H) for layer, _, H, _ in chose]
        return np.concatenate(found, axis=1) if found else np.zeros((T, 0), np.float32)

    def read_of(self, T: int, read: I32) -> list[int] | None:
        """The blocks that each row of the last step of T rows read in all layers and KV heads that choose, together.

        read: as was read from the device. None where nothing is known of so many rows.
        """
        chose = [key for key in self._views if len(key) == 4 and key[1] == T]
        found = [read[layer, : T * K].reshape(T, K) for layer, _, _, K in chose]
        return np.concatenate(found, axis=1).sum(axis=1).tolist() if found else None

    def heads_of(self, n_layer: int) -> I32:
        """The query heads and KV heads of each layer that has chosen, int32 [2, n_layer]; 0 of others."""
        heads = np.zeros((2, n_layer), np.int32)
        for layer, _, H, K in (key for key in self._views if len(key) == 4):
            heads[:, layer] = H, K
        return heads

    def absent_of(self, K: int, n: int) -> I32:
        """Where is written what the rows of a layer of K KV heads read of a staging area, int32 [K, n]."""
        if (K, n) not in self._views:
            self._views[K, n] = self.absent[: K * n].reshape(K, n)
        made: I32 = self._views[K, n]
        return made

    def of(self, layer: int, T: int, H: int, K: int) -> Recall:
        """What a layer of H query and K KV heads chooses for T rows."""
        key, alike, W = (layer, T, H, K), (T, H, K), self.keep.shape[1]
        if alike not in self._views:
            self._views[alike] = Recall(
                self.chosen[: T * K * W].reshape(T, K, W), self.left[: T * H * 2].reshape(T, H, 2), self.missed[layer],
                self.read[layer], self.masses[: T * H * 2 * W].reshape(T, H, 2, W),
                self.scores[: T * K * W].reshape(T, K, W), self.last[: T * K].reshape(T, K),
            )  # fmt: skip
        if key not in self._views:
            own = self.missed[layer, : T * H].reshape(T, H), self.read[layer, : T * K].reshape(T, K)
            self._views[key] = replace(self._views[alike], missed=own[0], read=own[1])
        made: Recall = self._views[key]
        return made


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of one forward pass: T tokens of one or more sequences, arrays of the backend's device.

    tokens, positions, sequence: int32 [T]: token id, position in its sequence, row of the block tables. slots[g]: int32
    [T], slot in the cache of KV group g. block_table[g]: int32 [n_sequence, max_blocks]. states: int32 [n_sequence, 2],
    the recurrent state to read and to write. counted: uint8 [T], whose routing enters the counters. rows: int32 [R],
    the tokens whose logits are wanted. n_positions: one more than the largest position, as the host knows it (0 in a
    captured graph). apart: every token is of a sequence of its own. decoded: none is of a prompt, which imposed
    choices of experts ask. spans: of a long step of several sequences, the tokens of each and one more than its largest
    position. recall: where rows may read a part; None: all read all. short: of a long step, the rows whose experts are
    computed as in a short one; None: there are none.
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
    apart: bool = False
    decoded: bool = False
    spans: tuple[tuple[int, int], ...] = ()
    recall: Recalled | None = None
    short: ShortRows | None = None


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a forward pass writes; allocated once for the largest step, `first(T, R)` views it.

    x, h, y: float32 [T, D]; router [T, E]; experts int32 and weights float32 [L, T, A], L the MoE layers; logits
    [R, V]; hidden: float32 [n_layer, T, D], the residual entering each layer, or None when nobody asked for it;
    features: float32 [len(captured), T, D], the residual leaving the `captured` layers, in their order, or None.
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
    features: F32 | None = None
    captured: tuple[int, ...] = ()
    # Views are made once: where an op keeps what it knows of an array, a new view costs it more than its address.
    _views: dict[tuple[int, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def first(self, T: int, R: int) -> Buffers:
        """Contiguous views for a step of T tokens, R of which want logits."""
        if T > SMALL_TOKENS:
            return self._first(T, R)
        if (-1, T, R) not in self._views:
            self._views[-1, T, R] = self._first(T, R)
        made: Buffers = self._views[-1, T, R]
        return made

    def _first(self, T: int, R: int) -> Buffers:
        return replace(
            self, x=self.x[:T], h=self.h[:T], y=self.y[:T], router=self.router[:T],
            experts=_layers_of(self.experts, T), weights=_layers_of(self.weights, T), logits=self.logits[:R],
            hidden=None if self.hidden is None else _layers_of(self.hidden, T),
            features=None if self.features is None else _layers_of(self.features, T),
        )  # fmt: skip

    def heads(self, n_head: int, head_dim: int) -> F32:
        """Queries [T, n_head, head_dim]."""
        return self._view(0, self.scratch_q, n_head, head_dim)

    def attended(self, width: int) -> F32:
        """What attention or a recurrence gives, [T, width]."""
        return self._view(1, self.scratch_attended, width)

    def gate(self, width: int) -> F32:
        """Values of an attention gate, [T, width]."""
        return self._view(2, self.scratch_gate, width)

    def z(self, width: int) -> F32:
        """Values of a DeltaNet output gate, [T, width]."""
        return self._view(3, self.scratch_z, width)

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

    def chosen(self, m: int) -> tuple[I32, F32]:
        """The experts of MoE layer m and their weights, [T, A] each."""
        key = (4, m)
        if key not in self._views:
            self._views[key] = self.experts[m], self.weights[m]
        made: tuple[I32, F32] = self._views[key]
        return made

    def _view(self, which: int, scratch: F32, *shape: int) -> F32:
        key = (which, *shape)
        if key not in self._views:
            T = len(self.x)
            self._views[key] = scratch.reshape(-1)[: T * prod(shape)].reshape(T, *shape)
        made: F32 = self._views[key]
        return made


def _layers_of(array: Array, T: int) -> Array:
    """[L, max T, n] as a contiguous [L, T, n] at the beginning of the same memory."""
    L, _, n = array.shape
    return array.reshape(-1)[: L * T * n].reshape(L, T, n)


class Caches(Protocol):
    """What layers read of the cache: a `KVCache`, or a part of it."""

    @property
    def layers(self) -> tuple[KVLayer | None, ...]:
        """The keys and values that each layer reads."""

    @property
    def group_of(self) -> tuple[int, ...]:
        """The group of each of these."""

    @property
    def delta(self) -> tuple[DeltaLayer | None, ...]:
        """The recurrent state of each layer."""

    @property
    def stages(self) -> bool:
        """Whether any layer has something to be brought."""

    def staging(self, layer: int) -> tuple[I32, KVLayer, KVLayer] | None:
        """What `stage` takes to bring a layer what it reads and the pool has not; None where the pool has all."""


@dataclass(frozen=True, slots=True)
class Pass(Generic[ConfigT]):
    """One forward pass: what the layers of a model compute with.

    ops, ws: the backend and its workspace. residency: None in a model without experts. ropes: what the architecture's
    `rope_tables` gave, on the device. norms: by which each layer reads the residual stream first.
    """

    config: ConfigT
    ops: Ops
    ws: Workspace
    step: Step
    kv: Caches
    residency: Residency | None
    ropes: tuple[F32, ...]
    norms: tuple[F32, ...]
    b: Buffers

    def attention(
        self,
        i: int,
        w: AttentionWeights,
        head_dim: int,
        scale: float,
        *,
        rope: int = 0,
        window: int = 0,
        gate_kind: str = "",
        to: F32 | None = None,
    ) -> None:
        """Attention of layer i: x += W_o attention(rms(x)), or `to` = it; rope: which of `ropes`."""
        ops, ws, b, step, kv = self.ops, self.ws, self.b, self.step, self.kv.layers[i]
        assert kv is not None, f"layer {i} has no cache"
        inputs, group = w.inputs, self.kv.group_of[i]
        width = inputs.wq.shape[0]
        q, attended = b.heads(width // head_dim, head_dim), b.attended(width)
        gate = None if inputs.gate is None else b.gate(inputs.gate.shape[0])
        ops.attention_input(
            ws, b.x, inputs, self.config.eps, self.ropes[rope], step.positions, kv, step.slots[group], q, gate
        )
        sketches = None if step.recall is None else step.recall.sketches[i]
        staging = self.kv.staging(i)
        if staging is not None and (sketches is None or len(q) > SMALL_TOKENS):
            ops.stage(ws, *staging)
        if step.recall is not None and sketches is not None:
            self._recalled(i, step.recall, sketches, q, scale, attended, gate, gate_kind)
        else:
            ops.attention(
                ws, q, kv, step.block_table[group], step.sequence, step.positions, scale, attended, step.n_positions,
                window=window, gate=gate, gate_kind=gate_kind, apart=step.apart, spans=step.spans,
            )  # fmt: skip
        self.stage_ahead(i + 1)
        ops.attention_output(ws, attended, w.wo, b.x if to is None else to, add=to is None)

    def _recalled(
        self, i: int, recall: Recalled, sketches: U8, q: F32, scale: float, out: F32, gate: F32 | None, gate_kind: str
    ) -> None:
        """Attention of layer i to what its rows choose, so many rows at a time as there is scratch for."""
        kv, step, group, T = self.kv.layers[i], self.step, self.kv.group_of[i], len(q)
        staging = self.kv.staging(i) if T <= SMALL_TOKENS else None
        assert kv is not None
        for first in range(0, T, SMALL_TOKENS):

            def some(array: Array, first: int = first) -> Array:
                return array if T <= SMALL_TOKENS else array[first : first + SMALL_TOKENS]

            queries, sequence, positions = some(q), some(step.sequence), some(step.positions)
            chosen = recall.of(i, len(queries), q.shape[1], sketches.shape[1])
            self.ops.choose(
                self.ws, queries, sketches, recall.blocks[group], sequence, positions, some(recall.most),
                some(recall.leave), recall.keep, scale, chosen,
            )  # fmt: skip
            if staging is not None:  # of what is at home, only what the rows have chosen
                wanted = recall.absent_of(sketches.shape[1], len(staging[0]))
                self.ops.find_absent(self.ws, kv, step.block_table[group], sequence, chosen, staging[0], wanted)
                self.ops.stage(self.ws, *staging, wanted)
            self.ops.attention(
                self.ws, queries, kv, step.block_table[group], sequence, positions, scale, some(out), step.n_positions,
                gate=None if gate is None else some(gate), gate_kind=gate_kind, recall=chosen,
            )  # fmt: skip

    def stage_ahead(self, first: int) -> None:
        """Let what the next layer from `first` on reads come from host memory beside what is computed."""
        if len(self.step.tokens) <= SMALL_TOKENS or not self.kv.stages:
            return
        n_layer = min(self.config.n_layer, len(self.kv.layers))  # a block that drafts has one of its own
        found = (self.kv.staging(i) for i in range(first, n_layer))
        if (staging := next((one for one in found if one is not None), None)) is not None:
            self.ops.stage_ahead(self.ws, *staging)

    def dense(self, norm: F32, w: Dense) -> None:
        """A dense FFN: x += ffn(rms(x))."""
        self.ops.norm(self.ws, self.b.x, norm, self.config.eps, self.b.h)
        self.ops.dense_ffn(self.ws, self.b.h, w.gate, w.up, w.down, self.b.x)

    def route(self, m: int, norm: F32, router: QTensor, gating: Gating, h: F32 | None = None) -> None:
        """Choose the experts of MoE layer m by rms(x) * norm, which is left in `h` or `b.h`."""
        b, r = self.b, self.residency
        assert r is not None
        self.ops.router(self.ws, b.x, norm, self.config.eps, router, b.h if h is None else h, b.router)
        self.ops.route(
            self.ws, b.router, gating, r.live, r.banks[m], self.step.counted, r.rule, *b.chosen(m), b.fetches,
            short=self.step.short,
        )  # fmt: skip

    def experts(self, m: int, shared: SharedExpert | None = None, to: F32 | None = None) -> None:
        """Experts of MoE layer m, as they were chosen: x += experts(h), or `to` = it."""
        b, r, behind = self.b, self.residency, self.config.moe_layers[m] + 1
        assert r is not None
        then = (self.norms[behind], self.config.eps) if to is None and behind < len(self.norms) else None
        self.ops.expert_ffn(
            self.ws, b.h, *b.chosen(m), r.banks[m], b.fetches, b.x if to is None else to,
            add=to is None, shared=shared, then=then, short=self.step.short,
        )  # fmt: skip


class ConfigClass(Protocol):
    """The class of an architecture's configurations."""

    def from_gguf(self, file: GGUFFile) -> ModelConfig:
        """Read and check the metadata; a variant that is not implemented is refused by name."""


class Architecture(Protocol):
    """A model file of this room: a module with these functions; config and weights are its own kinds."""

    @property
    def ARCH(self) -> str:  # noqa: N802
        """What `general.architecture` says of it."""

    @property
    def Config(self) -> ConfigClass:  # noqa: N802
        """Its hyper-parameters."""

    def load(self, file: GGUFFile, config: Any) -> Weights[Any]:
        """Map every tensor with its shape checked; an unknown tensor is refused, not ignored."""

    def rope_tables(self, config: Any, n_ctx: int) -> tuple[F32, ...]:
        """Tables of RoPE for n_ctx positions, which `layer` finds as `Pass.ropes`."""

    def layer(self, p: Pass[Any], i: int, w: Any) -> None:
        """Layer i of a step, as ops and parts of `Pass`."""

    def tiny(self, rng: np.random.Generator, **changes: Any) -> tuple[ModelConfig, dict[str, F32]]:
        """A small configuration with `changes` of its fields, and random tensors, for tests."""


class Recurrent(Architecture, Protocol):
    """An architecture with layers whose state is replayed where tokens are taken back."""

    def replay(self, p: Pass[Any], weights: Weights[Any]) -> None:
        """The recurrences of a kept step again, for the tokens of `p.step` alone."""


def head(
    config: ModelConfig, weights: Weights[LayerT], ops: Ops, ws: Workspace, rows: I32, x: F32, logits: F32
) -> None:
    """Logits [R, V] of the given rows of the residual stream x [T, D]."""
    ops.head(ws, x, rows, weights.output_norm, config.eps, weights.output, logits, softcap=weights.softcap)


def forward(arch: Architecture, weights: Weights[LayerT], p: Pass[ConfigT]) -> None:
    """One step: `p.b.logits` for `p.step.rows`; cache, states and residency are updated."""
    ops, ws, b, r = p.ops, p.ws, p.b, p.residency
    moe = {i: m for m, i in enumerate(p.config.moe_layers)}
    ops.embed(ws, weights.token_embd, p.step.tokens, b.x, scale=weights.embed_scale)
    p.stage_ahead(0)
    if r is not None and moe:
        ops.fetch_ahead(ws, b.x, r.live, r.banks[0], p.step.short)
    for i, layer in enumerate(weights.layers):
        if b.hidden is not None:
            ops.copy(ws, b.x, b.hidden[i])
        if r is not None and i in moe and moe[i] + 1 < len(r.banks):
            ops.fetch_ahead(ws, b.x, r.live, r.banks[moe[i] + 1], p.step.short)
        arch.layer(p, i, layer)
        if b.features is not None and i in b.captured:
            ops.copy(ws, b.x, b.features[b.captured.index(i)])
    if len(p.step.rows):
        head(p.config, weights, ops, ws, p.step.rows, b.x, b.logits)
