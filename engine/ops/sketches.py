"""Sketches of blocks of keys, by which decoded rows choose what they read (docs/arithmetic.md, "Recall"): the layout.

A sketch is of a KV head and a block of 64 keys. It keeps 2 bits of each key in the half of the channels that vary most
in the block, the *kept* ones, and the mean of each other one. As bytes, one part after the other:

| part | what | |
| --- | --- | --- |
| codes | uint32 [ceil(n / 16), 64] | rank r of key j: bits 8 (r mod 4) + 2 (r // 4 mod 4) of word [r // 16, j] |
| mask | uint32 [ceil(d / 32)] | bit c mod 32 of word c // 32: channel c is kept |
| base | float16 [d] | least value of a kept channel, mean of another |
| step | float16 [n] | what a code counts in |

d: the head's width; n = d // 2 channels are kept, whose ranks are their order. The end is filled up to 4 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.ops import F16, F32, I32, KV_BLOCK_TOKENS, U8
from engine.ops.arithmetic import dot32, fma, quantize_rows

U32 = NDArray[np.uint32]
LEVELS = 3  # the largest code
NAN_HALF = 0x7E00
_RANKS = 16  # of a word


def n_kept(head_dim: int) -> int:
    """Channels of which a sketch has codes."""
    return head_dim // 2


def sketch_bytes(head_dim: int) -> int:
    """Of a block of one KV head."""
    n = n_kept(head_dim)
    codes, mask = 4 * KV_BLOCK_TOKENS * -(-n // _RANKS), 4 * -(-head_dim // 32)
    return codes + mask + -(-2 * (head_dim + n) // 4) * 4


@dataclass(frozen=True, slots=True)
class Parts:
    """Views of sketches [..., sketch_bytes(head_dim)], as the table above has them."""

    codes: U32
    mask: U32
    base: F16
    step: F16

    def channels(self) -> I32:
        """The kept ones in order, int32 [..., n]."""
        bits = np.unpackbits(np.ascontiguousarray(self.mask).view(np.uint8), axis=-1, bitorder="little")
        return np.argsort(1 - bits, axis=-1, kind="stable")[..., : self.step.shape[-1]].astype(np.int32)

    def levels(self) -> U8:
        """Codes by key and rank, uint8 [..., 64, n]."""
        shifts = np.array([8 * (r % 4) + 2 * (r // 4) for r in range(_RANKS)], np.uint32)
        codes = (self.codes[..., None] >> shifts & LEVELS).astype(np.uint8)  # [..., words, 64, 16]
        by_key = np.moveaxis(codes, -3, -2)
        return by_key.reshape(*by_key.shape[:-2], -1)[..., : self.step.shape[-1]]


def parts(sketches: NDArray[Any], head_dim: int) -> Parts:
    """The parts of sketches, uint8 [..., sketch_bytes(head_dim)] contiguous in the last axis."""
    n, words = n_kept(head_dim), -(-n_kept(head_dim) // _RANKS)
    ends = np.cumsum([4 * KV_BLOCK_TOKENS * words, 4 * -(-head_dim // 32), 2 * head_dim, 2 * n])
    codes, mask, base, step = (
        sketches[..., begin:end] for begin, end in zip((0, *ends[:-1].tolist()), ends.tolist(), strict=True)
    )
    by_word = codes.view(np.uint32).reshape(*codes.shape[:-1], words, KV_BLOCK_TOKENS)
    return Parts(by_word, mask.view(np.uint32), base.view(np.float16), step.view(np.float16))


def sketch(keys: F32, to: U8) -> None:
    """Write the sketches of a block: keys float32 [64, K, head_dim], to uint8 [K, sketch_bytes(head_dim)]."""
    N, K, d = keys.shape
    n, words = n_kept(d), -(-n_kept(d) // _RANKS)
    with np.errstate(all="ignore"):
        least, most = keys.min(axis=0) + np.float32(0), keys.max(axis=0) + np.float32(0)  # no -0
        spoiled = ~np.isfinite(keys).all(axis=0)
        spread = np.where(spoiled, np.float32(np.nan), most - least).astype(np.float32)
        total = np.zeros_like(least)
        for key in keys:
            total = total + key
        # Not below 0, so their bits are ordered as they are; a NaN is above all.
        kept = np.sort(np.argsort(-spread.view(np.int32).astype(np.int64), axis=1, kind="stable")[:, :n], axis=1)
        base = (total * np.float32(1 / N)).astype(np.float16)
        np.put_along_axis(base, kept, np.take_along_axis(least, kept, 1).astype(np.float16), axis=1)
        base.view(np.uint16)[spoiled] = NAN_HALF
        step = (np.take_along_axis(spread, kept, 1) / np.float32(LEVELS)).astype(np.float16)
        step.view(np.uint16)[np.take_along_axis(spoiled, kept, 1)] = NAN_HALF
        at = np.take_along_axis(base, kept, 1).astype(np.float32)
        rows = np.take_along_axis(keys, np.broadcast_to(kept, (N, K, n)), 2)
        code = np.rint((rows - at) * (np.float32(1) / step.astype(np.float32)))
        code = np.where(code >= LEVELS, np.float32(LEVELS), np.where(code > 0, code, np.float32(0)))
    found = parts(to, d)
    levels = np.zeros((K, N, words * _RANKS), np.uint32)
    levels[..., :n] = code.astype(np.uint32).swapaxes(0, 1)
    of_bytes = levels.reshape(K, N, words, 4, 4) << (2 * np.arange(4, dtype=np.uint32)[:, None])
    found.codes[...] = (
        (of_bytes << (8 * np.arange(4, dtype=np.uint32))).sum(axis=(3, 4), dtype=np.uint32).swapaxes(1, 2)
    )
    bits = np.zeros((K, found.mask.shape[-1] * 32), np.uint8)
    np.put_along_axis(bits, kept, 1, axis=1)
    found.mask[...] = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    found.base[...], found.step[...] = base, step
    to[:, sum(part.nbytes for part in (found.codes, found.mask, found.base, found.step)) // K :] = 0


def key_scores(q: F32, sketches: U8, scale: float) -> F32:
    """Scores of the keys of blocks as their sketches have them.

    q float32 [H, head_dim]; sketches uint8 [blocks, K, sketch_bytes(head_dim)]: float32 [blocks, H, 64].
    """
    H, d = q.shape
    kept = parts(sketches, d)
    group = H // sketches.shape[1]
    base = np.repeat(kept.base.astype(np.float32), group, axis=1)
    steps = np.repeat(kept.step.astype(np.float32), group, axis=1)
    channels = np.repeat(kept.channels(), group, axis=1)
    with np.errstate(all="ignore"):
        rest = dot32(q[None], base)
        counted = np.take_along_axis(np.broadcast_to(q, (len(base), H, d)), channels, axis=2) * steps
        integers, unit = quantize_rows(np.asarray(counted, np.float32))
        # Integers below 2^24 in binary64 are exact in any order, so a BLAS product may compute them.
        of_groups = integers.astype(np.float64).reshape(len(base), -1, group, counted.shape[2])
        found = of_groups @ kept.levels().astype(np.float64).swapaxes(2, 3)  # [blocks, K, group, 64]
        sums = np.asarray(found.reshape(len(base), H, KV_BLOCK_TOKENS), np.float32)
        return np.asarray(fma(unit[..., None], sums, rest[..., None]) * np.float32(scale), np.float32)
