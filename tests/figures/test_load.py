"""The benchmarks of the server, for a few seconds: that they find what they are to find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import agent_replay, load, server_results
from benchmarks.serving import Call, RefusedError, Server, ask, quantiles, sample_sessions
from spark.speech.sessions import Message, Session, ToolCall

NANO = Path(__file__).parents[2] / "data" / "nano" / "nano.gguf"
OPTIONS = ["--device", "cpu", "--threads", "1"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(NANO, *OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def samples() -> list[Session]:
    return sample_sessions()


@pytest.mark.slow
def test_clients_come_and_go_and_the_daemon_is_killed(samples: list[Session]) -> None:
    text = "".join(m.content for s in samples for m in s.messages if m.role == "tool")
    made = load.run_load(
        NANO, OPTIONS, text, samples[0].tools, seconds=4.0, clients=6, longest=1500, tolerance_mib=1000.0
    )
    assert made["problems"] == []
    assert made["outcomes"]["ok"] > 0 and made["left_over"]["restarts"] == 1
    assert made["time_to_first_token_s"]["all"]["n"] > 0
    assert server_results.load("load.json", {"load": made, "model": "nano.gguf", "device": "cpu", **PROVENANCE})


PROVENANCE = {
    "commit": None, "versions": {}, "host": {"gpu": None, "cpu": "a CPU"}, "command": "x", "created": "2026-11-21",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "messages"])
def test_a_session_is_replayed_turn_by_turn(server: Server, samples: list[Session], api: str) -> None:
    session = next(s for s in samples if 8 < len(s.messages) < 24 and any(m.reasoning for m in s.messages))
    turns = list(agent_replay.turns(session))
    rows, refused = agent_replay.replay(server.url, api, session, max_tokens=6)
    assert refused == {} and [r["turn"] for r in rows] == list(range(len(turns)))
    prompts = [r["prompt_tokens"] for r in rows]
    assert prompts == sorted(prompts)
    assert all(r["reused_tokens"] + r["computed_tokens"] == r["prompt_tokens"] for r in rows)
    assert any(r["reused_tokens"] for r in rows)
    assert all(0 < r["first_s"] <= r["end_s"] for r in rows if r["first_s"] is not None)
    total = agent_replay.totals(rows)
    assert total["turns"] == len(rows) == sum(b["turns"] for b in agent_replay.bands(rows))
    made = {"total": total, "bands": agent_replay.bands(rows), "sessions": 1, "model": "nano.gguf", "max_tokens": 6,
            "api": api, "refused": {}, **PROVENANCE}  # fmt: skip
    assert f"| all | {len(rows)} |" in "\n".join(server_results.agent_replay("agent_replay.json", made))


def test_a_required_call_is_a_valid_one(server: Server, samples: list[Session]) -> None:
    called = (s for s in samples if len(s.messages) > 4 and s.messages[1].tool_calls)
    session = min(called, key=lambda s: sum(len(m.content) for m in s.messages))  # one that fits in the context
    rows, _ = agent_replay.replay(server.url, "messages", session, max_tokens=300, last=2, required=True)
    assert len(rows) == 2
    assert all(r["calls"] in ("valid", "cut") for r in rows if r["recorded_calls"])


def test_a_session_ends_where_the_context_does(server: Server) -> None:
    said = [Message("user", "word " * 900), Message("assistant", "yes")] * 8
    rows, refused = agent_replay.replay(server.url, "chat", Session("s", "claude", "", (), tuple(said)), max_tokens=1)
    assert len(rows) + refused["beyond the context"] == 8 and 0 < len(rows) < 8


def test_an_error_is_told_from_an_answer(server: Server) -> None:
    with pytest.raises(RefusedError) as caught:
        ask(server.url, "messages", {"max_tokens": 4})
    assert caught.value.kind == "400 invalid_request_error"


def test_a_grown_session_has_the_length_that_was_asked_for(samples: list[Session]) -> None:
    session = agent_replay.synthetic(35_000, 0.25, samples)
    n = sum(len(m.content) for m in session.messages) / 4
    assert 28_000 < n < 42_000
    results = [len(m.content) / 4 for m in session.messages if m.role == "tool"]
    assert 29 <= min(results) < 100 and 2000 < max(results) <= 4000
    called = [call.id for m in session.messages for call in m.tool_calls]
    assert called == [m.tool_call_id for m in session.messages if m.role == "tool"]
    body = agent_replay.messages_body(session.messages)
    assert [m["role"] for m in body["messages"][:3]] == ["user", "assistant", "user"]


def test_calls_are_judged_by_their_schema() -> None:
    tools = {"read": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}
    assert Call("read", '{"path": "a"}').judged(tools) == "valid"
    assert Call("write", "{}").judged(tools) == "broken"
    assert {Call("read", arguments).judged(tools) for arguments in ('{"path": "a', "[]")} == {"broken"}
    assert {Call("read", arguments).judged(tools) for arguments in ('{"path": 3}', "{}", "")} == {"unfit"}


def test_quantiles_of_few_values() -> None:
    assert quantiles([]) == {"p50": None, "p95": None, "n": 0}
    assert quantiles([3.0]) == {"p50": 3.0, "p95": 3.0, "n": 1}
    assert quantiles([1.0, 2.0, 3.0])["p50"] == 2.0


@pytest.mark.slow
def test_a_history_keeps_what_belongs_together() -> None:
    said = [
        Message("system", "be brief"), Message("user", "look"),
        Message("assistant", "", "hm", (ToolCall("1", "read", {"path": "a"}), ToolCall("2", "read", {"path": "b"}))),
        Message("tool", "A", tool_call_id="1"), Message("tool", "B", tool_call_id="2"), Message("user", "and?"),
    ]  # fmt: skip
    body = agent_replay.messages_body(said)
    assert body["system"] == "be brief"
    assert [[b["type"] for b in m["content"]] for m in body["messages"]] == [
        ["text"], ["thinking", "tool_use", "tool_use"], ["tool_result", "tool_result", "text"],
    ]  # fmt: skip
    chat = agent_replay.chat_body(said)["messages"]
    assert [m["role"] for m in chat] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert chat[2]["tool_calls"][1]["function"] == {"name": "read", "arguments": '{"path": "b"}'}
