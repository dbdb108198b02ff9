"""Bodies: what is counted is what JSON makes, large ones hold up nobody, and all of them together are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ground.errors import CapacityError, RequestError
from spark.apis import bodies
from spark.apis import chat as api_chat
from spark.apis import messages as api_messages
from spark.apis import responses as api_responses
from spark.apis.bodies import Wanted
from spark.server import app as server
from spark.speech import json_text
from spark.speech.json_text import count, one_body, parse_object
from tests.server.test_connections import chat, connected, post, rest
from tests.server.test_server import PATIENCE_S, Running, body, events, fake, replies, running, wait_until

TEXT = st.text(st.sampled_from('\\"[]{},: \n\u00e9\ud800ab') | st.characters(), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int]:
    """Containers, and the marks that stand before a value or key: one a container, even an empty one."""
    if isinstance(value, dict):
        inner = [counted(v) for v in value.values()]
        marks = 1 + len(value) + max(0, len(value) - 1)
    elif isinstance(value, list):
        inner = [counted(v) for v in value]
        marks = 1 + max(0, len(value) - 1)
    else:
        return 0, 0
    return 1 + sum(c for c, _ in inner), marks + sum(v for _, v in inner)


@given(JSON, st.booleans(), st.sampled_from([None, 0, 2]), st.integers(1, 40))
def test_what_is_counted_is_what_json_reads(value: Any, ascii_only: bool, indent: int | None, piece: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    whole = json_text._SLICE
    json_text._SLICE = piece  # strings lie across slices
    try:
        found = count(text)
    finally:
        json_text._SLICE = whole
    read = json.loads(text)
    assert found == counted(read)
    # No container goes uncounted, and no other value: each stands behind a mark, or is the whole text.
    assert found[1] + 1 >= sum(1 for _ in walk(read))


def walk(value: Any) -> Iterator[Any]:
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(inner)


@given(st.text(st.sampled_from('\\"[],a'), max_size=12))
def test_whatever_can_be_read_is_counted(text: str) -> None:
    try:
        read = json.loads(text)
    except ValueError:
        return
    assert count(text.encode()) == counted(read)


def test_too_much_in_a_body() -> None:
    lists = b'{"a":[' + b"[]," * json_text.MAX_CONTAINERS + b"1]}"
    with pytest.raises(RequestError, match="lists and objects"):
        parse_object(lists)
    for name, most in (("a", json_text.MAX_VALUES), ("prompt", json_text.MAX_READ_VALUES)):
        values = f'{{"{name}":[{"1," * most}1]}}'.encode()
        with pytest.raises(RequestError, match=f"values; the limit is {most}"):
            parse_object(values)
    longest = "1," * (1 << 20) + "1"
    assert len(parse_object(f'{{"prompt":[{longest}]}}'.encode())["prompt"]) == (1 << 20) + 1
    assert len(parse_object(f'{{"prompt":[[{longest}],"a"]}}'.encode())["prompt"]) == 2
    text = '"[{,:\\' * 100_000
    assert parse_object(json.dumps({"a": text}).encode()) == {"a": text}


COUNTED = Wanted(api_messages.parse_count, api_messages.kept, 1 << 30)


def with_arguments(path: str, *arguments: str) -> dict[str, Any]:
    if path == "/v1/responses":
        calls = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": text} for text in arguments]
        return {"input": [*calls, {"role": "user", "content": "x"}], "max_output_tokens": 1}
    functions = [{"id": "c", "function": {"name": "f", "arguments": text}} for text in arguments]
    said = {"role": "assistant", "tool_calls": functions}
    return {"messages": [said, {"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.mark.parametrize("api", [api_chat, api_responses])
def test_what_is_in_strings_counts_as_the_body_s(api: Any) -> None:
    path = "/v1/responses" if api is api_responses else ""
    half = json.dumps({"a": [[]] * (json_text.MAX_CONTAINERS // 2)})
    with one_body():
        api.parse(with_arguments(path, half))
    with one_body(), pytest.raises(RequestError, match="arguments has 65540 lists and objects; the limit is 65536"):
        api.parse(with_arguments(path, half, half))
    with one_body(), pytest.raises(RequestError, match="values; the limit is 524288"):
        api.parse(with_arguments(path, json.dumps({"a": [0] * json_text.MAX_VALUES})))
    with one_body():  # brackets that are no JSON of a call's are text
        made = api.parse(with_arguments(path, *[json.dumps({"a": "[{,:" * 200_000})] * 2, "{" * 60_000, "[" * 60_000))
    assert [call.arguments.keys() for call in made.messages[0].tool_calls] == [{"a"}, {"a"}, {"input"}, {"input"}]


def test_nothing_but_what_is_needed_of_a_body_is_left() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * 500]}}}]
    content = json.dumps(body("hello", metadata={"a": [1]}, stream_options={"include_usage": True}, tools=tools))
    kept, asked = bodies._read(Wanted(api_chat.parse, api_chat.kept, 1000), content.encode())
    assert kept == {"stream_options": {"include_usage": True}}
    assert asked.tools and asked.text_chars == 5 and 500 < asked.tool_chars < 700
    for more in ({}, {"messages": body("h" * 9000)["messages"]}):
        content = json.dumps(body("hello", tools=tools) | more)
        kept, asked = bodies._read(Wanted(api_chat.parse, api_chat.kept, 400), content.encode())
        assert kept == {"stream_options": {"include_usage": False}}
        assert asked.tools == asked.messages == () and asked.text_chars + asked.tool_chars > 500
    content = json.dumps(body("hello", tools=tools, tool_choice="none"))
    assert bodies._read(Wanted(api_chat.parse, api_chat.kept, 400), content.encode())[1].messages


def test_other_encodings_are_no_json() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    for name in ("utf-16", "utf-32", "utf-16-le"):
        with pytest.raises(RequestError, match="not JSON"):
            parse_object('{"a": 1}'.encode(name))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("9" * 5000, "the body is not JSON: an integer has too many digits"),
        ("1e400", "the body is not JSON: a number is too large"),
        ("NaN", "the body is not JSON: NaN is not a number of JSON"),
        ("[" * 50_000 + "]" * 50_000, "the body is nested more than 64 levels deep"),
        ('{"a":' * 60 + "[[[[[[]]]]]]" + "}" * 60, "the body is nested more than 64 levels deep"),
        ('"\n"', "the body is not JSON: Invalid control character at character 6"),
    ],
    ids=["digits", "infinite", "NaN", "far too deep", "too deep", "control"],
)
def test_what_cannot_be_read_is_told_in_words_of_ours(value: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_object(f'{{"a":{value}}}'.encode())
    assert refused.value.message == said


def test_what_was_found_is_told_as_json_has_it() -> None:
    for value, found in ((5, "an integer"), ({}, "an object"), ("x", "a string"), (None, "null"), ([], "a list")):
        with pytest.raises(RequestError, match=f"found {found}$"):
            api_chat.parse({"messages": [value]} if value != {} else {"messages": {}})


# --- in a server ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> Iterator[Running]:
    with running(fake(step_s=0.01)) as found:
        yield found


LISTS = b'{"messages":[' + b"[]," * 10_000_000 + b"[]]}"
CSV = json.dumps(body('1,"two",[3],{4}\n' * (26 << 16))).encode()
MESSAGES = b'{"messages":[' + b'{"role":"user","content":"x"},' * 1_000_000 + b"{}]}"


def gaps(made: Running, work: Any) -> float:
    """The longest time between two events of a stream while other threads work."""
    times: list[float] = []
    over = threading.Event()

    def follow() -> None:
        with made.http.stream("POST", "/v1/chat/completions", json=body("a" * 1500, stream=True)) as response:
            for _ in response.iter_lines():
                times.append(time.monotonic())
                if over.is_set():
                    break

    thread = threading.Thread(target=follow)
    thread.start()
    wait_until(lambda: len(times) > 5)
    began = len(times)
    work()
    over.set()
    thread.join(PATIENCE_S)
    return max(b - a for a, b in zip(times[began - 1 :], times[began:], strict=False))


@pytest.mark.slow
def test_hostile_bodies_hold_up_no_stream(made: Running) -> None:
    answers: list[tuple[bytes, bytes]] = []

    def send(content: bytes) -> None:
        with connected(made.port, post("/v1/chat/completions", content, "connection: close")) as one:
            answers.append((content[:20], rest(one)))

    def work() -> None:
        threads = [threading.Thread(target=send, args=(content,)) for content in (LISTS, CSV, MESSAGES, LISTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)

    assert max(map(len, (LISTS, CSV, MESSAGES))) < bodies.MAX_BODY_BYTES
    longest_s = gaps(made, work)
    assert longest_s < 1.0, longest_s  # 9 s and more with one such body; the machine is shared
    assert len(answers) == 4 and all(said.startswith(b"HTTP/1.1 400 ") for _, said in answers), answers
    said = b"".join(text for _, text in answers)
    assert said.count(b"lists and objects; the limit") == 3 and said.count(b"maximum context length is") == 1


STRINGS = {"a": [str(i) for i in range(json_text.MAX_VALUES - 100)]}
ENUM = [{"type": "function", "function": {"name": "f", "parameters": {"enum": [0] * (json_text.MAX_VALUES - 100)}}}]


@pytest.mark.parametrize("name", ["chat", "responses", "metadata", "tools", "schema", "prompt"])
def test_bodies_at_the_limits_hold_up_no_stream(made: Running, name: str) -> None:
    path, status = "/v1/chat/completions", 400
    match name:
        case "chat" | "responses":
            path = path if name == "chat" else "/v1/responses"
            asking = with_arguments(path, '{"a":[' + "[]," * 3_000_000 + "[]]}")
        case "metadata":
            path, status = "/v1/messages/count_tokens", 200
            asking = body("x", metadata=STRINGS)
        case "tools":
            asking = body("x", tools=ENUM)
        case "schema":
            form = {"name": "f", "schema": {"enum": STRINGS["a"]}}
            asking = body("x", response_format={"type": "json_schema", "json_schema": form})
        case _:
            path, asking = "/v1/completions", {"prompt": [100] * (1 << 20)}
    content = json.dumps(asking, separators=(",", ":")).encode()
    answers: list[bytes] = []

    def work() -> None:
        with connected(made.port, post(path, content, "connection: close")) as one:
            answers.append(rest(one))

    longest_s = gaps(made, work)
    assert answers[0].startswith(f"HTTP/1.1 {status} ".encode()), answers
    assert longest_s < 0.5, longest_s  # 2 s for arguments; 0.1 s where nothing else runs
    if name == "tools":
        assert b'"param": "tools"' in answers[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory of threads of another system is not so clear")
def test_bodies_that_come_together_are_read_one_after_the_other(
    made: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop waits for the lock with all that are read at a time; the smaller ones wait for no others."""
    begun: list[int] = []
    go = threading.Event()
    read = bodies._read

    def held(wanted: Wanted, content: bytes, added: bodies.Size = bodies.NOTHING) -> Any:
        if len(content) > 100_000:
            begun.append(len(content))
            assert go.wait(PATIENCE_S)
        return read(wanted, content, added)

    monkeypatch.setattr(bodies, "_read", held)
    content = chat("x" * 100_000)
    with contextlib.ExitStack() as waiting:
        for _ in range(3):
            waiting.enter_context(connected(made.port, post("/v1/chat/completions", content)))
        wait_until(lambda: len(begun) > 0)
        for n in (10, 10_000, 60_000):
            asked = made.http.post("/v1/messages/count_tokens", json=body("x" * n))
            assert asked.status_code == 200 and asked.json()["input_tokens"] > n
        assert len(begun) == 1
        go.set()
        wait_until(lambda: len(begun) == 3)


