"""Makes quantized tensors, for the bundled model, tests and benchmarks; the engine only reads them.

Making Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS and NVFP4 is ours: a search for the scales with the least squared
error. The types with a grid (IQ2, IQ3) are made more plainly, by the nearest entries at a few scales. The `gguf`
package makes the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as QType

from engine.formats.grids import GRIDS
from engine.formats.quants import Bytes, Floats, row_bytes
from engine.ground.errors import ModelFormatError, UnsupportedModelError


def quantize(values: npt.NDArray[Any], qtype: QType, importance: Floats | None = None, name: str = "array") -> Bytes:
    """Quantize along the last axis.

    values: float [..., cols], finite. importance: float32 [cols], positive: how much the squared error of each
    column counts (mean squared activations, say); used by the types that are searched. name: for messages.
    Returns uint8 [..., row_bytes]. Raises ModelFormatError for values that the type cannot hold,
    UnsupportedModelError for a type that we cannot make.
    """
    x = np.ascontiguousarray(values, np.float32)
    bytes_per_row = row_bytes(qtype, x.shape[-1], name)
    limit = np.finfo(np.float32 if qtype in (QType.F32, QType.BF16) else np.float16).max
    if not (np.abs(x) <= limit).all():
        raise ModelFormatError(f"tensor {name!r}: a weight that is NaN or beyond {limit:g} cannot be {qtype.name}")
    search = _SEARCHES.get(qtype)
    if search is None:
        if qtype not in _OF_PACKAGE:
            raise UnsupportedModelError(f"tensor {name!r}: no quantizer for type {qtype.name}")
        packed: Bytes = np.ascontiguousarray(gguf.quantize(x, qtype)).view(np.uint8)
        return packed
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    blocks = x.reshape(-1, per_block)
    weights = None
    if importance is not None:
        assert importance.shape == x.shape[-1:], name
        weights = (importance / importance.mean()).astype(np.float32).reshape(-1, per_block)
    out = np.empty((len(blocks), block_bytes), np.uint8)
    for start in range(0, len(blocks), _CHUNK // per_block):
        stop = min(start + _CHUNK // per_block, len(blocks))
        w = None if weights is None else weights[np.arange(start, stop) % len(weights)]
        out[start:stop] = search(blocks[start:stop], w)
    return out.reshape(*x.shape[:-1], bytes_per_row)


# What llama.cpp's quantizer takes for rows that do not fill blocks of 256.
_SMALLER = {
    QType.Q4_K: QType.Q5_0, QType.Q5_K: QType.Q5_1, QType.Q6_K: QType.Q8_0,
    **dict.fromkeys((QType.Q2_K, QType.Q3_K, QType.IQ4_XS), QType.IQ4_NL),
    **dict.fromkeys((QType.IQ3_S, QType.IQ3_XXS, QType.IQ2_S, QType.IQ2_XS, QType.IQ2_XXS), QType.IQ4_NL),
}  # fmt: skip


def fitting(qtype: QType, cols: int) -> QType:
    """The type that a published file has for a tensor of `cols` columns where a mixture says `qtype`."""
    return _SMALLER.get(qtype, qtype) if cols % gguf.GGML_QUANT_SIZES[qtype][0] else qtype


_CHUNK = 256 * 256  # weights at a time: their float32 copies stay in the second-level cache
_OF_PACKAGE = (
    QType.F32, QType.F16, QType.BF16, QType.Q8_0, QType.Q4_0, QType.Q4_1, QType.Q5_0, QType.Q5_1, QType.MXFP4,
)  # fmt: skip

# The searches below work on sub-blocks that share a scale, as columns: x and w are float32 [sub, n], so that a
# sum over a sub-block is a sum of rows. w is None where every weight counts the same.

_SINGULAR = np.float32(1e-6)  # a determinant this small, beside its terms, is rounding
_CLEARLY = np.float32(1 + 1e-6)  # a gain must be larger by more than rounding


def _columns(blocks: Floats, sub: int) -> Floats:
    return np.ascontiguousarray(blocks.reshape(-1, sub).T)


def _half(x: Floats) -> Floats:
    """Round to what a binary16 scale can hold."""
    return x.astype(np.float16).astype(np.float32)


def _half_away(x: Floats) -> Floats:
    """Round away from zero, so that sub-scales stay in range: halves of tiny weights are few and far between."""
    h = x.astype(np.float16)
    away = np.nextafter(h, np.copysign(np.float16(np.inf), h))
    return np.where(np.abs(h.astype(np.float32)) < np.abs(x), away, h).astype(np.float32)


def _half_bytes(x: Floats) -> Bytes:
    return x.astype(np.float16).view(np.uint8)


def _inverse(x: Floats) -> Floats:
    """1 / x, and 0 where x is 0 or too small to have one."""
    return np.divide(1, x, out=np.zeros_like(x), where=np.abs(x) > 1e-38)


def _moments(q: Floats, x: Floats, w: Floats | None) -> tuple[Floats, Floats, Floats]:
    """Sums of w q, w q^2 and w q x over each column."""
    wq = q if w is None else w * q
    return wq.sum(0), (wq * q).sum(0), (wq * x).sum(0)


def _fit_affine(x: Floats, w: Floats | None, q_max: int) -> tuple[Floats, Floats]:
    """Scale d and offset m >= 0 of each column: x ~ d*q - m with q in 0..q_max.

    Tries grids that cut off a little at either end, and solves d and m by least squares for each.
    """
    n = np.float32(len(x)) if w is None else w.sum(0)
    sx = (x if w is None else w * x).sum(0)
    low = np.minimum(x.min(0), 0)
    high = np.maximum(x.max(0), low)
    best_d, best_m, best_gain = (high - low) * np.float32(1 / q_max), -low, np.full_like(low, -np.inf)
    for cut in np.linspace(0, 0.14, 3, dtype=np.float32):
        start = low * (1 - cut)
        step = _inverse(high - start)
        for levels in np.float32(q_max) + np.array([0, -0.5, 0.5, 1, 1.5, 2], np.float32):
            q = np.clip(np.rint((x - start) * (levels * step)), 0, q_max)
            sq, sqq, sxq = _moments(q, x, w)
            det = n * sqq - sq * sq
            d = (n * sxq - sq * sx) * _inverse(det)
            m = (sq * sxq - sqq * sx) * _inverse(det)
            inside = (m >= 0) & (det > _SINGULAR * n * sqq)
            d = np.where(inside, d, sxq * _inverse(sqq))
            m = np.where(inside, m, 0)
            gain = d * sxq - m * sx  # at a least-squares solution the squared error is sum(w x^2) - gain
            better = (gain > best_gain * _CLEARLY) & (d > 0)  # else the plainest grid wins
            best_gain = np.where(better, gain, best_gain)
            best_d = np.where(better, d, best_d)
            best_m = np.where(better, m, best_m)
    return best_d, best_m


def _affine_blocks(
    blocks: Floats, w: Floats | None, q_max: int, sub: int = 32, limit: int = 63
) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """What Q2_K, Q4_K and Q5_K share: bytes of d and dmin [n, 4], sc and mn [n, 256/sub], q [n, 256/sub, sub].

    x ~ (d*sc)*q - dmin*mn, sc and mn up to `limit`. The sub-scales are chosen among their neighbors by the
    error that is left, then d and dmin are solved by least squares.
    """
    x = _columns(blocks, sub)
    w = None if w is None else _columns(w, sub)
    per_block = 256 // sub
    n = np.full(x.shape[1], sub, np.float32) if w is None else w.sum(0)
    sx = (x if w is None else w * x).sum(0)

    def snap(scale: Floats, offset: Floats) -> Floats:
        codes: Floats = np.clip(np.rint((x + offset) * _inverse(scale)), 0, q_max)
        return codes

    def spread(values: Floats) -> Floats:
        return np.repeat(values, per_block)

    def total(per_column: Floats) -> Floats:
        sums: Floats = per_column.reshape(-1, per_block).sum(1)
        return sums

    d_sub, m_sub = _fit_affine(x, w, q_max)
    d = _half_away(d_sub.reshape(-1, per_block).max(1) * np.float32(1 / limit))
    dmin = _half_away(m_sub.reshape(-1, per_block).max(1) * np.float32(1 / limit))
    first_sc = np.rint(d_sub * spread(_inverse(d)))
    first_m = spread(dmin) * np.clip(np.rint(m_sub * spread(_inverse(dmin))), 0, limit)

    sc = mn = np.zeros_like(first_sc)
    best_error = np.full_like(first_sc, np.inf)
    for step in (0, -1, 1):
        new_sc = np.clip(first_sc + np.float32(step), 0, limit)
        scale = spread(d) * new_sc
        sq, _, _ = _moments(snap(scale, first_m), x, w)
        new_mn = np.clip(np.rint((scale * sq - sx) * _inverse(n * spread(dmin))), 0, limit)
        m = spread(dmin) * new_mn
        sq, sqq, sxq = _moments(snap(scale, m), x, w)
        error = scale * (scale * sqq - 2 * sxq) + m * (m * n + 2 * sx - 2 * scale * sq)  # less sum(w x^2)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        sc = np.where(better, new_sc, sc)
        mn = np.where(better, new_mn, mn)

    sq, sqq, sxq = _moments(snap(spread(d) * sc, spread(dmin) * mn), x, w)
    qq, qm, mm = total(sc * sc * sqq), total(sc * mn * sq), total(mn * mn * n)
    qx, mx = total(sc * sxq), total(mn * sx)
    det = qq * mm - qm * qm
    new_d = (qx * mm - mx * qm) * _inverse(det)
    new_dmin = (qx * qm - mx * qq) * _inverse(det)
    solved = (det > _SINGULAR * qq * mm) & (new_d > 0) & (new_dmin >= 0)
    d = np.where(solved, _half(new_d), d)
    dmin = np.where(solved, _half(new_dmin), dmin)

    q = snap(spread(d) * sc, spread(dmin) * mn).astype(np.uint8).T.reshape(-1, per_block, sub)
    head = _half_bytes(np.stack([d, dmin], 1))
    return head, *(v.astype(np.uint8).reshape(-1, per_block) for v in (sc, mn)), q


def _fit_scale(x: Floats, w: Floats | None, grid: Floats, snap: Callable[[Floats], Floats]) -> Floats:
    """Scale s of each column: x ~ s*v, v a code value; snap and grid as for `_scaled_blocks`."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]
    best_s, best_gain = np.zeros_like(extreme), np.zeros_like(extreme)
    for level in grid:
        _, svv, sxv = _moments(snap(x * (level * _inverse(extreme))), x, w)
        s = sxv * _inverse(svv)
        better = s * sxv > best_gain
        best_gain = np.where(better, s * sxv, best_gain)
        best_s = np.where(better, s, best_s)
    return best_s


