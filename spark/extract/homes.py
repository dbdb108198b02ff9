"""The logs of many users: each home folder is read by itself, several at a time, and ids stay apart.

A process reads a home, or some root sessions of a large one, with its own spool and its own counts, and leaves its
sessions in a file; they are then dealt to the two sides by whole root, in the order of the homes and of the roots in
each, so that the number of processes changes nothing. Every id begins with a mark of its home, so two users who have a
session of one id (a copied folder) have two, and the names of users are in none.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

from engine.ground.errors import FileFormatError, SparkError, UsageError
from engine.ground.files import scratch
from spark import storage
from spark.extract import (
    FILES,
    FOLDERS,
    ExtractOptions,
    Report,
    Sides,
    alone_in,
    check_logs,
    conversations_of,
    counted,
    groups_of,
    no_session,
    reported,
    unused,
    why,
)
from spark.extract.intake import Intake
from spark.extract.report import Tally
from spark.extract.roots import LOGS, Group, list_logs
from spark.speech.sessions import SessionWriter, publish, root_of

_PLACES = {"claude": (".claude", ".config/claude"), "codex": (".codex",)}
_SCRATCH = ".homes-"
_Logs = dict[str, list[tuple[Path, int]]]  # by family
_EXPECTED = "expected home folders of users"


@dataclass(frozen=True, slots=True)
class _Home:
    """What a process is given.

    mark: what its ids begin with; url: where it lies; out: the file for its sessions. part, parts: which root sessions
    of it. size: bytes of it, as far as they are known. logs: of a home that several read, its logs as they were when it
    was divided: one of them may grow, and another come, between their looks, and each would divide it otherwise.
    """

    mark: str
    url: str
    out: Path
    part: int
    parts: int
    size: int
    out_dir: Path
    options: ExtractOptions
    logs: _Logs | None = None


@dataclass(frozen=True, slots=True)
class _Read:
    """What a process found. sessions: of the file, in order: which of the home's roots each is of, and its id."""

    n_files: int
    sessions: list[tuple[int, str]]
    tally: Tally
    intake: Intake


def mark_of(home: str) -> str:
    """What the ids of a home's sessions begin with: 8 hex digits of where it lies, so it stays when others come."""
    return f"u{hashlib.sha256(home.encode(errors='surrogateescape')).hexdigest()[:8]}"


def extract(options: ExtractOptions, progress: Callable[[int, int], None]) -> Report:
    """Read the logs of all homes and write train.jsonl and test.jsonl, both whole or neither.

    progress: called with the homes that are read, and their number. Raises what `spark.extract.extract` does;
    UsageError also where a family's folder is named, too; FileFormatError for a home that is no folder.
    """
    if options.claude_dir is not None or options.codex_dir is not None:
        raise UsageError("--home reads each home's own folders, --claude-dir and --codex-dir name others")
    found = sorted({_same(each) for given in options.homes for each in storage.folders(given)})
    if not found:
        raise FileFormatError(f"--home {' '.join(options.homes)}: no such folders", hint=_EXPECTED)
    for each in found:
        if (path := storage.local(each)) is not None and not path.is_dir():
            raise FileFormatError(f"--home {each} is no folder", hint=_EXPECTED)
    with contextlib.ExitStack() as stack:
        out_dir = stack.enter_context(storage.folder(options.out_dir, FILES))
        scratch = stack.enter_context(_scratch(out_dir))
        n_cores = _cores()
        # Where there are fewer homes than cores several processes read one, which is fetched once.
        trees = [stack.enter_context(storage.tree(home, LOGS)) if len(found) < n_cores else home for home in found]
        work = _dealt(found, [str(each) for each in trees], n_cores, scratch, out_dir, options)
        tally, intake, n_files = Tally(), Intake(options.redact, lambda _: None, out_dir), 0
        with Sides(out_dir, options.test_frac) as sides:
            progress(0, len(found))
            n_sessions = 0
            read = _all([part for parts in work for part in parts], n_cores)
            for done, parts in enumerate(work, start=1):
                reads = [next(read) for _ in parts]
                for one in reads:
                    n_files += one.n_files
                    n_sessions += len(one.sessions)
                    tally.join(one.tally)
                    _join(intake, one.intake)
                with contextlib.ExitStack() as files:
                    lines = [
                        zip(one.sessions, files.enter_context(part.out.open("rb")), strict=True)
                        for part, one in zip(parts, reads, strict=True)
                    ]
                    for (_, session_id), line in heapq.merge(*lines, key=lambda item: item[0][0]):
                        sides.of(root_of(session_id)).write_line(session_id, line)
                for part in parts:
                    part.out.unlink()
                progress(done, len(found))
            if not n_files:
                raise FileFormatError(
                    f"no session logs in any of {len(found)} homes, {found[0]} the first{why(intake)}",
                    hint=f"looked for {', '.join(name for names in _PLACES.values() for name in names)} in each",
                )
            if not n_sessions:
                raise no_session(intake)
            sessions = sides.publish()
    return reported(n_files, sessions, tally, intake)


def _same(home: str) -> str:
    """One text for one folder, however it was given, links included."""
    path = storage.local(home)
    return home.rstrip("/") if path is None else os.path.realpath(path)


