"""The daemon: reads requests on stdin, drives an engine step by step, writes events to stdout.

Only events ever reach stdout: the real one is kept under a private descriptor and descriptor 1 points
at stderr from before the engine is loaded, so a C library that prints cannot break the protocol.
One thread reads stdin; everything else happens in the main thread, requests between two steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Protocol

from engine.ground import protocol
from engine.ground.config import DEVICES, DRAFTS, GUESSES, MAX_PARALLEL, EngineConfig, is_cpu_experts, pool_size
from engine.ground.errors import (
    EXIT_INTERRUPTED,
    CancelledError,
    CapacityError,
    DeviceLostError,
    OverloadedError,
    RequestError,
    SparkError,
)
from engine.ground.kv_types import KV_WORDS, pair_of
from engine.ground.recall import MAX_BLOCKS, MAX_POSITION

MAX_WAITING = 256  # requests that are unanswered at once
_INBOX_LINES = 64  # lines read ahead of the main thread, and answered between two steps
_STALLED_S = 1.0  # how long a stopping daemon waits for a client that reads nothing
_LOADING_EVERY_S = 0.2
_WORKING_EVERY_S = 1.0

_log = logging.getLogger(__name__)


class Driven(Protocol):
    """What the daemon drives; `engine.serving.scheduler.Engine` is the real one."""

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""

    @property
    def idle_work(self) -> bool:
        """Whether a step would do something though no request is unfinished."""

    @property
    def idle_s(self) -> float | None:
        """Seconds after which that may be so, if nothing comes; None: never."""

    def hello(self) -> dict[str, Any]:
        """Say what was loaded, for the Ready event."""

    def ready(self) -> dict[str, Any]:
        """Give the memory plan and the effective settings, for the Ready event."""

    def submit(self, request: protocol.Generate | protocol.Score) -> None:
        """Take a request, or raise RequestError."""

    def step(self) -> list[protocol.Event]:
        """Do one step of work; the events it produced, among them a request's final Done or Error.

        Raises DeviceLostError where no request can be served any more.
        """

    def cancel(self, request_id: int) -> bool:
        """Forget a request, of which no further event comes; False where there is none."""

    def stats(self) -> dict[str, Any]:
        """Return the counters."""

    def profile(self, action: str, path: Path | None) -> dict[str, Any]:
        """Write, reset or read the routing counts."""

    def close(self) -> None:
        """Give everything back."""


Loading = Callable[[protocol.Stage, int, int], None]  # a stage, how much of it is done, of how much
OpenEngine = Callable[[EngineConfig, Loading], Driven]
MakePlan = Callable[[EngineConfig], Mapping[str, Any]]


def run(open_engine: OpenEngine, arguments: Sequence[str] | None = None, *, plan: MakePlan | None = None) -> int:
    """Run the daemon until its input ends, a signal comes or it is told to; the exit status.

    arguments: the command line; None: that of the process. plan: what `--plan-only` calls for its one Plan event.
    A failure to load, or a device that is lost, is one Error event without an id, and the status is the error's. An
    end that was asked for gives 0, Ctrl-C 130.
    """
    config = parse_arguments(arguments)
    inbox = _Inbox()
    output = _Output(_take_stdout(), inbox)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger().addHandler(_Warnings(inbox))
    if not config.plan_only:
        inbox.start()
    try:
        try:
            if config.plan_only:
                assert plan is not None
                output.emit(protocol.Plan(plan(config)))
                return 0
            engine = _load(open_engine, config, inbox, output)
            try:
                _serve(engine, inbox, output)
            finally:
                engine.close()
        except SparkError as error:
            _log.error("%s: %s", error.code, error.message)
            output.emit(protocol.error_event(None, error))
            return error.exit_code
    except _Stopped as stop:
        _log.info("stopped: %s", stop)
    return EXIT_INTERRUPTED if inbox.signal == signal.SIGINT else 0


class _Stopped(BaseException):
    """Nothing is left to do. Not an Exception, so that no handler in the engine takes it for a failure."""


class _Inbox:
    """Lines from stdin, warnings of other threads, and what tells the daemon to stop: the end of stdin or a signal."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._ended = False
        self._lines: SimpleQueue[Any] = SimpleQueue()
        self._room = threading.Semaphore(_INBOX_LINES)
        self._wake = object()

    @property
    def stopping(self) -> bool:
        """Whether a signal came or stdin ended, though lines read before may be left."""
        return self._ended or self.signal is not None

    def start(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def warn(self, event: protocol.Warned) -> None:
        """Have an event sent as soon as the main thread can, though nobody asked for anything."""
        self._lines.put(event)

    def take(self, *, wait: bool, at_most_s: float | None = None) -> Iterator[bytes | protocol.Warned | None]:
        """Give the lines that came, None for one that was too long, and warnings; `wait` for the first, or at most_s.

        Raises _Stopped at the end of stdin and, before any line that is left, after a signal.
        """
        while self.signal is None:
            try:
                line = self._lines.get(block=wait, timeout=at_most_s if wait else None)
            except Empty:
                return
            if line is self._wake:
                break
            if not isinstance(line, protocol.Warned):
                self._room.release()
            yield line
            wait = False
        raise _Stopped("stdin ended" if self.signal is None else signal.Signals(self.signal).name)

    def _read(self) -> None:
        try:
            for line in protocol.read_lines(0):
                self._room.acquire()
                self._lines.put(line)
        finally:  # one that cannot be read is at its end too
            self._ended = True
            self._lines.put(self._wake)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._lines.put(self._wake)  # SimpleQueue.put may be called in a signal handler


class _Warnings(logging.Handler):
    """Makes events of the warnings that say why, by `extra={"reason": ...}`, whatever thread they come from."""

    def __init__(self, inbox: _Inbox) -> None:
        super().__init__(logging.WARNING)
        self._inbox = inbox

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a warning on."""
        reason = getattr(record, "reason", None)
        if reason is not None:
            self._inbox.warn(protocol.Warned(reason, record.getMessage()))


def _take_stdout() -> int:
    """Keep the real stdout under a new descriptor and point descriptor 1 at stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


class _Output:
    """Writes events; raises _Stopped when nobody reads them."""

    def __init__(self, fd: int, inbox: _Inbox) -> None:
        self.emitted_s = time.monotonic()
        self._fd = fd
        self._inbox = inbox
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def emit(self, event: protocol.Event) -> None:
        started_s = time.monotonic()
        left = memoryview(protocol.format_line(event))
        while left:
            if self._poll.poll(1000 * _STALLED_S):
                try:
                    # A pipe that polls as writable takes PIPE_BUF bytes without blocking.
                    left = left[os.write(self._fd, left[: select.PIPE_BUF]) :]
                except BrokenPipeError:
                    raise _Stopped("stdout was closed") from None
            elif self._inbox.stopping and time.monotonic() > started_s + _STALLED_S:
                raise _Stopped("stdout is not read")
        self.emitted_s = time.monotonic()


def _load(open_engine: OpenEngine, config: EngineConfig, inbox: _Inbox, output: _Output) -> Driven:
    """Announce the daemon, open the engine and announce that too."""
    output.emit(protocol.Hello(protocol.PROTOCOL, {"model": str(config.model), "pid": os.getpid()}))
    reported_s, reported = 0.0, ""

    def progress(stage: protocol.Stage, done: int, total: int) -> None:
        nonlocal reported_s, reported
        if inbox.stopping:
            raise _Stopped("while loading")
        if stage != reported or done >= total or time.monotonic() > reported_s + _LOADING_EVERY_S:
            output.emit(protocol.Loading(stage, done, total))
            reported_s, reported = time.monotonic(), stage

    try:
        engine = open_engine(config, progress)
    except MemoryError:
        raise CapacityError("there is not enough memory to load the model") from None
    except OSError as error:
        raise SparkError(f"the model cannot be loaded: {error}") from error
    output.emit(protocol.Ready({**engine.hello(), **engine.ready()}))
    return engine


def _serve(engine: Driven, inbox: _Inbox, output: _Output) -> None:
    """Answer requests until there is a reason to stop; cancels what then still runs.

    A device that is lost is one: every running request ends with that error, which is raised again.
    """
    running: set[int] = set()
    try:
        while True:
            works = engine.busy or engine.idle_work
            lines = inbox.take(wait=not works, at_most_s=None if works else engine.idle_s)
            for line in itertools.islice(lines, _INBOX_LINES):  # who writes without a pause keeps nothing from running
                for event in [line] if isinstance(line, protocol.Warned) else _answer(line, engine, running):
                    output.emit(event)
            events = engine.step() if engine.busy or engine.idle_work else []
            for event in events:
                if isinstance(event, protocol.Done | protocol.Error) and event.id is not None:
                    running.discard(event.id)
                output.emit(event)
            if running and time.monotonic() > output.emitted_s + _WORKING_EVERY_S:
                output.emit(protocol.Working(len(running)))
    except _Stopped:
        for request_id in sorted(running):
            engine.cancel(request_id)
            output.emit(protocol.error_event(request_id, CancelledError("the daemon is stopping")))
        raise
    except DeviceLostError as error:
        for request_id in sorted(running):
            output.emit(protocol.error_event(request_id, error))
        raise


def _answer(line: bytes | None, engine: Driven, running: set[int]) -> Iterator[protocol.Event]:
    """Handle one line; gives the events that answer it at once, if any."""
    given: dict[str, Any] = {}
    try:
        if line is None:
            raise RequestError(f"a line of more than {protocol.MAX_LINE_BYTES} bytes")
        given = protocol.decode(line)
        yield from _handle(protocol.request_from(given), engine, running)
    except (SparkError, OSError) as error:
        known = error if isinstance(error, SparkError) else SparkError(str(error))
        request_id = given.get("id")
        named = type(request_id) is int and 0 <= request_id <= protocol.MAX_ID
        yield protocol.error_event(request_id if named else None, known)
        if isinstance(error, DeviceLostError):
            raise


def _handle(request: protocol.Request, engine: Driven, running: set[int]) -> Iterator[protocol.Event]:
    if request.id in running:
        raise RequestError(f"field 'id': request {request.id} is still running")
    match request:
        case protocol.Generate() | protocol.Score():
            if len(running) >= MAX_WAITING:
                raise OverloadedError(f"{MAX_WAITING} requests are waiting already", hint="send it again later")
            engine.submit(request)
            running.add(request.id)
        case protocol.Cancel():
            found = request.target in running and engine.cancel(request.target)
            yield protocol.Cancelled(request.id, request.target, found)
            if found:
                running.discard(request.target)
                yield protocol.error_event(request.target, CancelledError("the client cancelled it"))
        case protocol.Stats():
            yield protocol.StatsReport(request.id, engine.stats())
        case protocol.ProfileRequest():
            path = None if request.path is None else Path(request.path)
            yield protocol.ProfileReport(request.id, engine.profile(request.action, path))
        case protocol.Ping():
            yield protocol.Pong(request.id)
        case protocol.Shutdown():
            yield protocol.Bye(request.id)
            raise _Stopped("told to")


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def read(value: str) -> int:
        number = int(value) if value.isdecimal() else -1
        if number < low:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {low}, found {value!r}")
        if high is not None and number > high:
            raise argparse.ArgumentTypeError(f"expected at most {high}, found {value}")
        return number

    return read


def _pool(value: str) -> str:
    try:
        pool_size(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected auto, GiB as 6GiB or tokens as 16384, found {value!r}") from None
    return value


def _kv_type(value: str) -> str:
    try:
        return str(pair_of(value))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _amount(what: str, most: float = 1e6) -> Callable[[str], float]:
    def read(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0.0 <= number <= most:
            raise argparse.ArgumentTypeError(f"expected {what}, found {value!r}")
        return number

    return read


_gib_or_zero = _amount("a number of GiB")


def _gib(value: str) -> float:
    number = _gib_or_zero(value)
    if not number:
        raise argparse.ArgumentTypeError(f"expected a number of GiB above 0, found {value!r}")
    return number


def _cpu_experts(value: str) -> str:
    if not is_cpu_experts(value):
        raise argparse.ArgumentTypeError(f"expected off, auto or a number of threads, found {value!r}")
    return value


def _draft(value: str) -> str:
    if value not in DRAFTS and not Path(value).is_file():
        raise argparse.ArgumentTypeError(f"expected {', '.join(DRAFTS)} or a file that drafts, found {value!r}")
    return value


def _percentage(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0.0 <= number <= 100.0:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 100, found {value!r}")
    return number


def parse_arguments(arguments: Sequence[str] | None = None) -> EngineConfig:
    """Read the daemon's command line, one flag for each field of EngineConfig; exits with 2 for a bad one."""
    default = EngineConfig(model=Path())
    parser = argparse.ArgumentParser(
        prog="python -m engine",
        description="Loads a model and serves the line protocol: requests on stdin, events on stdout, logs on stderr.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL.gguf", help="the model; of a split one, its first part")
    add("--device", choices=DEVICES, help="where to compute (default: auto, CUDA where there is a GPU)")
    # Which there are, the engine knows; this module does without NumPy.
    add("--policy", help=f"what the slots do, a name of docs/residency.md (default: {default.policy})")
    add("--profile", type=Path, help="routing counts to place experts by")
    add("--residency-pct", type=_percentage, help="share of all expert bytes held in slots (default: 100)")
    add("--vram-gib", type=_gib, help="GiB that all of it may take on a GPU (default: what is free)")
    add(
        "--cache-slots",
        type=_integer(0),
        help="slots of each layer that are cache, under a policy that a profile adjusts (default: chosen)",
    )
    add("--ctx-tokens", type=_integer(1), help="context length (default: the model's, bounded)")
    add("--kv-pool", type=_pool, help="KV cache on the GPU: auto, or as 6GiB or 16384 (tokens) (default: auto)")
    add("--expect-ctx-tokens", type=_integer(1), help="how long contexts mostly are (default: 32768)")
    add("--kv-type", type=_kv_type, help=f"type of the KV cache: {KV_WORDS}, or two as K,V (default: f16)")
    add(
        "--kv-recall-blocks",
        type=_integer(0, MAX_BLOCKS),
        help="blocks of the context that decoded tokens read, of those that need not be (default: all)",
    )
    add(
        "--kv-recall",
        type=_amount("a share from 0 to 1", most=1.0),
        help="share of softmax mass that decoded tokens may leave out instead, by estimate",
    )
    add(
        "--kv-recall-from",
        type=_integer(0, MAX_POSITION),
        help="contexts of up to so many tokens are read whole (default: 0)",
    )
    add("--chunk-tokens", type=_integer(1), help="tokens of a prefill step (default: chosen)")
    add(
        "--parallel",
        type=_integer(1, MAX_PARALLEL),
        help=f"requests that run at a time, up to {MAX_PARALLEL} (default: 16, fewer where they take too much memory)",
    )
    add("--threads", type=_integer(1), help="CPU threads (default: one a physical core)")
    add("--replay", type=Path, help="expert choices to impose on decoded tokens (benchmarks)")
    add("--replay-guesses", type=Path, help="experts to guess for them in place of the likeliest (benchmarks)")
    add("--prefix-gib", type=_gib_or_zero, help="GiB of host memory for prefixes that may come again (default: 2)")
    add("--cache-dir", type=Path, help="folder that keeps prefixes from one start to the next (default: none)")
    add("--cache-dir-gib", type=_gib, help="GiB of files in that folder (default: 32)")
    add("--exact-prefixes", action="store_true", help="reuse no decoded tokens before they were read as a prompt")
    add(
        "--idle-release-s",
        type=_amount("a number of seconds"),
        help="give memory of slots and cache back after so many seconds without a request (default: never)",
    )
    add(
        "--draft",
        type=_draft,
        help="who proposes tokens that may follow: off, lookup, auto (lookup), mtp, a file that drafts (default: auto)",
    )
    add(
        "--draft-memory-mib",
        type=_amount("a number of MiB"),
        help="MiB of host memory for texts of earlier requests, in which drafts are looked up (default: 64; 0: none)",
    )
    add(
        "--cpu-experts",
        type=_cpu_experts,
        help="on a GPU: missed experts that the CPU computes beside it: off, auto, a number of threads (default: off)",
    )
    add(
        "--guess",
        choices=GUESSES,
        help="auto: bring missing experts to a GPU before they are asked for, while that pays; on: in every step; "
        "count: make guesses of them on a host, and count them (default: off)",
    )
    add("--pregate", type=Path, help="predictors to guess by (default: those beside the model, else its own routers)")
    add("--poison", action="store_true", help="fill evicted slots with NaN (tests)")
    add("--plan-only", action="store_true", help="write one event, the memory plan, and end")
    parser.set_defaults(**{f.name: getattr(default, f.name) for f in dataclasses.fields(default)[1:]})
    return EngineConfig(**vars(parser.parse_args(arguments)))
