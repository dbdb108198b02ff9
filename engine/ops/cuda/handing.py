"""What it takes to hand an expert to the CPU and back, and to bring one over PCIe, on this machine (cuda/handover.cu).

A step of some layers is captured in which each posts a job without rows and waits for its answer; stamps of the GPU's
clock tell how long. Beside it a few blocks may read host memory as fast as they can, which an answer waits behind. What
PCIe takes is the rate of as many blocks as copy a missed expert.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from engine.ops import Limits
from engine.ops.cuda.cpu_experts import CpuExperts
from engine.ops.cuda.device import Device, Graph, Module
from engine.ops.jobs import MAX_RECORDS, Job

MODULE = Module("handover.cu", (("UNROLL", "2"),))
LAYERS, BLOCKS, THREADS = 24, 32, 256
READER_BLOCKS, READER_THREADS, READ_BYTES = 32, 256, 32  # as `gate_up` has; bytes of a thread under way
# Of these while hand-overs are timed: the answer that is waited for comes when most has been copied, so few reads are
# under way (docs/misses.md, "The division").
LATE_BLOCKS = 8
BEFORE_NS = 2000  # of work between a layer and the post of the next
BOUND_NS = 20_000_000  # after which a job is taken back
MOST_TAKEN = LAYERS // 4  # or nothing is measured
FIRST_BYTES, BESIDE_S = 1 << 20, 0.02  # that a block reads to tell the rate, and how long, then, beside a step
MOST_S = 0.1  # that it reads, however slowly
RUNS = 2  # the last one counts


@dataclass(frozen=True, slots=True)
class Measured:
    """us of a hand-over while nothing reads host memory, and while others do; GB/s of these; None: not known."""

    handover_us: float | None
    busy_us: float | None
    pcie_gb_per_s: float | None


class HandOver:
    """Measures with the ring of `cpu`, while no step is under way."""

    def __init__(self, device: Device, limits: Limits, cpu: CpuExperts) -> None:
        self.device, self.cpu, self.columns = device, cpu, limits.n_embd
        D = limits.n_embd
        self._kernels = {name: device.kernel(MODULE, name) for name in ("fill", "post", "fold", "reader")}
        self._q, self._d = device.empty(D, np.uint8), device.empty(max(1, D // 32), np.float32)
        self._x = device.empty(D, np.float32)
        self._counter, self._relayed = device.empty(1, np.uint64), device.empty(1, np.uint64)
        self._stamps = device.empty((MAX_RECORDS, 2), np.uint64)
        self._failed, self._taken = device.empty(1, np.int32), device.empty(1, np.int32)
        self._read, self._sink = device.empty((READER_BLOCKS, 2), np.uint64), device.empty(1, np.uint32)
        self._stream = device.stream()

    def measure(self, memory: NDArray[np.uint8]) -> Measured:
        """All of it; memory: page-locked, that nobody writes meanwhile."""
        graph = self.device.capture(self._enqueue)
        idle_us = self._of(graph)
        rate = None
        if self._read_some(memory, FIRST_BYTES, READER_BLOCKS):
            self.device.synchronize()
            rate = self._rate()
        busy_us = self._of(graph, memory, int(rate * 1e9 * BESIDE_S) // LATE_BLOCKS) if rate else None
        return Measured(idle_us, busy_us, rate)

    def _enqueue(self) -> None:
        at, kernels = self.cpu.places, self._kernels
        ring, inputs, outputs = np.uint64(self.cpu.ring.address), np.uint64(at.inputs), np.uint64(at.outputs)
        for layer in range(LAYERS):
            kernels["fill"](BLOCKS, THREADS, (np.int64(BEFORE_NS),), overlap=layer > 0)
            kernels["post"](
                1, THREADS,
                (ring, MAX_RECORDS, self._counter, 1, 1, self._q, self._d, self.columns, inputs, self._stamps),
                overlap=True,
            )  # fmt: skip
            kernels["fold"](
                BLOCKS, THREADS,
                (ring, MAX_RECORDS, self._counter, 1, 2, self._relayed, np.int64(BOUND_NS), self.columns, outputs,
                 self._x, self._stamps, self._failed, self._taken),
                overlap=True,
            )  # fmt: skip

    def _of(self, graph: Graph, memory: NDArray[np.uint8] | None = None, n_bytes: int = 0) -> float | None:
        """us from a post to when its answer is known, the median; None: too many jobs were not claimed."""
        cpu, device = self.cpu, self.device
        found: list[float] = []
        for _ in range(RUNS):
            cpu.begin()
            at, each = cpu.places, self.columns + self.columns // 8
            for i in range(MAX_RECORDS):
                given = at.inputs + i * each
                job = Job((given,) * 3, given, at.outputs + i * at.each, (0, 0), input_scales=given + self.columns)
                cpu.ring.fill(i + 1, job)
            for array in (self._q, self._d, self._x, self._counter, self._relayed, self._failed, self._taken):
                device.write(array, np.zeros(array.shape, array.dtype))
            device.synchronize()
            if memory is not None and not self._read_some(memory, n_bytes, LATE_BLOCKS):
                return None
            cpu.pool.wake()
            time.sleep(2e-4)  # until they are awake
            graph.launch()
            stamps = device.read(self._stamps).astype(np.int64)[:LAYERS]
            device.synchronize()
            if device.read(self._failed)[0] or device.read(self._taken)[0] > MOST_TAKEN:
                return None
            found = ((stamps[:, 1] - stamps[:, 0]) / 1e3).tolist()
        return max(0.0, median(found))

    def _read_some(self, memory: NDArray[np.uint8], n_bytes: int, n_blocks: int) -> bool:
        """Begin to read host memory on a stream of its own, so much a block; whether there is enough of it."""
        threads = READER_THREADS
        while threads * n_blocks * READ_BYTES > memory.nbytes:
            threads //= 2
        if threads < 32:
            return False
        address, limits = np.uint64(self.device.pointer(memory)), (np.int64(MOST_S * 1e9), np.int64(n_bytes))
        arguments = (address, np.int64(memory.nbytes), None, *limits, self._read, self._sink)
        with self.device.on(self._stream):
            self._kernels["reader"](n_blocks, threads, arguments)
        return True

    def _rate(self) -> float | None:
        """GB/s of the last reader."""
        counts = self.device.read(self._read).astype(float)
        rate = float(sum(n / max(ns, 1.0) for n, ns in counts))
        return rate if rate > 0 else None
