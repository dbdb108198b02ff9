"""The whole engine on a device: the emulated GPU by default, a real one with `pytest --gpu`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats.profile import Profile
from engine.formats.profile import save as save_profile
from engine.ground import protocol
from engine.ground.errors import CapacityError, DeviceLostError, SparkError, UnsupportedModelError
from engine.ground.protocol import Done, Error, Generate, Score, Tokens
from engine.ground.sampling import Sampling
from engine.ops.cuda import gpu, ops
from engine.ops.cuda.routing import staging_bytes
from engine.placing import plan, policy
from engine.running import dryrun
from engine.running.loaded import load
from engine.running.shares import GRAPH_BYTES
from engine.running.stepping import Span
from engine.serving.scheduler import Engine
from tests.engine_runs import PROMPT, config, feed, generate
from tests.forced_drafts import force
from tests.tiny_models import everything, float_logits, k_quant_mix, nmse, read_weights, write_tiny

L, E, A = 2, 11, 3  # layers, experts, active ones of a model that takes little time to emulate
SMALLER = {"n_layer": L, "n_expert_used": A}
N_TOKENS = 7
pytestmark = pytest.mark.usefixtures("on_the_device")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", k_quant_mix, **SMALLER)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "p.csv"
    counts = np.random.default_rng(3).pareto(1.0, (L, E)) * 1000
    save_profile(Profile(counts.astype(np.int64), n_expert_used=A), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_small_steps_are_near_the_cpu_backend(model: Path, kv_type: str) -> None:
    """One arithmetic, attention apart: steps captured, ordinary, and of as many tokens as that path takes."""
    chunks = [32, 1, 3, 8, 1]
    cpu, cuda = load(config(model, device="cpu", kv_type=kv_type)), load(config(model, kv_type=kv_type))
    expected, found = feed(cpu, PROMPT[:45], chunks), feed(cuda, PROMPT[:45], chunks)
    assert np.isfinite(found[0]).all()
    # The last bit of attention's sums moves an activation to the next of 255 steps now and then, and among eleven
    # random experts two are sometimes as good.
    assert (found[1] == expected[1]).mean() > 0.95
    cpu.close()
    cuda.close()


@pytest.mark.slow
def test_logits_with_the_same_routing_are_near_the_cpu_backends(model: Path, tmp_path: Path) -> None:
    cpu = load(config(model, device="cpu"))
    expected, experts = feed(cpu, PROMPT[:45], [1] * 45)
    np.save(tmp_path / "choices.npy", experts.swapaxes(0, 1))
    cuda = load(config(model, replay=tmp_path / "choices.npy"))
    sequence, found = cuda.kv.sequence(), []
    for token in PROMPT[:45]:
        result = cuda.steps.run([Span(sequence, np.array([token], np.int32), np.ones(1, bool), (0,))])
        found.append(result.logits[0].copy())
    # Attention's sums differ in their last bits, which moves an activation to the next of 255 steps now and then.
    assert nmse(np.stack(found), expected) < 1e-3
    cpu.close()
    cuda.close()


@pytest.mark.slow
def test_imposed_choices_are_taken_one_by_one_from_request_to_request(model: Path, tmp_path: Path) -> None:
    choices = np.stack([np.stack([np.arange(t + layer, t + layer + A) % E for layer in range(L)]) for t in range(17)])
    np.save(tmp_path / "choices.npy", choices)
    engine = Engine(config(model, policy="uniform", residency_pct=40, replay=tmp_path / "choices.npy", draft="off"))
    residency = engine.loaded.residency
    resident = residency.device.read(residency.live.slot_of).copy() >= 0  # uniform's never change
    missing = np.stack([(~resident[np.arange(L)[:, None], step]).sum(axis=1) for step in choices])
    at = 0
    for n in (5, 1, 7, 4, 6):  # a request draws its first token from the prompt
        _, events = generate(engine, tuple(PROMPT[:36].tolist()), max_tokens=n, sampling=SAMPLED)
        done = events[-1]
        assert isinstance(done, Done)
        expected = missing[np.arange(at, at + n - 1) % len(choices)].sum(axis=0)
        assert done.residency["misses_by_layer"] == expected.tolist()
        at += n - 1
    engine.close()


@pytest.mark.slow
def test_a_reply_has_the_same_imposed_choices_with_drafts(model: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    choices = np.stack([np.stack([rng.permutation(E)[:A] for _ in range(L)]) for _ in range(37)])
    np.save(tmp_path / "choices.npy", choices)
    prompt, options = tuple(PROMPT[:36].tolist()), {"policy": "lru", "residency_pct": 40}
    told, counts = [], []
    for draft in ("off", "auto"):
        engine = Engine(config(model, replay=tmp_path / "choices.npy", draft=draft, **options))
        if draft == "auto":
            force(engine, {1: [*prompt, *told[0]]})
        tokens, events = generate(engine, prompt, max_tokens=40, sampling=SAMPLED)
        told.append(tokens)
        counts.append(engine.profile("read")["counts"])
        done = events[-1]
        assert isinstance(done, Done)
        drafts = done.usage.drafts.get("lookup", {"drafted": 0, "accepted": 0})
        assert (drafts["drafted"] > drafts["accepted"] > 0) == (draft == "auto")
        engine.close()
    assert told[0] == told[1] and counts[0] == counts[1]


@pytest.mark.slow
def test_imposed_choices_are_taken_in_turn_by_those_that_share_a_step(model: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    choices = np.stack([np.stack([rng.permutation(E)[:A] for _ in range(L)]) for _ in range(11)])
    np.save(tmp_path / "choices.npy", choices)
    loaded = load(config(model, policy="uniform", residency_pct=40, replay=tmp_path / "choices.npy"))
    sequences = [loaded.kv.sequence() for _ in range(3)]
    for at in (0, 4, 8, 1):  # steps of three are steps of four
        spans = [Span(s, PROMPT[i : i + 1], np.ones(1, bool), (0,)) for i, s in enumerate(sequences)]
        found = loaded.steps.run(spans).experts
        np.testing.assert_array_equal(found, np.moveaxis(choices[(at + np.arange(4)) % 11], 0, 1)[:, :3])
    long = loaded.steps.run([Span(sequences[0], PROMPT[:5], np.ones(5, bool), (4,))]).experts
    assert not np.array_equal(long, np.moveaxis(choices[(5 + np.arange(5)) % 11], 0, 1))
    loaded.close()


def test_prefill_is_near_float64(model: Path) -> None:
    loaded = load(config(model))
    found, experts = feed(loaded, PROMPT[:40], [40])
    oracle, _ = float_logits(loaded.source.config, read_weights(model), PROMPT[:40], experts)
    assert nmse(found, oracle) < 1e-4
    loaded.close()


@pytest.mark.slow
def test_a_row_of_eight_is_a_row_of_one(model: Path) -> None:
    one, eight = load(config(model)), load(config(model))
    a, b = feed(one, PROMPT[:8], [1] * 8)[0], feed(eight, PROMPT[:8], [8])[0]
    assert np.array_equal(a.view(np.uint32), b.view(np.uint32))
    for n, other in ((2, [2] * 4), (4, [4, 4]), (5, [5, 3])):
        again = load(config(model))
        assert np.array_equal(feed(again, PROMPT[:8], other)[0], b), n
        again.close()
    one.close()
    eight.close()


POLICIES = [("lru", 30), ("uniform", 60), ("static", 40), ("spark", 60)]


SAMPLED = Sampling(temperature=0.9, top_p=0.9, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_tokens_do_not_depend_on_residency(model: Path, profile: Path, sampling: Sampling) -> None:
    found = {}
    for name, percent in [("all", 100), *POLICIES]:
        engine = Engine(config(
            model, policy=name, residency_pct=percent, profile=profile if name in ("static", "spark") else None,
            cache_slots=2 if name == "spark" else None,
        ))  # fmt: skip
        found[name] = [generate(engine, tuple(PROMPT[:n].tolist()), sampling=sampling)[0] for n in (36, 20)]
        misses = engine.loaded.residency.totals()["misses"]
        assert (misses == 0) == (name == "all")
        engine.close()
    assert all(len(t) == N_TOKENS for t in found["all"])
    for name, tokens in found.items():
        assert tokens == found["all"], name


@pytest.mark.slow
def test_requests_that_share_steps_say_what_they_would_alone(model: Path) -> None:
    """Three at a time, in steps of four: one captured row is nobody's."""
    samplings = (Sampling(), SAMPLED, Sampling(temperature=0.8, repetition_penalty=1.3, seed=2))
    requests = [
        Generate(i, tuple(PROMPT[:n].tolist()), N_TOKENS - i, sampling, ())
        for i, (n, sampling) in enumerate(zip((36, 9, 21), samplings, strict=True))
    ]
    expected = {}
    for request in requests:
        engine = Engine(config(model, policy="lru", residency_pct=50))
        engine.submit(request)
        expected[request.id] = drained(engine).get(request.id)
        engine.close()
    engine = Engine(config(model, policy="lru", residency_pct=50))
    for request in requests:
        engine.submit(request)
    assert drained(engine) == expected
    # One runs ahead when another comes, and goes on when it has gone.
    engine.submit(replace(requests[0], max_tokens=30))
    early = [token for _ in range(2) for e in engine.step() if isinstance(e, Tokens) for token in e.tokens]
    engine.submit(requests[1])
    found = drained(engine)
    found[0] = early + found.get(0, [])
    assert found[1] == expected[1]
    assert found[0][: len(expected[0])] == expected[0]
    assert len(found[0]) == 30
    engine.close()


