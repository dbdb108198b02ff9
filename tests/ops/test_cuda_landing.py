"""Experts that land before their layer asks: who is guessed, what lands, and bits that do not say how much did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats.pregate import Router, Trained, unit
from engine.ops import Experts, Fetches, Gating, reference
from engine.ops.cuda import ops
from engine.ops.cuda.landing import (
    _BUSY,
    _COUNTS,
    _ENTERED,
    _SETS,
    COPIERS,
    FIRST_TARGET,
    SLOTS,
    Landing,
    Scoring,
)
from engine.ops.cuda.products import Products
from engine.placing import guesses, policy
from tests.ops import test_cuda_experts
from tests.ops.test_cuda_experts import A, Bank, Types
from tests.ops.test_cuda_products import LIMITS, check, matrix, normal, upload
from tests.ops.test_cuda_routing import assert_same_state, on_device

L, E, D, F = 5, 20, 256, 96
EPS = 1e-5
K4, Q8, F16 = QType.Q4_K, QType.Q8_0, QType.F16
BEGUN, LANDED, REFUSED = 1, 2, 3


@pytest.fixture(autouse=True)
def many_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_cuda_experts, "E", E)


def halves(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float16)


def scoring(rng: np.random.Generator, choice: str, least: float = -np.inf) -> tuple[Scoring, Callable[[Any], Any]]:
    """What scores a layer's experts, and the same on the host."""
    floats = rng.standard_normal
    weight = (0.2 * halves(rng, E, D)).astype(np.float16)
    if choice in ("sigmoid", "share"):
        bias = (0.1 * floats(E)).astype(np.float32)
        made = Router(weight.astype(np.float32), bias, choice == "share").scores
        return Scoring(weight, least, choice=choice, choice_bias=bias), made
    bias = floats(E).astype(np.float32)
    if choice == "linear":
        return Scoring(weight, least, bias), Trained(weight.astype(np.float32), bias).scores
    hidden, output, c = halves(rng, 11, D), halves(rng, E, 11), floats(11).astype(np.float32)
    whole = Trained(weight.astype(np.float32), bias, hidden.astype(np.float32), c, output.astype(np.float32))
    return Scoring(weight, least, bias, hidden, c, output), whole.scores


