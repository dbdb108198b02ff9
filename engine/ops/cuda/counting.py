"""A device that only counts: what a model would take on a GPU, and which kernels it would launch.

Its arrays are address space without memory behind it, and nobody reads or writes what they hold.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engine.ground.unbacked import unbacked
from engine.ops.cuda.device import Argument, Array, Device, Dim, Module

ALIGN_BYTES = 256  # of every array on a device


class _Nothing:
    """A kernel, a graph, a stream: whatever is asked of it is done at once."""

    def __call__(
        self, grid: Dim, block: Dim, args: Sequence[Argument], shared_bytes: int = 0, overlap: bool = False
    ) -> None:
        """Launch nothing."""

    def launch(self) -> None:
        """Launch nothing."""


_NOTHING = _Nothing()


class CountingDevice:
    """The `Device` protocol without a device.

    n_bytes: of device memory asked for so far, each array rounded up as a device does. host_bytes: of
    page-locked memory. modules, kernels: what `kernel` and `build` were asked for. The other attributes are those of
    the device that it stands for, which kernels and scratch memory are chosen by.
    """

    name = "counting"
    compiler = "none"
    is_concurrent = True

    def __init__(self, arch: str = "sm_80", n_sm: int = 108, max_shared_bytes: int = 99 << 10) -> None:
        self.arch = arch
        self.n_sm = n_sm
        self.max_shared_bytes = max_shared_bytes
        self.n_bytes = 0
        self.host_bytes = 0
        self.modules: set[Module] = set()
        self.kernels: set[tuple[Module, str]] = set()

    @classmethod
    def like(cls, device: Device) -> CountingDevice:
        """One that stands for `device`."""
        return cls(device.arch, device.n_sm, device.max_shared_bytes)

    def build(self, modules: Sequence[Module], progress: Callable[[int, int], None]) -> None:
        """Remember the modules."""
        self.modules.update(modules)

    def kernel(self, module: Module, name: str) -> _Nothing:
        """A kernel that does nothing; its module is remembered."""
        self.modules.add(module)
        self.kernels.add((module, name))
        return _NOTHING

    def reserve(self, n_bytes: int, releasable: bool = False) -> None:
        """Nothing is served from an arena."""

    def empty(self, shape: Dim, dtype: DTypeLike) -> Array:
        """A read-only array without memory behind it."""
        array = unbacked(shape, dtype)
        self.n_bytes += -(-array.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        return array

    def upload(self, host: NDArray[Any]) -> Array:
        """An array like `host`, which is not copied."""
        return self.empty(host.shape, host.dtype)

    def write(self, array: Array, host: NDArray[Any]) -> None:
        """Copy nothing."""
        assert array.shape == host.shape, (array.shape, host.shape)

    def read(self, array: Array) -> NDArray[Any]:
        """The array itself: zeros."""
        view: NDArray[Any] = array
        return view

    def release(self, address: int, n_bytes: int) -> int:
        """Nothing was taken."""
        return 0

    def restore(self) -> None:
        """Nothing was given back."""

    def set_bytes(self, to: int, byte: int, n_bytes: int) -> None:
        """Fill nothing."""

    def page_locked(self, n_bytes: int) -> NDArray[np.uint8]:
        """Memory that the host may write, counted apart."""
        self.host_bytes += n_bytes
        return unbacked(n_bytes, np.uint8, mmap.PROT_READ | mmap.PROT_WRITE)

    def host_array(self, n_bytes: int, keep_bytes: int) -> NDArray[np.uint8]:
        """No step takes any."""
        raise AssertionError("copies in host memory are not counted")

    def pointer(self, array: Array) -> int:
        """The address of an array, which is no other's."""
        return int(array.__array_interface__["data"][0])

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        """Copy nothing."""

    def copy_rows(self, to: int, to_pitch: int, source: int, source_pitch: int, n_bytes: int, n_rows: int) -> None:
        """Copy nothing."""

    def stream(self, priority: int = 0) -> _Nothing:
        """A stream on which nothing happens."""
        return _NOTHING

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        """Do the same on any stream."""
        yield

    def wait(self, waiting: object, awaited: object) -> None:
        """Wait for nothing."""

    def capture(self, work: Callable[[], None]) -> _Nothing:
        """Run `work` for what it asks of the device."""
        work()
        return _NOTHING

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def memory_bytes(self) -> tuple[int, int]:
        """As if memory had no end."""
        return 1 << 62, 1 << 62

    def close(self) -> None:
        """Address space goes with its arrays."""
