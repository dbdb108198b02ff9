"""What every backend's device has: memory for arrays, and copies.

The CPU and the reference compute in host memory (`host.py`); a GPU has kernels, streams and graphs besides
(`ops/cuda/device.py`). What is written against `Memory` alone, cache, weights and residency, lies on any of them.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

# A device's array: numpy.ndarray on the host and under the emulator, cupy.ndarray on a GPU. It behaves like NumPy's
# for shape, dtype, nbytes, slicing (contiguous views) and reshape; nothing else is asked of it.
Array = Any
Dim = int | tuple[int, ...]


class Memory(Protocol):
    """Where arrays live. `name`: of the device, "host memory" where the host is one."""

    name: str

    def empty(self, shape: Dim, dtype: DTypeLike) -> Array:
        """An array with arbitrary contents, kept until the device closes."""

    def upload(self, host: NDArray[Any]) -> Array:
        """An array with what `host` holds: a copy, or `host` itself where the device is the host."""

    def write(self, array: Array, host: NDArray[Any]) -> None:
        """Copy `host` into `array`, in order with the work that is enqueued; `host` may change afterwards."""

    def read(self, array: Array) -> NDArray[Any]:
        """The values in host memory, after everything enqueued before; maybe a view that later steps overwrite."""

    def page_locked(self, n_bytes: int) -> NDArray[np.uint8]:
        """Host memory that kernels can read; `pointer` gives its address on the device."""

    def host_array(self, n_bytes: int, keep_bytes: int) -> NDArray[np.uint8]:
        """The same, used again when nobody holds it; keep_bytes: of all such memory, what may stay when nobody does."""

    def pointer(self, array: Array) -> int:
        """The address that kernels use, of a device array or of page-locked host memory."""

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        """Copy between two addresses of device or page-locked memory, in order, without waiting."""

    def copy_rows(self, to: int, to_pitch: int, source: int, source_pitch: int, n_bytes: int, n_rows: int) -> None:
        """Copy n_bytes of each of some rows, which begin a pitch apart, as `copy` does."""

    def set_bytes(self, to: int, byte: int, n_bytes: int) -> None:
        """Fill memory at an address with one byte, in order."""

    def release(self, address: int, n_bytes: int) -> int:
        """Give back the memory of a part of an array, whose address stays; how many bytes went. Contents are lost."""

    def restore(self) -> None:
        """Take again what was released, with arbitrary contents; CapacityError where it is not to be had."""

    def synchronize(self) -> None:
        """Wait for everything enqueued; a failed kernel raises here."""

    def close(self) -> None:
        """Release everything."""
