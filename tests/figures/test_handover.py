"""benchmarks/handover.py without a GPU: the steps on the emulator, whose kernels wait for the pool's threads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from ctypes import c_uint32
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from benchmarks import handover, handover_results, render
from benchmarks.handover import CALLBACK, COLUMNS, COMPUTED, EVERY, MEMOPS, NONE, ONE, RECORDS, STEPS, Rig, Way
from engine.formats.quants import QTensor
from engine.ops import arithmetic, jobs
from engine.ops.jobs import RECORD_BYTES, Bank, Jobs, Ring
from tests.gguf_files import random_blocks

LAYERS = 5


@pytest.fixture
def rig(device: Any, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(handover, "STEPS", {"bare": (1.0, 0.0), "as a layer": (2.0, 1.0)})
    monkeypatch.setattr(handover, "BOUND_NS", 20_000_000_000)
    return Rig(device, LAYERS, blocks=3)


@pytest.fixture
def pool(rig: Rig) -> Iterator[Jobs]:
    made = Jobs(rig.ring, [rig.bank], [-1, -1], max_tokens=1)
    yield made
    made.close()


@pytest.mark.parametrize("overlap", [False, True], ids=["apart", "overlap"])
@pytest.mark.parametrize("step", ["bare", "as a layer"])
@pytest.mark.parametrize("wait", [NONE, EVERY, ONE])
def test_a_step_hands_over_every_layer(wait: str, step: str, overlap: bool, rig: Rig, pool: Jobs) -> None:
    rig.fill_ring()
    way = Way(wait, overlap, step)
    made = rig.run(rig.capture(way), way, pool, 13)
    assert made["handover_us"]["n"] == 13 * LAYERS and made["step_us"]["n"] == 13
    assert 0 < made["handover_us"]["min"] <= made["handover_us"]["median"] <= made["step_us"]["max"]
    assert pool.counts()["done"] == (0 if wait == NONE else 15 * LAYERS)  # more than the ring has
    sent = np.arange(COLUMNS, dtype=np.uint8)
    places = rig.inputs.reshape(RECORDS, rig.place_bytes)[:, :COLUMNS]
    assert (places == (sent if wait != NONE else 0)).all()


@pytest.mark.parametrize("wait", [EVERY, ONE])
def test_what_the_cpu_computes_reaches_the_fold(wait: str, device: Any, rig: Rig) -> None:
    F, rng = 64, np.random.default_rng(3)
    shapes = ((F, COLUMNS), (F, COLUMNS), (COLUMNS, F))
    gate, up, down = (QTensor("w", QType.Q8_0, s, random_blocks(QType.Q8_0, *s, rng).reshape(-1)) for s in shapes)
    h = rng.standard_normal((1, COLUMNS)).astype(np.float32)
    q, d = arithmetic.quantize_activations(h)
    y = arithmetic.product(down, arithmetic.silu(arithmetic.product(gate, h)) * arithmetic.product(up, h))
    rig.bank = Bank((QType.Q8_0,) * 3, COLUMNS, F)
    device.write(rig.q, q[0].view(np.uint8))
    device.write(rig.d, d[0])
    rig.fill_ring()
    for i in range(RECORDS):
        record = rig.ring.record(i + 1)
        record.source[:] = [w.data.ctypes.data for w in (gate, up, down)]
        record.last = COLUMNS
    with_jobs = Jobs(rig.ring, [rig.bank], [-1, -1], max_tokens=1)
    way = Way(wait, False, "bare")
    rig.run(rig.capture(way), way, with_jobs, 1)
    with_jobs.close()
    x = np.zeros(COLUMNS, np.float32)
    for _ in range(3 * LAYERS):
        x += y[0]
    np.testing.assert_array_equal(device.read(rig.x), x)


@pytest.mark.parametrize("wait", [EVERY, ONE])
def test_jobs_that_nobody_claims_are_taken_back(wait: str, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "BOUND_NS", 1_000_000)
    pool = Jobs(rig.ring, [rig.bank], [-1], max_tokens=1)
    way = Way(wait, True, "bare")
    graph = rig.capture(way)
    rig.fill_ring()
    with pool.held("before claim"):
        made = rig.run(graph, way, pool, 1)  # the thread stops at its first job, and is stopped for all others
    assert made["taken_back"] == 3 * LAYERS
    assert pool.drain(60) and pool.counts()["done"] == 0
    pool.close()


@pytest.mark.parametrize("wait", [EVERY, ONE])
def test_a_job_that_is_claimed_and_never_done_ends_the_step(
    wait: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "BOUND_NS", 1_000_000)
    pool = Jobs(rig.ring, [rig.bank], [-1], max_tokens=1)
    way = Way(wait, True, "bare")
    graph = rig.capture(way)
    rig.fill_ring()
    begin = rig.begin

    def begin_claimed(pool: Jobs) -> None:
        """The first job is the CPU's before the step posts it: this machine may have no time for it later."""
        begin(pool)
        jobs.kernels().spark_job_post(rig.ring.address, RECORDS, 1, 1)
        until(lambda: pool.counts()["held"] == 1)

    monkeypatch.setattr(rig, "begin", begin_claimed)
    with pool.held("claimed"), pytest.raises(RuntimeError, match="no answer to a job that was claimed, within 4 ms"):
        rig.run(graph, way, pool, 1)
    pool.close()


