"""What a decoded token takes where experts are missing, predicted from two places where it was measured.

    t = t0 + scale * (sum over layers of what a layer's misses take)

What the misses of a layer take follows from what the engine measured as it loaded: so long an expert over PCIe, or with
experts on the CPU the table of divisions (`layer_us` of `Ready`), in which P, C and h are. t0, and how much more than
these say a miss takes in a whole step, are fitted to the place where least is missing and to the one where most is.
Everything between is predicted: residencies and rates of misses that nothing was fitted to. What misses at a residency
is no prediction, but what was counted there. Guesses are in `scale` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, isfinite
from typing import Any

# Of zero-copy reads, where no link was measured. If it is another one, `scale` says so.
PCIE_BYTES_PER_US = 50e3


@dataclass(frozen=True, slots=True)
class Line:
    """A token takes t0_ms and `scale` times what its misses take alone."""

    t0_ms: float
    scale: float

    def ms(self, missed_us: float) -> float:
        """Of a token whose misses take so long alone."""
        return self.t0_ms + self.scale * missed_us / 1e3


def missed_us(info: Mapping[str, Any], misses: Sequence[float]) -> float:
    """What a token's misses take alone. info: of `Ready`; misses: of a token, mean, by MoE layer.

    How many of a layer's experts are missing differs from token to token: each with the same chance, by itself.
    """
    sizes, n_used = info["model"]["expert_bytes"], info["model"]["n_expert_used"]
    if len(sizes) != len(misses):
        raise ValueError(f"misses of {len(misses)} layers, of which the model has {len(sizes)}")
    if not sizes:
        return 0.0
    mean_bytes = sum(sizes) / len(sizes)
    layer_us = (info.get("cpu_experts") or {}).get("layer_us")
    if layer_us is None:
        layer_us = [n * mean_bytes / PCIE_BYTES_PER_US for n in range(n_used + 1)]
    found = (size / mean_bytes * _expected(layer_us, n / n_used) for size, n in zip(sizes, misses, strict=True))
    return float(sum(found))


def _expected(layer_us: Sequence[float], chance: float) -> float:
    """The mean of what 0, 1, ... misses take, each expert missing with a chance."""
    n, p = len(layer_us) - 1, min(1.0, max(0.0, chance))
    return sum(comb(n, k) * p**k * (1 - p) ** (n - k) * us for k, us in enumerate(layer_us))


def anchors(missed: Sequence[float]) -> tuple[int, int] | None:
    """The places that a line is fitted to, where least and where most is missing; None: they are alike."""
    if not missed:
        return None
    least, most = (missed.index(f(missed)) for f in (min, max))
    return None if missed[least] == missed[most] else (least, most)


def fit(missed: tuple[float, float], ms: tuple[float, float]) -> Line:
    """The line through two places: what misses take there alone, in us, and what a token took. ValueError: none is."""
    if missed[0] == missed[1] or not all(map(isfinite, (*missed, *ms))):
        raise ValueError(f"no line goes through misses of {missed} us and tokens of {ms} ms")
    scale = 1e3 * (ms[1] - ms[0]) / (missed[1] - missed[0])
    return Line(ms[0] - scale * missed[0] / 1e3, scale)
