"""Experts of one token's step that the CPU computes beside the GPU: memory that both see, and the threads.

docs/misses.md, "Experts that the CPU computes". `route` says which, `gate_up` hands them over or takes them back,
`down_one` folds what comes; kernels: jobs.cuh, route.cu, experts.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.formats.quants import row_bytes
from engine.ops import Experts, Limits
from engine.ops.cuda.device import Array, Device
from engine.ops.jobs import BOTH, DONE, FIRST, MAX_RECORDS, NAP_US, RECORD_BYTES, SPIN_US, Bank, Job, Jobs, Ring
from engine.placing.division import UNIT_ROWS
from engine.placing.misses import Part, Table, Tally

# Words of jobs.cuh, and of the board; of a part, and from one to the next.
_NEXT, _FAILED, _BOUND_NS, _PARTS = 1, 2, 3, 17
_N_COUNTS, _BOARD_PARTS = 3, 8
_N_PART, _PART_WORDS, _MOST_MISSED, _TAKEN = 7, 8, 16, 4
_PARTS_WORDS = (_MOST_MISSED + 1) * _PART_WORDS
_N_WORDS = _PARTS + _PARTS_WORDS + _MOST_MISSED
# Words of a record (expert_job.h), and int32 of it: bank, part, first, last.
_OUTPUT, _ANSWER, _CLAIMED_NS, _DONE_NS = 13, 24, 25, 26
_WORK = slice(31, 35)
_ALIGN_BYTES = 64  # of the places of activations and results
BOUND_S, PATIENCE_S = 1e-3, 10.0
MOST_EXPERTS = 255  # of a layer: eight bits of an entry of the division


@dataclass(frozen=True, slots=True)
class Places:
    """Where in host memory records have their activations and results: addresses, and bytes of each place."""

    inputs: int
    outputs: int
    each: int


class CpuExperts:
    """Experts that miss and enter no slot, or last rows of one, as jobs of a ring; `division` says how many a layer.

    banks: those of all that a step of one token computes. bound_s: after which a layer's first job is the GPU's again
    if nobody has claimed it, twice that of the second, and so on. patience_s: after which a claimed one that was not
    answered fails the step. Nothing is divided before `start` and `divide`. `close` when no step is under way any more.
    """

    def __init__(
        self, device: Device, limits: Limits, banks: Sequence[Bank], bound_s: float = BOUND_S,
        patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        self.device = device
        self._banks = list(dict.fromkeys(banks))
        # Floats, or 8 bits and a float for each 32: activations, an expert's output, or z of a divided one.
        widest = max(limits.n_embd, *(bank.n_ff for bank in self._banks))
        each = -(-4 * widest // _ALIGN_BYTES) * _ALIGN_BYTES
        self._records = device.page_locked(MAX_RECORDS * RECORD_BYTES)
        self.ring = Ring(self._records)
        self._inputs, self._outputs = (device.page_locked(MAX_RECORDS * each) for _ in range(2))
        board = device.page_locked(8 * (_BOARD_PARTS + _PARTS_WORDS))
        for memory in (self._inputs, self._outputs, board):
            memory[:] = 0
        self._board = board.view(np.uint64)
        parts = self._board[_BOARD_PARTS:].reshape(-1, _PART_WORDS)
        self._board_parts = parts[: limits.n_expert_used + 1, :_N_PART]
        self.places = Places(device.pointer(self._inputs), device.pointer(self._outputs), each)
        places = [n for at in (self.places.inputs, self.places.outputs) for n in (at, each)]
        times = [int(s * 1e9) for s in (bound_s, patience_s)]
        words = [1, 1, 0, *times, self.ring.address, *places, device.pointer(board)]
        self.words = device.upload(np.array(words + [0] * (_N_WORDS - len(words)), np.uint64))
        self.division: Array = device.upload(np.zeros(limits.n_expert_used + 1, np.int32))
        self._pool: Jobs | None = None

    @property
    def pool(self) -> Jobs:
        """The threads."""
        assert self._pool is not None, "the threads were not started"
        return self._pool

    def start(
        self, cores: Sequence[int], spin_us: float = SPIN_US, nap_us: float = NAP_US, max_tokens: int = 1
    ) -> None:
        """Start the threads; arguments as of `Jobs`. CapacityError: there is no memory for them, or there are none."""
        self._pool = Jobs(self.ring, self._banks, cores, max_tokens=max_tokens, spin_us=spin_us, nap_us=nap_us)

    @property
    def n_ff(self) -> int:
        """Rows of gate and up of all experts; 0: they differ, so that no table divides any."""
        return self._banks[0].n_ff if len({bank.n_ff for bank in self._banks}) == 1 else 0

    def divide(self, table: Table, bound_us: float | None = None) -> None:
        """Of 0, 1, ... A misses of a layer the CPU gets so many, and last rows of one more; between steps.

        It gets what enters no slot. table: experts and rows, in whole units of 32. bound_us: another bound than until
        now. ValueError: not of so many misses, or rows that not all experts have.
        """
        most = -(-min(bank.n_ff for bank in self._banks) // UNIT_ROWS)
        entries = [(experts, -(-rows // UNIT_ROWS)) for experts, rows in table]
        if len(entries) != self.division.shape[0] or not all(
            0 <= experts <= MOST_EXPERTS and 0 <= units <= most for experts, units in entries
        ):
            n = self.division.shape[0]
            raise ValueError(f"division: expected {n} numbers of experts, and of rows up to {most} units, got {table}")
        packed = [experts | units << 8 for experts, units in entries]
        self.device.write(self.division, np.array(packed, np.int32))
        if bound_us is not None:
            self.device.write(self.words[_BOUND_NS : _BOUND_NS + 1], np.array([int(bound_us * 1e3)], np.uint64))

    def number_of(self, bank: Experts) -> int:
        """A bank's number among those of the pool."""
        return self._banks.index(bank_of(bank))

    # --- what came of it ---

    def counts(self) -> dict[str, int]:
        """Jobs that were handed over, those taken back of them, and the number of one that was never answered, or 0."""
        words = self.device.read(self.words)
        parts = words[_PARTS : _PARTS + _PARTS_WORDS].reshape(-1, _PART_WORDS)
        taken = int(parts[:, _TAKEN].sum())
        return {"jobs": int(words[_NEXT]) - 1, "taken_back": taken, "failed": int(words[_FAILED])}

    @property
    def failed(self) -> int:
        """The number of a job that was never answered, or 0; of all steps whose tokens were read. Waits for nothing."""
        return int(self._board[0])

    @property
    def tally(self) -> Tally:
        """What the GPU has said so far; it may be a layer behind. Waits for nothing."""
        _, trips, trips_ns = self._board[:_N_COUNTS].tolist()
        parts = tuple(
            Part(layers, done, divided, units * UNIT_ROWS, taken, waited_ns / 1e3, stalled_ns / 1e3)
            for layers, done, divided, units, taken, waited_ns, stalled_ns in self._board_parts.tolist()
        )
        return Tally(parts, trips, trips_ns / 1e3)

    def spans(self) -> list[tuple[float, float]]:
        """Of the last jobs that were done: how many overlapped, and us from the first claim to the last answer.

        Of a divided expert counts the part of its bytes that the CPU has read.
        """
        words = self._records.view(np.uint64).reshape(MAX_RECORDS, -1)
        before = words[:, _ANSWER].copy()
        times = words[:, [_CLAIMED_NS, _DONE_NS]].astype(np.int64)
        work = self._records.view(np.int32).reshape(MAX_RECORDS, -1)[:, _WORK].copy()
        still = (words[:, _ANSWER] == before) & (before % 4 == DONE) & (times[:, 0] <= times[:, 1])
        still &= words[:, _OUTPUT] - np.uint64(self.places.outputs) < self._outputs.nbytes  # not of long_jobs.py
        return overlapping(times[still], np.array([self._amount(*row) for row in work[still].tolist()], float))

    def _amount(self, bank: int, part: int, first: int, last: int) -> float:
        """Experts that a job is."""
        if part != FIRST or not 0 <= bank < len(self._banks):
            return 1.0
        of = self._banks[bank]
        return (last - first) / of.n_ff * first_share(of)

    # --- measuring, while no step is under way ---

    def begin(self) -> None:
        """Job 1 comes next, on both sides."""
        self.pool.drain(1.0)
        self.pool.reset()

    def timed(
        self, bank: Experts, sources: Sequence[tuple[int, int, int]], timeout_s: float = 0.25, n_rows: int = 0
    ) -> float | None:
        """us of experts at once, by their addresses, from the first claim to the last answer; None: not in time.

        n_rows: z of so many last rows of gate and up of each, a multiple of 32, instead of all.
        """
        at, D, F, number = self.places, bank.n_embd, bank.n_ff, self.number_of(bank)
        outputs = [at.outputs + i * at.each for i in range(len(sources))]
        part, rows = (FIRST, (F - n_rows, F)) if n_rows else (BOTH, (0, D))
        jobs = [
            Job(source, at.inputs, output, rows, (0,), number, part, at.inputs + D, output + F)
            for source, output in zip(sources, outputs, strict=True)
        ]
        self.pool.wake()
        numbers = self.ring.post(jobs)
        if any(self.ring.wait(number, timeout_s) != DONE for number in numbers):
            return None
        records = [self.ring.record(number) for number in numbers]
        return float(max(r.done_ns for r in records) - min(r.claimed_ns for r in records)) / 1e3

    def close(self) -> None:
        """End the threads; twice does no harm."""
        if self._pool is not None:
            self._pool.close()


