"""OpenAI's completions: text, or tokens, that the model continues as they are; no template, no tools, no reasoning."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import RequestError, SparkError
from engine.protocol import MAX_TOKENS
from spark import conversation as c
from spark.api_chat import event, stream_options, usage
from spark.conversation import Conversation, Finish, Part, Text
from spark.http import explain, openai_error

_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "n": [1],
    "best_of": [1],
    "echo": [False],
    "logprobs": [0],
    "suffix": [""],
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "logit_bias": [{}],
}
_DEFAULT_TOKENS = 16  # OpenAI's


def parse(body: Mapping[str, Any]) -> Conversation:
    """Check the body of a request; raises RequestError that names the field."""
    c.refuse(body, _UNSUPPORTED)
    stream_options(body)
    return Conversation(
        raw=_prompt(body.get("prompt")),
        max_tokens=c.limit(body, "max_tokens") or _DEFAULT_TOKENS,
        sampling=c.sampling(body),
        stops=c.stops(body.get("stop")),
        response_schema=c.response_schema("response_format", body.get("response_format"), "json_schema"),
        stream=c.get(body, "stream", bool, False),
    )


def _prompt(value: Any) -> str | tuple[int, ...]:
    if type(value) is list and len(value) == 1 and type(value[0]) in (str, list):
        (value,) = value
    if type(value) is str and value:
        return value
    if type(value) is list and value and len(value) <= MAX_TOKENS and all(type(token) is int for token in value):
        return tuple(value)
    raise RequestError("prompt: expected one text, or one list of tokens, that is not empty")


class Writer:
    """Writes one reply: `whole`, or `start`, parts and `end` of a stream."""

    keep_alive = b": nothing new\n\n"

    def __init__(self, model: str, body: Mapping[str, Any], conversation: Conversation) -> None:
        self._include_usage = stream_options(body)
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, parts: Sequence[Part], finish: Finish) -> dict[str, Any]:
        """Make the object of a reply that is not streamed."""
        text = "".join(part.text for part in parts if isinstance(part, Text))
        return self._object(text, finish.reason) | {"usage": usage(finish.usage)}

    def start(self, prompt_tokens: int) -> bytes:
        """Write nothing: these streams begin with text."""
        return b""

    def part(self, part: Part) -> bytes:
        """Write the chunk of a part."""
        return event(self._object(part.text, None)) if isinstance(part, Text) else b""

    def end(self, finish: Finish) -> bytes:
        """Write the end: why, then the usage where it is wanted."""
        made = event(self._object("", finish.reason))
        if self._include_usage:
            made += event({**self._head, "choices": [], "usage": usage(finish.usage)})
        return made + b"data: [DONE]\n\n"

    def failed(self, error: SparkError) -> bytes:
        """Write a failure that came too late for a status."""
        return event(openai_error(*explain(error))) + b"data: [DONE]\n\n"

    def _object(self, text: str, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return {**self._head, "choices": [choice]}
