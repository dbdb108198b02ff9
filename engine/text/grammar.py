"""Constrained decoding: which tokens may come next, so that a reply has the form that its request asks for.

A request says in JSON what it wants (docs/protocol.md, "Grammars"); engine/text/grammar_rules.py makes one context-free
grammar of it. llguidance parses what the model writes and walks a trie of the vocabulary's bytes for each mask. Control
tokens are no text: a grammar names them by their id, and nothing else allows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from engine.ground import checks
from engine.ground.errors import RequestError
from engine.ground.protocol import MAX_TEXT_CHARS
from engine.text.grammar_rules import Format, Rules, Schema, Tool, calls
from engine.text.tokenizer import Tokenizer

MAX_TOOLS = 1024
MAX_PROPERTIES = 2048  # of one object: the library's work grows with their square
MAX_PATTERNS_OF_ONE = 8  # that one string has to match, all of them
MAX_PATTERNS = 1024  # of a schema
MAX_NODES = 65536  # objects, lists and values of a schema
_AFTER_REASONING = "/[ \\n]{1,4}/?"
_LIMITS = LLParserLimits(verbose_errors=False)  # the library's own; a message does not quote a reply


# --- what a request asks for ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _JsonObject:
    after: str | None = None
    opens: str | None = None
    binds: bool = True


@dataclass(frozen=True, slots=True)
class _JsonSchema:
    schema: Schema
    after: str | None = None
    opens: str | None = None
    binds: bool = True


@dataclass(frozen=True, slots=True)
class _ToolCall:
    format: Format
    tools: tuple[Tool, ...]
    name: str | None = None
    parallel: bool = True
    after: str | None = None
    opens: str | None = None
    binds: bool = True


_Wanted: TypeAlias = _JsonObject | _JsonSchema | _ToolCall


def _schema(name: str, value: Any) -> Schema:
    if not isinstance(value, dict | bool):
        raise checks.refusal(name, "a JSON schema", value)
    return value


def _words(name: str, value: Any) -> str:
    if type(value) is not str or not 0 < len(value) <= MAX_TEXT_CHARS:
        raise checks.refusal(name, f"a string of 1 to {MAX_TEXT_CHARS} characters", value)
    return value


_COMMON = {"after": checks.optional(_words), "opens": checks.optional(_words), "binds": checks.boolean}
_TOOL = checks.record(Tool, {"name": _words, "parameters": checks.optional(_schema)})
_KINDS = {
    "json_object": checks.record(_JsonObject, _COMMON),
    "json_schema": checks.record(_JsonSchema, {"schema": _schema, **_COMMON}),
    "tool_call": checks.record(
        _ToolCall,
        {
            "format": checks.choice("hermes", "xml", "laguna", "gemma4"),
            "tools": checks.items(_TOOL, MAX_TOOLS, shortest=1),
            "name": checks.optional(_words),
            "parallel": checks.boolean,
            **_COMMON,
        },
    ),
}


def check(text: str) -> tuple[str, bool]:
    """What a request wants, in JSON text that is the same for the same form, and whether it binds the reply.

    Raises RequestError, which names what it is, for what is malformed or too large to be compiled.
    """
    wanted, given = _parse(text)
    for tool in wanted.tools if isinstance(wanted, _ToolCall) else ():
        _bound(tool.parameters, f" of tool {tool.name!r}")
    if isinstance(wanted, _JsonSchema):
        _bound(wanted.schema, "")
    return json.dumps({name: value for name, value in given.items() if name != "binds"}), wanted.binds


def _bound(schema: Any, whose: str) -> None:
    """Refuse what nobody needs and the library takes minutes for."""
    left, nodes, patterns = [schema], 0, 0
    while left:
        node = left.pop()
        nodes += 1
        if isinstance(node, dict):
            left += node.values()
            patterns += isinstance(node.get("pattern"), str)
            named, members = node.get("properties"), node.get("allOf")
            n = len(named) if isinstance(named, dict) else 0
            _most(n, MAX_PROPERTIES, "properties in one object", whose)
            _most(_patterns(members), MAX_PATTERNS_OF_ONE, "patterns in one 'allOf'", whose)
        elif isinstance(node, list):
            left += node
        _most(nodes + len(left), MAX_NODES, "values", whose)
        _most(patterns, MAX_PATTERNS, "patterns", whose)


def _patterns(members: Any) -> int:
    found = members if isinstance(members, list) else []
    return sum(isinstance(member, dict) and "pattern" in member for member in found)


def _most(found: int, limit: int, what: str, whose: str) -> None:
    if found > limit:
        raise RequestError(f"field 'grammar': the schema{whose} has more than {limit} {what} ({found} found)")


def _parse(text: str) -> tuple[_Wanted, dict[str, Any]]:
    try:
        given = checks.mapping("grammar", json.loads(text))
        json.dumps(given)  # as deep as it may be written again
    except RecursionError:
        raise RequestError("field 'grammar': JSON nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"field 'grammar': not JSON: {error}") from None
    fields = {name: value for name, value in given.items() if name != "kind"}
    kind = checks.choice(*_KINDS)("grammar.kind", given.get("kind"))
    wanted: _Wanted = _KINDS[kind]("grammar", fields)
    if wanted.opens is not None and wanted.after is None:
        raise RequestError("field 'grammar.opens': what opens must be shut, and 'grammar.after' is missing")
    if isinstance(wanted, _ToolCall):
        names = [tool.name for tool in wanted.tools]
        if len(set(names)) < len(names):
            raise RequestError("field 'grammar.tools': two tools have the same name")
        if wanted.name is not None and wanted.name not in names:
            raise RequestError(f"field 'grammar.name': {wanted.name!r} is none of the tools")
    return wanted, given


def _rules(wanted: _Wanted, tokenizer: Tokenizer) -> Rules:
    rules = Rules(tokenizer)
    if isinstance(wanted, _ToolCall):
        tools = [tool for tool in wanted.tools if wanted.name in (None, tool.name)]
        body = calls(rules, wanted.format, tools, wanted.parallel)
    else:
        schema = wanted.schema if isinstance(wanted, _JsonSchema) else {"type": "object"}
        rules.check_ends(schema)
        body = rules.json(schema)
    if wanted.after is not None:
        reasoning = f"{rules.until(wanted.after)} {_AFTER_REASONING}"
        body = f"{reasoning} {body}" if wanted.opens is None else f"({rules.marks(wanted.opens)} {reasoning})? {body}"
    rules.add(body, "start")
    return rules


# --- masks -------------------------------------------------------------------------------------------


class _Tokens:
    """Tokens and their bytes, in the form that llguidance takes; called, it encodes text that must come."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        control = {i: name for name, i in tokenizer.special_ids.items() if tokenizer.is_control(name)}
        known = min(n_vocab, tokenizer.vocab_size)
        self.tokens = [tokenizer.decode_bytes([i]) for i in range(known)] + [b""] * (n_vocab - known)
        for i, name in control.items():
            self.tokens[i] = b"\xff" + name.encode()  # no text has this byte
        # Which tokens end a reply is a matter of each request; the library gets one of its own for it.
        self.tokens.append(b"\xff<end>")
        self.eos_token_id = n_vocab
        self.special_token_ids = [*control, n_vocab]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace"))


