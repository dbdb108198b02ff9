"""Runs of a calibration on a cluster in which workers, nodes or the driver are killed, and what became of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.formats.trace import part_paths
from engine.ground.files import scratch
from spark.cluster import calibrating
from spark.cluster.options import ClusterOptions
from spark.pipeline import calibrate, checkpoints
from tests.cluster import clusters
from tests.cluster.clusters import CONFIG, DEADLINES, Expected, Machines, Slow, quiet
from tests.command_line import NANO, ROOT, environment, none_left

# Checkpoints after every lease, since SIGKILL leaves no time to write one; workers that take their time.
START = """
import functools, spark.pipeline.calibrate as c; c.CHECKPOINT_EVERY_S = 0
from spark.cluster import calibrating; from tests.cluster.clusters import Slow
calibrating.run = functools.partial(calibrating.run, kind=Slow)
from spark.cli import main; main()
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run.

    kills: what was killed. lost: workers. aside: windows set aside. same: profile and trace are those of one machine.
    fewer: the trace is a part of it. clean: no daemon, worker or folder is left.
    """

    kills: tuple[str, ...]
    lost: int
    aside: int
    same: bool
    fewer: bool
    clean: bool


def trouble(
    on: Machines, chance: random.Random, over: threading.Event, told: list[str], wanted: list[int]
) -> None:
    """Kill one or two of what there is, at random times of a run. wanted: CPUs of nodes to come for those that went."""
    while not clusters.daemons() and not over.wait(0.05):
        pass
    for _ in range(chance.choice([1, 1, 2])):
        if over.wait(chance.uniform(0.4, 1.6)):
            return
        what = chance.choice(["daemon", "daemon", "actor", "actor", "node"])
        told.append(what)
        with contextlib.suppress(psutil.Error, IndexError):
            if what == "node":
                on.remove(chance.choice(on.nodes))
                wanted.append(1)
            else:
                chance.choice(clusters.daemons() if what == "daemon" else clusters.hands()).kill()


def killed(expected: Expected, on: Machines, folder: Path, seed: int) -> Outcome:
    """Count while workers, daemons and nodes are killed at random."""
    chance, over = random.Random(seed), threading.Event()
    kills: list[str] = []
    wanted: list[int] = []

    def progress(label: str, done: int, total: int) -> None:
        while wanted:  # Ray starts nodes in the main thread alone
            on.add(wanted.pop())

    thread = threading.Thread(target=trouble, args=(on, chance, over, kills, wanted))
    thread.start()
    out, trace = folder / f"{seed}.csv", folder / f"{seed}"
    options, cluster = expected.options(out, trace_dir=trace), ClusterOptions(on.address, None, 0)
    try:
        report = calibrating.run(CONFIG, options, cluster, DEADLINES, progress, Slow)
    finally:
        over.set()
        thread.join()
        progress("", 0, 0)
    found = sorted(path.read_bytes() for path in part_paths(trace))
    same = expected.same(out) and found == sorted(expected.parts)
    clean = none_left(clusters.daemons()) and none_left(clusters.hands())
    with scratch():
        pass  # as any command does: if the last kill came late, nobody was there to remove what it left
    return Outcome(
        tuple(kills), sum(worker["lost"] for worker in report.more["workers"]), len(report.more["set_aside"]), same,
        set(found) < set(expected.parts), clean and not clusters.folders_left(),
    )  # fmt: skip


def start(
    expected: Expected, on: Machines, out: Path, trace: Path | str, *more: Path | str
) -> subprocess.Popen[bytes]:
    """The command, whose trace may go to a URL of `clusters.Disk`; its workers take their time."""
    command = [sys.executable, "-c", START, "calibrate", NANO, expected.tokens, "--ray", on.address, "--out", out]
    command += ["--device", "cpu", "--trace", trace, *more]
    return subprocess.Popen(
        [*map(str, command)], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def wait_for(process: subprocess.Popen[bytes], out: Path, n_windows: int) -> None:
    end_s = time.monotonic() + 60
    while checkpoints.counted_by(out) < n_windows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.005)


def finish(expected: Expected, on: Machines, out: Path, trace: Path) -> calibrate.CalibrateReport:
    options = expected.options(out, trace_dir=trace, resume=True)
    return calibrating.run(CONFIG, options, ClusterOptions(on.address, None, 0), DEADLINES, quiet)


def complete(expected: Expected, out: Path, trace: Path) -> bool:
    found = sorted(path.read_bytes() for path in part_paths(trace))
    left = checkpoints.partial_path(out).exists()
    return expected.same(out) and found == sorted(expected.parts) and not left


def driver_killed(expected: Expected, on: Machines, folder: Path, number: int) -> tuple[float, Outcome]:
    """Kill a driver after some windows and go on from what it counted; the share that was counted."""
    out, trace = folder / f"{number}.csv", folder / f"{number}"
    process = start(expected, on, out, trace)
    wait_for(process, out, 1 + 5 * number % 40)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not out.exists() and checkpoints.counted_by(out)
    clean = none_left(clusters.daemons())  # which see that their workers are gone
    report = finish(expected, on, out, trace)
    same = complete(expected, out, trace)
    return report.resumed_tokens / report.tokens, Outcome(("driver",), 0, 0, same, False, clean)
