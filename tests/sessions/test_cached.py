"""`spark sessions list`, `show` and `drop`: what they say of a folder, and that they take nothing else from it."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats import prefix_file
from engine.formats.gguf import open_model
from engine.formats.prefix_file import LOCK, Place
from engine.ground.digest import code_digest
from engine.ground.errors import SparkError, UsageError
from engine.memory import prefix_files
from engine.memory.prefix_files import PrefixFiles
from engine.text.tokenizer import load
from spark.commands.session_tables import show_cached, show_leaf
from spark.sessions import cached
from tests.cached_prompts import saved
from tests.command_line import NANO, refused, spark

CHUNK = 5
MODEL = {"path": str(NANO), "architecture": "qwen3moe", "needs_state": False}


@cache
def file_id() -> str:
    with open_model(NANO) as file:
        return file.file_id


def opened(folder: Path, model: dict[str, str | bool] | None = None, **more: str) -> PrefixFiles:
    key = {"file_id": file_id(), "kv_types": ["f16", "q8_0"], "code": code_digest()} | more
    return PrefixFiles(folder, key, 1 << 30, MODEL if model is None else model)


def write(files: PrefixFiles, tokens: list[int], states: tuple[int, ...] = ()) -> str:
    """Save a conversation of whole chunks, and the states after some; the id of its leaf."""
    name = files.root
    for i in range(0, len(tokens), CHUNK):
        place = Place(name, np.array(tokens[i : i + CHUNK], np.int32).tobytes())
        name = prefix_file.following(name, place.ids)
        files.put(f"{name}.blocks", [np.full(90 + i, i, np.uint8), np.zeros((2, 3), np.uint8)], place)
        if i // CHUNK in states:
            files.put(f"{name}.state", [np.full(40, i, np.float32)])
    files.flush()
    return name


def use(folder: Path, chunks: Iterable[cached.Chunk], days: float) -> None:
    """As if a server had used chunks last so many days ago."""
    for chunk in chunks:
        os.utime(folder / f"{chunk.id}.blocks", (then := time.time() - 86400 * days, then))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One conversation that is alone, used last, and two that share a chunk, used 3 and 6 days ago."""
    with open_model(NANO) as file:
        tokenizer = load(file)
    words = tokenizer.encode("The quick brown fox jumps over the lazy dog and runs far away from here.")
    files = opened(tmp_path / "D")
    for tokens in (words[:10], words[:5] + words[10:15], words[5:10]):
        write(files, tokens)
    files.close()
    leaves = cached.read(tmp_path / "D").leaves
    assert [(leaf.n_tokens, leaf.whole) for leaf in leaves] == [(5, True), (10, True), (10, True)]
    for i, leaf in reversed(list(enumerate(leaves))):
        use(tmp_path / "D", leaf.chunks, 3 * i)
    return tmp_path


def test_list_and_show(folder: Path) -> None:
    done = spark("sessions", "list", "D", "--text", "--json", "l.json", cwd=folder)
    report = json.loads((folder / "l.json").read_text())
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["D:", "3", "sessions,"] and len(lines) == 8
    for session, line in zip(report["sessions"], lines[4:7], strict=True):
        assert line.split()[:3] == [session["id"][:12], str(session["tokens"]), str(session["tokens"])]
        assert "nano.gguf" in line and "f16, q8_0" in line and session["key"]["kv_types"] == ["f16", "q8_0"]
        assert session["text"] and session["text"] in line
    sizes = {path.name: path.stat().st_size for path in saved(folder / "D")}
    assert report["bytes"] == sum(sizes.values()) and not report["other_files"]
    shared = [session for session in report["sessions"] if session["tokens"] == 10]
    assert len(shared) == 2 and all(0 < s["own_bytes"] < s["bytes"] for s in shared)
    assert all(" ... " in s["text"] and s["text"].startswith("The quick") for s in shared)
    one = shared[0]["id"]
    done = spark("sessions", "show", "D", one[:6], "--json", "s.json", cwd=folder)
    assert done.stdout.count(" good") == 2 and f"{one}.blocks" in done.stdout and "5 to 10" in done.stdout
    path = folder / "D" / f"{one}.blocks"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    done = spark("sessions", "show", "D", one[:6], "--json", "-", cwd=folder)
    files = json.loads(done.stdout)["files"]
    assert files[f"{one}.blocks"] == "its checksum is wrong" and sorted(files.values())[0] == "" and len(files) == 2
    assert "damaged" not in spark("sessions", "list", "D", cwd=folder).stdout  # which does not read that far
    assert "its checksum is wrong" in spark("sessions", "list", "D", "--check", cwd=folder).stdout


