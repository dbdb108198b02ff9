"""`spark convert-drafter`: the file drafts what the checkpoint does, and a wrong checkpoint leaves none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.drafting.drafter import open_drafter
from engine.ground.errors import ModelFormatError, SparkError, UnsupportedModelError
from spark.pipeline.convert import Quantization, convert
from tests.command_line import environment, refused, spark
from tests.dflash_twin import Shape, Tensors, random_drafter, twin_logits
from tests.drafting.test_dflash import EMBEDDING, HEAD, MODEL, drafter, features, fed
from tests.tiny_models import nmse

SHAPE = Shape()
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def configuration(shape: Shape) -> dict[str, Any]:
    s = shape
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": s.n_embd, "hidden_act": "silu",
        "num_hidden_layers": s.n_layer, "num_attention_heads": s.n_head, "num_key_value_heads": s.n_head_kv,
        "head_dim": s.head_dim, "intermediate_size": s.n_ff, "rms_norm_eps": s.eps, "vocab_size": s.n_vocab,
        "max_position_embeddings": 32768, "rope_theta": s.base, "rope_scaling": None, "attention_bias": False,
        "block_size": s.block, "num_target_layers": 5, "use_sliding_window": False, "sliding_window": None,
        "dflash_config": {"mask_token_id": s.mask, "target_layer_ids": list(s.captured)},
    }  # fmt: skip


def checkpoint(
    folder: Path, shape: Shape = SHAPE, changes: dict[str, Any] | None = None, without: tuple[str, ...] = (),
    extra: Tensors | None = None, dtype: torch.dtype = torch.float32, prefix: str = "", files: int = 1,
) -> Tensors:  # fmt: skip
    """Write a random checkpoint; changes: other values of its configuration, None of which are left out."""
    folder.mkdir(exist_ok=True)
    tensors = random_drafter(shape, np.random.default_rng(11))
    named = {}
    for name, values in tensors.items():
        layer, _, part = name.partition(".")
        full = f"layers.{layer}.{NAMES[part]}" if part else name
        named[f"{prefix}{full}.weight"] = torch.from_numpy(values).to(dtype)
    named |= {name: torch.from_numpy(values) for name, values in (extra or {}).items()}
    named = {name: values for name, values in named.items() if name.removeprefix(prefix) not in without}
    for old in folder.glob("*.safetensors"):
        old.unlink()
    for i in range(files):
        part = dict(list(named.items())[i::files])
        save_file(part, folder / f"model-{i + 1:05}-of-{files:05}.safetensors", {"format": "pt"})
    values = configuration(shape) | (changes or {})
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return {name: torch.from_numpy(v).to(dtype).float().numpy() for name, v in tensors.items()}


def converted(tmp_path: Path, quantize: Quantization = "F32") -> Path:
    made = convert(tmp_path / "hf", tmp_path / "d.gguf", quantize, lambda done, total: None)
    assert made.n_bytes == (tmp_path / "d.gguf").stat().st_size
    return tmp_path / "d.gguf"


DFLASH = configuration(SHAPE)["dflash_config"]
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
VARIANTS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "plain": (SHAPE, {}),
    "parameters": (SHAPE, {"rope_theta": None, "rope_parameters": {"rope_theta": SHAPE.base, "rope_type": "default"}}),
    "top": (SHAPE, {"dflash_config": None, "target_layer_ids": list(SHAPE.captured), "mask_token_id": SHAPE.mask}),
    "both": (SHAPE, {"mask_token_id": SHAPE.mask, "target_layer_ids": list(SHAPE.captured)}),
    "windows": (
        replace(SHAPE, window=50, windowed=(True, False, True)),
        {"use_sliding_window": True, "sliding_window": 50, "layer_types": LAYERS},
    ),
    "swa": (replace(SHAPE, window=40), {"dflash_config": {**DFLASH, "use_swa": True, "swa_window_size": 40}}),
    "causal": (replace(SHAPE, causal=True), {"is_causal": True}),
    "rotation": (
        replace(SHAPE, n_rot=16), {"rope_parameters": {"rope_theta": SHAPE.base, "partial_rotary_factor": 0.5}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VARIANTS)
def test_drafts_are_those_of_the_checkpoint(tmp_path: Path, case: str) -> None:
    shape, changes = VARIANTS[case]
    tensors = checkpoint(tmp_path / "hf", shape, changes, files=2 if case == "windows" else 1)
    values = features(80)
    expected = twin_logits(shape, tensors, values, 6, EMBEDDING, HEAD)
    with drafter(converted(tmp_path)) as made:
        ring = fed(made, values)
        assert nmse(made.logits(ring, 6, shape.block - 1), expected) < 1e-6
        assert made.draft(ring, 6, 99) == tuple(expected.argmax(1))


@pytest.mark.parametrize(
    ("quantize", "dtype", "most"),
    [("F32", torch.bfloat16, 1e-6), ("F16", torch.bfloat16, 1e-6), ("F16", torch.float32, 1e-5),
     ("F32", torch.float16, 1e-6), ("Q8_0", torch.bfloat16, 2e-3)],
)  # fmt: skip
def test_types(tmp_path: Path, quantize: Quantization, dtype: torch.dtype, most: float) -> None:
    tensors = checkpoint(tmp_path / "hf", dtype=dtype, prefix="model.")
    values = features(30)
    expected = twin_logits(SHAPE, tensors, values, 6, EMBEDDING, HEAD)
    with drafter(converted(tmp_path, quantize)) as made:
        assert nmse(made.logits(fed(made, values), 6, SHAPE.block - 1), expected) < most
    found = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "d.gguf").tensors}
    assert found["fc.weight"] == quantize and found["blk.2.ffn_down.weight"] == quantize
    assert found["enc.output_norm.weight"] == found["blk.1.attn_q_norm.weight"] == "F32"


def test_the_file_has_the_keys_of_the_dialect(tmp_path: Path) -> None:
    checkpoint(tmp_path / "hf", *VARIANTS["windows"])
    reader = gguf.GGUFReader(converted(tmp_path))
    found = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert found == {
        "general.architecture": "dflash", "general.name": "hf", "tokenizer.ggml.mask_token_id": 299,
        "dflash.block_count": 3, "dflash.embedding_length": 256, "dflash.feed_forward_length": 160,
        "dflash.attention.head_count": 6, "dflash.attention.head_count_kv": 2, "dflash.attention.key_length": 32,
        "dflash.attention.value_length": 32,
        "dflash.attention.layer_norm_rms_epsilon": pytest.approx(1e-5), "dflash.vocab_size": 301,
        "dflash.context_length": 32768, "dflash.block_size": 7, "dflash.target_layers": [2, 3, 1, 4],
        "dflash.rope.freq_base": 50000.0, "dflash.attention.sliding_window": 50,
        "dflash.attention.sliding_window_pattern": [True, False, True],
    }  # fmt: skip
    assert open_drafter(tmp_path / "d.gguf", MODEL)[0].captured == SHAPE.captured


def test_its_own_embedding_and_head(tmp_path: Path) -> None:
    extra = {"embed_tokens.weight": EMBEDDING * 2, "lm_head.weight": HEAD * 3}
    tensors, values = checkpoint(tmp_path / "hf", extra=extra), features(30)
    expected = twin_logits(SHAPE, tensors, values, 6, EMBEDDING * 2, HEAD * 3)
    with drafter(converted(tmp_path)) as made:
        assert nmse(made.logits(fed(made, values), 6, SHAPE.block - 1), expected) < 1e-6


def test_scaled_positions_are_read_back(tmp_path: Path) -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    checkpoint(tmp_path / "hf", changes={"rope_scaling": scaled})
    scaling = open_drafter(converted(tmp_path), MODEL)[0].scaling
    assert scaling is not None and (scaling.kind, scaling.factor, scaling.n_ctx) == ("yarn", 4.0, 4096)


WRONG: dict[str, tuple[dict[str, Any], type[SparkError], str]] = {
    "no-mask": (
        {"changes": {"dflash_config": {"target_layer_ids": [0, 1]}}}, ModelFormatError, "has no dflash_config.mask",
    ),
    "no-layers": (
        {"changes": {"dflash_config": {"mask_token_id": 3}}}, ModelFormatError, "has no dflash_config.target_l",
    ),
    "no-theta": ({"changes": {"rope_theta": None}}, ModelFormatError, "rope_parameters.rope_theta or rope_theta"),
    "no-size": ({"changes": {"intermediate_size": None}}, ModelFormatError, "has no intermediate_size"),
    "thetas": (
        {"changes": {"rope_parameters": {"rope_theta": 1e6}}},
        ModelFormatError, "says different things: rope_parameters",
    ),
    "masks": (
        {"changes": {"mask_token_id": 5}}, ModelFormatError, "says different things: dflash_config.mask_token_id",
    ),
    "mask": ({"changes": {"vocab_size": 299}}, ModelFormatError, "mask_token_id is 299, expected one of 299 tokens"),
    "layers": ({"changes": {"num_target_layers": 3}}, ModelFormatError, "expected layers of 3 (num_target_layers)"),
    "twice": (
        {"changes": {"dflash_config": {**DFLASH, "target_layer_ids": [1, 1, 2, 3]}}}, ModelFormatError,
        "expected different numbers from 0 on",
    ),
    "fewer": (
        {"changes": {"dflash_config": {**DFLASH, "target_layer_ids": [1, 2]}}}, ModelFormatError,
        "fc.weight has shape (256, 1024), config.json asks for (256, 512)",
    ),
    "heads": ({"changes": {"num_key_value_heads": 4}}, ModelFormatError, "6 heads of 32, 4 of KV"),
    "width": ({"changes": {"intermediate_size": 128}}, ModelFormatError, "mlp.gate_proj.weight has shape (160, 256)"),
    "type": ({"changes": {"hidden_size": "256"}}, ModelFormatError, "hidden_size is '256', expected a whole number"),
    "deep": ({"changes": {"num_hidden_layers": 10**9}}, ModelFormatError, "num_hidden_layers is 1000000000, more than"),
    "tensor": (
        {"without": ("layers.1.self_attn.k_proj.weight",)}, ModelFormatError, "layers.1.self_attn.k_proj.weight is",
    ),
    "bias": (
        {"extra": {"layers.0.self_attn.q_proj.bias": np.zeros(192, np.float32)}}, UnsupportedModelError, "q_proj.bias",
    ),
    "untied": ({"extra": {"embed_tokens.weight": EMBEDDING}}, ModelFormatError, "tie_word_embeddings is not true"),
    "nan": ({"extra": {"lm_head.weight": HEAD * np.float32(np.nan)}}, ModelFormatError, "a weight that is NaN"),
    "ints": ({"extra": {"d2t": np.zeros(4, np.int64)}}, UnsupportedModelError, "tensor d2t is I64"),
    "dflash2": ({"changes": {"architectures": ["DFlash2DraftModel"]}}, UnsupportedModelError, "DFlash2DraftModel"),
    "conv": (
        {"changes": {"dflash_config": {**DFLASH, "conv_kernel_size": 2}}},
        UnsupportedModelError, "dflash_config.conv_kern",
    ),
    "quantized": ({"changes": {"quantization_config": {"bits": 4}}}, UnsupportedModelError, "quantization_config"),
    "act": ({"changes": {"hidden_act": "gelu"}}, UnsupportedModelError, "hidden_act 'gelu'"),
    "rope": ({"changes": {"rope_scaling": {"rope_type": "dynamic"}}}, UnsupportedModelError, "scaled by 'dynamic'"),
    "context": ({"changes": {"max_position_embeddings": 2**32}}, ModelFormatError, "expected at most 2147483647"),
    "block": ({"changes": {"block_size": 257}}, ModelFormatError, "block_size is 257, expected at most 256"),
    "eps": ({"changes": {"rms_norm_eps": float("nan")}}, ModelFormatError, "is nan, expected a number of at least 0"),
    "theta": ({"changes": {"rope_theta": 10**400}}, ModelFormatError, ", expected a number above 1"),
    "cap": (
        {"changes": {"final_logit_softcapping": -1.0}}, ModelFormatError, "is -1.0, expected a number of at least 0",
    ),
    "turned": (
        {"changes": {"rope_scaling": {"partial_rotary_factor": 1.5}}}, ModelFormatError, "turns 48 dimensions of 32",
    ),
    "far": (
        {"changes": {"num_target_layers": None, "dflash_config": {**DFLASH, "target_layer_ids": [0, 1, 2, 2**31]}}},
        ModelFormatError, "expected different numbers from 0 on",
    ),
    "types": (
        {"changes": {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention"]}},
        ModelFormatError,
        "expected a kind of attention for 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_checkpoint_is_refused_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    options, error, words = WRONG[case]
    checkpoint(tmp_path / "hf", **options)
    (tmp_path / "d.gguf").write_bytes(b"before")
    with pytest.raises(error) as found:
        converted(tmp_path)
    assert words in found.value.message and "\n" not in found.value.message, found.value.message
    assert (tmp_path / "d.gguf").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.gguf", "hf"]


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    checkpoint(folder)
    weights = next(folder.glob("*.safetensors"))
    whole = weights.read_bytes()
    for change, words in (
        (lambda: weights.write_bytes(whole[:-100]), "is no whole safetensors file"),
        (lambda: weights.write_bytes(b"junk"), "is no whole safetensors file"),
        (weights.unlink, "has no safetensors file"),
        (lambda: (folder / "config.json").write_text("{"), "is no JSON"),
        (lambda: (folder / "config.json").write_text("[]"), "is no JSON object"),
        ((folder / "config.json").unlink, "No such file"),
    ):
        change()
        with pytest.raises(ModelFormatError) as found:
            converted(tmp_path)
        assert words in found.value.message and "\n" not in found.value.message, found.value.message
    checkpoint(folder, replace(SHAPE, n_ff=150))
    with pytest.raises(ModelFormatError, match="rows of 150 do not fill blocks of 32"):
        converted(tmp_path, "Q8_0")
    assert not (tmp_path / "d.gguf").exists()


def test_the_command(tmp_path: Path) -> None:
    checkpoint(tmp_path / "hf")
    done = spark("convert-drafter", "hf", "--out", "d.gguf", cwd=tmp_path, env=environment())
    assert "drafter of 3 layers, for layers 1, 2, 0, 3 of a model, written to d.gguf" in done.stderr and not done.stdout
    shown = spark("inspect", "d.gguf", cwd=tmp_path, env=environment(CUDA_VISIBLE_DEVICES="-1")).stdout
    assert "is a drafter" in shown and "Q8_0" in shown
    said = refused("convert-drafter", "hf", "--out", "hf/config.json", cwd=tmp_path, status=2)
    assert "would overwrite" in said
    assert "config.json: No such file" in refused("convert-drafter", ".", "--out", "e.gguf", cwd=tmp_path)
