"""The dense FFN on the device: rows that do not depend on their step, every way to run it, inputs that are shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats.quants import QTensor
from engine.ops import Limits, reference
from engine.ops.cuda import ops
from tests.ops.test_cuda_products import check, matrix, normal, upload

D, F = 256, 512
LIMITS = Limits(max_tokens=48, n_embd=D, n_head_dim=D, n_ff=F, n_vocab=9, n_expert=0, n_expert_used=0)
EPS = 1e-6
K4, K6 = QType.Q4_K, QType.Q6_K


def layer(types: tuple[QType, QType, QType], F: int = F) -> tuple[QTensor, ...]:
    """gate, up, down and a shared gate."""
    shapes = ((F, D), (F, D), (D, F))
    gate, up, down = (matrix(t, *s, seed=i) for i, (t, s) in enumerate(zip(types, shapes, strict=True)))
    return gate, up, down, matrix(QType.F32, 1, D, seed=3)


def run(ws: ops.Workspace, weights: tuple[QTensor, ...], h: np.ndarray, x: np.ndarray) -> np.ndarray:
    result = ws.device.upload(x)
    *matrices, shared = (upload(ws.device, w) for w in weights)
    ops.dense_ffn(ws, ws.device.upload(h), *matrices, result, shared_gate=shared)
    found: np.ndarray = ws.device.read(result)
    return found


def expected(weights: tuple[QTensor, ...], h: np.ndarray, x: np.ndarray) -> np.ndarray:
    *matrices, shared = weights
    y = x.copy()
    reference.dense_ffn(reference.workspace(LIMITS, 1), h, *matrices, y, shared_gate=shared)
    return y


@pytest.mark.slow
@pytest.mark.parametrize("n_sm", [2, 132], ids=["blocks of 32 rows", "spread"])
@pytest.mark.parametrize("F", [512, 768], ids=lambda F: f"F={F}")
def test_rows_do_not_depend_on_their_number(device: Any, F: int, n_sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.name == "emulated":
        monkeypatch.setattr(device, "n_sm", n_sm)
    weights, ws = layer((K4, K4, K6), F), ops.workspace(replace(LIMITS, n_ff=F), device)
    h, x = normal(8, D), normal(8, D, seed=2)
    together = run(ws, weights, h, x)
    check(together, expected(weights, h, x))
    for t in (0, 7):
        check(run(ws, weights, h[t : t + 1], x[t : t + 1]), together[t : t + 1])


@pytest.mark.slow
def test_a_norm_is_quantized_once_for_all_that_read_it(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, ws = layer((K4, K4, K6)), ops.workspace(LIMITS, device)
    *matrices, shared = (upload(device, w) for w in weights)
    for T in (1, 3, 40):
        x, norm = normal(T, D), normal(D, seed=2)
        residual, h = device.upload(x), device.empty((T, D), np.float32)
        device.set_bytes(device.pointer(h), 0xFF, h.nbytes)
        ops.norm(ws, residual, device.upload(norm), EPS, h)

        def refuse(*_: Any) -> None:
            raise AssertionError("it was there already")

        with monkeypatch.context() as patch:
            patch.setattr(ws.products, "quantize", refuse)
            patch.setattr(ws.gemm, "to_halves", refuse)
            for _ in range(2):
                ops.dense_ffn(ws, h, *matrices, residual, shared_gate=shared)
        y = x.copy()
        reference.norm(reference.workspace(LIMITS, 1), x, norm, EPS, normed := np.empty_like(x))
        for _ in range(2):
            y = expected(weights, normed, y)
        if T <= 32:
            check(device.read(residual), y)
        else:
            assert ((device.read(residual) - y) ** 2).sum() < 1e-3 * (y**2).sum()


def test_what_another_array_has_replaced_is_made_again(device: Any) -> None:
    weights, ws, T = layer((K4, K4, K6)), ops.workspace(LIMITS, device), 40
    x, other, norm = device.upload(normal(T, D)), normal(T, D, seed=5), device.upload(normal(D, seed=2))
    h = device.empty((T, D), np.float32)

    def after(between: Callable[[], Any]) -> np.ndarray:
        result = device.upload(np.zeros((T, D), np.float32))
        ops.norm(ws, x, norm, EPS, h)
        between()
        *matrices, _ = (upload(device, w) for w in weights)
        ops.dense_ffn(ws, h, *matrices, result)
        found: np.ndarray = device.read(result)
        return found

    plain = after(lambda: None)
    check(after(lambda: ws.gemm.to_halves(device.upload(other))), plain)
    check(after(lambda: run(ws, weights, other, other)), plain)


def test_mistakes(device: Any) -> None:
    ws, h = ops.workspace(LIMITS, device), device.upload(normal(1, D))
    gate, up, down, shared = (upload(device, w) for w in layer((K4, K4, K6)))
    with pytest.raises(ValueError, match="matrices"):
        ops.dense_ffn(ws, h, gate, up, gate, h)
    with pytest.raises(ValueError, match="shared gate"):
        ops.dense_ffn(ws, h, gate, up, down, h, shared_gate=down)
    with pytest.raises(ValueError, match="both types must be alike"):
        ops.dense_ffn(ws, h, gate, upload(device, matrix(QType.F16, F, D)), down, h)
    with pytest.raises(AssertionError, match="without experts"):
        _ = ws.routing
    assert shared.shape == (1, D)


@pytest.mark.slow
@pytest.mark.parametrize("types", [(K4, QType.Q5_0, K6), (K4, K4, QType.F16), (QType.F16, QType.BF16, K6)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_steps_of_several(device: Any, types: tuple[QType, QType, QType], activation: Any) -> None:
    """Of every number of tokens, types that differ, scales, and with a shared gate or without."""
    weights, ws = layer(types), ops.workspace(LIMITS, device)
    gate, up, down, shared = weights
    gate, up = replace(gate, scale=0.5), replace(up, scale=3.0)
    on_device = [upload(device, w) for w in (gate, up, down, shared)]
    for T in (1, 2, 3, 9, 32):
        h, x = normal(T, D, seed=T), normal(T, D, seed=2)
        for is_shared in (False, True):
            y, wanted = device.upload(x), x.copy()
            own, twin = (w[3] if is_shared else None for w in (on_device, weights))
            ops.dense_ffn(ws, device.upload(h), *on_device[:3], y, activation, shared_gate=own)
            reference.dense_ffn(
                reference.workspace(LIMITS, 1), h, gate, up, down, wanted, activation, shared_gate=twin
            )  # fmt: skip
            check(device.read(y), wanted)
