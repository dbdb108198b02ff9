"""Recall on a device: the emulated GPU by default, a real one with `pytest --gpu`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.ground.protocol import Done, Event, Generate, Tokens
from engine.ground.recall import KVRecall
from engine.running.stepping import Span, StepResult, Steps
from engine.serving.scheduler import Engine
from tests.forced_drafts import force
from tests.running.test_kv_pool import opened, slight
from tests.running.test_kv_pool import restless as restless
from tests.running.test_recall import PROMPT, one

pytestmark = [pytest.mark.usefixtures("on_the_device"), pytest.mark.slow]

ASKED = PROMPT[2:]  # where it says other tokens from which row on one reads a part
# Of block 6, of which there are two candidates.
BY_MASS = Generate(4, ASKED[:390], 7, stop_tokens=(), kv_recall=KVRecall(left_out=0.35))
ALONE = Generate(1, ASKED[:323], 9, stop_tokens=())  # of block 5, of which there is one candidate
LATER = replace(ALONE, id=5, kv_recall=KVRecall(blocks=0, start=327))  # in the middle of drafts
TOGETHER = (Generate(2, ASKED[:322], 6, stop_tokens=()), Generate(3, ASKED[:323], 5, stop_tokens=()))


def both(engine: Engine) -> dict[int, tuple[list[int], dict[str, Any] | None]]:
    """Tokens and what was read, of replies that share steps."""
    for request in TOGETHER:
        engine.submit(request)
    events = list[Event]()
    while engine.busy:
        events += engine.step()
    tokens = {r.id: [t for e in events if isinstance(e, Tokens) and e.id == r.id for t in e.tokens] for r in TOGETHER}
    return {e.id: (tokens[e.id], e.usage.recall) for e in events if isinstance(e, Done)}


@pytest.mark.timeout(600)
def test_nothing_but_the_sequence_decides() -> None:
    """Ahead of the host and together, with drafts and at a low residency; near what the host reads."""
    plain = opened(slight("qwen3moe"), "cuda", "auto", kv_recall_blocks=0)
    plain.submit(ALONE)
    *events, done = [e for _ in range(99) if plain.busy for e in plain.step()]
    assert isinstance(done, Done)
    tokens = [t for e in events if isinstance(e, Tokens) for t in e.tokens]
    told = [e.recall for e in events if isinstance(e, Tokens) and e.recall]
    assert told[-1] == done.usage.recall and len(told) > 1
    # What was told meanwhile is of the tokens so far, each of which left one block out.
    assert all(r["read"] == r["blocks"] - r["tokens"] and (r["tokens"] == 0) == (r["left_out_mean"] == 0) for r in told)
    shared, stats = both(plain), plain.stats()["recall"]
    by_mass, of_mass = one(plain, BY_MASS)
    later, of_later = one(plain, LATER)
    plan = plain.loaded.plan()
    plain.close()
    assert shared[2][0][1:] != tokens[:5] == shared[3][0]  # of another prompt, and of the same
    drafted = opened(slight("qwen3moe"), "cuda", "auto", kv_recall_blocks=0, draft="auto", residency_pct=30)
    force(drafted, {1: [*ALONE.tokens, *tokens], 4: [*BY_MASS.tokens, *by_mass], 5: [*LATER.tokens, *later]})
    again, other = one(drafted, ALONE)
    assert again == tokens and other.usage.drafts
    again, other_mass = one(drafted, BY_MASS)
    assert again == by_mass and other_mass.usage.drafts
    again, other_later = one(drafted, LATER)
    assert again == later != tokens and other_later.usage.drafts
    for usage in (of_later.usage, other_later.usage):
        assert usage.recall is not None and usage.recall["read"] == usage.recall["blocks"] - 4  # of 8 rows
    drafted.close()
    host = opened(slight("qwen3moe"), "cpu", "auto", kv_recall_blocks=0)
    _, near = one(host, ALONE)
    host.close()
    used, same, hosts = (d.usage.recall for d in (done, other, near))
    assert used is not None and same is not None and hosts is not None
    for key in ("tokens", "blocks", "read"):
        assert used[key] == same[key] == hosts[key]
        counted = [usage[key] for _, usage in shared.values() if usage is not None]
        assert len(counted) == 2 and stats[key] == used[key] + sum(counted)
    assert used["read"] == used["blocks"] - used["tokens"] > 0
    used_mass, same_mass = of_mass.usage.recall, other_mass.usage.recall
    assert used_mass is not None and same_mass is not None and used_mass["read"] == same_mass["read"]
    assert used_mass["blocks"] - 2 * used_mass["tokens"] <= used_mass["read"] < used_mass["blocks"]
    assert 0 < used_mass["left_out_max"] == pytest.approx(same_mass["left_out_max"], rel=1e-4)
    for key in ("left_out_max", "left_out_mean"):
        assert 0 < used[key] == pytest.approx(same[key], rel=1e-4) and used[key] == pytest.approx(hosts[key], rel=0.2)
    whole = opened(slight("qwen3moe"), "cuda", "auto")
    recalling_bytes = plan["buffers_bytes"] - whole.loaded.plan()["buffers_bytes"]
    assert one(whole, ALONE)[0] != tokens and whole.loaded.forward.recalling is None
    whole.close()
    assert 100 << 10 < recalling_bytes < 2 << 20


@pytest.mark.parametrize("kv_type", [pytest.param("f16", marks=pytest.mark.on_a_gpu), "q8_0,q4_0"])
def test_of_what_is_at_home_only_what_is_chosen_is_brought(
    kv_type: str, restless: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone ahead of the host, and in steps with drafts; the tokens are those of a cache that has all."""
    options: dict[str, Any] = {"kv_recall_blocks": 1, "parallel": 1, "kv_type": kv_type}
    asked = Generate(1, (*PROMPT, *PROMPT[:190]), 7, stop_tokens=())  # of ten blocks, five of which nobody chooses
    plain = opened(slight("qwen3moe"), "cuda", "auto", ctx_tokens=700, **options)
    expected, done = one(plain, asked)
    plain.close()
    run, parts, whole = Steps.run, list[int](), list[int]()  # of blocks and heads: what was brought, what is at home

    def counted(steps: Steps, spans: list[Span]) -> StepResult:
        result, kv, recalling = run(steps, spans), steps.forward.kv, steps.forward.recalling
        if recalling is not None and kv.is_pooled and all(span.recall is not None for span in spans):
            n_heads, (staging,) = steps.forward.limits.n_head_kv, kv._staging.values()
            wanted = kv.device.read(recalling.arrays.absent_of(n_heads, kv.most_staged))
            parts.append(int(wanted[:, 0].sum()))
            whole.append(n_heads * len(staging.told))
        return result

    monkeypatch.setattr(Steps, "run", counted)
    pooled = opened(slight("qwen3moe"), "cuda", "448", draft="auto", ctx_tokens=700, **options)
    for request in (replace(asked, draft=False), replace(asked, id=2)):
        if request.draft:
            force(pooled, {2: [*asked.tokens, *expected]})
        found, other = one(pooled, request)
        assert found == expected and other.usage.recall is not None and done.usage.recall is not None
        assert other.usage.recall["read"] == done.usage.recall["read"] and bool(other.usage.drafts) == request.draft
    pooled.close()
    assert restless["home"] > 3 and 0 < sum(parts) < sum(whole)
    assert all(part <= all_of for part, all_of in zip(parts, whole, strict=True))
