"""Guessed experts: which missing ones a layer is likely to use, when that is worth a fetch, and what came of it. Pure.

A predictor gives each token a score for every expert of a layer that is still to come. Scores become chances by a
small table (`Chances`), chances and residency a short ranked list (`ranked`), and costs in seconds the least chance at
which a guess pays (`break_even`). A guess is bytes that lie ready; no decision of `advance` knows of any.
Axes: T tokens, E experts, L MoE layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_BINS = 16  # of a table, at each end of the margins
MEMORY_STEPS = 256  # that a record remembers what came of guesses
_PRIOR = 8.0  # guesses that came as often as was said, which a record begins with


def margins(scores: npt.NDArray[np.floating], n_used: int) -> F64:
    """Scores [T, E] above each token's own level, midway between its `n_used`-th score and the next: float64 [T, E].

    What all scores of a token have in common says nothing of its choice. Minus infinity, no guess at all, stays; a
    token with too few others has the least of them as its level.
    """
    s = np.asarray(scores, np.float64)
    best = -np.sort(-s, axis=1)
    last, beyond = best[:, n_used - 1], best[:, min(n_used, s.shape[1] - 1)]
    least = np.where(np.isfinite(s), s, np.inf).min(axis=1, initial=np.inf)
    level = np.where(np.isfinite(last) & np.isfinite(beyond), 0.5 * last + 0.5 * beyond, least)
    return s - np.where(np.isfinite(level), level, 0.0)[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class Chances:
    """How likely an expert is to be used, by its margin: straight lines between knots, level beyond them.

    knots: float64 [K], ascending. values: float64 [K], 0..1, never falling.
    """

    knots: F64
    values: F64

    def __post_init__(self) -> None:
        if not self.knots.shape == self.values.shape or self.knots.ndim != 1 or not self.knots.size:
            raise ValueError(f"{self.knots.shape} knots, {self.values.shape} values")
        if not (np.isfinite(self.knots).all() and (np.diff(self.knots) > 0).all()):
            raise ValueError("knots that do not ascend")
        if not ((self.values >= 0).all() and (self.values <= 1).all() and (np.diff(self.values) >= 0).all()):
            raise ValueError("chances that fall, or lie outside of 0 to 1")

    def of(self, margins: F64) -> F64:
        """Chances of margins of any shape; 0 of minus infinity."""
        return np.where(margins == -np.inf, 0.0, np.interp(margins, self.knots, self.values))

    def least_margin(self, chance: float) -> float:
        """What a margin has to exceed for its chance to; infinite where all do, or none."""
        above = np.flatnonzero(self.values > chance)
        if not above.size or not above[0]:
            return float(np.inf if not above.size else -np.inf)
        i = above[0]
        (x0, x1), (y0, y1) = self.knots[i - 1 : i + 1], self.values[i - 1 : i + 1]
        return float(x0 + (x1 - x0) * (chance - y0) / (y1 - y0))


def logistic() -> Chances:
    """The table of a predictor that has none of its own: what training's loss takes a score for."""
    knots = np.linspace(-12.0, 12.0, 49)
    return Chances(knots, 1.0 / (1.0 + np.exp(-knots)))


def fit(margin: F64, used: Bools) -> Chances:
    """The table of margins and whether their experts were used, both [N]; `logistic` where nothing can be told.

    Margins are cut into bins, as many by those of used experts as by those of others, and bins are pooled until the
    share of used ones rises from each to the next (isotonic regression; Ayer et al. 1955). Beyond the last bins chances
    go on to 0 and to half of what is missing from 1, so that they keep the order of margins there.
    """
    known = np.isfinite(margin)
    margin, used = margin[known], used[known]
    if not used.any() or used.all():
        return logistic()
    cuts = np.linspace(0.0, 1.0, _BINS + 1)[1:-1]
    edges = np.unique(np.concatenate([np.quantile(margin[used], cuts), np.quantile(margin[~used], cuts)]))
    at = np.searchsorted(edges, margin, side="right")
    n, n_used, total = (np.bincount(at, weights, edges.size + 1) for weights in (None, used, margin))
    pools: list[tuple[float, float, float]] = []  # margins, of how many uses, which
    for count, uses, sum_of in zip(n.tolist(), n_used.tolist(), total.tolist(), strict=True):
        if not count:
            continue
        pools.append((count, uses, sum_of))
        while len(pools) > 1 and pools[-2][1] * pools[-1][0] >= pools[-1][1] * pools[-2][0]:
            last, before = pools.pop(), pools.pop()
            pools.append((last[0] + before[0], last[1] + before[1], last[2] + before[2]))
    knots = np.array([sum_of / count for count, _, sum_of in pools])
    values = np.array([uses / count for count, uses, _ in pools])
    reach = 1.0 + float(knots[-1] - knots[0])
    knots = np.concatenate(([knots[0] - reach], knots, [knots[-1] + reach]))
    values = np.concatenate(([0.0], values, [0.5 + 0.5 * values[-1]]))
    apart = np.concatenate(([True], np.diff(knots) > 0))
    return Chances(knots[apart], values[apart])


