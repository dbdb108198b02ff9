"""Memory of an idle engine that goes back, and comes again with the next request (docs/kv.md).

Slots are filled from the file again. Blocks that somebody holds go home where they have one, and are copied to host
memory else. Arrays keep their addresses, so nothing that knows them is made anew: tables, graphs, tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.ground.errors import CapacityError
from engine.memory.kv import KVCache
from engine.memory.residency import Residency
from engine.ops.device import Memory

_BLOCKS = 64  # that are copied at a time

Copies = list[tuple[int, list[int], NDArray[np.uint8]]]  # a group, some of its blocks, their bytes


class Parking:
    """What `device` holds for slots and cache, given back while nothing runs.

    released_bytes: that are not there now; 0 where all is.
    """

    def __init__(self, device: Memory, residency: Residency, kv: KVCache) -> None:
        self._device, self._residency, self._kv = device, residency, kv
        self._copies: Copies = []
        self.released_bytes = 0
        self.is_parked = False

    def park(self) -> int:
        """Give memory back; how many bytes. Nobody may use slots or cache before `unpark` has ended."""
        assert not self.is_parked
        self._device.synchronize()
        arrays = [self._residency.memory]
        try:
            self._copies = self._copied()
            arrays += self._kv.arrays()
        except (CapacityError, MemoryError):  # there is no host memory for copies: the cache stays
            self._copies = []
        self.released_bytes = sum(self._device.release(self._device.pointer(a), int(a.nbytes)) for a in arrays)
        self.is_parked = True
        return self.released_bytes

    def unpark(self) -> Iterator[None]:
        """Take memory again and fill it, some with each step, of less than a second or so.

        CapacityError where it is not to be had; then all of it can be tried again.
        """
        assert self.is_parked
        self._device.restore()
        yield from self._residency.refill()
        for group, blocks, data in self._copies:
            self._kv.write_blocks(group, blocks, data)
        self._device.synchronize()
        self._copies = []
        self.released_bytes = 0
        self.is_parked = False

    def _copied(self) -> Copies:
        self._kv.send_home()
        return [
            (group, some, self._kv.read_blocks(group, some))
            for group in range(len(self._kv.groups))
            for blocks in [self._kv.held_in_pool(group)]
            for some in (blocks[i : i + _BLOCKS] for i in range(0, len(blocks), _BLOCKS))
        ]
