"""Options that several commands have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from engine.config import EngineConfig, KVType
from engine.errors import SparkError, UsageError
from spark.console import note


def writable(path: Path | None) -> Path | None:
    """Refuse a file that could not be written in the end, before there is any work to lose."""
    if path is None or (path.exists() and not path.is_file() and not path.is_dir()):
        return path  # a device or a pipe is written to as it is
    target = path.resolve()
    if target.is_dir():
        raise UsageError(f"{path} is a folder, expected the name of a file to write")
    if not target.parent.is_dir():
        raise SparkError(f"{path} cannot be written: there is no folder {target.parent}", hint="make it first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise SparkError(f"{path} cannot be written: no permission in {target.parent}", hint="write somewhere else")
    return path


Model = Annotated[Path, typer.Argument(metavar="MODEL.gguf", help="The model; of a split one, any part.")]
Data = Annotated[
    Path,
    typer.Argument(metavar="TOKENS.parquet|SESSIONS.jsonl", help="From tokenize, or from extract-sessions."),
]
DeviceOption = Annotated[
    Literal["auto", "cuda", "cpu"], typer.Option(help="Where to compute; auto: CUDA where there is a GPU.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="CPU threads; default: one a physical core.")
]
ReadyOption = Annotated[float, typer.Option(min=0.001, metavar="S", help="Seconds until the model must be loaded.")]
GenOption = Annotated[float, typer.Option(min=0.001, metavar="S", help="Seconds until one request must be finished.")]
ResidencyOption = Annotated[
    float, typer.Option(min=0, max=100, metavar="PCT", help="Percent of all expert bytes that slots hold.")
]
VramOption = Annotated[
    float | None,
    typer.Option(min=0.001, metavar="GIB", help="Most that all of it may take on the GPU; default: what is free."),
]
SparkOption = Annotated[bool, typer.Option("--spark", help="Place by the profile beside the model, and learn.")]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", metavar="FILE", help="Profile; default: MODEL.gguf.spark.csv.")
]
CacheOption = Annotated[str, typer.Option(metavar="auto|N", help="Cache slots of each layer.")]
ContextOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Context length; default: the model's, bounded.")
]
KVOption = Annotated[KVType, typer.Option(help="Type of the KV cache.")]
ChunkOption = Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens of a prefill step; default: chosen.")]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", callback=writable, help="Also write the figures there.")
]
# Of a server alone.
ServeResidencyOption = Annotated[
    float | None,
    typer.Option(
        "--residency", min=0, max=100, metavar="PCT",
        help="Percent of all expert bytes that slots hold; not with --vram.",
    ),
]
PrefixOption = Annotated[
    float,
    typer.Option("--prefix-gib", min=0, metavar="GIB", help="Host memory for prompts' shared beginnings."),
]
CacheDirOption = Annotated[
    Path | None, typer.Option("--cache-dir", metavar="DIR", help="Keep those beginnings there, for later starts.")
]
CacheDirGibOption = Annotated[
    float,
    typer.Option("--cache-dir-gib", min=0.001, metavar="GIB", help="Most that its files may take."),
]


def slots(given: str) -> int | None:
    """Read `--cache-slots`; None chooses."""
    if given != "auto" and not given.isdecimal():
        raise UsageError(f"--cache-slots is {given!r}: expected auto or a number")
    return None if given == "auto" else int(given)


def serving(
    model: Path, spark: bool, profile: Path | None, *, residency: float | None, vram_gib: float | None, **settings: Any
) -> tuple[EngineConfig, Path | None]:
    """Make the configuration of a server, and say where it writes what it learns; settings: fields as they are."""
    from engine.profile import default_path

    if vram_gib is not None and residency is not None:
        raise UsageError("--vram and --residency both say how many experts are resident", hint="give one of them")
    path = profile or default_path(model)
    if spark and not path.exists():
        writable(path)
        note(f"no profile at {path} yet: starting uniform, learning, saving there")
    config = EngineConfig(
        model=model,
        policy="spark" if spark else "lru",
        profile=path if spark and path.exists() else None,
        residency_pct=100.0 if residency is None else residency,
        vram_gib=vram_gib,
        **settings,
    )
    return config, path if spark else None
