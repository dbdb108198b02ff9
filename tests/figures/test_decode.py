"""benchmarks/decode.py's curve: with and without experts on the CPU, and as a table."""

from __future__ import annotations

from typing import Any

from benchmarks import misses_results
from benchmarks.decode import handed_over, shares


def row(percent: float, rate: float, cpu: str, **more: Any) -> dict[str, Any]:
    return {"asked_miss_pct": percent, "decode_tokens_per_s": {"median": rate}, "cpu_experts": cpu, **more}


def test_a_share_is_of_the_first_curve_without_misses() -> None:
    rows = shares([row(0, 400, "off"), row(5, 300, "off"), row(0, 396, "auto"), row(5, 340, "auto")])
    assert [r["share"] for r in rows] == [1, 0.75, 0.99, 0.85]
    assert "share" not in shares([row(5, 300, "off")])[0]


def test_what_was_handed_over_is_a_difference() -> None:
    before = {"computed": 5, "taken_back": 1, "waited_s": 0.5, "state": "on"}
    after = {"computed": 25, "taken_back": 4, "waited_s": 0.75, "state": "on"}
    assert handed_over(before, after) == {"cpu_computed": 20, "cpu_taken_back": 3, "cpu_waited_s": 0.25}
    assert handed_over({}, {}) == {}


def test_both_curves_are_one_table() -> None:
    plain = [row(0, 400, "off"), row(5, 300, "off")]
    assert misses_results.on_cpu({"curve": shares(plain)}) == []
    handed = {"cpu_computed": 1200, "cpu_taken_back": 3}
    curve = shares([*plain, row(5, 340, "auto", **handed)])
    settings = {"cpus": [1, 2], "pcie_us": 52.0, "cpu_us": [42.0, 89.0], "handover_us": 5.5}
    text = "\n".join(misses_results.on_cpu({"curve": curve, "cpu_experts": {"auto": settings}}))
    assert "| 0% | 1.000 |  |" in text and "| 5% | 0.750 | 0.850, 1,200 to the CPU (3 taken back) |" in text
    assert "2 threads; an expert takes 52 us over PCIe, 1 to 2 take 42, 89 us on the CPU" in text
    none = {"curve": curve, "cpu_experts": {"auto": ["device cuda", "experts on the CPU: none, they are busy"]}}
    assert "auto`: experts on the CPU: none, they are busy" in "\n".join(misses_results.on_cpu(none))
