"""benchmarks/never_below.py without a GPU: the list, pairs and ratios, stopped threads, gates that begin anew."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import faults, misses_results, never_below, watched_daemon
from benchmarks.batched import Reader
from benchmarks.faults import moved, nodes, quota, stopped, threads_of
from benchmarks.neighbors import Neighbors
from benchmarks.never_below import Run, Side, came_of, measure, row_of, summed, told, wrong
from benchmarks.never_below_cases import CASES, Case, taken
from benchmarks.routing import missed
from engine.ground import cores
from engine.ground.cores import Cores
from engine.placing.division import Costs
from engine.placing.misses import NOTHING
from engine.running import misses
from engine.serving.scheduler import Engine
from tests.engine_runs import config
from tests.tiny_models import k_quant_mix, write_tiny
from tests.uncrowded import leave_alone

NANO = Path(__file__).parents[2] / "data" / "nano" / "nano.gguf"
CHILD = """
import ctypes, sys, threading, time
n = [0]
def count():
    ctypes.CDLL(None).prctl(15, b"counts", 0, 0, 0)
    while True:
        n[0] += 1
        time.sleep(0.001)
for _ in range(2):
    threading.Thread(target=count, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    print(n[0], flush=True)
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc and ptrace are Linux's")


# --- the list and the figures -------------------------------------------------------------------------


def test_twenty_cases_and_a_quiet_one_say_what_they_are() -> None:
    assert len(CASES) == len({case.name for case in CASES}) == 21
    for case in CASES:
        assert len(case.what) >= 20 and "\n" not in case.what and "," not in case.name
        assert case.begins(32) in ("with the reply", "at token 32", "when the last reply has begun")
    with pytest.raises(SystemExit, match="no such case: nonsense"):
        never_below.chosen_of("deep,nonsense")
    assert [case.name for case in never_below.chosen_of("form,deep")] == ["deep", "form"]


def run(rate: float, tokens: tuple[int, ...] = (1, 2), how: str = "") -> Run:
    return Run(rate, 1024, [*tokens], None, how)


def test_a_ratio_is_of_medians_and_its_extremes_of_pairs() -> None:
    pairs = [(run(400), run(392, how="by hand")), (run(380), run(399, how="by hand")), (run(390), run(390))]
    row = row_of(CASES[0], pairs, {}, {})
    assert row["ratio"] == pytest.approx(392 / 390) and row["ratios"] == pytest.approx([0.98, 1.05])
    assert row["off_tokens_per_s"] == {"median": 390, "min": 380, "max": 400, "n": 3} and row["counted"] == 1024
    assert row["identical"] is True and row["how"] == "by hand"
    assert row_of(CASES[0], [(run(1), run(1, (1, 3)))], {}, {})["identical"] is False
    with pytest.raises(ValueError, match="no pair"):
        row_of(CASES[0], [], {}, {})


def test_what_came_of_runs_is_added_up() -> None:
    counts = {"computed": 5, "divided": 2, "taken_back": 1, "waited_s": 0.5, "state": "on", "why": "", "long": None}
    later = counts | {"computed": 25, "taken_back": 9, "state": "off", "why": "late"}
    guesses = {"made": 10, "useful": 4, "on": True}
    before = {"cpu_experts": counts, "guesses": guesses}
    one = came_of(before, {"cpu_experts": later, "guesses": guesses | {"made": 30}})
    assert one["jobs"] == {"computed": 20, "divided": 0, "taken_back": 8, "waited_s": 0.0}
    assert (one["gate"], one["why"], one["guesses_on"]) == ("off", "late", True)
    two = summed([one, one | {"gate": "on", "why": ""}])
    assert two["jobs"]["computed"] == 40 and two["guesses"] == {"made": 40, "useful": 0} and two["gate"] == "on"
    assert came_of({}, {"cpu_experts": {}, "guesses": {}}) == {}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sides whose replies are numbers; the side that is on takes 1% longer."""
    stats = itertools.count()
    found = SimpleNamespace(
        o=SimpleNamespace(before=32),
        off=SimpleNamespace(name="off"),
        on=SimpleNamespace(name="on", client=SimpleNamespace(stats=lambda: {"n": next(stats)})),
        order=[],
    )

    def reply(bench: Any, side: Any, case: Case, pair: int) -> Run:
        bench.order.append((side.name, pair))
        return Run(100.0 - pair - (side.name == "on"), 1024, [pair])

    monkeypatch.setattr(never_below, "one_reply", reply)
    return found


def test_sides_take_turns(bench: Any) -> None:
    row = measure(bench, CASES[0], 2, 60)
    assert bench.order == [("off", 0), ("on", 0), ("off", 1), ("on", 1)]
    assert row["case"] == CASES[0].name and row["identical"] and "error" not in row
    assert row["ratio"] == pytest.approx(98.5 / 99.5) and row["begins"] == "with the reply"
    assert "0.990 (0.990 to 0.990)" in told(row)


def test_what_fails_is_told_beside_what_was_measured(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good = never_below.one_reply

    def bad(bench: Any, side: Any, case: Case, pair: int) -> Run:
        if pair == 1 and side.name == "on":
            raise SystemExit("lost")
        return good(bench, side, case, pair)

    monkeypatch.setattr(never_below, "one_reply", bad)
    row = measure(bench, CASES[0], 3, 60)
    assert row["error"] == "SystemExit: lost" and row["on_tokens_per_s"]["n"] == 1 and "FAILED" in told(row)
    row = measure(bench, CASES[0], 3, -1)
    assert "0 of 3 pairs within" in row["error"] and "ratio" not in row and told(row).count("FAILED") == 1

    def other(bench: Any, side: Any, case: Case, pair: int) -> Run:
        return Run(100.0, 1024, [1], ([2, 3], [2, 3] if side.name == "off" else [3, 2]))

    monkeypatch.setattr(never_below, "one_reply", other)
    assert "on: 5 misses were imposed, 5 are reported" in measure(bench, CASES[0], 1, 60)["error"]


def test_a_table_of_it() -> None:
    off = {"median": 400.0, "min": 399.0, "max": 401.0, "n": 2}
    rows = [
        {"case": "a", "what": "all stop", "begins": "at token 32", "how": "ptrace", "off_tokens_per_s": off,
         "on_tokens_per_s": off, "ratio": 0.985, "ratios": [0.98, 0.99], "identical": True, "gate": "off",
         "why": "late", "jobs": {"computed": 1200, "divided": 3, "taken_back": 8, "waited_s": 0.1},
         "guesses": {"made": 0, "useful": 0}, "guesses_on": False, "seconds": 9.0},
        {"case": "b", "what": "no", "begins": "with the reply", "error": "RuntimeError: no threads\nno", "seconds": 1},
    ]  # fmt: skip
    made = {
        "command": "never_below.py m.gguf", "commit": "0" * 40, "created": "2026-01-01T00:00:00Z", "versions": {},
        "host": {"cpu": "a CPU", "gpu": "a GPU"}, "pairs": 2, "tokens": 1024, "rate_pct": 5.0, "least": 0.99,
        "said": "experts on the CPU: 14 cores", "rows": rows,
        "first_of_a_kind_ms": {"on: greedy, x": 81.4, "off: y": 900},
    }  # fmt: skip
    text = "\n".join(misses_results.never_below("never_below.json", made))
    assert "below it: a." in text and "--cpu-experts auto" in text and "up to 81 ms more" in text
    assert "| a: all stop, at token 32 (ptrace) |" in text and "0.985 (0.980 to 0.990) | 1,203 (8) |" in text
    assert "| jobs off (late); guesses off |" in text and "| failed: RuntimeError: no threads |" in text


# --- what is imposed ----------------------------------------------------------------------------------


def test_choices_and_guesses_of_cases() -> None:
    resident = np.arange(16) < np.array([10, 9, 10, 10])[:, None]
    routes = never_below.Routes(resident, 3)
    for case in CASES:
        routes.add(case, 100, 20, 0.1)
    assert len(routes.choices) == len(routes.guesses) == 5  # the usual ones, those of guesses, rates, shared steps
    of = {case.name: case for case in CASES}
    assert routes.place(of["deep"]) == routes.place(of["quota"]) == 0
    assert sum(routes.misses(of["deep"], 128)) == pytest.approx(0.1 * 128 * 4 * 3, abs=1)
    assert not any(routes.misses(of["useless-guesses"], 127))
    changing = routes.misses(of["rate-changes"], 127)
    parts = dict(zip(np.cumsum([0, *map(len, routes.choices)]).tolist(), routes.choices, strict=False))
    each = missed(parts[routes.place(of["rate-changes"])], resident).sum(axis=1)
    assert sum(changing) == each.sum() and not each[:62].any() and not each[87:].any() and each[63:84].all()
    same = parts[routes.place(of["several"])]
    assert (same == same[0]).all() and len(same) >= 4 * (25 + 20)

    def guesses(name: str) -> np.ndarray:
        return next(g for at, g in zip(parts, routes.guesses, strict=True) if at == routes.place(of[name]))

    chosen, found = parts[routes.place(of["wrong-guesses"])], guesses("wrong-guesses")
    right = (found[:, 2:, :, None] == chosen[:, 2:, None]).sum(axis=(1, 2, 3)).tolist()
    assert sum(right[:20]) > 0 and not any(right[20:]) and (found[20:, 2:, 0] >= 0).all() and (found[:, :2] < 0).all()
    assert (guesses("useless-guesses")[:, 2:, 0] >= 10).all() and (guesses("deep") < 0).all()


def test_a_wrong_guess_is_neither_resident_nor_chosen() -> None:
    resident = np.arange(8) < np.array([5, 6])[:, None]
    chosen = np.array([[[0, 7], [6, 1]], [[5, 6], [2, 3]]], np.int32)
    found = wrong(chosen, resident, 1)
    assert found.shape == (2, 2, 1) and found.dtype == np.int32
    assert found[0, 0, 0] in (5, 6) and found[0, 1, 0] == 7 == found[1, 0, 0] and found[1, 1, 0] in (6, 7)


# --- threads of another process -----------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    until_s = time.monotonic() + 20
    while len(threads_of(process.pid, "counts")) < 2:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    yield process
    process.kill()
    process.communicate()


def count(process: subprocess.Popen[str]) -> int:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


@linux
def test_threads_are_stopped_and_their_process_goes_on(child: subprocess.Popen[str]) -> None:
    if not faults.may_trace(child.pid):
        pytest.skip("ptrace is not permitted")
    threads = threads_of(child.pid, "counts")
    with stopped(threads):
        before = count(child)  # the first thread answers
        time.sleep(0.1)
        assert count(child) == before
    until_s = time.monotonic() + 20
    while count(child) == before:
        assert time.monotonic() < until_s
    with stopped(threads[:1]):  # and once more, of which another goes on
        before = count(child)
        time.sleep(0.2)
        assert count(child) > before
    assert threads_of(child.pid, "others") == [] == threads_of(1 << 30)
    child.kill()
    child.wait()
    assert not faults.may_trace(child.pid)
    with pytest.raises(OSError, match="ptrace of thread"), stopped(threads):
        pass


@linux
def test_threads_are_moved_and_come_back(child: subprocess.Popen[str]) -> None:
    threads, all_cpus = threads_of(child.pid, "counts"), os.sched_getaffinity(child.pid)
    one = min(all_cpus)
    with moved(threads, [one]):
        assert all(os.sched_getaffinity(thread) == {one} for thread in threads)
        assert os.sched_getaffinity(child.pid) == all_cpus
    assert all(os.sched_getaffinity(thread) == all_cpus for thread in threads)


@linux
def test_a_quota_is_a_cgroups_or_else_affinity(
    child: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_cpus = os.sched_getaffinity(child.pid)
    with quota(child.pid, 1, tmp_path) as how:  # where a folder makes no cgroup
        assert "affinity to 1" in how and len(os.sched_getaffinity(threads_of(child.pid, "counts")[0])) == 1
    assert os.sched_getaffinity(threads_of(child.pid, "counts")[0]) == all_cpus and not list(tmp_path.iterdir())

    monkeypatch.setattr(faults, "_path_of", lambda pid, controller: "/home")
    (tmp_path / "home").mkdir()
    (tmp_path / "cpu" / "home").mkdir(parents=True)
    made = Path.mkdir

    def mkdir(self: Path, *args: Any, **more: Any) -> None:  # as the kernel makes one, with its files
        made(self, *args, **more)
        for name in names:
            (self / name).write_text("")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    names = ["cpu.max", "cgroup.procs"]
    with quota(child.pid, 2, tmp_path) as how:
        group = tmp_path / "spark-never-below"
        assert how == "cgroup 2" and (group / "cpu.max").read_text() == "200000 100000"
        assert (group / "cgroup.procs").read_text() == str(child.pid)
    assert (tmp_path / "home" / "cgroup.procs").read_text() == str(child.pid)
    names = ["cpu.cfs_period_us", "cpu.cfs_quota_us", "cgroup.procs"]
    for path in group.iterdir():
        path.unlink()  # a kernel's go with their folder
    group.rmdir()
    with quota(child.pid, 1, tmp_path) as how:
        group = tmp_path / "cpu" / "spark-never-below"
        assert how == "cgroup 1" and (group / "cpu.cfs_quota_us").read_text() == "100000"


def test_nodes_of_a_machine(tmp_path: Path) -> None:
    for name, cpus in (("node0", "0-3\n"), ("node1", "4-7\n"), ("node2", "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus)
    assert nodes(tmp_path) == [{0, 1, 2, 3}, {4, 5, 6, 7}] and nodes(tmp_path / "none") == []
    assert taken(SimpleNamespace(cpus=[0, 1, 2, 3])) == [2, 3]


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@linux
@pytest.mark.parametrize("kind", ["busy", "copies"])
def test_neighbors_are_at_work_while_they_are_wanted(kind: str) -> None:
    neighbors = Neighbors(kind, 1, [min(os.sched_getaffinity(0))] if kind == "busy" else None)
    (pid,) = neighbors.pids
    try:
        neighbors.ready()
        for _ in range(2):
            before = ticks(pid)
            with neighbors.at_work():
                until_s = time.monotonic() + 20
                while ticks(pid) < before + 3:
                    assert time.monotonic() < until_s
            time.sleep(0.05)
            before = ticks(pid)
            time.sleep(0.1)
            assert ticks(pid) == before
    finally:
        neighbors.close()
    neighbors.close()
    assert not Path(f"/proc/{pid}").exists()


def test_neighbors_that_cannot_be_are_an_error() -> None:
    neighbors = Neighbors("nobody", 1)
    with pytest.raises(RuntimeError, match="a neighbor \\(nobody\\) ended"):
        neighbors.ready()
    neighbors.close()


# --- the daemon that is watched -----------------------------------------------------------------------


@pytest.mark.usefixtures("on_the_device")
def test_gates_begin_anew_when_they_are_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_alone(monkeypatch)
    monkeypatch.setattr(cores, "find", lambda **_: Cores((-1, -1), "2 cores"))
    monkeypatch.setattr(misses, "measure", lambda *_: Costs(1e7, (2e6, 4e6, 6e6), 1e6))
    monkeypatch.setattr(Engine, "warm_up", lambda engine: None)
    model = write_tiny(tmp_path / "tiny.gguf", k_quant_mix, n_expert_used=3)
    options = {"policy": "uniform", "residency_pct": 30, "prefix_gib": 0.0, "draft": "off"}
    choices = np.tile(np.arange(3), (50, 3, 1)).astype(np.int32)
    np.save(tmp_path / "replay.npy", choices)
    asked = config(model, cpu_experts="auto", guess="auto", replay=tmp_path / "replay.npy", **options)
    engine = watched_daemon.open_watched(asked, lambda *_: None)
    try:
        client = SimpleNamespace(profile=engine.profile)
        steps = engine.loaded.steps
        steps.misses.gate._stop("off for good", "lost")
        steps.guesses.gate._steps = 99
        told = watched_daemon.order(client, begin=17, guesses=False)
        assert told == {"jobs": True, "guesses": False} and steps.misses.gate.state == "on"
        assert steps.misses.gate.table == (NOTHING, (1, 0), (2, 0), (3, 0))
        assert steps.guesses.gate._steps == 0 and not steps.guesses.gate.with_guesses
        replay = engine.loaded.forward.replayed
        assert replay.device.read(replay.counter).tolist() == [17]
        assert not watched_daemon.order(client, begin=0, jobs=False)["jobs"] and steps.guesses.gate.with_guesses
        steps.misses.look()
        assert not steps.misses.is_on and set(steps.misses.gate.table) == {NOTHING}
        assert "counts" in str(engine.profile("read", None))
        pool = steps.misses.cpu.pool
        held: list[tuple[str, int]] = []

        @contextmanager
        def hold(place: str, n: int) -> Iterator[None]:
            held.append((place, n))
            yield
            held.append(("released", n))

        monkeypatch.setattr(pool, "held", hold)
        assert watched_daemon.order(client, hold="item", threads=2, seconds=60) == {"held": 2}
        watched_daemon.order(client, release=True)
        until_s = time.monotonic() + 20
        while held != [("item", 2), ("released", 2)]:
            assert time.monotonic() < until_s
    finally:
        engine.close()


def test_a_side_says_why_it_has_no_threads() -> None:
    side = Side("on", config(NANO, device="cpu", guess="auto", ctx_tokens=64), 60)
    assert side.is_on and not Side("off", config(NANO), 60).is_on and Side("off", config(NANO), 60).threads() == []
    ready = SimpleNamespace(info={"reasons": ["device cpu", "experts on the CPU: none, as it is busy"]})
    side._client = SimpleNamespace(alive=True, pid=os.getpid(), ready=ready, close=lambda: None)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no threads compute experts: experts on the CPU: none, as it is busy"):
        side.threads()


@pytest.mark.slow
def test_the_whole_on_a_cpu(tmp_path: Path) -> None:
    """Where no expert is the CPU's, so all that can be wrong is a case that needs its threads."""
    words = "--device cpu --tokens 160 --before 4 --beside 40 --pairs 1 --cases stopped-before,prefill,short"
    file = tmp_path / "below.json"
    report = never_below.run_all(never_below.options([str(NANO), *words.split(), "--json", str(file)]))
    rows = {row["case"]: row for row in report["rows"]}
    assert "no threads compute experts" in rows["stopped-before"]["error"]
    for name in ("prefill", "short"):
        assert "error" not in rows[name] and rows[name]["identical"] and rows[name]["counted"] > 0, rows[name]
    assert rows["prefill"]["how"] == "40 tokens" and rows["short"]["begins"] == "with the reply"
    assert [row["case"] for row in json.loads(file.read_text())["rows"]] == [*rows]
    made = json.loads(file.read_text())
    assert "| short: replies have 16 tokens each" in "\n".join(misses_results.never_below(file.name, made))


def test_replies_that_share_steps_have_their_tokens() -> None:
    events = [SimpleNamespace()]
    client = SimpleNamespace(generate=lambda prompt, **_: iter(events))
    reader = Reader(client, [1], 2, draft=False)  # type: ignore[arg-type]
    reader.join(5)
    assert reader.tokens == [] and reader.done is None
