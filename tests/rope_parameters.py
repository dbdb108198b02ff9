"""How every family's `transformers` configuration says what RoPE does."""

from __future__ import annotations

from typing import Any


def rope_parameters(config: Any) -> dict[str, Any]:
    """Of full attention, with its scaling; what part of a head turns is the family's."""
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.scaling is not None:
        made |= {"rope_type": config.scaling.kind, "factor": config.scaling.factor}
    if config.scaling is not None and config.scaling.kind == "yarn":
        made |= {
            "beta_fast": config.scaling.beta_fast, "beta_slow": config.scaling.beta_slow,
            "original_max_position_embeddings": config.scaling.n_ctx,
        }  # fmt: skip
    return made
