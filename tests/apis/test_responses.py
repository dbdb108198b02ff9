from __future__ import annotations

import json
from typing import Any

import pytest

from engine.ground.errors import DaemonError, RequestError
from spark.apis.responses import Writer, parse
from spark.server.prompts import PromptTooLongError
from spark.speech.conversation import (
    IMAGE_NOTE,
    CallArguments,
    CallEnd,
    CallStart,
    Finish,
    Part,
    Reasoning,
    Text,
    TokenLogprob,
    Usage,
)
from spark.speech.sessions import Message, ToolCall

TOOL = {"type": "function", "name": "shell", "description": "d", "strict": False, "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "d", "format": {"type": "grammar", "definition": "g"}}
BODY: dict[str, Any] = {
    "model": "x",
    "instructions": "You are",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "do it"}, {"type": "input_image", "image_url": "x"}],
        },
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": '{"c": 1}'},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "function_call_output", "call_id": "call_1", "output": "done"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "web_search_call", "id": "w"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "no"}], "encrypted_content": "gAAA"},
        {"type": "function_call", "call_id": "call_3", "name": "shell", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_3", "output": {"content": "old", "success": True}},
    ],
    "tools": [TOOL, CUSTOM, {"type": "web_search"}, {"type": "namespace"}, {"type": "image_generation"}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {},
}


def test_a_request_of_codex() -> None:
    asked = parse(BODY)
    assert asked.messages == (
        Message("system", "You are"),
        Message("system", "rules"),
        Message("user", f"do it{IMAGE_NOTE}"),
        Message(
            "assistant",
            "Yes.",
            "hm",
            (ToolCall("call_1", "shell", {"c": 1}), ToolCall("call_2", "apply_patch", {"input": "*** Begin"})),
        ),
        Message("tool", "done", tool_call_id="call_1"),
        Message("tool", "ok", tool_call_id="call_2"),
        Message("assistant", tool_calls=(ToolCall("call_3", "shell", {}),)),
        Message("tool", "old", tool_call_id="call_3"),
    )
    assert [tool["function"]["name"] for tool in asked.tools] == ["shell", "apply_patch"]
    assert asked.tools[1]["function"]["description"] == "d\n\ng"
    assert asked.reasoning == Reasoning(True, None, "medium") and asked.stream
    assert parse({"input": "hi"}).messages == (Message("user", "hi"),)
    form = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
    assert parse({"input": "hi", "text": {"format": form, "verbosity": "low"}}).response_schema == {"type": "integer"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": "no"}, "store"),
        ({"input": None}, "input"),
        ({"input": "", "instructions": None}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "hologram"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "compaction_trigger"}]}, "input[1].type"),
        ({"background": True}, "background"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_a_bad_field_is_named(change: dict, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(BODY | change)
    assert named in caught.value.message and caught.value.field == named


PARTS: list[Part] = [
    Text("reasoning", "hm"), Text("content", "s"), Text("content", "o"),
    CallStart("call_1", "shell"), CallArguments('{"n"'), CallArguments(": 1}"), CallEnd(),
    CallStart("call_2", "apply_patch"), CallArguments('{"input": "***\\n"}'), CallEnd(),
]  # fmt: skip
FINISH = Finish("tool_calls", Usage(11, 7, cached=8, reasoning=2))


def test_some_of_the_tools() -> None:
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "apply_patch"}]}
    asked = parse(BODY | {"tool_choice": some})
    assert asked.tool_choice == "auto" and [tool["function"]["name"] for tool in asked.tools] == ["apply_patch"]
    with pytest.raises(RequestError, match=r"tool_choice\.tools\[0\]: is none of the tools"):
        parse(BODY | {"tool_choice": some | {"tools": [{"type": "function", "name": "x"}]}})


SUMMARIZED = ("part.added", "text.delta", "text.done", "part.done")


def writer(**changes: Any) -> Writer:
    body = BODY | changes
    return Writer("m", body, parse(body))


def read(stream: bytes) -> list[dict]:
    events = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


@pytest.mark.parametrize("summary", [None, "auto"])
def test_events(summary: str | None) -> None:
    made = writer(reasoning={"effort": "low", "summary": summary})
    events = read(made.start(11) + b"".join(map(made.part, PARTS)) + made.end(FINISH))
    kinds = [(event["type"].removeprefix("response."), event.get("output_index")) for event in events]
    text = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    expected: list[tuple[str, int | None]] = [("created", None), ("in_progress", None)]
    for index, inner in enumerate(
        [
            [*text[0], "reasoning_text.delta", "reasoning_text.done", *text[1]]
            if summary is None
            else ["output_item.added", *(f"reasoning_summary_{event}" for event in SUMMARIZED), "output_item.done"],
            [*text[0], "output_text.delta", "output_text.delta", "output_text.done", *text[1]],
            [
                "output_item.added",
                *["function_call_arguments.delta"] * 2,
                "function_call_arguments.done",
                "output_item.done",
            ],
            ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"],
        ]
    ):
        expected += [(kind, index) for kind in inner]
    assert kinds == [*expected, ("completed", None)]

    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    ids = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert ids == [item["id"] for item in done]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == ids[event["output_index"]]
    response = events[-1]["response"]
    assert response["output"] == done and response["status"] == "completed"
    assert response["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 18,
    }
    reasoning, message, call, custom = done
    assert reasoning["summary"] == ([] if summary is None else [{"type": "summary_text", "text": "hm"}])
    assert message["content"] == [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}]
    assert call["arguments"] == '{"n": 1}' and call["call_id"] == "call_1"
    assert custom["type"] == "custom_tool_call" and custom["input"] == "***\n"

    # What was given out comes back, in full or as Codex sends it: reasoning without its content.
    del reasoning["content"]
    again = parse({"input": [{"role": "user", "content": "x"}, *done]})
    assert again.messages[1].reasoning == "hm" and again.messages[1].content == "so"
    assert [c.name for c in again.messages[1].tool_calls] == ["shell", "apply_patch"]


