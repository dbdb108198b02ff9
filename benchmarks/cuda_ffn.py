"""Cases of cuda_kernels.py: dense FFNs, shared experts, other routers and the norms around them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as QType

from benchmarks.cuda_kernels import KernelCase
from engine.formats.quants import QTensor, row_bytes
from engine.ops import Fetches, Gating, Limits
from engine.ops.cuda import ops
from engine.placing import policy
from tests.gguf_files import random_blocks
from tests.op_cases import bank_of

EPS = 1e-6
ROTATED_BYTES = 150_000_000
CHUNK = 1024
L, E, A = 40, 256, 8
# (what, D, F, whether a gate of the whole): a shared expert, a dense layer, a dense model's
SHAPES = (("shared expert", 2048, 512, True), ("dense layer", 2048, 8192, False), ("dense model", 5120, 17408, False))


def _matrix(device: Any, qtype: QType, rows: int, cols: int) -> QTensor:
    few = random_blocks(qtype, min(rows, 512), cols, np.random.default_rng(1)).reshape(-1)
    data = np.resize(few, rows * row_bytes(qtype, cols, "benchmark"))
    return QTensor("benchmark", qtype, (rows, cols), device.upload(data))


def _dense(device: Any, what: str, D: int, F: int, shared: bool) -> Iterator[KernelCase]:
    limits = Limits(CHUNK, D, D, F, 9, n_expert=0, n_expert_used=0)
    ws = ops.workspace(limits, device)
    shapes = ((QType.Q4_K, F, D), (QType.Q4_K, F, D), (QType.Q6_K if F > 512 else QType.Q4_K, D, F))
    n_bytes = sum(rows * row_bytes(t, cols, "benchmark") for t, rows, cols in shapes)
    groups = [tuple(_matrix(device, *s) for s in shapes) for _ in range(1 + -(-ROTATED_BYTES // n_bytes))]
    gate = _matrix(device, QType.F32, 1, D) if shared else None
    norm = device.upload(np.ones(D, np.float32))
    for T in (1, 2, 4, 8, CHUNK):
        x, y = (
            device.upload(np.random.default_rng(2).standard_normal((T, D), np.float32)),
            device.empty((T, D), np.float32),
        )
        y, h = (device.empty((T, D), np.float32) for _ in "yh")

        def launch(i: int, x: Any = x, y: Any = y, h: Any = h) -> None:
            if ws.prepared(h) is None:
                ops.norm(ws, x, norm, EPS, h)
            ops.dense_ffn(ws, h, *groups[i % len(groups)], y, shared_gate=gate)

        yield KernelCase(f"{what} F={F} T={T}", launch, n_bytes, 6 * T * D * F if T == CHUNK else 0)


def _route(device: Any, name: str, gating: Gating, T: int) -> KernelCase:
    ws = ops.workspace(Limits(32, 2048, 2048, 512, 9, E, A), device)
    logits = device.upload(2 * np.random.default_rng(3).standard_normal((64, T, E), np.float32))
    experts, weights = device.empty((T, A), np.int32), device.empty((T, A), np.float32)
    fetches = Fetches(device.empty((E, 3), np.int32), device.empty(1, np.int32))
    counted = device.upload(np.ones(T, np.uint8))
    empty = policy.SlotState.empty([E // 2] * L, E)
    state = policy.SlotState(*(device.upload(getattr(empty, f)) for f in policy.SlotState.__slots__))

    banks = [bank_of(state, layer) for layer in range(L)]

    def launch(i: int) -> None:
        ops.route(ws, logits[i % 64], gating, state, banks[i % L], counted, policy.DEFAULT, experts, weights, fetches)

    return KernelCase(f"route {name} E={E} T={T}", launch, T * (E + 2 * A) * 4 + E // 2 * 13)


def _add_norm(device: Any, T: int, D: int = 2816) -> KernelCase:
    ws = ops.workspace(Limits(T, D, D, 64, 9, n_expert=0, n_expert_used=0), device)
    x, y = (device.upload(np.random.default_rng(i).standard_normal((T, D), np.float32)) for i in range(2))
    norm = device.upload(np.ones(D, np.float32))
    return KernelCase(f"add_norm T={T}", lambda i: ops.add_norm(ws, y, norm, EPS, x, 0.5), 3 * T * D * 4)


def cases(device: Any) -> Iterator[KernelCase]:
    """Every case, made when it is its turn."""
    yield from chain.from_iterable(_dense(device, *shape) for shape in SHAPES)
    bias = device.upload(np.zeros(E, np.float32))
    for T in (1, 8):
        yield _route(device, "softmax", Gating(), T)
        yield _route(device, "sigmoid", Gating("sigmoid", scale=2.5, bias=bias), T)
    for T in (1, CHUNK):
        yield _add_norm(device, T)
