"""Laguna (Laguna-XS.2 and its like): window and full attention with output gates, a mixture after dense layers.

x += attention(rms(x)); x += ffn(rms(x)). Per-head RMS norms of Q and K before NeoX RoPE, whose base and width differ
between full layers (YaRN) and window layers (plain). The attention output times softplus(gate), a value a head or a
value an element. The first layers have a dense FFN; in the others a router of sigmoid scores, whose choice a bias
corrects, and one shared expert. Reference: `transformers` laguna.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.formats.gguf import GGUFFile
from engine.formats.quants import QTensor
from engine.ground.errors import ModelFormatError
from engine.memory.shape import KVGroup
from engine.models.config import Common, Keys, check_heads, check_rope
from engine.models.layers import Pass, Widths
from engine.models.loading import (
    AttentionLayer,
    AttentionWeights,
    Dense,
    Tensors,
    Weights,
    attention_shapes,
    ends,
    expert_shapes,
    ffn_shapes,
    random_tensors,
)
from engine.models.scaling import Scaling
from engine.ops import F32, Gating, GatingKind, SharedExpert
from engine.ops.arithmetic import rope_table

ARCH = "laguna"
PERIOD = 4  # of full attention layers, where the file does not say which they are
GATING_FUNCTIONS: dict[int, GatingKind] = {1: "softmax", 2: "sigmoid"}  # GGUF's numbers


@dataclass(frozen=True, slots=True)
class Config(Common):
    """Hyper-parameters. n_head: of every layer. windowed: which layers see only `window` positions.

    n_dense: leading layers with an FFN of n_ff. rope_dims: of full layers; the _swa ones of window layers, whose
    positions are never scaled. elements: the attention gate has a value an element, not a head.
    """

    n_head: tuple[int, ...]
    n_head_kv: int
    n_dense: int
    n_ff: int
    n_ff_shared: int
    windowed: tuple[bool, ...]
    window: int
    rope_dims: int
    rope_base_swa: float
    rope_dims_swa: int
    gating: GatingKind = "sigmoid"
    expert_scale: float = 1.0
    renormalize: bool = True
    elements: bool = False

    @classmethod
    def read(cls, keys: Keys) -> Config:
        """The configuration that the keys describe; a variant that is not implemented is refused by name."""
        if keys.size("expert_shared_count", default=1) != 1:
            raise keys.missing("several shared experts")
        function = keys.size("expert_gating_func", default=2)
        if function not in GATING_FUNCTIONS:
            raise keys.missing(f"expert_gating_func {function}")
        common = keys.common()
        n_layer, head_dim, rope_base = common["n_layer"], common["head_dim"], common["rope_base"]
        n_head, window = keys.sizes("attention.head_count", n_layer), keys.size("attention.sliding_window", 0, 0)
        rope_dims, n_dense = keys.size("rope.dimension_count", 2), keys.size("leading_dense_block_count", 0)
        gate = keys.file.tensors.get("blk.0.attn_gate.weight")
        config = cls(
            **common,
            n_head=n_head,
            n_head_kv=keys.size("attention.head_count_kv"),
            n_dense=n_dense,
            n_ff=keys.size("feed_forward_length") if n_dense else 0,
            n_ff_shared=keys.size("expert_shared_feed_forward_length"),
            windowed=_windowed(keys, n_layer, window),
            window=window,
            rope_dims=rope_dims,
            rope_base_swa=keys.positive("rope.freq_base_swa", rope_base, above=1.0),
            rope_dims_swa=keys.size("rope.dimension_count_swa", 2, rope_dims),
            gating=GATING_FUNCTIONS[function],
            expert_scale=keys.real("expert_weights_scale", 1.0) or 1.0,
            renormalize=keys.flag("expert_weights_norm", True),
            elements=gate is not None and gate.shape[0] == n_head[0] * head_dim,
        )
        if n_dense >= n_layer:
            raise ModelFormatError(f"{n_dense} dense layers of {n_layer}")
        check_heads(config.n_head, config.n_head_kv)
        for n in (config.rope_dims, config.rope_dims_swa):
            check_rope(n, head_dim)
        keys.expect("attention.scale", head_dim**-0.5)
        for kind in ("key", "value"):
            keys.expect(f"attention.{kind}_length_swa", head_dim)
        return config

    def metadata(self) -> dict[str, Any]:
        """The GGUF keys that `from_gguf` reads back (tests and the writer of full-shape models)."""
        values: dict[str, Any] = {
            "vocab_size": self.n_vocab,
            "feed_forward_length": self.n_ff,
            "attention.head_count": list(self.n_head),
            "attention.head_count_kv": self.n_head_kv,
            "rope.dimension_count": self.rope_dims,
            "leading_dense_block_count": self.n_dense,
            "expert_shared_feed_forward_length": self.n_ff_shared,
            "expert_gating_func": next(n for n, name in GATING_FUNCTIONS.items() if name == self.gating),
            "expert_weights_scale": self.expert_scale,
            "expert_weights_norm": self.renormalize,
        }
        if self.window:
            values |= {
                "attention.sliding_window": self.window,
                "attention.sliding_window_pattern": list(self.windowed),
                "rope.freq_base_swa": self.rope_base_swa,
                "rope.dimension_count_swa": self.rope_dims_swa,
            }
        return self.written(ARCH, values)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts: all after the dense ones."""
        return tuple(range(self.n_dense, self.n_layer))

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The caches of full layers, and of window layers."""
        full, windowed = (
            tuple(i for i in range(self.n_layer) if self.windowed[i] == kind) for kind in (False, True)
        )  # fmt: skip
        groups = (
            KVGroup(full, self.n_head_kv, self.head_dim),
            KVGroup(windowed, self.n_head_kv, self.head_dim, self.window),
        )
        return tuple(group for group in groups if group.layers)

    @property
    def widths(self) -> Widths:
        """The widest of any layer."""
        n_head = max(self.n_head)
        q = n_head * self.head_dim
        n_ff = max(self.n_ff, self.n_ff_exp, self.n_ff_shared)
        return Widths(n_head, q, self.n_head_kv, self.head_dim, n_ff, n_gate=q if self.elements else n_head)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor and its shape, slowest dimension first (`output.weight` may be absent: tied)."""
        D, kv = self.n_embd, self.n_head_kv * self.head_dim
        shapes = ends(self.n_vocab, D)
        for i, n_head in enumerate(self.n_head):
            p, q = f"blk.{i}.", n_head * self.head_dim
            shapes |= attention_shapes(p, D, q, kv, self.head_dim)
            shapes |= {p + "attn_gate.weight": (q if self.elements else n_head, D), p + "ffn_norm.weight": (D,)}
            if i < self.n_dense:
                shapes |= ffn_shapes(p, D, self.n_ff)
                continue
            shapes |= expert_shapes(p, D, self.n_expert, self.n_ff_exp) | {p + "exp_probs_b.bias": (self.n_expert,)}
            shapes |= ffn_shapes(p, D, self.n_ff_shared, "_shexp")
        return shapes


