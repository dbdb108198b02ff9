"""The tables of `spark profile`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark.console import note, table

if TYPE_CHECKING:
    from spark.pipeline.profiles import MergeReport


def show_merge(report: MergeReport) -> None:
    """Print what was merged, with what weight, and what became of evidence."""
    made = report.made
    rows = [
        [source.file, f"{source.weight:,}", f"{source.tokens:,}", f"{source.sessions:,}", source.created]
        for source in made.sources
    ]
    rows.append(["merged", "", f"{made.tokens:,}", f"{made.sessions:,}", made.created])
    table("Merged profiles", ["made from", "weight", "tokens", "sessions", "created"], rows)
    if report.evidence:
        note(
            f"what {len(report.evidence)} of the profiles say of the slots holds for their sessions alone and is left "
            "out: experts are placed by the merged counts, slots do the default; `spark calibrate` on sessions of all "
            "measures it again"
        )
