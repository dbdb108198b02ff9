"""Cases of cuda_kernels.py: routing, embedding, sampling and copies of experts at Qwen3-30B-A3B's shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as QType

from benchmarks.cuda_kernels import KernelCase
from engine.formats.quants import QTensor, row_bytes
from engine.ops import Experts, Fetches, Gating, Limits
from engine.ops.cuda.routing import Routing, Staging, embed, staging_bytes
from engine.ops.cuda.sampling import Sampler
from engine.placing import policy
from engine.placing.placement import Placement
from engine.running.sampling import SamplingParams

L, D, F, VOCAB, E, A = 48, 2048, 768, 151936, 128, 8
CHUNK = 4096
LIMITS = Limits(CHUNK, D, 4096, F, VOCAB, E, A)
CHOICES = 64  # rows of router logits, one after the other
PART_BYTES = (
    F * row_bytes(QType.Q4_K, D, "gate"),
    F * row_bytes(QType.Q4_K, D, "up"),
    D * row_bytes(QType.Q6_K, F, "down"),
)
MISSING = 51


def _state(device: Any, n_slots: int) -> policy.SlotState:
    state = policy.SlotState.empty([n_slots] * L, E)
    residents = tuple(range(n_slots))
    policy.fill(
        state, Placement((n_slots,) * L, (residents[: n_slots // 2],) * L, (residents[n_slots // 2 :],) * L, (1,) * L)
    )
    return policy.SlotState(*(device.upload(getattr(state, name)) for name in policy.SlotState.__slots__))


def _route(device: Any, routing: Routing, T: int, n_slots: int) -> KernelCase:
    logits = device.upload(2 * np.random.default_rng(1).standard_normal((CHOICES, T, E), np.float32))
    experts, weights = device.empty((T, A), np.int32), device.empty((T, A), np.float32)
    fetches = Fetches(device.empty((E, 3), np.int32), device.empty(1, np.int32))
    counted, active = device.upload(np.ones(T, np.uint8)), device.upload(np.ones(1, np.int32))
    state = _state(device, n_slots)

    def launch(i: int) -> None:
        row = logits[i % CHOICES]
        routing.route(row, Gating(), state, i % L, counted, policy.DEFAULT, experts, weights, fetches, active)

    return KernelCase(f"route T={T}, {n_slots} slots", launch, T * (E + 2 * A) * 4 + n_slots * 13)


def _embed(device: Any, T: int) -> KernelCase:
    n_bytes = VOCAB * row_bytes(QType.Q4_K, D, "table")
    table = QTensor("table", QType.Q4_K, (VOCAB, D), device.upload(np.full(n_bytes, 60, np.uint8)))
    tokens = device.upload(np.random.default_rng(2).integers(0, VOCAB, (CHOICES, T)).astype(np.int32))
    x = device.empty((T, D), np.float32)
    moved = T * (D * 4 + n_bytes // VOCAB)
    return KernelCase(f"embed T={T}", lambda i: embed(device, table, tokens[i % CHOICES], x), moved)


def _sample(
    device: Any, name: str, params: SamplingParams, greedy: bool = False, logprobs: int | None = None
) -> KernelCase:
    sampler = Sampler(device, LIMITS)
    rng = np.random.default_rng(3)
    logits = device.upload(
        (4 * rng.standard_normal((8, 1, VOCAB)) + 1.5 * rng.standard_gamma(2, VOCAB)).astype(np.float32)
    )
    tokens, positions, slots = device.empty(1, np.int32), device.empty(1, np.int32), device.empty((1, 1), np.int32)
    table = device.upload(np.zeros((1, 1, 1 << 17), np.int32))  # positions for millions of draws
    sampler.prepare(params, [5] * 300, 300, [1, 2, 3], 1 << 30, logprobs=logprobs)
    sampler.count([5] * 300)

    def launch(i: int) -> None:
        sampler.step(logits[i % 8], tokens, positions, slots, table, greedy)
        if logprobs is not None:
            sampler.describe(logits[i % 8])

    return KernelCase(f"sample {name}", launch, VOCAB * 4)


def _bank(device: Any) -> tuple[policy.SlotState, Experts]:
    """A layer whose last MISSING experts lie in page-locked memory only."""
    stride = staging_bytes(PART_BYTES)
    offsets = np.concatenate(([0], np.cumsum([-(-n // 256) * 256 for n in PART_BYTES])[:2]))
    home, arena = device.page_locked(E * stride), device.empty((E - MISSING) * stride, np.uint8)
    home[:] = 1
    state = policy.SlotState.empty([E - MISSING], E)
    state.home_ptr[0] = device.pointer(home) + np.arange(E)[:, None] * stride + offsets
    state.slot_ptr[:] = device.pointer(arena) + np.arange(E - MISSING)[:, None] * stride + offsets
    state.expert_ptr[:] = state.home_ptr
    policy.fill(state, Placement((E - MISSING,), (tuple(range(E - MISSING)),), ((),), (1,)))
    tables = policy.SlotState(*(device.upload(getattr(state, name)) for name in policy.SlotState.__slots__))
    pointers = (tables.expert_ptr[0], tables.home_ptr[0], tables.slot_ptr)
    return tables, Experts(QType.Q4_K, QType.Q4_K, QType.Q6_K, D, F, PART_BYTES, *pointers, layer=0)


def _copies(device: Any) -> Iterator[KernelCase]:
    state, bank = _bank(device)
    n_bytes = MISSING * sum(PART_BYTES)
    for n_blocks in (4, 8, 16):
        staging = Staging(device, LIMITS, MISSING * staging_bytes(PART_BYTES), n_blocks)
        name = f"gather {MISSING} experts, {n_blocks} blocks"
        yield KernelCase(name, lambda i, s=staging: s.gather(state, 0, bank, i % 2), n_bytes)  # type: ignore[misc]
    rows = np.stack([np.arange(E - 8, E), np.arange(8), np.arange(8)], axis=1).astype(np.int32)
    fetches = Fetches(device.upload(rows), device.upload(np.array([8], np.int32)))
    staging.gather(state, 0, bank, 0)
    yield KernelCase("fill 8 slots", lambda i: staging.fill(fetches, bank, staging.source[0]), 16 * sum(PART_BYTES))


def cases(device: Any) -> Iterator[KernelCase]:
    """Every case, made when it is its turn."""
    routing = Routing(device, LIMITS)
    for T, n_slots in ((1, 128), (1, 77), (8, 77), (32, 77), (CHUNK, 77)):
        yield _route(device, routing, T, n_slots)
    for T in (1, CHUNK):
        yield _embed(device, T)
    yield _sample(device, "greedy", SamplingParams(), greedy=True)
    yield _sample(device, "greedy, penalty", SamplingParams(repetition_penalty=1.1), greedy=True)
    counting = SamplingParams(frequency_penalty=0.1, presence_penalty=0.1)
    yield _sample(device, "greedy, penalties that count", counting, greedy=True)
    yield _sample(device, "greedy, and its log-probability", SamplingParams(), greedy=True, logprobs=0)
    yield _sample(device, "greedy, and the 20 likeliest", SamplingParams(), greedy=True, logprobs=20)
    yield _sample(device, "greedy in the general graph", SamplingParams())
    yield _sample(device, "temperature", SamplingParams(temperature=0.8, seed=1))
    yield _sample(device, "top-k 40", SamplingParams(temperature=0.8, top_k=40, seed=1))
    yield _sample(device, "top-p 0.9", SamplingParams(temperature=0.8, top_p=0.9, seed=1))
    yield _sample(device, "top-k 40, top-p 0.9", SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=1))
    yield from _copies(device)
