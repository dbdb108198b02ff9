"""Requests through the engine: limits, cancellation, scores, profiles, and that nothing leaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.formats import profile as profiles
from engine.formats.trace import read_routing
from engine.ground.config import EngineConfig
from engine.ground.errors import ContextOverflowError, RequestError
from engine.ground.protocol import Done, Error, Event, Generate, Score, Tokens
from engine.ground.sampling import Sampling
from engine.serving import schedule
from engine.serving.reading import read_together
from engine.serving.scheduler import Engine
from engine.serving.tasks import GenerateTask
from tests.tiny_models import float_logits, k_quant_mix, read_weights, write_tiny

PROMPT = tuple(int(t) for t in np.random.default_rng(5).integers(0, 301, 61))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", k_quant_mix)


@pytest.fixture
def engine(model: Path):
    made = Engine(EngineConfig(model=model, device="cpu", threads=2, ctx_tokens=200, chunk_tokens=32))
    yield made
    made.loaded.prefixes.clear()
    assert made.loaded.kv.free_blocks == made.loaded.kv.n_blocks or made.busy
    made.close()
    assert made.loaded.kv.free_blocks == made.loaded.kv.n_blocks


def drain(engine: Engine) -> list[Event]:
    events = []
    while engine.busy:
        events += engine.step()
    return events


def tokens_of(events: list[Event], request_id: int) -> list[int]:
    return [t for e in events if isinstance(e, Tokens) and e.id == request_id for t in e.tokens]


def test_a_step_is_fed_as_there_was_room_for_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made by giving up prefixes, and where the next step ends depends on those that are there."""
    task = GenerateTask(engine.loaded, Generate(1, PROMPT, max_tokens=2, stop_tokens=()))
    monkeypatch.setattr(engine.loaded.prefixes, "step_tokens", lambda *_: 20)
    task.prepare()
    monkeypatch.setattr(engine.loaded.prefixes, "step_tokens", lambda *_: 31)
    read_together([task])
    assert task.sequence is not None and task.sequence.length == task.read_tokens == 20
    while not task.decoding:
        task.prepare()
        read_together([task])
    assert task.sequence.length == len(PROMPT)
    task.close()


def test_generate_counts_decoded_tokens_only(engine: Engine) -> None:
    engine.submit(Generate(1, PROMPT, max_tokens=9, stop_tokens=()))
    events = drain(engine)
    done = events[-1]
    assert isinstance(done, Done)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.finish_reason) == (61, 9, "length")
    assert len(tokens_of(events, 1)) == 9
    # The last token is never fed back: eight tokens were decoded, three layers, five experts each.
    assert done.residency["hits"] == 8 * 3 * 5
    assert sum(map(sum, engine.profile("read")["counts"])) == 8 * 3 * 5


def test_the_same_prompt_twice_gives_the_same_tokens(engine: Engine) -> None:
    for request_id in (1, 2):
        engine.submit(Generate(request_id, PROMPT, 12, Sampling(temperature=0.9, top_p=0.9, seed=4), ()))
    events = drain(engine)
    assert tokens_of(events, 1) == tokens_of(events, 2)
    engine.submit(Generate(3, PROMPT, 12, Sampling(temperature=0.9, top_p=0.9, seed=5), ()))
    assert tokens_of(drain(engine), 3) != tokens_of(events, 1)


def test_a_stop_token_ends_and_is_not_sent(engine: Engine) -> None:
    engine.submit(Generate(1, PROMPT, 12, stop_tokens=()))
    free = tokens_of(drain(engine), 1)
    stop = free[4]
    engine.submit(Generate(2, PROMPT, 12, stop_tokens=(stop,)))
    events = drain(engine)
    assert tokens_of(events, 2) == free[: free.index(stop)]
    assert events[-1].finish_reason == "stop"


def test_the_context_bounds_prompts_and_answers(engine: Engine) -> None:
    with pytest.raises(ContextOverflowError, match="200"):
        engine.submit(Generate(1, (7,) * 200, 4))
    engine.submit(Generate(2, (7,) * 195, 50, stop_tokens=()))
    done = drain(engine)[-1]
    assert (done.usage.completion_tokens, done.finish_reason) == (5, "length")


def test_bad_requests_are_refused_by_name(engine: Engine) -> None:
    with pytest.raises(RequestError, match="token 301"):
        engine.submit(Generate(1, (5, 301), 4))
    engine.submit(Generate(2, PROMPT, 4))
    with pytest.raises(RequestError, match="request 2 is still running"):
        engine.submit(Generate(2, PROMPT, 4))
    drain(engine)


