"""Tensor-core products against float64 products of the dequantized weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from data.nano.quantizer import quantize
from engine.formats import quants
from engine.formats.block_types import FLOAT_TYPES, NATIVE_TYPES, RECORDS
from engine.formats.quants import QTensor
from engine.ops import Experts, Limits
from engine.ops.cuda.gemm import TILE_TOKENS, Gemm, tile_bytes

FLOATS = FLOAT_TYPES
LIMITS = Limits(
    max_tokens=140, n_embd=512, n_head_dim=512, n_ff=512, n_vocab=300, n_expert=11, n_expert_used=3, max_rows=40
)


def weights(rng: np.random.Generator, qtype: QType, *shape: int, size: float = 1.0) -> QTensor:
    values = rng.standard_normal(shape).astype(np.float32) * np.float32(size / np.sqrt(shape[-1]))
    return QTensor("w", qtype, shape, quantize(values, qtype).reshape(-1))


def on(device: Any, w: QTensor) -> QTensor:
    return QTensor(w.name, w.qtype, w.shape, device.upload(w.data))


def activations(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Rows of different sizes with a few outliers, as a model's are."""
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, (*shape[:-1], 1))
    return (x * np.where(rng.random(shape) < 0.01, 100, 1)).astype(np.float32)


def make_room(device: Any, warps: int) -> None:
    """Blocks of 8 warps take more shared memory than every device has."""
    if device.name == "emulated":
        device.max_shared_bytes = 227 << 10
    elif warps == 8 and device.max_shared_bytes < tile_bytes(QType.Q6_K, 2, 128, 8):
        pytest.skip("not enough shared memory")


