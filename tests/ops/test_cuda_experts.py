"""The expert FFN of small batches on the device: the bits of reference.expert_ffn, and what it writes to slots."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats.block_types import FLOAT_TYPES
from engine.ops import Experts, Fetches, Limits, SharedExpert, arithmetic, reference
from engine.ops.cuda.experts import SmallExperts, runs_beside
from engine.ops.cuda.products import Products
from tests.ops.test_cuda_products import EPS, check, check_quantized, matrix, normal

E, A = 7, 3
Q3, K4, K6, Q8 = QType.Q3_K, QType.Q4_K, QType.Q6_K, QType.Q8_0
Types = tuple[QType, QType, QType]


class Bank:
    """Random experts in host memory, their copies on the device, and slots in which some of them are."""

    def __init__(self, device: Any, types: Types, D: int, F: int, n_slots: int = 4, **more: Any) -> None:
        self.device, self.types, self.D, self.F = device, types, D, F
        self.more = more  # of Experts, on the host
        shapes = ((F, D), (F, D), (D, F))
        self.parts = [
            [
                matrix(t, *shape, seed=10 * e + part).data
                for part, (t, shape) in enumerate(zip(types, shapes, strict=True))
            ]
            for e in range(E)
        ]
        self.part_bytes = tuple(p.nbytes for p in self.parts[0])
        # In host memory the experts lie one after the other, 64-byte aligned, as the slow tier keeps them.
        self.padded = [-(-n // 64) * 64 for n in self.part_bytes]
        self.home = device.page_locked(E * sum(self.padded))
        for e in range(E):
            for part in range(3):
                at = self.offset(e, part)
                self.home[at : at + self.part_bytes[part]] = self.parts[e][part]
        self.slots = device.upload(np.full(n_slots * sum(self.padded), 0xFF, np.uint8))
        self.limits = Limits(max_tokens=32, n_embd=D, n_head_dim=D, n_ff=F, n_vocab=1, n_expert=E, n_expert_used=A)

    def offset(self, index: int, part: int) -> int:
        return index * sum(self.padded) + sum(self.padded[:part])

    def slot(self, index: int, part: int) -> np.ndarray:
        at = self.offset(index, part)
        return self.slots[at : at + self.part_bytes[part]]

    def experts(self, pointers: np.ndarray) -> Experts:
        return Experts(*self.types, self.D, self.F, self.part_bytes, pointers, pointers, pointers, layer=0, **self.more)

    def expected(
        self, h: np.ndarray, experts: np.ndarray, weights: np.ndarray, x: np.ndarray, shared: SharedExpert | None = None
    ) -> np.ndarray:
        pointers = np.array([[p.ctypes.data for p in parts] for parts in self.parts], np.uint64)
        fetches = Fetches(np.zeros((E, 3), np.int32), np.zeros(1, np.int32))
        out = x.copy()
        ws, bank = reference.workspace(self.limits, 1), self.experts(pointers)
        reference.expert_ffn(ws, h, experts, weights, bank, fetches, out, shared=shared)
        return out

    def table(self, experts: np.ndarray, resident: dict[int, int], entering: dict[int, int]) -> tuple[Any, Any, Any]:
        """Active table: `resident` experts are read from slots, others from the host; `entering` ones get a slot."""
        chosen = list(dict.fromkeys(int(e) for e in experts.reshape(-1)))
        active = np.zeros((min(E, 32 * A), 8), np.uint64)
        pairs: list[int] = []
        for i, e in enumerate(chosen):
            uses = np.nonzero(experts.reshape(-1) == e)[0]
            for part in range(3):
                if e in resident:
                    active[i, part] = self.device.pointer(self.slot(resident[e], part))
                else:
                    active[i, part] = self.device.pointer(self.home) + self.offset(e, part)
                if e in entering:
                    active[i, 3 + part] = self.device.pointer(self.slot(entering[e], part))
            active[i, 6:].view(np.int32)[:] = [e, len(pairs), len(uses), 0]
            pairs += uses.tolist()
        upload = self.device.upload
        return upload(active), upload(np.array([len(chosen)], np.int32)), upload(np.array(pairs, np.int32))


def shared_expert(types: Types, D: int, F: int, gate: QType | None = None) -> SharedExpert:
    shapes = ((F, D), (F, D), (D, F))
    parts = [matrix(t, *shape, seed=90 + part) for part, (t, shape) in enumerate(zip(types, shapes, strict=True))]
    return SharedExpert(*parts, None if gate is None else matrix(gate, 1, D, seed=93))


def uploaded(device: Any, shared: SharedExpert) -> SharedExpert:
    parts = (getattr(shared, f.name) for f in fields(shared))
    return SharedExpert(*(None if p is None else replace(p, data=device.upload(p.data)) for p in parts))


def choices(T: int, rng: np.random.Generator) -> np.ndarray:
    return np.stack([rng.permutation(E - 1)[:A] for _ in range(T)]).astype(np.int32)


def run(
    bank: Bank, T: int, resident: dict[int, int], entering: dict[int, int], seed: int = 0,
    shared: SharedExpert | None = None,
) -> None:  # fmt: skip
    device = bank.device
    rng = np.random.default_rng(seed)
    for e, slot in resident.items():
        for part in range(3):
            device.write(bank.slot(slot, part), bank.parts[e][part])
    experts = choices(T, rng)
    weights = rng.uniform(0.1, 1, (T, A)).astype(np.float32)
    h, x = normal(T, bank.D, seed=seed + 1), normal(T, bank.D, seed=seed + 2)
    on_device = device.upload(x)
    given = floats = device.upload(h)
    beside = None if shared is None else uploaded(device, shared)
    products = Products(device, bank.limits)
    if bank.types[0] not in FLOAT_TYPES:
        given = products.quantize(given)
    norm = normal(bank.D, seed=seed + 3)
    made = SmallExperts(device, bank.limits, products)(
        given,
        device.upload(experts),
        device.upload(weights),
        bank.experts(device.upload(np.zeros((E, 3), np.uint64))),
        *bank.table(experts, resident, entering),
        on_device,
        beside=None if beside is None else (beside, floats),
        then=(device.upload(norm), EPS),
    )
    expected = bank.expected(h, experts, weights, x, shared)
    check(device.read(on_device), expected)
    fits = bank.D % 32 == 0 and device.max_shared_bytes >= 8 * bank.D
    assert (made is not None) == (T > 1 and beside is None and fits)  # the norm of the sum: one kernel makes both
    if made is not None:
        check_quantized(device, made, arithmetic.rms_norm(expected, norm, EPS))
    for e, slot in entering.items():
        for part in range(3):
            used = np.isin(e, experts)
            found = device.read(bank.slot(slot, part))
            np.testing.assert_array_equal(found, bank.parts[e][part] if used else np.full_like(found, 0xFF))


TYPES: list[Types] = [
    (QType.Q4_K, QType.Q4_K, QType.Q6_K),
    (QType.Q6_K, QType.Q4_K, QType.Q4_K),
    (QType.Q5_K, QType.Q5_K, QType.IQ4_XS),
    (QType.IQ4_XS, QType.Q8_0, QType.Q5_K),
    (QType.Q4_0, QType.Q4_0, QType.Q8_0),
    (QType.Q8_0, QType.Q4_0, QType.Q4_0),
    (QType.F16, QType.BF16, QType.F32),
    (QType.F32, QType.F32, QType.Q8_0),
    (QType.Q8_0, QType.Q8_0, QType.F16),
]


@pytest.mark.slow
@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(t.name for t in types))
def test_all_types(device: Any, types: Types) -> None:
    bank = Bank(device, types, D=256, F=512)
    for T in (1, 5):
        run(bank, T, resident={0: 1, 3: 0}, entering={1: 2, 5: 3}, seed=T)
        device.set_bytes(device.pointer(bank.slots), 0xFF, bank.slots.nbytes)


@pytest.mark.parametrize("T", [1, 2, 9, 32])
def test_tokens(device: Any, T: int) -> None:
    bank = Bank(device, (QType.Q4_0, QType.Q4_0, QType.Q8_0), D=160, F=96)  # ragged blocks, unaligned rows
    run(bank, T, resident={2: 3}, entering={0: 0, 1: 1, 6: 2})


@pytest.mark.parametrize(
    ("types", "D", "F"),
    [((Q3, Q3, Q3), 1280, 768),  # rows of 550 bytes begin at odd words, those of 330 are taken together
     ((K4, Q3, Q8), 256, 32), ((Q3, K4, Q3), 512, 256),  # lanes without blocks
     ((Q3, Q3, K4), 2304, 256)],
)  # fmt: skip
@pytest.mark.parametrize("T", [1, 2])
def test_blocks_that_lanes_share(device: Any, types: Types, D: int, F: int, T: int) -> None:
    run(Bank(device, types, D=D, F=F), T, resident={2: 3}, entering={0: 0, 1: 1})


@pytest.mark.parametrize("T", [1, 3])
def test_ragged_floats(device: Any, T: int) -> None:
    bank = Bank(device, (QType.F32, QType.F32, QType.F16), D=42, F=50)
    run(bank, T, resident={}, entering={0: 0, 1: 1})


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 4])
def test_rows_too_large_for_a_whole_block(device: Any, T: int) -> None:
    bank = Bank(device, (QType.F32, QType.F32, QType.F32), D=5000, F=36)
    run(bank, T, resident={}, entering={})
    types = (QType.F32, QType.F32, QType.F32)
    bank = Bank(device, types, D=36, F=6000)
    run(bank, T, resident={}, entering={})
    run(bank, T, resident={}, entering={}, shared=shared_expert(types, 36, 6000, QType.F16))


def test_rows_of_the_wrong_kind(device: Any) -> None:
    bank = Bank(device, (QType.Q4_0, QType.Q4_0, QType.Q4_0), D=64, F=32)
    experts = choices(1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="quantized rows"):
        SmallExperts(device, bank.limits, Products(device, bank.limits))(
            device.upload(normal(1, 64)),
            device.upload(experts),
            device.upload(np.ones((1, A), np.float32)),
            bank.experts(device.upload(np.zeros((E, 3), np.uint64))),
            *bank.table(experts, {}, {}),
            device.upload(normal(1, 64)),
        )


@pytest.mark.parametrize("down", [QType.Q6_K, QType.Q4_K, QType.Q8_0, QType.IQ4_XS], ids=lambda t: t.name)
def test_columns_that_leave_lanes_without_work(device: Any, down: QType) -> None:
    for F in (768, 1536) if down == QType.Q6_K else (768,):
        bank = Bank(device, (QType.Q8_0, QType.Q8_0, down), D=96, F=F)
        run(bank, 1, resident={}, entering={0: 0})


@pytest.mark.parametrize(
    ("types", "F", "together"),
    [((K4, K6, QType.Q8_0), 512, True), ((K4, K6, QType.F16), 512, False), ((K4, K6, K4), 256, False),
     ((K6, K4, K4), 512, False), ((K4, K6, K4), 512, True)],
)  # fmt: skip
def test_a_shared_expert_is_run_with_the_others_where_it_is_like_them(
    device: Any, types: Types, F: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    D, seen = 256, []
    shared = shared_expert(types, D, F)
    bank = Bank(device, (K4, K6, K6), D, 512)
    experts = bank.experts(device.upload(np.zeros((E, 3), np.uint64)))
    assert runs_beside(shared, experts) == together
    if not together:
        return
    kernel = device.kernel

    def noted(module: Any, name: str) -> Any:
        seen.append((name, dict(module.defines)))
        return kernel(module, name)

    monkeypatch.setattr(device, "kernel", noted)
    run(bank, 1, resident={0: 1}, entering={1: 2}, shared=shared)
    assert [name for name, _ in seen] == ["quantize", "gate_up", "down_one"]
    assert seen[1][1]["BESIDE"] == "1" and seen[2][1]["BESIDE_DOWN"] == types[2].name


def test_an_empty_table_adds_nothing(device: Any) -> None:
    bank = Bank(device, (QType.Q4_0, QType.Q4_0, QType.Q8_0), D=160, F=96)
    active, n_active, pairs = bank.table(np.arange(A, dtype=np.int32)[None], {}, {0: 0})
    device.write(n_active, np.zeros(1, np.int32))
    x = normal(1, 160)
    on_device = device.upload(x)
    products = Products(device, bank.limits)
    SmallExperts(device, bank.limits, products)(
        products.quantize(on_device),
        device.upload(np.zeros((1, A), np.int32)),
        device.upload(np.ones((1, A), np.float32)),
        bank.experts(device.upload(np.zeros((E, 3), np.uint64))),
        active,
        n_active,
        pairs,
        on_device,
    )
    check(device.read(on_device), x)
    assert (device.read(bank.slots) == 0xFF).all()
