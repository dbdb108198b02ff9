"""The slow tier of a GPU: page-locked copies of the experts outside pinned slots, and loading at full speed.

A *place* holds one expert of one layer: gate, up, down one after the other, each 64-byte aligned. A pinned expert has
no place. When a pinned expert changes between requests, the one that leaves takes over the place of the one that
enters, so the tier never grows. `home_ptr` says who lies where; it is all the bookkeeping there is.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.memory.residency import ExpertTensors, Piece, Progress, slot_bytes
from engine.ops import U8
from engine.ops.cuda.device import Array
from engine.ops.device import Memory
from engine.placing.placement import Placement
from engine.placing.policy import SlotState

ALIGN_BYTES = 64
STAGING_BYTES = 64 << 20  # of each of the two halves that uploads go through
_TASK_BYTES = 4 << 20  # a thread copies so much at a time
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Locking(Memory, Protocol):
    """What the tier and its uploader ask of a device beside that."""

    def page_locked(self, n_bytes: int) -> NDArray[np.uint8]:
        """Host memory that kernels can read."""

    def synchronize(self) -> None:
        """Wait for everything enqueued."""


def layout(
    part_bytes: Sequence[tuple[int, int, int]], n_expert: int, pinned: Sequence[Sequence[int]]
) -> tuple[NDArray[np.int64], int]:
    """Offsets int64 [L, E, 3] of the experts' parts, -1 for pinned experts, and the bytes of all places.

    part_bytes: of one expert of each layer: gate, up, down. pinned: each layer's pinned experts.
    """
    offsets = np.full((len(part_bytes), n_expert, 3), -1, np.int64)
    end = 0
    for layer, sizes in enumerate(part_bytes):
        outside = np.setdiff1d(np.arange(n_expert), np.asarray(pinned[layer], np.int64))
        starts = np.cumsum([0, *(_aligned(size) for size in sizes)])
        offsets[layer, outside] = end + np.arange(outside.size)[:, None] * starts[3] + starts[:3]
        end += outside.size * int(starts[3])
    return offsets, end


class PageLockedTier:
    """Experts outside pinned slots, in page-locked memory of `device`; a tier of `engine.memory.residency`.

    experts: one record a MoE layer, views of the mapped file. pinned: each layer's experts that need no place.
    uploader: what fills the device's slots. CapacityError where the host does not lock `n_bytes`.
    """

    def __init__(
        self,
        device: Locking,
        experts: tuple[ExpertTensors, ...],
        pinned: Sequence[Sequence[int]],
        uploader: Uploader,
    ) -> None:
        self.device = device
        self.experts = experts
        n_expert = experts[0].gate.shape[0] if experts else 0  # a model may have none
        self._offsets, self.n_bytes = layout([e.part_bytes for e in experts], n_expert, pinned)
        self._memory = device.page_locked(self.n_bytes) if self.n_bytes else np.empty(0, np.uint8)
        self._uploader = uploader
        self._passage = device.empty(max(max(e.part_bytes) for e in experts), np.uint8) if self.n_bytes else None

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All places, page-locked."""
        return self._memory

    def locate(self, state: SlotState) -> None:
        """Set `home_ptr` of every expert; that of a pinned one is 0."""
        placed = self._offsets >= 0
        base = self.device.pointer(self._memory) if self.n_bytes else 0
        state.home_ptr[...] = 0
        state.home_ptr[placed] = (base + self._offsets[placed]).astype(np.uint64)

    def load(self, pieces: Sequence[Piece], progress: Progress) -> None:
        """Fill the device's slots with `pieces` and the tier with its own experts; progress in bytes of both."""
        own = self._pieces()
        n_slots, n_own = (sum(source.nbytes for source, _ in part) for part in (pieces, own))
        self._uploader.upload(pieces, lambda done, _: progress(done, n_slots + n_own))
        copy(own, self._uploader.threads, lambda done, _: progress(n_slots + done, n_slots + n_own))
        forget([tensor.data for experts in self.experts for tensor in experts.parts])

    def fill(self, pieces: Sequence[Piece], progress: Progress = lambda done, total: None) -> None:
        """Fill the device's slots with `pieces`; progress in bytes."""
        self._uploader.upload(pieces, progress)

    def _pieces(self) -> list[Piece]:
        base = self._memory.__array_interface__["data"][0]
        return [
            (tensor.expert(int(e)).data, base + int(self._offsets[layer, e, part]))
            for layer, experts in enumerate(self.experts)
            for part, tensor in enumerate(experts.parts)
            for e in np.flatnonzero(self._offsets[layer, :, 0] >= 0)
        ]

    def exchange(self, state: SlotState, layer: int, enters: int, leaves: int, slot: int) -> None:
        """Swap the bytes of `leaves`, in `slot`, with those of `enters`, at the home that is then that of `leaves`."""
        copy_bytes = self.device.copy
        passage = self.device.pointer(self._passage)
        for part, size in enumerate(self.experts[layer].part_bytes):
            inside, home = int(state.slot_ptr[slot, part]), int(state.home_ptr[layer, enters, part])
            copy_bytes(passage, home, size)
            copy_bytes(home, inside, size)
            copy_bytes(inside, passage, size)
        _hand_over(state, layer, enters, leaves)

    def rehome(self, state: SlotState, layer: int, enters: int, leaves: int, slot: int) -> None:
        """`enters` becomes pinned in the cache slot it lies in; `leaves`, in `slot`, gets its home and a copy there."""
        for part, size in enumerate(self.experts[layer].part_bytes):
            self.device.copy(int(state.home_ptr[layer, enters, part]), int(state.slot_ptr[slot, part]), size)
        _hand_over(state, layer, enters, leaves)

    def close(self) -> None:
        """The device owns the memory."""


