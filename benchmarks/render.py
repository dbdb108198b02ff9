"""Render RESULTS.md, and the table in README.md, from data/results/*.json. Numbers are never typed.

    python benchmarks/render.py           # write
    python benchmarks/render.py --check   # exit 1 if what is there is not what would be written
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "data" / "results"
BEGIN, END = "<!-- begin: results -->", "<!-- end: results -->"
Json = dict[str, Any]

LADDER = """\
Held-out sessions, replayed under each policy; the same accesses for all. One unit is one active expert of one layer
for one generated token (6 layers, 4 of 32 experts). The bound may divide the budget anew at every step and knows the
future. *Same tokens*: every policy served the prompts for real, and gave the tokens of the all-resident run."""
KERNELS = """\
A product of one activation row against a plain parallel read of the same bytes, alternating in one run; medians and
extremes in GB/s."""
HEAD = """\
# Results

Rendered by `make results` from `data/results/*.json`; see `benchmarks/`. The machines are shared: ratios within one
run hold, absolute times are of that day.
"""


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]


def origin(name: str, made: Json) -> list[str]:
    """Where a section's numbers come from."""
    commit = (made["commit"] or "an installed wheel")[:10] + ("+changes" if "+" in (made["commit"] or "") else "")
    versions = ", ".join(f"{k} {v}" for k, v in made["versions"].items())
    gpu = f", {made['host']['gpu']}" if made["host"]["gpu"] else ""
    return [
        f"`{made['command']}` at {commit}, {made['created'][:10]}, on {made['host']['cpu']}{gpu}; {versions}. "
        f"Data: [{name}](data/results/{name}).",
        "",
    ]


def spread(values: Json, digits: int = 0) -> str:
    return f"{values['median']:,.{digits}f} ({values['min']:,.{digits}f} to {values['max']:,.{digits}f})"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def ladder(report: Json) -> list[str]:
    """The policies at one residency."""
    names = {"all": "all resident", "static": "calibrated, fixed", "lru": "LRU, no profile",
             "spark": "calibrated + cache (`--spark`)", "belady": "bound (Belady)"}  # fmt: skip
    rows = []
    for row in report["rows"]:
        same = {True: "yes", False: "NO", None: ""}[row["identical_tokens"]]
        rows.append([names.get(row["policy"], row["policy"]), percent(row["hit_rate"]),
                     f"{row['misses_per_token']:.2f}", same])  # fmt: skip
    return table(["policy", "hits", "misses a token", "same tokens"], rows)


def pipeline(name: str, made: Json) -> list[str]:
    results = made["results"]
    lines = ["## The pipeline on the reference model", "", *origin(name, made)]
    lines += [LADDER, ""]
    for key in ("validate", "validate 30", "validate 10"):
        report = results[key]
        lines += [f"### {report['residency_pct']:g}% of the expert bytes in slots "
                  f"({report['generated_tokens']:,} generated tokens; {report['prompts']} prompts served)", ""]
        command = f"spark validate MODEL.gguf test.parquet --profile train.csv --residency {report['residency_pct']:g}"
        lines += [f"    {command}", ""]
        lines += ladder(report)
    lines += ["### Calibrated on one kind of log, tested on the other (60% in slots)", ""]
    rows = []
    for family in ("claude", "codex"):
        report = results[f"cross {family}"]
        rates = {r["policy"]: r for r in report["rows"]}
        for policy in ("static", "spark"):
            crossed = [r for r in report["cross"] if r["policy"] == policy]
            rows.append([f"{family} sessions, {policy}", *(percent(1 - r["hit_rate"]) for r in (
                rates["uniform"], rates[policy], *crossed))])  # fmt: skip
    columns = ["misses of active experts", "uniform", "own logs' profile", "the other's", "both logs' profile"]
    lines += table(columns, rows)
    lines += ["### Time and memory of each command", ""]
    lines += table(
        ["command", "seconds", "peak MiB", "tokens/s"],
        [[f"`{r['command']}`", f"{r['seconds']:.1f}", f"{r['peak_mib']:.0f}",
          spread(r["tokens_per_s"]) if "tokens_per_s" in r else ""] for r in made["rows"]],
    )  # fmt: skip
    serve = results["serve"]
    served = f"{made['decode_tokens_per_s']:,.0f} tokens/s, median over {results['validate']['prompts'] - 1} prompts"
    http = f"{spread(serve['tokens_per_s'])} tokens/s, first token after {1000 * serve['first_s']['median']:.0f} ms"
    lines += [f"`spark calibrate` read {results['calibrate']['tokens']:,} tokens. Decode, all resident: {served}.", ""]
    lines += [f"Over HTTP at 60% residency: {http}.", ""]
    lines += ["### Pre-gate: recall of the active experts, mean over layers, held-out sessions", ""]
    kinds: dict[tuple[int, str], list[Json]] = {}
    for row in results["train-pregate"]["rows"]:
        kinds.setdefault((int(row["target_layer"] > row["layer"]), row["predictor"]), []).append(row)
    rows = [[f"{'next' if offset else 'this'} layer, {predictor.replace('_', ' ')}",
             *(percent(sum(r[k] for r in found) / len(found)) for k in ("recall_1x", "recall_2x", "recall_3x"))]
            for (offset, predictor), found in sorted(kinds.items(), key=lambda item: item[0][0])]  # fmt: skip
    return lines + table(["from the residual entering a layer", "first A", "first 2A", "first 3A"], rows)


