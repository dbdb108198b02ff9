"""Constrained decoding: whatever the logits, what is written parses, is valid and stops where it may."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from engine.ground.config import EngineConfig
from engine.ground.errors import RequestError
from engine.ground.protocol import Done, Error, Event, Generate, Tokens
from engine.ground.sampling import Sampling
from engine.ops.cuda import gpu
from engine.running import probe
from engine.running.drawing import Behind, DeviceDrawer
from engine.running.sampling import Drawing, Drawn, SamplingParams, sample
from engine.running.stepping import StepResult
from engine.serving.scheduler import Engine
from engine.text.grammar import Compiled, Grammar, Vocabulary, check
from engine.text.tokenizer import Tokenizer, load
from spark.speech.conversation import CallArguments, CallEnd, CallStart, Text
from spark.speech.dialect import Dialect
from spark.speech.reply import ReplyParser
from tests.forms_here import FormHere
from tests.text.test_tokenizer_families import gemma_fields, write
from tests.tiny_models import k_quant_mix, write_tiny

NANO = Path(__file__).parents[2] / "data" / "nano" / "nano.gguf"
MARKS = ('"', "}", "]", "</think>", "<channel|>")
VALUE_ENDS = {"hermes": '"', "xml": "\n</parameter>", "laguna": "</arg_value>", "gemma4": '<|"|>'}
WARM = SamplingParams(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load(NANO)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("gemma")
    tokenizer = load(write(folder / "gemma.gguf", gemma_fields(folder)))
    return Vocabulary(tokenizer, tokenizer.vocab_size + 37)  # as some models have more logits than tokens


def bits(words: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def begin(text: str, vocabulary: Vocabulary, stop: Iterable[int]) -> Grammar:
    """A reply's state in this process."""
    return Compiled.from_text(check(text)[0], vocabulary).begin(frozenset(stop))


def nonsense(
    vocabulary: Vocabulary, grammar: dict[str, Any], seed: int, limit: int = 500, stop: Iterable[int] | None = None
) -> tuple[str, str]:
    """What random logits write, with some liking for the marks that end things; and why it ended."""
    tokenizer, rng = vocabulary.tokenizer, np.random.default_rng(seed)
    stop = frozenset(tokenizer.stop_ids if stop is None else stop)
    state = begin(json.dumps(grammar), vocabulary, stop)
    ids: list[int] = []
    for position in range(limit):
        allowed = state.mask()
        if state.is_done:
            return tokenizer.decode(ids), "done"
        logits = rng.normal(0, 3, vocabulary.n_vocab).astype(np.float32)
        if position % 3 or position > limit // 2:
            written = tokenizer.decode(ids[-20:])
            for mark in MARKS if "format" not in grammar else (*MARKS, VALUE_ENDS[grammar["format"]]):
                begun = max(n for n in range(len(mark)) if written.endswith(mark[:n]))
                for known in (True, False):
                    nearer = tokenizer.encode(mark[begun:], parse_special=known)[0]
                    logits[nearer] = max(logits[nearer], 12 + 3 * begun)
            logits[list(stop)] = 12
        token = sample(logits, WARM, position, (), allowed)
        assert token in bits(allowed)
        if token in stop:
            return tokenizer.decode(ids), "stop"
        ids.append(token)
        state.accept(token)
        if state.is_done:
            return tokenizer.decode(ids), "done"
    return tokenizer.decode(ids), "length"


# --- JSON ------------------------------------------------------------------------------------------

