"""A step's calls of the CPU kernels, noted once and made again, which spares all that leads to them.

The ops of a step depend on its shape alone: what differs from step to step lies in arrays whose addresses stay, as a
captured graph of a GPU needs it, too. So calls that were made for a step are right for the next of the same shape.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64
from typing import Any

import numpy as np

from engine.ground.cpu_library import SIGNATURES

Call = tuple[str, tuple[Any, ...]]  # an operation, and its arguments behind the workspace


class Noting:
    """The kernels, which also note what is called."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._kernels = kernels
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        kernel = getattr(self._kernels, name)

        def call(handle: int, *arguments: Any) -> int:
            self.calls.append((name, arguments))
            return int(kernel(handle, *arguments))

        return call


class Noted:
    """Calls that can be made again as long as what their arguments point to is there.

    version: of what the workspace knew when they were noted (`Workspace.version`).
    """

    def __init__(self, kernels: ctypes.CDLL, calls: list[Call], version: int) -> None:
        self.version = version
        self._names = [name for name, _ in calls]
        self._operations = np.array([kernels.spark_operation(name.encode()) for name in self._names], np.int64)
        self._words = np.concatenate([_words(SIGNATURES[name], arguments) for name, arguments in calls])
        self._done = c_int64()
        self._arguments = (
            self._operations.ctypes.data, len(calls), self._words.ctypes.data, ctypes.addressof(self._done),
        )  # fmt: skip

    def run(self, kernels: ctypes.CDLL, handle: int) -> tuple[int, str]:
        """Make the calls; what the first returned that was refused, and its name, or 0."""
        result = int(kernels.spark_repeat(handle, *self._arguments))
        return result, self._names[self._done.value] if result else ""


def _words(signature: str, arguments: tuple[Any, ...]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Arguments as spark_repeat takes them, a word each."""
    words = np.zeros(len(signature), np.uint64)
    for i, (kind, value) in enumerate(zip(signature, arguments, strict=True)):
        if kind == "f":
            words[i] = np.float32(value).view(np.uint32)
        else:
            words[i] = np.uint64(int(value or 0) & 0xFFFFFFFFFFFFFFFF)
    return words
