"""The CUDA backend: the kernels of `cuda/` with the signatures of `engine/ops/reference.py`.

A step of at most SMALL_TOKENS tokens follows docs/arithmetic.md (attention excepted, whose sums are split by
position); a longer one runs on tensor cores, but for the experts of its short rows. Arrays are the device's (see
device.py); nothing here waits for the device, allocates, or decides by what an array holds, so a whole step can be
captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from gguf import GGMLQuantizationType as QType

from engine.formats.block_types import FLOAT_TYPES
from engine.formats.quants import QTensor
from engine.ops import (
    SMALL_TOKENS,
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
from engine.ops.cuda import recall as recalling
from engine.ops.cuda import routing
from engine.ops.cuda.device import Array, Device
from engine.ops.cuda.experts import runs_beside
from engine.ops.cuda.long_jobs import LongJobs
from engine.ops.cuda.products import Quantized
from engine.ops.cuda.workspace import Workspace as Workspace
from engine.placing import policy

# From so many tokens on a prefill step brings in a layer's missing experts while the layer before it computes; a
# shorter one waits for its own choice and brings in no other experts. At 128 tokens both take about as long.
AHEAD_TOKENS = 128


def workspace(limits: Limits, device: Device) -> Workspace:
    """Kernels and scratch memory for steps within `limits`."""
    return Workspace(device, limits)


def embed(ws: Workspace, table: QTensor, tokens: Array, x: Array, scale: float = 1.0) -> None:
    """Rows of the embedding table: x [T, D] = scale * table[tokens]; table [V, D] of any native type.

    The first op of a step: where choices are replayed, the next become those that `route` imposes.
    """
    ws.forget()
    if ws.replay is not None and ws.replay.n_rows:
        ws.replay.next(ws.active_step)
    routing.embed(ws.device, table, tokens, x, scale)


def norm(ws: Workspace, x: Array, weight: Array, eps: float, out: Array) -> None:
    """The RMS norm of x [T, D] times weight [D], to out [T, D], which FFNs can then read without a pass over it."""
    if x.shape[0] <= SMALL_TOKENS:
        ws.prepare(out, ws.products.norm_routed(x, weight, eps, out))
    else:
        ws.prepare(out, ws.gemm.norm_to_halves(x, weight, eps, out))


def add_norm(
    ws: Workspace, y: Array, weight: Array, eps: float, x: Array, scale: float = 1.0,
    then: Sequence[tuple[Array, Array]] = (),
) -> None:  # fmt: skip
    """x [T, D] = scale * (x + the RMS norm of y [T, D] times weight [D]); then norms of x, as `norm` makes them."""
    ws.writes(x, *(out for _, out in then))
    if x.shape[0] <= SMALL_TOKENS:
        for (_, out), made in zip(then, ws.products.add_norm(y, weight, eps, x, scale, then), strict=True):
            ws.prepare(out, made)
    else:
        ws.products.add_norm(y, weight, eps, x, scale)
        for norm_weight, out in reversed(then):  # what is read first is prepared last
            norm(ws, x, norm_weight, eps, out)


def add_norms(
    ws: Workspace, a: Array, a_norm: Array, b: Array, b_norm: Array, weight: Array, eps: float, x: Array,
    scale: float = 1.0,
) -> None:  # fmt: skip
    """x [T, D] = scale * (x + the RMS norm of the sum of those of a and b [T, D]); a is scratch afterwards."""
    ws.writes(a, x)
    if not ws.products.add_norms(a, a_norm, b, b_norm, weight, eps, x, scale):
        ws.products.norm(a, a_norm, eps, a)
        ws.products.add_norm(b, b_norm, eps, a, 1.0)
        ws.products.add_norm(a, weight, eps, x, scale)


def copy(ws: Workspace, x: Array, to: Array) -> None:
    """The array `to`, on the device or page-locked, becomes equal to x."""
    ws.writes(to)
    ws.device.copy(ws.device.pointer(to), ws.device.pointer(x), x.nbytes)


def stage(ws: Workspace, absent: Array, homes: KVLayer, staging: KVLayer, wanted: Array | None = None) -> None:
    """Bring the blocks `absent` of `homes` to the staging area; shapes as in `reference.stage`."""
    ws.attention.stage(absent, homes, staging, wanted)


def stage_ahead(ws: Workspace, absent: Array, homes: KVLayer, staging: KVLayer) -> None:
    """Begin to bring what `stage` is asked for next, in a long step: a short one is a graph, and waits for nobody."""
    ws.attention.stage_ahead(absent, homes, staging)


def fetch_ahead(
    ws: Workspace, x: Array, state: policy.SlotState, bank: Experts, short: ShortRows | None = None
) -> None:
    """Begin to bring in the missing experts of `bank`: all that a long step needs soon, or what one token may need.

    Of every MoE layer, in their order, each before the one ahead of it routes. x [T, D]: what enters that one. short:
    as `expert_ffn` gets it. Where the CPU takes a part of what the step chooses, nothing else is brought.
    """
    s, n_tokens = ws.streaming, x.shape[0]
    if ws.landing is not None and bank.layer == 0:
        ws.landing.begin()
    elif ws.landing is not None and n_tokens == 1:
        ws.landing.ahead(x, state, bank.layer, ws.active_step)
    if s is None or n_tokens < AHEAD_TOKENS or _jobs(ws, n_tokens, short) is not None:
        return
    # A wait is for all that is enqueued: the main stream must wait for the layer at hand before the next one's
    # copies are enqueued behind it, or it would wait for those, too.
    if bank.layer:
        ws.device.wait(None, s.stream)
    ws.device.wait(s.stream, None)  # the buffer was read two layers ago
    with ws.device.on(s.stream):
        s.staging.gather(state, bank.layer, bank, bank.layer % 2)


def attention_input(
    ws: Workspace,
    x: Array,
    w: AttentionInput,
    eps: float,
    rope: Array,
    positions: Array,
    kv: KVLayer,
    slots: Array,
    q: Array,
    gate_out: Array | None = None,
) -> None:
    """Norm, Q, K, V, per-head norms and RoPE; keys and values go to the cache, Q to `q`.

    Shapes as in `reference.attention_input`; a slot of -1 stores nothing.
    """
    ws.writes(q, gate_out)
    T = x.shape[0]
    raw_q, raw_k, raw_v = (
        None if m is None else ws.rows_of(a, T, m.shape[0])
        for a, m in ((ws.raw_q, w.wq), (ws.raw_k, w.wk), (ws.raw_v, w.wv))
    )
    products = [(m, y) for m, y in ((w.wq, raw_q), (w.wk, raw_k), (w.wv, raw_v), (w.gate, gate_out)) if m is not None]
    if T <= SMALL_TOKENS:
        matrices, outputs = zip(*products, strict=True)
        scratch, ready = ws.rows_of(ws.normed, *x.shape), ws.prepared_norm(x, w.norm)
        ws.products.norm_several(x, w.norm, eps, matrices, outputs, scratch, ready, ws.entered())
    else:
        halves = ws.gemm.norm_to_halves(x, w.norm, eps)
        for m, y in products:
            ws.gemm.product(m, halves, y)
    values = raw_k if w.wv is None else raw_v
    ws.attention.input(raw_q, raw_k, values, w.q_norm, w.k_norm, eps, rope, positions, kv, slots, q, w.v_norm)


def attention(
    ws: Workspace,
    q: Array,
    kv: KVLayer,
    block_table: Array,
    sequence: Array,
    positions: Array,
    scale: float,
    out: Array,
    n_positions: int = 0,
    window: int = 0,
    gate: Array | None = None,
    gate_kind: str = "",
    apart: bool = False,
    spans: tuple[tuple[int, int], ...] = (),
    as_block: bool = False,
    recall: Recall | None = None,
) -> None:
    """Causal attention over cached blocks, in logical order; shapes as in `reference.attention`.

    n_positions: one more than the largest position, which a long step needs from the host. apart: no two tokens are of
    one sequence, so there is nothing that they could read together. spans: of a long step of several sequences, the
    tokens of each and one more than its largest position: then each has the bits that it has alone.
    """
    ws.writes(out)
    if q.shape[0] <= SMALL_TOKENS:
        T, width = out.shape
        quantized = ws.attended.rows(T, width) if width % 32 == 0 else None
        ws.attention.decode(
            q, kv, block_table, sequence, positions, scale, out, quantized, window, gate, gate_kind, apart,
            as_block, recall,
        )  # fmt: skip
        if quantized is not None:
            ws.prepare(out, quantized)
    else:
        ws.flash(
            q, kv, block_table, sequence, positions, scale, out,
            n_positions=n_positions, window=window, gate=gate, gate_kind=gate_kind, spans=spans,
        )  # fmt: skip


def summarize(ws: Workspace, kv: KVLayer, places: Array, blocks: Array, sketches: Array) -> None:
    """The sketches of full blocks of keys; shapes as in `reference.summarize`."""
    recalling.summarize(ws.device, kv, places, blocks, sketches)


def choose(
    ws: Workspace,
    q: Array,
    sketches: Array,
    blocks: Array,
    sequence: Array,
    positions: Array,
    most: Array,
    leave: Array,
    keep: Array,
    scale: float,
    recall: Recall,
) -> None:
    """Which blocks each row reads, of those that have sketches; shapes as in `reference.choose`."""
    recalling.choose(ws.device, q, sketches, blocks, sequence, positions, most, leave, keep, scale, recall)


def find_absent(
    ws: Workspace, kv: KVLayer, block_table: Array, sequence: Array, recall: Recall, absent: Array, wanted: Array
) -> None:
    """Which blocks of the staging area the rows of a choice read; shapes as in `reference.find_absent`."""
    recalling.find_absent(ws.device, kv, block_table, sequence, recall, absent, wanted)


def attention_output(ws: Workspace, attended: Array, wo: QTensor, x: Array, add: bool = True) -> None:
    """x [T, D] += wo [D, H * head_dim] @ attended [T, H * head_dim], or = it without `add`."""
    if attended.shape[0] <= SMALL_TOKENS:
        prepared = ws.prepared(attended)
        is_float = wo.qtype in FLOAT_TYPES
        ws.products.product(wo, attended if is_float or prepared is None else prepared, x, add=add)
    else:
        ws.gemm.product(wo, ws.gemm.to_halves(attended), x, add=add)
    ws.writes(x)


def router(ws: Workspace, x: Array, norm: Array, eps: float, gate: QTensor, h: Array, logits: Array) -> None:
    """The normed residual h [T, D] and the router's logits [T, E]; gate [E, D] of a float type."""
    ws.writes(logits)
    if x.shape[0] <= SMALL_TOKENS:
        ws.prepare(h, ws.products.router(x, norm, eps, gate, h, logits, ws.routing.settled))
    else:
        ws.prepare(h, ws.gemm.norm_to_halves(x, norm, eps, h))
        ws.gemm.float_product(gate, h, logits)


