"""What no whole log of the other tests shows alone: numbers at their bounds, records that say little, loops, ties."""

from __future__ import annotations

import json
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark.extract import attachments
from spark.extract import intake as intake_of
from spark.extract.dropped import Dropped
from spark.extract.intake import Intake, parse_json, read_records, records_of
from spark.extract.openings import Openings
from spark.extract.typed_ahead import TypedAhead, TypedPrompt
from tests.claude_logs import attachment
from tests.extract.test_codex import THREAD, called, event, item, meta, output, run, said, words, write


@pytest.mark.parametrize(("value", "expected"), [
    (0, 0), (-1, 7), (1, 1), ((1 << 31) - 1, (1 << 31) - 1), (1 << 31, 7), ("3", 7), (None, 7),
])  # fmt: skip
def test_numbers_of_an_attachment(value: object, expected: int) -> None:
    assert attachments._count(value, 7) == expected


@pytest.mark.parametrize("depth", [500, 700, 900, 5000])
def test_what_is_nested_too_deeply_is_no_json(depth: int) -> None:
    """Also where there are halves of surrogate pairs to mend, which takes more of the stack than to read it."""
    with pytest.raises(ValueError):
        parse_json('{"a":"\\ud83d\\ude00","b":%s}' % ("[" * depth + "]" * depth))


WORDS = [{"type": "text", "text": '{"type": 1}{'}]
USER = {"parentUuid": None, "sessionId": "s", "type": "user", "message": {"content": WORDS}}
ITEM = {"timestamp": "t", "type": "response_item", "payload": {"type": "message", "content": [{"type": "x"}]}}


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("record", [USER, ITEM])
def test_what_was_written_behind_half_a_record_is_read(record: dict[str, Any], spaced: bool) -> None:
    """A program that was killed in a write leaves no line end, a power cut zeros, and the next one appends to that."""
    whole = json.dumps(record, separators=None if spaced else (",", ":")).encode()
    halves = [whole[:n] for n in range(1, len(whole))]
    cases = [(b"", 0, 0), (b"\0" * 300, 0, 0), (b"\xef\xbb\xbf\0", 0, 0), (whole, 1, 0), (whole + b"\r" + whole, 2, 0)]
    cases += [(half, 0, 1) for half in halves]
    for before, n_more, n_lost in [*cases, (whole + whole[:30], 0, 1), (whole[:30] + whole, 1, 1)]:
        intake = Intake(False, lambda _: None, Path())
        found = records_of(before + whole + b"\0\0\r\n", intake)
        assert found == [record] * (1 + n_more), before
        assert intake.skipped == Counter({"invalid_json": n_lost} if n_lost else {})
    intake = Intake(False, lambda _: None, Path())
    for n in range(1, len(whole)):  # neither a half alone, nor what is left of a record's end, is a record
        assert records_of(whole[:n], intake) == records_of(whole[n:], intake) == []
    assert records_of(b"\0" * 99, intake) == [] and intake.skipped == {"invalid_json": 2 * (len(whole) - 1)}


def test_a_block_at_the_end_of_half_a_record_is_no_record() -> None:
    intake = Intake(False, lambda _: None, Path())
    for block in ({"type": "text", "text": "hi"}, {"type": "user", "message": {"content": "hi"}, "uuid": "u"}):
        for before in ('"content":[', '"content":[{"type":"text"},', '"data":{"message":'):
            assert records_of(f'{{"type":"user",{before}{json.dumps(block)}'.encode(), intake) == []
    assert intake.skipped == {"invalid_json": 6}


@given(st.lists(st.dictionaries(st.text(), st.text(), min_size=1), min_size=1, max_size=4), st.booleans(), st.data())
@settings(max_examples=50, deadline=None)
def test_files_in_utf_16_are_read_as_others(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]], marked: bool, data: st.DataObject
) -> None:
    """With a byte order mark, as PowerShell writes them, or without; cut anywhere, nothing before the cut is lost."""
    path = tmp_path_factory.getbasetemp() / "16.jsonl"
    text = "\r\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n"
    encoding = data.draw(st.sampled_from(["utf-16-le", "utf-16-be"]))
    written = ("\ufeff" * marked + text).encode(encoding)
    path.write_bytes(written)
    intake = Intake(False, lambda _: None, Path())
    assert list(read_records(path, intake)) == records and not intake.skipped
    kept = data.draw(st.integers(0, len(written)))
    path.write_bytes(written[:kept])
    whole = len(written[:kept].decode(encoding, "ignore").removeprefix("\ufeff").split("\r\n")) - 1
    found = list(read_records(path, intake))
    assert found[:whole] == records[:whole] and len(found) <= whole + 1
    path.write_bytes(written + b"\n\0")  # another one grows: what came later is not read
    intake.sizes = {path: len(written)}
    assert list(read_records(path, intake)) == records


def test_any_number_of_zeros_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_of, "MAX_LINE_BYTES", 100)
    intake, path, line = Intake(False, lambda _: None, Path()), tmp_path / "z.jsonl", json.dumps({"a": 1}).encode()
    for zeros in (99, 100, 101, 5000):
        path.write_bytes(line + b"\n" + bytes(zeros) + line + b"\n")
        assert list(read_records(path, intake)) == [{"a": 1}] * 2 and not intake.skipped, zeros


