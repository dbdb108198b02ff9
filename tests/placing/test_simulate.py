"""The simulator against `advance`, and Belady's bound against brute force and against every policy."""

from bisect import bisect_right, insort
from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats.trace import RoutingTrace
from engine.placing import placement, simulate
from engine.placing.placement import Placement
from engine.placing.policy import DEFAULT, LRU, Rule, SlotState, advance, fill
from engine.running.shares import HOST_CHUNK_TOKENS

RULES = [LRU, DEFAULT, Rule(1), Rule(3)]
SEEDS = st.integers(0, 2**32 - 1)


def make_trace(experts, generated, n_expert, session=None, position=None):
    """A trace from experts [T, L, A]; one session unless told otherwise."""
    n_token, n_layer, _ = np.shape(experts)
    session = np.zeros(n_token, np.int32) if session is None else np.array(session, np.int32)
    return RoutingTrace(
        experts=np.array(experts, np.uint16),
        layers=tuple(range(n_layer)),
        generated=np.array(generated, bool),
        session=session,
        session_ids=tuple(f"s{i}" for i in range(session.max(initial=0) + 1)),
        position=np.arange(n_token, dtype=np.int32) if position is None else np.array(position, np.int32),
        model_id="0" * 64,
        n_expert=n_expert,
    )


def random_trace(rng, n_token, n_layer, n_active, n_expert, skew=0.5):
    """Skewed routing in runs of prefill and generated tokens, over a few sessions."""
    weights = rng.dirichlet(np.full(n_expert, skew), n_layer) + 1e-4
    keys = np.log(weights) + rng.gumbel(size=(n_token, n_layer, n_expert))
    experts = np.argsort(-keys, axis=2)[:, :, :n_active]
    generated = np.repeat(rng.random(n_token) < 0.6, rng.integers(1, 6, n_token))[:n_token]
    session = np.sort(rng.integers(0, 3, n_token))
    return make_trace(experts, generated, n_expert, session)


def random_placement(rng, slots_per_layer, n_expert):
    pinned, cached = [], []
    for n in slots_per_layer:
        residents = rng.permutation(n_expert)[: rng.integers(0, n + 1)].tolist()
        cut = rng.integers(0, len(residents) + 1)
        pinned.append(tuple(residents[:cut]))
        cached.append(tuple(residents[cut:]))
    n_layer = len(slots_per_layer)
    return Placement(tuple(slots_per_layer), tuple(pinned), tuple(cached), (1,) * n_layer)


def all_contents(n_layer, n_expert, sizes, budget):
    """Every set of (layer, expert) that fits in the budget."""
    items = [(layer, expert) for layer in range(n_layer) for expert in range(n_expert)]
    for n in range(len(items) + 1):
        for chosen in combinations(items, n):
            if sum(sizes[layer] for layer, _ in chosen) <= budget:
                yield frozenset(chosen)


def brute_force(trace, sizes, budget):
    """The most hits of any schedule that loads on use only, by search over all contents at every moment."""
    n_layer = len(trace.layers)
    moments = []  # (used, counted): a run of prefill tokens is one step of each layer
    begin = 0
    while begin < len(trace.generated):
        end = begin + 1
        while not trace.generated[begin] and end < len(trace.generated) and not trace.generated[end]:
            end += 1
        for layer in range(n_layer):
            used = frozenset((layer, int(e)) for e in trace.experts[begin:end, layer].ravel())
            moments.append((used, bool(trace.generated[begin])))
        begin = end

    @cache
    def best(moment, contents):
        if moment == len(moments):
            return 0
        used, counted = moments[moment]
        hits = len(used & contents) if counted else 0
        available = sorted(contents | used)
        later = 0
        for n in range(len(available) + 1):
            for kept in combinations(available, n):
                if sum(sizes[layer] for layer, _ in kept) <= budget:
                    later = max(later, best(moment + 1, frozenset(kept)))
        return hits + later

    return max(best(0, contents) for contents in all_contents(n_layer, trace.n_expert, sizes, budget))


