"""Where messages lie in a prompt: marks in their texts, carried by another rendering to where they end up.

A rendering of the messages before another one is no beginning of the whole: templates drop reasoning, join results and
refuse halves. So all of it is rendered once more, with a mark that has the message's number at both ends of each of its
texts. Where that is the prompt but for the marks, they say what each message took. Where the template looked at an end
of a text (some look for `<tool_response>`), one mark goes into the middle of each; and where that changes the prompt,
too, nothing is known of where messages are, and all of it is theirs.

What a message took reaches from the last mark of others before it to the first one behind it. So it holds its header,
the calls without a text, and its neighbors' headers: more than it is, and never less.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.ground.errors import RequestError
from engine.text.tokenizer import Tokenizer

BEFORE = -1  # the number of what stands before the messages: definitions of tools
Chat: TypeAlias = list[dict[str, Any]]
Span: TypeAlias = tuple[int, int]
_Place: TypeAlias = Callable[[str, str], str]  # a text with a mark in it

_BEGIN, _END = "\ufdd0\ufdd3", "\ufdd4"  # Unicode keeps them for the inner use of programs
_DIGITS = str.maketrans({str(n): chr(0xFDE0 + n) for n in range(10)})
# As they are, and as JSON has them that some templates write in ASCII.
_FOUND = re.compile(r"\ufdd0\ufdd3[\ufde0-\ufde9]+\ufdd4|\\ufdd0\\ufdd3(?:\\ufde[0-9])+\\ufdd4")
_DIGIT = re.compile(r"[\ufde0-\ufde9]|(?<=\\ufde)[0-9]")


class Marks:
    """Where numbered things lie in a text of n characters: `numbers` of them, at `places`, int64 [marks] each."""

    def __init__(self, numbers: Sequence[int], places: Sequence[int], n: int) -> None:
        self.numbers, self.places, self._n = np.array(numbers, np.int64), np.array(places, np.int64), n

    def around(self, begin: int, end: int) -> Span:
        """What the things with numbers [begin, end) take, [from, to) in characters; at least that."""
        own = (begin <= self.numbers) & (self.numbers < end)
        others = self.places[~own]
        if own.any():
            first, last = self.places[own].min(), self.places[own].max()
        else:  # between its neighbors in number
            last, first = self.places[self.numbers < begin], self.places[self.numbers >= end]
            between = int(np.max(last, initial=0)), int(np.min(first, initial=self._n))
            return min(between), max(between)
        before, behind = others[others <= first], others[others >= last]
        return int(np.max(before, initial=0)), int(np.min(behind, initial=self._n))


def find(prompt: str, render: Callable[[Chat, list[Any]], str], chat: Chat, tools: list[Any]) -> Marks | None:
    """Where the messages of `chat`, by their numbers, and `tools` lie in their rendering; None: it cannot be known."""
    for place in (_ends, _middle):
        marked = [_message(entry, _mark(i), place) for i, entry in enumerate(chat)]
        try:
            rendering = render(marked, [_tool(tool, _mark(BEFORE), place) for tool in tools])
        except RequestError:  # the template looked at a text, too
            continue
        pieces = _FOUND.split(rendering)
        if "".join(pieces) == prompt:
            places = np.cumsum([len(piece) for piece in pieces])[:-1]
            return Marks([_number(mark) for mark in _FOUND.findall(rendering)], places.tolist(), len(prompt))
    return None


def _mark(number: int) -> str:
    return f"{_BEGIN}{str(number - BEFORE).translate(_DIGITS)}{_END}"


def _number(mark: str) -> int:
    return int("".join(str(ord(digit) & 15) for digit in _DIGIT.findall(mark))) + BEFORE


def _ends(text: str, mark: str) -> str:
    """A text with a mark at both ends, inside of the blanks there, which templates trim."""
    core = text.strip()
    begin = text.index(core)
    return f"{text[:begin]}{mark}{core}{mark}{text[begin + len(core) :]}" if core else text


def _middle(text: str, mark: str) -> str:
    core = text.strip()
    at = text.index(core) + len(core) // 2
    if text[:at].endswith(_BEGIN[0]):  # a mark that is there stays whole
        at += 1
    return f"{text[:at]}{mark}{text[at:]}" if core else text


def _message(entry: Mapping[str, Any], mark: str, place: _Place) -> dict[str, Any]:
    """An entry of a chat with marks in its texts and in those of its calls' arguments."""
    made = {key: place(text, mark) if key in _TEXTS else text for key, text in entry.items()}
    if calls := entry.get("tool_calls"):
        made["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": _texts(call["function"]["arguments"], mark, place)}}
            for call in calls
        ]
    return made


