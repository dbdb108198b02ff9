"""Both commands on one cluster of two nodes: what one machine finds, or a refusal that names who is refused.

What takes longer, and other clusters, is in test_ray_*.py.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats.gguf import open_model
from engine.formats.gguf_header import StringArray
from engine.formats.quants import dequantize
from engine.formats.trace import part_paths
from engine.ground.errors import SparkError, WrongModelError
from spark.cluster import calibrating, counting, validating
from spark.cluster.options import ClusterOptions
from spark.cluster.worker import CountingWorker
from spark.pipeline import checkpoints
from spark.pipeline.tokens import read_tokens
from tests.cluster import clusters, kills
from tests.cluster.clusters import CONFIG, DEADLINES, Elsewhere, Expected, Machines, Poisoned, quiet
from tests.cluster.ladders import on_one, options, untimed
from tests.command_line import NANO, none_left
from tests.gguf_files import write_gguf

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(one_machine: Callable[[int], Expected]) -> Expected:
    return one_machine(9_000)


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    """A node with room for one worker, and one with room for two, that says it has GPUs."""
    with clusters.machines(head_cpus=1) as made:
        made.add(cpus=2, gpus=2)
        yield made


def run(expected: Expected, on: Machines, out: Path, kind: type[CountingWorker] = CountingWorker, **more):
    cluster, config = ClusterOptions(on.address, more.pop("n_workers", 2), 0), more.pop("config", CONFIG)
    return calibrating.run(config, expected.options(out, **more), cluster, DEADLINES, quiet, kind)


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


def test_the_profile_is_that_of_one_machine(
    expected: Expected, two: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers leave the parts of the trace where the driver wants them."""
    monkeypatch.delattr(counting, "replacing")  # which writes what was sent
    report = run(expected, two, tmp_path / "p.csv", trace_dir=tmp_path / "t")
    assert expected.same(tmp_path / "p.csv")
    ours, theirs = report.to_json(), expected.report.to_json()
    for key in ("tokens", "generated_tokens", "counted_tokens", "sessions", "choices"):
        assert ours[key] == theirs[key], key
    workers = ours["workers"]
    assert len(workers) == 2 and sum(worker["cost"] for worker in workers) == report.tokens
    # A worker whose daemon was slow to start may find everything counted.
    assert all((worker["tokens_per_s"] > 0) == (worker["tasks"] > 0) and worker["lost"] == 0 for worker in workers)
    assert ours["set_aside"] == [] and ours["refused"] == {} and len({worker["node"] for worker in workers}) == 2
    assert sorted(path.read_bytes() for path in part_paths(tmp_path / "t")) == sorted(expected.parts)
    assert sorted((tmp_path / "t").iterdir()) == part_paths(tmp_path / "t"), "and nothing else"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.csv", "t"]


