"""Reused prefixes on every architecture: the logits that follow have the bits of a prompt that was computed whole."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from engine import models
from engine.ground.config import EngineConfig
from engine.memory.blocks import Sequence
from engine.running.loaded import Loaded, load
from engine.running.stepping import Span
from tests.cached_prompts import saved
from tests.tiny_models import k_quant_mix, write_tiny

CHUNK = 64
RNG = np.random.default_rng(4)
PROMPT, OTHER = (RNG.integers(0, 301, n).astype(np.int32) for n in (230, 560))
# Parts from the prompt behind its second chunk.
BRANCH = np.concatenate([PROMPT[:150], RNG.integers(0, 301, 60).astype(np.int32)])


@pytest.fixture(scope="module", params=models.known())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_tiny(folder / "tiny.gguf", k_quant_mix, arch=models.find(request.param))


def opened(model: Path, **options) -> Loaded:
    return load(EngineConfig(model=model, device="cpu", threads=1, ctx_tokens=600, chunk_tokens=CHUNK, **options))


def feed(loaded: Loaded, sequence: Sequence, tokens: np.ndarray, remember: bool = True) -> np.ndarray:
    while sequence.length < len(tokens):
        part = tokens[sequence.length : sequence.length + CHUNK]
        result = loaded.steps.run([Span(sequence, part, np.zeros(len(part), bool), (len(part) - 1,))])
        if remember:
            loaded.prefixes.insert(sequence, tokens)
    return result.logits[0].copy()


def serve(loaded: Loaded, tokens: np.ndarray, decoded: int = 3) -> tuple[int, list[np.ndarray]]:
    """Tokens reused, and the logits of the prompt's last and of some more tokens."""
    sequence, reused = loaded.resume(tokens)
    logits = [feed(loaded, sequence, tokens)]
    for i in range(decoded):
        logits.append(feed(loaded, sequence, np.append(tokens, np.arange(i + 1, dtype=np.int32)), remember=False))
    sequence.release()
    return reused, logits


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
def test_a_reused_prefix_has_the_bits_of_a_computed_one(model: Path) -> None:
    loaded = opened(model)
    expected = {}
    for name, tokens in (("prompt", PROMPT), ("branch", BRANCH)):
        reused, expected[name] = serve(loaded, tokens)
        loaded.prefixes.clear()
        assert reused == 0 and loaded.kv.free_blocks == loaded.kv.n_blocks
    for _ in range(2):
        serve(loaded, PROMPT)
    assert loaded.prefixes.match(PROMPT).length == 3 * CHUNK
    first, _ = loaded.resume(PROMPT)  # both use the same blocks at once
    reused, logits = serve(loaded, PROMPT)
    assert reused == 3 * CHUNK and same(logits, expected["prompt"])
    assert np.array_equal(feed(loaded, first, PROMPT), expected["prompt"][0])
    first.release()
    # What parts from it goes on where a snapshot is: the first that parts leaves one for the second.
    serve(loaded, np.concatenate([BRANCH[:150], OTHER[:60]]))
    reused, logits = serve(loaded, BRANCH)
    assert reused == 2 * CHUNK and same(logits, expected["branch"])
    # Evicted, and back from host memory.
    for _ in range(2):
        serve(loaded, OTHER)
        assert loaded.prefixes.stats()["host_chunks"]
        reused, logits = serve(loaded, PROMPT)
        assert reused == 3 * CHUNK and same(logits, expected["prompt"])
    loaded.prefixes.clear()
    assert loaded.kv.free_blocks == loaded.kv.n_blocks and loaded.prefixes.host_bytes == 0
    loaded.close()


@pytest.mark.slow
def test_prefixes_outlive_the_daemon_and_damaged_files_do_no_harm(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(**options) -> tuple[int, list[np.ndarray]]:
        loaded = opened(model, cache_dir=tmp_path / "cache", **options)
        try:
            return serve(loaded, PROMPT)
        finally:
            loaded.close()

    reused, expected = answer()
    assert reused == 0
    for _ in range(2):
        reused, logits = answer()
        assert reused == 3 * CHUNK and same(logits, expected)
    reused, logits = answer(prefix_gib=0.0)  # straight from the files
    assert reused == 3 * CHUNK and same(logits, expected)
    files = saved(tmp_path / "cache")
    for kv_type in ("q8_0", "q8_0,q4_0"):  # each has its own
        reused, expected_of_type = answer(kv_type=kv_type)
        again, logits = answer(kv_type=kv_type)
        assert (reused, again) == (0, 3 * CHUNK) and same(logits, expected_of_type)
    assert len(saved(tmp_path / "cache")) >= 3 * len(files)
    states = [f for f in files if f.suffix == ".state"]
    assert not caplog.records
    for path in (states or files)[::2]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        reused, logits = answer()
    assert reused < 3 * CHUNK or len(states) > 1
    assert same(logits, expected)
    for path in files:
        path.write_bytes(b"not a prefix\n")
    reused, logits = answer()
    assert reused == 0 and same(logits, expected)
    reused, logits = answer()
    assert reused == 3 * CHUNK and same(logits, expected)


def test_decoded_tokens_are_reused(model: Path) -> None:
    """On a CPU decoded tokens have the bits of prefilled ones, so nothing changes at all."""
    loaded = opened(model)
    turn = np.concatenate([PROMPT, OTHER[:90]])
    _, expected = serve(loaded, turn)
    loaded.prefixes.clear()
    sequence, _ = loaded.resume(PROMPT)
    feed(loaded, sequence, PROMPT)
    for n in range(len(PROMPT) + 1, len(PROMPT) + 31):
        feed(loaded, sequence, turn[:n], remember=n % CHUNK == 0)
    loaded.prefixes.insert(sequence, turn[: sequence.length])
    sequence.release()
    reused, logits = serve(loaded, turn)
    assert reused == 4 * CHUNK and same(logits, expected)
    loaded.close()
