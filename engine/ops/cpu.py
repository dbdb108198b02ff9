"""The CPU backend: the kernels of `cpu/`, called through ctypes with the signatures of `reference`.

The kernels compute the bits of docs/arithmetic.md on every instruction set. A call costs a few microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.formats.block_types import FLOAT_TYPES
from engine.formats.quants import QTensor
from engine.ground.cpu_library import ISAS as ISAS
from engine.ops import (
    F32,
    I32,
    U8,
    Activation,
    AttentionInput,
    DeltaInput,
    DeltaLayer,
    Experts,
    Fetches,
    Gating,
    KVLayer,
    Limits,
    Recall,
    SharedExpert,
    ShortRows,
)
from engine.ops.cpu_workspace import (
    ACTIVATIONS,
    FLOAT32,
    GATE_KINDS,
    INT32,
    MAX_TAPS,
    UINT8,
    Workspace,
    address_of,
    check,
    input_of,
    output_of,
)
from engine.ops.cpu_workspace import supported_isas as supported_isas
from engine.ops.reference import find_absent as find_absent  # nothing is staged in host memory, so nobody waits for it
from engine.ops.reference import stage as stage
from engine.ops.reference import stage_ahead as stage_ahead
from engine.ops.sketches import sketch_bytes
from engine.placing import policy


def workspace(limits: Limits, threads: int, isa: str | None = None) -> Workspace:
    """Scratch memory and threads for steps within `limits`; `isa` forces an instruction set (tests)."""
    return Workspace(limits, threads, isa)


def _rows(ws: Workspace, array: NDArray[Any], name: str) -> int:
    """T of a step's array, checked against the limits."""
    rows = len(array)
    if rows > ws.limits.max_tokens:
        raise ValueError(f"{name}: {rows} rows, the workspace was made for {ws.limits.max_tokens}")
    return rows


def _require_float(gate: QTensor) -> None:
    if gate.qtype not in FLOAT_TYPES:
        raise ValueError(f"{gate.name}: a router is F32, F16 or BF16, not {gate.qtype.name}")


def _within(value: int, limit: int, name: str) -> None:
    if value > limit:
        raise ValueError(f"{name}: {value}, the workspace was made for {limit}")


# --- ops ------------------------------------------------------------------------------------------


def product(ws: Workspace, w: QTensor, x: F32, y: F32) -> None:
    """y [T, N] = rows of `w` [N, K] against activation rows `x` [T, K] (for tests and benchmarks)."""
    T, (N, K) = _rows(ws, x, "x"), w.shape
    _within(K, ws.widest, f"columns of {w.name}")
    ws.kernels.spark_product(
        ws.handle, ws.matrix(w, N, K), input_of(ws, x, FLOAT32, (T, K), "x"), T, output_of(ws, y, FLOAT32, (T, N), "y")
    )


def embed(ws: Workspace, table: QTensor, tokens: I32, x: F32, scale: float = 1.0) -> None:
    """Rows of the embedding table: x [T, D] = scale * table[tokens]; table [V, D] of any native type."""
    T, (V, D) = _rows(ws, tokens, "tokens"), table.shape
    result = ws.kernels.spark_embed(
        ws.handle,
        ws.matrix(table, V, D),
        input_of(ws, tokens, INT32, (T,), "tokens"),
        T,
        output_of(ws, x, FLOAT32, (T, D), "x"),
        scale,
    )
    check(result, "tokens")


def norm(ws: Workspace, x: F32, weight: F32, eps: float, out: F32) -> None:
    """The RMS norm of x [T, D] times weight [D], to out [T, D]."""
    T, D = _rows(ws, x, "x"), x.shape[1]
    ws.kernels.spark_norm(
        ws.handle,
        input_of(ws, x, FLOAT32, (T, D), "x"),
        T,
        D,
        input_of(ws, weight, FLOAT32, (D,), "weight"),
        eps,
        output_of(ws, out, FLOAT32, (T, D), "out"),
    )


