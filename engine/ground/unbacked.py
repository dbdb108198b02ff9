"""Arrays that have shapes, types, views and addresses like any other, and no memory behind them."""

from __future__ import annotations

import mmap
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engine.ground.errors import CapacityError

_NO_RESERVE = 0x4000  # MAP_NORESERVE


def unbacked(shape: int | tuple[int, ...], dtype: DTypeLike, access: int = mmap.PROT_READ) -> NDArray[Any]:
    """An array of zeros whose pages the kernel does not reserve, and provides only when they are touched.

    access: as of mmap. CapacityError where there are not so many addresses.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    kind = np.dtype(dtype)
    count = prod(shape)
    size = max(count * kind.itemsize, 1)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        memory = mmap.mmap(-1, size, flags=flags, prot=access)
    except OSError as error:  # a limit: what is only counted takes addresses, too
        raise CapacityError(
            f"{size} bytes of address space are not to be had: {error.strerror}", hint="raise `ulimit -v`"
        ) from error
    return np.frombuffer(memory, kind, count).reshape(shape)