def test_prefill_is_cut_at_sessions_jumps_and_chunks():
    generated = [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0]
    session = [0] * 7 + [1] * 5 + [2] * 2
    position = [0, 1, 2, 3, 4, 5, 6, 0, 1, 9, 10, 11, 0, 1]
    trace = make_trace(np.zeros((14, 2, 1)), generated, 3, session, position)
    assert list(simulate._spans(trace, 3)) == [
        (0, 3, False),
        (3, 5, False),
        (5, 7, True),
        (7, 9, False),
        (9, 11, False),
        (11, 13, True),
        (13, 14, False),
    ]
    assert list(simulate._spans(trace.part(0, 0), 3)) == []


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    seed=SEEDS, rule=st.sampled_from(RULES), chunk=st.integers(1, 50), n_expert=st.integers(4, 13),
    n_active=st.integers(1, 4),
)  # fmt: skip
def test_simulate_is_advance_step_by_step(seed, rule, chunk, n_expert, n_active):
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, int(rng.integers(1, 90)), 3, n_active, n_expert)
    start = random_placement(rng, rng.integers(0, n_expert + 1, 3).tolist(), n_expert)
    state = SlotState.empty(start.slots_per_layer, n_expert)
    fill(state, start)
    misses, moves = np.zeros(3, np.int64), np.zeros(3, np.int64)
    resident = np.zeros((3, len(trace.generated), n_expert), bool)
    for layer in range(3):
        begin = 0
        while begin < len(trace.generated):
            end = begin + 1
            while (
                not trace.generated[begin]
                and end < len(trace.generated)
                and end - begin < chunk
                and not trace.generated[end]
                and trace.session[end] == trace.session[begin]
            ):
                end += 1
            counted, before = trace.generated[begin:end], int(state.misses[layer])
            resident[layer, begin:end] = state.slot_of[layer] >= 0
            fetches = advance(state, layer, trace.experts[begin:end, layer], counted, rule)
            misses[trace.session[begin]] += state.misses[layer] - before
            moves[trace.session[begin]] += len(fetches) if counted[0] else 0
            begin = end
    result = simulate.simulate(trace, start, rule, chunk_tokens=chunk)
    assert np.array_equal(result.hits, state.hits) and np.array_equal(result.misses, state.misses)
    assert (result.hits + result.misses == trace.generated.sum() * n_active).all()
    assert result.root_misses.tolist() == misses[: len(result.root_misses)].tolist()
    assert result.root_moves.tolist() == moves[: len(result.root_moves)].tolist()
    recording, some = simulate.Recording(trace, chunk_tokens=chunk), rng.permutation(len(trace.generated))[:37]
    for layer in range(3):
        assert np.array_equal(recording.residents(layer, start, rule, some), resident[layer, some])


def test_what_grew_from_one_session_is_one_root():
    trace = make_trace(np.zeros((5, 1, 1)), np.ones(5), 3, [0, 1, 2, 3, 4])
    trace = replace(trace, session_ids=("a", "b", "a/agent-1", "b#2", "a~1"))
    root, names = simulate.roots(trace)
    assert (root.tolist(), names) == ([0, 1, 0, 1, 0], ("a", "b"))


def test_prefill_is_replayed_in_the_chunks_of_the_engine():
    assert simulate.CHUNK_TOKENS == HOST_CHUNK_TOKENS
    trace = random_trace(np.random.default_rng(2), 1500, 1, 2, 9)
    trace = replace(trace, generated=np.arange(1500) >= 1400, session=np.zeros(1500, np.int32))
    assert [end - begin for begin, end, _ in simulate.Recording(trace)._spans.tolist()] == [512, 512, 376, 100]


def test_indices_that_are_not_of_the_model_are_refused():
    trace = make_trace([[[1]], [[3]]], [True, True], 3)
    with pytest.raises(AssertionError, match="of the model"):
        simulate.simulate(trace, placement.lru(3, [1], 2), LRU)


