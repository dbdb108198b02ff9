"""Sequences of real models that are moved to host memory and back: they go on with the bits of one that stayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine import models
from engine.memory.blocks import Sequence
from engine.memory.swap import swap_in, swap_out
from engine.running.loaded import Loaded, load
from engine.running.stepping import Span
from tests.engine_runs import config
from tests.tiny_models import k_quant_mix, write_tiny

CHUNK = 32  # steps as short as these take the fewest kernels
# Two of a kind of layer with memory of its own, where there may be, and no more than emulation has time for.
SMALLER = {
    "qwen3moe": {"n_layer": 2, "n_expert_used": 3},
    "qwen35moe": {"n_layer": 3, "n_expert_used": 2},  # recurrent, recurrent, attention
    "laguna": {},
}
TOKENS = np.random.default_rng(12).integers(0, 301, 2 * CHUNK + 9).astype(np.int32)


def feed(loaded: Loaded, sequence: Sequence, tokens: np.ndarray) -> np.ndarray:
    """The logits of a step."""
    result = loaded.steps.run([Span(sequence, tokens, np.zeros(len(tokens), bool), (len(tokens) - 1,))])
    return result.logits.copy()


def check_that_it_comes_back(loaded: Loaded, prompt: int) -> None:
    """In the middle of decoding a sequence goes and comes back; one that shares its blocks stays."""
    kv = loaded.kv
    goes, stays = kv.sequence(), kv.sequence()
    for start in range(0, prompt, CHUNK):
        feed(loaded, goes, TOKENS[start : min(start + CHUNK, prompt)])
    feed(loaded, goes, TOKENS[1:2])
    fork = kv.fork(goes)
    kv.begin(stays, fork.length, fork.shared, fork.snapshot, fork.rest)
    kv.drop(fork)
    held = [[*blocks.held] for blocks in goes.groups]
    swapped = swap_out(kv, goes)
    assert swapped is not None and kv.host.bytes_by_kind()["sequences"] == swapped.nbytes > 0
    other = kv.sequence()  # what is in its blocks now is another's
    feed(loaded, other, TOKENS[::-1][:CHUNK])
    back = kv.sequence()
    swap_in(kv, back, swapped)
    assert back.length == prompt + 1 and [blocks.held for blocks in back.groups] != held
    other.release()
    for part in (TOKENS[:1], TOKENS[: CHUNK - 3]):
        assert np.array_equal(feed(loaded, stays, part), feed(loaded, back, part))
    stays.release()
    back.release()
    assert kv.free_blocks == kv.n_blocks and kv.host.n_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", models.known())
def test_a_model_goes_on_with_the_same_bits(arch: str, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", k_quant_mix, arch=models.find(arch))
    loaded = load(config(model, device="cpu", ctx_tokens=600, chunk_tokens=CHUNK))
    check_that_it_comes_back(loaded, 2 * CHUNK + 6)
    loaded.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("arch", ["qwen3moe", pytest.param("laguna", marks=pytest.mark.on_a_gpu), "qwen35moe"])
def test_a_device_goes_on_with_the_same_bits(arch: str, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", k_quant_mix, arch=models.find(arch), **SMALLER[arch])
    loaded = load(config(model, ctx_tokens=600, chunk_tokens=CHUNK))
    check_that_it_comes_back(loaded, 2 * CHUNK + 6)
    loaded.close()
