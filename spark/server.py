"""The HTTP server: OpenAI's and Anthropic's APIs in front of a daemon.

An API is a module: `parse` makes a Conversation of a body, `Writer` writes the reply. Requests queue in the daemon. A
client that disconnects stops its generation. When the daemon dies, the requests it had are told so and the next one
starts it again. Logs say how much was read and written, never what.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.config import EngineConfig
from engine.errors import ContextOverflowError, SparkError, UsageError
from engine.tokenizer import Tokenizer, load
from spark import api_chat, api_completions, api_messages, api_responses, metrics, page
from spark.backend import Backend
from spark.client import Deadlines, OnLoading, engine_command
from spark.conversation import Conversation, Finish, Part
from spark.events import MAX_WATCHERS, Counters, Feed
from spark.generation import Model, Prompt
from spark.http import (
    EXCEPTION_HANDLERS,
    OVERLOADED,
    Guard,
    error_response,
    is_loopback,
    json_response,
    json_unless_left,
    parse_object,
    read_body,
)
from spark.models import listing

MAX_REPLIES = 64  # being made or waited for
_SAVE_EVERY_S = 300.0
_STATS_S = 2.0  # how long /metrics waits for the daemon, which may be in a long step
_DRAIN_S = 30  # how long replies may go on after SIGTERM
_HURRY_S = 3  # and after Ctrl-C

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


OnServing = Callable[[str, str, int], None]  # where it is served, the model's name, its context


def serve(
    options: ServeOptions,
    on_loading: OnLoading = lambda stage, done, total: None,
    on_serving: OnServing = lambda url, name, ctx_tokens: None,
) -> None:
    """Load the model and serve it until SIGTERM, which lets replies finish, or Ctrl-C.

    on_loading: as DaemonClient calls it. on_serving: called when connections are taken. Raises UsageError for an
    address that must not or cannot be bound, and whatever keeps the model from loading.
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
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            _log.info("%s is served at %s/v1", name, url)
            on_serving(url, name, int(backend.ready.info["ctx_tokens"]))
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
    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Remember the signal; after Ctrl-C replies get less time than after SIGTERM, and the page gets none."""
        self._feed.close()
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
        _Server(config, app.state.feed).run(sockets=[bound])
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
            *(Route(api.path, service.endpoint(api), methods=["POST"]) for api in _APIS),
            Route("/v1/messages/count_tokens", service.count_tokens, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/v1/models/{model:path}", service.model),
            Route("/health", service.health),
            Route("/metrics", service.metrics),
            Route("/events", service.events),
            *page.routes(),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.add_middleware(Guard, api_key=api_key)
    app.state.feed = service.feed
    return app


class _Writer(Protocol):
    """Writes one reply in an API's objects."""

    @property
    def keep_alive(self) -> bytes: ...

    def whole(self, parts: list[Part], finish: Finish) -> dict[str, Any]: ...

    def start(self, prompt_tokens: int) -> bytes: ...

    def part(self, part: Part) -> bytes: ...

    def end(self, finish: Finish) -> bytes: ...

    def failed(self, error: SparkError) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Api:
    name: str
    path: str
    parse: Callable[[Mapping[str, Any]], Conversation]
    writer: Callable[[str, Mapping[str, Any], Conversation], _Writer]
    overflow_in_stream: bool = False  # Codex looks for a context that overflows in the stream alone


_APIS = (
    _Api("chat", "/v1/chat/completions", api_chat.parse, api_chat.Writer),
    _Api("completions", "/v1/completions", api_completions.parse, api_completions.Writer),
    _Api("responses", "/v1/responses", api_responses.parse, api_responses.Writer, overflow_in_stream=True),
    _Api("messages", "/v1/messages", api_messages.parse, api_messages.Writer),
)
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_Reply = AsyncGenerator[list[Part] | Finish]