def route(
    ws: Workspace,
    logits: Array,
    gating: Gating,
    state: policy.SlotState,
    bank: Experts,
    counted: Array,
    rule: policy.Rule,
    experts: Array,
    weights: Array,
    fetches: Fetches,
    short: ShortRows | None = None,
) -> None:
    """Choose experts and weights for each row, and let the slots of the layer of `bank` follow (docs/residency.md).

    Shapes as in `reference.route`. short: as `expert_ffn` gets it.
    """
    ws.writes(weights)
    T, r, s, layer = logits.shape[0], ws.routing, ws.streaming, bank.layer
    imposed = None if ws.replay is None or not ws.replay.n_rows else ws.replay.imposed[layer]
    if T <= SMALL_TOKENS or s is None:
        r.route(
            logits, gating, state, layer, counted, rule, experts, weights, fetches, ws.active_step, imposed,
            may_join=r.poisons or not bank.poison,
        )  # fmt: skip
        return
    r.choose(logits, gating, experts, weights)
    if _jobs(ws, T, short) is not None:  # `expert_ffn` brings what misses, when it is known what enters a slot
        ws.device.wait(None, s.stream)
        r.advance(experts, counted, state, layer, rule, fetches, s.staging.source[layer % 2])
        return
    if T >= AHEAD_TOKENS:
        if layer == state.slot_of.shape[0] - 1:  # for the others `fetch_ahead` of the next layer has waited
            ws.device.wait(None, s.stream)
    else:
        ws.device.wait(None, s.stream)  # only a step that failed half-way can have left copies under way
        s.staging.gather(state, layer, bank, layer % 2, experts)
    r.advance(experts, counted, state, layer, rule, fetches)


