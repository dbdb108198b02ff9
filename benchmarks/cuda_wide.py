"""Cases of cuda_kernels.py: products of 2 to 32 rows in every way there is, so that the ways can be chosen by it.

*product*: no tensor cores (product.cu). Else wide.cu: its input *stays* in shared memory, is *staged* with each run of
the weights, or is read from *global* memory. *eight*: as *stays*, with as many columns as tokens, where two blocks of
columns could share a product of the tensor cores. What is served is chosen by `wide_shape` and `fewest_tokens` of
engine/ops/cuda/wide.py.
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
from engine.ops.cuda import products as products_module
from engine.ops.cuda import wide as wide_module
from engine.ops.cuda.products import Products
from engine.ops.cuda.wide import WideShape
from tests.gguf_files import random_blocks

ROTATED_BYTES = 150_000_000
FEW, MANY = (2, 3, 4, 8), (2, 3, 4, 8, 16, 32)
# (what, types and rows of the matrices, columns, tokens)
SHAPES = (
    ("output", ((QType.Q4_K, 2048),), 4096, FEW),
    ("qkv", ((QType.Q4_K, 4096), (QType.Q4_K, 512), (QType.Q6_K, 512)), 2048, FEW),
    ("head", ((QType.Q6_K, 151936),), 2048, FEW),
    ("gate and up", ((QType.Q4_K, 17408), (QType.Q4_K, 17408)), 5120, MANY),
    ("down", ((QType.Q6_K, 5120),), 17408, MANY),
    ("down Q4_K", ((QType.Q4_K, 5120),), 17408, MANY),
    ("output of 6144", ((QType.Q4_K, 5120),), 6144, FEW),
    ("head of 5120", ((QType.Q6_K, 248320),), 5120, FEW),
    ("Q8_0", ((QType.Q8_0, 4096),), 2048, FEW),
)


def _matrix(device: Any, qtype: QType, rows: int, cols: int) -> QTensor:
    few = random_blocks(qtype, min(rows, 512), cols, np.random.default_rng(1)).reshape(-1)
    data = np.resize(few, rows * row_bytes(qtype, cols, "benchmark"))
    return QTensor("benchmark", qtype, (rows, cols), device.upload(data))


def cases(device: Any) -> Iterator[KernelCase]:
    """Every case, made when it is its turn."""
    products = Products(device, Limits(32, 5120, 5120, 17408, 248320, n_expert=0, n_expert_used=0))
    for what, matrices, columns, steps in SHAPES:
        n_bytes = sum(rows * row_bytes(t, columns, "benchmark") for t, rows in matrices)
        groups = [
            tuple(_matrix(device, t, rows, columns) for t, rows in matrices)
            for _ in range(1 + -(-ROTATED_BYTES // n_bytes))
        ]
        for T in steps:
            x = products.quantize(device.upload(np.random.default_rng(0).standard_normal((T, columns), np.float32)))
            ys = tuple(device.empty((T, rows), np.float32) for _, rows in matrices)
            for way, shape in _ways(device, groups[0], T).items():
                yield KernelCase(f"{what} {way} T={T}", _launch(products, groups, x, ys, shape), n_bytes)


def _ways(device: Any, ws: tuple[QTensor, ...], T: int) -> dict[str, WideShape | None]:
    """How a launch can be cut; None: product.cu."""
    ways: dict[str, WideShape | None] = {"product": None}
    ways |= {"stays" if name == "shared" else name: w for name, w in wide_module.wide_shapes(device, ws, T).items()}
    if T <= wide_module.FEW_TOKENS:
        with patch.object(wide_module, "FEW_TOKENS", 0):
            eight = wide_module.wide_shapes(device, ws, T).get("shared")
        ways |= {} if eight is None else {"eight": eight}
    return ways


def _launch(
    products: Products, groups: Sequence[tuple[QTensor, ...]], x: Any, ys: Any, shape: WideShape | None
) -> Callable[[int], None]:
    def launch(i: int) -> None:
        with patch.multiple(products_module, fewest_tokens=lambda *_: 2, wide_shape=lambda *_: shape):
            products.several(groups[i % len(groups)], x, ys)

    return launch
