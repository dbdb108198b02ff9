"""Token files that are none, are damaged, or claim more than they may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.ground.errors import FileFormatError
from engine.ground.protocol import MAX_TEXT_CHARS
from spark.pipeline.tokens import Origin, Window, different, look_over, read_tokens, write_windows
from spark.speech.sessions import Message, Session, root_of, short_id, write_sessions
from spark.storage import Found
from tests.pipeline.test_tokens import rows_of


def write_table(path: Path, change: dict[str, Any], metadata: dict[str, str | None]) -> Path:
    columns: dict[str, Any] = {"session_id": ["s"], "window": [0], "tokens": [[1, 2]], "generated": [[False, True]]}
    types = {"session_id": pa.string(), "window": pa.int32()}
    types |= {"tokens": pa.list_(pa.int32()), "generated": pa.list_(pa.bool_())}
    arrays = {
        name: change[name] if isinstance(change.get(name), pa.Array) else pa.array(change.get(name, value), types[name])
        for name, value in columns.items()
        if name not in change or change[name] is not None
    }
    fields = {"format": "tokens", "version": "1", "window": "64", "model_id": "m", "tokenizer": "t", "template": "c"}
    kept = {f"spark.{k}": v for k, v in (fields | metadata).items() if v is not None}
    pq.write_table(pa.table(arrays).replace_schema_metadata(kept), path, write_page_checksum=True)
    return path


@pytest.mark.parametrize(
    ("change", "metadata", "words"),
    [
        ({"generated": None}, {}, "not one of tokens"),
        ({"window": pa.array([0], pa.int64())}, {}, "not one of tokens"),
        ({}, {"format": "trace"}, "not one of tokens"),
        ({}, {"format": None}, "not one of tokens"),
        ({}, {"version": "2"}, "version '2'"),
        ({}, {"window": None}, "metadata"),
        ({}, {"window": "many"}, "metadata"),
        ({}, {"template": None}, "metadata"),
        ({"tokens": [[1, 2, 3]]}, {}, "as many marks as tokens, found 2 and 3"),
        ({"generated": [[True] * 200]}, {}, "as many marks as tokens, found 200 and 2"),
        (
            {"session_id": ["s"] * 2, "window": [0, 1], "tokens": [[1], [2, 3]], "generated": [[True] * 2, [False]]},
            {},
            "window 0 of session 's'",
        ),
        ({"tokens": [[1, -2]]}, {}, "window 0"),
        ({"tokens": [[1, None]]}, {}, "window 0"),
        ({"tokens": [None]}, {}, "as many marks"),
        ({"tokens": [None], "generated": [None]}, {}, "window 0"),
        ({"generated": [[True, None]]}, {}, "window 0"),
        ({"session_id": [None]}, {}, "window 0"),
        ({"tokens": [[]], "generated": [[]]}, {}, "window 0"),
        ({}, {"window": "1"}, "windows of at most 1 tokens, found 2 tokens in 1"),
        ({}, {"window": "0"}, "windows of 0 tokens"),
        ({}, {"window": "1048577"}, "windows of 1048577 tokens"),
    ],
)
def test_files_that_are_not_tokens_are_refused(
    tmp_path: Path, change: dict[str, Any], metadata: dict[str, str | None], words: str
) -> None:
    good = write_table(tmp_path / "good.parquet", {}, {})
    assert rows_of(read_tokens(good)) == [("s", 0, [1, 2], [False, True])]
    bad = write_table(tmp_path / "bad.parquet", change, metadata)
    with pytest.raises(FileFormatError, match=words):
        list(read_tokens(bad))


def test_row_groups_beyond_what_is_written_are_refused_unread(tmp_path: Path) -> None:
    """One row has all the tokens of a hundred windows, and the others none."""
    n = 3 << 20
    bounds = pa.array([0] + [n] * 100, pa.int32())
    change = {
        "session_id": ["s"] * 100,
        "window": list(range(100)),
        "tokens": pa.ListArray.from_arrays(bounds, pa.array(np.zeros(n, np.int32))),
        "generated": pa.ListArray.from_arrays(bounds, pa.array(np.zeros(n, np.bool_))),
    }
    bad = write_table(tmp_path / "bad.parquet", change, {"window": str(1 << 20)})
    with pytest.raises(FileFormatError, match=f"row groups of at most {(2 << 20) - 1} tokens, found {n + 99} in one"):
        read_tokens(bad)


def test_the_largest_row_group_that_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark.pipeline.tokens._BATCH_TOKENS", 100)
    rows = [Window("s", i, np.zeros(n, np.int32), np.zeros(n, np.bool_)) for i, n in enumerate((50, 49, 64, 3))]
    with (tmp_path / "t.parquet").open("wb") as file:
        write_windows(file, rows, Origin("m", "t", "c"), 64)
    assert pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(0).column(2).num_values == 163
    assert rows_of(read_tokens(tmp_path / "t.parquet")) == rows_of(rows)


@given(st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_are_refused_or_read(tmp_path: Path, data: st.DataObject) -> None:
    good = write_table(tmp_path / "good.parquet", {}, {})
    raw = bytearray(good.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(raw)
    try:
        rows = list(read_tokens(bad))
    except FileFormatError as error:
        assert "bad.parquet" in error.message
    else:
        assert len(raw) == good.stat().st_size  # a changed bit that is not in the tokens
        assert [row.tokens.tolist() for row in rows] in ([[1, 2]], [])


def write_names(path: Path, names: list[tuple[str | None, int | None]]) -> Path:
    sessions, numbers = ([name[i] for name in names] for i in (0, 1))
    one = {"tokens": [[1, 2]] * len(names), "generated": [[False, True]] * len(names)}
    return write_table(path, {"session_id": sessions, "window": numbers, **one}, {})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 5)), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_window_that_is_there_twice_is_refused_wherever_it_is(tmp_path: Path, names: list[tuple[str, int]]) -> None:
    """By the same words as a session in two files: its routing would count twice."""
    file = read_tokens(write_names(tmp_path / "t.parquet", [*names]))
    if len(set(names)) == len(names):
        look_over(file)
    else:
        with pytest.raises(FileFormatError, match=r"window -?\d of session '[abc]' is there twice") as refused:
            look_over(file)
        assert "would count twice" in (refused.value.hint or "")


def test_a_session_that_is_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    """As one in two files, where that is said."""
    path = tmp_path / "s.jsonl"
    sessions = [Session(name, "claude", "", (), (Message("user", "hi"),)) for name in ("a", "b", "a")]
    write_sessions(path, sessions)
    with pytest.raises(FileFormatError, match=r"s.jsonl: session 'a' is there twice"):
        list(different([Found(str(path), path)]))
    write_sessions(path, sessions[:2])
    assert list(different([Found(str(path), path)])) == sessions[:2]


def test_of_windows_without_a_name_nothing_is_said_before_they_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = read_tokens(write_names(tmp_path / "t.parquet", [(None, 0), ("a", None), (None, 0), ("a", None)]))
    look_over(file)
    assert capsys.readouterr().err == ""
    with pytest.raises(FileFormatError):
        list(file)


def test_a_session_whose_id_is_too_long_for_the_engine_is_counted_under_a_shorter_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ["a" * 5000, "a" * 5001, "a" * 5000 + "/b#2~1", "c" * 1000 + "/" + "d" * 9000, "short"]
    names = [(session_id, number) for session_id in ids for number in (0, 1)]
    file = read_tokens(write_names(tmp_path / "t.parquet", [*names]))
    look_over(file)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "has an id of 5,000 characters" in said and "(and 3 more)" in said
    found = [(window.session_id, window.window) for window in file]
    assert found == list(file.names()) and {name for name, _ in found} == file.session_ids()
    assert len(set(found)) == len(names) and max(len(name) for name, _ in found) <= MAX_TEXT_CHARS
    roots = [root_of(name) for name, _ in found[::2]]
    assert roots[0] == roots[2] != roots[1] and roots[3:] == ["c" * 1000, "short"]
    assert list(file.names_there()) == names


@given(st.text(alphabet="ab/#~", max_size=30), st.integers(1, 400))
def test_a_shorter_id_keeps_the_family(session_id: str, times: int) -> None:
    long = session_id.replace("a", "a" * times)
    assert len(short_id(long)) <= MAX_TEXT_CHARS and short_id(short_id(long)) == short_id(long)
    assert root_of(short_id(long)) == short_id(root_of(long))
    if len(long) <= 2000:
        assert short_id(long) == long
