"""`spark calibrate --ray` on clusters of processes: the profile of one machine, or a refusal with a name."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats.gguf import open_model
from engine.formats.gguf_header import StringArray
from engine.formats.quants import dequantize
from engine.formats.trace import part_paths
from engine.ground.errors import DeadlineError, UsageError
from spark.cluster import calibrating
from spark.cluster.options import ClusterOptions
from spark.pipeline import calibrate
from spark.pipeline.tokens import read_tokens, write_windows
from tests.cluster import clusters
from tests.cluster.clusters import CONFIG, DEADLINES, Expected, Machines, Misplaced, Poisoned, Slow, quiet
from tests.command_line import NANO, none_left, refused, spark
from tests.gguf_files import write_gguf


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return clusters.on_one_machine(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    with clusters.machines(2, 2) as made:
        yield made


def run(expected: Expected, on: Machines, out: Path, kind=calibrating.CountingWorker, config=CONFIG, **more):
    n_workers, deadlines = more.pop("n_workers", None), more.pop("deadlines", DEADLINES)
    cluster = ClusterOptions(on.address, n_workers, 0)
    return calibrating.run(config, expected.options(out, **more), cluster, deadlines, quiet, kind)


@pytest.mark.parametrize("n_workers", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
def test_the_profile_is_that_of_one_machine(expected: Expected, two: Machines, tmp_path: Path, n_workers: int) -> None:
    out = tmp_path / "p.csv"
    report = run(expected, two, out, n_workers=n_workers, trace_dir=tmp_path / "t" if n_workers > 1 else None)
    assert expected.same(out)
    ours, theirs = report.to_json(), expected.report.to_json()
    for key in ("tokens", "generated_tokens", "counted_tokens", "sessions", "choices"):
        assert ours[key] == theirs[key], key
    workers = ours["workers"]
    assert len(workers) == n_workers and sum(worker["cost"] for worker in workers) == report.tokens
    # A worker whose daemon was slow to start may find everything counted.
    assert all((worker["tokens_per_s"] > 0) == (worker["tasks"] > 0) and worker["lost"] == 0 for worker in workers)
    assert ours["set_aside"] == [] and ours["refused"] == {}
    if n_workers > 1:
        assert len({worker["node"] for worker in workers}) == 2
        found = [path.read_bytes() for path in part_paths(tmp_path / "t")]
        assert sorted(found) == sorted(expected.parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.csv", *(["t"] if n_workers > 1 else [])]


def test_a_window_that_kills_two_daemons_is_set_aside_and_named(
    expected: Expected, two: Machines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    windows = list(read_tokens(expected.tokens))
    bad = windows[len(windows) // 2]
    (tmp_path / "model.gguf").symlink_to(NANO)
    (tmp_path / "poison").write_text(f"{bad.session_id}:{bad.window}")
    config = replace(CONFIG, model=tmp_path / "model.gguf")
    report = run(expected, two, tmp_path / "p.csv", Poisoned, config, n_workers=2)
    (found,) = report.more["set_aside"]
    assert found["window"] == f"window {bad.window} of session {bad.session_id}"
    assert len(found["reasons"]) == 2 and "signal 9" in found["reasons"][0]
    assert not clusters.folders_left()
    assert report.tokens == expected.report.tokens - len(bad.tokens)
    assert sum(worker["lost"] for worker in report.more["workers"]) == 2
    assert f"{found['window']} is set aside, two workers ended at it: " in capsys.readouterr().err
    assert not calibrate.partial_path(tmp_path / "p.csv").exists()


@pytest.fixture(scope="module")
def requantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with another file id."""
    folder = tmp_path_factory.mktemp("other")
    with open_model(NANO) as model:
        tensors = {name: model.tensor(name) for name in model.tensors}
        changed = {"output.weight": (dequantize(tensors["output.weight"]), QType.Q8_0)}
        kept = {key: list(v) if isinstance(v, StringArray) else v for key, v in model.metadata.items()}
        (other,) = write_gguf(folder / "other.gguf", kept, tensors | changed)
        with open_model(other) as found:
            assert found.model_id == model.model_id and found.file_id != model.file_id
    return other


