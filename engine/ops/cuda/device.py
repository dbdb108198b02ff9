"""What the wrappers need of a GPU, and nothing more: arrays, kernels, streams, graphs.

`Device` is the CuPy one (gpu.py); `tests/emulated_device.py` has the same methods over host memory and the
kernels compiled for the CPU, so every wrapper, and the whole engine, also runs where there is no GPU. An array
of a device behaves like NumPy's for shape, dtype, slicing (contiguous views) and reshape; nothing else is
asked of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = Any  # a device's array: cupy.ndarray, or numpy.ndarray under the emulator
Dim = int | tuple[int, ...]
Stream = Any  # an order of work: `with device.on(stream):` enqueues there


@dataclass(frozen=True, slots=True, order=True)
class Module:
    """One compilation: a file of cuda/ and the macros it is compiled with, as (name, value) pairs."""

    file: str
    defines: tuple[tuple[str, str], ...] = ()


class Kernel(Protocol):
    """A compiled kernel; launching it only enqueues.

    args: device arrays, None (null), int (as int32), float (as float32), or NumPy scalars for other types.
    """

    def __call__(
        self, grid: Dim, block: Dim, args: Sequence[Any], shared_bytes: int = 0, overlap: bool = False
    ) -> None:
        """Enqueue on the device's current stream; `shared_bytes` of dynamic shared memory.

        overlap: the kernel may begin before the one ahead of it has ended, where the device can do that; it has to
        call dependency_wait (cuda/ptx.cuh).
        """


class Graph(Protocol):
    """Captured work."""

    def launch(self) -> None:
        """Enqueue everything that was captured, on the device's current stream."""


class Device(Protocol):
    """A GPU, as the engine sees it. `arch` like "sm_90"; `n_sm`; `max_shared_bytes` of a block."""

    name: str
    arch: str
    n_sm: int
    max_shared_bytes: int

    def build(self, modules: Sequence[Module], progress: Callable[[int, int], None]) -> None:
        """Compile (or load from the disk cache) several modules at once."""

    def kernel(self, module: Module, name: str) -> Kernel:
        """A kernel of a module; builds the module if `build` did not."""

    def reserve(self, n_bytes: int) -> None:
        """Take the one arena that `empty` serves from; before this `empty` allocates singly."""

    def empty(self, shape: Dim, dtype: DTypeLike) -> Array:
        """An array with arbitrary contents, 256-byte aligned, kept until the device closes."""

    def upload(self, host: NDArray[Any]) -> Array:
        """A new array with a copy of `host`."""

    def write(self, array: Array, host: NDArray[Any]) -> None:
        """Copy `host` into `array`, in order with the current stream; `host` may change afterwards."""

    def read(self, array: Array) -> NDArray[Any]:
        """A copy in host memory, after everything enqueued before."""

    def set_bytes(self, to: int, byte: int, n_bytes: int) -> None:
        """Fill device memory at an address with one byte, in stream order."""

    def page_locked(self, n_bytes: int) -> NDArray[np.uint8]:
        """Host memory that kernels can read; `pointer` gives its address on the device."""

    def host_array(self, n_bytes: int, keep_bytes: int) -> NDArray[np.uint8]:
        """Page-locked memory that is used again when nobody holds it; keep_bytes: so much may wait for that."""

    def pointer(self, array: Array | NDArray[Any]) -> int:
        """The address that kernels use, of a device array or of page-locked host memory."""

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        """Copy between two addresses of device or page-locked memory, in stream order, without waiting."""

    def stream(self, priority: int = 0) -> Stream:
        """A new stream; a negative priority goes first."""

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Enqueue on another stream within the block."""

    def wait(self, waiting: Stream | None, awaited: Stream | None) -> None:
        """Make one stream wait for all that is now enqueued on another; None is the main stream. Works in a capture."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` enqueues on the main stream (and on streams that wait for it), running nothing."""

    def synchronize(self) -> None:
        """Wait for everything enqueued; a failed kernel raises here."""

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""

    def close(self) -> None:
        """Release everything."""
