"""The content blocks of a Claude message, as parts."""

from __future__ import annotations

import json
from typing import Any

from spark.extract.intake import Intake, Part, as_object, as_text, is_inserted

_MARKERS = {"image": "[image]", "document": "[document]"}
_TEXTS = ("text", *_MARKERS)
_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")


def response_parts(message: dict[str, Any], intake: Intake) -> list[Part]:
    """The parts of an assistant's message, in order; blocks that hold no readable text are counted."""
    parts: list[Part] = []
    for block in _blocks(message):
        kind = as_text(block.get("type"))
        if kind in _TEXTS:
            if text := _text(kind, block, intake):
                parts.append(Part("text", text))
        elif kind == "thinking":
            if text := intake.text(block.get("thinking")):
                parts.append(Part("reasoning", text))
            else:
                intake.drop("encrypted")
        elif kind == "redacted_thinking":
            intake.drop("encrypted")
        elif kind in _CALLS:
            arguments = intake.value(as_object(block.get("input")))
            name = as_text(block.get("name")) or "unnamed"
            parts.append(Part("call", call_id=as_text(block.get("id")), name=name, arguments=arguments))
        elif kind.endswith("_tool_result"):  # of a tool that the provider ran
            parts.append(_result(block, intake))
        else:
            intake.drop("unknown", f"block/{kind}", block)
    return parts


def user_parts(message: dict[str, Any], intake: Intake, *, inserted: bool) -> tuple[list[Part], dict[str, Part]]:
    """The text of a user message, joined into one part at most, and the results in it by call id.

    inserted: the record says that the program wrote the message.
    """
    texts: list[str] = []
    results: dict[str, Part] = {}
    for block in _blocks(message):
        kind = as_text(block.get("type"))
        if kind in _TEXTS:
            texts.append(_text(kind, block, intake))
        elif kind == "tool_result":
            part = _result(block, intake)
            results.setdefault(part.call_id, part)
        else:
            intake.drop("unknown", f"block/{kind}", block)
    text = "\n".join(text for text in texts if text)
    typed = not inserted and not is_inserted(text)
    return [Part("text", text, "user", typed)] if text else [], results


def _text(kind: str, block: dict[str, Any], intake: Intake) -> str:
    """The text of a block of text; of an image or a document that it was there, and what it says if that is text."""
    source = as_object(block.get("source"))
    said = source.get("data") if source.get("type") == "text" else block.get("text")
    return "\n".join(text for text in (_MARKERS.get(kind, ""), intake.text(said)) if text)


def _result(block: dict[str, Any], intake: Intake) -> Part:
    texts = []
    for item in _blocks(block):
        kind = as_text(item.get("type"))
        if kind in _TEXTS:
            texts.append(_text(kind, item, intake))
        else:  # a search result, a reference to a tool: what the model saw is its fields
            fields = {key: value for key, value in item.items() if key not in ("type", "encrypted_content")}
            texts.append(json.dumps(intake.value(fields), ensure_ascii=False))
    return Part("result", "\n".join(texts), "tool", call_id=as_text(block.get("tool_use_id")))


def _blocks(holder: dict[str, Any]) -> list[dict[str, Any]]:
    """The blocks under `content`, which may be a plain string or a single block."""
    content = holder.get("content")
    items = content if isinstance(content, list) else [content]
    blocks = ({"type": "text", "text": item} if isinstance(item, str) else item for item in items)
    return [block for block in blocks if isinstance(block, dict)]