def test_text_needs_the_model(folder: Path) -> None:
    files = opened(folder / "E", MODEL | {"path": str(folder / "moved.gguf")})
    write(files, [7, 8, 9, 10, 11])
    files.close()
    done = spark("sessions", "list", "E", "--text", cwd=folder)
    assert "no text of sessions of moved.gguf" in done.stderr and len(done.stdout.splitlines()) == 6
    done = spark("sessions", "list", "E", "--text", "--model", NANO, "--json", "-", cwd=folder)
    assert json.loads(done.stdout)["sessions"][0]["text"] and "no text" not in done.stderr


def test_drop(folder: Path) -> None:
    first, second, third = cached.read(folder / "D").leaves
    before = {path.name for path in saved(folder / "D")}
    done = spark("sessions", "drop", "D", second.id[:8], "--json", "-", cwd=folder)
    gone = json.loads(done.stdout)
    assert gone["sessions"] == [second.id] and "1 session dropped" in done.stderr
    assert before - {path.name for path in saved(folder / "D")} == set(gone["files"])
    assert gone["bytes"] == second.own_bytes
    done = spark("sessions", "drop", "D", "--older-than", "4d", cwd=folder)
    assert "1 session dropped: 1 file" in done.stderr
    assert [x.id for x in cached.read(folder / "D").leaves] == [first.id, third.chunks[0].id]  # which was used since
    assert "0 sessions dropped" in spark("sessions", "drop", "D", "--older-than", "4d", cwd=folder).stderr


def test_a_beginning_that_was_used_since_stays(tmp_path: Path) -> None:
    files = opened(tmp_path)
    long, branch = (write(files, [*range(10), *range(tail, tail + 15)]) for tail in (40, 60))
    files.close()
    of = {leaf.id: leaf for leaf in cached.read(tmp_path).leaves}
    for leaf in of.values():
        use(tmp_path, leaf.chunks, 9)
    use(tmp_path, of[long].chunks[1:3], 0.2)  # whose first chunk is needed, however old it is
    dropped = cached.drop(tmp_path, older_s=86400.0)
    assert set(dropped.ids) == {long, branch}
    assert dropped.files.keys() == {f"{c.id}.blocks" for c in (*of[long].chunks[3:], *of[branch].chunks[2:])}
    assert dropped.to_json()["bytes"] == sum(dropped.files.values()) > 0
    (left,) = cached.read(tmp_path).leaves
    assert [c.id for c in left.chunks] == [c.id for c in of[long].chunks[:3]]
    assert left.whole and left.own_bytes == left.all_bytes


def test_what_other_code_made_is_of_no_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = opened(folder / "D", code="0123456789abcdef")
    old = write(files, list(range(15)))
    files.close()
    done = spark("sessions", "list", "D", "--json", "-", cwd=folder)
    by = {session["id"]: session for session in json.loads(done.stdout)["sessions"]}
    assert by[old]["code"] == "01234567" and (by[old]["current"], by[old]["resumes_tokens"]) == (False, 0)
    mine = [session for session in by.values() if session["id"] != old]
    assert {(s["code"], s["current"]) for s in mine} == {(code_digest()[:8], True)}
    assert all(s["resumes_tokens"] == s["tokens"] for s in mine)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith(old[:12])]
    assert "other version" in line and " 01234567 " in line and done.stderr.count("other version") == 1
    with monkeypatch.context() as patched:
        patched.setattr(cached, "_own_code", lambda: None)  # a tree that is not built: it cannot be told
        assert {(leaf.current, leaf.resumes_tokens) for leaf in cached.read(folder / "D").leaves} == {
            (None, 5), (None, 10), (None, 15),
        }  # fmt: skip
        assert cached.drop(folder / "D", useless=True) == cached.Dropped((), {})
        show_cached(cached.read(folder / "D"), None)
        assert "made them cannot be told of 4 sessions" in capsys.readouterr().err
    dropped = cached.drop(folder / "D", useless=True)
    assert dropped.ids == (old,) and len(dropped.files) == 3
    assert {leaf.id for leaf in cached.read(folder / "D").leaves} == {session["id"] for session in mine}


