from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from engine.ground.errors import ContextOverflowError, DaemonError, RequestError
from spark.apis.messages import Writer, kept, parse, parse_count
from spark.server.prompts import PromptTooLongError
from spark.speech.conversation import (
    AUDIO_NOTE,
    FILE_NOTE,
    IMAGE_NOTE,
    VIDEO_NOTE,
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

HELLO = {"max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
TOOL = {
    "name": "read",
    "description": "reads",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}
FORM = {"type": "json_schema", "schema": {"type": "integer"}}
OURS = {"type": "function", "function": {"name": "read", "description": "reads", "parameters": {"type": "object"}}}


def text_of(role: str, words: str) -> dict:
    return {"role": role, "content": words}


def text(words: str, **more: Any) -> dict:
    return {"type": "text", "text": words, **more}


def test_a_request_of_claude_code() -> None:
    asked = parse(
        {
            "model": "claude-opus",
            "max_tokens": 32000,
            "system": [
                text("x-anthropic-billing-header: cc_version=1; cch=abc"),
                text("You are", cache_control={"type": "ephemeral"}),
                text("brief."),
            ],
            "messages": [
                {"role": "user", "content": [text("<reminder>"), text("do it", cache_control={"type": "ephemeral"})]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "whatever"},
                        {"type": "redacted_thinking", "data": "x"},
                        text("Let me see."),
                        {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}},
                    ],
                },
                {"role": "system", "content": "in the middle"},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": [text("one"), {"type": "image", "source": {}}],
                            "is_error": False,
                        },
                        {"type": "tool_result", "tool_use_id": "toolu_2"},
                        text("go on"),
                    ],
                },
            ],
            "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 31999},
            "metadata": {"user_id": "u"},
            "temperature": 1,
            "stop_sequences": ["END"],
            "context_management": {"edits": []},
            "stream": True,
        }
    )
    assert asked.messages == (
        Message("system", "You are\n\nbrief."),
        Message("user", "<reminder>\n\ndo it"),
        Message("assistant", "Let me see.", "hm", (ToolCall("toolu_1", "read", {"path": "a"}),)),
        Message("system", "in the middle"),
        Message("tool", f"one\n{IMAGE_NOTE}", tool_call_id="toolu_1"),
        Message("tool", "", tool_call_id="toolu_2"),
        Message("user", "go on"),
    )
    assert asked.tools == (OURS,) and not asked.parallel_calls and asked.stream and asked.stops == ("END",)
    assert asked.reasoning == Reasoning(True, 31999) and asked.max_tokens == 32000


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, Reasoning(False, 0)),
        ({"thinking": {"type": "disabled"}}, Reasoning(False, 0)),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, Reasoning(False, 0)),
        ({"thinking": {"type": "adaptive"}}, Reasoning(True)),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, Reasoning(True, None, "low")),
    ],
)
def test_thinking(change: dict, expected: Reasoning) -> None:
    assert parse(HELLO | change).reasoning == expected


def test_what_cannot_be_threaded_is_refused_as_the_sdks_know_it() -> None:
    with pytest.raises(RequestError, match="thread") as caught:
        parse(HELLO | {"thread": {"type": "create"}})
    assert caught.value.details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert pickle.loads(pickle.dumps(caught.value)).details == caught.value.details  # large bodies are read elsewhere


def test_choices_forms_and_beginnings() -> None:
    assert parse(HELLO | {"tools": [TOOL], "tool_choice": {"type": "any"}}).tool_choice == "required"
    assert parse(HELLO | {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "read"}}).tool_choice == (
        "name",
        "read",
    )
    assert parse(HELLO | {"tool_choice": {"type": "none"}}).tool_choice == "none"
    form = FORM
    assert parse(HELLO | {"output_format": form}).response_schema == {"type": "integer"}
    assert parse(HELLO | {"output_config": {"format": form}}).response_schema == {"type": "integer"}
    begun = parse({**HELLO, "messages": [*HELLO["messages"], {"role": "assistant", "content": "{ "}]})  # type: ignore[misc]
    assert begun.written == "{ " and begun.messages == (Message("user", "hello"),)
    assert parse_count({"messages": HELLO["messages"], "system": "be"}).messages[0] == Message("system", "be")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]},
            "messages[0].content[0].name",
        ),
        ({"system": 5}, "system"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        (
            {"messages": [text_of("user", "x"), text_of("assistant", "{")], "output_format": FORM},
            "output_format",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stop_sequences": "x"}, "stop_sequences"),
    ],
)
def test_a_bad_field_is_named(change: dict, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(HELLO | change)
    assert named in caught.value.message


PARTS: list[Part] = [
    Text("reasoning", "h"), Text("reasoning", "m"), Text("content", "so"),
    CallStart("call_1", "read"), CallArguments('{"n"'), CallArguments(": 1}"), CallEnd(),
    CallStart("call_2", "now"), CallEnd(False), Text("content", "!"),
]  # fmt: skip
FINISH = Finish("tool_calls", Usage(11, 7, cached=8, reasoning=2))
USAGE = {
    "input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 8, "output_tokens": 7,
    "output_tokens_details": {"thinking_tokens": 2},
}  # fmt: skip


def read(stream: bytes) -> list[dict]:
    events = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_message() -> None:
    made = Writer("m", {}, Conversation()).whole(PARTS, FINISH)
    thinking, *rest = made["content"]
    assert thinking["thinking"] == "hm" and thinking["signature"]
    assert rest == [
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"n": 1}},
        {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
        {"type": "text", "text": "!"},
    ]
    assert made["stop_reason"] == "tool_use" and made["usage"] == USAGE and made["role"] == "assistant"
    stopped = Writer("m", {}, Conversation()).whole([], Finish("stop", Usage(1, 1), "END"))
    assert (stopped["stop_reason"], stopped["stop_sequence"], stopped["content"]) == ("stop_sequence", "END", [])
    for full, reason in ((False, "max_tokens"), (True, "model_context_window_exceeded")):
        cut = Writer("m", {}, Conversation()).whole([], Finish("length", Usage(1, 1), full=full))
        assert cut["stop_reason"] == reason


