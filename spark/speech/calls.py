"""Tool calls in the formats of the models, read as they come.

A reader gets the text after the mark that opens a call, in pieces. It gives out a CallStart as soon as nothing can
keep it from being a call, then the arguments as JSON while they come, and a CallEnd. Whatever is given out, the
arguments so far begin a JSON object. What turns out not to be a call before it has started is the reader's `raw`
text, whole. However the text is cut, the parts come to the same.

- Hermes, Qwen3: `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`
- XML, Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`
- Laguna: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`
- Gemma 4: `<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:1}<tool_call|>`

In the second and third a value is bare text, whose type is that of the tool's JSON schema.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from spark.speech.conversation import CallArguments, CallEnd, CallStart, Part
from spark.speech.dialect import CallFormat
from spark.speech.tool_values import PYTHON, coerced, no_constant, types

Schemas = Mapping[str, Mapping[str, Any]]  # of each tool's arguments


def openings(form: CallFormat, schemas: Schemas) -> tuple[str, ...]:
    """The marks that open a call."""
    if form == "gemma4":
        return ("<|tool_call>",)
    # Qwen3-Coder forgets `<tool_call>` now and then.
    return ("<tool_call>", *(f"<function={name}>" for name in schemas)) if form == "xml" else ("<tool_call>",)


def reader(form: CallFormat, opening: str, schemas: Schemas) -> Reader:
    """A reader for the call that `opening` has opened."""
    if form == "hermes":
        return _Hermes(opening)
    if form == "gemma4":
        return _Gemma(opening)
    return _Tagged(_XML if form == "xml" else _LAGUNA, opening, schemas)


def beginning(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a mark begins."""
    firsts, longest = shape(tuple(marks))
    for n in range(min(len(text), longest - 1), 0, -1):
        if text[-n] in firsts and any(mark.startswith(text[-n:]) for mark in marks):
            return n
    return 0