def test_what_is_read_for_a_drop_holds_no_server_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = folder / "D"
    first, second, third = cached.read(there).leaves
    for path in (there / f"{first.id}.blocks", there / f"{second.id}.blocks"):
        path.write_bytes(path.read_bytes()[:-32] + bytes(32))
    read = cached.read

    def served(folder: Path, checksums: bool = False, *more: Any, **named: Any) -> cached.Cached:
        """A server came and went while checksums were read: it wrote one file again, and went on after a leaf."""
        found = read(folder, checksums, *more, **named)
        if checksums:
            files = opened(folder)
            files.doubt([f"{first.id}.blocks"])
            write(files, first.chunks[0].head.tokens.tolist())
            write(files, [*(token for chunk in third.chunks for token in chunk.head.tokens.tolist()), 1, 2, 3])
            files.close()
        return found

    monkeypatch.setattr(prefix_files, "_LOCK_S", 0.1)
    monkeypatch.setattr(cached, "read", served)
    dropped = cached.drop(there, older_s=4 * 86400.0, useless=True)
    assert dropped == cached.Dropped((), {f"{second.id}.blocks": second.chunks[-1].n_bytes})
    left = read(there, checksums=True)
    assert sorted(leaf.n_tokens for leaf in left.leaves) == [5, 13] and not left.strays


def test_a_folder_that_is_clean_already_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "D").mkdir()
    assert "0 sessions dropped: 0 files" in spark("sessions", "drop", "D", "--damaged", cwd=tmp_path).stderr
    assert not list((tmp_path / "D").iterdir())
    opened(tmp_path / "D").close()
    (tmp_path / "D" / "letter.txt").write_text("mine")
    for _ in range(2):
        assert cached.drop(tmp_path / "D", older_s=60.0) == cached.Dropped((), {})
    with pytest.raises(SparkError, match="holds no sessions"):
        cached.drop(tmp_path / "D", ["ab"])
    (tmp_path / "D" / LOCK).unlink()
    with pytest.raises(SparkError, match="holds no sessions"):  # another folder than was meant
        cached.drop(tmp_path / "D", useless=True)


def test_a_folder_in_use_is_left_as_it_is(folder: Path) -> None:
    before = sorted(path.name for path in saved(folder / "D"))
    files = opened(folder / "D")
    said = refused("sessions", "drop", "D", "--older-than", "1m", cwd=folder)
    assert said.startswith("error: D is in use by a server, so nothing was removed\nhint: stop the server")
    assert "3 sessions" in spark("sessions", "list", "D", cwd=folder).stdout
    assert sorted(path.name for path in saved(folder / "D")) == before
    files.close()
    assert "2 sessions dropped" in spark("sessions", "drop", "D", "--older-than", "1h", cwd=folder).stderr


