"""The HTTP server: OpenAI's and Anthropic's APIs in front of a daemon.

An API is a module: `parse` makes a Conversation of a body, `Writer` writes the reply. Requests queue in the daemon. A
client that disconnects stops its generation. When the daemon dies, the requests it had are told so and the next one
starts it again. Logs say how much was read and written, never what.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import math
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from engine.ground.config import EngineConfig
from engine.ground.errors import ContextOverflowError, OverloadedError, RequestError, SparkError, UsageError
from engine.text.tokenizer import Tokenizer, load
from spark.apis import chat as api_chat
from spark.apis import completions as api_completions
from spark.apis import messages as api_messages
from spark.apis import responses as api_responses
from spark.apis.bodies import Again, Bodies, Wanted
from spark.apis.http import (
    EXCEPTION_HANDLERS,
    EXPECTED,
    Closing,
    EventStream,
    error_response,
    json_response,
    unless_left,
)
from spark.apis.kept import Kept
from spark.daemon.client import Deadlines, OnLoading, engine_command
from spark.server import metrics, page
from spark.server.board import Board, RequestRow
from spark.server.connections import ACCEPTED_AT_ONCE, Connections, room
from spark.server.events import Counters, Feed
from spark.server.generation import KEEP_ALIVE_S, Model
from spark.server.guard import Guard, allowed_origin, is_loopback
from spark.server.log import logging_to_stderr
from spark.server.models import listing
from spark.server.prompts import Prompt
from spark.server.supervisor import Supervisor, aside
from spark.speech.conversation import Conversation, Finish, Part

MAX_REPLIES = 64  # being made or waited for
_SAVE_EVERY_S = 300.0
_STATS_S = 2.0  # how long /metrics waits for the daemon, which may be in a long step
_HEALTH_S = 3.0  # and how long /health does
_DRAIN_S = 30.0  # how long replies may go on after SIGTERM
_HURRY_S = 3.0  # and after Ctrl-C
_LAST_WORDS_S = 1.0  # how long a client may take to read that its reply was cut off
_MAX_KEY_BYTES = 4096
_BACKLOG = 1024  # connections that wait to be taken
_TICKS = 10  # of uvicorn, a second

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve, and where.

    host: one that is not of this machine alone needs a key, which clients then have to send: api_key, or the first
    line of api_key_file. port: 0 takes a free one. learned_profile: where the routing counts go, every few minutes and
    at the end. allow_origins: whose web pages may use it.
    """

    config: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    learned_profile: Path | None = None
    api_key_file: Path | None = None
    allow_origins: tuple[str, ...] = ()


OnServing = Callable[[str, str, int], None]  # where it is served, the model's name, its context


def serve(
    options: ServeOptions,
    on_loading: OnLoading = lambda stage, done, total: None,
    on_serving: OnServing = lambda url, name, ctx_tokens: None,
) -> None:
    """Load the model and serve it until SIGTERM or SIGHUP, which let replies finish, or Ctrl-C.

    on_loading: as DaemonClient calls it. on_serving: called when connections are taken. Raises UsageError for an
    address that must not or cannot be bound and for a key that is none, and whatever keeps the model from loading.
    """
    api_key = _api_key(options)
    origins = [allowed_origin(given) for given in options.allow_origins]
    if api_key is None and not is_loopback(options.host):
        hint = "set --api-key-file or --api-key, or serve on 127.0.0.1"
        raise UsageError(f"--host {options.host} lets other machines in", hint=hint)
    with logging_to_stderr(), _bind(options.host, options.port) as bound:
        tokenizer = load(options.config.model)
        supervisor = Supervisor(
            lambda: _daemon_command(options), options.deadlines, options.learned_profile, on_loading
        )
        try:
            for key in ("reasons", "warnings"):
                for line in supervisor.ready.info.get(key, ()):
                    _log.info("%s", line)
            name = re.sub(r"-\d{5}-of-\d{5}$", "", options.config.model.stem)
            app = create_app(supervisor, tokenizer, name, api_key, origins)
            _listen(bound)
            host, port = bound.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

            def announce() -> None:
                on_serving(url, name, int(supervisor.ready.info["ctx_tokens"]))
                _log.info("%s is served at %s/v1", name, url)

            _run(app, bound, announce)
        finally:
            supervisor.close()


