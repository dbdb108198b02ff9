"""Qwen3.5 and Qwen3.6: gated DeltaNet layers, every few of them one of gated full attention; here with a dense FFN.

x += mixer(rms(x)); x += ffn(rms(x)). An attention layer: per-head RMS norms of Q and K, NeoX RoPE over a part of the
head, the output times sigmoid(gate), where `attn_q` holds Q and gate head by head. A DeltaNet layer: short causal
convolution, then the gated delta rule on one state a value head. `qwen35moe` is the same with experts. The files are
multimodal models'; M-RoPE gives a text token one position in all its sections, which is plain RoPE.
Reference: `transformers` qwen3_5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from engine.errors import ModelFormatError, UnsupportedModelError
from engine.gguf import GGUFFile
from engine.kv import DeltaShape, KVCache, KVGroup
from engine.models import Buffers, Step, Weights, Widths, load_ends, matrix, number, refuse_unknown, vector
from engine.ops import F32, I32
from engine.ops.arithmetic import rope_table
from engine.quants import QTensor, dequantize
from engine.residency import Residency

ARCH = "qwen35"
L2_EPS = 1e-6  # of the norms of q and k in a DeltaNet layer; a constant in every implementation
# Of the vision encoder and its projector, in files that hold a whole multimodal model.
VISION = ("v.", "mm.")


@dataclass(frozen=True, slots=True)
class Config:
    """Hyper-parameters of qwen35 (n_expert 0) and qwen35moe (n_ff 0).

    interval: layer i is full attention if interval divides i + 1. DeltaNet layers have n_head_k heads of d_k for q
    and k, n_head_v of d_v for v; kernel taps of the convolution. n_ff_shared: of the shared expert. fused: gate and
    up of the experts are one tensor.
    """

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    rope_base: float
    rope_dims: int
    interval: int
    kernel: int
    n_head_k: int
    n_head_v: int
    d_k: int
    d_v: int
    eps: float
    n_ff: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0
    n_ff_shared: int = 0
    fused: bool = False

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Config:
        """Read and check the metadata of either architecture; a variant that is not implemented is refused by name."""
        arch = file.architecture

        def size(key: str, least: int = 1) -> int:
            return number(file, f"{arch}.{key}", least)

        if file.value(f"{arch}.rope.scaling.type", str, "none") != "none":
            kind = file.value(f"{arch}.rope.scaling.type", str)
            raise UnsupportedModelError(f"{arch} with rope scaling {kind!r} is not implemented")
        if file.value(f"{arch}.expert_weights_scale", float, 1.0) not in (0.0, 1.0):
            raise UnsupportedModelError(f"{arch} with an expert_weights_scale is not implemented")
        head_dim, n_head_v, inner = size("attention.key_length"), size("ssm.time_step_rank"), size("ssm.inner_size")
        if file.value(f"{arch}.attention.value_length", int, head_dim) != head_dim:
            raise UnsupportedModelError(f"{arch} with value heads of another size than key heads is not implemented")
        if inner % n_head_v:
            raise ModelFormatError(f"{arch}.ssm.inner_size is {inner}, which {n_head_v} heads cannot share")
        if "token_embd.weight" not in file.tensors:
            raise ModelFormatError("tensor token_embd.weight is missing")
        # Blocks after the model proper predict further tokens (MTP): see `skipped`.
        config = cls(
            n_layer=size("block_count") - number(file, f"{arch}.nextn_predict_layers", 0, default=0),
            n_embd=size("embedding_length"),
            n_head=size("attention.head_count"),
            n_head_kv=size("attention.head_count_kv"),
            head_dim=head_dim,
            n_vocab=file.tensors["token_embd.weight"].shape[0],
            n_ctx_train=size("context_length"),
            rope_base=float(file.value(f"{arch}.rope.freq_base", float)),
            rope_dims=size("rope.dimension_count", 2),
            interval=number(file, f"{arch}.full_attention_interval", default=4),
            kernel=size("ssm.conv_kernel", 2),
            n_head_k=size("ssm.group_count"),
            n_head_v=n_head_v,
            d_k=size("ssm.state_size"),
            d_v=inner // n_head_v,
            eps=float(file.value(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        )
        if arch == ARCH:
            config = replace(config, n_ff=size("feed_forward_length"))
        else:
            n_ff_exp = size("expert_feed_forward_length")
            config = replace(
                config,
                n_expert=size("expert_count"),
                n_expert_used=size("expert_used_count"),
                n_ff_exp=n_ff_exp,
                n_ff_shared=number(file, f"{arch}.expert_shared_feed_forward_length", default=n_ff_exp),
                fused="blk.0.ffn_gate_up_exps.weight" in file.tensors,
            )
        config._check(file)
        return config

    def _check(self, file: GGUFFile) -> None:
        arch = self.arch
        if not self.interval <= self.n_layer <= len(file.tensors):
            raise ModelFormatError(
                f"{arch} with {self.n_layer} layers, of which every {self.interval}th is full attention, "
                f"in {len(file.tensors)} tensors"
            )
        recurrent = [i in self.delta.layers for i in range(self.n_layer)]
        if file.value(f"{arch}.attention.recurrent_layers", list, recurrent)[: self.n_layer] != recurrent:
            raise UnsupportedModelError(
                f"{arch} whose attention layers are others than every {self.interval}th is not implemented"
            )
        if self.n_head % self.n_head_kv:
            raise ModelFormatError(f"{self.n_head} heads cannot share {self.n_head_kv} KV heads evenly")
        if self.n_head_v % self.n_head_k:
            raise ModelFormatError(f"{self.n_head_v} value heads cannot share {self.n_head_k} key heads evenly")
        if self.rope_dims % 2 or self.rope_dims > self.head_dim:
            raise ModelFormatError(f"{self.rope_dims} rotated dimensions of {self.head_dim}")
        if self.n_expert_used > self.n_expert:
            raise ModelFormatError(f"{self.n_expert_used} active experts of {self.n_expert}")

    @property
    def arch(self) -> str:
        """Name of the architecture, which the metadata keys begin with."""
        return "qwen35moe" if self.n_expert else ARCH

    def metadata(self) -> dict[str, Any]:
        """The GGUF keys that `from_gguf` reads back (tests and the writer of full-shape models)."""
        pairs = self.rope_dims // 2
        values = {
            "block_count": self.n_layer,
            "context_length": self.n_ctx_train,
            "embedding_length": self.n_embd,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.eps,
            "rope.freq_base": self.rope_base,
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
            values |= {
                "expert_count": self.n_expert,
                "expert_used_count": self.n_expert_used,
                "expert_feed_forward_length": self.n_ff_exp,
                "expert_shared_feed_forward_length": self.n_ff_shared,
            }
        else:
            values["feed_forward_length"] = self.n_ff
        return {f"{self.arch}.{key}": value for key, value in values.items()}

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts: all of qwen35moe, none of qwen35."""
        return tuple(range(self.n_layer)) if self.n_expert else ()

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
        D, hd = self.n_embd, self.head_dim
        q, kv, z = self.n_head * hd, self.n_head_kv * hd, self.n_head_v * self.d_v
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.n_vocab, D),
            "output_norm.weight": (D,),
            "output.weight": (self.n_vocab, D),
        }
        for i in range(self.n_layer):
            p = f"blk.{i}."
            shapes |= {p + "attn_norm.weight": (D,), p + "post_attention_norm.weight": (D,)}
            if self.kv_layer(i) is not None:
                shapes |= {
                    p + "attn_q.weight": (2 * q, D),
                    p + "attn_k.weight": (kv, D),
                    p + "attn_v.weight": (kv, D),
                    p + "attn_output.weight": (D, q),
                    p + "attn_q_norm.weight": (hd,),
                    p + "attn_k_norm.weight": (hd,),
                }
            else:
                shapes |= {
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
            shapes |= self._moe_tensors(p) if self.n_expert else {
                p + "ffn_gate.weight": (self.n_ff, D),
                p + "ffn_up.weight": (self.n_ff, D),
                p + "ffn_down.weight": (D, self.n_ff),
            }  # fmt: skip
        return shapes

    def _moe_tensors(self, p: str) -> dict[str, tuple[int, ...]]:
        D, E, F, shared = self.n_embd, self.n_expert, self.n_ff_exp, self.n_ff_shared
        shapes: dict[str, tuple[int, ...]] = {
            p + "ffn_gate_inp.weight": (E, D),
            p + "ffn_down_exps.weight": (E, D, F),
            p + "ffn_gate_inp_shexp.weight": (D,),
            p + "ffn_gate_shexp.weight": (shared, D),
            p + "ffn_up_shexp.weight": (shared, D),
            p + "ffn_down_shexp.weight": (D, shared),
        }
        if self.fused:
            return shapes | {p + "ffn_gate_up_exps.weight": (E, 2 * F, D)}
        return shapes | {p + "ffn_gate_exps.weight": (E, F, D), p + "ffn_up_exps.weight": (E, F, D)}


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of a full attention layer's mixer; gate [H * head_dim, D], the other half of `attn_q`."""

    wq: QTensor
    gate: QTensor
    wk: QTensor
    wv: QTensor
    wo: QTensor
    q_norm: F32
    k_norm: F32


@dataclass(frozen=True, slots=True)
class Delta:
    """Weights of a DeltaNet layer's mixer, and its number among those layers.

    qkv [C, D]; z [H_v * d_v, D]; beta, alpha [H_v, D]; conv [C, kernel]; dt_bias and a = -exp(A_log) [H_v]; norm [d_v].
    """

    number: int
    qkv: QTensor
    z: QTensor
    beta: QTensor
    alpha: QTensor
    conv: F32
    dt_bias: F32
    a: F32
    norm: F32
    out: QTensor


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    attn_norm: F32
    mixer: Attention | Delta
    ffn_norm: F32
    gate: QTensor
    up: QTensor
    down: QTensor


def skipped(config: Config, name: str) -> bool:
    """A known tensor that text does not need: vision, or a block that predicts further tokens (`blk.N.nextn`)."""
    block = re.match(r"blk\.(\d+)\.", name)
    return name.startswith(VISION) or (block is not None and int(block[1]) >= config.n_layer)


def load_mixer(file: GGUFFile, config: Config, i: int) -> Attention | Delta:
    """The weights of what mixes tokens in layer i."""
    shapes, p = config.tensors(), f"blk.{i}."

    def get(name: str) -> QTensor:
        return matrix(file, p + name, shapes[p + name])

    def values(name: str) -> F32:
        return np.ascontiguousarray(dequantize(get(name)))

    if config.kv_layer(i) is not None:
        wq, gate = split_heads(get("attn_q.weight"), config.n_head)
        return Attention(
            wq, gate, get("attn_k.weight"), get("attn_v.weight"), get("attn_output.weight"),
            values("attn_q_norm.weight"), values("attn_k_norm.weight"),
        )  # fmt: skip
    return Delta(
        number=config.delta.layers.index(i),
        qkv=get("attn_qkv.weight"),
        z=get("attn_gate.weight"),
        beta=get("ssm_beta.weight"),
        alpha=get("ssm_alpha.weight"),
        conv=values("ssm_conv1d.weight"),
        dt_bias=values("ssm_dt.bias"),
        a=values("ssm_a"),
        norm=values("ssm_norm.weight"),
        out=get("ssm_out.weight"),
    )


def split_heads(packed: QTensor, n_head: int) -> tuple[QTensor, QTensor]:
    """The first and the second half of every head's rows, as two matrices; rows are whole blocks, so bytes move."""
    rows, cols = packed.shape
    halves = packed.data.reshape(n_head, 2, -1).transpose(1, 0, 2)
    first, second = (
        QTensor(f"{packed.name}[{i}]", packed.qtype, (rows // 2, cols), np.ascontiguousarray(half).reshape(-1))
        for i, half in enumerate(halves)
    )
    return first, second


def load(file: GGUFFile, config: Config) -> Weights[Layer]:
    """Map every tensor with its shape checked; an unknown tensor is refused, not ignored."""
    shapes = config.tensors()
    refuse_unknown(file, shapes, lambda name: skipped(config, name))
    layers = []
    for i in range(config.n_layer):
        p = f"blk.{i}."
        gate, up, down = (matrix(file, name, shapes[name]) for name in (f"{p}ffn_{part}.weight" for part in PARTS))
        layers.append(
            Layer(
                vector(file, p + "attn_norm.weight", config.n_embd),
                load_mixer(file, config, i),
                vector(file, p + "post_attention_norm.weight", config.n_embd),
                gate,
                up,
                down,
            )
        )
    token_embd, output = load_ends(file, config.n_vocab, config.n_embd)
    return Weights(token_embd, tuple(layers), vector(file, "output_norm.weight", config.n_embd), output)


PARTS = ("gate", "up", "down")


def rope_tables(config: Config, n_ctx: int) -> tuple[F32, ...]:
    """One table for the attention layers."""
    return (rope_table(n_ctx, config.rope_dims, config.rope_base),)


def forward(
    config: Config,
    weights: Weights[Layer],
    ops: ModuleType,
    ws: Any,
    step: Step,
    kv: KVCache,
    residency: Residency | None,
    ropes: tuple[F32, ...],
    b: Buffers,
) -> None:
    """One step: `b.logits` for `step.rows`, cache and states updated."""
    ops.embed(ws, weights.token_embd, step.tokens, b.x)
    for i, layer in enumerate(weights.layers):
        if b.hidden is not None:
            ops.copy(ws, b.x, b.hidden[i])
        mix(config, layer.attn_norm, layer.mixer, i, ops, ws, step, kv, ropes, b)
        ops.norm(ws, b.x, layer.ffn_norm, config.eps, b.h)
        ops.dense_ffn(ws, b.h, layer.gate, layer.up, layer.down, b.x)
    if len(step.rows):
        head(config, weights, ops, ws, step.rows, b.x, b.logits)


def mix(
    config: Config,
    norm: F32,
    mixer: Attention | Delta,
    i: int,
    ops: ModuleType,
    ws: Any,
    step: Step,
    kv: KVCache,
    ropes: tuple[F32, ...],
    b: Buffers,
) -> None:
    """The first half of layer i: x += mixer(rms(x) * norm)."""
    (rope,), (slots,), (table,) = ropes, step.slots, step.block_table
    if isinstance(mixer, Attention):
        width = config.n_head * config.head_dim
        q, gate, attended = b.heads(config.n_head, config.head_dim), b.gate(width), b.attended(width)
        ops.attention_input(
            ws, b.x, norm, config.eps, mixer.wq, mixer.wk, mixer.wv, mixer.q_norm, mixer.k_norm,
            rope, step.positions, kv.layers[i], slots, q, gate=mixer.gate, gate_out=gate,
        )  # fmt: skip
        ops.attention(
            ws, q, kv.layers[i], table, step.sequence, step.positions, config.head_dim**-0.5, attended,
            step.n_positions, gate=gate, gate_kind="sigmoid",
        )  # fmt: skip
        ops.attention_output(ws, attended, mixer.wo, b.x)
        return
    width = config.n_head_v * config.d_v
    mixed, beta, alpha = b.delta(mixer.number, config.n_mixed, config.n_head_v)
    ops.delta_input(
        ws, b.x, norm, config.eps, mixer.qkv, mixer.z, mixer.beta, mixer.alpha, mixed, b.z(width), beta, alpha
    )
    recur(config, mixer, i, ops, ws, step, kv, b)
    ops.delta_output(ws, b.attended(width), b.z(width), mixer.norm, config.eps, mixer.out, b.x)


def recur(config: Config, mixer: Delta, i: int, ops: ModuleType, ws: Any, step: Step, kv: KVCache, b: Buffers) -> None:
    """The recurrence of DeltaNet layer i over its inputs in the buffers; the state is updated."""
    mixed, beta, alpha = b.delta(mixer.number, config.n_mixed, config.n_head_v)
    ops.delta(
        ws, mixed, beta, alpha, mixer.conv, mixer.dt_bias, mixer.a, L2_EPS, kv.delta[i], step.states,
        step.sequence, step.positions, step.slots[0], b.attended(config.n_head_v * config.d_v),
    )  # fmt: skip


def replay(config: Config, weights: Any, ops: ModuleType, ws: Any, step: Step, kv: KVCache, b: Buffers) -> None:
    """The recurrences of a kept step again, for the tokens of `step` alone: the states follow, nothing else does."""
    for i, layer in enumerate(weights.layers):
        if isinstance(layer.mixer, Delta):
            recur(config, layer.mixer, i, ops, ws, step, kv, b)


def head(config: Config, weights: Any, ops: ModuleType, ws: Any, rows: I32, x: F32, logits: F32) -> None:
    """Logits [R, V] of the given rows of the residual stream x [T, D]."""
    ops.head(ws, x, rows, weights.output_norm, config.eps, weights.output, logits)


def tiny(rng: np.random.Generator, **changes: Any) -> tuple[Config, dict[str, F32]]:
    """A small configuration with every parameter random and no two dimensions equal.

    Rows are multiples of 256, so that every block type can hold them. Norms are random around one.
    """
    config = Config(
        n_layer=4, n_embd=256, n_head=10, n_head_kv=5, head_dim=128, n_vocab=301, n_ctx_train=640, rope_base=50000.0,
        rope_dims=96, interval=3, kernel=4, n_head_k=3, n_head_v=6, d_k=32, d_v=128, eps=1e-5, n_ff=1536,
    )  # fmt: skip
    config = replace(config, **changes)
    return config, random_tensors(config, rng)


def random_tensors(config: Config, rng: np.random.Generator) -> dict[str, F32]:
    """Every tensor, of values that keep activations and decays in the range where all of them matter."""
    tensors = {}
    for name, shape in config.tensors().items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            tensors[name] = 1 + np.float32(0.3) * values
        elif name.endswith("ssm_a"):
            tensors[name] = -np.exp(values)
        elif name.endswith("ssm_dt.bias"):
            tensors[name] = values
        else:
            tensors[name] = values * np.float32(1.0 if name == "token_embd.weight" else 1.2 / np.sqrt(shape[-1]))
    return tensors
