"""Claude Code's logs: each thing that facts about the format name, and what no damage may do."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ground.errors import FileFormatError
from spark.speech.sessions import Message
from tests.claude_logs import (
    OTHER,
    SESSION,
    Record,
    answer,
    attachment,
    call,
    full,
    progress,
    record,
    result,
    run,
    text,
    user,
    words,
    write,
)

PLAIN = [
    user("u1", None, "list the files"),
    answer("a1", "u1", "msg_A", {"type": "thinking", "thinking": "use ls", "signature": "x"}),
    answer("a2", "a1", "msg_A", text("I look.")),
    answer("a3", "a2", "msg_A", call("t1", cmd="ls")),
    answer("a4", "a3", "msg_A", call("t2", cmd="pwd")),
    result("r1", "a3", "t1", "a.py"),
    result("r2", "a4", "t2", [text("/home"), {"type": "image", "source": {"data": "AAAA"}}]),
    answer("a5", "r2", "msg_B", text("One file.")),
    user("u2", "a5", [text("thanks"), text("bye")]),
    answer("a6", "u2", "msg_C", text("Bye.")),
]
PLAIN_WORDS = [
    "u: list the files",
    'a: <use ls> I look. Bash({"cmd": "ls"}) Bash({"cmd": "pwd"})',
    "t: a.py",
    "t: /home\n[image]",
    "a: One file.",
    "u: thanks\nbye",
    "a: Bye.",
]


def test_a_block_a_line_becomes_one_message(tmp_path: Path) -> None:
    write(tmp_path, f"{SESSION}.jsonl", list(PLAIN))
    sessions, report = run(tmp_path)
    session = sessions[SESSION]
    assert words(session) == PLAIN_WORDS
    assert [m.tool_call_id for m in session.messages if m.role == "tool"] == ["t1", "t2"]
    assert (session.source, session.started_at) == ("claude", "2026-01-01T00:00:00Z")
    parameters = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
    assert session.tools == ({"type": "function", "function": {"name": "Bash", "parameters": parameters}},)
    assert report.skipped_lines == {}
    assert report.messages == 7


def test_all_blocks_on_a_line_as_old_versions_wrote(tmp_path: Path) -> None:
    blocks = [b for r in PLAIN[1:5] for b in r["message"]["content"]]
    write(tmp_path, f"{SESSION}.jsonl", [PLAIN[0], answer("a4", "u1", "msg_A", *blocks), *PLAIN[5:]])
    assert words(run(tmp_path)[0][SESSION]) == PLAIN_WORDS


@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_order_of_messages_in_the_file_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random
) -> None:
    """Links order a conversation: results may come before calls, answers before questions."""
    groups = [[PLAIN[0]], PLAIN[1:5], *([r] for r in PLAIN[5:])]
    rng.shuffle(groups)
    home = tmp_path_factory.mktemp("shuffled")
    write(home, f"{SESSION}.jsonl", [r for group in groups for r in group])
    sessions, _ = run(home)
    assert {s: words(sessions[s]) for s in sessions} == {SESSION: PLAIN_WORDS}


def test_without_links_the_file_order_holds(tmp_path: Path) -> None:
    records = copy.deepcopy(PLAIN)
    for r in records:
        del r["uuid"], r["parentUuid"]
    records[5], records[4] = records[4], records[5]  # a result before the last call of its response
    write(tmp_path, f"{SESSION}.jsonl", records)
    assert words(run(tmp_path)[0][SESSION]) == PLAIN_WORDS


def test_links_pass_through_records_that_are_no_messages(tmp_path: Path) -> None:
    records = [
        user("u1", None, "hi"),
        record("system", "s1", "u1", subtype="turn_duration", content="1 s"),
        record("progress", "p1", "s1", data={"type": "bash_progress"}),
        answer("a1", "p1", "msg_A", text("hello")),
        record("system", "s2", "a1", subtype="local_command", content="<command-name>/cost</command-name>"),
        user("u2", "s2", "go on"),
        answer("a2", "u2", "msg_B", text("done")),
        {"type": "summary", "summary": "Greeting", "leafUuid": full("a2")},
        *({"type": t} for t in ("file-history-snapshot", "queue-operation", "custom-title", "ai-title")),
        *({"type": t} for t in ("last-prompt", "mode")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, report = run(tmp_path)
    inserted = "u: <command-name>/cost</command-name>"
    assert words(sessions[SESSION]) == ["u: hi", "a: hello", inserted, "u: go on", "a: done"]
    assert report.skipped_lines == {"bookkeeping": 9}
    assert report.prompt_tokens["p50"] == 1  # what the program inserted is no prompt


def test_logs_are_found_at_every_depth_and_subagents_go_with_their_session(tmp_path: Path) -> None:
    def fresh(mark: str) -> list[Record]:
        fields = {"isSidechain": True, "agentId": mark}
        answered = answer(f"b{mark}", f"v{mark}", f"msg_{mark}", text("2"), **fields)
        return [user(f"v{mark}", None, "count", **fields), answered]

    write(tmp_path, f"{SESSION}.jsonl", list(PLAIN))
    write(tmp_path, f"{SESSION}/subagents/agent-ab12.jsonl", fresh("ab12"))
    write(tmp_path, f"{SESSION}/subagents/workflows/w9/agent-cd34.jsonl", fresh("cd34"))
    write(tmp_path, "agent-ef56.jsonl", fresh("ef56"))  # older: beside the session, which it names inside
    write(tmp_path, f"{OTHER}/subagents/agent-0099.jsonl", fresh("0099"))  # its session's log is gone
    (tmp_path / "projects" / "-p" / SESSION / "tool-results").mkdir()
    (tmp_path / "projects" / "-p" / SESSION / "tool-results" / "x.txt").write_text("not a log")
    sessions, report = run(tmp_path)
    agents = [f"{SESSION}/agent-ab12", f"{SESSION}/agent-cd34", f"{SESSION}/agent-ef56", f"{OTHER}/agent-0099"]
    assert set(sessions) == {SESSION, *agents}
    assert all(words(sessions[a]) == ["u: count", "a: 2"] for a in agents)
    assert sessions[agents[0]].root_id == SESSION
    assert report.files == 5


def test_inline_sidechains_become_sessions_of_the_same_root(tmp_path: Path) -> None:
    side: Record = {"isSidechain": True}
    records = [
        user("u1", None, "go"),
        answer("a1", "u1", "msg_A", call("t1", "Task", prompt="count")),
        user("v1", None, "count", **side),
        user("w1", None, "weigh", **side),  # two subagents at once, their lines mixed
        answer("b1", "v1", "msg_X", call("t7", "Grep", pattern="x"), **side),
        answer("c1", "w1", "msg_Y", text("heavy"), **side),
        result("b2", "b1", "t7", "2", **side),
        answer("b3", "b2", "msg_Z", text("two"), **side),
        result("r1", "a1", "t1", "two"),
        answer("a2", "r1", "msg_B", text("It is two.")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, _ = run(tmp_path)
    assert words(sessions[SESSION]) == ["u: go", 'a: Task({"prompt": "count"})', "t: two", "a: It is two."]
    assert words(sessions[f"{SESSION}/side-v1-0000-"]) == ["u: count", 'a: Grep({"pattern": "x"})', "t: 2", "a: two"]
    assert words(sessions[f"{SESSION}/side-w1-0000-"]) == ["u: weigh", "a: heavy"]
    assert [t["function"]["name"] for t in sessions[f"{SESSION}/side-v1-0000-"].tools] == ["Grep"]
    assert [t["function"]["name"] for t in sessions[SESSION].tools] == ["Task"]


def test_subagents_inside_progress_lines(tmp_path: Path) -> None:
    inner = [user("v1", None, "count"), answer("b1", "v1", "msg_X", text("2"))]
    lines = [progress(f"p{i}", r) for i, r in enumerate(inner)]
    main = [user("u1", None, "go"), answer("a1", "u1", "msg_A", text("wait")), *lines]
    write(tmp_path, f"{SESSION}.jsonl", main)
    sessions, report = run(tmp_path)
    assert words(sessions[f"{SESSION}/agent-ab12"]) == ["u: count", "a: 2"]
    assert words(sessions[SESSION]) == ["u: go", "a: wait"]
    assert report.skipped_lines == {}

    write(tmp_path, f"{SESSION}/subagents/agent-ab12.jsonl", inner)  # newer: the subagent has its own log too
    sessions, report = run(tmp_path)
    assert words(sessions[f"{SESSION}/agent-ab12"]) == ["u: count", "a: 2"]
    assert report.skipped_lines == {"mirror": 2}


def test_a_subagent_that_replays_its_parent_keeps_only_its_own_words(tmp_path: Path) -> None:
    """Copies have the parent's message ids; other request ids, and user lines may have other record ids."""
    write(tmp_path, f"{SESSION}.jsonl", list(PLAIN))
    copies = copy.deepcopy(PLAIN[:8])
    for r in copies:
        r |= {"isSidechain": True, "agentId": "ab12", "requestId": "req_other"}
        r["uuid"], r["parentUuid"] = "z" + r["uuid"], r["parentUuid"] and "z" + r["parentUuid"]
    # The same words as the copied question, but later.
    own = [user("v1", "za5", "list the files"), answer("b1", "v1", "msg_X", text("again"))]
    write(tmp_path, f"{SESSION}/subagents/agent-ab12.jsonl", copies + own)
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION]) == PLAIN_WORDS
    assert words(sessions[f"{SESSION}/agent-ab12"]) == ["u: list the files", "a: again"]
    assert report.skipped_lines == {"replay": 8}