_TEXTS = ("content", "reasoning_content", "reasoning", "thinking")


def _texts(value: Any, mark: str, place: _Place) -> Any:
    if isinstance(value, str):
        return place(value, mark)
    if isinstance(value, dict):
        return {key: _texts(item, mark, place) for key, item in value.items()}
    return [_texts(item, mark, place) for item in value] if isinstance(value, list) else value


def _tool(value: Any, mark: str, place: _Place) -> Any:
    """A tool's definition with marks in what describes it; the rest of it may be looked at by the template."""
    if isinstance(value, dict):
        return {
            key: place(item, mark) if key == "description" and isinstance(item, str) else _tool(item, mark, place)
            for key, item in value.items()
        }
    return [_tool(item, mark, place) for item in value] if isinstance(value, list) else value


class TokenSpans:
    """Which tokens hold characters of a rendering that was tokenized piece by piece.

    pieces: as `Tokenizer.split_special` made them of it; tokens: of a piece; plain: a piece as it was encoded. n: how
    many tokens there are.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        pieces: Sequence[int | str],
        tokens: Callable[[int | str], npt.NDArray[np.int32]],
        plain: Callable[[str], str],
    ) -> None:
        self._tokenizer, self._pieces, self._of, self._plain = tokenizer, pieces, tokens, plain
        self._characters, self._tokens = [0], [0]  # before each piece
        for piece in pieces:
            name = tokenizer.decode([piece]) if isinstance(piece, int) else piece
            self._characters.append(self._characters[-1] + len(name))
            self._tokens.append(self._tokens[-1] + len(tokens(piece)))
        self.n = self._tokens[-1]
        # Of pieces that were looked into: where each token ends, in bytes, and what makes text the bytes of tokens.
        self._ends: dict[int, tuple[npt.NDArray[np.int64], Callable[[str], bytes] | None]] = {}

    def tokens(self, begin: int, end: int) -> Span:
        """The tokens [from, to) that hold the characters [begin, end), and at their ends those that hold a part."""
        return self._at(begin)[0], self._at(end)[1]

    def _at(self, place: int) -> Span:
        """How many tokens end at a place or before it, and how many begin before it."""
        i = bisect.bisect_right(self._characters, place) - 1
        within = place - self._characters[i]
        if within == 0:
            return self._tokens[i], self._tokens[i]
        piece, n = self._pieces[i], self._tokens[i + 1] - self._tokens[i]
        first, last = self._inside(i, piece, within) if isinstance(piece, str) else (0, n)
        return self._tokens[i] + first, self._tokens[i] + last

    def _inside(self, i: int, piece: str, within: int) -> Span:
        """The same within a piece; none and all of it where its tokens are not its bytes, one by one."""
        if i not in self._ends:
            raw = [self._tokenizer.decode_bytes([token]) for token in self._of(piece).tolist()]
            same = (way for way in (_bytes, _spaced) if b"".join(raw) == way(self._plain(piece)))
            self._ends[i] = np.cumsum([len(one) for one in raw]), next(same, None)
        ends, made = self._ends[i]
        if made is None:
            return 0, len(ends)
        at = len(made(self._plain(piece[:within])))
        full = int(np.searchsorted(ends, at, "right"))
        return full, full + int(full < len(ends) and at > (ends[full - 1] if full else 0))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _spaced(text: str) -> bytes:
    """The bytes of text as gemma4 gives it back, which stores spaces as this sign."""
    return _bytes(text.replace("\u2581", " "))
