from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from spark.daemon.process import ChildProcess

MUCH = b"x" * (3 << 20) + b"\n"  # more than any pipe holds


@pytest.fixture
def idle() -> Iterator[ChildProcess]:
    """A child that reads nothing."""
    child = ChildProcess([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    yield child
    child.end(5.0)


def test_what_is_begun_is_written_whole_before_anything_else() -> None:
    child = ChildProcess(["cat"])
    lines: list[bytes | None] = []
    try:
        left = child.begin_write(MUCH)
        assert left is not None and 0 < len(left) < len(MUCH)
        assert child.begin_write(b"meanwhile\n") is None
        reading = threading.Thread(target=lambda: lines.extend(child.lines()))
        behind = threading.Thread(target=child.write, args=(b"behind\n", 60.0))
        for thread in (reading, behind):
            thread.start()
        child.end_write(left, 60.0)
        behind.join(60.0)
        assert child.begin_write(b"at once\n") == b""
        child.close_stdin(60.0)
        reading.join(60.0)
    finally:
        child.end(5.0)
    assert lines == [MUCH[:-1], b"behind", b"at once"]


def test_what_is_not_taken_in_time_lets_others_write(idle: ChildProcess) -> None:
    left = idle.begin_write(MUCH)
    assert left
    with pytest.raises(TimeoutError):
        idle.end_write(left, 0.0)
    assert idle.begin_write(b"x") is None  # nothing is taken, and nobody writes
    with pytest.raises(TimeoutError):
        idle.write(b"x", 0.0)


def test_nothing_is_begun_behind_the_end(idle: ChildProcess) -> None:
    idle.close_stdin(5.0)
    for _ in range(2):  # which nobody is kept from finding out
        with pytest.raises(BrokenPipeError):
            idle.begin_write(b"x")
