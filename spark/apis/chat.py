"""OpenAI's chat completions: bodies become conversations, parts of replies its objects.

What a request asks for and this server cannot do is refused by name, never ignored; fields that change nothing
(`user`, `metadata`, ...) are.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from engine.ground.errors import SparkError
from engine.ground.protocol import MAX_TOP_LOGPROBS
from spark.apis import dialects
from spark.apis.http import explain, openai_error
from spark.apis.recall import kept_messages, kv_recall
from spark.apis.written import Written
from spark.speech import conversation as c
from spark.speech.conversation import CallArguments, CallEnd, CallStart, Conversation, Finish, Part, Text, Usage
from spark.speech.logprobs import entry
from spark.speech.sessions import Message, Role, ToolCall

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# Parts of messages that sessions hold and that must not make them unusable.
_NOTES = {
    "image_url": c.IMAGE_NOTE,
    "input_image": c.IMAGE_NOTE,
    "image": c.IMAGE_NOTE,
    "file": c.FILE_NOTE,
    "input_file": c.FILE_NOTE,
    "input_audio": c.AUDIO_NOTE,
    "audio_url": c.AUDIO_NOTE,
    "video_url": c.VIDEO_NOTE,
}
_Tools: TypeAlias = tuple[dict[str, Any], ...]
_REASONING = ("reasoning_content", "reasoning", "reasoning_text")  # what clients call it that send it back
_VARIABLES = ("enable_thinking", "preserve_thinking", "reasoning_effort")  # of templates, that may be given
_FORMER = {"functions": "tools", "function_call": "tool_choice"}  # of the API, and what came in their place
# What cannot be done, and the values that ask for nothing.
_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "logit_bias": [{}],
    "echo": [False],
    "best_of": [1],
    "audio": [],
    "modalities": [["text"]],
    "web_search_options": [],
    "moderation": [],
}


def parse(body: Mapping[str, Any]) -> Conversation:
    """Check the body of a request; raises RequestError that names the field."""
    c.refuse(body, {**_UNSUPPORTED, **dialects.UNSUPPORTED})
    c.refuse_moved(body, _FORMER, {"functions": [[]], "function_call": ["none"]})
    tools = c.unique_tools([_tool(f"tools[{i}]", t) for i, t in enumerate(c.records(body, "tools", c.MAX_TOOLS, []))])
    messages = c.records(body, "messages", c.MAX_MESSAGES)
    if not messages:
        raise c.refusal("messages", "expected at least one")
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    stream_options(body)
    choice, tools = _choice(body.get("tool_choice"), tools)
    made = tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))
    recall = kv_recall(body)
    kept = kept_messages(body, [(i, i + 1) for i in range(len(made))], made)
    form_field, form = dialects.schema(body)
    written = ""
    if dialects.continues(body, messages):
        if made[-1].role != "assistant" or made[-1].tool_calls or len(made) == 1:
            raise c.refusal("continue_final_message", "expected a text of the assistant's as the last of the messages")
        if form is not None and made[-1].content.strip():
            raise c.refusal(form_field, "not together with a last message that is the beginning of the reply")
        written, made = made[-1].content, made[:-1]
    return Conversation(
        messages=made,
        tools=tools,
        tool_choice=choice,
        parallel_calls=c.get(body, "parallel_tool_calls", bool, True),
        max_tokens=c.limit(body, name),
        sampling=dialects.sampling(body),
        stops=c.stops(body.get("stop")),
        reasoning=_reasoning(body),
        response_schema=form,
        form_field=form_field,
        written=written,
        endless=dialects.endless(body),
        choices=c.integer(body, "n", 1, c.MAX_CHOICES) or 1,
        logprobs=_logprobs(body),
        draft=c.draft(body),
        kv_recall=recall,
        kept_messages=kept,
        prediction=_prediction(body),
        stream=c.get(body, "stream", bool, False),
    )


def stream_options(body: Mapping[str, Any]) -> bool:
    """Whether a stream is to end with its usage."""
    wanted: bool = c.get(c.get(body, "stream_options", dict, {}), "include_usage", bool, False, "stream_options.")
    return wanted


def kept(body: Mapping[str, Any]) -> dict[str, Any]:
    """What writers need of a body."""
    return {"stream_options": {"include_usage": stream_options(body)}}


def _logprobs(body: Mapping[str, Any]) -> int | None:
    top = c.integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if c.get(body, "logprobs", bool, False):
        return top
    if top:
        raise c.refusal("top_logprobs", "expected logprobs to be true beside it")
    return None


def _prediction(body: Mapping[str, Any]) -> str:
    """The text that the client expects, or much of it; what is written does not depend on it."""
    given = c.get(body, "prediction", dict, None)
    if given is None:
        return ""
    if c.get(given, "type", str, where="prediction.") != "content":
        raise c.refusal("prediction.type", "expected 'content'")
    if given.get("content") is None:
        raise c.refusal("prediction.content", "missing")
    return c.joined("prediction.content", given["content"], _predicted)


def _predicted(where: str, record: dict[str, Any]) -> str:
    if c.get(record, "type", str, where=f"{where}.") != "text":
        raise c.refusal(f"{where}.type", "expected 'text'")
    text: str = c.get(record, "text", str, where=f"{where}.")
    return text


def _tool(where: str, record: dict[str, Any]) -> dict[str, Any]:
    if record.get("type") != "function":
        raise c.refusal(f"{where}.type", "expected 'function'")
    function = c.get(record, "function", dict, where=f"{where}.")
    where += ".function"
    name = c.get(function, "name", str, where=f"{where}.")
    return c.tool(where, name, function.get("description"), function.get("parameters"))


def _choice(value: Any, tools: _Tools) -> tuple[Any, _Tools]:
    """The choice, and the tools that it leaves."""
    if (word := c.choice_by_word(value, tools)) is not None:
        return word, tools
    if type(value) is dict and value.get("type") == "function":
        return c.chosen(_function_name("tool_choice.", value), tools, "tool_choice.function.name"), tools
    if type(value) is dict and value.get("type") == "allowed_tools":
        some = c.get(value, "allowed_tools", dict, where="tool_choice.")
        return c.allowed(some, tools, "tool_choice.allowed_tools.", _function_name)
    raise c.refusal("tool_choice", "expected 'auto', 'none', 'required', a function or allowed_tools")


def _function_name(where: str, record: dict[str, Any]) -> str:
    function = c.get(record, "function", dict, where=where)
    name: str = c.get(function, "name", str, where=f"{where}function.")
    return name


def _reasoning(body: Mapping[str, Any]) -> c.Reasoning:
    """What the fields of OpenAI's API and those that other servers have in their place ask for."""
    made = c.reasoning(body)
    where = "chat_template_kwargs."
    variables = c.get(body, "chat_template_kwargs", dict, {})
    if unknown := sorted(variables.keys() - set(_VARIABLES)):
        raise c.refusal(where + unknown[0][:40], f"not supported; known are {', '.join(_VARIABLES)}")
    enabled = c.get(variables, "enable_thinking", bool, None, where)
    if enabled is None:
        enabled = c.get(body, "enable_thinking", bool, None)
    budget, effort, named = made.budget_tokens, made.effort, "reasoning_effort"
    if effort is None and (effort := c.get(variables, "reasoning_effort", str, None, where)):
        named = where + "reasoning_effort"
    if thinking := c.get(body, "thinking", dict, {}):
        kind = c.get(thinking, "type", str, where="thinking.")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise c.refusal("thinking.type", "expected enabled, disabled or adaptive")
        budget = c.tokens(thinking, "budget_tokens", "thinking.") if budget is None else budget
        enabled = kind != "disabled" if enabled is None else enabled
    if enabled is None:
        enabled = made.enabled
    preserve = c.get(variables, "preserve_thinking", bool, None, where)
    if preserve is None:
        preserve = c.get(body, "preserve_thinking", bool, None)
    return replace(c.made_reasoning(enabled, budget, effort, named), preserve=preserve)


