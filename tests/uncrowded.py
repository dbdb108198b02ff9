"""Threads that compute experts in tests: their cores are other tests', too, and steps of an emulated GPU take long."""

from __future__ import annotations

import pytest

from engine.running import crowd, misses


class Unlimited:
    """Stands for Quota: CPUs that the process may use."""

    n_cpus: float | None = None

    def cpus(self) -> float | None:
        return self.n_cpus

    def close(self) -> None:
        pass


def leave_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for threads that are missing, and no quota is too small."""
    monkeypatch.setattr(crowd, "MISSING_S", 1e6)
    monkeypatch.setattr(misses, "Quota", Unlimited)
