"""Prompts of conversations: what of a request's texts, tools and wishes becomes tokens, a budget and a grammar.

A rendering cannot be broken off, and some take a second: many tiny messages cost more than a long text. So there are
two lanes, by what a rendering will take, in each of which one is made after the other, the shortest first; short ones
wait for no long one, and what is shorter still is made at once. Whoever leaves before his turn takes none.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from engine.ground import protocol
from engine.ground.errors import ContextOverflowError, RequestError
from engine.text.tokenizer import Tokenizer
from spark.speech.conversation import EFFORTS, Conversation, refusal
from spark.speech.render import Opening, Renderer
from spark.speech.tool_schemas import loosened

_CHARS_A_TOKEN = 32  # more than any text has on average
_LIKELY_CHARS_A_TOKEN = 4  # for what is too long to be made tokens of
# What a rendering takes is told in characters of plain text, of which some two million take a second.
_SOON = 4096
_SHORT = 1 << 18
_PIECE = 160  # for a message, a call or a tool, whatever is in it
_AGED_S = 2.0  # who has waited for longer shares the turns with shorter ones
_Result = TypeVar("_Result")


class PromptTooLongError(ContextOverflowError):
    """A prompt that leaves no room for a reply; figures: how long it is, how long it may be, as clients look for it."""

    def __init__(self, n: int, most: int, about: str = "") -> None:
        # In words of OpenAI's, by which some clients know what to do.
        limit = f"This model's maximum context length is {most} tokens"
        super().__init__(f"{limit}, and the prompt has {about}{n} tokens; make it shorter")
        self.figures = f"{n} tokens > {most} maximum"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that is ready to run.

    max_tokens: of the reply. budget: tokens of reasoning, None: no limit. arrived_s: when it was asked for.
    prediction: tokens that may come in the reply, None: of none it is said.
    """

    conversation: Conversation
    opening: Opening
    max_tokens: int
    budget: int | None
    grammar: dict[str, Any] | None
    arrived_s: float
    prediction: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """Work that waits for its turn; effort: what it will take."""

    effort: int
    since_s: float
    work: Callable[[], Any]
    made: Future[Any]


