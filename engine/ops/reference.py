"""The reference backend: every op in NumPy, slow and obvious, the oracle of the kernels (docs/arithmetic.md)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.formats import quants
from engine.formats.quants import QTensor
from engine.ops import (
    CHUNK_BLOCKS,
    F32,
    I32,
    KV_BLOCK_TOKENS,
    MASS_UNITS,
    TAIL_BLOCKS,
    U8,
    Activation,
    AttentionInput,
    Experts,
    Fetches,
    Gating,
    KVLayer,
    Limits,
    Recall,
    SharedExpert,
    ShortRows,
    arithmetic,
)
from engine.ops.arithmetic import (
    dot32,
    exp,
    fma,
    gelu,
    product,
    quantize_activations,
    quantize_nibbles,
    rms_norm,
    sigmoid,
    silu,
    softplus,
    sum32,
    unpack_nibbles,
)
from engine.ops.delta import delta as delta
from engine.ops.delta import delta_input as delta_input
from engine.ops.delta import delta_output as delta_output
from engine.ops.sketches import key_scores, sketch
from engine.placing import policy

Cached = NDArray[np.float16] | NDArray[np.int8] | NDArray[np.uint8]
LEAST_SUM = np.float32(6.1e-5)  # of the scores by sigmoid that are renormalized


class Workspace:
    """Nothing: the reference backend allocates as it goes."""

    isa = "numpy"

    def __init__(self, limits: Limits, threads: int) -> None:
        self.limits = limits
        self.threads = threads

    def repeat(self, noted: None, work: Callable[[], None]) -> None:
        """Run `work`: nothing is noted."""
        work()

    def feed(self, pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> None:
        """Copy the second array of each pair into the first."""
        for array, host in pairs:
            array[...] = host

    def close(self) -> None:
        """Release nothing; here so that backends are used alike."""


def workspace(limits: Limits, threads: int) -> Workspace:
    """Scratch memory and threads for steps within `limits`."""
    return Workspace(limits, threads)


def embed(ws: Workspace, table: QTensor, tokens: I32, x: F32, scale: float = 1.0) -> None:
    """Rows of the embedding table: x [T, D] = scale * table[tokens]; table [V, D] of any native type."""
    quants.require_native(table)
    raw = table.data.reshape(table.shape[0], -1)[tokens]
    rows = QTensor(table.name, table.qtype, (len(tokens), table.shape[1]), np.ascontiguousarray(raw).reshape(-1))
    x[:] = quants.dequantize(rows) * np.float32(scale)


def norm(ws: Workspace, x: F32, weight: F32, eps: float, out: F32) -> None:
    """The RMS norm of x [T, D] times weight [D], to out [T, D]."""
    out[:] = rms_norm(x, weight, eps)


def add_norm(
    ws: Workspace, y: F32, weight: F32, eps: float, x: F32, scale: float = 1.0, then: Sequence[tuple[F32, F32]] = ()
) -> None:
    """x [T, D] = scale * (x + the RMS norm of y [T, D] times weight [D]).

    then: pairs of a weight [D] and an array [T, D] that becomes the RMS norm of x times it.
    """
    with np.errstate(all="ignore"):
        x[:] = (x + rms_norm(y, weight, eps)) * np.float32(scale)
    for norm_weight, out in then:
        norm(ws, x, norm_weight, eps, out)


def add_norms(
    ws: Workspace, a: F32, a_norm: F32, b: F32, b_norm: F32, weight: F32, eps: float, x: F32, scale: float = 1.0
) -> None:
    """x [T, D] = scale * (x + rms(rms(a) * a_norm + rms(b) * b_norm) * weight); a [T, D] is scratch afterwards."""
    norm(ws, a, a_norm, eps, a)
    add_norm(ws, b, b_norm, eps, a)
    add_norm(ws, a, weight, eps, x, scale)


def _rotate(x: F32, table: F32, positions: I32) -> F32:
    """NeoX RoPE on [T, heads, head_dim]."""
    half = table.shape[-1]
    c, s = table[positions, 0][:, None], table[positions, 1][:, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    out = x.copy()
    out[..., :half] = fma(a, c, -(b * s))
    out[..., half : 2 * half] = fma(b, c, a * s)
    return out


def _store(cache: Cached, scale: NDArray[np.float16] | None, slots: I32, x: F32) -> None:
    x, slots = x[slots >= 0], slots[slots >= 0]
    if scale is None:
        with np.errstate(over="ignore"):
            cache[slots] = x.astype(np.float16)
    else:
        q, d = quantize_nibbles(x) if cache.dtype == np.uint8 else quantize_activations(x)
        cache[slots] = q
        with np.errstate(over="ignore"):
            scale[slots] = d.astype(np.float16)


def _load(cache: Cached, scale: NDArray[np.float16] | None, slots: I32) -> F32:
    integers = unpack_nibbles(cache[slots]) if cache.dtype == np.uint8 else cache[slots]
    values = integers.astype(np.float32)
    if scale is None:
        return values
    return np.asarray(values * np.repeat(scale[slots].astype(np.float32), 32, axis=-1), np.float32)


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

    x [T, D]; rope from `rope_table`; positions, slots int32 [T], where a slot of -1 stores nothing; q [T, H, head_dim]
    is written. Without `w.wk` kv and slots are not touched; without `w.wv` alone the values are the keys as they are
    before their norm. With `w.gate` [G, D] gate_out [T, G] is its product with the normed x.
    """
    T, head_dim = len(x), q.shape[2]
    h = rms_norm(x, w.norm, eps)
    query = product(w.wq, h).reshape(T, -1, head_dim)
    if w.q_norm is not None:
        query = rms_norm(query, w.q_norm, eps)
    q[:] = _rotate(query, rope, positions)
    if w.gate is not None and gate_out is not None:
        gate_out[:] = product(w.gate, h)
    if w.wk is None:
        return
    key = product(w.wk, h).reshape(T, -1, head_dim)
    value = key if w.wv is None else product(w.wv, h).reshape(T, -1, head_dim)
    if w.k_norm is not None:
        key = rms_norm(key, w.k_norm, eps)
    if w.v_norm is not None:
        value = rms_norm(value, w.v_norm, eps)
    _store(kv.k, kv.k_scale, slots, _rotate(key, rope, positions))
    _store(kv.v, kv.v_scale, slots, value)


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
    """Causal attention over cached blocks, in logical order.

    q [T, H, head_dim]; block_table int32 [n_sequence, max_blocks], physical block of each logical
    one, or -1: its positions are passed over as if they were masked; sequence, positions int32 [T]: row t sees
    positions 0..positions[t] of sequence[t], or the last `window` of them, and reads no block before; query head h
    reads kv head h * K // H; out [T, H * head_dim] is written. gate
    [T, H] or [T, H * head_dim]: the result is multiplied by "softplus" or "sigmoid" (gate_kind) of it. apart: a hint
    that no two tokens are of one sequence; spans: another, of each sequence's tokens and its last position plus one;
    as_block: says that the tokens see each other, all being given the last one's position, so that what is stored last
    begins before it. recall: what `choose` wrote: a head passes over blocks that are not chosen, and `recall.missed` is
    written.
    """
    T, H, head_dim = q.shape
    K = kv.k.shape[1]
    group = H // K
    for t in range(T):
        n = int(positions[t]) + 1
        begin = max(n - window, 0) if window else 0
        m = np.full(H, -np.inf, np.float32)
        total = np.zeros(H, np.float32)
        o = np.zeros((H, head_dim), np.float32)
        for b in range(begin // KV_BLOCK_TOKENS, -(-n // KV_BLOCK_TOKENS)):
            if block_table[sequence[t], b] < 0:
                continue
            first = max(begin - b * KV_BLOCK_TOKENS, 0)
            valid = min(KV_BLOCK_TOKENS, n - b * KV_BLOCK_TOKENS)
            slots = block_table[sequence[t], b] * KV_BLOCK_TOKENS + np.arange(first, valid, dtype=np.int32)
            reads = np.repeat(np.ones(K, bool) if recall is None else recall.chosen[t, :, b] != 0, group)
            k = np.repeat(_load(kv.k, kv.k_scale, slots), group, axis=1)[:, reads]  # [S, heads that read it, head_dim]
            v = np.repeat(_load(kv.v, kv.v_scale, slots), group, axis=1)[:, reads]
            with np.errstate(all="ignore"):
                s = dot32(q[t][reads][:, None], k.transpose(1, 0, 2)) * np.float32(scale)
                top = np.maximum(m[reads], s.max(axis=1))
                alpha = exp(m[reads] - top)
                p = exp(s - top[:, None])
                # A position's lane is its place in the block, wherever the window begins.
                total[reads] = fma(total[reads], alpha, sum32(np.pad(p, ((0, 0), (first, 0)))))
                sums = o[reads] * alpha[:, None]
            for j in range(valid - first):
                sums = fma(p[:, j, None], v[j], sums)
            m[reads], o[reads] = top, sums
        if recall is not None:
            recall.missed[t] = _missed(recall.left[t], m, total)
        with np.errstate(all="ignore"):
            result = np.asarray(o / total[:, None], np.float32)
            if gate is not None:
                factor = (softplus if gate_kind == "softplus" else sigmoid)(gate[t].reshape(H, -1))
                result = result * factor
            out[t] = result.reshape(-1)


def _missed(left: F32, m: F32, total: F32) -> F32:
    """The share of mass that blocks have which were not read: left [H, 2] of these, m and total [H] of the others."""
    with np.errstate(all="ignore"):
        mass = left[:, 1] * exp(left[:, 0] - m)
        share = np.float32(1) / (np.float32(1) + total / mass)
    return np.where(left[:, 1] == 0, np.float32(0), share)


def summarize(ws: Workspace, kv: KVLayer, places: I32, blocks: I32, sketches: U8) -> None:
    """The sketches of full blocks of keys.

    places int32 [n]: physical blocks of `kv`; blocks int32 [n]: where in sketches, uint8 [n_blocks, K,
    sketch_bytes(head_dim)], theirs are written.
    """
    for place, block in zip(places.tolist(), blocks.tolist(), strict=True):
        slots = np.arange(place * KV_BLOCK_TOKENS, (place + 1) * KV_BLOCK_TOKENS, dtype=np.int32)
        sketch(_load(kv.k, kv.k_scale, slots), sketches[block])


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
    """Which blocks each row reads: the first, those to keep, the tail, and at most `most` others, by their sketches.

    q [T, H, head_dim]; sketches as of `summarize`; blocks int32 [n_sequence, W]: where in sketches those of each
    logical block are, -1 where there is no block; sequence, positions int32 [T] as of attention; most int32 [T], -1:
    all; leave int32 [T]: units of mass that may be left out, -1: as many as it is; keep uint8 [n_sequence, W]; scale
    above 0. `recall` is written, but for `missed`.
    """
    T, H, _ = q.shape
    K = sketches.shape[1]
    for t in range(T):
        s, last = sequence[t], int(positions[t]) // KV_BLOCK_TOKENS
        behind = max(0, last - TAIL_BLOCKS)  # blocks that have sketches
        ids = blocks[s, :behind]
        kept = (ids < 0) | (keep[s, :behind] != 0) | (np.arange(behind) == 0)
        recall.chosen[t] = 0
        recall.chosen[t, :, : last + 1] = 1
        recall.left[t], recall.read[t] = (-np.inf, 0), last + 1
        n_candidates = behind - int(kept.sum())
        if most[t] < 0 or not n_candidates or (leave[t] < 0 and n_candidates <= most[t]):
            continue
        with np.errstate(all="ignore"):
            scores = key_scores(q[t], sketches[ids], scale)
            tops = np.fmax.reduce(scores, axis=2, initial=np.float32(-np.inf))  # [blocks, H]
            z = sum32(exp(scores - tops[..., None]))
            tops[ids < 0] = -np.inf
            chunks = np.arange(behind) // CHUNK_BLOCKS
            some = [chunks == c for c in range(chunks[-1] + 1)]
            chunk_top = np.stack([np.fmax.reduce(tops[c], axis=0, initial=np.float32(-np.inf)) for c in some])
            mass = np.where(ids[:, None] < 0, np.float32(0), z * exp(tops - chunk_top[chunks]))
            chunk_sum = np.stack([sum32(mass[c].T) for c in some])
            top = np.fmax.reduce(chunk_top, axis=0, initial=np.float32(-np.inf))
            factor = np.where(chunk_top == -np.inf, np.float32(0), exp(chunk_top - top))
            total = sum32((chunk_sum * factor).T)
            mass = mass * factor[chunks]
            share = (mass * (np.float32(1) / total)).reshape(behind, K, -1)
            # Not below 0, so their bits are ordered as they are; a NaN is above all.
            bits = np.where(np.isnan(share), np.float32(np.nan), share).view(np.int32).max(axis=2)
            order = np.argsort(np.where(kept[:, None], 1, -bits), axis=0, kind="stable")
            for head in range(K):
                n = min(int(most[t]), n_candidates)
                if leave[t] >= 0:
                    n = min(n, _needed(bits[~kept, head], share[~kept, head], int(leave[t])))
                recall.chosen[t, head, order[n:n_candidates, head]] = 0
                recall.read[t, head] -= n_candidates - n
            for h in range(H):
                if recall.read[t, head := h * K // H] <= last:
                    read = sum32(mass[recall.chosen[t, head, :behind] != 0, h])
                    recall.left[t, h] = top[h], np.float32(0) if total[h] - read < 0 else total[h] - read


def _needed(bits: I32, share: F32, leave: int) -> int:
    """How many blocks are read of those with scores [n], so that of each head's shares [n, G] no more is left."""
    units = np.where(np.isnan(share), 0, np.minimum(share, 1) * np.float32(MASS_UNITS)).astype(np.int64)
    left = np.zeros(share.shape[1], np.int64)
    for value in np.unique(bits):
        left += units[bits == value].sum(axis=0)
        if (left > leave).any() or value == np.float32(np.nan).view(np.int32):
            return int((bits >= value).sum())
    return 0


def find_absent(
    ws: Workspace, kv: KVLayer, block_table: I32, sequence: I32, recall: Recall, absent: I32, wanted: I32
) -> None:
    """Which blocks of the staging area the rows of a choice read.

    kv: whose homes are that area; block_table, sequence: as of attention; absent int32 [1 + n]: how many blocks it may
    be, as of `stage`; wanted int32 [K, 1 + n]: of each KV head how many, and which.
    """
    for head, found in enumerate(wanted):
        reads = recall.chosen[:, head] != 0  # [T, W]
        blocks = np.unique(block_table[sequence][:, : reads.shape[1]][reads] - np.int32(len(kv.k) // KV_BLOCK_TOKENS))
        blocks = blocks[blocks >= 0]
        assert not len(blocks) or blocks[-1] < absent[0]
        found[0], found[1 : 1 + len(blocks)] = len(blocks), blocks


def copy(ws: Workspace, x: F32, to: F32) -> None:
    """The array `to` becomes equal to x, of any shape."""
    to[...] = x


def stage(ws: Workspace, absent: I32, homes: KVLayer, staging: KVLayer, wanted: I32 | None = None) -> None:
    """Bring blocks of a layer's cache from their homes to the staging area.

    absent int32 [1 + n or more]: n, and the blocks of `homes` that become blocks 0 to n - 1 of `staging`. wanted int32
    [K, 1 + n]: of each KV head how many of these come, and which; None: all.
    """
    for source, to in zip(homes.arrays, staging.arrays, strict=True):
        if source is None or to is None:
            continue
        for head in range(source.shape[1]):
            some = np.arange(absent[0]) if wanted is None else wanted[head, 1 : 1 + wanted[head, 0]]
            for j in some.tolist():
                part = slice(absent[1 + j] * KV_BLOCK_TOKENS, (absent[1 + j] + 1) * KV_BLOCK_TOKENS)
                to[j * KV_BLOCK_TOKENS : (j + 1) * KV_BLOCK_TOKENS, head] = source[part, head]


def stage_ahead(ws: Workspace, absent: I32, homes: KVLayer, staging: KVLayer) -> None:
    """A hint that `stage` is asked for this next; nothing can be had ahead of time."""


def fetch_ahead(
    ws: Workspace, x: F32, state: policy.SlotState, bank: Experts, short: ShortRows | None = None
) -> None:
    """A hint that the experts of `bank` are wanted soon by a step's x [T, D]; nothing can be had ahead of time."""


def attention_output(ws: Workspace, attended: F32, wo: QTensor, x: F32, add: bool = True) -> None:
    """x [T, D] += wo [D, H * head_dim] @ attended [T, H * head_dim], or = it without `add`."""
    with np.errstate(all="ignore"):
        y = product(wo, attended)
        x[:] = x + y if add else y


def router(ws: Workspace, x: F32, norm: F32, eps: float, gate: QTensor, h: F32, logits: F32) -> None:
    """The normed residual h [T, D] and the router's logits [T, E]; gate [E, D] of a float type."""
    h[:] = rms_norm(x, norm, eps)
    logits[:] = product(gate, h)


def top_experts(logits: F32, n_used: int) -> I32:
    """Indices of the largest logits, largest first, ties to the smaller index, NaN last: int32 [T, A]."""
    keys = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    nan_last = np.isnan(logits)
    order = np.lexsort((np.broadcast_to(np.arange(logits.shape[1]), logits.shape), -keys, nan_last), axis=1)
    return order[:, :n_used].astype(np.int32)


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

    logits [T, E]; counted uint8 [T]; experts int32 [T, A], weights float32 [T, A] and `fetches` are
    written; `state` changes.
    """
    n_used = experts.shape[1]
    with np.errstate(all="ignore"):
        # The maximum skips NaN, as fmax does; a NaN among the chosen still reaches the weights.
        top = np.where(np.isnan(logits), np.float32(-np.inf), logits).max(axis=1, keepdims=True)
        if gating.kind == "sigmoid":
            scores = choice = sigmoid(logits)
        else:
            scores = exp(logits - top)
            choice = logits if gating.bias is None else scores / sum32(scores)[:, None]
        experts[:] = top_experts(choice if gating.bias is None else choice + gating.bias, n_used)
        p = np.take_along_axis(scores, experts.astype(np.int64), axis=1)
        if gating.renormalize:
            total = p[:, 0].copy()
            for a in range(1, n_used):
                total = total + p[:, a]
            if gating.kind == "sigmoid":
                total = np.where(total < LEAST_SUM, LEAST_SUM, total)
            p = p / total[:, None]
        elif gating.kind == "softmax":
            p = p / sum32(scores)[:, None]
        p = p * np.float32(gating.scale)
        weights[:] = p if gating.expert_scale is None else p * gating.expert_scale[experts]
    rows = policy.advance(state, bank.layer, experts, counted != 0, rule)
    fetches.count[0] = len(rows)
    fetches.rows[: len(rows)] = rows


def _memory(pointer: int, n_bytes: int) -> U8:
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(pointer))


def fetch(bank: Experts, fetches: Fetches) -> None:
    """Copy the experts that enter slots from the slow tier, gate, up and down each."""
    for expert, slot, _ in fetches.rows[: int(fetches.count[0])]:
        for part, n_bytes in enumerate(bank.part_bytes):
            target = _memory(int(bank.slot_ptr[slot, part]), n_bytes)
            if bank.poison:
                target[:] = 0xFF
            target[:] = _memory(int(bank.home_ptr[expert, part]), n_bytes)


def _expert_parts(bank: Experts, expert: int) -> Sequence[QTensor]:
    shapes = ((bank.n_ff, bank.n_embd), (bank.n_ff, bank.n_embd), (bank.n_embd, bank.n_ff))
    types = (bank.gate_type, bank.up_type, bank.down_type)
    scales = (1.0 if bank.gate_scale is None else float(bank.gate_scale[expert]), 1.0, 1.0)
    sources = (_memory(int(bank.expert_ptr[expert, i]), bank.part_bytes[i]) for i in range(3))
    return [
        QTensor(f"expert {expert}", qtype, shape, source, scale=scale)
        for qtype, shape, source, scale in zip(types, shapes, sources, scales, strict=True)
    ]


_ACTIVATIONS: dict[Activation, Callable[[F32], F32]] = {"silu": silu, "gelu": gelu}


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
    """x [T, D] += s * down (act(gate h) * (up h)), or becomes it where `add` is false.

    h [T, D]; gate, up [F, D]; down [D, F]; s of each row is sigmoid(shared_gate h), shared_gate [1, D] of a float
    type, or 1 where there is none.
    """
    with np.errstate(all="ignore"):
        z = _ACTIVATIONS[activation](product(gate, h)) * product(up, h)
        y = product(down, np.asarray(z, np.float32))
        if shared_gate is not None:
            y = sigmoid(product(shared_gate, h)) * y
        x[:] = x + y if add else y


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
    fetch(bank, fetches)
    T, A = experts.shape
    y = np.zeros((T, A, bank.n_embd), np.float32)
    for expert in np.unique(experts):
        gate, up, down = _expert_parts(bank, int(expert))
        rows, ranks = np.nonzero(experts == expert)
        with np.errstate(all="ignore"):
            z = _ACTIVATIONS[bank.activation](product(gate, h[rows])) * product(up, h[rows])
        y[rows, ranks] = product(down, np.asarray(z, np.float32))
    r = np.zeros((T, bank.n_embd), np.float32)
    for a in range(A):
        r = fma(weights[:, a, None], y[:, a], r)
    with np.errstate(all="ignore"):
        x[:] = x + r if add else r
    if shared is not None:
        dense_ffn(ws, h, shared.gate, shared.up, shared.down, x, bank.activation, True, shared.shared_gate)


def head(
    ws: Workspace, x: F32, rows: I32, norm: F32, eps: float, output: QTensor, logits: F32, softcap: float = 0.0
) -> None:
    """Final norm and output matrix for the chosen rows: logits [len(rows), V]; softcap > 0: through its tanh."""
    logits[:] = product(output, rms_norm(x[rows], norm, eps))
    if softcap > 0:
        logits[:] = arithmetic.softcap(logits, softcap)
