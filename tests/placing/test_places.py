"""Requests at a time: as many as there is room for beside the experts, and a refusal that names how many fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.full_shape import SHAPES
from engine.formats.gguf import open_header
from engine.ground.config import MAX_PARALLEL, EngineConfig
from engine.ground.errors import CapacityError, UsageError
from engine.ops import SMALL_TOKENS
from engine.ops.cuda.counting import CountingDevice
from engine.placing import plan
from engine.running import dryrun
from engine.running.forward import GRAPH_TOKENS
from engine.serving.scheduler import Engine
from tests import published_headers
from tests.engine_runs import config
from tests.tiny_models import k_quant_mix, write_tiny

GIB = 1 << 30
ARCH, CONFIG = SHAPES["qwen3.6-35b-a3b"]  # three of four layers are recurrent, with 63 MiB of state a request


def test_the_longest_shared_step_has_independent_rows() -> None:
    assert MAX_PARALLEL == SMALL_TOKENS == max(GRAPH_TOKENS)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, MAX_PARALLEL), st.integers(0, 9))
def test_the_default_takes_little_of_the_experts_memory(room: int, experts: int, most: int, each: int) -> None:
    """More than four take a small part, or what the experts leave; one is always tried, at the end."""
    tries = plan.places(room, experts, most, lambda n: each * (n - 1))
    assert tries == sorted(tries, reverse=True) and tries[-1] == 1
    assert tries[0] <= min(most, 16)
    spare = max(room // 32, room - experts)
    assert tries[0] <= 4 or each * (tries[0] - 1) <= spare
    assert tries[0] >= min(most, 4)
    larger = [n for n in (most, *plan.PLACES) if tries[0] < n <= min(most, 16)]
    assert all(each * (n - 1) > spare for n in larger)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a published file of these shapes, with nothing behind them."""
    folder = tmp_path_factory.mktemp("plan")
    with open_header(published_headers.write(folder, "Qwen3.6-35B-A3B-Q4_K_M", n_vocab=400)[0]) as file:
        return ARCH.load(file, CONFIG)


def decide(weights: Any, vram_gib: float, **options: Any) -> dryrun.Decision:
    asked = EngineConfig(Path("m"), **{"device": "cuda", "policy": "spark"} | options)
    like = CountingDevice("sm_90", 132, 227 << 10)
    sharing = dryrun.Sharing(asked, ARCH, CONFIG, weights, 32768, None, like)
    return sharing.decide(cap_bytes=plan.cap_bytes(vram_gib), context_bytes=plan.CONTEXT_BYTES)


@pytest.mark.slow
def test_a_model_with_recurrent_layers_on_common_cards(weights: Any) -> None:
    """A small card keeps its slots; one that holds all experts has room for sixteen."""
    state_bytes = CONFIG.delta.state_bytes
    for vram, places in ((12, 4), (16, 4), (20, 8), (24, 16)):
        made, one = decide(weights, vram), decide(weights, vram, parallel=1)
        assert made.limits.places == places
        # One request has two states: the one it decodes in and the one a refused draft goes back to.
        assert made.plan.fixed.kv_bytes - one.plan.fixed.kv_bytes == (places - 2) * state_bytes
        lost = one.plan.share.slots_bytes - made.plan.share.slots_bytes
        assert lost <= one.plan.share.slots_bytes / 30
        assert f"{places} requests at a time" in " ".join(made.reasons)
        assert made.limits.max_sequences == places


@pytest.mark.slow
def test_what_was_asked_for_is_had(weights: Any) -> None:
    made = decide(weights, 12, parallel=16)
    assert (made.limits.places, made.limits.max_sequences) == (16, 16)
    assert made.plan.device_bytes <= 12 * GIB
    made = decide(weights, 12, parallel=5)
    assert (made.limits.places, made.limits.max_sequences) == (5, 8)
    assert "5 requests at a time: asked for" in " ".join(made.reasons)


@pytest.mark.slow
def test_a_refusal_names_how_many_fit(weights: Any) -> None:
    assert decide(weights, 5.5).limits.places == 4
    assert decide(weights, 4.7).limits.places == 2  # the default gets smaller
    with pytest.raises(CapacityError, match="32 requests at a time take") as refused:
        decide(weights, 5.0, parallel=32)
    named = re.search(r"--parallel (\d+) fits", refused.value.hint)
    assert named
    n = int(named[1])
    assert decide(weights, 5.0, parallel=n).limits.places == n
    with pytest.raises(CapacityError):
        decide(weights, 5.0, parallel=n + 1)
    with pytest.raises(CapacityError) as refused:  # and where not even one does, the rest is the reason
        decide(weights, 3.5, parallel=4)
    assert "--parallel" not in refused.value.hint


@pytest.mark.parametrize(("options", "most"), [({"chunk_tokens": 8}, 8), ({"parallel": 33}, 32)])
def test_a_step_has_a_token_of_each(weights: Any, options: dict[str, Any], most: int) -> None:
    with pytest.raises(UsageError, match=f"expected 1 to {most}"):
        decide(weights, 24, **{"parallel": 16} | options)
    if "parallel" not in options:
        assert decide(weights, 24, **options).limits.places == most


def test_on_the_host_there_are_sixteen(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", k_quant_mix, n_layer=2)
    for options, places in (({}, 16), ({"parallel": 3}, 3), ({"chunk_tokens": 5}, 5)):
        engine = Engine(config(path, device="cpu", **options))
        ready = engine.ready()
        assert ready["parallel"] == places
        assert any(reason.startswith(f"{places} requests at a time") for reason in ready["reasons"])
        engine.close()
    with pytest.raises(UsageError, match="--parallel 9"):
        Engine(config(path, device="cpu", parallel=9, chunk_tokens=5))
