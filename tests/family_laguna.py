"""Laguna in `transformers`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.rope_parameters import rope_parameters

Tensors = dict[str, np.ndarray]

# The gguf package does not know the family yet; these are the published files' names.
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.g_proj": "attn_gate", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def build(config: Any) -> Any:
    """The `transformers` model of a configuration."""
    from transformers import LagunaConfig, LagunaForCausalLM

    hf_config = LagunaConfig(
        vocab_size=config.n_vocab, hidden_size=config.n_embd, intermediate_size=config.n_ff,
        num_hidden_layers=config.n_layer, num_attention_heads=config.n_head[0],
        num_attention_heads_per_layer=list(config.n_head), num_key_value_heads=config.n_head_kv,
        head_dim=config.head_dim, rms_norm_eps=config.eps, max_position_embeddings=config.n_ctx_train,
        sliding_window=config.window,
        layer_types=["sliding_attention" if windowed else "full_attention" for windowed in config.windowed],
        mlp_layer_types=["dense" if i < config.n_dense else "sparse" for i in range(config.n_layer)],
        moe_intermediate_size=config.n_ff_exp, shared_expert_intermediate_size=config.n_ff_shared,
        num_experts=config.n_expert, num_experts_per_tok=config.n_expert_used,
        moe_routed_scaling_factor=config.expert_scale, gating="per-element" if config.elements else "per-head",
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {
                **rope_parameters(config), "partial_rotary_factor": config.rope_dims / config.head_dim,
            },
            "sliding_attention": {
                "rope_type": "default", "rope_theta": config.rope_base_swa,
                "partial_rotary_factor": config.rope_dims_swa / config.head_dim,
            },
        },
    )  # fmt: skip
    hf_config._attn_implementation = hf_config._experts_implementation = "eager"
    return LagunaForCausalLM(hf_config)


def parameter(config: Any, weights: Tensors, name: str) -> np.ndarray:
    """The value of a `transformers` parameter, taken from the names of published files."""
    parts = name.removeprefix("model.").removesuffix(".weight").split(".")
    if parts[0] != "layers":
        return weights[NAMES[parts[0]] + ".weight"]
    p, rest = f"blk.{parts[1]}.", ".".join(parts[2:])
    if rest == "mlp.experts.gate_up_proj":
        return np.concatenate([weights[p + "ffn_gate_exps.weight"], weights[p + "ffn_up_exps.weight"]], axis=1)
    if rest == "mlp.experts.down_proj":
        return weights[p + "ffn_down_exps.weight"]
    if rest == "mlp.gate.e_score_correction_bias":
        return weights[p + "exp_probs_b.bias"]
    return weights[p + NAMES[rest] + ".weight"]
