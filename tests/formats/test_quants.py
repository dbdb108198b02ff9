"""Quantized tensors: the `gguf` package reads back what our quantizers pack, and bounds say how close it comes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType
from hypothesis import given, settings
from hypothesis import strategies as st

from data.nano.quantizer import quantize
from engine.formats.block_types import NATIVE_TYPES
from engine.formats.grids import GRIDS
from engine.formats.quants import QTensor, dequantize, require_native, row_bytes
from engine.ground.errors import ModelFormatError, UnsupportedModelError
from tests.gguf_files import qtensor, random_blocks

OURS = (
    QType.Q2_K, QType.Q3_K, QType.Q4_K, QType.Q5_K, QType.Q6_K, QType.IQ4_NL, QType.IQ4_XS, QType.NVFP4, *GRIDS,
)  # fmt: skip
READABLE = {  # a version of the package that reads fewer would narrow the test below unseen
    QType.F32, QType.F16, QType.BF16, QType.Q4_0, QType.Q4_1, QType.Q5_0, QType.Q5_1, QType.Q8_0, QType.Q2_K,
    QType.Q3_K, QType.Q4_K, QType.Q5_K, QType.Q6_K, QType.TQ1_0, QType.TQ2_0, QType.MXFP4, QType.IQ1_S, QType.IQ1_M,
    QType.IQ2_XXS, QType.IQ2_XS, QType.IQ2_S, QType.IQ3_XXS, QType.IQ3_S, QType.IQ4_NL, QType.IQ4_XS, QType.NVFP4,
}  # fmt: skip
rng = np.random.default_rng(11)


def normal(*shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) * 0.02).astype(np.float32)


def read_back(values: np.ndarray, qtype: QType) -> np.ndarray:
    return dequantize(qtensor(values, qtype))


def relative_rmse(values: np.ndarray, found: np.ndarray) -> float:
    error = np.asarray(found, np.float64) - values
    return float(np.sqrt(np.square(error).mean() / np.square(values.astype(np.float64)).mean()))


# ---- tensors


def test_expert_is_a_view_of_its_slice() -> None:
    values = normal(3, 5, 512)
    stacked = qtensor(values, QType.Q4_K, "blk.0.ffn_up_exps.weight")
    assert stacked.row_bytes == 288 and stacked.nbytes == 3 * 5 * 288
    whole = dequantize(stacked)
    for e in range(3):
        one = stacked.expert(e)
        assert one.shape == (5, 512) and one.name == f"blk.0.ffn_up_exps.weight[{e}]"
        assert np.shares_memory(one.data, stacked.data)
        np.testing.assert_array_equal(dequantize(one), whole[e])
    for wrong in (-1, 3):
        with pytest.raises(AssertionError):
            stacked.expert(wrong)


def test_a_tensor_holds_exactly_its_bytes() -> None:
    with pytest.raises(AssertionError):
        QTensor("t", QType.F32, (2, 3), np.zeros(20, np.uint8))
    with pytest.raises(ModelFormatError, match=r"tensor 't\.w': a row of 300 weights .* Q6_K's block of 256"):
        QTensor("t.w", QType.Q6_K, (300,), np.zeros(210, np.uint8))
    with pytest.raises(ModelFormatError, match=r"tensor 'w': a row of 48"):
        quantize(normal(2, 48), QType.Q8_0, name="w")


def test_native_types() -> None:
    for qtype, (block, size) in gguf.GGML_QUANT_SIZES.items():
        t = QTensor("blk.3.w", qtype, (2, block), np.zeros(2 * size, np.uint8))
        if qtype in NATIVE_TYPES:
            require_native(t)
            continue
        with pytest.raises(UnsupportedModelError, match=f"'blk.3.w' has type {qtype.name}") as caught:
            require_native(t)
        assert all(native.name in caught.value.hint for native in NATIVE_TYPES)


# ---- reading


@pytest.mark.parametrize("qtype", sorted(QType), ids=lambda q: q.name)
def test_dequantize_is_that_of_the_package(qtype: QType) -> None:
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    shape = (2, 3, 5 * block)
    data = rng.integers(0, 256, 2 * 3 * 5 * size, np.uint8)
    t = QTensor("t", qtype, shape, data)
    try:
        with np.errstate(all="ignore"):
            rows = [gguf.dequantize(row, qtype) for row in data.reshape(6, 5 * size)]
    except NotImplementedError:
        assert qtype not in READABLE
        with pytest.raises(UnsupportedModelError, match=f"tensor 't' has type {qtype.name}"):
            dequantize(t)
        return
    found = dequantize(t)
    assert found.dtype == np.float32 and found.shape == shape
    np.testing.assert_array_equal(found.reshape(6, -1), rows)


# ---- writing


@pytest.mark.parametrize("qtype", [t for t in NATIVE_TYPES if t not in OURS], ids=lambda q: q.name)
def test_package_quantizers(qtype: QType) -> None:
    values = normal(3, 2, 96)
    packed = quantize(values, qtype)
    assert packed.dtype == np.uint8 and packed.shape == (3, 2, row_bytes(qtype, 96, "t"))
    expected = gguf.quantize(values, qtype)
    assert packed.tobytes() == expected.tobytes()
    np.testing.assert_array_equal(
        read_back(values, qtype).reshape(-1, 96), gguf.dequantize(expected, qtype).reshape(-1, 96)
    )


# Relative RMSE of normal weights, a little above what was measured; and of a plain quantizer of the same type.
BOUNDS = {
    QType.Q8_0: 0.0055, QType.Q6_K: 0.0170, QType.Q5_K: 0.0358, QType.Q4_K: 0.0708, QType.IQ4_XS: 0.0752,
    QType.IQ4_NL: 0.0745, QType.Q5_0: 0.0435, QType.Q5_1: 0.0385, QType.Q4_1: 0.0795, QType.MXFP4: 0.116,
    QType.NVFP4: 0.0935,
    QType.Q3_K: 0.145, QType.Q2_K: 0.264, QType.IQ3_S: 0.133, QType.IQ3_XXS: 0.180, QType.IQ2_S: 0.241,
    QType.IQ2_XS: 0.289, QType.IQ2_XXS: 0.332,
}  # fmt: skip


@pytest.mark.parametrize("qtype", BOUNDS, ids=lambda q: q.name)
def test_error_on_normal_weights(qtype: QType) -> None:
    values = normal(61, 2048)
    assert relative_rmse(values, read_back(values, qtype)) < BOUNDS[qtype]


def plain_affine(values: np.ndarray, q_max: int) -> np.ndarray:
    """What smallest-to-largest scales, quantized as Q4_K and Q5_K do, give: the baseline of the search."""
    x = values.reshape(-1, 8, 32).astype(np.float64)
    low = np.minimum(x.min(2), 0)
    d, m = (np.maximum(x.max(2), low) - low) / q_max, -low

    def quantized(sub: np.ndarray) -> np.ndarray:
        top = (sub.max(1, keepdims=True) / 63).astype(np.float16).astype(np.float64)
        return top * np.rint(np.divide(sub, top, out=np.zeros_like(sub), where=top > 0)).clip(0, 63)

    d, m = quantized(d)[..., None], quantized(m)[..., None]
    q = np.rint(np.divide(x + m, d, out=np.zeros_like(x), where=d > 0)).clip(0, q_max)
    return (d * q - m).reshape(values.shape)


def plain_signed(values: np.ndarray) -> np.ndarray:
    """Q6_K with the scales of the largest weights."""
    x = values.reshape(-1, 16, 16).astype(np.float64)
    s = np.abs(x).max(2) / 31
    top = (s.max(1, keepdims=True) / 127).astype(np.float16).astype(np.float64)
    s = (top * np.rint(s / top).clip(0, 127))[..., None]
    return (s * np.rint(x / s).clip(-32, 31)).reshape(values.shape)


@pytest.mark.parametrize("heavy_tails", [False, True])
def test_the_search_beats_plain_scales(heavy_tails: bool) -> None:
    values = normal(37, 1024)
    if heavy_tails:
        values = (rng.standard_t(4, (37, 1024)) * 0.02).astype(np.float32)
    for qtype, plain, gain in [
        (QType.Q4_K, plain_affine(values, 15), 0.92),
        (QType.Q5_K, plain_affine(values, 31), 0.95),
        (QType.Q6_K, plain_signed(values), 0.95),
    ]:
        assert relative_rmse(values, read_back(values, qtype)) < gain * relative_rmse(values, plain), qtype.name


@pytest.mark.parametrize("qtype", OURS, ids=lambda q: q.name)
def test_representable_weights_come_back(qtype: QType) -> None:
    """Codes and sub-scales are all random: one that is packed elsewhere than it is read would be far off."""
    cols = 512
    exact = dequantize(QTensor("t", qtype, (9, cols), random_blocks(qtype, 9, cols, rng).reshape(-1)))
    limit = {QType.IQ4_XS: 0.06, QType.Q4_K: 0.03}.get(qtype, 0.04 if qtype in GRIDS or qtype == QType.Q2_K else 0.02)
    assert relative_rmse(exact, read_back(exact, qtype)) < limit


@pytest.mark.parametrize("qtype", OURS, ids=lambda q: q.name)
def test_a_block_does_not_depend_on_its_neighbors(qtype: QType) -> None:
    values = normal(3, 90, 256)  # more blocks than are searched at a time
    packed = quantize(values, qtype)
    for at in [(0, 0), (1, 7), (2, 89)]:
        np.testing.assert_array_equal(packed[at], quantize(values[at], qtype))
    assert packed.shape == (3, 90, row_bytes(qtype, 256, "t"))


@pytest.mark.parametrize("qtype", OURS, ids=lambda q: q.name)
def test_zeros_stay_zeros(qtype: QType) -> None:
    values = np.zeros((2, 512), np.float32)
    values[1, 300:] = normal(212)
    assert not read_back(values, qtype)[0].any()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1e-5, 1e-2, 1.0, 300.0]),
    shift=st.sampled_from([0.0, 0.0, -3.0, 4.0]),
    spread=st.sampled_from([0.0, 1.0, 3.0]),
    density=st.sampled_from([1.0, 0.3, 0.02]),
    levels=st.sampled_from([0, 1, 5]),
    with_grid=st.sampled_from(list(GRIDS)),
)
def test_error_on_any_shape_of_weights(
    seed: int, size: float, shift: float, spread: float, density: float, levels: int, with_grid: QType
) -> None:
    """The error never much exceeds the plain quantizer's, whatever the weights look like."""
    own = np.random.default_rng(seed)
    x = own.standard_normal((4, 8, 32)) + shift
    x = np.rint(x * levels) / levels if levels else x
    x *= np.exp(spread * own.standard_normal((4, 8, 1)).clip(-2, 2)) * (own.random((4, 8, 32)) < density)
    values = (x * size).clip(-6e4, 6e4).reshape(4, 256).astype(np.float32)
    with np.errstate(all="raise", under="ignore"):
        found = {qtype: read_back(values, qtype) for qtype in OURS if qtype not in GRIDS or qtype == with_grid}
    rms = np.sqrt(np.square(values.astype(np.float64)).mean())
    for qtype, plain in [(QType.Q4_K, plain_affine(values, 15)), (QType.Q5_K, plain_affine(values, 31))]:
        error, baseline = (np.sqrt(np.square(y - values).mean()) for y in (found[qtype], plain))
        assert error <= 1.1 * baseline + 0.025 * rms + 1e-6
    assert np.sqrt(np.square(found[with_grid] - values).mean()) <= 0.8 * rms + 1e-6  # zeros would have 1
    for qtype, bound in [(QType.Q6_K, 1 / 32), (QType.IQ4_NL, 1 / 7), (QType.IQ4_XS, 1 / 7)]:
        assert np.abs(found[qtype] - values).max() <= bound * np.abs(values).max() + 3e-6


