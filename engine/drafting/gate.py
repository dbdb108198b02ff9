"""How many tokens of each reply's draft a step gets: those that let the replies go on fastest, as far as is known here.

A step with some tokens of a reply's draft gives it one token, and those of the draft that stay. It is expected

- how many stay. A source that judges its drafts says so. Else it follows from how drafts of the same source and grade
  fared lately, position by position: this reply's own, and as long as those are few all replies' (`Chances`).
- what the step takes: what steps with as many tokens took (`Costs`).

Of a drafter that says how sure it was of each token the draft comes first, and as much of it is taken as goes furthest
(`Gate.cut`, `Confidence`). Whether to ask it at all is known from what came of such drafts.

The tokens taken have the largest sum of log(tokens / seconds) over the replies that share the step. For one reply that
is its speed; of several none is slowed for another's sake by more than the other gains.

What has fared badly is tried again once in a while, for it may fare better now: such a trial is paid from TRIAL_SHARE
of the time that replies decode, so it never costs more. Trials with a bounded loss are Cascade's (arXiv 2506.20675).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from engine.drafting.confidence import Confidence
from engine.drafting.costs import COST_FADE, LEAST_S, Costs, StepCosts, clipped, key_of
from engine.drafting.outcomes import GROUP_OF, GROUPS, MOST_TOKENS, Chances, Decisions, Record, Tally, Worth
from engine.drafting.source import Draft, Promise, Source

TRIAL_SHARE = 0.01  # of the time, that trials may cost
SAVED_STEPS = 12.0  # plain ones, whose time may be saved up for trials at most
PLAIN_EVERY = 100  # steps with drafts, after which one without is seen again
KNOW_EVERY = 32  # drafts, of one of which it is asked how sure the source was, though that seems to be worth nothing
GAIN = 1.05  # over plain decoding, that is expected at least where a draft is no trial
KNOW_GAIN = 1.02  # over drafts of one length, that is expected where drafts are cut
LOOKS = 8  # in vain, after each of which one token more is skipped before the next
MOST_SKIPPED = 3
_PRIOR = 8.0  # outcomes that what is known of a kind beforehand is worth
_OWN = 20.0  # and what all replies saw, beside a reply's own
_HOPE = 2.0  # outcomes, good ones, that are added where it is asked what may be
_LEAST = 0.02  # chance of a token to stay, below which a draft is cut
_MOST_SHARED = 1024  # decisions of replies that share a step that are remembered
_UNDECIDED: tuple[int, list[int]] = (-1, [])
# Plain ones, after which a reply's decisions are made anew where no draft has been seen since: first, and at most.
_SETTLED_STEPS = 48, 384
_FEW_MADE = 8.0  # drafts, that are made before it counts what was taken of them
_ODD_COST = 3.0  # times what was expected: what takes longer is taken for that, since it may be the machine's

Priors = Sequence[Sequence[float]]  # by grade, by group of positions


@dataclass(slots=True)
class Drafting:
    """What drafts for one reply, and how that fared.

    source: whose drafts cost nothing to make; in_vain: how often nothing came of asking it lately, and skipped: tokens
    for which it is not asked, therefore. follower: who computes them from what the model made of the tokens, if
    anybody does; idle_steps: that there have been since that was worth it; won_s: what all of it has won, lately;
    is_unweighed: it is not known what steps take without.
    """

    source: Source
    follower: Source | None = None
    in_vain: int = 0
    skipped: int = 0
    idle_steps: int = 0
    won_s: float = 0.0
    is_unweighed: bool = False
    record: Record = field(default_factory=Record)

    def looked(self, found: bool) -> None:
        """The source was asked; whether anything came of it."""
        self.in_vain = 0 if found else self.in_vain + 1
        self.skipped = min(self.in_vain // LOOKS, MOST_SKIPPED)


Offer = tuple[Promise, Record]


@dataclass(frozen=True, slots=True)
class _Choice:
    """tokens: of each reply's draft. gain: speed over that of plain decoding, the mean of the replies'."""

    tokens: list[int]
    gain: float
    total: int


class Gate:
    """Decides for all replies of an engine. priors: what is known of a source's drafts beforehand."""

    def __init__(self, priors: dict[str, Priors]) -> None:
        self._priors = priors
        self._chances: dict[tuple[str, int], Chances] = {}
        self._confidence: dict[str, Confidence] = {}  # of sources that say how sure they are
        self._worth: dict[tuple[str, int], Worth] = {}
        self._costs = StepCosts()
        self._saved_s = 0.0
        self._asked = 0  # whether it is worth knowing how sure a source is
        self._tokens = 0  # decoded by all
        self._making_s: dict[tuple[str, bool], float] = {}  # to make a draft, by what `made` is given
        self._news = 0  # goes up when what was decided may be decided otherwise
        self._plain_steps, self._settled_steps = 0, _SETTLED_STEPS[0]
        self._may_hope = False  # what was seen to cost too much may be tried again
        self._since_plain = 0  # steps with drafts
        self._made: dict[int, Decisions] = {key: {} for key in (1, 0, -1, -2)}  # of replies that saw none of a kind
        self._shared: dict[tuple[int, tuple[tuple[int, Promise] | None, ...]], list[int]] = {}  # of those that share
        self._shared_at = 0  # of so much news
        self._lengths: tuple[int, ...] = ()  # of drafts that steps of one reply have room for
        self.tallies: dict[str, Tally] = {}

    def costs(self, n_replies: int, sampled: bool = False, followed: bool = False) -> Costs:
        """As `StepCosts.of`."""
        return self._costs.of(n_replies, sampled, followed)

    def all_costs(self) -> dict[int, Costs]:
        """As `StepCosts.all`."""
        return self._costs.all()

    def begin(self, seconds: dict[int, float]) -> None:
        """As `StepCosts.begin`."""
        self._costs.begin(seconds)
        self._news += 1

    def at(self, n_tokens: int) -> None:
        """What follows is of replies with so many tokens before them, in the middle."""
        self._news += self._costs.at(n_tokens)

    def plain(
        self, n_replies: int, seconds: float, n_steps: int = 1, sampled: bool = False, followed: bool = False
    ) -> None:
        """Take in what steps without drafts took together."""
        costs = self.costs(n_replies, sampled, followed)
        self._news += not costs.is_known
        costs.note_plain(seconds, n_steps)
        self._tokens += n_replies * n_steps
        self._plain_steps += n_steps
        self._since_plain = 0
        if self._plain_steps >= self._settled_steps:
            self._plain_steps, self._settled_steps = 0, min(2 * self._settled_steps, _SETTLED_STEPS[1])
            self._news += 1
            self._may_hope = True
        self._save(TRIAL_SHARE * seconds, costs)

    def share(self, offers: Sequence[Offer | None], fits: Callable[[int], bool], most: int) -> list[int]:
        """How many tokens of each draft the next step gets, `most` together; None: a reply without one.

        fits: whether a step may have so many tokens, one of each reply among them.
        """
        if self.is_due:
            return [0] * len(offers)
        if len(offers) > 1 or offers[0] is None:
            return self._decided_together(offers, fits, most)
        promise, record = offers[0]
        if promise.chances is not None:
            self._lengths = tuple(n for n in range(1, MOST_TOKENS + 1) if fits(1 + n))
            making_s = self._making_of(promise.source)
            return [self._judged(promise, record, min(promise.n_tokens, most), making_s)]
        if self.decided(promise, record) is None:
            self._decisions(promise, record)[promise[:2]] = self._news, self._by_length(promise, record, fits)
        n = self.decided(promise._replace(n_tokens=min(promise.n_tokens, most)), record)
        return [n or 0]

    @property
    def is_due(self) -> bool:
        """Whether a step without drafts is to be seen again: what they are compared with may have changed."""
        return self._since_plain >= PLAIN_EVERY

    def decided(self, promise: Promise, record: Record) -> int | None:
        """How many tokens a reply that is alone gets of what is promised, as was decided last; None: there is news.

        So next to nothing is done for a token where nothing is drafted.
        """
        if promise.chances is not None:
            making_s = self._making_of(promise.source)
            return self._judged(promise, record, promise.n_tokens, making_s) if self._lengths else None
        when, by_length = self._decisions(promise, record).get(promise[:2], _UNDECIDED)
        return by_length[promise.n_tokens] if when == self._news else None

    def _decisions(self, promise: Promise, record: Record) -> Decisions:
        """Where those of a reply's kind are: its own, or of all replies that saw none of the kind."""
        if promise[:2] in record.chances:
            return record.choices
        return self._made[key_of(1, record.sampled, record.followed)]

    def least(self, record: Record) -> float:
        """Tokens that must be expected of a draft for a reply that is alone to get any of it, at least."""
        when, least = record.least
        if when != self._news:
            costs = self.costs(1, record.sampled, record.followed)
            least = self._least(costs) if costs.is_known else 0.0
            record.least = self._news, least
        return least

    def least_of_each(self, n_replies: int, sampled: bool) -> float:
        """The same for each of some replies that share a step: half of what all would need on average.

        Less of one seldom makes the step worth it, and to weigh it takes time.
        """
        costs = self.costs(n_replies, sampled)
        return self._least(costs) / 2 if costs.is_known else 0.0

    def _least(self, costs: Costs) -> float:
        hopeful = self._may_hope or not costs.is_settled(1)
        return GAIN * costs.of(1, hopeful) / costs.plain - 1.0

    def cut(self, draft: Draft, record: Record, fits: Callable[[int], bool]) -> int:
        """How many tokens of a draft that was made a reply that is alone gets, by how sure its source was of each."""
        kind, costs = (draft.source, draft.grade), self.costs(1, record.sampled, record.followed)
        if not costs.is_known:
            return len(draft.tokens)
        self._lengths = tuple(n for n in range(1, MOST_TOKENS + 1) if fits(1 + n))
        confidence = self._confidence.setdefault(draft.source, Confidence(len(GROUPS) + 1))
        known, stay, all_before = self._by_group(kind, record), [], 1.0
        for sure, group in zip(draft.sure, GROUP_OF, strict=False):
            all_before *= confidence.chance(known[group], sure, group)
            stay.append(all_before)
        n = self._judged(Promise(*kind, len(stay), tuple(stay)), record, len(stay), 0.0, least=1.0)
        if n == 0:
            self._save(-self._making_of(draft.source, sure=True), costs)
        confidence.expect(draft.sure, GROUP_OF, stay, n)
        for chances in (self._of_all(kind), record.chances.setdefault(kind, Chances())):
            chances.expect(stay, n)
        for worth in (self._worth, record.worth):
            worth.setdefault(kind, Worth()).note(stay, n, costs.of(n) / costs.plain)
        self._news += 1
        return n

    def is_worth_knowing(self, source: str, grade: int, record: Record) -> bool:
        """Whether it pays to wait for how sure a source is of a draft, so that it can be cut by that.

        As long as nobody knows, but once without, so that it is known what that takes; and where no draft pays, as this
        one is a trial then. Of others once in a while.
        """
        if (source, False) not in self._making_s:
            return False
        gains = self._cut_gains((source, grade), record)
        self._asked += 1
        return gains is None or self._pays(gains) or gains[1] < GAIN or self._asked % KNOW_EVERY == 0

    def _cut_gains(self, kind: tuple[str, int], record: Record) -> tuple[float, float] | None:
        """Speed over that of plain decoding by drafts of a kind that are made and then cut, and by the best of others.

        That are none, and all drafts cut to one length. None: too few were made.
        """
        of_all, costs = self._worth.get(kind), self.costs(1, record.sampled, record.followed)
        if of_all is None or of_all.n < _FEW_MADE or not costs.is_known:
            return None
        worth = record.worth.get(kind, Worth()).plus(of_all, _OWN / of_all.n)  # all saw as much as so many of its own
        known, unknown = (worth.n * self._making_of(kind[0], sure) / costs.plain for sure in (True, False))
        others = (worth.at[n] / (unknown + worth.n * costs.of(n) / costs.plain) for n in self._lengths)
        return worth.tokens / (known + worth.time), max(1.0, *others)

    @staticmethod
    def _pays(gains: tuple[float, float]) -> bool:
        """Whether drafts that are cut pay, and more than others."""
        return gains[0] >= max(GAIN, KNOW_GAIN * gains[1])

    def _cut_gain(self, kind: tuple[str, int], record: Record) -> float | None:
        """The first of them, where drafts are judged by it."""
        gains = self._cut_gains(kind, record)
        return None if gains is None or not self._pays(gains) else gains[0]

    def _judged(self, promise: Promise, record: Record, most: int, making_s: float, least: float = GAIN) -> int:
        """How many tokens a reply that is alone gets of a draft whose source says what to expect.

        Where none pays by what steps are known to take, what they may take decides, as far as a trial can be paid; of
        what was seen often enough, once in so many steps without any draft.
        """
        assert promise.chances is not None
        costs = self.costs(1, record.sampled, record.followed)
        if not costs.is_known:
            return 0
        chances = list(promise.chances[:most])
        for hopeful in (False, True):
            _, best, gain = max(_lone_choices(chances, self._lengths, costs, making_s, hopeful), default=(0, 0, 1.0))
            if best and gain >= least:
                break
        else:
            return 0
        if hopeful:
            loss_s = making_s + costs.of(best) - costs.plain * (1.0 + sum(chances[:best]))
            if loss_s > self._saved_s or (costs.is_settled(best) and not self._may_hope):
                return 0
        return best

    def _by_length(self, promise: Promise, record: Record, fits: Callable[[int], bool]) -> list[int]:
        """What `share` decides for a reply that is alone, for promises of 0, 1, ... tokens of this kind."""
        whole, costs = (promise._replace(n_tokens=MOST_TOKENS), record), self.costs(1, record.sampled, record.followed)
        decided = [0] * (MOST_TOKENS + 1)
        if not costs.is_known:
            return decided  # a plain step first: nothing can be compared with what nobody knows
        lengths = [n for n in range(1, MOST_TOKENS + 1) if fits(1 + n)]
        making_s, mean = self._making([whole]), self._stay(*whole, 0.0)
        gains = [1.0] * len(decided)
        for n, best, gain in _lone_choices(mean, lengths, costs, making_s):
            decided[n:], gains[n:] = [best if gain >= GAIN else 0] * (len(decided) - n), [gain] * (len(decided) - n)
        pays = decided.copy()
        cut_gain = self._cut_gain(promise[:2], record)
        if cut_gain is not None:
            gains = [cut_gain] * len(decided)
            for n, longest in enumerate(_longest(lengths)):
                pays[n] = longest if promise.is_block else pays[n] or longest
            decided = pays.copy()
        # A width that was seen to take too long a few times, or only before the first request, may have been disturbed.
        for n, best, gain in _lone_choices(mean, lengths, costs, making_s, hopeful=True):
            decided[n:] = pays[n:]
            if cut_gain is None and 0 < pays[n] != best and gain >= GAIN * gains[n] and not costs.is_settled(best):
                loss_s = making_s + costs.of(best) - costs.plain * (1.0 + sum(mean[:best])) / gains[n]
                if loss_s <= self._saved_s:
                    decided[n:] = [best] * (len(decided) - n)
        if lengths and all(decided[n] for n in lengths):
            return decided
        sure, trial = decided.copy(), 0  # the longest that may cost what is saved
        for n, best, gain in _lone_choices(self._stay(*whole, _HOPE), lengths, costs, making_s, hopeful=True):
            if gain >= GAIN and best != trial:
                loss_s = making_s + costs.of(best) - costs.plain * (1.0 + sum(mean[:best]))
                trial = best if loss_s <= self._saved_s else trial
            if trial:
                decided[n:] = [one or trial for one in sure[n:]]
        return decided

    def _decided_together(self, offers: Sequence[Offer | None], fits: Callable[[int], bool], most: int) -> list[int]:
        """As `_decided`, which is remembered until there is news: most steps are offered what the last one was.

        What sources judge by themselves is another with every step, and mostly too little by its sum.
        """
        if any(o is not None and o[0].chances is not None for o in offers):
            return self._decided(offers, fits, most)
        if self._shared_at != self._news or len(self._shared) >= _MOST_SHARED:
            self._shared.clear()
            self._shared_at = self._news
        key = most, tuple(None if o is None else (o[1].number, o[0]) for o in offers)
        found = self._shared.get(key)
        if found is None:
            found = self._shared[key] = self._decided(offers, fits, most)
        return found

    def _decided(self, offers: Sequence[Offer | None], fits: Callable[[int], bool], most: int) -> list[int]:
        sampled = any(offer[1].sampled for offer in offers if offer is not None)
        costs, none = self.costs(len(offers), sampled), [0] * len(offers)
        if not costs.is_known:
            return none
        making_s = self._making(offers)
        stay = [None if o is None else self._stay(*o, 0.0) for o in offers]
        is_judged = all(o is None or o[0].chances is not None for o in offers)
        if is_judged:  # no step with drafts takes less than one with a token of them
            gained = sum(math.log1p(sum(chances)) for chances in stay if chances) / len(offers)
            if gained < math.log1p(self._least(costs)):
                return none
        known = self._best(stay, costs, fits, most, making_s=making_s)
        if known.gain >= GAIN:
            return known.tokens
        may = [None if o is None else self._stay(*o, _HOPE) for o in offers]
        for hoped in reversed([*self._choices(may, costs, fits, most, True, making_s)]):
            if hoped.gain >= GAIN:
                if is_judged and costs.is_settled(hoped.total) and not self._may_hope:
                    continue
                expected = _expected(stay, hoped.tokens)
                if making_s + costs.of(hoped.total) - costs.plain * expected <= self._saved_s:
                    return hoped.tokens
        return none

    def left(self, record: Record) -> None:
        """Nobody follows a reply's steps any more."""
        record.followed = False
        self._news += 1

    def made(self, source: str, seconds: float, sure: bool = False) -> None:
        """Take in what it took to make a draft; sure: and to know how sure its source is of it."""
        kind = source, sure
        known, seconds = self._making_s.get(kind), max(seconds, LEAST_S)
        if known is None:  # what compiles, loads or touches memory first takes longer than it will
            self._making_s[kind] = min(seconds, self.costs(1).plain or seconds)
        else:
            self._making_s[kind] = known * math.exp(COST_FADE * clipped(seconds / known))

    def gain(self, offer: Offer, n_replies: int, fits: Callable[[int], bool], most: int) -> float:
        """Speed over that of plain decoding that is expected of a reply's draft, were the others without one."""
        costs = self.costs(n_replies, offer[1].sampled, offer[1].followed)
        if not costs.is_known:
            return 1.0
        cut_gain = self._cut_gain(offer[0][:2], offer[1]) if n_replies == 1 else None
        if cut_gain is not None:
            return cut_gain
        stay: list[list[float] | None] = [self._stay(*offer, 0.0)]
        return self._best(stay + [None] * (n_replies - 1), costs, fits, most, making_s=self._making([offer])).gain

    def note(
        self, fared: Sequence[tuple[Draft, Record, int, int] | None], seconds: float, making_s: float = 0.0
    ) -> None:
        """Take in a step with drafts: of each reply its draft, how many tokens it was given, and how many stayed.

        making_s: how much of the time it took to make them.
        """
        records = [one[1] for one in fared if one is not None]
        sampled, followed = any(r.sampled for r in records), any(r.followed for r in records)
        costs, drafted, gained = self.costs(len(fared), sampled, followed), 0, 0.0
        self._news += 1
        self._plain_steps, self._settled_steps, self._may_hope = 0, _SETTLED_STEPS[0], False
        for one in fared:
            if one is None:
                self._tokens += 1
                continue
            draft, record, n_given, n_stayed = one
            drafted += n_given
            gained += math.log1p(n_stayed)
            self._tokens += 1 + n_stayed
            self._learn(draft, record, n_given, n_stayed)
            for tallies in (self.tallies, record.tallies):
                tally = tallies.setdefault(draft.source, Tally())
                tally.drafted += n_given
                tally.accepted += n_stayed
        costs.note(drafted, max(LEAST_S, seconds - making_s))
        self._since_plain += 1
        # What was lost, whether it was a trial or should have paid, is not there for trials any more; what was won is.
        most_s = _ODD_COST * (making_s + costs.of(drafted))
        won_s = costs.plain * math.exp(gained / len(fared)) - seconds
        self._save(max(-most_s, min(most_s, won_s)), costs)

    def met(self, draft: Draft, record: Record, n_seen: int, n_stayed: int) -> None:
        """Take in how a draft would have fared, of which the first tokens have come by themselves."""
        self._news += 1
        self._learn(draft, record, n_seen, n_stayed)

    def _learn(self, draft: Draft, record: Record, n_given: int, n_stayed: int) -> None:
        kind = draft.source, draft.grade
        if draft.sure:
            confidence = self._confidence.setdefault(draft.source, Confidence(len(GROUPS) + 1))
            confidence.learn(self._by_group(kind, record), draft.sure[:n_given], GROUP_OF, n_stayed)
        for chances in (self._of_all(kind), record.chances.setdefault(kind, Chances())):
            chances.note(n_given, n_stayed)

    def _save(self, seconds: float, costs: Costs) -> None:
        self._saved_s = min(self._saved_s + seconds, max(self._saved_s, SAVED_STEPS * costs.plain))

    def _making(self, offers: Sequence[Offer | None]) -> float:
        return sum(self._making_of(offer[0].source) for offer in offers if offer is not None)

    def _making_of(self, source: str, sure: bool = False) -> float:
        """What it takes to make a source's draft; sure: as of `made`. Until one of the kind was seen, the other's."""
        of_other = self._making_s.get((source, not sure), 0.0)
        return self._making_s.get((source, sure), of_other)

    def _of_all(self, kind: tuple[str, int]) -> Chances:
        chances = self._chances.setdefault(kind, Chances())
        chances.fade(self._tokens)
        return chances

    def _stay(self, promise: Promise, record: Record, hope: float) -> list[float]:
        """The chances that tokens 1, 2, ... of a draft stay; hope: good outcomes that are added to what was seen."""
        if promise.chances is not None:
            return list(promise.chances[: promise.n_tokens])
        kind = promise.source, promise.grade
        of_all, own = self._of_all(kind), record.chances.get(kind)
        state = of_all.n_noted, of_all.at, 0 if own is None else own.n_noted
        made = record.stay.get((*kind, hope))
        if made is None or made[0] != state:
            made = record.stay[(*kind, hope)] = state, _all_stay(self._by_group(kind, record, hope))
        return made[1][: promise.n_tokens]

    def _by_group(self, kind: tuple[str, int], record: Record, hope: float = 0.0) -> list[float]:
        """The chances that tokens at positions of each group stay if all before them do; hope: as of `_stay`."""
        of_all, own = self._of_all(kind), record.chances.get(kind)
        priors = self._priors[kind[0]]
        prior = priors[min(kind[1], len(priors) - 1)]
        by_group = []
        for group, known in enumerate(prior):
            chance = (of_all.stayed[group] + _PRIOR * known + hope) / (of_all.seen[group] + _PRIOR + hope)
            if own is not None:
                chance = (own.stayed[group] + _OWN * chance + hope) / (own.seen[group] + _OWN + hope)
            by_group.append(chance)
        return by_group

    def _best(
        self, stay: Sequence[list[float] | None], costs: Costs, fits: Callable[[int], bool], most: int,
        making_s: float = 0.0,
    ) -> _Choice:  # fmt: skip
        """What gives the replies most, by the chances of their drafts' tokens; making_s: what it takes to make them."""
        *_, best = self._choices(stay, costs, fits, most, making_s=making_s)
        return best

    def _choices(
        self, stay: Sequence[list[float] | None], costs: Costs, fits: Callable[[int], bool], most: int,
        hopeful: bool = False, making_s: float = 0.0,
    ) -> Iterator[_Choice]:  # fmt: skip
        """What gives the replies most, as `_best`, where the drafts may have 0, 1, ... tokens together.

        hopeful: as of `Costs.of`.
        """
        n, best, gained, total = len(stay), 0.0, 0.0, 0
        tokens, expected, choice = [0] * n, [1.0] * n, _Choice([0] * n, 1.0, 0)
        # What replies gain by one token more of their drafts, in logarithms: each gains less than by the one before.
        steps = [(-math.log1p(chances[0]), i) for i, chances in enumerate(stay) if chances]
        heapify(steps)
        yield choice
        while steps and total < most:
            gain, i = steps[0]
            chances = stay[i]
            assert chances is not None
            gained -= gain
            expected[i] += chances[tokens[i]]
            tokens[i] += 1
            total += 1
            if tokens[i] < len(chances):
                heapreplace(steps, (-math.log1p(chances[tokens[i]] / expected[i]), i))
            else:
                heappop(steps)
            if fits(n + total):
                value = gained / n - math.log((making_s + costs.of(total, hopeful)) / costs.plain)
                if value > best:
                    best, choice = value, _Choice(tokens.copy(), math.exp(value), total)
            yield choice


