"""What handing over takes, measured on an emulated GPU: that it ends, says something, and leaves the ring as new."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.ops import Limits
from engine.ops.cuda import handing
from engine.ops.cuda.cpu_experts import CpuExperts
from engine.ops.cuda.handing import HandOver
from engine.ops.jobs import Bank

D, F = 256, 96
LIMITS = Limits(
    max_tokens=32, n_embd=D, n_head_dim=64, n_ff=F, n_vocab=64, n_expert=20, n_expert_used=3, n_head=2, n_head_kv=1,
    head_dim=32, n_ctx=64, max_rows=8, n_ff_exp=F,
)  # fmt: skip


@pytest.fixture
def cpu(device: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuExperts]:
    monkeypatch.setattr(handing, "LAYERS", 6)
    monkeypatch.setattr(handing, "BLOCKS", 3)
    made = CpuExperts(device, LIMITS, [Bank((QType.Q4_K, QType.Q4_K, QType.Q8_0), D, F)])
    made.start([-1, -1], spin_us=1e6)
    yield made
    made.close()


def memory(device: Any, n_bytes: int) -> np.ndarray:
    found = device.page_locked(n_bytes)
    found[:] = 1
    return np.asarray(found)


def test_times_and_rates(device: Any, cpu: CpuExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing, "BOUND_NS", 20_000_000_000)  # others may have this machine's cores
    monkeypatch.setattr(handing, "FIRST_BYTES", 1 << 16)
    monkeypatch.setattr(handing, "BESIDE_S", 1e-4)
    found = HandOver(device, LIMITS, cpu).measure(memory(device, 1 << 18))
    assert found.handover_us is not None and found.busy_us is not None and found.pcie_gb_per_s is not None
    assert 0 < found.handover_us < 1e6 and 0 < found.busy_us < 1e6 and 1e-3 < found.pcie_gb_per_s < 1e3
    cpu.begin()
    assert cpu.ring.next == 1 and cpu.spans() == [] and cpu.counts() == {"jobs": 0, "taken_back": 0, "failed": 0}


def test_too_little_to_read_is_no_rate(device: Any, cpu: CpuExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing, "BOUND_NS", 20_000_000_000)
    found = HandOver(device, LIMITS, cpu).measure(memory(device, 8192))
    assert found.handover_us is not None and found.busy_us is None and found.pcie_gb_per_s is None


def test_threads_that_do_not_claim_are_no_time(device: Any, cpu: CpuExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing, "BOUND_NS", 1000)
    monkeypatch.setattr(handing, "MOST_TAKEN", 1)
    with cpu.pool.held("before claim", 2):
        assert HandOver(device, LIMITS, cpu).measure(memory(device, 8192)).handover_us is None
