"""Small-batch products on the device: the bits of engine/ops/arithmetic.py, for every type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats.block_types import FLOAT_TYPES, NATIVE_TYPES
from engine.formats.quants import QTensor, row_bytes
from engine.ops import Limits, arithmetic, reference
from engine.ops.cuda.counting import CountingDevice
from engine.ops.cuda.products import Products, Quantized
from engine.ops.cuda.wide import WideShape, fewest_tokens, stage_bytes, wide_shape
from tests.gguf_files import random_blocks
from tests.op_cases import SELDOM, slow_if

LIMITS = Limits(
    max_tokens=64, n_embd=768, n_head_dim=1280, n_ff=512, n_vocab=100, n_expert=24, n_expert_used=3, max_rows=40
)
EPS = 1e-6
SCALES = (1.0, 0.37, 1.0, -1.9)


@pytest.fixture
def products(device: Any) -> Products:
    return Products(device, LIMITS)


def matrix(qtype: QType, rows: int, cols: int, seed: int = 0) -> QTensor:
    data = random_blocks(qtype, rows, cols, np.random.default_rng([seed, rows, cols])).reshape(-1)
    return QTensor(f"{qtype.name} {rows}x{cols}", qtype, (rows, cols), data)


def upload(device: Any, w: QTensor) -> QTensor:
    return replace(w, data=device.upload(w.data))


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def check(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, but for the sign and payload of a NaN."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if found.dtype == np.float32:
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), nan)
        found, expected = (np.where(nan, np.float32(0), a).view(np.uint32) for a in (found, expected))
    np.testing.assert_array_equal(found, expected)


def check_quantized(device: Any, found: Quantized, x: np.ndarray) -> None:
    q, d = arithmetic.quantize_activations(x)
    check(device.read(found.q), q)
    check(device.read(found.d), d)
    check(device.read(found.sums), q.reshape(*d.shape, 32).sum(axis=-1, dtype=np.int32))


def awkward(x: np.ndarray) -> np.ndarray:
    """Values that quantization treats apart, in some blocks of 32 of each row."""
    x = x.copy()
    blocks = x.reshape(len(x), -1, 32)
    blocks[:, 0] = 0
    blocks[:, 1] *= np.float32(2.0**-110)
    blocks[:, 2, ::2] = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 127, 3.5] * 2  # ties, at d = 1
    blocks[-1, 3, 7] = np.nan
    blocks[-1, 4, 31] = -np.inf
    blocks[:, 5] *= np.float32(2.0**100)
    return x


@pytest.mark.parametrize(("T", "K"), [(1, 256), (3, 288), (7, 1280)])
def test_quantize(device: Any, products: Products, T: int, K: int) -> None:
    x = awkward(normal(T, K))
    check_quantized(device, products.quantize(device.upload(x)), x)


@pytest.mark.parametrize(("T", "D"), [(1, 256), (5, 736), (2, 96)])
def test_norm(device: Any, products: Products, T: int, D: int) -> None:
    x, weight = normal(T, D), normal(D, seed=2)
    x[0, 3] = 3e4
    expected = arithmetic.rms_norm(x, weight, EPS)
    h = device.empty((T, D), np.float32)
    check_quantized(device, products.norm_quantize(device.upload(x), device.upload(weight), EPS, h), expected)
    check(device.read(h), expected)
    h = device.empty((T, D), np.float32)
    products.norm(device.upload(x), device.upload(weight), EPS, h)
    check(device.read(h), expected)


def test_norm_of_a_ragged_row(device: Any, products: Products) -> None:
    x, weight = normal(37, 77), normal(77, seed=2)
    h = device.empty(x.shape, np.float32)
    products.norm(device.upload(x), device.upload(weight), EPS, h)
    check(device.read(h), arithmetic.rms_norm(x, weight, EPS))


# rows, columns: one iteration of some lanes, a ragged last warp
SHAPES = [(5, 256), (37, 768)]


@pytest.mark.parametrize("qtype", [pytest.param(t, id=t.name, marks=slow_if(t.name in SELDOM)) for t in NATIVE_TYPES])
def test_product(device: Any, products: Products, qtype: QType) -> None:
    for N, K in SHAPES:
        w = matrix(qtype, N, K)
        on_device = upload(device, w)
        x = normal(9, K)
        x[5] = awkward(x[5:6])
        expected = arithmetic.product(w, x)
        for rows in (slice(0, 1), slice(5, 6), slice(0, 9)):
            given = device.upload(x[rows])
            y = device.empty((len(given), N), np.float32)
            products.product(on_device, given, y)
            check(device.read(y), expected[rows])
            if qtype not in FLOAT_TYPES:
                y = device.upload(x[rows, :N].copy() if N <= K else np.ones_like(expected[rows]))
                before = device.read(y)
                products.product(on_device, products.quantize(given), y, add=True)
                with np.errstate(invalid="ignore"):
                    check(device.read(y), before + expected[rows])


@pytest.mark.slow
def test_product_of_a_ragged_float_row(device: Any, products: Products) -> None:
    w = matrix(QType.F16, 11, 77)
    for T in (1, 2, 33):
        x = normal(T, 77)
        y = device.empty((T, 11), np.float32)
        products.product(upload(device, w), device.upload(x), y)
        check(device.read(y), arithmetic.product(w, x))


@pytest.mark.parametrize("T", [1, 2, 4, 40])
def test_rows_do_not_depend_on_their_number(device: Any, products: Products, T: int) -> None:
    w = matrix(QType.Q4_K, 13, 512)
    x = normal(40, 512)
    quantized = Products(device, LIMITS)._headed.rows(T, 512)
    q, d = arithmetic.quantize_activations(x[:T])
    for array, values in (
        (quantized.q, q),
        (quantized.d, d),
        (quantized.sums, q.reshape(*d.shape, 32).sum(axis=-1, dtype=np.int32)),
    ):
        device.write(array, values)
    y = device.empty((T, 13), np.float32)
    products.product(upload(device, w), quantized, y)
    check(device.read(y), arithmetic.product(w, x)[:T])


@pytest.mark.parametrize("T", [1, 6])
@pytest.mark.parametrize(
    "types",
    [
        (QType.Q4_K, QType.Q4_K, QType.Q4_K),
        (QType.Q4_K, QType.Q4_K, QType.Q6_K),
        (QType.Q8_0, QType.Q4_0, QType.Q5_K),
        (QType.F32, QType.BF16, QType.F32),
        (QType.F32, QType.Q6_K, QType.Q4_K),
    ],
    ids=lambda types: "-".join(t.name for t in types),
)
def test_several(device: Any, products: Products, types: tuple[QType, ...], T: int) -> None:
    D = 512
    ws = [matrix(t, n, D, i) for i, (t, n) in enumerate(zip(types, (70, 18, 33), strict=True))]
    x, weight = normal(T, D), normal(D, seed=2)
    h = arithmetic.rms_norm(x, weight, EPS)
    on_device = tuple(upload(device, w) for w in ws)
    ys = tuple(device.empty((T, w.shape[0]), np.float32) for w in ws)
    products.norm_several(device.upload(x), device.upload(weight), EPS, on_device, ys, device.empty((T, D), np.float32))
    for w, y in zip(ws, ys, strict=True):
        check(device.read(y), arithmetic.product(w, h))
        device.set_bytes(device.pointer(y), 0xFF, y.nbytes)
    products.several(on_device, device.upload(h), ys)
    for w, y in zip(ws, ys, strict=True):
        check(device.read(y), arithmetic.product(w, h))


@pytest.mark.slow
@pytest.mark.parametrize(("T", "kib"), [(3, 99), (9, 227), (32, 227), (15, 64), (32, 64), (8, 40)])
@pytest.mark.parametrize("types", ["Q4_K Q6_K Q4_K Q2_K", "Q8_0 Q5_0 IQ4_NL MXFP4", "NVFP4 Q4_1 NVFP4"])
def test_several_of_a_step(device: Any, products: Products, types: str, T: int, kib: int) -> None:
    """Different types and rows in one launch, and what is done to a product, whatever shared memory there is."""
    D = 768 if "K" in types else 704
    parts = zip(types.split(), (70, 16, 9, 33), SCALES, strict=False)
    ws = [replace(matrix(QType[t], n, D), scale=s) for t, n, s in parts]
    x, factors = normal(T, D), normal(T, seed=4)
    on_device = tuple(upload(device, w) for w in ws)
    with patch.object(device, "max_shared_bytes", kib << 10):
        ys = tuple(device.empty((T, w.shape[0]), np.float32) for w in ws)
        products.several(on_device, device.upload(x), ys)
        y = device.upload(normal(T, 70))
        products.product(on_device[0], device.upload(x), y, add=True, row_scale=device.upload(factors))
    for w, found in zip(ws, ys, strict=True):
        check(device.read(found), arithmetic.product(w, x))
    check(device.read(y), normal(T, 70) + factors[:, None] * arithmetic.product(ws[0], x))


@pytest.mark.parametrize(("T", "staged", "quads"), [(3, 4, 1), (8, 8, 1), (13, 16, 1), (4, 4, 2), (27, 32, 1)])
@pytest.mark.parametrize("types", ["Q4_K Q6_K Q4_K Q2_K", "Q8_0 Q5_0 IQ4_NL MXFP4", "Q4_K Q4_K Q4_K Q4_K"])
def test_activations_that_come_with_the_weights(
    device: Any, products: Products, types: str, T: int, staged: int, quads: int
) -> None:
    """Of rows too long for all to stay: some warps have one run more than others, and a quad has several units."""
    D = 1280
    ws = [matrix(QType[t], n, D) for t, n in zip(types.split(), (170, 16, 9, 33), strict=True)]
    x, groups, stage = normal(T, D), -(-staged // 8), max(map(stage_bytes, ws)) + 368 * staged
    halves = "Q6_K" in types
    of_warp = 16 * (224 if halves else 80) + 8 * 8 * staged * (1 + halves)
    fold = 8192 if T <= 4 else 16384
    used = [quads * (fold + 4 * (of_warp + n * stage)) for n in (1, 2, 3, 4)]
    kib = 98 if T < 16 else 226
    stages = sum(n_bytes <= kib << 10 for n_bytes in used)
    assert stages
    ys = tuple(device.empty((T, w.shape[0]), np.float32) for w in ws)
    shape = WideShape(groups, T <= 4, quads, stages, False, staged, 5, used[stages - 1])
    with (
        patch("engine.ops.cuda.products.wide_shape", lambda *_: shape),
        patch.object(device, "max_shared_bytes", max(device.max_shared_bytes, 1 + kib << 10)),
    ):
        products.several(tuple(upload(device, w) for w in ws), device.upload(x), ys)
    for w, found in zip(ws, ys, strict=True):
        check(device.read(found), arithmetic.product(w, x))


def test_activations_come_with_the_weights_where_more_is_in_flight_by_that() -> None:
    """And of few tokens no quad has a second round of units."""
    cases = (
        (5120, QType.Q4_K, 8, 3, 4, 0), (5120, QType.Q6_K, 4, 3, 2, 0), (5120, QType.Q6_K, 8, 2, 2, 0),
        (5120, QType.Q6_K, 16, 1, 4, 16), (5120, QType.Q6_K, 32, 1, 2, 32), (5120, QType.Q4_K, 32, 2, 2, 0),
    )  # fmt: skip
    for rows, qtype, T, quads, stages, staged in cases:
        cut = wide_shape(CountingDevice("sm_90", 132, 227 << 10), (of_rows(rows, qtype, 17408),), T)
        assert cut is not None and (cut.quads, cut.stages, cut.shared, cut.staged) == (quads, stages, False, staged)


def test_how_many_rows_tensor_cores_are_for() -> None:
    cases = (
        (2048, QType.Q4_K, 4096, 3), (5120, QType.Q6_K, 17408, 2), (151936, QType.Q6_K, 2048, 5),
        (151936, QType.Q4_K, 2048, 3), (151936, QType.Q6_K, 6144, 2),
    )  # fmt: skip
    for rows, qtype, columns, fewest in cases:
        assert fewest_tokens((of_rows(rows, qtype, columns),)) == fewest, (rows, qtype, columns)


def of_rows(rows: int, qtype: QType, columns: int) -> QTensor:
    """A matrix that is not there."""
    data = CountingDevice().empty((rows * row_bytes(qtype, columns, "w"),), np.uint8)
    return QTensor("w", qtype, (rows, columns), data)


def test_what_does_not_fit_on_tensor_cores() -> None:
    """Launches fit their memory, and where none does, another kernel takes the rows one by one."""
    N, K = 5120, 4096
    w = of_rows(N, QType.Q6_K, K)
    for kib in (227, 163, 99, 64, 40):
        for T in (2, 8, 16, 32):
            cut = wide_shape(CountingDevice("sm_90", 132, kib << 10), (w,), T)
            assert cut is None or cut.shared_bytes < kib << 10
            assert cut is not None or T > 8 or kib < 99
    cut = wide_shape(CountingDevice("sm_90", 132, 227 << 10), (w,), 8)
    assert cut is not None and cut.shared and cut.blocks >= 132


ROUTED = [(1, 768), (3, 416), (33, 256), (2, 77), (5, 96), (11, 416), (9, 77), (10, 2208)]


@pytest.mark.parametrize("qtype", FLOAT_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize(("T", "D"), ROUTED)
def test_router(device: Any, qtype: QType, T: int, D: int) -> None:
    products = Products(device, replace(LIMITS, n_embd=max(LIMITS.n_embd, D)))
    E = 23
    gate = matrix(qtype, E, D)
    x, norm = normal(T, D), normal(D, seed=2)
    expected, logits = np.empty((T, D), np.float32), np.empty((T, E), np.float32)
    reference.router(reference.workspace(LIMITS, 1), x, norm, EPS, gate, expected, logits)
    h, found = device.empty((T, D), np.float32), device.empty((T, E), np.float32)
    quantized = products.router(device.upload(x), device.upload(norm), EPS, upload(device, gate), h, found)
    check(device.read(h), expected)
    check(device.read(found), logits)
    if T <= 32 and D % 32 == 0:
        assert quantized is not None
        check_quantized(device, quantized, expected)
    else:
        assert quantized is None


@pytest.mark.parametrize("qtype", [QType.Q6_K, QType.F16], ids=lambda t: t.name)
@pytest.mark.parametrize("R", [1, 3, 35])
def test_head(device: Any, products: Products, qtype: QType, R: int) -> None:
    D, V = 256, 683  # enough rows that a warp takes several at a time
    output = matrix(qtype, V, D)
    x, norm = normal(41, D), normal(D, seed=2)
    rows = np.random.default_rng(3).permutation(41)[:R].astype(np.int32)
    expected = np.empty((R, V), np.float32)
    reference.head(reference.workspace(LIMITS, 1), x, rows, norm, EPS, output, expected)
    logits = device.empty((R, V), np.float32)
    products.head(device.upload(x), device.upload(rows), device.upload(norm), EPS, upload(device, output), logits)
    check(device.read(logits), expected)


def test_capture_and_mistakes(device: Any, products: Products) -> None:
    w = upload(device, matrix(QType.Q4_0, 10, 256))
    x = device.upload(normal(1, 256))
    y = device.empty((1, 10), np.float32)
    products.product(w, x, y)
    expected = device.read(y)
    graph = device.capture(lambda: products.product(w, products.quantize(x), y))
    device.set_bytes(device.pointer(y), 0xFF, y.nbytes)
    graph.launch()
    check(device.read(y), expected)
    with pytest.raises(ValueError, match="Q4_0"):
        products.product(w, x, device.empty((1, 9), np.float32))
    with pytest.raises(ValueError, match="router"):
        products.router(x, device.empty(256, np.float32), EPS, w, device.empty((1, 256), np.float32), y)