def drained(engine: Engine) -> dict[int, list[int]]:
    """The tokens of every request, from its first unsent one on."""
    found: dict[int, list[int]] = {}
    while engine.busy:
        for event in engine.step():
            assert not isinstance(event, Error), event
            if isinstance(event, Tokens):
                found.setdefault(event.id, []).extend(event.tokens)
    return found


@pytest.mark.slow
def test_an_id_that_is_used_again_has_its_own_sampling(model: Path) -> None:
    found = []
    for before in (True, False):
        engine = Engine(config(model))
        if before:
            penalized = Sampling(1.0, repetition_penalty=1.5, seed=3)
            engine.submit(Generate(1, tuple(PROMPT[:20].tolist()), 1, penalized, ()))
            drained(engine)
        engine.submit(Generate(1, tuple(PROMPT[:21].tolist()), 1, Sampling(5.0, seed=99), ()))
        found.append(drained(engine))
        engine.close()
    assert found[0] == found[1]


@pytest.mark.slow
def test_tables_after_decoding_are_the_twins(model: Path) -> None:
    loaded = load(config(model, policy="lru", residency_pct=50))
    twin = policy.SlotState.empty(loaded.shares.placement.slots_per_layer, E)
    policy.fill(twin, loaded.shares.placement)
    sequence = loaded.kv.sequence()
    for n in (40, 1, 1, 2, 4, 7, 1):
        tokens = np.random.default_rng(n).integers(0, 301, n).astype(np.int32)
        counted = np.arange(n) % 3 != 1
        experts = loaded.steps.run([Span(sequence, tokens, counted)]).experts
        for layer in range(L):
            policy.advance(twin, layer, experts[layer], counted, loaded.shares.rule)
    state = loaded.residency.pull()
    for name in ("slot_of", "expert_of", "heat", "clock", "counts", "hits", "misses"):
        assert np.array_equal(getattr(state, name), getattr(twin, name)), name
    loaded.close()