def of_step(chances: F64) -> F64:
    """The chance that any token of a step uses an expert, tokens taken as independent: [T, E] to [1, E]."""
    return np.asarray(1.0 - np.prod(1.0 - chances, axis=0, keepdims=True))


def ranked(chances: F64, resident: Bools, budget: int, threshold: float = 0.0) -> Int32s:
    """The guesses of each step: experts that are not resident, the likeliest first.

    chances: [T, E], a step a row. resident: bool [T, E] or [E]. threshold: only what is likelier is guessed. Returns
    int32 [T, min(budget, E)], -1: none. Of equals, the smaller index comes first.
    """
    worth = np.where(resident | (chances <= threshold), -1.0, chances)
    best = np.argsort(-worth, axis=1, kind="stable")[:, :budget]
    return np.where(np.take_along_axis(worth, best, 1) > 0.0, best, -1).astype(np.int32)


class Costs(NamedTuple):
    """What a guess brings where its expert is used, and what it costs where it is not; seconds."""

    saved_s: float
    delayed_s: float


def costs(expert_s: float, ahead_s: float, queued_s: float = 0.0, between_s: float = 0.0) -> Costs:
    """The costs of a guess that is not cut short once it is on the link.

    expert_s: to bring an expert. ahead_s: until the layer it is for asks for experts. queued_s: until the link is free.
    between_s: what misses of the layers before that one wait for it. What is not there in time keeps the link from the
    layer's true misses, unless it is one of them.
    """
    in_time_s = min(max(ahead_s - queued_s, 0.0), expert_s)
    return Costs(in_time_s - between_s, expert_s - in_time_s + between_s)


def break_even(cost: Costs) -> float:
    """The chance above which a guess pays: chance * saved > (1 - chance) * delayed. 1.0, which none exceeds: never."""
    if cost.saved_s <= 0.0:
        return 1.0
    return max(cost.delayed_s, 0.0) / (max(cost.delayed_s, 0.0) + cost.saved_s)


@dataclass(slots=True, eq=False)
class Record:
    """What came of guesses, by MoE layer; a guess is useful where it was a true miss of its step.

    made, useful, misses: int64 [L], since the start; misses: those of steps that guesses could have been made for, an
    expert a step. steps: of such. promised, kept: float64 [L], the chances of guesses and how many were useful, of the
    last MEMORY_STEPS steps or so.
    """

    n_layer: int
    made: Int64s = field(init=False)
    useful: Int64s = field(init=False)
    misses: Int64s = field(init=False)
    steps: Int64s = field(init=False)
    promised: F64 = field(init=False)
    kept: F64 = field(init=False)

    def __post_init__(self) -> None:
        self.made, self.useful, self.misses, self.steps = (np.zeros(self.n_layer, np.int64) for _ in range(4))
        self.promised, self.kept = np.zeros(self.n_layer), np.zeros(self.n_layer)

    @property
    def wasted(self) -> Int64s:
        """Guesses that no token of their step used, int64 [L]."""
        return self.made - self.useful

    def add(self, layer: int, guesses: Int32s, chances: F64, missed: npt.NDArray[np.integer]) -> None:
        """A step of a layer: guesses [n] with their chances [n], and the distinct experts that it missed."""
        useful = int(np.isin(guesses, missed).sum())
        self.steps[layer] += 1
        self.made[layer] += len(guesses)
        self.useful[layer] += useful
        self.misses[layer] += len(missed)
        for sums, more in ((self.promised, float(chances.sum())), (self.kept, float(useful))):
            sums[layer] += more - sums[layer] / MEMORY_STEPS

    def scale(self, layer: int) -> float:
        """What chances of a layer are to be multiplied by, as lately more or fewer came than they said.

        Without guesses it goes back to 1, so that a layer of which too much was said is tried again.
        """
        return (_PRIOR + float(self.kept[layer])) / (_PRIOR + float(self.promised[layer]))


