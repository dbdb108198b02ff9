"""Whole models against `transformers` and against the twins, and what must change no bit of them."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine import models
from engine.formats.gguf import open_model
from engine.ground.config import EngineConfig
from engine.ground.errors import ModelFormatError, SparkError, UnsupportedModelError
from engine.running.loaded import Loaded, load
from engine.running.stepping import Span
from tests.gguf_files import write_gguf
from tests.tiny_models import (
    ALL_F32,
    BLOCK_TYPES,
    MODELS,
    SMALL,
    everything,
    float_logits,
    nmse,
    random_path,
    read_weights,
    tiny,
    tiny_path,
    transformers_choices,
    transformers_logits,
)

NVFP4 = everything(QType.NVFP4)
TOKENS = np.random.default_rng(7).integers(0, 301, 121).astype(np.int32)
MIXTURES = [name for name in models.known() if name != "qwen35"]


def run(loaded: Loaded, tokens: np.ndarray, chunks: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] and experts [L, T, A] of tokens fed in chunks of the given sizes."""
    assert sum(chunks) == len(tokens)
    sequence, start, logits, experts = loaded.kv.sequence(), 0, [], []
    for n in chunks:
        part = tokens[start : start + n]
        result = loaded.steps.run([Span(sequence, part, np.ones(len(part), bool), tuple(range(len(part))))])
        logits.append(result.logits.copy())
        experts.append(result.experts.copy())
        start += n
    sequence.release()
    return np.concatenate(logits), np.concatenate(experts, axis=1)


def loaded_for(path: Path, device: str, **options: Any) -> Loaded:
    return load(EngineConfig(model=path, device=device, threads=2, ctx_tokens=130, chunk_tokens=57, **options))


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_float_model_equals_transformers(name: str) -> None:
    """Longer than every window and a block of the cache; the last tokens are decoded one by one."""
    path = tiny_path(name, ALL_F32)
    loaded = loaded_for(path, "cpu")
    logits, experts = run(loaded, TOKENS, [29, 57, 23] + [1] * 12)
    oracle, chosen = transformers_choices(loaded.source.config, read_weights(path), TOKENS)
    assert nmse(logits, oracle) < 1e-6
    if experts.size:
        assert np.mean(np.sort(experts) == np.sort(chosen)) > 0.995  # a random router has near ties
    loaded.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", models.known())
def test_the_twin_of_a_float_model_equals_transformers(name: str) -> None:
    path = tiny_path(name, ALL_F32, small=True)
    loaded = loaded_for(path, "reference")
    logits, _ = run(loaded, TOKENS[:21], [15, 5, 1])
    assert nmse(logits, transformers_logits(loaded.source.config, read_weights(path), TOKENS[:21])) < 1e-6
    loaded.close()


def test_the_oracle_equals_float64_loops() -> None:
    path = tiny_path("qwen3moe", ALL_F32)
    with open_model(path) as file:
        config = models.find("qwen3moe").Config.from_gguf(file)
    weights = read_weights(path)
    own, _ = float_logits(config, weights, TOKENS[:40])
    assert nmse(own, transformers_logits(config, weights, TOKENS[:40])) < 1e-12


@pytest.mark.parametrize(
    ("name", "kv_type"),
    [*((name, "f16") for name in (*models.known(), "gemma4-ragged")), ("qwen3moe", "q8_0"), ("laguna", "q8_0,q4_0")],
)
def test_cpu_equals_the_twin_bit_for_bit(name: str, kv_type: str) -> None:
    cpu, twin = (loaded_for(tiny_path(name), device, kv_type=kv_type) for device in ("cpu", "reference"))
    chunks = [57, 1, 12] if name == "qwen3moe" else [19, 1, 6]
    logits, experts = run(cpu, TOKENS[: sum(chunks)], chunks)
    twin_logits, twin_experts = run(twin, TOKENS[: sum(chunks)], chunks)
    assert np.array_equal(experts, twin_experts)
    assert np.array_equal(bits(logits), bits(twin_logits))
    for field in ("slot_of", "expert_of", "heat", "clock", "counts", "hits", "misses"):
        assert np.array_equal(getattr(cpu.residency.state, field), getattr(twin.residency.state, field)), field


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_quantized_model_is_near_its_dequantized_float_model(name: str, record_property: Any) -> None:
    path = tiny_path(name, small=True)
    loaded = loaded_for(path, "cpu")
    logits, experts = run(loaded, TOKENS[:83], [57, 26])
    oracle, free = transformers_choices(loaded.source.config, read_weights(path), TOKENS[:83], imposed=experts)
    # Activations have 8 bits: the more quantized products follow one another, the more noise, and gates multiply it.
    assert nmse(logits, oracle) < (1e-3 if name == "qwen3moe" else 3e-3)
    if not experts.size:
        return
    same = np.mean([len(set(a) & set(b)) / len(a) for a, b in zip(
        experts.reshape(-1, experts.shape[2]), free.reshape(-1, free.shape[2]), strict=True)])  # fmt: skip
    record_property("routing_agreement", float(same))
    assert same > 0.8  # reported apart: a random router has near ties, so it is no measure of the arithmetic


