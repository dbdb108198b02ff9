"""What `spark bench` predicts of a token's time, at residencies and rates of misses that it was not fitted to.

    python benchmarks/predictions.py model.gguf --json data/results/predictions.json

Misses are imposed (docs/routing-model.md) at fixed slots, without experts on the CPU and with them, as in decode.py's
curve. Two rates of the first residency (--fit) are what spark/pipeline/predict.py fits its line to; all other rates and
the other residencies are predicted, with the figures that the engine measured as it loaded, and measured. Then
`spark bench` itself serves at several residencies, missing what its slots make it miss, and predicts its own rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decode import PCIE_GB_PER_S, curve, write
from benchmarks.driving import DEADLINES, Prompts, Shape, note, parse_list, shape_of
from benchmarks.figures import json_option
from engine.ground.config import EngineConfig
from engine.placing.policies import UNIFORM
from spark.pipeline import predict
from spark.pipeline.bench import BenchOptions, BenchReport, bench

MOST_WRONG = 0.1  # that is promised


def imposed_us(shape: Shape, cpu_experts: dict[str, Any] | None, miss_pct: float) -> float:
    """What a token's misses take alone, where each layer misses the same share. cpu_experts: of `Ready`."""
    model = {"expert_bytes": shape.expert_bytes, "n_expert_used": shape.n_expert_used}
    misses = [shape.n_expert_used * miss_pct / 100] * len(shape.expert_bytes)
    return predict.missed_us({"model": model, "cpu_experts": cpu_experts}, misses)


def predicted(rows: Sequence[dict[str, Any]], fitted: Sequence[float]) -> tuple[predict.Line, list[dict[str, Any]]]:
    """The line through the first residency's rows at two rates, and all rows with what it says of them.

    rows: by residency, with `missed_us`, `ms_per_token` and `decode_tokens_per_s`. fitted: the rates, in percent.
    """
    first = rows[0]["residency_pct"]
    ends = [next(r for r in rows if r["residency_pct"] == first and r["asked_miss_pct"] == rate) for rate in fitted]
    us, ms = ((a[0], a[1]) for a in zip(*((r["missed_us"], r["ms_per_token"]["median"]) for r in ends), strict=True))
    line = predict.fit(us, ms)
    made = []
    for row in rows:
        rate = 1e3 / line.ms(row["missed_us"])
        is_fitted = any(row is end for end in ends)
        said = {"fitted": is_fitted, "predicted_tokens_per_s": rate}
        made.append(row | said | {"predicted_of_measured": rate / row["decode_tokens_per_s"]["median"]})
    return line, made


def kept(row: dict[str, Any], shape: Shape, info: dict[str, Any]) -> dict[str, Any]:
    """What of a row of the curve is needed here."""
    names = "asked_miss_pct", "miss_pct", "ms_per_token", "decode_tokens_per_s", "cpu_experts"
    found = {name: row[name] for name in names} | {"residency_pct": round(info["residency_pct"], 1)}
    return found | {"missed_us": imposed_us(shape, info["cpu_experts"], row["miss_pct"])}


def of_bench(report: BenchReport) -> dict[str, Any]:
    """Rows of `spark bench`, and what they were predicted by."""
    names = (
        "residency_pct", "policy", "miss_pct", "missed_us", "decode_tokens_per_s", "decode_spread",
        "predicted_tokens_per_s",
    )  # fmt: skip
    rows = [{name: getattr(row, name) for name in names} for row in report.rows]
    for row in rows:
        said = row["predicted_tokens_per_s"]
        row["predicted_of_measured"] = None if said is None else said / row["decode_tokens_per_s"]
    return {"line": report.to_json()["line"], "prompts": report.prompts, "rows": rows}


def worst(rows: Sequence[dict[str, Any]]) -> float | None:
    """The ratio that is furthest from 1, of rows that nothing was fitted to; None: there are none."""
    ratios = [r["predicted_of_measured"] for r in rows if not r.get("fitted") and r["predicted_of_measured"]]
    return max(ratios, key=lambda ratio: max(ratio, 1 / ratio), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--residency", default="60,40", help="percent of the expert bytes; the first is fitted to")
    parser.add_argument("--rates", default="0,2.5,5,10,20,30", help="percent missed, among them those of --fit")
    parser.add_argument("--fit", default="0,20", help="the two rates of the first residency that the line goes through")
    parser.add_argument("--cpu-experts", default="off,auto", help="off, auto, threads; a line each")
    parser.add_argument("--runs", type=int, default=3, help="measured requests of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="generated by each request")
    # Behind a multiple of 512 tokens a prompt's bits depend on --cpu-experts.
    parser.add_argument("--depth", type=int, default=512, help="prompt tokens")
    parser.add_argument("--bench", default="100,80,60,40", help="percent, for `spark bench`; empty: leave this out")
    o = parser.parse_args()
    shape, rates, fitted = shape_of(o.model), parse_list(o.rates), parse_list(o.fit)
    if len(fitted) != 2 or not set(fitted) <= set(rates):
        parser.error("--fit: two of the rates")
    report: dict[str, Any] = {
        "model": shape.name, "model_bytes": shape.file_bytes, "fit_pct": fitted, "most_wrong": MOST_WRONG, "lines": {},
        "rows": [], "worst": {},
    }  # fmt: skip
    expected: dict[float, list[list[int]]] = {}
    config = EngineConfig(
        model=o.model, device="cuda", policy=UNIFORM.name, prefix_gib=0.0, draft="off", ctx_tokens=o.depth + o.tokens
    )
    for cpu in o.cpu_experts.split(","):
        rows: list[dict[str, Any]] = []
        for percent in parse_list(o.residency):
            asked, same = replace(config, residency_pct=percent, cpu_experts=cpu), Prompts(shape.n_vocab, seed=2)
            shares = [rate / 100 for rate in rates]
            found, info, told = curve(asked, shape, same, shares, o.depth, o.tokens, o.runs, PCIE_GB_PER_S)
            if told != expected.setdefault(percent, told):
                raise SystemExit(f"--cpu-experts {cpu} changed tokens")
            rows += [kept(row | {"asked_miss_pct": rate}, shape, info) for row, rate in zip(found, rates, strict=True)]
            report.setdefault("settings", {})[cpu] = info["cpu_experts"] or info["reasons"]
        line, rows = predicted(rows, fitted)
        report["lines"][cpu] = {"t0_ms": line.t0_ms, "scale": line.scale}
        report["rows"] += rows
        report["worst"][cpu] = worst(rows)
        for row in rows:
            said = "fitted" if row["fitted"] else f"{row['predicted_of_measured']:.3f} of what was measured"
            note(f"{cpu}, {row['residency_pct']:g}% resident, {row['miss_pct']:.1f}% missed: {said}")
        write(o.json, report)
    if o.bench:
        options = BenchOptions(tuple(parse_list(o.bench)), prompts=4, prompt_tokens=256)
        plain = EngineConfig(model=o.model, device="cuda", draft="off", ctx_tokens=512)
        report["bench"] = of_bench(bench(plain, options, DEADLINES, lambda label, done, total: None))
        report["worst"]["bench"] = worst(report["bench"]["rows"])
        write(o.json, report)
    for what, ratio in report["worst"].items():
        note(f"{what}: {'nothing was predicted' if ratio is None else f'{ratio:.3f} at the worst place'}")


if __name__ == "__main__":
    main()