def _scaled_blocks(
    blocks: Floats, w: Floats | None, sub: int, limit: int, grid: Floats, snap: Callable[[Floats], Floats]
) -> tuple[Floats, Floats, Floats]:
    """What Q3_K, Q6_K and IQ4_XS share: x ~ (d*sc)*v, v a code value, sc in -limit..limit-1 of each `sub` weights.

    snap: rounds to the nearest code value. grid: where the largest weight of a sub-block is tried to lie.
    Returns d [n], sc [n, 256/sub], v [n, 256].
    """
    x = _columns(blocks, sub)
    w = None if w is None else _columns(w, sub)
    per_block = 256 // sub
    best_s = _fit_scale(x, w, grid, snap)
    subs = best_s.reshape(-1, per_block)
    top = np.take_along_axis(subs, np.abs(subs).argmax(1)[:, None], 1)[:, 0]
    d = _half_away(top * np.float32(-1 / limit))
    sc = np.clip(np.rint(best_s * np.repeat(_inverse(d), per_block)), -limit, limit - 1)
    _, svv, sxv = _moments(snap(x * _inverse(np.repeat(d, per_block) * sc)), x, w)
    vv, xv = (sc * sc * svv).reshape(-1, per_block).sum(1), (sc * sxv).reshape(-1, per_block).sum(1)
    d = np.where(vv > 0, _half(xv * _inverse(vv)), d)
    v = snap(x * _inverse(np.repeat(d, per_block) * sc))
    return d, sc.reshape(-1, per_block), np.ascontiguousarray(v.T).reshape(-1, 256)