def add_norm(
    ws: Workspace, y: F32, weight: F32, eps: float, x: F32, scale: float = 1.0, then: Sequence[tuple[F32, F32]] = ()
) -> None:
    """x [T, D] = scale * (x + the RMS norm of y [T, D] times weight [D]); then norms of x, as `norm` makes them."""
    T, D = _rows(ws, y, "y"), y.shape[1]
    _within(D, ws.widest, "columns of y")
    ws.kernels.spark_add_norm(
        ws.handle,
        input_of(ws, y, FLOAT32, (T, D), "y"),
        T,
        D,
        input_of(ws, weight, FLOAT32, (D,), "weight"),
        eps,
        output_of(ws, x, FLOAT32, (T, D), "x"),
        scale,
    )
    for norm_weight, out in then:
        norm(ws, x, norm_weight, eps, out)


def add_norms(
    ws: Workspace, a: F32, a_norm: F32, b: F32, b_norm: F32, weight: F32, eps: float, x: F32, scale: float = 1.0
) -> None:
    """x [T, D] = scale * (x + the RMS norm of the sum of those of a and b [T, D]); a is scratch afterwards."""
    norm(ws, a, a_norm, eps, a)
    add_norm(ws, b, b_norm, eps, a)
    add_norm(ws, a, weight, eps, x, scale)


def attention_input(
    ws: Workspace,
    x: F32,
    w: AttentionInput,
    eps: float,
    rope: F32,
    positions: I32,
    kv: KVLayer,
    slots: I32,
    q: F32,
    gate_out: F32 | None = None,
) -> None:
    """Norm, Q, K, V, per-head norms and RoPE; keys and values go to the cache, Q to `q`.

    Shapes as in `reference.attention_input`.
    """
    (T, D), (_, n_head, head_dim), wk, wv, gate = (_rows(ws, x, "x"), x.shape[1]), q.shape, w.wk, w.wv, w.gate
    record, n_head_kv, kv_dim = (None, 0, head_dim) if wk is None else ws.cache(kv)
    if kv_dim != head_dim or (wv is not None and wk is None):
        raise ValueError(f"q: heads of {head_dim}, of {kv_dim} in the cache")
    n_positions, _, half = rope.shape
    _within(D, ws.widest, "columns of x")
    _within(max(n_head, n_head_kv) * head_dim, ws.limits.n_head_dim, "heads")
    _within(2 * half, head_dim, "rotated dimensions")
    norms = [
        None if weight is None else input_of(ws, weight, FLOAT32, (head_dim,), name)
        for name, weight in (("q_norm", w.q_norm), ("k_norm", w.k_norm), ("v_norm", w.v_norm))
    ]
    if gate is None or gate_out is None:
        gating: tuple[int | None, int | None] = (None, None)
    else:
        G = gate.shape[0]
        gating = (ws.matrix(gate, G, D), output_of(ws, gate_out, FLOAT32, (T, G), "gate_out"))
    result = ws.kernels.spark_attention_input(
        ws.handle,
        input_of(ws, x, FLOAT32, (T, D), "x"),
        T,
        input_of(ws, w.norm, FLOAT32, (D,), "norm"),
        eps,
        ws.matrix(w.wq, n_head * head_dim, D),
        None if wk is None else ws.matrix(wk, n_head_kv * head_dim, D),
        None if wv is None else ws.matrix(wv, n_head_kv * head_dim, D),
        *norms,
        input_of(ws, rope, FLOAT32, (n_positions, 2, half), "rope"),
        n_positions,
        2 * half,
        input_of(ws, positions, INT32, (T,), "positions"),
        record,
        None if wk is None else input_of(ws, slots, INT32, (T,), "slots"),
        output_of(ws, q, FLOAT32, (T, n_head, head_dim), "q"),
        head_dim,
        *gating,
    )
    check(result, "positions or slots")


