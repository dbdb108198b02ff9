"""The line protocol between the daemon and its clients: the messages, their text and their limits.

A message is one line of JSON (UTF-8, no line break inside). Requests go to the daemon's stdin, events
come from its stdout. Every message is a frozen dataclass, and `parse_request(format_line(m)) == m`
(`parse_event` for events). Nothing from outside is trusted: lines and lists are bounded, unknown
operations and fields, duplicate keys, wrong types and values out of range are refused by name.
"""

from __future__ import annotations

import json
import os
import reprlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeAlias

from engine.ground import checks
from engine.ground.checks import Check
from engine.ground.config import EngineConfig
from engine.ground.errors import RequestError, SparkError
from engine.ground.recall import CHECK as RECALL_CHECK
from engine.ground.recall import KVRecall
from engine.ground.sampling import CHECK, GREEDY, Sampling

PROTOCOL = 1
MAX_LINE_BYTES = 1 << 25
MAX_TOKENS = 1 << 20  # tokens of one request
MAX_STOP_TOKENS = 1024
MAX_TOP_LOGPROBS = 20  # what OpenAI's API allows
MAX_SHARED_BY = 1024
MAX_TEXT_CHARS = 4096  # a session id, a path
MAX_GRAMMAR_CHARS = 1 << 20  # schemas of a hundred tools are a tenth of it
MAX_ID = (1 << 53) - 1  # the largest integer that every JSON reader keeps exact
Stage = Literal["compiling kernels", "loading"]
STAGES: tuple[Stage, ...] = ("compiling kernels", "loading")
TOKEN_END = 1 << 31  # token ids lie in [0, TOKEN_END); the engine knows the vocabulary


