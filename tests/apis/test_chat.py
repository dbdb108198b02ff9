from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ground.errors import RequestError
from engine.ground.sampling import Sampling
from spark.apis import completions as api_completions
from spark.apis.chat import Writer, parse
from spark.speech.conversation import (
    AUDIO_NOTE,
    FILE_NOTE,
    IMAGE_NOTE,
    CallArguments,
    CallEnd,
    CallStart,
    Conversation,
    Finish,
    Part,
    Reasoning,
    Text,
    Usage,
)
from spark.speech.sessions import Message, ToolCall

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
ANY = {"mode": "auto", "tools": []}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


def test_a_small_request() -> None:
    chat = parse(HELLO | {"seed": 5})
    assert chat.messages == (Message("user", "hello"),) and chat.tools == () and chat.stops == ()
    assert chat.sampling == Sampling(temperature=1.0, seed=5) and chat.max_tokens is None
    assert not chat.stream and chat.reasoning == Reasoning() and chat.response_schema is None
    assert parse(HELLO).sampling.seed != parse(HELLO).sampling.seed


def test_a_request_with_everything() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "read", "arguments": "{path: a"}}
    chat = parse(
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
            "parallel_tool_calls": False,
            "reasoning_effort": "low",
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
    assert chat.stream and not chat.parallel_calls and chat.reasoning == Reasoning(True, None, "low")
    nulls = dict.fromkeys(["stop", "tools", "seed", "n", "max_tokens", "temperature", "stream", "stream_options"])
    assert parse(HELLO | nulls).messages == (Message("user", "hello"),)


def test_choices_and_forms() -> None:
    named = {"type": "function", "function": {"name": "read"}}
    assert parse(HELLO | {"tools": [TOOL, TOOL], "tool_choice": named}).tool_choice == ("name", "read")
    assert parse(HELLO | {"tools": [TOOL, TOOL]}).tools == (TOOL,)
    assert parse(HELLO | {"tools": [TOOL], "tool_choice": "required"}).tool_choice == "required"
    other = {"type": "function", "function": {"name": "look"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    asked = parse(HELLO | {"tools": [other, TOOL], "tool_choice": some})
    assert asked.tool_choice == "required" and asked.tools == (TOOL,)
    assert parse(HELLO | {"response_format": {"type": "json_object"}}).response_schema == {}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    assert parse(HELLO | {"response_format": form}).response_schema == {"type": "integer"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"reasoning_effort": "none"}, Reasoning(False, 0)),
        ({"reasoning_effort": "high"}, Reasoning(True, None, "high")),
        ({"reasoning": {"max_tokens": 0}}, Reasoning(False, 0)),
        ({"reasoning": {"max_tokens": 9}}, Reasoning(True, 9)),
        ({"reasoning": {"enabled": True}}, Reasoning(True)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Reasoning(False, 0)),
        ({"chat_template_kwargs": {"enable_thinking": True}}, Reasoning(True)),
        ({"enable_thinking": False, "reasoning_effort": "high"}, Reasoning(False, 0)),
        ({"enable_thinking": True, "reasoning_effort": "high"}, Reasoning(True, None, "high")),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, Reasoning(True)),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, Reasoning(True, 9)),
        ({"thinking": {"type": "disabled"}}, Reasoning(False, 0)),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "preserve_thinking": True}},
            Reasoning(True, preserve=True),
        ),
        ({"chat_template_kwargs": {"preserve_thinking": False}}, Reasoning(preserve=False)),
        ({"preserve_thinking": True}, Reasoning(preserve=True)),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, Reasoning(True, None, "low")),
    ],
)
def test_reasoning(change: dict, expected: Reasoning) -> None:
    assert parse(HELLO | change).reasoning == expected


def test_what_cannot_be_read_becomes_a_note() -> None:
    """A session that holds a picture goes on, as it does in the other APIs."""
    parts = [
        {"type": "text", "text": "see: "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,aGk="}},
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    ]
    expected = f"see: {IMAGE_NOTE}{FILE_NOTE}{AUDIO_NOTE}"
    for role in ("user", "tool", "system", "assistant"):
        assert parse({"messages": [{"role": role, "content": parts}]}).messages[0].content == expected


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
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user"}] * 20000}, "messages"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [TOOL] * 2000}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": ANY}}, "tool_choice.allowed_tools.tools"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 0}, "stop"),
        ({"stop": False}, "stop"),
        ({"stop": ["x", 1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": 10**400}, "n"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"presence_penalty": -(10**400)}, "presence_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"reasoning_effort": "great"}, "reasoning_effort"),
        ({"reasoning": {"effort": "great"}}, "reasoning.effort"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"enable_thinking": 1}, "enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"reasoning_effort": "great"}}, "chat_template_kwargs.reasoning_effort"),
        ({"functions": [{}]}, "functions"),
    ],
)
def test_a_bad_field_is_named(change: dict, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(HELLO | change)
    assert named in caught.value.message
    assert caught.value.field is not None and caught.value.field.startswith(named.removesuffix(": missing"))


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


@pytest.mark.slow
@given(
    st.fixed_dictionaries(
        {"messages": MESSAGES | JSON},
        optional={"tools": JSON, "stop": JSON, "seed": JSON, "temperature": JSON, "n": JSON, "stream": JSON},
    )
)
def test_any_body_is_a_request_or_refused(body: dict) -> None:
    try:
        chat = parse(body)
    except RequestError:
        return
    assert chat.messages and all(isinstance(message.content, str) for message in chat.messages)


PARTS: list[Part] = [
    Text("reasoning", "hm"), Text("content", "so"), Text("content", " it is"),
    CallStart("call_1", "read"), CallArguments('{"n"'), CallArguments(": 1}"), CallEnd(),
]  # fmt: skip
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"n": 1}'}}
FINISH = Finish("tool_calls", Usage(11, 7, cached=8, reasoning=2))
USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 7,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {
        "reasoning_tokens": 2, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
    },
}  # fmt: skip


