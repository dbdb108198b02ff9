"""Which experts start in which slots, under a hard budget of bytes.

Pure bookkeeping over routing counts; no memory is touched. A layer here is a row of `counts` and an entry of
`expert_bytes` (bytes of one of the layer's experts: gate, up and down together). A dense layer has no counts,
or 0 expert bytes; it keeps its place and gets no slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt

from engine.ground.errors import CapacityError


@dataclass(frozen=True, eq=False)
class Experts:
    """The MoE layers that slots are shared among; a sequence has one entry a layer.

    counts: int64 [L, E] that placement goes by (zeros: evenly). slot_bytes, staging_bytes: of one expert in a
    slot and in a staging buffer (empty where nothing is staged). n_used: active experts, the fewest slots of a layer
    that are of use: with fewer, one token's experts could not all be resident.
    """

    counts: npt.NDArray[np.int64]
    slot_bytes: Sequence[int]
    staging_bytes: Sequence[int] = ()
    n_used: int = field(kw_only=True)

    @property
    def n_expert(self) -> int:
        """Experts of a layer."""
        return int(self.counts.shape[1])

    @property
    def bytes(self) -> int:
        """Bytes of all experts in slots."""
        return self.n_expert * sum(self.slot_bytes)

    @cached_property
    def ranking(self) -> npt.NDArray[np.int64]:
        """What `order` gives for them, which a plan and the placement that follows it both go by."""
        return order(self.counts, counted_bytes(self.counts, self.slot_bytes))

    @cached_property
    def sets(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Bytes of slots and of staging for `n_used` slots a layer and then for one more at a time, as `best` does.

        What is staged are the missing experts of two layers.
        """
        n_layer, n_expert = self.counts.shape
        sizes = np.asarray(counted_bytes(self.counts, self.slot_bytes), np.int64)
        first = np.where(sizes > 0, min(self.n_used, n_expert), 0)
        layer, rank = self.ranking.T
        added = layer[(rank >= first[layer]) & (sizes[layer] > 0)]
        slots = int(first @ sizes) + np.concatenate(([0], np.cumsum(sizes[added])))
        held = first + np.concatenate(
            (np.zeros((1, n_layer), np.int64), np.cumsum(added[:, None] == np.arange(n_layer), axis=0))
        )
        staging = 2 * ((n_expert - held) * np.asarray(self.staging_bytes, np.int64)).max(axis=1)
        return slots.astype(np.int64), staging

    def evenly(self) -> Experts:
        """The same without counts."""
        return replace(self, counts=np.zeros_like(self.counts)) if self.counts.any() else self


