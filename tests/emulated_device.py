"""A GPU without a GPU: engine/ops/cuda/device.py over host memory and kernels compiled for the CPU.

Compiling takes g++ and x86-64 Linux (tests/cuda_emulator/ says what is emulated). Stricter than a GPU where that finds
mistakes: fresh memory holds 0xFF bytes (NaNs, huge indices), an access more than 255 bytes past an array's end and
everything a capture cannot hold are errors, and arithmetic on a device's array is one.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from engine.ground.digest import kernels
from engine.ground.errors import CapacityError
from engine.ops.cuda import library
from engine.ops.cuda.device import Dim, Module

EMULATOR = Path(__file__).parent / "cuda_emulator"
FLAGS = ["-std=c++17", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-fPIC", "-w"]
FLAGS += ["-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables"]  # a fifth faster
CHECKS = ["-fsanitize=alignment,bounds-strict,shift-exponent", "-fno-sanitize-recover=all"]  # of kernels
# What modules call of the libraries of C is in every process that has Python: to look it up takes longer than to link.
LINK = ["-shared", "-nostdlib", "-fno-use-linker-plugin"]
BOUNDS = r"EMULATOR_BOUNDS\((.*?)\)\s+EMULATOR_END"
KERNEL = re.compile(rf'__attribute__\(\(visibility\("default"\)\)\)\s+void\s+(?:{BOUNDS}\s+)?(\w+)\s*\(')
INTERFACE = """
extern "C" __attribute__((visibility("default")))
const emulator::Entry* emulator_module() { return emulator_entries; }
extern "C" __attribute__((visibility("default")))
const char* emulator_launch(
    int entry, const unsigned* grid, const unsigned* block, unsigned shared_bytes, void** args, void* stacks,
    bool backwards
) {
    return emulator::launch(emulator_entries[entry], grid, block, shared_bytes, args, stacks, backwards);
}
extern "C" __attribute__((visibility("default")))
int emulator_dependency_waits() { return emulator::n_dependency_waits; }
"""
PAGE = mmap.PAGESIZE
STACK_BYTES = 128 << 10  # of runtime.h
MAX_THREADS = 1024
ALIGNMENT = 256
POISON = 0xFF
POISON_BYTES = 2 << 20
MAP_FIXED = 0x10
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
_LIBC.mmap.restype = ctypes.c_void_p
SCALARS = {"i": ctypes.c_int32, "l": ctypes.c_int64, "h": ctypes.c_int16, "b": ctypes.c_int8}


class EmulatorError(Exception):
    """A kernel did what a GPU does not do, or not reliably."""


class DeviceArray(np.ndarray):
    """Memory of the device: shape, dtype, contiguous views; to compute with it, `read` it."""

    __array_ufunc__ = None


# --- compiling ------------------------------------------------------------------------------------


@cache
def _key_prefix() -> bytes:
    """All that a compiled module depends on besides its text: compiler, flags, processor, emulator."""
    version = subprocess.run(["g++", "-v"], capture_output=True, check=True).stderr
    cpu = re.search(r"(?m)^flags.*$", Path("/proc/cpuinfo").read_text())
    headers = b"".join(p.read_bytes() for p in sorted(EMULATOR.iterdir()))
    return b"\0".join([version, repr((FLAGS, CHECKS, LINK, cpu and cpu[0])).encode(), headers])


def folder() -> Path:
    """Where compiled modules are kept from one run of the tests to the next."""
    found = Path(tempfile.gettempdir()) / f"spark-cuda-emulator-{os.getuid()}"
    found.mkdir(mode=0o700, exist_ok=True)
    return found


@contextlib.contextmanager
def made_once(path: Path) -> Iterator[None]:
    """One process at a time makes a file; who has waited may find it made."""
    lock = path.with_name(f"{path.name}.lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@cache
def runtime() -> Path:
    """The object file of runtime.cpp, which is a part of every module, and of what each launch spends its time in."""
    path = folder() / f"runtime-{hashlib.sha256(_key_prefix()).hexdigest()[:32]}.o"
    if not path.exists():
        with made_once(path), tempfile.TemporaryDirectory(dir=path.parent) as work:
            made = Path(work) / "runtime.o"
            _run("runtime.cpp", ["g++", *FLAGS, "-O2", "-c", EMULATOR / "runtime.cpp", "-o", made])
            made.replace(path)
    return path


def compile_module(module: Module, effort: str = "-O1") -> Path:
    """The shared library of a module, from the cache in the folder for temporary files or from g++.

    effort: what a model runs is worth the compiler's time; a kernel that one test launches a few times is not.
    """
    text = f'#include "runtime.h"\n{library.source(module, (EMULATOR, kernels()))}\n'
    key = hashlib.sha256(b"\0".join([_key_prefix(), effort.encode(), text.encode()])).hexdigest()[:32]
    path = folder() / f"{Path(module.file).stem}-{key}.so"
    if path.exists():
        return path
    with made_once(path), tempfile.TemporaryDirectory(dir=path.parent) as work:
        if path.exists():
            return path
        stem = Path(work) / "module"
        _run(module, ["g++", "-E", *FLAGS, f"-I{EMULATOR}", "-x", "c++", "-", "-o", f"{stem}.ii"], text)
        preprocessed = Path(f"{stem}.ii").read_text()
        with Path(f"{stem}.ii").open("w") as file:
            file.write(re.sub(BOUNDS, "", preprocessed) + '\n# 1 "trampolines"\n')
            entries = ""
            for bound, name in KERNEL.findall(preprocessed):
                file.write(f"static void emulator_run_{name}(void** args) {{ emulator::call({name}, args); }}\n")
                entries += f'{{"{name}", emulator::signature({name}), emulator_run_{name}, {bound or 1024}}},\n'
            file.write(f"static const emulator::Entry emulator_entries[] = {{{entries}{{}}}};\n{INTERFACE}")
        _run(module, ["g++", *FLAGS, *CHECKS, effort, "-c", f"{stem}.ii", "-o", f"{stem}.o"])
        _run(module, ["g++", *LINK, f"{stem}.o", runtime(), "-lgcc", "-o", f"{stem}.so"])
        Path(f"{stem}.so").replace(path)
    return path


def _run(module: Module | str, command: list[str | Path], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise EmulatorError(f"{module} does not compile for the emulator:\n{done.stderr[:4000]}")


class _Entry(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("kinds", ctypes.c_char_p),
        ("body", ctypes.c_void_p),
        ("max_threads", ctypes.c_int),
    ]


@cache  # modules have state (stacks): one copy of each in the process
def _load(path: Path) -> tuple[Any, dict[str, tuple[int, str, int]]]:
    """A compiled module and its kernels: index, kinds of the parameters, launch bound."""
    module = ctypes.CDLL(str(path))
    module.emulator_module.restype = ctypes.POINTER(_Entry)
    module.emulator_launch.restype = ctypes.c_char_p
    dims = ctypes.POINTER(ctypes.c_uint)
    pointers = ctypes.POINTER(ctypes.c_void_p)
    more = pointers, ctypes.c_void_p, ctypes.c_bool
    module.emulator_launch.argtypes = [ctypes.c_int, dims, dims, ctypes.c_uint, *more]
    entries = module.emulator_module()
    kernels = {}
    while (entry := entries[len(kernels)]).name:
        kernels[entry.name.decode()] = (len(kernels), entry.kinds.decode(), entry.max_threads)
    return module, kernels


@cache
def _stacks() -> np.ndarray:
    """Memory for the stacks of a block's threads, the first page of each out of bounds."""
    memory = np.frombuffer(mmap.mmap(-1, MAX_THREADS * STACK_BYTES), np.uint8)
    for thread in range(MAX_THREADS):
        _LIBC.mprotect(memory.ctypes.data + thread * STACK_BYTES, PAGE, 0)
    return memory


