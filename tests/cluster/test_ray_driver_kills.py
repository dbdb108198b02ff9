"""A driver that is killed, and gone on from: nothing is lost, counted twice, or left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.formats.trace import part_paths
from spark.cluster import calibrating
from spark.cluster.options import ClusterOptions
from spark.pipeline import calibrate
from tests.cluster import clusters
from tests.cluster.clusters import CONFIG, DEADLINES, Expected, Machines, quiet
from tests.command_line import NANO, ROOT, environment, none_left

RUNS = 10
# Checkpoints after every lease, since SIGKILL leaves no time to write one; workers that take their time.
START = """
import functools, spark.pipeline.calibrate as c; c.CHECKPOINT_EVERY_S = 0
from spark.cluster import calibrating; from tests.cluster.clusters import Slow
calibrating.run = functools.partial(calibrating.run, kind=Slow)
from spark.cli import main; main()
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return clusters.on_one_machine(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    with clusters.machines(1, 1) as made:
        yield made


def start(expected: Expected, on: Machines, out: Path, trace: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", START, "calibrate", NANO, expected.tokens, "--ray", on.address, "--out", out]
    command += ["--device", "cpu", "--trace", trace, *more]
    return subprocess.Popen(
        [*map(str, command)], cwd=ROOT, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def counted(out: Path) -> int:
    state = calibrate._state_of(calibrate.partial_path(out))
    return 0 if state is None else int(state["windows"])


def wait_for(process: subprocess.Popen[bytes], out: Path, n_windows: int) -> None:
    end_s = time.monotonic() + 60
    while counted(out) < n_windows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.005)


def finish(expected: Expected, on: Machines, out: Path, trace: Path) -> calibrate.CalibrateReport:
    options = expected.options(out, trace_dir=trace, resume=True)
    return calibrating.run(CONFIG, options, ClusterOptions(on.address, None, 0), DEADLINES, quiet)


def complete(expected: Expected, out: Path, trace: Path) -> bool:
    found = sorted(path.read_bytes() for path in part_paths(trace))
    left = calibrate.partial_path(out).exists()
    return expected.same(out) and found == sorted(expected.parts) and not left


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_driver_is_gone_on_from(expected: Expected, two: Machines, tmp_path: Path) -> None:
    for number in range(RUNS):
        out, trace = tmp_path / f"{number}.csv", tmp_path / f"{number}"
        process = start(expected, two, out, trace)
        wait_for(process, out, 1 + 5 * number % 40)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert not out.exists() and counted(out)
        assert none_left(clusters.daemons()), "the daemons see that their workers are gone"
        report = finish(expected, two, out, trace)
        assert 0 < report.resumed_tokens < report.tokens
        assert complete(expected, out, trace), number


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_all_and_loses_nothing(expected: Expected, two: Machines, tmp_path: Path, number: int) -> None:
    out, trace = tmp_path / "p.csv", tmp_path / "t"
    process = start(expected, two, out, trace)
    wait_for(process, out, 3)
    assert clusters.daemons()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else 143), stderr
    assert b"what was counted is in" in stderr and b"Traceback" not in stderr
    assert none_left(clusters.daemons()) and none_left(clusters.hands())
    assert not out.exists() and counted(out) >= 3
    finish(expected, two, out, trace)
    assert complete(expected, out, trace)
