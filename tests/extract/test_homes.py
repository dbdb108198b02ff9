"""The logs of many users: read apart, dealt by whole root, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.ground.errors import FileFormatError, SparkError, UsageError
from spark.extract import ExtractOptions, extract, groups_of, homes
from spark.extract.homes import mark_of
from spark.extract.intake import Intake
from spark.speech.sessions import read_sessions, root_of, split_rank
from tests.command_line import SAMPLES, children, none_left, refused, spark, started, until
from tests.object_store import object_store

BUCKET = "team"


def nothing(*_: object) -> None:
    """A progress that nobody looks at."""


def home(at: Path, family: str = "both") -> Path:
    """A user's home folder with the sample logs."""
    if family in ("claude", "both"):
        shutil.copytree(SAMPLES / "claude", at / ".claude")
    if family in ("codex", "both"):
        shutil.copytree(SAMPLES / "codex", at / ".codex")
    return at


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three users, two of whom have the same logs, and somebody without any."""
    folder = tmp_path_factory.mktemp("homes")
    home(folder / "ann")
    home(folder / "bob")
    home(folder / "eve", "codex")
    (folder / "guest" / ".claude").mkdir(parents=True)
    return folder


def sessions(folder: Path) -> dict[str, Any]:
    found = {}
    for side in ("train", "test"):
        for session in read_sessions(folder / f"{side}.jsonl"):
            assert session.session_id not in found
            found[session.session_id] = side, session
    return found


def test_each_users_sessions_are_those_of_a_run_for_that_user(three: Path, tmp_path: Path) -> None:
    report = extract(ExtractOptions(tmp_path / "all", homes=(f"{three}/*",), test_frac=0.3), nothing)
    found = sessions(tmp_path / "all")
    for name, source in (("ann", "both"), ("bob", "both"), ("eve", "codex")):
        dirs = {"claude_dir": three / name / ".claude", "codex_dir": three / name / ".codex"}
        if source == "codex":
            del dirs["claude_dir"]
        extract(ExtractOptions(tmp_path / name, source, **dirs, test_frac=0.3), nothing)
        mark = mark_of(str(three / name))
        alone = {key: session for key, (_, session) in sessions(tmp_path / name).items()}
        mine = {key.removeprefix(f"{mark}:"): s for key, (_, s) in found.items() if key.startswith(mark)}
        assert mine.keys() == alone.keys()
        assert all(mine[key].messages == alone[key].messages for key in alone)
    assert len({key.partition(":")[0] for key in found}) == 3 and not any("ann" in key for key in found)
    sides: dict[str, set[str]] = {}
    for key, (side, _) in found.items():
        sides.setdefault(root_of(key), set()).add(side)
        assert side == ("test" if split_rank(root_of(key)) < 0.3 else "train")
    assert all(len(side) == 1 for side in sides.values())
    assert sum(report.sessions.values()) == len(found)
    assert not [path for path in (tmp_path / "all").iterdir() if path.name.startswith(".")]


def test_a_home_under_two_names_is_read_once(three: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(three / "ann")
    named = (str(tmp_path / "link"), str(three / "ann"), f"{three}/../{three.name}/ann")
    report = extract(ExtractOptions(tmp_path / "all", homes=named, test_frac=0.3), nothing)
    once = extract(ExtractOptions(tmp_path / "one", homes=(str(three / "ann"),), test_frac=0.3), nothing)
    assert report == once and sessions(tmp_path / "all").keys() == sessions(tmp_path / "one").keys()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["{three}/ann", "{three}/*"])
def test_the_number_of_processes_changes_nothing(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Of one home several read some roots each; of three with two copies of the same logs perhaps as well."""
    reports, parts = [], []
    for n_cores in (1, 5):
        monkeypatch.setattr(homes, "_cores", lambda n_cores=n_cores: n_cores)
        given = ExtractOptions(tmp_path / str(n_cores), homes=(where.format(three=three),), test_frac=0.3)
        reports.append(extract(given, nothing).to_json())
        dealt = homes._dealt(
            [str(three / "ann")], [str(three / "ann")], n_cores, tmp_path, tmp_path, given
        )
        parts.append(len(dealt[0]))
    assert parts == [1, 5] and reports[0] == reports[1] and reports[0]["dropped_content"]
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "5" / name).read_bytes()


