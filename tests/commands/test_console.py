"""Progress where there is no terminal, and the pace that it tells; terminals are in test_cli.py."""

from __future__ import annotations

import itertools
import re

import pytest

from spark import console


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is ten seconds further each time the console looks at it."""
    clock = itertools.count(0, 10)
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(clock)))


def test_a_pipe_gets_a_line_now_and_then(
    seconds: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_SAY_EVERY_S", 25.0)
    with console.progress_bars() as progress:
        for done in range(0, 5000, 500):
            progress("calibrating", done, 5000)
        progress("choosing cache slots", 1, 4)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert 3 <= len(lines) < 10
    middle = [line for line in lines[1:] if line.startswith("calibrating: ")]
    assert middle and all(re.fullmatch(r"calibrating: \d+%, \d+ tokens/s, \d:\d\d left", line) for line in middle)


def test_a_resumed_run_has_the_rate_of_what_it_did_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.time, "monotonic", lambda: 50.0)
    shown = console._Shown("calibrating", console.TaskID(0), start=90_000, start_s=40.0, done=91_000)
    assert shown.pace(100_000) == ("100 tokens/s", "1:30 left")


def test_no_rate_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for now_s, done in ((40.1, 5), (60.0, 0)):
        monkeypatch.setattr(console.time, "monotonic", lambda now_s=now_s: now_s)
        assert console._Shown("tokenizing", console.TaskID(0), 0, 40.0, done).pace(10) == ("", "")
    monkeypatch.setattr(console.time, "monotonic", lambda: 50.0)
    assert console._Shown("loading", console.TaskID(0), 0, 40.0, 50 << 20).pace(100 << 20) == ("5 MiB/s", "0:10 left")
    assert console._Shown("replaying policies", console.TaskID(0), 0, 40.0, 1).pace(4) == ("", "0:30 left")


def test_times_are_read_as_clocks_show_them() -> None:
    assert [console.clock(s) for s in (0.4, 59.6, 3599, 3661.2)] == ["0:00", "1:00", "59:59", "1:01:01"]


def test_what_others_wrote_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    console.table("of \x1b[31mred", ["a", "b"], [["\x1b]0;pwn\x07", "ä\u2028b"]])
    console.note("two\nlines\r\x1b[2J")
    captured = capsys.readouterr()
    assert not set(captured.out + captured.err) & {"\x1b", "\x07", "\r", "\u2028"}
    assert "\\x1b]0;pwn\\x07" in captured.out and "ä" in captured.out and captured.err.startswith("two\nlines\\r")
