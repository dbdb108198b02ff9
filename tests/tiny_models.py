"""Tiny random models on disk, and two oracles for them: `transformers`, and float64 loops.

The oracles share no code with the engine: weights reach them through the `gguf` package's reader.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as QType
from gguf_files import write_gguf

from engine.models import qwen3moe

Tensors = dict[str, np.ndarray]


def k_quant_mix(name: str) -> QType:
    """The types of a published Q4_K_M file: Q6_K where it matters most, F32 for vectors and routers."""
    if "norm" in name or "ffn_gate_inp" in name:
        return QType.F32
    if "ffn_down_exps" in name or name in ("output.weight", "token_embd.weight"):
        return QType.Q6_K
    return QType.Q4_K


def everything(qtype: QType):
    """Every matrix of one type."""
    return lambda name: QType.F32 if "norm" in name or "ffn_gate_inp" in name else qtype


ALL_F32 = everything(QType.F32)


def write_tiny(path: Path, types=ALL_F32, seed: int = 0, arch: ModuleType = qwen3moe, **smaller: int) -> Path:
    """A tiny random model of an architecture with tensors of the given types and no tokenizer.

    smaller: fields of its configuration that are to be less than in `tiny`; tensors are cut to fit.
    """
    config, tensors = arch.tiny(np.random.default_rng(seed))
    config = replace(config, **smaller)
    tensors = {name: tensors[name][tuple(map(slice, shape))] for name, shape in config.tensors().items()}
    metadata = {"general.architecture": arch.ARCH, "general.name": "tiny", **config.metadata()}
    write_gguf(path, metadata, {name: (values, types(name)) for name, values in tensors.items()})
    return path


def read_weights(path: Path) -> Tensors:
    """Every tensor of a file as float32, through the gguf package."""
    reader = gguf.GGUFReader(path)
    out = {}
    for t in reader.tensors:
        shape = tuple(int(n) for n in reversed(t.shape))
        out[t.name] = gguf.dequantize(t.data, t.tensor_type).reshape(shape).astype(np.float32)
    return out


def transformers_logits(config: qwen3moe.Config, weights: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of the `transformers` model with these weights, in float64."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    hf_config = Qwen3MoeConfig(
        vocab_size=config.n_vocab, hidden_size=config.n_embd, moe_intermediate_size=config.n_ff_exp,
        num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, num_key_value_heads=config.n_head_kv,
        head_dim=config.head_dim, num_local_experts=config.n_expert, num_experts=config.n_expert,
        num_experts_per_tok=config.n_expert_used, norm_topk_prob=True, rms_norm_eps=config.eps,
        rope_parameters={"rope_theta": config.rope_base, "rope_type": "default"}, tie_word_embeddings=False,
        max_position_embeddings=config.n_ctx_train, mlp_only_layers=[], decoder_sparse_step=1,
    )  # fmt: skip
    hf_config._attn_implementation = hf_config._experts_implementation = "eager"
    model = Qwen3MoeForCausalLM(hf_config).double().eval()
    # Names as the published converter maps them, from the gguf package's own table.
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config.n_layer)
    used = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                layer = name.split(".")[2]
                parts = [f"blk.{layer}.ffn_gate_exps.weight", f"blk.{layer}.ffn_up_exps.weight"]
                value = np.concatenate([weights[p] for p in parts], axis=1)
            elif name.endswith("experts.down_proj"):
                parts = [f"blk.{name.split('.')[2]}.ffn_down_exps.weight"]
                value = weights[parts[0]]
            else:
                parts = [names.get_name(name.removesuffix(".weight")) + ".weight"]
                value = weights[parts[0]]
            used.update(parts)
            assert parameter.shape == value.shape, name
            parameter.copy_(torch.from_numpy(value))
        assert used == set(weights)
        return model(torch.from_numpy(tokens[None].astype(np.int64))).logits[0].numpy()


def float_logits(
    config: qwen3moe.Config, weights: Tensors, tokens: np.ndarray, imposed: np.ndarray | None = None
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


def nmse(value: np.ndarray, oracle: np.ndarray) -> float:
    """Squared error over the oracle's squared magnitude."""
    return float(((value - oracle) ** 2).sum() / (oracle**2).sum())
