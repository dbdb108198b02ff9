"""`advance` against a literal reading of docs/residency.md, and the invariants of the state."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.placing.placement import Placement
from engine.placing.policy import DEFAULT, LRU, MAX_MEMORY, Rule, SlotState, advance, fill

RULES = st.sampled_from([LRU, DEFAULT, Rule(1), Rule(2), Rule(4), Rule(MAX_MEMORY)])


def literal_advance(state, layer, experts, counted, memory):
    """The four numbered points of docs/residency.md, one sentence after the other."""
    n_expert = state.slot_of.shape[1]
    slots = range(state.slot_begin[layer], state.slot_begin[layer + 1])
    state.clock[layer] += 1
    c = int(state.clock[layer])
    resident = [state.slot_of[layer, e] >= 0 for e in range(n_expert)]
    for row, counts in zip(experts.tolist(), counted.tolist(), strict=True):
        for expert in row if counts else []:
            state.counts[layer, expert] += 1
            (state.hits if resident[expert] else state.misses)[layer] += 1
    uses = {e: sum(row.count(e) for row in experts.tolist()[-32:]) for e in range(n_expert)}
    for e in range(n_expert):
        before = int(state.heat[layer, e])
        if memory > 0:
            state.heat[layer, e] = before - before // 2**memory + uses[e] * 65536
        elif uses[e]:
            state.heat[layer, e] = 64 * c + uses[e]
    heat = state.heat[layer].tolist()
    fetches = []
    for expert in sorted((e for e in uses if uses[e] and not resident[e]), key=lambda e: (-heat[e], e)):
        victims = [
            (heat[int(state.expert_of[slot])] if state.expert_of[slot] >= 0 else -np.inf, slot)
            for slot in slots
            if not state.pinned[slot]
            and not (state.expert_of[slot] >= 0 and uses[int(state.expert_of[slot])])
        ]
        if not victims or min(victims)[0] >= heat[expert]:
            continue
        slot = min(victims)[1]
        evicted = int(state.expert_of[slot])
        if evicted >= 0:
            state.slot_of[layer, evicted] = -1
            state.expert_ptr[layer, evicted] = state.home_ptr[layer, evicted]
        state.slot_of[layer, expert] = slot
        state.expert_of[slot] = expert
        state.expert_ptr[layer, expert] = state.slot_ptr[slot]
        fetches.append((expert, slot, evicted))
    return np.array(fetches, np.int32).reshape(-1, 3)


def random_state(rng, slots_per_layer, n_expert):
    """A state with addresses, some pinned, some cached and some empty slots."""
    state = SlotState.empty(slots_per_layer, n_expert)
    state.home_ptr[:] = rng.integers(1, 1 << 40, state.home_ptr.shape)
    state.slot_ptr[:] = rng.integers(1 << 40, 1 << 41, state.slot_ptr.shape)
    state.expert_ptr[:] = state.home_ptr
    pinned, cached = [], []
    for n in slots_per_layer:
        residents = rng.permutation(n_expert)[: rng.integers(0, n + 1)].tolist()
        cut = rng.integers(0, len(residents) + 1)
        pinned.append(tuple(residents[:cut]))
        cached.append(tuple(residents[cut:]))
    fill(state, Placement(tuple(slots_per_layer), tuple(pinned), tuple(cached), (1,) * len(slots_per_layer)))
    return state


def random_step(rng, n_token, n_active, n_expert):
    weights = rng.dirichlet(np.full(n_expert, 0.3)) + 1e-6
    rows = [rng.choice(n_expert, n_active, replace=False, p=weights / weights.sum()) for _ in range(n_token)]
    return np.array(rows, np.uint16).reshape(n_token, n_active)


def assert_same(a, b):
    for name in SlotState.__slots__:
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and np.array_equal(x, y), name


def assert_consistent(state, pinned_before):
    assert np.array_equal(state.pinned, pinned_before)
    for layer in range(len(state.clock)):
        span = state.slots(layer)
        held = {int(e): span.start + i for i, e in enumerate(state.expert_of[span]) if e >= 0}
        assert {e: s for e, s in enumerate(state.slot_of[layer].tolist()) if s >= 0} == held
        for expert, slot in enumerate(state.slot_of[layer]):
            expected = state.slot_ptr[slot] if slot >= 0 else state.home_ptr[layer, expert]
            assert np.array_equal(state.expert_ptr[layer, expert], expected)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rule=RULES, n_expert=st.integers(3, 11), n_active=st.integers(1, 3))
def test_advance_is_what_the_specification_says(seed, rule, n_expert, n_active):
    rng = np.random.default_rng(seed)
    state = random_state(rng, rng.integers(0, n_expert + 1, 2).tolist(), n_expert)
    literal, pinned = copy.deepcopy(state), state.pinned.copy()
    for _ in range(12):
        layer, n_token = int(rng.integers(2)), int(rng.choice([1, 1, 1, 2, 5, 33, 40]))
        experts = random_step(rng, n_token, n_active, n_expert)
        counted = rng.random(n_token) < 0.7
        fetches = advance(state, layer, experts, counted, rule)
        expected = literal_advance(literal, layer, experts, counted, rule.memory)
        assert fetches.dtype == np.int32 and np.array_equal(fetches, expected)
        assert_same(state, literal)
        assert_consistent(state, pinned)


def test_lru_evicts_the_least_recently_used_and_breaks_ties_by_slot():
    state = SlotState.empty([3], 7)
    counted = np.array([True])
    for expert, expected in [
        (4, (4, 0, -1)),  # empty slots first, lowest first
        (2, (2, 1, -1)),
        (6, (6, 2, -1)),
        (4, None),  # a hit: 2 is now the oldest
        (5, (5, 1, 2)),
        (0, (0, 2, 6)),
    ]:
        fetches = advance(state, 0, np.array([[expert]]), counted, LRU)
        assert fetches.tolist() == ([list(expected)] if expected else [])
    assert state.hits.tolist() == [1] and state.misses.tolist() == [5]
    # 4 and 3 are used together and so are as hot afterwards: the lower slot goes first.
    advance(state, 0, np.array([[4, 3]]), counted, LRU)
    assert state.expert_of.tolist() == [4, 3, 0]
    assert advance(state, 0, np.array([[0, 1]]), counted, LRU).tolist() == [[1, 0, 4]]


def test_a_frequent_expert_is_not_given_up_for_a_rare_one():
    state, rule = SlotState.empty([1], 4), Rule(5)
    for _ in range(10):
        advance(state, 0, np.array([[3]]), np.array([True]), rule)
    assert advance(state, 0, np.array([[1]]), np.array([True]), rule).size == 0  # it enters nowhere
    refusals = 1
    while not advance(state, 0, np.array([[1]]), np.array([True]), rule).size:
        refusals += 1
    # Ten uses that fade against uses that come: 31/32 of the one a step, one more of the other.
    assert 5 < refusals < 10
    assert state.expert_of.tolist() == [1]


@pytest.mark.parametrize(("heat", "enters"), [(69_904, True), (69_905, False)])
def test_an_expert_enters_only_where_it_is_hotter(heat, enters):
    """One use makes 65,536, which is what a sixteenth less leaves of 69,905."""
    state = SlotState.empty([1], 2)
    fill(state, Placement((1,), ((),), ((0,),), (10,)))
    state.heat[0] = [heat, 0]
    fetches = advance(state, 0, np.array([[1]]), np.array([True]), Rule(4))
    assert fetches.tolist() == ([[1, 0, 0]] if enters else [])


def test_what_an_expert_was_used_for_outlives_its_slot():
    """An expert that comes back finds the heat that it left with: a bucket by slot forgot it."""
    state, rule = SlotState.empty([1], 3), Rule(6)
    for expert in [0] * 5 + [1] * 7:
        advance(state, 0, np.array([[expert]]), np.array([True]), rule)
    assert state.expert_of.tolist() == [1]
    rows = [[0], [1], [0], [0], [0]]
    entered = [advance(state, 0, np.array([row]), np.array([True]), rule).size > 0 for row in rows]
    assert entered == [False, False, False, False, True]


def test_a_memory_beyond_what_heat_has_room_for_is_no_rule():
    assert Rule(16).memory == MAX_MEMORY == 16
    for memory in (-1, 17):
        with pytest.raises(AssertionError):
            Rule(memory)


def test_heat_stays_in_range():
    state, rule = SlotState.empty([1], 40), Rule(MAX_MEMORY)
    experts = np.arange(40)[None].repeat(32, axis=0)
    state.heat[:] = 32 << (16 + MAX_MEMORY)  # what it converges to
    before = state.heat.copy()
    advance(state, 0, experts, np.ones(32, bool), rule)
    assert (state.heat == before).all()
    assert before.max() < 1 << 53


def test_a_step_larger_than_the_cache_fetches_the_most_used_experts():
    state = SlotState.empty([2], 9)
    experts = np.array([[7, 1], [7, 8], [8, 2], [5, 8]])
    fetches = advance(state, 0, experts, np.array([False, True, True, False]), LRU)
    assert fetches.tolist() == [[8, 0, -1], [7, 1, -1]]
    assert state.counts[0].tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 2]
    assert (state.hits[0], state.misses[0]) == (0, 4)  # resident before the step, not after it


def test_a_long_step_warms_the_slots_with_what_its_last_tokens_used():
    state = SlotState.empty([2], 9)
    advance(state, 0, np.array([[7, 5]]), np.array([True]), LRU)
    experts = np.full((40, 2), [7, 1])
    experts[8:] = [2, 3]
    fetches = advance(state, 0, experts, np.ones(40, bool), LRU)
    assert fetches.tolist() == [[2, 0, 5], [3, 1, 7]]  # 7 leaves although the first rows use it
    assert state.counts[0].tolist() == [0, 8, 32, 32, 0, 1, 0, 9, 0]
    assert (state.hits[0], state.misses[0]) == (8, 2 + 8 + 64)


def test_uncounted_tokens_move_slots_but_no_counter():
    state = SlotState.empty([2], 5)
    assert advance(state, 0, np.array([[3, 1]]), np.array([False]), LRU).tolist() == [[1, 0, -1], [3, 1, -1]]
    assert state.clock.tolist() == [1]
    assert not state.counts.any() and not state.hits.any() and not state.misses.any()


def test_fill_pins_and_caches_in_order():
    state = SlotState.empty((3, 0, 4), 6)
    state.slot_ptr[:] = np.arange(21).reshape(7, 3) + 100
    fill(state, Placement((3, 0, 4), ((5, 2), (), (1,)), ((0,), (), (4, 3)), (10, 10, 10)))
    assert state.expert_of.tolist() == [5, 2, 0, 1, 4, 3, -1]
    assert state.pinned.tolist() == [1, 1, 0, 1, 0, 0, 0]
    assert state.heat.tolist() == [[-2, 0, -1, 0, 0, 0], [0] * 6, [0, 0, 0, -2, -1, 0]]
    assert state.slot_of[2].tolist() == [-1, 3, -1, 5, 4, -1]
    assert state.expert_ptr[0, 2].tolist() == [103, 104, 105]
    with pytest.raises(AssertionError):
        fill(state, Placement((3, 0, 4), ((), (), ()), ((), (), ()), (10, 10, 10)))