@pytest.mark.parametrize("qtype", OURS, ids=lambda q: q.name)
def test_importance_moves_the_error_to_where_it_costs_less(qtype: QType) -> None:
    values = normal(23, 512)
    importance = np.exp(2 * rng.standard_normal(512)).astype(np.float32)

    def weighted_error(packed: np.ndarray) -> float:
        found = dequantize(QTensor("t", qtype, values.shape, packed.reshape(-1)))
        return float((np.square(found - values) * importance).mean())

    plain, aware = quantize(values, qtype), quantize(values, qtype, importance)
    assert weighted_error(aware) < 0.9 * weighted_error(plain)
    np.testing.assert_array_equal(quantize(values, qtype, np.float32(2**-60) * importance), aware)


def test_weights_that_no_type_can_hold() -> None:
    for bad in (np.nan, np.inf, -np.inf, 7e4):
        values = normal(2, 256)
        values[1, 77] = bad
        for qtype in (QType.F16, QType.Q8_0, QType.Q4_K, QType.IQ4_XS):
            with pytest.raises(ModelFormatError, match=r"tensor 'w': a weight that is NaN or beyond 65504"):
                quantize(values, qtype, name="w")
    assert read_back(np.full(3, 7e4, np.float32), QType.BF16)[0] == pytest.approx(7e4, rel=0.01)
    with pytest.raises(UnsupportedModelError, match="no quantizer for type TQ2_0"):
        quantize(normal(2, 256), QType.TQ2_0)


@pytest.mark.parametrize("qtype", NATIVE_TYPES, ids=lambda q: q.name)
def test_random_blocks_are_weights(qtype: QType) -> None:
    t = QTensor("t", qtype, (11, 768), random_blocks(qtype, 11, 768, rng).reshape(-1))
    values = dequantize(t)
    assert np.isfinite(values).all()
    assert 0.005 < values.std() < 0.1 and abs(values.mean()) < 0.02
    assert len(np.unique(t.data)) > 200
