"""Validation: what each policy misses on sessions it has not seen, and that no token changes.

The routing of the held-out sessions is recorded once; every policy of the ladder is replayed on that
record, so all are compared on the same accesses, beside the bound that no policy can beat. Then each
policy serves held-out prompts for real: its tokens must be those of the all-resident run. Intervals are of 95%, from a
bootstrap over root sessions (engine/placing/evidence.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.formats import profile as profiles
from engine.formats.gguf import open_model
from engine.formats.profile import Profile
from engine.formats.trace import RoutingTrace, read_routing
from engine.ground.config import EngineConfig
from engine.ground.errors import CapacityError, UsageError
from engine.ground.files import scratch
from engine.placing import evidence, placement, policies, simulate
from engine.placing.evidence import Draws, Interval
from engine.placing.placement import Experts
from engine.placing.policies import Placed, Policy
from engine.placing.simulate import Recording
from spark import storage
from spark.daemon.client import DaemonClient, Deadlines
from spark.pipeline import replay
from spark.pipeline.replay import Progress
from spark.pipeline.tokens import TokensFile, opened

RESIDENCIES = (10.0, 30.0, 60.0)
PROMPT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """What to validate on.

    tokens: held-out token files, or sessions (JSONL) that are tokenized first, as paths, folders, patterns or URLs of
    them (spark/storage.py). profile: counts to place by. cross: profiles of other traffic, reported apart.
    residencies: shares of the expert bytes in slots, percent. max_tokens: of the held-out files, for the replay.
    prompts, generate_tokens: prompts served for real under each policy, and tokens generated for each.
    """

    tokens: storage.Given
    profile: Path
    cross: tuple[Path, ...] = ()
    residencies: tuple[float, ...] = RESIDENCIES
    max_tokens: int | None = None
    prompts: int = 8
    generate_tokens: int = 48


@dataclass(frozen=True, slots=True)
class Serving:
    """What serving prompts under one policy gave; rates are medians over prompts, the first left out."""

    tokens: tuple[tuple[int, ...], ...]
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    device_bytes: int
    slots_per_layer: tuple[int, ...]
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung of the ladder; the serving fields are None where nothing is served (the bound).

    misses_low, misses_high: interval of misses_per_token; None where no schedule is known (the bound of experts of
    several sizes). moves_per_token: experts that entered slots while decoding.
    """

    policy: str
    hit_rate: float
    misses_per_token: float
    misses_low: float | None
    misses_high: float | None
    moves_per_token: float | None
    hit_rate_by_layer: tuple[float, ...] | None
    decode_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    device_bytes: int | None = None
    identical_tokens: bool | None = None
    served_hit_rate: float | None = None
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class Ladder:
    """One residency. verdict: what the profile says to do there, and what that is worth on these sessions, in words."""

    residency_pct: float
    verdict: str
    rows: tuple[Rung, ...]
    cross: tuple[Rung, ...]


@dataclass(frozen=True, slots=True)
class ValidateReport:
    """The ladder on held-out sessions, by residency in the order asked for; warnings: of the profiles, for the user.

    sessions: root sessions with generated tokens.
    """

    model: str
    profile: str | Path
    tokens: int
    generated_tokens: int
    sessions: int
    prompts: int
    ladders: tuple[Ladder, ...]
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        return {
            "model": self.model,
            "profile": str(self.profile),
            "tokens": self.tokens,
            "generated_tokens": self.generated_tokens,
            "sessions": self.sessions,
            "prompts": self.prompts,
            "residencies": [asdict(ladder) for ladder in self.ladders],
        }