OF_NVFP4 = [name for name in MODELS if name != "gemma4-ragged"]  # whose rows of 352 are not whole blocks of 64


@pytest.mark.parametrize("name", [n if n == "qwen3moe" else pytest.param(n, marks=pytest.mark.slow) for n in OF_NVFP4])
def test_factors_beside_a_matrix_multiply_its_products(name: str) -> None:
    """NVFP4 as converters write it: a factor for each matrix and expert, and an input's, which changes nothing."""
    path = tiny_path(name, NVFP4, small=True)
    loaded = loaded_for(path, "cpu")
    logits, experts = run(loaded, TOKENS[:40], [30, 1, 9])
    oracle, _ = transformers_choices(loaded.source.config, read_weights(path), TOKENS[:40], imposed=experts)
    assert nmse(logits, oracle) < 3e-3
    twin, _ = run(loaded_for(path, "reference"), TOKENS[:9], [6, 1, 2])
    assert np.array_equal(bits(logits[:9]), bits(twin))


def test_a_factor_is_of_an_nvfp4_matrix_and_of_its_shape(tmp_path: Path) -> None:
    config, tensors = tiny("qwen3moe", 1)
    metadata, key = {"general.architecture": "qwen3moe", **config.metadata()}, "blk.1.ffn_up_exps"
    one, each = np.ones(1, np.float32), np.ones(config.n_expert, np.float32)
    assert f"{key}.scale is not part of qwen3moe" in str(refused(tmp_path, metadata, tensors | {f"{key}.scale": each}))
    stacked = tensors | {f"{key}.weight": (tensors[f"{key}.weight"], QType.NVFP4)}
    error = refused(tmp_path, metadata, stacked | {f"{key}.scale": one})
    assert f"{key}.scale has shape (1,), the metadata asks for (11,)" in str(error)
    table = tensors | {"token_embd.weight": (tensors["token_embd.weight"], QType.NVFP4)}
    assert "token_embd.scale is not part" in str(refused(tmp_path, metadata, table | {"token_embd.scale": one}))


@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_block_order_change_no_bit(name: str) -> None:
    loaded = loaded_for(tiny_path(name, small=True), "cpu")
    whole, _ = run(loaded, TOKENS, [57, 57, 7])
    single, _ = run(loaded, TOKENS, [1] * 121)
    for pool in loaded.kv.pools:
        pool._free.reverse()  # other physical blocks
    shuffled, _ = run(loaded, TOKENS, [5, 52, 1, 25, 33, 5])
    assert np.array_equal(bits(whole), bits(single))
    assert np.array_equal(bits(whole), bits(shuffled))


@pytest.mark.parametrize("name", models.known())
def test_sequences_in_one_step_do_not_touch_each_other(name: str) -> None:
    loaded = loaded_for(tiny_path(name, small=True), "cpu")
    alone, _ = run(loaded, TOKENS[:19], [18, 1])
    a, b = loaded.kv.sequence(), loaded.kv.sequence()
    counted = np.ones(18, bool)
    loaded.steps.run([Span(b, TOKENS[40:58], counted)])
    loaded.steps.run([Span(a, TOKENS[:18], counted)])
    both = loaded.steps.run(
        [Span(b, TOKENS[58:63], counted[:5], (4,)), Span(a, TOKENS[18:19], counted[:1], (0,))]
    ).logits.copy()
    assert np.array_equal(bits(both[1]), bits(alone[18]))


@cache
def logits_of_all_resident(name: str) -> np.ndarray:
    """What no residency may change: computed once for all of a model."""
    loaded = loaded_for(tiny_path(name, small=True), "cpu")
    logits, _ = run(loaded, TOKENS[:83], [57, 20, 1, 1, 1, 1, 1, 1])
    loaded.close()
    return logits


