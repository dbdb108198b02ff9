"""What every API's requests become, and what replies are before an API writes them; checks of JSON from outside.

A request is a `Conversation`, whatever API it came by, and a reply a sequence of `Part`s and one `Finish`. The checks
refuse a field by its name, and say of a text no more than that it is one: errors end up in logs.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from engine.ground import protocol
from engine.ground.errors import RequestError
from engine.ground.recall import KVRecall
from engine.ground.sampling import Sampling, sampling_from
from spark.speech.json_text import parse_string
from spark.speech.sessions import Message, ToolCall

MAX_MESSAGES = 1 << 14
MAX_TOOLS = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_NAME_CHARS = 256
MAX_CHOICES = 8  # of `n`
MAX_REPETITION_PENALTY = 100.0
MIN_REPETITION_PENALTY = 0.01  # below it logits would leave the numbers that a float has
IMAGE_NOTE = "[a picture was here; this model reads text only]"
FILE_NOTE = "[a file was here; this model reads text only]"
AUDIO_NOTE = "[a recording was here; this model reads text only]"
VIDEO_NOTE = "[a video was here; this model reads text only]"
# Tokens of reasoning, for models whose template knows no efforts; None: as many as they like.
EFFORTS: Mapping[str, int | None] = {
    "none": 0,
    "minimal": 512,
    "low": 2048,
    "medium": 8192,
    "high": None,
    "xhigh": None,
    "max": None,
}


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How much a model may think before it answers.

    enabled: None leaves it to the model's template. budget_tokens: None: no limit; 0 is the same as not enabled.
    effort: a key of EFFORTS, which some templates know, and which is a budget for the others. preserve: whether the
    reasoning of earlier turns is shown again, for templates that can be told; None: as they like.
    """

    enabled: bool | None = None
    budget_tokens: int | None = None
    effort: str | None = None
    preserve: bool | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A checked request.

    tools: `{"type":"function","function":{"name",...}}`. tool_choice: "auto", "none", "required", or `("name", NAME)`.
    parallel_calls: more than one call in a reply is wanted. max_tokens: None: all that the context leaves; 0: the
    prompt is read, and kept, and nothing is written.
    response_schema: JSON schema of the reply; `{}`: any object; form_field: the field that it came in. written: how
    the reply begins, which is not repeated. endless: no token ends a reply before its limit. text_chars, tool_chars:
    how long messages and tools are for a template, with objects as JSON, as `measured` found it. raw: text or tokens
    to continue in place of messages; nothing is looked for in that reply. more_raw: further ones, each for itself.
    choices: replies to each prompt. logprobs: how many likeliest tokens go with each token of visible text, beside its
    own log-probability; None: no token has either. draft: whether tokens may be proposed ahead, which changes none;
    prediction: text that may come in each reply, to propose from. kv_recall: what replies read of their context, None:
    as the server has it; kept_messages: ranges of messages that they read whole, [from, to) each, -1: what stands
    before all messages.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: Literal["auto", "none", "required"] | tuple[Literal["name"], str] = "auto"
    parallel_calls: bool = True
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    reasoning: Reasoning = Reasoning()
    response_schema: Mapping[str, Any] | None = None
    form_field: str = "response_format"
    written: str = ""
    raw: str | tuple[int, ...] | None = None
    more_raw: tuple[str | tuple[int, ...], ...] = ()
    choices: int = 1
    endless: bool = False
    logprobs: int | None = None
    draft: bool = True
    prediction: str = ""
    kv_recall: KVRecall | None = None
    kept_messages: tuple[tuple[int, int], ...] = ()
    stream: bool = False
    text_chars: int = 0
    tool_chars: int = 0

    def measured(self, most_chars: int) -> Conversation:
        """The conversation with its length; where that is more than `most_chars`, without what is so long.

        Raises RequestError for a form that is longer than any may be, and for a prediction that is.
        """
        if len(self.prediction) > most_chars:
            raise refusal("prediction", f"a text of {len(self.prediction)} characters; the limit is {most_chars}")
        form_chars = 0 if self.response_schema is None else len(json.dumps(self.response_schema))
        if form_chars > protocol.MAX_GRAMMAR_CHARS:
            most = protocol.MAX_GRAMMAR_CHARS
            raise refusal(self.form_field, f"a schema of {form_chars} characters of JSON; the limit is {most}")
        tools = self.tools if self.tool_choice != "none" else ()
        tool_chars = _written_chars(tools)
        calls = [call for message in self.messages for call in message.tool_calls]
        texts = [text for m in self.messages for text in (m.content, m.reasoning, m.tool_call_id)]
        texts += [text for call in calls for text in (call.id, call.name)]
        text_chars = sum(map(len, texts)) + len(self.written) + sum(_written_chars(call.arguments) for call in calls)
        made = replace(self, tools=tools, text_chars=text_chars, tool_chars=tool_chars)
        if text_chars + tool_chars > most_chars:
            made = replace(made, messages=(), tools=(), written="", prediction="")
        return made

    @property
    def replies(self) -> int:
        """How many there are to be."""
        return self.choices * (1 + len(self.more_raw))

    def apart(self) -> list[Conversation]:
        """One conversation for each prompt."""
        return [replace(self, raw=raw, more_raw=()) for raw in (self.raw, *self.more_raw)]

    def choice(self, k: int) -> Conversation:
        """What choice k is made from: the conversation with another seed, which follows from its own and k."""
        if k == 0:
            return self
        digest = hashlib.sha256(f"{self.sampling.seed}:{k}".encode()).digest()
        return replace(self, sampling=replace(self.sampling, seed=int.from_bytes(digest[:8], "big")))


