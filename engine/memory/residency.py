"""Experts in slots: the arena of fast memory, the state that says what lies where, and its upkeep.

Invariant: `state.expert_ptr[l, e]` is where expert e of MoE layer l can be read now, whole and
unchanged; a slot's bytes are those of `state.expert_of[slot]`. docs/residency.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.formats.quants import QTensor
from engine.ops import F32, U8, Activation, Experts
from engine.ops.device import Array, Memory
from engine.placing import placement as placing
from engine.placing import policy
from engine.placing.placement import Placement

ALIGN_BYTES = 64
REFILL_BYTES = 512 << 20  # of slots that are read again at a time
MOST_DROPPED = 64  # steps, whose dropped tokens are counted at once
Progress = Callable[[int, int], None]
Piece = tuple[U8, int]  # bytes, usually of a mapped file, and the address that they go to
Uses = dict[str, int | list[int]]


class Tier(Protocol):
    """Where experts outside slots are read; n_bytes: of memory that it takes."""

    n_bytes: int

    def locate(self, state: policy.SlotState) -> None:
        """Set `home_ptr` of every expert."""

    def load(self, pieces: Sequence[Piece], progress: Progress) -> None:
        """Fill slots with `pieces`, and what else it keeps; progress in bytes."""

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Fill slots with `pieces` again."""

    def exchange(self, state: policy.SlotState, layer: int, enters: int, leaves: int, slot: int) -> None:
        """Put the bytes of `enters` in a pinned slot that held `leaves`, which can be read at its home from then on."""

    def rehome(self, state: policy.SlotState, layer: int, enters: int, leaves: int, slot: int) -> None:
        """`enters`, in a cache slot, and `leaves`, in the pinned slot `slot`, have swapped roles."""

    def close(self) -> None:
        """Give back what it took."""


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The stacked experts of one layer as they lie in the file: gate, up [E, F, D], down [E, D, F].

    gate_scale: float32 [E], of the products of gate, where a file has such factors.
    """

    gate: QTensor
    up: QTensor
    down: QTensor
    activation: Activation = "silu"
    gate_scale: F32 | None = None

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


def largest_parts(experts: Sequence[ExpertTensors]) -> tuple[int, int, int]:
    """Bytes of the largest gate, up and down of any layer."""
    gate, up, down = (max(sizes) for sizes in zip(*(e.part_bytes for e in experts), strict=True))
    return gate, up, down


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


class MappedTier:
    """The slow tier of a host backend: the mapped file itself, which never changes and costs nothing."""

    n_bytes = 0  # of memory taken beside the file's own pages

    def __init__(self, device: Memory, experts: tuple[ExpertTensors, ...]) -> None:
        self.device = device
        self.experts = experts

    def locate(self, state: policy.SlotState) -> None:
        """Set `home_ptr` of every expert."""
        for layer, tensors in enumerate(self.experts):
            ids = np.arange(tensors.gate.shape[0], dtype=np.uint64)
            for part, (tensor, size) in enumerate(zip(tensors.parts, tensors.part_bytes, strict=True)):
                stride = np.uint64(tensor.stride_bytes or size)
                state.home_ptr[layer, :, part] = np.uint64(self.device.pointer(tensor.data)) + ids * stride

    def load(self, pieces: Sequence[Piece], progress: Progress) -> None:
        """`fill`; there is nothing else to load."""
        self.fill(pieces, progress)

    def fill(self, pieces: Sequence[Piece], progress: Progress = lambda done, total: None) -> None:
        """Copy parts of the file to addresses of fast memory; progress in bytes."""
        total, done = sum(source.nbytes for source, _ in pieces), 0
        for source, address in pieces:
            self.device.copy(address, self.device.pointer(source), source.nbytes)
            done += source.nbytes
            progress(done, total)

    def exchange(self, state: policy.SlotState, layer: int, enters: int, leaves: int, slot: int) -> None:
        """Put the bytes of `enters` in a slot that held `leaves`, whose own bytes stay readable at its home."""
        for part, size in enumerate(self.experts[layer].part_bytes):
            self.device.copy(int(state.slot_ptr[slot, part]), int(state.home_ptr[layer, enters, part]), size)

    def rehome(self, state: policy.SlotState, layer: int, enters: int, leaves: int, slot: int) -> None:
        """`enters`, in a cache slot, and `leaves`, in the pinned slot `slot`, swap roles: both keep their homes."""

    def close(self) -> None:
        """The file is closed by who opened it."""


class Residency:
    """Slots of all MoE layers on `device`, filled by a placement.

    experts: one record a MoE layer. rule: how heat moves (docs/residency.md). tier: where experts outside
    slots are read (MappedTier, or page-locked copies). poison: fill empty and emptied slots with 0xFF,
    which no block format reads as weights of a model. `state` is the host's view; `live`, on the device, is what ops
    read and change. On a host backend they are one; elsewhere `pull` and `push` copy between them.
    """

    def __init__(
        self,
        experts: tuple[ExpertTensors, ...],
        placement: Placement,
        rule: policy.Rule,
        *,
        device: Memory,
        tier: Tier,
        poison: bool = False,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.experts = experts
        self.rule = rule
        self.poison = poison
        self.device = device
        self.tier = tier
        n_expert = experts[0].gate.shape[0] if experts else 0  # a model may have none
        self.state = policy.SlotState.empty(placement.slots_per_layer, n_expert)
        strides = [slot_bytes(e) for e in experts]
        self.arena_bytes = sum(n * s for n, s in zip(placement.slots_per_layer, strides, strict=True))
        self._memory = device.empty(self.arena_bytes + ALIGN_BYTES, np.uint8)
        if poison:
            device.set_bytes(device.pointer(self._memory), 0xFF, self.arena_bytes + ALIGN_BYTES)
        self._set_pointers(strides)
        policy.fill(self.state, placement)
        tier.load(self._pieces(), progress)
        self.live = policy.SlotState(*(device.upload(getattr(self.state, f.name)) for f in fields(self.state)))
        self.banks = tuple(self._bank(layer) for layer in range(len(experts)))
        self._uncounted = np.zeros((len(experts), n_expert), np.int64)  # uses, of those in `live.counts`
        self._dropped: list[NDArray[np.int32]] = []  # that are to be counted there, too

    @property
    def memory(self) -> Array:
        """The arena of all slots."""
        return self._memory

    def refill(self) -> Iterator[None]:
        """Read what the slots hold from the file again, some with each step, into an arena whose contents are lost."""
        self.pull()
        if self.poison:
            self.device.set_bytes(self.device.pointer(self._memory), 0xFF, self._memory.nbytes)
        some, n_bytes = [], 0
        for piece in self._pieces():
            some.append(piece)
            n_bytes += piece[0].nbytes
            if n_bytes >= REFILL_BYTES:
                self.tier.fill(some)
                some, n_bytes = [], 0
                yield
        self.tier.fill(some)

    def _set_pointers(self, strides: list[int]) -> None:
        state = self.state
        address = _aligned(self.device.pointer(self._memory))
        for layer, tensors in enumerate(self.experts):
            first, last = int(state.slot_begin[layer]), int(state.slot_begin[layer + 1])
            offset = 0
            for part, size in enumerate(tensors.part_bytes):
                slots = np.arange(last - first, dtype=np.uint64) * np.uint64(strides[layer])
                state.slot_ptr[first:last, part] = np.uint64(address + offset) + slots
                offset += _aligned(size)
            address += (last - first) * strides[layer]
        self.tier.locate(state)
        state.expert_ptr[:] = state.home_ptr

    def _pieces(self) -> list[Piece]:
        """Where the file's bytes of each slot's expert go."""
        state = self.state
        pieces: list[Piece] = []
        for layer, tensors in enumerate(self.experts):
            for slot in range(state.slot_begin[layer], state.slot_begin[layer + 1]):
                expert = int(state.expert_of[slot])
                if expert >= 0:
                    addresses = state.slot_ptr[slot].tolist()
                    pieces += [(t.expert(expert).data, a) for t, a in zip(tensors.parts, addresses, strict=True)]
        return pieces

    def pull(self) -> policy.SlotState:
        """The host's view, brought up to date with the device."""
        if self.device.name != "host memory":
            for f in fields(self.state):
                getattr(self.state, f.name)[...] = self.device.read(getattr(self.live, f.name))
        return self.state

    def push(self) -> None:
        """Bring the device up to date with the host's view."""
        if self.device.name != "host memory":
            for f in fields(self.state):
                self.device.write(getattr(self.live, f.name), getattr(self.state, f.name))

    def _bank(self, layer: int) -> Experts:
        tensors = self.experts[layer]
        return Experts(
            tensors.gate.qtype,
            tensors.up.qtype,
            tensors.down.qtype,
            n_embd=tensors.gate.shape[2],
            n_ff=tensors.gate.shape[1],
            part_bytes=tensors.part_bytes,
            expert_ptr=self.live.expert_ptr[layer],
            home_ptr=self.live.home_ptr[layer],
            slot_ptr=self.live.slot_ptr,
            poison=self.poison,
            activation=tensors.activation,
            gate_scale=None if tensors.gate_scale is None else self.device.upload(tensors.gate_scale),
            layer=layer,
        )

    def follow(self, counts: NDArray[np.int64], threshold: float = 0.1) -> int:
        """Between requests, let the pinned slots follow the counts [L, E]; returns the experts moved.

        An expert that replaces a pinned one takes over its slot, so no second copy ever exists; one that
        already lies in a cache slot swaps roles with it, and no byte moves.
        """
        if not self.experts:
            return 0
        state = self.pull()
        spans = [state.slots(layer) for layer in range(len(self.experts))]
        resident = [[e for e in state.expert_of[s].tolist() if e >= 0] for s in spans]
        pinned = [state.expert_of[s][state.pinned[s] == 1].tolist() for s in spans]
        moves = placing.swaps(counts, pinned, resident, threshold)
        for layer, enters, leaves in moves:
            old = int(state.slot_of[layer, leaves])
            cached = int(state.slot_of[layer, enters])
            if cached >= 0:
                state.pinned[cached], state.pinned[old] = 1, 0
                self.tier.rehome(state, layer, enters, leaves, old)
                continue
            self.tier.exchange(state, layer, enters, leaves, old)
            state.slot_of[layer, leaves], state.slot_of[layer, enters] = -1, old
            state.expert_ptr[layer, leaves] = state.home_ptr[layer, leaves]
            state.expert_ptr[layer, enters] = state.slot_ptr[old]
            state.expert_of[old] = enters
        if moves:
            self.push()
        return len(moves)

    def counters(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Hits and misses of counted tokens by layer since the start, copied."""
        return self.device.read(self.live.hits).copy(), self.device.read(self.live.misses).copy()

    def totals(self) -> Uses:
        """Hits and misses of counted tokens since the start (or the last reset)."""
        nothing = np.zeros(len(self.experts), np.int64)
        return self.since((nothing, nothing))

    def since(self, before: tuple[NDArray[np.int64], NDArray[np.int64]]) -> Uses:
        """Hits and misses since `counters()` gave `before`: in total and by MoE layer."""
        now = self.counters()
        hits, misses = now[0] - before[0], now[1] - before[1]
        return {
            "hits": int(hits.sum()),
            "misses": int(misses.sum()),
            "hits_by_layer": hits.tolist(),
            "misses_by_layer": misses.tolist(),
        }

    def map(self) -> list[str]:
        """What lies where: a string a MoE layer, a character an expert: `p` pinned, `c` cached, `.` not resident."""
        slot_of, pinned = self.device.read(self.live.slot_of), self.device.read(self.live.pinned)
        flags = np.append(pinned, 2)  # index -1: in no slot
        return [row.tobytes().decode() for row in np.frombuffer(b"cp.", np.uint8)[flags[slot_of]]]

    def reset(self) -> None:
        """Forget what was counted: uses, hits and misses."""
        for name in ("counts", "hits", "misses"):
            counter = getattr(self.state, name)
            counter[...] = 0
            self.device.write(getattr(self.live, name), counter)
        self._uncounted[...] = 0
        self._dropped.clear()

    def uncount(self, experts: NDArray[np.int32]) -> None:
        """Take back uses that were counted: the experts [L, n, A] of tokens that were dropped, which is kept."""
        self._dropped.append(experts)  # a step waits for this
        if len(self._dropped) >= MOST_DROPPED:
            self._settle()

    def _settle(self) -> None:
        if self._dropped:
            L, E = self._uncounted.shape
            used = np.concatenate(self._dropped, axis=1).reshape(L, -1) + E * np.arange(L)[:, None]
            self._uncounted += np.bincount(used.ravel(), minlength=L * E).reshape(L, E)
            self._dropped.clear()

    @property
    def counts(self) -> NDArray[np.int64]:
        """Uses by counted tokens, int64 [L, E]."""
        self._settle()
        return np.asarray(self.device.read(self.live.counts)) - self._uncounted

    @property
    def percent(self) -> float:
        """The share of all expert bytes that slots hold, pinned and cache together; 100 where there are none."""
        return 100.0 * self.arena_bytes / self.experts_bytes if self.experts else 100.0

    @property
    def experts_bytes(self) -> int:
        """Bytes of all experts of the model, as slots would hold them."""
        return sum(e.gate.shape[0] * slot_bytes(e) for e in self.experts)