def attention(
    ws: Workspace,
    q: F32,
    kv: KVLayer,
    block_table: I32,
    sequence: I32,
    positions: I32,
    scale: float,
    out: F32,
    n_positions: int = 0,
    window: int = 0,
    gate: F32 | None = None,
    gate_kind: str = "",
    apart: bool = False,
    spans: tuple[tuple[int, int], ...] = (),
    as_block: bool = False,
    recall: Recall | None = None,
) -> None:
    """Causal attention over cached blocks, in logical order; shapes as in `reference.attention`."""
    T, n_head = _rows(ws, q, "q"), q.shape[1]
    record, n_head_kv, head_dim = ws.cache(kv)
    if n_head % n_head_kv:
        raise ValueError(f"q: {n_head} heads cannot share {n_head_kv} KV heads evenly")
    _within(n_head * head_dim, ws.limits.n_head_dim, "heads")
    n_sequence, max_blocks = block_table.shape
    by_head, gating = False, None
    if gate is not None:
        by_head = gate.shape[1] == n_head
        gating = input_of(ws, gate, FLOAT32, (T, n_head if by_head else n_head * head_dim), "gate")
    chosen: tuple[int | None, int | None, int | None] = (None, None, None)
    if recall is not None:
        chosen = (
            input_of(ws, recall.chosen, UINT8, (T, n_head_kv, max_blocks), "chosen"),
            input_of(ws, recall.left, FLOAT32, (T, n_head, 2), "left"),
            output_of(ws, recall.missed, FLOAT32, (T, n_head), "missed"),
        )
    result = ws.kernels.spark_attention(
        ws.handle,
        input_of(ws, q, FLOAT32, (T, n_head, head_dim), "q"),
        T,
        n_head,
        record,
        input_of(ws, block_table, INT32, (n_sequence, max_blocks), "block_table"),
        n_sequence,
        max_blocks,
        input_of(ws, sequence, INT32, (T,), "sequence"),
        input_of(ws, positions, INT32, (T,), "positions"),
        scale,
        output_of(ws, out, FLOAT32, (T, n_head * head_dim), "out"),
        window,
        gating,
        by_head,
        GATE_KINDS.index(gate_kind) if gate is not None else 0,
        *chosen,
    )
    check(result, "sequence, positions or block_table")


def summarize(ws: Workspace, kv: KVLayer, places: I32, blocks: I32, sketches: U8) -> None:
    """The sketches of full blocks of keys; shapes as in `reference.summarize`."""
    (record, n_head_kv, head_dim), (n,), n_blocks = ws.cache(kv), places.shape, len(sketches)
    result = ws.kernels.spark_summarize(
        ws.handle,
        record,
        address_of(places, INT32, (n,), "places"),
        address_of(blocks, INT32, (n,), "blocks"),
        n,
        n_blocks,
        output_of(ws, sketches, UINT8, (n_blocks, n_head_kv, sketch_bytes(head_dim)), "sketches"),
    )
    check(result, "places or blocks")


def choose(
    ws: Workspace,
    q: F32,
    sketches: U8,
    blocks: I32,
    sequence: I32,
    positions: I32,
    most: I32,
    leave: I32,
    keep: U8,
    scale: float,
    recall: Recall,
) -> None:
    """Which blocks each row reads, of those that have sketches; shapes as in `reference.choose`."""
    (T, n_head, head_dim), (n_blocks, n_head_kv, _), (n_sequence, width) = q.shape, sketches.shape, blocks.shape
    result = ws.kernels.spark_choose(
        ws.handle,
        input_of(ws, q, FLOAT32, (T, n_head, head_dim), "q"),
        T,
        n_head,
        n_head_kv,
        head_dim,
        input_of(ws, sketches, UINT8, (n_blocks, n_head_kv, sketch_bytes(head_dim)), "sketches"),
        n_blocks,
        input_of(ws, blocks, INT32, (n_sequence, width), "blocks"),
        n_sequence,
        width,
        input_of(ws, sequence, INT32, (T,), "sequence"),
        input_of(ws, positions, INT32, (T,), "positions"),
        input_of(ws, most, INT32, (T,), "most"),
        input_of(ws, leave, INT32, (T,), "leave"),
        input_of(ws, keep, UINT8, (n_sequence, width), "keep"),
        scale,
        output_of(ws, recall.chosen, UINT8, (T, n_head_kv, width), "chosen"),
        output_of(ws, recall.left, FLOAT32, (T, n_head, 2), "left"),
        output_of(ws, recall.read, INT32, (T, n_head_kv), "read"),
        output_of(ws, recall.masses, FLOAT32, (T, n_head, 2, width), "masses"),
        output_of(ws, recall.scores, FLOAT32, (T, n_head_kv, width), "scores"),
    )
    check(result, "sequence, positions or blocks")


