"""Cases of cuda_kernels.py: prefill attention at Qwen3-30B-A3B's shapes (32 query heads of 128 over 4 kv heads)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.cuda_attention import cache_arrays
from benchmarks.cuda_kernels import KernelCase
from engine.ops import KV_BLOCK_TOKENS, KVLayer, Limits
from engine.ops.cuda.flash import Flash

H, K, HEAD_DIM = 32, 4, 128
CASES = (  # tokens, first position, type of the cache
    (4096, 0, "f16"),
    (4096, 0, "q8_0"),
    (512, 0, "f16"),
    (4096, 28672, "f16"),
    (512, 16384, "f16"),
    (64, 16384, "f16"),
    (64, 16384, "q8_0"),
    (4096, 0, "q4_0"),
    (64, 16384, "q4_0"),
    (64, 16384, "f16,q4_0"),
)
ROTATED_BYTES = 120_000_000


def _launcher(device: Any, flash: Flash, T: int, first: int, kv_type: str) -> tuple[Callable[[int], None], int]:
    """What launches repetition i, and the bytes of one."""
    rng = np.random.default_rng(0)
    n_positions = first + T
    n_blocks = -(-n_positions // KV_BLOCK_TOKENS)
    table = device.upload(rng.permutation(n_blocks).astype(np.int32)[None])
    sequence = device.upload(np.zeros(T, np.int32))
    positions = device.upload(np.arange(first, n_positions, dtype=np.int32))
    out = device.empty((T, H * HEAD_DIM), np.float32)
    host = cache_arrays(kv_type, n_blocks * KV_BLOCK_TOKENS, K, HEAD_DIM, rng)
    kv_bytes = sum(a.nbytes for a in host if a is not None)
    io_bytes = 2 * T * H * HEAD_DIM * 4
    copies = 1 + -(-ROTATED_BYTES // (kv_bytes + io_bytes))
    kvs = [KVLayer(*(None if a is None else device.upload(a) for a in host)) for _ in range(copies)]
    queries = [device.upload(rng.standard_normal((T, H, HEAD_DIM), np.float32)) for _ in range(copies)]
    scale = HEAD_DIM**-0.5

    def launch(i: int) -> None:
        at = i % copies
        flash(queries[at], kvs[at], table, sequence, positions, scale, out, n_positions=n_positions)

    return launch, kv_bytes + io_bytes


def cases(device: Any) -> Iterator[KernelCase]:
    """Each case's data is made when it is asked for."""
    limits = Limits(4096, 2048, H * HEAD_DIM, 768, 151936, 128, 8, H, K, HEAD_DIM, 32768)
    flash = Flash(device, limits)
    for T, first, kv_type in CASES:
        launch, n_bytes = _launcher(device, flash, T, first, kv_type)
        seen = T * first + T * (T + 1) // 2  # (query, position) pairs of a head
        name = f"flash T={T} at {first // 1024}K {kv_type}"
        yield KernelCase(name, launch, n_bytes, 4 * H * HEAD_DIM * seen)
