"""Gemma 4's text model in `transformers`."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import gguf
import numpy as np

Tensors = dict[str, np.ndarray]
names_of = cache(gguf.get_tensor_name_map)  # which every parameter asks for


def build(config: Any) -> Any:
    """The `transformers` model of a configuration."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    windowed, full = config.windowed.index(True), config.windowed.index(False)
    rotated = sum(factor == 1 for factor in config.rope_factors) / len(config.rope_factors)
    hf_config = Gemma4TextConfig(
        vocab_size=config.n_vocab, hidden_size=config.n_embd, intermediate_size=config.n_ff[0],
        num_hidden_layers=config.n_layer, num_attention_heads=config.n_head,
        num_key_value_heads=config.n_head_kv[windowed], num_global_key_value_heads=config.n_head_kv[full],
        head_dim=config.head_dim_swa, global_head_dim=config.head_dim, rms_norm_eps=config.eps,
        max_position_embeddings=config.n_ctx_train, sliding_window=config.window,
        layer_types=["sliding_attention" if windowed else "full_attention" for windowed in config.windowed],
        final_logit_softcapping=config.softcap or None, hidden_size_per_layer_input=0,
        attention_k_eq_v=config.k_eq_v, num_kv_shared_layers=config.n_shared, enable_moe_block=config.n_expert > 0,
        num_experts=config.n_expert or None, top_k_experts=config.n_expert_used or None,
        moe_intermediate_size=config.n_ff_exp or None,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": config.rope_base_swa},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": config.rope_base, "partial_rotary_factor": rotated,
                **({"factor": config.scaling.factor} if config.scaling else {}),
            },
        },
    )  # fmt: skip
    hf_config._attn_implementation = hf_config._experts_implementation = "eager"
    return Gemma4ForCausalLM(hf_config)


def parameter(config: Any, weights: Tensors, name: str) -> np.ndarray:
    """The value of a `transformers` parameter, taken from the GGUF names of the published converter."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    p = f"blk.{layer[1]}." if layer else ""
    if name == "lm_head.weight":
        return weights["token_embd.weight"]
    if name.endswith("experts.gate_up_proj") and p + "ffn_gate_exps.weight" in weights:
        return np.concatenate([weights[p + "ffn_gate_exps.weight"], weights[p + "ffn_up_exps.weight"]], axis=1)
    special = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    for ending, tensor in special.items():
        if name.endswith(ending):
            return weights[p + tensor]
    names = names_of(gguf.MODEL_ARCH.GEMMA4, config.n_layer)
    return weights[names.get_name(name.removesuffix(".weight")) + ".weight"]
