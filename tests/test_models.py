"""Whole models against `transformers`, against float64 loops, and backend against backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType
from tiny_models import everything, float_logits, k_quant_mix, nmse, read_weights, transformers_logits, write_tiny

from engine import models
from engine.config import EngineConfig
from engine.errors import ModelFormatError, UnsupportedModelError
from engine.runner import Runner, Span

TOKENS = np.random.default_rng(7).integers(0, 301, 83).astype(np.int32)


def run(runner: Runner, tokens: np.ndarray, chunks: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] and experts [L, T, A] of tokens fed in chunks of the given sizes."""
    sequence, start, logits, experts = runner.new_sequence(), 0, [], []
    for n in chunks:
        part = tokens[start : start + n]
        result = runner.run([Span(sequence, part, np.ones(len(part), bool), tuple(range(len(part))))])
        logits.append(result.logits.copy())
        experts.append(result.experts.copy())
        start += n
    sequence.release()
    return np.concatenate(logits), np.concatenate(experts, axis=1)


def runner_for(path: Path, device: str, **options) -> Runner:
    return Runner(EngineConfig(model=path, device=device, threads=2, ctx_tokens=130, chunk_tokens=57, **options))


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("arch", models.known())
def test_float_model_equals_transformers(tmp_path: Path, device: str, arch: str) -> None:
    module = models.find(arch)
    path = write_tiny(tmp_path / "tiny.gguf", everything(QType.F32), arch=module)
    runner = runner_for(path, device)
    tokens = TOKENS if device == "cpu" else TOKENS[:21]
    logits, _ = run(runner, tokens, [29, len(tokens) - 29] if device == "cpu" else [13, 8])
    oracle = transformers_logits(runner.config, read_weights(path), tokens)
    assert nmse(logits, oracle) < 1e-6
    own_oracle, _ = float_logits(runner.config, read_weights(path), tokens)
    assert nmse(own_oracle, oracle) < 1e-12
    runner.close()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_cpu_equals_the_twin_bit_for_bit(tmp_path: Path, kv_type: str) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", k_quant_mix)
    cpu, twin = (runner_for(path, device, kv_type=kv_type) for device in ("cpu", "reference"))
    logits, experts = run(cpu, TOKENS[:70], [57, 1, 12])
    twin_logits, twin_experts = run(twin, TOKENS[:70], [57, 1, 12])
    assert np.array_equal(experts, twin_experts)
    assert np.array_equal(logits.view(np.uint32), twin_logits.view(np.uint32))
    for name in ("slot_of", "expert_of", "score", "clock", "counts", "hits", "misses"):
        assert np.array_equal(getattr(cpu.residency.state, name), getattr(twin.residency.state, name)), name


def test_quantized_model_is_near_its_dequantized_float_model(tmp_path: Path, record_property) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", k_quant_mix)
    runner = runner_for(path, "cpu")
    logits, experts = run(runner, TOKENS, [57, 26])
    oracle, _ = float_logits(runner.config, read_weights(path), TOKENS, imposed=experts)
    assert nmse(logits, oracle) < 1e-3
    _, free = float_logits(runner.config, read_weights(path), TOKENS)
    same = np.mean([len(set(a) & set(b)) / len(a) for a, b in zip(
        experts.reshape(-1, experts.shape[2]), free.reshape(-1, free.shape[2]), strict=True)])  # fmt: skip
    record_property("routing_agreement", float(same))
    assert same > 0.8  # reported apart: a random router has near ties, so it is no measure of the arithmetic


def test_chunks_and_block_order_change_no_bit(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", k_quant_mix)
    runner = runner_for(path, "cpu")
    whole, _ = run(runner, TOKENS, [57, 26])
    single, _ = run(runner, TOKENS, [1] * 83)
    runner.kv.pool._free.reverse()  # other physical blocks
    shuffled, _ = run(runner, TOKENS, [5, 52, 1, 25])
    assert np.array_equal(whole, single)
    assert np.array_equal(whole, shuffled)


def test_sequences_in_one_step_do_not_touch_each_other(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", k_quant_mix)
    runner = runner_for(path, "cpu")
    alone, _ = run(runner, TOKENS[:19], [18, 1])
    a, b = runner.new_sequence(), runner.new_sequence()
    counted = np.ones(18, bool)
    runner.run([Span(b, TOKENS[40:58], counted)])
    runner.run([Span(a, TOKENS[:18], counted)])
    both = runner.run(
        [Span(b, TOKENS[58:63], counted[:5], (4,)), Span(a, TOKENS[18:19], counted[:1], (0,))]
    ).logits.copy()
    assert np.array_equal(both[1], alone[18])


@pytest.mark.parametrize("policy", ["lru", "uniform"])
@pytest.mark.parametrize("percent", [10, 30, 60])
def test_residency_changes_no_bit(tmp_path: Path, policy: str, percent: int) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", k_quant_mix)
    full, _ = run(runner_for(path, "cpu"), TOKENS, [57, 20, 1, 1, 1, 1, 1, 1])
    part = runner_for(path, "cpu", policy=policy, residency_pct=percent, poison=True)
    assert np.array_equal(full, run(part, TOKENS, [57, 20, 1, 1, 1, 1, 1, 1])[0])
    assert part.residency.state.misses.sum() > 0
    assert part.residency.arena_bytes <= part.residency.experts_bytes * percent / 100


def test_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match="qwen3moe"):
        models.find("os.path")


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    from gguf_files import write_gguf

    config, tensors = models.find("qwen3moe").tiny(np.random.default_rng(1))
    metadata = {"general.architecture": "qwen3moe", **config.metadata()}
    broken = dict(tensors)
    del broken["blk.1.attn_k_norm.weight"]
    write_gguf(tmp_path / "a.gguf", metadata, broken)
    with pytest.raises(ModelFormatError, match=r"blk\.1\.attn_k_norm\.weight"):
        Runner(EngineConfig(model=tmp_path / "a.gguf", device="reference"))
    wrong = tensors | {"blk.2.attn_q.weight": tensors["blk.2.attn_k.weight"]}
    write_gguf(tmp_path / "b.gguf", metadata, wrong)
    with pytest.raises(ModelFormatError, match=r"blk\.2\.attn_q\.weight"):
        Runner(EngineConfig(model=tmp_path / "b.gguf", device="reference"))
    extra = tensors | {"blk.0.attn_q.bias": np.ones(config.n_head * config.head_dim, np.float32)}
    write_gguf(tmp_path / "c.gguf", metadata, extra)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q\.bias"):
        Runner(EngineConfig(model=tmp_path / "c.gguf", device="reference"))
