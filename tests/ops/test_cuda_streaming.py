"""The experts of a long step on their way: what is enqueued where, and that no op depends on a call before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.ops import Experts, Fetches, Gating, Limits
from engine.ops.cuda import ops
from engine.ops.cuda.counting import CountingDevice
from engine.ops.cuda.device import Module
from engine.placing import policy

L, E, A, D, F = 3, 7, 2, 256, 256
PART_BYTES = (F * D // 32 * 34,) * 3


class Recorder(CountingDevice):
    """Remembers kernels of the copies and waits, in order; the stream beside the main one is "side"."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        self._stream = "main"

    def kernel(self, module: Module, name: str) -> Any:
        def launch(grid: Any, block: Any, args: Any, shared_bytes: int = 0, overlap: bool = False) -> None:
            if name in ("gather", "choose", "gate_up"):
                self.events.append((self._stream, name))

        return launch

    def stream(self, priority: int = 0) -> Any:
        return "side"

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self._stream = stream
        yield
        self._stream = "main"

    def wait(self, waiting: Any, awaited: Any) -> None:
        self.events.append((waiting or "main", "waits for", awaited or "main"))


def step(T: int) -> tuple[Recorder, ops.Workspace, Callable[[int], None], Callable[[int], None]]:
    """A workspace that streams, and what is called for a layer: ahead of it, and at it."""
    device = Recorder()
    ws = ops.workspace(Limits(T, D, D, F, 9, E, A), device)
    ws.stream_experts(1 << 16, PART_BYTES)
    empty = policy.SlotState.empty([2] * L, E)
    state = policy.SlotState(*(device.upload(getattr(empty, name)) for name in policy.SlotState.__slots__))
    Q8 = QType.Q8_0
    first = Experts(Q8, Q8, Q8, D, F, PART_BYTES, state.expert_ptr[0], state.home_ptr[0], state.slot_ptr, layer=0)
    banks = [replace(first, layer=i) for i in range(L)]
    h, x, logits = (device.empty((T, n), np.float32) for n in (D, D, E))
    experts, weights = device.empty((T, A), np.int32), device.empty((T, A), np.float32)
    fetches = Fetches(device.empty((E, 3), np.int32), device.empty(1, np.int32))
    counted = device.empty(T, np.uint8)

    def ahead(layer: int) -> None:
        ops.fetch_ahead(ws, x, state, banks[layer])

    def at(layer: int) -> None:
        ops.route(ws, logits, Gating(), state, banks[layer], counted, policy.LRU, experts, weights, fetches)
        ops.expert_ffn(ws, h, experts, weights, banks[layer], fetches, x)

    return device, ws, ahead, at


def test_a_layer_waits_for_its_own_experts_and_not_for_the_next_ones() -> None:
    device, _, ahead, at = step(ops.AHEAD_TOKENS)
    ahead(0)
    for layer in range(L):
        if layer + 1 < L:
            ahead(layer + 1)
        at(layer)
    gather = [("side", "waits for", "main"), ("side", "gather")]
    waits, layer = [("main", "waits for", "side")], [("main", "choose"), ("main", "gate_up")]
    last = [layer[0], *waits, layer[1]]
    got = [event for i, event in enumerate(device.events) if event != device.events[i - 1] or i == 0]
    assert got == [*gather, *waits, *gather, *layer, *waits, *gather, *layer, *last]


@pytest.mark.parametrize("T", [33, ops.AHEAD_TOKENS - 1])
def test_a_shorter_step_gathers_what_it_chose_and_needs_no_call_before(T: int) -> None:
    device, _, ahead, at = step(T)
    ahead(0)
    assert not device.events
    for layer in (2, 0):
        at(layer)
        found = list(dict.fromkeys(device.events))
        expected = [("main", "choose"), ("main", "waits for", "side"), ("main", "gather"), ("main", "gate_up")]
        assert found == expected
        device.events.clear()


def test_an_ffn_reads_the_buffer_of_its_own_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another layer was routed last."""
    _, ws, ahead, at = step(ops.AHEAD_TOKENS)
    assert ws.streaming is not None
    sources, staging = [], ws.streaming.staging
    monkeypatch.setattr(ws.gemm, "experts", lambda h, e, w, bank, source, *_: sources.append((bank.layer, source)))
    for layer in (0, 1, 2, 1):
        ahead(layer)
        at(layer)
    assert all(source is staging.source[layer % 2] for layer, source in sources) and len(sources) == 4
