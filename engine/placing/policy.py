"""Residency decisions: the slots' state and the one function that changes it.

`advance` is the twin of the decision half of the op `route` (docs/residency.md): every backend takes the
same decisions, bit for bit, and the simulator (engine/placing/simulate.py) replays them on a trace. One integer makes
a policy; pinned slots are slots that `advance` never gives away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.placing.placement import Placement

USE = 1 << 16  # what a use adds to an expert's heat
MAX_MEMORY = 16
# The slots follow this many tokens at the end of a step: a prefill chunk uses nearly every expert, and what its
# last tokens used is the better guess of what decoding uses next.
RECENT_TOKENS = 32
_COLDEST = int(np.iinfo(np.int64).min)  # an empty slot: always the first victim


@dataclass(frozen=True, slots=True)
class Rule:
    """A replacement policy: the expert that was given up least is the one used most, as far as memory reaches.

    memory: 0: LRU. k of 1 to MAX_MEMORY: a step takes 1 / 2**k of every expert's heat, so uses are remembered
    for some 2**k steps.
    """

    memory: int

    def __post_init__(self) -> None:
        assert 0 <= self.memory <= MAX_MEMORY


LRU = Rule(0)
# Where nothing was measured: no other memory, and no pinning beside it, missed 1% less on either set of sample sessions
# at 10, 30 or 60% residency (docs/residency.md has the table, benchmarks/policies.py makes it).
DEFAULT = Rule(6)


@dataclass(slots=True, eq=False)
class SlotState:
    """The arrays of docs/residency.md, for L MoE layers, E experts and N slots; mutable.

    slot_begin int32 [L+1], slot_of int32 [L, E] (-1 = not resident), expert_of int32 [N] (-1 = empty),
    heat int64 [L, E], pinned uint8 [N], clock int64 [L], counts int64 [L, E], hits and misses int64 [L],
    expert_ptr and home_ptr uint64 [L, E, 3], slot_ptr uint64 [N, 3] (addresses of gate, up, down; all zero
    where no memory is behind the state, as in a simulation).
    """

    slot_begin: npt.NDArray[np.int32]
    slot_of: npt.NDArray[np.int32]
    expert_of: npt.NDArray[np.int32]
    heat: npt.NDArray[np.int64]
    pinned: npt.NDArray[np.uint8]
    clock: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    hits: npt.NDArray[np.int64]
    misses: npt.NDArray[np.int64]
    expert_ptr: npt.NDArray[np.uint64]
    home_ptr: npt.NDArray[np.uint64]
    slot_ptr: npt.NDArray[np.uint64]

    @classmethod
    def empty(cls, slots_per_layer: Sequence[int], n_expert: int) -> SlotState:
        """Slots that hold nothing, clocks and counters at zero, all addresses zero."""
        n_layer, n_slot = len(slots_per_layer), sum(slots_per_layer)
        return cls(
            slot_begin=np.concatenate(([0], np.cumsum(slots_per_layer))).astype(np.int32),
            slot_of=np.full((n_layer, n_expert), -1, np.int32),
            expert_of=np.full(n_slot, -1, np.int32),
            heat=np.zeros((n_layer, n_expert), np.int64),
            pinned=np.zeros(n_slot, np.uint8),
            clock=np.zeros(n_layer, np.int64),
            counts=np.zeros((n_layer, n_expert), np.int64),
            hits=np.zeros(n_layer, np.int64),
            misses=np.zeros(n_layer, np.int64),
            expert_ptr=np.zeros((n_layer, n_expert, 3), np.uint64),
            home_ptr=np.zeros((n_layer, n_expert, 3), np.uint64),
            slot_ptr=np.zeros((n_slot, 3), np.uint64),
        )

    def slots(self, layer: int) -> slice:
        """The range of slots that MoE layer `layer` owns."""
        return slice(int(self.slot_begin[layer]), int(self.slot_begin[layer + 1]))


def fill(state: SlotState, placement: Placement) -> None:
    """Put a placement's experts into an empty state: pinned ones first, then those that start in cache slots.

    Slots of a layer are taken in order, slots beyond the placement's experts stay empty. Of experts that nothing has
    used yet the last of the placement is the coldest. Only the tables change: copying the bytes is the caller's part.
    """
    assert np.array_equal(np.diff(state.slot_begin), placement.slots_per_layer)
    assert (state.expert_of < 0).all(), "fill wants an empty state"
    for layer, (pinned, cached) in enumerate(zip(placement.pinned, placement.cached, strict=True)):
        experts = np.array(pinned + cached, np.int64)
        slots = np.arange(experts.size) + state.slot_begin[layer]
        state.slot_of[layer, experts] = slots
        state.expert_of[slots] = experts
        state.heat[layer, experts] = -np.arange(experts.size)
        state.pinned[slots[: len(pinned)]] = 1
        state.expert_ptr[layer, experts] = state.slot_ptr[slots]


def advance(
    state: SlotState,
    layer: int,
    experts: npt.NDArray[np.integer],
    counted: npt.NDArray[np.bool_],
    rule: Rule,
) -> npt.NDArray[np.int32]:
    """Take one step of MoE layer `layer`: count, warm, and decide which experts enter which slots.

    experts [T, A]: the active experts of the step's tokens; counted bool [T]: the tokens that count. All of them
    are counted, the last RECENT_TOKENS move slots.
    Returns the step's fetches, int32 [n, 3]: (expert, slot, evicted expert or -1), in the order in which
    they were decided. Specified in docs/residency.md; this is that page in NumPy.
    """
    span = state.slots(layer)
    slot_of, expert_of, heat = state.slot_of[layer], state.expert_of[span], state.heat[layer]
    state.clock[layer] += 1
    n_expert = slot_of.size

    counted_uses = np.bincount(experts[counted].ravel(), minlength=n_expert)
    state.counts[layer] += counted_uses
    state.hits[layer] += counted_uses[slot_of >= 0].sum()
    state.misses[layer] += counted_uses[slot_of < 0].sum()

    uses = np.bincount(experts[-RECENT_TOKENS:].ravel(), minlength=n_expert)
    if rule.memory:
        heat += uses * USE - (heat >> rule.memory)
    else:  # LRU: the last step that used it, and there its uses
        heat[uses > 0] = 64 * state.clock[layer] + uses[uses > 0]

    # A victim is never one of these experts, so nothing that enters can leave again: the victims, one
    # after the other, are the candidates in the order of (heat, slot), and the first refusal ends the step.
    missing = np.flatnonzero((uses > 0) & (slot_of < 0))
    missing = missing[np.argsort(-heat[missing], kind="stable")]
    used = (expert_of >= 0) & (uses[expert_of] > 0)  # [slots of the layer]; an empty slot is not used
    held = np.where(expert_of >= 0, heat[expert_of], _COLDEST)
    victims = np.flatnonzero((state.pinned[span] == 0) & ~used)
    victims = victims[np.argsort(held[victims], kind="stable")]
    n = min(missing.size, victims.size)
    n = int(np.count_nonzero(heat[missing[:n]] > held[victims[:n]]))
    entering, slots = missing[:n], victims[:n]
    leaving = expert_of[slots]

    left = leaving[leaving >= 0]
    slot_of[left] = -1
    state.expert_ptr[layer, left] = state.home_ptr[layer, left]
    slot_of[entering] = slots + span.start
    state.expert_ptr[layer, entering] = state.slot_ptr[slots + span.start]
    expert_of[slots] = entering
    return np.stack((entering, slots + span.start, leaving), axis=1).astype(np.int32)
