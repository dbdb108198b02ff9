"""Which log files belong together: each with the session that the user started.

Subagents, forks and resumed copies share text with their root session, so a group of files is read
together (which is where replays are found) and stays together when sessions are split.
"""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from spark.extract.intake import COMPRESSED, Intake, as_object, as_text, read_lines, read_records, records_of
from spark.speech.sessions import Source

LOGS = (".jsonl", ".jsonl" + COMPRESSED)
_ID_LENGTH = 255  # characters; Codex's may be anything
HEAD_RECORDS = 50  # where a file says what it is and what it continues


@dataclass(frozen=True, slots=True)
class Base:
    """What the log of a Codex thread goes on from, which it does not repeat: lines of another log.

    rollout: id of that log. end: the ordinal of its first line that does not count.
    """

    rollout: str
    end: int


@dataclass(frozen=True, slots=True)
class LogFile:
    """One log file.

    session_id: id of the session in it, which begins with its root's.
    agent: id of the subagent whose log it is, else empty. readable: its first lines have a record.
    rollout, base: of one of Codex's logs, its id and what it goes on from, if there is that.
    """

    path: Path
    size: int
    session_id: str
    agent: str = ""
    started_at: str = ""
    readable: bool = True
    rollout: str = ""
    base: Base | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one root session, parents before what replays them."""

    source: Source
    root_id: str
    files: tuple[LogFile, ...]


class _Families:
    """Ids joined into families (disjoint sets)."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def find(self, name: str) -> str:
        self._parent.setdefault(name, name)
        while (up := self._parent[name]) != name:
            self._parent[name] = self._parent[up]
            name = up
        return name

    def join(self, a: str, b: str) -> None:
        self._parent[self.find(a)] = self.find(b)


def list_logs(homes: Iterable[Path], folders: Sequence[str], intake: Intake) -> list[tuple[Path, int]]:
    """Every *.jsonl file, with its size, under those folders of the homes; of a home without them, under itself.

    Since June 2026 Codex compresses logs that are a week old (*.jsonl.zst), and unpacks one to go on with it: of both
    forms the plain one counts, which may have more. Links are followed, to each folder once. Codex's logs in other
    forms (one JSON document, as before July 2025), and what cannot be looked at, are counted as skipped.
    """
    found: dict[Path, int] = {}
    tops = [top for home in homes for top in list(filter(_is_folder, map(home.joinpath, folders))) or [home]]
    for path in _files(tops, intake):
        try:
            if path.name.endswith(LOGS) and path.is_file():  # not a pipe
                found[path] = path.stat().st_size
            elif path.name.startswith("rollout-") and not path.name.endswith(LOGS):
                intake.skip("unsupported_file")
            elif path.is_symlink() and not path.exists():  # to a disk that is not there
                intake.skip("unreadable_file")
        except FileNotFoundError:  # the program has just removed it
            pass
        except OSError:
            intake.skip("unreadable_file")
    twice = {path for path in found if path.suffix == COMPRESSED and path.with_suffix("") in found}
    return sorted((path, size) for path, size in found.items() if path not in twice)


def _name(path: Path) -> str:
    """A log's name without what says its form."""
    return path.name.removesuffix(COMPRESSED).removesuffix(".jsonl")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # of what it lies in, which is then searched, and counted
        return False


def _files(tops: Sequence[Path], intake: Intake) -> Iterator[Path]:
    """The files below some folders, those behind links last."""
    seen: set[tuple[int, int]] = set()
    left = [*tops]
    while left:
        links: list[Path] = []
        for top in left:
            for folder, folders, names in os.walk(top, onerror=lambda _: intake.skip("unreadable_folder")):
                try:
                    status = Path(folder).stat()
                except OSError:
                    folders.clear()
                    continue
                if (status.st_dev, status.st_ino) in seen:
                    folders.clear()
                    continue
                seen.add((status.st_dev, status.st_ino))
                links += [path for name in folders if (path := Path(folder, name)).is_symlink()]
                yield from (Path(folder, name) for name in names)
        left = sorted(links)


def plain_id(name: str) -> str:
    """An id without the marks that have a meaning in session ids, and no longer than names of files are."""
    plain = re.sub(r"[^\w.:+-]", "_", name) or "unnamed"
    if len(plain) <= _ID_LENGTH:
        return plain
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{plain[: _ID_LENGTH - len(digest) - 1]}.{digest}"


# --- Claude Code ---


@dataclass(frozen=True, slots=True)
class _Head:
    """What the first records of one of Claude Code's logs say, and its place.

    name: the file's. owner: the session that a subagent belongs to, empty for other logs. relatives:
    sessions that its records name. fork: it says that it is one. readable: there is a record.
    """

    path: Path
    size: int
    name: str
    owner: str
    started_at: str
    relatives: tuple[str, ...]
    fork: bool
    readable: bool


