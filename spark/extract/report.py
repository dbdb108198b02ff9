"""What an extraction read, wrote and left out."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from spark.speech.sessions import Message

ESTIMATE = "estimate: UTF-8 bytes / 4"
_to_json = json.JSONEncoder(ensure_ascii=False).encode


def estimate_tokens(text: str) -> int:
    """A token count without a tokenizer: a quarter of the UTF-8 bytes, rounded up."""
    size = len(text) if text.isascii() else len(text.encode())
    return -(-size // 4)


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of one run.

    files: logs read. sessions: written, by side ("train", "test"). tokens: by role, where the turns of
    the assistant are told apart into `assistant` (text), `reasoning` and `tool_call`. token_counter: what
    counted. prompt_tokens: of messages that the user typed. context_tokens: of all that precedes a
    response in its session. Both as percentiles p50, p90, p99.
    skipped_lines: lines that gave nothing, by reason; a reason that ends in `_file` counts files.
    dropped_blocks: blocks inside other lines that gave nothing. dropped_content: records and characters of
    text of what is in no session, copies aside, by kind, most text first. redacted: secrets replaced, by kind.
    """

    files: int
    sessions: dict[str, int]
    messages: int
    tokens: dict[str, int]
    prompt_tokens: dict[str, int]
    context_tokens: dict[str, int]
    token_counter: str
    skipped_lines: dict[str, int]
    dropped_blocks: dict[str, int]
    dropped_content: dict[str, dict[str, int]]
    redacted: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        return {name: getattr(self, name) for name in self.__slots__}


class Tally:
    """Counts messages and tokens of sessions as they are written."""

    def __init__(self) -> None:
        self._context = 0
        self._prompts = array("Q")
        self._contexts = array("Q")
        self.messages = 0
        self.tokens: Counter[str] = Counter()

    def begin_session(self) -> None:
        """Start with an empty context."""
        self._context = 0

    def add(self, message: Message, typed: bool) -> None:
        """Count the session's next message; typed: the user wrote it."""
        if message.role == "assistant":
            self._contexts.append(self._context)
            calls = (_to_json([c.name, c.arguments]) for c in message.tool_calls)
            counts = {
                "assistant": estimate_tokens(message.content),
                "reasoning": estimate_tokens(message.reasoning),
                "tool_call": sum(estimate_tokens(call) for call in calls),
            }
        else:
            counts = {message.role: estimate_tokens(message.content)}
            if typed:
                self._prompts.append(counts["user"])
        for name, count in counts.items():
            self.tokens[name] += count
        self._context += sum(counts.values())
        self.messages += 1

    def join(self, other: Tally) -> None:
        """Add what another counted."""
        self._prompts.extend(other._prompts)
        self._contexts.extend(other._contexts)
        self.messages += other.messages
        self.tokens.update(other.tokens)

    def prompt_percentiles(self) -> dict[str, int]:
        """Percentiles of what the user typed, in tokens a message."""
        return _percentiles(self._prompts)

    def context_percentiles(self) -> dict[str, int]:
        """Percentiles of the context of a response, in tokens."""
        return _percentiles(self._contexts)


def _percentiles(values: array[int]) -> dict[str, int]:
    """Nearest-rank percentiles; zeros where there is nothing."""
    points = np.percentile(np.array(values or [0]), (50, 90, 99), method="inverted_cdf")
    return {name: int(point) for name, point in zip(("p50", "p90", "p99"), points, strict=True)}