def first_share(bank: Bank) -> float:
    """Of an expert's bytes those of gate and up."""
    gate, up, down = bank.types
    first = bank.n_ff * sum(row_bytes(t, bank.n_embd, "gate and up") for t in (gate, up))
    return first / (first + bank.n_embd * row_bytes(down, bank.n_ff, "down"))


def overlapping(
    times: np.ndarray[Any, np.dtype[np.int64]], amounts: np.ndarray[Any, np.dtype[np.float64]]
) -> list[tuple[float, float]]:
    """Of intervals int64 [n, 2] of ns, those that overlap made one: the sum of amounts [n], and us. At once: as one."""
    made: list[tuple[float, float]] = []
    begin = end = 0
    n = 0.0
    order = np.lexsort((times[:, 1], times[:, 0]))
    for (first, last), amount in zip(times[order].tolist(), amounts[order].tolist(), strict=True):
        if n and first < end:
            n, end = n + amount, max(end, last)
            continue
        if n:
            made.append((n, (end - begin) / 1e3))
        n, begin, end = amount, first, last
    if n:
        made.append((n, (end - begin) / 1e3))
    return made


def bank_of(bank: Experts) -> Bank:
    """A layer's experts as the threads know them; ValueError: they do not compute such types."""
    return Bank((bank.gate_type, bank.up_type, bank.down_type), bank.n_embd, bank.n_ff, bank.activation)
