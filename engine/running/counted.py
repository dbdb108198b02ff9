"""A model run on a device that only counts: what it would allocate, and which kernels it would launch.

The constructors and the forward pass are the real ones, so the count is exact; only weights, caches and kernels are
not there. No GPU is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.drafting.drafter import DrafterFile
from engine.memory.kv import KVCache
from engine.memory.residency import Piece, Progress, Residency, largest_parts, slot_bytes
from engine.memory.shape import cached_tokens
from engine.models.layers import Architecture, ModelConfig, Step
from engine.models.loading import Weights
from engine.models.nextn import Block, WithBlock
from engine.ops import F32, SHORT_ROWS, SMALL_TOKENS, Limits, ShortRows
from engine.ops.cuda.counting import ALIGN_BYTES, CountingDevice
from engine.ops.cuda.device import Module
from engine.placing import placement, policy
from engine.running import landing, misses
from engine.running.drafts import lay_out
from engine.running.drawing import DeviceDrawer
from engine.running.forward import GRAPH_TOKENS, Forward, placed
from engine.running.mtp import Predictor
from engine.running.recall import Part
from engine.running.stepping import Graphs, Steps

_ROUNDING_BYTES = 1024  # of arrays whose size the count does not know yet

LONG_STEPS = (33, 64, 128, 256, 512, 1024, 2048, 4096)  # kernels are chosen by the length of a step


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes of device memory by purpose, slots and staging buffers apart, and every kernel that is launched."""

    dense_bytes: int
    kv_bytes: int
    buffers_bytes: int
    kernels: tuple[tuple[Module, str], ...]
    homes_bytes: int = 0  # of host memory

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.dense_bytes + self.kv_bytes + self.buffers_bytes


class _NoTier:
    """A slow tier that is nowhere: experts are neither placed nor loaded."""

    n_bytes = 0

    def locate(self, state: policy.SlotState) -> None:
        """Leave all homes at 0."""

    def load(self, pieces: Sequence[Piece], progress: Progress) -> None:
        """Load nothing."""

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Nothing was lost."""

    def exchange(self, state: policy.SlotState, layer: int, enters: int, leaves: int, slot: int) -> None:
        """Nothing is pinned."""

    def rehome(self, state: policy.SlotState, layer: int, enters: int, leaves: int, slot: int) -> None:
        """Nothing is pinned."""

    def close(self) -> None:
        """Nothing was taken."""


def count(
    device: CountingDevice,
    arch: Architecture,
    config: ModelConfig,
    weights: Weights[Any],
    limits: Limits,
    kv_type: str,
    *,
    drafter: DrafterFile | None = None,
    block: Block | None = None,
    run: bool = True,
    pool_tokens: int | None = None,
    recall: Part | None = None,
    cpu_experts: bool = False,
    short_rows: bool | None = None,
    guess_hidden: int | None = None,
    poison: bool = False,
) -> Counted:
    """Allocate and run a model on `device`, which must be fresh.

    arch, config, weights, block: as `Forward` takes them; experts of the block count as dense. The tables are counted
    for all experts in slots, the most there can be. pool_tokens: of the cache, on the device; None: the context.
    recall: as `Forward` takes it.
    cpu_experts: with what it takes that the CPU computes some, and kernels of both kinds. short_rows: with those of
    short rows; None: as cpu_experts. guess_hidden: with what it takes that some are guessed, and hidden units of the
    MLPs which do that; None: none are. poison: as of EngineConfig. run: without it `kernels` is incomplete, and the
    count takes a third of the time.
    """
    from engine.ops.cuda import ops

    dense, kv = CountingDevice.like(device), CountingDevice.like(device)
    placed(weights, dense.upload)
    n_cached = cached_tokens(limits.n_ctx, pool_tokens)
    cached = config if block is None else WithBlock(config)
    homes = KVCache(kv, cached, n_cached, kv_type, limits.max_tokens, limits.places, pool_tokens).home_bytes
    ws = ops.workspace(limits, device)
    ws.join_choices(poison)
    if weights.experts:
        ws.stream_experts(0, largest_parts(weights.experts))
    forward = Forward(
        device, ops, ws, arch, config, weights, limits, kv_tokens=n_cached, pool_tokens=pool_tokens, kv_type=kv_type,
        ropes=_rope_shapes(arch, config, limits.n_ctx), captured=() if drafter is None else drafter.config.captured,
        block=block, recall=recall,
    )  # fmt: skip
    made = None
    if drafter is not None:
        placed(drafter.weights, dense.upload)
        made = lay_out(drafter, forward, lambda limits: ops.workspace(limits, device), gpu=device)
    sizes = [slot_bytes(e) for e in weights.experts]
    empty = placement.empty([config.n_expert] * len(sizes), sizes)
    before = device.n_bytes
    residency = Residency(weights.experts, empty, policy.LRU, device=device, tier=_NoTier())
    arena = -(-residency.arena_bytes // ALIGN_BYTES) * ALIGN_BYTES
    assert device.n_bytes - before >= arena
    device.empty(max((max(e.part_bytes) for e in weights.experts), default=0), np.uint8)  # PageLockedTier's passage
    drawer, steps = DeviceDrawer(forward, device), Steps(forward, residency, Graphs(device))
    predictor = None
    if block is not None:
        placed(block, dense.upload)
        dense.empty(block.slots_bytes, np.uint8)
        predictor = Predictor(steps, _NoTier() if block.experts else None, device)
    cpu = misses.count(device, limits, residency, block) if cpu_experts and weights.experts else None
    guesses = None if guess_hidden is None else landing.count(device, limits, residency, guess_hidden)
    if run:
        with forward.kv.as_if_away():  # what is launched then has all kernels
            _run(steps, drawer, predictor, cpu_experts if short_rows is None else short_rows)
        if made is not None:
            made.rehearse()
        for beside, guessed in ((cpu, None), (None, guesses), (cpu, guesses)):
            if beside is not None or guessed is not None:
                ws.share_misses(None if beside is None else beside[0])
                for with_guesses in (True, False) if guessed is not None else (True,):
                    ws.guess_misses(guessed, with_guesses)
                    _step(forward, residency, 1, 1)
                ws.guess_misses(guessed)
                if predictor is not None:
                    predictor.rehearse(1)
        if cpu is not None and cpu[1] is not None:
            ws.hand_misses(cpu[1])
            for n in sorted({*GRAPH_TOKENS, min(limits.max_tokens, SMALL_TOKENS)}):
                if 1 < n <= limits.max_tokens:
                    _step(forward, residency, n, 1)
            ws.hand_misses(None)
        if cpu is not None and (jobs := cpu[2]) is not None:
            ws.offer_misses(jobs)
            _step(forward, residency, jobs.n_rows, 1, ShortRows(jobs.n_rows))
    buffers = device.n_bytes - dense.n_bytes - kv.n_bytes - arena + _ROUNDING_BYTES
    return Counted(dense.n_bytes, kv.n_bytes, buffers, tuple(sorted(device.kernels)), homes)


def _rope_shapes(arch: Architecture, config: ModelConfig, n_ctx: int) -> list[F32]:
    """Tables of the shapes of the model's, of which only the first position is computed."""
    with np.errstate(all="ignore"):  # by factors that a header alone does not have
        first = arch.rope_tables(config, 1)
    return [np.broadcast_to(table, (n_ctx, *table.shape[1:])) for table in first]


