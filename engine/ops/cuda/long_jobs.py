"""Missed experts of steps of 33 to 128 tokens: the CPU's threads take them from one end, PCIe brings the others.

docs/misses.md, "Experts that the CPU computes". The ring, its numbers and its threads are those of cpu_experts.py; the
kernels are long_jobs.cu. A layer:

    choose - advance, which writes `source` - share - the FFN of the experts that have a source - collect - fold - fill
"""

from __future__ import annotations

import numpy as np

from engine.formats.block_types import FLOAT_TYPES
from engine.ops import SHORT_ROWS, SMALL_TOKENS, Experts, Fetches, Limits
from engine.ops.cuda.cpu_experts import CpuExperts
from engine.ops.cuda.device import Array, Device, Kernel, Module
from engine.ops.cuda.products import Quantized
from engine.ops.cuda.routing import Staging
from engine.ops.jobs import MAX_RECORDS, MAX_ROWS, MAX_TOKENS
from engine.placing.handed import HandedTally

# Tokens of a step that has jobs: of more, an expert takes the CPU longer than PCIe.
MOST_ROWS = min(SHORT_ROWS, MAX_ROWS)
PACE_S = 1e-3  # that copies before a job are waited for, at most, until it is taken back: PCIe brings several meanwhile
# Words of long_jobs.cu: all of them, and the first of the counts, of which the board has as many.
_N_STATE, _N_COUNTS = 16 + MAX_RECORDS, 4
_PLAN_THREADS, _HAND_BLOCKS, _THREADS = 1024, 16, 512


class LongJobs:
    """Memory for jobs of a layer of up to MOST_ROWS tokens, as many as the ring of `cpu` has, and what becomes of them.

    is_on: whether steps are to offer any. pace_s: how long the copies before a job are waited for until it is taken
    back. Steps follow one another, with those of `cpu`: a layer's jobs are all answered or taken back in its `collect`.
    """

    def __init__(self, device: Device, limits: Limits, cpu: CpuExperts, pace_s: float | None = None) -> None:
        self.device, self.cpu = device, cpu
        self.is_on = True
        self.n_rows, self.n_embd, self._n_expert = min(MOST_ROWS, limits.max_tokens), limits.n_embd, limits.n_expert
        self._module = Module("long_jobs.cu", (("EXPERTS", str(limits.n_expert)),))
        self._pace_ns = int((PACE_S if pace_s is None else pace_s) * 1e9)
        # Floats, or 8 bits and a float for each 32.
        self._inputs = device.page_locked(4 * self.n_rows * self.n_embd)
        self._each = 4 * min(MAX_TOKENS, self.n_rows) * self.n_embd
        self._outputs = device.page_locked(MAX_RECORDS * self._each)
        board = device.page_locked(8 * 16)
        for memory in (self._inputs, self._outputs, board):
            memory[:] = 0
        self._board = board.view(np.uint64)
        self._state = device.upload(np.zeros(_N_STATE, np.uint64))
        self._items = device.empty(limits.n_expert, np.int32)
        self._masks = device.empty((MAX_RECORDS, MAX_ROWS // 32), np.uint32)

    def takes(self, n_tokens: int) -> bool:
        """Whether a step of so many tokens offers jobs."""
        return self.is_on and SMALL_TOKENS < n_tokens <= self.n_rows

    def share(
        self, h: Quantized | Array, experts: Array, bank: Experts, fetches: Fetches, staging: Staging, which: int
    ) -> Array:
        """Have what the step misses of a layer brought to buffer `which` of `staging`, and a part computed meanwhile.

        After `Routing.advance` with `staging.source[which]` [E, 3], which then says where each expert is during the
        step: zeros, nowhere, as its y come with `collect`. h [T, D] the normed residual: in 8 bits, where the experts'
        types are no floats. experts int32 [T, A]. What enters a slot is always brought. Returns `source`.
        """
        (T, A), D, is_float = experts.shape, bank.n_embd, bank.gate_type in FLOAT_TYPES
        shape = (h.q if isinstance(h, Quantized) else h).shape
        if self.n_rows < T or shape != (T, D) or self.n_embd != D or is_float == isinstance(h, Quantized):
            raise ValueError(
                f"jobs of a long step: {bank.gate_type.name} experts of rows [{self.n_rows}, {self.n_embd}] for "
                f"{experts.shape} choices and h {shape}"
            )
        source, words = staging.source[which], self.cpu.words
        rows = np.uint64(self.device.pointer(self._inputs))
        scales = np.uint64(int(rows) + T * D)
        sizes = tuple(map(np.int64, bank.part_bytes))
        buffer = (staging.buffers[which], np.int64(staging.n_bytes))
        self._kernel("plan_jobs")(
            1,
            _PLAN_THREADS,
            (
                experts, T, A, bank.home_ptr, fetches.rows, fetches.count, bank.gate_scale, D,
                self.cpu.number_of(bank), MAX_RECORDS, rows, scales, *self._output, *sizes, *buffer, words,
                self._state, self._items, self._masks, source,
            ),
        )  # fmt: skip
        given = (None, h.q, h.d) if isinstance(h, Quantized) else (h, None, None)
        self._kernel("hand_rows")(_HAND_BLOCKS, _THREADS, (*given, np.int64(T * D), rows, scales, self._state))
        self._kernel("share_experts")(
            1 + staging.n_blocks,
            _THREADS,
            (
                bank.home_ptr, *sizes, *buffer, np.int64(self._pace_ns), words, self._state, self._items, source,
            ),
        )  # fmt: skip
        return source

    def collect(self, experts: Array, y: Array, first_token: int = 0, first: int = 0) -> None:
        """Wait for what the CPU computes of the layer, after the FFN of the others, and put it where theirs is.

        experts [T, A]: as given to `share`. y float32 [n * A, columns]: of n tokens from first_token on, and columns
        from the first on, a row for each pair, of which those are written whose expert has no source; token 0 and
        column 0 come first. Where an answer does not come in time they become zeros, and `cpu.failed` says so.
        """
        (T, A), D, n_tokens = experts.shape, self.n_embd, y.shape[0] // experts.shape[1]
        if y.shape[0] % A or first_token + n_tokens > T or first + y.shape[1] > D:
            raise ValueError(f"jobs of a long step: y {y.shape} of {T} tokens, {A} experts and {D} columns")
        part = (y, first_token, n_tokens, first, y.shape[1], int(first_token == first == 0))
        board = np.uint64(self.device.pointer(self._board))
        self._kernel("collect_jobs")(
            MAX_RECORDS,
            _THREADS,
            (experts, A, D, *self._output, *part, board, self.cpu.words, self._state, self._items, self._masks),
        )

    @property
    def tally(self) -> HandedTally:
        """What the GPU has said so far. Waits for nothing."""
        return HandedTally.read(self._board[:_N_COUNTS].tolist())

    @property
    def _output(self) -> tuple[np.uint64, np.int64]:
        """Where results go, and bytes of each job's place."""
        return np.uint64(self.device.pointer(self._outputs)), np.int64(self._each)

    def _kernel(self, name: str) -> Kernel:
        return self.device.kernel(self._module, name)
