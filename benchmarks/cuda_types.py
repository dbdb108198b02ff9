"""Cases of cuda_kernels.py: the expert FFN in every block type, of one to 32 tokens and in prefill.

The shapes are Qwen3-30B-A3B's, and Gemma 4's with the types of its Q4_K_M file, whose rows of 704 are no multiple of
256. All three parts of an expert have the type. `expert FFN` does not include the choice of the experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as QType

from benchmarks.cuda_gemm import ignoring
from benchmarks.cuda_kernels import KernelCase
from benchmarks.cuda_products import EPS, TABLES, A, Cases, E
from engine.formats.block_types import FLOAT_TYPES, NATIVE_TYPES
from engine.ops import Limits
from engine.ops.cuda.experts import SmallExperts
from engine.ops.cuda.gemm import Gemm
from engine.ops.cuda.products import Products

QWEN3, GEMMA = (2048, 768), (2816, 704)
SMALL, LONG = (1, 2, 8, 16, 32), (512, 4096)
Q4 = QType.Q4_K
MIXED = ((Q4, Q4, QType.Q5_0), (Q4, Q4, QType.Q8_0), (Q4, Q4, QType.Q4_0))


def type_cases(shared: Cases, types: tuple[QType, QType, QType], D: int, F: int) -> Iterator[KernelCase]:
    """One bank, every number of tokens."""
    device = shared.device
    bank, pointers = shared.bank(types, False, D, F)
    n_bytes = sum(bank.part_bytes)
    name = types[0].name if len(set(types)) == 1 else "+".join(t.name for t in types[1:])
    rng = np.random.default_rng(2)
    limits = Limits(32, D, D, F, 9, E, A)
    products = Products(device, limits)
    op = SmallExperts(device, limits, products)
    norm = device.upload(np.ones(D, np.float32))
    for T in SMALL:
        tables = [shared.table(T, pointers, rng) for _ in range(TABLES)]
        n_experts = sum(n for _, n in tables) / TABLES
        x = device.upload(np.zeros((T, D), np.float32))
        h = products.norm_quantize(device.upload(rng.standard_normal((T, D), np.float32)), norm, EPS)
        weights = device.upload(np.full((T, A), 1 / A, np.float32))
        chosen = device.upload(np.zeros((T, A), np.int32))

        def launch(i: int, T: int = T, h: Any = h, x: Any = x, weights: Any = weights, chosen: Any = chosen,
                   tables: Any = tables) -> None:  # fmt: skip
            op(h, chosen, weights, bank, *tables[i % TABLES][0], x)

        yield KernelCase(f"{name} D={D} T={T}", launch, int(n_experts * n_bytes))
    source = device.upload(pointers)
    for T in LONG:
        gemm = Gemm(device, Limits(T, D, D, F, 9, E, A, max_rows=1))
        x, values = (device.upload(rng.standard_normal((T, D), np.float32)) for _ in "xh")
        choices = np.argsort(rng.random((T, E)), axis=1)[:, :A].astype(np.int32)
        experts, weights = device.upload(choices), device.upload(np.full((T, A), 1 / A, np.float32))
        work = partial(gemm.experts, gemm.to_halves(values), experts, weights, bank, source, x)
        used = len(np.unique(choices))
        yield KernelCase(f"{name} D={D} T={T}", ignoring(work), used * n_bytes + 10 * T * D, 6 * T * A * D * F)


def cases(device: Any) -> Iterator[KernelCase]:
    """Q4_K first: what the others are compared with."""
    shared = Cases(device)
    others = [t for t in NATIVE_TYPES if t not in FLOAT_TYPES and t != Q4]
    for qtype in (Q4, *others):
        yield from type_cases(shared, (qtype,) * 3, *QWEN3)
    for types in MIXED:
        yield from type_cases(shared, types, *GEMMA)
