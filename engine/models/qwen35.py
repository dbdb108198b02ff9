"""Qwen3.5 and Qwen3.6: gated DeltaNet layers, every few of them one of gated full attention; here with a dense FFN.

x += mixer(rms(x)); x += ffn(rms(x)). An attention layer: per-head RMS norms of Q and K, NeoX RoPE over a part of the
head, the output times sigmoid(gate), where `attn_q` holds Q and gate head by head. A DeltaNet layer: short causal
convolution, then the gated delta rule on one state a value head. `qwen35moe` is the same with experts. The files are
multimodal models'; M-RoPE gives a text token one position in all its sections, which is plain RoPE.
Reference: `transformers` qwen3_5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.formats.gguf import GGUFFile
from engine.formats.quants import QTensor
from engine.ground.errors import ModelFormatError
from engine.memory.residency import ExpertTensors
from engine.memory.shape import DeltaShape, KVGroup
from engine.models.config import Common, Keys, check_heads, check_rope
from engine.models.layers import Pass, Widths
from engine.models.loading import (
    AttentionWeights,
    Dense,
    Shapes,
    Tensors,
    Weights,
    attention_shapes,
    ends,
    expert_shapes,
    ffn_shapes,
    random_tensors,
)
from engine.ops import F32, DeltaInput

ARCH = "qwen35"
L2_EPS = 1e-6  # of the norms of q and k in a DeltaNet layer; a constant in every implementation
# Of the vision encoder and its projector, in files that hold a whole multimodal model.
VISION = ("v.", "mm.")


@dataclass(frozen=True, slots=True)
class Config(Common):
    """Hyper-parameters of qwen35 (n_expert 0) and qwen35moe (n_ff 0).

    interval: layer i is full attention if interval divides i + 1. DeltaNet layers have n_head_k heads of d_k for q
    and k, n_head_v of d_v for v; kernel taps of the convolution. n_ff_shared: of the shared expert.
    """

    n_head: int
    n_head_kv: int
    rope_dims: int
    interval: int
    kernel: int
    n_head_k: int
    n_head_v: int
    d_k: int
    d_v: int
    n_ff: int = 0
    n_ff_shared: int = 0

    @classmethod
    def read(cls, keys: Keys) -> Config:
        """The configuration of either architecture; a variant that is not implemented is refused by name."""
        moe = keys.arch != ARCH
        n_head_v, inner = keys.size("ssm.time_step_rank"), keys.size("ssm.inner_size")
        if inner % n_head_v:
            raise ModelFormatError(f"{keys.arch}.ssm.inner_size is {inner}, which {n_head_v} heads cannot share")
        config = cls(
            **keys.common(experts=moe),
            n_head=keys.size("attention.head_count"),
            n_head_kv=keys.size("attention.head_count_kv"),
            rope_dims=keys.size("rope.dimension_count", 2),
            interval=_interval(keys),
            kernel=keys.size("ssm.conv_kernel", 2),
            n_head_k=keys.size("ssm.group_count"),
            n_head_v=n_head_v,
            d_k=keys.size("ssm.state_size"),
            d_v=inner // n_head_v,
            n_ff=0 if moe else keys.size("feed_forward_length"),
        )
        if moe:
            keys.expect("expert_shared_count", 1)
            n_ff_shared = keys.size("expert_shared_feed_forward_length", default=config.n_ff_exp)
            config = replace(config, n_ff_shared=n_ff_shared)
        config._check(keys)
        return config

    def _check(self, keys: Keys) -> None:
        if self.interval > self.n_layer:
            raise ModelFormatError(
                f"{self.arch} with {self.n_layer} layers, of which every {self.interval}th is full attention"
            )
        recurrent = [i in self.delta.layers for i in range(self.n_layer)]
        if keys.items("attention.recurrent_layers", recurrent)[: self.n_layer] != recurrent:
            raise keys.missing(f"attention layers that are others than every {self.interval}th")
        if self.n_head_v % self.n_head_k:
            raise ModelFormatError(f"{self.n_head_v} value heads cannot share {self.n_head_k} key heads evenly")
        check_heads(self.n_head, self.n_head_kv)
        check_rope(self.rope_dims, self.head_dim)
        keys.expect("attention.scale", self.head_dim**-0.5)
        keys.items("rope.dimension_sections", [])  # one position in all of them is plain RoPE

    @property
    def arch(self) -> str:
        """Name of the architecture, which the metadata keys begin with."""
        return "qwen35moe" if self.n_expert else ARCH

    def metadata(self) -> dict[str, Any]:
        """The GGUF keys that `from_gguf` reads back (tests and the writer of full-shape models)."""
        pairs = self.rope_dims // 2
        values = {
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "rope.dimension_count": self.rope_dims,
            "rope.dimension_sections": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0],
            "full_attention_interval": self.interval,
            "ssm.conv_kernel": self.kernel,
            "ssm.state_size": self.d_k,
            "ssm.group_count": self.n_head_k,
            "ssm.time_step_rank": self.n_head_v,
            "ssm.inner_size": self.n_head_v * self.d_v,
        }
        if self.n_expert:
            values["expert_shared_feed_forward_length"] = self.n_ff_shared
        else:
            values["feed_forward_length"] = self.n_ff
        return self.written(self.arch, values)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The caches: one for each attention layer, all of one kind."""
        return (KVGroup(tuple(range(self.interval - 1, self.n_layer, self.interval)), self.n_head_kv, self.head_dim),)

    def kv_layer(self, layer: int) -> int | None:
        """The layer whose cache a layer reads: its own, or none in a DeltaNet layer."""
        return layer if (layer + 1) % self.interval == 0 else None

    @property
    def delta(self) -> DeltaShape:
        """The recurrent layers."""
        layers = tuple(i for i in range(self.n_layer) if (i + 1) % self.interval)
        return DeltaShape(layers, self.kernel, self.n_mixed, self.n_head_v, self.d_k, self.d_v)

    @property
    def n_mixed(self) -> int:
        """Channels of a DeltaNet layer's convolution: q, k, v."""
        return 2 * self.n_head_k * self.d_k + self.n_head_v * self.d_v

    @property
    def widths(self) -> Widths:
        """The widest of any layer."""
        q = self.n_head * self.head_dim
        n_ff = max(self.n_ff, self.n_ff_exp, self.n_ff_shared)
        return Widths(
            self.n_head, q, self.n_head_kv, self.head_dim, n_ff,
            n_gate=q, n_mixed=self.n_mixed, n_z=self.n_head_v * self.d_v, n_head_v=self.n_head_v,
        )  # fmt: skip

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor and its shape, slowest dimension first (`output.weight` may be absent: tied)."""
        shapes = ends(self.n_vocab, self.n_embd)
        for i in range(self.n_layer):
            shapes |= self.layer_shapes(f"blk.{i}.", full=self.kv_layer(i) is not None)
        return shapes

    def layer_shapes(self, p: str, full: bool) -> Shapes:
        """Those of a layer whose tensors' names begin with p; full: it is one of full attention."""
        D, hd = self.n_embd, self.head_dim
        q, kv, z = self.n_head * hd, self.n_head_kv * hd, self.n_head_v * self.d_v
        shapes: Shapes = {p + "post_attention_norm.weight": (D,)}
        if full:
            shapes |= attention_shapes(p, D, q, kv, hd) | {p + "attn_q.weight": (2 * q, D)}
        else:
            shapes |= {
                p + "attn_norm.weight": (D,),
                p + "attn_qkv.weight": (self.n_mixed, D),
                p + "attn_gate.weight": (z, D),
                p + "ssm_beta.weight": (self.n_head_v, D),
                p + "ssm_alpha.weight": (self.n_head_v, D),
                p + "ssm_conv1d.weight": (self.n_mixed, self.kernel),
                p + "ssm_dt.bias": (self.n_head_v,),
                p + "ssm_a": (self.n_head_v,),
                p + "ssm_norm.weight": (self.d_v,),
                p + "ssm_out.weight": (D, z),
            }
        if self.n_expert:
            shapes |= expert_shapes(p, D, self.n_expert, self.n_ff_exp)
            shapes |= ffn_shapes(p, D, self.n_ff_shared, "_shexp") | {p + "ffn_gate_inp_shexp.weight": (D,)}
        else:
            shapes |= ffn_shapes(p, D, self.n_ff)
        return shapes


