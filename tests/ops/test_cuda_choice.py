"""The choice of few tokens by a block of the kernel that reads the experts: as if a kernel ahead of it had made it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.ops import Fetches, Gating
from engine.ops.cuda import ops
from engine.ops.cuda.device import Module
from engine.ops.cuda.routing import JOIN_TOKENS, Choice
from engine.placing import policy
from tests.ops import test_cuda_experts
from tests.ops.test_cuda_cpu_experts import Layer
from tests.ops.test_cuda_experts import A, shared_expert
from tests.ops.test_cuda_products import normal
from tests.ops.test_cuda_routing import assert_same_state

E = 20
K4, Q8, F16 = QType.Q4_K, QType.Q8_0, QType.F16
BIAS, SCALE = (np.random.default_rng(seed).standard_normal(E).astype(np.float32) for seed in (1, 2))
GATINGS = {
    "softmax": Gating(),
    "of all": Gating(renormalize=False),
    "sigmoid": Gating("sigmoid", scale=2.5, bias=BIAS),
    "scaled": Gating(expert_scale=SCALE),
    "biased": Gating(bias=BIAS),
}


@pytest.fixture(autouse=True)
def many_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_cuda_experts, "E", E)


@pytest.fixture
def backwards(device: Any) -> Iterator[None]:
    """The block that settles runs last on the emulator, so that all others choose by themselves or wait forever."""
    device.backwards = True
    yield
    device.backwards = False


def joined(device: Any, percent: int) -> Layer:
    layer = Layer(device, percent)
    layer.joins = True
    return layer


@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("gating", GATINGS)
def test_all_choose_what_is_resident_before_it_is_settled(device: Any, backwards: None, gating: str, T: int) -> None:
    layer = joined(device, 100)
    for _ in range(2):
        layer.step(T, gating=GATINGS[gating])


@pytest.mark.parametrize("T", range(1, JOIN_TOKENS + 2))
@pytest.mark.parametrize("percent", [40, 90, 100])
@pytest.mark.parametrize("with_shared", [False, True])
def test_what_misses_is_read_when_it_is_settled(device: Any, percent: int, with_shared: bool, T: int) -> None:
    layer = joined(device, percent)
    shared = shared_expert((K4, K4, Q8), layer.bank.D, layer.bank.F, F16) if with_shared else None
    for _ in range(3):
        layer.step(T, shared=shared)


def test_the_choice_has_no_launch_of_its_own(device: Any) -> None:
    layer, launched = joined(device, 100), []
    kernel = device.kernel
    device.kernel = lambda module, name: launched.append(name) or kernel(module, name)
    try:
        for T in (1, JOIN_TOKENS, JOIN_TOKENS + 1):
            layer.step(T)
    finally:
        device.kernel = kernel
    assert [name for name in launched if name in ("route", "gate_up", "gate_up_several")] == [
        "gate_up", "gate_up_several", "route", "gate_up_several",
    ]  # fmt: skip


def routed(layer: Layer, T: int, joins: bool = True, **more: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a step of `layer` chooses, weighs and makes of rows of zeros."""
    device, D = layer.device, layer.bank.D
    device.write(layer.ws.routing.settled, np.zeros(1, np.uint64))
    layer.ws.routing.joins = joins
    experts, weights = device.upload(np.full((T, A), -1, np.int32)), device.empty((T, A), np.float32)
    fetches = Fetches(device.empty((E, 3), np.int32), device.empty(1, np.int32))
    x, bank = device.upload(np.zeros((T, D), np.float32)), layer.experts(layer.state)
    logits, counted = device.upload(normal(T, E, seed=3)), device.upload(np.ones(T, np.uint8))
    layer.ws.routing.route(
        logits, Gating(), layer.state, 0, counted, policy.DEFAULT, experts, weights, fetches, may_join=True, **more
    )  # fmt: skip
    ops.expert_ffn(layer.ws, device.upload(normal(T, D, seed=4)), experts, weights, bank, fetches, x)
    return device.read(experts), device.read(weights), device.read(x)


@pytest.mark.parametrize("T", [1, 2])
def test_imposed_experts_are_read(device: Any, backwards: None, T: int) -> None:
    imposed = np.stack([np.arange(7 + t, 7 + t - A, -1) for t in range(T)]).astype(np.int32)
    layer = joined(device, 100)
    experts, _, x = routed(layer, T, imposed=device.upload(imposed))
    assert (experts == imposed).all()
    apart = routed(Layer(device, 100), T, joins=False, imposed=device.upload(imposed))
    assert (apart[2] == x).all() and x.any()


@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("percent", [40, 100])
def test_a_step_after_the_end_does_nothing(device: Any, percent: int, T: int) -> None:
    layer = joined(device, percent)
    experts, _, x = routed(layer, T, active_step=device.upload(np.zeros(1, np.int32)))
    assert (experts == -1).all() and not x.any()
    assert_same_state(device, layer.state, layer.host)
    assert int(device.read(layer.ws.routing.n_active)[0]) == 0


def test_a_choice_that_nobody_takes_is_an_error(device: Any) -> None:
    layer = joined(device, 100)
    routing, logits = layer.ws.routing, device.upload(normal(1, E, seed=3))
    routing.joins = True
    experts, weights = device.empty((1, A), np.int32), device.empty((1, A), np.float32)
    fetches = Fetches(device.empty((E, 3), np.int32), device.empty(1, np.int32))
    args = (logits, Gating(), layer.state, 0, device.upload(np.ones(1, np.uint8)), policy.DEFAULT)
    routing.route(*args, experts, weights, fetches, may_join=True)
    with pytest.raises(AssertionError, match="nobody has taken"):
        routing.route(*args, experts, weights, fetches)
    layer.ws.forget()  # the next step begins
    routing.route(*args, experts, weights, fetches)
    assert int(device.read(routing.n_active)[0]) == A and routing.take() is None


@pytest.mark.parametrize(("n_tokens", "n_expert", "n_used", "least"), [(1, 5, 3, 32), (2, 5, 3, 64), (1, 77, 3, 77)])
def test_a_block_that_chooses_has_a_thread_an_expert_and_a_warp_a_token(
    n_tokens: int, n_expert: int, n_used: int, least: int
) -> None:
    choice = Choice(None, Module("route.cu", ()), 0, (), None, n_tokens, n_expert, n_used)  # type: ignore[arg-type]
    assert choice.fits(least) and not choice.fits(least - 1)