@contextlib.contextmanager
def _scratch(out_dir: Path) -> Iterator[Path]:
    """A private folder beside the output, where there is room."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with alone_in(out_dir), scratch(out_dir, _SCRATCH) as made:
            yield made
    except OSError as error:
        raise SparkError(f"{out_dir} cannot be written: {error.strerror}", hint="choose another --out-dir") from error


# --- processes ----------------------------------------------------------------------------------------


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _dealt(
    homes: Sequence[str], trees: Sequence[str], n_cores: int, scratch: Path, out_dir: Path, options: ExtractOptions
) -> list[list[_Home]]:  # fmt: skip
    """What processes are given, by home: several parts of one that would keep a core busy when the others are done."""
    logs = [_logs(tree, options) for tree in trees]
    sizes = [sum(size for files in each.values() for _, size in files) for each in logs]
    total, made = max(1, sum(sizes)), []
    for i, (home, tree, size) in enumerate(zip(homes, trees, sizes, strict=True)):
        n = max(1, min(n_cores, round(n_cores * size / total)))
        whole = _Home(mark_of(home), tree, scratch, 0, n, size // n, out_dir, options)
        divided = replace(whole, logs=logs[i]) if n > 1 else whole
        made.append([replace(divided, part=k, out=scratch / f"{i}.{k}.jsonl") for k in range(n)])
    return made


def _all(work: Sequence[_Home], n_cores: int) -> Iterator[_Read]:
    """What is found in each, in their order; the largest are read first. Whatever happens, no process is left."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(len(work), n_cores), multiprocessing.get_context("spawn"), _begin)
    try:
        with _no_interrupts():
            largest = sorted(range(len(work)), key=lambda i: -work[i].size)
            found = {i: pool.submit(_read, work[i]) for i in largest}
        for i in range(len(work)):
            yield found.pop(i).result()
    except BrokenProcessPool as error:
        raise SparkError(
            "a process that reads logs was ended from outside", hint="is there enough memory for as many as cores?"
        ) from error
    finally:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ctrl-C waits; processes that are started here don't see one before they can say that it is not theirs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """Ctrl-C is the parent's, which ends us; and so does its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _read(home: _Home) -> _Read:
    """Read one home, or a part of it."""
    intake = Intake(home.options.redact, _nothing, home.out.parent)
    tally = Tally()
    ids: set[str] = set()
    with storage.tree(home.url, LOGS) as folder, SessionWriter(home.out) as writer:
        writer.open()
        logs = _logs(folder, home.options, intake if not home.part else None)
        if home.logs is not None:
            logs = home.logs
            intake.sizes = {path: size for files in logs.values() for path, size in files}
        n_files = sum(map(len, logs.values()))
        if n_files:
            check_logs(home.out_dir, {}, [path for files in logs.values() for path, _ in files], intake)
        groups = groups_of(logs, intake)
        mine = _part(groups, home.part, home.parts)
        places = []
        for place, group in enumerate(groups):
            for conversation in conversations_of(group, intake) if group.root_id in mine else ():
                session_id = unused(f"{home.mark}:{conversation.head.session_id}", ids)
                ids.add(session_id)
                places.append((place, session_id))
                writer.write(replace(conversation.head, session_id=session_id), counted(conversation, tally))
        writer.seal()
        publish([writer])
    return _Read(0 if home.part else n_files, places, tally, _counts_of(intake))


def _part(groups: Sequence[Group], part: int, parts: int) -> set[str]:
    """The roots that a part has: the largest first, each to the part that has least so far."""
    sizes: Counter[str] = Counter()
    for group in groups:
        sizes[group.root_id] += sum(log.size for log in group.files)
    loads, mine = [(0, i) for i in range(parts)], set()
    for root, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        load, least = heapq.heappop(loads)
        heapq.heappush(loads, (load + size, least))
        if least == part:
            mine.add(root)
    return mine


def _logs(home: str | Path, options: ExtractOptions, intake: Intake | None = None) -> _Logs:
    """The logs in a home, by family; none of one that lies elsewhere. intake: counts what is none."""
    folder = storage.local(home)
    logs: _Logs = {}
    counts = intake or Intake(options.redact, _nothing, Path())
    for family, names in _PLACES.items():
        if folder is not None and options.source in (family, "both"):
            places = [folder / name for name in names if _is_folder(folder / name, counts)]
            logs[family] = list_logs(places, FOLDERS[family], counts)
    return logs


def _is_folder(path: Path, intake: Intake) -> bool:
    try:
        return path.is_dir()
    except OSError:
        intake.skip("unreadable_home_file")
        return False


def _nothing(size: int) -> None:
    """A progress that nobody looks at."""


def _counts_of(intake: Intake) -> Intake:
    """The counts alone: the texts that it knows are many."""
    made = intake.quiet()
    made.advance = _nothing
    _join(made, intake)
    return made


def _join(intake: Intake, other: Intake) -> None:
    intake.skipped.update(other.skipped)
    intake.dropped.update(other.dropped)
    intake.redacted.update(other.redacted)
    intake.kinds.join(other.kinds)
