"""A reader of host memory that runs on a GPU beside what is measured (cuda/handover.cu), with so much under way."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from engine.ops.cuda.device import Module

READER_BLOCKS = 4
# KiB that the reader's threads have under way, and what makes them: loads of 16 bytes a thread, threads of a block.
UNDER_WAY = {256: (8, 512), 128: (4, 512), 64: (2, 512), 32: (1, 512), 16: (1, 256), 8: (1, 128)}


class Reader:
    """4 blocks that read host memory as fast as they can with so much under way, on a stream of their own."""

    def __init__(self, device: Any, data: np.ndarray, under_way_kib: int = 256) -> None:
        unroll, self.threads = UNDER_WAY[under_way_kib]
        self.device, self.data = device, data
        self.stream = device.stream()
        self.stop = device.page_locked(64)
        self.stop[:] = 0
        self.read = device.upload(np.zeros((READER_BLOCKS, 2), np.uint64))
        self.sink = device.upload(np.zeros(1, np.uint32))
        module = Module("handover.cu") if unroll == 8 else Module("handover.cu", (("UNROLL", str(unroll)),))
        self.kernel = device.kernel(module, "reader")

    def start(self, seconds: float = 60.0) -> None:
        """Begin to read, for so long at most."""
        self.stop[:] = 0
        address, stop = (np.uint64(self.device.pointer(a)) for a in (self.data, self.stop))
        limits = np.int64(seconds * 1e9), np.int64(1 << 62)  # of time alone
        arguments = (address, np.int64(self.data.nbytes), stop, *limits, self.read, self.sink)
        with self.device.on(self.stream):
            self.kernel(READER_BLOCKS, self.threads, arguments)

    def end(self) -> float:
        """GB/s that it read."""
        self.stop[:] = 1
        self.device.runtime.streamSynchronize(self.stream.handle)
        counts = self.device.read(self.read).astype(float)
        return float(sum(n / max(ns, 1.0) for n, ns in counts))

    def rate(self, seconds: float = 0.3) -> float:
        """GB/s while nothing else runs."""
        self.start()
        time.sleep(seconds)
        return self.end()