class _Service:
    """The endpoints."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, name: str) -> None:
        self._backend = backend
        self._metrics = metrics.Metrics()
        self._model = Model(backend, tokenizer, self._metrics)
        self._name = name
        self._created = int(time.time())
        self._counters = Counters(backend)
        self.feed = Feed(backend, self._counters, lambda: self._model.replies, name)

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
        return json_response(listing(self._name, self._created, self._model.ctx_tokens))

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._name:
            return error_response(request.scope, 404, "there is no such model here", "model_not_found")
        return json_response(listing(self._name, self._created, self._model.ctx_tokens)["data"][0])

    async def metrics(self, request: Request) -> Response:
        stats = await self._counters.get(_STATS_S)
        text = self._metrics.text(stats or {}, self._backend.alive, self._backend.restarts)
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def events(self, request: Request) -> Response:
        if self.feed.watchers >= MAX_WATCHERS:
            return error_response(request.scope, 503, f"{MAX_WATCHERS} pages are shown already", "too_many_watchers")
        return _event_stream(self.feed.watch())

    async def count_tokens(self, request: Request) -> Response:
        body = await read_body(request)
        conversation = await asyncio.to_thread(lambda: api_messages.parse_count(parse_object(body)))
        return json_response({"input_tokens": await self._model.count(conversation)})

    def endpoint(self, api: _Api) -> Callable[[Request], Any]:
        """Make the endpoint of an API."""

        async def answer(request: Request) -> Response:
            try:
                return await self._answer(api, request)
            except SparkError as error:
                self._metrics.request(api.name, error.code)
                raise

        return answer

    async def _answer(self, api: _Api, request: Request) -> Response:
        content = await read_body(request)

        def parse() -> tuple[Conversation, _Writer]:
            body = parse_object(content)
            conversation = api.parse(body)
            return conversation, api.writer(self._name, body, conversation)

        conversation, writer = await asyncio.to_thread(parse)
        if self._model.replies >= MAX_REPLIES:
            self._metrics.request(api.name, "overloaded")
            message = f"{MAX_REPLIES} requests are waiting already: try again in 2 s"
            return error_response(request.scope, OVERLOADED, message, "rate_limit_exceeded")
        try:
            prompt = await self._model.prompt(conversation)
        except ContextOverflowError as error:
            if not (conversation.stream and api.overflow_in_stream):
                raise
            self._metrics.request(api.name, error.code)
            return _event_stream(_once(writer.start(0) + writer.failed(error)))
        reply = self._model.reply(prompt)
        if not conversation.stream:
            return await json_unless_left(request, self._whole(api, writer, reply))
        try:  # what is refused at once gets a status
            first = await anext(reply)
        except BaseException:
            await reply.aclose()
            raise
        return _event_stream(self._stream(api, writer, prompt, first, reply))

    async def _whole(self, api: _Api, writer: _Writer, reply: _Reply) -> dict[str, Any]:
        parts: list[Part] = []
        outcome = "left"
        try:
            async with contextlib.aclosing(reply):
                async for item in reply:
                    if isinstance(item, Finish):
                        outcome = "ok"
                        return writer.whole(parts, item)
                    parts += item
        except SparkError:
            outcome = ""  # counted where it is answered
            raise
        finally:
            if outcome:
                self._metrics.request(api.name, outcome)
        raise AssertionError("a reply ends with Finish")

    async def _stream(
        self, api: _Api, writer: _Writer, prompt: Prompt, first: list[Part] | Finish, reply: _Reply
    ) -> AsyncIterator[bytes]:
        """The reply as server-sent events; an error that comes too late for a status is one of them."""
        outcome = "left"
        try:
            async with contextlib.aclosing(reply):
                yield writer.start(len(prompt.opening.tokens))
                if not isinstance(first, Finish):
                    for part in first:
                        if made := writer.part(part):
                            yield made
                    async for item in reply:
                        if isinstance(item, Finish):
                            first = item
                            break
                        made = b"".join(map(writer.part, item))
                        if made or not item:
                            yield made or writer.keep_alive
                assert isinstance(first, Finish)
                outcome = "ok"
                yield writer.end(first)
        except SparkError as error:
            outcome = error.code
            yield writer.failed(error)
        finally:
            self._metrics.request(api.name, outcome)


def _event_stream(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream", headers=_STREAM_HEADERS)


async def _once(event: bytes) -> AsyncIterator[bytes]:
    yield event