def _message(where: str, record: dict[str, Any]) -> Message:
    role = _ROLES.get(c.get(record, "role", str, where=f"{where}."))
    if role is None:
        raise c.refusal(f"{where}.role", f"expected one of {', '.join(_ROLES)}")
    reasoning = ""
    calls: tuple[ToolCall, ...] = ()
    if role == "assistant":
        name = next((name for name in _REASONING if record.get(name) is not None), "reasoning")
        reasoning = c.get(record, name, str, "", f"{where}.")
        made = c.get(record, "tool_calls", list, [], f"{where}.")
        calls = tuple(_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(made))
    call_id = c.get(record, "tool_call_id", str, "", f"{where}.") if role == "tool" else ""
    return Message(role, c.joined(f"{where}.content", record.get("content"), _part), reasoning, calls, call_id)


def _part(where: str, record: dict[str, Any]) -> str:
    kind = c.get(record, "type", str, where=f"{where}.")
    if kind in _NOTES:
        return _NOTES[kind]
    if kind not in ("text", "refusal"):
        raise c.refusal(f"{where}.type", f"expected text, refusal, {', '.join(_NOTES)}")
    text: str = c.get(record, kind, str, where=f"{where}.")
    return text


def _call(where: str, value: Any) -> ToolCall:
    record = c.as_object(where, value)
    function = c.get(record, "function", dict, where=f"{where}.")
    name = c.get(function, "name", str, where=f"{where}.function.")
    arguments = c.get(function, "arguments", str, "{}", f"{where}.function.")
    return c.call(c.get(record, "id", str, "", f"{where}."), name, arguments)


