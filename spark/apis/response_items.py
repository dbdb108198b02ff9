"""The items of /v1/responses: what each says, and the messages that they make.

An item is first reduced to what it says to the model, a flat list of texts, which is also what is kept of it. From
there an item that is sent, one that is referred to and one of an earlier response go the same way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from spark.apis.response_tools import Given, call, named, result
from spark.apis.sealed import unseal
from spark.speech import conversation as c
from spark.speech.json_text import parse_string
from spark.speech.sessions import Message, Role, ToolCall
from spark.speech.spans import Span

MOST_VALUES = 8  # of the JSON that is kept of an item: one list, and what follows its brackets and commas
_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NOTES = {
    "input_image": c.IMAGE_NOTE,
    "computer_screenshot": c.IMAGE_NOTE,
    "input_file": c.FILE_NOTE,
    "input_audio": c.AUDIO_NOTE,
    "input_video": c.VIDEO_NOTE,
    "encrypted_content": "[a message was here, sealed by who made it; this model cannot read it]",
}
_SEALED_NOTE = "[a summary of what came before was here, sealed by who made it; this model cannot read it]"
# Items of tools that run at OpenAI, and what Codex notes for itself.
_LEFT_OUT = (
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
    "computer_call_output", "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response", "program",
    "program_output", "tool_search_call", "ghost_snapshot",
)  # fmt: skip

Said: TypeAlias = list[str]  # what kind of thing it is, and its texts
Entry: TypeAlias = str | tuple[bytes, bytes]  # an item that is referred to, or an item's digest and what is kept of it


@dataclass(frozen=True, slots=True)
class Found:
    """What an input refers to, as it is kept: items by their ids, and those of what it goes on from."""

    items: Mapping[str, bytes] = field(default_factory=dict)
    before: Sequence[bytes] = ()


def references(value: Any) -> list[tuple[int, str]]:
    """The places and ids of an input's references, as often as they are there."""
    items = _items(value) if type(value) is list else []
    return [
        (i, c.get(item, "id", str, where=f"input[{i}]."))
        for i, item in enumerate(items) if type(item) is dict and _is_reference(item)
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Brought:
    """What items bring beside messages: tools, each with its place, and the last word on `reasoning` and `text`."""

    tools: list[Given] = field(default_factory=list)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def over(self, body: Mapping[str, Any], name: str) -> dict[str, Any]:
        """A field of the request, with what items have changed of it."""
        given: dict[str, Any] = c.get(body, name, dict, {})
        return given | self.settings.get(name, {})


def read(value: Any, found: Found, keep: bool) -> tuple[list[Message], list[Entry], list[Span], Brought]:
    """The messages of an input and of what comes before it; if they are to be kept, the input's own items, too.

    The third: by items, those before the input first, the messages [from, to) that they are in, none where the model
    is not told of one.
    """
    turns = _Turns()
    entries: list[Entry] = []
    places = [turns.take(_from_kept(data), "input") for data in found.before]
    referred = {item_id: _from_kept(data) for item_id, data in found.items.items()}
    items: list[Any] = [{"role": "user", "content": value}] if type(value) is str and value else []
    if type(value) is not str and (value is not None or not found.before):
        items = _items(value)
    if len(found.before) + len(items) > c.MAX_MESSAGES:
        raise c.refusal("input", f"with what it goes on from it has more than {c.MAX_MESSAGES} items")
    for i, item in enumerate(items):
        where = f"input[{i}]"
        record = c.as_object(where, item)
        if _is_reference(record):
            item_id = record["id"]
            places.append(turns.take(referred[item_id], where))
            entries.append(item_id)
        elif (said := _said(where, record)) is None:
            places.append((len(turns.messages), len(turns.messages)))
        else:
            places.append(turns.take(said, where))
            if keep:
                # Halves of surrogate pairs stay as they came, which escapes would join.
                data = json.dumps(said, ensure_ascii=False).encode("utf-8", "surrogatepass")
                entries.append((hashlib.sha256(data).digest(), data))
    turns.close()
    return turns.messages, entries, places, turns.brought


def to_keep(item: dict[str, Any]) -> bytes | None:
    """What is kept of an item that is given out: what it would say if its client sent it; None: nothing."""
    texts = [part | {"logprobs": []} for part in item.get("content", ())]
    said = _said("output", item | {"content": texts})
    return None if said is None else json.dumps(said).encode()  # escaped, as it is when it is given out


def _from_kept(data: bytes) -> Said:
    made: Said = json.loads(data.decode("utf-8", "surrogatepass"))
    return made


def _items(value: Any) -> list[Any]:
    if type(value) is not list or len(value) > c.MAX_MESSAGES:
        raise c.refusal("input", f"expected a string or a list of at most {c.MAX_MESSAGES} items")
    return value


def _is_reference(item: dict[str, Any]) -> bool:
    """Whether an item stands for one that is kept; without a type it has nothing but its id."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and not {"role", "content"} & item.keys())


def _said(where: str, item: dict[str, Any]) -> Said | None:
    """What an item says; None for one that is not the model's to know of."""
    kind = c.get(item, "type", str, "message", f"{where}.")
    if kind == "message":
        role = _ROLES.get(c.get(item, "role", str, where=f"{where}."))
        if role is None:
            raise c.refusal(f"{where}.role", f"expected one of {', '.join(_ROLES)}")
        return [role, c.joined(f"{where}.content", item.get("content"), _part)]
    if kind in ("function_call", "custom_tool_call"):
        name, of = named(f"{where}.", item), kind.removesuffix("_call").removesuffix("_tool")
        text = c.get(item, "arguments" if of == "function" else "input", str, "", f"{where}.")
        return [of, c.get(item, "call_id", str, where=f"{where}."), name, text]
    if kind in ("function_call_output", "custom_tool_call_output"):
        call_id = c.get(item, "call_id", str, where=f"{where}.")
        return ["output", call_id, _output(f"{where}.output", item.get("output"))]
    if kind == "reasoning":
        return ["reasoning", _reasoning(where, item)]
    if (made := call(where, item)) is not None:
        call_id, name, text = made
        return ["function", call_id, name, text]
    if kind in ("additional_tools", "tool_search_output"):
        tools = json.dumps(c.get(item, "tools", list, [], f"{where}."))
        return ["tools", tools, *(result(where, item) or ())]
    if (made_result := result(where, item)) is not None:
        return ["output", *made_result]
    if kind == "agent_message":  # of one of Codex's agents to another
        texts = c.joined(f"{where}.content", item.get("content"), _part)
        return ["user", f"{c.get(item, 'author', str, 'an agent', f'{where}.')}: {texts}"]
    if kind == "configuration_update":
        changed = {name: c.get(item, name, dict, {}, f"{where}.") for name in ("reasoning", "text")}
        return ["settings", json.dumps(changed)]
    if kind in ("compaction", "compaction_summary", "context_compaction"):
        return None if item.get("encrypted_content") is None else ["user", _SEALED_NOTE]
    if kind == "compaction_trigger":  # its reply is no reply but a summary, sealed
        raise c.refusal(f"{where}.type", "a conversation cannot be compacted here; ask for a summary in words")
    if kind not in _LEFT_OUT:
        raise c.refusal(f"{where}.type", f"{kind[:40]!r} cannot be read")
    return None


class _Turns:
    """Messages in the making: the items of one turn of the model become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.brought = Brought()
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []

    def take(self, said: Said, where: str) -> Span:
        """Add what an item says; in which messages that is, [from, to)."""
        match said:
            case ["tools", tools, *answer]:
                given = parse_string(tools) or []
                for i, tool in enumerate(given):
                    self.brought.tools.append((f"{where}.tools[{i}]", c.as_object(f"{where}.tools[{i}]", tool)))
                if not answer:
                    return len(self.messages), len(self.messages)
                return self._add(Message("tool", answer[1], tool_call_id=answer[0]))
            case ["settings", text]:
                for name, changed in (parse_string(text) or {}).items():
                    self.brought.settings[name] = self.brought.settings.get(name, {}) | changed
                return len(self.messages), len(self.messages)
            case ["assistant", text]:
                if self._calls:
                    self.close()
                self._texts.append(text)
            case ["reasoning", text]:  # begins a turn unless one has begun with it
                if self._texts or self._calls:
                    self.close()
                self._thoughts.append(text)
            case ["function", call_id, name, arguments]:
                self._calls.append(c.call(call_id, name, arguments))
            case ["custom", call_id, name, text]:
                self._calls.append(ToolCall(call_id, name, {"input": text}))
            case ["output", call_id, text]:
                return self._add(Message("tool", text, tool_call_id=call_id))
            case [role, text]:
                return self._add(Message(_ROLES[role], text))
        return len(self.messages), len(self.messages) + 1

    def close(self) -> None:
        """End the model's turn."""
        if self._texts or self._calls:
            text, thought = "\n".join(self._texts), "\n".join(filter(None, self._thoughts))
            self.messages.append(Message("assistant", text, thought, tuple(self._calls)))
        self._texts, self._thoughts, self._calls = [], [], []

    def _add(self, message: Message) -> Span:
        """Add a message that is not the model's; where."""
        self.close()
        self.messages.append(message)
        return len(self.messages) - 1, len(self.messages)


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
    return unseal(item.get("encrypted_content"))
