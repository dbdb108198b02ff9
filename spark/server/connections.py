"""Connections: how many there may be, and how long each may take to send, to read, or to do nothing.

Everything is looked at once a second (`Connections.look`), so a request costs no timer. What counts is where a
connection is, not when its last byte came: bytes that trickle in extend nothing. A head has `HEAD_S`, bodies and
replies go on for as long as they keep to a pace. Whoever shuts his side after a request gets the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import resource
import select
import time
from collections.abc import Collection
from typing import Any

import h11
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from spark.apis.bodies import MAX_BODY_BYTES, TOO_LARGE
from spark.apis.http import error_response, openai_error
from spark.server.guard import sharing
from spark.server.seldom import Seldom

MAX_CONNECTIONS = 4096
SPARE_FILES = 64  # descriptors that are not connections: the daemon's pipes, files, connections that were refused
LINGERING = SPARE_FILES // 2  # connections that are read on after they were refused, so that their clients read why
LINGER_S = 1.0
ACCEPTED_AT_ONCE = 16
ENDED_AT_ONCE = 32  # many that came together end together: replies go on between
HEAD_BYTES = 16 << 10
HEAD_S = 15.0  # until a request's head is there; what is left of a body that nobody wanted has as long
PACE_S = 20.0  # a body has to bring, and a reader to take, so many seconds' worth at least in as many seconds
BODY_BYTES_S = 32 << 10
REPLY_BYTES_S = 4 << 10
_CHUNKS, _CHUNK_BYTES = 256, 64  # more chunks than the first number hold at least the second on average
_ABSOLUTE = re.compile(rb"(?i:http)://([^/?#@]+)((?:[/?].*)?)")

_log = logging.getLogger(__name__)


def room() -> int:
    """Raise this process's limit of open files, if it can be, and say how many connections that allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has limits of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft - SPARE_FILES))


class Connections:
    """The connections of a server, at most `most`; uvicorn's `http` setting is `protocol`.

    allow_origins: whose web pages may read answers.
    """

    def __init__(self, most: int, allow_origins: Collection[str] = ()) -> None:
        self.most, self.allow_origins = most, allow_origins
        self.idle: dict[Connection, None] = {}  # without a request, the one that is so for longest first
        self.behind = False  # `look` has not seen all, and should be called again soon
        self.seldom = Seldom(_log)
        self.lingering: set[Connection] = set()  # answered and not counted any more
        self._open: set[Any] = set()

    def protocol(self, **settings: Any) -> Connection:
        """Make the protocol of a new connection."""
        self._open = settings["server_state"].connections
        return Connection(self, **settings)

    def admits(self, connection: Connection) -> bool:
        """Whether there is room for one more that has come, which may take the place of the one idle for longest."""
        if len(self._open) - len(self.lingering) <= self.most:
            return True
        self.seldom.warning("most", f"{self.most} connections are open: no more are taken than make room")
        for other in self.idle:
            if other is not connection:
                other.abort()
                return True
        return False

    def look(self) -> None:
        """End those whose time has passed; to be called about once a second."""
        now_s, ended = time.monotonic(), 0
        for connection in list(self._open):
            ended += connection.look(now_s)
            if ended >= ENDED_AT_ONCE:
                break
        self.behind = ended >= ENDED_AT_ONCE

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle what went wrong in the event loop: want of descriptors is worth a line a minute."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            self.seldom.warning("files", f"connections cannot be taken: {error.strerror}")
        else:
            loop.default_exception_handler(context)


class _Pace:
    """Whether something goes on fast enough: by at least `bytes_s` over every `PACE_S`."""

    def __init__(self, bytes_s: int) -> None:
        self._bytes_s = bytes_s
        self._since: tuple[float, int] | None = None

    def rest(self) -> None:
        """Nothing is expected now."""
        self._since = None

    def lost(self, now_s: float, n_bytes: int) -> bool:
        """Note how far it is, and say whether it is too slow."""
        if self._since is None:
            self._since = now_s, n_bytes
        since_s, before = self._since
        if now_s - since_s < PACE_S:
            return False
        self._since = now_s, n_bytes
        return n_bytes - before < self._bytes_s * (now_s - since_s)


