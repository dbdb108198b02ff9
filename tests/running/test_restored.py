"""A conversation that comes back from files, cut after any chunk: the rest has the bits of one that never stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine import models
from engine.formats import prefix_file
from engine.ground.config import EngineConfig
from engine.ground.errors import UnsupportedModelError
from engine.memory.blocks import Sequence
from engine.memory.shape import least_pool
from engine.running.loaded import Loaded, load
from engine.running.stepping import Span
from tests.cached_prompts import saved
from tests.tiny_models import k_quant_mix, write_tiny

CHUNK, N_CHUNKS, REST = 64, 8, 40
TOKENS = np.random.default_rng(61).integers(0, 301, N_CHUNKS * CHUNK + REST).astype(np.int32)
CTX, LEAST = 620, least_pool(CHUNK, 1)


@pytest.fixture(scope="module", params=models.known())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_tiny(folder / "tiny.gguf", k_quant_mix, arch=models.find(request.param))


def opened(model: Path, pool: str, kv_type: str, cache_dir: Path | None) -> Loaded:
    return load(
        EngineConfig(
            model=model, device="cpu", threads=1, ctx_tokens=CTX, chunk_tokens=CHUNK, parallel=1, kv_pool=pool,
            kv_type=kv_type, cache_dir=cache_dir, prefix_gib=0.01, draft="off",
        )
    )  # fmt: skip


def read(loaded: Loaded, sequence: Sequence, tokens: np.ndarray) -> np.ndarray:
    """The logits of each token that is not in the sequence yet."""
    rows = []
    while sequence.length < len(tokens):
        part = tokens[sequence.length : sequence.length + CHUNK]
        result = loaded.steps.run([Span(sequence, part, np.zeros(len(part), bool), tuple(range(len(part))))])
        rows.append(result.logits.copy())
        loaded.prefixes.insert(sequence, tokens)
    return np.concatenate(rows)


@pytest.mark.parametrize("kv_type", ["f16", pytest.param("q8_0", marks=pytest.mark.slow)])
def test_every_cut_has_the_bits_of_a_run_that_never_stopped(model: Path, kv_type: str, tmp_path: Path) -> None:
    try:
        loaded = opened(model, "auto", kv_type, None)
    except UnsupportedModelError as error:  # heads that q8_0 cannot store
        assert kv_type == "q8_0"
        pytest.skip(str(error))
    sequence = loaded.kv.sequence()
    expected = read(loaded, sequence, TOKENS)
    sequence.release()
    loaded.close()
    loaded = opened(model, "auto", kv_type, tmp_path)
    for turn in range(1, N_CHUNKS + 1):  # each leaves a state at its end, where the model has any
        sequence, reused = loaded.resume(TOKENS[: turn * CHUNK + REST])
        assert reused == (turn - 1) * CHUNK
        read(loaded, sequence, TOKENS[: turn * CHUNK + REST])
        sequence.release()
    loaded.close()
    written = saved(tmp_path)
    assert {path.suffix for path in written} == {".blocks", *([".state"] if loaded.kv.needs_snapshots else [])}
    assert len(written) == N_CHUNKS * (1 + loaded.kv.needs_snapshots)
    assert all(prefix_file.check(path).key["kv_types"] == [kv_type] * 2 for path in written)
    for pool in ("auto", str(LEAST + CHUNK), str(LEAST)):
        loaded = opened(model, pool, kv_type, tmp_path)
        assert loaded.kv.is_pooled == (pool != "auto")
        for cut in range(1, N_CHUNKS + 1):
            loaded.prefixes.clear()  # from files alone
            sequence, reused = loaded.resume(TOKENS[: cut * CHUNK + REST])
            assert reused == cut * CHUNK and loaded.prefixes.stats()["file_bytes"]
            assert np.array_equal(read(loaded, sequence, TOKENS), expected[reused:])
            sequence.release()
        assert not loaded.kv.is_pooled or loaded.kv.moved_bytes["home"]
        loaded.close()
    assert saved(tmp_path) == written
