"""A loaded model: weights, backend, cache and residency, and one function that runs a step.

A step is a list of spans of tokens, each belonging to a sequence: a prefill chunk, one decoded token,
later a draft to verify. Several sequences can share a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import backend, models, placement, policy
from engine.config import EngineConfig
from engine.errors import CapacityError, UsageError
from engine.forward import MAX_ROWS, Forward
from engine.gguf import GGUFFile, open_model
from engine.kv import Sequence, block_table
from engine.models import Buffers
from engine.ops import F32, I32, Limits
from engine.placement import Placement
from engine.profile import Profile
from engine.profile import load as load_profile
from engine.residency import Residency, slot_bytes
from engine.sampling import SamplingParams, sample

DEFAULT_CTX_TOKENS = 32768
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


class StepResult:
    """What a step computed, read from the device when asked for; the next step overwrites it.

    logits float32 [R, V] in order of the spans' wants. experts int32, weights float32 [L, T, A]; hidden
    float32 [n_layer, T, D] or None. residual float32 [T, D]: what the head reads.
    """

    def __init__(self, device: Any, buffers: Buffers, rows: Many[int] | None = None) -> None:
        self._device, self._buffers, self._rows = device, buffers, rows

    @property
    def logits(self) -> F32:
        """Logits of the wanted tokens."""
        logits: F32 = self._device.read(self._buffers.logits)
        return logits if self._rows is None else logits[list(self._rows)]

    @property
    def experts(self) -> I32:
        """The chosen experts."""
        return np.asarray(self._device.read(self._buffers.experts))

    @property
    def weights(self) -> F32:
        """Their weights."""
        return np.asarray(self._device.read(self._buffers.weights))

    @property
    def hidden(self) -> F32 | None:
        """The residual entering each layer, where it was captured."""
        return None if self._buffers.hidden is None else np.asarray(self._device.read(self._buffers.hidden))

    @property
    def residual(self) -> F32:
        """The residual that leaves the last layer."""
        return np.asarray(self._device.read(self._buffers.x))


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


class Runner:
    """Everything that a forward pass needs, allocated once."""

    def __init__(self, config: EngineConfig, progress: Progress = lambda done, total: None) -> None:
        self.options = config
        self.file: GGUFFile = open_model(config.model)
        self.arch = models.find(self.file.architecture)
        self.config = self.arch.Config.from_gguf(self.file)
        self.weights = self.arch.load(self.file, self.config)
        self.threads = config.threads or physical_cores()
        self.backend = backend.open_backend(config.device, self.threads)
        self.device = self.backend.name
        self.n_ctx = self._context()
        self.reasons = [
            f"device {self.device}: {self.backend.reason}",
            f"{self.threads} threads: " + ("asked for" if config.threads else "one for each physical core"),
            f"context of {self.n_ctx} tokens: "
            + ("asked for" if config.ctx_tokens else f"the model was trained on {self.config.n_ctx_train}"),
        ]
        self.warnings: list[str] = []
        self.profile = self._profile()
        c = self.config
        if config.kv_type == "q8_0" and c.head_dim % 32:
            raise UsageError(
                f"--kv-type q8_0 stores blocks of 32, and the model's heads have {c.head_dim} dimensions",
                hint="use --kv-type f16",
            )
        self.chunk_tokens = min(config.chunk_tokens or self.backend.chunk_tokens, self.n_ctx)
        self.limits = Limits(
            max_tokens=self.chunk_tokens,
            n_embd=c.n_embd,
            n_head_dim=c.n_head * c.head_dim,
            n_ff=c.n_ff_exp,
            n_vocab=c.n_vocab,
            n_expert=c.n_expert,
            n_expert_used=c.n_expert_used,
            n_head=c.n_head,
            n_head_kv=c.n_head_kv,
            head_dim=c.head_dim,
            n_ctx=self.n_ctx,
            max_rows=MAX_ROWS,
        )
        self.placement, self.rule = self._place()
        self.forward = self._forward()
        tier = self.backend.tier(self.weights.experts, self.placement)
        self.residency = Residency(
            self.weights.experts, self.placement, self.rule, device=self.backend.device, tier=tier,
            poison=config.poison, progress=progress,
        )  # fmt: skip

    def _forward(self) -> Forward:
        b = self.backend
        return Forward(
            b.device, b.ops, b.workspace(self.limits), self.arch, self.config, self.weights, self.limits,
            kv_tokens=self.n_ctx, kv_type=self.options.kv_type,
        )  # fmt: skip

    @property
    def kv(self) -> Any:
        """The KV cache."""
        return self.forward.kv

    @property
    def isa(self) -> str:
        """What the kernels were compiled for."""
        return str(self.forward.ws.isa)

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

    def new_sequence(self) -> Sequence:
        """An empty sequence in this runner's cache."""
        return Sequence(self.kv.pool)

    def capture_hidden(self, wanted: bool) -> None:
        """Keep the residual stream entering each layer in later steps, or stop keeping it."""
        self.forward.capture_hidden(wanted)

    def run(self, spans: list[Span]) -> StepResult:
        """Run one step; sequences grow by their spans' tokens."""
        starts = [s.sequence.length for s in spans]
        T = sum(len(s.tokens) for s in spans)
        assert 0 < T <= self.limits.max_tokens
        assert len(spans) <= self.limits.max_sequences
        for span in spans:
            if span.sequence.length + len(span.tokens) > self.n_ctx:
                raise CapacityError(f"{span.sequence.length + len(span.tokens)} tokens in a context of {self.n_ctx}")
        slots = [s.sequence.extend(len(s.tokens)) for s in spans]
        offsets = np.cumsum([0, *(len(s.tokens) for s in spans)])
        rows = [o + w for o, s in zip(offsets, spans, strict=False) for w in s.want]
        positions = [np.arange(a, a + len(s.tokens)) for a, s in zip(starts, spans, strict=True)]
        step = self.forward.feed(
            tokens=np.concatenate([s.tokens for s in spans]).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            sequence=np.repeat(np.arange(len(spans), dtype=np.int32), [len(s.tokens) for s in spans]),
            slots=np.concatenate(slots),
            block_table=block_table([s.sequence for s in spans], self.forward.inputs.block_table.shape[1]),
            counted=np.concatenate([s.counted for s in spans]).astype(np.uint8),
            rows=np.asarray(rows, dtype=np.int32),
        )
        return StepResult(self.backend.device, self.forward.run(step, self.residency))

    def decode(
        self, sequence: Sequence, history: list[int], logits: F32, params: SamplingParams, stop: frozenset[int],
        limit: int,
    ) -> Generator[list[int], None, str]:  # fmt: skip
        """Generate up to `limit` tokens after `history`, whose last token gave `logits`; lists as they come.

        `history` grows by what is generated. A token of `stop` ends it and is not part of it. Returns why it
        ended: "stop" or "length".
        """
        counted = np.ones(1, bool)
        for made in range(1, limit + 1):
            token = sample(logits, params, len(history), history)
            if token in stop:
                return "stop"
            history.append(token)
            yield [token]
            if made < limit:
                logits = self.run([Span(sequence, np.asarray([token], np.int32), counted, (0,))]).logits[0]
        return "length"

    def logits(self, rows: I32) -> F32:
        """Logits [len(rows), V] of more rows of the last step (at most MAX_ROWS at a time)."""
        return self.forward.head(rows)

    def plan(self) -> dict[str, int]:
        """Bytes by purpose: what is in fast memory, and what the slow tier maps."""
        dense = int(self.weights.dense_bytes)
        plan = {
            "dense_bytes": dense,
            "kv_bytes": self.kv.nbytes,
            "slots_bytes": self.residency.arena_bytes,
            "experts_bytes": self.residency.experts_bytes,
            "buffers_bytes": self.forward.buffers_bytes,
        }
        plan["device_bytes"] = sum(plan[k] for k in ("dense_bytes", "kv_bytes", "slots_bytes", "buffers_bytes"))
        return plan

    def close(self) -> None:
        """Stop the backend's threads and unmap the file."""
        self.forward.ws.close()
        self.residency.tier.close()
        self.backend.device.close()
        self.file.close()
