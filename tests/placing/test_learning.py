"""What daemons of one profile learn: nothing is lost, nothing counted twice, whoever writes when."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats import profile as profiles
from engine.formats.profile import WINDOW_TOKENS, Choice, Profile
from engine.ground.errors import SparkError
from engine.placing import learning
from engine.placing.learning import Learning

ID, OTHER = "1f" * 32, "2e" * 32
USED, N_EXPERT = 2, 4
CHOICE = Choice(40.0, 0.5, 6, 8.5, 8.0, 9.0, 9.5, 8.75, 4000, 12)
EMPTY = Profile(np.zeros((2, N_EXPERT), np.int64), USED, ID, count="generated")


def counts(*row: int) -> np.ndarray:
    return np.array([row, row[::-1]], np.int64)


def read(path: Path) -> list[int]:
    return profiles.load(path, model_id=ID)[0].counts[0].tolist()


class Daemon:
    """One that has counted something; `started` as the engine starts one."""

    def __init__(self, path: Path) -> None:
        known = path.exists()
        self.learning = Learning(profiles.load(path)[0] if known else EMPTY, path if known else None)
        self.counts = np.zeros_like(EMPTY.counts)

    def count(self, more: np.ndarray) -> None:
        self.counts = self.counts + more

    def write(self, path: Path) -> tuple[str, ...]:
        return self.learning.write(self.counts, path, ID)[1]


# A step: who does it (None: one more daemon, which starts, counts, writes and ends), what is counted, whether to write.
STEPS = st.lists(
    st.tuples(st.sampled_from([0, 1, None]), st.lists(st.integers(0, 30), min_size=4, max_size=4), st.booleans()),
    max_size=12,
)


@settings(deadline=None)
@given(STEPS, st.booleans())
def test_two_writers_write_what_one_that_saw_both_would(
    tmp_path_factory: pytest.TempPathFactory, steps: list, exists: bool
) -> None:
    path = tmp_path_factory.mktemp("profile") / "p.csv"
    whole = EMPTY.counts
    if exists:
        whole = counts(5, 0, 100, 1)
        profiles.save(replace(EMPTY, counts=whole, tokens=53), path)
    daemons = [Daemon(path), Daemon(path)]
    for who, row, writes in [*steps, (0, [0] * 4, True), (1, [0] * 4, True)]:
        whole = whole + counts(*row)
        daemon = Daemon(path) if who is None else daemons[who]
        daemon.count(counts(*row))
        if writes or who is None:
            assert daemon.write(path) == ()
            # What the daemon goes by is what it wrote.
            assert daemon.learning.learned(daemon.counts).counts.tolist() == profiles.load(path)[0].counts.tolist()
    assert profiles.load(path)[0].counts.tolist() == whole.tolist()
    tokens = profiles.load(path)[0].tokens
    assert abs(tokens - whole[0].sum() / USED) <= len(steps) + 2  # each merge rounds down


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, WINDOW_TOKENS // 3), st.booleans()), max_size=10),
    st.integers(0, 2 * WINDOW_TOKENS),
)
def test_what_is_full_fades_and_stays_full(
    tmp_path_factory: pytest.TempPathFactory, steps: list, start: int
) -> None:
    """Beyond the window, who wrote when matters to the counts, and still nobody's are lost as a whole."""
    path = tmp_path_factory.mktemp("profile") / "p.csv"
    profiles.save(replace(EMPTY, counts=counts(start, start, 0, 0)), path)
    daemons, total = [Daemon(path), Daemon(path)], start
    for who, n, writes in [*steps, (0, 0, True), (1, 0, True)]:
        total += n
        daemons[who].count(counts(n, 0, 0, n) if who else counts(0, n, n, 0))
        if writes:
            daemons[who].write(path)
    bound = max(start, WINDOW_TOKENS)
    found = profiles.load(path)[0].counts
    least = min(total, bound // 2) * USED - len(steps) - 2  # half of it is the most that one merge adds
    assert (found.sum(axis=1) <= bound * USED).all() and (found.sum(axis=1) >= least).all()


def test_one_writer_writes_what_it_would_write_at_its_end_alone(tmp_path: Path) -> None:
    """However often it writes, its session is merged in once."""
    start = replace(EMPTY, counts=counts(WINDOW_TOKENS, WINDOW_TOKENS, 0, 0))
    often, once = tmp_path / "often.csv", tmp_path / "once.csv"
    for path in (often, once):
        profiles.save(start, path)
    daemons = Daemon(often), Daemon(once)
    for _ in range(20):
        for daemon in daemons:
            daemon.count(counts(0, 0, 3000, 3000))
        daemons[0].write(often)
    daemons[1].write(once)
    assert read(often) == read(once)


def test_a_calibration_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    profiles.save(replace(EMPTY, counts=counts(9, 9, 9, 9)), path)
    daemon = Daemon(path)
    daemon.count(counts(1, 0, 0, 1))
    daemon.write(path)
    profiles.save(replace(EMPTY, counts=counts(100, 0, 0, 0), sessions=7, choices=(CHOICE,)), path)
    daemon.count(counts(0, 2, 0, 0))
    daemon.write(path)
    made = profiles.load(path)[0]
    assert made.counts[0].tolist() == [100, 2, 0, 0] and made.sessions == 7 and made.choices == (CHOICE,)


def test_a_file_that_is_gone_or_no_profile_of_the_model_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    profiles.save(replace(EMPTY, counts=counts(9, 0, 0, 0)), path)
    daemon = Daemon(path)
    daemon.count(counts(1, 0, 0, 1))
    path.unlink()
    assert daemon.write(path) == () and read(path) == [10, 0, 0, 1]
    wider = Profile(np.ones((2, 5), np.int64), USED, ID)
    others = [profiles.format(other).encode() for other in (replace(EMPTY, model_id=OTHER), wider)]
    for content in (b"", b"\xff", *others):
        path.write_bytes(content)
        (warning,) = daemon.write(path)
        assert str(path) in warning and "is replaced" in warning and read(path) == [10, 0, 0, 1]


def test_a_copy_changes_nothing(tmp_path: Path) -> None:
    path, copy = tmp_path / "p.csv", tmp_path / "copy.csv"
    profiles.save(replace(EMPTY, counts=counts(9, 0, 0, 0)), path)
    profiles.save(replace(EMPTY, counts=counts(0, 0, 0, 50)), copy)
    daemon = Daemon(path)
    daemon.count(counts(1, 0, 0, 1))
    assert daemon.write(copy) == () and read(copy) == [10, 0, 0, 1]
    assert daemon.write(path) == () and read(path) == [10, 0, 0, 1]


def test_a_write_that_failed_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.csv"
    first, second = Daemon(path), Daemon(path)
    first.count(counts(1, 0, 0, 0))
    second.count(counts(0, 1, 0, 0))
    second.write(path)

    def full(*arguments: object) -> None:
        raise SparkError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(learning.profiles, "save", full)
        with pytest.raises(SparkError):
            first.write(path)
    first.count(counts(0, 0, 1, 0))
    first.write(path)
    assert read(path) == [1, 1, 1, 0]


def test_what_is_reset_is_counted_again_from_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    daemon, other = Daemon(path), Daemon(path)
    daemon.count(counts(3, 0, 0, 0))
    daemon.learning.reset()
    daemon.counts = counts(0, 0, 0, 0)
    other.count(counts(0, 1, 0, 0))
    other.write(path)
    daemon.count(counts(1, 0, 0, 0))
    daemon.write(path)
    assert read(path) == [1, 1, 0, 0]


def _learn(path: Path, row: list[int], n: int) -> None:
    daemon = Daemon(path)
    for _ in range(n):
        daemon.count(counts(*row))
        daemon.write(path)


@pytest.mark.slow
def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    context = multiprocessing.get_context("spawn")
    rows = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    processes = [context.Process(target=_learn, args=(path, row, 40)) for row in rows]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert read(path) == [40, 40, 40, 0]
    assert [found.name for found in tmp_path.iterdir()] == ["p.csv"]  # no lock is left lying about


def test_a_folder_that_somebody_else_has_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.csv"
    daemon = Daemon(path)
    daemon.count(counts(1, 0, 0, 0))
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        letting_go = threading.Timer(0.3, fcntl.flock, (descriptor, fcntl.LOCK_UN))
        letting_go.start()
        began_s = time.monotonic()
        daemon.write(path)
        assert time.monotonic() - began_s >= 0.25
        letting_go.join()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        monkeypatch.setattr(learning, "_LOCK_S", 0.1)  # for ever is too long
        daemon.count(counts(1, 0, 0, 0))
        daemon.write(path)
    finally:
        os.close(descriptor)
    assert read(path) == [2, 0, 0, 0]
