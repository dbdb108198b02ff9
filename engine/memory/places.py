"""Where the blocks of a group lie that has more of them than its pool on the device: there, or at home in host memory.

A block keeps its number wherever it lies, and results depend on no place. What is written lies in the pool. A block
that is *sealed*, so that nobody writes it again, has its bytes copied home once, when its place is wanted, and may come
back. No tensor is looked at here; engine/memory/kv.py copies what this says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from engine.ground.errors import CapacityError
from engine.ops import I32

MOST_LEAVE = 16  # blocks that leave the pool at a time: copies of neighbors are one
_PART = 64  # and no more than one in so many


class Places:
    """The places of n_blocks blocks, n_pool of which can be in the pool.

    where: int32 [n_blocks], a place in the pool, or n_pool + block at home, as attention takes it. make_room: called
    when no place is free; lets some blocks leave and returns True, or returns False.
    """

    def __init__(self, n_blocks: int, n_pool: int) -> None:
        self.n_pool = n_pool
        self.where: I32 = np.arange(n_pool, n_pool + n_blocks, dtype=np.int32)
        self.make_room: Callable[[], bool] | None = None
        self._free = list(range(n_pool))  # a heap, as those of BlockPool: neighbors get neighboring places
        self._sealed = np.zeros(n_blocks, bool)
        self._at_home = np.zeros(n_blocks, bool)  # home has the bytes, too
        self._used = np.zeros(n_blocks, np.int64)
        self._now = 0

    @property
    def free_places(self) -> int:
        """Places in the pool that no block has."""
        return len(self._free)

    def enter(self, block: int) -> None:
        """Give a block that nobody held a place in the pool, to be written; CapacityError where none can be made."""
        while not self._free:
            if self.make_room is None or not self.make_room():
                raise CapacityError(f"all {self.n_pool} blocks of the pool are being written or read")
        self.where[block] = heappop(self._free)
        self._sealed[block] = self._at_home[block] = False
        self._now += 1
        self._used[block] = self._now

    def leave(self, block: int) -> None:
        """Nobody holds a block any more."""
        if self.where[block] < self.n_pool:
            heappush(self._free, int(self.where[block]))
        self.where[block] = self.n_pool + block
        self._sealed[block] = False

    def use(self, blocks: Iterable[int] | I32) -> None:
        """Note that blocks were wanted now."""
        self._now += 1
        self._used[np.asarray(blocks, np.int64)] = self._now

    def seal(self, blocks: Iterable[int] | I32) -> None:
        """Nobody writes these blocks again."""
        self._sealed[np.asarray(blocks, np.int64)] = True

    def leaving(self, held: NDArray[np.bool_], read: NDArray[np.bool_], most: int | None = None) -> I32:
        """The sealed blocks that leave the pool next: those that are not read first, then the least recently used.

        held, read: bool [n_blocks], what is to stay, and what sequences that are alive read. most: None: a few.
        """
        there = np.flatnonzero((self.where < self.n_pool) & self._sealed & ~held)
        order = np.lexsort((there, self._used[there], read[there]))
        if most is None:
            most = max(1, min(MOST_LEAVE, self.n_pool // _PART))
        found: I32 = np.sort(there[order[:most]]).astype(np.int32)
        return found

    def away(self, blocks: I32) -> I32:
        """Those of some blocks that are at home, in their order."""
        found: I32 = blocks[self.where[blocks] >= self.n_pool]
        return found

    def send_home(self, blocks: I32) -> tuple[I32, I32]:
        """Let blocks leave the pool; those whose bytes are to be copied, and the places that these had."""
        new: I32 = blocks[~self._at_home[blocks]]
        had: I32 = self.where[new]
        for place in self.where[blocks].tolist():
            heappush(self._free, place)
        self._at_home[blocks] = True
        self.where[blocks] = blocks + self.n_pool
        return new, had

    def bring_back(self, blocks: I32) -> None:
        """Give blocks that are at home free places, of which there are as many."""
        assert len(blocks) <= len(self._free)
        self.where[blocks] = [heappop(self._free) for _ in range(len(blocks))]

    @property
    def n_away(self) -> int:
        """Blocks that somebody holds and that are at home."""
        return int((self._sealed & (self.where >= self.n_pool)).sum())