def test_a_whole_response() -> None:
    made = writer().whole(PARTS, FINISH)
    assert [item["type"] for item in made["output"]] == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert made["status"] == "completed" and made["usage"]["total_tokens"] == 18


def test_a_response_that_was_cut() -> None:
    """What was being written is incomplete, and there; what was written before is completed."""
    end = Finish("length", Usage(1, 1))
    for parts, statuses in (
        (PARTS[:3], ["completed", "incomplete"]),
        (PARTS[:1], ["incomplete"]),
        ([*PARTS[:5], CallEnd(False)], ["completed", "completed", "incomplete"]),
        (PARTS[:7], ["completed"] * 3),
    ):
        cut = writer().whole(parts, end)
        assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in cut["output"]] == statuses
    made = writer()
    *_, done, last = read(made.start(1) + b"".join(map(made.part, PARTS[:3])) + made.end(end))
    assert last["type"] == "response.incomplete" and last["response"]["output"][1] == done["item"]
    assert done["item"]["status"] == "incomplete" and done["item"]["content"][0]["text"] == "so"
    # It comes back as any other does.
    assert parse({"input": [{"role": "user", "content": "x"}, *last["response"]["output"]]}).messages[1].content == "so"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ('{"input": "*** Begin\\n+\\"a\\u00e9', '*** Begin\n+"a\u00e9'),
        ('{ "input" :"***\n', "***\n"),
        ('{"input": "*** \\', "*** "),
        ('{"input": "*** \\u00', "*** "),
        ('{"input": "*** \\ud83d', "*** "),
        ('{"input": "*** \\ud83d\\ude00', "*** \U0001f600"),
        ('{"input": "***"', "***"),
        ('{"input": ', ""),
        ('{"in', ""),
        ("", ""),
        ('{"other": "x', '{"other": "x'),  # which is not the one argument
    ],
)
def test_a_custom_call_that_was_cut(written: str, shown: str) -> None:
    """Its input is the text so far, without the object that it is for the model."""
    parts = [CallStart("call_2", "apply_patch"), CallArguments(written), CallEnd(False)]
    events = read(b"".join(map((made := writer()).part, parts)) + made.end(Finish("length", Usage(1, 1))))
    (item,) = events[-1]["response"]["output"]
    assert item["status"] == "incomplete" and item["input"] == shown
    assert [event["delta"] for event in events if event["type"].endswith("input.delta")] == [shown]


def test_log_probabilities() -> None:
    """Asked for by `include`, or by how many; they go with the pieces, and with the whole."""
    tokens = tuple(TokenLogprob(bytes([c]), -0.5, ((b"s", -0.5), (b"\xc3", -2.0))) for c in b"so")
    shown = {"token": "s", "logprob": -0.5, "bytes": [115]}
    shown = {**shown, "top_logprobs": [shown, {"token": "\ufffd", "logprob": -2.0, "bytes": [195]}]}
    body = BODY | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    asked = parse(body)
    assert asked.logprobs == 2 and parse(BODY).logprobs is None and parse(BODY | {"top_logprobs": 0}).logprobs is None
    made = Writer("m", body, asked)
    parts: list[Part] = [Text("reasoning", "hm"), Text("content", "s", tokens[:1]), Text("content", "o", tokens[1:])]
    events = read(made.start(1) + b"".join(map(made.part, parts)) + made.end(FINISH))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [len(event["logprobs"]) for event in deltas] == [1, 1] and deltas[0]["logprobs"][0] == shown
    (content,) = events[-1]["response"]["output"][1]["content"]
    assert content["logprobs"] == deltas[0]["logprobs"] + deltas[1]["logprobs"]
    assert events[-1]["response"]["top_logprobs"] == 2


def test_failures() -> None:
    made = writer()
    *_, failed = read(made.start(1) + made.failed(DaemonError("it died")))
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "daemon", "message": "it died"}
    made = writer()
    *_, failed = read(made.start(1) + made.failed(PromptTooLongError(3, 2)))
    assert failed["response"]["error"]["code"] == "context_length_exceeded"  # at which Codex compacts
