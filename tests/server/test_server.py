from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine.daemon import MAX_WAITING
from spark.apis import bodies
from spark.daemon.client import Deadlines
from spark.server import app as server
from spark.server.app import create_app
from spark.server.supervisor import Supervisor
from tests.fake_tokenizer import FakeTokenizer

HERE = Path(__file__).parents[1]  # the daemons for tests are there
PATIENCE_S = 30.0


def fake(*, step_s: float = 0.0, ctx: int = 4096) -> list[str]:
    script = str(HERE / "fake_daemon.py")
    return [sys.executable, "-S", script, str(step_s), "0", f"--ctx-tokens={ctx}", "model.gguf"]


class Running:
    """A server on a free port, with its daemon."""

    def __init__(
        self,
        command: list[str],
        deadlines: Deadlines,
        profile: Path | None,
        api_key: str | None,
        allow_origins: tuple[str, ...] = (),
    ) -> None:
        self.backend = Supervisor(lambda: command, deadlines, profile)
        self.bound = server._bind("127.0.0.1", 0)
        self.app = create_app(self.backend, FakeTokenizer(), "fake-model", api_key, allow_origins)
        self.uvicorn = server._Server(self.app)
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.bound]})
        self.thread.start()
        self.port = self.bound.getsockname()[1]
        wait_until(lambda: self.uvicorn.started)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S)

    def close(self) -> None:
        self.http.close()
        self.uvicorn.should_exit = True
        self.thread.join(PATIENCE_S)
        self.bound.close()
        self.backend.close()

    def ask(self, wish: str, *before: str, **more: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=body(wish, *before, **more))

    def stats(self) -> dict:
        return self.backend.client().stats()


def body(wish: str, *before: str, **more: Any) -> dict:
    messages = [{"role": "user", "content": text} for text in (*before, wish)]
    return {"model": "x", "messages": messages, **more}


@contextlib.contextmanager
def running(
    command: list[str] | None = None,
    *,
    silence_s: float = PATIENCE_S,
    total_s: float = PATIENCE_S,
    profile: Path | None = None,
    api_key: str | None = None,
    allow_origins: tuple[str, ...] = (),
) -> Iterator[Running]:
    deadlines = Deadlines(ready_s=PATIENCE_S, silence_s=silence_s, total_s=total_s, grace_s=0.5)
    made = Running(command or fake(), deadlines, profile, api_key, allow_origins)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def fast() -> Iterator[Running]:
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    with running(fake(step_s=0.02)) as made:
        yield made


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def events(response: httpx.Response) -> list[Any]:
    """The data of server-sent events; comments are left out."""
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]


def deltas(chunks: list[Any], key: str) -> str:
    return "".join(chunk["choices"][0]["delta"].get(key, "") for chunk in chunks if chunk["choices"])


# --- replies --------------------------------------------------------------------------------------


def test_a_whole_reply(fast: Running) -> None:
    made = fast.ask("caf\u00e9 \U0001f600!").json()
    (choice,) = made["choices"]
    assert choice["message"] == {"role": "assistant", "content": "caf\u00e9 \U0001f600!"}
    assert choice["finish_reason"] == "stop" and made["model"] == "fake-model"
    n_wish = len("caf\u00e9 \U0001f600!".encode())
    prompt = len("[user]") + 2 * n_wish + 2
    assert made["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": n_wish,
        "total_tokens": prompt + n_wish,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
        },
    }  # fmt: skip


