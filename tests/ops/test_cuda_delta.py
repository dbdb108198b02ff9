"""Gated DeltaNet's CUDA kernels against the twin: short steps, long ones, and the products around them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from engine.ops import DeltaLayer, reference
from engine.ops.cuda import ops
from tests.device_ops import DeviceOps
from tests.op_cases import exact, rms
from tests.ops.test_delta import (
    AROUND,
    CASES,
    EPS,
    SHAPES,
    TYPES,
    Shape,
    Span,
    Step,
    expected,
    expected_output,
    input_step,
    limits_of,
    make_step,
    nmse,
    output_step,
    run_input,
    run_output,
    step_of,
    twin,
)
from tests.ops.test_ops import same_bits

SMALL = [case for case in CASES if CASES[case][0] != "odd" and case != "long"]
# name: shape, spans, rows that are not there, states that move, KiB of shared memory
LONG: dict[str, tuple[str, list[Span], int, bool, int]] = {
    "less than a chunk": ("ragged", [(0, 4, 33)], 0, False, 99),
    "whole chunks": ("ragged", [(0, 0, 128)], 0, False, 99),
    "several sequences": ("ragged", [(2, 7, 65), (0, 0, 1), (1, 2, 70), (3, 1, 2)], 6, True, 99),
    "heads of 128": ("whole", [(0, 3, 100)], 0, False, 99),
    "heads of 128, two stages": ("whole", [(0, 3, 100), (1, 0, 64)], 1, True, 163),
    "as many heads": ("as many heads", [(0, 0, 37), (1, 9, 3)], 0, True, 99),
}


def close(device: Any, step: Step, shape: Shape, bound: float) -> tuple[np.ndarray, DeltaLayer]:
    """What the device makes of a step, near float64; what no row of the step owns stays as it was."""
    out, layer = step.run(DeviceOps(device, limits_of(shape)), None)  # type: ignore[arg-type]
    wanted, states = expected(step, shape)
    assert nmse(out, wanted) < bound
    assert nmse(layer.state, states.state) < bound
    assert same_bits(layer.conv, states.conv.astype(np.float32))
    others = np.setdiff1d(np.arange(len(layer.state)), step.states[np.unique(step.sequence[step.there]), 1])
    assert same_bits(layer.state[others], step.layer.state[others])
    return out, layer


@pytest.mark.parametrize("case", SMALL)
def test_short_steps_are_near_the_twin(device: Any, case: str) -> None:
    out, layer = close(device, step_of(case), SHAPES[CASES[case][0]], 1e-10)
    wanted, states = twin(case)
    assert nmse(out, wanted) < 1e-10
    assert nmse(layer.state, states.state) < 1e-10


def test_one_token_at_a_time_gives_the_same_bits(device: Any) -> None:
    shape = SHAPES["ragged"]
    there: Any = DeviceOps(device, limits_of(shape))
    for first in (0, 5):
        step = make_step(shape, [(0, first, 8)], seed=11)
        whole, states = step.run(there, None)
        layer = step.layer
        for t in range(8):
            out, layer = step.part(t, t + 1, layer).run(there, None)
            assert same_bits(out, whole[t : t + 1])
        assert same_bits(layer.state, states.state)
        assert same_bits(layer.conv, states.conv)


def test_bits_of_a_sequence_do_not_depend_on_the_others(device: Any) -> None:
    shape = SHAPES["ragged"]
    there: Any = DeviceOps(device, limits_of(shape))
    step = make_step(shape, [(1, 0, 4), (0, 3, 7)], absent=2, seed=12)
    together, states = step.run(there, None)
    alone = replace(step.part(4, 11, step.layer), states=step.states[:1], sequence=np.zeros(7, np.int32))
    out, layer = alone.run(there, None)
    slot = step.states[0, 1]
    assert same_bits(out, together[4:11])
    assert same_bits(layer.state[slot], states.state[slot])


def test_a_step_without_tokens_changes_nothing(device: Any) -> None:
    for absent in (1, 40):
        step = make_step(SHAPES["ragged"], [(0, 7, 1)], absent=absent - 1)
        step = replace(step, slots=np.full(absent, -1, np.int32))
        _, layer = step.run(DeviceOps(device, limits_of(SHAPES["ragged"])), None)  # type: ignore[arg-type]
        assert same_bits(layer.state, step.layer.state)
        assert same_bits(layer.conv, step.layer.conv)


@pytest.mark.parametrize("case", LONG)
def test_long_steps_are_near_float64(device: Any, case: str) -> None:
    shape, spans, absent, moves, shared_kib = LONG[case]
    if hasattr(device, "launches"):  # the emulator
        device.max_shared_bytes = shared_kib << 10
    step = make_step(SHAPES[shape], spans, absent, len(case), moves)
    close(device, step, SHAPES[shape], 1e-9)


def test_long_steps_continue_each_other(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In segments too: what is kept of a state between them is where the step leaves it."""
    monkeypatch.setattr("engine.ops.cuda.delta.SEGMENT", 2)
    shape = Shape(1, 2, 32, 64)
    step = make_step(shape, [(1, 0, 30), (0, 5, 230)], absent=3, seed=13, moves=True)
    close(device, step, shape, 1e-9)
    step = make_step(shape, [(0, 5, 230)], seed=14)
    there: Any = DeviceOps(device, limits_of(shape))
    whole, states = step.run(there, None)
    first, layer = step.part(0, 128, step.layer).run(there, None)
    second, layer = step.part(128, 230, layer).run(there, None)
    assert same_bits(first, whole[:128])
    assert nmse(second, whole[128:]) < 1e-9
    assert nmse(layer.state, states.state) < 1e-9