def test_forks_and_resumed_copies_keep_only_their_own_words(tmp_path: Path) -> None:
    def copied(extra: Record, session: str) -> list[Record]:
        return [{**r, "sessionId": session, **extra} for r in PLAIN[:8]]

    fork, resumed = OTHER, "33333333-3333-4333-8333-333333333333"
    write(tmp_path, f"{SESSION}.jsonl", list(PLAIN))
    own = [user("f1", "a5", "fork"), answer("f2", "f1", "msg_F", text("forked"))]
    write(tmp_path, f"{fork}.jsonl", copied({"forkedFrom": {"sessionId": SESSION}}, fork) + own)
    more = [user("g1", "a6", "resume"), answer("g2", "g1", "msg_G", text("resumed"))]
    again = [{**r, "sessionId": resumed, "timestamp": "2026-01-02T00:00:00Z"} for r in (PLAIN[-1], *more)]
    write(tmp_path, f"{resumed}.jsonl", again)  # nothing names the parent: a shared record does
    sessions, report = run(tmp_path)
    assert {s: words(sessions[s]) for s in sessions} == {
        SESSION: PLAIN_WORDS,
        f"{SESSION}/{fork}": ["u: fork", "a: forked"],
        f"{SESSION}/{resumed}": ["u: resume", "a: resumed"],
    }
    assert report.skipped_lines == {"replay": 9}


