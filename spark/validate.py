"""Validation: what each policy misses on sessions it has not seen, and that no token changes.

The routing of the held-out sessions is recorded once; every policy of the ladder is replayed on that
record, so all are compared on the same accesses, beside the bound that no policy can beat. Then each
policy serves held-out prompts for real: its tokens must be those of the all-resident run.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import placement, policy, simulate
from engine import profile as profiles
from engine.config import CachePolicy, EngineConfig
from engine.errors import CapacityError, UsageError
from engine.gguf import open_model
from engine.placement import Placement
from engine.profile import Profile
from engine.trace import RoutingTrace, read_routing
from spark import replay
from spark.client import DaemonClient, Deadlines
from spark.replay import Progress
from spark.tokens import TokensFile, opened

LADDER: tuple[CachePolicy, ...] = ("all", "uniform", "static", "lru", "spark")
PROMPT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """What to validate on.

    tokens: held-out token file, or sessions (JSONL) that are tokenized first. profile: counts to place by. cross:
    profiles of other traffic, reported apart. residency_pct: share of expert bytes in slots. max_tokens: of the
    held-out file, for the replay.
    prompts, generate_tokens: prompts served for real under each policy, and tokens generated for each.
    """

    tokens: Path
    profile: Path
    cross: tuple[Path, ...] = ()
    residency_pct: float = 60.0
    max_tokens: int | None = None
    prompts: int = 8
    generate_tokens: int = 48


@dataclass(frozen=True, slots=True)
class Served:
    """What serving prompts under one policy gave; rates are medians over prompts, the first left out."""

    tokens: tuple[tuple[int, ...], ...]
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    device_bytes: int
    slots_per_layer: tuple[int, ...]
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Row:
    """One rung of the ladder; the serving fields are None where nothing is served (the bound)."""

    policy: str
    hit_rate: float
    misses_per_token: float
    hit_rate_by_layer: tuple[float, ...] | None
    decode_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    device_bytes: int | None = None
    identical_tokens: bool | None = None
    served_hit_rate: float | None = None
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class ValidateReport:
    """The ladder on held-out sessions; warnings: of the profiles, for the user."""

    model: str
    profile: Path
    residency_pct: float
    tokens: int
    generated_tokens: int
    prompts: int
    rows: tuple[Row, ...]
    cross: tuple[Row, ...]
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` writes it."""

        def rows(found: Sequence[Row]) -> list[dict[str, Any]]:
            return [{name: getattr(row, name) for name in Row.__slots__} for row in found]

        return {
            "model": self.model,
            "profile": str(self.profile),
            "residency_pct": self.residency_pct,
            "tokens": self.tokens,
            "generated_tokens": self.generated_tokens,
            "prompts": self.prompts,
            "rows": rows(self.rows),
            "cross": rows(self.cross),
        }


def validate(
    config: EngineConfig, options: ValidateOptions, deadlines: Deadlines, progress: Progress
) -> ValidateReport:
    """Replay and serve the ladder; raises what the files, the model or the daemon are refused for."""
    if not 0 <= options.residency_pct <= 100:
        raise UsageError(f"--residency {options.residency_pct:g}: expected 0 to 100 percent")
    with open_model(config.model) as header:
        model_id = header.model_id
    found = [(path, *profiles.load(path, model_id=model_id)) for path in (options.profile, *options.cross)]
    with opened(config.model, options.tokens, progress) as file:
        return _validate(config, options, file, found, deadlines, progress)


_Loaded = list[tuple[Path, Profile, tuple[str, ...]]]  # the profile, those to compare; each with warnings


