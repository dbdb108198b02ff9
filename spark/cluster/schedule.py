"""Who is given which tasks: long ones first, each done once, whatever happens to workers. Pure bookkeeping.

Tasks are read from their source as there is room for them in a pool, and the longest in the pool goes next. So what is
held is bounded, tasks that all fit are handed out in order of length, and of longer lists the end is short ones.

A *lease* is some tasks that a worker has. It may hold two: the one that it works on and the next, so that no worker
waits for the driver. What a worker leaves undone goes back. The task that it worked on is *blamed* for its end where it
can only be that one; a task of a lease of several is first tried alone. One that two workers ended at is set aside.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from spark.cluster.pool import Task

DEATHS = 2  # of workers, before the task that they ended at is set aside
DEPTH = 2  # leases of a worker
POOL_COST = 16 << 20  # tokens, in windows: 80 MiB
POOL_TASKS = 1 << 16
FLIGHT_COST = 64 << 20  # tokens of all leases together, at most about: 320 MiB, and as much in the cluster's library


@dataclass(slots=True)
class Lease:
    """Tasks that a worker has and has not finished, by number."""

    id: int
    worker: str
    tasks: dict[int, Task]
    cost: int


@dataclass(slots=True)
class _Worker:
    node: str
    leases: OrderedDict[int, Lease] = field(default_factory=OrderedDict)
    rate: float = 0.0  # cost a second, of what it finished


@dataclass(frozen=True, slots=True)
class SetAside:
    """A task that nobody gets any more. reasons: how each worker that had it ended, with its node."""

    task: Task
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Blame:
    node: str
    reason: str


class Schedule:
    """Tasks on their way to workers and back.

    tasks: numbered, each number once. lease_s: how long a worker shall be busy with a lease, as far as its speed is
    known; 0: a task each. The more workers, the longer it must be, since leases are what costs the driver time.
    """

    def __init__(
        self, tasks: Iterator[Task], *, lease_s: float = 0.0, pool_cost: int = POOL_COST, pool_tasks: int = POOL_TASKS
    ) -> None:
        self._source = tasks
        self._exhausted = False
        self.lease_s = lease_s
        self._most_cost, self._most_tasks = pool_cost, pool_tasks
        self._pool: list[tuple[int, int, Task]] = []  # a heap of (-cost, number, task)
        self._pool_cost = 0
        self._alone: OrderedDict[int, Task] = OrderedDict()  # to be tried in leases of their own, first of all
        self._blames: dict[int, list[_Blame]] = {}
        self._workers: dict[str, _Worker] = {}
        self._leases: dict[int, Lease] = {}
        self._ids = itertools.count(1)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do, or in anybody's hands."""
        self._fill()
        return self._exhausted and not (self._pool or self._alone or self._leases)

    @property
    def held(self) -> int:
        """Tasks that are read and not done."""
        return len(self._pool) + len(self._alone) + sum(len(lease.tasks) for lease in self._leases.values())

    def hire(self, worker: str, node: str) -> None:
        """A worker, whose name nobody had, can be given leases."""
        assert worker not in self._workers
        self._workers[worker] = _Worker(node)

    def next(self, worker: str) -> Lease | None:
        """The next lease for a worker; None where it has enough, or nothing is left for it."""
        mine = self._workers[worker]
        if len(mine.leases) >= DEPTH:
            return None
        if (task := self._retried(mine)) is not None:
            return self._lease(worker, [task])
        self._fill()
        # The last tasks go to those who have none.
        if not self._pool or (mine.leases and self._exhausted and len(self._pool) < len(self._workers)):
            return None
        budget = min(mine.rate * self.lease_s, FLIGHT_COST / (DEPTH * len(self._workers)))
        if self._exhausted:
            budget = min(budget, self._pool_cost / (2 * len(self._workers)))
        tasks, cost = [self._pop()], 0
        cost = tasks[0].cost
        while self._pool and cost - self._pool[0][0] <= budget:
            tasks.append(self._pop())
            cost += tasks[-1].cost
        return self._lease(worker, tasks)

    def finish(self, lease: int, done: Collection[int], seconds: float = 0.0) -> list[Task]:
        """Tasks of a lease are done, which they are now for the first time; none of a lease that was taken back."""
        found = self._leases.get(lease)
        if found is None:
            return []
        tasks = [found.tasks.pop(number) for number in done if number in found.tasks]
        mine = self._workers[found.worker]
        if seconds > 0 and tasks:
            rate = sum(task.cost for task in tasks) / seconds
            mine.rate = rate if not mine.rate else 0.7 * mine.rate + 0.3 * rate
        if not found.tasks:
            del self._leases[lease], mine.leases[lease]
        for task in tasks:
            self._blames.pop(task.number, None)
        return tasks

    def rest(self, lease: int) -> list[Task]:
        """The tasks of a lease that are not done, in its order; none of one that was taken back."""
        found = self._leases.get(lease)
        return [] if found is None else list(found.tasks.values())

    def lose(self, worker: str, reason: str, culprit: int | None = None, *, blame: bool = True) -> list[SetAside]:
        """A worker is gone, and what it had goes to others; what is set aside by that.

        culprit: the task that it ended at, where that is known. blame: whether its end may have to do with a task.
        """
        mine = self._workers.pop(worker, None)
        if mine is None:
            return []
        aside = []
        for place, lease in enumerate(mine.leases.values()):
            del self._leases[lease.id]
            worked_on = place == 0 and blame
            several = len(lease.tasks) > 1 and culprit not in lease.tasks
            for number, task in lease.tasks.items():
                if worked_on and several:
                    self._alone[number] = task
                elif worked_on and (culprit is None or number == culprit):
                    aside += self._blamed(task, _Blame(mine.node, reason))
                elif number in self._blames:
                    self._alone[number] = task
                else:
                    self._push(task)
        return aside

    def _blamed(self, task: Task, blame: _Blame) -> list[SetAside]:
        blames = self._blames.setdefault(task.number, [])
        blames.append(blame)
        if len(blames) < DEATHS:
            self._alone[task.number] = task
            return []
        del self._blames[task.number]
        return [SetAside(task, tuple(f"{each.node}: {each.reason}" for each in blames))]

    def _retried(self, mine: _Worker) -> Task | None:
        """A task to be tried alone: on another node than it ended on, where workers are on any."""
        nodes = {worker.node for worker in self._workers.values()} if self._alone else set()
        for number, task in self._alone.items():
            blamed = {blame.node for blame in self._blames.get(number, ())}
            if mine.node not in blamed or nodes <= blamed:
                del self._alone[number]
                return task
        return None

    def _lease(self, worker: str, tasks: list[Task]) -> Lease:
        lease = Lease(next(self._ids), worker, {t.number: t for t in tasks}, sum(t.cost for t in tasks))
        self._leases[lease.id] = self._workers[worker].leases[lease.id] = lease
        return lease

    def _fill(self) -> None:
        while not self._exhausted and self._pool_cost < self._most_cost and len(self._pool) < self._most_tasks:
            task = next(self._source, None)
            if task is None:
                self._exhausted = True
            else:
                self._push(task)

    def _push(self, task: Task) -> None:
        heapq.heappush(self._pool, (-task.cost, task.number, task))
        self._pool_cost += task.cost

    def _pop(self) -> Task:
        task = heapq.heappop(self._pool)[2]
        self._pool_cost -= task.cost
        return task
