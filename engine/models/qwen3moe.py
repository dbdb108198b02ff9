"""Qwen3-MoE (Qwen3-30B-A3B and its like): pre-norm attention and a mixture of experts in every layer.

x += attention(rms(x)); x += moe(rms(x)). Per-head RMS norms of Q and K before NeoX RoPE; router
softmax over all experts, the A largest, renormalized. Reference: `transformers` qwen3_moe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.formats.gguf import GGUFFile
from engine.formats.quants import QTensor
from engine.memory.shape import KVGroup
from engine.models.config import Common, Keys, check_heads, check_rope
from engine.models.layers import Pass, Widths
from engine.models.loading import (
    AttentionLayer,
    AttentionWeights,
    Tensors,
    Weights,
    attention_shapes,
    ends,
    expert_shapes,
    random_tensors,
)
from engine.ops import F32, Gating

ARCH = "qwen3moe"
GATING = Gating()


@dataclass(frozen=True, slots=True)
class Config(Common):
    """Hyper-parameters, named as in GGUF."""

    n_head: int
    n_head_kv: int
    gating: Gating = GATING

    @classmethod
    def read(cls, keys: Keys) -> Config:
        """The configuration that the keys describe; a variant that is not implemented is refused by name."""
        n_head = keys.size("attention.head_count")
        config = cls(
            **keys.common(head_dim=keys.size("embedding_length") // n_head, rope_base=10000.0),
            n_head=n_head,
            n_head_kv=keys.size("attention.head_count_kv"),
            gating=Gating(renormalize=keys.flag("expert_weights_norm", True)),
        )
        check_heads(config.n_head, config.n_head_kv)
        check_rope(config.head_dim, config.head_dim)
        keys.expect("rope.dimension_count", config.head_dim)
        keys.expect("attention.scale", config.head_dim**-0.5)
        return config

    def metadata(self) -> dict[str, Any]:
        """The GGUF keys that `from_gguf` reads back (tests and the writer of full-shape models)."""
        own = {
            "feed_forward_length": self.n_ff_exp * self.n_expert_used,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
        }
        return self.written(ARCH, own)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Caches of one kind: every layer sees all positions."""
        return (KVGroup(self.moe_layers, self.n_head_kv, self.head_dim),)

    @property
    def widths(self) -> Widths:
        """The widest of any layer."""
        return Widths(self.n_head, self.n_head * self.head_dim, self.n_head_kv, self.head_dim, self.n_ff_exp)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor and its shape, slowest dimension first (`output.weight` may be absent: tied)."""
        D, q, kv = self.n_embd, self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        shapes = ends(self.n_vocab, D)
        for i in range(self.n_layer):
            p = f"blk.{i}."
            shapes |= attention_shapes(p, D, q, kv, self.head_dim) | {p + "ffn_norm.weight": (D,)}
            shapes |= expert_shapes(p, D, self.n_expert, self.n_ff_exp)
        return shapes


@dataclass(frozen=True, slots=True)
class Layer(AttentionLayer):
    """Weights of one layer, its experts apart (see Residency)."""

    attention: AttentionWeights
    ffn_norm: F32
    router: QTensor
    gating: Gating


def load(file: GGUFFile, config: Config) -> Weights[Layer]:
    """Map every tensor with its shape checked; an unknown tensor is refused, not ignored."""
    tensors = Tensors(file, config.tensors())
    layers, experts = [], []
    for t in map(tensors.layer, range(config.n_layer)):
        norm, router = t.values("ffn_norm.weight"), t.floats("ffn_gate_inp.weight")
        layers.append(Layer(t.attention(), norm, router, t.gating(config.gating)))
        experts.append(t.experts())
    return tensors.model(layers, experts)


def rope_tables(config: Config, n_ctx: int) -> tuple[F32, ...]:
    """One table for all layers, which rotate whole heads."""
    return (config.rope_table(n_ctx, config.head_dim),)


def layer(p: Pass[Config], i: int, w: Layer) -> None:
    """Layer i of a step."""
    c = p.config
    p.attention(i, w.attention, c.head_dim, 1.0 / float(np.sqrt(c.head_dim)))
    p.route(i, w.ffn_norm, w.router, w.gating)
    p.experts(i)


def tiny(rng: np.random.Generator, **changes: Any) -> tuple[Config, dict[str, F32]]:
    """A small configuration with every parameter random and no two dimensions equal.

    Rows are multiples of 256, so that every block type can hold them. Norms are random around one.
    """
    config = Config(
        n_layer=3, n_embd=256, n_head=8, n_head_kv=4, head_dim=96, n_expert=11, n_expert_used=5, n_ff_exp=512,
        n_vocab=301, n_ctx_train=640, rope_base=50000.0, eps=1e-5,
    )  # fmt: skip
    config = replace(config, **changes)
    return config, random_tensors(config.tensors(), rng)