def _pack_scales(sc: Bytes, mn: Bytes) -> Bytes:
    """Eight 6-bit scales and eight 6-bit minima in 12 bytes, as Q4_K and Q5_K keep them."""
    low_sc, high_sc, low_mn, high_mn = sc[:, :4], sc[:, 4:], mn[:, :4], mn[:, 4:]
    first, second = low_sc | (high_sc >> 4 << 6), low_mn | (high_mn >> 4 << 6)
    return np.concatenate([first, second, (high_sc & 15) | (high_mn << 4)], axis=1)


def _pack_nibbles(q: Bytes, run: int) -> Bytes:
    """Codes 0..15 [n, cols] in cols / 2 bytes: a run of codes goes to the low halves, the next to the high halves."""
    pairs = q.reshape(len(q), -1, 2, run)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << np.uint8(4))).reshape(len(q), -1)


def _pack_two_bits(q: Bytes) -> Bytes:
    """Codes 0..3 [n, 256] in 64 bytes: of four runs of 32 codes, the first in the lowest bits."""
    four = q.reshape(len(q), 2, 4, 32)
    return (four[:, :, 0] | four[:, :, 1] << 2 | four[:, :, 2] << 4 | four[:, :, 3] << 6).reshape(-1, 64)


def _q2_k(blocks: Floats, w: Floats | None) -> Bytes:
    head, sc, mn, q = _affine_blocks(blocks, w, 3, 16, 15)
    return np.concatenate([sc | mn << 4, _pack_two_bits(q.reshape(-1, 256)), head], axis=1)


