"""The option `--json` of every benchmark, where its figures go, refused before anything is measured; and the GPUs."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from engine.ground.errors import UsageError
from spark.results import require_clean


def json_option(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add `--json FILE`; under data/results it takes a clean commit."""
    parser.add_argument("--json", type=_target, metavar="FILE", required=required, help="write the figures to a file")


def gpus() -> list[str]:
    """The names of this host's GPUs."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def _target(text: str) -> Path:
    try:
        require_clean(Path(text))
    except UsageError as error:
        raise argparse.ArgumentTypeError(f"{error.message}; {error.hint}") from None
    return Path(text)