@pytest.mark.slow
def test_nothing_moves_after_a_stop_token(model: Path) -> None:
    engine = Engine(config(model, policy="lru", residency_pct=50))
    tokens, _ = generate(engine, tuple(PROMPT[:35].tolist()), max_tokens=20)
    engine.close()
    stop = tokens[5]
    at = tokens.index(stop)
    engine = Engine(config(model, policy="lru", residency_pct=50))
    until, events = generate(engine, tuple(PROMPT[:35].tolist()), max_tokens=20, stop_tokens=(stop,))
    assert until == tokens[:at]
    assert isinstance(events[-1], Done)
    assert events[-1].finish_reason == "stop"
    total = engine.loaded.residency.totals()
    # Every token that was fed counts, and no other: those before the stop token.
    assert total["hits"] + total["misses"] == at * L * A
    assert int(engine.loaded.residency.pull().clock[0]) == 1 + at
    again, _ = generate(engine, tuple(PROMPT[:35].tolist()), max_tokens=20)
    assert again == tokens
    engine.close()


@pytest.mark.slow
def test_pinned_slots_follow_the_counts(model: Path, profile: Path) -> None:
    engine = Engine(config(model, policy="spark", residency_pct=60, cache_slots=2, profile=profile))
    full = Engine(config(model))
    prompt = tuple(PROMPT[:37].tolist())
    expected, _ = generate(full, prompt)
    assert generate(engine, prompt)[0] == expected
    residency = engine.loaded.residency
    before = residency.pull().expert_of.copy()
    moved = residency.follow(np.random.default_rng(9).pareto(1.0, (L, E)) * 10**6)
    assert moved > 0
    assert not np.array_equal(residency.pull().expert_of, before)
    assert generate(engine, prompt)[0] == expected
    engine.close()
    full.close()


