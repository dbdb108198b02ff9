"""Cases of cuda_kernels.py: prefill attention at Qwen3-30B-A3B's shapes (32 query heads of 128 over 4 kv heads)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.cuda_kernels import KernelCase
from engine.ops import KV_BLOCK_TOKENS, KVLayer, Limits
from engine.ops.cuda.flash import Flash

H, K, HEAD_DIM = 32, 4, 128
CASES = (  # tokens, first position, q8_0
    (4096, 0, False),
    (4096, 0, True),
    (512, 0, False),
    (4096, 28672, False),
    (512, 16384, False),
    (64, 16384, False),
    (64, 16384, True),
)
ROTATED_BYTES = 120_000_000


def _launcher(device: Any, flash: Flash, T: int, first: int, q8: bool) -> tuple[Callable[[int], None], int]:
    """What launches repetition i, and the bytes of one."""
    rng = np.random.default_rng(0)
    n_positions = first + T
    n_blocks = -(-n_positions // KV_BLOCK_TOKENS)
    shape = (n_blocks * KV_BLOCK_TOKENS, K, HEAD_DIM)
    table = device.upload(rng.permutation(n_blocks).astype(np.int32)[None])
    sequence = device.upload(np.zeros(T, np.int32))
    positions = device.upload(np.arange(first, n_positions, dtype=np.int32))
    out = device.empty((T, H * HEAD_DIM), np.float32)
    values = rng.standard_normal(shape, np.float32)

    def cache() -> KVLayer:
        if not q8:
            return KVLayer(device.upload(values.astype(np.float16)), device.upload(values.astype(np.float16)))
        quants = np.clip(np.rint(values * 40), -127, 127).astype(np.int8)
        scales = np.full((*shape[:2], HEAD_DIM // 32), 1 / 40, np.float16)
        return KVLayer(*[device.upload(a) for a in (quants, quants, scales, scales)])

    kv_bytes = 2 * int(np.prod(shape)) * (34 if q8 else 64) // 32
    io_bytes = 2 * T * H * HEAD_DIM * 4
    copies = 1 + -(-ROTATED_BYTES // (kv_bytes + io_bytes))
    kvs = [cache() for _ in range(copies)]
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
    for T, first, q8 in CASES:
        launch, n_bytes = _launcher(device, flash, T, first, q8)
        seen = T * first + T * (T + 1) // 2  # (query, position) pairs of a head
        name = f"flash T={T} at {first // 1024}K {'q8_0' if q8 else 'f16'}"
        yield KernelCase(name, launch, n_bytes, 4 * H * HEAD_DIM * seen)