def copy(ws: Workspace, x: F32, to: F32) -> None:
    """The array `to` becomes equal to x, of any shape."""
    to[...] = x


def fetch_ahead(
    ws: Workspace, x: F32, state: policy.SlotState, bank: Experts, short: ShortRows | None = None
) -> None:
    """A hint that the experts of `bank` are wanted soon by a step's x [T, D]; nothing can be had ahead of time."""


def attention_output(ws: Workspace, attended: F32, wo: QTensor, x: F32, add: bool = True) -> None:
    """x [T, D] += wo [D, H * head_dim] @ attended [T, H * head_dim], or = it without `add`."""
    T, (D, K) = _rows(ws, attended, "attended"), wo.shape
    _within(max(D, K), ws.widest, f"dimensions of {wo.name}")
    ws.kernels.spark_attention_output(
        ws.handle,
        input_of(ws, attended, FLOAT32, (T, K), "attended"),
        T,
        ws.matrix(wo, D, K),
        output_of(ws, x, FLOAT32, (T, D), "x"),
        add,
    )


def router(ws: Workspace, x: F32, norm: F32, eps: float, gate: QTensor, h: F32, logits: F32) -> None:
    """The normed residual h [T, D] and the router's logits [T, E]; gate [E, D] of a float type."""
    T, (E, D) = _rows(ws, x, "x"), gate.shape
    _require_float(gate)
    ws.kernels.spark_router(
        ws.handle,
        input_of(ws, x, FLOAT32, (T, D), "x"),
        T,
        input_of(ws, norm, FLOAT32, (D,), "norm"),
        eps,
        ws.matrix(gate, E, D),
        output_of(ws, h, FLOAT32, (T, D), "h"),
        output_of(ws, logits, FLOAT32, (T, E), "logits"),
    )


def route(
    ws: Workspace,
    logits: F32,
    gating: Gating,
    state: policy.SlotState,
    bank: Experts,
    counted: U8,
    rule: policy.Rule,
    experts: I32,
    weights: F32,
    fetches: Fetches,
    short: ShortRows | None = None,
) -> None:
    """Choose experts and weights for each row, and let the slots of the layer of `bank` follow (docs/residency.md).

    Shapes as in `reference.route`.
    """
    T, A, layer = _rows(ws, logits, "logits"), experts.shape[1], bank.layer
    L, E = state.slot_of.shape
    _within(E, ws.limits.n_expert, "experts")
    _within(A, min(E, ws.limits.n_expert_used), "active experts")
    if not 0 <= layer < L:
        raise ValueError(f"layer: {layer} of {L}")
    ws.kernels.spark_route(
        ws.handle,
        input_of(ws, logits, FLOAT32, (T, E), "logits"),
        T,
        A,
        ws.gating(gating, E),
        ws.slots(state),
        layer,
        input_of(ws, counted, UINT8, (T,), "counted"),
        rule.memory,
        output_of(ws, experts, INT32, (T, A), "experts"),
        output_of(ws, weights, FLOAT32, (T, A), "weights"),
        output_of(ws, fetches.rows, INT32, (E, 3), "fetches.rows"),
        output_of(ws, fetches.count, INT32, (1,), "fetches.count"),
    )