def test_of_a_session_and_its_resumed_copy_the_longer_one_is_whole(tmp_path: Path) -> None:
    write(tmp_path, f"{OTHER}.jsonl", list(PLAIN[:8]))
    write(tmp_path, f"{SESSION}.jsonl", list(PLAIN))
    sessions, report = run(tmp_path)
    assert {s: words(sessions[s]) for s in sessions} == {SESSION: PLAIN_WORDS}
    assert report.skipped_lines == {"replay": 8}


def test_logs_that_share_nothing_but_a_title_stay_apart(tmp_path: Path) -> None:
    write(tmp_path, f"{SESSION}.jsonl", list(PLAIN))
    other = [user("k1", None, "hi", sessionId=OTHER), answer("k2", "k1", "msg_K", text("ho"), sessionId=OTHER)]
    write(tmp_path, f"{OTHER}.jsonl", [{"type": "summary", "summary": "wrong", "leafUuid": full("a6")}, *other])
    assert set(run(tmp_path)[0]) == {SESSION, OTHER}


@pytest.mark.parametrize("key", ["ownerAccountUuid", "organizationUuid", "commandUuid"])
def test_sessions_of_one_account_are_no_family(tmp_path: Path, key: str) -> None:
    """Newer versions name the account in every log."""
    owner = {"type": "bridge-session", "sessionId": SESSION, key: "99999999-9999-4999-8999-999999999999"}
    write(tmp_path, f"{SESSION}.jsonl", [*PLAIN, owner])
    other = [user("k1", None, "hi", sessionId=OTHER), answer("k2", "k1", "msg_K", text("ho"), sessionId=OTHER)]
    write(tmp_path, f"{OTHER}.jsonl", [*other, owner | {"sessionId": OTHER}])
    assert set(run(tmp_path)[0]) == {SESSION, OTHER}