def _jobs(ws: Workspace, n_tokens: int, short: ShortRows | None) -> LongJobs | None:
    """Who has the CPU compute some experts of a step, all of whose rows are short; None: nobody."""
    if ws.streaming is None or ws.long_jobs is None or short is None or short.n < n_tokens:
        return None
    return ws.long_jobs if ws.long_jobs.takes(n_tokens) else None


def dense_ffn(
    ws: Workspace,
    h: Array,
    gate: QTensor,
    up: QTensor,
    down: QTensor,
    x: Array,
    activation: Activation = "silu",
    add: bool = True,
    shared_gate: QTensor | None = None,
) -> None:
    """x [T, D] += s * down (act(gate h) * (up h)), or becomes it; shapes as in `reference.dense_ffn`."""
    shared = None if shared_gate is None else (shared_gate, h)
    if h.shape[0] <= SMALL_TOKENS:
        values = _small_input(ws, h, gate.qtype)
        ws.small_dense(values, gate, up, down, x, activation, add, shared)
    else:
        ws.gemm.dense(ws.halves(h), gate, up, down, x, activation, add, shared)
    ws.writes(x)


def _small_input(ws: Workspace, h: Array, qtype: QType) -> Quantized | Array:
    """h as an FFN of a short step reads it, whose gate is of a type."""
    if qtype in FLOAT_TYPES:
        return h
    prepared = ws.prepared(h)
    return ws.products.quantize(h) if prepared is None else prepared


