"""What a model wrote, taken apart as it comes: reasoning, visible text, tool calls, stop strings.

Reasoning stands between the marks of the model's dialect at the beginning, calls are as calls.py has them. Blanks
beside these marks belong to nobody and are dropped; all other text is given out as it is, also what only looks like a
call. Stop strings are looked for in visible text alone. However a reply is cut, the outcome is the same. Text is given
out with its place in the reply (`Text.at`), by which `spark/speech/logprobs.py` finds its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from spark.speech import calls
from spark.speech.conversation import CallEnd, Part, Text
from spark.speech.dialect import Dialect


class ReplyParser:
    """Takes one reply apart.

    stops: strings that end it and are left out. tools: definitions of those that may be called. thinking: the prompt
    has opened reasoning, "open", or shut it, "shut", or ends within the reply, "begun", so that blanks are its own; "":
    none of these. single_call: the reply ends with its first call.
    calls_only: there is to be a call, and no text. plain: nothing but stop strings is looked for.
    `stop`: the stop string that came. `ended`: nothing more is given out. `called`: there was a whole tool call.
    `cut`: the last call is not whole; of one that was cut before its name was known nothing is given out.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        stops: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: Literal["open", "shut", "begun", ""] = "",
        single_call: bool = False,
        calls_only: bool = False,
        plain: bool = False,
    ) -> None:
        self.stop: str | None = None
        self.ended = self.called = self.cut = False
        self._dialect, self._single, self._calls_only = dialect, single_call, calls_only
        self._schemas = {tool["function"]["name"]: _parameters(tool) for tool in tools}
        self._stops = tuple(stops)
        self._openings = calls.openings(dialect.calls, self._schemas) if tools else ()
        self._reader: calls.Reader | None = None
        self._state: Literal["reasoning", "content"] = "reasoning" if thinking == "open" else "content"
        self._fresh = thinking != "open" and not plain  # there were only blanks so far, and reasoning may begin
        self._beside_mark = thinking in ("open", "shut")  # there were only blanks since a mark
        self._held = ""  # may contain a mark, or the beginning of one
        self._pushed = 0  # characters
        self._blanks = ""  # text if more text follows, nothing if a mark does
        self._blanks_end = 0  # where they end, in characters of the reply

    @property
    def reasoning(self) -> bool:
        """Whether reasoning goes on."""
        return self._state == "reasoning"

    def push(self, text: str) -> list[Part]:
        """Take a piece of the reply; the parts that are certain now."""
        self._held += text
        self._pushed += len(text)
        parts: list[Part] = []
        while not self.ended and (self._read_call(parts) if self._reader else self._pass_mark(parts)):
            pass
        return parts

    def flush(self, cut: bool = False) -> list[Part]:
        """End the reply, `cut` where the model would have gone on; the parts that were held back."""
        parts: list[Part] = []
        if not self.ended:
            if self._reader is not None:
                found = self._reader.flush(cut)
                self._keep(found, parts)
                if not self._reader.started and cut and self._reader.may_start:
                    self.cut = True
                elif not self._reader.started:
                    parts.append(_ending(self._blanks + self._reader.raw, self._pushed))
                self._blanks = ""
            else:
                end = self._pushed
                if cut and self._calls_only and self._state == "content":  # the beginning of the mark of a call
                    n = calls.beginning(self._held, self._openings)
                    self._held = self._held[: len(self._held) - n]
                    end -= n
                self._text(self._held, end, parts)
            self._end(parts)
        return parts

    def _read_call(self, parts: list[Part]) -> bool:
        """Have the reader read what is held; whether the call is over."""
        assert self._reader is not None
        text, self._held = self._held, ""
        self._keep(self._reader.push(text), parts)
        if not self._reader.over:
            return False
        self._held = self._reader.rest
        if self._reader.started:
            self._blanks, self._beside_mark = "", True
            if self._single:
                self._end(parts)
        else:
            parts.append(_ending(self._blanks + self._reader.raw, self._pushed - len(self._held)))
            self._blanks, self._beside_mark = "", False
        self._reader = None
        return True

    def _keep(self, found: list[Part], parts: list[Part]) -> None:
        parts += found
        for part in found:
            if isinstance(part, CallEnd):
                self.called, self.cut = self.called or part.complete, not part.complete

    def _pass_mark(self, parts: list[Part]) -> bool:
        """Go past the next mark in the held text; False where none is complete."""
        opens, shuts = self._dialect.opens, self._dialect.shuts
        if self._state == "reasoning":
            marks: tuple[str, ...] = (shuts,)
        else:
            marks = (*self._stops, *self._openings, *([opens] if self._fresh else []))
        # The one that is complete first counts, or the outcome would depend on the pieces.
        found = []
        if any(letter in self._held for letter in calls.shape(marks)[0]):
            found = [(at + len(mark), at, mark) for mark in marks if (at := self._find(mark)) >= 0]
        if not found:
            sure = len(self._held) - calls.beginning(self._held, marks)
            text, self._held = self._held[:sure], self._held[sure:]
            self._text(text, self._pushed - len(self._held), parts)
            return False
        end, start, mark = min(found)
        before, self._held = self._held[:start], self._held[end:]
        self._text(before, self._pushed - len(self._held) - len(mark), parts)
        if self._state == "reasoning" or (self._fresh and mark == opens):
            self._state = "content" if self._state == "reasoning" else "reasoning"
            self._blanks = ""
            self._beside_mark, self._fresh = True, False
        elif mark in self._openings:
            self._reader, self._fresh = calls.reader(self._dialect.calls, mark, self._schemas), False
        else:
            self._end(parts)
            self.stop = mark
        return True

    def _find(self, mark: str) -> int:
        at = self._held.find(mark)
        opening = self._state == "content" and mark == self._dialect.opens
        return -1 if opening and self._held[: max(at, 0)].strip() else at

    def _text(self, text: str, end: int, parts: list[Part]) -> None:
        """Give out text that ends at `end`, in characters of the reply, but for the blanks at its end."""
        text = self._blanks + text
        if self._beside_mark:
            text = text.lstrip()
        solid = text.rstrip()
        self._blanks, self._blanks_end = text[len(solid) :], end
        if solid:
            self._beside_mark = self._fresh = False
            parts.append(Text(self._state, solid, at=end - len(text)))

    def _end(self, parts: list[Part]) -> None:
        if self._blanks and self._state == "content":
            parts.append(_ending(self._blanks, self._blanks_end))
        self._held = self._blanks = ""
        self.ended = True


def _ending(text: str, end: int) -> Text:
    """Visible text that ends at `end`."""
    return Text("content", text, at=end - len(text))


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found = tool["function"].get("parameters")
    return found if isinstance(found, Mapping) else {}