def test_sessions_whose_tools_found_the_same_thing_are_no_family(tmp_path: Path) -> None:
    found = {"uuid": "99999999-9999-4999-8999-999999999999", "name": "a document"}
    for name, k in ((SESSION, "k"), (OTHER, "m")):
        own = {"sessionId": name}
        asked = [user(f"{k}1", None, "hi", **own), answer(f"{k}2", f"{k}1", f"msg_{k}", call(k), **own)]
        read = result(f"{k}3", f"{k}2", k, "A document.", toolUseResult=found, **own)
        write(tmp_path, f"{name}.jsonl", [*asked, read])
    assert set(run(tmp_path)[0]) == {SESSION, OTHER}
    copied = [user("k1", None, "hi"), result("k3", "k2", "k", "A document.", toolUseResult=found)]
    write(tmp_path, f"{OTHER}.jsonl", [*copied, answer("m4", "k3", "msg_n", text("It is here."))])
    assert set(run(tmp_path)[0]) == {SESSION, f"{SESSION}/{OTHER}"}


COMPACTED = [
    *PLAIN[:8],
    record("system", "s1", None, subtype="compact_boundary", compactMetadata={"trigger": "auto"}),
    user("u3", "s1", "Summary: one file.", isCompactSummary=True),
    user("u4", "u3", "now delete it"),
    answer("a7", "u4", "msg_D", text("Deleted.")),
]


def test_a_compaction_begins_a_session_with_its_summary(tmp_path: Path) -> None:
    write(tmp_path, f"{SESSION}.jsonl", list(COMPACTED))
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION]) == PLAIN_WORDS[:5]
    assert words(sessions[f"{SESSION}#2"]) == ["u: Summary: one file.", "u: now delete it", "a: Deleted."]
    assert sessions[f"{SESSION}#2"].root_id == SESSION
    assert report.prompt_tokens["p99"] == 4  # "list the files", not the summary


def test_a_compaction_without_links_or_boundary(tmp_path: Path) -> None:
    records = copy.deepcopy([r for r in COMPACTED if r["type"] != "system"])
    for r in records:
        del r["uuid"], r["parentUuid"]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, _ = run(tmp_path)
    assert words(sessions[f"{SESSION}#2"]) == ["u: Summary: one file.", "u: now delete it", "a: Deleted."]


@pytest.mark.parametrize(
    "kept",
    [
        {"preservedSegment": {"headUuid": full("a5"), "tailUuid": full("a5")}},
        {"preservedMessages": {"anchorUuid": full("u3"), "uuids": [full("a4"), full("a5")]}},
    ],
)
def test_what_answers_a_message_that_a_compaction_kept_comes_after_the_summary(tmp_path: Path, kept: Record) -> None:
    records = copy.deepcopy(COMPACTED)
    records[8]["compactMetadata"] |= kept
    records[10]["parentUuid"] = full("a5")
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, _ = run(tmp_path)
    assert words(sessions[f"{SESSION}#2"]) == ["u: Summary: one file.", "u: now delete it", "a: Deleted."]
    assert words(sessions[SESSION]) == PLAIN_WORDS[:5]


