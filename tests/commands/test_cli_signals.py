"""Commands that are cut short, by a signal or by a deadline: the status, and nothing left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from engine.formats import profile as profiles
from engine.formats.trace import part_paths
from tests.command_line import (
    LOGS,
    NANO,
    ROOT,
    SAMPLES,
    children,
    environment,
    explained,
    none_left,
    refused,
    spark,
    started,
    until,
)

END_S = 20.0  # a command may take that long to end, on a busy machine too


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sample sessions, their tokens, a profile, and logs that take seconds to read."""
    folder = tmp_path_factory.mktemp("data")
    spark("extract-sessions", "--out-dir", ".", *LOGS, cwd=folder)
    spark("tokenize", NANO, "train.jsonl", "--out", "train.parquet", "--window", "512", cwd=folder)
    spark("calibrate", NANO, "train.parquet", "--out", "nano.csv", "--max-tokens", "3000", cwd=folder)
    logs = folder / "logs" / "projects" / "big"
    logs.mkdir(parents=True)
    text = max((SAMPLES / "claude").rglob("*.jsonl"), key=lambda path: path.stat().st_size).read_text()
    session = re.search(r'"sessionId": ?"([^"]+)"', text)[1]
    for number in range(2000):
        (logs / f"{number:08}.jsonl").write_text(text.replace(session, f"{number:08}"))
    return folder


@dataclass(frozen=True)
class Case:
    """A command; `when`: whether it is in the midst of its work; `left`: what it may leave in its folder."""

    arguments: tuple
    when: Callable[[Path, subprocess.Popen, list[psutil.Process]], object]
    left: frozenset[str] = frozenset()
    daemon: bool = True


def hidden_files(folder: Path) -> list[Path]:
    return list(folder.rglob(".*.tmp"))


def parts(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return len(list(folder.rglob("part-*.parquet")))
    return 0


CASES = {
    "extract-sessions": Case(
        ("extract-sessions", "--out-dir", ".", "--source", "claude", "--claude-dir", "{data}/logs"),
        lambda folder, process, daemons: hidden_files(folder / "out"), daemon=False,
    ),
    "tokenize": Case(
        ("tokenize", NANO, "{data}/train.jsonl", "--out", "t.parquet"),
        lambda folder, process, daemons: hidden_files(folder / "out"), daemon=False,
    ),
    "calibrate": Case(
        ("calibrate", NANO, "{data}/train.parquet", "--out", "p.csv", "--trace", "trace"),
        lambda folder, process, daemons: parts(folder / "out") > 2, frozenset({"p.csv.partial", "trace"}),
    ),
    "calibrate sessions": Case(
        ("calibrate", NANO, "{data}/train.jsonl", "--out", "p.csv"),
        lambda folder, process, daemons: hidden_files(folder / "tmp"), daemon=False,
    ),
    "validate": Case(
        ("validate", NANO, "{data}/train.parquet", "--profile", "{data}/nano.csv"),
        lambda folder, process, daemons: parts(folder / "tmp") > 2,
    ),
    "validate, loading": Case(
        ("validate", NANO, "{data}/train.parquet", "--profile", "{data}/nano.csv"),
        lambda folder, process, daemons: daemons,
    ),
    "serve": Case(
        ("serve", NANO, "--port", "0", "--spark", "--profile", "p.csv"),
        lambda folder, process, daemons: "is served at" in process.stderr.readline(),
    ),
    "demo": Case(
        ("demo", "--out-dir", "demo"),
        lambda folder, process, daemons: daemons,
        frozenset({"demo"}),
    ),
}  # fmt: skip


def cut_short(name: str, data: Path, folder: Path, number: signal.Signals) -> tuple[int, str, list[psutil.Process]]:
    """Run a case until it is in its midst, send the signal as a terminal would; status, stderr and its daemons."""
    case = CASES[name]
    (folder / "out").mkdir()
    (folder / "tmp").mkdir()
    arguments = [str(word).format(data=data) for word in case.arguments]
    with started(*arguments, cwd=folder / "out", tmp=folder / "tmp") as process:
        seen: list[psutil.Process] = []

        def in_the_midst() -> object:
            seen[:] = children(process) or seen
            return case.when(folder, process, seen)

        until(in_the_midst, process)
        seen = children(process) or seen
        assert bool(seen) == case.daemon
        os.killpg(process.pid, number)
        began_s = time.monotonic()
        _, stderr = process.communicate(timeout=60)
        assert time.monotonic() - began_s < END_S
    return process.returncode, stderr, seen


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ctrl_c(data: Path, tmp_path: Path, name: str) -> None:
    status, stderr, daemons = cut_short(name, data, tmp_path, signal.SIGINT)
    assert status == 130 and stderr.splitlines()[-1] == "interrupted" and "Traceback" not in stderr
    assert none_left(daemons)
    assert list((tmp_path / "tmp").iterdir()) == []
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == CASES[name].left and not hidden_files(tmp_path)
    if name == "calibrate":
        assert "p.csv.partial; --resume goes on from there" in stderr
        assert profiles.load(tmp_path / "out" / "p.csv.partial")[0].counts.sum() > 0
        assert len(part_paths(tmp_path / "out" / "trace")) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["extract-sessions", "calibrate", "validate", "serve"])