# --- replies ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Choices:
    """What the choices of a reply have in common. left: how many have not ended; usage: of those that have.

    made: the choices of a reply that is not streamed, as far as they are written.
    """

    head: dict[str, Any]
    include_usage: bool
    left: int
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    made: list[dict[str, Any]] = field(default_factory=list)

    def add(self, choice: dict[str, Any], finish: Finish) -> dict[str, Any]:
        """Add a choice of a reply that is not streamed; the reply so far."""
        self.made.append(choice)
        self.usage += finish.usage
        return {**self.head, "choices": self.made, "usage": usage(self.usage)}

    def end(self, finish: Finish) -> bytes:
        """End a choice of a stream; what the stream ends with, if this was the last."""
        self.usage += finish.usage
        self.left -= 1
        if self.left:
            return b""
        last = event({**self.head, "choices": [], "usage": usage(self.usage)}) if self.include_usage else b""
        return last + b"data: [DONE]\n\n"


def writers(model: str, body: Mapping[str, Any], conversation: Conversation) -> list[Writer]:
    """Make the writers of a reply, one for each choice."""
    first = Writer(model, body, conversation)
    return [first, *(Writer(model, body, conversation, i, first.choices) for i in range(1, conversation.replies))]


class Writer:
    """Writes one choice of a reply: `whole`, or `start`, parts and `end` of a stream.

    body: of the request, which may ask for a chunk of usage at the end, which every other chunk announces. choices:
    what the other writers of the reply have, in the order of the choices.
    """

    keep_alive = b": nothing new\n\n"

    def __init__(
        self,
        model: str,
        body: Mapping[str, Any],
        conversation: Conversation,
        index: int = 0,
        choices: Choices | None = None,
    ) -> None:
        kind = "chat.completion.chunk" if conversation.stream else "chat.completion"
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}
        self.choices = choices or Choices(head, stream_options(body), conversation.replies)
        self._index, self._logprobs = index, conversation.logprobs is not None
        self._calls = 0
        self._held: list[Part] = []
        self._tokens = Written()  # of what is held

    def hold(self, parts: Sequence[Part]) -> None:
        """Take parts of a reply that is not streamed, as they come."""
        for part in parts:
            if isinstance(part, Text) and part.logprobs:
                self._tokens.add(map(entry, part.logprobs))
                part = Text(part.kind, part.text)
            self._held.append(part)

    def whole(self, parts: Sequence[Part], finish: Finish) -> dict[str, Any]:
        """Make the object of a reply that is not streamed, with the choices that were written before.

        parts: the last ones, behind those that are held.
        """
        self.hold(parts)
        texts = {"content": "", "reasoning": ""}
        calls = []
        for part in c.whole(self._held):
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
        choice = {
            "index": self._index,
            "message": message,
            "logprobs": self._shown(self._tokens),
            "finish_reason": finish.reason,
        }
        return self.choices.add(choice, finish)

    def start(self, prompt_tokens: int) -> bytes:
        """Write the first chunk, which says who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def part(self, part: Part) -> bytes:
        """Write the chunk of a part."""
        if isinstance(part, Text) and part.kind == "reasoning":
            return self._chunk({"reasoning_content": part.text})
        if isinstance(part, Text):
            return self._chunk({"content": part.text}, logprobs=self._shown([*map(entry, part.logprobs)]))
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
        """Write the end: why, then, if no other choice goes on, the usage where it is wanted."""
        return self._chunk({}, finish.reason) + self.choices.end(finish)

    def failed(self, error: SparkError) -> bytes:
        """Write a failure that came too late for a status."""
        return event(openai_error(*explain(error), error.field)) + b"data: [DONE]\n\n"

    def _shown(self, entries: Sequence[dict[str, Any]] | Written) -> dict[str, Any] | None:
        return {"content": entries, "refusal": None} if self._logprobs else None

    def _chunk(
        self, delta: Mapping[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        made = {**self.choices.head, "choices": [choice]}
        return event(made | {"usage": None} if self.choices.include_usage else made)


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
        "completion_tokens_details": {
            "reasoning_tokens": used.reasoning,
            "accepted_prediction_tokens": used.accepted,
            "rejected_prediction_tokens": used.drafted - used.accepted,
        },
        **used.shown_more(),
    }
