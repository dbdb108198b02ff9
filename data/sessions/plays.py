"""Plays: sessions that were written by hand, in a format of their own, played into the logs of either program.

A play is a text file of scenes. A line that begins with `== ` is a direction, what follows is its body (in which
`\\== ` stands for a line that begins so):

    == scene                    a new exchange; scenes may be taken one by one
    == user                     what the user says
    == think | == say           what the assistant thinks, says; a tool may follow in the same response
    == run COMMAND              a shell command; the body is its output
    == read PATH FIRST          lines of a file, the body, from line FIRST on
    == write PATH               a new file, the body
    == edit PATH FIRST          the body is the old text, `--->`, the new text
    == tool NAME {ARGUMENTS}    any other tool; the body is its result
    == take EXCERPT FIRST LAST  the assistant reads these lines of a file in `texts/excerpts`
    == put EXCERPT FIRST LAST   the assistant writes them, as a file of its own
    == task TITLE               a subagent: the body is the prompt, `--->`, the report
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from script import Action, Script, Turn

TEXTS = Path(__file__).resolve().parent / "texts"
EXCERPTS = TEXTS / "excerpts"


@dataclass(frozen=True)
class Play:
    """Scenes, each a list of turns that begins with the user."""

    name: str
    scenes: tuple[tuple[Turn, ...], ...]

    def turns(self, *numbers: int) -> list[Turn]:
        """The turns of some scenes (counted from 1), in the order given; of all without numbers."""
        wanted = numbers or range(1, len(self.scenes) + 1)
        return [turn for number in wanted for turn in self.scenes[number - 1]]


def read_play(path: Path) -> Play:
    """Read a play; a direction that is not known is a ValueError that names it."""
    scenes: list[list[Turn]] = []
    reply = Turn()

    def end_reply() -> None:
        nonlocal reply
        if reply.thought or reply.words or reply.actions:
            scenes[-1].append(reply)
        reply = Turn()

    for number, direction, body in _directions(path):
        word, _, rest = direction.partition(" ")
        if word in ("scene", "user"):
            end_reply()
            if word == "scene":
                scenes.append([])
            else:
                scenes[-1].append(Turn(user=body))
        elif word == "think":
            end_reply()
            reply.thought = body
        elif word == "say":
            if reply.words:
                end_reply()
            reply.words = body
        else:
            reply.actions = (_action(f"{path.name}:{number}", word, rest, body),)
            end_reply()
    end_reply()
    return Play(path.stem, tuple(tuple(scene) for scene in scenes))


def _directions(path: Path) -> list[tuple[int, str, str]]:
    """Each direction with its line number and its body."""
    found: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if line.startswith("== "):
            found.append((number, line[3:].strip(), []))
        elif found:
            found[-1][2].append(line.replace("\\== ", "== ", 1))
    return [(number, direction, "\n".join(lines).strip("\n")) for number, direction, lines in found]


def _action(where: str, word: str, rest: str, body: str) -> Action:
    if word == "run":
        return Action("run", command=rest, output=body)
    if word == "read":
        name, first = rest.split()
        return _read(name, int(first), body.split("\n"))
    if word == "write":
        return Action("write", path=rest, new=body)
    if word == "edit":
        name, first = rest.split()
        old, new = body.split("\n--->\n")
        rows = tuple(enumerate(new.split("\n"), int(first)))
        return Action("edit", name, "", first=int(first), old=old, new=new, rows=rows)
    if word == "tool":
        name, _, arguments = rest.partition(" ")
        return Action("tool", pattern=name, arguments=json.loads(arguments or "{}"), output=body)
    if word in ("take", "put"):
        name, first, last = rest.split()
        lines = (EXCERPTS / name).read_text("utf-8").splitlines()[int(first) - 1 : int(last)]
        return _read(name, int(first), lines) if word == "take" else Action("write", path=name, new="\n".join(lines))
    if word == "task":
        prompt, report = body.split("\n--->\n")
        inner = Script(random.Random(where), [], [Turn(user=prompt), Turn(words=report)])
        return Action("task", pattern=rest, command=prompt, output=report, script=inner)
    raise ValueError(f"{where}: unknown direction {word!r}")


def _read(name: str, first: int, lines: list[str]) -> Action:
    rows = tuple(enumerate(lines, first))
    return Action("read", name, "", first=first, last=first + len(lines) - 1, rows=rows)
