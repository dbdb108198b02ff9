"""Which backend computes: its ops, its device, its slow tier, and why it was chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from engine.ground import config
from engine.ground.errors import SparkError
from engine.memory.residency import ExpertTensors, MappedTier
from engine.ops import Limits
from engine.ops.cuda.device import Device
from engine.ops.device import Memory
from engine.ops.host import HostDevice
from engine.ops.interface import Ops, Workspace
from engine.placing.placement import Placement
from engine.running import probe

if TYPE_CHECKING:
    from engine.memory.slowtier import PageLockedTier, Uploader

    Tier: TypeAlias = MappedTier | PageLockedTier


@dataclass(frozen=True, slots=True)
class Backend:
    """A module of ops and what goes with it.

    device: where arrays live. gpu: the same, where it has kernels, streams and graphs; steps are captured and tokens
    drawn there. workspace(limits): scratch memory of the ops. uploader(): what brings weights to the device, None where
    they are used in place. tier(experts, placement, uploader): where experts outside slots are read. compiler: what
    made a GPU's kernels, besides their sources. free_bytes: of the GPU before this process took any, where it is known.
    bus: the GPU's PCI address, where it is known.
    """

    name: str
    reason: str
    ops: Ops
    device: Memory
    workspace: Callable[[Limits], Workspace]
    uploader: Callable[[], Uploader | None]
    tier: Callable[[tuple[ExpertTensors, ...], Placement, Uploader | None], Tier]
    gpu: Device | None = None
    compiler: str = ""
    free_bytes: int | None = None
    bus: str | None = None


def open_backend(device: config.Device, threads: int) -> Backend:
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
    )


def _cuda(found: probe.Found, why: str, threads: int) -> Backend:
    from engine.memory.slowtier import PageLockedTier, Uploader
    from engine.ops.cuda import gpu, ops
    from engine.ops.cuda.failures import translated

    with translated():
        device = gpu.open_device(found.index)

    def tier(experts: tuple[ExpertTensors, ...], placement: Placement, uploader: Uploader | None) -> Tier:
        assert uploader is not None
        return PageLockedTier(device, experts, placement.pinned, uploader)

    return Backend(
        "cuda",
        f"{why}: {device.name}",
        ops,
        device,
        workspace=lambda limits: ops.workspace(limits, device),
        uploader=lambda: Uploader(device, threads),
        tier=tier,
        gpu=device,
        compiler=device.compiler,
        free_bytes=found.free_bytes,
        bus=gpu.bus_of(found.index),
    )
