"""Cases of cuda_kernels.py: small-batch products and the expert FFN at Qwen3-30B-A3B's shapes, T = 1 and 8.

The products of quantized matrices have T = 2, 4, 16 and 32, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
from gguf import GGMLQuantizationType as QType

from benchmarks.cuda_kernels import KernelCase
from engine.formats.quants import QTensor, row_bytes
from engine.ops import Experts, Limits
from engine.ops.cuda import experts as experts_module
from engine.ops.cuda import products as products_module
from engine.ops.cuda.experts import SmallExperts
from engine.ops.cuda.products import Products
from tests.gguf_files import random_blocks

D, ATTENTION, KV, F, VOCAB, E, A = 2048, 4096, 512, 768, 151936, 128, 8
LIMITS = Limits(32, D, ATTENTION, F, VOCAB, E, A)
EPS = 1e-6
ROTATED_BYTES = 150_000_000
TABLES = 64  # choices of experts, one after the other
STEPS = (1, 2, 4, 8, 16, 32)  # tokens


def _matrix(device: Any, qtype: QType, rows: int, cols: int) -> QTensor:
    """Random weights; a large matrix repeats its first rows."""
    few = random_blocks(qtype, min(rows, 4096), cols, np.random.default_rng(1)).reshape(-1)
    data = np.resize(few, rows * row_bytes(qtype, cols, "benchmark"))
    return QTensor("benchmark", qtype, (rows, cols), device.upload(data))


class Cases:
    """Inputs and outputs that all cases share."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.products = Products(device, LIMITS)
        self.experts = SmallExperts(device, LIMITS, self.products)
        rng = np.random.default_rng(0)
        self.x = {T: device.upload(rng.standard_normal((T, D), np.float32)) for T in STEPS}
        self.attended = {T: device.upload(rng.standard_normal((T, ATTENTION), np.float32)) for T in STEPS}
        self.norm = device.upload(rng.uniform(0.5, 1.5, D).astype(np.float32))

    def floats(self, *shape: int) -> Any:
        """An uninitialized array of the device."""
        return self.device.empty(shape, np.float32)

    def copies(self, *shapes: tuple[QType, int, int]) -> list[tuple[QTensor, ...]]:
        """Enough copies of a group of matrices to pass the L2 cache by."""
        n_bytes = sum(rows * row_bytes(t, cols, "benchmark") for t, rows, cols in shapes)
        return [tuple(_matrix(self.device, *s) for s in shapes) for _ in range(1 + -(-ROTATED_BYTES // n_bytes))]

    def rotate(self, name: str, shapes: list[tuple[QType, int, int]], run: Callable[..., None]) -> KernelCase:
        """A case that calls `run` with one copy after the other of a group of matrices."""
        groups = self.copies(*shapes)

        def launch(i: int) -> None:
            run(*groups[i % len(groups)])

        return KernelCase(name, launch, sum(w.nbytes for w in groups[0]))

    def dense(self, T: int) -> Iterator[KernelCase]:
        """Products of quantized matrices: Q, K and V, the attention's output, the head."""
        x, norm, p = self.x[T], self.norm, self.products
        quantized = p.norm_quantize(x, norm, EPS)
        for v in (QType.Q4_K, QType.Q6_K):
            qkv = [(QType.Q4_K, ATTENTION, D), (QType.Q4_K, KV, D), (v, KV, D)]
            ys = (self.floats(T, ATTENTION), self.floats(T, KV), self.floats(T, KV))
            yield self.rotate(f"qkv V {v.name} T={T}", qkv, lambda *ws, ys=ys: p.several(ws, quantized, ys))
        y, wide = self.floats(T, D), p.quantize(self.attended[T])
        shape = [(QType.Q4_K, D, ATTENTION)]
        yield self.rotate(f"output T={T}", shape, lambda w: p.product(w, wide, y, add=True))
        all_logits = self.floats(T, VOCAB)
        rows = self.device.upload(np.arange(T, dtype=np.int32))
        for qtype in (QType.Q6_K, QType.Q4_K):
            yield self.rotate(
                f"norm + head {qtype.name} T={T}",
                [(qtype, VOCAB, D)],
                lambda w: p.head(x, rows, norm, EPS, w, all_logits),
            )

    def plain(self, T: int) -> Iterator[KernelCase]:
        """Everything but the experts."""
        x, h = self.x[T], self.floats(T, D)
        p, norm = self.products, self.norm
        yield KernelCase(f"norm_quantize T={T}", lambda i: p.norm_quantize(x, norm, EPS) and None, T * D * 5)
        attended = self.attended[T]
        yield KernelCase(f"quantize [{T}, {ATTENTION}]", lambda i: p.quantize(attended) and None, T * ATTENTION * 5)
        yield from self.dense(T)
        for v in (QType.Q4_K, QType.Q6_K):
            qkv = [(QType.Q4_K, ATTENTION, D), (QType.Q4_K, KV, D), (v, KV, D)]
            ys = (self.floats(T, ATTENTION), self.floats(T, KV), self.floats(T, KV))
            yield self.rotate(
                f"norm + qkv V {v.name} T={T}", qkv, lambda *ws, ys=ys: p.norm_several(x, norm, EPS, ws, ys, h)
            )
            for warps in (4, 12) if T == 1 and v == QType.Q4_K else ():

                def launch(*ws: QTensor, ys: tuple[Any, ...] = ys, warps: int = warps) -> None:
                    with patch.object(products_module, "WARPS", warps):
                        p.norm_several(x, norm, EPS, ws, ys, h)

                yield self.rotate(f"norm + qkv, {2 * warps} warps", qkv, launch)
        y = self.floats(T, D)
        shape = [(QType.Q4_K, D, ATTENTION)]
        yield self.rotate(f"quantize + output T={T}", shape, lambda w: p.product(w, attended, y, add=True))
        logits = self.floats(T, E)
        gates = [(QType.F32, E, D)]
        yield self.rotate(f"norm + router T={T}", gates, lambda w: p.router(x, norm, EPS, w, h, logits) and None)

    def bank(
        self, types: tuple[QType, QType, QType], in_host_memory: bool, D: int = D, F: int = F
    ) -> tuple[Experts, np.ndarray]:
        """A bank of random experts and the addresses of their parts, uint64 [E, 3]."""
        shapes = ((F, D), (F, D), (D, F))
        sizes = [rows * row_bytes(t, cols, "part") for t, (rows, cols) in zip(types, shapes, strict=True)]
        pointers = np.zeros((E, 3), np.uint64)
        for part, (qtype, (rows, cols), size) in enumerate(zip(types, shapes, sizes, strict=True)):
            data = np.resize(random_blocks(qtype, 4 * rows, cols, np.random.default_rng(part)).reshape(-1), E * size)
            if in_host_memory:
                memory = self.device.page_locked(E * size)
                memory[:] = data
            else:
                memory = self.device.upload(data)
            pointers[:, part] = self.device.pointer(memory) + size * np.arange(E, dtype=np.uint64)
        nowhere = self.device.upload(pointers)
        return Experts(*types, D, F, (sizes[0], sizes[1], sizes[2]), nowhere, nowhere, nowhere, layer=0), pointers

    def table(
        self, T: int, pointers: np.ndarray, rng: np.random.Generator, host: np.ndarray | None = None, misses: int = 0
    ) -> tuple[list[Any], int]:
        """A random active table on the device, `misses` experts of it read from the host and kept; its length."""
        chosen = np.stack([rng.permutation(E)[:A] for _ in range(T)]).reshape(-1)
        order = list(dict.fromkeys(chosen.tolist()))
        active = np.zeros((min(E, 32 * A), 8), np.uint64)
        pairs: list[int] = []
        for i, e in enumerate(order):
            uses = np.nonzero(chosen == e)[0].tolist()
            active[i, :3] = pointers[e]
            if host is not None and i < misses:
                active[i, :3], active[i, 3:6] = host[e], pointers[e]
            active[i, 6:].view(np.int32)[:] = [e, len(pairs), len(uses), 0]
            pairs += uses
        arrays = (active, np.array([len(order)], np.int32), np.array(pairs, np.int32))
        return [self.device.upload(a) for a in arrays], len(order)

    def expert_cases(self, T: int, down: QType) -> Iterator[KernelCase]:
        """The expert FFN and its halves, resident and not."""
        types = (QType.Q4_K, QType.Q4_K, down)
        bank, pointers = self.bank(types, in_host_memory=False)
        rng = np.random.default_rng(2)
        tables = [self.table(T, pointers, rng) for _ in range(TABLES)]
        n_experts = sum(n for _, n in tables) / TABLES
        x, h = self.floats(T, D), self.products.norm_quantize(self.x[T], self.norm, EPS)
        self.device.set_bytes(self.device.pointer(x), 0, x.nbytes)
        weights = self.device.upload(np.full((T, A), 1 / A, np.float32))
        chosen = self.device.upload(np.zeros((T, A), np.int32))
        n_records, op = min(E, T * A), self.experts
        z = op.z_of(bank, T * A)
        first, second = int(n_experts * sum(bank.part_bytes[:2])), int(n_experts * bank.part_bytes[2])
        if down == QType.Q4_K:
            yield KernelCase(
                f"gate_up T={T} ({n_experts:.0f} experts)",
                lambda i: op.gate_up(h, bank, A, tables[i % TABLES][0], n_records, z),
                first,
            )
        yield KernelCase(
            f"down {down.name} T={T} ({n_experts:.0f} experts)",
            lambda i: op.down(weights, bank, tables[i % TABLES][0], n_records, z, x),
            second,
        )
        yield KernelCase(
            f"expert FFN {down.name} T={T}",
            lambda i: op(h, chosen, weights, bank, *tables[i % TABLES][0], x),
            first + second,
        )
        if down == QType.Q4_K:
            _, host = self.bank(types, in_host_memory=True)
            for misses in (1, A) if T == 1 else (1,):
                missing = [self.table(T, pointers, rng, host, misses) for _ in range(TABLES)]
                yield KernelCase(
                    f"expert FFN T={T}, {misses} over PCIe",
                    lambda i, missing=missing: op(h, chosen, weights, bank, *missing[i % TABLES][0], x),
                    misses * sum(bank.part_bytes),
                )
                for copiers in (4, 16) if T == 1 else ():

                    def launch(i: int, missing: list[Any] = missing, copiers: int = copiers) -> None:
                        with patch.object(experts_module, "COPIERS", copiers):
                            op(h, chosen, weights, bank, *missing[i % TABLES][0], x)

                    name = f"expert FFN T={T}, {misses} over PCIe, {copiers} copiers"
                    yield KernelCase(name, launch, misses * sum(bank.part_bytes))


def cases(device: Any) -> Iterator[KernelCase]:
    """Each case's data is made when it is asked for."""
    shared = Cases(device)
    for T in (1, 8):
        yield from shared.plain(T)
        for down in (QType.Q4_K, QType.Q6_K):
            yield from shared.expert_cases(T, down)
    for T in STEPS:
        if T not in (1, 8):
            yield from shared.dense(T)
