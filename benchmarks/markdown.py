"""What the sections of RESULTS.md are written with: tables, figures with their spread, where numbers come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Json = dict[str, Any]


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
