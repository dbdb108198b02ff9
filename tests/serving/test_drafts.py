"""Drafts change no token: forced ones of every length, right up to every place and wrong from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine import models
from engine.drafting.source import Draft, Promise
from engine.ground.errors import RequestError, SparkError
from engine.ground.protocol import Done, Error, Event, Generate, Tokens
from engine.ground.sampling import Sampling
from engine.running.decoding import Proposal
from engine.running.reply import Reply
from engine.serving.scheduler import Engine
from tests.dflash_twin import Shape, random_drafter, write_drafter
from tests.engine_runs import config
from tests.forced_drafts import Forced, SomeRight, force
from tests.forms_here import FormHere
from tests.nextn_models import FAMILIES, block_path

ENGINE, CTX_TOKENS = Engine, 640
VARIANTS = {"qwen3moe": {"n_vocab": 304}}  # whole vectors of logits: a drafter leaves its tokens on the device
Open = Callable[..., Engine]
RNG = np.random.default_rng(21)
TEXT = RNG.integers(0, 301, 400).tolist()
GREEDY, SAMPLED = Sampling(), Sampling(0.9, top_p=0.95, seed=4)
PENALIZED = Sampling(0.8, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, seed=9)


def drain(engine: Engine, events: list[Event] | None = None) -> list[Event]:
    events = [] if events is None else events
    while engine.busy:
        events += engine.step()
    assert not [e for e in events if isinstance(e, Error)]
    return events


def said(events: list[Event]) -> dict[int, tuple[list[object], str | None]]:
    """What each request was told: tokens, how likely they were, and why it ended."""
    found: dict[int, list[object]] = {}
    for e in events:
        if isinstance(e, Tokens):
            found.setdefault(e.id, []).extend(zip(e.tokens, e.logprobs or e.tokens, e.top or e.tokens, strict=True))
    return {e.id: (found.get(e.id, []), e.finish_reason) for e in events if isinstance(e, Done)}


def histories(requests: list[Generate], told: dict[int, tuple[list, str | None]]) -> dict[int, list[int]]:
    return {r.id: [*r.tokens, *(row[0] for row in told[r.id][0])] for r in requests}


def done_of(events: list[Event]) -> Done:
    (done,) = [e for e in events if isinstance(e, Done)]
    return done


def drafted(events: list[Event]) -> tuple[int, int]:
    """Tokens that were drafted, and that stayed."""
    found = [e.usage.drafts.get("lookup", {}) for e in events if isinstance(e, Done)]
    return sum(f.get("drafted", 0) for f in found), sum(f.get("accepted", 0) for f in found)


def asked(first: int = 1) -> list[Generate]:
    """Requests of every kind: greedy, sampled, penalized; with likelihoods; of lengths that end among drafts."""
    kinds = [(61, 40, GREEDY, None), (40, 33, SAMPLED, 2), (97, 37, PENALIZED, None), (70, 9, PENALIZED, 1)]
    return [
        Generate(first + i, tuple(TEXT[7 * i : 7 * i + n]), made, sampling, (), logprobs=likely)
        for i, (n, made, sampling, likely) in enumerate(kinds)
    ]


def counted(engine: Engine) -> object:
    counts = engine.profile("read")["counts"]
    engine.profile("reset")
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("residency", [10, 60, 100])
@pytest.mark.parametrize("arch", models.known())
def test_forced_drafts_change_no_token_and_no_count(opened: Open, arch: str, residency: int) -> None:
    options = {"policy": "lru", "residency_pct": residency} if arch not in ("qwen35",) else {}
    engine = opened(arch=arch, **options)
    plain = opened(arch=arch, draft="off", **options)
    requests = asked()
    for request in requests:
        plain.submit(request)
    expected = said(drain(plain))
    stop = expected[1][0][20][0]
    requests.append(replace(requests[0], id=9, stop_tokens=(stop,)))
    plain.submit(requests[-1])
    expected |= said(drain(plain))
    assert expected[9][1] == "stop" and len(expected[9][0]) <= 20
    counts = counted(plain)
    force(engine, histories(requests, expected))
    events: list[Event] = []
    for request in requests[:-1]:  # all at once
        engine.submit(request)
    drain(engine, events)
    engine.submit(requests[-1])
    drain(engine, events)
    assert said(events) == expected
    n, stayed = drafted(events)
    assert n > stayed > 20
    assert counted(engine) == counts
    ends = {e.id: e.usage.drafts.get("lookup", {"drafted": 0}) for e in events if isinstance(e, Done)}
    so_far = dict.fromkeys(ends, 0)
    for e in events:  # whoever breaks a reply off knows what was drafted by then
        if isinstance(e, Tokens) and e.drafts is not None:
            assert so_far[e.id] <= e.drafts["lookup"]["drafted"] <= ends[e.id]["drafted"]
            so_far[e.id] = e.drafts["lookup"]["drafted"]
    assert sum(so_far.values()) > n // 2


@pytest.mark.slow
@pytest.mark.parametrize("arch", models.known())
def test_every_place_of_a_rejection(opened: Open, arch: str) -> None:
    """Of one draft of 31 tokens, and what the rest of the reply is after it."""
    engine = opened(arch=arch, prefix_gib=0.0)
    (request, *_) = asked()
    plain = opened(arch=arch, draft="off")
    plain.submit(request)
    expected = said(drain(plain))
    whole = histories([request], expected)[1]

    class Once(SomeRight):
        right, given = 0, False

        def promise(self, history: Sequence[int], most: int, least: float = 0.0) -> Promise | None:
            if self.given or most < 31:
                return None
            follow = whole[len(history) :][:31]
            self.tokens = [*follow[: self.right], *((t + 1) % 301 for t in follow[self.right :])]
            return Promise("lookup", 0, 31)

        def draft(self, n_tokens: int, sure: bool = False) -> Draft:
            self.given = True
            return super().draft(n_tokens)

    for right in (*range(32),) if arch in ("qwen35", "gemma4") else (0, 1, 17, 31):
        force(engine, {1: whole})
        begin = engine.loaded.drafts.begin

        def once(reply, prediction=(), begin=begin, right=right) -> None:
            begin(reply, prediction)
            source = Once(whole, np.random.default_rng(0))
            source.right = right
            reply.drafting.source = source

        engine.loaded.drafts.begin = once
        engine.submit(request)
        events = drain(engine)
        assert said(events) == expected and drafted(events) == (31, right)


@pytest.mark.slow
@pytest.mark.usefixtures("short_units")
@pytest.mark.parametrize("seed", range(6))
def test_drafts_among_cancels_puts_back_and_prefixes(opened: Open, seed: int) -> None:
    """A cache that is too small for all, so some are put back; some are cancelled; turns go on behind turns."""
    rng = np.random.default_rng(seed)
    arch = ["qwen3moe", "gemma4", "qwen35moe"][seed % 3]
    options = {"ctx_tokens": 320, "parallel": 4}
    plain, engine = opened(arch=arch, draft="off", **options), opened(arch=arch, **options)
    requests = []
    for i in range(1, 9):
        n, made = int(rng.integers(20, 200)), int(rng.integers(5, 90))
        start = int(rng.choice([0, 0, 64, 128]))
        sampling = [GREEDY, SAMPLED, PENALIZED][i % 3]
        requests.append(Generate(i, tuple(TEXT[start : start + n]), made, sampling, ()))
    expected: dict[int, tuple[list, str | None]] = {}
    for request in requests:
        plain.submit(request)
        expected |= said(drain(plain))
    force(engine, histories(requests, expected), seed)
    events: list[Event] = []
    cancelled = set()
    for request in requests:
        engine.submit(request)
        for _ in range(int(rng.integers(0, 12))):
            events += engine.step() if engine.busy else []
        if rng.random() < 0.2 and engine.cancel(request.id):
            cancelled.add(request.id)
    drain(engine, events)
    assert not [e for e in events if isinstance(e, SparkError)]
    told = said(events)
    assert told.keys() | cancelled == expected.keys()
    assert all(told[i] == expected[i] for i in told)
    n, stayed = drafted(events)
    assert n > stayed > 0


@pytest.mark.slow
def test_the_next_turn_finds_what_it_would_without_drafts(opened: Open) -> None:
    for arch in ("qwen3moe", "gemma4", "qwen35"):
        plain, engine = opened(arch=arch, draft="off"), opened(arch=arch)
        first = Generate(1, tuple(TEXT[:150]), 60, SAMPLED, ())
        plain.submit(first)
        expected = said(drain(plain))
        whole = histories([first], expected)[1]
        turn = Generate(2, (*whole, *TEXT[300:340]), 20, GREEDY, ())
        plain.submit(turn)
        events = drain(plain)
        done = done_of(events)
        expected |= said(events)
        force(engine, histories([first, turn], expected))
        engine.submit(first)
        found = said(drain(engine))
        engine.submit(turn)
        events = drain(engine)
        other = done_of(events)
        assert found | said(events) == expected
        assert other.usage.cached_tokens == done.usage.cached_tokens
        assert drafted(events)[0] > 0


def test_a_prediction_that_comes_true_is_accepted(opened: Open) -> None:
    engine = opened()
    request = Generate(1, tuple(TEXT[:60]), 200, GREEDY, (), draft=False)
    engine.submit(request)
    events = drain(engine)
    done = done_of(events)
    assert done.usage.drafts == {}
    whole = histories([request], said(events))[1]
    costs = engine.loaded.drafts._gate.costs(1)  # a machine on which drafts pay
    costs.plain = 0.0
    costs.begin({n: 0.001 * (1 + n / 32) for n in range(32)})
    costs.note_plain(0.001, 1)
    costs.note = costs.note_plain = lambda *_: None  # type: ignore[method-assign]
    engine.submit(replace(request, id=2, draft=True, prediction=tuple(whole[60:])))
    again = drain(engine)
    done = done_of(again)
    assert said(again)[2] == said(events)[1]
    found = done.usage.drafts["lookup"]
    assert 100 < found["accepted"] <= found["drafted"]
    assert engine.stats()["drafts"]["tokens"]["lookup"]["accepted"] >= found["accepted"]
    engine.submit(replace(request, id=3, draft=True))  # what was said before is known, without a prediction
    again = drain(engine)
    done = done_of(again)
    assert said(again)[3] == said(events)[1] and done.usage.drafts["lookup"]["accepted"] > 100


def test_a_prediction_outside_the_vocabulary_is_refused(opened: Open) -> None:
    engine = opened()
    with pytest.raises(RequestError, match="field 'prediction': token 304 is outside the vocabulary of 304"):
        engine.submit(Generate(1, (5, 6), 4, prediction=(7, 304)))
    with pytest.raises(RequestError, match="2147483646"):
        engine.submit(Generate(1, (5, 6), 4, prediction=((1 << 31) - 2,)))
    engine.submit(Generate(1, (5, 6), 4, GREEDY, (), prediction=(7,) * 5000))  # more than the context has
    assert len(said(drain(engine))[1][0]) == 4


@pytest.mark.usefixtures("short_units")
def test_where_states_are_short_nobody_drafts(opened: Open) -> None:
    engine = opened(arch="qwen35", parallel=2)
    requests = [Generate(i, tuple(TEXT[i : 50 + i]), 60, SAMPLED, ()) for i in (1, 2)]
    plain = opened(arch="qwen35", draft="off")
    for request in requests:
        plain.submit(request)
    expected = said(drain(plain))
    force(engine, histories(requests, expected))
    propose, together = engine.loaded.drafts.propose, []

    def watched(replies):
        drafts = propose(replies)
        together.extend(drafts or [None] if len(replies) == 2 else ())
        return drafts

    engine.loaded.drafts.propose = watched
    for request in requests:
        engine.submit(request)
    assert said(drain(engine)) == expected
    assert len(together) > 8 and not any(together)  # how many depends on how long steps take
    engine.submit(requests[0])
    events = drain(engine)  # alone there is a state to spare
    assert said(events)[1] == expected[1] and drafted(events)[0] > 0


def drafter_for(engine: Engine, path: Path) -> Path:
    """A random drafter's file that fits a model."""
    model = engine.loaded.source.config
    shape = Shape(n_embd=model.n_embd, n_vocab=model.n_vocab, captured=(1, 0), window=50)
    write_drafter(path, shape, random_drafter(shape, np.random.default_rng(3)))
    return path


