"""Files of prefixes that are read before they are asked for: no more than has room, believed no more than others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.formats import prefix_file
from engine.ground.errors import CapacityError
from engine.memory import prefix_files
from engine.memory.prefix_files import PrefixFiles
from tests.cached_prompts import CHUNK, make_cache, prefix_cache, prompt, saved, serve
from tests.memory.test_prefix import KEY

N_BYTES = 300


def memory(*n_bytes: int) -> list[np.ndarray]:
    assert threading.current_thread() is threading.main_thread()
    return [np.full(n, 0xFF, np.uint8) for n in n_bytes]


def written(folder: Path, n: int) -> tuple[PrefixFiles, list[str]]:
    """Some files, each of its own contents."""
    files, names = PrefixFiles(folder, KEY, 1 << 30), [f"{i:064}.state" for i in range(n)]
    for i, name in enumerate(names):
        files.put(name, [np.full(N_BYTES, i, np.uint8)])
    files.flush()
    return files, names


def test_what_is_expected_is_read_meanwhile_and_no_more_than_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, names = written(tmp_path, 9)
    read, threads = prefix_file.read, list[str]()

    def noted(path: Path, key: Any, sizes: Sequence[int], into: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(path, key, sizes, into)

    monkeypatch.setattr(prefix_file, "read", noted)
    monkeypatch.setattr(prefix_files, "AHEAD_BYTES", 4 * N_BYTES + 1)
    monkeypatch.setattr(prefix_files, "_TOGETHER", 2)
    files.expect(((name, [N_BYTES]) for name in [*names[:7], "f" * 64 + ".state"]), memory)
    n_ahead = []
    for i, name in enumerate(names):
        n_ahead.append(len(files._ahead))
        found = files.get(name, [N_BYTES], memory)
        assert found is not None and (found[0] == i).all()
    assert n_ahead == [6, 5, 4, 4, 3, 2, 1, 0, 0]  # room is made for several at a time
    assert len(threads) == 9 and sum(name.startswith("prefix reader") for name in threads) == 7
    files.expect([(names[0], [N_BYTES])], memory)
    files.close()
    assert not files._ahead and files._readers is None


@pytest.mark.parametrize("room", [0, 1, 3])
def test_where_memory_is_short_fewer_are_read_ahead(tmp_path: Path, room: int) -> None:
    """And the others when they are asked for."""
    files, names = written(tmp_path, 7)

    def short(*n_bytes: int) -> list[np.ndarray]:
        if len(n_bytes) > room:
            raise CapacityError("no more host memory")
        return memory(*n_bytes)

    files.expect(((name, [N_BYTES]) for name in names), short)
    assert [*files._ahead] == names[:room] and files._ahead_bytes == room * N_BYTES
    for i, name in enumerate(names):
        found = files.get(name, [N_BYTES], memory)
        assert found is not None and (found[0] == i).all()
    assert not files._ahead and files._ahead_bytes == 0
    files.close()


def test_damaged_and_missing_files_are_told_as_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, names = written(tmp_path, 4)
    damaged = bytearray((tmp_path / names[1]).read_bytes())
    damaged[-40] ^= 1
    (tmp_path / names[1]).write_bytes(damaged)
    (tmp_path / names[2]).unlink()
    files.expect(((name, [N_BYTES]) for name in names), memory)
    assert [files.get(name, [N_BYTES], memory) is not None for name in names] == [True, False, False, True]
    assert [files.has(name) for name in names] == [True, False, False, True]
    assert "its checksum is wrong" in caplog.text and len(caplog.records) == 1
    files.close()


def watched(files: PrefixFiles, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each file that is asked for from now on, whether it was being read."""
    found, get = list[bool](), files.get

    def noted(name: str, sizes: Sequence[int], into: Any) -> Any:
        found.append(name in files._ahead)
        return get(name, sizes, into)

    monkeypatch.setattr(files, "get", noted)
    return found


@pytest.mark.parametrize("kind", ["full", "states"])
def test_a_conversation_comes_back_from_files_that_were_read_ahead(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, and nothing is read for nothing, or left over."""
    tokens = prompt("abcdefg")
    for reused in (0, 7 * CHUNK):
        kv = make_cache(kind, 12 * CHUNK)
        files = PrefixFiles(tmp_path, KEY, 1 << 30)
        cache = prefix_cache(kv, CHUNK, 1 << 20, files)
        was_ahead = watched(files, monkeypatch)
        assert serve(kv, cache, tokens) == reused and not files._ahead
        assert was_ahead == [True] * (0 if not reused else 7 + (kind == "states"))
        files.close()
    assert len(saved(tmp_path)) >= 7


@pytest.mark.parametrize("kind", ["states", "everything"])
def test_each_file_is_read_once_however_large_a_snapshot_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, n_chunks = prompt("abcdefg"), 7
    kv = make_cache(kind, 12 * CHUNK)
    cache = prefix_cache(kv, CHUNK, 1 << 20, PrefixFiles(tmp_path, KEY, 1 << 30))
    serve(kv, cache, tokens)
    cache.close()
    names, read = list[str](), prefix_file.read

    def noted(path: Path, *others: Any) -> Any:
        names.append(path.name)
        return read(path, *others)

    monkeypatch.setattr(prefix_file, "read", noted)
    monkeypatch.setattr(prefix_files, "AHEAD_BYTES", 1)
    kv = make_cache(kind, 12 * CHUNK)
    files = PrefixFiles(tmp_path, KEY, 1 << 30)
    cache = prefix_cache(kv, CHUNK, 1 << 20, files)
    was_ahead = watched(files, monkeypatch)
    assert serve(kv, cache, tokens) == n_chunks * CHUNK
    assert len(names) == len(set(names)) == n_chunks + 1 and all(was_ahead)
    cache.close()