NODE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a", "z"], "additionalProperties": False}
    | {"properties": {"a": {"type": "number"}, "z": {"type": "boolean"}}},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": -5, "maximum": 17}},
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "é\"\\\n"}], "items": False, "minItems": 2},
    {"enum": ["red", "gr\u00fcn", "\u2028 \"q\"\t", 5, None, {"a": [1]}]},
    {"type": "string", "pattern": "^[a-f]{2,4}-\\d+$"},
    {"type": "string", "minLength": 3, "maxLength": 9},
    {"type": "string", "format": "date-time"},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
    {"type": "integer", "multipleOf": 5, "minimum": 10, "maximum": 100},
    {"type": ["string", "null", "boolean"]},
    {"anyOf": [{"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in ("x", "y")]},
    {"allOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "integer"}}}], "type": "object",
     "required": ["a", "b"]},
    NODE,
    True,
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_what_random_logits_write_is_valid(schema: Any, vocabulary: Vocabulary) -> None:
    Draft202012Validator.check_schema(schema)
    ended = 0
    for seed in range(6):
        text, reason = nonsense(vocabulary, {"kind": "json_schema", "schema": schema}, seed)
        if reason != "length":
            Draft202012Validator(schema).validate(json.loads(text))
            ended += 1
    assert ended >= 4


LEAVES = st.sampled_from([
    {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["a", "ä", 1]}, {"type": "null"},
    {"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 3, "maximum": 2000}, {"const": "\u20ac\n"},
])  # fmt: skip
NAMES = st.sampled_from(["a", "b", "é", 'q"', "a b", "x/y~z", "\\"])


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    @st.composite
    def objects(draw: st.DrawFn) -> dict[str, Any]:
        properties = draw(st.dictionaries(NAMES, inner, max_size=3))
        required = [name for name in properties if draw(st.booleans())]
        closed = {} if draw(st.booleans()) else {"additionalProperties": False}
        return {"type": "object", "properties": properties, "required": required} | closed

    arrays = st.builds(lambda item, n: {"type": "array", "items": item, "maxItems": n}, inner, st.integers(0, 3))
    return objects() | arrays | st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})


@settings(max_examples=60)
@given(schema=st.recursive(LEAVES, nested, max_leaves=5), seed=st.integers(0, 2**32))
def test_made_up_schemas_are_kept(schema: Any, seed: int, vocabulary: Vocabulary) -> None:
    text, reason = nonsense(vocabulary, {"kind": "json_schema", "schema": schema}, seed, 150)
    if reason != "length":
        Draft202012Validator(schema).validate(json.loads(text))


def test_any_object(vocabulary: Vocabulary) -> None:
    texts = [nonsense(vocabulary, {"kind": "json_object"}, seed) for seed in range(8)]
    made = [json.loads(text) for text, reason in texts if reason != "length"]
    assert len(made) >= 5 and all(isinstance(value, dict) for value in made)


def test_stop_tokens_come_exactly_where_the_text_is_complete(vocabulary: Vocabulary) -> None:
    tokenizer, rng = vocabulary.tokenizer, np.random.default_rng(0)
    schema = {"type": "array", "items": {"type": "integer"}}
    for spec in (schema, {"type": "integer"}, {"enum": ["a", "ab", 12]}):
        for _ in range(5):
            state = begin(
                json.dumps({"kind": "json_schema", "schema": spec}), vocabulary, tokenizer.stop_ids
            )
            ids: list[int] = []
            while not state.is_done and len(ids) < 30:
                allowed = bits(state.mask())
                try:
                    valid = Draft202012Validator(spec).is_valid(json.loads(tokenizer.decode(ids)))
                except ValueError:
                    valid = False
                assert {i for i in tokenizer.stop_ids if i in allowed} == (set(tokenizer.stop_ids) if valid else set())
                others = [i for i in allowed if i not in tokenizer.stop_ids]
                ids.append(int(rng.choice(others)))
                state.accept(ids[-1])


def test_the_end_needs_no_stop_token(vocabulary: Vocabulary) -> None:
    for seed in range(3):
        text, reason = nonsense(vocabulary, {"kind": "json_schema", "schema": {"enum": ["a", "b"]}}, seed, 20, ())
        assert reason == "done" and json.loads(text) in ("a", "b")


def test_a_stop_token_of_text_is_not_text(vocabulary: Vocabulary) -> None:
    stop = vocabulary.tokenizer.encode("5")
    schema = {"type": "integer", "minimum": 10, "maximum": 99}
    for seed in range(10):
        text, _ = nonsense(vocabulary, {"kind": "json_schema", "schema": schema}, seed, 20, stop)
        assert 10 <= int(text) <= 99 and "5" not in text
    with pytest.raises(RequestError, match="cannot write"):
        nonsense(vocabulary, {"kind": "json_schema", "schema": {"const": 5}}, 0, 20, stop)


def test_no_bit_lies_beyond_the_vocabulary(gemma: Vocabulary) -> None:
    state = begin('{"kind": "json_object", "after": "</think>"}', gemma, ())
    words = state.mask()
    assert words.dtype == np.uint32 and len(words) == -(-gemma.n_vocab // 32)
    allowed = bits(words)
    assert len(allowed) > 1000 and allowed.max() < gemma.tokenizer.vocab_size
    control = {i for name, i in gemma.tokenizer.special_ids.items() if gemma.tokenizer.is_control(name)}
    assert control and not control & set(allowed)


# --- reasoning --------------------------------------------------------------------------------------


def test_a_model_thinks_first(vocabulary: Vocabulary) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}}
    for seed in range(6):
        text, reason = nonsense(vocabulary, {"kind": "json_schema", "schema": schema, "after": "</think>"}, seed)
        assert reason != "length"
        thought, answer = text.split("</think>", 1)
        assert len(thought) > 3 and Draft202012Validator(schema).is_valid(json.loads(answer))


def test_a_model_may_think_first(vocabulary: Vocabulary) -> None:
    opened = set()
    for seed in range(12):
        wanted = {"kind": "json_schema", "schema": {"enum": ["a"]}, "after": "</think>", "opens": "<think>"}
        text, reason = nonsense(vocabulary, wanted, seed)
        assert reason != "length"
        opened.add(text.startswith("<think>"))
        assert json.loads(text.rpartition("</think>")[2]) == "a"
    assert opened == {True, False}


def test_control_tokens_end_gemmas_thoughts(gemma: Vocabulary) -> None:
    wanted = {"kind": "json_schema", "schema": {"enum": ["ä b"]}, "after": "<channel|>"}
    for opens in ({}, {"opens": "<|channel>thought\n"}):
        for seed in range(4):
            text, reason = nonsense(gemma, wanted | opens, seed)
            assert reason != "length"
            assert json.loads(text.rpartition("<channel|>")[2]) == "ä b"


# --- calls ------------------------------------------------------------------------------------------

TOOLS = [
    {
        "name": "read_file",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "minLength": 1},
                "mode": {"enum": ["r", 'wé "q"\b\x01']},
                "lines": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
                "where": {"$ref": "#/$defs/place"},
                "hint": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]},
                "code": {"type": "string", "pattern": "^[a-c]+$"},
                "limit": {"type": ["integer", "null"]},
                "rest": {},
            },
            "required": ["path", "mode", "lines", "limit"],
            "additionalProperties": False,
            "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
        },
    },
    {"name": "read", "parameters": {"type": "object", "properties": {"flag": {"type": "boolean"}}}},
    {"name": "now"},
]
FORMATS = [*VALUE_ENDS]


