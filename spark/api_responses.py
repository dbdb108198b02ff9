"""OpenAI's responses, as Codex speaks them: the whole conversation in each request, nothing kept here.

What a request asks for and this server cannot do is refused by name, with these exceptions, which Codex's sessions take
for granted: pictures become a note; tools other than functions and custom ones, and items that such tools have left in
the input, are left out; `store` and other fields that do not change what a reply says are ignored. Functions that come
in a namespace, as those of MCP servers and of Codex's agents do, are functions named NAMESPACE__NAME for the model.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import SparkError
from engine.protocol import MAX_TOP_LOGPROBS
from spark import conversation as c
from spark.conversation import CallArguments, CallStart, Conversation, Finish, Part, Text, Usage, WholeCall
from spark.http import explain
from spark.logprobs import entry
from spark.sessions import Message, Role, ToolCall

_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "previous_response_id": [],
    "conversation": [],
    "background": [False],
    "prompt": [],
}
_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NOTES = {
    "input_image": c.IMAGE_NOTE,
    "computer_screenshot": c.IMAGE_NOTE,
    "input_file": c.FILE_NOTE,
    "input_audio": c.AUDIO_NOTE,
    "input_video": c.VIDEO_NOTE,
}
_CUSTOM_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_KEPT = "spark1."  # begins reasoning that was given out to come back


def parse(body: Mapping[str, Any]) -> Conversation:
    """Check the body of a request; raises RequestError that names the field."""
    if body.get("previous_response_id") is not None:
        raise c.refusal("previous_response_id", "nothing is kept here", hint="send the whole input in each request")
    c.refuse(body, _UNSUPPORTED)
    tools = c.unique_tools([tool.definition for tool in _tools(body)])
    text = c.get(body, "text", dict, {})
    messages = _input(body.get("input"))
    if instructions := c.get(body, "instructions", str, ""):
        messages.insert(0, Message("system", instructions))
    if not messages:
        raise c.refusal("input", "expected at least one message")
    choice, tools = _choice(body.get("tool_choice"), tools)
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        tool_choice=choice,
        parallel_calls=c.get(body, "parallel_tool_calls", bool, True),
        max_tokens=c.limit(body, "max_output_tokens"),
        sampling=c.sampling(body),
        stops=c.stops(body.get("stop")),
        reasoning=c.reasoning(body),
        response_schema=c.response_schema("text.format", text.get("format"), None),
        form_field="text.format",
        logprobs=_logprobs(body),
        stream=c.get(body, "stream", bool, False),
    )


def kept(body: Mapping[str, Any]) -> dict[str, Any]:
    """What writers need of a body, most of which a response repeats."""
    names = ("include", "instructions", "metadata", "text", "tool_choice", "tools")
    return {name: body[name] for name in names if name in body}


def _logprobs(body: Mapping[str, Any]) -> int | None:
    top = c.integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    include = c.get(body, "include", list, [])
    return top or 0 if top or "message.output_text.logprobs" in include else None


@dataclass(frozen=True, slots=True)
class _Tool:
    """A definition for the model, and what the tool is to the client. custom: takes bare text, here one argument."""

    definition: dict[str, Any]
    name: str
    namespace: str | None
    custom: bool


def _tools(body: Mapping[str, Any]) -> list[_Tool]:
    made = []
    for i, record in enumerate(c.records(body, "tools", c.MAX_TOOLS, [])):
        if record.get("type") != "namespace":
            made += _tool(f"tools[{i}]", record, None)
            continue
        namespace = c.get(record, "name", str, "", f"tools[{i}].")
        for k, inner in enumerate(c.get(record, "tools", list, [], f"tools[{i}].")):
            where = f"tools[{i}].tools[{k}]"
            made += _tool(where, c.as_object(where, inner), namespace)
    if len(made) > c.MAX_TOOLS:
        raise c.refusal("tools", f"{len(made)} of them; the limit is {c.MAX_TOOLS}")
    return made


def _tool(where: str, record: dict[str, Any], namespace: str | None) -> list[_Tool]:
    """One tool; none for those that are not the client's to run."""
    kind = c.get(record, "type", str, where=f"{where}.")
    if kind not in ("function", "custom"):
        return []
    name = c.get(record, "name", str, where=f"{where}.")
    description, parameters = record.get("description"), record.get("parameters")
    if kind == "custom":
        form = c.get(record, "format", dict, {}, f"{where}.")
        definition = c.get(form, "definition", str, "", f"{where}.format.")
        description = "\n\n".join(filter(None, (c.get(record, "description", str, "", f"{where}."), definition)))
        parameters = _CUSTOM_SCHEMA
    made = c.tool(where, _full_name(name, namespace), description, parameters)
    return [_Tool(made, name, namespace, kind == "custom")]


