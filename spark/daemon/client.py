"""The client of the daemon: starts it, talks the line protocol, and never waits without a deadline.

Whatever happens (a deadline, the daemon's death, Ctrl-C here, the end of the interpreter) the daemon's
process group is ended and the daemon is reaped. If this process is killed, the daemon sees the end of
its stdin and ends by itself. One thread reads the events and sorts them into an inbox for each request,
so no read outlives its deadline.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import math
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar

import engine
from engine.ground import protocol
from engine.ground.config import EngineConfig
from engine.ground.errors import CancelledError, DaemonError, DeadlineError, RequestError, SparkError, from_code
from engine.ground.recall import KVRecall
from engine.ground.sampling import Sampling
from spark.daemon.process import ChildProcess, UnwantedError

MAX_GARBAGE_LINES = 100
_LOOK_S = 0.2  # how often a waiting thread looks whether the daemon is still there
_LAST_LINES = "the daemon's last lines on stderr:"  # begins a hint
_WHY_CHARS = 200  # of one line
_LAST_WORDS_S = 1.0  # how long a daemon that closed its output has to end

# `-m engine` would take a folder `engine` in the working directory for ours: so `-P`, and our own path.
_BOOT = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module('engine', run_name='__main__')"

OnWarning: TypeAlias = Callable[[str, str], None]  # a reason, the same for all of a kind, and a line
OnLoading: TypeAlias = Callable[[str, int, int], None]  # a stage, how much of it is done, of how much
_Queue: TypeAlias = "SimpleQueue[protocol.Event | None]"
_Answer = TypeVar("_Answer", bound=protocol.Event)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long the client waits, in seconds, before it kills the daemon.

    ready_s: from the start to Ready. silence_s: for the next line of a daemon that has work. total_s: for
    the whole of one request; None: as long as the daemon gives signs of life. grace_s: for a daemon that
    was asked to end.
    """

    ready_s: float = 600.0
    silence_s: float = 600.0
    total_s: float | None = 3600.0
    grace_s: float = 5.0


def engine_command(config: EngineConfig) -> list[str]:
    """Write the command that runs the daemon with this interpreter and this package's engine."""
    assert engine.__file__ is not None
    root = Path(engine.__file__).resolve().parents[1]
    return [sys.executable, "-P", "-c", _BOOT, str(root), *protocol.command_line(config)]


class Inbox(Protocol):
    """Where the events of a request go; None: no more come. Called by the thread that reads, which must not wait."""

    def put(self, event: protocol.Event | None, /) -> None: ...  # noqa: D102


def why(error: SparkError) -> str:
    """What an error of a daemon says in one line, with the last one that the daemon wrote, if it wrote any."""
    head, _, tail = error.hint.partition("\n")
    said = tail.strip().rpartition("\n")[2].strip() if head == _LAST_LINES else ""
    return f"{error.message}: {said[:_WHY_CHARS]}" if said else error.message


