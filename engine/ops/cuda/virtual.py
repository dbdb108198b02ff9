"""Device memory at addresses that stay while the memory behind them goes and comes.

CUDA's virtual memory management (driver API, "Virtual Memory Management"): addresses are reserved once, and pieces of
memory are mapped to them one by one, so a part can be unmapped and given back to others. CuPy has no bindings of it.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any

PIECE_BYTES = 64 << 20  # of memory that is mapped at a time, and the last one may be less
GRANULE_BYTES = 2 << 20  # a multiple of any device's granularity
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Location(ctypes.Structure):
    _fields_ = (("kind", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("kind", c_int), ("handles", c_int), ("location", _Location), ("win32", c_void_p), ("flags", _Flags),
    )  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


class OutOfMemoryError(Exception):
    """The device has not so much memory now."""


class VirtualMemory:
    """`n_bytes` of a device's memory from `address` on, to the next 2 MiB, all of it there at first.

    driver: libcuda; None: the machine's. Raises OSError where there is none, OutOfMemoryError where memory is short,
    and RuntimeError, with the driver's number, for anything else.
    """

    def __init__(self, n_bytes: int, ordinal: int, driver: Any = None) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1") if driver is None else driver
        self._properties = _Properties(kind=_PINNED, location=_Location(_ON_DEVICE, ordinal))
        self._access = _Access(_Location(_ON_DEVICE, ordinal), _READ_WRITE)
        self.n_bytes = max(1, -(-n_bytes // GRANULE_BYTES)) * GRANULE_BYTES
        self._pieces: list[int | None] = [None] * -(-self.n_bytes // PIECE_BYTES)  # handles of what is mapped
        base = c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(base), c_size_t(self.n_bytes), c_size_t(0), c_uint64(0),
                   c_uint64(0))  # fmt: skip
        self.address = base.value
        try:
            self.restore()
        except BaseException:
            self.close()
            raise

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._cuda, name)(*arguments)
        if error == _OUT_OF_MEMORY:
            raise OutOfMemoryError(name)
        if error:
            raise RuntimeError(f"{name} failed with CUDA error {error}")

    @property
    def missing_bytes(self) -> int:
        """Bytes that are not mapped."""
        return sum(self._size(i) for i, piece in enumerate(self._pieces) if piece is None)

    def _size(self, i: int) -> int:
        return min(PIECE_BYTES, self.n_bytes - i * PIECE_BYTES)

    def release(self, address: int, n_bytes: int) -> int:
        """Give back the pieces that lie in a range whole; how many bytes. Nothing may be using them."""
        begin, end, released = address - self.address, address - self.address + n_bytes, 0
        for i, piece in enumerate(self._pieces):
            at, size = i * PIECE_BYTES, self._size(i)
            if piece is not None and begin <= at and at + size <= end:
                self._unmap(i)
                released += size
        return released

    def restore(self) -> None:
        """Map new memory wherever there is none; what was mapped before OutOfMemoryError stays."""
        for i, piece in enumerate(self._pieces):
            if piece is None:
                self._map(i)

    def close(self) -> None:
        """Give back everything, the addresses, too; may be called twice."""
        for i, piece in enumerate(self._pieces):
            if piece is not None:
                self._unmap(i)
        if self._pieces:
            self._call("cuMemAddressFree", c_uint64(self.address), c_size_t(self.n_bytes))
        self._pieces = []

    def _map(self, i: int) -> None:
        handle, at, size = c_uint64(), c_uint64(self.address + i * PIECE_BYTES), c_size_t(self._size(i))
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), c_uint64(0))
        try:
            self._call("cuMemMap", at, size, c_size_t(0), handle, c_uint64(0))
            self._pieces[i] = handle.value
            self._call("cuMemSetAccess", at, size, ctypes.byref(self._access), c_size_t(1))
        except BaseException:
            if self._pieces[i] is None:
                self._call("cuMemRelease", handle)
            else:
                self._unmap(i)
            raise

    def _unmap(self, i: int) -> None:
        handle, self._pieces[i] = self._pieces[i], None
        self._call("cuMemUnmap", c_uint64(self.address + i * PIECE_BYTES), c_size_t(self._size(i)))
        self._call("cuMemRelease", c_uint64(handle or 0))
