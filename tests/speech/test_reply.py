from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.template import PLAIN, ChatTemplate
from spark.speech.calls import JSONObject
from spark.speech.conversation import CallArguments, CallEnd, CallStart, Part, Text, WholeCall, whole
from spark.speech.dialect import CallFormat, Dialect, learn
from spark.speech.reply import ReplyParser
from spark.speech.tool_values import coerced, types

GOLDEN = Path(__file__).parents[1] / "golden"
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "n": {"type": "integer"},
        "deep": {"type": "object"},
        "all": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"$ref": "#/$defs/l"},
    },
    "$defs": {"l": {"type": "array"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "read", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
DIALECTS: dict[CallFormat, Dialect] = {
    "hermes": Dialect(),
    "xml": Dialect("xml"),
    "laguna": Dialect("laguna"),
    "gemma4": Dialect("gemma4", "<|channel>thought", "<channel|>"),
}


def take(
    pieces: list[str], form: CallFormat = "hermes", *, tools: bool = True, cut: bool = False, **more: Any
) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """Reasoning, content, calls and the stop string that came."""
    parser = ReplyParser(DIALECTS[form], tools=TOOLS if tools else (), **more)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush(cut)
    check(parts)
    written = "".join(pieces)
    for part in parts:
        assert not isinstance(part, Text) or written[part.at : part.at + len(part.text)] == part.text
    texts = {"reasoning": "", "content": ""}
    calls = []
    for part in whole(parts):
        if isinstance(part, Text):
            texts[part.kind] += part.text
        else:
            calls.append((part.name, part.arguments))
    ends = [part.complete for part in parts if isinstance(part, CallEnd)]
    assert parser.called == any(ends) and (parser.cut == (bool(ends) and not ends[-1]) or cut)
    return texts["reasoning"], texts["content"], calls, parser.stop


def check(parts: list[Part]) -> None:
    """Starts, arguments and ends come in order; arguments are JSON, or begin it."""
    inside, text = False, ""
    for part in parts:
        if isinstance(part, Text):
            assert part.text and not inside
        elif isinstance(part, CallStart):
            assert not inside and part.name and part.id.startswith("call_")
            inside, text = True, ""
        elif isinstance(part, CallArguments):
            assert part.text and inside
            text += part.text
            jiter.from_json(text.encode(errors="replace"), partial_mode=True)  # as clients read it while it comes
        else:
            assert inside
            inside = False
            if part.complete:
                assert isinstance(json.loads(text), dict)
    assert not inside


CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py", "n": 3}}\n</tool_call>'
READ = ("read", '{"path": "a.py", "n": 3}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", "", [])),
        ("  plain text\n ", ("", "  plain text\n ", [])),
        ("<think>\nhm\n</think>\n\nyes\n", ("hm", "yes\n", [])),
        ("\n <think>hm</think>", ("hm", "", [])),
        ("<think></think>yes", ("", "yes", [])),
        ("<think>\nwithout end\n", ("without end", "", [])),
        ("yes <think>no</think>", ("", "yes <think>no</think>", [])),
        ("<think>a</think> <think>b</think>", ("a", "<think>b</think>", [])),
        (CALL, ("", "", [READ])),
        (f"I read it.\n{CALL}\n{CALL}\n", ("", "I read it.", [READ, READ])),
        (f"{CALL}\nand then\n", ("", "and then\n", [READ])),
        (f"<think>\nhm\n</think>\n\n{CALL}", ("hm", "", [READ])),
        ("<think>\nnot <tool_call> here</think>x", ("not <tool_call> here", "x", [])),
        ('<tool_call>{"name":"f"}</tool_call>', ("", "", [("f", "{}")])),
        ('<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
        ('<tool_call>{"name":"f","arguments":{"s":"a\nb"}}</tool_call>', ("", "", [("f", '{"s":"a\\nb"}')])),
        ('<tool_call>{"name":"f","arguments":{"s":"\\d</tool_call>"}}</tool_call>',
         ("", "", [("f", '{"s":"\\\\d</tool_call>"}')])),
        ('<tool_call>{"name":"f","arguments":{"s":[True,-1.5e3,None]}}</tool_call>',
         ("", "", [("f", '{"s":[true,-1.5e3,null]}')])),
        ('<tool_call>{"name":"f","arguments":{}}', ("", "", [("f", "{}")])),
        ('<tool_call>{"name":"f","arguments":{"s":"a', ("", "", [("f", '{"s":"a')])),
        ('<tool_call>{"name":"f","arguments":{"s":"say "hi""}}</tool_call>x', ("", "x", [("f", '{"s":"say "')])),
        ("x<tool_call>{nonsense}</tool_call>y", ("", "x<tool_call>{nonsense}</tool_call>y", [])),
        ("x <tool_call> {nonsense}</tool_call> y", ("", "x <tool_call> {nonsense}</tool_call> y", [])),
        ('<tool_call>{"name":3}</tool_call>', ("", '<tool_call>{"name":3}</tool_call>', [])),
        ('<tool_call>{"name":"f","arguments":[1]}', ("", '<tool_call>{"name":"f","arguments":[1]}', [])),
        ('<tool_call>{"name":"f","arguments":NaN}', ("", '<tool_call>{"name":"f","arguments":NaN}', [])),
        ("<tool_call>[]</tool_call>", ("", "<tool_call>[]</tool_call>", [])),
        ("<tool_cal", ("", "<tool_cal", [])),
        ("a < b", ("", "a < b", [])),
    ],
)  # fmt: skip
def test_replies(text: str, expected: tuple) -> None:
    assert take([text]) == (*expected, None)
    assert take(list(text)) == (*expected, None)


def xml(*fields: tuple[str, str], name: str = "read") -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in fields)
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def laguna(*fields: tuple[str, str], name: str = "read") -> str:
    written = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in fields)
    return f"<tool_call>{name}\n{written}</tool_call>"