# --- requests ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate:
    """Continue `tokens` by at most `max_tokens`; answered by Tokens events and one Done.

    stop_tokens: ids that end the generation and are not themselves sent; empty: never stop early;
        None: those of the model.
    grammar: what the text must be, JSON text of at most MAX_GRAMMAR_CHARS that docs/protocol.md ("Grammars")
        describes; None: anything. A stop token can come only where the text is complete, and where nothing can
        follow any more the generation ends without one, `finish_reason` "stop" in both cases.
    reply_from: where in `tokens` the reply so far begins, for penalties that count the reply alone; None: behind them.
    logprobs: how many likeliest tokens, 0 to MAX_TOP_LOGPROBS, are sent with each token beside its own
        log-probability; None: neither. They are the model's: before penalties, temperature and grammar.
    same_prompt_as: id of a running request with the same `tokens`, which is read once for both; where there is none
        (any more), it changes nothing.
    shared_by: how many more requests are to name this one so. Its prompt is kept for them.
    draft: whether tokens may be proposed that are checked beside the one that is due; it changes no token.
    prediction: tokens that may come in the reply, to propose from.
    kv_recall: what decoded tokens read of the context, where the engine reads a part; None: as it does by itself.
    """

    id: int
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop_tokens: tuple[int, ...] | None = None
    grammar: str | None = None
    reply_from: int | None = None
    logprobs: int | None = None
    same_prompt_as: int | None = None
    shared_by: int = 0
    draft: bool = True
    prediction: tuple[int, ...] | None = None
    kv_recall: KVRecall | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Teacher-forced pass over `tokens`; answered by Progress events and one Done.

    generated: marks, a token each, what the model itself would have decoded; None: every token.
    session_id, window: what the trace calls these tokens.
    trace_dir: folder for trace files (`hidden`: with hidden states); None: no trace.
    logprobs: ask for the log-probability of each token.
    count: the tokens whose routing is counted.
    """

    id: int
    tokens: tuple[int, ...]
    generated: tuple[bool, ...] | None = None
    session_id: str = ""
    window: int = 0
    trace_dir: str | None = None
    hidden: bool = False
    logprobs: bool = False
    count: Literal["generated", "all"] = "generated"


@dataclass(frozen=True, slots=True)
class Stats:
    """Ask for the engine's counters; answered by StatsReport."""

    id: int


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """Write the routing counts to `path` (None: the engine's own), reset them, or read them."""

    id: int
    action: Literal["write", "reset", "read"]
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """End request `target`, which answers with an Error of code `cancelled`; answered by Cancelled."""

    id: int
    target: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask for a sign of life, given between two steps of work; answered by Pong."""

    id: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the daemon, cancelling what runs; answered by Bye."""

    id: int


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First line of a daemon; `info` says what it is going to load."""

    protocol: int
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of a stage before Ready: bytes of the model that are loaded, or kernels that are compiled."""

    stage: Stage
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Loaded: `info` is the memory plan and every effective setting, `ctx_tokens` among them."""

    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """The one line of a daemon that was asked for the memory plan alone."""

    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that a Generate request produced, in order, without the stop token.

    logprobs, top: where asked for, of each token its log-probability, and the likeliest as (token, log-probability),
    likeliest first. drafts, recall: as of `Usage`, of the request so far; None where nothing was drafted, all is read.
    """

    id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    top: tuple[tuple[tuple[int, float], ...], ...] | None = None
    drafts: Mapping[str, Mapping[str, int]] | None = None
    recall: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of a request's input has been read; `cached_tokens` of it were not computed."""

    id: int
    done_tokens: int
    total_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Working:
    """A sign of life between steps that produced nothing else; how many requests are unanswered."""

    requests: int


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that serving goes on without, such as a damaged cache file; may come at any time after Ready.

    reason: one word or two with `_` between, the same for all of a kind; message: one line.
    """

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and tokens produced; `cached_tokens` of those read were not computed, an earlier request had been.

    drafts: by source, tokens that were `drafted`, and those of them that were `accepted`, which were produced.
    recall: where a part of the context may be read, how many `tokens` were fed so, KV `blocks` that these had before
    them, those that were `read`, and the shares of softmax mass that were left out, as estimated: `left_out_max` of
    any token, layer and head, `left_out_mean`.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    recall: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds spent on the prompt and on what was produced."""

    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """Last event of a Generate or Score request.

    residency: hits and misses of the request, by layer too where the engine has them.
    finish_reason: of a Generate request: a stop token came, or `max_tokens` were produced.
    nll: of a Score request: the sum of -log p over its generated tokens, in nats.
    logprobs: where asked for: log p of token i given those before it, for i = 1, 2, ...
    """

    id: int
    usage: Usage
    timing: Timing
    residency: Mapping[str, Any]
    finish_reason: Literal["stop", "length"] | None = None
    nll: float | None = None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Error:
    """A failure: of a request, or, with no id, of a line that named none or of the daemon itself."""

    id: int | None
    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class StatsReport:
    """Answer to Stats."""

    id: int
    stats: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Answer to ProfileRequest."""

    id: int
    profile: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Answer to Cancel; `found` is false where `target` was not running (any more)."""

    id: int
    target: int
    found: bool


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to Ping."""

    id: int


@dataclass(frozen=True, slots=True)
class Bye:
    """Answer to Shutdown; the last line of the daemon."""

    id: int


Request: TypeAlias = Generate | Score | Stats | ProfileRequest | Cancel | Ping | Shutdown
Event: TypeAlias = (
    Hello | Loading | Ready | Plan | Tokens | Progress | Working | Warned | Done | Error
    | StatsReport | ProfileReport | Cancelled | Pong | Bye
)  # fmt: skip

# --- their text --------------------------------------------------------------------------------

_ID = checks.integer(0, MAX_ID)
_COUNT = checks.integer(0, MAX_ID)
_SECONDS = checks.number(0.0, 1e12)
_TOKEN = checks.integer(0, TOKEN_END - 1)
_INPUT = checks.integers(0, TOKEN_END - 1, MAX_TOKENS, shortest=1)
_FLOAT = checks.number(-sys.float_info.max, sys.float_info.max)
_ANY_TEXT = checks.text(MAX_LINE_BYTES)
_PATH = checks.path(MAX_TEXT_CHARS)
_TOP = checks.items(checks.items(checks.pair(_TOKEN, _FLOAT), MAX_TOP_LOGPROBS), MAX_TOKENS)

_FIELDS: dict[str, dict[str, tuple[type[Any], dict[str, Check]]]] = {
    "op": {
        "generate": (
            Generate,
            {
                "id": _ID,
                "tokens": _INPUT,
                "max_tokens": checks.integer(1, MAX_TOKENS),
                "sampling": CHECK,
                "stop_tokens": checks.optional(checks.items(_TOKEN, MAX_STOP_TOKENS)),
                "grammar": checks.optional(checks.text(MAX_GRAMMAR_CHARS)),
                "reply_from": checks.optional(checks.integer(0, MAX_TOKENS)),
                "logprobs": checks.optional(checks.integer(0, MAX_TOP_LOGPROBS)),
                "same_prompt_as": checks.optional(_ID),
                "shared_by": checks.integer(0, MAX_SHARED_BY),
                "draft": checks.boolean,
                "prediction": checks.optional(_INPUT),
                "kv_recall": checks.optional(RECALL_CHECK),
            },
        ),
        "score": (
            Score,
            {
                "id": _ID,
                "tokens": _INPUT,
                "generated": checks.optional(checks.items(checks.boolean, MAX_TOKENS)),
                "session_id": checks.text(MAX_TEXT_CHARS),
                "window": checks.integer(0, (1 << 31) - 1),
                "trace_dir": checks.optional(_PATH),
                "hidden": checks.boolean,
                "logprobs": checks.boolean,
                "count": checks.choice("generated", "all"),
            },
        ),
        "stats": (Stats, {"id": _ID}),
        "profile": (
            ProfileRequest,
            {"id": _ID, "action": checks.choice("write", "reset", "read"), "path": checks.optional(_PATH)},
        ),
        "cancel": (Cancel, {"id": _ID, "target": _ID}),
        "ping": (Ping, {"id": _ID}),
        "shutdown": (Shutdown, {"id": _ID}),
    },
    "event": {
        "hello": (Hello, {"protocol": _COUNT, "info": checks.mapping}),
        "loading": (Loading, {"stage": checks.choice(*STAGES), "done": _COUNT, "total": _COUNT}),
        "ready": (Ready, {"info": checks.mapping}),
        "plan": (Plan, {"info": checks.mapping}),
        "tokens": (
            Tokens,
            {
                "id": _ID,
                "tokens": checks.items(_TOKEN, MAX_TOKENS),
                "logprobs": checks.optional(checks.items(_FLOAT, MAX_TOKENS)),
                "top": checks.optional(_TOP),
                "drafts": checks.optional(checks.mapping),
                "recall": checks.optional(checks.mapping),
            },
        ),
        "progress": (
            Progress,
            {"id": _ID, "done_tokens": _COUNT, "total_tokens": _COUNT, "cached_tokens": _COUNT},
        ),
        "working": (Working, {"requests": _COUNT}),
        "warning": (Warned, {"reason": checks.text(MAX_TEXT_CHARS), "message": _ANY_TEXT}),
        "done": (
            Done,
            {
                "id": _ID,
                "usage": checks.record(
                    Usage,
                    {
                        "prompt_tokens": _COUNT,
                        "completion_tokens": _COUNT,
                        "cached_tokens": _COUNT,
                        "drafts": checks.mapping,
                        "recall": checks.optional(checks.mapping),
                    },
                ),
                "timing": checks.record(Timing, {"prefill_s": _SECONDS, "decode_s": _SECONDS}),
                "residency": checks.mapping,
                "finish_reason": checks.optional(checks.choice("stop", "length")),
                "nll": checks.optional(_FLOAT),
                "logprobs": checks.optional(checks.items(_FLOAT, MAX_TOKENS)),
            },
        ),
        "error": (
            Error,
            {"id": checks.optional(_ID), "code": _ANY_TEXT, "message": _ANY_TEXT, "hint": _ANY_TEXT},
        ),
        "stats": (StatsReport, {"id": _ID, "stats": checks.mapping}),
        "profile": (ProfileReport, {"id": _ID, "profile": checks.mapping}),
        "cancelled": (Cancelled, {"id": _ID, "target": _ID, "found": checks.boolean}),
        "pong": (Pong, {"id": _ID}),
        "bye": (Bye, {"id": _ID}),
    },
}
_PARSE = {
    key: {name: checks.record(*cls_and_checks) for name, cls_and_checks in messages.items()}
    for key, messages in _FIELDS.items()
}
_NAME_OF = {cls: (key, name) for key, messages in _FIELDS.items() for name, (cls, _) in messages.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise RequestError(f"field {reprlib.repr(twice)} is given twice")
    return made


def _no_constant(name: str) -> None:
    raise RequestError(f"{name} is not a number of JSON")


def decode(line: bytes, *, errors: Literal["strict", "replace"] = "strict") -> dict[str, Any]:
    """Read one line as a JSON object, whatever its fields; `errors` is what to do about bytes not UTF-8.

    Raises RequestError for a line that is too long, not UTF-8, not JSON or not an object.
    """
    if len(line) > MAX_LINE_BYTES:
        raise RequestError(f"a line of {len(line)} bytes; the limit is {MAX_LINE_BYTES}")
    try:
        made = json.loads(line.decode(errors=errors), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"a line that is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise RequestError("a line of JSON nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"a line that is not JSON: {error}") from None
    if type(made) is not dict:
        raise checks.refusal("line", "a JSON object", made)
    return made


def _build(key: str, given: Mapping[str, Any]) -> Any:
    rest = dict(given)
    if key not in rest:
        raise RequestError(f"field {key!r} is missing")
    name = checks.choice(*_PARSE[key])(key, rest.pop(key))
    return _PARSE[key][name]("", rest)


def request_from(given: Mapping[str, Any]) -> Request:
    """Make the request that a decoded line describes; raises RequestError naming the field."""
    request: Request = _build("op", given)
    if isinstance(request, Generate) and request.reply_from is not None and request.reply_from > len(request.tokens):
        raise RequestError(f"field 'reply_from': {request.reply_from} lies behind the {len(request.tokens)} tokens")
    if isinstance(request, Score):
        if request.generated is not None and len(request.generated) != len(request.tokens):
            raise RequestError(
                f"field 'generated': expected {len(request.tokens)} items, one a token, found {len(request.generated)}"
            )
        if request.hidden and request.trace_dir is None:
            raise RequestError("field 'hidden': hidden states go into a trace, and 'trace_dir' is missing")
    return request


def parse_request(line: bytes) -> Request:
    """Parse a line that a client wrote; raises RequestError naming what is wrong."""
    return request_from(decode(line))


def parse_event(line: bytes) -> Event:
    """Parse a line that a daemon wrote, bytes that are not UTF-8 replaced; raises RequestError."""
    event: Event = _build("event", decode(line, errors="replace"))
    return event


def _plain(message: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for f in fields(message):
        value = getattr(message, f.name)
        if f.name == "info":
            assert not value.keys() & {*made, "op", "event"}, value
            made |= value
        elif is_dataclass(value):
            made[f.name] = _plain(value)
        elif value is not None or f.default is MISSING:
            made[f.name] = value
    return made


def format_line(message: Request | Event) -> bytes:
    """Write a message as one line, newline included; raises RequestError if it is too long to be read."""
    key, name = _NAME_OF[type(message)]
    line = json.dumps({key: name, **_plain(message)}, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise RequestError(f"a message of {len(line)} bytes; the limit is {MAX_LINE_BYTES}")
    return line


def error_event(request_id: int | None, error: SparkError) -> Error:
    """Make the event that reports `error`; `engine.ground.errors.from_code` rebuilds it."""
    return Error(request_id, error.code, error.message, error.hint)


def read_lines(fd: int) -> Iterator[bytes | None]:
    """Read lines, without their newline, until the end of file; None stands for one that was too long."""
    parts: list[bytes] = []
    size = 0
    while chunk := os.read(fd, 1 << 16):
        *ends, tail = chunk.split(b"\n")
        for end in ends:
            size += len(end)
            yield b"".join([*parts, end]) if size <= MAX_LINE_BYTES else None
            parts, size = [], 0
        size += len(tail)
        parts.append(tail)
        if size > MAX_LINE_BYTES:
            parts.clear()
    if size:
        yield b"".join(parts) if size <= MAX_LINE_BYTES else None


def command_line(config: EngineConfig) -> list[str]:
    """Write the daemon's arguments for `config`; `engine.daemon.parse_arguments` is the inverse."""
    arguments: list[str] = []
    for f in fields(config):
        value = getattr(config, f.name)
        flag = "--" + f.name.replace("_", "-")
        if f.name == "model" or value is None or value is False:
            continue
        arguments += [flag] if value is True else [f"{flag}={value}"]
    return [*arguments, "--", str(config.model)]
