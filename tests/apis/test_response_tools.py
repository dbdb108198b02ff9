"""Tools of /v1/responses beside functions and custom ones: shells, patches, searches, and what runs elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseOutputItemDoneEvent

from engine.ground.errors import RequestError
from spark.apis.response_items import Found, read
from spark.apis.responses import Writer, parse
from spark.apis.written import dumps
from spark.speech.conversation import CallArguments, CallEnd, CallStart, Conversation, Finish, Part, Usage
from spark.speech.sessions import Message, ToolCall

SAID = {"role": "user", "content": "x"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SEARCH = {"type": "tool_search", "execution": "client", "description": "find", "parameters": {"type": "object"}}
OWN = [{"type": "shell"}, {"type": "local_shell"}, {"type": "apply_patch"}, SEARCH]
FINISH = Finish("tool_calls", Usage(3, 4))
# What the model writes, and what of it comes out beside the id and the status.
WRITTEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "shell", {"commands": ["ls", "cat a"], "timeout_ms": 5},
        {"type": "shell_call", "action": {"commands": ["ls", "cat a"], "timeout_ms": 5, "max_output_length": None},
         "environment": {"type": "local"}},
    ),
    (
        "local_shell", {"command": ["ls", "-l"], "working_directory": "/"},
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": None,
                                                "working_directory": "/", "user": None}},
    ),
    (
        "apply_patch", {"type": "update_file", "path": "a", "diff": "@@\n-a\n+b\n"},
        {"type": "apply_patch_call", "operation": {"type": "update_file", "path": "a", "diff": "@@\n-a\n+b\n"}},
    ),
    ("apply_patch", {"type": "delete_file", "path": "a", "diff": ""},
     {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}}),
    ("tool_search", {"query": "q"}, {"type": "tool_search_call", "execution": "client", "arguments": {"query": "q"}}),
]  # fmt: skip


def ask(**body: Any) -> Any:
    return parse({"input": [SAID], **body})


def names(asked: Conversation) -> list[str]:
    return [tool["function"]["name"] for tool in asked.tools]


def parts_of(name: str, arguments: str, *, complete: bool = True) -> list[Part]:
    return [CallStart("call_1", name), CallArguments(arguments), CallEnd(complete)]


def written(parts: list[Part]) -> list[dict[str, Any]]:
    """The events of a reply."""
    writer = Writer("m", {}, ask(tools=OWN))
    stream = writer.start(1) + b"".join(map(writer.part, parts)) + writer.end(FINISH)
    return [json.loads(block.split("data: ", 1)[1]) for block in stream.decode().removesuffix("\n\n").split("\n\n")]


# --- tools that are given ---------------------------------------------------------------------------


def test_tools_that_the_client_runs() -> None:
    asked = ask(tools=[*OWN, LOOK])
    assert names(asked) == ["shell", "local_shell", "apply_patch", "tool_search", "look"]
    assert all(tool["function"]["parameters"]["type"] == "object" for tool in asked.tools)
    assert asked.tools[3]["function"]["description"] == "find"
    assert names(ask(tools=[{"type": "shell", "environment": {"type": "local"}}])) == ["shell"]


def test_what_agents_send_by_themselves_is_left_out() -> None:
    left_out = ["web_search", "web_search_preview", "web_search_2025_08_26", "image_generation", "tool_search"]
    assert names(ask(tools=[*({"type": kind} for kind in left_out), {**LOOK, "defer_loading": True}])) == ["look"]


@pytest.mark.parametrize(
    ("tool", "field", "hint"),
    [
        ({"type": "file_search", "vector_store_ids": ["v"]}, "tools[1].type", "give functions"),
        ({"type": "code_interpreter", "container": {"type": "auto"}}, "tools[1].type", "give functions"),
        ({"type": "computer_use_preview"}, "tools[1].type", "give functions"),
        ({"type": "programmatic_tool_calling"}, "tools[1].type", "give functions"),
        ({"type": "functoin", "name": "x"}, "tools[1].type", "give functions"),
        ({"type": "mcp", "server_label": "s", "server_url": "u"}, "tools[1].type", "connect to it"),
        ({"type": "shell", "environment": {"type": "container_auto"}}, "tools[1].environment.type", "local"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}, "tools[1].tools[0].type", "connect to it"),
    ],
)
def test_what_runs_elsewhere_is_refused_by_name(tool: dict[str, Any], field: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        ask(tools=[LOOK, tool])
    assert caught.value.field == field and field in caught.value.message and hint in (caught.value.hint or "")


def test_choices_of_tools_by_type() -> None:
    assert ask(tools=OWN, tool_choice={"type": "apply_patch"}).tool_choice == ("name", "apply_patch")
    some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}, {"type": "web_search"}]}
    assert names(ask(tools=OWN, tool_choice=some)) == ["shell"]
    for choice, field in (
        ({"type": "shell"}, "tool_choice.type"), ({"type": "file_search"}, "tool_choice"), ({"type": []}, "tool_choice")
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            ask(tools=[LOOK], tool_choice=choice)
        assert caught.value.field == field
    with pytest.raises(RequestError, match=r"tool_choice\.tools"):
        ask(tools=[LOOK], tool_choice=some | {"tools": [{"type": ["shell"]}]})


# --- their calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "arguments", "shown"), WRITTEN)
def test_a_call_has_the_shape_of_its_tool(name: str, arguments: dict[str, Any], shown: dict[str, Any]) -> None:
    """It is as OpenAI's SDK reads it, and sent back it is what the model has written."""
    events = written(parts_of(name, json.dumps(arguments)))
    kinds = [event["type"] for event in events]
    assert kinds[2:-1] == ["response.output_item.added", "response.output_item.done"]
    assert [event["sequence_number"] for event in events] == list(range(5))
    item = events[3]["item"]
    assert item == shown | {"id": item["id"], "call_id": "call_1", "status": "completed"}
    assert events[2]["item"] == item | {"status": "in_progress"} and events[-1]["response"]["output"] == [item]
    read_item = ResponseOutputItemDoneEvent.model_validate(events[3]).item
    assert read_item.type == item["type"] and read_item.to_dict() == item
    Response.model_validate(events[-1]["response"])
    whole = json.loads(dumps(Writer("m", {}, ask(tools=OWN)).whole(parts_of(name, json.dumps(arguments)), FINISH)))
    assert whole["output"][0]["type"] == item["type"]

    sorted_item = json.loads(json.dumps(item, sort_keys=True))  # clients have orders of their own
    (message,) = read([sorted_item], Found(), keep=False)[0]
    assert message == Message("assistant", tool_calls=(ToolCall("call_1", name, arguments),))
    assert [*message.tool_calls[0].arguments] == [*arguments]