class DaemonClient:
    """A running daemon, loaded and ready; requests may come from several threads.

    command: what to run, as `engine_command` writes it. on_loading: called with the figures of each
    `protocol.Loading` in the calling thread. on_warning: called for each `protocol.Warned` in a thread that must not be
    held up. `hello` and `ready` are what the daemon said of itself. Raises the error
    that the daemon reports when it cannot load, DaemonError where it ends or speaks something else,
    DeadlineError where it is not ready in time. Any later call may raise the last two.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        deadlines: Deadlines | None = None,
        on_loading: OnLoading = lambda stage, done, total: None,
        on_warning: OnWarning = lambda reason, message: None,
    ) -> None:
        self._on_warning = on_warning
        self.hello = protocol.Hello(protocol.PROTOCOL, {})
        self.ready = protocol.Ready({})
        self.deadlines = deadlines or Deadlines()
        self._ids = itertools.count(1)
        self._heard_s = time.monotonic()
        # A queue for each unanswered request and, under None, one for what concerns no request.
        self._loading: SimpleQueue[protocol.Event | None] = SimpleQueue()
        self._inboxes: dict[int | None, Inbox] = {None: self._loading}
        self._work: set[int] = set()  # those of them that take long, and some that are answered
        self.changes = 0  # how often one of those began or ended: what the daemon learns, it learns in between
        self._sorting = threading.Lock()
        self._output_ended = False
        self._nonsense = ""  # why its output is not read any more, though it has not ended
        self._failure: SparkError | None = None  # why nothing can be asked any more
        self._ending = threading.RLock()
        self._unneeded: deque[int] = deque()  # requests that are to be cancelled
        self._cancelling = False  # a thread does it
        try:
            self._process = ChildProcess(command)
        except OSError as error:
            raise DaemonError(f"the daemon cannot be started: {error}") from error
        atexit.register(self.close)
        try:
            threading.Thread(target=self._read, name="stdout", daemon=True).start()
            self._wait_ready(on_loading)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the daemon, which is the id of its process group too."""
        return self._process.pid

    @property
    def stopped(self) -> bool:
        """Whether the system keeps it from running (SIGSTOP, a debugger); false where that cannot be seen."""
        return self._process.activity()[0] in ("T", "t")

    @property
    def cpu_ticks(self) -> int:
        """What it has computed, in the system's ticks of CPU time; 0 where that cannot be seen."""
        return self._process.activity()[1]

    @property
    def silent_s(self) -> float:
        """Seconds since the daemon's last line, whatever it said."""
        return time.monotonic() - self._heard_s

    @property
    def owed(self) -> int:
        """Requests for tokens or scores that it has not answered yet."""
        with self._sorting:
            self._work &= self._inboxes.keys()
            return len(self._work)

    @property
    def alive(self) -> bool:
        """Whether requests can be sent."""
        return self._failure is None and not self._output_ended and self._process.status() is None

    def number(self) -> int:
        """Return an id for a request that is to be sent."""
        return next(self._ids)

    def generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None,
        grammar: str | None = None,
        reply_from: int | None = None,
        logprobs: int | None = None,
        same_prompt_as: int | None = None,
        shared_by: int = 0,
        draft: bool = True,
        prediction: Sequence[int] | None = None,
        kv_recall: KVRecall | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> RequestStream:
        """Continue `tokens`: Progress and Tokens events, then one Done (see `protocol.Generate`).

        wanted: asked while the daemon has not begun to read it; raises CancelledError where it is not any more.
        """
        request = protocol.Generate(
            self.number(),
            tuple(tokens),
            max_tokens,
            sampling or Sampling(),
            None if stop_tokens is None else tuple(stop_tokens),
            grammar,
            reply_from,
            logprobs,
            same_prompt_as,
            shared_by,
            draft,
            None if not prediction else tuple(prediction),
            kv_recall,
        )
        return RequestStream(self, request, wanted)

    def score(
        self,
        tokens: Sequence[int],
        *,
        generated: Sequence[bool] | None = None,
        session_id: str = "",
        window: int = 0,
        trace_dir: Path | None = None,
        hidden: bool = False,
        logprobs: bool = False,
        count: Literal["generated", "all"] = "generated",
    ) -> RequestStream:
        """Feed `tokens` teacher-forced: Progress events, then one Done (see `protocol.Score`)."""
        request = protocol.Score(
            self.number(),
            tuple(tokens),
            generated=None if generated is None else tuple(generated),
            session_id=session_id,
            window=window,
            trace_dir=None if trace_dir is None else str(trace_dir.absolute()),
            hidden=hidden,
            logprobs=logprobs,
            count=count,
        )
        return RequestStream(self, request)

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters."""
        return dict(self._ask(protocol.Stats(self.number()), protocol.StatsReport).stats)

    def profile(self, action: Literal["write", "reset", "read"], path: Path | None = None) -> dict[str, Any]:
        """Write the routing counts to `path` (None: the engine's own), reset them, or read them."""
        where = None if path is None else str(path.absolute())
        request = protocol.ProfileRequest(self.number(), action, where)
        return dict(self._ask(request, protocol.ProfileReport).profile)

    def ping(self) -> float:
        """Return the seconds that the daemon took to answer, which it does between two steps."""
        asked_s = time.monotonic()
        self._ask(protocol.Ping(self.number()), protocol.Pong)
        return time.monotonic() - asked_s

    def cancel(self, request_id: int) -> None:
        """End a request, whose stream then raises CancelledError; one that has ended stays as it is."""
        self._send(protocol.Cancel(self.number(), request_id))

    def cancel_soon(self, request_id: int) -> None:
        """The same by a thread, so that a daemon that does not read keeps nobody waiting; raises nothing."""
        with self._sorting:
            self._unneeded.append(request_id)
            if self._cancelling:
                return
            self._cancelling = True
        threading.Thread(target=self._cancel_unneeded, name="cancelling", daemon=True).start()

    def _cancel_unneeded(self) -> None:
        while True:
            with self._sorting:
                if not self._unneeded:
                    self._cancelling = False
                    return
                request_id = self._unneeded.popleft()
                over = request_id not in self._inboxes
            if not over:
                with contextlib.suppress(SparkError):  # a dead daemon works on nothing
                    self.cancel(request_id)

    def close(self) -> None:
        """End the daemon: its stdin is closed; after the grace comes SIGTERM, after another SIGKILL.

        One that the system keeps from running is killed at once: it would do nothing in its grace.
        """
        with self._ending:
            if self._failure is None:
                self._failure = DaemonError("the daemon was closed")
                grace_s = 0.0 if self.stopped else self.deadlines.grace_s
                try:
                    self._process.close_stdin(grace_s)
                    self._process.status(grace_s)
                finally:
                    self._process.end(grace_s)
        atexit.unregister(self.close)

    def stderr_tail(self) -> str:
        """Return the last lines that the daemon wrote to stderr."""
        return self._process.stderr_tail()

    # --- requests ---------------------------------------------------------------------------------

    def _ask(self, request: protocol.Request, answer: type[_Answer]) -> _Answer:
        last = deque(RequestStream(self, request), maxlen=1).pop()
        if not isinstance(last, answer):
            raise self._fail(DaemonError(f"the daemon answered {request} with {last}"))
        return last

    def _send(self, request: protocol.Request, wanted: Callable[[], bool] = lambda: True) -> None:
        line = protocol.format_line(request)
        if not self.alive:
            raise self._died()
        with self._explained():
            self._process.write(line, self.deadlines.silence_s, wanted)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say why something cannot be written, as errors that are explained."""
        try:
            yield
        except UnwantedError:
            raise CancelledError("the request was taken back before it was sent") from None
        except TimeoutError:
            late = DeadlineError(f"the daemon did not read a request for {self.deadlines.silence_s:g} s")
            raise self._fail(late) from None
        except BrokenPipeError:
            raise self._died() from None

    def send(self, request: protocol.Request, inbox: Inbox, wanted: Callable[[], bool] = lambda: True) -> None:
        """Send a request whose events are to go to `inbox`; raises as `generate` does."""
        self._expect(request, inbox)
        try:
            self._send(request, wanted)
        except BaseException:
            self._forget(request.id)
            raise

    def send_at_once(
        self, request: protocol.Request, inbox: Inbox, wanted: Callable[[], bool]
    ) -> Callable[[], None] | None:
        """The same as far as it waits for nothing; what is left to do in a thread that may wait, if anything is.

        That raises as `send` does. Raises RequestError for a request that is too long.
        """
        line = protocol.format_line(request)
        self._expect(request, inbox)
        try:
            left = self._process.begin_write(line) if self.alive else None
        except BrokenPipeError:
            left = None
        if left is None:
            self._forget(request.id)
            return functools.partial(self.send, request, inbox, wanted)
        return functools.partial(self._send_rest, request, left) if left else None

    def _send_rest(self, request: protocol.Request, left: memoryview) -> None:
        try:
            with self._explained():
                self._process.end_write(left, self.deadlines.silence_s)
        except BaseException:
            self._forget(request.id)
            raise

    def _expect(self, request: protocol.Request, inbox: Inbox) -> None:
        with self._sorting:
            if isinstance(request, protocol.Generate | protocol.Score):
                self._work = (self._work & self._inboxes.keys()) | {request.id}
                self.changes += 1
            self._inboxes[request.id] = inbox

    def _forget(self, request_id: int | None) -> None:
        with self._sorting:
            self._ended(request_id)

    def _ended(self, request_id: int | None) -> Inbox | None:
        """Expect nothing more of a request; where its answers were awaited."""
        inbox = self._inboxes.pop(request_id, None)
        self.changes += inbox is not None and request_id in self._work
        return inbox

    def _receive(self, key: int | None, inbox: _Queue, since_s: float, total_s: float | None) -> protocol.Event:
        """Wait for the next event of what was asked for at `since_s`; a deadline that passes ends the daemon.

        key: the request, or None for loading, which may be silent.
        """
        what = "loading" if key is None else f"request {key}"
        end_s = math.inf if total_s is None else since_s + total_s
        while True:
            now_s = time.monotonic()
            if now_s > end_s and key in self._inboxes:  # an answer that has come may be read late
                raise self._fail(DeadlineError(f"{what} was not done after {total_s:g} s"))
            silent_end_s = math.inf if key is None else self._silent_end_s(since_s)
            try:
                event = inbox.get(timeout=max(0.0, min(_LOOK_S, end_s - now_s, silent_end_s - now_s)))
            except Empty:
                if (error := self.lost(key, since_s)) is not None:
                    raise error from None
                continue
            if event is None:
                raise self._died()
            return event

    def _silent_end_s(self, since_s: float) -> float:
        return max(self._heard_s, since_s) + self.deadlines.silence_s

    def seems_lost(self, since_s: float) -> bool:
        """Whether no more may come of a request that was sent at `since_s`; waits for nothing."""
        return not self.alive or time.monotonic() > self._silent_end_s(since_s)

    def lost(self, request_id: int | None, since_s: float) -> SparkError | None:
        """Why no more comes of a request that was sent at `since_s`, if none does; then the daemon has been ended.

        request_id: None for loading, which may be silent.
        """
        if not self.alive:
            return self._died()
        if request_id is None or time.monotonic() <= self._silent_end_s(since_s):
            return None
        late = f"no sign of life from the daemon for {self.deadlines.silence_s:g} s, in request {request_id}"
        return self._fail(DeadlineError(late))

    def _wait_ready(self, on_loading: OnLoading) -> None:
        since_s = time.monotonic()
        while True:
            match self._receive(None, self._loading, since_s, self.deadlines.ready_s):
                case protocol.Hello() as hello:
                    if hello.protocol != protocol.PROTOCOL:
                        raise DaemonError(
                            f"the daemon speaks protocol {hello.protocol}, this client {protocol.PROTOCOL}"
                        )
                    self.hello = hello
                case protocol.Loading(stage, done, total):
                    on_loading(stage, done, total)
                case protocol.Error() as error:
                    raise from_code(error.code, error.message, error.hint)
                case protocol.Ready() as ready:
                    self.ready = ready
                    self._forget(None)
                    return

    # --- the end ----------------------------------------------------------------------------------

    def _fail(self, error: SparkError) -> SparkError:
        """End the daemon because of `error`; the error to raise, with the daemon's last words."""
        with self._ending:
            if self._failure is not None:
                return DaemonError(self._failure.message, hint=self._failure.hint)
            self._process.end(self.deadlines.grace_s)
            tail = self._process.stderr_tail()
            error.hint = f"{_LAST_LINES}\n{tail}" if tail else "it wrote nothing to stderr"
            self._failure = DaemonError(f"the daemon was ended: {error.message}", hint=error.hint)
            return error

    def _died(self) -> SparkError:
        """Say why the daemon is gone, having made sure that it is."""
        with self._ending:
            status = self._process.status(_LAST_WORDS_S)
            if self._nonsense:
                how = self._nonsense
            elif status is None:
                how = "closed its output and went on"
            elif status < 0:
                how = f"was killed by signal {-status} ({signal.strsignal(-status)})"
            else:
                how = f"ended with exit status {status}"
            return self._fail(DaemonError(f"the daemon {how}"))

    # --- the thread that reads --------------------------------------------------------------------

    def _read(self) -> None:
        garbage = 0
        try:
            for line in self._process.lines():
                self._heard_s = time.monotonic()
                try:
                    if line is None:
                        raise RequestError("a line too long")
                    self._sort(protocol.parse_event(line))
                except RequestError as error:
                    garbage += 1
                    if garbage > MAX_GARBAGE_LINES:
                        self._nonsense = f"wrote {garbage} lines that are no events; the last: {error.message}"
                        break
        finally:  # whatever happened, nobody waits for more
            with self._sorting:
                self._output_ended = True
                for inbox in self._inboxes.values():
                    inbox.put(None)

    def _sort(self, event: protocol.Event) -> None:
        with self._sorting:
            match event:
                case protocol.Tokens() | protocol.Progress():
                    inbox = self._inboxes.get(event.id)
                    if inbox is not None:
                        inbox.put(event)
                case protocol.Error(id=None):
                    for inbox in self._inboxes.values():
                        inbox.put(event)
                case protocol.Hello() | protocol.Loading() | protocol.Ready() | protocol.Plan() | protocol.Working():
                    if None in self._inboxes:
                        self._inboxes[None].put(event)
                case protocol.Warned(reason, message):
                    self._on_warning(reason, message)
                case _:  # an answer, after which no more comes; nobody waits for that of Cancel
                    inbox = self._ended(event.id)
                    if inbox is not None:
                        inbox.put(event)


class RequestStream(Iterator[protocol.Event]):
    """The events of one request, as they come; the last is its answer.

    Raises the error that the daemon answers with, DaemonError or DeadlineError. As a context manager it
    cancels a request that is left early.
    """

    def __init__(
        self, client: DaemonClient, request: protocol.Request, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        self.id = request.id
        self.client = client
        self._since_s = time.monotonic()
        self._inbox: _Queue = SimpleQueue()
        client.send(request, self._inbox, wanted)
        self._over = False

    def __next__(self) -> protocol.Event:
        if self._over:
            raise StopIteration
        try:
            event = self.client._receive(self.id, self._inbox, self._since_s, self.client.deadlines.total_s)
            if isinstance(event, protocol.Error):
                raise from_code(event.code, event.message, event.hint)
        except SparkError:
            self._over = True
            raise
        self._over = not isinstance(event, protocol.Tokens | protocol.Progress)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def result(self) -> protocol.Done:
        """Wait for the end; the Done event of a Generate or Score request."""
        last = deque(self, maxlen=1).pop()
        assert isinstance(last, protocol.Done), last
        return last

    def cancel(self) -> None:
        """Ask the daemon to end the request; the stream then raises CancelledError."""
        self.client.cancel(self.id)

    def close(self) -> None:
        """Cancel the request unless it is over, and expect nothing more of it."""
        if not self._over:
            self._over = True
            self.client._forget(self.id)
            with contextlib.suppress(SparkError):  # a dead daemon works on nothing
                self.cancel()
