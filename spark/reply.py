"""What a model wrote, taken apart as it comes: reasoning, visible text, tool calls, stop strings.

Reasoning stands between `<think>` and `</think>` at the beginning, a tool call is JSON between
`<tool_call>` and `</tool_call>`, as Qwen's and Hermes' templates have it. Blanks beside these four
markers belong to nobody and are dropped; all other text is given out as it is. Stop strings are looked
for in visible text alone. However a reply is cut into pieces, the outcome is the same.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

_OPEN_THINK, _SHUT_THINK = "<think>", "</think>"
_OPEN_CALL, _SHUT_CALL = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of reasoning or of visible text."""

    kind: Literal["reasoning", "content"]
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


Part: TypeAlias = Text | Call


class ReplyParser:
    """Takes one reply apart.

    stops: strings that end it and are left out. tools: look for tool calls. thinking: the prompt has
    opened `<think>` already. `stopped`: a stop string came, and nothing more is given out. `called`: there
    was a tool call.
    """

    def __init__(self, *, stops: Sequence[str] = (), tools: bool = False, thinking: bool = False) -> None:
        self.stopped = False
        self.called = False
        self._markers = (*stops, _OPEN_CALL) if tools else tuple(stops)
        self._state: Literal["reasoning", "content", "call"] = "reasoning" if thinking else "content"
        self._fresh = not thinking  # there were only blanks so far, and reasoning may begin
        self._beside_marker = thinking  # there were only blanks since a marker
        self._held = ""  # may contain a marker, or the beginning of one
        self._blanks = ""  # text if more text follows, nothing if a marker does

    def push(self, text: str) -> list[Part]:
        """Take a piece of the reply; the parts that are certain now."""
        self._held += text
        parts: list[Part] = []
        while not self.stopped and self._pass_marker(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """End the reply; the parts that were held back."""
        parts: list[Part] = []
        if not self.stopped:
            if self._state == "call":  # unfinished, unless only the last marker is missing
                self._call(self._held, "", parts)
            else:
                self._text(self._held, parts)
            self._end(parts)
        return parts

    def _pass_marker(self, parts: list[Part]) -> bool:
        """Go past the next marker in the held text; False where none is complete."""
        if self._state == "content":
            markers = (*self._markers, _OPEN_THINK) if self._fresh else self._markers
        else:
            markers = (_SHUT_THINK,) if self._state == "reasoning" else (_SHUT_CALL,)
        # The one that is complete first counts, or the outcome would depend on the pieces.
        found = [(at + len(marker), at, marker) for marker in markers if (at := self._find(marker)) >= 0]
        if not found:
            if self._state != "call":
                sure = len(self._held) - _beginning(self._held, markers)
                text, self._held = self._held[:sure], self._held[sure:]
                self._text(text, parts)
            return False
        end, start, marker = min(found)
        before, self._held = self._held[:start], self._held[end:]
        if self._state == "call":
            self._call(before, _SHUT_CALL, parts)
        else:
            self._text(before, parts)
        if marker in (_OPEN_THINK, _SHUT_THINK, _OPEN_CALL, _SHUT_CALL):
            self._state = {_OPEN_THINK: "reasoning", _OPEN_CALL: "call"}.get(marker, "content")  # type: ignore[assignment]
            self._blanks = ""
            self._beside_marker, self._fresh = True, False
        else:
            self._end(parts)
            self.stopped = True
        return True

    def _find(self, marker: str) -> int:
        at = self._held.find(marker)
        return -1 if marker == _OPEN_THINK and self._held[: max(at, 0)].strip() else at

    def _text(self, text: str, parts: list[Part]) -> None:
        text = self._blanks + text
        if self._beside_marker:
            text = text.lstrip()
        solid = text.rstrip()
        self._blanks = text[len(solid) :]
        if solid:
            self._beside_marker = self._fresh = False
            parts.append(Text("reasoning" if self._state == "reasoning" else "content", solid))

    def _end(self, parts: list[Part]) -> None:
        if self._blanks and self._state == "content":
            parts.append(Text("content", self._blanks))
        self._held = self._blanks = ""

    def _call(self, body: str, end: str, parts: list[Part]) -> None:
        """Give out a tool call, or, where it is none, the text it was written as."""
        try:
            made = json.loads(body, strict=False)  # models leave line breaks in strings
            name, arguments = made["name"], made.get("arguments", {})
            if isinstance(arguments, str):
                arguments = json.loads(arguments, strict=False)
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            parts.append(Text("content", f"{_OPEN_CALL}{body}{end}"))
            return
        self.called = True
        text = json.dumps(arguments, ensure_ascii=False)
        parts.append(Call(f"call_{secrets.token_hex(12)}", name, text))


def _beginning(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a marker begins."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0)