def _all_stay(by_group: Sequence[float]) -> list[float]:
    """The chances that a draft's first, second, ... token stays, and all before it."""
    stay, all_before = [], 1.0
    for group in GROUP_OF:
        all_before *= by_group[group]
        if all_before < _LEAST:
            break
        stay.append(all_before)
    return stay


def _longest(lengths: Sequence[int]) -> Iterator[int]:
    """The longest of some lengths that a draft of 0, 1, ... tokens can be cut to."""
    return (max((n for n in lengths if n <= most), default=0) for most in range(MOST_TOKENS + 1))


def _lone_choices(
    stay: Sequence[float], lengths: Sequence[int], costs: Costs, making_s: float, hopeful: bool = False
) -> Iterator[tuple[int, int, float]]:
    """`Gate._choices` for one reply: each length, and of it and the shorter ones the best, and that one's gain."""
    best, best_gain, expected, added = 0, 1.0, 1.0, 0
    for n in lengths:
        if n > len(stay):
            break
        expected += sum(stay[added:n])
        added = n
        gain = expected * costs.plain / (making_s + costs.of(n, hopeful))
        if gain > best_gain:
            best, best_gain = n, gain
        yield n, best, best_gain


def _expected(stay: Sequence[list[float] | None], tokens: Sequence[int]) -> float:
    """Tokens of a reply, the geometric mean, where each gets so many of its draft."""
    logs = (math.log1p(sum(chances[:n])) for chances, n in zip(stay, tokens, strict=True) if chances)
    return math.exp(sum(logs) / len(tokens))
