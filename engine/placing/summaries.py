"""Summaries of blocks of keys: from far fewer bytes than the keys', what a query will find in a block.

A query of a decoded token puts nearly all of its softmax mass on few blocks. Which ones, a *summary* of each block
tells before any key is read: an estimate of the block's mass, by which blocks are chosen, and a bound that holds
always, by which what is not read can be certified (`left_out`). A sketch of half of the channels serves
(engine/ops/sketches.py), without bounds; benchmarks/summaries.py compares these kinds, docs/kv.md says what came of it.

| kind | what it keeps of a block | source |
| --- | --- | --- |
| `Means(n)` | n means of 64 / n keys, and the distance of the farthest key | QK scores of Lucebox's KVFlash |
| `Extremes()` | the least and the largest of each channel | Quest, arXiv 2406.10774 |
| `Sketch(bits)` | every key in 2 or 4 bits, by channel | KIVI, arXiv 2402.02750 |

Axes: B blocks, N keys of a block, d channels of a head, R rows (a query head of a token each). A score is (q . k)
scale; masses are logarithms of sums of exponentials of scores. This is the model of a kernel, in float64 over what is
stored in halves or bits, whose rounding the bounds include.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

F64: TypeAlias = NDArray[np.float64]
Kept: TypeAlias = dict[str, NDArray[Any]]
_LARGEST = float(np.finfo(np.float16).max)
_HALF_STEP = 0.5 + 1e-9  # of a channel: the most that rounding moves a key, and that of float64


class Summary(Protocol):
    """A kind of summary."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    def n_bytes(self, head_dim: int) -> int:
        """Of a block of one KV head."""
        ...

    def of(self, keys: F64) -> Kept:
        """Summarize blocks of keys [B, N, d], none of them masked."""
        ...

    def masses(self, kept: Kept, q: F64, scale: float) -> tuple[F64, F64]:
        """Of each row of q [R, d] the estimated mass of each block, and what it is at most; [R, B] both."""
        ...