# --- replies ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's bytes, its log-probability in nats, and the likeliest tokens in its place, likeliest first.

    at: where it begins in what the model wrote, in characters.
    """

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()
    at: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of reasoning or of visible text.

    logprobs: its tokens, where they were asked for; one that lies in two pieces is the first one's. at: where it
    begins in what the model wrote, in characters.
    """

    kind: Literal["reasoning", "content"]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; the `id` begins with `call_`."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the call's arguments; at any time the pieces so far begin the text of a JSON object."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call; not complete: the model broke off, and the arguments are no JSON."""

    complete: bool = True


Part: TypeAlias = Text | CallStart | CallArguments | CallEnd
Drafted: TypeAlias = Mapping[str, Mapping[str, int]]
Read: TypeAlias = Mapping[str, float]  # what was read of a context


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt and of the reply; `cached` of the first were not computed, `reasoning` of the second.

    drafts: by source, tokens that were `drafted`, and those of them that were `accepted`, which are of the reply.
    recall: as of `protocol.Usage`.
    """

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0
    drafts: Drafted = field(default_factory=dict)
    recall: Read | None = None

    @property
    def drafted(self) -> int:
        """Tokens that were drafted, by whomever."""
        return sum(counts["drafted"] for counts in self.drafts.values())

    @property
    def accepted(self) -> int:
        """Those of them that were accepted."""
        return sum(counts["accepted"] for counts in self.drafts.values())

    def shown_more(self) -> dict[str, Any]:
        """What every API's usage has more: `drafts`, by source, where there were any; `recall` where a part is read."""
        more = {} if self.recall is None else {"recall": dict(self.recall)}
        return more | ({"drafts": self.drafts} if self.drafted else {})

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt + other.prompt,
            self.completion + other.completion,
            self.cached + other.cached,
            self.reasoning + other.reasoning,
            added_drafts(self.drafts, other.drafts),
            added_recall(self.recall, other.recall),
        )


def added_drafts(one: Drafted, other: Drafted) -> Drafted:
    """The counts of both, by source."""
    none = {"drafted": 0, "accepted": 0}
    return {
        source: {key: one.get(source, none)[key] + other.get(source, none)[key] for key in none}
        for source in (*one, *(source for source in other if source not in one))
    }


def added_recall(one: Read | None, other: Read | None) -> Read | None:
    """The counts of both; means by tokens, and the largest."""
    if one is None or other is None:
        return one or other
    made = {name: one[name] + other[name] for name in ("tokens", "blocks", "read")}
    means = one["left_out_mean"] * one["tokens"] + other["left_out_mean"] * other["tokens"]
    return made | {
        "left_out_max": max(one["left_out_max"], other["left_out_max"]),
        "left_out_mean": means / made["tokens"] if made["tokens"] else 0.0,
    }