def validate(
    config: EngineConfig, options: ValidateOptions, deadlines: Deadlines, progress: Progress
) -> ValidateReport:
    """Replay and serve the ladder; raises what the files, the model or the daemon are refused for."""
    for percent in options.residencies:
        if not 0 <= percent <= 100:
            raise UsageError(f"--residency {percent:g}: expected 0 to 100 percent")
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
    with scratch() as folder:
        with _open_reference(config, deadlines, progress) as client:
            model = client.ready.info["model"]
            replay.require_experts(model)
            _require_room(client, max(options.residencies))
            for path, profile, _ in found:
                profiles.require_shape(profile, path, (model["n_layer"], model["n_expert"]))
            n_read = _record(client, file, options, folder, progress)
            trace = read_routing(folder, model["model_id"])
            if client.ready.info["ctx_tokens"] <= options.generate_tokens:
                raise UsageError(
                    f"--generate {options.generate_tokens} leaves no room for a prompt in a context of "
                    f"{client.ready.info['ctx_tokens']} tokens"
                )
            prompts = _prompts(file, options.prompts, client.ready.info["ctx_tokens"] - options.generate_tokens)
            whole = policies.find(client.ready.info["policy"]).whole
            reference = _serve(client, prompts, options.generate_tokens, policies.ALL.name, progress)
            # Steps of other lengths round otherwise, so one length serves all; auto is asked once.
            alike = replace(
                config, device=client.ready.info["device"], chunk_tokens=client.ready.info["chunk_tokens"],
                profile=options.profile,
            )  # fmt: skip
        judge = _Judge.of(trace, model, options, found, reference)
        ladders = []
        for percent in options.residencies:
            served: dict[str, Serving] = {}
            for each in policies.POLICIES:
                if each.whole:  # where all of it fits, it is the reference
                    served |= {each.name: reference} if whole else {}
                    continue
                asked = replace(alike, policy=each.name, residency_pct=percent)
                label = f"{each.name} at {percent:g}%"
                with replay.open_daemon(asked, deadlines, progress) as client:
                    served[each.name] = _serve(client, prompts, options.generate_tokens, label, progress)
            ladders.append(judge.ladder(percent, served, progress))
    return ValidateReport(
        str(config.model), options.profile, n_read, int(trace.generated.sum()), judge.n_roots, len(prompts),
        tuple(ladders), tuple(line for _, _, lines in found for line in lines),
    )  # fmt: skip


def place(
    rung: Policy, counts: NDArray[np.int64], profile: Profile, sizes: Sequence[int], n_used: int, residency_pct: float
) -> Placed:
    """A rung of the ladder as the engine places it; counts int64 [L, E] of the MoE layers."""
    experts = Experts(counts if rung.by_profile else np.zeros_like(counts), sizes, n_used=n_used)
    budget = placement.residency_budget(experts.n_expert, sizes, residency_pct)
    return policies.place(rung, experts, budget, profile if rung.by_profile else None)


# --- recording and serving ----------------------------------------------------------------------------


def _record(client: DaemonClient, file: TokensFile, options: ValidateOptions, folder: Path, progress: Progress) -> int:
    total, read = min(file.n_tokens, options.max_tokens or file.n_tokens), 0
    progress("recording routing", read, total)
    for window in file:
        if read >= total:
            break
        read += replay.score(
            client, window, trace_dir=folder, fed=replay.within(progress, "recording routing", read, total)
        ).usage.prompt_tokens
        progress("recording routing", min(read, total), total)
    return read


def _open_reference(config: EngineConfig, deadlines: Deadlines, progress: Progress) -> DaemonClient:
    """The daemon that the others are compared with: all experts resident, or as many as the GPU holds."""
    try:
        return replay.open_daemon(replace(config, policy=policies.ALL.name), deadlines, progress)
    except CapacityError:
        fitting = replace(config, policy=policies.UNIFORM.name, residency_pct=100.0)
        return replay.open_daemon(fitting, deadlines, progress)


def _require_room(client: DaemonClient, residency_pct: float) -> None:
    """Raise CapacityError where the reference, which holds all that fits, has fewer experts than are asked for."""
    held = client.ready.info["residency_pct"]
    if not policies.find(client.ready.info["policy"]).whole and residency_pct > held:
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
) -> Serving:
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
    return Serving(
        tuple(tokens),
        statistics.median(decode[rest]),
        statistics.median(prefill[rest]),
        info["plan"]["device_bytes"],
        tuple(info["slots_per_layer"]),
        hits / max(1, hits + misses),
    )


