"""The command line: options in, one library call, a table and JSON out.

Data goes to stdout; progress, notes and errors to stderr. What an exception becomes is in ending.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.ground.config import EngineConfig
from engine.ground.errors import EXIT_USAGE, SparkError, UsageError
from spark import model_cli
from spark.commands.ending import end
from spark.commands.options import (
    AllowOriginOption,
    ChunkOption,
    ContextOption,
    CpuExpertsOption,
    Data,
    DeviceOption,
    DraftMemoryOption,
    DraftOption,
    ExpectOption,
    GenOption,
    GuessOption,
    HomeOption,
    JsonOption,
    KVOption,
    Model,
    ModelOnWorkersOption,
    PoolOption,
    RayOption,
    ReadyOption,
    Served,
    SessionsData,
    ThreadsOption,
    TraceOption,
    VramOption,
    WorkerGpusOption,
    WorkersOption,
    cluster,
    cpu_experts,
    drafts,
    kv,
    percentages,
    pool,
    spread,
)
from spark.commands.outputs import Reads, Writes, checked
from spark.console import note, progress_bars
from spark.profile_cli import app as profile_app
from spark.results import save
from spark.sessions_cli import app as sessions_app
from spark.storage import fetched, joined, local

app = typer.Typer(
    name="spark",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(profile_app)
app.add_typer(sessions_app)


def command(name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command, whose outputs are checked before it runs."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        app.command(name)(checked(spread(function)))
        return function

    return register


# --- commands -----------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def spark(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Run a mixture-of-experts model that does not fit on your GPU, placed by your own coding sessions.

    \b
    The way through:
      spark extract-sessions --out-dir sessions
      spark calibrate MODEL.gguf sessions/train.jsonl
      spark validate MODEL.gguf sessions/test.jsonl
      spark serve MODEL.gguf --spark
    """
    if version:
        from spark import __version__

        typer.echo(f"spark {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_USAGE)


@command("extract-sessions")
def extract_sessions(
    out_dir: Annotated[
        str,
        typer.Option(metavar="DIR", help="Folder for train.jsonl and test.jsonl, or a URL."),
        Writes(("train.jsonl", "test.jsonl"), urls=True),
    ],
    source: Annotated[Literal["claude", "codex", "both"], typer.Option(help="Whose logs to read.")] = "both",
    claude_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Claude Code's folder; default: its own."), Reads(("*.jsonl",))
    ] = None,
    codex_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Codex's folder; default: its own."), Reads(("*.jsonl",))
    ] = None,
    home: HomeOption = None,
    test_frac: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Share of whole sessions to hold out.")
    ] = 0.2,
    redact: Annotated[bool, typer.Option("--redact/--no-redact", help="Replace secrets by placeholders.")] = True,
    json_file: JsonOption = None,
) -> None:
    """Read Claude Code and Codex logs into session files.

    Writes train.jsonl and test.jsonl, split by whole session: forks, resumed copies and subagents stay with the
    session that they came from. Tool calls, tool results and reasoning are kept. What cannot be read is skipped and
    counted. With --home the logs of many users are read, several at a time, and their sessions' ids stay apart.
    """
    from spark.commands.tables import show_extraction
    from spark.extract import ExtractOptions, extract

    for family, folder in (("claude", claude_dir), ("codex", codex_dir)):
        if folder is not None and source not in (family, "both"):
            raise UsageError(f"--{family}-dir {folder}: --source {source} reads nothing there")
    options = ExtractOptions(
        out_dir=out_dir, source=source, claude_dir=claude_dir, codex_dir=codex_dir, test_frac=test_frac, redact=redact,
        homes=tuple(home or ()),
    )  # fmt: skip
    with progress_bars() as progress:
        label = "reading homes" if home else "reading logs"
        report = extract(options, lambda done, total: progress(label, done, total))
    note(f"sessions written to {joined(out_dir, 'train.jsonl')} and {joined(out_dir, 'test.jsonl')}")
    save(json_file, report.to_json(), lambda: show_extraction(report))


