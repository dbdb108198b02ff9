"""The CUDA ops over NumPy arrays, so that one table of cases runs on every backend.

Every array of a call goes to the device and every array comes back. An expert bank's memory is rebuilt there: slots
in device memory, homes in page-locked memory, pointers translated both ways.
"""

from __future__ import annotations

import ctypes
from dataclasses import fields, replace
from typing import Any

import numpy as np

from engine.formats.block_types import FLOAT_TYPES
from engine.formats.quants import QTensor
from engine.ops import (
    SMALL_TOKENS,
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
)
from engine.ops.cuda import ops
from engine.placing.policy import SlotState

RECORDS = (AttentionInput, DeltaInput, KVLayer, DeltaLayer, Fetches, Gating, SharedExpert, SlotState, Recall)


class DeviceOps:
    """`ops.f(ws, ...)` as on a host backend, computed by `device`."""

    def __init__(self, device: Any, limits: Limits) -> None:
        self.device = device
        self.limits = limits
        self.ws = ops.workspace(limits, device)

    def __getattr__(self, name: str) -> Any:
        def call(_: Any, *arguments: Any, **named: Any) -> None:
            moved = [self._to(a) for a in arguments]
            more = {key: self._to(a) for key, a in named.items()}
            getattr(ops, name)(self.ws, *moved, **more)
            self.device.synchronize()
            for argument, there in zip((*arguments, *named.values()), (*moved, *more.values()), strict=True):
                self._back(argument, there)

        return call

    def attention(
        self, _: Any, q: Any, kv: Any, table: Any, sequence: Any, positions: Any, scale: Any, out: Any, *more: Any,
        recall: Any = None,
    ) -> None:  # fmt: skip
        """As the op; the largest position is what the host knows of a long step."""
        there = [self._to(a) for a in (q, kv, table, sequence, positions)]
        result = self.device.upload(out)
        n_positions, *more = more or (0,)
        n_positions = int(positions.max()) + 1
        read = self._to(recall)
        ops.attention(self.ws, *there, float(scale), result, n_positions, *(self._to(a) for a in more), recall=read)
        out[...] = self.device.read(result)
        if recall is not None:
            self._back(recall, read)

    def product(self, w: QTensor, x: np.ndarray) -> np.ndarray:
        """y [T, N] = x w^T by the kernels that a step of len(x) tokens uses."""
        y = self.device.upload(np.full((len(x), w.shape[0]), np.nan, np.float32))
        there, values = self._to(w), self.device.upload(x)
        if len(x) > SMALL_TOKENS:
            self.ws.gemm.product(there, self.ws.gemm.to_halves(values), y)
        else:
            is_float = w.qtype in FLOAT_TYPES
            self.ws.products.product(there, values if is_float else self.ws.products.quantize(values), y)
        return self.device.read(y)

    def expert_ffn(
        self, _: Any, h: Any, experts: Any, weights: Any, bank: Experts, fetches: Fetches, x: Any, add: bool,
        shared: Any,
    ) -> None:  # fmt: skip
        """As the op, after the tables that `route` would have left behind for these experts and fetches."""
        there, memory = self._bank(bank)
        T, r = len(h), self.ws.routing
        home, slot = (self.device.read(a) for a in (there.home_ptr, there.slot_ptr))
        entering = {int(e): int(s) for e, s, _ in fetches.rows[: int(fetches.count[0])]}
        resident = {
            e: slot[int(np.flatnonzero((bank.slot_ptr == bank.expert_ptr[e]).all(1))[0])]
            for e in range(len(home))
            if e not in entering and (bank.expert_ptr[e] != bank.home_ptr[e]).any()
        }
        where = np.array([resident.get(e, home[e]) for e in range(len(home))], np.uint64)
        if T > SMALL_TOKENS:
            self.device.write(r.source, where)
        else:
            flat = experts.reshape(-1)
            order = list(dict.fromkeys(flat.tolist()))
            active, pairs = np.zeros(r.active.shape, np.uint64), []
            for i, e in enumerate(order):
                active[i, :3] = where[e]
                active[i, 3:6] = slot[entering[e]] if e in entering else 0
                mine = np.flatnonzero(flat == e).tolist()
                active[i, 6:].view(np.int32)[:] = [e, len(pairs), len(mine), 0]
                pairs += mine
            self.device.write(r.active, active)
            self.device.write(r.n_active, np.array([len(order)], np.int32))
            padded = np.zeros(r.pairs.shape, np.int32)
            padded[: len(pairs)] = pairs
            self.device.write(r.pairs, padded)
        moved = [self._to(a) for a in (h, experts, weights, fetches, x, shared)]
        ops.expert_ffn(self.ws, *moved[:3], there, *moved[3:5], add, moved[5])
        if T > SMALL_TOKENS:  # no streaming here: the fetches of a long step are copied by hand
            for e, s in entering.items():
                for part, n_bytes in enumerate(bank.part_bytes):
                    self.device.copy(int(slot[s, part]), int(home[e, part]), n_bytes)
        x[...] = self.device.read(moved[4])
        for s, addresses in enumerate(bank.slot_ptr.tolist()):
            for part, n_bytes in enumerate(bank.part_bytes):
                found = self.device.read(memory[s][part])
                ctypes.memmove(addresses[part], found.ctypes.data, n_bytes)

    def _bank(self, bank: Experts) -> tuple[Experts, list[list[Any]]]:
        def bytes_at(address: int, n: int) -> np.ndarray:
            return np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(address)).copy()

        home = np.zeros_like(bank.home_ptr)
        self._kept = []
        for (e, part), address in np.ndenumerate(bank.home_ptr):
            copy = self.device.page_locked(bank.part_bytes[part] + 64)
            copy[: bank.part_bytes[part]] = bytes_at(int(address), bank.part_bytes[part])
            self._kept.append(copy)
            home[e, part] = self.device.pointer(copy)
        memory = [
            [self.device.upload(bytes_at(int(a), n)) for a, n in zip(row, bank.part_bytes, strict=True)]
            for row in bank.slot_ptr
        ]
        slots = np.array([[self.device.pointer(m) for m in row] for row in memory], np.uint64)
        upload = self.device.upload
        scale = None if bank.gate_scale is None else upload(bank.gate_scale)
        pointers = {"expert_ptr": upload(home), "home_ptr": upload(home), "slot_ptr": upload(slots)}
        return replace(bank, gate_scale=scale, **pointers), memory

    def _to(self, value: Any) -> Any:
        if isinstance(value, QTensor):
            return replace(value, data=self.device.upload(value.data))
        if isinstance(value, np.ndarray):
            return self.device.upload(value)
        if isinstance(value, RECORDS):
            return type(value)(*(self._to(getattr(value, f.name)) for f in fields(value)))
        return tuple(map(self._to, value)) if isinstance(value, tuple) else value

    def _back(self, value: Any, there: Any) -> None:
        if isinstance(value, np.ndarray) and value.size and value.flags.writeable:
            value[...] = self.device.read(there)
        elif isinstance(value, tuple):
            for v, t in zip(value, there, strict=True):
                self._back(v, t)
        elif isinstance(value, KVLayer | DeltaLayer | Fetches | SlotState | Recall):
            for f in fields(value):
                if getattr(value, f.name) is not None:
                    self._back(getattr(value, f.name), getattr(there, f.name))
