"""Slots and their bytes: what the tables say is what lies in memory, and no token ever changes."""

from __future__ import annotations

import copy
import ctypes
from pathlib import Path

import numpy as np
import pytest

from engine.formats.profile import Choice, Profile
from engine.formats.profile import save as save_profile
from engine.formats.trace import RoutingTrace
from engine.ground.config import EngineConfig
from engine.ground.protocol import Generate
from engine.memory.residency import Residency
from engine.placing import policies, policy, simulate
from engine.placing.placement import Placement
from engine.running.loaded import Loaded, load
from engine.running.stepping import Span
from engine.serving.scheduler import Engine
from spark.pipeline import ladder as ladder_of
from tests.tiny_models import k_quant_mix, write_tiny

RNG = np.random.default_rng(11)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", k_quant_mix)


def loaded_for(model: Path, policy_name: str, percent: float, **options) -> Loaded:
    config = EngineConfig(
        model=model, device="cpu", threads=2, ctx_tokens=300, chunk_tokens=37, policy=policy_name,
        residency_pct=percent, poison=True, **options,
    )  # fmt: skip
    return load(config)


def decode(loaded: Loaded, tokens: np.ndarray, n_prompt: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T - n_prompt, V] of single-token steps after a prefilled prompt; experts [L, T, A] of all."""
    sequence, logits, experts = loaded.kv.sequence(), [], []
    for start in range(0, n_prompt, 37):
        part = tokens[start : min(start + 37, n_prompt)]
        experts.append(loaded.steps.run([Span(sequence, part, np.zeros(len(part), bool))]).experts.copy())
    for token in tokens[n_prompt:]:
        result = loaded.steps.run([Span(sequence, np.array([token], np.int32), np.ones(1, bool), (0,))])
        logits.append(result.logits[0].copy())
        experts.append(result.experts.copy())
    sequence.release()
    return np.array(logits), np.concatenate(experts, axis=1)


def check_tables(residency: Residency) -> None:
    """The invariant: pointers, tables and bytes agree, and nothing else is marked resident."""
    state = residency.state
    for layer, tensors in enumerate(residency.experts):
        for expert in range(state.slot_of.shape[1]):
            slot = int(state.slot_of[layer, expert])
            if slot >= 0:
                assert state.expert_of[slot] == expert
                assert np.array_equal(state.expert_ptr[layer, expert], state.slot_ptr[slot])
            else:
                assert np.array_equal(state.expert_ptr[layer, expert], state.home_ptr[layer, expert])
            for part, tensor in enumerate(tensors.parts):
                size = tensors.part_bytes[part]
                held = ctypes.string_at(int(state.expert_ptr[layer, expert, part]), size)
                assert held == tensor.expert(expert).data.tobytes()
    taken = state.expert_of[state.expert_of >= 0]
    assert len(taken) == np.count_nonzero(state.slot_of >= 0)


@pytest.mark.parametrize(("name", "percent"), [("all", 100), ("lru", 10), ("lru", 60), ("uniform", 30), ("spark", 45)])
def test_tables_and_bytes_agree_after_serving(model: Path, name: str, percent: float) -> None:
    loaded = loaded_for(model, name, percent)
    decode(loaded, RNG.integers(0, 301, 90).astype(np.int32), 60)
    check_tables(loaded.residency)
    assert loaded.residency.arena_bytes <= loaded.residency.experts_bytes * percent / 100
    loaded.close()


@pytest.mark.parametrize(("name", "percent"), [("lru", 10), ("lru", 30), ("lru", 60), ("uniform", 30), ("spark", 60)])
def test_engine_counts_what_the_simulator_counts(model: Path, name: str, percent: float) -> None:
    loaded = loaded_for(model, name, percent)
    tokens = RNG.integers(0, 301, 120).astype(np.int32)
    _, experts = decode(loaded, tokens, 70)
    trace = RoutingTrace(
        experts=experts.swapaxes(0, 1).astype(np.uint16),
        layers=(0, 1, 2),
        generated=np.arange(120) >= 70,
        session=np.zeros(120, np.int32),
        session_ids=("s",),
        position=np.arange(120, dtype=np.int32),
        model_id="0" * 64,
        n_expert=11,
    )
    found = simulate.simulate(trace, loaded.shares.placement, loaded.shares.rule, chunk_tokens=37)
    assert np.array_equal(found.hits, loaded.residency.state.hits)
    assert np.array_equal(found.misses, loaded.residency.state.misses)
    assert found.misses.sum() > 0
    loaded.close()


@pytest.mark.parametrize("rung", policies.POLICIES, ids=policies.NAMES)
@pytest.mark.parametrize(("percent", "cache_fraction", "memory"), [(35.0, 1.0, 3), (60.0, 0.5, 5), (60.0, 0.0, 4)])
def test_engine_and_validation_decide_alike_under_every_policy(
    model: Path, tmp_path: Path, rung: policies.Policy, percent: float, cache_fraction: float, memory: int
) -> None:
    """What `spark validate` replays of a policy is what the engine did: contents, rule, hits, misses, last slots."""
    rng = np.random.default_rng(round(percent) + memory)
    counts = rng.integers(1, 50, (3, 11)).astype(np.int64)
    choices = (Choice(percent, cache_fraction, memory, 1.0, 0.9, 1.1, 2.0, 3.0, 1000, 7),)
    profile = Profile(counts, 5, choices=choices)
    save_profile(profile, tmp_path / "p.csv")
    loaded = loaded_for(model, rung.name, percent, profile=tmp_path / "p.csv")
    placed = ladder_of.place(rung, counts, profile, loaded.shares.placement.expert_bytes, 5, percent)
    assert (placed.placement, placed.rule) == (loaded.shares.placement, loaded.shares.rule)
    tokens = rng.integers(0, 301, 90).astype(np.int32)
    _, experts = decode(loaded, tokens, 50)
    trace = RoutingTrace(
        experts=experts.swapaxes(0, 1).astype(np.uint16), layers=(0, 1, 2), generated=np.arange(90) >= 50,
        session=np.zeros(90, np.int32), session_ids=("s",), position=np.arange(90, dtype=np.int32),
        model_id="0" * 64, n_expert=11,
    )  # fmt: skip
    found = simulate.simulate(trace, placed.placement, placed.rule, chunk_tokens=37)
    state, twin = loaded.residency.state, policy.SlotState.empty(placed.placement.slots_per_layer, 11)
    assert np.array_equal(found.hits, state.hits) and np.array_equal(found.misses, state.misses)
    assert (found.misses.sum() == 0) == rung.whole
    policy.fill(twin, placed.placement)
    for layer in range(3):
        for start, end in [(0, 37), (37, 50), *((i, i + 1) for i in range(50, 90))]:
            policy.advance(twin, layer, experts[layer, start:end], trace.generated[start:end], placed.rule)
    for name in ("expert_of", "slot_of", "heat", "pinned", "clock", "counts"):
        assert np.array_equal(getattr(twin, name), getattr(state, name)), name
    loaded.close()


def follower(model: Path, tmp_path: Path, memory: int) -> tuple[Loaded, np.ndarray]:
    """An engine that has served, with pinned and cache slots; and counts that swap the roles of some of them.

    In each layer the hottest expert of a cache slot earns the place of the pinned one that is counted least.
    """
    counts = np.random.default_rng(3).integers(10, 50, (3, 11)).astype(np.int64)
    choices = (Choice(60.0, 0.5, memory, 1.0, 0.9, 1.1, 2.0, 3.0, 1000, 7),)
    save_profile(Profile(counts, 5, choices=choices), tmp_path / "p.csv")
    loaded = loaded_for(model, "spark", 60, profile=tmp_path / "p.csv")
    decode(loaded, np.random.default_rng(4).integers(0, 301, 80).astype(np.int32), 40)
    state, wanted = loaded.residency.state, np.zeros((3, 11), np.int64)
    for layer in range(3):
        slots = np.arange(state.slots(layer).start, state.slots(layer).stop)
        pinned = state.expert_of[slots[state.pinned[slots] == 1]]
        cached = state.expert_of[slots[state.pinned[slots] == 0]]
        wanted[layer, pinned] = 100 + np.arange(pinned.size)
        wanted[layer, cached[np.argmax(state.heat[layer, cached])]] = 1000
    return loaded, wanted


@pytest.mark.parametrize("memory", [0, 6])
def test_slots_that_swap_roles_keep_what_was_learned_of_their_experts(model: Path, tmp_path: Path, memory: int) -> None:
    loaded, wanted = follower(model, tmp_path, memory)
    residency, state = loaded.residency, loaded.residency.state
    before, addresses = copy.deepcopy(state), state.expert_ptr.copy()
    assert residency.follow(wanted) == 3
    swapped = np.flatnonzero(before.pinned != state.pinned)
    assert len(swapped) == 6  # of each layer one that was pinned, one that is
    for name in set(policy.SlotState.__slots__) - {"pinned"}:
        assert np.array_equal(getattr(before, name), getattr(state, name)), name
    assert np.array_equal(addresses, state.expert_ptr)
    check_tables(residency)
    # The steps after decide as the page says of that state: who was unpinned competes with the heat that it has.
    twin = copy.deepcopy(before)
    twin.pinned[swapped] ^= 1
    tokens = np.random.default_rng(5).integers(0, 301, 60).astype(np.int32)
    _, experts = decode(loaded, tokens, 20)
    for layer in range(3):
        for start, end in [(0, 20), *((i, i + 1) for i in range(20, 60))]:
            counted = np.full(end - start, start >= 20)
            policy.advance(twin, layer, experts[layer, start:end], counted, loaded.shares.rule)
    for name in policy.SlotState.__slots__:
        assert np.array_equal(getattr(twin, name), getattr(state, name)), name
    assert (state.expert_of != before.expert_of).any()
    loaded.close()


def test_an_expert_that_was_unpinned_is_given_up_by_its_heat_and_one_that_was_pinned_never(
    model: Path, tmp_path: Path
) -> None:
    loaded, wanted = follower(model, tmp_path, 6)
    residency, state, layer = loaded.residency, loaded.residency.state, 0
    pinned_before = set(state.expert_of[np.flatnonzero(state.pinned)][: state.slots(0).stop].tolist())
    residency.follow(wanted)
    span = state.slots(layer)
    held, pinned = state.expert_of[span].copy(), state.pinned[span] == 1
    (unpinned,) = (e for e in held[~pinned] if wanted[layer, e] == 100)
    entered = int(np.argmax(wanted[layer]))
    assert unpinned in pinned_before and entered in held[pinned]
    others = [int(e) for e in held[~pinned] if e != unpinned]
    assert others
    state.heat[layer, others], state.heat[layer, unpinned] = 1 << 24, 1 << 25
    state.heat[layer, entered] = -1  # pinned: cold as it may be, it stays
    outside = [e for e in range(11) if e not in held]
    state.heat[layer, outside] = 1 << 26
    newcomers = outside[: len(others)]
    for expert in newcomers:  # the colder ones go first
        policy.advance(state, layer, np.array([[expert]]), np.ones(1, bool), loaded.shares.rule)
        assert state.slot_of[layer, unpinned] >= 0
    assert not (state.slot_of[layer, others] >= 0).any() and (state.slot_of[layer, newcomers] >= 0).all()
    state.heat[layer, newcomers] = 1 << 27
    policy.advance(state, layer, np.array([[outside[-1]]]), np.ones(1, bool), loaded.shares.rule)
    assert state.slot_of[layer, unpinned] < 0 <= state.slot_of[layer, entered]
    loaded.close()


def test_pinned_slots_follow_the_counts_and_no_token_changes(model: Path, tmp_path: Path) -> None:
    counts = RNG.integers(1, 50, (3, 11)).astype(np.int64)
    profile = tmp_path / "p.csv"
    model_id = loaded_for(model, "all", 100).source.file.model_id
    save_profile(Profile(counts=counts, n_expert_used=5, model_id=model_id), profile)
    full, part = loaded_for(model, "all", 100), loaded_for(model, "spark", 60, profile=profile, cache_slots=2)
    tokens = RNG.integers(0, 301, 80).astype(np.int32)
    expected, _ = decode(full, tokens, 50)
    assert np.array_equal(expected, decode(part, tokens, 50)[0])
    before = [part.residency.state.expert_of[part.residency.state.slots(y)].copy() for y in range(3)]
    arena = part.residency._memory.ctypes.data
    moved = part.residency.follow(counts[:, ::-1] * 100)
    after = [part.residency.state.expert_of[part.residency.state.slots(y)].copy() for y in range(3)]
    assert moved > 0
    assert any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert part.residency._memory.ctypes.data == arena
    check_tables(part.residency)
    # The new pinned set is what the counts ask for.
    for layer in range(3):
        span = part.residency.state.slots(layer)
        pinned = part.residency.state.expert_of[span][part.residency.state.pinned[span] == 1]
        best = np.argsort(-counts[layer, ::-1], kind="stable")[: len(pinned)]
        assert counts[layer, ::-1][pinned].sum() >= 0.8 * counts[layer, ::-1][best].sum()
    assert np.array_equal(expected, decode(part, tokens, 50)[0])
    check_tables(part.residency)


@pytest.mark.parametrize("rung", policies.POLICIES, ids=policies.NAMES)
def test_pinned_slots_follow_between_requests_where_the_record_says_so(
    model: Path, tmp_path: Path, rung: policies.Policy
) -> None:
    counts = np.tile(np.arange(11, 0, -1), (3, 1)).astype(np.int64)  # flat: a request's own counts outweigh it
    choices = (Choice(50.0, 0.3, 6, 1.0, 0.9, 1.1, 2.0, 3.0, 1000, 7),)
    save_profile(Profile(counts, 5, tokens=10, choices=choices), tmp_path / "p.csv")
    engine = Engine(EngineConfig(
        model=model, device="cpu", threads=2, ctx_tokens=200, chunk_tokens=32, policy=rung.name, residency_pct=50,
        profile=tmp_path / "p.csv",
    ))  # fmt: skip
    state, seen = engine.loaded.residency.state, []
    for number in range(3):
        engine.submit(Generate(number + 1, tuple(range(7, 60)), 30, stop_tokens=()))
        while engine.busy:
            engine.step()
        seen.append([sorted(state.expert_of[s][state.pinned[s] == 1].tolist()) for s in map(state.slots, range(3))])
    assert (seen[0] != seen[-1]) == rung.follows
    engine.close()


def test_empty_slots_are_poisoned_until_an_expert_enters(model: Path) -> None:
    loaded = loaded_for(model, "lru", 30)
    state = loaded.residency.state
    assert all(ctypes.string_at(int(p), 16) == b"\xff" * 16 for p in state.slot_ptr[:, 0])
    decode(loaded, RNG.integers(0, 301, 40).astype(np.int32), 30)
    filled = [ctypes.string_at(int(p), 16) != b"\xff" * 16 for p in state.slot_ptr[:, 0]]
    assert filled == (state.expert_of >= 0).tolist()
    assert any(filled)
    check_tables(loaded.residency)


def test_one_formula_sizes_the_plan_and_the_arena(model: Path) -> None:
    loaded = loaded_for(model, "spark", 37)
    assert isinstance(loaded.shares.placement, Placement)
    assert loaded.shares.placement.bytes == loaded.residency.arena_bytes == loaded.plan()["slots_bytes"]
    assert policy.SlotState.empty(loaded.shares.placement.slots_per_layer, 11).expert_of.size == len(
        loaded.residency.state.expert_of
    )
