"""Replies that share steps ahead of the host draw what they would draw alone, and leave what that leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.ground.errors import CapacityError, NumericalError
from engine.ground.sampling import Sampling
from engine.memory.blocks import Sequence
from engine.running.drawing import DeviceDrawer
from engine.running.loaded import Loaded, load
from engine.running.reply import Reply
from engine.running.stepping import Span
from engine.running.together import Together, can_share
from tests.engine_runs import PROMPT, config
from tests.tiny_models import k_quant_mix, write_tiny

pytestmark = pytest.mark.usefixtures("on_the_device")
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.9, top_p=0.9, frequency_penalty=0.4, seed=5)
FOREVER = float("inf")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny(path, k_quant_mix, n_layer=2, n_expert_used=3, n_ctx_train=2048)


@pytest.fixture
def loaded(model: Path) -> Iterator[Loaded]:
    loaded = load(config(model, policy="lru", residency_pct=50, ctx_tokens=640))
    yield loaded
    loaded.close()


def reply(
    loaded: Loaded, n: int, limit: int, params: Sampling = GREEDY, stop: tuple[int, ...] = (),
    logprobs: int | None = None,
) -> Reply:  # fmt: skip
    """One of which all but the last token of a prompt is fed."""
    made = Reply(PROMPT[:n].tolist(), params, limit, stop=stop, logprobs=logprobs, sequence=loaded.kv.sequence())
    assert made.sequence is not None
    loaded.steps.run([Span(made.sequence, PROMPT[: n - 1], np.zeros(n - 1, bool))])
    return made


def finished(loaded: Loaded, replies: list[Reply]) -> list[list[int]]:
    """Their tokens, in shared steps where that is possible, else alone."""
    going = replies
    while going := [r for r in going if r.reason is None]:
        if len(going) > 1:
            assert can_share(loaded.steps, going)
        assert loaded.decoder.together(going, FOREVER) == [None] * len(going)
        for r in going:
            assert r.sequence is not None
            fed = len(r.history) - (r.reason != "stop")
            assert r.sequence.length == fed
    return [r.history[len(r.history) - r.made :] for r in replies]


@pytest.mark.slow
def test_tokens_counts_and_likelihoods_are_those_of_each_alone(loaded: Loaded) -> None:
    kinds = [(9, 7, GREEDY, None), (12, 4, SAMPLED, None), (20, 9, GREEDY, 2)]
    expected, likely = [], []
    before = loaded.residency.pull().counts.copy()
    for n, limit, params, logprobs in kinds:
        one = reply(loaded, n, limit, params, logprobs=logprobs)
        while one.reason is None:
            assert loaded.decoder.step([one]) == [None]
        expected.append(one.history[n:])
        likely.append([drawn.likelihood for drawn in one.unsent])
    counted = loaded.residency.pull().counts - before
    replies = [reply(loaded, n, limit, params, logprobs=logprobs) for n, limit, params, logprobs in kinds]
    before = loaded.residency.pull().counts.copy()
    assert finished(loaded, replies) == expected
    assert [[drawn.likelihood for drawn in r.unsent] for r in replies] == likely
    assert [r.reason for r in replies] == ["length"] * 3
    assert np.array_equal(loaded.residency.pull().counts - before, counted)  # nothing of what ran beyond an end


def test_a_stop_token_ends_one_and_the_others_go_on(loaded: Loaded) -> None:
    alone = [finished(loaded, [reply(loaded, n, 8)])[0] for n in (9, 12)]
    stop = alone[0][3]
    first = alone[0].index(stop)
    replies = [reply(loaded, 9, 8, stop=(stop,)), reply(loaded, 12, 8)]
    assert finished(loaded, replies) == [alone[0][:first], alone[1]]
    assert [r.reason for r in replies] == ["stop", "length"]


@pytest.mark.slow
def test_it_ends_in_time_with_the_last_token_drawn_and_not_fed(loaded: Loaded) -> None:
    replies = [reply(loaded, n, 24) for n in (9, 12)]
    assert loaded.decoder.together(replies, time.perf_counter()) == [None, None]
    assert all(1 <= r.made < 24 and r.reason is None for r in replies)
    more = [reply(loaded, n, 24) for n in (9, 12)]
    assert finished(loaded, replies) == finished(loaded, more)


@pytest.mark.slow
def test_where_blocks_run_out_it_ends_between_steps(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [reply(loaded, n, 40) for n in (39, 12)]
    reserve, asked = Sequence.reserve, list[int]()

    def scarce(sequence: Sequence, n: int) -> None:
        asked.append(n)
        if len(asked) > 4:
            raise CapacityError("no block is left")
        reserve(sequence, n)

    monkeypatch.setattr(Sequence, "reserve", scarce)
    assert loaded.decoder.together(replies, FOREVER) == [None, None]
    assert all(0 < r.made < 40 for r in replies)
    monkeypatch.undo()
    assert [len(tokens) for tokens in finished(loaded, replies)] == [40, 40]


@pytest.mark.slow
def test_logits_that_are_not_finite_fail_their_own_row(loaded: Loaded) -> None:
    replies = [reply(loaded, n, 6) for n in (9, 12)]
    good = finished(loaded, [reply(loaded, 12, 6)])[0]
    assert replies[0].sequence is not None
    layer = loaded.kv.layers[0]
    assert layer is not None
    block = replies[0].sequence.groups[0].held[0]
    keys = layer.k[block * 64 : block * 64 + 1]
    loaded.backend.device.write(keys, np.full(keys.shape, np.nan, keys.dtype))
    assert isinstance(loaded.drawer, DeviceDrawer)
    failures = Together(loaded.steps, loaded.drawer, replies).run(FOREVER)
    assert isinstance(failures[0], NumericalError)
    assert failures[1] is None
    assert replies[1].history[12:] == good[: replies[1].made]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "width"), [(9, 16), pytest.param(17, 32, marks=pytest.mark.on_a_gpu)])
def test_more_than_eight_share_a_step(model: Path, n: int, width: int) -> None:
    loaded = load(config(model, policy="lru", residency_pct=50, ctx_tokens=64 * n, parallel=n))
    assert loaded.limits.places == n and loaded.steps.shared_width(n) == width == loaded.limits.max_sequences
    kinds = [(2 + i, 2 + i % 2, SAMPLED if i % 3 else GREEDY) for i in range(n)]
    alone = []
    for kind in kinds:
        one = reply(loaded, *kind)
        alone += finished(loaded, [one])
        assert one.sequence is not None
        one.sequence.release()
    assert finished(loaded, [reply(loaded, *kind) for kind in kinds]) == alone
    loaded.close()
