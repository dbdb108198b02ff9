"""Who is given which tasks: every task ends once, however workers come and go."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark.cluster.pool import Task
from spark.cluster.schedule import DEATHS, DEPTH, Schedule


def tasks(*costs: int) -> list[Task]:
    return [Task(i, cost, f"task {i}") for i, cost in enumerate(costs)]


def numbers(lease) -> list[int]:
    return list(lease.tasks)


def test_the_longest_goes_first() -> None:
    schedule = Schedule(iter(tasks(3, 9, 1, 7)))
    schedule.hire("a", "n")
    order = []
    while (lease := schedule.next("a")) is not None:
        order += numbers(lease)
        assert schedule.finish(lease.id, numbers(lease)) == [Task(order[-1], lease.cost, f"task {order[-1]}")]
    assert order == [1, 3, 0, 2] and schedule.over


def test_what_is_held_is_bounded() -> None:
    read = 0

    def source():
        nonlocal read
        for task in tasks(*[10] * 1000):
            read += 1
            yield task

    schedule = Schedule(source(), pool_cost=50, pool_tasks=100)
    schedule.hire("a", "n")
    done = 0
    while (lease := schedule.next("a")) is not None:
        assert read <= done + 6
        done += len(schedule.finish(lease.id, numbers(lease)))
    assert done == 1000

    few = Schedule(iter(tasks(*[1] * 1000)), pool_cost=1 << 20, pool_tasks=7)
    few.hire("a", "n")
    few.next("a")
    assert few.held == 7


def test_a_worker_has_the_next_lease_before_it_has_finished_one() -> None:
    schedule = Schedule(iter(tasks(*[1] * 10)))
    schedule.hire("a", "n")
    assert [schedule.next("a") is not None for _ in range(DEPTH + 1)] == [True] * DEPTH + [False]


def test_the_last_tasks_go_to_those_who_have_none() -> None:
    schedule = Schedule(iter(tasks(1, 1, 1)))
    for worker in "ab":
        schedule.hire(worker, "n")
    assert schedule.next("a") is not None and schedule.next("b") is not None
    assert schedule.next("a") is None and schedule.next("b") is None  # one is left for who ends first


def test_leases_grow_with_the_speed_and_shrink_at_the_end() -> None:
    schedule = Schedule(iter(tasks(*[10] * 100)), lease_s=2.0)
    schedule.hire("a", "n")
    first = schedule.next("a")
    assert len(first.tasks) == 1  # nothing is known of its speed
    schedule.finish(first.id, numbers(first), seconds=0.2)  # 50 a second
    assert len(schedule.next("a").tasks) == 10
    last = Schedule(iter(tasks(*[10] * 12)), lease_s=100.0)
    for worker in "ab":
        last.hire(worker, "n")
    one = last.next("a")
    last.finish(one.id, numbers(one), seconds=0.1)
    assert len(last.next("a").tasks) == 2  # a quarter of what is left, of two workers


def test_a_dead_workers_tasks_go_to_others() -> None:
    schedule = Schedule(iter(tasks(5, 4, 3)))
    schedule.hire("a", "n")
    lease = schedule.next("a")
    schedule.next("a")
    assert schedule.lose("a", "killed") == []
    assert schedule.finish(lease.id, [0]) == []  # it comes too late
    schedule.hire("b", "m")
    assert [numbers(schedule.next("b")), numbers(schedule.next("b"))] == [[0], [1]]


def test_a_task_that_two_workers_end_at_is_set_aside() -> None:
    schedule = Schedule(iter(tasks(5, 4)))
    schedule.hire("a", "n")
    schedule.next("a")
    schedule.lose("a", "out of memory")
    schedule.hire("b", "m")
    assert numbers(schedule.next("b")) == [0]
    (aside,) = schedule.lose("b", "out of memory, too")
    assert aside.task.number == 0 and aside.reasons == ("n: out of memory", "m: out of memory, too")
    schedule.hire("c", "m")
    lease = schedule.next("c")
    assert numbers(lease) == [1] and schedule.next("c") is None
    assert not schedule.over
    schedule.finish(lease.id, [1])
    assert schedule.over


def test_a_task_of_several_is_tried_alone_before_it_is_blamed() -> None:
    schedule = Schedule(iter(tasks(*[10] * 40)), lease_s=1.0)
    schedule.hire("a", "n")
    first = schedule.next("a")
    schedule.finish(first.id, numbers(first), seconds=0.25)
    several = schedule.next("a")
    assert len(several.tasks) == 4
    assert schedule.lose("a", "killed") == []
    for worker in ("b", "c"):
        schedule.hire(worker, "n")
    alone = [schedule.next(worker) for worker in ("b", "b", "c", "c")]
    assert sorted(n for lease in alone for n in lease.tasks) == sorted(several.tasks) and len(alone) == 4


def test_a_known_culprit_is_the_only_one_that_is_blamed() -> None:
    schedule = Schedule(iter(tasks(*[10] * 40)), lease_s=1.0)
    schedule.hire("a", "n")
    first = schedule.next("a")
    schedule.finish(first.id, numbers(first), seconds=0.25)
    several = numbers(schedule.next("a"))
    schedule.lose("a", "killed", culprit=several[1])
    schedule.hire("b", "m")
    assert numbers(schedule.next("b")) == [several[1]]  # alone, and first
    (aside,) = schedule.lose("b", "killed", culprit=several[1])
    assert aside.task.number == several[1]


def test_a_task_is_tried_on_another_node_where_there_is_one() -> None:
    schedule = Schedule(iter(tasks(9, 1, 1, 1)))
    for worker, node in (("a", "n"), ("b", "n"), ("c", "m")):
        schedule.hire(worker, node)
    assert numbers(schedule.next("a")) == [0]
    schedule.lose("a", "killed")
    assert 0 not in schedule.next("b").tasks
    assert numbers(schedule.next("c")) == [0]


def test_an_end_that_no_task_is_to_blame_for_blames_none() -> None:
    schedule = Schedule(iter(tasks(9)))
    for round_ in range(5):
        schedule.hire(f"w{round_}", "n")
        assert numbers(schedule.next(f"w{round_}")) == [0]
        assert schedule.lose(f"w{round_}", "its result was lost", blame=False) == []


@pytest.mark.slow
@settings(max_examples=900)
@given(
    costs=st.integers(0, 30).flatmap(lambda n: st.binary(min_size=n, max_size=n)),
    deadly=st.sets(st.integers(0, 30), max_size=3),
    lease_s=st.sampled_from([0.0, 1.0, 50.0]), pool_cost=st.integers(1, 60), pool_tasks=st.integers(1, 30),
    what=st.binary(min_size=200, max_size=200),
)  # fmt: skip
def test_every_task_ends_once(
    costs: bytes, deadly: set[int], lease_s: float, pool_cost: int, pool_tasks: int, what: bytes
) -> None:
    """Whatever happens to workers, in whatever order: what is done and what is set aside is all, each once.

    what: a byte a step, whose remainders say what is done, by which worker, and who is to blame: to draw each takes
    ten times as long. After that nobody dies any more of nothing.
    """
    source = iter(tasks(*(1 + cost % 9 for cost in costs)))
    schedule = Schedule(source, lease_s=lease_s, pool_cost=pool_cost, pool_tasks=pool_tasks)
    ended, deaths = Counter[int](), Counter[int]()
    aside: set[int] = set()
    mine: dict[str, list] = {}
    stale = []
    steps = hired = 0

    def die(worker: str, culprit: int | None, blame: bool) -> None:
        for lease in mine.pop(worker):
            stale.append((lease.id, list(lease.tasks)))
        for found in schedule.lose(worker, "killed", culprit, blame=blame):
            aside.add(found.task.number)
            assert len(found.reasons) == DEATHS
            ended[found.task.number] += 1

    while not schedule.over:
        chosen = what[steps] if steps < len(what) else None
        steps += 1
        action = "work" if chosen is None else ("next", "finish", "die", "hire", "late")[chosen % 5]
        if action == "hire" or not mine:
            mine[f"w{hired}"] = []
            schedule.hire(f"w{hired}", f"n{hired % 3}")
            hired += 1
            continue
        worker = sorted(mine)[(steps if chosen is None else chosen // 5) % len(mine)]
        if action in ("next", "work") and (lease := schedule.next(worker)) is not None:
            held = [n for leases in mine.values() for other in leases for n in other.tasks]
            assert not set(held) & set(lease.tasks), "no task is in two hands"
            assert not set(lease.tasks) & {*aside, *ended}
            assert schedule.rest(lease.id) == list(lease.tasks.values())
            mine[worker].append(lease)
        if action in ("finish", "work") and mine[worker]:
            lease = mine[worker][0]
            order = list(lease.tasks)
            bad = next((n for n in order if n in deadly), None)
            done = order if bad is None else order[: order.index(bad)]
            for task in schedule.finish(lease.id, done, 0.5):
                ended[task.number] += 1
            assert [task.number for task in schedule.rest(lease.id)] == order[len(done) :]
            if bad is None:
                mine[worker].pop(0)
            else:
                deaths[bad] += 1
                die(worker, bad, True)
        elif action == "die":
            die(worker, None, bool(chosen and chosen > 127))
        elif action == "late" and stale:
            lease_id, late = stale[-1]
            assert schedule.finish(lease_id, late) == [] and schedule.rest(lease_id) == []
    assert ended == Counter(range(len(costs)))
    assert all(count <= DEATHS for count in deaths.values())


@pytest.mark.parametrize("n_tasks", [0, 1])
def test_little_or_nothing_to_do(n_tasks: int) -> None:
    schedule = Schedule(iter(tasks(*[1] * n_tasks)))
    assert schedule.over == (n_tasks == 0)
