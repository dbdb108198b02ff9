"""Looking for a GPU: quick, never hung by a driver, and clear about what is missing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.ground.errors import CapacityError, DeadlineError, MissingExtraError, SparkError
from engine.ground.install import requirement
from engine.ops.cuda import failures
from engine.running import driver, probe
from engine.running.probe import Found, Missing

AMPERE = {
    "name": "NVIDIA RTX A", "capability": [8, 6], "n_sm": 84, "shared_bytes": 99 << 10,
    "bus_id": "0000:01:00.0", "total_bytes": 24 << 30, "free_bytes": 20 << 30,
}  # fmt: skip
TURING = AMPERE | {"name": "NVIDIA T", "capability": [7, 5]}


@pytest.fixture
def with_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with NVIDIA's device files and CuPy."""
    monkeypatch.setattr(probe, "_DEVICES", ("/dev/null",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def saying(answer: Any) -> list[str]:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return [sys.executable, "-c", f"print({text!r})"]


def test_without_devices_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_DEVICES", ("/nonexistent/nvidiactl",))
    monkeypatch.setattr(subprocess, "Popen", None)
    started = time.monotonic()
    found = probe.probe()
    assert time.monotonic() - started < 0.1
    assert isinstance(found, Missing) and "no NVIDIA GPU" in found.reason
    with pytest.raises(SparkError, match="no GPU to compute on"):
        raise found.error()


@pytest.mark.usefixtures("with_device")
def test_the_first_card_that_is_new_enough_is_taken() -> None:
    found = probe.probe(command=saying({"driver": 12080, "devices": [TURING, AMPERE]}))
    assert isinstance(found, Found)
    assert (found.index, found.arch, found.cuda, found.n_sm) == (1, "sm_86", (12, 8), 84)
    assert found.reason == "NVIDIA RTX A (sm_86) with 24.0 GiB, 20.0 GiB free"


@pytest.mark.usefixtures("with_device")
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"driver": 12080, "devices": [TURING]}, "8.0 (Ampere) or newer, and there is NVIDIA T (7.5)"),
        ({"driver": 12080, "devices": []}, "shows none"),
        ({"driver": 11040, "devices": [AMPERE]}, "runs CUDA 11.4"),
        ({"error": "init", "status": 999, "text": "CUDA error 999: unknown error"}, "CUDA error 999"),
        ("Segmentation fault", "ended with status 0"),
    ],
)
def test_what_is_wrong_is_said(answer: Any, words: str) -> None:
    found = probe.probe(command=saying(answer))
    assert isinstance(found, Missing) and words in found.reason and found.hint


@pytest.mark.usefixtures("with_device")
def test_a_driver_that_hangs_is_left_at_the_deadline() -> None:
    started = time.monotonic()
    found = probe.probe(0.5, command=[sys.executable, "-c", "import time; time.sleep(60)"])
    assert time.monotonic() - started < 3
    assert isinstance(found, Missing) and isinstance(found.error(), DeadlineError)
    assert "within 0.5 s" in found.reason


@pytest.mark.parametrize(("version", "extra"), [(13000, "cuda13"), (12090, "cuda12")])
def test_without_cupy_the_pip_line_fits_the_driver(
    with_device: None, monkeypatch: pytest.MonkeyPatch, version: int, extra: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = probe.probe(command=saying({"driver": version, "devices": [AMPERE]}))
    assert isinstance(found, Missing) and isinstance(found.error(), MissingExtraError)
    assert found.hint == f"pip install {requirement(extra)}" and f"[{extra}]" in found.hint


def test_the_child_process_answers_with_one_object() -> None:
    """Here without a driver most likely; the answer is an object in any case."""
    command = [sys.executable, "-I", "-S", str(Path(driver.__file__))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    said = json.loads(done.stdout)
    assert "error" in said or said["driver"] > 0
    assert driver.memory_bytes("0000:00:00.0") is None


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [(2, CapacityError, "out of memory"), (719, SparkError, "is lost"), (999, SparkError, "is lost"),
     (802, SparkError, "cannot be used"), (98, SparkError, "CUDA failed")],
)  # fmt: skip
def test_errors_of_cuda_become_one_explained_error(status: int, kind: type[SparkError], words: str) -> None:
    class CudaError(RuntimeError):
        def __init__(self) -> None:
            super().__init__(f"cudaError {status}")
            self.status = status

    with pytest.raises(kind, match=words) as raised, failures.translated():
        raise CudaError
    assert raised.value.hint and f"cudaError {status}" in raised.value.message
    with pytest.raises(KeyError), failures.translated():
        raise KeyError
    assert failures.explained(raised.value) is raised.value
