"""Every op, every type: kernels against the twin bit for bit, the twin against float64 and `gguf`.

`CASES` is the one table. A case makes its inputs from a seed, runs an op of a backend and returns what the
op wrote; its oracle computes the same in float64 (op_cases.py). No two dimensions of a case are equal.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from fractions import Fraction
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats.block_types import NATIVE_TYPES
from engine.ops import (
    arithmetic,
    cpu,
    reference,
)
from engine.ops.blocks import integer_blocks
from engine.placing import policy
from tests.device_ops import DeviceOps
from tests.op_cases import (
    CUDA_NMSE,
    FLOATS,
    K4,
    K5,
    K6,
    LIMITS,
    Q8,
    SMALL_BLOCKS,
    Case,
    Outputs,
    any_scale_case,
    attention_case,
    attention_input_case,
    attention_output_case,
    embed_case,
    exact,
    expert_case,
    extreme_product_case,
    floats,
    head_case,
    odd_activations_case,
    product,
    product_case,
    route_case,
    router_case,
    weights,
)

CASES = [
    *(embed_case(t) for t in NATIVE_TYPES),
    *(product_case(t, 13, 512, 1) for t in NATIVE_TYPES),
    *(product_case(t, 6, 1280, 37) for t in NATIVE_TYPES),
    *(product_case(t, 5, 352, 3) for t in SMALL_BLOCKS),
    *(product_case(t, 3, 96, 2) for t in SMALL_BLOCKS),
    *(product_case(t, 7, 704, 1) for t in SMALL_BLOCKS),
    *(product_case(t, 9, 704, 35) for t in SMALL_BLOCKS),
    *(product_case(t, 3, 2112, 5) for t in SMALL_BLOCKS),
    *(product_case(t, 5, 77, 3) for t in FLOATS),
    # 2 to 32 rows, of every type, in more than one turn of the four warps that share a matrix's rows
    *(product_case(t, 37, 2080, T) for t, T in zip(NATIVE_TYPES, cycle((8, 3, 17, 9, 32))) if t not in FLOATS),
    # Two rows that neither registers nor shared memory hold, four that shared memory does not
    *(product_case(t, 3, K, T) for t, K, T in ((K4, 17408, 2), (K4, 18688, 2), (Q8, 18464, 2), (K6, 9472, 4))),
    *(product_case(t, 35, 1280, T) for t, T in ((K4, 2), (K4, 24), (K6, 9), (Q8, 32))),
    *(extreme_product_case(t) for t in NATIVE_TYPES if t not in FLOATS),
    *(odd_activations_case(t) for t in NATIVE_TYPES),
    *(any_scale_case(t) for t in (QType.MXFP4, QType.NVFP4)),
    attention_input_case((K4, K4, K6), "f16", 1, 6, 2, 64, 64, True),
    attention_input_case((K4, K4, K6), "q8_0", 19, 6, 2, 96, 64, True),
    attention_input_case((Q8, K5, QType.F16), "f16", 5, 4, 2, 40, 24, False),
    attention_input_case((QType.F32, QType.F32, QType.F32), "f16", 7, 6, 3, 46, 46, True),
    attention_case("f16", (200,), (1,), 6, 2, 64),
    attention_case("f16", (1,), (1,), 3, 1, 44),
    attention_case("f16", (75, 130), (75, 4), 6, 2, 48),
    attention_case("q8_0", (64, 65, 129), (2, 1, 3), 10, 2, 32),
    attention_case("q8_0", (333,), (21,), 4, 1, 128),
    attention_case("f16", (70,), (7,), 3, 1, 64, odd=True),
    attention_input_case((K4, K4, K6), "f16", 1, 6, 2, 64, 32, True, K4),
    attention_input_case((Q8, K5, Q8), "q8_0", 3, 5, 2, 96, 96, True, QType.F32, True),
    attention_input_case((K4, K6), "f16", 2, 3, 1, 256, 64, True, v_normed=True),
    attention_input_case((K4, K6), "f16", 35, 3, 1, 256, 64, True, QType.BF16, True),
    attention_input_case((K5,), "q8_0", 4, 3, 1, 288, 64, False, K5),
    attention_input_case((QType.F32,), "f16", 1, 2, 1, 512, 128, True),
    attention_case("f16", (300,), (1,), 6, 2, 64, window=100),
    attention_case("f16", (290, 200), (3, 2), 8, 1, 32, window=130, gate_kind="softplus"),
    attention_case("q8_0", (333, 129), (9, 1), 4, 2, 256, window=64, gate_kind="sigmoid", by_head=False),
    attention_case("f16", (20, 150), (4, 2), 3, 1, 48, window=512, gate_kind="sigmoid"),
    attention_case("f16", (80,), (4,), 2, 1, 512, gate_kind="softplus", by_head=False),
    attention_case("q8_0", (300,), (40,), 4, 2, 64, window=70, gate_kind="softplus"),
    attention_case("f16", (120, 30), (38, 2), 2, 1, 512, window=65, gate_kind="sigmoid", by_head=False),
    # Blocks that are seen and not there: the first ones, in the middle, neighbors, in a window
    attention_case("f16", (330, 140), (1, 3), 6, 2, 64, absent=((0, 0), (0, 2), (0, 3), (1, 1))),
    attention_case("q8_0", (290, 200), (5, 1), 4, 1, 96, absent=((0, 0), (0, 1), (0, 3), (1, 0)), gate_kind="sigmoid"),
    attention_case("f16", (400,), (9,), 4, 2, 256, window=230, absent=((0, 3), (0, 5))),
    attention_case("f16", (250, 190), (40, 3), 6, 2, 48, absent=((0, 0), (0, 2), (1, 1))),
    attention_case("q8_0", (333,), (35,), 4, 1, 128, window=200, absent=((0, 1), (0, 3))),
    attention_input_case((K4, K4, K6), "f16", 5, 6, 2, 64, 64, True, unstored=2),
    attention_input_case((Q8, K5, Q8), "q8_0", 3, 5, 2, 96, 96, True, unstored=1),
    attention_input_case((K4, K6), "f16", 35, 3, 1, 256, 64, True, unstored=34),
    # Keys and values of other types: all pairs with q4_0 or of two, in short steps and long ones
    attention_input_case((K4, K4, K6), "q4_0", 19, 6, 2, 96, 64, True),
    attention_input_case((Q8, K5, Q8), "q8_0,q4_0", 3, 5, 2, 96, 96, True, unstored=1),
    attention_input_case((K4, K6), "q4_0,f16", 35, 3, 1, 256, 64, True),
    attention_input_case((K5, Q8, K4), "f16,q8_0", 2, 3, 1, 64, 32, True),
    attention_case("q4_0", (64, 65, 129), (2, 1, 3), 10, 2, 32),
    attention_case("q4_0", (290, 200), (5, 1), 4, 1, 96, absent=((0, 0), (0, 1), (0, 3), (1, 0)), gate_kind="sigmoid"),
    attention_case("q4_0", (333,), (35,), 4, 1, 128, window=200, absent=((0, 1), (0, 3))),
    attention_case("q4_0", (120, 30), (38, 2), 2, 1, 512, window=65, gate_kind="sigmoid", by_head=False),
    attention_case("q8_0,q4_0", (333, 129), (9, 1), 4, 2, 256, window=64, gate_kind="sigmoid", by_head=False),
    attention_case("q8_0,q4_0", (300,), (40,), 4, 2, 64, window=70, gate_kind="softplus"),
    attention_case("f16,q4_0", (200,), (1,), 6, 2, 64),
    attention_case("f16,q4_0", (190, 250), (3, 40), 6, 2, 96, absent=((0, 2), (1, 1))),
    attention_case("q4_0,f16", (80,), (4,), 2, 1, 512, gate_kind="softplus", by_head=False),
    attention_case("q4_0,f16", (150,), (37,), 5, 1, 160),
    attention_case("q4_0,q8_0", (333,), (21,), 4, 1, 128),
    attention_case("q8_0,f16", (300,), (2,), 7, 1, 96, window=100),
    attention_case("f16,q8_0", (75, 130), (36, 4), 6, 2, 64),
    *(attention_output_case(t, T) for t, T in ((K4, 1), (K6, 19), (QType.F32, 3))),
    *(attention_output_case(t, T, False) for t, T in ((K4, 1), (K6, 19), (QType.F32, 3), (K4, 33))),
    *(router_case(t, T) for t, T in ((QType.F32, 1), (QType.F16, 19), (QType.BF16, 40))),
    route_case((4, 9, 3), policy.LRU, True, 1),
    route_case((4, 9, 3), policy.DEFAULT, True, 11),
    route_case((0, 12), policy.Rule(1), False, 2),
    route_case((2, 0), policy.LRU, True, 40),
    route_case((3, 9), policy.Rule(2), True, 45),
    route_case((2, 17), policy.DEFAULT, False, 7, odd=True),
    route_case((2, 9), policy.LRU, True, 7, odd=True),
    expert_case((K4, K4, K6), 256, 512, 1),
    expert_case((K4, K4, K6), 512, 256, 41),
    expert_case((K5, QType.IQ4_XS, K4), 256, 768, 6),
    expert_case((QType.Q2_K, QType.Q3_K, QType.Q2_K), 512, 256, 3),
    expert_case((QType.Q3_K, QType.Q2_K, QType.Q3_K), 256, 768, 39),
    expert_case((QType.IQ2_XXS, QType.IQ2_XS, QType.IQ2_S), 256, 512, 2),
    expert_case((QType.IQ2_XS, QType.IQ2_S, QType.IQ2_XXS), 512, 256, 37),
    expert_case((QType.IQ2_S, QType.IQ3_S, QType.IQ3_XXS), 256, 768, 5),
    expert_case((QType.IQ3_XXS, QType.IQ3_S, QType.IQ2_XS), 512, 256, 1),
    expert_case((QType.IQ3_S, QType.IQ3_XXS, QType.IQ3_S), 256, 512, 41),
    expert_case((Q8, Q8, QType.Q4_0), 352, 96, 5),
    expert_case((QType.Q4_0, QType.F16, Q8), 288, 160, 4),
    expert_case((QType.F32, QType.BF16, QType.F16), 77, 70, 5),
    # Rows of down that fill no panel and no stage: a Gemma's experts
    expert_case((K4, K4, QType.Q5_0), 256, 704, 1, gelu=True),
    expert_case((K4, K5, QType.Q5_1), 256, 352, 6, gelu=True),
    expert_case((QType.Q5_0, QType.Q5_1, QType.IQ4_NL), 96, 352, 41, gelu=True),
    expert_case((QType.IQ4_NL, QType.Q5_0, Q8), 352, 96, 3),
    expert_case((QType.Q5_1, QType.Q4_1, QType.MXFP4), 160, 96, 1),
    expert_case((QType.MXFP4, QType.MXFP4, QType.MXFP4), 352, 160, 7),
    expert_case((QType.MXFP4, QType.IQ4_NL, QType.Q4_1), 96, 160, 37),
    expert_case((QType.NVFP4, QType.NVFP4, QType.NVFP4), 320, 192, 1),
    expert_case((QType.Q5_0, QType.NVFP4, QType.NVFP4), 192, 704, 9),
    expert_case((QType.NVFP4, QType.NVFP4, Q8), 320, 192, 36),
    # Products that are multiplied by a number of their matrix
    *(product_case(QType.NVFP4, 5, 320, T, scale=0.37) for T in (1, 3, 34)),
    *(product_case(t, 7, 512, 1, scale=-1.9) for t in (K4, QType.F32)),
    expert_case((QType.NVFP4, QType.NVFP4, QType.NVFP4), 320, 192, 1, scaled=True),
    *(
        expert_case((QType.NVFP4,) * 3, 192, 320, T, shared=(QType.NVFP4,) * 3, shared_F=320, scaled=True)
        for T in (1, 6, 37)
    ),
    expert_case(
        (QType.NVFP4, K4, Q8),
        256,
        192,
        1,
        shared=(QType.NVFP4, K4, Q8),
        shared_F=192,
        shared_gate=QType.F32,
        scaled=True,
    ),
    expert_case((K4, K4, K6), 256, 512, 1, gelu=True, add=False),
    expert_case((Q8, Q8, QType.F16), 96, 70, 6, gelu=True),
    expert_case((K6, K4, K5), 256, 256, 35, gelu=True, add=False),
    # A shared expert in the launch of the others: all alike but for the down projection's block type
    expert_case((K4, K4, K6), 256, 512, 1, shared=(K4, K4, K4), shared_F=512, shared_gate=QType.F32),
    expert_case((K4, K6, K4), 512, 256, 5, shared=(K4, K6, Q8), shared_F=256),
    expert_case((Q8, Q8, QType.Q4_0), 96, 160, 31, shared=(Q8, Q8, Q8), shared_F=160, shared_gate=QType.BF16),
    expert_case(
        (QType.F16, QType.F32, QType.F16),
        77,
        70,
        1,
        gelu=True,
        add=False,
        shared=(QType.F16, QType.F32, QType.F32),
        shared_F=70,
        shared_gate=QType.F16,
    ),
    expert_case((Q8, Q8, QType.F16), 96, 70, 6, shared=(Q8, Q8, QType.F16), shared_F=70, shared_gate=QType.F32),
    # and in launches of its own
    expert_case((K4, K4, K6), 256, 512, 1, shared=(K4, K4, K6), shared_F=768, shared_gate=QType.F32),
    expert_case((K4, K4, K4), 256, 512, 3, shared=(K4, Q8, K4), shared_F=512),
    expert_case((Q8, Q8, Q8), 96, 160, 2, add=False, shared=(Q8, Q8, QType.F16), shared_F=160),
    expert_case((K4, K4, K6), 512, 256, 41, shared=(K4, K4, K6), shared_F=768, shared_gate=QType.F16),
    *(head_case(t, rows) for t, rows in ((K6, (8,)), (K4, (0, 3, 3, 7)), (QType.F16, (5, 2)), (K6, ()))),
]


@functools.cache
def workspace(isa: str, threads: int = 2) -> Any:
    return cpu.workspace(replace(LIMITS, n_expert=512, n_expert_used=16), threads, isa)


@functools.cache
def twin(case: Case) -> Outputs:
    return case.run(reference, reference.workspace(LIMITS, 1))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, where a NaN has no bits of its own."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind != "f":
        return np.array_equal(a, b)
    words = {2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    return bool(((a.view(words) == b.view(words)) | (np.isnan(a) & np.isnan(b))).all())


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernels_equal_the_twin_bit_for_bit(case: Case, isa: str) -> None:
    outputs = case.run(cpu, workspace(isa))
    for name, expected in twin(case).items():
        assert same_bits(outputs[name], expected), name


@pytest.mark.parametrize("case", [c.on_cuda for c in CASES])
def test_cuda_kernels_equal_the_twin(case: Case, device: Any) -> None:
    """Bit for bit in small steps, attention's sums excepted; tensor cores by their distance from float64."""
    small = replace(LIMITS, n_expert=case.experts[0], n_expert_used=case.experts[1])
    if case.refused_on_cuda:
        with pytest.raises(ValueError, match=case.refused_on_cuda):
            case.run(DeviceOps(device, small), None)
        return
    outputs = case.run(DeviceOps(device, small), None)
    expected = case.oracle() if case.oracle and not case.exact_on_cuda else twin(case)
    for name, value in expected.items():
        if case.exact_on_cuda or outputs[name].dtype.kind != "f":
            assert same_bits(outputs[name], np.asarray(value, outputs[name].dtype)), name
        else:
            found, value = outputs[name].astype(np.float64), value.astype(np.float64)
            assert np.array_equal(np.isnan(found), np.isnan(value)), name
            finite = np.isfinite(value) & np.isfinite(found)
            assert ((found - value)[finite] ** 2).sum() <= CUDA_NMSE * (value[finite] ** 2).sum(), name


