"""What experts that the CPU computes beside the GPU would cost: handing over within a step, and computing them.

A captured step of 48 layers posts a job in each, and needs its answer two kernels later (cuda/handover.cu). The jobs
have no rows: a thread of the pool (cpu/jobs.cpp) reads 2 KB of activations and answers. The answer is waited for in the
kernel that folds, by a warp of every block or of one; by stream memory operations; or made by a host callback. Each
with launches that overlap and without, while nothing else reads host memory, and while 4 blocks do as fast as they
can; and once with jobs that are an expert each. Then experts of two models on 1 to 16 cores, one to four at a time, out
of memory that no cache holds. An answer waits behind the reads that are under way, so steps are also timed beside
readers with fewer of them (--under-way): h against the rate. What could hang, waits of the driver, comes last.

    python benchmarks/handover.py --json data/results/handover.json
    python benchmarks/handover.py --device cpu            # experts alone

A way that fails is recorded with its error, and the rest goes on. Nothing waits longer than a second or two, figures
are written after each part, and after --seconds what there is is written and the process ends.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as QType

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.figures import json_option  # noqa: E402
from benchmarks.host_reader import UNDER_WAY, Reader  # noqa: E402
from engine.formats.quants import row_bytes  # noqa: E402
from engine.ground import cores  # noqa: E402
from engine.ground.cores import Cores  # noqa: E402
from engine.ground.errors import CapacityError  # noqa: E402
from engine.ops.cuda.device import Module  # noqa: E402
from engine.ops.jobs import DECLINED, DONE, RECORD_BYTES, Bank, Job, Jobs, Ring  # noqa: E402
from spark.results import write_json  # noqa: E402
from tests.gguf_files import random_blocks  # noqa: E402

LAYERS, RECORDS, COLUMNS = 48, 64, 2048
BLOCKS, THREADS = 128, 256
BOUND_NS = 20_000_000  # after which a kernel takes a job back
FORCED_S = 2.0  # after which a step is helped to its end
SPIN_US = 50_000.0  # of the pool's threads: longer than anything here pauses
MODULE = Module("handover.cu")
SHAPES = {"Qwen3-30B-A3B": (2048, 768), "Laguna-XS.2": (2048, 512)}  # columns and rows of gate and up
N_THREADS = (1, 2, 4, 8, 12, 16)
N_EXPERTS = (1, 2, 3, 4)

NONE, EVERY, ONE = "none", "flags, every block asks", "flags, one block asks"
MEMOPS, CALLBACK = "stream memory operations", "host callback"
DRIVERS = (MEMOPS, CALLBACK)
COMPUTED = "one block asks, an expert each"  # as ONE, with jobs that are an expert's whole work
WAITS = {EVERY: 1, ONE: 2, COMPUTED: 2}  # WAIT_EVERY, WAIT_RELAYED of handover.cu
# us of work ahead of the post, and between post and fold
STEPS = {"bare": (2.0, 0.0), "as a layer": (14.0, 8.0)}

Json = dict[str, Any]
Pools = dict[int, Callable[[], Jobs]]  # what makes one, by its threads


def spread(values: Sequence[float]) -> Json:
    ordered = sorted(values)
    at = min(len(ordered) - 1, int(0.99 * len(ordered)))
    middle = statistics.median(ordered)
    return {"median": middle, "p99": ordered[at], "min": ordered[0], "max": ordered[-1], "n": len(ordered)}


def aligned(n_bytes: int) -> np.ndarray:
    """Host memory at a multiple of 64 bytes, where there is no GPU to lock it for."""
    memory = np.zeros(n_bytes + 64, np.uint8)
    skew = -int(memory.ctypes.data) % 64
    return memory[skew : skew + n_bytes]


# --- handing over -----------------------------------------------------------------------------------


class Driver:
    """The calls that CuPy does not bind: stream memory operations and host callbacks, in a capture."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._write, self._wait = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
        for call in (self._write, self._wait):
            call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        self._launch = library.cuLaunchHostFunc
        self._launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        # A C function of one pointer that does nothing: free(NULL). Python's lock would be another's cost.
        self._nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)

    def write(self, stream: int, address: int, value: int) -> None:
        """Write a word in stream order."""
        self._check("cuStreamWriteValue32", self._write(stream, address, value, 0))

    def wait(self, stream: int, address: int, value: int) -> None:
        """The stream waits until a word is so large, or larger."""
        self._check("cuStreamWaitValue32", self._wait(stream, address, value, 0))

    def callback(self, stream: int) -> None:
        """The host is called, and does nothing."""
        self._check("cuLaunchHostFunc", self._launch(stream, self._nothing, None))

    @staticmethod
    def _check(what: str, status: int) -> None:
        if status:
            raise RuntimeError(f"{what} returned {status}")


