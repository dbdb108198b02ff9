"""What newer logs of Claude Code say of the requests: system prompts, tools, what was sent and what was only shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark.extract.stored import NOTIFICATION, as_read_back, is_for_the_screen
from tests.claude_logs import SESSION, Record, answer, attachment, call, record, result, run, text, user, words, write

AGENT = "ab12"


def tool(name: str, **fields: Any) -> Record:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    return {"name": name, "description": f"{name} does it.", "input_schema": schema, **fields}


def shape(*system: str, tools: tuple[Record, ...] = (), **fields: Any) -> Record:
    sent = {"system": [text(words) for words in system], "tools": list(tools)}
    return {"type": "api-request-shape", "sessionId": SESSION, "shapeHash": "h", "shape": sent, **fields}


def snapshot(uuid: str, parent: str, *pieces: str, **fields: Any) -> Record:
    return attachment(uuid, parent, "prompt_snapshot", systemPrompt=list(pieces), **fields)


def test_a_session_begins_with_the_system_prompt_and_has_the_tools_that_were_offered(tmp_path: Path) -> None:
    deferred = [tool(name, defer_loading=True) for name in ("Later", "Never")]
    records = [
        user("u1", None, "go"),
        shape("You are an agent.", "\nWork.", tools=(tool("Bash"), *deferred)),
        {"type": "api-request-blob", "sessionId": SESSION, "hash": "h", "message": {"role": "user", "content": "go"}},
        {"type": "api-request", "sessionId": SESSION, "shapeHash": "h", "tail": []},
        answer("a1", "u1", "msg_A", call("t1", cmd="ls"), call("t2", "Later", x="1")),
        shape("Another prompt, of a later version.", tools=(tool("Read"),)),
        result("r1", "a1", "t1", "a.py"),
        answer("a2", "r1", "msg_B", text("Done.")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, report = run(tmp_path)
    found = sessions[SESSION]
    said = ["u: go", 'a: Bash({"cmd": "ls"}) Later({"x": "1"})', "t: a.py", "a: Done."]
    assert words(found) == ["s: You are an agent.\n\n\nWork.", *said]
    functions = {each["function"]["name"]: each["function"] for each in found.tools}
    assert set(functions) == {"Bash", "Read", "Later"}  # what is deferred is seen where it is called
    assert functions["Bash"]["parameters"] == tool("Bash")["input_schema"]
    assert functions["Later"]["description"] == "Later does it."
    assert report.skipped_lines == {"mirror": 3, "bookkeeping": 1}


def test_what_the_program_keeps_of_the_prompt_is_taken_where_it_did_not_log_what_it_sent(tmp_path: Path) -> None:
    kept = {"name": "Bash", "description": "Runs.", "schema": tool("Bash")}
    first = snapshot("x1", "u1", "Work.", "Well.")
    later = snapshot("x2", "a1", "Work.", "Well.", cliPrefix="You are.", tools=[kept])
    records = [user("u1", None, "go"), first, answer("a1", "x1", "msg_A", call("t1", x="1")), later]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION])[0] == "s: You are.\n\nWork.\n\nWell."
    assert sessions[SESSION].tools[0]["function"]["description"] == "Runs."
    assert report.dropped_content == {}
    write(tmp_path, f"{SESSION}.jsonl", records[:3])
    assert words(run(tmp_path)[0][SESSION])[0] == "s: Work.\n\nWell."
    write(tmp_path, f"{SESSION}.jsonl", [*records[:2], shape("You are.", "As sent."), *records[2:]])
    assert words(run(tmp_path)[0][SESSION])[0] == "s: You are.\n\nAs sent."


def test_every_thread_and_every_segment_has_its_own_prompt(tmp_path: Path) -> None:
    side = {"isSidechain": True, "agentId": AGENT}
    records = [
        user("u1", None, "go"),
        shape("Main.", tools=(tool("Bash"),)),
        answer("a1", "u1", "msg_A", text("One.")),
        record("system", "c1", None, subtype="compact_boundary"),
        user("u2", "c1", "So far: one.", isCompactSummary=True),
        answer("a2", "u2", "msg_B", text("Two.")),
    ]
    inner = [
        user("v1", None, "do it", **side),
        shape("Side.", tools=(tool("Read"),), agentId=AGENT),
        answer("b1", "v1", "msg_C", text("Did."), **side),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    write(tmp_path, f"{SESSION}/subagents/agent-{AGENT}.jsonl", inner)
    sessions, _ = run(tmp_path)
    first = {session_id: words(session)[0] for session_id, session in sessions.items()}
    assert first == {SESSION: "s: Main.", f"{SESSION}#2": "s: Main.", f"{SESSION}/agent-{AGENT}": "s: Side."}
    write(tmp_path, f"{SESSION}.jsonl", [*records, *inner])  # inline
    (tmp_path / "projects" / "-p" / SESSION / "subagents" / f"agent-{AGENT}.jsonl").unlink()
    sessions, _ = run(tmp_path)
    assert {session_id: words(session)[0] for session_id, session in sessions.items()} == first
    assert [t["function"]["name"] for t in sessions[f"{SESSION}/agent-{AGENT}"].tools] == ["Read"]


def test_a_prompt_that_was_sent_into_the_turn_has_the_words_it_was_sent_in(tmp_path: Path) -> None:
    told = "<system-reminder>\nThe user sent a new message while you were working:\nalso b\n</system-reminder>"
    queued = {"type": "queue-operation", "sessionId": SESSION, "content": "also b"}
    start = [user("u1", None, "go"), answer("a1", "u1", "msg_A", call("t1", x="1")), result("r1", "a1", "t1", "1")]
    moves = [{**queued, "operation": "enqueue"}, {**queued, "operation": "remove", "reason": "absorbed_mid_turn"}]
    sent = attachment("q1", "r1", "queued_command", prompt="also b", rendered=[{"content": told}])
    end = answer("a2", "q1", "msg_B", text("Done."))
    write(tmp_path, f"{SESSION}.jsonl", [*start, *moves, sent, end])
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION])[3:] == [f"u: {told}", "a: Done."]
    assert report.prompt_tokens["p99"] > 20  # the user typed it
    sent["rendered"] = []  # its words are in another's
    write(tmp_path, f"{SESSION}.jsonl", [*start, *moves, sent, end])
    assert words(run(tmp_path)[0][SESSION])[3:] == ["a: Done."]


@pytest.mark.parametrize("blocks", [True, False])
def test_a_notification_that_begins_a_turn_has_the_words_ahead_of_it(tmp_path: Path, blocks: bool) -> None:
    note = "<task-notification>\n<task-id>b1</task-id>\n</task-notification>"
    origin = {"kind": "task-notification", "producer": "session-task"}
    records = [
        user("u1", None, "go"),
        answer("a1", "u1", "msg_A", text("Started.")),
        user("u2", "a1", [text(note)] if blocks else note, origin=origin),
        answer("a2", "u2", "msg_B", text("It is done.")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION])[2] == f"u: {NOTIFICATION}{note}"
    assert report.prompt_tokens["p99"] == 1  # nobody typed it
    again = as_read_back(records[2])
    assert as_read_back(again) == again
    other = user("u2", "a1", note, origin=origin | {"subkind": "scheduled-trigger"})
    assert as_read_back(other) is other


def test_calls_inside_a_script_and_output_for_the_screen_were_never_sent(tmp_path: Path) -> None:
    shown = "<local-command-stdout>for the user</local-command-stdout>"
    records = [
        user("u1", None, "go"),
        answer("a1", "u1", "msg_A", call("t1", "REPL", code="read('a')")),
        answer("v1", "a1", "msg_V", call("t9", "Read", path="a"), isVirtual=True),
        result("v2", "v1", "t9", "inside", isVirtual=True),
        result("r1", "v2", "t1", "a's text"),
        record("system", "s1", "r1", subtype="local_command", content=shown, isDisplayOnly=True),
        answer("a2", "s1", "msg_B", text("Done.")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION]) == ["u: go", 'a: REPL({"code": "read(\'a\')"})', "t: a's text", "a: Done."]
    assert report.skipped_lines == {"synthetic": 3}
    assert not is_for_the_screen(record("system", "s1", "r1", subtype="local_command", content=shown))


def test_what_answers_a_prompt_that_was_stored_anew_finds_it(tmp_path: Path) -> None:
    """The user goes back to the prompt: what was said before is a branch, not the beginning of what follows."""
    records = [
        user("u1", None, "one"),
        answer("a1", "u1", "msg_A", text("First.")),
        user("u9", "a1", "two", sentAsUuid="u2-0000-4000-8000"),
        answer("a2", "u2", "msg_B", text("Second.")),
        user("u3", "a2", "three"),
        answer("a3", "u3", "msg_C", text("Taken back.")),
        answer("a4", "u2", "msg_D", text("Second again.")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    found = {session_id: words(session) for session_id, session in run(tmp_path)[0].items()}
    assert found[SESSION] == ["u: one", "a: First.", "u: two", "a: Second again."]
    assert found[f"{SESSION}~1"] == ["a: Second.", "u: three", "a: Taken back."]


def spoken(uuid: str, parent: str | None, said: str, **fields: Any) -> Record:
    own = {"subtype": "voice_call_talk", "level": "info", "isMeta": True, "origin": {"kind": "voice-call"}}
    return record("system", uuid, parent, content=said, **own, **fields)


def test_what_the_user_said_in_a_call_is_a_prompt(tmp_path: Path) -> None:
    records = [
        spoken("u1", None, "go on"),
        answer("a1", "u1", "msg_A", call("t1", x="1")),
        result("r1", "a1", "t1", "1"),
        spoken("q1", "r1", "and b", blocks=[text("and b")], fold={"command": {"commandMode": "prompt"}}),
        spoken("q2", "q1", "and c", fold={"command": {}, "rendered": [{"content": "told: and c"}]}),
        answer("a2", "q2", "msg_B", text("Done.")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION])[:3] == ["u: go on", 'a: Bash({"x": "1"})', "t: 1"]
    assert words(sessions[SESSION])[3:] == ["u: and b", "u: told: and c", "a: Done."]
    assert report.prompt_tokens["p99"] == 3


values = st.recursive(
    st.none() | st.booleans() | st.sampled_from(["user", "system", "voice-call", "task-notification", "x"]),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["type", "kind", "text", "content", "command", "rendered", "system"]), inner),
    max_leaves=5,
)


replaced = st.sampled_from(["origin", "fold", "blocks", "content", "message", "subtype", "isMeta"])


@pytest.mark.slow
@given(st.dictionaries(replaced, values), values)
@settings(max_examples=100, deadline=None)
def test_no_value_in_any_field_breaks_it(tmp_path_factory: pytest.TempPathFactory, fields: Record, value: Any) -> None:
    """And a record read back twice is as read back once."""
    said = [
        {**spoken("u1", None, "hi"), **fields},
        {**user("u2", "u1", "ho", origin={"kind": "task-notification"}), **fields},
        {**shape("s", tools=(tool("Bash"),)), "shape": {"system": value, "tools": [value]}, **fields},
        {**snapshot("x1", "u2", "s", cliPrefix=value, tools=value)},
        attachment("q1", "u2", "queued_command", prompt="p", rendered=value),
    ]
    for each in said:
        once = as_read_back(each)
        assert as_read_back(once) == once
    home = tmp_path_factory.mktemp("values")
    write(home, f"{SESSION}.jsonl", [*said, answer("a1", "u2", "msg_A", text("Answer."))])
    assert any("a: Answer." in words(session) for session in run(home)[0].values())
