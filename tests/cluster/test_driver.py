"""The driver on a cluster that is not there: whatever happens to it, every task is counted once, and the run ends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cluster_pool import SimulatedPool
from engine.ground.errors import CapacityError, DaemonError, DeadlineError, NumericalError, WrongModelError
from spark.cluster import driver as driver_module
from spark.cluster.driver import DEATHS_AT_START, Driver, Patience
from spark.cluster.pool import Died, Event, Finished, Ready, Refused, Result, Task
from spark.cluster.schedule import SetAside

PATIENCE = Patience(ready_s=30, silence_s=20, ask_s=2)


class Counted:
    """A job that counts what comes back."""

    def __init__(self) -> None:
        self.counted: Counter[int] = Counter()
        self.values: Counter[int] = Counter()
        self.aside: list[SetAside] = []
        self.ticks = 0

    def add(self, tasks: Sequence[Task], result: Result) -> None:
        self.counted.update(task.number for task in tasks)
        self.values.update(result.value)

    def set_aside(self, found: SetAside) -> None:
        self.aside.append(found)

    def tick(self, now_s: float, driver: Driver) -> None:
        self.ticks += 1


def some(n: int) -> Iterator[Task]:
    return (Task(i, 1 + i * 7 % 50, f"task {i}") for i in range(n))


def pool(nodes: dict[str, int], **options) -> SimulatedPool:
    return SimulatedPool(nodes, lambda task: task.cost / 20, lambda tasks: [task.number for task in tasks], **options)


def allowed(first: object, info: object) -> str:
    return ""


def run(on: SimulatedPool, n: int, patience: Patience = PATIENCE, **options) -> tuple[Counted, Driver]:
    job, driver = Counted(), Driver(on, allowed, patience, clock=on.clock, **options)
    driver.first()
    driver.run(some(n), job)
    return job, driver


@pytest.mark.parametrize("nodes", [{"a": 1}, {"a": 2}, {"a": 1, "b": 3}])
def test_everything_is_done_and_shared(nodes: dict[str, int]) -> None:
    on = pool(nodes)
    job, driver = run(on, 200)
    assert job.counted == job.values == Counter(range(200)) and not job.aside
    assert len(driver.shares) == sum(nodes.values())
    assert sum(share.tasks for share in driver.shares) == 200
    total = sum(task.cost for task in some(200))
    assert sum(share.cost for share in driver.shares) == total
    assert all(share.cost > 0.8 * total / len(driver.shares) for share in driver.shares)
    assert on.idle_s < 0.03 * (on.idle_s + on.worked_s)


class Blind(SimulatedPool):
    """Workers of some nodes cannot read what tasks take, and say so."""

    blind: frozenset[str] = frozenset()
    small = 0

    def _work(self, worker: str, after_s: float) -> None:
        lease, tasks = self.workers[worker].queue[0]
        unread = next((i for i, task in enumerate(tasks) if task.payload == "small"), None)
        self.small += unread is not None
        if unread is None or worker.split("/")[0] not in self.blind:
            super()._work(worker, after_s)
            return
        done = tuple(task.number for task in tasks[:unread])
        result = Result(done, list(done), unread="it is another file here", seconds=0.1)
        self.at(after_s + 0.1, worker, Finished(worker, lease, result))


@pytest.mark.parametrize("blind", ["", "a", "ab"])
@pytest.mark.parametrize("lease_s", [0.0, 5.0])
def test_who_cannot_read_is_sent_the_rest(
    blind: str, lease_s: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is asked to read no more, though it has more leases; each third task is whole in any case."""
    monkeypatch.setattr(driver_module, "LEASES_PER_S", 3 / lease_s if lease_s else 1e9)
    on = Blind({"a": 1, "b": 2}, lambda task: task.cost / 20, lambda tasks: [task.number for task in tasks])
    on.blind = frozenset(blind)
    job, driver = Counted(), Driver(on, allowed, PATIENCE, clock=on.clock)
    driver.first()
    driver.run(some(90), job, lambda task: replace(task, payload="small") if task.number % 3 else task)
    assert job.counted == job.values == Counter(range(90)) and not job.aside
    said = capsys.readouterr().err.splitlines()
    assert said == [f"node {node}: windows are sent to it: it is another file here" for node in sorted(blind)]
    assert all(share.lost == 0 and share.tasks for share in driver.shares)
    assert on.small <= 2 * 3 if blind == "ab" else on.small > 6


