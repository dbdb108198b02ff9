r"""A conversation as tokens: what the model is given, and what it answers.

Serving and `spark tokenize` render conversations here and nowhere else, so that what calibration counts is what
serving decodes. A rendering goes through the model's chat template; where the model has none, through PLAIN of
engine/text/template.py (`User:\n...` and so on, EOS after each of the model's turns).

**Nothing in a message forges a token of the template.** In the text a template writes, names of control tokens are
control tokens; in what people, tools and the model wrote, they are plain text. The two are told apart by marks:
before rendering, a noncharacter goes into every name of a control token within a message, and to the ends of
messages where a name could be completed by the text around it; after rendering, text is cut at the unmarked names and
the marks are taken out. So templates still see, trim and split the contents themselves.

**A turn of the model** is the rendering of everything before it, ending in the template's generation prompt, followed
by what the model generated: reasoning, content, tool calls and the token that ends the turn. That second part is what
the template writes for the message when it is the last one. Where templates differ in what they show of reasoning:

- the prompt leaves `<think>` open and the message is shown without reasoning: the model closes it, with the
  reasoning that is known, `\n</think>\n\n` and the content;
- the prompt closes `</think>`, or Gemma 4's empty channel, itself (thinking is off): the model writes no reasoning;
- the template writes `</think>` but drops the reasoning of this message: it is put back, between `<think>\n` and
  `\n</think>\n\n`. Templates that never mention `</think>` belong to models that do not think aloud.

Where the template ends a turn with no token the model could stop at, EOS is added: the model has to end somehow.
A BOS that the tokenizer asks for is added unless the template wrote it.

Messages are given to templates in the shape of the chat-completions API. System messages at the beginning are joined
into one; templates refuse any others, so later ones become user messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engine.ground.errors import RequestError
from engine.text.template import PLAIN, ChatTemplate
from engine.text.tokenizer import Tokenizer
from spark.speech.dialect import Dialect, learn
from spark.speech.sessions import Message, Session, ToolCall
from spark.speech.spans import Span, TokenSpans, find

Tokens = npt.NDArray[np.int32]
Chat = list[dict[str, Any]]

_MARK = "\ufdd0"  # Unicode keeps it for the inner use of programs
_MARK_ITSELF = "\ufdd0\ufdd1"  # where the text had it
_BREAK = "\ufdd0\ufdd2"

_OPEN_THINK = re.compile(r"<think>\s*\Z")
_SHUT_THINK = re.compile(r"(?:(?:<think>\s*)?</think>|<\|channel>thought\s*<channel\|>)\s*\Z")  # the latter: Gemma 4
_CHANNEL = re.compile(r"<\|channel>.*?<channel\|>", re.DOTALL)
_TAIL = 64  # characters in which they are looked for
_MOST_REMEMBERED = 1 << 24  # characters of text whose tokens are kept
_UNDATED = datetime(2025, 1, 1)  # for logs without a time: renderings must not depend on the day


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model. prompt, generated: int32 tokens, what it was given and what it wrote."""

    prompt: Tokens
    generated: Tokens


@dataclass(frozen=True, slots=True)
class Opening:
    """What a reply is generated from: tokens, and whether they open reasoning, or shut it, or end within a reply.

    kept: of the messages that were asked for, the tokens [from, to) that they took, or some more (spans.py).
    """

    tokens: list[int]
    thinking: Literal["open", "shut", "begun", ""]
    kept: tuple[Span, ...] = ()


