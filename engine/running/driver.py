"""What NVIDIA's driver says of its GPUs, asked without making a CUDA context.

Only the standard library is imported: `python driver.py` is the child process of running/probe.py, which a driver
that hangs may hang. It prints one JSON object.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

_SM_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_SHARED_BYTES = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def query() -> dict[str, Any]:
    """The driver's CUDA version (13000 is 13.0) and a record of each visible GPU; or an `error` and its text."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": "no_library", "text": str(error)}
    status = cuda.cuInit(0)
    if status:
        return {"error": "init", "status": status, "text": _error_text(cuda, status)}
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return {"driver": version.value, "devices": [_device(cuda, i) for i in range(count.value)]}


def _device(cuda: Any, index: int) -> dict[str, Any]:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name, bus = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetPCIBusId(bus, len(bus), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device)
        return value.value

    bus_id = bus.value.decode(errors="replace")
    found = memory_bytes(bus_id)
    return {
        "name": name.value.decode(errors="replace"),
        "capability": [attribute(_MAJOR), attribute(_MINOR)],
        "n_sm": attribute(_SM_COUNT),
        "shared_bytes": attribute(_SHARED_BYTES),
        "bus_id": bus_id,
        "total_bytes": total.value,
        "free_bytes": None if found is None else found[0],
    }


def _error_text(cuda: Any, status: int) -> str:
    text = ctypes.c_char_p()
    if cuda.cuGetErrorString(status, ctypes.byref(text)) or not text.value:
        return f"CUDA error {status}"
    return f"CUDA error {status}: {text.value.decode(errors='replace')}"


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def memory_bytes(bus_id: str) -> tuple[int, int] | None:
    """(free, total) bytes of the GPU on a PCI bus as NVML counts them, contexts included; None without NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        handle, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(handle)):
            return None
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        return int(memory.free), int(memory.total)
    finally:
        nvml.nvmlShutdown()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(query()))
