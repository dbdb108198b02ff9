"""Which cluster, and what of it; read by the command line, which imports no more of this room."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Which cluster, and what of it.

    address: of a Ray cluster, or auto: that of this machine, or one that is started for the run where there is none.
    n_workers: at most; None: as many as there is room for. worker_gpus: of each, also a part of one; 0: CPUs.
    model: where the model lies on the workers; None: where it lies here.
    """

    address: str = "auto"
    n_workers: int | None = None
    worker_gpus: float = 1.0
    model: Path | None = None
