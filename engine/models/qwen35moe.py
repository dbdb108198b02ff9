"""Qwen3.5-MoE and Qwen3.6-35B-A3B: the layers of `qwen35` with a mixture of experts and a gated shared expert.

x += mixer(rms(x)); x += moe(h) + sigmoid(g . h) * shared(h), where h = rms(x). Router softmax over all experts, the A
largest, renormalized. Reference: `transformers` qwen3_5_moe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from engine.gguf import GGUFFile
from engine.kv import KVCache
from engine.models import Buffers, Step, Weights, float_matrix, load_ends, matrix, refuse_unknown, vector
from engine.models.qwen35 import (
    PARTS,
    Attention,
    Config,
    Delta,
    head,
    load_mixer,
    mix,
    random_tensors,
    replay,
    rope_tables,
    skipped,
)
from engine.ops import F32, Gating, SharedExpert
from engine.quants import QTensor
from engine.residency import ExpertTensors, Residency

__all__ = ["ARCH", "Config", "Layer", "forward", "head", "load", "replay", "rope_tables", "tiny"]

ARCH = "qwen35moe"
GATING = Gating()


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer, its experts apart (see Residency)."""

    attn_norm: F32
    mixer: Attention | Delta
    ffn_norm: F32
    router: QTensor
    shared: SharedExpert


def load(file: GGUFFile, config: Config) -> Weights[Layer]:
    """Map every tensor with its shape checked; an unknown tensor is refused, not ignored."""
    shapes, D = config.tensors(), config.n_embd
    refuse_unknown(file, shapes, lambda name: skipped(config, name))

    def get(name: str) -> QTensor:
        return matrix(file, name, shapes[name])

    layers, experts = [], []
    for i in range(config.n_layer):
        p = f"blk.{i}."
        gate, up, down = (get(f"{p}ffn_{part}_shexp.weight") for part in PARTS)
        shared_gate = replace(float_matrix(file, p + "ffn_gate_inp_shexp.weight", (D,)), shape=(1, D))
        layers.append(
            Layer(
                vector(file, p + "attn_norm.weight", D),
                load_mixer(file, config, i),
                vector(file, p + "post_attention_norm.weight", D),
                float_matrix(file, p + "ffn_gate_inp.weight", (config.n_expert, D)),
                SharedExpert(gate, up, down, shared_gate),
            )
        )
        if config.fused:
            gates, ups = get(p + "ffn_gate_up_exps.weight").halves()
        else:
            gates, ups = get(p + "ffn_gate_exps.weight"), get(p + "ffn_up_exps.weight")
        experts.append(ExpertTensors(gates, ups, get(p + "ffn_down_exps.weight")))
    token_embd, output = load_ends(file, config.n_vocab, config.n_embd)
    norm = vector(file, "output_norm.weight", D)
    return Weights(token_embd, tuple(layers), norm, output, tuple(experts))


def forward(
    config: Config,
    weights: Weights[Layer],
    ops: ModuleType,
    ws: Any,
    step: Step,
    kv: KVCache,
    residency: Residency,
    ropes: tuple[F32, ...],
    b: Buffers,
) -> None:
    """One step: `b.logits` for `step.rows`, cache, states and residency updated."""
    state, T = residency.live, b.x.shape[0]
    ops.embed(ws, weights.token_embd, step.tokens, b.x)
    ops.fetch_ahead(ws, state, 0, residency.banks[0], T)
    for i, layer in enumerate(weights.layers):
        if b.hidden is not None:
            ops.copy(ws, b.x, b.hidden[i])
        if i + 1 < config.n_layer:
            ops.fetch_ahead(ws, state, i + 1, residency.banks[i + 1], T)
        mix(config, layer.attn_norm, layer.mixer, i, ops, ws, step, kv, ropes, b)
        ops.router(ws, b.x, layer.ffn_norm, config.eps, layer.router, b.h, b.router)
        ops.route(ws, b.router, GATING, state, i, step.counted, residency.rule, b.experts[i], b.weights[i], b.fetches)
        bank = residency.banks[i]
        ops.expert_ffn(ws, b.h, b.experts[i], b.weights[i], bank, b.fetches, b.x, shared=layer.shared)
    if len(step.rows):
        head(config, weights, ops, ws, step.rows, b.x, b.logits)


def tiny(rng: np.random.Generator, **changes: Any) -> tuple[Config, dict[str, F32]]:
    """A small configuration with every parameter random and no two dimensions equal.

    Rows are multiples of 256, so that every block type can hold them. Norms are random around one.
    """
    config = Config(
        n_layer=4, n_embd=256, n_head=10, n_head_kv=5, head_dim=128, n_vocab=301, n_ctx_train=640, rope_base=50000.0,
        rope_dims=96, interval=3, kernel=4, n_head_k=3, n_head_v=6, d_k=32, d_v=128, eps=1e-5,
        n_expert=13, n_expert_used=4, n_ff_exp=512, n_ff_shared=1024,
    )  # fmt: skip
    config = replace(config, **changes)
    return config, random_tensors(config, rng)
