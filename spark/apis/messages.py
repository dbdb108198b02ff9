"""Anthropic's messages: bodies become conversations, parts of replies content blocks.

What a request asks for and this server cannot do is refused by name, with exceptions that Claude Code's sessions take
for granted: pictures and PDFs become a note, tools that run at Anthropic are left out, and so are the blocks that they
leave in a conversation; hints for its caches and other fields that do not change what a reply says are ignored. The
text block `x-anthropic-billing-header` is dropped: it differs in each request, and nothing after it could be reused.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from engine.ground.errors import ContextOverflowError, RequestError, SparkError
from spark.apis.http import anthropic_error, explain, prompt_too_long
from spark.apis.message_tools import CHANGES, offered
from spark.apis.recall import kept_messages, kv_recall
from spark.apis.sealed import seal, unseal
from spark.speech import conversation as c
from spark.speech.conversation import CallArguments, CallStart, Conversation, Finish, Part, Text, Usage
from spark.speech.sessions import Message, ToolCall

_BILLING = "x-anthropic-billing-header"
_UNSUPPORTED: Mapping[str, Sequence[Any]] = {"mcp_servers": [[]], "container": []}
# Fields of chat completions, and what is in their place here.
_ELSEWHERE = {
    "response_format": "output_config.format", "stop": "stop_sequences", "max_completion_tokens": "max_tokens",
    "n": "a request for each reply",
}  # fmt: skip
# What the official SDKs' tool runners know: they leave the field out then, and ask again.
_UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SIGNATURE = "spark-"
# Blocks that sessions hold and that must not make them unusable.
_NOTES = {
    "image": c.IMAGE_NOTE,
    "audio": c.AUDIO_NOTE,
    "video": c.VIDEO_NOTE,
    "file": c.FILE_NOTE,
    "container_upload": c.FILE_NOTE,
}
# Blocks of the model's turns that are nothing to a model, beside the results of tools that ran at Anthropic.
_LEFT_OUT = ("redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_listing", "fallback")


def parse(body: Mapping[str, Any]) -> Conversation:
    """Check the body of a request; raises RequestError that names the field."""
    c.refuse(body, {"compaction": []})  # a summary in place of a reply; to count its tokens is something else
    max_tokens = c.limit(body, "max_tokens", 0)
    if max_tokens is None:
        raise c.refusal("max_tokens", "missing")
    return _parse(body, max_tokens)


def parse_count(body: Mapping[str, Any]) -> Conversation:
    """Check the body of a request to count tokens."""
    return _parse(body, None)


def kept(body: Mapping[str, Any]) -> dict[str, Any]:
    """What writers need of a body."""
    return {"thinking": {"display": "omitted"}} if _omits(body) else {}


def _omits(body: Mapping[str, Any]) -> bool:
    """Whether the client does not want to see reasoning, but to send it back; other displays are all the same here."""
    return bool(c.get(c.get(body, "thinking", dict, {}), "display", str, "", "thinking.") == "omitted")


def _parse(body: Mapping[str, Any], max_tokens: int | None) -> Conversation:
    c.refuse(body, _UNSUPPORTED)
    c.refuse_moved(body, _ELSEWHERE, {"n": [1], "stop": [[], ""]})
    if body.get("thread") is not None:
        raise RequestError("thread: not supported", hint="leave thread out", field="thread", details=_UNTHREADED)
    messages = [Message("system", text)] if (text := _system(body.get("system"))) else []
    given = c.records(body, "messages", c.MAX_MESSAGES)
    if not given:
        raise c.refusal("messages", "expected at least one")
    tools = offered(body, given)
    places = []
    last_user = max((i for i, record in enumerate(given) if record.get("role") == "user"), default=-1)
    for i, record in enumerate(given):
        made = _messages(f"messages[{i}]", record)
        if record.get("clear_at") == "next_user_message" and record["role"] == "system" and i < last_user:
            made = []
        places.append((len(messages), len(messages) + len(made)))
        messages += made
    written = ""
    if messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:
        written = messages.pop().content  # clients begin a reply this way
    if not messages:
        raise c.refusal("messages", "expected one that is not the assistant's")
    choice, parallel = _choice(body, tools)
    output = c.get(body, "output_config", dict, {})
    form_field, form = "output_config.format", output.get("format")
    if form is None:
        form_field, form = "output_format", body.get("output_format")
    if form is not None and written.strip():
        raise c.refusal(form_field, "not together with messages that end with the beginning of the reply")
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        tool_choice=choice,
        parallel_calls=parallel,
        max_tokens=max_tokens,
        sampling=c.sampling({key: body.get(key) for key in ("temperature", "top_p", "top_k", "seed")}),
        stops=c.stops(c.get(body, "stop_sequences", list, []), "stop_sequences"),
        reasoning=_reasoning(body, c.get(output, "effort", str, None, "output_config."), messages),
        response_schema=c.response_schema(form_field, form, None),
        form_field=form_field,
        written=written,
        draft=c.draft(body),
        kv_recall=kv_recall(body),
        kept_messages=kept_messages(body, places, messages),
        stream=c.get(body, "stream", bool, False),
    )


def _reasoning(body: Mapping[str, Any], effort: str | None, messages: Sequence[Message]) -> c.Reasoning:
    thinking = body.get("thinking")
    if thinking is None:  # clients that do not ask for thinking take the first block for text
        return c.made_reasoning(False, None, None)
    kind = c.get(c.as_object("thinking", thinking), "type", str, where="thinking.")
    if kind not in ("enabled", "disabled", "adaptive", "between_tools"):
        raise c.refusal("thinking.type", "expected enabled, disabled, adaptive or between_tools")
    if kind == "between_tools":  # of what tools have said alone
        last = next((message.role for message in reversed(messages) if message.role != "system"), "user")
        kind = "adaptive" if last == "tool" else "disabled"
    budget = c.tokens(thinking, "budget_tokens", "thinking.")
    effort = effort if kind == "adaptive" else None
    return c.made_reasoning(kind != "disabled", budget, effort, "output_config.effort")


def _choice(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> tuple[Any, bool]:
    given = c.get(body, "tool_choice", dict, None)
    if given is None:
        return "auto", True
    parallel = not c.get(given, "disable_parallel_tool_use", bool, False, "tool_choice.")
    kind = c.get(given, "type", str, where="tool_choice.")
    if kind == "tool":
        return c.chosen(c.get(given, "name", str, where="tool_choice."), tools, "tool_choice.name"), parallel
    if kind not in ("auto", "none", "any"):
        raise c.refusal("tool_choice.type", "expected auto, any, tool or none")
    if kind == "any" and not tools:
        raise c.refusal("tool_choice", "a call is required, and there are no tools")
    return ("required" if kind == "any" else kind), parallel


def _system(value: Any) -> str:
    if type(value) is list:
        value = [block for block in value if not _is_billing(block)]
    elif type(value) is str and value.startswith(_BILLING):
        return ""
    return "\n\n".join(_texts("system", value))


def _is_billing(block: Any) -> bool:
    text = block.get("text") if type(block) is dict else None
    return type(text) is str and text.startswith(_BILLING)


def _texts(where: str, value: Any) -> list[str]:
    """The texts of a string or of a list of blocks."""
    if value is None or type(value) is str:
        return [value] if value else []
    if type(value) is not list:
        raise c.refusal(where, f"expected a string or a list of blocks, found {c.shown(value)}")
    return [_text(f"{where}[{i}]", c.as_object(f"{where}[{i}]", block)) for i, block in enumerate(value)]


def _text(where: str, block: dict[str, Any]) -> str:
    kind = c.get(block, "type", str, where=f"{where}.")
    if kind == "text":
        text: str = c.get(block, "text", str, where=f"{where}.")
        return text
    if kind in _NOTES:
        return _NOTES[kind]
    if kind == "document":
        source = c.get(block, "source", dict, where=f"{where}.")
        if source.get("type") == "text":
            return str(c.get(source, "data", str, where=f"{where}.source."))
        if source.get("type") == "content":
            return "\n".join(_texts(f"{where}.source.content", source.get("content")))
        return "[a document was here; this model reads text only]"
    if kind == "compaction":  # what came before it; null where that could not be summed up
        return str(c.get(block, "content", str, "", f"{where}."))
    if kind == "search_result":
        title = c.get(block, "title", str, "", f"{where}.")
        return "\n".join([title, *_texts(f"{where}.content", block.get("content"))])
    if kind == "tool_reference":
        return str(c.get(block, "tool_name", str, "", f"{where}."))
    raise c.refusal(f"{where}.type", f"{kind[:40]!r} cannot be read")


def _messages(where: str, record: dict[str, Any]) -> list[Message]:
    """One message of the API, which may be several of ours: results of tools are messages of their own."""
    role = c.get(record, "role", str, where=f"{where}.")
    content = record.get("content")
    where += ".content"
    if role == "assistant":
        return [_assistant(where, content)]
    if role not in ("user", "system"):
        raise c.refusal(f"{where.removesuffix('.content')}.role", "expected user, assistant or system")
    if type(content) is not list:
        text = "\n\n".join(_texts(where, content))
        return [Message(role, text)] if text or role == "user" else []
    made: list[Message] = []
    texts: list[str] = []
    for i, item in enumerate(content):
        block = c.as_object(f"{where}[{i}]", item)
        if block.get("type") != "tool_result":
            if not _is_billing(block) and not (role == "system" and block.get("type") in CHANGES):
                texts.append(_text(f"{where}[{i}]", block))
            continue
        if texts:
            made.append(Message(role, "\n\n".join(texts)))
            texts = []
        call_id = c.get(block, "tool_use_id", str, where=f"{where}[{i}].")
        result = "\n".join(_texts(f"{where}[{i}].content", block.get("content")))
        made.append(Message("tool", result, tool_call_id=call_id))
    if texts or not (made or role == "system"):
        made.append(Message(role, "\n\n".join(texts)))
    return made


def _assistant(where: str, content: Any) -> Message:
    if type(content) is not list:
        return Message("assistant", "".join(_texts(where, content)))
    texts, thoughts = [], []
    calls: list[ToolCall] = []
    for i, item in enumerate(content):
        here = f"{where}[{i}]"
        block = c.as_object(here, item)
        kind = block.get("type")
        if kind == "thinking":  # whatever its signature, unless it stands for the text
            text = c.get(block, "thinking", str, where=f"{here}.")
            thoughts.append(text or unseal(block.get("signature")))
        elif kind == "tool_use":
            name = c.get(block, "name", str, where=f"{here}.")
            arguments = c.get(block, "input", dict, {}, f"{here}.")
            calls.append(ToolCall(c.get(block, "id", str, where=f"{here}."), name, arguments))
        elif not (kind in _LEFT_OUT or (type(kind) is str and kind.endswith("_tool_result"))):
            texts.append(_text(here, block))
    return Message("assistant", "".join(texts), "\n".join(thoughts), tuple(calls))


# --- replies ----------------------------------------------------------------------------------


def _event(made: Mapping[str, Any]) -> bytes:
    return f"event: {made['type']}\ndata: {json.dumps(made)}\n\n".encode()


def _usage(used: Usage) -> dict[str, Any]:
    return {
        "input_tokens": used.prompt - used.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached,
        "output_tokens": used.completion,
        "output_tokens_details": {"thinking_tokens": used.reasoning},
        **used.shown_more(),
    }


def _tool_id(call_id: str) -> str:
    return "toolu_" + call_id.removeprefix("call_")


class Writer:
    """Writes one reply: `whole`, or `start`, parts and `end` of a stream."""

    keep_alive = _event({"type": "ping"})

    def __init__(self, model: str, body: Mapping[str, Any], conversation: Conversation) -> None:
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}
        self._index = -1
        self._block: str | None = None  # type of the block that is open
        self._thought = ""
        self._omits = _omits(body)
        self._held: list[Part] = []

    def hold(self, parts: Sequence[Part]) -> None:
        """Take parts of a reply that is not streamed, as they come."""
        self._held += parts

    def whole(self, parts: Sequence[Part], finish: Finish) -> dict[str, Any]:
        """Make the object of a reply that is not streamed; parts: the last ones, behind those that are held."""
        self.hold(parts)
        content: list[dict[str, Any]] = []
        for part in c.whole(self._held):
            if not isinstance(part, Text):
                content.append({"type": "tool_use", "id": _tool_id(part.id), "name": part.name, "input": part.input()})
            elif part.kind == "reasoning":
                shown = "" if self._omits else part.text
                content.append({"type": "thinking", "thinking": shown, "signature": self._signature(part.text)})
            else:
                content.append({"type": "text", "text": part.text})
        return {**self._head, "content": content, **_stop(finish), "usage": _usage(finish.usage)}

    def start(self, prompt_tokens: int) -> bytes:
        """Write the first events."""
        message: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"] = _usage(Usage(prompt_tokens, 0))
        return _event({"type": "message_start", "message": message}) + self.keep_alive

    def part(self, part: Part) -> bytes:
        """Write the events of a part."""
        if isinstance(part, Text) and part.kind == "reasoning":
            self._thought += part.text
            begun = self._to("thinking", {"thinking": "", "signature": ""})
            return begun if self._omits else begun + self._delta({"type": "thinking_delta", "thinking": part.text})
        if isinstance(part, Text):
            return self._to("text", {"text": ""}) + self._delta({"type": "text_delta", "text": part.text})
        if isinstance(part, CallStart):
            tool = {"id": _tool_id(part.id), "name": part.name, "input": {}}
            return self._close() + self._to("tool_use", tool)
        if isinstance(part, CallArguments):
            return self._delta({"type": "input_json_delta", "partial_json": part.text})
        return self._close()

    def end(self, finish: Finish) -> bytes:
        """Write the end."""
        delta = {"type": "message_delta", "delta": _stop(finish), "usage": _usage(finish.usage)}
        return self._close() + _event(delta) + _event({"type": "message_stop"})

    def failed(self, error: SparkError) -> bytes:
        """Write a failure that came too late for a status."""
        status, message, code = explain(error)
        if isinstance(error, ContextOverflowError):
            message = prompt_too_long(error)
        return _event(anthropic_error(status, message, code))

    def _signature(self, text: str) -> str:
        """What goes with reasoning: the reasoning itself where it is not shown, or something that is not looked at."""
        return seal(text) if self._omits else _SIGNATURE + hashlib.sha256(text.encode(errors="replace")).hexdigest()

    def _to(self, kind: str, block: Mapping[str, Any]) -> bytes:
        """Be in a block of a kind."""
        if self._block == kind:
            return b""
        made = self._close()
        self._index += 1
        self._block = kind
        start = {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **block}}
        return made + _event(start)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        made = b""
        if self._block == "thinking":
            made = self._delta({"type": "signature_delta", "signature": self._signature(self._thought)})
            self._thought = ""
        if self._block is not None:
            made += _event({"type": "content_block_stop", "index": self._index})
        self._block = None
        return made


def _stop(finish: Finish) -> dict[str, Any]:
    reason = "stop_sequence" if finish.stop is not None else _STOP_REASONS[finish.reason]
    if finish.full:  # no higher limit would have helped, which clients tell their users
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": finish.stop}
