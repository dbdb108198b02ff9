"""Codex's logs: the items of a thread in the order in which its model saw them.

Lines are `{timestamp, type, payload}`; before September 2025 they were the payloads alone. The items of
a thread form one conversation, which a `compacted` line cuts and replaces, and whose last turns a
rollback takes back. In newer versions that begins another log of the thread, which names the line of an
earlier one up to which it goes on from that. A fork or a subagent may begin with items of its parent: these
are left out.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from spark.extract.intake import Intake, Part, Spool, as_object, as_text, fingerprint, is_inserted, read_records
from spark.extract.items import as_mirror, define, item_parts, text_parts
from spark.extract.messages import Outgoing, ToolTable
from spark.extract.roots import Base, Group, LogFile, codex_meta
from spark.speech.sessions import Session

_BOOKKEEPING = frozenset(  # realtime_item: of another model, that speaks
    "turn_context world_state inter_agent_communication_metadata token_usage_record security_risk_score "  # noqa: SIM905
    "realtime_item".split()
)
_REVIEW = re.compile(r"<user_action>(?s:.)*<action>review</action>")
_MIRRORS = ("user_message", "agent_message", "agent_reasoning")


@dataclass(slots=True)
class _Item:
    """One item of a thread: `place` in the spool; `index` counts the items of its logs, copies included.

    rollout, ordinal: the log that it is in, and its line's number there.
    """

    place: int
    index: int
    rollout: str
    ordinal: int
    prompt: bool  # the user typed it: a turn begins
    response: bool  # the model wrote it
    started_at: str


@dataclass(slots=True)
class _Segment:
    """The items between two compactions, and the turns that were taken back from among them.

    opened: the log and the number of the line that was the first of both; None: there was none.
    """

    opened: tuple[str, int] | None = None
    items: list[_Item] = field(default_factory=list)
    branches: list[list[_Item]] = field(default_factory=list)


def _take_back(segment: _Segment, stays: Callable[[_Item], bool]) -> None:
    """Leave the items that stay, those among them that had been taken back before; the others become a branch."""
    restored = [item for item in chain.from_iterable(segment.branches) if stays(item)]
    taken = [item for item in segment.items if not stays(item)]
    items = [item for item in segment.items if stays(item)]
    segment.items = sorted([*items, *restored], key=lambda item: item.index) if restored else items
    left = ([item for item in branch if not stays(item)] for branch in segment.branches)
    segment.branches = [branch for branch in (*left, taken) if branch]


def _paths(segment: _Segment, copied: int) -> list[list[_Item]]:
    """What stayed of a segment, and its branches; where nothing that stayed was answered, the last branch that was.

    That one goes on from what stayed ahead of it, a compaction's summary for one. copied: items that count for nothing.
    """

    def is_answered(items: list[_Item]) -> bool:
        return any(item.response and item.index >= copied for item in items)

    answered = [i for i, branch in enumerate(segment.branches) if is_answered(branch)]
    if is_answered(segment.items) or not answered:
        return [segment.items, *segment.branches]
    branches = list(segment.branches)
    last = branches.pop(answered[-1])
    ahead = [item for item in segment.items if item.index < last[0].index]
    rest = segment.items[len(ahead) :]
    return [[*ahead, *last], *branches, *([rest] if rest else [])]


class _Sequence:
    """The fingerprints of a file's items, in which a fork's opening is looked up."""

    def __init__(self, prints: array[int]) -> None:
        self._at: dict[int, list[int]] = {}
        for index, value in enumerate(prints):
            self._at.setdefault(value, []).append(index)

    def length_of_copy(self, prints: array[int]) -> int:
        """How many items at the start of `prints` occur here in the same order: a copy may leave some out."""
        last = -1
        for count, value in enumerate(prints):
            places = self._at.get(value, [])
            nearest = bisect_right(places, last)
            if nearest == len(places):
                return count
            last = places[nearest]
        return len(prints)


def read_group(group: Group, intake: Intake) -> Iterator[Outgoing]:
    """The conversations of one root thread; each must be consumed before the next is asked for."""
    earlier: list[_Sequence] = []
    logs = _logs(group.files)
    for files in logs:
        with Spool(intake.spool_dir) as spool:
            log = _Log(files[0], intake, spool)
            for file in files:
                log.open(file)
                for record in read_records(file.path, intake):
                    try:
                        log.add(record)
                    except RecursionError:
                        intake.skip("too_deep")
            log.finish()
            yield from log.conversations(max((s.length_of_copy(log.prints) for s in earlier), default=0))
            if len(logs) > 1:
                earlier.append(_Sequence(log.prints))


def _logs(files: Sequence[LogFile]) -> list[list[LogFile]]:
    """The files, each with those of the same thread that go on from it."""
    logs: list[list[LogFile]] = []
    of_rollout: dict[str, list[LogFile]] = {}
    for file in files:
        found = of_rollout.get(file.base.rollout) if file.base is not None else None
        is_copy = file.rollout in of_rollout  # left behind, as of one that was archived
        if found is None or found[0].session_id != file.session_id or is_copy:
            logs.append(found := [])
        found.append(file)
        of_rollout.setdefault(file.rollout, found)
    return logs


class _Log:
    """One file, or several of a thread: items as they are read, then conversations."""

    def __init__(self, file: LogFile, intake: Intake, spool: Spool) -> None:
        self._file = file
        self._intake = intake
        self._spool = spool
        self._instructions = ""
        self._known = False  # whether the thread's own head was read
        self._timestamp = file.started_at
        self._segments = [_Segment()]
        self._segment = self._segments[0]  # what is added to
        self._rollout, self._ordinal = file.rollout, -1  # of the line at hand
        self._bases: dict[str, Base | None] = {}  # of the logs that were opened
        self._tools = ToolTable()
        self._asked: set[str] = set()  # ids of calls so far
        self._early: dict[str, _Item] = {}  # results that came before their calls
        self._mirrors: list[list[Part]] | None = []  # what events say, until an item shows that they are copies
        self._mirror_lines = 0
        self._after_review = False  # what a reviewer found was the last item
        self._responses: list[bool] = []  # by item index: the model wrote it
        self.prints: array[int] = array("Q")

    # --- Reading ---

    def open(self, file: LogFile) -> None:
        """The lines of this file come next."""
        if self._bases and file.base is not None:
            self._go_back(file.base)
        self._rollout, self._ordinal = file.rollout, -1
        self._bases[file.rollout] = file.base

    def add(self, record: dict[str, Any]) -> None:
        """Take one line of the log, of either era."""
        self._timestamp = as_text(record.get("timestamp")) or self._timestamp
        ordinal = record.get("ordinal")
        self._ordinal = ordinal if isinstance(ordinal, int) else self._ordinal + 1
        meta = codex_meta(record)
        if meta is not None:
            self._add_meta(meta)
            return
        kind = as_text(record.get("type"))
        payload = record.get("payload", record)
        if not isinstance(payload, dict):
            self._intake.skip("malformed")
        elif "record_type" in record or kind in _BOOKKEEPING:
            self._intake.pass_over("bookkeeping", kind or "state", payload)
        elif kind == "response_item" or (payload is record and kind not in ("event_msg", "compacted")):
            self._add_item(payload)
        elif kind == "event_msg":
            self._add_event(payload)
        elif kind == "compacted":
            self._compact(payload)
        elif kind == "dynamic_tools_updated":
            self._define_tools(payload)
            self._intake.skip("bookkeeping")
        elif kind == "inter_agent_communication":
            self._add_parts(text_parts(payload, "user", self._intake), kind, payload)
        else:
            self._intake.pass_over("unknown_type", kind or "no type", payload)

    def _add_meta(self, meta: dict[str, Any]) -> None:
        if self._known:
            self._intake.skip("replay")  # a fork repeats its parent's head
            return
        self._known = True
        self._instructions = self._intake.text(
            as_text(as_object(meta.get("base_instructions")).get("text")) or as_text(meta.get("instructions"))
        )
        self._define_tools(meta)

    def _define_tools(self, payload: dict[str, Any]) -> None:
        tools = payload.get("dynamic_tools")
        define(payload.get("tools") if tools is None else tools, self._intake, self._tools)

    def _add_item(self, payload: dict[str, Any]) -> None:
        kind = f"response_item/{as_text(payload.get('type')) or 'no type'}"
        after_review, self._after_review = self._after_review, False
        if after_review and kind == "response_item/message" and payload.get("role") == "assistant":
            self._intake.skip("replay")  # of what a reviewer wrote, in a thread of its own
            return
        if not self._add_parts(item_parts(payload, self._intake, self._tools), kind, payload):
            return
        self._mirrors = None
        self._intake.skip("mirror", self._mirror_lines)
        self._mirror_lines = 0

    def _add_parts(self, parts: list[Part] | None, kind: str, payload: dict[str, Any]) -> bool:
        """Append an item that consists of these parts; None or nothing is counted as skipped."""
        if not parts:
            self._intake.pass_over("unknown_type" if parts is None else "no_text", kind, payload)
            return False
        item = self._new_item(parts)
        self._after_review = parts[0].role == "user" and _REVIEW.match(parts[0].text) is not None
        items = self._segment.items
        for part in parts:
            if part.kind == "call":
                self._tools.observe(part.name, part.arguments)
                self._asked.add(part.call_id)
                if (early := self._early.pop(part.call_id, None)) is not None and early in items:
                    items.remove(early)
                    items += [item, early]
                    return True
            elif part.kind == "result" and part.call_id not in self._asked:
                self._early[part.call_id] = item
        items.append(item)
        return True

    def _new_item(self, parts: list[Part]) -> _Item:
        place, value = self._spool.put(parts)
        self.prints.append(value)
        prompt, response = parts[0].typed, parts[0].role == "assistant"
        self._responses.append(response)
        return self._item(place, len(self.prints) - 1, prompt, response)

    def _item(self, place: int, index: int, prompt: bool = False, response: bool = False) -> _Item:
        return _Item(place, index, self._rollout, self._ordinal, prompt, response, self._timestamp)

    def _add_event(self, payload: dict[str, Any]) -> None:
        payload = as_mirror(payload)
        kind = as_text(payload.get("type"))
        turns = payload.get("num_turns")
        if kind == "thread_rolled_back" and isinstance(turns, int) and turns > 0:
            self._roll_back(turns)
        if kind not in _MIRRORS:
            self._intake.pass_over("bookkeeping", f"event_msg/{kind or 'no type'}", payload)
            return
        text = self._intake.text(payload.get("message") or payload.get("text"))
        if self._mirrors is None or not text:
            self._intake.skip("mirror")
            return
        self._mirror_lines += 1
        part = Part("reasoning" if kind == "agent_reasoning" else "text", text)
        if kind == "user_message":
            part = Part("text", text, "user", not is_inserted(text))
        if [part] not in self._mirrors[-2:]:  # versions may have had events of both kinds
            self._mirrors.append([part])

    def _roll_back(self, turns: int) -> None:
        """Take the last turns back: they become a branch."""
        segment = self._segment
        begins = [i for i, item in enumerate(segment.items) if item.prompt][-turns:]
        if begins:
            segment.branches.append(segment.items[begins[0] :])
            del segment.items[begins[0] :]

    def _go_back(self, base: Base) -> None:
        """Go on from a line of an earlier log: what came behind it, and is not of that log's line, becomes a branch."""
        ends: dict[str, int] = {}  # of logs that count, the first line that does not
        at: Base | None = base
        while at is not None and at.rollout not in ends:
            ends[at.rollout] = min(at.end, *ends.values()) if ends else at.end
            at = self._bases.get(at.rollout)

        def counts(rollout: str, ordinal: int) -> bool:
            return ordinal < ends.get(rollout, 0)

        self._segment = next(s for s in reversed(self._segments) if s.opened is None or counts(*s.opened))
        _take_back(self._segment, lambda item: counts(item.rollout, item.ordinal))

    def _compact(self, payload: dict[str, Any]) -> None:
        """Begin a segment with what took the place of the items so far."""
        history = payload.get("replacement_history")
        self.prints.append(fingerprint(json.dumps(payload, sort_keys=True, default=str)))
        self._responses.append(False)
        index = len(self.prints) - 1
        segment = _Segment((self._rollout, self._ordinal))
        for replaced in history if isinstance(history, list) else []:
            if parts := item_parts(as_object(replaced), self._intake, self._tools):
                place = self._spool.put([part._replace(typed=False) for part in parts])[0]
                segment.items.append(self._item(place, index))
        if not segment.items and (summary := self._intake.text(payload.get("message"))):
            place = self._spool.put([Part("text", summary, "user")])[0]
            segment.items.append(self._item(place, index))
        self._segments.append(segment)
        self._segment = segment
        self._intake.skip("bookkeeping")

    def finish(self) -> None:
        """Take what events said if there was nothing else."""
        for parts in self._mirrors or []:
            self._segment.items.append(self._new_item(parts))
        self._mirrors = None

    # --- Writing ---

    def conversations(self, copied: int) -> Iterator[Outgoing]:
        """The thread's conversations without the first `copied` items: segments, each with its branches.

        An opening without a response is no copy: instructions and the environment are the same in every thread.
        """
        if not any(self._responses[:copied]):
            copied = 0
        self._intake.skip("replay", copied)
        for number, segment in enumerate(self._segments, 1):
            mark = f"#{number}" if number > 1 else ""
            for branch, path in enumerate(_paths(segment, copied)):
                kept = [item for item in path if item.index >= copied]
                if not any(item.response for item in kept):
                    self._intake.skip("no_response", len(kept))
                else:
                    yield self._conversation(mark + (f"~{branch}" if branch else ""), kept)

    def _conversation(self, suffix: str, items: list[_Item]) -> Outgoing:
        head = Session(
            session_id=self._file.session_id + suffix,
            source="codex",
            started_at=items[0].started_at,
            tools=self._tools.definitions(),
            messages=(),
        )
        return Outgoing(head, self._read_back(items))

    def _read_back(self, items: list[_Item]) -> Iterator[Part | None]:
        if self._instructions:
            yield Part("text", self._instructions, "system")
        for item in items:
            yield from self._spool.get(item.place)
