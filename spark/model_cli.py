"""Commands that read a model's files and start nothing; `cli` gives them their names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.ground.config import EngineConfig
from spark.commands.options import (
    CacheOption,
    ChunkOption,
    ContextOption,
    CpuExpertsOption,
    DraftOption,
    ExpectOption,
    GuessOption,
    JsonOption,
    KVOption,
    LeftOutOption,
    Model,
    ParallelOption,
    PoolOption,
    ProfileOption,
    ReadyOption,
    RecallOption,
    SparkOption,
    VramsOption,
    cpu_experts,
    drafts,
    kv,
    placed_by,
    pool,
    slots,
)
from spark.commands.outputs import Reads, Writes
from spark.console import note, progress_bars
from spark.results import save


def inspect(
    model: Model,
    vram: VramsOption = None,
    ctx: ContextOption = None,
    kv_type: KVOption = "f16",
    chunk: ChunkOption = None,
    ready_timeout: ReadyOption = 120.0,
    json_file: JsonOption = None,
) -> None:
    """Show what a model file is, whether it can be served, and what it would take.

    The header alone is read, so the file may still be downloading, and no GPU is needed. Exit status 1 and one line
    where something is missing: kernels for a type of its tensors, its architecture or a variant of it, its tokenizer.
    """
    from engine.placing import policies
    from spark.commands.tables import show_inspection
    from spark.pipeline import plan as planning

    config = EngineConfig(
        model=model, device="cuda", policy=policies.served(False).name, ctx_tokens=ctx, kv_type=kv(kv_type),
        chunk_tokens=chunk, cpu_experts="auto", guess="auto",
    )  # fmt: skip
    report = planning.inspect(config, vram or (), ready_timeout)
    save(json_file, report.to_json())
    show_inspection(report)
    if report.refusal is not None:
        raise report.refusal


def plan(
    model: Model,
    vram: VramsOption = None,
    spark: SparkOption = False,
    profile: ProfileOption = None,
    cache_slots: CacheOption = "auto",
    ctx: ContextOption = None,
    kv_pool: PoolOption = "auto",
    expect_ctx: ExpectOption = None,
    kv_type: KVOption = "f16",
    chunk: ChunkOption = None,
    parallel: ParallelOption = None,
    on_cpu: CpuExpertsOption = "auto",
    guess: GuessOption = "auto",
    draft: DraftOption = "auto",
    kv_recall: LeftOutOption = None,
    kv_recall_blocks: RecallOption = None,
    ready_timeout: ReadyOption = 120.0,
    json_file: JsonOption = None,
) -> None:
    """Show what serving would take of a GPU and of the host.

    No weights are read. A model that cannot be served is refused as inspect would; a cap that is too small, with the
    smallest that would do. Without a GPU the size of its context is an estimate. What --draft names counts.
    """
    from engine.placing import policies
    from spark.commands.tables import show_plan
    from spark.pipeline import plan as planning

    path = placed_by(model, spark, profile)
    known = path is not None and path.exists()
    if path is not None and not known:
        note(f"no profile at {path} yet: planned as serving would start, uniform")
    config = EngineConfig(
        model=model,
        device="cuda",
        policy=policies.served(spark).name,
        profile=path if known else None,
        cache_slots=slots(cache_slots),
        ctx_tokens=ctx,
        kv_pool=pool(kv_pool),
        expect_ctx_tokens=expect_ctx,
        kv_type=kv(kv_type),
        chunk_tokens=chunk,
        parallel=parallel,
        cpu_experts=cpu_experts(on_cpu),
        guess=guess,
        draft=drafts(draft),
        kv_recall=kv_recall,
        kv_recall_blocks=kv_recall_blocks,
    )
    report = planning.plan(config, vram or (), ready_timeout)
    save(json_file, report.to_json())
    show_plan(report)


def convert_drafter(
    folder: Annotated[
        Path,
        typer.Argument(metavar="HF_DIR", help="The checkpoint: config.json and safetensors."),
        Reads(("config.json", "*.safetensors")),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Drafter to write (GGUF)."), Writes()],
    quantize: Annotated[Literal["Q8_0", "F16", "F32"], typer.Option(help="Type of its matrices.")] = "Q8_0",
) -> None:
    """Write the checkpoint of a DFlash drafter as a GGUF file.

    A drafter guesses what a larger model generates next. The file is in llama.cpp's dialect, and inspect shows it.
    """
    from spark.pipeline.convert import convert

    with progress_bars() as progress:
        made = convert(folder, out, quantize, lambda a, b: progress("writing", a, b))
    layers = ", ".join(map(str, made.captured))
    note(f"drafter of {made.n_layer} layers, for layers {layers} of a model, written to {out}: {made.n_bytes:,} bytes")