def tier_bytes(experts: Sequence[ExpertTensors], pinned: Sequence[Sequence[int]]) -> int:
    """Bytes of page-locked memory that a tier takes; the same sum as `layout`'s."""
    return sum((e.gate.shape[0] - len(set(inside))) * slot_bytes(e) for e, inside in zip(experts, pinned, strict=True))


def _hand_over(state: SlotState, layer: int, enters: int, leaves: int) -> None:
    """The bookkeeping of both exchanges: one place, another tenant."""
    assert state.home_ptr[layer, enters].all() and not state.home_ptr[layer, leaves].any()
    state.home_ptr[layer, leaves] = state.home_ptr[layer, enters]
    state.home_ptr[layer, enters] = 0


def loaded_bytes(experts: Sequence[ExpertTensors], placement: Placement) -> int:
    """Bytes that `PageLockedTier.load` copies: of what starts in a slot, and of what has a place."""
    return sum(
        sum(e.part_bytes) * (len(inside) + e.gate.shape[0] - len(pinned))
        for e, inside, pinned in zip(experts, placement.residents, placement.pinned, strict=True)
    )


class Uploader:
    """Copies host memory to a device through two page-locked halves, filled by threads.

    While the copy engine reads one half, the threads fill the other. threads: that copy; staging_bytes: of a half.
    """

    def __init__(self, device: Locking, threads: int, staging_bytes: int = STAGING_BYTES) -> None:
        self.device = device
        self.threads = threads
        self._halves = [device.page_locked(staging_bytes) for _ in range(2)]
        self._addresses = [int(half.__array_interface__["data"][0]) for half in self._halves]
        self._waiting: list[Piece] = []

    @property
    def waiting_bytes(self) -> int:
        """Bytes that `put` took and `flush` will copy."""
        return sum(source.nbytes for source, _ in self._waiting)

    def put(self, host: NDArray[Any]) -> Array:
        """An array on the device like `host`, contiguous, whose bytes come with the next `flush`."""
        array = self.device.empty(host.shape, host.dtype)
        self._waiting.append((host.reshape(-1).view(np.uint8), self.device.pointer(array)))
        return array

    def flush(self, progress: Progress = lambda done, total: None) -> None:
        """Upload what was put."""
        self.upload(self._waiting, progress)
        self._waiting = []

    def upload(self, pieces: Sequence[Piece], progress: Progress = lambda done, total: None) -> None:
        """Copy each piece to its address on the device; returns when all have arrived. Progress in bytes."""
        total, done = sum(source.nbytes for source, _ in pieces), 0
        device = self.device
        with ThreadPoolExecutor(self.threads, thread_name_prefix="upload") as pool:
            for turn, batch in enumerate(_batches(pieces, self._halves[0].nbytes)):
                half, address = self._halves[turn % 2], self._addresses[turn % 2]
                fill, at = [], 0
                for source, _ in batch:
                    fill.append((source, address + at))
                    at += source.nbytes
                _run(pool, fill)
                device.synchronize()  # the other half has been read: it is filled next
                base, at = device.pointer(half), 0
                for source, to in batch:
                    device.copy(to, base + at, source.nbytes)
                    at += source.nbytes
                done += at
                progress(done, total)
        device.synchronize()
        forget([source for source, _ in pieces])


