"""Backends, devices and architectures fit their protocols: mypy compares them, since modules are found by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from engine import models

ROOT = Path(__file__).parent.parent
FAMILIES = "\n".join(
    f"from engine.models import {name}\n{name}_: Architecture = {name}\n"
    f"def {name}_config(c: {name}.Config) -> ModelConfig:\n    return c"
    for name in models.known()
)
CHECKED = """
from engine.drafting.dflash import DFlash
from engine.drafting.source import Source
from engine.models import qwen35, qwen35moe
from engine.models.layers import Architecture, ModelConfig, Recurrent
from engine.models.nextn import Predicting
from engine.ops import cpu, reference
from engine.ops.cuda import ops as cuda
from engine.ops.cuda.counting import CountingDevice
from engine.ops.cuda.device import Device
from engine.ops.cuda.gpu import GpuDevice
from engine.ops.device import Memory
from engine.ops.cpu_workspace import Workspace as CpuWorkspace
from engine.ops.host import HostDevice
from engine.ops.interface import Ops, Workspace

a: Ops = reference
b: Ops = cpu
c: Ops = cuda
d: Recurrent = qwen35
e: Recurrent = qwen35moe
f: Predicting = qwen35
g: Predicting = qwen35moe

def sources(a: DFlash) -> Source:
    return a

def workspaces(a: reference.Workspace, b: CpuWorkspace, c: cuda.Workspace) -> tuple[Workspace, ...]:
    return a, b, c

def devices(a: CountingDevice, b: GpuDevice) -> tuple[Device, ...]:
    return a, b

def memories(a: CountingDevice, b: GpuDevice, c: HostDevice) -> tuple[Memory, ...]:
    return a, b, c
"""


def mypy(source: str, folder: Path) -> str:
    path = folder / "snippet.py"
    path.write_text(source)
    command = [sys.executable, "-m", "mypy", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    return done.stdout + done.stderr


def test_whatever_is_found_by_name_fits_its_protocol(tmp_path: Path) -> None:
    found = mypy(CHECKED + FAMILIES, tmp_path)
    assert found.startswith("Success"), found


def test_what_does_not_fit_is_found(tmp_path: Path) -> None:
    """Modules that lack functions, or have them with other arguments, are no backend and no architecture."""
    wrong = (
        "from engine.models import laguna, layers, loading\nfrom engine.ops import delta, interface\n"
        "a: layers.Architecture = loading\nb: layers.Recurrent = laguna\nc: interface.Ops = delta\n"
    )
    assert len(re.findall(r"snippet.py:\d+: error: Incompatible types", mypy(wrong, tmp_path))) == 3
