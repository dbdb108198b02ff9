"""What is resident and how long steps may be, decided before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.ground.config import EngineConfig, pool_size
from engine.ground.errors import CapacityError, UsageError
from engine.ground.protocol import Stage
from engine.memory.residency import slot_bytes
from engine.memory.shape import pooled_bytes
from engine.ops import Limits
from engine.ops.cuda.counting import CountingDevice
from engine.ops.cuda.device import Device
from engine.ops.cuda.landing import SLOTS
from engine.ops.cuda.replay import Replay
from engine.placing import placement, plan, policies
from engine.placing.placement import Experts, Placement
from engine.placing.policy import Rule
from engine.running import dryrun
from engine.running.backend import Backend
from engine.running.dryrun import Decision
from engine.running.source import Source

HOST_CHUNK_TOKENS = 512
GRAPH_BYTES = 64 << 20  # what captured steps take of the device; see docs/cuda.md
OTHER_GRAPH_BYTES = 32 << 20  # and those without experts on the CPU, beside those with them
DRAFTER_GRAPH_BYTES = 16 << 20  # and what a drafter captures: some 1,200 kernels, 10 KiB each as in the others
Progress = Callable[[Stage, int, int], None]  # a stage, how much of it is done, of how much


@dataclass(frozen=True, slots=True)
class Shares:
    """Who gets how much.

    limits: of a step. placement, rule: the experts in slots. reasons: why what was not asked for was chosen. decision:
    how a GPU is shared out; None on the host. replay: recorded choices that are imposed, for measurements. pool_tokens:
    of the KV cache, on the device; None: all.
    """

    limits: Limits
    placement: Placement
    rule: Rule
    reasons: tuple[str, ...]
    decision: Decision | None = None
    replay: Replay | None = None
    pool_tokens: int | None = None

    @property
    def staging_bytes(self) -> int:
        """Of each of the two buffers through which experts are brought in; 0: nothing is."""
        return 0 if self.decision is None else self.decision.staging_bytes


def share_out(options: EngineConfig, source: Source, backend: Backend, n_ctx: int, progress: Progress) -> Shares:
    """Decide; of a GPU, reserve what was decided. CapacityError where there is too little."""
    if backend.gpu is None:
        return _of_host(options, source, backend, n_ctx)
    return _of_gpu(options, source, backend.gpu, backend.free_bytes, n_ctx, progress)


def _of_host(options: EngineConfig, source: Source, backend: Backend, n_ctx: int) -> Shares:
    c = source.config
    if options.replay is not None:
        raise UsageError("--replay imposes choices on a GPU, and this is the CPU")
    if options.vram_gib is not None:
        raise UsageError(
            f"--vram caps the memory of a GPU, and this is the CPU ({backend.reason})",
            hint="leave it out; on a CPU, serve, plan and bench take a share of the experts (--residency)",
        )
    sizes = [slot_bytes(e) for e in source.weights.experts]
    policy = policies.find(options.policy)
    counts = policy.counts(source.profile, c.moe_layers, c.n_expert)
    budget = placement.residency_budget(c.n_expert, sizes, options.residency_pct)
    placed = policies.place(
        policy, Experts(counts, sizes, n_used=c.n_expert_used), budget, source.profile, options.cache_slots
    )
    most = dryrun.most_places(options, n_ctx)
    places = options.parallel or min(plan.PLACES[0], most)
    limits = dryrun.limits_of(c, n_ctx, min(options.chunk_tokens or HOST_CHUNK_TOKENS, n_ctx), places)
    why = "asked for" if options.parallel else "as many as there may be by default"
    reasons = (f"{places} requests at a time: {why}", *placed.reasons)
    # Where the device is the host a pool saves nothing, and is as good for trying it.
    pool, gib = pool_size(options.kv_pool)
    if gib is not None and (each := pooled_bytes(c, options.kv_type)):
        pool = int(gib * plan.GIB) // each
    if pool is not None:
        dryrun.require_pool(pool if pool < n_ctx else None, limits.max_tokens, places)
        reasons = (dryrun.pool_reason(options, pool, n_ctx, 0), *reasons)
    return Shares(limits, placed.placement, placed.rule, reasons, pool_tokens=pool)


def _of_gpu(
    options: EngineConfig, source: Source, device: Device, free_bytes: int | None, n_ctx: int, progress: Progress
) -> Shares:
    """Decide by what the context and the kernels really take, and reserve the rest in one piece."""
    free, total = device.memory_bytes()
    before = total if free_bytes is None else free_bytes
    cap = before - plan.SPARE_BYTES if options.vram_gib is None else plan.cap_bytes(options.vram_gib)

    sharing = dryrun.Sharing(
        options,
        source.arch,
        source.config,
        source.weights,
        n_ctx,
        source.profile,
        CountingDevice.like(device),
        source.drafts,
    )
    # The first decision tells the kernels; with them loaded the context has the size that counts.
    first = sharing.decide(cap_bytes=cap, context_bytes=before - free)
    device.build(first.modules, lambda done, total: progress("compiling kernels", done, total))
    for module, name in first.kernels:
        device.kernel(module, name)
    free, _ = device.memory_bytes()
    graph_bytes = GRAPH_BYTES + (OTHER_GRAPH_BYTES if options.cpu_experts != "off" else 0)
    graph_bytes += 0 if source.drafter is None else DRAFTER_GRAPH_BYTES
    decision = sharing.decide(cap_bytes=cap, context_bytes=before - free + graph_bytes)
    if decision.plan.device_bytes - (before - free) > free:
        raise CapacityError(
            f"the plan takes {decision.plan.device_bytes / plan.GIB:.2f} GiB of the GPU, of which "
            f"{free / plan.GIB:.2f} of {total / plan.GIB:.2f} GiB are free",
            hint="what else uses it (nvidia-smi)? or give a smaller --vram",
        )
    replay, reasons = None, decision.reasons
    if options.replay is not None:  # it comes on top of the plan
        choices = _choices(options.replay, source)
        guesses = None if options.replay_guesses is None else _guesses(options.replay_guesses, choices, source)
        replay = Replay(device, choices, guesses)
        said = f"the choices of {len(choices)} tokens are replayed from {options.replay}: the text means nothing"
        reasons = (said, *reasons)
    device.reserve(decision.arena_bytes, releasable=options.idle_release_s is not None)
    return Shares(decision.limits, decision.placement, decision.rule, reasons, decision, replay, decision.pool_tokens)


def _choices(path: Path, source: Source) -> NDArray[np.integer]:
    """Recorded expert choices for decoded tokens."""
    c = source.config
    choices: NDArray[np.integer] = np.load(path, allow_pickle=False)
    shape = (len(c.moe_layers), c.n_expert_used)
    if choices.ndim != 3 or choices.shape[1:] != shape or not np.issubdtype(choices.dtype, np.integer):
        raise UsageError(f"{path}: expected integers [n_tokens, {shape[0]}, {shape[1]}], found {choices.shape}")
    if not choices.size or not 0 <= choices.min() <= choices.max() < c.n_expert:
        raise UsageError(f"{path}: expected experts below {c.n_expert}, of at least one token")
    if (np.diff(np.sort(choices, axis=2), axis=2) == 0).any():
        raise UsageError(f"{path}: an expert is chosen twice for a token")
    return choices


def _guesses(path: Path, choices: NDArray[np.integer], source: Source) -> NDArray[np.integer]:
    """Experts that are guessed for the same tokens."""
    guesses: NDArray[np.integer] = np.load(path, allow_pickle=False)
    shape = (*choices.shape[:2], SLOTS)
    if guesses.shape != shape or not np.issubdtype(guesses.dtype, np.integer):
        raise UsageError(f"{path}: expected integers {list(shape)}, found {guesses.shape}")
    if not -1 <= guesses.min() <= guesses.max() < source.config.n_expert:
        raise UsageError(f"{path}: expected experts below {source.config.n_expert}, or -1")
    return guesses
