"""Cases of cuda_kernels.py: products of 2 to 8 rows, each in every way there is, so that the ways can be chosen by it.

*product*: no tensor cores (product.cu). *wide*: with them (wide.cu), as many columns as tokens. *few*: where two blocks
of columns share a product of the tensor cores. What is served takes product up to FEWEST_TOKENS - 1 rows of
engine/ops/cuda/wide.py, then few up to FEW_TOKENS, then wide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
from gguf import GGMLQuantizationType as QType

from benchmarks.cuda_kernels import KernelCase
from engine.formats.quants import QTensor, row_bytes
from engine.ops import Limits
from engine.ops.cuda import wide as wide_module
from engine.ops.cuda.products import Products
from tests.gguf_files import random_blocks

ROTATED_BYTES = 150_000_000
NEVER = 99
# The least tokens of wide.cu and the most of its few.
WAYS = {"product": (NEVER, 0), "wide": (2, 0), "few": (2, NEVER)}
# (what, types and rows of the matrices, columns)
SHAPES = (
    ("output", ((QType.Q4_K, 2048),), 4096),
    ("qkv", ((QType.Q4_K, 4096), (QType.Q4_K, 512), (QType.Q6_K, 512)), 2048),
    ("head", ((QType.Q6_K, 151936),), 2048),
    ("gate and up", ((QType.Q4_K, 17408), (QType.Q4_K, 17408)), 5120),
    ("down", ((QType.Q6_K, 5120),), 17408),
    ("Q8_0", ((QType.Q8_0, 4096),), 2048),
)


def _matrix(device: Any, qtype: QType, rows: int, cols: int) -> QTensor:
    few = random_blocks(qtype, min(rows, 512), cols, np.random.default_rng(1)).reshape(-1)
    data = np.resize(few, rows * row_bytes(qtype, cols, "benchmark"))
    return QTensor("benchmark", qtype, (rows, cols), device.upload(data))


def cases(device: Any) -> Iterator[KernelCase]:
    """Every case, made when it is its turn."""
    products = Products(device, Limits(32, 5120, 5120, 17408, 151936, n_expert=0, n_expert_used=0))
    for what, matrices, columns in SHAPES:
        n_bytes = sum(rows * row_bytes(t, columns, "benchmark") for t, rows in matrices)
        groups = [
            tuple(_matrix(device, t, rows, columns) for t, rows in matrices)
            for _ in range(1 + -(-ROTATED_BYTES // n_bytes))
        ]
        for T in (2, 3, 4, 8):
            x = products.quantize(device.upload(np.random.default_rng(0).standard_normal((T, columns), np.float32)))
            ys = tuple(device.empty((T, rows), np.float32) for _, rows in matrices)
            for way, (fewest, few) in WAYS.items():
                if few >= T > wide_module.FEW_TOKENS:
                    continue  # there are no columns for more

                yield KernelCase(f"{what} {way} T={T}", _launch(products, groups, x, ys, fewest, few), n_bytes)


def _launch(
    products: Products, groups: Sequence[tuple[QTensor, ...]], x: Any, ys: Any, fewest: int, few: int
) -> Callable[[int], None]:
    def launch(i: int) -> None:
        fewest_tokens = patch.object(wide_module, "FEWEST_TOKENS", fewest)
        few_tokens = patch.object(wide_module, "FEW_TOKENS", min(few, wide_module.FEW_TOKENS))
        with fewest_tokens, few_tokens:
            products.several(groups[i % len(groups)], x, ys)

    return launch
