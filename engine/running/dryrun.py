"""How a GPU is shared out, before anything is on it: by what a run of the model on a device that only counts takes.

No GPU is needed (running/counted.py).
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from engine.formats.gguf import open_header, open_model
from engine.formats.profile import Profile
from engine.ground.config import EXPECT_CTX_TOKENS, MAX_PARALLEL, EngineConfig, pool_size
from engine.ground.errors import CapacityError, UnsupportedModelError, UsageError
from engine.memory.residency import slot_bytes
from engine.memory.shape import least_pool, pooled_bytes
from engine.memory.slowtier import tier_bytes
from engine.models.layers import Architecture, ModelConfig
from engine.models.loading import Weights
from engine.ops import Limits
from engine.ops.cuda.counting import CountingDevice
from engine.ops.cuda.device import Module
from engine.ops.cuda.memory import available_bytes
from engine.ops.cuda.routing import staging_bytes
from engine.placing import placement, plan, policies, policy
from engine.placing.placement import Experts
from engine.placing.policies import Placed
from engine.running import draft_files, inspection, landing, probe
from engine.running.counted import Counted, count
from engine.running.draft_files import NO_DRAFTS, DraftFiles
from engine.running.forward import GRAPH_TOKENS, MAX_ROWS
from engine.running.recall import made_of
from engine.running.source import open_profile

DEFAULT_CTX_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class Decision:
    """How a GPU is shared out.

    plan: all of it. limits: of a step. kernels: to be compiled and loaded. drafts: what drafts, as far as there is
    room for it. reasons: why what was not asked for was chosen. pool_tokens: of the cache, on the device; None: all.
    has_guesses: there is room for what guesses which experts miss.
    """

    plan: plan.MemoryPlan
    limits: Limits
    placement: placement.Placement
    rule: policy.Rule
    kernels: tuple[tuple[Module, str], ...]
    drafts: DraftFiles
    reasons: tuple[str, ...]
    pool_tokens: int | None = None
    has_guesses: bool = False

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


class Sharing:
    """How a model shares out a device: what no cap and no context changes is worked out once, however often it decides.

    profile: to place by, of this model. like: stands for the device. drafts: what drafts for it; a block that nobody
    asked for is left out where it does not fit.
    """

    def __init__(
        self,
        options: EngineConfig,
        arch: Architecture,
        config: ModelConfig,
        weights: Weights[Any],
        n_ctx: int,
        profile: Profile | None,
        like: CountingDevice,
        drafts: DraftFiles = NO_DRAFTS,
    ) -> None:
        self.options, self.arch, self.config, self.weights = options, arch, config, weights
        self.n_ctx, self.profile, self.like, self.drafts = n_ctx, profile, like, drafts
        self.policy = policies.find(options.policy)
        self.experts = Experts(
            self.policy.counts(profile, config.moe_layers, config.n_expert),
            [slot_bytes(e) for e in weights.experts],
            [staging_bytes(e.part_bytes) for e in weights.experts],
            n_used=config.n_expert_used,
        )
        self._counted: dict[tuple[int, int, bool, bool, int | None, bool], Counted] = {}
        self._pool: int | None = None  # tokens of the cache on the device that are being tried
        self._guesses = False  # whether missing experts are guessed

    def decide(self, *, cap_bytes: int, context_bytes: int, context_measured: bool = True) -> Decision:
        """Share out `cap_bytes` of the device, of which `context_bytes` are gone.

        CapacityError where it is too little, naming what would do; UnsupportedModelError where the kernels do not run
        the model.
        """
        try:
            return self._decide_guesses(cap_bytes, context_bytes, context_measured)
        except (CapacityError, UnsupportedModelError) as error:
            if self.drafts.block is None or not self.drafts.is_found:
                raise
            self.drafts = self.drafts.without_block(f"no block drafts, since with it there is no plan: {error.message}")
            self._counted.clear()
            return self._decide_guesses(cap_bytes, context_bytes, context_measured)

    def _decide_guesses(self, cap_bytes: int, context_bytes: int, context_measured: bool) -> Decision:
        """Without guesses where all experts fit then, since nothing misses; else with them, if they are asked for.

        Where there is no room for them `auto` does without, too.
        """
        self._guesses = False
        is_wanted = landing.wanted(self.options)
        if not is_wanted or self.experts.bytes <= cap_bytes - context_bytes:
            made = self._decide(cap_bytes, context_bytes, context_measured)
            if made.plan.share.resident or not is_wanted:
                return made
        self._guesses = True
        try:
            return self._decide(cap_bytes, context_bytes, context_measured)
        except CapacityError:
            if self.options.guess != "auto":
                raise
        self._guesses = False
        made = self._decide(cap_bytes, context_bytes, context_measured)
        return replace(made, reasons=(*made.reasons, "guesses: none, the GPU has no room for what makes them"))

    def _decide(self, cap_bytes: int, context_bytes: int, context_measured: bool) -> Decision:
        """With the first pool under which all experts fit, else the last that there is a plan for."""
        found, refused, free = None, None, available_bytes()
        for pool in self._pools():
            # What only makes room for experts may take half of the host's memory; what makes a plan at all, all of it.
            homes = 0 if pool is None else self.n_ctx * pooled_bytes(self.config, self.options.kv_type)
            if found is not None and free is not None and homes > free // 2:
                break
            self._pool = pool
            try:
                made = self._decide_with(cap_bytes, context_bytes, context_measured)
            except CapacityError as error:
                refused = refused or error
                continue
            if found is not None and (
                made.plan.share.slots_bytes <= found.plan.share.slots_bytes
                or (free is not None and made.plan.host_bytes > free)
            ):
                break
            found = made
            if found.plan.share.resident:
                break
        if found is not None:
            self._pool = found.pool_tokens
            return found
        assert refused is not None
        raise refused

    def _pools(self) -> list[int | None]:
        """Tokens of the cache on the device, in the order to try; None: as many as the context has."""
        each = pooled_bytes(self.config, self.options.kv_type)
        if not each:
            return [None]
        tokens, gib = pool_size(self.options.kv_pool)
        if gib is not None:
            tokens = int(gib * plan.GIB) // each
        if tokens is not None:
            return [tokens]
        expected = self.options.expect_ctx_tokens or EXPECT_CTX_TOKENS
        if expected >= self.n_ctx:
            return [None]
        return [None, expected]

    def _decide_with(self, cap_bytes: int, context_bytes: int, context_measured: bool) -> Decision:
        experts = self.experts
        tries = self._tries(cap_bytes - context_bytes)
        fitting = [
            (n, c) for n, c in tries if require_pool(self._pool, min(c, self.n_ctx), n, last=(n, c) == tries[-1])
        ]
        tries = fitting or tries[-1:]
        for places, chunk in tries:
            found = self._count(chunk, places)
            fixed = plan.Fixed(context_bytes, found.dense_bytes, found.kv_bytes, found.buffers_bytes)
            try:
                share = self._share(fixed.bytes, cap_bytes)
                break
            except CapacityError as error:  # fewer requests or a shorter chunk may yet fit
                if (places, chunk) == tries[-1]:
                    raise self._refused(error, chunk, places, cap_bytes, context_bytes) from None
        limits = limits_of(self.config, self.n_ctx, min(chunk, self.n_ctx), places)
        reasons = []
        if self.options.chunk_tokens is None:
            reasons.append(
                f"prefill steps of {limits.max_tokens} tokens: the longest that leaves the memory to experts"
            )
        reasons.append(self._said(chunk, places))
        made = self._asked or self._place(share.slots_bytes, resident=share.resident)
        host_bytes = tier_bytes(self.weights.experts, made.placement.pinned)
        if self._pool is not None:
            reasons.append(pool_reason(self.options, self._pool, self.n_ctx, found.homes_bytes))
        drafts_bytes = self._drafts_bytes(chunk, places)
        if drafts_bytes:
            reasons.append(f"what drafts takes {drafts_bytes / 2**20:.0f} MiB of the GPU: weights, cache and buffers")
        whole = plan.MemoryPlan(
            fixed, share, experts.bytes, host_bytes + found.homes_bytes, cap_bytes, context_measured, drafts_bytes,
            found.homes_bytes,
        )  # fmt: skip
        return Decision(
            whole, limits, made.placement, made.rule, found.kernels, self.drafts, (*reasons, *made.reasons), self._pool,
            self._guesses,
        )  # fmt: skip

    def _tries(self, room_bytes: int) -> list[tuple[int, int]]:
        """Requests at a time and tokens of a prefill step, in the order to try; room_bytes: of all but the context."""
        asked, chunk = self.options.parallel, self.options.chunk_tokens
        most = most_places(self.options, self.n_ctx)
        counts = [asked] if asked else self._places(room_bytes, most)
        return [(n, c) for n in counts for c in ([chunk] if chunk else self._chunks(room_bytes, n))]

    def _places(self, room_bytes: int, most: int) -> list[int]:
        """Requests at a time, in the order to try."""
        chunk = self.options.chunk_tokens or plan.CHUNKS[0]
        one = self._count(chunk, 1, run=False)
        return plan.places(room_bytes - one.bytes, self.experts.bytes, most, lambda n: self._places_bytes(chunk, n))

    def _places_bytes(self, chunk_tokens: int, places: int) -> int:
        """What so many requests at a time take more than one does."""
        one, more = (self._count(chunk_tokens, n, run=False) for n in (1, places))
        return more.bytes - one.bytes

    def _drafts_bytes(self, chunk_tokens: int, places: int) -> int:
        """What the drafter or the block takes of all that is counted."""
        if self.drafts.drafter is None and self.drafts.block is None:
            return 0
        whole, without = (self._count(chunk_tokens, places, run=False, drafts=d) for d in (True, False))
        return whole.bytes - without.bytes

    def _said(self, chunk_tokens: int, places: int) -> str:
        """Why so many requests run at a time, and what they take."""
        asked = self.options.parallel is not None
        why = "asked for" if asked else "as many as there may be by default"
        if not asked and places < min(most_places(self.options, self.n_ctx), plan.PLACES[0]):
            why = "more would take too much of the memory of experts"
        n_bytes = self._places_bytes(chunk_tokens, places)
        return f"{places} requests at a time: {why}; {n_bytes / 2**20:.0f} MiB more than one"

    def _refused(
        self, error: CapacityError, chunk_tokens: int, places: int, cap_bytes: int, context_bytes: int
    ) -> CapacityError:
        """The error of a plan that was refused; another one where fewer requests at a time than asked for would fit."""

        def is_too_much(n: int) -> bool:
            found = self._count(chunk_tokens, n, run=False)
            fixed = plan.Fixed(context_bytes, found.dense_bytes, found.kv_bytes, found.buffers_bytes)
            try:
                self._share(fixed.bytes, cap_bytes)
            except CapacityError:
                return True
            return False

        most = bisect_left(range(1, places), True, key=is_too_much)
        if not most:
            return error
        n_bytes = self._places_bytes(chunk_tokens, places)
        return CapacityError(
            f"{places} requests at a time take {plan.gib(n_bytes)} GiB more than one, and there is room for {most}: "
            f"{error.message}",
            hint=f"--parallel {most} fits; {error.hint}",
        )

    def _chunks(self, room_bytes: int, places: int) -> list[int]:
        """Tokens of a prefill step, in the order to try; room_bytes: of all but the context."""
        ends = (plan.CHUNKS[-1], plan.CHUNKS[0])
        few, many = (self._count(n, places, run=False) for n in ends)
        room = room_bytes - few.dense_bytes - few.kv_bytes
        # Buffers grow in proportion to the tokens, near enough for a choice.
        return plan.chunks(room, lambda n: int(np.interp(n, ends, (few.buffers_bytes, many.buffers_bytes))))

    def _count(self, chunk_tokens: int, places: int, run: bool = True, drafts: bool = True) -> Counted:
        """As `count`; drafts: with what drafts."""
        n, pool = min(chunk_tokens, self.n_ctx), self._pool
        key = n, places, run, drafts, pool, self._guesses
        if not run and (whole := (n, places, True, *key[3:])) in self._counted:
            return self._counted[whole]
        if key not in self._counted:
            device, limits = CountingDevice.like(self.like), limits_of(self.config, self.n_ctx, n, places)
            found = self.drafts if drafts else NO_DRAFTS
            try:
                self._counted[key] = count(
                    device, self.arch, self.config, self.weights, limits, self.options.kv_type,
                    drafter=found.drafter, block=found.block, run=run, pool_tokens=pool,
                    recall=made_of(
                        self.options.kv_recall_blocks, self.options.kv_recall, self.options.kv_recall_from
                    ),
                    cpu_experts=self.options.cpu_experts != "off",
                    guess_hidden=landing.hidden_units(self.options) if self._guesses else None,
                    poison=self.options.poison,
                )  # fmt: skip
            except ValueError as error:  # a shape or a type that a kernel's wrapper does not take
                raise UnsupportedModelError(
                    f"the CUDA kernels do not run this model: {error}", hint="use --device cpu"
                ) from error
        return self._counted[key]

    def _share(self, fixed_bytes: int, cap_bytes: int) -> plan.Share:
        if self._asked is None:
            return plan.most_slots(fixed_bytes, cap_bytes, self.experts)
        share = plan.share_of(self._asked.placement, self.experts)
        plan.require(fixed_bytes, share, cap_bytes)
        return share

    @cached_property
    def _asked(self) -> Placed | None:
        """The placement of the share that was asked for; None: as many slots as fit."""
        percent = self.options.residency_pct
        if not self.policy.whole and percent >= 100.0:
            return None
        return self._place(placement.residency_budget(self.experts.n_expert, self.experts.slot_bytes, percent))

    def _place(self, budget_bytes: int, *, resident: bool = False) -> Placed:
        return policies.place(
            self.policy, self.experts, budget_bytes, self.profile, self.options.cache_slots, resident=resident
        )


def most_places(options: EngineConfig, n_ctx: int) -> int:
    """How many requests can run at a time: a step has a token of each. UsageError where more are asked for."""
    most = min(options.chunk_tokens or MAX_PARALLEL, n_ctx, MAX_PARALLEL)
    if options.parallel is not None and options.parallel > most:
        raise UsageError(
            f"--parallel {options.parallel}: expected 1 to {most}, since a step has a token of each request, and the "
            f"longest has {most}",
            hint="give a smaller --parallel" + ("" if most == MAX_PARALLEL else ", or a larger --chunk and --ctx"),
        )
    return most


def require_pool(pool_tokens: int | None, step_tokens: int, places: int, *, last: bool = True) -> bool:
    """Whether a pool is enough for such steps and so many sequences; CapacityError where nothing less is left."""
    least = least_pool(step_tokens, places)
    if pool_tokens is None or pool_tokens >= least:
        return True
    if last:
        raise CapacityError(
            f"a pool of {pool_tokens:,} tokens of the KV cache: steps of {step_tokens:,} tokens and {places} requests "
            f"at a time need {least:,}",
            hint=f"--kv-pool {least} is the least; a smaller --chunk or --parallel needs less",
        )
    return False


def pool_reason(options: EngineConfig, pool_tokens: int, n_ctx: int, homes_bytes: int) -> str:
    """Why the cache has such a pool."""
    if options.kv_pool != "auto":
        why = "asked for"
    else:
        why = "what contexts mostly take; what more would take, experts make better use of"
    homes = f"; all blocks have homes in host memory, {homes_bytes / plan.GIB:.2f} GiB" if homes_bytes else ""
    return f"{pool_tokens:,} tokens of the KV cache in the pool, for contexts of {n_ctx:,}: {why}{homes}"


def limits_of(config: ModelConfig, n_ctx: int, max_tokens: int, places: int) -> Limits:
    """Bounds of the steps of a model; places: requests that run at a time, up to MAX_PARALLEL."""
    w = config.widths
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
        # As many as the captured step has in which all decode.
        max_sequences=next(n for n in GRAPH_TOKENS if places <= n),
        places=places,
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
    """What the Plan event says: the file, and unless something is missing, settings as in Ready and the memory plan.

    The context is an estimate. Without a GPU and without a cap there is nothing to plan for: `gpu` and `plan` are None.
    """
    found = probe.probe()
    gpu = found.reason if isinstance(found, probe.Found) else None
    cap = None if options.vram_gib is None else plan.cap_bytes(options.vram_gib)
    like = CountingDevice()
    if isinstance(found, probe.Found):
        like = CountingDevice(found.arch, found.n_sm, found.shared_bytes)
        if cap is None:
            cap = (found.free_bytes or found.total_bytes) - plan.SPARE_BYTES
    with open_header(options.model) as file:
        inspected = inspection.inspect(file)
        said = {"file": inspected.report, "gpu": gpu, "plan": None, "refusal": None}
        if cap is None or inspected.model is None:
            return said
        arch, config, weights = inspected.model
        n_ctx = context_tokens(options, config.n_ctx_train)
        # A profile is of a model, and which one this is its routers say.
        with nullcontext(file) if options.profile is None else open_model(options.model) as known:
            profile, warnings = open_profile(options, known, config)
        drafts = draft_files.find(options, file, arch, config)
    try:
        sharing = Sharing(options, arch, config, weights, n_ctx, profile, like, drafts)
        decision = sharing.decide(cap_bytes=cap, context_bytes=plan.CONTEXT_BYTES, context_measured=False)
    except (CapacityError, UnsupportedModelError) as error:
        return said | {"refusal": {"code": error.code, "message": error.message, "hint": error.hint}}
    placed, made, warnings = decision.placement, decision.plan, (*warnings, *decision.drafts.warnings)
    free = available_bytes()
    if free is not None and made.host_bytes > free:
        few = (
            f"{made.host_bytes / plan.GIB:.1f} GiB of host memory are to be locked, {free / plan.GIB:.1f} GiB are free"
        )
        warnings = (*warnings, few)
    return said | {
        "device": "cuda",
        "ctx_tokens": n_ctx,
        "chunk_tokens": decision.limits.max_tokens,
        "parallel": decision.limits.places,
        "kv_type": options.kv_type,
        "pool_tokens": decision.pool_tokens,
        "draft": options.draft,
        "policy": options.policy,
        "residency_pct": 100.0 * placed.bytes / made.experts_bytes if made.experts_bytes else 100.0,
        "slots_per_layer": list(placed.slots_per_layer),
        "cache_slots": list(placed.cache_slots),
        "reasons": [*decision.drafts.reasons, *decision.reasons],
        "warnings": list(warnings),
        "plan": made.to_json(),
    }