@dataclass(frozen=True, slots=True)
class Means:
    """The means of `parts` runs of keys, in halves, and of each run the largest distance of a key from its mean."""

    parts: int

    @property
    def name(self) -> str:
        """See `Summary`."""
        return "mean" if self.parts == 1 else f"{self.parts} means"

    def n_bytes(self, head_dim: int) -> int:
        """See `Summary`."""
        return self.parts * (2 * head_dim + 2)

    def of(self, keys: F64) -> Kept:
        """See `Summary`. mean: float16 [B, parts, d]; radius: float16 [B, parts]; count: keys of a part."""
        B, N, d = keys.shape
        runs = keys.reshape(B, self.parts, N // self.parts, d)
        mean = _half(runs.mean(axis=2))
        away = np.linalg.norm(runs - mean[:, :, None].astype(np.float64), axis=3)
        return {"mean": mean, "radius": _half_up(away.max(axis=2)), "count": np.array(N // self.parts)}

    def masses(self, kept: Kept, q: F64, scale: float) -> tuple[F64, F64]:
        """See `Summary`."""
        at = scale * _products(q, kept["mean"].astype(np.float64))
        reach = scale * np.linalg.norm(q, axis=1)[:, None, None] * kept["radius"].astype(np.float64)
        keys = np.log(float(kept["count"]))
        return log_sum(at) + keys, log_sum(at + reach) + keys


@dataclass(frozen=True, slots=True)
class Extremes:
    """The least and the largest of each channel over a block's keys, in halves that are rounded outward."""

    name: str = "extremes"

    def n_bytes(self, head_dim: int) -> int:
        """See `Summary`."""
        return 4 * head_dim

    def of(self, keys: F64) -> Kept:
        """See `Summary`. least, largest: float16 [B, d]; count: keys of a block."""
        least, largest = -_half_up(-keys.min(axis=1)), _half_up(keys.max(axis=1))
        return {"least": least, "largest": largest, "count": np.array(keys.shape[1])}

    def masses(self, kept: Kept, q: F64, scale: float) -> tuple[F64, F64]:
        """See `Summary`. The estimate, as Quest has it, is the bound of one key."""
        least, largest = (kept[key].astype(np.float64) for key in ("least", "largest"))
        up = scale * (np.maximum(q, 0.0) @ largest.T + np.minimum(q, 0.0) @ least.T)
        return up, up + np.log(float(kept["count"]))


@dataclass(frozen=True, slots=True)
class Sketch:
    """Every key in so many bits, evenly between the least and the largest of its channel in the block.

    What a key's rounding can do to a score is bounded twice: by how far it moved, and by the steps of the channels.
    """

    bits: int

    @property
    def name(self) -> str:
        """See `Summary`."""
        return f"sketch of {self.bits} bits"

    def n_bytes(self, head_dim: int) -> int:
        """See `Summary`. Of 64 keys."""
        return 64 * head_dim * self.bits // 8 + 4 * head_dim + 2 * 64

    def of(self, keys: F64) -> Kept:
        """See `Summary`.

        least, step: float16 [B, d]; code: uint8 [B, N, d], each of `bits` bits; away: float16 [B, N], the distance of
        each key from what is kept of it.
        """
        levels = (1 << self.bits) - 1
        least = -_half_up(-keys.min(axis=1))
        room = np.maximum(keys.max(axis=1) - least.astype(np.float64), 0.0)
        step = _half_up(room / levels)
        each = np.where(step > 0, step, 1).astype(np.float64)[:, None]
        code = np.clip(np.rint((keys - least.astype(np.float64)[:, None]) / each), 0, levels).astype(np.uint8)
        kept: Kept = {"least": least, "step": step, "code": code}
        return kept | {"away": _half_up(np.linalg.norm(keys - self.keys(kept), axis=2))}

    def masses(self, kept: Kept, q: F64, scale: float) -> tuple[F64, F64]:
        """See `Summary`."""
        at = scale * _products(q, self.keys(kept))
        far = np.linalg.norm(q, axis=1)[:, None, None] * kept["away"].astype(np.float64)
        by_channel = (np.abs(q) @ (_HALF_STEP * kept["step"].astype(np.float64)).T)[:, :, None]
        return log_sum(at), log_sum(at + scale * np.minimum(far, by_channel))

    def keys(self, kept: Kept) -> F64:
        """What is known of each key, float64 [B, N, d]."""
        found: F64 = kept["least"].astype(np.float64)[:, None] + kept["code"] * kept["step"].astype(np.float64)[:, None]
        return found


KINDS: tuple[Summary, ...] = (Means(1), Means(4), Extremes(), Sketch(2), Sketch(4))


def true_masses(keys: F64, q: F64, scale: float) -> F64:
    """The masses of blocks of keys [B, N, d] for rows q [R, d]: [R, B]."""
    return log_sum(scale * _products(q, keys))


def best(masses: F64, n: int, kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which blocks a group of rows reads: those that are kept anyway [B], and the n others that matter most to any row.

    masses [R, B]: estimates. A row's blocks are compared by their share of what is estimated for it. Ties go to the
    earlier block. Returns bool [B].
    """
    share = np.where(kept, -np.inf, masses) - log_sum(masses)[:, None]
    order = np.argsort(-share.max(axis=0), kind="stable")
    chosen = kept.copy()
    chosen[order[: min(n, int((~kept).sum()))]] = True
    return chosen


def left_out(read: F64, at_most: F64) -> F64:
    """The share of softmax mass that is left out, at most: read [R] of what is read, at_most [R] of what is not."""
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(read - at_most)))


def log_sum(values: F64) -> F64:
    """The logarithm of a sum of exponentials, over the last axis; -inf for none."""
    if values.shape[-1] == 0:
        return np.full(values.shape[:-1], -np.inf)
    top = values.max(axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(top[..., 0] + np.log(np.exp(values - top).sum(axis=-1)))


def _products(q: F64, keys: F64) -> F64:
    """Of rows [R, d] with keys [B, N, d]: [R, B, N]."""
    return np.asarray((q @ keys.reshape(-1, keys.shape[2]).T).reshape(len(q), *keys.shape[:2]))


def _half(values: F64) -> NDArray[np.float16]:
    return np.clip(values, -_LARGEST, _LARGEST).astype(np.float16)


def _half_up(values: F64) -> NDArray[np.float16]:
    """The least halves that are no less, infinite where there is none."""
    with np.errstate(over="ignore"):
        found = values.astype(np.float16)
    below = found.astype(np.float64) < values
    return np.where(below, np.nextafter(found, np.float16(np.inf)), found)
