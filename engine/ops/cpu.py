"""The CPU backend: the kernels of `cpu/`, called through ctypes with the signatures of `reference`.

The kernels compute the bits of docs/arithmetic.md on every instruction set. What crosses the border is
checked here (types, shapes, contiguity) or there (indices inside arrays), never twice. A call costs a few
microseconds: addresses of weights, caches and expert banks are looked up once and kept by the workspace.
"""

from __future__ import annotations

import math
from ctypes import addressof, c_int64
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import policy, quants
from engine.errors import CapacityError, SparkError
from engine.ops import F32, I32, KV_BLOCK_TOKENS, U8, Experts, Fetches, KVLayer, Limits
from engine.ops.cpu_library import ISAS, ExpertsRecord, KVRecord, LimitsRecord, MatrixRecord, SlotsRecord, load
from engine.quants import QTensor

MAX_HEAD_DIM = 512

_FLOAT32 = np.dtype(np.float32)
_FLOAT16 = np.dtype(np.float16)
_INT8 = np.dtype(np.int8)
_UINT8 = np.dtype(np.uint8)
_INT32 = np.dtype(np.int32)
_INT64 = np.dtype(np.int64)
_UINT64 = np.dtype(np.uint64)


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that this machine and this build of the kernels have, best last."""
    return ISAS[: int(load().spark_best_isa()) + 1]


# --- what crosses the border ----------------------------------------------------------------------


def _address(array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> int:
    """Address of an array, after checking what it is; ValueError otherwise."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        order = "contiguous" if array.flags.c_contiguous else "strided"
        raise ValueError(f"{name}: expected contiguous {dtype} {shape}, got {order} {array.dtype} {array.shape}")
    return int(array.__array_interface__["data"][0])