def test_turns_that_were_taken_back_become_a_branch(tmp_path: Path) -> None:
    branch = [user("u9", "a5", "and the hidden ones?"), answer("a9", "u9", "msg_E", text("None."))]
    write(tmp_path, f"{SESSION}.jsonl", [*PLAIN, *branch])
    sessions, _ = run(tmp_path)
    assert words(sessions[SESSION]) == [*PLAIN_WORDS[:5], "u: and the hidden ones?", "a: None."]
    assert words(sessions[f"{SESSION}~1"]) == PLAIN_WORDS[5:]
    start_over = [user("u8", None, "list all"), answer("a8", "u8", "msg_F", text("All."))]
    write(tmp_path, f"{SESSION}.jsonl", [*PLAIN, *start_over])
    sessions, _ = run(tmp_path)
    assert words(sessions[SESSION]) == ["u: list all", "a: All."]
    assert words(sessions[f"{SESSION}~1"]) == PLAIN_WORDS


def test_a_queued_command_is_a_message_of_the_user(tmp_path: Path) -> None:
    queued = attachment("q1", "a5", "queued_command", prompt="wait")
    listed = attachment("q2", "q1", "queued_command", prompt=[text("stop")])
    other = attachment("q3", "q2", "plan_mode", reminderType="full")
    end = answer("a6", "q3", "msg_C", text("Waiting."))
    write(tmp_path, f"{SESSION}.jsonl", [*PLAIN[:8], queued, listed, other, end])
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION])[5:] == ["u: wait", "u: stop", "a: Waiting."]
    assert report.skipped_lines == {"bookkeeping": 1}
    assert report.dropped_content == {"attachment/plan_mode": {"records": 1, "characters": 0}}


def test_white_space_before_reasoning_does_not_break_a_response(tmp_path: Path) -> None:
    thought = {"type": "thinking", "thinking": "use ls", "signature": "x"}
    records = [
        user("u1", None, "list"),
        answer("a1", "u1", "msg_A", text("\n\n")),
        answer("a2", "a1", "msg_A", thought),
        answer("a3", "a2", "msg_A", text("I look.")),
        answer("a4", "a3", "msg_A", call("t1", cmd="ls")),
        answer("a5", "a4", "msg_A", text(" \n")),  # and after a call
        answer("a6", "a5", "msg_A", call("t2", cmd="pwd")),
        result("r1", "a4", "t1", "a.py"),
        result("r2", "a6", "t2", "/home"),
        answer("a7", "r2", "msg_B", text("\n")),  # said nothing else: the turn stays
        user("u2", "a7", "go on"),
        answer("a8", "u2", "msg_C", text("One."), thought, text("Two.")),  # words before reasoning have a turn
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    assert words(run(tmp_path)[0][SESSION]) == [
        "u: list",
        'a: <use ls> I look. Bash({"cmd": "ls"}) Bash({"cmd": "pwd"})',
        "t: a.py",
        "t: /home",
        "a: \n",
        "u: go on",
        "a: One.",
        "a: <use ls> Two.",
    ]


# The context was cleared when a plan was accepted: the result of the call that proposed it comes after that.
PLAN = [
    result("r9", None, "t9", "User has approved your plan."),
    user("u9", "r9", "Implement the following plan: delete it."),
    answer("a9", "u9", "msg_P", text("Deleted.")),
]


@pytest.mark.parametrize("proposed", [True, False])
def test_a_restart_drops_the_result_that_the_model_never_saw(tmp_path: Path, proposed: bool) -> None:
    """In the log where the plan was proposed, and in one of its own, whose first message is the result."""
    ask = [answer("a8", "a6", "msg_D", call("t9", "ExitPlanMode", plan="delete it"))] if proposed else []
    write(tmp_path, f"{SESSION}.jsonl", [*(PLAIN if proposed else []), *ask, *PLAN])
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION]) == ["u: Implement the following plan: delete it.", "a: Deleted."]
    assert report.dropped_blocks == {"orphan_result": 1}
    if proposed:
        assert words(sessions[f"{SESSION}~1"]) == [*PLAIN_WORDS, 'a: ExitPlanMode({"plan": "delete it"})']


def test_a_restart_keeps_the_words_beside_its_orphan(tmp_path: Path) -> None:
    first = user("r9", None, [*PLAN[0]["message"]["content"], text("Implement it.")])
    write(tmp_path, f"{SESSION}.jsonl", [*PLAIN, first, answer("a9", "r9", "msg_P", text("Deleted."))])
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION]) == ["u: Implement it.", "a: Deleted."]
    assert report.dropped_blocks == {"orphan_result": 1}


