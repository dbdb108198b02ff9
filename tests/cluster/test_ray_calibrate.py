"""`spark calibrate --ray` on clusters of processes: the profile of one machine, or a refusal with a name."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.formats.trace import part_paths
from engine.ground.errors import DeadlineError, UsageError
from spark.cluster import calibrating
from spark.cluster.options import ClusterOptions
from spark.pipeline import calibrate, checkpoints
from spark.pipeline.tokens import read_tokens, write_windows
from tests.cluster import clusters
from tests.cluster.clusters import CONFIG, DEADLINES, Expected, Machines, Slow, quiet
from tests.command_line import NANO, none_left, spark


@pytest.fixture(scope="module")
def expected(one_machine: Callable[[int], Expected]) -> Expected:
    return one_machine(16_000)


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    with clusters.machines(2, 2) as made:
        yield made


def run(expected: Expected, on: Machines, out: Path, kind=calibrating.CountingWorker, config=CONFIG, **more):
    n_workers, deadlines = more.pop("n_workers", None), more.pop("deadlines", DEADLINES)
    cluster = ClusterOptions(on.address, n_workers, 0)
    return calibrating.run(config, expected.options(out, **more), cluster, deadlines, quiet, kind)


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", [1, 4])
def test_the_profile_is_that_of_one_machine(expected: Expected, two: Machines, tmp_path: Path, n_workers: int) -> None:
    """Four workers do not see where the driver wants the parts of the trace."""
    kind = clusters.Apart if n_workers == 4 else calibrating.CountingWorker
    report = run(expected, two, tmp_path / "p.csv", kind, n_workers=n_workers, trace_dir=tmp_path / "t")
    assert expected.same(tmp_path / "p.csv") and report.choices == expected.report.choices
    assert len(report.more["workers"]) == n_workers
    assert sorted(path.read_bytes() for path in part_paths(tmp_path / "t")) == sorted(expected.parts)


@pytest.mark.slow
def test_several_files_in_any_order_are_counted_as_one(expected: Expected, two: Machines, tmp_path: Path) -> None:
    file = read_tokens(expected.tokens)
    windows = list(file)
    cut = next(i for i in range(9, len(windows)) if windows[i].session_id != windows[i - 1].session_id)
    for name, some in (("a", windows[:cut]), ("b", windows[cut:])):
        with (tmp_path / f"{name}.parquet").open("wb") as half:
            write_windows(half, some, file.origin, file.window)
    arguments = ["--device", "cpu", "--out", "p.csv"]
    stop = ["--max-tokens", "600"]
    spark("calibrate", NANO, "b.parquet", "a.parquet", *arguments, *stop, cwd=tmp_path)
    first = (tmp_path / "p.csv").read_bytes()
    spark("calibrate", NANO, "a.parquet", "b.parquet", *arguments, *stop, cwd=tmp_path)
    assert untimed((tmp_path / "p.csv").read_bytes()) == untimed(first)
    spark("calibrate", NANO, "b.parquet", tmp_path, *arguments, "--ray", two.address, cwd=tmp_path)
    assert expected.same(tmp_path / "p.csv")


def untimed(profile: bytes) -> list[bytes]:
    """A profile without the time when it was made."""
    return [word for word in profile.split() if not word.startswith(b"created=")]


def meanwhile(what: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=what)
    thread.start()
    return thread


def until_counted(out: Path) -> None:
    """Wait until a checkpoint says that something is counted."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        if (checkpoints.state_of(checkpoints.partial_path(out)) or {"windows": 0})["windows"]:
            return
        time.sleep(0.01)
    raise AssertionError("nothing was counted")


@pytest.mark.slow
def test_a_cluster_that_loses_all_workers_is_given_up_and_gone_on_from(expected: Expected, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    with clusters.machines(1) as lost:

        def remove() -> None:
            until_counted(out)
            lost.remove(lost.nodes[0])

        thread = meanwhile(remove)
        with pytest.raises(DeadlineError, match="no worker of the cluster was ready for 12 s"):
            run(expected, lost, out, Slow, deadlines=replace(DEADLINES, ready_s=12))
        thread.join()
        assert not clusters.daemons()
        partial = checkpoints.partial_path(out)
        kept = checkpoints.state_of(partial)
        assert kept is not None and 0 < kept["tokens"] < expected.report.tokens
        # One machine does not go on from what a cluster counted in an order of its own, and a cluster does.
        with pytest.raises(UsageError, match="was counted by a cluster"):
            calibrate.calibrate(CONFIG, expected.options(out, resume=True), DEADLINES, quiet)
        shutil.copy(partial, tmp_path / "kept")
        lost.add(2)
        report = run(expected, lost, out, resume=True)
    assert expected.same(out) and report.resumed_tokens == kept["tokens"]
    assert not partial.exists() and not checkpoints.routing_path(out).exists()


@pytest.mark.slow
def test_a_cluster_goes_on_from_what_one_machine_counted(expected: Expected, two: Machines, tmp_path: Path) -> None:
    def interrupt(label: str, done: int, total: int) -> None:
        if label == "calibrating" and done > total // 3:
            raise KeyboardInterrupt

    options = expected.options(tmp_path / "p.csv", trace_dir=tmp_path / "t")
    with pytest.raises(KeyboardInterrupt):
        calibrate.calibrate(CONFIG, options, DEADLINES, interrupt)
    report = run(expected, two, tmp_path / "p.csv", trace_dir=tmp_path / "t", resume=True)
    assert expected.same(tmp_path / "p.csv") and 0 < report.resumed_tokens < report.tokens
    assert sorted(path.read_bytes() for path in part_paths(tmp_path / "t")) == sorted(expected.parts)


@pytest.mark.slow
def test_nothing_is_left_running(expected: Expected, two: Machines, tmp_path: Path) -> None:
    def interrupt(label: str, done: int, total: int) -> None:
        if label == "calibrating" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster = ClusterOptions(two.address, None, 0)
        calibrating.run(CONFIG, expected.options(tmp_path / "p.csv"), cluster, DEADLINES, interrupt, Slow)
    assert not clusters.folders_left()
    assert none_left(clusters.daemons()) and none_left(clusters.hands())
    assert checkpoints.partial_path(tmp_path / "p.csv").exists()
