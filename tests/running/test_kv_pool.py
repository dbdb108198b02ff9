"""A cache larger than its pool: wherever blocks lie, and however they move between steps, the tokens are the same."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.full_shape import SHAPES, mix_of, write_outline
from engine import models
from engine.ground.config import EngineConfig, pool_size
from engine.ground.errors import CapacityError, UnsupportedModelError
from engine.ground.protocol import Error, Event, Generate, Tokens
from engine.ground.sampling import Sampling
from engine.memory.kv import KVCache
from engine.memory.shape import least_pool
from engine.ops.cuda import ops as device_ops
from engine.running import dryrun
from engine.running.stepping import Steps
from engine.serving.scheduler import Engine
from tests.engine_runs import config
from tests.forced_drafts import force
from tests.nextn_models import FAMILIES as WITH_BLOCK
from tests.nextn_models import block_path
from tests.tiny_models import k_quant_mix, write_tiny

CTX, CHUNK, POISON = 1100, 64, 0xFF
_folder = tempfile.TemporaryDirectory()  # until the tests end
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=7)


@functools.cache
def model(family: str) -> Path:
    return write_tiny(Path(_folder.name) / f"{family}.gguf", k_quant_mix, arch=models.find(family), n_ctx_train=4096)


@functools.cache
def slight(family: str) -> Path:
    """The same with fewer experts of a token, for a device that is slow: no cache knows of any."""
    path = Path(_folder.name) / f"slight-{family}.gguf"
    return write_tiny(path, k_quant_mix, arch=models.find(family), n_ctx_train=4096, n_expert_used=2)


def requests(n_vocab: int) -> list[list[Generate]]:
    """Rounds of requests: longer than small pools, two at once, turns that go on from earlier ones."""
    rng = np.random.default_rng(11)
    first, second = (tuple(rng.integers(0, n_vocab, n).tolist()) for n in (419, 331))
    more = tuple(rng.integers(0, n_vocab, 70).tolist())
    return [
        [Generate(1, first, 33, stop_tokens=()), Generate(2, second, 21, SAMPLED, ())],
        [Generate(3, first + more, 19, SAMPLED, ())],
        [Generate(4, second[:200] + more, 17, stop_tokens=()), Generate(5, first[:300], 9, stop_tokens=())],
    ]


def few(n_vocab: int) -> list[list[Generate]]:
    """The same for a device that is slow: alone, ahead of the host, then two that share steps."""
    first, *_, last = requests(n_vocab)
    tokens = first[0].tokens
    return [
        [Generate(1, tokens, 7, stop_tokens=())],
        [
            Generate(2, tokens[:400], 5, SAMPLED, ()),
            Generate(3, tokens[:200] + last[0].tokens[-70:], 6, stop_tokens=()),
        ],
    ]


def said(engine: Engine, rounds: Callable[[int], list[list[Generate]]] = requests) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    asked = rounds(engine.loaded.source.config.n_vocab)
    for some in asked:
        for request in some:
            engine.submit(request)
        events: list[Event] = []
        while engine.busy:
            events += engine.step()
        for event in events:
            assert not isinstance(event, Error), event
            if isinstance(event, Tokens):
                found.setdefault(event.id, []).extend(event.tokens)
    assert {i: len(tokens) for i, tokens in found.items()} == {r.id: r.max_tokens for some in asked for r in some}
    return found


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Blocks move at random between steps, and the place that one leaves is poisoned; how many moved."""
    rng, moved = np.random.default_rng(5), {"home": 0, "back": 0}
    move, run = KVCache._move, Steps.run

    def poisoned(kv: KVCache, group: int, places: Any, homes: Any, to_home: bool) -> int:
        n_bytes = move(kv, group, places, homes, to_home)
        moved["home" if to_home else "back"] += len(places)
        return n_bytes

    def send_home(kv: KVCache, group: int, most: int) -> None:
        places = kv.pools[group].places
        assert places is not None
        before = places.where.copy()
        kv._make_room(group, most)
        for place in before[(before != places.where) & (before < places.n_pool)]:
            for layer in kv.groups[group].layers:
                for array in kv._stores[layer].pool:
                    view = array[int(place) * 64 : (int(place) + 1) * 64]
                    kv.device.set_bytes(kv.device.pointer(view), POISON, int(view.nbytes))

    def shuffled(steps: Steps, spans: Any) -> Any:
        for group, pool in enumerate(steps.forward.kv.pools):
            if pool.places is not None and rng.random() < 0.7:
                send_home(steps.forward.kv, group, int(rng.integers(1, pool.places.n_pool)))
        return run(steps, spans)

    monkeypatch.setattr(KVCache, "_move", poisoned)
    monkeypatch.setattr(Steps, "run", shuffled)
    yield moved


