"""The gate of what is handed to the CPU: on while it pays, off where it does not, and seldom tried again."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.placing.division import COPY_US, Costs, divide
from engine.placing.misses import (
    FEW_JOBS,
    GOOD_WINDOWS,
    IDLE_STEPS,
    IDLE_TIMES,
    LAYER_US,
    LEAST_BOUND_US,
    NOTHING,
    RETRY_S,
    STALL_WINDOWS,
    WINDOW_JOBS,
    MissGate,
    Part,
    Table,
    Tally,
)

COSTS = Costs(60, (30, 61, 90), 5, busy_us=9)
# With one miss PCIe and the CPU are even where a third of the rows is the CPU's.
IN_ROWS = Costs(60, (60, 121, 180), 14, split_us=COPY_US + 2, n_ff=768, first_share=0.75, busy_us=16)
N_USED = 5


def more(tally: Tally, missed: int, part: Part) -> tuple[Part, ...]:
    parts = [*tally.parts, *[Part()] * (N_USED + 1 - len(tally.parts))]
    parts[missed] = parts[missed].plus(part)
    return tuple(parts)


def plus(
    tally: Tally, done: int, taken: int = 0, waited_us: float = 0.0, trips_us: float = 0.0, missed: int = 2
) -> Tally:
    """So many whole experts more, one a layer, of layers that missed so many."""
    trips, part = int(trips_us > 0) * done, Part(done + taken, done, taken=taken, waited_us=waited_us)
    return replace(
        tally, parts=more(tally, missed, part), trips=tally.trips + trips, trips_us=tally.trips_us + done * trips_us
    )  # fmt: skip


def with_rows(tally: Tally, n: int, rows: int, waited_us: float = 0.0, missed: int = 1) -> Tally:
    """So many divided experts more, of so many rows of the CPU's each, one a layer."""
    part = Part(n, divided=n, rows=n * rows, waited_us=waited_us)
    return replace(tally, parts=more(tally, missed, part))



def whole(*experts: int) -> Table:
    return tuple((n, 0) for n in experts)


def test_the_table_is_that_of_the_division() -> None:
    gate = MissGate(COSTS, N_USED)
    assert gate.table == whole(0, 1, 1, 2, 3, 3) and gate.state == "on"
    assert gate.bound_us == 60 and MissGate(Costs(60, (5, 9), 5, busy_us=36), N_USED).bound_us == 72
    assert MissGate(Costs(60, (1, 2), 1), N_USED).bound_us == LEAST_BOUND_US


def test_where_nothing_is_gained_it_is_never_on() -> None:
    gate = MissGate(Costs(30, (200, 400), 5), N_USED)
    assert gate.state == "off for good" and gate.table == (NOTHING,) * (N_USED + 1) and "30 us over PCIe" in gate.why
    assert not gate.look(plus(Tally(), 1000), 1e9, list)


def test_jobs_that_nobody_claims_turn_it_off_soon() -> None:
    gate = MissGate(COSTS, N_USED)
    assert not gate.look(plus(Tally(), 0, FEW_JOBS - 1), 1.0, list)
    assert gate.look(plus(Tally(), 2, FEW_JOBS), 1.0, list)
    assert gate.state == "off" and set(gate.table) == {NOTHING} and "8 of 10 jobs" in gate.why


def test_some_that_are_taken_back_are_no_reason() -> None:
    gate, tally = MissGate(COSTS, N_USED), Tally()
    for i in range(20):
        tally = plus(tally, 50, 14, waited_us=50 * 50)
        assert gate.look(tally, float(i), list) and gate.state == "on"


def test_who_waits_longer_than_pcie_takes_loses() -> None:
    """A layer that misses so many; where it misses others nothing is known, and what is left goes on."""
    gate = MissGate(COSTS, N_USED)
    assert not gate.look(plus(Tally(), WINDOW_JOBS - 1, waited_us=1e9), 1.0, list)
    assert gate.look(plus(Tally(), WINDOW_JOBS, waited_us=60.0 * WINDOW_JOBS), 1.0, list)
    assert gate.state == "on" and gate.table == whole(0, 1, 0, 2, 3, 3)
    assert list(gate.left) == [2] and "waited for 60 us" in gate.left[2]