def _q3_k(blocks: Floats, w: Floats | None) -> Bytes:
    def snap(y: Floats) -> Floats:
        return np.clip(np.rint(y), -4, 3)

    d, sc, v = _scaled_blocks(blocks, w, 16, 32, np.linspace(-4.6, -3, 9, dtype=np.float32), snap)
    q, ls = (v + 4).astype(np.uint8), (sc + 32).astype(np.uint8)
    high = np.packbits(q.reshape(-1, 8, 32) >> 2, axis=1, bitorder="little").reshape(-1, 32)
    top = (ls >> 4).reshape(-1, 4, 4)
    scales = [ls[:, :8] & 15 | (ls[:, 8:] & 15) << 4, top[:, 0] | top[:, 1] << 2 | top[:, 2] << 4 | top[:, 3] << 6]
    return np.concatenate([high, _pack_two_bits(q & 3), *scales, _half_bytes(d[:, None])], axis=1)


def _q4_k(blocks: Floats, w: Floats | None) -> Bytes:
    head, sc, mn, q = _affine_blocks(blocks, w, 15)
    return np.concatenate([head, _pack_scales(sc, mn), _pack_nibbles(q, 32)], axis=1)


def _q5_k(blocks: Floats, w: Floats | None) -> Bytes:
    head, sc, mn, q = _affine_blocks(blocks, w, 31)
    high = np.packbits(q >> np.uint8(4), axis=1, bitorder="little").reshape(-1, 32)
    return np.concatenate([head, _pack_scales(sc, mn), high, _pack_nibbles(q & np.uint8(15), 32)], axis=1)


def _q6_k(blocks: Floats, w: Floats | None) -> Bytes:
    def snap(y: Floats) -> Floats:
        return np.clip(np.rint(y), -32, 31)

    grid = np.linspace(-33, -29, 9, dtype=np.float32)
    d, sc, v = _scaled_blocks(blocks, w, 16, 128, grid, snap)
    q = (v + 32).astype(np.uint8)
    scales = sc.astype(np.int8).view(np.uint8)
    low, high = _pack_nibbles(q & np.uint8(15), 64), _pack_two_bits(q >> 4)
    return np.concatenate([low, high, scales, _half_bytes(d[:, None])], axis=1)


_IQ4_VALUES = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
_IQ4_NEAREST = _IQ4_VALUES[np.abs(np.arange(-128, 128)[:, None] - _IQ4_VALUES).argmin(1)]


_IQ4_GRID = np.concatenate([np.linspace(-140, -108, 9), np.linspace(104, 120, 4)]).astype(np.float32)


def _snap_iq4(y: Floats) -> Floats:
    nearest: Floats = _IQ4_NEAREST[np.clip(np.rint(y), -128, 127).astype(np.int16) + 128]
    return nearest


def _iq4_nl(blocks: Floats, w: Floats | None) -> Bytes:
    x = _columns(blocks, 32)
    d = _half(_fit_scale(x, None if w is None else _columns(w, 32), _IQ4_GRID, _snap_iq4))
    codes = np.searchsorted(_IQ4_VALUES, _snap_iq4(x * _inverse(d)).T).astype(np.uint8)
    return np.concatenate([_half_bytes(d[:, None]), _pack_nibbles(codes, 16)], axis=1)