def test_events() -> None:
    writer = Writer("m", {}, Conversation())
    start, ping, *events = read(writer.start(11) + b"".join(map(writer.part, PARTS)) + writer.end(FINISH))
    message = start["message"]
    assert start["type"] == "message_start" and ping == {"type": "ping"}
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["input_tokens"] == 11
    signature = events[3]["delta"].pop("signature")
    assert signature == Writer("m", {}, Conversation()).whole(PARTS, FINISH)["content"][0]["signature"]

    def begun(index: int, **block: Any) -> dict:
        return {"type": "content_block_start", "index": index, "content_block": block}

    def delta(index: int, kind: str, **fields: Any) -> dict:
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}

    def over(index: int) -> dict:
        return {"type": "content_block_stop", "index": index}

    assert events == [
        begun(0, type="thinking", thinking="", signature=""),
        delta(0, "thinking_delta", thinking="h"),
        delta(0, "thinking_delta", thinking="m"),
        delta(0, "signature_delta"),
        over(0),
        begun(1, type="text", text=""),
        delta(1, "text_delta", text="so"),
        over(1),
        begun(2, type="tool_use", id="toolu_1", name="read", input={}),
        delta(2, "input_json_delta", partial_json='{"n"'),
        delta(2, "input_json_delta", partial_json=": 1}"),
        over(2),
        begun(3, type="tool_use", id="toolu_2", name="now", input={}),
        over(3),
        begun(4, type="text", text=""),
        delta(4, "text_delta", text="!"),
        over(4),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": USAGE},
        {"type": "message_stop"},
    ]


def test_failures_in_a_stream() -> None:
    (event,) = read(Writer("m", {}, Conversation()).failed(DaemonError("it died", hint="stderr")))
    assert event == {"type": "error", "error": {"type": "api_error", "message": "it died"}}
    for error in (PromptTooLongError(300, 200), ContextOverflowError("300 in 200")):
        (event,) = read(Writer("m", {}, Conversation()).failed(error))
        assert event["error"]["type"] == "invalid_request_error"
        assert event["error"]["message"].startswith("prompt is too long: 300 ")


def test_recordings_and_videos_become_notes() -> None:
    blocks = [{"type": kind, "source": {}} for kind in ("audio", "video", "file")]
    result = {"type": "tool_result", "tool_use_id": "t", "content": blocks}
    asked = parse({"max_tokens": 1, "messages": [{"role": "user", "content": [*blocks, result]}]})
    for message in asked.messages:
        assert all(note in message.content for note in (AUDIO_NOTE, VIDEO_NOTE, FILE_NOTE))