def eager(engine: Engine, source: str = "dflash") -> None:
    """Whatever is proposed is run, as far as it fits, and computed drafts are asked for."""
    gate = engine.loaded.drafts._gate
    gate.share = Forced.share.__get__(engine.loaded.drafts)  # type: ignore[method-assign]
    gate.gain = lambda offer, *_: 2.0 if offer[0].source == source else 1.0  # type: ignore[method-assign]
    engine.loaded.drafts._weigh = lambda *_: None  # type: ignore[method-assign]
    for sampled in (False, True):  # nobody has to do without, to see what steps take then
        gate.costs(1, sampled).note_plain(0.001, 1)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe"])
def test_a_drafter_of_a_file_changes_no_token(opened: Open, tmp_path: Path, arch: str) -> None:
    plain = opened(arch=arch, draft="off")
    requests = asked()
    expected: dict[int, tuple[list, str | None]] = {}
    for request in requests:
        plain.submit(request)
        expected |= said(drain(plain))
    engine = opened(arch=arch, draft=str(drafter_for(plain, tmp_path / "d.gguf")), policy="lru", residency_pct=60)
    assert any("DFlash drafter" in reason for reason in engine.loaded.reasons)
    eager(engine)
    engine.submit(requests[0])
    events = drain(engine)
    for request in requests[1:]:
        engine.submit(request)
    drain(engine, events)
    assert said(events) == expected
    found = [e.usage.drafts.get("dflash", {}).get("drafted", 0) for e in events if isinstance(e, Done)]
    assert all(n > 0 for n in found)  # a ring for each, and features from its prompt on
    assert len(engine.loaded.drafts._drafter._rings) == 4


