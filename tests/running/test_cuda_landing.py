"""A whole model on a device to which missed experts are brought before they are asked for: its tokens do not say so."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.routing import guessed, imposed, missed
from engine import models
from engine.formats.pregate import METADATA, default_path, pairs
from engine.ground import cores
from engine.ground.config import EngineConfig
from engine.ground.cores import Cores
from engine.ground.errors import FileFormatError, SparkError, UsageError
from engine.ground.protocol import Error, Event, Generate, Tokens
from engine.ground.sampling import Sampling
from engine.ops.cuda.landing import FIRST_TARGET, SLOTS, Counts
from engine.placing.division import Costs
from engine.placing.guesses import EARLY_WINDOWS, ODD_FIRST, ODD_WITHOUT, Timed
from engine.running import misses, warm
from engine.running.decoding import Nothing
from engine.running.landing import Guesses
from engine.running.loaded import load
from engine.serving.scheduler import Engine
from tests.engine_runs import PROMPT, Says, config, generate
from tests.tiny_models import k_quant_mix, tiny_path, write_tiny
from tests.uncrowded import leave_alone

N_TOKENS = 6
# Less of what emulation spends its time on. Laguna keeps its layers, so that each set of landing slots is used again,
# and qwen3moe the experts of a token, of which a layer can miss more than there are slots.
LESS: dict[str, dict[str, Any]] = {
    "qwen3moe": {},
    "laguna": {"n_expert_used": 3, "n_ff": 1024, "n_ff_shared": 768},
    "gemma4": {
        "n_expert_used": 3, "n_layer": 4, "n_head_kv": (3, 1) * 2, "windowed": (True, False) * 2, "n_ff": (768,) * 4,
    },
    "qwen35moe": {"n_expert_used": 3, "n_ff_shared": 768},
}  # fmt: skip
_folder = tempfile.TemporaryDirectory()  # until the tests end
SAMPLED = Sampling(temperature=0.9, top_p=0.9, seed=5)
on_the_device = pytest.mark.usefixtures("on_the_device")


@functools.cache
def small(arch: str) -> Path:
    path = Path(_folder.name) / f"{arch}.gguf"
    return write_tiny(path, k_quant_mix, arch=models.find(arch), **LESS[arch])


def opened(model: Path, guess: str = "on", **options: Any) -> Engine:
    more = {"policy": "spark", "residency_pct": 40, "prefix_gib": 0.0, "draft": "off"} | options
    return Engine(config(model, guess=guess, **more))


def said_by(engine: Engine, *lengths: int, n_tokens: int = N_TOKENS) -> list[list[int]]:
    """Of prompts of so many tokens."""
    return [
        generate(engine, tuple(PROMPT[:n].tolist()), sampling=SAMPLED, max_tokens=n_tokens)[0] for n in lengths or (4,)
    ]


def is_emulated(engine: Engine) -> bool:
    return engine.loaded.backend.gpu is not None and engine.loaded.backend.gpu.name == "emulated"


@on_the_device
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3moe", "laguna", "gemma4", "qwen35moe"])
def test_tokens_do_not_say_what_was_guessed(arch: str) -> None:
    plain = opened(small(arch), "off")
    assert plain.ready()["guess"] == "off" and plain.stats()["guesses"] == {}
    expected = said_by(plain, 41, 4)  # the first prompt ends in a step of one token
    before = plain.stats()
    plain.close()
    engine = opened(small(arch))
    assert engine.ready()["guess"] == "on"
    assert any("guesses: in every step, by each layer's router" in reason for reason in engine.ready()["reasons"])
    assert said_by(engine, 41, 4) == expected
    after = engine.stats()
    assert after["hits_by_layer"] == before["hits_by_layer"]
    assert after["misses_by_layer"] == before["misses_by_layer"]
    decision, device = engine.loaded.shares.decision, engine.loaded.backend.gpu
    launched = {(module, name) for module, name in vars(device)["_kernels"] if name != "poison"}
    assert decision is not None and launched <= set(decision.kernels)  # all of them were planned
    found = after["guesses"]
    assert found["made"] == found["useful"] + found["wasted"] and 0 < found["useful"] <= found["misses"]
    assert found["useful_bytes"] > 0 < found["wasted_bytes"] and found["steps"] == 2 * (N_TOKENS - 1) + 1
    engine.close()


def write_pregate(path: Path, engine: Engine, seed: int = 3) -> None:
    """MLPs that say whatever they say, and likely enough."""
    source, rng = engine.loaded.source, np.random.default_rng(seed)
    c, H, tensors = source.config, 12, dict[str, Any]()
    for layer, target in pairs(c.moe_layers):
        prefix = f"layers.{layer}.target.{target}.mlp."
        shapes = {
            "weight": (c.n_expert, c.n_embd), "bias": (c.n_expert,), "hidden.weight": (H, c.n_embd),
            "hidden.bias": (H,), "output.weight": (c.n_expert, H),
        }  # fmt: skip
        tensors |= {prefix + name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    tables = [
        {"predictor": "mlp", "layer": a, "target_layer": b, "knots": [-1.0, 1.0], "values": [0.4, 0.9]}
        for a, b in pairs(c.moe_layers)
    ]
    known = {
        "version": 1, "model_id": source.file.model_id, "layers": list(c.moe_layers), "n_embd": c.n_embd,
        "n_expert": c.n_expert, "n_expert_used": c.n_expert_used, "eps": 1e-6, "predictors": ["mlp"], "chances": tables,
    }  # fmt: skip
    save_file(tensors, path, {METADATA: json.dumps(known)})


@on_the_device
@pytest.mark.slow
def test_a_file_beside_the_model_says_who(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", k_quant_mix, **LESS["qwen3moe"])
    plain = opened(model, "off")
    expected = said_by(plain)
    write_pregate(default_path(model), plain)
    plain.close()
    engine = opened(model)
    assert any(f"by mlp of {default_path(model)}" in reason for reason in engine.ready()["reasons"])
    assert said_by(engine) == expected
    assert engine.stats()["guesses"]["source"] == "mlp" and engine.stats()["guesses"]["made"] > 0
    engine.close()
    default_path(model).write_bytes(b"no such thing")
    engine = opened(model)
    assert engine.stats()["guesses"]["source"] == "router" and said_by(engine) == expected
    warned = [r for r in caplog.records if getattr(r, "reason", "") == "pregate"]
    assert len(warned) == 1 and "no whole safetensors file" in warned[0].getMessage()
    engine.close()
    with pytest.raises(FileFormatError, match="no whole safetensors file"):
        opened(model, pregate=default_path(model))


def in_graphs(engine: Engine) -> set[tuple[bool, bool]]:
    """Jobs of the CPU, and guesses, of captured steps that a reply alone draws from."""
    graphs = engine.loaded.steps.graphs
    assert graphs is not None
    return {name[-2:] for name, _ in graphs._captured if isinstance(name, tuple) and name[0] == "ahead"}


@on_the_device
@pytest.mark.slow
def test_steps_that_are_off_have_no_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what they take; each kind is captured when it is needed first, and one in some is of the other."""
    monkeypatch.setattr("engine.placing.guesses.ODD_WITHOUT", 7)
    monkeypatch.setattr("engine.placing.guesses.ODD_FIRST", 100)
    plain, lengths = opened(small("laguna"), "off"), (4, 3, 41)
    expected = said_by(plain, *lengths)
    before = plain.stats()
    plain.close()
    engine = opened(small("laguna"), "auto")
    guesses = engine.loaded.steps.guesses
    assert guesses is not None
    counts = guesses.landing.counts
    assert said_by(engine, lengths[0]) == expected[:1]
    first = counts(wait=True)
    assert first.made > 0 and first.timed.without == 0 and in_graphs(engine) == {(False, True)}
    guesses.gate.with_guesses, guesses.gate._steps, guesses.gate._is_new = False, 0, False
    assert said_by(engine, lengths[1]) == expected[1:2]
    second = counts(wait=True)
    assert second.made == first.made and second.timed.with_ == first.timed.with_
    assert second.timed.without == N_TOKENS - 1 and in_graphs(engine) == {(False, True), (False, False)}
    assert said_by(engine, lengths[2]) == expected[2:]  # of which one is the seventh
    third = counts(wait=True)
    assert third.timed.with_ == second.timed.with_ + 1 and third.made > second.made
    after = engine.stats()
    for name in ("hits_by_layer", "misses_by_layer"):
        assert after[name] == before[name]
    decision, device = engine.loaded.shares.decision, engine.loaded.backend.gpu
    launched = {(module, name) for module, name in vars(device)["_kernels"] if name != "poison"}
    assert decision is not None and launched <= set(decision.kernels)
    engine.close()


