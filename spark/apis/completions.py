"""OpenAI's completions: texts, or tokens, that the model continues as they are; no template, no tools, no reasoning."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from engine.ground.errors import SparkError
from engine.ground.protocol import MAX_TOKENS, MAX_TOP_LOGPROBS
from spark.apis import dialects
from spark.apis.chat import Choices, event, stream_options
from spark.apis.http import explain, openai_error
from spark.apis.recall import kv_recall, no_messages
from spark.apis.written import Written
from spark.speech import conversation as c
from spark.speech.conversation import Conversation, Finish, Part, Text

MAX_REPLIES = 32  # prompts times `n`
_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "echo": [False],
    "suffix": [""],
    "logit_bias": [{}],
}
_DEFAULT_TOKENS = 16  # OpenAI's
_Raw: TypeAlias = str | tuple[int, ...]


def parse(body: Mapping[str, Any]) -> Conversation:
    """Check the body of a request; raises RequestError that names the field."""
    c.refuse(body, {**_UNSUPPORTED, **dialects.UNSUPPORTED})
    stream_options(body)
    choices = c.integer(body, "n", 1, c.MAX_CHOICES) or 1
    recall = kv_recall(body)
    no_messages(body)
    if body.get("best_of") not in (None, choices) or type(body.get("best_of")) is bool:
        raise c.refusal("best_of", "not supported", hint="leave best_of out")
    prompts = _prompts(body.get("prompt"))
    if len(prompts) * choices > MAX_REPLIES:
        raise c.refusal("prompt", f"{len(prompts)} prompts with {choices} choices each; the limit is {MAX_REPLIES}")
    max_tokens = c.limit(body, "max_tokens", 0)
    form_field, form = dialects.schema(body)
    return Conversation(
        raw=prompts[0],
        more_raw=prompts[1:],
        max_tokens=_DEFAULT_TOKENS if max_tokens is None else max_tokens,
        sampling=dialects.sampling(body),
        stops=c.stops(body.get("stop")),
        response_schema=form,
        form_field=form_field,
        endless=dialects.endless(body),
        choices=choices,
        logprobs=None if body.get("logprobs") is False else c.integer(body, "logprobs", 0, MAX_TOP_LOGPROBS),
        draft=c.draft(body),
        kv_recall=recall,
        stream=c.get(body, "stream", bool, False),
    )


def _prompts(value: Any) -> tuple[_Raw, ...]:
    if type(value) is list and value and type(value[0]) in (str, list):
        if len(value) > MAX_REPLIES:
            raise c.refusal("prompt", f"{len(value)} prompts; the limit is {MAX_REPLIES}")
        return tuple(_prompt(f"prompt[{i}]", item) for i, item in enumerate(value))
    return (_prompt("prompt", value),)


def _prompt(where: str, value: Any) -> _Raw:
    if type(value) is str and value:
        return value
    if type(value) is list and value and len(value) <= MAX_TOKENS and all(type(token) is int for token in value):
        return tuple(value)
    raise c.refusal(where, "expected a text, or a list of tokens, that is not empty")


def writers(model: str, body: Mapping[str, Any], conversation: Conversation) -> list[Writer]:
    """Make the writers of a reply, one for each choice."""
    first = Writer(model, body, conversation)
    return [first, *(Writer(model, body, conversation, i, first.choices) for i in range(1, conversation.replies))]


class Writer:
    """Writes one choice of a reply: `whole`, or `start`, parts and `end` of a stream.

    choices: what the other writers of the reply have, in the order of the choices.
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
        head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self.choices = choices or Choices(head, stream_options(body), conversation.replies)
        self._index, self._logprobs = index, conversation.logprobs
        self._held: list[str] = []
        # What is said of the tokens of what is held, by its name.
        nothing = {} if self._logprobs is None else _shown((), self._logprobs)
        self._tokens = {name: None if values is None else Written() for name, values in nothing.items()}

    def hold(self, parts: Sequence[Part]) -> None:
        """Take parts of a reply that is not streamed, as they come."""
        for part in parts:
            if isinstance(part, Text):
                self._held.append(part.text)
                for name, values in _shown(part.logprobs, self._logprobs or 0).items():
                    if written := self._tokens.get(name):
                        written.add(values)

    def whole(self, parts: Sequence[Part], finish: Finish) -> dict[str, Any]:
        """Make the object of a reply that is not streamed, with the choices that were written before.

        parts: the last ones, behind those that are held.
        """
        self.hold(parts)
        choice = self._choice("".join(self._held), None, finish.reason)
        choice["logprobs"] = self._tokens or None
        return self.choices.add(choice, finish)

    def start(self, prompt_tokens: int) -> bytes:
        """Write nothing: these streams begin with text."""
        return b""

    def part(self, part: Part) -> bytes:
        """Write the chunk of a part."""
        return self._chunk(part.text, part.logprobs, None) if isinstance(part, Text) else b""

    def end(self, finish: Finish) -> bytes:
        """Write the end: why, then, if no other choice goes on, the usage where it is wanted."""
        return self._chunk("", None, finish.reason) + self.choices.end(finish)

    def failed(self, error: SparkError) -> bytes:
        """Write a failure that came too late for a status."""
        return event(openai_error(*explain(error), error.field)) + b"data: [DONE]\n\n"

    def _chunk(self, text: str, logprobs: Sequence[c.TokenLogprob] | None, reason: str | None) -> bytes:
        made = {**self.choices.head, "choices": [self._choice(text, logprobs, reason)]}
        return event(made | {"usage": None} if self.choices.include_usage else made)

    def _choice(self, text: str, logprobs: Sequence[c.TokenLogprob] | None, reason: str | None) -> dict[str, Any]:
        shown = None if self._logprobs is None or logprobs is None else _shown(logprobs, self._logprobs)
        return {"index": self._index, "text": text, "logprobs": shown, "finish_reason": reason}


def _shown(logprobs: Sequence[c.TokenLogprob], n_top: int) -> dict[str, Any]:
    """The tokens as this API has them: the likeliest by their text, the one that was drawn always among them."""
    return {
        "tokens": [_text(made.token) for made in logprobs],
        "token_logprobs": [made.logprob for made in logprobs],
        "top_logprobs": [_top(made) for made in logprobs] if n_top else None,
        "text_offset": [made.at for made in logprobs],
    }


def _top(made: c.TokenLogprob) -> dict[str, float]:
    likely: dict[str, float] = {}
    for token, logprob in (*made.top, (made.token, made.logprob)):
        likely.setdefault(_text(token), logprob)
    return likely


def _text(token: bytes) -> str:
    """The text of a token; one that is not whole characters is spelled in bytes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
