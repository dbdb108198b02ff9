"""The whole way with its files in an object store, and nothing half-written there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.formats import profile as profiles
from engine.ground.config import EngineConfig
from engine.ground.errors import SparkError
from spark.daemon.client import Deadlines
from spark.pipeline import calibrate, checkpoints
from tests.command_line import NANO, SAMPLES, spark
from tests.object_store import object_store

BUCKET = "team"
URL = f"s3://{BUCKET}"
LIMITS = ("--max-tokens", "3000", "--device", "cpu")


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with object_store(BUCKET) as store:
        yield store


@pytest.mark.slow
def test_every_command_reads_and_writes_there(s3: Any, tmp_path: Path) -> None:
    logs = ["--claude-dir", SAMPLES / "claude", "--codex-dir", SAMPLES / "codex", "--test-frac", "0.3"]
    spark("extract-sessions", *logs, "--out-dir", f"{URL}/sessions", cwd=tmp_path)
    for side in ("train", "test"):
        out = f"{URL}/tokens/{side}.parquet"
        spark("tokenize", NANO, f"{URL}/sessions/{side}.jsonl", "--out", out, "--window", "256", cwd=tmp_path)
    spark("calibrate", NANO, f"{URL}/tokens/tra*.parquet", *LIMITS, "--out", f"{URL}/p/nano.csv", cwd=tmp_path)
    s3.get(f"{BUCKET}/tokens/train.parquet", str(tmp_path / "t.parquet"))
    spark("calibrate", NANO, "t.parquet", *LIMITS, "--out", "here.csv", cwd=tmp_path)
    s3.get(f"{BUCKET}/p/nano.csv", str(tmp_path / "there.csv"))
    here, there = (profiles.load(tmp_path / f"{name}.csv")[0] for name in ("here", "there"))
    assert profiles.format(replace(here, created="")) == profiles.format(replace(there, created=""))
    spark(
        "validate", NANO, f"{URL}/tokens/test.parquet", "--profile", f"{URL}/p/nano.csv", "--residency", "30",
        "--prompts", "1", "--generate", "4", *LIMITS, "--json", "v.json", cwd=tmp_path,
    )  # fmt: skip
    assert json.loads((tmp_path / "v.json").read_text())["profile"] == f"{URL}/p/nano.csv"
    assert {path.removeprefix(f"{BUCKET}/") for path in s3.find(BUCKET)} == {
        "sessions/train.jsonl", "sessions/test.jsonl", "tokens/train.parquet", "tokens/test.parquet", "p/nano.csv",
    }  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.csv", "t.parquet", "there.csv", "v.json"]


def test_a_profile_that_cannot_be_sent_is_still_there_to_go_on_from(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.cluster.clusters import write_tokens

    def fail(source: str, target: str) -> None:
        raise OSError("the connection was lost")

    options = checkpoints.CalibrateOptions(write_tokens(tmp_path, 2000), tmp_path / "p.csv", url=f"{URL}/broken/p.csv")
    config = EngineConfig(model=NANO, device="cpu", threads=1)
    monkeypatch.setattr(s3, "put_file", fail)
    with pytest.raises(SparkError, match=r"cannot write s3://team/broken/p\.csv: OSError: the connection was lost"):
        calibrate.calibrate(config, options, Deadlines(), lambda *_: None)
    monkeypatch.undo()
    assert s3.find(f"{BUCKET}/broken") == [] and checkpoints.partial_path(options.out).exists()
    report = calibrate.calibrate(config, replace(options, resume=True), Deadlines(), lambda *_: None)
    assert s3.find(f"{BUCKET}/broken") == [f"{BUCKET}/broken/p.csv"] and report.resumed_tokens == report.tokens
    assert not checkpoints.partial_path(options.out).exists()
