"""Missed experts of steps of 2 to 32 tokens that the CPU computes beside the GPU: memory that both see.

docs/misses.md, "Jobs of steps of several tokens". The ring, its numbers and its threads are those of cpu_experts.py.
`route` says which, `gate_up_several` hands them over or takes them back, `down_several` puts what comes where the GPU's
results are; kernels: several_jobs.cuh, route.cu, several.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.ops import SMALL_TOKENS, Limits
from engine.ops.cuda.cpu_experts import CpuExperts
from engine.ops.cuda.device import Argument, Device
from engine.ops.jobs import MAX_RECORDS
from engine.placing.handed import HandedTally

MOST_HANDED = 4  # tokens of an expert that is handed over (several_jobs.cuh)
# Words of several_jobs.cuh: all of them, and the counts, of which the board has as many.
_KNOWN, _N_COUNTS = 16, 4


class SeveralJobs:
    """Memory for the jobs of a layer of a step of several tokens; `division` says how many of its misses are jobs.

    Steps follow one another, with those of `cpu`: a layer's jobs are all answered or taken back when its experts have
    been added up. Nothing is handed over before `divide`.
    """

    def __init__(self, device: Device, limits: Limits, cpu: CpuExperts) -> None:
        self.device, self.cpu = device, cpu
        self._n_expert = limits.n_expert
        # Floats, or 8 bits and a float for each 32.
        each = 4 * MOST_HANDED * limits.n_embd
        self._inputs, self._outputs = (device.page_locked(MAX_RECORDS * each) for _ in range(2))
        board = device.page_locked(8 * 16)
        for memory in (self._inputs, self._outputs, board):
            memory[:] = 0
        self._board = board.view(np.uint64)
        words = np.zeros(_KNOWN + MAX_RECORDS, np.uint64)
        words[:5] = device.pointer(self._inputs), each, device.pointer(self._outputs), each, device.pointer(board)
        self.words = device.upload(words)
        self.division = device.upload(np.zeros(limits.n_expert + 1, np.int32))

    def divide(self, table: Sequence[int]) -> None:
        """Of 0, 1, ... misses of a layer the CPU gets so many, as far as they enter no slot; between steps.

        table: `MAX_RECORDS` at most of each number of misses; of more than it has, as many as the last.
        """
        if not table or not all(0 <= experts <= min(i, MAX_RECORDS) for i, experts in enumerate(table)):
            raise ValueError(f"division: expected up to {MAX_RECORDS} experts of 0, 1, ... misses, got {table}")
        full = [table[min(n, len(table) - 1)] for n in range(self._n_expert + 1)]
        self.device.write(self.division, np.array(full, np.int32))

    def takes(self, n_tokens: int) -> bool:
        """Whether a step is of so many tokens that it may have jobs."""
        return 1 < n_tokens <= SMALL_TOKENS

    @property
    def of_routing(self) -> tuple[Argument, ...]:
        """What `route` needs more."""
        return self.division, self.cpu.words, self.words

    @property
    def of_experts(self) -> tuple[Argument, ...]:
        """What `gate_up_several` and `down_several` need more."""
        return self.cpu.words, self.words

    @property
    def tally(self) -> HandedTally:
        """What the GPU has said so far; it may be a layer behind. Waits for nothing."""
        return HandedTally.read(self._board[:_N_COUNTS].tolist())
