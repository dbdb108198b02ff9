"""Schemas that say nothing of other properties allow none: of the merged object, whatever it is put together of.

The oracle is jsonschema, which is told the same by `unevaluatedProperties`.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator

from engine.ground.errors import RequestError
from engine.text.grammar import Compiled, Vocabulary, _parse, _rules
from engine.text.schemas import MOST_DEEP, OPTIONS, _Closing, _Known, _merged, _own, closed
from engine.text.tokenizer import load
from spark.speech.tool_schemas import loosened

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
ONLY = {"unevaluatedProperties": False}
DEFS = {"$defs": {"a": {"type": "object", **A, "required": ["a"]}, "b": B}}
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}, "required": ["v"]}
TABLE: list[tuple[Any, list[Any], list[Any]]] = [
    ({**A, "type": "object"}, [{}, {"a": 1}], [{"b": 1}, {"a": "x"}]),
    ({**A, "type": "object", "additionalProperties": True}, [{"b": 1}], [{"a": "x"}]),
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
     [{}, {"b": 1}], [{"b": "x"}]),
    ({"type": "object", "properties": {"a": {"type": "string", "format": "uri-reference"}, "b": {"format": "binary"}}},
     [{"a": "x"}, {"b": "y"}, {"b": 1}], [{"a": 1}]),
    ({"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}, [{"a": "2026-11-29"}],
     [{"a": "x"}]),
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
    ({"type": "object", **A, **ONLY}, [{}, {"a": 1}], [{"b": 1}, {"a": "x"}]),
    ({"type": "object", **ONLY}, [{}], [{"b": 1}]),
    ({"type": "object", **A, "additionalProperties": {"type": "string"}, **ONLY}, [{"a": 1, "b": "x"}], [{"b": 1}]),
    ({"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, **ONLY}, [{"x_1": 2}], [{"b": 1}]),
    ({"type": "object", "allOf": [{**A, **ONLY}, {"required": ["a"]}]}, [{"a": 1}], [{}, {"a": 1, "b": 1}]),
    ({"type": "object", "properties": {"o": {"type": "object", **A, **ONLY}}}, [{"o": {"a": 1}}], [{"o": {"b": 1}}]),
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
MEMBER = OBJECT | OBJECT.map(lambda own: own | ONLY) | REFERENCE | NESTED
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
    if isinstance(schema.get("required"), list) and schema.keys().isdisjoint(("additionalProperties", *ONLY)):
        made["properties"] = dict.fromkeys(schema["required"], True) | made.get("properties", {})
    return made


@pytest.mark.slow
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


BESIDE = [
    {"allOf": [A]}, {"anyOf": [A, B]}, {"$ref": "#/$defs/a", **DEFS}, {"if": A, "then": B},
    {"dependentSchemas": {"a": B}}, {"$dynamicRef": "#"},
]  # fmt: skip


@pytest.mark.parametrize("beside", BESIDE, ids=str)
def test_unevaluated_properties_are_refused_where_they_say_more(beside: Any, vocabulary: Vocabulary) -> None:
    with pytest.raises(RequestError, match="cannot be enforced"):
        Judge({"kind": "json_schema", "schema": {"type": "object", **C, **ONLY, **beside}}, vocabulary)


@pytest.mark.parametrize("form", ["xml", "laguna", "gemma4"])
def test_unevaluated_properties_where_no_json_stands(form: str, vocabulary: Vocabulary) -> None:
    for inside in ({"type": "object", **A}, {"type": "object"}):
        made = []
        for shut in (ONLY, {"additionalProperties": False}):
            parameters = {"type": "object", "properties": {"o": {**inside, **shut}}, **shut}
            wanted = {"kind": "tool_call", "format": form, "tools": [{"name": "t", "parameters": parameters}]}
            made.append(str(_rules(_parse(json.dumps(wanted))[0], vocabulary.tokenizer)))
        assert made[0] == made[1]


# --- references that meet again, that go round, and long chains of them -------------------------------


class PlainClosing(_Closing):
    """What `closed` means, word for word: every way through the references is walked, and nothing is remembered."""

    def _parts(self, schema: Mapping[str, Any], seen: frozenset[str] = frozenset()) -> dict[tuple[str, int], _Known]:
        def known(inner: Any, seen: frozenset[str]) -> _Known:
            return _merged(self._parts(inner, seen).values()) if isinstance(inner, dict) else _Known()

        parts = {("", 0): _own(schema)}
        for i, member in enumerate(schema.get("allOf", [])):
            parts["allOf", i] = known(member, seen)
        target = self._target(schema)
        if target is not None and schema["$ref"] not in seen:
            parts["$ref", 0] = known(target, seen | {schema["$ref"]})
        for key in OPTIONS:
            if key in schema:
                options = [known(option, seen) for option in schema[key]]
                opens = any(option.opens or option.options for option in options)
                parts[key, 0] = replace(_merged(options), named=False, opens=False, shut=False, options=opens)
        return parts

    def _beside_members(
        self, parts: Mapping[tuple[str, int], _Known], beside: _Known, members: list[Any]
    ) -> list[_Known]:
        return [self._others(parts, beside, ("allOf", i)) for i in range(len(members))]


def plainly_closed(schema: Any) -> Any:
    closing = PlainClosing(schema)
    made = closing.anew(schema)
    closing.define()
    return {"$defs": closing.definitions, **{key: value for key, value in made.items() if key != "$defs"}}


def diamond(n: int, keyword: str, **beside: Any) -> dict[str, Any]:
    """Definitions, each of which refers twice to the next one."""
    definitions: dict[str, Any] = {f"d{n}": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    for i in range(n):
        twice = [{"$ref": f"#/$defs/d{i + 1}"}] * 2
        one = {"properties": dict(zip("lr", twice, strict=True))} if keyword == "properties" else {keyword: twice}
        definitions[f"d{i}"] = {**one, **beside}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


NAMES = ("p", "q", "r")
TO_ANY = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in NAMES] + [{"$ref": "#"}])
ANY = st.recursive(
    OBJECT | TO_ANY,
    lambda inner: st.builds(
        lambda own, more: {**own, **more},
        OBJECT | TO_ANY | st.just({}),
        st.dictionaries(st.sampled_from(["allOf", *OPTIONS]), st.lists(inner, min_size=1, max_size=2), max_size=2)
        | inner.map(lambda found: {"properties": {"n": found}}),
    ),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(schema=ANY, definitions=st.fixed_dictionaries(dict.fromkeys(NAMES, ANY)))
def test_what_is_remembered_of_schemas_changes_nothing(schema: Any, definitions: dict[str, Any]) -> None:
    schema = {**schema, "$defs": definitions}
    made, plain = closed(schema, schema), plainly_closed(schema)
    assert {"$defs": {}, **made} == plain


@settings(max_examples=100)
@given(schema=MERGED, p=OBJECT, q=MEMBER)
def test_without_circles_the_order_of_properties_is_the_same_too(schema: Any, p: Any, q: Any) -> None:
    q = json.loads(json.dumps(q).replace("/q", "/p"))
    schema = {**schema, "$defs": {"p": p, "q": q}}
    assert json.dumps({"$defs": {}, **closed(schema, schema)}) == json.dumps(plainly_closed(schema))


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "properties"])
def test_a_diamond_is_as_large_as_it_is_written(keyword: str, vocabulary: Vocabulary) -> None:
    schema = diamond(40, keyword, **({"type": "object"} if keyword == "properties" else {}))
    began_s = time.process_time()
    judge = Judge({"kind": "json_schema", "schema": schema}, vocabulary)
    assert time.process_time() - began_s < 5
    if keyword == "properties":
        assert judge.accepts('{"l":{"r":{}}}') and not judge.accepts('{"l":{"x":1}}')
    else:
        assert judge.accepts('{"x":1}') and not judge.accepts('{"y":1}')


@pytest.mark.slow
def test_wide_and_long_schemas_take_their_size(vocabulary: Vocabulary) -> None:
    began_s = time.process_time()
    n = 3000
    circle = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i + 1) % n}"}, {"type": "integer"}]} for i in range(n)}
    for schema in (
        {"allOf": [{"properties": {f"p{i}": True}} for i in range(1500)]},
        {"$defs": {"a": A}, "allOf": [{"$ref": "#/$defs/a"}] * n},
        {"$defs": {"a": A}, "type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(n)}},
    ):
        closed(schema, schema)
    with pytest.raises(ValueError, match="deep"):
        closed(schema := {"$defs": circle, "$ref": "#/$defs/d0"}, schema)
    assert time.process_time() - began_s < 10


@pytest.mark.slow
@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "properties"])
def test_a_chain_that_is_too_deep_is_refused(keyword: str, vocabulary: Vocabulary) -> None:
    beside = {"type": "object"} if keyword == "properties" else {}
    wanted = {"kind": "json_schema", "schema": diamond(5000, keyword, **beside)}
    with pytest.raises(RequestError, match=f"the schema cannot be enforced: its references lead more than {MOST_DEEP}"):
        Judge(wanted, vocabulary)
    Judge({"kind": "json_schema", "schema": diamond(MOST_DEEP - 8, "properties", type="object")}, vocabulary)


@pytest.mark.slow
def test_options_that_would_be_too_many_objects_are_refused(vocabulary: Vocabulary) -> None:
    definitions: dict[str, Any] = {"d40": A}
    for i in range(40):
        options = [{"$ref": f"#/$defs/d{i + 1}", "properties": {f"{side}{i}": True}} for side in "lr"]
        definitions[f"d{i}"] = {"anyOf": options}
    with pytest.raises(RequestError, match=r"cannot be enforced: its options .* more than 65536 different objects"):
        Judge({"kind": "json_schema", "schema": {"$defs": definitions, "$ref": "#/$defs/d0"}}, vocabulary)


@pytest.mark.parametrize("form", ["xml", "laguna", "gemma4"])
def test_options_of_a_call_that_meet_again(form: str, vocabulary: Vocabulary) -> None:
    schema = diamond(40, "anyOf")
    schema["$defs"]["d40"] = {"type": ["string", "null"]}
    schema["$defs"]["d39"]["anyOf"].append({"$ref": "#/$defs/d0"})
    parameters = {"type": "object", "$defs": schema["$defs"], "properties": {"x": {"$ref": "#/$defs/d0"}}}
    began_s = time.process_time()
    tools = [{"name": "t", "parameters": parameters}]
    judge = Judge({"kind": "tool_call", "format": form, "tools": tools, "parallel": False}, vocabulary)
    assert time.process_time() - began_s < 5
    if form == "xml":
        assert judge.accepts("<tool_call>\n<function=t>\n<parameter=x>\nhi\n</parameter>\n</function>\n</tool_call>")


# --- keywords that say nothing ------------------------------------------------------------------------

ONE, TWO, LISTS = {"const": 1}, {"const": 2}, ([], [1], [2], [1, 1], [1, 2], [1, 2, 2], [1, 1, 1])
IDLE: list[Any] = [
    {"prefixItems": [ONE], "additionalItems": False},
    {"prefixItems": [ONE], "items": TWO, "additionalItems": False},
    {"prefixItems": [ONE], "items": False, "additionalItems": TWO},
    {"items": ONE, "additionalItems": TWO},
    {"items": False, "additionalItems": {"not": {}}},
    {"items": {"enum": [1, 2]}, "uniqueItems": False},
    {"items": ONE, "then": {"maxItems": 1}, "else": {"not": {}}},
    {"items": ONE, "minContains": 2},
]


@pytest.mark.parametrize("keywords", IDLE, ids=str)
def test_keywords_that_say_nothing_change_nothing(keywords: Any, vocabulary: Vocabulary) -> None:
    inner = {"type": "array", **keywords}
    for schema, wrap in ((inner, lambda value: value), ({"type": "array", "items": inner}, lambda value: [value])):
        judge, oracle = Judge({"kind": "json_schema", "schema": schema}, vocabulary), Draft202012Validator(schema)
        for value in map(wrap, LISTS):
            assert judge.accepts(json.dumps(value, separators=(",", ":"))) == oracle.is_valid(value), value


def test_of_what_a_tool_takes_what_nobody_enforces_is_left_out(vocabulary: Vocabulary) -> None:
    """Not from constants, nor where it is a property's name."""
    names = {"not": {"type": "string"}, "if": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}}
    schema = {
        "type": "object", "properties": {**names, "c": {"const": {"not": 1}}, "p": {"pattern": "(?<!a)b"}},
        "required": ["not"], "dependentRequired": {"if": ["c"]}, "not": {"required": ["p"]}, "if": {}, "then": False,
        "$defs": {"contains": {"anyOf": [{"contains": ONE, "type": "array"}, {"type": "null", "pattern": "(?P<a>b)"}]}},
    }  # fmt: skip
    assert loosened(schema) == {
        "type": "object",
        "properties": {
            **names, "if": {"type": "array", "items": {"type": "integer"}}, "c": {"const": {"not": 1}}, "p": {},
        },
        "required": ["not"],
        "$defs": {"contains": {"anyOf": [{"type": "array"}, {"type": "null", "pattern": "(?P<a>b)"}]}},
    }  # fmt: skip
    with pytest.raises(RequestError):
        Judge({"kind": "json_schema", "schema": schema}, vocabulary)
    judge = Judge({"kind": "json_schema", "schema": loosened({**schema, "properties": names, "$defs": {}})}, vocabulary)
    assert judge.accepts_object({"not": "x", "if": [1, 1]}) and not judge.accepts_object({"if": [1]})


