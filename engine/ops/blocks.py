"""Quantized blocks taken apart into the integers and scales that docs/arithmetic.md multiplies.

Layouts are those of the GGUF format (the `gguf` package's `quants` module is the oracle; the tests
rebuild every weight from these parts and compare).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as QType
from numpy.typing import NDArray

from engine.formats import block_types, quants
from engine.formats.grids import GRIDS
from engine.formats.quants import QTensor
from engine.ops import F32, U8

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int16)
E2M1_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int16)  # doubled


@dataclass(frozen=True, slots=True)
class BlockTerms:
    """A matrix [N, K] as blocks of 32 in two halves of 16.

    q: int16 [N, K / 32, 2, 16]. scale: float32 [N, K / 32]. half_scale: int32 [N, K / 32, 2], integer
    factors of the halves, or float32, multiples of 2^-10 up to 240 (then scale is 1), or None. minimum:
    float32 [N, K / 32], subtracted times the sum of the activations, or None. half_minimum: int32 [N, K / 32, 2],
    factors of the minimum for the halves, or None. The weight is scale * half_scale * q - minimum * half_minimum.
    """

    q: NDArray[np.int16]
    scale: F32
    half_scale: NDArray[np.int32] | F32 | None = None
    minimum: F32 | None = None
    half_minimum: NDArray[np.int32] | None = None


def float_rows(w: QTensor) -> F32:
    """A matrix of a float type as float32, converted exactly."""
    return quants.dequantize(w)


def _half_floats(raw: U8) -> F32:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _k_scales(raw: U8) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The eight 6-bit scales and minimums of a Q4_K or Q5_K block: [..., 12] -> two of [..., 8]."""
    low, mid, high = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minimum = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=-1)
    return scale, minimum


