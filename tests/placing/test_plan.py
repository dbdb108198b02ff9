"""The memory plan: never above the cap, the most slots that fit, and refusals that name what would do."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.full_shape import SHAPES
from engine.formats.gguf import open_header
from engine.formats.profile import Profile
from engine.ground.config import EngineConfig
from engine.ground.errors import CapacityError, UsageError
from engine.models import qwen3moe
from engine.ops.cuda.counting import CountingDevice
from engine.ops.cuda.device import Device, Module
from engine.placing import placement, plan, policies
from engine.placing.placement import Experts
from engine.placing.plan import Fixed, MemoryPlan, most_slots, smallest_cap
from engine.running import dryrun, probe
from spark.daemon.client import Deadlines
from spark.pipeline import ladder as ladder_of
from tests import published_headers
from tests.published_headers import HEADERS
from tests.tiny_models import k_quant_mix, write_tiny

MIB = 1 << 20
GIB = 1 << 30


@st.composite
def models(draw: st.DrawFn) -> Experts:
    n_layer, n_expert = draw(st.integers(1, 5)), draw(st.integers(2, 9))
    counts = draw(st.lists(st.integers(0, 9), min_size=n_layer * n_expert, max_size=n_layer * n_expert))
    sizes = draw(st.lists(st.integers(1, 40).map(lambda n: n * MIB), min_size=n_layer, max_size=n_layer))
    return Experts(
        np.array(counts, np.int64).reshape(n_layer, n_expert), sizes, [n + 3 * 192 for n in sizes],
        n_used=draw(st.integers(1, n_expert)),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(experts=models(), fixed=st.integers(0, 200 * MIB), spare=st.integers(0, 2000 * MIB))
def test_the_share_fits_and_placement_makes_exactly_it(experts: Experts, fixed: int, spare: int) -> None:
    cap = smallest_cap(fixed, experts) + spare
    share = most_slots(fixed, cap, experts)
    assert fixed + share.bytes <= cap
    n_expert = experts.counts.shape[1]
    if share.resident:
        made = placement.everything(n_expert, experts.slot_bytes)
    else:
        made = placement.greedy(experts.counts, experts.slot_bytes, share.slots_bytes, n_expert_used=experts.n_used)
    assert made.bytes == share.slots_bytes
    assert plan.share_of(made, experts) == share
    assert share.resident == (fixed + experts.bytes <= cap)


@settings(max_examples=200, deadline=None)
@given(experts=models(), fixed=st.integers(0, 200 * MIB), a=st.integers(0, 999 * MIB), b=st.integers(0, 999 * MIB))
def test_more_memory_never_gives_fewer_slots(experts: Experts, fixed: int, a: int, b: int) -> None:
    least = smallest_cap(fixed, experts)
    small, large = (most_slots(fixed, least + n, experts) for n in sorted((a, b)))
    assert small.slots_bytes <= large.slots_bytes


@settings(max_examples=200, deadline=None)
@given(experts=models(), fixed=st.integers(0, 200 * MIB), short=st.integers(1, 300 * MIB))
def test_a_refusal_names_the_smallest_cap(experts: Experts, fixed: int, short: int) -> None:
    least = smallest_cap(fixed, experts)
    with pytest.raises(CapacityError) as refused:
        most_slots(fixed, least - short, experts)
    named = re.search(r"--vram ([\d.]+) ", refused.value.hint)
    assert named
    most_slots(fixed, plan.cap_bytes(float(named[1])), experts)
    with pytest.raises(CapacityError):
        most_slots(fixed, least - 1, experts)
    assert plan.cap_bytes(float(named[1])) - least < 2 * MIB


@given(st.integers(0, 1 << 40))
def test_a_named_cap_is_enough_when_typed(n_bytes: int) -> None:
    typed = Fraction(plan.gib(n_bytes))
    assert floor(typed * plan.GIB) >= n_bytes
    assert plan.cap_bytes(float(plan.gib(n_bytes))) >= n_bytes


def test_uniform_and_lru_slots_are_those_of_the_plan() -> None:
    sizes = [2 * MIB, 3 * MIB, 2 * MIB] * 4
    experts = Experts(np.zeros((12, 16), np.int64), sizes, sizes, n_used=4)
    share = most_slots(10 * MIB, 400 * MIB, experts)
    assert share.staging_bytes == 2 * (16 - 13) * 3 * MIB and not share.resident
    assert 400 - 3 <= (10 * MIB + share.bytes) / MIB <= 400
    for place in (placement.uniform, placement.lru):
        assert place(16, sizes, share.slots_bytes).bytes == share.slots_bytes
    assert most_slots(10 * MIB, (10 + 16 * 28) * MIB, experts).resident


def test_a_layer_without_counts_gets_no_slots_and_is_staged_whole() -> None:
    counts = np.array([[5, 4, 3, 2]] * 9 + [[0] * 4], np.int64)
    experts = Experts(counts, [MIB] * 10, [MIB] * 10, n_used=2)
    share = most_slots(0, 39 * MIB, experts)
    assert (share.slots_bytes, share.staging_bytes) == (31 * MIB, 8 * MIB)
    assert most_slots(0, 40 * MIB, experts) == plan.Share(40 * MIB, 0, resident=True)


def test_what_was_asked_for_is_refused_where_it_does_not_fit() -> None:
    sizes = [2 * MIB] * 3
    experts = Experts(np.zeros((3, 8), np.int64), sizes, sizes, n_used=2)
    placed = placement.uniform(8, sizes, 24 * MIB)
    share = plan.share_of(placed, experts)
    assert (share.slots_bytes, share.staging_bytes) == (24 * MIB, 2 * 4 * 2 * MIB)
    plan.require(5 * MIB, share, 45 * MIB)
    with pytest.raises(CapacityError, match=r"0\.044 GiB"):
        plan.require(5 * MIB, share, 45 * MIB - 1)


def test_chunks_shrink_with_memory() -> None:
    def buffers(n: int) -> int:
        return n << 17  # 512 MiB for 4,096 tokens

    assert plan.chunks(4 << 30, buffers) == [4096, 2048, 1024, 512]
    assert plan.chunks((4 << 30) - 1, buffers) == [2048, 1024, 512]
    assert plan.chunks(0, buffers) == [512]


def test_the_parts_add_up() -> None:
    share = plan.Share(900, 50, resident=False)
    made = MemoryPlan(Fixed(1, 20, 300, 4000), share, 2000, 1100, 6000).to_json()
    parts = ("context", "dense", "kv", "buffers", "staging", "slots")
    assert made["device_bytes"] == sum(made[f"{p}_bytes"] for p in parts) == 5271


# --- a model of real size, without a byte of weights --------------------------------------------------


ARCH, CONFIG = SHAPES["qwen3-30b-a3b"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of Qwen3-30B-A3B's shapes, in the types of a Q4_K_M file, with nothing behind them."""
    name = "Qwen3-30B-A3B-Q4_K_M"
    model = replace(HEADERS[name], types=lambda tensor, _: k_quant_mix(tensor))
    with open_header(published_headers.write(tmp_path_factory.mktemp("plan"), name, model, n_vocab=400)[0]) as file:
        return ARCH.load(file, CONFIG)


