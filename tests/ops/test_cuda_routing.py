"""Embedding, routing, tables and copies of experts on the device, against the twins bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats.block_types import NATIVE_TYPES
from engine.formats.quants import QTensor
from engine.ops import SMALL_TOKENS, Experts, Fetches, Gating, Limits, reference
from engine.ops.cuda.routing import Routing, Staging, embed, staging_bytes
from engine.placing import policy
from tests.gguf_files import random_blocks
from tests.op_cases import bank_of as host_bank

STATE = policy.SlotState.__slots__


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, where a NaN has no bits of its own."""
    return a.dtype == b.dtype and bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def limits(E: int, A: int) -> Limits:
    return Limits(max_tokens=80, n_embd=64, n_head_dim=64, n_ff=32, n_vocab=9, n_expert=E, n_expert_used=A)


# --- embedding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("qtype", NATIVE_TYPES, ids=lambda t: t.name)
def test_embed_dequantizes_rows(device: Any, qtype: QType) -> None:
    block = gguf.GGML_QUANT_SIZES[qtype][0]
    V, D = 19, {1: 300, 32: 96, 64: 192, 256: 512}[block]
    data = np.ascontiguousarray(random_blocks(qtype, V, D, np.random.default_rng(1))).reshape(-1).view(np.uint8)
    tokens = np.array([18, 0, 5, 5, 17], np.int32)
    expected = np.zeros((len(tokens), D), np.float32)
    reference.embed(None, QTensor("table", qtype, (V, D), data), tokens, expected)  # type: ignore[arg-type]
    x = device.empty(expected.shape, np.float32)
    embed(device, QTensor("table", qtype, (V, D), device.upload(data)), device.upload(tokens), x)
    assert same_bits(device.read(x), expected)


# --- route ------------------------------------------------------------------------------------------