@dataclass(frozen=True)
class Way:
    """How a step is handed over: what waits, whether launches overlap, the work around it."""

    wait: str
    overlap: bool
    step: str


class Rig:
    """A ring, places for activations and results, and the steps that use them.

    device: a GPU, or the tests' emulator. layers, blocks: of a step, and of its kernels.
    """

    def __init__(self, device: Any, layers: int = LAYERS, blocks: int = BLOCKS) -> None:
        self.device, self.layers, self.blocks = device, layers, blocks
        self.ring = Ring(device.page_locked(RECORDS * RECORD_BYTES))
        self.place_bytes = COLUMNS + COLUMNS // 8
        self.inputs = device.page_locked(RECORDS * self.place_bytes)
        self.outputs = device.page_locked(RECORDS * COLUMNS * 4)
        self.inputs[:], self.outputs[:] = 0, 0
        self.q = device.upload(np.arange(COLUMNS, dtype=np.uint8))
        self.d = device.upload(np.ones(COLUMNS // 32, np.float32))
        self.x = device.upload(np.zeros(COLUMNS, np.float32))
        self.counter, self.relayed = device.upload(np.zeros(1, np.uint64)), device.upload(np.zeros(1, np.uint64))
        self.stamps = device.upload(np.zeros((RECORDS, 2), np.uint64))
        self.marks = device.upload(np.zeros(2, np.uint64))
        self.failed, self.taken = device.upload(np.zeros(1, np.int32)), device.upload(np.zeros(1, np.int32))
        self.kernels = {name: device.kernel(MODULE, name) for name in ("fill", "post", "fold", "mark")}
        self.driver: Driver | None = None
        self.experts: Weights | None = None
        self.bank = Bank((QType.Q4_K,) * 3, COLUMNS, 768)

    def fill_ring(self) -> None:
        """Jobs without rows in all records: their activations are read, nothing is computed."""
        at, to = (self.device.pointer(a) for a in (self.inputs, self.outputs))
        for i in range(RECORDS):
            place = at + i * self.place_bytes
            self.ring.fill(i + 1, Job((place,) * 3, place, to + i * COLUMNS * 4, (0, 0), input_scales=place + COLUMNS))

    def begin(self, pool: Jobs) -> None:
        """Job 1 comes next, on both sides."""
        pool.reset()
        self.device.write(self.counter, np.zeros(1, np.uint64))
        self.device.write(self.relayed, np.zeros(1, np.uint64))
        self.device.write(self.failed, np.zeros(1, np.int32))
        self.device.write(self.taken, np.zeros(1, np.int32))

    def capture(self, way: Way) -> Any:
        """The step as a graph. RuntimeError: the driver does not capture what it takes."""
        if way.wait in DRIVERS and self.driver is None:
            self.driver = Driver()
        return self.device.capture(lambda: self._enqueue(way))

    def _enqueue(self, way: Way) -> None:
        before_us, between_us = STEPS[way.step]
        ring, on = np.uint64(self.ring.address), int(way.wait != NONE)
        inputs, outputs = (np.uint64(self.device.pointer(a)) for a in (self.inputs, self.outputs))
        fill = self.kernels["fill"]
        plain = True  # what follows a node that is no kernel does not overlap with it
        self.kernels["mark"](1, 1, (self.marks[:1],))
        for layer in range(self.layers):
            if before_us:
                fill(self.blocks, THREADS, (np.int64(1e3 * before_us),), overlap=way.overlap and not plain)
            self.kernels["post"](
                1, THREADS,
                (ring, RECORDS, self.counter, on, int(way.wait in WAITS), self.q, self.d, COLUMNS, inputs, self.stamps),
                overlap=way.overlap and not (plain and not before_us),
            )  # fmt: skip
            plain = self._nodes(way, layer, after_post=True)
            if between_us:
                fill(self.blocks, THREADS, (np.int64(1e3 * between_us),), overlap=way.overlap and not plain)
                plain = False
            plain = self._nodes(way, layer, after_post=False) or plain
            self.kernels["fold"](
                self.blocks, THREADS,
                (ring, RECORDS, self.counter, on, WAITS.get(way.wait, 0), self.relayed, np.int64(BOUND_NS), COLUMNS,
                 outputs, self.x, self.stamps, self.failed, self.taken),
                overlap=way.overlap and not plain,
            )  # fmt: skip
            plain = False
        self.kernels["mark"](1, 1, (self.marks[1:],))

    def _nodes(self, way: Way, layer: int, after_post: bool) -> bool:
        """What stands behind the post, and ahead of the fold, that is no kernel; whether there is something."""
        if way.wait not in DRIVERS:
            return False
        stream, record = self.device.current, self.ring.address + layer * RECORD_BYTES
        assert self.driver is not None
        if way.wait == CALLBACK:  # the CPU's work is done in it, so it stands where it is handed over
            if after_post:
                self.driver.callback(stream)
            return after_post
        if after_post:
            self.driver.write(stream, record, layer + 1)
        else:
            self.driver.wait(stream, record + 192, 4 * (layer + 1) + DONE)
        return True

    def run(self, graph: Any, way: Way, pool: Jobs, n_steps: int) -> Json:
        """us of each hand-over, from the post to when the fold has the answer, and of each step."""
        self.begin(pool)
        handovers: list[float] = []
        steps: list[float] = []
        for i in range(n_steps + 2):
            if way.wait == MEMOPS:  # the numbers are in the graph
                self.begin(pool)
            first = int(self.device.read(self.counter)[0])
            if way.wait == COMPUTED:
                self._other_experts()
            pool.wake()
            with self.helped(pool):
                graph.launch()
                stamps = self.device.read(self.stamps).astype(np.int64)
            if self.device.read(self.failed)[0]:
                raise RuntimeError(f"no answer to a job that was claimed, within {4 * BOUND_NS / 1e6:g} ms")
            if i >= 2:
                marks = self.device.read(self.marks).astype(np.int64)
                steps.append(float(marks[1] - marks[0]) / 1e3)
                places = [(first + layer) % RECORDS for layer in range(self.layers)]
                handovers += [float(stamps[p, 1] - stamps[p, 0]) / 1e3 for p in places]
        taken = int(self.device.read(self.taken)[0])
        return {"handover_us": spread(handovers), "step_us": spread(steps), "taken_back": taken}

    def _other_experts(self) -> None:
        """Each record has an expert that no cache holds."""
        if self.experts is None:
            raise RuntimeError("there are no experts")
        for i in range(RECORDS):
            record = self.ring.record(i + 1)
            record.source[:] = self.experts.next()
            record.last = COLUMNS

    @contextlib.contextmanager
    def helped(self, pool: Jobs) -> Iterator[None]:
        """Answer everything after a while, so that a stream that waits goes on; RuntimeError then."""
        forced = threading.Event()

        def force() -> None:
            forced.set()
            for i in range(RECORDS):
                self.ring.record(i + 1).answer = 0x7FFFFF00

        timer = threading.Timer(FORCED_S, force)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if forced.is_set():
            raise RuntimeError(f"a step did not end within {FORCED_S:g} s, before its jobs were answered for the CPU")


def ways() -> list[Way]:
    """All that are measured; the ones without a hand-over first, which others are compared with, the driver's last."""
    waits = (NONE, ONE, EVERY, COMPUTED, *DRIVERS)
    return [Way(wait, overlap, step) for wait in waits for step in STEPS for overlap in (True, False)]


def hand_over(rig: Rig, pools: Pools, pcie: str, n_steps: int, graphs: dict[Way, Any], rows: list[Json]) -> None:
    """Append rows of every way that has a graph, by the threads of the pool that answers."""
    for n_threads, make in pools.items():
        pool = make()
        try:
            for way, graph in graphs.items():
                if n_threads > min(pools) and way.wait not in (NONE, ONE, COMPUTED):
                    continue  # one thread tells the ways apart
                alike: Json = {"overlap": way.overlap, "step": way.step, "pcie": pcie, "threads": n_threads}
                row: Json = {"wait": way.wait, **alike}
                try:
                    if isinstance(graph, Exception):
                        raise graph
                    rig.fill_ring()
                    row |= rig.run(graph, way, pool, n_steps)
                    for plain in rows:
                        if way.wait != NONE == plain["wait"] and "step_us" in plain and alike.items() <= plain.items():
                            row["longer_us"] = (row["step_us"]["median"] - plain["step_us"]["median"]) / rig.layers
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"
                rows.append(row)
                shown = row.get("error") or (
                    f"{row['handover_us']['median']:7.2f} us, p99 {row['handover_us']['p99']:7.2f}; "
                    f"a layer {row.get('longer_us', 0.0):+6.2f} us"
                )
                overlaps = "overlap" if way.overlap else ""
                print(f"{pcie:5} {way.step:11} {way.wait:30} {overlaps:8}{n_threads:3}: {shown}", flush=True)
        finally:
            pool.drain(1.0)
            pool.close()


# --- experts ------------------------------------------------------------------------------------------


@dataclass
class Weights:
    """Experts of a shape in Q4_K, as many as a buffer holds, one after the other."""

    name: str
    bank: Bank
    sources: list[tuple[int, int, int]]
    n_bytes: int
    at: int = 0
    kept: list[Any] = field(default_factory=list)

    @classmethod
    def fill(cls, name: str, memory: np.ndarray) -> Weights:
        """Write random experts to a buffer: one, again and again, since only where it lies counts."""
        D, F = SHAPES[name]
        shapes = ((F, D), (F, D), (D, F))
        rng = np.random.default_rng(1)
        one = np.concatenate([random_blocks(QType.Q4_K, *shape, rng).reshape(-1) for shape in shapes])
        n = memory.nbytes // one.nbytes
        memory[: n * one.nbytes].reshape(n, one.nbytes)[:] = one
        sizes = [rows * row_bytes(QType.Q4_K, cols, name) for rows, cols in shapes]
        starts = np.cumsum([0, *sizes[:2]])
        base = int(memory.__array_interface__["data"][0])
        sources = [tuple(int(base + i * one.nbytes + s) for s in starts) for i in range(n)]
        return cls(name, Bank((QType.Q4_K,) * 3, D, F), sources, one.nbytes)  # type: ignore[arg-type]

    def next(self) -> tuple[int, int, int]:
        """The expert that was read longest ago."""
        self.at = (self.at + 1) % len(self.sources)
        return self.sources[self.at]


def compute(weights: Weights, pool: Jobs, n: int, rounds: int, seconds: float) -> list[float]:
    """us of n experts at once, from the first claim to the last answer, again and again with others."""
    D = weights.bank.n_embd
    rng = np.random.default_rng(2)
    q, d = rng.integers(-127, 128, D).astype(np.int8), np.full(D // 32, 0.01, np.float32)
    outputs = [aligned(4 * D) for _ in range(n)]
    took: list[float] = []
    until = time.perf_counter() + seconds
    for i in range(rounds + 3):
        given, scales = int(q.ctypes.data), int(d.ctypes.data)
        jobs = [Job(weights.next(), given, int(y.ctypes.data), (0, D), input_scales=scales) for y in outputs]
        pool.wake()
        numbers = pool.ring.post(jobs)
        limit = time.perf_counter() + 2.0
        records = [pool.ring.record(number) for number in numbers]
        # Asleep, so that no core of the pool's is this thread's.
        while any(r.answer != 4 * number + DONE for r, number in zip(records, numbers, strict=True)):
            if any(r.answer == 4 * number + DECLINED for r, number in zip(records, numbers, strict=True)):
                raise RuntimeError("the pool declined a job")
            if time.perf_counter() > limit:
                raise RuntimeError("experts were not computed within 2 s")
            time.sleep(20e-6)
        if i >= 3:
            took.append((max(r.done_ns for r in records) - min(r.claimed_ns for r in records)) / 1e3)
        if i >= 12 and time.perf_counter() > until:
            break
    return took


def experts(
    memory: np.ndarray, ring: Ring, cpus: Sequence[int], reader: Reader | None, rounds: int, s: float, rows: list[Json]
) -> None:
    """C(n): append rows of each shape, of numbers of experts and threads; s: seconds of each, about."""
    for name in SHAPES:
        weights = Weights.fill(name, memory)
        for n_threads in sorted({n for n in N_THREADS if n <= len(cpus)} | {len(cpus)}):
            alike: Json = {"shape": name, "threads": n_threads, "pcie": "busy" if reader else "idle"}
            group = [alike | {"experts": n, "expert_bytes": weights.n_bytes} for n in N_EXPERTS]
            rows += group
            try:
                _on_threads(group, weights, ring, cpus[-n_threads:], reader, rounds, s)
            except Exception as error:
                for row in group:
                    row.setdefault("error", f"{type(error).__name__}: {error}")
            for row in group:
                shown = row.get("error") or f"{row['us']['median']:8.1f} us, {row['gb_per_s']:6.1f} GB/s"
                print(f"{row['pcie']:5} {name:14} {row['experts']} experts, {n_threads:2} threads: {shown}", flush=True)


def _on_threads(
    group: list[Json], weights: Weights, ring: Ring, cpus: Sequence[int], reader: Reader | None, rounds: int, s: float
) -> None:
    """What one pool takes for each row's number of experts; s: seconds of each, about."""
    pool = Jobs(ring, [weights.bank], cpus, max_tokens=1, spin_us=SPIN_US)
    try:
        pool.reset()
        if reader is not None:
            reader.start()
        try:
            for row in group:
                try:
                    row["us"] = spread(compute(weights, pool, row["experts"], rounds, s))
                    row["gb_per_s"] = row["experts"] * weights.n_bytes / row["us"]["median"] / 1e3
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"
        finally:
            rate = reader.end() if reader is not None else None
        for row in group:
            row["bound_threads"] = pool.counts()["bound"]
            if rate is not None:
                row["reader_gb_per_s"] = rate
    finally:
        pool.drain(1.0)
        pool.close()


# --- all of it ------------------------------------------------------------------------------------------


class Report:
    """What is known so far, which is written whatever becomes of the rest."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.made: Json = {"handovers": [], "experts": [], "under_way": [], "errors": []}

    @contextlib.contextmanager
    def part(self, what: str) -> Iterator[None]:
        """A part that may fail alone; what there is is written behind it."""
        try:
            yield
        except Exception as error:
            self.made["errors"].append(f"{what}: {type(error).__name__}: {error}")
            print(self.made["errors"][-1], flush=True)
        self.write()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured."""
        return not any("error" not in row for row in self.made["handovers"] + self.made["experts"])

    def write(self) -> None:
        """Write it to its file, where it has one and there is something to write."""
        if self.path and not self.is_empty:
            write_json(self.path, self.made)

    def give_up(self) -> None:
        """The time is over: write what there is, and end whatever hangs with the process."""
        self.made["errors"].append("the time was over before all was measured")
        print(self.made["errors"][-1], flush=True)
        try:
            self.write()
        finally:
            os._exit(3 if self.is_empty else 0)


def experts_memory(device: Any, n_bytes: int, report: Report) -> np.ndarray:
    """Page-locked memory for experts; a quarter where the host locks no more."""
    try:
        return np.asarray(device.page_locked(n_bytes))
    except CapacityError as error:
        report.made["errors"].append(f"{n_bytes} bytes for experts, of which a quarter was taken: {error}")
        return np.asarray(device.page_locked(n_bytes // 4 // 4096 * 4096))


def on_gpu(report: Report, found: Cores, cpus: Sequence[int], n_bytes: int, o: argparse.Namespace) -> None:
    """Everything, in parts that may fail alone."""
    from engine.ops.cuda import gpu

    device = gpu.open_device()
    made = report.made
    rig = Rig(device)
    data = experts_memory(device, n_bytes, report)
    made["gib"] = data.nbytes / (1 << 30)
    rig.experts = Weights.fill(next(iter(SHAPES)), data)
    rig.bank = rig.experts.bank
    with report.part("hostNativeAtomicSupported"):  # CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED
        native = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(native), 86, device.ordinal)
        made["host_native_atomics"] = bool(native.value)
    graphs: dict[Way, Any] = {}
    for way in ways():  # before anything runs beside them
        try:
            graphs[way] = rig.capture(way)
        except Exception as error:
            graphs[way] = error
    sure, unsure = ({w: g for w, g in graphs.items() if (w.wait in DRIVERS) == late} for late in (False, True))
    few = max(1, len(found.cpus or cpus) - 1)
    pools: Pools = {
        n: functools.partial(Jobs, rig.ring, [rig.bank], cpus[-n:], max_tokens=1, spin_us=SPIN_US)
        for n in sorted({1, few})
    }
    reader = Reader(device, data)
    ring = Ring(device.page_locked(RECORDS * RECORD_BYTES))

    def beside_a_reader(pools: Pools, graphs: dict[Way, Any]) -> None:
        reader.start()
        try:
            hand_over(rig, pools, "busy", o.steps, graphs, made["handovers"])
        finally:
            made.setdefault("reader_beside_steps_gb_per_s", reader.end())

    with report.part("reader alone"):
        made["reader_gb_per_s"] = reader.rate()
    with report.part("handing over"):
        hand_over(rig, pools, "idle", o.steps, sure, made["handovers"])
    with report.part("experts"):
        experts(data, ring, cpus, None, o.rounds, o.row_seconds, made["experts"])
    with report.part("handing over beside a reader"):
        beside_a_reader(pools, sure)
    with report.part("experts beside a reader"):
        experts(data, ring, cpus, reader, o.rounds, o.row_seconds, made["experts"])
    with report.part("handing over beside readers with less under way"):
        for kib in o.under_way:
            limited = Reader(device, data, kib)
            made["under_way"].append(row := {"kib": kib, "gb_per_s": limited.rate(), "handovers": []})
            limited.start()
            try:
                few = {way: graph for way, graph in sure.items() if way.overlap and way.wait in (NONE, ONE)}
                hand_over(rig, {1: pools[1]}, "busy", o.steps, few, row["handovers"])
            finally:
                row["beside_gb_per_s"] = limited.end()
    with report.part("the driver's ways"):
        hand_over(rig, {1: pools[1]}, "idle", o.steps, unsure, made["handovers"])
    with report.part("the driver's ways beside a reader"):
        beside_a_reader({1: pools[1]}, unsure)
    with report.part("closing the GPU"):
        device.close()


def main() -> None:
    """Measure, and exit with 1 where there is nothing to show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    json_option(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gib", type=float, default=1.0, help="of experts")
    parser.add_argument("--steps", type=int, default=60, help="of each way of handing over")
    parser.add_argument("--rounds", type=int, default=60, help="of each number of experts and threads, at most")
    parser.add_argument("--row-seconds", type=float, default=0.12, help="of such rounds, about")
    parser.add_argument(
        "--under-way", default="128,64,32,16", type=lambda given: [int(kib) for kib in given.split(",") if kib],
        help=f"KiB of reads that other readers have under way, of {', '.join(map(str, UNDER_WAY))}; empty: none",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=85.0, help="after which the process ends")
    o = parser.parse_args()
    report = Report(o.json)
    watchdog = threading.Timer(o.seconds, report.give_up)
    watchdog.daemon = True
    watchdog.start()
    bus = None
    with contextlib.suppress(Exception):
        from cupy.cuda import runtime

        bus = str(runtime.deviceGetPCIBusId(0))
    found = cores.find(gpu=bus, spare=0)
    # Other threads of a core and cores far away come first: pools take from the end, and the largest has them, too.
    allowed = sorted(os.sched_getaffinity(0))
    cpus = [cpu for cpu in allowed if cpu not in found.cpus] + list(found.cpus)
    how = {"cpus": list(found.cpus), "allowed": allowed, "why": found.why}
    report.made |= {"device": o.device, "layers": LAYERS, "cores": how}
    print(found.why, flush=True)
    n_bytes = int(o.gib * (1 << 30)) // 4096 * 4096
    if o.device == "cuda":
        with report.part("the GPU"):
            on_gpu(report, found, cpus, n_bytes, o)
    else:
        report.made["gib"] = o.gib
        with report.part("experts"):
            ring = Ring(aligned(RECORDS * RECORD_BYTES))
            experts(aligned(n_bytes), ring, cpus, None, o.rounds, o.row_seconds, report.made["experts"])
    watchdog.cancel()
    if report.is_empty:
        sys.exit(1)


if __name__ == "__main__":
    main()