class Model:
    """Layers of a workspace on the device that all have the same experts, their twin on the host, and who guesses."""

    def __init__(
        self, device: Any, percent: int, types: Types = (K4, K4, Q8), choice: str = "linear", least: float = -np.inf,
        F: int = F,
    ) -> None:  # fmt: skip
        n = E * percent // 100
        self.device, self.bank, self.rng = device, Bank(device, types, D, F, L * n), np.random.default_rng(percent)
        self.ws = ops.workspace(self.bank.limits, device)
        self.ws.routing.pass_through(self.bank.part_bytes, A)
        host = policy.SlotState.empty((n,) * L, E)
        for e in range(E):
            host.home_ptr[:, e] = [device.pointer(self.bank.home) + self.bank.offset(e, part) for part in range(3)]
        host.expert_ptr[:] = host.home_ptr
        for slot in range(L * n):
            layer, e = slot // n, (3 * (slot // n) + slot % n) % E
            host.slot_ptr[slot] = [device.pointer(self.bank.slot(slot, part)) for part in range(3)]
            for part in range(3):
                device.write(self.bank.slot(slot, part), self.bank.parts[e][part])
            host.expert_ptr[layer, e] = host.slot_ptr[slot]
            host.slot_of[layer, e], host.expert_of[slot] = slot, e
        host.heat[:] = self.rng.integers(0, 1 << 18, host.heat.shape)
        self.host, self.state = host, on_device(device, host)
        self.made = [scoring(self.rng, choice, least) for _ in range(FIRST_TARGET, L)]
        banks = [self.experts(self.state, layer) for layer in range(L)]
        self.landing = Landing(device, self.bank.limits, banks, [s for s, _ in self.made], EPS, self.state)
        self.landing.at_once = False  # each layer has a residual of its own here
        self.landing.memory[:] = 0xFF if device.name == "emulated" else self.landing.memory[:]
        self.ws.guess_misses(self.landing)
        self.wanted: dict[int, list[int]] = {}  # of the last step, by layer

    def experts(self, state: policy.SlotState, layer: int) -> Experts:
        pointers = (state.expert_ptr[layer], state.home_ptr[layer], state.slot_ptr)
        return Experts(*self.bank.types, D, self.bank.F, self.bank.part_bytes, *pointers, layer=layer)

    def step(self, T: int = 1, between: Callable[[int], None] = lambda layer: None, active: Any = None) -> None:
        """A step of T tokens, in which all layers are compared; between: called when a layer's guesses are made."""
        device, rng, ws, state = self.device, self.rng, self.ws, self.state
        ws.active_step = active
        for layer in range(L):
            entering = device.upload(normal(T, D, seed=int(rng.integers(1 << 30))))
            if layer + 1 < L:
                target = layer + 1
                ops.fetch_ahead(ws, entering, state, self.experts(state, target))
                if T == 1 and target >= FIRST_TARGET:
                    scores = self.made[target - FIRST_TARGET][1](unit(device.read(entering), EPS))
                    margins = guesses.margins(scores, A)
                    least = self.made[target - FIRST_TARGET][0].least_margin
                    chances = np.where(margins > least, 1.0 / (1.0 + np.exp(-margins)), 0.0)
                    self.wanted[target] = guesses.ranked(chances, self.host.slot_of[target] >= 0, SLOTS)[0].tolist()
                between(target)
            self._layer(layer, T, active is not None)
        ws.join()
        ws.active_step = None

    def _layer(self, layer: int, T: int, is_noop: bool) -> None:
        device, rng = self.device, self.rng
        logits = rng.standard_normal((T, E)).astype(np.float32)
        h, x = normal(T, D, seed=int(rng.integers(1 << 30))), normal(T, D, seed=5)
        counted = np.ones(T, np.uint8)
        want, want_weights = np.zeros((T, A), np.int32), np.zeros((T, A), np.float32)
        made = (want, want_weights, Fetches(np.zeros((E, 3), np.int32), np.zeros(1, np.int32)))
        if not is_noop:
            arguments = (logits, Gating(), self.host, self.experts(self.host, layer), counted, policy.DEFAULT, *made)
            reference.route(None, *arguments)  # type: ignore[arg-type]
        experts, weights = device.empty((T, A), np.int32), device.empty((T, A), np.float32)
        fetches = Fetches(device.empty((E, 3), np.int32), device.empty(1, np.int32))
        on_it, bank = device.upload(x), self.experts(self.state, layer)
        ws = self.ws
        ws.routing.joins = not ws.routing.joins and not is_noop  # made where the experts are read in every other layer
        device.write(ws.routing.settled, np.zeros(1, np.uint64))  # as `router` does
        ops.route(
            self.ws, device.upload(logits), Gating(), self.state, bank, device.upload(counted), policy.DEFAULT, experts,
            weights, fetches,
        )  # fmt: skip
        if is_noop:
            return
        ops.expert_ffn(self.ws, device.upload(h), experts, weights, bank, fetches, on_it)
        assert_same_state(device, self.state, self.host)
        check(device.read(on_it), self.bank.expected(h, want, want_weights, x))

    def set_of(self, layer: int) -> Any:
        return self.landing._set(layer)

    def tags(self, layer: int) -> list[int]:
        """Experts that the words of a layer's set name; -1: none."""
        tags = self.device.read(self.set_of(layer))[1 : 1 + SLOTS].tolist()
        assert all(tag == 0 or tag >> 10 & 0x3FFF == layer for tag in tags)
        return [(tag & 1023) if tag else -1 for tag in tags]


@pytest.mark.parametrize("choice", ["linear", "mlp", "sigmoid", "share"])
def test_the_likeliest_that_are_away_land(device: Any, choice: str) -> None:
    model, seen = Model(device, 40, choice=choice), []

    def between(layer: int) -> None:
        if layer < FIRST_TARGET:
            return
        device.synchronize()
        assert model.tags(layer) == model.wanted[layer]
        seen.append(layer)
        memory = device.read(model.landing.memory[layer % 2]).reshape(SLOTS, -1)
        starts = (0, model.landing._up_at, model.landing._down_at)
        for slot, expert in enumerate(model.wanted[layer]):
            for part in range(3) if expert >= 0 else ():
                lies = memory[slot][starts[part] :][: model.bank.part_bytes[part]]
                assert (lies == model.bank.parts[expert][part]).all(), (layer, slot, part)

    for _ in range(2):
        model.step(between=between)
    assert seen == [*range(FIRST_TARGET, L)] * 2
    counts = model.landing.counts()
    assert counts.made == 2 * (L - FIRST_TARGET) * SLOTS and 0 < counts.useful < counts.misses
    assert counts.brought_bytes == counts.made * sum(model.bank.part_bytes)
    assert counts.taken_bytes == counts.useful * sum(model.bank.part_bytes)
    assert counts.timed.with_ == 2 and counts.timed.without == 0 < counts.timed.with_ns