@dataclass(frozen=True, slots=True)
class Placement:
    """How many slots each layer gets and what they hold at first.

    slots_per_layer: [L].
    pinned, cached: for each layer the experts that stay and those that start in a cache slot, most counted
        first. Slots beyond them are cache slots that start empty.
    expert_bytes: [L].
    """

    slots_per_layer: tuple[int, ...]
    pinned: tuple[tuple[int, ...], ...]
    cached: tuple[tuple[int, ...], ...]
    expert_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        for slots, residents in zip(self.slots_per_layer, self.residents, strict=True):
            assert len(set(residents)) == len(residents) <= slots

    @property
    def residents(self) -> tuple[tuple[int, ...], ...]:
        """Experts of each layer that start in a slot, pinned or cache, most counted first."""
        return tuple(p + c for p, c in zip(self.pinned, self.cached, strict=True))

    @property
    def cache_slots(self) -> tuple[int, ...]:
        """Slots of each layer that serving may give to another expert."""
        return tuple(n - len(pinned) for n, pinned in zip(self.slots_per_layer, self.pinned, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return slot_bytes(self.slots_per_layer, self.expert_bytes)

    def with_cache(self, cache_slots: Sequence[int]) -> Placement:
        """The same slots and contents, of which `cache_slots[l]` are cache (bounded by the layer's slots).

        The most counted experts of a layer are the pinned ones.
        """
        keep = [max(n - cache, 0) for n, cache in zip(self.slots_per_layer, cache_slots, strict=True)]
        pinned = tuple(experts[:n] for experts, n in zip(self.residents, keep, strict=True))
        cached = tuple(experts[n:] for experts, n in zip(self.residents, keep, strict=True))
        return replace(self, pinned=pinned, cached=cached)


def slot_bytes(slots_per_layer: Sequence[int], expert_bytes: Sequence[int]) -> int:
    """Bytes of so many slots: the one formula, for placing and for allocating."""
    return sum(int(n) * int(size) for n, size in zip(slots_per_layer, expert_bytes, strict=True))


def residency_budget(n_expert: int, expert_bytes: Sequence[int], residency_pct: float) -> int:
    """The bytes that `residency_pct` (0..100) percent of all experts take, rounded down."""
    return int(Fraction(residency_pct) * slot_bytes([n_expert] * len(expert_bytes), expert_bytes) / 100)


def cache_share(slots_per_layer: Sequence[int], cache_fraction: float) -> tuple[int, ...]:
    """Cache slots of each layer: the number nearest to the fraction (0..1), at least one unless it is 0."""
    assert 0.0 <= cache_fraction <= 1.0
    if cache_fraction == 0.0:
        return (0,) * len(slots_per_layer)
    return tuple(min(n, max(1, int(n * cache_fraction + 0.5))) for n in slots_per_layer)


def best(experts: Experts, budget_bytes: int, *, floor: int | None = None) -> Placement:
    """Pin the experts with the most uses per byte, until the budget is spent.

    Every layer first gets `floor` slots (by default `n_used`, or the even share of the budget where that is less). Of
    equals, the one of lower rank in its layer comes first, so that a tie is spread over all layers, and counts of
    zero throughout give the uniform placement. A layer without counts beside layers that have some is dense. The budget
    is never exceeded; if `floor` slots do not fit, CapacityError names the smallest budget that would do.
    """
    sizes = counted_bytes(experts.counts, experts.slot_bytes)
    if floor is None:
        floor = min(experts.n_used, budget_bytes // max(sum(sizes), 1))
    slots = [min(floor, experts.n_expert) if size else 0 for size in sizes]
    left = budget_bytes - slot_bytes(slots, sizes)
    if left < 0:
        raise CapacityError(
            f"{floor} slots a layer take {budget_bytes - left} bytes, the budget is {budget_bytes} bytes",
            hint=f"give the experts at least {budget_bytes - left} bytes",
        )
    ranked = np.argsort(-experts.counts, axis=1, kind="stable")
    for layer, position in experts.ranking.tolist():
        if position == slots[layer] and 0 < sizes[layer] <= left:
            slots[layer] += 1
            left -= sizes[layer]
    residents = tuple(tuple(row[:n]) for row, n in zip(ranked.tolist(), slots, strict=True))
    return Placement(tuple(slots), residents, ((),) * len(slots), tuple(experts.slot_bytes))


def greedy(
    counts: npt.NDArray[np.int64],
    expert_bytes: Sequence[int],
    budget_bytes: int,
    *,
    n_expert_used: int,
    cache_fraction: float = 0.0,
    floor: int | None = None,
) -> Placement:
    """`best` of counts [L, E] and bytes [L], of which each layer's share `cache_fraction` is cache.

    Cache slots start with the least counted of the layer's residents.
    """
    placed = best(Experts(counts, expert_bytes, n_used=n_expert_used), budget_bytes, floor=floor)
    return placed.with_cache(cache_share(placed.slots_per_layer, cache_fraction))


def order(counts: npt.NDArray[np.int64], expert_bytes: Sequence[int]) -> npt.NDArray[np.int64]:
    """All (layer, rank of an expert in it), int64 [L * E, 2], as `best` considers them: most uses per byte first."""
    n_layer, n_expert = counts.shape
    density = -np.sort(-counts, axis=1) / np.maximum(expert_bytes, 1)[:, None]
    turn = np.broadcast_to(_spread(n_layer)[:, None], density.shape)
    rank = np.broadcast_to(np.arange(n_expert), density.shape)
    found = np.lexsort((turn.ravel(), rank.ravel(), -density.ravel()))
    return np.stack((found // n_expert, found % n_expert), axis=1)


def counted_bytes(counts: npt.NDArray[np.int64], expert_bytes: Sequence[int]) -> list[int]:
    """`expert_bytes` with 0 for a layer without counts beside layers that have some: it is dense."""
    counted = [bool(row.any()) for row in counts]
    return [size if row or not any(counted) else 0 for size, row in zip(expert_bytes, counted, strict=True)]


def uniform(n_expert: int, expert_bytes: Sequence[int], budget_bytes: int) -> Placement:
    """Pin the same share of every layer, as a system without a profile does: the experts of lowest index.

    Slots that do not come out even go to layers spread over the model.
    """
    counts = np.zeros((len(expert_bytes), n_expert), np.int64)
    return best(Experts(counts, expert_bytes, n_used=0), budget_bytes)


def lru(n_expert: int, expert_bytes: Sequence[int], budget_bytes: int) -> Placement:
    """The slots of `uniform`, all of them cache and empty at first."""
    return empty(uniform(n_expert, expert_bytes, budget_bytes).slots_per_layer, expert_bytes)


def empty(slots_per_layer: Sequence[int], expert_bytes: Sequence[int]) -> Placement:
    """So many slots, all of them cache, that hold nothing."""
    nothing: tuple[tuple[int, ...], ...] = ((),) * len(slots_per_layer)
    return Placement(tuple(slots_per_layer), nothing, nothing, tuple(expert_bytes))


def everything(n_expert: int, expert_bytes: Sequence[int]) -> Placement:
    """Pin every expert."""
    slots = tuple(n_expert if size else 0 for size in expert_bytes)
    return Placement(slots, tuple(tuple(range(n)) for n in slots), ((),) * len(slots), tuple(expert_bytes))


def swaps(
    counts: npt.NDArray[np.int64],
    pinned: Sequence[Sequence[int]],
    resident: Sequence[Sequence[int]],
    threshold: float,
) -> list[tuple[int, int, int]]:
    """Which pinned experts should give way between requests, as (layer, expert in, expert out).

    counts: int64 [L, E], decayed; pinned, resident: each layer's experts in pinned slots, and in any slot.
    In every layer the most counted of the others is set against the least counted pinned one, the next against
    the next, for as long as the difference exceeds `threshold` times the layer's mean count: the difference is
    what the exchange would have saved in misses. Of equals, an expert that is already resident comes first:
    the two slots then swap roles and no byte moves. Any other expert takes the slot of the one that leaves, so
    following the list needs no memory beyond the slots.
    """
    found = []
    for layer, row in enumerate(counts):
        inside = np.array(sorted(pinned[layer]), np.int64)
        outside = np.setdiff1d(np.arange(row.size), inside)
        away = np.isin(outside, resident[layer], invert=True)
        outside = outside[np.lexsort((outside, away, -row[outside]))]
        inside = inside[np.lexsort((-inside, row[inside]))]
        for enters, leaves in zip(outside.tolist(), inside.tolist(), strict=False):
            if row[enters] - row[leaves] <= threshold * row.mean():
                break
            found.append((layer, enters, leaves))
    return found


def _spread(n: int) -> npt.NDArray[np.int64]:
    """A turn for each of n layers, such that the first few lie evenly over the model: bits reversed."""
    bits = max(n - 1, 1).bit_length()
    return np.array([int(f"{layer:0{bits}b}"[::-1], 2) for layer in range(n)], np.int64)
