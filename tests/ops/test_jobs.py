"""Experts that the CPU computes beside the GPU: the bits, and who has a job at what time.

Here the host posts what a GPU will, by the same loads and stores.
"""

from __future__ import annotations

import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from benchmarks.faults import may_trace, stopped, threads_of
from engine.formats.block_types import FLOAT_TYPES, NATIVE_TYPES
from engine.formats.quants import QTensor
from engine.ground.cpu_library import JobRecord
from engine.ops import arithmetic, cpu
from engine.ops.jobs import (
    BOTH,
    CLAIMED,
    DECLINED,
    DONE,
    FIRST,
    NONE,
    RECORD_BYTES,
    SECOND,
    THREAD_NAME,
    Bank,
    Job,
    Jobs,
    Ring,
)
from tests.gguf_files import random_blocks

Q = QType
ACTIVATIONS = {"silu": arithmetic.silu, "gelu": arithmetic.gelu}
LONG_S = 60.0  # of a wait that ends by itself
MIXED = (Q.Q4_K, Q.Q5_K, Q.Q6_K)


def aligned(n_bytes: int) -> np.ndarray:
    memory = np.zeros(n_bytes + 64, np.uint8)
    skew = -int(memory.ctypes.data) % 64
    return memory[skew : skew + n_bytes]


class Expert:
    """An expert of random weights, activations for it, and what it gives by the twin."""

    def __init__(self, bank: Bank, n_tokens: int, seed: int = 0, gate_scale: float = 1.0) -> None:
        self.bank, self.gate_scale = bank, gate_scale
        rng = np.random.default_rng(seed)
        D, F = bank.n_embd, bank.n_ff
        shapes = ((F, D), (F, D), (D, F))
        self.parts = [
            QTensor("expert", qtype, shape, random_blocks(qtype, *shape, rng).reshape(-1), scale=scale)
            for qtype, shape, scale in zip(bank.types, shapes, (gate_scale, 1.0, 1.0), strict=True)
        ]
        self.h = rng.standard_normal((n_tokens, D)).astype(np.float32)
        gate, up, down = self.parts
        self.z = ACTIVATIONS[bank.activation](arithmetic.product(gate, self.h)) * arithmetic.product(up, self.h)
        self.y = arithmetic.product(down, self.z)
        self.kept: list[Any] = []

    def given(self, x: np.ndarray, qtype: QType) -> tuple[int, int]:
        """Addresses of activations as a job has them."""
        arrays = [np.ascontiguousarray(x)] if qtype in FLOAT_TYPES else list(arithmetic.quantize_activations(x))
        self.kept += arrays
        return tuple([int(a.ctypes.data) for a in arrays] + [0])[:2]  # type: ignore[return-value]

    def job(self, y: np.ndarray, tokens: Sequence[int], rows: tuple[int, int] | None = None, part: int = BOTH) -> Job:
        """To y [len(tokens), D]; of a second half, z is given."""
        x, qtype = (self.z, self.bank.types[2]) if part == SECOND else (self.h, self.bank.types[0])
        data, scales = self.given(x, qtype)
        source = tuple(int(p.data.ctypes.data) for p in self.parts)
        return Job(
            source, data, int(y.ctypes.data), rows or (0, self.bank.n_embd), tokens, part=part, input_scales=scales,
            gate_scale=self.gate_scale,
        )  # fmt: skip


def bank_of(qtype: QType, activation: str = "silu") -> Bank:
    """Shapes that end in the middle of a panel, where the type's blocks allow it."""
    D, F = (352, 96) if gguf.GGML_QUANT_SIZES[qtype][0] <= 32 else (320, 192) if qtype == Q.NVFP4 else (512, 256)
    return Bank((qtype, qtype, qtype), D, F, activation)  # type: ignore[arg-type]


def empty(n: int, cols: int) -> np.ndarray:
    return np.full((n, cols), np.nan, np.float32)


@pytest.fixture
def ring() -> Ring:
    return Ring(aligned(5 * RECORD_BYTES))


