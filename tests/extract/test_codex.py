"""Codex's logs: each thing that facts about the format name, in both eras, and what no damage may do."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark.extract import ExtractOptions, Report, extract
from spark.speech.sessions import Session, read_sessions

Record = dict[str, Any]
THREAD = "019a0000-0000-7000-8000-000000000001"
OTHER = "019a0000-0000-7000-8000-000000000002"
THIRD = "019a0000-0000-7000-8000-000000000003"


def line(kind: str, payload: Any, **fields: Any) -> Record:
    return {"timestamp": "2026-03-01T09:00:01Z", "type": kind, "payload": payload, **fields}


def item(kind: str, **fields: Any) -> Record:
    return line("response_item", {"type": kind, **fields})


def event(kind: str, **fields: Any) -> Record:
    return line("event_msg", {"type": kind, **fields})


def meta(thread: str = THREAD, **fields: Any) -> Record:
    return line("session_meta", {"id": thread, "timestamp": "2026-03-01T09:00:00Z", "cwd": "/p", **fields})


def said(role: str, text: str, **fields: Any) -> Record:
    kind = "output_text" if role == "assistant" else "input_text"
    return item("message", role=role, content=[{"type": kind, "text": text}], **fields)


def thought(text: str) -> Record:
    return item("reasoning", summary=[{"type": "summary_text", "text": text}], content=None, encrypted_content="AA")


def called(call_id: str, name: str = "shell", **arguments: Any) -> Record:
    return item("function_call", name=name, arguments=json.dumps(arguments), call_id=call_id)


def output(call_id: str, text: Any) -> Record:
    return item("function_call_output", call_id=call_id, output=text)


def write(home: Path, thread: str, records: list[Record | str], folder: str = "sessions/2026/03/01") -> None:
    path = home / folder / f"rollout-2026-03-01T09-00-00-{thread}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))


def run(home: Path) -> tuple[dict[str, Session], Report]:
    options = ExtractOptions(home / "out", "codex", codex_dir=home, test_frac=0, redact=False)
    report = extract(options, lambda done, total: None)
    return {s.session_id: s for s in read_sessions(home / "out" / "train.jsonl")}, report


def words(session: Session) -> list[str]:
    """The session in short: role and content, calls as name(arguments)."""
    out = []
    for m in session.messages:
        calls = [f"{c.name}({json.dumps(dict(c.arguments))})" for c in m.tool_calls]
        pieces = [m.role[0] + ":", m.reasoning and f"<{m.reasoning}>", m.content, *calls]
        out.append(" ".join(piece for piece in pieces if piece))
    return out


ENVIRONMENT = "<environment_context>\n<cwd>/p</cwd>\n</environment_context>"
PLAIN = [
    meta(base_instructions={"text": "Be brief."}),
    line("turn_context", {"cwd": "/p", "model": "m"}, ordinal=1),
    said("developer", "No network."),
    said("user", ENVIRONMENT),
    said("user", "list the files"),
    event("user_message", message="list the files"),
    event("agent_reasoning", text="use ls"),
    thought("use ls"),
    event("agent_message", message="I look."),
    said("assistant", "I look.", phase="commentary"),
    called("c1", cmd="ls"),
    called("c2", cmd="pwd"),
    output("c1", "a.py"),
    output("c2", [{"type": "input_text", "text": "/p"}, {"type": "input_image", "image_url": "data:..."}]),
    event("token_count", info={}),
    said("assistant", "One file.", phase="final_answer"),
    said("user", "thanks"),
    said("assistant", "Bye."),
]
PLAIN_WORDS = [
    "s: Be brief.",
    "s: No network.",
    f"u: {ENVIRONMENT}",
    "u: list the files",
    'a: <use ls> I look. shell({"cmd": "ls"}) shell({"cmd": "pwd"})',
    "t: a.py",
    "t: /p\n[image]",
    "a: One file.",
    "u: thanks",
    "a: Bye.",
]


def test_items_become_messages_and_events_are_not_counted_twice(tmp_path: Path) -> None:
    write(tmp_path, THREAD, list(PLAIN))
    sessions, report = run(tmp_path)
    session = sessions[THREAD]
    assert words(session) == PLAIN_WORDS
    assert [m.tool_call_id for m in session.messages if m.role == "tool"] == ["c1", "c2"]
    assert (session.source, session.started_at) == ("codex", "2026-03-01T09:00:01Z")
    assert report.skipped_lines == {"bookkeeping": 2, "mirror": 3}
    assert report.prompt_tokens == {"p50": 2, "p90": 4, "p99": 4}  # "thanks", "list the files"


def test_an_id_may_be_anything_and_a_family_stays_one(tmp_path: Path) -> None:
    long = "x" * 5000
    write(tmp_path, THREAD, [meta(long), said("user", "hi"), said("assistant", "ho")])
    write(tmp_path, OTHER, [meta(OTHER, forked_from_id=long), said("user", "hi"), said("assistant", "ha")])
    found = sorted(run(tmp_path)[0], key=len)
    assert len(found[0]) == 255 and found[1] == f"{found[0]}/{OTHER}"


def test_records_of_usage_are_bookkeeping_with_and_without_an_envelope(tmp_path: Path) -> None:
    usage = {"response_id": "r", "thread_id": THREAD, "usage": {"input_tokens": 3}}
    lines = [line("token_usage_record", usage), {"type": "token_usage_record", **usage}]
    write(tmp_path, THREAD, [*PLAIN, *lines])
    sessions, report = run(tmp_path)
    assert words(sessions[THREAD]) == PLAIN_WORDS
    assert report.skipped_lines == {"bookkeeping": 4, "mirror": 3}
    assert report.dropped_content["token_usage_record"] == {"records": 2, "characters": 0}


def test_what_is_dropped_is_counted_by_the_text_in_it(tmp_path: Path) -> None:
    """Items of unknown kinds, events that are no copies, blocks; copies of what is kept are not among them."""
    unknown = item("dream", content="two words", id="one")
    ended = event("exec_command_end", stdout="three more words")
    block = item("message", role="user", content=[{"type": "input_text", "text": "hi"}, {"type": "smell", "of": "a b"}])
    write(tmp_path, THREAD, [*PLAIN, unknown, ended, ended, block])
    report = run(tmp_path)[1]
    assert list(report.dropped_content.items())[:3] == [
        ("event_msg/exec_command_end", {"records": 2, "characters": 32}),
        ("response_item/dream", {"records": 1, "characters": 9}),
        ("content/smell", {"records": 1, "characters": 3}),
    ]
    assert not {"event_msg/user_message", "event_msg/agent_message"} & set(report.dropped_content)


def test_lines_without_an_envelope_as_old_versions_wrote(tmp_path: Path) -> None:
    head = {"id": THREAD, "timestamp": "2025-07-01T09:00:00Z", "instructions": "Be brief.", "git": {}}
    bare = [r["payload"] for r in PLAIN[2:] if r["type"] == "response_item"]
    write(tmp_path, THREAD, [head, {"record_type": "state"}, *bare])
    sessions, report = run(tmp_path)
    assert words(sessions[THREAD]) == PLAIN_WORDS
    assert sessions[THREAD].started_at == "2025-07-01T09:00:00Z"
    assert report.skipped_lines == {"bookkeeping": 1}


def test_a_log_of_events_alone_is_read_from_them(tmp_path: Path) -> None:
    events = [r for r in PLAIN if r["type"] == "event_msg"]
    write(tmp_path, THREAD, [meta(), *events])
    sessions, report = run(tmp_path)
    assert words(sessions[THREAD]) == ["u: list the files", "a: <use ls> I look."]
    assert report.skipped_lines == {"bookkeeping": 1}


def whole(kind: str, **fields: Any) -> Record:
    return event("item_completed", item={"type": kind, "id": "i", **fields})


WHOLE = [
    whole("UserMessage", content=[{"type": "text", "text": "list the files", "text_elements": []}]),
    whole("Reasoning", summary_text=["use ls"], raw_content=[]),
    whole("AgentMessage", content=[{"type": "Text", "text": "I look."}]),
    whole("CommandExecution", command=["ls"]),
]


@pytest.mark.parametrize("both", [False, True])
def test_events_of_whole_items_are_copies_as_the_older_ones(tmp_path: Path, both: bool) -> None:
    older = [r for r in PLAIN if r["type"] == "event_msg"][:3]
    events = [r for pair in zip(WHOLE, older, strict=False) for r in pair] if both else WHOLE
    write(tmp_path, THREAD, [meta(), *events])
    assert words(run(tmp_path)[0][THREAD]) == ["u: list the files", "a: <use ls> I look."]
    write(tmp_path, THREAD, [*PLAIN[:6], *WHOLE, *PLAIN[6:]])
    sessions, report = run(tmp_path)
    assert words(sessions[THREAD]) == PLAIN_WORDS
    assert report.skipped_lines == {"bookkeeping": 3, "mirror": 6}
    assert set(report.dropped_content) >= {"event_msg/item_completed/CommandExecution"}
    raw = whole("Reasoning", summary_text=["use ls"], raw_content=["in full"])
    write(tmp_path, THREAD, [meta(), WHOLE[0], raw, *(whole(kind, content=5) for kind in ("AgentMessage", "Plan"))])
    assert words(run(tmp_path)[0][THREAD]) == ["u: list the files", "a: <in full>"]


def test_tools_that_come_later_and_those_in_namespaces(tmp_path: Path) -> None:
    def tool(name: str, **fields: Any) -> Record:
        return {"type": "function", "name": name, "description": f"{name}.", "parameters": {"type": "object"}, **fields}

    agents = {"type": "namespace", "name": "agents", "tools": [tool("spawn"), tool("wait"), 5, {}]}
    later = [tool("later", deferLoading=True), tool("never", deferLoading=True), tool("own", namespace="mcp__git__")]
    records = [
        meta(dynamic_tools=[tool("first"), *later]),
        said("user", "go"),
        line("dynamic_tools_updated", {"dynamic_tools": [tool("second")]}),
        item("additional_tools", tools=[agents]),
        item("configuration_update", configuration={"effort": "high"}),
        line("security_risk_score", {"score": 1}),
        line("realtime_item", {"type": "transcript_segment", "text": "said by another model"}),
        item("function_call", name="spawn", namespace="agents", arguments="{}", call_id="c1"),
        called("c2", "later"),
    ]
    write(tmp_path, THREAD, records)
    sessions, report = run(tmp_path)
    assert words(sessions[THREAD])[1] == "a: agents.spawn({}) later({})"
    described = {t["function"]["name"]: t["function"].get("description") for t in sessions[THREAD].tools}
    names = ["first", "mcp__git__own", "second", "agents.spawn", "agents.wait", "later"]
    assert described == {name: f"{name.split('.')[-1].removeprefix('mcp__git__')}." for name in names}
    assert report.skipped_lines == {"bookkeeping": 3, "no_text": 2}
    assert report.dropped_content["realtime_item"]["characters"] == len("said by another model")


def test_items_of_every_kind(tmp_path: Path) -> None:
    chart = {"type": "function", "name": "chart", "description": "Draw.", "parameters": {"type": "object"}}
    records = [
        meta(dynamic_tools=[{"name": "tests", "description": "Run.", "input_schema": {"type": "object"}}, "x", {}]),
        item("message", role="user", content=[{"type": "input_text", "text": "go"}, {"type": "input_image"}]),
        item("local_shell_call", call_id="c1", action={"type": "exec", "command": ["ls"], "env": None}),
        output("c1", {"content": "a.py", "success": True}),
        item("custom_tool_call", call_id="c2", name="apply_patch", input="*** Begin Patch"),
        item("custom_tool_call_output", call_id="c2", output="Success."),
        called("c3", "search", q="x") | {},
        item("function_call", name="get", namespace="mcp__git__", arguments="not json", call_id="c4"),
        item("function_call", name="put", namespace="files", arguments="", call_id="c5"),
        output("c4", [{"type": "input_text", "text": "four"}, {"type": "novelty"}]),
        output("c3", '{"output":"3","metadata":{}}'),
        output("c5", {"output": "five", "exit_code": 0}),
        item("web_search_call", id="ws1", action={"type": "search", "query": "q"}),
        said("assistant", "Found."),
        item("tool_search_call", call_id="c6", arguments={"query": "chart"}),
        item("tool_search_output", call_id="c6", tools=[chart]),
        item("image_generation_call", id="ig1", revised_prompt="bars", result="AAAA"),
        item("reasoning", summary=[], encrypted_content="AA"),
        item("compaction", encrypted_content="AA"),
        item("ghost_snapshot", ghost_commit={}),
        item("agent_message", author="/a", content=[{"type": "input_text", "text": "from a"}]),
        line("inter_agent_communication", {"author": "/b", "content": "from b", "trigger_turn": True}),
        line("inter_agent_communication_metadata", {"trigger_turn": True}),
        line("world_state", {"full": True}),
        said("assistant", "Done."),
    ]
    write(tmp_path, THREAD, records)
    sessions, report = run(tmp_path)
    assert words(sessions[THREAD]) == [
        "u: go\n[image]",
        'a: local_shell({"command": ["ls"]})',
        "t: a.py",
        'a: apply_patch({"input": "*** Begin Patch"})',
        "t: Success.",
        'a: search({"q": "x"}) mcp__git__get({"input": "not json"}) files.put({"input": ""})',
        "t: four",
        't: {"output":"3","metadata":{}}',
        't: {"output": "five", "exit_code": 0}',
        'a: web_search({"type": "search", "query": "q"})',
        'a: Found. tool_search({"query": "chart"})',
        "t: " + json.dumps([chart]),
        'a: image_generation({"prompt": "bars"})',
        "t: [image]",
        "u: from a",
        "u: from b",
        "a: Done.",
    ]
    tools = {t["function"]["name"]: t["function"] for t in sessions[THREAD].tools}
    assert tools["tests"] == {"name": "tests", "description": "Run.", "parameters": {"type": "object"}}
    assert tools["chart"]["description"] == "Draw."
    assert tools["apply_patch"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert report.dropped_blocks == {"encrypted": 2, "unknown": 1}
    assert report.skipped_lines == {"bookkeeping": 2, "no_text": 3}


def test_a_result_before_its_call_follows_it(tmp_path: Path) -> None:
    write(tmp_path, THREAD, [meta(), said("user", "go"), output("c1", "a.py"), called("c1", cmd="ls")])
    assert words(run(tmp_path)[0][THREAD]) == ["u: go", 'a: shell({"cmd": "ls"})', "t: a.py"]


def test_a_compaction_replaces_what_came_before(tmp_path: Path) -> None:
    kept = [said("user", "list the files")["payload"], said("user", "Summary: one file.")["payload"]]
    compacted = line("compacted", {"message": "", "replacement_history": kept})
    after = [said("user", "now delete it"), said("assistant", "Deleted.")]
    write(tmp_path, THREAD, [*PLAIN[:16], compacted, event("context_compacted"), *after])
    sessions, report = run(tmp_path)
    assert words(sessions[THREAD]) == PLAIN_WORDS[:8]
    assert words(sessions[f"{THREAD}#2"]) == [
        "s: Be brief.",
        "u: list the files",
        "u: Summary: one file.",
        "u: now delete it",
        "a: Deleted.",
    ]
    assert report.prompt_tokens["p99"] == 4  # "now delete it", not the summary


def test_an_old_compaction_leaves_its_summary(tmp_path: Path) -> None:
    after = [said("user", "now delete it"), said("assistant", "Deleted.")]
    write(tmp_path, THREAD, [*PLAIN[:16], line("compacted", {"message": "One file."}), *after])
    sessions, _ = run(tmp_path)
    assert words(sessions[f"{THREAD}#2"]) == ["s: Be brief.", "u: One file.", "u: now delete it", "a: Deleted."]


def test_turns_that_were_taken_back_become_a_branch(tmp_path: Path) -> None:
    rolled_back = event("thread_rolled_back", num_turns=1)
    write(tmp_path, THREAD, [*PLAIN, rolled_back, said("user", "no thanks"), said("assistant", "Well.")])
    sessions, _ = run(tmp_path)
    assert words(sessions[THREAD]) == [*PLAIN_WORDS[:8], "u: no thanks", "a: Well."]
    assert words(sessions[f"{THREAD}~1"]) == ["s: Be brief.", "u: thanks", "a: Bye."]


def test_who_went_back_and_left_takes_nothing_along(tmp_path: Path) -> None:
    """A summary goes with what was answered after it."""
    turns = [said(role, f"{role} {turn}") for turn in "AB" for role in ("user", "assistant")]
    compacted = line("compacted", {"message": "In short."})
    left = [event("thread_rolled_back", num_turns=2), said("user", "in other words")]
    write(tmp_path, THREAD, [*PLAIN, compacted, *turns, *left])
    sessions, report = run(tmp_path)
    answered = ["u: user A", "a: assistant A", "u: user B", "a: assistant B"]
    assert words(sessions[f"{THREAD}#2"])[1:] == ["u: In short.", *answered]
    assert list(sessions) == [THREAD, f"{THREAD}#2"] and report.skipped_lines["no_response"] == 1


def going_on(base: str, end: int, *turns: str, thread: str = THREAD, hour: int = 10) -> list[Record | str]:
    """A log that goes on from the first `end` lines of another, as in 0.171."""
    at = {"timestamp": f"2026-03-01T{hour}:00:00Z"}
    goes_on = {"thread_id": base, "end_ordinal_exclusive": end, "end_byte_offset": 1}
    records = [meta(thread, history_mode="paginated", history_base=goes_on)]
    records[0]["payload"] |= at
    records += [said(role, f"{role} {turn}") for turn in turns for role in ("user", "assistant")]
    return [{**record, **at, "ordinal": end + i} for i, record in enumerate(records)]


def begun(*turns: str) -> list[Record | str]:
    """A thread's first log: its head and two lines, then two of each turn."""
    first: list[Record] = [meta(base_instructions={"text": "Be brief."}, history_mode="paginated"), *PLAIN[2:4]]
    first += [said(role, f"{role} {turn}") for turn in turns for role in ("user", "assistant")]
    return [{**record, "ordinal": i} for i, record in enumerate(first)]


