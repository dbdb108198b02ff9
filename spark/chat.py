"""OpenAI's chat completions: requests checked and turned into our messages, replies into its objects.

What a request asks for and this server cannot do is refused by name, never ignored; fields that change
nothing (`user`, `metadata`, ...) are.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import protocol
from engine.errors import RequestError
from spark.reply import Call, Part, Text
from spark.sessions import Message, Role, ToolCall

MAX_STOPS = 16
MAX_STOP_CHARS = 256

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# What cannot be done, and the values that ask for nothing.
_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "n": [1],
    "logprobs": [False],
    "top_logprobs": [0],
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "logit_bias": [{}],
    "response_format": [{"type": "text"}],
    "functions": [[]],
    "function_call": ["none"],
    "audio": [],
    "modalities": [["text"]],
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request; max_tokens None: all that the context leaves."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    sampling: protocol.Sampling
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Check the body of a request; raises RequestError that names the field."""
    for name, neutral in _UNSUPPORTED.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise RequestError(f"{name}: not supported", hint=f"leave {name} out")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise RequestError("tool_choice: expected 'auto' or 'none'; a call cannot be forced")
    tools = tuple(_tool(f"tools[{i}]", tool) for i, tool in enumerate(_get(body, "tools", list, []) or []))
    messages = _get(body, "messages", list)
    if not messages:
        raise RequestError("messages: expected at least one")
    return ChatRequest(
        tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages)),
        () if body.get("tool_choice") == "none" else tools,
        _max_tokens(body),
        _sampling(body),
        _stops(body.get("stop")),
        _get(body, "stream", bool, False),
        _get(_get(body, "stream_options", dict, {}), "include_usage", bool, False),
    )


_KINDS = {list: "a list", dict: "an object", bool: "true or false", str: "a string", int: "an integer"}
_REQUIRED: Any = object()


def _get(record: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED, where: str = "") -> Any:
    """A field of a JSON object, null standing for an absent one."""
    value = record.get(name)
    if value is None:
        if default is _REQUIRED:
            raise RequestError(f"{where}{name}: missing")
        return default
    if type(value) is not kind:
        raise RequestError(f"{where}{name}: expected {_KINDS[kind]}, found {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """What may be said of a value in an error: never more of a text than that it is one."""
    return f"{value}" if type(value) in (bool, int, float) else f"a {type(value).__name__}"


def _object(where: str, value: Any) -> Mapping[str, Any]:
    if type(value) is not dict:
        raise RequestError(f"{where}: expected an object, found {_shown(value)}")
    return value


def _tool(where: str, value: Any) -> Mapping[str, Any]:
    tool = _object(where, value)
    if tool.get("type") != "function":
        raise RequestError(f"{where}.type: expected 'function'")
    function = _get(tool, "function", dict, where=f"{where}.")
    _get(function, "name", str, where=f"{where}.function.")
    return tool


def _message(where: str, value: Any) -> Message:
    record = _object(where, value)
    role = _ROLES.get(_get(record, "role", str, where=f"{where}."))
    if role is None:
        raise RequestError(f"{where}.role: expected one of {', '.join(_ROLES)}")
    reasoning = ""
    calls: tuple[ToolCall, ...] = ()
    if role == "assistant":
        name = "reasoning_content" if record.get("reasoning_content") is not None else "reasoning"
        reasoning = _get(record, name, str, "", f"{where}.")
        made = _get(record, "tool_calls", list, [], f"{where}.")
        calls = tuple(_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(made))
    call_id = _get(record, "tool_call_id", str, "", f"{where}.") if role == "tool" else ""
    return Message(role, _content(f"{where}.content", record.get("content")), reasoning, calls, call_id)


def _content(where: str, value: Any) -> str:
    if value is None or type(value) is str:
        return value or ""
    if type(value) is not list:
        raise RequestError(f"{where}: expected a string or a list of parts, found {_shown(value)}")
    texts = []
    for i, part in enumerate(value):
        record = _object(f"{where}[{i}]", part)
        kind = record.get("type")
        if kind not in ("text", "refusal"):
            raise RequestError(f"{where}[{i}].type: only text can be read")
        texts.append(_get(record, kind, str, where=f"{where}[{i}]."))
    return "".join(texts)


def _tool_call(where: str, value: Any) -> ToolCall:
    function = _get(_object(where, value), "function", dict, where=f"{where}.")
    name = _get(function, "name", str, where=f"{where}.function.")
    text = _get(function, "arguments", str, "{}", f"{where}.function.")
    try:
        arguments = json.loads(text or "{}", strict=False)
    except (ValueError, RecursionError):
        arguments = None
    if type(arguments) is not dict:  # what a model wrote wrongly must not make its whole session unusable
        arguments = {"input": text}
    return ToolCall(_get(value, "id", str, "", f"{where}."), name, arguments)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    limit: int | None = _get(body, name, int, None)
    if limit is not None and limit < 1:
        raise RequestError(f"{name}: expected at least 1, found {limit}")
    return limit


def _sampling(body: Mapping[str, Any]) -> protocol.Sampling:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: body[name] for name in names if body.get(name) is not None}
    seed = _get(body, "seed", int, None)
    given["seed"] = secrets.randbits(63) if seed is None else seed & (1 << 64) - 1
    return protocol.sampling_from({"temperature": 1.0, **given})


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if type(value) is str else value or []
    if type(stops) is not list or len(stops) > MAX_STOPS:
        raise RequestError(f"stop: expected a string or a list of at most {MAX_STOPS}")
    if not all(type(stop) is str and 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise RequestError(f"stop: expected strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


# --- replies ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a reply."""

    reason: str
    prompt_tokens: int
    completion_tokens: int


class Formatter:
    """Writes one reply in OpenAI's objects: `completion` for a whole one, the others for one in chunks.

    include_usage: there will be a chunk of usage, which every other chunk announces.
    """

    def __init__(self, model: str, include_usage: bool = False) -> None:
        self._include_usage = include_usage
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._calls = 0

    def completion(self, parts: Sequence[Part], finish: Finish) -> dict[str, Any]:
        """Make the object of a reply that is not streamed."""
        texts = {"content": "", "reasoning": ""}
        for part in parts:
            if isinstance(part, Text):
                texts[part.kind] += part.text
        calls = [_call_object(part) for part in parts if isinstance(part, Call)]
        message: dict[str, Any] = {"role": "assistant", "content": texts["content"] or (None if calls else "")}
        if texts["reasoning"]:
            message["reasoning_content"] = texts["reasoning"]
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish.reason}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": _usage(finish)}

    def start(self) -> dict[str, Any]:
        """Make the first chunk, which says who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunk(self, part: Part) -> dict[str, Any]:
        """Make the chunk of one part; a tool call comes whole."""
        if isinstance(part, Text):
            return self._chunk({"content" if part.kind == "content" else "reasoning_content": part.text})
        self._calls += 1
        return self._chunk({"tool_calls": [{"index": self._calls - 1, **_call_object(part)}]})

    def end(self, finish: Finish) -> dict[str, Any]:
        """Make the chunk that ends the reply."""
        return self._chunk({}, finish.reason)

    def usage(self, finish: Finish) -> dict[str, Any]:
        """Make the chunk that `stream_options.include_usage` asks for, after all others."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(finish)}

    def _chunk(self, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        made = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return made | {"usage": None} if self._include_usage else made


def _call_object(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(finish: Finish) -> dict[str, int]:
    return {
        "prompt_tokens": finish.prompt_tokens,
        "completion_tokens": finish.completion_tokens,
        "total_tokens": finish.prompt_tokens + finish.completion_tokens,
    }