def opened(path: Path, device: str, pool: str, **options: Any) -> Engine:
    options = {"ctx_tokens": CTX, "chunk_tokens": CHUNK, "parallel": 2, "prefix_gib": 0.01, "draft": "off"} | options
    return Engine(config(path, device=device, kv_pool=pool, **options))


def told(
    path: Path, device: str, pool: str, rounds: Callable[[int], list[list[Generate]]] = requests, **options: Any
) -> dict[int, list[int]]:
    engine = opened(path, device, pool, **options)
    try:
        if engine.loaded.kv.is_pooled:
            assert engine.ready()["pool_tokens"] == int(pool)
        return said(engine, rounds)
    finally:
        engine.close()


@functools.cache
def told_without(family: str, kv_type: str = "f16") -> dict[int, list[int]]:
    """What is said where no block is ever away."""
    return told(model(family), "cpu", "auto", requests if kv_type == "f16" else few, kv_type=kv_type)


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0", "q8_0,q4_0"])
@pytest.mark.parametrize("family", models.known())
def test_no_pool_changes_a_token(family: str, kv_type: str, restless: dict[str, int]) -> None:
    """How blocks move depends on no type of theirs: with one there are all rounds and pools, with the others a few."""
    path = model(family)
    is_short = kv_type != "f16"
    options = {"kv_type": kv_type, "rounds": few if is_short else requests}
    try:
        expected = told_without(family, kv_type)
    except UnsupportedModelError as error:  # heads that blocks cannot store
        assert kv_type != "f16"
        pytest.skip(str(error))
    assert not restless["home"]
    for pool in (640,) if is_short else (640, 704, 1100):
        assert told(path, "cpu", str(pool), **options) == expected
    assert restless["home"] > (5 if is_short else 20) and restless["back"] > (0 if is_short else 5)


@pytest.mark.slow
@pytest.mark.parametrize("family", models.known())
def test_no_pool_changes_a_token_with_drafts(family: str, restless: dict[str, int]) -> None:
    path, expected = model(family), told_without(family)
    engine = opened(path, "cpu", "640", draft="auto")
    prompts = {r.id: list(r.tokens) for some in requests(engine.loaded.source.config.n_vocab) for r in some}
    force(engine, {i: prompts[i] + tokens for i, tokens in expected.items()})
    assert said(engine) == expected and restless["home"] > 8
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_BLOCK)
def test_no_pool_changes_a_token_with_a_block(family: str, restless: dict[str, int]) -> None:
    path = block_path(family)
    expected = told(path, "cpu", "auto", draft="off", ctx_tokens=640)
    assert told(path, "cpu", "448", draft="mtp", ctx_tokens=640, parallel=1) == expected and restless["home"] > 5


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize(
    ("family", "kv_type"),
    [
        ("qwen3moe", "q8_0,q4_0"),
        pytest.param("laguna", "f16", marks=pytest.mark.on_a_gpu),
        pytest.param("qwen35moe", "f16", marks=pytest.mark.on_a_gpu),
    ],
)
def test_no_pool_changes_a_token_on_a_device(family: str, kv_type: str, restless: dict[str, int]) -> None:
    """Steps ahead of the host, shared ones, and long ones whose absent blocks come through the staging area."""
    path, options = slight(family), {"kv_type": kv_type, "poison": False, "rounds": few}
    expected = told(path, "cuda", "auto", **options)
    assert told(path, "cuda", "640", **options) == expected and restless["home"] > 5 and restless["back"]


def test_a_pool_of_the_whole_context_needs_no_more() -> None:
    engine = opened(model("qwen3moe"), "cpu", "300", ctx_tokens=300)
    assert not engine.loaded.kv.is_pooled
    engine.close()


@pytest.mark.slow
def test_slots_that_were_asked_for_take_no_pool(outline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dryrun, "available_bytes", lambda: 64 << 30)
    options = {"vram_gib": 24.0, "ctx_tokens": 131072, "chunk_tokens": 512, "parallel": 4, "residency_pct": 40.0}
    assert dryrun.plan_only(EngineConfig(outline, policy="lru", **options))["pool_tokens"] is None


def test_a_pool_that_is_too_small_is_refused() -> None:
    least = least_pool(CHUNK, 2)
    with pytest.raises(CapacityError) as refused:
        opened(model("qwen3moe"), "cpu", str(least - 1))
    assert f"need {least}" in refused.value.message and f"--kv-pool {least}" in refused.value.hint
    opened(model("qwen3moe"), "cpu", str(least)).close()


