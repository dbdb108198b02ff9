"""A whole extraction: the samples, the split, files that appear whole or not at all, memory."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ground.errors import FileFormatError, SparkError, UsageError
from spark.extract import ExtractOptions, Report, alone_in, extract, homes, roots
from spark.extract import report as report_module
from spark.extract.intake import Intake, read_lines
from spark.extract.messages import ToolTable
from spark.extract.report import estimate_tokens
from spark.speech.sessions import Session, read_sessions, split_rank

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "data" / "sessions"
OTHER = ROOT / "data" / "sessions_other"


def samples(out: Path, **options: Any) -> tuple[dict[str, list[Session]], Report]:
    homes = {"claude_dir": SAMPLES / "claude", "codex_dir": SAMPLES / "codex"}
    report = extract(ExtractOptions(out, **{**homes, **options}), lambda done, total: None)
    return {side: list(read_sessions(out / f"{side}.jsonl")) for side in ("train", "test")}, report


def codex_tree(home: Path, threads: list[str], turns: int = 1) -> Path:
    """One short thread a name."""
    (home / "sessions").mkdir(parents=True)
    for thread in threads:
        lines = [{"type": "session_meta", "payload": {"id": thread}}]
        for role in ("user", "assistant") * turns:
            content = [{"type": "input_text", "text": f"{role} of {thread}"}]
            lines.append({"type": "response_item", "payload": {"type": "message", "role": role, "content": content}})
        text = "".join(json.dumps({"timestamp": "", **line}) + "\n" for line in lines)
        (home / "sessions" / f"rollout-{thread}.jsonl").write_text(text)
    return home


# --- The samples ---


def test_the_samples_give_what_they_were_made_to_show(tmp_path: Path) -> None:
    sides, report = samples(tmp_path)
    sessions = sides["train"] + sides["test"]
    roots = {source: {s.root_id for s in sessions if s.source == source} for source in ("claude", "codex")}
    assert {source: len(ids) for source, ids in roots.items()} == {"claude": 16, "codex": 16}
    assert len(sessions) == len({s.session_id for s in sessions}) == 46
    marks = [s.session_id.removeprefix(s.root_id) for s in sessions]
    assert sum("/agent-" in mark for mark in marks) == 4
    assert sum("/side-" in mark for mark in marks) == 1
    assert sum(mark.startswith("/") for mark in marks) == 9  # with a fork and Codex's children
    assert marks.count("#2") == 3
    assert marks.count("~1") == 2
    assert report.to_json() | {"tokens": {}, "prompt_tokens": {}, "context_tokens": {}, "dropped_content": {}} == {
        "files": 41,
        "sessions": {"train": len(sides["train"]), "test": len(sides["test"])},
        "messages": sum(len(s.messages) for s in sessions),
        "tokens": {},
        "prompt_tokens": {},
        "context_tokens": {},
        "token_counter": "estimate: UTF-8 bytes / 4",
        "skipped_lines": {
            "bookkeeping": 227,
            "invalid_json": 4,
            "malformed": 1,
            "mirror": 339,
            "no_text": 2,
            "not_an_object": 1,
            "null_message": 1,
            "replay": 101,
            "unknown_type": 3,
        },
        "dropped_blocks": {"encrypted": 2},
        "dropped_content": {},
        "redacted": {"url-password": 1},
    }
    text = [row["characters"] for row in report.dropped_content.values()]
    assert text == sorted(text, reverse=True)
    assert {"turn_context", "constellation"} < set(report.dropped_content)  # known, and made up


def test_the_samples_are_conversations(tmp_path: Path) -> None:
    sides, _ = samples(tmp_path)
    for session in sides["train"] + sides["test"]:
        asked = {call.id for m in session.messages for call in m.tool_calls}
        answered = [m.tool_call_id for m in session.messages if m.role == "tool"]
        assert len(answered) == len(set(answered))
        if "~" not in session.session_id:
            assert set(answered) <= asked
        assert {call.name for m in session.messages for call in m.tool_calls} <= {
            tool["function"]["name"] for tool in session.tools
        }
        assert session.messages[-1].role == "assistant"
        for message in session.messages:
            assert message.content or message.tool_calls
    size = sum(path.stat().st_size for path in SAMPLES.rglob("*") if path.is_file())
    assert size < 2_000_000


def test_no_text_of_a_test_session_is_in_a_train_session(tmp_path: Path) -> None:
    sides, _ = samples(tmp_path)
    train = {m.content for s in sides["train"] for m in s.messages if m.role == "tool" and len(m.content) > 400}
    test = {m.content for s in sides["test"] for m in s.messages if m.role == "tool" and len(m.content) > 400}
    assert train and test and not train & test


def test_the_same_logs_give_the_same_bytes(tmp_path: Path) -> None:
    digests = []
    for out in (tmp_path / "one", tmp_path / "two"):
        samples(out)
        digests.append([hashlib.sha256((out / f"{side}.jsonl").read_bytes()).digest() for side in ("train", "test")])
    assert digests[0] == digests[1]


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the samples quote another version's library")
@pytest.mark.parametrize(("name", "home"), [("main", SAMPLES), ("other", OTHER)])
def test_the_samples_are_what_their_script_makes(tmp_path: Path, name: str, home: Path) -> None:
    command = [sys.executable, str(SAMPLES / "make_samples.py"), "--set", name, "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    kept = [*(home / "claude").rglob("*"), *(home / "codex").rglob("*")]
    assert made == {path.relative_to(home) for path in kept if path.is_file()}
    for path in made:
        assert (tmp_path / path).read_bytes() == (home / path).read_bytes()


def test_the_other_set_shares_no_text_with_the_samples(tmp_path: Path) -> None:
    extract(ExtractOptions(tmp_path, "both", OTHER / "claude", OTHER / "codex", 1), lambda done, total: None)
    others = list(read_sessions(tmp_path / "test.jsonl"))
    assert len({s.root_id for s in others}) >= 30
    assert {s.source for s in others} == {"claude", "codex"}
    own = paragraphs(session for side in samples(tmp_path / "main")[0].values() for session in side)
    assert own and not own & paragraphs(others)


def paragraphs(sessions: Iterable[Session]) -> set[str]:
    """What the assistants said, in pieces long enough to be recognized."""
    said = "\n\n".join(m.content for session in sessions for m in session.messages if m.role == "assistant")
    return {piece for piece in said.split("\n\n") if len(piece) > 80}


def test_no_part_of_a_play_or_a_file_is_in_two_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SAMPLES))
    casts = importlib.import_module("casts").CASTS
    owners: dict[str, set[str]] = {}
    for seed, cast in casts.items():
        for part in cast.split():
            if not part.startswith("py"):
                owners.setdefault(part.split("*")[0], set()).add(seed)
    assert all(len(seeds) == 1 for seeds in owners.values())
    parts = set(owners)
    assert not {part for part in parts if "." in part and not part.startswith("@") and part.split(".")[0] in parts}


# --- The split ---


@pytest.mark.parametrize("source", ["claude", "codex"])
def test_one_family_alone(tmp_path: Path, source: str) -> None:
    sides, _ = samples(tmp_path, source=source)
    assert {s.source for side in sides.values() for s in side} == {source}


@pytest.mark.parametrize("fraction", [0, 0.2, 0.5, 1])
def test_a_root_goes_to_one_side_with_all_that_grew_from_it(tmp_path: Path, fraction: float) -> None:
    sides, report = samples(tmp_path, test_frac=fraction)
    roots = {side: {s.root_id for s in sessions} for side, sessions in sides.items()}
    assert not roots["train"] & roots["test"]
    assert all(split_rank(root) < fraction for root in roots["test"])
    assert all(split_rank(root) >= fraction for root in roots["train"])
    assert report.sessions == {side: len(sessions) for side, sessions in sides.items()}
    assert (report.sessions["test"] == 0) == (fraction == 0)
    assert (report.sessions["train"] == 0) == (fraction == 1)


@pytest.mark.slow
@given(names=st.sets(st.text("abcdef", min_size=1, max_size=6), min_size=1, max_size=4), percent=st.integers(1, 99))
@settings(deadline=None)
def test_few_sessions_leave_one_on_each_side(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], percent: int
) -> None:
    home = codex_tree(tmp_path_factory.mktemp("few"), sorted(names))
    fraction = percent / 100
    report = extract(ExtractOptions(home, "codex", codex_dir=home, test_frac=fraction), lambda done, total: None)
    sides = {side: [s.session_id for s in read_sessions(home / f"{side}.jsonl")] for side in ("train", "test")}
    assert sorted(sides["train"] + sides["test"]) == sorted(names)
    assert report.sessions == {side: len(ids) for side, ids in sides.items()}
    assert sorted(p.name for p in home.iterdir()) == ["sessions", "test.jsonl", "train.jsonl"]
    by_hash = {name for name in names if split_rank(name) < fraction}
    if len(names) > 1:
        assert sides["train"] and sides["test"]
        assert len(by_hash ^ set(sides["test"])) <= 1  # at most one root was moved
        assert max(map(split_rank, sides["test"])) < min(map(split_rank, sides["train"]))  # that nearest to the limit
    else:
        assert set(sides["test"]) == by_hash


def test_two_logs_of_one_thread_with_different_ends_keep_both(tmp_path: Path) -> None:
    home = codex_tree(tmp_path, ["aa"])
    lines = (home / "sessions" / "rollout-aa.jsonl").read_text()
    (home / "archived_sessions").mkdir()
    (home / "archived_sessions" / "rollout-aa.jsonl").write_text(lines.replace("assistant of", "other answer of"))
    extract(ExtractOptions(home, "codex", codex_dir=home, test_frac=0), lambda done, total: None)
    assert [s.session_id for s in read_sessions(home / "train.jsonl")] == ["aa", "aa/2"]


# --- Files ---


def test_files_are_private_and_alone(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    samples(out)
    assert sorted(p.name for p in out.iterdir()) == ["test.jsonl", "train.jsonl"]
    assert {stat.S_IMODE(p.stat().st_mode) for p in out.iterdir()} == {0o600}


def test_an_interrupted_run_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("before\n")

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    options = ExtractOptions(tmp_path, claude_dir=SAMPLES / "claude", codex_dir=SAMPLES / "codex")
    with pytest.raises(KeyboardInterrupt):
        extract(options, interrupt)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"train.jsonl": "before\n"}


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from engine.ground.errors import SparkError
from spark.extract import ExtractOptions, extract
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
home = Path(sys.argv[1])
try:
    extract(ExtractOptions(Path(sys.argv[2]), claude_dir=home / "claude", codex_dir=home / "codex"), lambda a, b: None)
except SparkError as error:
    print(error.message)
"""


