"""What Claude Code's logs say of its requests: the system prompt, and the tools that were offered.

Newer versions log both, as they were sent (`api-request-shape`) and as the program keeps them (`prompt_snapshot`, an
attachment). A conversation begins with the first system prompt that its thread has whole, or with a part.
"""

from __future__ import annotations

from typing import Any

from spark.extract.intake import Intake, as_object, as_text
from spark.extract.messages import ToolTable


class Requests:
    """The system prompts of one log, by thread."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._sent: dict[str, str] = {}
        self._kept: dict[str, str] = {}

    def add_shape(self, thread: str, record: dict[str, Any], tools: ToolTable) -> None:
        """Take a request's system prompt and tools as they were sent."""
        shape = as_object(record.get("shape"))
        self._add(self._sent, thread, shape.get("system"))
        for definition in _objects(shape.get("tools")):
            tools.define(self._intake.value(definition), deferred=definition.get("defer_loading") is True)

    def add_snapshot(self, thread: str, attachment: dict[str, Any], tools: ToolTable) -> None:
        """Take them as the program keeps them."""
        prefix = as_text(attachment.get("cliPrefix"))  # with it the prompt is as it is sent
        known = self._sent if prefix else self._kept
        self._add(known, thread, [prefix, *_items(attachment.get("systemPrompt"))])
        for tool in _objects(attachment.get("tools")):
            named = {key: tool[key] for key in ("name", "description") if key in tool}
            tools.define(self._intake.value(as_object(tool.get("schema")) | named))

    def system(self, thread: str) -> str:
        """The system prompt that a thread's conversations begin with, empty if the log has none."""
        return self._sent.get(thread) or self._kept.get(thread, "")

    def _add(self, known: dict[str, str], thread: str, pieces: object) -> None:
        if thread in known:
            return
        texts = (item if isinstance(item, str) else as_text(as_object(item).get("text")) for item in _items(pieces))
        if text := self._intake.text("\n\n".join(text for text in texts if text.strip())):
            known[thread] = text


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in _items(value) if isinstance(item, dict)]