@pytest.fixture(scope="module")
def outline() -> Path:
    """A file of Qwen3-30B-A3B's shapes, a hole, that was trained on long contexts."""
    path = Path(_folder.name) / "outline.gguf"
    arch, config = SHAPES["qwen3-30b-a3b"]
    config = replace(config, n_ctx_train=262144)
    write_outline(path, config, mix_of(config), arch=arch)
    return path


# GiB of a card, of free host memory, the context, what is expected; the pool and how much of the experts is resident.
PLANS = [
    (48.0, 64, 131072, None, None, 100.0),  # all fits
    (24.0, 64, 131072, None, 32768, 100.0),  # experts get what longer contexts would have
    (24.0, 64, 131072, 65536, 65536, 90.0),
    (24.0, 64, 32768, None, None, 95.0),  # no longer than what is expected
    (24.0, 20, 131072, None, None, 50.0),  # homes would take more than half of the host
    (12.0, 20, 131072, None, 32768, 35.0),  # and there is no plan without
]


@pytest.mark.slow
@pytest.mark.parametrize(("vram", "host", "ctx", "expect", "pool", "resident"), PLANS)
def test_auto_gives_experts_what_contexts_mostly_leave(
    outline: Path, monkeypatch: pytest.MonkeyPatch, vram: float, host: int, ctx: int, expect: int | None,
    pool: int | None, resident: float,
) -> None:  # fmt: skip
    monkeypatch.setattr(dryrun, "available_bytes", lambda: host << 30)
    options = {"vram_gib": vram, "ctx_tokens": ctx, "expect_ctx_tokens": expect, "chunk_tokens": 512, "parallel": 4}
    planned = dryrun.plan_only(EngineConfig(outline, policy="lru", **options))
    assert planned["refusal"] is None and planned["pool_tokens"] == pool
    assert resident <= planned["residency_pct"] < resident + 15
    made, homes = planned["plan"], 0 if pool is None else 96 * 1024 * ctx
    assert made["device_bytes"] <= vram * 2**30 and made["homes_bytes"] == homes <= made["host_bytes"]
    # Of the pool, and a layer's homes to be staged.
    staged = 0 if pool is None else 2048 * (ctx - pool)
    assert 0 <= made["kv_bytes"] - 96 * 1024 * (pool or ctx) - staged < 16 << 20
    assert any("in the pool" in reason for reason in planned["reasons"]) == (pool is not None)


@pytest.mark.parametrize("text", ["6gib", "-1", "0", "GiB", "0GiB", "1e3", "nanGiB", ""])
def test_a_pool_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        pool_size(text)


def test_pools_are_tokens_or_gib() -> None:
    assert (
        pool_size("auto") == (None, None) and pool_size("16384") == (16384, None) and pool_size("6GiB") == (None, 6.0)
    )


@pytest.mark.slow
def test_the_smallest_pool_will_do(restless: dict[str, int]) -> None:
    path = model("qwen3moe")
    assert told(path, "cpu", str(least_pool(CHUNK, 2))) == told(path, "cpu", "auto")


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_device")
def test_who_has_room_for_all_has_nothing_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until something is away, and again when nothing is: each step is the one for that."""
    staged, stage = [0], device_ops.stage

    def noted(*of: Any) -> None:
        staged[0] += 1
        stage(*of)

    monkeypatch.setattr(device_ops, "stage", noted)
    path, tokens = slight("qwen3moe"), requests(301)[1][0].tokens[:451]
    short, long = Generate(1, tokens[:67], 5, stop_tokens=()), Generate(2, tokens, 5, stop_tokens=())
    found = {}
    for pool in ("auto", least := str(least_pool(CHUNK, 1))):
        engine = opened(path, "cuda", pool, parallel=1)
        assert engine.loaded.kv.is_pooled == (pool != "auto") and not engine.loaded.kv.stages
        staged[0] = 0  # of who counted what is launched
        found[pool] = [said(engine, lambda n_vocab: [[short]]), staged[0]]
        found[pool] += [said(engine, lambda n_vocab: [[long]])]
        assert engine.loaded.kv.stages == (pool != "auto") == bool(staged[0])
        found[pool] += [said(engine, lambda n_vocab: [[replace(short, id=3)]])]
        engine.close()
    assert int(least) < len(tokens) and found["auto"] == found[least] and found[least][1] == 0