def test_what_is_damaged_or_foreign_is_named_and_left(folder: Path) -> None:
    there = folder / "D"
    first = cached.read(there).leaves[-1]
    (there / "letter.txt").write_text("mine")
    (there / f"{'1' * 64}.blocks").write_bytes(b"half a file")
    (there / f"{'2' * 64}.blocks").write_bytes(b'{"spark": "prefix", "key": {"format": 1}}\n' + bytes(99))
    (there / f".{'3' * 64}.state.abcdefgh.tmp").write_bytes(b"x")
    (there / f"{'4' * 64}.state").symlink_to(folder / "nowhere")
    (there / f"{first.id}.blocks").write_bytes((there / f"{first.id}.blocks").read_bytes()[:-1])
    done = spark("sessions", "list", "D", "--json", "-", cwd=folder)
    report = json.loads(done.stdout)
    assert len(report["sessions"]) == 2
    assert sorted(stray["reason"] for stray in report["other_files"]) == [
        "damaged", "damaged", "foreign", "foreign", "unfinished", "version",
    ]  # fmt: skip
    assert "its length is wrong" in done.stderr and "it is of format 1" in done.stderr
    kept = spark("sessions", "drop", "D", "--older-than", "100w", cwd=folder)
    assert "0 sessions dropped: 0 files" in kept.stderr
    assert "0 sessions dropped: 4 files" in spark("sessions", "drop", "D", "--damaged", cwd=folder).stderr
    left = {path.name for path in there.iterdir()}
    assert left >= {"letter.txt", f"{'4' * 64}.state", LOCK} and len(left) == 3 + 3


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        ("list none", "none cannot be read: No such file", 1),
        ("show D zz", "D has no session whose id begins with 'zz'", 2),
        ("drop D", "nothing says what to drop", 2),
        ("drop D aa --older-than 1d", "both say what to drop", 2),
        ("drop D --older-than 1y", "--older-than is '1y': expected a number and m, h, d or w", 2),
        ("drop . --damaged", ". holds no sessions", 1),
        ("list D --json D/{file}", "would overwrite the folder you gave", 2),
    ],
)
def test_what_is_refused(folder: Path, arguments: str, words: str, status: int) -> None:
    arguments = arguments.format(file=saved(folder / "D")[0].name)
    before = {path.name: path.read_bytes() for path in saved(folder / "D")}
    assert words in refused("sessions", *arguments.split(), cwd=folder, status=status)
    assert {path.name: path.read_bytes() for path in saved(folder / "D")} == before
    assert not (folder / LOCK).exists()  # nothing is left in a folder that is none of a server's


@pytest.mark.parametrize("used_s", [1e18, 1e20, -1e20])
def test_a_time_that_no_calendar_has_is_a_question_mark(
    folder: Path, capsys: pytest.CaptureFixture[str], used_s: float
) -> None:
    found = cached.read(folder / "D")
    first = found.leaves[0].chunks[0]
    odd = cached.Leaf((replace(first, used_s=used_s),), 1, True)
    show_cached(replace(found, leaves=(odd, *found.leaves[1:])), None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split()[-1] == "?" and lines[5].split()[-1].count(":") == 1
    show_leaf(odd, dict.fromkeys(first.files, ""), "")
    assert ["last", "used", "?"] in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("1.5h", 5400), ("7d", 604_800), ("2w", 1_209_600), ("-1d", None), ("7", None), ("", None)],
)
def test_ages(text: str, seconds: float | None) -> None:
    if seconds is not None:
        assert cached.age(text) == seconds
        return
    with pytest.raises(UsageError, match="expected a number and m, h, d or w"):
        cached.age(text)


def test_an_id_must_be_of_one(folder: Path) -> None:
    found = cached.read(folder / "D")
    for none in (".", "", "g" * 12, found.leaves[0].id + "0"):
        with pytest.raises(UsageError, match="no session whose id"):
            found.find(none)
    with pytest.raises(SparkError, match="holds no sessions"):
        cached.drop(folder / "none", useless=True)
    for leaf in found.leaves:
        assert found.find(leaf.id[:10]) is leaf
    files = opened(folder / "many")
    for i in range(17):
        write(files, [i, i + 1, i + 2, i + 3, 4])
    files.close()
    many = cached.read(folder / "many")
    (twice, *_) = [a for a in "0123456789abcdef" if sum(leaf.id[0] == a for leaf in many.leaves) > 1]
    with pytest.raises(UsageError, match="begins the ids of"):
        many.find(twice)


