"""Chat templates against `transformers`' rendering of the same templates, and what the sandbox forbids.

tests/golden holds templates of each family's shape, `features.jinja` with the rest of what templates use, and
`*.txt`: what `transformers` made of them and of one conversation (`python tests/text/test_template.py` writes them).
"""

from __future__ import annotations

import copy
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from engine.ground.errors import ModelFormatError, RequestError
from engine.text import template as module
from engine.text.template import PLAIN, ChatTemplate

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}{% continue %}{%- endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {% generation %}{{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}{% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

HEADERS = """\
{{ bos_token }}
{% for message in messages %}
  {% if loop.index0 > 40 %}{% break %}{% endif %}
  {% set text = message.content | trim %}
<|header|>{{ message['role'] | upper }}<|header_end|>

{{ text }}{{ message.tool_calls | default([]) | map(attribute='function.name') | join(',') }}
  {% for call in message.tool_calls or [] %}
    {% for key, value in call.function.arguments | items %}
{{ key }} = {{ value if value is string else value | tojson(indent=2) }}
    {% endfor %}
  {% endfor %}
<|eot|>
{% endfor %}
{{ tools | default('none', true) | tojson(sort_keys=True) if tools is defined else '' }}
{% if documents %}documents{% endif %}{{ eos_token if not add_generation_prompt }}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads <b>a</b> file & shows 'it' \u00e9\u4e2d",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]
CONVERSATION = [
    {"role": "system", "content": "  You are <helpful> & brief.\n"},
    {"role": "user", "content": "List the files, it's \u00e9t\u00e9 {{ 7 * 7 }} {% raw %}"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "\nhm <tool>\n",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {
                    "name": "read_file",
                    "arguments": {"path": "a'b\"<c>&", "depth": 2, "x": None, "y": [1.5]},
                },
            }
        ],
    },
    {"role": "tool", "content": "a.py\nb.py", "tool_call_id": "call_1", "name": "read_file"},
    {"role": "assistant", "content": "Two files."},
    {"role": "user", "content": ""},
]


def reference(source: str, messages: Any, tools: Any, prompt: bool, **extra: Any) -> str:
    (text,), _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>",
        **extra,
    )  # fmt: skip
    return text


@pytest.mark.parametrize("source", [CHATML, HEADERS, PLAIN], ids=["chatml", "headers", "plain"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("prompt", [False, True], ids=["", "prompt"])
def test_renders_as_transformers(source: str, tools: Any, prompt: bool) -> None:
    template = ChatTemplate(source, "<s>", "</s>")
    for n in range(1, len(CONVERSATION) + 1):
        expected = reference(source, CONVERSATION[:n], tools, prompt)
        assert template.render(CONVERSATION[:n], tools, prompt) == expected
        assert n < 2 or CONVERSATION[1]["content"].strip() in expected  # it rendered something


def test_variables_of_the_template_are_passed_on() -> None:
    template = ChatTemplate(CHATML, "<s>", "</s>")
    expected = reference(CHATML, CONVERSATION, None, True, enable_thinking=False)
    assert template.render(CONVERSATION, enable_thinking=False) == expected
    assert template.render(CONVERSATION) != expected


message_text = st.text(max_size=30) | st.sampled_from(["<|im_end|>", "</think>", " \n ", "{{ 1 }}"])
messages_strategy = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": message_text},
        optional={"reasoning_content": message_text},
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@given(messages_strategy, st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_conversation_renders_as_in_transformers(messages: list[dict[str, Any]], prompt: bool) -> None:
    before = copy.deepcopy(messages)
    assert ChatTemplate(CHATML, "", "").render(messages, None, prompt) == reference(CHATML, messages, None, prompt)
    assert messages == before


# ---- templates of each family's shape ----

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ("qwen35", "laguna", "gemma4")
NOW = datetime(2026, 3, 9, 7, 5)
NESTED = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "What to look for: \u00e9t\u00e9 & <more>", "nullable": True},
        "order": {"type": "string", "enum": ["new", "old"]},
        "where": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}},
            "required": ["path"],
        },
        "tags": {"type": "array", "items": {"type": "object", "properties": {"t": {"type": "string"}}}},
        "sizes": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["query", "where"],
}
SEARCH = {"type": "function", "function": {"name": "search", "description": "Searches.", "parameters": NESTED}}
PLAIN_TOOL = {"type": "function", "function": {"name": "now", "description": ""}}
LONG = [
    *CONVERSATION[:2],
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "\u4e24\u4e2a calls\n",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "now", "arguments": {}}},
            {
                "id": "b",
                "type": "function",
                "function": {
                    "name": "search",
                    "arguments": {"query": "a<b> \U0001f600", "where": {"path": "/", "depth": 3}, "sizes": [1, 2.5],
                                  "all": True, "none": None, "text": "line\nline"},
                },
            },
        ],
    },
    {"role": "tool", "content": "07:05", "tool_call_id": "a", "name": "now"},
    {"role": "tool", "content": "", "tool_call_id": "b", "name": "search"},
    {"role": "assistant", "content": "<think>\nold style\n</think>\n\nNothing there.", "reasoning_content": "hm"},
    {"role": "user", "content": "Then <|im_end|> <turn|> </assistant>?"},
    {"role": "assistant", "content": "", "reasoning_content": "again", "tool_calls": CONVERSATION[2]["tool_calls"]},
    *CONVERSATION[3:4],
]  # fmt: skip


@cache
def golden(name: str) -> str:
    return (GOLDEN / f"{name}.jinja").read_text()


def outcome(render: Callable[..., str], *args: Any, **extra: Any) -> str | None:
    """The text, None where the template fails."""
    try:
        return render(*args, **extra)
    except MemoryError:
        raise
    except Exception:
        return None


def both(source: str, messages: Any, tools: Any = None, prompt: bool = True, **extra: Any) -> tuple[str | None, ...]:
    """What `transformers` and ours make of it."""
    with mock.patch.object(chat_template_utils, "datetime", mock.Mock(now=lambda: NOW)):
        expected = outcome(reference, source, messages, tools, prompt, **extra)
    return expected, ours(source, messages, tools, prompt, **extra)


@cache
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "</s>")


def ours(source: str, messages: Any, tools: Any, prompt: bool, **extra: Any) -> str | None:
    try:
        return compiled(source).render(messages, tools, prompt, now=NOW, **extra)
    except (ModelFormatError, RequestError):
        return None


@pytest.mark.parametrize("name", [*FAMILIES, "features"])
def test_families_render_as_in_transformers(name: str) -> None:
    rendered = 0
    for tools in (None, [SEARCH, PLAIN_TOOL, *TOOLS]):
        for extra in ({}, {"enable_thinking": True}, {"enable_thinking": False, "extra": [1]}):
            for conversation in (LONG, LONG[1:], CONVERSATION):
                for n in range(1, len(conversation) + 1):
                    expected, text = both(golden(name), conversation[:n], tools, n % 2 == 0, **extra)
                    assert text == expected
                    rendered += text is not None
    assert rendered > 100


@pytest.mark.parametrize("name", [*FAMILIES, "features"])
def test_families_render_as_they_did(name: str) -> None:
    assert "".join(both(golden(name), LONG, [SEARCH, PLAIN_TOOL])[1]) == (GOLDEN / f"{name}.txt").read_text()


def test_a_failure_is_a_failure_in_transformers_too() -> None:
    for messages in ([], [{"role": "system", "content": "x"}], [{"role": "user", "content": 5}]):
        assert both(golden("qwen35"), messages) == (None, None)
    assert both(golden("features"), [{"role": "user", "content": "refuse"}]) == (None, None)
    with pytest.raises(RequestError, match=r"Nobody is called nobody"):
        ChatTemplate(golden("qwen35"), "", "").render([*LONG, {"role": "nobody", "content": "x"}])


scalar = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | message_text
arguments = st.dictionaries(
    st.text(max_size=5),
    st.recursive(scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)),
    max_size=3,
)
tool_calls = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from("ab"),
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": st.sampled_from(["now", "f"]), "arguments": arguments}),
        }
    ),
    max_size=2,
)
parts = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": message_text}) | st.just({"type": "image"}), max_size=2
)
any_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": message_text | parts | st.none()},
    optional={
        "reasoning_content": message_text | st.none(),
        "reasoning": message_text,
        "thinking": message_text,
        "tool_calls": tool_calls | st.none(),
        "tool_call_id": st.sampled_from("ab"),
        "name": message_text,
    },
)
any_tools = st.none() | st.lists(st.sampled_from([SEARCH, PLAIN_TOOL, *TOOLS]), min_size=1, max_size=3)
any_conversation = st.lists(any_message, max_size=5).map(
    lambda messages: [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, *messages]
)


@cache
def tokenizer() -> GemmaTokenizer:
    return GemmaTokenizer(bos_token="<s>", eos_token="</s>")


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_families_render_any_conversation_as_in_transformers(data: st.DataObject) -> None:
    source = golden(data.draw(st.sampled_from([*FAMILIES, "features"])))
    messages, tools, prompt = data.draw(any_conversation), data.draw(any_tools), data.draw(st.booleans())
    thinking = data.draw(st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}]))
    before = copy.deepcopy(messages)
    with mock.patch.object(chat_template_utils, "datetime", mock.Mock(now=lambda: NOW)):
        expected = outcome(
            tokenizer().apply_chat_template, messages, tools, chat_template=source, tokenize=False,
            add_generation_prompt=prompt, **thinking,
        )  # fmt: skip
    assert ours(source, messages, tools, prompt, **thinking) == expected
    assert messages == before


expressions = st.recursive(
    st.sampled_from(
        ["messages", "messages[0]", "m", "m.content", "m['role']", "ns.x", "ns", "loop.index0", "loop.last", "missing",
         "tools", "'a b\\n'", "'<'", "1", "0", "[1, 'b']", "{'k': m}", "none", "true", "bos_token", "caller", "f"]
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(
            ["|tojson", "|length", "|trim", "|upper", "|items|list", "|list", "|string", "|default('d', true)",
             "|first", "|join(',')", "|dictsort", "|tojson(indent=1)", ".strip()", ".split()", ".items()",
             ".get('role')", "[::-1]", "[1:]", "[0]", ".append(1)", ".__class__", " is string", " is mapping",
             " is defined", "|map('string')|join", "|attr('role')", ".startswith('a')", "|replace('a', 'b')", "|int",
             "|sort"]
        )).map("".join),
        st.tuples(inner, st.sampled_from([" + ", " ~ ", " in ", " == ", " and ", " or ", " * ", " % ", " < "]), inner)
        .map(lambda x: f"({''.join(x)})"),
        st.tuples(inner, inner, inner).map(lambda x: f"({x[0]} if {x[1]} else {x[2]})"),
    ),
    max_leaves=4,
)  # fmt: skip
statements = st.recursive(
    expressions.map(lambda e: f"{{{{ {e} }}}}")
    | expressions.map(lambda e: f"{{%- set ns.x = {e} -%}}\n")
    | expressions.map(lambda e: f"{{% set m = {e} %}}\n")
    | st.sampled_from(["text\n", "  ", "{# c #}\n", "{%- break %}", "{% continue -%} ", "{{- f(1) -}}", "\n\n"]),
    lambda inner: st.one_of(
        st.tuples(expressions, inner).map(lambda x: f"  {{% if {x[0]} %}}\n{x[1]}{{% else %}}e{{% endif %}}\n"),
        st.tuples(expressions, inner).map(lambda x: f"{{%- for m in {x[0]} %}}{x[1]}{{% else %}}none{{% endfor %}}"),
        st.tuples(expressions, inner).map(lambda x: f"{{% macro f(a, m={x[0]}) %}}{x[1]}{{{{ a }}}}{{% endmacro %}}"),
        inner.map(lambda x: f"{{% generation %}}{x}{{% endgeneration %}}"),
        inner.map(lambda x: f"{{% call f(2) %}}{x}{{% endcall %}}"),
        inner.map(lambda x: f"{{% set m %}}{x}{{% endset %}}"),
        st.tuples(inner, inner).map("".join),
    ),
    max_leaves=6,
)


@contextmanager
def memory_within(n_bytes: int) -> Iterator[None]:
    """MemoryError for what would take more than so much: a few loops around a `~` double a text again and again."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@given(st.lists(statements, min_size=1, max_size=3))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_template_renders_as_in_transformers(parts: list[str]) -> None:
    source = (
        "{% set ns = namespace(x=1) %}{% macro f(a) %}[{{ a }}{{ varargs }}]{% endmacro %}"
        + "{% for m in messages %}" + "".join(parts) + "{% endfor %}"
    )  # fmt: skip
    try:
        with memory_within(1 << 29):
            expected, text = both(source, LONG[:3], TOOLS)
    except MemoryError:
        assume(False)
    if " at 0x" not in (expected or ""):  # an address
        assert text == expected


def test_tools_have_their_own_template_where_the_model_has_one() -> None:
    template = ChatTemplate("plain", "", "", "with {{ tools | length }} tools </think>")
    assert template.render(CONVERSATION) == template.render(CONVERSATION, []) == "plain"
    assert template.render(CONVERSATION, TOOLS) == "with 1 tools </think>"
    assert template.thinks and not ChatTemplate("plain", "", "").thinks


def test_the_present_can_be_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", "", "")
    assert template.render([], now=datetime(2024, 7, 26)) == "26 Jul 2024"
    assert template.render([]) == datetime.now().strftime("%d %b %Y")


def test_generation_blocks_have_a_scope_of_their_own() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(source, "", "").render([]) == reference(source, [], None, True) == "21"


def test_generation_blocks_hide_what_a_macro_was_called_with() -> None:
    source = (
        "{% macro f(a) %}{% generation %}{{ a }}{{ varargs }}{{ caller is defined }}{% endgeneration %}{% endmacro %}"
    )
    assert ChatTemplate(source + "{{ f(1, 2) }}", "", "").render([]) == reference(
        source + "{{ f(1, 2) }}", [], None, True
    )


def test_reasoning_has_the_names_that_templates_know() -> None:
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}{{ 'content' in messages[0] }}"
    for name in ("reasoning_content", "thinking", "reasoning"):
        message = {"role": "assistant", "content": None, name: "why"}
        expected = tokenizer().apply_chat_template([message], chat_template=source, tokenize=False)
        assert ChatTemplate(source, "", "").render([message]) == expected == "whywhyFalse"


def test_hash_is_of_everything_that_shapes_a_rendering() -> None:
    base = ("a", "", "", None)
    others = [("b", *base[1:]), ("a", "x", "", None), ("a", "", "x", None), ("a", "", "", "x")]
    assert len({ChatTemplate(*parts).hash for parts in [base, *others]}) == 5
    assert ChatTemplate("a", "b", "c").hash == ChatTemplate("a", "b", "c").hash


# ---- errors ----


@pytest.mark.parametrize("source", ["a\n{% if %}", "a\n{{ 1 +", "a\n{% nonsense %}", "a\n{{ x | no_such_filter }}"])
def test_a_template_that_does_not_compile_names_the_line(source: str) -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.chat_template, line 2: \w+"):
        ChatTemplate(source, "", "")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this conversation: roles must alternate"),
        ("{{ messages[9].content }}", "fails on this conversation: UndefinedError"),
        ("{{ messages[0].content + 1 }}", "fails on this conversation: TypeError"),
        ("{{ 1 / 0 }}", "fails on this conversation: ZeroDivisionError"),
        ("{{ undefined_thing | tojson }}", "fails on this conversation: TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on this conversation: RecursionError"),
        ("{% for i in range(10 ** 7) %}{% endfor %}", "fails on this conversation: OverflowError"),
        ("{{ 'abc'.index('z') }}", "fails on this conversation: ValueError"),
        ("{% include 'other' %}", "fails on this conversation"),
        ("{% import '/etc/passwd' as x %}", "fails on this conversation"),
        ("{% extends 'other' %}", "fails on this conversation"),
        ("{{ cycler() }}", "fails on this conversation: RuntimeError"),
    ],
)
def test_a_template_that_fails_is_a_request_error(source: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ChatTemplate(source, "", "").render(CONVERSATION)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__self__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ dict.update(messages[0], {'role': 'system'}) }}",
        "{{ dict.fromkeys.__self__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}{{ 1 }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_the_sandbox_forbids(source: str) -> None:
    """Forbidden attributes are undefined in the sandbox (an error once used) or a security error."""
    messages = copy.deepcopy(CONVERSATION)
    with pytest.raises((ModelFormatError, RequestError), match=r"not allowed|UndefinedError|SecurityError") as caught:
        ChatTemplate(f"{source}{{{{ missing.attribute }}}}", "", "").render(messages)
    if "missing" in caught.value.message:  # it came through: then nothing of Python's may have been shown
        text = ChatTemplate(source, "", "").render(messages)
        assert text == "", text
    assert messages == CONVERSATION