@pytest.mark.usefixtures("short_units")
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_cancelled_request_gives_its_blocks_back(engine: Engine, steps: int) -> None:
    engine.submit(Generate(1, PROMPT, 100, stop_tokens=()))
    engine.submit(Generate(2, PROMPT, 3, stop_tokens=()))
    for _ in range(steps):
        engine.step()
    assert engine.cancel(1)
    assert not engine.cancel(1)
    events = drain(engine)
    assert {e.id for e in events} == {2}
    engine.loaded.prefixes.clear()
    assert engine.loaded.kv.free_blocks == engine.loaded.kv.n_blocks


REQUESTS = [
    Generate(i, tuple(int(t) for t in np.random.default_rng(i).integers(0, 301, n)), made, sampling, ())
    for i, (n, made, sampling) in enumerate([
        (3, 9, Sampling()), (40, 5, Sampling(0.8, seed=3)), (33, 1, Sampling()), (7, 12, Sampling(0.7, seed=1)),
        (70, 4, Sampling()),
    ], start=1)
]  # fmt: skip


def alone(model: Path, **options) -> dict[int, list[int]]:
    found = {}
    for request in REQUESTS:
        made = Engine(EngineConfig(model=model, device="cpu", threads=2, **options))
        made.submit(request)
        found[request.id] = tokens_of(drain(made), request.id)
        made.close()
    return found


def test_requests_that_share_steps_say_what_they_would_alone(model: Path) -> None:
    options = {"ctx_tokens": 400, "chunk_tokens": 32}
    expected = alone(model, **options)
    engine = Engine(EngineConfig(model=model, device="cpu", threads=2, **options))
    for request in REQUESTS:
        engine.submit(request)
    events = drain(engine)
    assert {request.id: tokens_of(events, request.id) for request in REQUESTS} == expected
    assert {len(expected[r.id]) == r.max_tokens for r in REQUESTS} == {True}
    # They came one by one, too, while others decoded.
    for request in REQUESTS:
        engine.submit(replace(request, id=request.id + 10))
        events += engine.step()
    events += drain(engine)
    assert {request.id: tokens_of(events, request.id + 10) for request in REQUESTS} == expected
    assert engine.stats()["running"] == engine.stats()["queued"] == 0
    engine.close()


