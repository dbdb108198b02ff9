"""Prompts typed while the model worked: those that it read are in the session once, the others are not."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.claude_logs import SESSION, Record, answer, attachment, call, result, run, text, user, words, write


def queue(operation: str, content: Any = None, **fields: Any) -> Record:
    """A movement of the queue: no uuid, no parent, and a content as some versions write it."""
    known = {} if content is None else {"content": content}
    return {"type": "queue-operation", "operation": operation, "sessionId": SESSION, **known, **fields}


START = [user("u1", None, "go", version="2.1.20"), answer("a1", "u1", "msg_A", call("t1", cmd="ls"))]
RESULT = result("r1", "a1", "t1", "a.py")
END = answer("a2", "r1", "msg_B", text("Done."))
SAID = ["u: go", 'a: Bash({"cmd": "ls"})', "t: a.py"]


def session(home: Path, *records: Record) -> list[str]:
    write(home, f"{SESSION}.jsonl", list(records))
    return words(run(home)[0][SESSION])


@pytest.mark.parametrize("named", [True, False])
def test_a_prompt_that_was_sent_into_the_turn_is_read_there(tmp_path: Path, named: bool) -> None:
    """The removal names it or not; where it stands among the results of the turn does not matter."""
    put, removed = queue("enqueue", "also b"), queue("remove", "also b" if named else None)
    for lines in ([put, RESULT, removed], [put, removed, RESULT]):
        assert session(tmp_path, *START, *lines, END) == [*SAID, "u: also b", "a: Done."]
        sessions, report = run(tmp_path)
        assert report.skipped_lines == {"bookkeeping": 1}  # the enqueue: the removal gave the prompt
        assert report.prompt_tokens["p90"] == 2
        assert set(sessions) == {SESSION}


def test_a_prompt_that_waits_at_the_end_was_not_read(tmp_path: Path) -> None:
    assert session(tmp_path, *START, RESULT, queue("enqueue", "also b"), END) == [*SAID, "a: Done."]


@pytest.mark.parametrize("named", [True, False])
def test_what_the_user_took_back_was_not_read(tmp_path: Path, named: bool) -> None:
    put = [queue("enqueue", "one"), queue("enqueue", "two")]
    back = [queue("popAll", "one"), queue("popAll", "two")] if named else [queue("popAll")]
    again = [queue("enqueue", "one and two"), queue("remove")]
    assert session(tmp_path, *START, *put, *back, RESULT, *again, END) == [*SAID, "u: one and two", "a: Done."]


def test_a_prompt_that_began_a_turn_is_the_users_message(tmp_path: Path) -> None:
    lines = [queue("enqueue", "next"), RESULT, END, queue("dequeue"), user("u2", "a2", "next")]
    last = answer("a3", "u2", "msg_C", text("Next."))
    assert session(tmp_path, *START, *lines, last) == [*SAID, "a: Done.", "u: next", "a: Next."]


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("prompt", ["also b", [text("also b"), {"type": "image", "source": {}}]])
def test_an_attachment_of_the_prompt_is_the_same_prompt(tmp_path: Path, order: str, prompt: Any) -> None:
    removed = queue("remove", "also b", reason="absorbed_mid_turn")
    attached = attachment("x1", "r1", "queued_command", prompt=prompt)
    lines = [attached, removed] if order == "before" else [removed, attached]
    found = session(tmp_path, *START, queue("enqueue", "also b"), RESULT, *lines, END)
    assert [w for w in found if "also b" in w] == ["u: also b" if isinstance(prompt, str) else "u: also b\n[image]"]
    assert len(found) == 5


def test_a_users_message_of_the_same_words_before_any_answer_is_the_same_prompt(tmp_path: Path) -> None:
    """And another one after an answer is not."""
    sent = [queue("enqueue", "more"), RESULT, queue("remove")]
    stopped = session(tmp_path, *START, *sent, user("u2", "r1", "more"), answer("a2", "u2", "msg_B", text("Done.")))
    assert stopped == [*SAID, "u: more", "a: Done."]
    again = session(tmp_path, *START, *sent, END, user("u2", "a2", "more"), answer("a3", "u2", "msg_C", text("Yes.")))
    assert again == [*SAID, "u: more", "a: Done.", "u: more", "a: Yes."]


def test_the_same_words_twice_are_two_prompts(tmp_path: Path) -> None:
    put = [queue("enqueue", "more"), queue("enqueue", "more")]
    assert session(tmp_path, *START, *put, RESULT, queue("remove"), queue("remove"), END).count("u: more") == 2
    one_back = session(tmp_path, *START, *put, RESULT, queue("remove"), queue("popAll", "more"), END)
    assert one_back.count("u: more") == 1


def test_a_removal_without_its_enqueue_names_the_prompt_itself(tmp_path: Path) -> None:
    assert session(tmp_path, *START, RESULT, queue("remove", "also b"), END) == [*SAID, "u: also b", "a: Done."]
    assert session(tmp_path, *START, RESULT, queue("remove"), END) == [*SAID, "a: Done."]


def test_a_removal_for_another_reason_was_no_reading(tmp_path: Path) -> None:
    lines = [queue("enqueue", "also b"), RESULT, queue("remove", "also b", reason="withdrawn")]
    assert session(tmp_path, *START, *lines, END) == [*SAID, "a: Done."]
    assert run(tmp_path)[1].dropped_content["queue-operation/remove"] == {"records": 1, "characters": 6}


@pytest.mark.parametrize(("version", "read"), [("2.1.20", True), ("2.1.200", False)])
def test_notifications_that_newer_versions_sent_to_subagents(tmp_path: Path, version: str, read: bool) -> None:
    """They go through the session's queue; the log of whom they were sent to has the attachment."""
    note = "<task-notification> it is done </task-notification>"
    records = [{**START[0], "version": version}, START[1], queue("enqueue", note), RESULT, queue("remove", note), END]
    assert session(tmp_path, *records) == [*SAID, *([f"u: {note}"] if read else []), "a: Done."]
    assert run(tmp_path)[1].prompt_tokens["p99"] == 1  # nobody typed it


