"""The GPU itself: `device.Device` over CuPy's bindings of the driver and the runtime.

Of CuPy only the bindings and the array type are used; none of its own kernels ever runs. All work goes to streams of
this device, of which the main one is the default.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engine.ground.errors import CapacityError, DeviceLostError, MissingExtraError, SparkError
from engine.ground.install import requirement
from engine.ops.cuda import library, memory
from engine.ops.cuda.device import Argument, Array, Dim, Module
from engine.ops.cuda.failures import explained
from engine.ops.cuda.lending import Lending
from engine.ops.cuda.virtual import OutOfMemoryError, VirtualMemory

ALIGN_BYTES = 256
MIN_ARCH = 80
RING_BYTES = 4 << 20  # page-locked memory that small writes pass through
SMALL_BYTES = RING_BYTES // 8  # of a write through it
READ_BYTES = 1 << 20
DEFAULT_SHARED_BYTES = 48 << 10  # dynamic shared memory that a kernel has without asking
GIB = 1 << 30

_NON_BLOCKING = 1  # cudaStreamNonBlocking
_NO_TIMING = 2  # cudaEventDisableTiming
MAX_PITCH = (1 << 31) - 1  # bytes: cudaDevAttrMaxPitch of every device
_COPY_DEFAULT = 4  # cudaMemcpyDefault: the addresses say which way
_CAPTURE_RELAXED = 2  # cudaStreamCaptureModeRelaxed: loading a module meanwhile is no error
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_STATIC_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES


def bus_of(ordinal: int) -> str | None:
    """The PCI address of a GPU, as "0000:1b:00.0"; None where nobody says."""
    with contextlib.suppress(Exception):
        from cupy.cuda import runtime

        return str(runtime.deviceGetPCIBusId(ordinal))
    return None


def open_device(ordinal: int = 0) -> GpuDevice:
    """A GPU; MissingExtraError without CuPy, SparkError without a driver or a GPU that the kernels run on."""
    try:
        import cupy
        from cupy.cuda import runtime
    except ImportError as error:
        raise MissingExtraError(
            f"the CUDA backend needs CuPy ({error})",
            hint=f"pip install {requirement('cuda13')} (driver 580 or newer) or {requirement('cuda12')}",
        ) from error
    if runtime.is_hip:
        raise SparkError("this CuPy is built for ROCm", hint="the CUDA backend needs cupy-cuda12x or cupy-cuda13x")
    try:
        count = runtime.getDeviceCount()
        if not 0 <= ordinal < count:
            raise SparkError(f"there is no CUDA device {ordinal}: the driver shows {count}", hint="use --device cpu")
        runtime.setDevice(ordinal)
        runtime.free(0)  # makes the context, which is where a broken installation fails
    except runtime.CUDARuntimeError as error:
        raise SparkError(
            f"no CUDA device can be used: {error}",
            hint="is the driver loaded (nvidia-smi), and new enough for this CuPy? else use --device cpu",
        ) from error
    properties = runtime.getDeviceProperties(ordinal)
    name, arch = properties["name"].decode(), 10 * properties["major"] + properties["minor"]
    if arch < MIN_ARCH:
        raise SparkError(
            f"{name} has compute capability {arch / 10}, the kernels need {MIN_ARCH / 10} (Ampere) or newer",
            hint="use --device cpu",
        )
    return GpuDevice(cupy, ordinal, name, f"sm_{arch}", properties)


# For the types of a launch's arguments: what packs them, which are arrays, which are null.
_Layout = tuple[Callable[..., None], tuple[int, ...], tuple[int, ...]]


class GpuKernel:
    """A kernel in device memory."""

    def __init__(self, device: GpuDevice, module: int, name: str) -> None:
        self._device = device
        self._driver = device.driver
        self._launch = self._driver.launchKernel
        self._array = device.cupy.ndarray
        self.name = name
        self._function = self._driver.moduleGetFunction(module, name)
        self._shared_bytes = DEFAULT_SHARED_BYTES - self._driver.funcGetAttribute(_STATIC_SHARED, self._function)
        self._layouts: dict[tuple[type, ...], _Layout] = {}
        self._slots = ctypes.create_string_buffer(0)
        self._parameters = (ctypes.c_void_p * 0)()
        self._parameters_at = 0
        self._lock = threading.Lock()  # of the slots: the driver copies them during a launch

    def __call__(
        self, grid: Dim, block: Dim, args: Sequence[Argument], shared_bytes: int = 0, overlap: bool = False
    ) -> None:
        """Enqueue on the device's current stream."""
        types = tuple(map(type, args))
        pack_into, arrays, nulls = self._layouts.get(types) or self._new_layout(types)
        values = list(args)
        for i in arrays:
            values[i] = values[i].data.ptr
        for i in nulls:
            values[i] = 0
        gx, gy, gz = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        bx, by, bz = (block, 1, 1) if isinstance(block, int) else (*block, 1, 1)[:3]
        self._device.bind()
        stream = self._device.current
        try:
            with self._lock:
                if shared_bytes > self._shared_bytes:
                    self._driver.funcSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes)
                    self._shared_bytes = shared_bytes
                pack_into(self._slots, 0, *values)
                if overlap and self._device.launch_overlapping is not None:
                    dimensions = (gx, gy, gz, bx, by, bz, shared_bytes)
                    self._device.launch_overlapping(self._function, dimensions, self._parameters_at)
                    return
                self._launch(self._function, gx, gy, gz, bx, by, bz, shared_bytes, stream, self._parameters_at, 0)
        except self._driver.CUDADriverError as error:
            what = f"grid {(gx, gy, gz)}, block {(bx, by, bz)}, {shared_bytes} bytes of shared memory"
            raise explained(error, f"launching {self.name} with {what}") from error

    def _new_layout(self, types: tuple[type, ...]) -> _Layout:
        """Eight bytes for each argument, and the pointers to them that the driver takes."""
        form = "<"
        for i, kind in enumerate(types):
            if kind is self._array or kind is type(None):
                form += "Q"
            elif issubclass(kind, np.generic):
                dtype = np.dtype(kind)
                code = {"i": "bhiq", "u": "BHIQ", "f": "?efd"}[dtype.kind][dtype.itemsize.bit_length() - 1]
                form += f"{code}{8 - dtype.itemsize}x"
            elif issubclass(kind, int | float):
                form += "f4x" if issubclass(kind, float) else "i4x"
            else:
                raise TypeError(f"{self.name}: argument {i} is a {kind.__name__}")
        arrays = tuple(i for i, kind in enumerate(types) if kind is self._array)
        layout = struct.Struct(form).pack_into, arrays, tuple(i for i, kind in enumerate(types) if kind is type(None))
        with self._lock:
            if self._layouts and len(types) != len(self._parameters):
                raise TypeError(f"{self.name}: {len(types)} arguments, {len(self._parameters)} before")
            if not self._layouts:
                self._slots = ctypes.create_string_buffer(8 * len(types))
                at = ctypes.addressof(self._slots)
                self._parameters = (ctypes.c_void_p * len(types))(*(at + 8 * i for i in range(len(types))))
                self._parameters_at = ctypes.addressof(self._parameters)
            self._layouts[types] = layout
        return layout


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padded to 8 bytes, and a value of 64."""

    _fields_ = [("id", ctypes.c_uint32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("dimensions", ctypes.c_uint32 * 7),  # of grid and block, and bytes of dynamic shared memory
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint32),
    ]


class _OverlappingLaunch:
    """cuLaunchKernelEx with programmatic stream serialization, which CuPy does not bind. Needs sm_90."""

    def __init__(self, device: GpuDevice) -> None:
        self._device = device
        self._call = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        self._call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._attribute = _Attribute(id=_PROGRAMMATIC_SERIALIZATION)
        self._attribute.value[0] = 1
        self._config = _LaunchConfig(attributes=ctypes.pointer(self._attribute), n_attributes=1)
        self._config_at = ctypes.addressof(self._config)

    def __call__(self, function: int, dimensions: tuple[int, ...], parameters_at: int) -> None:
        self._config.dimensions[:] = dimensions
        self._config.stream = self._device.current
        status = self._call(self._config_at, function, parameters_at, None)
        if status:
            raise self._device.driver.CUDADriverError(status)


class GpuGraph:
    """Captured work, as one launch."""

    def __init__(self, device: GpuDevice, graph: int) -> None:
        self._device = device
        try:
            self._exec = device.runtime.graphInstantiate(graph)
        finally:
            device.runtime.graphDestroy(graph)
        device.runtime.graphUpload(self._exec, device.current)

    def launch(self) -> None:
        """Enqueue everything that was captured, on the device's current stream."""
        self._device.runtime.graphLaunch(self._exec, self._device.current)

    def close(self) -> None:
        """Release it."""
        if self._exec:
            self._device.runtime.graphExecDestroy(self._exec)
            self._exec = 0


