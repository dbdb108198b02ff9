"""Runs conversations on the backend: prompts, budgets of reasoning, stop strings, and the end of it all.

A budget of reasoning that is used up breaks the generation off; what it made goes on from there with reasoning shut. A
reply that may be a tool call, or else has to have a form, is begun freely; where it does not begin with a call, it is
begun again, constrained.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine import protocol
from engine.errors import ContextOverflowError, RequestError, SparkError
from engine.tokenizer import Tokenizer
from spark.backend import Backend, Generation
from spark.conversation import EFFORTS, CallArguments, Conversation, Finish, Part, Text, Usage
from spark.metrics import Metrics
from spark.render import Opening, Renderer
from spark.reply import ReplyParser

KEEP_ALIVE_S = 10.0
_SOON_S = 1.0  # how long to wait for a first sign before there is a keep-alive
_CHARS_A_TOKEN = 32  # more than any text has on average

_log = logging.getLogger(__name__)


class PromptTooLongError(ContextOverflowError):
    """A prompt that leaves no room for a reply; figures: how long it is, how long it may be."""

    def __init__(self, n: int, most: int, unit: str = "tokens") -> None:
        super().__init__(f"the prompt of {n} {unit} leaves no room in a context of {most}")
        self.figures = f"{n} {unit} > {most} maximum"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that is ready to run. budget: tokens of reasoning, None: no limit; max_tokens: at most 1."""

    conversation: Conversation
    opening: Opening
    max_tokens: int
    budget: int | None
    grammar: dict[str, Any] | None
    arrived_s: float


