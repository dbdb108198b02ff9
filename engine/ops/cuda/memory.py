"""Page-locked host memory, which the copy engine and kernels read over PCIe at full speed.

The driver's own allocator faults and locks pages in one thread. Large memory is therefore mapped here, in huge
pages where the kernel gives them, and touched and registered piece by piece in several threads.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_uint8
from pathlib import Path

import numpy as np

from engine.ground.errors import CapacityError
from engine.ops import U8

HUGE_PAGE_BYTES = 2 << 20
PIECE_BYTES = 256 << 20
SPARE_BYTES = 512 << 20  # what the rest of the machine keeps
_SMALL_BYTES = 64 << 20  # below this the driver's allocator is as fast
_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped; the same bits for cudaHostAlloc
_SAME_POINTERS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_GROWTH_S = 5.0  # how long memory that a virtual machine gets on demand is waited for
GIB = 1 << 30


class PageLocked:
    """Page-locked memory: `array`, uint8 [n_bytes], at the same address for the host and every device.

    `close` unlocks it; nothing may use it after that.
    """

    def __init__(self, array: U8, pieces: list[int], memory: mmap.mmap | None) -> None:
        self.array = array
        self._pieces = pieces  # addresses to unregister, or the one of cudaHostAlloc where `memory` is None
        self._memory = memory

    @property
    def seams(self) -> list[int]:
        """Addresses inside at which pieces that were registered apart meet: a copy must not cross one."""
        return sorted(self._pieces)[1:] if self._memory is not None else []

    @property
    def device_pointer(self) -> int:
        """The address that kernels use."""
        return int(self.array.__array_interface__["data"][0])

    def __del__(self) -> None:
        # Memory that is unmapped while it is registered leaves its addresses taken for the whole process.
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """Unlock and release the memory; may be called twice."""
        from cupy.cuda import runtime

        release = runtime.freeHost if self._memory is None else runtime.hostUnregister
        while self._pieces:
            release(self._pieces.pop())
        self.array = np.empty(0, np.uint8)
        if self._memory is not None:
            with contextlib.suppress(BufferError):  # somebody still holds a view: the pages go with the last
                self._memory.close()


def allocate(
    n_bytes: int, device: int = 0, *, threads: int = 8, piece_bytes: int = PIECE_BYTES, huge_pages: bool = True,
    by_driver_bytes: int | None = None, seams: bool = True, growth_s: float | None = None,
) -> PageLocked:  # fmt: skip
    """Page-locked memory with contents of zero, mapped for the device.

    device: the CUDA device whose context the threads use. threads: how many touch and register pieces of
    `piece_bytes`. huge_pages: ask for them; registering costs by the page. Less than by_driver_bytes is the driver's to
    allocate. seams: without, several threads touch, and one registers everything. Where the host has or locks less,
    everything is released and a CapacityError says how much there was. growth_s: how long is waited for more.
    """
    from cupy.cuda import runtime

    least = _SMALL_BYTES if by_driver_bytes is None else by_driver_bytes
    if n_bytes < least or not runtime.deviceGetAttribute(_SAME_POINTERS, device):
        return _allocate_by_driver(n_bytes)
    try:
        memory = mmap.mmap(-1, n_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # a machine that promises no more than it has
        raise _too_little(n_bytes, 0, error) from None
    # A child must not share locked pages: its parent would then write to copies that the device does not see.
    for advice in (mmap.MADV_HUGEPAGE,) * huge_pages + (mmap.MADV_DONTFORK,):
        with contextlib.suppress(OSError):  # a kernel built without
            memory.madvise(advice)
    whole = np.frombuffer(memory, np.uint8)
    start = -_address(whole) % HUGE_PAGE_BYTES
    array = whole[start : start + n_bytes]
    claims = _Claims(_GROWTH_S if growth_s is None else growth_s)
    errors: list[Exception] = []
    registered: list[U8] = []

    def lock(piece: U8, touches: bool, registers: bool) -> None:
        if errors:
            return
        try:
            if touches:
                with claims.claim(piece.nbytes):
                    piece[:: mmap.PAGESIZE] = 0
            if registers:
                runtime.setDevice(device)
                runtime.hostRegister(_address(piece), piece.nbytes, _PORTABLE_MAPPED)
                registered.append(piece)
        except (MemoryError, runtime.CUDARuntimeError) as error:
            errors.append(error)

    step = max(HUGE_PAGE_BYTES, min(piece_bytes, -(-n_bytes // threads)))
    step = -(-step // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    with ThreadPoolExecutor(threads, thread_name_prefix="page-lock") as pool:
        list(pool.map(lambda i: lock(array[i : i + step], True, seams), range(0, n_bytes, step)))
    if not seams:
        lock(array, False, True)
    locked = PageLocked(array, [_address(piece) for piece in registered], memory)
    if errors:
        n_locked = sum(piece.nbytes for piece in registered)
        locked.close()
        raise _too_little(n_bytes, n_locked, errors[0])
    return locked


def available_bytes() -> int | None:
    """Host memory that can be taken without swapping, as the kernel and the cgroup estimate it; None: unknown."""
    found = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        found.append(_fields("/proc/meminfo")["MemAvailable:"] << 10)
    with contextlib.suppress(OSError, KeyError, ValueError):
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        cache = _fields(str(group / "memory.stat"))
        limit = int((group / "memory.max").read_text())
        found.append(limit - used + cache["inactive_file"] + cache["active_file"])
    return min(found, default=None)


def _fields(path: str) -> dict[str, int]:
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}


class _Claims:
    """Hands out memory that the machine has: one that runs out of it kills a process, and likely this one."""

    def __init__(self, growth_s: float) -> None:
        self._lock = threading.Lock()
        self._growth_s = growth_s
        self._claimed_bytes = 0  # promised and not yet touched

    @contextlib.contextmanager
    def claim(self, n_bytes: int) -> Iterator[None]:
        """Within the block `n_bytes` may be touched; MemoryError where they are not there and do not come."""
        with self._lock:
            end_s = time.monotonic() + self._growth_s
            while (free := available_bytes()) is not None and free < self._claimed_bytes + n_bytes + SPARE_BYTES:
                if time.monotonic() >= end_s:
                    self._growth_s = 0.0  # for those that wait behind
                    raise MemoryError(f"{free / GIB:.1f} GiB of host memory are free")
                time.sleep(0.05)
            self._claimed_bytes += n_bytes
        try:
            yield
        finally:
            with self._lock:
                self._claimed_bytes -= n_bytes


def _allocate_by_driver(n_bytes: int) -> PageLocked:
    from cupy.cuda import runtime

    try:
        address = runtime.hostAlloc(max(n_bytes, 1), _PORTABLE_MAPPED)
    except runtime.CUDARuntimeError as error:
        raise _too_little(n_bytes, 0, error) from None
    array = np.ctypeslib.as_array((c_uint8 * n_bytes).from_address(address)) if n_bytes else np.empty(0, np.uint8)
    return PageLocked(array, [address], None)


def _too_little(n_bytes: int, n_locked: int, error: Exception) -> CapacityError:
    return CapacityError(
        f"{n_bytes / GIB:.2f} GiB of page-locked host memory are needed, and this machine gave "
        f"{n_locked / GIB:.2f} GiB ({error})",
        hint="pin more experts on the device (a larger --vram or --residency, fewer --cache-slots), free host memory, "
        "or raise the limits of the container or of WSL, and ulimit -l",
    )


def _address(array: U8) -> int:
    return int(array.__array_interface__["data"][0])
