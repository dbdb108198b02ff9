"""What the server's endpoints share with each other: responses and errors.

Errors have the shape of the API that was asked. JSON is written in ASCII: text from models and users may hold lone
surrogates, which UTF-8 does not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.ground.errors import (
    CancelledError,
    CapacityError,
    ContextOverflowError,
    DaemonError,
    DeadlineError,
    OverloadedError,
    RequestError,
    SparkError,
)
from spark.apis.written import dumps
from spark.speech.conversation import NotKeptError, ResponseNotKeptError

EXPECTED = "x-spark-expected-s"  # seconds until the prompt is read, as far as that can be told when a stream begins
OVERLOADED = 529  # Anthropic's word for 429
_CLIENT_GONE = 499  # a status that nobody will see
_STATUS: Mapping[type[SparkError], int] = {  # the first that fits
    NotKeptError: 404,
    RequestError: 400,
    OverloadedError: OVERLOADED,
    CancelledError: 503,  # not by its client: the daemon, or the server, was stopping
    DaemonError: 503,
    CapacityError: 503,
    DeadlineError: 504,
}

_CODES: Mapping[type[SparkError], str | None] = {  # where OpenAI has a word of its own, or none
    NotKeptError: None,
    ResponseNotKeptError: "previous_response_not_found",
    ContextOverflowError: "context_length_exceeded",
    OverloadedError: "rate_limit_exceeded",
}
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


async def unless_left(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do the work, or leave it when the client goes away first, which raises ClientDisconnect; the body was read."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait({task, gone})


class Closing:
    """Cuts work off when the server ends and has waited for long enough."""

    def __init__(self) -> None:
        self._over = False
        self._limits: set[asyncio.Timeout] = set()

    async def run(self, work: Awaitable[_Result]) -> _Result:
        """Do some work; raises CancelledError, of the errors that are explained, where it is cut off."""
        limit = asyncio.timeout(0 if self._over else None)
        self._limits.add(limit)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise CancelledError("the server is stopping") from None
        finally:
            self._limits.discard(limit)

    def cut_off(self) -> None:
        """Cut off what runs, and what comes from now on."""
        if not self._over:
            self._over = True
            for limit in self._limits:
                limit.reschedule(0)


class EventStream(Response):
    """Server-sent events; however they end, and also where none was ever sent, `held` is let go.

    Once the client has gone they end where they are. (Starlette's own has a task group of anyio for that, which costs a
    tenth of a millisecond before the first event.)
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        held: contextlib.AsyncExitStack | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._events = events
        self._held = held or contextlib.AsyncExitStack()
        self._held.push_async_callback(events.aclose)
        self.status_code, self.media_type, self.background = 200, "text/event-stream", None
        self.init_headers({**_STREAM_HEADERS, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        left = asyncio.timeout(None)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.reschedule(0)

        async with self._held:
            if scope["method"] == "HEAD":  # nothing of a body is written, so nobody would see that the client has gone
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": b""})
                return
            watching = None
            try:
                async with left:
                    watching = asyncio.create_task(watch())
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    async for event in self._events:
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                    watching.cancel()  # the end of the response would seem to be that of the client
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except TimeoutError:
                if not left.expired():
                    raise
            finally:
                if watching is not None:
                    watching.cancel()


def json_response(made: dict[str, Any], status: int = 200) -> Response:
    """Make a response."""
    return Response(dumps(made), status, media_type="application/json")


def error_response(
    scope: Scope, status: int, message: str, code: str | None = None, param: str | None = None,
    details: dict[str, Any] | None = None,
) -> Response:  # fmt: skip
    """Make the response of a failure, in the shape of the API that the request's path belongs to."""
    if is_anthropic(scope):
        made = anthropic_error(status, message, code)
        made["error"] |= {} if details is None else {"details": details}
    else:
        made = openai_error(status, message, code, param)
    if status == OVERLOADED and not is_anthropic(scope):
        status = 429
    response = json_response(made, status)
    if status in (429, OVERLOADED):
        response.headers["retry-after"] = "2"
    return response


def is_anthropic(scope: Scope) -> bool:
    """Whether a request speaks Anthropic's API."""
    return scope["path"].startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope)


def openai_error(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Make the object that OpenAI's APIs have for a failure; param: the field of the request that it is about."""
    kinds = {401: "authentication_error", 429: "rate_limit_error", OVERLOADED: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """Make the object that Anthropic's API has for a failure; it has no codes."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        504: "timeout_error",
        OVERLOADED: "overloaded_error",
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def explain(error: SparkError) -> tuple[int, str, str | None]:
    """Status, text and code for a failure; what the daemon said last is for the log alone."""
    status = next((status for cls, status in _STATUS.items() if isinstance(error, cls)), 500)
    code = next((code for cls, code in _CODES.items() if isinstance(error, cls)), error.code)
    if status >= 500 and status != OVERLOADED:
        _log.error("%s: %s\n%s", error.code, error.message, error.hint)
        return status, error.message, code
    return status, "; ".join(filter(None, (error.message, error.hint))), code


async def _on_spark_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SparkError)
    status, message, code = explain(error)
    if isinstance(error, ContextOverflowError) and is_anthropic(request.scope):
        message = prompt_too_long(error)
    details = error.details if isinstance(error, RequestError) else None
    return error_response(request.scope, status, message, code, error.field, details)


def prompt_too_long(error: ContextOverflowError) -> str:
    """Say it in the words that Anthropic's clients know, and begin to compact at."""
    return f"prompt is too long: {getattr(error, 'figures', error.message)}"


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = error.detail
    if error.status_code == 404:
        said = f"there is no {request.method} {request.url.path[:200]} here; docs/server.md has the endpoints"
    elif error.status_code == 405:
        said = f"{request.url.path} does not take {request.method}"
    response = error_response(request.scope, error.status_code, said)
    response.headers.update(error.headers or {})
    return response


async def _on_left(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _on_bug(request: Request, error: Exception) -> Response:
    return error_response(request.scope, 500, "an error inside the server; its log has the details")


EXCEPTION_HANDLERS: dict[Any, Callable[[Request, Exception], Coroutine[Any, Any, Response]]] = {
    SparkError: _on_spark_error,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_left,
    Exception: _on_bug,
}