def test_a_way_that_fails_is_a_row_and_the_others_go_on(rig: Rig) -> None:
    graphs: dict[Way, Any] = {}
    for wait in (NONE, ONE, MEMOPS, CALLBACK):
        way = Way(wait, True, "as a layer")
        try:
            graphs[way] = rig.capture(way)
        except OSError as error:  # no driver here
            graphs[way] = error
    rows: list[Any] = []
    pools = {1: lambda: Jobs(rig.ring, [rig.bank], [-1], max_tokens=1)}
    handover.hand_over(rig, pools, "idle", 2, graphs, rows)
    assert [r["wait"] for r in rows] == [NONE, ONE, MEMOPS, CALLBACK]
    assert "longer_us" in rows[1] and "error" not in rows[1]
    assert all("libcuda" in r["error"] for r in rows[2:])


def test_the_whole_program(tmp_path: Path, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory operations and callbacks are done when they are enqueued, and the reader reads nothing."""
    from engine.ops.cuda import gpu

    class Driver:
        def write(self, stream: int, address: int, value: int) -> None:
            device._enqueue(lambda: store(address, value))

        def wait(self, stream: int, address: int, value: int) -> None:
            device._enqueue(lambda: until(lambda: c_uint32.from_address(address).value >= value))

        def callback(self, stream: int) -> None:
            device._enqueue(lambda: None)

    device.ordinal, device.current = 0, 0
    device.runtime = SimpleNamespace(streamSynchronize=lambda handle: None)
    device.stream = lambda: SimpleNamespace(handle=0)
    monkeypatch.setattr(gpu, "open_device", lambda: device)
    monkeypatch.setattr(handover, "Driver", Driver)
    monkeypatch.setattr(handover, "BOUND_NS", 20_000_000_000)  # others may have this machine's cores
    monkeypatch.setattr(handover, "FORCED_S", 60.0)
    monkeypatch.setattr(handover, "SPIN_US", 50.0)
    monkeypatch.setattr(handover, "N_EXPERTS", (1, 2))
    monkeypatch.setattr(handover, "SHAPES", {"a": (COLUMNS, 256)})
    monkeypatch.setattr(handover, "STEPS", {"bare": (1.0, 0.0), "as a layer": (2.0, 1.0)})
    start = handover.Reader.start
    monkeypatch.setattr(handover.Reader, "start", lambda self, seconds=0: start(self, 0))
    rig = handover.Rig
    monkeypatch.setattr(handover, "Rig", lambda device: rig(device, 2, 3))
    out = tmp_path / "handover.json"
    arguments = ["--steps", "1", "--rounds", "2", "--row-seconds", "0", "--gib", "0.004", "--under-way", "16"]
    monkeypatch.setattr("sys.argv", ["handover.py", "--json", str(out), *arguments])
    handover.main()
    made = json.loads(out.read_text())
    (error,) = made["errors"]
    assert error.startswith("hostNativeAtomicSupported: OSError")  # there is no driver
    assert not [r["error"] for r in made["handovers"] + made["experts"] if "error" in r]
    more = 12 if len(made["cores"]["cpus"]) > 2 else 0  # rows of a pool of all cores but one
    assert len(made["handovers"]) == 2 * (24 + more)
    assert {r["wait"] for r in made["handovers"]} == {NONE, EVERY, ONE, MEMOPS, CALLBACK, COMPUTED}
    assert {r["pcie"] for r in made["experts"]} == {"idle", "busy"}
    assert all("reader_gb_per_s" in r for r in made["experts"] if r["pcie"] == "busy")
    (limited,) = made["under_way"]
    assert limited["kib"] == 16 and limited["gb_per_s"] == limited["beside_gb_per_s"] == 0  # for so long
    assert [(r["wait"], r["step"]) for r in limited["handovers"]] == [(w, s) for w in (NONE, ONE) for s in STEPS]
    assert "| 16 |" in "\n".join(handover_results.handover("handover.json", made))


def test_without_a_gpu_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from engine.ground.errors import SparkError
    from engine.ops.cuda import gpu

    def none() -> None:
        raise SparkError("no GPU here")

    monkeypatch.setattr(gpu, "open_device", none)
    monkeypatch.setattr("sys.argv", ["handover.py", "--json", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit, match="1"):
        handover.main()
    assert "the GPU: SparkError: no GPU here" in capsys.readouterr().out and not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("rows", [[], [{"us": {}}]], ids=["nothing", "something"])
def test_when_the_time_is_over_what_there_is_is_written(
    rows: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    report = handover.Report(tmp_path / "x.json")
    report.made["experts"] += rows
    report.give_up()
    assert ended == [0 if rows else 3] and (tmp_path / "x.json").exists() == bool(rows)
    assert not rows or "time was over" in json.loads((tmp_path / "x.json").read_text())["errors"][0]


def store(address: int, value: int) -> None:
    c_uint32.from_address(address).value = value


def until(condition: Callable[[], bool]) -> None:
    for _ in range(60_000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("waited a minute for nothing")


def test_experts_and_the_section_of_results(tmp_path: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "SHAPES", {"a": (256, 512), "b": (512, 256)})
    monkeypatch.setattr(handover, "N_EXPERTS", (1, 3))
    ring = Ring(handover.aligned(RECORDS * RECORD_BYTES))
    rows: list[Any] = []
    handover.experts(handover.aligned(4 << 20), ring, [-1, -1], None, 3, 0.0, rows)
    assert [(r["shape"], r["threads"], r["experts"]) for r in rows] == [
        (shape, threads, n) for shape in "ab" for threads in (1, 2) for n in (1, 3)
    ]
    assert all(r["us"]["n"] == 3 and r["gb_per_s"] > 0 for r in rows)
    graphs: dict[Way, Any] = {}
    for wait in (NONE, ONE):
        way = Way(wait, True, "bare")
        graphs[way] = rig.capture(way)
    graphs[Way(MEMOPS, True, "bare")] = RuntimeError("not | captured")
    report = handover.Report(tmp_path / "handover.json")
    pools = {1: lambda: Jobs(rig.ring, [rig.bank], [-1], max_tokens=1)}
    report.made["experts"] = [*rows, rows[0] | {"pcie": "busy", "reader_gb_per_s": 40.0}]
    handover.hand_over(rig, pools, "idle", 2, graphs, report.made["handovers"])
    report.made |= {"cores": {"why": "2 cores: all that there are", "cpus": [0, 1]}, "gib": 0.1, "layers": LAYERS}
    report.write()
    made = json.loads((tmp_path / "handover.json").read_text())
    lines = handover_results.handover("handover.json", made)
    text = "\n".join(lines)
    assert "RuntimeError: not / captured" in text and f"| {ONE} |" in text and "| a |" in text
    widths = {line.count("|") for line in lines if line.startswith("|")}
    assert len(widths) == 2  # of two tables, every row as wide as its head
    assert render.SECTIONS["handover.json"] is handover_results.handover