BEGUN_WORDS = PLAIN_WORDS[:3]


def turns_of(*turns: str) -> list[str]:
    return [f"{role[0]}: {role} {turn}" for turn in turns for role in ("user", "assistant")]


def test_a_thread_that_went_back_goes_on_in_another_log(tmp_path: Path) -> None:
    write(tmp_path, THREAD, begun("A", "B", "C"))
    write(tmp_path, f"{THREAD}_{OTHER}", going_on(THREAD, 7, "D", "E"))
    sessions, report = run(tmp_path)
    assert words(sessions[THREAD]) == [*BEGUN_WORDS, *turns_of("A", "B", "D", "E")]
    assert words(sessions[f"{THREAD}~1"]) == ["s: Be brief.", *turns_of("C")]
    assert set(sessions) == {THREAD, f"{THREAD}~1"} and report.files == 2
    write(tmp_path, f"{THREAD}_{OTHER}", going_on(THREAD, 7, "D", "E"), "archived_sessions")  # a copy left behind
    write(tmp_path, THREAD, begun("A", "B", "C"), "archived_sessions")
    again, report = run(tmp_path)
    assert {s: words(again[s]) for s in again} == {s: words(sessions[s]) for s in sessions} and report.files == 4


def test_a_thread_may_go_back_again_and_to_what_it_had_left(tmp_path: Path) -> None:
    write(tmp_path, THREAD, begun("A", "B", "C"))
    write(tmp_path, f"{THREAD}_{OTHER}", going_on(THREAD, 7, "D", "E"))
    write(tmp_path, f"{THREAD}_{THIRD}", going_on(OTHER, 10, "F", hour=11))
    sessions, _ = run(tmp_path)
    assert words(sessions[THREAD]) == [*BEGUN_WORDS, *turns_of("A", "B", "D", "F")]
    assert words(sessions[f"{THREAD}~1"])[1:] == turns_of("C")
    assert words(sessions[f"{THREAD}~2"])[1:] == turns_of("E")
    write(tmp_path, f"{THREAD}_{THIRD[:-1]}4", going_on(THREAD, 9, "G", hour=12))
    sessions, _ = run(tmp_path)
    assert words(sessions[THREAD]) == [*BEGUN_WORDS, *turns_of("A", "B", "C", "G")]
    left = [words(sessions[s])[1:] for s in sorted(sessions) if "~" in s]
    assert left == [turns_of("E"), turns_of("D", "F")] and len(sessions) == 3


