"""RoPE of contexts longer than those that a model was first trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.models.config import Keys
from engine.ops import F32
from engine.ops.arithmetic import rotations


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (arXiv 2309.00071): frequencies of slow rotations are divided by `factor`, those of fast ones kept."""

    factor: float
    n_ctx: int  # that the model was first trained on
    beta_fast: float = 32.0  # rotations within n_ctx
    beta_slow: float = 1.0

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0 + 0.1 * math.log(self.factor)

    @classmethod
    def of(cls, keys: Keys) -> Yarn | None:
        """What a file says of it; None: positions are not scaled. Another kind of scaling is refused."""
        p = "rope.scaling."
        kind = keys.word(p + "type", "none")
        if kind == "none":
            return None
        if kind != "yarn":
            raise keys.missing(f"rope scaling {kind!r}")
        # Engines disagree whether this factor replaces YaRN's magnitude or multiplies it.
        for key in ("attn_factor", "yarn_attn_factor"):
            if keys.real(p + key, 1.0) != 1.0:
                raise keys.missing(f"a rope.scaling.{key}")
        # Two converters, two names.
        fast, slow = (
            keys.real(f"{p}yarn_beta_{speed}", keys.real(f"{p}beta_{speed}", default))
            for speed, default in (("fast", 32.0), ("slow", 1.0))
        )
        return cls(keys.real(p + "factor"), keys.size(p + "original_context_length"), fast, slow)

    def written(self) -> dict[str, Any]:
        """The GGUF keys that `of` reads back, without the architecture's name."""
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": self.factor,
            "rope.scaling.original_context_length": self.n_ctx,
            "rope.scaling.yarn_beta_fast": self.beta_fast,
            "rope.scaling.yarn_beta_slow": self.beta_slow,
        }

    def rope_table(self, n_ctx: int, n_rot: int, base: float) -> F32:
        """As that of ops/arithmetic.py, [n_ctx, 2, n_rot / 2], with these frequencies."""
        return rotations(n_ctx, self.frequencies(n_rot, base), self.magnitude)

    def frequencies(self, n_rot: int, base: float) -> NDArray[np.float64]:
        """Radians a position, float64 [n_rot / 2]."""

        def pair(rotations: float) -> float:
            """The pair of dimensions that turns so often within n_ctx."""
            return n_rot * math.log(self.n_ctx / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair(self.beta_fast)), 0)
        high = min(math.ceil(pair(self.beta_slow)), n_rot - 1)
        plain = base ** (-2.0 * np.arange(n_rot // 2) / n_rot)
        slow = np.clip((np.arange(n_rot // 2) - low) / max(high - low, 0.001), 0, 1)
        mixed: NDArray[np.float64] = plain * (1 - slow) + plain / self.factor * slow
        return mixed
