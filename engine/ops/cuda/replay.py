"""Recorded expert choices in place of the router's: decode speed at a miss rate that one chooses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.ops.cuda.device import Array, Device, Module


class Replay:
    """Choices of steps of one token, one after the other and then from the first again.

    choices: integers [n_tokens, L, A]. imposed: int32 [L, 1, A] on the device, those of the step at hand.
    """

    def __init__(self, device: Device, choices: NDArray[np.integer]) -> None:
        self.device = device
        self.n_tokens, L, A = choices.shape
        self.choices = device.upload(np.ascontiguousarray(choices.astype(np.int16)))
        self.counter = device.upload(np.zeros(1, np.int32))
        self.imposed: Array = device.upload(choices[:1].astype(np.int32).reshape(L, 1, A))

    def next(self, active_step: Array | None) -> None:
        """Enqueue: the next token's choices become the imposed ones, unless the step is a no-op."""
        n = self.imposed.shape[0] * self.imposed.shape[2]
        arguments = (self.choices, self.n_tokens, n, active_step, self.counter, self.imposed)
        self.device.kernel(Module("replay.cu"), "replay")(1, 256, arguments)