def test_where_all_entries_have_lost_it_is_off_until_the_first_is_tried_again() -> None:
    gate, tally, now_s = MissGate(COSTS, N_USED), Tally(), 0.0
    for missed in range(1, N_USED + 1):
        assert gate.state == "on" and not gate.why
        now_s += 1.0
        tally = plus(tally, WINDOW_JOBS, waited_us=61.0 * WINDOW_JOBS, missed=missed)
        assert gate.look(tally, now_s, list)
    assert gate.state == "off" and "waited for 61 us, PCIe takes 60" in gate.why
    assert not gate.look(tally, RETRY_S[0] + 0.5, list)
    assert gate.look(tally, RETRY_S[0] + 1.5, list) and gate.state == "on" and gate.table == whole(0, 1, 0, 0, 0, 0)
    assert gate.look(tally, RETRY_S[0] + 3.5, list) and gate.table == whole(0, 1, 1, 2, 0, 0)


@pytest.mark.slow
def test_an_entry_that_loses_is_tried_again_later_and_later_and_in_the_end_never() -> None:
    """Single misses lose a little, and others gain: that is all that is left to PCIe."""
    gate, tally, now_s, tried = MissGate(IN_ROWS, N_USED), Tally(), 0.0, list[float]()
    single_us, before = IN_ROWS.amount(320) * 60, gate.table
    for _ in range(100_000):
        now_s += 0.02
        if gate.table[1] != NOTHING and (not tried or now_s - tried[-1] > 20):
            tried.append(now_s)
        tally = with_rows(tally, 4 * (gate.table[1] != NOTHING), 320, waited_us=4.0 * single_us * 0.9)
        tally = plus(tally, 2, waited_us=2 * 5.0, missed=3)
        gate.look(tally, now_s, list)
        assert gate.state == "on" and gate.table[2:] == before[2:]
    assert len(tried) == 1 + len(RETRY_S) and list(gate.left) == [1]
    assert [b - a for a, b in pairwise(tried)] == pytest.approx(RETRY_S, abs=1.0)


def test_an_entry_that_was_unlucky_is_forgiven() -> None:
    gate, tally, now_s = MissGate(COSTS, N_USED), Tally(), 0.0
    for _ in range(3 * len(RETRY_S)):
        tally = plus(tally, WINDOW_JOBS, waited_us=1e6)
        assert gate.look(tally, now_s, list) and list(gate.left) == [2]
        now_s += RETRY_S[0]
        assert gate.look(tally, now_s, list) and not gate.left
        for _ in range(GOOD_WINDOWS):
            tally = plus(tally, WINDOW_JOBS)
            assert gate.look(tally, now_s, list) and not gate.left


def test_one_long_wait_is_no_other_entrys_fault() -> None:
    """Nor is anybody blamed for a window with few jobs of its own, where others have more."""
    gate = MissGate(COSTS, N_USED)
    tally = plus(Tally(), WINDOW_JOBS, waited_us=20.0 * WINDOW_JOBS, missed=4)
    tally = plus(plus(tally, 1, waited_us=70.0, missed=1), FEW_JOBS, waited_us=9000.0, missed=3)
    assert gate.look(tally, 1.0, list) and list(gate.left) == [3]
    gate = MissGate(COSTS, N_USED)
    tally = plus(plus(Tally(), WINDOW_JOBS, missed=4), 1, waited_us=9000.0, missed=1)
    assert gate.look(tally, 1.0, list) and list(gate.left) == [1]


def test_what_gains_less_than_a_twentieth_is_left_to_pcie() -> None:
    for waited_us, left in ((53.0, []), (54.5, [2])):  # of two misses a layer 6 us at least
        gate = MissGate(COSTS, N_USED)
        assert gate.look(plus(Tally(), WINDOW_JOBS, waited_us=waited_us * WINDOW_JOBS), 1.0, list)
        assert list(gate.left) == left


def test_it_is_tried_again_later_and_later_and_in_the_end_never() -> None:
    gate, tally, now_s, on = MissGate(COSTS, N_USED), Tally(), 0.0, 0
    for wait_s in (*RETRY_S, None):
        tally = plus(tally, 0, FEW_JOBS)
        assert gate.look(tally, now_s, list) and gate.state == ("off" if wait_s else "off for good")
        on += 1
        if wait_s is None:
            break
        assert not gate.look(tally, now_s + wait_s - 1, list)
        now_s += wait_s
        assert gate.look(tally, now_s, list) and gate.state == "on" and gate.table == whole(0, 1, 1, 2, 3, 3)
    assert on == len(RETRY_S) + 1 and not gate.look(tally, now_s + 1e9, list)