@pytest.fixture
def pools(ring: Ring) -> Iterator[Any]:
    """Makes pools on the ring, and closes them."""
    made: list[Jobs] = []

    def make(banks: Sequence[Bank], n_threads: int = 2, **more: Any) -> Jobs:
        made.append(Jobs(ring, banks, [-1] * n_threads, **more))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def done(ring: Ring, jobs: Sequence[Job]) -> None:
    for number in ring.post(jobs):
        assert ring.wait(number, LONG_S) == DONE


@pytest.mark.parametrize("qtype", NATIVE_TYPES, ids=lambda t: t.name)
def test_an_expert_has_the_bits_of_the_twin_whole_and_in_pieces(qtype: QType, ring: Ring, pools: Any) -> None:
    bank = bank_of(qtype, "gelu" if qtype in (Q.Q4_0, Q.F16) else "silu")
    e = Expert(bank, 7, gate_scale=0.75 if qtype == Q.NVFP4 else 1.0)
    D, F = bank.n_embd, bank.n_ff
    for isa in cpu.supported_isas():
        pool = pools([bank], isa=isa)
        for tokens in ([3], [6, 0, 2, 2, 5]):
            y = empty(len(tokens), D)
            done(ring, [e.job(y, tokens)])
            np.testing.assert_array_equal(y, e.y[tokens])
            # Rows of down by three jobs at once, one of which has z from outside.
            y = empty(len(tokens), D)
            ends = (0, 33, 34, D)
            parts = (BOTH, SECOND, BOTH)
            done(ring, [e.job(y, tokens, ends[i : i + 2], parts[i]) for i in range(3)])
            np.testing.assert_array_equal(y, e.y[tokens])
            check_first(e, ring, tokens, (0, 32, F))
        pool.close()
        ring = Ring(ring._memory)