@pytest.mark.parametrize(
    "source",
    ["{% break %}", "{% for x in [1] %}{% generation %}{% continue %}{% endgeneration %}{% endfor %}",
     "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{{ " + "9" * 6000 + " }}",
     "{% for a in b %}" * 25 + "{% endfor %}" * 25],
    ids=["break", "continue", "parentheses", "digits", "blocks"],
)  # fmt: skip
def test_what_python_cannot_compile_is_explained(source: str) -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.chat_template: \w+Error"):
        ChatTemplate(source, "", "")


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHARACTERS", 50_000)
    source = "{% for i in range(1000) %}{% for j in range(1000) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    with pytest.raises(ModelFormatError, match="more than 50000 characters"):
        ChatTemplate(source, "", "").render([])
    assert len(ChatTemplate("{{ 'ab' * 1000 }}", "", "").render([])) == 2000


@given(st.text(alphabet=st.sampled_from("{}%#-'\" \nabif endfor.|()[]0"), max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_source_compiles_or_is_explained(source: str) -> None:
    try:
        text = ChatTemplate(source, "", "").render(CONVERSATION)
    except (ModelFormatError, RequestError) as error:
        assert error.message.startswith(("tokenizer.chat_template", "the model's chat template"))
    else:
        assert isinstance(text, str)


if __name__ == "__main__":
    for name in (*FAMILIES, "features"):
        (GOLDEN / f"{name}.txt").write_text(both(golden(name), LONG, [SEARCH, PLAIN_TOOL])[0] or "")