def copy(pieces: Sequence[Piece], threads: int, progress: Progress = lambda done, total: None) -> None:
    """Copy each piece to its address in host memory, in several threads. Progress in bytes, in this thread."""
    total, done = sum(source.nbytes for source, _ in pieces), 0
    with ThreadPoolExecutor(threads, thread_name_prefix="copy") as pool:
        for batch in _batches(pieces, threads * 16 * _TASK_BYTES):
            _run(pool, batch)
            done += sum(source.nbytes for source, _ in batch)
            progress(done, total)


def forget(sources: Sequence[U8]) -> None:
    """Let the kernel have back the pages of mapped files behind these views, unless somebody reads them again.

    The views stay valid. Memory that is not a mapped file's is left alone.
    """
    spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    files: dict[int, mmap.mmap] = {}
    for view in sources:
        file = _mapping(view)
        if file is not None:
            files[id(file)] = file
            spans[id(file)].append((_address(view), view.nbytes))
    for key, file in files.items():
        base = _address(np.frombuffer(file, np.uint8))
        for start, stop in _merged(sorted((a - base, a - base + n) for a, n in spans[key])):
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if first < stop:
                file.madvise(mmap.MADV_DONTNEED, first, (stop - first) // mmap.PAGESIZE * mmap.PAGESIZE)


def _mapping(view: U8) -> mmap.mmap | None:
    """The read-only mapping of a file that a view looks into, None for any other memory."""
    base: object = view
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) and not view.flags.writeable else None


def _merged(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sorted spans, those that touch made one."""
    held: tuple[int, int] | None = None
    for start, stop in spans:
        if held is not None and start <= held[1]:
            held = held[0], max(held[1], stop)
            continue
        if held is not None:
            yield held
        held = start, stop
    if held is not None:
        yield held


def _batches(pieces: Sequence[Piece], n_bytes: int) -> Iterator[list[Piece]]:
    """The pieces in order, in batches of exactly `n_bytes` but for the last; a piece may be cut."""
    batch: list[Piece] = []
    room = n_bytes
    for source, to in pieces:
        at = 0
        while at < source.nbytes:
            size = min(room, source.nbytes - at)
            batch.append((source[at : at + size], to + at))
            at += size
            room -= size
            if not room:
                yield batch
                batch, room = [], n_bytes
    if batch:
        yield batch


def _run(pool: ThreadPoolExecutor, pieces: Sequence[Piece]) -> None:
    """Copy pieces on the threads of `pool`, returning when all is done."""
    tasks: list[Future[None]] = [pool.submit(_copy_some, task) for task in _batches(pieces, _TASK_BYTES)]
    wait(tasks)
    for task in tasks:
        task.result()


def _copy_some(pieces: Sequence[Piece]) -> None:
    for source, to in pieces:
        address = _address(source)
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        # Mapping the pages at once is cheaper than a fault for each few; where the kernel cannot, they fault.
        _libc.madvise(start, address + source.nbytes - start, _POPULATE_READ)
        ctypes.memmove(to, address, source.nbytes)


def _address(array: U8) -> int:
    return int(array.__array_interface__["data"][0])


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES
