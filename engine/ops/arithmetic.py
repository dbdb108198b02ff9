"""The arithmetic of docs/arithmetic.md in NumPy, bit for bit what the kernels compute.

Slow and obvious on purpose. NumPy has no fused multiply-add, so `fma` below rounds an exact
binary64 product and a binary64 sum, made odd where inexact, once more to binary32, which is the
correctly rounded result (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.formats.block_types import FLOAT_TYPES
from engine.formats.quants import QTensor
from engine.ops import F32
from engine.ops.blocks import BlockTerms, float_rows, integer_blocks

LANES = 32

_EXP_C = [
    np.full(1, float.fromhex(h), np.float32)
    for h in ("0x1p0", "0x1p0", "0x1p-1", "0x1.555556p-3", "0x1.555556p-5", "0x1.111112p-7", "0x1.6c16c2p-10")
]
_LOG2E = np.full(1, float.fromhex("0x1.715476p+0"), np.float32)
_LN2_HI = np.full(1, float.fromhex("0x1.62e400p-1"), np.float32)
_LN2_LO = np.full(1, float.fromhex("0x1.7f7d1cp-20"), np.float32)
_LOG1P_C = [np.full(1, 1 / n, np.float32) for n in (17, 15, 13, 11, 9, 7, 5, 3, 1)]
_GELU_C1 = np.full(1, float.fromhex("0x1.988454p+0"), np.float32)  # 2 sqrt(2 / pi)
_GELU_C2 = np.full(1, float.fromhex("0x1.2444f2p-4"), np.float32)  # 0.044715 C1


def fma(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> F32:
    """a * b + c rounded once to binary32; shapes broadcast."""
    with np.errstate(all="ignore"):
        p = np.multiply(a, b, dtype=np.float64)
        c64 = np.asarray(c, dtype=np.float64)
        s = np.asarray(p + c64)
        t = s - p
        error = (p - (s - t)) + (c64 - t)
        bits = s.view(np.int64)
        # Round to odd: an inexact even sum moves to its odd neighbor on the side of the exact value.
        adjust = (error != 0) & np.isfinite(s) & ((bits & 1) == 0)
        step = np.where((error > 0) == (s > 0), 1, -1)
        odd = np.where(adjust, bits + step, bits).view(np.float64)
        return odd.astype(np.float32)


def _fold(acc: F32) -> F32:
    with np.errstate(all="ignore"):
        for o in (16, 8, 4, 2, 1):
            acc = acc[..., :o] + acc[..., o : 2 * o]
    return np.asarray(acc[..., 0])


def sum32(v: F32) -> F32:
    """Sum over the last axis with 32 lanes and a tree (docs/arithmetic.md)."""
    acc = np.zeros((*v.shape[:-1], LANES), np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, v.shape[-1], LANES):
            part = v[..., start : start + LANES]
            acc[..., : part.shape[-1]] += part
    return _fold(acc)


def dot32(a: F32, b: F32) -> F32:
    """Dot product over the last axis with fma, 32 lanes and a tree; shapes broadcast."""
    shape = np.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    acc = np.zeros((*shape, LANES), np.float32)
    for start in range(0, a.shape[-1], LANES):
        pa, pb = a[..., start : start + LANES], b[..., start : start + LANES]
        n = pa.shape[-1]
        acc[..., :n] = fma(pa, pb, acc[..., :n])
    return _fold(acc)


def exp(x: F32) -> F32:
    """e^x by range reduction and a polynomial of degree 6, relative error below 3e-7."""
    with np.errstate(all="ignore"):
        clamped = np.where(x > np.float32(88), np.float32(88), x).astype(np.float32)
        low = clamped < np.float32(-87)
        safe = np.where(low | np.isnan(clamped), np.float32(0), clamped).astype(np.float32)
        n = np.rint(safe * _LOG2E)
        r = fma(n, -_LN2_HI, safe)
        r = fma(n, -_LN2_LO, r)
        p = np.broadcast_to(_EXP_C[6], r.shape)
        for k in range(5, -1, -1):
            p = fma(p, r, _EXP_C[k])
        result = p * np.ldexp(np.float32(1), n.astype(np.int32))
        result = np.where(low, np.float32(0), result)
        return np.where(np.isnan(clamped), np.float32(np.nan), result).astype(np.float32)


def softplus(x: F32) -> F32:
    """log(1 + e^x), by the series of artanh: relative error below 5e-7 where e^x is no subnormal."""
    with np.errstate(all="ignore"):
        y = exp(-np.abs(x))
        s = y / (np.float32(2) + y)
        square = s * s
        p = np.broadcast_to(_LOG1P_C[0], s.shape)
        for c in _LOG1P_C[1:]:
            p = fma(p, square, c)
        return np.asarray(np.maximum(x, np.float32(0)) + (s + s) * p, np.float32)


def silu(x: F32) -> F32:
    """x / (1 + e^-x)."""
    with np.errstate(all="ignore"):
        return np.asarray(x / (np.float32(1) + exp(-x)), np.float32)


def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x)."""
    with np.errstate(all="ignore"):
        return np.asarray(np.float32(1) / (np.float32(1) + exp(-x)), np.float32)


def gelu(x: F32) -> F32:
    """x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3): the approximation by tanh."""
    with np.errstate(all="ignore"):
        return np.asarray(x / (np.float32(1) + exp((-x) * fma(_GELU_C2, x * x, _GELU_C1))), np.float32)