def kernels(name: str, made: Json) -> list[str]:
    lines = ["## CPU kernels", "", *origin(name, made)]
    lines += [KERNELS, ""]
    lines += table(
        ["type", "MiB", "plain read", "product", "share"],
        [[r["type"], r["size_mib"], spread(r["read_gb_per_s"], 1), spread(r["product_gb_per_s"], 1),
          percent(r["ratio"])] for r in made["matrix_vector"]],
    )  # fmt: skip
    lines += ["Small batches, billions of multiply-adds a second.", ""]
    return lines + table(
        ["type", "rows x cols, T", "GMAC/s"],
        [[r["type"], f"{r['rows']} x {r['cols']}, {r['tokens']}", spread(r["gmac_per_s"], 0)] for r in made["batches"]],
    )


def rows_of(title: str):
    """A section whose JSON is `rows` of plain records."""

    def section(name: str, made: Json) -> list[str]:
        columns = list(made["rows"][0])
        shown = [[f"{v:,.3g}" if isinstance(v, float) else v for v in r.values()] for r in made["rows"]]
        return [f"## {title}", "", *origin(name, made), *table(columns, shown)]

    return section


SECTIONS = {
    "pipeline.json": pipeline,
    "cpu_kernels.json": kernels,
    "extract_memory.json": rows_of("Extraction of large logs"),
    "open_gguf.json": rows_of("Opening GGUF files"),
}


def readme_table(made: Json) -> list[str]:
    report = made["results"]["validate"]
    return [
        f"Held-out sessions on the bundled model, {report['residency_pct']:g}% of the expert bytes in slots "
        f"({report['generated_tokens']:,} generated tokens; {report['prompts']} prompts served; "
        "[RESULTS.md](RESULTS.md)):",
        "",
        *ladder(report),
    ]


def documents() -> dict[Path, str]:
    """The files that are rendered, and what they should hold."""
    made = {name: json.loads((RESULTS / name).read_text()) for name in SECTIONS if (RESULTS / name).exists()}
    lines = [HEAD]
    for name, section in SECTIONS.items():
        if name in made:
            lines += section(name, made[name])
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    middle = "\n".join(readme_table(made["pipeline.json"]))
    return {ROOT / "RESULTS.md": "\n".join(lines), readme: f"{before}{BEGIN}\n{middle}{END}{after}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for path, text in documents().items():
        if args.check and path.read_text() != text:
            sys.exit(f"{path.name} is not what data/results holds: run `make results`")
        path.write_text(text)


if __name__ == "__main__":
    main()