def test_a_thread_may_go_back_behind_its_compaction(tmp_path: Path) -> None:
    compacted = [line("compacted", {"message": "In short."}), said("user", "user C"), said("assistant", "assistant C")]
    write(tmp_path, THREAD, [*begun("A", "B"), *({**r, "ordinal": 7 + i} for i, r in enumerate(compacted))])
    write(tmp_path, f"{THREAD}_{OTHER}", going_on(THREAD, 5, "D"))
    sessions, _ = run(tmp_path)
    assert words(sessions[THREAD]) == [*BEGUN_WORDS, *turns_of("A", "D")]
    assert words(sessions[f"{THREAD}~1"])[1:] == turns_of("B")
    assert words(sessions[f"{THREAD}#2"]) == ["s: Be brief.", "u: In short.", *turns_of("C")]


def test_a_log_whose_beginning_is_gone_has_what_is_left(tmp_path: Path) -> None:
    write(tmp_path, f"{THREAD}_{OTHER}", going_on(THREAD, 7, "D"))
    sessions, _ = run(tmp_path)
    assert {s: words(sessions[s]) for s in sessions} == {THREAD: turns_of("D")}


def test_a_fork_of_a_thread_that_went_back_has_its_root(tmp_path: Path) -> None:
    write(tmp_path, THREAD, begun("A", "B"))
    write(tmp_path, f"{THREAD}_{OTHER}", going_on(THREAD, 5, "C"))
    write(tmp_path, THIRD, going_on(OTHER, 8, "D", thread=THIRD))
    sessions, _ = run(tmp_path)
    assert words(sessions[f"{THREAD}/{THIRD}"]) == turns_of("D")
    assert set(sessions) == {THREAD, f"{THREAD}~1", f"{THREAD}/{THIRD}"}