@on_the_device
@pytest.mark.slow
def test_both_kinds_are_captured_before_the_first_request() -> None:
    """And what warms up is not counted: a first reply is of the steps that it is of without, some of either kind."""
    n_tokens, options = 2 * ODD_FIRST + 1, {"chunk_tokens": 20}  # a width of its own, and none that takes longer
    cold = opened(small("qwen3moe"), "auto", **options)
    expected, counted = said_by(cold, n_tokens=n_tokens), cold.stats()["guesses"]
    cold.close()
    engine = opened(small("qwen3moe"), "auto", **options)
    assert warm.warm_up(engine.loaded) > 0 and in_graphs(engine) == {(False, True), (False, False)}
    graphs, guesses = engine.loaded.steps.graphs, engine.loaded.steps.guesses
    assert graphs is not None and guesses is not None and guesses.imposed is None
    assert guesses.landing.counts().made > 0 == engine.stats()["guesses"]["made"]
    captured = {*graphs._captured}
    assert said_by(engine, n_tokens=n_tokens) == expected
    assert guesses.counts.timed.without == 2 and {*graphs._captured} == captured
    # How much lands in time, on a GPU, is another thing each time.
    timed = ("made", "useful", "useful_bytes", "wasted_bytes") if is_emulated(engine) else ()
    for name in ("steps", "misses", *timed):
        assert engine.stats()["guesses"][name] == counted[name], name
    engine.close()


