"""The logs of many users: each home folder is read by itself, several at a time, and ids stay apart.

A process reads a home, with its own spool and its own counts, and leaves its sessions in a file; they are then dealt to
the two sides by whole root, in the order of the homes. Every id begins with a mark of its home, so two users who have a
session of one id (a copied folder) have two, and the names of users are in none.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import threading
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
    check_logs,
    conversations_of,
    counted,
    no_session,
    reported,
    unused,
)
from spark.extract.intake import Intake
from spark.extract.report import Tally
from spark.extract.roots import list_logs
from spark.speech.sessions import SessionWriter, root_of

_PLACES = {"claude": (".claude", ".config/claude"), "codex": (".codex",)}
_SCRATCH = ".homes-"
_EXPECTED = "expected home folders of users"


@dataclass(frozen=True, slots=True)
class _Home:
    """What a process is given. mark: what its ids begin with; url: where it lies; out: the file for its sessions."""

    mark: str
    url: str
    out: Path
    out_dir: Path
    options: ExtractOptions
    count_tokens: Callable[[str], int]


@dataclass(frozen=True, slots=True)
class _Read:
    """What a process found. ids: of the sessions in the file, in order."""

    n_files: int
    ids: list[str]
    tally: Tally
    intake: Intake


def mark_of(home: str) -> str:
    """What the ids of a home's sessions begin with: 8 hex digits of where it lies, so it stays when others come."""
    return f"u{hashlib.sha256(home.encode(errors='surrogateescape')).hexdigest()[:8]}"


def extract(
    options: ExtractOptions, progress: Callable[[int, int], None], count_tokens: Callable[[str], int]
) -> Report:
    """Read the logs of all homes and write train.jsonl and test.jsonl, both whole or neither.

    progress: called with the homes that are read, and their number. Raises what `spark.extract.extract` does;
    UsageError also where a family's folder is named, too; FileFormatError for a home that is no folder.
    """
    if options.claude_dir is not None or options.codex_dir is not None:
        raise UsageError("--home reads each home's own folders, --claude-dir and --codex-dir name others")
    found = list(dict.fromkeys(_same(each) for given in options.homes for each in storage.folders(given)))
    if not found:
        raise FileFormatError(f"--home {' '.join(options.homes)}: no such folders", hint=_EXPECTED)
    for each in found:
        if (path := storage.local(each)) is not None and not path.is_dir():
            raise FileFormatError(f"--home {each} is no folder", hint=_EXPECTED)
    with storage.folder(options.out_dir, FILES) as out_dir, _scratch(out_dir) as folder:
        work = [
            _Home(mark_of(home), home, folder / f"{i}.jsonl", out_dir, options, count_tokens)
            for i, home in enumerate(found)
        ]
        tally, intake, n_files = Tally(count_tokens), Intake(options.redact, lambda _: None, out_dir), 0
        with Sides(out_dir, options.test_frac) as sides:
            progress(0, len(work))
            n_sessions = 0
            for done, (home, read) in enumerate(zip(work, _all(work), strict=True), start=1):
                n_files += read.n_files
                n_sessions += len(read.ids)
                tally.join(read.tally)
                _join(intake, read.intake)
                with home.out.open("rb") as lines:
                    for session_id, line in zip(read.ids, lines, strict=True):
                        sides.of(root_of(session_id)).write_line(session_id, line)
                home.out.unlink()
                progress(done, len(work))
            if not n_files:
                raise FileFormatError(
                    f"no session logs in any of {len(work)} homes, {found[0]} the first",
                    hint=f"looked for {', '.join(name for names in _PLACES.values() for name in names)} in each",
                )
            if not n_sessions:
                raise no_session(intake)
            sessions = sides.publish()
    return reported(n_files, sessions, tally, intake, count_tokens)


def _same(home: str) -> str:
    """One text for one folder, however it was given."""
    path = storage.local(home)
    return home.rstrip("/") if path is None else str(path.absolute())


@contextlib.contextmanager
def _scratch(out_dir: Path) -> Iterator[Path]:
    """A private folder beside the output, where there is room."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with scratch(out_dir, _SCRATCH) as made:
            yield made
    except OSError as error:
        raise SparkError(f"{out_dir} cannot be written: {error.strerror}", hint="choose another --out-dir") from error


# --- processes ----------------------------------------------------------------------------------------


def _all(work: Sequence[_Home]) -> Iterator[_Read]:
    """What is found in each home, in their order; whatever happens, no process is left."""
    n = min(len(work), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(n, multiprocessing.get_context("spawn"), _begin)
    try:
        with _no_interrupts():
            found = pool.map(_read, work)
        yield from found
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
    """Read one home."""
    options = home.options
    intake = Intake(options.redact, _nothing, home.out.parent)
    tally = Tally(home.count_tokens)
    ids: set[str] = set()
    with storage.tree(home.url, ".jsonl") as folder, SessionWriter(home.out) as writer:
        writer.open()
        logs: dict[str, list[tuple[Path, int]]] = {}
        for family, names in _PLACES.items():
            if options.source in (family, "both"):
                places = [folder / name for name in names if _is_folder(folder / name, intake)]
                logs[family] = list_logs(places, FOLDERS[family], intake)
        n_files = sum(map(len, logs.values()))
        if n_files:
            check_logs(home.out_dir, {}, [path for files in logs.values() for path, _ in files])
        for conversation in conversations_of(logs, intake):
            session_id = unused(f"{home.mark}:{conversation.head.session_id}", ids)
            ids.add(session_id)
            writer.write(replace(conversation.head, session_id=session_id), counted(conversation, tally))
        writer.seal()
        writer.publish()
        found = list(writer.session_ids)
    return _Read(n_files, found, tally, _counts_of(intake))


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
