"""A driver that is killed, and gone on from: nothing is lost, counted twice, or left running."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spark.pipeline import checkpoints
from tests.cluster import clusters, kills
from tests.cluster.clusters import Expected, Machines
from tests.command_line import none_left

RUNS = 2  # benchmarks/cluster_kills.py does ten


@pytest.fixture(scope="module")
def expected(one_machine: Callable[[int], Expected]) -> Expected:
    return one_machine(16_000)


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    with clusters.machines(1, 1) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_driver_is_gone_on_from(expected: Expected, two: Machines, tmp_path: Path) -> None:
    for number in range(RUNS):
        share, found = kills.driver_killed(expected, two, tmp_path, number)
        assert found.same and found.clean and 0 < share < 1, number


@pytest.mark.slow
def test_ctrl_c_ends_all_and_loses_nothing(expected: Expected, two: Machines, tmp_path: Path) -> None:
    out, trace = tmp_path / "p.csv", tmp_path / "t"
    process = kills.start(expected, two, out, trace)
    kills.wait_for(process, out, 3)
    assert clusters.daemons()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert b"what was counted is in" in stderr and b"Traceback" not in stderr
    assert none_left(clusters.daemons()) and none_left(clusters.hands())
    assert not out.exists() and checkpoints.counted_by(out) >= 3
    kills.finish(expected, two, out, trace)
    assert kills.complete(expected, out, trace)
