"""Guesses that are counted, beside a loop over steps; they change no token and no slot."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from engine.formats.pregate import Pregate, Trained, default_path, pairs, read_router, unit
from engine.ground.config import EngineConfig
from engine.ground.errors import FileFormatError, UsageError
from engine.ground.sampling import Sampling
from engine.placing.policy import SlotState
from engine.running.decoding import Decoder
from engine.running.guessing import Guessing, Way
from engine.running.loaded import Loaded, load
from engine.serving.scheduler import Engine
from tests.engine_runs import Says, generate
from tests.telling import said
from tests.tiny_models import tiny_path

RNG = np.random.default_rng(23)
PROMPTS = [RNG.integers(0, 301, n).astype(np.int32) for n in (31, 20)]
SAMPLING = [Sampling(), Sampling(0.9, seed=4)]


def options(arch: str = "qwen3moe", **more: Any) -> EngineConfig:
    settings: dict[str, Any] = {"ctx_tokens": 130, "chunk_tokens": 64, "threads": 1, "draft": "off", "device": "cpu"}
    return EngineConfig(tiny_path(arch), **settings | {"policy": "spark", "residency_pct": 40, "poison": True} | more)


def guessing(loaded: Loaded, ways: list[Way], pregate: Pregate | None = None) -> Guessing:
    c, source = loaded.source.config, loaded.source
    sizes = [sum(e.part_bytes) for e in loaded.residency.experts]
    return Guessing(ways, source.file, c.moe_layers, c.n_expert_used, loaded.residency, sizes, pregate)


def decoded(arch: str, ways: list[Way], tokens: int, drafting: bool = False) -> tuple[Any, ...]:
    """What is said, the slots behind it, the record, and of each step what a literal count needs."""
    loaded = load(options(arch))
    follow = Says(lambda reply: (7, 9, 4)[: min(3, reply.left - 1)] if drafting and len(reply.history) % 2 else ())
    decoder = Decoder(loaded.steps, loaded.drawer, follow)
    watching = guessing(loaded, ways) if ways else None
    decoder.guessing = watching
    steps = []
    if watching is not None:
        real = watching._count

        def count(slot_of: Any, hidden: Any, experts: Any) -> None:
            steps.append((slot_of.copy(), hidden.copy(), experts.copy()))
            real(slot_of, hidden, experts)

        watching._count = count  # type: ignore[method-assign]
    texts = said(loaded, decoder, PROMPTS[: 1 + drafting], SAMPLING[: 1 + drafting], tokens)
    state = {f.name: getattr(loaded.residency.state, f.name).copy() for f in fields(SlotState) if "ptr" not in f.name}
    routers = [read_router(loaded.source.file, layer) for layer in loaded.source.config.moe_layers]
    found = texts, state, watching, steps, routers, loaded.source.config
    loaded.close()
    return found


@pytest.mark.parametrize("arch", ["qwen3moe", "gemma4"])
def test_what_is_counted_is_what_a_loop_counts(arch):
    ways = [Way("router", 1, 2), Way("router", 0, 1), Way("router", 2, 3), Way("previous", 1, 2)]
    _, _, watching, steps, routers, c = decoded(arch, ways, 24)
    assert len(steps) == watching.n_steps == watching.n_tokens == 23
    L, last = len(c.moe_layers), {}
    expected = {way: np.zeros((3, L), int) for way in ways}
    for now, (slot_of, hidden, experts) in enumerate(steps):
        for way in ways:
            for m in range(way.ahead, L):
                missing = [e for e in range(c.n_expert) if slot_of[m, e] < 0]
                if way.source == "previous":
                    seen = [e for e in missing if (m, e) in last]
                    guessed = sorted(seen, key=lambda e: last[m, e])[: way.budget]
                else:
                    scores = routers[m].scores(unit(hidden[c.moe_layers[m - way.ahead]], c.eps))[0]
                    guessed = sorted(missing, key=lambda e: -scores[e])[: way.budget]
                missed = set(missing) & set(experts[m, 0].tolist())
                expected[way][:, m] += len(guessed), len(missed & set(guessed)), len(missed)
        for m in range(L):
            last |= {(m, e): (-now, rank) for rank, e in enumerate(experts[m, 0].tolist())}
    for way in ways:
        record = watching.records[way]
        assert np.array_equal(expected[way], [record.made, record.useful, record.misses]), way
        totals = watching.totals(way)
        assert totals["made"] == totals["useful"] + totals["wasted"] and totals["useful"] > 0
        assert totals["wasted_bytes"] == record.wasted @ watching._expert_bytes > 0


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe"])
@pytest.mark.parametrize("drafting", [False, True], ids=["plain", "drafts"])
def test_no_token_and_no_slot_is_another_one(arch, drafting):
    plain = decoded(arch, [], 16, drafting)
    watched = decoded(arch, [Way("router", 1, 2), Way("router", 1, 4, 0.5)], 16, drafting)
    assert watched[0] == plain[0] and watched[2].n_steps > 10
    assert set(watched[1]) == set(plain[1])
    for name, values in plain[1].items():
        assert np.array_equal(values, watched[1][name]), name
    records = list(watched[2].records.values())
    assert 0 < records[0].useful.sum() <= records[0].misses.sum()
    assert watched[2].n_tokens > watched[2].n_steps or not drafting


def constant(c: Any, favored: tuple[int, ...], path: Any, value: float) -> Pregate:
    """Predictors that always say the same experts; chances: all of them `value`."""
    bias = np.zeros(c.n_expert, np.float32)
    bias[list(favored)] = 9
    one = Trained(np.zeros((c.n_expert, c.n_embd), np.float32), bias)
    tables = {pair: (np.array([-1.0, 1.0]), np.array([0.0, value])) for pair in pairs(c.moe_layers)}
    return Pregate(path, c.eps, {"linear": dict.fromkeys(pairs(c.moe_layers), one)}, {"linear": tables})


def test_a_file_predicts_with_its_chances(tmp_path):
    loaded = load(options())
    c = loaded.source.config
    favored = tuple(range(c.n_expert_used))
    ways = [Way("linear", 1, 4, threshold) for threshold in (0.0, 0.65, 0.75)]
    watching = guessing(loaded, ways, constant(c, favored, tmp_path, 0.7))
    L, E, A = len(c.moe_layers), c.n_expert, c.n_expert_used
    slot_of = np.full((L, E), -1, np.int32)
    slot_of[:, 1] = 0
    experts = np.broadcast_to(np.arange(E - A, E)[None, None], (L, 1, A))
    watching._count(slot_of, np.ones((c.n_layer, 1, c.n_embd), np.float32), experts.astype(np.int32))
    made = [record.made.tolist() for record in watching.records.values()]
    first = [0, *[min(4, A - 1)] * (L - 1)]
    assert made == [first, first, [0] * L]
    for _ in range(40):  # nothing comes of them: what 70% promised is no more than a half
        watching._count(slot_of, np.ones((c.n_layer, 1, c.n_embd), np.float32), experts.astype(np.int32))
    made = [record.made.tolist()[1] for record in watching.records.values()]
    assert made[0] == 41 * first[1] and made[1] < 10 * first[1]
    loaded.close()


def test_the_engine_counts_where_it_is_asked_to():
    prompt = tuple(PROMPTS[0].tolist())
    engine = Engine(options(guess="count"))
    assert engine.ready()["guess"] == "count" and any("early" in reason for reason in engine.ready()["reasons"])
    counted, _ = generate(engine, prompt, max_tokens=12)
    found = engine.stats()["guesses"]
    assert {
        "source": "router",
        "ahead": 1,
        "budget": 2,
        "threshold": 0.5,
        "steps": 11,
        "tokens": 11,
    }.items() <= found.items()
    assert found["made"] == found["useful"] + found["wasted"] and found["misses"] > 0
    engine.close()
    engine = Engine(options())
    assert engine.ready()["guess"] == "off" and engine.stats()["guesses"] == {}
    assert generate(engine, prompt, max_tokens=12)[0] == counted
    engine.close()


def test_a_file_that_is_none_is_refused_where_it_is_read(tmp_path):
    bad = tmp_path / "p.safetensors"
    bad.write_bytes(b"no such thing")
    with pytest.raises(FileFormatError, match="no whole safetensors file"):
        load(options(guess="count", pregate=bad))
    with pytest.raises(FileFormatError, match="cannot read pre-gates"):
        load(options(guess="count", pregate=tmp_path / "none"))
    load(options(pregate=bad)).close()  # nobody guesses
    assert default_path(bad).name == "p.safetensors.pregate.safetensors"


@pytest.mark.usefixtures("on_the_device")
def test_nothing_is_counted_on_a_gpu():
    with pytest.raises(UsageError, match="counts guesses on a host, found a GPU"):
        load(options(guess="count", device="cuda"))


def test_what_a_draft_had_for_nothing_is_guessed_next():
    loaded = load(options())
    follow = Says(lambda reply: (7, 9, 4)[: min(3, reply.left - 1)] if len(reply.history) % 3 else ())
    decoder, way = Decoder(loaded.steps, loaded.drawer, follow), Way("draft", 0, 2)
    watching = decoder.guessing = decoder.forecast = guessing(loaded, [way])
    told: list[Any] = []
    real, listen = watching._count, watching.verified

    def count(slot_of: Any, hidden: Any, experts: Any) -> None:
        told.append((slot_of.copy(), experts.copy()))
        real(slot_of, hidden, experts)

    def verified(routed: Any) -> Any:
        told.append(routed)
        return listen(routed)

    watching._count, watching.verified = count, verified  # type: ignore[method-assign]
    said(loaded, decoder, PROMPTS, SAMPLING, 20)
    L = len(loaded.source.config.moe_layers)
    expected, n = np.zeros((3, L), int), 0
    for routed, step in pairwise(told):
        if isinstance(routed, tuple) or routed.stayed.all():
            continue
        n += 1
        for m, (slots, experts) in enumerate(zip(*step, strict=True)):
            gone = routed.experts[m][~routed.stayed].ravel().tolist()
            guessed = [e for e in dict.fromkeys(gone) if slots[e] < 0][: way.budget]
            missed = {e for e in experts.ravel().tolist() if slots[e] < 0}
            expected[:, m] += len(guessed), len(missed & set(guessed)), len(missed)
    record = watching.records[way]
    assert n > 5 and record.steps.tolist() == [n] * L < [watching.n_steps] * L
    assert np.array_equal(expected, [record.made, record.useful, record.misses]) and record.made.sum() > 0
    loaded.close()
