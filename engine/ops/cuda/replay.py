"""Recorded expert choices in place of the router's: decode speed at a miss rate that one chooses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.ops import SMALL_TOKENS
from engine.ops.cuda.device import Array, Device, Module


class Replay:
    """Choices of decoded tokens, one after the other and then from the first again; sequences of a step take turns.

    What is taken back of a step that one sequence has is given back, so choices belong to places of a reply. choices:
    integers [n_tokens, L, A]. imposed: int32 [L, SMALL_TOKENS, A] on the device, those of the step at hand.
    n_rows: rows of the step that follows; 0: its choices are its own. guesses: integers [n_tokens, L, S], experts that
    are to be guessed (landing.py), -1: none; imposed_guesses: int32 [L, SMALL_TOKENS, S], as `imposed`.
    """

    def __init__(
        self, device: Device, choices: NDArray[np.integer], guesses: NDArray[np.integer] | None = None
    ) -> None:
        self.device, self.n_rows = device, 0
        self.n_tokens, L, A = choices.shape
        self.choices = device.upload(np.ascontiguousarray(choices.astype(np.int16)))
        self.counter = device.upload(np.zeros(1, np.int32))
        self.imposed: Array = device.upload(np.zeros((L, SMALL_TOKENS, A), np.int32))
        self.guesses: Array | None = None
        self.imposed_guesses: Array | None = None
        if guesses is not None:
            self.guesses = device.upload(np.ascontiguousarray(guesses.astype(np.int16)))
            self.imposed_guesses = device.upload(np.full((L, SMALL_TOKENS, guesses.shape[2]), -1, np.int32))

    def next(self, active_step: Array | None) -> None:
        """Enqueue: the next tokens' choices become the imposed ones, unless the step is a no-op."""
        if self.guesses is not None and self.imposed_guesses is not None:  # first: it leaves the counter as it was
            self._next(self.guesses, self.imposed_guesses, 0, active_step)
        self._next(self.choices, self.imposed, self.n_rows, active_step)

    def _next(self, values: Array, imposed: Array, n: int, active_step: Array | None) -> None:
        L, most, width = imposed.shape
        sizes = self.n_tokens, L * width, width, self.n_rows, n, most
        arguments = (values, *sizes, active_step, self.counter, imposed)
        self.device.kernel(Module("replay.cu"), "replay")(1, 256, arguments)

    def back(self, n: int) -> None:
        """Enqueue: the choices of the last n tokens come once more."""
        if n:
            arguments = (self.n_tokens, n % self.n_tokens, self.counter)
            self.device.kernel(Module("replay.cu"), "replay_back")(1, 1, arguments)

    def reset(self) -> None:
        """The first choices come next."""
        self.device.write(self.counter, np.zeros(1, np.int32))