def decide(weights: Any, vram_gib: float, n_ctx: int = 32768, **options: Any) -> dryrun.Decision:
    config = EngineConfig(Path("m"), **{"device": "cuda", "policy": "spark"} | options)
    like = CountingDevice("sm_90", 132, 227 << 10)
    sharing = dryrun.Sharing(config, ARCH, CONFIG, weights, n_ctx, None, like)
    return sharing.decide(cap_bytes=plan.cap_bytes(vram_gib), context_bytes=plan.CONTEXT_BYTES)


@pytest.mark.slow
def test_a_30b_model_on_common_cards(weights: Any) -> None:
    before = -1.0
    for vram, least, most in ((8, 8, 25), (12, 30, 55), (16, 55, 80), (24, 100, 100)):
        made = decide(weights, vram)
        resident = 100 * made.placement.bytes / made.plan.experts_bytes
        assert least <= resident <= most and resident > before, (vram, resident)
        before = resident
        assert made.plan.device_bytes <= vram * GIB
        left = vram * GIB - made.plan.device_bytes
        assert left < 4 * MIB or made.plan.share.resident
        assert made.plan.host_bytes == made.plan.experts_bytes - sum(
            len(inside) * size for inside, size in zip(made.placement.pinned, made.placement.expert_bytes, strict=True)
        )
        assert made.staging_bytes * 2 == made.plan.share.staging_bytes
        assert Module("embed.cu", (("TYPE", "Q6_K"),)) in made.modules


