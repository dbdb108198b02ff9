"""Subagents whose records are in their parent's log: each ends with its report, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark.extract import ExtractOptions, extract
from spark.speech.sessions import read_sessions
from tests.claude_logs import SESSION, Record, answer, call, progress, result, run, text, user, words, write

AGENT = f"{SESSION}/agent-ab12"


def report(uuid: str, call_id: str, *texts: str, agent: str | None = "ab12", **fields: Any) -> Record:
    """The Task result that a parent gets, with the program's own record of it."""
    blocks = [text(words) for words in texts]
    outcome: Record = {"status": "completed", "content": blocks, "totalToolUseCount": 1, "totalDurationMs": 9}
    outcome |= {"agentId": agent} if agent else {}
    return result(uuid, "a1", call_id, blocks, toolUseResult=outcome | fields)


def task(uuid: str, parent: str, call_id: str, **arguments: Any) -> Record:
    return answer(uuid, parent, f"msg_{uuid}", call(call_id, "Task", **arguments))


def steps(mark: str, run_id: str | None = "t1", agent: str | None = "ab12") -> list[Record]:
    """A run as progress records have it: the prompt, a call, its result, and nothing after that."""
    inner = [
        user(f"v{mark}", None, f"count {mark}"),
        answer(f"b{mark}", None, f"msg_b{mark}", call(f"g{mark}", "Grep", pattern="x")),
        result(f"w{mark}", None, f"g{mark}", f"{mark} lines"),
    ]
    return [progress(f"p{mark}{i}", r, agent, run_id) for i, r in enumerate(inner)]


def step_words(mark: str) -> list[str]:
    return [f"u: count {mark}", 'a: Grep({"pattern": "x"})', f"t: {mark} lines"]


START = [user("u1", None, "go"), task("a1", "u1", "t1", prompt="count 1")]
END = answer("a9", "r1", "msg_Z", text("It is two."))


def test_the_report_closes_a_subagent_that_only_progress_records_have(tmp_path: Path) -> None:
    write(tmp_path, f"{SESSION}.jsonl", [*START, *steps("1"), report("r1", "t1", "Two."), END])
    sessions, _ = run(tmp_path)
    assert words(sessions[AGENT]) == [*step_words("1"), "a: Two."]
    assert words(sessions[SESSION]) == ["u: go", 'a: Task({"prompt": "count 1"})', "t: Two.", "a: It is two."]


@given(order=st.permutations(range(4)), named=st.booleans(), known=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_report_may_come_before_between_or_after_the_records(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], named: bool, known: bool
) -> None:
    """The result moves among the records, which keep their order; they name their agent and their run, or don't."""
    if not (named or known):
        known = True  # else nothing says whose they are
    at = order.index(0)
    lines = steps("1", "t1" if known else None, "ab12" if named else None)
    lines.insert(at, report("r1", "t1", "Two."))
    home = tmp_path_factory.mktemp("order")
    write(home, f"{SESSION}.jsonl", [*START, *lines, END])
    sessions, _ = run(home)
    name = AGENT if named else f"{SESSION}/agent-t1"
    assert words(sessions[name]) == [*step_words("1"), "a: Two."]
    assert set(sessions) == {SESSION, name}


