"""Reused prefixes on a device: blocks and states are copied to host memory and back, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine import models
from engine.ops.cuda import flash
from engine.running import loaded as loaded_model
from engine.running.loaded import Loaded, load
from engine.running.stepping import Span
from tests.engine_runs import config
from tests.tiny_models import k_quant_mix, write_tiny

CHUNK = 64
TOKENS = np.random.default_rng(8).integers(0, 301, 2 * CHUNK + 9).astype(np.int32)
pytestmark = [pytest.mark.usefixtures("on_the_device"), pytest.mark.slow]


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe"])
def test_a_prompt_goes_on_within_a_step_with_the_bits_of_a_whole_one(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (flash, loaded_model):
        monkeypatch.setattr(module, "PIECE_TOKENS", CHUNK)
    model = write_tiny(tmp_path / "tiny.gguf", k_quant_mix, arch=models.find(arch), n_layer=3, n_expert_used=3)
    loaded = load(config(model, ctx_tokens=300, chunk_tokens=3 * CHUNK))
    long = np.concatenate([TOKENS, TOKENS[::-1]])[: 3 * CHUNK + 50]
    expected = serve(loaded, 0, long)
    if arch == "qwen3moe":  # one step of 192 tokens, one of 50
        alone = load(config(model, ctx_tokens=300, chunk_tokens=3 * CHUNK))
        assert np.array_equal(serve(alone, 0, long, steps=[192, 50]), expected)
        alone.close()
    assert np.array_equal(serve(loaded, 3 * CHUNK, long), expected)
    loaded.prefixes.clear()
    serve(loaded, 0, long[: 2 * CHUNK + 40])
    assert np.array_equal(serve(loaded, 2 * CHUNK, long), expected)
    loaded.close()


@pytest.mark.parametrize("arch", ["qwen3moe"])
def test_a_reused_prefix_has_the_bits_of_a_computed_one(arch: str, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", k_quant_mix, arch=models.find(arch), n_layer=2, n_expert_used=3)
    loaded = load(config(model, ctx_tokens=200, chunk_tokens=CHUNK, cache_dir=tmp_path / "cache"))
    expected = serve(loaded, 0)
    assert np.array_equal(serve(loaded, 2 * CHUNK), expected)
    while loaded.prefixes.reclaim():
        pass
    assert loaded.kv.free_blocks == loaded.kv.n_blocks and loaded.prefixes.stats()["host_chunks"] == 2
    taken = loaded.kv.pools[0].take()  # other blocks than before
    assert np.array_equal(serve(loaded, 2 * CHUNK), expected)
    loaded.kv.pools[0].give_back([taken])
    loaded.close()
    loaded = load(config(model, ctx_tokens=200, chunk_tokens=CHUNK, cache_dir=tmp_path / "cache"))
    assert np.array_equal(serve(loaded, 2 * CHUNK), expected)
    loaded.close()


def serve(loaded: Loaded, reused: int, tokens: np.ndarray = TOKENS, steps: list[int] | None = None) -> np.ndarray:
    """The last logits of a prompt, of which so much is reused; steps: how many tokens each has, if it is known."""
    sequence, length = loaded.resume(tokens)
    assert length == reused
    lengths = []
    while sequence.length < len(tokens):
        part = tokens[sequence.length :][: loaded.prefixes.step_tokens(sequence, tokens)]
        lengths.append(len(part))
        last = tuple(range(max(0, len(part) - 9), len(part)))
        result = loaded.steps.run([Span(sequence, part, np.zeros(len(part), bool), last)])
        loaded.prefixes.insert(sequence, tokens)
    assert steps is None or lengths == steps
    logits = result.logits.copy()
    sequence.release()
    return logits
