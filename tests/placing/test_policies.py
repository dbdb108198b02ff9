"""The records of policies: what each does, that all who place go by them, and that the page says the same."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.daemon import parse_arguments
from engine.formats.profile import Choice, Profile
from engine.ground.errors import UsageError
from engine.placing import placement, policies, policy
from engine.placing.placement import Experts, Placement
from engine.placing.policies import POLICIES, Policy
from engine.placing.policy import Rule
from engine.placing.simulate import simulate
from spark.pipeline import ladder as ladder_of
from tests.placing.test_simulate import random_trace

ROOT = Path(__file__).parents[2]
L, E, USED = 3, 9, 2
SIZES = [5, 5, 7]
BUDGET = 60
COUNTS = np.array([[1, 9, 2, 8, 3, 7, 4, 6, 5], [9, 8, 7, 6, 5, 4, 3, 2, 1], [1, 1, 90, 1, 1, 80, 1, 1, 1]], np.int64)
EVEN = placement.uniform(E, SIZES, BUDGET)
BY_COUNTS = placement.greedy(COUNTS, SIZES, BUDGET, n_expert_used=USED)
# By name: what it makes of BUDGET without a profile and with COUNTS alone (None: refused), its rule, whether it follows
# and whether it has every expert whatever is asked for. A new policy has a row here.
ROWS: dict[str, tuple[Placement | None, Placement, Rule, bool, bool]] = {
    "all": (placement.everything(E, SIZES), placement.everything(E, SIZES), policy.LRU, False, True),
    "uniform": (EVEN, EVEN, policy.LRU, False, False),
    "static": (None, BY_COUNTS, policy.LRU, False, False),
    "lru": (placement.lru(E, SIZES, BUDGET), placement.lru(E, SIZES, BUDGET), policy.LRU, False, False),
    "spark": (EVEN.with_cache([E] * L), BY_COUNTS.with_cache([E] * L), policy.DEFAULT, True, False),
}


def choice(residency_pct: float, cache_fraction: float, memory: int) -> Choice:
    return Choice(residency_pct, cache_fraction, memory, 1.0, 0.9, 1.1, 2.0, 3.0, 1000, 7)


def placed(chosen: Policy, profile: Profile | None, budget: int = BUDGET, **options: int) -> policies.Placed:
    experts = Experts(chosen.counts(profile, range(L), E), SIZES, n_used=USED)
    return policies.place(chosen, experts, budget, profile, **options)


@pytest.mark.parametrize("chosen", POLICIES, ids=policies.NAMES)
def test_each_record_does_what_its_row_says(chosen: Policy) -> None:
    untaught, taught, rule, follows, whole = ROWS[chosen.name]
    assert (chosen.follows, chosen.whole, chosen.needs_profile) == (follows, whole, untaught is None)
    profile = Profile(COUNTS, USED)
    assert placed(chosen, profile)[:2] == (taught, rule)
    seen = chosen.counts(profile, [2, 0], E)
    assert np.array_equal(seen, COUNTS[[2, 0]] if chosen.by_profile else np.zeros((2, E)))
    assert chosen.by_profile == (taught != untaught)
    if untaught is None:
        with pytest.raises(UsageError, match=f"`{chosen.name}` places by a profile, and none was given"):
            placed(chosen, None)
    else:
        assert placed(chosen, None)[:2] == (untaught, rule)


def test_every_policy_has_a_row_and_a_name_of_its_own() -> None:
    assert tuple(ROWS) == policies.NAMES == tuple(each.name for each in POLICIES)
    for each in POLICIES:
        assert policies.find(each.name) is each
        assert each.words and each.words == each.words.strip(". \n") and each.by_profile >= each.needs_profile
    with pytest.raises(UsageError, match="no policy 'LRU'") as refused:
        policies.find("LRU")
    assert refused.value.hint == "expected one of all, uniform, static, lru, spark"
    assert (policies.served(True), policies.served(False)) == (policies.SPARK, policies.LRU)


def test_evidence_decides_what_is_pinned_and_the_rule() -> None:
    whole = E * sum(SIZES)
    profile = Profile(COUNTS, USED, choices=(choice(20, 0.5, 5), choice(40, 1.0, 0), choice(60, 0.0, 7)))
    found = {}
    for percent in (20, 29.9, 30, 30.1, 40, 60, 99):
        found[percent] = placed(policies.SPARK, profile, int(whole * percent / 100))
    assert [made.rule.memory for made in found.values()] == [5, 5, 5, 0, 0, 0, 0]
    halves, opened, pinned = found[20].placement, found[40].placement, found[60].placement
    assert halves.cache_slots == placement.cache_share(halves.slots_per_layer, 0.5) != halves.slots_per_layer
    assert opened.cache_slots == opened.slots_per_layer and not any(pinned.cache_slots)
    assert found[20].reasons == (
        "pin 50%, remember 32 steps: at 20% residency 7 sessions missed 1.00 a token so, 2.00 under LRU and 3.00 with "
        "everything pinned",
    )
    asked = placed(policies.SPARK, profile, int(whole * 0.2), cache_slots=1)
    assert asked.placement == halves.with_cache([1] * L) and asked.rule == Rule(5)
    assert asked.reasons == ("1 cache slots a layer: asked for",)
    # Nothing was measured for the cache slots that are asked for beside a choice of none.
    assert placed(policies.SPARK, profile, int(whole * 0.6), cache_slots=1).rule == policy.DEFAULT
    for other in POLICIES:
        if not other.by_evidence:
            assert placed(other, profile)[:2] == ROWS[other.name][1:3] == placed(other, profile, cache_slots=1)[:2]


@pytest.mark.parametrize("chosen", POLICIES, ids=policies.NAMES)
def test_what_fits_is_pinned_and_a_model_without_experts_has_no_slots(chosen: Policy) -> None:
    profile = Profile(COUNTS, USED, choices=(choice(60, 1.0, 3),))
    experts = Experts(chosen.counts(profile, range(L), E), SIZES, n_used=USED)
    made = policies.place(chosen, experts, experts.bytes, profile, resident=True)
    assert made[:2] == (placement.everything(E, SIZES), policy.LRU)
    assert made.reasons == (() if chosen.whole else ("every expert is resident",))
    dense = policies.place(chosen, Experts(np.zeros((0, 0), np.int64), [], n_used=0), 0, None)
    assert dense.placement == Placement((), (), (), ()) and "no experts" in dense.reasons[0]


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=L * E, max_size=L * E), used=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 40), min_size=L, max_size=L), budget=st.integers(0, 400),
)  # fmt: skip
def test_no_policy_exceeds_the_budget_or_sees_counts_that_are_not_its_own(
    counts: list[int], used: int, sizes: list[int], budget: int
) -> None:
    table = np.array(counts, np.int64).reshape(L, E)
    experts = Experts(table, sizes, n_used=used)
    for chosen in POLICIES:
        made = chosen.place(experts, budget)
        assert chosen.whole or made.bytes <= budget
        assert all(len(r) == len(set(r)) <= n for r, n in zip(made.residents, made.slots_per_layer, strict=True))
        if not chosen.by_profile:  # also where somebody hands them over
            assert made == chosen.place(Experts(np.zeros_like(table), sizes, n_used=used), budget)
    assert experts.counts is table and np.array_equal(table.ravel(), counts)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), percent=st.sampled_from([10.0, 15.0, 33.3, 60.0, 100.0]), memory=st.integers(0, 8)
)  # fmt: skip
def test_validation_places_and_simulates_as_the_engine_does(seed: int, percent: float, memory: int) -> None:
    """`ladder.place` is the engine's own call: same slots, contents and rule, so the same misses on any trace."""
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, 60, L, USED, E)
    profile = Profile(trace.counts(), USED, choices=(choice(10, 1.0, memory), choice(20, 0.5, 3)))
    for chosen in POLICIES:
        counts = chosen.counts(profile, range(L), E)
        budget = placement.residency_budget(E, SIZES, percent)
        engine = policies.place(chosen, Experts(counts, SIZES, n_used=USED), budget, profile)
        rung = ladder_of.place(chosen, trace.counts(), profile, SIZES, USED, percent)
        assert rung == engine
        a, b = (simulate(trace, made.placement, made.rule) for made in (engine, rung))
        assert np.array_equal(a.misses, b.misses) and np.array_equal(a.root_moves, b.root_moves)


def test_the_page_says_what_the_records_say_and_others_are_refused() -> None:
    page = (ROOT / "docs" / "residency.md").read_text()
    (table,) = re.findall(r"\| policy \|.*\n\| ---.*\n((?:\|.*\n)+)", page)
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()]

    def row(p: Policy) -> tuple[str, ...]:
        rule = "by evidence" if p.by_evidence else f"memory {p.rule.memory}" if p.rule.memory else "LRU"
        profile = "must have" if p.needs_profile else "if there is one" if p.by_profile else ""
        return f"`{p.name}`", p.words, rule, profile, "yes" if p.follows else ""

    assert rows == list(map(row, POLICIES))
    with pytest.raises(UsageError) as refused:
        policies.find(parse_arguments(["m.gguf", "--policy", "fifo"]).policy)
    assert "'fifo'" in refused.value.message and all(p.name in (refused.value.hint or "") for p in POLICIES)