def calls_of(text: str, form: Any, tools: list[Any]) -> list[tuple[str, Any]]:
    """The calls that the server reads in a reply, in which there must be nothing else."""
    parser = ReplyParser(Dialect(calls=form), tools=[{"type": "function", "function": tool} for tool in tools])
    parts = [part for i in range(0, len(text), 7) for part in parser.push(text[i : i + 7])] + parser.flush()
    found: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallStart):
            found.append((part.name, ""))
        elif isinstance(part, CallArguments):
            found[-1] = (found[-1][0], found[-1][1] + part.text)
        elif isinstance(part, CallEnd):
            assert part.complete
        else:
            assert isinstance(part, Text) and not part.text.strip(), part
    return [(name, json.loads(arguments)) for name, arguments in found]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("own", ["bpe", "gemma"])
def test_calls_are_read_back(form: str, own: str, request: pytest.FixtureRequest) -> None:
    vocabulary = request.getfixturevalue("vocabulary" if own == "bpe" else "gemma")
    ended, seen = 0, set()
    for seed in range(10):
        wanted = {"kind": "tool_call", "format": form, "tools": TOOLS, "name": "read_file" if seed % 2 else None}
        text, reason = nonsense(vocabulary, wanted, seed, 600)
        if reason == "length":
            continue
        ended += 1
        calls = calls_of(text, form, TOOLS)
        assert calls
        for name, arguments in calls:
            seen.add(name)
            schema = next(tool for tool in TOOLS if tool["name"] == name).get("parameters", {"type": "object"})
            Draft202012Validator(schema).validate(arguments)
    assert ended >= 7 and "read_file" in seen and len(seen) > 1


