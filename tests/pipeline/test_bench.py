"""`spark bench` and the drivers of the benchmarks, on the bundled model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import cuda_kernels, decode, driving, prefill, profile_step, releases, soak
from engine.ground.config import EngineConfig
from engine.ground.errors import CapacityError, SparkError, UsageError
from engine.ground.protocol import Done, Timing, Usage
from engine.ops.cuda.device import Module
from engine.running.ahead import AHEAD_STEPS
from spark.daemon.client import DaemonClient, Deadlines
from spark.pipeline import bench as bench_module
from spark.pipeline import replay
from spark.pipeline.bench import BenchOptions, BenchRow, bench, break_even, check_settings
from tests.tiny_models import write_tiny

NANO = Path(__file__).parents[2] / "data" / "nano" / "nano.gguf"
CONFIG = EngineConfig(model=NANO, device="cpu", threads=2, ctx_tokens=256)
DEADLINES = Deadlines(ready_s=60, silence_s=60, total_s=120)
INFO = {
    "device": "cpu", "policy": "lru", "kv_type": "f16", "ctx_tokens": 256, "chunk_tokens": 256, "threads": 2,
    "draft": "auto", "residency_pct": 59.4, "model": {"expert_bytes": [100, 100], "n_expert": 32},
}  # fmt: skip


def quiet(label: str, done: int, total: int) -> None:
    assert 0 <= done <= total, label


def test_rows() -> None:
    options = BenchOptions((100.0, 40.0), prompts=2, prompt_tokens=40, generate_tokens=12)
    report = bench(CONFIG, options, DEADLINES, quiet)
    all_resident, some = report.rows
    assert (all_resident.policy, all_resident.miss_pct, all_resident.identical_tokens) == ("all", 0.0, None)
    assert (some.policy, some.identical_tokens) == ("lru", True)
    assert 39.0 < some.residency_pct <= 40.0
    assert 5.0 < some.miss_pct < 95.0
    assert some.device_bytes < all_resident.device_bytes
    made = report.to_json()
    assert made["device"] == "cpu"
    assert made["prompts"] == "the Python standard library"
    keys = {"residency_pct", "miss_pct", "decode_tokens_per_s", "prefill_tokens_per_s", "device_bytes"}
    assert all(keys <= row.keys() and row["decode_tokens_per_s"] > 0 for row in made["rows"])


@pytest.mark.slow
def test_a_second_pass_has_drafts() -> None:
    """Of which a machine that is busy with other things may have none."""
    options = BenchOptions((100.0,), prompts=2, prompt_tokens=40, generate_tokens=60)
    (row,) = bench(CONFIG, options, DEADLINES, quiet).to_json()["rows"]
    assert row["draft_identical_tokens"] is True
    assert row["accepted_pct"] is None or 0 <= row["accepted_pct"] <= 100
    low, high = row["draft_decode_spread"]
    assert 0 < low <= row["draft_decode_tokens_per_s"] <= high
    one, *longer = (int(n) for n in row["step_ms"])
    assert one == 1 and all(ms > 0 for ms in row["step_ms"].values())
    assert [int(n) for n in row["break_even_acceptance"]] == longer


def test_figures_of_the_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [[7, 8, 9], [1, 2, 3], [4, 5, 6]]
    asked: list[list[int]] = []

    def finish(prediction: list[int]) -> tuple[list[int], Done]:
        asked.append(prediction)
        lookup, other = {"drafted": 10 * len(asked), "accepted": 6}, {"drafted": 2, "accepted": 1}
        usage = Usage(2, 3, drafts={"lookup": lookup, "other": other})
        return [*prediction], Done(1, usage, Timing(0.1, len(asked) / 10), {})

    client = SimpleNamespace(
        generate=lambda prompt, *, prediction, **_: prediction,
        stats=lambda: {"drafts": {"step_ms": {"1": {"0": 2.0, "1": 2.5, "3": 9.0}, "2": {"0": 3.0}}}},
    )
    monkeypatch.setattr(replay, "finish", finish)
    before = BenchRow(100.0, "all", 0.0, 5.0, (4.0, 6.0), 9.0, (9.0, 9.0), 1, None)
    row = bench_module._drafted(before, client, known, known, BenchOptions(), 100.0, quiet)  # type: ignore[arg-type]
    assert asked == known and row.draft_identical_tokens is True
    assert row.draft_decode_spread == (pytest.approx(2 / 0.3), pytest.approx(2 / 0.2))  # without the one that warms up
    assert row.draft_decode_tokens_per_s == pytest.approx(25 / 3) and row.accepted_pct == 100 * 14 / 54
    assert row.step_ms == {"1": 2.0, "2": 2.5, "4": 9.0}
    assert row.break_even_acceptance == {"2": pytest.approx(0.25, abs=1e-5), "4": None}
    assert (row.decode_tokens_per_s, row.prefill_tokens_per_s) == (5.0, 9.0)


@pytest.mark.slow
def test_without_drafts_there_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = DaemonClient.generate

    def generate(*args, draft: bool, **more):
        asked.append(draft)
        return real(*args, draft=draft, **more)

    monkeypatch.setattr(DaemonClient, "generate", generate)
    options = BenchOptions((100.0,), prompts=1, prompt_tokens=9, generate_tokens=4)
    (row,) = bench(replace(CONFIG, draft="off"), options, DEADLINES, quiet).rows
    assert row.draft_decode_tokens_per_s is None and not row.step_ms and asked == [False] * 2
    bench(CONFIG, options, DEADLINES, quiet)
    assert asked[2:] == [False, False, True, True]


@pytest.mark.parametrize(
    ("n_tokens", "cost", "expected"),
    [(2, 1.0, 0.0), (2, 1.25, 0.25), (2, 0.9, 0.0), (2, 2.0, 1.0), (2, 2.01, None), (4, 1.875, 0.5), (3, 2.71, 0.9)],
)
def test_break_even(n_tokens: int, cost: float, expected: float | None) -> None:
    assert break_even(n_tokens, cost) == (expected if expected is None else pytest.approx(expected, abs=1e-5))


@pytest.mark.slow
def test_a_model_without_a_tokenizer_gets_random_tokens(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf")
    options = BenchOptions((50.0,), prompts=1, prompt_tokens=9, generate_tokens=2)
    report = bench(replace(CONFIG, model=model), options, DEADLINES, quiet)
    assert report.prompts.startswith("random tokens")
    assert len(report.rows) == 1


@pytest.mark.parametrize(
    "options", [BenchOptions(()), BenchOptions((-1.0,)), BenchOptions((101.0,)), BenchOptions(generate_tokens=1)]
)
def test_options_are_refused(options: BenchOptions) -> None:
    with pytest.raises(UsageError):
        bench(CONFIG, options, DEADLINES, quiet)


def test_settings_are_read_back() -> None:
    asked = replace(CONFIG, policy="lru", residency_pct=60.0)
    check_settings(asked, INFO)
    with pytest.raises(SparkError, match="draft auto, asked for lookup"):
        check_settings(replace(asked, draft="lookup"), INFO)
    for name, value in (
        ("device", "reference"), ("policy", "spark"), ("kv_type", "q8_0"), ("ctx_tokens", 512), ("threads", 1),
        ("residency_pct", 55.0), ("residency_pct", 60.1),
    ):  # fmt: skip
        with pytest.raises(SparkError, match="asked for"):
            check_settings(asked, {**INFO, name: value})
    capped = replace(asked, vram_gib=2.0, residency_pct=100.0)
    planned = {**INFO, "device": "cuda", "plan": {"device_bytes": 2 << 30}}
    check_settings(replace(capped, device="cuda"), planned)
    with pytest.raises(SparkError, match="asked for 2 GiB"):
        check_settings(replace(capped, device="cuda"), {**planned, "plan": {"device_bytes": 3 << 30}})
    with pytest.raises(SparkError, match="asked for 100%"):
        check_settings(replace(capped, device="cpu"), {**planned, "device": "cpu"})


@pytest.mark.slow
def test_a_residency_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = replay.open_daemon

    def full(config: EngineConfig, *rest):
        if config.residency_pct > 50:
            raise CapacityError(f"{config.residency_pct:g} do not fit")
        return real(config, *rest)

    monkeypatch.setattr(replay, "open_daemon", full)
    options = BenchOptions((80.0, 40.0, 60.0), prompts=1, prompt_tokens=9, generate_tokens=2)
    report = bench(CONFIG, options, DEADLINES, quiet)
    assert report.skipped == ((80.0, "80 do not fit"), (60.0, "60 do not fit"))
    assert len(report.rows) == 1
    with pytest.raises(CapacityError, match="60 do not fit"):
        bench(CONFIG, replace(options, residencies=(80.0, 60.0)), DEADLINES, quiet)


# --- the drivers under benchmarks/ --------------------------------------------------------------------


class FakeDevice:
    """Captures by noting what was enqueued; a launch of the graph runs it again."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, list]] = []

    def kernel(self, module: Module, name: str):
        return lambda grid, block, args, shared_bytes=0, overlap=False: self.ran.append((name, list(args)))

    def capture(self, work):
        work()
        return SimpleNamespace(launch=work)

    def synchronize(self) -> None:
        pass