@pytest.mark.parametrize("case", [c for c in CASES if c.oracle], ids=lambda c: c.name)
def test_the_twin_is_near_float64(case: Case) -> None:
    outputs = twin(case)
    for name, expected in case.oracle().items():  # type: ignore[misc]
        value = outputs[name].astype(np.float64)
        if case.nmse == 0 or outputs[name].dtype.kind != "f":
            assert np.array_equal(value, expected), name
        else:
            assert ((value - expected) ** 2).sum() <= case.nmse * (expected**2).sum(), name


@pytest.mark.parametrize("qtype", NATIVE_TYPES, ids=lambda t: t.name)
def test_a_row_does_not_depend_on_its_step(qtype: QType) -> None:
    w, x = weights(qtype, 9, 768, 40), floats(41, 70, 768)
    ws = workspace(cpu.supported_isas()[-1])
    together = product(cpu, ws, w, x)
    for t in (0, 31, 32, 69):
        assert same_bits(product(cpu, ws, w, x[t : t + 1]), together[t : t + 1])


@pytest.mark.parametrize("qtype", [t for t in NATIVE_TYPES if t not in FLOATS], ids=lambda t: t.name)
def test_integer_blocks_rebuild_the_weights(qtype: QType) -> None:
    w = weights(qtype, 5, 1024, 42)
    terms = integer_blocks(w)
    scale = terms.scale[..., None, None] * np.ones(2)[:, None]
    if terms.half_scale is not None:
        scale = (terms.scale[..., None] * terms.half_scale)[..., None]
    rebuilt = (scale * terms.q).astype(np.float32)
    if terms.minimum is not None:
        factor = 1 if terms.half_minimum is None else terms.half_minimum[..., None]
        rebuilt = rebuilt - (terms.minimum[..., None, None] * factor).astype(np.float32)
    assert np.array_equal(rebuilt.reshape(w.shape), exact(w).astype(np.float32))