@pytest.mark.slow
@pytest.mark.parametrize("residency", [30, 100])
@pytest.mark.parametrize("arch", FAMILIES)
def test_a_block_of_the_file_changes_no_token(opened: Open, arch: str, residency: int) -> None:
    options = {"policy": "lru", "residency_pct": residency} if arch == "qwen35moe" else {}
    plain = Engine(config(block_path(arch), device="cpu", draft="off", ctx_tokens=640, chunk_tokens=64))
    requests = asked()
    expected: dict[int, tuple[list, str | None]] = {}
    for request in requests:
        plain.submit(request)
        expected |= said(drain(plain))
    plain.close()
    engine = Engine(
        config(block_path(arch), device="cpu", draft="mtp", ctx_tokens=640, chunk_tokens=64, **options)
    )  # fmt: skip
    eager(engine, "mtp")
    engine.submit(requests[0])
    events = drain(engine)
    for request in requests[1:]:
        engine.submit(request)
    drain(engine, events)
    assert said(events) == expected
    found = [e.usage.drafts.get("mtp", {}).get("drafted", 0) for e in events if isinstance(e, Done)]
    assert all(n > 0 for n in found)
    predictor = engine.loaded.predictor
    assert predictor is not None and not predictor._tails  # nothing is kept of who has ended
    engine.close()


