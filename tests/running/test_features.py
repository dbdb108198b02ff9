"""Features that a drafter reads: what leaves chosen layers of a step, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from engine import models
from engine.ground.config import EngineConfig
from engine.running.loaded import Loaded, load
from engine.running.stepping import Span
from tests.engine_runs import config
from tests.tiny_models import tiny_path

TOKENS = np.random.default_rng(5).integers(0, 301, 90).astype(np.int32)
CHUNKS = (40, 3, 1, 1, 45)  # longer and shorter than what is noted


def fed(loaded: Loaded) -> tuple[list[np.ndarray], list[np.ndarray | None], list[np.ndarray | None]]:
    """Logits, features and hidden states of each step."""
    sequence, start = loaded.kv.sequence(), 0
    logits, features, hidden = [], [], []
    for n in CHUNKS:
        span = Span(sequence, TOKENS[start : start + n], np.ones(n, bool), tuple(range(n)))
        result = loaded.steps.run([span])
        logits.append(result.logits.copy())
        for found, kept in ((result.features, features), (result.hidden, hidden)):
            kept.append(None if found is None else found.copy())
        features[-1:] = [None if features[-1] is None else np.concatenate([features[-1], result.residual[None]])]
        start += n
    sequence.release()
    return logits, features, hidden


@pytest.mark.parametrize("name", models.known())
def test_features_are_what_leaves_a_layer(name: str) -> None:
    made = load(EngineConfig(model=tiny_path(name), device="cpu", threads=1, ctx_tokens=128, chunk_tokens=64))
    plain, nothing, _ = fed(made)
    assert made.forward.buffers.features is None and nothing == [None] * len(CHUNKS)
    last = made.forward.config.n_layer - 1
    captured = (1, last, 0)
    made.forward.capture_features(captured)
    made.forward.capture_hidden(True)
    logits, features, hidden = fed(made)
    made.forward.capture_hidden(False)
    again, same, _ = fed(made)
    made.forward.features_wanted = False  # of a step that nobody follows; hidden states may be asked for all the same
    _, nothing, none_hidden = fed(made)
    made.forward.capture_hidden(True)
    _, _, still_hidden = fed(made)
    made.close()
    assert nothing == none_hidden == [None] * len(CHUNKS)
    assert all(np.array_equal(a, b) for a, b in zip(hidden, still_hidden, strict=True))
    for a, b, c in zip(plain, logits, again, strict=True):
        assert np.array_equal(a, b) and np.array_equal(a, c)
    for found, later, entering in zip(features, same, hidden, strict=True):
        assert found is not None and later is not None and entering is not None
        assert np.array_equal(found[0], entering[2]) and np.array_equal(found[2], entering[1])
        assert np.array_equal(found[1], found[3])  # the residual that leaves the last layer
        assert np.array_equal(found, later)


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_device")
def test_captured_steps_keep_features() -> None:
    """A graph has the copies that it was captured with."""
    made = load(config(tiny_path("qwen3moe")))
    made.forward.capture_features((1, 0))
    steps = [TOKENS[:37], TOKENS[37:38], TOKENS[38:39], TOKENS[39:43]]
    found = []
    for hidden in (False, True):
        made.forward.capture_hidden(hidden)
        sequence, kept = made.kv.sequence(), []
        for tokens in steps:
            result = made.steps.run([Span(sequence, tokens, np.ones(len(tokens), bool), (len(tokens) - 1,))])
            kept.append(np.asarray(made.backend.device.read(result.features)).copy())
            if hidden:
                assert result.hidden is not None and np.array_equal(kept[-1][1], result.hidden[1][: len(tokens)])
        sequence.release()
        found.append(kept)
    made.close()
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)