def test_prompts_of_blocks_and_of_nothing(tmp_path: Path) -> None:
    put = [queue("enqueue"), queue("enqueue", [text("see"), {"type": "image", "source": {"data": "AA"}}])]
    assert session(tmp_path, *START, *put, RESULT, queue("remove"), queue("remove"), END) == [
        *SAID,
        "u: see\n[image]",
        "a: Done.",
    ]


def test_a_prompt_sent_before_a_compaction_stays_before_it(tmp_path: Path) -> None:
    summary = [user("u2", None, "Summary.", isCompactSummary=True), answer("a2", "u2", "msg_B", text("Done."))]
    write(tmp_path, f"{SESSION}.jsonl", [*START, queue("enqueue", "also b"), RESULT, queue("remove"), *summary])
    sessions, _ = run(tmp_path)
    assert words(sessions[SESSION]) == [*SAID, "u: also b"]
    assert words(sessions[f"{SESSION}#2"]) == ["u: Summary.", "a: Done."]


def test_a_copy_of_the_queue_is_a_replay(tmp_path: Path) -> None:
    at = {"timestamp": "2026-01-01T00:00:01Z"}
    records = [*START, queue("enqueue", "also b", **at), RESULT, queue("remove", **at), END]
    copies = [{**r, "sessionId": "f", "forkedFrom": {"sessionId": SESSION}} for r in records]
    more = [user("f1", "a2", "fork", sessionId="f"), answer("f2", "f1", "msg_F", text("forked"), sessionId="f")]
    write(tmp_path, f"{SESSION}.jsonl", records)
    write(tmp_path, "f.jsonl", copies + more)
    sessions, _ = run(tmp_path)
    assert words(sessions[SESSION]) == [*SAID, "u: also b", "a: Done."]
    assert words(sessions[f"{SESSION}/f"]) == ["u: fork", "a: forked"]


