"""From parts to messages: the last step that both log families share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from spark.extract.intake import Part
from spark.speech.sessions import Message, Session, ToolCall


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One session on its way out: its head, and its parts as they are read back from the spool.

    parts: None marks the end of a response, where two of them follow each other.
    """

    head: Session
    parts: Iterable[Part | None]


def messages(parts: Iterable[Part | None]) -> Iterator[tuple[Message, bool]]:
    """Join parts into messages, and say of each whether the user typed it.

    A response is reasoning, text and calls, in this order; what comes in another order (text after a
    search that the provider ran itself) begins a new message, so that the order stays as it was. White
    space alone begins none: models write some before they think, and it has no place before reasoning.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []

    def response() -> Iterator[tuple[Message, bool]]:
        if reasoning or content or calls:
            yield (
                Message("assistant", "\n\n".join(content), "\n\n".join(reasoning), tuple(calls)),
                False,
            )
        reasoning.clear()
        content.clear()
        calls.clear()

    for part in parts:
        if part is None:
            yield from response()
        elif part.kind == "call":
            calls.append(ToolCall(part.call_id, part.name, part.arguments))
        elif part.kind == "result":
            yield from response()
            yield Message("tool", part.text, tool_call_id=part.call_id), False
        elif part.kind == "text" and part.role != "assistant":
            yield from response()
            yield Message(part.role, part.text), part.typed
        else:
            if part.kind == "reasoning" and not any(map(str.strip, content)):
                content.clear()
            if part.kind == "text" and calls and not part.text.strip():
                continue
            if calls or (part.kind == "reasoning" and content):
                yield from response()
            (reasoning if part.kind == "reasoning" else content).append(part.text)
    yield from response()


_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class ToolTable:
    """Definitions of the tools of one conversation, in the order in which the tools appear.

    Those that a log defines are taken as they are; of the others the log shows only calls, and a
    minimal definition is made from the argument names and types seen in them.
    """

    def __init__(self) -> None:
        self._defined: dict[str, dict[str, Any]] = {}
        self._deferred: dict[str, dict[str, Any]] = {}  # that the model does not see until it asks for them
        self._types: dict[str, dict[str, str | None]] = {}  # tool, argument: JSON type, None if it varies
        self._required: dict[str, set[str]] = {}

    def define(self, definition: Any, *, deferred: bool = False) -> None:
        """Take a definition in one of the providers' shapes; what has no name is passed over.

        deferred: it counts where the tool is called, since the model sees it only then.
        """
        if not isinstance(definition, dict):
            return
        inner = definition["function"] if isinstance(definition.get("function"), dict) else definition
        name = inner.get("name")
        if not isinstance(name, str) or not name:
            return
        schemas = (inner.get(key) for key in ("parameters", "input_schema", "inputSchema"))
        schema = next((s for s in schemas if isinstance(s, dict)), {"type": "object", "properties": {}})
        function: dict[str, Any] = {"name": name}
        if isinstance(inner.get("description"), str):
            function["description"] = inner["description"]
        known = self._deferred if deferred else self._defined
        known[name] = {"type": "function", "function": {**function, "parameters": schema}}

    def observe(self, name: str, arguments: dict[str, Any]) -> None:
        """Learn from a call that there is a tool and what arguments it takes."""
        types = self._types.setdefault(name, {})
        for key, value in arguments.items():
            kind = _TYPE_NAMES.get(type(value))
            if types.setdefault(key, kind) != kind:
                types[key] = None
        self._required[name] = self._required.get(name, set(arguments)) & set(arguments)

    def definitions(self) -> tuple[dict[str, Any], ...]:
        """The definitions, as chat templates take them."""
        made = {}
        for name, types in self._types.items():
            properties = {key: {"type": kind} if kind else {} for key, kind in types.items()}
            required = [key for key in types if key in self._required[name]]
            parameters = {"type": "object", "properties": properties, "required": required}
            made[name] = {"type": "function", "function": {"name": name, "parameters": parameters}}
        made.update({name: self._deferred[name] for name in made if name in self._deferred})
        return tuple({**self._defined, **{n: d for n, d in made.items() if n not in self._defined}}.values())
