"""Options that several commands have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from engine.ground.config import DRAFTS, MAX_PARALLEL, EngineConfig, is_cpu_experts, pool_size
from engine.ground.errors import UsageError
from engine.ground.kv_types import KV_WORDS, pair_of
from engine.ground.recall import MAX_BLOCKS, MAX_POSITION
from spark.commands.outputs import Reads, Writes, writable
from spark.console import note

if TYPE_CHECKING:
    from spark.cluster.options import ClusterOptions

_GIB = 100_000  # more than any machine has: a slip of the hand, or infinity
_MIB = 999_999
_SECONDS = 1_000_000
_THREADS = 1024

Model = Annotated[Path, typer.Argument(metavar="MODEL.gguf", help="The model; of a split one, any part.")]
Data = Annotated[
    list[str],
    typer.Argument(
        metavar="TOKENS.parquet|SESSIONS.jsonl...",
        help="From tokenize, or from extract-sessions; also a folder, a quoted pattern or a URL of such.",
    ),
    Reads(("*.parquet", "*.jsonl"), urls=True),
]
SessionsData = Annotated[
    str | None,
    typer.Argument(
        metavar="SESSIONS.jsonl",
        help="From extract-sessions; also a folder, a quoted pattern or a URL of such.",
    ),
    Reads(("*.jsonl",), urls=True),
]
HomeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIR",
        help="Home folder of a user, instead of these; repeatable, also a quoted pattern or a URL of several.",
    ),
    Reads(("*.jsonl",), urls=True),
]
TraceOption = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Folder for the routing of every token, or a URL."),
    Writes(("part-*.parquet",), urls=True),
]
DeviceOption = Annotated[
    Literal["auto", "cuda", "cpu"], typer.Option(help="Where to compute; auto: CUDA where there is a GPU.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, max=_THREADS, metavar="N", help="CPU threads; default: one a physical core.")
]
ReadyOption = Annotated[
    float, typer.Option(min=0.001, max=_SECONDS, metavar="S", help="Seconds until the model must be loaded.")
]
GenOption = Annotated[
    float, typer.Option(min=0.001, max=_SECONDS, metavar="S", help="Seconds until one request must be finished.")
]
VramOption = Annotated[
    float | None,
    typer.Option(
        min=0.001, max=_GIB, metavar="GIB", help="Most that all of it may take on the GPU; default: what is free."
    ),
]
VramsOption = Annotated[
    list[float] | None,
    typer.Option(
        "--vram", min=0.001, max=_GIB, metavar="GIB",
        help="Cap to plan for; repeatable. Default: the GPU, or 12 and 24 GiB.",
    ),
]  # fmt: skip
SparkOption = Annotated[bool, typer.Option("--spark", help="Place by the profile beside the model, and learn.")]
ProfileOption = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Profile, with --spark; default: MODEL.gguf.spark.csv."),
    Reads(beside_model=True),
]
CacheOption = Annotated[str, typer.Option(metavar="auto|N", help="Cache slots of each layer.")]
ContextOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Context length; default: the model's, bounded.")
]
PoolOption = Annotated[
    str,
    typer.Option(
        "--kv-pool", metavar="auto|GIB|N",
        help="KV cache on the GPU, as 6GiB or 16384 (tokens); the rest of --ctx is in host memory.",
    ),
]  # fmt: skip
ExpectOption = Annotated[
    int | None,
    typer.Option("--expect-ctx", min=1, metavar="N", help="How long contexts mostly are, for --kv-pool auto."),
]
KVOption = Annotated[
    str,
    typer.Option(metavar="K[,V]", help=f"Type of keys and values in the KV cache: {KV_WORDS}; one is of both."),
]  # fmt: skip
ChunkOption = Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens of a prefill step; default: chosen.")]
ParallelOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_PARALLEL, metavar="N",
        help="Requests that run at a time; default: 16, or fewer where they would take much of the experts' memory.",
    ),
]  # fmt: skip
DraftOption = Annotated[
    str,
    typer.Option(
        "--draft", metavar="WHO|FILE",
        help=f"Who proposes tokens ahead, which changes none: {', '.join(DRAFTS)}, or beside lookup what a file holds.",
    ),
    Reads(words=DRAFTS),
]  # fmt: skip
DraftMemoryOption = Annotated[
    float,
    typer.Option(
        "--draft-memory", min=0, max=_MIB, metavar="MIB",
        help="Host memory for texts of earlier requests, to propose from; 0: none.",
    ),
]  # fmt: skip
RecallOption = Annotated[
    int | None,
    typer.Option(
        "--kv-recall-blocks", min=0, max=MAX_BLOCKS, metavar="N",
        help="Blocks of 64 tokens that written tokens read of a long context; default: all.",
    ),
]  # fmt: skip
RecallFromOption = Annotated[
    int,
    typer.Option(
        "--kv-recall-from", min=0, max=MAX_POSITION, metavar="TOKENS",
        help="With either of both: read contexts of up to so many tokens whole.",
    ),
]  # fmt: skip
LeftOutOption = Annotated[
    float | None,
    typer.Option(
        "--kv-recall", min=0, max=1, metavar="EPS",
        help="Share of softmax mass that written tokens may leave out of a long context, by estimate; default: none.",
    ),
]  # fmt: skip
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="auto|ADDRESS", help="Spread it over a Ray cluster: HOST:PORT; auto: of this machine, or new."
    ),
]
WorkersOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Most workers; default: as many as the cluster has room for.")
]
WorkerGpusOption = Annotated[
    float | None,
    typer.Option(
        min=0, max=1024, metavar="N",
        help="GPUs of each worker; 0: a share of the CPUs. Default: 1, with --device cpu 0.",
    ),
]  # fmt: skip
ModelOnWorkersOption = Annotated[
    str | None, typer.Option(metavar="PATH", help="Where the workers find the model; default: at the same path.")
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the figures there; -: to stdout, and all else to stderr."),
    Writes(),
]
# Of a server alone.
ServeResidencyOption = Annotated[
    float | None,
    typer.Option(
        "--residency",
        min=0,
        max=100,
        metavar="PCT",
        help="Percent of all expert bytes that slots hold; not with --vram.",
    ),
]
PrefixOption = Annotated[
    float,
    typer.Option("--prefix-gib", min=0, max=_GIB, metavar="GIB", help="Host memory for prompts' shared beginnings."),
]
CacheDirOption = Annotated[
    Path | None, typer.Option("--cache-dir", metavar="DIR", help="Keep those beginnings there, for later starts.")
]
ExactOption = Annotated[
    bool,
    typer.Option("--exact-prefixes", help="Reuse nothing of replies that has not been computed again as a prompt."),
]
IdleOption = Annotated[
    float | None,
    typer.Option(
        "--idle-release", min=1, max=_GIB, metavar="S",
        help="Give memory back after S seconds without a request; default: never.",
    ),
]  # fmt: skip
CpuExpertsOption = Annotated[
    str,
    typer.Option(
        "--cpu-experts", metavar="auto|off|N",
        help="On a GPU, threads of the CPU that compute a part of what misses, while it pays. With off the ends of "
        "prompts have other bits.",
    ),
]
GuessOption = Annotated[
    Literal["auto", "off"],
    typer.Option(
        "--guess", help="On a GPU, bring experts that a layer is likely to miss ahead, while that pays."
    ),
]
AllowOriginOption = Annotated[
    list[str] | None,
    typer.Option(metavar="URL", help="Origin of web pages that may use it, as http://localhost:3000; repeatable."),
]
CacheDirGibOption = Annotated[
    float,
    typer.Option("--cache-dir-gib", min=0.001, max=_GIB, metavar="GIB", help="Most that its files may take."),
]


def cpu_experts(given: str) -> str:
    """Read `--cpu-experts`."""
    if not is_cpu_experts(given):
        raise UsageError(f"--cpu-experts is {given!r}: expected auto, off or a number of threads")
    return given


def drafts(given: str) -> str:
    """Read `--draft`."""
    if given not in DRAFTS and not Path(given).is_file():
        raise UsageError(f"--draft is {given!r}: expected {', '.join(DRAFTS)} or the file of a drafter or a block")
    return given


def percentages(given: str) -> tuple[float, ...]:
    """Read `--residency` of commands that take several."""
    try:
        return tuple(float(part) for part in given.split(","))
    except ValueError:
        raise UsageError(f"--residency is {given!r}: expected percentages like 100,80,60,40") from None


def slots(given: str) -> int | None:
    """Read `--cache-slots`; None chooses."""
    if given != "auto" and not given.isdecimal():
        raise UsageError(f"--cache-slots is {given!r}: expected auto or a number")
    return None if given == "auto" else int(given)


def placed_by(model: Path, spark: bool, profile: Path | None) -> Path | None:
    """The profile that `--spark` places by, which need not be there yet; None without it."""
    from engine.formats.profile import default_path

    if profile is not None and not spark:
        raise UsageError(f"--profile {profile} goes with --spark, and --spark is missing")
    return (profile or default_path(model)) if spark else None


def pool(value: str) -> str:
    """A `--kv-pool` that the engine takes."""
    try:
        pool_size(value)
    except ValueError:
        raise UsageError(f"--kv-pool {value}: expected auto, GiB as 6GiB, or tokens as 16384") from None
    return value


def kv(value: str) -> str:
    """A `--kv-type` as the engine has it."""
    try:
        return str(pair_of(value))
    except ValueError as error:
        raise UsageError(f"--kv-type {error}", hint="docs/kv.md says what to choose") from None


def cluster(
    device: str, ray: str | None, workers: int | None, worker_gpus: float | None, model: str | None
) -> ClusterOptions | None:
    """Read the options of a cluster; None where there is none."""
    from spark.cluster.options import ClusterOptions

    if ray is None:
        given = {"--workers": workers, "--worker-gpus": worker_gpus, "--model-on-workers": model}
        if alone := [name for name, value in given.items() if value is not None]:
            raise UsageError(f"{' and '.join(alone)} of a cluster, and --ray is missing", hint="give --ray auto")
        return None
    gpus = float(device != "cpu") if worker_gpus is None else worker_gpus
    if (device == "cpu") != (gpus == 0) and device != "auto":
        raise UsageError(f"--device {device} and --worker-gpus {gpus:g} contradict each other", hint="give one of them")
    return ClusterOptions(ray, workers, gpus, None if model is None else Path(model))


@dataclass(frozen=True, slots=True)
class Served:
    """The options of who serves a model, beside the model; a command with a parameter of this type has them all."""

    spark: SparkOption = False
    profile: ProfileOption = None
    vram: VramOption = None
    residency: ServeResidencyOption = None
    cache_slots: CacheOption = "auto"
    ctx: ContextOption = None
    kv_pool: PoolOption = "auto"
    expect_ctx: ExpectOption = None
    kv_type: KVOption = "f16"
    chunk: ChunkOption = None
    parallel: ParallelOption = None
    prefix: PrefixOption = 2.0
    cache_dir: CacheDirOption = None
    cache_dir_gib: CacheDirGibOption = 32.0
    exact_prefixes: ExactOption = False
    idle_release: IdleOption = None
    cpu_experts: CpuExpertsOption = "auto"
    guess: GuessOption = "auto"
    draft: DraftOption = "auto"
    draft_memory: DraftMemoryOption = 64.0
    kv_recall: LeftOutOption = None
    kv_recall_blocks: RecallOption = None
    kv_recall_from: RecallFromOption = 0

    def config(
        self, model: Path, device: Literal["auto", "cuda", "cpu"], threads: int | None
    ) -> tuple[EngineConfig, Path | None]:
        """Make the configuration of a server, and say where it writes what it learns."""
        from engine.placing import policies

        if self.vram is not None and self.residency is not None:
            raise UsageError("--vram and --residency both say how many experts are resident", hint="give one of them")
        if self.kv_recall_from and self.kv_recall is None and self.kv_recall_blocks is None:
            raise UsageError(
                "--kv-recall-from says which contexts are read whole, and all are",
                hint="add --kv-recall-blocks N or --kv-recall EPS, or leave it out",
            )
        path = placed_by(model, self.spark, self.profile)
        if path is not None and not path.exists():
            writable(path)
            note(f"no profile at {path} yet: starting uniform, learning, saving there")
        config = EngineConfig(
            model=model,
            device=device,
            policy=policies.served(self.spark).name,
            profile=path if path is not None and path.exists() else None,
            residency_pct=100.0 if self.residency is None else self.residency,
            vram_gib=self.vram,
            cache_slots=slots(self.cache_slots),
            ctx_tokens=self.ctx,
            kv_pool=pool(self.kv_pool),
            expect_ctx_tokens=self.expect_ctx,
            kv_type=kv(self.kv_type),
            chunk_tokens=self.chunk,
            parallel=self.parallel,
            threads=threads,
            prefix_gib=self.prefix,
            cache_dir=self.cache_dir,
            cache_dir_gib=self.cache_dir_gib,
            exact_prefixes=self.exact_prefixes,
            idle_release_s=self.idle_release,
            cpu_experts=cpu_experts(self.cpu_experts),
            guess=self.guess,
            draft=drafts(self.draft),
            draft_memory_mib=self.draft_memory,
            kv_recall=self.kv_recall,
            kv_recall_blocks=self.kv_recall_blocks,
            kv_recall_from=self.kv_recall_from,
        )
        return config, path


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of `Served` in place of a parameter of that type; others are as they are."""
    hints, options = (get_type_hints(of, include_extras=True) for of in (function, Served))
    given = next((name for name, hint in hints.items() if hint is Served), None)
    if given is None:
        return function
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(function).parameters.values():
        if each.name != given:
            parameters.append(each.replace(annotation=hints[each.name]))
            continue
        for f in fields(Served):
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter(f.name, kind, default=f.default, annotation=options[f.name]))

    @functools.wraps(function)
    def command(**values: Any) -> None:
        served = Served(**{f.name: values.pop(f.name) for f in fields(Served)})
        function(**values, **{given: served})

    command.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command
