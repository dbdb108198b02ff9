"""`serve` as a whole: keys, addresses, profiles, and how it ends, with the fake daemon."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine.ground.config import EngineConfig
from engine.ground.errors import DaemonError, UsageError
from spark.daemon.client import Deadlines
from spark.server import app as server
from spark.server.app import ServeOptions, serve
from spark.server.supervisor import Supervisor
from tests.command_line import NANO, SPARK, environment, refused
from tests.fake_tokenizer import FakeTokenizer
from tests.server.test_server import HERE, PATIENCE_S, body, events, fake, wait_until


def test_other_hosts_need_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(UsageError, match="other machines"):
            serve(ServeOptions(EngineConfig(Path("none.gguf")), host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_key_that_is_none(tmp_path: Path, host: str) -> None:
    def refusal(**key: Any) -> UsageError:
        with pytest.raises(UsageError) as caught:
            serve(ServeOptions(EngineConfig(Path("none.gguf")), host=host, **key))
        return caught.value

    for empty in ("", " ", "\t\n"):
        assert "--api-key: expected a key, found nothing" in refusal(api_key=empty).message
    path = tmp_path / "key"
    assert f"{path} cannot be read: No such file" in refusal(api_key_file=path).message
    assert "cannot be read: Is a directory" in refusal(api_key_file=tmp_path).message
    for content, said in (
        (b"", "found nothing"), (b"\nkey\n", "found nothing"), (b"\xff\xfe\n", "UTF-8"), (b"k" * 5000, "4096 bytes"),
    ):  # fmt: skip
        path.write_bytes(content)
        assert said in refusal(api_key_file=path).message
    path.write_text("key")
    assert "both" in refusal(api_key="key", api_key_file=path).message


def test_a_key_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b" k\xc3\xa9y \r\nand more\n")
    options = ServeOptions(EngineConfig(Path("none.gguf")))
    assert server._api_key(options) is None
    assert server._api_key(replace(options, api_key_file=path)) == "k\u00e9y"
    assert server._api_key(replace(options, api_key=" key")) == "key"  # a header's value has no blanks at its ends


def test_the_command_refuses_an_empty_key(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    for option, value in (("--api-key", ""), ("--api-key-file", "key"), ("--api-key-file", "none")):
        said = refused("serve", NANO, "--host", "0.0.0.0", "--port", "0", option, value, cwd=tmp_path, status=2)
        assert option in said


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=str(port)) as caught:
            serve(ServeOptions(EngineConfig(Path("none.gguf")), port=port))
        assert "--port; 0 takes a free one" in caught.value.hint
    with pytest.raises(UsageError, match="cannot be served on") as caught:
        serve(ServeOptions(EngineConfig(Path("none.gguf")), host="192.0.2.1", api_key="k"))
    assert caught.value.hint == ""


def test_a_daemon_goes_on_from_what_was_learned(tmp_path: Path) -> None:
    learned = tmp_path / "learned.csv"
    options = ServeOptions(EngineConfig(Path("m.gguf")), learned_profile=learned)
    assert not any("--profile" in argument for argument in server._daemon_command(options))
    learned.write_text("")
    assert f"--profile={learned}" in server._daemon_command(options)


def test_a_daemon_starts_without_a_profile_that_was_deleted(tmp_path: Path) -> None:
    learned = tmp_path / "learned.csv"
    learned.write_text("")
    options = ServeOptions(EngineConfig(Path("m.gguf"), profile=learned), learned_profile=learned)
    assert f"--profile={learned}" in server._daemon_command(options)
    learned.unlink()
    assert not any("--profile" in argument for argument in server._daemon_command(options))


SERVER = """
import sys
from pathlib import Path
from engine.ground.config import EngineConfig
from spark.server import app as server
from fake_tokenizer import FakeTokenizer
server.load = lambda model: FakeTokenizer()
server._HURRY_S = float(sys.argv[2])
server.engine_command = lambda config: sys.argv[3:]
config = EngineConfig(Path("fake-00001-of-00002.gguf"))
server.serve(server.ServeOptions(config, port=0, learned_profile=Path(sys.argv[1])))
print("served")
"""


@contextlib.contextmanager
def served(
    tmp_path: Path, *before: str, hurry_s: float = server._HURRY_S
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of its own process, whose replies take long, and its address; before: begins the command.

    hurry_s: what replies get after Ctrl-C.
    """
    with subprocess.Popen(
        [*before, sys.executable, "-c", SERVER, str(tmp_path / "profile"), str(hurry_s), *fake(step_s=0.02)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}"},
    ) as process:
        try:
            line = next(line for line in process.stderr if " fake is served at" in line)
            yield process, line.split()[-1].removesuffix("/v1")
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_lets_replies_finish(tmp_path: Path, number: signal.Signals) -> None:
    with served(tmp_path) as (process, url):
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body("a" * 50, stream=True), timeout=PATIENCE_S
        ) as response:
            lines = response.iter_lines()
            next(line for line in lines if '"content": "a"' in line)
            daemon = psutil.Process(process.pid).children()
            process.send_signal(number)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""] and sum('"content": "a"' in line for line in rest) == 49
        process.wait(PATIENCE_S)
        stdout, stderr = process.stdout.read(), process.stderr.read()
    if number != signal.SIGINT:
        assert process.returncode == 0 and stdout == "served\n", stderr
    else:
        assert "KeyboardInterrupt" in stderr  # which the command line turns into status 130
    assert (tmp_path / "profile").read_text() == "served=1\n"
    assert len(daemon) == 1 and not any(child.is_running() for child in daemon)


