"""Rows of the cache: q4_0 is `gguf`'s bit for bit, and attention over it is that over q8_0 with the same integers."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine.formats.quants import QTensor
from engine.ground.kv_types import KV_TYPES
from engine.ops import KV_BLOCK_TOKENS, AttentionInput, KVLayer, arithmetic, cpu, reference
from tests.op_cases import LIMITS, empty_cache

HEAD_DIM, K, H, N = 96, 2, 6, 150


def packed_by_gguf(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nibbles and scales of rows [..., n], as the package stores them."""
    blocks = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q4_0).reshape(*x.shape[:-1], -1, 18)
    return blocks[..., 2:].reshape(*x.shape[:-1], -1), np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]


def same_as_gguf(x: np.ndarray) -> None:
    q, d = arithmetic.quantize_nibbles(x)
    wanted_q, wanted_d = packed_by_gguf(x)
    np.testing.assert_array_equal(q, wanted_q)
    np.testing.assert_array_equal(d.astype(np.float16).view(np.uint16), wanted_d.view(np.uint16))


def test_q4_0_is_that_of_gguf() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4000, 96), np.float32) * np.exp(rng.normal(0, 2, (4000, 1))).astype(np.float32)
    x[::3, :40] = np.round(x[::3, :40])  # many are alike, and zero
    x[5:9, 32:64], x[9, :32] = 0.0, -0.0
    x[20, 3], x[20, 7], x[21, 3], x[21, 7] = 50.0, -50.0, -50.0, 50.0  # the first of two extremes has the sign
    same_as_gguf(x)


@given(arrays(np.float32, (3, 32), elements=st.sampled_from([k / 16 for k in range(-20, 21)])))
def test_ties_and_signs_are_those_of_gguf(x: np.ndarray) -> None:
    same_as_gguf(x)


def test_what_is_packed_comes_out_again() -> None:
    packed = np.arange(256, dtype=np.uint8).repeat(6).reshape(32, 48)
    words = np.zeros((32, 3, 18), np.uint8)
    words[..., :2], words[..., 2:] = np.frombuffer(np.float16(1).tobytes(), np.uint8), packed.reshape(32, 3, 16)
    wanted = gguf.quants.dequantize(words.reshape(32, -1), gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(arithmetic.unpack_nibbles(packed), wanted)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_cpu_stores_what_the_twin_stores(kv_type: str) -> None:
    """With zeros, the smallest numbers, infinities and NaN in blocks of their own."""
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((9, 64)) * 3).astype(np.float32)
    w = rng.standard_normal(((H + 2 * K) * HEAD_DIM, 64)).astype(np.float32)
    q, k, v = np.split(w, [H * HEAD_DIM, (H + K) * HEAD_DIM])
    k[:32], v[32:64] = 0.0, 0.0
    v[:4] *= np.float32(1e-36)
    k[70], v[100] = np.inf, np.nan
    v[:32] *= np.float32(1e-32)
    found: dict[Any, KVLayer] = {}
    for ops in (cpu, reference):
        ws = ops.workspace(LIMITS, 2) if ops is cpu else reference.Workspace(LIMITS, 1)
        found[ops] = stored(ops, ws, x, (q, k, v), kv_type)
    for ours, wanted in zip(found[cpu].arrays, found[reference].arrays, strict=True):
        if ours is not None:
            nan = np.isnan(wanted)
            np.testing.assert_array_equal(np.isnan(ours), nan)
            bits = np.dtype(f"u{wanted.itemsize}")
            np.testing.assert_array_equal(ours.view(bits)[~nan], wanted.view(bits)[~nan])
            assert wanted.any()


def stored(ops: Any, ws: Any, x: np.ndarray, weights: tuple[np.ndarray, ...], kv_type: str) -> KVLayer:
    of = [
        QTensor(name, gguf.GGMLQuantizationType.F32, w.shape, np.ascontiguousarray(w).reshape(-1).view(np.uint8))
        for name, w in zip("qkv", weights, strict=True)
    ]
    kv, T = empty_cache(kv_type, 2, K, HEAD_DIM), len(x)
    out = np.zeros((T, H, HEAD_DIM), np.float32)
    rope = arithmetic.rope_table(64, 32, 1e4)
    norm = np.ones(x.shape[1], np.float32)
    positions, slots = np.arange(T, dtype=np.int32), np.arange(80, 80 + T, dtype=np.int32)
    with np.errstate(all="ignore"):
        ops.attention_input(ws, x, AttentionInput(norm, *of), 1e-6, rope, positions, kv, slots, out)
    return kv


def widened(kv: KVLayer) -> KVLayer:
    """The same in q8_0 where it is in q4_0."""
    k, v = (arithmetic.unpack_nibbles(a) if a.dtype == np.uint8 else a for a in (kv.k, kv.v))
    return KVLayer(k, v, kv.k_scale, kv.v_scale)


@pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("kv_type", [t for t in KV_TYPES if "q4_0" in t])
def test_attention_over_q4_0_is_that_over_q8_0(ops: Any, kv_type: str) -> None:
    rng = np.random.default_rng(3)
    kv = empty_cache(kv_type, 3, K, HEAD_DIM)
    slots = np.arange(3 * KV_BLOCK_TOKENS)
    for cache, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
        reference._store(cache, scale, slots, rng.standard_normal((len(slots), K, HEAD_DIM), np.float32))
    q = rng.standard_normal((3, H, HEAD_DIM), np.float32)
    table = np.array([[2, 0, 1]], np.int32)
    results = []
    for cache in (kv, widened(kv)):
        ws = ops.workspace(LIMITS, 2) if ops is cpu else reference.Workspace(LIMITS, 1)
        out = np.full((3, H * HEAD_DIM), np.nan, np.float32)
        positions = np.arange(N - 3, N, dtype=np.int32)
        ops.attention(ws, q, cache, table, np.zeros(3, np.int32), positions, 0.1, out, 0, 70)
        results.append(out)
    np.testing.assert_array_equal(results[0].view(np.uint32), results[1].view(np.uint32))
    assert np.isfinite(results[0]).all() and np.ptp(results[0]) > 0.1