@pytest.mark.parametrize("write", [xml, laguna])
def test_bare_values(write: Any) -> None:
    form: CallFormat = "xml" if write is xml else "laguna"

    def one(*fields: tuple[str, str], name: str = "read") -> Any:
        text = f"Now.\n{write(*fields, name=name)}\n"
        whole_text, letters = take([text], form), take(list(text), form)
        assert whole_text == letters and whole_text[1] == "Now." and whole_text[0] == ""
        ((called, arguments),) = whole_text[2]
        assert called == name
        return json.loads(arguments)

    assert one() == {} and one(name="now") == {}
    assert one(("path", "a.py"), ("n", "3")) == {"path": "a.py", "n": 3}
    assert one(("path", "3"), ("deep", '{"a": [1]}'), ("all", "True")) == {"path": "3", "deep": {"a": [1]}, "all": True}
    assert one(("n", "many"), ("all", "maybe"), ("list", "[1, 2]")) == {"n": "many", "all": "maybe", "list": [1, 2]}
    assert one(("n", "3.0")) == {"n": 3} and one(("n", "3.5")) == {"n": "3.5"} and one(("n", "1e999")) == {"n": "1e999"}
    assert one(("maybe", "null")) == {"maybe": None} and one(("maybe", "5")) == {"maybe": "5"}
    assert one(("unknown", "5")) == {"unknown": "5"}
    lines = '  two\n\n  "lines" \\ \t</parameter> </arg_value> <tool_call> \u00e9 '
    assert one(("path", lines)) == {"path": lines}
    assert one(("path", ""), ("n", "1")) == {"path": "", "n": 1}


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (
            "xml",
            "<function=read>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call> x",
            ("", "x", [("read", '{"n": 1}')]),
        ),
        ("xml", "<function=else>\n</function>", ("", "<function=else>\n</function>", [])),
        ("xml", "<tool_call>\n<function=now>\n</tool_call>x", ("", "x", [("now", "{}")])),
        (
            "xml",
            "<tool_call><function=now></function><function=now></function></tool_call>",
            ("", "", [("now", "{}")] * 2),
        ),
        ("xml", "<tool_call>\n<function=read>\n<parameter=n>\n1\n</parameter>", ("", "", [("read", '{"n": 1}')])),
        (
            "xml",
            "<tool_call>\n<function=read>\n<parameter=path>\n1\n</par",
            ("", "", [("read", '{"path": "1\\n</par')]),
        ),
        ("xml", f"a {CALL} b", ("", f"a {CALL} b", [])),
        ("xml", "a <tool_call>\nI call </tool_call> b", ("", "a <tool_call>\nI call </tool_call> b", [])),
        ("xml", "<tool_call><function=now>hm</tool_call>", ("", "<tool_call><function=now>hm</tool_call>", [])),
        ("laguna", "a <tool_call>hello</tool_call> b", ("", "a <tool_call>hello</tool_call> b", [])),
        (
            "laguna",
            "<tool_call>read\n<arg_key>n</arg_key>1</tool_call>b",
            ("", "<tool_call>read\n<arg_key>n</arg_key>1</tool_call>b", []),
        ),
        (
            "laguna",
            "<tool_call>x\n<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
            ("", "", [("x", '{"n": "1"}')]),
        ),
        (
            "gemma4",
            '<|channel>thought\nhm\n<channel|>so<|tool_call>call:read{path:<|"|>a"\n<tool_call|><|"|>,n:3}<tool_call|>',
            ("hm", "so", [("read", '{"path":"a\\"\\n<tool_call|>","n":3 }')]),
        ),
        (
            "gemma4",
            '<|tool_call>call:f{a:[1,<|"|>x<|"|>,{b:true}],c:word,d:None}<tool_call|>',
            ("", "", [("f", '{"a":[1 ,"x",{"b":true }],"c":"word","d":null }')]),
        ),
        (
            "gemma4",
            "<|tool_call>call:f{filter[a,b]:1, {c} d:2}<tool_call|>",
            ("", "", [("f", '{"filter[a,b]":1 , ')]),
        ),
        (
            "gemma4",
            "<|tool_call>call:f{filter[a,b]:1, c{d}:2,e}f:[4]}<tool_call|>",
            ("", "", [("f", '{"filter[a,b]":1 , "c{d}":2 ,"e}f":[4 ]}')]),
        ),
        ("gemma4", "<|tool_call>call:now{}<tool_call|> x", ("", "x", [("now", "{}")])),
        ("gemma4", "<|tool_call>now<tool_call|>x", ("", "<|tool_call>now<tool_call|>x", [])),
        ("gemma4", "<|tool_call>call:f{a:<tool_call|>x", ("", "", [("f", '{"a":')])),
    ],
)
def test_other_formats(form: CallFormat, text: str, expected: tuple) -> None:
    assert take([text], form) == (*expected, None)
    assert take(list(text), form) == (*expected, None)


