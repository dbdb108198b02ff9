"""Cases of prefill's matrix products, for benchmarks/cuda_kernels.py: shapes and types of Qwen3-30B-A3B in Q4_K_M."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as QType

from benchmarks.cuda_kernels import KernelCase
from data.nano.quantizer import quantize
from engine.formats.quants import QTensor, row_bytes
from engine.ops import Experts, Limits
from engine.ops.cuda.gemm import Gemm, Halves

D, HEADS, QKV, F, E, A, VOCAB = 2048, 4096, 5120, 768, 128, 8, 151936
TOKENS = (64, 512, 4096)
TILES = {64: ((32, 4), (64, 4)), 512: ((32, 4), (64, 4), (128, 4)), 4096: ((64, 4), (128, 4), (128, 8))}
CACHE_BYTES = 60 << 20
POOL_ROWS = 64  # rows that are really quantized; a matrix repeats them


def matrix(device: Any, qtype: QType, n_rows: int, n_columns: int) -> QTensor:
    values = np.random.default_rng(1).standard_normal((POOL_ROWS, n_columns), np.float32) / np.sqrt(n_columns)
    pool = quantize(values, qtype)
    data = np.resize(pool, (n_rows, pool.shape[1])).reshape(-1)
    return QTensor(f"{qtype.name} [{n_rows}, {n_columns}]", qtype, (n_rows, n_columns), device.upload(data))


def random(device: Any, *shape: int) -> Any:
    return device.upload(np.random.default_rng(2).standard_normal(shape, np.float32))


class FixedGemm(Gemm):
    """Products in tiles of one size, to see whether the size that is chosen is the best."""

    tile = (32, 4)

    def _dense_tile(self, qtype: QType, n_rows: int, n_tokens: int) -> tuple[int, int]:
        return self.tile

    def _expert_tokens(self, tokens_per_expert: float, bank: Experts) -> int:
        return self.tile[0]

    def _warps(self, types: Sequence[QType], matrices: int, tokens: int) -> int:
        return self.tile[1]


def gemms(device: Any, limits: Limits) -> Iterator[tuple[str, Gemm]]:
    """The engine's choice, and every tile."""
    yield "", Gemm(device, limits)
    for tile in TILES[limits.max_tokens]:
        fixed = FixedGemm(device, limits)
        fixed.tile = tile
        yield f" {tile[0]}x{tile[1]}", fixed


