"""A model's own block drafts on a device: the emulated GPU by default, a real one with `pytest --gpu`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.drafting.gate import Gate
from engine.drafting.outcomes import Record
from engine.drafting.source import Draft
from engine.ground.config import EngineConfig
from engine.ground.errors import CapacityError
from engine.ground.protocol import Done, Event, Generate, Tokens
from engine.ground.sampling import Sampling
from engine.models.layers import Step
from engine.running import device_drafts, draft_files, dryrun, mtp
from engine.running.drafts import Drafts
from engine.running.loaded import Loaded, load
from engine.running.mtp import MOST_TOKENS, Asked, Fed
from engine.running.stepping import Span, Steps
from engine.running.warm import warm_up
from engine.serving.scheduler import Engine
from tests.engine_runs import config, generate
from tests.nextn_models import FAMILIES, apart, block_path
from tests.serving.test_drafts import eager
from tests.telling import Telling, said
from tests.tiny_models import nmse

pytestmark = [pytest.mark.usefixtures("on_the_device"), pytest.mark.slow]

TOKENS = np.random.default_rng(50).integers(0, 301, 60).astype(np.int32)
# Every kind of layer, and no more of it than emulation has time for.
LESS = {
    "qwen35": {"n_layer": 3, "n_ff": 512},
    "qwen35moe": {"n_layer": 3, "n_expert_used": 2, "n_ff_shared": 256},
}


def small(arch: str, own: bool = True, **more: int) -> Path:
    return block_path(arch, own=own, **LESS[arch], **more)


def drafted(loaded: Loaded, chunks: list[int]) -> tuple[tuple[int, ...], np.ndarray]:
    """Three tokens behind so many, and the logits of the last."""
    assert loaded.predictor is not None
    sequence = loaded.kv.sequence()
    for n in chunks:
        span = Span(sequence, TOKENS[sequence.length : sequence.length + n], np.ones(n, bool), (n - 1,))
        loaded.steps.run([span])
        loaded.predictor.follow([Fed(span, n, TOKENS)])
    history = TOKENS[: sequence.length + 1].tolist()
    (draft,) = loaded.predictor.drafts([Asked(sequence, history, 3)])
    assert draft is not None
    logits = np.array(loaded.backend.device.read(loaded.forward.buffers.logits)[0])
    sequence.release()
    return tuple(draft.tokens), logits


# A dense model brings nothing in, and a warm start takes a minute to emulate.
@pytest.mark.parametrize(("arch", "residency", "warm"), [
    ("qwen35", 100, False), ("qwen35moe", 40, False), pytest.param("qwen35moe", 40, True, marks=pytest.mark.on_a_gpu),
])  # fmt: skip
def test_drafts_are_near_those_of_the_cpu(arch: str, residency: int, warm: bool) -> None:
    """In long steps, small and captured ones, and where the model's own experts are brought in."""
    path, chunks = small(arch, own=False), [40, 5, 1, 1]
    cpu = load(config(path, device="cpu", draft="mtp"))
    (tokens, expected), options = drafted(cpu, chunks), {"residency_pct": residency}
    cuda = load(config(path, draft="mtp", **options))
    if warm:
        warm_up(cuda)
    found, logits = drafted(cuda, chunks)
    assert found == tokens and nmse(logits, expected) < 1e-2
    again = drafted(cuda, [40, 2, 3, 1, 1])
    assert again[0] == tokens and np.array_equal(again[1], logits)
    cuda.close()
    cpu.close()


@pytest.mark.parametrize("arch", FAMILIES)
def test_the_plan_has_the_block(arch: str) -> None:
    path = small(arch)
    options: dict[str, Any] = {"ctx_tokens": 130, "chunk_tokens": 40}
    plain, found = (dryrun.plan_only(EngineConfig(path, "cuda", draft=draft, **options)) for draft in ("off", "mtp"))
    loaded = load(config(path, draft="mtp"))
    assert loaded.source.block is not None
    block, size = loaded.source.block, found["plan"]
    assert size["dense_bytes"] >= plain["plan"]["dense_bytes"] + block.nbytes
    assert size["kv_bytes"] > plain["plan"]["kv_bytes"] and "blk.3 drafts" in found["reasons"][0]
    assert loaded.plan()["dense_bytes"] == size["dense_bytes"]
    loaded.close()