class _Reading(h11.Connection):
    """Counts the bytes of bodies, and refuses those in chunks so small that reading them would hold up everybody.

    too_large: what it refused is a chunk that is larger than a body may be.
    """

    def __init__(self, longest_head: int) -> None:
        super().__init__(h11.SERVER, longest_head)
        self.body_bytes = 0
        self.too_large = False
        self._chunks = self._chunked_bytes = 0
        self._blank = False  # the empty line was there that clients may send before a request (RFC 9112, 2.2)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Give the next event."""
        if self.their_state is h11.IDLE and not self._blank:
            begun = self.trailing_data[0][:2]
            if begun == b"\r":
                return h11.NEED_DATA
            if begun == b"\r\n":
                self._blank = True
                self._receive_buffer.maybe_extract_at_most(2)
        event = super().next_event()
        if type(event) is h11.Data:
            self.body_bytes += len(event.data)
            if event.chunk_end:
                self._chunks += 1
                self._chunked_bytes += len(event.data)
                if self._chunks > _CHUNKS + self._chunked_bytes // _CHUNK_BYTES:
                    raise h11.RemoteProtocolError("chunks that are too small")
        elif type(event) is h11.Request:
            self._chunks = self._chunked_bytes = 0
            self._blank = False
            return _in_origin_form(event)
        # Behind an answer nobody wants the body, and the client is to read that answer.
        if self.our_state in (h11.IDLE, h11.SEND_RESPONSE) and self._chunk_bytes(event) > MAX_BODY_BYTES:
            self.too_large = True
            raise h11.RemoteProtocolError("a chunk that is too large")
        return event

    def _chunk_bytes(self, event: h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]) -> int:
        """How much the chunk at hand says that it has, if this is the first of it."""
        left: int = getattr(self._reader, "_bytes_in_chunk", 0)
        return left + len(event.data) if isinstance(event, h11.Data) else left


def _in_origin_form(request: h11.Request) -> h11.Request:
    """The request with a path for its target; a host that the target named stands for the header (RFC 9112, 3.2.2)."""
    named = _ABSOLUTE.fullmatch(request.target)
    if named is None:
        return request
    host, path = named.groups()
    headers = [(b"host", host), *((name, value) for name, value in request.headers if name != b"host")]
    target = path if path.startswith(b"/") else b"/" + path
    return h11.Request(method=request.method, target=target, headers=headers, http_version=request.http_version)


