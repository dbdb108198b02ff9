"""What a cluster's calibration says of itself, and whom it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.formats.trace import read_routing
from engine.ground.config import EngineConfig
from spark import storage
from spark.cluster.counting import progress_line, refusal
from spark.cluster.driver import Share
from spark.cluster.pool import Task
from spark.cluster.worker import Counting, CountingWorker, Part, Recorded
from spark.daemon.client import Deadlines
from spark.pipeline import staged
from spark.pipeline.tokens import Window
from tests.command_line import NANO


def test_a_line_of_progress_names_rates_and_what_is_left() -> None:
    shares = [Share("b", 0, 3, 3000, 2.0), Share("a", 1, 3, 1000, 2.0), Share("new", 0)]
    assert progress_line(shares, 1200, 200_000) == "1,200 windows left, 2,000 tokens/s, 1:40 left: a/1 500, b/0 1,500"
    many = [Share("n", i, 1, 100 + i, 1.0) for i in range(20)]
    line = progress_line(many, 7, 100)
    assert "n/0 100, n/1 101" in line and line.endswith("n/7 107, and 12 faster ones")
    assert progress_line([], 7, 100) == "7 windows left, 0 tokens/s: "


def said(**changes: Any) -> dict[str, Any]:
    info = {"model": {"file_id": "f" * 64}, "device": "cpu", "kv_type": "f16", "ctx_tokens": 512, "code": "1+a"}
    info |= changes
    code = info.pop("code")
    return {"ready": info, "code": code}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"model": {"file_id": "e" * 64}}, f"another model file lies there: found file id {'e' * 16}, expected ffff"),
        ({"code": "1+b"}, "other code is installed there: found 1+b, expected 1+a"),
        ({"device": "cuda"}, "its device is another: found cuda, expected cpu"),
        ({"ctx_tokens": 256}, "its ctx_tokens is another: found 256, expected 512"),
    ],
)
def test_a_worker_that_would_count_otherwise_is_refused(changes: dict[str, Any], words: str) -> None:
    assert refusal(said(), said(**changes), "f" * 64).startswith(words) and bool(words) == bool(
        refusal(said(), said(**changes))
    )


@pytest.mark.slow
def test_parts_are_left_where_the_driver_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes are sent where the folder is not there, another user's, or not to be written."""
    generated = np.arange(60) >= 40
    windows = [Window("s", i, np.arange(60, dtype=np.int32) * (i + 1), generated) for i in range(3)]
    tasks = [Task(i, 60, "", Recorded(window, i != 1)) for i, window in enumerate(windows)]

    def parts(worker: CountingWorker) -> tuple[tuple[Part, ...], ...]:
        result = worker.work(tasks)
        assert result.error is None and result.culprit is None, result
        found: tuple[tuple[Part, ...], ...] = result.value.parts
        return found

    left = tmp_path / "left"
    worker = CountingWorker(
        EngineConfig(model=NANO, device="cpu", threads=1), Deadlines(ready_s=60), Counting(parts=left)
    )
    try:
        sent = parts(worker)
        left.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
            assert parts(worker) == sent
        assert not list(left.iterdir())
        named = parts(worker)
    finally:
        worker.close()
    assert [len(each) for each in named] == [len(each) for each in sent] == [1, 0, 1]
    assert [[(left / str(name)).read_bytes() for name in each] for each in named] == [list(each) for each in sent]
    assert len(set(named)) == 3, "no two have one name"


@pytest.mark.slow
def test_parts_go_behind_a_url_or_are_sent_there_by_the_driver(tmp_path: Path) -> None:
    """Whole ones; what slots are chosen by comes to the driver without hidden states."""
    where = staged.place("memory://counted/trace")
    mark = staged.begin(where)
    windows = [Window("s", i, np.arange(40, dtype=np.int32) * (i + 1), np.arange(40) >= 20) for i in range(2)]
    tasks = [Task(i, 40, "", Recorded(window, i == 1, i)) for i, window in enumerate(windows)]
    config, deadlines = EngineConfig(model=NANO, device="cpu", threads=1), Deadlines(ready_s=60)
    worker = CountingWorker(config, deadlines, Counting(hidden=True, staged=where, mark=mark))
    try:
        assert worker.info["unseen"] == ""
        seen = worker.work(tasks)
        there = {name: storage.get_bytes(f"{where}/000000/{name}") for name in storage.names(f"{where}/000000")}
        worker._unseen = "it is not seen"
        unseen = worker.work(tasks)
        assert worker.info["unseen"] == "its parts of the trace go through the driver: it is not seen"
    finally:
        worker.close()
    assert list(there) == ["000000000-0-of-1.parquet", "000000001-0-of-1.parquet"]
    assert seen.value.staged == ((), ()) and unseen.value.staged == tuple((part,) for part in there.values())
    assert seen.value.parts == unseen.value.parts and [len(each) for each in seen.value.parts] == [0, 1]
    assert np.array_equal(seen.value.counts, unseen.value.counts)
    for name, data in (("whole", there["000000001-0-of-1.parquet"]), ("routing", seen.value.parts[1][0])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-000000.parquet").write_bytes(bytes(data))
    model_id = worker.info["ready"]["model"]["model_id"]
    whole, routing = (read_routing(tmp_path / name, model_id) for name in ("whole", "routing"))
    assert np.array_equal(whole.experts, routing.experts) and len(routing.position) == 40
    assert len(seen.value.parts[1][0]) < len(there["000000001-0-of-1.parquet"]) / 2
