"""Recall on a device: the emulated GPU by default, a real one with `pytest --gpu`."""

from __future__ import annotations

from typing import Any

import pytest

from engine.ground.protocol import Done, Event, Generate, Tokens
from engine.serving.scheduler import Engine
from tests.forced_drafts import force
from tests.running.test_kv_pool import model, opened
from tests.running.test_recall import PROMPT, one

pytestmark = [pytest.mark.usefixtures("on_the_device"), pytest.mark.slow]

ALONE = Generate(1, PROMPT[:323], 9, stop_tokens=())  # of block 5, of which there is one candidate
TOGETHER = (Generate(2, PROMPT[:322], 6, stop_tokens=()), Generate(3, PROMPT[:323], 5, stop_tokens=()))


def both(engine: Engine) -> dict[int, tuple[list[int], dict[str, Any] | None]]:
    """Tokens and what was read, of replies that share steps."""
    for request in TOGETHER:
        engine.submit(request)
    events = list[Event]()
    while engine.busy:
        events += engine.step()
    tokens = {r.id: [t for e in events if isinstance(e, Tokens) and e.id == r.id for t in e.tokens] for r in TOGETHER}
    return {e.id: (tokens[e.id], e.usage.recall) for e in events if isinstance(e, Done)}


def test_nothing_but_the_sequence_decides() -> None:
    """Ahead of the host and together, with drafts and at a low residency; near what the host reads."""
    plain = opened(model("qwen3moe"), "cuda", "auto", kv_recall_blocks=0)
    tokens, done = one(plain, ALONE)
    shared, stats = both(plain), plain.stats()["recall"]
    plan = plain.loaded.plan()
    plain.close()
    assert shared[2][0][1:] != tokens[:5] == shared[3][0]  # of another prompt, and of the same
    drafted = opened(model("qwen3moe"), "cuda", "auto", kv_recall_blocks=0, draft="auto", residency_pct=30)
    force(drafted, {1: [*ALONE.tokens, *tokens]})
    again, other = one(drafted, ALONE)
    assert again == tokens and other.usage.drafts
    drafted.close()
    host = opened(model("qwen3moe"), "cpu", "auto", kv_recall_blocks=0)
    _, near = one(host, ALONE)
    host.close()
    used, same, hosts = (d.usage.recall for d in (done, other, near))
    assert used is not None and same is not None and hosts is not None
    for key in ("tokens", "blocks", "read"):
        assert used[key] == same[key] == hosts[key]
        counted = [usage[key] for _, usage in shared.values() if usage is not None]
        assert len(counted) == 2 and stats[key] == used[key] + sum(counted)
    assert used["read"] == used["blocks"] - used["tokens"] > 0
    for key in ("left_out_max", "left_out_mean"):
        assert 0 < used[key] == pytest.approx(same[key], rel=1e-4) and used[key] == pytest.approx(hosts[key], rel=0.2)
    whole = opened(model("qwen3moe"), "cuda", "auto")
    recalling_bytes = plan["buffers_bytes"] - whole.loaded.plan()["buffers_bytes"]
    assert one(whole, ALONE)[0] != tokens and whole.loaded.forward.recalling is None
    whole.close()
    assert 100 << 10 < recalling_bytes < 2 << 20
