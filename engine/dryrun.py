"""A model run on a device that only counts: what it would allocate, and which kernels it would launch.

The constructors and the forward pass are the real ones, so the count is exact; only weights, caches and kernels are
not there. No GPU is needed. On the count stands the decision how much of a GPU goes to what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from engine import models, placement, plan, policy, probe
from engine.config import EngineConfig, KVType
from engine.errors import CapacityError, UnsupportedModelError, UsageError
from engine.forward import GRAPH_TOKENS, MAX_ROWS, Forward, placed
from engine.gguf import open_model
from engine.kv import KVCache
from engine.layers import Step, Widths
from engine.ops import SMALL_TOKENS, Limits
from engine.ops.cuda.counting import ALIGN_BYTES, CountingDevice
from engine.ops.cuda.device import Module
from engine.ops.cuda.memory import available_bytes
from engine.ops.cuda.routing import staging_bytes
from engine.profile import Profile
from engine.profile import load as load_profile
from engine.residency import Residency, largest_parts, slot_bytes
from engine.slowtier import Piece, Progress, tier_bytes

DEFAULT_CTX_TOKENS = 32768
_ROUNDING_BYTES = 1024  # of arrays whose size the count does not know yet

_LONG_STEPS = (33, 64, 128, 256, 512, 1024, 2048, 4096)  # kernels are chosen by the length of a step


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes of device memory by purpose, slots and staging buffers apart, and every kernel that is launched."""

    dense_bytes: int
    kv_bytes: int
    buffers_bytes: int
    kernels: tuple[tuple[Module, str], ...]


class _NoTier:
    """A slow tier that is nowhere: experts are neither placed nor loaded."""

    n_bytes = 0

    def locate(self, state: policy.SlotState) -> None:
        """Leave all homes at 0."""

    def load(self, pieces: Sequence[Piece], progress: Progress) -> None:
        """Load nothing."""


