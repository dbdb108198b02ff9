"""Every op, every type: kernels against the twin bit for bit, the twin against float64 and `gguf`.

`CASES` is the one table. A case makes its inputs from a seed, runs an op of a backend and returns what the
op wrote; its oracle computes the same in float64. No two dimensions of a case are equal.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
from device_ops import DeviceOps
from gguf import GGMLQuantizationType as QType
from gguf_files import random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import policy
from engine.ops import (
    KV_BLOCK_TOKENS,
    SMALL_TOKENS,
    Activation,
    Experts,
    Fetches,
    Gating,
    KVLayer,
    Limits,
    arithmetic,
    cpu,
    reference,
)
from engine.ops.blocks import integer_blocks
from engine.quants import NATIVE_TYPES, QTensor

Outputs = dict[str, np.ndarray]
LIMITS = Limits(
    max_tokens=80, n_embd=1536, n_head_dim=1024, n_ff=1280, n_vocab=301, n_expert=17, n_expert_used=5, n_head=10,
    n_head_kv=4, head_dim=512,
)  # fmt: skip
FLOATS = (QType.F32, QType.F16, QType.BF16)
SMALL_BLOCKS = (QType.Q8_0, QType.Q4_0)
CUDA_NMSE = 1e-5  # of tensor cores with half-precision operands, against float64
BYTES_OF = {QType.F32: 4, QType.F16: 2, QType.BF16: 2}


@dataclass(frozen=True)
class Case:
    """run(ops, ws) -> what the op wrote; oracle() -> the same in float64, to within `nmse`."""

    name: str
    run: Callable[[ModuleType, Any], Outputs]
    oracle: Callable[[], Outputs] | None = None
    nmse: float = 0.0
    experts: tuple[int, int] = (17, 5)  # of the layer, of a token; what CUDA's kernels are compiled for

    @property
    def refused_on_cuda(self) -> str:
        """What the CUDA wrappers say of a case that they have no kernel for; empty where they have one."""
        heads = re.search(r"head_dim=(\d+)", self.name)
        if heads is not None and int(heads[1]) % 8:
            return f"for heads of {heads[1]}"
        return "both types must be alike" if self.name.startswith("expert_ffn Q4_0/F16") else ""

    @property
    def exact_on_cuda(self) -> bool:
        """Whether docs/arithmetic.md fixes the bits there too: not in attention, nor in long steps but for routing."""
        tokens = re.search(r"T=(\d+)", self.name)
        long = tokens is not None and int(tokens[1]) > SMALL_TOKENS
        return not self.name.startswith("attention ") and (
            not long or self.name.startswith(("route ", "add_norm "))
        )


def weights(qtype: QType, rows: int, cols: int, seed: int) -> QTensor:
    data = random_blocks(qtype, rows, cols, np.random.default_rng(seed))
    return QTensor(f"random {qtype.name}", qtype, (rows, cols), np.ascontiguousarray(data).reshape(-1))


def exact(w: QTensor) -> np.ndarray:
    """The weights in float64, by the gguf package."""
    return gguf.dequantize(w.data.reshape(w.shape[0], -1), w.qtype).astype(np.float64)


def floats(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    # Heavy tails, so that blocks have different scales and most values round.
    return (scale * np.random.default_rng(seed).standard_t(4, shape)).astype(np.float32)


def gain(seed: int, n: int) -> np.ndarray:
    return 1 + np.float32(0.3) * floats(seed, n)


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def product(ops: ModuleType, ws: Any, w: QTensor, x: np.ndarray) -> np.ndarray:
    if ops is reference:
        return arithmetic.product(w, x)
    if isinstance(ops, DeviceOps):
        return ops.product(w, x)
    y = np.full((len(x), w.shape[0]), np.nan, np.float32)
    cpu.product(ws, w, x, y)
    return y


def rounding(*types: QType) -> float:
    """NMSE that 8-bit activations cost, measured on heavy-tailed inputs, with a margin."""
    return 1e-12 if all(t in FLOATS for t in types) else 2e-3


# --- products and the embedding -------------------------------------------------------------------


def product_case(qtype: QType, rows: int, cols: int, T: int) -> Case:
    w, x = weights(qtype, rows, cols, 1), floats(2, T, cols)
    return Case(
        f"product {qtype.name} [{rows}, {cols}] T={T}",
        lambda ops, ws: {"y": product(ops, ws, w, x)},
        lambda: {"y": x.astype(np.float64) @ exact(w).T},
        rounding(qtype),
    )


def extreme_product_case(qtype: QType) -> Case:
    """Largest codes against largest activations: sums that would not fit in 16 bits."""
    rows, cols, T = 7, 768, 3
    w = weights(qtype, rows, cols, 3)
    rng = np.random.default_rng(4)
    n_elements, n_bytes = gguf.GGML_QUANT_SIZES[qtype]
    data = w.data.reshape(-1, n_bytes).copy()
    first, last = {QType.Q6_K: (0, 208), QType.IQ4_XS: (2, n_bytes)}.get(
        qtype, (4 if n_elements == 256 else 2, n_bytes)
    )
    codes = data[:, first:last]
    codes[:] = rng.choice(np.array([0x00, 0x7F, 0x80, 0x88, 0xFF], np.uint8), (len(data), 1))
    w = QTensor(w.name, qtype, w.shape, data.reshape(-1))
    x = rng.choice(np.array([-3, 3], np.float32), (T, cols // 32, 1)).repeat(32, axis=2).reshape(T, cols)
    return Case(
        f"product {qtype.name} extremes",
        lambda ops, ws: {"y": product(ops, ws, w, x)},
        lambda: {"y": x.astype(np.float64) @ exact(w).T},
        1e-10,  # these activations are exact in 8 bits
    )


def odd_activations_case(qtype: QType) -> Case:
    """Blocks of zeros, subnormals, huge values, infinities and NaN."""
    cols = 1024
    x = floats(5, 9, cols)
    x[0] = 0
    x[1, 32:64] = 1e-40
    x[2, 64:96] *= 1e-35
    x[3, 96:128] *= np.float32(1e37)
    x[4, 5] = np.inf
    x[5, 700] = -np.inf
    x[6, 701] = np.nan
    x[7] *= np.float32(2.0**-101)
    x[8, ::2] = -0.0
    w = weights(qtype, 5, cols, 6)
    return Case(f"product {qtype.name} odd activations", lambda ops, ws: {"y": product(ops, ws, w, x)})


def embed_case(qtype: QType) -> Case:
    V, D = 37, 96 if qtype in SMALL_BLOCKS else 77 if qtype in FLOATS else 512
    table, tokens = weights(qtype, V, D, 7), np.array([36, 0, 5, 5, 17], np.int32)

    def run(ops: ModuleType, ws: Any) -> Outputs:
        x = np.full((len(tokens), D), np.nan, np.float32)
        ops.embed(ws, table, tokens, x)
        return {"x": x}

    return Case(f"embed {qtype.name}", run, lambda: {"x": exact(table)[tokens]})


# --- attention ------------------------------------------------------------------------------------


def empty_cache(kv_type: str, blocks: int, K: int, head_dim: int) -> KVLayer:
    shape = (blocks * KV_BLOCK_TOKENS, K, head_dim)
    if kv_type == "f16":
        return KVLayer(np.zeros(shape, np.float16), np.zeros(shape, np.float16))
    scales = (*shape[:2], head_dim // 32)
    return KVLayer(
        np.zeros(shape, np.int8), np.zeros(shape, np.int8), np.zeros(scales, np.float16), np.zeros(scales, np.float16)
    )


def cache_values(cache: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    values = cache.astype(np.float64)
    return values if scale is None else values * scale.astype(np.float64).repeat(32, axis=-1)


def attention_input_case(
    types: tuple[QType, ...], kv_type: str, T: int, H: int, K: int, head_dim: int, n_rot: int, norms: bool,
    gate_type: QType | None = None, v_normed: bool = False,
) -> Case:  # fmt: skip
    """types: of Q, K and V; one for a layer that reads another's cache, two for one whose values are its raw keys."""
    all_types = types if gate_type is None else (*types, gate_type)
    D, eps = (77 if set(all_types) <= set(FLOATS) else 768), 1e-5
    rng = np.random.default_rng(8)
    x, norm = floats(9, T, D), gain(10, D)
    matrices = [weights(t, n * head_dim, D, 11 + i) for i, (t, n) in enumerate(zip(types, (H, K, K), strict=False))]
    wq, wk, wv = (*matrices, None, None)[:3]
    gate = None if gate_type is None else weights(gate_type, H + 3, D, 34)
    v_norm = gain(35, head_dim) if v_normed else None
    q_norm, k_norm = (gain(14, head_dim), gain(15, head_dim)) if norms else (None, None)
    rope = arithmetic.rope_table(300, n_rot, 10000.0)
    positions = np.sort(rng.choice(300, T, replace=False)).astype(np.int32)
    slots = rng.choice(3 * KV_BLOCK_TOKENS, T, replace=False).astype(np.int32)

    def run(ops: ModuleType, ws: Any) -> Outputs:
        kv, q = empty_cache(kv_type, 3, K, head_dim), np.full((T, H, head_dim), np.nan, np.float32)
        gates = None if gate is None else np.full((T, H + 3), np.nan, np.float32)
        more = {} if gate is None and v_norm is None else {"v_norm": v_norm, "gate": gate, "gate_out": gates}
        ops.attention_input(ws, x, norm, eps, wq, wk, wv, q_norm, k_norm, rope, positions, kv, slots, q, **more)
        arrays = {"q": q, "k": kv.k, "v": kv.v} | ({} if gates is None else {"gate": gates})
        return arrays if kv.k_scale is None else arrays | {"k_scale": kv.k_scale, "v_scale": kv.v_scale}

    def oracle() -> Outputs:
        h = rms(x, norm, eps)
        zeros = np.zeros((T, K, head_dim))
        q, k, v = (zeros if w is None else (h @ exact(w).T).reshape(T, -1, head_dim) for w in (wq, wk, wv))
        if len(types) == 2:
            v = k.copy()
        if norms:
            q, k = rms(q, q_norm, eps), rms(k, k_norm, eps)
        if v_norm is not None:
            v = rms(v, v_norm, eps)
        angle = positions[:, None] * 10000.0 ** (-np.arange(n_rot // 2) / (n_rot // 2))
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        for a in (q, k):
            first, second = a[..., : n_rot // 2].copy(), a[..., n_rot // 2 : n_rot].copy()
            a[..., : n_rot // 2], a[..., n_rot // 2 : n_rot] = first * c - second * s, first * s + second * c
        keys, values = (np.zeros((3 * KV_BLOCK_TOKENS, K, head_dim)) for _ in "kv")
        keys[slots], values[slots] = k, v
        found = {"q": q} if gate is None else {"q": q, "gate": h @ exact(gate).T}
        return found if kv_type == "q8_0" else found | {"k": keys, "v": values}

    names = "/".join(t.name for t in types)
    name = f"attention_input {names} {kv_type} T={T} head_dim={head_dim}"
    if gate_type is not None or v_normed:
        name += f" gate={gate_type.name if gate_type is not None else None} v_norm={v_normed}"
    return Case(name, run, oracle, max(rounding(*all_types), 1e-6))


def attention_case(
    kv_type: str, lengths: tuple[int, ...], new: tuple[int, ...], H: int, K: int, head_dim: int, odd: bool = False,
    window: int = 0, gate_kind: str = "", by_head: bool = True,
) -> Case:  # fmt: skip
    """Sequences of `lengths` positions, the last `new` of which are the step's tokens; blocks shuffled.

    Blocks before all windows of a sequence are none at all, or not its own and poisoned.
    """
    rng = np.random.default_rng(16)
    blocks = [-(-n // KV_BLOCK_TOKENS) for n in lengths]
    n_blocks = sum(blocks) + 2
    kv = empty_cache(kv_type, n_blocks, K, head_dim)
    for i, (cache, scale) in enumerate(((kv.k, kv.k_scale), (kv.v, kv.v_scale))):
        if scale is None:
            cache[:] = floats(17 + i, *cache.shape)
        else:
            cache[:] = rng.integers(-127, 128, cache.shape)
            scale[:] = rng.uniform(0.005, 0.02, scale.shape)
    order = rng.permutation(n_blocks).astype(np.int32)
    table = np.full((len(lengths), max(blocks)), -1, np.int32)
    for s, n in enumerate(blocks):
        table[s, :n] = order[sum(blocks[:s]) : sum(blocks[:s]) + n]
    sequence = np.repeat(np.arange(len(lengths)), new).astype(np.int32)
    positions = np.concatenate([np.arange(n - m, n) for n, m in zip(lengths, new, strict=True)]).astype(np.int32)
    used = {int(b) for row in table for b in row if b >= 0}
    for block in set(range(n_blocks)) - used:  # what no table names must not matter
        kv.v[block * KV_BLOCK_TOKENS : (block + 1) * KV_BLOCK_TOKENS] = np.nan if kv_type == "f16" else 77
        if window and kv.v_scale is not None and kv.k_scale is not None:
            kv.k_scale[block * KV_BLOCK_TOKENS : (block + 1) * KV_BLOCK_TOKENS] = np.nan
    if window:
        for s, (n, m) in enumerate(zip(lengths, new, strict=True)):
            for gone in range(max(n - m - window + 1, 0) // KV_BLOCK_TOKENS):
                table[s, gone] = -1 if gone % 2 else min(set(range(n_blocks)) - used)
    T, scale = len(positions), 1 / np.sqrt(head_dim)
    q = floats(19, T, H, head_dim, scale=3.0)
    gate = floats(36, T, H if by_head else H * head_dim, scale=4.0) if gate_kind else None
    if odd:
        q[1, 2, 3] = np.nan
        q[2, 0] = 1e30
        q[3, 1] = np.inf

    def run(ops: ModuleType, ws: Any) -> Outputs:
        out = np.full((T, H * head_dim), np.nan, np.float32)
        if window or gate_kind:
            ops.attention(ws, q, kv, table, sequence, positions, scale, out, 0, window, gate, gate_kind)
        else:
            ops.attention(ws, q, kv, table, sequence, positions, scale, out)
        return {"out": out}

    def oracle() -> Outputs:
        out = np.zeros((T, H, head_dim))
        k, v = cache_values(kv.k, kv.k_scale), cache_values(kv.v, kv.v_scale)
        for t in range(T):
            at = np.arange(max(positions[t] + 1 - window, 0) if window else 0, positions[t] + 1)
            slots = table[sequence[t], at // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + at % KV_BLOCK_TOKENS
            for h in range(H):
                s = k[slots, h * K // H] @ q[t, h].astype(np.float64) * scale
                p = np.exp(s - s.max())
                out[t, h] = p / p.sum() @ v[slots, h * K // H]
        if gate is not None:
            x = gate.astype(np.float64)
            softplus = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
            factor = softplus if gate_kind == "softplus" else 1 / (1 + np.exp(-x))
            out *= factor.reshape(T, H, -1)
        return {"out": out.reshape(T, -1)}

    name = f"attention {kv_type} lengths={lengths} new={new} H={H} K={K} head_dim={head_dim}{' odd' if odd else ''}"
    if window or gate_kind:
        name += f" window={window} gate={gate_kind}{' by head' if by_head and gate_kind else ''}"
    if sum(new) > SMALL_TOKENS:
        name += f" T={sum(new)}"
    return Case(name, run, None if odd else oracle, 1e-10)


def attention_output_case(qtype: QType, T: int, add: bool = True) -> Case:
    D, K = 77, 512
    wo, attended, residual = weights(qtype, D, K, 20), floats(21, T, K), floats(22, T, D)

    def run(ops: ModuleType, ws: Any) -> Outputs:
        x = residual.copy()
        ops.attention_output(ws, attended, wo, x, *(() if add else (False,)))
        return {"x": x}

    return Case(
        f"attention_output {qtype.name} T={T}{'' if add else ' add=False'}",
        run,
        lambda: {"x": residual * add + attended.astype(np.float64) @ exact(wo).T},
        max(rounding(qtype), 1e-12),
    )


# --- experts --------------------------------------------------------------------------------------


def router_case(qtype: QType, T: int) -> Case:
    E, D, eps = 17, 131, 1e-6
    gate, x, norm = weights(qtype, E, D, 23), floats(24, T, D), gain(25, D)

    def run(ops: ModuleType, ws: Any) -> Outputs:
        h, logits = np.full((T, D), np.nan, np.float32), np.full((T, E), np.nan, np.float32)
        ops.router(ws, x, norm, eps, gate, h, logits)
        return {"h": h, "logits": logits}

    def oracle() -> Outputs:
        h = rms(x, norm, eps)
        return {"h": h, "logits": h @ exact(gate).T}

    return Case(f"router {qtype.name} T={T}", run, oracle, 1e-11)


def slot_state(slots: tuple[int, ...], E: int, seed: int) -> policy.SlotState:
    """Slots partly full, partly pinned; every address distinct."""
    rng = np.random.default_rng(seed)
    state = policy.SlotState.empty(slots, E)
    state.home_ptr[:] = 1000 + np.arange(state.home_ptr.size).reshape(state.home_ptr.shape)
    state.slot_ptr[:] = 500000 + np.arange(state.slot_ptr.size).reshape(state.slot_ptr.shape)
    state.expert_ptr[:] = state.home_ptr
    for layer, n in enumerate(slots):
        resident = rng.permutation(E)[: n * 3 // 4]
        at = np.arange(len(resident)) + state.slot_begin[layer]
        state.slot_of[layer, resident], state.expert_of[at], state.score[at] = at, resident, 0
        state.expert_ptr[layer, resident] = state.slot_ptr[at]
        state.pinned[at[: n // 3]] = 1
    return state


def route_case(slots: tuple[int, ...], rule: policy.Rule, renormalize: bool, T: int, odd: bool = False) -> Case:
    E, A, layer = 17, 5, 1

    def logits(step: int) -> np.ndarray:
        values = floats(26 + step, T, E)
        values[::2] = np.round(values[::2])  # ties
        if odd:
            values[0, 3], values[1, :], values[2, ::2] = np.nan, np.nan, np.nan
            values[3, 4], values[4, 5], values[5] = np.inf, -np.inf, -np.inf
        return values

    def run(ops: ModuleType, ws: Any) -> Outputs:
        state, outputs = slot_state(slots, E, 27), {}
        for step in range(4):
            experts, w = np.full((T, A), -1, np.int32), np.full((T, A), np.nan, np.float32)
            fetches = Fetches(np.full((E, 3), -7, np.int32), np.zeros(1, np.int32))
            counted = (np.arange(T) % 3 != step % 3).astype(np.uint8)
            gating = Gating(renormalize=renormalize)
            ops.route(ws, logits(step), gating, state, layer, counted, rule, experts, w, fetches)
            outputs |= {f"experts {step}": experts, f"weights {step}": w}
            outputs |= {f"fetches {step}": fetches.rows[: fetches.count[0]].copy()}
        names = ("slot_of", "expert_of", "score", "pinned", "clock", "counts", "hits", "misses", "expert_ptr")
        return outputs | {name: getattr(state, name) for name in names}

    def oracle() -> Outputs:
        outputs = {}
        for step in range(4):
            p = np.exp(logits(step).astype(np.float64))
            experts = np.argsort(-logits(step), axis=1, kind="stable")[:, :A]
            chosen = np.take_along_axis(p, experts, 1)
            total = chosen.sum(1, keepdims=True) if renormalize else p.sum(1, keepdims=True)
            outputs |= {f"experts {step}": experts, f"weights {step}": chosen / total}
        return outputs

    name = f"route slots={slots} {rule} renormalize={renormalize} T={T}{' odd' if odd else ''}"
    return Case(name, run, None if odd else oracle, 1e-12)


def activate(x: np.ndarray, gelu: bool) -> np.ndarray:
    return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3) if gelu else -x))


def expert_case(
    types: tuple[QType, QType, QType], D: int, F: int, T: int, gelu: bool = False, add: bool = True
) -> Case:
    E, A = 7, 3
    rng = np.random.default_rng(28)
    parts = [
        [weights(t, *shape, 100 * p + e) for e in range(E)]
        for p, (t, shape) in enumerate(zip(types, ((F, D), (F, D), (D, F)), strict=True))
    ]
    h, residual = floats(29, T, D), floats(30, T, D)
    experts = np.stack([rng.permutation(E - 1)[:A] for _ in range(T)]).astype(np.int32)  # the last one has no row
    if T > 1:
        experts[1, :] = experts[1, 0]  # the same one thrice
    w = rng.uniform(0.1, 1.0, (T, A)).astype(np.float32)
    # Two slots: one empty, one with another expert to leave; both are refilled.
    fetched = [int(experts[0, 0]), int(experts[0, 1])]

    def run(ops: ModuleType, ws: Any) -> Outputs:
        sizes = tuple(parts[p][0].nbytes for p in range(3))
        arena = np.zeros((2, sum(sizes)), np.uint8)
        offsets = np.concatenate(([0], np.cumsum(sizes)[:2]))
        home = np.array([[parts[p][e].data.ctypes.data for p in range(3)] for e in range(E)], np.uint64)
        slots = (arena.ctypes.data + np.arange(2)[:, None] * sum(sizes) + offsets[None]).astype(np.uint64)
        expert_ptr = home.copy()
        expert_ptr[fetched] = slots
        rows = np.full((E, 3), -1, np.int32)
        rows[:2] = [[fetched[0], 0, -1], [fetched[1], 1, E - 1]]
        activation: Activation = "gelu" if gelu else "silu"
        bank = Experts(*types, D, F, sizes, expert_ptr, home, slots, poison=True, activation=activation)
        x = residual.copy() if add else np.full_like(residual, np.nan)
        ops.expert_ffn(ws, h, experts, w, bank, Fetches(rows, np.array([2], np.int32)), x, add)
        return {"x": x, "arena": arena}

    def oracle() -> Outputs:
        gate, up, down = ([exact(m) for m in part] for part in parts)
        x = residual.astype(np.float64) if add else np.zeros((T, D))
        for t in range(T):
            for a in range(A):
                e = experts[t, a]
                x[t] += w[t, a] * (down[e] @ (activate(gate[e] @ h[t], gelu) * (up[e] @ h[t])))
        arena = np.stack([np.concatenate([parts[p][e].data for p in range(3)]) for e in fetched])
        return {"x": x, "arena": arena}

    name = f"expert_ffn {'/'.join(t.name for t in types)} D={D} F={F} T={T}{' gelu' if gelu else ''}"
    return Case(f"{name}{'' if add else ' add=False'}", run, oracle, rounding(*types), (E, A))


def head_case(qtype: QType, rows: tuple[int, ...]) -> Case:
    V, D, T, eps = 301, 256, 9, 1e-5
    output, x, norm = weights(qtype, V, D, 31), floats(32, T, D), gain(33, D)
    index = np.array(rows, np.int32)

    def run(ops: ModuleType, ws: Any) -> Outputs:
        logits = np.full((len(rows), V), np.nan, np.float32)
        ops.head(ws, x, index, norm, eps, output, logits)
        return {"logits": logits}

    return Case(
        f"head {qtype.name} rows={rows}",
        run,
        lambda: {"logits": rms(x[index], norm, eps) @ exact(output).T},
        rounding(qtype),
    )


K4, K5, K6, Q8 = QType.Q4_K, QType.Q5_K, QType.Q6_K, QType.Q8_0
CASES = [
    *(embed_case(t) for t in NATIVE_TYPES),
    *(product_case(t, 13, 512, 1) for t in NATIVE_TYPES),
    *(product_case(t, 6, 1280, 37) for t in NATIVE_TYPES),
    *(product_case(t, 5, 352, 3) for t in SMALL_BLOCKS),
    *(product_case(t, 3, 96, 2) for t in SMALL_BLOCKS),
    *(product_case(t, 5, 77, 3) for t in FLOATS),
    *(extreme_product_case(t) for t in NATIVE_TYPES if t not in FLOATS),
    *(odd_activations_case(t) for t in NATIVE_TYPES),
    attention_input_case((K4, K4, K6), "f16", 1, 6, 2, 64, 64, True),
    attention_input_case((K4, K4, K6), "q8_0", 19, 6, 2, 96, 64, True),
    attention_input_case((Q8, K5, QType.F16), "f16", 5, 4, 2, 40, 24, False),
    attention_input_case((QType.F32, QType.F32, QType.F32), "f16", 7, 6, 3, 46, 46, True),
    attention_case("f16", (200,), (1,), 6, 2, 64),
    attention_case("f16", (1,), (1,), 3, 1, 44),
    attention_case("f16", (75, 130), (75, 4), 6, 2, 48),
    attention_case("q8_0", (64, 65, 129), (2, 1, 3), 10, 2, 32),
    attention_case("q8_0", (333,), (21,), 4, 1, 128),
    attention_case("f16", (70,), (7,), 3, 1, 64, odd=True),
    attention_input_case((K4, K4, K6), "f16", 1, 6, 2, 64, 32, True, K4),
    attention_input_case((Q8, K5, Q8), "q8_0", 3, 5, 2, 96, 96, True, QType.F32, True),
    attention_input_case((K4, K6), "f16", 2, 3, 1, 256, 64, True, v_normed=True),
    attention_input_case((K4, K6), "f16", 35, 3, 1, 256, 64, True, QType.BF16, True),
    attention_input_case((K5,), "q8_0", 4, 3, 1, 288, 64, False, K5),
    attention_input_case((QType.F32,), "f16", 1, 2, 1, 512, 128, True),
    attention_case("f16", (300,), (1,), 6, 2, 64, window=100),
    attention_case("f16", (290, 200), (3, 2), 8, 1, 32, window=130, gate_kind="softplus"),
    attention_case("q8_0", (333, 129), (9, 1), 4, 2, 256, window=64, gate_kind="sigmoid", by_head=False),
    attention_case("f16", (20, 150), (4, 2), 3, 1, 48, window=512, gate_kind="sigmoid"),
    attention_case("f16", (80,), (4,), 2, 1, 512, gate_kind="softplus", by_head=False),
    attention_case("q8_0", (300,), (40,), 4, 2, 64, window=70, gate_kind="softplus"),
    attention_case("f16", (120, 30), (38, 2), 2, 1, 512, window=65, gate_kind="sigmoid", by_head=False),
    *(attention_output_case(t, T) for t, T in ((K4, 1), (K6, 19), (QType.F32, 3))),
    *(attention_output_case(t, T, False) for t, T in ((K4, 1), (K6, 19), (QType.F32, 3), (K4, 33))),
    *(router_case(t, T) for t, T in ((QType.F32, 1), (QType.F16, 19), (QType.BF16, 40))),
    route_case((4, 9, 3), policy.LRU, True, 1),
    route_case((4, 9, 3), policy.LFU, True, 11),
    route_case((0, 12), policy.Rule(3, 8), False, 2),
    route_case((2, 0), policy.LRU, True, 40),
    route_case((3, 9), policy.AGED, True, 45),
    route_case((2, 17), policy.LFU, False, 7, odd=True),
    route_case((2, 9), policy.LRU, True, 7, odd=True),
    expert_case((K4, K4, K6), 256, 512, 1),
    expert_case((K4, K4, K6), 512, 256, 41),
    expert_case((K5, QType.IQ4_XS, K4), 256, 768, 6),
    expert_case((Q8, Q8, QType.Q4_0), 352, 96, 5),
    expert_case((QType.Q4_0, QType.F16, Q8), 288, 160, 4),
    expert_case((QType.F32, QType.BF16, QType.F16), 77, 70, 5),
    expert_case((K4, K4, K6), 256, 512, 1, gelu=True, add=False),
    expert_case((Q8, Q8, QType.F16), 96, 70, 6, gelu=True),
    expert_case((K6, K4, K5), 256, 256, 35, gelu=True, add=False),
    *(head_case(t, rows) for t, rows in ((K6, (8,)), (K4, (0, 3, 3, 7)), (QType.F16, (5, 2)), (K6, ()))),
]


@functools.cache
def workspace(isa: str, threads: int = 2) -> Any:
    return cpu.workspace(replace(LIMITS, n_expert=512, n_expert_used=16), threads, isa)


@functools.cache
def twin(case: Case) -> Outputs:
    return case.run(reference, reference.workspace(LIMITS, 1))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, where a NaN has no bits of its own."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind != "f":
        return np.array_equal(a, b)
    words = {2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    return bool(((a.view(words) == b.view(words)) | (np.isnan(a) & np.isnan(b))).all())


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernels_equal_the_twin_bit_for_bit(case: Case, isa: str) -> None:
    outputs = case.run(cpu, workspace(isa))
    for name, expected in twin(case).items():
        assert same_bits(outputs[name], expected), name


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda_kernels_equal_the_twin(case: Case, device: Any) -> None:
    """Bit for bit in small steps, attention's sums excepted; tensor cores by their distance from float64."""
    small = replace(LIMITS, n_expert=case.experts[0], n_expert_used=case.experts[1])
    if case.refused_on_cuda:
        with pytest.raises(ValueError, match=case.refused_on_cuda):
            case.run(DeviceOps(device, small), None)
        return
    outputs = case.run(DeviceOps(device, small), None)
    expected = case.oracle() if case.oracle and not case.exact_on_cuda else twin(case)
    for name, value in expected.items():
        if case.exact_on_cuda or outputs[name].dtype.kind != "f":
            assert same_bits(outputs[name], np.asarray(value, outputs[name].dtype)), name
        else:
            found, value = outputs[name].astype(np.float64), value.astype(np.float64)
            assert np.array_equal(np.isnan(found), np.isnan(value)), name
            finite = np.isfinite(value) & np.isfinite(found)
            assert ((found - value)[finite] ** 2).sum() <= CUDA_NMSE * (value[finite] ** 2).sum(), name


@pytest.mark.parametrize("case", [c for c in CASES if c.oracle], ids=lambda c: c.name)
def test_the_twin_is_near_float64(case: Case) -> None:
    outputs = twin(case)
    for name, expected in case.oracle().items():  # type: ignore[misc]
        value = outputs[name].astype(np.float64)
        if case.nmse == 0 or outputs[name].dtype.kind != "f":
            assert np.array_equal(value, expected), name
        else:
            assert ((value - expected) ** 2).sum() <= case.nmse * (expected**2).sum(), name


@pytest.mark.parametrize("qtype", NATIVE_TYPES, ids=lambda t: t.name)
def test_a_row_does_not_depend_on_its_step(qtype: QType) -> None:
    w, x = weights(qtype, 9, 768, 40), floats(41, 70, 768)
    ws = workspace(cpu.supported_isas()[-1])
    together = product(cpu, ws, w, x)
    for t in (0, 31, 32, 69):
        assert same_bits(product(cpu, ws, w, x[t : t + 1]), together[t : t + 1])


@pytest.mark.parametrize("qtype", [t for t in NATIVE_TYPES if t not in FLOATS], ids=lambda t: t.name)
def test_integer_blocks_rebuild_the_weights(qtype: QType) -> None:
    w = weights(qtype, 5, 1024, 42)
    terms = integer_blocks(w)
    scale = terms.scale[..., None, None] * np.ones(2)[:, None]
    if terms.half_scale is not None:
        scale = (terms.scale[..., None] * terms.half_scale)[..., None]
    rebuilt = (scale * terms.q).astype(np.float32)
    if terms.minimum is not None:
        rebuilt = rebuilt - terms.minimum[..., None, None]
    assert np.array_equal(rebuilt.reshape(w.shape), exact(w).astype(np.float32))


@settings(max_examples=300, deadline=None)
@given(*(st.floats(width=32, allow_nan=False, allow_infinity=False) for _ in range(3)))
def test_fma_of_the_twin_rounds_once(a: float, b: float, c: float) -> None:
    value = float(arithmetic.fma(*(np.array([v], np.float32) for v in (a, b, c)))[0])
    exact_value = Fraction(a) * Fraction(b) + Fraction(c)
    if not np.isfinite(value):
        assert abs(exact_value) >= Fraction(2) ** 128 - Fraction(2) ** 103
        return
    with np.errstate(over="ignore"):
        neighbors = np.nextafter(np.float32(value), np.array([-np.inf, np.inf], np.float32))
    for neighbor in neighbors:
        if np.isfinite(neighbor):
            assert abs(Fraction(value) - exact_value) <= abs(Fraction(float(neighbor)) - exact_value)


EXP_INPUTS = np.concatenate([
    np.linspace(-90, 90, 20011), floats(43, 5000).astype(np.float64) * 20, [-87, -87.000008, 88, 88.00001, 0.0, -0.0],
    [np.inf, -np.inf, np.nan, 1e-40, 3e38, -3e38],
]).astype(np.float32)  # fmt: skip


@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_exp_equals_the_twin(isa: str) -> None:
    assert same_bits(cpu.exp(workspace(isa), EXP_INPUTS), arithmetic.exp(EXP_INPUTS))


def test_exp_of_the_twin_is_accurate() -> None:
    x = EXP_INPUTS[(EXP_INPUTS >= -87) & (EXP_INPUTS <= 88)].astype(np.float64)
    assert np.abs(arithmetic.exp(x.astype(np.float32)) / np.exp(x) - 1).max() < 3e-7
    assert arithmetic.exp(np.array([-87.1, -np.inf], np.float32)).tolist() == [0, 0]
    assert np.isnan(arithmetic.exp(np.array([np.nan], np.float32))).all()


def test_sigmoid_and_softplus_of_the_twin_are_accurate() -> None:
    x = EXP_INPUTS[np.abs(EXP_INPUTS) <= 85]
    exact_x = x.astype(np.float64)
    assert np.abs(arithmetic.sigmoid(x) * (1 + np.exp(-exact_x)) - 1).max() < 5e-7
    softplus = np.maximum(exact_x, 0) + np.log1p(np.exp(-np.abs(exact_x)))
    assert np.abs(arithmetic.softplus(x) / softplus - 1).max() < 5e-7
    ends = np.array([-np.inf, -100, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(arithmetic.sigmoid(ends) > 1e-38, [False, False, True, False])
    np.testing.assert_array_equal(np.isnan(arithmetic.sigmoid(ends)), [False, False, False, True])
    np.testing.assert_array_equal(arithmetic.softplus(ends), np.array([0, 0, np.inf, np.nan], np.float32))