@command()
def tokenize(
    model: Model,
    sessions: SessionsData = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Token file to write (Parquet), or a URL."), Writes(urls=True)
    ] = None,
    window: Annotated[int, typer.Option(min=16, metavar="N", help="Most tokens in one window.")] = 4096,
    export_tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tokenizer as tokenizer.json."), Writes()
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Render sessions as tokens, as serving would.

    The token file marks what the model itself would have decoded. It is for one model: its template, its tokenizer.
    """
    from engine.text import tokenizer
    from spark.commands.tables import show_tokens
    from spark.pipeline import tokens

    if (sessions is None) != (out is None) or (sessions is None and export_tokenizer is None):
        raise UsageError("expected SESSIONS.jsonl with --out, or --export-tokenizer, or all three")
    if export_tokenizer is not None:
        tokens.export_tokenizer(tokenizer.load(model), export_tokenizer)
        note(f"tokenizer written to {export_tokenizer}")
    if sessions is None or out is None:
        return
    with progress_bars() as progress:
        summary = tokens.tokenize(model, sessions, out, window, lambda a, b: progress("tokenizing", a, b))
    note(f"tokens written to {out}")
    save(json_file, summary.to_json(), lambda: show_tokens(summary))


@command()
def calibrate(
    model: Model,
    data: Data,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Profile to write, or a URL; default: MODEL.gguf.spark.csv."),
        Writes(beside_model=True, urls=True),
    ] = None,
    count: Annotated[
        Literal["generated", "all"], typer.Option(help="Tokens whose routing counts: the model's own, or all.")
    ] = "generated",
    generate: Annotated[
        int, typer.Option(min=0, metavar="N", help="Also count N tokens that the model adds to each window.")
    ] = 0,
    trace: TraceOption = None,
    hidden: Annotated[bool, typer.Option("--hidden", help="Add hidden states to the trace (large).")] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Stop after so many tokens.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from where a run was interrupted.")] = False,
    ray: RayOption = None,
    workers: WorkersOption = None,
    worker_gpus: WorkerGpusOption = None,
    model_on_workers: ModelOnWorkersOption = None,
    vram: VramOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    ready_timeout: ReadyOption = 600.0,
    gen_timeout: GenOption = 3600.0,
    json_file: JsonOption = None,
) -> None:
    """Count the experts that sessions route to.

    The sessions are replayed through the model; the counts are the profile that experts are placed by. An
    interrupted run keeps what it counted in PROFILE.partial; --resume goes on from there and ends with the same
    profile as a run that was never interrupted. With --ray the workers of a Ray cluster count, each with a daemon of
    its own; the profile is the same.
    """
    from engine.formats.profile import default_path
    from engine.placing import policies
    from spark.commands.cluster_tables import show_workers
    from spark.commands.tables import show_calibration
    from spark.daemon.client import Deadlines
    from spark.pipeline import calibrate as calibration
    from spark.pipeline import checkpoints

    # Of a profile that goes to other storage the checkpoint is here, under its name.
    target = (default_path(model) if out is None else local(out)) or Path(str(out).rpartition("/")[2])
    url = "" if out is None or local(out) is not None else out
    trace_url = "" if trace is None or local(trace) is not None else trace
    trace_dir = checkpoints.staging_path(target) if trace_url else None if trace is None else local(trace)
    # No placement changes what is counted; as many experts are resident as fit.
    config = EngineConfig(model=model, device=device, policy=policies.UNIFORM.name, vram_gib=vram, threads=threads)
    deadlines = Deadlines(ready_s=ready_timeout, total_s=gen_timeout)
    spread_over = cluster(device, ray, workers, worker_gpus, model_on_workers)
    try:
        with progress_bars() as progress:
            options = checkpoints.CalibrateOptions(
                data, target, count, generate, trace_dir, hidden, max_tokens, resume, url, trace_url
            )
            if spread_over is None:
                report = calibration.calibrate(config, options, deadlines, progress)
            else:
                from spark.cluster import calibrating

                report = calibrating.run(config, options, spread_over, deadlines, progress)
    except (KeyboardInterrupt, SystemExit, SparkError) as error:
        if checkpoints.counted_by(target) and not isinstance(error, UsageError):  # which comes before there is work
            note(f"what was counted is in {checkpoints.partial_path(target)}; --resume goes on from there")
        raise
    note(f"profile written to {report.profile}")
    save(json_file, report.to_json(), lambda: show_calibration(report), lambda: show_workers(report.more))


@command()
def validate(
    model: Model,
    data: Data,
    profile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Profile to validate, or a URL; default: MODEL.gguf.spark.csv."),
        Reads(beside_model=True, urls=True),
    ] = None,
    cross: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Profile of other traffic to compare; repeatable.")
    ] = None,
    residency: Annotated[
        str, typer.Option(metavar="PCTS", help="Percentages of the expert bytes in slots, separated by commas.")
    ] = "10,30,60",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of the held-out sessions to replay.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, metavar="N", help="Held-out prompts to serve under each policy.")] = 8,
    generate: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens to generate for each prompt.")] = 48,
    ray: RayOption = None,
    workers: WorkersOption = None,
    worker_gpus: WorkerGpusOption = None,
    model_on_workers: ModelOnWorkersOption = None,
    vram: VramOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    ready_timeout: ReadyOption = 600.0,
    gen_timeout: GenOption = 3600.0,
    json_file: JsonOption = None,
) -> None:
    """Measure what each placement misses on held-out sessions.

    The routing of the sessions is replayed under every policy, beside the bound that none can beat (belady). Each
    policy also serves prompts for real: its tokens must be those of the all-resident run. A verdict says what the
    profile has the slots do at each residency, and what that is worth. With --ray the workers of a Ray cluster replay
    and serve; the figures are the same, rates aside.
    """
    from engine.formats.profile import default_path
    from spark.commands.cluster_tables import show_workers
    from spark.commands.tables import show_validation
    from spark.daemon.client import Deadlines
    from spark.pipeline import validate as validation

    config = EngineConfig(model=model, device=device, vram_gib=vram, threads=threads)
    deadlines = Deadlines(ready_s=ready_timeout, total_s=gen_timeout)
    given = default_path(model) if profile is None else profile
    spread_over = cluster(device, ray, workers, worker_gpus, model_on_workers)
    with progress_bars() as progress, fetched(given) as path:
        options = validation.ValidateOptions(
            data, path, tuple(cross or ()), percentages(residency), max_tokens, prompts, generate
        )
        if spread_over is None:
            report = validation.validate(config, options, deadlines, progress)
        else:
            from spark.cluster import validating

            report = validating.run(config, options, spread_over, deadlines, progress)
    report = replace(report, profile=given)
    for warning in report.warnings:
        note(f"warning: {warning}")
    save(json_file, report.to_json(), lambda: show_validation(report), lambda: show_workers(report.more))
    if any(row.identical_tokens is False for ladder in report.ladders for row in ladder.rows):
        raise SparkError("a policy changed tokens; that must never happen", hint="please report this with the model")


@command("train-pregate")
def train_pregate(
    model: Model,
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE_DIR", help="From calibrate --trace DIR --hidden."),
        Reads(("part-*.parquet",)),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Predictors to write (safetensors)."), Writes()],
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Passes over the training tokens.")] = 5,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of initial weights and order.")] = 0,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Place experts by it where guesses are judged; default: by none."),
    ] = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Train predictors of the experts that a layer will use.

    They look at the residual that enters a layer and guess its experts and the next layer's, early enough to fetch
    what is not resident. Printed beside guesses that need no training, with what a prefetcher that follows them would
    find and waste at 10, 30 and 60% residency. Needs PyTorch: the extra `train`.
    """
    from spark.commands.tables import show_pregate
    from spark.pipeline import pregate

    options = pregate.PregateOptions(epochs=epochs, seed=seed, threads=threads, profile=profile)
    with progress_bars() as progress:
        report = pregate.train(model, trace, out, options, progress)
    note(f"predictors written to {out}")
    save(json_file, report.to_json(), lambda: show_pregate(report))


