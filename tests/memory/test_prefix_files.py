"""The folder of prefixes: names are believed only with their contents, nothing is half there, the budget is kept."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.formats import prefix_file
from engine.formats.prefix_file import LOCK, Place
from engine.ground.errors import UsageError
from engine.ground.files import hold
from engine.memory import prefix, prefix_files
from engine.memory.prefix import PrefixCache
from engine.memory.prefix_files import PrefixFiles
from tests.cached_prompts import CHUNK, make_cache, prefix_cache, prompt, saved, serve
from tests.memory.test_prefix import KEY


def room(n_bytes: int) -> np.ndarray:
    return np.full(n_bytes, 0xFF, np.uint8)


def lent(*n_bytes: int) -> list[np.ndarray]:
    return [room(n) for n in n_bytes]


ONE, OTHER = "1" * 64 + ".state", "2" * 64 + ".state"


def test_a_file_under_another_name_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = PrefixFiles(tmp_path, KEY, 1 << 30)
    one, other, sizes = ONE, OTHER, [40, 24]
    files.put(one, [np.arange(5), np.ones((2, 3), np.float32)])
    files.flush()
    for expected in (sizes, [64]):
        got = files.get(one, expected, lent)
        assert got is not None and np.array_equal(got[0], np.arange(5)) and got[1].shape == (2, 3)
    assert (tmp_path / one).stat().st_mode & 0o777 == 0o600
    (tmp_path / one).rename(tmp_path / other)
    (tmp_path / "letter.txt").write_text("mine")
    files = PrefixFiles(tmp_path, KEY, 1 << 30)
    assert files.get(other, sizes, lent) is None and not files.has(other) and files.get(one, sizes, lent) is None
    assert [r.getMessage().split(": ")[1] for r in caplog.records] == [
        "1 files that are not Spark's are left alone",
        "it was made for something else",
    ]


def test_a_process_killed_before_the_rename_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; import numpy as np; from engine.memory.prefix_files import PrefixFiles\n"
        "pathlib.Path.replace = lambda *_: os._exit(9)\n"
        "files = PrefixFiles(pathlib.Path(sys.argv[1]), {}, 1 << 30)\n"
        "files.put('0' * 64 + '.state', [np.zeros(999)]); files.close()"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], timeout=60).returncode == 9
    (left,) = (path for path in tmp_path.iterdir() if path.name != LOCK)
    files = PrefixFiles(tmp_path, {}, 1 << 30)
    assert files.n_bytes == 0 and not files.has("0" * 64 + ".state") and left.exists()
    os.utime(left, (0, 0))
    PrefixFiles(tmp_path, {}, 1 << 30)
    assert not left.exists()


def test_the_folder_keeps_its_budget_and_what_was_used_last(tmp_path: Path) -> None:
    names = [f"{i:064}.state" for i in range(5)]
    for budget, kept in ((20_000, names[:4]), (13_000, [names[0], names[4]])):
        files = PrefixFiles(tmp_path, KEY, budget)
        for name in names[:4] if budget == 20_000 else names[4:]:
            files.put(name, [np.zeros(4096, np.uint8)])
            files.flush()
            assert files.n_bytes == sum(f.stat().st_size for f in saved(tmp_path)) <= budget
        assert [f.name for f in saved(tmp_path)] == kept
        files.touch(names[:1])
        files.put(f"{9:064}.state", [np.zeros(30_000, np.uint8)])
        files.close()
        assert files.n_bytes == sum(f.stat().st_size for f in saved(tmp_path)) <= budget


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--cache-dir"):
        PrefixFiles(tmp_path / "file", KEY, 1 << 20)
    folder = tmp_path / "gone"
    files = PrefixFiles(folder, KEY, 1 << 20)
    (folder / LOCK).unlink()
    folder.rmdir()
    for i in range(3):
        files.put(f"{i:064}.state", [np.zeros(9)])
    files.close()
    assert len(caplog.records) == 1 and "no prefixes are saved for 60 s" in caplog.text


def one_file(folder: Path) -> tuple[Path, list[np.ndarray]]:
    """A chunk's file, and its arrays."""
    ids, arrays = np.arange(7, dtype=np.int32).tobytes(), [np.arange(33, dtype=np.uint8), np.ones((2, 3), np.float16)]
    files = PrefixFiles(folder, KEY, 1 << 20, {"path": "m.gguf", "needs_state": False})
    path = folder / f"{prefix_file.following(files.root, ids)}.blocks"
    files.put(path.name, arrays, Place(files.root, ids))
    files.close()
    return path, arrays