@pytest.mark.parametrize("percent", [10, 30, 60])
@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "lru") for name in (*MIXTURES, "qwen35moe-fused", "gemma4-ragged")), ("qwen3moe", "uniform")],
)
def test_residency_changes_no_bit(name: str, policy: str, percent: int) -> None:
    full, chunks = logits_of_all_resident(name), [57, 20, 1, 1, 1, 1, 1, 1]
    part = loaded_for(tiny_path(name, small=True), "cpu", policy=policy, residency_pct=percent, poison=True)
    assert np.array_equal(bits(full), bits(run(part, TOKENS[:83], chunks)[0]))
    assert part.residency.state.misses.sum() > 0
    assert part.residency.arena_bytes <= part.residency.experts_bytes * percent / 100


@pytest.mark.parametrize(
    ("name", "qtypes"),
    [
        *((name, BLOCK_TYPES) for name in models.known()),
        *(pytest.param(name, (t,), marks=pytest.mark.slow) for name in models.known() for t in BLOCK_TYPES),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(t.name for t in v) if len(v) == 1 else "all",
)
def test_no_block_type_depends_on_chunks_neighbors_or_residency(name: str, qtypes: tuple[QType, ...]) -> None:
    """All matrices of one type; and every matrix of another one, so that those of a layer and of an expert differ."""
    smaller = SMALL[name] if len(qtypes) == 1 else {}  # which has fewer matrices than there are types
    path, counted = random_path(name, qtypes, **smaller), np.ones(18, bool)
    whole = loaded_for(path, "cpu")
    expected, experts = run(whole, TOKENS[:40], [37, 1, 1, 1])
    assert np.isfinite(expected).all() and expected.std() > 0
    assert np.array_equal(bits(expected), bits(run(whole, TOKENS[:40], [1, 20, 1, 18])[0]))
    a, b = whole.kv.sequence(), whole.kv.sequence()
    both = whole.steps.run([Span(a, TOKENS[60:71], counted[:11]), Span(b, TOKENS[:18], counted, tuple(range(18)))])
    assert np.array_equal(bits(expected[:18]), bits(both.logits))
    whole.close()
    if experts.size:
        part = loaded_for(path, "cpu", policy="lru", residency_pct=30, poison=True)
        assert np.array_equal(bits(expected), bits(run(part, TOKENS[:40], [37, 1, 1, 1])[0]))
        assert part.residency.state.misses.sum() > 0
        part.close()


@pytest.mark.parametrize("name", MODELS)
def test_metadata_is_read_back(name: str) -> None:
    arch, variant = MODELS[name]
    module = models.find(arch)
    made, _ = module.tiny(np.random.default_rng(0), **variant)
    with open_model(tiny_path(name, ALL_F32)) as file:
        read = module.Config.from_gguf(file)
        assert read.tensors() == made.tensors()
    for field in dataclasses.fields(made):
        expected = getattr(made, field.name)
        if field.name not in ("rope_base_swa", "rope_dims_swa") or not variant:
            expected = pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else expected
            if field.name == "rope_factors":
                expected = pytest.approx(expected, rel=1e-6)
            assert getattr(read, field.name) == expected, field.name


def test_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"gemma4, laguna, qwen35, qwen35moe, qwen3moe") as caught:
        models.find("os.path")
    assert "CONTRIBUTING.md" in str(caught.value.hint)
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    assert "## An architecture" in text and "docs/models.md" in text


