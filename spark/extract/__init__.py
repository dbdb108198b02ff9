"""Extraction of sessions from coding agents' logs: Claude Code and Codex, old and new formats.

Both formats are unstable, so everything is optional: what is not understood is counted and passed over.
Logs are read one root session after the other, and a session's text waits in a spool, so memory does
not grow with the size of the logs (nor with that of a single one).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from engine.ground.errors import FileFormatError, SparkError, UsageError
from engine.ground.files import alone
from spark import storage
from spark.extract import claude, codex
from spark.extract.intake import Intake
from spark.extract.messages import Outgoing, messages
from spark.extract.report import ESTIMATE, Report, Tally
from spark.extract.roots import Group, group_claude, group_codex, list_logs
from spark.speech.sessions import Message, SessionWriter, publish, root_of, split_rank

__all__ = ["ExtractOptions", "Report", "extract"]


@dataclass(frozen=True, slots=True)
class ExtractOptions:
    """What to extract and where to.

    out_dir: gets train.jsonl and test.jsonl; made if it does not exist. Or a URL (spark/storage.py).
    homes: home folders of users, instead of the two below: each is read by itself, several at a time (homes.py).
    claude_dir, codex_dir: the programs' home folders (or any folder with such logs); None takes
        CLAUDE_CONFIG_DIR or ~/.claude, with ~/.config/claude, and CODEX_HOME or ~/.codex.
    test_frac: share of the root sessions that goes to test.jsonl, 0 to 1.
    redact: replace secrets.
    """

    out_dir: str | Path
    source: Literal["claude", "codex", "both"] = "both"
    claude_dir: Path | None = None
    codex_dir: Path | None = None
    test_frac: float = 0.2
    redact: bool = True
    homes: tuple[str, ...] = ()


def extract(options: ExtractOptions, progress: Callable[[int, int], None]) -> Report:
    """Read the logs and write train.jsonl and test.jsonl, both whole or neither.

    progress: called with bytes read and bytes in all. A fraction between 0 and 1 leaves a root session on each side if
    there are two. Raises what `storage.folder` does for a URL, UsageError for a fraction out of range and for an output
    that is one of the logs, FileFormatError where there are no logs or no sessions in them, SparkError when the output
    cannot be written; files that were there are left as they were.
    """
    if not 0 <= options.test_frac <= 1:
        raise UsageError(f"the test fraction is {options.test_frac}, expected 0 to 1")
    if options.homes:
        from spark.extract import homes

        return homes.extract(options, progress)
    with storage.folder(options.out_dir, FILES) as out_dir:
        return _extract(options, out_dir, progress)


def _extract(options: ExtractOptions, out_dir: Path, progress: Callable[[int, int], None]) -> Report:
    total = done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, total), total)

    intake = Intake(redact=options.redact, advance=advance, spool_dir=out_dir)
    tally = Tally()
    homes = _homes(options)
    logs = {family: list_logs(folders, FOLDERS[family], intake) for family, folders in homes.items()}
    check_logs(out_dir, homes, [path for files in logs.values() for path, _ in files], intake)
    total = sum(size for files in logs.values() for _, size in files)
    progress(0, total)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with alone_in(out_dir):
            sessions = _write(options, out_dir, groups_of(logs, intake), tally, intake)
    except OSError as error:  # of the folder or the spool; a log that cannot be read is counted
        message = f"{out_dir} cannot be written: {error.strerror}"
        raise SparkError(message, hint="choose another --out-dir") from error
    return reported(sum(map(len, logs.values())), sessions, tally, intake)


def reported(n_files: int, sessions: dict[str, int], tally: Tally, intake: Intake) -> Report:
    """What a run counted, as a report."""
    return Report(
        files=n_files,
        sessions=sessions,
        messages=tally.messages,
        tokens=dict(sorted(tally.tokens.items())),
        prompt_tokens=tally.prompt_percentiles(),
        context_tokens=tally.context_percentiles(),
        token_counter=ESTIMATE,
        skipped_lines=dict(sorted(intake.skipped.items())),
        dropped_blocks=dict(sorted(intake.dropped.items())),
        dropped_content=intake.kinds.largest(),
        redacted=dict(sorted(intake.redacted.items())),
    )


FILES = ("train.jsonl", "test.jsonl")
_NAME_FOLDERS = "name the folders with --claude-dir and --codex-dir"
FOLDERS = {"claude": ("projects",), "codex": ("sessions", "archived_sessions")}


def _homes(options: ExtractOptions) -> dict[str, list[Path]]:
    """The folders to search, by family; a folder that was named must exist, one of all must."""
    homes: dict[str, list[Path]] = {}
    tried: list[Path] = []
    for family, given, defaults in (
        ("claude", options.claude_dir, _default_claude_dirs),
        ("codex", options.codex_dir, _default_codex_dirs),
    ):
        if options.source not in (family, "both"):
            continue
        if given is not None and not given.is_dir():
            raise FileFormatError(f"{given} is no folder", hint=f"give --{family}-dir the program's home folder")
        candidates = [given] if given is not None else defaults()
        homes[family] = [path for path in candidates if path.is_dir()]
        tried += candidates
    if not any(homes.values()):
        raise FileFormatError(
            f"no session logs: looked for {', '.join(map(str, tried))}",
            hint=_NAME_FOLDERS,
        )
    return homes


def alone_in(out_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Let no other extraction write to a folder within the block; UsageError where one does."""
    return alone(out_dir / ".extract-sessions.lock", f"another extraction writes to {out_dir}")


