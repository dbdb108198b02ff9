"""Timing of attention input and of small-batch attention at several depths (cuda/rope.cu, cuda/attention.cu)."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.cuda_kernels import KernelCase
from engine.ground.kv_types import pair_of
from engine.ops import KV_BLOCK_TOKENS, KVLayer, Limits, arithmetic
from engine.ops.cuda.attention import Attention
from engine.ops.cuda.products import Quantized

H, K, HEAD_DIM = 32, 4, 128
N_CTX = 40960  # of the table: launches are as large whatever the depth
POOL_BYTES = 150e6  # of cached values to rotate through
DEPTHS = (512, 4096, 16384, 32768)
TYPES = ("f16", "q8_0", "q4_0", "q8_0,q4_0")

_Pool = dict[tuple[int, str], list[KVLayer]]  # by depth and type: caches of layers to rotate through


def cache_arrays(kv_type: str, n_positions: int, n_head_kv: int, head_dim: int, rng: np.random.Generator) -> list[Any]:
    """Keys, values and their scales as a KVLayer has them, random."""
    arrays: list[Any] = []
    scales: list[Any] = []
    for kind in pair_of(kv_type):
        shape = (n_positions, n_head_kv, kind.n_elements(head_dim))
        if kind.block:
            arrays.append(rng.integers(0, 255, shape, np.uint8).view(kind.dtype))
        else:
            arrays.append(rng.standard_normal(shape, np.float32).astype(kind.dtype))
        of_rows = rng.uniform(0.005, 0.01, (n_positions, n_head_kv, kind.n_scales(head_dim)))
        scales.append(of_rows.astype(np.float16) if kind.block else None)
    return arrays + scales


def _layers(device: Any, n_positions: int, kv_type: str, rng: np.random.Generator) -> list[KVLayer]:
    host = cache_arrays(kv_type, n_positions, K, HEAD_DIM, rng)
    n = int(POOL_BYTES / (host[0].nbytes + host[1].nbytes)) + 2
    return [KVLayer(*(None if a is None else device.upload(a) for a in host)) for _ in range(n)]


def _decode(
    device: Any, attention: Attention, pool: _Pool, T: int, depth: int, kv_type: str, *,
    chain: bool = False, note: str = "", window: int = 0,
) -> KernelCase:  # fmt: skip
    """note: how `attention` differs from the default; chain: its input first; window: with a gate by head, too."""
    rng = np.random.default_rng(depth)
    layers = pool[depth, kv_type]
    n_blocks = depth // KV_BLOCK_TOKENS
    host_table = np.zeros((1, N_CTX // KV_BLOCK_TOKENS), np.int32)
    host_table[0, :n_blocks] = rng.permutation(n_blocks)
    table = device.upload(host_table)
    q = device.upload(rng.standard_normal((T, H, HEAD_DIM), np.float32))
    sequence = device.upload(np.zeros(T, np.int32))
    positions = device.upload(np.arange(depth - T, depth).astype(np.int32))
    width = H * HEAD_DIM
    out = device.empty((T, width), np.float32)
    quantized = Quantized(
        device.empty((T, width), np.int8),
        device.empty((T, width // 32), np.float32),
        device.empty((T, width // 32), np.int32),
    )

    raws = [device.upload(rng.standard_normal((T, n * HEAD_DIM), np.float32)) for n in (H, K, K)]
    q_norm, k_norm = (device.upload(rng.standard_normal(HEAD_DIM, np.float32)) for _ in range(2))
    rope = device.upload(arithmetic.rope_table(N_CTX, HEAD_DIM, 1e6))
    at = np.arange(depth - T, depth)
    slots = device.upload((host_table[0, at // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + at % KV_BLOCK_TOKENS).astype("i4"))

    gate = device.upload(rng.standard_normal((T, H), np.float32))

    def launch(i: int) -> None:
        kv = layers[i % len(layers)]
        if chain:
            attention.input(*raws, q_norm, k_norm, 1e-6, rope, positions, kv, slots, q)
        gating = (gate, "softplus") if window else ()
        attention.decode(q, kv, table, sequence, positions, HEAD_DIM**-0.5, out, quantized, window, *gating)

    arrays = (layers[0].k, layers[0].v, layers[0].k_scale, layers[0].v_scale)
    seen = min(depth, window or depth)
    n_bytes = sum(a.nbytes for a in arrays if a is not None) * seen // depth + q.nbytes + out.nbytes
    windowed = f" window={window}" if window else ""
    name = f"{'input+' if chain else ''}decode {kv_type} T={T} at {depth}{windowed}{note}"
    return KernelCase(name, launch, n_bytes, 4 * T * width * seen)


def _input(device: Any, attention: Attention, T: int, note: str = "") -> KernelCase:
    rng = np.random.default_rng(T)
    n_copies = 1 + int(POOL_BYTES / (T * (2 * H + 2 * K) * HEAD_DIM * 4)) if T > 32 else 64
    raws = [
        [device.upload(rng.standard_normal((T, n * HEAD_DIM), np.float32)) for n in (H, K, K)] for _ in range(n_copies)
    ]
    q_norm, k_norm = (device.upload(rng.standard_normal(HEAD_DIM, np.float32)) for _ in range(2))
    rope = device.upload(arithmetic.rope_table(N_CTX, HEAD_DIM, 1e6))
    positions, slots = (device.upload((np.arange(T) + 64).astype(np.int32)) for _ in range(2))
    kv = _layers(device, 8192, "f16", rng)[0]
    q = device.empty((T, H, HEAD_DIM), np.float32)

    def launch(i: int) -> None:
        attention.input(*raws[i % n_copies], q_norm, k_norm, 1e-6, rope, positions, kv, slots, q)

    n_bytes = T * HEAD_DIM * (4 * (2 * H + 2 * K) + 2 * 2 * K + 4)
    return KernelCase(f"input T={T}{note}", launch, n_bytes)


def _attention(device: Any, splits: int = 0, stages: int = 0, overlap: bool = True) -> Attention:
    """The wrapper, or one of other splits (16, 32 or 64) or stages than it would choose."""
    attention = Attention(device, Limits(4096, 2048, H * HEAD_DIM, 768, 1, 1, 1, H, K, HEAD_DIM, N_CTX))
    attention.splits = splits
    attention.max_stages = stages or attention.max_stages
    attention.overlap = overlap
    return attention


def cases(device: Any) -> list[KernelCase]:
    pool: _Pool = {
        (depth, kv_type): _layers(device, depth, kv_type, np.random.default_rng(depth))
        for depth in DEPTHS
        for kv_type in TYPES
    }
    default, apart = _attention(device), _attention(device, overlap=False)
    found = [_input(device, default, 1), _input(device, apart, 1, " apart"), _input(device, default, 4096)]
    found += [_decode(device, default, pool, 1, depth, kv_type) for kv_type in TYPES for depth in DEPTHS]
    eight = ((4096, "f16"), (4096, "q8_0"), (4096, "q4_0"), (32768, "f16"), (32768, "q4_0"))
    found += [_decode(device, default, pool, 8, *args) for args in eight]
    found += [_decode(device, apart, pool, 1, depth, "f16", note=" apart") for depth in (512, 4096, 32768)]
    for depth in (512, 4096, 32768):
        found.append(_decode(device, default, pool, 1, depth, "f16", window=512))
        for attention, note in ((default, ""), (apart, " apart")):
            found.append(_decode(device, attention, pool, 1, depth, "f16", chain=True, note=note))
    variants = [(32, 2, "f16"), (32, 3, "f16"), (32, 5, "f16"), (64, 2, "f16"), (32, 3, "q8_0"), (64, 3, "q8_0")]
    for splits, stages, kv_type in variants:
        attention = _attention(device, splits, stages)
        for depth in (512, 4096, 32768) if kv_type == "f16" else (512, 32768):
            found.append(_decode(device, attention, pool, 1, depth, kv_type, note=f" splits={splits} stages={stages}"))
    return found
