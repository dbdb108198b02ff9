"""Workers, daemons and nodes that are killed at random: the profile is that of one machine, or what lacks is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import clusters, kills
from tests.cluster.clusters import Expected, Machines

RUNS = 6  # benchmarks/cluster_kills.py does thirty
PER_TEST = 6


@pytest.fixture(scope="module")
def expected(one_machine: Callable[[int], Expected]) -> Expected:
    return one_machine(16_000)


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    with clusters.machines(1, 1) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, RUNS, PER_TEST))
def test_random_kills_change_no_byte(
    expected: Expected, two: Machines, tmp_path: Path, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [kills.killed(expected, two, tmp_path, seed) for seed in range(first, first + PER_TEST)]
    for seed, found in enumerate(outcomes, first):
        if found.aside:  # two kills met one window: it is missing, by name, and nothing else
            assert len(found.kills) >= 2 and not found.same and found.fewer
        else:
            assert found.same, seed
        assert found.clean, seed
    assert capsys.readouterr().out == "", "stdout is for data"
    assert sum(found.lost for found in outcomes) >= PER_TEST // 2, "too few kills met a worker to say anything"
    assert sum(found.aside > 0 for found in outcomes) <= PER_TEST // 3, "kills at random seldom meet a window twice"