def test_what_a_reviewer_found_is_not_the_reviewed_models(tmp_path: Path) -> None:
    found = "  <context>x</context>\n  <action>review</action>\n  <results>\n  One bug.\n  </results>"
    action = f"<user_action>\n{found}\n</user_action>"
    write(tmp_path, THREAD, [*PLAIN, said("user", action), said("assistant", "One bug."), said("user", "mend it"),
                             said("assistant", "Done.")])  # fmt: skip
    sessions, report = run(tmp_path)
    assert words(sessions[THREAD]) == [*PLAIN_WORDS, f"u: {action}", "u: mend it", "a: Done."]
    assert report.skipped_lines["replay"] == 1


SPAWNED = {"subagent": {"thread_spawn": {"parent_thread_id": THREAD, "depth": 1}}}


@pytest.mark.parametrize(
    "link",
    [
        {"forked_from_id": THREAD},
        {"parent_thread_id": THREAD},
        {"source": SPAWNED},
        {"history_base": {"thread_id": THREAD, "end_ordinal_exclusive": 16}},
    ],
)
def test_a_fork_goes_with_its_root_and_keeps_only_its_own_words(tmp_path: Path, link: Record) -> None:
    own = [said("user", "fork"), said("assistant", "Forked.")]
    replayed = [] if "history_base" in link else [{**r, "timestamp": "2026-03-02T00:00:00Z"} for r in PLAIN[:16]]
    write(tmp_path, THREAD, list(PLAIN))
    write(tmp_path, OTHER, [meta(OTHER, **link), *replayed, *own])
    grandchild = [*replayed, *own, said("user", "again"), said("assistant", "Forked again.")]
    write(tmp_path, THIRD, [meta(THIRD, forked_from_id=OTHER), *grandchild])
    sessions, report = run(tmp_path)
    assert words(sessions[THREAD]) == PLAIN_WORDS
    assert words(sessions[f"{THREAD}/{OTHER}"]) == ["u: fork", "a: Forked."]
    assert words(sessions[f"{THREAD}/{THIRD}"]) == ["u: again", "a: Forked again."]
    assert {s.root_id for s in sessions.values()} == {THREAD}
    items = sum(r["type"] == "response_item" for r in PLAIN[:16])
    heads = 2 * bool(replayed)  # the parent's head in each copy
    assert report.skipped_lines["replay"] == (2 * items + 2 + heads if replayed else 2)