def _api_key(options: ServeOptions) -> str | None:
    """The key that clients have to send; None where they need none. One that is empty would let everybody in."""
    name, given = "--api-key", options.api_key
    if options.api_key_file is not None:
        if given is not None:
            raise UsageError("--api-key and --api-key-file both say what the key is", hint="give one of them")
        name = f"--api-key-file {options.api_key_file}"
        try:
            with options.api_key_file.open("rb") as file:
                given = file.readline(_MAX_KEY_BYTES + 1).decode()
        except OSError as error:
            raise UsageError(f"{name} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{name}: expected the key as UTF-8 text in the first line, found other bytes") from error
        if len(given) > _MAX_KEY_BYTES:
            raise UsageError(f"{name}: expected a key of at most {_MAX_KEY_BYTES} bytes in the first line, found more")
    if given is None:
        return None
    if not given.strip():
        hint = "is the variable set that it comes from? `openssl rand -hex 32` makes a key"
        raise UsageError(f"{name}: expected a key, found nothing", hint=hint)
    return given.strip()  # as a header's value is


def _daemon_command(options: ServeOptions) -> list[str]:
    # A daemon that starts again goes on from what the one before it learned; without it, as the first one would.
    learned = options.learned_profile
    if learned is None:
        return engine_command(options.config)
    return engine_command(replace(options.config, profile=learned if learned.exists() else None))


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
        raise _not_bound(f"{host} port {port} cannot be served on: {error}", error) from error
    return bound


def _listen(bound: socket.socket) -> None:
    try:
        bound.listen()
    except OSError as error:  # another server that had bound it too was faster
        raise _not_bound(f"the address was taken while the model was loaded: {error}", error) from error


def _not_bound(message: str, error: OSError) -> UsageError:
    another_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
    return UsageError(message, hint="give another --port; 0 takes a free one" if another_port else "")


