"""What files of other writers look like: keys beyond ours, fused tensors, scaled positions, blocks left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType
from hypothesis import given
from hypothesis import strategies as st

from engine import models
from engine.formats.gguf import open_model
from engine.ground.config import EngineConfig
from engine.ground.errors import ModelFormatError, SparkError, UnsupportedModelError
from engine.models.conventions import NEUTRAL, unsupported_keys
from engine.models.scaling import Scaling
from engine.running.dryrun import plan_only
from engine.running.loaded import load
from engine.running.stepping import Span
from tests.gguf_files import write_gguf
from tests.tiny_models import ALL_F32, everything, nmse, read_weights, tiny, tiny_path, transformers_logits, write_tiny

Q8 = everything(QType.Q8_0)
TOKENS = np.random.default_rng(9).integers(0, 301, 40).astype(np.int32)
FAMILIES = models.known()


def logits(path: Path) -> np.ndarray:
    """Of all TOKENS in one step, on the CPU."""
    loaded = load(EngineConfig(model=path, device="cpu", threads=2, ctx_tokens=64, chunk_tokens=40))
    sequence = loaded.kv.sequence()
    made = loaded.steps.run([Span(sequence, TOKENS, np.ones(40, bool), tuple(range(40)))]).logits.copy()
    loaded.close()
    return made


def written(path: Path, arch: str, more: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    """A tiny model with other keys; `tensors` replace or join its own."""
    config, own = tiny(arch)
    metadata = {"general.architecture": arch, **config.metadata()} | {f"{arch}.{key}": v for key, v in more.items()}
    write_gguf(path, metadata, own | (tensors or {}))
    return path


def read(path: Path, more: dict[str, Any] | None = None) -> Any:
    """The configuration of a file, `more` among its keys."""
    with open_model(path) as file:
        file.metadata = dict(file.metadata) | {f"{file.architecture}.{key}": v for key, v in (more or {}).items()}
        return models.find(file.architecture).Config.from_gguf(file)


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("rope.swa.freq_base", 5e4, 0.0),
        ("rope.scaling.yarn_log_multiplier", 0.1, 0.0),
        ("rope.scaling.attn_factor", 1.35, 1.0),
        ("rope.freq_scale", 0.5, 1.0),
        ("attention.sink_enabled", True, False),
        ("attention.causal", False, True),
        ("attention.clamp_kqv", 8.0, 0.0),
        ("attention.indexer.top_k", 512, 0),
        ("expert_group_count", 4, 1),
        ("expert_latent_length", np.array([64, 0]), np.array([0, 0])),
        ("router_logit_softcapping", 30.0, 0.0),
        ("residual_scale", 0.5, 1.0),
        ("embedding_length_per_layer_input", 64, 0),
    ],
)
@pytest.mark.parametrize("arch", FAMILIES)
def test_a_key_that_shapes_the_computation_is_refused_unless_it_changes_nothing(
    arch: str, key: str, value: Any, neutral: Any
) -> None:
    path = tiny_path(arch, Q8)
    with pytest.raises(UnsupportedModelError) as caught:
        read(path, {key: value})
    message = str(caught.value)
    assert "\n" not in message and arch in message
    if (arch, key) != ("gemma4", "embedding_length_per_layer_input"):  # read, and refused in its own words
        shown = "an array" if isinstance(value, np.ndarray) else str(value)
        assert message.startswith(f"{arch}.{key} is {shown}") and "only " in message
    assert read(path, {key: neutral}) == read(path)


WRONG = {
    "laguna": (
        ("attention.head_count", np.array([np.nan] * 6, np.float32), "array of 6 float32, expected 6 numbers from 1"),
        ("attention.head_count", ["4"] * 6, "array of 6 strings, expected 6 numbers from 1"),
        ("attention.head_count", np.zeros(100_000, np.int32), "[0, 0, 0, 0, 0, 0], expected 6 numbers from 1"),
        ("attention.sliding_window_pattern", ["yes"] * 6, "array of 6 strings, expected 6 numbers from 0 to 1"),
        ("attention.sliding_window_pattern", np.array([2] * 6, np.int32), "expected 6 numbers from 0 to 1"),
        ("attention.sliding_window", np.uint64(2**63), "is 9223372036854775808, expected at most 2147483647"),
        ("rope.freq_base_swa", -1.0, "is -1.0, expected a number above 1"),
        ("expert_weights_scale", np.inf, "is inf, expected a number"),
        ("rope.scaling.type", "z" * 9999, "rope scaling 'zzzzzz"),
    ),
    "gemma4": (
        ("feed_forward_length", np.array([np.inf] * 6, np.float32), "expected 6 numbers from 1"),
        ("final_logit_softcapping", -3.0, "is -3.0, expected a number of at least 0"),
    ),
    "qwen35": (("rope.dimension_sections", ["11"] * 4, "an array of 4 strings, expected numbers"),),
}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "key", "value", "message"),
    [
        *((arch, *case) for arch, cases in WRONG.items() for case in cases),
        *((arch, "attention.layer_norm_rms_epsilon", x, "number") for arch in FAMILIES for x in (np.nan, -1.0)),
    ],
)
def test_a_value_that_no_model_can_have_is_refused_by_its_key(
    tmp_path: Path, arch: str, key: str, value: Any, message: str
) -> None:
    """A window of 2**63 positions read past the cache; of what is no number nothing can be computed."""
    path = written(tmp_path / "m.gguf", arch, {key: value})
    with pytest.raises(SparkError) as caught:
        read(path)
    assert f"{arch}" in str(caught.value) and message in str(caught.value) and len(str(caught.value)) < 200


def test_layers_may_be_told_by_zeros_and_ones() -> None:
    config = read(tiny_path("laguna", Q8))
    pattern = np.array(config.windowed, np.uint32)
    assert read(tiny_path("laguna", Q8), {"attention.sliding_window_pattern": pattern}) == config


def test_the_keys_of_a_file_are_named_in_one_line() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(tiny_path("laguna", Q8), {"rope.swa.freq_base": 1e4, "rope.swa.dimension_count": 64})
    assert "laguna.rope.swa.freq_base" in str(caught.value) and "laguna.rope.swa.dimension_count" in str(caught.value)
    with pytest.raises(UnsupportedModelError) as caught:
        read(tiny_path("laguna", Q8), {f"rope.{i}\n" + 999 * "x": "y" * 999 for i in range(999)})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 3000 and "and 991 keys more" in str(caught.value)


KEYS = st.sampled_from([*sorted(NEUTRAL), "rope.x", "attention.y", "expert_z", "a_scale", "x_softcapping"])
VALUES = st.one_of(
    st.booleans(), st.integers(-2, 2), st.floats(), st.text(max_size=3),
    st.lists(st.integers(0, 2), max_size=3).map(np.array),
)  # fmt: skip


@pytest.mark.slow
@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_what_is_read_or_of_another_model_is_nobodys_business(keys: dict[str, Any]) -> None:
    metadata = {f"m.{key}": value for key, value in keys.items()}
    found = unsupported_keys(metadata, "m")
    assert all(line.startswith("m.") and "\n" not in line for line in found) and len(found) <= len(keys)
    assert unsupported_keys(metadata, "m", keys) == [] == unsupported_keys(metadata, "other")
    others = {"m.vocab_size": 3, "m.vision.x_scale": 2.0, "general.x_scale": 2.0}
    assert unsupported_keys(metadata | others, "m") == found


@pytest.mark.parametrize("model", [*FAMILIES, "gemma4-dense"])  # whose full layers have a V matrix
def test_fused_tensors_change_no_bit(model: str) -> None:
    with open_model(tiny_path(f"{model}-fused", Q8)) as file:
        assert any(".attn_qkv." in name for name in file.tensors)
        assert model in ("qwen35", "gemma4-dense") or any(".ffn_gate_up_exps." in name for name in file.tensors)
    apart, fused = (logits(tiny_path(name, Q8)) for name in (model, f"{model}-fused"))
    assert np.array_equal(apart.view(np.uint32), fused.view(np.uint32))


def test_a_tensor_that_is_there_alone_and_fused_is_refused(tmp_path: Path) -> None:
    config = read(tiny_path("qwen3moe", Q8))
    rows = (config.n_head + 2 * config.n_head_kv) * config.head_dim
    for name, message in (("blk.1.attn_qkv.weight", "both alone and in"), ("blk.1.attn_qkv.bias", "is not part of")):
        more = {name: np.ones((rows, 256), np.float32)}
        with pytest.raises(SparkError, match=message):
            logits(written(tmp_path / "x.gguf", "qwen3moe", {}, more))


@pytest.mark.slow
def test_a_vector_may_be_a_matrix_of_one_row(tmp_path: Path) -> None:
    """As converters write the gate of shared experts; the model's id, which profiles hold, is the same."""
    _, own = tiny("qwen35moe")
    gates = {name: values[None] for name, values in own.items() if "ffn_gate_inp_shexp" in name}
    assert gates
    path = written(tmp_path / "x.gguf", "qwen35moe", {}, gates)
    assert np.array_equal(logits(path), logits(tiny_path("qwen35moe", ALL_F32)))
    with open_model(path) as one, open_model(tiny_path("qwen35moe", ALL_F32)) as other:
        assert one.model_id == other.model_id
    wrong = {name: values.reshape(2, -1) for name, values in gates.items()}
    with pytest.raises(ModelFormatError, match=r"has shape \(2, 128\), the metadata asks for \(256,\)"):
        logits(written(tmp_path / "y.gguf", "qwen35moe", {}, wrong))