def _validate(
    config: EngineConfig, options: ValidateOptions, file: TokensFile, found: _Loaded, deadlines: Deadlines,
    progress: Progress,
) -> ValidateReport:  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="spark-validate-") as folder:
        with _open_reference(config, deadlines, progress) as client:
            model = client.ready.info["model"]
            replay.require_experts(client)
            _require_room(client, options.residency_pct)
            for path, profile, _ in found:
                profiles.require_shape(profile, path, (model["n_layer"], model["n_expert"]))
            n_read = _record(client, file, options, Path(folder), progress)
            trace = read_routing(Path(folder), model["model_id"])
            if client.ready.info["ctx_tokens"] <= options.generate_tokens:
                raise UsageError(
                    f"--generate {options.generate_tokens} leaves no room for a prompt in a context of "
                    f"{client.ready.info['ctx_tokens']} tokens"
                )
            prompts = _prompts(file, options.prompts, client.ready.info["ctx_tokens"] - options.generate_tokens)
            reference = _serve(client, prompts, options.generate_tokens, "all", progress)
            served = {"all": reference} if client.ready.info["policy"] == "all" else {}
            # Steps of other lengths round otherwise, so one length serves all; auto is asked once.
            alike = replace(
                config, device=client.ready.info["device"], chunk_tokens=client.ready.info["chunk_tokens"],
                profile=options.profile, residency_pct=options.residency_pct,
            )  # fmt: skip
        for name in LADDER[1:]:
            with replay.open_daemon(replace(alike, policy=name), deadlines, progress) as client:
                served[name] = _serve(client, prompts, options.generate_tokens, name, progress)

    sizes, layers = model["expert_bytes"], model["moe_layers"]
    loaded = [profile for _, profile, _ in found]
    own, *others = (p.counts[layers] for p in loaded)
    rows = []
    for step, name in enumerate(LADDER):
        progress("replaying policies", step, len(LADDER) + 1)
        placed = place(name, own, loaded[0], sizes, model["n_expert_used"], options.residency_pct)
        real = served.get(name)
        assert real is None or placed.slots_per_layer == real.slots_per_layer, "the replay places as the engine does"
        rows.append(_row(name, trace, placed, real, reference.tokens))
    progress("replaying policies", len(LADDER), len(LADDER) + 1)
    rows.append(_bound(trace, sizes, model["n_expert"], options.residency_pct))
    cross = []
    for path, counts, profile in zip(options.cross, others, loaded[1:], strict=True):
        for name in ("static", "spark"):
            placed = place(name, counts, profile, sizes, model["n_expert_used"], options.residency_pct)
            cross.append(replace(_row(name, trace, placed, None, ()), profile=str(path)))
    progress("replaying policies", len(LADDER) + 1, len(LADDER) + 1)
    return ValidateReport(
        str(config.model), options.profile, options.residency_pct, n_read, int(trace.generated.sum()),
        len(prompts), tuple(rows), tuple(cross), tuple(line for _, _, lines in found for line in lines),
    )  # fmt: skip


def place(
    name: str, counts: NDArray[np.int64], profile: Profile, sizes: Sequence[int], n_used: int, residency_pct: float
) -> Placement:
    """The placement of a rung of the ladder, as the engine makes it; counts int64 [L, E] of the MoE layers."""
    n_expert = counts.shape[1]
    budget = placement.residency_budget(n_expert, sizes, residency_pct)
    match name:
        case "all":
            return placement.everything(n_expert, sizes)
        case "uniform":
            return placement.uniform(n_expert, sizes, budget)
        case "lru":
            return placement.lru(n_expert, sizes, budget)
        case _:
            share = profile.split_for(residency_pct) if name == "spark" else 0.0
            return placement.greedy(counts, sizes, budget, n_expert_used=n_used, cache_fraction=share)


# --- recording and serving ----------------------------------------------------------------------------


def _record(client: DaemonClient, file: TokensFile, options: ValidateOptions, folder: Path, progress: Progress) -> int:
    total, read = min(file.n_tokens, options.max_tokens or file.n_tokens), 0
    progress("recording routing", read, total)
    for window in file:
        if read >= total:
            break
        read += replay.score(client, window, trace_dir=folder).usage.prompt_tokens
        progress("recording routing", min(read, total), total)
    return read


def _open_reference(config: EngineConfig, deadlines: Deadlines, progress: Progress) -> DaemonClient:
    """The daemon that the others are compared with: all experts resident, or as many as the GPU holds."""
    try:
        return replay.open_daemon(replace(config, policy="all"), deadlines, progress)
    except CapacityError:
        return replay.open_daemon(replace(config, policy="uniform", residency_pct=100.0), deadlines, progress)