@pytest.mark.parametrize("text", ['{"commands": "ls"}', '{"commands": [1, "ls"], "timeout_ms": "soon"}'])
def test_arguments_that_are_not_quite_right(text: str) -> None:
    (item,) = written(parts_of("shell", text))[-1]["response"]["output"]
    assert item["action"] == {"commands": ["ls"], "timeout_ms": None, "max_output_length": None}


def test_calls_that_are_cut() -> None:
    for name, status in (("shell", "incomplete"), ("apply_patch", "in_progress"), ("local_shell", "incomplete")):
        (item,) = written(parts_of(name, '{"pa', complete=False))[-1]["response"]["output"]
        assert item["status"] == status
        ResponseOutputItemDoneEvent.model_validate(
            {"type": "response.output_item.done", "item": item, "output_index": 0, "sequence_number": 0}
        )


# --- the input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "local_shell_call_output", "id": "call_1", "output": '{"output":"a"}'}, '{"output":"a"}'),
        ({"type": "shell_call_output", "call_id": "call_1", "output": [
            {"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 2}},
            {"stdout": "c", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
            {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
        ]}, "a\nb\n[exit code 2]\nc\n[timed out]"),
        ({"type": "apply_patch_call_output", "call_id": "call_1", "status": "completed"}, "completed"),
        ({"type": "apply_patch_call_output", "call_id": "call_1", "status": "completed", "output": "done"}, "done"),
        ({"type": "apply_patch_call_output", "call_id": "call_1", "status": "failed", "output": "why"}, "failed: why"),
        ({"type": "tool_search_output", "call_id": "call_1", "execution": "client", "tools": [LOOK]}, "found: look"),
    ],
)  # fmt: skip
def test_results(item: dict[str, Any], text: str) -> None:
    assert ask(input=[item]).messages == (Message("tool", text, tool_call_id="call_1"),)


def test_items_that_bring_tools() -> None:
    """They are the model's to call, also where they were brought by what is kept."""
    brings = {"type": "additional_tools", "role": "developer", "tools": [LOOK, {"type": "web_search"}]}
    found = {"type": "tool_search_output", "call_id": "c", "tools": [
        {"type": "namespace", "name": "n", "description": "d", "tools": [LOOK]}]}  # fmt: skip
    asked = ask(input=[brings, SAID, found], tools=[SEARCH])
    assert names(asked) == ["tool_search", "look", "n__look"] and [m.role for m in asked.messages] == ["user", "tool"]
    (item,) = json.loads(dumps(Writer("m", {}, asked).whole(parts_of("n__look", "{}"), FINISH)))["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "n", "look")
    _, entries, _, _ = read([brings, SAID, found], Found(), keep=True)
    kept = [entry[1] for entry in entries if isinstance(entry, tuple)]
    assert names(parse({"input": "y"}, Found(before=kept))) == ["look", "n__look"]
    with pytest.raises(RequestError) as caught:
        ask(input=[SAID, {**brings, "tools": [LOOK, {"type": "file_search"}]}])
    assert caught.value.field == "input[1].tools[1].type"
    hosted = {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [LOOK]}
    asked = ask(input=[SAID, hosted])
    assert names(asked) == ["look"] and asked.messages == (Message("user", "x"),)


def test_items_of_tools_that_ran_elsewhere() -> None:
    left_out = [
        "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
        "computer_call_output", "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response",
    ]  # fmt: skip
    items = [{"type": kind, "id": "x"} for kind in left_out]
    search = {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {}}
    assert ask(input=[*items, search, SAID]).messages == (Message("user", "x"),)
    (note, _) = ask(input=[{"type": "compaction", "encrypted_content": "AAAA"}, SAID]).messages
    assert note.role == "user" and "cannot read it" in note.content


def test_items_of_agents_and_settings() -> None:
    content = [{"type": "input_text", "text": "look"}, {"type": "encrypted_content", "encrypted_content": "AAAA"}]
    told = {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": content}
    (message,) = ask(input=[told, {"type": "context_compaction"}]).messages
    assert message.role == "user" and message.content.startswith("/root: look[a message was here")
    form = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
    updates = [
        {"type": "configuration_update", "reasoning": {"effort": "high"}, "text": {"format": form}},
        {"type": "configuration_update", "reasoning": {"effort": "minimal"}},
    ]
    asked = ask(input=[SAID, *updates], reasoning={"effort": "low"})
    assert asked.reasoning.effort == "minimal" and asked.response_schema == {"type": "integer"}
    _, entries, _, _ = read([SAID, *updates], Found(), keep=True)
    kept = [entry[1] for entry in entries if isinstance(entry, tuple)]
    assert parse({"input": "y"}, Found(before=kept)).reasoning.effort == "minimal"
    assert ask(reasoning={"effort": "low"}).reasoning.effort == "low" and ask().reasoning.effort is None


@pytest.mark.parametrize("kind", ["mesage", "compaction_trigger"])
def test_items_that_would_be_lost_are_refused(kind: str) -> None:
    with pytest.raises(RequestError) as caught:
        ask(input=[SAID, {"type": kind, "role": "user", "content": "y"}])
    assert caught.value.field == "input[1].type"