def group_claude(logs: Sequence[tuple[Path, int]], intake: Intake) -> list[Group]:
    """Group Claude Code's logs by root session, in the order of their ids.

    A subagent's log lies in a folder named after its session (`<id>/subagents/...`) or, in older
    versions, beside it as `agent-*.jsonl` with the session's id inside. A fork names its parent. A
    resumed copy is recognized because records in it, or their parents, are in another log too.
    The root is the oldest session; of a session and its resumed copy the copy, which holds both.
    """
    quiet = intake.quiet()  # heads are read again
    heads = [_claude_head(path, size, quiet) for path, size in logs]
    agents = sorted((head for head in heads if head.owner), key=lambda h: (h.started_at, h.path))
    sessions = sorted(
        (head for head in heads if not head.owner), key=lambda h: (h.fork, h.started_at, -h.size, h.name, h.path)
    )
    families = _Families()
    for head in sessions:
        for relative in head.relatives:
            families.join(head.name, relative)
    for a, b in _shared_records(sessions, quiet):
        families.join(a, b)

    root_of_family: dict[str, str] = {}
    grouped: dict[str, list[LogFile]] = {}
    for head in sessions:
        root = root_of_family.setdefault(families.find(head.name), head.name)
        session_id = root if head.name == root else f"{root}/{head.name}"
        grouped.setdefault(root, []).append(LogFile(head.path, head.size, session_id, "", head.started_at))
    for head in agents:
        root = root_of_family.setdefault(families.find(head.owner), head.owner)
        parent = root if head.owner == root else f"{root}/{head.owner}"
        agent = head.name.removeprefix("agent-")
        log = LogFile(head.path, head.size, f"{parent}/agent-{agent}", agent, head.started_at, head.readable)
        grouped.setdefault(root, []).append(log)
    return [Group("claude", root, tuple(files)) for root, files in sorted(grouped.items())]


def _claude_head(path: Path, size: int, intake: Intake) -> _Head:
    named: list[str] = []
    forks: list[str] = []
    started_at, readable = "", False
    told: set[bytes] = set()  # ids of sessions, as they stand in lines that were read
    for line in islice(read_lines(path, intake), HEAD_RECORDS):
        ids = _SESSION_ID.findall(line)
        if started_at and told.issuperset(ids) and b"forkedFrom" not in line:
            continue  # it says nothing new; most lines are like that
        for record in records_of(line, intake):
            readable = True
            told.update(ids)
            started_at = started_at or as_text(record.get("timestamp"))
            named += [plain_id(s) for s in (as_text(record.get("sessionId")),) if s]
            fork = as_text(as_object(record.get("forkedFrom")).get("sessionId"))
            forks += [plain_id(fork)] if fork else []
    name, owner = plain_id(_name(path)), ""
    if "subagents" in path.parts[-4:-1]:
        owner = plain_id(path.parts[path.parts.index("subagents", len(path.parts) - 4) - 1])
    elif name.startswith("agent-"):
        owner = named[0] if named else name
    return _Head(
        path=path,
        size=size,
        name=name,
        owner=owner,
        started_at=started_at,
        relatives=(*named, *forks),
        fork=bool(forks),
        readable=readable,
    )


_SESSION_ID = re.compile(rb'"sessionId" ?: ?("[^"]*"?)')
_ID_KEYS = ("uuid", "parentUuid", "logicalParentUuid")
_RECORD_ID = re.compile(rb'"(?:%s)" ?: ?"([0-9A-Za-z-]{8,64})"' % "|".join(_ID_KEYS).encode())
_MESSAGE_ID = re.compile(rb'"id" ?: ?"(msg_[0-9A-Za-z_-]{16,})"')


def _shared_records(heads: Sequence[_Head], intake: Intake) -> Iterator[tuple[str, str]]:
    """Pairs of sessions of which one has or answers a record of the other.

    Ids are found by pattern, without parsing where there is one alone (what a tool found may have a `uuid`, too), and
    kept as 64-bit hashes: 12 bytes a record. Titles (`summary` lines) are left out: programs have written other
    sessions' titles into a log.
    """
    if len(heads) < 2:
        return
    ids, owners = [], []
    for owner, head in enumerate(heads):
        hashes = array("q")
        for line in read_lines(head.path, intake):
            if b'"summary"' in line[:60]:
                continue
            found = _RECORD_ID.findall(line) if line.count(b'"uuid"') < 2 else _ids_of(line, intake)
            hashes.extend(hash(record_id) for record_id in (*found, *_MESSAGE_ID.findall(line)))
        unique = np.unique(np.array(hashes, np.int64))
        ids.append(unique)
        owners.append(np.full(len(unique), owner, np.int32))
    all_ids, all_owners = np.concatenate(ids), np.concatenate(owners)
    order = np.argsort(all_ids, kind="stable")
    all_ids, all_owners = all_ids[order], all_owners[order]
    shared = np.flatnonzero(all_ids[1:] == all_ids[:-1])
    for a, b in np.unique(np.stack([all_owners[shared], all_owners[shared + 1]], axis=1), axis=0):
        yield heads[a].name, heads[b].name


