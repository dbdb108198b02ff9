"""Clients that send half a request, read nothing, come in hundreds or leave half-way: everybody else is served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from spark.server import app as server
from spark.server import connections
from spark.server.generation import KEEP_ALIVE_S
from tests.server.test_serve import served
from tests.server.test_server import PATIENCE_S, Running, body, deltas, fake, replies, running, wait_until


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a test can wait for."""
    monkeypatch.setattr(connections, "HEAD_S", 0.6)
    monkeypatch.setattr(connections, "PACE_S", 0.6)
    monkeypatch.setattr(server, "_TICKS", 1)


@contextlib.contextmanager
def connected(port: int, sent: bytes = b"", *, narrow: bool = False) -> Iterator[socket.socket]:
    with socket.socket() as made:
        made.settimeout(PATIENCE_S)
        if narrow:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        made.connect(("127.0.0.1", port))
        made.sendall(sent)
        yield made


def rest(connection: socket.socket) -> bytes:
    """What comes until the end."""
    made = b""
    with contextlib.suppress(ConnectionError):
        while received := connection.recv(65536):
            made += received
    return made


def post(path: str, content: bytes, *more: str, length: int | None = None, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "host: localhost", f"content-length: {length or len(content)}", *more]
    return "\r\n".join([*lines, "\r\n"]).encode() + content


def chat(wish: str, **more: object) -> bytes:
    return json.dumps(body(wish, **more)).encode()


# --- time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/compl", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx"])
def test_a_head_that_does_not_come(hasty: None, sent: bytes) -> None:
    with running() as made, connected(made.port, sent) as connection:
        said = rest(connection)
        assert said.startswith(b"HTTP/1.1 408 ") if sent else said == b""
        assert made.http.get("/health").status_code == 200


@pytest.mark.parametrize("part", ["head", "body", "second head"])
def test_bytes_that_trickle_in_extend_nothing(hasty: None, part: str) -> None:
    with running() as made, connected(made.port) as connection:
        if part == "second head":
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 " in connection.recv(65536)
        connection.sendall(post("/v1/messages", b"{", length=4000) if part == "body" else b"GET /")
        began_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < began_s + PATIENCE_S:
                connection.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began_s < 5.0


