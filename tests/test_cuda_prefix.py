"""Reused prefixes on a device: blocks and states are copied to host memory and back, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_runs import config
from tiny_models import k_quant_mix, write_tiny

import engine.runner
from engine import models
from engine.ops.cuda import flash
from engine.runner import Runner, Span

CHUNK = 64
TOKENS = np.random.default_rng(8).integers(0, 301, 2 * CHUNK + 9).astype(np.int32)
pytestmark = [pytest.mark.usefixtures("on_the_device"), pytest.mark.slow]


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe"])
def test_a_prompt_goes_on_within_a_step_with_the_bits_of_a_whole_one(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (flash, engine.runner):
        monkeypatch.setattr(module, "PIECE_TOKENS", CHUNK)
    model = write_tiny(tmp_path / "tiny.gguf", k_quant_mix, arch=models.find(arch), n_layer=3, n_expert_used=3)
    runner = Runner(config(model, ctx_tokens=300, chunk_tokens=3 * CHUNK))
    long = np.concatenate([TOKENS, TOKENS[::-1]])[: 3 * CHUNK + 50]
    expected = serve(runner, 0, long)
    if arch == "qwen3moe":  # one step of 192 tokens, one of 50
        alone = Runner(config(model, ctx_tokens=300, chunk_tokens=3 * CHUNK))
        assert np.array_equal(serve(alone, 0, long, steps=[192, 50]), expected)
        alone.close()
    assert np.array_equal(serve(runner, 3 * CHUNK, long), expected)
    runner.prefixes.clear()
    serve(runner, 0, long[: 2 * CHUNK + 40])
    assert np.array_equal(serve(runner, 2 * CHUNK, long), expected)
    runner.close()


@pytest.mark.parametrize("arch", ["qwen3moe"])
def test_a_reused_prefix_has_the_bits_of_a_computed_one(arch: str, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", k_quant_mix, arch=models.find(arch), n_layer=2, n_expert_used=3)
    runner = Runner(config(model, ctx_tokens=200, chunk_tokens=CHUNK, cache_dir=tmp_path / "cache"))
    expected = serve(runner, 0)
    assert np.array_equal(serve(runner, 2 * CHUNK), expected)
    while runner.prefixes.reclaim():
        pass
    assert runner.kv.free_blocks == runner.kv.n_blocks and runner.prefixes.stats()["host_chunks"] == 2
    taken = runner.kv.pools[0].take()  # other blocks than before
    assert np.array_equal(serve(runner, 2 * CHUNK), expected)
    runner.kv.pools[0].give_back([taken])
    runner.close()
    runner = Runner(config(model, ctx_tokens=200, chunk_tokens=CHUNK, cache_dir=tmp_path / "cache"))
    assert np.array_equal(serve(runner, 2 * CHUNK), expected)
    runner.close()


def serve(runner: Runner, reused: int, tokens: np.ndarray = TOKENS, steps: list[int] | None = None) -> np.ndarray:
    """The last logits of a prompt, of which so much is reused; steps: how many tokens each has, if it is known."""
    sequence, length = runner.resume(tokens)
    assert length == reused
    lengths = []
    while sequence.length < len(tokens):
        part = runner.next_step(sequence, tokens)
        lengths.append(len(part))
        last = tuple(range(max(0, len(part) - 9), len(part)))
        result = runner.run([Span(sequence, part, np.zeros(len(part), bool), last)])
        runner.remember(sequence, tokens)
    assert steps is None or lengths == steps
    logits = result.logits.copy()
    sequence.release()
    return logits
