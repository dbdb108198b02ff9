"""CUDA's errors as the engine's: one explained error each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.ground.errors import CapacityError, DeviceLostError, SparkError

_OUT_OF_MEMORY = 2
_NO_DEVICE = (100, 101, 802, 803, 804)  # none, invalid, not ready, driver and library do not match
# What a card that fell off the bus, an uncorrectable memory error or a kernel's crash leaves: the context is lost.
_LOST = (46, 214, 219, 220, 226, 700, 702, 708, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999)


def explained(error: Exception, doing: str = "") -> SparkError:
    """The SparkError for an error of CuPy, of the runtime or of the driver; one that is explained already stays.

    doing: what failed, for errors that do not tell by themselves. A context that is lost gives DeviceLostError.
    """
    if isinstance(error, SparkError):
        return error
    status = getattr(error, "status", None)
    what = f"{error}, {doing}" if doing else str(error)
    if status == _OUT_OF_MEMORY or type(error).__name__ == "OutOfMemoryError":
        return CapacityError(
            f"the GPU is out of memory ({what})",
            hint="another program may use it: look at nvidia-smi; a smaller --vram leaves room",
        )
    if status in _NO_DEVICE:
        return SparkError(f"the GPU cannot be used ({what})", hint="look at nvidia-smi; --device cpu needs no GPU")
    if status in _LOST:
        return DeviceLostError(
            f"the GPU failed, and what it held is lost ({what})",
            hint="start again; if it happens again, nvidia-smi and dmesg say more, and the model and the --vram of "
            "this run belong in a report",
        )
    return SparkError(f"CUDA failed: {what}", hint="dmesg and nvidia-smi may say more")


@contextmanager
def translated(doing: str = "") -> Iterator[None]:
    """Raise CUDA's errors within the block as SparkErrors; `doing` as in `explained`."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "status") and type(error).__name__ != "OutOfMemoryError":
            raise
        raise explained(error, doing) from error
