"""Gemma 4 (26B-A4B, and the dense sizes): window and full attention of different shapes, dense and expert FFN at once.

x += rms(attention(rms(x))); x = (x + rms(ffn)) * s. The embedding is scaled by sqrt(D). Q and K have RMS norms per head
with weights, V one without; scores are not scaled. Full layers have heads of their own size and number; they may lack a
V matrix, and then the raw keys are the values. Their RoPE is "proportional": frequencies of the whole head, divided by
the factors of `rope_freqs` (1e30: not rotated). A layer's FFN is a dense GeGLU, and beside it, with norms of their own,
experts whose router sees rms(x) times a vector. The last layers may read the cache of an earlier one of their kind.
Logits are capped by tanh. Reference: `transformers` gemma4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.formats.gguf import GGUFFile
from engine.formats.quants import QTensor, dequantize
from engine.ground.errors import ModelFormatError, UnsupportedModelError
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
    matrix,
    random_tensors,
)
from engine.ops import F32, Gating
from engine.ops.arithmetic import rope_table

ARCH = "gemma4"
# Of the vision and audio encoders and their projectors, in files that hold a whole multimodal model.
OTHER_SENSES = ("v.", "a.", "mm.")
BORROWED = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")  # of a layer that reads another's cache


@dataclass(frozen=True, slots=True)
class Config(Common):
    """Hyper-parameters. windowed: which layers see only `window` positions; those have the sizes named _swa.

    n_head_kv: of every layer. n_ff: of every layer's dense FFN. n_shared: last layers that read another layer's cache.
    rope_factors: what divides the frequencies of full layers, one a pair of dimensions. k_eq_v: full layers have no V
    matrix. n_expert is 0 in dense models. softcap: of logits, 0 for none.
    """

    n_head: int
    n_head_kv: tuple[int, ...]
    head_dim_swa: int
    n_ff: tuple[int, ...]
    windowed: tuple[bool, ...]
    window: int
    n_shared: int
    rope_factors: tuple[float, ...]
    rope_base_swa: float
    rope_dims_swa: int
    k_eq_v: bool = True
    softcap: float = 0.0

    @classmethod
    def read(cls, keys: Keys) -> Config:
        """The configuration that the keys describe; a variant that is not implemented is refused by name."""
        file = keys.file
        if keys.size("embedding_length_per_layer_input", 0, 0):
            raise keys.missing(
                "per-layer input embeddings (E2B, E4B)",
                hint="the 26B-A4B mixture and the 12B and 31B dense models have none",
            )
        common = keys.common(experts=keys.size("expert_count", 0, 0) > 0)
        n_layer, head_dim, head_dim_swa = common["n_layer"], common["head_dim"], keys.head_dim(kind="_swa")
        if "rope_freqs.weight" not in file.tensors:
            raise ModelFormatError("tensor rope_freqs.weight is missing")
        windowed = keys.flags("attention.sliding_window_pattern", n_layer)
        full = [i for i in range(n_layer) if not windowed[i]]
        values = (f"blk.{full[0]}.{name}.weight" for name in ("attn_v", "attn_qkv")) if full else ()
        factors = dequantize(matrix(file, "rope_freqs.weight", (head_dim // 2,)))
        config = cls(
            **common,
            n_head=keys.size("attention.head_count"),
            n_head_kv=keys.sizes("attention.head_count_kv", n_layer),
            head_dim_swa=head_dim_swa,
            n_ff=keys.sizes("feed_forward_length", n_layer),
            windowed=windowed,
            window=keys.size("attention.sliding_window"),
            n_shared=keys.size("attention.shared_kv_layers", 0, 0),
            rope_factors=tuple(float(x) for x in factors),
            rope_base_swa=keys.positive("rope.freq_base_swa", 10000.0, above=1.0),
            rope_dims_swa=keys.size("rope.dimension_count_swa", 2, head_dim_swa),
            k_eq_v=bool(full) and not any(name in file.tensors for name in values),
            softcap=keys.real("final_logit_softcapping", 0.0, least=0.0),
        )
        config._check(keys)
        return config

    def _check(self, keys: Keys) -> None:
        if keys.size("rope.dimension_count", 2, self.head_dim) != self.head_dim:
            raise keys.missing(
                "full layers that rotate less than the whole head",
                hint="published files name the unrotated pairs in rope_freqs.weight",
            )
        keys.expect("attention.scale", 1.0)
        check_heads(self.n_head, self.n_head_kv)
        check_rope(self.head_dim, self.head_dim)
        check_rope(self.rope_dims_swa, self.head_dim_swa)
        own = set(self.windowed[: self.n_layer - self.n_shared])
        if self.n_shared >= self.n_layer or not own >= set(self.windowed):
            raise ModelFormatError(f"the last {self.n_shared} layers share caches that no layer before them owns")
        for kind in own:
            if len({n for n, windowed in zip(self.n_head_kv, self.windowed, strict=True) if windowed == kind}) > 1:
                raise UnsupportedModelError(f"{ARCH} with KV heads {self.n_head_kv} is not implemented")

    def metadata(self) -> dict[str, Any]:
        """The GGUF keys that `from_gguf` reads back (tests and the writer of full-shape models)."""
        values: dict[str, Any] = {
            "embedding_length_per_layer_input": 0,
            "feed_forward_length": self.n_ff[0] if len(set(self.n_ff)) == 1 else list(self.n_ff),
            "attention.head_count": self.n_head,
            "attention.head_count_kv": list(self.n_head_kv),
            "attention.key_length_swa": self.head_dim_swa,
            "attention.value_length_swa": self.head_dim_swa,
            "attention.sliding_window": self.window,
            "attention.sliding_window_pattern": list(self.windowed),
            "attention.shared_kv_layers": self.n_shared,
            "rope.freq_base_swa": self.rope_base_swa,
            "rope.dimension_count": self.head_dim,
            "rope.dimension_count_swa": self.rope_dims_swa,
        }
        if self.softcap:
            values["final_logit_softcapping"] = self.softcap
        return self.written(ARCH, values)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The caches of full layers, and of window layers; the last layers own none."""
        groups = []
        for windowed, head_dim, window in ((False, self.head_dim, 0), (True, self.head_dim_swa, self.window)):
            layers = tuple(i for i in range(self.n_layer - self.n_shared) if self.windowed[i] == windowed)
            if layers:
                groups.append(KVGroup(layers, self.n_head_kv[layers[0]], head_dim, window))
        return tuple(groups)

    def kv_layer(self, layer: int) -> int | None:
        """The layer whose cache a layer reads: its own, or that of the last owner of its kind."""
        owners = range(self.n_layer - self.n_shared)
        return layer if layer in owners else max(i for i in owners if self.windowed[i] == self.windowed[layer])

    @property
    def widths(self) -> Widths:
        """The widest of any layer; a layer's scratch for attention also holds a row of the residual's width."""
        head_dim = max(self.head_dim_of(i) for i in range(self.n_layer))
        return Widths(
            self.n_head, max(self.n_head * head_dim, self.n_embd), max(self.n_head_kv), head_dim,
            max(*self.n_ff, self.n_ff_exp),
        )  # fmt: skip

    def head_dim_of(self, layer: int) -> int:
        """Dimensions of a head of a layer."""
        return self.head_dim_swa if self.windowed[layer] else self.head_dim

    def has_v(self, layer: int) -> bool:
        """Whether a layer that owns a cache has a V matrix."""
        return self.windowed[layer] or not self.k_eq_v

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor and its shape, slowest dimension first; `output` (tied) and layer scales may be absent."""
        D, E = self.n_embd, self.n_expert
        shapes = ends(self.n_vocab, D) | {"rope_freqs.weight": (self.head_dim // 2,)}
        del shapes["output.weight"]
        for i in range(self.n_layer):
            p, head_dim = f"blk.{i}.", self.head_dim_of(i)
            shapes |= attention_shapes(p, D, self.n_head * head_dim, self.n_head_kv[i] * head_dim, head_dim)
            for name in self._without(i):
                del shapes[p + name]
            shapes |= ffn_shapes(p, D, self.n_ff[i]) | {p + "layer_output_scale.weight": (1,)}
            norms = ["post_attention_norm", "ffn_norm", "post_ffw_norm"]
            if E:
                shapes |= expert_shapes(p, D, E, self.n_ff_exp)
                shapes |= {p + "ffn_gate_inp.scale": (D,), p + "ffn_down_exps.scale": (E,)}
                norms += ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"]
            shapes |= {f"{p}{name}.weight": (D,) for name in norms}
        return shapes

    def _without(self, layer: int) -> tuple[str, ...]:
        """What a layer's attention does not have."""
        if self.kv_layer(layer) != layer:
            return BORROWED
        return () if self.has_v(layer) else ("attn_v.weight",)