class _Server(uvicorn.Server):
    """Takes requests until a signal comes; replies then have a while to end, and what is left is cut off.

    interrupted: Ctrl-C was among the signals.
    """

    def __init__(self, app: Starlette) -> None:
        self.connections = Connections(room(), app.state.allow_origins)
        http: Any = self.connections.protocol  # what uvicorn wants is called, whatever it is
        config = uvicorn.Config(
            app, http=http, ws="none", backlog=ACCEPTED_AT_ONCE, log_config=None, log_level="error", access_log=False
        )
        super().__init__(config)
        self.interrupted = False
        self._feed: Feed = app.state.feed
        self._closing: Closing = app.state.closing
        self._cut_off_s = math.inf

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Take no signals: `_run` does. The base class knows too few, and would raise them again in the end."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end: Ctrl-C leaves replies less time than SIGTERM, a second one none; the page gets none."""
        left_s = _DRAIN_S
        if sig == signal.SIGINT:
            left_s = 0.0 if self.interrupted else _HURRY_S
            self.interrupted = True
        self._cut_off_s = min(self._cut_off_s, time.monotonic() + left_s)
        self._feed.close()
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        asyncio.get_running_loop().set_exception_handler(self.connections.on_loop_error)
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(_BACKLOG)  # uvicorn's number says how many are taken in a row, too

    async def on_tick(self, counter: int) -> bool:
        """Look after the connections."""
        if counter % _TICKS == 0 or self.connections.behind:
            self.connections.look()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections and wait for those that there are."""
        cutting_off = asyncio.create_task(self._cut_off())
        try:
            await super().shutdown(sockets)
        finally:
            cutting_off.cancel()

    async def _cut_off(self) -> None:
        ticks = 0
        while time.monotonic() < self._cut_off_s:  # a signal may bring it nearer
            ticks += 1
            if ticks % 20 == 0 or self.connections.behind:
                self.connections.look()
            await asyncio.sleep(0.05)
        self._closing.cut_off()
        await asyncio.sleep(_LAST_WORDS_S)
        for connection in list(self.server_state.connections):  # of clients that do not read
            connection.transport.abort()


def _run(app: Starlette, bound: socket.socket, announce: Callable[[], None]) -> None:
    """Serve until a signal comes; whoever was told by `announce` may send it at once."""
    server = _Server(app)
    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks for that
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, server.handle_exit) for number in numbers}
    try:
        announce()
        server.run(sockets=[bound])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if server.interrupted:
        raise KeyboardInterrupt


# --- the application --------------------------------------------------------------------------


def create_app(
    supervisor: Supervisor,
    tokenizer: Tokenizer,
    name: str,
    api_key: str | None = None,
    allow_origins: Sequence[str] = (),
) -> Starlette:
    """Make the application; `name` is what the model is called. allow_origins: as `allowed_origin` gives them."""
    service = _Service(supervisor, tokenizer, name)
    _, _, responses, messages = apis = _apis(service.kept)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        saving = asyncio.create_task(service.save_now_and_then())
        yield
        saving.cancel()
        service.close()

    app = Starlette(
        routes=[
            *(Route(api.path, service.endpoint(api), methods=["POST"]) for api in apis),
            Route("/v1/messages/count_tokens", service.counting(messages), methods=["POST"]),
            Route("/v1/responses/input_tokens", service.counting(responses, "response.input_tokens"), methods=["POST"]),
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
    app.add_middleware(Guard, api_key=api_key, allow_origins=allow_origins)
    app.state.feed, app.state.closing, app.state.kept = service.feed, service.closing, service.kept
    app.state.allow_origins, app.state.bodies = frozenset(allow_origins), service.bodies
    return app


class _Writer(Protocol):
    """Writes one reply in an API's objects."""

    @property
    def keep_alive(self) -> bytes: ...

    def hold(self, parts: list[Part]) -> None: ...

    def whole(self, parts: list[Part], finish: Finish) -> dict[str, Any]: ...

    def start(self, prompt_tokens: int) -> bytes: ...

    def part(self, part: Part) -> bytes: ...

    def end(self, finish: Finish) -> bytes: ...

    def failed(self, error: SparkError) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Api:
    name: str
    path: str
    prompt: str  # the field that becomes the prompt
    parse: Callable[[Mapping[str, Any]], Any]  # a Conversation, or what `again` makes one of
    kept: Callable[[Mapping[str, Any]], dict[str, Any]]  # what its writers need of a body
    writers: Callable[[str, Mapping[str, Any], Conversation], Sequence[_Writer]]  # one for each choice
    overflow_in_stream: bool = False  # Codex looks for a context that overflows in the stream alone
    again: Again = lambda made: None
    counted: Callable[[Mapping[str, Any]], Any] | None = None  # in place of parse, where tokens alone are counted


def _only(writer: Callable[[str, Mapping[str, Any], Conversation], _Writer]) -> Callable[..., Sequence[_Writer]]:
    """The writers of an API whose replies have no choices."""
    return lambda model, body, conversation: [writer(model, body, conversation)]


def _apis(kept: Kept) -> tuple[_Api, ...]:
    responses = _only(functools.partial(api_responses.Writer, kept=kept))
    again = functools.partial(api_responses.resolved, kept)
    return (
        _Api("chat", "/v1/chat/completions", "messages", api_chat.parse, api_chat.kept, api_chat.writers),
        _Api("completions", "/v1/completions", "prompt", api_completions.parse, api_chat.kept, api_completions.writers),
        _Api("responses", "/v1/responses", "input", api_responses.ask, api_responses.kept, responses, True, again),
        _Api(
            "messages", "/v1/messages", "messages", api_messages.parse, api_messages.kept, _only(api_messages.Writer),
            counted=api_messages.parse_count,
        ),
    )  # fmt: skip