def test_a_list_of_items_keeps_what_follows_it(vocabulary: Vocabulary) -> None:
    schema = {"type": "array", "items": [ONE], "additionalItems": TWO}
    judge, oracle = Judge({"kind": "json_schema", "schema": schema}, vocabulary), Draft7Validator(schema)
    for value in LISTS:
        assert judge.accepts(json.dumps(value, separators=(",", ":"))) == oracle.is_valid(value), value


def test_lists_of_gemma_may_say_that_items_may_be_alike(vocabulary: Vocabulary) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": False, "items": ONE}}}
    wanted = {"kind": "tool_call", "format": "gemma4", "tools": [{"name": "t", "parameters": parameters}]}
    judge = Judge(wanted, vocabulary)
    assert judge.accepts("<|tool_call>call:t{a:[1,1]}<tool_call|>") and not judge.accepts("<|tool_call>call:t{a:2}")


MANY = {"type": "object", "properties": {f"q{j}": {"enum": [1, 2, 3]} for j in range(30)}}
UNCLEAR: list[tuple[Any, str]] = [
    ({"const": "\ud800"}, "half of a surrogate pair"),
    ({"type": "object", "properties": {"\ud800": ONE}}, "half of a surrogate pair"),
    ({"$defs": {"x": {"$id": "http://e.com/in", "$defs": {"y": ONE}, "$ref": "#/$defs/y"}, "y": TWO},
      "$ref": "#/$defs/x"}, "the '.id' 'http://e.com/in' inside it changes what the references within mean; leave"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "the options of a 'oneOf' are not known to exclude"),
    ({"anyOf": [{"type": ["string", "integer", "null", "boolean"]}] * 20000}, "it is too large; name fewer"),
    ({"type": "object", "properties": {f"p{i}": MANY for i in range(500)}}, "it is too large; name fewer"),
    ({"const": 1.5e300}, r"the constant 1.5e\+300: expected a number that .* from .*, where the grammar library's"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "said"), UNCLEAR, ids=range(len(UNCLEAR)))
def test_refusals_say_what_was_found(schema: Any, said: str, vocabulary: Vocabulary) -> None:
    with pytest.raises(RequestError, match=said):
        Judge({"kind": "json_schema", "schema": schema}, vocabulary)


def test_an_optional_property_may_refer_to_what_nothing_is_valid_by(vocabulary: Vocabulary) -> None:
    schema = {"$defs": {"no": False}, "type": "object", "properties": {"a": {"$ref": "#/$defs/no"}, "b": ONE}}
    judge = Judge({"kind": "json_schema", "schema": schema}, vocabulary)
    assert judge.accepts('{"b":1}') and judge.accepts("{}") and not judge.accepts('{"a":1}')


def test_an_identity_that_nothing_in_it_depends_on_is_no_matter(vocabulary: Vocabulary) -> None:
    schema = {"$id": "http://e.com/s", "$defs": {"y": {"$id": "y", **ONE}}, "$ref": "#/$defs/y"}
    assert Judge({"kind": "json_schema", "schema": schema}, vocabulary).accepts("1")
