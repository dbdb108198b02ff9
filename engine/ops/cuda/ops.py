"""The CUDA backend: the kernels of `cuda/` with the signatures of `engine/ops/reference.py`.

A step of at most SMALL_TOKENS tokens follows docs/arithmetic.md (attention excepted, whose sums are split by
position); a longer one runs on tensor cores. Arrays are the device's (see device.py); nothing here waits for the
device, allocates, or decides by what an array holds, so a whole step can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import policy
from engine.ops import SMALL_TOKENS, Experts, Fetches, KVLayer, Limits
from engine.ops.cuda import routing
from engine.ops.cuda.attention import Attention
from engine.ops.cuda.device import Array, Device
from engine.ops.cuda.experts import SmallExperts
from engine.ops.cuda.flash import Flash
from engine.ops.cuda.gemm import Gemm
from engine.ops.cuda.products import Products, QuantizedScratch
from engine.ops.cuda.replay import Replay
from engine.ops.cuda.routing import Routing, Staging
from engine.quants import QTensor

# From so many tokens on a prefill step brings in a layer's missing experts while the layer before it computes; a
# shorter one waits for its own choice and brings in no other experts. At 128 tokens both take about as long.
AHEAD_TOKENS = 128
FLOAT_TYPES = ("F32", "F16", "BF16")


@dataclass(slots=True)
class _Prepared:
    """A float array in the form in which the next op reads it, so that the kernel which made it wrote both."""

    pointer: int
    shape: tuple[int, ...]
    value: Any


class Workspace:
    """Kernels and scratch memory for steps within `limits`, all of it allocated here."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self.device = device
        self.limits = limits
        self.isa = device.arch
        self.products = Products(device, limits)
        self.small_experts = SmallExperts(device, limits)
        self.attention = Attention(device, limits)
        self.routing = Routing(device, limits)
        long = limits.max_tokens > SMALL_TOKENS
        self._gemm = Gemm(device, limits) if long else None
        self._flash = Flash(device, limits) if long else None
        T, width = limits.max_tokens, limits.head_dim
        self.normed = device.empty((min(T, SMALL_TOKENS), limits.n_embd), np.float32)
        self.raw_q = device.empty((T, limits.n_head * width), np.float32)
        self.raw_k = device.empty((T, limits.n_head_kv * width), np.float32)
        self.raw_v = device.empty((T, limits.n_head_kv * width), np.float32)
        self.attended = QuantizedScratch(device, min(T, SMALL_TOKENS), limits.n_head_dim)
        # A step after a stop token is a no-op: its tables do not move (cuda/step.cuh clears this).
        self.active_step: Array | None = None
        self.replay: Replay | None = None
        self.streaming: Streaming | None = None
        self._prepared: _Prepared | None = None

    @property
    def gemm(self) -> Gemm:
        """Products of long steps."""
        assert self._gemm is not None, "the workspace was made for short steps"
        return self._gemm

    @property
    def flash(self) -> Flash:
        """Attention of long steps."""
        assert self._flash is not None, "the workspace was made for short steps"
        return self._flash

    def stream_experts(self, n_bytes: int, part_bytes: tuple[int, int, int]) -> None:
        """Allocate for experts that have no slot: two staging buffers of n_bytes, and what misses pass through.

        part_bytes: of the largest gate, up and down of any layer.
        """
        self.streaming = Streaming(self.device, self.limits, n_bytes)
        self.routing.pass_through(part_bytes)

    def prepare(self, array: Array, value: Any) -> None:
        """Remember what the last op made of `array` for the next one."""
        self._prepared = _Prepared(self.device.pointer(array), array.shape, value)

    def prepared(self, array: Array) -> Any:
        """What the last op made of `array`, once; None if that was not its input."""
        known, self._prepared = self._prepared, None
        if known is None or known.pointer != self.device.pointer(array) or known.shape != array.shape:
            return None
        return known.value

    def close(self) -> None:
        """The device releases everything at once when it closes."""