@dataclass(frozen=True, slots=True)
class MoE:
    """What a layer's experts need besides them: norms [D], and a router with a scale for every expert's weight.

    router_norm: the vector of the router's input, divided by sqrt(D).
    """

    router_norm: F32
    router: QTensor
    gating: Gating
    pre_norm: F32
    post_norm: F32
    dense_post_norm: F32


@dataclass(frozen=True, slots=True)
class Layer(AttentionLayer):
    """Weights of one layer, its experts apart (see Residency)."""

    attention: AttentionWeights
    post_attention_norm: F32
    ffn_norm: F32
    ffn: Dense
    moe: MoE | None
    post_ffw_norm: F32
    out_scale: float


def load(file: GGUFFile, config: Config) -> Weights[Layer]:
    """Map every tensor with its shape checked; an unknown tensor is refused, not ignored."""
    shapes = config.tensors() | {"output.weight": (config.n_vocab, config.n_embd)}
    borrowers = range(config.n_layer - config.n_shared, config.n_layer)
    unused = {f"blk.{i}.{name}" for i in borrowers for name in BORROWED}
    tensors = Tensors(file, shapes, lambda name: name.startswith(OTHER_SENSES) or name in unused)
    layers = [_layer(tensors.layer(i), config, i) for i in range(config.n_layer)]
    experts = [tensors.layer(i).experts(activation="gelu") for i in config.moe_layers]
    return tensors.model(layers, experts, embed_scale=config.n_embd**0.5, softcap=config.softcap)


