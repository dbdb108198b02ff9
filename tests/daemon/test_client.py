from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.ground import protocol
from engine.ground.config import EngineConfig
from engine.ground.errors import (
    EXIT_DEADLINE,
    CancelledError,
    CapacityError,
    ContextOverflowError,
    DaemonError,
    DeadlineError,
    ModelFormatError,
    NumericalError,
    RequestError,
)
from spark.daemon import client
from spark.daemon.client import DaemonClient, Deadlines
from tests import fake_engine
from tests.fake_engine import SAID, SAY

HERE = Path(__file__).parents[1]  # the daemons for tests are there
SHORT = Deadlines(ready_s=20.0, silence_s=1.0, total_s=20.0, grace_s=0.5)
PATIENT = Deadlines(ready_s=60.0, silence_s=60.0, total_s=60.0, grace_s=5.0)
SLACK_S = 10.0  # what a busy machine may add to any deadline


def rogue(name: str) -> list[str]:
    return [sys.executable, "-S", str(HERE / "rogue_daemon.py"), name]


def fake(model: str = "model.gguf", *, step_s: float = 0.0, load_s: float = 0.0) -> list[str]:
    return [sys.executable, "-S", str(HERE / "fake_daemon.py"), str(step_s), str(load_s), model]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that only init has still to reap has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pid: int) -> bool:
    end_s = time.monotonic() + SLACK_S
    while not is_gone(pid) and time.monotonic() < end_s:
        time.sleep(0.02)
    return is_gone(pid)


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    """No child of this process may outlive a test, running or unreaped."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert left == []


class Stopwatch:
    def __init__(self) -> None:
        self.started_s = time.monotonic()

    @property
    def s(self) -> float:
        return time.monotonic() - self.started_s


# --- a daemon that behaves -------------------------------------------------------------------------


def test_every_operation(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    with DaemonClient(fake(), on_loading=lambda *figures: seen.append(figures)) as daemon:
        assert seen == [("compiling kernels", 3, 3), ("loading", 0, 100), ("loading", 100, 100)]
        assert daemon.hello.info["pid"] == daemon.pid and daemon.ready.info["ctx_tokens"] == 4096
        assert daemon.alive and daemon.ping() < SLACK_S

        events = list(daemon.generate([SAY, 7, 8, SAID], max_tokens=10))
        assert [e.tokens for e in events if isinstance(e, protocol.Tokens)] == [(7,), (8,)]
        assert isinstance(events[-1], protocol.Done) and events[-1].finish_reason == "stop"
        done = daemon.generate([SAY, 7, 8, SAID], max_tokens=5, stop_tokens=[]).result()
        assert done.usage.completion_tokens == 5 and done.finish_reason == "length"

        scored = daemon.score([3, 7, 14], generated=[False, False, True], logprobs=True).result()
        assert scored.nll == 2.0 and scored.logprobs == (-1.0, -2.0)

        assert daemon.stats()["served"] == 3
        path = tmp_path / "profile"
        assert daemon.profile("write", path) == {"path": str(path)} and path.read_text() == "served=3\n"
        assert daemon.profile("reset") == {"served": 0} and daemon.profile("read") == {"served": 0}
    assert not daemon.alive
    with pytest.raises(DaemonError, match="closed"):
        daemon.ping()
    daemon.close()  # twice is fine


@pytest.mark.slow
def test_errors_of_requests_keep_their_class() -> None:
    with DaemonClient(fake()) as daemon:
        with pytest.raises(NumericalError):
            daemon.generate([fake_engine.NAN], max_tokens=2).result()
        with pytest.raises(ContextOverflowError):
            daemon.score([1] * 5000).result()
        with pytest.raises(RequestError, match="'max_tokens'"):
            daemon.generate([1], max_tokens=0).result()
        with pytest.raises(RequestError, match="limit"):
            daemon.generate([2_000_000_000] * 4_000_000, max_tokens=1)
        assert daemon.generate([4], max_tokens=1).result().usage.completion_tokens == 1
    with pytest.raises(ModelFormatError, match="architecture") as caught:
        DaemonClient(fake("broken.gguf"))
    assert caught.value.hint == "download it again"


def test_a_request_of_a_megabyte() -> None:
    tokens = [1_000_000 + i for i in range(100_000)]
    with DaemonClient([*fake()[:-1], "--ctx-tokens=200000", "model.gguf"]) as daemon:
        (event,) = [e for e in daemon.generate(tokens, max_tokens=1) if isinstance(e, protocol.Tokens)]
        assert event.tokens == (tokens[-1],)


def test_cancelling_from_another_thread() -> None:
    with DaemonClient(fake(step_s=0.01)) as daemon:
        stream = daemon.generate([1], max_tokens=100_000, stop_tokens=[])
        assert isinstance(next(stream), protocol.Progress)
        threading.Timer(0.2, stream.cancel).start()
        with pytest.raises(CancelledError):
            for _ in stream:
                pass
        assert list(stream) == [] and daemon.stats()["queued"] == 0


def test_what_it_may_have_learned_from_is_counted_at_both_ends() -> None:
    with DaemonClient(fake(), deadlines=SHORT) as client:
        assert client.changes == 0
        stream = client.generate([1], max_tokens=3, stop_tokens=[])
        assert client.changes == 1
        list(stream)
        client.stats()
        assert client.changes == 2
        with client.generate([1], max_tokens=3, stop_tokens=[]):
            pass
        assert client.changes == 4


def test_leaving_early_cancels() -> None:
    with DaemonClient(fake(step_s=0.01)) as daemon:
        with daemon.generate([1], max_tokens=100_000, stop_tokens=[]) as stream:
            next(stream)
        with daemon.generate([2], max_tokens=100_000, stop_tokens=[]) as ended:
            ended.cancel()
            with pytest.raises(CancelledError):
                ended.result()
        assert daemon.stats()["queued"] == 0


def test_threads_share_a_daemon() -> None:
    answers: dict[int, list[int]] = {}
    with DaemonClient(fake()) as daemon:

        def ask(first: int) -> None:
            tokens = [SAY, *range(first, first + 20), SAID]
            stream = daemon.generate(tokens, max_tokens=30)
            answers[first] = [t for e in stream if isinstance(e, protocol.Tokens) for t in e.tokens]

        threads = [threading.Thread(target=ask, args=(10 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SLACK_S)
    assert answers == {10 * i: list(range(10 * i, 10 * i + 20)) for i in range(8)}


def test_two_clients_side_by_side() -> None:
    with DaemonClient(fake(step_s=0.002)) as one, DaemonClient(fake(step_s=0.002)) as two:
        streams = [d.generate([SAY, *range(n), SAID], max_tokens=99) for d, n in ((one, 30), (two, 20))]
        assert [stream.result().usage.completion_tokens for stream in streams] == [30, 20]
        one.close()
        assert two.alive and two.ping() < SLACK_S


# --- daemons that do not ---------------------------------------------------------------------------


def expect(error: type[Exception], deadline_s: float, action: Callable[[], object]) -> Exception:
    watch = Stopwatch()
    with pytest.raises(error) as caught:
        action()
    assert watch.s < deadline_s + SLACK_S, watch.s
    return caught.value


def test_one_that_is_never_ready() -> None:
    deadlines = Deadlines(ready_s=0.7, grace_s=0.5)
    for name in ("silent", "loads_for_ever"):
        watch = Stopwatch()
        error = expect(DeadlineError, 1.2, lambda name=name: DaemonClient(rogue(name), deadlines=deadlines))
        assert error.exit_code == EXIT_DEADLINE and "0.7 s" in error.message and watch.s > 0.7


def test_one_that_dies_at_once() -> None:
    error = expect(DaemonError, 0.0, lambda: DaemonClient(rogue("dies_at_once"), deadlines=SHORT))
    assert "exit status 3" in error.message and "first words\ncannot go on: r\xe9sum\xe9" in error.hint
    assert client.why(error) == f"{error.message}: cannot go on: r\xe9sum\xe9"
    assert client.why(DaemonError("it ended", hint="start it again")) == "it ended"


def test_one_that_does_not_exist() -> None:
    with pytest.raises(DaemonError, match="cannot be started"):
        DaemonClient([str(HERE / "no such program")])


def test_one_of_another_version() -> None:
    with pytest.raises(DaemonError, match="protocol 2"):
        DaemonClient(rogue("speaks_another_protocol"), deadlines=SHORT)


def test_one_that_falls_silent() -> None:
    with DaemonClient(rogue("silent_after_a_token"), deadlines=SHORT) as daemon:
        stream = daemon.generate([1], max_tokens=9)
        assert next(stream) == protocol.Tokens(1, (5,))
        error = expect(DeadlineError, 1.5, lambda: next(stream))
        assert error.exit_code == EXIT_DEADLINE and "1 s" in error.message
        assert "thinking very hard" in error.hint
        assert is_gone(daemon.pid) and list(stream) == []
        after = expect(DaemonError, 0.0, daemon.ping)
        assert "was ended" in after.message and "1 s" in after.message


def test_one_that_never_comes_to_an_end() -> None:
    deadlines = Deadlines(ready_s=20.0, silence_s=20.0, total_s=1.0, grace_s=0.5)
    with DaemonClient(rogue("talks_for_ever"), deadlines=deadlines) as daemon:
        stream = daemon.generate([1], max_tokens=9)
        error = expect(DeadlineError, 1.5, lambda: list(stream))
        assert error.exit_code == EXIT_DEADLINE and "request 1 was not done after 1 s" in error.message
        assert is_gone(daemon.pid)


def test_an_answer_may_be_read_late() -> None:
    """A slow reader is no reason to kill a daemon that has done its work."""
    deadlines = Deadlines(ready_s=20.0, silence_s=0.5, total_s=0.5, grace_s=5.0)
    with DaemonClient(fake(), deadlines=deadlines) as daemon:
        stream = daemon.generate([SAY, 7, 8, SAID], max_tokens=9)
        time.sleep(1.0)
        assert stream.result().usage.completion_tokens == 2
        assert daemon.ping() < SLACK_S


def test_silence_without_work_is_no_fault() -> None:
    deadlines = Deadlines(ready_s=20.0, silence_s=0.5, total_s=5.0, grace_s=5.0)
    with DaemonClient(fake(), deadlines=deadlines) as daemon:
        time.sleep(1.0)
        assert daemon.generate([7], max_tokens=9).result().usage.completion_tokens == 1


def test_a_slow_one_that_gives_signs_of_life_is_not_dead() -> None:
    deadlines = Deadlines(ready_s=20.0, silence_s=2.2, total_s=None, grace_s=5.0)
    with DaemonClient(fake(step_s=0.3), deadlines=deadlines) as daemon:
        # A step to read the prompt and eight quiet ones: silent for longer than 2.2 s but for Working.
        stream = daemon.generate([fake_engine.QUIET], max_tokens=1)
        watch = Stopwatch()
        next(stream)
        next(stream)
        assert watch.s > 2.3
        stream.close()


@pytest.mark.parametrize(
    ("name", "how"),
    [("dies_in_a_request", "exit status 9"), ("is_killed_in_a_request", r"signal 9 \(Killed\)")],
)
def test_one_that_dies_in_a_request(name: str, how: str) -> None:
    with DaemonClient(rogue(name), deadlines=PATIENT) as daemon:
        with pytest.raises(DaemonError, match=how) as caught:
            expect_within(lambda: daemon.generate([1], max_tokens=9).result())
        assert ("last words" in caught.value.hint) == (name == "dies_in_a_request")
        with pytest.raises(DaemonError, match=how):
            daemon.stats()


def expect_within(action: Callable[[], object]) -> None:
    watch = Stopwatch()
    try:
        action()
    finally:
        assert watch.s < SLACK_S


def test_one_that_crashes_tells_every_request() -> None:
    failures: list[str] = []
    with DaemonClient(fake(step_s=0.05), deadlines=PATIENT) as daemon:

        def ask() -> None:
            try:
                daemon.generate([SAY, *range(5), SAID], max_tokens=9).result()
            except DaemonError as error:
                failures.append(error.message)

        crash = daemon.generate([fake_engine.CRASH], max_tokens=1)
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        with pytest.raises(DaemonError, match="exit status 7"):
            crash.result()
        for thread in threads:
            thread.join(SLACK_S)
    assert len(failures) == 3 and all("exit status 7" in message for message in failures)


def test_some_garbage_is_tolerated() -> None:
    with DaemonClient(rogue("some_garbage"), deadlines=SHORT) as daemon:
        tokens, done = daemon.generate([1], max_tokens=9)
        assert tokens == protocol.Tokens(1, (5,)) and isinstance(done, protocol.Done)


@pytest.mark.parametrize("name", ["garbage_for_ever", "closes_stdout"])
def test_one_that_stops_speaking_the_protocol(name: str) -> None:
    with DaemonClient(rogue(name), deadlines=PATIENT) as daemon:
        stream = daemon.generate([1], max_tokens=9)
        error = expect(DaemonError, PATIENT.grace_s, stream.result)
        assert ("101 lines" if name == "garbage_for_ever" else "closed its output") in error.message
        assert is_gone(daemon.pid)


@pytest.mark.slow
def test_a_line_without_end_takes_bounded_memory() -> None:
    with DaemonClient(
        rogue("a_line_without_end"), deadlines=Deadlines(20.0, silence_s=1.0, total_s=3.0, grace_s=0.5)
    ) as daemon:
        before_bytes = psutil.Process().memory_info().rss
        expect(DeadlineError, 3.5, daemon.generate([1], max_tokens=9).result)
        assert psutil.Process().memory_info().rss < before_bytes + 4 * protocol.MAX_LINE_BYTES


def test_bytes_that_are_not_utf8() -> None:
    with DaemonClient(rogue("not_utf8"), deadlines=SHORT) as daemon:
        with pytest.raises(CapacityError, match="caf\ufffd is full"):
            daemon.generate([1], max_tokens=9).result()
        daemon.close()
        assert daemon.stderr_tail() == "\ufffd\ufffd caf\ufffd"


def test_a_flood_on_stderr_blocks_nobody() -> None:
    with DaemonClient(rogue("floods_stderr"), deadlines=PATIENT) as daemon:
        assert daemon.generate([1], max_tokens=9).result().usage.completion_tokens == 1
        daemon.close()
        assert daemon.stderr_tail().endswith("\nthe last line")


def test_one_that_reads_nothing() -> None:
    with DaemonClient(rogue("reads_nothing"), deadlines=SHORT) as daemon:
        error = expect(DeadlineError, 1.5, lambda: daemon.generate(range(200_000), max_tokens=9))
        assert "read" in error.message and is_gone(daemon.pid)


def test_one_that_ignores_every_request_to_end() -> None:
    daemon = DaemonClient(rogue("ignores_everything"), deadlines=SHORT)
    watch = Stopwatch()
    daemon.close()
    assert 0.9 < watch.s < 1.0 + SLACK_S and is_gone(daemon.pid)


def test_its_children_go_with_it() -> None:
    for name in ("has_a_child", "leaves_a_child_behind"):
        with DaemonClient(rogue(name), deadlines=SHORT) as daemon:
            child = daemon.ready.info["grandchild"]
            assert not is_gone(child)
            error = expect((DeadlineError, DaemonError), 1.5, daemon.generate([1], max_tokens=9).result)
            assert type(error) is (DeadlineError if name == "has_a_child" else DaemonError)
            assert wait_gone(child)


def test_closing_ends_its_children_too() -> None:
    with DaemonClient(rogue("has_a_child"), deadlines=SHORT) as daemon:
        child = daemon.ready.info["grandchild"]
    assert wait_gone(child)
    with DaemonClient(rogue("leaves_a_child_behind_when_idle"), deadlines=SHORT) as daemon:
        child = daemon.ready.info["grandchild"]
        assert wait_gone(daemon.pid)
        assert not daemon.alive
        assert wait_gone(child)


# --- the end of the client itself ------------------------------------------------------------------

OWNER = """
import sys, time
from spark.daemon.client import DaemonClient, Deadlines
daemon = DaemonClient(sys.argv[2:], deadlines=Deadlines(grace_s=1.0))
print(daemon.pid, flush=True)
if sys.argv[1] == "waits":
    for _ in daemon.generate([1], max_tokens=10**6, stop_tokens=[]):
        pass