def _interval(keys: Keys) -> int:
    """Every how many layers one is full attention; beside a list of the layers the number may be a default."""
    interval = keys.size("full_attention_interval", default=4)
    recurrent = keys.items("attention.recurrent_layers", [])
    return recurrent.index(False) + 1 if False in recurrent else interval


@dataclass(frozen=True, slots=True)
class Delta:
    """Weights of a DeltaNet layer's mixer, and its number among those layers.

    conv [C, kernel]; dt_bias and a = -exp(A_log) [H_v]; norm [d_v]; out [D, H_v * d_v].
    """

    number: int
    inputs: DeltaInput
    conv: F32
    dt_bias: F32
    a: F32
    norm: F32
    out: QTensor


class MixerLayer:
    """A layer that begins with either mixer."""

    __slots__ = ()
    mixer: AttentionWeights | Delta

    @property
    def norm(self) -> F32:
        """The one ahead of the mixer's products."""
        return self.mixer.inputs.norm


@dataclass(frozen=True, slots=True)
class Layer(MixerLayer):
    """Weights of one layer."""

    mixer: AttentionWeights | Delta
    ffn_norm: F32
    ffn: Dense


def load_mixer(t: Tensors, config: Config, i: int) -> AttentionWeights | Delta:
    """The weights of what mixes tokens in layer i."""
    if config.kv_layer(i) is not None:
        return load_attention(t, config)
    return Delta(
        number=config.delta.layers.index(i),
        inputs=DeltaInput(
            norm=t.values("attn_norm.weight"),
            qkv=t.matrix("attn_qkv.weight"),
            z=t.matrix("attn_gate.weight"),
            beta=t.matrix("ssm_beta.weight"),
            alpha=t.matrix("ssm_alpha.weight"),
        ),
        conv=t.values("ssm_conv1d.weight"),
        dt_bias=t.values("ssm_dt.bias"),
        a=t.values("ssm_a"),
        norm=t.values("ssm_norm.weight"),
        out=t.matrix("ssm_out.weight"),
    )