def _run(steps: Steps, drawer: DeviceDrawer, predictor: Predictor | None, has_short: bool) -> None:
    """Every kind of step. has_short: long ones may have short rows."""
    forward, limits, sampler = steps.forward, steps.forward.limits, drawer.lend()
    most = limits.max_tokens
    for n in GRAPH_TOKENS:
        if n <= most:
            steps.launch(n)
            if 1 < n <= limits.max_sequences:
                steps.launch(n, apart=True)
            if forward.recalling is not None:
                steps.launch(n, recalls=True)
    if forward.recalling is not None:
        forward.recalling.rehearse(forward.ops, forward.ws)
        drawer.count_left_out(1)
    i, logits = forward.inputs, forward.buffers.logits
    for greedy in (True, False):
        sampler.step(logits[:1], i.tokens[:1], i.positions[:1], forward.slots, forward.block_tables, greedy)
    sampler.describe(logits[:1])
    # Products have kernels for 1, 8, half as many as a small step and as many.
    lengths = {n for n in (1, 2, SMALL_TOKENS // 2, SMALL_TOKENS, *LONG_STEPS, most) if n <= most}
    for n in sorted(lengths):
        for wanted in (1, min(n, limits.max_rows)):
            _step(forward, steps.residency, n, wanted)
        if predictor is not None:
            predictor.rehearse(n)
    if has_short and steps.residency.experts:
        # How their products are cut follows from how many there are: few behind others, as many as may be, all.
        for n in sorted(n for n in lengths if n > SMALL_TOKENS):
            for short in (ShortRows(n), ShortRows(1, n - 1), ShortRows(min(n, SHORT_ROWS), n - min(n, SHORT_ROWS))):
                _step(forward, steps.residency, n, 1, short)


def _step(forward: Forward, residency: Residency, n: int, wanted: int, short: ShortRows | None = None) -> None:
    zeros, groups = np.zeros(n, np.int32), forward.kv.groups
    step = forward.feed(
        Step(
            tokens=zeros, positions=np.arange(n, dtype=np.int32), sequence=zeros, slots=tuple(zeros for _ in groups),
            block_table=tuple(np.zeros((1, forward.table_width), np.int32) for _ in groups),
            states=np.zeros((1, 2), np.int32), counted=np.ones(n, np.uint8), rows=np.zeros(wanted, np.int32),
            short=short,
        )
    )  # fmt: skip
    forward.run(step, residency)
