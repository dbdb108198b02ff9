"""What steps take, with drafts and without: by replies that share them, tokens of drafts in them, and depth."""

from __future__ import annotations

import math

COST_FADE = 0.15  # how far an estimate of a cost follows what is measured
LEAST_S = 1e-7  # of a step: a clock may stand still
SHALLOW_TOKENS = 4096  # of a context, up to which steps take the same; each doubling behind it is judged by itself
_OUTLIER = 0.5  # of a measurement's logarithm, beyond which it counts as no further away
_MOST_SEEN = 8  # measurements of a width: so many weigh as much as any more
_FEW_SEEN = 2  # of which the least counts
_HOPE = 2.0  # measurements that cost nothing, which are added where it is asked what a step may take
_TOKEN_COST = 1.0  # of a plain step, that one more token costs where nothing was measured: no draft pays, if that is so
_HOPED_COST = 0.25  # and what it may cost


class Costs:
    """What steps of so many replies take: `plain`, seconds of one without drafts, and how many times that with them.

    Most of what makes a step longer or shorter from one minute to the next, a neighbor, a longer context, does so to
    both. Outliers count for little: an estimate follows the middle of what is measured.
    """

    def __init__(self) -> None:
        self.plain = 0.0
        self._n_plain = 0
        self._ratios: dict[int, float] = {}  # by tokens of drafts
        self._seen: dict[int, int] = {}  # how often, up to _MOST_SEEN
        self._far: dict[int, int] = {}  # which way the last measurement of a width was far off
        # The ratios, made never to fall, and as they may be; None: there is news.
        self._fits: dict[bool, list[tuple[int, float]] | None] = {False: None, True: None}

    @property
    def is_known(self) -> bool:
        """Whether a plain step of replies was seen: what was tried at the start had no context, and drew nothing."""
        return self._n_plain > 0

    def is_settled(self, n_drafted: int) -> bool:
        """Whether steps with so many tokens of drafts were seen as often as makes a difference."""
        return self._seen.get(n_drafted, 0) >= _MOST_SEEN

    def begin(self, seconds: dict[int, float]) -> None:
        """Take in what steps with so many tokens of drafts took once, with 0 among them, where nothing is known.

        As multiples: the first plain step of a reply says what one takes.
        """
        if not self.plain and seconds:
            self.plain = max(seconds[0], LEAST_S)
            self._ratios = {n: max(1.0, s / self.plain) for n, s in seconds.items() if n}
            self._seen = dict.fromkeys(self._ratios, 1)
            self._fits = {False: None, True: None}

    def note_plain(self, seconds: float, n_steps: int) -> None:
        """Take in what n_steps without drafts took together."""
        each = max(seconds / n_steps, LEAST_S)
        if not self.is_known:
            self.plain = each
        self._n_plain += n_steps
        if self._n_plain <= 3 or not self.plain:  # the first steps of all take longest
            self.plain = min(each, self.plain or each)
            return
        fade = 1.0 - (1.0 - COST_FADE) ** min(n_steps, 16)
        if each > self.plain:  # by a neighbor, or a cache that drafts have emptied: without drafts it would not
            fade /= 4
        self.plain *= math.exp(fade * clipped(each / self.plain))

    def note(self, n_drafted: int, seconds: float) -> None:
        """Take in what a step with so many tokens of drafts took."""
        if not self.plain or not n_drafted:
            return
        ratio, known = max(1.0, seconds / self.plain), self._ratios.get(n_drafted)
        if known is None:  # no step takes less than it must, but one may take much longer
            self._ratios[n_drafted] = min(ratio, math.exp(_OUTLIER) * self._at(n_drafted))
        elif ratio < known and self._seen[n_drafted] <= _FEW_SEEN:
            self._ratios[n_drafted] = ratio
        else:
            away = math.log(ratio / known)
            far = 0 if abs(away) < _OUTLIER else 1 if away > 0 else -1
            if far and far == self._far.get(n_drafted):  # twice so far off on one side is no outlier
                self._ratios[n_drafted] = ratio
            else:
                self._ratios[n_drafted] = max(1.0, known * math.exp(COST_FADE * clipped(ratio / known)))
            self._far[n_drafted] = far
        if seconds < self.plain:  # a step without is no longer
            self.plain *= math.exp(COST_FADE * clipped(seconds / self.plain))
        self._seen[n_drafted] = min(self._seen.get(n_drafted, 0) + 1, _MOST_SEEN)
        self._fits = {False: None, True: None}

    def of(self, n_drafted: int, hopeful: bool = False) -> float:
        """What a step with so many tokens of drafts is expected to take, in seconds; hopeful: what it may take."""
        return self.plain * self._at(n_drafted, hopeful)

    def beside(self, n_replies: int) -> dict[int, float]:
        """What steps that so many replies share may take by those of one, as `begin` takes it; where it is known."""
        if not self.plain or not any(n >= n_replies for n in self._ratios):
            return {}
        widths = (1 + n - n_replies for n in sorted(self._ratios) if n >= n_replies)
        return {0: self.of(n_replies - 1)} | {n: self.of(n_replies - 1 + n) for n in widths}

    def measured(self) -> dict[int, float]:
        """Seconds by tokens of drafts, 0 among them, of those that there were."""
        return {0: self.plain} | {n: self.plain * ratio for n, ratio in sorted(self._ratios.items())}

    def _at(self, n: int, hopeful: bool = False) -> float:
        """The ratio, between those of the next narrower and the next wider step, or as it goes on behind the widest."""
        before, at = 0, 1.0
        for width, ratio in self._fits[hopeful] or self._fitted(hopeful):
            if width >= n:
                return at + (n - before) * (ratio - at) / (width - before)
            before, at = width, ratio
        slope = (at - 1.0) / before if before else _TOKEN_COST
        return at + (n - before) * max(min(slope, _HOPED_COST) if hopeful else slope, 0.01)

    def _fitted(self, hopeful: bool) -> list[tuple[int, float]]:
        ratios = self._ratios
        if hopeful:  # what was measured once may have been the first of its kind, which takes longest
            ratios = {n: 1.0 + (r - 1.0) * self._seen[n] / (self._seen[n] + _HOPE) for n, r in ratios.items()}
        fit = self._fits[hopeful] = _never_falling(ratios, self._seen)
        return fit


