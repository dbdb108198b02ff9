"""Attention of a prefill step on tensor cores (cuda/flash.cu)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from engine.ground.kv_types import KVPair
from engine.ops import KV_BLOCK_TOKENS, PIECE_TOKENS, KVLayer, Limits
from engine.ops.cuda.attention import gate_macros, home_arguments, home_macros, kind_macros
from engine.ops.cuda.device import Array, Device, Module

# Blocks that run at once where they are spread thinnest: two on each SM of an H100. A constant, not the device's
# number: how positions are split decides the bits of a result, which must follow from the shapes alone.
SLOTS = 264
MAX_BLOCKS = 2 * SLOTS  # of a split launch; bounds the scratch memory
SPLIT_COST = 2  # of writing and reading back a block's partial result, in tiles of 64 positions
COMBINE_COST = 4  # of the second launch
LOG2_E = math.log2(math.e)


def _block_rows(head_dim: int) -> int:
    return 128 if head_dim <= 128 else 64 if head_dim <= 256 else 32


def _shared_bytes(head_dim: int, kinds: KVPair) -> int:
    """Of a block of cuda/flash.cu."""
    stride = -(-head_dim // 64) * 128
    tile = 64 if head_dim <= 128 else 32 if head_dim <= 256 else 16
    # Of keys, and of values: what is to be converted, or the second stage.
    more = sum(tile * (kind.row_bytes(head_dim) if kind.block else stride) for kind in kinds)
    return _block_rows(head_dim) * stride + 2 * tile * stride + more


@lru_cache(256)
def split(n_blocks: int, n_positions: int) -> tuple[int, int]:
    """Into how many ranges positions are cut, and the KV blocks of one; n_blocks: thread blocks without a split."""
    kv_blocks = -(-n_positions // KV_BLOCK_TOKENS)
    best = (math.inf, 1, kv_blocks)
    for n in range(1, min(kv_blocks, max(1, MAX_BLOCKS // n_blocks)) + 1):
        length = -(-kv_blocks // n)
        waves = -(-n_blocks * n // SLOTS)
        cost = waves * (length + SPLIT_COST) + COMBINE_COST if n > 1 else waves * length
        best = min(best, (cost, -(-kv_blocks // length), length))
    return best[1], best[2]


def launches(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int, bool, int]]:
    """The rows of each launch for a step, whether its positions may be split, and one more than the largest of them.

    spans: of each sequence, its tokens and one more than the largest position. How positions are split depends on the
    rows and positions of a launch, and bits on how positions are split. So each sequence is cut at multiples of
    PIECE_TOKENS, and what lies between two of them is not split: it has the same bits in any step, and can share a
    launch with what is not split of another. There is plenty of it where it is worth anything. What is split has
    launches of its own: those that it has where its sequence is alone.
    """
    made: list[tuple[int, int, bool, int]] = []
    at = 0
    for T, n_positions in spans:
        first = n_positions - T
        begin, end = -first % PIECE_TOKENS, n_positions // PIECE_TOKENS * PIECE_TOKENS - first
        parts = [(0, T, True)] if begin >= end else [(0, begin, True), (begin, end, False), (end, T, True)]
        for a, b, splits in parts:
            if a == b:
                continue
            if made and not splits and not made[-1][2]:
                made[-1] = (made[-1][0], at + b, False, max(made[-1][3], first + b))
            else:
                made.append((at + a, at + b, splits, first + b))
        at += T
    return made


class Flash:
    """Causal attention of a step of any number of tokens over cached blocks, for T > 32.

    Takes head_dim up to 256 in multiples of 8 (of 32 where the cache has scales), 384 and 512, and any number of
    query heads per kv head up to 64 (32 for those two). Results are within an NMSE bound of the reference, and the same
    bits for a row of a whole piece of PIECE_TOKENS, or of a step that ends at the same position and has as many rows
    behind its last whole piece, wherever the blocks lie.
    """

    def __init__(self, device: Device, limits: Limits) -> None:
        self._device = device
        rows = limits.max_tokens * limits.n_head * -(-limits.n_ctx // KV_BLOCK_TOKENS)
        # A block has half the rows where head_dim > 128 and a quarter beyond 256: at most the elements of 128 of 128.
        elements = min(rows * limits.head_dim, MAX_BLOCKS * 128 * min(limits.head_dim, 128))
        self._partial = device.empty((elements,), np.float32)
        self._stats = device.empty((min(rows, MAX_BLOCKS * 128), 2), np.float32)

    def __call__(
        self,
        q: Array,
        kv: KVLayer,
        block_table: Array,
        sequence: Array,
        positions: Array,
        scale: float,
        out: Array,
        *,
        n_positions: int,
        window: int = 0,
        gate: Array | None = None,
        gate_kind: str = "",
        spans: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Causal attention over cached blocks, in logical order.

        q float32 [T, H, head_dim]; block_table int32 [n_sequence, max_blocks], physical block of each logical one;
        sequence, positions int32 [T]: row t sees positions 0..positions[t] of sequence[t], or the last `window` of
        them, the rows of a sequence are contiguous and their positions ascend by one; query head h reads kv head
        h * K // H; out float32 [T, H * head_dim] is written. gate float32 [T, H] or [T, H * head_dim]: out is
        multiplied by gate_kind ("softplus", "sigmoid") of it. n_positions: the largest position of the step, plus one.
        spans: as of `launches`, where there are several sequences; then each has the bits that it has alone.
        ValueError: shapes that the kernels do not take.
        """
        T, H, head_dim = q.shape
        K = kv.k.shape[1]
        group = H // K
        multiple = 128 if head_dim > 256 else 32 if any(kind.block for kind in kv.kinds) else 8
        if head_dim > 512 or head_dim % multiple or H % K or group > min(_block_rows(head_dim), 64):
            raise ValueError(f"attention of {H} heads of {head_dim} over {K} kv heads, cache {kv.k.dtype}")
        if not 0 < n_positions <= block_table.shape[1] * KV_BLOCK_TOKENS:
            raise ValueError(f"{n_positions} positions in a table of {block_table.shape[1]} blocks")
        # A window is short, so its rows need no splits.
        if spans and (sum(n for n, _ in spans), max(end for _, end in spans)) != (T, n_positions):
            raise ValueError(f"spans {spans} of {T} tokens up to position {n_positions}")
        several = block_table.shape[0] > 1 and not spans
        whole = [(0, T, not window, n_positions)]
        for a, b, splits, end in whole if window or several else launches(spans or [(T, n_positions)]):
            own = [x if x is None or b - a == T else x[a:b] for x in (q, sequence, positions, out, gate)]
            self._launch(
                own[0], kv, block_table, own[1], own[2], scale, own[3], end, splits, window, own[4], gate_kind
            )

    def _launch(
        self, q: Array, kv: KVLayer, block_table: Array, sequence: Array, positions: Array, scale: float, out: Array,
        n_positions: int, splits: bool, window: int, gate: Array | None, gate_kind: str,
    ) -> None:  # fmt: skip
        T, H, head_dim = q.shape
        K = kv.k.shape[1]
        group = H // K
        tiles = -(-T // (_block_rows(head_dim) // group))
        n_split, split_blocks = split(tiles * K, n_positions) if splits else (1, -(-n_positions // KV_BLOCK_TOKENS))
        flags = (("HEAD_DIM", str(head_dim)), ("GROUP", str(group)), *kind_macros(kv))
        gating = gate_macros(gate, gate_kind, (T, H, head_dim))
        windowed = (("WINDOW", str(window)),) if window else ()
        module = Module("flash.cu", (*flags, *windowed, *gating, *home_macros(kv)))
        self._device.kernel(module, "flash")(
            (K, tiles, n_split),
            128,
            (
                q,
                *kv.arrays,
                block_table,
                sequence,
                positions,
                out,
                self._partial if n_split > 1 else None,
                self._stats if n_split > 1 else None,
                scale * LOG2_E,
                T,
                K,
                block_table.shape[1],
                split_blocks,
                gate,
                *home_arguments(self._device, kv),
            ),
            _shared_bytes(head_dim, kv.kinds),
        )
        if n_split > 1:
            self._device.kernel(module, "flash_combine")(
                -(-T * H // 4), 128, (self._partial, self._stats, positions, out, T, H, split_blocks, gate)
            )