def test_a_long_line_that_is_no_record_takes_no_time() -> None:
    intake = Intake(False, lambda _: None, Path())
    began_s = time.process_time()
    for text, n in ((b'{"type":[', intake_of._MENDED // 9), (b'{"type":"a', 3_000_000)):
        assert records_of(text * n, intake) == []
    assert time.process_time() - began_s < 10 and intake.skipped == {"invalid_json": 2}


def test_what_is_written_into_a_sentence() -> None:
    assert [attachments._scalar(value) for value in ("a", 0, 1.5, True, None, [])] == ["a", "0", "1.5", "", "", ""]


@pytest.mark.parametrize(("text", "version"), [("2.1.20", (2, 1, 20)), ("v2.1.20", ()), ("x 2.1.20", ()), ("", ())])
def test_versions(text: str, version: tuple[int, ...]) -> None:
    assert attachments.version_of(text) == version


def test_skills_that_were_not_invoked_are_not_announced() -> None:
    skill = {"name": "s", "path": "/p/s", "content": "do"}
    shown = attachments.sent_texts(attachment("x", None, "invoked_skills", skills=[skill]))
    assert len(shown) == 1 and "### Skill: s" in shown[0]
    assert attachments.sent_texts(attachment("x", None, "invoked_skills", skills=[])) == []
    assert attachments.sent_texts(attachment("x", None, "invoked_skills", skills=[{"name": "s"}])) == []


def test_of_kinds_with_as_much_text_the_more_frequent_one_is_first() -> None:
    dropped = Dropped()
    for kind in ("a", "b", "b", "c"):
        dropped.add(kind, {"n": 1})
    assert list(dropped.largest()) == ["b", "a", "c"]


def test_records_that_hang_off_each_other() -> None:
    """A chain ends where a record has none above, or one that it has passed."""
    openings = Openings({1: 2, 2: 3, 3: None, 4: 5, 5: 4})
    for parent, chain in ((1, [1, 2, 3]), (4, [4, 5]), (9, []), (None, [])):
        node: Any = SimpleNamespace(parent=parent)
        assert list(islice(openings.chain(node), 9)) == chain


@pytest.mark.parametrize(("kind", "hook", "attached"), [
    ("attachment", "", True), ("attachment", "SessionStart:resume", False), ("progress", "", False),
])  # fmt: skip
def test_what_an_attachment_without_a_parent_is(kind: str, hook: str, attached: bool) -> None:
    openings = Openings({5: None})
    openings.add(5, {"type": kind, kind if kind == "attachment" else "data": {"hookName": hook}}, 0)
    node: Any = SimpleNamespace(parent=5)
    found = openings.find(node)
    assert found is not None and found.attached == attached


def test_an_attachment_stands_for_one_removal() -> None:
    queue, prompt = TypedAhead(), TypedPrompt(1, 0, 2, True, Counter())
    queue.enqueue(prompt)
    queue.enqueue(prompt)
    queue.attach(prompt.key, since=0)
    note: Any = SimpleNamespace(order=1, dropped=False)
    assert [queue.send(prompt, note) for _ in range(3)] == [False, True, True]


# --- Codex ----------------------------------------------------------------------------------------


def spoken(home: Path, *records: Any) -> tuple[list[str], dict[str, int]]:
    """The log of these records in short, and the lines that were skipped."""
    write(home, THREAD, [meta(), *records])
    sessions, report = run(home)
    return words(sessions[THREAD]), dict(report.skipped_lines)


def test_what_repeats_items_is_counted(tmp_path: Path) -> None:
    """Events before the first item, too, of which the log consists as long as there is none."""
    mirrors = [event("user_message", message="go"), event("agent_message", message="Done.")]
    shown, skipped = spoken(tmp_path, *mirrors, said("user", "go"), said("assistant", "Done."), *mirrors)
    assert shown == ["u: go", "a: Done."] and skipped["mirror"] == 4


def test_events_without_words_are_no_messages(tmp_path: Path) -> None:
    events = [("user_message", "go"), ("agent_message", ""), ("agent_message", "x")]
    shown, skipped = spoken(tmp_path, *(event(kind, message=text) for kind, text in events))
    assert shown == ["u: go", "a: x"] and skipped["mirror"] == 1


@pytest.mark.parametrize(("turns", "left"), [(1, 4), (2, 2), ("2", 6), (None, 6), (0, 6), (1.5, 6)])
def test_how_many_turns_are_rolled_back(tmp_path: Path, turns: object, left: int) -> None:
    talk = [said(role, f"{role} {n}") for n in range(3) for role in ("user", "assistant")]
    shown, _ = spoken(tmp_path, *talk, event("thread_rolled_back", num_turns=turns), said("user", "on"))
    assert len(shown) == left + 1 and shown[-1] == "u: on"


def test_a_call_that_comes_twice_leaves_its_result_where_it_is(tmp_path: Path) -> None:
    records = [said("user", "go"), called("c1"), output("c1", "one"), called("c1"), said("assistant", "x")]
    shown, _ = spoken(tmp_path, *records)
    assert [line[0] for line in shown][:3] == ["u", "a", "t"]


def test_results_of_several_strings_and_of_other_alphabets(tmp_path: Path) -> None:
    tools = [{"name": "suché", "description": "найти"}]
    records = [
        said("user", "go"), called("c1"), output("c1", ["a", "b"]), called("c2"),
        item("tool_search_output", call_id="c2", tools=tools),
    ]  # fmt: skip
    shown, _ = spoken(tmp_path, *records, said("assistant", "x"))
    assert shown[2] == "t: a\nb" and shown[4] == f"t: {json.dumps(tools, ensure_ascii=False)}"
