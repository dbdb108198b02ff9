"""Who forecasts experts is told what every row of a step with a draft chose, and changes no token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.ground.config import EngineConfig
from engine.ground.sampling import Sampling
from engine.running.decoding import Decoder
from engine.running.forecast import Expected, Routed
from engine.running.loaded import Loaded, load
from engine.running.reply import Reply
from engine.running.stepping import StepResult
from tests.engine_runs import Says, feed
from tests.telling import said
from tests.tiny_models import tiny_path

RNG = np.random.default_rng(13)
PROMPTS = [RNG.integers(0, 301, n).astype(np.int32) for n in (40, 23)]
SAMPLING = [Sampling(), Sampling(0.9, seed=4)]
N_TOKENS = 16


def opened(arch: str, **options: Any) -> Loaded:
    config: dict[str, Any] = {"ctx_tokens": 130, "chunk_tokens": 64, "threads": 1, "draft": "off"} | options
    return load(EngineConfig(model=tiny_path(arch), device="cpu", **config))


@pytest.fixture(scope="module", params=["qwen3moe", "qwen35moe"])
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    made = opened(request.param, residency_pct=40)
    yield made
    made.close()


class Listens:
    """Remembers what it is told, and expects next what it was told last."""

    def __init__(self) -> None:
        self.told: list[Routed] = []

    def verified(self, routed: Routed) -> Expected | None:
        self.told.append(routed)
        return tuple(tuple(np.unique(layer).tolist()) for layer in routed.experts)


Rows = dict[int, tuple[list[int], int]]  # by serial numbers of replies: tokens to the end of a step, how many in it


def drafting(loaded: Loaded, right: list[list[int]]) -> tuple[Decoder, list[Rows]]:
    """Decodes with drafts of up to four tokens, the first ones right; and the rows of its steps."""
    rng, steps = np.random.default_rng(2), list[Rows]()

    def follow(reply: Reply) -> tuple[int, ...]:
        rest = rest_of(reply.history, right)[: int(rng.integers(0, 4))]
        tokens = (*rest, 7) if rng.random() < 0.7 and reply.left > len(rest) + 1 else ()
        if not steps or reply.serial in steps[-1]:
            steps.append({})
        steps[-1][reply.serial] = [*reply.history, *tokens], 1 + len(tokens)
        return tokens

    return Decoder(loaded.steps, loaded.drawer, Says(follow)), steps


def rest_of(history: list[int], right: list[list[int]]) -> list[int]:
    """What a reply goes on with."""
    return next(whole for whole in right if whole[: len(history)] == history)[len(history) :]


def test_each_row_and_what_became_of_it_is_told(loaded: Loaded) -> None:
    plain = said(loaded, loaded.decoder, PROMPTS, SAMPLING, N_TOKENS)
    decoder, steps = drafting(loaded, plain)
    listens = decoder.forecast = Listens()
    assert said(loaded, decoder, PROMPTS, SAMPLING, N_TOKENS) == plain
    config, became = loaded.source.config, list[bool]()
    with_drafts = [step for step in steps if any(n > 1 for _, n in step.values())]
    assert len(with_drafts) < len(steps)
    for told, step in zip(listens.told, with_drafts, strict=True):
        assert told.replies == tuple(serial for serial, (_, n) in step.items() for _ in range(n))
        assert told.experts.shape == (len(config.moe_layers), len(told.replies), config.n_expert_used)
        for serial, (tokens, n) in step.items():
            mine = np.array(told.replies) == serial
            _, alone = feed(loaded, np.array(tokens, np.int32), [len(tokens) - n, *[1] * n])
            assert np.array_equal(told.experts[:, mine], alone[:, -n:])
            n_known = len(tokens) - n + 1
            rest = rest_of(tokens[:n_known], plain)
            wrong = [a != b for a, b in zip(tokens[n_known:], rest, strict=False)] + [True]
            assert told.stayed[mine].tolist() == [i <= wrong.index(True) for i in range(n)]
            became += told.stayed[mine].tolist()[1:]
    assert sum(became) > 10 and len(became) - sum(became) > 5
    assert decoder.expected == tuple(tuple(np.unique(layer).tolist()) for layer in listens.told[-1].experts)


def test_steps_without_a_draft_are_not_told(loaded: Loaded) -> None:
    decoder = Decoder(loaded.steps, loaded.drawer, Says(lambda reply: ()))
    listens = decoder.forecast = Listens()
    said(loaded, decoder, PROMPTS, SAMPLING, 4)
    assert listens.told == [] and decoder.expected is None


def test_where_nobody_listens_nothing_is_read(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is taken out of the counts, where something is taken back; here all of a draft stays."""
    assert loaded.decoder.forecast is None
    plain = said(loaded, loaded.decoder, PROMPTS, SAMPLING, N_TOKENS)
    monkeypatch.setattr(StepResult, "experts", property(lambda result: pytest.fail("experts were read")))

    def follow(reply: Reply) -> tuple[int, ...]:
        return tuple(rest_of(reply.history, plain)[: min(3, reply.left - 1)])

    assert said(loaded, Decoder(loaded.steps, loaded.drawer, Says(follow)), PROMPTS, SAMPLING, N_TOKENS) == plain


def test_a_model_without_experts_has_nothing_to_tell() -> None:
    loaded = opened("qwen35")
    plain = said(loaded, loaded.decoder, PROMPTS, SAMPLING, N_TOKENS)
    decoder, _ = drafting(loaded, plain)
    listens = decoder.forecast = Listens()
    assert said(loaded, decoder, PROMPTS, SAMPLING, N_TOKENS) == plain and listens.told == []
    loaded.close()
