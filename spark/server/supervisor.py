"""The daemon as an asynchronous server sees it: restarted when it died, its events awaited."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from engine.ground import protocol
from engine.ground.errors import CancelledError, DaemonError, DeadlineError, SparkError
from engine.ground.sampling import Sampling
from spark.daemon.client import DaemonClient, Deadlines, OnLoading, RequestStream
from spark.server.seldom import Seldom

_SOON_S = 2.0  # whoever was heard of so shortly ago need not be asked
_STUCK_S = 60.0  # a step that computes nothing here and says nothing for so long is no work
_SAVE_S = 30.0  # how long the end waits for what the daemon has learned
_LOOK_S = 0.2
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
        self._served = 0  # requests of which the counts are not written yet
        self.warnings: Counter[str] = Counter()  # of the daemons, by reason
        self._seldom = Seldom(_log)
        self._pinging: asyncio.Task[float] | None = None
        self._lock = threading.Lock()  # of the client, its start, and the counts
        self._saving = threading.Lock()
        self._given_up = False  # saving, at the end
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
        """Return the daemon's client, after a start if it died; counts as a request served.

        wanted: asked while another thread starts it; raises CancelledError where it is not any more.
        """
        while not self._lock.acquire(timeout=_LOOK_S):
            if not wanted():
                raise CancelledError("the request was taken back before it was sent")
        try:
            if not self._client.alive:
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
                for reason in self._client.ready.info.get("reasons", ())[:1]:  # the device may be another
                    _log.warning("%s", reason)
            self._served += 1
            return self._client
        finally:
            self._lock.release()

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
                client, served = self._client, self._served
            if self._learned_profile is not None and served and client.alive:
                report = client.profile("write", self._learned_profile)
                with self._lock:
                    self._served -= served
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


Sent = RequestStream | Exception


class Generation:
    """A Generate request, followed by a thread of its own, whose events are awaited in the event loop.

    grammar and the four fields after it: as `protocol.Generate` has them. shared: what was sent of another request with
    the same prompt; its daemon alone is asked, dead or alive. sent: what was sent of this one, or why it could not be.
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
        prediction: Sequence[int] | None = None,
        shared: RequestStream | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[protocol.Event | BaseException] = asyncio.Queue()
        self._total_s = supervisor.total_s
        self._end_s = None if self._total_s is None else time.monotonic() + self._total_s
        self._stream: RequestStream | None = None
        self._cancelled = self._over = False
        self.sent: asyncio.Future[Sent] = self._loop.create_future()
        wanted: dict[str, Any] = {"grammar": grammar, "reply_from": reply_from, "logprobs": logprobs}
        wanted |= {"tokens": tokens, "max_tokens": max_tokens, "sampling": sampling}
        wanted |= {"draft": draft, "prediction": prediction}
        threading.Thread(target=self._follow, args=(supervisor, wanted, shared), name="generation", daemon=True).start()

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
        self._over = isinstance(event, protocol.Done | BaseException)
        if isinstance(event, BaseException):
            raise event
        return event

    def undelivered(self) -> list[protocol.Event]:
        """What has come and was not awaited any more."""
        found = []
        while not self._events.empty():
            event = self._events.get_nowait()
            if not isinstance(event, BaseException):
                found.append(event)
        return found

    def cancel(self) -> None:
        """Have the daemon end it, unless it is over."""
        self._cancelled = True
        if self._stream is not None and not self._over:
            self._stream.client.cancel_soon(self._stream.id)

    def _follow(self, supervisor: Supervisor, wanted: dict[str, Any], shared: RequestStream | None) -> None:
        try:
            if shared is None:
                stream = supervisor.client(self._is_wanted).generate(**wanted, wanted=self._is_wanted)
            else:
                stream = shared.client.generate(**wanted, same_prompt_as=shared.id, wanted=self._is_wanted)
            self._stream = stream
            self._call(self._set_sent, stream)
            if self._cancelled:
                stream.client.cancel_soon(stream.id)
            for event in stream:
                self._call(self._events.put_nowait, event)
        except Exception as error:  # raised again by `next`, in the event loop
            self._call(self._set_sent, error)
            self._call(self._events.put_nowait, error)

    def _set_sent(self, sent: Sent) -> None:
        if not self.sent.done():
            self.sent.set_result(sent)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens
            self._loop.call_soon_threadsafe(function, *arguments)