def _full_name(name: str, namespace: str | None) -> str:
    """The name that the model knows a tool by."""
    return name if not namespace else f"{namespace}__{name}"


def _named(where: str, record: dict[str, Any]) -> str:
    """The full name of the tool that a record names."""
    return _full_name(c.get(record, "name", str, where=where), c.get(record, "namespace", str, None, where))


def _choice(value: Any, tools: tuple[dict[str, Any], ...]) -> tuple[Any, tuple[dict[str, Any], ...]]:
    """The choice, and the tools that it leaves."""
    if value is None or value in ("auto", "none"):
        return value or "auto", tools
    if value == "required":
        if not tools:
            raise c.refusal("tool_choice", "a call is required, and there are no tools")
        return value, tools
    if type(value) is dict and value.get("type") in ("function", "custom"):
        return c.chosen(_named("tool_choice.", value), tools, "tool_choice.name"), tools
    if type(value) is dict and value.get("type") == "allowed_tools":
        own = [item for item in c.records(value, "tools", c.MAX_TOOLS) if item.get("type") in ("function", "custom")]
        return c.allowed({**value, "tools": own}, tools, "tool_choice.", _named)
    raise c.refusal("tool_choice", "expected 'auto', 'none', 'required', a function or custom tool, or allowed_tools")


# --- input ------------------------------------------------------------------------------------


class _Turns:
    """Messages in the making: the items of one turn of the model become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, message: Message) -> None:
        """Add a message that is not the model's."""
        self.close()
        self.messages.append(message)

    def say(self, text: str) -> None:
        """Add text of the model."""
        if self._calls:
            self.close()
        self._texts.append(text)

    def think(self, text: str) -> None:
        """Add reasoning, which begins a turn unless one has begun with it."""
        if self._texts or self._calls:
            self.close()
        self._thoughts.append(text)

    def call(self, call: ToolCall) -> None:
        """Add a call."""
        self._calls.append(call)

    def close(self) -> None:
        """End the model's turn."""
        if self._texts or self._calls:
            text, thought = "\n".join(self._texts), "\n".join(filter(None, self._thoughts))
            self.messages.append(Message("assistant", text, thought, tuple(self._calls)))
        self._texts, self._thoughts, self._calls = [], [], []


def _input(value: Any) -> list[Message]:
    if type(value) is str:
        return [Message("user", value)] if value else []
    if type(value) is not list or len(value) > c.MAX_MESSAGES:
        raise c.refusal("input", f"expected a string or a list of at most {c.MAX_MESSAGES} items")
    turns = _Turns()
    for i, item in enumerate(value):
        _item(f"input[{i}]", c.as_object(f"input[{i}]", item), turns)
    turns.close()
    return turns.messages


def _item(where: str, item: dict[str, Any], turns: _Turns) -> None:
    kind = c.get(item, "type", str, "message", f"{where}.")
    if kind == "message":
        role = _ROLES.get(c.get(item, "role", str, where=f"{where}."))
        if role is None:
            raise c.refusal(f"{where}.role", f"expected one of {', '.join(_ROLES)}")
        text = c.joined(f"{where}.content", item.get("content"), _part)
        if role == "assistant":
            turns.say(text)
        else:
            turns.add(Message(role, text))
    elif kind == "function_call":
        name = _named(f"{where}.", item)
        arguments = c.get(item, "arguments", str, "{}", f"{where}.")
        turns.call(c.call(c.get(item, "call_id", str, where=f"{where}."), name, arguments))
    elif kind == "custom_tool_call":
        name = _named(f"{where}.", item)
        arguments = {"input": c.get(item, "input", str, "", f"{where}.")}
        turns.call(ToolCall(c.get(item, "call_id", str, where=f"{where}."), name, arguments))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        call_id = c.get(item, "call_id", str, where=f"{where}.")
        turns.add(Message("tool", _output(f"{where}.output", item.get("output")), tool_call_id=call_id))
    elif kind == "reasoning":
        turns.think(_reasoning(where, item))
    elif kind == "item_reference":
        raise c.refusal(where, "nothing is kept here", hint="send the item itself: `store`: false has clients do so")


