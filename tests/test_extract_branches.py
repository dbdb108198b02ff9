"""Claude Code's logs: going back to the first prompt, starting over, and what branches and copies share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.claude_logs import SESSION, Record, answer, attachment, call, record, result, run, text, user, words, write

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
