"""`spark launch` with clients that are small scripts: what they are told, how they end, that nothing outlives them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine.ground.errors import SparkError
from spark.commands.launch import Served, claude, codex
from tests.command_line import NANO, ROOT, children, environment, none_left, refused, started, until

# Says what it sees in a file, asks for a reply, and ends as it is told to.
CLIENT = f"""#!{sys.executable}
import json, os, signal, sys, time, urllib.request
told = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid(), "tty": os.isatty(0)}}
end = sys.argv[-1]
url = os.environ.get("ANTHROPIC_BASE_URL")
if url:
    body = {{"model": "x", "max_tokens": 3, "messages": [{{"role": "user", "content": "Go on."}}]}}
    request = urllib.request.Request(url + "/v1/messages", json.dumps(body).encode(), {{"x-api-key": "spark"}})
    told["reply"] = json.load(urllib.request.urlopen(request, timeout=30))
if end == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if end == "interrupted":
    signal.signal(signal.SIGINT, lambda number, frame: sys.exit(42))
with open("told.partial", "w") as file:
    json.dump(told, file)
os.rename("told.partial", "told.json")
if end in ("wait", "stubborn", "interrupted"):
    time.sleep(60)
if end == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(end))
"""
SERVED = Served("http://127.0.0.1:1234", 'na"no \u00e9\U0001f600', 4096, 60.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, with both clients on PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "tmp").mkdir()
    for name in ("claude", "codex"):
        path = tmp_path / "bin" / name
        path.write_text(CLIENT)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "a key for elsewhere")
    return tmp_path


@contextlib.contextmanager
def launched(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process], dict]]:
    """A running client: the command, all its processes, what the client saw."""
    with started("launch", "claude", NANO, "--device", "cpu", "--", *arguments, cwd=folder, tmp=folder / "tmp") as made:
        until((folder / "told.json").exists, made)
        processes = children(made)
        assert len(processes) == 3  # the server, its daemon, the client
        yield made, processes, json.loads((folder / "told.json").read_text())


def finished(folder: Path, *arguments: str | Path) -> tuple[subprocess.CompletedProcess[str], dict]:
    command = [sys.executable, "-m", "spark.cli", "launch", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert "Traceback" not in done.stderr, done.stderr
    told = folder / "told.json"
    return done, json.loads(told.read_text()) if told.exists() else {}


def test_claude_is_told_where_the_model_is(folder: Path) -> None:
    done, told = finished(folder, "claude", NANO, "--device", "cpu", "--residency", "60", "--", "-p", "--model", "7")
    assert done.returncode == 7 and told["arguments"][2:] == ["-p", "--model", "7"]
    seen = told["environment"]
    assert seen["ANTHROPIC_BASE_URL"].startswith("http://127.0.0.1:") and seen["ANTHROPIC_AUTH_TOKEN"]
    for kind in ("OPUS", "SONNET", "HAIKU"):
        assert seen[f"ANTHROPIC_DEFAULT_{kind}_MODEL"] == "nano"
    assert seen["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0" and "ANTHROPIC_API_KEY" not in seen
    assert told["reply"]["type"] == "message" and told["reply"]["usage"]["output_tokens"] == 3
    assert seen["ANTHROPIC_BASE_URL"] in done.stderr and done.stdout == ""
    assert not (folder / "nano.gguf.spark.csv").exists()


@pytest.mark.slow
def test_codex_is_told_where_the_model_is(folder: Path) -> None:
    done, told = finished(folder, "codex", NANO, "--device", "cpu", "--spark", "--profile", "p.csv", "--", "exec", "0")
    assert done.returncode == 0 and told["arguments"][-2:] == ["exec", "0"]
    settings = tomllib.loads("\n".join(told["arguments"][1:-2:2]))
    assert settings["model"] == "nano" and settings["model_provider"] == "spark_launch"
    assert not Path(settings["model_catalog_json"]).exists()  # any more
    provider = settings["model_providers"]["spark_launch"]
    assert provider["wire_api"] == "responses" and provider["base_url"].endswith("/v1")


def test_settings_of_any_name_are_toml(tmp_path: Path) -> None:
    arguments, _ = codex(SERVED, {}, tmp_path, [])
    assert arguments[::2] == ["-c"] * (len(arguments) // 2)
    settings = tomllib.loads("\n".join(arguments[1::2]))
    assert settings["model"] == SERVED.name
    (model,) = json.loads(Path(settings["model_catalog_json"]).read_text())["models"]
    assert model["slug"] == SERVED.name and model["context_window"] == 4096


def test_what_leads_elsewhere_is_left_out(tmp_path: Path) -> None:
    before = {"CLAUDE_CODE_USE_VERTEX": "1", "HTTPS_PROXY": "http://proxy", "NO_PROXY": "a", "API_TIMEOUT_MS": "5"}
    _, made = claude(SERVED, before, tmp_path, [])
    assert "CLAUDE_CODE_USE_VERTEX" not in made and made["API_TIMEOUT_MS"] == "5"
    assert made["NO_PROXY"] == "a,127.0.0.1" and made["no_proxy"] == "127.0.0.1"
    _, made = claude(SERVED, {}, tmp_path, [])
    assert "NO_PROXY" not in made and made["API_TIMEOUT_MS"] == "60000"


def test_settings_count_more_than_those_of_the_user(tmp_path: Path) -> None:
    """Claude Code takes what settings have as `env` over its environment, so what leads elsewhere is unset there."""
    (own := tmp_path / "own settings.json").write_text(
        '{"env": {"ANTHROPIC_BASE_URL": "http://x", "A": "b"}, "model": "m"}'
    )
    for words in ([], ["--settings", str(own)], [f"--settings={own.read_text()}"]):
        arguments, made = claude(SERVED, {}, tmp_path, ["-p", *words, "hi", "--", "--settings"])
        assert arguments[0] == "--settings" and arguments[2:] == ["-p", "hi", "--", "--settings"]
        settings = json.loads(Path(arguments[1]).read_text())
        told = settings.pop("env")
        assert told.pop("A", None) == ("b" if words else None) and settings == ({"model": "m"} if words else {})
        assert told["ANTHROPIC_BASE_URL"] == SERVED.url and told["CLAUDE_CODE_USE_MANTLE"] == ""
        assert {key: value for key, value in told.items() if value}.items() <= made.items()
    for wrong in ("none.json", "{", "[]"):
        with pytest.raises(SparkError, match="--settings"):
            claude(SERVED, {}, tmp_path, ["--settings", wrong if wrong != "[]" else str(_written(tmp_path, wrong))])


def _written(folder: Path, text: str) -> Path:
    (path := folder / "wrong.json").write_text(text)
    return path


@pytest.mark.parametrize(("ctx_tokens", "told"), [(4096, None), (40_000, "40000")])
def test_claude_is_told_how_long_the_context_is(tmp_path: Path, ctx_tokens: int, told: str | None) -> None:
    _, made = claude(replace(SERVED, ctx_tokens=ctx_tokens), {}, tmp_path, [])
    assert made.get("CLAUDE_CODE_MAX_CONTEXT_TOKENS") == told
    assert ("CLAUDE_CODE_DISABLE_1M_CONTEXT" in made) == (told is not None)


def test_a_client_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name, package in (("claude", "@anthropic-ai/claude-code"), ("codex", "@openai/codex")):
        said = refused("launch", name, NANO, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert said == f"error: {name} is not on PATH\nhint: install it: npm install -g {package}\n"


@pytest.mark.slow
def test_what_keeps_the_model_from_being_served(folder: Path) -> None:
    (folder / "bad.gguf").write_bytes(b"GGUF")
    assert "bad.gguf" in refused("launch", "claude", "bad.gguf", cwd=folder)
    assert "none.gguf" in refused("launch", "claude", "none.gguf", cwd=folder)
    assert "vram" in refused("launch", "claude", NANO, "--vram", "1", "--residency", "5", cwd=folder, status=2)
    assert "0.001 s" in refused("launch", "claude", NANO, "--ready-timeout", "0.001", cwd=folder, status=124)
    refused("launch", "emacs", NANO, cwd=folder, status=2)


@pytest.mark.slow
def test_a_client_that_cannot_be_run(folder: Path) -> None:
    (folder / "bin" / "claude").write_text("#!/no/such/interpreter\n")
    assert "cannot be run" in refused_after_start(folder)


def refused_after_start(folder: Path) -> str:
    done, _ = finished(folder, "claude", NANO, "--device", "cpu")
    assert done.returncode == 1
    return done.stderr


@pytest.mark.slow
def test_a_client_that_is_killed(folder: Path) -> None:
    done, _ = finished(folder, "claude", NANO, "--device", "cpu", "--", "die")
    assert done.returncode == 128 + signal.SIGKILL


@pytest.mark.slow
def test_the_client_has_the_terminal(folder: Path) -> None:
    master, slave = os.openpty()
    command = [sys.executable, "-m", "spark.cli", "launch", "claude", str(NANO), "--device", "cpu", "--", "0"]
    with open(slave, "rb") as terminal, open(master, "rb"):  # noqa: PTH123
        done = subprocess.run(command, cwd=folder, env=environment(), stdin=terminal, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "told.json").read_text())["tty"]


@pytest.mark.slow
def test_ctrl_c_is_the_clients(folder: Path) -> None:
    with launched(folder, "interrupted") as (command, processes, _):
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait(30) == 42
        assert none_left(processes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGTERM, "wait"), (signal.SIGHUP, "wait"), (signal.SIGTERM, "stubborn")]
)
def test_a_signal_ends_the_client_first(folder: Path, number: signal.Signals, end: str) -> None:
    with launched(folder, end) as (command, processes, _):
        command.send_signal(number)
        assert command.wait(30) == 128 + number
        assert none_left(processes)


# A client that has started one process beside it, one below that, and one that is to live on by itself.
PARENT = """#!/bin/sh
sleep 100 &
sh -c 'sleep 100; true' &
setsid sleep 100 &
until [ "$(pgrep -c -P $$ sleep)" -ge 2 ]; do sleep 0.05; done
echo $! > started
wait
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nor_do_the_clients_own_children(folder: Path, number: signal.Signals) -> None:
    (folder / "bin" / "codex").write_text(PARENT)
    with started("launch", "codex", NANO, "--device", "cpu", cwd=folder, tmp=folder / "tmp") as command:
        until((folder / "started").exists, command)
        until(lambda: len(children(command)) == 7, command)  # and the server, its daemon, the client
        processes = children(command)
        (alone,) = [p for p in processes if os.getsid(p.pid) == p.pid and p.name() == "sleep"]
        try:
            command.send_signal(number)
            assert command.wait(30) == (128 + number if number == signal.SIGTERM else -number)
            assert none_left([p for p in processes if p != alone])
            assert alone.is_running()
        finally:
            alone.kill()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["wait", "stubborn"])