def refused(path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> SparkError:
    write_gguf(path / "model.gguf", metadata, tensors)
    with pytest.raises(SparkError) as caught:
        load(EngineConfig(model=path / "model.gguf", device="reference"))
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("arch", models.known())
def test_missing_and_misshapen_tensors_are_named(tmp_path: Path, arch: str) -> None:
    config, tensors = tiny(arch, 1)
    metadata = {"general.architecture": arch, **config.metadata()}
    layer = config.kv_groups[0].layers[0]
    broken = dict(tensors)
    del broken[f"blk.{layer}.attn_k_norm.weight"]
    error = refused(tmp_path, metadata, broken)
    assert isinstance(error, ModelFormatError) and f"blk.{layer}.attn_k_norm.weight" in str(error)
    name = f"blk.{layer}.attn_output.weight"
    error = refused(tmp_path, metadata, tensors | {name: tensors[name].T.copy()})
    assert isinstance(error, ModelFormatError) and name in str(error)
    error = refused(tmp_path, metadata, tensors | {"blk.0.attn_q.bias": np.ones(256, np.float32)})
    assert isinstance(error, UnsupportedModelError) and "blk.0.attn_q.bias" in str(error)
    for key in config.metadata():
        error = None
        if key.rsplit(".", 1)[-1] in ("block_count", "embedding_length", "context_length"):
            error = refused(tmp_path, {k: v for k, v in metadata.items() if k != key}, tensors)
            assert isinstance(error, ModelFormatError) and key in str(error)


@pytest.mark.parametrize(
    ("arch", "key", "value", "message"),
    [
        ("laguna", "rope.scaling.type", "longrope", "rope scaling 'longrope'"),
        ("laguna", "rope.scaling.attn_factor", 1.35, "laguna.rope.scaling.attn_factor is 1.35"),
        ("laguna", "rope.scaling.yarn_attn_factor", 1.35, "yarn_attn_factor 1.35 (it is 1.13863 here)"),
        ("laguna", "rope.scaling.factor", -2.0, "rope.scaling.factor is -2.0"),
        ("laguna", "rope.scaling.yarn_beta_slow", 0.0, "yarn_beta_slow is 0.0"),
        ("laguna", "rope.freq_base", 1.0, "rope.freq_base is 1.0"),
        ("laguna", "nextn_predict_layers", 6, "6 of 6 blocks"),
        ("laguna", "attention.key_length_swa", 32, "attention.key_length_swa 32 (it is 64 here)"),
        ("laguna", "expert_gating_func", 4, "expert_gating_func 4"),
        ("laguna", "expert_shared_count", 2, "several shared experts"),
        ("laguna", "attention.head_count", [20, 12], "attention.head_count"),
        ("laguna", "leading_dense_block_count", 6, "6 dense layers of 6"),
        ("qwen3moe", "rope.dimension_count", 48, "rope.dimension_count 48 (it is 96 here)"),
        ("qwen3moe", "attention.scale", 1.0, "attention.scale 1"),
        ("qwen35", "rope.scaling.type", "yarn", "rope.scaling.original_context_length"),
        ("qwen35", "full_attention_interval", 9, "every 9th is full attention"),
        ("qwen35", "attention.recurrent_layers", [True, False, True, True], "attention layers that are others"),
        ("qwen35", "ssm.inner_size", 767, "6 heads cannot share"),
        ("qwen35moe", "expert_weights_scale", 2.5, "expert_weights_scale"),
        ("qwen35moe", "expert_used_count", 14, "14 active experts of 13"),
        ("gemma4", "embedding_length_per_layer_input", 256, "per-layer input embeddings"),
        ("gemma4", "rope.dimension_count", 64, "rotate less than the whole head"),
        ("gemma4", "attention.shared_kv_layers", 5, "share caches"),
        ("gemma4", "attention.value_length", 64, "value heads of another size"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, arch: str, key: str, value: Any, message: str
) -> None:
    config, tensors = tiny(arch, 1)
    metadata = {"general.architecture": arch, **config.metadata()} | {f"{arch}.{key}": value}
    assert message in str(refused(tmp_path, metadata, tensors))


def test_what_text_does_not_need_is_skipped(tmp_path: Path) -> None:
    """Blocks that predict further tokens, and a vision encoder in the same file."""
    config, tensors = tiny("qwen35")
    metadata = {"general.architecture": "qwen35", **config.metadata()}
    metadata |= {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    last = {name.replace("blk.2.", "blk.4."): value for name, value in tensors.items() if name.startswith("blk.2.")}
    more = {"blk.4.nextn.eh_proj.weight": np.ones((256, 512)), "v.blk.0.attn_q.weight": np.ones((64, 64))}
    write_gguf(tmp_path / "more.gguf", metadata, tensors | last | {k: v.astype(np.float32) for k, v in more.items()})
    loaded = loaded_for(tmp_path / "more.gguf", "cpu")
    read = loaded.source.config
    assert read == dataclasses.replace(config, rope_base=read.rope_base, eps=read.eps)
    logits, _ = run(loaded, TOKENS[:9], [9])
    expected, _ = run(loaded_for(tiny_path("qwen35", ALL_F32), "cpu"), TOKENS[:9], [9])
    assert np.array_equal(bits(logits), bits(expected))
