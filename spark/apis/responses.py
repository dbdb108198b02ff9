"""OpenAI's responses, as Codex and OpenAI's SDKs speak them.

A request has the whole conversation, or refers to items and responses that were kept (`apis/kept.py`). What a request
asks for and this server cannot do is refused by name, with these exceptions, which Codex's sessions take for granted:
pictures become a note; searches of the web and pictures that OpenAI would make, and items that tools of OpenAI's have
left in the input, are left out; fields that do not change what a reply says are ignored. Functions that come in a
namespace, as those of MCP servers and of Codex's agents do, are functions named NAMESPACE__NAME for the model.
"""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.ground.errors import SparkError
from engine.ground.protocol import MAX_TOP_LOGPROBS
from spark.apis.bodies import Size
from spark.apis.http import explain
from spark.apis.kept import Kept, Key
from spark.apis.recall import kept_messages, kv_recall
from spark.apis.response_items import MOST_VALUES, Entry, Found, read, references, to_keep
from spark.apis.response_tools import Tool, call_item, choice, id_prefix, offered
from spark.apis.sealed import seal
from spark.apis.written import Written, dumps
from spark.speech import conversation as c
from spark.speech.conversation import CallArguments, CallStart, Conversation, Finish, Part, Text, Usage, WholeCall
from spark.speech.logprobs import entry
from spark.speech.sessions import Message

MAX_ECHO_BYTES = 64 << 10  # of JSON: what a response repeats of the request's tools, instructions and the like
_MAX_METADATA, _MAX_METADATA_KEY, _MAX_METADATA_VALUE = 16, 64, 512
_UNSUPPORTED: Mapping[str, Sequence[Any]] = {"conversation": [], "background": [False], "prompt": [], "moderation": []}
# Fields of chat completions, and what is in their place here.
_ELSEWHERE = {
    "response_format": "text.format", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    "messages": "input", "logprobs": "include", "n": "a request for each reply",
}  # fmt: skip
_NOT_KEPT = "what it refers to is not kept here, or not any more"


@dataclass(frozen=True, slots=True)
class Asked(Conversation):
    """A checked request.

    entries: its input's items, where the response is to be kept; before: what they follow. offered: those of its tools
    that are no plain functions.
    """

    keep: bool = True
    entries: tuple[Entry, ...] = ()
    before: tuple[Key, ...] = ()
    offered: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Refers:
    """What a request refers to: a response that it goes on from, and items, by their places in the input."""

    previous: str | None
    references: Sequence[tuple[int, str]]


def ask(body: Mapping[str, Any]) -> Asked | Refers:
    """Check the body of a request, unless it refers to what is kept; raises RequestError that names the field."""
    refers = Refers(c.get(body, "previous_response_id", str, None), references(body.get("input")))
    return refers if refers.previous is not None or refers.references else parse(body)


def resolved(kept: Kept, made: Asked | Refers) -> tuple[functools.partial[Asked], Size] | None:
    """`parse` with what a request refers to, and how much that is; None where it refers to nothing.

    Raises NotKeptError and ResponseNotKeptError.
    """
    if isinstance(made, Asked):
        return None
    keys: tuple[Key, ...] = ()
    before: list[bytes] = []
    if made.previous is not None:
        response = kept.response(made.previous)
        if response is None:
            name = "previous_response_id"
            raise c.ResponseNotKeptError(f"{name}: {_NOT_KEPT}", hint="send the whole input", field=name)
        keys, before = response
    items = kept.items(item_id for _, item_id in made.references)
    for i, item_id in made.references:
        if item_id not in items:
            hint = "send the item itself: `store`: false has clients do so"
            raise c.NotKeptError(f"input[{i}]: {_NOT_KEPT}", hint=hint, field="input")
    n = len(before) + len(made.references)
    n_bytes = sum(map(len, before)) + sum(len(items[item_id]) for _, item_id in made.references)
    return functools.partial(parse, found=Found(items, before), before=keys), Size(n_bytes, n, MOST_VALUES * n)