def test_sigterm(data: Path, tmp_path: Path, name: str) -> None:
    status, stderr, daemons = cut_short(name, data, tmp_path, signal.SIGTERM)
    assert status == (0 if name == "serve" else 143) and "Traceback" not in stderr
    assert none_left(daemons)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert {path.name for path in (tmp_path / "out").iterdir()} == CASES[name].left and not hidden_files(tmp_path)


@pytest.mark.slow
def test_a_server_ends_by_sighup_as_by_sigterm(data: Path, tmp_path: Path) -> None:
    status, stderr, daemons = cut_short("serve", data, tmp_path, signal.SIGHUP)
    assert status == 0 and "Traceback" not in stderr
    assert none_left(daemons)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calibrate", "serve"])
def test_no_daemon_outlives_a_killed_command(data: Path, tmp_path: Path, name: str) -> None:
    status, _, daemons = cut_short(name, data, tmp_path, signal.SIGKILL)
    assert status == -signal.SIGKILL and len(daemons) == 1
    assert none_left(daemons)


@pytest.mark.slow
def test_of_two_calibrations_for_one_profile_the_second_is_refused(data: Path, tmp_path: Path) -> None:
    """They would write one checkpoint, and choose by each other's routing; a killed one keeps nobody away."""
    command = ("calibrate", NANO, data / "train.parquet", "--out", "p.csv")
    partial = tmp_path / "p.csv.partial"
    with started(*command, cwd=tmp_path, tmp=tmp_path) as process:
        until(partial.exists, process)
        for resume in ([], ["--resume"]):
            said = refused(*command, *resume, "--max-tokens", "500", cwd=tmp_path, status=2)
            assert "another calibration makes p.csv" in said and "--resume" not in said
        assert process.poll() is None
        daemons = children(process)
        process.kill()
        process.wait()
        assert none_left(daemons)
    partial.unlink(missing_ok=True)
    spark(*command, "--max-tokens", "3000", cwd=tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("p.csv")} == {"p.csv"}


@pytest.mark.slow
def test_of_two_calibrations_with_one_trace_the_second_is_refused(data: Path, tmp_path: Path) -> None:
    """They would remove each other's parts; a trace begins before anything is counted."""
    command = ("calibrate", NANO, data / "train.parquet", "--trace", "t", "--max-tokens", "3000")
    with started(*command, "--out", "p.csv", cwd=tmp_path, tmp=tmp_path) as process:
        until((tmp_path / "t" / ".calibrate.lock").exists, process)
        said = refused(*command, "--out", "q.csv", cwd=tmp_path, status=2)
        assert "another calibration writes its trace to t" in said
        assert process.wait(150) == 0
    assert "has a trace already" in refused(*command, "--out", "q.csv", cwd=tmp_path, status=2)
    assert all(path.name.startswith("part-0") for path in (tmp_path / "t").iterdir())


