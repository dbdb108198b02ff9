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
from spark.pipeline.tokens import Origin, Window, read_tokens, write_windows
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