def test_a_call_that_was_cut_is_not_whole() -> None:
    text = "<tool_call>\n<function=read>\n<parameter=n>\n1\n</parameter>"
    assert take([text], "xml", cut=True)[2] == [("read", '{"n": 1')]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "re'),
        ("hermes", '<tool_call>{"arguments": {"path": "a'),
        ("xml", "<tool_call>\n<func"),
        ("xml", "<tool_call>\n<function=re"),
        ("xml", "<tool_call>\n<function=read>\n<parameter=pa"),
        ("xml", "<function=read>\n<para"),
        ("laguna", "<tool_call>re"),
        ("laguna", "<tool_call>read\n<arg_key>pa"),
        ("gemma4", "<|tool_call>ca"),
        ("gemma4", "<|tool_call>call:re"),
    ],
)
def test_a_call_that_was_cut_before_it_has_a_name_is_no_text(form: CallFormat, text: str) -> None:
    """In pieces or not, at any place; what only looks like a call is text there too."""
    opening = text[: text.index(">") + 1]
    for size in range(len("<tool_call>" if form != "gemma4" else "<|tool_call>"), len(text) + 1):
        cut = text[:size] if text.startswith(("<tool_call>", "<|tool_call>")) else text
        for pieces in ([f"Well. {cut}"], list(f"Well. {cut}")):
            assert take(pieces, form, cut=True) == ("", "Well.", [], None)
    for looks in (f"{opening} is how calls begin", f"{opening}</b> and"):
        if opening.endswith("tool_call>"):
            assert take([looks], form, cut=True) == ("", looks, [], None)
    parser = ReplyParser(DIALECTS[form], tools=TOOLS)
    parser.push(text)
    parser.flush(cut=True)
    assert parser.cut and not parser.called


@pytest.mark.parametrize("form", sorted(DIALECTS))
def test_where_there_is_to_be_a_call_the_beginning_of_its_mark_is_no_text(form: CallFormat) -> None:
    mark = "<|tool_call>" if form == "gemma4" else "<tool_call>"
    for size in range(1, len(mark)):
        assert take([mark[:size]], form, cut=True, calls_only=True) == ("", "", [], None)
        assert take([mark[:size]], form, cut=True)[1] == mark[:size]