# What the program does to its queue; a `remove` or `dequeue` takes the oldest, `popAll` all.
moves = st.lists(
    st.tuples(st.sampled_from(["enqueue", "enqueue", "remove", "dequeue", "popAll"]), st.sampled_from("abc")),
    max_size=14,
)


@pytest.mark.slow
@given(moves=moves, named=st.booleans(), attached=st.sampled_from(["", "before", "after"]))
@settings(max_examples=150, deadline=None)
def test_any_interleaving_keeps_what_was_read_once(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, str]], named: bool, attached: str
) -> None:
    """Against a model of the queue: each step is a turn, so that what was read in it comes before its answer."""
    waiting: deque[str] = deque()
    records: list[Record] = [user("u0", None, "go"), answer("a0", "u0", "msg_0", text("0"))]
    expected = ["u: go", "a: 0"]
    last = "a0"
    for i, (operation, word) in enumerate(moves, 1):
        words_of = f"prompt {word}"
        prompt = user(f"u{i}", last, f"turn {i}")
        said = [f"u: turn {i}"]
        if operation == "enqueue":
            waiting.append(words_of)
            records += [queue("enqueue", words_of), prompt]
        elif operation == "popAll":
            for taken in waiting:
                records += [queue("popAll", taken)] if named else []
            records += [prompt] if named else [queue("popAll"), prompt]
            waiting.clear()
        elif operation == "remove" and waiting:
            read = waiting.popleft()
            removed = queue("remove", read if named else None)
            note = attachment(f"x{i}", f"u{i}", "queued_command", prompt=read)
            records += [prompt, removed]
            records[-1:] = {"": [removed], "before": [note, removed], "after": [removed, note]}[attached]
            said.append(f"u: {read}")
        elif operation == "dequeue" and waiting:
            read = waiting.popleft()
            prompt = user(f"u{i}", last, read)
            records += [queue("dequeue"), prompt]
            said = [f"u: {read}"]
        else:
            records.append(prompt)
        records.append(answer(f"a{i}", f"u{i}", f"msg_{i}", text(str(i))))
        expected += [*said, f"a: {i}"]
        last = f"a{i}"
    home = tmp_path_factory.mktemp("queue")
    assert session(home, *records) == expected


@pytest.mark.slow
@given(st.lists(st.sampled_from(["enqueue", "remove", "dequeue", "popAll", "clear", 5, None]), max_size=12), st.data())
@settings(max_examples=100, deadline=None)
def test_no_sequence_of_movements_breaks_it(
    tmp_path_factory: pytest.TempPathFactory, operations: list[Any], data: st.DataObject
) -> None:
    contents = st.sampled_from([None, "a", " a ", "b", "", 5, [text("a")], {"text": "a"}, [{"type": "image"}]])
    lines = [queue(operation, data.draw(contents)) for operation in operations]
    found = session(tmp_path_factory.mktemp("queue"), *START, *lines, RESULT, END)
    assert [w for w in found if not w.startswith("u:")] == [*SAID[1:], "a: Done."]
    enqueued = sum(operation == "enqueue" for operation in operations)
    assert len(found) - 4 <= enqueued + sum(operation == "remove" for operation in operations)


def test_a_prompt_stays_in_its_turn_when_the_user_goes_back(tmp_path: Path) -> None:
    """Also without a record of an interruption; what the user typed instead did not have it."""
    records = [
        *START[:1],
        answer("a0", "u1", "msg_0", text("Yes?")),
        user("u2", "a0", "list"),
        answer("a1", "u2", "msg_A", call("t1", cmd="ls")),
        queue("enqueue", "also b"),
        RESULT,
        queue("remove"),
        user("u3", "a0", "count"),
        answer("a3", "u3", "msg_C", text("Two.")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, _ = run(tmp_path)
    assert words(sessions[SESSION]) == ["u: go", "a: Yes?", "u: count", "a: Two."]
    assert words(sessions[f"{SESSION}~1"]) == ["u: list", 'a: Bash({"cmd": "ls"})', "t: a.py", "u: also b"]
