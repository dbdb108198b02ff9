"""Claude Code's logs: records of one block each, linked by `parentUuid` into trees.

A log is read once, into nodes: one for each response (its lines share a message id, the results of its
calls may come before them, between them or after them) and one for each user message. The nodes of a
thread (the main one, or a subagent whose records are inline) form trees; the path that ends in the last
node is the conversation, what hangs off it was taken back by the user. A compaction cuts the thread.
Nodes that an earlier file of the same root holds too are replays and are left out.

What the program put in beside the messages (files named with @, lists of skills and tools, reminders) and
prompts typed while the model worked are notes: they follow the node that they hang off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from spark.extract.attachments import sent_parts, version_of
from spark.extract.blocks import response_parts, user_parts
from spark.extract.intake import Intake, Part, Spool, as_object, as_text, fingerprint, read_records
from spark.extract.messages import Outgoing, ToolTable
from spark.extract.openings import Openings
from spark.extract.requests import Requests
from spark.extract.roots import Group, LogFile, plain_id
from spark.extract.stored import BOOKKEEPING, as_read_back, is_for_the_screen, last_kept
from spark.extract.subagents import TaskReport, TaskReports, read_task_report
from spark.extract.tree import Boundary, Node, Note, settle_segment, split_paths
from spark.extract.typed_ahead import SENT, TypedAhead, TypedPrompt
from spark.speech.sessions import Session

_ENVELOPE = ("type", "cwd", "gitBranch", "uuid", "parentUuid", "sessionId", "timestamp")
_SUBAGENTS = ("Task", "Agent")  # the tools that start them
_ATTACHED = (2, 1, 43)  # since then what was sent into a turn is an attachment, in the log of whom it was sent to
_ID_LENGTH = 16  # of message ids that are taken to be unique: some servers give every response the same short one


@dataclass(slots=True)
class _Seen:
    """What earlier files of a group held: nodes by identity, user messages by their words."""

    nodes: set[int] = field(default_factory=set)
    words: set[int] = field(default_factory=set)


def read_group(group: Group, intake: Intake) -> Iterator[Outgoing]:
    """The conversations of one root session; each must be consumed before the next is asked for."""
    seen = _Seen()
    own_logs = frozenset(file.agent for file in group.files if file.agent and file.readable)
    for file in group.files:
        with Spool(intake.spool_dir) as spool:
            log = _Log(file, own_logs, intake, spool)
            for record in read_records(file.path, intake):
                try:
                    log.add(record)
                except RecursionError:
                    intake.skip("too_deep")
            yield from log.conversations(seen)


class _Log:
    """One file: nodes as they are read, then conversations."""

    def __init__(self, file: LogFile, own_logs: frozenset[str], intake: Intake, spool: Spool) -> None:
        self._file = file
        self._own_logs = own_logs  # subagents that have a log of their own
        self._intake = intake
        self._spool = spool
        self._line = 0
        self._events: list[Node | Boundary | Note] = []
        self._node_of: dict[int, Node | Boundary] = {}  # by record id
        self._links: dict[int, int | None] = {}  # parents of records that are no nodes
        self._openings = Openings(self._links)
        self._responses: dict[tuple[str, str], Node] = {}  # by thread and message id
        self._callers: dict[str, Node] = {}  # by call id
        self._said: set[tuple[int, int]] = set()  # identity of a response and fingerprint of a line of it
        self._said_under: set[tuple[int, int | None]] = set()  # and parents of its lines
        self._kept: dict[int, int] = {}  # by id of the last record that a compaction kept: the compaction's line
        self._tools: dict[str, ToolTable] = {}
        self._requests = Requests(intake)
        self._segments: dict[str, int] = {}  # compactions so far, by thread
        self._linked = False
        self._attachments: dict[int, Note] = {}  # by record id, those that became notes
        self._ahead = TypedAhead()
        self._removals = 0  # from the queue of prompts
        self._responded = 0  # line of the last response in the file's own conversation
        self._version_name = ""
        self._version: tuple[int, ...] = ()  # of the program, by the last record that said so
        self._reports: list[TaskReport] = []
        self._asked: dict[str, int] = {}  # by id of a call that starts a subagent: fingerprint of its prompt

    # --- Reading ---

    def add(self, record: dict[str, Any]) -> None:
        """Take one record of the log."""
        self._line += 1
        record = as_read_back(record)
        kind = as_text(record.get("type"))
        uuid, parent = _record_id(record.get("uuid")), _record_id(record.get("parentUuid"))
        if uuid is not None and (uuid in self._node_of or uuid in self._attachments):
            self._intake.skip("replay")
            return
        if (version := as_text(record.get("version"))) and version != self._version_name:
            self._version_name, self._version = version, version_of(version)
        self._linked |= parent is not None and (parent in self._node_of or parent in self._links)
        if is_for_the_screen(record):
            self._pass_over("synthetic", record)
        elif kind == "progress" and (inner := _subagent_record(record)) is not None:
            self._add_message(inner)
        elif kind in ("user", "assistant"):
            self._add_message(record)
        elif kind == "system" and record.get("subtype") == "compact_boundary":
            self._add_boundary(record)
            return
        elif kind == "system" and record.get("subtype") == "local_command" and as_text(record.get("content")):
            inner = {**record, "message": {"role": "user", "content": record["content"]}, "isMeta": True}
            self._add_message(inner)
        elif kind == "attachment":
            self._add_attachment(record)
        elif kind == "queue-operation":
            self._add_queue_operation(record)
        elif kind == "api-request-shape":
            thread = self._thread_of({**record, "isSidechain": "agentId" in record})
            self._requests.add_shape(thread, record, self._tools.setdefault(thread, ToolTable()))
            self._intake.skip("mirror")
        elif kind == "api-request-blob":  # a message
            self._intake.skip("mirror")
        else:
            reason = "bookkeeping" if kind == "system" or kind in BOOKKEEPING else "unknown_type"
            self._pass_over(reason, record)
        if uuid is not None and uuid not in self._node_of:
            self._links[uuid] = parent
            if parent is None and "parentUuid" in record:
                self._openings.add(uuid, record, self._line)

    def _pass_over(self, reason: str, record: dict[str, Any]) -> None:
        inner = record.get("subtype") or as_object(record.get("attachment") or record.get("data")).get("type")
        kind = "/".join(filter(None, map(as_text, (record.get("type"), inner)))) or "no type"
        self._intake.pass_over(reason, kind, [value for key, value in record.items() if key not in _ENVELOPE])

    def _add_attachment(self, record: dict[str, Any]) -> None:
        """What the program put before the model, or a prompt that the user typed while the model worked."""
        attachment = as_object(record.get("attachment"))
        content: object = attachment.get("prompt")
        queued = attachment.get("type") == "queued_command" and isinstance(content, str | list)
        if queued:
            self._ahead.attach(_prompt_key(content), self._responded)
        if self._has_own_log(record):
            self._intake.skip("mirror")
            return
        if attachment.get("type") == "prompt_snapshot":
            thread = self._thread_of(record)
            self._requests.add_snapshot(thread, attachment, self._tools.setdefault(thread, ToolTable()))
            self._intake.skip("mirror")
            return
        parts = sent_parts(record, content if queued else None, self._intake)
        if not parts:
            self._pass_over("bookkeeping", record)
            return
        at, words = self._spool.put(parts)
        uuid = _record_id(record.get("uuid"))
        parent = _record_id(record.get("parentUuid"))
        identity = fingerprint(f"record {record['uuid']}") if uuid is not None else 0
        note = Note(self._line, self._thread_of(record), parent, identity, at, words)
        self._events.append(note)
        if uuid is not None:
            self._attachments[uuid] = note

    def _add_queue_operation(self, record: dict[str, Any]) -> None:
        """A prompt that waits for the model, or that one stopped waiting."""
        operation = record.get("operation")
        prompt = self._read_prompt(record.get("content"))
        if operation == "remove" and as_text(record.get("reason")) not in SENT:
            self._ahead.leave(prompt)
            self._intake.pass_over("bookkeeping", "queue-operation/remove", record.get("content"))
            return
        if operation == "remove":
            self._removals += 1
            if (prompt := self._ahead.leave(prompt)) is not None:
                self._send(prompt, record)
            return
        self._intake.skip("bookkeeping")
        if operation == "enqueue":
            self._ahead.enqueue(prompt)
        elif operation == "dequeue":
            self._ahead.leave(prompt)
        elif operation == "popAll":
            self._ahead.take_back(prompt)
        else:
            self._intake.kinds.add(f"queue-operation/{as_text(operation)}", record.get("content"))

    def _read_prompt(self, content: object) -> TypedPrompt | None:
        quiet = self._intake.quiet()  # the message or attachment that follows may have the prompt, too
        parts, _ = user_parts({"content": content}, quiet, inserted=False)
        if not parts:
            return None
        at, words = self._spool.put(parts)
        return TypedPrompt(_prompt_key(content), at, words, parts[0].typed, quiet.redacted)

    def _send(self, prompt: TypedPrompt, record: dict[str, Any]) -> None:
        """A waiting prompt went into the turn that was running."""
        identity = fingerprint(f"queue {record.get('timestamp')} {prompt.words}")
        note = Note(self._line, "", None, identity, prompt.at, prompt.words, sent=True)
        known = self._ahead.send(prompt, note)
        # A notification of the program may have gone to a subagent, whose log then has it.
        note.dropped = not known or (not prompt.typed and self._version >= _ATTACHED)
        self._events.append(note)

    def _add_boundary(self, record: dict[str, Any]) -> None:
        """A compaction, announced by its own record."""
        boundary = self._new_boundary(self._thread_of(record))
        if (uuid := _record_id(record.get("uuid"))) is not None:
            self._node_of[uuid] = boundary
        if (tail := _record_id(last_kept(record))) is not None:
            self._kept[tail] = self._line
        self._intake.skip("bookkeeping")

    def _new_boundary(self, thread: str) -> Boundary:
        self._segments[thread] = self._segments.get(thread, 0) + 1
        boundary = Boundary(thread, self._segments[thread])
        self._events.append(boundary)
        return boundary

    def _thread_of(self, record: dict[str, Any]) -> str:
        """The thread of a record: inline records of a subagent are told apart by its id or by their links."""
        agent = as_text(record.get("agentId"))
        if record.get("isSidechain") is not True or (self._file.agent and agent in ("", self._file.agent)):
            return ""
        if agent:
            return f"agent-{plain_id(agent)}"
        parent = self._resolve(_record_id(record.get("parentUuid")))
        if parent is not None and parent.thread:
            return parent.thread
        return f"side-{plain_id(as_text(record.get('uuid')))[:8]}"

    def _has_own_log(self, record: dict[str, Any]) -> bool:
        """Whether a record is a copy of what is in the log of a subagent."""
        agent = as_text(record.get("agentId"))
        return record.get("isSidechain") is True and agent != self._file.agent and agent in self._own_logs

    def _add_message(self, record: dict[str, Any]) -> None:
        message = record.get("message")
        if not isinstance(message, dict):
            self._intake.skip("null_message" if message is None else "malformed")
            return
        if self._has_own_log(record):
            self._intake.skip("mirror")
            return
        if _record_id(record.get("uuid")) in self._node_of:
            self._intake.skip("replay")
            return
        thread = self._thread_of(record)
        if record.get("type") == "assistant" or message.get("role") == "assistant":
            self._add_response(record, message, thread)
        else:
            self._add_user(record, message, thread)

    def _add_response(self, record: dict[str, Any], message: dict[str, Any], thread: str) -> None:
        if message.get("model") == "<synthetic>" or record.get("isApiErrorMessage") is True:
            self._intake.pass_over("synthetic", "assistant/synthetic", message.get("content"))
            return
        parts = response_parts(message, self._intake)
        if not parts:
            self._intake.skip("no_text")
            return
        uuid, parent = as_text(record.get("uuid")), _record_id(record.get("parentUuid"))
        message_id = as_text(message.get("id"))
        at, words = self._spool.put(parts)
        node = self._responses.get((thread, message_id)) if message_id else None
        if node is None or not self._continues(node, parent):
            own_id = node is None and len(message_id) >= _ID_LENGTH
            identity = f"message {message_id} {'' if own_id else words}" if message_id else f"record {uuid or words}"
            node = self._new_node(record, thread, True, fingerprint(identity))
            if message_id:
                self._responses[thread, message_id] = node
        elif (node.identity, words) in self._said and (node.identity, parent) in self._said_under:
            self._intake.skip("replay")
            self._said_under.add((node.identity, _record_id(uuid)))  # what hangs off the copy may be copies, too
            self._note_id(record, node)
            return
        else:
            node.lines += 1
        self._said.add((node.identity, words))
        self._said_under.add((node.identity, parent))
        node.parts.append(at)
        self._note_id(record, node)
        if not thread:
            self._responded = self._line
        tools = self._tools.setdefault(thread, ToolTable())
        for part in parts:
            if part.kind == "call":
                node.calls.append(part.call_id)
                self._callers[part.call_id] = node
                if part.name in _SUBAGENTS and (prompt := as_text(part.arguments.get("prompt"))):
                    self._asked[part.call_id] = fingerprint(prompt)
                tools.observe(part.name, part.arguments)

    def _continues(self, node: Node, parent: int | None) -> bool:
        """Whether a line with the node's message id belongs to the node, by what it answers."""
        above = self._resolve(parent)
        return above is None or above is node or parent == node.parent or above.thread != node.thread

    def _add_user(self, record: dict[str, Any], message: dict[str, Any], thread: str) -> None:
        summary = record.get("isCompactSummary") is True
        inserted = summary or record.get("isMeta") is True
        texts, results = user_parts(message, self._intake, inserted=inserted)
        if not texts and not results:
            self._intake.skip("no_text")
            return
        if summary and not (self._events and isinstance(self._events[-1], Boundary)):
            self._new_boundary(thread)
        uuid = as_text(record.get("uuid"))
        at, words = self._spool.put(texts) if texts else (0, 0)
        first_result = next(iter(results), "")
        identity = f"result {first_result}" if first_result and not texts else f"record {uuid or words}"
        node = self._new_node(record, thread, False, fingerprint(identity))
        if texts:
            node.words = words
            if results:
                node.after.append(
                    Note(self._line, thread, None, fingerprint(f"record {uuid}") if uuid else 0, at, words)
                )
            else:
                node.parts.append(at)
            if texts[0].typed and not thread:
                self._ahead.repeat(_prompt_key(message.get("content")), self._responded)
        for call_id, part in results.items():
            node.results[call_id] = self._spool.put([part])[0]
        self._note_id(record, node)
        if "toolUseResult" in record and (report := self._read_report(record, message, results)) is not None:
            self._reports.append(report)
        caller = self._callers.get(first_result)
        if caller is not None and caller.thread == thread and not self._openings.begins(node):
            self._settle(node, caller)

    def _read_report(
        self, record: dict[str, Any], message: dict[str, Any], results: Iterable[str]
    ) -> TaskReport | None:
        """The report of a subagent, if a result is one."""
        blocks = message.get("content")
        if isinstance(blocks, list) and any(as_object(block).get("is_error") is True for block in blocks):
            return None
        ids = list(results)
        call_id = ids[0] if len(ids) == 1 else ""
        return read_task_report(record, call_id, self._asked.get(call_id, 0), self._line, self._intake, self._spool)

    def _new_node(self, record: dict[str, Any], thread: str, response: bool, identity: int) -> Node:
        parent = record.get("parentUuid")
        node = Node(
            order=self._line,
            thread=thread,
            response=response,
            identity=identity,
            parent=_record_id(parent),
            starts="parentUuid" in record and parent is None,
            started_at=as_text(record.get("timestamp")),
            run=as_text(record.get("parentToolUseID")),
        )
        self._events.append(node)
        self._openings.add_node(node)
        return node

    def _note_id(self, record: dict[str, Any], node: Node) -> None:
        if (uuid := _record_id(record.get("uuid"))) is not None:
            self._node_of[uuid] = node
        if (sent := _record_id(record.get("sentAsUuid"))) is not None:  # what answers a prompt that was stored anew
            self._node_of.setdefault(sent, node)

    def _settle(self, node: Node, caller: Node) -> None:
        """Join results to the response whose calls they answer."""
        node.home = caller
        new = {call_id: at for call_id, at in node.results.items() if call_id not in caller.results}
        if new or node.after:
            caller.results.update(new)
            caller.after += node.after
            caller.lines += node.lines
        else:
            self._intake.skip("replay", node.lines)

    # --- Order ---

    def conversations(self, seen: _Seen) -> Iterator[Outgoing]:
        """The file's conversations: threads in order of appearance, segments, then what was taken back."""
        nodes = self._linked_nodes()
        threads: dict[str, dict[int, list[Node]]] = {}
        for node in nodes:
            threads.setdefault(node.thread, {}).setdefault(node.segment, []).append(node)
        for thread, segments in threads.items():
            session_id = f"{self._file.session_id}/{thread}" if thread else self._file.session_id
            for segment, members in sorted(segments.items()):
                mark = f"#{segment + 1}" if segment else ""
                fresh = split_paths(members, lambda node: node.response and node.identity not in seen.nodes)
                for branch, path in enumerate(fresh):
                    kept = self._without_replays(path, seen)
                    if not any(node.response for node in kept):
                        self._intake.skip("no_response", sum(node.lines for node in kept))
                    else:
                        suffix = mark + (f"~{branch}" if branch else "")
                        yield self._conversation(session_id + suffix, thread, kept)
        seen.nodes.update(node.identity for node in nodes)
        seen.words.update(node.words for node in nodes if node.words)
        for note in (
            *(event for event in self._events if isinstance(event, Note)),
            *(n for x in nodes for n in x.after),
        ):
            seen.nodes.add(note.identity)
            seen.words.add(note.words)
        seen.nodes.discard(0)

    def _linked_nodes(self) -> list[Node]:
        """The nodes in file order, each with the node above it, its segment and its notes."""
        self._join_results()
        self._count_prompts()
        nodes: list[Node] = []
        last: dict[str, Node | Boundary] = {}  # by thread
        segments: dict[str, int] = {}  # compactions so far, by thread
        waiting: dict[str, list[Note]] = {}  # notes for the next node, by thread
        after: dict[int, tuple[Node, list[Note]]] = {}  # notes of nodes, by id()
        for event in self._events:
            if isinstance(event, Note):
                owner = None if event.dropped else self._resolve(event.parent)
                if isinstance(owner, Node):
                    after.setdefault(id(owner), (owner, []))[1].append(event)
                elif not event.dropped:
                    waiting.setdefault(event.thread, []).append(event)
            elif isinstance(event, Boundary):
                if isinstance(before := last.get(event.thread), Node):
                    after.setdefault(id(before), (before, []))[1].extend(waiting.pop(event.thread, []))
                last[event.thread] = event
                segments[event.thread] = event.segment
            elif event.home is None:
                above = self._above(event, last.get(event.thread))
                if isinstance(above, Node):
                    event.above = above
                else:
                    event.segment = above.segment if above is not None else segments.get(event.thread, 0)
                before = last.get(event.thread)
                if isinstance(before, Node) and above is not before and (left := waiting.get(event.thread)):
                    # A prompt that was sent into a turn is read there, also where the user then went back.
                    sent = [note for note in left if note.sent]
                    after.setdefault(id(before), (before, []))[1].extend(sent)
                    waiting[event.thread] = [note for note in left if not note.sent]
                event.before = self._notes_before(event, waiting.pop(event.thread, []))
                last[event.thread] = event
                nodes.append(event)
        for thread, notes in waiting.items():
            if isinstance(before := last.get(thread), Node):
                after.setdefault(id(before), (before, []))[1].extend(notes)
        for node, notes in after.values():
            node.notes = tuple(notes)
        for node in nodes:
            settle_segment(node)
        if self._reports:
            reports = TaskReports(nodes, self._callers, self._spool, self._intake)
            nodes = reports.close(self._reports, self._own_logs.__contains__)
        return nodes

    def _join_results(self) -> None:
        """Join the results that are left to their calls.

        A result that begins a conversation (of a plan that was accepted, the context cleared) is in no call's
        context, and the model does not get to see it.
        """
        for event in self._events:
            if not isinstance(event, Node) or not event.results or event.response or event.home is not None:
                continue
            if self._linked and self._openings.begins(event):
                for _ in event.results:
                    self._intake.drop("orphan_result")
                event.results.clear()
                continue
            callers = (self._callers.get(call_id) for call_id in event.results)
            caller = next((c for c in callers if c is not None and c.thread == event.thread), None)
            if caller is not None:
                self._settle(event, caller)

    def _count_prompts(self) -> None:
        """Count what the queue of prompts gave."""
        found = [prompt for note, prompt in self._ahead.read() if not note.dropped]
        self._intake.skip("bookkeeping", self._removals - len(found))
        for prompt in found:
            self._intake.redacted.update(prompt.redacted)

    def _above(self, node: Node, last: Node | Boundary | None) -> Node | Boundary | None:
        """What a node answers: by its link, or else the last thing in its thread."""
        above = self._resolve(node.parent)
        if above is not None and above.thread == node.thread and above is not node:
            kept_at = self._kept.get(node.parent) if node.parent is not None else None
            return last if kept_at is not None and node.order > kept_at else above
        if above is not None or not self._linked or node.response or node.results:
            return last
        opening = self._openings.find(node)
        if opening is not None and opening.first is not None and opening.first.thread == node.thread:
            return opening.first.above  # the user went back to before that one
        begins = self._openings.begins(node) and not isinstance(last, Boundary)
        if opening is not None:
            opening.first = node
        return None if begins else last  # the user went back to before the first message

    def _notes_before(self, node: Node, waiting: list[Note]) -> tuple[Note, ...]:
        """The notes before a node: those that waited for it, and what it shares with the first node of its opening."""
        if self._openings.find(node) is None:
            return tuple(waiting)
        chain = [self._attachments[uuid] for uuid in self._openings.chain(node) if uuid in self._attachments]
        return (*(note for note in reversed(chain) if note not in waiting and not note.dropped), *waiting)

    def _resolve(self, uuid: int | None) -> Node | Boundary | None:
        """The node or compaction that a record id leads to, through records that are neither."""
        passed: set[int] = set()
        while uuid is not None and uuid not in passed:
            if (found := self._node_of.get(uuid)) is not None:
                return found.home or found if isinstance(found, Node) else found
            passed.add(uuid)
            uuid = self._links.get(uuid)
        return None

    # --- Writing ---

    def _without_replays(self, path: list[Node], seen: _Seen) -> list[Node]:
        """The nodes of a path that no earlier file has; up to the last copy, user messages go by their words.

        New notes on a copy, and new words beside a result of its calls, come before what follows it.
        """
        last_copy = max((i for i, node in enumerate(path) if node.identity in seen.nodes), default=-1)
        kept: list[Node] = []
        carried: list[Note] = []
        for i, node in enumerate(path):
            if node.identity in seen.nodes or (i < last_copy and node.words in seen.words):
                said = [note for note in node.after if note.identity not in seen.nodes and note.words not in seen.words]
                self._intake.skip("replay", node.lines - len(said))
                carried += said
                for note in (*node.before, *node.notes):
                    if note.identity in seen.nodes or note.words in seen.words:
                        self._intake.skip("replay")
                    else:
                        carried.append(note)
            else:
                node.before = (*carried, *node.before)
                carried.clear()
                kept.append(node)
        return kept

    def _conversation(self, session_id: str, thread: str, nodes: list[Node]) -> Outgoing:
        table = self._tools.get(thread)
        head = Session(
            session_id=session_id,
            source="claude",
            started_at=next((node.started_at for node in nodes if node.started_at), ""),
            tools=table.definitions() if table else (),
            messages=(),
        )
        return Outgoing(head, self._parts(self._requests.system(thread), nodes))

    def _parts(self, system: str, nodes: list[Node]) -> Iterator[Part | None]:
        if system:
            yield Part("text", system, "system")
        for node in nodes:
            yield None
            for note in node.before:
                yield from self._spool.get(note.at)
            answered = [call_id for call_id in node.calls if call_id in node.results]
            stray = [call_id for call_id in node.results if call_id not in node.calls]
            for at in (*node.parts, *(node.results[call_id] for call_id in answered + stray)):
                yield from self._spool.get(at)
            for note in (*node.after, *node.notes):
                yield from self._spool.get(note.at)


def _subagent_record(record: dict[str, Any]) -> dict[str, Any] | None:
    """The message of a subagent inside a `progress` record, as a record of its own."""
    data = as_object(record.get("data"))
    inner = as_object(data.get("message"))
    if not isinstance(inner.get("message"), dict):
        return None
    agent = as_text(data.get("agentId")) or as_text(record.get("parentToolUseID")) or "unnamed"
    known: dict[str, Any] = {key: inner[key] for key in ("type", "uuid", "message", "requestId") if key in inner}
    timestamp = inner.get("timestamp") or record.get("timestamp")
    named = {"isSidechain": True, "agentId": agent, "parentToolUseID": record.get("parentToolUseID")}
    return {**known, **named, "timestamp": timestamp}


def _record_id(uuid: object) -> int | None:
    return fingerprint(uuid) if isinstance(uuid, str) and uuid else None


def _prompt_key(content: object) -> int:
    """Stands for a prompt by its words, without pictures, which its records name in different ways."""
    blocks = content if isinstance(content, list) else [content]
    texts = (block if isinstance(block, str) else as_text(as_object(block).get("text")) for block in blocks)
    return fingerprint("".join("\n".join(texts).split()))
