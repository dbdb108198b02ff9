"""What the wrappers need of a GPU, and nothing more: arrays, kernels, streams, graphs.

gpu.py has the CuPy one; `tests/emulated_device.py` has the same methods over host memory and the kernels
compiled for the CPU, so every wrapper, and the whole engine, also runs where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from engine.ops.device import Array as Array
from engine.ops.device import Dim as Dim
from engine.ops.device import Memory

Stream = Any  # an order of work: `with device.on(stream):` enqueues there
# Of a kernel: an array, None (null), int (as int32), float (as float32), or a NumPy scalar for other types.
Argument = Any


@dataclass(frozen=True, slots=True, order=True)
class Module:
    """One compilation: a file of cuda/ and the macros it is compiled with, as (name, value) pairs."""

    file: str
    defines: tuple[tuple[str, str], ...] = ()


class Kernel(Protocol):
    """A compiled kernel; launching it only enqueues."""

    def __call__(
        self, grid: Dim, block: Dim, args: Sequence[Argument], shared_bytes: int = 0, overlap: bool = False
    ) -> None:
        """Enqueue on the device's current stream; `shared_bytes` of dynamic shared memory.

        overlap: the kernel may begin before the one ahead of it has ended, where the device can do that; it has to
        call dependency_wait (cuda/ptx.cuh).
        """


class Graph(Protocol):
    """Captured work."""

    def launch(self) -> None:
        """Enqueue everything that was captured, on the device's current stream."""


class Device(Memory, Protocol):
    """A GPU, as the engine sees it. `arch` like "sm_90"; `n_sm`; `max_shared_bytes` of a block; `compiler` of kernels.

    is_concurrent: kernels of two streams run at the same time, so that one may wait for what the other writes.
    Arrays are 256-byte aligned. Copies, `write` and `set_bytes` go in order with the current stream.
    """

    arch: str
    n_sm: int
    max_shared_bytes: int
    compiler: str
    is_concurrent: bool

    def build(self, modules: Sequence[Module], progress: Callable[[int, int], None]) -> None:
        """Compile (or load from the disk cache) several modules at once."""

    def kernel(self, module: Module, name: str) -> Kernel:
        """A kernel of a module; builds the module if `build` did not."""

    def reserve(self, n_bytes: int, releasable: bool = False) -> None:
        """Take the one arena that `empty` serves from; before this `empty` allocates singly.

        releasable: parts of it can be given back by `release`.
        """

    def stream(self, priority: int = 0) -> Stream:
        """A new stream; a negative priority goes first."""

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Enqueue on another stream within the block."""

    def wait(self, waiting: Stream | None, awaited: Stream | None) -> None:
        """Make one stream wait for all that is now enqueued on another; None is the main stream. Works in a capture."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` enqueues on the main stream (and on streams that wait for it), running nothing."""

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
