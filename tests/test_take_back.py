"""Going back: tokens of a kept step taken back, and snapshots restored, on every architecture and backend.

The oracle is a sequence that was never fed the tokens: its next logits are the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tiny_models import k_quant_mix, write_tiny

from engine import models
from engine.config import EngineConfig
from engine.kv import Sequence
from engine.runner import Runner, Span

TOKENS = np.random.default_rng(3).integers(0, 301, 200).astype(np.int32)
PROMPT = 75  # longer than the windows of the tiny models


@pytest.fixture(scope="module", params=models.known())
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    path = write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", k_quant_mix, arch=models.find(request.param))
    made = Runner(EngineConfig(model=path, device="cpu", threads=2, ctx_tokens=600, chunk_tokens=64))
    yield made
    assert made.kv.free_blocks == made.kv.n_blocks
    made.close()


def span(sequence: Sequence, tokens: np.ndarray, keep: bool = False) -> Span:
    return Span(sequence, tokens, np.ones(len(tokens), bool), (len(tokens) - 1,), keep)


def feed(runner: Runner, sequence: Sequence, tokens: np.ndarray) -> np.ndarray:
    for start in range(0, len(tokens), 64):
        result = runner.run([span(sequence, tokens[start : start + 64])])
    return result.logits[0].copy()


@pytest.mark.slow
@pytest.mark.parametrize("dropped", [0, 1, 3, 5])
def test_a_token_taken_back_never_was(runner: Runner, dropped: int) -> None:
    sequence, other = runner.new_sequence(), runner.new_sequence()
    prompt, draft, rest = TOKENS[:PROMPT], TOKENS[100:105], TOKENS[150:153]
    feed(runner, sequence, prompt)
    feed(runner, other, TOKENS[:7])
    spans = [span(other, TOKENS[7:9], keep=dropped % 2 == 0), span(sequence, draft, keep=True)]
    runner.run(spans)
    runner.take_back(spans, [1 if spans[0].keep else 0, dropped])
    assert sequence.length == PROMPT + 5 - dropped
    after = feed(runner, sequence, rest)
    other.release()
    plain = runner.new_sequence()
    feed(runner, plain, prompt)
    if dropped < 5:
        runner.run([span(plain, draft[: 5 - dropped])])
    assert np.array_equal(after, feed(runner, plain, rest))
    sequence.release()
    plain.release()


def test_a_snapshot_restored_goes_on_as_before(runner: Runner) -> None:
    sequence = runner.new_sequence()
    feed(runner, sequence, TOKENS[:PROMPT])
    saved = runner.kv.save(sequence)
    first = feed(runner, sequence, TOKENS[PROMPT : PROMPT + 3])
    feed(runner, sequence, TOKENS[120:130])
    runner.kv.restore(sequence, saved)
    assert np.array_equal(first, feed(runner, sequence, TOKENS[PROMPT : PROMPT + 3]))
    sequence.release()
