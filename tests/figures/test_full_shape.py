"""The synthetic models of the benchmarks: other readers open them, and the engine computes sane numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from benchmarks.full_shape import MIXTURES, SHAPES, first_layers, mix_of, q4_k_mix, write_model
from engine.formats.gguf import open_model
from engine.ground.config import EngineConfig
from engine.models.qwen3moe import Config
from engine.running.loaded import load
from engine.running.stepping import Span
from engine.text import tokenizer

CONFIG = Config(
    n_layer=3, n_embd=512, n_head=6, n_head_kv=3, head_dim=128, n_expert=24, n_expert_used=5, n_ff_exp=256,
    n_vocab=1024, n_ctx_train=192, rope_base=1e6, eps=1e-6,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("full_shape") / "model.gguf"
    assert write_model(path, CONFIG, seed=3) == path.stat().st_size
    return path


def test_other_readers_see_the_same_model(model: Path) -> None:
    reader = gguf.GGUFReader(model)
    tensors = {t.name: t for t in reader.tensors}
    assert tensors.keys() == CONFIG.tensors().keys()
    for name, shape in CONFIG.tensors().items():
        t = tensors[name]
        assert tuple(reversed(t.shape.tolist())) == shape, name
        assert t.tensor_type == q4_k_mix(name), name
        values = gguf.dequantize(t.data, t.tensor_type).astype(np.float64)
        assert np.isfinite(values).all(), name
        if "norm" in name:
            assert abs(values.mean() - 1) < 0.05, name
        else:
            gain = 3.0 if name == "output.weight" else 0.2 if "attn_output" in name else 1.0
            std = 1.0 if name == "token_embd.weight" else gain * shape[-1] ** -0.5
            assert abs(values.std() / std - 1) < 0.05, name
            assert abs(values.mean()) < 0.05 * std, name
    assert {tensors[f"blk.{i}.ffn_down_exps.weight"].tensor_type for i in range(3)} == {QType.Q4_K, QType.Q6_K}
    own = {name: field.types for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    sizes = {name: types for name, types in own.items() if name.endswith(("_token_id", "_count"))}
    assert len(sizes) > 5  # other engines refuse an id of a token that has a sign
    assert all(types == [gguf.GGUFValueType.UINT32] for types in sizes.values()), sizes
    up = tensors["blk.1.ffn_up_exps.weight"].data
    assert len({expert.tobytes() for expert in up}) == CONFIG.n_expert


def test_the_engine_computes_sane_numbers(model: Path) -> None:
    loaded = load(EngineConfig(model=model, device="cpu", threads=2))
    tokens = np.random.default_rng(5).integers(0, CONFIG.n_vocab, 64).astype(np.int32)
    sequence = loaded.kv.sequence()
    result = loaded.steps.run([Span(sequence, tokens, np.ones(64, bool), tuple(range(0, 64, 7)))])
    logits = result.logits.astype(np.float64)
    assert np.isfinite(logits).all()
    assert 1.5 < logits.std() < 6
    assert 0.5 < np.abs(result.residual).mean() < 5
    used = np.bincount(result.experts.reshape(-1), minlength=CONFIG.n_expert)
    assert (used > 0).all(), "the routers use every expert"
    for _ in range(6):
        token = np.asarray([int(np.argmax(logits[-1]))], np.int32)
        logits = loaded.steps.run([Span(sequence, token, np.ones(1, bool), (0,))]).logits.astype(np.float64)
        assert np.isfinite(logits).all()
    loaded.close()


def test_text_goes_through_the_vocabulary(model: Path) -> None:
    with open_model(model) as file:
        loaded = tokenizer.load(file)
    text = 'def f(x): return "naïve 日本"\n'
    ids = loaded.encode(text)
    assert loaded.decode(ids) == text
    assert max(ids) < CONFIG.n_vocab - 3
    assert loaded.template is not None


# GiB of the file: near published files of about these types.
SIZES = {
    "qwen3-30b-a3b": (17.2, 17.4), "laguna-xs2": (18.5, 19.5), "qwen3.6-35b-a3b": (19.5, 21.0),
    "qwen3.6-27b": (15.0, 16.5), "gemma-4-26b-a4b": (14.0, 16.0),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_the_published_shape_has_its_size(name: str) -> None:
    _, config = SHAPES[name]
    types, n_bytes, n_weights = mix_of(config), 0, 0
    for tensor, shape in config.tensors().items():
        weights, block = gguf.GGML_QUANT_SIZES[types(tensor)]
        assert shape[-1] % weights == 0, tensor
        n_bytes += int(np.prod(shape, dtype=np.int64)) // weights * block
        n_weights += int(np.prod(shape, dtype=np.int64))
    low, high = SIZES[name]
    assert low < n_bytes / 2**30 < high, (n_bytes / 2**30, n_weights / 1e9)


# The first layers of every family, the vocabulary and what else only costs time made small.
SMALL: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"n_layer": 7, "n_embd": 512, "n_head": 4, "n_head_kv": 2, "n_expert": 12, "n_expert_used": 4},
    "laguna-xs2": {"n_layer": 5, "n_embd": 512, "n_head": (6, 8, 8, 8, 6), "n_head_kv": 2, "n_ff": 1024, "n_expert": 12,
                   "n_expert_used": 4, "window": 50},
    "qwen3.6-35b-a3b": {"n_layer": 4, "n_embd": 512, "n_head": 4, "n_head_k": 2, "n_head_v": 4, "n_expert": 12,
                        "n_expert_used": 4},
    "qwen3.6-27b": {"n_layer": 4, "n_embd": 512, "n_head": 6, "n_head_kv": 2, "n_head_k": 2, "n_head_v": 6,
                    "n_ff": 1280},
    "gemma-4-26b-a4b": {"n_layer": 6, "n_embd": 512, "n_head": 4, "n_head_kv": (2, 2, 2, 2, 2, 1), "n_ff": (608,) * 6,
                        "n_expert": 12, "n_expert_used": 4, "n_ff_exp": 352, "window": 50},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, mixture", [(name, "Q4_K_M") for name in SMALL] + [("qwen3-30b-a3b", m) for m in MIXTURES if m != "Q4_K_M"]
)
def test_every_family_computes_sane_numbers(tmp_path: Path, name: str, mixture: str) -> None:
    arch, config = SHAPES[name]
    config = replace(first_layers(config, SMALL[name]["n_layer"]), n_vocab=1024, n_ctx_train=192, **SMALL[name])
    write_model(tmp_path / "model.gguf", config, mix_of(config, MIXTURES[mixture]), arch=arch)
    with open_model(tmp_path / "model.gguf") as file:
        assert arch.Config.from_gguf(file).tensors() == config.tensors()
    loaded = load(EngineConfig(model=tmp_path / "model.gguf", device="cpu", threads=2))
    tokens = np.random.default_rng(5).integers(0, 1024, 64).astype(np.int32)
    sequence = loaded.kv.sequence()
    result = loaded.steps.run([Span(sequence, tokens, np.ones(64, bool), tuple(range(0, 64, 7)))])
    logits = result.logits.astype(np.float64)
    assert np.isfinite(logits).all()
    assert 1.5 < logits.std() < 6
    if config.n_expert:
        used = np.bincount(result.experts.reshape(-1), minlength=config.n_expert)
        assert (used > 0).all(), "the routers use every expert"
    for _ in range(6):
        token = np.asarray([int(np.argmax(logits[-1]))], np.int32)
        logits = loaded.steps.run([Span(sequence, token, np.ones(1, bool), (0,))]).logits.astype(np.float64)
        assert np.isfinite(logits).all()
    loaded.close()


def test_nothing_is_left_of_a_failed_write(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"columns|multiple|block"):
        write_model(tmp_path / "model.gguf", CONFIG, types=lambda name: QType.Q4_K)  # norms do not fit
    assert not list(tmp_path.iterdir())
