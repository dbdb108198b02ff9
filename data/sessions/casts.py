"""What each sample session is about: Python's library, hand-written plays, files in other languages, in which order.

A part is `pyN` (N exchanges about the session's modules), a play's name (`name.2` for one scene of it; that is how a
session comes back to a subject), or `@FILE*N` (N exchanges about a frozen file).
"""

from __future__ import annotations

import random
import re

from excerpts import Excerpt
from plays import TEXTS, read_play
from scenes import Scene, write_script
from script import Script, Turn

CASTS = {
    "claude-1": "py6",
    "claude-2": "trip_azores @residency.md*2",
    "claude-3": "py7",
    "claude-4": "cooking.1 cooking.2",
    "claude-5": "py1 sql_orders.1 @page.css*2",
    "claude-6": "@index.html*2 browser_checkout py1 @help.html*3",
    "claude-7": "py3",
    "claude-8": "hansa_history py1 @pydoc.css*1 @config-keys.ini*2",
    "claude-9": "kubernetes_ops.1 py5 @CMakeLists.txt*1 py3 kubernetes_ops.2 @Makefile*1",
    "claude-10": "grant_proposal @NEWS.txt*2",
    "claude-11": "@object.h*3 @ops.cpp*3 py2",
    "claude-12": "francais_roman py2",
    "claude-13": "@page.js*4 py1 @page.js*3",
    "claude-14": "deutsch_verein @activate*1",
    "claude-15": "py5",
    "claude-16": "@pregate.md*2 py2 incident_logs",
    "codex-1": "@activate.fish*1 py2 @Activate.ps1*3",
    "codex-2": "py3 notebook_energy py2",
    "codex-3": "@Grammar.txt*2 sql_orders.2 @Grammar.txt*2",
    "codex-4": "typescript_app.1 py1",
    "codex-5": "py4 @stations.csv*2 py3 @stations.csv*1",
    "codex-6": "shell_backup.1 shell_backup.2",
    "codex-7": "py5 cpp_ring @workspace.h*2 py3 @pool.cpp*2",
    "codex-8": "@gather.cu*2 @rope.cu*2 py2 @norm.cu*1",
    "codex-9": "espanol_taller py2",
    "codex-10": "typescript_app.2 py1",
    "codex-11": "@architecture.rst*4",
    "codex-12": "py5",
    "codex-13": "music_theory",
    "codex-14": "py3 @formats.md*3",
    "codex-15": "@route.cu*3 @half.h*1",
    "codex-16": "py5 @protocol.md*4 py4 @abstract.h*3 py2",
}


def cast_script(seed: str, paths: tuple[str, ...], length: int, *required: Scene) -> Script:
    """A script in the parts that CASTS names; without an entry, `length` scenes about the modules."""
    parts = CASTS.get(seed, f"py{length}").split()
    count = sum(int(part[2:]) for part in parts if re.fullmatch(r"py\d+", part))
    script = write_script(seed, paths, count, *required)
    python = exchanges(script.turns)
    files: dict[str, Excerpt] = {}
    turns: list[Turn] = []
    for part in parts:
        if re.fullmatch(r"py\d+", part):
            taken, python = python[: int(part[2:])], python[int(part[2:]) :]
            turns += [turn for exchange in taken for turn in exchange]
        elif part.startswith("@"):
            name, _, number = part[1:].partition("*")
            files.setdefault(name, Excerpt(name, random.Random(f"{seed}-{name}")))
            for _ in range(int(number)):
                turns += files[name].scene()
        else:
            name, _, scene = part.partition(".")
            turns += read_play(TEXTS / "main" / f"{name}.txt").turns(*([int(scene)] if scene else []))
    script.turns = turns + [turn for exchange in python for turn in exchange]
    return script


def exchanges(turns: list[Turn]) -> list[list[Turn]]:
    """Turns grouped by the user's messages."""
    groups: list[list[Turn]] = []
    for turn in turns:
        if turn.user:
            groups.append([])
        groups[-1].append(turn)
    return groups