def test_logs_that_grow_meanwhile_are_each_read_once(three: Path, tmp_path: Path) -> None:
    """Several processes divide one home: by what each finds itself they would divide it differently."""
    logs = home(tmp_path / "home", "claude") / ".claude" / "projects" / "-home-dev-cpython"
    options, out = ExtractOptions(tmp_path), tmp_path / "out"
    out.mkdir()
    (work,) = homes._dealt([str(logs.parents[2])], [str(logs.parents[2])], 3, out, out, options)
    assert len(work) == 3
    expected = [session_id for _, session_id in homes._read(replace(work[0], part=0, parts=1)).sessions]
    found = []
    for n, part in enumerate(work):
        found += homes._read(part).sessions
        smallest = min(logs.glob("*-*-*.jsonl"), key=lambda path: path.stat().st_size)
        with smallest.open("ab") as file:  # it becomes the largest, and is of one root with all others
            file.write(b"".join(path.read_bytes() for path in sorted(logs.glob("*.jsonl"))))
        shutil.copy(smallest, logs / f"{n}0000000-0000-0000-0000-000000000000.jsonl")
    assert [session_id for _, session_id in sorted(found)] == expected


def test_parts_are_of_a_size_and_have_all_roots(three: Path) -> None:
    logs = homes._logs(three / "ann", ExtractOptions(three))
    groups = groups_of(logs, Intake(True, nothing, three))
    sizes = {group.root_id: sum(log.size for log in group.files) for group in groups}
    parts = [homes._part(groups, i, 3) for i in range(3)]
    assert set.union(*parts) == sizes.keys() and sum(map(len, parts)) == len(sizes)
    loads = [sum(sizes[root] for root in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes.values())


@pytest.mark.slow
def test_counts_are_sums_and_the_order_of_homes_changes_no_session(three: Path, tmp_path: Path) -> None:
    homes = [str(three / name) for name in ("ann", "bob", "eve")]
    one = [extract(ExtractOptions(tmp_path / str(i), homes=(each,)), nothing) for i, each in enumerate(homes)]
    both = extract(ExtractOptions(tmp_path / "a", homes=tuple(homes)), nothing)
    again = extract(ExtractOptions(tmp_path / "b", homes=(*homes[::-1], homes[0] + "/")), nothing)
    for key in ("messages", "files"):
        assert getattr(both, key) == sum(getattr(each, key) for each in one)
    for key in ("tokens", "skipped_lines", "dropped_blocks", "redacted"):
        names = {name for each in one for name in getattr(each, key)}
        assert getattr(both, key) == {n: sum(getattr(each, key).get(n, 0) for each in one) for n in sorted(names)}
    assert sessions(tmp_path / "a") == sessions(tmp_path / "b") and both.to_json() == again.to_json()
    assert both.redacted, "the samples have secrets"


def test_files_are_private(three: Path, tmp_path: Path) -> None:
    extract(ExtractOptions(tmp_path, homes=(str(three / "eve"),)), nothing)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "train.jsonl": 0o600, "test.jsonl": 0o600,
    }  # fmt: skip


def test_what_cannot_be_is_explained(three: Path, tmp_path: Path) -> None:
    for given, error, words in (
        ({"homes": (f"{three}/nobody",)}, FileFormatError, "nobody is no folder"),
        ({"homes": (f"{three}/x*",)}, FileFormatError, "no such folders"),
        ({"homes": (f"{three}/guest",)}, FileFormatError, "no session logs in any of 1 homes"),
        ({"homes": (f"{three}/ann",), "claude_dir": three}, UsageError, "--claude-dir"),
        ({"homes": ("nowhere://team/x",)}, UsageError, "Protocol not known"),
    ):
        with pytest.raises(error, match=words):
            extract(ExtractOptions(tmp_path / "out", **given), nothing)
    assert not list(tmp_path.rglob("*.jsonl")) and not list(tmp_path.rglob(".*"))


