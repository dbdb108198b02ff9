"""The reports of subagents whose log is their parent's: the closing turn, which only the Task result holds.

Records of a subagent inside `progress` lines end with its last tool result; what it then wrote is the content of
the result that its parent got. Threads that have their report already (old inline ones) get nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from spark.extract.intake import Intake, Part, Spool, as_object, as_text, fingerprint
from spark.extract.roots import plain_id
from spark.extract.tree import Node


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What one run of a subagent came to.

    call_id: the call that started the run, empty where the record does not say. agent: the subagent's id, which
    resumed runs share; empty in old logs. asked: fingerprint of the run's prompt. at: the spool's place of the
    prompt, if the log has it, and of the report's parts.
    """

    order: int
    call_id: str
    agent: str
    asked: int
    at: int
    started_at: str
    redacted: Counter[str]


def read_task_report(
    record: dict[str, Any], call_id: str, asked: int, order: int, intake: Intake, spool: Spool
) -> TaskReport | None:
    """The report in a user's record that answers the call; None if it holds none.

    asked: fingerprint of the call's prompt, 0 if the call is not known. A run that failed, was interrupted or goes
    on in the background has a result, too, which is no report.
    """
    outcome = as_object(record.get("toolUseResult"))
    agent = as_text(outcome.get("agentId"))
    if not agent and "totalToolUseCount" not in outcome:
        return None
    stopped = any(outcome.get(key) is True for key in ("interrupted", "wasInterrupted"))
    if stopped or (outcome.get("status") or "completed") != "completed":
        return None
    content = outcome.get("content")
    blocks = content if isinstance(content, list) else [content]
    texts = [block if isinstance(block, str) else as_text(as_object(block).get("text")) for block in blocks]
    quiet = intake.quiet()
    parts = [Part("text", quiet.text(text)) for text in texts if text.strip()]
    if not parts:
        return None
    prompt = quiet.text(outcome.get("prompt"))
    question = [Part("text", prompt, "user")] if prompt else []
    return TaskReport(
        order=order,
        call_id=call_id,
        agent=agent,
        asked=asked or (fingerprint(prompt) if prompt else 0),
        at=spool.put(question + parts)[0],
        started_at=as_text(record.get("timestamp")),
        redacted=quiet.redacted,
    )


class TaskReports:
    """Closes the threads of one log with the reports in it."""

    def __init__(self, nodes: list[Node], calls: Container[str], spool: Spool, intake: Intake) -> None:
        """nodes: of the log, linked. calls: ids of the calls in it."""
        self._spool = spool
        self._intake = intake
        self._nodes = nodes
        self._threads: dict[str, list[Node]] = {}
        self._runs: dict[str, list[Node]] = {}
        self._children: dict[int, list[Node]] = {}  # by id() of the node above
        for node in nodes:
            if node.thread:
                self._threads.setdefault(node.thread, []).append(node)
                if node.run in calls:
                    self._runs.setdefault(node.run, []).append(node)
                if node.above is not None:
                    self._children.setdefault(id(node.above), []).append(node)
        self._asked: dict[int, list[str]] = {}  # threads that no id names, by what they were asked
        for thread in reversed(self._threads):
            first = self._threads[thread][0]
            if thread.startswith("side-") and first.parts and not first.response:
                text = "".join(part.text for part in spool.get(first.parts[0]))
                self._asked.setdefault(fingerprint(text), []).append(thread)
        self._added: dict[int, list[Node]] = {}  # by id() of the node before
        self._reported: set[str] = set()  # calls that have their report

    def close(self, reports: list[TaskReport], has_own_log: Callable[[str], bool]) -> list[Node]:
        """The nodes with the reports that they lacked, without threads that a log of their own has."""
        mirrored: set[str] = set()
        for report in reports:
            if has_own_log(report.agent):
                mirrored.update(node.thread for node in self._runs.get(report.call_id, [])[:1])
            elif (thread := self._thread(report)) in self._threads:
                self._add(report, thread)
        self._intake.skip("mirror", sum(n.lines for thread in mirrored for n in self._threads[thread]))
        closed: list[Node] = []
        rest = [node for node in reversed(self._nodes) if node.thread not in mirrored]
        while rest:
            closed.append(rest.pop())
            rest += reversed(self._added.get(id(closed[-1]), []))
        return closed

    def _thread(self, report: TaskReport) -> str:
        if run := self._runs.get(report.call_id):
            return run[0].thread
        if report.agent and (name := f"agent-{plain_id(report.agent)}") in self._threads:
            return name
        return (self._asked.get(report.asked) or [""]).pop() if report.asked else ""

    def _add(self, report: TaskReport, thread: str) -> None:
        if report.call_id in self._reported:
            return
        self._reported.update([report.call_id] if report.call_id else [])
        members = self._threads[thread]
        run = self._runs.get(report.call_id)
        # Of a run whose call no record names, where records name calls, the report is all that there is.
        unseen = run is None and bool(report.call_id) and members[0].run in self._runs
        if run is None:
            run = [members[-1]] if unseen else self._run_before(report, members)
        parts = self._spool.get(report.at)
        question = [part for part in parts if part.role == "user"]
        missing = parts[len(question) :] if unseen else self._unsaid(parts[len(question) :], run)
        if not missing:
            return
        self._intake.redacted.update(report.redacted)
        at, _ = self._spool.put(question + missing if unseen else missing)
        last = run[-1]
        if last.response and not last.calls and not unseen:
            last.parts.append(at)  # the response was cut short in the log
            return
        closing = Node(
            order=report.order,
            thread=thread,
            response=True,
            identity=fingerprint(f"report {report.call_id or report.agent}"),
            parent=None,
            starts=False,
            started_at=report.started_at,
            lines=0,
            parts=[at],
            above=last,
            segment=last.segment,
            run=report.call_id,
        )
        self._added.setdefault(id(last), []).insert(0, closing)
        self._children[id(closing)] = self._children.pop(id(last), [])
        for child in self._children[id(closing)]:
            child.above = closing
        self._children[id(last)] = [closing]
        members.insert(members.index(last) + 1, closing)
        if unseen:
            self._runs[report.call_id] = [closing]
        else:
            run.append(closing)

    def _run_before(self, report: TaskReport, members: list[Node]) -> list[Node]:
        """The nodes of the run that a report ends, where the records do not name runs.

        They are those before the report and, since lines can come late, those up to the next prompt.
        """
        at = max(1, bisect_left(members, report.order, key=lambda node: node.order))
        while at < len(members) and (members[at].response or not members[at].parts):
            at += 1
        begin = at - 1
        while begin > 0 and (members[begin].response or not members[begin].parts):
            begin -= 1
        return members[begin:at]

    def _unsaid(self, parts: list[Part], run: list[Node]) -> list[Part]:
        """The parts of a report that the run's responses do not hold."""
        said: set[str] = set()
        for node in run:
            if node.response:
                texts = [p.text for at in node.parts for p in self._spool.get(at) if p.kind == "text"]
                said.update(_squeezed(text) for text in texts)
                said.add(_squeezed("".join(texts)))
        if _squeezed("".join(part.text for part in parts)) in said:
            return []
        return [part for part in parts if _squeezed(part.text) not in said]


def _squeezed(text: str) -> str:
    """A text without its white space, which programs trim and join as they like."""
    return "".join(text.split())
