"""Web pages: whose requests are answered, and what of the answers they may read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.ground.config import EngineConfig
from engine.ground.errors import UsageError
from spark.server.app import ServeOptions, serve
from spark.server.guard import allowed_origin
from tests.command_line import NANO, refused
from tests.server.test_server import Running, body, running

CHAT = "/v1/chat/completions"
PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def closed() -> Iterator[Running]:
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def opened() -> Iterator[Running]:
    with running(allow_origins=(PAGE, "vscode-webview://abc", "null")) as made:
        yield made


def test_a_page_of_another_origin_is_refused(closed: Running) -> None:
    served = closed.stats()["served"]
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": f"http://127.0.0.1:{closed.port + 1}"},  # the same site, another port
        {"origin": "http://127.0.0.1"},
        {"origin": f"http://localhost:{closed.port}"},  # another name of the same
        {"origin": f"https://127.0.0.1:{closed.port}"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "file://"},
        {"origin": f"http://127.0.0.1:{closed.port}/"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "what else there may be"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},  # a form
    ):
        for kind in ("text/plain", "application/json", "application/x-www-form-urlencoded"):
            response = closed.http.post(CHAT, json=body("x"), headers=headers | {"content-type": kind})
            assert response.status_code == 403 and "--allow-origin" in response.json()["error"]["message"], headers
            assert "access-control-allow-origin" not in response.headers
        for path in ("/metrics", "/events", "/v1/models", "/health"):
            assert closed.http.get(path, headers=headers).status_code == 403
    response = closed.http.post("/v1/messages", json={}, headers={"origin": "null"})
    assert response.json()["error"]["type"] == "permission_error"
    assert closed.stats()["served"] == served


def test_two_origins_are_as_foreign_as_the_worse_one(closed: Running) -> None:
    own = f"http://127.0.0.1:{closed.port}"
    headers = [("origin", own), ("origin", "https://evil.example")]
    assert closed.http.get("/health", headers=headers).status_code == 403
    response = closed.http.get("/health", headers={"host": "", "origin": "x"})
    assert response.status_code == 403


def test_the_page_s_own_origin_and_programs_pass(closed: Running) -> None:
    for headers in (
        {},
        {"origin": f"http://127.0.0.1:{closed.port}"},
        {"origin": f"http://LOCALHOST:{closed.port}", "host": f"localhost:{closed.port}"},
        {"origin": "http://localhost", "host": "localhost:80"},
        {"origin": "http://localhost:80", "host": "localhost"},
        {"origin": "http://[::1]:5", "host": "[::1]:5"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
    ):
        response = closed.http.post(CHAT, json=body("x"), headers=headers)
        assert response.status_code == 200, headers
        assert not any(name.startswith("access-control") for name in response.headers)


def test_a_link_leads_to_the_page(closed: Running) -> None:
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert closed.http.get("/", headers=followed).status_code == 200
    for headers in (followed | {"sec-fetch-mode": "no-cors"}, followed | {"origin": "https://evil.example"}):
        assert closed.http.get("/page.js", headers=headers).status_code == 403


def test_an_allowed_origin_may_read_the_answers(opened: Running) -> None:
    for origin in (PAGE, "vscode-webview://abc", "null"):
        headers = {"origin": origin, "sec-fetch-site": "cross-site"}
        for response, status in (
            (opened.http.post(CHAT, json=body("x"), headers=headers), 200),
            (opened.http.post(CHAT, json=body("x", stream=True), headers=headers), 200),
            (opened.http.post(CHAT, json={}, headers=headers), 400),
            (opened.http.get("/v1/nothing", headers=headers), 404),
        ):
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == origin
            assert "Origin" in response.headers["vary"]
            assert "access-control-allow-credentials" not in response.headers
    for headers in ({"origin": "http://localhost:3001"}, {"origin": "https://localhost:3000"}):
        assert opened.http.post(CHAT, json=body("x"), headers=headers).status_code == 403
    response = opened.http.get("/v1/models")
    assert "Origin" in response.headers["vary"] and "access-control-allow-origin" not in response.headers


def test_a_preflight() -> None:
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-api-key, content-type,anthropic-version,x-stainless-os,x-a",
        "access-control-request-private-network": "true",
    }  # fmt: skip
    with running(api_key="secret", allow_origins=(PAGE,)) as made:
        response = made.http.options(CHAT, headers=asked | {"origin": PAGE, "sec-fetch-site": "cross-site"})
        assert response.status_code == 204 and response.content == b""
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.headers["access-control-allow-private-network"] == "true"
        assert "POST" in response.headers["access-control-allow-methods"]
        names = response.headers["access-control-allow-headers"].split(", ")
        assert names == ["authorization", "x-api-key", "content-type", "anthropic-version", "x-stainless-os"]
        assert {"Origin", "Access-Control-Request-Headers"} <= set(response.headers["vary"].split(", "))
        assert made.http.options(CHAT, headers=asked | {"origin": "https://evil.example"}).status_code == 403
        response = made.http.post(CHAT, json=body("x"), headers={"origin": PAGE})  # and the key is needed all the same
        assert response.status_code == 401 and response.headers["access-control-allow-origin"] == PAGE
        right = {"origin": PAGE, "authorization": "Bearer secret"}
        assert made.http.post(CHAT, json=body("x"), headers=right).status_code == 200
    with running() as made:
        assert made.http.options(CHAT, headers=asked | {"origin": PAGE}).status_code == 403
        assert made.http.options(CHAT).status_code == 405


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("http://localhost:3000", "http://localhost:3000"),
        ("HTTP://LocalHost:80/", "http://localhost"),
        ("https://chat.example:443", "https://chat.example"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("tauri://localhost", "tauri://localhost"),
        ("null", "null"),
    ],
)
def test_origins_as_they_are_given(given: str, made: str) -> None:
    assert allowed_origin(given) == made


@pytest.mark.parametrize(
    "given", ["", "*", "localhost:3000", "http://", "http://a/b", "http://a//", "http://*.a", "http://u@a", "file"]
)
def test_what_is_no_origin(given: str) -> None:
    with pytest.raises(UsageError, match="--allow-origin"):
        serve(ServeOptions(EngineConfig(Path("none.gguf")), allow_origins=(PAGE, given)))


def test_the_command_refuses_what_is_no_origin(tmp_path: Path) -> None:
    said = refused("serve", NANO, "--port", "0", "--allow-origin", "http://a/b", cwd=tmp_path, status=2)
    assert "--allow-origin http://a/b" in said
