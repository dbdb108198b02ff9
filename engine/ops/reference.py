"""The reference backend: every op in NumPy, slow and obvious, the oracle of the kernels (docs/arithmetic.md)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine import policy, quants
from engine.ops import F32, I32, KV_BLOCK_TOKENS, U8, Experts, Fetches, KVLayer, Limits
from engine.ops.arithmetic import dot32, exp, fma, product, quantize_activations, rms_norm, silu, sum32
from engine.quants import QTensor

Cached = NDArray[np.float16] | NDArray[np.int8]


class Workspace:
    """Nothing: the reference backend allocates as it goes."""

    isa = "numpy"

    def __init__(self, limits: Limits, threads: int) -> None:
        self.limits = limits
        self.threads = threads

    def close(self) -> None:
        """Release nothing; here so that backends are used alike."""


def workspace(limits: Limits, threads: int) -> Workspace:
    """Scratch memory and threads for steps within `limits`."""
    return Workspace(limits, threads)


def embed(ws: Workspace, table: QTensor, tokens: I32, x: F32) -> None:
    """Rows of the embedding table: x [T, D] = table[tokens]; table [V, D] of any native type."""
    raw = table.data.reshape(table.shape[0], -1)[tokens]
    rows = QTensor(table.name, table.qtype, (len(tokens), table.shape[1]), np.ascontiguousarray(raw).reshape(-1))
    x[:] = quants.dequantize(rows)


def rope_table(n_positions: int, n_rot: int, base: float) -> F32:
    """Cosines and sines, float32 [n_positions, 2, n_rot / 2], computed in binary64."""
    inverse = base ** (-2.0 * np.arange(n_rot // 2) / n_rot)
    angle = np.arange(n_positions)[:, None] * inverse[None]
    return np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


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
    if scale is None:
        with np.errstate(over="ignore"):
            cache[slots] = x.astype(np.float16)
    else:
        q, d = quantize_activations(x)
        cache[slots] = q
        with np.errstate(over="ignore"):
            scale[slots] = d.astype(np.float16)


def _load(cache: Cached, scale: NDArray[np.float16] | None, slots: I32) -> F32:
    values = cache[slots].astype(np.float32)
    if scale is None:
        return values
    return np.asarray(values * np.repeat(scale[slots].astype(np.float32), 32, axis=-1), np.float32)


def attention_input(
    ws: Workspace,
    x: F32,
    norm: F32,
    eps: float,
    wq: QTensor,
    wk: QTensor,
    wv: QTensor,
    q_norm: F32 | None,
    k_norm: F32 | None,
    rope: F32,
    positions: I32,
    kv: KVLayer,
    slots: I32,
    q: F32,
) -> None:
    """Norm, Q, K, V, per-head norms and RoPE; keys and values go to the cache, Q to `q`.

    x [T, D]; norm [D]; wq [H * head_dim, D]; wk, wv [K * head_dim, D]; q_norm, k_norm [head_dim] or
    None; rope from `rope_table`; positions, slots int32 [T]; q [T, H, head_dim] is written.
    """
    T, head_dim = len(x), q.shape[2]
    h = rms_norm(x, norm, eps)
    query = product(wq, h).reshape(T, -1, head_dim)
    key = product(wk, h).reshape(T, -1, head_dim)
    value = product(wv, h).reshape(T, -1, head_dim)
    if q_norm is not None:
        query = rms_norm(query, q_norm, eps)
    if k_norm is not None:
        key = rms_norm(key, k_norm, eps)
    q[:] = _rotate(query, rope, positions)
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
) -> None:
    """Causal attention over cached blocks, in logical order.

    q [T, H, head_dim]; block_table int32 [n_sequence, max_blocks], physical block of each logical
    one; sequence, positions int32 [T]: row t sees positions 0..positions[t] of sequence[t]; query head
    h reads kv head h * K // H; out [T, H * head_dim] is written.
    """
    T, H, head_dim = q.shape
    group = H // kv.k.shape[1]
    for t in range(T):
        n = int(positions[t]) + 1
        m = np.full(H, -np.inf, np.float32)
        total = np.zeros(H, np.float32)
        o = np.zeros((H, head_dim), np.float32)
        for b in range(-(-n // KV_BLOCK_TOKENS)):
            valid = min(KV_BLOCK_TOKENS, n - b * KV_BLOCK_TOKENS)
            slots = block_table[sequence[t], b] * KV_BLOCK_TOKENS + np.arange(valid, dtype=np.int32)
            k = np.repeat(_load(kv.k, kv.k_scale, slots), group, axis=1)  # [S, H, head_dim]
            v = np.repeat(_load(kv.v, kv.v_scale, slots), group, axis=1)
            with np.errstate(all="ignore"):
                s = dot32(q[t][:, None], k.transpose(1, 0, 2)) * np.float32(scale)
                top = np.maximum(m, s.max(axis=1))
                alpha = exp(m - top)
                p = exp(s - top[:, None])
                total = fma(total, alpha, sum32(p))
                o = o * alpha[:, None]
            for j in range(valid):
                o = fma(p[:, j, None], v[j], o)
            m = top
        with np.errstate(all="ignore"):
            out[t] = (o / total[:, None]).reshape(-1)


def copy(ws: Workspace, x: F32, to: F32) -> None:
    """The array `to` becomes equal to x, of any shape."""
    to[...] = x


def fetch_ahead(ws: Workspace, state: policy.SlotState, layer: int, bank: Experts, n_tokens: int) -> None:
    """A hint that `layer` comes soon in a step of n_tokens; here nothing can be had ahead of time."""


def attention_output(ws: Workspace, attended: F32, wo: QTensor, x: F32) -> None:
    """x [T, D] += wo [D, H * head_dim] @ attended [T, H * head_dim]."""
    with np.errstate(all="ignore"):
        x += product(wo, attended)


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
    renormalize: bool,
    state: policy.SlotState,
    layer: int,
    counted: U8,
    rule: policy.Rule,
    experts: I32,
    weights: F32,
    fetches: Fetches,
) -> None:
    """Choose experts and weights for each row, and let the slots of `layer` follow (docs/residency.md).

    logits [T, E]; counted uint8 [T]; experts int32 [T, A], weights float32 [T, A] and `fetches` are
    written; `state` changes. `layer` indexes MoE layers.
    """
    n_used = experts.shape[1]
    experts[:] = top_experts(logits, n_used)
    chosen = np.take_along_axis(logits, experts.astype(np.int64), axis=1)
    with np.errstate(all="ignore"):
        # The maximum skips NaN, as fmax does; a NaN among the chosen still reaches the weights.
        top = np.where(np.isnan(logits), np.float32(-np.inf), logits).max(axis=1, keepdims=True)
        p = exp(chosen - top)
        if renormalize:
            total = p[:, 0].copy()
            for a in range(1, n_used):
                total = total + p[:, a]
        else:
            total = sum32(exp(logits - top))
        weights[:] = p / total[:, None]
    rows = policy.advance(state, layer, experts, counted != 0, rule.gain, rule.cap)
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
    return [
        QTensor(f"expert {expert}", types[i], shapes[i], _memory(int(bank.expert_ptr[expert, i]), bank.part_bytes[i]))
        for i in range(3)
    ]


def expert_ffn(ws: Workspace, h: F32, experts: I32, weights: F32, bank: Experts, fetches: Fetches, x: F32) -> None:
    """x [T, D] += the weighted sum of each row's experts, folded in rank order.

    h [T, D] the normed residual; experts int32, weights float32 [T, A]. Performs `fetches` first, then
    reads every expert through `bank.expert_ptr`.
    """
    fetch(bank, fetches)
    T, A = experts.shape
    y = np.zeros((T, A, bank.n_embd), np.float32)
    for expert in np.unique(experts):
        gate, up, down = _expert_parts(bank, int(expert))
        rows, ranks = np.nonzero(experts == expert)
        with np.errstate(all="ignore"):
            z = silu(product(gate, h[rows])) * product(up, h[rows])
        y[rows, ranks] = product(down, np.asarray(z, np.float32))
    r = np.zeros((T, bank.n_embd), np.float32)
    for a in range(A):
        r = fma(weights[:, a, None], y[:, a], r)
    with np.errstate(all="ignore"):
        x += r


def head(ws: Workspace, x: F32, rows: I32, norm: F32, eps: float, output: QTensor, logits: F32) -> None:
    """Final norm and output matrix for the chosen rows: logits [len(rows), V]."""
    logits[:] = product(output, rms_norm(x[rows], norm, eps))
