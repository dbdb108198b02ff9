"""Files as version 0.1.0 wrote them (commit 78a31c5): read by every later version, or refused in one line.

`tests/old/` was made with that commit and the bundled model: two sample sessions, `spark tokenize --window 256`,
`spark calibrate --max-tokens 600`, and a `spark calibrate --trace` that Ctrl-C ended after three windows.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.formats import profile as profiles
from engine.formats.gguf import open_model
from engine.formats.trace import read_routing
from spark.pipeline.checkpoints import partial_path
from spark.pipeline.tokens import read_tokens
from spark.speech.sessions import read_sessions
from tests.command_line import NANO, refused, spark

OLD = Path(__file__).parent / "old"


@pytest.fixture(scope="module")
def model_id() -> str:
    with open_model(NANO) as file:
        return file.model_id


def test_sessions_and_tokens(model_id: str) -> None:
    sessions = list(read_sessions(OLD / "sessions.jsonl"))
    assert [len(s.messages) > 2 for s in sessions] == [True, True]
    file = read_tokens(OLD / "tokens.parquet")
    assert file.origin.model_id == model_id and file.window == 256
    assert sum(len(w.tokens) for w in file) == file.n_tokens > 0


def test_a_profile(model_id: str, tmp_path: Path) -> None:
    profile, warnings = profiles.load(OLD / "profile.csv", model_id=model_id, shape=(6, 32))
    assert not warnings and profile.tokens == 100 and profile.counts.sum() == 100 * 4 * 6
    shutil.copy(OLD / "profile.csv", tmp_path / "p.csv")
    done = spark("plan", NANO, "--vram", "1", "--spark", "--profile", "p.csv", cwd=tmp_path)
    assert "slots of a layer" in done.stdout


def test_a_trace(model_id: str) -> None:
    trace = read_routing(OLD / "trace", model_id)
    assert trace.experts.shape == (768, 6, 4) and not trace.unfinished


def test_a_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    """It lacks what choosing a policy takes: what each session alone was counted for."""
    shutil.copy(OLD / "tokens.parquet", tmp_path)
    shutil.copytree(OLD / "trace", tmp_path / "trace")
    text = (OLD / "checkpoint.csv.partial").read_text().replace("/home/user/trace", str(tmp_path / "trace"))
    partial_path(tmp_path / "p.csv").write_text(text)
    command = ["calibrate", NANO, "tokens.parquet", "--trace", "trace", "--out", "p.csv", "--resume"]
    said = refused(*command, cwd=tmp_path)
    assert "p.csv.partial is not a checkpoint of this version's calibration" in said
    assert partial_path(tmp_path / "p.csv").read_text() == text
