"""benchmarks/predictions.py: which places are fitted to, what is predicted of the others, and its table."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import misses_results
from benchmarks.driving import Shape
from benchmarks.predictions import imposed_us, kept, of_bench, predicted, worst
from spark.pipeline.bench import BenchReport, BenchRow
from spark.pipeline.predict import PCIE_BYTES_PER_US, Line

SHAPE = Shape("m", 1, 3, (1, 2), 16, 4, 100, (100_000, 300_000))


def row(residency: float, rate: float, us: float, ms: float) -> dict[str, Any]:
    rates = {"median": 1e3 / ms, "min": 1e3 / ms, "max": 1e3 / ms, "n": 3}
    return {
        "residency_pct": residency, "asked_miss_pct": rate, "miss_pct": rate, "missed_us": us, "cpu_experts": "off",
        "ms_per_token": {"median": ms}, "decode_tokens_per_s": rates,
    }  # fmt: skip


def test_two_rates_of_the_first_residency_are_fitted_to() -> None:
    rows = [row(60, 0, 0, 1.5), row(60, 10, 2000, 3.4), row(60, 20, 4000, 5.5)]
    rows += [row(40, 0, 0, 1.5), row(40, 20, 4000, 5)]
    line, made = predicted(rows, [0, 20])
    assert line == Line(1.5, pytest.approx(1.0))
    assert [r["fitted"] for r in made] == [True, False, True, False, False]
    assert made[1]["predicted_tokens_per_s"] == pytest.approx(1e3 / 3.5)
    assert made[1]["predicted_of_measured"] == pytest.approx(3.4 / 3.5)
    assert worst(made) == pytest.approx(5 / 5.5) and worst(made[:1]) is None


def test_what_misses_take_follows_from_their_rate() -> None:
    assert imposed_us(SHAPE, None, 25) == pytest.approx(4 * 0.25 * 400_000 / PCIE_BYTES_PER_US)
    assert imposed_us(SHAPE, {"layer_us": [0, 7, 7, 7, 7]}, 100) == pytest.approx(14)
    found = kept(
        row(60, 25, 0, 2) | {"depth_tokens": 9}, SHAPE, {"residency_pct": 59.97, "cpu_experts": None}
    )  # fmt: skip
    assert found["residency_pct"] == 60 and found["missed_us"] == imposed_us(SHAPE, None, 25)
    assert "depth_tokens" not in found


def test_a_table_of_it() -> None:
    _, rows = predicted([row(60, 0, 0, 2), row(60, 20, 4000, 6), row(40, 10, 2000, 4.2)], [0, 20])
    benched = [BenchRow(100.0, "all", 0.0, 500.0, (499.0, 501.0), 9.0, (9.0, 9.0), 1, None)]
    benched.append(BenchRow(60.0, "lru", 9.0, 250.0, (249.0, 251.0), 9.0, (9.0, 9.0), 1, True, missed_us=2e3,
                            predicted_tokens_per_s=260.0))  # fmt: skip
    bench = of_bench(BenchReport("cuda", "m", "files", 9, 9, tuple(benched), (), (), Line(2.0, 1.0)))
    assert bench["line"] == {"t0_ms": 2.0, "scale": 1.0} and worst(bench["rows"]) == pytest.approx(1.04)
    made = {
        "command": "predictions.py m.gguf", "commit": "0" * 40, "created": "2026-01-01T00:00:00Z", "versions": {},
        "host": {"cpu": "a CPU", "gpu": "a GPU"}, "fit_pct": [0.0, 20.0], "most_wrong": 0.1, "rows": rows,
        "worst": {"off": worst(rows), "auto": None, "bench": worst(bench["rows"])}, "bench": bench,
    }  # fmt: skip
    text = "\n".join(misses_results.predictions("predictions-laguna.json", made))
    assert text.startswith("## Predicted speed: Laguna-XS.2\n")
    assert "Furthest from 1: `--cpu-experts off` 1.050, `spark bench` 1.040." in text
    assert "| `off`, 60%, 0.0% | 500.0 (500.0 to 500.0) | fitted |  |" in text
    assert "| `off`, 40%, 10.0% | 238.1 (238.1 to 238.1) | 250.0 | 1.050 |" in text
    assert "| `spark bench`, 60.0%, 9.0% | 250.0 (249.0 to 251.0) | 260.0 | 1.040 |" in text
