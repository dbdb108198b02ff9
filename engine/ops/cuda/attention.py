"""Attention around the paged KV cache: what enters it (rope.cu), small batches of queries (attention.cu, combine.cu).

`input` follows docs/arithmetic.md bit for bit. `decode` sums in another order than the page, split by position, and
rounds probabilities to halves: a row's result depends on its query, its position and the cached values alone, not on
the other rows, the size of the context or where blocks lie; against the page its NMSE is below 1e-7.

With `overlap` these kernels begin before the ones ahead of them have ended and load what those do not write: positions,
slots, the block table, older keys and values. So none of these may be written in the same graph after its last
launch without overlap.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from engine.ops import KV_BLOCK_TOKENS, SMALL_TOKENS, KVLayer, Limits
from engine.ops.cuda.device import Array, Device, Module
from engine.ops.cuda.products import Quantized

MAX_TOKENS = 8  # of a launch of attention_splits
TARGET_BLOCKS = 128  # of attention_splits for one long sequence: about the multiprocessors of a large GPU
SPLITS = (16, 64)  # at least, at most: of a sequence, for each kv head
MAX_STAGES = 4  # tiles in flight: enough for the latency of memory
COMBINE_THREADS = 256
INPUT_HEADS = 4  # of a block of attention_input
MAX_HEAD_DIM = 256
MAX_GROUP = 16  # query heads of a kv head
STATIC_SHARED_BYTES = 6 << 10  # at most, with what a block takes besides


class Attention:
    """Attention input for any number of tokens, attention for small batches; scratch memory for the latter."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self.device = device
        self.limits = limits
        self.splits = min(max(TARGET_BLOCKS // limits.n_head_kv, SPLITS[0]), SPLITS[1])
        self.max_stages = MAX_STAGES
        self.overlap = True
        rows = min(limits.max_tokens, MAX_TOKENS) * self.splits
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
            overlap=self.overlap and T <= SMALL_TOKENS,
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
        if -(-limits.n_ctx // KV_BLOCK_TOKENS) < max_blocks:
            raise ValueError(f"a table of {max_blocks} blocks for a context of {limits.n_ctx} tokens")
        max_splits = min(self.splits, max_blocks)
        splits = ("SPLITS", str(self.splits))
        overlap = self.overlap and T <= MAX_TOKENS  # else a launch would read what the tokens of another one store
        if out.shape != (T, H * head_dim) or (quantized is not None and H * head_dim % 32):
            raise ValueError(f"attention of q {q.shape} into {out.shape}")
        for first in range(0, T, MAX_TOKENS):
            rows = slice(first, min(first + MAX_TOKENS, T))
            n = rows.stop - first
            shared_bytes, stages, shared_rows, per_sm = self._plan(n, H // K, head_dim, kv)
            workers = max(min(per_sm * self.device.n_sm // K, n * max_splits), 1)
            flags = (("HEAD_DIM", str(head_dim)), ("KV_Q8_0", _flag(kv)))
            module = Module("attention.cu", (*flags, ("ROWS", str(shared_rows)), ("STAGES", str(stages)), splits))
            cache = (kv.k, kv.v, kv.k_scale, kv.v_scale)
            sizes = (n, H, K, max_blocks, max_splits)
            partial = (self._partial_o, self._partial_ml)
            self.device.kernel(module, "attention_splits")(
                (K, workers),
                128 * -(-shared_rows // 16),
                (q[rows], *cache, block_table, sequence[rows], positions[rows], *sizes, float(scale), *partial),
                shared_bytes,
                overlap,
            )
            to = (None, None, None)
            if quantized is not None:
                to = (quantized.q[rows], quantized.d[rows], quantized.sums[rows])
            combine = Module("combine.cu", (flags[0], splits))
            self.device.kernel(combine, "attention_combine")(
                (-(-H * head_dim // 32), n),
                COMBINE_THREADS,
                (*partial, positions[rows], H, max_blocks, max_splits, out[rows], *to),
                overlap=overlap,
            )

    def _plan(self, n_tokens: int, group: int, head_dim: int, kv: KVLayer) -> tuple[int, int, int, int]:
        """Of a block of attention_splits: shared bytes, STAGES and ROWS; and blocks per multiprocessor."""
        row_bytes = head_dim * kv.k.dtype.itemsize
        slot = KV_BLOCK_TOKENS * (-(-row_bytes // 64) * 64 + 16)
        if kv.k_scale is not None:
            slot += KV_BLOCK_TOKENS * 4 * -(-kv.k_scale.shape[2] // 2)
        per_sm = min(-(-self.splits * kv.k.shape[1] // self.device.n_sm), 2)
        least = 8 if group <= 8 else 16
        most = next((n for n in (8, 16, 32) if n_tokens * group <= n), 64 if head_dim <= 128 else 32)  # registers
        for rows, n in product((n for n in (64, 32, 16, 8) if least <= n <= most), (per_sm, 1)):
            if n > 1 and rows > 16:
                continue  # registers
            merged = -(-head_dim // 32) * 32 if rows <= 16 and head_dim <= 128 else 32  # dimensions at a time
            besides = 2 * rows * (-(-head_dim // 16) * 16 + 8) * 2 + 4 * rows * (merged + 8) * 4
            memory = self.device.max_shared_bytes // n - STATIC_SHARED_BYTES
            stages = max(min((memory - besides) // (2 * slot), self.max_stages), 1)
            if stages > 1:
                break
        return 2 * stages * slot + besides, stages, rows, n


def _flag(kv: KVLayer) -> str:
    return "0" if kv.k_scale is None else "1"


def _check_cache(kv: KVLayer, head_dim: int) -> None:
    wanted, multiple = (np.float16, 8) if kv.k_scale is None else (np.int8, 32)
    if kv.k.dtype != wanted or kv.k.shape[2] != head_dim or head_dim % multiple or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"a cache {kv.k.dtype} {kv.k.shape} for heads of {head_dim}")