@settings(max_examples=300, deadline=None)
@given(*(st.floats(width=32, allow_nan=False, allow_infinity=False) for _ in range(3)))
def test_fma_of_the_twin_rounds_once(a: float, b: float, c: float) -> None:
    value = float(arithmetic.fma(*(np.array([v], np.float32) for v in (a, b, c)))[0])
    exact_value = Fraction(a) * Fraction(b) + Fraction(c)
    if not np.isfinite(value):
        assert abs(exact_value) >= Fraction(2) ** 128 - Fraction(2) ** 103
        return
    with np.errstate(over="ignore"):
        neighbors = np.nextafter(np.float32(value), np.array([-np.inf, np.inf], np.float32))
    for neighbor in neighbors:
        if np.isfinite(neighbor):
            assert abs(Fraction(value) - exact_value) <= abs(Fraction(float(neighbor)) - exact_value)


EXP_INPUTS = np.concatenate([
    np.linspace(-90, 90, 20011), floats(43, 5000).astype(np.float64) * 20, [-87, -87.000008, 88, 88.00001, 0.0, -0.0],
    [np.inf, -np.inf, np.nan, 1e-40, 3e38, -3e38],
]).astype(np.float32)  # fmt: skip


@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_exp_equals_the_twin(isa: str) -> None:
    assert same_bits(cpu.exp(workspace(isa), EXP_INPUTS), arithmetic.exp(EXP_INPUTS))


