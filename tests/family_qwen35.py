"""Qwen3.5 in `transformers`, dense and with experts, from published files' conventions.

The published converter adds 1 to the norms whose weights are offsets, stores -exp(A_log), drops the middle axis of the
convolution, and puts value heads in an order in which head h uses the key head h mod H_k, not h // (H_v / H_k).
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import gguf
import numpy as np

from tests.rope_parameters import rope_parameters

Tensors = dict[str, np.ndarray]
names_of = cache(gguf.get_tensor_name_map)  # which every parameter asks for


def build(config: Any) -> Any:
    """The `transformers` model of a configuration."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    common: dict[str, Any] = {
        "vocab_size": config.n_vocab, "hidden_size": config.n_embd, "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head, "num_key_value_heads": config.n_head_kv, "head_dim": config.head_dim,
        "rms_norm_eps": config.eps, "max_position_embeddings": config.n_ctx_train, "tie_word_embeddings": False,
        "full_attention_interval": config.interval, "linear_conv_kernel_dim": config.kernel,
        "linear_key_head_dim": config.d_k, "linear_value_head_dim": config.d_v,
        "linear_num_key_heads": config.n_head_k, "linear_num_value_heads": config.n_head_v,
        "rope_parameters": {
            **rope_parameters(config),
            "partial_rotary_factor": config.rope_dims / config.head_dim,
            "mrope_section": config.metadata()[f"{config.arch}.rope.dimension_sections"][:3],
        },
    }  # fmt: skip
    if not config.n_expert:
        hf_config = Qwen3_5TextConfig(**common, intermediate_size=config.n_ff)
        hf_config._attn_implementation = "eager"
        return Qwen3_5ForCausalLM(hf_config)
    hf_config = Qwen3_5MoeTextConfig(
        **common, moe_intermediate_size=config.n_ff_exp, shared_expert_intermediate_size=config.n_ff_shared,
        num_experts=config.n_expert, num_experts_per_tok=config.n_expert_used,
    )  # fmt: skip
    hf_config._attn_implementation = hf_config._experts_implementation = "eager"
    return Qwen3_5MoeForCausalLM(hf_config)


def parameter(config: Any, weights: Tensors, name: str) -> np.ndarray:
    """The value of a `transformers` parameter, taken from the GGUF names of the published converter."""
    arch = gguf.MODEL_ARCH.QWEN35MOE if config.n_expert else gguf.MODEL_ARCH.QWEN35
    layer, leaf = re.search(r"\.layers\.(\d+)\.", name), name.removesuffix(".weight").split(".")[-1]
    p = f"blk.{layer[1]}." if layer else ""
    if leaf == "gate_up_proj":
        return np.concatenate([weights[p + "ffn_gate_exps.weight"], weights[p + "ffn_up_exps.weight"]], axis=1)
    if name.endswith("experts.down_proj"):
        return weights[p + "ffn_down_exps.weight"]
    base = names_of(arch, config.n_layer).get_name(
        name.removesuffix(".weight").replace("dt_bias", "dt_proj")
    )
    value = weights[base + {"A_log": "", "dt_bias": ".bias"}.get(leaf, ".weight")]
    if ".linear_attn." in name:
        return _delta(config, leaf, value)
    if leaf == "shared_expert_gate":
        return value[None]
    return value - 1 if "norm" in leaf else value


def _delta(config: Any, leaf: str, value: np.ndarray) -> np.ndarray:
    keys, values = 2 * config.n_head_k * config.d_k, config.n_head_v

    def grouped(x: np.ndarray, d: int) -> np.ndarray:
        """Rows of value heads, from the files' order to that of `transformers`."""
        tiled = x.reshape(values // config.n_head_k, config.n_head_k, d, *x.shape[1:])
        return tiled.swapaxes(0, 1).reshape(x.shape)

    if leaf == "norm":
        return value
    if leaf == "A_log":
        return grouped(np.log(-value), 1)
    if leaf in ("dt_bias", "in_proj_a", "in_proj_b"):
        return grouped(value, 1)
    if leaf == "in_proj_z":
        return grouped(value, config.d_v)
    if leaf == "out_proj":
        return np.ascontiguousarray(grouped(np.ascontiguousarray(value.T), config.d_v).T)
    both = np.concatenate([value[:keys], grouped(value[keys:], config.d_v)])
    return both[:, None] if leaf == "conv1d" else both