def parse(body: Mapping[str, Any], found: Found | None = None, before: tuple[Key, ...] = ()) -> Asked:
    """Check the body of a request; raises RequestError that names the field.

    found: all that the input refers to; before: the keys of what it goes on from.
    """
    c.refuse(body, _UNSUPPORTED)
    c.refuse_moved(body, _ELSEWHERE, {"n": [1], "logprobs": [False]})
    _check_metadata(body)
    _summary(body)
    keep = c.get(body, "store", bool, True)
    messages, entries, places, brought = read(body.get("input"), found or Found(), keep)
    if instructions := c.get(body, "instructions", str, ""):
        messages.insert(0, Message("system", instructions))
        places = [(begin + 1, end + 1) for begin, end in places]
    if not messages:
        raise c.refusal("input", "expected at least one message")
    tools, special = offered(body, brought.tools)
    body = {**body, "reasoning": brought.over(body, "reasoning")}
    chosen, tools = choice(body.get("tool_choice"), tools)
    return Asked(
        messages=tuple(messages),
        tools=tools,
        tool_choice=chosen,
        parallel_calls=c.get(body, "parallel_tool_calls", bool, True),
        max_tokens=c.limit(body, "max_output_tokens"),
        sampling=c.sampling(body),
        stops=c.stops(body.get("stop")),
        reasoning=c.reasoning(body),
        response_schema=c.response_schema("text.format", brought.over(body, "text").get("format"), None),
        form_field="text.format",
        logprobs=_logprobs(body),
        draft=c.draft(body),
        kv_recall=kv_recall(body),
        kept_messages=kept_messages(body, places, messages),
        stream=c.get(body, "stream", bool, False),
        keep=keep,
        entries=tuple(entries),
        before=before,
        offered=special,
    )


def _check_metadata(body: Mapping[str, Any]) -> None:
    """Refuse metadata beyond OpenAI's limits: each response repeats it."""
    given = c.get(body, "metadata", dict, {})
    if len(given) > _MAX_METADATA:
        raise c.refusal("metadata", f"{len(given)} pairs; the limit is {_MAX_METADATA}")
    for key, value in given.items():
        if len(key) > _MAX_METADATA_KEY:
            raise c.refusal("metadata", f"a key of {len(key)} characters; the limit is {_MAX_METADATA_KEY}")
        if type(value) is not str or len(value) > _MAX_METADATA_VALUE:
            what = f"{len(value)} characters" if type(value) is str else c.shown(value)
            raise c.refusal("metadata", f"expected strings of at most {_MAX_METADATA_VALUE} characters, found {what}")


def kept(body: Mapping[str, Any]) -> dict[str, Any]:
    """What writers need of a body, most of which a response repeats."""
    names = ("include", "instructions", "metadata", "previous_response_id", "reasoning", "text", "tool_choice", "tools")
    return {name: body[name] for name in names if name in body}


def _summary(body: Mapping[str, Any]) -> str | None:
    """The kind of summary of its reasoning that a request asks for, if it does; the newer name comes first."""
    asked = c.get(body, "reasoning", dict, {})
    kind: str | None = None
    for name in ("generate_summary", "summary"):
        kind = c.get(asked, name, str, kind, "reasoning.")
        if kind not in (None, "none", "auto", "concise", "detailed"):
            raise c.refusal(f"reasoning.{name}", "expected auto, concise or detailed")
    return None if kind == "none" else kind


def _summarized(item: Text) -> dict[str, Any]:
    return {"type": "summary_text", "text": item.text}


def _logprobs(body: Mapping[str, Any]) -> int | None:
    top = c.integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    include = c.get(body, "include", list, [])
    return top or 0 if top or "message.output_text.logprobs" in include else None


# --- replies ----------------------------------------------------------------------------------


def _usage(used: Usage) -> dict[str, Any]:
    return {
        "input_tokens": used.prompt,
        "input_tokens_details": {"cached_tokens": used.cached, "cache_write_tokens": 0},
        "output_tokens": used.completion,
        "output_tokens_details": {"reasoning_tokens": used.reasoning},
        "total_tokens": used.prompt + used.completion,
        **used.shown_more(),
    }


_PLAIN = {"format": {"type": "text"}}
_SHOWN_WHILE_WRITTEN = ("msg", "rs", "fc", "ctc")  # of other calls nothing is known before they are whole


