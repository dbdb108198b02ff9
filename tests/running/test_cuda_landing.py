"""A whole model on a device to which missed experts are brought before they are asked for: its tokens do not say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.formats.pregate import default_path
from engine.ground.sampling import Sampling
from engine.ops.cuda.landing import FIRST_TARGET, Counts
from engine.placing.guesses import Timed
from engine.running.landing import Guesses
from engine.serving.scheduler import Engine
from tests.engine_runs import PROMPT, config, generate
from tests.tiny_models import k_quant_mix, tiny_path

N_TOKENS = 9
SAMPLED = Sampling(temperature=0.9, top_p=0.9, seed=5)
on_the_device = pytest.mark.usefixtures("on_the_device")


def opened(model: Path, guess: str = "on", **options: Any) -> Engine:
    more = {"policy": "spark", "residency_pct": 40, "prefix_gib": 0.0, "draft": "off"} | options
    return Engine(config(model, guess=guess, **more))


def guesses_of(engine: Engine) -> Guesses:
    found = engine.loaded.steps.guesses
    assert found is not None
    return found


def said_by(engine: Engine, *lengths: int, n_tokens: int = N_TOKENS) -> list[list[int]]:
    """Of prompts of so many tokens."""
    return [
        generate(engine, tuple(PROMPT[:n].tolist()), sampling=SAMPLED, max_tokens=n_tokens)[0] for n in lengths or (9,)
    ]


@on_the_device
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3moe", "laguna", "gemma4", "qwen35moe"])
def test_tokens_do_not_say_what_was_guessed(arch: str) -> None:
    plain = opened(tiny_path(arch), "off")
    assert plain.ready()["guess"] == "off" and plain.stats()["guesses"] == {}
    expected = said_by(plain, 41, 9)  # the first prompt ends in a step of one token
    before = plain.stats()
    plain.close()
    engine = opened(tiny_path(arch))
    assert engine.ready()["guess"] == "on"
    assert any("guesses: in every step, by each layer's router" in reason for reason in engine.ready()["reasons"])
    assert said_by(engine, 41, 9) == expected
    after = engine.stats()
    assert after["hits_by_layer"] == before["hits_by_layer"]
    assert after["misses_by_layer"] == before["misses_by_layer"]
    decision, device = engine.loaded.shares.decision, engine.loaded.backend.gpu
    launched = {(module, name) for module, name in vars(device)["_kernels"] if name != "poison"}
    assert decision is not None and launched <= set(decision.kernels)  # all of them were planned
    found = after["guesses"]
    print(found)
    engine.close()