def count(
    device: CountingDevice,
    arch: ModuleType,
    config: Any,
    weights: Any,
    limits: Limits,
    kv_type: KVType,
    *,
    run: bool = True,
) -> Counted:
    """Allocate and run a model on `device`, which must be fresh.

    arch, config, weights: as `Forward` takes them. The tables are counted for all experts in slots, the most there
    can be. run: without it `kernels` is incomplete, and the count takes a third of the time.
    """
    from engine.decoding import Graphs
    from engine.ops.cuda import ops

    dense, kv = CountingDevice.like(device), CountingDevice.like(device)
    placed(weights, dense.upload)
    KVCache(kv, config, limits.n_ctx, kv_type, limits.max_tokens, limits.max_sequences)
    ws = ops.workspace(limits, device)
    if weights.experts:
        ws.stream_experts(0, largest_parts(weights.experts))
    forward = Forward(device, ops, ws, arch, config, weights, limits, kv_tokens=limits.n_ctx, kv_type=kv_type)
    sizes = [slot_bytes(e) for e in weights.experts]
    empty = placement.lru(config.n_expert, sizes, config.n_expert * sum(sizes))
    before = device.n_bytes
    residency = Residency(weights.experts, empty, policy.LRU, device=device, tier=_NoTier())
    arena = -(-residency.arena_bytes // ALIGN_BYTES) * ALIGN_BYTES
    assert device.n_bytes - before >= arena
    device.empty(max((max(e.part_bytes) for e in weights.experts), default=0), np.uint8)  # PageLockedTier's passage
    graphs = Graphs(forward, residency)
    if run:
        _run(forward, residency, graphs)
    buffers = device.n_bytes - dense.n_bytes - kv.n_bytes - arena + _ROUNDING_BYTES
    return Counted(dense.n_bytes, kv.n_bytes, buffers, tuple(sorted(device.kernels)))


def _run(forward: Forward, residency: Residency, graphs: Any) -> None:
    """Every kind of step."""
    limits = forward.limits
    most = limits.max_tokens
    for n in GRAPH_TOKENS:
        if n <= most:
            graphs.step(n)
    i, logits = forward.inputs, forward.buffers.logits
    for greedy in (True, False):
        graphs.sampler.step(logits[:1], i.tokens[:1], i.positions[:1], forward.slots, forward.block_tables, greedy)
    graphs.sampler.describe(logits[:1])
    lengths = {n for n in (1, 2, SMALL_TOKENS, *_LONG_STEPS, most) if n <= most}
    for n in sorted(lengths):
        for wanted in (1, min(n, limits.max_rows)):
            _step(forward, residency, n, wanted)


def _step(forward: Forward, residency: Residency, n: int, wanted: int) -> None:
    zeros, groups = np.zeros(n, np.int32), forward.kv.groups
    step = forward.feed(
        Step(
            tokens=zeros, positions=np.arange(n, dtype=np.int32), sequence=zeros, slots=tuple(zeros for _ in groups),
            block_table=tuple(np.zeros((1, forward.table_width), np.int32) for _ in groups),
            states=np.zeros((1, 2), np.int32), counted=np.ones(n, np.uint8), rows=np.zeros(wanted, np.int32),
        )
    )  # fmt: skip
    forward.run(step, residency)


@dataclass(frozen=True, slots=True)
class Decision:
    """How a GPU is shared out.

    plan: all of it. limits: of a step. kernels: to be compiled and loaded. reasons: why what was
    not asked for was chosen.
    """

    plan: plan.MemoryPlan
    limits: Limits
    placement: placement.Placement
    rule: policy.Rule
    kernels: tuple[tuple[Module, str], ...]
    reasons: tuple[str, ...]

    @property
    def modules(self) -> tuple[Module, ...]:
        """The modules of the kernels, each once."""
        return tuple(sorted({module for module, _ in self.kernels}))

    @property
    def arena_bytes(self) -> int:
        """What the device has to reserve: all but the context."""
        return self.plan.device_bytes - self.plan.fixed.context_bytes

    @property
    def staging_bytes(self) -> int:
        """Of each of the two staging buffers; 0 where nothing ever misses."""
        return self.plan.share.staging_bytes // 2


def decide(
    options: EngineConfig,
    arch: ModuleType,
    config: Any,
    weights: Any,
    n_ctx: int,
    profile: Profile | None,
    like: CountingDevice,
    *,
    cap_bytes: int,
    context_bytes: int,
    context_measured: bool = True,
) -> Decision:
    """Share out `cap_bytes` of a device of which `context_bytes` are gone.

    like: stands for the device. CapacityError where it is too little, naming what would do; UnsupportedModelError
    where the kernels do not run the model.
    """
    counts = np.zeros((len(weights.experts), config.n_expert), np.int64)
    if profile is not None and options.policy in ("spark", "static"):
        counts = profile.counts[list(config.moe_layers)]
    sizes = [slot_bytes(e) for e in weights.experts]
    staged = [staging_bytes(e.part_bytes) for e in weights.experts]
    experts = plan.Experts(counts, sizes, staged, config.n_expert_used)

    def counted(n: int, run: bool = True) -> Counted:
        limits = limits_of(config, n_ctx, min(n, n_ctx))
        try:
            return count(CountingDevice.like(like), arch, config, weights, limits, options.kv_type, run=run)
        except ValueError as error:  # a shape or a type that a kernel's wrapper does not take
            raise UnsupportedModelError(
                f"the CUDA kernels do not run this model: {error}", hint="use --device cpu"
            ) from error

    reasons = []
    tries = [options.chunk_tokens] if options.chunk_tokens else []
    if not tries:
        ends = (plan.CHUNKS[-1], plan.CHUNKS[0])
        few, many = (counted(n, run=False) for n in ends)
        room = cap_bytes - context_bytes - few.dense_bytes - few.kv_bytes
        # Buffers grow in proportion to the tokens, near enough for a choice.
        tries = plan.chunks(room, lambda n: int(np.interp(n, ends, (few.buffers_bytes, many.buffers_bytes))))
    for chunk in tries:
        found = counted(chunk)
        fixed = plan.Fixed(context_bytes, found.dense_bytes, found.kv_bytes, found.buffers_bytes)
        try:
            share = _share(options, experts, profile, fixed.bytes, cap_bytes)
            break
        except CapacityError:  # a shorter chunk may yet fit
            if chunk == tries[-1]:
                raise
    limits = limits_of(config, n_ctx, min(chunk, n_ctx))
    if options.chunk_tokens is None:
        reasons.append(f"prefill steps of {limits.max_tokens} tokens: the longest that leaves the memory to experts")
    budget = _asked_bytes(options, experts)
    placed, rule, why = plan.place(
        options, counts, sizes, share.slots_bytes if budget is None else budget, config.n_expert_used, profile,
        resident=share.resident,
    )  # fmt: skip
    host_bytes = tier_bytes(weights.experts, placed.pinned)
    made = plan.MemoryPlan(fixed, share, experts.bytes, host_bytes, cap_bytes, context_measured)
    return Decision(made, limits, placed, rule, found.kernels, (*reasons, *why))


def _share(
    options: EngineConfig, experts: plan.Experts, profile: Profile | None, fixed_bytes: int, cap_bytes: int
) -> plan.Share:
    budget = _asked_bytes(options, experts)
    if budget is None:
        return plan.most_slots(fixed_bytes, cap_bytes, experts)
    asked, _, _ = plan.place(options, experts.counts, experts.slot_bytes, budget, experts.n_used, profile)
    share = plan.share_of(asked, experts)
    plan.require(fixed_bytes, share, cap_bytes)
    return share


def _asked_bytes(options: EngineConfig, experts: plan.Experts) -> int | None:
    """The bytes of slots that were asked for; None: as many as fit."""
    if options.policy != "all" and options.residency_pct >= 100.0:
        return None
    return placement.residency_budget(experts.counts.shape[1], experts.slot_bytes, options.residency_pct)


def limits_of(config: Any, n_ctx: int, max_tokens: int) -> Limits:
    """Bounds of the steps of a model."""
    w: Widths = config.widths
    return Limits(
        max_tokens=max_tokens,
        n_embd=config.n_embd,
        n_head_dim=w.n_head_dim,
        n_ff=w.n_ff,
        n_vocab=config.n_vocab,
        n_expert=config.n_expert,
        n_expert_used=config.n_expert_used,
        n_head=w.n_head,
        n_head_kv=w.n_head_kv,
        head_dim=w.head_dim,
        n_ctx=n_ctx,
        max_rows=MAX_ROWS,
        n_ff_exp=config.n_ff_exp,
        n_mixed=w.n_mixed,
        n_z=w.n_z,
        n_head_v=w.n_head_v,
        d_k=0 if config.delta is None else config.delta.d_k,
        d_v=0 if config.delta is None else config.delta.d_v,
    )


def context_tokens(options: EngineConfig, n_ctx_train: int) -> int:
    """The context that is asked for, or the model's own, bounded."""
    if options.ctx_tokens is None:
        return min(n_ctx_train, DEFAULT_CTX_TOKENS)
    if not 1 <= options.ctx_tokens <= n_ctx_train:
        raise UsageError(f"--ctx {options.ctx_tokens}: the model's context is 1 to {n_ctx_train} tokens")
    return options.ctx_tokens


def plan_only(options: EngineConfig) -> dict[str, Any]:
    """What the Plan event says: settings as in Ready, and the memory plan, with an estimated context.

    Without a GPU and without a cap there is nothing to plan for: `gpu` and `plan` are None.
    """
    found = probe.probe()
    gpu = found.reason if isinstance(found, probe.Found) else None
    cap = None if options.vram_gib is None else plan.cap_bytes(options.vram_gib)
    like = CountingDevice()
    if isinstance(found, probe.Found):
        like = CountingDevice(found.arch, found.n_sm, found.shared_bytes)
        if cap is None:
            cap = (found.free_bytes or found.total_bytes) - plan.SPARE_BYTES
    with open_model(options.model) as file:
        arch = models.find(file.architecture)
        config = arch.Config.from_gguf(file)
        if cap is None:
            return {"gpu": None, "plan": None}
        n_ctx = context_tokens(options, config.n_ctx_train)
        profile: Profile | None = None
        warnings: tuple[str, ...] = ()
        if options.profile is not None:
            profile, warnings = load_profile(
                options.profile, model_id=file.model_id, shape=(config.n_layer, config.n_expert)
            )
        decision = decide(
            options, arch, config, arch.load(file, config), n_ctx, profile, like,
            cap_bytes=cap, context_bytes=plan.CONTEXT_BYTES, context_measured=False,
        )  # fmt: skip
    placed, made = decision.placement, decision.plan
    free = available_bytes()
    if free is not None and made.host_bytes > free:
        few = (
            f"{made.host_bytes / plan.GIB:.1f} GiB of host memory are to be locked, {free / plan.GIB:.1f} GiB are free"
        )
        warnings = (*warnings, few)
    return {
        "gpu": gpu,
        "device": "cuda",
        "ctx_tokens": n_ctx,
        "chunk_tokens": decision.limits.max_tokens,
        "kv_type": options.kv_type,
        "policy": options.policy,
        "residency_pct": 100.0 * placed.bytes / made.experts_bytes if made.experts_bytes else 100.0,
        "slots_per_layer": list(placed.slots_per_layer),
        "cache_slots": list(placed.cache_slots),
        "reasons": list(decision.reasons),
        "warnings": list(warnings),
        "plan": made.to_json(),
    }