def expert_ffn(
    ws: Workspace,
    h: Array,
    experts: Array,
    weights: Array,
    bank: Experts,
    fetches: Fetches,
    x: Array,
    add: bool = True,
    shared: SharedExpert | None = None,
    then: tuple[Array, float] | None = None,
    short: ShortRows | None = None,
) -> None:
    """x [T, D] += the weighted sum of each row's experts, folded in rank order, or becomes it; not before `route`.

    h [T, D] the normed residual; experts int32, weights float32 [T, A]. What a shared expert gives is added last. then:
    weight and epsilon of the norm by which x is read next, which a short step can make along with it. short: rows of a
    long step that follow docs/arithmetic.md.
    """
    r, s = ws.routing, ws.streaming
    if h.shape[0] <= SMALL_TOKENS:
        choice = r.take()
        if bank.poison and s is not None and choice is None:
            s.staging.poison(fetches, bank)
        values = _small_input(ws, h, bank.gate_type)
        beside = (shared, h) if shared is not None and runs_beside(shared, bank) else None
        made = ws.small_experts(
            values, experts, weights, bank, r.active, r.n_active, r.pairs, x, add, beside,
            then if shared is None else None, choice,
        )  # fmt: skip
        ws.writes(x)
        if made is not None and then is not None:
            ws.prepare(x, made, then[0])
        if shared is not None and beside is None:
            dense_ffn(ws, h, shared.gate, shared.up, shared.down, x, bank.activation, True, shared.shared_gate)
        return
    source = r.source if s is None else s.staging.source[bank.layer % 2]
    T, rows = h.shape[0], None
    if (jobs := _jobs(ws, T, short)) is not None and s is not None:
        rows = ws.short_experts.rows(h, bank)
        jobs.share(rows, experts, bank, fetches, s.staging, bank.layer % 2)
    first, mask, n_short = (T, None, 0) if short is None else (short.first, short.mask, short.n)
    n_long = first if mask is None else T
    if short is None or short.n < T:
        own = [a if n_long == T else a[:n_long] for a in (experts, weights, x)]
        ws.gemm.experts(ws.halves(h).first(n_long), own[0], own[1], bank, source, own[2], add, mask)
    if first < T:
        own = [a if first == 0 else a[first:] for a in (h, experts, weights, x)]
        some = mask if mask is None or first == 0 else mask[first:]
        ws.short_experts(own[0], own[1], own[2], bank, source, own[3], add, some, rows, jobs, n_short)
    ws.writes(x)
    if s is not None:
        if bank.poison:
            s.staging.poison(fetches, bank)
        s.staging.fill(fetches, bank, source)
    if shared is not None:
        dense_ffn(ws, h, shared.gate, shared.up, shared.down, x, bank.activation, True, shared.shared_gate)


