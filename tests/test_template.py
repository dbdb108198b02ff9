"""Chat templates against `transformers`' rendering of the same templates, and what the sandbox forbids."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from engine import template as module
from engine.errors import ModelFormatError, RequestError
from engine.template import PLAIN, ChatTemplate

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


@given(messages_strategy, st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_conversation_renders_as_in_transformers(messages: list[dict[str, Any]], prompt: bool) -> None:
    before = copy.deepcopy(messages)
    assert ChatTemplate(CHATML, "", "").render(messages, None, prompt) == reference(CHATML, messages, None, prompt)
    assert messages == before


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