def test_pinned_everything_never_misses_and_no_slots_always_do():
    trace = random_trace(np.random.default_rng(3), 50, 2, 3, 8)
    full = simulate.simulate(trace, placement.everything(8, [5, 6]), LRU)
    none = simulate.simulate(trace, placement.lru(8, [5, 6], 4), LRU)
    assert full.hit_rate == 1.0 and none.hit_rate == 0.0
    assert full.hits.tolist() == none.misses.tolist() == [int(trace.generated.sum()) * 3] * 2


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, n_layer=st.integers(1, 2), n_active=st.integers(1, 2), k=st.integers(0, 3))
def test_belady_is_the_best_schedule(seed, n_layer, n_active, k):
    rng = np.random.default_rng(seed)
    n_expert = 5 - n_layer
    trace = random_trace(rng, int(rng.integers(1, 8)), n_layer, n_active, n_expert, skew=2.0)
    bound = simulate.belady(trace, [7] * n_layer, 7 * k + 6)
    assert bound.exact
    assert bound.hits.sum() == brute_force(trace, [7] * n_layer, 7 * k + 6)


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, generated=st.lists(st.booleans(), min_size=3, max_size=7), k=st.integers(1, 2))
def test_belady_is_the_best_schedule_however_prefill_and_decoding_alternate(seed, generated, k):
    rng = np.random.default_rng(seed)
    trace = replace(random_trace(rng, len(generated), 1, 1, 4, skew=2.0), generated=np.array(generated))
    assert simulate.belady(trace, [7], 7 * k).hits.sum() == brute_force(trace, [7], 7 * k)


def literal_intervals(trace):
    """(layer, begin, end) in steps, of each stay of an expert that ends in a use by a generated token; begin -1: before
    the first step. And the number of steps."""
    step = np.concatenate(([0], np.cumsum(trace.generated[1:] | trace.generated[:-1])))
    found = []
    for layer in range(len(trace.layers)):
        last = {}
        for token, experts in enumerate(trace.experts[:, layer].tolist()):
            for expert in experts:
                if trace.generated[token]:
                    found.append((layer, last.get(expert, -1), int(step[token])))
            last |= dict.fromkeys(experts, int(step[token]))
    return found, int(step[-1]) + 1


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, sizes=st.sampled_from([(2, 3), (1, 9), (5, 4)]), budget=st.integers(1, 30))
def test_belady_with_several_sizes_is_the_smaller_of_two_bounds(seed, sizes, budget):
    """That of so many slots of the smallest size, and that of bytes x time; both are loose in their own way."""
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, int(rng.integers(1, 40)), 2, 2, 5)
    slots = simulate.belady(trace, [min(sizes)] * 2, budget).hits.sum()
    intervals, n_step = literal_intervals(trace)
    areas = sorted(  # a stay from before the first step is open in all moments up to its layer's
        sizes[layer] * ((end - begin) * 2 if begin >= 0 else end * 2 + layer + 1) for layer, begin, end in intervals
    )
    area = sum(float(total) <= budget * n_step * 2 for total in np.cumsum(areas))
    assert simulate.belady(trace, sizes, budget).hits.sum() == min(slots, area)


def test_a_recording_counts_by_the_roots_that_it_is_given():
    trace = make_trace([[[1, 2]], [[0, 1]], [[2, 3]], [[0, 3]]], [True, False, True, True], 4, [0, 0, 1, 1])
    assert simulate.Recording(trace).tokens.tolist() == [1, 2]
    recording = simulate.Recording(trace, np.array([1, 1, 0, 1]), 4)
    assert recording.tokens.tolist() == [1, 2, 0, 0]
    result = recording.replay(placement.lru(4, [1], 0), LRU)
    assert result.root_misses.tolist() == [2, 4, 0, 0]


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, sizes=st.sampled_from([(2, 3), (1, 3), (5, 4)]), budget=st.integers(0, 13))
def test_belady_with_several_sizes_is_a_bound(seed, sizes, budget):
    trace = random_trace(np.random.default_rng(seed), 6, 2, 2, 3, skew=2.0)
    bound = simulate.belady(trace, sizes, budget)
    assert not bound.exact
    assert bound.hits.sum() >= brute_force(trace, sizes, budget)
    assert (bound.hits >= 0).all() and (bound.misses >= 0).all()