@pytest.mark.parametrize("residency", [100, 40])
def test_drafts_change_no_token(residency: int) -> None:
    loaded = load(config(small("qwen35moe"), residency_pct=residency, draft="mtp"))
    prompts, sampling = [TOKENS[:4], TOKENS[20:22]], [Sampling(), Sampling(0.9, seed=4)]
    expected = said(loaded, loaded.decoder, prompts, sampling, 6)
    for decoder in (Telling(loaded, 3), Telling(loaded, 3, expected)):
        assert said(loaded, decoder, prompts, sampling, 6) == expected
    assert decoder.n_right > 2
    loaded.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("arch", "residency"), [("qwen35", 100), ("qwen35moe", 40)])
def test_what_is_under_way_changes_no_token(monkeypatch: pytest.MonkeyPatch, arch: str, residency: int) -> None:
    """Steps are enqueued behind drafts that nobody has waited for: the block's own, and some that are right.

    The block follows them before it is known what stays. Where several samplers draw, that is: not of rows that are no
    vectors, nor where a draw depends on the last.
    """
    monkeypatch.setattr(device_drafts, "TIMED", 0)
    path = small(arch, n_vocab=304)
    options: dict[str, Any] = {"residency_pct": residency, "policy": "lru"} if arch == "qwen35moe" else {}
    penalized = Sampling(0.7, seed=5, frequency_penalty=0.4)
    requests = [
        Generate(1, tuple(TOKENS[:41].tolist()), 11, Sampling(), ()),
        Generate(2, tuple(TOKENS[9:13].tolist()), 10, Sampling(0.9, seed=4), ()),
        Generate(3, tuple(TOKENS[20:23].tolist()), 8, penalized, (), logprobs=1),
    ]

    def told(engine: Engine, request: Generate) -> tuple[list[int], list[Event]]:
        engine.submit(request)
        events = list[Event]()
        while engine.busy:
            events += engine.step()
        return [t for e in events if isinstance(e, Tokens) for t in e.tokens], events

    plain = Engine(config(path, draft="off", **options))
    expected = [told(plain, request)[0] for request in requests]
    plain.close()
    known = [[*r.tokens, *tokens] for r, tokens in zip(requests, expected, strict=True)]
    rng, n_brought, followed, drawn = np.random.default_rng(3), list[int](), list[int](), list[list[int]]()
    draft_of, bring, follow = mtp.ByBlock.draft, Steps._bring_drawn, mtp.Predictor.follow_drawn

    def partly_right(self: mtp.ByBlock, n_tokens: int, sure: bool = False) -> Draft | None:
        made, history = draft_of(self, n_tokens), self._reply.history  # of which nobody knows how sure it is
        if made is None or made.drawn is None:
            return made
        device = self._predictor.device
        drawn.append(device.read(made.drawn).tolist())
        assert drawn[-1] == list(made.tokens)
        if rng.random() < 0.3:
            return made
        (said,) = {tuple(h[len(history) :]) for h in known if h[: len(history)] == history}
        n = int(rng.integers(0, min(len(made.tokens), len(said)) + 1))
        tokens = (said[:n] + (7,) * MOST_TOKENS)[: len(made.tokens)]
        device.write(made.drawn, np.array(tokens, np.int32))
        return replace(made, tokens=tokens)

    def noted(self: Steps, spans: list[Span], step: Step) -> None:
        n_brought.extend(len(s.drawn) for s in spans if s.drawn is not None)
        bring(self, spans, step)

    def follows(self: mtp.Predictor, span: Span, history: list[int], tokens: np.ndarray) -> None:
        followed.append(len(tokens))
        follow(self, span, history, tokens)

    monkeypatch.setattr(mtp.ByBlock, "draft", partly_right)
    monkeypatch.setattr(Steps, "_bring_drawn", noted)
    monkeypatch.setattr(mtp.Predictor, "follow_drawn", follows)
    engine, n_followed = Engine(config(path, draft="mtp", **options)), 0
    eager(engine, "mtp")
    for request, tokens in zip(requests, expected, strict=True):
        found, events = told(engine, request)
        assert isinstance(events[-1], Done)
        drafts = events[-1].usage.drafts["mtp"]
        assert found == tokens and 0 < drafts["accepted"] < drafts["drafted"], drafts
        assert len(followed) > n_followed if request.id < 3 else n_followed == len(followed)
        n_followed = len(followed)
    assert len(n_brought) > 6 and max(n_brought) > 1 and max(followed) > 2
    alone = drawn.copy()
    for request in requests:
        engine.submit(request)
    events = []
    while engine.busy:
        events += engine.step()
    for request, tokens in zip(requests, expected, strict=True):
        assert [t for e in events if isinstance(e, Tokens) and e.id == request.id for t in e.tokens] == tokens
    engine.close()
    # The block is where it is if it follows when all is known.
    rng, n_followed = np.random.default_rng(3), len(followed)
    drawn.clear()
    monkeypatch.setattr(Drafts, "behind", lambda self, proposals: None)
    engine = Engine(config(path, draft="mtp", **options))
    eager(engine, "mtp")
    assert [told(engine, request)[0] for request in requests] == expected
    assert drawn == alone and len({tuple(d) for d in drawn}) > 3 and n_followed == len(followed)
    engine.close()