def test_the_command_reads_homes(three: Path, tmp_path: Path) -> None:
    done = spark(
        "extract-sessions", "--home", f"{three}/[ab]*", "--home", three / "eve", "--out-dir", "out", "--json", "j",
        cwd=tmp_path,
    )  # fmt: skip
    found = json.loads((tmp_path / "j").read_text())
    assert sum(found["sessions"].values()) == len(sessions(tmp_path / "out")) and "sessions written to" in done.stderr
    refused("extract-sessions", "--home", three / "ann", "--codex-dir", three, "--out-dir", "o", cwd=tmp_path, status=2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_ended(three: Path, tmp_path: Path, number: int) -> None:
    homes = [word for i in range(12) for word in ("--home", home(tmp_path / f"u{i}"))]
    (tmp_path / "tmp").mkdir()
    with started("extract-sessions", *homes, "--out-dir", "out", cwd=tmp_path, tmp=tmp_path / "tmp") as process:
        until(lambda: list((tmp_path / "out").glob(".homes-*/.*.tmp")), process)
        processes = psutil.Process(process.pid).children(recursive=True)
        assert processes
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    assert "Traceback" not in stderr and none_left(processes)
    assert not list((tmp_path / "out").glob("*.jsonl"))
    if number == signal.SIGKILL:  # the next run removes what it left, files of more than a minute ago
        for left in (tmp_path / "out").glob(".*.tmp"):
            os.utime(left, (1, 1))
        extract(ExtractOptions(tmp_path / "out", homes=(str(three / "eve"),)), nothing)
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"train.jsonl", "test.jsonl"}
    else:
        assert not list((tmp_path / "out").glob(".homes-*"))


@pytest.mark.slow
def test_ctrl_c_as_the_processes_begin_is_not_theirs(tmp_path: Path) -> None:
    """Of a terminal's group, they see it too, as they load their modules."""
    homes = [word for i in range(12) for word in ("--home", home(tmp_path / f"u{i}"))]
    with started("extract-sessions", *homes, "--out-dir", "out", cwd=tmp_path, tmp=tmp_path) as process:
        until(lambda: any(_loads_numpy(child) for child in children(process)), process)
        for child in children(process):
            child.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert "Traceback" not in stderr and process.returncode == 0


def _loads_numpy(process: psutil.Process) -> bool:
    try:
        return any("numpy" in mapped.path for mapped in process.memory_maps())
    except psutil.Error:
        return False


# --- an object store ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with object_store(BUCKET) as store:
        yield store


@pytest.mark.slow
def test_homes_and_outputs_in_an_object_store(s3: Any, three: Path, tmp_path: Path) -> None:
    for name in ("ann", "eve"):
        s3.put(str(three / name), f"{BUCKET}/homes/{name}", recursive=True)
    options = ExtractOptions(f"s3://{BUCKET}/out", homes=(f"s3://{BUCKET}/homes/*",), test_frac=0.3)
    report = extract(options, nothing)
    assert sorted(s3.find(f"{BUCKET}/out")) == [f"{BUCKET}/out/{side}.jsonl" for side in ("test", "train")]
    s3.get(f"{BUCKET}/out/", f"{tmp_path}/got/", recursive=True)
    found = sessions(tmp_path / "got")
    here = extract(ExtractOptions(tmp_path / "here", homes=(str(three / "ann"), str(three / "eve"))), nothing)
    assert report.messages == here.messages and report.redacted == here.redacted
    plain = {key.partition(":")[2]: session.messages for key, (_, session) in found.items()}
    assert plain == {key.partition(":")[2]: s.messages for key, (_, s) in sessions(tmp_path / "here").items()}


def test_a_broken_upload_leaves_nothing(s3: Any, three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    whole = s3.put_file

    def fail(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError("the connection was lost")
        whole(source, target)

    monkeypatch.setattr(s3, "put_file", fail)
    with pytest.raises(SparkError, match="cannot write s3://team/broken: OSError: the connection was lost"):
        extract(ExtractOptions(f"s3://{BUCKET}/broken", homes=(str(three / "eve"),)), nothing)
    monkeypatch.undo()
    assert len(calls) == 2 and s3.find(f"{BUCKET}/broken") == []
