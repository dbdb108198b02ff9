"""The ladder of policies: what a daemon under each of them serves, and what each misses on a record of routing.

Whoever validates has it climbed step by step, here or on the workers of a cluster; an answer depends on nothing but
what it is given.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.formats.profile import Profile
from engine.formats.trace import RoutingTrace
from engine.ground.config import EngineConfig
from engine.ground.errors import CapacityError
from engine.placing import evidence, placement, policies, simulate
from engine.placing.evidence import Draws, Interval
from engine.placing.placement import Experts
from engine.placing.policies import Placed, Policy
from engine.placing.simulate import Recording
from spark.daemon.client import DaemonClient, Deadlines
from spark.pipeline import replay
from spark.pipeline.replay import Progress

BOUND = "belady"

Loaded: TypeAlias = list[tuple[Path, Profile, tuple[str, ...]]]  # the profile, those to compare; each with warnings
Prompts: TypeAlias = tuple[tuple[int, ...], ...]
Opened: TypeAlias = Callable[[EngineConfig], AbstractContextManager[DaemonClient]]


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
class Step:
    """One row of the ladder. policy: its name, or BOUND; profile: which of those that are loaded."""

    percent: float
    policy: str
    profile: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A row, and its misses by root, int64 [R]; of the bound the row alone."""

    row: Rung
    missed: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Basis:
    """What every step is answered from.

    trace: the recorded routing. model: what the reference daemon said of it. found: profiles. reference: what that
    daemon served, whose tokens every policy must give. whole: it held all experts. prompts, generate_tokens: what is
    served. alike: chunk_tokens, which decides how steps round.
    """

    trace: RoutingTrace
    model: Mapping[str, Any]
    found: Loaded
    reference: Serving
    whole: bool
    prompts: Prompts
    generate_tokens: int
    chunk_tokens: int


def steps(percent: float, n_profiles: int) -> list[Step]:
    """The steps of one residency: the policies, the bound, and those that go by a profile under each other profile."""
    own = [Step(percent, policy.name) for policy in policies.POLICIES]
    by_profile = [policy.name for policy in policies.POLICIES if policy.by_profile]
    others = [Step(percent, name, i) for i in range(1, n_profiles) for name in by_profile]
    return [*own, Step(percent, BOUND), *others]


def place(
    rung: Policy, counts: NDArray[np.int64], profile: Profile, sizes: Sequence[int], n_used: int, residency_pct: float
) -> Placed:
    """A rung of the ladder as the engine places it; counts int64 [L, E] of the MoE layers."""
    experts = Experts(counts if rung.by_profile else np.zeros_like(counts), sizes, n_used=n_used)
    budget = placement.residency_budget(experts.n_expert, sizes, residency_pct)
    return policies.place(rung, experts, budget, profile if rung.by_profile else None)


def open_reference(config: EngineConfig, deadlines: Deadlines, progress: Progress) -> DaemonClient:
    """The daemon that the others are compared with: all experts resident, or as many as the GPU holds."""
    try:
        return replay.open_daemon(replace(config, policy=policies.ALL.name), deadlines, progress)
    except CapacityError:
        fitting = replace(config, policy=policies.UNIFORM.name, residency_pct=100.0)
        return replay.open_daemon(fitting, deadlines, progress)


def serve(client: DaemonClient, prompts: Prompts, n_tokens: int, name: str, progress: Progress) -> Serving:
    """Have a daemon answer prompts in turn; name: of the policy, for the progress.

    Without drafts: how many there are follows from the clock, and hits and misses are of those taken back, too.
    """
    tokens, decode, prefill = [], [], []
    hits = misses = 0
    for i, prompt in enumerate(prompts):
        progress(f"serving: {name}", i, len(prompts))
        made, done = replay.finish(client.generate(prompt, max_tokens=n_tokens, stop_tokens=[], draft=False))
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