def test_a_subagent_with_some_of_its_parents_history(tmp_path: Path) -> None:
    """What is handed down may be messages alone: tool calls and reasoning are left out of the copy."""
    messages = [r for r in PLAIN[:16] if r["type"] == "response_item" and r["payload"]["type"] == "message"]
    write(tmp_path, THREAD, list(PLAIN))
    write(tmp_path, OTHER, [meta(OTHER, source=SPAWNED), *messages, said("user", "count"), said("assistant", "1")])
    assert words(run(tmp_path)[0][f"{THREAD}/{OTHER}"]) == ["u: count", "a: 1"]


def test_a_subagent_that_starts_afresh_keeps_its_environment(tmp_path: Path) -> None:
    write(tmp_path, THREAD, list(PLAIN))
    write(tmp_path, OTHER, [meta(OTHER, source=SPAWNED), *PLAIN[2:4], said("user", "count"), said("assistant", "1")])
    sessions, report = run(tmp_path)
    assert words(sessions[f"{THREAD}/{OTHER}"]) == ["s: No network.", f"u: {ENVIRONMENT}", "u: count", "a: 1"]
    assert "replay" not in report.skipped_lines


def test_a_fork_of_a_compacted_thread(tmp_path: Path) -> None:
    kept = [said("user", "Summary: one file.")["payload"]]
    parent = [*PLAIN, line("compacted", {"message": "", "replacement_history": kept}), said("assistant", "Ready.")]
    write(tmp_path, THREAD, list(parent))
    own = [said("user", "fork"), said("assistant", "Forked.")]
    write(tmp_path, OTHER, [meta(OTHER, forked_from_id=THREAD), *parent, *own])
    sessions, _ = run(tmp_path)
    assert words(sessions[f"{THREAD}/{OTHER}#2"]) == ["u: fork", "a: Forked."]
    assert set(sessions) == {THREAD, f"{THREAD}#2", f"{THREAD}/{OTHER}#2"}