def test_arguments_are_streamed() -> None:
    for form, text in (
        ("hermes", '<tool_call>{"name": "read", "arguments": {"path": "abc'),
        ("xml", "<tool_call>\n<function=read>\n<parameter=path>\nabc"),
        ("laguna", "<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>abc"),
        ("gemma4", '<|tool_call>call:read{path:<|"|>abc'),
    ):
        (call,) = whole(ReplyParser(DIALECTS[form], tools=TOOLS).push(text))  # type: ignore[index]
        assert isinstance(call, WholeCall) and call.name == "read", form
        assert call.arguments.replace(" ", "") == '{"path":"abc', form


def test_tool_calls_are_text_where_there_are_no_tools() -> None:
    assert take([f"x {CALL} "], tools=False) == ("", f"x {CALL} ", [], None)


def test_a_single_call_ends_the_reply() -> None:
    assert take([f"x\n{CALL}\n{CALL} y"], single_call=True) == ("", "x", [READ], None)


def test_thinking_may_begin_in_the_prompt() -> None:
    assert take(["hm\n</think>\n\nyes"], thinking="open") == ("hm", "yes", [], None)
    assert take(["<think> hm"], thinking="open") == ("<think> hm", "", [], None)
    assert take(["\n\nyes "], thinking="shut") == ("", "yes ", [], None)
    assert take(["\n\n", "yes "], thinking="begun") == ("", "\n\nyes ", [], None)


@pytest.mark.parametrize(
    ("text", "stops", "content", "stop"),
    [
        ("one two three", ("two",), "one ", "two"),
        ("one\n\ntwo", ("\n\n",), "one", "\n\n"),
        ("one\n\ntwo", ("three", "\ntwo"), "one\n", "\ntwo"),
        ("abcXYZ", ("abcXYZ", "cX"), "ab", "cX"),
        ("aaab", ("aab",), "a", "aab"),
        ("no stop her", ("here",), "no stop her", None),
        ("<think>stop here</think>go on, stop", ("stop",), "go on, ", "stop"),
        ("END", ("END",), "", "END"),
    ],
)
def test_stop_strings(text: str, stops: tuple[str, ...], content: str, stop: str | None) -> None:
    for pieces in ([text], list(text)):
        assert take(pieces, stops=stops)[1:] == (content, [], stop)


def test_nothing_comes_after_a_stop_string() -> None:
    parser = ReplyParser(Dialect(), stops=["stop"], tools=TOOLS)
    assert parser.push("go stop " + CALL) == [Text("content", "go"), Text("content", " ")]
    assert parser.push("more") == [] and parser.flush() == []


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    parser = ReplyParser(Dialect(), stops=["END"], tools=TOOLS)
    assert parser.push("Hello") == [Text("content", "Hello")]
    assert parser.push(", E") == [Text("content", ",")]
    assert parser.push("ve.") == [Text("content", " Eve.")]


def test_each_call_has_an_id_of_its_own() -> None:
    one, two = whole(ReplyParser(Dialect(), tools=TOOLS).push(CALL + CALL))
    assert isinstance(one, WholeCall) and isinstance(two, WholeCall) and one.id != two.id


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "read", "arguments": {"path": "', '"}}',
    '{"name": "f", "arguments": {"x": [1, true]}}', "\\", "\\u12", "<function=read>", "<function=now>",
    "<parameter=path>", "<parameter=n>", "</parameter>", "</function>", "<arg_key>path</arg_key>", "<arg_key>n",
    "</arg_key>", "<arg_value>", "</arg_value>", "read", "<|tool_call>", "call:read{", "path:", '<|"|>', "}", ",",
    "<tool_call|>", "<|channel>thought", "<channel|>", "<", "th", "tool_call>", "STOP", "ST", "OP", " ", "\n", "word",
    "{", "\u00e9", "3", "true",
]  # fmt: skip


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.data(),
    st.sampled_from(sorted(DIALECTS)),
    st.sampled_from([(), ("STOP",), ("\n", "OPw"), ("<tool_call", " ")]),
    st.booleans(),
    st.sampled_from(["open", "shut", ""]),
    st.booleans(),
)
def test_how_a_reply_is_cut_changes_nothing(
    text: str, data: st.DataObject, form: CallFormat, stops: tuple[str, ...], tools: bool, thinking: str, cut: bool
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    uncut = take([text], form, stops=stops, tools=tools, thinking=thinking, cut=cut)
    assert take(pieces, form, stops=stops, tools=tools, thinking=thinking, cut=cut) == uncut


VALUES = st.text(alphabet=st.sampled_from('ab <>/="\\\n\u00e9{}'), max_size=12)
KEYS = st.sampled_from(["path", "filter[a,b]", "c {d}"])


@given(st.lists(st.tuples(KEYS, VALUES), max_size=3, unique_by=lambda f: f[0]), st.data())
def test_what_is_written_is_read(fields: list[tuple[str, str]], data: st.DataObject) -> None:
    hermes = json.dumps({"name": "read", "arguments": dict(fields)})
    gemma = ",".join(f'{key}:<|"|>{value}<|"|>' for key, value in fields)
    for form, text in (
        ("hermes", f"<tool_call>{hermes}</tool_call>"),
        ("xml", xml(*fields)),
        ("laguna", laguna(*fields)),
        ("gemma4", f"<|tool_call>call:read{{{gemma}}}<tool_call|>"),
    ):
        cut = data.draw(st.integers(0, len(text)))
        _, content, ((name, arguments),), _ = take([text[:cut], text[cut:]], form)  # type: ignore[arg-type]
        assert (name, content, json.loads(arguments)) == ("read", "", dict(fields)), form


@pytest.mark.parametrize("value", ["\n", "\n\n", "\na\n", "", "a\n\n"])
def test_line_breaks_of_a_value_are_its_own_wherever_a_token_ends(value: str) -> None:
    text = xml(("path", value))
    for cut in range(len(text) + 1):
        _, _, ((_, arguments),), _ = take([text[:cut], text[cut:]], "xml")
        assert json.loads(arguments) == {"path": value}, cut


@given(st.text(alphabet="abc <>\n"), st.booleans())
def test_text_without_marks_is_kept_as_it_is(text: str, tools: bool) -> None:
    assert take(list(text), tools=tools) == ("", text, [], None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=3), st.booleans(), st.text(max_size=3))
