"""Laguna (Laguna-XS.2 and its like): window and full attention with output gates, a mixture after dense layers.

x += attention(rms(x)); x += ffn(rms(x)). Per-head RMS norms of Q and K before NeoX RoPE, whose base and width differ
between full layers (YaRN) and window layers (plain). The attention output times softplus(gate), a value a head or a
value an element. The first layers have a dense FFN; in the others a router of sigmoid scores, whose choice a bias
corrects, and one shared expert. Reference: `transformers` laguna.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from engine.ops import F32, I32, Gating, SharedExpert
from engine.ops.arithmetic import rope_table, rotations
from engine.quants import QTensor
from engine.residency import ExpertTensors, Residency

ARCH = "laguna"
PERIOD = 4  # of full attention layers, where the file does not say which they are
GATING_FUNCTIONS = {1: "softmax", 2: "sigmoid"}  # GGUF's numbers
# What no published model has; engines that know one of these keys write it with the value that changes nothing.
UNSUPPORTED = (
    "attention.sink_enabled", "attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping",
)  # fmt: skip
PARTS = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (arXiv 2309.00071): frequencies of slow rotations are divided by `factor`, those of fast ones kept."""

    factor: float
    n_ctx: int  # that the model was first trained on
    beta_fast: float = 32.0  # rotations within n_ctx
    beta_slow: float = 1.0

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0 + 0.1 * math.log(self.factor)

    def frequencies(self, n_rot: int, base: float) -> NDArray[np.float64]:
        """Radians a position, float64 [n_rot / 2]."""

        def pair(rotations: float) -> float:
            """The pair of dimensions that turns so often within n_ctx."""
            return n_rot * math.log(self.n_ctx / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair(self.beta_fast)), 0)
        high = min(math.ceil(pair(self.beta_slow)), n_rot - 1)
        plain = base ** (-2.0 * np.arange(n_rot // 2) / n_rot)
        slow = np.clip((np.arange(n_rot // 2) - low) / max(high - low, 0.001), 0, 1)
        mixed: NDArray[np.float64] = plain * (1 - slow) + plain / self.factor * slow
        return mixed


@dataclass(frozen=True, slots=True)
class Config:
    """Hyper-parameters. n_head: of every layer. windowed: which layers see only `window` positions.

    n_dense: leading layers with an FFN of n_ff. rope_base, rope_dims, yarn: of full layers; the _swa ones of window
    layers. elements: the attention gate has a value an element, not a head.
    """

    n_layer: int
    n_embd: int
    n_head: tuple[int, ...]
    n_head_kv: int
    head_dim: int
    n_dense: int
    n_ff: int
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_ff_shared: int
    n_vocab: int
    n_ctx_train: int
    windowed: tuple[bool, ...]
    window: int
    rope_base: float
    rope_dims: int
    yarn: Yarn | None
    rope_base_swa: float
    rope_dims_swa: int
    eps: float
    gating: str = "sigmoid"
    expert_scale: float = 1.0
    renormalize: bool = True
    elements: bool = False

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Config:
        """Read and check the metadata; a variant that is not implemented is refused by name."""

        def size(key: str, least: int = 1) -> int:
            return number(file, f"{ARCH}.{key}", least)

        def real(key: str, default: float | None = None) -> float:
            key = f"{ARCH}.{key}"
            return float(file.value(key, float) if default is None else file.value(key, float, default))

        for key in UNSUPPORTED:
            if file.metadata.get(f"{ARCH}.{key}", 0):
                raise UnsupportedModelError(f"{ARCH} with {key} is not implemented")
        if number(file, f"{ARCH}.expert_shared_count", default=1) != 1:
            raise UnsupportedModelError(f"{ARCH} with several shared experts is not implemented")
        function = number(file, f"{ARCH}.expert_gating_func", default=2)
        if function not in GATING_FUNCTIONS:
            raise UnsupportedModelError(f"{ARCH} with expert_gating_func {function} is not implemented")
        n_layer, head_dim = size("block_count"), size("attention.key_length", 2)
        if file.value(f"{ARCH}.attention.value_length", int, head_dim) != head_dim:
            raise UnsupportedModelError(f"{ARCH} with value heads of another size than key heads is not implemented")
        if n_layer > len(file.tensors):
            raise ModelFormatError(f"{ARCH}.block_count is {n_layer}, the file has {len(file.tensors)} tensors")
        if "token_embd.weight" not in file.tensors:
            raise ModelFormatError("tensor token_embd.weight is missing")
        n_head = per_layer(file, f"{ARCH}.attention.head_count", n_layer)
        window = number(file, f"{ARCH}.attention.sliding_window", 0, default=0)
        rope_base, rope_dims = real("rope.freq_base"), size("rope.dimension_count", 2)
        gate = file.tensors.get("blk.0.attn_gate.weight")
        n_dense = number(file, f"{ARCH}.leading_dense_block_count", 0)
        config = cls(
            n_layer=n_layer,
            n_embd=size("embedding_length"),
            n_head=n_head,
            n_head_kv=size("attention.head_count_kv"),
            head_dim=head_dim,
            n_dense=n_dense,
            n_ff=size("feed_forward_length") if n_dense else 0,
            n_expert=size("expert_count"),
            n_expert_used=size("expert_used_count"),
            n_ff_exp=size("expert_feed_forward_length"),
            n_ff_shared=size("expert_shared_feed_forward_length"),
            n_vocab=file.tensors["token_embd.weight"].shape[0],
            n_ctx_train=size("context_length"),
            windowed=_windowed(file, n_layer, window),
            window=window,
            rope_base=rope_base,
            rope_dims=rope_dims,
            yarn=_yarn(file),
            rope_base_swa=real("rope.freq_base_swa", rope_base),
            rope_dims_swa=number(file, f"{ARCH}.rope.dimension_count_swa", 2, default=rope_dims),
            eps=real("attention.layer_norm_rms_epsilon"),
            gating=GATING_FUNCTIONS[function],
            expert_scale=real("expert_weights_scale", 1.0) or 1.0,
            renormalize=bool(file.value(f"{ARCH}.expert_weights_norm", bool, True)),
            elements=gate is not None and gate.shape[0] == n_head[0] * head_dim,
        )
        config._check()
        return config

    def _check(self) -> None:
        if any(n % self.n_head_kv for n in self.n_head):
            raise ModelFormatError(f"{self.n_head} heads cannot share {self.n_head_kv} KV heads evenly")
        if self.n_dense >= self.n_layer:
            raise ModelFormatError(f"{self.n_dense} dense layers of {self.n_layer}")
        if self.n_expert_used > self.n_expert:
            raise ModelFormatError(f"{self.n_expert_used} active experts of {self.n_expert}")
        for n in (self.rope_dims, self.rope_dims_swa):
            if n % 2 or n > self.head_dim:
                raise ModelFormatError(f"{n} rotated dimensions of {self.head_dim}")

    def metadata(self) -> dict[str, Any]:
        """The GGUF keys that `from_gguf` reads back (tests and the writer of full-shape models)."""
        values: dict[str, Any] = {
            "block_count": self.n_layer,
            "context_length": self.n_ctx_train,
            "embedding_length": self.n_embd,
            "vocab_size": self.n_vocab,
            "feed_forward_length": self.n_ff,
            "attention.head_count": list(self.n_head),
            "attention.head_count_kv": self.n_head_kv,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.eps,
            "rope.freq_base": self.rope_base,
            "rope.dimension_count": self.rope_dims,
            "leading_dense_block_count": self.n_dense,
            "expert_count": self.n_expert,
            "expert_used_count": self.n_expert_used,
            "expert_feed_forward_length": self.n_ff_exp,
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
        if self.yarn is not None:
            values |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": self.yarn.factor,
                "rope.scaling.original_context_length": self.yarn.n_ctx,
                "rope.scaling.yarn_beta_fast": self.yarn.beta_fast,
                "rope.scaling.yarn_beta_slow": self.yarn.beta_slow,
            }
        return {f"{ARCH}.{key}": value for key, value in values.items()}

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
        n_head = max(self.n_head)
        q = n_head * self.head_dim
        n_ff = max(self.n_ff, self.n_ff_exp, self.n_ff_shared)
        return Widths(n_head, q, self.n_head_kv, self.head_dim, n_ff, n_gate=q if self.elements else n_head)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor and its shape, slowest dimension first (`output.weight` may be absent: tied)."""
        D, E, F, shared = self.n_embd, self.n_expert, self.n_ff_exp, self.n_ff_shared
        kv = self.n_head_kv * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.n_vocab, D),
            "output_norm.weight": (D,),
            "output.weight": (self.n_vocab, D),
        }
        for i, n_head in enumerate(self.n_head):
            p, q = f"blk.{i}.", n_head * self.head_dim
            shapes |= {
                p + "attn_norm.weight": (D,),
                p + "attn_q.weight": (q, D),
                p + "attn_k.weight": (kv, D),
                p + "attn_v.weight": (kv, D),
                p + "attn_gate.weight": (q if self.elements else n_head, D),
                p + "attn_output.weight": (D, q),
                p + "attn_q_norm.weight": (self.head_dim,),
                p + "attn_k_norm.weight": (self.head_dim,),
                p + "ffn_norm.weight": (D,),
            }
            if i < self.n_dense:
                shapes |= {
                    p + "ffn_gate.weight": (self.n_ff, D),
                    p + "ffn_up.weight": (self.n_ff, D),
                    p + "ffn_down.weight": (D, self.n_ff),
                }
                continue
            shapes |= {
                p + "ffn_gate_inp.weight": (E, D),
                p + "exp_probs_b.bias": (E,),
                p + "ffn_gate_exps.weight": (E, F, D),
                p + "ffn_up_exps.weight": (E, F, D),
                p + "ffn_down_exps.weight": (E, D, F),
                p + "ffn_gate_shexp.weight": (shared, D),
                p + "ffn_up_shexp.weight": (shared, D),
                p + "ffn_down_shexp.weight": (D, shared),
            }
        return shapes


def _windowed(file: GGUFFile, n_layer: int, window: int) -> tuple[bool, ...]:
    """Which layers have a window: as an array or a period says, by default all but every fourth, from the first on."""
    key = f"{ARCH}.attention.sliding_window_pattern"
    if not window:
        return (False,) * n_layer
    if not isinstance(file.metadata.get(key, PERIOD), int):
        pattern = [bool(value) for value in file.value(key, list)]
        if len(pattern) < n_layer:
            raise ModelFormatError(f"{key} has {len(pattern)} values, expected {n_layer}")
        return tuple(pattern[:n_layer])
    period = number(file, key, default=PERIOD)
    return tuple(i % period != 0 for i in range(n_layer))


def _yarn(file: GGUFFile) -> Yarn | None:
    p = f"{ARCH}.rope.scaling."
    kind = file.value(p + "type", str, "none")
    if kind == "none":
        return None
    if kind != "yarn":
        raise UnsupportedModelError(f"{ARCH} with rope scaling {kind!r} is not implemented")
    # Engines disagree whether this factor replaces YaRN's magnitude or multiplies it.
    for key in ("attn_factor", "yarn_attn_factor"):
        if file.value(p + key, float, 1.0) != 1.0:
            raise UnsupportedModelError(f"{ARCH} with a rope.scaling.{key} is not implemented")
    # Two converters, two names.
    fast, slow = (
        float(file.value(f"{p}yarn_beta_{speed}", float, file.value(f"{p}beta_{speed}", float, default)))
        for speed, default in (("fast", 32.0), ("slow", 1.0))
    )
    return Yarn(float(file.value(p + "factor", float)), number(file, p + "original_context_length"), fast, slow)


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense FFN."""

    gate: QTensor
    up: QTensor
    down: QTensor


@dataclass(frozen=True, slots=True)
class MoE:
    """A router and the shared expert; the experts are apart (see Residency)."""

    router: QTensor
    gating: Gating
    shared: SharedExpert


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    attn_norm: F32
    wq: QTensor
    wk: QTensor
    wv: QTensor
    wg: QTensor
    wo: QTensor
    q_norm: F32
    k_norm: F32
    ffn_norm: F32
    ffn: Dense | MoE


def load(file: GGUFFile, config: Config) -> Weights[Layer]:
    """Map every tensor with its shape checked; an unknown tensor is refused, not ignored."""
    shapes = config.tensors()
    refuse_unknown(file, shapes)

    def get(name: str) -> QTensor:
        return matrix(file, name, shapes[name])

    def norm(name: str) -> F32:
        return vector(file, name, shapes[name][0])

    layers, experts = [], []
    for i in range(config.n_layer):
        p = f"blk.{i}."
        ffn: Dense | MoE
        if i < config.n_dense:
            ffn = Dense(*(get(f"{p}ffn_{part}.weight") for part in PARTS))
        else:
            gating = Gating(
                "sigmoid" if config.gating == "sigmoid" else "softmax",
                config.renormalize, config.expert_scale, bias=norm(p + "exp_probs_b.bias"),
            )  # fmt: skip
            router = float_matrix(file, p + "ffn_gate_inp.weight", (config.n_expert, config.n_embd))
            ffn = MoE(router, gating, SharedExpert(*(get(f"{p}ffn_{part}_shexp.weight") for part in PARTS)))
            gates, ups, downs = (get(f"{p}ffn_{part}_exps.weight") for part in PARTS)
            experts.append(ExpertTensors(gates, ups, downs))
        layers.append(
            Layer(
                attn_norm=norm(p + "attn_norm.weight"),
                wq=get(p + "attn_q.weight"),
                wk=get(p + "attn_k.weight"),
                wv=get(p + "attn_v.weight"),
                wg=get(p + "attn_gate.weight"),
                wo=get(p + "attn_output.weight"),
                q_norm=norm(p + "attn_q_norm.weight"),
                k_norm=norm(p + "attn_k_norm.weight"),
                ffn_norm=norm(p + "ffn_norm.weight"),
                ffn=ffn,
            )
        )
    token_embd, output = load_ends(file, config.n_vocab, config.n_embd)
    return Weights(token_embd, tuple(layers), norm("output_norm.weight"), output, tuple(experts))


def rope_tables(config: Config, n_ctx: int) -> tuple[F32, ...]:
    """A table for full layers, and one for window layers."""
    if config.yarn is None:
        full = rope_table(n_ctx, config.rope_dims, config.rope_base)
    else:
        full = rotations(n_ctx, config.yarn.frequencies(config.rope_dims, config.rope_base), config.yarn.magnitude)
    return full, rope_table(n_ctx, config.rope_dims_swa, config.rope_base_swa)


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
    scale = config.head_dim**-0.5
    state, T = residency.live, b.x.shape[0]
    ops.embed(ws, weights.token_embd, step.tokens, b.x)
    ops.fetch_ahead(ws, state, 0, residency.banks[0], T)
    for i, layer in enumerate(weights.layers):
        if b.hidden is not None:
            ops.copy(ws, b.x, b.hidden[i])
        m = i - config.n_dense  # among the MoE layers
        if 0 <= m < len(residency.banks) - 1:
            ops.fetch_ahead(ws, state, m + 1, residency.banks[m + 1], T)
        n_head, windowed, group = config.n_head[i], config.windowed[i], kv.group_of[i]
        width = n_head * config.head_dim
        q, gate, attended = b.heads(n_head, config.head_dim), b.gate(layer.wg.shape[0]), b.attended(width)
        ops.attention_input(
            ws, b.x, layer.attn_norm, config.eps, layer.wq, layer.wk, layer.wv, layer.q_norm, layer.k_norm,
            ropes[windowed], step.positions, kv.layers[i], step.slots[group], q, gate=layer.wg, gate_out=gate,
        )  # fmt: skip
        ops.attention(
            ws, q, kv.layers[i], step.block_table[group], step.sequence, step.positions, scale, attended,
            step.n_positions, window=config.window if windowed else 0, gate=gate, gate_kind="softplus",
        )  # fmt: skip
        ops.attention_output(ws, attended, layer.wo, b.x)
        ffn = layer.ffn
        if isinstance(ffn, Dense):
            ops.norm(ws, b.x, layer.ffn_norm, config.eps, b.h)
            ops.dense_ffn(ws, b.h, ffn.gate, ffn.up, ffn.down, b.x)
            continue
        experts, chosen = b.experts[m], b.weights[m]
        ops.router(ws, b.x, layer.ffn_norm, config.eps, ffn.router, b.h, b.router)
        ops.route(ws, b.router, ffn.gating, state, m, step.counted, residency.rule, experts, chosen, b.fetches)
        ops.expert_ffn(ws, b.h, experts, chosen, residency.banks[m], b.fetches, b.x, shared=ffn.shared)
    if len(step.rows):
        head(config, weights, ops, ws, step.rows, b.x, b.logits)


def head(config: Config, weights: Weights[Layer], ops: ModuleType, ws: Any, rows: I32, x: F32, logits: F32) -> None:
    """Logits [R, V] of the given rows of the residual stream x [T, D]."""
    ops.head(ws, x, rows, weights.output_norm, config.eps, weights.output, logits)


def tiny(rng: np.random.Generator, **changes: Any) -> tuple[Config, dict[str, F32]]:
    """A small configuration with every parameter random, every kind of layer and no two dimensions equal.

    Rows are multiples of 256, so that every block type can hold them. Norms are random around one.
    """
    config = Config(
        n_layer=6, n_embd=256, n_head=(20, 12, 12, 12, 20, 12), n_head_kv=2, head_dim=64, n_dense=1, n_ff=1536,
        n_expert=11, n_expert_used=5, n_ff_exp=512, n_ff_shared=1024, n_vocab=301, n_ctx_train=640,
        windowed=(False, True, True, True, False, True), window=13, rope_base=700.0, rope_dims=32,
        yarn=Yarn(factor=4.0, n_ctx=200, beta_fast=8.0), rope_base_swa=90.0, rope_dims_swa=48, eps=1e-5,
        expert_scale=2.5,
    )  # fmt: skip
    config = replace(config, **changes)
    tensors = {}
    for name, shape in config.tensors().items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            tensors[name] = 1 + np.float32(0.3) * values
        elif name.endswith("exp_probs_b.bias"):
            tensors[name] = np.float32(0.2) * values  # about the spread of the scores
        else:
            tensors[name] = values * np.float32(1.0 if name == "token_embd.weight" else 1.2 / np.sqrt(shape[-1]))
    return config, tensors