def test_a_file_says_what_it_is_of(tmp_path: Path) -> None:
    path, arrays = one_file(tmp_path)
    head = prefix_file.check(path)
    assert head == prefix_file.read_head(path) and head.key == json.loads(json.dumps(KEY | {"format": 2}))
    assert head.key["kv_types"] == ["f16", "f16"] and head.model == {"path": "m.gguf", "needs_state": False}
    assert head.tokens.tolist() == list(range(7)) and head.place.before == prefix_file.root({**KEY, "format": 2})
    assert head.sizes == [33, 12] and head.n_bytes == path.stat().st_size
    read = prefix_file.read(path, head.key, [33, 12], room)
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(read, arrays, strict=True))
    for key, sizes in (({**KEY, "format": 2, "file_id": "g"}, [33, 12]), (head.key, [33, 13])):
        with pytest.raises(ValueError, match=r"made for something else|were expected"):
            prefix_file.read(path, key, sizes, room)


@given(data=st.data())
def test_no_damage_is_believed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("damage")
    path, _ = one_file(folder)
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = data.draw(
        st.sampled_from([good[:at], good + good[at:], good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :]])
        | st.binary(max_size=300)
    )
    path.write_bytes(bad)
    with pytest.raises(ValueError):
        prefix_file.check(path)
    with pytest.raises(ValueError):
        prefix_file.read(path, KEY | {"format": 2}, [33, 12], room)


def test_no_header_makes_room_for_what_is_not_there(tmp_path: Path) -> None:
    for n in (1 << 40, 1 << 61):
        path = tmp_path / f"{'1' * 64}.blocks"
        header = {"spark": "prefix", "key": {"format": 2}, "name": path.name, "before": "", "tokens": n}
        path.write_bytes(json.dumps(header | {"model": {}, "arrays": []}).encode() + b"\n" + bytes(99))
        with pytest.raises(ValueError, match="length is wrong"):
            prefix_file.read_head(path)


@pytest.mark.parametrize(
    "header",
    [
        "[" * 60_000, "{}", '"x"', '{"spark": "prefix", "name": 5, "key": {"format": 2}}',
        '{"spark": "prefix", "key": [], "name": ""}', '{"spark": "prefix", "key": {"format": 2}, "name": NAME}',
        '{"spark":"prefix","key":{"format":2},"name":NAME,"model":{},"arrays":[["O",[1]]]}',
        '{"spark":"prefix","key":{"format":2},"name":NAME,"model":{},"arrays":[["|u1",[-1]]]}',
        '{"spark":"prefix","key":{"format":2},"name":NAME,"model":{},"arrays":[["|u1",[4611686018427387903,9]]]}',
        '{"spark":"prefix","key":{"format":2},"name":NAME,"model":3,"arrays":[]}',
    ],
)  # fmt: skip
def test_no_header_is_believed_that_is_none(header: str, tmp_path: Path) -> None:
    path = tmp_path / ONE
    path.write_bytes(header.replace("NAME", f'"{ONE}"').encode() + b"\n" + bytes(64))
    with pytest.raises(ValueError):
        prefix_file.check(path)


def test_a_file_of_another_version_is_called_so(tmp_path: Path) -> None:
    (tmp_path / ONE).write_bytes(b'{"spark": "prefix", "key": {"format": 1}, "name": "x", "arrays": []}\n' + bytes(32))
    with pytest.raises(prefix_file.OtherVersionError, match="format 1"):
        prefix_file.read_head(tmp_path / ONE)


def test_a_full_disk_takes_nothing_from_memory_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = True

    def written(self: Path, target: Path) -> Path:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.rename(target)
        return target

    monkeypatch.setattr(Path, "replace", written)
    monkeypatch.setattr(prefix_files, "RETRY_S", 0.2)
    kv = make_cache("everything", 8 * 64)
    files = PrefixFiles(tmp_path, KEY, 1 << 30)
    cache = prefix_cache(kv, CHUNK, 1 << 20, files)
    assert serve(kv, cache, prompt("abc")) == 0
    files.flush()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK] and files.n_bytes == 0
    assert serve(kv, cache, prompt("abc")) == 3 * CHUNK  # from memory
    (record,) = caplog.records
    assert record.reason == "files_not_written" and "No space left on device" in record.getMessage()
    full = False
    time.sleep(0.25)
    assert serve(kv, cache, prompt("abc")) == 3 * CHUNK
    cache.close()
    assert len([path for path in saved(tmp_path) if path.suffix == ".blocks"]) == 3
    assert files.n_bytes == sum(path.stat().st_size for path in saved(tmp_path))


