"""Qwen3-MoE (Qwen3-30B-A3B and its like): pre-norm attention and a mixture of experts in every layer.

x += attention(rms(x)); x += moe(rms(x)). Per-head RMS norms of Q and K before NeoX RoPE; router
softmax over all experts, the A largest, renormalized. Reference: `transformers` qwen3_moe.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from engine.errors import ModelFormatError, UnsupportedModelError
from engine.gguf import GGUFFile
from engine.kv import DeltaShape, KVCache, KVGroup
from engine.models import Buffers, Step, Weights, Widths, load_ends, matrix, vector
from engine.ops import F32, I32, Gating
from engine.ops.arithmetic import rope_table
from engine.quants import QTensor
from engine.residency import ExpertTensors, Residency

ARCH = "qwen3moe"
GATING = Gating()


@dataclass(frozen=True, slots=True)
class Config:
    """Hyper-parameters, named as in GGUF."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_vocab: int
    n_ctx_train: int
    rope_base: float
    eps: float
    gating: Gating = GATING

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Config:
        """Read and check the metadata; a variant that is not implemented is refused by name."""

        def number(key: str, least: int = 1) -> int:
            value = file.value(f"{ARCH}.{key}", int)
            if value < least:
                raise ModelFormatError(f"{ARCH}.{key} is {value}, expected at least {least}")
            return int(value)

        if file.value(f"{ARCH}.rope.scaling.type", str, "none") != "none":
            kind = file.value(f"{ARCH}.rope.scaling.type", str)
            raise UnsupportedModelError(f"{ARCH} with rope scaling {kind!r} is not implemented")
        if file.value(f"{ARCH}.expert_weights_scale", float, 1.0) not in (0.0, 1.0):
            raise UnsupportedModelError(f"{ARCH} with an expert_weights_scale is not implemented")
        n_head = number("attention.head_count")
        n_embd = number("embedding_length")
        head_dim = file.value(f"{ARCH}.attention.key_length", int, n_embd // n_head)
        if file.value(f"{ARCH}.attention.value_length", int, head_dim) != head_dim:
            raise UnsupportedModelError(f"{ARCH} with value heads of another size than key heads is not implemented")
        if "token_embd.weight" not in file.tensors:
            raise ModelFormatError("tensor token_embd.weight is missing")
        config = cls(
            n_layer=number("block_count"),
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=number("attention.head_count_kv"),
            head_dim=int(head_dim),
            n_expert=number("expert_count"),
            n_expert_used=number("expert_used_count"),
            n_ff_exp=number("expert_feed_forward_length"),
            n_vocab=file.tensors["token_embd.weight"].shape[0],
            n_ctx_train=number("context_length"),
            rope_base=float(file.value(f"{ARCH}.rope.freq_base", float, 10000.0)),
            eps=float(file.value(f"{ARCH}.attention.layer_norm_rms_epsilon", float)),
            gating=Gating(renormalize=bool(file.value(f"{ARCH}.expert_weights_norm", bool, True))),
        )
        if config.n_layer > len(file.tensors):
            raise ModelFormatError(f"{ARCH}.block_count is {config.n_layer}, the file has {len(file.tensors)} tensors")
        if config.n_head % config.n_head_kv:
            raise ModelFormatError(f"{config.n_head} heads cannot share {config.n_head_kv} KV heads evenly")
        if config.n_expert_used > config.n_expert:
            raise ModelFormatError(f"{config.n_expert_used} active experts of {config.n_expert}")
        if config.head_dim % 2 or config.head_dim < 2:
            raise ModelFormatError(f"head_dim is {config.head_dim}, RoPE needs an even number")
        return config

    def metadata(self) -> dict[str, Any]:
        """The GGUF keys that `from_gguf` reads back (tests and the writer of full-shape models)."""
        return {
            f"{ARCH}.block_count": self.n_layer,
            f"{ARCH}.context_length": self.n_ctx_train,
            f"{ARCH}.embedding_length": self.n_embd,
            f"{ARCH}.feed_forward_length": self.n_ff_exp * self.n_expert_used,
            f"{ARCH}.attention.head_count": self.n_head,
            f"{ARCH}.attention.head_count_kv": self.n_head_kv,
            f"{ARCH}.attention.key_length": self.head_dim,
            f"{ARCH}.attention.value_length": self.head_dim,
            f"{ARCH}.attention.layer_norm_rms_epsilon": self.eps,
            f"{ARCH}.rope.freq_base": self.rope_base,
            f"{ARCH}.expert_count": self.n_expert,
            f"{ARCH}.expert_used_count": self.n_expert_used,
            f"{ARCH}.expert_feed_forward_length": self.n_ff_exp,
        }

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts: all of them."""
        return tuple(range(self.n_layer))

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Caches of one kind: every layer sees all positions."""
        return (KVGroup(self.moe_layers, self.n_head_kv, self.head_dim),)

    def kv_layer(self, layer: int) -> int | None:
        """The layer whose cache a layer reads: its own."""
        return layer

    @property
    def delta(self) -> DeltaShape | None:
        """No layer is recurrent."""
        return None

    @property
    def widths(self) -> Widths:
        """The widest of any layer."""
        return Widths(self.n_head, self.n_head * self.head_dim, self.n_head_kv, self.head_dim, self.n_ff_exp)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor and its shape, slowest dimension first (`output.weight` may be absent: tied)."""
        D, F, E = self.n_embd, self.n_ff_exp, self.n_expert
        q, kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.n_vocab, D),
            "output_norm.weight": (D,),
            "output.weight": (self.n_vocab, D),
        }
        for i in range(self.n_layer):
            shapes |= {
                f"blk.{i}.attn_norm.weight": (D,),
                f"blk.{i}.attn_q.weight": (q, D),
                f"blk.{i}.attn_k.weight": (kv, D),
                f"blk.{i}.attn_v.weight": (kv, D),
                f"blk.{i}.attn_output.weight": (D, q),
                f"blk.{i}.attn_q_norm.weight": (self.head_dim,),
                f"blk.{i}.attn_k_norm.weight": (self.head_dim,),
                f"blk.{i}.ffn_norm.weight": (D,),
                f"blk.{i}.ffn_gate_inp.weight": (E, D),
                f"blk.{i}.ffn_gate_exps.weight": (E, F, D),
                f"blk.{i}.ffn_up_exps.weight": (E, F, D),
                f"blk.{i}.ffn_down_exps.weight": (E, D, F),
            }
        return shapes


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer, its experts apart (see Residency)."""

    attn_norm: F32
    wq: QTensor
    wk: QTensor
    wv: QTensor
    wo: QTensor
    q_norm: F32
    k_norm: F32
    ffn_norm: F32
    router: QTensor


def load(file: GGUFFile, config: Config) -> Weights[Layer]:
    """Map every tensor with its shape checked; an unknown tensor is refused, not ignored."""
    shapes = config.tensors()
    for name in file.tensors:
        if name not in shapes:
            raise UnsupportedModelError(f"tensor {name} is not part of {ARCH} as implemented here")

    def get(name: str) -> QTensor:
        return matrix(file, name, shapes[name])

    def norm(name: str) -> F32:
        return vector(file, name, shapes[name][0])

    layers, experts = [], []
    for i in range(config.n_layer):
        p = f"blk.{i}."
        router = get(p + "ffn_gate_inp.weight")
        if router.qtype.name not in ("F32", "F16", "BF16"):
            raise UnsupportedModelError(f"tensor {router.name} is {router.qtype.name}; a router is F32, F16 or BF16")
        layers.append(
            Layer(
                attn_norm=norm(p + "attn_norm.weight"),
                wq=get(p + "attn_q.weight"),
                wk=get(p + "attn_k.weight"),
                wv=get(p + "attn_v.weight"),
                wo=get(p + "attn_output.weight"),
                q_norm=norm(p + "attn_q_norm.weight"),
                k_norm=norm(p + "attn_k_norm.weight"),
                ffn_norm=norm(p + "ffn_norm.weight"),
                router=router,
            )
        )
        experts.append(
            ExpertTensors(
                get(p + "ffn_gate_exps.weight"), get(p + "ffn_up_exps.weight"), get(p + "ffn_down_exps.weight")
            )
        )
    token_embd, output = load_ends(file, config.n_vocab, config.n_embd)
    return Weights(token_embd, tuple(layers), norm("output_norm.weight"), output, tuple(experts))


def rope_tables(config: Config, n_ctx: int) -> tuple[F32, ...]:
    """One table for all layers, which rotate whole heads."""
    return (rope_table(n_ctx, config.head_dim, config.rope_base),)


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
    """One step: `b.logits` for `step.rows`, cache and residency updated."""
    scale = 1.0 / float(np.sqrt(config.head_dim))
    state, T = residency.live, b.x.shape[0]
    q, attended = b.heads(config.n_head, config.head_dim), b.attended(config.n_head * config.head_dim)
    (rope,), (slots,), (table,) = ropes, step.slots, step.block_table
    ops.embed(ws, weights.token_embd, step.tokens, b.x)
    ops.fetch_ahead(ws, state, 0, residency.banks[0], T)
    for i, layer in enumerate(weights.layers):
        if b.hidden is not None:
            ops.copy(ws, b.x, b.hidden[i])
        if i + 1 < config.n_layer:
            ops.fetch_ahead(ws, state, i + 1, residency.banks[i + 1], T)
        ops.attention_input(
            ws, b.x, layer.attn_norm, config.eps, layer.wq, layer.wk, layer.wv, layer.q_norm, layer.k_norm,
            rope, step.positions, kv.layers[i], slots, q,
        )  # fmt: skip
        ops.attention(ws, q, kv.layers[i], table, step.sequence, step.positions, scale, attended, step.n_positions)
        ops.attention_output(ws, attended, layer.wo, b.x)
        ops.router(ws, b.x, layer.ffn_norm, config.eps, layer.router, b.h, b.router)
        ops.route(
            ws, b.router, config.gating, state, i, step.counted, residency.rule,
            b.experts[i], b.weights[i], b.fetches,
        )  # fmt: skip
        ops.expert_ffn(ws, b.h, b.experts[i], b.weights[i], residency.banks[i], b.fetches, b.x)
    if len(step.rows):
        head(config, weights, ops, ws, step.rows, b.x, b.logits)


def head(config: Config, weights: Weights[Layer], ops: ModuleType, ws: Any, rows: I32, x: F32, logits: F32) -> None:
    """Logits [R, V] of the given rows of the residual stream x [T, D]."""
    ops.head(ws, x, rows, weights.output_norm, config.eps, weights.output, logits)


def tiny(rng: np.random.Generator) -> tuple[Config, dict[str, F32]]:
    """A small configuration with every parameter random and no two dimensions equal.

    Rows are multiples of 256, so that every block type can hold them. Norms are random around one.
    """
    config = Config(
        n_layer=3, n_embd=256, n_head=8, n_head_kv=4, head_dim=96, n_expert=11, n_expert_used=5, n_ff_exp=512,
        n_vocab=301, n_ctx_train=640, rope_base=50000.0, eps=1e-5,
    )  # fmt: skip
    tensors = {}
    for name, shape in config.tensors().items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            tensors[name] = 1 + np.float32(0.3) * values
        else:
            tensors[name] = values * np.float32(1.0 if name == "token_embd.weight" else 1.2 / np.sqrt(shape[-1]))
    return config, tensors
