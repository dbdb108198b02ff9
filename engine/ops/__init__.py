"""Backends: modules of functions with one signature set, and the records they share.

`reference` is NumPy, slow and obvious, the oracle; `cpu` binds the kernels of `cpu/`. Ops are
stateless: they write into given outputs and workspaces, allocate nothing that outlives a call and
take no decision on the host that a captured graph could not take.

Axis letters: T tokens, D embd, F ff, E experts, A active, H heads, K kv heads, S cached positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import gguf
import numpy as np
from numpy.typing import NDArray

from engine.formats.quants import QTensor
from engine.ground.kv_types import BY_DTYPE, KVPair

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]

Activation = Literal["silu", "gelu"]  # gelu: the approximation by tanh
GatingKind = Literal["softmax", "sigmoid"]

KV_BLOCK_TOKENS = 64
SMALL_TOKENS = 32  # a step of at most so many tokens follows docs/arithmetic.md on every backend (see docs/cuda.md)
SHORT_ROWS = 128  # at most so many at the end of a prompt have experts as in such a step, in a longer one, too
CHUNK_BLOCKS = 8  # whose masses are summed together when blocks are chosen
MASS_UNITS = 1 << 24  # of what a query sees before the tail, as is counted of blocks that are left out
TAIL_BLOCKS = 3  # full blocks that a row reads anyway, before the one that it lies in
PIECE_TOKENS = 512  # a longer step has the bits of several that end at multiples of so many positions


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds of a step; a workspace is sized by them once.

    max_tokens: rows T of one step. n_embd, n_ff, n_vocab, n_expert, n_expert_used: of the model.
    n_head_dim: n_head * head_dim, the width of the attention output. n_head, n_head_kv, head_dim: the
    largest of any layer. n_ctx: positions of a sequence. max_rows: rows of logits of a
    step. max_sequences: sequences that share a step;
    places: those that are alive at a time. n_ff: of the widest FFN; n_ff_exp: of the widest expert, 0: n_ff.
    n_mixed: channels C of a gated DeltaNet; n_z = n_head_v * d_v; d_k, d_v of its heads; all 0: there is none.
    """

    max_tokens: int
    n_embd: int
    n_head_dim: int
    n_ff: int
    n_vocab: int
    n_expert: int
    n_expert_used: int
    n_head: int = 1
    n_head_kv: int = 1
    head_dim: int = 128
    n_ctx: int = 4096
    max_rows: int = 64
    max_sequences: int = 8
    places: int = 8
    n_ff_exp: int = 0
    n_mixed: int = 0
    n_z: int = 0
    n_head_v: int = 0
    d_k: int = 0
    d_v: int = 0