class Writer:
    """Writes one reply: `whole`, or `start`, parts and `end` of a stream.

    body: of the request, parts of which a response repeats. kept: where items go as they are given out, and in the end
    the response, unless the request says otherwise.
    """

    def __init__(
        self, model: str, body: Mapping[str, Any], conversation: Conversation, kept: Kept | None = None
    ) -> None:
        self._asked = conversation if isinstance(conversation, Asked) and conversation.keep else None
        self._kept = kept if self._asked is not None else None
        self._keys: list[Key] = []  # of items that were given out
        echo = _Echo()
        special = conversation.offered if isinstance(conversation, Asked) else ()
        self._tools = {tool.known_as: tool for tool in special}
        self._keep = "reasoning.encrypted_content" in c.get(body, "include", list, [])
        # What reasoning says in short is asked for by those who show nothing else of it: it is all of it then.
        self._summary = _summary(body)
        sampling = conversation.sampling
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "instructions": echo.of(body.get("instructions"), None),
            "max_output_tokens": conversation.max_tokens,
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": conversation.parallel_calls,
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": {"effort": conversation.reasoning.effort, "summary": self._summary},
            "store": self._asked is not None,
            "temperature": sampling.temperature,
            "text": echo.of(body.get("text") or _PLAIN, _PLAIN),
            "tool_choice": echo.of(body.get("tool_choice") or "auto", "auto"),
            "tools": echo.of(body.get("tools") or [], []),
            "top_logprobs": conversation.logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }
        self._number = 0  # of events
        self._output: list[dict[str, Any]] = []
        self._open: Text | WholeCall | None = None  # the item that is being written
        self._logprobs = Written()  # of its tokens
        self._id = ""

    @property
    def keep_alive(self) -> bytes:
        """Write that the reply goes on: an event, since Codex takes no comment for a sign of life.

        What a request can make long is left out: this may come a hundred times.
        """
        head = self._head | {"instructions": None, "metadata": {}, "tools": []}
        if type(head["tool_choice"]) is dict:
            head["tool_choice"] = "auto"
        del head["text"]
        return self._event("response.in_progress", response=head | self._state("in_progress") | {"output": []})

    def hold(self, parts: Sequence[Part]) -> None:
        """Take parts of a reply that is not streamed, as they come."""
        for part in parts:
            self.part(part)

    def whole(self, parts: Sequence[Part], finish: Finish) -> dict[str, Any]:
        """Make the object of a reply that is not streamed; parts: the last ones, behind those that are held."""
        self.hold(parts)
        self.end(finish)
        return self._head | self._state(_status(finish), finish)

    def start(self, prompt_tokens: int) -> bytes:
        """Write the first events."""
        state = self._state("in_progress")
        return self._progress("response.created", state) + self._progress("response.in_progress", state)

    def part(self, part: Part) -> bytes:
        """Write the events of a part."""
        if isinstance(part, Text):
            made = b""
            if not isinstance(self._open, Text) or self._open.kind != part.kind:
                made = self._close() + self._begin(Text(part.kind, ""))
            assert isinstance(self._open, Text)
            self._open = Text(part.kind, self._open.text + part.text)
            logprobs = [*map(entry, part.logprobs)]
            self._logprobs.add(logprobs)
            return made + self._of_text(part.kind, "delta", delta=part.text, logprobs=logprobs)
        if isinstance(part, CallStart):
            return self._close() + self._begin(WholeCall(part.id, part.name, ""))
        if isinstance(part, CallArguments):
            call = self._open
            assert isinstance(call, WholeCall)
            self._open = WholeCall(call.id, call.name, call.arguments + part.text)
            if call.name in self._tools and self._tools[call.name].kind != "function":
                return b""
            return self._inside("response.function_call_arguments.delta", delta=part.text)
        return self._close("completed" if part.complete else "incomplete")

    def end(self, finish: Finish) -> bytes:
        """Write the end."""
        status = _status(finish)
        made = self._close(status)  # an item that is open now is one that was cut
        self._keep_response()
        return made + self._progress(f"response.{status}", self._state(status, finish))

    def failed(self, error: SparkError) -> bytes:
        """Write a failure that came too late for a status."""
        _, message, code = explain(error)
        return self._progress("response.failed", self._state("failed") | {"error": {"code": code, "message": message}})

    def _keep_response(self) -> None:
        """Keep what the conversation is made of by now."""
        if self._kept is None or self._asked is None:
            return
        entries = self._asked.entries
        self._kept.put_items(item for item in entries if isinstance(item, tuple))
        keys = [*self._asked.before, *(item if isinstance(item, str) else item[0] for item in entries)]
        self._kept.put_response(str(self._head["id"]), [*keys, *self._keys])

    @functools.cached_property
    def _head_text(self) -> str:
        """The head as the beginning of an object, which more fields follow."""
        return json.dumps(self._head)[:-1]

    def _progress(self, kind: str, state: dict[str, Any]) -> bytes:
        """An event that has the whole response."""
        begin = json.dumps({"type": kind, "sequence_number": self._number})[:-1]
        self._number += 1
        head = f'event: {kind}\ndata: {begin}, "response": {self._head_text}, '
        return b"".join((head.encode(), memoryview(dumps(state))[1:], b"}\n\n"))

    def _state(self, status: str, finish: Finish | None = None) -> dict[str, Any]:
        """What changes of a response while it is made."""
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "output": list(self._output),
            "usage": None if finish is None else _usage(finish.usage),
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        made = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"".join((f"event: {kind}\ndata: ".encode(), dumps(made), b"\n\n"))

    def _inside(self, kind: str, **fields: Any) -> bytes:
        """An event of the item that is being written."""
        return self._event(kind, item_id=self._id, output_index=len(self._output), **fields)

    def _of_text(self, written: str, event: str, **fields: Any) -> bytes:
        """An event of the text that is being written; reasoning has no log-probabilities."""
        if written == "content":
            return self._inside(f"response.output_text.{event}", content_index=0, **fields)
        del fields["logprobs"]
        if self._summary is not None:
            return self._inside(f"response.reasoning_summary_text.{event}", summary_index=0, **fields)
        return self._inside(f"response.reasoning_text.{event}", content_index=0, **fields)

    def _of_part(self, item: Text, event: str) -> bytes:
        """An event of the part that the text is."""
        if item.kind == "reasoning" and self._summary is not None:
            return self._inside(f"response.reasoning_summary_part.{event}", summary_index=0, part=_summarized(item))
        return self._inside(f"response.content_part.{event}", content_index=0, part=self._content(item))

    def _begin(self, item: Text | WholeCall) -> bytes:
        self._open, self._logprobs = item, Written()
        if isinstance(item, WholeCall):
            prefix = id_prefix(self._tools.get(item.name))
        else:
            prefix = "rs" if item.kind == "reasoning" else "msg"
        self._id = f"{prefix}_{secrets.token_hex(12)}"
        if prefix not in _SHOWN_WHILE_WRITTEN:
            return b""
        made = self._added()
        if isinstance(item, Text):
            made += self._of_part(item, "added")
        return made

    def _close(self, status: str = "completed") -> bytes:
        """End the item that is being written."""
        item = self._open
        if item is None:
            return b""
        done = self._item(status)
        if isinstance(item, Text):
            made = self._of_text(item.kind, "done", text=item.text, logprobs=self._logprobs)
            made += self._of_part(item, "done")
        elif done["type"] == "custom_tool_call":
            made = self._inside("response.custom_tool_call_input.delta", delta=done["input"])
            made += self._inside("response.custom_tool_call_input.done", input=done["input"])
        elif done["type"] != "function_call":
            made = self._added()
        else:
            made = self._inside("response.function_call_arguments.done", name=done["name"], arguments=item.arguments)
        made += self._event("response.output_item.done", output_index=len(self._output), item=done)
        self._output.append(done)
        if self._kept is not None and (data := to_keep(done)) is not None:
            self._kept.put_items([(self._id, data)])
            self._keys.append(self._id)
        self._open = None
        return made

    def _added(self) -> bytes:
        return self._event(
            "response.output_item.added", output_index=len(self._output), item=self._item("in_progress")
        )

    def _item(self, status: str) -> dict[str, Any]:
        """The item that is being written, as the API has it."""
        item = self._open
        assert item is not None
        made: dict[str, Any] = {"id": self._id, "status": status}
        if isinstance(item, WholeCall):
            return made | call_item(item, self._tools.get(item.name), status)
        content = [self._content(item)] if status != "in_progress" else []
        if item.kind == "content":
            return made | {"type": "message", "role": "assistant", "content": content}
        summary = [] if self._summary is None or status == "in_progress" else [_summarized(item)]
        made |= {"type": "reasoning", "summary": summary, "content": content}
        if self._keep:
            made["encrypted_content"] = seal(item.text) if status != "in_progress" else None
        return made

    def _content(self, item: Text) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": item.text}
        return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": self._logprobs}


class _Echo:
    """Parts of a request that its responses repeat, up to MAX_ECHO_BYTES of JSON in all: three events have them."""

    def __init__(self) -> None:
        self._left = MAX_ECHO_BYTES

    def of(self, value: Any, default: Any) -> Any:
        """A part, or what stands for one that is too long; no more of it is looked at than there may be."""
        left = _left(value, self._left)
        if left < 0:
            return default
        self._left = left
        return value


def _left(value: Any, left: int) -> int:
    """What is left of a number of bytes behind a value's JSON; negative as soon as it is too long."""
    if type(value) is str:
        return left - len(value) if len(value) > left else left - len(json.dumps(value)) - 2
    if type(value) is not dict and type(value) is not list:
        return left - len(json.dumps(value)) - 2
    left -= 2
    for inner in value:
        left = _left(inner, left)
        if type(value) is dict and left >= 0:
            left = _left(value[inner], left)
        if left < 0:
            break
    return left


def _status(finish: Finish) -> str:
    return "incomplete" if finish.reason == "length" else "completed"