def test_valid_json_stays_as_it_is(value: dict, ascii_only: bool, rest: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    for pieces in ([text + rest], [*text, rest]):
        reader = JSONObject()
        assert "".join(map(reader.push, pieces)) == text and reader.done
    assert reader.rest == rest


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=3), st.data())
def test_what_is_given_out_is_json_if_it_ends(value: dict, data: st.DataObject) -> None:
    """Of an object in which characters were changed."""
    text = list(json.dumps(value))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(1, len(text)))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(st.text(alphabet='{}[]",:\\u0a1-. tn\n', max_size=2))
    reader = JSONObject()
    made = reader.push("".join(text) + "}")
    if reader.done:
        json.loads(made)


def test_types_of_values() -> None:
    schema = {"properties": {"a": {"enum": [1, "x"]}, "b": {"$ref": "#/properties/b"}, "c": True, "d": {"const": None}}}
    assert types(schema, "a") == {"integer", "string"} and types(schema, "d") == {"null"}
    assert types(schema, "b") == types(schema, "c") == types(schema, "e") == types({"properties": 3}, "x") == set()
    assert coerced(" 5 ", frozenset({"number"})) == "5" and coerced("NaN", frozenset({"number"})) == '"NaN"'


def test_dialects_come_from_templates() -> None:
    def dialect(name: str) -> Dialect:
        return learn(ChatTemplate((GOLDEN / f"{name}.jinja").read_text(), "", "<end>"))

    assert dialect("qwen35") == Dialect("xml", knows_thinking=True)
    assert dialect("laguna") == Dialect("laguna", knows_thinking=True)
    assert dialect("gemma4") == Dialect("gemma4", "<|channel>thought", "<channel|>", knows_thinking=True)


def test_names_that_calls_could_not_be_read_back_with() -> None:
    for form in ("hermes", "xml", "laguna", "gemma4"):
        made = Dialect(form)  # type: ignore[arg-type]
        assert made.amiss("mcp__files.read-all/v1:x") is None
        assert made.amiss("a<think>") == "<think>" and made.amiss("</tool_call>") == "</tool_call>"
        assert (made.amiss("a b"), made.amiss("a<b")) == ((None, None) if form == "hermes" else (" ", "<"))
    assert Dialect("gemma4").amiss("a}") == "}" and Dialect("xml").amiss("a{b}") is None
    assert learn(ChatTemplate(PLAIN, "", "")) == Dialect(thinks=False)
    nano = (Path(__file__).parents[2] / "data/nano/template.jinja").read_text()
    assert learn(ChatTemplate(nano, "", "")) == Dialect()
    assert learn(ChatTemplate("{{ raise_exception('no') }}", "", "")).calls == "hermes"
    assert learn(ChatTemplate("{{ reasoning_effort }}", "", "")).knows_effort