@pytest.mark.slow
def test_score_and_a_trace(model: Path, tmp_path: Path) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        engine = Engine(config(model, device=device))
        engine.submit(Score(
            1, tuple(PROMPT[:45].tolist()), logprobs=True, trace_dir=str(tmp_path / device), session_id="s", hidden=True
        ))  # fmt: skip
        while engine.busy:
            event = engine.step()[-1]
        assert isinstance(event, Done)
        found[device] = event
        assert isinstance(generate(engine, (1, 2, 3), max_tokens=2)[1][-1], Done)
        assert engine.loaded.forward.buffers.hidden is None  # no graph is to hold copies of it
        engine.close()
    assert found["cuda"].nll == pytest.approx(found["cpu"].nll, rel=0.02)
    assert sum(1 for _ in (tmp_path / "cuda").iterdir()) == sum(1 for _ in (tmp_path / "cpu").iterdir())


@pytest.mark.slow
def test_nan_logits_are_an_error_and_the_engine_goes_on(model: Path) -> None:
    engine = Engine(config(model))
    norm = engine.loaded.forward.weights.output_norm
    kept = engine.loaded.backend.device.read(norm).copy()
    engine.loaded.backend.device.write(norm, np.full_like(kept, np.nan))
    _, events = generate(engine, tuple(PROMPT[:34].tolist()))
    assert isinstance(events[-1], Error)
    assert events[-1].code == "numerical"
    engine.loaded.backend.device.write(norm, kept)
    assert isinstance(generate(engine, tuple(PROMPT[:34].tolist()))[1][-1], Done)
    engine.close()


@pytest.mark.slow
def test_a_cancelled_request_leaves_no_trace_in_the_next(model: Path, device: Any) -> None:
    engine = Engine(config(model))
    expected, _ = generate(engine, tuple(PROMPT[:12].tolist()))
    engine.submit(Generate(5, tuple(PROMPT[:36].tolist()), 60, stop_tokens=()))
    engine.step()
    assert engine.cancel(5) or device.name != "emulated"  # a GPU may be done with it
    assert generate(engine, tuple(PROMPT[:12].tolist()))[0] == expected
    engine.loaded.prefixes.clear()
    assert engine.loaded.kv.free_blocks == engine.loaded.kv.n_blocks
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("kv_type", "ahead_tokens"), [("f16", 128), ("q8_0", 33)])
def test_a_prompt_of_several_steps(
    model: Path, monkeypatch: pytest.MonkeyPatch, kv_type: str, ahead_tokens: int
) -> None:
    """Long steps bring in what they lack, for themselves or ahead of it; the last step is a short one."""
    monkeypatch.setattr(ops, "AHEAD_TOKENS", ahead_tokens)
    found = []
    for options in ({}, {"policy": "lru", "residency_pct": 30.0}):
        engine = Engine(config(model, kv_type=kv_type, **options))
        tokens, events = generate(engine, tuple(PROMPT.tolist()), max_tokens=4)
        assert isinstance(events[-1], Done), events[-1]
        found.append(tokens)
        if options:
            assert engine.loaded.residency.pull().slot_begin[-1] < L * E / 2
        engine.close()
    assert found[0] == found[1] and len(found[0]) == 4


@pytest.mark.slow
def test_one_engine_after_the_other(model: Path) -> None:
    found = []
    for _ in range(2):
        engine = Engine(config(model, policy="lru", residency_pct=50.0))
        found.append(generate(engine, tuple(PROMPT[:20].tolist()))[0])
        engine.close()
        engine.close()
    assert found[0] == found[1]