_Replies = AsyncGenerator[tuple[int, list[Part] | Finish]]


class _Service:
    """The endpoints."""

    def __init__(self, supervisor: Supervisor, tokenizer: Tokenizer, name: str) -> None:
        self._supervisor = supervisor
        self._metrics = metrics.Metrics()
        self._model = Model(supervisor, tokenizer, self._metrics)
        self._name = name
        self._created = int(time.time())
        self._counters = Counters(supervisor)
        self._replies = 0  # being made or waited for
        self._board = Board()
        self.feed = Feed(supervisor, self._counters, lambda: self._replies, name, self._board)
        self.closing = Closing()
        self.bodies = Bodies()
        self.kept = Kept()

    def close(self) -> None:
        self.bodies.close()
        self._model.close()

    async def save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            self.kept.give_up()
            try:
                await aside(self._supervisor.save)
            except SparkError as error:
                _log.error("the profile could not be saved: %s", error.message)
            except Exception:  # whatever it was, it is tried again
                _log.exception("the profile could not be saved")

    async def health(self, request: Request) -> Response:
        found = await self._supervisor.health(_HEALTH_S)
        if found.reason:
            known = {"reason": found.reason, "silent_s": round(found.silent_s, 1), "requests": found.owed}
            return json_response({"status": "error", "daemon": found.state, **known}, 503)
        if found.state == "working":
            known = {"silent_s": round(found.silent_s, 1), "requests": found.owed}
            return json_response({"status": "ok", "daemon": "working", **known})
        state = "down; the next request starts it" if found.state == "down" else "ready"
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
        supervisor = self._supervisor
        text = self._metrics.text(stats or {}, supervisor.alive, supervisor.restarts, dict(supervisor.warnings))
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def events(self, request: Request) -> Response:
        held = contextlib.AsyncExitStack()
        try:
            return EventStream(held.enter_context(self.feed.place()), held)
        except OverloadedError as error:
            return error_response(request.scope, 503, error.message, "too_many_watchers")

    def counting(self, api: _Api, kind: str = "") -> Callable[[Request], Any]:
        """Make the endpoint that counts the tokens of an API's prompts; kind: of object of its answers."""

        async def count(request: Request) -> int:
            wanted = Wanted(api.counted or api.parse, api.kept, self._model.most_chars)
            _, conversation = await self.bodies.parsed(request, wanted, api.again, self._place)
            with self._places(1):
                return await unless_left(request, self._model.count(conversation, api.prompt))

        async def answer(request: Request) -> Response:
            made = {"input_tokens": await self.closing.run(count(request))}
            return json_response({"object": kind, **made} if kind else made)

        return answer

    def endpoint(self, api: _Api) -> Callable[[Request], Any]:
        """Make the endpoint of an API."""

        async def answer(request: Request) -> Response:
            try:
                return await self.closing.run(self._answer(api, request))
            except ClientDisconnect:
                self._metrics.request(api.name, "left")
                raise
            except SparkError as error:
                self._metrics.request(api.name, error.code)
                raise

        return answer

    async def _answer(self, api: _Api, request: Request) -> Response:
        wanted = Wanted(api.parse, api.kept, self._model.most_chars)
        kept, conversation = await self.bodies.parsed(request, wanted, api.again, self._place)
        writers = api.writers(self._name, kept, conversation)
        del kept  # it would live as long as the reply
        async with contextlib.AsyncExitStack() as held:
            held.enter_context(self._places(len(writers)))
            row = held.enter_context(self._board.request(api.name, len(writers)))
            try:
                making = self._prompts(api, apart := conversation.apart())
                soon = all(map(self._model.soon, apart))
                prompts = await (making if soon else unless_left(request, making))
            except RequestError as error:
                if not (isinstance(error, ContextOverflowError) and conversation.stream and api.overflow_in_stream):
                    raise
                row.fail(error)
                self._metrics.request(api.name, error.code)
                return EventStream(_once(writers[0].start(0) + writers[0].failed(error)))
            replies = self._model.replies(prompts, row)
            if not conversation.stream:
                return json_response(await unless_left(request, self._whole(api, writers, replies)))
            held.push_async_callback(replies.aclose)
            first = await unless_left(request, _next(replies))  # what is refused at once gets a status
            expected_s = self._metrics.pace.expected_s(row.unread_tokens)
            headers = {EXPECTED: f"{expected_s:.1f}"} if expected_s else {}
            return EventStream(self._stream(api, writers, prompts[0], row, first, replies), held.pop_all(), headers)

    async def _prompts(self, api: _Api, apart: Sequence[Conversation]) -> list[Prompt]:
        """The prompts of a request; an error names the field that it is about."""
        prompts = []
        for i, one in enumerate(apart):
            where = api.prompt if len(apart) == 1 else f"{api.prompt}[{i}]"
            try:
                prompts.append(await self._model.prompt(one, where))
            except RequestError as error:
                error.field = error.field or where
                raise
        return prompts

    def _place(self) -> contextlib.AbstractContextManager[None]:
        """What a body holds while it waits for its turn: a place, as its reply has one then at least."""
        return self._places(1)

    @contextlib.contextmanager
    def _places(self, n: int) -> Iterator[None]:
        """Places among the replies, one for each choice, from before anything is done until nothing more is."""
        if self._replies + n > MAX_REPLIES:
            message = f"{self._replies} of {MAX_REPLIES} replies are made or waited for already"
            more = f", and {n} more are asked for" if n > 1 else ""
            raise OverloadedError(message + more, hint="try again in 2 s")
        self._replies += n
        self._metrics.replies.inc(n)
        try:
            yield
        finally:
            self._replies -= n
            self._metrics.replies.dec(n)

    async def _whole(self, api: _Api, writers: Sequence[_Writer], replies: _Replies) -> dict[str, Any]:
        ends: dict[int, Finish] = {}
        async with contextlib.aclosing(replies):
            async for i, item in replies:
                if isinstance(item, Finish):
                    ends[i] = item
                else:
                    writers[i].hold(item)
        self._metrics.request(api.name, "ok")
        return [writer.whole([], ends[i]) for i, writer in enumerate(writers)][-1]  # which has all

    async def _stream(
        self,
        api: _Api,
        writers: Sequence[_Writer],
        prompt: Prompt,
        row: RequestRow,
        first: tuple[int, list[Part] | Finish],
        replies: _Replies,
    ) -> AsyncGenerator[bytes]:
        """The reply as server-sent events; an error that comes too late for a status is one of them."""
        outcome, left, (i, item) = "left", len(writers), first
        try:
            begun = b"".join(writer.start(len(prompt.opening.tokens)) for writer in writers)
            said_s = time.monotonic()
            while True:
                if isinstance(item, Finish):
                    left -= 1
                    outcome = "left" if left else "ok"
                    yield begun + writers[i].end(item)
                    if not left:
                        break
                else:
                    made = b"".join(map(writers[i].part, item))
                    # What a writer keeps until it is whole, as a custom tool's input, is no reason to be silent either.
                    if not made and (not item or time.monotonic() - said_s >= KEEP_ALIVE_S):
                        made = writers[i].keep_alive
                    if begun or made:
                        yield begun + made  # in one, since each event that is sent wakes its reader
                        said_s = time.monotonic()
                begun = b""
                i, item = await self.closing.run(anext(replies))
        except SparkError as error:
            outcome = error.code
            row.fail(error)
            yield writers[0].failed(error)
        finally:
            self._metrics.request(api.name, outcome)


async def _next(replies: _Replies) -> tuple[int, list[Part] | Finish]:
    return await anext(replies)


async def _once(event: bytes) -> AsyncGenerator[bytes]:
    yield event
