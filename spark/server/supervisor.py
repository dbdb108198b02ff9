"""The daemon as an asynchronous server sees it: restarted when it died, its events awaited."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from engine.ground import protocol
from engine.ground.errors import CancelledError, DaemonError, DeadlineError, SparkError, from_code
from engine.ground.recall import KVRecall
from engine.ground.sampling import Sampling
from spark.daemon.client import DaemonClient, Deadlines, OnLoading
from spark.server.seldom import Seldom

_SOON_S = 2.0  # whoever was heard of so shortly ago need not be asked
_STUCK_S = 60.0  # a step that computes nothing here and says nothing for so long is no work
_SAVE_S = 30.0  # how long the end waits for what the daemon has learned
_LOOK_S = 0.2
_AT_ONCE_TOKENS = 8192  # more take so long to be written that others should go on meanwhile
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


async def aside(work: Callable[[], _Result]) -> _Result:
    """Do blocking work in a thread of its own, which keeps neither others waiting nor the program from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def end(result: _Result | None, error: Exception | None) -> None:
        if not done.cancelled():
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except Exception as error:  # raised again where it is awaited
            failed = error
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            loop.call_soon_threadsafe(end, result, failed)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await done


@dataclass(frozen=True, slots=True)
class Health:
    """How a daemon is; reason: why it serves nobody, empty where it does or soon will.

    silent_s: since its last sign of life; owed: requests that it has not answered.
    """

    state: Literal["ready", "working", "down", "stopped", "stuck"]
    silent_s: float = 0.0
    owed: int = 0
    reason: str = ""


class Supervisor:
    """A daemon that is there when it is needed.

    command: called for the command of each start. deadlines: of the daemon; a single request that takes
    longer than `total_s` is cancelled and leaves the daemon and the others alone. learned_profile: where
    the daemon's counts are written, None: nowhere. Raises what DaemonClient raises.
    """

    def __init__(
        self,
        command: Callable[[], Sequence[str]],
        deadlines: Deadlines,
        learned_profile: Path | None,
        on_loading: OnLoading = lambda stage, done, total: None,
    ) -> None:
        self._command = command
        self._deadlines = deadlines
        self._learned_profile = learned_profile
        self.restarts = 0  # of the daemon
        self._written = 0  # of the client's changes, those whose counts are written
        self.warnings: Counter[str] = Counter()  # of the daemons, by reason
        self._seldom = Seldom(_log)
        self._mail: _Mail | None = None
        self._pinging: asyncio.Task[float] | None = None
        self._lock = threading.Lock()  # of the client, its start, and the counts
        self._saving = threading.Lock()
        self._given_up = False  # saving, at the end
        self._failure: SparkError | None = None  # of the last start that failed
        self._failed_s = 0.0  # when
        self._client = self._start(on_loading)

    @property
    def ready(self) -> protocol.Ready:
        """What the daemon last said of itself."""
        return self._client.ready

    @property
    def alive(self) -> bool:
        """Whether the daemon runs; if not, the next request starts it."""
        return self._client.alive

    @property
    def total_s(self) -> float | None:
        """How long one request may take."""
        return self._deadlines.total_s

    def client(self, wanted: Callable[[], bool] = lambda: True) -> DaemonClient:
        """Return the daemon's client, after a start if it died.

        wanted: asked while another thread starts it; raises CancelledError where it is not any more. A start that fails
        fails for all who waited for it: each would start it anew else, one after the other.
        """
        asked_s = time.monotonic()
        while not self._lock.acquire(timeout=_LOOK_S):
            if not wanted():
                raise CancelledError("the request was taken back before it was sent")
        try:
            if not self._client.alive:
                if self._failure is not None and self._failed_s >= asked_s:
                    raise self._failure.with_traceback(None)
                try:
                    self._start_again()
                except SparkError as error:
                    self._failure, self._failed_s = error, time.monotonic()
                    raise
            return self._client
        finally:
            self._lock.release()

    def _start_again(self) -> None:
        """Start it, under the lock."""
        self._client.close()
        _log.warning("the daemon is gone; starting it again")
        try:
            self._client = self._start()
        except DeadlineError:
            raise
        except SparkError as error:  # whatever it is, no request is to blame for it
            message = f"the daemon cannot be started again: {error.message}"
            raise DaemonError(message, hint=error.hint) from error
        self.restarts += 1
        self._written = 0
        for reason in self._client.ready.info.get("reasons", ())[:1]:  # the device may be another
            _log.warning("%s", reason)

    def client_at_once(self) -> DaemonClient | None:
        """The same where that waits for nothing; None where it would."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._client if self._client.alive else None
        finally:
            self._lock.release()

    def mail(self, loop: asyncio.AbstractEventLoop) -> _Mail:
        """What threads hand to the event loop that serves."""
        if self._mail is None or self._mail.loop is not loop:
            self._mail = _Mail(loop)
        return self._mail

    async def health(self, patience_s: float) -> Health:
        """Find out how the daemon is, in `patience_s` at most; a ping is answered between two units of work."""
        client = self._client
        if not client.alive:
            return Health("down")
        before = client.cpu_ticks
        asked_s = time.monotonic()
        if not client.stopped and client.silent_s > _SOON_S:
            if self._pinging is None or self._pinging.done():
                self._pinging = asyncio.create_task(aside(client.ping))
                self._pinging.add_done_callback(lambda task: task.cancelled() or task.exception())  # it was looked at
            with contextlib.suppress(TimeoutError, SparkError):
                await asyncio.wait_for(asyncio.shield(self._pinging), patience_s)
        silent_s = client.silent_s
        if not client.alive:
            return Health("down")
        owed = client.owed
        if client.stopped:
            return Health("stopped", silent_s, owed, "the daemon's process is stopped (SIGSTOP)")
        if silent_s <= time.monotonic() - asked_s + _SOON_S:
            return Health("ready")
        if owed > 0 and (silent_s < _STUCK_S or client.cpu_ticks > before):  # a long step of a prompt
            return Health("working", silent_s, owed)
        return Health("stuck", silent_s, owed, f"the daemon has given no sign of life for {silent_s:.0f} s")

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters, none where the daemon is not there."""
        client = self._client
        return client.stats() if client.alive else {}

    def save(self) -> None:
        """Write what the daemon has learned, if there is anything new."""
        with self._saving:  # requests do not wait for it
            with self._lock:
                client, changes = self._client, self._client.changes
            if self._learned_profile is not None and changes > self._written and client.alive:
                report = client.profile("write", self._learned_profile)
                with self._lock:
                    if client is self._client:
                        self._written = changes
                for warning in report.get("warnings", ()):
                    _log.warning("%s", warning)

    def close(self) -> None:
        """Save, and end the daemon; one that does not answer keeps nobody from ending."""
        try:
            saving = threading.Thread(target=self._save_last, name="saving", daemon=True)
            saving.start()
            end_s = time.monotonic() + _SAVE_S
            while saving.is_alive() and time.monotonic() < end_s:
                saving.join(_LOOK_S)
                if self._client.stopped:
                    break
            if saving.is_alive():
                self._given_up = True
                _log.error("the profile could not be saved: the daemon does not answer")
        finally:
            self._client.close()

    def _save_last(self) -> None:
        try:
            self.save()
        except SparkError as error:
            if not self._given_up:
                _log.error("the profile could not be saved: %s", error.message)

    def _start(self, on_loading: OnLoading = lambda stage, done, total: None) -> DaemonClient:
        deadlines = replace(self._deadlines, total_s=None)
        return DaemonClient(self._command(), deadlines=deadlines, on_loading=on_loading, on_warning=self._warned)

    def _warned(self, reason: str, message: str) -> None:
        self.warnings[reason] += 1
        self._seldom.warning(reason, f"the daemon: {message}")


