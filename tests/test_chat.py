from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.protocol import Sampling
from spark.chat import Finish, Formatter, parse_chat
from spark.reply import Call, Text
from spark.sessions import Message, ToolCall

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


def test_a_small_request() -> None:
    chat = parse_chat(HELLO | {"seed": 5})
    assert chat.messages == (Message("user", "hello"),) and chat.tools == () and chat.stops == ()
    assert chat.sampling == Sampling(temperature=1.0, seed=5) and chat.max_tokens is None
    assert not chat.stream and not chat.include_usage
    assert parse_chat(HELLO).sampling.seed != parse_chat(HELLO).sampling.seed


def test_a_request_with_everything() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "read", "arguments": "{path: a"}}
    chat = parse_chat(
        {
            "model": "any",
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call, broken]},
                {"role": "tool", "tool_call_id": "c1", "content": "text of a"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 40,
            "min_p": 0.1,
            "seed": -1,
            "max_tokens": 9,
            "max_completion_tokens": 7,
            "stop": ["a", "b"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": 1,
            "frequency_penalty": 0.0,
            "presence_penalty": 0,
            "logit_bias": {},
            "response_format": {"type": "text"},
            "logprobs": False,
            "user": "somebody",
            "parallel_tool_calls": True,
        }
    )
    assert chat.messages == (
        Message("system", "be brief"),
        Message("user", "ab"),
        Message(
            "assistant",
            reasoning="hm",
            tool_calls=(ToolCall("c1", "read", {"path": "a"}), ToolCall("c2", "read", {"input": "{path: a"})),
        ),
        Message("tool", "text of a", tool_call_id="c1"),
    )
    assert chat.tools == (TOOL,) and chat.stops == ("a", "b") and chat.max_tokens == 7
    assert chat.sampling == Sampling(temperature=0.0, top_k=40, top_p=0.5, min_p=0.1, seed=(1 << 64) - 1)
    assert chat.stream and chat.include_usage
    assert parse_chat(HELLO | {"tools": [TOOL], "tool_choice": "none"}).tools == ()
    nulls = dict.fromkeys(["stop", "tools", "seed", "n", "max_tokens", "temperature", "stream", "stream_options"])
    assert parse_chat(HELLO | nulls).messages == (Message("user", "hello"),)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": None}, "messages: missing"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"n": 2}, "n:"),
        ({"logprobs": True}, "logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": [{}]}, "functions"),
    ],
)
def test_a_bad_field_is_named(change: dict, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat(HELLO | change)
    assert named in caught.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | JSON},
        optional={"content": JSON, "tool_calls": JSON, "tool_call_id": JSON, "reasoning": JSON},
    ),
    max_size=3,
)


@given(
    st.fixed_dictionaries(
        {"messages": MESSAGES | JSON},
        optional={"tools": JSON, "stop": JSON, "seed": JSON, "temperature": JSON, "n": JSON, "stream": JSON},
    )
)
def test_any_body_is_a_request_or_refused(body: dict) -> None:
    try:
        chat = parse_chat(body)
    except RequestError:
        return
    assert chat.messages and all(isinstance(message.content, str) for message in chat.messages)


FINISH = Finish("stop", 11, 7)
PARTS = [Text("reasoning", "hm"), Text("content", "so"), Text("content", " it is"), Call("c1", "read", '{"n": 1}')]
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"n": 1}'}}
USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


def test_a_completion() -> None:
    made = Formatter("m").completion(PARTS, FINISH)
    assert made["object"] == "chat.completion" and made["model"] == "m" and made["usage"] == USAGE
    (choice,) = made["choices"]
    assert choice["finish_reason"] == "stop" and choice["index"] == 0
    expected = {"role": "assistant", "content": "so it is", "reasoning_content": "hm", "tool_calls": [CALL]}
    assert choice["message"] == expected
    assert Formatter("m").completion([], FINISH)["choices"][0]["message"]["content"] == ""
    assert Formatter("m").completion(PARTS[-1:], FINISH)["choices"][0]["message"]["content"] is None


def test_chunks() -> None:
    formatter = Formatter("m", include_usage=True)
    parts = [*PARTS, Call("c2", "read", "{}")]
    made = [formatter.start(), *map(formatter.chunk, parts), formatter.end(FINISH), formatter.usage(FINISH)]
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in made}) == 1
    assert made[-1]["choices"] == [] and made[-1]["usage"] == USAGE
    assert all(chunk["usage"] is None for chunk in made[:-1])
    deltas = [chunk["choices"][0]["delta"] for chunk in made[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:4] == [{"reasoning_content": "hm"}, {"content": "so"}, {"content": " it is"}]
    assert deltas[4] == {"tool_calls": [{"index": 0, **CALL}]} and deltas[5]["tool_calls"][0]["index"] == 1
    assert deltas[6] == {} and made[6]["choices"][0]["finish_reason"] == "stop"
    assert [chunk["choices"][0]["finish_reason"] for chunk in made[:6]] == [None] * 6
    assert "usage" not in Formatter("m").start()
    json.dumps(made)