@pytest.mark.parametrize("value", ["secret", ["secret"], {"a": "secret"}, True])
def test_errors_of_sampling_quote_no_text(value: object) -> None:
    for name in ("temperature", "top_p", "top_k"):
        with pytest.raises(RequestError) as caught:
            parse({"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], name: value})
        assert caught.value.field == name and "secret" not in caught.value.message


def test_blocks_of_tools_that_ran_at_the_vendor_are_left_out() -> None:
    kinds = ("server_tool_use", "mcp_tool_use", "mcp_tool_listing", "fallback", "mcp_tool_result",
             "code_execution_tool_result", "bash_code_execution_tool_result", "tool_search_tool_result",
             "advisor_tool_result")  # fmt: skip
    blocks = [{"type": kind, "content": {"type": "of_the_vendor"}} for kind in kinds]
    summary = [{"type": "compaction", "content": "We began."}, {"type": "compaction", "content": None}]
    said = {"role": "assistant", "content": [*summary, *blocks, text("It is 5.")]}
    asked = parse({"max_tokens": 1, "messages": [said, {"role": "user", "content": "and now?"}]})
    assert asked.messages == (Message("assistant", "We began.It is 5."), Message("user", "and now?"))


def test_what_would_have_another_meaning_is_refused() -> None:
    for name, value in (("thread", {"type": "create"}), ("compaction", {"type": "summarize"})):
        with pytest.raises(RequestError) as caught:
            parse(HELLO | {name: value})
        assert caught.value.field == name
    assert parse_count(HELLO | {"compaction": {"type": "summarize"}}).messages == (Message("user", "hello"),)


def test_thinking_between_tools() -> None:
    def reasoning(*messages: dict) -> Reasoning:
        return parse({"max_tokens": 9, "thinking": {"type": "between_tools"}, "messages": [*messages]}).reasoning

    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "read", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}
    reminder = {"role": "system", "content": "be brief"}
    assert reasoning({"role": "user", "content": "x"}) == Reasoning(False, 0)
    assert reasoning({"role": "user", "content": "x"}, call, result, reminder) == Reasoning(True)


def test_messages_of_the_system_that_end_with_the_next_question() -> None:
    until = {"role": "system", "content": "until then", "clear_at": "next_user_message"}
    asked = [{"role": "user", "content": "a"}, until, {"role": "assistant", "content": "b"}]
    more = [{"role": "user", "content": "c"}, until, {"role": "system", "output_config": {"effort": "low"}}]
    made = parse({"max_tokens": 1, "messages": [*asked, *more]})
    shown = [(message.role, message.content) for message in made.messages]
    assert shown == [("user", "a"), ("assistant", "b"), ("user", "c"), ("system", "until then")]


def names(asked: Conversation) -> list[str]:
    return [tool["function"]["name"] for tool in asked.tools]


def test_messages_of_the_system_bring_tools_and_take_them_away() -> None:
    def change(kind: str, **tool: Any) -> dict:
        return {"type": f"tool_{kind}", "tool": tool}

    def asked(*blocks: dict, **more: Any) -> Conversation:
        system = {"role": "system", "content": [text("note"), *blocks]}
        return parse(HELLO | {"tools": [TOOL], "messages": [*HELLO["messages"], system], **more})  # type: ignore[misc]

    write = change("addition", type="tool_definition", definition=TOOL | {"name": "write"})
    search = {"type": "web_search_20250305", "name": "web_search"}
    gone = change("removal", type="tool_reference", name="read")
    assert asked(write).messages == (Message("user", "hello"), Message("system", "note"))
    assert names(asked(write)) == ["read", "write"]
    assert names(asked(write, gone)) == ["write"]
    assert names(asked(gone, change("addition", type="tool_reference", name="read"))) == ["read"]
    assert names(asked(gone, change("addition", type="tool_definition", definition=search))) == []
    assert names(asked(change("removal", type="mcp_toolset_reference", server_name="x"))) == ["read"]
    with pytest.raises(RequestError) as caught:
        asked(change("addition", type="tool_definition", definition={"name": "x"}))
    assert caught.value.field == "messages[1].content[1].tool.definition.input_schema"
    with pytest.raises(RequestError) as caught:
        asked(gone, tool_choice={"type": "tool", "name": "read"})
    assert caught.value.field == "tool_choice.name"


def test_tools_that_the_client_runs_by_a_schema_of_the_vendor() -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "computer_20250124", "name": "computer"},
    ]
    asked = parse(HELLO | {"tools": tools, "tool_choice": {"type": "any"}})
    assert names(asked) == ["bash", "str_replace_editor", "str_replace_based_edit_tool", "memory"]
    _, old, new, memory = (tool["function"]["parameters"] for tool in asked.tools)
    assert "undo_edit" in old["properties"]["command"]["enum"] and "insert_text" not in old["properties"]
    assert "insert_text" in new["properties"] and new["required"] == ["command", "path"]
    assert "rename" in memory["properties"]["command"]["enum"]


def test_reasoning_that_is_not_to_be_shown_comes_back_all_the_same() -> None:
    body = HELLO | {"thinking": {"type": "adaptive", "display": "omitted"}}
    (thought, *_) = Writer("m", kept(body), Conversation()).whole(PARTS, FINISH)["content"]
    assert thought["thinking"] == "" and "hm" not in thought["signature"]
    writer = Writer("m", kept(body), Conversation())
    events = read(b"".join(map(writer.part, PARTS)))[:3]
    assert [event["type"] for event in events] == ["content_block_start", "content_block_delta", "content_block_stop"]
    assert events[1]["delta"] == {"type": "signature_delta", "signature": thought["signature"]}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [thought, text("so")]}]
    asked = parse({"max_tokens": 1, "messages": [*said, {"role": "user", "content": "y"}]})
    assert asked.messages[1] == Message("assistant", "so", "hm")
    for display in ("summarized", "updates", None):
        assert not kept(HELLO | {"thinking": {"type": "adaptive", "display": display}})