def test_nothing_outlives_a_killed_command(folder: Path, end: str) -> None:
    with launched(folder, end) as (command, processes, _):
        command.kill()
        command.wait(30)
        time.sleep(5.0 if end == "stubborn" else 0.0)
        assert none_left(processes)
        assert not [*(folder / "tmp").glob("spark-launch-*")]


@pytest.mark.slow
def test_ctrl_c_while_the_model_loads(folder: Path) -> None:
    arguments = ["launch", "claude", NANO, "--device", "cpu", "--", "wait"]
    with started(*arguments, cwd=folder, tmp=folder / "tmp") as command:
        until(lambda: len(children(command)) == 1, command)  # the server, which has no daemon yet
        processes = children(command)
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait(30) == 130 and not (folder / "told.json").exists()
        assert none_left(processes)


@pytest.mark.slow
def test_a_server_that_is_gone_is_noticed_in_the_end(folder: Path) -> None:
    with launched(folder, "interrupted") as (command, processes, told):
        server = next(p for p in processes if p.ppid() == command.pid and p.pid != told["pid"])
        server.kill()
        os.killpg(command.pid, signal.SIGINT)
        _, stderr = command.communicate(timeout=30)
        assert command.returncode == 42 and "was ended by signal 9" in stderr and none_left(processes)
