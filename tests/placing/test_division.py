"""Misses divided between PCIe and the CPU, against all the ways there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.placing.division import Costs, Division, divide, makespan

us = st.floats(0, 500, allow_subnormal=False)
tables = st.lists(us, min_size=1, max_size=5)
costs_of_all_kinds = st.builds(
    Costs, pcie_us=us, cpu_us=tables, handover_us=us, split_us=st.just(0.0) | us,
    n_ff=st.sampled_from([0, 32, 96, 704, 1000]), first_share=st.sampled_from([0.0, 0.5, 2 / 3, 1.0]),
    busy_us=st.none() | us, later_us=st.just(0.0) | st.floats(-100, 100), both_us=st.just(0.0) | us,
)  # fmt: skip


def all_ways(m: int, costs: Costs) -> list[Division]:
    """Every number of experts, and every number of rows of one more."""
    ways = [Division(0, 0, m * costs.pcie_us)]
    for experts in range(m + 1):
        rows = {0} if experts == m or not costs.first_share else {0, *range(32, costs.n_ff, 32), costs.n_ff}
        ways += [Division(experts, r, makespan(m, experts, r, costs)) for r in sorted(rows) if experts or r]
    return ways


@given(st.integers(0, 9), costs_of_all_kinds)
def test_no_way_ends_earlier(m: int, costs: Costs) -> None:
    found = divide(m, costs)
    assert found.us == pytest.approx(min(way.us for way in all_ways(m, costs)), abs=1e-6)
    assert found.us == makespan(m, found.experts, found.rows, costs)


@given(st.integers(0, 40), costs_of_all_kinds)
def test_it_is_never_later_than_pcie_alone_and_takes_what_there_is(m: int, costs: Costs) -> None:
    found = divide(m, costs)
    assert found.us <= m * costs.pcie_us
    assert 0 <= found.experts <= m and 0 <= found.rows <= costs.n_ff and not (found.rows and found.experts == m)
    assert found.rows % 32 == 0 or found.rows == costs.n_ff


def test_one_sided_costs() -> None:
    slow = Costs(56, (3000, 6000), 250, n_ff=768)
    assert divide(4, slow) == Division(0, 0, 224)
    free = Costs(56, (0, 0), 0, n_ff=768)
    assert divide(4, free) == Division(4, 0, 0)
    assert divide(0, free) == Division(0, 0, 0)


def test_the_hand_over_counts() -> None:
    """27 us an expert on the CPU, 56 over PCIe: one goes to the CPU, where the hand-over takes less than that saves."""
    assert divide(2, Costs(56, (27, 54), 5)) == Division(1, 0, 56)
    assert divide(1, Costs(56, (27, 54), 5)) == Division(1, 0, 32)
    assert divide(1, Costs(56, (27, 54), 30)) == Division(0, 0, 56)
    assert divide(3, Costs(56, (27, 54), 5)) == Division(2, 0, 59)


def test_an_answer_that_waits_behind_reads_counts() -> None:
    """The CPU takes all of what is missed, or enough to be worth what the answer waits."""
    costs = Costs(52, (42, 89, 116, 149), 5, busy_us=36)
    assert [divide(n, costs).experts for n in range(5)] == [0, 1, 1, 1, 2]
    assert divide(1, costs).us == 47 and divide(2, costs).us == 78


def test_a_divided_expert_evens_out() -> None:
    found = divide(1, Costs(60, (60, 120), 0, n_ff=768, first_share=1.0))
    assert found == Division(0, 384, 30)
    whole = divide(2, Costs(56, (27, 54), 5))
    parts = divide(2, Costs(56, (27, 54), 5, n_ff=768))
    assert parts.us < whole.us and parts.rows
    assert divide(2, Costs(56, (27, 54), 5, split_us=100, n_ff=768)) == whole


def test_rows_are_a_part_of_an_expert() -> None:
    costs = Costs(60, (60, 120), 0, n_ff=768, first_share=0.75)
    assert costs.amount(0) == 0 == Costs(60, (60, 120), 0).amount(96)
    assert costs.amount(768) == 0.75 and costs.amount(96) == 0.09375
    assert makespan(1, 0, 384, costs) == 60 * (1 - 0.375)


def test_one_miss_gains_where_a_whole_expert_gains_nothing() -> None:
    """56 us over PCIe, 55 on the CPU and 18 for the hand-over."""
    measured = Costs(56, (55, 110), 18, split_us=3, n_ff=768)
    found = divide(1, measured)
    assert divide(1, Costs(56, (55, 110), 18)).experts == 0 == found.experts
    assert found.rows == 352 and 38 < found.us < 39


@pytest.mark.parametrize("bad", [{"cpu_us": ()}, {"pcie_us": -1}, {"handover_us": float("nan")}, {"first_share": 1.5}])
def test_times_that_are_none_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="costs: expected times"):
        Costs(**({"pcie_us": 1, "cpu_us": (1,), "handover_us": 1} | bad))  # type: ignore[arg-type]
