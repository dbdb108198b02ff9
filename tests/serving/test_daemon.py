from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest

from engine import daemon
from engine.daemon import MAX_WAITING
from engine.ground import protocol
from engine.ground.errors import OverloadedError, from_code
from tests import fake_engine
from tests.fake_engine import END, SAID, SAY

FAKE = Path(__file__).parents[1].joinpath("fake_daemon.py")
PATIENCE_S = 30.0


class RawDaemon:
    """A daemon process, spoken to in bytes; every read has a deadline."""

    def __init__(self, arguments: Sequence[str] = ("model.gguf",), *, step_s: float = 0.0, load_s: float = 0.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(FAKE), str(step_s), str(load_s), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self.lines: SimpleQueue[bytes] = SimpleQueue()
        self.stderr = b""
        self.threads = [threading.Thread(target=f, daemon=True) for f in (self._read, self._drain)]
        for thread in self.threads:
            thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(b"")

    def _drain(self) -> None:
        for line in self.process.stderr:
            self.stderr += line

    def write(self, *messages: bytes | dict) -> None:
        for message in messages:
            line = message if isinstance(message, bytes) else json.dumps(message).encode()
            self.process.stdin.write(line + b"\n")

    def next(self) -> protocol.Event | None:
        """The next event, None at the end of output; each line must be of the protocol."""
        line = self.lines.get(timeout=PATIENCE_S)
        return protocol.parse_event(line) if line else None

    def until(self, *kinds: type) -> list[protocol.Event]:
        events = []
        while not (events and isinstance(events[-1], kinds)):
            event = self.next()
            assert event is not None, (events, self.stderr)
            events.append(event)
        return events

    def rest(self) -> list[protocol.Event]:
        return list(iter(self.next, None))

    def status(self) -> int:
        status = self.process.wait(PATIENCE_S)
        for thread in self.threads:
            thread.join(PATIENCE_S)
        return status


@contextlib.contextmanager
def running(*arguments: str, step_s: float = 0.0, load_s: float = 0.0) -> Iterator[RawDaemon]:
    daemon = RawDaemon(arguments or ("model.gguf",), step_s=step_s, load_s=load_s)
    try:
        yield daemon
    finally:
        daemon.process.kill()
        daemon.status()
        for pipe in (daemon.process.stdin, daemon.process.stdout, daemon.process.stderr):
            pipe.close()


def generate(request_id: int, tokens: Sequence[int], max_tokens: int = 50, **more: object) -> dict:
    return {"id": request_id, "op": "generate", "tokens": list(tokens), "max_tokens": max_tokens, **more}


def said(events: Sequence[protocol.Event], request_id: int) -> list[int]:
    return [t for e in events if isinstance(e, protocol.Tokens) and e.id == request_id for t in e.tokens]


def test_a_life() -> None:
    """Hello, loading, ready, requests of every kind, the end of input."""
    with running("--threads=3", "--ctx-tokens=99", "--", "model.gguf") as daemon:
        first = daemon.until(protocol.Ready)
        assert isinstance(first[0], protocol.Hello)
        assert first[0].protocol == protocol.PROTOCOL and first[0].info["model"] == "model.gguf"
        assert first[1:-1] == [
            protocol.Loading("compiling kernels", 3, 3),
            protocol.Loading("loading", 0, 100),
            protocol.Loading("loading", 100, 100),
        ]
        assert first[-1] == protocol.Ready({"architecture": "fake", "ctx_tokens": 99, "threads": 3, "draft": "auto"})

        daemon.write(generate(5, [SAY, 10, 11, 12, SAID]))
        events = daemon.until(protocol.Done)
        assert said(events, 5) == [10, 11, 12]
        assert events[-1] == protocol.Done(
            5, protocol.Usage(5, 3), protocol.Timing(0.25, 0.5), {"hits": 3, "misses": 1}, "stop"
        )
        daemon.write(generate(6, [SAY, 10, 11, SAID], max_tokens=4, stop_tokens=[]))
        events = daemon.until(protocol.Done)
        assert said(events, 6) == [10, 11, END, END] and events[-1].finish_reason == "length"

        score = {"id": 8, "op": "score", "tokens": [3, 7, 14], "generated": [False, False, True]}
        daemon.write(score | {"logprobs": True})
        done = daemon.until(protocol.Done)[-1]
        assert done.nll == 2.0 and done.logprobs == (-1.0, -2.0)

        daemon.write({"id": 9, "op": "stats"}, {"id": 10, "op": "profile", "action": "reset"})
        daemon.write({"id": 11, "op": "profile", "action": "read"}, {"id": 12, "op": "ping"})
        assert daemon.until(protocol.Pong) == [
            protocol.StatsReport(9, {"served": 3, "queued": 0, "steps": daemon_steps()}),
            protocol.ProfileReport(10, {"served": 0}),
            protocol.ProfileReport(11, {"served": 0}),
            protocol.Pong(12),
        ]
        daemon.process.stdin.close()
        assert daemon.rest() == [] and daemon.status() == 0
        assert b"fake engine closed" in daemon.stderr


def daemon_steps() -> int:
    # A step for each prompt, one for each token sent alone, one for each end; the score takes two.
    return (1 + 3 + 1) + (1 + 4 + 1) + 2


def test_only_events_reach_stdout() -> None:
    """Whatever the engine prints while it loads or works goes to stderr; `next` parses every line."""
    with running("printing.gguf") as daemon:
        daemon.until(protocol.Ready)
        daemon.write(generate(1, [fake_engine.PRINT, 4]))
        assert said(daemon.until(protocol.Done), 1) == [4, fake_engine.PRINT]
        daemon.process.stdin.close()
        assert daemon.rest() == [] and daemon.status() == 0
        for how in (b"by Python", b"by a descriptor", b"by C"):
            assert daemon.stderr.count(b"printed " + how) == 2


@pytest.mark.parametrize(
    ("line", "request_id", "named"),
    [
        (b"what?", None, "JSON"),
        (b"", None, "JSON"),
        (b'{"op":"ping","id":4}\xff', None, "UTF-8"),
        (b"x" * (protocol.MAX_LINE_BYTES + 1), None, "bytes"),
        (b'{"id":4,"op":"dance"}', 4, "'op'"),
        (b'{"id":4,"op":"generate","tokens":[1],"max_tokens":1,"colour":1}', 4, "'colour'"),
        (b'{"id":-4,"op":"ping"}', None, "'id'"),
        (b'{"id":true,"op":"ping"}', None, "'id'"),
        (b'{"id":4,"op":"generate","tokens":[301],"max_tokens":1}', 4, "refused"),
    ],
)
def test_a_bad_line_is_answered_and_survived(
    shared_daemon: RawDaemon, line: bytes, request_id: int | None, named: str
) -> None:
    shared_daemon.write(line, {"id": 77, "op": "ping"})
    error, pong = shared_daemon.until(protocol.Pong)
    assert error.id == request_id and error.code == "bad_request" and named in error.message
    assert pong.id == 77


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[RawDaemon]:
    with running("--ctx-tokens=20", "--", "model.gguf") as daemon:
        daemon.until(protocol.Ready)
        yield daemon


def test_errors_keep_their_code(shared_daemon: RawDaemon) -> None:
    shared_daemon.write(generate(1, [fake_engine.NAN]), generate(2, range(20)), generate(3, [5]))
    events = shared_daemon.until(protocol.Done)
    codes = {event.id: event.code for event in events if isinstance(event, protocol.Error)}
    assert codes == {1: "numerical", 2: "context_overflow"} and said(events, 3) == [5]


def test_more_requests_than_may_wait() -> None:
    with running(step_s=0.02) as daemon:
        daemon.until(protocol.Ready)
        daemon.write(*(generate(number, [1], 10_000, stop_tokens=[]) for number in range(1, MAX_WAITING + 3)))
        events = [*daemon.until(protocol.Error), *daemon.until(protocol.Error)]
        refused = [event for event in events if isinstance(event, protocol.Error)]
        assert [event.id for event in refused] == [MAX_WAITING + 1, MAX_WAITING + 2]
        assert {(event.code, event.hint) for event in refused} == {("overloaded", "send it again later")}
        assert isinstance(from_code("overloaded", ""), OverloadedError)


def test_a_lost_device_ends_every_request_and_the_daemon() -> None:
    with running() as daemon:
        daemon.until(protocol.Ready)
        daemon.write(generate(1, [fake_engine.LOST]), generate(2, [5]), generate(3, [6]))
        rest = daemon.rest()
        ends = [event for event in rest if isinstance(event, protocol.Error)]
        # What came after the failure may not have been read.
        assert [e.id for e in ends] in ([1, None], [1, 2, None], [1, 2, 3, None]) and rest[-1].id is None
        assert {(e.code, e.message, e.hint) for e in ends} == {("device_lost", "the GPU failed", "start again")}
        assert daemon.status() == 1
        assert b"fake engine closed" in daemon.stderr and b"Traceback" not in daemon.stderr


def test_an_operation_that_fails_on_a_file_is_answered(shared_daemon: RawDaemon, tmp_path: Path) -> None:
    path = tmp_path / "none" / "profile"
    shared_daemon.write({"id": 3, "op": "profile", "action": "write", "path": str(path)})
    error = shared_daemon.next()
    assert error.id == 3 and str(path) in error.message


def test_requests_queue_and_are_cancelled_while_others_run() -> None:
    with running(step_s=0.02) as daemon:
        daemon.until(protocol.Ready)
        words = [*range(100)] * 10  # it does not end before it is cancelled, however slow the machine is
        daemon.write(generate(1, [SAY, *words, SAID], 1000), generate(2, [SAY, 40, 41, SAID]), generate(3, [9]))
        events: list[protocol.Event] = []
        for taken in (generate(1, [1]), {"id": 1, "op": "stats"}):
            daemon.write(taken)
            events += daemon.until(protocol.Error)
            assert events[-1].id == 1 and "still running" in events[-1].message

        if not said(events, 1):  # they may have come before the errors
            events += daemon.until(protocol.Tokens)
        daemon.write({"id": 50, "op": "ping"}, {"id": 51, "op": "cancel", "target": 3})
        events += daemon.until(protocol.Error)
        assert protocol.Pong(50) in events and protocol.Cancelled(51, 3, True) in events
        assert events[-1].id == 3 and events[-1].code == "cancelled"

        daemon.write({"id": 52, "op": "cancel", "target": 1}, {"id": 53, "op": "cancel", "target": 99})
        events += daemon.until(protocol.Done)
        assert protocol.Cancelled(52, 1, True) in events and protocol.Cancelled(53, 99, False) in events
        at = next(i for i, event in enumerate(events) if getattr(event, "target", None) == 1)
        assert events[at + 1].id == 1 and events[at + 1].code == "cancelled"
        assert said(events, 1) == words[: len(said(events, 1))] and said(events[at:], 1) == []
        assert said(events, 2) == [40, 41] and events[-1].id == 2
        assert said(events, 3) == []


def test_too_many_requests_are_refused() -> None:
    with running(step_s=0.01) as daemon:
        daemon.until(protocol.Ready)
        daemon.write(*(generate(i, [1], 10_000, stop_tokens=[]) for i in range(257)))
        error = daemon.until(protocol.Error)[-1]
        assert error.id == 256 and "waiting" in error.message


def test_a_slow_engine_gives_signs_of_life() -> None:
    with running(step_s=0.15) as daemon:
        daemon.until(protocol.Ready)
        daemon.write(generate(2, [fake_engine.QUIET, 8]), generate(3, [9], 1))
        events = daemon.until(protocol.Tokens)
        assert protocol.Working(2) in events


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("busy", [False, True])
def test_a_signal_ends_it_cleanly(number: signal.Signals, busy: bool) -> None:
    with running(step_s=0.02) as daemon:
        daemon.until(protocol.Ready)
        if busy:
            daemon.write(generate(1, [SAY, *range(200), SAID], 1000, stop_tokens=[]), generate(2, [1]))
            daemon.until(protocol.Tokens)
        daemon.process.send_signal(number)
        rest = daemon.rest()
        assert daemon.status() == (130 if number == signal.SIGINT else 0)
        errors = [(e.id, e.code) for e in rest if isinstance(e, protocol.Error)]
        assert errors == ([(1, "cancelled"), (2, "cancelled")] if busy else [])
        assert b"fake engine closed" in daemon.stderr and b"Traceback" not in daemon.stderr


def test_the_end_of_input_cancels_what_runs() -> None:
    with running(step_s=0.02) as daemon:
        daemon.until(protocol.Ready)
        daemon.write(generate(1, [1], 10_000, stop_tokens=[]))
        daemon.until(protocol.Tokens)
        daemon.process.stdin.close()
        rest = daemon.rest()
        assert rest[-1].id == 1 and rest[-1].code == "cancelled" and daemon.status() == 0


def test_shutdown_says_bye() -> None:
    with running(step_s=0.02) as daemon:
        daemon.until(protocol.Ready)
        daemon.write(generate(1, [1], 10_000, stop_tokens=[]), {"id": 2, "op": "shutdown"})
        rest = daemon.rest()
        assert protocol.Bye(2) in rest and rest[-1].code == "cancelled" and daemon.status() == 0


def test_a_closed_stdout_ends_it_quietly() -> None:
    with running(step_s=0.01) as daemon:
        daemon.until(protocol.Ready)
        daemon.write(generate(1, [1], 10_000, stop_tokens=[]))
        daemon.until(protocol.Tokens)
        # The reading thread holds the file: closing it under the thread's feet is what is wanted.
        os.dup2(os.open(os.devnull, os.O_RDONLY), daemon.process.stdout.fileno())
        assert daemon.process.wait(PATIENCE_S) == 0
        daemon.threads[1].join(PATIENCE_S)
        assert b"Traceback" not in daemon.stderr and b"fake engine closed" in daemon.stderr


def test_a_client_that_stops_reading_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    """Its stdout is full and nobody reads; it must still end when its input does."""
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-S", str(FAKE), "0", "0", "model.gguf"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=write_fd, stderr=subprocess.DEVNULL) as process:
        try:
            os.close(write_fd)
            process.stdin.write(json.dumps(generate(1, [1], 100_000, stop_tokens=[])).encode() + b"\n")
            process.stdin.flush()
            time.sleep(0.5)  # enough for 64 KiB of events
            process.stdin.close()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            os.close(read_fd)


def test_a_model_that_cannot_be_loaded_is_one_error() -> None:
    with running("broken.gguf") as daemon:
        *_, error = daemon.rest()
        assert error == protocol.Error(
            None, "model_format", "key 'general.architecture': expected a string", "download it again"
        )
        assert daemon.status() == 1 and b"Traceback" not in daemon.stderr


@pytest.mark.parametrize("how", ["signal", "input"])
def test_loading_can_be_given_up(how: str) -> None:
    with running(load_s=4.0) as daemon:
        daemon.until(protocol.Loading)
        started_s = time.monotonic()
        if how == "signal":
            daemon.process.send_signal(signal.SIGTERM)
        else:
            daemon.process.stdin.close()
        rest = daemon.rest()
        assert daemon.status() == 0 and time.monotonic() - started_s < 3.0
        assert not any(isinstance(event, protocol.Ready) for event in rest)


def test_a_bug_of_the_engine_is_a_traceback_and_a_failure() -> None:
    with running() as daemon:
        daemon.until(protocol.Ready)
        daemon.write(generate(1, [fake_engine.BUG]))
        daemon.rest()
        assert daemon.status() == 1 and b"ZeroDivisionError: a bug of the engine" in daemon.stderr


def test_help_needs_no_engine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine", "--help"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0 and "--residency-pct" in done.stdout and done.stderr == ""


class Told:
    """An output that notes the kinds of its events."""

    def __init__(self, told: list[str]) -> None:
        self.told, self.emitted_s = told, time.monotonic()

    def emit(self, event: protocol.Event) -> None:
        self.told.append(type(event).__name__)


def test_idle_work_is_done_a_unit_at_a_time_and_only_without_lines() -> None:
    """Between two units the daemon looks for lines; with nothing left to do it waits for one."""
    told: list[str] = []

    class Engine:
        busy, idle_s = False, None
        left = 3

        @property
        def idle_work(self) -> bool:
            return self.left > 0

        def step(self) -> list[protocol.Event]:
            told.append("unit")
            self.left -= 1
            return []

        def stats(self) -> dict:
            return {}

    class Inbox:
        def take(self, *, wait: bool, at_most_s: float | None) -> Iterator[bytes]:
            told.append("wait" if wait else "look")
            if told.count("look") == 2 and not wait:
                yield b'{"op":"ping","id":1}'
            if wait:
                raise daemon._Stopped("enough")

    with pytest.raises(daemon._Stopped):
        daemon._serve(Engine(), Inbox(), Told(told))  # type: ignore[arg-type]
    assert told == ["look", "unit", "look", "Pong", "unit", "look", "unit", "wait"]


def test_lines_without_a_pause_keep_nothing_from_running() -> None:
    told: list[str] = []

    class Engine:
        busy, idle_s = True, None

        def step(self) -> list[protocol.Event]:
            told.append("step")
            if told.count("step") == 3:
                raise daemon._Stopped("enough")
            return []

    class Inbox:
        def take(self, *, wait: bool, at_most_s: float | None) -> Iterator[bytes]:
            while len(told) < 100_000:
                yield b'{"op":"ping","id":1}'

    with pytest.raises(daemon._Stopped):
        daemon._serve(Engine(), Inbox(), Told(told))  # type: ignore[arg-type]
    assert told == 3 * [*daemon._INBOX_LINES * ["Pong"], "step"]