@pytest.mark.parametrize("known", [True, False])
def test_a_resumed_agent_has_a_report_a_run(tmp_path: Path, known: bool) -> None:
    second = task("a2", "r1", "t2", resume="ab12", prompt="count 2")
    records = [
        *START,
        *steps("1", "t1" if known else None),
        report("r1", "t1", "Done."),
        second,
        *steps("2", "t2" if known else None),
        report("r2", "t2", "Done."),  # the same words: each run still has its own
        answer("a9", "r2", "msg_Z", text("Fine.")),
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, _ = run(tmp_path)
    assert words(sessions[AGENT]) == [*step_words("1"), "a: Done.", *step_words("2"), "a: Done."]
    assert set(sessions) == {SESSION, AGENT}


def test_a_run_that_left_only_its_report_comes_with_its_prompt(tmp_path: Path) -> None:
    second = [task("a2", "r1", "t2", resume="ab12"), report("r2", "t2", "Three.", prompt="and now?")]
    write(tmp_path, f"{SESSION}.jsonl", [*START, *steps("1"), report("r1", "t1", "Two."), *second, *second[1:]])
    sessions, _ = run(tmp_path)
    assert words(sessions[AGENT]) == [*step_words("1"), "a: Two.", "u: and now?", "a: Three."]


@pytest.mark.parametrize("late", [False, True])
def test_a_report_that_is_there_already_is_not_doubled(tmp_path: Path, late: bool) -> None:
    said = progress("p9", answer("b9", None, "msg_b9", text("Two.\n")), "ab12", "t1")
    ends = [report("r1", "t1", " Two."), said]
    write(tmp_path, f"{SESSION}.jsonl", [*START, *steps("1"), *(ends if late else ends[::-1]), END])
    assert words(run(tmp_path)[0][AGENT]) == [*step_words("1"), "a: Two.\n"]


@pytest.mark.parametrize("again", ["Two.", "Two, I think."])
def test_a_call_has_one_report(tmp_path: Path, again: str) -> None:
    """A second result of it, in the same words or in others, is no part of the first one's turn."""
    write(tmp_path, f"{SESSION}.jsonl", [*START, *steps("1"), report("r1", "t1", "Two."), report("r2", "t1", again)])
    assert words(run(tmp_path)[0][AGENT]) == [*step_words("1"), "a: Two."]


def test_the_parts_of_a_report_are_one_turn(tmp_path: Path) -> None:
    """Also where the log has the first of them already, or the thought before them."""
    last = report("r1", "t1", "Two.", "And one.")
    write(tmp_path, f"{SESSION}.jsonl", [*START, *steps("1"), last])
    assert words(run(tmp_path)[0][AGENT]) == [*step_words("1"), "a: Two.\n\nAnd one."]
    for block, shown in ((text("Two."), "a: "), ({"type": "thinking", "thinking": "so"}, "a: <so> ")):
        begun = progress("p9", answer("b9", None, "msg_b9", block), "ab12", "t1")
        write(tmp_path, f"{SESSION}.jsonl", [*START, *steps("1"), begun, last])
        assert words(run(tmp_path)[0][AGENT]) == [*step_words("1"), f"{shown}Two.\n\nAnd one."]
    both = [progress("p9", answer("b9", None, "msg_b9", text("Two."), text("And one.")), "ab12", "t1")]
    write(tmp_path, f"{SESSION}.jsonl", [*START, *steps("1"), *both, report("r1", "t1", "Two.\nAnd one.")])
    assert len(run(tmp_path)[0][AGENT].messages) == 4  # the parts in one text


FAILED: list[Record] = [
    {"status": "async_launched", "content": [text("Launched.")]},
    {"status": "failed"},
    {"status": "teammate_spawned"},
    {"interrupted": True},
    {"wasInterrupted": True},
    {"content": []},
    {"content": None},
    {"content": [{"type": "image"}, {"type": "text", "text": " "}]},
]


@pytest.mark.parametrize("outcome", FAILED)
def test_results_that_are_no_report_close_nothing(tmp_path: Path, outcome: Record) -> None:
    write(tmp_path, f"{SESSION}.jsonl", [*START, *steps("1"), report("r1", "t1", "Two.", **outcome), END])
    assert words(run(tmp_path)[0][AGENT]) == step_words("1")


@pytest.mark.parametrize("failed", ["error", "text"])
def test_errors_are_no_reports(tmp_path: Path, failed: str) -> None:
    last = report("r1", "t1", "Two.")
    if failed == "error":
        last["message"]["content"][0]["is_error"] = True
    else:
        last["toolUseResult"] = "Error: interrupted"
    write(tmp_path, f"{SESSION}.jsonl", [*START, *steps("1"), last, END])
    assert words(run(tmp_path)[0][AGENT]) == step_words("1")


@pytest.mark.parametrize("agent", ["ab12", None])
def test_an_agents_own_log_wins(tmp_path: Path, agent: str | None) -> None:
    """Also over records that name the run alone: the result says whose it was."""
    own = [user("x1", None, "count 1"), answer("x2", "x1", "msg_own", text("Two, says the log."))]
    write(tmp_path, f"{SESSION}.jsonl", [*START, *steps("1", "t1", agent), report("r1", "t1", "Two."), END])
    write(tmp_path, f"{SESSION}/subagents/agent-ab12.jsonl", own)
    sessions, found = run(tmp_path)
    assert set(sessions) == {SESSION, AGENT}
    assert words(sessions[AGENT]) == ["u: count 1", "a: Two, says the log."]
    assert found.skipped_lines == {"mirror": 3}


def test_old_inline_threads_have_their_report(tmp_path: Path) -> None:
    """No id names them; a thread that lacks its report is found by what it was asked."""
    side: Record = {"isSidechain": True}

    def thread(mark: str, *last: Record) -> list[Record]:
        asked = user(f"v{mark}", None, f"count {mark}", **side)
        grep = answer(f"b{mark}", f"v{mark}", f"msg_{mark}", call(f"g{mark}", "Grep", pattern="x"), **side)
        return [asked, grep, result(f"w{mark}", f"b{mark}", f"g{mark}", f"{mark} lines", **side), *last]

    records = [
        user("u1", None, "go"),
        answer("a1", "u1", "msg_A", call("t1", "Task", prompt="count 1"), call("t2", "Task", prompt="count 2")),
        *thread("1", answer("e1", "w1", "msg_e1", text("One."), **side)),
        *thread("2"),
        report("r2", "t2", "Two.", agent=None),
        report("r1", "t1", "One.", agent=None),
        END,
    ]
    write(tmp_path, f"{SESSION}.jsonl", records)
    sessions, _ = run(tmp_path)
    assert words(sessions[f"{SESSION}/side-v1-0000-"]) == [*step_words("1"), "a: One."]
    assert words(sessions[f"{SESSION}/side-v2-0000-"]) == [*step_words("2"), "a: Two."]


def test_inline_threads_with_an_id_get_a_report_only_if_they_lack_it(tmp_path: Path) -> None:
    side: Record = {"isSidechain": True, "agentId": "ab12"}
    asked = [user("v1", None, "count 1", **side), answer("b1", "v1", "msg_b1", text("Two."), **side)]
    write(tmp_path, f"{SESSION}.jsonl", [*START, *asked, report("r1", "t1", "Two."), END])
    assert words(run(tmp_path)[0][AGENT]) == ["u: count 1", "a: Two."]
    write(tmp_path, f"{SESSION}.jsonl", [*START, *asked[:1], report("r1", "t1", "Two."), END])
    assert words(run(tmp_path)[0][AGENT]) == ["u: count 1", "a: Two."]


def test_a_copy_of_the_log_repeats_no_report(tmp_path: Path) -> None:
    records = [*START, *steps("1"), report("r1", "t1", "Two."), END]
    more = [user("f1", "a9", "fork", sessionId="f"), answer("f2", "f1", "msg_F", text("forked"), sessionId="f")]
    copies = [{**r, "sessionId": "f", "forkedFrom": {"sessionId": SESSION}} for r in records]
    write(tmp_path, f"{SESSION}.jsonl", records)
    write(tmp_path, "f.jsonl", copies + more)
    sessions, _ = run(tmp_path)
    assert set(sessions) == {SESSION, AGENT, f"{SESSION}/f"}
    assert words(sessions[f"{SESSION}/f"]) == ["u: fork", "a: forked"]


def test_secrets_in_a_report_are_counted_where_it_is_kept(tmp_path: Path) -> None:
    secret = "Two: http://builder:tr0ub4dor@10.0.0.7/simple"
    said = progress("p9", answer("b9", None, "msg_b9", text(secret)), "ab12", "t1")
    for records, count in (([], 2), ([said], 2)):  # in the parent's result, and in the subagent's last turn
        write(tmp_path, f"{SESSION}.jsonl", [*START, *steps("1"), *records, report("r1", "t1", secret), END])
        options = ExtractOptions(tmp_path / "out", "claude", claude_dir=tmp_path, test_frac=0)
        found = extract(options, lambda done, total: None)
        sessions = {s.session_id: s for s in read_sessions(tmp_path / "out" / "train.jsonl")}
        assert words(sessions[AGENT])[3:] == ["a: Two: http://builder:[REDACTED:url-password]@10.0.0.7/simple"]
        assert found.redacted == {"url-password": count}


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_every_report_is_there_once(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Agents with runs in any interleaving; of each run the log has its report's turn, or only the result."""
    runs = data.draw(st.lists(st.sampled_from(["aa", "bb"]), min_size=1, max_size=4))
    calls = [call(f"t{i}", "Task", prompt=f"count {i}") for i in range(len(runs))]
    lines: list[list[Record]] = []
    expected: dict[str, list[str]] = {}
    for i, agent in enumerate(runs):
        said = [progress(f"q{i}", answer(f"e{i}", None, f"msg_e{i}", text(f"Report {i}.")), agent, f"t{i}")]
        has = data.draw(st.booleans())
        lines.append([*steps(str(i), f"t{i}", agent), *(said if has else []), report(f"r{i}", f"t{i}", f"Report {i}.",
                     agent=agent)])  # fmt: skip
        expected.setdefault(agent, []).extend([*step_words(str(i)), f"a: Report {i}."])
    # Runs of one agent follow each other, those of two agents mix.
    mixed: list[Record] = []
    queues = [[r for i, a in enumerate(runs) if a == agent for r in lines[i]] for agent in ("aa", "bb")]
    while any(queues):
        queue = data.draw(st.sampled_from([q for q in queues if q]))
        mixed.append(queue.pop(0))
    home = tmp_path_factory.mktemp("runs")
    write(home, f"{SESSION}.jsonl", [user("u1", None, "go"), answer("a1", "u1", "msg_A", *calls), *mixed])
    sessions, _ = run(home)
    found = {name.rpartition("-")[2]: words(s) for name, s in sessions.items() if "/" in name}
    assert found == expected


@pytest.mark.parametrize("line", ['{"parentUu', "[1]", ""])
def test_a_log_of_its_own_that_cannot_be_read_is_none(tmp_path: Path, line: str) -> None:
    """What its parent has of the subagent is all that there is."""
    write(tmp_path, f"{SESSION}.jsonl", [*START, *steps("1"), report("r1", "t1", "Two."), END])
    write(tmp_path, f"{SESSION}/subagents/agent-ab12.jsonl", [line])
    sessions, _ = run(tmp_path)
    assert words(sessions[AGENT]) == [*step_words("1"), "a: Two."]
    assert set(sessions) == {SESSION, AGENT}