@dataclass(frozen=True, slots=True)
class KVLayer:
    """Cached keys and values of one layer, by slot (physical block * 64 + offset).

    homes: None, or arrays of the same layout elsewhere, which have the blocks behind the last of `k`: that many less.
    Keys and values each are of one type, which the elements tell.
    f16: float16 [n_slots, K, head_dim], and no scales.
    q8_0: int8 [n_slots, K, head_dim], scales float16 [n_slots, K, head_dim / 32].
    q4_0: uint8 [n_slots, K, head_dim / 2], scales as these; byte j of 16 has dimension j below and 16 + j above.
    """

    k: NDArray[np.float16] | NDArray[np.int8] | NDArray[np.uint8]
    v: NDArray[np.float16] | NDArray[np.int8] | NDArray[np.uint8]
    k_scale: NDArray[np.float16] | None = None
    v_scale: NDArray[np.float16] | None = None
    homes: KVLayer | None = None

    @property
    def kinds(self) -> KVPair:
        """How keys and values are stored."""
        return _kinds_of(self.k.dtype, self.v.dtype)

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return int(self.k.shape[2]) * self.kinds.k.packed

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Keys, values and their scales, as attention takes them: None where there are none."""
        return self.k, self.v, self.k_scale, self.v_scale


@cache
def _kinds_of(keys: np.dtype[Any], values: np.dtype[Any]) -> KVPair:
    """The kinds of such elements; every launch that reads a cache asks."""
    names = [np.dtype(dtype).name for dtype in (keys, values)]
    if not all(name in BY_DTYPE for name in names):
        raise ValueError(f"a cache of {names[0]} and {names[1]}")
    return KVPair(*(BY_DTYPE[name] for name in names))


@dataclass(frozen=True, slots=True)
class Recall:
    """What `choose` writes for the rows of a step, and what attention then reads of it (docs/arithmetic.md, "Recall").

    W is the width of the block tables. chosen: uint8 [T, K, W], 1 where a KV head's queries read a logical block.
    left: float32 [T, H, 2], of the blocks before the tail the largest score of a key as sketched, and the masses beside
    it of those that are not read; -inf and 0 where all are. On a device attention takes off what is read.
    missed: float32 [T, H], written by attention: the share of a query's mass that these blocks have, as estimated.
    read: int32 [T, K], how many blocks that are. masses float32 [T, H, 2, W] and scores float32 [T, K, W] are scratch,
    from `choose` to the end of attention.
    On a device `scores` is where attention finds the blocks to read, int32, one after the other, and last, int32
    [T, K], has the row's position among them.
    """

    chosen: U8
    left: F32
    missed: F32
    read: I32
    masses: F32
    scores: F32
    last: I32


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """Weights of what enters attention: norm [D]; wq [H * head_dim, D], wk and wv [K * head_dim, D]; norms [head_dim].

    Without wk the layer reads another's cache; without wv alone the values are the raw keys. gate [G, D]: what the
    result of attention is multiplied by.
    """

    norm: F32
    wq: QTensor
    wk: QTensor | None = None
    wv: QTensor | None = None
    q_norm: F32 | None = None
    k_norm: F32 | None = None
    v_norm: F32 | None = None
    gate: QTensor | None = None


@dataclass(frozen=True, slots=True)
class DeltaInput:
    """Weights of what enters a gated DeltaNet: norm [D]; qkv [C, D], z [H_v * d_v, D], beta and alpha [H_v, D]."""

    norm: F32
    qkv: QTensor
    z: QTensor
    beta: QTensor
    alpha: QTensor

    @property
    def matrices(self) -> tuple[QTensor, QTensor, QTensor, QTensor]:
        """The four products, in the order of what they give."""
        return self.qkv, self.z, self.beta, self.alpha


@dataclass(frozen=True, slots=True)
class Fetches:
    """Experts that enter slots in a step: rows (expert, slot, evicted or -1), `count[0]` of them."""

    rows: I32  # [n_expert, 3]
    count: I32  # [1]


@dataclass(frozen=True, slots=True)
class ShortRows:
    """The rows of a long step whose experts are computed as in a step of SMALL_TOKENS (docs/cuda.md, "Prefill").

    n: how many. first: the first of them. mask: uint8 [T], 1 for these; None: all rows from the first on are.
    """

    n: int
    first: int = 0
    mask: U8 | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one MoE layer: types and shapes of the three matrices, and where they are.

    gate, up: matrices [F, D]; down: [D, F]; `part_bytes` the size of one expert's gate, up, down. layer: its number
    among the MoE layers.
    expert_ptr: uint64 [E, 3] where an expert is read from now, a view of the residency state.
    home_ptr: uint64 [E, 3] its place in the slow tier. slot_ptr: uint64 [N, 3] all slots.
    poison: fill a slot with 0xFF (NaN scales, or weights far from any model's) before a fetch refills it.
    activation: of the gate's product. gate_scale: float32 [E] or None, multiplies it before.
    """

    gate_type: gguf.GGMLQuantizationType
    up_type: gguf.GGMLQuantizationType
    down_type: gguf.GGMLQuantizationType
    n_embd: int
    n_ff: int
    part_bytes: tuple[int, int, int]
    expert_ptr: U64
    home_ptr: U64
    slot_ptr: U64
    poison: bool = False
    activation: Activation = "silu"
    gate_scale: F32 | None = None
    layer: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert of a layer that every token uses, beside those it chooses: gate, up [F, D], down [D, F].

    shared_gate [1, D] of a float type: its output is multiplied by sigmoid(shared_gate h); None: by nothing.
    """

    gate: QTensor
    up: QTensor
    down: QTensor
    shared_gate: QTensor | None = None


@dataclass(frozen=True, slots=True)
class Gating:
    """How a router's logits become experts and weights.

    kind: what turns logits into scores. bias: float32 [E] or None, added to the scores for the choice alone.
    renormalize: the weights of a token's experts are its scores divided by their sum. scale multiplies every weight,
    expert_scale, float32 [E] or None, each expert's own.
    """

    kind: GatingKind = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    bias: F32 | None = None
    expert_scale: F32 | None = None


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """The state of a gated DeltaNet layer, by state slot; a slot belongs to at most one sequence.

    conv: float32 [n_states, kernel - 1, C], the last inputs of the causal convolution, oldest first. state: float32
    [n_states, H_v, d_v, d_k]: S transposed, so that a row is what one output dimension reads.
    """

    conv: F32
    state: F32