def head(
    ws: Workspace,
    x: Array,
    rows: Array,
    norm: Array,
    eps: float,
    output: QTensor,
    logits: Array,
    softcap: float = 0.0,
) -> None:
    """Final norm and output matrix for the chosen rows: logits [len(rows), V]; softcap > 0: through its tanh."""
    ws.writes(logits)
    if not rows.shape[0]:
        return
    if rows.shape[0] <= SMALL_TOKENS:
        ws.products.head(x, rows, norm, eps, output, logits, softcap)
    else:
        ws.gemm.head(x, rows, norm, eps, output, logits, softcap)


def delta_input(
    ws: Workspace,
    x: Array,
    w: DeltaInput,
    eps: float,
    mixed: Array,
    z: Array,
    beta: Array,
    alpha: Array,
) -> None:
    """Four products of the normed residual; shapes as in `reference.delta_input`."""
    outputs = (mixed, z, beta, alpha)
    ws.writes(*outputs)
    if x.shape[0] <= SMALL_TOKENS:
        scratch, ready = ws.rows_of(ws.normed, *x.shape), ws.prepared_norm(x, w.norm)
        ws.products.norm_several(x, w.norm, eps, w.matrices, outputs, scratch, ready, ws.entered())
    else:
        halves = ws.gemm.norm_to_halves(x, w.norm, eps)
        for matrix, y in zip(w.matrices, outputs, strict=True):
            ws.gemm.product(matrix, halves, y)


def delta(
    ws: Workspace,
    mixed: Array,
    beta: Array,
    alpha: Array,
    conv: Array,
    dt_bias: Array,
    a: Array,
    eps: float,
    layer: DeltaLayer,
    states: Array,
    sequence: Array,
    positions: Array,
    slots: Array,
    out: Array,
) -> None:
    """Convolution, gates and the gated delta rule; shapes as in `reference.delta`."""
    ws.writes(out)
    ws.delta(mixed, beta, alpha, conv, dt_bias, a, eps, layer, states, sequence, positions, slots, out)


def delta_output(ws: Workspace, y: Array, z: Array, norm: Array, eps: float, w_out: QTensor, x: Array) -> None:
    """x += w_out of the normed and gated y; shapes as in `reference.delta_output`."""
    ws.writes(x)
    if y.shape[0] <= SMALL_TOKENS:
        gated = ws.delta.gate(y, z, norm, eps, w_out.qtype in FLOAT_TYPES)
        ws.products.product(w_out, gated, x, add=True)
    else:
        halves = ws.gemm.halves(*y.shape)
        ws.delta.gate_halves(y, z, norm, eps, halves)
        ws.gemm.product(w_out, halves, x, add=True)
