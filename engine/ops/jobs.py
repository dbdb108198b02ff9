"""Experts that the CPU computes beside the GPU: a ring of jobs in memory that both see, and the threads that do them.

The counterpart of engine/formats/expert_job.h, which says who writes what, and of cpu/jobs.cpp. A job has the bits of
`reference.expert_ffn` but for the fold over ranks, which is whose the job is. What a GPU does with the ring, the host
can do with this module: tests and benchmarks do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_int32, c_int64
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as QType
from numpy.typing import NDArray

from engine.formats.block_types import FLOAT_TYPES, record
from engine.ground.cpu_library import ISAS, BankRecord, JobRecord, JobsPlanRecord
from engine.ground.errors import CapacityError
from engine.ops import Activation
from engine.ops.cpu_workspace import ACTIVATIONS, kernels, supported_isas

FIRST, SECOND, BOTH = 1, 2, 3  # parts of an expert: gate and up, down, both
NONE, CLAIMED, DONE, DECLINED = range(4)  # what is known of a job
MAX_TOKENS = 32  # of a job
MAX_ROWS = 256  # of activations, of which a job names some
MAX_RECORDS = 64  # of a ring
RECORD_BYTES = ctypes.sizeof(JobRecord)
BLOCK = 32  # elements of z that are quantized together: what FIRST may be split at
COUNTS = ("done", "declined", "refused", "bound", "asleep", "held")
HOLDS = ("nowhere", "before claim", "claimed", "item")
SPIN_US = 200.0  # of a thread without work, before it sleeps
NAP_US = 200.0  # of the thread that looks now and then
THREAD_NAME = "spark-experts"  # as /proc has it (SPARK_JOBS_THREAD)


@dataclass(frozen=True, slots=True)
class Bank:
    """Experts that are alike: types of gate, up and down, columns of gate and up, rows of gate and up."""

    types: tuple[QType, QType, QType]
    n_embd: int
    n_ff: int
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        for qtype in self.types:
            record(qtype, "experts")
        gate, up, down = (qtype in FLOAT_TYPES for qtype in self.types)
        if gate != up:
            names = " and ".join(qtype.name for qtype in self.types[:2])
            raise ValueError(f"gate and up: {names}, one of which is a float type")
        for quantized, cols, name in ((not gate, self.n_embd, "n_embd"), (not down, self.n_ff, "n_ff")):
            if cols < 1 or (quantized and cols % BLOCK):
                raise ValueError(f"{name}: expected a multiple of {BLOCK} for quantized weights, got {cols}")


@dataclass(frozen=True, slots=True)
class Job:
    """An expert's work, as addresses that the CPU knows; rows of activations and outputs as in expert_job.h.

    source: gate, up, down. rows: [first, last) of the part. tokens: rows of the input.
    """

    source: tuple[int, int, int]
    input: int
    output: int
    rows: tuple[int, int]
    tokens: Sequence[int] = (0,)
    bank: int = 0
    part: int = BOTH
    input_scales: int = 0
    output_scales: int = 0
    gate_scale: float = 1.0


class Ring:
    """Records of jobs in `memory`, uint8 [n * RECORD_BYTES] at a multiple of 64 bytes; the poster's side of it.

    next: the number of the job that is posted next.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        n, rest = divmod(memory.nbytes, RECORD_BYTES)
        address = int(memory.__array_interface__["data"][0])
        if rest or not 0 < n <= MAX_RECORDS or address % 64 or memory.dtype != np.uint8:
            expected = f"1 to {MAX_RECORDS} records of {RECORD_BYTES} aligned bytes"
            raise ValueError(f"ring: expected {expected}, got {memory.nbytes}")
        self.address, self.n = address, n
        self.next = 1
        self._memory = memory
        self._records = (JobRecord * n).from_address(address)
        self._kernels = kernels()
        memory[:] = 0

    def record(self, number: int) -> JobRecord:
        """The record that a job lies in."""
        return self._records[(number - 1) % self.n]

    def fill(self, number: int, job: Job) -> None:
        """Write a job to its record, which must be free."""
        if len(job.tokens) > MAX_TOKENS:
            raise ValueError(f"a job has at most {MAX_TOKENS} tokens, got {len(job.tokens)}")
        if not all(0 <= token < MAX_ROWS for token in job.tokens):
            raise ValueError(f"tokens of a job: expected rows below {MAX_ROWS}, got {list(job.tokens)}")
        to = self.record(number)
        to.source[:] = job.source
        to.input, to.input_scales = job.input, job.input_scales
        to.output, to.output_scales = job.output, job.output_scales
        to.gate_scale, to.bank, to.part = job.gate_scale, job.bank, job.part
        to.first, to.last = job.rows
        to.count = len(job.tokens)
        to.token[: to.count] = list(job.tokens)

    def post(self, jobs: Sequence[Job]) -> range:
        """Fill the next records and post them; their numbers. ValueError: more than the ring has."""
        if len(jobs) > self.n:
            raise ValueError(f"{len(jobs)} jobs for a ring of {self.n}")
        numbers = range(self.next, self.next + len(jobs))
        for number, job in zip(numbers, jobs, strict=True):
            self.fill(number, job)
        self.next = numbers.stop
        self._kernels.spark_job_post(self.address, self.n, numbers.start, len(jobs))
        return numbers

    def take_back(self, number: int) -> int:
        """Take back a job: NONE, and it is the caller's; CLAIMED, and it has to be waited for; or its answer."""
        return int(self._kernels.spark_job_take_back(self.address, self.n, number))

    def wait(self, number: int, timeout_s: float) -> int:
        """A job's answer, DONE or DECLINED; what is known of it, where there is none in time."""
        return int(self._kernels.spark_job_wait(self.address, self.n, number, int(timeout_s * 1e9)))