def _part(where: str, record: dict[str, Any]) -> str:
    kind = c.get(record, "type", str, where=f"{where}.")
    if kind in ("input_text", "output_text", "text", "refusal"):
        text: str = c.get(record, "refusal" if kind == "refusal" else "text", str, where=f"{where}.")
        return text
    if kind in _NOTES:
        return _NOTES[kind]
    raise c.refusal(f"{where}.type", f"{kind[:40]!r} cannot be read")


def _output(where: str, value: Any) -> str:
    if type(value) is dict:  # what older Codex versions send
        return c.joined(f"{where}.content", value.get("content"), _part)
    return c.joined(where, value, _part)


def _reasoning(where: str, item: dict[str, Any]) -> str:
    """The text of a reasoning item: its content, or what was given out as encrypted; summaries are not it."""
    content = item.get("content")
    if type(content) is list and content:
        texts = [c.get(c.as_object(f"{where}.content", part), "text", str, "") for part in content]
        return "".join(texts)
    kept = item.get("encrypted_content")
    if type(kept) is str and kept.startswith(_KEPT):
        try:
            return base64.b64decode(kept[len(_KEPT) :], validate=True).decode()
        except (binascii.Error, ValueError):
            pass
    return ""


# --- replies ----------------------------------------------------------------------------------


def _usage(used: Usage) -> dict[str, Any]:
    return {
        "input_tokens": used.prompt,
        "input_tokens_details": {"cached_tokens": used.cached, "cache_write_tokens": 0},
        "output_tokens": used.completion,
        "output_tokens_details": {"reasoning_tokens": used.reasoning},
        "total_tokens": used.prompt + used.completion,
    }