@lru_cache(maxsize=64)
def shape(marks: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """First letters of marks, and the length of the longest: there may be hundreds, and each token is looked at."""
    return frozenset(mark[0] for mark in marks), max(map(len, marks), default=0)


class Reader(ABC):
    """Reads one call, and passes over what comes between its arguments and its end.

    over: it has ended, and `rest` follows it. started: it is a call, otherwise `raw` is its text. may_start: as far as
    it goes, it is how a call begins.
    """

    end = "</tool_call>"

    def __init__(self, opening: str) -> None:
        self.over = self.started = False
        self.raw, self.rest = opening, ""
        self._held = ""  # not read yet
        self._skipping = False

    def push(self, text: str) -> list[Part]:
        """Take a piece; what is certain now."""
        if not self.started:
            self.raw += text
        self._held += text
        parts: list[Part] = []
        if not self._skipping:
            self._read(parts)
        if self._skipping and not self.over:
            at = self._held.find(self.end)
            if at >= 0:
                self._leave(at + len(self.end))
        return parts

    def flush(self, cut: bool) -> list[Part]:
        """End the reply inside the call; `cut`: not by the model's own choice."""
        parts: list[Part] = []
        if not self._skipping:
            self._finish(parts, cut)
        self.over = True
        return parts

    @property
    @abstractmethod
    def may_start(self) -> bool:
        """Whether what was read so far can be the beginning of a call."""

    @abstractmethod
    def _read(self, parts: list[Part]) -> None:
        """Read what can be read of the held text."""

    def _finish(self, parts: list[Part], cut: bool) -> None:
        if self.started:
            parts.append(CallEnd(False))

    def _start(self, name: str, parts: list[Part]) -> None:
        self.started, self.raw = True, ""
        parts.append(CallStart(f"call_{secrets.token_hex(12)}", name))

    def _leave(self, at: int) -> None:
        """End the call at a place of the held text."""
        if not self.started:
            self.raw = self.raw[: len(self.raw) - len(self._held) + at]
        self.rest, self._held, self.over = self._held[at:], "", True

    def _skip(self, parts: list[Part], complete: bool = True) -> None:
        parts.append(CallEnd(complete))
        self._skipping = True


def _arguments(text: str, parts: list[Part]) -> None:
    if text:
        parts.append(CallArguments(text))


def _escaped(text: str) -> str:
    """Text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


# --- JSON ---------------------------------------------------------------------------------------

_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_BLANKS = re.compile(r"[ \t\r\n]+")
_WORD = re.compile(r"[^\s,:\[\]{}\"]+")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')


class JSONObject:
    """Gives the text of a JSON object out again as far as it is valid.

    Line breaks and backslashes that strings should not have are escaped, Python's words for constants replaced. done,
    failed: it has ended, or is no JSON; `rest` follows.
    """

    def __init__(self) -> None:
        self.done = self.failed = False
        self.rest = ""
        self._held = ""
        self._stack = ""
        self._in_string = False
        self._wanted = "value"  # value, value or end, key, key or end, colon, comma

    def push(self, text: str) -> str:
        """Take a piece; what of it is valid."""
        text, self._held = self._held + text, ""
        made: list[str] = []
        i = 0
        while i < len(text) and not (self.done or self.failed):
            n = self._string(text, i, made) if self._in_string else self._outside(text, i, made)
            if n == 0 and not self.failed:
                self._held = text[i:]
                break
            i += n
        if self.done or self.failed:
            self.rest = text[i:]
        return "".join(made)

    def _string(self, text: str, i: int, made: list[str]) -> int:
        run = _RUN.match(text, i)
        if run:
            made.append(run[0])
            return len(run[0])
        letter = text[i]
        if letter == '"':
            self._in_string = False
            made.append('"')
            self._wanted = "colon" if self._wanted.startswith("key") else "comma"
            return 1
        if letter == "\\":
            escape = _ESCAPE.match(text, i)
            if escape:
                made.append(escape[0])
                return len(escape[0])
            if text[i + 1 : i + 2] in ("", "u") and len(text) - i < 6 and '"' not in text[i:]:
                return 0
            made.append("\\\\")
            return 1
        made.append(_escaped(letter))
        return 1

    def _outside(self, text: str, i: int, made: list[str]) -> int:
        blanks = _BLANKS.match(text, i)
        if blanks:
            made.append(blanks[0])
            return len(blanks[0])
        letter, wanted = text[i], self._wanted
        if letter == '"' and (wanted.startswith("key") or wanted.startswith("value")):
            self._in_string = True
        elif letter in "{[" and (wanted.startswith("value")) and (self._stack or letter == "{"):
            self._stack += letter
            self._wanted = "key or end" if letter == "{" else "value or end"
        elif letter in "}]" and (wanted == "comma" or wanted.endswith("end")) and self._stack[-1:] + letter in "{}[]":
            self._stack = self._stack[:-1]
            self.done = not self._stack
            self._wanted = "comma"
        elif letter == ":" and wanted == "colon":
            self._wanted = "value"
        elif letter == "," and wanted == "comma":
            self._wanted = "key" if self._stack[-1] == "{" else "value"
        elif wanted.startswith("value") and self._stack:
            return self._word(text, i, made)
        else:
            self.failed = True
            return 0
        made.append(letter)
        return 1

    def _word(self, text: str, i: int, made: list[str]) -> int:
        word = _WORD.match(text, i)
        if word and word.end() == len(text):
            return 0  # it may go on
        scalar = PYTHON.get(word[0], word[0]) if word else ""
        if word is None or not _SCALAR.fullmatch(scalar):
            self.failed = True
            return 0
        made.append(scalar)
        self._wanted = "comma"
        return len(word[0])


class _Hermes(Reader):
    """Streams where the name comes first and the arguments are an object; otherwise all of it is looked at as one."""

    _head = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\<]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

    def __init__(self, opening: str) -> None:
        super().__init__(opening)
        self._json = JSONObject()

    @property
    def may_start(self) -> bool:
        """Whether an object may begin here: `{`, or white space before it."""
        return self._held.lstrip()[:1] in ("", "{")

    def _read(self, parts: list[Part]) -> None:
        if not self.started:
            head = self._head.match(self._held)
            if head is None:
                at = self._held.find(self.end)
                if at >= 0:
                    self._whole(self._held[:at], parts)
                    self._leave(at + len(self.end))
                return
            self._start(head[1], parts)
            self._held = self._held[head.end() :]
        text, self._held = self._held, ""
        _arguments(self._json.push(text), parts)
        if self._json.done or self._json.failed:
            self._held = self._json.rest
            self._skip(parts, self._json.done)

    def _finish(self, parts: list[Part], cut: bool) -> None:
        if not self.started:
            self._whole(self._held, parts)
        else:
            super()._finish(parts, cut)

    def _whole(self, body: str, parts: list[Part]) -> None:
        try:
            made = json.loads(body, strict=False, parse_constant=no_constant)  # models leave line breaks in strings
            name, arguments = made["name"], made.get("arguments", {})
            if isinstance(arguments, str):
                arguments = json.loads(arguments, strict=False, parse_constant=no_constant)
            if not isinstance(name, str) or not name or not isinstance(arguments, dict):
                raise TypeError
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return
        self._start(name, parts)
        _arguments(text, parts)
        parts.append(CallEnd())


# --- values between tags ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tags:
    """A format with bare values.

    head: up to the first field; begun: of it, what there may be so far. field, key: how a field begins, and all that
    comes before its value. shuts: what ends a value, where one of `follow` comes next. close: what ends the fields.
    trim: values stand between line breaks.
    """

    head: re.Pattern[str]
    begun: re.Pattern[str]
    field: str
    key: re.Pattern[str]
    shuts: str
    follow: tuple[str, ...]
    close: tuple[str, ...]
    trim: bool


_XML = _Tags(
    re.compile(r"\s*<function=([^<>\s]+)>"),
    re.compile(r"\s*(?:<function=[^<>\s]*|<(?:f(?:u(?:n(?:c(?:t(?:i(?:on?)?)?)?)?)?)?)?)?"),
    "<parameter=",
    re.compile(r"<parameter=([^<>]*)>"),
    "</parameter>",
    ("<parameter=", "</function>", "</tool_call>"),
    ("</function>", "</tool_call>"),
    True,
)
_LAGUNA = _Tags(
    re.compile(r"\s*([^<>\s]+)\s*(?=<)"),
    re.compile(r"\s*[^<>\s]*\s*"),
    "<arg_key>",
    re.compile(r"<arg_key>([^<>]*)</arg_key>\s*<arg_value>"),
    "</arg_value>",
    ("<arg_key>", "</tool_call>"),
    ("</tool_call>",),
    False,
)


class _Tagged(Reader):
    """Streams values that are strings; the others are read whole. A call starts with its first field or its end."""

    def __init__(self, tags: _Tags, opening: str, schemas: Schemas) -> None:
        super().__init__(opening)
        self._tags, self._schemas = tags, schemas
        self._name = ""
        self._schema: Mapping[str, Any] = {}
        self._state: Literal["head", "between", "value", "closing"] = "head"
        self._types: frozenset[str] = frozenset()  # of the value
        self._value: str | None = None  # of a type that cannot be streamed
        self._first = True  # no field came yet
        self._fresh = False  # nothing of the value was read yet
        if opening != self.end.replace("/", ""):
            self._held = opening  # which names the tool

    @property
    def may_start(self) -> bool:
        """Whether the tags so far can be those of a call."""
        if self._state == "head":
            return self._tags.begun.fullmatch(self._held) is not None
        marks = (self._tags.field, *self._tags.close)
        return self._held.startswith(self._tags.field) or any(mark.startswith(self._held) for mark in marks)

    def _read(self, parts: list[Part]) -> None:
        steps = {
            "head": self._read_head,
            "between": self._read_between,
            "value": self._read_value,
            "closing": self._read_closing,
        }
        while not (self.over or self._skipping) and steps[self._state](parts):
            pass

    def _finish(self, parts: list[Part], cut: bool) -> None:
        if self._state == "closing":
            return
        if self._state == "value":
            at = self._held.find(self._tags.shuts)
            if at < 0:
                self._give(self._held, parts)
                parts.append(CallEnd(False))
                return
            self._shut(at, parts)
        if self.started and not cut:
            self._close(parts)
        elif self.started:
            parts.append(CallEnd(False))

    def _read_head(self, parts: list[Part]) -> bool:
        head = self._tags.head.match(self._held)
        if head is None:
            self._leave_if_ended()
            return False
        self._name = head[1]
        self._schema = self._schemas.get(self._name, {})
        self._held = self._held[head.end() :]
        self._state = "between"
        return True

    def _read_between(self, parts: list[Part]) -> bool:
        self._held = self._held.lstrip()
        tags = self._tags
        close = next((mark for mark in tags.close if self._held.startswith(mark)), "")
        # A lone word between Laguna's marks is only taken for a call if there is such a tool.
        if close and (self.started or tags is _XML or self._name in self._schemas):
            self._close(parts)
            self._held = self._held[len(close) :]
            self._state = "closing"
            if close == self.end:
                self._leave(0)
            return True
        if self._held.startswith(tags.field):
            key = tags.key.match(self._held)
            if key:
                self._open(key[1], parts)
                self._held = self._held[key.end() :]
                return True
            if self.end not in self._held:
                return False
        elif any(mark.startswith(self._held) for mark in (tags.field, *tags.close)):
            return False
        if self.started:
            self._skip(parts, False)
        else:
            self._leave_if_ended()
        return False

    def _read_value(self, parts: list[Part]) -> bool:
        tags = self._tags
        if self._fresh and self._held:
            self._fresh = False  # also where nothing but the line break is there yet: the next one is the value's
            self._held = self._held.removeprefix("\n") if tags.trim else self._held
        at = self._held.find(tags.shuts)
        if at < 0:
            marks = ("\n" + tags.shuts, tags.shuts) if tags.trim else (tags.shuts,)
            sure = len(self._held) - beginning(self._held, marks)
            self._give(self._held[:sure], parts)
            self._held = self._held[sure:]
            return False
        after = self._held[at + len(tags.shuts) :].lstrip()
        if any(after.startswith(mark) for mark in tags.follow):
            self._shut(at, parts)
            return True
        if any(mark.startswith(after) for mark in tags.follow):  # not to be told yet
            sure = at - 1 if tags.trim and self._held[:at].endswith("\n") else at
            self._give(self._held[:sure], parts)
            self._held = self._held[sure:]
            return False
        sure = at + len(tags.shuts)  # it belongs to the value
        self._give(self._held[:sure], parts)
        self._held = self._held[sure:]
        return True

    def _read_closing(self, parts: list[Part]) -> bool:
        """Past `</tool_call>`, which is not missed where it is missing."""
        rest = self._held.lstrip()
        if rest.startswith(self.end):
            self._held = rest
            self._leave(len(self.end))
        elif not self.end.startswith(rest):
            self._leave(0)
        return False

    def _leave_if_ended(self) -> None:
        at = self._held.find(self.end)
        if at >= 0:
            self._leave(at + len(self.end))

    def _open(self, key: str, parts: list[Part]) -> None:
        if not self.started:
            self._start(self._name, parts)
        self._types = types(self._schema, key)
        streamed = self._types <= {"string"}
        self._value = None if streamed else ""
        before = "{" if self._first else ", "
        quote = '"' if streamed else ""
        _arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {quote}", parts)
        self._state, self._first, self._fresh = "value", False, True

    def _give(self, text: str, parts: list[Part]) -> None:
        if self._value is None:
            _arguments(_escaped(text), parts)
        else:
            self._value += text

    def _shut(self, at: int, parts: list[Part]) -> None:
        text, self._held = self._held[:at], self._held[at + len(self._tags.shuts) :]
        self._give(text.removesuffix("\n") if self._tags.trim else text, parts)
        if self._value is None:
            _arguments('"', parts)
        else:
            _arguments(coerced(self._value, self._types), parts)
        self._state = "between"

    def _close(self, parts: list[Part]) -> None:
        if not self.started:
            self._start(self._name, parts)
        _arguments("{}" if self._first else "}", parts)
        parts.append(CallEnd())
        self._state = "closing"


# --- Gemma 4 -----------------------------------------------------------------------------------------

_QUOTE = '<|"|>'
_GEMMA_END = "<tool_call|>"


class _Gemma(Reader):
    """Its notation is JSON with other quotes and bare keys: it is written as JSON, and checked as JSON."""

    end = _GEMMA_END
    _opening = re.compile(r"\s*call:\s*([^\s{}<>]+)\s*(?=\{)")
    _begun = re.compile(r"\s*(?:call:\s*[^\s{}<>]*\s*|c(?:a(?:ll?)?)?)?")
    _bare = re.compile(r"[^<,:\[\]{}]+")
    _named = re.compile(r"([^<:]+):")  # brackets and commas may be in a key: `filter[status]`

    def __init__(self, opening: str) -> None:
        super().__init__(opening)
        self._json = JSONObject()
        self._in_string = False
        self._stack = ""
        self._key = False  # a key is next

    @property
    def may_start(self) -> bool:
        """Whether `call:` and a name may begin here."""
        return self._begun.fullmatch(self._held) is not None

    def _read(self, parts: list[Part]) -> None:
        if not self.started:
            head = self._opening.match(self._held)
            if head is None:
                at = self._held.find(self.end)
                if at >= 0:
                    self._leave(at + len(self.end))
                return
            self._start(head[1], parts)
            self._held = self._held[head.end() :]
        while self._held and not self._skipping:
            text, n = self._in_quotes() if self._in_string else self._outside()
            if n == 0:
                return
            self._held = self._held[n:]
            _arguments(self._json.push(text), parts)
            if self._json.done or self._json.failed:
                self._skip(parts, self._json.done)

    def _in_quotes(self) -> tuple[str, int]:
        """JSON text for the beginning of the held text, and the length of that."""
        at = self._held.find(_QUOTE)
        if at == 0:
            self._in_string = False
            return '"', len(_QUOTE)
        sure = at if at > 0 else len(self._held) - beginning(self._held, (_QUOTE,))
        return _escaped(self._held[:sure]), sure

    def _outside(self) -> tuple[str, int]:
        held = self._held
        letter = held[0]
        if letter.isspace():
            return " ", 1
        if letter == "<":
            if held.startswith(_QUOTE):
                self._in_string, self._key = True, False
                return '"', len(_QUOTE)
            return ("<", 1) if not _QUOTE.startswith(held) and not _GEMMA_END.startswith(held) else ("", 0)
        if self._key and letter not in ",{}":
            if ":" not in held and "<" not in held:
                return "", 0
            if named := self._named.match(held):
                self._key = False
                return _quoted_key(named[1]), named.end(1)
        if letter in ",:[]{}":
            if letter in "{[":
                self._stack += letter
            elif letter in "]}":
                self._stack = self._stack[:-1]
            self._key = letter == "{" or (letter == "," and self._stack[-1:] == "{")
            return letter, 1
        bare = self._bare.match(held)
        assert bare is not None
        if bare.end() == len(held):
            return "", 0  # it may go on
        word, key, self._key = bare[0].strip(), self._key, False
        scalar = PYTHON.get(word, word)
        if key or not _SCALAR.fullmatch(scalar):
            return _quoted_key(word), bare.end()
        return scalar + " ", bare.end()


def _quoted_key(word: str) -> str:
    return json.dumps(word.strip().strip('"'), ensure_ascii=False)
