"""Kernels from source to machine code: inlining, NVRTC, the disk cache; and opening a GPU where there is none."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.ground.digest import kernels
from engine.ground.errors import CapacityError, MissingExtraError, SparkError
from engine.ground.install import requirement
from engine.ops.cuda import gpu, library
from engine.ops.cuda.device import Module

GOOD = Module("good.cu", (("N", "3"),))


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "one.cuh").write_text("#pragma once\ntypedef int one;\n")
    (folder / "two.cuh").write_text('#pragma once\n#include "one.cuh"  // for one\ntypedef int two;\n')
    (folder / "good.cu").write_text(
        '#include "two.cuh"\n#include "one.cuh"\nextern "C" __global__ void k(int* x) { *x = N; }\n'
    )
    (folder / "bad.cu").write_text("\n".join(f"__device__ int a{i} = missing{i};" for i in range(99)))
    (folder / "cycle.cu").write_text('#include "a.cuh"\n')
    (folder / "a.cuh").write_text('#include "b.cuh"\n')
    (folder / "b.cuh").write_text('#include "a.cuh"\n')
    (folder / "lost.cu").write_text('#include "nowhere.cuh"\n')
    monkeypatch.setattr(library, "kernels", lambda: folder)
    return folder


def test_includes_are_inlined_once_and_lines_kept(sources: Path) -> None:
    text = library.source(GOOD)
    assert text.startswith("#define N 3\n#line 1")
    assert "#include" not in text and "#pragma once" not in text
    assert text.count("typedef int one;") == text.count("typedef int two;") == 1
    file, line, lines = "", 0, {}
    for row in text.splitlines():
        if row.startswith("#line"):
            line, file = int(row.split()[1]) - 1, row.split('"')[1]
        else:
            line += 1
            lines[row] = (file, line)
    assert lines["typedef int one;"] == ("one.cuh", 2)
    assert lines["typedef int two;"] == ("two.cuh", 3)
    assert next(v for k, v in lines.items() if "void k" in k) == ("good.cu", 3)


def test_broken_includes_are_errors(sources: Path) -> None:
    with pytest.raises(SparkError, match=r"includes itself: cycle.cu -> a.cuh -> b.cuh -> a.cuh"):
        library.source(Module("cycle.cu"))
    with pytest.raises(SparkError, match=r"nowhere.cuh, which lost.cu includes, is missing in"):
        library.source(Module("lost.cu"))


def test_another_folder_goes_first(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "one.cuh").write_text("typedef int other;\n")
    text = library.source(GOOD, (tmp_path, sources))
    assert "typedef int other;" in text and "typedef int one;" not in text and "typedef int two;" in text


def test_the_kernels_are_found() -> None:
    assert (kernels() / "ptx.cuh").is_file()


@pytest.fixture(scope="module")
def nvrtc() -> library.Nvrtc:
    return library.find_nvrtc()


class NoNvrtc:
    """Fails when it is asked to compile."""

    def __init__(self, nvrtc: library.Nvrtc) -> None:
        self.version, self.target, self.compiled = nvrtc.version, nvrtc.target, 0

    def compile(self, text: str, module: Module, arch: str) -> bytes:
        self.compiled += 1
        return b"compiled again"


def test_images_are_cached_on_disk(sources: Path, tmp_path: Path, nvrtc: library.Nvrtc) -> None:
    cache = tmp_path / "some" / "cache"
    image = library.Compiler("sm_80", nvrtc, cache).image(GOOD)
    assert image[:4] == b"\x7fELF"
    (entry,) = cache.iterdir()
    assert entry.name.startswith("good-") and entry.suffix == ".bin"

    absent = NoNvrtc(nvrtc)
    compiler = library.Compiler("sm_80", absent, cache)
    assert compiler.image(GOOD) == image == compiler.image(GOOD)
    assert absent.compiled == 0
    for arch, module in (("sm_90", GOOD), ("sm_80", Module("good.cu", (("N", "4"),)))):
        assert library.Compiler(arch, absent, cache).image(module) == b"compiled again"
    (sources / "one.cuh").write_text("typedef int changed;\n")
    assert library.Compiler("sm_80", absent, cache).image(GOOD) == b"compiled again"


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:40] + b"x" + b[41:]])
def test_corrupt_entries_are_compiled_again(sources: Path, tmp_path: Path, nvrtc: library.Nvrtc, damage: Any) -> None:
    image = library.Compiler("sm_80", nvrtc, tmp_path / "c").image(GOOD)
    (entry,) = (tmp_path / "c").iterdir()
    good = entry.read_bytes()
    entry.write_bytes(damage(good))
    assert library.Compiler("sm_80", nvrtc, tmp_path / "c").image(GOOD) == image
    assert entry.read_bytes() == good


def test_a_cache_that_cannot_be_written_is_done_without(sources: Path, tmp_path: Path, nvrtc: library.Nvrtc) -> None:
    (tmp_path / "file").write_text("")
    assert library.Compiler("sm_80", nvrtc, tmp_path / "file" / "cache").image(GOOD)[:4] == b"\x7fELF"


def test_build_reports_progress(sources: Path, tmp_path: Path, nvrtc: library.Nvrtc) -> None:
    compiler = library.Compiler("sm_80", nvrtc, tmp_path / "c")
    modules = [Module("good.cu", (("N", str(n)),)) for n in range(4)]
    seen: list[tuple[int, int, bool]] = []
    here = threading.get_ident()
    compiler.build([*modules, modules[0]], lambda *p: seen.append((*p, threading.get_ident() == here)))
    assert seen == [(n, 4, True) for n in range(5)]
    compiler.build(modules, lambda done, total: seen.append((done, total, True)))
    assert seen[5:] == [(0, 0, True)]
    with pytest.raises(SparkError, match=r"bad.cu does not compile"):
        compiler.build([Module("bad.cu"), Module("good.cu", (("N", "9"),))], lambda done, total: None)


def test_a_compile_error_shows_the_start_of_the_log(sources: Path, nvrtc: library.Nvrtc) -> None:
    with pytest.raises(SparkError) as caught:
        nvrtc.compile(library.source(Module("bad.cu")), Module("bad.cu", (("TYPE", "Q4_K"),)), "sm_90")
    lines = caught.value.message.splitlines()
    assert lines[0] == "bad.cu TYPE=Q4_K does not compile for sm_90:"
    assert 'bad.cu(1): error: identifier "missing0" is undefined' in lines[1]
    assert len(lines) == 1 + library.LOG_LINES


def test_an_nvrtc_that_is_too_old_is_not_taken(nvrtc: library.Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor = nvrtc.version
    monkeypatch.setattr(library, "OLDEST_NVRTC", (major, minor + 1))
    with pytest.raises(MissingExtraError, match=rf"NVRTC {major}\.{minor} is older than {major}\.{minor + 1}"):
        library.find_nvrtc.__wrapped__()


def test_an_architecture_of_the_future_gets_ptx(sources: Path, nvrtc: library.Nvrtc) -> None:
    assert nvrtc.target("sm_90") == "sm_90"
    newest = max(nvrtc.archs)
    assert nvrtc.target(f"sm_{newest + 5}") == f"compute_{newest}"
    assert f".target sm_{newest}".encode() in nvrtc.compile(library.source(GOOD), GOOD, f"sm_{newest + 5}")


def test_without_nvrtc() -> None:
    with pytest.raises(MissingExtraError, match="NVRTC") as caught:
        library.find_nvrtc(max_major=1)
    assert f"pip install {requirement('cuda13')} (driver" in caught.value.hint


# --- a GPU that is not there ----------------------------------------------------------------------


class FakeError(Exception):
    """CuPy's."""


