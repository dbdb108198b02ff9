"""Placements: budgets never exceeded, the best experts kept, ties and remainders spread."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ground.errors import CapacityError
from engine.placing import placement
from engine.placing.placement import Placement

SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def tables(draw):
    """Counts [L, E], bytes of an expert per layer [L], and a budget of anything from nothing to too much."""
    n_layer, n_expert = draw(st.integers(1, 6)), draw(st.integers(2, 9))
    count = st.integers(0, draw(st.sampled_from([3, 50, 2**62])))
    row = st.lists(count, min_size=n_expert, max_size=n_expert)
    counts = np.array(draw(st.lists(row, min_size=n_layer, max_size=n_layer)), np.int64)
    for layer in draw(st.sets(st.integers(0, n_layer - 1), max_size=n_layer)):
        counts[layer] = 0
    size = st.integers(1, 7) if draw(st.booleans()) else st.just(5)
    sizes = draw(st.lists(size, min_size=n_layer, max_size=n_layer))
    budget = draw(st.integers(0, sum(sizes) * n_expert + 3))
    return counts, sizes, budget


@settings(max_examples=300, deadline=None)
@given(table=tables(), fraction=st.sampled_from([0.0, 0.1, 0.5, 1.0]), n_used=st.integers(0, 4))
def test_greedy_keeps_the_budget_and_the_most_counted(table, fraction, n_used):
    counts, sizes, budget = table
    placed = placement.greedy(counts, sizes, budget, n_expert_used=n_used, cache_fraction=fraction)
    assert placed.bytes == sum(n * size for n, size in zip(placed.slots_per_layer, sizes, strict=True))
    assert placed.bytes <= budget
    moe = counts.any(axis=1) if counts.any() else np.ones(len(counts), bool)
    even = budget // sum(size for size, is_moe in zip(sizes, moe, strict=True) if is_moe)
    for layer, (slots, residents) in enumerate(zip(placed.slots_per_layer, placed.residents, strict=True)):
        if not moe[layer]:
            assert slots == 0
            continue
        assert slots >= min(n_used, even, counts.shape[1])
        assert len(residents) == slots
        kept = counts[layer, list(residents)]
        assert all(a >= b for a, b in pairwise(kept.tolist()))  # most counted first
        assert kept.sum(dtype=object) == sum(sorted(counts[layer].tolist())[counts.shape[1] - slots :])
    # what is left over would not buy another expert of any layer that has one to add
    cheapest = [
        size
        for size, n, is_moe in zip(sizes, placed.slots_per_layer, moe, strict=True)
        if is_moe and n < counts.shape[1]
    ]
    assert budget - placed.bytes < min(cheapest, default=budget + 1)
    for slots, cache in zip(placed.slots_per_layer, placed.cache_slots, strict=True):
        if fraction in (0.0, 1.0) or slots == 0:
            assert cache == slots * fraction
        else:
            assert cache >= 1 and abs(cache - slots * fraction) <= max(0.5, 1 - slots * fraction)


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, n=st.integers(0, 40))
def test_greedy_with_one_size_keeps_the_global_best(seed, n):
    counts = np.random.default_rng(seed).integers(1, 1000, (5, 8))
    placed = placement.greedy(counts, [7] * 5, 7 * n + 3, n_expert_used=2, floor=0)
    kept = sum(counts[layer, list(row)].sum() for layer, row in enumerate(placed.residents))
    assert kept == np.sort(counts.ravel())[40 - n :].sum()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(table=tables(), floor=st.none() | st.integers(0, 4), n_used=st.integers(0, 4))
def test_greedy_takes_the_densest_next_expert_of_all_layers(table, floor, n_used):
    """One slot after the other, beyond the floor; a layer whose next expert does not fit gets no more."""
    counts, sizes, budget = table
    rows = [sorted(row, reverse=True) for row in counts.tolist()]
    open_ = {layer for layer, row in enumerate(rows) if any(row) or not counts.any()}
    if floor is None:
        floor = min(n_used, budget // max(1, sum(sizes[layer] for layer in open_)))
    slots = [min(floor, counts.shape[1]) if layer in open_ else 0 for layer in range(len(rows))]
    left = budget - sum(n * size for n, size in zip(slots, sizes, strict=True))
    if left < 0:
        with pytest.raises(CapacityError):
            placement.greedy(counts, sizes, budget, n_expert_used=n_used, floor=floor)
        return
    while open_ := {layer for layer in open_ if slots[layer] < counts.shape[1]}:
        turn = sorted(range(len(rows)), key=lambda layer: [layer >> place & 1 for place in range(4)])
        layer = min(open_, key=lambda i: (-(rows[i][slots[i]] / sizes[i]), slots[i], turn.index(i)))
        if sizes[layer] > left:
            open_.remove(layer)
        else:
            slots[layer] += 1
            left -= sizes[layer]
    found = placement.greedy(counts, sizes, budget, n_expert_used=n_used, floor=floor)
    assert found.slots_per_layer == tuple(slots)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(table=tables(), n_used=st.integers(0, 4), data=st.data())
def test_the_sets_of_slots_are_those_that_budgets_buy(table, n_used, data):
    counts, sizes, _ = table
    staged = data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
    experts = placement.Experts(counts, sizes, staged, n_used=n_used)
    slots, staging = experts.sets
    assert slots.dtype == staging.dtype == np.int64 and len(slots) == len(staging)
    before = -1
    for budget, wanted in zip(slots.tolist(), staging.tolist(), strict=True):
        placed = placement.best(experts, budget, floor=n_used)
        assert placed.bytes == budget > before  # one slot more each time, and all of them is all there is to buy
        missing = [(experts.n_expert - n) * size for n, size in zip(placed.slots_per_layer, staged, strict=True)]
        assert wanted == 2 * max(missing)
        before = budget
    most = placement.best(experts, 10**6, floor=n_used)
    least = sum(min(n_used, experts.n_expert) for n in most.slots_per_layer if n)
    assert slots[-1] == most.bytes and len(slots) == 1 + sum(most.slots_per_layer) - least
    even = experts.evenly()
    assert not even.counts.any() and even.counts.shape == counts.shape and even.n_used == n_used
    assert (even is experts) == (not counts.any())


def test_greedy_counts_by_byte():
    # 30 uses in 4 bytes are worth more than 50 in 10; the last 2 bytes buy nothing.
    placed = placement.greedy(np.array([[50, 20], [30, 3]]), [10, 4], 16, n_expert_used=1, floor=0)
    assert placed.residents == ((0,), (0,))
    placed = placement.greedy(np.array([[50, 20], [30, 3]]), [10, 4], 12, n_expert_used=1, floor=0)
    assert placed.residents == ((), (0, 1))


def test_greedy_spreads_a_tie_over_all_layers():
    counts = np.full((6, 10), 4)
    for n in range(61):
        slots = placement.greedy(counts, [3] * 6, 3 * n, n_expert_used=2).slots_per_layer
        assert sum(slots) == n and max(slots) - min(slots) <= 1


def test_greedy_gives_every_layer_its_floor_first():
    counts = np.array([[900, 800, 700, 600], [5, 4, 3, 2], [0, 0, 0, 0]])
    assert placement.greedy(counts, [1, 1, 1], 5, n_expert_used=2).slots_per_layer == (3, 2, 0)
    assert placement.greedy(counts, [1, 1, 1], 5, n_expert_used=2, floor=1).slots_per_layer == (4, 1, 0)
    assert placement.greedy(counts, [1, 1, 1], 3, n_expert_used=4).slots_per_layer == (
        2,
        1,
        0,
    )  # even share: 1


def test_a_floor_that_does_not_fit_names_the_smallest_budget_that_does():
    counts = np.array([[9, 8, 7], [0, 0, 0], [3, 2, 1]])
    with pytest.raises(
        CapacityError, match=r"2 slots a layer take 22 bytes, the budget is 21 bytes"
    ) as error:
        placement.greedy(counts, [5, 100, 6], 21, n_expert_used=1, floor=2)
    assert "22 bytes" in error.value.hint
    assert placement.greedy(counts, [5, 100, 6], 22, n_expert_used=1, floor=2).slots_per_layer == (2, 0, 2)


def test_no_counts_give_the_uniform_placement():
    sizes = [4, 5, 4, 5]
    for budget in range(0, 18 * 6 + 2, 7):
        untaught = placement.greedy(np.zeros((4, 6), np.int64), sizes, budget, n_expert_used=2)
        assert untaught == placement.uniform(6, sizes, budget)


@settings(max_examples=100, deadline=None)
@given(n_layer=st.integers(1, 50), n_expert=st.integers(1, 12), data=st.data())
def test_uniform_is_the_same_share_of_every_layer(n_layer, n_expert, data):
    budget = data.draw(st.integers(0, 3 * n_layer * n_expert))
    slots = placement.uniform(n_expert, [3] * n_layer, budget).slots_per_layer
    assert sum(slots) == budget // 3
    assert max(slots) - min(slots) <= 1
    # the layers with one slot more lie evenly, which is easy to say where their number is a power of two
    more = [n - min(slots) for n in slots]
    if n_layer & (n_layer - 1) == 0 and n_layer > 1:
        assert abs(sum(more[: n_layer // 2]) - sum(more[n_layer // 2 :])) <= 1
        if sum(more) <= n_layer // 2:
            assert not any(a and b for a, b in pairwise(more))


@pytest.mark.parametrize("n_layer", range(1, 40))
def test_what_is_left_over_goes_to_layers_in_the_order_of_van_der_corput(n_layer):
    """The first few lie evenly over the model, whatever its depth."""

    def radical_inverse(layer):
        return sum(0.5 ** (place + 1) for place in range(8) if layer >> place & 1)

    turns = sorted(range(n_layer), key=radical_inverse)
    for n in range(n_layer + 1):
        slots = placement.uniform(4, [7] * n_layer, 7 * (n_layer + n)).slots_per_layer
        assert [layer for layer in range(n_layer) if slots[layer] == 2] == sorted(turns[:n])


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, n_expert=st.integers(1, 90), most=st.integers(1, 4))
def test_of_equals_the_expert_of_lower_index_is_kept(seed, n_expert, most):
    """In tables long enough for a sort that is not stable to show."""
    counts = np.random.default_rng(seed).integers(0, most, (3, n_expert)) + 1
    placed = placement.greedy(counts, [2, 2, 2], 2 * n_expert, n_expert_used=2)
    for row, residents in zip(counts.tolist(), placed.residents, strict=True):
        assert list(residents) == sorted(range(n_expert), key=lambda expert: (-row[expert], expert))[: len(residents)]


def test_experts_of_a_byte_and_of_none():
    """The smallest sizes that are sizes; a model without experts has nothing to place, whatever the budget."""
    assert placement.greedy(np.array([[3, 2, 1]]), [1], 2, n_expert_used=2).residents == ((0, 1),)
    assert placement.greedy(np.array([[3], [4]]), [1, 2], 2, n_expert_used=1, floor=0).residents == ((0,), ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for counts in (np.zeros((2, 3), np.int64), np.array([[1, 2, 3], [3, 2, 1]])):
            placed = placement.greedy(counts, [0, 0], 10, n_expert_used=2)
            assert (placed.slots_per_layer, placed.bytes) == ((0, 0), 0)


@given(slots=st.lists(st.integers(0, 300), max_size=5), fraction=st.floats(0, 1))
def test_a_share_of_the_slots_is_cache(slots, fraction):
    shares = placement.cache_share(slots, fraction)
    assert len(shares) == len(slots)
    for n, cache in zip(slots, shares, strict=True):
        assert 0 <= cache <= n
        assert cache == 0 if fraction == 0 else cache == min(n, 1) or abs(cache - n * fraction) <= 0.5


def test_uniform_spreads_over_a_model_of_48_layers():
    slots = placement.uniform(128, [1] * 48, 48 * 76 + 12).slots_per_layer
    quarters = [sum(slots[i : i + 12]) - 12 * 76 for i in range(0, 48, 12)]
    assert quarters == [3, 3, 3, 3]


def test_dense_layers_have_no_bytes_and_get_no_slots():
    assert placement.uniform(4, [0, 3, 3], 12).slots_per_layer == (0, 2, 2)
    assert placement.everything(4, [0, 3, 2]).residents == ((), (0, 1, 2, 3), (0, 1, 2, 3))
    counts = np.array([[9, 9, 9], [1, 2, 3]])
    assert placement.greedy(counts, [0, 2], 4, n_expert_used=1).residents == ((), (2, 1))


def test_lru_has_the_slots_of_uniform_and_pins_nothing():
    placed, even = placement.lru(7, [3, 3, 5], 40), placement.uniform(7, [3, 3, 5], 40)
    assert placed.slots_per_layer == placed.cache_slots == even.slots_per_layer
    assert not any(placed.residents)
    assert even.cache_slots == (0, 0, 0)


def test_everything_takes_exactly_all_bytes():
    placed = placement.everything(5, [3, 4])
    assert placed.bytes == 35 == placement.residency_budget(5, [3, 4], 100)
    assert placed.cache_slots == (0, 0)


@given(pct=st.floats(0, 100), size=st.integers(1, 2**40))
def test_a_residency_never_buys_more_than_its_share(pct, size):
    budget = placement.residency_budget(3, [size, size + 1], pct)
    assert isinstance(budget, int)
    assert 0 <= budget <= 3 * (2 * size + 1) * pct / 100 + 1e-3 * size
    whole = 2**57 + 3  # more digits than a float has
    assert placement.residency_budget(1, [whole], 29) == whole * 29 // 100


def test_with_cache_moves_the_line_and_nothing_else():
    placed = Placement((3, 4, 0), ((5, 2), (1,), ()), ((0,), (4, 3), ()), (10, 20, 30))
    pinned = placed.with_cache((0, 0, 0))
    assert pinned.pinned == ((5, 2, 0), (1, 4, 3), ()) and pinned.cache_slots == (
        0,
        1,
        0,
    )  # one slot is empty
    cached = placed.with_cache((9, 2, 1))
    assert cached.pinned == ((), (1, 4), ()) and cached.cached == ((5, 2, 0), (3,), ())
    assert placed.residents == pinned.residents == cached.residents
    assert placed.bytes == pinned.bytes == cached.bytes == 110


@pytest.mark.parametrize("pinned", [((5, 5),), ((1, 2, 3, 4),)])
def test_a_placement_holds_no_expert_twice_and_no_more_than_its_slots(pinned):
    with pytest.raises(AssertionError):
        Placement((3,), pinned, ((),), (1,))


def test_swaps_set_the_most_counted_outside_against_the_least_counted_inside():
    counts = np.array([[10, 90, 30, 80, 20, 10]])  # mean 40
    assert placement.swaps(counts, [[0, 2, 4]], [[0, 2, 4]], 0.25) == [(0, 1, 0), (0, 3, 4)]
    # 80 - 20 = 60 is 1.5 times the mean: it has to exceed it
    assert placement.swaps(counts, [[0, 2, 4]], [[0, 2, 4]], 1.5) == [(0, 1, 0)]
    assert placement.swaps(counts, [[0, 2, 4]], [[0, 2, 4]], 2.0) == []
    assert placement.swaps(counts, [[]], [[]], 0.0) == []
    assert placement.swaps(counts, [range(6)], [range(6)], 0.0) == []


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, threshold=st.sampled_from([0.0, 0.5]), most=st.integers(1, 9))
def test_swaps_follow_their_order(seed, threshold, most):
    """A literal reading: who enters is the most counted, resident before not, then the lower; who leaves is the least
    counted, then the higher."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, most, (2, 12))
    residents = [rng.permutation(12)[:7].tolist() for _ in range(2)]
    pinned = [row[: rng.integers(0, 7)] for row in residents]
    expected = []
    for layer, row in enumerate(counts.tolist()):
        outside = sorted(set(range(12)) - set(pinned[layer]), key=lambda e: (-row[e], e not in residents[layer], e))
        inside = sorted(pinned[layer], key=lambda e: (row[e], -e))
        pairs = zip(outside, inside, strict=False)
        expected += [(layer, a, b) for a, b in pairs if row[a] - row[b] > threshold * sum(row) / 12]
    assert placement.swaps(counts, pinned, residents, threshold) == expected


def test_swaps_prefer_an_expert_that_is_already_resident():
    counts = np.array([[0, 0, 0, 0], [50, 50, 50, 1]])
    assert placement.swaps(counts, [[0], [3]], [[0, 1], [3, 2]], 0.1) == [(1, 2, 3)]
    assert placement.swaps(counts, [[0], [3]], [[0, 1], [3]], 0.1) == [(1, 0, 3)]


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, threshold=st.sampled_from([0.0, 0.3, 1.0]))
def test_swaps_only_ever_improve_and_come_to_rest(seed, threshold):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 30, (3, 9))
    pinned = [rng.permutation(9)[: rng.integers(0, 10)].tolist() for _ in range(3)]
    for layer, enters, leaves in placement.swaps(counts, pinned, pinned, threshold):
        assert counts[layer, enters] - counts[layer, leaves] > threshold * counts[layer].mean()
        pinned[layer].remove(leaves)
        assert enters not in pinned[layer]
        pinned[layer].append(enters)
    assert placement.swaps(counts, pinned, pinned, threshold) == []
    if threshold == 0.0:
        for row, chosen in zip(counts, pinned, strict=True):
            assert row[chosen].sum() == np.sort(row)[9 - len(chosen) :].sum()
