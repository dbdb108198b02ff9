"""Going back: tokens of a kept step taken back, and snapshots restored, on every architecture and backend.

The oracle is a sequence that was never fed the tokens: its next logits are the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine import models
from engine.ground.config import EngineConfig
from engine.memory.blocks import Sequence
from engine.running.loaded import Loaded, load
from engine.running.stepping import Span
from tests.tiny_models import k_quant_mix, write_tiny

TOKENS = np.random.default_rng(3).integers(0, 301, 200).astype(np.int32)
PROMPT = 75  # longer than the windows of the tiny models


@pytest.fixture(scope="module", params=models.known())
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    path = write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", k_quant_mix, arch=models.find(request.param))
    made = load(EngineConfig(model=path, device="cpu", threads=1, ctx_tokens=600, chunk_tokens=64))
    yield made
    assert made.kv.free_blocks == made.kv.n_blocks
    made.close()


def span(sequence: Sequence, tokens: np.ndarray, keep: bool = False) -> Span:
    return Span(sequence, tokens, np.ones(len(tokens), bool), (len(tokens) - 1,), keep)


def feed(loaded: Loaded, sequence: Sequence, tokens: np.ndarray) -> np.ndarray:
    for start in range(0, len(tokens), 64):
        result = loaded.steps.run([span(sequence, tokens[start : start + 64])])
    return result.logits[0].copy()


@pytest.mark.slow
@pytest.mark.parametrize("dropped", [0, 1, 3, 5])
def test_a_token_taken_back_never_was(loaded: Loaded, dropped: int) -> None:
    sequence, other = loaded.kv.sequence(), loaded.kv.sequence()
    prompt, draft, rest = TOKENS[:PROMPT], TOKENS[100:105], TOKENS[150:153]
    feed(loaded, sequence, prompt)
    feed(loaded, other, TOKENS[:7])
    spans = [span(other, TOKENS[7:9], keep=dropped % 2 == 0), span(sequence, draft, keep=True)]
    loaded.steps.run(spans)
    loaded.steps.take_back(spans, [1 if spans[0].keep else 0, dropped])
    assert sequence.length == PROMPT + 5 - dropped
    after = feed(loaded, sequence, rest)
    other.release()
    plain = loaded.kv.sequence()
    feed(loaded, plain, prompt)
    if dropped < 5:
        loaded.steps.run([span(plain, draft[: 5 - dropped])])
    assert np.array_equal(after, feed(loaded, plain, rest))
    sequence.release()
    plain.release()


def test_a_snapshot_restored_goes_on_as_before(loaded: Loaded) -> None:
    sequence = loaded.kv.sequence()
    feed(loaded, sequence, TOKENS[:PROMPT])
    saved = loaded.kv.save(sequence)
    first = feed(loaded, sequence, TOKENS[PROMPT : PROMPT + 3])
    feed(loaded, sequence, TOKENS[120:130])
    loaded.kv.restore(sequence, saved)
    assert np.array_equal(first, feed(loaded, sequence, TOKENS[PROMPT : PROMPT + 3]))
    sequence.release()
