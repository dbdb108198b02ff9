"""Slots and their bytes: what the tables say is what lies in memory, and no token ever changes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from tiny_models import k_quant_mix, write_tiny

from engine import policy, simulate
from engine.config import EngineConfig
from engine.placement import Placement
from engine.profile import Profile
from engine.profile import save as save_profile
from engine.residency import Residency
from engine.runner import Runner, Span
from engine.trace import RoutingTrace

RNG = np.random.default_rng(11)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", k_quant_mix)


def runner_for(model: Path, policy_name: str, percent: float, **options) -> Runner:
    config = EngineConfig(
        model=model, device="cpu", threads=2, ctx_tokens=300, chunk_tokens=37, policy=policy_name,
        residency_pct=percent, poison=True, **options,
    )  # fmt: skip
    return Runner(config)


def decode(runner: Runner, tokens: np.ndarray, n_prompt: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T - n_prompt, V] of single-token steps after a prefilled prompt; experts [L, T, A] of all."""
    sequence, logits, experts = runner.new_sequence(), [], []
    for start in range(0, n_prompt, 37):
        part = tokens[start : min(start + 37, n_prompt)]
        experts.append(runner.run([Span(sequence, part, np.zeros(len(part), bool))]).experts.copy())
    for token in tokens[n_prompt:]:
        result = runner.run([Span(sequence, np.array([token], np.int32), np.ones(1, bool), (0,))])
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
    runner = runner_for(model, name, percent)
    decode(runner, RNG.integers(0, 301, 90).astype(np.int32), 60)
    check_tables(runner.residency)
    assert runner.residency.arena_bytes <= runner.residency.experts_bytes * percent / 100
    runner.close()


@pytest.mark.parametrize(("name", "percent"), [("lru", 10), ("lru", 30), ("lru", 60), ("uniform", 30), ("spark", 60)])
def test_engine_counts_what_the_simulator_counts(model: Path, name: str, percent: float) -> None:
    runner = runner_for(model, name, percent)
    tokens = RNG.integers(0, 301, 120).astype(np.int32)
    _, experts = decode(runner, tokens, 70)
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
    found = simulate.simulate(trace, runner.placement, runner.rule, chunk_tokens=37)
    assert np.array_equal(found.hits, runner.residency.state.hits)
    assert np.array_equal(found.misses, runner.residency.state.misses)
    assert found.misses.sum() > 0
    runner.close()


def test_pinned_slots_follow_the_counts_and_no_token_changes(model: Path, tmp_path: Path) -> None:
    counts = RNG.integers(1, 50, (3, 11)).astype(np.int64)
    profile = tmp_path / "p.csv"
    model_id = runner_for(model, "all", 100).file.model_id
    save_profile(Profile(counts=counts, n_expert_used=5, model_id=model_id), profile)
    full, part = runner_for(model, "all", 100), runner_for(model, "spark", 60, profile=profile, cache_slots=2)
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


def test_empty_slots_are_poisoned_until_an_expert_enters(model: Path) -> None:
    runner = runner_for(model, "lru", 30)
    state = runner.residency.state
    assert all(ctypes.string_at(int(p), 16) == b"\xff" * 16 for p in state.slot_ptr[:, 0])
    decode(runner, RNG.integers(0, 301, 40).astype(np.int32), 30)
    filled = [ctypes.string_at(int(p), 16) != b"\xff" * 16 for p in state.slot_ptr[:, 0]]
    assert filled == (state.expert_of >= 0).tolist()
    assert any(filled)
    check_tables(runner.residency)


def test_one_formula_sizes_the_plan_and_the_arena(model: Path) -> None:
    runner = runner_for(model, "spark", 37)
    assert isinstance(runner.placement, Placement)
    assert runner.placement.bytes == runner.residency.arena_bytes == runner.plan()["slots_bytes"]
    assert policy.SlotState.empty(runner.placement.slots_per_layer, 11).expert_of.size == len(
        runner.residency.state.expert_of
    )
