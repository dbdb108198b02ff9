"""Is there a GPU to compute on? Asked quickly, in a child process, because a driver can hang whoever asks it.

A machine without NVIDIA's devices is told by its files alone; no library is loaded and no process started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.ground.errors import DeadlineError, MissingExtraError, SparkError
from engine.ground.install import requirement
from engine.running import driver

DEADLINE_S = 20.0  # the first call after a boot can take seconds on a machine with many GPUs
OLDEST = (8, 0)  # compute capability that the kernels need
_DEVICES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")  # the last: Windows' subsystem for Linux
_REAP_S = 1.0  # a killed child that stays is stuck in the driver and is left behind
_CPU = "use --device cpu"


@dataclass(frozen=True, slots=True)
class Found:
    """A GPU that the kernels run on.

    shared_bytes: the most that a block can have. free_bytes: None where NVML does not say. cuda: the newest version
    that the driver runs.
    """

    index: int
    name: str
    capability: tuple[int, int]
    n_sm: int
    shared_bytes: int
    bus_id: str
    total_bytes: int
    free_bytes: int | None
    cuda: tuple[int, int]

    @property
    def arch(self) -> str:
        """Like sm_90."""
        return "sm_{}{}".format(*self.capability)

    @property
    def reason(self) -> str:
        """One line for the user."""
        free = "" if self.free_bytes is None else f", {self.free_bytes / 2**30:.1f} GiB free"
        return f"{self.name} ({self.arch}) with {self.total_bytes / 2**30:.1f} GiB{free}"


@dataclass(frozen=True, slots=True)
class Missing:
    """No GPU: why, and what could be done. `error` is what `--device cuda` raises."""

    reason: str
    hint: str = _CPU
    kind: type[SparkError] = SparkError

    def error(self) -> SparkError:
        """The refusal of a GPU that was asked for."""
        return self.kind(f"no GPU to compute on: {self.reason}", hint=self.hint)


def probe(deadline_s: float = DEADLINE_S, command: Sequence[str] | None = None) -> Found | Missing:
    """Look for a GPU and for CuPy.

    deadline_s: a driver that has not answered by then counts as missing. command: what to run instead of
    driver.py, for tests.
    """
    if not any(Path(path).exists() for path in _DEVICES):
        return Missing("this machine has no NVIDIA GPU, or no driver for it")
    said = _ask(command or [sys.executable, "-I", "-S", driver.__file__], deadline_s)
    if isinstance(said, Missing):
        return said
    cuda = said["driver"] // 1000, said["driver"] % 1000 // 10
    found = [
        Found(
            i, d["name"], (d["capability"][0], d["capability"][1]), d["n_sm"], d["shared_bytes"], d["bus_id"],
            d["total_bytes"], d["free_bytes"], cuda,
        )
        for i, d in enumerate(said["devices"])
    ]  # fmt: skip
    if not found:
        return Missing("the driver shows none", f"look at nvidia-smi and CUDA_VISIBLE_DEVICES, or {_CPU}")
    fit = next((gpu for gpu in found if gpu.capability >= OLDEST), None)
    if fit is None:
        names = ", ".join(f"{g.name} ({g.capability[0]}.{g.capability[1]})" for g in found)
        least = "{}.{}".format(*OLDEST)
        return Missing(f"the kernels need compute capability {least} (Ampere) or newer, and there is {names}")
    if cuda[0] < 12:
        return Missing(f"the driver runs CUDA {cuda[0]}.{cuda[1]}, and 12 is needed", "install a newer driver")
    if importlib.util.find_spec("cupy") is None:
        return Missing("CuPy is not installed", pip_line(cuda), MissingExtraError)
    return fit


def pip_line(cuda: tuple[int, int]) -> str:
    """What to install for the newest CUDA version that the driver runs."""
    return f"pip install {requirement('cuda13' if cuda >= (13, 0) else 'cuda12')}"


def _ask(command: Sequence[str], deadline_s: float) -> dict[str, Any] | Missing:
    """What the child process prints; it is killed when the deadline passes."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)
        if process.stdout is not None:
            process.stdout.close()
        return Missing(
            f"the NVIDIA driver did not answer within {deadline_s:g} s",
            "look at nvidia-smi and dmesg; restarting the machine may be the only cure",
            DeadlineError,
        )
    try:
        said: dict[str, Any] = json.loads(output)
    except ValueError:
        return Missing(f"asking the NVIDIA driver ended with status {process.returncode}", "look at nvidia-smi")
    if "error" in said:
        return Missing(f"the NVIDIA driver cannot be used: {said['text']}", "look at nvidia-smi")
    return said
