"""How long a prompt may take is told where it was measured; one that cannot be read is refused before any work."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark.apis.http import EXPECTED
from spark.server.board import Board
from spark.server.generation import Model
from spark.server.metrics import Metrics
from spark.server.pace import LEAST_TOKENS, Pace
from tests.fake_tokenizer import FakeTokenizer
from tests.server.test_server import Running, body, events, fake, running

# The fake engine says of every prompt that it took a quarter of a second.
READ_S = 0.25


@pytest.fixture
def made() -> Iterator[Running]:
    with running() as server:
        yield server


def stream(made: Running, wish: str, *before: str, path: str = "/v1/chat/completions") -> httpx.Response:
    response = made.http.post(path, json=body(wish, *before, stream=True, max_tokens=400))
    assert response.status_code == 200
    return response


def rate(made: Running) -> float | None:
    found = re.search(r"^spark_prefill_tokens_per_second (\S+)$", made.http.get("/metrics").text, re.MULTILINE)
    return None if found is None else float(found[1])


def test_a_stream_says_how_long_its_prompt_takes(made: Running) -> None:
    long = "x" * 900
    assert EXPECTED not in stream(made, "halves", long).headers and rate(made) is not None  # it was measured only then
    n = len(FakeTokenizer().split_special(f"[user]{long}[user]halves<|halves|><|say|>halves<|said|>"))
    usage = made.ask("halves", long).json()["usage"]
    read = usage["prompt_tokens"]
    assert n < read and rate(made) == pytest.approx(read / READ_S)
    # The first half is read when the stream begins.
    expected = float(stream(made, "halves", long).headers[EXPECTED])
    assert expected == pytest.approx((read - read // 2) / (read / READ_S), abs=0.051)
    assert EXPECTED not in stream(made, "all at once", long).headers  # nothing is left to be read
    whole = made.ask("halves", long)
    assert whole.status_code == 200 and EXPECTED not in whole.headers


def test_nothing_is_told_that_was_not_measured(made: Running) -> None:
    for _ in range(3):  # short prompts say nothing of long ones
        assert EXPECTED not in stream(made, "halves").headers and rate(made) is None
    assert events(stream(made, "halves", "y" * 700)) and rate(made) is not None


def test_what_is_unread_is_all_until_the_daemon_says_otherwise() -> None:
    board = Board()
    with board.request("chat", 2) as row:
        assert row.unread_tokens == 0
        row.prompt_tokens = 90
        assert row.unread_tokens == 90
        row.choice().read = 70
        assert row.unread_tokens == 20
        row.choice().read = 40
        assert row.unread_tokens == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_prompt_that_is_too_long_is_refused_before_any_work(path: str) -> None:
    with running(fake(ctx=700)) as made:
        response = made.http.post(path, json=body("x" * 900, max_tokens=5, stream=True))
        said = response.json()["error"]["message"]
        count = made.http.post("/v1/messages/count_tokens", json=body("x" * 900)).json()["input_tokens"]
        assert response.status_code == 400 and {f"{count}", "700"} <= {*re.findall(r"\d+", said)}
        assert made.stats()["steps"] == 0 and EXPECTED not in response.headers


def test_the_log_says_what_takes_long_or_goes_through_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    info: dict[str, Any] = {"ctx_tokens": 9000, "pool_tokens": None}
    metrics = Metrics()
    model = Model(SimpleNamespace(ready=SimpleNamespace(info=info)), FakeTokenizer(), metrics)  # type: ignore[arg-type]

    def said(n: int) -> list[str]:
        caplog.clear()
        model._say_long(n)
        return [record.getMessage() for record in caplog.records]

    assert said(8000) == []
    info["pool_tokens"] = 2048
    beyond = "a prompt of 8,000 tokens, in host memory beyond the 2,048 of the pool:"
    assert said(8000) == [f"{beyond} how long it takes is not measured yet"] and said(2048) == []
    metrics.pace.take(1000, 0, 2.0)
    assert said(8000) == [f"{beyond} at most 16.0 s to read"]
    info["pool_tokens"] = None
    assert said(8000) == ["a prompt of 8,000 tokens: at most 16.0 s to read"] and said(4999) == []


PROMPTS = st.tuples(st.integers(-5, 10_000), st.integers(0, 5_000), st.floats(0, 1e4))


@given(st.lists(PROMPTS, max_size=9), st.integers(1, 1 << 20))
def test_the_pace_is_that_of_prompts_that_were_mostly_computed(taken: list[Any], asked: int) -> None:
    """And the last ones count for more."""
    pace = Pace()
    for tokens, reused, seconds in taken:
        pace.take(tokens, reused, seconds)
    counted = [(n, s) for n, reused, s in taken if n >= max(LEAST_TOKENS, reused) and s > 0]
    if not counted:
        assert pace.tokens_per_s is None and pace.expected_s(asked) is None
        return
    weights = [0.9**i for i in range(len(counted))][::-1]
    mean = sum(w * n for w, (n, _) in zip(weights, counted, strict=True))
    mean /= sum(w * s for w, (_, s) in zip(weights, counted, strict=True))
    assert pace.tokens_per_s == pytest.approx(mean) and pace.expected_s(asked) == pytest.approx(asked / mean)
