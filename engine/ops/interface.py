"""What a backend of ops is: a module with the functions of `Ops`, and the workspace that they share.

The shapes are those of `reference.py`, which computes what the others must. `tests/test_protocols.py` has mypy compare
the backends with this page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from engine.formats.quants import QTensor
from engine.ops import (
    F32,
    I32,
    U8,
    Activation,
    AttentionInput,
    DeltaInput,
    DeltaLayer,
    Experts,
    Fetches,
    Gating,
    KVLayer,
    Limits,
    Recall,
    SharedExpert,
    ShortRows,
)
from engine.placing import policy

Scratch = Any  # a backend's own `Workspace`, which no other backend's ops take


class Workspace(Protocol):
    """Scratch memory of a backend's ops for steps within `limits`; isa: what its kernels were compiled for."""

    limits: Limits
    isa: str

    def repeat(self, noted: Any, work: Callable[[], None]) -> Any:
        """Run `work`, ops alone, or what a backend noted of it; what to give for `noted` the next time, None at first.

        For work that was done before and differs in nothing but the contents of arrays.
        """

    def feed(self, pairs: Sequence[tuple[Any, NDArray[Any]]]) -> None:
        """Copy arrays of the host into arrays of the device, in order with ops; the host's may change afterwards."""

    def close(self) -> None:
        """Release the memory, and threads where there are any."""


class Ops(Protocol):
    """The ops of a backend, in the order in which a step uses them."""

    def embed(self, ws: Scratch, table: QTensor, tokens: I32, x: F32, scale: float = 1.0) -> None:
        """Rows of the embedding table; the first op of a step."""

    def fetch_ahead(
        self, ws: Scratch, x: F32, state: policy.SlotState, bank: Experts, short: ShortRows | None = None
    ) -> None:
        """A hint that the experts of `bank` are wanted soon: of every MoE layer, before the one ahead of it routes.

        x [T, D]: the residual that enters that one.
        """

    def copy(self, ws: Scratch, x: F32, to: F32) -> None:
        """Copy an array."""

    def stage(self, ws: Scratch, absent: I32, homes: KVLayer, staging: KVLayer, wanted: I32 | None = None) -> None:
        """Bring blocks of a layer's cache from their homes to the staging area, or what is wanted of them."""

    def stage_ahead(self, ws: Scratch, absent: I32, homes: KVLayer, staging: KVLayer) -> None:
        """A hint, in a step of more than SMALL_TOKENS, that `stage` is asked for this next; nobody reads the area."""

    def norm(self, ws: Scratch, x: F32, weight: F32, eps: float, out: F32) -> None:
        """The RMS norm."""

    def add_norm(
        self, ws: Scratch, y: F32, weight: F32, eps: float, x: F32, scale: float = 1.0,
        then: Sequence[tuple[F32, F32]] = (),
    ) -> None:  # fmt: skip
        """Add the RMS norm of y to x; then norms of x."""

    def add_norms(
        self, ws: Scratch, a: F32, a_norm: F32, b: F32, b_norm: F32, weight: F32, eps: float, x: F32,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Add the RMS norm of the sum of two RMS norms to x."""

    def attention_input(
        self, ws: Scratch, x: F32, w: AttentionInput, eps: float, rope: F32, positions: I32, kv: KVLayer, slots: I32,
        q: F32, gate_out: F32 | None = None,
    ) -> None:  # fmt: skip
        """Norm, Q, K, V, per-head norms and RoPE; keys and values to the cache."""

    def attention(
        self, ws: Scratch, q: F32, kv: KVLayer, block_table: I32, sequence: I32, positions: I32, scale: float, out: F32,
        n_positions: int = 0, window: int = 0, gate: F32 | None = None, gate_kind: str = "", apart: bool = False,
        spans: tuple[tuple[int, int], ...] = (), as_block: bool = False, recall: Recall | None = None,
    ) -> None:  # fmt: skip
        """Causal attention over cached blocks, or over those that were chosen."""

    def summarize(self, ws: Scratch, kv: KVLayer, places: I32, blocks: I32, sketches: U8) -> None:
        """The sketches of full blocks of keys."""

    def choose(
        self, ws: Scratch, q: F32, sketches: U8, blocks: I32, sequence: I32, positions: I32, most: I32, leave: I32,
        keep: U8, scale: float, recall: Recall,
    ) -> None:  # fmt: skip
        """Which blocks each row reads, of those that have sketches."""

    def find_absent(
        self, ws: Scratch, kv: KVLayer, block_table: I32, sequence: I32, recall: Recall, absent: I32, wanted: I32
    ) -> None:
        """Which blocks of the staging area the rows of a choice read."""

    def attention_output(self, ws: Scratch, attended: F32, wo: QTensor, x: F32, add: bool = True) -> None:
        """What attention gives, back to the residual."""

    def delta_input(
        self, ws: Scratch, x: F32, w: DeltaInput, eps: float, mixed: F32, z: F32, beta: F32, alpha: F32
    ) -> None:
        """Four products of the normed residual."""

    def delta(
        self, ws: Scratch, mixed: F32, beta: F32, alpha: F32, conv: F32, dt_bias: F32, a: F32, eps: float,
        layer: DeltaLayer, states: I32, sequence: I32, positions: I32, slots: I32, out: F32,
    ) -> None:  # fmt: skip
        """Convolution, gates and the gated delta rule."""

    def delta_output(self, ws: Scratch, y: F32, z: F32, norm: F32, eps: float, w_out: QTensor, x: F32) -> None:
        """What the recurrence gives, normed and gated, back to the residual."""

    def dense_ffn(
        self, ws: Scratch, h: F32, gate: QTensor, up: QTensor, down: QTensor, x: F32,
        activation: Activation = "silu", add: bool = True, shared_gate: QTensor | None = None,
    ) -> None:  # fmt: skip
        """A dense FFN, or a shared expert."""

    def router(self, ws: Scratch, x: F32, norm: F32, eps: float, gate: QTensor, h: F32, logits: F32) -> None:
        """The normed residual and the router's logits."""

    def route(
        self, ws: Scratch, logits: F32, gating: Gating, state: policy.SlotState, bank: Experts, counted: U8,
        rule: policy.Rule, experts: I32, weights: F32, fetches: Fetches, short: ShortRows | None = None,
    ) -> None:  # fmt: skip
        """Choose experts, and let the slots of the layer of `bank` follow. short: as `expert_ffn` gets it."""

    def expert_ffn(
        self, ws: Scratch, h: F32, experts: I32, weights: F32, bank: Experts, fetches: Fetches, x: F32,
        add: bool = True, shared: SharedExpert | None = None, then: tuple[F32, float] | None = None,
        short: ShortRows | None = None,
    ) -> None:  # fmt: skip
        """The chosen experts, and a shared one; then: a hint, the norm (weight, epsilon) by which x is read next.

        short: rows of a step of more than SMALL_TOKENS that follow docs/arithmetic.md, where others may not.
        """

    def head(
        self, ws: Scratch, x: F32, rows: I32, norm: F32, eps: float, output: QTensor, logits: F32, softcap: float = 0.0
    ) -> None:
        """Logits of the chosen rows."""
