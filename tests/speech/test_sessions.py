"""Session files: what is written is read back, and what is no session is refused by line and field."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ground.errors import FileFormatError, SparkError
from spark.speech.sessions import (
    ROLES,
    Message,
    Session,
    SessionWriter,
    ToolCall,
    publish,
    read_sessions,
    root_of,
    split_rank,
    write_sessions,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts, values, max_size=3)
calls = st.builds(ToolCall, texts, texts, objects)
messages = st.builds(Message, st.sampled_from(ROLES), texts, texts, st.lists(calls, max_size=2).map(tuple), texts)
sessions = st.builds(
    Session,
    texts,
    st.sampled_from(["claude", "codex"]),
    texts,
    st.lists(objects, max_size=2).map(tuple),
    st.lists(messages, max_size=4).map(tuple),
)


@given(st.lists(sessions, max_size=3))
@settings(deadline=None)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, written: list[Session]) -> None:
    path = tmp_path_factory.mktemp("s") / "sessions.jsonl"
    write_sessions(path, written)
    assert list(read_sessions(path)) == written
    assert path.read_bytes().count(b"\n") == len(written)  # a session a line, whatever is in its strings
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["sessions.jsonl"]


GOOD: dict[str, Any] = {
    "session_id": "a",
    "source": "codex",
    "started_at": "2026-01-01T00:00:00Z",
    "tools": [],
    "messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "name": "f", "arguments": {}}]}],
}


def test_optional_fields_may_be_missing_or_null(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    record = {"session_id": "a", "tools": None, "messages": [{"role": "tool", "reasoning": None}]}
    path.write_text("\n" + json.dumps(record) + "\n\n")
    assert list(read_sessions(path)) == [Session("a", "", "", (), (Message("tool"),))]


def test_a_file_of_the_first_version_is_read(tmp_path: Path) -> None:
    """A line as spark extract-sessions 0.1 wrote it, byte for byte: nothing that was written becomes unreadable."""
    line = (
        '{"session_id": "r/agent-a#2~1", "source": "claude", "started_at": "2026-01-01T00:00:00Z", "tools": [{"type": '
        '"function", "function": {"name": "Bash", "parameters": {"type": "object", "properties": {}}}}], "messages": '
        '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "list"}, {"role": "assistant", '
        '"content": "\\n\\n", "reasoning": "use ls", "tool_calls": [{"id": "t1", "name": "Bash", "arguments": {"cmd": '
        '"ls"}}]}, {"role": "tool", "content": "a.py", "tool_call_id": "t0"}]}\n'
    )
    (tmp_path / "old.jsonl").write_text(line)
    (session,) = read_sessions(tmp_path / "old.jsonl")
    call = ToolCall("t1", "Bash", {"cmd": "ls"})
    assert session.messages == (
        Message("system", "Be brief."),
        Message("user", "list"),
        Message("assistant", "\n\n", "use ls", (call,)),
        Message("tool", "a.py", tool_call_id="t0"),
    )
    assert session.root_id == "r"
    write_sessions(tmp_path / "again.jsonl", [session])
    assert (tmp_path / "again.jsonl").read_text() == line


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda r: r.pop("session_id"), "no 'session_id', expected a string"),
        (lambda r: r.update(session_id=7), "session_id is a number, expected a string"),
        (lambda r: r.update(messages={}), "messages is an object, expected an array"),
        (lambda r: r.update(tools=["x"]), "an item of tools is a string, expected an object"),
        (lambda r: r["messages"].append("hi"), "message 2: the message is a string, expected an object"),
        (lambda r: r["messages"][0].pop("role"), "message 1: no 'role'"),
        (lambda r: r["messages"][0].update(role="bot"), "role is 'bot', expected one of system, user, assistant, tool"),
        (lambda r: r["messages"][0].update(content=[]), "content is an array, expected a string"),
        (lambda r: r["messages"][0]["tool_calls"][0].pop("name"), "message 1, tool call 1: no 'name'"),
        (lambda r: r["messages"][0]["tool_calls"][0].update(arguments="{}"), "arguments is a string, expected an obj"),
        (lambda r: r["messages"][0].update(reasoning=True), "reasoning is true, expected a string"),
    ],
)
def test_what_is_no_session_is_refused_by_line_and_field(tmp_path: Path, change: Any, complaint: str) -> None:
    record = json.loads(json.dumps(GOOD))
    change(record)
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(FileFormatError) as caught:
        list(read_sessions(path))
    assert complaint in caught.value.message
    assert f"{path}, line 2" in caught.value.message
    assert "extract-sessions" in caught.value.hint


@pytest.mark.parametrize("line", [b"{", b"\xff\xfe{}", b"[]", b'"x"', b"[" * 100_000])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(FileFormatError, match="line 1"):
        list(read_sessions(path))


def test_a_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot be read: No such file"):
        list(read_sessions(tmp_path / "none.jsonl"))


@given(st.text("ab/#~", max_size=8), st.text("cd", min_size=1))
@settings(deadline=None)
def test_the_root_is_what_precedes_the_first_mark(rest: str, root: str) -> None:
    rest = rest and "/" + rest
    assert root_of(root + rest) == root
    assert root_of(f"{root}#2~1{rest}") == root


def test_ranks_spread_roots_evenly_and_stay_the_same() -> None:
    ranks = [split_rank(f"session {i}") for i in range(2000)]
    assert all(0 <= rank < 1 for rank in ranks)
    for tenth in range(10):
        assert 150 < sum(tenth <= rank * 10 < tenth + 1 for rank in ranks) < 250
    # What sha256sum gives for "session 0": the split must not change from one version to the next.
    assert ranks[0] == pytest.approx(0x6A979D3A / 2**32, abs=1e-9)


def test_a_writer_that_is_left_early_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text("before\n")

    def forever() -> Any:
        yield Message("user", "one")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), SessionWriter(path) as writer:
        writer.write(Session("a", "codex", "", (), ()), forever())
    assert path.read_text() == "before\n"
    assert [p.name for p in tmp_path.iterdir()] == ["s.jsonl"]


def test_what_a_killed_writer_left_goes_and_what_one_writes_stays(tmp_path: Path) -> None:
    path, old = tmp_path / "s.jsonl", time.time() - 3600
    left = tmp_path / ".s.jsonl.abcdefgh.tmp"
    left.write_text("half")
    os.utime(left, (old, old))
    with SessionWriter(path) as slow:
        assert not left.exists()
        slow.seal()  # and then takes its time until it is published
        (ours,) = tmp_path.iterdir()
        os.utime(ours, (old, old))
        write_sessions(path, [])
        assert ours.exists()
        publish([slow])
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_explained_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SparkError, match="cannot be written: No space left on device"):
        write_sessions(tmp_path / "s.jsonl", [Session("a", "codex", "", (), ())])
    assert list(tmp_path.iterdir()) == []


def two(folder: Path, text: str) -> list[SessionWriter]:
    """Sealed files of one session each."""
    writers = [SessionWriter(folder / name) for name in ("train.jsonl", "test.jsonl")]
    for writer in writers:
        writer.write(Session(text, "codex", "", (), ()), [])
        writer.seal()
    return writers


def texts_of(folder: Path) -> dict[str, str]:
    found = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    return {name: text.split('"')[3] for name, text in found.items()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_both_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    publish(two(tmp_path, "old"))
    replace = Path.replace

    def interrupted(path: Path, target: Path) -> Path:
        signal.raise_signal(number)
        return replace(path, target)

    def ends(number: int, frame: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(Path, "replace", interrupted)
    before = signal.signal(number, ends)
    try:
        with pytest.raises(InterruptedError):
            publish(two(tmp_path, "new"))
    finally:
        signal.signal(number, before)
    assert texts_of(tmp_path) == {"train.jsonl": "new", "test.jsonl": "new"}


@pytest.mark.parametrize("which", ["train.jsonl", "test.jsonl"])
@pytest.mark.parametrize("there", [False, True])
def test_where_one_file_cannot_be_the_other_is_as_it_was(tmp_path: Path, which: str, there: bool) -> None:
    (tmp_path / which).mkdir()
    other = tmp_path / ({"train.jsonl", "test.jsonl"} - {which}).pop()
    if there:
        other.write_text('{"session_id": "old"}')
    writers = two(tmp_path, "new")
    with pytest.raises(SparkError, match="cannot be written"):
        publish(writers)
    for writer in writers:
        writer.__exit__()
    assert texts_of(tmp_path) == ({other.name: "old"} if there else {})


@pytest.mark.parametrize("fails", [False, True])
def test_where_there_are_no_links_files_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    publish(two(tmp_path, "old"))

    def none(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    writers = two(tmp_path, "new")
    if fails:
        writers[1]._temporary.unlink()
        with pytest.raises(SparkError, match="cannot be written"):
            publish(writers)
        writers[0].__exit__()
    else:
        publish(writers)
    text = "old" if fails else "new"
    assert texts_of(tmp_path) == {"train.jsonl": text, "test.jsonl": text}


def test_one_that_is_killed_leaves_no_files_of_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(two(tmp_path, "old"))
    seen, replace = list[dict[str, str]](), Path.replace

    def looked(path: Path, target: Path) -> Path:
        seen.append(texts_of(tmp_path))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", looked)
    publish(two(tmp_path, "new"))
    seen.append(texts_of(tmp_path))
    named = [{name: text for name, text in found.items() if not name.startswith(".")} for found in seen]
    assert named == [{"train.jsonl": "old"}, {"train.jsonl": "new"}, {"train.jsonl": "new", "test.jsonl": "new"}]


def test_a_folder_that_is_missing_is_explained(tmp_path: Path) -> None:
    with pytest.raises(SparkError, match="cannot be written: No such file"):
        write_sessions(tmp_path / "none" / "s.jsonl", [])
