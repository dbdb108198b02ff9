"""The memory plan of a device: what a model takes under a hard cap, and how many expert slots that leaves.

Pure arithmetic over byte counts. Prefill stages the missing experts of two layers at a time, so each slot also
saves staging memory; among the slot sets that `placement.greedy` can make, the largest that fits is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from engine import placement, policy
from engine.config import EngineConfig
from engine.errors import CapacityError, UsageError
from engine.profile import Profile

GIB = 1 << 30
# Until it is measured: what a CUDA context and the loaded kernels take. Seen: 0.3 to 0.6 GiB, more on larger cards.
CONTEXT_BYTES = 640 << 20
# Of a card that no --vram caps: what other programs may still take, and what the driver rounds up.
SPARE_BYTES = 256 << 20
CHUNKS = (4096, 2048, 1024, 512)  # tokens of a prefill step, the longest first
_BUFFERS_SHARE = 8  # a longer chunk is worth one part in so many of the memory that slots could have


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that do not depend on residency.

    context_bytes: the context, loaded kernels and graphs. dense_bytes: weights outside experts. kv_bytes: the
    cache. buffers_bytes: everything else that the engine allocates, tables included.
    """

    context_bytes: int
    dense_bytes: int
    kv_bytes: int
    buffers_bytes: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.context_bytes + self.dense_bytes + self.kv_bytes + self.buffers_bytes