def clipped(ratio: float) -> float:
    """Its logarithm, no more than _OUTLIER either way."""
    return max(-_OUTLIER, min(_OUTLIER, math.log(ratio)))


def _never_falling(values: dict[int, float], weights: dict[int, int]) -> list[tuple[int, float]]:
    """The nearest values that never fall with the key (pool adjacent violators: Ayer et al., 1955), by key."""
    pools: list[tuple[list[int], float, int]] = []  # keys, their mean, its weight
    for key in sorted(values):
        pool = [key], values[key], weights[key]
        while pools and pools[-1][1] > pool[1]:
            keys, mean, weight = pools.pop()
            total = weight + pool[2]
            pool = keys + pool[0], (mean * weight + pool[1] * pool[2]) / total, total
        pools.append(pool)
    return [(key, mean) for keys, mean, _ in pools for key in keys]


def key_of(n_replies: int, sampled: bool, followed: bool) -> int:
    """Which steps are alike: 0 is one reply that is sampled, since to draw may take as long as a step.

    Below 0 are replies alone whose steps somebody follows who computes drafts: 1 and 0 are those without.
    """
    return n_replies if n_replies > 1 else 1 - sampled - 2 * followed


class StepCosts:
    """`Costs` by replies that share steps (`key_of`), and by depth.

    A deep context makes all steps longer, and a plain one most. What nobody has seen begins as the nearest that was: as
    multiples of a plain step, which has to be seen first.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Costs] = {}
        self._depth = 0

    def at(self, n_tokens: int) -> bool:
        """The steps that follow have contexts of so many tokens, in the middle; whether that changes anything."""
        depth = (n_tokens // SHALLOW_TOKENS).bit_length()
        changes, self._depth = depth != self._depth, depth
        return changes

    def begin(self, seconds: dict[int, float]) -> None:
        """Forget everything: this is what short steps of one reply take, by tokens of drafts."""
        self._known.clear()
        for key in (1, 0, -1, -2):
            costs = self._known[0, key] = Costs()
            costs.begin(seconds)

    def of(self, n_replies: int, sampled: bool = False, followed: bool = False) -> Costs:
        """Of steps of so many replies, at the depth that they have."""
        key = key_of(n_replies, sampled, followed)
        costs = self._known.get((self._depth, key))
        if costs is None:
            costs = Costs()
            costs.begin(self._nearest(key))
            self._known[self._depth, key] = costs
        return costs

    def all(self) -> dict[int, Costs]:
        """By key, of those that there were at the depth of the last one, and that nobody follows."""
        here = ((key, costs) for (depth, key), costs in sorted(self._known.items()) if depth == self._depth)
        return {key: costs for key, costs in here if costs.plain and key >= 0}

    def _nearest(self, key: int) -> dict[int, float]:
        """Of as many replies at another depth, else of one: what a token costs depends little on whose it is."""
        others = [(abs(depth - self._depth), depth) for depth, k in self._known if k == key]
        for _, depth in sorted(others):
            if len(found := self._known[depth, key].measured()) > 1:
                return found
        if key > 1:
            return self.of(1).beside(key)
        found = self.of(1, sampled=key == -2).measured() if key < 0 else {}
        return found if len(found) > 1 else {}
