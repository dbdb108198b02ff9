"""A loaded model: weights, backend, cache and residency, and one function that runs a step.

A step is a list of spans of tokens, each belonging to a sequence: a prefill chunk, one decoded token,
later a draft to verify. Several sequences can share a step.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from engine import models, placement, policy
from engine.config import EngineConfig
from engine.errors import CapacityError, MissingExtraError, UsageError
from engine.gguf import GGUFFile, open_model
from engine.kv import KVCache, Sequence, block_table
from engine.models import Buffers, Step
from engine.ops import F32, I32, Fetches, Limits
from engine.ops.reference import rope_table
from engine.placement import Placement
from engine.profile import Profile
from engine.profile import load as load_profile
from engine.residency import Residency, slot_bytes

DEFAULT_CTX_TOKENS = 32768
MAX_ROWS = 64  # rows of logits held at once: 39 MB for a vocabulary of 152K
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that continue a sequence. counted: whose routing is counted, bool [T].

    want: indices within the span whose logits are wanted, MAX_ROWS in a step at most.
    """

    sequence: Sequence
    tokens: I32
    counted: NDArray[np.bool_]
    want: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed; arrays are views that the next step overwrites.

    logits float32 [R, V] in order of the spans' wants. experts int32, weights float32 [L, T, A]; hidden
    float32 [n_layer, T, D] or None. residual float32 [T, D]: what the head reads.
    """

    logits: F32
    experts: I32
    weights: F32
    hidden: F32 | None
    residual: F32


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads of one core counted once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            package = (topology / "physical_package_id").read_text().strip()
            cores.add((package, (topology / "core_id").read_text().strip()))
        except OSError:
            return len(allowed)
    return max(1, len(cores))


def choose_backend(device: str) -> tuple[str, ModuleType, str]:
    """The backend for `--device`: its name, its module of ops, and why it was chosen."""
    if device == "cuda":
        raise MissingExtraError("the CUDA backend is not part of this version", hint="use --device cpu")
    name = "cpu" if device == "auto" else device
    why = "no CUDA backend in this version" if device == "auto" else "asked for"
    return name, importlib.import_module(f"engine.ops.{name}"), why


class Runner:
    """Everything that a forward pass needs, allocated once."""

    def __init__(self, config: EngineConfig, progress: Progress = lambda done, total: None) -> None:
        self.options = config
        self.file: GGUFFile = open_model(config.model)
        self.arch = models.find(self.file.architecture)
        self.config = self.arch.Config.from_gguf(self.file)
        self.weights = self.arch.load(self.file, self.config)
        self.device, self.ops, device_reason = choose_backend(config.device)
        self.threads = config.threads or physical_cores()
        self.n_ctx = self._context()
        self.reasons = [
            f"device {self.device}: {device_reason}",
            f"{self.threads} threads: " + ("asked for" if config.threads else "one for each physical core"),
            f"context of {self.n_ctx} tokens: "
            + ("asked for" if config.ctx_tokens else f"the model was trained on {self.config.n_ctx_train}"),
        ]
        self.warnings: list[str] = []
        self.profile = self._profile()
        self.placement, self.rule = self._place()
        self.residency = Residency(
            self.weights.experts, self.placement, self.rule, poison=config.poison, progress=progress
        )
        c = self.config
        self.chunk_tokens = min(config.chunk_tokens, self.n_ctx)
        if config.kv_type == "q8_0" and c.head_dim % 32:
            raise UsageError(
                f"--kv-type q8_0 stores blocks of 32, and the model's heads have {c.head_dim} dimensions",
                hint="use --kv-type f16",
            )
        self.kv = KVCache(c.n_layer, c.n_head_kv, c.head_dim, self.n_ctx, config.kv_type)
        self.rope = rope_table(self.n_ctx, c.rope_dims, c.rope_base)
        self.limits = Limits(
            max_tokens=self.chunk_tokens,
            n_embd=c.n_embd,
            n_head_dim=c.n_head * c.head_dim,
            n_ff=c.n_ff_exp,
            n_vocab=c.n_vocab,
            n_expert=c.n_expert,
            n_expert_used=c.n_expert_used,
        )
        self.ws = self.ops.workspace(self.limits, self.threads)
        self.buffers = self._buffers(hidden=False)

    def _context(self) -> int:
        train = self.config.n_ctx_train
        if self.options.ctx_tokens is None:
            return int(min(train, DEFAULT_CTX_TOKENS))
        if not 1 <= self.options.ctx_tokens <= train:
            raise UsageError(f"--ctx {self.options.ctx_tokens}: the model's context is 1 to {train} tokens")
        return self.options.ctx_tokens

    def _place(self) -> tuple[Placement, policy.Rule]:
        """The placement and rule that the options ask for; `self.reasons` says why."""
        o, c = self.options, self.config
        sizes = [slot_bytes(e) for e in self.weights.experts]
        budget = placement.residency_budget(c.n_expert, sizes, o.residency_pct)
        shape = (len(sizes), c.n_expert)
        profile = self.profile
        if o.policy == "all":
            return placement.everything(c.n_expert, sizes), policy.LRU
        if o.policy == "uniform":
            return placement.uniform(c.n_expert, sizes, budget), policy.LRU
        if o.policy == "lru":
            return placement.lru(c.n_expert, sizes, budget), policy.LRU
        if profile is None and o.policy == "static":
            raise UsageError("the policy `static` places by a profile, and none was given", hint="spark calibrate")
        counts = np.zeros(shape, np.int64) if profile is None else profile.counts[list(c.moe_layers)]
        if o.policy == "static":
            return placement.greedy(counts, sizes, budget, n_expert_used=c.n_expert_used), policy.LRU
        if o.cache_slots is not None:
            self.reasons.append(f"{o.cache_slots} cache slots a layer: asked for")
            placed = placement.greedy(counts, sizes, budget, n_expert_used=c.n_expert_used)
            return placed.with_cache([o.cache_slots] * len(sizes)), policy.AGED
        share, why = self._cache_share(profile)
        self.reasons.append(f"{share:.0%} of the slots are cache: {why}")
        placed = placement.greedy(counts, sizes, budget, n_expert_used=c.n_expert_used, cache_fraction=share)
        return placed, policy.AGED

    def _cache_share(self, profile: Profile | None) -> tuple[float, str]:
        percent = self.options.residency_pct
        if profile is None:
            return 0.5, "there is no profile, so half of them learn"
        if not profile.split:
            return profile.split_for(percent), "the profile has no measured split"
        return profile.split_for(percent), f"the profile's measured split, at {percent:g}% residency"

    def _profile(self) -> Profile | None:
        if self.options.profile is None:
            return None
        profile, warnings = load_profile(self.options.profile, model_id=self.file.model_id)
        self.warnings.extend(warnings)
        expected = (self.config.n_layer, self.config.n_expert)
        if profile.counts.shape != expected:
            raise UsageError(
                f"{self.options.profile} counts {profile.counts.shape[0]} layers of {profile.counts.shape[1]} experts; "
                f"the model has {expected[0]} of {expected[1]}"
            )
        return profile

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The ids that end a turn, as the file's metadata names them."""
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        return tuple({self.file.value(key, int) for key in keys if key in self.file.metadata})

    def _buffers(self, hidden: bool) -> Buffers:
        c, n = self.config, self.limits

        def f32(*shape: int) -> F32:
            return np.zeros(shape, np.float32)

        T, L = n.max_tokens, len(c.moe_layers)
        return Buffers(
            x=f32(T, c.n_embd),
            h=f32(T, c.n_embd),
            q=f32(T, c.n_head, c.head_dim),
            attended=f32(T, n.n_head_dim),
            router=f32(T, c.n_expert),
            experts=np.zeros((L, T, c.n_expert_used), np.int32),
            weights=f32(L, T, c.n_expert_used),
            logits=f32(MAX_ROWS, c.n_vocab),
            fetches=Fetches(np.zeros((c.n_expert, 3), np.int32), np.zeros(1, np.int32)),
            hidden=f32(c.n_layer, T, c.n_embd) if hidden else None,
        )

    def new_sequence(self) -> Sequence:
        """An empty sequence in this runner's cache."""
        return Sequence(self.kv.pool)

    def capture_hidden(self, wanted: bool) -> None:
        """Keep the residual stream entering each layer in later steps, or stop keeping it."""
        if wanted != (self.buffers.hidden is not None):
            self.buffers = self._buffers(hidden=wanted)

    def run(self, spans: list[Span]) -> StepResult:
        """Run one step; sequences grow by their spans' tokens."""
        starts = [s.sequence.length for s in spans]
        T = sum(len(s.tokens) for s in spans)
        assert 0 < T <= self.limits.max_tokens
        for span in spans:
            if span.sequence.length + len(span.tokens) > self.n_ctx:
                raise CapacityError(f"{span.sequence.length + len(span.tokens)} tokens in a context of {self.n_ctx}")
        slots = [s.sequence.extend(len(s.tokens)) for s in spans]
        offsets = np.cumsum([0, *(len(s.tokens) for s in spans)])
        rows = [o + w for o, s in zip(offsets, spans, strict=False) for w in s.want]
        step = Step(
            tokens=np.concatenate([s.tokens for s in spans]).astype(np.int32),
            positions=np.concatenate(
                [np.arange(a, a + len(s.tokens)) for a, s in zip(starts, spans, strict=True)]
            ).astype(np.int32),
            sequence=np.repeat(np.arange(len(spans), dtype=np.int32), [len(s.tokens) for s in spans]),
            slots=np.concatenate(slots),
            block_table=block_table([s.sequence for s in spans]),
            counted=np.concatenate([s.counted for s in spans]).astype(np.uint8),
            rows=np.asarray(rows, dtype=np.int32),
        )
        b = self.buffers.first(T, len(rows), self.config.n_expert_used)
        self.arch.forward(
            self.config, self.weights, self.ops, self.ws, step, self.kv, self.residency, self.rope, b
        )
        return StepResult(b.logits, b.experts, b.weights, b.hidden, b.x)

    def logits(self, rows: I32) -> F32:
        """Logits [len(rows), V] of more rows of the last step (at most MAX_ROWS at a time)."""
        out = self.buffers.logits[: len(rows)]
        self.arch.head(self.config, self.weights, self.ops, self.ws, rows, self.buffers.x, out)
        return out

    def plan(self) -> dict[str, int]:
        """Bytes by purpose: what is in fast memory, and what the slow tier maps."""
        dense = int(self.weights.dense_bytes)
        plan = {
            "dense_bytes": dense,
            "kv_bytes": self.kv.nbytes,
            "slots_bytes": self.residency.arena_bytes,
            "experts_bytes": self.residency.experts_bytes,
            "buffers_bytes": sum(
                a.nbytes
                for a in (
                    self.buffers.x, self.buffers.h, self.buffers.q, self.buffers.attended, self.buffers.router,
                    self.buffers.experts, self.buffers.weights, self.buffers.logits, self.rope,
                )
            ),
        }  # fmt: skip
        plan["device_bytes"] = sum(plan[k] for k in ("dense_bytes", "kv_bytes", "slots_bytes", "buffers_bytes"))
        return plan

    def close(self) -> None:
        """Stop the backend's threads and unmap the file."""
        self.ws.close()
        self.file.close()
