"""The loop between a schedule and a pool: it staffs places, hands out leases, and says what an end or a silence means.

It has no cluster and no clock of its own. A *job* says what the tasks are and takes what was made of them, one lease at
a time; so whatever becomes of workers, what is counted is counted once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.ground.errors import DaemonError, DeadlineError, SparkError, WrongModelError
from spark.cluster.pool import Alive, Died, Finished, Place, Pool, Ready, Refused, Result, Task
from spark.cluster.schedule import Schedule, SetAside
from spark.console import note

STAFF_S = 2.0  # between looks at the cluster's nodes
LEASES_PER_S = 200.0  # of all workers together, at most about: what leases cost the driver
DEATHS_AT_START = 3  # of every place's workers, before any was ready: then none will be
_BACKOFF_S, _MOST_BACKOFF_S = 0.5, 30.0
_POLL_S = 0.5


class Job(Protocol):
    """What becomes of tasks."""

    def add(self, tasks: Sequence[Task], result: Result) -> None:
        """Take what was made of tasks, which it never was before."""
        ...

    def set_aside(self, found: SetAside) -> None:
        """A task will not be done."""
        ...

    def tick(self, now_s: float, driver: Driver) -> None:
        """Now and then: show progress, save."""
        ...


@dataclass(slots=True)
class Share:
    """What the workers of a place did. lost: workers that ended there before their time.

    busy_s: that they worked on tasks that were done; idle_s: the rest of the time that they could have.
    """

    node: str
    index: int
    tasks: int = 0
    cost: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    lost: int = 0

    @property
    def rate(self) -> float:
        """Cost a second, while it had work."""
        return self.cost / self.busy_s if self.busy_s else 0.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. ready_s: until one of the cluster's workers is ready, again and again.

    silence_s: of a worker that is asked. ask_s: between two questions.
    """

    ready_s: float = 600.0
    silence_s: float = 600.0
    ask_s: float = 5.0


@dataclass(slots=True)
class _Worker:
    place: Place
    since_s: float
    heard_s: float
    ready: bool = False
    fed: int = 0
    reads: bool = True
    hired_s: float = math.nan
    busy_s: float = 0.0


@dataclass(slots=True)
class _Post:
    """A place that has, had or shall have a worker."""

    share: Share
    worker: str = ""
    deaths: int = 0  # in a row, without anything done
    not_before_s: float = -math.inf