@dataclass(frozen=True, slots=True)
class Share:
    """What the experts get: bytes of all slots and of both staging buffers.

    resident: nothing ever misses, and `placement.everything` is the placement.
    """

    slots_bytes: int
    staging_bytes: int
    resident: bool

    @property
    def bytes(self) -> int:
        """Both together."""
        return self.slots_bytes + self.staging_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. experts_bytes: of all experts, as slots hold them. host_bytes: page-locked.

    cap_bytes: what the device part may not exceed. context_measured: whether there was a device to ask.
    """

    fixed: Fixed
    share: Share
    experts_bytes: int
    host_bytes: int
    cap_bytes: int
    context_measured: bool = True

    @property
    def device_bytes(self) -> int:
        """Everything on the device."""
        return self.fixed.bytes + self.share.bytes

    def to_json(self) -> dict[str, int | bool]:
        """As the Ready and Plan events give it."""
        return {
            "context_bytes": self.fixed.context_bytes,
            "dense_bytes": self.fixed.dense_bytes,
            "kv_bytes": self.fixed.kv_bytes,
            "buffers_bytes": self.fixed.buffers_bytes,
            "staging_bytes": self.share.staging_bytes,
            "slots_bytes": self.share.slots_bytes,
            "device_bytes": self.device_bytes,
            "cap_bytes": self.cap_bytes,
            "experts_bytes": self.experts_bytes,
            "host_bytes": self.host_bytes,
            "context_measured": self.context_measured,
        }


@dataclass(frozen=True, slots=True)
class Experts:
    """The MoE layers that slots are shared among; a sequence has one entry a layer.

    counts: int64 [L, E] that placement goes by (zeros: evenly). slot_bytes, staging_bytes: of one expert in a
    slot and in a staging buffer. n_used: active experts, the fewest slots of a layer that are of use: with fewer,
    one token's experts could not all be resident.
    """

    counts: npt.NDArray[np.int64]
    slot_bytes: Sequence[int]
    staging_bytes: Sequence[int]
    n_used: int

    @property
    def bytes(self) -> int:
        """Bytes of all experts in slots."""
        return int(self.counts.shape[1] * sum(self.slot_bytes))


def most_slots(fixed_bytes: int, cap_bytes: int, experts: Experts) -> Share:
    """The largest share of the experts that fits beside `fixed_bytes` under the cap.

    `placement.greedy` (or `uniform`, `lru`) with a budget of the share's `slots_bytes` makes exactly those slots. Where
    not even `n_used` slots a layer fit, CapacityError names the smallest cap that would do.
    """
    if not experts.slot_bytes:
        share = Share(0, 0, resident=True)
        require(fixed_bytes, share, cap_bytes)
        return share
    slots, staging = _choices(experts)
    if fixed_bytes + experts.bytes <= cap_bytes:
        return Share(experts.bytes, 0, resident=True)
    fitting = np.flatnonzero(fixed_bytes + slots + staging <= cap_bytes)
    if not fitting.size:
        raise _refusal(
            f"{experts.n_used} slots a layer", fixed_bytes, smallest_cap(fixed_bytes, experts) - fixed_bytes, cap_bytes
        )
    best = int(fitting[-1])
    return Share(int(slots[best]), int(staging[best]), resident=False)


def smallest_cap(fixed_bytes: int, experts: Experts) -> int:
    """The smallest cap that `most_slots` does not refuse."""
    slots, staging = _choices(experts)
    return fixed_bytes + min(int((slots + staging).min()), experts.bytes)


def share_of(placed: placement.Placement, experts: Experts) -> Share:
    """What a placement takes, whatever the cap."""
    n_expert = experts.counts.shape[1]
    missing = [n_expert - n for n in placed.slots_per_layer]
    staging = 2 * max((n * size for n, size in zip(missing, experts.staging_bytes, strict=True)), default=0)
    return Share(placed.bytes, staging, resident=staging == 0)


def require(fixed_bytes: int, share: Share, cap_bytes: int) -> None:
    """Refuse a share that was asked for and does not fit: CapacityError names the smallest cap that would do."""
    if fixed_bytes + share.bytes > cap_bytes:
        what = "the slots that were asked for" if share.bytes else "the weights"
        raise _refusal(what, fixed_bytes, share.bytes, cap_bytes)


def place(
    options: EngineConfig,
    counts: npt.NDArray[np.int64],
    slot_bytes: Sequence[int],
    budget_bytes: int,
    n_used: int,
    profile: Profile | None,
    *,
    resident: bool = False,
) -> tuple[placement.Placement, policy.Rule, list[str]]:
    """The placement and the rule that the options ask for within a budget, and why what was not asked for was chosen.

    counts: int64 [L, E] of the MoE layers, which `static` and `spark` place by. slot_bytes: of one expert of each.
    resident: pin every expert whatever the policy, for it fits.
    """
    n_expert = counts.shape[1]
    if not slot_bytes:
        why = "the model has no experts: all of it is resident"
        return placement.everything(n_expert, slot_bytes), policy.LRU, [why]
    if options.policy == "all":
        return placement.everything(n_expert, slot_bytes), policy.LRU, []
    if profile is None and options.policy == "static":
        raise UsageError("the policy `static` places by a profile, and none was given", hint="spark calibrate")
    if resident:
        return placement.everything(n_expert, slot_bytes), policy.LRU, ["every expert is resident"]
    if options.policy == "uniform":
        return placement.uniform(n_expert, slot_bytes, budget_bytes), policy.LRU, []
    if options.policy == "lru":
        return placement.lru(n_expert, slot_bytes, budget_bytes), policy.LRU, []
    placed = placement.greedy(counts, slot_bytes, budget_bytes, n_expert_used=n_used)
    if options.policy == "static":
        return placed, policy.LRU, []
    percent = 100.0 * budget_bytes / (n_expert * sum(slot_bytes))
    choice = None if profile is None else profile.choice_for(percent)
    rule = policy.DEFAULT if choice is None or not choice.cache_fraction else policy.Rule(choice.memory)
    if options.cache_slots is not None:
        why = f"{options.cache_slots} cache slots a layer: asked for"
        return placed.with_cache([options.cache_slots] * len(slot_bytes)), rule, [why]
    if choice is not None:
        cache = placement.cache_share(placed.slots_per_layer, choice.cache_fraction)
        why = (
            f"{choice.words}: at {choice.residency_pct:g}% residency {choice.sessions} sessions missed "
            f"{choice.misses:.2f} a token so, {choice.lru:.2f} under LRU and {choice.static:.2f} with everything pinned"
        )
        return placed.with_cache(cache), rule if choice.cache_fraction else policy.LRU, [why]
    if profile is None:
        why = "pin nothing: there is no profile"
    elif profile.split:
        why = "pin nothing: the profile's split is of an earlier version; `spark calibrate` finds what to pin"
    else:
        why = "pin nothing: the profile has no evidence of what to pin"
    return placed.with_cache(placed.slots_per_layer), rule, [why]


def chunks(room_bytes: int, buffers_bytes: Callable[[int], int]) -> list[int]:
    """Tokens of a prefill step, in the order to try: the longest whose buffers leave the room to slots, then shorter.

    room_bytes: of slots, staging and buffers together. buffers_bytes: what buffers take for so many tokens.
    """
    fitting = [n for n in CHUNKS if buffers_bytes(n) * _BUFFERS_SHARE <= room_bytes]
    return fitting or [CHUNKS[-1]]


def gib(n_bytes: int) -> str:
    """Bytes as a value of `--vram` that is enough: thousandths of a GiB, rounded up."""
    return f"{ceil(n_bytes * 1000 / GIB) / 1000:.3f}"


def cap_bytes(vram_gib: float) -> int:
    """The bytes of a `--vram`."""
    return int(vram_gib * GIB)


def _choices(experts: Experts) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Bytes of slots and of staging for `n_used` slots a layer and then for one more at a time, in greedy's order."""
    n_layer, n_expert = experts.counts.shape
    sizes = np.asarray(placement.counted_bytes(experts.counts, experts.slot_bytes), np.int64)
    first = np.where(sizes > 0, min(experts.n_used, n_expert), 0)
    layer, rank = placement.order(experts.counts, sizes.tolist()).T
    added = layer[(rank >= first[layer]) & (sizes[layer] > 0)]
    slots = int(first @ sizes) + np.concatenate(([0], np.cumsum(sizes[added])))
    held = first + np.concatenate(
        (np.zeros((1, n_layer), np.int64), np.cumsum(added[:, None] == np.arange(n_layer), axis=0))
    )
    staging = 2 * ((n_expert - held) * np.asarray(experts.staging_bytes, np.int64)).max(axis=1)
    return slots.astype(np.int64), staging


def _refusal(what: str, fixed_bytes: int, share_bytes: int, cap: int) -> CapacityError:
    needed = fixed_bytes + share_bytes
    return CapacityError(
        f"{what} and the rest of the model take {gib(needed)} GiB of the device ({fixed_bytes / GIB:.2f} GiB without "
        f"experts), and there are {cap / GIB:.2f} GiB",
        hint=f"--vram {gib(needed)} is the least; a smaller --ctx, --chunk or --kv-type q8_0 needs less",
    )
