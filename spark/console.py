"""What commands show: tables on stdout; progress, notes and errors on stderr.

A terminal gets bars and its own width. A pipe or a file gets no control characters and tables that are as wide as
their contents, and from long work a line now and then.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table

_SAY_EVERY_S = 30.0  # where there is no terminal
_GUESS_S = 0.5  # of too little time no rate is made
_WIDEST = 10_000
_NUMBER = re.compile(r"[+-]?[\d.,]+%?")

# What is counted under each label of progress; the others are steps of different lengths, which have no rate.
_UNITS = {
    "loading": ("MiB", 1 << 20),
    "reading logs": ("MiB", 1 << 20),
    "reading homes": ("homes", 1),
    "reading files": ("MiB", 1 << 20),
    "tokenizing": ("sessions", 1),
    "calibrating": ("tokens", 1),
    "recording routing": ("tokens", 1),
    "reading hidden states": ("tokens", 1),
}


class _Console(Console):
    """Rich's console, that leaves it to commands/ending.py what becomes of a pipe that nobody reads."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError: Rich would end the process without a word


def write(text: str) -> None:
    """Print a text to stdout at once, with no line end of its own."""
    sys.stdout.write(text)
    sys.stdout.flush()


def is_stdout(path: Path | None) -> bool:
    """Whether a path stands for stdout: then nothing else may be written there."""
    return path is not None and str(path) in ("-", "/dev/stdout")


def note(text: str) -> None:
    """A line for the reader, on stderr. A full disk does not end what is said of; a reader who has left does."""
    try:
        sys.stderr.write(plain(text) + "\n")
        sys.stderr.flush()
    except BrokenPipeError:
        raise
    except OSError:
        return


def plain(text: str) -> str:
    """Text as a terminal may have it: of others' files, what is no character to be read is spelled out."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


# --- progress -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Give `progress(label, done, total)`, shown on stderr.

    A terminal gets a bar with rate and time left, for the last label alone; elsewhere a line comes every 30 s.
    """
    live = sys.stderr.isatty()
    console = _Console(stderr=True, force_terminal=live, markup=False, highlight=False, emoji=False)
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(20), TextColumn("{task.percentage:3.0f}%"),
        TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[left]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not live) as bars:
        shown: _Shown | None = None
        said_s = time.monotonic()

        def progress(label: str, done: int, total: int) -> None:
            nonlocal shown, said_s
            if shown is None or shown.label != label or done < shown.done:
                if shown is not None:
                    bars.remove_task(shown.task)
                shown = _Shown(label, bars.add_task(label, rate="", left=""), done, time.monotonic(), done)
            shown.done = done
            rate, left = shown.pace(total)
            bars.update(shown.task, completed=done, total=total, rate=rate, left=left)
            if not live and time.monotonic() > said_s + _SAY_EVERY_S:
                said_s = time.monotonic()
                note(f"{label}: " + ", ".join(filter(None, [f"{done / max(1, total):.0%}", rate, left])))

        yield progress


@dataclass(slots=True)
class _Shown:
    """A label, its bar, and how far it was when it came up: a resumed run is not there from the start."""

    label: str
    task: TaskID
    start: int
    start_s: float
    done: int

    def pace(self, total: int) -> tuple[str, str]:
        """Rate and time left, as texts; empty while they would be guesses."""
        seconds = time.monotonic() - self.start_s
        rate = (self.done - self.start) / seconds if seconds > _GUESS_S else 0.0
        if not rate:
            return "", ""
        unit, size = _UNITS.get(self.label, ("", 1))
        return f"{rate / size:,.0f} {unit}/s" if unit else "", f"{clock((total - self.done) / rate)} left"


def clock(seconds: float) -> str:
    """A time as `1:40` or `2:03:20`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


# --- tables -------------------------------------------------------------------------------------------


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table to stdout: columns of numbers align right, what is too long for a terminal folds."""
    live = sys.stdout.isatty()
    console = _Console(
        force_terminal=live, markup=False, highlight=False, emoji=False, soft_wrap=True, width=None if live else _WIDEST
    )
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    made = Table(
        *(_column(name, [row[i] for row in cells]) for i, name in enumerate(columns)),
        box=box.SIMPLE_HEAD, show_header=any(columns), show_edge=False, pad_edge=False,
    )  # fmt: skip
    for row in cells:
        made.add_row(*row)
    console.print(plain(title), style="bold")
    console.print(made, soft_wrap=False)
    console.print()


def _column(name: str, cells: Sequence[str]) -> Column:
    words = [cell for cell in cells if cell]
    numbers = bool(words) and all(_NUMBER.fullmatch(word) for word in words)
    return Column(name, justify="right" if numbers else "left", overflow="fold")
