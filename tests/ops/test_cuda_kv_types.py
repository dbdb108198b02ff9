"""On the device, too, attention over q4_0 is that over q8_0 with the same integers, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.ground.kv_types import KV_TYPES, pair_of
from engine.ops.cuda import flash
from tests.ops.test_cuda_attention import Scene, same_bits
from tests.ops.test_cuda_flash import CASES, make_step
from tests.ops.test_kv_rows import widened

TYPES = [t for t in KV_TYPES if "q4_0" in t]


@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize(
    ("H", "K", "head_dim", "T", "window", "n_pool"),
    [
        (6, 2, 96, 3, 0, None),  # an odd number of scales
        (8, 1, 512, 2, 70, None),
        (5, 1, 64, 8, 100, 2),
        (16, 2, 128, 7, 0, 1),
    ],
)
def test_short_steps(
    device: Any, kv_type: str, H: int, K: int, head_dim: int, T: int, window: int, n_pool: int | None
) -> None:
    scene = Scene(H, K, head_dim, kv_type, [203, 40], 5)
    if scene.cache.v_scale is not None:  # the last row alone sees it
        scene.cache.v_scale[scene.table[0, 202 // 64] * 64 + 202 % 64, 0, -1] = np.inf
    sequence = np.array([*[0] * T, 1], np.int32)
    positions = np.array([*range(203 - T, 203), 39], np.int32)
    q = scene.query(T + 1)
    found = scene.run(device, q, sequence, positions, window=window, n_pool=n_pool)
    scene.cache = widened(scene.cache)
    same_bits(scene.run(device, q, sequence, positions, window=window, n_pool=n_pool), found)
    assert np.isfinite(found[0]).all() and np.ptp(found[0]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case, (_, _, _, kv_type, _) in CASES.items() if "q4_0" in kv_type])
def test_long_steps(device: Any, case: str) -> None:
    step = make_step(case)
    for n_pool in (None, 2):
        found = step.run(device, n_pool=n_pool)
        narrow, step.kv = step.kv, widened(step.kv)
        same_bits(step.run(device, n_pool=n_pool), found)
        step.kv = narrow
        assert np.isfinite(found).all() and np.ptp(found) > 0.1


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_tiles_fit_the_shared_memory_of_every_device(kv_type: str) -> None:
    for head_dim in (*range(32, 257, 32), 384, 512):
        assert flash._shared_bytes(head_dim, pair_of(kv_type)) <= 99 << 10