def test_time_launches_rotates_through_the_data() -> None:
    seen: list[int] = []
    times = cuda_kernels.time_launches(FakeDevice(), seen.append, samples=3)
    assert len(times) == 3
    assert all(t > 0 for t in times)
    assert set(range(cuda_kernels.GRAPH_LAUNCHES[1])) == set(seen)


def test_a_case_that_fails_is_a_row() -> None:
    def launch(i: int) -> None:
        raise RuntimeError("no kernel")

    row = cuda_kernels.measure(FakeDevice(), "products", cuda_kernels.KernelCase("x", launch, 8), 100.0)
    assert row["error"] == "RuntimeError: no kernel"


def test_stretches_of_imposed_routing_are_checked_exactly() -> None:
    resident = np.arange(16) < np.array([[9], [10], [12]])
    stretches = decode.Stretches(resident, 4, [0.0, 0.1, 0.1, 0.3], steps=50)
    assert stretches.choices.shape == (200, 3, 4)
    layers = np.arange(3)[:, None]
    misses = (~resident[layers, stretches.choices]).sum(axis=2)
    for i in (0, 1):
        stretches.check(misses[50 * i : 50 * i + 50].sum(axis=0).tolist())
    with pytest.raises(SystemExit, match="those of the steps from 101"):
        stretches.check(misses[101:151].sum(axis=0).tolist())
    with pytest.raises(SystemExit, match="of no stretch"):
        stretches.check([999, 0, 0])


