"""benchmarks/client_proxy.py: it must see what goes wrong, and keep no text."""

from __future__ import annotations

import argparse
import collections
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import client_runs
from benchmarks.client_proxy import CHATS, Proxy, Session, brings_results, chunks_of, events_of, problems_of, proxied
from benchmarks.client_runs import widen
from benchmarks.clients import claude_said, codex_said
from benchmarks.other_clients import opencode_said, pi_said, qwen_said, script_said
from engine.formats.gguf import open_model
from spark.apis import chat as api_chat
from spark.apis import messages as api_messages
from spark.apis import responses as api_responses
from spark.speech.conversation import CallArguments, CallEnd, CallStart, Conversation, Finish, Part, Text, Usage
from tests.server.test_server import PATIENCE_S, running

NANO = Path(__file__).parents[2] / "data" / "nano" / "nano.gguf"
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


def test_what_is_wrong_with_chunks_is_seen() -> None:
    asked = Conversation(choices=2, stream=True)
    writers = api_chat.writers("m", {"stream": True}, asked)
    stream = b"".join(writer.start(3) for writer in writers)
    for writer in writers:
        stream += b"".join(map(writer.part, PARTS)) + writer.end(Finish("tool_calls", Usage(3, 2)))
    chunks = chunks_of(": nothing new\n\n" + stream.decode())
    assert problems_of(CHATS[0], chunks) == []
    last = [i for i, chunk in enumerate(chunks) if chunk["choices"][0]["finish_reason"]]
    first = next(i for i, chunk in enumerate(chunks) if "tool_calls" in chunk["choices"][0]["delta"])
    for broken in (
        [], chunks[: last[0]], chunks[: last[0]] + chunks[last[0] + 1 :], chunks[:first] + chunks[first + 1 :],
        [*chunks, chunks[1]], [{**chunks[0], "id": "other"}, *chunks[1:]],
    ):  # fmt: skip
        assert problems_of(CHATS[0], broken)
    with pytest.raises(ValueError, match="no end"):
        chunks_of(stream.decode().removesuffix("data: [DONE]\n\n"))
    # Signs of life of /v1/responses are events in the middle.
    writer: Any = api_responses.Writer("m", {}, Conversation())
    stream = writer.start(3) + writer.part(PARTS[0]) + writer.keep_alive + writer.part(PARTS[1])
    events = events_of((stream + writer.end(Finish("stop", Usage(3, 2)))).decode())
    assert problems_of("/v1/responses", events) == []


def test_results_of_tools_are_seen() -> None:
    result = {"role": "user", "content": [{"type": "tool_result"}, {"type": "text", "text": "x"}]}
    assert brings_results({"messages": [result, {"role": "system", "content": "x"}]})
    assert not brings_results({"messages": [result, {"role": "assistant", "content": "x"}]})
    assert brings_results({"input": [{"type": "function_call"}, {"type": "custom_tool_call_output"}]})
    assert not brings_results({"input": "x"}) and not brings_results({})
    called = [{"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "x"}]
    assert brings_results({"messages": called}) and not brings_results({"messages": called[:1]})
    assert not brings_results({"input": ["a text of which embeddings are wanted"]})


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


def test_a_call_in_chat_completions() -> None:
    proxy, narrowed = Proxy("", {}), {"bash": {"command": "ls"}}
    session = Session("pi", calls=collections.deque(["bash"]), narrowed=narrowed)
    function: dict[str, Any] = {"name": "bash", "parameters": {}}
    body = {"tools": [{"type": "function", "function": function}], "reasoning_effort": "high", "messages": []}
    changed = proxy._change(session, CHATS[0], json.loads(json.dumps(body)))
    assert changed["tool_choice"] == {"type": "function", "function": {"name": "bash"}}
    assert changed["tools"][0]["function"]["parameters"]["properties"] == {"command": {"enum": ["ls"]}}
    assert changed["thinking"]["budget_tokens"] < 100 and "response_format" not in changed
    changed = proxy._change(session, CHATS[0], json.loads(json.dumps(body)))
    assert "tool_choice" not in changed and changed["response_format"]["type"] == "json_schema"
    api_chat.parse({**changed, "messages": [{"role": "user", "content": "x"}]})  # which the server takes


def test_refusals_that_are_expected_and_those_that_are_not() -> None:
    with running() as served:
        proxy = Proxy(f"http://127.0.0.1:{served.port}", {})
        proxy.sessions["s"] = session = Session("ai", refusals=[404])
        with proxied(proxy) as url, httpx.Client(base_url=f"{url}/s", timeout=PATIENCE_S) as http:
            assert http.post("/v1/embeddings", json={"input": [SECRET]}).status_code == 404
            assert session.refused == {404} and not session.problems
            assert http.post("/v1/chat/completions", json={"messages": []}).status_code == 400
            assert session.problems and not session.n_left
    (embedded, _) = proxy.shapes.values()
    assert embedded["items"] == ["str"] and embedded["types"] == {"input": "list"} and SECRET not in str(embedded)


def test_what_the_programs_say() -> None:
    fine = {"type": "result", "subtype": "success", "is_error": False}
    assert claude_said(json.dumps(fine)) == ([], [])
    assert claude_said("") == (["0 results"], []) and claude_said("x")[0]
    assert claude_said(json.dumps({**fine, "is_error": True}))[0]
    assert codex_said('{"type": "turn.completed"}') == ([], [])
    assert codex_said('{"type": "turn.failed"}')[0] and codex_said("")[0]
    # A turn that answers an agent that has ended has a result of its own.
    of_agent = json.dumps({**fine, "origin": {"kind": "task"}})
    assert claude_said(f"{json.dumps(fine)}\n{of_agent}") == ([], []) and claude_said(of_agent)[0]
    finished = {"type": "step_finish", "part": {}}
    assert opencode_said(json.dumps(finished)) == ([], []) and opencode_said("")[0]
    assert opencode_said(json.dumps(finished) + '\n{"type": "error", "error": {}}')[0]
    assert pi_said('{"type": "turn_end", "message": {"stopReason": "stop"}}') == ([], []) and pi_said("")[0]
    assert pi_said('{"type": "turn_end", "message": {"stopReason": "error", "errorMessage": "400"}}')[0]
    assert qwen_said(json.dumps(fine)) == ([], []) and qwen_said(json.dumps({**fine, "is_error": True}))[0]
    assert script_said("{}\n") == ([], []) and script_said("")[0]


@pytest.mark.slow
def test_a_wider_model(tmp_path: Path) -> None:
    out = tmp_path / "wide.gguf"
    widen(NANO, out, 50_000, 2)
    with open_model(out) as made, open_model(NANO) as nano:
        assert made.value("qwen3moe.context_length", int) == 50_000 and made.value("qwen3moe.block_count", int) == 2
        assert made.value("tokenizer.ggml.tokens", list) == nano.value("tokenizer.ggml.tokens", list)
        assert bytes(made.tensor("output.weight").data) == bytes(nano.tensor("output.weight").data)


def test_programs_can_be_interrupted_whoever_started_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell has what runs in its background ignore SIGINT, and programs would inherit that."""
    seen: list[Any] = []

    def stop(*given: Any) -> None:
        code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
        seen.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        raise SystemExit(3)

    monkeypatch.setattr(client_runs, "widen", stop)
    options = argparse.Namespace(dump=None, model=Path("m.gguf"), ctx=1, layers=None)
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit):
            client_runs.drive(options, {}, lambda work: {}, lambda runner, work: [])
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert seen == ["True\n"]