def dense_cases(device: Any) -> Iterator[KernelCase]:
    for name, qtype, N, K in (
        ("qkv", QType.Q4_K, QKV, D),
        ("output", QType.Q4_K, D, HEADS),
        ("output q6_k", QType.Q6_K, D, HEADS),
    ):
        n_bytes = N * row_bytes(qtype, K, name)
        copies = [matrix(device, qtype, N, K) for _ in range(1 + CACHE_BYTES // n_bytes)]
        for T in TOKENS:
            x, y = random(device, T, K), device.empty((T, N), np.float32)
            for tile, gemm in gemms(device, Limits(T, K, K, K, VOCAB, 0, 0, max_rows=1)):
                halves = gemm.to_halves(x)

                def launch(
                    i: int, gemm: Gemm = gemm, copies: list[QTensor] = copies, halves: Halves = halves, y: Any = y
                ) -> None:
                    gemm.product(copies[i % len(copies)], halves, y)

                yield KernelCase(f"{name} T={T}{tile}", launch, n_bytes + 2 * T * K + 4 * T * N, 2 * T * N * K)


def expert_cases(device: Any) -> Iterator[KernelCase]:
    rng = np.random.default_rng(3)
    none = np.zeros((E, 3), np.uint64)
    gate_up = [matrix(device, QType.Q4_K, E * F, D) for _ in range(2)]
    for down_type in (QType.Q4_K, QType.Q6_K):
        parts = (*gate_up, matrix(device, down_type, E * D, F))
        sizes = (parts[0].nbytes // E, parts[1].nbytes // E, parts[2].nbytes // E)
        bank = Experts(QType.Q4_K, QType.Q4_K, down_type, D, F, sizes, none, none, none, layer=0)
        at = [[device.pointer(p.data) + e * n for p, n in zip(parts, sizes, strict=True)] for e in range(E)]
        source = device.upload(np.array(at, np.uint64))
        for T in TOKENS:
            chosen = np.argsort(rng.random((T, E)), axis=1)[:, :A].astype(np.int32)
            used, flops = len(np.unique(chosen)), 2 * T * A * D * F
            experts, weights = device.upload(chosen), device.upload(rng.dirichlet(np.ones(A), T).astype(np.float32))
            x, h_values = random(device, T, D), random(device, T, D)
            for tile, gemm in gemms(device, Limits(T, D, D, F, VOCAB, E, A, max_rows=1)):
                h, tokens = gemm.to_halves(h_values), gemm._expert_tokens(T * A / E, bank)
                gemm.experts(h, experts, weights, bank, source, x)
                whole = partial(gemm.experts, h, experts, weights, bank, source, x)
                first = partial(gemm._gate_up, h, A, bank, source, tokens)
                second = partial(gemm._down, weights, bank, source, tokens, x)
                name = f"experts {down_type.name} T={T}{tile}"
                z_bytes = 2 * T * A * F
                yield KernelCase(name, ignoring(whole), used * sum(sizes) + 10 * T * D, 3 * flops)
                if down_type == QType.Q4_K:
                    n_bytes = used * 2 * sizes[0] + 2 * T * D + z_bytes
                    yield KernelCase(f"{name} gate, up", ignoring(first), n_bytes, 2 * flops)
                yield KernelCase(f"{name} down", ignoring(second), used * sizes[2] + z_bytes + 8 * T * D, flops)
                if not tile and down_type == QType.Q4_K:
                    group = partial(gemm.group, experts, E, tokens)
                    yield KernelCase(f"{name} grouping", ignoring(group), 8 * T * A)


def ignoring(work: Callable[[], object]) -> Callable[[int], None]:
    """The launch of work that is the same in each repetition: its data exceed the cache, or it lives there."""

    def launch(i: int) -> None:
        work()

    return launch


def other_cases(device: Any) -> Iterator[KernelCase]:
    gate = QTensor("router", QType.F32, (E, D), random(device, E, D).view(np.uint8).reshape(-1))
    norm = random(device, D)
    for T in TOKENS:
        gemm = Gemm(device, Limits(T, D, HEADS, F, VOCAB, 0, 0, max_rows=1))
        x, h, attended = random(device, T, D), device.empty((T, D), np.float32), random(device, T, HEADS)
        logits = device.empty((T, E), np.float32)
        n = T * D
        yield KernelCase(f"norm T={T}", ignoring(partial(gemm.norm_to_halves, x, norm, 1e-6, h)), 10 * n)
        yield KernelCase(f"to_halves T={T}", ignoring(partial(gemm.to_halves, attended)), 6 * T * HEADS)
        yield KernelCase(f"router T={T}", ignoring(partial(gemm.float_product, gate, x, logits)), 4 * n, 2 * n * E)
    R, head = 64, matrix(device, QType.Q6_K, VOCAB, D)
    gemm = Gemm(device, Limits(R, D, HEADS, F, VOCAB, 0, 0, max_rows=R))
    rows, logits = device.upload(np.arange(R, dtype=np.int32)), device.empty((R, VOCAB), np.float32)
    work = partial(gemm.head, random(device, R, D), rows, norm, 1e-6, head, logits)
    yield KernelCase(f"head R={R}", ignoring(work), head.nbytes + 4 * R * VOCAB, 2 * R * VOCAB * D)


def cases(device: Any) -> Iterator[KernelCase]:
    """Dense products, the expert FFN as a whole and in parts, the router, the head; each in the tiles it could have."""
    yield from dense_cases(device)
    yield from expert_cases(device)
    yield from other_cases(device)