def exact(w: QTensor, x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ quants.dequantize(w).astype(np.float64).T


def nmse(found: np.ndarray, expected: np.ndarray) -> float:
    """The worst row's."""
    error = ((found - expected) ** 2).sum(-1) / (expected**2).sum(-1)
    return float(error.max())


def unpacked(device: Any, halves: Any) -> np.ndarray:
    """Halves in their plain order, times their scales."""
    values = device.read(halves.values).view(np.float16).astype(np.float64)
    T, stride = values.shape
    plain = values.reshape(T, stride // 16, 2, 8).swapaxes(2, 3).reshape(T, stride)
    assert not plain[:, halves.n_columns :].any()
    return plain[:, : halves.n_columns] * device.read(halves.scale)[:, None]


def test_halves(device: Any) -> None:
    rng = np.random.default_rng(1)
    x = activations(rng, 7, 77)
    x[2] = 0
    x[3] *= 1e-36 / np.abs(x[3]).max()
    x[4] *= 1e36 / np.abs(x[4]).max()
    halves = Gemm(device, LIMITS).to_halves(device.upload(x))
    found = unpacked(device, halves)
    plain = [0, 1, 4, 5, 6]
    assert nmse(found[plain], x[plain].astype(np.float64)) < 1e-7
    assert not found[2].any() and np.abs(found[3]).max() < 1e-35
    top = np.abs(device.read(halves.values).view(np.float16)).max(1)
    assert (top[plain] >= 2.0**14).all() and (top[plain] <= 2.0**15).all()


def test_norm_to_halves(device: Any) -> None:
    rng = np.random.default_rng(2)
    x = activations(rng, 5, 96)
    norm = rng.uniform(0.5, 2, 96).astype(np.float32)
    h = device.empty((5, 96), np.float32)
    halves = Gemm(device, LIMITS).norm_to_halves(device.upload(x), device.upload(norm), 1e-5, h)
    x64 = x.astype(np.float64)
    expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * norm
    assert nmse(device.read(h), expected) < 1e-12
    assert nmse(unpacked(device, halves), expected) < 1e-7


@pytest.mark.parametrize("qtype", NATIVE_TYPES, ids=lambda t: t.name)
def test_product(device: Any, qtype: QType) -> None:
    rng = np.random.default_rng(3)
    block_32 = RECORDS[qtype].elements == 32
    T, K = 37, 77 if qtype in FLOATS else 352 if block_32 else 512
    gemm = Gemm(device, LIMITS)
    for N in (150, 128):  # 128 rows of any type end where an allocation does, and memory behind it is out of bounds
        w, x = weights(rng, qtype, N, K), activations(rng, T, K)
        y = device.empty((T, N), np.float32)
        device.set_bytes(device.pointer(y), 0xFF, y.nbytes)
        gemm.product(on(device, w), gemm.to_halves(device.upload(x)), y)
        assert nmse(device.read(y), exact(w, x)) < 2e-6


@pytest.mark.parametrize(("tokens", "warps"), [(128, 8), *((tokens, 4) for tokens in TILE_TOKENS)])
def test_product_adds_and_tiles_do_not_matter(
    device: Any, tokens: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    T, N, K = 132, 33, 256
    make_room(device, warps)
    gemm = Gemm(device, LIMITS)
    w, x, before = weights(rng, QType.Q6_K, N, K), activations(rng, T, K), rng.standard_normal((T, N), np.float32)
    y, plain = device.upload(before), device.empty((T, N), np.float32)
    halves = gemm.to_halves(device.upload(x))
    gemm.product(on(device, w), halves, plain)
    monkeypatch.setattr(gemm, "_dense_tile", lambda *_: (tokens, warps))
    gemm.product(on(device, w), halves, y, add=True)
    assert (device.read(y) == before + device.read(plain)).all()


def test_a_row_that_is_not_finite_stays_alone(device: Any) -> None:
    rng = np.random.default_rng(5)
    T, N, K = 35, 40, 256
    gemm = Gemm(device, LIMITS)
    w, x = weights(rng, QType.Q4_K, N, K), activations(rng, T, K)
    x[3, 7], x[11, 200] = np.nan, -np.inf
    w.data[5 * 144 : 5 * 144 + 4] = 0xFF
    y = device.empty((T, N), np.float32)
    gemm.product(on(device, w), gemm.to_halves(device.upload(x)), y)
    nan = np.isnan(device.read(y))
    assert nan[[3, 11]].all() and nan[:, 5].all()
    nan[[3, 11]] = nan[:, 5] = False
    assert not nan.any()


@pytest.mark.parametrize("K", [77, 24, 680, 36])  # odd, less than a part of the columns, several parts for each warp
@pytest.mark.parametrize("qtype", FLOATS, ids=lambda t: t.name)
def test_float_product(device: Any, qtype: QType, K: int) -> None:
    rng = np.random.default_rng(6)
    T, N = 37, 70
    w, x = weights(rng, qtype, N, K), activations(rng, T, K)
    y = device.empty((T, N), np.float32)
    device.set_bytes(device.pointer(y), 0xFF, y.nbytes)
    Gemm(device, LIMITS).float_product(on(device, w), device.upload(x), y)
    assert nmse(device.read(y), exact(w, x)) < 1e-11


def test_head(device: Any) -> None:
    rng = np.random.default_rng(7)
    T, V, D, R = 50, 133, 256, 34
    x, w = activations(rng, T, D), weights(rng, QType.Q6_K, V, D)
    norm = rng.uniform(0.5, 2, D).astype(np.float32)
    rows = rng.permutation(T)[:R].astype(np.int32)
    logits = device.empty((R, V), np.float32)
    device.set_bytes(device.pointer(logits), 0xFF, logits.nbytes)
    Gemm(device, LIMITS).head(device.upload(x), device.upload(rows), device.upload(norm), 1e-6, on(device, w), logits)
    x64 = x[rows].astype(np.float64)
    h = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * norm
    assert nmse(device.read(logits), exact(w, h)) < 2e-6


def choices(rng: np.random.Generator, T: int, E: int, A: int) -> np.ndarray:
    """Distinct experts of each token, skewed: many tokens choose expert 0, and nobody the last."""
    score = rng.random((T, E)) + np.where(np.arange(E) == 0, 0.6, 0) - np.where(np.arange(E) == E - 1, 9, 0)
    return np.argsort(-score, axis=1)[:, :A].astype(np.int32)


def run_experts(
    device: Any, gemm: Gemm, types: tuple[QType, QType, QType], shape: tuple[int, ...], boost: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(result, float64 result, x before) of one expert FFN; token 3's z are `boost` times larger."""
    rng = np.random.default_rng(8)
    T, A, E, D, F = shape
    parts = [weights(rng, t, E, *s) for t, s in zip(types, ((F, D), (F, D), (D, F)), strict=True)]
    experts = choices(rng, T, E, A)
    w = rng.dirichlet(np.ones(A), T).astype(np.float32)
    h, x = rng.standard_normal((T, D), np.float32), rng.standard_normal((T, D), np.float32)
    h[3] *= boost
    uploaded = [on(device, part) for part in parts]
    source = np.array([[device.pointer(u.data) + e * u.nbytes // E for u in uploaded] for e in range(E)], np.uint64)
    source[E - 1] = 0  # unused, so nobody may read it
    sizes = tuple(part.nbytes // E for part in parts)
    none = np.zeros((E, 3), np.uint64)
    bank = Experts(*types, D, F, (sizes[0], sizes[1], sizes[2]), none, none, none, layer=0)
    y = device.upload(x)
    gemm.experts(
        gemm.to_halves(device.upload(h)), device.upload(experts), device.upload(w), bank, device.upload(source), y
    )
    gate, up, down = ([quants.dequantize(part.expert(e)).astype(np.float64) for e in range(E)] for part in parts)
    expected = np.zeros((T, D))
    for t in range(T):
        for a, e in enumerate(experts[t]):
            g = gate[e] @ h[t].astype(np.float64)
            expected[t] += w[t, a] * (
                down[e] @ (g / (1 + np.exp(np.minimum(-g, 700))) * (up[e] @ h[t].astype(np.float64)))
            )
    return device.read(y), expected, x


@pytest.mark.slow
@pytest.mark.parametrize(
    "types",
    [
        (QType.Q4_K, QType.Q4_K, QType.Q6_K),
        (QType.Q5_K, QType.IQ4_XS, QType.Q4_K),
        (QType.F16, QType.F16, QType.Q8_0),
    ],
    ids=lambda types: "-".join(t.name for t in types),
)
def test_experts(device: Any, types: tuple[QType, QType, QType]) -> None:
    D, F = (256, 96) if types[2] == QType.Q8_0 else (512, 256)
    found, expected, before = run_experts(device, Gemm(device, LIMITS), types, (45, 3, 11, D, F))
    assert nmse(found - before.astype(np.float64), expected) < 4e-6


def test_experts_with_large_activations(device: Any) -> None:
    """One token's z reach 1e5, beyond what a half holds; columns are computed a part at a time."""
    shape = (40, 2, 5, 256, 256)
    gemm = Gemm(device, LIMITS)
    gemm._y = device.empty((80 * 128,), np.uint16)
    found, expected, before = run_experts(device, gemm, (QType.Q4_K, QType.Q4_K, QType.Q4_K), shape, boost=300)
    assert nmse(found - before.astype(np.float64), expected) < 4e-6
    assert np.abs(expected[3]).max() > 1e4


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "warps", "T"), [(64, 4, 67), (128, 4, 100), (128, 8, 100)])
def test_experts_in_larger_tiles(device: Any, tokens: int, warps: int, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_room(device, warps)
    gemm = Gemm(device, LIMITS)
    monkeypatch.setattr("engine.ops.cuda.gemm._tokens", lambda *_: tokens)
    monkeypatch.setattr("engine.ops.cuda.gemm._warps", lambda *_: warps)
    types = (QType.Q8_0, QType.Q8_0, QType.Q4_0)
    found, expected, before = run_experts(device, gemm, types, (T, 2, 3, 128, 96))
    assert nmse(found - before.astype(np.float64), expected) < 4e-6


@pytest.mark.parametrize("kind", [None, 0, 1])
def test_grouping(device: Any, kind: int | None) -> None:
    """All pairs, or those of the tokens of one kind."""
    rng = np.random.default_rng(9)
    T, A, E, tile = 700, 3, 70, 32
    experts, mask = choices(rng, T, E, A), (rng.random(T) < 0.3).astype(np.uint8)
    gemm = Gemm(device, replace(LIMITS, max_tokens=T, n_expert=E))
    if kind is None:
        groups, kept = gemm.group(device.upload(experts), E, tile), np.arange(T * A)
    else:
        groups = gemm.group(device.upload(experts), E, tile, device.upload(mask), kind)
        kept = np.flatnonzero(np.repeat(mask, A) == kind)
    chosen = experts.reshape(-1)[kept]
    order = kept[np.argsort(chosen, kind="stable")]
    assert (device.read(groups.pairs)[: len(kept)] == order).all()
    counts = np.bincount(chosen, minlength=E)
    starts = np.cumsum(counts) - counts
    expected = [
        (e, starts[e] + i, min(tile, counts[e] - i), 0) for e in range(E) for i in range(0, int(counts[e]), tile)
    ]
    assert int(device.read(groups.n_tiles)[0]) == len(expected)
    assert (device.read(groups.tiles)[: len(expected)] == expected).all()


def test_tiles_fit_into_small_devices() -> None:
    for qtype in NATIVE_TYPES:
        assert tile_bytes(qtype, 2, 64, 4) <= 99 << 10
    for qtype in (QType.Q4_K, QType.Q5_K, QType.Q6_K):
        assert tile_bytes(qtype, 2, 128, 4) <= 99 << 10
