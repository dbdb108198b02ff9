"""The memory plan of a device: what a model takes under a hard cap, and how many expert slots that leaves.

Pure arithmetic over byte counts. Prefill stages the missing experts of two layers at a time, so each slot also
saves staging memory; among the slot sets that `placement.best` can make, the largest that fits is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np

from engine.ground.errors import CapacityError
from engine.placing.placement import Experts, Placement

GIB = 1 << 30
# Until it is measured: what a CUDA context and the loaded kernels take. Seen: 0.3 to 0.6 GiB, more on larger cards.
CONTEXT_BYTES = 640 << 20
# Of a card that no --vram caps: what other programs may still take, and what the driver rounds up.
SPARE_BYTES = 256 << 20
CHUNKS = (4096, 2048, 1024, 512)  # tokens of a prefill step, the longest first
PLACES = (16, 8, 4, 2, 1)  # requests at a time, the most first
_PLACES_SHARE = 32  # more than four of them are worth one part in so many of the memory that slots could have
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

    cap_bytes: what the device part may not exceed. context_measured: whether there was a device to ask. drafts_bytes:
    what a drafter or a block that drafts has of weights, cache and buffers. homes_bytes: of host_bytes, the homes of
    KV blocks.
    """

    fixed: Fixed
    share: Share
    experts_bytes: int
    host_bytes: int
    cap_bytes: int
    context_measured: bool = True
    drafts_bytes: int = 0
    homes_bytes: int = 0

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
            "drafts_bytes": self.drafts_bytes,
            "homes_bytes": self.homes_bytes,
        }


def most_slots(fixed_bytes: int, cap_bytes: int, experts: Experts) -> Share:
    """The largest share of the experts that fits beside `fixed_bytes` under the cap.

    Every policy with a budget of the share's `slots_bytes` makes exactly those slots. Where not even `n_used` slots a
    layer fit, CapacityError names the smallest cap that would do.
    """
    if not experts.slot_bytes:
        share = Share(0, 0, resident=True)
        require(fixed_bytes, share, cap_bytes)
        return share
    slots, staging = experts.sets
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
    slots, staging = experts.sets
    return fixed_bytes + min(int((slots + staging).min()), experts.bytes)


def share_of(placed: Placement, experts: Experts) -> Share:
    """What a placement takes, whatever the cap."""
    missing = [experts.n_expert - n for n in placed.slots_per_layer]
    staging = 2 * max((n * size for n, size in zip(missing, experts.staging_bytes, strict=True)), default=0)
    return Share(placed.bytes, staging, resident=staging == 0)


def require(fixed_bytes: int, share: Share, cap_bytes: int) -> None:
    """Refuse a share that was asked for and does not fit: CapacityError names the smallest cap that would do."""
    if fixed_bytes + share.bytes > cap_bytes:
        what = "the slots that were asked for" if share.bytes else "the weights"
        raise _refusal(what, fixed_bytes, share.bytes, cap_bytes)


def chunks(room_bytes: int, buffers_bytes: Callable[[int], int]) -> list[int]:
    """Tokens of a prefill step, in the order to try: the longest whose buffers leave the room to slots, then shorter.

    room_bytes: of slots, staging and buffers together. buffers_bytes: what buffers take for so many tokens.
    """
    fitting = [n for n in CHUNKS if buffers_bytes(n) * _BUFFERS_SHARE <= room_bytes]
    return fitting or [CHUNKS[-1]]


def places(room_bytes: int, experts_bytes: int, most: int, bytes_of: Callable[[int], int]) -> list[int]:
    """Requests at a time, in the order to try: the most whose states and buffers leave the room to slots, then fewer.

    Four are tried whatever they take, and fewer where not even these fit.
    room_bytes: of slots, staging, and what `bytes_of` so many requests take more than one does. experts_bytes: of all
    of them in slots: what is left beside these costs nothing. most: there may be.
    """
    counts = list(PLACES) if most >= PLACES[0] else [most, *(n for n in PLACES if n < most)]
    spare = max(room_bytes // _PLACES_SHARE, room_bytes - experts_bytes)
    return [n for n in counts if n <= 4 or bytes_of(n) <= spare]


def gib(n_bytes: int) -> str:
    """Bytes as a value of `--vram` that is enough: thousandths of a GiB, rounded up."""
    return f"{ceil(n_bytes * 1000 / GIB) / 1000:.3f}"


def cap_bytes(vram_gib: float) -> int:
    """The bytes of a `--vram`."""
    return int(vram_gib * GIB)


def _refusal(what: str, fixed_bytes: int, share_bytes: int, cap: int) -> CapacityError:
    needed = fixed_bytes + share_bytes
    return CapacityError(
        f"{what} and the rest of the model take {gib(needed)} GiB of the device ({fixed_bytes / GIB:.2f} GiB without "
        f"experts), and there are {cap / GIB:.2f} GiB",
        hint=f"--vram {gib(needed)} is the least; a smaller --ctx, --chunk or --kv-type q8_0 needs less",
    )