def test_two_runs_into_one_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with alone_in(out), pytest.raises(UsageError, match="another extraction writes to"):
        samples(out)
    assert list(out.iterdir()) == []
    samples(out)
    assert sorted(path.name for path in out.iterdir()) == ["test.jsonl", "train.jsonl"]


def test_a_disk_that_takes_no_more_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("before\n")
    command = [sys.executable, "-c", FULL_DISK, str(SAMPLES), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{tmp_path}/train.jsonl cannot be written: File too large\n"
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"test.jsonl": "before\n"}


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SparkError, match=r"cannot be written: (Not a directory|File exists)"):
        samples(tmp_path / "file" / "out")


def test_progress_reaches_the_total_and_never_falls(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    options = ExtractOptions(tmp_path, claude_dir=SAMPLES / "claude", codex_dir=SAMPLES / "codex")
    extract(options, lambda done, total: seen.append((done, total)))
    size = sum(path.stat().st_size for path in SAMPLES.rglob("*.jsonl"))
    assert {total for _, total in seen} == {size}
    assert seen[0][0] == 0 and seen[-1][0] == size
    assert all(a[0] <= b[0] for a, b in pairwise(seen))


@pytest.mark.slow
def test_a_long_log_does_not_stay_in_memory(tmp_path: Path) -> None:
    """60 MB in one session, with characters of which Python takes four bytes each for the whole string."""
    path = tmp_path / "sessions" / "rollout-aa.jsonl"
    path.parent.mkdir()
    words = "for line in text.splitlines(): print(line)  # \N{PARTY POPPER}\n" * 150
    with path.open("w") as file:
        file.write('{"type":"session_meta","payload":{"id":"aa"}}\n')
        for i in range(7_500):
            role = ("user", "assistant")[i % 2]
            content = [{"type": "input_text", "text": f"{i} {words}"}]
            payload = {"type": "message", "role": role, "content": content}
            file.write(json.dumps({"type": "response_item", "payload": payload}, ensure_ascii=False) + "\n")
    assert path.stat().st_size > 55_000_000
    program = (
        "import resource, sys; from pathlib import Path; from spark.extract import *; home = Path(sys.argv[1]); "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "extract(ExtractOptions(home, 'codex', codex_dir=home, redact=False), lambda a, b: None); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100)
    assert int(done.stdout) < 60_000  # KiB: less than the log, which would take 230,000 as one Python string


def test_a_line_without_end_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark.extract.intake.MAX_LINE_BYTES", 2000)
    home = codex_tree(tmp_path, ["aa"])
    path = home / "sessions" / "rollout-aa.jsonl"
    path.write_text(path.read_text() + '{"x": "' + "y" * 7000 + '"}\n' + path.read_text().splitlines()[-1])
    report = extract(ExtractOptions(home, "codex", codex_dir=home, test_frac=0), lambda done, total: None)
    assert report.skipped_lines == {"oversized": 1}
    assert len(next(read_sessions(home / "train.jsonl")).messages) == 2
    assert report.messages == 2


# --- Where the logs are ---


def test_the_programs_own_folders_are_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CODEX_HOME", raising=False)
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    with pytest.raises(
        FileFormatError, match=r"no session logs: looked for .*/\.claude, .*/\.config/claude, .*/\.codex"
    ):
        extract(ExtractOptions(tmp_path / "out"), lambda done, total: None)
    codex_tree(tmp_path / ".codex", ["home"])
    codex_tree(tmp_path / "elsewhere", ["named"])
    codex_tree(tmp_path / "given", ["given"])
    for folder, name in ((".claude", "one"), (".config/claude", "two")):
        project = tmp_path / folder / "projects" / "p"
        project.mkdir(parents=True)
        answer = {"role": "assistant", "content": "x"}
        (project / f"{name}.jsonl").write_text(json.dumps({"type": "assistant", "message": answer}) + "\n")
        (tmp_path / folder / "history.jsonl").write_text("{}\n")  # no session

    def ids(**options: Any) -> list[str]:
        extract(ExtractOptions(tmp_path / "out", test_frac=0, **options), lambda done, total: None)
        return [s.session_id for s in read_sessions(tmp_path / "out" / "train.jsonl")]

    assert ids() == ["one", "two", "home"]
    monkeypatch.setenv("CODEX_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "none"))
    assert ids() == ["two", "named"]
    assert ids(codex_dir=tmp_path / "given", source="codex") == ["given"]  # an option wins over the environment
    assert ids(codex_dir=tmp_path / "given" / "sessions", source="codex") == ["given"]


def test_options_that_cannot_be_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the test fraction is 1\.5, expected 0 to 1"):
        samples(tmp_path, test_frac=1.5)
    with pytest.raises(UsageError, match="nan"):
        samples(tmp_path, test_frac=float("nan"))
    with pytest.raises(FileFormatError, match="none is no folder") as caught:
        samples(tmp_path, codex_dir=tmp_path / "none")
    assert "--codex-dir" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_logs_in_other_forms_are_counted(tmp_path: Path) -> None:
    home = codex_tree(tmp_path, ["aa"])
    for name in ("rollout-bb.jsonl.gz", "rollout-2025-05-01-cc.json", "notes.txt"):
        (home / "sessions" / name).write_text("{}")
    report = extract(ExtractOptions(home, "codex", codex_dir=home), lambda done, total: None)
    assert report.skipped_lines == {"unsupported_file": 2}
    assert report.files == 1


# --- Compressed logs ---


def compressed(data: bytes, *cuts: int) -> bytes:
    """In a frame for each piece."""
    pieces = [data[a:b] for a, b in pairwise((0, *cuts, len(data)))]
    return b"".join(bytes(pa.compress(piece, "zstd", asbytes=True)) for piece in pieces)


def compress(path: Path, *cuts: int) -> Path:
    made = path.with_name(path.name + ".zst")
    made.write_bytes(compressed(path.read_bytes(), *cuts))
    path.unlink()
    return made


def test_compressed_logs_give_the_same_bytes(tmp_path: Path) -> None:
    """Also where some are in several frames, and where several processes read them."""
    home = tmp_path / "home"
    shutil.copytree(SAMPLES / "codex", home / ".codex")
    plain = {"source": "codex", "codex_dir": home / ".codex"}
    _, expected = samples(tmp_path / "plain", **plain)
    for i, path in enumerate(sorted(home.rglob("*.jsonl"))):
        compress(path, *((7, path.stat().st_size // 2) if i % 3 == 0 else ()))
    seen: list[tuple[int, int]] = []
    extract(ExtractOptions(tmp_path / "out", **plain), lambda done, total: seen.append((done, total)))
    _, report = samples(tmp_path / "again", **plain)
    assert report == expected and report.files > 16 and not list(home.rglob("*.jsonl"))
    for side in ("train", "test"):
        lines = (tmp_path / "plain" / f"{side}.jsonl").read_bytes()
        assert (tmp_path / "out" / f"{side}.jsonl").read_bytes() == lines
    size = sum(path.stat().st_size for path in home.rglob("*.zst"))
    assert {total for _, total in seen} == {size} and seen[-1][0] == size
    assert all(a[0] <= b[0] for a, b in pairwise(seen))


def test_of_a_log_in_both_forms_the_plain_one_is_read(tmp_path: Path) -> None:
    home = codex_tree(tmp_path / "home", ["aa"], turns=2)
    path = home / "sessions" / "rollout-aa.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    compress(path)
    path.write_bytes(whole)
    sides, report = samples(tmp_path / "out", source="codex", codex_dir=home, test_frac=0)
    assert report.files == 1 and not report.skipped_lines
    assert [len(session.messages) for session in sides["train"]] == [4]


@pytest.mark.parametrize("packs", [True, False])
def test_a_log_that_changes_its_form_meanwhile_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packs: bool
) -> None:
    home = codex_tree(tmp_path / "home", ["aa"])
    path = home / "sessions" / "rollout-aa.jsonl"
    before, after = path.read_bytes(), compressed(path.read_bytes())
    packed = path.with_name(path.name + ".zst")
    if not packs:
        path = compress(path)

    def listed(*arguments: Any) -> Any:
        found = roots.list_logs(*arguments)
        path.unlink(missing_ok=True)
        (packed if packs else packed.with_suffix("")).write_bytes(after if packs else before)
        return found

    monkeypatch.setattr("spark.extract.list_logs", listed)
    sides, report = samples(tmp_path / "out", source="codex", codex_dir=home, test_frac=0)
    assert not report.skipped_lines and [len(session.messages) for session in sides["train"]] == [2]


def lines_of(content: bytes) -> tuple[list[bytes], dict[str, int]]:
    """The lines of a compressed log, and what was counted."""
    intake = Intake(False, lambda _: None, Path())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rollout-a.jsonl.zst")
        path.write_bytes(content)
        return list(read_lines(path, intake)), dict(intake.skipped)


@given(st.integers(1, 20_000), st.floats(0, 1), st.integers(0, 7))
@settings(max_examples=60)
def test_a_damaged_compressed_log_is_counted(n: int, at: float, bit: int) -> None:
    lines = [f'{{"n":{i},"text":"{"word " * (i % 7)}{i * i}"}}\n'.encode() for i in range(n)]
    whole = compressed(b"".join(lines), len(lines[0]) * n // 2)
    assert lines_of(whole) == (lines, {})
    cut = min(len(whole) - 1, 4 + int(at * (len(whole) - 4)))
    found, skipped = lines_of(whole[:cut])
    said = b"".join(found)  # to the end of a frame, which may be within a line
    assert b"".join(lines).startswith(said) and (skipped == {"unreadable_file": 1} or len(said) < len(b"".join(lines)))
    flipped = bytearray(whole)
    flipped[cut] ^= 1 << bit  # without a checksum it may say something else
    _, skipped = lines_of(bytes(flipped))
    assert skipped in ({}, {"unreadable_file": 1})


def test_a_log_that_cannot_be_read_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = codex_tree(tmp_path, ["aa", "bb"])
    opened = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "rollout-bb.jsonl":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    report = extract(ExtractOptions(home, "codex", codex_dir=home, test_frac=0), lambda done, total: None)
    assert report.skipped_lines == {"unreadable_file": 1}
    assert report.sessions == {"train": 1, "test": 0}


def test_links_are_followed_and_each_folder_is_read_once(tmp_path: Path) -> None:
    """A project's folder may lie on another disk; a link may also lead up, to itself, or nowhere."""
    home = codex_tree(tmp_path / "home", ["aa", "bb", "cc"])
    other = tmp_path / "other" / "deeper"
    other.mkdir(parents=True)
    (home / "sessions" / "rollout-bb.jsonl").rename(other / "rollout-bb.jsonl")
    (home / "sessions" / "rollout-cc.jsonl").rename(tmp_path / "other" / "rollout-cc.jsonl")
    for name, target in (("2026", other.parent), ("again", other), ("up", home), ("self.jsonl", "self.jsonl")):
        (home / "sessions" / name).symlink_to(target)
    (home / "sessions" / "gone.jsonl").symlink_to(tmp_path / "unmounted" / "x.jsonl")
    (home / "archived_sessions").symlink_to(home / "sessions")
    report = extract(ExtractOptions(tmp_path / "out", "codex", codex_dir=home), lambda done, total: None)
    assert report.files == 3 and sum(report.sessions.values()) == 3
    assert report.skipped_lines == {"unreadable_file": 2}


def test_what_cannot_be_looked_at_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = codex_tree(tmp_path / "home", ["aa", "bb", "cc"])
    (home / "sessions" / "2026").mkdir()
    scan, is_file = os.scandir, Path.is_file

    def scandir(path: Any) -> Any:
        if Path(path).name == "2026":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    def stat_of(path: Path) -> bool:
        if path.name.startswith("rollout-"):
            found = {"bb": PermissionError(13, "Permission denied"), "cc": FileNotFoundError(2, "No such file")}
            if path.stem[-2:] in found:
                raise found[path.stem[-2:]]
        return is_file(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(Path, "is_file", stat_of)
    options = ExtractOptions(tmp_path / "out", "codex", codex_dir=home)
    report = extract(options, lambda done, total: None)
    assert report.files == 1 and report.skipped_lines == {"unreadable_file": 1, "unreadable_folder": 1}
    (home / "sessions" / "rollout-aa.jsonl").unlink()
    with pytest.raises(FileFormatError, match=r"no session logs .* \(skipped: unreadable_file 1, unreadable_folder 1"):
        extract(options, lambda done, total: None)


@pytest.mark.parametrize("of_homes", [False, True])
def test_a_program_s_folder_that_cannot_be_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_homes: bool
) -> None:
    codex_tree(tmp_path / "home" / ".codex", ["aa"])
    is_dir = Path.is_dir

    def refuse(path: Path) -> bool:
        if path.parent.name == ".codex":
            raise PermissionError(13, "Permission denied")
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refuse)
    monkeypatch.setattr(os, "walk", lambda top, onerror: onerror(PermissionError(13, "Permission denied")) or [])
    named: Any = {"homes": (str(tmp_path / "home"),)} if of_homes else {"codex_dir": tmp_path / "home" / ".codex"}
    monkeypatch.setattr(homes, "_all", lambda work, n_cores: (homes._read(one) for one in work))
    with pytest.raises(FileFormatError, match=r"no session logs .*\(skipped: unreadable_folder 1\)"):
        extract(ExtractOptions(tmp_path / "out", "codex", **named), lambda done, total: None)


# --- Counting ---


def test_what_the_report_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With words in place of the estimate, which can be counted by hand."""
    monkeypatch.setattr(report_module, "estimate_tokens", lambda text: len(text.split()))
    home = codex_tree(tmp_path, ["aa"], turns=3)
    options = ExtractOptions(home, "codex", codex_dir=home)
    report = extract(options, lambda done, total: None)
    assert report.tokens == {"assistant": 9, "reasoning": 0, "tool_call": 0, "user": 9}
    assert report.prompt_tokens == {"p50": 3, "p90": 3, "p99": 3}
    assert report.context_tokens == {"p50": 9, "p90": 15, "p99": 15}  # before the three answers: 3, 9, 15


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_the_estimate_is_a_quarter_of_the_bytes(text: str) -> None:
    assert 4 * estimate_tokens(text) - len(text.encode()) in (0, 1, 2, 3)


def test_definitions_are_made_from_the_calls() -> None:
    table = ToolTable()
    table.observe("Read", {"path": "x", "limit": 5, "deep": {"a": 1}})
    table.observe("Read", {"path": "y", "limit": 2.5, "all": True})
    table.define({"type": "function", "function": {"name": "Run", "parameters": {"type": "object"}}})
    table.define({"name": "Read", "inputSchema": 5})
    table.define({"type": "function"})
    table.observe("Run", {"x": [1]})
    table.observe("Go", {"x": [1], "n": None})
    assert table.definitions() == (
        {"type": "function", "function": {"name": "Run", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "Read", "parameters": {"type": "object", "properties": {}}}},
        {
            "type": "function",
            "function": {
                "name": "Go",
                "parameters": {
                    "type": "object",
                    "properties": {"x": {"type": "array"}, "n": {}},
                    "required": ["x", "n"],
                },
            },
        },
    )


def test_what_is_beyond_the_spools_memory_comes_back_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples(tmp_path / "memory")
    monkeypatch.setattr("spark.extract.intake.SPOOL_MEMORY_BYTES", 1000)
    samples(tmp_path / "disk")
    for side in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / "disk" / side).read_bytes() == (tmp_path / "memory" / side).read_bytes()
