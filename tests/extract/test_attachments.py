"""What Claude Code put before the model beside the messages: where the model read it, in the program's words."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark.extract.attachments import sent_texts
from tests.claude_logs import (
    OTHER,
    SESSION,
    Record,
    answer,
    attachment,
    call,
    record,
    result,
    run,
    text,
    user,
    words,
    write,
)


def reminder(words: str) -> str:
    return f"<system-reminder>\n{words}\n</system-reminder>"


def file(path: str, content: str, **fields: Any) -> Record:
    inner = {"filePath": path, "content": content, "numLines": 2, "startLine": 1, "totalLines": 2}
    return {"filename": path, "content": {"type": "text", "file": inner | fields}}


READ = 'Called the Read tool with the following input: {"file_path":"/p/é.py"}'
FILE = file("/p/é.py", "a = 1\n\tb")


def test_a_file_named_with_an_at_sign_is_read_after_the_prompt(tmp_path: Path) -> None:
    records = [
        user("u1", None, "see @é.py"),
        attachment("f1", "u1", "file", **FILE, version="2.1.200"),
        answer("a1", "f1", "msg_A", text("Seen.")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, report = run(tmp_path)
    found = "Result of calling the Read tool:\n1\ta = 1\n2\t\tb"
    shown = f"{reminder(READ)}\n{reminder(found)}"
    assert words(sessions[SESSION]) == ["u: see @é.py", f"u: {shown}", "a: Seen."]
    assert report.skipped_lines == report.dropped_content == {}
    assert report.prompt_tokens["p99"] == 3  # what the program put in is no prompt


AGENTS = ["- Explore: search. (Tools: Read)", "- Plan: plan. (Tools: All tools)"]
CASES: list[tuple[str, Record, list[str]]] = [
    ("file", FILE, [READ, "Result of calling the Read tool:\n1\ta = 1\n2\t\tb"]),
    ("file", file("/x", "z", startLine=12), ['Called the Read tool with the following input: {"file_path":"/x"}',
                                             "Result of calling the Read tool:\n12\tz"]),
    ("file", {**FILE, "truncated": True}, [READ, "Result of calling the Read tool:\n1\ta = 1\n2\t\tb",
                                           "Note: The file /p/é.py was too large and has been truncated to the first "
                                           "2000 lines. Don't tell the user about this truncation. Use Read to read "
                                           "more of the file if you need."]),
    ("file", {"filename": "/p/é.py", "content": {"type": "image", "file": {"base64": "AAAA"}}},
     [READ, "Result of calling the Read tool:\n[image]"]),
    ("file", {"filename": "/p/é.py", "content": {"type": "notebook", "file": {"cells": [{"source": "x"}]}}},
     [READ, 'Result of calling the Read tool:\n[{"source": "x"}]']),
    ("directory", {"path": "/p", "content": "a\nb"},
     ['Called the Bash tool with the following input: {"command":"ls /p","description":"Lists files in /p"}',
      "Result of calling the Bash tool:\na\nb"]),
    ("edited_text_file", {"filename": "/p/a", "snippet": "1\tx"},
     ["Note: /p/a was modified, either by the user or by a linter. This change was intentional, so make sure to take "
      "it into account as you proceed (ie. don't revert it unless the user asks you to). Don't tell the user this, "
      "since they are already aware. Here are the relevant changes (shown with line numbers):\n1\tx"]),
    ("skill_listing", {"content": "- a: b", "skillCount": 1},
     ["The following skills are available for use with the Skill tool:\n\n- a: b"]),
    ("agent_listing_delta", {"addedLines": AGENTS, "isInitial": True, "showConcurrencyNote": True},
     ["Available agent types for the Agent tool:\n" + "\n".join(AGENTS) + "\n\nWhen you launch multiple agents for "
      "independent work, send them in a single message with multiple tool uses so they run concurrently."]),
    ("agent_listing_delta", {"addedLines": AGENTS[:1], "removedTypes": ["Plan"]},
     [f"New agent types are now available for the Agent tool:\n{AGENTS[0]}\n\nThe following agent types are no longer "
      "available:\n- Plan"]),
    ("deferred_tools_delta", {"addedNames": ["A", "B"], "addedLines": ["A", "B"], "removedNames": []},
     ["The following deferred tools are now available via ToolSearch. Their schemas are NOT loaded — calling them "
      'directly will fail with InputValidationError. Use ToolSearch with query "select:<name>[,<name>...]" to load '
      "tool schemas before calling them:\nA\nB"]),
    ("deferred_tools_delta", {"addedNames": [], "removedNames": ["C"]},
     ["The following deferred tools are no longer available (their MCP server disconnected). Do not search for them — "
      "ToolSearch will return no match:\nC"]),
    ("mcp_instructions_delta", {"addedBlocks": ["## s\nUse it.", "## t"], "removedNames": []},
     ["# MCP Server Instructions\n\nThe following MCP servers have provided instructions for how to use their tools "
      "and resources:\n\n## s\nUse it.\n\n## t"]),
    ("nested_memory", {"path": "/p/CLAUDE.md", "content": {"path": "/p/CLAUDE.md", "content": "Be brief."}},
     ["Contents of /p/CLAUDE.md:\n\nBe brief."]),
    ("hook_additional_context", {"hookName": "SessionStart", "content": ["one", "two"]},
     ["SessionStart hook additional context: one\ntwo"]),
    ("hook_success", {"hookName": "SessionStart:startup", "hookEvent": "SessionStart", "content": "Welcome."},
     ["SessionStart:startup hook success: Welcome."]),
    ("hook_success", {"hookName": "PreToolUse:Bash", "hookEvent": "PreToolUse", "content": "ok"}, []),
    ("hook_blocking_error", {"hookName": "Stop", "blockingError": {"command": "lint", "blockingError": "no"}},
     ['Stop hook blocking error from command: "lint": no']),
    ("async_hook_response", {"response": {"systemMessage": "s", "hookSpecificOutput": {"additionalContext": "c"}}},
     ["s", "c"]),
    ("invoked_skills", {"skills": [{"name": "n", "path": "/s", "content": "Do."}]},
     ["The following skills were invoked in this session. Continue to follow these guidelines:\n\n### Skill: n\nPath: "
      "/s\n\nDo."]),
    ("diagnostics", {"files": [{"uri": "file:///p/a.ts", "diagnostics": [
        {"message": "bad", "severity": "Error", "range": {"start": {"line": 2, "character": 4}}, "code": 7,
         "source": "ts"}]}]},
     ["<new-diagnostics>The following new diagnostic issues were detected:\n\na.ts:\n  ✘ [Line 3:5] bad [7] (ts)"
      "</new-diagnostics>"]),
    ("mcp_resource", {"content": {"contents": [{"text": "T"}, {"blob": "AA"}]}},
     ["Full contents of resource:\nT\nDo NOT read this resource again unless you think it may have changed, since you "
      "already have the full contents."]),
    ("selected_lines_in_ide", {"lineStart": 1, "lineEnd": 2, "filename": "/p/a", "content": "x"},
     ["The user selected the lines 1 to 2 from /p/a:\nx\n\nThis may or may not be related to the current task."]),
    ("total_tokens_reminder", {"text": "<total_tokens>9 tokens left</total_tokens>"},
     ["<total_tokens>9 tokens left</total_tokens>"]),
    # Nothing was sent, or its words are not in the log.
    ("skill_listing", {"content": ""}, []),
    ("file", file("/x", ""), []),
    ("deferred_tools_delta", {"addedNames": []}, []),
    ("mcp_instructions_delta", {"addedBlocks": []}, []),
    ("already_read_file", FILE, []),
    ("hook_non_blocking_error", {"stderr": "not found"}, []),
    ("plan_mode", {"reminderType": "full"}, []),
    ("novelty", {"content": "who knows"}, []),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "texts"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_each_kind_in_the_programs_words(kind: str, fields: Record, texts: list[str]) -> None:
    assert sent_texts(attachment("x1", "u1", kind, **fields)) == [reminder(t) for t in texts]


def test_lists_of_todos_and_tasks() -> None:
    todos = attachment("x1", "u1", "todo_reminder", content=[{"content": "mend", "status": "pending"}], itemCount=1)
    assert "\n\n\nHere are the existing contents of your todo list:\n\n[1. [pending] mend]\n" in sent_texts(todos)[0]
    tasks = attachment("x1", "u1", "task_reminder", content=[{"id": "3", "subject": "test", "status": "completed"}])
    assert "\n\n\nHere are the existing tasks:\n\n#3. [completed] test\n" in sent_texts(tasks)[0]
    empty = sent_texts(attachment("x1", "u1", "task_reminder", content=[], itemCount=0))[0]
    assert "The task tools haven't been used recently." in empty and "existing tasks" not in empty


def test_what_was_sent_is_taken_as_it_is_where_the_record_has_it() -> None:
    rendered = [{"content": reminder("one")}, {"content": [text("two"), {"type": "image"}]}, {"content": 5}, None]
    known = attachment("x1", "u1", "file", **FILE, rendered=rendered)
    assert sent_texts(known) == [reminder("one"), "two\n[image]"]
    assert sent_texts(attachment("x1", "u1", "novelty", rendered=rendered[:1])) == [reminder("one")]
    assert sent_texts(attachment("x1", "u1", "file", **FILE, rendered=[])) == []


def test_old_versions_numbered_lines_with_arrows_and_quoted_results() -> None:
    old = sent_texts(attachment("x1", "u1", "file", **FILE, version="2.0.76"))
    assert old[1] == reminder('Result of calling the Read tool: "     1→a = 1\\n     2→\\tb"')


def test_a_long_selection_is_cut_as_the_program_cuts_it() -> None:
    fields = {"lineStart": 1, "lineEnd": 9, "filename": "/p/a", "content": "x" * 2001}
    shown = sent_texts(attachment("x1", "u1", "selected_lines_in_ide", **fields))[0]
    assert "x" * 2000 + "\n... (truncated)\n\n" in shown


def listing(uuid: str, parent: str | None, name: str, **fields: Any) -> Record:
    return attachment(uuid, parent, "skill_listing", content=name, rendered=[{"content": name}], **fields)


def test_the_place_in_the_conversation(tmp_path: Path) -> None:
    """Before the first prompt, after a prompt, beside a call, after a result: no place is lost or breaks a turn."""
    records = [
        listing("x0", None, "<s>start</s>"),
        user("u1", "x0", "hi"),
        listing("x1", "u1", "<s>prompt</s>"),
        answer("a1", "x1", "msg_A", text("I look.")),
        listing("x2", "a1", "<s>inside</s>"),  # between the lines of one response
        answer("a2", "x2", "msg_A", call("t1", cmd="ls")),
        listing("x3", "a2", "<s>beside</s>"),  # a hook before the call: nothing hangs off it
        result("r1", "a2", "t1", "a.py"),
        listing("x4", "r1", "<s>result</s>"),
        listing("x5", "x4", "<s>chained</s>"),
        answer("a3", "x5", "msg_B", text("One.")),
        listing("x6", "a3", "<s>last</s>"),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, _ = run(tmp_path)
    assert set(sessions) == {SESSION}
    assert words(sessions[SESSION]) == [
        "u: <s>start</s>",
        "u: hi",
        "u: <s>prompt</s>",
        'a: I look. Bash({"cmd": "ls"})',
        "t: a.py",
        *(f"u: <s>{name}</s>" for name in ("inside", "beside", "result", "chained")),
        "a: One.",
        "u: <s>last</s>",
    ]


def test_notes_stay_with_their_turns_when_these_are_taken_back(tmp_path: Path) -> None:
    records = [
        user("u1", None, "hi"),
        listing("x1", "u1", "<s>1</s>"),
        answer("a1", "x1", "msg_A", text("ho")),
        user("u2", "a1", "left"),
        listing("x2", "u2", "<s>2</s>"),
        answer("a2", "x2", "msg_B", text("gone")),
        user("u3", "a1", "right"),
        listing("x3", "u3", "<s>3</s>"),
        answer("a3", "x3", "msg_C", text("here")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, _ = run(tmp_path)
    assert words(sessions[SESSION]) == ["u: hi", "u: <s>1</s>", "a: ho", "u: right", "u: <s>3</s>", "a: here"]
    assert words(sessions[f"{SESSION}~1"]) == ["u: left", "u: <s>2</s>", "a: gone"]


def test_files_shown_again_after_a_compaction_come_after_the_summary(tmp_path: Path) -> None:
    records = [
        user("u1", None, "hi"),
        answer("a1", "u1", "msg_A", text("ho")),
        record("system", "s1", None, subtype="compact_boundary", logicalParentUuid="a1"),
        user("u2", "s1", "Summary.", isCompactSummary=True),
        listing("x1", "u2", "<s>file</s>"),
        answer("a2", "x1", "msg_B", text("on")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    assert words(run(tmp_path)[0][f"{SESSION}#2"]) == ["u: Summary.", "u: <s>file</s>", "a: on"]


def test_without_links_the_file_order_holds(tmp_path: Path) -> None:
    records = [
        listing("x0", None, "<s>0</s>"),
        user("u1", None, "hi"),
        listing("x1", None, "<s>1</s>"),
        answer("a1", None, "msg_A", call("t1")),
        result("r1", None, "t1", "one"),
        listing("x2", None, "<s>2</s>"),
        answer("a2", None, "msg_B", text("ho")),
        listing("x3", None, "<s>3</s>"),
    ]
    for r in records:
        del r["uuid"], r["parentUuid"]
    write(tmp_path, f"{SESSION}.jsonl", records)
    expected = ["u: <s>0</s>", "u: hi", "u: <s>1</s>", "a: Bash({})", "t: one", "u: <s>2</s>", "a: ho", "u: <s>3</s>"]
    assert words(run(tmp_path)[0][SESSION]) == expected


def test_a_subagents_attachments_are_in_its_thread_alone(tmp_path: Path) -> None:
    side: Record = {"isSidechain": True, "agentId": "ab12"}
    inline = [
        user("v1", None, "count", **side),
        listing("y1", "v1", "<s>agent</s>", **side),
        answer("b1", "y1", "msg_X", text("2"), **side),
    ]
    main = [user("u1", None, "go"), listing("x1", "u1", "<s>main</s>"), answer("a1", "x1", "msg_A", text("wait"))]
    write(tmp_path, f"{SESSION}.jsonl", [*main, *inline])
    sessions, _ = run(tmp_path)
    assert words(sessions[SESSION]) == ["u: go", "u: <s>main</s>", "a: wait"]
    assert words(sessions[f"{SESSION}/agent-ab12"]) == ["u: count", "u: <s>agent</s>", "a: 2"]
    write(tmp_path, f"{SESSION}/subagents/agent-ab12.jsonl", list(inline))
    sessions, report = run(tmp_path)
    assert words(sessions[f"{SESSION}/agent-ab12"]) == ["u: count", "u: <s>agent</s>", "a: 2"]
    assert words(sessions[SESSION]) == ["u: go", "u: <s>main</s>", "a: wait"]
    assert report.skipped_lines == {"mirror": 3}


def test_copies_of_notes_are_replays_and_new_ones_on_a_copy_are_kept(tmp_path: Path) -> None:
    records = [user("u1", None, "hi"), listing("x1", "u1", "<s>1</s>"), answer("a1", "x1", "msg_A", text("ho"))]
    copies = [{**r, "sessionId": OTHER, "forkedFrom": {"sessionId": SESSION}} for r in records]
    renamed = [{**r, "uuid": f"z{r['uuid']}", "parentUuid": r["parentUuid"] and f"z{r['parentUuid']}"} for r in copies]
    for lines, last in ((copies, "a1"), (renamed, "za1")):
        own = [
            {**listing("x9", last, "<s>resumed</s>"), "sessionId": OTHER},
            user("f1", "x9", "fork", sessionId=OTHER),
            answer("f2", "f1", "msg_F", text("forked"), sessionId=OTHER),
        ]
        write(tmp_path, f"{SESSION}.jsonl", records)
        if last == "za1":
            own[0]["parentUuid"] = renamed[-1]["uuid"]
        write(tmp_path, f"{OTHER}.jsonl", [*lines, *own])
        sessions, report = run(tmp_path)
        assert words(sessions[SESSION]) == ["u: hi", "u: <s>1</s>", "a: ho"]
        assert words(sessions[f"{SESSION}/{OTHER}"]) == ["u: <s>resumed</s>", "u: fork", "a: forked"]
        assert report.skipped_lines == {"replay": 3}


def test_the_same_attachment_twice_is_kept_once(tmp_path: Path) -> None:
    note = listing("x1", "u1", "<s>1</s>")
    write(tmp_path, f"{SESSION}.jsonl", [user("u1", None, "hi"), note, note, answer("a1", "x1", "msg_A", text("ho"))])
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION]) == ["u: hi", "u: <s>1</s>", "a: ho"]
    assert report.skipped_lines == {"replay": 1}


@pytest.mark.slow
@pytest.mark.parametrize("linked", [True, False])
def test_many_notes_take_time_by_their_number(tmp_path: Path, linked: bool) -> None:
    notes = [listing(f"x{i}", "u1" if linked else None, f"<s>{i}</s>") for i in range(30_000)]
    write(tmp_path, f"{SESSION}.jsonl", [user("u1", None, "hi"), *notes, answer("a1", "u1", "msg_A", text("ho"))])
    started = time.process_time()
    sessions, _ = run(tmp_path)
    assert time.process_time() - started < 30  # by the square of it: minutes
    assert words(sessions[SESSION]) == ["u: hi", *(f"u: <s>{i}</s>" for i in range(30_000)), "a: ho"]


def test_kinds_that_gave_nothing_are_counted_by_name(tmp_path: Path) -> None:
    unread = [
        attachment("x1", "u1", "hook_success", hookEvent="PreToolUse", hookName="p", content="", stdout="long words"),
        attachment("x2", "x1", "novelty", body="what is this"),
        attachment("x3", "x2", "novelty", body=["and this one"]),
    ]
    write(tmp_path, f"{SESSION}.jsonl", [user("u1", None, "hi"), *unread, answer("a1", "x3", "msg_A", text("ho"))])
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION]) == ["u: hi", "a: ho"]
    assert list(report.dropped_content.items()) == [
        ("attachment/novelty", {"records": 2, "characters": 24}),
        ("attachment/hook_success", {"records": 1, "characters": 10}),
    ]
    assert report.skipped_lines == {"bookkeeping": 3}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(case=st.sampled_from(CASES), key=st.text(max_size=8), value=values, data=st.data())
@settings(max_examples=300, deadline=None)
def test_no_value_in_any_field_breaks_it(case: tuple[str, Record, list[str]], key: str, value: Any, data: Any) -> None:
    kind, fields, _ = case
    damaged = {**fields, data.draw(st.sampled_from([*fields, "skills", "version"])): value, key: value}
    made = {"type": "attachment", "attachment": {**damaged, "type": kind}, "version": damaged.get("version")}
    for made["rendered"] in (None, value, [value], [{"content": value}]):
        assert all(isinstance(text, str) and text for text in sent_texts(made))
