"""Clusters whose files lie in an object store: workers write traces there and read windows, or say why they do not."""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import ray

from engine.ground.config import EngineConfig
from engine.ground.errors import SparkError
from spark.cluster import calibrating, validating
from spark.cluster.options import ClusterOptions
from spark.cluster.worker import CountingWorker, Recorded, Worker
from spark.daemon.client import Deadlines
from spark.pipeline import checkpoints
from tests.cluster import clusters, kills
from tests.cluster.clusters import CONFIG, DEADLINES, Expected, Machines, Slow, quiet
from tests.cluster.ladders import on_one, options, untimed
from tests.command_line import NANO, none_left, refused, spark
from tests.object_store import object_store

BUCKET = "team"
URL = f"s3://{BUCKET}"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(one_machine: Callable[[int], Expected]) -> Expected:
    return one_machine(9_000)


@pytest.fixture(scope="module")
def s3(expected: Expected) -> Iterator[Any]:
    with object_store(BUCKET) as store:
        store.put_file(str(expected.tokens), f"{BUCKET}/tokens/a b.parquet")
        yield store


@pytest.fixture(scope="module")
def two(s3: Any) -> Iterator[Machines]:
    with clusters.machines(1, 1) as made:  # whose processes have the store's address and keys
        yield made


def parts(s3: Any, folder: str) -> list[bytes]:
    """What is in the folder of a trace, all of which must be parts, in order."""
    s3.invalidate_cache()
    found = s3.find(f"{BUCKET}/{folder}")
    assert found == [f"{BUCKET}/{folder}/part-{i:06}.parquet" for i in range(len(found))]
    return [s3.cat_file(path) for path in found]


class _Keyless(Worker):
    """On the node that a file beside the model names there are no keys to the store; each waits for the other."""

    def __init__(self, config: EngineConfig, deadlines: Deadlines, asked: Any) -> None:
        self.keyless = ray.get_runtime_context().get_node_id() == (config.model.parent / "node").read_text()
        if self.keyless:
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                os.environ.pop(name, None)
            os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
            fsspec.get_filesystem_class("s3").clear_instance_cache()
        super().__init__(config, deadlines, asked)

    def _do(self, payload: Any, before: int) -> Any:
        begun = [self._config.model.parent / f"{type(self).__name__} has begun, {keyless}" for keyless in (False, True)]
        begun[self.keyless].touch()
        clusters.await_file(begun[not self.keyless])
        return super()._do(payload, before)


class Keyless(_Keyless, CountingWorker):
    """One of two nodes may not write to the store."""


class KeylessReader(_Keyless, validating.ReferenceWorker):
    """One of two nodes may not read there."""


class Failing(CountingWorker):
    """The store takes no more after some windows."""

    n = 0

    def _do(self, payload: Recorded, before: int) -> Any:
        self.n += 1
        if self.n > 4:
            self._counting = replace(self._counting, staged=f"s3://nobodys/{self.n}")
        return super()._do(payload, before)


def test_tokens_profile_and_trace_are_there(expected: Expected, two: Machines, s3: Any, tmp_path: Path) -> None:
    spark(
        "calibrate", NANO, f"{URL}/tokens/*.parquet", "--ray", two.address, "--device", "cpu", "--trace", f"{URL}/t/1",
        "--out", f"{URL}/p 1.csv", cwd=tmp_path,
    )  # fmt: skip
    assert parts(s3, "t/1") == list(expected.parts)
    s3.get_file(f"{BUCKET}/p 1.csv", str(tmp_path / "p.csv"))
    assert expected.same(tmp_path / "p.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]
    again = ("calibrate", NANO, f"{URL}/tokens", "--ray", two.address, "--device", "cpu", "--out", "q.csv")
    assert f"{URL}/t/1 has a trace already" in refused(*again, "--trace", f"{URL}/t/1", cwd=tmp_path, status=2)
    stderr = refused(*again, "--trace", "s3://nobodys/t", cwd=tmp_path)
    assert "cannot write s3://nobodys/t/.parts-" in stderr
    assert "stands for several files" in refused(*again, "--trace", f"{URL}/*", cwd=tmp_path, status=2)
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]


def test_kills_lose_no_part_and_double_none(expected: Expected, two: Machines, s3: Any, tmp_path: Path) -> None:
    over, killed = threading.Event(), []

    def trouble() -> None:
        chance = random.Random(3)
        for find in (clusters.daemons, clusters.hands, clusters.daemons):
            while not clusters.daemons() and not over.wait(0.05):
                pass
            over.wait(0.7)
            for process in find()[:1] if chance.random() < 0.5 else find()[-1:]:
                process.kill()
                killed.append(process.pid)

    thread = threading.Thread(target=trouble)
    thread.start()
    given = expected.options(tmp_path / "p.csv", trace_url=f"{URL}/t/2", hidden=False)
    try:
        report = calibrating.run(CONFIG, given, ClusterOptions(two.address, None, 0), DEADLINES, quiet, Slow)
    finally:
        over.set()
        thread.join()
    assert killed and sum(worker["lost"] for worker in report.more["workers"])
    found = parts(s3, "t/2")
    if report.more["set_aside"]:  # two kills met one window
        assert len(killed) > 1 and [part for part in expected.parts if part in found] == found
    else:
        assert expected.same(tmp_path / "p.csv") and found == list(expected.parts)
    assert none_left(clusters.daemons()) and none_left(clusters.hands())