def _input(ws: Workspace, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> int:
    """Address of an array that a kernel reads, checked; one that was seen before is not checked again."""
    seen = ws.arrays.get(id(array))
    if seen is not None and seen[1] is dtype and seen[2] == shape:
        return seen[3]
    address = _address(array, dtype, shape, name)
    if array.flags.writeable:
        ws.remember_array(array, dtype, shape, address)
    return address


def _output(ws: Workspace, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> int:
    """The same for an array that a kernel writes."""
    seen = ws.arrays.get(id(array))  # only writeable arrays are remembered
    if seen is not None and seen[1] is dtype and seen[2] == shape:
        return seen[3]
    if not array.flags.writeable:
        raise ValueError(f"{name}: the array is read-only")
    address = _address(array, dtype, shape, name)
    ws.remember_array(array, dtype, shape, address)
    return address


def _check(result: int, what: str) -> None:
    if result:
        raise IndexError(f"{what}: an index lies outside its table")


class Workspace:
    """Scratch memory and threads for steps within `limits`; one caller at a time, `close` when done.

    limits: as given. threads: the caller's among them. isa: the instruction set in use, of ISAS.
    """

    def __init__(self, limits: Limits, threads: int, isa: str | None = None) -> None:
        if threads < 1:
            raise ValueError(f"threads: expected at least 1, got {threads}")
        supported = supported_isas()
        self.isa = supported[-1] if isa is None else isa
        if self.isa not in supported:
            raise SparkError(
                f"instruction set {self.isa!r} is not available here", hint=f"one of {', '.join(supported)}"
            )
        self.limits = limits
        self.threads = threads
        self.widest = max(limits.n_embd, limits.n_head_dim, limits.n_ff)
        self.kernels = load()
        sizes = LimitsRecord(*(getattr(limits, name) for name in Limits.__dataclass_fields__))
        self.handle = self.kernels.spark_workspace_create(addressof(sizes), threads, ISAS.index(self.isa))
        if not self.handle:
            raise CapacityError(
                f"no memory or threads for steps of {limits.max_tokens} tokens on {threads} threads",
                hint="use a smaller --chunk or fewer --threads",
            )
        # By identity, what was seen before and what the kernels get of it. The object is kept, so that it
        # lives as long as its address is known; an array's memory cannot move while it is held.
        self._seen: dict[int, tuple[Any, Any, int]] = {}
        self.arrays: dict[int, tuple[NDArray[Any], np.dtype[Any], tuple[int, ...], int]] = {}

    def close(self) -> None:
        """Stop the threads and release the memory; a second call does nothing."""
        if self.handle:
            self.kernels.spark_workspace_destroy(self.handle)
            self.handle = None
            self._seen.clear()
            self.arrays.clear()

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.close()

    def remember_array(self, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...], address: int) -> None:
        """Keep the address of a writeable array that passed its checks."""
        if len(self.arrays) >= 1 << 10:  # mostly views of steps gone by
            self.arrays.clear()
        self.arrays[id(array)] = (array, dtype, shape, address)

    def _remember(self, record: Any, structure: Any) -> int:
        if len(self._seen) >= 1 << 14:  # a caller that makes new records all the time
            self._seen.clear()
        address = addressof(structure)
        self._seen[id(record)] = (record, structure, address)
        return address

    def matrix(self, w: QTensor, rows: int, cols: int) -> int:
        """Address of the kernels' record of a weight matrix [rows, cols]."""
        if w.shape != (rows, cols):
            raise ValueError(f"{w.name}: expected a matrix {(rows, cols)}, got {w.shape}")
        seen = self._seen.get(id(w))
        if seen is not None:
            return seen[2]
        quants.require_native(w)
        return self._remember(w, MatrixRecord(w.data.ctypes.data, rows, cols, int(w.qtype)))

    def cache(self, kv: KVLayer) -> tuple[int, int, int]:
        """Address of the record of a layer's cache, its heads and their dimension."""
        if id(kv) not in self._seen:
            self._remember(kv, _cache_record(kv))
        _, record, address = self._seen[id(kv)]
        return address, record.n_head_kv, record.head_dim

    def experts(self, bank: Experts) -> int:
        """Address of the record of a layer's experts."""
        seen = self._seen.get(id(bank))
        return seen[2] if seen is not None else self._remember(bank, _expert_record(bank))

    def slots(self, state: policy.SlotState) -> int:
        """Address of the record of the residency state; its arrays may have been replaced since."""
        arrays = (
            state.slot_begin, state.slot_of, state.expert_of, state.score, state.pinned, state.clock, state.counts,
            state.hits, state.misses, state.expert_ptr, state.home_ptr, state.slot_ptr,
        )  # fmt: skip
        seen = self._seen.get(id(state))
        if seen is not None and all(map(is_, seen[0][1], arrays)):
            return seen[2]
        address = self._remember(state, structure := _slots_record(state))
        self._seen[id(state)] = ((state, arrays), structure, address)
        return address


def _cache_record(kv: KVLayer) -> KVRecord:
    n_slots, n_head_kv, head_dim = kv.k.shape
    if not 0 < head_dim <= MAX_HEAD_DIM or n_slots % KV_BLOCK_TOKENS:
        raise ValueError(
            f"kv: expected blocks of {KV_BLOCK_TOKENS} slots and heads of at most {MAX_HEAD_DIM}, got {kv.k.shape}"
        )
    shape = (n_slots, n_head_kv, head_dim)
    if kv.k_scale is None or kv.v_scale is None:
        return KVRecord(_address(kv.k, _FLOAT16, shape, "kv.k"), _address(kv.v, _FLOAT16, shape, "kv.v"), 0, 0, *shape)
    scales = (n_slots, n_head_kv, head_dim // 32)
    if head_dim % 32:
        raise ValueError(f"kv: q8_0 takes heads of whole blocks of 32, got {head_dim}")
    return KVRecord(
        _address(kv.k, _INT8, shape, "kv.k"),
        _address(kv.v, _INT8, shape, "kv.v"),
        _address(kv.k_scale, _FLOAT16, scales, "kv.k_scale"),
        _address(kv.v_scale, _FLOAT16, scales, "kv.v_scale"),
        *shape,
    )


def _expert_record(bank: Experts) -> ExpertsRecord:
    E, N = len(bank.expert_ptr), len(bank.slot_ptr)
    types = (bank.gate_type, bank.up_type, bank.down_type)
    rows = (bank.n_ff, bank.n_ff, bank.n_embd)
    cols = (bank.n_embd, bank.n_embd, bank.n_ff)
    for qtype, n, k, size in zip(types, rows, cols, bank.part_bytes, strict=True):
        if qtype not in quants.NATIVE_TYPES or n * quants.row_bytes(qtype, k, "experts") != size:
            raise ValueError(f"experts: {size} bytes are not a matrix {(n, k)} of a native type, {qtype.name}")
    return ExpertsRecord(
        (c_int64 * 3)(*types),
        (c_int64 * 3)(*bank.part_bytes),
        bank.n_embd,
        bank.n_ff,
        E,
        N,
        _address(bank.expert_ptr, _UINT64, (E, 3), "expert_ptr"),
        _address(bank.home_ptr, _UINT64, (E, 3), "home_ptr"),
        _address(bank.slot_ptr, _UINT64, (N, 3), "slot_ptr"),
        int(bank.poison),
    )


def _slots_record(state: policy.SlotState) -> SlotsRecord:
    (L, E), N = state.slot_of.shape, len(state.expert_of)
    return SlotsRecord(
        _address(state.slot_begin, _INT32, (L + 1,), "slot_begin"),
        _address(state.slot_of, _INT32, (L, E), "slot_of"),
        _address(state.expert_of, _INT32, (N,), "expert_of"),
        _address(state.score, _INT64, (N,), "score"),
        _address(state.pinned, _UINT8, (N,), "pinned"),
        _address(state.clock, _INT64, (L,), "clock"),
        _address(state.counts, _INT64, (L, E), "counts"),
        _address(state.hits, _INT64, (L,), "hits"),
        _address(state.misses, _INT64, (L,), "misses"),
        _address(state.expert_ptr, _UINT64, (L, E, 3), "expert_ptr"),
        _address(state.home_ptr, _UINT64, (L, E, 3), "home_ptr"),
        _address(state.slot_ptr, _UINT64, (N, 3), "slot_ptr"),
        L,
        E,
    )


def workspace(limits: Limits, threads: int, isa: str | None = None) -> Workspace:
    """Scratch memory and threads for steps within `limits`; `isa` forces an instruction set (tests)."""
    return Workspace(limits, threads, isa)


def _rows(ws: Workspace, array: NDArray[Any], name: str) -> int:
    """T of a step's array, checked against the limits."""
    rows = len(array)
    if rows > ws.limits.max_tokens:
        raise ValueError(f"{name}: {rows} rows, the workspace was made for {ws.limits.max_tokens}")
    return rows


def _within(value: int, limit: int, name: str) -> None:
    if value > limit:
        raise ValueError(f"{name}: {value}, the workspace was made for {limit}")


# --- ops ------------------------------------------------------------------------------------------


def product(ws: Workspace, w: QTensor, x: F32, y: F32) -> None:
    """y [T, N] = rows of `w` [N, K] against activation rows `x` [T, K] (for tests and benchmarks)."""
    T, (N, K) = _rows(ws, x, "x"), w.shape
    _within(K, ws.widest, f"columns of {w.name}")
    ws.kernels.spark_product(
        ws.handle, ws.matrix(w, N, K), _input(ws, x, _FLOAT32, (T, K), "x"), T, _output(ws, y, _FLOAT32, (T, N), "y")
    )


def embed(ws: Workspace, table: QTensor, tokens: I32, x: F32) -> None:
    """Rows of the embedding table: x [T, D] = table[tokens]; table [V, D] of any native type."""
    T, (V, D) = _rows(ws, tokens, "tokens"), table.shape
    result = ws.kernels.spark_embed(
        ws.handle,
        ws.matrix(table, V, D),
        _input(ws, tokens, _INT32, (T,), "tokens"),
        T,
        _output(ws, x, _FLOAT32, (T, D), "x"),
    )
    _check(result, "tokens")


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

    Shapes as in `reference.attention_input`.
    """
    T, D = _rows(ws, x, "x"), x.shape[1]
    record, n_head_kv, head_dim = ws.cache(kv)
    n_head = q.shape[1]
    n_positions, _, half = rope.shape
    _within(D, ws.widest, "columns of x")
    _within(max(n_head, n_head_kv) * head_dim, ws.limits.n_head_dim, "heads")
    _within(2 * half, head_dim, "rotated dimensions")
    result = ws.kernels.spark_attention_input(
        ws.handle,
        _input(ws, x, _FLOAT32, (T, D), "x"),
        T,
        _input(ws, norm, _FLOAT32, (D,), "norm"),
        eps,
        ws.matrix(wq, n_head * head_dim, D),
        ws.matrix(wk, n_head_kv * head_dim, D),
        ws.matrix(wv, n_head_kv * head_dim, D),
        None if q_norm is None else _input(ws, q_norm, _FLOAT32, (head_dim,), "q_norm"),
        None if k_norm is None else _input(ws, k_norm, _FLOAT32, (head_dim,), "k_norm"),
        _input(ws, rope, _FLOAT32, (n_positions, 2, half), "rope"),
        n_positions,
        2 * half,
        _input(ws, positions, _INT32, (T,), "positions"),
        record,
        _input(ws, slots, _INT32, (T,), "slots"),
        _output(ws, q, _FLOAT32, (T, n_head, head_dim), "q"),
    )
    _check(result, "positions or slots")


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
    """Causal attention over cached blocks, in logical order; shapes as in `reference.attention`."""
    T, n_head = _rows(ws, q, "q"), q.shape[1]
    record, n_head_kv, head_dim = ws.cache(kv)
    if n_head % n_head_kv:
        raise ValueError(f"q: {n_head} heads cannot share {n_head_kv} KV heads evenly")
    _within(n_head * head_dim, ws.limits.n_head_dim, "heads")
    n_sequence, max_blocks = block_table.shape
    result = ws.kernels.spark_attention(
        ws.handle,
        _input(ws, q, _FLOAT32, (T, n_head, head_dim), "q"),
        T,
        n_head,
        record,
        _input(ws, block_table, _INT32, (n_sequence, max_blocks), "block_table"),
        n_sequence,
        max_blocks,
        _input(ws, sequence, _INT32, (T,), "sequence"),
        _input(ws, positions, _INT32, (T,), "positions"),
        scale,
        _output(ws, out, _FLOAT32, (T, n_head * head_dim), "out"),
    )
    _check(result, "sequence, positions or block_table")


def copy(ws: Workspace, x: F32, to: F32) -> None:
    """The array `to` becomes equal to x, of any shape."""
    to[...] = x


def fetch_ahead(ws: Workspace, state: policy.SlotState, layer: int, bank: Experts, n_tokens: int) -> None:
    """A hint that `layer` comes soon in a step of n_tokens; here nothing can be had ahead of time."""


def attention_output(ws: Workspace, attended: F32, wo: QTensor, x: F32) -> None:
    """x [T, D] += wo [D, H * head_dim] @ attended [T, H * head_dim]."""
    T, (D, K) = _rows(ws, attended, "attended"), wo.shape
    _within(max(D, K), ws.widest, f"dimensions of {wo.name}")
    ws.kernels.spark_attention_output(
        ws.handle,
        _input(ws, attended, _FLOAT32, (T, K), "attended"),
        T,
        ws.matrix(wo, D, K),
        _output(ws, x, _FLOAT32, (T, D), "x"),
    )


def router(ws: Workspace, x: F32, norm: F32, eps: float, gate: QTensor, h: F32, logits: F32) -> None:
    """The normed residual h [T, D] and the router's logits [T, E]; gate [E, D] of a float type."""
    T, (E, D) = _rows(ws, x, "x"), gate.shape
    if gate.qtype not in (0, 1, 30):  # F32, F16, BF16
        raise ValueError(f"{gate.name}: a router is F32, F16 or BF16, not {gate.qtype.name}")
    ws.kernels.spark_router(
        ws.handle,
        _input(ws, x, _FLOAT32, (T, D), "x"),
        T,
        _input(ws, norm, _FLOAT32, (D,), "norm"),
        eps,
        ws.matrix(gate, E, D),
        _output(ws, h, _FLOAT32, (T, D), "h"),
        _output(ws, logits, _FLOAT32, (T, E), "logits"),
    )


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

    Shapes as in `reference.route`.
    """
    T, A = _rows(ws, logits, "logits"), experts.shape[1]
    L, E = state.slot_of.shape
    _within(E, ws.limits.n_expert, "experts")
    _within(A, min(E, ws.limits.n_expert_used), "active experts")
    if not 0 <= layer < L:
        raise ValueError(f"layer: {layer} of {L}")
    ws.kernels.spark_route(
        ws.handle,
        _input(ws, logits, _FLOAT32, (T, E), "logits"),
        T,
        A,
        renormalize,
        ws.slots(state),
        layer,
        _input(ws, counted, _UINT8, (T,), "counted"),
        rule.gain,
        rule.cap,
        _output(ws, experts, _INT32, (T, A), "experts"),
        _output(ws, weights, _FLOAT32, (T, A), "weights"),
        _output(ws, fetches.rows, _INT32, (E, 3), "fetches.rows"),
        _output(ws, fetches.count, _INT32, (1,), "fetches.count"),
    )


def expert_ffn(ws: Workspace, h: F32, experts: I32, weights: F32, bank: Experts, fetches: Fetches, x: F32) -> None:
    """x [T, D] += the weighted sum of each row's experts, folded in rank order.

    h [T, D] the normed residual; experts int32, weights float32 [T, A]. Performs `fetches` first, then
    reads every expert through `bank.expert_ptr`.
    """
    T, A = _rows(ws, h, "h"), experts.shape[1]
    D, E = bank.n_embd, len(bank.expert_ptr)
    _within(E, ws.limits.n_expert, "experts")
    _within(A, ws.limits.n_expert_used, "active experts")
    _within(D, ws.limits.n_embd, "columns of h")
    _within(bank.n_ff, ws.limits.n_ff, "rows of an expert")
    result = ws.kernels.spark_expert_ffn(
        ws.handle,
        _input(ws, h, _FLOAT32, (T, D), "h"),
        T,
        A,
        _input(ws, experts, _INT32, (T, A), "experts"),
        _input(ws, weights, _FLOAT32, (T, A), "weights"),
        ws.experts(bank),
        _input(ws, fetches.rows, _INT32, fetches.rows.shape, "fetches.rows"),
        _input(ws, fetches.count, _INT32, (1,), "fetches.count"),
        _output(ws, x, _FLOAT32, (T, D), "x"),
    )
    _check(result, "experts or fetches")


def head(ws: Workspace, x: F32, rows: I32, norm: F32, eps: float, output: QTensor, logits: F32) -> None:
    """Final norm and output matrix for the chosen rows: logits [len(rows), V]."""
    T, n, (V, D) = _rows(ws, x, "x"), _rows(ws, rows, "rows"), output.shape
    _within(D, ws.widest, "columns of x")
    result = ws.kernels.spark_head(
        ws.handle,
        _input(ws, x, _FLOAT32, (T, D), "x"),
        T,
        _input(ws, rows, _INT32, (n,), "rows"),
        n,
        _input(ws, norm, _FLOAT32, (D,), "norm"),
        eps,
        ws.matrix(output, V, D),
        _output(ws, logits, _FLOAT32, (n, V), "logits"),
    )
    _check(result, "rows")


# --- for tests and benchmarks ---------------------------------------------------------------------


def exp(ws: Workspace, x: F32) -> F32:
    """The kernels' exponential of a 1-D array."""
    y = np.empty_like(x)
    ws.kernels.spark_exp(
        ws.handle, _input(ws, x, _FLOAT32, (len(x),), "x"), len(x), _output(ws, y, _FLOAT32, (len(x),), "y")
    )
    return y


def read_bytes(ws: Workspace, data: U8) -> int:
    """Read memory once on all threads, summing it as 64-bit words: the floor of every product."""
    n = math.prod(data.shape)
    return int(ws.kernels.spark_read(ws.handle, _input(ws, data, _UINT8, (n,), "data"), n))
