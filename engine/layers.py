"""What a step of a model is made of, and the loop over its layers, written once for all architectures.

An architecture gives `layer`, which is a list of ops and of the parts below; the loop embeds, goes through the layers
and makes logits. What concerns every layer of every model is done here: the residual that is kept for others, the
experts that a long step brings in ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from engine.kv import KVCache
from engine.loading import AttentionWeights, Dense, Weights
from engine.ops import F32, I32, U8, Fetches, Gating, SharedExpert
from engine.quants import QTensor
from engine.residency import Residency

KEPT_TOKENS = 8  # of a step after which some can be taken back


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


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: what the layers of a model compute with.

    ops, ws: the backend and its workspace. residency: None in a model without experts. ropes: what the architecture's
    `rope_tables` gave, on the device.
    """

    config: Any
    ops: ModuleType
    ws: Any
    step: Step
    kv: KVCache
    residency: Residency | None
    ropes: tuple[F32, ...]
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
        group, width = self.kv.group_of[i], w.wq.shape[0]
        q, attended = b.heads(width // head_dim, head_dim), b.attended(width)
        gate = None if w.gate is None else b.gate(w.gate.shape[0])
        ops.attention_input(
            ws, b.x, w.norm, self.config.eps, w.wq, w.wk, w.wv, w.q_norm, w.k_norm, self.ropes[rope], step.positions,
            kv, step.slots[group], q, v_norm=w.v_norm, gate=w.gate, gate_out=gate,
        )  # fmt: skip
        ops.attention(
            ws, q, kv, step.block_table[group], step.sequence, step.positions, scale, attended, step.n_positions,
            window=window, gate=gate, gate_kind=gate_kind,
        )  # fmt: skip
        ops.attention_output(ws, attended, w.wo, b.x if to is None else to, add=to is None)

    def dense(self, norm: F32, w: Dense) -> None:
        """A dense FFN: x += ffn(rms(x))."""
        self.ops.norm(self.ws, self.b.x, norm, self.config.eps, self.b.h)
        self.ops.dense_ffn(self.ws, self.b.h, w.gate, w.up, w.down, self.b.x)

    def route(self, m: int, norm: F32, router: QTensor, gating: Gating) -> None:
        """Choose the experts of MoE layer m by rms(x) * norm, which is left in `b.h`."""
        b, r = self.b, self.residency
        assert r is not None
        self.ops.router(self.ws, b.x, norm, self.config.eps, router, b.h, b.router)
        self.ops.route(
            self.ws, b.router, gating, r.live, m, self.step.counted, r.rule, b.experts[m], b.weights[m], b.fetches
        )

    def experts(self, m: int, shared: SharedExpert | None = None, to: F32 | None = None) -> None:
        """Experts of MoE layer m, as they were chosen: x += experts(h), or `to` = it."""
        b, r = self.b, self.residency
        assert r is not None
        self.ops.expert_ffn(
            self.ws, b.h, b.experts[m], b.weights[m], r.banks[m], b.fetches, b.x if to is None else to,
            add=to is None, shared=shared,
        )  # fmt: skip


def head(config: Any, weights: Weights[Any], ops: ModuleType, ws: Any, rows: I32, x: F32, logits: F32) -> None:
    """Logits [R, V] of the given rows of the residual stream x [T, D]."""
    ops.head(ws, x, rows, weights.output_norm, config.eps, weights.output, logits, softcap=weights.softcap)


def forward(arch: ModuleType, weights: Weights[Any], p: Pass) -> None:
    """One step: `p.b.logits` for `p.step.rows`; cache, states and residency are updated."""
    ops, ws, b, r, T = p.ops, p.ws, p.b, p.residency, p.b.x.shape[0]
    moe = {i: m for m, i in enumerate(p.config.moe_layers)}
    ops.embed(ws, weights.token_embd, p.step.tokens, b.x, scale=weights.embed_scale)
    if r is not None and moe:
        ops.fetch_ahead(ws, r.live, 0, r.banks[0], T)
    for i, layer in enumerate(weights.layers):
        if b.hidden is not None:
            ops.copy(ws, b.x, b.hidden[i])
        if r is not None and i in moe and moe[i] + 1 < len(r.banks):
            ops.fetch_ahead(ws, r.live, moe[i] + 1, r.banks[moe[i] + 1], T)
        arch.layer(p, i, layer)
    if len(p.step.rows):
        head(p.config, weights, ops, ws, p.step.rows, b.x, b.logits)
