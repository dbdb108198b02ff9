"""`spark profile`: commands on profiles alone, which need no model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.ground.errors import EXIT_USAGE
from spark.commands.options import JsonOption
from spark.commands.outputs import Writes, checked
from spark.console import note
from spark.results import save

app = typer.Typer(name="profile", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def profile(context: typer.Context) -> None:
    """Merge, show and compare profiles."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_USAGE)


@app.command()
@checked
def merge(
    profiles: Annotated[list[Path], typer.Argument(metavar="PROFILE", help="Profiles of one model.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Profile to write."), Writes()],
    weights: Annotated[
        str | None, typer.Option(metavar="N,...", help="What each counts for, one a profile; default: 1 each.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Make one profile of those of several people.

    Counts are added, each profile's times its weight. The profiles must be of one model, in any quantization, and
    count the same kind of tokens. What calibration chose for the slots is left out: experts are placed by the counts.
    """
    from spark.commands.profile_tables import show_merge
    from spark.pipeline import profiles as pipeline

    report = pipeline.merge(profiles, out, pipeline.weights(weights, len(profiles)))
    for warning in report.warnings:
        note(f"warning: {warning}")
    note(f"profile written to {out}")
    save(json_file, report.to_json(), lambda: show_merge(report))


@app.command()
@checked
def show(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="The profile.")], json_file: JsonOption = None
) -> None:
    """Show what a profile counts, and how even its layers are.

    Of each layer the share of its uses that its most used 10, 30 and 60% of experts have, rounded up to whole ones.
    """
    from spark.commands.profile_tables import show_profile
    from spark.pipeline import profiles as pipeline

    report = pipeline.show(profile)
    save(json_file, report.to_json(), lambda: show_profile(report))


@app.command()
@checked
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A profile.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one of the same model.")],
    json_file: JsonOption = None,
) -> None:
    """Show how two profiles of a model differ.

    Of each layer: which of the most used experts are the same, how much of A's uses B's placement would hold at 10, 30
    and 60% residency beside A's own, and the distance between their shares of uses, 0% where they are alike.
    """
    from spark.commands.profile_tables import show_diff
    from spark.pipeline import profiles as pipeline

    report = pipeline.diff(first, second)
    for warning in report.warnings:
        note(f"warning: {warning}")
    save(json_file, report.to_json(), lambda: show_diff(report))