class _Joined(asyncio.Transport):
    """What a response is written to: its head goes out with what follows at once, since each send wakes its reader."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport, self._loop = transport, loop
        self._head: bytes | None = None
        self._begun = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, or hold what is written first until the next write or the loop's next turn."""
        if not self._begun:
            self._begun, self._head = True, bytes(data)
            self._loop.call_soon(self.flush)
            return
        head, self._head = self._head, None
        self._transport.write(data if head is None else head + data)

    def flush(self) -> None:
        """Write what is held."""
        if self._head is not None:
            self.write(b"")

    def close(self) -> None:
        """Close, behind what is held."""
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether it is closed, or will be."""
        return self._transport.is_closing()


class Connection(H11Protocol):
    """One connection, which is given up where it takes too long."""

    def __init__(self, all_: Connections, **settings: Any) -> None:
        super().__init__(**settings)
        self._all = all_
        self.conn = self._reading = _Reading(HEAD_BYTES)
        self._idle_s = time.monotonic()  # since when there is no request
        self._received = _Pace(BODY_BYTES_S)
        self._taken = _Pace(REPLY_BYTES_S)
        self._joined: _Joined | None = None  # of the request at hand
        self._shut = self._asked = False  # the client's side is; and it was looked whether he is still there

    @property
    def _working(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # --- what asyncio and uvicorn call ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it where there are too many."""
        super().connection_made(transport)
        if self._all.admits(self):
            self._all.idle[self] = None
            return
        self._answer(503, "too many connections; try again in 2 s")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._all.idle.pop(self, None)
        self._all.lingering.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what came."""
        if self in self._all.lingering:
            return
        super().data_received(data)
        self._note()

    def handle_events(self) -> None:
        """Go on to what was read, which may begin a request."""
        super().handle_events()
        if self.cycle is not None and self.cycle.transport is self.transport:
            self.cycle.transport = self._joined = _Joined(self.transport, self.loop)

    def on_response_complete(self) -> None:
        """Wait for the next request, unless the client has said that there is none."""
        if self._joined is not None:
            self._joined.flush()
        self._idle_s = time.monotonic()
        super().on_response_complete()
        self._note()
        if self._shut and not self._working:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client who has shut his side behind a request, until he has the answer."""
        self._shut = self not in self._all.lingering and self._working and not self.cycle.more_body
        return self._shut

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or goes beyond what may be sent, where an answer can still be given."""
        if self._reading.too_large:
            self._answer(413, TOO_LARGE)
            return
        self._all.seldom.warning("invalid", "a request that is not HTTP was refused")
        self._answer(400, msg)

    # --- time ----------------------------------------------------------------------------------------

    def look(self, now_s: float) -> bool:
        """Give it up if it takes too long; whether it was."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self.flow.write_paused or not self._working):  # so nothing is added to it
            if self._taken.lost(now_s, -unsent):
                self._all.seldom.warning("slow", "a connection was closed: its client does not read")
                self.abort()
                return True
        else:
            self._taken.rest()
        if not self._working:
            if now_s - self._idle_s > HEAD_S and not unsent and not self.transport.is_closing():
                self._late("the request's head")
                return True
        elif self.cycle.more_body and not self.flow.read_paused:
            if self._received.lost(now_s, self._reading.body_bytes):
                self._late("the request's body")
                return True
        else:
            self._received.rest()
            if self._shut:
                self._look_for_client()
        return False

    def _look_for_client(self) -> None:
        """Find out whether a client who has shut his side has gone: then whatever is sent comes back as an error."""
        if not self._asked:
            self._asked = True
            # All clients pass over this line, which they might have been sent before; those of HTTP/1.0 know none.
            if not self.cycle.response_started and self.scope["http_version"] == "1.1":
                self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])))
            return
        looked = select.poll()
        looked.register(self.transport.get_extra_info("socket"), 0)
        if looked.poll(0):  # nothing but errors
            self.abort()

    def _late(self, what: str) -> None:
        if self._working or self.conn.trailing_data[0]:
            self._all.seldom.warning("late", f"a connection was closed: {what} did not come in time")
            self._answer(408, f"{what} did not come in time")
        else:
            self.transport.close()

    def abort(self) -> None:
        """End it at once; what is done for it is left."""
        self._all.idle.pop(self, None)
        self.transport.abort()

    def _note(self) -> None:
        if self._working or self.transport.is_closing():
            self._all.idle.pop(self, None)
        elif self not in self._all.idle:
            self._all.idle[self] = None

    def _answer(self, status: int, message: str) -> None:
        """Answer instead of the application, and close; where that has begun to, only close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.abort()
            return
        shared: dict[str, str] = {}
        if self._working:
            response = error_response(dict(self.scope), status, message)
            body = bytes(response.body)
            shared = sharing(Headers(scope=dict(self.scope)), self._all.allow_origins)
        else:
            body = json.dumps(openai_error(status, message)).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        headers += shared.items()
        if status == 503:
            headers.append(("retry-after", "2"))
        output = self.conn.send(h11.Response(status_code=status, headers=headers))
        output = (output or b"") + (self.conn.send(h11.Data(data=body)) or b"")
        self.transport.write(output + (self.conn.send(h11.EndOfMessage()) or b""))
        self._part()

    def _part(self) -> None:
        """Close after an answer; what the client has sent, or is sending, is read first: else it would take it back."""
        self._all.idle.pop(self, None)
        if len(self._all.lingering) >= LINGERING:
            with contextlib.suppress(OSError):
                os.read(self.transport.get_extra_info("socket").fileno(), 1 << 16)
            self.transport.close()
            return
        self._all.lingering.add(self)
        if self._working:  # the application is to send nothing more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)
