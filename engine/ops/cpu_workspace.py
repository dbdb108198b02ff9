"""What crosses the border to the CPU kernels: the workspace, checked addresses, records in the C header's layout.

Types, shapes and contiguity are checked here, once; indices inside arrays there. Addresses of weights, caches and
expert banks are looked up once and kept by the workspace.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, c_int64
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.formats import block_types, quants
from engine.formats.quants import QTensor
from engine.ground.cpu_library import (
    BAD_TYPE,
    ISAS,
    LIMITS,
    DeltaRecord,
    ExpertsRecord,
    GatingRecord,
    KVRecord,
    LimitsRecord,
    MatrixRecord,
    SlotsRecord,
    load,
)
from engine.ground.errors import CapacityError, SparkError, UnsupportedModelError
from engine.ground.kv_types import KINDS
from engine.ops import KV_BLOCK_TOKENS, DeltaLayer, Experts, Gating, KVLayer, Limits
from engine.ops.cpu_repeat import Noted, Noting
from engine.placing import policy

MAX_HEAD_DIM = 512
MAX_RECORDS = 1 << 14  # of a kind that are known: some callers make new ones all the time
MAX_TAPS = 16  # of a convolution
GATE_KINDS = ("softplus", "sigmoid")  # by their numbers in the header
ACTIVATIONS = ("silu", "gelu")
GATINGS = ("softmax", "sigmoid")
_REINSTALL = "run `make setup` in Spark's source tree, or reinstall spark-moe"

KIND_NUMBER = {name: i for i, name in enumerate(KINDS)}  # in cpu/spark_cpu.h
FLOAT32 = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
INT8 = np.dtype(np.int8)
UINT8 = np.dtype(np.uint8)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
UINT64 = np.dtype(np.uint64)


@functools.cache
def kernels() -> ctypes.CDLL:
    """The library; a SparkError where it was built with other block types than this program knows."""
    library = load()
    differing = set(library.spark_block_types().decode().splitlines()) ^ {str(t) for t in block_types.RECORDS.values()}
    if differing:
        names = ", ".join(sorted({line.partition(",")[0] for line in differing}))
        raise SparkError(f"{library._name} was built with other block types; they differ in {names}", hint=_REINSTALL)
    return library


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that this machine and this build of the kernels have, best last."""
    return ISAS[: int(kernels().spark_best_isa()) + 1]