# --- loading ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cap_is_kept_and_used(tmp_path: Path, device: Any) -> None:
    # Of two layers staging would hold all that is missing, and nothing would be saved.
    model = write_tiny(tmp_path / "tiny.gguf", k_quant_mix, n_expert_used=A)
    for _ in range(2):  # a GPU's context keeps a few MB of the first model's
        loaded = load(config(model))
        whole = loaded.plan()
        loaded.close()
    cap = (whole["device_bytes"] - whole["slots_bytes"] // 9) / plan.GIB
    engine = Engine(config(model, policy="lru", vram_gib=cap))
    made = engine.loaded.plan()
    assert made["device_bytes"] <= made["cap_bytes"] == plan.cap_bytes(cap)
    assert 0 < made["slots_bytes"] < whole["slots_bytes"]
    slots, staged = (max(f(e.part_bytes) for e in engine.loaded.source.weights.experts) for f in (sum, staging_bytes))
    assert made["cap_bytes"] - made["device_bytes"] < slots + 2 * staged + 4096  # not one slot more
    assert engine.loaded.residency.tier.n_bytes == made["host_bytes"]
    generate(engine, tuple(PROMPT[:36].tolist()))
    if device.name == "emulated":
        used = engine.loaded.backend.device.used
        assert made["device_bytes"] - GRAPH_BYTES - 4096 < used <= made["device_bytes"] - GRAPH_BYTES
    engine.close()


def test_loading_is_told_in_stages(model: Path) -> None:
    said: list[tuple[str, int, int]] = []
    loaded = load(config(model, policy="lru", residency_pct=50.0), lambda *now: said.append(now))
    for stage in protocol.STAGES:
        done = [now[1] for now in said if now[0] == stage]
        assert done == sorted(done) and {now[2] for now in said if now[0] == stage} == {done[-1]}
    experts = sum(t.nbytes for e in loaded.source.weights.experts for t in e.parts)
    in_slots = sum(sum(e.part_bytes) * len(inside) for e, inside in zip(
        loaded.source.weights.experts, loaded.shares.placement.residents, strict=True
    ))  # fmt: skip
    # Every expert has a place in the tier, and some are in slots too; norms are not among the dense matrices.
    assert 0 < said[-1][2] - experts - in_slots - loaded.source.weights.dense_bytes < 50_000
    loaded.close()


def test_auto_takes_the_gpu_and_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(config(model, device="auto"))
    assert loaded.backend.name == "cuda" and loaded.reasons[0].startswith("device cuda: there is a GPU: ")
    loaded.close()

    def refuse(index: int) -> None:
        raise SparkError("NVRTC is not installed")

    monkeypatch.setattr(gpu, "open_device", refuse)
    loaded = load(config(model, device="auto"))
    assert loaded.backend.name == "cpu"
    assert loaded.reasons[0] == "device cpu: the GPU cannot be used: NVRTC is not installed"
    loaded.close()
    with pytest.raises(SparkError, match="NVRTC"):
        load(config(model))


def mixed(name: str) -> QType:
    return QType.F16 if "ffn_up_exps" in name else k_quant_mix(name)


@pytest.mark.parametrize(
    ("types", "smaller", "what"),
    [(mixed, {}, "FFN of types Q4_K, F16"), (everything(QType.F16), {"head_dim": 20}, "heads of 20")],
)
def test_a_model_without_kernels_is_refused(tmp_path: Path, types: Any, smaller: dict[str, int], what: str) -> None:
    path = write_tiny(tmp_path / "odd.gguf", types, **SMALLER, **smaller)
    with pytest.raises(UnsupportedModelError, match=what) as refused:
        load(config(path, vram_gib=1.0))
    assert refused.value.hint == "use --device cpu"
    planned = dryrun.plan_only(config(path, vram_gib=1.0))
    assert planned["plan"] is None and planned["file"]["missing"] == []  # the CPU has them
    assert planned["refusal"]["message"] == refused.value.message


# --- failures -----------------------------------------------------------------------------------------


class CudaError(RuntimeError):
    """As CuPy raises them."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


def failing(status: int) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise CudaError(status)

    return fail


@pytest.mark.parametrize(("status", "error"), [(2, CapacityError), (719, DeviceLostError), (100, SparkError)])
def test_a_failure_while_loading_is_explained(
    model: Path, device: Any, monkeypatch: pytest.MonkeyPatch, status: int, error: type[SparkError]
) -> None:
    monkeypatch.setattr(type(device), "copy", failing(status))
    with pytest.raises(error, match=f"CUDA error {status}, loading the model") as caught:
        load(config(model))
    assert type(caught.value) is error and caught.value.hint


@pytest.mark.slow
def test_a_request_that_takes_too_much_memory_fails_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(config(model))
    with monkeypatch.context() as patched:
        patched.setattr(engine.loaded.backend.device, "capture", failing(2))
        _, events = generate(engine, tuple(PROMPT[:12].tolist()))
        assert isinstance(events[-1], Error) and events[-1].code == "capacity"
    assert isinstance(generate(engine, tuple(PROMPT[:12].tolist()))[1][-1], Done)
    engine.close()


@pytest.mark.parametrize("name", ["read", "capture", "write"])
def test_a_lost_gpu_ends_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    engine = Engine(config(model))
    with monkeypatch.context() as patched:
        patched.setattr(engine.loaded.backend.device, name, failing(700))
        with pytest.raises(DeviceLostError, match="CUDA error 700"):
            generate(engine, tuple(PROMPT[:12].tolist()))
        if name == "read":
            for ask in (engine.stats, lambda: engine.profile("read"), lambda: engine.profile("write", Path("p"))):
                with pytest.raises(DeviceLostError):
                    ask()
    engine.close()
    assert engine.loaded.kv.free_blocks == engine.loaded.kv.n_blocks