def test_a_completion() -> None:
    made = Writer("m", {}, Conversation()).whole(PARTS, FINISH)
    assert made["object"] == "chat.completion" and made["model"] == "m" and made["usage"] == USAGE
    (choice,) = made["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["index"] == 0
    expected = {"role": "assistant", "content": "so it is", "reasoning_content": "hm", "tool_calls": [CALL]}
    assert choice["message"] == expected
    assert Writer("m", {}, Conversation()).whole([], FINISH)["choices"][0]["message"]["content"] == ""
    assert Writer("m", {}, Conversation()).whole(PARTS[3:], FINISH)["choices"][0]["message"]["content"] is None


def read(stream: bytes) -> list[dict]:
    """The objects of a stream that ends well."""
    *blocks, done, rest = stream.decode().split("\n\n")
    assert done == "data: [DONE]" and rest == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_chunks() -> None:
    writer = Writer("m", {"stream_options": {"include_usage": True}}, Conversation())
    more: list[Part] = [CallStart("call_2", "now"), CallArguments("{}"), CallEnd()]
    made = read(writer.start(11) + b"".join(map(writer.part, [*PARTS, *more])) + writer.end(FINISH))
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in made}) == 1
    assert made[-1]["choices"] == [] and made[-1]["usage"] == USAGE
    assert all(chunk["usage"] is None for chunk in made[:-1])

    def call(index: int, **more: object) -> dict:
        return {"tool_calls": [{"index": index, **more}]}

    def begun(name: str) -> dict:
        return {"type": "function", "function": {"name": name, "arguments": ""}}

    assert [chunk["choices"][0]["delta"] for chunk in made[:-1]] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "so"},
        {"content": " it is"},
        call(0, id="call_1", **begun("read")),
        call(0, function={"arguments": '{"n"'}),
        call(0, function={"arguments": ": 1}"}),
        call(1, id="call_2", **begun("now")),
        call(1, function={"arguments": "{}"}),
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in made[:-1]] == [None] * 9 + ["tool_calls"]
    assert b'"usage"' not in Writer("m", {}, Conversation()).start(1)


# --- completions ----------------------------------------------------------------------------------


def test_completions() -> None:
    asked = api_completions.parse({"prompt": "once", "max_tokens": 3, "stop": "x", "seed": 1})
    assert asked.raw == "once" and asked.max_tokens == 3 and asked.stops == ("x",)
    assert (
        api_completions.parse({"prompt": [[1, 2]]}).raw == (1, 2)
        and api_completions.parse({"prompt": ["a"]}).raw == "a"
    )
    assert api_completions.parse({"prompt": [1, 2]}).max_tokens == 16
    bad: list[dict] = [
        {}, {"prompt": ""}, {"prompt": []}, {"prompt": [1, True]}, {"prompt": {}},
        {"prompt": "a", "echo": True}, {"prompt": "a", "n": 9}, {"prompt": "a", "suffix": "b"},
        {"prompt": ["a", ""]}, {"prompt": ["a", 1]}, {"prompt": [[1], []]}, {"prompt": ["a"] * 33},
        {"prompt": ["a"] * 5, "n": 8}, {"prompt": "a", "logprobs": True}, {"prompt": "a", "logprobs": 21},
        {"prompt": "a", "best_of": 2}, {"prompt": "a", "best_of": True}, {"prompt": "a", "logit_bias": {"1": 1}},
    ]  # fmt: skip
    for body in bad:
        with pytest.raises(RequestError) as caught:
            api_completions.parse(body)
        assert caught.value.field is not None and caught.value.field.split("[")[0] in (*body, "prompt")
    several = api_completions.parse({"prompt": ["a", [1, 2]], "n": 2, "best_of": 2, "logprobs": 0, "seed": 1})
    assert [one.raw for one in several.apart()] == ["a", (1, 2)] and several.replies == 4 and several.logprobs == 0
    assert several.choice(0) is several and several.choice(1).sampling.seed == 0xD6B5915C46057BCB
    assert api_completions.parse({"prompt": "a", "logprobs": False}).logprobs is None


def test_a_streamed_completion() -> None:
    writer = api_completions.Writer("m", {"stream_options": {"include_usage": True}}, Conversation())
    made = read(writer.start(11) + writer.part(Text("content", "a")) + writer.end(Finish("length", Usage(11, 7, 8, 2))))
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in made[:-1]] == [
        ("a", None),
        ("", "length"),
    ]
    assert made[-1]["usage"] == USAGE and {chunk["object"] for chunk in made} == {"text_completion"}