@on_the_device
@pytest.mark.slow
def test_a_step_that_fails_leaves_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured next has no branch that began in the step that failed."""
    engine = opened(small("laguna"))
    arch, real = engine.loaded.source.arch, engine.loaded.source.arch.layer

    def layer(p: Any, i: int, weights: Any) -> None:
        if i == 3 and p.b.x.shape[0] == 1:
            raise SparkError("no more")
        real(p, i, weights)

    with monkeypatch.context() as patched:
        patched.setattr(arch, "layer", layer)
        _, events = generate(engine, tuple(PROMPT[:1].tolist()))
        assert any(isinstance(event, Error) and event.message == "no more" for event in events)
    tokens, _ = generate(engine, tuple(PROMPT[:2].tolist()), max_tokens=1)
    assert len(tokens) == 1 and len(said_by(engine)[0]) == N_TOKENS
    engine.close()


@on_the_device
@pytest.mark.slow
def test_beside_jobs_drafts_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU gets what was not guessed; steps of several tokens have no guesses, and leave no trace in the next."""
    leave_alone(monkeypatch)
    monkeypatch.setattr(cores, "find", lambda **_: Cores((-1, -1), "2 cores"))
    monkeypatch.setattr(misses, "measure", lambda *_: Costs(1e7, (2e6, 4e6, 6e6), 1e6))
    monkeypatch.setattr(misses, "SPIN_US", 3e5)
    requests = [Generate(i, tuple(PROMPT[:n].tolist()), N_TOKENS - 2 * i, SAMPLED, ()) for i, n in enumerate((3, 6))]
    told = []
    for more in ({"guess": "off"}, {"guess": "on", "cpu_experts": "auto", "residency_pct": 20, "policy": "uniform"}):
        engine = opened(small("laguna"), **more)
        engine.loaded.decoder.proposer = Says(lambda reply: (7, 9, 4)[: min(3, reply.left - 1)])
        alone = said_by(engine)
        engine.loaded.decoder.proposer = Nothing()
        for request in requests:
            engine.submit(request)
        events: list[Event] = []
        while engine.busy:
            events += engine.step()
        shared = [[t for e in events if isinstance(e, Tokens) and e.id == i for t in e.tokens] for i in (0, 1)]
        told.append((alone, shared))
        stats = engine.stats()
        engine.close()
    assert told[0] == told[1]
    assert stats["guesses"]["useful"] > 0 and stats["cpu_experts"]["computed"] > 0


# Of a reply's steps, by jobs and guesses: each of the four kinds behind each of them.
KINDS = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)