def test_siblings_whose_parent_is_gone_share_its_root_and_their_opening_once(tmp_path: Path) -> None:
    for thread, name in ((OTHER, "one"), (THIRD, "two")):
        write(
            tmp_path,
            thread,
            [meta(thread, forked_from_id=THREAD), *PLAIN[2:], said("user", name), said("assistant", name)],
        )
    sessions, _ = run(tmp_path)
    assert words(sessions[f"{THREAD}/{OTHER}"]) == [*PLAIN_WORDS[1:], "u: one", "a: one"]
    assert words(sessions[f"{THREAD}/{THIRD}"]) == ["u: two", "a: two"]


def test_archived_threads_and_a_copy_left_behind(tmp_path: Path) -> None:
    write(tmp_path, THREAD, list(PLAIN), "archived_sessions")
    write(tmp_path, THREAD, list(PLAIN[:16]))
    sessions, report = run(tmp_path)
    assert {s: words(sessions[s]) for s in sessions} == {THREAD: PLAIN_WORDS}
    assert report.files == 2


def test_resuming_appends_to_the_log(tmp_path: Path) -> None:
    write(tmp_path, THREAD, [*PLAIN, meta(), *[said("user", "back"), said("assistant", "Welcome.")]])
    assert words(run(tmp_path)[0][THREAD]) == [*PLAIN_WORDS, "u: back", "a: Welcome."]


