"""Host memory as a device: what the CPU and the reference backend compute on.

It is a `Memory` (device.py), which is all that loading, the cache and the residency use outside ops, so they are
written once. Nothing is copied that already lies in host memory.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engine.ops.device import Dim

_madvise: Any = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostDevice:
    """Arrays are NumPy's, a copy is a memmove, and everything has happened when a call returns."""

    name = "host memory"

    def empty(self, shape: Dim, dtype: DTypeLike) -> NDArray[Any]:
        """An array of zeros: pages that nobody writes cost nothing."""
        return np.zeros(shape, dtype)

    def page_locked(self, n_bytes: int) -> NDArray[np.uint8]:
        """Ordinary memory: there is nobody else to read it."""
        return np.zeros(n_bytes, np.uint8)

    def host_array(self, n_bytes: int, keep_bytes: int) -> NDArray[np.uint8]:
        """Ordinary memory."""
        return np.empty(n_bytes, np.uint8)

    def upload(self, host: NDArray[Any]) -> NDArray[Any]:
        """The array itself, not a copy."""
        return host

    def write(self, array: NDArray[Any], host: NDArray[Any]) -> None:
        """Copy `host` into `array`."""
        if array is not host:
            array[...] = host

    def read(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array itself: a view that later steps overwrite."""
        return array

    def pointer(self, array: NDArray[Any]) -> int:
        """The address of an array's first element."""
        return int(array.__array_interface__["data"][0])

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        """Copy between two addresses."""
        ctypes.memmove(to, source, n_bytes)

    def copy_rows(self, to: int, to_pitch: int, source: int, source_pitch: int, n_bytes: int, n_rows: int) -> None:
        """Copy n_bytes of each of some rows, which begin a pitch apart."""
        for row in range(n_rows):
            self.copy(to + row * to_pitch, source + row * source_pitch, n_bytes)

    def set_bytes(self, to: int, byte: int, n_bytes: int) -> None:
        """Fill memory at an address with one byte."""
        ctypes.memset(to, byte, n_bytes)

    def release(self, address: int, n_bytes: int) -> int:
        """Let the kernel have whole pages, which are zeros when they are read again."""
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        n_whole = (address + n_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if n_whole <= 0 or _madvise is None or _madvise(begin, n_whole, mmap.MADV_DONTNEED):
            return 0
        return n_whole

    def restore(self) -> None:
        """Pages come by themselves."""

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Arrays release themselves."""
