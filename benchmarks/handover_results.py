"""The section of RESULTS.md about experts that the CPU would compute beside the GPU."""

from __future__ import annotations

from benchmarks.markdown import Json, origin, table

TEXT = """\
A captured step of {layers} layers hands a job over in each (docs/misses.md, "Experts that the CPU computes"): 2 KB of
activations to the CPU, an answer back. *Hand-over*: from the post to when the kernel that folds has the answer, us,
median and 99th percentile. *Longer*: a layer, than without. *Bare*: the fold follows the post; *as a layer*: work of
14 us ahead and of 8 us between. *Busy*: 4 blocks read host memory meanwhile{rate}. {why}."""
EXPERTS = """\
Experts in Q4_K on the CPU, {gib:.1f} GiB of them in turn, so that no cache holds one: us from the first claim to the
last answer, median and 99th percentile, and the rate of their bytes."""
UNDER_WAY = """\
The same, by flags that one block asks, beside a reader of 4 blocks that has no more than so much under way."""


def handover(name: str, made: Json) -> list[str]:
    """The ways of handing over, and what experts take by threads and number."""
    lines = ["## Experts on the CPU beside the GPU", "", *origin(name, made)]
    reader = made.get("reader_gb_per_s")
    rate = f" (alone {reader:.1f} GB/s)" if reader else ""
    if made["handovers"]:
        lines += [TEXT.format(layers=made["layers"], rate=rate, why=made["cores"]["why"].capitalize()), ""]
        columns = ["waits by", "step", "launches overlap", "PCIe", "threads", "hand-over", "p99", "longer", "step, us"]
        rows = sorted(made["handovers"], key=lambda row: (row["pcie"] != "idle", row["threads"], row["step"] != "bare"))
        lines += table(columns, [_way(row) for row in rows])
    if made.get("under_way"):
        lines += [UNDER_WAY, ""]
        columns = ["KiB under way", "alone, GB/s", "beside, GB/s", "step", "hand-over", "p99", "longer"]
        found = [(r, row) for r in made["under_way"] for row in r["handovers"] if row["wait"] != "none"]
        lines += table(columns, [_limited(r, row) for r, row in found])
    if made["experts"]:
        lines += [EXPERTS.format(gib=made["gib"]), ""]
        columns = ["shapes", "threads", "experts", "PCIe", "us", "p99", "GB/s", "reader beside, GB/s"]
        lines += table(columns, [_experts(row) for row in made["experts"]])
    if made.get("errors"):
        lines += ["Not measured: " + "; ".join(_plain(e) for e in made["errors"]) + ".", ""]
    return lines


def _plain(error: str) -> str:
    """An error as a cell of a table."""
    return " ".join(error.replace("|", "/").split())[:160]


def _way(row: Json) -> list[object]:
    head = [row["wait"], row["step"], "yes" if row["overlap"] else "no", row["pcie"], row["threads"]]
    if "error" in row:
        return [*head, _plain(row["error"]), "", "", ""]
    us, step = row["handover_us"], row["step_us"]
    longer = f"{row['longer_us']:+.2f}" if "longer_us" in row else ""
    return [*head, f"{us['median']:.2f}", f"{us['p99']:.2f}", longer, f"{step['median']:,.0f}"]


def _limited(reader: Json, row: Json) -> list[object]:
    head = [reader["kib"], f"{reader['gb_per_s']:.1f}", f"{reader['beside_gb_per_s']:.1f}", row["step"]]
    if "error" in row:
        return [*head, _plain(row["error"]), "", ""]
    us = row["handover_us"]
    return [*head, f"{us['median']:.2f}", f"{us['p99']:.2f}", f"{row['longer_us']:+.2f}"]


def _experts(row: Json) -> list[object]:
    head = [row["shape"], row["threads"], row["experts"], row["pcie"]]
    if "error" in row:
        return [*head, _plain(row["error"]), "", "", ""]
    reader = f"{row['reader_gb_per_s']:.1f}" if "reader_gb_per_s" in row else ""
    return [*head, f"{row['us']['median']:.1f}", f"{row['us']['p99']:.1f}", f"{row['gb_per_s']:.1f}", reader]


SECTIONS = {"handover.json": handover}
