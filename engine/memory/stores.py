"""The arrays of a layer's cache: those of its pool on the device, and those that are its homes in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.ground.errors import CapacityError
from engine.ground.kv_types import pair_of
from engine.ops import I32, KV_BLOCK_TOKENS, KVLayer
from engine.ops.device import Memory

HOST = "host memory"  # the name of a device that is the host


@dataclass(frozen=True, slots=True)
class Store:
    """A layer's cache: what ops take, and its arrays in the pool and at home, those that there are."""

    layer: KVLayer
    pool: tuple[Any, ...]
    homes: tuple[NDArray[Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous view of an array, and whether it is at home."""

    array: Any
    is_home: bool = False


def make_layer(device: Memory, n_head_kv: int, head_dim: int, n_blocks: int, kv_type: str) -> KVLayer:
    """A layer's cache on the device."""
    return _layer_of(n_head_kv, head_dim, n_blocks, kv_type, device.empty)


def make_store(
    device: Memory, n_head_kv: int, head_dim: int, n_blocks: int, n_pool: int, kv_type: str
) -> Store:  # fmt: skip
    """A layer's cache of n_pool blocks on the device, and, where these are not all, of n_blocks at home.

    CapacityError where host memory for homes cannot be had.
    """
    if n_pool == n_blocks:
        layer = make_layer(device, n_head_kv, head_dim, n_blocks, kv_type)
        return Store(layer, arrays_of(layer))
    if device.name == HOST:  # one array has both
        layer, n = make_layer(device, n_head_kv, head_dim, n_pool + n_blocks, kv_type), n_pool * KV_BLOCK_TOKENS
        whole = arrays_of(layer)
        return Store(layer, tuple(a[:n] for a in whole), tuple(a[n:] for a in whole))

    def locked(shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
        return device.page_locked(prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)

    pool = make_layer(device, n_head_kv, head_dim, n_pool, kv_type)
    try:
        homes = _layer_of(n_head_kv, head_dim, n_blocks, kv_type, locked)
    except CapacityError as error:
        raise CapacityError(
            f"blocks of the KV cache that leave the device have no place in host memory: {error}",
            hint="a smaller --ctx needs fewer such places, a --kv-pool of --ctx tokens none; else free host memory, or "
            "raise the limits of the container or of WSL, and ulimit -l",
        ) from error
    return Store(KVLayer(pool.k, pool.v, pool.k_scale, pool.v_scale, homes), arrays_of(pool), arrays_of(homes))


def _layer_of(
    n_head_kv: int, head_dim: int, n_blocks: int, kv_type: str, empty: Callable[[tuple[int, ...], type], Any]
) -> KVLayer:
    rows, kinds = (n_blocks * KV_BLOCK_TOKENS, n_head_kv), pair_of(kv_type)
    arrays = (empty((*rows, kind.n_elements(head_dim)), np.dtype(kind.dtype).type) for kind in kinds)
    scales = (empty((*rows, kind.n_scales(head_dim)), np.float16) if kind.block else None for kind in kinds)
    return KVLayer(*arrays, *scales)


def arrays_of(layer: KVLayer) -> tuple[Any, ...]:
    """A layer's arrays, those that there are."""
    return tuple(array for array in layer.arrays if array is not None)


def address(array: NDArray[Any]) -> int:
    """Where an array in host memory begins, as the host has it."""
    return int(array.__array_interface__["data"][0])


def blocks_of(array: Any, first: int, n: int) -> Any:
    """A view of n blocks of an array by slots."""
    return array[first * KV_BLOCK_TOKENS : (first + n) * KV_BLOCK_TOKENS]


def runs_of(places: I32, border: int) -> list[tuple[int, int]]:
    """Where numbers ascend by one, the first of each run and how many; none goes over `border`."""
    cut = np.flatnonzero((np.diff(places) != 1) | (places[1:] == border)) + 1
    ends = [0, *cut.tolist(), len(places)]
    return [(int(places[a]), b - a) for a, b in pairwise(ends) if a < b]


def parallel_runs(a: I32, b: I32) -> list[tuple[int, int, int]]:
    """Where both ascend by one: the first of each, and how many."""
    cut = np.flatnonzero((np.diff(a) != 1) | (np.diff(b) != 1)) + 1
    ends = [0, *cut.tolist(), len(a)]
    return [(int(a[i]), int(b[i]), j - i) for i, j in pairwise(ends) if i < j]
