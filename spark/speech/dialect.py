"""How a model writes reasoning and tool calls, found out from what its chat template writes for them.

Templates are programs, so they are asked: a conversation with a call is rendered, and one with each setting of
`enable_thinking` and of `reasoning_effort`. What makes no difference is not known to the template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias

from engine.ground.errors import SparkError
from engine.text.template import ChatTemplate

CallFormat: TypeAlias = Literal["hermes", "xml", "laguna", "gemma4"]

_NOW = datetime(2025, 1, 1)
_ASKED: dict[str, Any] = {"role": "user", "content": "a"}
_CALL = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"at": "b"}}}
_CALLED: list[dict[str, Any]] = [
    _ASKED,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "c", "tool_call_id": "call_0", "name": "look"},
]
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "d",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "e"}}, "required": []},
    },
}
# What tells the formats apart, in the order in which they are looked for; Hermes' is what any other template gets.
_FORMATS: tuple[tuple[str, CallFormat], ...] = (
    ("<|tool_call>call:look{", "gemma4"),
    ("<function=look>", "xml"),
    ("<arg_key>at</arg_key>", "laguna"),
)
# What calls are made of, in any of the formats: no name may hold it, or a call of it could not be read back.
_TAGS = (
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>", "<tool_call|>", '<|"|>',
)  # fmt: skip
# Beside them: what calls.py reads no name with.
_NOT_IN_NAMES: dict[CallFormat, str] = {"hermes": "(?!)", "xml": r"[\s<>]", "laguna": r"[\s<>]", "gemma4": r"[\s{}<>]"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a model writes.

    calls: format of tool calls. opens, shuts: what reasoning stands between. thinks: there is reasoning at all.
    knows_thinking, knows_effort, knows_calls: the template knows `enable_thinking`, `reasoning_effort`, calls of tools.
    """

    calls: CallFormat = "hermes"
    opens: str = "<think>"
    shuts: str = "</think>"
    thinks: bool = True
    knows_thinking: bool = False
    knows_effort: bool = False
    knows_calls: bool = True

    def amiss(self, name: str) -> str | None:
        """What in a tool's name would keep calls of it from being read back."""
        held = (mark for mark in (*_TAGS, self.opens, self.shuts) if mark in name)
        found = re.search(_NOT_IN_NAMES[self.calls], name)
        return next(held, found[0] if found else None)


def learn(template: ChatTemplate) -> Dialect:
    """The dialect of a template's model."""
    called = _render(template, _CALLED, tools=[_TOOL])
    calls: CallFormat = next((form for mark, form in _FORMATS if mark in called), "hermes")
    thinking, silent = (_render(template, [_ASKED], enable_thinking=on) for on in (True, False))
    low, high = (_render(template, [_ASKED], reasoning_effort=effort) for effort in ("low", "high"))
    gemma = calls == "gemma4" or "<|channel>thought" in silent
    return Dialect(
        calls,
        "<|channel>thought" if gemma else "<think>",
        "<channel|>" if gemma else "</think>",
        gemma or template.thinks,
        thinking != silent,
        low != high,
        "look" in _render(template, _CALLED),
    )


def _render(template: ChatTemplate, messages: list[dict[str, Any]], **variables: Any) -> str:
    try:
        return template.render(messages, now=_NOW, **variables)
    except SparkError:  # what a template refuses it does not write
        return ""