def check_first(e: Expert, ring: Ring, tokens: list[int], ends: tuple[int, ...]) -> None:
    """Rows of gate and up by two jobs."""
    F, plain = e.bank.n_ff, e.bank.types[2] in FLOAT_TYPES
    z: np.ndarray = empty(len(tokens), F) if plain else np.full((len(tokens), F), 99, np.int8)
    scales = empty(len(tokens), F // 32)
    jobs = []
    for rows in pairwise(ends):
        job = e.job(z, tokens, rows, FIRST)
        jobs.append(Job(job.source, job.input, job.output, rows, tokens, part=FIRST, input_scales=job.input_scales,
                        output_scales=int(scales.ctypes.data), gate_scale=job.gate_scale))  # fmt: skip
    done(ring, jobs)
    if plain:
        np.testing.assert_array_equal(z, e.z[tokens])
    else:
        q, d = arithmetic.quantize_activations(e.z[tokens])
        np.testing.assert_array_equal(z, q)
        np.testing.assert_array_equal(scales, d)


def test_types_of_three_kinds_and_of_several_banks(ring: Ring, pools: Any) -> None:
    banks = [Bank(MIXED, 768, 512), Bank((Q.F32, Q.BF16, Q.Q8_0), 96, 64), Bank((Q.Q8_0, Q.Q4_1, Q.F16), 64, 40)]
    pools(banks, 3)
    experts = [Expert(bank, 32, seed=i) for i, bank in enumerate(banks)]
    tokens = list(range(32))
    ys = [empty(32, b.n_embd) for b in banks]
    jobs = [e.job(y, tokens) for e, y in zip(experts, ys, strict=True)]
    done(ring, [Job(**{f: getattr(j, f) for f in Job.__slots__} | {"bank": i}) for i, j in enumerate(jobs)])
    for e, y in zip(experts, ys, strict=True):
        np.testing.assert_array_equal(y, e.y)


def test_tokens_are_any_of_256_rows(ring: Ring, pools: Any) -> None:
    for types in ((Q.Q8_0,) * 3, (Q.F32, Q.F16, Q.Q8_0)):
        bank = Bank(types, 64, 32)
        pool, e, tokens = pools([bank]), Expert(bank, 256), [255, 0, 32, 31, 200, 7]
        y = empty(len(tokens), 64)
        done(ring, [e.job(y, tokens)])
        np.testing.assert_array_equal(y, e.y[tokens])
        with pytest.raises(ValueError, match="rows below 256"):
            ring.post([e.job(y, [256])])
        assert pool.drain(LONG_S)
        pool.reset()
        pool.close()


def test_nothing_to_compute_is_done(ring: Ring, pools: Any) -> None:
    pool = pools([bank_of(Q.Q4_K)])
    e, y = Expert(bank_of(Q.Q4_K), 1), empty(1, 512)
    done(ring, [e.job(y, [0], (9, 9)), e.job(y, [0], (0, 0), SECOND), e.job(y, [0], (32, 32), FIRST)])
    assert np.isnan(y).all() and pool.counts()["done"] == 3


def test_a_job_that_nobody_claimed_is_its_owners_again(ring: Ring, pools: Any) -> None:
    pool = pools([bank_of(Q.Q8_0)])
    e, y, other = Expert(bank_of(Q.Q8_0), 1), empty(1, 352), empty(1, 352)
    with pool.held("before claim"):
        (number,) = ring.post([e.job(y, [0])])
        until(lambda: pool.counts()["held"] == 1)
        assert ring.take_back(number) == NONE
        # The record gets another job, which another thread does, while the first one is still on its way.
        numbers = ring.post([e.job(other, [0])] * ring.n)
        assert numbers[-1] % ring.n == number % ring.n
        pool.wake()
        assert [ring.wait(n, LONG_S) for n in numbers] == [DONE] * ring.n
    until(lambda: pool.counts()["held"] == 0)
    assert ring.wait(numbers[-1], 0) == DONE
    assert np.isnan(y).all() and (other == e.y).all()


def test_a_claim_that_came_late_changes_no_later_answer(ring: Ring, pools: Any) -> None:
    pool = pools([bank_of(Q.Q8_0)])
    e, y, other = Expert(bank_of(Q.Q8_0), 1), empty(1, 352), empty(1, 352)
    with pool.held("before claim"):
        (number,) = ring.post([e.job(y, [0])])
        until(lambda: pool.counts()["held"] == 1)
        assert ring.take_back(number) == NONE
        with pool.held("claimed"):  # the thread goes on as far as that
            until(lambda: ring.wait(number, 0) == CLAIMED and pool.counts()["held"] == 1)
            numbers = ring.post([e.job(other, [0])] * ring.n)
            pool.wake()
            assert [ring.wait(n, LONG_S) for n in numbers] == [DONE] * ring.n
    assert pool.drain(LONG_S) and pool.counts()["declined"] == 1
    assert ring.wait(numbers[-1], 0) == DONE and np.isnan(y).all()


def test_a_job_taken_back_as_it_is_claimed_is_declined(ring: Ring, pools: Any) -> None:
    pool = pools([bank_of(Q.Q8_0)])
    e, y = Expert(bank_of(Q.Q8_0), 1), empty(1, 352)
    with pool.held("claimed"):
        (number,) = ring.post([e.job(y, [0])])
        until(lambda: pool.counts()["held"] == 1)
        assert ring.take_back(number) == CLAIMED
        assert ring.wait(number, 0.01) == CLAIMED
    assert ring.wait(number, LONG_S) == DECLINED
    assert np.isnan(y).all() and pool.counts()["declined"] == 1


def test_a_thread_that_is_stopped_holds_up_its_own_job_alone(ring: Ring, pools: Any) -> None:
    pool = pools([bank_of(Q.Q8_0)], 2)
    e, y, other = Expert(bank_of(Q.Q8_0), 1), empty(1, 352), empty(1, 352)
    with pool.held("item"):
        (number,) = ring.post([e.job(y, [0])])
        until(lambda: pool.counts()["held"] == 1)
        done(ring, [e.job(other, [0])] * (ring.n - 1))
        assert ring.take_back(number) == CLAIMED
        assert ring.wait(number, 0.01) == CLAIMED
        assert not pool.drain(0.01)
    assert ring.wait(number, LONG_S) == DONE and pool.drain(LONG_S)
    assert (y == e.y).all() and (other == e.y).all()


def test_what_came_too_late_is_done_all_the_same(ring: Ring, pools: Any) -> None:
    pools([bank_of(Q.Q8_0)])
    e, y = Expert(bank_of(Q.Q8_0), 1), empty(1, 352)
    (number,) = ring.post([e.job(y, [0])])
    assert ring.wait(number, LONG_S) == DONE
    assert ring.take_back(number) == DONE and (y == e.y).all()


@pytest.mark.parametrize("seed", range(4))
def test_every_job_is_computed_or_taken_back_and_never_both(seed: int, ring: Ring, pools: Any) -> None:
    bank, rng = bank_of(Q.Q8_0), random.Random(seed)
    pool = pools([bank], 1 + seed, spin_us=rng.choice([0, 50, 200]), nap_us=20)
    e = Expert(bank, 3)
    outcomes = {DONE: 0, DECLINED: 0, NONE: 0}
    for _ in range(150):
        batch = [(empty(len(t), bank.n_embd), t) for t in ([rng.randrange(3)] for _ in range(rng.randint(1, ring.n)))]
        numbers = ring.post([e.job(y, t) for y, t in batch])
        if rng.random() < 0.3:
            pool.wake()
        for number, (y, tokens) in zip(numbers, batch, strict=True):
            for _ in range(rng.choice([0, 0, 1, 10, 1000])):
                ring.record(number)  # some time passes
            state = ring.take_back(number) if rng.random() < 0.7 else ring.wait(number, 1e-4)
            if state in (NONE, CLAIMED):
                state = ring.take_back(number)
            if state == CLAIMED:
                state = ring.wait(number, LONG_S)
            outcomes[state] += 1
            assert (y == e.y[tokens]).all() if state == DONE else np.isnan(y).all(), (number, state)
        e.kept.clear()
    assert pool.drain(LONG_S)
    assert pool.counts()["done"] == outcomes[DONE]
    assert pool.counts()["declined"] <= outcomes[DECLINED] + outcomes[NONE]
    assert outcomes[DONE] and outcomes[NONE] + outcomes[DECLINED]


def test_what_is_not_understood_is_given_back(ring: Ring, pools: Any) -> None:
    bank = bank_of(Q.Q8_0)
    pool = pools([bank], max_tokens=4)
    e, y = Expert(bank, 1), empty(1, 352)
    bad: list[dict[str, Any]] = [
        {"bank": 1}, {"bank": -1}, {"part": 0}, {"part": 4}, {"rows": (0, 353)}, {"rows": (-1, 5)}, {"rows": (9, 8)},
        {"tokens": ()}, {"tokens": (0,) * 5}, {"part": FIRST, "rows": (0, 97)},
        {"part": FIRST, "rows": (0, 40)}, {"part": FIRST, "rows": (16, 64)},
    ]  # fmt: skip
    good = e.job(y, [0])
    for fields in bad:
        job = Job(**{f: getattr(good, f) for f in Job.__slots__} | fields)
        (number,) = ring.post([job])
        assert ring.wait(number, LONG_S) == DECLINED, fields
    assert pool.counts()["refused"] == len(bad) and np.isnan(y).all()
    done(ring, [good])


def test_threads_sleep_and_find_what_is_posted_meanwhile(ring: Ring, pools: Any) -> None:
    pool = pools([bank_of(Q.Q8_0)], 3, spin_us=1, nap_us=100)
    e, y = Expert(bank_of(Q.Q8_0), 1), empty(1, 352)
    until(lambda: pool.counts()["asleep"] == 3)
    done(ring, [e.job(y, [0])])
    until(lambda: pool.counts()["asleep"] == 3)
    pool.wake()
    done(ring, [e.job(y, [0])])
    until(lambda: pool.counts()["asleep"] == 3)
    for awake_s in (1.5, 0.0):  # the second takes nothing from the first
        pool.wake(awake_s)
        until(lambda: pool.counts()["asleep"] == 0)
        time.sleep(0.1)
        assert pool.counts()["asleep"] == 0
    until(lambda: pool.counts()["asleep"] == 3)


def test_who_opens_a_job_wakes_the_others(ring: Ring, pools: Any) -> None:
    pool = pools([bank_of(Q.Q8_0)], 3, spin_us=1, nap_us=100)
    e, y = Expert(bank_of(Q.Q8_0), 1), empty(1, 352)
    until(lambda: pool.counts()["asleep"] == 3)
    with pool.held("item", 3):
        (number,) = ring.post([e.job(y, [0])])
        until(lambda: pool.counts()["held"] == 3)
    assert ring.wait(number, LONG_S) == DONE and (y == e.y).all()


def test_a_pool_that_drains_declines_and_begins_again(ring: Ring, pools: Any) -> None:
    pool = pools([bank_of(Q.Q8_0)])
    e, y = Expert(bank_of(Q.Q8_0), 1), empty(1, 352)
    done(ring, [e.job(y, [0])])
    assert pool.drain(LONG_S)
    numbers = ring.post([e.job(y, [0])] * 2)
    assert [ring.wait(n, LONG_S) for n in numbers] == [DECLINED, DECLINED]
    pool.reset()
    assert ring.post([e.job(y, [0])]) == range(1, 2) and ring.wait(1, LONG_S) == DONE


def test_a_pool_that_is_closed_answers_nothing(ring: Ring, pools: Any) -> None:
    pool = pools([bank_of(Q.Q8_0)])
    e, y = Expert(bank_of(Q.Q8_0), 1), empty(1, 352)
    pool.close()
    pool.close()
    (number,) = ring.post([e.job(y, [0])])
    assert ring.wait(number, 0.01) == NONE and ring.take_back(number) == NONE


def test_a_pool_closes_while_a_thread_is_held(ring: Ring, pools: Any) -> None:
    pool = pools([bank_of(Q.Q8_0)])
    e, y = Expert(bank_of(Q.Q8_0), 1), empty(1, 352)
    pool._kernels.spark_jobs_hold(pool._handle, 3, 1)
    (number,) = ring.post([e.job(y, [0])])
    until(lambda: pool.counts()["held"] == 1)
    pool.close()
    assert ring.wait(number, 0) == DONE and (y == e.y).all()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc names threads")
def test_threads_have_a_name(ring: Ring) -> None:
    def named() -> set[str]:
        tasks = set()
        for path in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # a thread of an earlier test that ends now
                if (path / "comm").read_text() == f"{THREAD_NAME}\n":
                    tasks.add(path.name)
        return tasks

    before = named()
    pool = Jobs(ring, [Bank((Q.Q4_K, Q.Q4_K, Q.Q6_K), 256, 256)], [-1, -1])
    until(lambda: len(named() - before) == 2)
    pool.close()


WAKER = """
import sys
import time
sys.path.insert(0, sys.argv[1])
import numpy as np
from gguf import GGMLQuantizationType as Q
from engine.ops.jobs import RECORD_BYTES, Bank, Jobs, Ring
memory = np.zeros(RECORD_BYTES + 64, np.uint8)
skew = -memory.ctypes.data % 64
ring = Ring(memory[skew : skew + RECORD_BYTES])
pool = Jobs(ring, [Bank((Q.Q8_0,) * 3, 64, 64)], [-1] * 3, spin_us=200, nap_us=1e6)
while pool.counts()["asleep"] < 3:
    time.sleep(0.001)
print("ready", flush=True)
for _ in sys.stdin:
    pool.wake()
    print("woken", flush=True)
"""


class Helper:
    """A process that runs a script, a line of it for each line that it is given; its threads may be stopped."""

    def __init__(self, script: str) -> None:
        command = [sys.executable, "-c", script, str(Path(__file__).parents[2])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    @property
    def threads(self) -> list[int]:
        return threads_of(self.process.pid)

    def answer(self, line: str = "") -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], LONG_S)[0], "it waits"
        return self.process.stdout.readline().rstrip()


