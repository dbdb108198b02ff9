"""What is given up first, beside sorting everything each time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from engine.memory.order import Oldest


@dataclass(eq=False)
class Thing:
    used: int


WHAT = st.tuples(st.sampled_from(["add", "grow", "remove", "look", "take"]), st.integers(0, 30))


@given(st.lists(WHAT, max_size=200))
def test_the_order_is_that_of_sorting(what: list[tuple[str, int]]) -> None:
    """Whatever comes, goes, comes again and is used meanwhile; also where what is looked at goes."""
    order, things = Oldest[Thing](lambda thing: thing.used), [Thing(i % 4) for i in range(31)]
    here: set[Thing] = set()

    def expected() -> list[int]:
        return sorted(thing.used for thing in here)

    for kind, i in what:
        thing = things[i]
        if kind == "add":
            order.add(thing)
            here.add(thing)
        elif kind == "grow":
            thing.used += i % 3
        elif kind == "remove":
            order.remove(thing)
            here.discard(thing)
        elif kind == "look":
            assert [found.used for found in islice(order, i)] == expected()[:i]
        else:
            for found in order:
                assert found.used == expected()[0]
                order.remove(found)
                here.discard(found)
                break
        assert len(order) == len(here) and (thing in order) == (thing in here)
    assert [found.used for found in order] == expected()


@given(st.integers(0, 120), st.integers(0, 40), st.lists(st.integers(0, 39), max_size=20))
def test_what_is_told_may_be_removed(n_gone: int, n_stay: int, grown: list[int]) -> None:
    """And nobody is passed over for it, however many there were and whoever has moved."""
    order = Oldest[Thing](lambda thing: thing.used)
    gone, stay = [Thing(0) for _ in range(n_gone)], [Thing(1) for _ in range(n_stay)]
    for thing in (*gone, *stay):
        order.add(thing)
    for i in grown:
        if i < n_stay:
            stay[i].used += 1
    told = []
    for thing in order:
        told.append(thing)
        if thing.used == 0:
            order.remove(thing)
    assert told[:n_gone] == gone and sorted(map(id, told[n_gone:])) == sorted(map(id, stay))
    assert [thing.used for thing in told] == sorted(thing.used for thing in told) and len(order) == n_stay


def test_what_is_stale_takes_no_memory() -> None:
    order, things = Oldest[Thing](lambda thing: thing.used), [Thing(0) for _ in range(20)]
    for used in range(1000):
        for thing in things:
            thing.used = used
            order.remove(thing)
            order.add(thing)
    assert len(order) == len(things) and len(order._rows) <= 2 * len(things) + 65
