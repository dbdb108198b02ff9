"""A cluster that is not there: workers that answer after a time that passes at once, for tests of the driver."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spark.cluster.pool import Alive, Died, Event, Finished, Place, Ready, Result, Task


@dataclass(slots=True)
class _Worker:
    place: Place
    queue: deque[tuple[int, Sequence[Task]]] = field(default_factory=deque)
    idle_since_s: float | None = None
    frozen: bool = False


class SimulatedPool:
    """A `Pool` with a clock of its own, `clock`.

    nodes: places of each. seconds: that a task takes; made: what a worker makes of tasks. start_s: of a worker;
    latency_s: of a message. deadly: tasks that a worker ends at; told: its daemon alone does, and the worker tells.
    own_s: real seconds that this class took, which are not the driver's.
    """

    def __init__(
        self,
        nodes: dict[str, int],
        seconds: Callable[[Task], float],
        made: Callable[[Sequence[Task]], object],
        *,
        start_s: float = 1.0,
        latency_s: float = 0.002,
        deadly: frozenset[int] = frozenset(),
        told: bool = False,
    ) -> None:
        self.nodes = dict(nodes)
        self._seconds, self._made = seconds, made
        self._start_s, self._latency_s = start_s, latency_s
        self.deadly, self._told = deadly, told
        self._now_s = 0.0
        self._events: list[tuple[float, int, str, Event | Callable[[], None]]] = []
        self._order = itertools.count()
        self.workers: dict[str, _Worker] = {}
        self.idle_s = self.worked_s = self.own_s = 0.0
        self.sent = 0
        self.late: list[Event] = []  # of workers that were given up, and are heard all the same

    def clock(self) -> float:
        """The time there."""
        return self._now_s

    def places(self) -> list[Place]:
        """See `Pool`."""
        return [Place(node, node, i) for node, n in self.nodes.items() for i in range(n)]

    def start(self, worker: str, place: Place) -> None:
        """See `Pool`."""
        self.workers[worker] = _Worker(place)
        self.at(self._start_s, worker, self.greeting(worker, place))

    def greeting(self, worker: str, place: Place) -> Event:
        """What becomes of a start."""
        return Ready(worker, {})

    def send(self, worker: str, lease: int, tasks: Sequence[Task]) -> None:
        """See `Pool`."""
        began_s = time.perf_counter()
        self.sent += 1
        mine = self.workers.get(worker)
        if mine is not None:
            mine.queue.append((lease, tasks))
            if len(mine.queue) == 1:
                self._work(worker, self._latency_s)
        self.own_s += time.perf_counter() - began_s

    def ping(self, worker: str) -> None:
        """See `Pool`."""
        mine = self.workers.get(worker)
        if mine is not None and not mine.frozen:
            self.at(self._latency_s, worker, Alive(worker, 0))

    def kill(self, worker: str) -> None:
        """See `Pool`."""
        self.workers.pop(worker, None)

    def lose(self, worker: str, reason: str = "killed") -> None:
        """A worker ends, now."""
        self.at(0.0, worker, Died(worker, reason))

    def freeze(self, worker: str) -> None:
        """Nothing more is heard of a worker, but what it works on is done, and told much later."""
        self.workers[worker].frozen = True

    def remove(self, node: str) -> None:
        """A node goes, with its workers."""
        self.nodes.pop(node, None)
        for worker, each in self.workers.items():
            if each.place.node == node:
                self.lose(worker, "its node is gone")

    def call(self, after_s: float, what: Callable[[], None]) -> None:
        """Have something happen."""
        heapq.heappush(self._events, (self._now_s + after_s, next(self._order), "", what))

    def at(self, after_s: float, worker: str, event: Event) -> None:
        """Tell something of a worker after a time."""
        heapq.heappush(self._events, (self._now_s + after_s, next(self._order), worker, event))

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Pool`; the time passes at once."""
        began_s = time.perf_counter()
        end_s = self._now_s + timeout_s
        found: list[Event] = []
        if self._events and self._events[0][0] <= end_s:
            self._now_s = max(self._now_s, self._events[0][0])
            while self._events and self._events[0][0] <= self._now_s:
                _, _, worker, event = heapq.heappop(self._events)
                if callable(event):
                    event()
                elif self._happens(worker, event):
                    found.append(event)
        else:
            self._now_s = end_s
        found += [self.late.pop() for _ in range(len(self.late))]
        self.own_s += time.perf_counter() - began_s
        return found

    def close(self) -> None:
        """See `Pool`."""
        self.workers.clear()

    def _happens(self, worker: str, event: Event) -> bool:
        mine = self.workers.get(worker)
        if mine is None:
            if isinstance(event, Finished):
                self.late.append(event)
            return False
        match event:
            case Ready():
                mine.idle_since_s = self._now_s
            case Died():
                del self.workers[worker]
            case Finished():
                mine.queue.popleft()
                mine.idle_since_s = self._now_s
                if event.result.culprit is None and mine.queue:
                    self._work(worker, 0.0)
        return not mine.frozen

    def _work(self, worker: str, after_s: float) -> None:
        """A worker begins the first of its leases."""
        mine = self.workers[worker]
        if mine.idle_since_s is not None:
            self.idle_s += self._now_s + after_s - mine.idle_since_s
            mine.idle_since_s = None
        lease, tasks = mine.queue[0]
        bad = next((i for i, task in enumerate(tasks) if task.number in self.deadly), None)
        if bad is None:
            busy_s = sum(map(self._seconds, tasks))
            self.worked_s += busy_s
            result = Result(tuple(task.number for task in tasks), self._made(tasks), seconds=busy_s)
            self.at(after_s + busy_s + self._latency_s, worker, Finished(worker, lease, result))
            return
        busy_s = sum(map(self._seconds, tasks[: bad + 1]))
        if self._told:
            done = tuple(task.number for task in tasks[:bad])
            value = self._made(tasks[:bad]) if done else None
            culprit = tasks[bad].number, "the daemon was killed by signal 9"
            result = Result(done, value, culprit, seconds=busy_s)
            self.at(after_s + busy_s, worker, Finished(worker, lease, result))
        else:
            self.at(after_s + busy_s, worker, Died(worker, "killed by signal 9"))
