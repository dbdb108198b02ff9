"""Writes docs/commands.md: what the program says of each command. A test keeps the page true.

python docs/make_commands.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("commands.md")
COMMANDS = (
    "extract-sessions", "tokenize", "calibrate", "validate", "train-pregate", "serve", "launch", "inspect", "plan",
    "bench", "convert-drafter", "demo", "profile", "sessions",
)  # fmt: skip
PROFILE_COMMANDS = ("merge", "show", "diff")
SESSIONS_COMMANDS = ("list", "show", "drop", "stats")
HEAD = """# Commands

What `spark --help` and the `--help` of each command print; `python docs/make_commands.py` writes this page.

Data goes to stdout, progress and messages to stderr. Exit statuses: 0; 1 a failure that is explained in one line,
`error: ...`, with a `hint: ...` where there is one; 2 usage; 124 a deadline passed; 130 Ctrl-C; 141 whoever read
the output has left; 143 SIGTERM (a server that obeyed it: 0).
"""


def usage(*arguments: str) -> str:
    """What the program prints for `spark ARGUMENTS --help`, 80 columns wide."""
    command = [sys.executable, "-m", "spark.cli", *arguments, "--help"]
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=PAGE.parents[1], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.replace("python -m spark.cli", "spark")


def page() -> str:
    """The whole page."""
    parts = [HEAD, f"```\n{usage()}```\n"]
    parts += [f"## spark {name}\n```\n{usage(name)}```\n" for name in COMMANDS]
    parts += [f"## spark profile {name}\n```\n{usage('profile', name)}```\n" for name in PROFILE_COMMANDS]
    parts += [f"## spark sessions {name}\n```\n{usage('sessions', name)}```\n" for name in SESSIONS_COMMANDS]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