def test_threads_that_name_each_other_as_parents_do_not_hang(tmp_path: Path) -> None:
    write(tmp_path, THREAD, [meta(forked_from_id=OTHER), *PLAIN[2:]])
    write(tmp_path, OTHER, [meta(OTHER, forked_from_id=THREAD), said("user", "x"), said("assistant", "y")])
    assert set(run(tmp_path)[0]) == {THREAD, f"{THREAD}/{OTHER}"}


def test_a_log_without_a_head_is_named_by_its_file(tmp_path: Path) -> None:
    write(tmp_path, THREAD, list(PLAIN[2:]))
    assert words(run(tmp_path)[0][THREAD]) == PLAIN_WORDS[1:]


def test_damage_is_counted_by_reason_and_stops_nothing(tmp_path: Path) -> None:
    records: list[Record | str] = [
        *PLAIN[:10],
        json.dumps(PLAIN[10])[:40],
        "null",
        "{" * 3000,
        line("response_item", None),
        line("response_item", {"type": "hologram"}),
        line("constellation", {}),
        {"type": {"a": []}, "payload": {}},
        {},
        *PLAIN[10:],
        '{"timestamp":"2026-03-01T09:00:00Z","type":"resp',
    ]
    write(tmp_path, THREAD, records)
    sessions, report = run(tmp_path)
    assert words(sessions[THREAD]) == PLAIN_WORDS
    damage = {"invalid_json": 3, "malformed": 1, "not_an_object": 1, "unknown_type": 4}
    assert report.skipped_lines == {"bookkeeping": 2, "mirror": 3, **damage}


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    nan = item("function_call", name="f", arguments='{"x": [NaN, 1e999, -1E400, 1.5e3], "y": "\\ud83d"}', call_id="c1")
    write(tmp_path, THREAD, [meta(), said("user", "go"), nan])
    call = run(tmp_path)[0][THREAD].messages[1].tool_calls[0]
    assert call.arguments == {"x": [None, None, None, 1500.0], "y": "\ufffd"}
    json.loads((tmp_path / "out" / "train.jsonl").read_text(), parse_constant=pytest.fail)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