class GpuStream:
    """An order of work; `handle` is the driver's."""

    def __init__(self, handle: int) -> None:
        self.handle = handle


class GpuDevice:
    """`device.Device` on an NVIDIA GPU. Enqueueing is for one thread at a time. Made by `open_device`."""

    is_concurrent = True

    def __init__(self, cupy: Any, ordinal: int, name: str, arch: str, properties: dict[str, Any]) -> None:
        self.cupy = cupy
        self.driver, self.runtime = cupy.cuda.driver, cupy.cuda.runtime
        self.ordinal = ordinal
        self.name = name
        self.arch = arch
        self.n_sm = int(properties["multiProcessorCount"])
        self.max_shared_bytes = int(properties["sharedMemPerBlockOptin"])
        self._compiler = library.Compiler(arch, library.find_nvrtc(self.runtime.driverGetVersion() // 1000))
        self.compiler = self._compiler.about
        self._closed = False
        self._modules: dict[Module, int] = {}
        self._kernels: dict[tuple[Module, str], GpuKernel] = {}
        self._streams: list[int] = []
        self._graphs: list[GpuGraph] = []
        self._allocations: list[int] = []
        self._arena: tuple[int, int] | None = None  # what is left of it: address, end
        self._virtual: VirtualMemory | None = None
        self._locked: list[memory.PageLocked] = []
        self._seams: list[int] = []
        self._lending = Lending(ordinal, self.synchronize)
        self._thread = threading.get_ident()
        self._event = self.runtime.eventCreateWithFlags(_NO_TIMING)
        self.launch_overlapping: _OverlappingLaunch | None = None
        # Before CUDA 12.3 a capture cannot hold such a launch.
        if int(arch.removeprefix("sm_")) >= 90 and self.runtime.driverGetVersion() >= 12030:
            with contextlib.suppress(OSError, AttributeError):  # without it nothing overlaps, and all is the same
                self.launch_overlapping = _OverlappingLaunch(self)
        self._main = self.stream()
        self.current = self._main.handle
        self._ring = self.page_locked(RING_BYTES)
        self._ring_at = 0
        self._readings = self.page_locked(READ_BYTES)

    def bind(self) -> None:
        """Make this the device of the calling thread: each has one of its own, and a new one none."""
        if (thread := threading.get_ident()) != self._thread:
            self.runtime.setDevice(self.ordinal)
            self._thread = thread

    # --- kernels ---

    def build(self, modules: Sequence[Module], progress: Callable[[int, int], None]) -> None:
        """Compile (or load from the disk cache) several modules at once."""
        self._compiler.build(modules, progress)

    def kernel(self, module: Module, name: str) -> GpuKernel:
        """A kernel of a module; builds the module if `build` did not."""
        kernel = self._kernels.get((module, name))
        if kernel is None:
            self.bind()
            if module not in self._modules:
                self._modules[module] = self.driver.moduleLoadData(self._compiler.image(module))
            kernel = self._kernels[module, name] = GpuKernel(self, self._modules[module], name)
        return kernel

    # --- memory ---

    def reserve(self, n_bytes: int, releasable: bool = False) -> None:
        """Take the one arena that `empty` serves from; releasable: parts of it can be given back later."""
        address = self._map(n_bytes) if releasable else self._malloc(n_bytes)
        self._arena = address, address + n_bytes

    def _map(self, n_bytes: int) -> int:
        self.bind()
        try:
            self._virtual = VirtualMemory(n_bytes, self.ordinal)
        except OutOfMemoryError as error:
            raise self._too_little(n_bytes, error) from None
        except (OSError, AttributeError, RuntimeError) as error:
            raise CapacityError(
                f"this GPU's driver does not map memory by parts ({error})", hint="serve without --idle-release"
            ) from error
        return self._virtual.address

    def release(self, address: int, n_bytes: int) -> int:
        """Give back whole pieces of the arena, where it was reserved for that."""
        return 0 if self._virtual is None else self._virtual.release(address, n_bytes)

    def restore(self) -> None:
        """Map memory again where pieces were given back."""
        if self._virtual is not None:
            self.bind()
            try:
                self._virtual.restore()
            except OutOfMemoryError as error:
                raise self._too_little(self._virtual.missing_bytes, error) from None

    def _malloc(self, n_bytes: int) -> int:
        self.bind()
        try:
            address: int = self.runtime.malloc(max(n_bytes, ALIGN_BYTES))
        except self.runtime.CUDARuntimeError as error:
            if isinstance(lost := explained(error), DeviceLostError):
                raise lost from error
            raise self._too_little(n_bytes, error) from None
        self._allocations.append(address)
        return address

    def _too_little(self, n_bytes: int, error: Exception) -> CapacityError:
        free, total = self.memory_bytes()
        return CapacityError(
            f"the GPU has no {n_bytes / GIB:.2f} GiB: {free / GIB:.2f} of {total / GIB:.2f} GiB are free ({error})",
            hint="what else uses it (nvidia-smi)? or give a smaller --vram",
        )

    def empty(self, shape: Dim, dtype: DTypeLike) -> Array:
        """An array with arbitrary contents, 256-byte aligned, kept until the device closes."""
        count = shape if isinstance(shape, int) else prod(shape)
        n_bytes = count * np.dtype(dtype).itemsize
        taken = -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES
        if self._arena is None:
            address = self._malloc(taken)
        else:
            address, end = self._arena
            if address + taken > end:
                raise CapacityError(f"{n_bytes} bytes do not fit into the {end - address} bytes left of the arena")
            self._arena = address + taken, end
        whole = self.cupy.cuda.UnownedMemory(address, max(taken, ALIGN_BYTES), self, self.ordinal)
        return self.cupy.ndarray(shape, dtype, memptr=self.cupy.cuda.MemoryPointer(whole, 0))

    def upload(self, host: NDArray[Any]) -> Array:
        """A new array with a copy of `host`."""
        array = self.empty(host.shape, host.dtype)
        self.write(array, host)
        return array

    def write(self, array: Array, host: NDArray[Any]) -> None:
        """Copy `host` into `array`, in order with the current stream; `host` may change afterwards.

        What is small passes through page-locked memory and nothing waits; more is waited for.
        """
        if array.shape != host.shape or array.dtype != host.dtype:
            raise ValueError(f"{host.dtype} {host.shape} written to {array.dtype} {array.shape}")
        host = np.ascontiguousarray(host)
        n_bytes = host.nbytes
        if n_bytes > SMALL_BYTES:
            self.copy(array.data.ptr, host.ctypes.data, n_bytes)
            self.runtime.streamSynchronize(self.current)
        elif n_bytes:
            if self._ring_at + n_bytes > RING_BYTES:
                self.synchronize()  # what the ring holds may still be on its way; once in thousands of writes
                self._ring_at = 0
            staged = self._ring[self._ring_at : self._ring_at + n_bytes]
            staged[:] = host.reshape(-1).view(np.uint8)
            self._ring_at += -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES
            self.copy(array.data.ptr, staged.ctypes.data, n_bytes)

    def read(self, array: Array) -> NDArray[Any]:
        """A copy in host memory, after everything enqueued before on the current stream."""
        host: NDArray[Any] = np.empty(array.shape, array.dtype)
        n_bytes = host.nbytes
        try:
            if n_bytes > READ_BYTES:
                self.copy(host.ctypes.data, array.data.ptr, n_bytes)
                self.runtime.streamSynchronize(self.current)
            elif n_bytes:
                self.copy(self._readings.ctypes.data, array.data.ptr, n_bytes)
                self.runtime.streamSynchronize(self.current)
                host.reshape(-1).view(np.uint8)[:] = self._readings[:n_bytes]
        except self.runtime.CUDARuntimeError as error:
            raise explained(error) from error
        return host

    def set_bytes(self, to: int, byte: int, n_bytes: int) -> None:
        """Fill device memory at an address with one byte, in stream order."""
        self.runtime.memsetAsync(to, byte, n_bytes, self.current)

    def page_locked(self, n_bytes: int) -> NDArray[np.uint8]:
        """Host memory that kernels can read, at the same address; kept until the device closes."""
        self._locked.append(memory.allocate(n_bytes, self.ordinal))
        self._seams = sorted(self._seams + self._locked[-1].seams)
        return self._locked[-1].array

    def host_array(self, n_bytes: int, keep_bytes: int) -> NDArray[np.uint8]:
        """Page-locked memory that is used again when nobody holds it; keep_bytes: of all of it, what may stay then."""
        self.bind()
        return self._lending.take(n_bytes, keep_bytes)

    def pointer(self, array: Array | NDArray[Any]) -> int:
        """The address that kernels use, of a device array or of page-locked host memory."""
        address: int = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
        return address

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        """Copy between two addresses of device or page-locked memory, in stream order, without waiting."""
        self.bind()
        cuts = {seam - at for at in (to, source) for seam in self._seams_in(at, n_bytes)}
        ends = [*sorted(cuts), n_bytes]
        for start, end in zip([0, *ends], ends, strict=False):
            self.runtime.memcpyAsync(to + start, source + start, end - start, _COPY_DEFAULT, self.current)

    def copy_rows(self, to: int, to_pitch: int, source: int, source_pitch: int, n_bytes: int, n_rows: int) -> None:
        """Copy n_bytes of each of some rows, which begin a pitch apart, as `copy` does: in one call if possible."""
        areas = ((at, (n_rows - 1) * pitch + n_bytes) for at, pitch in ((to, to_pitch), (source, source_pitch)))
        if max(to_pitch, source_pitch) > MAX_PITCH or any(self._seams_in(*area) for area in areas):
            for row in range(n_rows):
                self.copy(to + row * to_pitch, source + row * source_pitch, n_bytes)
            return
        self.bind()
        self.runtime.memcpy2DAsync(
            to, to_pitch, source, source_pitch, n_bytes, n_rows, _COPY_DEFAULT, self.current
        )  # fmt: skip

    def _seams_in(self, address: int, n_bytes: int) -> list[int]:
        first = bisect.bisect_right(self._seams, address)
        return self._seams[first : bisect.bisect_left(self._seams, address + n_bytes)]

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        free, total = self.runtime.memGetInfo()
        return int(free), int(total)

    # --- order ---

    def stream(self, priority: int = 0) -> GpuStream:
        """A new stream; a negative priority goes first."""
        self._streams.append(self.runtime.streamCreateWithPriority(_NON_BLOCKING, priority))
        return GpuStream(self._streams[-1])

    @contextlib.contextmanager
    def on(self, stream: GpuStream) -> Iterator[None]:
        """Enqueue on another stream within the block."""
        before, self.current = self.current, stream.handle
        try:
            yield
        finally:
            self.current = before

    def wait(self, waiting: GpuStream | None, awaited: GpuStream | None) -> None:
        """Make one stream wait for all that is now enqueued on another; None is the main stream."""
        # One event does: a wait is for its last record, and it may be recorded again once the wait is enqueued.
        self.runtime.eventRecord(self._event, (awaited or self._main).handle)
        self.runtime.streamWaitEvent((waiting or self._main).handle, self._event, 0)

    def capture(self, work: Callable[[], None]) -> GpuGraph:
        """Record what `work` enqueues on the main stream (and on streams that wait for it), running nothing."""
        self.bind()
        with self.on(self._main):
            self.runtime.streamBeginCapture(self._main.handle, _CAPTURE_RELAXED)
            try:
                work()
            except BaseException:
                with contextlib.suppress(self.runtime.CUDARuntimeError):
                    self.runtime.graphDestroy(self.runtime.streamEndCapture(self._main.handle))
                raise
            graph = GpuGraph(self, self.runtime.streamEndCapture(self._main.handle))
        self._graphs.append(graph)
        return graph

    def synchronize(self) -> None:
        """Wait for everything enqueued; a failed kernel raises here."""
        try:
            self.runtime.deviceSynchronize()
        except self.runtime.CUDARuntimeError as error:
            raise explained(error) from error

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """Release everything; may be called twice."""
        if self._closed:  # and touch nothing: another device may be in the middle of a capture
            return
        self._closed = True
        with contextlib.suppress(SparkError):  # after a failed kernel all calls fail, and the process's end releases
            self.synchronize()
        with contextlib.suppress(self.runtime.CUDARuntimeError, self.driver.CUDADriverError):
            for graph in self._graphs:
                graph.close()
            if self._main.handle:
                self.runtime.eventDestroy(self._event)
                self._main.handle = 0
            for stream in self._streams:
                self.runtime.streamDestroy(stream)
            for module in self._modules.values():
                self.driver.moduleUnload(module)
            for address in self._allocations:
                self.runtime.free(address)
            if self._virtual is not None:
                with contextlib.suppress(RuntimeError, OutOfMemoryError):
                    self._virtual.close()
            for locked in self._locked:
                locked.close()
            self._lending.close()
        for held in (self._graphs, self._streams, self._allocations, self._locked):
            held.clear()
        self._modules.clear()
        self._kernels.clear()
