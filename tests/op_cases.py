"""How cases of the ops are made: inputs from a seed, the call on any backend, and an oracle in float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats.block_types import FLOAT_TYPES, RECORDS
from engine.formats.quants import QTensor, row_bytes
from engine.ground.kv_types import pair_of
from engine.ops import (
    KV_BLOCK_TOKENS,
    SMALL_TOKENS,
    Activation,
    AttentionInput,
    Experts,
    Fetches,
    Gating,
    KVLayer,
    Limits,
    SharedExpert,
    arithmetic,
    cpu,
    reference,
)
from engine.placing import policy
from tests.device_ops import DeviceOps
from tests.gguf_files import BLOCK_SCALES, random_blocks, scale_bytes

Outputs = dict[str, np.ndarray]

LIMITS = Limits(
    max_tokens=80, n_embd=1536, n_head_dim=1024, n_ff=18720, n_vocab=301, n_expert=17, n_expert_used=5, n_head=10,
    n_head_kv=4, head_dim=512,
)  # fmt: skip
FLOATS = FLOAT_TYPES
SMALL_BLOCKS = tuple(qtype for qtype, t in RECORDS.items() if 1 < t.elements < 256)
# Types that few files have: their kernels are compiled for the emulator by `make slow` alone.
USUAL = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"}
SELDOM = {t.name for t in RECORDS} - USUAL
CUDA_NMSE = 1e-5  # of tensor cores with half-precision operands, against float64


def slow_if(condition: object) -> list[pytest.MarkDecorator]:
    """Marks of a parameter."""
    return [pytest.mark.slow] if condition else []


@dataclass(frozen=True)
class Case:
    """run(ops, ws) -> what `op` wrote; oracle() -> the same in float64, to within `nmse`.

    label: what tells the case from others of its op. tokens: of the step, which decides what CUDA runs. types: of the
    matrices, gate and up first. head_dim: of attention. experts: of the layer, of a token; what CUDA's kernels are
    compiled for.
    """

    op: str
    label: str
    run: Callable[[ModuleType, Any], Outputs]
    oracle: Callable[[], Outputs] | None = None
    nmse: float = 0.0
    _: KW_ONLY
    tokens: int
    types: tuple[QType, ...] = ()
    head_dim: int = 0
    experts: tuple[int, int] = (17, 5)

    @property
    def name(self) -> str:
        """What the test is called."""
        return f"{self.op} {self.label}"

    @property
    def on_cuda(self) -> Any:
        """The case as a parameter of a CUDA test."""
        return pytest.param(self, id=self.name, marks=slow_if(SELDOM & {*re.findall(r"\w+", self.label)}))

    @property
    def refused_on_cuda(self) -> str:
        """What the CUDA wrappers say of a case that they have no kernel for; empty where they have one."""
        if self.head_dim % 8:
            return f"for heads of {self.head_dim}"
        mixed = self.op == "expert_ffn" and (self.types[0] in FLOATS) != (self.types[1] in FLOATS)
        return "both types must be alike" if mixed else ""

    @property
    def exact_on_cuda(self) -> bool:
        """Whether docs/arithmetic.md fixes the bits there too: not in attention, nor in long steps but for routing."""
        short = self.tokens <= SMALL_TOKENS
        return self.op != "attention" and (short or self.op in ("route", "add_norm", "add_norms"))


def weights(qtype: QType, rows: int, cols: int, seed: int) -> QTensor:
    data = random_blocks(qtype, rows, cols, np.random.default_rng(seed))
    return QTensor(f"random {qtype.name}", qtype, (rows, cols), np.ascontiguousarray(data).reshape(-1))


def exact(w: QTensor) -> np.ndarray:
    """The weights in float64, by the gguf package, times their scale."""
    return gguf.dequantize(w.data.reshape(w.shape[0], -1), w.qtype).astype(np.float64) * w.scale


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


def with_homes(device: Any, kv: KVLayer, n_pool: int) -> KVLayer:
    """A cache on a device whose first n_pool blocks lie in the pool and the others at home, in page-locked memory."""
    n = n_pool * KV_BLOCK_TOKENS

    def home(array: np.ndarray) -> np.ndarray:
        memory: np.ndarray = device.page_locked(array[n:].nbytes).view(array.dtype).reshape(array[n:].shape)
        memory[...] = array[n:]
        return memory

    homes = KVLayer(*(None if a is None else home(a) for a in kv.arrays))
    return KVLayer(*(None if a is None else device.upload(a[:n]) for a in kv.arrays), homes)


def product_case(qtype: QType, rows: int, cols: int, T: int, scale: float = 1.0) -> Case:
    """cols: or as many as fill blocks."""
    cols -= cols % RECORDS[qtype].elements
    w, x = replace(weights(qtype, rows, cols, 1), scale=scale), floats(2, T, cols)
    return Case(
        "product",
        f"{qtype.name} [{rows}, {cols}] T={T}{'' if scale == 1 else f' scale={scale}'}",
        lambda ops, ws: {"y": product(ops, ws, w, x)},
        lambda: {"y": x.astype(np.float64) @ exact(w).T},
        rounding(qtype),
        tokens=T,
    )


def extreme_product_case(qtype: QType) -> Case:
    """Largest codes against largest activations: sums that would not fit in 16 bits."""
    rows, cols, T = 7, 768, 3
    w = weights(qtype, rows, cols, 3)
    rng = np.random.default_rng(4)
    data = w.data.reshape(-1, RECORDS[qtype].n_bytes).copy()
    codes = np.ones(data.shape[1], bool)
    for at, _ in BLOCK_SCALES[qtype]:
        codes[at : at + scale_bytes(qtype, np.ones(1)).shape[1]] = False
    data[:, codes] = rng.choice(np.array([0x00, 0x7F, 0x80, 0x88, 0xFF], np.uint8), (len(data), 1))
    w = QTensor(w.name, qtype, w.shape, data.reshape(-1))
    x = rng.choice(np.array([-3, 3], np.float32), (T, cols // 32, 1)).repeat(32, axis=2).reshape(T, cols)
    return Case(
        "product",
        f"{qtype.name} extremes",
        lambda ops, ws: {"y": product(ops, ws, w, x)},
        lambda: {"y": x.astype(np.float64) @ exact(w).T},
        1e-10,  # these activations are exact in 8 bits
        tokens=T,
    )


def any_scale_case(qtype: QType) -> Case:
    """Every bit random, those of the scales too: all that a byte can say."""
    cols = 3328
    data = np.random.default_rng(45).integers(0, 256, 5 * row_bytes(qtype, cols, "random"), np.uint8)
    w, x = QTensor(f"any {qtype.name}", qtype, (5, cols), data), floats(46, 3, cols)

    def run(ops: ModuleType, ws: Any) -> Outputs:
        rows = np.full((5, cols), np.nan, np.float32)
        ops.embed(ws, w, np.arange(5, dtype=np.int32), rows)
        return {"y": product(ops, ws, w, x), "x": rows}

    return Case("product", f"{qtype.name} any scales", run, tokens=3)


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
    label = f"{qtype.name} odd activations"
    return Case("product", label, lambda ops, ws: {"y": product(ops, ws, w, x)}, tokens=len(x))


def embed_case(qtype: QType) -> Case:
    V, D = 37, 192 if qtype in SMALL_BLOCKS else 77 if qtype in FLOATS else 512
    table, tokens = weights(qtype, V, D, 7), np.array([36, 0, 5, 5, 17], np.int32)

    def run(ops: ModuleType, ws: Any) -> Outputs:
        x = np.full((len(tokens), D), np.nan, np.float32)
        ops.embed(ws, table, tokens, x)
        return {"x": x}

    return Case("embed", qtype.name, run, lambda: {"x": exact(table)[tokens]}, tokens=len(tokens))


# --- attention ------------------------------------------------------------------------------------


def empty_cache(kv_type: str, blocks: int, K: int, head_dim: int) -> KVLayer:
    rows, kinds = (blocks * KV_BLOCK_TOKENS, K), pair_of(kv_type)
    arrays = (np.zeros((*rows, kind.n_elements(head_dim)), kind.dtype) for kind in kinds)
    scales = (np.zeros((*rows, kind.n_scales(head_dim)), np.float16) if kind.block else None for kind in kinds)
    return KVLayer(*arrays, *scales)


def cache_values(cache: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    if cache.dtype == np.uint8:
        low, high = (half.reshape(*cache.shape[:2], -1, 16) for half in (cache % 16, cache // 16))
        cache = np.concatenate([low, high], axis=-1).reshape(*cache.shape[:2], -1).astype(np.int8) - np.int8(8)
    values = cache.astype(np.float64)
    return values if scale is None else values * scale.astype(np.float64).repeat(32, axis=-1)


def attention_input_case(
    types: tuple[QType, ...], kv_type: str, T: int, H: int, K: int, head_dim: int, n_rot: int, norms: bool,
    gate_type: QType | None = None, v_normed: bool = False, unstored: int = 0,
) -> Case:  # fmt: skip
    """types: of Q, K and V; one for a layer that reads another's cache, two for one whose values are its raw keys.

    unstored: of the first tokens, which have no slot.
    """
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
    slots[:unstored] = -1

    def run(ops: ModuleType, ws: Any) -> Outputs:
        kv, q = empty_cache(kv_type, 3, K, head_dim), np.full((T, H, head_dim), np.nan, np.float32)
        gates = None if gate is None else np.full((T, H + 3), np.nan, np.float32)
        inputs = AttentionInput(norm, wq, wk, wv, q_norm, k_norm, v_norm, gate)
        ops.attention_input(ws, x, inputs, eps, rope, positions, kv, slots, q, gates)
        arrays = {"q": q, "k": kv.k, "v": kv.v} | ({} if gates is None else {"gate": gates})
        scales = {"k_scale": kv.k_scale, "v_scale": kv.v_scale}
        return arrays | {name: scale for name, scale in scales.items() if scale is not None}

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
        keys[slots[unstored:]], values[slots[unstored:]] = k[unstored:], v[unstored:]
        found = {"q": q} if gate is None else {"q": q, "gate": h @ exact(gate).T}
        stored = zip("kv", pair_of(kv_type), (keys, values), strict=True)
        return found | {name: array for name, kind, array in stored if not kind.block}

    names = "/".join(t.name for t in types)
    label = f"{names} {kv_type} T={T} head_dim={head_dim}"
    if gate_type is not None or v_normed:
        label += f" gate={gate_type.name if gate_type is not None else None} v_norm={v_normed}"
    if unstored:
        label += f" unstored={unstored}"
    nmse = max(rounding(*all_types), 1e-6)
    return Case("attention_input", label, run, oracle, nmse, tokens=T, head_dim=head_dim)


def attention_case(
    kv_type: str, lengths: tuple[int, ...], new: tuple[int, ...], H: int, K: int, head_dim: int, odd: bool = False,
    window: int = 0, gate_kind: str = "", by_head: bool = True, absent: tuple[tuple[int, int], ...] = (),
) -> Case:  # fmt: skip
    """Sequences of `lengths` positions, the last `new` of which are the step's tokens; blocks shuffled.

    Blocks before all windows of a sequence are none at all, or not its own and poisoned. absent: (sequence, block) that
    are seen and not there.
    """
    rng = np.random.default_rng(16)
    blocks = [-(-n // KV_BLOCK_TOKENS) for n in lengths]
    n_blocks = sum(blocks) + 2
    kv = empty_cache(kv_type, n_blocks, K, head_dim)
    for i, (cache, scale) in enumerate(((kv.k, kv.k_scale), (kv.v, kv.v_scale))):
        if scale is None:
            cache[:] = floats(17 + i, *cache.shape)
        else:
            cache[:] = rng.integers(*((0, 256) if cache.dtype == np.uint8 else (-127, 128)), cache.shape)
            scale[:] = rng.uniform(0.005, 0.02, scale.shape)
    order = rng.permutation(n_blocks).astype(np.int32)
    table = np.full((len(lengths), max(blocks)), -1, np.int32)
    for s, n in enumerate(blocks):
        table[s, :n] = order[sum(blocks[:s]) : sum(blocks[:s]) + n]
    sequence = np.repeat(np.arange(len(lengths)), new).astype(np.int32)
    positions = np.concatenate([np.arange(n - m, n) for n, m in zip(lengths, new, strict=True)]).astype(np.int32)
    for s, b in absent:
        table[s, b] = -1
    used = {int(b) for row in table for b in row if b >= 0}
    for block in set(range(n_blocks)) - used:  # what no table names must not matter
        kv.v[block * KV_BLOCK_TOKENS : (block + 1) * KV_BLOCK_TOKENS] = np.nan if kv.v_scale is None else 77
        if window and kv.k_scale is not None:
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
            at = at[table[sequence[t], at // KV_BLOCK_TOKENS] >= 0]
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

    label = f"{kv_type} lengths={lengths} new={new} H={H} K={K} head_dim={head_dim}{' odd' if odd else ''}"
    if window or gate_kind:
        label += f" window={window} gate={gate_kind}{' by head' if by_head and gate_kind else ''}"
    if absent:
        label += f" absent={absent}"
    if sum(new) > SMALL_TOKENS:
        label += f" T={sum(new)}"
    return Case("attention", label, run, None if odd else oracle, 1e-10, tokens=sum(new), head_dim=head_dim)


def attention_output_case(qtype: QType, T: int, add: bool = True) -> Case:
    D, K = 77, 512
    wo, attended, residual = weights(qtype, D, K, 20), floats(21, T, K), floats(22, T, D)

    def run(ops: ModuleType, ws: Any) -> Outputs:
        x = residual.copy()
        ops.attention_output(ws, attended, wo, x, *(() if add else (False,)))
        return {"x": x}

    return Case(
        "attention_output",
        f"{qtype.name} T={T}{'' if add else ' add=False'}",
        run,
        lambda: {"x": residual * add + attended.astype(np.float64) @ exact(wo).T},
        max(rounding(qtype), 1e-12),
        tokens=T,
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

    return Case("router", f"{qtype.name} T={T}", run, oracle, 1e-11, tokens=T)


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
        state.slot_of[layer, resident], state.expert_of[at] = at, resident
        state.expert_ptr[layer, resident] = state.slot_ptr[at]
        state.pinned[at[: n // 3]] = 1
    state.heat[:] = rng.choice([-3, 0, 40, 65536, 65537, 1 << 18], state.heat.shape)  # equals among them
    return state


def bank_of(state: policy.SlotState, layer: int) -> Experts:
    """The experts of a layer, of whose matrices nobody reads a byte."""
    Q8 = QType.Q8_0
    return Experts(
        Q8, Q8, Q8, 32, 32, (1088,) * 3, state.expert_ptr[layer], state.home_ptr[layer], state.slot_ptr, layer=layer
    )


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
            ops.route(ws, logits(step), gating, state, bank_of(state, layer), counted, rule, experts, w, fetches)
            outputs |= {f"experts {step}": experts, f"weights {step}": w}
            outputs |= {f"fetches {step}": fetches.rows[: fetches.count[0]].copy()}
        names = ("slot_of", "expert_of", "heat", "pinned", "clock", "counts", "hits", "misses", "expert_ptr")
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

    label = f"slots={slots} {rule} renormalize={renormalize} T={T}{' odd' if odd else ''}"
    return Case("route", label, run, None if odd else oracle, 1e-12, tokens=T)


def activate(x: np.ndarray, gelu: bool) -> np.ndarray:
    return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3) if gelu else -x))


def expert_case(
    types: tuple[QType, QType, QType], D: int, F: int, T: int, gelu: bool = False, add: bool = True,
    shared: tuple[QType, QType, QType] | None = None, shared_F: int = 0, shared_gate: QType | None = None,
    scaled: bool = False,
) -> Case:  # fmt: skip
    """scaled: products of gate, and of all matrices of a shared expert, have factors."""
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
    beside = None
    if shared is not None:
        gate = None if shared_gate is None else weights(shared_gate, 1, D, 503)
        shapes = ((shared_F, D), (shared_F, D), (D, shared_F))
        matrices = [weights(t, *shape, 500 + p) for p, (t, shape) in enumerate(zip(shared, shapes, strict=True))]
        factors = (0.6, 1.7, 0.3) if scaled else (1.0, 1.0, 1.0)
        beside = SharedExpert(*(replace(m, scale=s) for m, s in zip(matrices, factors, strict=True)), gate)
    gate_scale = rng.uniform(0.3, 3.0, E).astype(np.float32) if scaled else None
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
        bank = Experts(*types, D, F, sizes, expert_ptr, home, slots, True, activation, gate_scale, layer=0)
        x = residual.copy() if add else np.full_like(residual, np.nan)
        ops.expert_ffn(ws, h, experts, w, bank, Fetches(rows, np.array([2], np.int32)), x, add, beside)
        return {"x": x, "arena": arena}

    def oracle() -> Outputs:
        gate, up, down = ([exact(m) for m in part] for part in parts)
        x = residual.astype(np.float64) if add else np.zeros((T, D))
        for t in range(T):
            for a in range(A):
                e = experts[t, a]
                factor = 1.0 if gate_scale is None else float(gate_scale[e])
                x[t] += w[t, a] * (down[e] @ (activate(factor * (gate[e] @ h[t]), gelu) * (up[e] @ h[t])))
        if beside is not None:
            wide = h.astype(np.float64)
            z = activate(wide @ exact(beside.gate).T, gelu) * (wide @ exact(beside.up).T)
            gates = 1.0 if beside.shared_gate is None else 1 / (1 + np.exp(-(wide @ exact(beside.shared_gate).T)))
            x += gates * (z @ exact(beside.down).T)
        arena = np.stack([np.concatenate([parts[p][e].data for p in range(3)]) for e in fetched])
        return {"x": x, "arena": arena}

    label = f"{'/'.join(t.name for t in types)} D={D} F={F} T={T}{' gelu' if gelu else ''}"
    label += "" if add else " add=False"
    if shared is not None:
        label += f" beside {'/'.join(t.name for t in shared)} F={shared_F} gate={shared_gate and shared_gate.name}"
    label += " scaled" if scaled else ""
    nmse = rounding(*types, *(shared or ()))
    return Case("expert_ffn", label, run, oracle, nmse, tokens=T, types=types, experts=(E, A))


def head_case(qtype: QType, rows: tuple[int, ...]) -> Case:
    V, D, T, eps = 301, 256, 9, 1e-5
    output, x, norm = weights(qtype, V, D, 31), floats(32, T, D), gain(33, D)
    index = np.array(rows, np.int32)

    def run(ops: ModuleType, ws: Any) -> Outputs:
        logits = np.full((len(rows), V), np.nan, np.float32)
        ops.head(ws, x, index, norm, eps, output, logits)
        return {"logits": logits}

    return Case(
        "head",
        f"{qtype.name} rows={rows}",
        run,
        lambda: {"logits": rms(x[index], norm, eps) @ exact(output).T},
        rounding(qtype),
        tokens=len(rows),
    )


K4, K5, K6, Q8 = QType.Q4_K, QType.Q5_K, QType.Q6_K, QType.Q8_0