def test_a_streamed_reply(fast: Running) -> None:
    response = fast.ask("caf\u00e9 \U0001f600!", stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert deltas(chunks, "content") == "caf\u00e9 \U0001f600!"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 11
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_max_tokens(fast: Running) -> None:
    made = fast.ask("abcdefgh", max_tokens=3).json()
    assert made["choices"][0]["message"]["content"] == "abc"
    assert made["choices"][0]["finish_reason"] == "length" and made["usage"]["completion_tokens"] == 3
    cut = fast.ask("caf\u00e9", max_tokens=4).json()  # in the middle of a character
    assert cut["choices"][0]["message"]["content"] == "caf\ufffd"


def test_the_context_bounds_a_reply() -> None:
    with running(fake(ctx=100)) as made:
        reply = made.ask("x" * 40, max_tokens=1000)  # 6 + 40 + 42 tokens read, 12 left
        assert reply.json()["choices"][0]["message"]["content"] == "x" * 12
        error = made.ask("x" * 60).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
        assert made.ask("x" * 60, stream=True).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_work_too(slow: Running, stream: bool) -> None:
    before = slow.stats()["served"]
    response = slow.ask("one, two, three" + "!" * 1500, stop=[", t", "zzz"], stream=stream)
    if stream:
        assert deltas(events(response), "content") == "one"
        assert events(response)[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        (choice,) = response.json()["choices"]
        assert choice["message"]["content"] == "one" and choice["finish_reason"] == "stop"
    wait_until(lambda: slow.stats()["queued"] == 0)
    assert slow.stats()["served"] == before  # it was cancelled, not finished


WITH_CALL = 'Let me see.\n<tool_call>\n{"name": "read", "arguments": {"path": "\u00e9.py"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


def test_tool_calls(fast: Running) -> None:
    (choice,) = fast.ask(WITH_CALL, tools=TOOLS).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    assert call["function"]["name"] == "read" and call["id"].startswith("call_")
    assert json.loads(call["function"]["arguments"]) == {"path": "\u00e9.py"}

    chunks = events(fast.ask(WITH_CALL, tools=TOOLS, stream=True))
    assert deltas(chunks, "content") == "Let me see."
    streamed = [c["choices"][0]["delta"]["tool_calls"] for c in chunks if "tool_calls" in c["choices"][0]["delta"]]
    assert all(part["index"] == 0 for (part,) in streamed) and streamed[0][0]["function"]["name"] == "read"
    assert "".join(part["function"]["arguments"] for (part,) in streamed) == call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    (choice,) = fast.ask(WITH_CALL).json()["choices"]  # no tools, no calls
    assert choice["message"]["content"] == WITH_CALL and choice["finish_reason"] == "stop"


def test_a_call_that_max_tokens_cuts_is_no_text(fast: Running) -> None:
    wish = WITH_CALL.partition("\n")[2]
    for n in (len("<tool_ca"), len("<tool_call>"), len('<tool_call>\n{"name": "re')):
        more: dict = {"tools": TOOLS, "tool_choice": "required", "max_tokens": n}
        (choice,) = fast.ask(wish, **more).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": ""} and choice["finish_reason"] == "length"
        chunks = events(fast.ask(wish, **more, stream=True))
        assert deltas(chunks, "content") == "" and chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert not any("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks)
        tools = [{"name": "read", "input_schema": {}}]
        made = fast.http.post(
            "/v1/messages", json=body(wish, max_tokens=n, tools=tools, tool_choice={"type": "any"})
        ).json()
        assert made["content"] == [] and made["stop_reason"] == "max_tokens"


def test_the_conversation_reaches_the_template(fast: Running) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"p": 1}'}}
    messages = [
        {"role": "system", "content": "be"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
        {"role": "user", "content": "<|crash|> is only text"},
    ]
    made = fast.http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS}).json()
    assert made["choices"][0]["message"]["content"] == "<|crash|> is only text"
    text = '[tool read][system]be[assistant][call {"name": "read", "arguments": {"p": 1}}][tool]done[user]'
    assert made["usage"]["prompt_tokens"] == len(text) + 2 * len("<|crash|> is only text") + 2


def test_reasoning(fast: Running) -> None:
    for made in (fast.ask("<think>\nhm\n</think>\n\nso"), fast.ask("hm\n</think>\n\nso", "think")):
        message = made.json()["choices"][0]["message"]
        assert message["reasoning_content"] == "hm" and message["content"] == "so"
    chunks = events(fast.ask("hm\n</think>\n\nso", "think", stream=True))
    assert deltas(chunks, "reasoning_content") == "hm" and deltas(chunks, "content") == "so"


def test_lone_surrogates_hurt_nobody(fast: Running) -> None:
    wish = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    raw = json.dumps(body(wish + "\ud800", tools=TOOLS)).encode()
    made = fast.http.post("/v1/chat/completions", content=raw).json()
    assert made["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "\ud800"


def test_requests_at_once(slow: Running) -> None:
    replies: dict[int, str] = {}

    def ask(i: int) -> None:
        made = slow.ask(f"reply {i}", stream=bool(i % 2))
        if i % 2:
            replies[i] = deltas(events(made), "content")
        else:
            replies[i] = made.json()["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert replies == {i: f"reply {i}" for i in range(6)}


def test_models_and_health(fast: Running) -> None:
    (model,) = fast.http.get("/v1/models").json()["data"]
    assert model["id"] == "fake-model" and model["object"] == "model"
    assert fast.http.get("/health").json() == {"status": "ok", "daemon": "ready"}


SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
UNIQUE = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]
NAMED = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "title": "uniqueItems"}}}]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "status", "named", "param"),
    [
        (b"{", 400, "JSON", None),
        (b"[]", 400, "object", None),
        (b"\xff", 400, "JSON", None),
        (b"[" * 100_000, 400, "JSON", None),
        (b"{}", 400, "messages", "messages"),
        (json.dumps(body("x", n=9)).encode(), 400, "n:", "n"),
        (json.dumps(body("x", temperature=-3)).encode(), 400, "temperature", "temperature"),
        (json.dumps({"messages": [{"role": "user", "content": 5}]}).encode(), 400, "content", "messages[0].content"),
        (json.dumps(body("refused")).encode(), 400, "refused", None),
        (json.dumps(body("refuse")).encode(), 400, "not with me", "messages"),
        (json.dumps(body("x" * 5000)).encode(), 400, "maximum context length is", "messages"),
        (json.dumps(body("x", response_format=FORM)).encode(), 400, "uniqueItems", "response_format"),
        (json.dumps(body("x", tools=NAMED, tool_choice="required")).encode(), 400, "uniqueItems", "tools"),
        (json.dumps(body("nan")).encode(), 500, "logits", None),
    ],
)
def test_errors_have_openai_s_shape(fast: Running, content: bytes, status: int, named: str, param: str | None) -> None:
    response = fast.http.post("/v1/chat/completions", content=content)
    assert response.status_code == status
    error = response.json()["error"]
    assert named in error["message"] and error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["param"] == param


