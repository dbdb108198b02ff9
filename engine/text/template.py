"""Chat templates: the Jinja programs inside model files that turn a conversation into the text of a prompt.

A template comes with a model, from whoever made the file, so it runs in Jinja's immutable sandbox: it sees plain
data and cannot reach Python's internals, change its arguments or write endlessly. It gets what `transformers` gives
chat templates: `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, `break` and `continue`, and
the `generation` tag, which marks the model's own words there and is passed through here. Messages are prepared as
there, too: fields without a value are left out, and reasoning gets the names that templates know it by.

The sandbox bounds what a template can reach (no file, no module, nothing of Python's internals), how much it writes and
how large a product or a power it makes; not how long it computes, nor all the memory that it takes on the way.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.ground.errors import ModelFormatError, RequestError

# For models that have no template: names of speakers, plain text, the end token after the model's turns.
PLAIN = """\
{% if tools %}Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}

{% endif %}
{% for message in messages %}
{{ message.role | capitalize }}:
{% if message.reasoning_content %}{{ message.reasoning_content }}

{% endif %}
{{ message.content }}
{%- for call in message.tool_calls or [] %}

{{ call.function | tojson }}
{%- endfor %}
{%- if message.role == "assistant" %}{{ eos_token }}{% endif %}


{% endfor %}
{% if add_generation_prompt %}Assistant:
{% endif %}"""

MAX_CHARACTERS = 1 << 28  # of a rendering; many times any model's context
_MAX_REPEAT = 1 << 20  # characters or items that `*` may make of a string or a list
_MAX_BITS = 1 << 12  # of a power
# In JSON: of one of the noncharacters with which callers mark data (U+FDD0 to U+FDEF), or any other.
_ESCAPE = re.compile(r"\\(?:u(fd[de][0-9a-f])|.)")
# What a program that meets data it did not foresee can end with.
_FAILURES = (
    jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NameError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


class ChatTemplate:
    """A compiled chat template.

    source: the template. bos, eos: text of these tokens, which templates refer to (empty if the model has none).
    tool_source: another template for conversations with tools, which some models have. hash: SHA-256 of the sources,
    64 hex digits. thinks: it knows reasoning between `<think>` and `</think>`. Raises ModelFormatError for a template
    that cannot be compiled, naming the line.
    """

    def __init__(self, source: str, bos: str, eos: str, tool_source: str | None = None) -> None:
        self._variables = {"bos_token": bos, "eos_token": eos}
        self._plain = _compile(source)
        self._with_tools = _compile(tool_source) if tool_source is not None else self._plain
        self.thinks = "</think>" in source + (tool_source or "")
        self.hash = hashlib.sha256(json.dumps(["spark template 1", source, tool_source, bos, eos]).encode()).hexdigest()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        now: datetime | None = None,
        **extra: Any,
    ) -> str:
        """The text of a conversation.

        messages, tools: plain JSON data in the shape of the chat-completions API; no tools are the same as None.
        add_generation_prompt: end with the beginning of the model's turn. now: what the template takes for the
        present. extra: the template's own variables, such as `enable_thinking`. Raises RequestError for a conversation
        that the template refuses or fails on, ModelFormatError for one that does what the sandbox forbids.
        """
        template = self._with_tools if tools else self._plain
        variables = {
            "documents": None,
            **self._variables,
            **extra,
            "messages": [_prepared(message) for message in messages],
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": (now or datetime.now()).strftime,
        }
        pieces, size = [], 0
        try:
            for piece in template.generate(variables):
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise SecurityError(f"it wrote more than {MAX_CHARACTERS} characters")
                pieces.append(piece)
        except SecurityError as error:
            raise ModelFormatError(f"tokenizer.chat_template: not allowed: {error}") from error
        except _Refusal as error:
            raise RequestError(f"the model's chat template refuses this conversation: {error}") from error
        except _FAILURES as error:
            raise RequestError(
                f"the model's chat template fails on this conversation: {type(error).__name__}: {error}"
            ) from error
        return "".join(pieces)


class _Refusal(jinja2.TemplateError):
    """What `raise_exception` raises."""


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse products that would take all memory."""
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                repeats = isinstance(items, str | list | tuple) and isinstance(times, int)
                if repeats and len(items) * times > _MAX_REPEAT:
                    raise SecurityError(f"a repetition of {len(items)} items, {times} times")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:
            raise SecurityError(f"the number {left} to the power of {right}")
        return super().call_binop(context, operator, left, right)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without names that begin with an underscore: Python's internals have such."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` may be among the values
        for name in dict(*args[1:], **values):
            _check_name(name)
        jinja2.utils.Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name {name!r} in a namespace")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: renders what is inside.

    As a call block, as in `transformers`: the body has a scope of its own, without the `varargs` and the `caller` of a
    macro around it.
    """

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """Make the body a call block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render"), [], [], body, lineno=line)

    def render(self, caller: Callable[[], str]) -> str:
        """What the call block calls."""
        return caller()


def _compile(source: str) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "namespace": _Namespace, "dict": _Dict()}
    hint = "the file's chat template is damaged or not a Jinja template: get a corrected conversion of the model"
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelFormatError(f"tokenizer.chat_template, line {error.lineno}: {error.message}", hint=hint) from error
    except (SyntaxError, *_FAILURES) as error:  # Python's own: `break` outside a loop, too many nested blocks
        raise ModelFormatError(f"tokenizer.chat_template: {type(error).__name__}: {error}", hint=hint) from error


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


class _Dict:
    """`dict` without its class, whose unbound methods would change the template's arguments."""

    def __call__(self, /, *items: Any, **values: Any) -> dict[Any, Any]:
        return dict(*items, **values)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """A dictionary with the same value under each key."""
        return dict.fromkeys(keys, value)


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the fields that are None, and with its reasoning where templates look for it."""
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[key] for key in ("reasoning_content", "thinking", "reasoning") if key in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPE.sub(_unmarked, text) if ensure_ascii and "\\ufd" in text else text


def _unmarked(escape: re.Match[str]) -> str:
    """The noncharacter that an escape stands for, or the escape itself, where it is another."""
    return chr(int(escape[1], 16)) if escape[1] else escape[0]