def test_what_following_costs_and_wins_is_weighed(opened: Open, tmp_path: Path) -> None:
    engine = opened(draft=str(drafter_for(opened(draft="off"), tmp_path / "d.gguf")))
    drafts = engine.loaded.drafts
    gate, rings = drafts._gate, drafts._drafter._rings

    def begun() -> Proposal:
        reply = Reply([5, 6], GREEDY, 30)
        drafts.begin(reply)
        return Proposal(reply, None)  # type: ignore[arg-type]

    def follows(p: Proposal) -> bool:
        return p.reply.drafting.follower is not None

    p = begun()  # nobody knows what a reply takes without: the next does without, and tells
    drafts._weigh(p, 1.0)
    drafts.end(p.reply)
    assert not follows(begun())
    p = begun()
    drafts._weigh(p, 1.0)
    drafts.end(p.reply)
    p = begun()
    assert follows(p)  # and then none for a while
    gate.plain(1, 0.008, 8)
    gate.plain(1, 0.0096, 8, followed=True)
    for _ in range(29):  # a fifth of a step each time
        drafts._weigh(p, 0.0012)
        assert follows(p)
    drafts._weigh(p, 0.0012)
    drafts._weigh(p, 0.0012)
    assert not follows(p) and len(rings) == 4 and not follows(begun())
    p = begun()
    p.draft = Draft("dflash", 0, (1, 2, 3))
    p.stayed = 3
    drafts._weigh(p, 0.002)  # four tokens in the time of two
    assert p.reply.drafting.won_s == pytest.approx(0.002)
    p.stayed = 0
    drafts._weigh(p, 9.0)  # the machine's
    assert p.reply.drafting.won_s > -0.02
    p.stayed, p.reply.drafting.won_s = 3, 0.0
    drafts._weigh(p, 0.001)
    drafts.end(p.reply)
    assert drafts._rest == 0 and follows(begun())


@pytest.mark.slow
def test_a_drafter_that_is_of_no_use_is_left_alone(opened: Open, tmp_path: Path) -> None:
    plain = opened(draft="off")
    engine = opened(draft=str(drafter_for(plain, tmp_path / "d.gguf")))
    request = Generate(1, tuple(TEXT[:40]), 500, SAMPLED, ())
    drafts = engine.loaded.drafts
    drafts._gate.costs(1, True).note_plain(0.001, 1)  # nobody has to do without, to see what steps take then
    for one in (plain, engine):
        one.submit(request)
    assert said(drain(engine)) == said(drain(plain))
    assert drafts._resting == 1 and len(drafts._drafter._rings) == 4
    engine.submit(request)
    drain(engine)
    assert drafts._resting == 0


