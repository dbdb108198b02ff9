from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark.reply import Call, ReplyParser, Text


def take(
    pieces: list[str], *, stops: tuple[str, ...] = (), tools: bool = True, thinking: bool = False
) -> tuple[str, str, list[tuple[str, dict]], bool]:
    """Reasoning, content, calls and whether a stop string came."""
    parser = ReplyParser(stops=stops, tools=tools, thinking=thinking)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    texts = {"reasoning": "", "content": ""}
    calls = []
    for part in parts:
        if isinstance(part, Text):
            assert part.text
            texts[part.kind] += part.text
        else:
            calls.append((part.name, json.loads(part.arguments)))
    assert parser.called == bool(calls)
    return texts["reasoning"], texts["content"], calls, parser.stopped


CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py", "n": 3}}\n</tool_call>'
READ = ("read", {"path": "a.py", "n": 3})


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
        ('<tool_call>{"name":"f"}</tool_call>', ("", "", [("f", {})])),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', ("", "", [("f", {"a": 1})])),
        ('<tool_call>{"name":"f","arguments":{"s":"a\nb"}}</tool_call>', ("", "", [("f", {"s": "a\nb"})])),
        ('<tool_call>{"name":"f","arguments":{}}', ("", "", [("f", {})])),
        ("x<tool_call>{nonsense}</tool_call>y", ("", "x<tool_call>{nonsense}</tool_call>y", [])),
        ('<tool_call>{"name":3}</tool_call>', ("", '<tool_call>{"name":3}</tool_call>', [])),
        ('<tool_call>{"name":"f","arguments":[1]}', ("", '<tool_call>{"name":"f","arguments":[1]}', [])),
        ("<tool_call>[]</tool_call>", ("", "<tool_call>[]</tool_call>", [])),
        ("<tool_cal", ("", "<tool_cal", [])),
        ("a < b", ("", "a < b", [])),
    ],
)
def test_replies(text: str, expected: tuple) -> None:
    assert take([text]) == (*expected, False)
    assert take(list(text)) == (*expected, False)


def test_tool_calls_are_text_where_there_are_no_tools() -> None:
    assert take([f"x {CALL} "], tools=False) == ("", f"x {CALL} ", [], False)


def test_thinking_may_begin_in_the_prompt() -> None:
    assert take(["hm\n</think>\n\nyes"], thinking=True) == ("hm", "yes", [], False)
    assert take(["<think> hm"], thinking=True) == ("<think> hm", "", [], False)


@pytest.mark.parametrize(
    ("text", "stops", "content"),
    [
        ("one two three", ("two",), "one "),
        ("one\n\ntwo", ("\n\n",), "one"),
        ("one\n\ntwo", ("three", "\ntwo"), "one\n"),
        ("abcXYZ", ("abcXYZ", "cX"), "ab"),
        ("aaab", ("aab",), "a"),
        ("no stop her", ("here",), "no stop her"),
        ("<think>stop here</think>go on, stop", ("stop",), "go on, "),
        ("END", ("END",), ""),
    ],
)
def test_stop_strings(text: str, stops: tuple[str, ...], content: str) -> None:
    stopped = content != text
    for pieces in ([text], list(text)):
        assert take(pieces, stops=stops)[1:] == (content, [], stopped)


def test_nothing_comes_after_a_stop_string() -> None:
    parser = ReplyParser(stops=["stop"], tools=True)
    assert parser.push("go stop " + CALL) == [Text("content", "go"), Text("content", " ")]
    assert parser.push("more") == [] and parser.flush() == []


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    parser = ReplyParser(stops=["END"], tools=True)
    assert parser.push("Hello") == [Text("content", "Hello")]
    assert parser.push(", E") == [Text("content", ",")]
    assert parser.push("ve.") == [Text("content", " Eve.")]


def test_each_call_has_an_id_of_its_own() -> None:
    parser = ReplyParser(tools=True)
    one, two = parser.push(CALL + CALL)
    assert isinstance(one, Call) and isinstance(two, Call) and one.id != two.id


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"x": 1}}',
     "<", "th", "tool_call>", "STOP", "ST", "OP", " ", "\n", "word", "{", "\u00e9"]
)  # fmt: skip


@given(
    st.lists(FRAGMENTS, max_size=12).map("".join),
    st.data(),
    st.sampled_from([(), ("STOP",), ("\n", "OPw"), ("<tool_call", " ")]),
    st.booleans(),
    st.booleans(),
)
def test_how_a_reply_is_cut_changes_nothing(
    text: str, data: st.DataObject, stops: tuple[str, ...], tools: bool, thinking: bool
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = take([text], stops=stops, tools=tools, thinking=thinking)
    assert take(pieces, stops=stops, tools=tools, thinking=thinking) == whole


@given(st.text(alphabet="abc <>\n"), st.booleans())
def test_text_without_markers_is_kept_as_it_is(text: str, tools: bool) -> None:
    assert take(list(text), tools=tools) == ("", text, [], False)