def test_an_error_in_a_stream_is_an_event(fast: Running) -> None:
    chunks = events(fast.ask("nan", stream=True))
    assert chunks[-1]["error"]["code"] == "numerical" and "logits" in chunks[-1]["error"]["message"]


def test_other_paths_and_methods(fast: Running) -> None:
    for response, status in ((fast.http.get("/v2"), 404), (fast.http.get("/v1/chat/completions"), 405)):
        assert response.status_code == status and response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("depth", [60, 900, 100_000])
def test_arguments_that_are_nested_deeply_hurt_nobody(fast: Running, depth: int) -> None:
    function = {"name": "read", "arguments": '{"a":' * depth + "1" + "}" * depth}
    message = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    messages = [*body("hi")["messages"], message, *body("hi")["messages"]]
    response = fast.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == (200 if depth < 100 else 400)  # of text, in the end, and too long a one here


def test_a_body_too_large(fast: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 1000)
    assert fast.ask("x" * 1000).status_code == 413
    assert fast.ask("x" * 100).status_code == 200


def test_too_many_requests(fast: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_REPLIES", 0)
    response = fast.ask("x")
    assert response.status_code == 429 and response.json()["error"]["type"] == "rate_limit_error"


def at_once(port: int, path: str, bodies: list[dict], then: tuple[int, Callable[[], None]]) -> list[httpx.Response]:
    """The answers to requests that come together. then: what is done when so many have been answered."""
    n_first, do = then

    async def ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=len(bodies))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=PATIENCE_S) as client:
            asked = [asyncio.create_task(client.post(path, json=made)) for made in bodies]
            for answered in itertools.islice(asyncio.as_completed(asked), n_first):
                await answered
            do()
            return await asyncio.gather(*asked)

    return asyncio.run(ask())


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_more_requests_at_once_than_there_are_places(stream: bool) -> None:
    with running() as made:
        daemon = psutil.Process(made.backend.client().pid)
        daemon.suspend()  # no reply ends, and gives its place to another, before all have asked
        try:
            asked = [body("x" * 9, stream=stream)] * 100
            responses = at_once(made.port, "/v1/chat/completions", asked, (36, daemon.resume))
        finally:
            daemon.resume()
        assert Counter(response.status_code for response in responses) == {200: 64, 429: 36}
        refused = next(response for response in responses if response.status_code == 429)
        assert refused.headers["retry-after"] and refused.json()["error"]["code"] == "rate_limit_exceeded"
        wait_until(lambda: replies(made) == 0)
        assert made.ask("again").status_code == 200


def replies(made: Running) -> float:
    # On a connection of its own: the deadlines of some tests are shorter than a busy machine's pauses.
    lines = made.http.get("/metrics", headers={"connection": "close"}).text.splitlines()
    (line,) = [line for line in lines if line.startswith("spark_replies ")]
    return float(line.split()[1])


