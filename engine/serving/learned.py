"""What an engine's requests have counted: the profile that comes of it, and the pinned slots that follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.formats.profile import Profile
from engine.ground.config import EngineConfig
from engine.ground.errors import UsageError
from engine.ops.cuda.failures import translated
from engine.placing import policies
from engine.placing.learning import Learning
from engine.running.loaded import Loaded


class Learned:
    """Uses of experts on top of the profile that the engine began with."""

    def __init__(self, loaded: Loaded, config: EngineConfig) -> None:
        self._loaded, self._config = loaded, config
        self._followed = 0  # uses counted when the pinned slots last followed them
        source = loaded.source
        if source.profile is not None:
            self._learning = Learning(source.profile, config.profile)
            return
        c = source.config
        none = np.zeros((c.n_layer, c.n_expert), np.int64)
        self._learning = Learning(Profile(none, c.n_expert_used, source.file.model_id, count="generated"), None)

    def follow(self) -> None:
        """Let the pinned slots follow what was counted since, where the policy does that."""
        residency = self._loaded.residency
        counted = int(residency.counts.sum())
        if policies.find(self._config.policy).follows and counted != self._followed:
            self._followed = counted
            learned = self._learning.learned(self._counts())
            residency.follow(learned.counts[list(self._loaded.source.config.moe_layers)])

    def write(self, path: Path | None) -> dict[str, Any]:
        """Write the profile to a file, or to that of the engine; what to tell of it."""
        target = path or self._config.profile
        if target is None:
            raise UsageError("no path to write the profile to")
        written, warnings = self._learning.write(self._counts(), target, self._loaded.source.file.model_id)
        return {"path": str(target), "tokens": written.tokens, "warnings": list(warnings)}

    def read(self) -> dict[str, Any]:
        """The raw counts, and the counters of slots."""
        return {"counts": self._counts().tolist(), **self._loaded.residency.totals()}

    def reset(self) -> None:
        """Begin again with counts of 0."""
        self._loaded.residency.reset()
        self._learning.reset()

    def _counts(self) -> NDArray[np.int64]:
        c = self._loaded.source.config
        counts = np.zeros((c.n_layer, c.n_expert), np.int64)
        with translated():
            counts[list(c.moe_layers)] = self._loaded.residency.counts
        return counts