def accepted_among(n_tokens: int, drafts: Drafted) -> Drafted:
    """The counts with no more accepted than so many tokens: of a reply that was broken off, those behind its end."""
    over, made = sum(n["accepted"] for n in drafts.values()) - n_tokens, {}
    for source, n in drafts.items():
        less = max(0, min(over, n["accepted"]))
        over -= less
        made[source] = {"drafted": n["drafted"], "accepted": n["accepted"] - less}
    return made


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a reply.

    stop: the stop string that ended it. full: it was cut by the context, not by the limit that the request named.
    """

    reason: Literal["stop", "length", "tool_calls"]
    usage: Usage
    stop: str | None = None
    full: bool = False


@dataclass(frozen=True, slots=True)
class WholeCall:
    """A tool call with all its arguments, as text."""

    id: str
    name: str
    arguments: str

    def input(self) -> dict[str, Any]:
        """The arguments as an object; empty where the model broke off."""
        try:
            made = json.loads(self.arguments)
        except (ValueError, RecursionError):
            made = None
        return made if isinstance(made, dict) else {}


def whole(parts: Sequence[Part]) -> list[Text | WholeCall]:
    """Parts put together: runs of text of one kind, and calls."""
    runs: list[list[Any]] = []  # of parts that belong together
    for part in parts:
        first = runs[-1][0] if runs else None
        goes_on = isinstance(first, Text) and isinstance(part, Text) and first.kind == part.kind
        if goes_on or isinstance(part, CallArguments):
            runs[-1].append(part)
        elif not isinstance(part, CallEnd):
            runs.append([part])
    return [_together(run) for run in runs]


def _together(run: Sequence[Any]) -> Text | WholeCall:
    first = run[0]
    if isinstance(first, CallStart):
        return WholeCall(first.id, first.name, "".join(part.text for part in run[1:]))
    logprobs = tuple(logprob for part in run for logprob in part.logprobs)
    return Text(first.kind, "".join(part.text for part in run), logprobs, first.at)


class NotKeptError(RequestError):
    """A request that refers to an item that is not kept, or not any more."""

    code = "not_kept"


class ResponseNotKeptError(RequestError):
    """A request that goes on from a response that is not kept, or not any more."""

    code = "response_not_kept"


def _written_chars(value: object) -> int:
    """The length of what templates mostly make of an object."""
    return len(json.dumps(value, ensure_ascii=False))


# --- checks -------------------------------------------------------------------------------------

_KINDS = {
    list: "a list",
    dict: "an object",
    bool: "true or false",
    str: "a string",
    int: "an integer",
}
_REQUIRED: Any = object()


def refusal(name: str, what: str, hint: str = "") -> RequestError:
    """Make the error that refuses a field by its name, as the API writes it: `messages[0].content`."""
    return RequestError(f"{name}: {what}", hint=hint, field=name)


def get(record: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED, where: str = "") -> Any:
    """A field of a JSON object, null standing for an absent one."""
    value = record.get(name)
    if value is None:
        if default is _REQUIRED:
            raise refusal(f"{where}{name}", "missing")
        return default
    if type(value) is not kind:
        raise refusal(f"{where}{name}", f"expected {_KINDS[kind]}, found {shown(value)}")
    return value


def shown(value: object) -> str:
    """What may be said of a value in an error: never more of a text than that it is one."""
    return f"{value}"[:40] if type(value) in (bool, float) else _KINDS.get(type(value), "null")


def as_object(where: str, value: Any) -> dict[str, Any]:
    """Check for a JSON object."""
    if type(value) is not dict:
        raise refusal(where, f"expected an object, found {shown(value)}")
    return value


def records(body: Mapping[str, Any], name: str, most: int, default: Any = _REQUIRED) -> list[dict[str, Any]]:
    """A field that is a list of objects, of bounded length."""
    made = get(body, name, list, default)
    if len(made) > most:
        raise refusal(name, f"{len(made)} items; the limit is {most}")
    return [as_object(f"{name}[{i}]", item) for i, item in enumerate(made)]


def refuse(body: Mapping[str, Any], unsupported: Mapping[str, Sequence[Any]]) -> None:
    """Refuse what cannot be done, by name: fields with any value but the `unsupported` ones, which ask for nothing."""
    for name, neutral in unsupported.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise refusal(name, "not supported", hint=f"leave {name} out")


def refuse_moved(
    body: Mapping[str, Any], elsewhere: Mapping[str, str], neutral: Mapping[str, Sequence[Any]]
) -> None:
    """Refuse fields of another API, each with what is in its place, unless their value asks for nothing."""
    for name, other in elsewhere.items():
        if body.get(name) is not None and body[name] not in neutral.get(name, ()):
            raise refusal(name, "not supported here", hint=f"give {other}")


def tool(where: str, name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool's definition as templates take it."""
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise refusal(f"{where}.name", f"expected 1 to {MAX_NAME_CHARS} characters")
    if description is not None and type(description) is not str:
        raise refusal(f"{where}.description", f"expected a string, found {shown(description)}")
    made: dict[str, Any] = {"name": name}
    if description is not None:
        made["description"] = description
    if parameters is not None:
        made["parameters"] = as_object(f"{where}.parameters", parameters)
    return {"type": "function", "function": made}


