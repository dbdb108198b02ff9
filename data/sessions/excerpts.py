"""Scenes about files of any language: parts of `texts/excerpts` are read, written on, changed, reviewed.

What the assistant claims is counted in the lines themselves.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field

from plays import EXCERPTS
from script import Action, Turn

WORD = re.compile(r"[A-Za-z_]\w{3,}")


@dataclass
class Excerpt:
    """A frozen file and how far the session has come in it."""

    name: str
    rng: random.Random
    at: int = 0
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Read the file."""
        self.lines = (EXCERPTS / self.name).read_text("utf-8").splitlines()

    def scene(self) -> list[Turn]:
        """The next exchange, about lines that no exchange of this session was about before; none at the file's end."""
        if self.at + 20 > len(self.lines):
            return []
        return self.rng.choice((self._go_on, self._go_on, self._explain, self._rename, self._review))()

    def _part(self, size: int) -> tuple[int, list[str]]:
        first = self.at
        self.at = min(first + size, len(self.lines))
        return first, self.lines[first : self.at]

    def _read(self, first: int, lines: list[str]) -> Action:
        rows = tuple(enumerate(lines, first + 1))
        return Action("read", self.name, "", first=first + 1, last=first + len(lines), rows=rows)

    def _go_on(self) -> list[Turn]:
        """Read a part, write the next."""
        left = len(self.lines) - self.at
        first, before = self._part(min(self.rng.randrange(12, 40), left // 2))
        then, lines = self._part(self.rng.randrange(20, 46))
        head = next((line.strip() for line in lines if line.strip()), "the rest")
        part = re.sub(r"(\.\w+)?$", rf"-{then + 1}\1", self.name, count=1)
        ask = self.rng.choice(
            (
                f"go on with {self.name}, the next part begins with `{head}`. Put it in {part} for now",
                f"I have {self.name} up to line {then}. Please write what follows (`{head}`) as {part}.",
                f"split {self.name}: everything from `{head}` on belongs in {part}",
            )
        )
        kinds = Counter(word for line in lines for word in WORD.findall(line)).most_common(3)
        named = ", ".join(f"`{word}` ({count})" for word, count in kinds)
        say = self.rng.choice(
            (
                f"`{part}` has {len(lines)} lines. What it mentions most: {named}. Nothing above line {then} changed.",
                f"Written: {len(lines)} lines, from `{head}` on. Most used in them: {named}.",
            )
        )
        think = f"Lines {first + 1} to {then} show the conventions; keep to them."
        return [
            Turn(user=ask),
            Turn(thought=think, actions=(self._read(first, before),)),
            Turn(actions=(Action("write", path=part, new="\n".join(lines)),)),
            Turn(words=say),
        ]

    def _explain(self) -> list[Turn]:
        first, lines = self._part(self.rng.randrange(24, 60))
        filled = [(n, line.strip()) for n, line in enumerate(lines, first + 1) if len(line.strip()) > 12]
        quoted = sorted(self.rng.sample(filled, min(5, len(filled))))
        kinds = Counter(word for line in lines for word in WORD.findall(line)).most_common(5)
        rows = "\n".join(f"- line {n}: `{line}`" for n, line in quoted)
        names = ", ".join(f"`{word}`" for word, _ in kinds)
        blank = sum(not line.strip() for line in lines)
        return [
            Turn(user=self.rng.choice((f"what is in {self.name} around line {first + 10}?", f"{self.name}: gist?"))),
            Turn(actions=(self._read(first, lines),)),
            Turn(
                words=f"Lines {first + 1} to {first + len(lines)} of `{self.name}` are mostly about {names}. "
                f"The lines to know:\n\n{rows}\n\n{blank} of the {len(lines)} lines are blank."
            ),
        ]

    def _rename(self) -> list[Turn]:
        first, lines = self._part(self.rng.randrange(16, 40))
        counts = Counter(word for line in lines for word in set(WORD.findall(line)))
        word = max(counts, key=lambda w: (counts[w], w))
        other = f"{word}{self.rng.choice(('_2', 's', '_new', 'Next'))}"
        where = [i for i, line in enumerate(lines) if re.search(rf"\b{word}\b", line)]
        low, high = where[0], where[-1] + 1
        old = lines[low:high]
        new = [re.sub(rf"\b{word}\b", other, line) for line in old]
        rows = tuple(enumerate(new, first + low + 1))
        edit = Action("edit", self.name, "", first=first + low + 1, old="\n".join(old), new="\n".join(new), rows=rows)
        return [
            Turn(user=f"in {self.name} line {first + 1}-{first + len(lines)}: {word} -> {other}, only there"),
            Turn(actions=(self._read(first, lines),)),
            Turn(thought=f"{word} stands on {len(where)} lines of the part.", actions=(edit,)),
            Turn(words=f"Replaced on {len(where)} lines, {first + low + 1} to {first + high}, and nowhere else."),
        ]

    def _review(self) -> list[Turn]:
        first, lines = self._part(self.rng.randrange(20, 36))
        cut = self.rng.randrange(4, len(lines) - 6)
        gone = lines[cut : cut + 3]
        body = [" " + line for line in lines[cut - 3 : cut]]
        body += ["-" + line for line in gone] + [" " + line for line in lines[cut + 3 : cut + 6]]
        head = f"diff --git a/{self.name} b/{self.name}\n@@ -{first + cut - 2},9 +{first + cut - 2},6 @@"
        kept = {word for line in lines[:cut] + lines[cut + 3 :] for word in WORD.findall(line)}
        lost = ", ".join(f"`{w}`" for w in sorted({w for line in gone for w in WORD.findall(line)} - kept)[:4])
        about = f"Nothing near them mentions {lost} again." if lost else "No name is lost with them."
        return [
            Turn(user=self.rng.choice((f"review the change to {self.name}", "anything wrong with this diff?"))),
            Turn(actions=(Action("run", command=f"git diff {self.name}", output="\n".join([head, *body])),)),
            Turn(
                words=f"It takes three lines out of `{self.name}`, {first + cut + 1} to {first + cut + 3}:\n\n```\n"
                + "\n".join(gone)
                + f"\n```\n\n{about} I would keep them unless the commit says why they go."
            ),
        ]
