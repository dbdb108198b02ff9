"""What one op prepares for the next is forgotten as soon as anything else writes there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats.quants import QTensor
from engine.ops import AttentionInput, DeltaInput, DeltaLayer, Experts, Fetches, Gating, KVLayer, Limits, SharedExpert
from engine.ops.cuda import ops
from engine.ops.cuda.counting import CountingDevice
from engine.ops.interface import Ops
from engine.placing import policy
from tests.op_cases import floats, gain, weights

D, F, V, E, A, H, K, HD, C, HV, DV = 256, 512, 301, 7, 3, 4, 2, 64, 384, 4, 32
LIMITS = Limits(
    80, D, H * HD, F, V, E, A, n_head=H, n_head_kv=K, head_dim=HD, n_ctx=128, n_mixed=C, n_z=HV * DV, n_head_v=HV,
    d_k=32, d_v=DV,
)  # fmt: skip
EPS = 1e-6


class Call(SimpleNamespace):
    """Arguments for every op, T rows each, on a device that only counts."""

    def __init__(self, T: int) -> None:
        device = CountingDevice()
        self.ws = ops.workspace(LIMITS, device)

        def array(*shape: int, dtype: Any = np.float32) -> Any:
            return device.empty(shape, dtype)

        def matrix(rows: int, cols: int, qtype: QType = QType.Q8_0) -> QTensor:
            w = weights(qtype, rows, cols, 1)
            return replace(w, data=device.upload(w.data))

        state = policy.SlotState.empty([3], E)
        self.state = policy.SlotState(*(device.upload(getattr(state, name)) for name in policy.SlotState.__slots__))
        pointers = (self.state.expert_ptr[0], self.state.home_ptr[0], self.state.slot_ptr)
        Q8 = QType.Q8_0
        self.bank = Experts(Q8, Q8, Q8, D, F, (F * D // 32 * 34,) * 3, *pointers, layer=0)
        self.fetches = Fetches(array(E, 3, dtype=np.int32), array(1, dtype=np.int32))
        self.x, self.y, self.h = array(T, D), array(T, D), array(T, D)
        self.norm, self.rows = array(D), array(T, dtype=np.int32)
        self.q, self.attended, self.gate = array(T, H, HD), array(T, H * HD), array(T, H)
        self.kv = KVLayer(array(128, K, HD, dtype=np.float16), array(128, K, HD, dtype=np.float16))
        head = array(HD)
        kv = matrix(K * HD, D)
        self.inputs = AttentionInput(self.norm, matrix(H * HD, D), kv, kv, head, head, None, matrix(H, D))
        self.rope, self.table = array(128, 2, HD // 2), array(1, 2, dtype=np.int32)
        self.mixed, self.z, self.beta, self.alpha = array(T, C), array(T, HV * DV), array(T, HV), array(T, HV)
        self.delta_inputs = DeltaInput(self.norm, matrix(C, D), matrix(HV * DV, D), matrix(HV, D), matrix(HV, D))
        self.layer = DeltaLayer(array(2, 3, C), array(2, HV, DV, 32))
        self.conv, self.dt_bias, self.a, self.head_norm = array(C, 4), array(HV), array(HV), array(DV)
        self.states, self.out = array(1, 2, dtype=np.int32), array(T, HV * DV)
        self.w_out, self.wo = matrix(D, HV * DV), matrix(D, H * HD)
        self.embedding, self.output = matrix(V, D), matrix(V, D)
        self.dense = (matrix(F, D), matrix(F, D), matrix(D, F))
        self.router, self.router_logits = matrix(E, D, QType.F32), array(T, E)
        self.logits, self.counted = array(T, V), array(T, dtype=np.uint8)
        self.experts, self.weights = array(T, A, dtype=np.int32), array(T, A)


# Of each op: a call, and the float arrays that it writes.
WRITES: dict[str, tuple[Callable[[Call], None], tuple[str, ...]]] = {
    "embed": (lambda c: ops.embed(c.ws, c.embedding, c.rows, c.x), ("x",)),
    "copy": (lambda c: ops.copy(c.ws, c.y, c.x), ("x",)),
    "norm": (lambda c: ops.norm(c.ws, c.x, c.norm, EPS, c.h), ("h",)),
    "add_norm": (lambda c: ops.add_norm(c.ws, c.y, c.norm, EPS, c.x, 1.0, ((c.norm, c.h),)), ("x", "h")),
    "add_norms": (lambda c: ops.add_norms(c.ws, c.y, c.norm, c.h, c.norm, c.norm, EPS, c.x), ("y", "x")),
    "attention_input": (
        lambda c: ops.attention_input(c.ws, c.x, c.inputs, EPS, c.rope, c.rows, c.kv, c.rows, c.q, c.gate),
        ("q", "gate"),
    ),
    "attention": (
        lambda c: ops.attention(c.ws, c.q, c.kv, c.table, c.rows, c.rows, 0.1, c.attended, 128),
        ("attended",),
    ),
    "attention_output": (lambda c: ops.attention_output(c.ws, c.attended, c.wo, c.x), ("x",)),
    "delta_input": (
        lambda c: ops.delta_input(c.ws, c.x, c.delta_inputs, EPS, c.mixed, c.z, c.beta, c.alpha),
        ("mixed", "z", "beta", "alpha"),
    ),
    "delta": (
        lambda c: ops.delta(
            c.ws, c.mixed, c.beta, c.alpha, c.conv, c.dt_bias, c.a, EPS, c.layer, c.states, *(c.rows,) * 3, c.out
        ),
        ("out",),
    ),
    "delta_output": (lambda c: ops.delta_output(c.ws, c.out, c.z, c.head_norm, EPS, c.w_out, c.x), ("x",)),
    "dense_ffn": (lambda c: ops.dense_ffn(c.ws, c.h, *c.dense, c.x), ("x",)),
    "router": (lambda c: ops.router(c.ws, c.x, c.norm, EPS, c.router, c.h, c.router_logits), ("h", "router_logits")),
    "route": (
        lambda c: ops.route(
            c.ws, c.router_logits, Gating(), c.state, c.bank, c.counted, policy.LRU, c.experts, c.weights, c.fetches
        ),
        ("weights",),
    ),
    "expert_ffn": (
        lambda c: ops.expert_ffn(
            c.ws, c.h, c.experts, c.weights, c.bank, c.fetches, c.x, shared=SharedExpert(*c.dense)
        ),
        ("x",),
    ),
    "head": (lambda c: ops.head(c.ws, c.x, c.rows, c.norm, EPS, c.output, c.logits), ("logits",)),
}


def test_every_op_is_here() -> None:
    of_a_backend = {name for name, value in vars(Ops).items() if callable(value) and not name.startswith("_")}
    no_activations = {"fetch_ahead", "stage", "stage_ahead", "summarize", "choose", "find_absent"}
    assert set(WRITES) == of_a_backend - no_activations


@pytest.mark.parametrize("T", [1, 5, 40])
@pytest.mark.parametrize(("op", "written"), [(op, name) for op, (_, names) in WRITES.items() for name in names])
def test_an_op_forgets_what_was_prepared_of_what_it_writes(op: str, written: str, T: int) -> None:
    c = Call(T)
    array = getattr(c, written)
    for part in (array, array[:1], array[-1:]):
        stale = ops.Quantized(part, part, part)
        c.ws.prepare(part, stale)
        assert c.ws.prepared(part) is stale
        WRITES[op][0](c)
        assert c.ws.prepared(part) is not stale


@pytest.mark.parametrize("T", [1, 5, 40])
def test_what_others_write_is_not_forgotten(T: int) -> None:
    c = Call(T)
    WRITES["router"][0](c)
    known = c.ws.prepared(c.h)
    assert known is not None
    WRITES["route"][0](c)
    assert c.ws.prepared(c.h) is known
    WRITES["expert_ffn"][0](c)
    assert c.ws.prepared(c.h) is known
    WRITES["embed"][0](c)  # of the next step
    assert c.ws.prepared(c.h) is None


@pytest.mark.parametrize("T", [3, 40])
def test_a_row_that_was_written_again_is_read_again(device: Any, T: int) -> None:
    """norm, another op that writes to the same array, FFN: the FFN is that of what is there."""
    matrices = [weights(QType.Q8_0, rows, cols, 10 + i) for i, (rows, cols) in enumerate(((F, D), (F, D), (D, F)))]
    matrices = [replace(w, data=device.upload(w.data)) for w in matrices]
    norm, first, second = (device.upload(a) for a in (gain(1, D), floats(2, T, D), floats(3, T, D)))
    found = []
    for before in (True, False):
        ws = ops.workspace(replace(LIMITS, n_mixed=0, n_z=0, n_head_v=0), device)
        h, y = device.upload(np.zeros((T, D), np.float32)), device.upload(np.zeros((T, D), np.float32))
        if before:
            ops.norm(ws, first, norm, EPS, h)
        ops.copy(ws, second, h)
        ops.dense_ffn(ws, h, *matrices, y)
        found.append(device.read(y).copy())
    assert np.array_equal(*found)


def test_a_norm_that_came_with_the_experts_is_not_made_again() -> None:
    """Unless it is another's, or something wrote the residual stream in between."""

    def norms(between: Callable[[Call], None] = lambda c: None, T: int = 5, **changes: Any) -> bool:
        c = Call(T)
        ops.expert_ffn(c.ws, c.h, c.experts, c.weights, c.bank, c.fetches, c.x, then=(c.norm, EPS), **changes)
        between(c)
        c.ws.device.kernels.clear()
        WRITES["attention_input"][0](c)
        return any(name == "rms_norm" for _, name in c.ws.device.kernels)

    def other_norm(c: Call) -> None:
        c.inputs = replace(c.inputs, norm=c.ws.device.empty(D, np.float32))

    assert not norms()
    assert not norms(lambda c: ops.copy(c.ws, c.y, c.h))
    assert norms(lambda c: ops.copy(c.ws, c.y, c.x))
    assert norms(lambda c: ops.copy(c.ws, c.y[:1], c.x[2:3]))
    assert norms(other_norm)
    c = Call(5)
    assert norms(shared=SharedExpert(*c.dense))