def softcap(x: F32, cap: float) -> F32:
    """cap tanh(x / cap), tanh(u) = 1 - 2 / (e^2u + 1)."""
    with np.errstate(all="ignore"):
        u = x / np.float32(cap)
        tanh = np.float32(1) - np.float32(2) / (exp(u + u) + np.float32(1))
        return np.asarray(tanh * np.float32(cap), np.float32)


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """Root-mean-square norm over the last axis, times `weight`."""
    with np.errstate(all="ignore"):
        mean = dot32(x, x) / np.float32(x.shape[-1])
        scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
        return np.asarray((x * scale[..., None]) * weight, np.float32)


def quantize_rows(x: F32) -> tuple[NDArray[np.int8], F32]:
    """8 bits of the last axis with one scale: q int8 of x's shape, d float32 [...]."""
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(axis=-1)
        finite = np.isfinite(x).all(axis=-1)
        tiny = finite & (amax < np.float32(2.0**-100))
        plain = finite & ~tiny
        safe = np.where(plain, amax, np.float32(1)).astype(np.float32)
        inv = np.float32(127) / safe
        q = np.rint(np.where(plain[..., None], x, np.float32(0)) * inv[..., None]).astype(np.int8)
        d = np.where(plain, safe / np.float32(127), np.where(tiny, np.float32(0), np.float32(np.nan)))
    return q, d.astype(np.float32)


def quantize_activations(x: F32) -> tuple[NDArray[np.int8], F32]:
    """8-bit blocks of 32 along the last axis: q int8 of x's shape, d float32 [..., n / 32]."""
    q, d = quantize_rows(x.reshape(*x.shape[:-1], x.shape[-1] // 32, 32))
    return q.reshape(x.shape), d


def quantize_nibbles(x: F32) -> tuple[NDArray[np.uint8], F32]:
    """4-bit blocks of 32 along the last axis, as GGUF's Q4_0: q uint8 [..., n / 2], d float32 [..., n / 32].

    Byte j of a block has dimension j in its low half and 16 + j in its high one.
    """
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    with np.errstate(all="ignore"):
        magnitude = np.abs(blocks)
        extreme = np.take_along_axis(blocks, magnitude.argmax(axis=-1)[..., None], axis=-1)
        finite = np.isfinite(blocks).all(axis=-1, keepdims=True)
        plain = finite & (np.abs(extreme) >= np.float32(2.0**-100))
        d = np.where(finite, extreme / np.float32(-8), np.float32(np.nan)).astype(np.float32)
        inv = np.asarray(np.float32(1) / np.where(plain, d, np.float32(1)), np.float32)
        shifted = fma(np.where(plain, blocks, np.float32(0)), inv, np.asarray(8.5, np.float32))
        q = np.trunc(shifted).clip(0, 15).astype(np.uint8)
    packed = (q[..., :16] | q[..., 16:] << 4).astype(np.uint8)
    return packed.reshape(*x.shape[:-1], x.shape[-1] // 2), d[..., 0]


def unpack_nibbles(packed: NDArray[Any]) -> NDArray[np.int8]:
    """What `quantize_nibbles` packed, less 8: int8 [..., n] of uint8 [..., n / 2]."""
    blocks = packed.reshape(*packed.shape[:-1], -1, 16)
    values = np.concatenate([blocks & 15, blocks >> 4], axis=-1).astype(np.int8) - np.int8(8)
    return values.reshape(*packed.shape[:-1], -1)


def _block_product(w: BlockTerms, q: NDArray[np.int8], d: F32) -> F32:
    T, n_block = d.shape
    halves = q.reshape(T, n_block, 2, 16).astype(np.float64)
    # Integers below 2^53 in binary64 are exact in any order, so a BLAS product may compute them.
    left = w.q.astype(np.float64).transpose(1, 2, 0, 3)  # [block, half, N, 16]
    sums = left @ halves.transpose(1, 2, 3, 0)  # [block, half, N, T]
    if w.half_scale is None:
        total = sums.sum(axis=1)
    else:
        total = (sums * w.half_scale.transpose(1, 2, 0)[..., None]).sum(axis=1)
    isum = total.transpose(2, 1, 0).astype(np.float32)  # [T, N, block]
    with np.errstate(all="ignore"):
        if w.minimum is None:
            u = w.scale[None] * isum
        else:
            xs = q.reshape(T, 1, n_block, 2, 16).astype(np.int32).sum(axis=-1)
            if w.half_minimum is not None:
                xs = xs * w.half_minimum
            u = fma(w.scale[None], isum, -(w.minimum[None] * xs.sum(axis=-1).astype(np.float32)))
    return dot32(np.broadcast_to(d[:, None, :], u.shape), np.asarray(u, np.float32))


def product(w: QTensor, x: F32) -> F32:
    """Rows of `w` [N, K] against activation rows `x` [T, K]: float32 [T, N].

    A quantized `w` meets activations in 8 bits; a float `w` meets `x` itself.
    """
    if w.qtype in FLOAT_TYPES:
        y = dot32(float_rows(w)[None], x[:, None, :])
    else:
        y = _block_product(integer_blocks(w), *quantize_activations(x))
    return y * np.float32(w.scale)


def rope_table(n_positions: int, n_rot: int, base: float) -> F32:
    """Cosines and sines, float32 [n_positions, 2, n_rot / 2], of n_rot rotated dimensions."""
    return rotations(n_positions, base ** (-2.0 * np.arange(n_rot // 2) / n_rot))


def rotations(n_positions: int, frequencies: NDArray[np.float64], magnitude: float = 1.0) -> F32:
    """Cosines and sines, float32 [n_positions, 2, n], of n angles a position, times `magnitude`; in binary64."""
    angle = np.arange(n_positions)[:, None] * frequencies[None]
    return (magnitude * np.stack([np.cos(angle), np.sin(angle)], axis=1)).astype(np.float32)
