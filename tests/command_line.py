"""Runs `spark` commands as processes of their own, as a user does."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
NANO = ROOT / "data" / "nano" / "nano.gguf"
SAMPLES = ROOT / "data" / "sessions"
SPARK = [sys.executable, "-m", "spark.cli"]
LOGS = ["--claude-dir", SAMPLES / "claude", "--codex-dir", SAMPLES / "codex", "--test-frac", "0.3"]
PATIENCE_S = 150.0
ORPHAN_S = 5.0


def environment(**more: str | Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)} | {name: str(value) for name, value in more.items()}


# Half a second of each command would be the interpreter's start and the imports. So most are forked from a process that
# has imported what commands do, and done nothing; `fresh` ones start as a user's do.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([
    __name__, "spark.cli", "spark.server.app", "spark.pipeline.calibrate", "spark.storage", "spark.extract",
    "spark.pipeline.tokens", "spark.pipeline.validate", "engine.running.dryrun", "pyarrow.parquet",
])  # fmt: skip


def _in_fork(arguments: list[str], cwd: Path, env: dict[str, str], out: Connection, err: Connection) -> None:
    """What a process does that was started for a command."""
    for descriptor, end in ((1, out), (2, err)):
        os.dup2(end.fileno(), descriptor)
        end.close()
    sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))  # noqa: SIM115
    sys.argv = [str(ROOT / "spark" / "cli.py"), *arguments]
    sys.modules["__main__"].__package__ = "spark"  # usage names the program as SPARK starts it
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    try:
        from spark.cli import main

        main()
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def _forked(arguments: list[str], cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (out, their_out), (err, their_err) = _FORKS.Pipe(duplex=False), _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_in_fork, args=(arguments, cwd, env, their_out, their_err))
    process.start()
    their_out.close()
    their_err.close()
    said = {out: b"", err: b""}
    end_s = time.monotonic() + PATIENCE_S
    open_ends = [out, err]
    while open_ends:
        if not (ready := wait(open_ends, end_s - time.monotonic())):
            process.kill()
            raise subprocess.TimeoutExpired(arguments, PATIENCE_S, said[out], said[err])
        for end in ready:
            part = os.read(end.fileno(), 1 << 16)
            said[end] += part
            if not part:
                open_ends.remove(end)
                end.close()
    process.join()
    status = process.exitcode
    process.close()
    return subprocess.CompletedProcess(arguments, status, said[out].decode(), said[err].decode())


def spark(
    *arguments: str | Path, cwd: Path, status: int = 0, env: Mapping[str, str] | None = None, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, which must have the status; what it printed is free of control characters."""
    words, env = [str(a) for a in arguments], dict(env or environment())
    if fresh or any(env.get(name) != os.environ.get(name) for name in ("LC_ALL", "PYTHONIOENCODING", "FORCE_COLOR")):
        done = subprocess.run(
            [*SPARK, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    else:
        done = _forked(words, cwd, env)
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
