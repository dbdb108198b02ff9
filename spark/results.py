"""The JSON that commands write: what ran, where, and what it found.

What lies under `data/results` of a source tree is published, so it must say which code it was measured with: it is
refused where that code is not a commit's.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.ground.errors import UsageError
from engine.ground.files import replacing
from spark import __version__
from spark.console import is_stdout, note

_ROOT = Path(__file__).resolve().parents[1]
_PUBLISHED = _ROOT / "data" / "results"
_NOT_MEASURED = ("data/results", "RESULTS.md", "README.md", "docs", "CHANGELOG.md")  # figures and prose


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} CPUs"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"


def _commit() -> str | None:
    """The commit of the source tree that this package runs from; None for an installed wheel."""
    if not (_ROOT / ".git").exists():
        return None
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "HEAD")
    return f"{commit}+changes" if commit and changes() else commit


def changes() -> list[str]:
    """Files of the source tree that differ from its commit and could change a figure; new ones count."""
    left_out = [f":(exclude,top){path}" for path in _NOT_MEASURED]
    found = _output("git", "-C", str(_ROOT), "status", "--porcelain", "--", ":(top)", *left_out) or ""
    return [line.split(maxsplit=1)[1] for line in found.splitlines()]


def require_clean(path: Path) -> None:
    """Refuse, with UsageError, to write published figures that were measured with code of no commit."""
    if not path.resolve().is_relative_to(_PUBLISHED):
        return
    if found := changes():
        raise UsageError(
            f"{path}: figures are of a commit, and {len(found)} files differ from it ({', '.join(found[:3])})",
            hint="commit or stash the changes, or write the figures elsewhere",
        )
    if _commit() is None:
        raise UsageError(f"{path}: figures are of a commit, and git names none", hint="measure in a clone, with git")


def provenance() -> dict[str, Any]:
    """Command, version, commit, host and time: what every file of figures carries."""
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    name, _, driver = (gpu.splitlines()[0] if gpu else "").partition(", ")
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "version": __version__,
        "commit": _commit(),
        "host": {"cpu": _cpu(), "gpu": name or None, "driver": driver or None},
        "versions": {"python": platform.python_version(), **_versions("numpy", "gguf", "tokenizers")},
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _versions(*names: str) -> dict[str, str]:
    return {name: metadata.version(name) for name in names}


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report with its provenance, whole or not at all; raises SparkError where it cannot or must not be.

    A path that stands for stdout gets it even where `sys.stdout` is redirected, which keeps all else out.
    """
    text = json.dumps({**report, **provenance()}, indent=1) + "\n"
    if is_stdout(path):
        assert sys.__stdout__ is not None, "it was looked at before"
        sys.__stdout__.write(text)
        sys.__stdout__.flush()
        return
    require_clean(path)
    with replacing(path, "the figures") as file:
        file.write(text.encode())


def save(path: Path | None, report: Mapping[str, Any], *tables: Callable[[], None]) -> None:
    """Write `--json`, if it was asked for, say where, and print tables; raises what `write_json` does.

    The tables are printed also where the file cannot be written: what they say may have taken hours to measure.
    """
    try:
        if path is not None:
            write_json(path, report)
            if not is_stdout(path):
                note(f"figures written to {path}")
    finally:
        for table in tables:
            table()
