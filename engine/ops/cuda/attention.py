"""Attention around the paged KV cache: what enters it (rope.cu), small batches of queries (attention.cu, combine.cu).

`input` follows docs/arithmetic.md bit for bit. `decode` sums in another order than the page, split by position: a
row's result depends on its query, its position and the cached values alone, not on the other rows, the size of
the context or where blocks lie; against the page its NMSE is below 1e-11 (f16), 1e-7 (q8_0).
"""

from __future__ import annotations

import numpy as np

from engine.ops import KV_BLOCK_TOKENS, KVLayer, Limits
from engine.ops.cuda.device import Array, Device, Module
from engine.ops.cuda.products import Quantized

MAX_TOKENS = 8  # of a launch of attention_splits
COMBINE_THREADS = 256
INPUT_HEADS = 4  # of a block of attention_input
MAX_HEAD_DIM = 256
MAX_GROUP = 16  # query heads of a kv head
STATIC_SHARED_BYTES = 3 << 10  # at most, with what a block takes besides


def n_splits(n_blocks: int) -> int:
    """Splits of the positions of so many blocks (split_of in splits.cuh)."""
    n, begin, length = 0, 0, 1
    for end in (32, 128, 512, n_blocks):
        if n_blocks <= begin:
            break
        n += -(-(min(end, n_blocks) - begin) // length)
        begin, length = end, 2 * length
    return n


class Attention:
    """Attention input for any number of tokens, attention for small batches; scratch memory for the latter."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self.device = device
        self.limits = limits
        self._max_splits = n_splits(-(-limits.n_ctx // KV_BLOCK_TOKENS))
        rows = min(limits.max_tokens, MAX_TOKENS) * self._max_splits
        self._partial_o = device.empty((rows * limits.n_head_dim,), np.float32)
        self._partial_ml = device.empty((rows * limits.n_head * 2,), np.float32)

    def input(
        self,
        q_raw: Array,
        k_raw: Array,
        v_raw: Array,
        q_norm: Array | None,
        k_norm: Array | None,
        eps: float,
        rope: Array,
        positions: Array,
        kv: KVLayer,
        slots: Array,
        q: Array,
    ) -> None:
        """Norm and rotate the heads of Q and K; Q goes to `q`, keys and values to the cache. Any T.

        q_raw float32 [T, H * head_dim]; k_raw, v_raw [T, K * head_dim]; q_norm, k_norm [head_dim] or None; rope
        [n_positions, 2, n_rot / 2]; positions, slots int32 [T], a slot of -1 stores nothing; q [T, H, head_dim].
        """
        T, H, head_dim = q.shape
        K = kv.k.shape[1]
        _check_cache(kv, head_dim)
        if q_raw.shape != (T, H * head_dim) or k_raw.shape != (T, K * head_dim) or v_raw.shape != k_raw.shape:
            raise ValueError(f"heads {q_raw.shape}, {k_raw.shape}, {v_raw.shape} for q {q.shape} and {K} kv heads")
        if 2 * rope.shape[2] > head_dim:
            raise ValueError(f"{2 * rope.shape[2]} dimensions to rotate, {head_dim} in a head")
        module = Module("rope.cu", (("HEAD_DIM", str(head_dim)), ("KV_Q8_0", _flag(kv))))
        kernel = self.device.kernel(module, "attention_input")
        kernel(
            (-(-(H + 2 * K) // INPUT_HEADS), T),
            INPUT_HEADS * 32,
            (
                *(q_raw, k_raw, v_raw, q_norm, k_norm, float(eps), rope, rope.shape[2], positions, slots),
                *(H, K, q, kv.k, kv.v, kv.k_scale, kv.v_scale),
            ),
        )

    def decode(
        self,
        q: Array,
        kv: KVLayer,
        block_table: Array,
        sequence: Array,
        positions: Array,
        scale: float,
        out: Array,
        quantized: Quantized | None = None,
    ) -> None:
        """Causal attention of small batches over cached blocks.

        q float32 [T, H, head_dim]; block_table int32 [n_sequence, max_blocks]; sequence, positions int32 [T]: row t
        sees positions 0..positions[t] of sequence[t]; out [T, H * head_dim], also in 8 bits where `quantized` of that
        shape is given. Any T, best up to 8. Tokens of one sequence should be neighbors: they read its cache together.
        """
        limits = self.limits
        T, H, head_dim = q.shape
        K, max_blocks = kv.k.shape[1], block_table.shape[1]
        _check_cache(kv, head_dim)
        if H % K or H // K > MAX_GROUP or H * head_dim > limits.n_head_dim or limits.n_head < H:
            raise ValueError(f"attention of {H} heads of {head_dim} over {K} kv heads")
        max_splits = n_splits(max_blocks)
        if max_splits > self._max_splits:
            raise ValueError(f"a table of {max_blocks} blocks for a context of {limits.n_ctx} tokens")
        if out.shape != (T, H * head_dim) or (quantized is not None and H * head_dim % 32):
            raise ValueError(f"attention of q {q.shape} into {out.shape}")
        for first in range(0, T, MAX_TOKENS):
            rows = slice(first, min(first + MAX_TOKENS, T))
            n = rows.stop - first
            shared_bytes, stages, shared_rows, threads, per_sm = self._plan(n * (H // K), head_dim, kv)
            workers = max(min(per_sm * self.device.n_sm // K, n * max_splits), 1)
            module = Module(
                "attention.cu",
                (
                    ("HEAD_DIM", str(head_dim)),
                    ("KV_Q8_0", _flag(kv)),
                    ("ROWS", str(shared_rows)),
                    ("STAGES", str(stages)),
                ),
            )
            cache = (kv.k, kv.v, kv.k_scale, kv.v_scale)
            sizes = (n, H, K, block_table.shape[0], max_blocks, max_splits)
            partial = (self._partial_o, self._partial_ml)
            self.device.kernel(module, "attention_splits")(
                workers * K,
                threads,
                (q[rows], *cache, block_table, sequence[rows], positions[rows], *sizes, float(scale), *partial),
                shared_bytes,
            )
            to = (None, None, None)
            if quantized is not None:
                to = (quantized.q[rows], quantized.d[rows], quantized.sums[rows])
            combine = Module("combine.cu", (("HEAD_DIM", str(head_dim)),))
            self.device.kernel(combine, "attention_combine")(
                (-(-H * head_dim // 32), n),
                COMBINE_THREADS,
                (*partial, positions[rows], H, max_blocks, max_splits, out[rows], *to),
            )

    def _plan(self, rows: int, head_dim: int, kv: KVLayer) -> tuple[int, int, int, int, int]:
        """Of a block of attention_splits: shared bytes, STAGES, ROWS and threads; and blocks per multiprocessor."""
        shared_rows = next((n for n in (8, 16, 32) if rows <= n), 64)
        if head_dim > 128:
            shared_rows = min(shared_rows, 32)  # registers
        row_bytes = head_dim * kv.k.dtype.itemsize
        slot = KV_BLOCK_TOKENS * (-(-row_bytes // 64) * 64 + 16)
        if kv.k_scale is not None:
            slot += KV_BLOCK_TOKENS * 4 * -(-kv.k_scale.shape[2] // 2)
        probabilities = 2 * max(shared_rows, 16) * (KV_BLOCK_TOKENS + 8) * 2
        narrow = shared_rows <= 16  # 4 warps; else 8
        for per_sm, stages in ((3, 3), (3, 2), (2, 3), (2, 2), (1, 4), (1, 3), (1, 2), (1, 1)):
            if per_sm > 1 and not (narrow and head_dim <= 128):
                continue  # registers: BLOCKS_PER_SM
            n_bytes = 2 * stages * slot + probabilities
            if per_sm * (n_bytes + STATIC_SHARED_BYTES) <= self.device.max_shared_bytes:
                break
        return n_bytes, stages, shared_rows, 128 if narrow else 256, per_sm


def _flag(kv: KVLayer) -> str:
    return "0" if kv.k_scale is None else "1"


def _check_cache(kv: KVLayer, head_dim: int) -> None:
    wanted, multiple = (np.float16, 8) if kv.k_scale is None else (np.int8, 32)
    if kv.k.dtype != wanted or kv.k.shape[2] != head_dim or head_dim % multiple or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"a cache {kv.k.dtype} {kv.k.shape} for heads of {head_dim}")
