"""Which backend computes: its ops, its device, its slow tier, and why it was chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from engine.config import Device
from engine.ops import Limits
from engine.ops.host import HostDevice
from engine.residency import MappedTier

HOST_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Backend:
    """A module of ops and what goes with it.

    workspace(limits): scratch memory of the ops. tier(experts, placement): where experts outside slots are
    read. chunk_tokens: of a prefill step, where nobody asked for another number.
    """

    name: str
    reason: str
    ops: ModuleType
    device: Any
    workspace: Callable[[Limits], Any]
    tier: Callable[..., Any]
    chunk_tokens: int


def open_backend(device: Device, threads: int) -> Backend:
    """The backend for `--device`; a GPU that was asked for and is not there is an error."""
    name = "cpu" if device == "auto" else device
    why = "no CUDA backend in this version" if device == "auto" else "asked for"
    return _host(name, why, threads)


def _host(name: str, why: str, threads: int) -> Backend:
    ops, host = importlib.import_module(f"engine.ops.{name}"), HostDevice()
    return Backend(
        name,
        why,
        ops,
        host,
        workspace=lambda limits: ops.workspace(limits, threads),
        tier=lambda experts, placement: MappedTier(host, experts),
        chunk_tokens=HOST_CHUNK_TOKENS,
    )
