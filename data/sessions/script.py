"""Scripts of coding sessions, in no program's dialect: turns of the user and the assistant, and uses of tools."""

from __future__ import annotations

import difflib
import random
from dataclasses import dataclass, field
from typing import Any, Literal

from library import Module


@dataclass(frozen=True)
class Action:
    """A use of a tool, in no program's dialect, with what came back.

    read: `path`, lines `first` to `last`. grep: `pattern` in `path`. edit: `old` to `new` in `path`, from line
    `first`. write: `new` to `path`. run: `command`. task: `pattern` is the title, `command` the prompt, `script` what
    the subagent did. tool: any other, `pattern` is its name. Paths of read, grep and edit are under `folder`.
    """

    kind: Literal["read", "grep", "edit", "write", "run", "task", "tool"]
    path: str = ""
    folder: str = "Lib/"
    pattern: str = ""
    command: str = ""
    first: int = 0
    last: int = 0
    old: str = ""
    new: str = ""
    output: str = ""
    rows: tuple[tuple[int, str], ...] = ()
    around: tuple[tuple[int, str], ...] = ()
    script: Script | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Turn:
    """The user's words, or a response: thought, words, actions."""

    user: str = ""
    thought: str = ""
    words: str = ""
    actions: tuple[Action, ...] = ()


@dataclass
class Script:
    """A session under construction about one or more modules."""

    rng: random.Random
    modules: list[Module]
    turns: list[Turn] = field(default_factory=list)
    edited: dict[str, list[str]] = field(default_factory=dict)  # path: lines before the first edit

    def ask(self, *choices: str) -> None:
        """A message from the user, one of the given wordings."""
        self.turns.append(Turn(user=self.rng.choice(choices)))

    def reply(self, words: str, *actions: Action, thought: str = "") -> None:
        """A response."""
        self.turns.append(Turn(thought=thought, words=words, actions=actions))

    def read(self, module: Module, first: int, last: int) -> Action:
        """Look at some lines."""
        first, last = max(first, 1), min(last, len(module.lines))
        return Action("read", module.path, first=first, last=last, rows=tuple(module.numbered(first, last)))

    def grep(self, module: Module, pattern: str, limit: int = 25) -> Action:
        """Search a file."""
        return Action("grep", module.path, pattern=pattern, rows=tuple(module.grep(pattern)[:limit]))

    def run(self, command: str, output: str) -> Action:
        """Run a command."""
        return Action("run", command=command, output=output)

    def edit(self, module: Module, first: int, last: int, new: list[str]) -> Action:
        """Replace lines; the module changes for the rest of the session."""
        self.edited.setdefault(module.path, list(module.lines))
        old, before = module.lines[first - 1 : last], module.lines[max(first - 3, 0) : first - 1]
        module.lines[first - 1 : last] = new
        rows = tuple(module.numbered(max(first - 2, 1), first + len(new) + 2))
        return Action(
            "edit", module.path, first=first, last=last, old="\n".join(old), new="\n".join(new), rows=rows,
            around=tuple(enumerate(before)),
        )  # fmt: skip

    def diff(self, module: Module) -> str:
        """What the session changed in a module, as git shows it."""
        path = f"Lib/{module.path}"
        lines = difflib.unified_diff(self.edited[module.path], module.lines, f"a/{path}", f"b/{path}", lineterm="")
        return "\n".join([f"diff --git a/{path} b/{path}", *lines])
