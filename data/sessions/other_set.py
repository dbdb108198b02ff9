"""The other set: sessions on subjects that the samples do not have, to judge policies by and for nothing else."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from claude_log import ClaudeLog
from codex_log import CodexLog
from homes import write
from plays import TEXTS, read_play

START = datetime(2026, 4, 1, 8, 30)
PEOPLE = ("ana", "kim", "noor", "per")
# Sessions that leave their subject and come back: a play, its first scene before the other play, the rest after it.
SHIFTS = {"go_service": "dockerfile_nginx", "beekeeping": "job_application", "rust_crate": "perl_oneliner"}


def make_other(out: Path) -> None:
    """A root session a play, but for those that are visited from another; every second one of Codex."""
    plays = {path.stem: read_play(path) for path in sorted((TEXTS / "other").glob("*.txt"))}
    for number, name in enumerate(n for n in plays if n not in SHIFTS.values()):
        when, folder = START + timedelta(days=number), f"/home/{PEOPLE[number % len(PEOPLE)]}/{name.replace('_', '-')}"
        turns = plays[name].turns()
        if name in SHIFTS:
            turns = plays[name].turns(1) + plays[SHIFTS[name]].turns() + plays[name].turns(2)
        if number % 2:
            thread = CodexLog(f"other-{name}", when, "current", folder)
            thread.head()
            thread.play(turns)
            write(out / "codex" / f"sessions/{when:%Y/%m/%d}" / thread.file_name, thread.lines)
        else:
            log = ClaudeLog(f"other-{name}", when, "2.1.90", cwd=folder)
            log.play(turns)
            write(out / "claude" / "projects" / folder.replace("/", "-") / f"{log.session}.jsonl", log.records)
