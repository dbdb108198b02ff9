"""Experts in slots: the arena of fast memory, the state that says what lies where, and its upkeep.

Invariant: `state.expert_ptr[l, e]` is where expert e of MoE layer l can be read now, whole and
unchanged; a slot's bytes are those of `state.expert_of[slot]`. docs/residency.md has the rules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import placement as placing
from engine import policy
from engine.ops import U8, Experts
from engine.placement import Placement
from engine.quants import QTensor

ALIGN_BYTES = 64
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The stacked experts of one layer as they lie in the file: gate, up [E, F, D], down [E, D, F]."""

    gate: QTensor
    up: QTensor
    down: QTensor

    @property
    def parts(self) -> tuple[QTensor, QTensor, QTensor]:
        """Gate, up, down: the order of the three columns of every pointer table."""
        return self.gate, self.up, self.down

    @property
    def part_bytes(self) -> tuple[int, int, int]:
        """Bytes of one expert's gate, up and down."""
        gate, up, down = (t.nbytes // t.shape[0] for t in self.parts)
        return gate, up, down


def slot_bytes(experts: ExpertTensors) -> int:
    """Bytes of one slot: an expert's three parts, each aligned. Placement and the arena both use it."""
    return sum(_aligned(n) for n in experts.part_bytes)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _address(array: U8) -> int:
    return int(array.__array_interface__["data"][0])


class Residency:
    """Slots of all MoE layers, filled by a placement.

    experts: one record a MoE layer. rule: how scores move (docs/residency.md). poison: fill empty and
    emptied slots with 0xFF, which every block format reads as NaN.
    """

    def __init__(
        self,
        experts: tuple[ExpertTensors, ...],
        placement: Placement,
        rule: policy.Rule,
        *,
        poison: bool = False,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.experts = experts
        self.rule = rule
        self.poison = poison
        n_expert = experts[0].gate.shape[0]
        self.state = policy.SlotState.empty(placement.slots_per_layer, n_expert)
        strides = [slot_bytes(e) for e in experts]
        self.arena_bytes = sum(n * s for n, s in zip(placement.slots_per_layer, strides, strict=True))
        self._memory = np.empty(self.arena_bytes + ALIGN_BYTES, np.uint8)
        if poison:
            self._memory.fill(0xFF)
        self._set_pointers(strides)
        policy.fill(self.state, placement)
        self._load(progress)
        self.banks = tuple(self._bank(layer) for layer in range(len(experts)))

    def _set_pointers(self, strides: list[int]) -> None:
        state = self.state
        address = _aligned(_address(self._memory))
        for layer, tensors in enumerate(self.experts):
            sizes = tensors.part_bytes
            ids = np.arange(tensors.gate.shape[0], dtype=np.uint64)
            for part, tensor in enumerate(tensors.parts):
                state.home_ptr[layer, :, part] = np.uint64(_address(tensor.data)) + ids * np.uint64(sizes[part])
            first, last = int(state.slot_begin[layer]), int(state.slot_begin[layer + 1])
            offset = 0
            for part, size in enumerate(sizes):
                slots = np.arange(last - first, dtype=np.uint64) * np.uint64(strides[layer])
                state.slot_ptr[first:last, part] = np.uint64(address + offset) + slots
                offset += _aligned(size)
            address += (last - first) * strides[layer]
        state.expert_ptr[:] = state.home_ptr

    def _bank(self, layer: int) -> Experts:
        tensors = self.experts[layer]
        return Experts(
            tensors.gate.qtype,
            tensors.up.qtype,
            tensors.down.qtype,
            n_embd=tensors.gate.shape[2],
            n_ff=tensors.gate.shape[1],
            part_bytes=tensors.part_bytes,
            expert_ptr=self.state.expert_ptr[layer],
            home_ptr=self.state.home_ptr[layer],
            slot_ptr=self.state.slot_ptr,
            poison=self.poison,
        )

    def _load(self, progress: Progress) -> None:
        state, done = self.state, 0
        for layer in range(len(self.experts)):
            for slot in range(state.slot_begin[layer], state.slot_begin[layer + 1]):
                expert = int(state.expert_of[slot])
                if expert >= 0:
                    done += self._copy(layer, expert, slot)
                    progress(done, self.arena_bytes)

    def _copy(self, layer: int, expert: int, slot: int) -> int:
        state = self.state
        sizes = self.experts[layer].part_bytes
        for part, size in enumerate(sizes):
            ctypes.memmove(int(state.slot_ptr[slot, part]), int(state.home_ptr[layer, expert, part]), size)
        state.expert_ptr[layer, expert] = state.slot_ptr[slot]
        return sum(sizes)

    def _evict(self, layer: int, slot: int) -> None:
        state = self.state
        expert = int(state.expert_of[slot])
        if expert < 0:
            return
        state.slot_of[layer, expert] = -1
        state.expert_ptr[layer, expert] = state.home_ptr[layer, expert]
        state.expert_of[slot] = -1
        if self.poison:
            for part, size in enumerate(self.experts[layer].part_bytes):
                ctypes.memset(int(state.slot_ptr[slot, part]), 0xFF, size)

    def follow(self, counts: NDArray[np.int64], threshold: float = 0.1) -> int:
        """Between requests, let the pinned slots follow the counts [L, E]; returns the experts moved.

        An expert that replaces a pinned one takes over its slot, so no second copy ever exists; one that
        already lies in a cache slot swaps roles with it, and no byte moves.
        """
        state = self.state
        spans = [state.slots(layer) for layer in range(len(self.experts))]
        resident = [[e for e in state.expert_of[s].tolist() if e >= 0] for s in spans]
        pinned = [state.expert_of[s][state.pinned[s] == 1].tolist() for s in spans]
        moves = placing.swaps(counts, pinned, resident, threshold)
        for layer, enters, leaves in moves:
            old = int(state.slot_of[layer, leaves])
            cached = int(state.slot_of[layer, enters])
            if cached >= 0:
                state.pinned[cached], state.pinned[old] = 1, 0
                state.score[cached], state.score[old] = 0, state.clock[layer]
                continue
            self._evict(layer, old)
            self._copy(layer, enters, old)
            state.slot_of[layer, enters] = old
            state.expert_of[old] = enters
        return len(moves)

    def counters(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Hits and misses of counted tokens by layer since the start, copied."""
        return self.state.hits.copy(), self.state.misses.copy()

    def totals(self) -> dict[str, Any]:
        """Hits and misses of counted tokens since the start (or the last reset)."""
        nothing = np.zeros_like(self.state.hits)
        return self.since((nothing, nothing))

    def since(self, before: tuple[NDArray[np.int64], NDArray[np.int64]]) -> dict[str, Any]:
        """Hits and misses since `counters()` gave `before`: in total and by MoE layer."""
        hits, misses = self.state.hits - before[0], self.state.misses - before[1]
        return {
            "hits": int(hits.sum()),
            "misses": int(misses.sum()),
            "hits_by_layer": hits.tolist(),
            "misses_by_layer": misses.tolist(),
        }

    @property
    def experts_bytes(self) -> int:
        """Bytes of all experts of the model, as slots would hold them."""
        return sum(e.gate.shape[0] * slot_bytes(e) for e in self.experts)