def _windowed(keys: Keys, n_layer: int, window: int) -> tuple[bool, ...]:
    """Which layers have a window: as an array or a period says, by default all but every fourth, from the first on."""
    key = "attention.sliding_window_pattern"
    if not window:
        return (False,) * n_layer
    if f"{ARCH}.{key}" in keys.file.metadata and not keys.is_number(key):
        return keys.flags(key, n_layer)
    period = keys.size(key, default=PERIOD)
    return tuple(i % period != 0 for i in range(n_layer))


@dataclass(frozen=True, slots=True)
class MoE:
    """A router and the shared expert; the experts are apart (see Residency)."""

    router: QTensor
    gating: Gating
    shared: SharedExpert


@dataclass(frozen=True, slots=True)
class Layer(AttentionLayer):
    """Weights of one layer."""

    attention: AttentionWeights
    ffn_norm: F32
    ffn: Dense | MoE


def load(file: GGUFFile, config: Config) -> Weights[Layer]:
    """Map every tensor with its shape checked; an unknown tensor is refused, not ignored."""
    tensors = Tensors(file, config.tensors())
    layers, experts = [], []
    for i in range(config.n_layer):
        t = tensors.layer(i)
        ffn: Dense | MoE
        if i < config.n_dense:
            ffn = t.ffn()
        else:
            gating = Gating(config.gating, config.renormalize, config.expert_scale, bias=t.values("exp_probs_b.bias"))
            ffn = MoE(t.floats("ffn_gate_inp.weight"), t.gating(gating), t.shared())
            experts.append(t.experts())
        layers.append(Layer(t.attention("attn_gate.weight"), t.values("ffn_norm.weight"), ffn))
    return tensors.model(layers, experts)


def rope_tables(config: Config, n_ctx: int) -> tuple[F32, ...]:
    """A table for full layers, and one for window layers."""
    return config.rope_table(n_ctx, config.rope_dims), rope_table(n_ctx, config.rope_dims_swa, config.rope_base_swa)


def layer(p: Pass[Config], i: int, w: Layer) -> None:
    """Layer i of a step."""
    c = p.config
    windowed, m = c.windowed[i], i - c.n_dense
    window = c.window if windowed else 0
    p.attention(i, w.attention, c.head_dim, c.head_dim**-0.5, rope=windowed, window=window, gate_kind="softplus")
    if isinstance(w.ffn, Dense):
        p.dense(w.ffn_norm, w.ffn)
        return
    p.route(m, w.ffn_norm, w.ffn.router, w.ffn.gating)
    p.experts(m, w.ffn.shared)


def tiny(rng: np.random.Generator, **changes: Any) -> tuple[Config, dict[str, F32]]:
    """A small configuration with every parameter random, every kind of layer and no two dimensions equal.

    Rows are multiples of 256, so that every block type can hold them. Norms are random around one.
    """
    config = Config(
        n_layer=6, n_embd=256, n_head=(20, 12, 12, 12, 20, 12), n_head_kv=2, head_dim=64, n_dense=1, n_ff=1536,
        n_expert=11, n_expert_used=5, n_ff_exp=512, n_ff_shared=1024, n_vocab=301, n_ctx_train=640,
        windowed=(False, True, True, True, False, True), window=13, rope_base=700.0, rope_dims=32,
        scaling=Scaling("yarn", factor=4.0, n_ctx=200, beta_fast=8.0), rope_base_swa=90.0, rope_dims_swa=48, eps=1e-5,
        expert_scale=2.5,
    )  # fmt: skip
    config = replace(config, **changes)

    def own(name: str, values: F32) -> F32 | None:
        return np.float32(0.2) * values if name.endswith("exp_probs_b.bias") else None  # about the scores' spread

    return config, random_tensors(config.tensors(), rng, own)