def test_a_result_whose_call_was_damaged_is_no_orphan(tmp_path: Path) -> None:
    write(tmp_path, f"{SESSION}.jsonl", [PLAIN[0], *PLAIN[1:3], "{", PLAIN[5], *PLAIN[7:]])
    sessions, report = run(tmp_path)
    assert "t: a.py" in words(sessions[SESSION])
    assert report.dropped_blocks == {}


def test_without_any_links_null_parents_begin_nothing(tmp_path: Path) -> None:
    write(tmp_path, f"{SESSION}.jsonl", [{**r, "parentUuid": None} for r in PLAIN])
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION]) == PLAIN_WORDS
    assert report.dropped_blocks == {}


def test_what_is_dropped_is_counted_by_the_text_in_it(tmp_path: Path) -> None:
    """A kind of record that nobody knows yet stands out by what it held; names are bounded in number and length."""
    novel = {"type": "mind meld", "uuid": "n1", "parentUuid": None, "cwd": "/a b", "body": {"deep": ["two words", "x"]}}
    notes = [record("system", f"s{i}", "a6", subtype="turn_duration", content="1 s") for i in range(3)]
    many = [{"type": f"{'kind' * 50}{i}" if i % 2 else f"{i}", "text": "a b"} for i in range(600)]
    end = answer("a7", "a6", "msg_D", text("end"), {"type": "novelty", "text": "new words"})
    write(tmp_path, f"{SESSION}.jsonl", [*PLAIN, novel, novel, *notes, *many, end])
    found = run(tmp_path)[1].dropped_content
    assert len(found) == 25
    assert max(map(len, found)) == 64
    assert list(found.items())[:3] == [
        ("kind" * 16, {"records": 300, "characters": 900}),
        ("mind_meld", {"records": 2, "characters": 18}),
        ("system/turn_duration", {"records": 3, "characters": 9}),
    ]
    assert list(found)[-1] == "other kinds"
    assert sum(row["records"] for row in found.values()) == 2 + 3 + 600 + 1
    assert sum(row["characters"] for row in found.values()) == 18 + 9 + 1800 + 9


def test_blocks_of_every_kind(tmp_path: Path) -> None:
    search = {"type": "server_tool_use", "id": "srv1", "name": "web_search", "input": {"query": "q"}}
    page = {"type": "web_search_result", "url": "u", "title": "T", "encrypted_content": "AAAA"}
    found = {"type": "web_search_tool_result", "tool_use_id": "srv1", "content": [page]}
    reference = {"type": "tool_reference", "tool_name": "Glob"}
    records = [
        user("u1", None, [text("see"), {"type": "image", "source": {"data": "A" * 99}}, {"type": "document"},
                          {"type": "document", "source": {"type": "text", "data": "Said."}}]),
        answer("a1", "u1", "msg_A", {"type": "redacted_thinking", "data": "AA"}, {"type": "thinking", "thinking": ""},
               text("I search."), search, found, text("Found."), {"type": "novelty"}),
        answer("a2", "a1", "msg_B", call("t1")),
        result("r1", "a2", "t1", [reference, {"type": "image"}]),
        answer("a3", "r1", "msg_C", call("t2"), call("t3")),
        user("r2", "a3", [{"type": "tool_result", "tool_use_id": "t3", "content": None},
                          {"type": "tool_result", "tool_use_id": "t2", "content": "two"}, text("and stop")]),
        answer("a4", "r2", "msg_D", {"type": "thinking", "thinking": "", "signature": "s"}),
        answer("a5", "a4", "msg_D", text("Stopped.")),
    ]  # fmt: skip
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION]) == [
        "u: see\n[image]\n[document]\n[document]\nSaid.",
        'a: I search. web_search({"query": "q"})',
        't: {"url": "u", "title": "T"}',
        "a: Found.",
        "a: Bash({})",
        't: {"tool_name": "Glob"}\n[image]',
        "a: Bash({}) Bash({})",
        "t: two",
        "t:",
        "u: and stop",
        "a: Stopped.",
    ]
    assert report.dropped_blocks == {"encrypted": 3, "unknown": 1}
    assert report.skipped_lines == {"no_text": 1}