@pytest.mark.parametrize("form", FORMATS)
def test_one_call_of_one_tool(form: str, vocabulary: Vocabulary) -> None:
    wanted = {"kind": "tool_call", "format": form, "tools": TOOLS, "name": "read", "parallel": False}
    for seed in range(4):
        text, reason = nonsense(vocabulary, wanted | {"after": "</think>"}, seed, 400)
        assert reason == "done"
        assert [name for name, _ in calls_of(text.split("</think>", 1)[1], form, TOOLS)] == ["read"]


# --- what is refused --------------------------------------------------------------------------------


def schema(value: Any) -> dict[str, Any]:
    return {"kind": "json_schema", "schema": value}


def tagged(value: Any, form: str = "xml") -> dict[str, Any]:
    return {"kind": "tool_call", "format": form, "tools": [{"name": "t", "parameters": value}]}


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ("nonsense", "not JSON"),
        ([], "'grammar'"),
        ("[" * 100000, "too deeply|not JSON"),
        ({"kind": "regex"}, "'grammar.kind'"),
        ({"kind": "json_schema"}, "'grammar.schema'"),
        ({"kind": "json_schema", "schema": []}, "'grammar.schema'"),
        ({"kind": "json_object", "extra": 1}, "'grammar.extra'"),
        ({"kind": "json_object", "opens": "<think>"}, "'grammar.after'"),
        ({"kind": "json_object", "after": ""}, "'grammar.after'"),
        ({"kind": "tool_call", "format": "yaml", "tools": [{"name": "t"}]}, "'grammar.format'"),
        ({"kind": "tool_call", "format": "xml", "tools": []}, "'grammar.tools'"),
        ({"kind": "tool_call", "format": "xml", "tools": [{"name": "t"}] * 2}, "same name"),
        ({"kind": "tool_call", "format": "xml", "tools": [{"name": "t"}], "name": "u"}, "'u'"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"not": {"type": "string"}}), '"not"'),
        (schema({"type": "strin"}), "strin"),
        (schema({"$ref": "#/$defs/none"}), "/\\$defs/none"),
        (schema({"$ref": "https://example.com/s"}), "example.com"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema(False), "[Uu]nsatisfiable"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (tagged({"type": "object", "not": {}}, "hermes"), "tool 't'.*not"),
        (tagged({"type": "object", "anyOf": []}), "tool 't'.*anyOf"),
        (tagged({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}), "tool 't'.*unique"),
        (tagged({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}), "tool 't'.*look"),
        (tagged({"type": "array"}), "tool 't'.*allows no object"),
        (tagged({"type": "string"}, "hermes"), "tool 't'.*allows no object"),
        (tagged({"type": ["string", "null"]}, "gemma4"), "tool 't'.*allows no object"),
        (tagged({"enum": ["a", 5]}, "hermes"), "tool 't'.*"),
        (tagged({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}, "gemma4"), "b' leads nowhere"),
        (tagged({"$ref": "#"}), "circle"),
        (tagged({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}]}}}), "refers to itself"),
        (tagged({"type": "object", "properties": 5}, "laguna"), "'properties'"),
        (tagged({"type": "object", "properties": {"a": 5}}, "gemma4"), "no schema"),
        (tagged({"type": "object", "properties": {"a": {"anyOf": 5}}}), "'anyOf' is a list"),
        (tagged({"type": "object", "properties": {"\ud800": {}}}), "surrogate"),
        (tagged({"properties": {"a>b": {"type": "integer"}}}, "laguna"), "tool 't'.*'a>b' has '>'"),
        (tagged({"properties": {"<a": True}}), "tool 't'.*'<a' has '<'"),
        (tagged({"properties": {"a": {"type": "object", "properties": {"b:c": {}}}}}, "gemma4"), "'b:c' has ':'"),
        (tagged({"properties": {"a ": {}}}, "gemma4"), "'a ' has ' '"),
        (tagged({"properties": {"": {}}}, "gemma4"), "the property ''"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(wanted: Any, named: str, vocabulary: Vocabulary) -> None:
    text = wanted if isinstance(wanted, str) else json.dumps(wanted)
    with pytest.raises(RequestError, match=f"(?s){named}") as caught:
        begin(text, vocabulary, ())
    assert "\n" not in caught.value.message and len(caught.value.message) < 700


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["string", "object", "#", "#/$defs/a", "", "^a$"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(
        st.sampled_from(["type", "properties", "required", "items", "anyOf", "enum", "const", "$ref", "$defs",
                         "pattern", "minLength", "maxItems", "minItems", "additionalProperties"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=200)
@given(
    schema=st.dictionaries(st.sampled_from(["type", "properties", "$ref", "required"]), JUNK),
    form=st.sampled_from(FORMATS),
)
def test_a_schema_that_is_none_ends_in_a_refusal_or_a_grammar(schema: Any, form: str, vocabulary: Vocabulary) -> None:
    try:
        state = begin(json.dumps(tagged(schema, form)), vocabulary, ())
        state.mask()
    except RequestError:
        pass


# --- through the engine -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    made = Engine(EngineConfig(model=NANO, device="cpu", threads=1, ctx_tokens=512, chunk_tokens=128))
    yield made
    assert made.loaded.kv.free_blocks == made.loaded.kv.n_blocks
    made.close()


def run(engine: Engine, request: Generate) -> tuple[list[int], Event]:
    engine.submit(request)
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    return [t for e in events if isinstance(e, Tokens) for t in e.tokens], events[-1]


COLORS = {"kind": "json_schema", "schema": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 6}}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.2, top_p=0.9, repetition_penalty=1.1, seed=4)])
def test_a_request_gets_what_its_grammar_says(engine: Engine, tokenizer: Tokenizer, sampling: Sampling) -> None:
    prompt = tuple(tokenizer.encode("def colors():\n    return "))
    free = Generate(1, prompt, 12, sampling, ())
    before = run(engine, free)[0]
    tokens, done = run(engine, Generate(2, prompt, 200, sampling, tuple(tokenizer.stop_ids), json.dumps(COLORS)))
    assert isinstance(done, Done) and done.finish_reason == "stop"
    assert Draft202012Validator(COLORS["schema"]).is_valid(json.loads(tokenizer.decode(tokens)))
    assert done.usage.completion_tokens == len(tokens)
    again = run(engine, Generate(3, prompt, 200, sampling, tuple(tokenizer.stop_ids), json.dumps(COLORS)))[0]
    assert again == tokens
    assert run(engine, free)[0] == before