# --- rows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Judge:
    """What every rung is judged on and placed by; reference: the tokens that every policy must give."""

    trace: RoutingTrace
    recording: Recording
    draws: Draws
    judged: NDArray[np.intp]
    sizes: list[int]
    layers: list[int]
    n_used: int
    found: _Loaded
    expected: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, trace: RoutingTrace, model: dict[str, Any], options: ValidateOptions, found: _Loaded, reference: Serving
    ) -> _Judge:
        recording = Recording(trace)
        judged = np.flatnonzero(recording.tokens)
        return cls(
            trace, recording, Draws(recording.tokens[judged]), judged, model["expert_bytes"], model["moe_layers"],
            model["n_expert_used"], found, reference.tokens,
        )  # fmt: skip

    @property
    def n_roots(self) -> int:
        return self.judged.size

    def ladder(self, percent: float, served: Mapping[str, Serving], progress: Progress) -> Ladder:
        (_, own, _), *others = self.found
        rows: list[Rung] = []
        missed: dict[str, NDArray[np.int64]] = {}
        n_rungs = len(policies.POLICIES)
        for step, rung in enumerate(policies.POLICIES):
            progress("replaying policies", step, n_rungs + 1)
            row, missed[rung.name] = self._row(rung, own, percent, served.get(rung.name))
            rows.append(row)
        progress("replaying policies", n_rungs, n_rungs + 1)
        rows.append(self._bound(percent))
        cross = []
        for path, profile, _ in others:
            for rung in (each for each in policies.POLICIES if each.by_profile):
                cross.append(replace(self._row(rung, profile, percent, None)[0], profile=str(path)))
        progress("replaying policies", n_rungs + 1, n_rungs + 1)
        return Ladder(percent, self._verdict(own, percent, missed), tuple(rows), tuple(cross))

    def _row(
        self, rung: Policy, profile: Profile, percent: float, served: Serving | None
    ) -> tuple[Rung, NDArray[np.int64]]:
        """A rung, and its misses by root."""
        placed, rule, _ = place(rung, profile.counts[self.layers], profile, self.sizes, self.n_used, percent)
        assert served is None or placed.slots_per_layer == served.slots_per_layer, "it places as the engine does"
        result = self.recording.replay(placed, rule)
        uses = np.maximum(result.hits + result.misses, 1)
        missed = result.root_misses[self.judged]
        figure = self.draws.per_token(missed)
        row = Rung(
            rung.name, result.hit_rate, figure.value, figure.low, figure.high,
            moves_per_token=float(result.root_moves.sum()) / max(1, int(self.draws.tokens.sum())),
            hit_rate_by_layer=tuple((result.hits / uses).tolist()),
        )  # fmt: skip
        if served is None:
            return row, missed
        row = replace(
            row,
            decode_tokens_per_s=served.decode_tokens_per_s,
            prefill_tokens_per_s=served.prefill_tokens_per_s,
            device_bytes=served.device_bytes,
            # The all-resident run is what the others are compared with, where there is one.
            identical_tokens=None if rung.whole else served.tokens == self.expected,
            served_hit_rate=served.hit_rate,
        )
        return row, missed

    def _bound(self, percent: float) -> Rung:
        budget = placement.residency_budget(self.trace.n_expert, self.sizes, percent)
        bound = simulate.belady(self.trace, self.sizes, budget)
        figure = None if bound.root_misses is None else self.draws.per_token(bound.root_misses[self.judged])
        return Rung(
            "belady",
            hit_rate=bound.hit_rate,
            misses_per_token=float(bound.misses.sum()) / max(1, int(self.draws.tokens.sum())),
            misses_low=None if figure is None else figure.low,
            misses_high=None if figure is None else figure.high,
            moves_per_token=None,
            hit_rate_by_layer=None,  # the bound shares one budget among all layers
        )

    def _verdict(self, profile: Profile, percent: float, missed: dict[str, NDArray[np.int64]]) -> str:
        choice = profile.choice_for(percent)
        words = evidence.DEFAULT_WORDS if choice is None else choice.words
        if self.n_roots < evidence.MIN_ROOTS:
            return f"{words}: {self.n_roots} held-out sessions are too few to say what it is worth"
        own, others = missed[policies.SPARK.name], (missed[policies.LRU.name], missed[policies.STATIC.name])
        than = [compared(self.draws.against(own, other), int(other.sum())) for other in others]
        return f"{words}: {than[0]} LRU, {than[1]} a fixed placement"


def compared(more: Interval, others: int) -> str:
    """`12% fewer misses than` (10 to 14), `as many misses as`, `3% more misses than`; others: misses of the other."""
    if not others:  # nothing to be a share of
        return "more misses than" if more.value > 0 else "as many misses as"
    value, low, high = (round(100 * x) for x in (more.value, more.low, more.high))
    if low == high == 0:
        return "as many misses as"
    if not value or more.low <= 0 <= more.high:
        return f"as many misses ({low:+d}% to {high:+d}%) as"
    low, high = sorted((abs(low), abs(high)))
    return f"{abs(value)}% {'fewer' if value < 0 else 'more'} misses ({low} to {high}) than"