class Writer:
    """Writes one reply: `whole`, or `start`, parts and `end` of a stream.

    body: of the request, parts of which a response repeats.
    """

    def __init__(self, model: str, body: Mapping[str, Any], conversation: Conversation) -> None:
        self._tools = {tool.definition["function"]["name"]: tool for tool in reversed(_tools(body))}
        self._keep = "reasoning.encrypted_content" in c.get(body, "include", list, [])
        sampling = conversation.sampling
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "instructions": body.get("instructions"),
            "max_output_tokens": conversation.max_tokens,
            "metadata": metadata if type(metadata := body.get("metadata")) is dict else {},
            "parallel_tool_calls": conversation.parallel_calls,
            "previous_response_id": None,
            "reasoning": {"effort": conversation.reasoning.effort, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_logprobs": conversation.logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }
        self._number = 0  # of events
        self._output: list[dict[str, Any]] = []
        self._open: Text | WholeCall | None = None  # the item that is being written
        self._logprobs: list[dict[str, Any]] = []  # of its tokens
        self._id = ""

    @property
    def keep_alive(self) -> bytes:
        """Write that the reply goes on: an event, since Codex takes no comment for a sign of life.

        What a request can make long is left out: this may come a hundred times.
        """
        made = self._response("in_progress") | {"instructions": None, "metadata": {}, "output": [], "tools": []}
        if type(made["tool_choice"]) is dict:
            made["tool_choice"] = "auto"
        del made["text"]
        return self._event("response.in_progress", response=made)

    def whole(self, parts: Sequence[Part], finish: Finish) -> dict[str, Any]:
        """Make the object of a reply that is not streamed."""
        for part in parts:
            self.part(part)
        self.end(finish)
        return self._response(_status(finish), finish)

    def start(self, prompt_tokens: int) -> bytes:
        """Write the first events."""
        made = self._response("in_progress")
        return self._event("response.created", response=made) + self._event("response.in_progress", response=made)

    def part(self, part: Part) -> bytes:
        """Write the events of a part."""
        if isinstance(part, Text):
            made = b""
            if not isinstance(self._open, Text) or self._open.kind != part.kind:
                made = self._close() + self._begin(Text(part.kind, ""))
            assert isinstance(self._open, Text)
            self._open = Text(part.kind, self._open.text + part.text)
            kind = "reasoning_text" if part.kind == "reasoning" else "output_text"
            logprobs = [*map(entry, part.logprobs)]
            self._logprobs += logprobs
            more: dict[str, Any] = {} if part.kind == "reasoning" else {"logprobs": logprobs}
            return made + self._inside(f"response.{kind}.delta", content_index=0, delta=part.text, **more)
        if isinstance(part, CallStart):
            return self._close() + self._begin(WholeCall(part.id, part.name, ""))
        if isinstance(part, CallArguments):
            call = self._open
            assert isinstance(call, WholeCall)
            self._open = WholeCall(call.id, call.name, call.arguments + part.text)
            if self._is_custom(call):
                return b""
            return self._inside("response.function_call_arguments.delta", delta=part.text)
        return self._close("completed" if part.complete else "incomplete")

    def end(self, finish: Finish) -> bytes:
        """Write the end."""
        status = _status(finish)
        made = self._close(status)  # an item that is open now is one that was cut
        return made + self._event(f"response.{status}", response=self._response(status, finish))

    def failed(self, error: SparkError) -> bytes:
        """Write a failure that came too late for a status."""
        _, message, code = explain(error)
        failed = self._response("failed") | {"error": {"code": code, "message": message}}
        return self._event("response.failed", response=failed)

    def _response(self, status: str, finish: Finish | None = None) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._head | {
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "output": list(self._output),
            "usage": None if finish is None else _usage(finish.usage),
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        made = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(made)}\n\n".encode()

    def _inside(self, kind: str, **fields: Any) -> bytes:
        """An event of the item that is being written."""
        return self._event(kind, item_id=self._id, output_index=len(self._output), **fields)

    def _begin(self, item: Text | WholeCall) -> bytes:
        self._open, self._logprobs = item, []
        prefix = "fc" if isinstance(item, WholeCall) else "rs" if item.kind == "reasoning" else "msg"
        if isinstance(item, WholeCall) and self._is_custom(item):
            prefix = "ctc"
        self._id = f"{prefix}_{secrets.token_hex(12)}"
        made = self._event("response.output_item.added", output_index=len(self._output), item=self._item("in_progress"))
        if isinstance(item, Text):
            made += self._inside("response.content_part.added", content_index=0, part=self._content(item))
        return made

    def _close(self, status: str = "completed") -> bytes:
        """End the item that is being written."""
        item = self._open
        if item is None:
            return b""
        done = self._item(status)
        if isinstance(item, Text):
            kind = "reasoning_text" if item.kind == "reasoning" else "output_text"
            more: dict[str, Any] = {} if item.kind == "reasoning" else {"logprobs": self._logprobs}
            made = self._inside(f"response.{kind}.done", content_index=0, text=item.text, **more)
            made += self._inside("response.content_part.done", content_index=0, part=self._content(item))
        elif self._is_custom(item):
            made = self._inside("response.custom_tool_call_input.delta", delta=done["input"])
            made += self._inside("response.custom_tool_call_input.done", input=done["input"])
        else:
            made = self._inside("response.function_call_arguments.done", name=done["name"], arguments=item.arguments)
        made += self._event("response.output_item.done", output_index=len(self._output), item=done)
        self._output.append(done)
        self._open = None
        return made

    def _is_custom(self, call: WholeCall) -> bool:
        tool = self._tools.get(call.name)
        return tool is not None and tool.custom

    def _item(self, status: str) -> dict[str, Any]:
        """The item that is being written, as the API has it."""
        item = self._open
        assert item is not None
        made: dict[str, Any] = {"id": self._id, "status": status}
        if isinstance(item, WholeCall):
            tool = self._tools.get(item.name)
            call = {"call_id": item.id, "name": item.name if tool is None else tool.name}
            if tool is not None and tool.namespace:
                call["namespace"] = tool.namespace
            if self._is_custom(item):
                return made | {"type": "custom_tool_call", **call, "input": _custom_input(item)}
            return made | {"type": "function_call", **call, "arguments": item.arguments}
        content = [self._content(item)] if status != "in_progress" else []
        if item.kind == "content":
            return made | {"type": "message", "role": "assistant", "content": content}
        made |= {"type": "reasoning", "summary": [], "content": content}
        if self._keep:
            kept = base64.b64encode(item.text.encode(errors="replace")).decode()
            made["encrypted_content"] = _KEPT + kept if status != "in_progress" else None
        return made

    def _content(self, item: Text) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": item.text}
        return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": self._logprobs}


def _status(finish: Finish) -> str:
    return "incomplete" if finish.reason == "length" else "completed"


def _custom_input(call: WholeCall) -> str:
    """What a custom tool is given; all that the model wrote where that is not the one argument."""
    found = call.input().get("input")
    return found if isinstance(found, str) else call.arguments