def test_time_without_work_is_idle() -> None:
    """Of two workers one has the long task; the other is done after a second, and then waits."""
    on = SimulatedPool({"a": 2}, lambda task: task.cost / 10, lambda tasks: [task.number for task in tasks])
    job, driver = Counted(), Driver(on, allowed, PATIENCE, clock=on.clock)
    driver.first()
    driver.run(iter([Task(0, 70, "long"), Task(1, 10, "short")]), job)
    busy, idle = ([getattr(share, name) for share in driver.shares] for name in ("busy_s", "idle_s"))
    assert sorted(busy) == [1, 7] and sorted(idle) == pytest.approx([0, 6], abs=0.01)
    assert sum(idle) == pytest.approx(2 * (on.clock() - 1) - 8, abs=1e-6), "from a start of a second on"


def test_no_more_workers_than_asked_for() -> None:
    on = pool({"a": 4, "b": 4})
    _, driver = run(on, 50, n_workers=3)
    assert len(driver.shares) == 3 == len(on.workers)


def test_nothing_to_do_ends_at_once() -> None:
    job, _ = run(pool({"a": 1}), 0)
    assert not job.counted


@pytest.mark.parametrize("told", [False, True])
def test_a_deadly_task_is_set_aside_and_named(told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    on = pool({"a": 1, "b": 1}, deadly=frozenset({7, 31}), told=told)
    job, driver = run(on, 100)
    assert job.counted == Counter(set(range(100)) - {7, 31})
    assert sorted(found.task.number for found in job.aside) == [7, 31]
    assert all(len(found.reasons) == 2 and "killed by signal 9" in found.reasons[0] for found in job.aside)
    assert "task 7 is set aside, two workers ended at it: " in capsys.readouterr().err
    assert sum(share.lost for share in driver.shares) == 4


def test_a_lost_node_is_replaced_by_the_others_and_a_new_one_takes_part() -> None:
    on = pool({"a": 1, "b": 1})
    on.call(5.0, lambda: on.remove("a"))
    on.call(9.0, lambda: on.nodes.update(c=2))
    job, driver = run(on, 300)
    assert job.counted == job.values == Counter(range(300))
    assert {share.node for share in driver.shares if share.tasks} == {"a", "b", "c"}


def test_a_cluster_that_loses_all_workers_is_waited_for_and_then_given_up() -> None:
    on = pool({"a": 1, "b": 1})
    on.call(5.0, lambda: on.remove("a"))
    on.call(6.0, lambda: on.remove("b"))
    job, driver = Counted(), Driver(on, allowed, PATIENCE, clock=on.clock)
    driver.first()
    with pytest.raises(DeadlineError, match="no worker of the cluster was ready for 30 s") as failed:
        driver.run(some(500), job)
    assert 35 <= on.clock() < 40 and "its node is gone" in failed.value.hint
    assert 0 < len(job.counted) < 500

    late = pool({"a": 1})
    late.call(5.0, lambda: late.remove("a"))
    late.call(25.0, lambda: late.nodes.update(z=1))  # in time
    job, _ = run(late, 300)
    assert job.counted == Counter(range(300))


def test_a_cluster_without_workers_is_given_up_at_the_start() -> None:
    with pytest.raises(DeadlineError, match="30 s"):
        Driver(on := pool({}), allowed, PATIENCE, clock=on.clock).first()


def test_a_silent_worker_is_given_up_and_what_it_says_later_is_not_counted() -> None:
    on = pool({"a": 1, "b": 1})
    on.call(3.0, lambda: on.freeze(next(iter(on.workers))))
    job, driver = run(on, 400)
    assert job.counted == job.values == Counter(range(400))
    assert sum(share.lost for share in driver.shares) == 1


def test_what_a_lost_worker_says_is_not_counted_twice() -> None:
    on = pool({"a": 1, "b": 1})
    job, driver = Counted(), Driver(on, allowed, PATIENCE, clock=on.clock)
    driver.first()
    finished = Finished("", 1, Result((0,), [0]))
    on.late += [Finished(worker, lease, finished.result) for worker in ("nobody", "b/0.2") for lease in (1, 999)]
    driver.run(some(20), job)
    assert job.counted == Counter(range(20))


def test_another_file_is_refused_by_the_name_of_its_node(capsys: pytest.CaptureFixture[str]) -> None:
    class Two(SimulatedPool):
        def greeting(self, worker, place) -> Event:
            return Ready(worker, {"file": place.node})

    def same(first, info) -> str:
        return "" if info["file"] != "bad" else "another file"

    on = Two({"bad": 2, "good": 1}, lambda task: 0.1, lambda tasks: [task.number for task in tasks])
    job, driver = Counted(), Driver(on, same, PATIENCE, clock=on.clock)
    driver.first()
    driver.run(some(40), job)
    assert job.counted == Counter(range(40))
    assert driver.refused == {"bad": "bad: another file"}
    assert {share.tasks for share in driver.shares if share.node == "bad"} == {0}
    assert "node bad is refused: another file" in capsys.readouterr().err

    on = Two({"bad": 2}, lambda task: 0.1, lambda tasks: [task.number for task in tasks])
    with pytest.raises(WrongModelError, match="bad: another file"):
        Driver(on, same, PATIENCE, clock=on.clock).first()


def test_a_node_that_cannot_load_is_refused_with_its_own_error() -> None:
    class Small(SimulatedPool):
        def greeting(self, worker, place) -> Event:
            return Refused(worker, CapacityError("8 GiB are too little"))

    on = Small({"a": 1, "b": 1}, lambda task: 0.1, lambda tasks: [])
    with pytest.raises(CapacityError, match="8 GiB"):
        Driver(on, allowed, PATIENCE, clock=on.clock).first()


class Broken(SimulatedPool):
    """Workers start on the node `good` alone."""

    starts = 0

    def greeting(self, worker, place) -> Event:
        if place.node == "good":
            return Ready(worker, {})
        self.starts += 1
        return Died(worker, "no such driver")


def test_a_place_whose_workers_never_start_is_tried_now_and_then() -> None:
    on = Broken({"bad": 1, "good": 1}, lambda task: 1.0, lambda tasks: [task.number for task in tasks])
    job, _ = run(on, 60)
    assert job.counted == Counter(range(60)) and DEATHS_AT_START < on.starts < 8


def test_where_no_worker_starts_the_run_ends_before_its_time() -> None:
    on = Broken({"bad": 2}, lambda task: 1.0, lambda tasks: [])
    with pytest.raises(DaemonError, match="no worker of the cluster starts") as failed:
        Driver(on, allowed, Patience(ready_s=600), clock=on.clock).first()
    assert "no such driver" in failed.value.hint and on.clock() < 60


def test_an_error_that_no_worker_would_do_better_at_ends_the_run() -> None:
    class Refusing(SimulatedPool):
        def send(self, worker, lease, tasks) -> None:
            if any(task.number == 3 for task in tasks):
                result = Result((), None, error=NumericalError("a logit is not finite"))
                self.at(0.1, worker, Finished(worker, lease, result))
                self.workers[worker].queue.append((lease, tasks))
            else:
                super().send(worker, lease, tasks)

    with pytest.raises(NumericalError):
        run(Refusing({"a": 1}, lambda task: 0.1, lambda tasks: [task.number for task in tasks]), 10)


@settings(max_examples=100)
@given(st.integers(0, 1 << 30), st.integers(1, 120), st.booleans())
def test_whatever_happens_every_task_is_counted_once(seed: int, n: int, told: bool) -> None:
    """Workers that are killed, frozen and lost with their nodes, at random times; tasks that kill."""
    chance = random.Random(seed)
    nodes = {name: chance.randint(1, 3) for name in "abc"[: chance.randint(1, 3)]}
    deadly = frozenset(chance.sample(range(n), min(n, chance.randint(0, 2))))
    on = pool(nodes, deadly=deadly, told=told, latency_s=chance.choice([0.0, 0.01, 0.5]))

    def trouble(left: int) -> None:
        if on.workers and left and on.sent:  # where none is ever ready, the run ends, as it should
            worker = chance.choice(sorted(on.workers))
            match chance.randrange(4):
                case 0 if on.workers[worker].queue:  # one that is frozen as it starts is waited for as long as the run
                    on.freeze(worker)
                case 1:
                    node = on.workers[worker].place.node
                    on.remove(node)
                    on.call(chance.uniform(0, 9), lambda: on.nodes.update({node: 1}))
                case _:
                    on.lose(worker)
        if left:
            on.call(chance.expovariate(0.5), lambda: trouble(left - 1))

    on.call(chance.uniform(0, 5), lambda: trouble(chance.randint(0, 12)))
    job, _ = run(on, n)
    aside = {found.task.number for found in job.aside}
    assert job.counted == job.values == Counter(set(range(n)) - aside)
    assert deadly <= aside