@pytest.fixture
def helper(request: pytest.FixtureRequest) -> Iterator[Helper]:
    if sys.platform != "linux":
        pytest.skip("threads are stopped by ptrace")
    made = Helper(request.param)
    try:
        if not may_trace(made.process.pid):
            pytest.skip("ptrace is not permitted")
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


@pytest.mark.parametrize("helper", [WAKER], indirect=True)
def test_who_wakes_threads_waits_for_none_that_is_stopped(helper: Helper) -> None:
    with stopped(helper.threads[:2]):
        for _ in range(5):
            assert helper.answer() == "woken"
            time.sleep(0.02)  # so that the third one sleeps again


PRESENT = WAKER.split("for _ in")[0] + """
for line in sys.stdin:
    order = line.strip()
    if order == "dismiss":
        pool.dismiss()
        while pool.counts()["asleep"] < 3:
            time.sleep(0.001)
    elif order == "wake":
        pool.wake(600)
        while pool.counts()["asleep"]:
            time.sleep(0.001)
    print(pool.missing(0.5), flush=True)
"""


@pytest.mark.parametrize("helper", [PRESENT], indirect=True)
def test_threads_that_are_stopped_are_missing_while_they_should_be_awake(helper: Helper) -> None:
    time.sleep(0.6)
    assert helper.answer("look") == "0"  # asleep, as they may be
    helper.answer("wake")
    until(lambda: helper.answer("look") == "0")
    with stopped(helper.threads[:2]):
        until(lambda: helper.answer("look") == "2")
    until(lambda: helper.answer("look") == "0")
    assert helper.answer("dismiss") == "0"  # and 600 s are not waited for
    helper.answer("wake")
    until(lambda: helper.answer("look") == "0")


