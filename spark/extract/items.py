"""The response items of a Codex log, as parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from spark.extract.intake import Intake, Part, as_object, as_text, is_inserted, parse_json
from spark.extract.messages import ToolTable

_EXTRA_KEYS = ("type", "id", "call_id", "status", "timestamp", "ordinal", "internal_chat_message_metadata_passthrough")


def item_parts(payload: dict[str, Any], intake: Intake, tools: ToolTable) -> list[Part] | None:
    """The parts of an item, none if it holds no readable text; None if its type is unknown.

    tools: learns the definitions that a search for tools found.
    """
    kind = as_text(payload.get("type"))
    call_id = as_text(payload.get("call_id")) or as_text(payload.get("id"))
    if kind == "message":
        return text_parts(payload, as_text(payload.get("role")), intake)
    if kind == "agent_message":  # from another agent
        return text_parts(payload, "user", intake)
    if kind == "reasoning":
        text = _joined(payload.get("content"), intake) or _joined(payload.get("summary"), intake)
        if not text and payload.get("encrypted_content"):
            intake.drop("encrypted")
        return [Part("reasoning", text)] if text else []
    if kind in ("compaction", "context_compaction"):
        intake.drop("encrypted")
        return []
    if kind in ("ghost_snapshot", "configuration_update"):
        return []
    if kind == "additional_tools":
        define(payload.get("tools"), intake, tools)
        return []
    if kind == "tool_search_output":
        found = intake.value(payload.get("tools"))
        for definition in _definitions(found):
            tools.define(definition)
        return [Part("result", json.dumps(found, ensure_ascii=False), "tool", call_id=call_id)]
    if kind.endswith("_output"):
        return [Part("result", _joined(payload.get("output"), intake), "tool", call_id=call_id)]
    if kind.endswith("_call"):
        name, arguments = _call(kind, payload)
        parts = [Part("call", call_id=call_id, name=name, arguments=intake.value(arguments))]
        if kind == "image_generation_call" and payload.get("result"):
            parts.append(Part("result", "[image]", "tool", call_id=call_id))
        return parts
    return None


_MIRRORED = {"UserMessage": "user_message", "AgentMessage": "agent_message", "Reasoning": "agent_reasoning"}


def as_mirror(event: dict[str, Any]) -> dict[str, Any]:
    """An event in which newer versions say that an item is whole, as the older one that said so; others as they are."""
    if event.get("type") != "item_completed":
        return event
    item = as_object(event.get("item"))
    kind = as_text(item.get("type"))
    if kind not in _MIRRORED:
        return event | {"type": f"item_completed/{kind}"}
    pieces = item.get("raw_content") or item.get("summary_text") if kind == "Reasoning" else item.get("content")
    listed = pieces if isinstance(pieces, list) else [pieces]
    texts = (piece if isinstance(piece, str) else as_text(as_object(piece).get("text")) for piece in listed)
    return {"type": _MIRRORED[kind], "message": "\n".join(text for text in texts if text)}


def define(value: object, intake: Intake, tools: ToolTable) -> None:
    """Have `tools` learn a list of definitions, those in namespaces by the names that calls of them have."""
    for definition in _definitions(intake.value(value)):
        deferred = any(definition.get(key) is True for key in ("deferLoading", "defer_loading"))
        tools.define(definition, deferred=deferred)


def _definitions(value: object) -> Iterator[dict[str, Any]]:
    for each in value if isinstance(value, list) else []:
        if as_object(each).get("type") == "namespace":
            for inner in each["tools"] if isinstance(each.get("tools"), list) else []:
                if isinstance(inner, dict):
                    yield _in_namespace(inner, each.get("name"))
        elif isinstance(each, dict):
            yield _in_namespace(each, each.get("namespace"))


def _in_namespace(definition: dict[str, Any], space: object) -> dict[str, Any]:
    name = as_text(definition.get("name"))
    return {**definition, "name": _full_name(as_text(space), name)} if name else definition


def _full_name(space: str, name: str) -> str:
    joint = "" if not space or space[-1] in "_./:" else "."
    return f"{space}{joint}{name}"


def text_parts(payload: dict[str, Any], role: str, intake: Intake) -> list[Part]:
    """The text of a message's content as one part at most; developers count as the system."""
    text = _joined(payload.get("content"), intake)
    if not text:
        return []
    if role in ("system", "developer"):
        return [Part("text", text, "system")]
    if role == "assistant":
        return [Part("text", text)]
    return [Part("text", text, "user", payload.get("type") == "message" and not is_inserted(text))]


def _joined(content: object, intake: Intake) -> str:
    """The text of a string, of content items, or of an object that holds either; of anything else its JSON."""
    if isinstance(content, str):
        return intake.text(content)
    if isinstance(content, dict) and "content" in content:
        return _joined(content["content"], intake)
    if isinstance(content, dict | int | float):
        return json.dumps(intake.value(content), ensure_ascii=False) if content != {} else ""
    texts = []
    for item in content if isinstance(content, list) else []:
        kind, text = as_text(as_object(item).get("type")), as_object(item).get("text")
        if isinstance(item, str):
            texts.append(intake.text(item))
        elif "image" in kind:
            texts.append("[image]")
        elif isinstance(text, str):
            texts.append(intake.text(text))
        else:
            intake.drop(*(("encrypted",) if "encrypted" in kind else ("unknown", f"content/{kind}", item)))
    return "\n".join(text for text in texts if text)


def _call(kind: str, payload: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call."""
    name = as_text(payload.get("name")) or "unnamed"
    if kind == "function_call":
        return _full_name(as_text(payload.get("namespace")), name), _arguments(payload.get("arguments"))
    if kind == "custom_tool_call":
        return name, _arguments(payload.get("input"))
    if kind == "local_shell_call":
        action = as_object(payload.get("action"))
        return "local_shell", {k: v for k, v in action.items() if k != "type" and v is not None}
    if kind == "web_search_call":
        return "web_search", as_object(payload.get("action"))
    if kind == "tool_search_call":
        return "tool_search", _arguments(payload.get("arguments"))
    if kind == "image_generation_call":
        return "image_generation", {"prompt": as_text(payload.get("revised_prompt"))}
    return kind.removesuffix("_call"), {k: v for k, v in payload.items() if k not in _EXTRA_KEYS}


def _arguments(value: object) -> dict[str, Any]:
    """Arguments as an object: a string that holds one is parsed, any other goes under `input`."""
    if isinstance(value, str):
        try:
            parsed = parse_json(value)
        except ValueError:
            parsed = None
        return parsed if isinstance(parsed, dict) else {"input": value}
    return value if isinstance(value, dict) else {} if value is None else {"input": value}
