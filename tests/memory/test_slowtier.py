"""The slow tier: every expert outside pinned slots has a place of its own, through any number of exchanges."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats.quants import QTensor
from engine.ground.errors import CapacityError
from engine.memory import slowtier
from engine.memory.residency import ExpertTensors, Residency, slot_bytes
from engine.memory.slowtier import PageLockedTier, Uploader, copy, forget, layout, tier_bytes
from engine.ops.cuda import memory
from engine.placing import policy
from engine.placing.placement import Placement

N_EXPERT, N_EMBD, N_FF = 5, 96, 64


class LateDevice:
    """Host memory whose copies happen when they are waited for: what is reused too early shows."""

    name = "late"

    def __init__(self) -> None:
        self.queue: list[tuple[int, int, int]] = []
        self.kept: list[np.ndarray] = []
        self.longest = 0

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        array = np.zeros(shape, dtype)
        self.kept.append(array)
        return array

    def page_locked(self, n_bytes: int) -> np.ndarray:
        return self.empty(n_bytes, np.uint8)

    def pointer(self, array: np.ndarray) -> int:
        return array.__array_interface__["data"][0]

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        self.queue.append((to, source, n_bytes))
        self.longest = max(self.longest, len(self.queue))

    def synchronize(self) -> None:
        for to, source, n_bytes in self.queue:
            ctypes.memmove(to, source, n_bytes)
        self.queue.clear()

    def upload(self, host: np.ndarray) -> np.ndarray:
        return host.copy()

    def read(self, array: np.ndarray) -> np.ndarray:
        return array

    def write(self, array: np.ndarray, host: np.ndarray) -> None:
        array[...] = host

    def set_bytes(self, to: int, byte: int, n_bytes: int) -> None:
        ctypes.memset(to, byte, n_bytes)


def tensors(rng: np.random.Generator, n_layer: int) -> tuple[ExpertTensors, ...]:
    """Experts of random bytes; the layers' parts differ in size, and none is a multiple of 64 bytes."""

    def stacked(qtype: QType, rows: int, cols: int) -> QTensor:
        size = {QType.Q8_0: cols // 32 * 34, QType.Q4_0: cols // 32 * 18}[qtype] * rows
        data = rng.integers(0, 256, N_EXPERT * size, dtype=np.uint8)
        return QTensor("w", qtype, (N_EXPERT, rows, cols), data)

    types = (QType.Q8_0, QType.Q4_0)
    return tuple(
        ExpertTensors(
            stacked(QType.Q4_0, N_FF - 1, N_EMBD), stacked(QType.Q4_0, N_FF - 1, N_EMBD),
            stacked(types[i % 2], N_EMBD - 1, N_FF),
        )
        for i in range(n_layer)
    )  # fmt: skip


def expert_bytes(experts: ExpertTensors, e: int) -> list[bytes]:
    return [t.expert(e).data.tobytes() for t in experts.parts]


def at(addresses: np.ndarray, sizes: tuple[int, ...]) -> list[bytes]:
    return [ctypes.string_at(int(a), n) for a, n in zip(addresses, sizes, strict=True)]


def built(experts: tuple[ExpertTensors, ...], pinned: int, cached: int) -> tuple[LateDevice, Residency]:
    """The first experts of each layer pinned, the next in cache slots."""
    L = len(experts)
    placement = Placement(
        (pinned + cached,) * L,
        (tuple(range(pinned)),) * L,
        (tuple(range(pinned, pinned + cached)),) * L,
        tuple(slot_bytes(e) for e in experts),
    )
    device = LateDevice()
    tier = PageLockedTier(device, experts, placement.pinned, Uploader(device, threads=2, staging_bytes=5000))
    residency = Residency(experts, placement, policy.LRU, device=device, tier=tier)
    assert tier.n_bytes == tier_bytes(experts, placement.pinned)
    return device, residency


def check(device: LateDevice, residency: Residency) -> None:
    """Every expert is readable where `expert_ptr` and, but for pinned ones, `home_ptr` say; no place is lost."""
    device.synchronize()
    state = residency.state
    homes = []
    for layer, experts in enumerate(residency.experts):
        for e in range(N_EXPERT):
            slot = int(state.slot_of[layer, e])
            assert at(state.expert_ptr[layer, e], experts.part_bytes) == expert_bytes(experts, e)
            pinned = slot >= 0 and bool(state.pinned[slot])
            assert pinned == (not state.home_ptr[layer, e].any())
            if not pinned:
                assert at(state.home_ptr[layer, e], experts.part_bytes) == expert_bytes(experts, e)
                homes += [(int(p), n) for p, n in zip(state.home_ptr[layer, e], experts.part_bytes, strict=True)]
    homes.sort()
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(homes))
    assert all(a % 64 == homes[0][0] % 64 for a, _ in homes)


