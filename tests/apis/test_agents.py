"""Requests as Claude Code 2.1.330 and Codex 0.169.0 send them, with other texts: every shape that was seen.

`benchmarks/clients.py` runs the programs themselves; what it finds them to send is repeated here, without them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from benchmarks.client_proxy import shape
from spark.apis import messages as api_messages
from spark.apis import responses as api_responses
from spark.speech.conversation import IMAGE_NOTE, CallArguments, CallEnd, CallStart, Finish, Reasoning, Usage
from spark.speech.sessions import Message, ToolCall
from tests.server.test_server import Running, running, wait_until

Json = dict[str, Any]
SCHEMA = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
CLAUDE_HEADERS = {
    "accept": "application/json", "anthropic-beta": "claude-code-20250219,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true", "anthropic-version": "2023-06-01", "authorization": "Bearer x",
    "user-agent": "claude-cli/2.1.330 (external, sdk-cli)", "x-app": "cli", "x-claude-code-session-id": "x",
    "x-stainless-retry-count": "0", "x-stainless-timeout": "600",
}  # fmt: skip
CODEX_HEADERS = {
    "accept": "text/event-stream", "originator": "codex_exec", "session-id": "x", "thread-id": "x",
    "x-client-request-id": "x", "x-codex-beta-features": "remote_compaction_v2", "x-codex-window-id": "x:0",
    "x-codex-turn-metadata": "{}",
}  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as made:
        yield made


def events(served: Running, path: str, body: Json, headers: dict[str, str]) -> list[Json]:
    response = served.http.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    blocks = [block.split("\n") for block in response.text.split("\n\n") if block and not block.startswith(":")]
    made = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in made]
    return made


# --- Claude Code ------------------------------------------------------------------------------------


def text(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words, **more}


def claude(*messages: Json, **changed: Any) -> Json:
    """A request of the main conversation."""
    return {
        "model": "nano",
        "messages": list(messages),
        "system": [
            text("x-anthropic-billing-header: cc_version=2.1.330.abc; cc_entrypoint=sdk-cli; cch=00000;"),
            text("You are an agent.", **EPHEMERAL),
            text("Be brief.", **EPHEMERAL),
        ],
        "tools": [{"name": name, "description": "d", "input_schema": SCHEMA} for name in ("Bash", "Read")],
        "metadata": {"user_id": '{"device_id":"x","account_uuid":"","session_id":"x"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **changed,
    }


FIRST = {"role": "user", "content": [text("<system-reminder>"), text("do it", **EPHEMERAL)]}
SECOND = {"role": "system", "content": "skills"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "spark-0"}
RESULT = {"tool_use_id": "toolu_1", "type": "tool_result", "content": "a b", "is_error": False, **EPHEMERAL}
NO_THINKING = {"thinking": None, "context_management": None}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
FOUND = {
    "tool_use_id": "toolu_1",
    "type": "tool_result",
    "content": [{"type": "tool_reference", "tool_name": "CronList"}],
}
SAFEGUARDS = [{"type": "dangerous_tool_use", "classifier_context": {"v": 1, "permission_mode": "plan"}}]
CLAUDE: dict[str, Json] = {
    "first turn": claude(FIRST, SECOND),
    "result of a tool": claude(
        FIRST, SECOND, {"role": "assistant", "content": [THOUGHT, CALL]}, {"role": "user", "content": [RESULT]}
    ),
    "continued": claude(
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": [text("done")]},
        {"role": "user", "content": [text("go on", **EPHEMERAL)]},
    ),
    "compaction": claude(
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": [{**CALL, **EPHEMERAL}]},
        {"role": "user", "content": [{**RESULT, "cache_control": None}, text("sum up")]},
    ),
    "after compaction": claude(
        {"role": "user", "content": [text("<system-reminder>"), text("summary")]},
        {"role": "assistant", "content": [text("{}")]},
        {"role": "user", "content": [text("<local-command-caveat>"), text("/compact"), text("done"), text("more")]},
        SECOND,
        {"role": "assistant", "content": [text("No response requested.")]},
        {"role": "user", "content": [text("go on")]},
    ),
    "a plan": claude(
        FIRST, {"role": "system", "content": [text("skills")]}, thinking={"display": "updates", "type": "adaptive"},
        safeguards=SAFEGUARDS,
    ),
    "subagent": claude(FIRST, **NO_THINKING),
    "result of a subagent": claude(
        FIRST,
        {"role": "assistant", "content": [{**CALL, "name": "Agent"}]},
        {"role": "user", "content": [{**RESULT, "content": [text("said"), text("agentId: x")], "is_error": None}]},
    ),
    "result, then a reminder": claude(
        FIRST, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [RESULT]}, SECOND, **NO_THINKING
    ),
    "budget of thinking": claude(FIRST, thinking={"budget_tokens": 1024, "type": "enabled"}, output_config=None),
    "low effort": claude(FIRST, output_config={"effort": "low"}),
    "picture": claude({"role": "user", "content": [text("what is it"), {**IMAGE, **EPHEMERAL}]}),
    "search at the vendor's": claude(
        {"role": "user", "content": [text("search", **EPHEMERAL)]},
        tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        tool_choice={"type": "auto"}, **NO_THINKING,
    ),
    "tools looked for": claude(
        FIRST, SECOND, {"role": "assistant", "content": [{**CALL, "name": "ToolSearch"}]},
        {"role": "user", "content": [FOUND, text("Tool loaded.", **EPHEMERAL)]},
        tools=[
            {"name": "CronList", "description": "d", "input_schema": SCHEMA, "defer_loading": True},
            {"name": "ToolSearch", "description": "d", "input_schema": SCHEMA},
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLAUDE)
def test_a_request_of_claude_code(name: str, served: Running) -> None:
    body = {key: value for key, value in CLAUDE[name].items() if value is not None}
    made = events(served, "/v1/messages?beta=true", body, CLAUDE_HEADERS)
    assert made[0]["type"] == "message_start" and made[-1]["type"] == "message_stop"
    assert made[-2]["delta"]["stop_reason"] == "end_turn"
    asked = api_messages.parse(body)
    assert asked.stream and asked.max_tokens == 32000
    assert asked.messages[0] == Message("system", "You are an agent.\n\nBe brief.")


def test_what_claude_code_s_requests_become() -> None:
    asked = api_messages.parse(CLAUDE["result of a tool"])
    assert asked.messages[1:] == (
        Message("user", "<system-reminder>\n\ndo it"),
        Message("system", "skills"),
        Message("assistant", "", "hm", (ToolCall("toolu_1", "Bash", {"command": "ls"}),)),
        Message("tool", "a b", tool_call_id="toolu_1"),
    )
    assert asked.reasoning == Reasoning(True, None, "high")
    assert api_messages.parse(CLAUDE["low effort"]).reasoning == Reasoning(True, None, "low")
    assert api_messages.parse(CLAUDE["budget of thinking"]).reasoning == Reasoning(True, 1024)
    assert api_messages.parse(CLAUDE["subagent"]).reasoning == Reasoning(False, 0)
    assert api_messages.parse(CLAUDE["picture"]).messages[-1].content == f"what is it\n\n{IMAGE_NOTE}"
    assert api_messages.parse(CLAUDE["search at the vendor's"]).tools == ()
    # A string and its block are the same prompt: what a turn was sent as first it is not sent as later.
    later, first = claude({"role": "user", "content": "go on"}), CLAUDE["continued"]["messages"][-1]
    assert api_messages.parse(later).messages == api_messages.parse(claude(first)).messages


def test_tools_that_were_looked_for_come_last() -> None:
    """So that what is before them stays as it was."""
    tools = api_messages.parse(CLAUDE["tools looked for"]).tools
    assert [tool["function"]["name"] for tool in tools] == ["ToolSearch", "CronList"]


def test_claude_code_counts_and_looks_whether_anybody_is_there(served: Running) -> None:
    tool = {"name": "Bash", "description": "d", "input_schema": SCHEMA}
    counted = []
    for tools in ([], [tool]):
        body = {"model": "nano", "messages": [{"role": "user", "content": "foo"}], "tools": tools}
        response = served.http.post("/v1/messages/count_tokens?beta=true", json=body, headers=CLAUDE_HEADERS)
        counted.append(response.json()["input_tokens"])
    assert 0 < counted[0] < counted[1]
    assert served.http.head("/").status_code < 500


# --- Codex ------------------------------------------------------------------------------------------


def said(role: str, *texts: str) -> Json:
    return {
        "type": "message",
        "id": "msg_x",
        "role": role,
        "content": [{"type": "input_text", "text": text} for text in texts],
    }


def function(name: str) -> Json:
    return {"type": "function", "name": name, "description": "d", "strict": False, "parameters": {"type": "object"}}


EXEC, VIEW, SPAWN, NOTE = map(function, ("exec_command", "view_image", "spawn_agent", "note"))
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "d", "format": GRAMMAR}
AGENTS = {"type": "namespace", "name": "multi_agent_v1", "description": "d", "tools": [SPAWN]}
NOTES = {"type": "namespace", "name": "mcp__notes", "description": "d", "tools": [NOTE]}
SEARCH = {"type": "web_search", "external_web_access": True}


def codex(*items: Json, **changed: Any) -> Json:
    """A request of a turn."""
    head = [said("developer", "You are an agent."), said("developer", "rules", "skills"), said("user", "<environment>")]
    return {
        "model": "nano",
        "stream": True,
        "input": [*head, *items],
        "tools": [EXEC, PATCH, VIEW, AGENTS, NOTES, SEARCH],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x",
        "client_metadata": {"session_id": "x", "x-codex-turn-metadata": "{}"},
        **changed,
    }


DO = said("user", "do it")
THINKING = {
    "type": "reasoning",
    "id": "rs_x",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
    "encrypted_content": "spark1." + base64.b64encode(b"hm").decode(),
}
CALLED = {"type": "function_call", "status": "completed", "id": "fc_x", "name": "exec_command", "call_id": "call_1",
          "arguments": '{"cmd": "ls"}'}  # fmt: skip
OUTPUT = {"type": "function_call_output", "id": "fco_x", "call_id": "call_1", "output": "a b"}
NOTED = {"type": "function_call", "status": "completed", "id": "fc_x", "name": "note", "namespace": "mcp__notes",
         "call_id": "call_1", "arguments": "{}"}  # fmt: skip
PATCHED = {"type": "custom_tool_call", "id": "ctc_x", "status": "completed", "call_id": "call_1", "name": "apply_patch",
           "input": "*** Begin Patch"}  # fmt: skip
ANSWERED = {"type": "message", "status": "completed", "id": "msg_x", "role": "assistant",
            "content": [{"type": "output_text", "text": "{}", "annotations": [], "logprobs": []}]}  # fmt: skip
FORM = {"type": "json_schema", "strict": True, "schema": {"type": "object"}, "name": "codex_output_schema"}
CODEX: dict[str, Json] = {
    "first turn": codex(DO),
    "a model that it does not know": codex(DO, tools=[EXEC, VIEW, AGENTS, SEARCH], reasoning={"summary": "auto"}),
    "result of a tool": codex(DO, THINKING, CALLED, OUTPUT),
    "continued": codex(DO, THINKING, CALLED, OUTPUT, CALLED, OUTPUT, ANSWERED, said("user", "go on")),
    "result of a patch": codex(
        DO, THINKING, PATCHED, {"type": "custom_tool_call_output", "id": "x", "call_id": "call_1", "output": "no"}
    ),
    "result of MCP": codex(
        DO, NOTED, {**OUTPUT, "output": [{"type": "input_text", "text": text} for text in ("Output:", "n")]}
    ),
    "picture": codex(
        {**DO, "content": [
            {"type": "input_text", "text": "<image>"},
            {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "high"},
            {"type": "input_text", "text": "</image>"},
            {"type": "input_text", "text": "what is it"},
        ]}
    ),
    "high effort": codex(DO, reasoning={"effort": "high", "summary": "auto"}),
    "form": codex(DO, tools=[], text={"format": FORM}),
    "review": codex(DO, tools=[EXEC, PATCH]),
    "compaction": codex(
        DO, CALLED, OUTPUT, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "sum up"}]},
        tools=[],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CODEX if name != "form"])
def test_a_request_of_codex(name: str, served: Running) -> None:
    made = events(served, "/v1/responses", CODEX[name], CODEX_HEADERS)
    assert made[0]["type"] == "response.created" and made[-1]["type"] == "response.completed"
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    assert made[-1]["response"]["usage"]["input_tokens"] > 0


def test_what_codex_s_requests_become() -> None:
    asked = api_responses.parse(CODEX["result of MCP"])
    assert [message.role for message in asked.messages] == ["system", "system", "user", "user", "assistant", "tool"]
    assert asked.messages[-2].tool_calls == (ToolCall("call_1", "mcp__notes__note", {}),)
    assert asked.messages[-1] == Message("tool", "Output:n", tool_call_id="call_1")
    assert api_responses.parse(CODEX["result of a tool"]).messages[-2].reasoning == "hm"
    assert api_responses.parse(CODEX["picture"]).messages[-1].content == f"<image>{IMAGE_NOTE}</image>what is it"
    assert api_responses.parse(CODEX["form"]).response_schema == {"type": "object"}
    assert api_responses.parse(CODEX["a model that it does not know"]).reasoning == Reasoning()


def test_tools_in_namespaces() -> None:
    """MCP servers' and agents' tools: Codex knows them by namespace and name, the model by one name."""
    body = codex(DO, tool_choice={"type": "function", "namespace": "mcp__notes", "name": "note"})
    asked = api_responses.parse(body)
    names = [tool["function"]["name"] for tool in asked.tools]
    assert names == ["exec_command", "apply_patch", "view_image", "multi_agent_v1__spawn_agent", "mcp__notes__note"]
    assert asked.tool_choice == ("name", "mcp__notes__note")
    for call, expected in (
        ("mcp__notes__note", {"name": "note", "namespace": "mcp__notes"}),
        ("exec_command", {"name": "exec_command"}),
        ("unknown", {"name": "unknown"}),
    ):
        writer = api_responses.Writer("m", body, asked)
        parts = [CallStart("call_1", call), CallArguments("{}"), CallEnd()]
        (item,) = writer.whole(parts, Finish("tool_calls", Usage(1, 1)))["output"]
        assert {key: item[key] for key in ("name", "namespace") if key in item} == expected
        again = api_responses.parse(codex(DO, item, OUTPUT))
        assert again.messages[-2].tool_calls == (ToolCall("call_1", call, {}),)


def test_codex_asks_for_the_models(served: Running) -> None:
    """The fields without which Codex 0.169.0 takes none of the list."""
    (model,) = served.http.get("/v1/models?client_version=0.169.0", headers=CODEX_HEADERS).json()["models"]
    assert model.keys() >= {
        "slug", "display_name", "supported_reasoning_levels", "shell_type", "visibility", "supported_in_api",
        "priority", "base_instructions", "supports_reasoning_summaries", "support_verbosity", "truncation_policy",
        "supports_parallel_tool_calls", "context_window", "experimental_supported_tools",
    }  # fmt: skip


def test_a_client_may_leave_at_the_last_event(served: Running) -> None:
    """Codex shuts the stream when it has seen `response.completed`; that is no reply that was left."""
    with served.http.stream("POST", "/v1/responses", json=CODEX["first turn"], headers=CODEX_HEADERS) as response:
        for line in response.iter_lines():
            if line == "event: response.completed":
                break
    wait_until(lambda: "spark_replies 0.0" in served.http.get("/metrics").text)
    assert served.http.get("/health").json()["daemon"] == "ready"


def test_everything_that_was_seen_is_tested() -> None:
    """Names of fields and kinds of items, tools and blocks in the last run of the programs."""
    seen = json.loads((Path(__file__).parents[2] / "data" / "results" / "clients.json").read_text())["shapes"]
    for program, path, bodies in (("claude", "/v1/messages", CLAUDE), ("codex", "/v1/responses", CODEX)):
        request = Request({"type": "http", "method": "POST", "query_string": b"", "headers": []})
        tested = [shape(request, path, body) for body in bodies.values()]
        for kind in ("body", "tools", "items"):
            ours = [one for one in seen if (one["program"], one["path"]) == (program, path)]
            names = {name for one in ours for name in one.get(kind, [])}
            assert names and names <= {name for one in tested for name in one.get(kind, [])}, kind