def _nibble_pairs(qs: U8) -> U8:
    """128 bytes as eight blocks of 32: bytes 32j..32j+31 hold block 2j low and block 2j+1 high."""
    pairs = qs.reshape(*qs.shape[:-1], 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(*qs.shape[:-1], 8, 32)


def _nibble_halves(qs: U8) -> U8:
    """Bytes as twice as many codes: the first half of them in the low halves, the others in the high ones."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _q8_0(raw: U8) -> BlockTerms:
    return BlockTerms(raw[..., 2:].view(np.int8).astype(np.int16), _half_floats(raw[..., :2])[..., 0])


def _q4_0(raw: U8) -> BlockTerms:
    q = _nibble_halves(raw[..., 2:]).astype(np.int16) - 8
    return BlockTerms(q, _half_floats(raw[..., :2])[..., 0])


def _q4_1(raw: U8) -> BlockTerms:
    d = _half_floats(raw[..., :4])
    return BlockTerms(_nibble_halves(raw[..., 4:]).astype(np.int16), d[..., 0], None, -d[..., 1])


def _five_bits(raw: U8) -> NDArray[np.int16]:
    """Four bytes with the fifth bit of each element, 16 bytes with the other four: codes 0..31."""
    fifth = np.unpackbits(raw[..., :4], axis=-1, bitorder="little")
    return (_nibble_halves(raw[..., 4:]) | (fifth << 4)).astype(np.int16)


def _q5_0(raw: U8) -> BlockTerms:
    return BlockTerms(_five_bits(raw[..., 2:]) - np.int16(16), _half_floats(raw[..., :2])[..., 0])


def _q5_1(raw: U8) -> BlockTerms:
    d = _half_floats(raw[..., :4])
    return BlockTerms(_five_bits(raw[..., 4:]), d[..., 0], None, -d[..., 1])


def _two_bits(qs: U8) -> U8:
    """64 bytes as eight blocks of 32: bytes 32n..32n+31 hold blocks 4n..4n+3, two bits each, lowest first."""
    four = qs.reshape(*qs.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return (four & np.uint8(3)).reshape(*qs.shape[:-1], 8, 32)


def _q2_k(raw: U8) -> BlockTerms:
    lead = raw.shape[:-1]
    both = raw[..., :16].reshape(*lead, 8, 2).astype(np.int32)
    d = _half_floats(raw[..., 80:84])
    q = _two_bits(raw[..., 16:80]).astype(np.int16)
    scale, minimum = (np.repeat(part, 8, axis=-1) for part in (d[..., :1], d[..., 1:]))
    return BlockTerms(q, scale, both & 15, minimum, both >> 4)


def _q3_k(raw: U8) -> BlockTerms:
    lead = raw.shape[:-1]
    high = (raw[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    q = (_two_bits(raw[..., 32:96]) | (high << 2)).astype(np.int16) - 4
    low = np.concatenate([raw[..., 96:104] & 15, raw[..., 96:104] >> 4], axis=-1)
    top = (raw[..., None, 104:108] >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]) & 3
    six = low | (top.reshape(*lead, 16) << 4)
    scale = np.repeat(_half_floats(raw[..., 108:110]), 8, axis=-1)
    return BlockTerms(q, scale, six.reshape(*lead, 8, 2).astype(np.int32) - 32)


def _q4_k(raw: U8) -> BlockTerms:
    d = _half_floats(raw[..., :4])
    scale, minimum = _k_scales(raw[..., 4:16])
    q = _nibble_pairs(raw[..., 16:]).astype(np.int16)
    return BlockTerms(q, d[..., :1] * scale.astype(np.float32), None, d[..., 1:] * minimum.astype(np.float32))


def _q5_k(raw: U8) -> BlockTerms:
    d = _half_floats(raw[..., :4])
    scale, minimum = _k_scales(raw[..., 4:16])
    bits = (raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    q = (_nibble_pairs(raw[..., 48:]) | (bits << 4)).astype(np.int16)
    return BlockTerms(q, d[..., :1] * scale.astype(np.float32), None, d[..., 1:] * minimum.astype(np.float32))


def _q6_k(raw: U8) -> BlockTerms:
    lead = raw.shape[:-1]
    ql = raw[..., :128].reshape(*lead, 2, 2, 32)  # [half of 128, first or second 32 bytes, 32]
    qh = raw[..., 128:192].reshape(*lead, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    low = np.concatenate([ql & 15, ql >> 4], axis=-2)  # [2, 4, 32]
    q = (low | (((qh >> shifts) & 3) << 4)).astype(np.int16) - 32
    half_scale = raw[..., 192:208].view(np.int8).astype(np.int32).reshape(*lead, 8, 2)
    scale = np.repeat(_half_floats(raw[..., 208:210]), 8, axis=-1)
    return BlockTerms(q.reshape(*lead, 8, 32), scale, half_scale)


def _words(raw: U8) -> NDArray[np.uint32]:
    """Bytes [..., 4n] as n little-endian words."""
    return np.ascontiguousarray(raw).view(np.uint32)


def _nibbles(raw: U8) -> NDArray[np.int32]:
    """Bytes [..., n] as 2n nibbles, low ones first."""
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1).astype(np.int32)


def _seven_bits(signs: NDArray[Any]) -> U8:
    """Seven sign bits with their parity as the eighth."""
    seven = (signs & 127).astype(np.uint8)
    odd = seven.copy()
    for shift in (4, 2, 1):
        odd ^= odd >> np.uint8(shift)
    return seven | (odd & np.uint8(1)) << np.uint8(7)


def _signed(qtype: QType, index: NDArray[Any], signs: U8) -> NDArray[np.int16]:
    """Entries [..., n] of a type's grid with a sign bit for each weight, signs [..., 32]: q [..., 8, 32]."""
    q: NDArray[np.int16] = GRIDS[qtype][index].reshape(*index.shape[:-1], 256)
    np.negative(q, out=q, where=np.unpackbits(signs, axis=-1, bitorder="little").astype(bool))
    return q.reshape(*index.shape[:-1], 8, 32)


_SEVENS = np.array([0, 7, 14, 21], dtype=np.uint32)  # where four times seven sign bits are in a word


def _iq2_xxs(raw: U8) -> BlockTerms:
    lead = raw.shape[:-1]
    pairs = raw[..., 2:].reshape(*lead, 8, 8)  # four indices, a word of signs and scale
    word = _words(pairs[..., 4:])
    q = _signed(QType.IQ2_XXS, pairs[..., :4].reshape(*lead, 32), _seven_bits(word >> _SEVENS).reshape(*lead, 32))
    factor = 2 * (word[..., 0] >> 28) + 1
    return BlockTerms(q, _half_floats(raw[..., :2]) * factor.astype(np.float32) * np.float32(1 / 8))


def _iq2_xs(raw: U8) -> BlockTerms:
    lead = raw.shape[:-1]
    both = np.ascontiguousarray(raw[..., 2:66]).view(np.uint16)
    q = _signed(QType.IQ2_XS, both & 511, _seven_bits(both >> 9))
    scale = np.repeat(_half_floats(raw[..., :2]) * np.float32(1 / 8), 8, axis=-1)
    return BlockTerms(q, scale, 2 * _nibbles(raw[..., 66:]).reshape(*lead, 8, 2) + 1)


def _iq2_s(raw: U8) -> BlockTerms:
    lead = raw.shape[:-1]
    high = (raw[..., 66:74, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)) & 3
    index = raw[..., 2:34] | high.reshape(*lead, 32).astype(np.int32) << 8
    scale = np.repeat(_half_floats(raw[..., :2]) * np.float32(1 / 8), 8, axis=-1)
    factor = 2 * _nibbles(raw[..., 74:]).reshape(*lead, 8, 2) + 1
    return BlockTerms(_signed(QType.IQ2_S, index, raw[..., 34:66]), scale, factor)


def _iq3_xxs(raw: U8) -> BlockTerms:
    word = _words(raw[..., 66:])
    signs = _seven_bits(word[..., None] >> _SEVENS).reshape(*raw.shape[:-1], 32)
    factor = (2 * (word >> 28) + 1).astype(np.float32)
    q = _signed(QType.IQ3_XXS, raw[..., 2:66], signs)
    return BlockTerms(q, _half_floats(raw[..., :2]) * factor * np.float32(1 / 4))


def _iq3_s(raw: U8) -> BlockTerms:
    index = raw[..., 2:66] | np.unpackbits(raw[..., 66:74], axis=-1, bitorder="little").astype(np.int32) << 8
    factor = (2 * _nibbles(raw[..., 106:]) + 1).astype(np.float32)
    return BlockTerms(_signed(QType.IQ3_S, index, raw[..., 74:106]), _half_floats(raw[..., :2]) * factor)


def _iq4_nl(raw: U8) -> BlockTerms:
    return BlockTerms(IQ4_VALUES[_nibble_halves(raw[..., 2:])], _half_floats(raw[..., :2])[..., 0])


def _iq4_xs(raw: U8) -> BlockTerms:
    lead = raw.shape[:-1]
    d = _half_floats(raw[..., :2])
    high = np.ascontiguousarray(raw[..., 2:4]).view(np.uint16)
    low = np.stack([raw[..., 4:8] & 15, raw[..., 4:8] >> 4], axis=-1).reshape(*lead, 8)
    shifts = 2 * np.arange(8, dtype=np.uint16)
    ls = low.astype(np.int32) | (((high >> shifts) & 3) << 4).astype(np.int32)
    q = IQ4_VALUES[_nibble_halves(raw[..., 8:].reshape(*lead, 8, 16))]
    return BlockTerms(q, d * (ls - 32).astype(np.float32))


def _mxfp4(raw: U8) -> BlockTerms:
    d = np.ldexp(np.float32(1), raw[..., 0].astype(np.int32) - 128)  # values are doubled
    return BlockTerms(E2M1_VALUES[_nibble_halves(raw[..., 1:])], d)


def _ue4m3(raw: U8) -> F32:
    """Half of what eight bits say: four of exponent, three of mantissa; the sign is ignored, 0x7f is 0."""
    exponent, mantissa = (raw >> 3 & 15).astype(np.int32), (raw & 7).astype(np.float32)
    units = np.where(exponent == 0, mantissa, mantissa + 8)
    value = np.ldexp(units, np.maximum(exponent, 1) - 11)
    return np.where(raw == 0x7F, np.float32(0), value).astype(np.float32)


def _nvfp4(raw: U8) -> BlockTerms:
    lead = raw.shape[:-1]
    d = _ue4m3(raw[..., :4]).reshape(*lead, 2, 2)
    q = E2M1_VALUES[_nibble_halves(raw[..., 4:].reshape(*lead, 2, 2, 8))]
    return BlockTerms(q, np.ones((*lead, 2), np.float32), d)


# The twin of each block type: uint8 [N, blocks of a row, bytes of a block] to terms.
TWINS: dict[QType, Callable[[U8], BlockTerms]] = {
    QType.Q8_0: _q8_0,
    QType.Q4_0: _q4_0,
    QType.Q4_1: _q4_1,
    QType.Q5_0: _q5_0,
    QType.Q5_1: _q5_1,
    QType.Q2_K: _q2_k,
    QType.Q3_K: _q3_k,
    QType.Q4_K: _q4_k,
    QType.Q5_K: _q5_k,
    QType.Q6_K: _q6_k,
    QType.IQ2_XXS: _iq2_xxs,
    QType.IQ2_XS: _iq2_xs,
    QType.IQ3_XXS: _iq3_xxs,
    QType.IQ4_NL: _iq4_nl,
    QType.IQ3_S: _iq3_s,
    QType.IQ2_S: _iq2_s,
    QType.IQ4_XS: _iq4_xs,
    QType.MXFP4: _mxfp4,
    QType.NVFP4: _nvfp4,
}


def integer_blocks(w: QTensor) -> BlockTerms:
    """Take a quantized matrix [N, K] apart; a type without kernels is an UnsupportedModelError."""
    record = block_types.record(w.qtype, w.name)
    N, K = w.shape
    terms = TWINS[w.qtype](w.data.reshape(N, K // record.elements, record.n_bytes))

    def rows(a: NDArray[np.float32]) -> F32:
        return a.reshape(N, K // 32)

    return BlockTerms(
        terms.q.reshape(N, K // 32, 2, 16),
        rows(terms.scale),
        None if terms.half_scale is None else terms.half_scale.reshape(N, K // 32, 2),
        None if terms.minimum is None else rows(terms.minimum),
        None if terms.half_minimum is None else terms.half_minimum.reshape(N, K // 32, 2),
    )