def test_a_slow_disk_costs_files_and_no_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = PrefixFiles._write

    def slowly(self: PrefixFiles, *job: object) -> int:
        time.sleep(0.3)
        return write(self, *job)

    monkeypatch.setattr(PrefixFiles, "_write", slowly)
    monkeypatch.setattr(prefix_files, "WAITING_BYTES", 40_000)
    monkeypatch.setattr(prefix, "LAST_S", 0.0)
    kv = make_cache("full", 40 * 64)
    files = PrefixFiles(tmp_path, KEY, 1 << 30)
    cache = prefix_cache(kv, CHUNK, 1 << 20, files)
    began = time.monotonic()
    assert serve(kv, cache, prompt("abcdefgh")) == 0
    assert serve(kv, cache, prompt("abcdefgh")) == 8 * CHUNK  # nobody waits for the disk
    assert time.monotonic() - began < 0.3
    cache.close()
    assert 0 < len(saved(tmp_path)) < 8 and all(prefix_file.check(path) for path in saved(tmp_path))


def held_up(monkeypatch: pytest.MonkeyPatch, waiting_bytes: int) -> threading.Event:
    """A disk that writes nothing before an event is set; no more than these bytes, or one file, may wait."""
    write, gate = PrefixFiles._write, threading.Event()

    def later(self: PrefixFiles, *job: object) -> int:
        gate.wait(9)
        return write(self, *job)

    monkeypatch.setattr(PrefixFiles, "_write", later)
    monkeypatch.setattr(prefix_files, "WAITING_BYTES", waiting_bytes)
    return gate


