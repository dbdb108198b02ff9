"""The HTTP server: OpenAI's chat completions in front of a daemon.

Requests queue in the daemon. A client that disconnects stops its generation. When the daemon dies, the
requests it had are told so and the next one starts it again. Logs say how much was read and written,
never what.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine import protocol
from engine.config import EngineConfig
from engine.errors import (
    CancelledError,
    CapacityError,
    ContextOverflowError,
    DaemonError,
    DeadlineError,
    RequestError,
    SparkError,
    UsageError,
)
from engine.tokenizer import Tokenizer, load
from spark.backend import Backend, Generation
from spark.chat import ChatRequest, Finish, Formatter, parse_chat
from spark.client import Deadlines, engine_command
from spark.render import Renderer
from spark.reply import Part, ReplyParser

MAX_BODY_BYTES = 32 << 20
MAX_REPLIES = 64  # being made or waited for
_KEEP_ALIVE_S = 10.0
_SAVE_EVERY_S = 300.0
_DRAIN_S = 30  # how long replies may go on after SIGTERM
_CLIENT_GONE = 499  # nobody will see it
_TAIL_TOKENS = 16  # of a prompt, where `<think>` may have been opened
_OPEN_THINK = re.compile(r"<think>\s*\Z")

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve, and where.

    host: one that is not of this machine alone needs an api_key, which clients then have to send. port: 0
    takes a free one. learned_profile: where the routing counts go, every few minutes and at the end.
    """

    config: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    learned_profile: Path | None = None


def serve(options: ServeOptions, on_loading: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Load the model and serve it until SIGTERM, which lets replies finish, or Ctrl-C.

    on_loading: called with (bytes loaded, bytes to load). Raises UsageError for an address that must not or
    cannot be bound, and whatever keeps the model from loading.
    """
    if options.api_key is None and not _is_loopback(options.host):
        raise UsageError(f"--host {options.host} lets other machines in", hint="set --api-key, or serve on 127.0.0.1")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    with _bind(options.host, options.port) as bound:
        tokenizer = load(options.config.model)

        def command() -> list[str]:
            # A daemon that starts again goes on from what the one before it has learned.
            learned = options.learned_profile
            known = learned is not None and learned.exists()
            return engine_command(replace(options.config, profile=learned) if known else options.config)

        backend = Backend(command, options.deadlines, options.learned_profile, on_loading)
        try:
            for key in ("reasons", "warnings"):
                for line in backend.ready.info.get(key, ()):
                    _log.info("%s", line)
            name = re.sub(r"-\d{5}-of-\d{5}$", "", options.config.model.stem)
            app = create_app(backend, tokenizer, name, options.api_key)
            host, port = bound.getsockname()[:2]
            _log.info("%s is served at http://%s:%d/v1", name, f"[{host}]" if ":" in host else host, port)
            _run(app, bound)
        finally:
            backend.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind(host: str, port: int) -> socket.socket:
    """Take the address before the model is loaded; nobody is let in until it is."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, number)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise UsageError(f"{host} port {port} cannot be served on: {error}") from error
    return bound


def _run(app: Starlette, bound: socket.socket) -> None:
    config = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=_DRAIN_S
    )
    # After its own shutdown uvicorn raises the signals again that it caught; SIGTERM has been obeyed then.
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda number, frame: None) if main else None
    try:
        uvicorn.Server(config).run(sockets=[bound])
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


# --- the application --------------------------------------------------------------------------


def create_app(backend: Backend, tokenizer: Tokenizer, name: str, api_key: str | None = None) -> Starlette:
    """Make the application; `name` is what the model is called."""
    service = _Service(backend, tokenizer, name)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        saving = asyncio.create_task(service.save_now_and_then())
        yield
        saving.cancel()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", service.chat_completions, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/health", service.health),
        ],
        exception_handlers={
            SparkError: _on_spark_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_bug,
        },
        lifespan=lifespan,
    )
    app.add_middleware(_Guard, api_key=api_key)
    return app


