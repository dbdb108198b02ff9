"""`spark sessions`: what a server keeps of conversations on disk, and how long recorded ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.ground.errors import EXIT_USAGE, UsageError
from spark.commands.options import JsonOption
from spark.commands.outputs import Reads, checked
from spark.console import note, progress_bars
from spark.results import save

app = typer.Typer(name="sessions", rich_markup_mode=None)

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A server's --cache-dir."), Reads(("*.blocks", "*.state", ".*"))
]
ModelOption = Annotated[
    Path | None,
    typer.Option("--model", metavar="MODEL.gguf", help="The model, where it lies elsewhere than when it was served."),
]


@app.callback(invoke_without_command=True)
def sessions(context: typer.Context) -> None:
    """List, show and drop what a server keeps of conversations on disk; measure recorded ones."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_USAGE)


@app.command("list")
@checked
def list_(
    folder: Folder,
    text: Annotated[bool, typer.Option("--text", help="Show how each begins, by the model's tokenizer.")] = False,
    model: ModelOption = None,
    check: Annotated[bool, typer.Option("--check", help="Read all of every file, to find those that rotted.")] = False,
    json_file: JsonOption = None,
) -> None:
    """List the conversations in the folder of a server, which may be running.

    Each line is the end of a conversation. What two have in common is on disk once: its own bytes are those of the
    files that no other needs. A prompt that begins with a conversation goes on after as many of its tokens as are said,
    on the device that made it; after none where the code of another version of Spark did.
    """
    from spark.commands.session_tables import show_cached
    from spark.sessions.cached import Texts, read

    with progress_bars() as progress:
        found = read(folder, check, lambda done, total: progress("reading files", done, total))
    texts = Texts(model)
    begins = {leaf.id: texts.of(leaf) for leaf in found.leaves} if text else None
    for line in texts.missing:
        note(line)
    made = found.to_json()
    for session in made["sessions"] if begins is not None else ():
        session["text"] = begins[session["id"]] if begins is not None else ""
    save(json_file, made)
    show_cached(found, begins)


@app.command()
@checked
def show(
    folder: Folder,
    session: Annotated[str, typer.Argument(metavar="ID", help="The beginning of an id.")],
    text: Annotated[bool, typer.Option("--text", help="Show how it begins, by the model's tokenizer.")] = False,
    model: ModelOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show the files of a conversation, and whether each is as it was written."""
    from spark.commands.session_tables import show_leaf
    from spark.sessions.cached import Texts, checked, read

    leaf = read(folder).find(session)
    texts = Texts(model)
    begins = texts.of(leaf) if text else ""
    for line in texts.missing:
        note(line)
    with progress_bars() as progress:
        wrong = checked(folder, leaf, lambda done, total: progress("reading files", done, total))
    save(json_file, leaf.to_json() | ({"text": begins} if text else {}) | {"files": wrong})
    show_leaf(leaf, wrong, begins)


@app.command()
@checked
def drop(
    folder: Folder,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Beginnings of ids.")] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="What was not used for so long: 90m, 12h, 7d, 2w.")
    ] = None,
    damaged: Annotated[
        bool,
        typer.Option("--damaged", help="Also what no server of this version can use: damaged files, what others made."),
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Remove conversations from the folder of a server that is not running.

    Files that another conversation needs stay, and files that are not Spark's. Of a conversation that was not used for
    so long, a beginning that was stays. A server can start while checksums are read; what it uses then is kept.
    """
    from spark.commands.session_tables import show_dropped
    from spark.sessions.cached import age
    from spark.sessions.cached import drop as drop_sessions

    if not ids and older_than is None and not damaged:
        raise UsageError("nothing says what to drop", hint="give ids, --older-than 7d or --damaged")
    if ids and older_than is not None:
        raise UsageError("ids and --older-than both say what to drop", hint="give one of them")
    older_s = None if older_than is None else age(older_than)
    with progress_bars() as progress:
        dropped = drop_sessions(
            folder, ids or (), older_s, damaged, lambda done, total: progress("reading files", done, total)
        )
    save(json_file, dropped.to_json())
    show_dropped(dropped)


@app.command()
@checked
def stats(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="SESSIONS.jsonl|TOKENS.parquet",
            help="From extract-sessions, or from tokenize; also folders, quoted patterns or URLs of such.",
        ),
        Reads(("*.parquet", "*.jsonl"), urls=True),
    ],
    model: Annotated[
        Path | None, typer.Option("--model", metavar="MODEL.gguf", help="Count its tokens; default: characters.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure recorded sessions: turns, prompts, contexts, tools; and say what --expect-ctx is right for them.

    A turn's prompt is new where it departs from the turn before it: a server that keeps conversations reads that alone.
    """
    from spark.commands.session_tables import show_stats
    from spark.sessions.stats import stats as measured

    with progress_bars() as progress:
        report = measured(data, model, lambda done, total: progress("reading sessions", done, total))
    save(json_file, report.to_json())
    show_stats(report)