def check_logs(out_dir: Path, homes: dict[str, list[Path]], logs: list[Path], intake: Intake) -> None:
    """Refuse to write nothing over an earlier extraction, and to write over a log."""
    if not logs:
        looked_in = ", ".join(str(path) for folders in homes.values() for path in folders)
        raise FileFormatError(f"no session logs (*.jsonl) in {looked_in}{why(intake)}", hint=_NAME_FOLDERS)
    for path in (out_dir / name for name in FILES):
        if path.exists() and any(path.samefile(log) for log in logs):
            raise UsageError(f"--out-dir {out_dir}: {path} is one of the logs to read", hint="choose another --out-dir")


def _default_claude_dirs() -> list[Path]:
    named = os.environ.get("CLAUDE_CONFIG_DIR")
    first = Path(named).expanduser() if named else Path.home() / ".claude"
    return list(dict.fromkeys([first, Path.home() / ".config" / "claude"]))


def _default_codex_dirs() -> list[Path]:
    named = os.environ.get("CODEX_HOME")
    return [Path(named).expanduser() if named else Path.home() / ".codex"]


def groups_of(logs: dict[str, list[tuple[Path, int]]], intake: Intake) -> list[Group]:
    """The logs by root session, in an order that depends on nothing but them."""
    groups: list[Group] = []
    if "claude" in logs:
        groups += group_claude(logs["claude"], intake)
    if "codex" in logs:
        groups += group_codex(logs["codex"], intake)
    return groups


def conversations_of(group: Group, intake: Intake) -> Iterator[Outgoing]:
    """Every conversation of a root session."""
    return (claude.read_group if group.source == "claude" else codex.read_group)(group, intake)


def _write(
    options: ExtractOptions, out_dir: Path, groups: Sequence[Group], tally: Tally, intake: Intake
) -> dict[str, int]:
    """Write the conversations of groups to the two files, split by root session; returns how many went to each."""
    with Sides(out_dir, options.test_frac) as sides:
        used: set[str] = set()
        for conversation in chain.from_iterable(conversations_of(group, intake) for group in groups):
            head = replace(conversation.head, session_id=unused(conversation.head.session_id, used))
            used.add(head.session_id)
            sides.of(head.root_id).write(head, counted(conversation, tally))
        if not used:
            raise no_session(intake)
        return sides.publish()


class Sides:
    """Both files under construction, which appear together; a context manager.

    A root session is on one side, with all that grew from it.
    """

    def __init__(self, out_dir: Path, test_frac: float) -> None:
        self._out_dir, self._test_frac = out_dir, test_frac
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._train, self._test = (self._writer(name, stack) for name in FILES)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def of(self, root_id: str) -> SessionWriter:
        """The file that a root's sessions go to."""
        return self._test if split_rank(root_id) < self._test_frac else self._train

    def publish(self) -> dict[str, int]:
        """Give both files their names; returns how many sessions are in each."""
        train, test = self._train, self._test
        train.seal()
        test.seal()
        roots = sorted({root_of(each) for side in (train, test) for each in side.session_ids}, key=split_rank)
        if 0 < self._test_frac < 1 and len(roots) > 1 and not (train.session_ids and test.session_ids):
            # So few sessions that one side got none: the root nearest to the limit changes sides.
            full, test_roots = (test, roots[:-1]) if test.session_ids else (train, roots[:1])
            train, test = (self._writer(name, self._stack) for name in FILES)
            for session_id, line in full.lines():
                (test if root_of(session_id) in test_roots else train).write_line(session_id, line)
            train.seal()
            test.seal()
        publish([train, test])
        return {"train": len(train.session_ids), "test": len(test.session_ids)}

    def _writer(self, name: str, stack: ExitStack) -> SessionWriter:
        made = stack.enter_context(SessionWriter(self._out_dir / name))
        made.open()
        return made


def no_session(intake: Intake) -> FileFormatError:
    """What to say of logs without a session."""
    return FileFormatError(f"the session logs hold no session{why(intake)}", hint=_NAME_FOLDERS)


def why(intake: Intake) -> str:
    """What was skipped, to be said behind the failure that nothing was found; empty if nothing was."""
    found = ", ".join(f"{name} {count}" for name, count in sorted(intake.skipped.items()))
    return found and f" (skipped: {found})"


def counted(conversation: Outgoing, tally: Tally) -> Iterator[Message]:
    """The messages of a conversation, which are counted as they go by."""
    tally.begin_session()
    for message, typed in messages(conversation.parts):
        tally.add(message, typed)
        yield message


def unused(session_id: str, used: set[str]) -> str:
    """The id, or one beside it of the same root: a session's log may lie in two places, with different ends."""
    root, number, candidate = root_of(session_id), 2, session_id
    while candidate in used:
        candidate = f"{root}/{number}{session_id[len(root) :]}"
        number += 1
    return candidate
