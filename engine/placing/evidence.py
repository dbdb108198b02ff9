"""Which rule and which share of pinned slots a model's own sessions speak for, and how sure that is. Offline, pure.

No placement is judged on sessions that it was made from: the sessions are dealt into folds by their roots, and each
fold is replayed under placements made from the counts of the others. What differs from session to session is drawn
again (bootstrap over root sessions), and candidates are compared on the same draws.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.formats.profile import Choice, Counted
from engine.placing import placement, policies, policy
from engine.placing.placement import Experts, Placement
from engine.placing.policy import Rule
from engine.placing.simulate import Recording, roots

if TYPE_CHECKING:
    from engine.formats.trace import RoutingTrace

RESIDENCIES = (10.0, 20.0, 30.0, 40.0, 60.0, 80.0)
FOLDS = 5
MIN_ROOTS = 5  # of fewer sessions no interval says anything
# What replaying may cost, in uses of an expert (generated tokens x layers x active experts x candidates): a minute of
# one core, or two; the last 32 tokens of each prefill step come on top. A count, not a clock: a run that was resumed
# must choose what an unbroken one chooses.
MAX_USES = 2_000_000_000
WORTH = 0.02  # of the misses: a smaller gain is no reason to leave a simpler candidate
DEFAULT_WORDS = f"pin nothing, remember {1 << policy.DEFAULT.memory} steps (the default)"
_DRAWS = 2000
_SEED = 1

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """cache_fraction: cache slots / slots, 0..1; the others are pinned. rule: of the cache slots."""

    cache_fraction: float
    rule: Rule


# In order of simplicity: what needs the least evidence comes first. The default assumes nothing about what comes, so
# it stands until something is better. Then other memories; LRU, which has none; slots pinned by the profile, few before
# many; last of all a fixed placement, which is the worst of all where traffic is not what was calibrated on.
CANDIDATES = (
    Candidate(1.0, policy.DEFAULT),
    *(Candidate(1.0, Rule(memory)) for memory in (5, 7, 4, 8)),
    Candidate(1.0, policy.LRU),
    *(Candidate(share, Rule(memory)) for share in (0.75, 0.5, 0.25) for memory in (6, 5, 7)),
    Candidate(0.0, policy.LRU),
)


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the 95% interval around it."""

    value: float
    low: float
    high: float


class Draws:
    """Bootstrap over root sessions; tokens: int64 [R], generated tokens of each."""

    def __init__(self, tokens: Int64s) -> None:
        self.tokens = tokens
        rng = np.random.default_rng(_SEED)
        n = tokens.size
        self._weights = rng.multinomial(n, np.full(n, 1 / n), _DRAWS).astype(np.float64) if n else np.zeros((1, 0))

    def per_token(self, misses: Int64s) -> Interval:
        """Misses [R] a token."""
        return self._ratio(misses, self.tokens)

    def against(self, misses: Int64s, others: Int64s) -> Interval:
        """How many more misses one has than another, as a share of the other's: -0.12 is 12% fewer. Paired.

        Where the other has none it is their number; 0 where neither has any.
        """
        return self._ratio(misses - others, others)

    def _ratio(self, a: Int64s, b: Int64s) -> Interval:
        drawn = (self._weights @ a) / np.maximum(self._weights @ b, 1)
        low, high = np.percentile(drawn, (2.5, 97.5))
        return Interval(float(a.sum() / max(1, b.sum())), float(low), float(high))


def place(
    counts: Int64s, expert_bytes: Sequence[int], budget_bytes: int, n_used: int, candidate: Candidate
) -> Placement:
    """The placement of a candidate, as the engine makes it."""
    placed = policies.SPARK.place(Experts(counts, expert_bytes, n_used=n_used), budget_bytes)
    return policies.split(placed, candidate.cache_fraction)


def affordable(n_layer: int, n_used: int, residencies: Sequence[float] = RESIDENCIES) -> int:
    """Generated tokens that `choose` may be given."""
    return MAX_USES // (n_layer * n_used * len(residencies) * (len(CANDIDATES) + 1))


def choose(
    trace: RoutingTrace,
    expert_bytes: Sequence[int],
    residencies: Sequence[float] = RESIDENCIES,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    threads: int | None = None,
    count: Counted = "generated",
) -> tuple[Choice, ...]:
    """What the trace's sessions speak for at each residency (percent), ascending.

    expert_bytes: [L], of the trace's layers. Nothing is chosen where fewer than MIN_ROOTS root sessions have generated
    tokens. The first of CANDIDATES is taken that the best one does not beat both beyond doubt (95%) and by WORTH.
    What is beyond the affordable is left out (`_enough`). threads: at most; None: as many as there are cores, up to 8.
    count: whose routing placements are made from, as in the profile that they are chosen for; judged is what is
    generated.
    """
    root, tokens = _enough(trace)
    if np.count_nonzero(tokens) < MIN_ROOTS:
        return ()
    folds = [_Fold.of(trace, root, fold, tokens.size, count) for fold in _deal(tokens)]
    n_used, n_expert = trace.experts.shape[2], trace.n_expert
    judged = np.flatnonzero(tokens)
    draws = Draws(tokens[judged])
    work = [(pct, candidate) for pct in sorted(set(residencies)) for candidate in (*CANDIDATES, None)]

    def replayed(at: tuple[float, Candidate | None]) -> Int64s:
        pct, candidate = at
        budget = placement.residency_budget(n_expert, expert_bytes, pct)
        misses = np.zeros(tokens.size, np.int64)
        for fold in folds:
            if candidate is None:
                experts = Experts(fold.counts, expert_bytes, n_used=n_used)
                placed, rule = policies.LRU.place(experts, budget), policies.LRU.rule
            else:
                placed, rule = place(fold.counts, expert_bytes, budget, n_used, candidate), candidate.rule
            misses += fold.recording.replay(placed, rule).root_misses
        return misses[judged]

    found: list[Int64s] = []
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        for misses in pool.map(replayed, work):
            found.append(misses)
            progress(len(found), len(work))
    each = len(CANDIDATES) + 1
    return tuple(
        _chosen(work[i][0], found[i : i + each - 1], found[i + each - 1], draws) for i in range(0, len(work), each)
    )


def _chosen(residency_pct: float, misses: Sequence[Int64s], lru: Int64s, draws: Draws) -> Choice:
    """misses: of CANDIDATES, each [R]."""
    best = min(misses, key=lambda row: int(row.sum()))
    taken = next(i for i, row in enumerate(misses) if not beaten(draws.against(row, best)))
    own = draws.per_token(misses[taken])
    return Choice(
        residency_pct=residency_pct,
        cache_fraction=CANDIDATES[taken].cache_fraction,
        memory=CANDIDATES[taken].rule.memory,
        misses=round(own.value, 4),
        low=round(own.low, 4),
        high=round(own.high, 4),
        lru=round(draws.per_token(lru).value, 4),
        static=round(draws.per_token(misses[-1]).value, 4),
        tokens=int(draws.tokens.sum()),
        sessions=draws.tokens.size,
    )


def beaten(more: Interval) -> bool:
    """Whether so many more misses than the best are more than noise, and worth a less simple choice."""
    return more.low > 0 and more.value > WORTH


# --- sessions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Fold:
    """Sessions to judge on, and the counts of all others: int64 [L, E]."""

    recording: Recording
    counts: Int64s

    @classmethod
    def of(
        cls, trace: RoutingTrace, root: npt.NDArray[np.int32], fold: set[int], n_roots: int, count: Counted
    ) -> _Fold:
        inside = np.isin(root, sorted(fold))
        others = _select(trace, ~inside & (root >= 0))
        if count == "all":
            others = replace(others, generated=np.ones_like(others.generated))
        return cls(Recording(_select(trace, inside), root[inside], n_roots), others.counts())


def beginnings(trace: RoutingTrace, tokens: Mapping[str, int]) -> RoutingTrace:
    """The first so many tokens of each root session, in the order of the trace; of roots not named, none.

    Sessions of which nothing is left are not named: roots are drawn by their numbers (`_enough`).
    """
    root, names = roots(trace)
    most = np.array([tokens.get(name, 0) for name in names], np.int64)
    return _select(trace, _before(root, np.ones(root.size, np.bool_)) < most[root]).named()


def _enough(trace: RoutingTrace) -> tuple[npt.NDArray[np.int32], Int64s]:
    """The root of each token, -1 where it is left out, and the generated tokens of each root.

    Of what cannot all be afforded each root has an equal share, or what it has, and the rest of it is left out. Where
    that would be little, fewer roots have more: a share is never below 1 / (2 x MIN_ROOTS) of what is affordable.
    """
    root, names = roots(trace)
    tokens = np.bincount(root[trace.generated], minlength=len(names)).astype(np.int64)
    left = affordable(len(trace.layers), trace.experts.shape[2])
    share = max(left // (2 * MIN_ROOTS), _level(tokens, left))
    kept = np.zeros(tokens.size, np.int64)
    for i in np.random.default_rng(_SEED).permutation(tokens.size):  # not the first ones: sessions are in order of time
        kept[i] = min(int(tokens[i]), share, left)
        left -= int(kept[i])
    inside = (kept == tokens)[root] | (_before(root, trace.generated) < kept[root])
    return np.where(inside, root, -1).astype(np.int32), kept


def _level(tokens: Int64s, most: int) -> int:
    """The largest n for which min(tokens, n) sum to at most `most`; the largest of tokens where all of them do."""
    for i, n in enumerate(ascending := np.sort(tokens).tolist()):
        if n * (len(ascending) - i) > most:
            return most // (len(ascending) - i)
        most -= n
    return int(tokens.max(initial=0))


def _before(root: npt.NDArray[np.int32], counted: npt.NDArray[np.bool_]) -> Int64s:
    """How many of the counted tokens of its root come before each token: int64 [T]."""
    order = np.argsort(root, kind="stable")
    sums: Int64s = np.cumsum(counted[order]) - counted[order]  # of all roots up to there
    ordered = root[order]
    before = np.empty(root.size, np.int64)
    before[order] = sums - sums[np.searchsorted(ordered, ordered)]
    return before


def _deal(tokens: Int64s) -> list[set[int]]:
    """Roots in FOLDS parts of about as many tokens each, none empty of tokens."""
    folds: list[set[int]] = [set() for _ in range(min(FOLDS, int(np.count_nonzero(tokens))))]
    sizes = [0] * len(folds)
    for i in np.argsort(-tokens, kind="stable").tolist():
        lightest = sizes.index(min(sizes))
        folds[lightest].add(i)
        sizes[lightest] += int(tokens[i])
    return folds


def _select(trace: RoutingTrace, wanted: npt.NDArray[np.bool_]) -> RoutingTrace:
    return replace(
        trace,
        experts=trace.experts[wanted],
        generated=trace.generated[wanted],
        session=trace.session[wanted],
        position=trace.position[wanted],
    )