class Timed(NamedTuple):
    """Steps without guesses and with, and what they took in all, ns."""

    without: int
    with_: int
    without_ns: int
    with_ns: int


ODD_WITH, ODD_WITHOUT = 16, 128  # steps, of which one is of the other kind: where most have guesses, and where not
ODD_FIRST = 4  # until anything is known
EARLY_WINDOWS = 8  # after which a large difference is believed, and
TRY_WINDOWS = 64  # after which a small one is
MEMORY = 256  # windows, about, that are looked back on
MARGIN = 0.01  # of a step's time, by which the other kind is to be faster before it takes over
EARLY_ERRORS, ERRORS = 4.0, 2.0  # standard errors of the difference that it is to be beyond
MANY_GUESSES = 256  # some steps', of which
LEAST_USEFUL = 1 / 16  # are to be right, or times need not be asked: the others crossed the link for nothing


class Gate:
    """Whether steps are faster with guesses, from times of both kinds of steps, of which one in `every` is the other.

    with_guesses: most steps have them. Both kinds are compared within windows, a step of the rarer kind each, since
    what a step takes changes with the context. No window counts for more than a whole step.
    """

    def __init__(self) -> None:
        self.with_guesses = True
        self._steps = 0
        self._is_new = True
        self._before = Timed(0, 0, 0, 0)
        self._made = self._useful = 0
        self._forget()

    def _forget(self) -> None:
        self._windows = 0
        self._weight = self._weight_of_squares = 0.0  # of windows, the older the less
        self._usual_ns = self._gained_ns = self._squares = 0.0  # sums: of the usual kind, of what the other one gained

    @property
    def every(self) -> int:
        """Of so many steps one is of the other kind; what loses is tried in less than a hundredth of them."""
        if self._is_new:
            return ODD_FIRST
        return ODD_WITH if self.with_guesses else ODD_WITHOUT

    def next(self) -> bool:
        """Whether the next step has guesses."""
        self._steps += 1
        return self.with_guesses != (self._steps % self.every == 0)

    def look(self, timed: Timed) -> bool:
        """Whether that changed, after steps whose times are known; timed: all since the start."""
        before, n = self._before, (timed.without - self._before.without, timed.with_ - self._before.with_)
        if min(n) < 1:
            return False
        self._before = timed
        without_ns = (timed.without_ns - before.without_ns) / n[0]
        with_ns = (timed.with_ns - before.with_ns) / n[1]
        usual_ns, other_ns = (with_ns, without_ns) if self.with_guesses else (without_ns, with_ns)
        gained_ns = max(-usual_ns, usual_ns - other_ns)
        kept = 1.0 - 1.0 / MEMORY
        self._weight = kept * self._weight + 1.0
        self._weight_of_squares = kept * kept * self._weight_of_squares + 1.0
        self._usual_ns = kept * self._usual_ns + usual_ns
        self._gained_ns = kept * self._gained_ns + gained_ns
        self._squares = kept * self._squares + gained_ns * gained_ns
        self._windows += 1
        if self._windows < EARLY_WINDOWS:
            return False
        self._is_new = False
        usual, gained = self._usual_ns / self._weight, self._gained_ns / self._weight
        variance = max(0.0, self._squares / self._weight - gained * gained)
        error = math.sqrt(variance * self._weight_of_squares) / self._weight
        errors = EARLY_ERRORS if self._windows < TRY_WINDOWS else ERRORS
        if gained <= MARGIN * usual + errors * error:
            return False
        self.with_guesses = not self.with_guesses
        self._forget()
        return True

    def weigh(self, made: int, useful: int) -> bool:
        """Whether they are off from now on, as hardly any of the last ones was right; made, useful: since the start."""
        n, right = made - self._made, useful - self._useful
        if n < MANY_GUESSES:
            return False
        self._made, self._useful = made, useful
        if not self.with_guesses or right >= LEAST_USEFUL * n:
            return False
        self.with_guesses = self._is_new = False
        self._forget()
        return True

    @property
    def means_ns(self) -> tuple[float, float]:
        """What a step takes without guesses and with, lately; 0 where nothing is known."""
        if not self._weight:
            return 0.0, 0.0
        usual = self._usual_ns / self._weight
        other = usual - self._gained_ns / self._weight
        return (other, usual) if self.with_guesses else (usual, other)