class Model:
    """A model as the APIs see it."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._renderer = Renderer(tokenizer)
        self._rendering = asyncio.Lock()

    @property
    def ctx_tokens(self) -> int:
        """The context's length."""
        return int(self._backend.ready.info["ctx_tokens"])

    async def count(self, conversation: Conversation) -> int:
        """The tokens of a conversation's prompt."""
        async with self._rendering:
            opening, _ = await asyncio.to_thread(self._open, conversation)
        return len(opening.tokens)

    async def prompt(self, conversation: Conversation) -> Prompt:
        """Render a conversation; raises PromptTooLongError, and RequestError where the template refuses it."""
        arrived_s = time.monotonic()
        async with self._rendering:  # one after the other: requests must not take all cores
            opening, budget = await asyncio.to_thread(self._open, conversation)
        room = self.ctx_tokens - len(opening.tokens)
        if room < 1:
            raise PromptTooLongError(len(opening.tokens), self.ctx_tokens)
        max_tokens = min(room, conversation.max_tokens or room)
        return Prompt(conversation, opening, max_tokens, budget, self._grammar(conversation, opening), arrived_s)

    def _open(self, conversation: Conversation) -> tuple[Opening, int | None]:
        raw = conversation.raw
        if isinstance(raw, tuple):
            if not all(0 <= token < self._tokenizer.vocab_size for token in raw):
                raise RequestError(f"prompt: tokens lie between 0 and {self._tokenizer.vocab_size - 1}")
            return Opening(list(raw), ""), None
        most = _CHARS_A_TOKEN * self.ctx_tokens
        tools = conversation.tools if conversation.tool_choice != "none" else ()
        n = len(raw or "") + _rendered_chars(conversation, tools)
        if n > most:
            raise PromptTooLongError(n, most, "characters")
        self._refuse_marks(tools)
        if raw is not None:
            tokens = self._tokenizer.encode(raw)
            start = [self._tokenizer.bos_id] if self._tokenizer.add_bos and self._tokenizer.bos_id is not None else []
            return Opening(start + tokens, ""), None
        wish = conversation.reasoning
        enabled, budget = wish.enabled, wish.budget_tokens
        if budget is None and wish.effort is not None and not self._renderer.dialect.knows_effort:
            budget = EFFORTS[wish.effort]
        forced = conversation.tool_choice not in ("auto", "none")
        formed = conversation.response_schema is not None and not _may_call(conversation)
        if enabled is None and (forced or formed):  # what has a form is best written at once
            enabled = False
        opening = self._renderer.opening(
            conversation.messages,
            tools,
            thinking=enabled,
            effort=wish.effort,
            written=conversation.written,
        )
        return opening, budget

    def _refuse_marks(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Refuse tools whose names hold what the model marks calls and turns with: nobody could tell them apart."""
        special = [name for name in self._tokenizer.special_ids if self._tokenizer.is_control(name)]
        for name in (tool["function"]["name"] for tool in tools):
            found = next((mark for mark in (*self._renderer.dialect.marks, *special) if mark in name), None)
            if found is not None:
                raise RequestError(
                    f"tools: the name {name[:100]!r} holds {found!r}, which is a mark of the model's format",
                    hint="give the tool another name",
                )

    def _grammar(self, conversation: Conversation, opening: Opening) -> dict[str, Any] | None:
        """What docs/protocol.md ("Grammars") has for a conversation that asks for a form."""
        choice, schema, dialect = conversation.tool_choice, conversation.response_schema, self._renderer.dialect
        if choice not in ("auto", "none"):
            functions = [tool["function"] for tool in conversation.tools]
            made: dict[str, Any] = {
                "kind": "tool_call",
                "format": dialect.calls,
                "tools": [{"name": f["name"], "parameters": f.get("parameters")} for f in functions],
                "parallel": conversation.parallel_calls,
            }
            if isinstance(choice, tuple):
                made |= {"name": choice[1], "parallel": False}
        elif schema is not None:
            made = {"kind": "json_schema", "schema": dict(schema)} if schema else {"kind": "json_object"}
        else:
            return None
        if conversation.raw is not None:
            return made
        if opening.thinking == "open":
            made["after"] = dialect.shuts
        elif opening.thinking == "" and dialect.thinks:
            made |= {"after": dialect.shuts, "opens": dialect.opens}
        return made

    async def reply(self, prompt: Prompt) -> AsyncGenerator[list[Part] | Finish]:
        """The parts of a reply as they come, none where nothing came for a while, and its end.

        However this generator is left, the daemon does not go on with the request.
        """
        run = _Run(self._renderer, self._tokenizer, prompt, self.ctx_tokens)
        began_s, reason = time.monotonic(), ""
        said_s: float | None = None  # when something was last given out
        generation: Generation | None = None
        try:
            while run.left > 0 and not run.reason:
                run.broken = False
                generation = Generation(
                    self._backend, run.tokens, run.left, prompt.conversation.sampling, run.grammar_text()
                )
                while not (run.reason or run.broken):
                    # Once something was said a bad form cannot be refused by a status any more, and the first form of
                    # a daemon takes it a second or two to look at.
                    soon = said_s is None and prompt.grammar is None
                    event = await generation.next(_SOON_S if soon else KEEP_ALIVE_S)
                    parts = [] if event is None else run.take(event)
                    # A call whose arguments cannot be shown yet is no reason to be silent either.
                    if parts or said_s is None or time.monotonic() - said_s >= KEEP_ALIVE_S:
                        yield parts
                        said_s = time.monotonic()
                generation.cancel()
            if parts := run.flush():
                yield parts
            finish = run.finish()
            reason = finish.reason
            yield finish
        except SparkError as error:
            reason = error.code
            raise
        finally:
            if generation is not None:
                generation.cancel()
            ended_s = time.monotonic()
            if run.begun:
                first_s = run.first_s
                to_first_s = None if first_s is None else first_s - prompt.arrived_s
                self._metrics.reply(run.usage, to_first_s, 0.0 if first_s is None else ended_s - first_s)
            _log.info(
                "%d tokens read, %d reused, %d written, %.2f s: %s",
                run.usage.prompt - run.usage.cached, run.usage.cached, run.usage.completion, ended_s - began_s,
                reason or "left",
            )  # fmt: skip


def _rendered_chars(conversation: Conversation, tools: Sequence[Mapping[str, Any]]) -> int:
    """How much text a template is given; objects are measured as the JSON that templates mostly write."""
    data: list[Any] = [tools, *(call.arguments for m in conversation.messages for call in m.tool_calls)]
    texts = [text for m in conversation.messages for text in (m.content, m.reasoning, m.tool_call_id)]
    texts += [text for m in conversation.messages for call in m.tool_calls for text in (call.id, call.name)]
    written = (len(json.dumps(item, ensure_ascii=False)) for item in data)
    return sum(map(len, texts)) + sum(written) + len(conversation.written)


def _may_call(conversation: Conversation) -> bool:
    return bool(conversation.tools) and conversation.tool_choice == "auto"


def _joined(parts: list[Part]) -> list[Part]:
    """The parts with what belongs together in one: an event of an API each costs more than the text in it."""
    made: list[Part] = []
    for part in parts:
        last = made[-1] if made else None
        if isinstance(part, Text) and isinstance(last, Text) and part.kind == last.kind:
            made[-1] = Text(part.kind, last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments):
            made[-1] = CallArguments(last.text + part.text)
        else:
            made.append(part)
    return made


class _Run:
    """The state of one reply, over the generations that it takes.

    tokens, left: what the next generation continues, by how many at most. reason: why the reply has ended, empty while
    it has not. broken: the generation is to be broken off, and another one goes on. begun: it was worked on.
    """

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, prompt: Prompt, ctx_tokens: int) -> None:
        conversation = prompt.conversation
        self._renderer, self._ctx_tokens = renderer, ctx_tokens
        self._stop_ids = tokenizer.stop_ids
        self._text = tokenizer.stream()
        self._conversation = conversation
        self._parser = ReplyParser(
            renderer.dialect,
            plain=conversation.raw is not None,
            stops=conversation.stops,
            tools=conversation.tools if conversation.tool_choice != "none" else (),
            thinking=prompt.opening.thinking,
            single_call=not conversation.parallel_calls,
            calls_only=conversation.tool_choice not in ("auto", "none"),
        )
        self._budget, self._grammar = prompt.budget, prompt.grammar
        self._free = prompt.grammar is not None and conversation.raw is None and _may_call(conversation)
        self.tokens, self.left = list(prompt.opening.tokens), prompt.max_tokens
        self._answer_at = len(self.tokens)  # where what is not reasoning begins
        self.usage = Usage(len(self.tokens), 0)
        self.first_s: float | None = None
        self.reason: Literal["", "stop", "length", "tool_calls"] = ""
        self.broken = self.begun = False

    def grammar_text(self) -> str | None:
        """The grammar of the next generation; where it may still be a call, one that is only checked."""
        if self._grammar is None:
            return None
        return json.dumps(self._grammar | {"binds": False} if self._free else self._grammar)

    def take(self, event: protocol.Event) -> list[Part]:
        """Take an event of the generation; the parts that it brings."""
        parts: list[Part] = []
        self.begun = True
        if isinstance(event, protocol.Tokens):
            if self.first_s is None and event.tokens:
                self.first_s = time.monotonic()
            for token in event.tokens:
                self._token(token, parts)
                if self.reason or self.broken:
                    break
        elif isinstance(event, protocol.Done):
            self.usage = replace(self.usage, cached=min(event.usage.cached_tokens, self.usage.prompt))
            self.reason = event.finish_reason or "stop"
        return _joined(parts)

    def _token(self, token: int, parts: list[Part]) -> None:
        parser, before, n = self._parser, self._parser.reasoning, len(parts)
        self.usage = replace(self.usage, completion=self.usage.completion + 1)
        self.tokens.append(token)
        self.left -= 1
        if token not in self._stop_ids:
            parts += parser.push(self._text.push([token]))
        if before or parser.reasoning:
            self.usage = replace(self.usage, reasoning=self.usage.reasoning + 1)
        if parser.reasoning or before:
            self._answer_at = len(self.tokens)
        elif self._free and parts[n:]:
            self._free = False
            if isinstance(parts[n], Text):
                del parts[n:]
                self._begin_again()
                return
        if parser.ended:
            self.reason = "stop"
        elif parser.reasoning and self._budget is not None and self.usage.reasoning >= self._budget:
            self._shut(parts)

    def _shut(self, parts: list[Part]) -> None:
        """Shut reasoning, from where another generation goes on."""
        parts += self._parser.push(self._text.flush() + self._renderer.shut)
        closing = self._renderer.shutting()
        self.tokens += closing
        self.left = min(self.left, self._ctx_tokens - len(self.tokens))
        self._answer_at = len(self.tokens)
        self._go_on()
        if self.left < 1:
            self.reason = "length"

    def _begin_again(self) -> None:
        """Take back what was not reasoning, for a generation that is constrained."""
        n = len(self.tokens) - self._answer_at
        del self.tokens[self._answer_at :]
        self.left += n
        self.usage = replace(self.usage, completion=self.usage.completion - n)
        self._text.flush()
        self._parser = ReplyParser(self._renderer.dialect, stops=self._conversation.stops, thinking="shut")
        self._go_on()

    def _go_on(self) -> None:
        """Have another generation go on, with reasoning behind it."""
        self.broken = True
        if self._grammar is not None:
            self._grammar = {key: value for key, value in self._grammar.items() if key not in ("after", "opens")}

    def flush(self) -> list[Part]:
        """The parts that were held back."""
        return self._parser.push(self._text.flush()) + self._parser.flush(self.reason == "length")

    def finish(self) -> Finish:
        """The end."""
        if self._parser.stop is not None:
            self.reason = "stop"
        elif self._parser.called and not self._parser.cut:
            self.reason = "tool_calls"
        return Finish("stop" if self.reason == "" else self.reason, self.usage, self._parser.stop)