@pytest.mark.parametrize(("pinned", "cached"), [(0, 2), (2, 0), (2, 1), (1, 3), (5, 0)])
def test_every_expert_is_where_the_tables_say(pinned: int, cached: int) -> None:
    device, residency = built(tensors(np.random.default_rng(1), 3), pinned, cached)
    check(device, residency)
    if pinned == N_EXPERT:
        assert residency.tier.n_bytes == 0


@settings(max_examples=40, deadline=None)
@given(
    pinned=st.integers(1, 4), cached=st.integers(0, 2),
    histories=st.lists(st.lists(st.integers(0, 50), min_size=2 * N_EXPERT, max_size=2 * N_EXPERT), max_size=4),
)  # fmt: skip
def test_pinned_experts_change_places_and_none_is_lost(pinned: int, cached: int, histories: list[list[int]]) -> None:
    cached = min(cached, N_EXPERT - pinned)
    device, residency = built(tensors(np.random.default_rng(2), 2), pinned, cached)
    taken = sum(a.nbytes for a in device.kept)
    for history in histories:
        counts = np.array(history, np.int64).reshape(2, N_EXPERT)
        rng = np.random.default_rng(len(history))
        residency.live.heat[...] = rng.integers(0, 1 << 36, residency.live.heat.shape)
        residency.live.clock[...] = rng.integers(1, 99, 2)
        learned = residency.live.heat.copy(), residency.live.clock.copy()
        residency.follow(counts, threshold=0.0)
        check(device, residency)
        assert np.array_equal(residency.live.heat, learned[0])  # it is an expert's, wherever that lies
        assert np.array_equal(residency.live.clock, learned[1])
        least_inside = [min(counts[y][residency.state.home_ptr[y, :, 0] == 0]) for y in range(2)]
        most_outside = [max(counts[y][residency.state.home_ptr[y, :, 0] != 0]) for y in range(2)]
        assert all(a >= b for a, b in zip(least_inside, most_outside, strict=True))
    assert sum(a.nbytes for a in device.kept) == taken