class Streaming:
    """The missing experts of the layers to come, on their way to staging memory."""

    def __init__(self, device: Device, limits: Limits, n_bytes: int) -> None:
        self.staging = Staging(device, limits, n_bytes)
        self.stream = device.stream(priority=-1)
        self.banks: dict[int, Experts] = {}
        self.ahead = False
        self.newest = 0  # the layer whose experts were asked for last
        self.layer = 0


def workspace(limits: Limits, device: Device) -> Workspace:
    """Kernels and scratch memory for steps within `limits`."""
    return Workspace(device, limits)


def embed(ws: Workspace, table: QTensor, tokens: Array, x: Array) -> None:
    """Rows of the embedding table: x [T, D] = table[tokens]; table [V, D] of any native type."""
    routing.embed(ws.device, table, tokens, x)


def copy(ws: Workspace, x: Array, to: Array) -> None:
    """The array `to`, on the device or page-locked, becomes equal to x."""
    ws.device.copy(ws.device.pointer(to), ws.device.pointer(x), x.nbytes)


def fetch_ahead(ws: Workspace, state: policy.SlotState, layer: int, bank: Experts, n_tokens: int) -> None:
    """Begin to bring in the missing experts of `layer`, which a long step will need soon."""
    s = ws.streaming
    if s is None or n_tokens <= SMALL_TOKENS:
        return
    s.banks[layer], s.ahead = bank, n_tokens >= AHEAD_TOKENS
    if s.ahead:
        # A wait is for all that is enqueued: the main stream must wait for the layer at hand before the next one's
        # copies are enqueued behind it, or it would wait for those, too.
        if layer:
            ws.device.wait(None, s.stream)
        ws.device.wait(s.stream, None)  # the buffer was read two layers ago
        with ws.device.on(s.stream):
            s.staging.gather(state, layer, bank, layer % 2)
        s.newest = layer


def attention_input(
    ws: Workspace,
    x: Array,
    norm: Array,
    eps: float,
    wq: QTensor,
    wk: QTensor,
    wv: QTensor,
    q_norm: Array | None,
    k_norm: Array | None,
    rope: Array,
    positions: Array,
    kv: KVLayer,
    slots: Array,
    q: Array,
) -> None:
    """Norm, Q, K, V, per-head norms and RoPE; keys and values go to the cache, Q to `q`.

    Shapes as in `reference.attention_input`; a slot of -1 stores nothing.
    """
    T = x.shape[0]
    raw_q, raw_k, raw_v = (_rows_of(a, T, w.shape[0]) for a, w in ((ws.raw_q, wq), (ws.raw_k, wk), (ws.raw_v, wv)))
    if T <= SMALL_TOKENS:
        ws.products.norm_several(x, norm, eps, (wq, wk, wv), (raw_q, raw_k, raw_v), _rows_of(ws.normed, *x.shape))
    else:
        halves = ws.gemm.norm_to_halves(x, norm, eps)
        for w, y in ((wq, raw_q), (wk, raw_k), (wv, raw_v)):
            ws.gemm.product(w, halves, y)
    ws.attention.input(raw_q, raw_k, raw_v, q_norm, k_norm, eps, rope, positions, kv, slots, q)


def _rows_of(array: Array, n_rows: int, width: int) -> Array:
    """The beginning of an array's memory as [n_rows, width]."""
    return array.reshape(-1)[: n_rows * width].reshape(n_rows, width)


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
) -> None:
    """Causal attention over cached blocks, in logical order; shapes as in `reference.attention`.

    n_positions: one more than the largest position, which a long step needs from the host.
    """
    if q.shape[0] <= SMALL_TOKENS:
        T, width = out.shape
        quantized = ws.attended.rows(T, width) if width % 32 == 0 else None
        ws.attention.decode(q, kv, block_table, sequence, positions, scale, out, quantized)
        if quantized is not None:
            ws.prepare(out, quantized)
    else:
        ws.flash(q, kv, block_table, sequence, positions, scale, out, n_positions=n_positions)