def test_damage_is_counted_by_reason_and_stops_nothing(tmp_path: Path) -> None:
    records: list[Record | str] = [
        *PLAIN[:3],
        json.dumps(PLAIN[3])[:50],
        "",
        "[1, 2]",
        '"text"',
        "[" * 50_000,
        record("user", "n1", "a2", None) | {"message": None},
        record("assistant", "n2", "a2", "words"),
        record("quantum", "n3", "a2"),
        {"uuid": 7, "parentUuid": ["x"], "type": {"a": 1}},
        answer("n4", "a2", "msg_S", text("API Error: 529"), isApiErrorMessage=True),
        PLAIN[3],
        PLAIN[3],
        {**PLAIN[3], "uuid": "a3-again", "requestId": "r2"},
        *PLAIN[4:],
        '{"type":"assistant","message":{"id":"msg_',
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    path = tmp_path / "projects" / "-p" / f"{SESSION}.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b'{"type":"user","message":{"content":"caf\xe9"}}\n')
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION]) == [*PLAIN_WORDS, "u: caf\ufffd"]
    assert report.skipped_lines == {
        "invalid_json": 3,
        "malformed": 1,
        "not_an_object": 2,
        "null_message": 1,
        "replay": 2,
        "synthetic": 1,
        "unknown_type": 2,
    }


def test_a_result_that_comes_twice_is_kept_once(tmp_path: Path) -> None:
    records = [*PLAIN[:6], result("r9", "r1", "t1", "b.py"), *PLAIN[6:]]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION]) == PLAIN_WORDS
    assert report.skipped_lines == {"replay": 1}


def test_half_a_surrogate_pair_is_mended(tmp_path: Path) -> None:
    halves = call("t", x="\ude00 ok \U0001f600")
    write(tmp_path, f"{SESSION}.jsonl", [user("u1", None, "cut \ud83d"), answer("a1", "u1", "m", halves)])
    session = run(tmp_path)[0][SESSION]
    assert words(session)[0] == "u: cut \ufffd"
    assert session.messages[1].tool_calls[0].arguments == {"x": "\ufffd ok \U0001f600"}


def test_one_message_id_for_everything_does_not_melt_the_session(tmp_path: Path) -> None:
    """Some local servers give every response the same id."""
    records = [
        user("u1", None, "one"),
        answer("a1", "u1", "msg_local", text("1")),
        user("u2", "a1", "two"),
        answer("a2", "u2", "msg_local", text("2")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    agent = [user("v1", None, "three"), answer("b1", "v1", "msg_local", text("3"))]
    write(tmp_path, f"{SESSION}/subagents/agent-ab12.jsonl", agent)
    sessions, _ = run(tmp_path)
    assert words(sessions[SESSION]) == ["u: one", "a: 1", "u: two", "a: 2"]
    assert words(sessions[f"{SESSION}/agent-ab12"]) == ["u: three", "a: 3"]


def test_a_session_without_a_response_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, f"{SESSION}.jsonl", [user("u1", None, "hello?")])
    with pytest.raises(FileFormatError, match=r"no session \(skipped: no_response 1\)"):
        run(tmp_path)


def test_rings_of_links_do_not_hang(tmp_path: Path) -> None:
    records = [
        user("u1", "a1", "hi"),
        answer("a1", "u1", "msg_A", text("ho")),
        record("mode", "m1", "m2"),
        record("mode", "m2", "m1"),
        answer("a2", "m2", "msg_B", text("round")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    said = [w for s in run(tmp_path)[0].values() for w in words(s)]
    assert sorted(said) == ["a: ho", "a: round", "u: hi"]


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_value_in_any_place_breaks_it(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Every field of a good log, replaced by anything: the run ends, and what is written can be read."""
    records = copy.deepcopy([*COMPACTED, progress("p1", PLAIN[0])])
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
    write(home, f"{SESSION}.jsonl", records)
    for session in run(home)[0].values():
        assert any(m.role == "assistant" for m in session.messages)
        assert all(isinstance(m, Message) for m in session.messages)