def test_the_limit_of_the_daemon_is_no_fault_of_the_request() -> None:
    with running(fake(step_s=0.02)) as made:
        client = made.backend.client()
        waiting = [client.generate(range(200), max_tokens=200) for _ in range(MAX_WAITING)]
        for path, status, kind in (
            ("/v1/chat/completions", 429, "rate_limit_error"), ("/v1/messages", 529, "overloaded_error"),
        ):  # fmt: skip
            for stream in (False, True):
                response = made.http.post(path, json=body("x", max_tokens=9, stream=stream))
                assert response.status_code == status and response.json()["error"]["type"] == kind
                assert response.headers["retry-after"] and "waiting already" in response.json()["error"]["message"]
        for stream in waiting:
            stream.close()
        assert made.ask("x").status_code == 200


@pytest.mark.slow
def test_places_are_given_back_however_a_reply_ends(slow: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_REPLIES", 1)

    def leave(stream: bool, when: Callable[[], bool]) -> None:
        content = json.dumps(body("y" * 1500, stream=stream)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", slow.port), timeout=PATIENCE_S) as connection:
            connection.sendall(head.encode() + content)
            wait_until(when)

    for stream in (False, True):
        for wish in ("nan", "refused", "refuse", "x", "x" * 5000):
            assert slow.ask(wish, stream=stream).status_code in (200, 400, 500), wish
        for when in (lambda: replies(slow) == 1, lambda: slow.stats()["queued"] == 1):
            leave(stream, when)
            wait_until(lambda: replies(slow) == 0)
            wait_until(lambda: slow.stats()["queued"] == 0)
    for stream in (False, True) * 3:  # what leaves at once may begin after what is asked next, which is refused then
        leave(stream, lambda: True)
        wait_until(lambda: slow.ask("x").status_code == 200)


def test_a_bad_form_is_refused_before_a_stream_begins(fast: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array", "uniqueItems": True}}}
    for more in ({"tools": TOOLS}, {}):
        for stream in (True, False):
            response = fast.ask("x", response_format=form, stream=stream, **more)
            assert response.status_code == 400 and "uniqueItems" in response.json()["error"]["message"]


def test_a_required_call_is_kept_to_what_can_be_enforced(fast: Running) -> None:
    assert fast.ask("x", tools=UNIQUE, tool_choice="required").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("word", ["uniqueItems", "contains", "dependentRequired"])
def test_a_form_that_cannot_be_is_refused_by_the_client_s_field(fast: Running, word: str, stream: bool) -> None:
    schema = {"type": "array", "title": word}  # by which the fake engine knows what to say
    function = {"name": "f", "parameters": schema}
    required: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    wishes: list[tuple[str, str, dict[str, Any]]] = [
        ("chat/completions", "response_format", {"response_format": {"type": "json_schema", "json_schema": form}}),
        ("chat/completions", "tools", required),
        ("responses", "text.format", {"text": {"format": form}}),
        ("responses", "tools", {"tools": [{"type": "function", **function}], "tool_choice": "required"}),
        ("messages", "output_format", {"output_format": form}),
        ("messages", "output_config.format", {"output_config": {"format": form}}),
        ("messages", "tools", {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}}),
    ]
    for path, field, more in wishes:
        asked = {"input": "x"} if path == "responses" else {"messages": body("x")["messages"], "max_tokens": 9}
        response = fast.http.post(f"/v1/{path}", json=asked | more | {"stream": stream})
        assert response.status_code == 400, (path, field)
        error = response.json()["error"]
        assert error["message"].startswith(f"{field}: ") and "'grammar'" not in error["message"], error
        assert path == "messages" or error["param"] == field


def test_names_of_other_machines_are_not_answered(fast: Running) -> None:
    for host, status in (
        ("evil.example", 403), ("evil.example:80", 403), ("[", 403), ("", 403), ("localhost.evil.example", 403),
        ("localhost/evil", 403), ("localhost?evil", 403), ("localhost#evil", 403), ("evil.example@localhost", 403),
        ("localhost:80:80", 403), ("localhost:x", 403), ("localhost evil", 403), ("localhost,evil.example", 403),
        ("::1", 403), ("[::1", 403), ("[127.0.0.1]x", 403),
        ("localhost", 200), ("localhost:", 200), ("LOCALHOST:99", 200), ("127.0.0.1:5", 200), ("[::1]:5", 200),
    ):  # fmt: skip
        assert fast.http.get("/health", headers={"host": host}).status_code == status, host


def test_the_api_key() -> None:
    with running(api_key="k\u00e9y") as made:
        get = made.http.get
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic k\u00e9y"}, {"x-api-key": ""}):
            refused = get("/v1/models", headers=encoded(headers))
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        for headers in (
            {"authorization": "Bearer k\u00e9y"},
            {"authorization": "bearer k\u00e9y"},
            {"x-api-key": "k\u00e9y"},
        ):
            assert get("/v1/models", headers=encoded(headers | {"host": "any.example"})).status_code == 200
        assert get("/health").status_code == 200


def encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


# --- what goes wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_generation(slow: Running, stream: bool) -> None:
    served, steps = slow.stats()["served"], slow.stats()["steps"]
    content = json.dumps(body("y" * 1500, stream=stream)).encode()  # 30 s of work
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", slow.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + content)
        if stream:
            seen = b""
            while b'"content": "y"' not in seen:
                seen += connection.recv(65536)
        else:
            wait_until(lambda: slow.stats()["steps"] > steps)
        assert slow.stats()["queued"] == 1
    left_s = time.monotonic()
    wait_until(lambda: slow.stats()["queued"] == 0)
    assert time.monotonic() - left_s < 10.0 and slow.stats()["served"] == served


def test_a_daemon_that_crashes_is_started_again() -> None:
    with running() as made:
        pid = made.backend.client().pid
        response = made.ask("crash")
        assert response.status_code == 503 and response.json()["error"]["code"] == "daemon"
        assert "exit status 7" in response.json()["error"]["message"] and "fake engine" not in response.text
        assert made.http.get("/health").json()["daemon"] != "ready"
        assert made.ask("again").json()["choices"][0]["message"]["content"] == "again"
        again = made.backend.client().pid
        assert again != pid and made.http.get("/health").json()["daemon"] == "ready"
        assert events(made.ask("crash", stream=True))[-1]["error"]["code"] == "daemon"
        assert made.ask("and again").status_code == 200


def test_a_daemon_that_hangs_is_killed_and_started_again() -> None:
    with running(silence_s=1.0) as made:
        pid = made.backend.client().pid
        response = made.ask("hang")
        assert response.status_code == 504 and response.json()["error"]["code"] == "deadline"
        assert not psutil.pid_exists(pid)
        assert made.ask("again").status_code == 200


def test_a_reply_that_takes_too_long_harms_no_other() -> None:
    with running(fake(step_s=0.02), total_s=1.0) as made:
        pid = made.backend.client().pid
        response = made.ask("z" * 1500)
        assert response.status_code == 504 and "1 s" in response.json()["error"]["message"]
        wait_until(lambda: made.stats()["queued"] == 0)
        assert made.ask("ok").status_code == 200 and made.backend.client().pid == pid


def test_a_daemon_that_cannot_be_started_again() -> None:
    command = fake()
    with running(command) as made:
        command[2] = str(HERE / "no such file")
        assert made.ask("crash").status_code == 503
        response = made.ask("again")
        assert response.status_code == 503 and "exit status 2" in response.json()["error"]["message"]
        command[2:] = [*fake()[2:-1], "broken.gguf"]  # a model that it does not load any more
        for _ in range(2):
            response = made.ask("again")
            assert response.status_code == 503 and response.json()["error"]["code"] == "daemon"
            assert "cannot be started again: key 'general.architecture'" in response.json()["error"]["message"]


def test_logs_say_how_much_but_never_what(fast: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fast.ask("my secret", tools=TOOLS)
    fast.ask("my secret", stream=True)
    fast.ask("crash", "my secret")
    fast.ask("my secret", temperature=-1)
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "9 written" in text and " s: stop" in text and "secret" not in text and "read]" not in text
    fast.ask("the daemon is needed again")


@pytest.mark.slow
def test_what_was_learned_is_saved_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SAVE_EVERY_S", 0.05)
    path = tmp_path / "profile"
    with running(profile=path) as made:
        time.sleep(0.2)
        assert not path.exists()  # nothing was learned yet
        made.ask("one")
        wait_until(lambda: path.exists() and path.read_text() == "served=1\n")  # one may come while it is answered
        made.ask("two")
    assert path.read_text() == "served=2\n"  # at the end


def test_saving_goes_on_after_whatever_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SAVE_EVERY_S", 0.02)
    with running() as made:
        saved = list[int]()

        def save() -> None:
            saved.append(1)
            if len(saved) == 1:
                raise RuntimeError("can't start new thread")

        monkeypatch.setattr(made.backend, "save", save)
        wait_until(lambda: len(saved) > 2)