def dense_ffn(
    ws: Workspace,
    h: F32,
    gate: QTensor,
    up: QTensor,
    down: QTensor,
    x: F32,
    activation: Activation = "silu",
    add: bool = True,
    shared_gate: QTensor | None = None,
) -> None:
    """x [T, D] += s * down (act(gate h) * (up h)), or becomes it; shapes as in `reference.dense_ffn`."""
    T, (F, D) = _rows(ws, h, "h"), gate.shape
    _within(D, ws.limits.n_embd, "columns of h")
    _within(F, ws.limits.n_ff, f"rows of {gate.name}")
    if shared_gate is not None:
        _require_float(shared_gate)
    ws.kernels.spark_dense_ffn(
        ws.handle,
        input_of(ws, h, FLOAT32, (T, D), "h"),
        T,
        ws.matrix(gate, F, D),
        ws.matrix(up, F, D),
        ws.matrix(down, D, F),
        None if shared_gate is None else ws.matrix(shared_gate, 1, D),
        ACTIVATIONS.index(activation),
        output_of(ws, x, FLOAT32, (T, D), "x"),
        add,
    )


def expert_ffn(
    ws: Workspace,
    h: F32,
    experts: I32,
    weights: F32,
    bank: Experts,
    fetches: Fetches,
    x: F32,
    add: bool = True,
    shared: SharedExpert | None = None,
    then: tuple[F32, float] | None = None,
    short: ShortRows | None = None,
) -> None:
    """x [T, D] += the weighted sum of each row's experts, folded in rank order, or becomes it where `add` is false.

    h [T, D] the normed residual; experts int32, weights float32 [T, A]. Performs `fetches` first, then
    reads every expert through `bank.expert_ptr`. What a shared expert gives is added last. then, short: of no
    use here, where all rows are computed alike.
    """
    T, A = _rows(ws, h, "h"), experts.shape[1]
    D, E = bank.n_embd, len(bank.expert_ptr)
    _within(E, ws.limits.n_expert, "experts")
    _within(A, ws.limits.n_expert_used, "active experts")
    _within(D, ws.limits.n_embd, "columns of h")
    _within(bank.n_ff, ws.limits.n_ff_exp or ws.limits.n_ff, "rows of an expert")
    result = ws.kernels.spark_expert_ffn(
        ws.handle,
        input_of(ws, h, FLOAT32, (T, D), "h"),
        T,
        A,
        input_of(ws, experts, INT32, (T, A), "experts"),
        input_of(ws, weights, FLOAT32, (T, A), "weights"),
        ws.experts(bank),
        input_of(ws, fetches.rows, INT32, fetches.rows.shape, "fetches.rows"),
        input_of(ws, fetches.count, INT32, (1,), "fetches.count"),
        output_of(ws, x, FLOAT32, (T, D), "x"),
        add,
    )
    check(result, "experts or fetches")
    if shared is not None:
        dense_ffn(ws, h, shared.gate, shared.up, shared.down, x, bank.activation, True, shared.shared_gate)


def head(
    ws: Workspace, x: F32, rows: I32, norm: F32, eps: float, output: QTensor, logits: F32, softcap: float = 0.0
) -> None:
    """Final norm and output matrix for the chosen rows: logits [len(rows), V]; softcap > 0: through its tanh."""
    T, n, (V, D) = _rows(ws, x, "x"), _rows(ws, rows, "rows"), output.shape
    _within(D, ws.widest, "columns of x")
    result = ws.kernels.spark_head(
        ws.handle,
        input_of(ws, x, FLOAT32, (T, D), "x"),
        T,
        input_of(ws, rows, INT32, (n,), "rows"),
        n,
        input_of(ws, norm, FLOAT32, (D,), "norm"),
        eps,
        ws.matrix(output, V, D),
        output_of(ws, logits, FLOAT32, (n, V), "logits"),
        softcap,
    )
    check(result, "rows")


def delta_input(
    ws: Workspace,
    x: F32,
    w: DeltaInput,
    eps: float,
    mixed: F32,
    z: F32,
    beta: F32,
    alpha: F32,
) -> None:
    """Four products of the normed residual; shapes as in `reference.delta_input`."""
    T, D = _rows(ws, x, "x"), x.shape[1]
    _within(D, ws.widest, "columns of x")
    weights, outputs = w.matrices, (mixed, z, beta, alpha)
    ws.kernels.spark_delta_input(
        ws.handle,
        input_of(ws, x, FLOAT32, (T, D), "x"),
        T,
        input_of(ws, w.norm, FLOAT32, (D,), "norm"),
        eps,
        *(ws.matrix(m, m.shape[0], D) for m in weights),
        *(output_of(ws, y, FLOAT32, (T, m.shape[0]), m.name) for m, y in zip(weights, outputs, strict=True)),
    )


