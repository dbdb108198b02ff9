"""OpenAI's chat completions: bodies become conversations, parts of replies its objects.

What a request asks for and this server cannot do is refused by name, never ignored; fields that change nothing
(`user`, `metadata`, ...) are.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import RequestError, SparkError
from spark import conversation as c
from spark.conversation import CallArguments, CallEnd, CallStart, Conversation, Finish, Part, Text, Usage
from spark.http import explain, openai_error
from spark.sessions import Message, Role, ToolCall

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
    "functions": [[]],
    "function_call": ["none"],
    "audio": [],
    "modalities": [["text"]],
    "web_search_options": [],
}


def parse(body: Mapping[str, Any]) -> Conversation:
    """Check the body of a request; raises RequestError that names the field."""
    c.refuse(body, _UNSUPPORTED)
    tools = c.unique_tools([_tool(f"tools[{i}]", t) for i, t in enumerate(c.records(body, "tools", c.MAX_TOOLS, []))])
    messages = c.records(body, "messages", c.MAX_MESSAGES)
    if not messages:
        raise RequestError("messages: expected at least one")
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    stream_options(body)
    return Conversation(
        messages=tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages)),
        tools=tools,
        tool_choice=_choice(body.get("tool_choice"), tools),
        parallel_calls=c.get(body, "parallel_tool_calls", bool, True),
        max_tokens=c.limit(body, name),
        sampling=c.sampling(body),
        stops=c.stops(body.get("stop")),
        reasoning=_reasoning(body),
        response_schema=c.response_schema("response_format", body.get("response_format"), "json_schema"),
        stream=c.get(body, "stream", bool, False),
    )


def stream_options(body: Mapping[str, Any]) -> bool:
    """Whether a stream is to end with its usage."""
    wanted: bool = c.get(c.get(body, "stream_options", dict, {}), "include_usage", bool, False, "stream_options.")
    return wanted


def _tool(where: str, record: dict[str, Any]) -> dict[str, Any]:
    if record.get("type") != "function":
        raise RequestError(f"{where}.type: expected 'function'")
    function = c.get(record, "function", dict, where=f"{where}.")
    where += ".function"
    name = c.get(function, "name", str, where=f"{where}.")
    return c.tool(where, name, function.get("description"), function.get("parameters"))


def _choice(value: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    if value is None or value in ("auto", "none"):
        return value or "auto"
    if value == "required":
        if not tools:
            raise RequestError("tool_choice: a call is required, and there are no tools")
        return value
    if type(value) is dict and value.get("type") == "function":
        function = c.get(value, "function", dict, where="tool_choice.")
        name = c.get(function, "name", str, where="tool_choice.function.")
        return c.chosen(name, tools, "tool_choice.function.name")
    raise RequestError("tool_choice: expected 'auto', 'none', 'required' or a function")


def _reasoning(body: Mapping[str, Any]) -> c.Reasoning:
    made = c.reasoning(body)
    variables = c.get(body, "chat_template_kwargs", dict, {})
    if variables.keys() - {"enable_thinking"}:
        raise RequestError("chat_template_kwargs: only enable_thinking is known")
    enabled = c.get(variables, "enable_thinking", bool, None, "chat_template_kwargs.")
    return made if enabled is None else c.made_reasoning(enabled, made.budget_tokens, made.effort)


def _message(where: str, record: dict[str, Any]) -> Message:
    role = _ROLES.get(c.get(record, "role", str, where=f"{where}."))
    if role is None:
        raise RequestError(f"{where}.role: expected one of {', '.join(_ROLES)}")
    reasoning = ""
    calls: tuple[ToolCall, ...] = ()
    if role == "assistant":
        name = "reasoning_content" if record.get("reasoning_content") is not None else "reasoning"
        reasoning = c.get(record, name, str, "", f"{where}.")
        made = c.get(record, "tool_calls", list, [], f"{where}.")
        calls = tuple(_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(made))
    call_id = c.get(record, "tool_call_id", str, "", f"{where}.") if role == "tool" else ""
    return Message(role, c.joined(f"{where}.content", record.get("content"), _part), reasoning, calls, call_id)


def _part(where: str, record: dict[str, Any]) -> str:
    kind = record.get("type")
    if kind not in ("text", "refusal"):
        raise RequestError(f"{where}.type: only text can be read")
    text: str = c.get(record, kind, str, where=f"{where}.")
    return text


def _call(where: str, value: Any) -> ToolCall:
    record = c.as_object(where, value)
    function = c.get(record, "function", dict, where=f"{where}.")
    name = c.get(function, "name", str, where=f"{where}.function.")
    arguments = c.get(function, "arguments", str, "{}", f"{where}.function.")
    return c.call(c.get(record, "id", str, "", f"{where}."), name, arguments)


# --- replies ----------------------------------------------------------------------------------


class Writer:
    """Writes one reply: `whole`, or `start`, parts and `end` of a stream.

    body: of the request, which may ask for a chunk of usage at the end, which every other chunk announces.
    """

    keep_alive = b": nothing new\n\n"

    def __init__(self, model: str, body: Mapping[str, Any], conversation: Conversation) -> None:
        self._include_usage = stream_options(body)
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._calls = 0

    def whole(self, parts: Sequence[Part], finish: Finish) -> dict[str, Any]:
        """Make the object of a reply that is not streamed."""
        texts = {"content": "", "reasoning": ""}
        calls = []
        for part in c.whole(parts):
            if isinstance(part, Text):
                texts[part.kind] += part.text
            else:
                function = {"name": part.name, "arguments": part.arguments}
                calls.append({"id": part.id, "type": "function", "function": function})
        message: dict[str, Any] = {"role": "assistant", "content": texts["content"] or (None if calls else "")}
        if texts["reasoning"]:
            message["reasoning_content"] = texts["reasoning"]
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish.reason}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage(finish.usage)}

    def start(self, prompt_tokens: int) -> bytes:
        """Write the first chunk, which says who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def part(self, part: Part) -> bytes:
        """Write the chunk of a part."""
        if isinstance(part, Text):
            return self._chunk({"content" if part.kind == "content" else "reasoning_content": part.text})
        if isinstance(part, CallEnd):
            return b""
        call: dict[str, Any] = {"index": self._calls}
        if isinstance(part, CallStart):
            self._calls += 1
            call |= {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}}
        else:
            assert isinstance(part, CallArguments)
            call = {"index": self._calls - 1, "function": {"arguments": part.text}}
        return self._chunk({"tool_calls": [call]})

    def end(self, finish: Finish) -> bytes:
        """Write the end: why, then the usage where it is wanted."""
        made = self._chunk({}, finish.reason)
        if self._include_usage:
            made += event(
                {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage(finish.usage)}
            )
        return made + b"data: [DONE]\n\n"

    def failed(self, error: SparkError) -> bytes:
        """Write a failure that came too late for a status."""
        return event(openai_error(*explain(error))) + b"data: [DONE]\n\n"

    def _chunk(self, delta: Mapping[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        made = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return event(made | {"usage": None} if self._include_usage else made)


def event(made: Mapping[str, Any]) -> bytes:
    """Write an object as a server-sent event."""
    return b"data: " + json.dumps(made).encode() + b"\n\n"


def usage(used: Usage) -> dict[str, Any]:
    """Make the usage as both APIs of completions have it."""
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.completion,
        "total_tokens": used.prompt + used.completion,
        "prompt_tokens_details": {"cached_tokens": used.cached},
        "completion_tokens_details": {"reasoning_tokens": used.reasoning},
    }