elif sys.argv[1] == "with":
    with daemon:
        for _ in daemon.generate([1], max_tokens=10**6, stop_tokens=[]):
            pass
elif sys.argv[1] == "raises":
    raise ValueError
"""


@pytest.mark.parametrize(
    ("what", "end", "status"),
    [
        ("returns", None, 0),
        ("raises", None, 1),
        ("waits", signal.SIGINT, -signal.SIGINT),
        ("with", signal.SIGINT, -signal.SIGINT),
        ("waits", signal.SIGTERM, -signal.SIGTERM),
        ("waits", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_no_daemon_outlives_its_owner(what: str, end: signal.Signals | None, status: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, what, *fake(step_s=0.005)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(HERE.parent)},
    ) as owner:
        pid = int(owner.stdout.readline())
        if end is not None:
            time.sleep(0.2)
            assert not is_gone(pid)
            owner.send_signal(end)
        assert owner.wait(SLACK_S) == status
        assert wait_gone(pid)


def test_the_engine_that_runs_is_this_package_s(tmp_path: Path) -> None:
    """A folder named `engine` where the user happens to be must not be taken for ours."""
    impostor = tmp_path / "engine"
    impostor.mkdir()
    for name in ("__init__.py", "__main__.py"):
        (impostor / name).write_text("raise SystemExit(42)\n")
    command = client.engine_command(EngineConfig(model=Path("none.gguf")))
    done = subprocess.run([*command[:-2], "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 0 and "MODEL.gguf" in done.stdout