@pytest.mark.slow
def test_a_smaller_cache_leaves_more_slots(weights: Any) -> None:
    wide, narrow, eight = decide(weights, 12), decide(weights, 12, 4096), decide(weights, 12, kv_type="q8_0")
    assert wide.placement.bytes < min(narrow.placement.bytes, eight.placement.bytes)
    assert wide.plan.fixed.kv_bytes == 48 * 2 * 32768 * 4 * 128 * 2


@pytest.mark.slow
def test_refusals_name_a_cap_that_works(weights: Any) -> None:
    with pytest.raises(CapacityError) as refused:
        decide(weights, 5)
    named = re.search(r"--vram ([\d.]+) ", refused.value.hint)
    assert named
    made = decide(weights, float(named[1]))
    assert min(made.placement.slots_per_layer) == 8
    with pytest.raises(CapacityError):
        decide(weights, float(named[1]) - 0.002)


@pytest.mark.slow
def test_a_residency_that_was_asked_for_is_exact_or_refused(weights: Any) -> None:
    made = decide(weights, 16, residency_pct=40.0)
    assert 39.9 < 100 * made.placement.bytes / made.plan.experts_bytes <= 40
    assert made.plan.device_bytes < 14 * GIB
    for options in ({"residency_pct": 90.0}, {"policy": "all"}):
        with pytest.raises(CapacityError, match="slots that were asked for"):
            decide(weights, 12, **options)
    assert decide(weights, 24, policy="all").plan.host_bytes == 0


@pytest.mark.parametrize("policy", ["uniform", "lru", "spark"])
def test_every_policy_fills_the_card(weights: Any, policy: str) -> None:
    made = decide(weights, 12, policy=policy, chunk_tokens=512)
    assert 12 * GIB - 4 * MIB < made.plan.device_bytes <= 12 * GIB
    assert made.limits.max_tokens == 512
    pinned = sum(map(len, made.placement.pinned))
    assert (pinned == 0) == (policy != "uniform")