def unique_tools(tools: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The tools without those that repeat an earlier one's name."""
    return tuple({made["function"]["name"]: made for made in reversed(tools)}.values())[::-1]


def choice_by_word(value: Any, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The choice of calls that OpenAI's APIs have a word for, `auto` where there is none; None: it is no word."""
    if value is None or value in ("auto", "none"):
        return value or "auto"
    if value != "required":
        return None
    if not tools:
        raise refusal("tool_choice", "a call is required, and there are no tools")
    return "required"


def chosen(name: str, tools: Sequence[Mapping[str, Any]], where: str) -> tuple[Literal["name"], str]:
    """The choice of a tool by its name."""
    if name not in (made["function"]["name"] for made in tools):
        raise refusal(where, "is none of the tools")
    return ("name", name)


def allowed(
    record: Mapping[str, Any], tools: Sequence[dict[str, Any]], where: str, named: Callable[[str, dict[str, Any]], str]
) -> tuple[Literal["auto", "required"], tuple[dict[str, Any], ...]]:
    """A choice among some of the tools: the mode, and those tools; `named` tells the name in a record of the list."""
    mode: Any = get(record, "mode", str, where=where)
    if mode not in ("auto", "required"):
        raise refusal(f"{where}mode", "expected auto or required")
    names = set()
    for i, item in enumerate(get(record, "tools", list, where=where)):
        here = f"{where}tools[{i}]"
        names.add(chosen(named(f"{here}.", as_object(here, item)), tools, here)[1])
    if not names:
        raise refusal(f"{where}tools", "expected at least one")
    return mode, tuple(made for made in tools if made["function"]["name"] in names)


def call(call_id: str, name: str, arguments: str) -> ToolCall:
    """A call of an earlier turn, with the arguments as text."""
    made = parse_string(arguments or "{}")
    if type(made) is not dict:  # what a model wrote wrongly must not make its whole session unusable
        made = {"input": arguments}
    return ToolCall(call_id, name, made)


def limit(body: Mapping[str, Any], name: str, least: int = 1) -> int | None:
    """A number of tokens, at least so many."""
    found: int | None = get(body, name, int, None)
    if found is not None and found < least:
        raise refusal(name, f"expected at least {least}")
    return found


def integer(record: Mapping[str, Any], name: str, least: int, most: int, where: str = "") -> int | None:
    """An integer from `least` to `most`; None where there is none."""
    found: int | None = get(record, name, int, None, where)
    if found is not None and not least <= found <= most:
        raise refusal(f"{where}{name}", f"expected {least} to {most}, found {reprlib.repr(found)}")
    return found


def draft(body: Mapping[str, Any]) -> bool:
    """Whether tokens may be drafted: the field `draft`, by which a request can only keep it from being done."""
    if (found := get(body, "draft", str, "auto")) not in ("auto", "off"):
        raise refusal("draft", "expected 'auto' or 'off'")
    return bool(found == "auto")


def sampling(body: Mapping[str, Any]) -> Sampling:
    """How tokens are drawn; a seed is made up where none is given."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    given = {name: body[name] for name in names if body.get(name) is not None}
    for name, value in given.items():
        if type(value) not in (int, float):
            raise refusal(name, f"expected a number, found {shown(value)}")
    if given.get("top_k") == -1:  # some clients' word for off
        given["top_k"] = 0
    penalty: Any = given.get("repetition_penalty")
    if type(penalty) in (int, float) and not MIN_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY:
        found = f"expected {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}, found {shown(penalty)}"
        raise refusal("repetition_penalty", found)
    seed = get(body, "seed", int, None)
    given["seed"] = secrets.randbits(63) if seed is None else seed & (1 << 64) - 1
    return sampling_from({"temperature": 1.0, **given})


def stops(value: Any, name: str = "stop") -> tuple[str, ...]:
    """Stop strings: one, or a list; null is none."""
    made = [value] if type(value) is str else [] if value is None else value
    if type(made) is not list or len(made) > MAX_STOPS:
        raise refusal(name, f"expected a string or a list of at most {MAX_STOPS}, found {shown(value)}")
    if not all(type(stop) is str and 0 < len(stop) <= MAX_STOP_CHARS for stop in made):
        raise refusal(name, f"expected strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(made)


def reasoning(body: Mapping[str, Any]) -> Reasoning:
    """What `reasoning_effort` and `reasoning` (effort, max_tokens, enabled) of OpenAI's APIs ask for."""
    given = get(body, "reasoning", dict, {})
    effort = get(given, "effort", str, None, "reasoning.")
    named = "reasoning.effort" if effort else "reasoning_effort"
    effort = effort or get(body, "reasoning_effort", str, None)
    enabled: bool | None = get(given, "enabled", bool, None, "reasoning.")
    budget = tokens(given, "max_tokens", "reasoning.")
    return made_reasoning(enabled, budget, effort, named)


def made_reasoning(
    enabled: bool | None, budget: int | None, effort: str | None, effort_field: str = "reasoning_effort"
) -> Reasoning:
    """Reasoning without contradictions: budgets of 0 and the effort `none` disable it, any other enables it."""
    if effort is not None and effort not in EFFORTS:
        raise refusal(effort_field, f"expected one of {', '.join(EFFORTS)}")
    if enabled is False or budget == 0 or (budget is None and effort == "none"):
        return Reasoning(False, 0)
    if budget is not None or effort is not None:
        enabled = True
    return Reasoning(enabled, budget, effort)


def tokens(record: Mapping[str, Any], name: str, where: str = "") -> int | None:
    """A number of tokens, which may be 0."""
    found: int | None = get(record, name, int, None, where)
    if found is not None and found < 0:
        raise refusal(f"{where}{name}", "expected at least 0")
    return found


def response_schema(where: str, value: Any, inner: str | None) -> Mapping[str, Any] | None:
    """The schema of a `response_format`; `inner`: the field that has name and schema, None: they stand in it."""
    if value is None:
        return None
    kind = get(as_object(where, value), "type", str, where=f"{where}.")
    if kind == "text":
        return None
    if kind == "json_object":
        loose: dict[str, Any] = get(value, "schema", dict, {}, f"{where}.")  # as llama.cpp takes one
        return loose
    if kind != "json_schema":
        raise refusal(f"{where}.type", "expected text, json_object or json_schema")
    holder = value
    if inner is not None:
        holder, where = get(value, inner, dict, where=f"{where}."), f"{where}.{inner}"
    found: dict[str, Any] = get(holder, "schema", dict, where=f"{where}.")
    return found


def joined(where: str, value: Any, part: Callable[[str, dict[str, Any]], str]) -> str:
    """Text that is a string, or a list of parts whose text `part` tells; null is empty."""
    if value is None or type(value) is str:
        return value or ""
    if type(value) is not list:
        raise refusal(where, f"expected a string or a list of parts, found {shown(value)}")
    return "".join(part(f"{where}[{i}]", as_object(f"{where}[{i}]", item)) for i, item in enumerate(value))
