"""Reused prefixes on a device: blocks and states are copied to host memory and back, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_runs import config
from tiny_models import k_quant_mix, write_tiny

from engine import models
from engine.runner import Runner, Span

CHUNK = 64
TOKENS = np.random.default_rng(8).integers(0, 301, 2 * CHUNK + 9).astype(np.int32)
pytestmark = pytest.mark.usefixtures("on_the_device")


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


def serve(runner: Runner, reused: int) -> np.ndarray:
    sequence, length = runner.resume(TOKENS)
    assert length == reused
    while sequence.length < len(TOKENS):
        part = TOKENS[sequence.length : sequence.length + CHUNK]
        result = runner.run([Span(sequence, part, np.zeros(len(part), bool), tuple(range(len(part))))])
        runner.remember(sequence, TOKENS)
    logits = result.logits.copy()
    sequence.release()
    return logits[-9:]