def delta(
    ws: Workspace,
    mixed: F32,
    beta: F32,
    alpha: F32,
    conv: F32,
    dt_bias: F32,
    a: F32,
    eps: float,
    layer: DeltaLayer,
    states: I32,
    sequence: I32,
    positions: I32,
    slots: I32,
    out: F32,
) -> None:
    """Convolution, gates and the gated delta rule, token by token; shapes as in `reference.delta`."""
    T, (_, kept, C), (_, H, d_v, d_k) = _rows(ws, mixed, "mixed"), layer.conv.shape, layer.state.shape
    _within(C, ws.limits.n_mixed, "channels of mixed")
    _within(H, ws.limits.n_head_v, "heads")
    key_width = C - H * d_v
    if key_width <= 0 or key_width % (2 * d_k) or kept >= MAX_TAPS:
        raise ValueError(f"layer: {C} channels for {H} heads of {d_v}, keys of {d_k}, {kept} inputs kept")
    result = ws.kernels.spark_delta(
        ws.handle,
        input_of(ws, mixed, FLOAT32, (T, C), "mixed"),
        T,
        input_of(ws, beta, FLOAT32, (T, H), "beta"),
        input_of(ws, alpha, FLOAT32, (T, H), "alpha"),
        input_of(ws, conv, FLOAT32, (C, kept + 1), "conv"),
        input_of(ws, dt_bias, FLOAT32, (H,), "dt_bias"),
        input_of(ws, a, FLOAT32, (H,), "a"),
        eps,
        ws.delta(layer),
        input_of(ws, states, INT32, (len(states), 2), "states"),
        len(states),
        input_of(ws, sequence, INT32, (T,), "sequence"),
        input_of(ws, positions, INT32, (T,), "positions"),
        input_of(ws, slots, INT32, (T,), "slots"),
        output_of(ws, out, FLOAT32, (T, H * d_v), "out"),
    )
    check(result, "sequence or states")


def delta_output(ws: Workspace, y: F32, z: F32, norm: F32, eps: float, w_out: QTensor, x: F32) -> None:
    """x += w_out of the normed and gated y; shapes as in `reference.delta_output`."""
    T, (D, K), d_v = _rows(ws, y, "y"), w_out.shape, len(norm)
    _within(K, ws.limits.n_z, f"columns of {w_out.name}")
    _within(D, ws.limits.n_embd, f"rows of {w_out.name}")
    if K % d_v:
        raise ValueError(f"norm: heads of {d_v} in rows of {K}")
    ws.kernels.spark_delta_output(
        ws.handle,
        input_of(ws, y, FLOAT32, (T, K), "y"),
        T,
        input_of(ws, z, FLOAT32, (T, K), "z"),
        input_of(ws, norm, FLOAT32, (d_v,), "norm"),
        d_v,
        eps,
        ws.matrix(w_out, D, K),
        output_of(ws, x, FLOAT32, (T, D), "x"),
    )


# --- for tests and benchmarks ---------------------------------------------------------------------


def exp(ws: Workspace, x: F32) -> F32:
    """The kernels' exponential of a 1-D array."""
    y = np.empty_like(x)
    ws.kernels.spark_exp(
        ws.handle, input_of(ws, x, FLOAT32, (len(x),), "x"), len(x), output_of(ws, y, FLOAT32, (len(x),), "y")
    )
    return y


def read_bytes(ws: Workspace, data: U8) -> int:
    """Read memory once on all threads, summing it as 64-bit words: the floor of every product."""
    n = math.prod(data.shape)
    return int(ws.kernels.spark_read(ws.handle, input_of(ws, data, UINT8, (n,), "data"), n))
