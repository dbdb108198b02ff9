"""What a cache keeps of a model's layers, and how many blocks and bytes that is: the one set of formulas.

The plan counts with them before anything is there, and the cache is allocated by them (engine/memory/kv.py). No tensor
is looked at here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.ground.kv_types import pair_of
from engine.memory.blocks import WINDOW_MARGIN_TOKENS
from engine.memory.places import MOST_LEAVE
from engine.ops import KV_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table: `layers` own caches of one shape. window: positions a query sees; 0: all."""

    layers: tuple[int, ...]
    n_head_kv: int
    head_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The recurrent layers: taps and channels of their convolution, heads and sizes of their state."""

    layers: tuple[int, ...]
    kernel: int
    n_channels: int
    n_head_v: int
    d_k: int
    d_v: int

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in all layers."""
        return 4 * len(self.layers) * ((self.kernel - 1) * self.n_channels + self.n_head_v * self.d_v * self.d_k)


class CacheShape(Protocol):
    """What a cache reads of a model's configuration."""

    @property
    def n_layer(self) -> int:
        """Layers of the model."""

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers that own a cache, by shape and reach."""

    @property
    def delta(self) -> DeltaShape | None:
        """The recurrent layers, if there are any."""

    def kv_layer(self, layer: int) -> int | None:
        """The layer whose cache a layer reads; None in a recurrent one."""


def group_blocks(group: KVGroup, n_tokens: int, step_tokens: int, n_sequences: int) -> int:
    """Blocks of a group's pool: of n_tokens positions, or of what windows keep of them if that is less.

    step_tokens: of the longest step; one sequence at a time is in such a step, the others decode.
    """
    everything = -(-n_tokens // KV_BLOCK_TOKENS)
    if not group.window:
        return everything
    kept = group.window + WINDOW_MARGIN_TOKENS
    # A reach of n positions touches one block more than it fills when it begins inside one.
    longest, decoding = (-(-(kept + step) // KV_BLOCK_TOKENS) + 1 for step in (step_tokens, 1))
    return min(everything, longest + (n_sequences - 1) * decoding)


def group_bytes(group: KVGroup, n_blocks: int, kv_type: str) -> int:
    """Bytes of a group's keys and values; the one formula, for the plan and for the allocation."""
    rows = len(group.layers) * n_blocks * KV_BLOCK_TOKENS * group.n_head_kv
    return rows * pair_of(kv_type).row_bytes(group.head_dim)


def cached_tokens(n_ctx: int, pool_tokens: int | None) -> int:
    """Positions that a cache holds: a context, or a pool that is larger."""
    return max(n_ctx, pool_tokens or 0)


def pooled_bytes(config: CacheShape, kv_type: str) -> int:
    """Bytes of a position in the groups without a window."""
    return sum(group_bytes(g, 1, kv_type) for g in config.kv_groups if not g.window) // KV_BLOCK_TOKENS


def least_pool(step_tokens: int, n_sequences: int) -> int:
    """Tokens of the smallest pool that steps of so many can do with, and as many sequences.

    A step writes all its blocks, each sequence up to three more, and a piece of a prefix comes back whole.
    """
    step = -(-step_tokens // KV_BLOCK_TOKENS)
    return KV_BLOCK_TOKENS * (step + 1 + 3 * n_sequences + min(step, MOST_LEAVE // 2) + 1)
