"""Residency decisions: the slots' state and the one function that changes it.

`advance` is the twin of the decision half of the op `route` (docs/residency.md): every backend takes the
same decisions, bit for bit, and the simulator (engine/simulate.py) replays them on a trace. Two integers make
a policy; pinned slots are slots that `advance` never gives away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.placement import Placement

EMPTY_SCORE = int(np.iinfo(np.int64).min)  # of a slot that holds nothing: always the first victim
# The slots follow this many tokens at the end of a step: a prefill chunk uses nearly every expert, and what its
# last tokens used is the better guess of what decoding uses next.
RECENT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Rule:
    """A replacement policy: a slot's score is a bucket that leaks one a step.

    gain: what a use adds, in steps; cap: what the bucket holds at most, in steps. Both are >= 0 and far from
    the limits of int64 (below 2**40). An expert used more often than once in `gain` steps fills its bucket,
    and full buckets are ordered by their last use, so `cap` is how long an expert is remembered.
    """

    gain: int
    cap: int

    def __post_init__(self) -> None:
        assert 0 <= self.gain < 1 << 40
        assert 0 <= self.cap < 1 << 40


LRU = Rule(gain=0, cap=0)
LFU = Rule(gain=8, cap=64)  # ahead of LRU on drifting Zipf routing with 4 of 32 and 8 of 128 experts
# LRU that remembers a little frequency: on traces of the reference model at 30 and 60% residency it misses no more
# than LRU at any share of cache slots, and less than rules with a longer memory.
AGED = Rule(gain=4, cap=32)


@dataclass(slots=True, eq=False)
class SlotState:
    """The arrays of docs/residency.md, for L MoE layers, E experts and N slots; mutable.

    slot_begin int32 [L+1], slot_of int32 [L, E] (-1 = not resident), expert_of int32 [N] (-1 = empty),
    score int64 [N], pinned uint8 [N], clock int64 [L], counts int64 [L, E], hits and misses int64 [L],
    expert_ptr and home_ptr uint64 [L, E, 3], slot_ptr uint64 [N, 3] (addresses of gate, up, down; all zero
    where no memory is behind the state, as in a simulation).
    """

    slot_begin: npt.NDArray[np.int32]
    slot_of: npt.NDArray[np.int32]
    expert_of: npt.NDArray[np.int32]
    score: npt.NDArray[np.int64]
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
            score=np.full(n_slot, EMPTY_SCORE, np.int64),
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

    Slots of a layer are taken in order; a filled slot scores 0, slots beyond the placement's experts stay
    empty. Only the tables change: copying the bytes is the caller's part.
    """
    assert np.array_equal(np.diff(state.slot_begin), placement.slots_per_layer)
    assert (state.expert_of < 0).all(), "fill wants an empty state"
    for layer, (pinned, cached) in enumerate(zip(placement.pinned, placement.cached, strict=True)):
        experts = np.array(pinned + cached, np.int64)
        slots = np.arange(experts.size) + state.slot_begin[layer]
        state.slot_of[layer, experts] = slots
        state.expert_of[slots] = experts
        state.score[slots] = 0
        state.pinned[slots[: len(pinned)]] = 1
        state.expert_ptr[layer, experts] = state.slot_ptr[slots]


def advance(
    state: SlotState,
    layer: int,
    experts: npt.NDArray[np.integer],
    counted: npt.NDArray[np.bool_],
    gain: int,
    cap: int,
) -> npt.NDArray[np.int32]:
    """Take one step of MoE layer `layer`: count, score, and decide which experts enter which slots.

    experts [T, A]: the active experts of the step's tokens; counted bool [T]: the tokens that count. All of them
    are counted, the last RECENT_TOKENS move slots.
    Returns the step's fetches, int32 [n, 3]: (expert, slot, evicted expert or -1), in the order in which
    they were decided. Specified in docs/residency.md; this is that page in NumPy.
    """
    span = state.slots(layer)
    slot_of, expert_of, score = state.slot_of[layer], state.expert_of[span], state.score[span]
    evictable = state.pinned[span] == 0
    state.clock[layer] += 1
    clock = int(state.clock[layer])
    n_expert = slot_of.size

    counted_uses = np.bincount(experts[counted].ravel(), minlength=n_expert)
    state.counts[layer] += counted_uses
    state.hits[layer] += counted_uses[slot_of >= 0].sum()
    state.misses[layer] += counted_uses[slot_of < 0].sum()

    uses = np.bincount(experts[-RECENT_TOKENS:].ravel(), minlength=n_expert)
    used = (expert_of >= 0) & (uses[expert_of] > 0)  # [slots of the layer]; an empty slot is not used
    touched = used & evictable
    score[touched] = np.minimum(np.maximum(score[touched], clock) + gain, clock + cap)

    # A victim is never one of these experts, so nothing that enters can leave again: the victims, one
    # after the other, are the candidates in the order of (score, slot), and the first refusal ends the step.
    missing = np.flatnonzero((uses > 0) & (slot_of < 0))
    missing = missing[np.argsort(-uses[missing], kind="stable")]
    victims = np.flatnonzero(evictable & ~used & (score <= clock + gain))
    victims = victims[np.argsort(score[victims], kind="stable")]
    n = min(missing.size, victims.size)
    entering, slots = missing[:n], victims[:n]
    leaving = expert_of[slots]

    left = leaving[leaving >= 0]
    slot_of[left] = -1
    state.expert_ptr[layer, left] = state.home_ptr[layer, left]
    slot_of[entering] = slots + span.start
    state.expert_ptr[layer, entering] = state.slot_ptr[slots + span.start]
    expert_of[slots] = entering
    score[slots] = clock + min(gain, cap)
    return np.stack((entering, slots + span.start, leaving), axis=1).astype(np.int32)