def test_a_node_with_another_file_is_refused_by_name(
    expected: Expected, two: Machines, tmp_path: Path, requantized: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And workers that do not see where the trace is send its parts."""
    (tmp_path / "model.gguf").symlink_to(NANO)
    (tmp_path / "other.gguf").symlink_to(requantized)
    other = two.node_ids()[0]
    (tmp_path / "node").write_text(other)
    config = replace(CONFIG, model=tmp_path / "model.gguf")
    report = run(expected, two, tmp_path / "p.csv", Elsewhere, config=config, trace_dir=tmp_path / "t")
    assert expected.same(tmp_path / "p.csv")
    assert sorted(path.read_bytes() for path in part_paths(tmp_path / "t")) == sorted(expected.parts)
    ((name, why),) = report.more["refused"].items()
    assert other[:6] in name and "another model file lies there: found file id " in why
    assert f"node {name} is refused: another model file" in capsys.readouterr().err
    assert {worker["cost"] > 0 for worker in report.more["workers"] if worker["node"] == name} == {False}


def test_a_cluster_with_another_file_everywhere_is_refused(
    expected: Expected, two: Machines, tmp_path: Path, requantized: Path
) -> None:
    for model, kind, words in (
        (requantized, WrongModelError, "another model file lies there: found file id"),
        (tmp_path / "none.gguf", SparkError, "there is no model file .*none.gguf"),
    ):
        cluster = ClusterOptions(two.address, 1, 0, model)
        with pytest.raises(kind, match=words):
            calibrating.run(CONFIG, expected.options(tmp_path / "p.csv"), cluster, DEADLINES, quiet)
    assert not list(tmp_path.iterdir())


def test_a_window_that_kills_two_daemons_is_set_aside_and_named(
    expected: Expected, two: Machines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    windows = list(read_tokens(expected.tokens))
    bad = len(windows) // 2
    name = f"window {windows[bad].window} of session {windows[bad].session_id}"
    (tmp_path / "model.gguf").symlink_to(NANO)
    (tmp_path / "poison").write_text(f"{windows[bad].session_id}:{windows[bad].window}")
    config, url = replace(CONFIG, model=tmp_path / "model.gguf"), f"disk://{tmp_path}/t"
    report = run(expected, two, tmp_path / "p.csv", Poisoned, n_workers=1, config=config, trace_url=url)
    (found,) = report.more["set_aside"]
    assert found["window"] == name
    assert len(found["reasons"]) == 2 and "signal 9" in found["reasons"][0]
    assert not clusters.folders_left()
    assert report.tokens == expected.report.tokens - len(windows[bad].tokens)
    assert sum(worker["lost"] for worker in report.more["workers"]) == 2
    assert f"{name} is set aside, two workers ended at it: " in capsys.readouterr().err
    assert not checkpoints.partial_path(tmp_path / "p.csv").exists()
    parts = [path.read_bytes() for path in part_paths(tmp_path / "t")]
    assert len(expected.parts) == len(windows) and parts == [*expected.parts[:bad], *expected.parts[bad + 1 :]]


def test_a_signal_ends_all_and_loses_nothing(expected: Expected, two: Machines, tmp_path: Path) -> None:
    """The trace behind its URL is the parts of one machine, in its order, once all is counted; none of it is before."""
    out, trace, there = tmp_path / "p.csv", tmp_path / "a trace", tmp_path / "there.gguf"
    there.symlink_to(NANO)
    given = (expected, two, out, f"disk://{trace}", "--workers", "2", "--model-on-workers", there)
    process = kills.start(*given)
    kills.wait_for(process, out, 3)
    assert clusters.daemons()
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143, stderr
    assert b"what was counted is in" in stderr and b"Traceback" not in stderr
    assert none_left(clusters.daemons()) and none_left(clusters.hands())
    assert not out.exists() and checkpoints.counted_by(out) >= 3
    assert [path.name[:7] for path in trace.iterdir()] == [".parts-"]

    again = kills.start(*given, "--resume", "--json", tmp_path / "j")
    stdout, stderr = again.communicate(timeout=120)
    assert again.returncode == 0 and b"\nerror: " not in stderr, stderr
    assert expected.same(out) and not checkpoints.partial_path(out).exists()
    assert [path.read_bytes() for path in part_paths(trace)] == list(expected.parts)
    assert sorted(trace.iterdir()) == part_paths(trace), "and nothing else"
    found = json.loads((tmp_path / "j").read_text())
    assert 0 < sum(worker["cost"] for worker in found["workers"]) < found["tokens"] == expected.report.tokens
    assert b"Workers" in stdout and all(worker["node"].encode() in stdout for worker in found["workers"])


def test_the_daemon_of_each_worker_sees_a_gpu_of_its_own(expected: Expected, two: Machines, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(NANO)
    config = replace(CONFIG, model=tmp_path / "model.gguf", device="auto")
    cluster, given = ClusterOptions(two.address), expected.options(tmp_path / "p.csv")
    report = calibrating.run(config, given, cluster, DEADLINES, quiet, clusters.Carded)
    assert expected.same(tmp_path / "p.csv") and len(report.more["workers"]) == 2
    assert sorted(path.read_text() for path in tmp_path.glob("cards-*")) == ["0", "1"]


def test_validation_finds_what_one_machine_does(
    expected: Expected, two: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers read windows themselves."""
    monkeypatch.setattr(validating, "ReferenceWorker", clusters.Reading)
    cluster = ClusterOptions(two.address, 2, 0)
    report = validating.run(CONFIG, options(expected), cluster, DEADLINES, quiet)
    found, wanted = untimed(report.to_json()), on_one(expected)
    for ours, theirs in zip(found["residencies"], wanted["residencies"], strict=True):
        for row, other in zip((*ours["rows"], *ours["cross"]), (*theirs["rows"], *theirs["cross"]), strict=True):
            assert row == other
    assert found == wanted
    more = report.more
    assert sum(worker["cost"] for worker in more["workers"]) > report.tokens and more["set_aside"] == []
    assert len({worker["node"] for worker in more["workers"]}) == 2 and more["refused"] == {}
    n_steps = sum(len(ladder.rows) + len(ladder.cross) for ladder in report.ladders)
    assert sum(climber["tasks"] for climber in more["climbers"]) == n_steps
    assert none_left(clusters.daemons()) and none_left(clusters.hands()) and not clusters.folders_left()
