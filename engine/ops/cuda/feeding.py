"""The inputs of a step, small arrays of the host, brought to the device by one kernel instead of a copy for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.ops.cuda.device import Array, Device, Module

RING_BYTES = 1 << 20  # page-locked; a step of a few tokens takes some KiB, and its block tables
THREADS = 256
_WORD, _ROW = 4, 16  # bytes that places are aligned to, and of a row of the table ahead of the data


class Feeding:
    """Writes several arrays at once, in order with the current stream; what was given may change afterwards."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._ring = device.page_locked(RING_BYTES)
        self._address = device.pointer(self._ring)
        self._at = 0

    def __call__(self, pairs: Sequence[tuple[Array, NDArray[Any]]]) -> None:
        """Write host[i] to array[i] for each pair, of the same shape and dtype; what is large goes the usual way."""
        pairs = [(array, host) for array, host in pairs if host.size]
        offsets = np.cumsum([_ROW * len(pairs), *(-(-host.nbytes // _WORD) * _WORD for _, host in pairs)]).tolist()
        if not pairs or offsets[-1] > RING_BYTES // 4:
            for array, host in pairs:
                self.device.write(array, host)
            return
        if self._at + offsets[-1] > RING_BYTES:
            self.device.synchronize()  # what the ring holds may still be read; once in hundreds of steps
            self._at = 0
        packed, table = self._ring[self._at : self._at + offsets[-1]], []
        for (array, host), offset in zip(pairs, offsets, strict=False):
            if array.shape != host.shape or array.dtype != host.dtype:
                raise ValueError(f"{host.dtype} {host.shape} fed to {array.dtype} {array.shape}")
            packed[offset : offset + host.nbytes] = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
            table += [self.device.pointer(array), host.nbytes << 32 | offset]
        packed[: _ROW * len(pairs)].view(np.uint64)[:] = table
        kernel = self.device.kernel(Module("feed.cu"), "feed")
        kernel(len(pairs), THREADS, (np.uint64(self._address + self._at),))
        self._at += -(-offsets[-1] // _ROW) * _ROW