def load_attention(t: Tensors, config: Config) -> AttentionWeights:
    """Attention, where `attn_q` holds the query and the gate of every head."""
    both = t.attention()
    wq, gate = split_heads(both.inputs.wq, config.n_head)
    return replace(both, inputs=replace(both.inputs, wq=wq, gate=gate))


def split_heads(packed: QTensor, n_head: int) -> tuple[QTensor, QTensor]:
    """The first and the second half of every head's rows, as two matrices; rows are whole blocks, so bytes move."""
    rows, cols = packed.shape
    halves = packed.data.reshape(n_head, 2, -1).transpose(1, 0, 2)
    first, second = (packed.reordered(f"{packed.name}[{i}]", (rows // 2, cols), half) for i, half in enumerate(halves))
    return first, second


def load(file: GGUFFile, config: Config) -> Weights[Layer]:
    """Map every tensor with its shape checked; an unknown tensor is refused, not ignored."""
    tensors = Tensors(file, config.tensors(), lambda name: name.startswith(VISION))
    layers = []
    for i in range(config.n_layer):
        t = tensors.layer(i)
        layers.append(_layer(t, load_mixer(t, config, i)))
    return tensors.model(layers, [])


def _layer(t: Tensors, mixer: AttentionWeights | Delta) -> Layer:
    return Layer(mixer, t.values("post_attention_norm.weight"), t.ffn())


def next_shapes(config: Config, p: str) -> Shapes:
    """The tensors of the layer in a block that predicts a further token (nextn.py): a full one, whatever its number."""
    return config.layer_shapes(p, full=True)


def next_layer(t: Tensors, config: Config) -> tuple[Layer, tuple[ExpertTensors, ...]]:
    """That layer, and no experts."""
    return _layer(t, load_attention(t, config)), ()


def rope_tables(config: Config, n_ctx: int) -> tuple[F32, ...]:
    """One table for the attention layers."""
    return (config.rope_table(n_ctx, config.rope_dims),)


def layer(p: Pass[Config], i: int, w: Layer) -> None:
    """Layer i of a step."""
    mix(p, i, w.mixer)
    p.dense(w.ffn_norm, w.ffn)


def mix(p: Pass[Config], i: int, w: AttentionWeights | Delta) -> None:
    """The first half of layer i: x += mixer(rms(x))."""
    c = p.config
    if isinstance(w, AttentionWeights):
        p.attention(i, w, c.head_dim, c.head_dim**-0.5, gate_kind="sigmoid")
        return
    ops, ws, b, width = p.ops, p.ws, p.b, c.n_head_v * c.d_v
    mixed, beta, alpha = b.delta(w.number, c.n_mixed, c.n_head_v)
    ops.delta_input(ws, b.x, w.inputs, c.eps, mixed, b.z(width), beta, alpha)
    recur(p, i, w)
    ops.delta_output(ws, b.attended(width), b.z(width), w.norm, c.eps, w.out, b.x)


def recur(p: Pass[Config], i: int, w: Delta) -> None:
    """The recurrence of DeltaNet layer i over its inputs in the buffers; the state is updated."""
    c = p.config
    mixed, beta, alpha = p.b.delta(w.number, c.n_mixed, c.n_head_v)
    state = p.kv.delta[i]
    assert state is not None, f"layer {i} has no state"
    p.ops.delta(
        p.ws, mixed, beta, alpha, w.conv, w.dt_bias, w.a, L2_EPS, state, p.step.states, p.step.sequence,
        p.step.positions, p.step.slots[0], p.b.attended(c.n_head_v * c.d_v),
    )  # fmt: skip


def replay(p: Pass[Config], weights: Weights[Any]) -> None:
    """The recurrences of a kept step again, for the tokens of `p.step` alone: the states follow, nothing else does."""
    for i, w in enumerate(weights.layers):
        if isinstance(w.mixer, Delta):
            recur(p, i, w.mixer)


def tiny(rng: np.random.Generator, **changes: Any) -> tuple[Config, dict[str, F32]]:
    """A small configuration with every parameter random and no two dimensions equal.

    Rows are multiples of 256, so that every block type can hold them. Norms are random around one.
    """
    config = Config(
        n_layer=4, n_embd=256, n_head=10, n_head_kv=5, head_dim=128, n_vocab=301, n_ctx_train=640, rope_base=50000.0,
        rope_dims=96, interval=3, kernel=4, n_head_k=3, n_head_v=6, d_k=32, d_v=128, eps=1e-5, n_ff=1536,
    )  # fmt: skip
    config = replace(config, **changes)
    return config, random_tensors(config.tensors(), rng, own_values)


def own_values(name: str, values: F32) -> F32 | None:
    """Decays and their biases, in the range where all of them matter."""
    if name.endswith("ssm_a"):
        return -np.exp(values)
    return values if name.endswith("ssm_dt.bias") else None