def test_the_limit_cuts_a_reply_short(engine: Engine, tokenizer: Tokenizer) -> None:
    wanted = {"kind": "json_schema", "schema": {"type": "string", "minLength": 100}}
    tokens, done = run(engine, Generate(1, (5, 6, 7), 9, stop_tokens=None, grammar=json.dumps(wanted)))
    assert isinstance(done, Done) and done.finish_reason == "length" and len(tokens) == 9
    assert tokenizer.decode(tokens).startswith('"')
    exact = json.dumps({"kind": "json_schema", "schema": {"const": True}})
    n = len(tokenizer.encode("true"))
    tokens, done = run(engine, Generate(2, (5, 6, 7), n, stop_tokens=(), grammar=exact))
    assert tokenizer.decode(tokens) == "true" and done.finish_reason == "stop"


def test_a_model_is_made_to_call(engine: Engine, tokenizer: Tokenizer) -> None:
    wanted = {"kind": "tool_call", "format": "hermes", "tools": TOOLS, "name": "read", "parallel": False}
    prompt = tuple(
        tokenizer.encode("<|im_start|>user\nRead it.<|im_end|>\n<|im_start|>assistant\n", parse_special=True)
    )
    tokens, done = run(engine, Generate(1, prompt, 200, stop_tokens=None, grammar=json.dumps(wanted)))
    assert done.finish_reason == "stop"
    assert [name for name, _ in calls_of(tokenizer.decode(tokens), "hermes", TOOLS)] == ["read"]


def test_a_bad_grammar_fails_its_request_alone(engine: Engine) -> None:
    bad = json.dumps(schema({"type": "array", "uniqueItems": True}))
    engine.submit(Generate(1, (5, 6), 5, grammar=bad))
    engine.submit(Generate(2, (5, 6), 5, stop_tokens=()))
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    failed = [e for e in events if isinstance(e, Error)]
    assert [(e.id, e.code) for e in failed] == [(1, "bad_request")] and "uniqueItems" in failed[0].message
    assert [e.id for e in events if isinstance(e, Done)] == [2]