def catch_up(cache: PrefixCache) -> int:
    """Save what was missed, as idle time does; how many files."""
    n, until = 0, time.monotonic() + 20
    while (wait_s := cache.missed_s) is not None:
        assert time.monotonic() < until
        if wait_s:
            time.sleep(wait_s)
        n += cache.save_missed()
    return n


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("kind", ["full", "everything"])
def test_what_a_slow_disk_missed_is_written_later(
    kind: str, ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In idle time, or when the server ends; also what has left the device, and a conversation is then whole."""
    gate = held_up(monkeypatch, 100_000)
    kv = make_cache(kind, 9 * 128)
    cache = prefix_cache(kv, CHUNK, 1 << 22, PrefixFiles(tmp_path, KEY, 1 << 30))
    assert serve(kv, cache, prompt("abcdef")) == 0 and serve(kv, cache, prompt("ABCDEF")) == 0
    assert cache.stats()["host_chunks"] and cache.missed_s and not saved(tmp_path)
    assert cache.stats()["missed_files"] > 6
    gate.set()
    if not ended:
        assert catch_up(cache) > 6 and not catch_up(cache)
    cache.close()
    written = saved(tmp_path)
    assert [path.suffix for path in written].count(".blocks") == 12 and all(map(prefix_file.check, written))
    kv = make_cache(kind, 9 * 128)
    cache = prefix_cache(kv, CHUNK, 1 << 22, PrefixFiles(tmp_path, KEY, 1 << 30))
    for text in ("abcdef", "ABCDEF"):
        assert serve(kv, cache, prompt(text)) == 6 * CHUNK
    cache.close()


def test_a_device_that_is_lost_saves_nothing_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = held_up(monkeypatch, 0)
    kv = make_cache("full", 9 * 128)
    cache = prefix_cache(kv, CHUNK, 1 << 22, PrefixFiles(tmp_path, KEY, 1 << 30))
    serve(kv, cache, prompt("abcdef"))
    lost = type("CUDARuntimeError", (Exception,), {"status": 719})("unspecified launch failure")
    monkeypatch.setattr(kv.device, "copy", lambda *_: (_ for _ in ()).throw(lost))
    gate.set()
    cache.close()
    assert len(saved(tmp_path)) == 1 and kv.free_blocks == kv.n_blocks


def test_who_ends_waits_for_a_slow_disk_no_longer_than_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_files, "END_S", 0.2)
    write = PrefixFiles._write

    def slowly(self: PrefixFiles, *job: object) -> int:
        time.sleep(0.3)
        return write(self, *job)

    monkeypatch.setattr(PrefixFiles, "_write", slowly)
    files = PrefixFiles(tmp_path, KEY, 1 << 30)
    for name in names(9):
        files.put(name, [np.zeros(300)])
    files.close()
    assert 0 < len(saved(tmp_path)) < 4


def test_what_is_missed_is_bounded_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_files, "_MOST_MISSED", 5)
    monkeypatch.setattr(PrefixFiles, "_make_room", lambda *_: (_ for _ in ()).throw(OSError("no such luck")))
    files = PrefixFiles(tmp_path, KEY, 10_000)
    assert files.missed_s is None
    files.put(names(1)[0], [np.zeros(300)])
    files.flush()
    assert files.missed == {names(1)[0]} and 59 < (files.missed_s or 0) <= 60
    for name in names(9):
        assert not files.wants(name, 2400)
    assert files.missed == set(names(9)[-5:])
    assert not files.wants("f" * 64 + ".state", 10_001)  # it will never fit
    files.forget_missed(but=[names(9)[-1], names(9)[0]])
    assert files.missed == {names(9)[-1]}
    files.forget_missed()
    assert files.missed_s is None
    files.close()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for name, why in (("file", "it is no folder"), ("file/below", "Not a directory")):
        with pytest.raises(UsageError, match=f"--cache-dir .*{name}: {why}$"):
            PrefixFiles(tmp_path / name, KEY, 1 << 20)


def test_who_uses_the_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = PrefixFiles(tmp_path, KEY, 1 << 20), PrefixFiles(tmp_path, {}, 1 << 20)  # beside each other
    for files in (one, other):
        with pytest.raises(BlockingIOError):
            hold(tmp_path / LOCK, alone=True)
        files.close()
    monkeypatch.setattr(prefix_files, "_LOCK_S", 0.1)
    alone = hold(tmp_path / LOCK, alone=True)
    assert alone is not None
    with pytest.raises(UsageError, match="files are being removed"):
        PrefixFiles(tmp_path, KEY, 1 << 20)
    alone.close()
    PrefixFiles(tmp_path, KEY, 1 << 20).close()


def names(n: int) -> list[str]:
    return [f"{i:064x}.state" for i in range(1, n + 1)]


@pytest.mark.parametrize("what", ["pipe", "link", "loop", "folder"])
def test_what_is_no_file_holds_nobody_up(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe would be waited for, a link written through, and a folder would keep all others from being written."""
    folder, mine, path = tmp_path / "cache", tmp_path / "mine.txt", tmp_path / "cache" / ONE
    mine.write_text("mine")
    files = PrefixFiles(folder, KEY, 1 << 20)
    match what:
        case "pipe":
            os.mkfifo(path)
        case "link" | "loop":
            path.symlink_to(mine if what == "link" else path)
        case "folder":
            path.mkdir()
    for _ in range(2):
        files.put(ONE, [np.zeros(3)])
    files.put(OTHER, [np.ones(3)])
    files.close()
    assert mine.read_text() == "mine" and prefix_file.check(folder / OTHER)
    if what == "folder":
        (record,) = caplog.records
        assert record.reason == "foreign_files" and "is a folder" in record.getMessage() and files.missed_s is None
    else:
        assert not caplog.records and not path.is_symlink() and prefix_file.check(path)


def test_two_daemons_of_one_folder_keep_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees what the other has written and used, before it removes anything."""
    monkeypatch.setattr(prefix_files, "_LOOK_S", 0.0)
    monkeypatch.setattr(prefix_files, "_LOOK_SHARE", 0.0)
    one, other = (PrefixFiles(tmp_path, KEY, 20_000) for _ in range(2))
    mine, others = names(40)[:20], names(40)[20:]
    for a, b in zip(mine, others, strict=True):
        one.put(a, [np.zeros(300)])
        one.flush()
        one.touch([mine[0]])
        one.flush()
        other.put(b, [np.zeros(300)])
        other.flush()
    assert sum(path.stat().st_size for path in saved(tmp_path)) <= 20_000
    assert (tmp_path / mine[0]).exists() and (tmp_path / others[-1]).exists()
    one.close()
    other.close()


def test_a_file_that_cannot_be_removed_is_counted_and_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PrefixFiles(tmp_path, KEY, 10_000)
    unlink = Path.unlink
    kept = names(9)[0]

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == kept:
            raise PermissionError("not yours")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    for name in names(9):
        files.put(name, [np.zeros(300)])
        files.flush()
    there = saved(tmp_path)
    assert files.n_bytes == sum(path.stat().st_size for path in there) <= 10_000 and len(there) > 2
    assert (tmp_path / kept).exists() and (tmp_path / names(9)[-1]).exists()
    files.close()


def test_what_a_killed_daemon_left_goes_and_what_is_written_stays(tmp_path: Path) -> None:
    left, held = (tmp_path / f".{ONE}.abcdef{i:02}.tmp" for i in range(2))
    for path in (left, held):
        path.write_bytes(b"part")
    with held.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        for path, age_s in ((left, 30), (held, 300)):
            os.utime(path, (time.time() - age_s,) * 2)
        PrefixFiles(tmp_path, KEY, 1 << 20).close()
        assert left.exists() and held.exists()
        os.utime(left, (time.time() - 90,) * 2)
        PrefixFiles(tmp_path, KEY, 1 << 20).close()
        assert not left.exists() and held.exists()


def test_what_was_used_is_known_after_a_restart(tmp_path: Path) -> None:
    """In the order in which it was used, though nobody waited for that to be written down."""
    first, second, third = names(3)
    files = PrefixFiles(tmp_path, KEY, 20_000)
    for name in (first, second, third):
        files.put(name, [np.zeros(4096, np.uint8)])
        files.flush()
    files.touch([second, third])
    files.touch([first])
    files.touch([names(4)[3]])  # which there is not
    files.close()
    order = sorted(saved(tmp_path), key=lambda path: path.stat().st_mtime_ns)
    assert [path.name for path in order] == [third, second, first]
