"""The list of requests: what a row says, how many there are, and that nothing of a request's content is in it."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from engine.ground.errors import CapacityError, SparkError
from spark.server.board import Board, RequestRow
from spark.server.events import MAX_WATCHERS
from spark.speech.conversation import Usage
from tests.server.test_page import read_events
from tests.server.test_server import PATIENCE_S, Running, body, fake, running, wait_until

ROW = {"number", "api", "choices", "age_s", "prompt", "read", "reused", "written", "writing_s", "state"}


def told(made: Board) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    found = made.figures()
    return found["open"], found["ended"]


def test_what_a_row_says_while_a_request_goes_on() -> None:
    made = Board()
    with made.request("chat", 1) as row:
        ((first,), _) = told(made)
        assert first.keys() == ROW and first["state"] == "waiting" and first["prompt"] is None
        row.prompt_tokens = 100
        choice = row.choice()
        states = []
        for used in (Usage(0, 0, 0), Usage(40, 0, 30), Usage(100, 0, 30), Usage(100, 1, 30), Usage(100, 7, 30)):
            choice.take(used)
            ((shown,), _) = told(made)
            states.append((shown["state"], shown["read"], shown["reused"], shown["written"]))
        assert states == [
            ("waiting", 0, 0, 0), ("reading", 40, 30, 0), ("reading", 100, 30, 0), ("writing", 100, 30, 1),
            ("writing", 100, 30, 7),
        ]  # fmt: skip
        choice.finish = "stop"
    (none, (ended,)) = told(made)
    assert none == [] and ended.keys() == ROW | {"end", "ended_s"}
    assert (ended["state"], ended["end"], ended["written"]) == ("ended", "stop", 7)


def test_choices_share_a_row_and_its_prompt() -> None:
    made = Board()
    with made.request("completions", 3) as row:
        row.prompt_tokens = 50
        choices = [row.choice() for _ in range(3)]
        for n, choice in enumerate(choices):
            choice.take(Usage(50, 10 + n, 20), prompt=n == 0)
        ((shown,), _) = told(made)
        assert (shown["choices"], shown["read"], shown["reused"], shown["written"]) == (3, 50, 20, 33)


@pytest.mark.parametrize(
    ("finishes", "end"),
    [
        (("stop", "stop"), "stop"),
        (("stop", "tool_calls"), "tool_calls"),
        (("length", "tool_calls"), "length"),
        (("stop", ""), "left"),
        ((), "left"),
    ],
)
def test_how_a_request_ended(finishes: tuple[str, ...], end: str) -> None:
    made = Board()
    with made.request("chat", 2) as row:
        for finish in finishes:
            row.choice().finish = finish
    assert made.figures()["ended"][0]["end"] == end


def test_errors_are_words_of_ours() -> None:
    made = Board()
    alien = SparkError("x")
    alien.code = "<script>"  # what a daemon says may be anything
    for error in (CapacityError("secret"), alien):
        with pytest.raises(SparkError), made.request("chat", 1):
            raise error
    assert [row["end"] for row in made.figures()["ended"]] == ["failed", "capacity"]
    with pytest.raises(KeyError), made.request("chat", 1):
        raise KeyError("a bug")
    assert not made.figures()["open"]


def test_the_list_is_bounded_and_those_at_work_come_first() -> None:
    made = Board()
    open_ones = [made.request("chat", 1) for _ in range(64)]
    rows: list[RequestRow] = [one.__enter__() for one in open_ones]
    for row in (rows[60], rows[40]):
        row.prompt_tokens = 8
        row.choice().take(Usage(4, 0))
    found = made.figures()
    assert [row["number"] for row in found["open"]] == [41, 61, *range(1, 15)] and found["more"] == 48
    for one in open_ones:
        one.__exit__(None, None, None)
    found = made.figures()
    assert found["open"] == [] and found["more"] == 0
    assert [row["number"] for row in found["ended"]] == list(range(64, 44, -1))
    assert len(json.dumps(found)) < 20 * 250


# --- of a server ----------------------------------------------------------------------------------


def figures(made: Running) -> dict[str, Any]:
    """As the events have them."""
    with made.http.stream("GET", "/events") as response:
        return dict(read_events(response.iter_lines(), 2)[1][1]["requests"])


def test_who_asks_for_headers_alone_watches_nothing() -> None:
    with running() as made:
        for _ in range(MAX_WATCHERS + 1):
            assert made.http.head("/events").headers["content-type"].startswith("text/event-stream")
        assert figures(made)["open"] == []


def test_requests_of_every_api_and_how_they_ended() -> None:
    with running() as made:
        said = {"model": "x", "messages": [{"role": "user", "content": "ab"}]}
        assert made.http.post("/v1/messages", json=said | {"max_tokens": 1}).status_code == 200
        assert made.http.post("/v1/responses", json={"input": "ab"}).status_code == 200
        assert made.http.post("/v1/completions", json={"prompt": ["ab", "cd"], "n": 2}).status_code == 200
        assert made.ask("abc", stream=True).status_code == 200
        assert made.ask("nan").status_code == 500
        assert "error" in made.ask("nan", stream=True).text  # too late for a status
        assert made.ask("refuse me").status_code == 200
        assert made.ask("x" * 5000).status_code == 400
        assert made.http.post("/v1/chat/completions", json={"messages": 1}).status_code == 400  # which made no row
        found = figures(made)
    assert found["open"] == []
    rows = [(row["api"], row["choices"], row["end"]) for row in reversed(found["ended"])]
    assert rows == [
        ("messages", 1, "length"), ("responses", 1, "stop"), ("completions", 4, "stop"), ("chat", 1, "stop"),
        ("chat", 1, "numerical"), ("chat", 1, "numerical"), ("chat", 1, "stop"), ("chat", 1, "context_overflow"),
    ]  # fmt: skip
    prompts = [row["prompt"] for row in reversed(found["ended"])]
    assert prompts[2] == 4 and prompts[7] is None  # two prompts of two tokens, each once for both its choices
    chat = found["ended"][4]
    assert (chat["written"], chat["read"]) == (3, chat["prompt"])


def test_a_client_that_leaves_and_a_daemon_that_dies() -> None:
    with running(fake(step_s=0.02)) as made:
        with made.http.stream("POST", "/v1/chat/completions", json=body("x" * 900, stream=True)) as response:
            chunks = response.iter_bytes()  # kept: forgotten, they close the connection
            next(chunks)
            wait_until(lambda: any(row["written"] for row in figures(made)["open"]))
        wait_until(lambda: not figures(made)["open"])
        assert made.ask("crash").status_code == 503
        ends = [row["end"] for row in figures(made)["ended"]]
        assert ends == ["daemon", "left"]


@pytest.mark.slow
def test_eight_at_once_and_nothing_of_what_they_say() -> None:
    """No word of a request, a reply, a tool or a model's name is in the events, whoever is at work."""
    secret = "Xyzzy"
    tools = [{"type": "function", "function": {"name": f"{secret}Tool", "parameters": {"type": "object"}}}]
    wish = (secret + " ") * 40
    with running(fake(step_s=0.01)) as made, made.http.stream("GET", "/events") as watched:
        lines: list[str] = []
        reading = threading.Thread(target=lambda: lines.extend(watched.iter_lines()))

        def ask(_: int) -> None:
            more = {"tools": tools, "user": secret, "metadata": {"a": secret}, "model": f"{secret}-model"}
            httpx.post(f"http://127.0.0.1:{made.port}/v1/chat/completions", json=body(wish) | more, timeout=PATIENCE_S)

        asking = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in (reading, *asking):
            thread.start()
        try:
            wait_until(lambda: any('"state":"writing"' in line for line in lines))
            samples = [json.loads(line[6:]) for line in [*lines] if line.startswith('data: {"time_s')]
            busiest = max(samples, key=lambda sample: len(sample["requests"]["open"]))
            assert len(busiest["requests"]["open"]) == 8
        finally:
            for thread in asking:
                thread.join()
        wait_until(lambda: '"open":[]' in lines[-2] or '"open":[]' in lines[-1])
        made.uvicorn.handle_exit(15, None)
        reading.join()
    text = "\n".join(lines)
    assert secret.lower() not in text.lower() and "user" not in text
    last = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])
    assert last["replies"] == 0 and [row["end"] for row in last["requests"]["ended"]] == ["stop"] * 8
    for row in last["requests"]["ended"]:
        words = {key: value for key, value in row.items() if not isinstance(value, int | float)}
        assert words == {"api": "chat", "state": "ended", "end": "stop"}
