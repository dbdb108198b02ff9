"""The HTTP server: OpenAI's chat completions in front of a daemon.

Requests queue in the daemon. A client that disconnects stops its generation. When the daemon dies, the
requests it had are told so and the next one starts it again. Logs say how much was read and written,
never what.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine import protocol
from engine.config import EngineConfig
from engine.errors import ContextOverflowError, SparkError, UsageError
from engine.tokenizer import Tokenizer, load
from spark.backend import Backend, Generation
from spark.chat import ChatRequest, Finish, Formatter, parse_chat
from spark.client import Deadlines, OnLoading, engine_command
from spark.http import (
    EXCEPTION_HANDLERS,
    Guard,
    explain,
    is_loopback,
    json_response,
    json_unless_left,
    parse_object,
    read_body,
)
from spark.render import Renderer
from spark.reply import Part, ReplyParser

MAX_REPLIES = 64  # being made or waited for
_KEEP_ALIVE_S = 10.0
_SAVE_EVERY_S = 300.0
_DRAIN_S = 30  # how long replies may go on after SIGTERM
_HURRY_S = 3  # and after Ctrl-C
_TAIL_TOKENS = 16  # of a prompt, where `<think>` may have been opened
_OPEN_THINK = re.compile(r"<think>\s*\Z")

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


def serve(options: ServeOptions, on_loading: OnLoading = lambda stage, done, total: None) -> None:
    """Load the model and serve it until SIGTERM, which lets replies finish, or Ctrl-C.

    on_loading: as DaemonClient calls it. Raises UsageError for an address that must not or
    cannot be bound, and whatever keeps the model from loading.
    """
    if options.api_key is None and not is_loopback(options.host):
        raise UsageError(f"--host {options.host} lets other machines in", hint="set --api-key, or serve on 127.0.0.1")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    with _bind(options.host, options.port) as bound:
        tokenizer = load(options.config.model)
        backend = Backend(lambda: _daemon_command(options), options.deadlines, options.learned_profile, on_loading)
        try:
            for key in ("reasons", "warnings"):
                for line in backend.ready.info.get(key, ()):
                    _log.info("%s", line)
            name = re.sub(r"-\d{5}-of-\d{5}$", "", options.config.model.stem)
            app = create_app(backend, tokenizer, name, options.api_key)
            _listen(bound)
            host, port = bound.getsockname()[:2]
            _log.info("%s is served at http://%s:%d/v1", name, f"[{host}]" if ":" in host else host, port)
            _run(app, bound)
        finally:
            backend.close()


def _daemon_command(options: ServeOptions) -> list[str]:
    # A daemon that starts again goes on from what the one before it learned.
    learned = options.learned_profile
    known = learned is not None and learned.exists()
    return engine_command(replace(options.config, profile=learned) if known else options.config)


def _bind(host: str, port: int) -> socket.socket:
    """Find out before the model is loaded whether the address can be had; nobody is let in until it is."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, number, _, address = found[0]
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


def _listen(bound: socket.socket) -> None:
    try:
        bound.listen()
    except OSError as error:  # another server that had bound it too was faster
        raise UsageError(f"the address was taken while the model was loaded: {error}") from error


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Remember the signal; after Ctrl-C replies get less time than after SIGTERM."""
        if sig == signal.SIGINT:
            self.config.timeout_graceful_shutdown = _HURRY_S
        super().handle_exit(sig, frame)


def _run(app: Starlette, bound: socket.socket) -> None:
    async def until_cancelled(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # a reply that went on for too long after the signal
            await app(scope, receive, send)

    config = uvicorn.Config(
        until_cancelled, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=_DRAIN_S
    )
    # After its own shutdown uvicorn raises the signals again that it caught; SIGTERM has been obeyed then.
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda number, frame: None) if main else None
    try:
        _Server(config).run(sockets=[bound])
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
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.add_middleware(Guard, api_key=api_key)
    return app


def _event(made: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(made).encode() + b"\n\n"


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
        return json_response({"status": "ok", "daemon": state})

    async def models(self, request: Request) -> Response:
        model = {"id": self._name, "object": "model", "created": self._created, "owned_by": "spark"}
        return json_response({"object": "list", "data": [model]})

    async def chat_completions(self, request: Request) -> Response:
        body = await read_body(request)
        chat = await asyncio.to_thread(lambda: parse_chat(parse_object(body)))
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
        return await json_unless_left(request, self._whole(chat, prompt, max_tokens))

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
            yield _event(explain(error)[1])
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