def test_exp_of_the_twin_is_accurate() -> None:
    x = EXP_INPUTS[(EXP_INPUTS >= -87) & (EXP_INPUTS <= 88)].astype(np.float64)
    assert np.abs(arithmetic.exp(x.astype(np.float32)) / np.exp(x) - 1).max() < 3e-7
    assert arithmetic.exp(np.array([-87.1, -np.inf], np.float32)).tolist() == [0, 0]
    assert np.isnan(arithmetic.exp(np.array([np.nan], np.float32))).all()


def test_sigmoid_and_softplus_of_the_twin_are_accurate() -> None:
    x = EXP_INPUTS[np.abs(EXP_INPUTS) <= 85]
    exact_x = x.astype(np.float64)
    assert np.abs(arithmetic.sigmoid(x) * (1 + np.exp(-exact_x)) - 1).max() < 5e-7
    softplus = np.maximum(exact_x, 0) + np.log1p(np.exp(-np.abs(exact_x)))
    assert np.abs(arithmetic.softplus(x) / softplus - 1).max() < 5e-7
    ends = np.array([-np.inf, -100, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(arithmetic.sigmoid(ends) > 1e-38, [False, False, True, False])
    np.testing.assert_array_equal(np.isnan(arithmetic.sigmoid(ends)), [False, False, False, True])
    np.testing.assert_array_equal(arithmetic.softplus(ends), np.array([0, 0, np.inf, np.nan], np.float32))
