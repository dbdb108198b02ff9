"""benchmarks/client_proxy.py: it must see what goes wrong, and keep no text."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_server import PATIENCE_S, running

from benchmarks.client_proxy import Proxy, Session, brings_results, events_of, problems_of, proxied
from benchmarks.client_runs import widen
from benchmarks.clients import claude_said, codex_said
from engine.gguf import open_model
from spark import api_messages, api_responses
from spark.conversation import CallArguments, CallEnd, CallStart, Conversation, Finish, Part, Text, Usage

NANO = Path(__file__).parents[1] / "data" / "nano" / "nano.gguf"
PARTS: list[Part] = [
    Text("reasoning", "hm"), Text("content", "so"), CallStart("call_1", "f"), CallArguments("{}"), CallEnd(),
]  # fmt: skip
SECRET = "a text that nobody else has to see"


def replies() -> dict[str, list[dict[str, Any]]]:
    made = {}
    for path, api in (("/v1/messages", api_messages), ("/v1/responses", api_responses)):
        writer: Any = api.Writer("m", {}, Conversation())
        stream = writer.start(3) + b"".join(map(writer.part, PARTS)) + writer.end(Finish("tool_calls", Usage(3, 2)))
        made[path] = events_of(stream.decode())
    return made


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_any_event_that_is_missing_is_seen(path: str) -> None:
    events = replies()[path]
    assert problems_of(path, events) == []
    for i, event in enumerate(events):
        if event["type"] not in ("ping", "content_block_delta"):
            assert problems_of(path, events[:i] + events[i + 1 :])
    assert problems_of(path, [])


def test_results_of_tools_are_seen() -> None:
    result = {"role": "user", "content": [{"type": "tool_result"}, {"type": "text", "text": "x"}]}
    assert brings_results({"messages": [result, {"role": "system", "content": "x"}]})
    assert not brings_results({"messages": [result, {"role": "assistant", "content": "x"}]})
    assert brings_results({"input": [{"type": "function_call"}, {"type": "custom_tool_call_output"}]})
    assert not brings_results({"input": "x"}) and not brings_results({})


def test_shapes_without_texts() -> None:
    with running() as served:
        proxy = Proxy(f"http://127.0.0.1:{served.port}", {"f": {"x": 1}})
        proxy.sessions["s"] = session = Session("claude", changed=False)
        with proxied(proxy) as url, httpx.Client(base_url=f"{url}/s", timeout=PATIENCE_S) as http:
            body = {
                "max_tokens": 9, "system": SECRET, "stream": True, "output_config": {"effort": "low"},
                "messages": [{"role": "user", "content": [{"type": "text", "text": SECRET}]}],
                "tools": [{"name": SECRET, "input_schema": {}, "description": SECRET}],
            }  # fmt: skip
            assert http.post("/v1/messages?beta=true", json=body).text.endswith("\n\n")
            assert http.get("/v1/models").json()["object"] == "list"
            assert not session.problems
            assert http.post("/v1/messages", json={"stream": True}).status_code == 400
            assert len(session.problems) == 1 and "400" in session.problems[0]
    shapes = list(proxy.shapes.values())
    assert SECRET not in json.dumps(shapes) and session.n_requests == 3 == len(shapes)
    assert shapes[0]["items"] == ["user: text"] and shapes[0]["query"] == ["beta"] and shapes[0]["stream"]
    assert shapes[0]["output_config"] == {"effort": "low"} and shapes[0]["outcomes"] == {"200": 1}


def test_a_call_is_asked_for_once() -> None:
    proxy = Proxy("", {"Bash": {"command": "true"}, "ns__f": {}})
    session = Session("claude", calls=collections.deque(["Bash"]))
    body = {"tools": [{"name": "Bash", "input_schema": {}}], "thinking": {"type": "adaptive"}}
    changed = proxy._change(session, "/v1/messages", json.loads(json.dumps(body)))
    assert changed["tool_choice"] == {"type": "tool", "name": "Bash"} and "output_config" not in changed
    assert changed["tools"][0]["input_schema"]["properties"] == {"command": {"enum": ["true"]}}
    changed = proxy._change(session, "/v1/messages", json.loads(json.dumps(body)))
    assert "tool_choice" not in changed and changed["output_config"]["format"]["type"] == "json_schema"
    session.calls.append("ns__f")
    inner = {"type": "function", "name": "f", "parameters": {}}
    changed = proxy._change(
        session, "/v1/responses", {"tools": [{"type": "namespace", "name": "ns", "tools": [inner]}]}
    )
    assert changed["tool_choice"] == {"type": "function", "name": "ns__f"} and inner["parameters"]["required"] == []


def test_what_the_programs_say() -> None:
    fine = {"type": "result", "subtype": "success", "is_error": False}
    assert claude_said(json.dumps(fine)) == ([], [])
    assert claude_said("") == (["0 results"], []) and claude_said("x")[0]
    assert claude_said(json.dumps({**fine, "is_error": True}))[0]
    assert codex_said('{"type": "turn.completed"}') == ([], [])
    assert codex_said('{"type": "turn.failed"}')[0] and codex_said("")[0]


def test_a_wider_model(tmp_path: Path) -> None:
    out = tmp_path / "wide.gguf"
    widen(NANO, out, 50_000, 2)
    with open_model(out) as made, open_model(NANO) as nano:
        assert made.value("qwen3moe.context_length", int) == 50_000 and made.value("qwen3moe.block_count", int) == 2
        assert made.value("tokenizer.ggml.tokens", list) == nano.value("tokenizer.ggml.tokens", list)
        assert bytes(made.tensor("output.weight").data) == bytes(nano.tensor("output.weight").data)