def test_a_node_without_keys_is_named_and_sends(
    expected: Expected, two: Machines, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    node = two.node_ids()[1]
    (tmp_path / "model.gguf").symlink_to(NANO)
    (tmp_path / "node").write_text(node)
    config, cluster = replace(CONFIG, model=tmp_path / "model.gguf"), ClusterOptions(two.address, None, 0)
    given = expected.options(tmp_path / "p.csv", trace_url=f"{URL}/t/3")
    report = calibrating.run(config, given, cluster, DEADLINES, quiet, Keyless)
    assert expected.same(tmp_path / "p.csv") and parts(s3, "t/3") == list(expected.parts)
    assert all(worker["tasks"] for worker in report.more["workers"]), "both nodes counted"
    (line,) = (each for each in capsys.readouterr().err.splitlines() if each.startswith("node "))
    assert f"its parts of the trace go through the driver: cannot read {URL}/t/3/.parts-" in line, line
    assert node[:6] in line and "credentials" in line.lower(), line

    monkeypatch.setattr(validating, "ReferenceWorker", KeylessReader)
    asked = replace(options(expected), tokens=f"{URL}/tokens/a b.parquet")
    assert untimed(validating.run(config, asked, cluster, DEADLINES, quiet).to_json()) == {
        **on_one(expected), "model": str(config.model)
    }  # fmt: skip
    (line,) = (each for each in capsys.readouterr().err.splitlines() if each.startswith("node "))
    assert node[:6] in line and f"windows are sent to it: cannot read {URL}/tokens/a b.parquet: " in line, line


def test_a_store_that_fails_ends_the_run_and_what_was_counted_is_kept(
    expected: Expected, two: Machines, s3: Any, tmp_path: Path
) -> None:
    out, cluster = tmp_path / "p.csv", ClusterOptions(two.address, None, 0)
    given = expected.options(out, trace_url=f"{URL}/t/6")
    with pytest.raises(SparkError) as caught:
        calibrating.run(CONFIG, given, cluster, DEADLINES, quiet, Failing)
    assert re.match(r"node \S+: cannot write s3://nobodys/5: ", caught.value.message), caught.value.message
    assert 0 < checkpoints.counted_by(out) < len(expected.parts)
    report = calibrating.run(CONFIG, replace(given, resume=True), cluster, DEADLINES, quiet)
    assert report.resumed_tokens > 0 and expected.same(out) and parts(s3, "t/6") == list(expected.parts)


def test_a_trace_is_gone_on_with(expected: Expected, two: Machines, s3: Any, tmp_path: Path) -> None:
    """Also where a driver was killed; and what is missing is found before there is more work."""
    out, url = tmp_path / "p.csv", f"{URL}/t/4"
    process = kills.start(expected, two, out, url)
    kills.wait_for(process, out, 5)
    process.kill()
    process.communicate()
    assert none_left(clusters.daemons())
    s3.invalidate_cache()
    waiting = s3.find(f"{BUCKET}/t/4")
    assert len(waiting) > 4 and all("/.parts-" in path for path in waiting)
    (first,) = (path for path in waiting if "/000000000-0-of-" in path)
    kept = s3.cat_file(first)
    s3.rm_file(first)
    again = ("calibrate", NANO, expected.tokens, "--ray", two.address, "--device", "cpu", "--out", out)
    stderr = refused(*again, "--trace", url, "--resume", cwd=tmp_path)
    assert "000000 has 0 parts of window 0, which was counted, expected at least 1" in stderr
    s3.pipe_file(first, kept)
    stderr = refused(*again, "--trace", f"{URL}/t/5", "--resume", cwd=tmp_path, status=2)
    assert "was counted with another trace" in stderr
    alone = [word for word in again if word not in ("--ray", two.address)]
    stderr = refused(*alone, "--trace", url, "--resume", cwd=tmp_path, status=2)
    assert "was counted by a cluster, whose windows are in no order" in stderr
    spark(*again, "--trace", url, "--resume", cwd=tmp_path)
    assert expected.same(out) and parts(s3, "t/4") == list(expected.parts)
    s3.invalidate_cache()
    assert not s3.exists(f"{BUCKET}/t/5")