class Jobs:
    """Threads that do the jobs of a ring. `close` when done; the ring, and what its jobs point to, must outlive it.

    cores: a logical CPU for each thread, -1 for any. max_tokens: of a job. A thread that has seen no work for spin_us
    sleeps until others have some or `wake` is called; one looks every nap_us, less and less often. CapacityError: no
    memory, or no threads.
    """

    def __init__(
        self,
        ring: Ring,
        banks: Sequence[Bank],
        cores: Sequence[int],
        max_tokens: int = MAX_TOKENS,
        isa: str | None = None,
        spin_us: float = SPIN_US,
        nap_us: float = NAP_US,
    ) -> None:
        if not banks or not cores or not 0 < max_tokens <= MAX_TOKENS:
            raise ValueError(f"jobs: {len(banks)} banks, {len(cores)} cores and {max_tokens} tokens make no pool")
        isa = isa or supported_isas()[-1]
        if isa not in supported_isas():
            raise ValueError(f"isa: expected one of {', '.join(supported_isas())}, got {isa}")
        self.ring = ring
        self.n_threads = len(cores)
        self._kernels = kernels()
        records = (BankRecord * len(banks))(
            *(BankRecord((c_int64 * 3)(*b.types), b.n_embd, b.n_ff, ACTIVATIONS.index(b.activation)) for b in banks)
        )
        numbers = (c_int32 * len(cores))(*cores)
        plan = JobsPlanRecord(
            ring.address, ring.n, addressof(records), len(banks), addressof(numbers), len(cores), ISAS.index(isa),
            max_tokens, int(spin_us * 1e3), int(nap_us * 1e3),
        )  # fmt: skip
        self._handle: Any = self._kernels.spark_jobs_create(addressof(plan))
        if not self._handle:
            raise CapacityError(
                f"{len(cores)} threads for experts, with room for {max_tokens} tokens, are not to be had",
                hint="is memory short, or the number of threads limited (ulimit -u)?",
            )

    def wake(self, awake_s: float = 0.0) -> None:
        """Have all threads look for jobs again, as a step begins; for so long at least, whatever there is to do."""
        self._kernels.spark_jobs_wake(self._handle, int(awake_s * 1e9))

    def dismiss(self) -> None:
        """Nobody needs to look until `wake` is called: all sleep as soon as they find nothing to do."""
        self._kernels.spark_jobs_dismiss(self._handle)

    def missing(self, for_s: float) -> int:
        """Threads that should be awake and have given no sign for so long: stopped, or others have their cores."""
        return int(self._kernels.spark_jobs_missing(self._handle, int(for_s * 1e9)))

    def drain(self, timeout_s: float) -> bool:
        """Decline what is posted from now on, and wait for what was claimed; whether all of it was done in time."""
        return bool(self._kernels.spark_jobs_drain(self._handle, int(timeout_s * 1e9)))

    def reset(self) -> None:
        """Begin again with job 1, while nothing is claimed and nothing is posted."""
        self._kernels.spark_jobs_reset(self._handle)
        self.ring.next = 1

    def counts(self) -> dict[str, int]:
        """By COUNTS: jobs done, declined, refused for a bad field; threads bound to a core, asleep, held."""
        counts = (c_int64 * len(COUNTS))()
        self._kernels.spark_jobs_counts(self._handle, addressof(counts))
        return dict(zip(COUNTS, counts, strict=True))

    @contextmanager
    def held(self, place: str, n: int = 1) -> Iterator[None]:
        """For tests: the next n threads that come to a place of HOLDS wait there until the block ends."""
        self._kernels.spark_jobs_hold(self._handle, HOLDS.index(place), n)
        try:
            yield
        finally:
            self._kernels.spark_jobs_hold(self._handle, 0, 0)

    def close(self) -> None:
        """Do what is claimed, and end the threads."""
        if self._handle:
            self._kernels.spark_jobs_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()