class FakeRuntime(SimpleNamespace):
    """As much of CUDA's runtime as gpu.py calls: device memory is host memory, everything happens at once."""

    is_hip = False
    CUDARuntimeError = FakeError

    def __init__(self, n_devices: int = 1, major: int = 9) -> None:
        super().__init__(n_devices=n_devices, major=major, kept={}, calls=[], capturing=False, limit=1 << 26)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append((name, *args))
            return len(self.calls)

        return call

    def getDeviceCount(self) -> int:  # noqa: N802
        if self.n_devices < 0:
            raise FakeError("cudaErrorNoDevice")
        return self.n_devices

    def getDeviceProperties(self, ordinal: int) -> dict[str, Any]:  # noqa: N802
        return {
            "name": b"Fake", "major": self.major, "minor": 0, "multiProcessorCount": 7,
            "sharedMemPerBlockOptin": 99 << 10,
        }  # fmt: skip

    def driverGetVersion(self) -> int:  # noqa: N802
        return 99000

    def malloc(self, n_bytes: int) -> int:
        if n_bytes > self.limit:
            raise FakeError("cudaErrorMemoryAllocation")
        memory = np.zeros(n_bytes + 256, np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self.kept[address] = memory
        return address

    def hostAlloc(self, n_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 3
        return self.malloc(n_bytes)

    def free(self, address: int) -> None:
        assert address == 0 or self.kept.pop(address) is not None

    freeHost = free  # noqa: N815

    def memcpyAsync(self, to: int, source: int, n_bytes: int, kind: int, stream: int) -> None:  # noqa: N802
        assert kind == 4
        ctypes.memmove(to, source, n_bytes)

    def memcpy2DAsync(  # noqa: N802
        self, to: int, to_pitch: int, source: int, pitch: int, n_bytes: int, n_rows: int, kind: int, stream: int
    ) -> None:
        assert kind == 4 and n_bytes <= min(to_pitch, pitch) and max(to_pitch, pitch) < 1 << 31
        self.calls.append(n_rows)
        for row in range(n_rows):
            ctypes.memmove(to + row * to_pitch, source + row * pitch, n_bytes)

    def memsetAsync(self, to: int, byte: int, n_bytes: int, stream: int) -> None:  # noqa: N802
        ctypes.memset(to, byte, n_bytes)

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return 1 << 25, 1 << 26


class FakeDriver(SimpleNamespace):
    """Keeps what a launch was given, parameter by parameter."""

    CUDADriverError = FakeError

    def __init__(self) -> None:
        super().__init__(launches=[], attributes=[])

    def moduleLoadData(self, image: bytes) -> int:  # noqa: N802
        assert image == b"image"
        return 5

    def moduleUnload(self, module: int) -> None:  # noqa: N802
        assert module == 5

    def moduleGetFunction(self, module: int, name: str) -> int:  # noqa: N802
        return 77

    def funcGetAttribute(self, attribute: int, function: int) -> int:  # noqa: N802
        assert (attribute, function) == (1, 77)
        return 1000

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:  # noqa: N802
        self.attributes.append((function, attribute, value))

    def launchKernel(self, function: int, *rest: int) -> None:  # noqa: N802
        *dims, shared, stream, parameters, extra = rest
        assert function == 77 and extra == 0
        if dims[0] == 9:
            raise FakeError("CUDA_ERROR_INVALID_VALUE")
        slots = [ctypes.string_at(p, 8) for p in (ctypes.c_uint64 * self.n_parameters).from_address(parameters)]
        self.launches.append((dims, shared, stream, slots))


class FakeArray(np.ndarray):
    """cupy.ndarray: its address is `data.ptr`."""

    def __new__(cls, shape: Any, dtype: Any, memptr: Any = None) -> FakeArray:
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(memptr), dtype).reshape(shape).view(cls)

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module in CuPy's place."""
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.cuda, cupy.ndarray = cuda, FakeArray  # type: ignore[attr-defined]
    cuda.runtime, cuda.driver = FakeRuntime(), FakeDriver()  # type: ignore[attr-defined]
    cuda.UnownedMemory = lambda address, size, owner, device: address  # type: ignore[attr-defined]
    cuda.MemoryPointer = lambda address, offset: address + offset  # type: ignore[attr-defined]
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(library.Compiler, "image", lambda self, module: b"image")
    return cuda


def test_opening_fails_with_an_explanation(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.runtime = FakeRuntime(n_devices=-1)
    with pytest.raises(SparkError, match="no CUDA device can be used: cudaErrorNoDevice"):
        gpu.open_device()
    fake.runtime = FakeRuntime(n_devices=2)
    with pytest.raises(SparkError, match="no CUDA device 2: the driver shows 2"):
        gpu.open_device(2)
    fake.runtime = FakeRuntime(major=7)
    with pytest.raises(SparkError, match=r"Fake has compute capability 7.0, the kernels need 8.0"):
        gpu.open_device()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingExtraError, match="CuPy") as caught:
        gpu.open_device()
    assert f"pip install {requirement('cuda13')} (driver" in caught.value.hint


def test_launches_pack_their_arguments(fake: Any) -> None:
    device = gpu.open_device()
    assert (device.name, device.arch, device.n_sm, device.max_shared_bytes) == ("Fake", "sm_90", 7, 99 << 10)
    kernel = device.kernel(GOOD, "k")
    assert device.kernel(GOOD, "k") is kernel
    array = device.upload(np.arange(10, dtype=np.int16))
    fake.driver.n_parameters = 8
    args = [array[3:], None, -2, 1.5, np.uint64(2**63), np.uint8(200), np.float16(1), np.int64(-1)]
    for first in (array[3:], array[5:]):
        kernel((3, 2), 64, [first, *args[1:]], 100)
    kernel(4, (32, 2, 1), [*args[:2], True, *args[3:]], 60000)
    kernel(4, 32, args, 50000)
    base = array.data.ptr
    expected = [
        (np.uint64(base + 6).tobytes(), 8), (bytes(8), 8), (np.int32(-2).tobytes(), 4), (np.float32(1.5).tobytes(), 4),
        (np.uint64(2**63).tobytes(), 8), (b"\xc8", 1), (np.float16(1).tobytes(), 2), (b"\xff" * 8, 8),
    ]  # fmt: skip
    launches = fake.driver.launches
    assert [slot[:n] for slot, (_, n) in zip(launches[0][3], expected, strict=True)] == [v for v, _ in expected]
    assert launches[1][3][0] == np.uint64(base + 10).tobytes()
    assert launches[2][3][2][:4] == np.int32(1).tobytes()
    assert [launch[:2] for launch in launches] == [
        *2 * [([3, 2, 1, 64, 1, 1], 100)],
        ([4, 1, 1, 32, 2, 1], 60000),
        ([4, 1, 1, 32, 1, 1], 50000),
    ]
    assert fake.driver.attributes == [(77, 8, 60000)]
    with pytest.raises(SparkError, match=r"launching k with grid \(9, 1, 1\), block \(32, 1, 1\), 3 bytes"):
        kernel(9, 32, args, 3)
    with pytest.raises(TypeError, match="argument 0 is a str"):
        kernel(1, 1, ["x", *args[1:]])
    with pytest.raises(TypeError, match="7 arguments, 8 before"):
        kernel(1, 1, args[1:])
    device.close()


def test_memory_goes_through_the_ring_and_the_arena(fake: Any) -> None:
    device = gpu.open_device()
    rng = np.random.default_rng(1)
    synchronized = [c for c in fake.runtime.calls if c[0] == "deviceSynchronize"]
    for n in (0, 1, 1000, gpu.SMALL_BYTES // 4, gpu.SMALL_BYTES, gpu.READ_BYTES):
        host = rng.integers(0, 99, (n, 1)).astype(np.int32)
        np.testing.assert_array_equal(device.read(device.upload(host)), host)
    array = device.empty(gpu.SMALL_BYTES, np.uint8)
    for i in range(2 * gpu.RING_BYTES // gpu.SMALL_BYTES):
        device.write(array, np.full(gpu.SMALL_BYTES, i, np.uint8))
    assert (device.read(array) == i).all()
    assert 1 <= len([c for c in fake.runtime.calls if c[0] == "deviceSynchronize"]) - len(synchronized) <= 3
    device.set_bytes(device.pointer(array) + 1, 0xFF, 2)
    assert list(device.read(array)[:4]) == [i, 255, 255, i]
    with pytest.raises(ValueError, match="written to"):
        device.write(array, np.zeros(3, np.uint8))
    device.reserve(1024)
    a, b = device.empty((3, 5), np.float16), device.empty(7, np.float64)
    assert device.pointer(a) % 256 == 0 and device.pointer(b) - device.pointer(a) == 256
    with pytest.raises(CapacityError, match="512 bytes left of the arena"):
        device.empty(513, np.uint8)
    with pytest.raises(CapacityError, match=r"0.03 of 0.06 GiB are free"):
        device.reserve(1 << 27)
    locked = device.page_locked(100)
    device.copy(device.pointer(locked), device.pointer(array), 4)
    assert list(locked[:4]) == [i, 255, 255, i]
    device.close()
    device.close()
    assert not fake.runtime.kept


def test_rows_are_copied_by_one_call_where_that_can_be(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one by one over memory that was locked in pieces, and where they are farther apart than a call takes."""
    device = gpu.open_device()
    runtime = device.runtime
    runtime.calls = calls = list[int]()
    source, to = np.arange(60, dtype=np.uint8).reshape(4, 15), np.zeros((4, 11), np.uint8)
    at, begin = device.pointer(to), device.pointer(source)
    for change, expected in (({}, [4]), ({"_seams": [begin + 20]}, []), ({"_seams": [begin + 52]}, [4])):
        calls.clear()
        to[...] = 0
        with monkeypatch.context() as patch:
            for name, value in change.items():
                patch.setattr(device, name, value)
            device.copy_rows(at + 2, 11, begin + 1, 15, 6, 4)
        assert calls == expected and (to[:, 2:8] == source[:, 1:7]).all()
        assert not to[:, :2].any() and not to[:, 8:].any()
    calls.clear()
    monkeypatch.setattr(gpu, "MAX_PITCH", 14)
    device.copy_rows(at, 11, begin, 15, 11, 4)
    assert not calls and (to == source[:, :11]).all()
    device.close()


def test_streams_and_graphs(fake: Any) -> None:
    device = gpu.open_device()
    calls = fake.runtime.calls
    main, side = device.current, device.stream(-1)
    with device.on(side):
        assert device.current == side.handle != main
    assert device.current == main
    calls.clear()
    device.wait(side, None)
    device.wait(None, side)
    event = calls[0][1]
    assert calls == [
        ("eventRecord", event, main), ("streamWaitEvent", side.handle, event, 0),
        ("eventRecord", event, side.handle), ("streamWaitEvent", main, event, 0),
    ]  # fmt: skip
    calls.clear()
    with device.on(side):
        graph = device.capture(lambda: calls.append(("work", device.current)))
        graph.launch()
    names = [c[0] for c in calls]
    capture = ["streamBeginCapture", "work", "streamEndCapture"]
    assert names == [*capture, "graphInstantiate", "graphDestroy", "graphUpload", "graphLaunch"]
    assert calls[1] == ("work", main) and calls[-1][2] == side.handle
    with pytest.raises(ZeroDivisionError):
        device.capture(lambda: 1 // 0)
    assert [c[0] for c in calls[-2:]] == ["streamEndCapture", "graphDestroy"] and device.current == main

    def elsewhere() -> None:
        device.copy(1, 1, 0)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert calls[-1] == ("setDevice", 0)
    device.close()
