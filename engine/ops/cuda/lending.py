"""Page-locked memory that is lent, and lent again once nobody holds it.

It is locked in large pieces, since locking costs milliseconds a call and several threads only help with large ones.
Pieces are cut to what is asked for, and what comes back is joined with its neighbors: whatever sizes come and go,
nothing is locked anew for that.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from ctypes import c_uint8

import numpy as np

from engine.ground.errors import CapacityError
from engine.ops import U8
from engine.ops.cuda.memory import HUGE_PAGE_BYTES, PageLocked, allocate

LEAST_BYTES = 32 << 20  # that are locked at a time, if that may be: as much again as there is, up to
MOST_BYTES = 256 << 20
_ALIGN_BYTES = 4096


class Lending:
    """Arrays in page-locked memory, each of which is free again once neither it nor a view of it is held.

    settle: waits until no copy is under way; called before memory is unlocked.
    """

    def __init__(self, device: int, settle: Callable[[], None]) -> None:
        self._device, self._settle = device, settle
        self.n_bytes = 0  # that are locked
        self._pieces: dict[int, PageLocked] = {}  # by address
        self._free: list[tuple[int, int]] = []  # addresses, ascending, and bytes; no two of one piece touch
        self._sizes: list[tuple[int, int]] = []  # the same by bytes, ascending, and addresses
        self._whole: set[int] = set()  # addresses of pieces of which nothing is held
        self._back: deque[tuple[int, int]] = deque()  # ranges, as they came; any thread may add one

    def take(self, n_bytes: int, keep_bytes: int) -> U8:
        """Memory for n_bytes, as it was left; CapacityError where the machine gives no more.

        While more than keep_bytes are locked, or would be, pieces of which nothing at all is held go.
        """
        taken = max(1, -(-n_bytes // _ALIGN_BYTES)) * _ALIGN_BYTES
        self._join()
        if self.n_bytes > keep_bytes:
            self._unlock(keep_bytes)
        address = self._cut(taken)
        if address is None:
            self._grow(taken, keep_bytes)
            address = self._cut(taken)
            assert address is not None
        # Views of the array hold it, since what is behind it is no array of NumPy's.
        lent: U8 = np.ctypeslib.as_array((c_uint8 * n_bytes).from_address(address))
        weakref.finalize(lent, self._back.append, (address, taken)).atexit = False
        return lent

    def _join(self) -> None:
        """Let what came back be free."""
        while self._back:
            address, n_bytes = self._back.popleft()
            at = bisect_left(self._free, (address, 0))
            end = address + n_bytes
            if at < len(self._free) and self._free[at][0] == end and end not in self._pieces:
                n_bytes += self._remove(at)[1]
            if at and sum(self._free[at - 1]) == address and address not in self._pieces:
                address, n = self._remove(at - 1)
                n_bytes += n
            self._add(address, n_bytes)

    def _add(self, address: int, n_bytes: int) -> None:
        """Let a range be free that touches no other of its piece."""
        insort(self._free, (address, n_bytes))
        insort(self._sizes, (n_bytes, address))
        piece = self._pieces.get(address)
        if piece is not None and piece.array.nbytes == n_bytes:
            self._whole.add(address)

    def _remove(self, at: int) -> tuple[int, int]:
        """Let a range of `_free` be free no more, and return it."""
        address, n_bytes = self._free.pop(at)
        del self._sizes[bisect_left(self._sizes, (n_bytes, address))]
        self._whole.discard(address)
        return address, n_bytes

    def _cut(self, n_bytes: int) -> int | None:
        """Take so much of the smallest range that has it; None: none has."""
        at = bisect_left(self._sizes, (n_bytes, 0))
        if at == len(self._sizes):
            return None
        n, address = self._sizes[at]
        self._remove(bisect_left(self._free, (address, 0)))
        if n > n_bytes:
            self._add(address + n_bytes, n - n_bytes)
        return address

    def _grow(self, n_bytes: int, keep_bytes: int) -> None:
        least = -(-n_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        if self.n_bytes + least > keep_bytes:
            self._unlock(keep_bytes - least)
        wanted = min(MOST_BYTES, max(LEAST_BYTES, self.n_bytes), keep_bytes - self.n_bytes)
        if wanted >= least + HUGE_PAGE_BYTES:
            with contextlib.suppress(CapacityError):
                self._lock(wanted // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
                return
        try:
            self._lock(least)
        except CapacityError:
            self._unlock(0)
            self._lock(least)

    def _lock(self, n_bytes: int) -> None:
        # Nobody waits for memory that only saves time.
        piece = allocate(n_bytes, self._device, by_driver_bytes=HUGE_PAGE_BYTES, seams=False, growth_s=0.0)
        self._pieces[piece.device_pointer] = piece
        self.n_bytes += piece.array.nbytes
        self._add(piece.device_pointer, n_bytes)

    def _unlock(self, keep_bytes: int) -> None:
        """Give pieces back of which nothing is held, until no more than keep_bytes are locked."""
        for address in sorted(self._whole):
            if self.n_bytes <= keep_bytes:
                return
            self._settle()
            self._remove(bisect_left(self._free, (address, 0)))
            piece = self._pieces.pop(address)
            self.n_bytes -= piece.array.nbytes
            piece.close()

    def close(self) -> None:
        """Unlock everything, whoever holds it."""
        for piece in self._pieces.values():
            piece.close()
        self.n_bytes, self._pieces, self._free, self._sizes = 0, {}, [], []
        self._whole, self._back = set(), deque()