def test_a_node_with_another_file_is_refused_by_name(
    expected: Expected, two: Machines, tmp_path: Path, requantized: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.gguf").symlink_to(NANO)
    (tmp_path / "other.gguf").symlink_to(requantized)
    (tmp_path / "node").write_text(two.nodes[0].node_id)
    out = tmp_path / "p.csv"
    report = run(expected, two, out, Misplaced, replace(CONFIG, model=tmp_path / "model.gguf"))
    assert expected.same(out)
    ((name, why),) = report.more["refused"].items()
    assert two.nodes[0].node_id[:6] in name and "another model file lies there: found file id " in why
    assert f"node {name} is refused: another model file" in capsys.readouterr().err
    assert {worker["cost"] > 0 for worker in report.more["workers"] if worker["node"] == name} == {False}


def test_a_cluster_with_another_file_everywhere_is_refused(
    expected: Expected, two: Machines, tmp_path: Path, requantized: Path
) -> None:
    arguments = ["calibrate", NANO, expected.tokens, "--ray", two.address, "--device", "cpu", "--out", "p.csv"]
    stderr = refused(*arguments, "--model-on-workers", requantized, cwd=tmp_path)
    assert "another model file lies there: found file id" in stderr
    stderr = refused(*arguments, "--model-on-workers", tmp_path / "none.gguf", cwd=tmp_path)
    assert "there is no model file" in stderr and "--model-on-workers" in stderr
    assert not list(tmp_path.iterdir())


def test_no_gpu_where_one_was_asked_for(expected: Expected, two: Machines, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--worker-gpus 1: no node of the cluster has that many GPUs, 0 in all"):
        config = replace(CONFIG, device="auto")
        calibrating.run(config, expected.options(tmp_path / "p.csv"), ClusterOptions(two.address), DEADLINES, quiet)
    assert not list(tmp_path.iterdir())


def test_an_address_where_no_cluster_is(expected: Expected, tmp_path: Path) -> None:
    stderr = refused(
        "calibrate", NANO, expected.tokens, "--ray", "nonsense:1:2", "--device", "cpu", "--out", "p.csv",
        cwd=tmp_path, status=2,
    )  # fmt: skip
    assert "--ray nonsense:1:2: no Ray cluster answers there" in stderr


def test_the_command_says_what_each_worker_did(expected: Expected, two: Machines, tmp_path: Path) -> None:
    done = spark(
        "calibrate", NANO, expected.tokens, "--ray", two.address, "--device", "cpu", "--out", "p.csv", "--json", "j",
        cwd=tmp_path,
    )  # fmt: skip
    assert expected.same(tmp_path / "p.csv")
    found = json.loads((tmp_path / "j").read_text())
    assert sum(worker["tasks"] for worker in found["workers"]) > 20
    assert "Workers" in done.stdout and all(worker["node"] in done.stdout for worker in found["workers"])


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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--workers", "2"], "--workers of a cluster, and --ray is missing"),
        (["--ray", "auto", "--device", "cpu", "--worker-gpus", "1"], "--device cpu and --worker-gpus 1 contradict"),
        (["--ray", "auto", "--device", "cuda", "--worker-gpus", "0"], "--device cuda and --worker-gpus 0 contradict"),
    ],
)
def test_options_that_contradict(expected: Expected, tmp_path: Path, given: list[str], words: str) -> None:
    assert words in refused("calibrate", NANO, expected.tokens, "--out", "p.csv", *given, cwd=tmp_path, status=2)


def meanwhile(what: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=what)
    thread.start()
    return thread


def until_counted(out: Path) -> None:
    """Wait until a checkpoint says that something is counted."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        if (calibrate._state_of(calibrate.partial_path(out)) or {"windows": 0})["windows"]:
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
        partial = calibrate.partial_path(out)
        kept = calibrate._state_of(partial)
        assert kept is not None and 0 < kept["tokens"] < expected.report.tokens
        # One machine does not go on from what a cluster counted in an order of its own, and a cluster does.
        with pytest.raises(UsageError, match="was counted by a cluster"):
            calibrate.calibrate(CONFIG, expected.options(out, resume=True), DEADLINES, quiet)
        shutil.copy(partial, tmp_path / "kept")
        lost.add(2)
        report = run(expected, lost, out, resume=True)
    assert expected.same(out) and report.resumed_tokens == kept["tokens"]
    assert not partial.exists() and not calibrate.routing_path(out).exists()


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


def test_nothing_is_left_running(expected: Expected, two: Machines, tmp_path: Path) -> None:
    def interrupt(label: str, done: int, total: int) -> None:
        if label == "calibrating" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster = ClusterOptions(two.address, None, 0)
        calibrating.run(CONFIG, expected.options(tmp_path / "p.csv"), cluster, DEADLINES, interrupt, Slow)
    assert not clusters.folders_left()
    assert none_left(clusters.daemons()) and none_left(clusters.hands())
    assert calibrate.partial_path(tmp_path / "p.csv").exists()
