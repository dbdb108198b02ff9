"""What guesses come to, beside a loop over tokens and `advance`."""

from __future__ import annotations

import numpy as np
import pytest

from engine.formats.profile import Profile
from engine.formats.trace import RoutingTrace
from engine.placing import guesses
from engine.placing.placement import Experts, residency_budget
from engine.placing.policies import SPARK, place
from engine.placing.policy import SlotState, advance, fill
from spark.pipeline import guessed
from spark.pipeline.guessed import Guessed

E, A, LAYERS, SIZES = 14, 3, (1, 4, 5), (100, 300, 200)


@pytest.fixture(scope="module")
def trace():
    rng = np.random.default_rng(8)
    T = 260
    keys = rng.normal(size=(T, len(LAYERS), E)) + np.linspace(0, 2, E)
    session = np.repeat([0, 1, 2, 0], (60, 90, 70, 40))
    return RoutingTrace(
        np.argsort(-keys, axis=2)[:, :, :A].astype(np.uint16), LAYERS, rng.random(T) < 0.7, session.astype(np.int32),
        ("a", "b", "c"), np.arange(T, dtype=np.int32), "0" * 64, E,
    )  # fmt: skip


def literal(trace, tokens, scores, layer, target, percent, profile):
    """For each rule: guesses, useful ones, misses, wasted bytes and the sum of chances, token by token."""
    placed = place(
        SPARK, Experts(SPARK.counts(profile, LAYERS, E), SIZES, n_used=A), residency_budget(E, SIZES, percent), profile
    )
    state = SlotState.empty(placed.placement.slots_per_layer, E)
    fill(state, placed.placement)
    margin = guesses.margins(scores, A)
    used = np.array([[e in row for e in range(E)] for row in trace.experts[tokens, target].tolist()])
    half = len(tokens) // 2
    tables = [guesses.fit(margin[half:], used[half:]), guesses.fit(margin[:half], used[:half])]
    rules = [(1, 0.0), (2, 0.0), (4, 0.0), (A, 0.5)]
    totals = {rule: [0] * 5 for rule in rules}
    wanted, held_out = tokens.tolist(), np.unique(trace.session[tokens])
    begin = 0
    kept = np.flatnonzero(np.isin(trace.session, held_out))
    while begin < len(kept):
        end = begin + 1
        while (
            not trace.generated[kept[begin]] and end < len(kept) and not trace.generated[kept[end]]
            and trace.session[kept[end]] == trace.session[kept[begin]] and kept[end] == kept[end - 1] + 1
        ):  # fmt: skip
            end += 1
        for t in kept[begin:end].tolist():
            if t not in wanted:
                continue
            i = wanted.index(t)
            chances = tables[i >= half].of(margin[i])
            missing = [e for e in range(E) if state.slot_of[target, e] < 0]
            for budget, threshold in rules:
                best = sorted((e for e in missing if chances[e] > threshold), key=lambda e: -chances[e])[:budget]
                true = [e for e in best if used[i, e]]
                wasted = SIZES[target] * (len(best) - len(true))
                more = len(best), len(true), int(used[i, missing].sum()), wasted, sum(chances[best])
                totals[budget, threshold] = [a + b for a, b in zip(totals[budget, threshold], more, strict=True)]
        part = kept[begin:end]
        advance(state, target, trace.experts[part, target], trace.generated[part], placed.rule)
        begin = end
    return totals


@pytest.mark.parametrize("with_profile", [False, True], ids=["no profile", "profile"])
def test_guesses_are_judged_token_by_token(trace, with_profile):
    counts = np.random.default_rng(1).integers(0, 50, (6, E))
    profile = Profile(counts, A, trace.model_id, count="generated") if with_profile else None
    tokens = np.flatnonzero(np.isin(trace.session, (0, 2)) & trace.generated)[3:]
    added = Guessed(trace, tokens, SIZES, profile)
    rng = np.random.default_rng(2)
    true = np.zeros((len(tokens), len(LAYERS), E))
    np.put_along_axis(true, trace.experts[tokens].astype(np.int64), 1.0, 2)
    expected = {}
    for layer, target in ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2)):
        scores = {name: rng.normal(size=(len(tokens), E)) + 2 * true[:, target] for name in guessed.SOURCES}
        added.add(layer, target, scores)
        for percent in guessed.RESIDENCIES:
            for rule, more in literal(trace, tokens, scores["router"], layer, target, percent, profile).items():
                key = (target - layer, percent, *rule)
                expected[key] = [a + b for a, b in zip(expected.get(key, [0] * 5), more, strict=True)]
    rows = [row for row in added.rows() if row.predictor == "router"]
    assert len(rows) == len(expected) == 2 * 3 * 4
    for row in rows:
        made, useful, misses, wasted, promised = expected[row.ahead, row.residency_pct, row.budget, row.threshold]
        assert made > useful > 0 and row.precision == useful / made and row.recall == useful / misses
        found = [row.guesses_per_token, row.useful_per_token, row.misses_per_token, row.wasted_bytes_per_token]
        assert found == [n / len(tokens) for n in (made, useful, misses, wasted)]
        assert row.promised == pytest.approx(promised / made)
