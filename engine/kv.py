"""The KV cache: a pool of 64-token blocks and the block table of each sequence.

Position and slot are separate things: a sequence's logical block b lies in any physical block, and
results do not depend on which. `BlockPool` is bookkeeping without tensors; `KVCache` holds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.config import KVType
from engine.errors import CapacityError
from engine.ops import I32, KV_BLOCK_TOKENS, KVLayer


class BlockPool:
    """Free physical blocks; a block belongs to at most one sequence."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def take(self) -> int:
        """A free block; CapacityError when there is none."""
        if not self._free:
            raise CapacityError(f"all {self.n_blocks} blocks of the KV cache are in use")
        return self._free.pop()

    def give_back(self, blocks: list[int]) -> None:
        """Return blocks to the pool."""
        assert not set(blocks) & set(self._free)
        self._free.extend(blocks)


@dataclass(slots=True)
class Sequence:
    """The cached tokens of one request: `length` positions in `blocks`, by logical order."""

    pool: BlockPool
    blocks: list[int] = field(default_factory=list)
    length: int = 0

    def reserve(self, n_tokens: int) -> None:
        """Take the blocks that `n_tokens` more positions need; the length stays."""
        while len(self.blocks) * KV_BLOCK_TOKENS < self.length + n_tokens:
            self.blocks.append(self.pool.take())

    def extend(self, n_tokens: int) -> I32:
        """Slots int32 [n_tokens] for the next positions; takes blocks as needed."""
        self.reserve(n_tokens)
        end = self.length + n_tokens
        positions = np.arange(self.length, end)
        table = np.asarray(self.blocks, dtype=np.int32)
        self.length = end
        return (table[positions // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + positions % KV_BLOCK_TOKENS).astype(np.int32)

    def release(self) -> None:
        """Give every block back."""
        self.pool.give_back(self.blocks)
        self.blocks, self.length = [], 0


def block_table(sequences: list[Sequence], width: int) -> I32:
    """The tables of several sequences, int32 [n_sequence, width], padded with -1."""
    table = np.full((len(sequences), width), -1, np.int32)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    return table


def kv_bytes(n_layer: int, n_head_kv: int, head_dim: int, n_blocks: int, kv_type: KVType) -> int:
    """Bytes of keys and values; the one formula, for the plan and for the allocation."""
    per_head = head_dim * 2 if kv_type == "f16" else head_dim + head_dim // 32 * 2
    return 2 * n_layer * n_blocks * KV_BLOCK_TOKENS * n_head_kv * per_head


class KVCache:
    """Keys and values of every layer (`layers[i]`), on `device`, and the pool of their blocks."""

    def __init__(
        self, device: Any, n_layer: int, n_head_kv: int, head_dim: int, n_tokens: int, kv_type: KVType
    ) -> None:
        n_blocks = -(-n_tokens // KV_BLOCK_TOKENS)
        n_slots = n_blocks * KV_BLOCK_TOKENS
        self.pool = BlockPool(n_blocks)
        self.nbytes = kv_bytes(n_layer, n_head_kv, head_dim, n_blocks, kv_type)
        shape = (n_slots, n_head_kv, head_dim)
        scales = (n_slots, n_head_kv, head_dim // 32)
        if kv_type == "f16":
            self.layers = tuple(
                KVLayer(device.empty(shape, np.float16), device.empty(shape, np.float16)) for _ in range(n_layer)
            )
        else:
            self.layers = tuple(
                KVLayer(
                    device.empty(shape, np.int8),
                    device.empty(shape, np.int8),
                    device.empty(scales, np.float16),
                    device.empty(scales, np.float16),
                )
                for _ in range(n_layer)
            )
