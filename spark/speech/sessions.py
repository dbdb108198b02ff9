"""Sessions: what a coding agent's model read and wrote, one conversation a line of a JSONL file.

A line is `{"session_id","source","started_at","tools":[...],"messages":[...]}`; a message is `{"role","content",
"reasoning","tool_calls":[{"id","name","arguments"}],"tool_call_id"}`, where empty fields after `role` and `content`
may be missing. Roles are system (developer text included), user, assistant and tool. `arguments` is an object.
`tools` holds definitions as chat templates take them: `{"type":"function","function":{"name","parameters",...}}`.

A session is a linear conversation: one context window of one model. Its id says what it belongs to:

    ROOT[/CHILD...][#SEGMENT][~BRANCH]

- ROOT is the session the user started. Everything that grew from it (subagents, forks, resumed copies) has an id that
  begins with ROOT and a slash, and stays with it when sessions are split into train and test.
- `#2`, `#3`: what the model saw after the first, second compaction: the summary, then what followed. The segment
  before the first compaction carries no mark.
- `~1`, `~2`: turns that the user took back (a rewind). The turns before them are in the session without the mark.

A fork, a branch or a resumed copy holds its own messages only: those that repeat its parent's are left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from engine.ground.errors import FileFormatError, SparkError
from engine.ground.files import make_private, open_regular, remove_stale, temporary_name

EXTRACT_HINT = "make session files with `spark extract-sessions`"

_LONG_ID = 2000  # characters of a root, and of what follows it

Role = Literal["system", "user", "assistant", "tool"]
Source = Literal["claude", "codex"]

ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the model; the `tool` message with the same id is its result."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn; `reasoning` and `tool_calls` belong to assistant turns, `tool_call_id` to tool turns."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    def to_json(self) -> dict[str, Any]:
        """The message as it is written; chat templates take the same object."""
        record: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            record["reasoning"] = self.reasoning
        if self.tool_calls:
            record["tool_calls"] = [
                {"id": call.id, "name": call.name, "arguments": call.arguments} for call in self.tool_calls
            ]
        if self.tool_call_id:
            record["tool_call_id"] = self.tool_call_id
        return record


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation; `started_at` is the log's own timestamp, empty where the log had none."""

    session_id: str
    source: str
    started_at: str
    tools: tuple[Mapping[str, Any], ...]
    messages: tuple[Message, ...]

    @property
    def root_id(self) -> str:
        """Id of the session that the user started and that this one belongs to."""
        return root_of(self.session_id)


def root_of(session_id: str) -> str:
    """The ROOT part of a session id."""
    for mark in "/#~":
        session_id = session_id.partition(mark)[0]
    return session_id


def short_id(session_id: str) -> str:
    """The id, or one of 4,096 characters at most that stands for it, with the same root as its family's.

    The engine takes no longer ones. A root, or what follows it, of more than 2,000 characters ends in its SHA-256.
    """
    if len(session_id) <= _LONG_ID:
        return session_id
    root = root_of(session_id)
    return _shortened(root) + _shortened(session_id[len(root) :])


def _shortened(text: str) -> str:
    if len(text) <= _LONG_ID:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text[: _LONG_ID - len(digest) - 1]}.{digest}"