def test_threads_are_bound_to_cores(ring: Ring) -> None:
    import os

    core = min(os.sched_getaffinity(0))
    pool = Jobs(ring, [bank_of(Q.Q8_0)], [core, -1, 100_000])
    until(lambda: pool.counts()["bound"] == 1)
    pool.close()


def test_plans_that_make_no_pool_are_refused(ring: Ring) -> None:
    bank = bank_of(Q.Q8_0)
    with pytest.raises(ValueError, match="make no pool"):
        Jobs(ring, [], [0])
    with pytest.raises(ValueError, match="make no pool"):
        Jobs(ring, [bank], [0], max_tokens=33)
    with pytest.raises(ValueError, match=r"isa: expected one of portable.*, got mmx"):
        Jobs(ring, [bank], [0], isa="mmx")
    with pytest.raises(ValueError, match="gate and up: F16 and Q8_0"):
        Bank((Q.F16, Q.Q8_0, Q.Q8_0), 64, 32)
    with pytest.raises(ValueError, match="n_ff: expected a multiple of 32"):
        Bank((Q.Q8_0, Q.Q8_0, Q.Q8_0), 64, 48)
    with pytest.raises(ValueError, match="expected 1 to 64 records of 256 aligned bytes"):
        Ring(aligned(256)[:255])
    with pytest.raises(ValueError, match="6 jobs for a ring of 5"):
        ring.post([Expert(bank, 1).job(empty(1, 352), [0])] * 6)


def test_the_record_is_that_of_the_header() -> None:
    from engine.formats import block_types

    text = (block_types.FOLDER / "expert_job.h").read_text().partition("typedef struct spark_job {")[2]
    names = []
    for line in text.partition("} spark_job;")[0].splitlines():
        inside = line.lstrip().startswith("*") or "*/" in line.partition("/*")[0]
        code = line.partition("*/")[2] if inside else line.partition("/*")[0]
        if ";" in code:
            names += [n.split("[")[0].split()[-1] for n in code.partition(";")[0].split(",")]
    assert names == [field[0] for field in JobRecord._fields_]
    assert (RECORD_BYTES, JobRecord.source.offset, JobRecord.answer.offset) == (256, 64, 192)


def until(condition: Any) -> None:
    """Wait for what other threads bring about."""
    event = threading.Event()
    for _ in range(60_000):
        if condition():
            return
        event.wait(0.001)
    raise AssertionError("waited a minute for nothing")
