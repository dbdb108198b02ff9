"""Views of scratch memory, kept: making one takes longer than finding it, and every launch needs some."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import DTypeLike

from engine.ops.cuda.device import Array

MOST_VIEWS = 1024  # of an array, after which they are forgotten: steps may have any length


class Views:
    """Of one array, all of whose memory is anybody's."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self._made: dict[tuple[object, ...], Array] = {}

    def __call__(self, shape: tuple[int, ...], dtype: DTypeLike | None = None, first_byte: int = 0) -> Array:
        """The memory from first_byte on as an array of this shape; dtype: None, the array's own."""
        key = shape, dtype, first_byte
        made = self._made.get(key)
        if made is None:
            if len(self._made) >= MOST_VIEWS:
                self._made.clear()
            flat = self.array.reshape(-1)
            flat = flat if dtype is None else flat.view(dtype)
            first = first_byte // np.dtype(flat.dtype).itemsize
            made = self._made[key] = flat[first : first + prod(shape)].reshape(shape)
        return made