def test_a_grammar_that_does_not_bind_is_only_checked(engine: Engine) -> None:
    tokens, _ = run(engine, Generate(1, (5, 6), 9, stop_tokens=()))
    good = json.dumps(schema({"type": "string"}) | {"binds": False})
    free, _ = run(engine, Generate(2, (5, 6), 9, stop_tokens=(), grammar=good))
    assert free == tokens
    bad = json.dumps(schema({"type": "array", "uniqueItems": True}) | {"binds": False})
    _, failed = run(engine, Generate(3, (5, 6), 5, grammar=bad))
    assert isinstance(failed, Error) and failed.code == "bad_request" and "uniqueItems" in failed.message


def test_a_constrained_request_is_cancelled_within_a_step(engine: Engine) -> None:
    wanted = {"kind": "json_schema", "schema": {"type": "string", "minLength": 300}}
    engine.submit(Generate(1, (5, 6), 400, grammar=json.dumps(wanted)))
    while not any(isinstance(event, Tokens) for event in engine.step()):
        pass
    assert engine.cancel(1) and not engine.busy
    assert engine.loaded.kv.free_blocks == engine.loaded.kv.n_blocks


class Bytes:
    """A tokenizer whose tokens are bytes, and one that ends a turn."""

    vocab_size = 257

    def __init__(self) -> None:
        self.special_ids = {"<end>": 256}

    def is_control(self, name: str) -> bool:
        return name == "<end>"

    def split_special(self, text: str) -> list[str]:
        return [text]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode_bytes(self, ids: list[int]) -> bytes:
        return bytes(ids) if ids != [256] else b"<end>"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_device_draws_as_the_host_would(
    device: Any, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.name == "emulated":
        found = probe.Found(0, device.name, (8, 0), device.n_sm, device.max_shared_bytes, "", 1 << 34, None, (12, 8))
        monkeypatch.setattr(probe, "probe", lambda: found)
        monkeypatch.setattr(gpu, "open_device", lambda _: type(device)())
    drawn = []
    draw = DeviceDrawer.draw

    def compared(
        self: DeviceDrawer,
        result: StepResult,
        drawings: list[Drawing],
        follow: list[tuple[int, ...]],
        behind: Behind | None = None,
    ) -> list[list[Drawn | None]]:
        logits = result.logits[[d.row for d in drawings]].copy()
        made = draw(self, result, drawings, [()] * len(follow), behind)
        tokens = [one and one.token for (one,) in made]
        assert tokens == [
            sample(row, d.params, len(d.history), d.history, d.allowed) for row, d in zip(logits, drawings, strict=True)
        ]
        drawn.extend(tokens)
        return made

    monkeypatch.setattr(DeviceDrawer, "draw", compared)
    model = write_tiny(tmp_path / "tiny.gguf", k_quant_mix, n_layer=2, n_expert_used=3)
    made = Engine(EngineConfig(model=model, device="cuda", threads=1, ctx_tokens=130, chunk_tokens=40, poison=True))
    vocabulary = Vocabulary(Bytes(), made.loaded.source.config.n_vocab)  # type: ignore[arg-type]
    made.loaded.forms.open = lambda text, stop: FormHere(begin(text, vocabulary, stop))  # type: ignore[assignment,method-assign]
    sampling = Sampling(temperature=temperature, top_p=0.95, repetition_penalty=1.2, seed=9)
    free = Generate(1, tuple(range(20, 57)), 5, sampling, ())
    before = run(made, free)[0]
    drawn.clear()
    wanted = json.dumps({"kind": "json_schema", "schema": {"type": "array", "items": {"enum": [1, 23]}, "maxItems": 2}})
    formed = Generate(2, tuple(range(20, 57)), 60, sampling, (256,), wanted)
    with monkeypatch.context() as patched:  # where the host waits for each step
        patched.setattr("engine.running.decoding.can_mask", lambda steps, replies: False)
        tokens, done = run(made, formed)
    assert isinstance(done, Done) and done.finish_reason == "stop"
    assert set(json.loads(bytes(tokens))) <= {1, 23}
    assert drawn == tokens or drawn == [*tokens, 256]
    again, done = run(made, formed)
    assert isinstance(done, Done) and done.finish_reason == "stop"
    assert again == tokens and len(drawn) < 2 * len(tokens)
    assert run(made, free)[0] == before
    made.close()