YARN = Scaling("yarn", factor=4.0, n_ctx=9, beta_fast=3.0, beta_slow=0.5)
LINEAR = Scaling("linear", factor=3.0)


@pytest.mark.parametrize(
    ("arch", "scaling"),
    [
        ("qwen3moe", YARN), ("qwen35moe", LINEAR),  # Laguna's YaRN is its own
        *(pytest.param(*c, marks=pytest.mark.slow) for c in (("qwen35", YARN), ("laguna", LINEAR), ("gemma4", LINEAR))),
    ],
)
def test_scaled_positions_are_those_of_transformers(tmp_path: Path, arch: str, scaling: Scaling) -> None:
    path = write_tiny(tmp_path / "x.gguf", arch=models.find(arch), variant={"scaling": scaling})
    config, weights, made = read(path), read_weights(path), logits(path)
    assert nmse(made, transformers_logits(config, weights, TOKENS)) < 1e-6
    assert nmse(made, transformers_logits(replace(config, scaling=None), weights, TOKENS)) > 1e-4


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "linear", "factor": 1.0}, None),
        ({"factor": 4.0}, Scaling("linear", 4.0)),  # the format's kind where a file names none
        ({"type": "yarn", "factor": 32.0, "original_context_length": 8192, "beta_fast": 64.0, "beta_slow": 2.0},
         Scaling("yarn", 32.0, 8192, 64.0, 2.0)),  # another converter's names
        *(
            ({"type": "yarn", "factor": 32.0, "original_context_length": 8192, "yarn_attn_factor": factor},
             Scaling("yarn", 32.0, 8192))
            for factor in (1.0, 1.3466, 1.3465735902799727)
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arch", FAMILIES)
def test_scaling_is_read_as_writers_say_it(arch: str, keys: dict[str, Any], expected: Scaling | None) -> None:
    with open_model(tiny_path(arch, Q8)) as file:
        own = {key: value for key, value in file.metadata.items() if ".rope.scaling." not in key}
        file.metadata = own | {f"{arch}.rope.scaling.{key}": value for key, value in keys.items()}
        assert models.find(arch).Config.from_gguf(file).scaling == expected


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_block_that_predicts_further_tokens_is_left_out(tmp_path: Path, arch: str) -> None:
    """Its tensors may be anything; a block that no key announces is refused."""
    n_layer = read(tiny_path(arch, Q8)).n_layer
    block = {f"blk.{n_layer}.nextn.eh_proj.weight": np.ones((256, 512), np.float32)}
    block |= {f"blk.{n_layer}.attn_q.weight": np.ones((256, 256), np.float32)}
    keys = {"block_count": n_layer + 1, "nextn_predict_layers": 1}
    made = logits(written(tmp_path / "x.gguf", arch, keys, block))
    assert np.array_equal(made, logits(tiny_path(arch, ALL_F32)))
    with pytest.raises(UnsupportedModelError, match=rf"blk\.{n_layer}\.\S+ is not part of {arch}"):
        logits(written(tmp_path / "z.gguf", arch, {}, block))


def test_the_user_hears_of_a_block_that_is_left_out(tmp_path: Path) -> None:
    keys = {"block_count": 4, "nextn_predict_layers": 1}
    block = {"blk.3.nextn.enorm.weight": np.ones(256, np.float32)}
    path = written(tmp_path / "x.gguf", "qwen3moe", keys, block)
    loaded = load(EngineConfig(model=path, device="cpu", threads=1, ctx_tokens=64))
    assert any("blk.3" in warning and "MTP" in warning for warning in loaded.source.warnings)
    planned = plan_only(EngineConfig(model=path, vram_gib=4.0, ctx_tokens=64))
    assert loaded.source.warnings[0] in planned["warnings"]
    loaded.close()


def test_a_list_of_recurrent_layers_says_more_than_a_number() -> None:
    """A converter that finds only the list writes 4 beside it."""
    config = read(tiny_path("qwen35", Q8))
    listed = {"full_attention_interval": 4, "attention.recurrent_layers": np.array([True, True, False, True])}
    assert config.interval == 3 and read(tiny_path("qwen35", Q8), listed) == config