@command()
def serve(
    model: Model,
    served: Served,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 takes a free one.")] = 8080,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Required of clients; needed for any other host.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The key is its first line, which `ps` does not show.")
    ] = None,
    allow_origin: AllowOriginOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    ready_timeout: ReadyOption = 600.0,
    gen_timeout: GenOption = 3600.0,
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's APIs, and a page at /.

    With --spark the experts of the profile are pinned, the other slots follow the traffic, and what was learned is
    merged into the profile. Without it there is no profile and all slots are an LRU cache. SIGTERM gives
    replies half a minute to end, Ctrl-C three seconds.
    """
    from spark.daemon.client import Deadlines
    from spark.server.app import ServeOptions
    from spark.server.app import serve as run_server

    config, learned = served.config(model, device, threads)
    deadlines = Deadlines(ready_s=ready_timeout, total_s=gen_timeout)
    options = ServeOptions(config, host, port, api_key, deadlines, learned, api_key_file, tuple(allow_origin or ()))
    with ExitStack() as loading:  # a terminal that is stopped shall stop no server, so bars end where it begins
        run_server(options, loading.enter_context(progress_bars()), lambda *_: loading.close())


@command()
def launch(
    client: Annotated[Literal["claude", "codex"], typer.Argument(metavar="claude|codex", help="Claude Code or Codex.")],
    model: Model,
    served: Served,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="The client's own arguments.", show_default=False)
    ] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    ready_timeout: ReadyOption = 600.0,
    gen_timeout: GenOption = 3600.0,
) -> None:
    """Run Claude Code or Codex on a model.

    The model is served on a free port of this machine, as serve would with these options, for as long as the client
    runs. Its exit status is the client's. The client's own settings are left as they are.
    """
    from spark.commands import launch as launching
    from spark.daemon.client import Deadlines
    from spark.server.app import ServeOptions

    config, learned = served.config(model, device, threads)
    deadlines = Deadlines(ready_s=ready_timeout, total_s=gen_timeout)
    options = ServeOptions(config, port=0, deadlines=deadlines, learned_profile=learned)
    raise typer.Exit(launching.launch(client, options, arguments or ()))


command()(model_cli.inspect)
command()(model_cli.plan)


@command()
def bench(
    model: Model,
    residency: Annotated[
        str, typer.Option(metavar="PCT,...", help="Percentages of all expert bytes in slots, a run each.")
    ] = "100,80,60,40",
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Place by it and follow; default: plain LRU slots.")
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(metavar="TOKENS.parquet", help="Prompts to serve; default: pieces of Python's library."),
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Prompts to measure, after one that warms up.")
    ] = 6,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each prompt.")] = 512,
    generate: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens to generate for each prompt.")] = 128,
    vram: VramOption = None,
    ctx: ContextOption = None,
    kv_pool: PoolOption = "auto",
    expect_ctx: ExpectOption = None,
    kv_type: KVOption = "f16",
    chunk: ChunkOption = None,
    on_cpu: CpuExpertsOption = "auto",
    guess: GuessOption = "auto",
    draft: DraftOption = "auto",
    draft_memory: DraftMemoryOption = 64.0,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    ready_timeout: ReadyOption = 600.0,
    gen_timeout: GenOption = 3600.0,
    json_file: JsonOption = None,
) -> None:
    """Measure prefill and decode speed at several residencies.

    Every residency serves the same prompts, each once, so no expert is there because it was just used for the same
    text. The tokens must be the same at all of them. Then each prompt comes again with its reply as a prediction: the
    most that drafts can give, as where text is copied. That is left out with --draft off.

    On a GPU the speed at residencies between that with the fewest misses and that with the most is also predicted, from
    these two and from what the engine measured of an expert, and shown beside what was measured.
    """
    from spark.commands.tables import show_bench
    from spark.daemon.client import Deadlines
    from spark.pipeline import bench as benchmark

    config = EngineConfig(
        model=model, device=device, profile=profile, vram_gib=vram, ctx_tokens=ctx, kv_pool=pool(kv_pool),
        expect_ctx_tokens=expect_ctx, kv_type=kv(kv_type), chunk_tokens=chunk,
        cpu_experts=cpu_experts(on_cpu), guess=guess, draft=drafts(draft), draft_memory_mib=draft_memory,
        threads=threads,
    )  # fmt: skip
    options = benchmark.BenchOptions(percentages(residency), prompts, prompt_tokens, generate, tokens)
    with progress_bars() as progress:
        report = benchmark.bench(config, options, Deadlines(ready_s=ready_timeout, total_s=gen_timeout), progress)
    save(json_file, report.to_json(), lambda: show_bench(report))
    for what, same in (("a residency", "identical_tokens"), ("a draft", "draft_identical_tokens")):
        if any(getattr(row, same) is False for row in report.rows):
            raise SparkError(f"{what} changed tokens; that must never happen", hint="please report this with the model")


command("convert-drafter")(model_cli.convert_drafter)


@command()
def demo(
    out_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep what the demo makes there."),
        Writes(("*.jsonl", "*.parquet", "*.csv", "*.safetensors")),
    ] = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Run all of it on the bundled model and sample sessions.

    On the CPU, in under two minutes, with a few words on each table.
    """
    from spark.commands import demo as demonstration

    save(json_file, demonstration.run(out_dir, threads, device))


def main() -> None:
    """Run the command line."""
    end(app)


if __name__ == "__main__":
    main()