@pytest.mark.slow
def test_decode_driver(tmp_path: Path) -> None:
    shape = driving.shape_of(NANO)
    prompts = driving.Prompts(shape.n_vocab)
    assert prompts.next(20) != prompts.next(20)
    rows, made = decode.all_resident(CONFIG, prompts, [20, 40], n_tokens=6, runs=2)
    assert [row["depth_tokens"] for row in rows] == [20, 40]
    assert all(row["decode_tokens_per_s"]["n"] == 2 for row in rows)
    assert made["policy"] == "all"


def test_turns_on_a_prefix() -> None:
    rows, _ = prefill.turns(replace(CONFIG, chunk_tokens=64), driving.Prompts(100), 100, [7, 30], runs=2)
    assert [row["new_tokens"] for row in rows] == [7, 30]
    assert all(row["seconds"]["n"] == 2 and row["prefix_tokens"] == 100 for row in rows)


def test_kernels_that_are_late_together() -> None:
    gains = {"a": 10.0, "b": 30.0, "c": -5.0, "d": 20.0, "e": 0.01}
    asked = []

    def time_of(late: frozenset[str]) -> float:
        asked.append(late)
        return 1000.0 - sum(gains[kind] for kind in late) + (25.0 if {"b", "d"} <= late else 0.0)

    base, each, late, best = releases.faster_together(gains, time_of)
    assert (base, each["c"], late, best) == (1000.0, 1005.0, frozenset("ab"), 960.0)
    assert asked[6:] == [frozenset("b"), frozenset("bd"), frozenset("ab")]