def short() -> list[Generate]:
    """Requests of every kind that emulation has time for; the first is alone, ahead of the host, for a while."""
    most = (14, 9, 9, 9)
    return [replace(r, tokens=r.tokens[:20], max_tokens=n) for r, n in zip(asked(), most, strict=True)]


@pytest.fixture(scope="module")
def on_device() -> dict[str, dict[int, tuple[list, str | None]]]:
    """What the short requests are told without drafts and with all experts on the device, by architecture."""
    return {}


def without_drafts(opened: Open, arch: str, known: dict) -> dict[int, tuple[list, str | None]]:
    if arch not in known:
        plain, known[arch] = opened("cuda", arch, draft="off", chunk_tokens=40), {}
        for request in short():
            plain.submit(request)
            known[arch] |= said(drain(plain))
    return known[arch]


@pytest.mark.slow
@pytest.mark.usefixtures("short_units")
def test_a_drafter_on_a_device(opened: Open, tmp_path: Path, on_device: dict) -> None:
    requests, expected = short(), without_drafts(opened, "qwen3moe", on_device)
    path = drafter_for(opened(draft="off"), tmp_path / "d.gguf")
    engine = opened("cuda", draft=str(path), chunk_tokens=40)
    eager(engine)
    engine.submit(requests[0])
    events = drain(engine)
    for request in requests[1:]:
        engine.submit(request)
    drain(engine, events)
    assert said(events) == expected
    assert sum(e.usage.drafts.get("dflash", {}).get("drafted", 0) for e in events if isinstance(e, Done)) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("short_units")
@pytest.mark.parametrize("arch", ["qwen3moe", pytest.param("qwen35moe", marks=pytest.mark.on_a_gpu)])
def test_forced_drafts_on_a_device(opened: Open, arch: str, on_device: dict) -> None:
    """Alone, between steps that run ahead of the host, and in steps that are shared, with experts away."""
    requests, expected = short(), without_drafts(opened, arch, on_device)
    engine = opened("cuda", arch, policy="lru", residency_pct=60, chunk_tokens=40)
    force(engine, histories(requests, expected))
    engine.submit(requests[0])
    events = drain(engine)
    for request in requests[1:]:
        engine.submit(request)
    drain(engine, events)
    assert said(events) == expected
    n, stayed = drafted(events)
    assert n > stayed > 0


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35", "gemma4"])
def test_choices_of_one_prompt_draft_each_for_itself(opened: Open, arch: str) -> None:
    plain, engine = opened(arch=arch, draft="off"), opened(arch=arch)
    requests = [
        Generate(i, tuple(TEXT[:97]), 30, Sampling(0.9, seed=i), (), same_prompt_as=None if i == 1 else 1)
        for i in (1, 2, 3)
    ]
    expected: dict[int, tuple[list, str | None]] = {}
    for request in requests:
        plain.submit(replace(request, same_prompt_as=None))
        expected |= said(drain(plain))
    force(engine, histories(requests, expected))
    for request in requests:
        engine.submit(request)
    events = drain(engine)
    assert said(events) == expected
    assert all(e.usage.drafts["lookup"]["drafted"] > 0 for e in events if isinstance(e, Done))
    assert [e.usage.cached_tokens for e in events if isinstance(e, Done) and e.id > 1] == [97, 97]


def test_who_is_under_a_form_drafts_nothing_and_its_neighbor_does(opened: Open) -> None:
    class Thirds:
        is_done = False

        def mask(self) -> np.ndarray:
            return np.packbits(np.arange(320) % 3 == 0, bitorder="little").view(np.uint32)

        def accept(self, token: int) -> None:
            assert token % 3 == 0

    plain, engine = opened(draft="off"), opened()
    for one in (plain, engine):
        one.loaded.forms.open = lambda text, stop: FormHere(Thirds())  # type: ignore[method-assign]
    requests = [Generate(i, tuple(TEXT[9 * i : 60]), 40, SAMPLED, ()) for i in (1, 2)]
    requests[0] = replace(requests[0], grammar="{}")
    expected: dict[int, tuple[list, str | None]] = {}
    for request in requests:
        plain.submit(request)
        expected |= said(drain(plain))
    assert all(row[0] % 3 == 0 for row in expected[1][0])
    force(engine, histories(requests, expected))
    for request in requests:
        engine.submit(request)
    events = drain(engine)
    assert said(events) == expected
    drafts = {e.id: e.usage.drafts for e in events if isinstance(e, Done)}
    assert drafts[1] == {} and drafts[2]["lookup"]["drafted"] > 0
