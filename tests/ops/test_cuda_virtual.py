"""Device memory whose pieces go and come, over a driver that keeps books."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ops.cuda import virtual
from engine.ops.cuda.virtual import PIECE_BYTES, OutOfMemoryError, VirtualMemory

BASE = 7 << 40


class Driver:
    """libcuda's calls of virtual memory; `limit`: pieces that there are; `broken`: a call that fails."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit, self.broken = limit, ""
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}  # address to handle
        self.readable: set[int] = set()
        self.reserved: dict[int, int] = {}
        self._next = 100

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name == self.broken:
                return 999
            return int(getattr(self, "_" + re.sub("(?<=[a-z])(?=[A-Z])", "_", name[2:]).lower())(*arguments))

        return call

    def _mem_address_reserve(self, to: Any, n_bytes: Any, *_: Any) -> int:
        to._obj.value = BASE
        self.reserved[BASE] = n_bytes.value
        return 0

    def _mem_address_free(self, address: Any, n_bytes: Any) -> int:
        assert not self.mapped and self.reserved.pop(address.value) == n_bytes.value
        return 0

    def _mem_create(self, to: Any, n_bytes: Any, properties: Any, flags: Any) -> int:
        made = properties._obj
        assert 0 < n_bytes.value <= PIECE_BYTES and n_bytes.value % (2 << 20) == 0
        assert (made.kind, made.location.kind, made.location.id) == (1, 1, 3)
        if len(self.handles) >= self.limit:
            return 2
        self._next += 1
        to._obj.value = self._next
        self.handles.add(self._next)
        return 0

    def _mem_map(self, at: Any, n_bytes: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert handle.value in self.handles and at.value not in self.mapped
        assert at.value + n_bytes.value <= BASE + self.reserved[BASE]
        assert BASE <= at.value < BASE + self.reserved[BASE] and (at.value - BASE) % PIECE_BYTES == 0
        self.mapped[at.value] = handle.value
        return 0

    def _mem_set_access(self, at: Any, n_bytes: Any, access: Any, n: Any) -> int:
        assert at.value in self.mapped and (access._obj.location.id, access._obj.flags, n.value) == (3, 3, 1)
        self.readable.add(at.value)
        return 0

    def _mem_unmap(self, at: Any, n_bytes: Any) -> int:
        self.mapped.pop(at.value)
        self.readable.discard(at.value)
        return 0

    def _mem_release(self, handle: Any) -> int:
        self.handles.remove(handle.value)
        return 0

    def check(self, memory: VirtualMemory, there: set[int]) -> None:
        assert set(self.mapped) == self.readable == {BASE + i * PIECE_BYTES for i in there}
        assert sorted(self.mapped.values()) == sorted(self.handles)
        sizes = [min(PIECE_BYTES, self.reserved[BASE] - at + BASE) for at in self.mapped]
        assert memory.missing_bytes == self.reserved[BASE] - sum(sizes)


def test_the_layouts_are_the_drivers() -> None:
    """Sizes of CUmemAllocationProp and CUmemAccessDesc in cuda.h."""
    assert ctypes.sizeof(virtual._Properties) == 32 and ctypes.sizeof(virtual._Access) == 12
    assert virtual._Properties.flags.offset == 24 and virtual._Properties.win32.offset == 16


@given(
    st.integers(1, 9),
    st.integers(0, 63 << 20),
    st.lists(st.tuples(st.integers(-5, 10 << 20), st.integers(0, 9 << 20)), max_size=6),
)
def test_whole_pieces_of_a_range_go_and_come(n: int, less: int, ranges: list[tuple[int, int]]) -> None:
    driver = Driver()
    memory = VirtualMemory(n * PIECE_BYTES - less, 3, driver)
    assert 0 <= memory.n_bytes - (n * PIECE_BYTES - less) < 2 << 20
    there, end = set(range(n)), memory.n_bytes
    driver.check(memory, there)
    for begin, size in ranges:
        begin, size = begin * 64, size * 64
        ends = {i: min((i + 1) * PIECE_BYTES, end) for i in there}
        inside = {i for i in there if begin <= i * PIECE_BYTES and ends[i] <= begin + size}
        assert memory.release(BASE + begin, size) == sum(ends[i] - i * PIECE_BYTES for i in inside)
        there -= inside
        driver.check(memory, there)
    memory.restore()
    driver.check(memory, set(range(n)))
    memory.close()
    memory.close()
    assert not driver.handles and not driver.mapped and not driver.reserved


def test_what_is_short_can_be_tried_again() -> None:
    driver = Driver()
    memory = VirtualMemory(5 * PIECE_BYTES, 3, driver)
    assert memory.release(BASE, 5 * PIECE_BYTES) == 5 * PIECE_BYTES
    driver.limit = 2
    with pytest.raises(OutOfMemoryError):
        memory.restore()
    driver.check(memory, {0, 1})
    driver.limit = 5
    memory.restore()
    driver.check(memory, set(range(5)))


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_driver_that_fails_is_named_and_nothing_is_left(call: str) -> None:
    driver = Driver()
    driver.broken = call
    with pytest.raises(RuntimeError, match=f"{call} failed with CUDA error 999"):
        VirtualMemory(2 * PIECE_BYTES, 3, driver)
    assert not driver.handles and not driver.mapped and not driver.reserved
