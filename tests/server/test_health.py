"""What is said of the daemon: whether it lives, works or is stuck, and what it warns of."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from engine.ground.errors import DaemonError
from spark.server import app as server
from spark.server import supervisor
from spark.server.events import Counters
from spark.server.supervisor import aside
from tests.server.test_connections import connected, post
from tests.server.test_serve import served
from tests.server.test_server import PATIENCE_S, Running, body, fake, replies, running, wait_until


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(supervisor, "_SOON_S", 0.2)
    monkeypatch.setattr(server, "_HEALTH_S", 0.5)
    with running() as found:
        yield found


def health(made: Running) -> httpx.Response:
    return made.http.get("/health")


def test_a_daemon_that_answers_is_ready(made: Running) -> None:
    for _ in range(2):
        assert health(made).json() == {"status": "ok", "daemon": "ready"}
        time.sleep(0.3)  # nothing is heard of it, until it is asked


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the state of a process is read in /proc")
def test_a_daemon_that_is_stopped_is_not_ready(made: Running) -> None:
    daemon = psutil.Process(made.backend.client().pid)
    daemon.suspend()
    wait_until(lambda: daemon.status() == psutil.STATUS_STOPPED)
    response = health(made)
    assert response.status_code == 503
    assert response.json()["daemon"] == "stopped" and "SIGSTOP" in response.json()["reason"]
    daemon.resume()
    time.sleep(0.3)
    assert health(made).json()["daemon"] == "ready"


def test_a_daemon_that_is_silent_without_work_is_stuck(made: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    client = made.backend.client()
    monkeypatch.setattr(type(client), "stopped", False)  # where nobody can see that
    os.kill(client.pid, signal.SIGSTOP)
    time.sleep(0.3)
    for _ in range(3):  # one ping is on its way, however often it is asked
        response = health(made)
        assert response.status_code == 503 and response.json()["daemon"] == "stuck"
        assert "no sign of life" in response.json()["reason"] and response.json()["requests"] == 0
    assert len(client._inboxes) == 1
    os.kill(client.pid, signal.SIGCONT)
    wait_until(lambda: health(made).status_code == 200)


def test_a_long_step_is_work_and_one_without_end_is_not(made: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = threading.Thread(target=lambda: made.ask("hang"))
    asking.start()
    client = made.backend.client()
    wait_until(lambda: client.owed == 1)
    time.sleep(0.5)
    response = health(made)
    assert response.status_code == 200 and response.json()["daemon"] == "working"
    assert response.json()["requests"] == 1 and response.json()["silent_s"] > 0.2
    monkeypatch.setattr(supervisor, "_STUCK_S", 0.1)
    assert health(made).status_code == 503
    monkeypatch.setattr(type(client), "cpu_ticks", property(lambda self: time.monotonic_ns()))  # it computes
    assert health(made).json()["daemon"] == "working"
    psutil.Process(client.pid).kill()
    asking.join()
    assert health(made).json() == {"status": "ok", "daemon": "down; the next request starts it"}


def test_who_waits_for_a_stopped_daemon_keeps_nobody_from_ending() -> None:
    began_s = time.monotonic()

    async def ask() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(aside(lambda: time.sleep(5)), 0.1)
        with pytest.raises(ZeroDivisionError):
            await aside(lambda: 1 / 0)
        assert await aside(lambda: 7) == 7

    asyncio.run(ask())
    assert time.monotonic() - began_s < 4.0


def test_warnings_of_the_daemon_reach_the_log_and_the_metrics(made: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert "spark_daemon_warnings_total{" not in made.http.get("/metrics").text
    assert made.ask("warn").json()["choices"][0]["message"]["content"] == "warn"
    wait_until(lambda: 'spark_daemon_warnings_total{reason="late"} 1.0' in made.http.get("/metrics").text)
    assert 'spark_daemon_warnings_total{reason="damaged_file"} 3.0' in made.http.get("/metrics").text
    lines = [record.getMessage() for record in caplog.records if record.name == "spark.server.supervisor"]
    assert lines == ["the daemon: file 0 is damaged", "the daemon: late"]  # which comes while it is idle


def test_a_penalty_that_no_logit_survives_is_refused(made: Running) -> None:
    for penalty in (1e-310, 5e-324, 1e-30, 0, -1, 1e6):
        for path in ("/v1/chat/completions", "/v1/completions"):
            response = made.http.post(path, json=body("x", prompt="x", repetition_penalty=penalty))
            assert response.status_code == 400 and "repetition_penalty" in response.json()["error"]["message"]
    assert made.ask("x", repetition_penalty=0.01).status_code == 200


def test_what_is_not_there_says_so_in_each_api_s_shape(made: Running) -> None:
    for path in ("/v1/embeddings", "/v1/audio/speech", "/nothing"):
        response = made.http.post(path, json={"model": "x", "input": "y"})
        error = response.json()["error"]
        assert response.status_code == 404 and error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error" and f"POST {path}" in error["message"]
    for path, headers in (("/v1/messages/batches", {}), ("/v1/complete", {"anthropic-version": "2023-06-01"})):
        made_error = made.http.post(path, json={}, headers=headers).json()
        assert made_error["type"] == "error" and made_error["error"]["type"] == "not_found_error"
    assert "GET" in made.http.get("/v1/messages").json()["error"]["message"]


# --- a daemon that does not read --------------------------------------------------------------------------

LARGE = json.dumps({"prompt": [5] * 4000, "max_tokens": 5}).encode()  # eight of them fill a pipe


@pytest.fixture
def stopped() -> Iterator[tuple[Running, psutil.Process]]:
    """A server whose daemon is stopped until the end."""
    with running(fake(ctx=5000)) as found:
        daemon = psutil.Process(found.backend.client().pid)
        daemon.suspend()
        try:
            yield found, daemon
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                daemon.resume()


def followed() -> int:
    return sum(thread.name == "generation" for thread in threading.enumerate())


def settled() -> int:
    """How many are followed when that has not changed for a second: on a busy machine each takes its time to begin."""
    n, since_s = followed(), time.monotonic()
    while time.monotonic() - since_s < 1.0:
        if followed() != n:
            n, since_s = followed(), time.monotonic()
        time.sleep(0.02)
    return n


def leave(made: Running, n: int) -> int:
    """Ask for more than the pipe to the daemon holds, and leave; how many of n requests it had room for."""
    with contextlib.ExitStack() as stack:
        for _ in range(n):
            stack.enter_context(connected(made.port, post("/v1/completions", LARGE)))
        wait_until(lambda: replies(made) == n)
        written = n - settled()  # each of the others has a thread that waits for room
    assert written < n
    wait_until(lambda: replies(made) == 0)
    return written


@pytest.mark.slow
def test_clients_that_leave_a_stopped_daemon_hold_up_nobody(stopped: tuple[Running, psutil.Process]) -> None:
    made, daemon = stopped
    written = 0
    for _ in range(3):
        written += leave(made, 24)
        began_s = time.monotonic()
        assert made.http.post("/v1/chat/completions", json={"messages": 5}).status_code == 400
        counted = made.http.post("/v1/messages/count_tokens", json={"messages": body("x")["messages"]})
        assert counted.status_code == 200
        assert time.monotonic() - began_s < 5.0
    # What the daemon never read is forgotten, but for the request that is half in the pipe and those before it.
    wait_until(lambda: followed() < 24)
    left = written + followed()  # all that it can still read
    daemon.resume()
    wait_until(lambda: made.stats()["queued"] == 0 and followed() == 0)
    assert made.stats()["served"] <= left  # of those it may have served some before it read that they are cancelled
    assert made.ask("still there").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 24])
def test_a_stopped_daemon_keeps_no_server_from_ending(tmp_path: Path, n: int) -> None:
    with served(tmp_path) as (process, url), contextlib.ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        (daemon,) = psutil.Process(process.pid).children()
        daemon.suspend()
        for _ in range(n):
            stack.enter_context(connected(port, post("/v1/completions", LARGE)))
        time.sleep(1.0)
        stack.close()
        time.sleep(1.0)
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
        assert process.returncode == 0 and time.monotonic() - began_s < 10.0
        assert not daemon.is_running()
        said = process.stderr.read()
    assert "could not be saved: the daemon does not answer" in said and "Traceback" not in said, said


def test_counters_that_fail_when_nobody_waits_any_more_are_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """As those of a daemon that is killed in a step which took longer than who asked for them has patience."""
    gate = threading.Event()

    class Killed:
        def stats(self) -> dict[str, object]:
            gate.wait(9)
            raise DaemonError("the daemon was killed by signal 9 (Killed)")

    async def ask() -> None:
        counters = Counters(Killed())  # type: ignore[arg-type]
        assert await counters.get(0.01) is None
        gate.set()
        while counters._asking is not None and not counters._asking.done():
            await asyncio.sleep(0.01)
        del counters
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(ask())
    assert not caplog.records