def attention_output(ws: Workspace, attended: Array, wo: QTensor, x: Array) -> None:
    """x [T, D] += wo [D, H * head_dim] @ attended [T, H * head_dim]."""
    if attended.shape[0] <= SMALL_TOKENS:
        prepared = ws.prepared(attended)
        is_float = wo.qtype.name in FLOAT_TYPES
        ws.products.product(wo, attended if is_float or prepared is None else prepared, x, add=True)
    else:
        ws.gemm.product(wo, ws.gemm.to_halves(attended), x, add=True)


def router(ws: Workspace, x: Array, norm: Array, eps: float, gate: QTensor, h: Array, logits: Array) -> None:
    """The normed residual h [T, D] and the router's logits [T, E]; gate [E, D] of a float type."""
    if x.shape[0] <= SMALL_TOKENS:
        ws.prepare(h, ws.products.router(x, norm, eps, gate, h, logits))
    else:
        ws.prepare(h, ws.gemm.norm_to_halves(x, norm, eps, h))
        ws.gemm.float_product(gate, h, logits)


def route(
    ws: Workspace,
    logits: Array,
    renormalize: bool,
    state: policy.SlotState,
    layer: int,
    counted: Array,
    rule: policy.Rule,
    experts: Array,
    weights: Array,
    fetches: Fetches,
) -> None:
    """Choose experts and weights for each row, and let the slots of `layer` follow (docs/residency.md).

    Shapes as in `reference.route`.
    """
    T, r, s = logits.shape[0], ws.routing, ws.streaming
    imposed = None if ws.replay is None or T > 1 else ws.replay.imposed[layer]
    if T <= SMALL_TOKENS or s is None:
        r.route(
            logits, renormalize, state, layer, counted, rule, experts, weights, fetches, ws.active_step, imposed
        )  # fmt: skip
        return
    s.layer = layer
    r.choose(logits, renormalize, experts, weights)
    if s.ahead:
        if s.newest == layer:
            ws.device.wait(None, s.stream)
    else:
        ws.device.wait(None, s.stream)  # only a step that failed half-way can have left copies under way
        s.staging.gather(state, layer, s.banks[layer], layer % 2, experts)
    r.advance(experts, counted, state, layer, rule, fetches)


def expert_ffn(
    ws: Workspace, h: Array, experts: Array, weights: Array, bank: Experts, fetches: Fetches, x: Array
) -> None:
    """x [T, D] += the weighted sum of each row's experts, folded in rank order; to be called right after `route`.

    h [T, D] the normed residual; experts int32, weights float32 [T, A].
    """
    r, s, prepared = ws.routing, ws.streaming, ws.prepared(h)
    if h.shape[0] <= SMALL_TOKENS:
        if bank.poison and s is not None:
            s.staging.poison(fetches, bank)
        values = h
        if bank.gate_type.name not in FLOAT_TYPES:
            values = ws.products.quantize(h) if prepared is None else prepared
        ws.small_experts(values, experts, weights, bank, r.active, r.n_active, r.pairs, x)
        return
    halves = ws.gemm.to_halves(h) if prepared is None else prepared
    source = r.source if s is None else s.staging.source[s.layer % 2]
    ws.gemm.experts(halves, experts, weights, bank, source, x)
    if s is not None:
        if bank.poison:
            s.staging.poison(fetches, bank)
        s.staging.fill(fetches, bank, source)


def head(ws: Workspace, x: Array, rows: Array, norm: Array, eps: float, output: QTensor, logits: Array) -> None:
    """Final norm and output matrix for the chosen rows: logits [len(rows), V]."""
    if not rows.shape[0]:
        return
    if rows.shape[0] <= SMALL_TOKENS:
        ws.products.head(x, rows, norm, eps, output, logits)
    else:
        ws.gemm.head(x, rows, norm, eps, output, logits)
