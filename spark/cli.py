"""The command line: options in, one library call, a table and JSON out.

Data goes to stdout, progress and messages to stderr. `main` is the one place that turns a SparkError
into `error: ...`, `hint: ...` and an exit status.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.config import Device, EngineConfig, KVType
from engine.errors import EXIT_INTERRUPTED, SparkError
from engine.files import replacing
from engine.profile import default_path

if TYPE_CHECKING:
    from spark.calibrate import CalibrateReport
    from spark.pregate import Report as PregateReport
    from spark.validate import Row, ValidateReport

app = typer.Typer(
    name="spark",
    help="Run a mixture-of-experts model that does not fit on your GPU, placed by your own coding sessions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class SourceName(StrEnum):
    """Whose logs to read."""

    claude = "claude"
    codex = "codex"
    both = "both"


class DeviceName(StrEnum):
    """Where to compute."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class CountName(StrEnum):
    """Whose routing to count."""

    generated = "generated"
    all = "all"


class KVName(StrEnum):
    """Type of the KV cache."""

    f16 = "f16"
    q8_0 = "q8_0"


Model = Annotated[Path, typer.Argument(metavar="MODEL.gguf", help="The model; of a split one, any part.")]
DeviceOption = Annotated[DeviceName, typer.Option(help="Where to compute: CUDA where there is a GPU, else the CPU.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: one a physical core.")]
ReadyOption = Annotated[float, typer.Option(min=0.1, help="Seconds until the model must be loaded.")]
GenOption = Annotated[float, typer.Option(min=0.1, help="Seconds until one request must be finished.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the figures there.")]


