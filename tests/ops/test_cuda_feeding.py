"""What a step is fed reaches its places, however much it is and however often the ring comes round."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from engine.ops.cuda import feeding
from engine.ops.cuda.feeding import Feeding

SHAPES: list[tuple[tuple[int, ...], type]] = [
    ((7,), np.int32), ((13,), np.uint8), ((0,), np.int32), ((2, 3), np.int32), ((1,), np.uint8), ((3, 700), np.int32),
]  # fmt: skip


def arrays(seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 250, shape).astype(dtype) for shape, dtype in SHAPES]


@pytest.mark.parametrize("ring_bytes", [1 << 20, 40_000, 16_000])
def test_every_array_is_written_where_it_belongs(device: Any, ring_bytes: int) -> None:
    """The last ring is too small for the step, whose arrays are written one by one then."""
    with patch.object(feeding, "RING_BYTES", ring_bytes):
        feed = Feeding(device)
        wide = [device.upload(np.full((len(host) + 5, *host.shape[1:]), 255, host.dtype)) for host in arrays(0)]
        for turn in range(7):
            hosts = arrays(turn)
            feed([(array[: len(host)], host) for array, host in zip(wide, hosts, strict=True)])
            expected = [host.copy() for host in hosts]
            for host in hosts:
                host[...] = 0  # it may change at once
            for array, value in zip(wide, expected, strict=True):
                found = device.read(array)
                assert np.array_equal(found[: len(value)], value)
                assert (found[len(value) :] == found.dtype.type(255)).all()


@pytest.mark.parametrize("ring_bytes", [1 << 20, 300])
def test_rows_of_a_matrix_may_be_apart(device: Any, ring_bytes: int) -> None:
    with patch.object(feeding, "RING_BYTES", ring_bytes):
        wide = device.upload(np.full((5, 11), -9, np.int32))
        host = np.arange(21, dtype=np.int32).reshape(3, 7)
        Feeding(device)([(wide[:3, :7], host)])
        found = device.read(wide)
    assert np.array_equal(found[:3, :7], host)
    assert (found[3:] == -9).all() and (found[:, 7:] == -9).all()


def test_a_wrong_shape_is_refused(device: Any) -> None:
    array = device.empty(5, np.int32)
    with pytest.raises(ValueError, match="fed to"):
        Feeding(device)([(array, np.zeros(4, np.int32))])