class _Lane:
    """A thread that does one piece of work after the other, the shortest that waits first.

    Once one has waited for long, every second turn is of whoever has waited for longest: if all were, a short one would
    wait behind each long one that came before it.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []  # in the order in which they came
        self._was_aged = False  # the last turn was that of one who had waited for longest

    async def do(self, effort: int, work: Callable[[], _Result]) -> _Result:
        """Do work when its turn comes; who is cancelled before has none."""
        made: Future[_Result] = Future()
        waiting = _Waiting(effort, time.monotonic(), work, made)
        with self._lock:
            self._waiting.append(waiting)
        try:
            self._thread.submit(self._turn)  # as many as there is work, or more
            return await asyncio.wrap_future(made)
        finally:
            with self._lock:
                if waiting in self._waiting:
                    self._waiting.remove(waiting)

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.made.cancel()

    def _turn(self) -> None:
        while (one := self._next()) is not None:
            if not one.made.set_running_or_notify_cancel():
                continue
            try:
                one.made.set_result(one.work())
            except BaseException as error:
                one.made.set_exception(error)
            return

    def _next(self) -> _Waiting | None:
        with self._lock:
            if not self._waiting:
                return None
            first = self._waiting[0]
            self._was_aged = not self._was_aged and time.monotonic() > first.since_s + _AGED_S
            found = first if self._was_aged else min(self._waiting, key=lambda one: one.effort)
            self._waiting.remove(found)
            return found


class Prompts:
    """Makes the prompts of a model. context: asked for the length of its context, which a new daemon may change."""

    def __init__(self, tokenizer: Tokenizer, context: Callable[[], int]) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._renderer = Renderer(tokenizer)
        self._short, self._long = (_Lane(f"{which} prompts") for which in ("short", "long"))

    @property
    def ctx_tokens(self) -> int:
        """The context's length."""
        return self._context()

    @property
    def most_chars(self) -> int:
        """How long a conversation may be."""
        return _CHARS_A_TOKEN * self.ctx_tokens

    async def count(self, conversation: Conversation, where: str) -> int:
        """The tokens of a conversation's prompt, which came in the field `where`."""
        self._refuse_long(conversation, where)
        opening, _ = await self._in_turn(conversation, lambda: self._open(conversation, where))
        return len(opening.tokens)

    async def prompt(self, conversation: Conversation, where: str) -> Prompt:
        """Render a conversation that was `measured` and came in the field `where`.

        Raises PromptTooLongError, and RequestError where the template refuses it.
        """
        arrived_s = time.monotonic()
        self._refuse_long(conversation, where)
        opening, budget, prediction = await self._in_turn(conversation, lambda: self._prepare(conversation, where))
        assert not conversation.more_raw
        room = self.ctx_tokens - len(opening.tokens)
        if room < 1:
            raise PromptTooLongError(len(opening.tokens), self.ctx_tokens)
        max_tokens = room if conversation.max_tokens is None else min(room, conversation.max_tokens)
        form = self._grammar(conversation, opening)
        if (recall := conversation.kv_recall) is not None and opening.kept:
            conversation = replace(conversation, kv_recall=replace(recall, keep=(*recall.keep, *opening.kept)))
        return Prompt(conversation, opening, max_tokens, budget, form, arrived_s, prediction)

    def soon(self, conversation: Conversation) -> bool:
        """Whether a conversation's prompt is made at once, as that takes no longer than to ask a thread for it."""
        return self._effort(conversation) <= _SOON

    def close(self) -> None:
        """Make no more prompts."""
        for lane in (self._short, self._long):
            lane.close()

    async def _in_turn(self, conversation: Conversation, work: Callable[[], _Result]) -> _Result:
        """Do work with a conversation; in a lane, as requests must not take all cores."""
        effort = self._effort(conversation)
        if effort <= _SOON:
            return work()
        return await (self._short if effort <= _SHORT else self._long).do(effort, work)

    def _refuse_long(self, conversation: Conversation, where: str) -> None:
        """Refuse what is longer than any context may be, before it has to wait for its turn."""
        most, n = self.most_chars, self._length(conversation)
        if n > most and not isinstance(conversation.raw, tuple):
            too_long = PromptTooLongError(n // _LIKELY_CHARS_A_TOKEN, self.ctx_tokens, f"{n} characters, likely ")
            too_long.field = "tools" if conversation.tool_chars > most else where
            raise too_long

    def _effort(self, conversation: Conversation) -> int:
        """What the prompt takes, in characters of plain text."""
        pieces = len(conversation.messages) + len(conversation.tools)
        pieces += sum(len(message.tool_calls) for message in conversation.messages)
        return self._length(conversation) + len(conversation.prediction) + _PIECE * pieces

    def _length(self, conversation: Conversation) -> int:
        """Characters to be rendered, or tokens that are given."""
        return len(conversation.raw or "") + conversation.text_chars + conversation.tool_chars

    def _prepare(self, conversation: Conversation, where: str) -> tuple[Opening, int | None, tuple[int, ...] | None]:
        """The prompt, the budget of reasoning, and the tokens of the prediction, as many as a context holds."""
        opening, budget = self._open(conversation, where)
        if not (conversation.draft and conversation.prediction):
            return opening, budget, None
        tokens = self._tokenizer.encode(conversation.prediction)
        return opening, budget, tuple(tokens[: min(self.ctx_tokens, protocol.MAX_TOKENS)])

    def _open(self, conversation: Conversation, where: str) -> tuple[Opening, int | None]:
        raw = conversation.raw
        if isinstance(raw, tuple):
            if not all(0 <= token < self._tokenizer.vocab_size for token in raw):
                raise refusal(where, f"tokens lie between 0 and {self._tokenizer.vocab_size - 1}")
            return Opening(list(raw), ""), None
        tools = conversation.tools
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
        formed = conversation.response_schema is not None and not may_call(conversation)
        if enabled is None and (forced or formed):  # what has a form is best written at once
            enabled = False
        opening = self._renderer.opening(
            conversation.messages,
            tools,
            thinking=enabled,
            effort=wish.effort,
            preserve=wish.preserve,
            written=conversation.written,
            kept=conversation.kept_messages,
        )
        return opening, budget

    def _refuse_marks(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Refuse tools whose names hold what the model marks calls and turns with: nobody could tell them apart."""
        special = [name for name in self._tokenizer.special_ids if self._tokenizer.is_control(name)]
        for name in (tool["function"]["name"] for tool in tools):
            found = next((mark for mark in special if mark in name), self._renderer.dialect.amiss(name))
            if found is not None:
                raise RequestError(
                    f"tools: the name {name[:100]!r} holds {found!r}, which no name may have in the model's format",
                    hint="give the tool another name",
                    field="tools",
                )

    def _grammar(self, conversation: Conversation, opening: Opening) -> dict[str, Any] | None:
        """What docs/protocol.md ("Grammars") has for a conversation that asks for a form."""
        choice, schema, dialect = conversation.tool_choice, conversation.response_schema, self._renderer.dialect
        if choice not in ("auto", "none"):
            functions = [tool["function"] for tool in conversation.tools]
            made: dict[str, Any] = {
                "kind": "tool_call",
                "format": dialect.calls,
                "tools": [{"name": f["name"], "parameters": _enforced(f.get("parameters"))} for f in functions],
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


def _enforced(parameters: Any) -> Any:
    """Of a tool's schema what a call can be kept to; the tool looks at the rest, as it does where no call is required.

    Of a form of the answer nothing is left out: it is refused, as nobody else looks at it.
    """
    with contextlib.suppress(RecursionError):  # which the daemon explains
        return loosened(parameters)
    return parameters


def may_call(conversation: Conversation) -> bool:
    """Whether a reply is a call or not as the model likes."""
    return bool(conversation.tools) and conversation.tool_choice == "auto"