@cache
def _poison() -> int:
    """A file of poison."""
    file = os.memfd_create("poison")
    os.write(file, bytes([POISON]) * POISON_BYTES)
    return file


class _Poisoned:
    """Memory that holds poison, up to a page out of bounds; arrays of it keep it.

    Its pages are those of a file until something writes them, and most never are: what long contexts would take.
    """

    def __init__(self, n_bytes: int) -> None:
        self.mapped = n_bytes + PAGE
        self.address = self._map(None, self.mapped, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        for at in range(0, n_bytes, POISON_BYTES):
            n, access = min(POISON_BYTES, n_bytes - at), mmap.PROT_READ | mmap.PROT_WRITE
            self._map(self.address + at, n, access, mmap.MAP_PRIVATE | MAP_FIXED, _poison())
        self.__array_interface__ = {
            "version": 3, "shape": (n_bytes,), "typestr": "|u1", "data": (self.address, False),
        }  # fmt: skip

    @staticmethod
    def _map(address: int | None, n_bytes: int, access: int, flags: int, file: int) -> int:
        found: int = _LIBC.mmap(address, n_bytes, access, flags, file, 0)
        if found == 2**64 - 1:
            raise OSError(ctypes.get_errno(), "mmap")
        return found

    def __del__(self, munmap: Callable[[int, int], int] = _LIBC.munmap) -> None:
        munmap(self.address, self.mapped)


_LAUNCHING = threading.Lock()  # the blocks of a module share its state, and all modules the stacks

# --- the device -----------------------------------------------------------------------------------


class EmulatedKernel:
    """A kernel for the host, compiled at its first launch; a launch runs it whole, or records it."""

    def __init__(self, device: EmulatedDevice, module: Module, name: str) -> None:
        self.device, self.name, self._module = device, name, module

    @cached_property
    def _found(self) -> tuple[Any, int, str, int]:
        """The compiled module, and of the kernel its index, the kinds of its parameters and its launch bound."""
        compiled, kernels = _load(compile_module(self._module, self.device.effort))
        if self.name not in kernels:
            raise EmulatorError(f"{self._module} has no kernel {self.name}; it has {', '.join(kernels)}")
        return compiled, *kernels[self.name]

    def __call__(
        self, grid: Dim, block: Dim, args: Sequence[Any], shared_bytes: int = 0, overlap: bool = False
    ) -> None:
        module, index, kinds, max_threads = self._found
        grid, block = _dim3(grid), _dim3(block)
        limits = (2**31 - 1, 65535, 65535)
        if any(not 1 <= n <= limit for n, limit in zip(grid, limits, strict=True)):
            raise EmulatorError(f"{self.name}: no GPU launches a grid of {grid}")
        if np.prod(block) > MAX_THREADS or min(block) < 1 or block[2] > 64:
            raise EmulatorError(f"{self.name}: no GPU launches blocks of {block}")
        if np.prod(block) > max_threads:
            raise EmulatorError(f"{self.name}: blocks of {block}, the launch bound is {max_threads} threads")
        if shared_bytes > self.device.max_shared_bytes:
            raise EmulatorError(
                f"{self.name}: {shared_bytes} bytes of shared memory, a block has {self.device.max_shared_bytes}"
            )
        if len(args) != len(kinds):
            raise EmulatorError(f"{self.name}: {len(args)} arguments for {len(kinds)} parameters")
        values = [self._convert(i, kind, a) for i, (kind, a) in enumerate(zip(kinds, args, strict=True))]
        pointers = (ctypes.c_void_p * (len(values) or 1))(*(ctypes.addressof(v) for v in values))
        grid_c, block_c = (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block)

        def run(_keep: Any = values) -> None:
            with _LAUNCHING:
                stacks = _stacks().ctypes.data
                backwards = self.device.backwards
                error = module.emulator_launch(index, grid_c, block_c, shared_bytes, pointers, stacks, backwards)
                if error is not None:
                    raise EmulatorError(error.decode())
                # Without, the kernel could end before the one ahead of it, and the one behind would not wait for that.
                if overlap and not module.emulator_dependency_waits():
                    raise EmulatorError(f"{self.name}: launched with overlap, and no thread called dependency_wait")

        self.device._enqueue(run)

    def _convert(self, i: int, kind: str, arg: Any) -> Any:
        what = f"{self.name}: argument {i}"
        if isinstance(arg, np.ndarray) and arg.ndim:
            if kind != "p":
                raise EmulatorError(f"{what} is an array, the parameter is no pointer")
            if not isinstance(arg, DeviceArray):
                raise EmulatorError(f"{what} is in host memory; np.uint64(device.pointer(it)) passes its address")
            if not arg.flags.c_contiguous:
                raise EmulatorError(f"{what} is not contiguous")
            self.device._check_range(arg.ctypes.data, arg.nbytes, what)
            return ctypes.c_uint64(arg.ctypes.data)
        if arg is None:
            found, value = "p", ctypes.c_uint64(0)
        elif isinstance(arg, np.generic):
            item: Any = arg.item()
            if arg.dtype.kind == "f":
                found = {4: "f", 8: "d"}.get(arg.itemsize, "?")
                value = ctypes.c_double(item) if found == "d" else ctypes.c_float(item)
            else:
                found = {1: "b", 2: "h", 4: "i", 8: "l"}[arg.itemsize]
                value = SCALARS[found](item)
        elif isinstance(arg, float):
            found, value = "f", ctypes.c_float(arg)
        elif isinstance(arg, int):
            found, value = "i", ctypes.c_int32(arg)
            if not -(2**31) <= arg < 2**31:
                raise EmulatorError(f"{what}: {arg} is no int32; pass a NumPy scalar")
        else:
            raise EmulatorError(f"{what} is a {type(arg).__name__}")
        if found != kind and (found, kind) != ("l", "p"):
            raise EmulatorError(f"{what} is {arg!r} ({found!r}), the parameter's kind is {kind!r}")
        return value


@dataclass
class EmulatedGraph:
    """Launches and copies with the arguments of their recording."""

    operations: list[Callable[[], None]]
    device: EmulatedDevice

    def launch(self) -> None:
        for operation in self.operations:
            self.device._enqueue(operation)


class EmulatedStream:
    """Work on every stream is done when it is enqueued. unjoined: in a capture, since something waited for it."""

    def __init__(self) -> None:
        self.unjoined = False


class EmulatedDevice:
    """The `Device` of engine/ops/cuda/device.py on one thread of the CPU."""

    def __init__(self, n_sm: int = 5, arch: str = "sm_80", n_bytes: int = 4 << 30, effort: str = "-O1") -> None:
        self.name, self.compiler, self.is_concurrent = "emulated", "g++", False
        self.effort = effort
        self.backwards = False  # the last block of a grid runs first
        self.arch = arch
        self.n_sm = n_sm
        self.max_shared_bytes = 99 * 1024
        self.n_bytes = n_bytes
        self.used = 0
        self.arena: int | None = None
        self.launches = 0
        self._kernels: dict[tuple[Module, str], EmulatedKernel] = {}
        self._allocations: list[tuple[int, int]] = []  # (address, bytes), by address
        self._memory: list[np.ndarray] = []
        self._slack: list[tuple[np.ndarray, int]] = []  # what lies behind an array, and the array's bytes
        self._recording: list[Callable[[], None]] | None = None
        self._stream: EmulatedStream | None = None  # the current one, None: the main one
        self._forked: set[EmulatedStream] = set()  # of the capture

    def build(self, modules: Sequence[Module], progress: Callable[[int, int], None]) -> None:
        """Nothing: g++ takes most of the tests' time, and of what a model may launch a test launches a part."""
        for done, _ in enumerate(modules, 1):
            progress(done, len(modules))

    def kernel(self, module: Module, name: str) -> EmulatedKernel:
        return self._kernels.setdefault((module, name), EmulatedKernel(self, module, name))

    def reserve(self, n_bytes: int, releasable: bool = False) -> None:
        self._no_capture("reserve")
        if n_bytes > self.n_bytes - self.used:
            raise CapacityError(f"{n_bytes} bytes do not fit into {self.n_bytes - self.used}")
        self.arena = n_bytes

    def empty(self, shape: Dim, dtype: Any) -> DeviceArray:
        self._no_capture("empty")
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        taken = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        self.used += taken
        if self.arena is not None:
            self.arena -= taken
            if self.arena < 0:
                raise CapacityError(f"the arena lacks {-self.arena} bytes")
        elif self.used > self.n_bytes:
            raise CapacityError(f"{n_bytes} bytes do not fit")
        return self._allocate(n_bytes)[:n_bytes].view(dtype).reshape(shape).view(DeviceArray)

    def _allocate(self, n_bytes: int) -> np.ndarray:
        """Poisoned bytes whose end, but for alignment, is the end of accessible memory."""
        taken = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        pages = -(-taken // PAGE) * PAGE
        data = np.asarray(_Poisoned(pages))[pages - taken :]
        bisect.insort(self._allocations, (data.ctypes.data, n_bytes))
        self._memory.append(data)
        if n_bytes < taken:
            self._slack.append((data[n_bytes:], n_bytes))
        return data

    def upload(self, host: np.ndarray) -> DeviceArray:
        array = self.empty(host.shape, host.dtype)
        array[...] = host
        return array

    def write(self, array: DeviceArray, host: np.ndarray) -> None:
        self._no_capture("write")
        if array.shape != host.shape or array.dtype != host.dtype:
            raise ValueError(f"{host.dtype} {host.shape} written to {array.dtype} {array.shape}")
        self._check_range(array.ctypes.data, array.nbytes, "write")
        array[...] = host

    def read(self, array: DeviceArray) -> np.ndarray:
        self._no_capture("read")
        self.synchronize()
        return np.array(array, copy=True, subok=False)

    def fill(self, array: DeviceArray, byte: int) -> None:
        if not array.flags.c_contiguous:
            raise ValueError("fill of an array that is not contiguous")
        self._check_range(array.ctypes.data, array.nbytes, "fill")
        self._enqueue(lambda: array.reshape(-1).view(np.uint8).fill(byte))

    def set_bytes(self, to: int, byte: int, n_bytes: int) -> None:
        self._check_range(to, n_bytes, "set_bytes")
        self._enqueue(lambda: ctypes.memset(to, byte, n_bytes) and None)

    def release(self, address: int, n_bytes: int) -> int:
        self._no_capture("release")
        self.set_bytes(address, 0xFF, n_bytes)
        return n_bytes

    def restore(self) -> None:
        self._no_capture("restore")

    def page_locked(self, n_bytes: int) -> np.ndarray:
        self._no_capture("page_locked")
        return self._allocate(n_bytes)[:n_bytes]

    def host_array(self, n_bytes: int, keep_bytes: int) -> np.ndarray:
        return self.page_locked(n_bytes)

    def pointer(self, array: np.ndarray) -> int:
        address: int = array.ctypes.data
        self._check_range(address, array.nbytes, "pointer")
        return address

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        self._check_range(to, n_bytes, "copy: the target")
        self._check_range(source, n_bytes, "copy: the source")
        self._enqueue(lambda: ctypes.memmove(to, source, n_bytes) and None)

    def copy_rows(self, to: int, to_pitch: int, source: int, source_pitch: int, n_bytes: int, n_rows: int) -> None:
        assert n_bytes <= min(to_pitch, source_pitch)
        for row in range(n_rows):
            self.copy(to + row * to_pitch, source + row * source_pitch, n_bytes)

    def stream(self, priority: int = 0) -> EmulatedStream:
        return EmulatedStream()

    @contextlib.contextmanager
    def on(self, stream: EmulatedStream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def wait(self, waiting: EmulatedStream | None, awaited: EmulatedStream | None) -> None:
        """In a capture another stream begins by waiting for the main one, and the main one has to wait for it."""
        if self._recording is None:
            return
        if waiting is None and awaited is not None:
            if awaited not in self._forked:
                raise EmulatorError("a capture waits for a stream that is no part of it")
            awaited.unjoined = False
        elif waiting is not None and awaited is None:
            self._forked.add(waiting)

    def capture(self, work: Callable[[], None]) -> EmulatedGraph:
        self._no_capture("capture")
        self._recording = []
        self._forked = set()
        try:
            work()
            if any(stream.unjoined for stream in self._forked):
                raise EmulatorError("a capture ends while a stream of it is not waited for")
            return EmulatedGraph(self._recording, self)
        finally:
            self._recording = None

    def synchronize(self) -> None:
        self._no_capture("synchronize")
        for slack, n_bytes in self._slack:
            if (slack != POISON).any():
                raise EmulatorError(f"something wrote behind an array of {n_bytes} bytes")

    def memory_bytes(self) -> tuple[int, int]:
        return self.n_bytes - self.used, self.n_bytes

    def close(self) -> None:
        self.synchronize()
        self._kernels.clear()
        self._allocations.clear()
        self._slack.clear()
        self._memory.clear()

    def _enqueue(self, operation: Callable[[], None]) -> None:
        if self._recording is not None:
            if self._stream is not None:
                if self._stream not in self._forked:
                    raise EmulatorError("a capture enqueues on a stream that is no part of it")
                self._stream.unjoined = True
            self._recording.append(operation)
        else:
            self.launches += 1
            operation()

    def _no_capture(self, what: str) -> None:
        if self._recording is not None:
            raise EmulatorError(f"{what} cannot be part of a graph")

    def _check_range(self, address: int, n_bytes: int, what: str) -> None:
        if n_bytes == 0:
            return
        i = bisect.bisect(self._allocations, (address, 1 << 62)) - 1
        if i < 0 or address + n_bytes > sum(self._allocations[i]):
            raise EmulatorError(f"{what}: {n_bytes} bytes at {address:#x} are not within memory of this device")


def _dim3(dim: Dim) -> tuple[int, ...]:
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return dims + (1,) * (3 - len(dims))