def test_a_body_that_stops_is_answered_in_its_api_s_shape(hasty: None) -> None:
    with running() as made:
        for path in ("/v1/chat/completions", "/v1/messages"):
            with connected(made.port, post(path, b'{"a', length=1000)) as connection:
                head, _, said = rest(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head
            assert (json.loads(said).get("type") == "error") == (path == "/v1/messages")
            assert "body did not come in time" in json.loads(said)["error"]["message"]


def test_a_body_that_keeps_to_the_pace_is_read(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_BYTES_S", 200)
    with running() as made:
        content = chat("slow but honest") + b" " * 2000
        with connected(made.port, post("/v1/chat/completions", b"", "connection: close", length=len(content))) as slow:
            for at in range(0, len(content), 100):
                slow.sendall(content[at : at + 100])
                time.sleep(0.1)
            assert b"slow but honest" in rest(slow)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_gives_its_place_up(hasty: None, stream: bool) -> None:
    with running(fake(step_s=0.002 * stream, ctx=100_000)) as made:
        made.bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        before = made.stats()["served"]
        content = chat("z" * 12_000, stream=stream)
        with connected(made.port, post("/v1/chat/completions", content), narrow=True):
            wait_until(lambda: replies(made) == 1)
            wait_until(lambda: replies(made) == 0)
            wait_until(lambda: made.stats()["queued"] == 0)
            assert made.stats()["served"] == before + (not stream)  # a stream's work was cancelled
            wait_until(lambda: open_connections(made) <= 1)


class Wire:
    """A transport that remembers what is sent together."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.sent += [data] if data else []

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def test_a_head_goes_out_with_what_follows_at_once() -> None:
    async def sent(*steps: bytes | str) -> Wire:
        wire = Wire()
        joined = connections._Joined(wire, asyncio.get_running_loop())  # type: ignore[arg-type]
        for step in steps:
            if isinstance(step, bytes):
                joined.write(step)
            elif step == "close":
                joined.close()
            else:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert joined.is_closing() == ("close" in steps)
        return wire

    assert asyncio.run(sent(b"head ", b"one ", b"two")).sent == [b"head one ", b"two"]
    assert asyncio.run(sent(b"head ", "turn", b"one")).sent == [b"head ", b"one"]
    assert asyncio.run(sent(b"head ")).sent == [b"head "]
    assert asyncio.run(sent(b"head ", "close")).sent == [b"head "]


def open_connections(made: Running) -> int:
    return len(made.uvicorn.server_state.connections)


@pytest.mark.slow
def test_a_slow_reader_at_a_fair_pace_gets_everything(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REPLY_BYTES_S", 500)
    with running(fake(ctx=100_000)) as made:
        made.bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        content = chat("z" * 15_000)
        with connected(made.port, post("/v1/chat/completions", content, "connection: close"), narrow=True) as slow:
            got = b""
            while received := slow.recv(500):
                got += received
                time.sleep(0.03)
        assert b"z" * 15_000 in got


# --- number -------------------------------------------------------------------------------------------


def test_the_connection_that_is_idle_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as made, contextlib.ExitStack() as stack:
        made.uvicorn.connections.most = 4
        made.http.close()
        held = [stack.enter_context(connected(made.port, b"GET /")) for _ in range(4)]
        wait_until(lambda: open_connections(made) == 4)
        with connected(made.port, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n") as one:
            assert rest(one).startswith(b"HTTP/1.1 200 ")
        assert rest(held[0]) == b""
        held[1].sendall(b"health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert rest(held[1]).startswith(b"HTTP/1.1 200 ")


def test_where_all_are_busy_another_is_refused_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with running(fake(step_s=0.02)) as made, contextlib.ExitStack() as stack:
        made.uvicorn.connections.most = 2
        made.http.close()
        asking = post("/v1/chat/completions", chat("y" * 1500), "connection: close")
        for _ in range(2):
            stack.enter_context(connected(made.port, asking))
        wait_until(lambda: made.stats()["queued"] == 2)
        for _ in range(20):
            with connected(made.port, asking) as one:
                head, _, said = rest(one).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after" in head
                assert "too many connections" in json.loads(said)["error"]["message"]
        assert made.stats()["queued"] == 2
    assert sum("connections are open" in record.getMessage() for record in caplog.records) == 1


def limited(files: int, *, hard: bool) -> tuple[str, ...]:
    """The beginning of a command that may have so many files open."""
    return ("sh", "-c", f'ulimit {"-n" if hard else "-Sn"} {files}; exec "$@"', "sh")


@pytest.mark.slow
def test_more_half_open_connections_than_files(tmp_path: Path) -> None:
    with served(tmp_path, *limited(256, hard=True)) as (process, url), contextlib.ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        for i in range(600):
            sent = (b"", b"GET /", post("/v1/messages", b"{", length=99))[i % 3]
            with contextlib.suppress(ConnectionError):
                stack.enter_context(connected(port, sent))
        used_s = cpu_s(process.pid)
        for _ in range(3):
            response = httpx.post(f"{url}/v1/chat/completions", json=body("hello"), timeout=PATIENCE_S)
            assert response.json()["choices"][0]["message"]["content"] == "hello"
        time.sleep(1.0)
        assert cpu_s(process.pid) - used_s < 1.0
        assert psutil.Process(process.pid).num_fds() < 256
        process.kill()
        said = process.communicate(timeout=PATIENCE_S)[1]
    assert "Traceback" not in said and len(said.splitlines()) < 20, said


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@pytest.mark.slow
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1300, reason="the hard limit is too low")
def test_many_idle_connections_beside_a_request(tmp_path: Path) -> None:
    with served(tmp_path, *limited(256, hard=False)) as (process, url), contextlib.ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        for i in range(1100):
            stack.enter_context(connected(port, (b"", b"GET / HTTP/1.1\r\nhost: loc")[i % 2]))
        wait_until(lambda: psutil.Process(process.pid).num_fds() > 1100)
        response = httpx.post(f"{url}/v1/chat/completions", json=body("hello"), timeout=PATIENCE_S)
        assert response.json()["choices"][0]["message"]["content"] == "hello"


@pytest.mark.slow
def test_room_for_connections_lies_below_the_limit_of_files() -> None:
    code = "from spark.server.connections import *; import resource; print(room(), resource.getrlimit(7)[0])"
    for start, room, files in (
        (limited(200, hard=True), 136, 200), (limited(200, hard=False), 4096, 4160), ((), 4096, None),
    ):  # fmt: skip
        made = subprocess.run([*start, sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard > 4200 or files == 200:
            assert int(made.split()[0]) == room and files in (None, int(made.split()[1]))


# --- clients that shut their side -----------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_who_shuts_his_side_after_the_request_gets_the_answer(slow_one: Running, stream: bool, version: str) -> None:
    wish = "abc" * 60  # longer than it takes to look whether the client is still there
    with connected(slow_one.port, post("/v1/chat/completions", chat(wish, stream=stream), version=version)) as one:
        one.shutdown(socket.SHUT_WR)
        said = rest(one)
    looked = version == "1.1" and said.startswith(b"HTTP/1.1 100 ")  # a line that every client passes over
    assert looked or stream or version == "1.0"  # a stream may begin before anyone looks
    if looked:
        said = said.partition(b"\r\n\r\n")[2]
    assert said.startswith(b"HTTP/1.1 200 ")
    if not stream:
        assert json.loads(said.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == wish
    else:
        lines = [line[6:] for line in said.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: {")]
        assert deltas([json.loads(line) for line in lines], "content") == wish and b"[DONE]" in said


@pytest.fixture(scope="module")
def slow_one() -> Iterator[Running]:
    with running(fake(step_s=0.01)) as made:
        yield made


def test_requests_in_a_row_before_the_end(slow_one: Running) -> None:
    asking = post("/v1/chat/completions", chat("one")) + post("/v1/chat/completions", chat("two"))
    with connected(slow_one.port, asking) as one:
        one.shutdown(socket.SHUT_WR)
        said = rest(one)
    assert said.count(b"HTTP/1.1 200 ") == 2 and said.index(b'"one"') < said.index(b'"two"')


def test_half_a_request_and_the_end_is_no_request(slow_one: Running) -> None:
    for sent in (b"GET /", post("/v1/messages", b"{", length=10)):
        with connected(slow_one.port, sent) as one:
            one.shutdown(socket.SHUT_WR)
            assert rest(one) == b""


# --- what is no HTTP ------------------------------------------------------------------------------------


def test_chunks_of_a_byte_hold_up_nobody(slow_one: Running) -> None:
    head = b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    content = chat("in chunks", max_tokens=99)
    few = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (content[:50], content[50:])) + b"0\r\n\r\n"
    with connected(slow_one.port, head.replace(b"\r\nhost", b"\r\nconnection: close\r\nhost") + few) as one:
        assert b"in chunks" in rest(one)
    with connected(slow_one.port, head) as one:
        with contextlib.suppress(ConnectionError):
            one.sendall(b"1\r\n \r\n" * 100_000)
        assert rest(one).startswith((b"HTTP/1.1 400 ", b""))
    assert slow_one.http.get("/health").status_code == 200


@pytest.mark.parametrize("size", [b"f" * 18, b"2000001"])
def test_a_chunk_larger_than_a_body_is_refused_unread(slow_one: Running, size: bytes) -> None:
    for path in (b"/v1/messages", b"/v1/chat/completions"):
        head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n" % path
        for sent in (b"", b"{", b"2\r\n{ \r\n"):
            chunk = sent + size + b"\r\n" if sent.endswith(b"\n") else size + b"\r\n" + sent
            with connected(slow_one.port, head + chunk) as one:
                one.settimeout(5.0)
                said = rest(one)
            assert said.startswith(b"HTTP/1.1 413 ") and b"larger than 33554432 bytes" in said
            assert (b"request_too_large" in said) == (path == b"/v1/messages")
    with connected(slow_one.port, b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\n") as one:
        one.sendall(b"transfer-encoding: chunked\r\n\r\n")
        assert b"404" in one.recv(65536)
        one.sendall(size + b"\r\n" + b"x" * 100)  # behind an answer it is dropped as any body
        one.settimeout(0.3)
        with pytest.raises(TimeoutError):
            one.recv(1)


def test_garbage_makes_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    early = b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with running() as made:
        for sent in (b"\0\0\0", b"GET /\r\n", b"\x16\x03\x01", b"GET / HTTP/1.1") * 5:
            with connected(made.port, sent + b"\r\n\r\n") as one:
                assert rest(one).startswith(b"HTTP/1.1 400 ")
        for _ in range(5):
            with connected(made.port, early) as one:
                assert one.recv(65536).startswith(b"HTTP/1.1 404 ")
                one.sendall(b"no chunk\r\n")  # when the answer is out already
                rest(one)
    lines = [record for record in caplog.records if record.name != "httpx"]
    assert sum("not HTTP" in record.getMessage() for record in lines) == 1
    assert not any(record.exc_info for record in lines)


# --- answers that arrive --------------------------------------------------------------------------------


def test_who_is_refused_reads_why_whatever_he_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(fake(step_s=0.02)) as made, contextlib.ExitStack() as stack:
        made.uvicorn.connections.most = 2
        made.http.close()
        asking = post("/v1/chat/completions", chat("y" * 1500), "connection: close")
        for _ in range(2):
            stack.enter_context(connected(made.port, asking))
        wait_until(lambda: made.stats()["queued"] == 2)
        for i in range(20):
            with connected(made.port) as one:
                time.sleep(0.01 * (i % 3))
                for _ in range(40):  # a body that goes on after the answer is there
                    one.sendall(post("/v1/chat/completions", b"x" * 10_000))
                one.shutdown(socket.SHUT_WR)
                said = b""
                while received := one.recv(65536):  # a reset is an error here
                    said += received
            assert said.startswith(b"HTTP/1.1 503 ") and b"too many connections" in said
        monkeypatch.setattr(connections, "LINGER_S", 0.3)
        for _ in range(connections.LINGERING + 10):  # who does not leave is kept for a moment, and not all of them
            stack.enter_context(connected(made.port, b"GET"))
        assert len(made.uvicorn.connections.lingering) <= connections.LINGERING
        wait_until(lambda: open_connections(made) == 2)
        assert not made.uvicorn.connections.lingering


def test_who_was_refused_takes_nobody_s_place() -> None:
    with running() as made, contextlib.ExitStack() as stack:
        made.uvicorn.connections.most = 2
        made.http.close()
        busy = [stack.enter_context(connected(made.port, post("/v1/messages", b"{", length=9))) for _ in range(2)]
        wait_until(lambda: open_connections(made) == 2)
        refused = stack.enter_context(connected(made.port, b"GET /health"))
        assert refused.recv(65536).startswith(b"HTTP/1.1 503 ")
        busy[0].close()
        wait_until(lambda: open_connections(made) < 3)
        with connected(made.port, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n") as one:
            assert rest(one).startswith(b"HTTP/1.1 200 ")


def test_an_allowed_origin_reads_answers_that_come_before_the_application_s(hasty: None) -> None:
    with running(allow_origins=("http://a.example",)) as made:
        for origin in ("http://a.example", "http://b.example"):
            with connected(made.port, post("/v1/messages", b"{", f"origin: {origin}", length=1000)) as one:
                said = rest(one)
            status = b" 408 " if origin == "http://a.example" else b" 403 "
            assert status in said.partition(b"\r\n")[0], said
            shown = b"access-control-allow-origin: http://a.example" in said.lower()
            assert shown == (origin == "http://a.example") and b"vary: Origin" in said
    with running() as made, connected(made.port, post("/v1/messages", b"{", length=1000)) as one:
        said = rest(one)
        assert b" 408 " in said and b"vary" not in said


def test_an_empty_line_before_a_request_is_ignored() -> None:
    asking = b"GET /health HTTP/1.1\r\nhost: localhost\r\n%b\r\n"
    with running() as made:
        with connected(made.port, b"\r") as one:
            time.sleep(0.05)
            one.sendall(b"\n" + asking % b"" + b"\r\n" + asking % b"connection: close\r\n")
            assert rest(one).count(b"HTTP/1.1 200 ") == 2
        with connected(made.port, b"\r\n\r\n" + asking % b"") as one:
            assert rest(one).startswith(b"HTTP/1.1 400 ")


def test_a_target_that_names_the_host_counts_for_the_host_header() -> None:
    """As RFC 9112, 3.2.2 has it: also where the two are not the same, and for the origins of web pages."""

    def get(made: Running, target: str, host: str = "x.example", *more: str) -> bytes:
        lines = [f"GET {target} HTTP/1.1", f"host: {host}", "connection: close", *more, "\r\n"]
        with connected(made.port, "\r\n".join(lines).encode()) as connection:
            return rest(connection)

    with running() as made:
        own = f"http://127.0.0.1:{made.port}"
        for target in (f"{own}/v1/models", "HTTP://localhost/v1/models?x=http://y.example/", f"{own}?x", own):
            assert get(made, target).startswith(b"HTTP/1.1 200"), target
        assert b'"fake-model"' in get(made, f"{own}/v1/models", "x.example", f"origin: {own}")
        for target in ("http://x.example/v1/models", "http://localhost.x.example/health"):
            assert get(made, target, "localhost").startswith(b"HTTP/1.1 403")
        foreign = get(made, f"{own}/health", "x.example", "origin: http://x.example")
        assert foreign.startswith(b"HTTP/1.1 403")
        # Nobody is asked in another scheme, by no host, or with a name and a password.
        for target in ("https://localhost/health", "http:///health", "http://x.example@localhost/health"):
            assert get(made, target, "localhost").startswith(b"HTTP/1.1 404"), target
        with connected(made.port, post(f"{own}/v1/chat/completions", chat("so"), "connection: close")) as connection:
            assert b'"content": "so"' in rest(connection)


def test_a_client_that_leaves_before_anything_is_said_holds_no_place() -> None:
    with running() as made:
        daemon = psutil.Process(made.backend.client().pid)
        daemon.suspend()
        try:
            with connected(made.port, post("/v1/chat/completions", chat("x", stream=True))):
                wait_until(lambda: made.app.state.feed._replies() == 1)
                time.sleep(0.2)  # it waits for the daemon's first word
            left_s = time.monotonic()
            wait_until(lambda: made.app.state.feed._replies() == 0)
            assert time.monotonic() - left_s < KEEP_ALIVE_S / 2
        finally:
            daemon.resume()
        assert 'outcome="left"' in made.http.get("/metrics").text
