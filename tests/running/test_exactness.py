"""The promise: on held-out prompts of the reference model no policy and no residency changes a token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.formats.profile import Profile
from engine.formats.profile import save as save_profile
from engine.ground.config import EngineConfig
from engine.ground.protocol import Done, Event, Generate, Tokens
from engine.ground.sampling import Sampling
from engine.running.loaded import load
from engine.running.stepping import Span
from engine.serving.scheduler import Engine
from spark.extract import ExtractOptions, extract
from spark.pipeline.tokens import read_tokens, tokenize
from tests.tiny_models import float_logits, nmse, read_weights

ROOT = Path(__file__).parents[2]
NANO = ROOT / "data" / "nano" / "nano.gguf"
N_PROMPTS, N_TOKENS = 3, 12


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """Beginnings of held-out sessions, of different lengths, each ending where the model would speak."""
    folder = tmp_path_factory.mktemp("held-out")
    samples = ROOT / "data" / "sessions"
    extract(ExtractOptions(folder, "both", samples / "claude", samples / "codex", 0.3), lambda a, b: None)
    tokenize(NANO, folder / "test.jsonl", folder / "test.parquet", 1024)
    found: dict[str, tuple[int, ...]] = {}
    for window in read_tokens(folder / "test.parquet"):
        begins = np.flatnonzero(np.diff(window.generated.astype(np.int8)) == 1) + 1
        if window.session_id not in found and begins.size:
            end = int(begins[len(found) % begins.size])
            found[window.session_id] = tuple(window.tokens[max(0, end - 300 + 70 * len(found)) : end].tolist())
        if len(found) == N_PROMPTS:
            break
    assert len({len(p) for p in found.values()}) > 1
    return list(found.values())


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A skewed profile: placements that it makes differ from layer to layer."""
    path = tmp_path_factory.mktemp("profile") / "p.csv"
    counts = np.random.default_rng(3).pareto(1.0, (6, 32)) * 1000
    save_profile(Profile(counts.astype(np.int64), n_expert_used=4), path)
    return path


def generate(engine: Engine, prompts: list[tuple[int, ...]]) -> tuple[list[list[int]], int]:
    """What the engine generates, greedily and sampled, and how many experts it missed."""
    events: list[Event] = []
    for i, prompt in enumerate(prompts):
        engine.submit(Generate(2 * i, prompt, N_TOKENS, stop_tokens=()))
        engine.submit(Generate(2 * i + 1, prompt, N_TOKENS, Sampling(temperature=0.9, top_p=0.95, seed=i), ()))
    while engine.busy:
        events += engine.step()
    misses = sum(e.residency["misses"] for e in events if isinstance(e, Done))
    made = [
        [t for e in events if isinstance(e, Tokens) and e.id == request for t in e.tokens]
        for request in range(2 * len(prompts))
    ]
    assert all(len(tokens) == N_TOKENS for tokens in made)
    return made, misses


def config(**options) -> EngineConfig:
    return EngineConfig(model=NANO, device="cpu", threads=2, ctx_tokens=512, chunk_tokens=128, poison=True, **options)


@pytest.fixture(scope="module")
def expected(prompts: list[tuple[int, ...]]) -> list[list[int]]:
    engine = Engine(config())
    made, misses = generate(engine, prompts)
    engine.close()
    assert misses == 0
    assert len({tuple(tokens) for tokens in made}) >= N_PROMPTS
    return made


@pytest.mark.parametrize("policy", ["uniform", "static", "lru", "spark"])
@pytest.mark.parametrize("percent", [10, 30, 60])
def test_no_residency_changes_a_token(
    prompts: list[tuple[int, ...]], profile: Path, expected: list[list[int]], policy: str, percent: float
) -> None:
    given = profile if policy in ("static", "spark") else None
    engine = Engine(config(policy=policy, residency_pct=percent, profile=given))
    made, misses = generate(engine, prompts)
    assert made == expected
    assert misses > 0
    assert engine.loaded.residency.arena_bytes <= engine.loaded.residency.experts_bytes * percent / 100
    engine.close()


@pytest.mark.slow
def test_the_reference_model_is_near_its_dequantized_float_model(record_property) -> None:
    tokens = np.random.default_rng(4).integers(0, 6000, 33).astype(np.int32)
    loaded = load(config())
    result = loaded.steps.run([Span(loaded.kv.sequence(), tokens, np.ones(33, bool), tuple(range(33)))])
    weights = read_weights(NANO)
    oracle, _ = float_logits(loaded.source.config, weights, tokens, imposed=result.experts)
    assert nmse(result.logits, oracle) < 1e-3
    _, free = float_logits(loaded.source.config, weights, tokens)
    agreement = np.mean([
        len(set(a) & set(b)) / 4
        for a, b in zip(result.experts.reshape(-1, 4), free.reshape(-1, 4), strict=True)
    ])  # fmt: skip
    record_property("nmse", nmse(result.logits, oracle))
    record_property("routing_agreement", float(agreement))
    assert agreement > 0.95
    loaded.close()