def test_a_signal_as_soon_as_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: late.append(number))
    try:
        monkeypatch.setattr(server, "load", lambda model: FakeTokenizer())
        monkeypatch.setattr(server, "engine_command", lambda config: fake())
        options = ServeOptions(EngineConfig(Path("model.gguf")), port=0)
        serve(options, on_serving=lambda url, name, ctx_tokens: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not late


LONG = "a" * 1500
ASKING: dict[str, dict] = {
    "/v1/chat/completions": body(LONG),
    "/v1/completions": {"prompt": LONG, "max_tokens": 1500},
    "/v1/responses": {"input": LONG},
    "/v1/messages": body(LONG, max_tokens=1500),
}


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True])
def test_replies_that_are_cut_off_say_so(tmp_path: Path, twice: bool) -> None:
    """In their API's shape, streamed or not, those whose body has not come yet too."""
    answers: dict[tuple[str, bool], httpx.Response] = {}

    def ask(url: str, path: str, stream: bool) -> None:
        answers[path, stream] = httpx.post(url + path, json=ASKING[path] | {"stream": stream}, timeout=PATIENCE_S)

    hurry_s = 120.0 if twice else server._HURRY_S  # the second has to make a difference that no slow machine makes
    with served(tmp_path, hurry_s=hurry_s) as (process, url):
        port = int(url.rpartition(":")[2])
        asked = [threading.Thread(target=ask, args=(url, path, stream)) for path in ASKING for stream in (False, True)]
        for thread in asked:
            thread.start()
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as half:
            half.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{")
            metrics = f"{url}/metrics"
            wait_until(lambda: f"spark_replies {float(len(asked))}" in httpx.get(metrics, timeout=PATIENCE_S).text)
            time.sleep(1.5)  # the streams have begun
            began_s = time.monotonic()
            process.send_signal(signal.SIGINT)
            if twice:
                time.sleep(0.3)
                process.send_signal(signal.SIGINT)
            rest = b""
            while received := half.recv(65536):
                rest += received
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        took_s = time.monotonic() - began_s
        for thread in asked:
            thread.join(PATIENCE_S)
    assert (0.0 if twice else hurry_s) <= took_s < 20.0
    assert stdout == "" and stderr.count("Traceback") == 1 and stderr.rstrip().endswith("KeyboardInterrupt")
    assert "ASGI" not in stderr and "without" not in stderr
    said = "the server is stopping"
    assert b" 503 " in rest.splitlines()[0] and said.encode() in rest and b'"type": "error"' in rest
    for (path, stream), response in answers.items():
        assert response.status_code == (200 if stream else 503), (path, stream)
        if not stream:
            error = response.json()["error"]
            assert error["message"] == said
            assert error["type"] == ("api_error" if path == "/v1/messages" else "server_error")
    last = {path: answers[path, True].text.strip().split("\n\n")[-1] for path in ASKING}
    assert last["/v1/messages"].startswith("event: error\n") and said in last["/v1/messages"]
    assert last["/v1/responses"].startswith("event: response.failed\n") and said in last["/v1/responses"]
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert events(answers[path, True])[-1]["error"]["message"] == said


@pytest.mark.slow
def test_a_server_that_is_to_ignore_hangups_does(tmp_path: Path) -> None:
    with served(tmp_path, "nohup") as (process, url):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=PATIENCE_S)[0] == "served\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_log_that_nobody_reads_stops_no_server(tmp_path: Path, kind: str) -> None:
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    if kind == "pipe":
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)  # about what a terminal takes
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [*SPARK, "serve", NANO, "--port", str(port), "--ctx", "512"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=writer) as process, httpx.Client() as client:
        try:
            wait_until(lambda: answers(f"{url}/health"))
            asking, more = {"prompt": "a", "max_tokens": 1}, 50
            while more:  # each is a line in the log
                assert client.post(f"{url}/v1/completions", json=asking, timeout=PATIENCE_S).status_code == 200
                more -= not select.select([], [writer], [], 0)[1]  # it is full
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=PATIENCE_S).status_code == 200
    return False


@pytest.mark.slow
def test_a_client_that_does_not_read_holds_up_no_end(tmp_path: Path) -> None:
    with served(tmp_path) as (process, url):
        content = json.dumps(body(LONG, stream=True)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            connection.sendall(head.encode() + content)
            time.sleep(1.5)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=8.0)


def test_a_daemon_that_cannot_be_started() -> None:
    with pytest.raises(DaemonError):
        Supervisor(lambda: [str(HERE / "no such program")], Deadlines(), None)
