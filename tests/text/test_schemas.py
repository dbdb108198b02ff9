"""Schemas that say nothing of other properties allow none: of the merged object, whatever it is put together of.

The oracle is jsonschema, which is told the same by `unevaluatedProperties`.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from engine.ground.errors import RequestError
from engine.text.grammar import Compiled, Vocabulary
from engine.text.schemas import closed
from engine.text.tokenizer import load

NANO = Path(__file__).parents[2] / "data" / "nano" / "nano.gguf"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = load(NANO)
    return Vocabulary(tokenizer, tokenizer.vocab_size)


class Judge:
    """Says what a form accepts."""

    def __init__(self, wanted: dict[str, Any], vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.form = Compiled.from_text(json.dumps(wanted), vocabulary)

    def accepts(self, text: str) -> bool:
        state = self.form.begin(self.vocabulary.tokenizer.stop_ids)
        for token in self.vocabulary.tokenizer.encode(text, parse_special=True):
            if state.is_done or not np.unpackbits(state.mask().view(np.uint8), bitorder="little")[token]:
                return False
            state.accept(token)
        if state.is_done:
            return True
        mask = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
        return any(mask[token] for token in self.vocabulary.tokenizer.stop_ids)

    def accepts_object(self, value: dict[str, Any]) -> bool:
        """In whatever order the form wants its properties."""
        orders = itertools.permutations(value.items())
        return any(self.accepts(json.dumps(dict(order), separators=(",", ":"))) for order in orders)


A, B, C = ({"properties": {name: {"type": "integer"}}} for name in "abc")
DEFS = {"$defs": {"a": {"type": "object", **A, "required": ["a"]}, "b": B}}
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}, "required": ["v"]}
TABLE: list[tuple[Any, list[Any], list[Any]]] = [
    ({**A, "type": "object"}, [{}, {"a": 1}], [{"b": 1}, {"a": "x"}]),
    ({**A, "type": "object", "additionalProperties": True}, [{"b": 1}], [{"a": "x"}]),
    ({**A, "type": "object", "additionalProperties": {"type": "string"}}, [{"a": 1, "b": "x"}], [{"b": 1}]),
    ({"type": "object"}, [{"b": [1]}, {}], []),
    ({"type": "object", "properties": {}}, [{}], [{"b": 1}]),
    ({"type": "object", "allOf": [A, B]}, [{"a": 1, "b": 2}, {"b": 2}, {}], [{"c": 1}, {"a": "x", "b": 2}]),
    ({"type": "object", "allOf": [{**A, "required": ["b"]}, B]}, [{"a": 1, "b": 2}, {"b": 2}], [{"a": 1}, {"b": "x"}]),
    ({"type": "object", **A, "allOf": [{"required": ["z"]}]}, [{"z": "x"}, {"a": 1, "z": []}],
     [{"a": 1}, {"y": 1, "z": 1}]),
    ({"type": "object", "allOf": [A, {"properties": {"a": {"minimum": 5}}}]}, [{"a": 7}], [{"a": 1}, {"b": 1}]),
    ({"type": "object", "allOf": [A, {**B, "additionalProperties": True}]}, [{"c": "x"}], [{"a": "x"}]),
    ({"type": "object", "allOf": [A, {"anyOf": [B, C]}]}, [{"a": 1, "b": 1}, {"a": 1, "c": 1}],
     [{"b": 1, "c": 1}, {"d": 1}, {"b": "x"}]),
    ({"type": "object", **A, "anyOf": [{"required": ["a"]}, {**B, "required": ["b"]}]}, [{"a": 1}, {"a": 1, "b": 1}],
     [{}, {"c": 1}]),
    ({**DEFS, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, [{"a": 1, "b": 2}, {"a": 1}],
     [{"b": 2}, {"a": 1, "c": 2}]),
    ({**DEFS, "$ref": "#/$defs/a", **B}, [{"b": 2, "a": 1}], [{"a": 1, "c": 1}, {"b": 1}]),
    ({**DEFS, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}}, [{"x": {"a": 1}}],
     [{"x": {"a": 1, "b": 1}}]),
    ({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, [{"v": 1, "next": {"v": 2}}],
     [{"v": 1, "next": {"v": 2, "w": 1}}]),
    ({"$defs": {"node": NODE}, "allOf": [{"$ref": "#/$defs/node"}, A]}, [{"v": 1, "next": {"v": 2}, "a": 1}],
     [{"v": 1, "next": {"v": 2, "a": 1}}, {"v": 1, "w": 1}]),
    ({"type": "object", "properties": {"x": {"type": "integer"}, "y": {"$ref": "#/properties/x"}}}, [{"x": 1, "y": 2}],
     [{"y": "x"}]),
    ({"oneOf": [{"properties": {"k": {"const": n}, n: True}, "required": ["k"], "type": "object"} for n in "ab"]},
     [{"k": "a", "a": 1}, {"k": "b"}], [{"k": "a", "b": 1}, {"k": "c"}]),
    ({"type": "object", "properties": {"l": {"type": "array", "items": {"allOf": [A, B]}}}},
     [{"l": [{"a": 1, "b": 1}]}], [{"l": [{"c": 1}]}]),
    ({"type": "object", **A, "patternProperties": {"^x_": {"type": "integer"}}}, [{"a": 1, "x_1": 2}], [{"b": 1}]),
    ({"type": "object", "allOf": [{**A, "additionalProperties": False}, {"required": ["a"]}]}, [{"a": 1}],
     [{}, {"b": 1}]),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["json_schema", "hermes"])
@pytest.mark.parametrize(("schema", "valid", "invalid"), TABLE, ids=range(len(TABLE)))
def test_the_merged_object_is_closed(
    schema: Any, valid: list[Any], invalid: list[Any], kind: str, vocabulary: Vocabulary
) -> None:
    Draft202012Validator.check_schema(schema)
    before, after = "", ""
    wanted: dict[str, Any] = {"kind": "json_schema", "schema": schema}
    if kind == "hermes":
        tools = [{"name": "t", "parameters": schema}]
        wanted = {"kind": "tool_call", "format": "hermes", "tools": tools, "parallel": False}
        before, after = '<tool_call>\n{"name": "t", "arguments": ', "}\n</tool_call>"
    judge = Judge(wanted, vocabulary)
    for value in valid:
        assert Draft202012Validator(schema).is_valid(value)
        assert judge.accepts(before + json.dumps(value) + after), value
    for value in invalid:
        assert not judge.accepts(before + json.dumps(value) + after), value


LEAF = st.sampled_from([True, {"type": "integer"}, {"type": "integer", "minimum": 2}, {"type": "string"}])
OBJECT = st.fixed_dictionaries(
    {"properties": st.dictionaries(st.sampled_from("abcd"), LEAF, max_size=2)},
    optional={
        "required": st.lists(st.sampled_from("abcde"), max_size=1),
        "additionalProperties": st.sampled_from([True, False, {"type": "integer"}]),
    },
)
REFERENCE = st.sampled_from([{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/q"}])
NESTED = st.builds(lambda own, members: {**own, "allOf": members}, OBJECT, st.lists(REFERENCE, min_size=1))
MEMBER = OBJECT | OBJECT | REFERENCE | NESTED
MERGED = st.builds(
    lambda own, members, options: {"type": "object", **own} | members | options,
    OBJECT,
    st.lists(MEMBER, min_size=1, max_size=2).map(lambda found: {"allOf": found}) | st.just({}),
    st.lists(MEMBER, min_size=1, max_size=2).map(lambda found: {"anyOf": found}) | st.just({}),
)
VALUES = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([1, 3, "x"]), max_size=3)


def naming(schema: Any) -> Any:
    """The schema with the properties that only `required` names among the others."""
    if isinstance(schema, list):
        return [naming(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: naming(value) for key, value in schema.items()}
    if isinstance(schema.get("required"), list) and "additionalProperties" not in schema:
        made["properties"] = dict.fromkeys(schema["required"], True) | made.get("properties", {})
    return made


@settings(max_examples=120)
@given(schema=MERGED, p=OBJECT, q=MEMBER, values=st.lists(VALUES, min_size=4, max_size=8))
def test_closed_is_what_jsonschema_calls_unevaluated(
    schema: Any, p: Any, q: Any, values: list[Any], vocabulary: Vocabulary
) -> None:
    if q.get("$ref") == "#/$defs/q" or {"$ref": "#/$defs/q"} in q.get("allOf", []):
        return  # it refers to itself, for nothing
    schema = {**schema, "$defs": {"p": p, "q": q}}
    try:
        judge = Judge({"kind": "json_schema", "schema": schema}, vocabulary)
    except RequestError as error:
        assert "nsatisfiable" in error.message
        judge = None
    oracle = Draft202012Validator({**naming(schema), "unevaluatedProperties": False})
    for value in values:
        accepted = judge is not None and judge.accepts_object(value)
        assert accepted == oracle.is_valid(value), (value, closed(schema, schema))