class Renderer:
    """Renders conversations for one model; remembers the tokens of recent text, as conversations repeat themselves.

    Usable from several threads. template_hash: identifies the template, also that of models without one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        bos, eos = ("" if i is None else tokenizer.decode([i]) for i in (tokenizer.bos_id, tokenizer.eos_id))
        self.tokenizer = tokenizer
        self._template = tokenizer.template or ChatTemplate(PLAIN, bos, eos)
        self.template_hash = self._template.hash
        self._shield = _Shield([name for name in tokenizer.special_ids if tokenizer.is_control(name)])
        self._remembered: dict[str, Tokens] = {}
        self._remembered_size = 0

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), **extra: Any) -> list[int]:
        """The tokens a model is given to answer `messages`; RequestError where its template refuses them.

        tools: definitions `{"type":"function","function":{...}}`. extra: variables of the template.
        """
        chat, shielded = self._chat(messages), self._shield.data(list(tools))
        return _listed(self._prompt_tokens(self._template.render(chat, shielded, **extra)))

    @cached_property
    def dialect(self) -> Dialect:
        """How the model writes reasoning and calls."""
        return learn(self._template)

    def opening(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        thinking: bool | None = None,
        effort: str | None = None,
        preserve: bool | None = None,
        written: str = "",
        kept: Sequence[Span] = (),
    ) -> Opening:
        """The prompt of a reply; RequestError where the template refuses the messages.

        thinking: None leaves it to the template; one that does not know `enable_thinking` is helped: reasoning is
        opened and shut again, so that the model takes it for done. effort: for templates that know it. preserve:
        whether the reasoning of earlier turns is shown, for templates that know `preserve_thinking`. written: how the
        reply begins, after reasoning that is shut; blanks at its end are not rendered, as they belong to the next word,
        so those that the reply then begins with are there already. kept: ranges of messages whose tokens are asked
        for, [from, to) each; -1: what stands before all messages.
        """
        dialect = self.dialect
        variables: dict[str, Any] = {}
        if thinking is not None and dialect.knows_thinking:
            variables["enable_thinking"] = thinking
        if effort is not None and dialect.knows_effort:
            variables["reasoning_effort"] = effort
        if preserve is not None:
            variables["preserve_thinking"] = preserve
        chat, shielded, now = self._chat(messages), self._shield.data(list(tools)), datetime.now()
        prompt = rendering = self._template.render(chat, shielded, now=now, **variables)
        state: Literal["open", "shut", "begun", ""] = _thinking_of(prompt)
        begun = written.rstrip()
        if (state == "open" or (not state and dialect.thinks)) and (thinking is False or begun):
            prompt += self.shut if state == "open" else f"{dialect.opens}\n{self.shut}"
            state = "shut"
        if begun:
            prompt += self._shield.text(begun)
            state = "begun" if begun == written else "shut"
        tokens = _listed(self._prompt_tokens(prompt))
        if not kept:
            return Opening(tokens, state)
        marks = find(rendering, lambda *marked: self._template.render(*marked, now=now, **variables), chat, shielded)
        spans = [(0, len(prompt)) if marks is None else marks.around(*of) for of in _in_chat(messages, kept)]
        spans = [(begin, len(prompt) if end == len(rendering) else end) for begin, end in spans]
        found = TokenSpans(self.tokenizer, self.tokenizer.split_special(prompt), self._piece, self._shield.lift)
        n_bos = len(tokens) - found.n
        taken = [found.tokens(begin, end) for begin, end in spans]
        kept_tokens = tuple((begin + n_bos if begin else 0, end + n_bos) for begin, end in taken if begin < end)
        return Opening(tokens, state, kept_tokens)

    @property
    def shut(self) -> str:
        """What shuts reasoning that was broken off, as templates write it."""
        return f"\n{self.dialect.shuts}" + ("" if self.dialect.shuts == "<channel|>" else "\n\n")

    def shutting(self) -> list[int]:
        """The tokens of `shut`."""
        return _listed(self._tokens(self.shut))

    def turns(self, session: Session) -> Iterator[Turn | RequestError]:
        """Each turn of the model in a session, or why the template refuses it."""
        chat, tools = self._chat(session.messages), self._shield.data(list(session.tools))
        now = _time(session.started_at)
        for i, message in enumerate(chat):
            if message["role"] == "assistant":
                try:
                    yield self._turn(chat[:i], message, tools, now)
                except RequestError as error:
                    yield error

    def _turn(self, before: Chat, message: dict[str, Any], tools: list[Any], now: datetime) -> Turn:
        prompt = self._template.render(before, tools, now=now)
        shut = _SHUT_THINK.search(prompt, max(0, len(prompt) - _TAIL))
        if shut:
            message = {k: v for k, v in message.items() if k not in _REASONING_KEYS}
        whole = self._template.render([*before, message], tools, add_generation_prompt=False, now=now)
        answer = self._answer(prompt, whole, message.get("reasoning", ""), shut)
        return Turn(self._prompt_tokens(prompt), self._answer_tokens(answer))

    def _answer(self, prompt: str, whole: str, reasoning: str, shut: re.Match[str] | None) -> str:
        """What of `whole`, the conversation with the answer, the model wrote after `prompt`."""
        opened = _OPEN_THINK.search(prompt, max(0, len(prompt) - _TAIL))
        thinking = opened or shut
        if whole.startswith(prompt):
            answer = whole[len(prompt) :]
        else:
            header = prompt[: thinking.start()] if thinking else prompt
            answer = whole[_common_prefix(header, whole) :]
            if opened and answer.startswith("<think>"):
                answer = answer.removeprefix("<think>")
            elif opened and not answer.startswith("</think>"):
                answer = f"{reasoning}\n</think>\n\n{answer}"
        if reasoning and not thinking and self._template.thinks and reasoning.strip() not in answer:
            answer = f"<think>\n{reasoning}\n</think>\n\n{answer}"
        return answer

    def _prompt_tokens(self, rendering: str) -> Tokens:
        tokens, bos = self._tokens(rendering), self.tokenizer.bos_id
        if self.tokenizer.add_bos and bos is not None and not (len(tokens) and tokens[0] == bos):
            tokens = np.insert(tokens, 0, bos)
        return tokens

    def _answer_tokens(self, answer: str) -> Tokens:
        """The answer up to the token that ends it; EOS, in place of what separates turns, where there is none."""
        tokens = self._tokens(answer)
        ends = np.flatnonzero(np.isin(tokens, list(self.tokenizer.stop_ids)))
        if len(ends):
            return tokens[: ends[0] + 1]
        end = [] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id]
        return np.append(self._tokens(answer.rstrip()), np.array(end, np.int32))

    def _tokens(self, rendering: str) -> Tokens:
        pieces = self.tokenizer.split_special(rendering)
        empty = np.empty(0, np.int32)
        return np.concatenate([empty, *(self._piece(piece) for piece in pieces)], dtype=np.int32)

    def _piece(self, piece: int | str) -> Tokens:
        if isinstance(piece, int):
            return np.array([piece], np.int32)
        tokens = self._remembered.get(piece)
        if tokens is None:
            tokens = np.array(self.tokenizer.encode(self._shield.lift(piece)), np.int32)
            self._remembered_size += len(piece)
            if self._remembered_size > _MOST_REMEMBERED:
                self._remembered.clear()
                self._remembered_size = len(piece)
            self._remembered[piece] = tokens
        return tokens

    def _chat(self, messages: Sequence[Message]) -> Chat:
        """The messages as templates want them, shielded."""
        n_system = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
        chat: Chat = []
        if n_system:
            text = "\n\n".join(m.content for m in messages[:n_system])
            chat.append({"role": "system", "content": self._shield.text(text)})
        called: dict[str, str] = {}  # call id -> tool name
        for message in messages[n_system:]:
            called |= {call.id: call.name for call in message.tool_calls}
            chat.append(self._message(message, called))
        return chat

    def _message(self, message: Message, called: Mapping[str, str]) -> dict[str, Any]:
        content = self._without_thought(message.content) if message.role == "assistant" else message.content
        entry: dict[str, Any] = {
            "role": "user" if message.role == "system" else message.role,
            "content": self._shield.text(content),
        }
        if message.reasoning:
            entry |= dict.fromkeys(_REASONING_KEYS, self._shield.text(message.reasoning))
        if message.tool_calls:
            entry["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.role == "tool":
            entry["tool_call_id"] = self._shield.text(message.tool_call_id)
            entry["name"] = self._shield.text(called.get(message.tool_call_id, ""))
        return entry

    def _without_thought(self, content: str) -> str:
        """A text of the model without the channel of reasoning that a client left in it.

        Gemma 4's template takes it out itself, by names of control tokens: with marks in them it would not find it.
        """
        if "<channel|>" not in content or not self.tokenizer.is_control("<channel|>"):
            return content
        return _CHANNEL.sub("", content).strip() if self.dialect.shuts == "<channel|>" else content

    def _call(self, call: ToolCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": dict(call.arguments)}
        shielded: dict[str, Any] = self._shield.data({"id": call.id, "type": "function", "function": function})
        return shielded


def _listed(tokens: Tokens) -> list[int]:
    values: list[int] = tokens.tolist()
    return values


_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # what templates call it


class _Shield:
    """Puts marks into text so that no name of a control token is left in it, nor comes about at its ends."""

    def __init__(self, names: Sequence[str]) -> None:
        alternatives = "|".join(map(re.escape, names)) or r"(?!)"
        self._name = re.compile(alternatives)
        self._first_letter = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL)
        parts = [(name[:i], name[i:]) for name in names for i in range(1, len(name))]
        # Blanks are left alone: no name begins or ends with them, and templates trim them.
        self._beginnings = {head for head, _ in parts if not head.isspace()}
        self._ends = {tail for _, tail in parts if not tail.isspace()}
        self._longest = max(map(len, names), default=0)

    def text(self, text: str) -> str:
        """`text` with marks."""
        sizes = range(1, min(self._longest, len(text)) + 1)
        before = _BREAK if any(text[:n] in self._ends for n in sizes) else ""
        after = _BREAK if any(text[-n:] in self._beginnings for n in sizes) else ""
        marked = text.replace(_MARK, _MARK_ITSELF)
        if self._name.search(marked):
            marked = self._first_letter.sub(rf"\1{_BREAK}", marked)
        return f"{before}{marked}{after}"

    def data(self, value: Any) -> Any:
        """JSON data with marks in all its strings, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(key): self.data(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.data(item) for item in value]
        return value

    def lift(self, text: str) -> str:
        """Text without the marks."""
        return text.replace(_BREAK, "").replace(_MARK_ITSELF, _MARK)


def _thinking_of(prompt: str) -> Literal["open", "shut", ""]:
    at = max(0, len(prompt) - _TAIL)
    return "open" if _OPEN_THINK.search(prompt, at) else "shut" if _SHUT_THINK.search(prompt, at) else ""


def _in_chat(messages: Sequence[Message], ranges: Sequence[Span]) -> list[Span]:
    """Ranges of messages as those of the chat that is made of them: system messages at the beginning are one there."""
    n_system = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    fewer = max(n_system - 1, 0)
    return [
        (begin if begin < 0 else max(begin - fewer, 0), end if end <= 0 else max(end - fewer, 1))
        for begin, end in ranges
    ]  # fmt: skip


def _common_prefix(a: str, b: str) -> int:
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _time(started_at: str) -> datetime:
    try:
        return datetime.fromisoformat(started_at)
    except ValueError:
        return _UNDATED
