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
    save(json_file, report.to_json())
    show_merge(report)
