"""Which tokens of a prompt a message took: all that it says is among them, and nothing of who is no neighbor."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.template import PLAIN, ChatTemplate
from engine.text.tokenizer import Tokenizer, load
from spark.speech.render import Renderer
from spark.speech.sessions import Message, ToolCall
from spark.speech.spans import Marks

ROOT = Path(__file__).parents[2]
LOOKS = """\
{%- for message in messages -%}
[{{ message.role }}]{{ "!" if message.content.startswith("<") }}{{ message.content }}
{%- endfor -%}"""
COUNTS = "{% for message in messages %}[{{ message.content | length }}]{{ message.content }}{% endfor %}"
SWAPS = """\
{%- for message in messages[1:] -%}[{{ message.role }}]{{ message.content }}{%- endfor -%}
{{- messages[0].content -}}"""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "tool", "description": "does toolish things", "parameters": {
        "type": "object", "properties": {"way": {"type": "string", "description": "which toolish way"}},
    }},
}  # fmt: skip


def source(name: str) -> str:
    """A template by its name."""
    known = {"plain": PLAIN, "looks": LOOKS, "counts": COUNTS, "swaps": SWAPS}
    nano, golden = ROOT / "data/nano/template.jinja", ROOT / "tests/golden" / f"{name}.jinja"
    return known.get(name) or (nano if name == "nano" else golden).read_text()


@cache
def renderer(name: str) -> Renderer:
    tokenizer = load(ROOT / "data/nano/nano.gguf")
    tokenizer.template = ChatTemplate(source(name), "", "<|im_end|>")
    return Renderer(tokenizer)


def words(i: int, what: str) -> str:
    """Words that no other text has."""
    return f"{what}{i}a {what}{i}b"


def conversation(kinds: str, tails: str) -> list[Message]:
    """Messages by letters, each with words of its own; `tails` stands around them."""
    made = []
    for i, kind in enumerate(kinds):
        text = f"{tails}{words(i, 'word')}{tails}"
        if kind == "u":
            made.append(Message("user", text))
        elif kind == "t":
            made.append(Message("tool", text, tool_call_id=f"c{i - 1}"))
        elif kind == "e":
            made.append(Message("assistant", ""))
        else:
            calls = (ToolCall(f"c{i}", "tool", {"way": words(i, "way"), "n": i}),) if kind == "c" else ()
            made.append(Message("assistant", text, words(i, "thought") if kind == "r" else "", calls))
    return made


def said(tokenizer: Tokenizer, tokens: list[int], span: tuple[int, int]) -> str:
    return tokenizer.decode(tokens[slice(*span)])


TAILS = ["", " ", "\n\n", "<tool_response>", "</think>", "é\u2581", "\ufdd0", "<|im_end|>", "\ud83d"]


@pytest.mark.parametrize("name", ["nano", "qwen35", "laguna", "gemma4", "plain", "looks"])
@settings(max_examples=25)
@given(st.text("uctre", min_size=1, max_size=6), st.sampled_from(TAILS), st.booleans(), st.booleans())
def test_all_that_a_message_says_is_in_its_tokens(
    name: str, kinds: str, tails: str, with_system: bool, with_tools: bool
) -> None:
    ours = renderer(name)
    messages = [Message("system", "systemic words")] * with_system + conversation("u" + kinds, tails)
    tools = [TOOL] * with_tools
    kept = [(i, i + 1) for i in range(len(messages))]
    found = ours.opening(messages, tools, kept=[*kept, (-1, with_system)])
    assert found.tokens == ours.opening(messages, tools).tokens and len(found.kept) == len(kept) + 1
    whole = said(ours.tokenizer, found.tokens, (0, len(found.tokens)))
    texts = [said(ours.tokenizer, found.tokens, span) for span in found.kept]
    for i, text in enumerate(texts[:-1]):
        own = [words(i - with_system, what) for what in ("word", "way", "thought")]
        assert all((word in whole) == (word in text) for word in own)
    begin = found.kept[-1][0]
    assert begin == 0 and all(word not in whole[len(texts[-1]) :] for word in ("systemic words", "toolish way"))
    assert max(end for _, end in found.kept) == len(found.tokens)


@pytest.mark.parametrize("name", ["nano", "qwen35", "laguna", "gemma4", "plain"])
def test_others_are_not(name: str) -> None:
    """But for what is next to it, a header and a piece of a word. Gemma's results stand within the call's message."""
    ours = renderer(name)
    messages = [Message("system", "systemic"), *conversation("uruu" if name == "gemma4" else "uructtu", "")]
    found = ours.opening(messages, [TOOL], kept=[(i, i + 1) for i in range(len(messages))])
    for i, span in enumerate(found.kept):
        others = [words(k, "word") for k in range(len(messages) - 1) if k != i - 1]
        text = said(ours.tokenizer, found.tokens, span)
        assert not any(word in text for word in others)
        assert i == 0 or "toolish way" not in text
    assert sum(end - begin for begin, end in found.kept) < 3 * len(found.tokens)


def test_a_template_that_looks_at_both_ends_and_the_middle_keeps_all() -> None:
    ours = renderer("counts")
    found = ours.opening(conversation("uau", ""), kept=[(1, 2)])
    assert found.kept == ((0, len(found.tokens)),)


def test_a_template_may_put_messages_elsewhere() -> None:
    ours = renderer("swaps")
    found = ours.opening(conversation("uau", ""), kept=[(0, 1), (1, 2), (0, 2)])
    first, second, both = (said(ours.tokenizer, found.tokens, span) for span in found.kept)
    assert words(0, "word") in first and words(1, "word") not in first
    assert words(1, "word") in second and words(0, "word") not in second
    assert all(words(i, "word") in both for i in range(2))


def test_the_last_one_goes_on_to_the_reply() -> None:
    ours = renderer("nano")
    messages = conversation("uu", "")
    for written in ("", "it begins so"):
        found = ours.opening(messages, written=written, thinking=False, kept=[(1, 2), (2, 3)])
        assert [end for _, end in found.kept] == [len(found.tokens)] * 2
        assert "it begins so"[: len(written)] in said(ours.tokenizer, found.tokens, found.kept[1])


def test_what_has_no_mark_lies_between_its_neighbors() -> None:
    marks = Marks([0, 0, 2, 2, 3], [5, 9, 20, 28, 40], 50)
    assert marks.around(1, 2) == (9, 20) and marks.around(0, 1) == (0, 20) and marks.around(2, 3) == (9, 40)
    assert marks.around(3, 4) == (28, 50) and marks.around(4, 5) == (40, 50) and marks.around(0, 3) == (0, 40)
    assert marks.around(-1, 0) == (0, 5) and Marks([], [], 7).around(1, 2) == (0, 7)