def test_what_is_not_likely_enough_stays(device: Any) -> None:
    model = Model(device, 30, least=0.5)
    fewer = []
    for _ in range(3):
        model.step(between=lambda layer: fewer.append(model.wanted.get(layer, []).count(-1)))
    assert sum(fewer) > 0 and 0 < model.landing.counts().made < 3 * SLOTS * (L - FIRST_TARGET)


@pytest.mark.slow
@pytest.mark.parametrize("percent", [10, 30, 60])
@pytest.mark.parametrize("types", [(K4, K4, Q8), (Q8, K4, F16), (F16, F16, F16)], ids=["blocks", "mixed", "floats"])
def test_bits_do_not_say_how_much_landed(device: Any, percent: int, types: Types) -> None:
    """Units that did not begin, that somebody else's bytes lie in, that an expert of another step has."""
    model = Model(device, percent, types, F=80 if types[2] == F16 else F)
    n_units = COPIERS + -(-model.bank.F // 32)

    def between(layer: int) -> None:
        if layer < FIRST_TARGET or n_tokens > 1 or device.name != "emulated":
            return  # a GPU has its own ways of being late
        words, rng = model.set_of(layer), model.rng
        units = words[1 + SLOTS :][: SLOTS * model.landing._most_units].reshape(SLOTS, -1)
        gate, up, down = model.bank.part_bytes
        share = -(-down // (16 * COPIERS)) * 16
        for slot, tag in enumerate(np.array(words[1 : 1 + SLOTS])):
            memory = model.landing.memory[layer % 2].reshape(SLOTS, -1)[slot]
            for unit_ in range(n_units if tag else 0):
                assert units[slot, unit_] == tag * 4 + LANDED
                kind = rng.integers(4)
                if kind == 0:
                    continue
                other = int(tag) + (1 if kind == 2 else -(1 << 24))  # another expert, the step before
                units[slot, unit_] = 0 if kind == 1 else other * 4 + (LANDED if rng.integers(2) else BEGUN)
                if unit_ < COPIERS:
                    at = model.landing._down_at + unit_ * share
                    memory[at : at + min(share, max(0, down - unit_ * share))] = 0xFF
                else:
                    for start, size in ((0, gate), (model.landing._up_at, up)):
                        rows = 32 * size // model.bank.F
                        begin = (unit_ - COPIERS) * rows
                        memory[start + begin : start + min(size, begin + rows)] = 0xFF

    for n_tokens in (1, 1, 1, 1, 3, 1):
        model.step(n_tokens, between)
    counts = model.landing.counts()
    assert counts.useful > 0 and counts.taken_bytes > 0
    if device.name == "emulated":
        assert counts.taken_bytes < counts.useful * sum(model.bank.part_bytes)


def test_a_layer_that_has_routed_ends_what_it_does_not_miss(device: Any) -> None:
    """Guesses that come late bring nothing; those of no-ops and of steps without guesses do not begin."""
    model = Model(device, 30)
    model.step()
    landing, layer = model.landing, FIRST_TARGET
    entering, bank = device.upload(normal(1, D, seed=3)), model.experts(model.state, layer)
    before = landing.counts()
    model.ws.active_step = device.upload(np.zeros(1, np.int32))
    words = device.read(landing.words)
    ops.fetch_ahead(model.ws, entering, model.state, bank)
    model.ws.join()
    assert (device.read(landing.words) == words).all()
    model.ws.active_step = None
    model.ws.guess_misses(landing, with_guesses=False)
    for _ in range(2):
        model.step()
    model.ws.guess_misses(landing)
    assert landing.counts().made == before.made and landing.counts().timed.without == 2
    step = int(device.read(landing.words)[0])
    device.write(model.set_of(layer)[:1], np.array([step << 14 | layer], np.uint64))
    words = device.read(landing.words)[: _SETS - 32]  # behind them is how far blocks are
    ops.fetch_ahead(model.ws, entering, model.state, bank)
    model.ws.join()
    assert (device.read(landing.words)[: _SETS - 32] == words).all()
    model.step()


@pytest.mark.slow
def test_steps_without_guesses_are_timed_too(device: Any) -> None:
    """In any order; what they leave in words that guesses go by does not matter to the next."""
    model, n = Model(device, 60), [0, 0]
    for with_guesses in (True, False, False, True, True, False, True):
        before = model.landing.counts()
        model.ws.guess_misses(model.landing, with_guesses)
        model.step()
        n[with_guesses] += 1
        after = model.landing.counts()
        assert (after.timed.without, after.timed.with_) == tuple(n)
        assert (after.made > before.made) == with_guesses
        if not with_guesses:  # but for what the last layer took of the step before, which is told now
            same = {"timed": before.timed, "taken_bytes": before.taken_bytes}
            assert replace(after, **same) == before and after.timed.with_ns == before.timed.with_ns
    assert after.timed.without_ns > 0 < after.timed.with_ns and after.useful > 0


@pytest.mark.slow
def test_another_models_tables_are_left_alone(device: Any) -> None:
    """As a block's, which drafts: its layers have these numbers, too."""
    model = Model(device, 10)
    own = model.state
    model.state = replace(own, slot_of=device.upload(model.host.slot_of))
    words = device.read(model.landing.words)
    model.host.slot_of[0], model.host.expert_of[:2] = -1, -1  # not even that of expert 0
    model.host.expert_ptr[0] = model.host.home_ptr[0]
    for name in ("slot_of", "expert_of", "expert_ptr"):
        device.write(getattr(model.state, name), getattr(model.host, name))
    while not model.host.counts[0, 0]:
        model.step()
    now = device.read(model.landing.words)
    now[_BUSY] = words[_BUSY]  # of the layer before, until the next one routes
    assert (now == words).all()


def test_shapes_that_the_kernels_do_not_take(device: Any) -> None:
    model = Model(device, 30)
    s, banks = model.made[0][0], [model.experts(model.state, layer) for layer in range(FIRST_TARGET + 1)]
    for wrong in (replace(s, weight=s.weight[:, :-8]), replace(s, weight=s.weight[:-1])):
        with pytest.raises(ValueError, match=f"guesses: {E} experts, {D} columns"):
            Landing(device, model.bank.limits, banks, [wrong], EPS, model.state)
    with pytest.raises(ValueError, match=f"1 of {L} layers"):
        Landing(device, model.bank.limits, [*banks, *banks][:L], [s], EPS, model.state)
    assert _SETS >= 5 + 9 + 32


def test_one_launch_guesses_for_all_layers_that_are_told_of(device: Any) -> None:
    """By one residual here, all of it there already; a layer that has been routed is passed over."""
    model = Model(device, 30)
    landing, entering = model.landing, normal(1, D, seed=3)
    x = device.upload(entering)
    model.step()
    step, before = int(device.read(landing.words)[0]), landing.counts()
    landing.at_once, landing.n_blocks = True, 1
    device.write(landing.words[_ENTERED : _ENTERED + 1], np.array([step << 14 | L - 1], np.uint64))
    for layer in (FIRST_TARGET, FIRST_TARGET + 1):  # of each set
        device.write(model.set_of(layer)[:1], np.array([step << 14 | FIRST_TARGET], np.uint64))
    landing.ahead(x, model.state, FIRST_TARGET, None)
    assert landing.entered() == ()
    landing.join()
    for layer in (L - 2, L - 1):
        margins = guesses.margins(model.made[layer - FIRST_TARGET][1](unit(entering, EPS)), A)
        chances = 1.0 / (1.0 + np.exp(-margins))
        assert model.tags(layer) == guesses.ranked(chances, model.host.slot_of[layer] >= 0, SLOTS)[0].tolist()
    made = int(device.read(landing.words)[_COUNTS]) - before.made
    assert made == (L - 1 - FIRST_TARGET) * SLOTS  # the first one had been routed
    landing.ahead(x, model.state, FIRST_TARGET + 1, None)
    assert landing.entered()[1:] == (FIRST_TARGET + 1,) and landing.entered() == ()


def test_what_is_no_number_is_no_guess(device: Any) -> None:
    model = Model(device, 30)
    model.step()
    made = model.landing.counts(wait=True).made
    x = device.upload(np.full((1, D), np.nan, np.float32))
    device.write(model.set_of(FIRST_TARGET)[:1], np.zeros(1, np.uint64))  # as if it had not been routed
    model.landing.ahead(x, model.state, FIRST_TARGET, None)
    model.landing.join()
    assert model.landing.counts(wait=True).made == made


def test_a_product_says_that_its_input_is_there(device: Any) -> None:
    products, w = Products(device, LIMITS), upload(device, matrix(K4, 40, D, seed=6))
    x, norm = device.upload(normal(1, D, seed=7)), device.upload(normal(1, D, seed=8)[0])
    plain, y, h = (device.empty((1, n), np.float32) for n in (40, 40, D))
    words = device.upload(np.array([9] + [0] * _SETS, np.uint64))
    products.norm_several(x, norm, EPS, (w,), (plain,), h)
    assert int(device.read(words)[_ENTERED]) == 0
    products.norm_several(x, norm, EPS, (w,), (y,), h, None, (words, 3))
    assert int(device.read(words)[_ENTERED]) == 9 << 14 | 3
    assert (device.read(y) == device.read(plain)).all()
