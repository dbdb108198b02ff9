"""Numbers that the grammar library would take for others, and references without an end, which it has no words for.

No reply breaks a bound or a constant; what cannot be kept is refused by a sentence that names it.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from engine.ground.errors import RequestError
from engine.text.circles import endless, without_values
from engine.text.grammar import Vocabulary
from engine.text.ranges import held
from engine.text.schemas import resolved
from engine.text.tokenizer import load
from tests.text.test_schemas import Judge

NANO = Path(__file__).parents[2] / "data" / "nano" / "nano.gguf"
LEAST, MOST, LAST = -(2**63) + 1024, 2**63 - 1024, 2**63 - 1
INTEGER = {"type": "integer"}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = load(NANO)
    return Vocabulary(tokenizer, tokenizer.vocab_size)


def judge(schema: Any, vocabulary: Vocabulary, form: str = "") -> Judge:
    if not form:
        return Judge({"kind": "json_schema", "schema": schema}, vocabulary)
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    if "$defs" in schema:
        parameters["$defs"] = schema["$defs"]
    tools = [{"name": "t", "parameters": parameters}]
    return Judge({"kind": "tool_call", "format": form, "tools": tools, "parallel": False}, vocabulary)


BOUNDS: list[tuple[Any, list[int], list[int]]] = [
    ({"minimum": 2**53 + 1}, [2**53 + 2, 2**80], [2**53, 2**53 + 1]),
    ({"maximum": 2**53 + 1}, [2**53, -(2**80)], [2**53 + 2]),
    ({"exclusiveMinimum": 2**53}, [2**53 + 2], [2**53]),
    ({"exclusiveMaximum": 2**53 + 4}, [2**53 + 2], [2**53 + 4]),
    ({"minimum": -(2**63), "maximum": LAST}, [LEAST, LAST, 0], [-(2**63) - 1, 2**63]),
    ({"minimum": 0, "maximum": 2**64 - 1}, [0, LAST], [-1, 2**64]),
    ({"maximum": 1e30}, [LAST, -(2**80)], [10**31]),
    ({"maximum": 2**70}, [LAST], [2**71]),
    ({"minimum": -1e30, "exclusiveMinimum": 0}, [1], [0]),
    ({"minimum": 7, "maximum": 2**70, "exclusiveMaximum": 9}, [7, 8], [6, 9]),
    ({"minimum": 3.5, "maximum": 5}, [4, 5], [3, 6]),
]


@pytest.mark.parametrize(("bounds", "valid", "invalid"), BOUNDS, ids=[str(bounds) for bounds, _, _ in BOUNDS])
def test_no_integer_breaks_a_bound(
    bounds: Any, valid: list[int], invalid: list[int], vocabulary: Vocabulary
) -> None:
    for schema in ({**INTEGER, **bounds}, {"type": ["integer", "null"], **bounds}):
        found = judge(schema, vocabulary)
        for value in valid:
            assert Draft202012Validator(schema).is_valid(value) and found.accepts(str(value)), value
        assert not any(found.accepts(str(value)) for value in invalid)


WHOLE = st.integers(-(2**65), 2**65) | st.builds(lambda n, d: 2**n + d, st.integers(52, 64), st.integers(-3, 3))
ANY_NUMBER = WHOLE | WHOLE.map(float) | st.integers(-9, 9)
KEYS = st.sampled_from(["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"])


@pytest.mark.slow
@settings(max_examples=400)
@given(bounds=st.dictionaries(KEYS, ANY_NUMBER, min_size=1), kind=st.sampled_from(["integer", "number"]), n=WHOLE)
def test_bounds_move_inwards_and_no_further_than_they_must(bounds: dict[str, Any], kind: str, n: int) -> None:
    schema = {"type": kind, **bounds}
    try:
        made = held(schema)
    except ValueError as error:
        assert any(str(value) in str(error) for value in bounds.values() if not LEAST <= value <= MOST)
        return
    for key in bounds.keys() & made.keys():
        assert abs(made[key]) <= 2**53 or made[key] == LAST or float(made[key]) == made[key]
    values = [n, *(int(value) + d for value in bounds.values() for d in (-1025, -1024, -1, 0, 1, 1024, 1025))]
    before, after = Draft202012Validator(schema), Draft202012Validator(made)
    for value in values:
        if after.is_valid(value):
            assert before.is_valid(value)
        elif before.is_valid(value) and abs(value) < 2**63:
            assert any(abs(value - bound) <= 1024 for bound in bounds.values())


@pytest.mark.parametrize("form", ["", "hermes", "xml", "laguna", "gemma4"])
@pytest.mark.parametrize(
    ("kind", "key", "bound", "limits"),
    [
        ("integer", "minimum", -1e30, f" of an integer: expected {-(2**63)} to {MOST}"),
        ("integer", "minimum", 2**70, f" of an integer: expected {-(2**63)} to {MOST}"),
        ("integer", "exclusiveMaximum", -(2**70), f" of an integer: expected {-(2**63)} to {MOST}"),
        ("number", "maximum", 1e30, f" of a number: expected {LEAST} to {MOST}"),
        ("number", "exclusiveMinimum", -(2**70), f" of a number: expected {LEAST} to {MOST}"),
        ("string", "minLength", 2**40, f": expected {2**31} at most"),
        ("array", "minItems", 2**70, f": expected {2**31} at most"),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused(
    kind: str, key: str, bound: Any, limits: str, form: str, vocabulary: Vocabulary
) -> None:
    whose = " of tool 't'" if form else ""
    said = f"the schema{whose} cannot be enforced: {key!r}{limits}, found {bound}; "
    with pytest.raises(RequestError, match=re.escape(said)):
        judge({"type": kind, key: bound}, vocabulary, form)


@pytest.mark.parametrize("form", ["", "hermes", "xml", "laguna", "gemma4"])
@pytest.mark.parametrize(
    "schema", [{"type": "string", "maxLength": 2**70}, {"type": "array", "maxItems": 2**70, "items": INTEGER}], ids=str
)
def test_lengths_that_no_reply_has_bound_nothing(schema: Any, form: str, vocabulary: Vocabulary) -> None:
    judged = judge(schema, vocabulary, form)
    if not form:
        value = "x" * 300 if schema["type"] == "string" else [1] * 300
        assert judged.accepts(json.dumps(value, separators=(",", ":"))) and not judged.accepts("true")


@pytest.mark.parametrize("value", [2**70, 1e30, 2**53 + 1, -(2**63), -1e30, [1, {"a": 2**70}], 1e400], ids=str)
def test_constants_that_would_become_others_are_refused(value: Any, vocabulary: Vocabulary) -> None:
    for schema in ({"const": value}, {"enum": ["x", value]}):
        with pytest.raises(RequestError, match=r"the constant .*: expected a number that a double holds, .*; make"):
            judge(schema, vocabulary)


DIGITS = [123456789.123456789, 100000.00000000001, 1.7e-300, [{"a": -100000.00000000001}]]


@pytest.mark.parametrize("value", DIGITS, ids=str)
def test_constants_of_more_digits_than_are_read_are_refused(value: Any, vocabulary: Vocabulary) -> None:
    inside = {"type": "object", "properties": {"a": {"const": value}}}
    for schema in ({"const": value}, {"enum": ["x", value]}, inside):
        with pytest.raises(RequestError, match=r"the constant .*: expected one of fewer digits, as it would become"):
            judge(schema, vocabulary)


SOME = st.floats(-1e6, 1e6) | st.builds(lambda n, d: n / 10**d, st.integers(-9999, 9999), st.integers(0, 8))


@pytest.mark.slow
@settings(max_examples=200)
@given(value=SOME | st.floats(-(2.0**62), 2.0**62))
def test_a_constant_is_written_as_it_is_or_refused(value: float, vocabulary: Vocabulary) -> None:
    try:
        form = judge({"const": value}, vocabulary).form
    except RequestError as error:
        assert str(value) in str(error)
        return
    text, state = b"", form.begin(())
    while not state.is_done and (found := np.flatnonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little"))
                                 ).size:
        text += vocabulary.tokenizer.decode_bytes([int(found[0])])
        state.accept(int(found[0]))
    assert float(text) == value


# --- exclusive bounds of numbers ----------------------------------------------------------------------

WITHIN: list[tuple[Any, list[str], list[str]]] = [
    ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.001", "0." + "0" * 30 + "1"], ["0", "0.0", "-0", "0.000"]),
    ({"exclusiveMinimum": 0, "maximum": 1}, ["1", "0.001"], ["0", "0.0", "1.1"]),
    ({"exclusiveMinimum": 0, "maximum": 1e-6}, ["0.000001", "0.0000000005"], ["0", "0.0", "0.000002"]),
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.001}, ["0.0005", "0.0009999"], ["0", "0.0", "0.001"]),
    ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.001}, ["1.0005"], ["1", "1.0", "1.001", "1.0000000000000000001"]),
    ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, ["0.5"], ["0", "0.0"]),
    ({"exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, ["-0.25", "-0.4", "-0.0001"], ["-0", "0", "-0.0", "-0.5"]),
    ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.5", "0.1"], ["0", "0.0"]),
    ({"exclusiveMinimum": 0}, ["0.5", "7"], ["0", "0.0", "-1"]),
    ({"exclusiveMaximum": 1}, ["0.9", "0", "-7"], ["1", "1.0"]),
    ({"minimum": 1e-100, "maximum": 0.5}, ["0.5"], ["0"]),
    ({"exclusiveMinimum": 0, "maximum": 1, "multipleOf": 0.25}, ["0.25", "1"], ["0", "0.1"]),
]


@pytest.mark.parametrize(("bounds", "valid", "invalid"), WITHIN, ids=[str(bounds) for bounds, _, _ in WITHIN])
def test_no_number_is_an_exclusive_bound(
    bounds: Any, valid: list[str], invalid: list[str], vocabulary: Vocabulary
) -> None:
    for schema in ({"type": "number", **bounds}, {"type": ["number", "null"], **bounds}):
        found = judge(schema, vocabulary)
        assert [text for text in valid if not found.accepts(text)] == []
        assert [text for text in invalid if found.accepts(text)] == []


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(bounds=st.dictionaries(KEYS, SOME | st.integers(-3, 3), min_size=1), near=SOME)
def test_numbers_at_a_bound_are_inside_it(bounds: dict[str, Any], near: float, vocabulary: Vocabulary) -> None:
    schema = {"type": "number", **bounds}
    try:
        found = judge(schema, vocabulary)
    except RequestError as error:
        assert "minimum" in str(error).lower()
        return
    before = Draft202012Validator(schema)
    texts = {"0", "-0", "0.0", format(Decimal(repr(near)), "f")}
    for bound in map(float, bounds.values()):
        for value in (bound, math.nextafter(bound, math.inf), math.nextafter(bound, -math.inf)):
            text = format(Decimal(repr(value)), "f")
            texts |= {text, text.removesuffix(".0"), f"{text}0000000000000000001" if "." in text else text}
    assert [text for text in texts if found.accepts(text) and not before.is_valid(float(text))] == []
    if all(abs(near - bound) > 1e-9 for bound in bounds.values()) and abs(near) > 1e-9:
        assert found.accepts(format(Decimal(repr(near)), "f")) == before.is_valid(near)


@pytest.mark.parametrize("value", [2**53, 2**62, LAST, LEAST, -1.5e-9, 0, 2**60 + 2**20])
def test_constants_that_are_held_are_written(value: Any, vocabulary: Vocabulary) -> None:
    found = judge({"enum": ["x", value]}, vocabulary)
    assert found.accepts('"x"') and (not isinstance(value, int) or found.accepts(str(value)))


# --- references without an end ------------------------------------------------------------------------

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}}
ENDLESS: list[tuple[Any, str]] = [
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "#/$defs/a"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#/$defs/a"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {**NODE, "required": ["next"]}}}, "#/$defs/a"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}, "#/$defs/a"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}}},
     "#/$defs/a"),
    ({"type": "array", "items": {"allOf": [{"$ref": "#/$defs/a"}]}, "$defs": {"a": {**NODE, "required": ["next"]}}},
     "#/$defs/a"),
]  # fmt: skip
SELF = {"$ref": "#/$defs/a"}
ALSO_ENDLESS: list[Any] = [
    {"type": ["object"], "properties": {"next": SELF}, "required": ["next"]},
    {"type": ["array"], "items": SELF, "minItems": 1},
    {"type": ["array", "object"], "items": SELF, "minItems": 1, "additionalProperties": SELF, "required": ["x"]},
    {"type": "object", "additionalProperties": SELF, "required": ["x"]},
    {"type": "object", "additionalProperties": SELF, "minProperties": 1},
    {"type": "object", "properties": {"x": SELF}, "additionalProperties": False, "minProperties": 1},
    {"type": "object", "patternProperties": {"^x": SELF}, "required": ["xy"]},
    {"type": "object", "properties": {"x": SELF}, "allOf": [{"required": ["x"]}]},
    {"allOf": [{"type": "object", "properties": {"x": SELF}}, {"required": ["x"]}]},
    {"allOf": [{"required": ["x"]}, {"properties": {"x": SELF}}, {"type": "object"}]},
    {"$ref": "#/$defs/b", "required": ["x"]},
    {"type": "array", "items": [SELF], "additionalItems": False, "minItems": 1},
    {"type": "array", "items": [True], "additionalItems": SELF, "minItems": 2},
]
WITH_END: list[Any] = [
    {"type": ["object", "null"], "properties": {"x": SELF}, "required": ["x"]},
    {"properties": {"x": SELF}, "required": ["x"]},
    {"type": ["array", "object"], "items": SELF, "minItems": 1, "additionalProperties": SELF},
    {"type": "object", "additionalProperties": SELF, "required": ["x"], "properties": {"x": True}},
    {"type": "object", "additionalProperties": SELF, "required": ["x"], "patternProperties": {"^x": True}},
    {"type": "object", "properties": {"x": SELF}, "minProperties": 1},
    {"type": "object", "properties": {"x": SELF, "y": {"type": "null"}}, "additionalProperties": False,
     "minProperties": 1},
    {"type": "object", "patternProperties": {"^x": SELF}, "required": ["y"]},
    {"allOf": [{"type": "object", "properties": {"x": SELF}}, {"required": ["y"]}]},
]  # fmt: skip


def unmet(node: Any) -> str | None:
    root = {**SELF, "$defs": {"a": node, "b": {"type": "object", "properties": {"x": SELF}}}}
    return endless(root, lambda found: resolved(found["$ref"], root))


@pytest.mark.parametrize("node", ALSO_ENDLESS, ids=str)
def test_what_never_ends_is_found(node: Any) -> None:
    assert unmet(node) is not None


def test_what_never_ends_is_found_where_what_it_refers_to_ends() -> None:
    inner = {"allOf": [{"$ref": "#"}, {"required": ["x"]}]}
    root = {"type": "object", "properties": {"x": inner}}
    assert endless(root, lambda found: resolved(found["$ref"], root)) == "#"


@pytest.mark.parametrize("node", WITH_END, ids=str)
def test_what_may_end_is_not_refused(node: Any) -> None:
    assert unmet(node) is None


NAMES = st.sampled_from(["a", "b"])
REFERENCES = st.sampled_from([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, True, {"type": "null"}, False])
SCHEMAS = st.recursive(
    REFERENCES,
    lambda inner: st.fixed_dictionaries({}, optional={
        "type": st.sampled_from(["object", "array", ["object"], ["array", "object"], ["object", "null"]]),
        "properties": st.dictionaries(NAMES, inner, max_size=2),
        "patternProperties": st.dictionaries(st.sampled_from(["^a$", "b", "."]), inner, max_size=1),
        "additionalProperties": inner,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "minProperties": st.integers(0, 2),
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "minItems": st.integers(0, 2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "$ref": st.sampled_from(["#/$defs/a", "#/$defs/b"]),
    }),
    max_leaves=8,
)  # fmt: skip


def some_values() -> list[Any]:
    found: list[Any] = [None, [], {}]
    for _ in range(2):
        found += [[x] for x in found[:12]] + [[x, x] for x in found[:6]] + [{n: x} for n in "abc" for x in found[:12]]
        found += [{"a": x, "b": y} for x in found[:5] for y in found[:5]]
    return found


VALUES = some_values()


def is_valid(schema: Any, value: Any, root: Any, depth: int) -> bool:
    """Whether a value is valid by a schema, in so many references: jsonschema has no end of its own."""
    if not isinstance(schema, dict) or depth == 0:
        return schema is not False and depth > 0  # None: what an array's schema says nothing of
    kinds = schema.get("type", ["object", "array", "null"])
    if {dict: "object", list: "array"}.get(type(value), "null") not in ([kinds] if isinstance(kinds, str) else kinds):
        return False
    same = [*schema.get("allOf", []), *([resolved(schema["$ref"], root)] if "$ref" in schema else [])]
    if not all(is_valid(each, value, root, depth - 1) for each in same):
        return False
    if "anyOf" in schema and not any(is_valid(each, value, root, depth - 1) for each in schema["anyOf"]):
        return False
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        if not value.keys() >= {*schema.get("required", [])} or len(value) < schema.get("minProperties", 0):
            return False
        for name, inner in value.items():
            found = [schema["properties"][name]] if name in schema.get("properties", {}) else []
            found += [each for rule, each in schema.get("patternProperties", {}).items() if re.search(rule, name)]
            parts += [(each, inner) for each in found or [schema.get("additionalProperties", True)]]
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        if len(value) < schema.get("minItems", 0):
            return False
        parts = [*zip(first, value, strict=False), *((schema.get("items", True), each) for each in value[len(first):])]
    return all(is_valid(each, inner, root, 6) for each, inner in parts)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(a=SCHEMAS, b=SCHEMAS)
@example(
    {"type": ["array", "object"], "$ref": "#/$defs/a", "minItems": 1, "prefixItems": [{"$ref": "#/$defs/a"}]},
    {"$ref": "#/$defs/a"},
)
def test_no_schema_that_has_a_value_is_taken_for_endless(a: Any, b: Any) -> None:
    root = {"$ref": "#/$defs/a", "anyOf": [{"$ref": "#/$defs/b"}, True], "$defs": {"a": a, "b": b}}
    for found in without_values(root, lambda one: resolved(one["$ref"], root)):
        assert [value for value in VALUES if is_valid(found, value, root, 6)] == []


@pytest.mark.parametrize("form", ["", "hermes", "xml", "laguna", "gemma4"])
@pytest.mark.parametrize(("schema", "reference"), ENDLESS, ids=range(len(ENDLESS)))
def test_what_never_ends_is_refused(schema: Any, reference: str, form: str, vocabulary: Vocabulary) -> None:
    whose = " of tool 't'" if form else ""
    said = f"the schema{whose} cannot be enforced: the reference {reference!r} refers to itself in a circle"
    with pytest.raises(RequestError, match=re.escape(said)):
        judge(schema, vocabulary, form)


def test_a_schema_that_is_itself_is_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(RequestError, match="the reference '#' refers to itself in a circle"):
        judge({"$ref": "#"}, vocabulary)
    n = 5000
    chain = {f"d{i}": {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/d{(i + 1) % n}"}} for i in range(n)}
    with pytest.raises(RequestError, match="the reference '#/\\$defs/d0' refers to itself in a circle"):
        judge({"$ref": "#/$defs/d0", "$defs": chain}, vocabulary)


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (NODE, '{"next":{"next":{}}}'),
        ({**NODE, "properties": {"next": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "required": ["next"]},
         '{"next":{"next":null}}'),
        ({"type": "array", "items": {"$ref": "#/$defs/a"}}, "[[],[[]]]"),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]}, "7"),
    ],
)  # fmt: skip
def test_circles_with_a_way_out_are_served(node: Any, text: str, vocabulary: Vocabulary) -> None:
    found = judge({"$ref": "#/$defs/a", "$defs": {"a": node}}, vocabulary)
    assert found.accepts(text)
    if "anyOf" not in node:  # the validator has no end of its own
        assert Draft202012Validator({**node, "$defs": {"a": node}}).is_valid(json.loads(text))