def test_states_say_where_a_prompt_goes_on(tmp_path: Path) -> None:
    files = opened(tmp_path, MODEL | {"needs_state": True})
    name = write(files, list(range(20)), states=(0, 2))
    (leaf,) = cached.read(tmp_path).leaves
    assert leaf.id == name and leaf.n_tokens == 20 and leaf.resumes_tokens == 15
    (tmp_path / f"{leaf.chunks[1].id}.blocks").unlink()  # behind what is gone nothing is of use
    files.close()
    (leaf, end), strays = (
        sorted(cached.read(tmp_path).leaves, key=lambda leaf: -leaf.whole),
        cached.read(tmp_path).strays,
    )
    assert (leaf.whole, leaf.resumes_tokens, end.whole, end.resumes_tokens) == (True, 5, False, 0) and not strays
    assert len(cached.drop(tmp_path, useless=True).files) == 3
    (tmp_path / f"{leaf.id}.blocks").unlink()
    assert [stray.reason for stray in cached.read(tmp_path).strays] == ["alone"]
    assert list(cached.drop(tmp_path, useless=True).files) == [f"{leaf.id}.state"] and not saved(tmp_path)


def test_branches_of_a_long_prefix_take_the_memory_of_one(tmp_path: Path) -> None:
    files, ids = opened(tmp_path), np.arange(150_000, dtype=np.int32) % 300
    shared = Place(files.root, ids.tobytes())
    before = prefix_file.following(files.root, shared.ids)
    files.put(f"{before}.blocks", [np.zeros(9, np.uint8)], shared)
    for i in range(60):
        place = Place(before, np.array([i, 3, 5], np.int32).tobytes())
        files.put(f"{prefix_file.following(before, place.ids)}.blocks", [np.zeros(7, np.uint8)], place)
    files.close()
    texts = cached.Texts()
    texts.of(cached.read(tmp_path).leaves[0])  # the tokenizer is loaded
    tracemalloc.start()
    try:
        found = cached.read(tmp_path)
        made = [leaf.to_json() | {"text": texts.of(leaf)} for leaf in found.leaves]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [each["tokens"] for each in made] == [150_003] * 60 and all(" ... " in each["text"] for each in made)
    assert ids.nbytes <= peak < 8 * ids.nbytes


CONVERSATIONS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=7)


@settings(max_examples=25)
@given(CONVERSATIONS, st.data())
def test_a_drop_takes_what_nobody_else_needs(
    tmp_path_factory: pytest.TempPathFactory, conversations: list[list[int]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("D")
    files = opened(folder)
    made = {
        write(files, [t for letter in chunks for t in range(letter, letter + CHUNK)]): chunks
        for chunks in conversations
    }
    files.close()
    ends = {name: c for name, c in made.items() if not any(o != c and o[: len(c)] == c for o in conversations)}
    found = cached.read(folder)
    assert {leaf.id: leaf.n_tokens for leaf in found.leaves} == {n: len(c) * CHUNK for n, c in ends.items()}
    assert found.n_bytes == sum(path.stat().st_size for path in saved(folder))
    chosen = data.draw(st.sets(st.sampled_from(sorted(ends)), min_size=1))
    dropped = cached.drop(folder, [name[:40] for name in chosen])
    left = cached.read(folder)
    assert set(dropped.ids) == chosen and {leaf.id for leaf in left.leaves} == ends.keys() - chosen
    assert all(leaf.whole for leaf in left.leaves) and not left.strays
    assert left.n_bytes == found.n_bytes - sum(dropped.files.values())
    assert len(saved(folder)) == len(
        {tuple(ends[n][: i + 1]) for n in ends.keys() - chosen for i in range(len(ends[n]))}
    )


def test_a_folder_that_takes_no_lock_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "hold", lambda *_, **__: None)
    with pytest.raises(SparkError, match="without locks"):
        cached.drop(folder / "D", older_s=0.0)
    assert len(cached.read(folder / "D").leaves) == 3