# --- progress and tables ------------------------------------------------------------------------------


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each label on stderr: `progress(label, done, total)`; silent where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), TextColumn("{task.fields[eta]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(label: str, done: int, total: int) -> None:
            if label not in tasks:
                for other in tasks.values():
                    bars.update(other, visible=False)
                tasks[label] = bars.add_task(label, rate="", eta="")
            elapsed = next(t.elapsed for t in bars.tasks if t.id == tasks[label]) or 0.0
            rate = done / elapsed if elapsed > 0.5 and done else 0.0
            bars.update(
                tasks[label], completed=done, total=total, visible=True,
                rate=f"{rate:,.0f}/s" if rate else "", eta=f"{(total - done) / rate:,.0f} s left" if rate else "",
            )  # fmt: skip

        yield progress


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table to stdout; numbers align right."""
    made = Table(title=title, title_justify="left", min_width=min(len(title), 78))
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    console = Console()
    # Piped output is not cut to 80 columns.
    console.print(made, width=None if console.is_terminal else 160)


def note(text: str) -> None:
    """A line for the reader, on stderr."""
    typer.echo(text, err=True)


def save(path: Path | None, report: dict[str, Any]) -> None:
    """Write `--json`, if it was asked for."""
    if path is not None:
        from spark.results import write_json

        write_json(path, report)
        note(f"figures written to {path}")


def engine_config(
    model: Path, device: DeviceName, threads: int | None, ctx: int | None = None, kv_type: KVName = KVName.f16
) -> EngineConfig:
    """The engine's configuration from a command's options."""
    names: dict[DeviceName, Device] = {DeviceName.auto: "auto", DeviceName.cuda: "cuda", DeviceName.cpu: "cpu"}
    kinds: dict[KVName, KVType] = {KVName.f16: "f16", KVName.q8_0: "q8_0"}
    return EngineConfig(model=model, device=names[device], threads=threads, ctx_tokens=ctx, kv_type=kinds[kv_type])


@contextlib.contextmanager
def token_file(model: Path, given: Path, progress: Callable[[str, int, int], None]) -> Iterator[Path]:
    """A token file: `given` itself, or what its sessions (JSONL) are tokenized to for this run."""
    import tempfile

    from spark.tokens import tokenize

    if given.suffix != ".jsonl":
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="spark-tokens-") as folder:
        path = Path(folder) / "tokens.parquet"
        tokenize(model, given, path, progress=lambda done, total: progress("tokenizing", done, total))
        yield path


# --- commands -----------------------------------------------------------------------------------------


@app.command("extract-sessions")
def extract_sessions(
    out_dir: Annotated[Path, typer.Option(help="Folder for train.jsonl and test.jsonl.")],
    source: Annotated[SourceName, typer.Option(help="Whose logs to read.")] = SourceName.both,
    claude_dir: Annotated[Path | None, typer.Option(help="Claude Code's folder; default: its own.")] = None,
    codex_dir: Annotated[Path | None, typer.Option(help="Codex's folder; default: its own.")] = None,
    test_frac: Annotated[float, typer.Option(min=0, max=1, help="Share of whole sessions to hold out.")] = 0.2,
    redact: Annotated[bool, typer.Option("--redact/--no-redact", help="Replace secrets by placeholders.")] = True,
    json_file: JsonOption = None,
) -> None:
    """Read Claude Code and Codex logs into train.jsonl and test.jsonl, split by whole session."""
    from spark.extract import ExtractOptions, extract

    options = ExtractOptions(
        out_dir=out_dir, source=source.value, claude_dir=claude_dir, codex_dir=codex_dir, test_frac=test_frac,
        redact=redact,
    )  # fmt: skip
    with progress_bars() as progress:
        report = extract(options, lambda done, total: progress("reading logs", done, total))
    show_extraction(report.to_json())
    save(json_file, report.to_json())


def show_extraction(report: dict[str, Any]) -> None:
    """Print what was read, what was skipped and why."""
    rows: list[tuple[str, object]] = [
        ("log files", report["files"]),
        *((f"sessions, {side}", n) for side, n in report["sessions"].items()),
        ("messages", f"{report['messages']:,}"),
        *((f"tokens, {role}", f"{n:,}") for role, n in report["tokens"].items()),
        *((f"{what} tokens, {p}", f"{n:,}") for what in ("prompt", "context")
          for p, n in report[f"{what}_tokens"].items()),
        *((f"skipped: {reason}", n) for reason, n in report["skipped_lines"].items()),
        *((f"redacted: {kind}", n) for kind, n in report["redacted"].items()),
    ]  # fmt: skip
    table(f"Sessions (token counts: {report['token_counter']})", ["", "count"], rows)


@app.command()
def tokenize(
    model: Model,
    sessions: Annotated[Path | None, typer.Argument(metavar="SESSIONS.jsonl", help="From extract-sessions.")] = None,
    out: Annotated[Path | None, typer.Option(help="Token file to write (Parquet).")] = None,
    window: Annotated[int, typer.Option(min=16, help="Most tokens in one window.")] = 4096,
    export_tokenizer: Annotated[Path | None, typer.Option(help="Write the tokenizer as tokenizer.json.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Render sessions as serving would, turn by turn, and mark what the model itself would have decoded."""
    from engine import tokenizer
    from spark import tokens

    if export_tokenizer is None and (sessions is None or out is None):
        raise typer.BadParameter("give SESSIONS.jsonl and --out, or --export-tokenizer")
    if (sessions is None) != (out is None):
        raise typer.BadParameter("SESSIONS.jsonl and --out belong together")
    if export_tokenizer is not None:
        with replacing(export_tokenizer, "the tokenizer") as file:
            file.write(tokenizer.load(model).to_json().encode())
        note(f"tokenizer written to {export_tokenizer}")
    if sessions is None or out is None:
        return
    with progress_bars() as progress:
        summary = tokens.tokenize(model, sessions, out, window, lambda a, b: progress("tokenizing", a, b))
    report = dataclasses.asdict(summary)
    counts = [(name.replace("_", " "), f"{value:,}") for name, value in report.items() if isinstance(value, int)]
    table("Tokens", ["", "count"], [*counts, *((f"skipped: {why}", n) for why, n in summary.skipped_turns.items())])
    save(json_file, report)


@app.command()
def calibrate(
    model: Model,
    data: Annotated[Path, typer.Argument(metavar="TOKENS.parquet|SESSIONS.jsonl", help="What to replay.")],
    out: Annotated[Path | None, typer.Option(help="Profile to write; default: MODEL.gguf.spark.csv.")] = None,
    count: Annotated[CountName, typer.Option(help="Whose routing to count.")] = CountName.generated,
    generate: Annotated[int, typer.Option(min=0, help="Also count N tokens of the model's own after each window.")] = 0,
    trace: Annotated[Path | None, typer.Option(help="Folder for the routing of every token (Parquet).")] = None,
    hidden: Annotated[bool, typer.Option(help="Add hidden states to the trace (large).")] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Stop after so many tokens.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint of an interrupted run.")] = False,
    device: DeviceOption = DeviceName.auto,
    threads: ThreadsOption = None,
    ready_timeout: ReadyOption = 600.0,
    gen_timeout: GenOption = 3600.0,
    json_file: JsonOption = None,
) -> None:
    """Replay sessions through the model, count its routing, write the placement profile."""
    from spark import calibrate as calibration
    from spark.client import Deadlines

    target = out or default_path(model)
    deadlines = Deadlines(ready_s=ready_timeout, total_s=gen_timeout)
    with progress_bars() as progress, token_file(model, data, progress) as tokens:
        options = calibration.CalibrateOptions(
            tokens, target, count.value, generate, trace, hidden, max_tokens, resume
        )
        try:
            report = calibration.calibrate(engine_config(model, device, threads), options, deadlines, progress)
        except BaseException:
            if calibration.partial_path(target).exists():
                note(f"what was counted is in {calibration.partial_path(target)}; --resume goes on from there")
            raise
    show_calibration(report)
    save(json_file, report.to_json())


def show_calibration(report: CalibrateReport) -> None:
    """Print what a calibration read and counted."""
    split = ", ".join(f"{fraction:.0%} at {percent:g}%" for percent, fraction in report.split)
    rows = [
        ("profile", report.profile),
        ("tokens read", f"{report.tokens:,}"),
        ("generated tokens among them", f"{report.generated_tokens:,}"),
        ("tokens counted", f"{report.counted_tokens:,}"),
        ("sessions", report.sessions),
        ("tokens/s", f"{report.tokens_per_s:,.0f}"),
        ("share of the slots best left to the cache", split or "not measured"),
    ]
    table("Calibration", ["", ""], rows)


@app.command()
def validate(
    model: Model,
    data: Annotated[Path, typer.Argument(metavar="TOKENS.parquet|SESSIONS.jsonl", help="Held-out sessions.")],
    profile: Annotated[Path | None, typer.Option(help="Profile to validate; default: MODEL.gguf.spark.csv.")] = None,
    cross: Annotated[list[Path] | None, typer.Option(help="Profile of other traffic to compare; repeatable.")] = None,
    residency: Annotated[float, typer.Option(min=0, max=100, help="Percent of all expert bytes in slots.")] = 60.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the held-out file to replay.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts to serve under each policy.")] = 8,
    generate: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 48,
    device: DeviceOption = DeviceName.auto,
    threads: ThreadsOption = None,
    ready_timeout: ReadyOption = 600.0,
    gen_timeout: GenOption = 3600.0,
    json_file: JsonOption = None,
) -> None:
    """Measure what each policy misses on held-out sessions, beside the bound none can beat."""
    from spark import validate as validation
    from spark.client import Deadlines

    deadlines = Deadlines(ready_s=ready_timeout, total_s=gen_timeout)
    with progress_bars() as progress, token_file(model, data, progress) as tokens:
        options = validation.ValidateOptions(
            tokens, profile or default_path(model), tuple(cross or ()), residency, max_tokens, prompts, generate
        )
        report = validation.validate(engine_config(model, device, threads), options, deadlines, progress)
    show_validation(report)
    save(json_file, report.to_json())
    if not all(row.identical_tokens for row in report.rows if row.identical_tokens is not None):
        raise SparkError("a policy changed tokens; that must never happen", hint="please report this with the model")


def show_validation(report: ValidateReport) -> None:
    """Print the ladder, and the cross-source rows where there are some."""

    def served(row: Row) -> list[str]:
        if row.decode_tokens_per_s is None or row.prefill_tokens_per_s is None or row.device_bytes is None:
            return [""] * 4
        rates = [f"{row.decode_tokens_per_s:,.0f}", f"{row.prefill_tokens_per_s:,.0f}"]
        return [*rates, f"{row.device_bytes / 2**20:,.1f}", "yes" if row.identical_tokens else "NO"]

    title = (
        f"Held-out sessions at {report.residency_pct:g}% residency: {report.generated_tokens:,} generated tokens, "
        f"{report.prompts} prompts served"
    )
    columns = [*_MISSES, "decode tok/s", "prefill tok/s", "fast MiB", "same tokens"]
    table(title, columns, [[*_misses(row), *served(row)] for row in report.rows])
    if report.cross:
        show_cross(report, "The same sessions, placed by profiles of other traffic")


_MISSES = ["policy", "hits", "misses/token"]


def _misses(row: Row) -> list[str]:
    name = row.policy if row.profile is None else f"{row.policy}, {row.profile}"
    return [name, f"{100 * row.hit_rate:.1f}%", f"{row.misses_per_token:.2f}"]


def show_cross(report: ValidateReport, title: str) -> None:
    """Print the rows of the own profile and of the others, side by side."""
    own = [row for row in report.rows if row.policy in ("uniform", "static", "spark")]
    table(title, _MISSES, [_misses(row) for row in (*own, *report.cross)])


@app.command("train-pregate")
def train_pregate(
    model: Model,
    trace: Annotated[Path, typer.Argument(metavar="TRACE_DIR", help="From calibrate --trace DIR --hidden.")],
    out: Annotated[Path, typer.Option(help="Predictors to write (safetensors).")],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training rows.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of initial weights and order.")] = 0,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Train predictors of each layer's experts from the residual that enters it; print their recall."""
    from spark import pregate

    options = pregate.PregateOptions(epochs=epochs, seed=seed, threads=threads)
    with progress_bars() as progress:
        report = pregate.train(model, trace, out, options, progress)
    show_pregate(report)
    save(json_file, report.to_json())


def show_pregate(report: PregateReport) -> None:
    """Print the recall of each predictor, averaged over layers, and of each layer for the best of each kind."""
    kinds: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in report.to_json()["rows"]:
        kinds.setdefault((row["predictor"], row["target_layer"] - row["layer"]), []).append(row)
    rows = [
        [name, "this" if offset == 0 else "next", *(f"{_mean(found, key):.1%}" for key in _RECALLS), len(found)]
        for (name, offset), found in kinds.items()
    ]
    table("Recall of the active experts", ["predictor", "layer", "first A", "first 2A", "first 3A", "layers"], rows)


_RECALLS = ("recall_1x", "recall_2x", "recall_3x")


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return float(sum(row[key] for row in rows) / len(rows))


@app.command()
def serve(
    model: Model,
    spark: Annotated[bool, typer.Option("--spark", help="Place by the profile beside the model, and learn.")] = False,
    profile: Annotated[Path | None, typer.Option(help="Profile; default: MODEL.gguf.spark.csv.")] = None,
    residency: Annotated[float, typer.Option(min=0, max=100, help="Percent of all expert bytes in slots.")] = 100.0,
    cache_slots: Annotated[str, typer.Option(metavar="auto|N", help="Cache slots of each layer.")] = "auto",
    ctx: Annotated[int | None, typer.Option(min=1, help="Context length; default: the model's, bounded.")] = None,
    kv_type: Annotated[KVName, typer.Option(help="Type of the KV cache.")] = KVName.f16,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prefill step.")] = 512,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8080,
    api_key: Annotated[str | None, typer.Option(help="Required of clients; needed for any other host.")] = None,
    device: DeviceOption = DeviceName.auto,
    threads: ThreadsOption = None,
    ready_timeout: ReadyOption = 600.0,
    gen_timeout: GenOption = 3600.0,
) -> None:
    """Serve the model over HTTP, in the OpenAI chat form."""
    from spark.client import Deadlines
    from spark.server import ServeOptions
    from spark.server import serve as run_server

    if cache_slots != "auto" and not cache_slots.isdecimal():
        raise typer.BadParameter(f"--cache-slots is {cache_slots!r}: expected auto or a number")
    path = profile or default_path(model)
    if spark and not path.exists():
        note(f"no profile at {path} yet: starting uniform, learning, saving there")
    config = dataclasses.replace(
        engine_config(model, device, threads, ctx, kv_type),
        policy="spark" if spark else "lru",
        profile=path if spark and path.exists() else None,
        residency_pct=residency,
        cache_slots=None if cache_slots == "auto" else int(cache_slots),
        chunk_tokens=chunk,
    )
    deadlines = Deadlines(ready_s=ready_timeout, total_s=gen_timeout)
    options = ServeOptions(config, host, port, api_key, deadlines, learned_profile=path if spark else None)
    with progress_bars() as progress:
        run_server(options, lambda done, total: progress("loading", done, total))


@app.command()
def demo(
    out_dir: Annotated[Path | None, typer.Option(help="Keep what the demo makes there.")] = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Run the whole pipeline on the bundled model and sample sessions, on the CPU, in under two minutes."""
    from spark import demo as demonstration

    save(json_file, demonstration.run(out_dir, threads))


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line; the only place that prints errors and chooses exit statuses."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()  # ends in SystemExit: 0, 2 for usage errors, 130 for Ctrl-C
    except SparkError as error:
        typer.echo(f"error: {error.message}", err=True)
        if error.hint:
            typer.echo(f"hint: {error.hint}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