def _iq4_xs(blocks: Floats, w: Floats | None) -> Bytes:
    d, sc, v = _scaled_blocks(blocks, w, 32, 32, _IQ4_GRID, _snap_iq4)
    ls = (sc + 32).astype(np.uint8)
    low = ls[:, ::2] & 15 | (ls[:, 1::2] & 15) << 4
    high = ((ls >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)).sum(1, dtype=np.uint16)
    codes = np.searchsorted(_IQ4_VALUES, v).astype(np.uint8)
    parts = [_half_bytes(d[:, None]), high[:, None].view(np.uint8), low, _pack_nibbles(codes, 16)]
    return np.concatenate(parts, axis=1)


_E2M1_VALUES = np.array(sorted(set(gguf.quants.NVFP4.kvalues)), np.float32)
_E2M1_CODES = np.array([gguf.quants.NVFP4.kvalues.index(int(v)) for v in _E2M1_VALUES], np.uint8)
_UE4M3_VALUES: Floats = gguf.quants.NVFP4.ue4m3_to_fp32(np.arange(127)).astype(np.float32)


def _nvfp4(blocks: Floats, w: Floats | None) -> Bytes:
    x = _columns(blocks, 16)
    w = None if w is None else _columns(w, 16)
    between = (_E2M1_VALUES[1:] + _E2M1_VALUES[:-1]) / 2
    first = np.searchsorted(_UE4M3_VALUES, np.abs(x).max(0) / _E2M1_VALUES[-1])
    best_scale = best_error = np.full(x.shape[1], np.inf, np.float32)
    for step in range(-3, 2):
        scale = np.clip(first + step, 0, 126)
        d = _UE4M3_VALUES[scale]
        error = np.square(x - d * _E2M1_VALUES[np.searchsorted(between, x * _inverse(d))])
        total = (error if w is None else w * error).sum(0)
        best_scale = np.where(total < best_error, scale, best_scale)
        best_error = np.minimum(total, best_error)
    best = best_scale.astype(np.uint8)
    codes = _E2M1_CODES[np.searchsorted(between, x * _inverse(_UE4M3_VALUES[best]))]
    packed = _pack_nibbles(np.ascontiguousarray(codes.T).reshape(-1, 64), 8)
    return np.concatenate([best.reshape(-1, 4), packed], axis=1)


_SEVEN_SIGNS = (QType.IQ2_XXS, QType.IQ2_XS, QType.IQ3_XXS)  # of 8 weights: the eighth is their parity


def _nearest(grid: Floats, y: Floats, w: Floats | None) -> npt.NDArray[np.int64]:
    """The entries of a grid [entries, k] that are nearest to rows of y [n, k]."""
    square = (grid**2).T
    return np.argmax(2 * (y if w is None else w * y) @ grid.T - (square.sum(0) if w is None else w @ square), axis=1)