def slot_state(slots: tuple[int, ...], E: int, seed: int) -> policy.SlotState:
    """Slots partly full, partly pinned; every address distinct."""
    rng = np.random.default_rng(seed)
    state = policy.SlotState.empty(slots, E)
    state.home_ptr[:] = 1000 + np.arange(state.home_ptr.size).reshape(state.home_ptr.shape)
    state.slot_ptr[:] = 500000 + np.arange(state.slot_ptr.size).reshape(state.slot_ptr.shape)
    state.expert_ptr[:] = state.home_ptr
    for layer, n in enumerate(slots):
        resident = rng.permutation(E)[: n * 3 // 4]
        at = np.arange(len(resident)) + state.slot_begin[layer]
        state.slot_of[layer, resident], state.expert_of[at] = at, resident
        state.expert_ptr[layer, resident] = state.slot_ptr[at]
        state.pinned[at[: n // 3]] = 1
    state.clock[:] = rng.integers(0, 9, len(slots))
    state.heat[:] = rng.choice([-3, 0, 40, 65536, 65537, 1 << 18], state.heat.shape)  # equals among them
    return state


def on_device(device: Any, state: policy.SlotState) -> policy.SlotState:
    return policy.SlotState(*(device.upload(getattr(state, name)) for name in STATE))


def assert_same_state(device: Any, state: policy.SlotState, expected: policy.SlotState) -> None:
    for name in STATE:
        assert np.array_equal(device.read(getattr(state, name)), getattr(expected, name)), name


def active_table(before: policy.SlotState, layer: int, experts: np.ndarray, fetches: np.ndarray) -> tuple[Any, Any]:
    """The records that a step should leave, and the pairs, from the state before it."""
    flat, slot_of = experts.ravel(), {int(e): int(slot) for e, slot, _ in fetches}
    records, pairs = [], []
    for expert in dict.fromkeys(flat.tolist()):
        uses = np.flatnonzero(flat == expert).tolist()
        target = before.slot_ptr[slot_of[expert]].tolist() if expert in slot_of else [0, 0, 0]
        records.append([*before.expert_ptr[layer, expert].tolist(), *target, expert, len(pairs), len(uses), 0])
        pairs += uses
    if len(experts) > 1:
        records.sort(key=lambda record: before.slot_of[layer, record[6]] >= 0)
    return records, pairs


def test_what_enters_no_slot_passes_through(device: Any) -> None:
    E, A, T, layer = 17, 5, 4, 1
    host, routing = slot_state((3, 6), E, 5), Routing(device, limits(E, A))
    host.pinned[:] = 1  # nothing may enter a slot
    routing.pass_through((100, 300, 513), n_places=3)
    base, state = int(routing._bypass[0]), on_device(device, host)
    experts, weights = device.empty((T, A), np.int32), device.empty((T, A), np.float32)
    fetches = Fetches(device.empty((E, 3), np.int32), device.empty(1, np.int32))
    counted = device.upload(np.ones(T, np.uint8))
    routing.route(
        device.upload(floats(7, T, E)), Gating(), state, layer, counted, policy.LRU, experts, weights, fetches
    )  # fmt: skip
    n = int(device.read(routing.n_active)[0])
    records = records_of(device.read(routing.active), n)
    missing = [host.slot_of[layer, record[6]] < 0 for record in records]
    assert sum(missing) > 3 and not all(missing) and missing == sorted(missing, reverse=True)
    for i, record in enumerate(records):
        place = base + i * (256 + 512 + 768)
        assert record[:3] == host.expert_ptr[layer, record[6]].tolist()
        assert record[3:6] == ([place, place + 256, place + 768] if i < 3 else [0, 0, 0])


def records_of(active: np.ndarray, n: int) -> list[list[int]]:
    tail = np.ascontiguousarray(active[:n, 6:]).view(np.int32)
    return [[*row.tolist(), *rest.tolist()] for row, rest in zip(active[:n, :6], tail, strict=True)]


@dataclass(frozen=True)
class Step:
    E: int
    A: int
    T: int
    slots: tuple[int, ...]
    rule: policy.Rule = policy.DEFAULT
    renormalize: bool = True
    odd: bool = False
    imposed: bool = False
    kind: Literal["softmax", "sigmoid"] = "softmax"
    bias: bool = False
    scale: float = 1.0
    expert_scale: bool = False

    def gating(self, upload: Callable[[np.ndarray], Any]) -> Gating:
        """Its router's rule, arrays made by `upload`."""
        bias = upload(np.float32(0.05) * floats(90, self.E)) if self.bias else None
        expert_scale = upload(1 + np.float32(0.3) * floats(91, self.E)) if self.expert_scale else None
        return Gating(self.kind, self.renormalize, self.scale, bias, expert_scale)


STEPS = [
    Step(128, 8, 1, (20, 77)),
    Step(128, 8, 1, (20, 8), policy.LRU),
    Step(128, 8, 8, (20, 77)),
    Step(128, 8, 32, (3, 128), policy.DEFAULT),
    Step(17, 5, 1, (4, 9, 3), policy.LRU),
    Step(17, 5, 11, (4, 9, 3), policy.DEFAULT),
    Step(17, 5, 2, (0, 12), policy.Rule(1), renormalize=False),
    Step(17, 5, 3, (2, 0), policy.LRU),
    Step(17, 5, 40, (3, 9)),
    Step(17, 5, 32, (3, 17), policy.Rule(3), renormalize=False),
    Step(17, 5, 7, (2, 17), policy.DEFAULT, renormalize=False, odd=True),
    Step(17, 5, 37, (2, 9), policy.LRU, odd=True),
    Step(512, 10, 1, (5, 300)),
    Step(512, 16, 32, (5, 300), renormalize=False),
    Step(512, 16, 70, (5, 300)),
    Step(40, 3, 1, (4, 9), imposed=True),
    Step(40, 3, 9, (4, 9), imposed=True, renormalize=False),
    Step(40, 3, 50, (4, 9), imposed=True),
    Step(256, 8, 1, (3, 100), kind="sigmoid", bias=True, scale=2.5),
    Step(256, 8, 1, (3, 100), kind="sigmoid", bias=True, scale=2.5, imposed=True),
    Step(256, 8, 33, (3, 100), kind="sigmoid", bias=True, scale=2.5),
    Step(512, 10, 4, (3, 100), kind="sigmoid", expert_scale=True),
    Step(40, 3, 7, (4, 9), kind="sigmoid", bias=True, odd=True),
    Step(40, 3, 7, (4, 9), kind="sigmoid", renormalize=False, odd=True, imposed=True),
    Step(40, 3, 7, (4, 9), bias=True, expert_scale=True, scale=0.7),
    Step(40, 3, 7, (4, 9), bias=True, renormalize=False, imposed=True),
    Step(3, 3, 2, (1, 2)),
    Step(1, 1, 3, (1, 1)),
]


def logits_of(step: Step, i: int) -> np.ndarray:
    values = floats(26 + i, step.T, step.E)
    values[::2] = np.round(values[::2])  # ties, and both zeros
    if step.odd:
        values[0, 3], values[1, :], values[2, ::2] = np.nan, np.nan, np.nan
        values[3, 4], values[4, 5], values[5] = np.inf, -np.inf, -np.inf
    return values


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_route_is_the_twin(device: Any, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    E, A, T, layer = step.E, step.A, step.T, 1
    expected, routing = slot_state(step.slots, E, 27), Routing(device, limits(E, A))
    state = on_device(device, expected)
    experts, weights = device.empty((T, A), np.int32), device.empty((T, A), np.float32)
    fetches = Fetches(device.empty((E, 3), np.int32), device.empty(1, np.int32))
    fetched = 0
    for i in range(4):
        logits, counted = logits_of(step, i), (np.arange(T) % 3 != i % 3).astype(np.uint8)
        imposed = None
        if step.imposed:
            rng = np.random.default_rng(i)
            imposed = np.stack([rng.permutation(E)[:A] for _ in range(T)]).astype(np.int32)
            monkeypatch.setattr(reference, "top_experts", lambda *_, chosen=imposed: chosen)
        want_experts, want_weights = np.zeros((T, A), np.int32), np.zeros((T, A), np.float32)
        want_fetches = Fetches(np.zeros((E, 3), np.int32), np.zeros(1, np.int32))
        before = copy.deepcopy(expected)
        arguments = (expected, host_bank(expected, layer), counted, step.rule, want_experts, want_weights, want_fetches)
        reference.route(None, logits, step.gating(np.asarray), *arguments)  # type: ignore[arg-type]
        routing.route(
            device.upload(logits), step.gating(device.upload), state, layer, device.upload(counted), step.rule,
            experts, weights, fetches, device.upload(np.ones(1, np.int32)),
            None if imposed is None else device.upload(imposed),
        )  # fmt: skip
        assert np.array_equal(device.read(experts), want_experts)
        assert same_bits(device.read(weights), want_weights)
        n = int(device.read(fetches.count)[0])
        assert n == want_fetches.count[0]
        rows = device.read(fetches.rows)[:n]
        assert np.array_equal(rows, want_fetches.rows[:n])
        assert_same_state(device, state, expected)
        if T <= SMALL_TOKENS:
            records, pairs = active_table(before, layer, want_experts, rows)
            assert records_of(device.read(routing.active), int(device.read(routing.n_active)[0])) == records
            assert device.read(routing.pairs)[: len(pairs)].tolist() == pairs
        else:
            assert np.array_equal(device.read(routing.source), before.expert_ptr[layer])
        fetched += n
    assert fetched or step.slots[1] in (0, step.E)


def test_an_inactive_step_moves_nothing(device: Any) -> None:
    E, A, T = 17, 5, 2
    expected, routing = slot_state((3, 9), E, 27), Routing(device, limits(E, A))
    state = on_device(device, expected)
    experts, weights = device.upload(np.full((T, A), 7, np.int32)), device.upload(np.full((T, A), 7, np.float32))
    fetches = Fetches(device.upload(np.full((E, 3), 7, np.int32)), device.upload(np.full(1, 7, np.int32)))
    device.write(routing.n_active, np.full(1, 7, np.int32))
    routing.route(
        device.upload(floats(1, T, E)), Gating(), state, 1, device.upload(np.ones(T, np.uint8)), policy.LRU, experts,
        weights, fetches, device.upload(np.zeros(1, np.int32)),
    )  # fmt: skip
    assert_same_state(device, state, expected)
    for array in (experts, weights, fetches.rows):
        assert (device.read(array) == 7).all()
    assert device.read(routing.n_active)[0] == device.read(fetches.count)[0] == 0


def test_a_row_does_not_depend_on_its_step(device: Any) -> None:
    E, A = 128, 8
    routing, logits = Routing(device, limits(E, A)), floats(5, 40, E)
    experts, weights = device.empty((40, A), np.int32), device.empty((40, A), np.float32)
    routing.choose(device.upload(logits), Gating(renormalize=False), experts, weights)
    whole_experts, whole_weights = device.read(experts), device.read(weights)
    for t in (0, 31, 39):
        routing.choose(device.upload(logits[t : t + 1]), Gating(renormalize=False), experts[:1], weights[:1])
        assert np.array_equal(device.read(experts)[0], whole_experts[t])
        assert same_bits(device.read(weights)[0], whole_weights[t])


def test_shapes_are_checked(device: Any) -> None:
    routing = Routing(device, limits(17, 5))
    logits, weights = device.empty((2, 17), np.float32), device.empty((2, 5), np.float32)
    with pytest.raises(ValueError, match="17"):
        routing.choose(logits, Gating(), device.empty((2, 4), np.int32), weights)
    with pytest.raises(ValueError, match="at most"):
        Routing(device, limits(600, 5))


# --- copies of experts ------------------------------------------------------------------------------

E, PART_BYTES = 11, (4096 * 2 + 528, 4096, 210 * 3)  # a ragged tail, a whole piece, less than one
STRIDE = 256 * 60


def expert_bytes(e: int, part: int) -> np.ndarray:
    return np.random.default_rng(100 * e + part).integers(0, 255, PART_BYTES[part]).astype(np.uint8)


def bank_of(device: Any, resident: dict[int, int]) -> tuple[Any, Experts, policy.SlotState, np.ndarray]:
    """A layer of E experts in page-locked memory and 4 slots; `resident` says slots of experts."""
    offsets = np.concatenate(([0], np.cumsum([-(-n // 256) * 256 for n in PART_BYTES])[:2]))
    home, arena = device.page_locked(E * STRIDE), device.empty(4 * STRIDE, np.uint8)
    host = np.full(4 * STRIDE, 0x55, np.uint8)
    state = policy.SlotState.empty((4,), E)
    state.home_ptr[0] = device.pointer(home) + np.arange(E)[:, None] * STRIDE + offsets
    state.slot_ptr[:] = device.pointer(arena) + np.arange(4)[:, None] * STRIDE + offsets
    state.expert_ptr[:] = state.home_ptr
    for e in range(E):
        for part in range(3):
            at = e * STRIDE + offsets[part]
            home[at : at + PART_BYTES[part]] = expert_bytes(e, part)
    for e, slot in resident.items():
        state.slot_of[0, e], state.expert_of[slot], state.expert_ptr[0, e] = slot, e, state.slot_ptr[slot]
    device.write(arena, host)
    tables = on_device(device, state)
    bank = Experts(
        QType.Q4_K, QType.Q4_K, QType.Q6_K, 256, 256, PART_BYTES,
        tables.expert_ptr[0], tables.home_ptr[0], tables.slot_ptr, layer=0,
    )  # fmt: skip
    return arena, bank, tables, state


def assert_staged(device: Any, staging: Staging, which: int, staged: list[int], state: policy.SlotState) -> None:
    source, memory = device.read(staging.source[which]), device.read(staging.buffers[which])
    expected = state.expert_ptr[0].copy()
    for place, e in enumerate(staged):
        at = place * staging_bytes(PART_BYTES)
        for part in range(3):
            expected[e, part] = device.pointer(staging.buffers[which]) + at
            assert np.array_equal(memory[at : at + PART_BYTES[part]], expert_bytes(e, part))
            at += -(-PART_BYTES[part] // 256) * 256
    assert np.array_equal(source, expected)


def test_gather_brings_what_is_missing(device: Any) -> None:
    _, bank, tables, state = bank_of(device, {7: 0, 2: 3})
    staging = Staging(device, limits(E, 2), 9 * staging_bytes(PART_BYTES), n_blocks=3)
    staging.gather(tables, 0, bank, 1)
    assert_staged(device, staging, 1, [0, 1, 3, 4, 5, 6, 8, 9, 10], state)
    experts = device.upload(np.array([[9, 2], [4, 9], [0, 4]], np.int32))
    staging.gather(tables, 0, bank, 0, experts)
    assert_staged(device, staging, 0, [0, 4, 9], state)


def test_what_staging_cannot_hold_stays_home(device: Any) -> None:
    _, bank, tables, state = bank_of(device, {7: 0})
    staging = Staging(device, limits(E, 2), 3 * staging_bytes(PART_BYTES) - 1)
    staging.gather(tables, 0, bank, 0)
    assert_staged(device, staging, 0, [0, 1], state)


def test_fill_copies_into_slots_and_poison_ruins_them(device: Any) -> None:
    arena, bank, tables, state = bank_of(device, {7: 0, 2: 3})
    staging = Staging(device, limits(E, 2), 9 * staging_bytes(PART_BYTES))
    staging.gather(tables, 0, bank, 0)
    rows = np.full((E, 3), 99, np.int32)
    rows[:2] = [[9, 3, 2], [4, 1, -1]]
    fetches = Fetches(device.upload(rows), device.upload(np.array([2], np.int32)))
    expected = device.read(arena)
    base = device.pointer(arena)

    def put(slot: int, part: int, data: np.ndarray) -> None:
        at = int(state.slot_ptr[slot, part]) - base
        expected[at : at + data.size] = data

    staging.poison(fetches, bank)
    for slot in (3, 1):
        for part in range(3):
            put(slot, part, np.full(PART_BYTES[part], 0xFF, np.uint8))
    assert np.array_equal(device.read(arena), expected)
    staging.fill(fetches, bank, staging.source[0])
    for e, slot in ((9, 3), (4, 1)):
        for part in range(3):
            put(slot, part, expert_bytes(e, part))
    assert np.array_equal(device.read(arena), expected)
