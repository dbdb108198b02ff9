"""Arguments of calls that are made to be: objects, whatever the schema leaves open, by names that are read back."""

from __future__ import annotations

from typing import Any

import pytest

from engine.text.grammar import Vocabulary
from engine.text.tokenizer import load
from tests.text.test_grammar import FORMATS, NANO, calls_of, nonsense


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = load(NANO)
    return Vocabulary(tokenizer, tokenizer.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_arguments_are_an_object_where_the_schema_leaves_it_open(form: str, vocabulary: Vocabulary) -> None:
    place = {"properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["x"]}
    schemas: list[Any] = [{}, None, {"type": ["object", "null"], **place}, place, {"description": "nothing"}]
    if form == "hermes":
        schemas += [{"anyOf": [place, {"type": "string"}]}, {"oneOf": [{"type": "null"}, {"type": "object", **place}]}]
    for parameters in schemas:
        tools = [{"name": "t", "parameters": parameters}]
        for seed in range(3):
            text, reason = nonsense(vocabulary, {"kind": "tool_call", "format": form, "tools": tools}, seed, 400)
            if reason != "length":
                assert all(isinstance(arguments, dict) for _, arguments in calls_of(text, form, tools))


@pytest.mark.parametrize("form", FORMATS)
def test_properties_with_odd_names_are_read_back(form: str, vocabulary: Vocabulary) -> None:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    odd = ("filter[status]", "page{n}", "a,b", "a b", "$top", "x-y.z", "\u00e9", 'say "x" now', "", "null", "7")
    odd = tuple(name for name in odd if name or form != "gemma4")
    named = dict.fromkeys(odd, digit)
    tools = [{"name": "t", "parameters": {"type": "object", "properties": named, "required": list(odd)}}]
    for seed in range(3):
        wanted = {"kind": "tool_call", "format": form, "tools": tools, "parallel": False}
        text, reason = nonsense(vocabulary, wanted, seed, 900)
        if reason != "length":
            ((_, arguments),) = calls_of(text, form, tools)
            assert arguments.keys() == set(odd)
