"""Experts that are guessed and brought before their layer asks, beside the layers before: kernels, and landing slots.

docs/misses.md, "Guessed experts". `ahead` begins a layer's guesses beside the main stream, the layer's first product
says that they can be made, `route` and `gate_up` meet them (landing.cuh), `join` lets the main stream wait for what is
under way. Kernels: landing.cu, product.cu, route.cu, experts.cu.
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
_STEP, _BOARD, _ENTERED, _BUSY, _COUNTS, _SETS = 0, 2, 3, 4, 5, 52

FIRST_TARGET = 2  # the first MoE layer counts the step, and the next one's guesses would be made beside it
N_SETS = 2  # of landing slots, which layers have in turn
COPIERS = 8  # shares of the down part
N_BLOCKS = 8  # that bring: 4 leave much of the link idle, 12 bring more and take as much from the layer that computes
_THREADS = 256
PATIENCE_S = 5e-3  # at least, that guesses wait for a layer, or for what crosses the link
LEAST_GB_PER_S = 5.0  # of a link over which all that a layer uses may have to come meanwhile
ALIGN_BYTES = 256
MAX_LAYERS = 1 << 14
# LandingLayer of landing.cu.
_POINTERS = (
    "weight", "bias", "hidden_weight", "hidden_bias", "output_weight", "choice_bias", "imposed", "slot_of", "home_ptr",
    "landing", "set_words",
)  # fmt: skip
_SIZES = ("gate_bytes", "up_bytes", "gate_size", "up_size", "down_size")
_LAYER = np.dtype(
    [(name, "<u8") for name in _POINTERS]
    + [(name, "<i8") for name in _SIZES]
    + [("n_hidden", "<i4"), ("rule", "<i4"), ("n_groups", "<i4"), ("least_margin", "<f4")]
)

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

    banks: all MoE layers' experts, of `state`, whose tables are guessed for. scorings: of each layer from FIRST_TARGET
    on. eps: of the norm of what they score by. imposed: int32 [layers, ..., SLOTS] in place of what is likely, of the
    first of the middle axis, -1: none. ValueError: shapes that the kernels do not take.
    """

    def __init__(
        self, device: Device, limits: Limits, banks: Sequence[Experts], scorings: Sequence[Scoring], eps: float,
        state: policy.SlotState, imposed: Array | None = None,
    ) -> None:  # fmt: skip
        E, D = limits.n_expert, limits.n_embd
        self.device, self.n_layer, self._columns, self._eps = device, FIRST_TARGET + len(scorings), D, eps
        if D % 8 or len(banks) != self.n_layer > FIRST_TARGET or any(s.weight.shape != (E, D) for s in scorings):
            raise ValueError(f"guesses: {E} experts, {D} columns, {len(scorings)} of {len(banks)} layers")
        if self.n_layer > MAX_LAYERS:
            raise ValueError(f"guesses: {self.n_layer} layers, at most {MAX_LAYERS}")
        self.n_blocks, self.at_once = N_BLOCKS, device.is_concurrent
        self._slot_of, self._n_groups = state.slot_of, [-(-bank.n_ff // ROWS) for bank in banks]
        self._module = Module("landing.cu", (("EXPERTS", str(E)), ("USED", str(limits.n_expert_used))))
        parts = [max(bank.part_bytes[part] for bank in banks) for part in range(3)]
        gate, up, down = (-(-n // ALIGN_BYTES) * ALIGN_BYTES for n in parts)
        self._slot_bytes, self._up_at, self._down_at = gate + up + down, gate, gate + up
        self.patience_s = max(PATIENCE_S, limits.n_expert_used * self._slot_bytes / (1e9 * LEAST_GB_PER_S))
        self._most_units = COPIERS + max(self._n_groups)
        self._set_words = 1 + SLOTS * (1 + self._most_units)
        self.memory = device.empty((N_SETS, SLOTS * self._slot_bytes), np.uint8)
        board = device.page_locked(8 * N_COUNTS)
        board[:] = 0
        self._board = board.view(np.uint64)
        words = np.zeros(_SETS + N_SETS * self._set_words, np.uint64)
        words[_STEP], words[_BOARD] = 1, device.pointer(board)
        self.words = device.upload(words)
        self._most_hidden = max((len(s.hidden_bias) for s in scorings if s.hidden_bias is not None), default=1)
        self._hidden = device.empty((2, self._most_hidden), np.float32)
        self._scores = device.empty((2, E), np.float32)
        self._scorings = [_uploaded(device, s) for s in scorings]
        self._imposed = imposed
        table = np.zeros(self.n_layer, _LAYER)
        for layer in range(FIRST_TARGET, self.n_layer):
            self._describe(table[layer], banks[layer], state)
        self._layers = device.upload(table.view(np.uint8))
        self._stream = device.stream(priority=-1)
        self._under_way = False
        self._entered: int | None = None  # the layer whose guesses the next product allows

    def _describe(self, to: np.void, bank: Experts, state: policy.SlotState) -> None:
        """What `bring` reads of a layer."""
        s, D = self._scorings[bank.layer - FIRST_TARGET], self._columns
        row = self._set(bank.layer)
        arrays = {"slot_of": state.slot_of[bank.layer], "home_ptr": bank.home_ptr, "set_words": row}
        arrays |= {"landing": self.memory[bank.layer % N_SETS]}
        arrays |= {"imposed": None if self._imposed is None else self._imposed[bank.layer]}
        for name in _POINTERS:
            array = arrays[name] if name in arrays else getattr(s, name)
            to[name] = 0 if array is None else self.device.pointer(array)
        for name, qtype in (("gate_bytes", bank.gate_type), ("up_bytes", bank.up_type)):
            to[name] = ROWS * row_bytes(qtype, D, "gate and up")
        for name, size in zip(("gate_size", "up_size", "down_size"), bank.part_bytes, strict=True):
            to[name] = size
        to["n_hidden"] = 0 if s.hidden_bias is None else len(s.hidden_bias)
        to["rule"], to["n_groups"] = _CHOICES.index(s.choice), self._n_groups[bank.layer]
        to["least_margin"] = s.least_margin

    def covers(self, state: policy.SlotState) -> bool:
        """Whether a layer of these tables can be guessed for."""
        return self.device.pointer(state.slot_of) == self.device.pointer(self._slot_of)

    def _set(self, layer: int) -> Array:
        begin = _SETS + layer % N_SETS * self._set_words
        return self.words[begin : begin + self._set_words]

    def ahead(self, x: Array, state: policy.SlotState, layer: int, active_step: Array | None) -> None:
        """Begin to bring what a layer is likely to miss; x [1, D]: what enters the one before.

        Where streams run at the same time, all layers' guesses are one launch, which waits until `entered` says so.
        """
        if layer < FIRST_TARGET or not self.covers(state):
            return
        if self.at_once and layer > FIRST_TARGET:
            self._entered = layer
            return
        last = self.n_layer if self.at_once else layer + 1
        self.device.wait(self._stream, None)
        with self.device.on(self._stream):
            self.device.kernel(self._module, "bring")(
                self.n_blocks if self.at_once else 1,
                _THREADS,
                (
                    self._layers, layer, last, x, self._columns, self._eps, active_step, self._hidden,
                    self._most_hidden, self._scores, self.words, self._most_units,
                    *map(np.int64, (self._slot_bytes, self._up_at, self._down_at)), COPIERS,
                    np.int64(self.patience_s * 1e9),
                ),
            )  # fmt: skip
        self._under_way = True

    def entered(self) -> tuple[Argument, ...]:
        """What the first product of a layer needs more, to say that the layer has what guesses go by; or nothing."""
        layer, self._entered = self._entered, None
        return () if layer is None else (self.words, layer)

    def join(self) -> None:
        """Let what is enqueued next on the main stream wait for all that is under way; before a step's end."""
        if self._under_way:
            self._under_way = False
            self.device.wait(None, self._stream)

    def begin(self) -> None:
        """A step begins."""
        self._under_way, self._entered = False, None

    def times(self, state: policy.SlotState, layer: int) -> bool:
        """Whether a layer's `route` takes the time, also of a step without guesses."""
        return self.covers(state) and layer in (0, self.n_layer - 1)

    def ends(self, state: policy.SlotState, layer: int, with_guesses: bool = True) -> tuple[Argument, ...]:
        """What `route` needs more."""
        if not self.covers(state):
            return (self.words, None, 0, 0, 0)
        guessed = self._set(layer) if with_guesses and layer >= FIRST_TARGET else None
        n_blocks, is_last = COPIERS + self._n_groups[layer], layer + 1 == self.n_layer
        return (self.words, guessed, n_blocks, int(layer == 0), (1 if with_guesses else 2) if is_last else 0)

    def units_of(self, bank: Experts) -> tuple[Argument, ...]:
        """What `gate_up` needs more."""
        sizes = map(np.int64, (self._slot_bytes, self._up_at, self._down_at))
        return (self.words, self._set(bank.layer), self._most_units, self.memory[bank.layer % N_SETS], *sizes)

    def counts(self, wait: bool = False) -> Counts:
        """What the device has said so far; it may be a step behind. wait: all of it, once no step is under way."""
        said = self.device.read(self.words)[_COUNTS : _COUNTS + N_COUNTS] if wait else self._board
        made, useful, misses, brought, taken, *steps_and_ns = said.tolist()
        return Counts(made, useful, misses, brought, taken, Timed(*steps_and_ns))


def _uploaded(device: Device, s: Scoring) -> Scoring:
    arrays = {f.name: getattr(s, f.name) for f in fields(s) if isinstance(getattr(s, f.name), np.ndarray)}
    return replace(s, **{name: device.upload(array) for name, array in arrays.items()})