def split_rank(root_id: str) -> float:
    """Position of a root session in [0, 1), from its SHA-256; the roots below the test fraction are test sessions."""
    digest = hashlib.sha256(root_id.encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def read_sessions(path: Path, name: str = "") -> Iterator[Session]:
    """Read the sessions of a JSONL file one by one; empty lines are passed over.

    name: what messages call the file; default: its path. Raises FileFormatError, which names the file, the line and the
    field, at the first line that is not a session.
    """
    name = name or str(path)
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _parse_line(line, f"{name}, line {number}")
    except OSError as error:
        raise FileFormatError(f"{name} cannot be read: {error.strerror}") from error


def write_sessions(path: Path, sessions: Iterable[Session]) -> None:
    """Write a whole file of sessions, atomically and readable by its owner alone."""
    with SessionWriter(path) as writer:
        for session in sessions:
            writer.write(session, session.messages)
        writer.seal()
        publish([writer])


class SessionWriter:
    """A file of sessions under construction, which takes its name only when it is whole.

    Use as a context manager: `open`, `write` sessions, `seal`, then `publish`; whatever was not published is removed on
    leaving, and what a process that was killed left of the same file on entering.
    Raises SparkError, naming the file, when the disk does not take it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session_ids: list[str] = []
        self._file: IO[bytes] | None = None
        self._held: int | None = None
        self._temporary = temporary_name(path)
        self._published = False

    def __enter__(self) -> SessionWriter:
        remove_stale(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk, already reported by what wrote last
                self._file.close()
        if not self._published:
            self._temporary.unlink(missing_ok=True)
        if self._held is not None:
            os.close(self._held)

    def open(self) -> None:
        """Make the file, if not by the first `write`; what a Ctrl-C ends in `__enter__` would never be left."""
        try:
            self._file = make_private(self._temporary)
        except OSError as error:
            raise _write_error(self.path, error) from error
        self._held = os.dup(self._file.fileno())  # holds the lock until the file has its name, or is gone

    def write(self, head: Session, messages: Iterable[Message]) -> None:
        """Append one session: the head's fields with `messages` in place of its own, which need not fit in memory."""
        fields = {
            "session_id": head.session_id,
            "source": head.source,
            "started_at": head.started_at,
            "tools": list(head.tools),
        }
        self._put(_encode(fields)[:-1] + b', "messages": [')
        for i, message in enumerate(messages):
            self._put((b", " if i else b"") + _encode_message(message))
        self._put(b"]}\n")
        self.session_ids.append(head.session_id)

    def write_line(self, session_id: str, line: bytes) -> None:
        """Append a session that is already encoded, its line end included."""
        self._put(line)
        self.session_ids.append(session_id)

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """The sessions of a sealed file: ids and lines."""
        with self._temporary.open("rb") as file:
            yield from zip(self.session_ids, file, strict=True)

    def seal(self) -> None:
        """Push everything to the disk; nothing can be written afterwards."""
        file = self._opened()
        try:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        except OSError as error:
            raise _write_error(self.path, error) from error

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self.open()
        assert self._file is not None
        return self._file

    def _put(self, data: bytes) -> None:
        file = self._opened()
        try:
            file.write(data)
        except OSError as error:
            raise _write_error(self.path, error) from error


def publish(writers: Sequence[SessionWriter]) -> None:
    """Give sealed files of one folder their names, in place of those that had them: all, or none.

    A signal that ends the process waits until it is done. A process that is killed outright, or a power cut, may leave
    the first file alone, never files of two runs. Raises SparkError where the folder does not take one.
    """
    old = {writer: temporary_name(writer.path) for writer in writers}
    with _undisturbed():
        try:
            for writer, kept in old.items():
                with contextlib.suppress(FileNotFoundError):
                    _keep(writer.path, kept)
            for writer in writers[1:]:
                writer.path.unlink(missing_ok=True)
            for writer in writers:
                writer._temporary.replace(writer.path)
                writer._published = True
            _sync(writers[0].path.parent)
        except OSError as error:
            for done, kept in old.items():
                if kept.exists():
                    kept.replace(done.path)
                elif done._published:
                    done.path.unlink()
            raise _write_error(writer.path, error) from error
        finally:
            for kept in old.values():
                kept.unlink(missing_ok=True)


def _keep(path: Path, kept: Path) -> None:
    """Have a file by another name, too; by that alone where the file system knows no links (exFAT, some shares)."""
    try:
        os.link(path, kept)
    except OSError:
        if not path.is_file():  # there is none, or a folder
            raise
        path.replace(kept)


def _sync(folder: Path) -> None:
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let signals that end a process wait until the block ends; handlers run in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: of another language
        for first in came[:1]:
            signal.raise_signal(first)


def _write_error(path: Path, error: OSError) -> SparkError:
    return SparkError(
        f"{path} cannot be written: {error.strerror}",
        hint="choose an --out-dir with room that you may write to; files already there were left as they were",
    )


_to_json = json.JSONEncoder(ensure_ascii=False).encode


def _encode(value: object) -> bytes:
    return _to_json(value).encode()


def _encode_message(message: Message) -> bytes:
    if message.reasoning or message.tool_calls:
        return _encode(message.to_json())
    # An encoder of objects is slow to set up, one of strings is not.
    result = f', "tool_call_id": {_to_json(message.tool_call_id)}' if message.tool_call_id else ""
    return f'{{"role": "{message.role}", "content": {_to_json(message.content)}{result}}}'.encode()


def _parse_line(line: bytes, where: str) -> Session:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{where}: not JSON ({error})", hint=EXTRACT_HINT) from error
    record = _expect(record, dict, where, "the line")
    tools = _field(record, "tools", list, where, [])
    for tool in tools:
        _expect(tool, dict, where, "an item of tools")
    messages = _field(record, "messages", list, where)
    session_id = _field(record, "session_id", str, where)
    if any("\ud800" <= character <= "\udfff" for character in session_id):  # token files are UTF-8
        raise FileFormatError(
            f"{where}: session_id is {session_id!r}, and half of a surrogate pair is no character", hint=EXTRACT_HINT
        )
    return Session(
        session_id=session_id,
        source=_field(record, "source", str, where, ""),
        started_at=_field(record, "started_at", str, where, ""),
        tools=tuple(tools),
        messages=tuple(_parse_message(m, f"{where}, message {i}") for i, m in enumerate(messages, 1)),
    )


def _parse_message(value: object, where: str) -> Message:
    record = _expect(value, dict, where, "the message")
    role = _field(record, "role", str, where)
    if role not in ROLES:
        raise FileFormatError(f"{where}: role is {role!r}, expected one of {', '.join(ROLES)}", hint=EXTRACT_HINT)
    calls: Sequence[object] = _field(record, "tool_calls", list, where, [])
    return Message(
        role=cast(Role, role),
        content=_field(record, "content", str, where, ""),
        reasoning=_field(record, "reasoning", str, where, ""),
        tool_calls=tuple(_parse_call(call, f"{where}, tool call {i}") for i, call in enumerate(calls, 1)),
        tool_call_id=_field(record, "tool_call_id", str, where, ""),
    )


def _parse_call(value: object, where: str) -> ToolCall:
    record = _expect(value, dict, where, "the call")
    return ToolCall(
        id=_field(record, "id", str, where, ""),
        name=_field(record, "name", str, where),
        arguments=_field(record, "arguments", dict, where, {}),
    )


_JSON_NAMES = {dict: "an object", list: "an array", str: "a string", int: "a number", float: "a number"}


def _field(record: dict[str, Any], key: str, kind: type, where: str, default: object = None) -> Any:
    """The value under `key`, of type `kind`; a missing or null one gives `default`, an error where that is None."""
    value = record.get(key)
    if value is None:
        if default is None:
            raise FileFormatError(f"{where}: no {key!r}, expected {_JSON_NAMES[kind]}", hint=EXTRACT_HINT)
        return default
    return _expect(value, kind, where, key)


def _expect(value: object, kind: type, where: str, name: str) -> Any:
    if not isinstance(value, kind):
        found = _JSON_NAMES.get(type(value), json.dumps(value))
        raise FileFormatError(f"{where}: {name} is {found}, expected {_JSON_NAMES[kind]}", hint=EXTRACT_HINT)
    return value
