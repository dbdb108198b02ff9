"""Which backend computes: its ops, its device, its slow tier, and why it was chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from engine import probe
from engine.config import Device
from engine.errors import SparkError
from engine.forward import Forward
from engine.ops import Limits
from engine.ops.host import HostDevice
from engine.residency import MappedTier, Residency

if TYPE_CHECKING:
    from engine.decoding import Graphs
    from engine.slowtier import Uploader


@dataclass(frozen=True, slots=True)
class Backend:
    """A module of ops and what goes with it.

    workspace(limits): scratch memory of the ops. uploader(): what brings weights to the device, None where they are
    used in place. tier(experts, placement, uploader): where experts outside slots are read. graphs(forward, residency):
    captured steps, None where there are none. free_bytes: of the GPU before this process took any, where it is known.
    """

    name: str
    reason: str
    ops: ModuleType
    device: Any
    workspace: Callable[[Limits], Any]
    uploader: Callable[[], Uploader | None]
    tier: Callable[..., Any]
    graphs: Callable[[Forward, Residency], Graphs | None]
    free_bytes: int | None = None


def open_backend(device: Device, threads: int) -> Backend:
    """The backend for `--device`; a GPU that was asked for and is not there is an error.

    `auto` looks for a GPU with a deadline, so that a driver that hangs costs seconds and not the start.
    """
    if device in ("cuda", "auto"):
        found = probe.probe()
        if isinstance(found, probe.Found):
            try:
                return _cuda(found, "asked for" if device == "cuda" else "there is a GPU", threads)
            except SparkError as error:
                if device == "cuda":
                    raise
                return _host("cpu", f"the GPU cannot be used: {error.message}", threads)
        if device == "cuda":
            raise found.error()
        return _host("cpu", found.reason, threads)
    return _host(device, "asked for", threads)


def _host(name: str, why: str, threads: int) -> Backend:
    ops, host = importlib.import_module(f"engine.ops.{name}"), HostDevice()
    return Backend(
        name,
        why,
        ops,
        host,
        workspace=lambda limits: ops.workspace(limits, threads),
        uploader=lambda: None,
        tier=lambda experts, placement, uploader: MappedTier(host, experts),
        graphs=lambda forward, residency: None,
    )


def _cuda(found: probe.Found, why: str, threads: int) -> Backend:
    from engine.decoding import Graphs
    from engine.ops.cuda import gpu, ops
    from engine.ops.cuda.failures import translated
    from engine.slowtier import PageLockedTier, Uploader

    with translated():
        device = gpu.open_device(found.index)
    return Backend(
        "cuda",
        f"{why}: {device.name}",
        ops,
        device,
        workspace=lambda limits: ops.workspace(limits, device),
        uploader=lambda: Uploader(device, threads),
        tier=lambda experts, placement, uploader: PageLockedTier(device, experts, placement.pinned, uploader),
        graphs=Graphs,
        free_bytes=found.free_bytes,
    )
