"""Routers of every kind, dense FFNs and the small ops around them: a second table for the tests of test_ops.py."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats.quants import QTensor
from engine.ops import Activation, Fetches, Gating, arithmetic, cpu
from engine.placing import policy
from tests.op_cases import (
    K4,
    K5,
    K6,
    Q8,
    Case,
    activate,
    bank_of,
    exact,
    floats,
    gain,
    rms,
    rounding,
    slot_state,
    weights,
)
from tests.ops import test_ops
from tests.ops.test_ops import Outputs

EPS = 1e-5


def scaled_embed_case(qtype: QType, scale: float) -> Case:
    V, D = 37, 512
    table, tokens = weights(qtype, V, D, 7), np.array([36, 0, 5, 5, 17], np.int32)

    def run(ops: ModuleType, ws: Any) -> Outputs:
        x = np.full((len(tokens), D), np.nan, np.float32)
        ops.embed(ws, table, tokens, x, scale)
        return {"x": x}

    return Case(
        "embed",
        f"{qtype.name} scale={scale}",
        run,
        lambda: {"x": exact(table)[tokens] * np.float32(scale)},
        1e-13,
        tokens=len(tokens),
    )


def norm_case(T: int, D: int) -> Case:
    x, weight = floats(50, T, D), gain(51, D)

    def run(ops: ModuleType, ws: Any) -> Outputs:
        out = np.full((T, D), np.nan, np.float32)
        ops.norm(ws, x, weight, EPS, out)
        return {"out": out}

    return Case("norm", f"T={T} D={D}", run, lambda: {"out": rms(x, weight, EPS)}, 1e-12, tokens=T)


def add_norm_case(T: int, D: int, scale: float, n_then: int = 0) -> Case:
    y, weight, residual = floats(52, T, D), gain(53, D), floats(54, T, D)

    others = [gain(55 + i, D) for i in range(n_then)]

    def run(ops: ModuleType, ws: Any) -> Outputs:
        x, outs = residual.copy(), [np.full((T, D), np.nan, np.float32) for _ in others]
        ops.add_norm(ws, y, weight, EPS, x, scale, tuple(zip(others, outs, strict=True)))
        return {"x": x} | {f"norm {i}": out for i, out in enumerate(outs)}

    def oracle() -> Outputs:
        x = (residual + rms(y, weight, EPS)) * np.float32(scale)
        return {"x": x} | {f"norm {i}": rms(x, w, EPS) for i, w in enumerate(others)}

    op = "add_norm_then" if n_then else "add_norm"
    return Case(op, f"T={T} D={D} scale={scale} norms={n_then}", run, oracle, 1e-12, tokens=T)


def add_norms_case(T: int, D: int, scale: float) -> Case:
    a, b, residual = (floats(56 + i, T, D) for i in range(3))
    of_a, of_b, of_sum = (gain(59 + i, D) for i in range(3))

    def run(ops: ModuleType, ws: Any) -> Outputs:
        x = residual.copy()
        ops.add_norms(ws, a.copy(), of_a, b, of_b, of_sum, EPS, x, scale)
        return {"x": x}

    def oracle() -> Outputs:
        return {"x": (residual + rms(rms(a, of_a, EPS) + rms(b, of_b, EPS), of_sum, EPS)) * np.float32(scale)}

    return Case("add_norms", f"T={T} D={D} scale={scale}", run, oracle, 1e-12, tokens=T)


def dense_case(
    types: tuple[QType, QType, QType], D: int, F: int, T: int, activation: Activation = "silu", add: bool = True,
    shared: QType | None = None, odd: bool = False,
) -> Case:  # fmt: skip
    shapes = ((F, D), (F, D), (D, F))
    gate, up, down = (weights(t, *s, 60 + i) for i, (t, s) in enumerate(zip(types, shapes, strict=True)))
    shared_gate = None if shared is None else weights(shared, 1, D, 63)
    h, residual = floats(64, T, D), floats(65, T, D)
    if odd:
        h[0, 3], h[1, 40] = np.nan, np.inf

    def run(ops: ModuleType, ws: Any) -> Outputs:
        x = residual.copy() if add else np.full_like(residual, np.nan)
        ops.dense_ffn(ws, h, gate, up, down, x, activation, add, shared_gate)
        return {"x": x}

    def oracle() -> Outputs:
        wide = h.astype(np.float64)
        z = activate(wide @ exact(gate).T, activation == "gelu") * (wide @ exact(up).T)
        y = z @ exact(down).T
        if shared_gate is not None:
            y = y / (1 + np.exp(-(wide @ exact(shared_gate).T)))
        return {"x": residual + y if add else y}

    label = f"{'/'.join(t.name for t in types)} D={D} F={F} T={T} {activation} add={add}"
    label += f" shared={None if shared is None else shared.name}{' odd' if odd else ''}"
    nmse = max(rounding(*types), 1e-11)
    return Case("dense_ffn", label, run, None if odd else oracle, nmse, tokens=T, types=types)


def gating_case(
    kind: Any, E: int, A: int, T: int, renormalize: bool = True, scale: float = 1.0, bias: bool = False,
    expert_scale: bool = False, odd: bool = False,
) -> Case:  # fmt: skip
    gating = Gating(
        kind, renormalize, scale, floats(70, E, scale=0.05) if bias else None, gain(71, E) if expert_scale else None
    )
    slots, layer = (3, min(E, 40)), 1

    def logits(step: int) -> np.ndarray:
        values = floats(72 + step, T, E)
        values[::2] = np.round(values[::2])  # ties
        if bias:
            values[:, 1::2] = values[:, :1]  # and such as the bias decides
        if odd:
            values[0, 3], values[1, :], values[2, ::2] = np.nan, np.nan, np.nan
            values[3, 4], values[4, 5], values[5] = np.inf, -np.inf, -np.inf
            values[6] = -90 - np.arange(E)  # sigmoids of zero
        return values

    def run(ops: ModuleType, ws: Any) -> Outputs:
        state, outputs = slot_state(slots, E, 27), {}
        for step in range(3):
            experts, w = np.full((T, A), -1, np.int32), np.full((T, A), np.nan, np.float32)
            fetches = Fetches(np.full((E, 3), -7, np.int32), np.zeros(1, np.int32))
            counted = (np.arange(T) % 3 != step % 3).astype(np.uint8)
            ops.route(ws, logits(step), gating, state, bank_of(state, layer), counted, policy.LRU, experts, w, fetches)
            outputs |= {f"experts {step}": experts, f"weights {step}": w}
            outputs |= {f"fetches {step}": fetches.rows[: fetches.count[0]].copy()}
        return outputs | {"slot_of": state.slot_of, "heat": state.heat, "counts": state.counts}

    def oracle() -> Outputs:
        outputs = {}
        for step in range(3):
            x = logits(step)
            if kind == "sigmoid":
                scores = 1 / (1 + np.exp(-x.astype(np.float64)))
                choice = arithmetic.sigmoid(x)  # ties are of binary32
            else:
                scores = np.exp(x - x.max(1, keepdims=True), dtype=np.float64)
                p = arithmetic.exp(x - x.max(1, keepdims=True))
                choice = p / arithmetic.sum32(p)[:, None] if bias else x
            if gating.bias is not None:
                choice = choice + gating.bias
            experts = np.argsort(-choice, axis=1, kind="stable")[:, :A]
            chosen = np.take_along_axis(scores, experts, 1)
            if renormalize:
                total = chosen.sum(1, keepdims=True)
                chosen = chosen / (np.maximum(total, 6.1e-5) if kind == "sigmoid" else total)
            elif kind == "softmax":
                chosen = chosen / scores.sum(1, keepdims=True)
            chosen = chosen * scale * (1 if gating.expert_scale is None else gating.expert_scale[experts])
            outputs |= {f"experts {step}": experts, f"weights {step}": chosen}
        return outputs

    label = f"{kind} E={E} A={A} T={T} renormalize={renormalize} scale={scale} bias={bias}"
    label += f" expert_scale={expert_scale}{' odd' if odd else ''}"
    return Case("route", label, run, None if odd else oracle, 1e-11, tokens=T, experts=(E, A))


def softcap_case(qtype: QType, rows: tuple[int, ...], T: int) -> Case:
    V, D, cap = 301, 256, 5.0
    output, x, norm = weights(qtype, V, D, 31), floats(32, T, D), gain(33, D)
    index = np.array(rows, np.int32)

    def run(ops: ModuleType, ws: Any) -> Outputs:
        logits = np.full((len(rows), V), np.nan, np.float32)
        ops.head(ws, x, index, norm, EPS, output, logits, cap)
        return {"logits": logits}

    return Case(
        "head",
        f"{qtype.name} softcap T={len(rows)}",
        run,
        lambda: {"logits": cap * np.tanh(rms(x[index], norm, EPS) @ exact(output).T / cap)},
        max(rounding(qtype), 1e-11),
        tokens=len(rows),
    )


CASES = [
    scaled_embed_case(K4, 53.25),
    scaled_embed_case(QType.BF16, 3.1),
    *(norm_case(T, D) for T, D in ((1, 256), (3, 77), (20, 352), (40, 256))),
    *(add_norm_case(T, D, s) for T, D, s in ((1, 256, 1.0), (5, 77, 0.37), (40, 352, 1.7))),
    *(add_norm_case(T, D, 0.6, n) for T, D, n in ((1, 352, 2), (3, 77, 2), (32, 256, 1), (40, 352, 2))),
    *(add_norms_case(T, D, s) for T, D, s in ((1, 352, 1.0), (5, 77, 0.37), (40, 256, 1.7))),
    dense_case((K4, K4, K6), 256, 512, 1),
    dense_case((K4, K4, K4), 512, 1280, 1, shared=QType.F32),
    dense_case((Q8, Q8, Q8), 96, 160, 1, "gelu", add=False, shared=QType.BF16),
    dense_case((K4, K4, K6), 256, 512, 6, "gelu", add=False),
    dense_case((K6, K5, QType.IQ4_XS), 256, 768, 32, shared=QType.F16),
    dense_case((QType.F16, QType.BF16, QType.F32), 77, 70, 3, "gelu", shared=QType.F32),
    dense_case((QType.F32, QType.F32, Q8), 77, 96, 1),
    dense_case((Q8, Q8, QType.F16), 96, 70, 1, add=False, shared=QType.F32),
    dense_case((K4, QType.Q4_0, QType.Q4_0), 256, 288, 2, odd=True, shared=QType.F32),
    dense_case((K4, K4, K6), 256, 512, 41),
    dense_case((K4, K4, Q8), 512, 352, 70, "gelu", add=False, shared=QType.F32),
    dense_case((Q8, QType.Q4_0, QType.F16), 288, 70, 37, shared=QType.F16),
    gating_case("sigmoid", 17, 5, 1),
    gating_case("sigmoid", 17, 5, 11, bias=True),
    gating_case("sigmoid", 17, 5, 9, bias=True, odd=True),
    gating_case("sigmoid", 17, 5, 9, renormalize=False, expert_scale=True, odd=True),
    gating_case("sigmoid", 256, 8, 1, scale=2.5, bias=True),
    gating_case("sigmoid", 256, 8, 40, scale=2.5, bias=True),
    gating_case("sigmoid", 512, 10, 7, scale=0.3, bias=True, expert_scale=True),
    gating_case("softmax", 17, 5, 4, scale=2.5),
    gating_case("softmax", 17, 5, 11, bias=True),
    gating_case("softmax", 17, 5, 9, bias=True, odd=True),
    gating_case("softmax", 128, 8, 1, expert_scale=True),
    gating_case("softmax", 256, 8, 35, renormalize=False, bias=True, expert_scale=True),
    gating_case("softmax", 512, 16, 3, renormalize=False),
    *(softcap_case(t, rows, 45) for t, rows in ((K6, (8,)), (K4, (0, 3, 7)), (QType.F16, (5,)))),
    softcap_case(K6, tuple(range(40)), 45),
]


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernels_equal_the_twin_bit_for_bit(case: Case, isa: str) -> None:
    test_ops.test_kernels_equal_the_twin_bit_for_bit(case, isa)


@pytest.mark.parametrize("case", [c.on_cuda for c in CASES])
def test_cuda_kernels_equal_the_twin(case: Case, device: Any) -> None:
    test_ops.test_cuda_kernels_equal_the_twin(case, device)


@pytest.mark.parametrize("case", [c for c in CASES if c.oracle], ids=lambda c: c.name)
def test_the_twin_is_near_float64(case: Case) -> None:
    test_ops.test_the_twin_is_near_float64(case)


def test_a_row_of_a_dense_ffn_does_not_depend_on_its_step() -> None:
    gate, up, down = weights(K4, 512, 256, 80), weights(K4, 512, 256, 81), weights(K6, 256, 512, 82)
    shared: QTensor = weights(QType.F32, 1, 256, 83)
    h, x = floats(84, 70, 256), floats(85, 70, 256)
    ws, together = test_ops.workspace(cpu.supported_isas()[-1]), x.copy()
    cpu.dense_ffn(ws, h, gate, up, down, together, shared_gate=shared)
    for t in (0, 31, 32, 69):
        alone = x[t : t + 1].copy()
        cpu.dense_ffn(ws, h[t : t + 1].copy(), gate, up, down, alone, shared_gate=shared)
        assert test_ops.same_bits(alone, together[t : t + 1])


def test_activations_of_the_twin_are_accurate() -> None:
    x = np.concatenate([np.linspace(-30, 30, 20011), [0.0, -0.0, 100.0, -100.0, 3e38, -1e30]]).astype(np.float32)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = {"sigmoid": 1 / (1 + np.exp(-wide)), "gelu": activate(wide, True)}
    assert np.allclose(arithmetic.sigmoid(x), expected["sigmoid"], rtol=4e-7, atol=1e-37)
    assert np.allclose(arithmetic.gelu(x), expected["gelu"], rtol=4e-6, atol=1e-6)
    assert np.allclose(arithmetic.softcap(x, 30.0), 30 * np.tanh(wide / 30), rtol=1e-6, atol=4e-6)
    assert np.isnan(arithmetic.gelu(np.array([np.nan], np.float32))).all()


def test_what_does_not_fit_is_refused() -> None:
    ws, h = test_ops.workspace(cpu.supported_isas()[-1]), floats(86, 2, 256)
    more = test_ops.LIMITS.n_ff // 256 * 256 + 256
    gate, down = weights(K4, more, 256, 87), weights(Q8, 256, more, 88)
    with pytest.raises(ValueError, match=str(more)):
        cpu.dense_ffn(ws, h, gate, gate, down, h.copy())
    small, down = weights(K4, 512, 256, 87), weights(K4, 256, 512, 88)
    with pytest.raises(ValueError, match="router"):
        cpu.dense_ffn(ws, h, small, small, down, h.copy(), shared_gate=weights(K4, 1, 256, 89))
