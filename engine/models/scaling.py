"""RoPE of contexts longer than those that a model was first trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.ops import F32
from engine.ops.arithmetic import rotations

Kind = Literal["linear", "yarn"]


@dataclass(frozen=True, slots=True)
class Scaling:
    """How positions are scaled.

    linear: frequencies are divided by `factor`. yarn (arXiv 2309.00071): those of slow rotations are, those of fast
    ones are kept, those between are mixed; cosines and sines grow. n_ctx: positions that the model was first trained
    on. beta_fast, beta_slow: rotations within n_ctx.
    """

    kind: Kind
    factor: float
    n_ctx: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0 + 0.1 * math.log(max(self.factor, 1.0)) if self.kind == "yarn" else 1.0

    def written(self) -> dict[str, Any]:
        """The GGUF keys that `Keys.scaling` reads back, without the architecture's name."""
        values: dict[str, Any] = {"rope.scaling.type": self.kind, "rope.scaling.factor": self.factor}
        if self.kind == "yarn":
            values |= {
                "rope.scaling.original_context_length": self.n_ctx,
                "rope.scaling.yarn_beta_fast": self.beta_fast,
                "rope.scaling.yarn_beta_slow": self.beta_slow,
            }
        return values

    def applied(self, plain: NDArray[np.float64], n_rot: int, base: float) -> NDArray[np.float64]:
        """The frequencies of a model's n_rot dimensions, radians a position, float64 [n_rot / 2], scaled."""
        if self.kind == "linear":
            return plain / self.factor

        def pair(rotations: float) -> float:
            """The pair of dimensions that turns so often within n_ctx."""
            return n_rot * math.log(self.n_ctx / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair(self.beta_fast)), 0)
        high = min(math.ceil(pair(self.beta_slow)), n_rot - 1)
        slow = np.clip((np.arange(n_rot // 2) - low) / max(high - low, 0.001), 0, 1)
        mixed: NDArray[np.float64] = plain * (1 - slow) + plain / self.factor * slow
        return mixed


def scaled_rope_table(
    n_ctx: int, n_rot: int, base: float, scaling: Scaling | None, factors: NDArray[np.float64] | None = None
) -> F32:
    """As `rope_table` of ops/arithmetic.py, [n_ctx, 2, n_rot / 2]; factors: what divides each frequency."""
    frequencies = base ** (-2.0 * np.arange(n_rot // 2) / n_rot)
    if factors is not None:
        frequencies = frequencies / factors
    if scaling is None:
        return rotations(n_ctx, frequencies)
    return rotations(n_ctx, scaling.applied(frequencies, n_rot, base), scaling.magnitude)