class Turns:
    """Bodies that are read in a turn, which wait until they are let go, by what is in front of their padding."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()
        read, ask = bodies._read, bodies._Aside._ask
        monkeypatch.setattr(bodies, "_read", lambda *asked: self._held(asked[1], lambda: read(*asked)))
        monkeypatch.setattr(bodies._Aside, "_ask", lambda *asked: self._held(asked[2], lambda: ask(*asked)))

    def _held(self, content: bytes, work: Any) -> Any:
        if len(content) > bodies.SMALL_BYTES:
            self.begun.append(content[: content.index(b" ")].decode())
            assert self.go.wait(PATIENCE_S)
        return work()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    made = Turns(monkeypatch)
    yield made
    made.go.set()


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("n", [bodies.MIDDLE_BYTES // 2, bodies.MIDDLE_BYTES * 2, bodies.LARGE_BYTES * 2])
def test_whoever_leaves_before_his_body_s_turn_takes_none(made: Running, turns: Turns, path: str, n: int) -> None:
    with contextlib.ExitStack() as staying:
        staying.enter_context(connected(made.port, post(path, b"first" + b" " * n)))
        wait_until(lambda: turns.begun == ["first"])
        with contextlib.ExitStack() as leaving:
            for i in range(5):
                leaving.enter_context(connected(made.port, post(path, b"%d" % i + b" " * n)))
            wait_until(lambda: replies(made) == 6)
        wait_until(lambda: replies(made) == 1)
        last = staying.enter_context(connected(made.port, post(path, b"last" + b" " * n, "connection: close")))
        wait_until(lambda: replies(made) == 2)
        turns.go.set()
        assert b"not JSON" in rest(last) and turns.begun == ["first", "last"]


@pytest.mark.parametrize("n", [bodies.MIDDLE_BYTES, bodies.LARGE_BYTES * 2])
def test_bodies_that_wait_take_places(made: Running, turns: Turns, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(server, "MAX_REPLIES", 2)
    content = b"x" + b" " * n
    with contextlib.ExitStack() as staying:
        for i in range(2):
            staying.enter_context(connected(made.port, post("/v1/messages/count_tokens", content)))
            wait_until(lambda i=i: replies(made) == i + 1)
        for path, status in (("/v1/messages/count_tokens", 529), ("/v1/messages", 529), ("/v1/responses", 429)):
            assert made.http.post(path, content=content).status_code == status
        turns.go.set()
        wait_until(lambda: replies(made) == 0)


@pytest.mark.slow
def test_a_body_s_objects_are_gone_before_its_reply() -> None:
    with running(fake(step_s=0.02, ctx=20_000)) as made, contextlib.ExitStack() as stack:
        content = chat("z" * 3000, metadata={"a": "\U0001f600" + "a" * (8 << 20)})  # 4 bytes a character in memory
        sent = post("/v1/chat/completions", content)  # one for all: what the clients keep is in this process, too
        made.ask("before")
        stack.callback(tracemalloc.stop)
        tracemalloc.start(1)  # not the process's memory, which keeps what was freed as the allocator likes
        for i in range(6):
            stack.enter_context(connected(made.port, sent))
            wait_until(lambda n=i: replies(made) == n + 1)
        wait_until(lambda: made.stats()["queued"] >= 6)
        assert tracemalloc.get_traced_memory()[0] < 8 << 20  # one body, or a quarter of what is made of one


def test_bad_tokens_are_named(made: Running) -> None:
    for prompt, where in (([5, 10**6], "prompt"), ([[5], [10**6]], "prompt[1]"), (["a", [-1]], "prompt[1]")):
        error = made.http.post("/v1/completions", json={"prompt": prompt}).json()["error"]
        assert error["param"] == where and error["message"].startswith(f"{where}: "), error


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
def test_a_large_body_is_answered_as_a_small_one(made: Running, path: str) -> None:
    asking: dict[str, Any] = {"max_tokens": 30}
    if path == "/v1/completions":
        asking["prompt"] = "x"
    elif path == "/v1/responses":
        asking = {"input": "x"}
    else:
        asking["messages"] = [{"role": "user", "content": "x"}]
    padding = {"client_metadata": {"p": "\u00e9" * bodies.LARGE_BYTES}}
    for more in ({}, padding):
        response = made.http.post(path, json=asking | more)
        assert response.status_code == 200
        assert response.json().get("object", "message") in (
            "chat.completion", "text_completion", "response", "message",
        )  # fmt: skip
    for more in ({"temperature": -1}, {"temperature": -1} | padding):
        response = made.http.post(path, json=asking | more)
        assert response.status_code == 400 and "temperature" in response.json()["error"]["message"]
    assert b"not JSON" in made.http.post(path, content=b" " * bodies.LARGE_BYTES + b"[").content


def test_tokens_of_a_large_body_are_counted(made: Running) -> None:
    asking = {"messages": [{"role": "user", "content": "abc"}], "metadata": {"p": "x" * bodies.LARGE_BYTES}}
    assert made.http.post("/v1/messages/count_tokens", json=asking).json()["input_tokens"] > 3


def test_a_body_that_says_that_it_is_too_large_is_refused_unread(made: Running) -> None:
    for path in ("/v1/messages", "/v1/chat/completions"):
        with connected(made.port, post(path, b"", "expect: 100-continue", length=1 << 40)) as one:
            assert one.recv(65536).startswith(b"HTTP/1.1 413 ")


CODED = {"gzip": gzip.compress, "deflate": zlib.compress, "br": bytes, "zstd": bytes, "GZIP, Identity": gzip.compress}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("coding", CODED)
def test_a_compressed_body_is_refused_by_its_coding(made: Running, path: str, coding: str) -> None:
    asking = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "z": "x" * 100_000}).encode()
    for said in (coding, [("content-encoding", coding), ("content-encoding", "x" * 2000)]):
        headers: Any = {"content-encoding": said} if isinstance(said, str) else said
        refused = made.http.post(path, content=CODED[coding](asking), headers=headers)
        assert refused.status_code == 415 and refused.headers["accept-encoding"] == "identity"
        error = refused.json()["error"]
        assert f"Content-Encoding '{coding}" in error["message"] and len(error["message"]) < 300
        assert error["type"] == "invalid_request_error"
    for plain in ("identity", "Identity", ""):
        assert made.http.post(path, content=asking, headers={"content-encoding": plain}).status_code == 200


def test_all_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_ALL_BYTES", 100_000)
    with running() as made:
        half = [post("/v1/messages", b" " * 40_000, length=50_000) for _ in range(2)]
        with connected(made.port, half[0]), connected(made.port, half[1]):
            said = b""

            def refused() -> bool:
                nonlocal said
                with connected(made.port, post("/v1/messages", chat("x" * 30_000), "connection: close")) as one:
                    said = rest(one)
                return said.startswith(b"HTTP/1.1 529 ")

            wait_until(refused)
            assert b"overloaded_error" in said
            assert made.ask("small").status_code == 200
        wait_until(lambda: not refused())


def test_bodies_that_take_long_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_ALL_BYTES", 100_000)
    monkeypatch.setattr(bodies, "SLOW_S", 0.5)
    with running() as made, contextlib.ExitStack() as stack:
        begun = post("/v1/messages", b" " * 40_000, "connection: close", length=50_000)
        slow = [stack.enter_context(connected(made.port, begun)) for _ in range(2)]
        wait_until(lambda: made.app.state.bodies._n_bytes == 80_000)
        time.sleep(0.6)
        assert made.ask("x" * 1200, metadata={"p": "x" * 30_000}).status_code == 200
        slow[0].settimeout(2.0)
        assert slow[0].recv(65536).startswith(b"HTTP/1.1 529 ")  # the one that came first, and no more than are needed
        slow[1].sendall(b"{}" + b" " * 9_998)
        assert b"max_tokens: missing" in rest(slow[1])
        wait_until(lambda: made.app.state.bodies._n_bytes == 0)


@pytest.mark.slow
def test_a_process_that_ends_is_started_again(made: Running) -> None:
    large = body("hello", metadata={"p": "x" * bodies.LARGE_BYTES})
    for _ in range(2):
        assert made.http.post("/v1/chat/completions", json=large).status_code == 200
        (process,) = [c for c in psutil.Process().children() if "bodies.work" in " ".join(c.cmdline())]
        process.kill()
        process.wait(PATIENCE_S)
    assert events(made.http.post("/v1/chat/completions", json=large | {"stream": True}))


@pytest.mark.slow
def test_a_process_that_has_ended_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_BOOT", bodies._BOOT.replace("bodies.work", "bodies._IDLE_S = 0.5; bodies.work"))
    aside = bodies._Aside()
    try:
        for _ in range(2):
            assert asyncio.run(aside.read(COUNTED, json.dumps(body("x")).encode()))[1].messages
            assert aside._process is not None
            wait_until(lambda: not psutil.pid_exists(aside._process.pid))
    finally:
        aside.close()


def test_a_body_whose_reading_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_READ_S", 0.0)
    aside = bodies._Aside()
    try:
        with pytest.raises(CapacityError, match="could not be read"):
            asyncio.run(aside.read(COUNTED, b" " * bodies.LARGE_BYTES + b"{}"))
    finally:
        aside.close()


@pytest.mark.parametrize("how", ["takes too long", "ends its process"])
def test_no_body_is_read_twice(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    aside, started = bodies._Aside(), list[int]()
    start = bodies._Aside._start

    def counted(made: bodies._Aside) -> subprocess.Popen[bytes]:
        started.append(1)
        return start(made)

    monkeypatch.setattr(bodies._Aside, "_start", counted)
    work = {"takes too long": "import time; time.sleep(60)", "ends its process": "import os; os._exit(3)"}[how]
    boot = f"bodies._read = lambda w, c, a: (1, 2) if len(c) < 9 else exec({work!r}); bodies.work"
    monkeypatch.setattr(bodies, "_BOOT", bodies._BOOT.replace("bodies.work", boot))
    try:
        assert asyncio.run(aside.read(COUNTED, b"{}")) == (1, 2)  # so that the process is there already
        monkeypatch.setattr(bodies, "_READ_S", 1.0)
        with pytest.raises(CapacityError, match="could not be read"):
            asyncio.run(aside.read(COUNTED, b" " * bodies.LARGE_BYTES + b"{}"))
        assert len(started) == 1
        monkeypatch.setattr(bodies, "_READ_S", 60.0)
        assert asyncio.run(aside.read(COUNTED, b"{}")) == (1, 2)
        assert len(started) == 2
    finally:
        aside.close()


@pytest.mark.slow
def test_the_process_ends_with_its_server() -> None:
    code = (
        "import asyncio; from spark.apis import bodies, messages as api_messages; aside = bodies._Aside()\n"
        "wanted = bodies.Wanted(api_messages.parse_count, api_messages.kept, 9)\n"
        "try: asyncio.run(aside.read(wanted, b'{}'))\n"
        "except Exception as error: print(error, aside._process.pid, flush=True)\n"
        "import time; time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = server.stdout.readline().split()
        assert said[:2] == ["messages:", "missing"]
        process = psutil.Process(int(said[-1]))
        server.kill()
        process.wait(PATIENCE_S)