def _grid_blocks(
    blocks: Floats, w: Floats | None, qtype: QType, sub: int, unit: float
) -> tuple[Bytes, Bytes, npt.NDArray[np.int64], Bytes]:
    """x ~ d*unit*(2s + 1) times an entry of the type's grid, with signs.

    Returns bytes of d [n, 2], s [n, 256/sub], indices [n, 256/k] and signs [n, 32], a bit each. The scale of each `sub`
    weights is the best of a few, each solved by least squares for the entries that are nearest.
    """
    grid = GRIDS[qtype].astype(np.float32)
    k, per_block = grid.shape[1], 256 // sub
    eights = blocks.reshape(-1, 8)
    negative = eights < 0
    if qtype in _SEVEN_SIGNS:  # where their number is odd, the weight that matters least gets the other sign
        cost = np.abs(eights) * (1 if w is None else w.reshape(-1, 8))
        negative[np.arange(len(eights)), cost.argmin(1)] ^= negative.sum(1) % 2 == 1
    x = np.where(negative, -eights, eights).reshape(-1, k)
    w = None if w is None else w.reshape(-1, k)

    def spread(scale: Floats) -> Floats:
        return np.repeat(scale, sub // k)[:, None]

    def fitted(scale: Floats) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
        """Entries at a scale of each sub-block, and the sums of w v^2 and w v x there."""
        index = _nearest(grid, x * spread(_inverse(scale)), w)
        v = grid[index] if w is None else w * grid[index]
        return index, (v * grid[index]).reshape(-1, sub).sum(1), (v * x).reshape(-1, sub).sum(1)

    top = np.abs(blocks.reshape(-1, sub)).max(1)
    best_s, best_gain = np.zeros_like(top), np.zeros_like(top)
    for level in (0.8, 1, 1.25):
        _, svv, sxv = fitted(top * np.float32(level / grid.max()))
        better = sxv * sxv * _inverse(svv) > best_gain
        best_gain = np.where(better, sxv * sxv * _inverse(svv), best_gain)
        best_s = np.where(better, np.maximum(sxv * _inverse(svv), 0), best_s)
    d = _half_away(best_s.reshape(-1, per_block).max(1) * np.float32(1 / (31 * unit)))
    s = np.clip(np.rint((best_s * np.repeat(_inverse(d), per_block) * np.float32(1 / unit) - 1) / 2), 0, 15)
    factor = (2 * s + 1) * np.float32(unit)
    index, svv, sxv = fitted(np.repeat(d, per_block) * factor)
    vv, xv = (factor * factor * svv).reshape(-1, per_block).sum(1), (factor * sxv).reshape(-1, per_block).sum(1)
    d = np.where((vv > 0) & (xv > 0), _half(xv * _inverse(vv)), d)
    signs = np.packbits(negative.reshape(-1, 256), axis=1, bitorder="little")
    return _half_bytes(d[:, None]), s.astype(np.uint8).reshape(-1, per_block), index.reshape(-1, 256 // k), signs


def _signs_and_scale(signs: Bytes, s: Bytes) -> Bytes:
    """A word a block: four times seven signs, four bits of scale."""
    words = ((signs.reshape(-1, 8, 4) & 127).astype(np.uint32) << np.array([0, 7, 14, 21], np.uint32)).sum(2)
    return (words.astype(np.uint32) | s.astype(np.uint32) << np.uint32(28))[..., None].view(np.uint8)


def _pairs_of_nibbles(s: Bytes) -> Bytes:
    return s[:, ::2] | s[:, 1::2] << 4


def _iq2_xxs(blocks: Floats, w: Floats | None) -> Bytes:
    d, s, index, signs = _grid_blocks(blocks, w, QType.IQ2_XXS, 32, 1 / 8)
    pairs = np.concatenate([index.astype(np.uint8).reshape(-1, 8, 4), _signs_and_scale(signs, s)], axis=2)
    return np.concatenate([d, pairs.reshape(-1, 64)], axis=1)


def _iq2_xs(blocks: Floats, w: Floats | None) -> Bytes:
    d, s, index, signs = _grid_blocks(blocks, w, QType.IQ2_XS, 16, 1 / 8)
    words = (index | (signs & 127).astype(np.int64) << 9).astype(np.uint16)
    return np.concatenate([d, words.view(np.uint8), _pairs_of_nibbles(s)], axis=1)


def _iq2_s(blocks: Floats, w: Floats | None) -> Bytes:
    d, s, index, signs = _grid_blocks(blocks, w, QType.IQ2_S, 16, 1 / 8)
    high = ((index >> 8).reshape(-1, 8, 4) << np.array([0, 2, 4, 6])).sum(2).astype(np.uint8)
    return np.concatenate([d, index.astype(np.uint8), signs, high, _pairs_of_nibbles(s)], axis=1)


def _iq3_xxs(blocks: Floats, w: Floats | None) -> Bytes:
    d, s, index, signs = _grid_blocks(blocks, w, QType.IQ3_XXS, 32, 1 / 4)
    return np.concatenate([d, index.astype(np.uint8), _signs_and_scale(signs, s).reshape(-1, 32)], axis=1)


def _iq3_s(blocks: Floats, w: Floats | None) -> Bytes:
    d, s, index, signs = _grid_blocks(blocks, w, QType.IQ3_S, 32, 1)
    high = np.packbits(index >> 8 > 0, axis=1, bitorder="little")
    return np.concatenate([d, index.astype(np.uint8), high, signs, _pairs_of_nibbles(s)], axis=1)


_SEARCHES = {
    QType.Q2_K: _q2_k, QType.Q3_K: _q3_k, QType.Q4_K: _q4_k, QType.Q5_K: _q5_k, QType.Q6_K: _q6_k,
    QType.IQ2_XXS: _iq2_xxs, QType.IQ2_XS: _iq2_xs, QType.IQ3_XXS: _iq3_xxs, QType.IQ3_S: _iq3_s, QType.IQ2_S: _iq2_s,
    QType.IQ4_NL: _iq4_nl, QType.IQ4_XS: _iq4_xs, QType.NVFP4: _nvfp4,
}  # fmt: skip
