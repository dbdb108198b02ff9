"""benchmarks/decode.py's curve: with and without experts on the CPU, and as a table."""

from __future__ import annotations

from typing import Any

from benchmarks import misses_results
from benchmarks.decode import handed_over, landed, shares


def row(percent: float, rate: float, cpu: str, **more: Any) -> dict[str, Any]:
    return {"asked_miss_pct": percent, "decode_tokens_per_s": {"median": rate}, "cpu_experts": cpu, **more}


def test_a_share_is_of_the_first_curve_without_misses() -> None:
    rows = shares([row(0, 400, "off"), row(5, 300, "off"), row(0, 396, "auto"), row(5, 340, "auto")])
    assert [r["share"] for r in rows] == [1, 0.75, 0.99, 0.85]
    assert "share" not in shares([row(5, 300, "off")])[0]


def test_what_was_handed_over_is_a_difference() -> None:
    before = {"cpu_experts": {"computed": 5, "divided": 2, "taken_back": 1, "waited_s": 0.5, "state": "on"}}
    after = {"cpu_experts": {"computed": 25, "divided": 9, "taken_back": 4, "waited_s": 0.75, "state": "on"}}
    more = {"cpu_computed": 20, "cpu_divided": 7, "cpu_taken_back": 3, "cpu_waited_s": 0.25}
    assert handed_over(before, after) == more
    assert handed_over({"cpu_experts": {}}, {}) == {} == landed({"guesses": {}}, {"guesses": {}})
    counts = {"made": 5, "useful": 2, "misses": 4, "useful_bytes": 60, "wasted_bytes": 40}
    more = {"guesses": {name: 3 * n for name, n in counts.items()}}
    assert landed({"guesses": counts}, more) == {f"guess_{name}": 2 * n for name, n in counts.items()}


def test_curves_with_guesses_are_columns_of_their_own() -> None:
    came = {"guess_made": 200, "guess_useful": 90, "guess_useful_bytes": 3 << 20, "guess_wasted_bytes": 1 << 20}
    curve = shares([row(0, 400, "off"), row(5, 300, "off"), row(5, 360, "off", guesses="0.83:0.45", **came)])
    text = "\n".join(misses_results.on_cpu({"curve": curve}))
    assert "| 5% | 0.750 | 0.900, 90 of 200 guesses right, 75% of their bytes taken |" in text
    assert "guesses 0.83:0.45" in text and "--cpu-experts" not in text


def test_both_curves_are_one_table() -> None:
    plain = [row(0, 400, "off"), row(5, 300, "off")]
    assert misses_results.on_cpu({"curve": shares(plain)}) == []
    handed = {"cpu_computed": 1200, "cpu_taken_back": 3}
    curve = shares([*plain, row(5, 340, "auto", **handed)])
    settings = {"cpus": [1, 2], "pcie_us": 52.0, "cpu_us": [42.0, 89.0], "handover_us": 5.5}
    text = "\n".join(misses_results.on_cpu({"curve": curve, "cpu_experts": {"auto": settings}}))
    assert "| 0% | 1.000 |  |" in text and "| 5% | 0.750 | 0.850, 1,200 to the CPU (3 taken back) |" in text
    assert "2 threads; an expert takes 52 us over PCIe, 1 to 2 take 42, 89 us on the CPU" in text
    rows = shares([*plain, row(5, 340, "auto", **handed, cpu_divided=2100)])
    text = "\n".join(misses_results.on_cpu({"curve": rows, "cpu_experts": {"auto": settings}}))
    assert "0.850, 1,200 to the CPU, 2,100 divided (3 taken back) |" in text
    none = {"curve": curve, "cpu_experts": {"auto": ["device cuda", "experts on the CPU: none, they are busy"]}}
    assert "auto`: experts on the CPU: none, they are busy" in "\n".join(misses_results.on_cpu(none))


def test_shared_steps_with_the_cpu_lie_beside_those_without() -> None:
    def row(n: int, pct: float, cpu: str, ms: float, **jobs: int) -> dict[str, Any]:
        times = {"median": ms, "min": ms - 0.1, "max": ms + 0.2, "n": 2}
        return {"requests": n, "asked_miss_pct": pct, "cpu_experts": cpu, "ms_per_step": times, "ratio": 0.97, **jobs}

    settings = {"off": {"cpu_experts": None, "reasons": []}, "auto": {"cpu_experts": None, "reasons": ["nothing"]}}
    made = {
        "rows": [row(2, 5, "off", 4.2), row(3, 5, "off", 6.0), row(2, 5, "auto", 3.5, computed=1200, taken_back=7)],
        "settings": settings, "residency_pct": 60.0, "pcie_gb_per_s": 51.4, "command": "c", "commit": "0123456",
        "host": {"cpu": "a", "gpu": "b"}, "versions": {}, "created": "2026-11-28",
    }  # fmt: skip
    text = "\n".join(misses_results.shared_steps("batched_misses.json", made))
    assert "| 2 at once, 5% | 4.20 (4.10 to 4.40) | 0.97 | 3.50 (3.40 to 3.70) | 1.20 | 1,200 (7 taken back) |" in text
    assert "| 3 at once, 5% | 6.00 (5.90 to 6.20) | 0.97 |  |  |  |" in text
