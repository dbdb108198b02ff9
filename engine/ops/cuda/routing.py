"""Embedding, routing and residency on the device: `embed` and `route` of the reference, and the copies of experts.

What a layer's expert FFN reads is decided here. A step of at most SMALL_TOKENS tokens gets the active table: for
each distinct expert of the step where to read it, which slot to write it through to, and which rows use it. A
longer step gets `source`, where every expert is during the step, and its fetches are copied afterwards:

    short chunk:   choose - Staging.gather(the experts it chose) - advance - FFN reads Staging.source - fill
    long chunk:    Staging.gather(all that miss, ahead, on another stream) - choose - advance - FFN - fill
    all resident:  route - FFN reads Routing.source - (no fetches)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.formats import block_types
from engine.formats.quants import QTensor
from engine.ops import SMALL_TOKENS, Experts, Fetches, Gating, Limits
from engine.ops.cuda.cpu_experts import CpuExperts
from engine.ops.cuda.device import Argument, Array, Device, Module
from engine.ops.cuda.landing import Landing
from engine.ops.cuda.several_jobs import SeveralJobs
from engine.placing import policy

MAX_EXPERTS = 512
MAX_USED = 16
ALIGN_BYTES = 256  # of the parts of an expert in staging memory
BYPASS_PLACES = 16
JOIN_TOKENS = 2  # of more the blocks come in several rounds, of which each repeats the choice
Defines = tuple[tuple[str, str], ...]
_COPY_THREADS = 512


def embed(device: Device, table: QTensor, tokens: Array, x: Array, scale: float = 1.0) -> None:
    """Rows of the embedding table: x float32 [T, D] = scale * table[tokens], int32 [T]; table [V, D] of native type."""
    T, D = x.shape
    if table.shape[1] != D or tokens.shape != (T,):
        raise ValueError(f"embed: rows of {table.shape[1]} and {tokens.shape} tokens for x {x.shape}")
    record = block_types.record(table.qtype, table.name)
    kernel = device.kernel(Module("embed.cu", (("TYPE", record.name),)), "embed")
    kernel((T, -(-D // 256)), 256, (table.data, np.int64(table.row_bytes), tokens, D, float(scale), x))


def _tables(state: policy.SlotState) -> tuple[Array, ...]:
    return (
        state.slot_begin, state.slot_of, state.expert_of, state.heat, state.pinned, state.clock, state.counts,
        state.hits, state.misses, state.expert_ptr, state.home_ptr, state.slot_ptr,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice that is still to be made: by a block of the kernel that reads the experts, or by `launch`.

    module, threads, args: of `route`. settled: by which those wait that read the active table meanwhile (settled.cuh).
    n_tokens, n_expert, n_used: T, E and A. poisons: slots that experts enter get 0xFF first, for tests.
    """

    device: Device
    module: Module
    threads: int
    args: tuple[Argument, ...]
    settled: Array
    n_tokens: int
    n_expert: int
    n_used: int
    poisons: bool = False

    def fits(self, threads: int) -> bool:
        """Whether a block of so many threads can make it: a thread an expert and a pair, a warp a token."""
        return threads >= max(self.n_expert, self.n_tokens * max(self.n_used, 32))

    @property
    def defines(self) -> Defines:
        """What is defined for the kernel that reads the experts."""
        poison = (("POISON", "1"),) if self.poisons else ()
        return (*self.module.defines, ("RECENT_TOKENS", str(self._most)), ("SETTLES", "1"), *poison)

    @property
    def shared_bytes(self) -> int:
        """What its blocks need at least: CHOICE_BYTES of settle.cuh."""
        return 2048 + 56 * self.n_expert + 48 * self._most * self.n_used

    @property
    def _most(self) -> int:
        return 1 if self.n_tokens == 1 else JOIN_TOKENS

    def launch(self) -> None:
        """By a kernel of its own, ahead of the one that reads the experts."""
        self.device.kernel(self.module, "route")(1, self.threads, (*self.args, None), overlap=True)


