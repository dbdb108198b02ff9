"""What a token takes with missing experts, predicted from two places: the arithmetic, and figures of an H200."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from engine.placing.division import Costs
from engine.placing.misses import MissGate
from spark.commands.tables import show_bench
from spark.pipeline.bench import BenchReport, BenchRow, predicted
from spark.pipeline.predict import PCIE_BYTES_PER_US, Line, anchors, fit, missed_us


def info(sizes: list[int], n_used: int, layer_us: list[float] | None = None) -> dict[str, Any]:
    cpu = None if layer_us is None else {"layer_us": layer_us}
    return {"model": {"expert_bytes": sizes, "n_expert_used": n_used}, "cpu_experts": cpu}


def test_misses_over_pcie_take_their_bytes() -> None:
    assert missed_us(info([100_000, 300_000], 4), [0.5, 1.5]) == pytest.approx(500_000 / PCIE_BYTES_PER_US)
    assert missed_us(info([100_000] * 2, 4), [0.0, 0.0]) == 0 == missed_us(info([], 0), [])
    with pytest.raises(ValueError, match="misses of 1 layers, of which the model has 2"):
        missed_us(info([1, 1], 4), [0.5])


def test_of_a_table_the_mean_over_all_that_may_be_missing_counts() -> None:
    table = [0.0, 10.0, 12.0, 40.0]
    found = missed_us(info([8, 8], 3, table), [0.6, 3.0])
    by_hand = sum(
        math.prod(0.2 if missing else 0.8 for missing in each) * table[sum(each)] for each in product((0, 1), repeat=3)
    )
    assert found == pytest.approx(by_hand + 40)
    assert missed_us(info([4, 12], 3, table), [3.0, 3.0]) == pytest.approx(0.5 * 40 + 1.5 * 40)  # by their bytes
    assert missed_us(info([8], 3, table), [3.0000001]) == pytest.approx(40)  # rounding is no chance above 1


def test_a_line_goes_through_two_places() -> None:
    line = fit((200.0, 1200.0), (1.7, 2.9))
    assert line.ms(200) == pytest.approx(1.7) and line.ms(1200) == pytest.approx(2.9)
    assert (line.t0_ms, line.scale) == (pytest.approx(1.46), pytest.approx(1.2))
    assert anchors([0.0, 5.0, 9.0, 9.0]) == (0, 2) and anchors([3.0, 3.0]) is None is anchors([])
    for missed in ((1.0, 1.0), (0.0, math.inf)):
        with pytest.raises(ValueError, match="no line"):
            fit(missed, (1.0, 2.0))


def row(us: float, rate: float) -> BenchRow:
    return BenchRow(50.0, "lru", 1.0, rate, (rate, rate), 9.0, (9.0, 9.0), 1, None, missed_us=us)


def test_rows_between_two_are_predicted() -> None:
    line, rows = predicted([row(0, 500), row(1000, 300), row(3000, 125), row(2000, 170)])
    assert line == Line(2.0, pytest.approx(2.0))
    assert [r.predicted_tokens_per_s for r in rows] == [None, pytest.approx(250), None, pytest.approx(1000 / 6)]
    assert predicted([row(0, 500), row(0, 400)]) == (None, [row(0, 500), row(0, 400)])
    assert predicted([row(0, 500), row(9, 400)])[1][1].predicted_tokens_per_s is None


def test_predictions_are_shown_beside_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    line, rows = predicted([row(0, 500), row(1000, 300), row(3000, 125)])
    costs = {"pcie_us": 56.0, "handover_us": 5.6, "cpu_us": [57.0, 100.0], "layer_us": [0.0, 45.2, 74.7]}
    report = BenchReport("cuda", "m.gguf", "a file", 9, 9, tuple(rows), ({"cpu_experts": costs},), (), line)
    assert report.to_json()["line"] == {"t0_ms": 2.0, "scale": 2.0}
    assert report.to_json()["rows"][1]["predicted_tokens_per_s"] == 250
    show_bench(report)
    said = capsys.readouterr()
    text = " ".join((said.out + said.err).split())
    assert "A token takes 2.00 ms where nothing is missing, and 2.00 times what its misses take alone" in text
    assert "250.0" in text and "0.83" in text and text.count("fitted") == 2
    assert "an expert takes 56 us over PCIe, a hand-over 6" in text and "both, 0, 45, 75" in text
    show_bench(replace(report, line=None))
    assert "fitted" not in capsys.readouterr().out


# ms a token, by the percentage of active experts that was imposed to be missing: 48 layers of 8 of 128.
OFF = {0: 1.488, 1: 1.699, 5: 2.56, 6.6: 2.891, 10: 3.626, 20: 5.769, 40: 9.97}
ON = {0: 1.497, 1: 1.706, 5: 2.446, 6.6: 2.727, 10: 3.297, 20: 4.674, 40: 7.22}
H200 = Costs(56.0, (56.88, 99.66, 147.99, 195.16), 5.65, split_us=5.58, n_ff=768, busy_us=28.59)


@pytest.mark.parametrize("ends", [(0, 40), (0, 20), (1, 20)])
@pytest.mark.parametrize(("measured", "table"), [(OFF, None), (ON, MissGate(H200, 8).layer_us)], ids=["off", "auto"])
def test_what_was_measured_on_an_h200_is_predicted(
    measured: dict[float, float], table: tuple[float, ...] | None, ends: tuple[int, int]
) -> None:
    about = info([2_860_000] * 48, 8, None if table is None else list(table))
    missed = {pct: missed_us(about, [8 * pct / 100] * 48) for pct in measured}
    line = fit((missed[ends[0]], missed[ends[1]]), (measured[ends[0]], measured[ends[1]]))
    for pct, ms in measured.items():
        assert line.ms(missed[pct]) == pytest.approx(ms, rel=0.04), pct
    assert 0.9 < line.scale < 1.25