class Driver:
    """Runs a job on a pool.

    refusal: why a worker that says so of itself, after the first has said so, cannot take part; empty where it can. The
    first is compared with itself. n_workers: at most; None: as many as there are places. After `run`, `shares` says
    what each place did and `refused` why nodes had no part, by their names.
    """

    def __init__(
        self,
        pool: Pool,
        refusal: Callable[[Mapping[str, Any], Mapping[str, Any]], str],
        patience: Patience,
        *,
        n_workers: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._refusal_of, self._patience, self._clock = pool, refusal, patience, clock
        self._small: Callable[[Task], Task] | None = None
        self._job: Job | None = None
        self._info: Mapping[str, Any] | None = None
        self._most = n_workers or math.inf
        self._posts: dict[tuple[str, int], _Post] = {}
        self._workers: dict[str, _Worker] = {}
        self._schedule: Schedule | None = None
        self._started = 0
        self._n_ready = 0
        self._staff_at_s = -math.inf
        self._refusal: SparkError | None = None
        self._last_words = ""
        self._said: set[str] = set()
        self.refused: dict[str, str] = {}

    @property
    def shares(self) -> list[Share]:
        """Of every place that had a worker, in the order of their names."""
        return sorted((post.share for post in self._posts.values()), key=lambda share: (share.node, share.index))

    @property
    def fed(self) -> int:
        """Cost that is done of tasks that are not."""
        return sum(worker.fed for worker in self._workers.values())

    def first(self) -> Mapping[str, Any]:
        """Start workers; what the first one that is ready says of itself. Raises what `run` does."""
        self._loop(lambda: self._info is not None)
        assert self._info is not None
        return self._info

    def run(self, tasks: Iterator[Task], job: Job, small: Callable[[Task], Task] | None = None) -> None:
        """Do all tasks, or set them aside; once.

        small: a task as it is for workers that read themselves what it takes; those who cannot get whole ones.
        Raises DeadlineError where no worker is ready for `ready_s`, DaemonError where none ever starts, the refusal
        where every place was refused, and the error of a task that no worker would do better at.
        """
        assert self._schedule is None
        self._job, self._schedule, self._small = job, Schedule(tasks), small
        ready = [worker for worker, known in self._workers.items() if known.ready]
        for worker in ready:
            self._hire(worker)
        for worker in ready:
            self._feed(worker)
        try:
            self._loop(lambda: self._schedule is not None and self._schedule.over)
        finally:
            for known in self._workers.values():
                self._settle(known)

    def _loop(self, ended: Callable[[], bool]) -> None:
        alone_s = self._clock()
        asked_s = self._staff_at_s = -math.inf
        while not ended():
            now_s = self._clock()
            if now_s >= self._staff_at_s:
                self._staff_at_s = now_s + STAFF_S
                self._staff(now_s)
            if now_s >= asked_s + self._patience.ask_s:
                self._ask(now_s)
                asked_s = now_s
            if self._n_ready:
                alone_s = now_s
            elif now_s > alone_s + self._patience.ready_s:
                raise DeadlineError(
                    f"no worker of the cluster was ready for {self._patience.ready_s:g} s",
                    hint=self._last_words or "are its nodes up, and do they have what the workers ask for?",
                )
            for event in self._pool.poll(min(_POLL_S, self._patience.ready_s)):
                match event:
                    case Finished():
                        self._finished(event)
                    case Alive(worker, fed):
                        if (known := self._workers.get(worker)) is not None:
                            known.heard_s, known.fed = self._clock(), fed
                    case Ready(worker, info):
                        self._ready(worker, info)
                    case Refused(worker, error):
                        self._refuse(worker, error)
                        alone_s = self._clock()  # it was not silent, and another place has its time
                    case Died(worker, reason, lost_only):
                        self._lose(worker, reason, blame=not lost_only)
                        self._pool.kill(worker)  # which may be cut off alone, and still have its GPU
            if self._job is not None:
                self._job.tick(self._clock(), self)

    # --- staff ------------------------------------------------------------------------------------

    def _staff(self, now_s: float) -> None:
        """Start a worker wherever one can be and none is."""
        places = self._pool.places()
        for place in places:
            if len(self._workers) >= self._most:
                return
            post = self._posts.setdefault((place.node, place.index), _Post(Share(place.name, place.index)))
            if post.worker or place.name in self.refused or now_s < post.not_before_s:
                continue
            self._started += 1
            worker = f"{place.name}/{place.index}.{self._started}"
            post.worker = worker
            self._workers[worker] = _Worker(place, now_s, now_s)
            self._pool.start(worker, place)
        usable = any(place.name not in self.refused for place in places)
        if self._refusal is not None and places and not usable and not self._workers:
            raise self._refusal
        if self._info is None and places and all(post.deaths >= DEATHS_AT_START for post in self._posts.values()):
            raise DaemonError("no worker of the cluster starts", hint=self._last_words)

    def _ready(self, worker: str, info: Mapping[str, Any]) -> None:
        known = self._workers.get(worker)
        if known is None:
            return
        if why := self._refusal_of(self._info or info, info):
            self._refuse(worker, WrongModelError(f"{known.place.name}: {why}", hint="the other nodes go on without it"))
            return
        if unseen := info.get("unseen"):
            self._note_once(f"node {known.place.name}: {unseen}")
        self._info = self._info or info
        known.ready, known.heard_s = True, self._clock()
        self._n_ready += 1
        if self._schedule is not None:
            self._hire(worker)
            self._feed(worker)

    def _note_once(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            note(words)

    def _refuse(self, worker: str, error: SparkError) -> None:
        """A node whose workers cannot take part gets none any more."""
        known = self._workers.get(worker)
        if known is None:
            return
        name = known.place.name
        if name not in self.refused:
            self.refused[name] = error.message
            self._refusal = self._refusal or error
            note(f"node {name} is refused: {error.message.removeprefix(f'{name}: ')}")
        self._drop(worker)
        self._pool.kill(worker)

    def _drop(self, worker: str) -> _Post:
        """Forget a worker; its post is open."""
        known = self._workers.pop(worker)
        self._n_ready -= known.ready
        post = self._posts[known.place.node, known.place.index]
        post.worker = ""
        self._settle(known)
        return post

    def _settle(self, known: _Worker) -> None:
        """Count what a worker's time was, up to now, into its place's share."""
        if not math.isnan(known.hired_s):
            share = self._posts[known.place.node, known.place.index].share
            share.idle_s += max(0.0, self._clock() - known.hired_s - known.busy_s)
            known.hired_s, known.busy_s = math.nan, 0.0

    # --- work -------------------------------------------------------------------------------------

    def _hire(self, worker: str) -> None:
        assert self._schedule is not None
        self._schedule.lease_s = self._n_ready / LEASES_PER_S
        self._schedule.hire(worker, self._workers[worker].place.name)
        self._workers[worker].hired_s = self._clock()

    def _feed(self, worker: str) -> None:
        assert self._schedule is not None
        while (lease := self._schedule.next(worker)) is not None:
            self._send(worker, lease.id, list(lease.tasks.values()))

    def _send(self, worker: str, lease: int, tasks: list[Task]) -> None:
        if self._small is not None and self._workers[worker].reads:
            tasks = [self._small(task) for task in tasks]
        self._pool.send(worker, lease, tasks)

    def _finished(self, event: Finished) -> None:
        known, result = self._workers.get(event.worker), event.result
        if known is None or self._schedule is None or self._job is None:
            return  # it was given up, and its tasks are others'
        known.heard_s, known.fed = self._clock(), 0
        tasks = self._schedule.finish(event.lease, result.done, result.seconds)
        if tasks:
            self._job.add(tasks, result)
            post = self._posts[known.place.node, known.place.index]
            post.deaths = 0
            post.share.tasks += len(tasks)
            post.share.cost += sum(task.cost for task in tasks)
            post.share.busy_s += result.seconds
            known.busy_s += result.seconds
        if result.error is not None:
            result.error.message = f"node {known.place.name}: {result.error.message}"
            raise result.error
        if result.culprit is not None:
            self._lose(event.worker, result.culprit[1], result.culprit[0])
            self._pool.kill(event.worker)
        elif result.unread is not None:
            known.reads = False
            if result.unread:
                self._note_once(f"node {known.place.name}: windows are sent to it: {result.unread}")
            if rest := self._schedule.rest(event.lease):
                self._send(event.worker, event.lease, rest)
            self._feed(event.worker)
        else:
            self._feed(event.worker)

    def _lose(self, worker: str, reason: str, culprit: int | None = None, *, blame: bool = True) -> None:
        known = self._workers.get(worker)
        if known is None:
            return
        post = self._drop(worker)
        post.share.lost += 1
        post.deaths += 1
        name = known.place.name
        self._last_words = f"the last that was heard, of {name}: {reason}"
        note(f"node {name}: a worker was lost: {reason}")
        post.not_before_s = self._clock() + min(_MOST_BACKOFF_S, _BACKOFF_S * 2 ** (post.deaths - 1))
        self._staff_at_s = min(self._staff_at_s, post.not_before_s)
        if self._schedule is None or self._job is None or not known.ready:
            return
        for found in self._schedule.lose(worker, reason, culprit, blame=blame):
            note(f"{found.task.name} is set aside, two workers ended at it: {'; '.join(found.reasons)}")
            self._job.set_aside(found)
        for other, each in self._workers.items():  # those who had nothing to do, now perhaps have
            if each.ready:
                self._feed(other)

    def _ask(self, now_s: float) -> None:
        """Ask all workers for a sign of life, and give up those who have been silent."""
        for worker, known in list(self._workers.items()):
            if not known.ready:
                # The daemon has its own deadline; where a worker cannot even start, there is none.
                if now_s > known.since_s + self._patience.ready_s + self._patience.ask_s:
                    self._lose(worker, f"it was not ready after {self._patience.ready_s:g} s")
                    self._pool.kill(worker)
            elif now_s > known.heard_s + self._patience.silence_s:
                self._lose(worker, f"no sign of life for {self._patience.silence_s:g} s")
                self._pool.kill(worker)
            else:
                self._pool.ping(worker)
