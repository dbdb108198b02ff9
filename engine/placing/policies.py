"""The policies: a record each, which plan, dry run, engine, validation and simulator all go by.

A policy is what happens to the slots: which experts begin in them (`Policy.place`), and by which rule cache slots
change hands afterwards. A new one is a record here, and a row of docs/residency.md; commands, their help and their
errors take names and words from `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.formats.profile import Profile
from engine.ground.errors import UsageError
from engine.placing import placement, policy
from engine.placing.placement import Experts, Placement
from engine.placing.policy import Rule


@dataclass(frozen=True, slots=True)
class Policy:
    """What the slots do.

    name: as options give it. words: of help texts, a line without a full stop. label: in tables of results.
    place(experts, budget_bytes): which experts begin in which slots.
    rule: of cache slots. by_evidence: what a profile's evidence says for the residency replaces `rule`, and how much of
    the placement is pinned; without any, all of it is cache. So is `--cache-slots`.
    by_profile: `place` goes by a profile's counts; where not, it is given zeros. needs_profile: refused without one.
    follows: between requests pinned slots follow what was counted. whole: every expert has a slot, whatever share was
    asked for.
    """

    name: str
    words: str
    label: str
    place: Callable[[Experts, int], Placement]
    rule: Rule = policy.LRU
    by_evidence: bool = False
    by_profile: bool = False
    needs_profile: bool = False
    follows: bool = False
    whole: bool = False

    def counts(self, profile: Profile | None, moe_layers: Sequence[int], n_expert: int) -> npt.NDArray[np.int64]:
        """The counts that it places by: int64 [L, E] of the MoE layers."""
        if profile is None or not self.by_profile:
            return np.zeros((len(moe_layers), n_expert), np.int64)
        return profile.counts[list(moe_layers)]


def _everything(experts: Experts, budget_bytes: int) -> Placement:
    return placement.everything(experts.n_expert, experts.slot_bytes)


def _evenly(experts: Experts, budget_bytes: int) -> Placement:
    return placement.best(experts.evenly(), budget_bytes, floor=0)


def _empty(experts: Experts, budget_bytes: int) -> Placement:
    return placement.empty(_evenly(experts, budget_bytes).slots_per_layer, experts.slot_bytes)


ALL = Policy("all", "every expert in a slot", "all resident", _everything, whole=True)
UNIFORM = Policy("uniform", "the same share of every layer, fixed, whatever is used", "uniform", _evenly)
STATIC = Policy(
    "static", "fixed, placed by the profile", "calibrated, fixed", placement.best, by_profile=True, needs_profile=True
)
LRU = Policy("lru", "no profile, every slot goes to who was used last", "LRU, no profile", _empty)
SPARK = Policy(
    "spark", "what the profile's evidence says", "calibrated, following (`--spark`)", placement.best,
    rule=policy.DEFAULT, by_evidence=True, by_profile=True, follows=True,
)  # fmt: skip

POLICIES = (ALL, UNIFORM, STATIC, LRU, SPARK)  # in the order of a ladder: each does more than the one before
NAMES = tuple(each.name for each in POLICIES)


def find(name: str) -> Policy:
    """The policy of a name; UsageError where there is none."""
    for each in POLICIES:
        if each.name == name:
            return each
    raise UsageError(f"there is no policy {name!r}", hint=f"expected one of {', '.join(NAMES)}")


def served(by_profile: bool) -> Policy:
    """What a server does: with `--spark`, and without it."""
    return SPARK if by_profile else LRU


class Placed(NamedTuple):
    """What a policy makes of a budget. reasons: why what was not asked for was chosen."""

    placement: Placement
    rule: Rule
    reasons: tuple[str, ...] = ()


def place(
    chosen: Policy,
    experts: Experts,
    budget_bytes: int,
    profile: Profile | None,
    cache_slots: int | None = None,
    *,
    resident: bool = False,
) -> Placed:
    """The placement and the rule of a policy within a budget.

    experts: with the counts that the policy places by (`Policy.counts`). cache_slots: of each layer, where they were
    asked for. resident: pin every expert whatever the policy, for it fits. UsageError where it needs a profile.
    """
    everything = placement.everything(experts.n_expert, experts.slot_bytes)
    if not experts.slot_bytes:
        return Placed(everything, policy.LRU, ("the model has no experts: all of it is resident",))
    if chosen.needs_profile and profile is None:
        raise UsageError(f"the policy `{chosen.name}` places by a profile, and none was given", hint="spark calibrate")
    if resident and not chosen.whole:
        return Placed(everything, policy.LRU, ("every expert is resident",))
    placed = chosen.place(experts, budget_bytes)
    if not chosen.by_evidence:
        return Placed(placed, chosen.rule)
    choice = None if profile is None else profile.choice_for(100.0 * budget_bytes / experts.bytes)
    rule = chosen.rule if choice is None or not choice.cache_fraction else Rule(choice.memory)
    if cache_slots is not None:
        why = f"{cache_slots} cache slots a layer: asked for"
        return Placed(placed.with_cache([cache_slots] * len(experts.slot_bytes)), rule, (why,))
    if choice is not None:
        why = (
            f"{choice.words}: at {choice.residency_pct:g}% residency {choice.sessions} sessions missed "
            f"{choice.misses:.2f} a token so, {choice.lru:.2f} under LRU and {choice.static:.2f} with everything pinned"
        )
        return Placed(split(placed, choice.cache_fraction), rule if choice.cache_fraction else policy.LRU, (why,))
    if profile is None:
        why = "pin nothing: there is no profile"
    elif profile.split:
        why = "pin nothing: the profile's split is of an earlier version; `spark calibrate` finds what to pin"
    else:
        why = "pin nothing: the profile has no evidence of what to pin"
    return Placed(split(placed, 1.0), rule, (why,))


def split(placed: Placement, cache_fraction: float) -> Placement:
    """The same slots and contents, of which a share is cache: the least counted of each layer."""
    return placed.with_cache(placement.cache_share(placed.slots_per_layer, cache_fraction))
