"""Qwen3.5-MoE and Qwen3.6-35B-A3B: the layers of `qwen35` with a mixture of experts and a gated shared expert.

x += mixer(rms(x)); x += moe(h) + sigmoid(g . h) * shared(h), where h = rms(x). Router softmax over all experts, the A
largest, renormalized. Reference: `transformers` qwen3_5_moe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.formats.gguf import GGUFFile
from engine.formats.quants import QTensor
from engine.memory.residency import ExpertTensors
from engine.models.layers import Pass
from engine.models.loading import AttentionWeights, Tensors, Weights, random_tensors
from engine.models.qwen35 import (
    VISION,
    Config,
    Delta,
    MixerLayer,
    load_attention,
    load_mixer,
    mix,
    next_shapes,
    own_values,
    replay,
    rope_tables,
)
from engine.ops import F32, Gating, SharedExpert

__all__ = ["ARCH", "Config", "Layer", "layer", "load", "next_layer", "next_shapes", "replay", "rope_tables", "tiny"]

ARCH = "qwen35moe"
GATING = Gating()


@dataclass(frozen=True, slots=True)
class Layer(MixerLayer):
    """Weights of one layer, its experts apart (see Residency)."""

    mixer: AttentionWeights | Delta
    ffn_norm: F32
    router: QTensor
    gating: Gating
    shared: SharedExpert


def load(file: GGUFFile, config: Config) -> Weights[Layer]:
    """Map every tensor with its shape checked; an unknown tensor is refused, not ignored."""
    tensors = Tensors(file, config.tensors(), lambda name: name.startswith(VISION))
    layers, experts = [], []
    for i in range(config.n_layer):
        t = tensors.layer(i)
        layers.append(_layer(t, config, load_mixer(t, config, i)))
        experts.append(t.experts())
    return tensors.model(layers, experts)


def _layer(t: Tensors, config: Config, mixer: AttentionWeights | Delta) -> Layer:
    shared = t.shared(replace(t.floats("ffn_gate_inp_shexp.weight"), shape=(1, config.n_embd)))
    norm, router = t.values("post_attention_norm.weight"), t.floats("ffn_gate_inp.weight")
    return Layer(mixer, norm, router, t.gating(GATING), shared)


def next_layer(t: Tensors, config: Config) -> tuple[Layer, tuple[ExpertTensors, ...]]:
    """The layer of a block that predicts a further token (nextn.py), and its experts."""
    return _layer(t, config, load_attention(t, config)), (t.experts(),)


def layer(p: Pass[Config], i: int, w: Layer) -> None:
    """Layer i of a step."""
    mix(p, i, w.mixer)
    p.route(i, w.ffn_norm, w.router, w.gating)
    p.experts(i, w.shared)


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
    return config, random_tensors(config.tensors(), rng, own_values)
