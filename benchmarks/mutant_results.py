"""The table of docs/mutation.md, from data/results/mutants.json."""

from __future__ import annotations

from collections import Counter

from benchmarks.markdown import Json, percent, table


def page(made: Json) -> list[str]:
    """What survived: a table of the modules, and the reasons that are known."""
    rows, lines = [], []
    for name, row in made["modules"].items():
        known = sum(s["reason"] is not None for s in row["survivors"])
        rows.append([
            name, row["possible"], row["mutants"], row["killed"], percent(row["killed"] / row["mutants"]), known,
            percent(row["killed"] / max(1, row["mutants"] - known)), ", ".join(f"`{test}`" for test in row["tests"]),
            f"{row['seconds']:.0f}", row.get("commit", "-")[:10],
        ])  # fmt: skip
    columns = [
        "module",
        "possible",
        "planted",
        "killed",
        "killed %",
        "known",
        "killed % of the others",
        "tests",
        "seconds",
        "commit",
    ]
    for name, row in made["modules"].items():
        reasons = Counter(s["reason"] for s in row["survivors"] if s["reason"])
        lines += [f"- {name}, {n}: {reason}." for reason, n in reasons.most_common()]
    unknown = [
        f"- {name}, `{s['file']}`, {s['in'] or 'at import'}, {s['operator']}: `{s['what']}`"
        for name, row in made["modules"].items()
        for s in row["survivors"]
        if s["reason"] is None
    ]
    return [*table(columns, rows), "### Survivors that no test can or need notice", "", *lines, "",
            "### Survivors that a test could notice", "", *(unknown or ["None."]), ""]  # fmt: skip
