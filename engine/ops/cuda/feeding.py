"""The inputs of a step, small arrays of the host, brought to the device by one kernel instead of a copy for each."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.ops.cuda.device import Array, Device, Module

RING_BYTES = 1 << 20  # page-locked; a step of a few tokens takes some KiB, and its block tables
THREADS = 256
MAX_PLACES = 4096  # that are remembered
FEED = Module("feed.cu")
_WORD, _ROW = 4, 16  # bytes that places are aligned to, and of a row of the table ahead of the data


class _Place(NamedTuple):
    """Of an array that is fed, which it keeps: `n_rows` pieces whose addresses are `apart` bytes apart."""

    array: Array
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    address: int
    n_rows: int
    apart: int


class Feeding:
    """Writes several arrays at once, in order with the current stream; what was given may change afterwards."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._ring = device.page_locked(RING_BYTES)
        self._address = device.pointer(self._ring)
        self._at = 0
        self._places: dict[int, _Place] = {}  # by id of an array: asking an array of a device for them takes longer

    def __call__(self, pairs: Sequence[tuple[Array, NDArray[Any]]]) -> None:
        """Write host[i] to array[i] for each pair, of the same shape and dtype; what is large goes the usual way.

        Rows of a matrix of words may be apart.
        """
        # A step waits for this, so it is written for the interpreter: no NumPy but to make bytes.
        table, parts, end = list[int](), list[bytes](), 0
        for array, host in pairs:
            place = self._place(array)
            if place.shape != host.shape or place.dtype != host.dtype:
                raise ValueError(f"{host.dtype} {host.shape} fed to {place.dtype} {place.shape}")
            data = host.tobytes()
            if not data:
                continue
            n_bytes = len(data) // place.n_rows
            for row in range(place.n_rows):
                table += place.address + row * place.apart, n_bytes << 32 | end + row * n_bytes
            parts.append(data.ljust(-(-len(data) // _WORD) * _WORD, b"\0"))
            end += len(parts[-1])
        packed = struct.pack(f"={len(table)}Q", *table) + b"".join(parts)
        if len(packed) > RING_BYTES // 4:
            for array, host in pairs:
                whole = self._place(array).n_rows == 1
                for to, values in [(array, host)] if whole else zip(array, host, strict=True):
                    self.device.write(to, values)
            return
        if self._at + len(packed) > RING_BYTES:
            self.device.synchronize()  # what the ring holds may still be read; once in hundreds of steps
            self._at = 0
        if packed:
            self._ring[self._at : self._at + len(packed)] = np.frombuffer(packed, np.uint8)
            kernel = self.device.kernel(FEED, "feed")
            kernel(len(table) // 2, THREADS, (np.uint64(self._address + self._at),))
            self._at += -(-len(packed) // _ROW) * _ROW

    def _place(self, array: Array) -> _Place:
        place = self._places.get(id(array))
        if place is None:
            if len(self._places) >= MAX_PLACES:
                self._places.clear()
            n_rows = 1 if array.ndim == 1 or array.flags.c_contiguous else len(array)
            place = _Place(array, array.shape, array.dtype, self.device.pointer(array), n_rows, array.strides[0])
            self._places[id(array)] = place
        return place