@given(
    sizes=st.lists(st.tuples(*[st.integers(1, 300)] * 3), min_size=1, max_size=4),
    n_expert=st.integers(1, 9), data=st.data(),
)  # fmt: skip
def test_places_do_not_overlap(sizes: list[tuple[int, int, int]], n_expert: int, data: st.DataObject) -> None:
    pinned = [data.draw(st.lists(st.integers(0, n_expert - 1), unique=True)) for _ in sizes]
    offsets, end = layout(sizes, n_expert, pinned)
    spans = []
    for layer, parts in enumerate(sizes):
        for e in range(n_expert):
            assert (offsets[layer, e] < 0).all() == (e in pinned[layer])
            spans += [(int(o), int(o) + n) for o, n in zip(offsets[layer, e], parts, strict=True) if o >= 0]
    spans.sort()
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert end == (-(-spans[-1][1] // 64) * 64 if spans else 0)


@pytest.mark.parametrize("staging_bytes", [1, 1000, 4096, 1 << 20])
def test_upload_reuses_its_staging_only_when_it_was_read(staging_bytes: int) -> None:
    rng = np.random.default_rng(3)
    device = LateDevice()
    sources = [rng.integers(0, 256, n, dtype=np.uint8) for n in (1, 999, 0, 3000, 7)]
    targets = [device.empty(s.nbytes, np.uint8) for s in sources]
    reported: list[tuple[int, int]] = []
    uploader = Uploader(device, threads=3, staging_bytes=staging_bytes)
    uploader.upload(
        [(s, device.pointer(t)) for s, t in zip(sources, targets, strict=True)], lambda *now: reported.append(now)
    )
    assert not device.queue and device.longest > 0
    for source, target in zip(sources, targets, strict=True):
        assert np.array_equal(source, target)
    assert reported[-1] == (4007, 4007) and sorted(reported) == reported


def test_what_is_put_comes_with_the_flush() -> None:
    device, rng = LateDevice(), np.random.default_rng(6)
    uploader = Uploader(device, threads=2, staging_bytes=777)
    hosts = [rng.random((5, 60), np.float32), rng.integers(0, 256, 3001, dtype=np.uint8)]
    arrays = [uploader.put(host) for host in hosts]
    assert uploader.waiting_bytes == 4201 and not any(array.any() for array in arrays)
    reported: list[tuple[int, int]] = []
    uploader.flush(lambda *now: reported.append(now))
    for host, array in zip(hosts, arrays, strict=True):
        assert array.dtype == host.dtype and np.array_equal(array, host)
    assert uploader.waiting_bytes == 0 and reported[-1] == (4201, 4201)


def test_copy_is_whole_whatever_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowtier, "_TASK_BYTES", 100)
    rng = np.random.default_rng(4)
    source, target = rng.integers(0, 256, 30_011, dtype=np.uint8), np.zeros(30_011, np.uint8)
    cuts = [0, 1, 99, 100, 250, 20_000, 30_011]
    base = target.__array_interface__["data"][0]
    done: list[tuple[int, int]] = []
    copy([(source[a:b], base + a) for a, b in itertools.pairwise(cuts)], 3, lambda *now: done.append(now))
    assert np.array_equal(source, target) and done[-1] == (30_011, 30_011)


def test_forgotten_pages_are_read_again_and_other_memory_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "data"
    wanted = np.random.default_rng(5).integers(0, 256, 50_000, dtype=np.uint8)
    path.write_bytes(wanted.tobytes())
    with path.open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    own = wanted.copy()
    anonymous = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
    anonymous[:] = 7
    views = [mapped[100:30_000], mapped[30_000:45_000], mapped[47_000:], own, anonymous]
    forget(views)
    assert np.array_equal(mapped, wanted) and np.array_equal(own, wanted) and (anonymous == 7).all()


# --- page-locked memory, over a runtime that only keeps books ------------------------------------------


class Runtime(ModuleType):
    """What `allocate` uses of cupy.cuda.runtime; locks `limit` bytes at most."""

    class CUDARuntimeError(RuntimeError):
        status = 2

    def __init__(self, limit: int = 1 << 40, same_pointers: int = 1) -> None:
        super().__init__("cupy.cuda.runtime")
        self.limit, self.same_pointers = limit, same_pointers
        self.registered: dict[int, int] = {}
        self.driver: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def deviceGetAttribute(self, attribute: int, device: int) -> int:  # noqa: N802
        assert (attribute, device) == (91, 0)
        return self.same_pointers

    def setDevice(self, device: int) -> None:  # noqa: N802
        assert device == 0

    def hostRegister(self, address: int, n_bytes: int, flags: int) -> None:  # noqa: N802
        with self._lock:
            assert flags == 3 and address % mmap.PAGESIZE == 0
            if sum(self.registered.values()) + n_bytes > self.limit:
                raise self.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
            self.registered[address] = n_bytes

    def hostUnregister(self, address: int) -> None:  # noqa: N802
        del self.registered[address]

    def hostAlloc(self, n_bytes: int, flags: int) -> int:  # noqa: N802
        if n_bytes > self.limit:
            raise self.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        array = np.ones(n_bytes, np.uint8)
        self.driver[array.__array_interface__["data"][0]] = array
        return array.__array_interface__["data"][0]

    def freeHost(self, address: int) -> None:  # noqa: N802
        del self.driver[address]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made, cupy, cuda = Runtime(), ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.cuda, cuda.runtime = cuda, made
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.runtime", made)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(memory, "_SMALL_BYTES", 1 << 20)
    monkeypatch.setattr(memory, "_GROWTH_S", 0.2)
    return made


@pytest.mark.parametrize("threads", [1, 3])
def test_large_memory_is_registered_in_pieces_without_gaps(runtime: Runtime, threads: int) -> None:
    n_bytes = (9 << 20) + 12345
    locked = memory.allocate(n_bytes, threads=threads, piece_bytes=2 << 20)
    assert locked.array.nbytes == n_bytes and not locked.array.any()
    spans = sorted(runtime.registered.items())
    assert spans[0][0] == locked.device_pointer and spans[0][0] % memory.HUGE_PAGE_BYTES == 0
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(spans)) and sum(n for _, n in spans) == n_bytes
    locked.array[:] = 7
    locked.close()
    locked.close()
    assert not runtime.registered and not runtime.driver


def test_what_the_host_does_not_lock_is_named_and_given_back(runtime: Runtime) -> None:
    runtime.limit = 5 << 20
    with pytest.raises(CapacityError, match=r"0\.01 GiB .* are needed.* gave 0\.00 GiB \(cudaErrorMemoryAllocation"):
        memory.allocate(12 << 20, threads=2, piece_bytes=2 << 20)
    assert not runtime.registered


def test_memory_that_the_machine_does_not_have_is_not_touched(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: memory.SPARE_BYTES + (3 << 20))
    with pytest.raises(CapacityError, match=r"0\.5 GiB of host memory are free"):
        memory.allocate(12 << 20, threads=2, piece_bytes=4 << 20)
    assert not runtime.registered
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    memory.allocate(12 << 20, threads=2).close()


def test_the_driver_allocates_what_is_small_or_cannot_be_registered(runtime: Runtime) -> None:
    for n_bytes in (0, 1000):
        locked = memory.allocate(n_bytes)
        assert locked.array.nbytes == n_bytes and len(runtime.driver) == 1
        locked.close()
    runtime.same_pointers = 0
    locked = memory.allocate(4 << 20)
    assert runtime.driver and not runtime.registered
    locked.close()
    assert not runtime.driver
    assert (memory.available_bytes() or 1) > 0
