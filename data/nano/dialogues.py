"""Sessions of a coding agent about the library's modules: questions, tool calls, results, answers that quote them.

Two dialects, as the two families of session logs have them: "files" (Read, Grep, Edit, Bash with JSON arguments and
numbered lines) and "shell" (one shell function and apply_patch). What a tool returns is cut from the real sources,
so every quotation in an answer can be learned only by looking back at the tool's result.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from corpus import FIXED_NAMES, IDENTIFIER, Definition, Module

from engine.text.template import ChatTemplate

Message = dict[str, Any]

ROOTS = ("Lib", "/home/dev/cpython/Lib", "/usr/lib/python3.11", "/workspace/cpython/Lib", "/src/Lib", "/repo/Lib")
SYSTEMS = (
    "You are a coding agent. Use the tools to read and change files.",
    "You help with Python sources. Quote code exactly as it stands in the file.",
    "You are a careful programmer working in the user's checkout. Look before you answer.",
    "Answer briefly. Give file and line for everything you claim.",
)


def _schema(name: str, description: str, properties: str) -> dict[str, Any]:
    """A function's JSON schema from `properties`: "first:string second:integer", the first one required."""
    kinds = dict(item.split(":") for item in properties.split())
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in kinds.items()},
        "required": list(kinds)[:1],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


FILE_TOOLS = (
    _schema("Read", "Read lines of a file.", "file_path:string offset:integer limit:integer"),
    _schema("Grep", "Search files for a regular expression.", "pattern:string path:string"),
    _schema("Edit", "Replace text in a file.", "file_path:string old_string:string new_string:string"),
    _schema("Bash", "Run a shell command.", "command:string description:string"),
)
SHELL_TOOLS = (
    _schema("shell", "Run a shell command and return its output.", "command:array workdir:string"),
    _schema("apply_patch", "Change files with a patch.", "input:string"),
)
EXEC_TOOLS = (
    _schema("exec_command", "Run a shell command and return its output.", "cmd:string workdir:string"),
    _schema("apply_patch", "Change files with a patch.", "input:string"),
)


@dataclass(slots=True)
class Session:
    """A session under construction about one module: every scene appends its messages."""

    rng: random.Random
    module: Module
    lines: list[str]
    dialect: str  # "files", "shell" or "exec"
    path: str  # as the user and the tools write it
    numbered: str  # the gap between line number and text in a numbered listing
    messages: list[Message] = field(default_factory=list)

    def ask(self, *choices: str) -> None:
        """A user's turn, one of the given wordings."""
        self.messages.append({"role": "user", "content": self.rng.choice(choices)})

    def answer(self, text: str) -> None:
        """The assistant's closing words."""
        self.messages.append({"role": "assistant", "content": text})

    def call(self, name: str, arguments: dict[str, Any], result: str, thought: str = "", words: str = "") -> None:
        """One call by the assistant and what came back."""
        number = f"{self.rng.getrandbits(48):012x}"
        call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        turn = {"role": "assistant", "content": words, "reasoning_content": thought, "tool_calls": [call]}
        self.messages.append(turn)
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def run(self, command: str, output: str, thought: str = "") -> None:
        """A shell command in the session's dialect."""
        if self.dialect == "files":
            self.call("Bash", {"command": command, "description": "Run a command"}, output, thought)
            return
        wall = f"Wall time: {self.rng.uniform(0.01, 2):.1f} seconds"
        result = f"Exit code: 0\n{wall}\nOutput:\n{output}"
        if self.dialect == "shell":
            self.call("shell", {"command": ["bash", "-lc", command]}, result, thought)
        else:
            self.call("exec_command", {"cmd": command}, result, thought)

    def read(self, first: int, last: int, thought: str = "") -> None:
        """Show lines first..last (from 1, both included)."""
        last = min(last, len(self.lines))
        shown = self.lines[first - 1 : last]
        if self.dialect == "files":
            listing = "\n".join(f"{n:6d}{self.numbered}{line}" for n, line in enumerate(shown, first))
            whole = first == 1 and last == len(self.lines)
            span = {} if whole else {"offset": first, "limit": last - first + 1}
            self.call("Read", {"file_path": self.path, **span}, listing, thought)
        elif self.rng.random() < 0.3:
            listing = "\n".join(f"{n:6d}\t{line}" for n, line in enumerate(shown, first))
            self.run(f"nl -ba {self.path} | sed -n '{first},{last}p'", listing, thought)
        else:
            self.run(f"sed -n '{first},{last}p' {self.path}", "\n".join(shown), thought)

    def grep(self, name: str, pattern: str, thought: str = "", limit: int = 12) -> list[int]:
        """Search the module for `pattern` (a regular expression); returns the matching line numbers."""
        wanted = re.compile(pattern)
        found = [n for n, line in enumerate(self.lines, 1) if wanted.search(line)][:limit]
        prefix = "" if self.dialect != "files" else f"{self.path}:"
        output = "\n".join(f"{prefix}{n}:{self.lines[n - 1]}" for n in found) or "No matches found"
        if self.dialect == "files":
            self.call("Grep", {"pattern": pattern, "path": self.path}, output, thought)
        else:
            self.run(f"rg -n '{pattern}' {self.path}", output, thought)
        return found

    def edit(self, old: Sequence[str], new: Sequence[str], thought: str = "") -> None:
        """Replace consecutive lines."""
        if self.dialect == "files":
            arguments = {"file_path": self.path, "old_string": "\n".join(old), "new_string": "\n".join(new)}
            self.call("Edit", arguments, f"The file {self.path} has been updated.", thought)
        else:
            body = "\n".join(["-" + line for line in old] + ["+" + line for line in new])
            patch = f"*** Begin Patch\n*** Update File: {self.path}\n@@\n{body}\n*** End Patch\n"
            result = f"Success. Updated the following files:\nM {self.path}"
            self.call("apply_patch", {"input": patch}, result, thought)


def _count(lines: int) -> str:
    return "1 line" if lines == 1 else f"{lines} lines"


def _fence(lines: Iterable[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```"


def _window(s: Session, d: Definition, most: int) -> tuple[int, int]:
    """Lines around a definition that a reader would ask for."""
    first = max(1, d.first - s.rng.randint(0, 8))
    return first, min(len(s.lines), max(d.last, d.first + 4) + s.rng.randint(0, 12), first + most)


def _sentence(docstring: str) -> str:
    head = " ".join(docstring.split("\n\n")[0].split())
    return head.split(". ")[0].rstrip(".") + "." if head else ""


def explain(s: Session, d: Definition) -> None:
    """Find a definition, read it, say what it does in the docstring's words and quote its head."""
    s.ask(
        f"What does `{d.name}` in {s.path} do?",
        f"Explain {d.name} ({s.path}).",
        f"Where is `{d.name}` defined and what is it for? It should be in {s.path}.",
    )
    keyword = "class" if d.kind == "class" else "def"
    s.grep(d.name, rf"{keyword} {d.name}\b", f"I need the definition of {d.name} first.")
    s.read(*_window(s, d, 60), f"{d.name} starts at line {d.first}. Read it.")
    head = s.lines[d.first - 1 : min(d.body - 1 if d.docstring else d.first + 3, d.first + 5, d.last)]
    about = _sentence(d.docstring) or f"It takes {', '.join(d.parameters) or 'no arguments'}."
    head = head or s.lines[d.first - 1 : d.first]
    s.answer(f"`{d.name}` is a {d.kind} at {s.path}:{d.first}. {about}\n\n{_fence(head)}")


def quote(s: Session, d: Definition) -> None:
    """Show a definition's lines verbatim."""
    last = min(d.last, d.first + 40)
    s.ask(f"Show me {d.name} in {s.path}.", f"Print lines {d.first} to {last} of {s.path}.", f"Quote {d.name} exactly.")
    s.read(d.first, last, f"Lines {d.first} to {last} hold {d.name}.")
    s.answer(f"{s.path}, lines {d.first} to {last}:\n\n{_fence(s.lines[d.first - 1 : last])}")


def rename(s: Session, d: Definition) -> None:
    """Rename a local name inside a definition: read, edit, report."""
    body = s.lines[d.first - 1 : min(d.last, d.first + 24)]
    found = set(IDENTIFIER.findall("\n".join(body))) - FIXED_NAMES - {d.name}
    names = sorted(name for name in found if len(name) > 2)
    if not names:
        return quote(s, d)
    old = s.rng.choice(list(d.parameters) if d.parameters and s.rng.random() < 0.6 else names)
    new = s.rng.choice([f"{old}_", f"new_{old}", f"the_{old}", s.rng.choice(names) + "_" + old])
    s.ask(f"Rename `{old}` to `{new}` in {d.name} ({s.path}).", f"In {s.path}, {d.name}: call {old} {new} instead.")
    s.read(d.first, d.first + len(body) - 1, f"I have to see {d.name} before I change it.")
    word = re.compile(rf"\b{re.escape(old)}\b")
    changed = [word.sub(new, line) for line in body]
    touched = [i for i, (a, b) in enumerate(zip(body, changed, strict=True)) if a != b]
    if not touched:
        return s.answer(f"`{old}` does not occur in `{d.name}`, so there is nothing to rename.")
    span = slice(touched[0], touched[-1] + 1)
    s.edit(body[span], changed[span], f"{old} occurs on {_count(len(touched))}.")
    s.lines[d.first - 1 : d.first - 1 + len(body)] = changed
    if s.rng.random() < 0.4:
        s.grep(new, rf"\b{new}\b", "Check the result.")
    s.answer(f"Renamed `{old}` to `{new}` on {_count(len(touched))} of `{d.name}`:\n\n{_fence(changed[span])}")
    return None


def document(s: Session, d: Definition) -> None:
    """Write the docstring of a definition that is shown without it."""
    if not d.docstring or d.body <= d.first + 1 or len(d.docstring) > 600:
        return explain(s, d)
    whole = s.lines[d.first - 1 : min(d.last, d.body + 25)]
    start = next((i for i, line in enumerate(whole) if '"""' in line or "'''" in line), None)
    if start is None or start >= d.body - d.first:
        return explain(s, d)
    doc, bare = whole[start : d.body - d.first], whole[:start] + whole[d.body - d.first :]
    s.lines[d.first - 1 : d.first - 1 + len(whole)] = bare
    s.ask(f"Add a docstring to {d.name} in {s.path}.", f"{d.name} in {s.path} has no docstring. Write one.")
    s.read(d.first, d.first + len(bare) - 1, "Read the code before describing it.")
    above = whole[start - 1 : start]
    s.edit(above, above + doc, f"The docstring belongs below line {d.first + start - 1}.")
    s.answer(f"`{d.name}` now says what it does: {_sentence(d.docstring)}")
    s.lines[d.first - 1 : d.first - 1 + len(bare)] = whole
    return None


def uses(s: Session, d: Definition) -> None:
    """List the lines that mention a name."""
    s.ask(f"Where is `{d.name}` used in {s.path}?", f"List every line of {s.path} that mentions {d.name}.")
    found = s.grep(d.name, rf"\b{d.name}\b", f"Search for {d.name}.")
    listing = "\n".join(f"- line {n}: `{s.lines[n - 1].strip()}`" for n in found)
    s.answer(f"{s.path} mentions `{d.name}` on {_count(len(found))}:\n{listing}" if found else "Nowhere in this file.")


def test(s: Session, d: Definition) -> None:
    """Run a test module and report."""
    name = s.module.path.removesuffix(".py").rsplit("/", 1)[-1].removeprefix("test_")
    s.ask(f"Run the tests of {name}.", f"Do the tests for {name} still pass?")
    count, seconds = s.rng.randint(3, 400), s.rng.uniform(0.01, 9)
    output = "." * min(count, 70) + "\n" + "-" * 70 + f"\nRan {count} tests in {seconds:.3f}s\n\nOK"
    s.run(f"python -m unittest -q test.test_{name}", output, "The tests say whether it works.")
    s.answer(f"Yes: {count} tests ran in {seconds:.3f}s, all passed.")


def recall(s: Session, d: Definition) -> None:
    """Quote again something that an earlier tool result showed, without reading the file another time."""
    shown = [m["content"] for m in s.messages if m["role"] == "tool" and m["content"].count("\n") > 6]
    if not shown:
        return quote(s, d)
    lines = s.rng.choice(shown).split("\n")
    start = s.rng.randrange(len(lines) - 5)
    cue, rest = lines[start], lines[start + 1 : start + s.rng.randint(3, 9)]
    if not cue.strip():
        return quote(s, d)
    s.ask(
        f"Earlier you saw the line\n{cue}\nWhat followed it?", f"Repeat the {_count(len(rest))} after this one:\n{cue}"
    )
    s.answer("\n".join(rest))
    return None


SCENES: tuple[tuple[Callable[[Session, Definition], None], int], ...] = (
    (explain, 5), (quote, 4), (rename, 5), (document, 3), (uses, 3), (test, 1), (recall, 3),
)  # fmt: skip


def session(module: Module, rng: random.Random) -> tuple[list[Message], list[dict[str, Any]]]:
    """A session of one to five scenes about a module: messages and tools, for the chat template."""
    dialect = rng.choice(["files", "files", "shell", "exec"])
    path = f"{rng.choice(ROOTS)}/{module.path}"
    s = Session(rng, module, module.lines, dialect, path, rng.choice(["→", "\t"]))
    if rng.random() < 0.7:
        s.messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    scenes, weights = zip(*SCENES, strict=True)
    for scene in rng.choices(scenes, weights, k=rng.choice([1, 2, 2, 3, 3, 4, 5])):
        scene(s, rng.choice([d for d in module.definitions if d.name in s.lines[d.first - 1]] or module.definitions))
    tools = {"files": FILE_TOOLS, "shell": SHELL_TOOLS, "exec": EXEC_TOOLS}[dialect]
    offered = rng.choice([(), tools, tuple(rng.sample(tools, rng.randint(1, len(tools))))])
    return s.messages, list(offered)


def dialogues(modules: Sequence[Module], template: ChatTemplate, count: int, seed: str) -> list[str]:
    """`count` rendered sessions about modules that define something, deterministic by seed.

    A session is rendered up to one of its turns, as serving would have rendered it: reasoning of older turns is gone.
    """
    rng = random.Random(seed)
    subjects = [m for m in modules if m.definitions]
    weights = [len(m.definitions) ** 0.5 for m in subjects]
    texts = []
    for module in rng.choices(subjects, weights, k=count):
        messages, tools = session(module, rng)
        ends = [i + 1 for i, m in enumerate(messages) if m["role"] == "assistant"]
        messages = messages[: rng.choice(ends[-4:])] if rng.random() < 0.5 else messages
        texts.append(template.render(messages, tools, add_generation_prompt=False))
    return texts
