"""Experts that are guessed and brought before their layer asks, beside the layers before: kernels, and landing slots.

docs/cuda.md, "Guessed experts". `ahead` enqueues a layer's guesses on a stream of their own, `route` and `gate_up` meet
them (landing.cuh), `join` lets the main stream wait for what is under way. Kernels: landing.cu, route.cu, experts.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from engine.formats.quants import row_bytes
from engine.ops import F32, Experts, Limits
from engine.ops.cuda.device import Argument, Array, Device, Module
from engine.placing import policy
from engine.placing.guesses import Timed

# Of landing.cuh.
SLOTS, ROWS, N_COUNTS = 4, 32, 9
_STEP, _MODE, _BOARD, _COUNTS, _SETS = 0, 1, 3, 4, 16
NEVER, MOSTLY, SELDOM, ALWAYS = range(4)

FIRST_TARGET = 2  # the first MoE layer counts the step, and the next one's guesses would be made beside it
N_SETS = 2  # of landing slots, which layers have in turn
COPIERS = 8  # shares of the down part
N_BLOCKS = 4  # that bring: more take multiprocessors from the layer that computes
_THREADS, _SCORE_WARPS = 512, 8
ALIGN_BYTES = 256
MAX_LAYERS = 1 << 14

F16 = NDArray[np.float16]


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """What scores the experts of a layer, from the residual that enters the one before, and what is likely enough.

    weight float16 [E, D]; bias float32 [E] or None; of an MLP hidden_weight float16 [H, D], hidden_bias float32 [H] and
    output_weight float16 [E, H], else None. choice: how a score becomes what the layer chooses by: `score`, or plus
    choice_bias float32 [E] its `sigmoid` or its `share`. least_margin: as of `placing.guesses.margins`.
    """

    weight: F16
    least_margin: float
    bias: F32 | None = None
    hidden_weight: F16 | None = None
    hidden_bias: F32 | None = None
    output_weight: F16 | None = None
    choice: str = "score"
    choice_bias: F32 | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """What came of guesses since the start: how many, those that were missed, what missed, bytes; and steps' times.

    Of layers that are guessed for. brought_bytes: that landed; taken_bytes: of these, what a layer then took.
    """

    made: int
    useful: int
    misses: int
    brought_bytes: int
    taken_bytes: int
    timed: Timed


_CHOICES = ("score", "sigmoid", "share")


class Landing:
    """Landing slots, who fills them, and what came of it, of steps of one token.

    part_bytes: the largest gate, up and down of any layer; n_ff: rows of the largest gate. scorings: of each MoE layer
    from FIRST_TARGET on. eps: of the norm of what they score by. slot_of: of the tables that are guessed for.
    ValueError: shapes that the kernels do not take.
    """

    def __init__(
        self, device: Device, limits: Limits, part_bytes: tuple[int, int, int], n_ff: int,
        scorings: Sequence[Scoring], eps: float, slot_of: Array,
    ) -> None:  # fmt: skip
        E, D = limits.n_expert, limits.n_embd
        self.device, self.n_layer, self._eps, self._slot_of = device, FIRST_TARGET + len(scorings), eps, slot_of
        if D % 8 or self.n_layer > MAX_LAYERS or any(s.weight.shape != (E, D) for s in scorings):
            raise ValueError(f"guesses: {E} experts, {D} columns, {self.n_layer} layers")
        self.n_blocks = N_BLOCKS
        self._module = Module("landing.cu", (("EXPERTS", str(E)), ("USED", str(limits.n_expert_used))))
        gate, up, down = (-(-n // ALIGN_BYTES) * ALIGN_BYTES for n in part_bytes)
        self._slot_bytes, self._up_at, self._down_at = gate + up + down, gate, gate + up
        self._most_units = COPIERS + -(-n_ff // ROWS)
        self._set_words = 1 + SLOTS * (1 + self._most_units)
        self.memory = device.empty((N_SETS, SLOTS * self._slot_bytes), np.uint8)
        board = device.page_locked(8 * N_COUNTS)
        board[:] = 0
        self._board = board.view(np.uint64)
        words = np.zeros(_SETS + N_SETS * self._set_words, np.uint64)
        words[_STEP], words[_BOARD] = 1, device.pointer(board)
        self.words = device.upload(words)
        hidden = max((len(s.hidden_bias) for s in scorings if s.hidden_bias is not None), default=0)
        self._hidden = device.empty(max(hidden, 1), np.float32)
        self._scores = device.empty(E, np.float32)
        self._scorings = [_uploaded(device, s) for s in scorings]
        self._stream = device.stream(priority=-1)
        self._under_way = False
        self.imposed: Array | None = None  # int32 [n_layer, SLOTS] in place of what is likely, -1: none

    def covers(self, state: policy.SlotState) -> bool:
        """Whether a layer of these tables can be guessed for."""
        return self.device.pointer(state.slot_of) == self.device.pointer(self._slot_of)

    def _set(self, layer: int) -> Array:
        begin = _SETS + layer % N_SETS * self._set_words
        return self.words[begin : begin + self._set_words]

    def ahead(self, x: Array, state: policy.SlotState, bank: Experts, active_step: Array | None) -> None:
        """Begin to bring what the layer of `bank` is likely to miss; x [1, D]: what enters the one before."""
        if bank.layer < FIRST_TARGET or not self.covers(state):
            return
        s = self._scorings[bank.layer - FIRST_TARGET]
        (E, D), H = s.weight.shape, 0 if s.hidden_bias is None else len(s.hidden_bias)
        gate_row, up_row = (row_bytes(t, D, "gate and up") for t in (bank.gate_type, bank.up_type))
        score, bring = (self.device.kernel(self._module, name) for name in ("score", "bring"))
        ready = (active_step, self.words)
        self.device.wait(self._stream, None)
        with self.device.on(self._stream):
            hidden = None if s.hidden_weight is None else self._hidden[:H]
            if hidden is not None:
                first = (s.hidden_weight, s.hidden_bias, x, D, H, self._eps, None, None, 0, 1, *ready, hidden)
                score(-(-H // _SCORE_WARPS), 32 * _SCORE_WARPS, first)
            last = (s.weight, s.bias, x, D, E, self._eps, s.output_weight, hidden, H, 0, *ready, self._scores)
            score(-(-E // _SCORE_WARPS), 32 * _SCORE_WARPS, last)
            bring(
                self.n_blocks,
                _THREADS,
                (
                    self._scores, _CHOICES.index(s.choice), s.choice_bias, float(s.least_margin),
                    None if self.imposed is None else self.imposed[bank.layer], active_step, bank.layer,
                    state.slot_of[bank.layer], bank.home_ptr, np.int64(ROWS * gate_row), np.int64(ROWS * up_row),
                    *map(np.int64, bank.part_bytes), -(-bank.n_ff // ROWS), COPIERS, self.memory[bank.layer % N_SETS],
                    *map(np.int64, (self._slot_bytes, self._up_at, self._down_at)), self.words, self._set(bank.layer),
                    self._most_units,
                ),
            )  # fmt: skip
        self._under_way = True

    def join(self) -> None:
        """Let what is enqueued next on the main stream wait for all that is under way; before a step's end."""
        if self._under_way:
            self._under_way = False
            self.device.wait(None, self._stream)

    def begin(self) -> None:
        """A step begins. What one that failed has left under way is of other tags, so nobody waits for it."""
        self._under_way = False

    def ends(self, state: policy.SlotState, layer: int) -> tuple[Argument, ...]:
        """What `route` needs more."""
        if not self.covers(state):
            return (self.words, None, 0, 0)
        guessed = self._set(layer) if layer >= FIRST_TARGET else None
        return (self.words, guessed, int(layer == 0), int(layer + 1 == self.n_layer))

    def units_of(self, bank: Experts) -> tuple[Argument, ...]:
        """What `gate_up` needs more."""
        sizes = map(np.int64, (self._slot_bytes, self._up_at, self._down_at))
        return (self.words, self._set(bank.layer), self._most_units, self.memory[bank.layer % N_SETS], *sizes)

    def set_mode(self, mode: int) -> None:
        """Which steps have guesses: none (NEVER), all but each 16th, only these (SELDOM), all; between steps."""
        self.device.write(self.words[_MODE : _MODE + 1], np.array([mode], np.uint64))

    def counts(self, wait: bool = False) -> Counts:
        """What the device has said so far; it may be a step behind. wait: all of it, once no step is under way."""
        said = self.device.read(self.words)[_COUNTS : _COUNTS + N_COUNTS] if wait else self._board
        made, useful, misses, brought, taken, *steps_and_ns = said.tolist()
        return Counts(made, useful, misses, brought, taken, Timed(*steps_and_ns))


def _uploaded(device: Device, s: Scoring) -> Scoring:
    arrays = {f.name: getattr(s, f.name) for f in fields(s) if isinstance(getattr(s, f.name), np.ndarray)}
    return replace(s, **{name: device.upload(array) for name, array in arrays.items()})