def test_a_full_cache_makes_the_youngest_wait_and_loses_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks fewer than all of them need; on this backend what is read again has the same bits."""
    monkeypatch.setattr(schedule, "GROWTH_TOKENS", 0)
    options = {"ctx_tokens": 128, "chunk_tokens": 32}
    requests = [Generate(i, PROMPT[: 50 + i], 40, Sampling(0.5, seed=i), ()) for i in (1, 2, 3)]
    expected = {}
    for request in requests:
        engine = Engine(EngineConfig(model=model, device="cpu", threads=2, **options))
        engine.submit(request)
        expected[request.id] = tokens_of(drain(engine), request.id)
        engine.close()
    engine = Engine(EngineConfig(model=model, device="cpu", threads=2, **options))
    put_back = []
    original = engine._put_back
    engine._put_back = lambda task: (put_back.append(task.id), original(task))  # type: ignore[method-assign,assignment]
    for request in requests:
        engine.submit(request)
    events = drain(engine)
    assert put_back
    assert {request.id: tokens_of(events, request.id) for request in requests} == expected
    assert sum(isinstance(e, Done) for e in events) == 3
    engine.close()


def test_a_short_prompt_does_not_wait_for_a_long_one(model: Path) -> None:
    engine = Engine(EngineConfig(model=model, device="cpu", threads=2, ctx_tokens=600, chunk_tokens=32))
    rng = np.random.default_rng(0)
    engine.submit(Generate(1, tuple(rng.integers(0, 301, 400).tolist()), 2, stop_tokens=()))
    engine.step()
    engine.submit(Generate(2, tuple(rng.integers(0, 301, 20).tolist()), 3, stop_tokens=()))
    order = [e.id for e in drain(engine) if isinstance(e, Tokens)]
    assert order[0] == 2 and order[-1] == 1
    engine.close()


def test_a_prefix_is_reused_and_said_to_be(engine: Engine) -> None:
    engine.submit(Generate(1, PROMPT, 5, stop_tokens=()))
    first = drain(engine)
    engine.submit(Generate(2, (*PROMPT, *tokens_of(first, 1), 7), 5, stop_tokens=()))
    done = drain(engine)[-1]
    assert isinstance(done, Done)
    assert (first[-1].usage.cached_tokens, done.usage.cached_tokens) == (0, 64)
    assert engine.stats()["tokens"] == {"read": 61 + 67 - 64, "reused": 64, "written": 10}


def test_blocks_of_requests_and_of_prefixes_alone_are_told_apart(engine: Engine) -> None:
    def held() -> int:
        blocks = engine.stats()["kv_blocks"]
        return int(blocks["total"] - blocks["free"] - blocks["reclaimable"])

    before = engine.stats()["kv_blocks"]
    tokens = tuple(int(t) for t in np.random.default_rng(17).integers(0, 301, 2 * 64 + 9))
    engine.submit(Generate(1, tokens, 5, stop_tokens=()))
    while not any(isinstance(event, Tokens) for event in engine.step()):
        pass
    assert held() == 3
    drain(engine)
    after = engine.stats()["kv_blocks"]
    assert held() == 0 and after["reclaimable"] == before["reclaimable"] + 2
    assert after["free"] + after["reclaimable"] == after["total"] == before["total"]
    engine.submit(Generate(2, (*tokens, 5), 5, stop_tokens=()))
    engine.step()
    assert held() == 3  # those of the prefix are the request's now, too
    engine.cancel(2)
    assert held() == 0


@pytest.mark.usefixtures("short_units")
@pytest.mark.parametrize("victim", [1, 2])
def test_a_request_cancelled_among_others_leaves_them_alone(engine: Engine, victim: int) -> None:
    engine.submit(Generate(1, PROMPT[:30], 150, stop_tokens=()))
    expected = tokens_of(drain(engine), 1)
    for request_id in (1, 2):
        engine.submit(Generate(request_id, PROMPT[:30], 150, stop_tokens=()))
    events = []
    for _ in range(3):
        events += engine.step()
    assert engine.cancel(victim)
    events += drain(engine)
    assert tokens_of(events, 3 - victim) == expected


@pytest.mark.slow
def test_scores_are_log_probabilities_of_the_model(engine: Engine, model: Path) -> None:
    marks = tuple(i % 3 == 0 for i in range(61))
    engine.submit(Score(1, PROMPT, generated=marks, logprobs=True))
    done = drain(engine)[-1]
    oracle, _ = float_logits(engine.loaded.source.config, read_weights(model), np.array(PROMPT))
    top = oracle.max(1, keepdims=True)
    log_p = oracle - top - np.log(np.exp(oracle - top).sum(1, keepdims=True))
    expected = log_p[np.arange(60), PROMPT[1:]]
    assert np.abs(np.array(done.logprobs) - expected).max() < 0.5  # 8-bit activations, 4-bit weights
    assert np.corrcoef(done.logprobs, expected)[0, 1] > 0.99
    assert done.nll == pytest.approx(-sum(p for p, m in zip(done.logprobs, marks[1:], strict=True) if m))
    assert sum(map(sum, engine.profile("read")["counts"])) == sum(marks) * 3 * 5


def test_a_score_writes_the_routing_it_counted(engine: Engine, tmp_path: Path) -> None:
    marks = tuple(i % 4 == 1 for i in range(61))
    for window, count in ((0, "generated"), (1, "all")):
        engine.submit(Score(window, PROMPT, marks, "s", window, str(tmp_path / "t"), hidden=True, count=count))
        assert isinstance(drain(engine)[-1], Done)
    trace = read_routing(tmp_path / "t", engine.loaded.source.file.model_id)
    assert trace.experts.shape == (122, 3, 5)
    assert trace.generated.tolist() == [*marks, *marks]
    assert len(set(trace.position.tolist())) == 122
    found = np.zeros((3, 11), np.int64)
    for layer in range(3):
        counted = np.concatenate([trace.experts[:61, layer][trace.generated[:61]], trace.experts[61:, layer]])
        found[layer] = np.bincount(counted.ravel(), minlength=11)
    assert np.array_equal(found, engine.profile("read")["counts"])


def test_a_nan_is_an_error_of_its_request_alone(engine: Engine) -> None:
    good = engine.loaded.forward.weights
    engine.loaded.forward.weights = replace(good, output_norm=np.full_like(good.output_norm, np.nan))
    engine.submit(Generate(1, PROMPT, 4))
    events = drain(engine)
    assert isinstance(events[-1], Error)
    assert (events[-1].code, events[-1].id) == ("numerical", 1)
    engine.loaded.forward.weights = good
    engine.submit(Generate(2, PROMPT, 4, stop_tokens=()))
    assert isinstance(drain(engine)[-1], Done)


def test_a_nan_in_the_middle_of_a_score_is_an_error(engine: Engine) -> None:
    """Routing by NaN must not become a profile, wherever the NaN arises and whoever asks for logits."""
    good = engine.loaded.forward.weights
    broken = replace(good.layers[0], ffn_norm=np.full_like(good.layers[0].ffn_norm, np.nan))
    engine.loaded.forward.weights = replace(good, layers=(broken, *good.layers[1:]))
    engine.submit(Score(1, PROMPT))
    events = drain(engine)
    assert isinstance(events[-1], Error)
    assert events[-1].code == "numerical"
    engine.loaded.forward.weights = good


def test_counts_are_not_reset_under_a_request(engine: Engine) -> None:
    engine.submit(Generate(1, PROMPT, 5, stop_tokens=()))
    engine.step()
    with pytest.raises(RequestError, match="reset"):
        engine.profile("reset")
    drain(engine)
    engine.profile("reset")


def test_pinned_slots_change_between_requests_only(model: Path) -> None:
    made = Engine(EngineConfig(
        model=model, device="cpu", threads=2, ctx_tokens=200, chunk_tokens=32, policy="spark", residency_pct=50,
        cache_slots=2,
    ))  # fmt: skip
    state = made.loaded.residency.state
    assert list(made.loaded.shares.placement.cache_slots) == [2, 2, 2]
    made.submit(Generate(1, PROMPT, 60, stop_tokens=()))
    made.submit(Generate(2, PROMPT[::-1], 5, stop_tokens=()))
    for _ in range(4):
        made.step()
    pinned = [(state.expert_of[s], s) for s in np.flatnonzero(state.pinned)]
    made.cancel(2)
    assert [(state.expert_of[s], s) for s in np.flatnonzero(state.pinned)] == pinned
    drain(made)
    assert [(state.expert_of[s], s) for s in np.flatnonzero(state.pinned)] == pinned
    made.submit(Generate(3, PROMPT, 2, stop_tokens=()))
    made.step()
    assert [(state.expert_of[s], s) for s in np.flatnonzero(state.pinned)] != pinned
    made.close()


@pytest.mark.parametrize("begins_with_one", [False, True])
def test_two_engines_learn_into_one_profile(model: Path, tmp_path: Path, begins_with_one: bool) -> None:
    path = tmp_path / "p.csv"
    config = EngineConfig(
        model=model, device="cpu", threads=2, ctx_tokens=200, chunk_tokens=32, policy="spark", residency_pct=50
    )
    counted = []
    if begins_with_one:
        first = Engine(config)
        first.submit(Generate(1, PROMPT, 9, stop_tokens=()))
        drain(first)
        first.profile("write", path)
        counted.append(np.array(first.profile("read")["counts"]))
        first.close()
        config = replace(config, profile=path)
    engines = [Engine(config), Engine(config)]
    for number, engine in enumerate(engines):
        engine.submit(Generate(1, PROMPT[number:], 40 - 30 * number, stop_tokens=()))
        drain(engine)
    for engine in engines:
        assert engine.profile("write", path)["warnings"] == []
        counted.append(np.array(engine.profile("read")["counts"]))
    assert np.array_equal(profiles.load(path)[0].counts, sum(counted))
    path.write_text("not a profile")
    (warning,) = engines[0].profile("write", path)["warnings"]
    assert "is replaced" in warning
    for engine in engines:
        engine.close()


def test_profile_is_written_merged_and_reset(engine: Engine, tmp_path: Path) -> None:
    engine.submit(Generate(1, PROMPT, 20, stop_tokens=()))
    drain(engine)
    engine.profile("write", tmp_path / "learned.csv")
    learned, warnings = profiles.load(tmp_path / "learned.csv", model_id=engine.loaded.source.file.model_id)
    assert not warnings
    assert np.array_equal(learned.counts, engine.profile("read")["counts"])
    engine.profile("reset")
    assert engine.stats()["hits"] == 0
    assert not np.any(engine.profile("read")["counts"])