def _ids_of(line: bytes, intake: Intake) -> list[bytes]:
    """The ids of a line's records themselves."""
    values = (record.get(key) for record in records_of(line, intake) for key in _ID_KEYS)
    return [value.encode(errors="replace") for value in values if isinstance(value, str) and value]


# --- Codex ---

_TRAILING_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$")


def group_codex(logs: Sequence[tuple[Path, int]], intake: Intake) -> list[Group]:
    """Group Codex's logs by root thread, in the order of their ids.

    A log's first lines name the thread, and the thread it was forked from or spawned by. The same
    thread may have several logs (one archived, one that continues another); a parent may be missing.
    """
    quiet = intake.quiet()  # heads are read again
    heads = [(_codex_head(path, quiet), path, size) for path, size in logs]
    # A later log of a thread, or one of an earlier state of it, has an id that others refer to.
    later = {head.rollout: head.thread for head, _, _ in reversed(heads) if head.rollout != head.thread}
    parents: dict[str, str] = {}
    for head, _, _ in heads:
        parent = later.get(head.parent, head.parent)
        if parent and parent != head.thread:
            parents.setdefault(head.thread, parent)

    grouped: dict[str, list[tuple[int, str, int, Path, LogFile]]] = {}
    for head, path, size in heads:
        depth, root = _ancestry(head.thread, parents)
        session_id = head.thread if head.thread == root else f"{root}/{head.thread}"
        log = LogFile(path, size, session_id, "", head.started_at, rollout=head.rollout, base=head.base)
        grouped.setdefault(root, []).append((depth, head.started_at, -size, path, log))
    return [
        Group("codex", root, tuple(log for *_, log in sorted(members, key=lambda m: m[:4])))
        for root, members in sorted(grouped.items())
    ]


@dataclass(frozen=True, slots=True)
class _CodexHead:
    """What the first lines of one of Codex's logs say, and its name: ids of its thread, of a parent or "", its own."""

    thread: str
    parent: str
    rollout: str
    started_at: str = ""
    base: Base | None = None


def _codex_head(path: Path, intake: Intake) -> _CodexHead:
    in_name = _TRAILING_ID.search(_name(path))
    rollout = in_name[0] if in_name else plain_id(_name(path))
    for record in islice(read_records(path, intake), HEAD_RECORDS):
        meta = codex_meta(record)
        if meta is not None:
            spawned = as_object(as_object(as_object(meta.get("source")).get("subagent")).get("thread_spawn"))
            base = as_object(meta.get("history_base"))
            before = as_text(base.get("thread_id"))  # of a log: a thread's first one has the thread's id
            candidates = (
                meta.get("forked_from_id"), spawned.get("parent_thread_id"), meta.get("parent_thread_id"), before
            )  # fmt: skip
            parent = next((text for c in candidates if (text := as_text(c))), "")
            started_at = as_text(meta.get("timestamp")) or as_text(record.get("timestamp"))
            own, end = as_text(meta.get("id")), base.get("end_ordinal_exclusive")
            return _CodexHead(
                plain_id(own) if own else rollout,
                plain_id(parent) if parent else "",
                rollout if in_name or not own else plain_id(own),
                started_at,
                Base(plain_id(before), end) if before and isinstance(end, int) else None,
            )
    return _CodexHead(rollout, "", rollout)


def codex_meta(record: dict[str, Any]) -> dict[str, Any] | None:
    """The head of a thread's log if the record is one, of either era."""
    if record.get("type") == "session_meta":
        return as_object(record.get("payload")) or record
    if "type" not in record and isinstance(record.get("id"), str) and "record_type" not in record:
        return record
    return None


def _ancestry(thread: str, parents: dict[str, str]) -> tuple[int, str]:
    """How many ancestors a thread has and the first of them; of a ring of parents, the least id."""
    seen = [thread]
    while (parent := parents.get(seen[-1])) is not None:
        if parent in seen:
            return 0, min(seen[seen.index(parent) :])
        seen.append(parent)
    return len(seen) - 1, seen[-1]