@settings(max_examples=120, deadline=None)
@given(seed=SEEDS, rule=st.sampled_from(RULES), equal=st.booleans(), chunk=st.integers(1, 20))
def test_no_policy_beats_belady(seed, rule, equal, chunk):
    rng = np.random.default_rng(seed)
    n_layer, n_expert = int(rng.integers(1, 4)), int(rng.integers(3, 10))
    trace = random_trace(rng, int(rng.integers(1, 80)), n_layer, 2, n_expert)
    sizes = [3] * n_layer if equal else rng.integers(2, 5, n_layer).tolist()
    start = random_placement(rng, rng.integers(0, n_expert + 1, n_layer).tolist(), n_expert)
    budget = placement.slot_bytes(start.slots_per_layer, sizes)
    hits = simulate.simulate(trace, start, rule, chunk_tokens=chunk).hits
    # the same slots, with the best experts of this very trace pinned
    clairvoyant = [
        tuple(np.argsort(-row, kind="stable")[:n].tolist())
        for row, n in zip(trace.counts(), start.slots_per_layer, strict=True)
    ]
    oracle = Placement(start.slots_per_layer, tuple(clairvoyant), ((),) * n_layer, tuple(sizes))
    static = simulate.simulate(trace, oracle, rule, chunk_tokens=chunk).hits
    bound = simulate.belady(trace, sizes, budget)
    assert max(hits.sum(), static.sum()) <= bound.hits.sum()
    assert (bound.hits + bound.misses == trace.generated.sum() * 2).all()
    assert (bound.root_misses is not None) == (len(set(sizes)) == 1)
    if bound.root_misses is not None:
        assert bound.root_misses.sum() == bound.misses.sum() and (bound.root_misses >= 0).all()


def test_belady_with_room_for_everything_misses_nothing_and_with_none_everything():
    trace = random_trace(np.random.default_rng(5), 3000, 3, 2, 9)
    assert simulate.belady(trace, [4, 4, 4], 4 * 27).misses.sum() == 0
    assert simulate.belady(trace, [4, 5, 4], 13 * 9).misses.sum() == 0
    assert simulate.belady(trace, [4, 4, 4], 3).hits.sum() == 0
    empty = simulate.belady(trace.part(0, 0), [4, 4, 4], 100)
    assert empty.hit_rate == 1.0 and empty.hits.tolist() == [0, 0, 0]
    assert empty.exact and empty.root_misses.tolist() == []


def literal_packed(trace, k):
    """Hits of keeping at most k stays open, giving up the one that ends last: in one sorted list, from end to end."""
    n_layer, at = len(trace.layers), {}
    intervals, _ = literal_intervals(trace)
    for layer, begin, end in intervals:
        moment = begin * n_layer + layer if begin >= 0 else -1
        at.setdefault(moment, []).append(end * n_layer + layer)
    kept, given_up = [], 0
    for moment in sorted(at):
        kept = kept[bisect_right(kept, moment) :]
        for end in at[moment]:
            insort(kept, end)
        given_up += len(kept[k:])
        kept = kept[:k]
    return len(intervals) - given_up


def test_belady_over_blocks_and_stale_entries(monkeypatch):
    """A long trace crosses blocks of steps and purges of the heap; the bound must not depend on either."""
    trace = random_trace(np.random.default_rng(6), 9000, 2, 3, 12)
    whole = simulate.belady(trace, [1, 1], 9)
    assert whole.hits.sum() == literal_packed(trace, 9)
    monkeypatch.setattr(simulate, "_BLOCK_STEPS", 37)
    assert simulate.belady(trace, [1, 1], 9).hits.tolist() == whole.hits.tolist()
    lru = simulate.simulate(trace, placement.lru(12, [1, 1], 9), LRU)
    assert lru.hits.sum() < whole.hits.sum() < trace.generated.sum() * 6


@pytest.mark.parametrize("n_token", [1, 2])
def test_a_single_step_can_hit_only_what_was_there_before(n_token):
    trace = make_trace([[[2, 1]]] * n_token, [True] * n_token, 4)
    start = Placement((3,), ((1,),), ((),), (1,))
    assert simulate.simulate(trace, start, LRU).hits.tolist() == [1 if n_token == 1 else 3]
