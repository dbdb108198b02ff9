"""Runs `spark` commands as processes of their own, as a user does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
NANO = ROOT / "data" / "nano" / "nano.gguf"
SAMPLES = ROOT / "data" / "sessions"
SPARK = [sys.executable, "-m", "spark.cli"]
LOGS = ["--claude-dir", SAMPLES / "claude", "--codex-dir", SAMPLES / "codex", "--test-frac", "0.3"]
PATIENCE_S = 60.0
ORPHAN_S = 5.0


def environment(**more: str | Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)} | {name: str(value) for name, value in more.items()}


def spark(
    *arguments: str | Path, cwd: Path, status: int = 0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, which must have the status; what it printed is free of control characters."""
    done = subprocess.run(
        [*SPARK, *map(str, arguments)], cwd=cwd, env=env or environment(), capture_output=True, text=True,
        timeout=PATIENCE_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "\x1b" not in done.stdout + done.stderr and "\r" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def refused(*arguments: str | Path, cwd: Path, status: int = 1, env: Mapping[str, str] | None = None) -> str:
    """Run a command that must fail with one explanation; returns it, the hint included."""
    done = spark(*arguments, cwd=cwd, status=status, env=env)
    explained(done.stderr)
    assert done.stdout == ""
    return done.stderr


def explained(stderr: str) -> None:
    lines = [line for line in stderr.splitlines() if line]
    errors = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    after = lines[errors[0] + 1 :]
    assert not after or after[0].startswith("hint: "), stderr
    assert sum(line.startswith("hint: ") for line in lines) <= 1, stderr


@contextlib.contextmanager
def started(*arguments: str | Path, cwd: Path, tmp: Path) -> Iterator[subprocess.Popen[str]]:
    """A running command that leads a process group, as under a terminal; `tmp` is its temporary folder."""
    with subprocess.Popen(
        [*SPARK, *map(str, arguments)], cwd=cwd, env=environment(TMPDIR=tmp), text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for a condition; fails when the process ends first."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.01)


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def none_left(processes: list[psutil.Process]) -> bool:
    """Whether all have ended after at most ORPHAN_S."""
    _, alive = psutil.wait_procs(processes, timeout=ORPHAN_S)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
