"""The arrays of a layer's cache: those of its pool on the device, and those that are its homes in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
class Rows:
    """Where as many rows of bytes begin. pitch: bytes from each to the next, where they are alike; else 0."""

    addresses: tuple[int, ...]
    pitch: int

    @classmethod
    def of(cls, addresses: Sequence[int]) -> Rows:
        """Rows at any addresses."""
        apart = {b - a for a, b in pairwise(addresses)}
        return cls(tuple(addresses), max(0, *apart) if len(apart) == 1 else 0)

    @classmethod
    def apart(cls, address: int, pitch: int, n_rows: int) -> Rows:
        """Rows that are a pitch apart."""
        return cls(tuple(address + i * pitch for i in range(n_rows)), pitch)


@dataclass(frozen=True, slots=True)
class Column:
    """One array of each layer of a group: of all keys, say. block_bytes: of a block in one of them."""

    pool: Rows
    homes: Rows | None
    block_bytes: int


def columns_of(device: Memory, stores: Sequence[Store]) -> tuple[Column, ...]:
    """The arrays of a group's layers, which are alike."""
    pools, homes = zip(*(store.pool for store in stores), strict=True), [store.homes for store in stores]
    found = []
    for i, pool in enumerate(pools):
        n_bytes = int(pool[0].nbytes) // (len(pool[0]) // KV_BLOCK_TOKENS)
        own = tuple(device.pointer(arrays[i]) for arrays in homes if arrays is not None)
        # Homes are locked apart, and one call must not reach from one to the next, whatever lies between.
        there = Rows(own, 0) if own else None
        found.append(Column(Rows.of([device.pointer(array) for array in pool]), there, n_bytes))
    return tuple(found)


def copy_rows(device: Memory, to: Rows, to_at: int, source: Rows, source_at: int, n_bytes: int) -> None:
    """Copy n_bytes of each row, from and to a distance behind where it begins, as `Memory.copy` does."""
    if to.pitch >= n_bytes and source.pitch >= n_bytes:
        n_rows, first, begin = len(to.addresses), to.addresses[0] + to_at, source.addresses[0] + source_at
        device.copy_rows(first, to.pitch, begin, source.pitch, n_bytes, n_rows)
        return
    for a, b in zip(to.addresses, source.addresses, strict=True):
        device.copy(a + to_at, b + source_at, n_bytes)


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


def runs_of(places: Sequence[int], border: int) -> list[tuple[int, int]]:
    """Where numbers ascend by one, the first of each run and how many; none goes over `border`."""
    runs: list[tuple[int, int]] = []
    first, n = 0, 0
    for place in places:  # of a chunk: they are few, and arrays would cost more
        if n and place == first + n != border:
            n += 1
            continue
        if n:
            runs.append((first, n))
        first, n = place, 1
    return [*runs, (first, n)] if n else runs


def parallel_runs(a: I32, b: I32) -> list[tuple[int, int, int]]:
    """Where both ascend by one: the first of each, and how many."""
    cut = np.flatnonzero((np.diff(a) != 1) | (np.diff(b) != 1)) + 1
    ends = [0, *cut.tolist(), len(a)]
    return [(int(a[i]), int(b[i]), j - i) for i, j in pairwise(ends) if i < j]