@pytest.mark.slow
def test_a_calibration_that_counts_nothing_leaves_no_trace(data: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"session_id": "a", "agent": "claude", "messages": [{"role": "user", "content": "hi"}]})]
    (tmp_path / "s.jsonl").write_text("\n".join(lines) + "\n")
    command = ("calibrate", NANO, "s.jsonl", "--trace", "t", "--out", "p.csv")
    for _ in range(2):
        refused(*command, cwd=tmp_path, status=1)
        assert not (tmp_path / "t").exists()


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_does_not_wait_for_a_long_reply(tmp_path: Path, twice: bool) -> None:
    arguments = ["serve", NANO, "--port", "0"]
    with started(*arguments, cwd=tmp_path, tmp=tmp_path) as process:
        line = next(line for line in process.stderr if "is served at" in line)
        port = int(re.search(r":(\d+)/v1", line)[1])
        # Several at once, and hot, so that some go on for long.
        connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(8)]
        for seed, connection in enumerate(connections):
            body = {"messages": [{"role": "user", "content": "Go on."}], "stream": True, "temperature": 2, "seed": seed}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        connections[0].getresponse().readline()
        daemons = children(process)
        os.killpg(process.pid, signal.SIGINT)
        began_s = time.monotonic()
        if twice:
            time.sleep(0.2)
            os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert time.monotonic() - began_s < END_S
        for connection in connections:
            connection.close()
    assert process.returncode == 130 and "Traceback" not in stderr and stderr.splitlines()[-1] == "interrupted"
    assert none_left(daemons)


@pytest.mark.parametrize("command", ["calibrate", "validate", "serve"])
def test_a_model_that_is_not_ready_in_time(data: Path, tmp_path: Path, command: str) -> None:
    rest = {"calibrate": [data / "train.parquet", "--out", "p.csv"], "serve": ["--port", "0"],
            "validate": [data / "train.parquet", "--profile", data / "nano.csv"]}[command]  # fmt: skip
    done = spark(command, NANO, *rest, "--ready-timeout", "0.001", cwd=tmp_path, status=124)
    explained(done.stderr)
    assert "loading was not done after 0.001 s" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["calibrate", "validate"])
def test_a_request_that_is_not_finished_in_time(data: Path, tmp_path: Path, command: str) -> None:
    rest = {"calibrate": ["--out", "p.csv"], "validate": ["--profile", data / "nano.csv"]}[command]
    done = spark(command, NANO, data / "train.parquet", *rest, "--gen-timeout", "0.001", cwd=tmp_path, status=124)
    explained(done.stderr)
    assert "was not done after 0.001 s" in done.stderr
    assert list(tmp_path.iterdir()) == []


# Interrupts, or asks to be, when a module is first looked for.
WHILE_IMPORTING = """
import os, signal, sys
from spark.__main__ import main
signal.signal(signal.SIGINT, getattr(signal, sys.argv.pop(1)))
class Finder:
    def find_spec(name, path=None, target=None, wanted=sys.argv.pop(1)):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
main()
"""


@pytest.mark.parametrize("module", ["spark.cli", "typer", "rich.console", "spark.commands.ending", "spark.storage"])
def test_ctrl_c_while_the_command_line_is_imported(tmp_path: Path, module: str) -> None:
    for handler, status, said in (("default_int_handler", 130, "interrupted\n"), ("SIG_IGN", 0, "")):
        command = [sys.executable, "-c", WHILE_IMPORTING, handler, module, "--version"]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (status, said) and bool(done.stdout) == (status == 0)


def test_the_command_takes_ctrl_c_before_it_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"spark": "spark.__main__:main"}
    quick = "import sys; from spark.__main__ import main; sys.exit(bool({'typer', 'spark.cli'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", quick], env=environment(), timeout=60, check=True)
    with pytest.raises(subprocess.CalledProcessError, match="status 2"):
        subprocess.run([sys.executable, "-m", "spark"], env=environment(), timeout=60, check=True, capture_output=True)
