"""What a cluster did, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spark.console import note, table

MOST_ROWS = 32


def show_workers(more: Mapping[str, Any]) -> None:
    """Print each worker's share, of a run on a cluster; of many workers the slowest. What was left out is noted.

    Of a validation also who climbed the ladder.
    """
    workers = more.get("workers", ())
    if not workers:
        return
    total = sum(worker["cost"] for worker in workers) or 1
    slowest = sorted(workers, key=lambda worker: worker["tokens_per_s"])[:MOST_ROWS]
    rows = [
        (
            f"{worker['node']}/{worker['index']}", f"{worker['tasks']:,}", f"{worker['cost']:,}",
            f"{worker['cost'] / total:.1%}", f"{worker['tokens_per_s']:,.0f}", worker["lost"],
        )
        for worker in slowest
    ]  # fmt: skip
    title = "Workers" if len(rows) == len(workers) else f"Workers, the slowest {len(rows)} of {len(workers)}"
    table(title, ["node", "windows", "tokens", "share", "tokens/s", "lost"], rows)
    if climbers := more.get("climbers", ()):
        longest = sorted(climbers, key=lambda climber: -climber["busy_s"])[:MOST_ROWS]
        shares = [(f"{c['node']}/{c['index']}", c["tasks"], f"{c['busy_s']:,.1f}", c["lost"]) for c in longest]
        table("Steps of the ladder", ["node", "steps", "seconds", "lost"], shares)
    for name, reason in more["refused"].items():
        note(f"warning: node {name} had no part: {reason}")
    for each in more["set_aside"]:
        note(f"warning: {each['window']} is not counted, two workers ended at it: {'; '.join(each['reasons'])}")