COMPACTED = [
    *PLAIN,
    line("compacted", {"message": "", "replacement_history": [said("user", "Summary.")["payload"]]}),
    event("thread_rolled_back", num_turns=1),
    line("inter_agent_communication", {"content": "x"}),
    item("tool_search_output", call_id="c6", tools=[{"name": "chart"}]),
    item("web_search_call", id="ws1", action={"type": "search", "query": "q"}),
]


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_value_in_any_place_breaks_it(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Every field of a good log, replaced by anything: the run ends, and what is written can be read."""
    records: list[Any] = copy.deepcopy(COMPACTED)
    for _ in range(data.draw(st.integers(1, 3))):
        holder: Any = data.draw(st.sampled_from(records))
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(holder[key], dict | list) and holder[key] and data.draw(st.booleans()):
                holder = holder[key]
            else:
                holder[key] = data.draw(junk)
                break
    home = tmp_path_factory.mktemp("junk")
    write(home, THREAD, records)
    for session in run(home)[0].values():
        assert any(m.role == "assistant" for m in session.messages)


def test_a_prompt_that_begins_with_a_tag_is_a_turn(tmp_path: Path) -> None:
    """What the program put in begins with tags of its own, and is taken back with the turn before it."""
    records = [
        meta(),
        said("user", "<environment_context>\n<cwd>/p</cwd></environment_context>"),
        said("user", "one"),
        said("assistant", "1"),
        said("user", "<div> is broken"),
        said("assistant", "2"),
        said("user", "<turn_aborted>\nThe user interrupted.\n</turn_aborted>"),
        event("thread_rolled_back", num_turns=1),
        said("user", "two"),
        said("assistant", "3"),
    ]
    write(tmp_path, THREAD, records)
    sessions, _ = run(tmp_path)
    assert words(sessions[THREAD])[1:] == ["u: one", "a: 1", "u: two", "a: 3"]
    assert words(sessions[f"{THREAD}~1"])[0] == "u: <div> is broken"
