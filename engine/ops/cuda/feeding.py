"""The inputs of a step, small arrays of the host, brought to the device by one kernel instead of a copy for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.ops.cuda.device import Array, Device, Module

RING_BYTES = 1 << 20  # page-locked; a step of a few tokens takes some KiB, and its block tables
THREADS = 256
MAX_LAYOUTS, NOTED_BYTES = 1024, 1 << 16  # that are remembered, and of each at most
FEED = Module("feed.cu")
_WORD, _ROW = 4, 16  # bytes that places are aligned to, and of a row of the table ahead of the data


class _Layout(NamedTuple):
    """Of arrays that are fed together, which it keeps: what the kernel reads, places to write to, and shapes.

    packed: table and data, bytes. parts: of each array its shape, its dtype and the view of `packed` that has its data.
    n_pieces: rows of the table.
    """

    arrays: tuple[Array, ...]
    packed: NDArray[np.uint8]
    parts: list[tuple[tuple[int, ...], np.dtype[Any], NDArray[Any]]]
    n_pieces: int


class Feeding:
    """Writes several arrays at once, in order with the current stream; what was given may change afterwards."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._ring = device.page_locked(RING_BYTES)
        self._address = device.pointer(self._ring)
        self._at = 0
        self._layouts: dict[tuple[int, ...], _Layout] = {}  # by the arrays' ids

    def __call__(self, pairs: Sequence[tuple[Array, NDArray[Any]]]) -> None:
        """Write host[i] to array[i] for each pair, of the same shape and dtype; what is large goes the usual way.

        Rows of a matrix of words may be apart.
        """
        # A step waits for this, so as little as can be is done for each array.
        layout = self._layouts.get(tuple([id(array) for array, _ in pairs])) or self._new_layout(pairs)
        for (shape, dtype, place), (_, host) in zip(layout.parts, pairs, strict=True):
            if host.shape != shape or host.dtype != dtype:
                raise ValueError(f"{host.dtype} {host.shape} fed to {dtype} {shape}")
            place[...] = host
        n_bytes = len(layout.packed)
        if n_bytes > RING_BYTES // 4:
            for array, host in pairs:
                whole = array.ndim == 1 or array.flags.c_contiguous
                for to, values in [(array, host)] if whole else zip(array, host, strict=True):
                    self.device.write(to, values)
            return
        if self._at + n_bytes > RING_BYTES:
            self.device.synchronize()  # what the ring holds may still be read; once in hundreds of steps
            self._at = 0
        if layout.n_pieces:
            self._ring[self._at : self._at + n_bytes] = layout.packed
            kernel = self.device.kernel(FEED, "feed")
            kernel(layout.n_pieces, THREADS, (np.uint64(self._address + self._at),))
            self._at += -(-n_bytes // _ROW) * _ROW

    def _new_layout(self, pairs: Sequence[tuple[Array, NDArray[Any]]]) -> _Layout:
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()
        table, begins, end = list[int](), list[int](), 0
        for array, _host in pairs:
            n_rows = 1 if array.ndim == 1 or array.flags.c_contiguous else len(array)
            n_bytes, begin = array.size * array.dtype.itemsize // max(n_rows, 1), end
            for row in range(n_rows if n_bytes else 0):
                to = self.device.pointer(array) + row * array.strides[0]
                table += to, n_bytes << 32 | begin + row * n_bytes
            begins.append(begin)
            end += -(-n_rows * n_bytes // _WORD) * _WORD
        packed = np.zeros(8 * len(table) + end, np.uint8)
        packed[: 8 * len(table)] = np.array(table, np.uint64).view(np.uint8)
        parts = []
        for (array, _), begin in zip(pairs, begins, strict=True):
            data = packed[8 * len(table) + begin :][: array.size * array.dtype.itemsize]
            parts.append((array.shape, np.dtype(array.dtype), data.view(array.dtype).reshape(array.shape)))
        arrays = tuple(array for array, _ in pairs)
        layout = _Layout(arrays, packed, parts, len(table) // 2)
        if len(packed) <= NOTED_BYTES:
            self._layouts[tuple(map(id, arrays))] = layout
        return layout
