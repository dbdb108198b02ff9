"""Qwen3-MoE in `transformers`, and as plain float64 loops."""

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
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    hf_config = Qwen3MoeConfig(
        vocab_size=config.n_vocab, hidden_size=config.n_embd, moe_intermediate_size=config.n_ff_exp,
        num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, num_key_value_heads=config.n_head_kv,
        head_dim=config.head_dim, num_local_experts=config.n_expert, num_experts=config.n_expert,
        num_experts_per_tok=config.n_expert_used, norm_topk_prob=True, rms_norm_eps=config.eps,
        rope_parameters=rope_parameters(config), tie_word_embeddings=False,
        max_position_embeddings=config.n_ctx_train, mlp_only_layers=[], decoder_sparse_step=1,
    )  # fmt: skip
    hf_config._attn_implementation = hf_config._experts_implementation = "eager"
    return Qwen3MoeForCausalLM(hf_config)


def parameter(config: Any, weights: Tensors, name: str) -> np.ndarray:
    """The value of a `transformers` parameter, taken from the GGUF names of the published converter."""
    names = names_of(gguf.MODEL_ARCH.QWEN3MOE, config.n_layer)
    layer = re.search(r"\.layers\.(\d+)\.", name)
    p = f"blk.{layer[1]}." if layer else ""
    if name.endswith("experts.gate_up_proj"):
        return np.concatenate([weights[p + "ffn_gate_exps.weight"], weights[p + "ffn_up_exps.weight"]], axis=1)
    if name.endswith("experts.down_proj"):
        return weights[p + "ffn_down_exps.weight"]
    return weights[names.get_name(name.removesuffix(".weight")) + ".weight"]


def float_logits(
    config: Any, weights: Tensors, tokens: np.ndarray, imposed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] and chosen experts [L, T, A] of a float64 model written as plain loops.

    imposed: experts [L, T, A] used in place of the router's own choice (its weights are still computed).
    """
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    T, d = len(tokens), config.head_dim

    def rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.eps) * scale

    angle = np.arange(T)[:, None] * config.rope_base ** (-2.0 * np.arange(d // 2) / d)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rope(x: np.ndarray) -> np.ndarray:
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = w["token_embd.weight"][tokens]
    chosen = np.zeros((config.n_layer, T, config.n_expert_used), np.int64)
    for i in range(config.n_layer):
        p = f"blk.{i}."
        h = rms(x, w[p + "attn_norm.weight"])
        q = (h @ w[p + "attn_q.weight"].T).reshape(T, -1, d)
        k = (h @ w[p + "attn_k.weight"].T).reshape(T, -1, d)
        v = (h @ w[p + "attn_v.weight"].T).reshape(T, -1, d)
        q, k = rope(rms(q, w[p + "attn_q_norm.weight"])), rope(rms(k, w[p + "attn_k_norm.weight"]))
        attended = np.zeros_like(q)
        for head in range(config.n_head):
            shared = head * config.n_head_kv // config.n_head
            s = q[:, head] @ k[:, shared].T / np.sqrt(d)
            s = np.where(np.tril(np.ones((T, T), bool)), s, -np.inf)
            e = np.exp(s - s.max(-1, keepdims=True))
            attended[:, head] = e / e.sum(-1, keepdims=True) @ v[:, shared]
        x = x + attended.reshape(T, -1) @ w[p + "attn_output.weight"].T
        h = rms(x, w[p + "ffn_norm.weight"])
        logits = h @ w[p + "ffn_gate_inp.weight"].T
        chosen[i] = np.argsort(-logits, axis=1, kind="stable")[:, : config.n_expert_used]
        use = chosen[i] if imposed is None else imposed[i]
        for t in range(T):
            gate = np.exp(logits[t, use[t]] - logits[t].max())
            gate /= gate.sum()
            for e, weight in zip(use[t], gate, strict=True):
                g = w[p + "ffn_gate_exps.weight"][e] @ h[t]
                u = w[p + "ffn_up_exps.weight"][e] @ h[t]
                x[t] = x[t] + weight * (w[p + "ffn_down_exps.weight"][e] @ (g / (1 + np.exp(-g)) * u))
    return rms(x, w["output_norm.weight"]) @ w["output.weight"].T, chosen
