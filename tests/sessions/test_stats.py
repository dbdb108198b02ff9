"""`spark sessions stats`: figures that can be counted by hand, and what `--expect-ctx` follows from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ground.errors import SparkError
from spark.sessions.stats import MOSTLY, ROUND_TOKENS, expected_context, stats
from spark.speech.sessions import Message, Session, ToolCall, write_sessions
from tests.command_line import NANO, ROOT, refused, spark

CALL = ToolCall("1", "look", {"a": 1})  # 4 characters, and 8 of arguments
LONG = (
    Message("system", "s" * 100),
    Message("user", "u" * 50),
    Message("assistant", "a" * 10, "r" * 5, (CALL, CALL)),
    Message("tool", "t" * 1000, tool_call_id="1"),
    Message("tool", "t" * 3, tool_call_id="1"),
    Message("assistant", "a" * 20),
    Message("user", "never answered"),
)
SHORT = (Message("user", "u" * 7), Message("assistant", "a" * 9))


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    tools = ({"type": "function"},)  # 20 characters
    made = [
        Session("one", "claude", "", tools, LONG),
        Session("two", "codex", "", (), SHORT),
        Session("none", "codex", "", (), SHORT[:1]),
    ]
    write_sessions(tmp_path / "s.jsonl", made)
    return tmp_path / "s.jsonl"


def test_why_there_is_no_expected_context(tmp_path: Path) -> None:
    silent = Session("one", "claude", "", (), (*SHORT[:1], Message("assistant", "")))
    write_sessions(tmp_path / "s.jsonl", [silent])
    said = spark("sessions", "stats", "s.jsonl", "--json", "r.json", cwd=tmp_path).stderr
    assert "the model wrote nothing in these sessions" in said and "token files" not in said
    assert json.loads((tmp_path / "r.json").read_text())["expect_ctx"] is None


def test_characters_are_counted_by_hand(sessions: Path) -> None:
    report = stats([str(sessions)]).to_json()
    assert report["unit"] == "characters" and report["sessions"] == 2 and report["tools"] == {"look": 2}
    figures = report["figures"]
    expected = {
        "turns a session": ([1, 2], "number"),
        "tool calls a session": ([0, 2], "number"),
        "new prompt a turn": ([7, 170, 1003], "characters"),
        "written a turn": ([9, 20, 39], "characters"),
        "context of a turn": ([16, 209, 1232], "characters"),
        "longest context of a session": ([16, 1232], "characters"),
        "result of a tool": ([3, 1000], "characters"),
    }
    assert figures.keys() == expected.keys()
    for name, (values, unit) in expected.items():
        found = figures[name]
        assert (found["count"], found["total"], found["most"]) == (len(values), sum(values), values[-1]), name
        assert found["unit"] == unit and found["p10"] == values[0] and found["p90"] == values[-1]
        assert found["p50"] == values[(len(values) - 1) // 2]
    assert report["expect_ctx"] == ROUND_TOKENS and report["expect_ctx_guessed"]


def test_tokens_are_those_that_a_server_reads(sessions: Path, tmp_path: Path) -> None:
    report = stats([str(sessions)], NANO)
    rows = {row.name: row for row in report.rows}
    assert report.unit == "tokens" and not report.guessed and rows["turns a session"].total == 3
    # Nothing of these renderings is dropped, so what was read once and written is the longest context.
    read = rows["new prompt a turn"].total + rows["written a turn"].total
    assert read == rows["longest context of a session"].total < rows["context of a turn"].total
    assert rows["result of a tool"].count == 2
    spark("tokenize", NANO, sessions, "--out", "t.parquet", cwd=tmp_path)
    windows = stats([str(tmp_path / "t.parquet")])
    by_name = {row.name: row for row in windows.rows}
    assert windows.expect is None and windows.sessions == 2 and by_name["window"].total == read
    assert by_name["written without a break"].total == rows["written a turn"].total


def test_the_command_says_what_to_expect(tmp_path: Path) -> None:
    old = ROOT / "tests" / "old" / "sessions.jsonl"
    done = spark("sessions", "stats", old, "--model", NANO, "--json", "s.json", cwd=tmp_path)
    report = json.loads((tmp_path / "s.json").read_text())
    assert f"--expect-ctx {report['expect_ctx']}: 90% of what" in done.stderr and report["expect_ctx"] % 1024 == 0
    figures = report["figures"]
    assert figures["context of a turn"]["p50"] < report["expect_ctx"] <= figures["context of a turn"]["most"] + 1024
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["tokens", "p10", "p25", "p50", "p75", "p90", "most", "of", "total"] in lines
    (turns,) = [line for line in lines if line[:3] == ["turns", "a", "session"]]
    assert int(turns[-2]) == report["sessions"] and int(turns[-1].replace(",", "")) > report["sessions"]
    assert ["tool", "calls"] in lines
    guessed = spark("sessions", "stats", f"{old.parent}/*.jsonl", cwd=tmp_path)
    assert "at 3 characters a token; --model counts; the longest has" in guessed.stderr


def test_what_is_refused(sessions: Path, tmp_path: Path) -> None:
    spark("tokenize", NANO, sessions, "--out", "t.parquet", cwd=tmp_path)
    write_sessions(tmp_path / "empty.jsonl", [Session("none", "codex", "", (), SHORT[:1])])
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "again.jsonl").write_bytes(sessions.read_bytes())
    for names, model, words in (
        ("s.jsonl t.parquet", None, "has files of several kinds"),
        ("t.parquet", NANO, "token files are in tokens already"),
        ("empty.jsonl", None, "no session has a turn of the model"),
        ("bad.jsonl", None, "bad.jsonl, line 1: no 'messages'"),
        ("none.jsonl", None, "none.jsonl cannot be read"),
        ("s.jsonl again.jsonl", None, "is also in"),
        ("s.jsonl", sessions, "s.jsonl"),
    ):
        with pytest.raises(SparkError, match=words):
            stats([str(tmp_path / name) for name in names.split()], model)
    said = refused("sessions", "stats", "s.jsonl", "--json", "s.jsonl", cwd=tmp_path, status=2)
    assert "would overwrite the data you gave" in said


@given(st.lists(st.tuples(st.integers(1, 300_000), st.integers(0, 5000)), max_size=30), st.integers(1, 5))
def test_most_of_what_is_written_lies_in_the_context_that_is_expected(deep: list[tuple[int, int]], chars: int) -> None:
    total, context = sum(written for _, written in deep), expected_context(deep, chars)
    if not total:
        assert context is None
        return
    assert context is not None and context % ROUND_TOKENS == 0

    def inside(most: int) -> float:
        return sum(written for length, written in deep if length <= most * chars)

    assert inside(context) >= MOSTLY * total - 1e-6
    assert context == ROUND_TOKENS or inside(context - ROUND_TOKENS) < MOSTLY * total
    assert expected_context(reversed(deep), chars) == context and np.iinfo(np.int32).max > context