class Vocabulary:
    """A model's tokens as grammars need them; takes a while to make, and serves all requests.

    tokenizer: the model's own. n_vocab: the number of its logits; those beyond the tokenizer's vocabulary are no token.
    """

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self.tokenizer = tokenizer
        self.n_vocab = n_vocab
        wrapper = TokenizerWrapper(_Tokens(tokenizer, n_vocab))
        self.trie = LLTokenizer(wrapper)
        wrapper.tokens = wrapper._gtokenizer.tokens = ()  # the trie has copies


class Compiled:
    """A form that replies can have; made by `from_text`, which may take any time and memory: engine/text/forms.py."""

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self._matcher, self._n_vocab = matcher, n_vocab

    @classmethod
    def from_text(cls, text: str, vocabulary: Vocabulary) -> Compiled:
        """The form that JSON text describes.

        Raises RequestError, which names what it is, for a grammar that is malformed and for a schema that cannot be
        enforced.
        """
        try:
            wanted, _ = _parse(text)
            rules = _rules(wanted, vocabulary.tokenizer)
            str(rules).encode()
        except UnicodeEncodeError:
            raise RequestError("field 'grammar': half of a surrogate pair is no character") from None
        except RecursionError:
            raise RequestError("field 'grammar': a schema that is nested too deeply, or refers to itself") from None
        matcher = LLMatcher(vocabulary.trie, LLMatcher.grammar_from_lark(str(rules)), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            reason = matcher.get_error()
            found = re.match(r"at (\d+)\(\d+\): ", reason)
            if found is not None:
                rules.tool = rules.owner(int(found[1]))
                reason = reason[found.end() :]
            raise rules.refusal(_one_line(reason))
        return cls(matcher, vocabulary.n_vocab)

    def begin(self, stop: Collection[int]) -> Grammar:
        """The state of a reply that has the form, before its first token; the tokens of `stop` end it."""
        return Grammar(self._matcher.deep_copy(), self._n_vocab, stop)


class Grammar:
    """What one reply may still be; made by `Compiled.begin`.

    is_done: nothing can follow any more.
    """

    def __init__(self, matcher: LLMatcher, n_vocab: int, stop: Collection[int]) -> None:
        self._matcher, self._n_vocab = matcher, n_vocab
        self._stop = np.array(sorted(token for token in stop if token < n_vocab), np.int64)
        self.is_done = matcher.is_stopped()

    def mask(self) -> NDArray[np.uint32]:
        """The tokens that may come next: a bit for each, uint32 [ceil(V / 32)], as `sample` takes them.

        Stop tokens are among them exactly where the reply is complete. All are 0 where it is, nothing can follow and
        there are no stop tokens: `is_done`.
        """
        n, matcher = self._n_vocab, self._matcher
        complete = matcher.is_accepting()
        words = np.zeros(-(-n // 32), np.uint32)
        if not matcher.is_stopped():
            found = np.frombuffer(matcher.compute_bitmask(), np.uint32)
            words[:] = found[: len(words)]
        self._check()
        if n % 32:
            words[-1] &= np.uint32((1 << n % 32) - 1)
        index, bits = self._stop // 32, np.uint32(1) << (self._stop % 32).astype(np.uint32)
        np.bitwise_and.at(words, index, ~bits)
        if not words.any():
            if not complete:
                raise RequestError("the grammar asks for text that the model's tokens cannot write")
            self.is_done = True
        if complete:
            np.bitwise_or.at(words, index, bits)
        return words

    def accept(self, token: int) -> None:
        """Go past a token that the last mask allowed, no stop token."""
        self._matcher.consume_token(token)
        self._check()
        self.is_done = self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the grammar took more work than a token may: {_one_line(self._matcher.get_error())}")


_TOO_LARGE = "with its options and references written out it is too large; name fewer options and properties"
_SENTENCES = {  # of what the library says in words of its own
    "oneOf constraints are not supported": "the options of a 'oneOf' are not known to exclude each other; let each "
    "require another constant of one property, or write 'anyOf'",
    "schema too large": _TOO_LARGE,
    "assertion failed: grammar.symbols.len()": _TOO_LARGE,
}


def _one_line(reason: str) -> str:
    """What the library complains of, without the grammar that it quotes."""
    for words, sentence in _SENTENCES.items():
        if words in reason:
            return sentence
    reason = re.split(r"\n +\d+ \| ", reason)[0].removeprefix("failed to compile JSON schema: ")
    return " ".join(reason.split())[:500]
