"""Workers, daemons and nodes that are killed at random: the profile is that of one machine, or what lacks is named."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.formats.trace import part_paths
from engine.ground.files import scratch
from spark.cluster import calibrating
from spark.cluster.options import ClusterOptions
from tests.cluster import clusters
from tests.cluster.clusters import CONFIG, DEADLINES, Expected, Machines, Slow
from tests.command_line import none_left

RUNS = 30
PER_TEST = 10


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return clusters.on_one_machine(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    with clusters.machines(1, 1) as made:
        yield made


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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, RUNS, PER_TEST))
def test_random_kills_change_no_byte(
    expected: Expected, two: Machines, tmp_path: Path, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, aside, kills = 0, 0, []
    for seed in range(first, first + PER_TEST):
        chance, over = random.Random(seed), threading.Event()
        wanted: list[int] = []

        def progress(label: str, done: int, total: int, wanted: list[int] = wanted) -> None:
            while wanted:  # Ray starts nodes in the main thread alone
                two.add(wanted.pop())

        thread = threading.Thread(target=trouble, args=(two, chance, over, kills, wanted))
        thread.start()
        out, trace = tmp_path / f"{seed}.csv", tmp_path / f"{seed}"
        options, cluster = expected.options(out, trace_dir=trace), ClusterOptions(two.address, None, 0)
        try:
            report = calibrating.run(CONFIG, options, cluster, DEADLINES, progress, Slow)
        finally:
            over.set()
            thread.join()
            progress("", 0, 0)
        lost += sum(worker["lost"] for worker in report.more["workers"])
        found = sorted(path.read_bytes() for path in part_paths(trace))
        if report.more["set_aside"]:  # two kills met one window: it is missing, by name, and nothing else
            aside += 1
            assert len(kills) >= 2 and not expected.same(out) and set(found) < set(expected.parts)
        else:
            assert expected.same(out), seed
            assert found == sorted(expected.parts)
        assert none_left(clusters.daemons()) and none_left(clusters.hands())
        with scratch():
            pass  # as any command does: if the last kill came late, nobody was there to remove what it left
        assert not clusters.folders_left()
    assert capsys.readouterr().out == "", "stdout is for data"
    assert lost >= PER_TEST // 2, "too few kills met a worker to say anything"
    assert aside <= PER_TEST // 3, "kills at random seldom meet a window twice"
    print(f"{PER_TEST} runs, killed: {', '.join(kills)}; {lost} workers lost; {aside} runs with a window set aside")