def _layer(t: Tensors, config: Config, i: int) -> Layer:
    owns = config.kv_layer(i) == i
    moe = None
    if config.n_expert:
        moe = MoE(
            router_norm=t.values("ffn_gate_inp.scale") * np.float32(config.n_embd**-0.5),
            router=t.floats("ffn_gate_inp.weight"),
            gating=t.gating(Gating(expert_scale=t.values("ffn_down_exps.scale"))),
            pre_norm=t.values("pre_ffw_norm_2.weight"),
            post_norm=t.values("post_ffw_norm_2.weight"),
            dense_post_norm=t.values("post_ffw_norm_1.weight"),
        )
    attention, v_norm = t.attention(), np.ones(config.head_dim_of(i), np.float32) if owns else None
    return Layer(
        attention=replace(attention, inputs=replace(attention.inputs, v_norm=v_norm)),
        post_attention_norm=t.values("post_attention_norm.weight"),
        ffn_norm=t.values("ffn_norm.weight"),
        ffn=t.ffn(),
        moe=moe,
        post_ffw_norm=t.values("post_ffw_norm.weight"),
        out_scale=float(t.values("layer_output_scale.weight")[0]) if t.has("layer_output_scale.weight") else 1.0,
    )


def rope_tables(config: Config, n_ctx: int) -> tuple[F32, ...]:
    """A table for full layers, and one for window layers."""
    full = config.rope_table(n_ctx, config.head_dim, np.asarray(config.rope_factors))
    return full, rope_table(n_ctx, config.rope_dims_swa, config.rope_base_swa)


def layer(p: Pass[Config], i: int, w: Layer) -> None:
    """Layer i of a step."""
    c = p.config
    ops, ws, b, windowed = p.ops, p.ws, p.b, c.windowed[i]
    p.attention(i, w.attention, c.head_dim_of(i), 1.0, rope=windowed, window=c.window if windowed else 0, to=b.y)
    other, moe = b.attended(c.n_embd), w.moe  # free after attention
    then = [(w.ffn_norm, other)] + ([] if moe is None else [(moe.pre_norm, b.h)])
    ops.add_norm(ws, b.y, w.post_attention_norm, c.eps, b.x, then=then)
    ops.dense_ffn(ws, other, w.ffn.gate, w.ffn.up, w.ffn.down, b.y, activation="gelu", add=False)
    if moe is None:
        ops.add_norm(ws, b.y, w.post_ffw_norm, c.eps, b.x, scale=w.out_scale)
        return
    p.route(i, moe.router_norm, moe.router, moe.gating, h=other)
    p.experts(i, to=other)
    ops.add_norms(
        ws, b.y, moe.dense_post_norm, other, moe.post_norm, w.post_ffw_norm, c.eps, b.x, scale=w.out_scale
    )  # fmt: skip


def tiny(rng: np.random.Generator, **changes: Any) -> tuple[Config, dict[str, F32]]:
    """A small configuration with every parameter random, every kind of layer and no two dimensions equal.

    Rows are multiples of 256, so that every block type can hold them. Norms are random around one.
    """
    config = Config(
        n_layer=6, n_embd=256, n_head=12, n_head_kv=(3, 1, 3, 1, 3, 1), head_dim=128, head_dim_swa=64, n_ff=(1024,) * 6,
        n_vocab=301, n_ctx_train=640, windowed=(True, False) * 3, window=13, n_shared=2, rope_base=5000.0,
        rope_factors=(1.0,) * 16 + (1e30,) * 48, rope_base_swa=90.0, rope_dims_swa=64, eps=1e-5, softcap=3.0,
        n_expert=11, n_expert_used=5, n_ff_exp=512,
    )  # fmt: skip
    config = replace(config, **changes)

    def own(name: str, values: F32) -> F32 | None:
        varied = 1 + np.float32(0.3) * values
        if name == "rope_freqs.weight":
            return np.asarray(config.rope_factors, np.float32)
        if name.endswith("ffn_gate_inp.scale"):  # the router's logits have a spread of about one
            return np.float32(config.n_embd**0.5) * varied
        if "attn_q_norm" in name or "attn_k_norm" in name:  # nothing else scales the scores
            return np.float32(values.shape[0] ** -0.25) * varied
        if name == "token_embd.weight":
            return values * np.float32(config.n_embd**-0.5)
        return varied if "scale" in name else None

    return config, random_tensors(config.tensors(), rng, own)