def test_a_good_stretch_makes_up_for_a_loss() -> None:
    gate, tally, now_s = MissGate(COSTS, N_USED), Tally(), 0.0
    for _ in range(3 * len(RETRY_S)):
        tally = plus(tally, 0, FEW_JOBS)
        assert gate.look(tally, now_s, list) and gate.state == "off"
        now_s += RETRY_S[0]
        assert gate.look(tally, now_s, list)
        for _ in range(GOOD_WINDOWS):
            tally = plus(tally, WINDOW_JOBS)
            assert gate.look(tally, now_s, list) and gate.state == "on"


@pytest.mark.parametrize("gained_us", [0.0, 1.5, 4.0])
def test_where_too_little_misses_it_is_idle_and_looks_again(gained_us: float) -> None:
    """Of four layers, which take 2.4 us a step; it is no loss that anybody remembers."""
    gate, tally, now_s, on = MissGate(COSTS, N_USED, n_layers=4), Tally(), 0.0, 0
    for i in range(100 * IDLE_STEPS):
        now_s += 0.01
        on += gate.state == "on"
        if gained_us and gate.state == "on" and i % 10 == 0:
            tally = plus(tally, 1, waited_us=60 - 10 * gained_us, missed=1)
        gate.look(tally, now_s, list)
        assert gate.state in ("on", "idle")
    share = on / (100 * IDLE_STEPS)
    if gained_us > 4 * LAYER_US:
        assert share == 1.0
    else:
        assert share == pytest.approx(1 / (1 + IDLE_TIMES), rel=0.15)
    assert not gate.left


def test_costs_follow_what_is_seen() -> None:
    gate, tally = MissGate(COSTS, N_USED), Tally()
    for _ in range(8):  # the CPU's clock goes down to two fifths
        tally = plus(tally, WINDOW_JOBS, waited_us=1.0)
        gate.look(tally, 1.0, lambda: [(1, 75.0), (1, 75.0), (2, 152.5), (1, 9.0)])
    assert 70 < gate.costs.cpu_us[0] < 75 and gate.table == whole(0, 0, 1, 1, 2, 2) and gate.state == "on"

    few, tally, n = MissGate(COSTS, 2), Tally(), 0
    while few.state == "on":  # and to a fifth, of a model with so few misses
        tally, n = plus(tally, WINDOW_JOBS, waited_us=1.0), n + 1
        few.look(tally, 1.0, lambda: [(1, 150.0)])
        assert n < 20
    assert n > 2 and "on the CPU take" in few.why
    few.look(tally, 1.0 + RETRY_S[0], list)
    assert few.costs == COSTS

    slow = MissGate(COSTS, N_USED)
    tally = Tally()
    for _ in range(8):  # answers come 40 us later than any that was measured
        tally = plus(tally, WINDOW_JOBS, waited_us=WINDOW_JOBS * 5.0, trips_us=30 + 5 + 40.0)
        slow.look(tally, 1.0, lambda: [(1, 30.0)])
    assert 40 < slow.costs.handover_us < 45 and slow.costs.busy_us == COSTS.busy_us
    assert slow.table == whole(0, 0, 1, 2, 3, 3) and slow.state == "on"


def test_rows_save_their_part() -> None:
    gate = MissGate(IN_ROWS, N_USED)
    assert gate.table[:2] == ((0, 0), (0, 320)) and gate.state == "on"
    saved_us = 320 / 768 * 0.75 * 60 * WINDOW_JOBS
    assert gate.look(with_rows(Tally(), WINDOW_JOBS, 320, 0.8 * saved_us), 1.0, list) and not gate.left
    other = MissGate(IN_ROWS, N_USED)
    assert not other.look(with_rows(Tally(), WINDOW_JOBS - 1, 320, 1e6), 1.0, list)
    assert other.look(with_rows(Tally(), WINDOW_JOBS, 320, saved_us), 1.0, list)
    assert other.state == "on" and "was waited for 19 us, PCIe takes 19 for as much" in other.left[1]


