"""Parts of a trace that wait behind a URL: those of counted windows get their names, in order, once, all or none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ground.errors import SparkError, UsageError
from spark import storage
from spark.pipeline import staged

URL = "memory://team/a trace"
MEMORY = MemoryFileSystem()


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    _clear()
    yield
    _clear()


def _clear() -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def quiet(done: int, total: int) -> None:
    assert 0 <= done <= total


def part(window: int, i: int) -> bytes:
    return f"part {i} of window {window}".encode()


def leave(where: str, window: int, n: int) -> None:
    staged.leave([part(window, i) for i in range(n)], where, window)


def named() -> list[bytes]:
    """What has a name in the trace, in order."""
    names = [name for name in storage.names(URL) if not name.startswith(".")]
    assert names == [f"part-{i:06}.parquet" for i in range(len(names))]
    return [MEMORY.cat_file(f"/team/a trace/{name}") for name in names]


@settings(max_examples=25)
@given(st.data())
def test_each_part_of_a_counted_window_is_there_once(data: st.DataObject) -> None:
    _clear()
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=9))
    # Some windows are left more than once, since a worker ended before it could say so; some by nobody who counts.
    order = data.draw(st.permutations([*range(len(sizes)), *data.draw(st.lists(st.sampled_from(range(len(sizes)))))]))
    counted = data.draw(st.sets(st.sampled_from(range(len(sizes)))))
    where = staged.place(URL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged, "_PER_FOLDER", data.draw(st.integers(1, 4)))
        staged.begin(where)
        for window in order:
            leave(where, window, sizes[window])
        assert named() == []
        for _ in range(2):  # it may be ended in between, and done again
            staged.publish(where, counted.__contains__, len(sizes), quiet)
            assert named() == [part(window, i) for window in sorted(counted) for i in range(sizes[window])]
    staged.remove(where)
    assert [name for name in storage.names(URL) if name.startswith(".")] == []


@pytest.mark.parametrize("missing", ["000000/000000001-0-of-2.parquet", "000000/000000001-1-of-2.parquet", "000000"])
def test_a_part_that_is_missing_is_named_and_nothing_is_there(missing: str) -> None:
    where = staged.place(URL)
    for window in range(3):
        leave(where, window, 2)
    MEMORY.rm(f"{where.removeprefix('memory:/')}/{missing}", recursive=True)
    with pytest.raises(SparkError, match=r"/000000 has [01] parts of window [01], which was counted") as caught:
        staged.check(where, lambda window: True, 3)
    assert caught.value.hint
    with pytest.raises(SparkError, match=re.escape(caught.value.message)):
        staged.publish(where, lambda window: True, 3, quiet)
    assert named() == []


@pytest.mark.parametrize("error", [OSError("the line is down"), KeyboardInterrupt()])
def test_a_publication_that_breaks_leaves_no_part_and_can_be_done_again(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, real, n = staged.place(URL), MemoryFileSystem.cp_file, 0
    for window in range(3):
        leave(where, window, 1)

    def third_fails(self: MemoryFileSystem, source: str, target: str, **more: object) -> None:
        nonlocal n
        n += 1
        if n == 3:
            raise error
        real(self, source, target, **more)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cp_file", third_fails)
        expected = SparkError if isinstance(error, Exception) else KeyboardInterrupt
        with pytest.raises(expected):
            staged.publish(where, lambda window: True, 3, quiet)
    assert n == 3 and named() == []
    staged.publish(where, lambda window: True, 3, quiet)
    assert named() == [part(window, 0) for window in range(3)]


def test_what_is_no_folder_is_refused() -> None:
    for url in ("s3://", "s3:///"):
        with pytest.raises(UsageError, match="found the kind of storage alone"):
            staged.place(url)
    for url in ("s3://team/*", "s3://team/t[1]", "s3://team/t?"):
        with pytest.raises(UsageError, match="expected one folder for the trace, found the"):
            staged.place(url)


def test_what_waits_for_another_run_stays_and_what_waits_for_nothing_goes() -> None:
    old, new = staged.place(URL), staged.place(URL)
    assert old != new and staged.place(URL, old) == old and staged.place("memory://team/other", old) != old

    def waiting() -> list[str]:
        return [f"{URL}/{name}" for name in storage.names(URL) if name.startswith(".")]

    staged.begin(old)
    leave(old, 0, 1)
    staged.begin(old)  # gone on with
    with pytest.raises(UsageError, match=f"parts of another run wait in {re.escape(old)}"):
        staged.begin(new)
    assert waiting() == [old] and storage.names(f"{old}/000000")
    staged.begin(new, left=old)
    assert waiting() == [new]
    again = staged.place(URL)
    staged.begin(again)  # there was but a mark
    assert waiting() == [again]


def test_who_does_not_see_the_place_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = staged.place(URL)
    with pytest.raises(SparkError, match=r"cannot read memory://team/a trace/\.parts-.*/seen: FileNotFoundError"):
        staged.require(where, "")
    mark = staged.begin(where)
    before = MEMORY.find("/team")
    staged.require(where, mark)
    assert MEMORY.find("/team") == before
    with pytest.raises(SparkError, match="found another mark"):
        staged.require(where, mark[::-1])

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("you may read alone")

    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
    with pytest.raises(SparkError, match=r"cannot write .*: PermissionError: you may read alone"):
        staged.require(where, mark)
