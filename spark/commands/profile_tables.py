"""The tables of `spark profile`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark.console import note, table

if TYPE_CHECKING:
    from spark.pipeline.profiles import Difference, DiffReport, MergeReport, Shares, ShowReport


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


def show_profile(report: ShowReport) -> None:
    """Print what a profile is of, and how even the uses of each layer are."""
    from spark.pipeline.profiles import RESIDENCIES, top

    profile = report.profile
    n_layer, n_expert = profile.counts.shape
    rows = [
        ["model", profile.model_id or "not named"],
        ["layers", f"{n_layer}, {len(report.layers)} with counts"],
        ["experts", f"{n_expert}, {profile.n_expert_used} active"],
        ["tokens", f"{profile.tokens:,}, " + ("generated ones" if profile.count == "generated" else "of all kinds")],
        ["sessions", f"{profile.sessions:,}"],
        ["created", profile.created or "not said"],
        *(["made from", f"{s.weight:,} x {s.file}: {s.tokens:,} tokens, {s.created}"] for s in profile.sources),
        *([f"slots at {choice.residency_pct:g}%", choice.words] for choice in profile.choices),
    ]
    table(f"{report.path}", ["", ""], rows)
    if not report.layers:
        note("no layer has counts")
        return
    columns = ["layer", *(f"most used\n{pct}% ({top(n_expert, pct)})" for pct in RESIDENCIES)]
    cells = [
        [each.layer, *_percent(each.coverage), f"{each.entropy:.3f}", each.top_expert, f"{each.top_share:.1%}"]
        for each in report.layers
    ]
    cells.append(["all", *_percent(report.coverage), "", "", ""])
    title = "Share of each layer's uses that its most used experts have; entropy: 1 where all are used alike"
    table(title, [*columns, "entropy", "most used\nexpert", "its\nshare"], cells)


def show_diff(report: DiffReport) -> None:
    """Print how two profiles differ, by layer and in all."""
    from spark.pipeline.profiles import RESIDENCIES

    rows = [
        [name, f"{path}", f"{profile.tokens:,}", f"{profile.sessions:,}", profile.count, profile.created]
        for name, path, profile in zip(("A", "B"), report.paths, report.profiles, strict=True)
    ]
    table("Profiles", ["", "file", "tokens", "sessions", "count", "created"], rows)
    columns = ["layer"]
    for what in ("same\ntop", "A by B\nat", "A by A\nat"):
        columns += [f"{what} {pct}%" for pct in RESIDENCIES]

    def cells(name: object, difference: Difference) -> list[object]:
        return [
            name, *_percent(difference.overlap), *_percent(difference.coverage), *_percent(difference.own),
            f"{difference.distance:.1%}",
        ]  # fmt: skip

    layers = [cells(layer, difference) for layer, difference in report.layers.items()]
    title = (
        "Most used experts that both have; uses of A that find their expert in a slot, placed by B and by A; uses that "
        "would have to move for A and B to be alike"
    )
    table(title, [*columns, "distance"], [*layers, cells("all", report.total)])


def _percent(shares: Shares) -> list[str]:
    """A cell for each residency, empty where there are no uses."""
    from spark.pipeline.profiles import RESIDENCIES

    return [f"{shares[pct]:.1%}" if pct in shares else "" for pct in RESIDENCIES]