def test_what_divided_experts_take_follows_what_is_seen() -> None:
    slow, tally = MissGate(IN_ROWS, N_USED), Tally()
    part = 320 / 768 * 0.75
    for ratio in (1.0, 1.5):  # of 60 us an expert, and 2 that a part takes besides
        for _ in range(12):
            tally = with_rows(tally, WINDOW_JOBS, 320, WINDOW_JOBS * 5.0)
            slow.look(tally, 1.0, lambda ratio=ratio: [(part, ratio * (60 * part + 2))])  # type: ignore[misc]
        assert slow.costs.cpu_us[0] == pytest.approx(60 * ratio, rel=0.05)
    assert 0 < slow.table[1][1] < 320
    assert (slow.costs.n_ff, slow.costs.split_us, slow.costs.first_share) == (768, COPY_US + 2, 0.75)


@pytest.mark.parametrize("later_us", [-12.0, 0.0, 15.0, 30.0])
@pytest.mark.parametrize("missed", [1, 2, 3, 5])
def test_the_table_goes_to_where_both_sides_end_together(missed: int, later_us: float) -> None:
    true = replace(IN_ROWS, later_us=later_us)  # what the CPU has ends so much later than was measured
    gate, tally, us = MissGate(IN_ROWS, N_USED), Tally(), list[float]()
    for _ in range(60):
        experts, rows = gate.table[missed]
        if (experts, rows) == NOTHING:
            us.append(missed * true.pcie_us)
            continue
        jobs, amount = experts + (rows > 0), experts + true.amount(rows)
        is_alone = (experts, rows) == (missed, 0)
        took_us = true.of_handover(is_alone) + true.of_cpu(amount) + (true.split_us if rows else 0.0)
        pcie_us = (missed - amount) * true.pcie_us
        us.append(max(took_us, pcie_us))
        n = -(-WINDOW_JOBS // jobs)
        seen = Part(n, n * experts, n * (rows > 0), n * rows, waited_us=n * max(0.0, took_us - pcie_us))
        tally = replace(tally, parts=more(tally, missed, seen))
        gate.look(tally, 1.0, list)
        assert gate.state == "on"
    best = divide(missed, true).us
    assert max(us[20:]) <= best + 0.2 * true.pcie_us and min(us) >= best - 1e-9


def test_one_stall_leaves_nothing_to_pcie() -> None:
    """A thread loses its core for 3 ms, in a layer that misses as seldom as two at once."""
    gate, tally = MissGate(IN_ROWS, N_USED), Tally()
    for i in range(40):
        tally = with_rows(tally, WINDOW_JOBS - 2, gate.table[1][1], 62 * 5.0)
        late = Part(2, 2, waited_us=2 * 5.0 + (480.0 if i == 3 else 0.0), stalled_us=2500.0 if i == 3 else 0.0)
        tally = replace(tally, parts=more(tally, 2, late))
        gate.look(tally, 1.0, list)
        assert gate.state == "on" and not gate.left


def test_stalls_that_take_more_than_is_gained_end_it() -> None:
    gate, tally, windows = MissGate(IN_ROWS, N_USED), Tally(), 0
    saved_us = WINDOW_JOBS * IN_ROWS.amount(320) * 60
    while gate.state == "on":
        part = Part(WINDOW_JOBS, divided=WINDOW_JOBS, rows=320 * WINDOW_JOBS, waited_us=300, stalled_us=1.1 * saved_us)
        tally = replace(tally, parts=more(tally, 1, part))
        gate.look(tally, 1.0, list)
        windows += 1
        assert windows <= STALL_WINDOWS
    assert gate.state == "off" and windows == STALL_WINDOWS and "very late answers took" in gate.why
    assert gate.look(tally, 1.0 + RETRY_S[0], list) and gate.state == "on"


def test_an_entry_does_not_follow_another() -> None:
    gate, tally = MissGate(IN_ROWS, N_USED), Tally()
    before = gate.table
    for _ in range(4):
        tally = with_rows(tally, WINDOW_JOBS, gate.table[3][1], WINDOW_JOBS * 15.0, missed=3)
        gate.look(tally, 1.0, list)
    assert gate.table[3] < before[3] and [e for i, e in enumerate(gate.table) if i != 3] == [
        e for i, e in enumerate(before) if i != 3
    ]


def test_a_thread_that_lost_its_core_is_no_drift() -> None:
    gate = MissGate(COSTS, N_USED)
    gate.look(plus(Tally(), WINDOW_JOBS), 1.0, lambda: [(1, 4000.0)])
    assert gate.costs.cpu_us == COSTS.cpu_us


windows = st.tuples(
    st.integers(0, 90), st.integers(0, 90), st.integers(0, 90), st.floats(0, 9000), st.floats(0, 300), st.floats(0, 60),
    st.lists(st.tuples(st.integers(1, 5) | st.floats(0.01, 5), st.floats(0, 1e5)), max_size=4), st.integers(1, N_USED),
)  # fmt: skip


@pytest.mark.slow
@given(st.sampled_from([COSTS, IN_ROWS]), st.lists(windows, max_size=12))
def test_what_it_says_is_in_order(
    costs: Costs, made: list[tuple[int, int, int, float, float, float, list[tuple[float, float]], int]]
) -> None:
    gate, tally, now_s = MissGate(costs, N_USED, n_layers=2), Tally(), 0.0
    for done, divided, taken, waited_us, trips_us, after_s, spans, missed in made:
        tally, now_s, before = plus(tally, done, taken, waited_us, trips_us, missed), now_s + after_s, gate.table
        tally = with_rows(tally, divided, 96, waited_us / 2)
        bound_us = gate.bound_us
        changed = gate.look(tally, now_s, lambda spans=spans: spans)  # type: ignore[misc]
        assert changed or (gate.table, gate.bound_us) == (before, bound_us)
        assert len(gate.table) == N_USED + 1
        assert all(0 <= n <= m and (rows == 0 or n < m) for m, (n, rows) in enumerate(gate.table))
        assert all(rows % 32 == 0 and 0 <= rows <= costs.n_ff for _, rows in gate.table)
        assert (gate.state == "on") == (set(gate.table) != {NOTHING}) == (not gate.why)
        assert all(gate.table[n] == NOTHING and why for n, why in gate.left.items())
        assert gate.bound_us >= LEAST_BOUND_US


@pytest.mark.parametrize("fault", [(0, 1), (1, 1)])
@pytest.mark.parametrize("missed", [(1,), (2,), (1, 2, 3, 4, 5)])
def test_what_a_fault_costs_is_bounded(fault: tuple[int, int], missed: tuple[int, ...]) -> None:
    """us that are lost until it is off for good: a job that nobody claims costs the bound."""
    gate, tally, now_s, lost_us = MissGate(COSTS, N_USED), Tally(), 0.0, 0.0
    for i in range(25_000):
        now_s += 0.04
        if gate.state == "on":
            lost_us += fault[1] * gate.bound_us
            tally = plus(tally, *fault, waited_us=fault[1] * gate.bound_us, missed=missed[i % len(missed)])
        gate.look(tally, now_s, list)
    assert gate.state == "off for good" and lost_us < 100 * COSTS.pcie_us


@pytest.mark.slow
@pytest.mark.parametrize("costs", [COSTS, IN_ROWS])
@pytest.mark.parametrize("missed", [(1,), (3,), (1, 2, 3, 4, 5), (1, 1, 1, 1, 2, 2, 3)])
def test_what_late_answers_cost_is_bounded(costs: Costs, missed: tuple[int, ...]) -> None:
    """Each job is waited for twice as long as PCIe takes for it: some windows a try, four tries, and never again."""
    gate, tally, now_s, lost_us = MissGate(costs, N_USED), Tally(), 0.0, 0.0
    for i in range(50_000):
        now_s, n = now_s + 0.04, missed[i % len(missed)]
        experts, rows = gate.table[n]
        part = Part(1, experts, int(rows > 0), rows)
        if part.jobs:
            saved_us = part.saved_us(costs)
            lost_us += saved_us
            tally = replace(tally, parts=more(tally, n, part._replace(waited_us=2 * saved_us)))
        gate.look(tally, now_s, list)
    assert all(gate.table[n] == NOTHING for n in missed)
    assert (gate.state == "off for good") == (len(set(missed)) == N_USED)
    assert lost_us <= ((1 + len(RETRY_S)) * 2 * WINDOW_JOBS + IDLE_STEPS) * costs.pcie_us  # what it idled through


def test_what_misses_of_a_layer_take_follows_from_the_table() -> None:
    gate = MissGate(COSTS, 3)
    assert gate.layer_us == tuple(divide(n, COSTS).us for n in range(4)) and gate.layer_us[3] < 3 * COSTS.pcie_us
    gate._stop("off", "asked for")
    assert gate.layer_us == (0, 60, 120, 180)