@pytest.mark.slow
def test_the_placement_by_a_profile_needs_one(weights: Any) -> None:
    with pytest.raises(UsageError, match="`static` places by a profile"):
        decide(weights, 12, policy="static")
    assert "the memory to experts" in decide(weights, 12).reasons[0]


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a placement is made of counts, and slots are put in order; the dictionary grows as it happens."""
    calls = {"order": 0, "best": 0, "count": 0}

    def counting(module: Any, name: str) -> None:
        called = getattr(module, name)

        def again(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return called(*args, **options)

        monkeypatch.setattr(module, name, again)

    counting(placement, "order")
    counting(dryrun, "count")
    records = []
    for record in policies.POLICIES:
        def place(experts: Experts, budget: int, record: policies.Policy = record) -> placement.Placement:
            calls["best"] += 1
            return record.place(experts, budget)

        records.append(replace(record, place=place))
    monkeypatch.setattr(policies, "POLICIES", tuple(records))
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("residency_pct", [100.0, 30.0])
@pytest.mark.parametrize("name", [p.name for p in policies.POLICIES if not p.whole])
def test_a_placement_is_made_once_a_decision(
    weights: Any, monkeypatch: pytest.MonkeyPatch, name: str, residency_pct: float
) -> None:
    """However many lengths of step are tried; and what no cap changes once for all decisions of a load."""
    calls = counted(monkeypatch)
    c = CONFIG
    profile = Profile(np.random.default_rng(3).integers(1, 99, (c.n_layer, c.n_expert)), c.n_expert_used)
    config = EngineConfig(Path("m"), "cuda", name, residency_pct=residency_pct)
    sharing = dryrun.Sharing(config, qwen3moe, c, weights, 32768, profile, CountingDevice("sm_90", 132, 227 << 10))
    share, tried = sharing._share, []

    def refusing(fixed_bytes: int, cap: int) -> plan.Share:
        tried.append(share(fixed_bytes, cap))
        if len(tried) == 1:
            raise CapacityError("a shorter chunk may yet fit")
        return tried[-1]

    monkeypatch.setattr(sharing, "_share", refusing)
    first = sharing.decide(cap_bytes=12 * GIB, context_bytes=plan.CONTEXT_BYTES)
    assert len(tried) == 2
    assert (calls["best"], calls["order"]) == (1, 1)
    assert first.placement.bytes == first.plan.share.slots_bytes  # it is planned for as it is placed
    n_counts = calls["count"]
    second = sharing.decide(cap_bytes=12 * GIB, context_bytes=plan.CONTEXT_BYTES + (512 << 20))
    asked = residency_pct < 100
    assert calls["best"] == (1 if asked else 2) and calls["order"] == 1
    # Lengths of step that were counted are known; the one that was refused above is now tried for the second time.
    assert calls["count"] == n_counts
    assert (first.placement == second.placement) == asked
    assert second.plan.fixed.context_bytes - first.plan.fixed.context_bytes == 512 << 20
    fresh = dryrun.Sharing(config, qwen3moe, c, weights, 32768, profile, CountingDevice("sm_90", 132, 227 << 10))
    alone = fresh.decide(cap_bytes=12 * GIB, context_bytes=plan.CONTEXT_BYTES + (512 << 20))
    assert (alone.placement, alone.plan, alone.kernels) == (second.placement, second.plan, second.kernels)
    assert calls["best"] == (2 if asked else 3)


# --- the daemon's plan, and the device that counts ----------------------------------------------------


def test_plan_only_says_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", k_quant_mix)
    monkeypatch.setattr(probe, "probe", lambda: probe.Missing("none"))
    found = dryrun.plan_only(EngineConfig(model, "cuda"))
    assert (found["gpu"], found["plan"], found["refusal"]) == (None, None, None) and found["file"]["missing"] == []
    found = dryrun.plan_only(EngineConfig(model, "cuda", "lru", vram_gib=2.0, ctx_tokens=100))
    assert found["gpu"] is None and found["residency_pct"] == 100.0 and found["chunk_tokens"] == 100
    assert found["plan"]["device_bytes"] < found["plan"]["cap_bytes"] == 2 * GIB
    assert found["plan"]["context_measured"] is False
    gpu = probe.Found(0, "GPU", (8, 6), 84, 99 << 10, "", 24 * GIB, 20 * GIB, (12, 8))
    monkeypatch.setattr(probe, "probe", lambda: gpu)
    found = dryrun.plan_only(EngineConfig(model, "cuda", "lru"))
    assert found["plan"]["cap_bytes"] == 20 * GIB - plan.SPARE_BYTES and found["gpu"] == gpu.reason
    with pytest.raises(UsageError, match="--ctx 9999"):
        dryrun.plan_only(EngineConfig(model, "cuda", ctx_tokens=9999))


def test_counted_arrays_take_no_memory() -> None:
    counting = CountingDevice()
    device: Device = counting
    large = device.empty((1 << 20, 1 << 18), np.float32)  # a TiB
    assert large.nbytes == 1 << 40 == counting.n_bytes
    assert large[5:7].reshape(-1).view(np.uint8).nbytes == 1 << 21 and not large.flags.writeable
    assert device.pointer(large[1:]) - device.pointer(large) == 1 << 20
    device.empty(3, np.int32)
    assert counting.n_bytes == (1 << 40) + 256
    device.upload(np.ones((2, 3), np.float16))
    assert counting.n_bytes == (1 << 40) + 512
    device.page_locked(100)[:] = 1
    assert counting.host_bytes == 100
    graph = device.capture(lambda: device.kernel(Module("a.cu"), "a")(1, 32, (large, None, 3)))
    graph.launch()
    assert counting.modules == {Module("a.cu")}


def test_validation_compares_with_what_fits_where_not_all_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def open_daemon(config: EngineConfig, *_: Any) -> str:
        asked.append((config.policy, config.residency_pct))
        if config.policy == "all":
            raise CapacityError("too large")
        return "client"

    monkeypatch.setattr(ladder_of.replay, "open_daemon", open_daemon)
    config = EngineConfig(Path("m"), residency_pct=60.0)
    assert ladder_of.open_reference(config, Deadlines(), lambda *_: None) == "client"
    assert asked == [("all", 60.0), ("uniform", 100.0)]
