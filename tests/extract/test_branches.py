"""Claude Code's logs: going back to the first prompt, starting over, and what branches and copies share."""

from __future__ import annotations

from pathlib import Path

import pytest

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

HOOK = "SessionStart:startup"


def hook(uuid: str, parent: str | None, name: str = HOOK) -> Record:
    """What a hook at the start of a conversation wrote, which the model read."""
    return attachment(uuid, parent, "hook_success", hookName=name, hookEvent="SessionStart", content="ctx")


def hook_words(name: str = HOOK) -> str:
    return f"u: <system-reminder>\n{name} hook success: ctx\n</system-reminder>"


FIRST = {
    "message": [],
    "progress": [record("progress", "p0", None, data={"type": "hook_progress", "hookName": HOOK})],
    "notice": [record("system", "p0", None, subtype="informational", content="x")],
    "two": [
        record("progress", "q0", None, data={"type": "hook_progress"}),
        record("system", "p0", "q0", subtype="informational", content="x"),
    ],
    "attachment": [hook("p0", None)],
}


@pytest.mark.parametrize("first", FIRST)
def test_going_back_to_the_first_prompt_is_a_branch_whatever_comes_before_it(tmp_path: Path, first: str) -> None:
    """A record that is no message may come first; what the model read of it, both tries read."""
    above = "p0" if FIRST[first] else None
    tries = [
        user("u1", above, "first try"),
        answer("a1", "u1", "msg_A", text("bad answer")),
        user("u2", above, "second try"),
        answer("a2", "u2", "msg_B", text("good answer")),
        user("u3", above, "third try"),
        answer("a3", "u3", "msg_C", text("best answer")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", [*FIRST[first], *tries])
    note = [hook_words()] if first == "attachment" else []
    assert {name: words(session) for name, session in run(tmp_path)[0].items()} == {
        SESSION: [*note, "u: third try", "a: best answer"],
        f"{SESSION}~1": [*note, "u: first try", "a: bad answer"],
        f"{SESSION}~2": [*note, "u: second try", "a: good answer"],
    }


@pytest.mark.parametrize("name", ["SessionStart:resume", "SessionStart:compact"])
def test_a_hook_of_a_session_that_goes_on_begins_nothing(tmp_path: Path, name: str) -> None:
    """Its record may have no parent, yet the model reads on; two tries after it are branches of the same turn."""
    records = [
        user("u1", None, "go"),
        answer("a1", "u1", "msg_A", text("done")),
        hook("p0", None, name),
        user("u2", "p0", "more"),
        answer("a2", "u2", "msg_B", text("more done")),
        user("u3", "p0", "less"),
        answer("a3", "u3", "msg_C", text("less done")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, _ = run(tmp_path)
    assert words(sessions[SESSION]) == ["u: go", "a: done", hook_words(name), "u: less", "a: less done"]
    assert words(sessions[f"{SESSION}~1"]) == [hook_words(name), "u: more", "a: more done"]


@pytest.mark.parametrize("beside", [True, False])
def test_a_restart_whose_first_record_is_a_hook_drops_its_orphan(tmp_path: Path, beside: bool) -> None:
    """The prompt is a record of its own, or stands beside the result that the model never saw."""
    name = "SessionStart:clear"
    begun = [result("r1", "p0", "t9", "approved"), user("u2", "r1", "Implement")]
    if beside:
        begun = [user("r1", "p0", [*begun[0]["message"]["content"], text("Implement")])]
    records = [
        user("u1", None, "plan"),
        answer("a1", "u1", "msg_A", call("t9", "ExitPlanMode", plan="x")),
        hook("p0", None, name),
        *begun,
        answer("a2", "r1" if beside else "u2", "msg_B", text("implementing")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION]) == [hook_words(name), "u: Implement", "a: implementing"]
    assert words(sessions[f"{SESSION}~1"]) == ["u: plan", 'a: ExitPlanMode({"plan": "x"})']
    assert report.dropped_blocks == {"orphan_result": 1}


@pytest.mark.parametrize("hooked", [True, False])
def test_a_restart_after_a_compaction_is_in_the_segment_after_it(tmp_path: Path, hooked: bool) -> None:
    """The first segment keeps its id: what took the place of the plan is the last of the second."""
    records = [
        user("u1", None, "go"),
        answer("a1", "u1", "msg_A", text("done")),
        record("system", "b1", None, subtype="compact_boundary"),
        user("s1", "b1", "Summary.", isCompactSummary=True),
        answer("a2", "s1", "msg_B", call("t9", "ExitPlanMode", plan="x")),
        *([hook("p0", None, "SessionStart:clear")] if hooked else []),
        result("r1", "p0" if hooked else None, "t9", "approved"),
        user("u2", "r1", "Implement"),
        answer("a3", "u2", "msg_C", text("implementing")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    note = [hook_words("SessionStart:clear")] if hooked else []
    assert {name: words(session) for name, session in run(tmp_path)[0].items()} == {
        SESSION: ["u: go", "a: done"],
        f"{SESSION}#2": [*note, "u: Implement", "a: implementing"],
        f"{SESSION}#2~1": ["u: Summary.", 'a: ExitPlanMode({"plan": "x"})'],
    }


INTERRUPTED = "[Request interrupted by user]"


@pytest.mark.parametrize("compacted", [True, False])
def test_who_went_back_and_left_takes_nothing_along(tmp_path: Path, compacted: bool) -> None:
    """What two tries share goes with the one that was answered: a summary, or a long prompt that was interrupted."""
    begun = [
        user("u1", None, "go"),
        answer("a1", "u1", "msg_A", text("done")),
        record("system", "b1", None, subtype="compact_boundary"),
        user("s1", "b1", "Summary.", isCompactSummary=True),
    ]
    records = [
        *(begun if compacted else [user("s1", None, "A long prompt")]),
        user("u2", "s1", "more"),
        answer("a2", "u2", "msg_B", text("more done")),
        user("u3", "a2", "less"),
        answer("a3", "u3", "msg_C", text("less done")),
        user("u4", "u2", "not yet"),
        user("u5", "u4", INTERRUPTED),
        user("u6", "s1", "in other words"),
        user("u7", "u6", INTERRUPTED),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, report = run(tmp_path)
    answered = ["u: more", "a: more done", "u: less", "a: less done"]
    assert {name: words(session) for name, session in sessions.items()} == (
        {SESSION: ["u: go", "a: done"], f"{SESSION}#2": ["u: Summary.", *answered]}
        if compacted
        else {SESSION: ["u: A long prompt", *answered]}
    )
    assert report.skipped_lines["no_response"] == 4


def test_of_branches_the_answered_one_has_what_they_share(tmp_path: Path) -> None:
    records = [
        user("u1", None, "go"),
        answer("a1", "u1", "msg_A", text("done")),
        user("u2", "a1", "a long prompt"),
        answer("a2", "u2", "msg_B", text("long answer")),
        user("u3", "u2", "a note"),
        user("u4", "u3", INTERRUPTED),
        user("u5", "a1", "something else"),
        answer("a5", "u5", "msg_C", text("else")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    assert {name: words(session) for name, session in run(tmp_path)[0].items()} == {
        SESSION: ["u: go", "a: done", "u: something else", "a: else"],
        f"{SESSION}~1": ["u: a long prompt", "a: long answer"],
    }


START = [user("u1", None, "go"), answer("a1", "u1", "msg_01AAAAAAAAAAAA", call("t1", cmd="ls"))]
REFUSED = result("r1", "a1", "t1", "refused")["message"]["content"]


@pytest.mark.parametrize("told", [True, False])
def test_a_fork_keeps_the_words_beside_a_result_of_a_copied_call(tmp_path: Path, told: bool) -> None:
    """The response is its parent's, what the user then said is its own; a result alone is no beginning."""
    copied = [r | {"sessionId": OTHER, "forkedFrom": {"sessionId": SESSION, "messageUuid": r["uuid"]}} for r in START]
    own = [
        user("r2", "a1", [*REFUSED, *([text("use git")] if told else [])], sessionId=OTHER),
        answer("a3", "r2", "msg_01CCCCCCCCCCCC", text("I use git.")),
    ]
    end = [result("r1", "a1", "t1", "a.py"), answer("a2", "r1", "msg_01BBBBBBBBBBBB", text("One file."))]
    write(tmp_path, f"{SESSION}.jsonl", [*START, *end])
    write(tmp_path, f"{OTHER}.jsonl", [*copied, *own])
    sessions, report = run(tmp_path)
    assert words(sessions[SESSION]) == ["u: go", 'a: Bash({"cmd": "ls"})', "t: a.py", "a: One file."]
    assert words(sessions[f"{SESSION}/{OTHER}"]) == [*(["u: use git"] if told else []), "a: I use git."]
    assert report.skipped_lines == {"replay": 2 if told else 3}


def test_a_fork_of_a_fork_has_the_words_beside_a_result_once(tmp_path: Path) -> None:
    asked = [*START, user("r1", "a1", [*REFUSED, text("use git")])]
    write(tmp_path, f"{SESSION}.jsonl", [*asked, answer("a2", "r1", "msg_01BBBBBBBBBBBB", text("I use git."))])
    fork = {"sessionId": OTHER, "forkedFrom": {"sessionId": SESSION}}
    again = answer("a3", "r1", "msg_01CCCCCCCCCCCC", text("No git here."))
    for renamed in (False, True):  # versions gave copies ids of their own
        copied = [r | fork | ({"uuid": f"n{r['uuid']}"} if renamed and r is not START[1] else {}) for r in asked]
        write(tmp_path, f"{OTHER}.jsonl", [*copied, again | ({"parentUuid": copied[-1]["uuid"]})])
        sessions, _ = run(tmp_path)
        assert words(sessions[SESSION])[-2:] == ["u: use git", "a: I use git."]
        assert words(sessions[f"{SESSION}/{OTHER}"]) == ["a: No git here."]


def test_a_subagent_that_is_a_fork_begins_with_what_it_was_told(tmp_path: Path) -> None:
    """Its log repeats its parent's messages; the task stands beside a result that says that it is a fork."""
    task = answer("a1", "u1", "msg_01AAAAAAAAAAAA", call("t1", "Task", prompt="count"))
    write(
        tmp_path,
        f"{SESSION}.jsonl",
        [START[0], task, result("r1", "a1", "t1", "Two."), answer("a2", "r1", "m", text("2"))],
    )
    fork = {"isSidechain": True, "agentId": "ab12"}
    begun = result("v1", "a1", "t1", "Fork started")["message"]["content"]
    own = [user("v1", "a1", [*begun, text("count")], **fork), answer("b1", "v1", "msg_01BB", text("Two."), **fork)]
    write(tmp_path, f"{SESSION}/subagents/agent-ab12.jsonl", [START[0] | fork, task | fork, *own])
    assert words(run(tmp_path)[0][f"{SESSION}/agent-ab12"]) == ["u: count", "a: Two."]


@pytest.mark.parametrize("linked", [True, False])
def test_a_response_may_say_the_same_twice(tmp_path: Path, linked: bool) -> None:
    """A line that comes again hangs off the same line as before, or off a copy of it; without links it is a copy."""
    lines = [text("Checking."), call("t1", cmd="ls"), text("Checking."), call("t2", cmd="pwd")]
    said = [answer(f"a{i}", f"a{i - 1}" if i else "u1", "msg_A", line) for i, line in enumerate(lines)]
    copies = [answer(f"b{i}", f"b{i - 1}" if i else "u1", "msg_A", line) for i, line in enumerate(lines)]
    records = [START[0], *said, *copies[:2], result("r1", "a3", "t1", "x"), answer("a9", "r1", "msg_B", text("Done."))]
    if not linked:
        records = [{key: value for key, value in r.items() if key not in ("uuid", "parentUuid")} for r in records]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, report = run(tmp_path)
    said_words = "".join(m.content for m in sessions[SESSION].messages)
    assert said_words.count("Checking.") == (2 if linked else 1)
    assert [c.id for m in sessions[SESSION].messages for c in m.tool_calls] == ["t1", "t2"]
    assert report.skipped_lines == {"replay": 2 if linked else 3}
