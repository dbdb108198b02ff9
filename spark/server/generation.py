"""Runs conversations on the supervisor: choices, budgets of reasoning, stop strings, and the end of it all.

A budget of reasoning that is used up breaks the generation off; what it made goes on from there with reasoning shut. A
reply that may be a tool call, or else has to have a form, is begun freely; where it does not begin with a call to a
tool that was offered, or ends before it has begun, it is begun again, constrained. Of several choices the first is sent
first, and the others say that they share its prompt. Behind calls to tools that were offered, one to another tool ends
such a reply before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Literal

from engine.ground import protocol
from engine.ground.errors import RequestError, SparkError
from engine.text.tokenizer import Tokenizer
from spark.server.board import Choice, RequestRow
from spark.server.metrics import Metrics
from spark.server.prompts import Prompt, Prompts, may_call
from spark.server.supervisor import Generation, Sent, Supervisor
from spark.speech.conversation import (
    CallArguments,
    CallStart,
    Drafted,
    Finish,
    Part,
    Read,
    Text,
    Usage,
    accepted_among,
    added_drafts,
    added_recall,
)
from spark.speech.logprobs import Aligner
from spark.speech.render import Renderer
from spark.speech.reply import ReplyParser

KEEP_ALIVE_S = 10.0
AT_ONCE = 8  # replies of one request that the engine has at a time, so that those of others come between
_SOON_S = 1.0  # how long to wait for a first sign before there is a keep-alive
_LONG_S = 10.0  # of reading a prompt, to be said in the log

_ABOUT_FORM = re.compile(r"(?s)(?:field 'grammar[^']*':? |(?=the (?:schema|grammar)\b))(.*)")

_log = logging.getLogger(__name__)


class Model(Prompts):
    """A model as the APIs see it: prompts, and the replies to them."""

    def __init__(self, supervisor: Supervisor, tokenizer: Tokenizer, metrics: Metrics) -> None:
        super().__init__(tokenizer, lambda: int(supervisor.ready.info["ctx_tokens"]))
        self._supervisor = supervisor
        self._metrics = metrics

    async def replies(
        self, prompts: Sequence[Prompt], row: RequestRow | None = None
    ) -> AsyncGenerator[tuple[int, list[Part] | Finish]]:
        """The choices of a request as they come, each by its number: those of the first prompt, of the second, ...

        What a prompt took to read is said at the end of its first choice alone. row: where to note how far they are.
        However this generator is left, the daemon does not go on with any of them.
        """
        for prompt in prompts:
            self._say_long(len(prompt.opening.tokens))
        if row is not None:
            row.prompt_tokens = sum(len(prompt.opening.tokens) for prompt in prompts)
        replies: list[_Reply] = []
        for prompt in prompts:
            leader = asyncio.get_running_loop().create_future() if prompt.conversation.choices > 1 else None
            for k in range(prompt.conversation.choices):
                chosen = replace(prompt, conversation=prompt.conversation.choice(k))
                progress = None if row is None else row.choice()
                replies.append(self.reply(chosen, leader, first=k == 0, progress=progress))
        items = _interleaved(replies) if len(replies) > 1 else _numbered(replies[0])
        async with contextlib.aclosing(items):
            async for item in items:
                yield item

    def _say_long(self, n: int) -> None:
        """Say in the log of a prompt that takes long, or that is longer than the pool, how long it may take."""
        pool, expected_s = self._supervisor.ready.info.get("pool_tokens"), self._metrics.pace.expected_s(n)
        beyond = isinstance(pool, int) and n > pool
        if not beyond and (expected_s or 0.0) < _LONG_S:
            return
        where = f", in host memory beyond the {pool:,} of the pool" if beyond else ""
        takes = f"at most {expected_s:,.1f} s to read" if expected_s else "how long it takes is not measured yet"
        _log.info("a prompt of %s tokens%s: %s", f"{n:,}", where, takes)

    async def reply(
        self,
        prompt: Prompt,
        leader: asyncio.Future[Sent | None] | None = None,
        *,
        first: bool = True,
        progress: Choice | None = None,
    ) -> AsyncGenerator[list[Part] | Finish]:
        """The parts of a reply as they come, none where nothing came for a while, and its end.

        leader: what was sent of the first of several choices, which it says and the others wait for. progress: where to
        note how far it is. However this generator is left, the daemon does not go on with the request.
        """
        progress = progress or Choice()
        run = _Run(self._renderer, self._tokenizer, prompt, self.ctx_tokens)
        began_s, reason = time.monotonic(), ""
        said_s: float | None = None  # when something was last given out
        generation: Generation | None = None
        try:
            while run.left > 0 and not run.reason:
                run.broken = False
                shared = None
                if generation is None and leader is not None and not first:
                    sent = await asyncio.shield(leader)
                    if isinstance(sent, Exception):
                        raise sent
                    shared = sent
                leads = generation is None and leader is not None and first
                shared_by = prompt.conversation.choices - 1 if leads else 0
                generation = Generation(
                    self._supervisor,
                    run.tokens,
                    run.left,
                    prompt.conversation.sampling,
                    grammar=run.grammar_text(),
                    reply_from=run.reply_from,
                    logprobs=prompt.conversation.logprobs,
                    draft=prompt.conversation.draft,
                    stop_tokens=() if prompt.conversation.endless else None,
                    prediction=prompt.prediction,
                    kv_recall=prompt.conversation.kv_recall,
                    shared=shared,
                    shared_by=shared_by,
                )
                if leader is not None and first:
                    generation.sent.add_done_callback(functools.partial(_pass_on, leader))
                while not (run.reason or run.broken):
                    # Once something was said a bad form cannot be refused by a status any more, and the first form of
                    # a daemon takes it a second or two to look at.
                    soon = said_s is None and prompt.grammar is None
                    patience_s = _SOON_S if soon else KEEP_ALIVE_S
                    if said_s is not None:  # events that say nothing to the client do not put off the next sign
                        patience_s = max(0.0, said_s + KEEP_ALIVE_S - time.monotonic())
                    event = await generation.next(patience_s)
                    parts = [] if event is None else run.take(event)
                    progress.take(run.used, prompt=first)
                    # A call whose arguments cannot be shown yet is no reason to be silent either.
                    if parts or event is None or said_s is None or time.monotonic() - said_s >= KEEP_ALIVE_S:
                        yield parts
                        said_s = time.monotonic()
                generation.cancel()
            if parts := run.flush():
                yield parts
            finish = run.finish()
            reason = progress.finish = finish.reason
            if not first:
                finish = replace(finish, usage=replace(finish.usage, prompt=0, cached=0))
            yield finish
        except SparkError as error:
            reason = error.code
            if isinstance(error, RequestError):
                _name_form(error, prompt)
            raise
        finally:
            if generation is not None:
                generation.cancel()
                if not run.reason:
                    for event in generation.undelivered():
                        run.count(event)
            if leader is not None and first and not leader.done() and generation is None:
                leader.set_result(None)
            ended_s = time.monotonic()
            used = run.used
            progress.take(used, prompt=first)
            if run.begun:
                first_s = run.first_s
                to_first_s = None if first_s is None else first_s - prompt.arrived_s
                self._metrics.pace.take(used.prompt - used.cached, used.cached, run.read_s)
                self._metrics.reply(used, to_first_s, 0.0 if first_s is None else ended_s - first_s)
            _log.info(
                "%d tokens read, %d reused, %d written, %.2f s: %s",
                used.prompt - used.cached, used.cached, used.completion, ended_s - began_s, reason or "left",
            )  # fmt: skip


_Reply = AsyncGenerator[list[Part] | Finish]


def _name_form(error: RequestError, prompt: Prompt) -> None:
    """Have an error that is about the form name the field that the client sent it in; the daemon has its own for it."""
    about = _ABOUT_FORM.fullmatch(error.message)
    if prompt.grammar is None or about is None or error.field is not None:  # choices may share an error
        return
    error.field = "tools" if prompt.grammar["kind"] == "tool_call" else prompt.conversation.form_field
    error.message = f"{error.field}: {about[1]}"


def _pass_on(leader: asyncio.Future[Sent | None], sent: asyncio.Future[Sent]) -> None:
    if not leader.done():
        leader.set_result(sent.result())


async def _numbered(reply: _Reply) -> AsyncGenerator[tuple[int, list[Part] | Finish]]:
    async with contextlib.aclosing(reply):
        async for item in reply:
            yield 0, item


async def _interleaved(replies: Sequence[_Reply]) -> AsyncGenerator[tuple[int, list[Part] | Finish]]:
    """What several replies bring, each by its number, in the order in which it comes; AT_ONCE run at a time."""
    waiting = deque(range(len(replies)))
    running: dict[asyncio.Task[list[Part] | Finish], int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                i = waiting.popleft()
                running[asyncio.create_task(_next(replies[i]))] = i
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=running.__getitem__):
                i = running.pop(task)
                item = task.result()
                if isinstance(item, Finish):
                    await replies[i].aclose()
                else:
                    running[asyncio.create_task(_next(replies[i]))] = i
                yield i, item
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for reply in replies:
            await reply.aclose()


async def _next(reply: _Reply) -> list[Part] | Finish:
    return await anext(reply)


def _joined(parts: list[Part]) -> list[Part]:
    """The parts with what belongs together in one: an event of an API each costs more than the text in it."""
    made: list[Part] = []
    for part in parts:
        last = made[-1] if made else None
        if isinstance(part, Text) and isinstance(last, Text) and part.kind == last.kind:
            made[-1] = Text(part.kind, last.text + part.text, last.logprobs + part.logprobs, last.at)
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
        self._aligner = None if conversation.logprobs is None else Aligner(tokenizer)
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
        self._free = prompt.grammar is not None and conversation.raw is None and may_call(conversation)
        self._offered = {tool["function"]["name"] for tool in conversation.tools}
        self._called = False  # where it has a form, which then binds no answer: to a tool that was offered
        self._ended = False  # before a call to another tool
        self.tokens, self.left = list(prompt.opening.tokens), max(prompt.max_tokens, 1)
        self._reads_only = prompt.max_tokens == 0  # an engine writes one token at least, which then is nobody's
        self._answer_at = len(self.tokens)  # where what is not reasoning begins
        self._prompt_tokens = len(self.tokens)
        self._reused = 0  # of the tokens of the prompt
        self._read = 0  # those, and those that were computed
        self.read_s = 0.0  # how long that took, once that is known
        self._completion = self._reasoning = 0
        self._drafts: Drafted = {}  # of the generations before
        self._drafting: Drafted = {}  # of the one at hand, as far as it has told
        self._recall: Read | None = None  # likewise
        self._recalling: Read | None = None
        self._before_answer: tuple[Drafted, Read | None] = {}, None  # what those of this one were of reasoning
        self._generation = 0  # how many there were before
        self._chars = 0  # that the parser was given
        self.first_s: float | None = None
        self.reason: Literal["", "stop", "length", "tool_calls"] = ""
        self.broken = self.begun = False

    @property
    def usage(self) -> Usage:
        """What a reply that ends now has taken."""
        drafts = accepted_among(self._completion, added_drafts(self._drafts, self._drafting))
        recall = added_recall(self._recall, self._recalling)
        return Usage(self._prompt_tokens, self._completion, self._reused, self._reasoning, drafts, recall)

    @property
    def used(self) -> Usage:
        """The same, of the prompt no more than what was read."""
        return replace(self.usage, prompt=self._read)

    @property
    def reply_from(self) -> int | None:
        """Where in `tokens` the reply begins, if it has begun."""
        return self._prompt_tokens if len(self.tokens) > self._prompt_tokens else None

    def grammar_text(self) -> str | None:
        """The grammar of the next generation; where it may still be a call, one that is only checked."""
        if self._grammar is None:
            return None
        return json.dumps(self._grammar | {"binds": False} if self._free else self._grammar)

    def take(self, event: protocol.Event) -> list[Part]:
        """Take an event of the generation; the parts that it brings."""
        parts: list[Part] = []
        self.begun = True
        self._count_prompt(event)
        if self._reads_only:
            self.reason = "length" if isinstance(event, protocol.Done) else ""
            return []
        if isinstance(event, protocol.Tokens):
            self._drafting = event.drafts or self._drafting
            self._recalling = event.recall or self._recalling
            if self.first_s is None and event.tokens:
                self.first_s = time.monotonic()
            for i, token in enumerate(event.tokens):
                text = self._text.push([token]) if token not in self._stop_ids else ""
                if self._aligner is not None and event.logprobs is not None and token not in self._stop_ids:
                    top = event.top[i] if event.top is not None else ()
                    self._aligner.token(self._chars, len(text), token, event.logprobs[i], top)
                self._token(token, text, parts)
                if self.reason or self.broken:
                    break
        elif isinstance(event, protocol.Done):
            self.reason = event.finish_reason or "stop"
            self._drafting, self._recalling = event.usage.drafts, event.usage.recall
            if self._free:
                self._end_free(parts)
        return _joined(self._aligned(parts))

    def count(self, event: protocol.Event) -> None:
        """Count what an event brings that comes too late for the reply."""
        self.begun = True
        self._count_prompt(event)
        if isinstance(event, protocol.Tokens) and not self._reads_only:
            self._completion += len(event.tokens)
            self._drafting = event.drafts or self._drafting
            self._recalling = event.recall or self._recalling

    def _count_prompt(self, event: protocol.Event) -> None:
        """Count what was read; later generations read what earlier ones have made."""
        if self._generation:
            return
        match event:
            case protocol.Progress():
                self._read = max(self._read, min(event.done_tokens, self._prompt_tokens))
                self._reused = min(event.cached_tokens, self._read)
            case protocol.Tokens():
                self._read = self._prompt_tokens
            case protocol.Done():
                self._read = self._prompt_tokens
                self._reused = min(event.usage.cached_tokens, self._read)
                self.read_s = event.timing.prefill_s

    def _aligned(self, parts: list[Part]) -> list[Part]:
        """The parts with the tokens of visible text, where they are asked for."""
        aligner = self._aligner
        if aligner is None:
            return parts
        return [
            replace(part, logprobs=aligner.of(part.at, len(part.text)))
            if isinstance(part, Text) and part.kind == "content"
            else part
            for part in parts
        ]

    def _push(self, text: str) -> list[Part]:
        self._chars += len(text)
        return self._parser.push(text)

    def _token(self, token: int, text: str, parts: list[Part]) -> None:
        parser, before, n = self._parser, self._parser.reasoning, len(parts)
        self._completion += 1
        self.tokens.append(token)
        self.left -= 1
        if text:
            parts += self._push(text)
        if before or parser.reasoning:
            self._reasoning += 1
        if parser.reasoning or before:
            self._answer_at = len(self.tokens)
            self._before_answer = self._drafting, self._recalling
        elif self._free and (parts[n:] or parser.ended):
            self._free = False
            if not self._calls(parts[n:]):  # a stop string is one of the answer, too
                del parts[n:]
                self._begin_again()
                return
            self._called = True
        if self._called and self._unoffered(parts, n):
            return
        if parser.ended:
            self.reason = "stop"
        elif parser.reasoning and self._budget is not None and self._reasoning >= self._budget:
            self._shut(parts)

    def _shut(self, parts: list[Part]) -> None:
        """Shut reasoning, from where another generation goes on."""
        parts += self._push(self._text.flush() + self._renderer.shut)
        closing = self._renderer.shutting()
        self.tokens += closing
        self.left = min(self.left, self._ctx_tokens - len(self.tokens))
        self._answer_at = len(self.tokens)
        self._go_on()
        if self.left < 1:
            self.reason = "length"

    def _end_free(self, parts: list[Part]) -> None:
        """End a reply that was neither a call nor text so far; what it is without the form is begun again."""
        if self._parser.reasoning:
            if self.reason == "length":
                return
            self.reason = ""
            self._shut(parts)
        else:
            cut = self.reason == "length"
            found = self._push(self._text.flush()) + self._parser.flush(cut)
            # A call that was cut before its name was known may have become one to a tool that was offered.
            if self._calls(found) or (self._parser.cut and not found):
                parts += found
                self._unoffered(parts, 0)
                return
            self.reason = ""
        self._free = False
        self._begin_again()
        if self.left < 1:
            self.reason = "length"

    def _calls(self, parts: Sequence[Part]) -> bool:
        """Whether what the reply begins with is a call to a tool that was offered."""
        return bool(parts) and isinstance(parts[0], CallStart) and parts[0].name in self._offered

    def _unoffered(self, parts: list[Part], n: int) -> bool:
        """End the reply before the first call, from part n on, to a tool that was not offered; whether there is one."""
        for i in range(n, len(parts)):
            part = parts[i]
            if isinstance(part, CallStart) and part.name not in self._offered:
                del parts[i:]
                self._ended, self.reason = True, "tool_calls"
                return True
        return False

    def _begin_again(self) -> None:
        """Take back what was not reasoning, for a generation that is constrained."""
        n = len(self.tokens) - self._answer_at
        del self.tokens[self._answer_at :]
        self.left += n
        self._completion -= n
        self._drafting, self._recalling = self._before_answer
        self._text.flush()
        self._chars = 0
        if self._aligner is not None:
            self._aligner.clear()
        self._parser = ReplyParser(self._renderer.dialect, stops=self._conversation.stops, thinking="shut")
        self._go_on()

    def _go_on(self) -> None:
        """Have another generation go on, with reasoning behind it."""
        self.broken = True
        self._generation += 1
        self._drafts, self._drafting = added_drafts(self._drafts, self._drafting), {}
        self._recall, self._recalling = added_recall(self._recall, self._recalling), None
        self._before_answer = {}, None
        if self._grammar is not None:
            self._grammar = {key: value for key, value in self._grammar.items() if key not in ("after", "opens")}

    def flush(self) -> list[Part]:
        """The parts that were held back."""
        if self._ended:
            return []
        parts = self._push(self._text.flush()) + self._parser.flush(self.reason == "length")
        if self._called:
            self._unoffered(parts, 0)
        return self._aligned(parts)

    def finish(self) -> Finish:
        """The end."""
        if self._ended:
            return Finish("tool_calls", self.usage)
        if self._parser.stop is not None:
            self.reason = "stop"
        elif self._parser.called and not self._parser.cut:
            self.reason = "tool_calls"
        most = self._conversation.max_tokens
        full = len(self.tokens) >= self._ctx_tokens and (most is None or self._completion < most)
        reason = self.reason or "stop"
        return Finish(reason, self.usage, self._parser.stop, full=full and reason == "length")