def test_how_sure_the_block_is_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are waited for, and cut by it; the gate is as sure of its own."""
    path, options = small("qwen35moe", n_vocab=304), {"residency_pct": 40, "policy": "lru"}
    cut = []
    whole = Draft.first

    def noted(self: Draft, n: int) -> Draft | None:
        cut.append((len(self.tokens), n))
        return whole(self, n)

    def judged(self: Gate, draft: Draft, record: Record, fits: Any) -> int:
        assert len(draft.sure) == len(draft.tokens) and all(0 < sure < 1 for sure in draft.sure)
        assert draft.drawn is None
        return (len(cut) * 7 + 3) % (len(draft.tokens) + 1)

    said = []
    for draft in ("off", "mtp"):
        engine = Engine(config(path, draft=draft, **options))
        if draft == "mtp":
            eager(engine, "mtp")
            monkeypatch.setattr(Draft, "first", noted)
            monkeypatch.setattr(Gate, "cut", judged)
            monkeypatch.setattr(Gate, "is_worth_knowing", lambda *_: True)
        said.append([generate(engine, tuple(TOKENS[:n].tolist()), max_tokens=9)[0] for n in (41, 4)])
        engine.close()
    assert said[0] == said[1] and len({n for _, n in cut}) > 2 and any(n < m for m, n in cut)


@pytest.mark.parametrize("is_short", [False, True])
def test_how_sure_the_block_is_follows_from_its_logits(monkeypatch: pytest.MonkeyPatch, is_short: bool) -> None:
    monkeypatch.setattr(mtp, "SHORT_HEAD", 200 if is_short else 1000)
    loaded = load(config(small("qwen35", n_vocab=304), draft="mtp"))
    predictor, device, sequence = loaded.predictor, loaded.backend.device, loaded.kv.sequence()
    assert predictor is not None
    history = (TOKENS[:41] % 200).tolist()
    span = Span(sequence, np.array(history[:-1], np.int32), np.ones(40, bool), (39,))
    loaded.steps.run([span])
    predictor.follow([Fed(span, 40, history)])
    (unknown,) = predictor.drafts([Asked(sequence, history, 4)])
    assert unknown is not None
    device.synchronize()
    tokens = tuple(unknown.tokens)
    for n in (1, 2, 4):
        (draft,) = predictor.drafts([Asked(sequence, history, n)], sure=True)
        assert draft is not None and draft.tokens == tokens[:n] and draft.drawn is None and len(draft.sure) == n
        row = np.array(device.read(loaded.forward.buffers.logits)[0])[: 200 if is_short else 304].astype(np.float64)
        assert draft.sure[-1] == pytest.approx(np.exp(row).max() / np.exp(row).sum(), rel=1e-4)
    loaded.close()


def test_a_short_head_drafts_for_text_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp, "SHORT_HEAD", 200)
    monkeypatch.setattr(mtp, "SOON", 0.05)
    loaded = load(config(small("qwen35", n_vocab=304), draft="mtp"))
    predictor, device, sequence = loaded.predictor, loaded.backend.device, loaded.kv.sequence()
    assert predictor is not None
    history: list[int] = []

    def says(tokens: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
        """A draft behind more tokens, and the logits of its last one."""
        history.extend(tokens.tolist())
        part = np.array(history[sequence.length : -1], np.int32)
        span = Span(sequence, part, np.ones(len(part), bool), (len(part) - 1,))
        loaded.steps.run([span])
        predictor.follow([Fed(span, len(part), history)])
        return drawn()

    def drawn(n: int = 1) -> tuple[tuple[int, ...], np.ndarray]:
        device.write(loaded.forward.buffers.logits[:1], np.full((1, 304), np.nan, np.float32))
        (draft,) = predictor.drafts([Asked(sequence, history, n)])
        assert draft is not None
        device.synchronize()
        return tuple(draft.tokens), np.array(device.read(loaded.forward.buffers.logits)[0])

    for tokens in (TOKENS[:41] % 200, TOKENS[41:44] % 200):
        short, logits = says(tokens)
        assert np.isnan(logits[200:]).all() and short == (int(logits[:200].argmax()),)
        few = drawn(3)[0]
        assert len(few) == 3 and max(few) < 200 and few[0] == short[0]
        with monkeypatch.context() as patch:
            patch.setattr(mtp, "MOST_BEYOND", -1.0)
            one, whole = drawn()
        assert np.array_equal(whole[:200], logits[:200]) and one == (int(whole.argmax()),)
    assert not np.isnan(says(200 + TOKENS[44:50] % 104)[1]).any()  # text of others
    predictor._timed._seconds[1, False, False].append(99.0)  # one that was disturbed is not what each takes
    (draft,) = predictor.drafts([Asked(sequence, history, 1)])
    assert draft is not None and draft.drawn is not None and draft.made_s is not None and draft.made_s < 90.0
    loaded.close()


def test_a_block_in_a_file_of_its_own_has_the_bits_of_one_in_the_models(tmp_path: Path) -> None:
    model, path = apart(tmp_path, "qwen35moe", **LESS["qwen35moe"])
    found = []
    for of, draft in ((small("qwen35moe"), "mtp"), (model, "mtp"), (model, str(path))):
        loaded = load(config(of, draft=draft, residency_pct=40))
        tokens, logits = drafted(loaded, [40, 2, 1])
        plan = loaded.plan()
        # What the driver takes for itself is measured, and another process on the GPU changes it.
        sizes = {key: n for key, n in plan.items() if key not in ("context_bytes", "device_bytes", "cap_bytes")}
        found.append((tokens, logits.tobytes(), sizes))
        loaded.close()
    assert found[0] == found[1] == found[2]


def test_auto_loads_without_a_block_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `auto` has blocks: what was left out when the device was shared out is nowhere afterwards."""
    monkeypatch.setattr(draft_files, "AUTO_HAS_BLOCKS", True)
    loaded = load(config(small("qwen35moe"), draft="auto"))
    assert loaded.predictor is not None and loaded.source.drafts.is_found
    drafts_bytes = loaded.plan()["drafts_bytes"]
    loaded.close()
    decide = dryrun.Sharing._decide

    def full(sharing: dryrun.Sharing, *arguments: Any) -> dryrun.Decision:
        if sharing.drafts.block is not None:
            raise CapacityError("it is too much")
        return decide(sharing, *arguments)

    monkeypatch.setattr(dryrun.Sharing, "_decide", full)
    loaded = load(config(small("qwen35moe"), draft="auto"))
    assert loaded.predictor is None and loaded.forward.block is None and loaded.drafts is not None
    assert loaded.source.warnings == ("no block drafts, since with it there is no plan: it is too much",)
    assert loaded.plan()["drafts_bytes"] == 0 < drafts_bytes
    loaded.close()
    with pytest.raises(CapacityError):
        load(config(small("qwen35moe"), draft="mtp"))