@on_the_device
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3moe", "laguna"])
def test_what_a_step_has_beside_it_may_change_with_every_step(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of the CPU or none, guesses or none, in any order within a reply: no token, table or counter says so."""
    leave_alone(monkeypatch)
    monkeypatch.setattr(cores, "find", lambda **_: Cores((-1, -1), "2 cores"))
    monkeypatch.setattr(misses, "measure", lambda *_: Costs(1e7, (1e7, 2e7, 3e7), 1e6, n_ff=512))
    monkeypatch.setattr(misses, "SPIN_US", 3e5)
    plain = opened(small(arch), "off", residency_pct=30)
    expected = said_by(plain, n_tokens=len(KINDS) + 1) + said_by(plain, 3, n_tokens=3)
    before = plain.stats()
    plain.close()
    engine = opened(small(arch), "auto", residency_pct=30, cpu_experts="auto")
    steps, n = engine.loaded.steps, 0
    assert steps.misses is not None and steps.guesses is not None
    gate = steps.misses.gate

    def look() -> None:
        nonlocal n
        n += 1
        gate.state = ("on", "idle")[KINDS[n % len(KINDS)] // 2]

    monkeypatch.setattr(steps.misses, "look", look)
    monkeypatch.setattr(steps.guesses, "look", lambda: None)
    monkeypatch.setattr(steps.guesses, "next", lambda tries: bool(KINDS[n % len(KINDS)] % 2))
    gate.state = "on"  # as the first kind has it
    assert said_by(engine, n_tokens=len(KINDS) + 1) + said_by(engine, 3, n_tokens=3) == expected
    assert in_graphs(engine) == {(a, b) for a in (False, True) for b in (False, True)} and n >= len(KINDS)
    after = engine.stats()
    for name in ("hits_by_layer", "misses_by_layer", "map"):
        assert after[name] == before[name], name
    assert after["guesses"]["useful"] > 0 < after["cpu_experts"]["computed"] + after["cpu_experts"]["divided"]
    decision, device = engine.loaded.shares.decision, engine.loaded.backend.gpu
    launched = {(module, name) for module, name in vars(device)["_kernels"] if name != "poison"}
    assert decision is not None and launched <= set(decision.kernels)
    engine.close()


@on_the_device
@pytest.mark.slow
def test_guesses_can_be_imposed(tmp_path: Path) -> None:
    """All that misses, in layers that there are guesses for; of no other the token is told."""
    c = opened(tiny_path("laguna"), "off", policy="uniform", residency_pct=60)
    config, placed = c.loaded.source.config, c.loaded.shares.placement
    c.close()
    L, E, A = len(config.moe_layers), config.n_expert, config.n_expert_used
    resident = np.arange(E) < np.array(placed.slots_per_layer)[:, None]
    choices = imposed(resident, 40, A, 0.15, seed=2)
    given = guessed(choices, resident, 1.0, 1.0, SLOTS, seed=3)
    np.save(tmp_path / "choices.npy", choices)
    np.save(tmp_path / "guesses.npy", given)
    files = {"replay": tmp_path / "choices.npy", "replay_guesses": tmp_path / "guesses.npy"}
    replayed = {"policy": "uniform", "residency_pct": 60} | files
    engine = opened(tiny_path("laguna"), **replayed)
    said_by(engine, n_tokens=10)
    found = engine.stats()["guesses"]
    misses_of = missed(choices[:9], resident)[:, FIRST_TARGET:]
    assert found["misses"] == misses_of.sum() and found["wasted"] == 0
    most, last = np.minimum(misses_of, SLOTS).sum(), int(np.minimum(misses_of[-1, -1], SLOTS)) * placed.expert_bytes[-1]
    if is_emulated(engine):
        assert found["useful"] == most > 0
        assert found["wasted_bytes"] == last  # what the last layer has not taken when it is told
    else:
        assert 0 < found["useful"] <= most and found["wasted_bytes"] <= last
    engine.close()
    np.save(tmp_path / "guesses.npy", given[:, :, 1:])
    with pytest.raises(UsageError, match=rf"expected integers \[40, {L}, {SLOTS}\]"):
        opened(tiny_path("laguna"), **replayed)
    np.save(tmp_path / "guesses.npy", given + E)
    with pytest.raises(UsageError, match=f"experts below {E}, or -1"):
        opened(tiny_path("laguna"), **replayed)


class Told:
    """Stands for Landing: the host's side alone."""

    def __init__(self) -> None:
        self.timed = Timed(0, 0, 0, 0)

    def counts(self, wait: bool = False) -> Counts:
        return Counts(9, 4, 7, 900, 300, self.timed)

    def went(self, with_guesses: bool, us: int) -> None:
        """A step."""
        t, n = self.timed, int(with_guesses)
        ns = 1000 * us
        self.timed = Timed(t.without + 1 - n, t.with_ + n, t.without_ns + (1 - n) * ns, t.with_ns + n * ns)


def test_guesses_are_made_while_steps_are_faster_with_them(caplog: pytest.LogCaptureFixture) -> None:
    landing: Any = Told()
    landing.timed = Timed(7, 90, 10**9, 10**9)  # of warming up
    guesses = Guesses(landing, "router")
    guesses.reset()
    assert guesses.stats()["steps"] == guesses.stats()["made"] == 0 and guesses.kinds == (True, False)

    def run(n: int, without_us: int, with_us: int) -> float:
        """So many steps; the share of those with guesses."""
        n_with = 0
        for _ in range(n):
            guesses.look()
            assert guesses.next(False) == guesses.gate.with_guesses
            with_guesses = guesses.next(True)
            n_with += with_guesses
            landing.went(with_guesses, with_us if with_guesses else without_us)
        return n_with / n

    with caplog.at_level("INFO"):
        assert run((EARLY_WINDOWS - 1) * ODD_FIRST, 2000, 2500) == 1 - 1 / ODD_FIRST  # too few to know
        assert guesses.stats()["on"] and guesses.stats()["steps"] == (EARLY_WINDOWS - 1) * (ODD_FIRST - 1)
        assert (guesses.stats()["without_us"], guesses.stats()["with_us"]) == (2000.0, 2500.0)
        run(2 * ODD_FIRST, 2000, 2500)
        assert not guesses.stats()["on"] and guesses.kinds == (False, True)
        assert run(20 * ODD_WITHOUT, 2000, 2500) == 1 / ODD_WITHOUT < 0.01
        assert run(300 * ODD_WITHOUT, 2000, 1800) > 0.5  # what misses is another thing now
    assert guesses.stats()["on"] and guesses.kinds == (True, False)
    assert [r.getMessage() for r in caplog.records] == [
        "guesses of experts are off: steps are not faster with them",
        "guesses of experts are on again: steps are faster with them",
    ]
    for kind in guesses.kinds:
        guesses.imposed = kind
        assert [guesses.next(True) for _ in range(40)] == [kind] * 40 and guesses.next(False)
    forced = Guesses(landing, "router", is_forced=True)
    run(4000, 2000, 4000)
    assert [forced.next(True) for _ in range(40)] == [True] * 40 and forced.kinds == (True,)


def test_what_was_wasted_never_falls() -> None:
    landing: Any = Told()
    guesses, taken = Guesses(landing, "router"), [300, 900, 900, 1000]
    brought = [900, 900, 1500, 1500]
    told = []
    for a, b in zip(taken, brought, strict=True):
        landing.counts = lambda a=a, b=b: Counts(9, 4, 7, b, a, landing.timed)
        told.append(guesses.stats()["wasted_bytes"])
    assert told == sorted(told)


@pytest.mark.slow
@on_the_device
def test_imposed_guesses_without_choices_are_refused(tmp_path: Path) -> None:
    for more in ({"guess": "on"}, {"guess": "off", "replay": tmp_path / "choices.npy"}):
        with pytest.raises(UsageError, match="--replay-guesses says what is guessed with --replay"):
            load(config(tiny_path("qwen3moe"), replay_guesses=tmp_path / "guesses.npy", **more))


def test_where_there_are_none() -> None:
    on_cpu = EngineConfig(model=tiny_path("qwen3moe"), device="cpu", threads=1, ctx_tokens=64, residency_pct=50)
    with pytest.raises(UsageError, match="to a GPU, and this is the CPU"):
        load(replace(on_cpu, guess="on"))
    loaded = load(replace(on_cpu, guess="auto"))
    assert not any(reason.startswith("guesses") for reason in loaded.reasons)  # as nobody expects any
    loaded.close()


@on_the_device
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "percent", "why"), [("qwen3moe", 100, "all experts are resident"), ("qwen35", 40, "all experts")]
)
def test_what_has_nothing_to_guess(arch: str, percent: float, why: str) -> None:
    engine = opened(tiny_path(arch), "auto", residency_pct=percent)
    assert any(f"guesses: none, {why}" in reason for reason in engine.ready()["reasons"])
    assert engine.ready()["guess"] == "off" and engine.stats()["guesses"] == {}
    if percent == 100:  # and nothing is set aside for them
        plain = opened(tiny_path(arch), "off", residency_pct=percent)
        for name in ("dense_bytes", "kv_bytes", "buffers_bytes", "staging_bytes", "slots_bytes"):
            assert engine.ready()["plan"][name] == plain.ready()["plan"][name], name
        plain.close()
    engine.close()
