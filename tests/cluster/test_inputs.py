"""Windows that workers read themselves are those of the driver, or they are not read."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest

from spark.cluster import inputs
from spark.cluster.inputs import Inputs, Row, UnreadError
from spark.pipeline import tokens
from spark.pipeline.tokens import JoinedTokens, Origin, Window, read_tokens, write_windows

ORIGIN = Origin("a" * 64, "b" * 64, "c" * 64)
WINDOW = 32


def windows(session: str, n: int, seed: int) -> list[Window]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, WINDOW + 1, n)
    return [
        Window(session, i, rng.integers(0, 999, size, dtype=np.int32), rng.random(size) < 0.5)
        for i, size in enumerate(sizes)
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files, of several row groups each, and one without windows between them."""
    monkeypatch.setattr(tokens, "_BATCH_TOKENS", 100)
    for name, session, n in (("a", "s", 17), ("b", "t", 0), ("c", "u", 23)):
        with (tmp_path / f"{name}.parquet").open("wb") as file:
            write_windows(file, windows(session, n, n), ORIGIN, WINDOW)
    return tmp_path


def joined(folder: Path) -> JoinedTokens:
    return JoinedTokens([read_tokens(path) for path in sorted(folder.glob("*.parquet"))], "all")


def rows(folder: Path) -> list[Row]:
    file = joined(folder)
    found = inputs.sources(file)
    return [inputs.row(found, number, window) for number, window in enumerate(file)]


@contextlib.contextmanager
def opened(asked: Row) -> Iterator[Inputs]:
    with contextlib.ExitStack() as stack:
        yield Inputs(asked.sources, stack)


def test_windows_are_read_in_any_order_as_the_driver_has_them(folder: Path) -> None:
    asked, wanted = rows(folder), list(joined(folder))
    order = random.Random(5).sample(range(len(asked)), len(asked))
    with opened(asked[0]) as found:
        for number in [*order, *order[:3]]:
            ours, theirs = found.window(asked[number]), wanted[number]
            assert (ours.session_id, ours.window) == (theirs.session_id, theirs.window)
            assert np.array_equal(ours.tokens, theirs.tokens) and ours.tokens.dtype == theirs.tokens.dtype
            assert np.array_equal(ours.generated, theirs.generated) and ours.generated.dtype == theirs.generated.dtype


def test_a_url_is_read_where_it_lies(folder: Path) -> None:
    memory, path = fsspec.filesystem("memory"), folder / "c.parquet"
    memory.pipe_file("/inputs/c.parquet", path.read_bytes())
    file = read_tokens(path, name="memory://inputs/c.parquet")
    given = inputs.sources(file)
    assert [source.where for source in given] == ["memory://inputs/c.parquet"]
    asked = [inputs.row(given, number, window) for number, window in enumerate(file)]
    path.unlink()
    with opened(asked[0]) as found:
        assert [found.window(each).session_id for each in asked] == ["u"] * 23
    memory.rm_file("/inputs/c.parquet")
    words = r"cannot read memory://inputs/c\.parquet: FileNotFoundError"
    with pytest.raises(UnreadError, match=words), opened(asked[0]):
        pass
    # Sessions that the driver has tokenized lie on its disk alone, whatever they are called.
    path.write_bytes((folder / "a.parquet").read_bytes())
    (source,) = inputs.sources(read_tokens(path, name="memory://inputs/test.jsonl"))
    assert source.where == str(path)


def test_another_file_under_the_name_is_not_read(folder: Path) -> None:
    asked = rows(folder)
    path = folder / "a.parquet"
    whole = path.read_bytes()
    for other in (b"", b"PAR1", whole[:-1], whole + b"x", (folder / "c.parquet").read_bytes()):
        path.write_bytes(other)
        with pytest.raises(UnreadError, match=r"a\.parquet is another file here"), opened(asked[0]):
            pass
    path.unlink()
    with pytest.raises(UnreadError) as caught, opened(asked[0]):
        pass
    assert not caught.value.message, "it is merely not here, as on most clusters"


def test_damage_and_other_windows_are_not_read(folder: Path) -> None:
    asked = rows(folder)
    path = folder / "a.parquet"
    whole = path.read_bytes()
    with opened(asked[0]) as found, pytest.raises(UnreadError, match="window 3 of session s is not what the driver"):
        found.window(replace(asked[2], number=3))
    n_read = 0
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for at in range(4, footer, 23):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with opened(asked[0]) as found:
            for each, window in zip(asked[:17], windows("s", 17, 17), strict=True):
                with contextlib.suppress(UnreadError):
                    assert np.array_equal(found.window(each).tokens, window.tokens)
                    n_read += 1
    assert n_read, "row groups that are whole are read"