class _Mail:
    """Calls that threads hand to an event loop, which is woken once for all that wait.

    A thread that wakes it lets go of the interpreter's lock, and may get that back late.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._is_called = False

    def post(self, function: Callable[..., None], *arguments: object) -> None:
        """Have the loop call a function, behind those that were posted before."""
        self._waiting.append((function, arguments))
        if not self._is_called:
            self._is_called = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_called = False  # first: what is posted from now on calls again
        for _ in range(len(self._waiting)):
            function, arguments = self._waiting.popleft()
            function(*arguments)


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request that a daemon has."""

    client: DaemonClient
    id: int


Sent = SentRequest | Exception


class Generation:
    """A Generate request, whose events are awaited in the event loop.

    The daemon's reader hands them over. There is no thread unless something has to be waited for: a daemon that
    starts, a pipe that is full, the end of a daemon that is lost.

    grammar and the six fields after it, shared_by: as `protocol.Generate` has them. shared: what was sent of another
    request with the same prompt; its daemon alone is asked, dead or alive. sent: what was sent of this one, or why it
    could not be.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        tokens: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        *,
        grammar: str | None = None,
        reply_from: int | None = None,
        logprobs: int | None = None,
        draft: bool = True,
        stop_tokens: tuple[int, ...] | None = None,
        prediction: Sequence[int] | None = None,
        kv_recall: KVRecall | None = None,
        shared: SentRequest | None = None,
        shared_by: int = 0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._mail = supervisor.mail(self._loop)
        self._events: asyncio.Queue[protocol.Event | Exception] = asyncio.Queue()
        self._supervisor = supervisor
        self._total_s = supervisor.total_s
        self._since_s = time.monotonic()
        self._end_s = None if self._total_s is None else self._since_s + self._total_s
        self._sent: SentRequest | None = None
        self._cancelled = self._over = False
        self._answered = False  # no more events count, though some may not have been awaited
        self._ended = False  # the daemon's output has
        self._in_doubt = False  # the daemon seemed to be lost when it was looked at last
        self.sent: asyncio.Future[Sent] = self._loop.create_future()
        self._wish = functools.partial(
            protocol.Generate,
            tokens=tuple(tokens),
            max_tokens=max_tokens,
            sampling=sampling,
            grammar=grammar,
            reply_from=reply_from,
            logprobs=logprobs,
            same_prompt_as=None if shared is None else shared.id,
            shared_by=shared_by,
            draft=draft,
            stop_tokens=stop_tokens,
            prediction=tuple(prediction) if prediction else None,
            kv_recall=kv_recall,
        )
        self._send(supervisor.client_at_once() if shared is None else shared.client, len(tokens))

    def _is_wanted(self) -> bool:
        return not self._cancelled

    async def next(self, patience_s: float) -> protocol.Event | None:
        """Wait for the next event, `patience_s` at most (then None); raises what the request failed with."""
        left_s = patience_s if self._end_s is None else min(patience_s, self._end_s - time.monotonic())
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                event = await self._events.get()
        except TimeoutError:
            if left_s < patience_s:
                raise DeadlineError(f"the reply was not finished after {self._total_s:g} s") from None
            return None
        self._over = isinstance(event, protocol.Done | Exception)
        if isinstance(event, Exception):
            raise event
        return event

    def undelivered(self) -> list[protocol.Event]:
        """What has come and was not awaited any more."""
        found = []
        while not self._events.empty():
            event = self._events.get_nowait()
            if not isinstance(event, Exception):
                found.append(event)
        return found

    def cancel(self) -> None:
        """Have the daemon end it, unless it is over."""
        self._cancelled = True
        if self._sent is not None and not self._over:
            self._sent.client.cancel_soon(self._sent.id)

    def put(self, event: protocol.Event | None, /) -> None:
        """Take an event of the daemon, in the thread that reads them."""
        self._mail.post(self._take, event)

    # --- in the event loop ------------------------------------------------------------------------

    def _send(self, client: DaemonClient | None, n_tokens: int) -> None:
        """Send it, to a client that is to be found where there is none."""
        if client is None or n_tokens > _AT_ONCE_TOKENS:
            self._aside(functools.partial(self._send_waiting, client))
            return
        request = self._wish(client.number())
        sent = SentRequest(client, request.id)
        try:
            rest = client.send_at_once(request, self, self._is_wanted)
        except SparkError as error:
            self._fail(error)
            return
        if rest is None:
            self._begin(sent)
        else:
            self._aside(functools.partial(self._send_rest, sent, rest))

    def _begin(self, sent: SentRequest) -> None:
        self._sent = sent
        if not self.sent.done():
            self.sent.set_result(sent)
        if self._cancelled:
            sent.client.cancel_soon(sent.id)
        self._watch()

    def _take(self, event: protocol.Event | None) -> None:
        self._in_doubt = False
        if self._answered:
            return
        if event is None:
            self._ended = True
            if self._sent is not None:
                self._watch()
        elif isinstance(event, protocol.Error):
            self._fail(from_code(event.code, event.message, event.hint))
        else:
            self._answered = isinstance(event, protocol.Done)
            self._events.put_nowait(event)

    def _fail(self, error: Exception) -> None:
        """Have it fail, where it is awaited."""
        self._answered = True
        if not self.sent.done():
            self.sent.set_result(error)
        self._events.put_nowait(error)

    def _watch(self) -> None:
        """Look after the daemon until it has answered, also while nobody awaits anything."""
        if self._ended and self._sent is not None:
            self._aside(functools.partial(self._find_out, self._sent))
        elif not self._answered:
            self._loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        if self._answered or self._ended or self._sent is None:
            return
        before, self._in_doubt = self._in_doubt, self._sent.client.seems_lost(self._since_s)
        if before and self._in_doubt:  # so nothing is left that it has written
            self._aside(functools.partial(self._find_out, self._sent))
        else:
            self._watch()

    # --- in threads -------------------------------------------------------------------------------

    def _send_waiting(self, client: DaemonClient | None) -> None:
        client = client or self._supervisor.client(self._is_wanted)
        request = self._wish(client.number())
        client.send(request, self, self._is_wanted)
        self._mail.post(self._begin, SentRequest(client, request.id))

    def _send_rest(self, sent: SentRequest, rest: Callable[[], None]) -> None:
        rest()
        self._mail.post(self._begin, sent)

    def _find_out(self, sent: SentRequest) -> None:
        error = sent.client.lost(sent.id, self._since_s)
        if error is not None:
            raise error
        self._mail.post(self._watch)

    def _aside(self, work: Callable[[], None]) -> None:
        """Do what may take a while; what it raises is what the request fails with."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # raised again by `next`, in the event loop
                self._mail.post(self._fail, error)

        threading.Thread(target=run, name="generation", daemon=True).start()