def test_strong_and_weak_decay(device: Any) -> None:
    """Keys that are nearly alike, memory that is kept or lost at once: nothing overflows."""
    shape = Shape(1, 2, 64, 32)
    step = make_step(shape, [(0, 0, 130)], seed=15)
    step.mixed[:, : 2 * 64] = step.mixed[:1, : 2 * 64] + 0.01 * step.mixed[:, : 2 * 64]
    step.a[:] = [-16, -1e-4]
    step.beta[:] = 6
    close(device, step, shape, 1e-8)
    step.alpha[:] = [60, -60]
    close(device, step, shape, 1e-8)


def test_a_nan_shows(device: Any) -> None:
    shape = Shape(1, 2, 32, 64)
    step = make_step(shape, [(0, 3, 70), (1, 3, 5)], seed=16)
    step.mixed[10, 40] = np.nan
    out, layer = step.run(DeviceOps(device, limits_of(shape)), None)  # type: ignore[arg-type]
    assert np.isnan(out[10:70]).any(axis=1).all()
    assert np.isfinite(out[70:]).all()
    assert np.isnan(layer.state[step.states[0, 1]]).any()


@pytest.mark.parametrize("T", [1, 5, 34])
@pytest.mark.parametrize("types", TYPES)
def test_the_products_around_it(device: Any, types: str, T: int) -> None:
    there: Any = DeviceOps(device, replace(limits_of(AROUND, 40), n_ff=64))
    inputs, outputs = input_step(types, T), output_step(types, T)
    found, x = run_input(there, None, inputs), run_output(there, None, outputs)
    if T <= 32:
        assert all(map(same_bits, found, run_input(reference, None, inputs)))  # type: ignore[arg-type]
        assert same_bits(x, run_output(reference, None, outputs))  # type: ignore[arg-type]
    else:
        h = rms(inputs["x"], inputs["norm"], EPS)
        for y, w in zip(found, inputs["ws"], strict=True):
            assert nmse(y, h @ exact(w).T) < 1e-5
        assert nmse(x, expected_output(outputs)) < 1e-5


@pytest.mark.parametrize("T", [3, 66])
def test_a_step_can_be_captured(device: Any, T: int) -> None:
    """And launched again, which continues from the states of the time before."""
    shape = Shape(1, 2, 32, 64)
    step = make_step(shape, [(0, 4, T)], seed=17)
    host = DeviceOps(device, limits_of(shape))
    first, states = step.run(host, None)  # type: ignore[arg-type]
    second, _ = replace(step, layer=states).run(host, None)  # type: ignore[arg-type]
    there = replace(step, **{f.name: host._to(getattr(step, f.name)) for f in fields(step)})
    out = device.upload(np.full(first.shape, np.nan, np.float32))
    rows = (there.states, there.sequence, there.positions, there.slots)
    gates = (there.beta, there.alpha, there.conv, there.dt_bias, there.a)
    graph = device.capture(lambda: ops.delta(host.ws, there.mixed, *gates, EPS, there.layer, *rows, out))
    for expected_out in (first, second):
        graph.launch()
        assert same_bits(device.read(out), expected_out)


def test_what_does_not_fit_is_refused(device: Any) -> None:
    for shape, message in ((SHAPES["odd"], "heads of 7"), (Shape(1, 2, 64, 48), "heads of 48")):
        with pytest.raises(ValueError, match=message):
            make_step(shape, [(0, 0, 1)]).run(DeviceOps(device, limits_of(shape)), None)  # type: ignore[arg-type]
    shape = SHAPES["ragged"]
    with pytest.raises(ValueError, match="scratch"):
        make_step(shape, [(0, 0, 9)]).run(DeviceOps(device, limits_of(shape, 8)), None)  # type: ignore[arg-type]