def address_of(array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> int:
    """Address of an array, after checking what it is; ValueError otherwise."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        order = "contiguous" if array.flags.c_contiguous else "strided"
        raise ValueError(f"{name}: expected contiguous {dtype} {shape}, got {order} {array.dtype} {array.shape}")
    return int(array.__array_interface__["data"][0])


def input_of(ws: Workspace, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> int:
    """Address of an array that a kernel reads, checked; one that was seen before is not checked again."""
    seen = ws.arrays.get(id(array))
    if seen is not None and seen[1] is dtype and seen[2] == shape:
        return seen[3]
    address = address_of(array, dtype, shape, name)
    if array.flags.writeable:
        ws.remember_array(array, dtype, shape, address)
    return address


def output_of(ws: Workspace, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> int:
    """The same for an array that a kernel writes."""
    seen = ws.arrays.get(id(array))  # only writeable arrays are remembered
    if seen is not None and seen[1] is dtype and seen[2] == shape:
        return seen[3]
    if not array.flags.writeable:
        raise ValueError(f"{name}: the array is read-only")
    address = address_of(array, dtype, shape, name)
    ws.remember_array(array, dtype, shape, address)
    return address


def check(result: int, what: str) -> None:
    """Raise what a kernel refused: IndexError, or UnsupportedModelError for a type without kernels."""
    if result == BAD_TYPE:
        raise UnsupportedModelError(f"{what}: a matrix of the call has a type without kernels")
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
        self.widest = max(limits.n_embd, limits.n_head_dim, limits.n_ff, limits.n_z)
        self.kernels: Any = kernels()
        sizes = LimitsRecord(*(getattr(limits, name) for name in LIMITS))
        self.handle = self.kernels.spark_workspace_create(addressof(sizes), threads, ISAS.index(self.isa))
        if not self.handle:
            raise CapacityError(
                f"no memory or threads for steps of {limits.max_tokens} tokens on {threads} threads",
                hint="use a smaller --chunk or fewer --threads",
            )
        # By identity, what was seen before and what the kernels get of it. The object is kept, so that it
        # lives as long as its address is known; an array's memory cannot move while it is held.
        self._seen: dict[int, tuple[object, Structure, int]] = {}
        self._caches: dict[int, tuple[KVLayer, KVRecord, int]] = {}
        self._states: dict[int, tuple[policy.SlotState, tuple[NDArray[Any], ...], SlotsRecord, int]] = {}
        self.arrays: dict[int, tuple[NDArray[Any], np.dtype[Any], tuple[int, ...], int]] = {}
        self.version = 0  # how often something was forgotten, whose address a kernel may have got

    def close(self) -> None:
        """Stop the threads and release the memory; a second call does nothing."""
        if self.handle:
            self.kernels.spark_workspace_destroy(self.handle)
            self.handle = None
            for known in (self._seen, self._caches, self._states, self.arrays):
                known.clear()

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.close()

    def remember_array(self, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...], address: int) -> None:
        """Keep the address of a writeable array that passed its checks."""
        if len(self.arrays) >= 1 << 10:  # mostly views of steps gone by
            self._forget(self.arrays)
        self.arrays[id(array)] = (array, dtype, shape, address)

    def _forget(self, known: dict[int, Any]) -> None:
        known.clear()
        self.version += 1

    def feed(self, pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> None:
        """Copy the second array of each pair into the first."""
        for array, host in pairs:
            array[...] = host

    def repeat(self, noted: Noted | None, work: Callable[[], None]) -> Noted | None:
        """Run `work`, ops of this workspace alone, or the calls that were noted of it, if they can be made again.

        Returns what to give the next time that nothing is different but the contents of arrays.
        """
        if noted is not None and noted.version == self.version:
            check(*noted.run(self.kernels, self.handle))
            return noted
        noting, before = Noting(self.kernels), self.version
        self.kernels = noting
        try:
            work()
        finally:
            self.kernels = kernels()
        return Noted(self.kernels, noting.calls, before) if self.version == before else None

    def _remember(self, record: object, structure: Structure) -> int:
        if len(self._seen) >= MAX_RECORDS:
            self._forget(self._seen)
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
        return self._remember(w, MatrixRecord(w.data.ctypes.data, rows, cols, int(w.qtype), w.scale))

    def cache(self, kv: KVLayer) -> tuple[int, int, int]:
        """Address of the record of a layer's cache, its heads and their dimension."""
        seen = self._caches.get(id(kv))
        if seen is None:
            if len(self._caches) >= MAX_RECORDS:
                self._forget(self._caches)
            record = _cache_record(kv)
            seen = self._caches[id(kv)] = (kv, record, addressof(record))
        return seen[2], seen[1].n_head_kv, seen[1].head_dim

    def experts(self, bank: Experts) -> int:
        """Address of the record of a layer's experts."""
        seen = self._seen.get(id(bank))
        return seen[2] if seen is not None else self._remember(bank, _expert_record(bank))

    def gating(self, gating: Gating, n_expert: int) -> int:
        """Address of the record of a router's rule."""
        for array in (gating.bias, gating.expert_scale):
            if array is not None and array.shape != (n_expert,):
                raise ValueError(f"gating: an array of shape {array.shape} for {n_expert} experts")
        seen = self._seen.get(id(gating))
        return seen[2] if seen is not None else self._remember(gating, _gating_record(gating))

    def delta(self, layer: DeltaLayer) -> int:
        """Address of the record of a layer's recurrent state."""
        seen = self._seen.get(id(layer))
        return seen[2] if seen is not None else self._remember(layer, _delta_record(layer))

    def slots(self, state: policy.SlotState) -> int:
        """Address of the record of the residency state; its arrays may have been replaced since."""
        arrays = (
            state.slot_begin, state.slot_of, state.expert_of, state.heat, state.pinned, state.clock, state.counts,
            state.hits, state.misses, state.expert_ptr, state.home_ptr, state.slot_ptr,
        )  # fmt: skip
        seen = self._states.get(id(state))
        if seen is None or not all(map(is_, seen[1], arrays)):
            if len(self._states) >= MAX_RECORDS or seen is not None:
                self._forget(self._states)
            record = _slots_record(state)
            seen = self._states[id(state)] = (state, arrays, record, addressof(record))
        return seen[3]


def _cache_record(kv: KVLayer) -> KVRecord:
    (n_slots, n_head_kv, _), head_dim, kinds = kv.k.shape, kv.head_dim, kv.kinds
    if not 0 < head_dim <= MAX_HEAD_DIM or n_slots % KV_BLOCK_TOKENS:
        raise ValueError(
            f"kv: expected blocks of {KV_BLOCK_TOKENS} slots and heads of at most {MAX_HEAD_DIM}, got {kv.k.shape}"
        )
    arrays: list[int] = []
    scales: list[int | None] = []
    for name, kind, array, scale in zip("kv", kinds, (kv.k, kv.v), (kv.k_scale, kv.v_scale), strict=True):
        if not kind.fits(head_dim):
            raise ValueError(f"kv: {kind.name} takes heads of whole blocks of {kind.block}, got {head_dim}")
        shape = (n_slots, n_head_kv, kind.n_elements(head_dim))
        arrays.append(address_of(array, np.dtype(kind.dtype), shape, f"kv.{name}"))
        if (scale is not None) != bool(kind.block):
            raise ValueError(f"kv: {kind.name} {'has' if kind.block else 'has no'} scales")
        shape = (n_slots, n_head_kv, kind.n_scales(head_dim))
        scales.append(None if scale is None else address_of(scale, FLOAT16, shape, f"kv.{name}_scale"))
    return KVRecord(*arrays, *scales, n_slots, n_head_kv, head_dim, *(KIND_NUMBER[kind.name] for kind in kinds))


def _expert_record(bank: Experts) -> ExpertsRecord:
    E, N = len(bank.expert_ptr), len(bank.slot_ptr)
    types = (bank.gate_type, bank.up_type, bank.down_type)
    rows = (bank.n_ff, bank.n_ff, bank.n_embd)
    cols = (bank.n_embd, bank.n_embd, bank.n_ff)
    for qtype, n, k, size in zip(types, rows, cols, bank.part_bytes, strict=True):
        block_types.record(qtype, "experts")
        if n * quants.row_bytes(qtype, k, "experts") != size:
            raise ValueError(f"experts: {size} bytes are not a matrix {(n, k)} of type {qtype.name}")
    return ExpertsRecord(
        (c_int64 * 3)(*types),
        (c_int64 * 3)(*bank.part_bytes),
        bank.n_embd,
        bank.n_ff,
        E,
        N,
        address_of(bank.expert_ptr, UINT64, (E, 3), "expert_ptr"),
        address_of(bank.home_ptr, UINT64, (E, 3), "home_ptr"),
        address_of(bank.slot_ptr, UINT64, (N, 3), "slot_ptr"),
        int(bank.poison),
        ACTIVATIONS.index(bank.activation),
        None if bank.gate_scale is None else address_of(bank.gate_scale, FLOAT32, (E,), "gate_scale"),
    )


def _gating_record(gating: Gating) -> GatingRecord:
    bias, expert_scale = (
        None if array is None else address_of(array, FLOAT32, array.shape, "gating")
        for array in (gating.bias, gating.expert_scale)
    )
    return GatingRecord(GATINGS.index(gating.kind), int(gating.renormalize), bias, expert_scale, gating.scale)


def _delta_record(layer: DeltaLayer) -> DeltaRecord:
    (n_states, kept, n_mixed), (_, n_head_v, d_v, d_k) = layer.conv.shape, layer.state.shape
    return DeltaRecord(
        address_of(layer.conv, FLOAT32, (n_states, kept, n_mixed), "layer.conv"),
        address_of(layer.state, FLOAT32, (n_states, n_head_v, d_v, d_k), "layer.state"),
        n_states,
        kept + 1,
        n_mixed,
        n_head_v,
        d_v,
        d_k,
    )


def _slots_record(state: policy.SlotState) -> SlotsRecord:
    (L, E), N = state.slot_of.shape, len(state.expert_of)
    return SlotsRecord(
        address_of(state.slot_begin, INT32, (L + 1,), "slot_begin"),
        address_of(state.slot_of, INT32, (L, E), "slot_of"),
        address_of(state.expert_of, INT32, (N,), "expert_of"),
        address_of(state.heat, INT64, (L, E), "heat"),
        address_of(state.pinned, UINT8, (N,), "pinned"),
        address_of(state.clock, INT64, (L,), "clock"),
        address_of(state.counts, INT64, (L, E), "counts"),
        address_of(state.hits, INT64, (L,), "hits"),
        address_of(state.misses, INT64, (L,), "misses"),
        address_of(state.expert_ptr, UINT64, (L, E, 3), "expert_ptr"),
        address_of(state.home_ptr, UINT64, (L, E, 3), "home_ptr"),
        address_of(state.slot_ptr, UINT64, (N, 3), "slot_ptr"),
        L,
        E,
    )