def _require_room(client: DaemonClient, residency_pct: float) -> None:
    """Raise CapacityError where the reference, which holds all that fits, has fewer experts than are asked for."""
    held = client.ready.info["residency_pct"]
    if client.ready.info["policy"] != "all" and residency_pct > held:
        raise CapacityError(
            f"--residency {residency_pct:g}: {held:.1f}% of the experts fit on the device",
            hint=f"give at most --residency {int(held)}, or a larger --vram",
        )


def _prompts(file: TokensFile, n_prompts: int, room: int) -> list[tuple[int, ...]]:
    """What comes before the first generated token of windows spread over the file, one a session if it can be."""
    by_session: dict[str, list[tuple[int, ...]]] = {}
    for window in file:
        generated = np.flatnonzero(window.generated)
        if generated.size and generated[0] > 0:
            end = int(generated[0])
            start = max(0, end - min(PROMPT_TOKENS, room))
            by_session.setdefault(window.session_id, []).append(tuple(int(t) for t in window.tokens[start:end]))
    chosen: list[tuple[int, ...]] = []
    while by_session and len(chosen) < n_prompts:
        for session in list(by_session):
            found = by_session[session].pop(0)
            if found not in chosen:
                chosen.append(found)
            if not by_session[session]:
                del by_session[session]
    if not chosen:
        raise UsageError("the held-out file has no turn to continue", hint="it needs at least one assistant turn")
    return chosen[:n_prompts]


def _serve(
    client: DaemonClient, prompts: Sequence[tuple[int, ...]], n_tokens: int, name: str, progress: Progress
) -> Served:
    tokens, decode, prefill = [], [], []
    hits = misses = 0
    for i, prompt in enumerate(prompts):
        progress(f"serving: {name}", i, len(prompts))
        made, done = replay.finish(client.generate(prompt, max_tokens=n_tokens, stop_tokens=[]))
        decode.append((done.usage.completion_tokens - 1) / done.timing.decode_s)
        prefill.append(done.usage.prompt_tokens / done.timing.prefill_s)
        hits += done.residency["hits"]
        misses += done.residency["misses"]
        tokens.append(tuple(made))
    progress(f"serving: {name}", len(prompts), len(prompts))
    info = client.ready.info
    rest = slice(1, None) if len(prompts) > 1 else slice(None)  # the first warms up
    return Served(
        tuple(tokens),
        statistics.median(decode[rest]),
        statistics.median(prefill[rest]),
        info["plan"]["device_bytes"],
        tuple(info["slots_per_layer"]),
        hits / max(1, hits + misses),
    )


# --- rows ---------------------------------------------------------------------------------------------


def _row(
    name: str, trace: RoutingTrace, placed: Placement, served: Served | None, expected: tuple[tuple[int, ...], ...]
) -> Row:
    result = simulate.simulate(trace, placed, policy.AGED if name == "spark" else policy.LRU)
    uses = np.maximum(result.hits + result.misses, 1)
    row = Row(
        name,
        hit_rate=result.hit_rate,
        misses_per_token=float(result.misses.sum()) / max(1, int(trace.generated.sum())),
        hit_rate_by_layer=tuple((result.hits / uses).tolist()),
    )
    if served is None:
        return row
    return replace(
        row,
        decode_tokens_per_s=served.decode_tokens_per_s,
        prefill_tokens_per_s=served.prefill_tokens_per_s,
        device_bytes=served.device_bytes,
        # The all-resident run is what the others are compared with, where there is one.
        identical_tokens=None if name == "all" else served.tokens == expected,
        served_hit_rate=served.hit_rate,
    )


def _bound(trace: RoutingTrace, sizes: Sequence[int], n_expert: int, residency_pct: float) -> Row:
    budget = placement.residency_budget(n_expert, sizes, residency_pct)
    bound = simulate.belady(trace, sizes, budget)
    return Row(
        "belady",
        hit_rate=bound.hit_rate,
        misses_per_token=float(bound.misses.sum()) / max(1, int(trace.generated.sum())),
        hit_rate_by_layer=None,  # the bound shares one budget among all layers
    )