class _Service:
    """The endpoints."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, name: str) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
        self._rendering = asyncio.Lock()
        self._name = name
        self._created = int(time.time())
        self._replies = 0  # that are being made

    async def save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            try:
                await asyncio.to_thread(self._backend.save)
            except SparkError as error:
                _log.error("the profile could not be saved: %s", error.message)

    async def health(self, request: Request) -> Response:
        state = "ready" if self._backend.alive else "down; the next request starts it"
        return _json({"status": "ok", "daemon": state})

    async def models(self, request: Request) -> Response:
        model = {"id": self._name, "object": "model", "created": self._created, "owned_by": "spark"}
        return _json({"object": "list", "data": [model]})

    async def chat_completions(self, request: Request) -> Response:
        chat = await asyncio.to_thread(_parse_body, await _read_body(request))
        if self._replies >= MAX_REPLIES:
            raise HTTPException(429, f"{MAX_REPLIES} requests are waiting already: try again later")
        async with self._rendering:
            prompt = await asyncio.to_thread(self._renderer.prompt, chat.messages, chat.tools)
        room = int(self._backend.ready.info["ctx_tokens"]) - len(prompt)
        if room < 1:
            raise ContextOverflowError(
                f"the prompt of {len(prompt)} tokens leaves no room in a context of {room + len(prompt)}"
            )
        max_tokens = min(room, chat.max_tokens or room)
        if chat.stream:
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            chunks = self._stream(chat, prompt, max_tokens)
            return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)
        whole = await _unless_disconnected(request, self._whole(chat, prompt, max_tokens))
        return Response(status_code=_CLIENT_GONE) if whole is None else _json(whole)

    async def _whole(self, chat: ChatRequest, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        parts: list[Part] = []
        async with contextlib.aclosing(self._reply(chat, prompt, max_tokens)) as reply:
            async for item in reply:
                if isinstance(item, Finish):
                    return Formatter(self._name).completion(parts, item)
                parts += item
        raise AssertionError("a reply ends with Finish")

    async def _stream(self, chat: ChatRequest, prompt: list[int], max_tokens: int) -> AsyncIterator[bytes]:
        """The reply as server-sent events; an error that comes too late for a status is one of them."""
        formatter = Formatter(self._name, chat.include_usage)
        yield _event(formatter.start())
        try:
            async with contextlib.aclosing(self._reply(chat, prompt, max_tokens)) as reply:
                async for item in reply:
                    if isinstance(item, Finish):
                        yield _event(formatter.end(item))
                        if chat.include_usage:
                            yield _event(formatter.usage(item))
                        break
                    for part in item:
                        yield _event(formatter.chunk(part))
                    if not item:
                        yield b": nothing new\n\n"
        except SparkError as error:
            yield _event(_explain(error)[1])
        yield b"data: [DONE]\n\n"

    async def _reply(
        self, chat: ChatRequest, prompt: list[int], max_tokens: int
    ) -> AsyncGenerator[list[Part] | Finish]:
        """The parts of a reply as they come, none where nothing came for a while, and its end.

        However this generator is left, the daemon does not go on with the request.
        """
        thinking = _OPEN_THINK.search(self._tokenizer.decode(prompt[-_TAIL_TOKENS:])) is not None
        parser = ReplyParser(stops=chat.stops, tools=bool(chat.tools), thinking=thinking)
        text = self._tokenizer.stream()
        made, reason, began_s = 0, "", time.monotonic()
        self._replies += 1
        generation = Generation(self._backend, prompt, max_tokens, chat.sampling)
        try:
            while not reason:
                event = await generation.next(_KEEP_ALIVE_S)
                if event is None:
                    yield []
                elif isinstance(event, protocol.Tokens):
                    made += len(event.tokens)
                    shown = [token for token in event.tokens if token not in self._tokenizer.stop_ids]
                    if parts := parser.push(text.push(shown)):
                        yield parts
                    reason = "stop" if parser.stopped else ""
                elif isinstance(event, protocol.Done):
                    made = event.usage.completion_tokens
                    if parts := parser.push(text.flush()) + parser.flush():
                        yield parts
                    reason = "tool_calls" if parser.called else event.finish_reason or "stop"
            yield Finish("stop" if parser.stopped else reason, len(prompt), made)
        except SparkError as error:
            reason = error.code
            raise
        finally:
            self._replies -= 1
            generation.cancel()
            taken_s = time.monotonic() - began_s
            _log.info("%d tokens read, %d written, %.2f s: %s", len(prompt), made, taken_s, reason or "left")


# --- requests and responses -------------------------------------------------------------------


class _Guard:
    """Lets in who knows the key or, where there is none, who speaks to this machine by its local name.

    The second keeps a web page that has its own name resolve to 127.0.0.1 away from the server.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if self._api_key is None:
            host = headers.get("host", "localhost")
            if not _is_loopback(_hostname(host)):
                return _error(403, "only requests to localhost are answered; other names need --api-key")
        elif scope["path"] != "/health":
            scheme, _, token = headers.get("authorization", "").partition(" ")
            given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            if not hmac.compare_digest(given.encode(), self._api_key):
                return _error(401, "the API key is missing or wrong", "invalid_api_key")
        return None


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _parse_body(body: bytes) -> ChatRequest:
    try:
        made = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if type(made) is not dict:
        raise RequestError("the body is not a JSON object")
    return parse_chat(made)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Do the work, or leave it and give None when the client goes away first."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        task.cancel()


def _json(made: dict[str, Any], status: int = 200) -> Response:
    # ASCII: text from models and users may hold lone surrogates, which UTF-8 does not have.
    return Response(json.dumps(made), status, media_type="application/json")


def _event(made: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(made).encode() + b"\n\n"


def _error(status: int, message: str, code: str | None = None) -> Response:
    return _json(_error_object(status, message, code), status)


def _error_object(status: int, message: str, code: str | None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


_STATUS: dict[type[SparkError], int] = {
    RequestError: 400,
    CancelledError: 503,  # not by its client: the daemon was stopping
    DaemonError: 503,
    CapacityError: 503,
    DeadlineError: 504,
}


def _explain(error: SparkError) -> tuple[int, dict[str, Any]]:
    """Status and object for a failure; what the daemon said last is for the log alone."""
    status = next((status for cls, status in _STATUS.items() if isinstance(error, cls)), 500)
    code = "context_length_exceeded" if isinstance(error, ContextOverflowError) else error.code
    if status >= 500:
        _log.error("%s: %s\n%s", error.code, error.message, error.hint)
        return status, _error_object(status, error.message, code)
    return status, _error_object(status, "; ".join(filter(None, (error.message, error.hint))), code)


async def _on_spark_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SparkError)
    status, made = _explain(error)
    return _json(made, status)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _on_bug(request: Request, error: Exception) -> Response:
    return _error(500, "an error inside the server; its log has the details")