class Routing:
    """Choice of experts, and the slots that follow it; `state` everywhere is a SlotState of device arrays.

    active uint64 [min(E, 32 * A), 8], n_active int32 [1]: records (source of gate, up, down; the slot or place to
    write through to, or 0; then int32 expert, first, count, and a job, as experts.cuh says), in order of first
    use; of several tokens those that miss come first. pairs int32 [32 * A]: at first .. first + count the pairs
    t * A + a that use the expert, ascending. source uint64 [E, 3]: where each expert was before the last long step.
    """

    def __init__(self, device: Device, limits: Limits) -> None:
        E, A = limits.n_expert, limits.n_expert_used
        if not 0 < A <= min(E, MAX_USED) or E > MAX_EXPERTS:
            raise ValueError(f"routing: {A} of {E} experts, at most {MAX_USED} of {MAX_EXPERTS} are supported")
        self.device = device
        self.n_expert, self.n_used = E, A
        self._defines = (("EXPERTS", str(E)), ("USED", str(A)))
        self.active = device.empty((min(E, SMALL_TOKENS * A), 8), np.uint64)
        self.n_active = device.empty(1, np.int32)
        self.pairs = device.empty(SMALL_TOKENS * A, np.int32)
        self.source = device.empty((E, 3), np.uint64)
        self._bypass = (np.uint64(0), *map(np.int64, (0, 0, 0)), 0)
        self.cpu: CpuExperts | None = None  # of a step of one token
        self.several: SeveralJobs | None = None  # of a step of more
        self.landing: Landing | None = None  # the same
        self.with_guesses = False  # else steps are only timed by it
        self.poisons = False  # where a choice is joined: what `poison` does, by the block that settles
        self.joins = False  # the choice of few tokens is made where their experts are read
        self.settled = device.empty(1, np.uint64)  # settled.cuh
        self._choice: Choice | None = None

    def pass_through(self, part_bytes: tuple[int, int, int], n_places: int = BYPASS_PLACES) -> None:
        """Allocate memory that experts pass through which miss in a short step and enter no slot.

        Reads of the slow tier are fast where a block reads its whole part of an expert at once, and that goes by way of
        device memory: the active table's target is then a place there. part_bytes: the largest of any layer.
        """
        gate, up, down = (-(-n // ALIGN_BYTES) * ALIGN_BYTES for n in part_bytes)
        memory = self.device.empty(n_places * (gate + up + down), np.uint8)
        sizes = map(np.int64, (gate + up + down, gate, gate + up))
        self._bypass = (np.uint64(self.device.pointer(memory)), *sizes, n_places)
        self._bypass_memory = memory

    def route(
        self,
        logits: Array,
        gating: Gating,
        state: policy.SlotState,
        layer: int,
        counted: Array,
        rule: policy.Rule,
        experts: Array,
        weights: Array,
        fetches: Fetches,
        active_step: Array | None = None,
        imposed: Array | None = None,
        may_join: bool = False,
    ) -> None:
        """Choose experts and weights for each row, and let the slots of `layer` follow.

        Shapes as in `reference.route`. imposed int32 [T, A]: take these experts instead of the largest scores.
        T <= SMALL_TOKENS: writes the active table; where active_step int32 [1] is 0 the table is empty, there are no
        fetches, and nothing else is written. Longer steps: writes `source`, and active_step is not looked at.
        may_join: where it `joins`, the choice of few tokens is left to who takes it (`take`).
        """
        T = logits.shape[0]
        if T > SMALL_TOKENS:
            self.choose(logits, gating, experts, weights, imposed)
            self.advance(experts, counted, state, layer, rule, fetches, self.source)
            return
        self._check(logits, experts, weights)
        most = 1024 if self.n_expert <= 128 else 512  # MOST_THREADS of route.cu
        threads = -(-max(self.n_expert, T * self.n_used, min(32 * T, most)) // 32) * 32
        module = self._module(gating)
        more: tuple[Argument, ...] = ()
        if self.cpu is not None and T == 1:
            module = Module(module.file, (*module.defines, ("JOBS", "1")))
            more = (self.cpu.division, self.cpu.words)
        if self.several is not None and T > 1:
            module = Module(module.file, (*module.defines, ("JOBS", "2")))
            more = self.several.of_routing
        is_timed = False  # without guesses: what takes the time is no part of gate_up
        if self.landing is not None and T == 1 and (self.with_guesses or self.landing.times(state, layer)):
            is_timed = not self.with_guesses
            module = Module(module.file, (*module.defines, ("GUESSES", "1")))
            more = (*more, *self.landing.ends(state, layer, self.with_guesses))
        args = (
            logits, T, *self._weighing(gating), imposed, counted, active_step, layer, rule.memory,
            *_tables(state), experts, weights, fetches.rows, fetches.count,
            self.active, self.n_active, self.pairs, *self._bypass, *more,
        )  # fmt: skip
        assert self._choice is None, "a choice that nobody has taken"
        choice = Choice(self.device, module, threads, args, self.settled, T, self.n_expert, self.n_used, self.poisons)
        if may_join and self.joins and T <= JOIN_TOKENS and not is_timed:
            self._choice = choice
        else:
            choice.launch()

    def take(self) -> Choice | None:
        """The choice that is still to be made, by who takes it; None: there is none."""
        choice, self._choice = self._choice, None
        return choice

    def choose(
        self, logits: Array, gating: Gating, experts: Array, weights: Array, imposed: Array | None = None
    ) -> None:
        """The experts and weights of each row alone; no table moves."""
        self._check(logits, experts, weights)
        T = logits.shape[0]
        kernel = self.device.kernel(self._module(gating), "choose")
        kernel(-(-T // 8), 256, (logits, T, *self._weighing(gating), imposed, experts, weights))

    def advance(
        self,
        experts: Array,
        counted: Array,
        state: policy.SlotState,
        layer: int,
        rule: policy.Rule,
        fetches: Fetches,
        source: Array | None = None,
    ) -> None:
        """Let the slots of `layer` follow chosen experts; `source` [E, 3] gets where each expert was before."""
        kernel = self.device.kernel(Module("route.cu", self._defines), "follow")
        kernel(
            1,
            1024,
            (
                experts, experts.shape[0], counted, layer, rule.memory,
                *_tables(state), fetches.rows, fetches.count, source,
            ),
        )  # fmt: skip

    def _module(self, gating: Gating) -> Module:
        flags = {
            "SIGMOID": gating.kind == "sigmoid",
            "BIAS": gating.bias is not None,
            "SCALED": gating.scale != 1.0 or gating.expert_scale is not None,
        }
        return Module("route.cu", (*self._defines, *((name, "1") for name, on in flags.items() if on)))

    def _weighing(self, gating: Gating) -> tuple[int, Array | None, float, Array | None]:
        for array in (gating.bias, gating.expert_scale):
            if array is not None and (array.shape != (self.n_expert,) or array.dtype != np.float32):
                raise ValueError(f"routing: a gating of {array.dtype} {array.shape} for {self.n_expert} experts")
        return int(gating.renormalize), gating.bias, float(gating.scale), gating.expert_scale

    def _check(self, logits: Array, experts: Array, weights: Array) -> None:
        T = logits.shape[0]
        if logits.shape[1] != self.n_expert or not experts.shape == weights.shape == (T, self.n_used):
            raise ValueError(f"routing: {experts.shape} of logits {logits.shape} with {self.n_used} of {self.n_expert}")


def staging_bytes(part_bytes: tuple[int, int, int]) -> int:
    """Bytes of one expert in staging memory."""
    return sum(-(-n // ALIGN_BYTES) * ALIGN_BYTES for n in part_bytes)


class Staging:
    """Device memory for the missing experts of two prefill layers, one of which may be filled while the other is read.

    n_bytes: of each of the two buffers; experts that do not fit are read where they live. n_blocks: of 512 threads,
    for a copy from host memory; few saturate PCIe and leave the multiprocessors to the layer that computes.
    source: two tables uint64 [E, 3], where each expert is after `gather`.
    """

    def __init__(self, device: Device, limits: Limits, n_bytes: int, n_blocks: int = 4) -> None:
        self.device = device
        self.n_bytes = n_bytes
        self.n_blocks = n_blocks
        self.limits = limits
        self.module = _copies(limits)
        self.buffers = tuple(device.empty(max(n_bytes, ALIGN_BYTES), np.uint8) for _ in range(2))
        self.source = tuple(device.empty((limits.n_expert, 3), np.uint64) for _ in range(2))

    def gather(
        self, state: policy.SlotState, layer: int, bank: Experts, which: int, experts: Array | None = None
    ) -> None:
        """Copy the experts of a layer that are not resident to buffer `which` (0 or 1), and write its `source`.

        experts int32 [T, A]: copy those only that occur in it. bank: sizes and addresses of `layer`.
        """
        n_pairs = 0 if experts is None else experts.shape[0] * experts.shape[1]
        self.device.kernel(self.module, "gather")(
            self.n_blocks,
            _COPY_THREADS,
            (
                state.slot_of[layer], bank.expert_ptr, bank.home_ptr, *map(np.int64, bank.part_bytes), experts, n_pairs,
                self.buffers[which], np.int64(self.n_bytes), self.source[which],
            ),
        )  # fmt: skip

    def fill(self, fetches: Fetches, bank: Experts, source: Array) -> None:
        """After the FFN of a long step: copy the experts that enter slots from where they were read."""
        kernel = self.device.kernel(self.module, "fill")
        sizes = map(np.int64, bank.part_bytes)
        kernel(self.device.n_sm, _COPY_THREADS, (fetches.rows, fetches.count, source, bank.slot_ptr, *sizes))

    def poison(self, fetches: Fetches, bank: Experts) -> None:
        """`poison` of this module."""
        poison(self.device, self.limits, fetches, bank)


def poison(device: Device, limits: Limits, fetches: Fetches, bank: Experts) -> None:
    """Fill the slots of the step's fetches with 0xFF, which no block format reads as weights of a model; for tests.

    Before the FFN of a short step, between the FFN and `fill` of a long one.
    """
    kernel = device.kernel(_copies(limits), "poison")
    sizes = map(np.int64, bank.part_bytes)
    kernel(device.n_sm, _COPY_THREADS, (fetches.rows, fetches.count, bank.slot_ptr, *sizes))


def _copies(limits: Limits) -> Module:
    return Module("gather.cu", (("EXPERTS", str(limits.n_expert)),))
