"""benchmarks/divisions.py: what it imposes, what it leaves out, and its table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.divisions import WORST, Held, candidates, exactly
from benchmarks.misses_results import divisions
from engine.placing.division import Costs, divide, makespan
from engine.placing.misses import NOTHING, Tally

COSTS = Costs(56, (50, 91, 130), 6, split_us=4, n_ff=768, first_share=0.6, busy_us=9, both_us=8)


@given(st.integers(0, 3), st.integers(3, 5), st.integers(0, 9))
def test_so_many_miss_and_no_others(n_missed: int, n_used: int, seed: int) -> None:
    resident = np.zeros((2, 11), np.bool_)
    resident[0, :6] = resident[1, 3:9] = True
    made = exactly(n_missed, resident, n_used, 7, seed)
    assert made.shape == (7, 2, n_used)
    for layer, inside in enumerate(resident):
        assert ((~inside)[made[:, layer]].sum(axis=1) == n_missed).all()
    assert all(len(set(row)) == n_used for row in made.reshape(-1, n_used).tolist())


@pytest.mark.parametrize("n_missed", [1, 2, 4])
def test_divisions_near_the_best_are_measured(n_missed: int) -> None:
    made = candidates(n_missed, COSTS)
    best = divide(n_missed, COSTS).us
    assert made[0] == NOTHING and len(set(made)) == len(made) >= 4
    assert all(experts + (rows > 0) <= n_missed and rows % 128 == 0 for experts, rows in made)
    us = [makespan(n_missed, *each, COSTS) for each in made[1:]]
    assert best <= min(us) < 1.1 * best and max(us) <= WORST * min(us)


def test_a_table_that_is_held_stays() -> None:
    gate = Held(COSTS, 4)
    gate.hold(2, (1, 256))
    assert gate.table == (NOTHING, NOTHING, (1, 256), NOTHING, NOTHING) and gate.state == "on"
    assert not gate.look(Tally(), 1e9, list) and not gate.lose("a neighbor", 1.0)
    assert gate.table[2] == (1, 256) and gate.lost == "a neighbor"
    gate.hold(2, NOTHING)
    assert gate.state == "off" and set(gate.table) == {NOTHING}


def test_the_best_is_seen_at_once() -> None:
    def row(missed: int, experts: int, rows: int, us: float) -> dict[str, float]:
        made = {"missed": missed, "experts": experts, "rows": rows, "layer_us": us}
        return made | {"predicted_us": us + 1, "waited_us": 0.5, "taken_back": 0}

    settings = {"cpus": [1, 2], "pcie_us": 56.0, "cpu_us": [50.0], "handover_us": 6.0}
    rows = [row(1, 0, 0, 60.0), row(1, 0, 640, 41.5), row(2, 1, 0, 73.6)]
    made = {"base_us": 1383.0, "cpu_experts": settings, "rows": rows, "command": "", "commit": "0" * 40}
    made |= {"host": {"cpu": "", "gpu": ""}, "versions": {}, "created": "2026-11-29T00:00:00Z"}
    said = "\n".join(divisions("divisions.json", made))
    assert "| 1 | 0 | 640 | **41.5** | 42.5 | 0.5 |" in said and "**73.6**" in said and "| 60.0 |" in said
    assert "1.383 ms" in said