class Judge:
    """Answers steps. config: of this machine's daemons, which place by the file of the profile that it names."""

    def __init__(self, basis: Basis, config: EngineConfig) -> None:
        self._basis, self._config = basis, config
        self._recording = Recording(basis.trace)
        self._judged = np.flatnonzero(self._recording.tokens)
        self.draws = Draws(self._recording.tokens[self._judged])
        self._sizes: list[int] = basis.model["expert_bytes"]

    @property
    def n_roots(self) -> int:
        """Root sessions with generated tokens."""
        return self._judged.size

    def serves(self, step: Step) -> bool:
        """Whether a step takes a daemon."""
        return step.policy != BOUND and not step.profile and not policies.find(step.policy).whole

    def answer(self, step: Step, opened: Opened, progress: Progress) -> Answer:
        """Take a step; opened: a daemon of a configuration. Raises what the daemon raises."""
        if step.policy == BOUND:
            return Answer(self._bound(step.percent))
        rung, basis = policies.find(step.policy), self._basis
        served = None
        if self.serves(step):
            asked = replace(self._config, policy=rung.name, residency_pct=step.percent, chunk_tokens=basis.chunk_tokens)
            with opened(asked) as client:
                label = f"{rung.name} at {step.percent:g}%"
                served = serve(client, basis.prompts, basis.generate_tokens, label, progress)
        elif rung.whole and basis.whole:  # where all of it fits, it is the reference
            served = basis.reference
        return self._row(rung, step, served)

    def verdict(self, percent: float, missed: Mapping[str, NDArray[np.int64] | None]) -> str:
        """What the profile says to do at a residency, and what that is worth on these sessions, in words."""
        choice = self._basis.found[0][1].choice_for(percent)
        words = evidence.DEFAULT_WORDS if choice is None else choice.words
        if self.n_roots < evidence.MIN_ROOTS:
            return f"{words}: {self.n_roots} held-out sessions are too few to say what it is worth"
        own, lru, static = (missed[policy.name] for policy in (policies.SPARK, policies.LRU, policies.STATIC))
        assert own is not None and lru is not None and static is not None
        than = [compared(self.draws.against(own, other), int(other.sum())) for other in (lru, static)]
        return f"{words}: {than[0]} LRU, {than[1]} a fixed placement"

    def _row(self, rung: Policy, step: Step, served: Serving | None) -> Answer:
        basis = self._basis
        path, profile, _ = basis.found[step.profile]
        counts = profile.counts[basis.model["moe_layers"]]
        placed, rule, _ = place(rung, counts, profile, self._sizes, basis.model["n_expert_used"], step.percent)
        assert served is None or placed.slots_per_layer == served.slots_per_layer, "it places as the engine does"
        result = self._recording.replay(placed, rule)
        uses = np.maximum(result.hits + result.misses, 1)
        missed = result.root_misses[self._judged]
        figure = self.draws.per_token(missed)
        row = Rung(
            rung.name, result.hit_rate, figure.value, figure.low, figure.high,
            moves_per_token=float(result.root_moves.sum()) / max(1, int(self.draws.tokens.sum())),
            hit_rate_by_layer=tuple((result.hits / uses).tolist()),
            profile=str(path) if step.profile else None,
        )  # fmt: skip
        if served is None:
            return Answer(row, missed)
        row = replace(
            row,
            decode_tokens_per_s=served.decode_tokens_per_s,
            prefill_tokens_per_s=served.prefill_tokens_per_s,
            device_bytes=served.device_bytes,
            # The all-resident run is what the others are compared with, where there is one.
            identical_tokens=None if rung.whole else served.tokens == basis.reference.tokens,
            served_hit_rate=served.hit_rate,
        )
        return Answer(row, missed)

    def _bound(self, percent: float) -> Rung:
        budget = placement.residency_budget(self._basis.trace.n_expert, self._sizes, percent)
        bound = simulate.belady(self._basis.trace, self._sizes, budget)
        figure = None if bound.root_misses is None else self.draws.per_token(bound.root_misses[self._judged])
        return Rung(
            BOUND,
            hit_rate=bound.hit_rate,
            misses_per_token=float(bound.misses.sum()) / max(1, int(self.draws.tokens.sum())),
            misses_low=None if figure is None else figure.low,
            misses_high=None if figure is None else figure.high,
            moves_per_token=None,
            hit_rate_by_layer=None,  # the bound shares one budget among all layers
        )


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