def test_some_kernels_are_compiled_to_be_late() -> None:
    class Named(FakeDevice):
        def kernel(self, module: Module, name: str):
            made.append((module, name))
            return super().kernel(module, name)

    made: list[tuple[Module, str]] = []
    device = Named()
    one, other = (Module("norm.cu"), "quantize"), (Module("norm.cu"), "add_norm")
    late = releases.Late(device)
    late.compile([one])
    with late:
        late.kernels = frozenset({one})
        device.kernel(*one)
        device.kernel(*other)
    device.kernel(*one)
    module = Module("norm.cu", (("LATE", "1"),))
    assert made == [(module, "quantize"), (module, "quantize"), other, one]


@pytest.mark.slow
def test_the_recorded_step_is_matched_with_the_trace() -> None:
    device = FakeDevice()
    recorder = profile_step.Recorder(device, [[10, 20, 30], [40, 50, 60]])
    weights, flags = np.zeros(100_000, np.uint8), np.zeros(9, np.uint8)

    def work() -> None:
        for _ in range(2):
            device.kernel(Module("product.cu", (("TYPE", "Q4_K"),)), "product")(1, 32, [weights, None, 3, flags])
            device.kernel(Module("experts.cu"), "gate_up")(2, 32, [weights])
            device.kernel(Module("experts.cu"), "down_one")(2, 32, [weights])

    with recorder.recording():
        device.kernel(Module("other.cu"), "other")(1, 1, [])
        device.capture(work)
    (step,) = recorder.steps
    assert [launch.n_bytes for launch in step] == [100_000, 30, 30, 100_000, 90, 60]
    assert "kernel" not in vars(device)
    names = ["product", "other", *(launch.name for launch in step), "down_one", *(launch.name for launch in step)]
    times, how = profile_step.by_kind(step, [(name, float(i), 2.0) for i, name in enumerate(names)])
    assert how == "CUPTI, in order"
    rows = profile_step.table(step, times, {}, named=False)
    product = next(row for row in rows if row["kernel"] == "product/product(TYPE=Q4_K)")
    assert (product["count"], product["us"], product["total_us"]) == (2, 2.0, 4.0)
    assert product["gb_per_s"] == 200_000 / 1e3 / 4.0
    assert abs(sum(row["share"] for row in rows) - 1) < 1e-9
    assert profile_step.alone(device, step).keys() == times.keys()

    # A step of 13 us: product 1 and 3 us on the path, gate_up 2 and 2, down_one 4 and 1; the fourth wait twice.
    numbers = {launch.module: 5 + i for i, launch in enumerate((step[0], step[1]))}
    stamps = [(0, 6)]  # of a step that began before the ring did
    for begin in range(5_000, 13_000 * 8, 13_000):
        for at, launch in zip((0, 1_000, 3_000, 7_000, 10_000, 12_000), step, strict=True):
            stamps += [(begin + at, numbers[launch.module])] * (1 + (at == 7_000))
    shuffled = np.random.default_rng(0).permutation(np.array(stamps, np.uint64))
    path = profile_step.on_path(step, numbers, [shuffled, shuffled[:0]])
    steps = 8 - AHEAD_STEPS
    assert path["product/product(TYPE=Q4_K)"] == [1.0, 3.0] * steps
    assert path["experts/gate_up"] == [2.0, 2.0] * steps
    assert path["experts/down_one"] == [4.0, 1.0] * steps
    rows = profile_step.table(step, times, path, named=False)
    assert sum(row["path_us"] for row in rows) == pytest.approx(13.0)


def test_growth_is_of_the_last_quarter() -> None:
    samples = [{"host_bytes": b, "device": None} for b in (0, 50, 100, 100, 110, 120, 140, 140)]
    assert soak.growth(samples, "host_bytes") == 40
    assert soak.growth(samples, "device") is None


@pytest.mark.slow
def test_soak_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "soak.json"
    arguments = ["--device=cpu", "--seconds=3", "--longest=100", "--ctx=512", f"--json={report}"]
    monkeypatch.setattr(sys, "argv", ["soak.py", str(NANO), *arguments])
    soak.main()
    made = json.loads(report.read_text())
    assert made["problems"] == []
    assert made["misses"] > 0
    assert sum(made["requests"].values()) > 3
