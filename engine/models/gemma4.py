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
from types import ModuleType
from typing import Any

import numpy as np

from engine.errors import ModelFormatError, UnsupportedModelError
from engine.gguf import GGUFFile
from engine.kv import DeltaShape, KVCache, KVGroup
from engine.models import (
    Buffers,
    Step,
    Weights,
    Widths,
    float_matrix,
    load_ends,
    matrix,
    number,
    per_layer,
    refuse_unknown,
    vector,
)
from engine.ops import F32, I32, Gating
from engine.ops.arithmetic import rope_table, rotations
from engine.quants import QTensor, dequantize
from engine.residency import ExpertTensors, Residency

ARCH = "gemma4"
PARTS = ("gate", "up", "down")
# Of the vision and audio encoders and their projectors, in files that hold a whole multimodal model.
OTHER_SENSES = ("v.", "a.", "mm.")


@dataclass(frozen=True, slots=True)
class Config:
    """Hyper-parameters. windowed: which layers see only `window` positions; those have the sizes named _swa.

    n_head_kv: of every layer. n_ff: of every layer's dense FFN. n_shared: last layers that read another layer's cache.
    rope_factors: what divides the frequencies of full layers, one a pair of dimensions. k_eq_v: full layers have no V
    matrix. n_expert is 0 in dense models. softcap: of logits, 0 for none. fused: gate and up of the experts are one
    tensor.
    """

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: tuple[int, ...]
    head_dim: int
    head_dim_swa: int
    n_ff: tuple[int, ...]
    n_vocab: int
    n_ctx_train: int
    windowed: tuple[bool, ...]
    window: int
    n_shared: int
    rope_base: float
    rope_factors: tuple[float, ...]
    rope_base_swa: float
    rope_dims_swa: int
    eps: float
    k_eq_v: bool = True
    softcap: float = 0.0
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0
    fused: bool = True

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Config:
        """Read and check the metadata; a variant that is not implemented is refused by name."""

        def size(key: str, least: int = 1, default: int | None = None) -> int:
            return number(file, f"{ARCH}.{key}", least, default)

        if size("embedding_length_per_layer_input", 0, 0):
            raise UnsupportedModelError(
                f"{ARCH} with per-layer input embeddings (E2B, E4B) is not implemented",
                hint="the 26B-A4B mixture and the 12B and 31B dense models have none",
            )
        n_layer, head_dim, head_dim_swa = (
            size("block_count"), size("attention.key_length", 2), size("attention.key_length_swa", 2),
        )  # fmt: skip
        values = (
            size("attention.value_length", default=head_dim),
            size("attention.value_length_swa", default=head_dim_swa),
        )
        if values != (head_dim, head_dim_swa):
            raise UnsupportedModelError(f"{ARCH} with value heads of another size than key heads is not implemented")
        if n_layer > len(file.tensors):
            raise ModelFormatError(f"{ARCH}.block_count is {n_layer}, the file has {len(file.tensors)} tensors")
        for name in ("token_embd.weight", "rope_freqs.weight"):
            if name not in file.tensors:
                raise ModelFormatError(f"tensor {name} is missing")
        pattern = [bool(value) for value in file.value(f"{ARCH}.attention.sliding_window_pattern", list)]
        if len(pattern) < n_layer:
            raise ModelFormatError(f"{ARCH}.attention.sliding_window_pattern has {len(pattern)} values of {n_layer}")
        full = [i for i in range(n_layer) if not pattern[i]]
        n_expert = size("expert_count", 0, 0)
        factors = dequantize(matrix(file, "rope_freqs.weight", (head_dim // 2,)))
        config = cls(
            n_layer=n_layer,
            n_embd=size("embedding_length"),
            n_head=size("attention.head_count"),
            n_head_kv=per_layer(file, f"{ARCH}.attention.head_count_kv", n_layer),
            head_dim=head_dim,
            head_dim_swa=head_dim_swa,
            n_ff=per_layer(file, f"{ARCH}.feed_forward_length", n_layer),
            n_vocab=file.tensors["token_embd.weight"].shape[0],
            n_ctx_train=size("context_length"),
            windowed=tuple(pattern[:n_layer]),
            window=size("attention.sliding_window"),
            n_shared=size("attention.shared_kv_layers", 0, 0),
            rope_base=float(file.value(f"{ARCH}.rope.freq_base", float)),
            rope_factors=tuple(float(x) for x in factors),
            rope_base_swa=float(file.value(f"{ARCH}.rope.freq_base_swa", float, 10000.0)),
            rope_dims_swa=size("rope.dimension_count_swa", 2, head_dim_swa),
            eps=float(file.value(f"{ARCH}.attention.layer_norm_rms_epsilon", float)),
            k_eq_v=bool(full) and f"blk.{full[0]}.attn_v.weight" not in file.tensors,
            softcap=float(file.value(f"{ARCH}.final_logit_softcapping", float, 0.0)),
            n_expert=n_expert,
            n_expert_used=size("expert_used_count") if n_expert else 0,
            n_ff_exp=size("expert_feed_forward_length") if n_expert else 0,
            fused="blk.0.ffn_gate_up_exps.weight" in file.tensors,
        )
        config._check(file)
        return config

    def _check(self, file: GGUFFile) -> None:
        if file.value(f"{ARCH}.rope.dimension_count", int, self.head_dim) != self.head_dim:
            raise UnsupportedModelError(
                f"{ARCH} whose full layers rotate less than the whole head is not implemented",
                hint="published files name the unrotated pairs in rope_freqs.weight",
            )
        if any(self.n_head % n for n in self.n_head_kv):
            raise ModelFormatError(f"{self.n_head} heads cannot share {self.n_head_kv} KV heads evenly")
        if self.head_dim % 2 or self.rope_dims_swa % 2 or self.rope_dims_swa > self.head_dim_swa:
            raise ModelFormatError(f"{self.rope_dims_swa} rotated dimensions of {self.head_dim_swa}")
        if self.n_expert_used > self.n_expert:
            raise ModelFormatError(f"{self.n_expert_used} active experts of {self.n_expert}")
        own = set(self.windowed[: self.n_layer - self.n_shared])
        if self.n_shared >= self.n_layer or not own >= set(self.windowed):
            raise ModelFormatError(f"the last {self.n_shared} layers share caches that no layer before them owns")
        for kind in own:
            if len({n for n, windowed in zip(self.n_head_kv, self.windowed, strict=True) if windowed == kind}) > 1:
                raise UnsupportedModelError(f"{ARCH} with KV heads {self.n_head_kv} is not implemented")

    def metadata(self) -> dict[str, Any]:
        """The GGUF keys that `from_gguf` reads back (tests and the writer of full-shape models)."""
        values: dict[str, Any] = {
            "block_count": self.n_layer,
            "context_length": self.n_ctx_train,
            "embedding_length": self.n_embd,
            "embedding_length_per_layer_input": 0,
            "feed_forward_length": self.n_ff[0] if len(set(self.n_ff)) == 1 else list(self.n_ff),
            "attention.head_count": self.n_head,
            "attention.head_count_kv": list(self.n_head_kv),
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.key_length_swa": self.head_dim_swa,
            "attention.value_length_swa": self.head_dim_swa,
            "attention.sliding_window": self.window,
            "attention.sliding_window_pattern": list(self.windowed),
            "attention.shared_kv_layers": self.n_shared,
            "attention.layer_norm_rms_epsilon": self.eps,
            "rope.freq_base": self.rope_base,
            "rope.freq_base_swa": self.rope_base_swa,
            "rope.dimension_count": self.head_dim,
            "rope.dimension_count_swa": self.rope_dims_swa,
        }
        if self.softcap:
            values["final_logit_softcapping"] = self.softcap
        if self.n_expert:
            values |= {
                "expert_count": self.n_expert,
                "expert_used_count": self.n_expert_used,
                "expert_feed_forward_length": self.n_ff_exp,
            }
        return {f"{ARCH}.{key}": value for key, value in values.items()}

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts: all, or none in a dense model."""
        return tuple(range(self.n_layer)) if self.n_expert else ()

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
    def delta(self) -> DeltaShape | None:
        """No layer is recurrent."""
        return None

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
        D, E, F = self.n_embd, self.n_expert, self.n_ff_exp
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.n_vocab, D),
            "output_norm.weight": (D,),
            "rope_freqs.weight": (self.head_dim // 2,),
        }
        for i in range(self.n_layer):
            p, head_dim = f"blk.{i}.", self.head_dim_of(i)
            q, kv = self.n_head * head_dim, self.n_head_kv[i] * head_dim
            shapes |= {
                p + "attn_norm.weight": (D,),
                p + "attn_q.weight": (q, D),
                p + "attn_q_norm.weight": (head_dim,),
                p + "attn_output.weight": (D, q),
                p + "post_attention_norm.weight": (D,),
                p + "ffn_norm.weight": (D,),
                p + "ffn_gate.weight": (self.n_ff[i], D),
                p + "ffn_up.weight": (self.n_ff[i], D),
                p + "ffn_down.weight": (D, self.n_ff[i]),
                p + "post_ffw_norm.weight": (D,),
                p + "layer_output_scale.weight": (1,),
            }
            if self.kv_layer(i) == i:
                shapes |= {p + "attn_k.weight": (kv, D), p + "attn_k_norm.weight": (head_dim,)}
                if self.has_v(i):
                    shapes[p + "attn_v.weight"] = (kv, D)
            if not E:
                continue
            shapes |= {
                p + "ffn_gate_inp.weight": (E, D),
                p + "ffn_gate_inp.scale": (D,),
                p + "pre_ffw_norm_2.weight": (D,),
                p + "post_ffw_norm_1.weight": (D,),
                p + "post_ffw_norm_2.weight": (D,),
                p + "ffn_down_exps.weight": (E, D, F),
                p + "ffn_down_exps.scale": (E,),
            }
            if self.fused:
                shapes[p + "ffn_gate_up_exps.weight"] = (E, 2 * F, D)
            else:
                shapes |= {p + "ffn_gate_exps.weight": (E, F, D), p + "ffn_up_exps.weight": (E, F, D)}
        return shapes


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
class Layer:
    """Weights of one layer, its experts apart (see Residency). wk is None where another layer's cache is read."""

    attn_norm: F32
    wq: QTensor
    wk: QTensor | None
    wv: QTensor | None
    wo: QTensor
    q_norm: F32
    k_norm: F32 | None
    v_norm: F32 | None
    post_attention_norm: F32
    ffn_norm: F32
    gate: QTensor
    up: QTensor
    down: QTensor
    moe: MoE | None
    post_ffw_norm: F32
    out_scale: float


def load(file: GGUFFile, config: Config) -> Weights[Layer]:
    """Map every tensor with its shape checked; an unknown tensor is refused, not ignored."""
    shapes = config.tensors() | {"output.weight": (config.n_vocab, config.n_embd)}
    borrowers = range(config.n_layer - config.n_shared, config.n_layer)
    unused = {f"blk.{i}.{name}.weight" for i in borrowers for name in ("attn_k", "attn_v", "attn_k_norm")}
    refuse_unknown(file, shapes, lambda name: name.startswith(OTHER_SENSES) or name in unused)
    layers = tuple(_layer(file, config, shapes, i) for i in range(config.n_layer))
    experts = []
    for i in config.moe_layers:
        names = [f"blk.{i}.ffn_{part}_exps.weight" for part in (("gate_up", "down") if config.fused else PARTS)]
        *first, down = (matrix(file, name, shapes[name]) for name in names)
        gate, up = first[0].halves() if config.fused else first
        experts.append(ExpertTensors(gate, up, down, "gelu"))
    token_embd, output = load_ends(file, config.n_vocab, config.n_embd)
    norm = vector(file, "output_norm.weight", config.n_embd)
    return Weights(token_embd, layers, norm, output, tuple(experts))


def _layer(file: GGUFFile, config: Config, shapes: dict[str, tuple[int, ...]], i: int) -> Layer:
    def get(name: str) -> QTensor:
        return matrix(file, f"blk.{i}.{name}", shapes[f"blk.{i}.{name}"])

    def values(name: str) -> F32:
        return vector(file, f"blk.{i}.{name}", shapes[f"blk.{i}.{name}"][0])

    owns = config.kv_layer(i) == i
    gate, up, down = (get(f"ffn_{part}.weight") for part in PARTS)
    scaled = f"blk.{i}.layer_output_scale.weight" in file.tensors
    return Layer(
        attn_norm=values("attn_norm.weight"),
        wq=get("attn_q.weight"),
        wk=get("attn_k.weight") if owns else None,
        wv=get("attn_v.weight") if owns and config.has_v(i) else None,
        wo=get("attn_output.weight"),
        q_norm=values("attn_q_norm.weight"),
        k_norm=values("attn_k_norm.weight") if owns else None,
        v_norm=np.ones(config.head_dim_of(i), np.float32) if owns else None,
        post_attention_norm=values("post_attention_norm.weight"),
        ffn_norm=values("ffn_norm.weight"),
        gate=gate,
        up=up,
        down=down,
        moe=None
        if not config.n_expert
        else MoE(
            router_norm=values("ffn_gate_inp.scale") * np.float32(config.n_embd**-0.5),
            router=float_matrix(file, f"blk.{i}.ffn_gate_inp.weight", (config.n_expert, config.n_embd)),
            gating=Gating(expert_scale=values("ffn_down_exps.scale")),
            pre_norm=values("pre_ffw_norm_2.weight"),
            post_norm=values("post_ffw_norm_2.weight"),
            dense_post_norm=values("post_ffw_norm_1.weight"),
        ),
        post_ffw_norm=values("post_ffw_norm.weight"),
        out_scale=float(values("layer_output_scale.weight")[0]) if scaled else 1.0,
    )


def rope_tables(config: Config, n_ctx: int) -> tuple[F32, ...]:
    """A table for full layers, and one for window layers."""
    pairs = np.arange(config.head_dim // 2)
    full = config.rope_base ** (-2.0 * pairs / config.head_dim) / np.asarray(config.rope_factors)
    return rotations(n_ctx, full), rope_table(n_ctx, config.rope_dims_swa, config.rope_base_swa)


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
    """One step: `b.logits` for `step.rows`, cache and residency updated."""
    T = b.x.shape[0]
    ops.embed(ws, weights.token_embd, step.tokens, b.x, scale=config.n_embd**0.5)
    if config.n_expert and residency is not None:
        ops.fetch_ahead(ws, residency.live, 0, residency.banks[0], T)
    for i, layer in enumerate(weights.layers):
        if b.hidden is not None:
            ops.copy(ws, b.x, b.hidden[i])
        if residency is not None and i + 1 < len(residency.banks):
            ops.fetch_ahead(ws, residency.live, i + 1, residency.banks[i + 1], T)
        windowed, group, head_dim = config.windowed[i], kv.group_of[i], config.head_dim_of(i)
        q, attended = b.heads(config.n_head, head_dim), b.attended(config.n_head * head_dim)
        ops.attention_input(
            ws, b.x, layer.attn_norm, config.eps, layer.wq, layer.wk, layer.wv, layer.q_norm, layer.k_norm,
            ropes[windowed], step.positions, kv.layers[i], step.slots[group], q, v_norm=layer.v_norm,
        )  # fmt: skip
        ops.attention(
            ws, q, kv.layers[i], step.block_table[group], step.sequence, step.positions, 1.0, attended,
            step.n_positions, window=config.window if windowed else 0,
        )  # fmt: skip
        ops.attention_output(ws, attended, layer.wo, b.y, add=False)
        ops.add_norm(ws, b.y, layer.post_attention_norm, config.eps, b.x)
        ops.norm(ws, b.x, layer.ffn_norm, config.eps, b.h)
        ops.dense_ffn(ws, b.h, layer.gate, layer.up, layer.down, b.y, activation="gelu", add=False)
        mixed = b.y
        if layer.moe is not None and residency is not None:
            mixed = add_experts(config, layer.moe, i, ops, ws, step, residency, b)
        ops.add_norm(ws, mixed, layer.post_ffw_norm, config.eps, b.x, scale=layer.out_scale)
    if len(step.rows):
        head(config, weights, ops, ws, step.rows, b.x, b.logits)


def add_experts(
    config: Config, moe: MoE, m: int, ops: ModuleType, ws: Any, step: Step, residency: Residency, b: Buffers
) -> F32:
    """rms(b.y) + rms(experts), where b.y is the dense FFN's output; a buffer [T, D] that is free after attention."""
    mixed = b.attended(config.n_embd)
    ops.norm(ws, b.y, moe.dense_post_norm, config.eps, mixed)
    ops.router(ws, b.x, moe.router_norm, config.eps, moe.router, b.h, b.router)
    ops.route(
        ws, b.router, moe.gating, residency.live, m, step.counted, residency.rule,
        b.experts[m], b.weights[m], b.fetches,
    )  # fmt: skip
    ops.norm(ws, b.x, moe.pre_norm, config.eps, b.h)
    ops.expert_ffn(ws, b.h, b.experts[m], b.weights[m], residency.banks[m], b.fetches, b.y, add=False)
    ops.add_norm(ws, b.y, moe.post_norm, config.eps, mixed)
    return mixed


def head(config: Config, weights: Weights[Layer], ops: ModuleType, ws: Any, rows: I32, x: F32, logits: F32) -> None:
    """Logits [R, V] of the given rows of the residual stream x [T, D]."""
    ops.head(ws, x, rows, weights.output_norm, config.eps, weights.output, logits, softcap=config.softcap)


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
    tensors = {}
    for name, shape in config.tensors().items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if name == "rope_freqs.weight":
            tensors[name] = np.asarray(config.rope_factors, np.float32)
        elif name.endswith("ffn_gate_inp.scale"):  # the router's logits have a spread of about one
            tensors[name] = np.float32(config.n_embd**0.5) * (1 + np.float32(0.3) * values)
        elif "attn_q_norm" in name or "attn_k_norm" in name:  # nothing else scales the scores
            tensors[name] = np.float32(shape[0] ** -0.25) * (1 + np.float32(0.3) * values)
        elif "norm" in name or "scale" in name:
            tensors[name] = 1 + np.float32(0.3) * values
        elif name == "token_embd.weight":
            tensors[name] = values * np.float32(config.n_embd**-0.5)
        else:
            tensors[name] = values * np.float32(1.2 / np.sqrt(shape[-1]))
    return config, tensors
