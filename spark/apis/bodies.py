"""Bodies of requests: read within bounds, and made objects of where it holds up nobody.

Reading JSON keeps the interpreter's lock for as long as it takes, and so do ten million empty lists that are thrown
away. So a body of more than `LARGE_BYTES` goes to a process of its own (`python -c`, on demand, which ends when it has
had nothing to do for a while): it counts what the text would become before it reads it, checks the request, measures
it, and sends back what is needed of it. A thread waits for it. Smaller bodies cannot hold much; two threads read them,
one of them those of `MIDDLE_BYTES` or less: the event loop would wait for the lock with all that read at a time. A body
of `SMALL_BYTES` or less is read sooner than a thread is asked to. Whoever leaves before his body's turn takes none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

from engine.ground.errors import CapacityError, OverloadedError, RequestError, SparkError
from spark.apis.http import unless_left
from spark.speech.conversation import Conversation
from spark.speech.json_text import one_body, parse_object

MAX_BODY_BYTES = 32 << 20
MAX_ALL_BYTES = 4 * MAX_BODY_BYTES  # of bodies that are being received or read, over all connections
TOO_LARGE = f"the body is larger than {MAX_BODY_BYTES} bytes"
SLOW_S = 20.0  # a body that takes longer makes room for others where there is none
SMALL_BYTES = 8 << 10
MIDDLE_BYTES = 64 << 10
LARGE_BYTES = 256 << 10
_READ_S = 60.0  # a process that takes longer is ended
_IDLE_S = 60.0  # and one that has had nothing to do for so long ends itself
_REAP_S = 1.0
_SIZES = struct.Struct("<QQ")


class Size(NamedTuple):
    """How much JSON there is: bytes, lists and objects, values."""

    n_bytes: int = 0
    containers: int = 0
    values: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to make of a body, by functions of modules: a conversation, and what its writers need of the body.

    parse: may give something else that `again` knows. most_chars: of the conversation; what is longer comes without its
    contents, which would be refused.
    """

    parse: Callable[[Mapping[str, Any]], Any]
    kept: Callable[[Mapping[str, Any]], dict[str, Any]]
    most_chars: int


NOTHING = Size()
Again = Callable[[Any], tuple[Callable[[Mapping[str, Any]], Any], Size] | None]
_Made = tuple[dict[str, Any], Any]


class Bodies:
    """The bodies of a server's requests."""

    def __init__(self) -> None:
        self._n_bytes = 0
        self._received: dict[_Received, None] = {}  # those that hold them, the first that came first
        self._threads = [ThreadPoolExecutor(1, f"bodies of {of}") for of in ("middle size", "more")]
        self._large = _Aside()

    async def parsed(
        self,
        request: Request,
        wanted: Wanted,
        again: Again = lambda made: None,
        place: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> _Made:
        """Read a request's body, of which nothing but what its writers need and what `wanted` makes of it is left.

        again: is asked of what was made, on the event loop, whether the body refers to more: what to parse it with then
        (which has that), and how much it comes to, as often as it is referred to; it counts as if it were in the body.
        place: what a body holds that has come and waits for its turn, or has it. Raises what these do, RequestError for
        what is no JSON object or has too much in it, OverloadedError where too many bodies are there at once,
        HTTPException for one that is too large, ClientDisconnect where the client leaves first.
        """
        with self._room() as received:
            content = await received.read(request)
            kept, made = await self._read(request, wanted, content, NOTHING, place)
            more = again(made)
            if more is None:
                return kept, made
            parse, added = more
            if len(content) + added.n_bytes > MAX_BODY_BYTES:
                found = f"the body has {len(content)} bytes and refers to {added.n_bytes} more"
                raise RequestError(f"{found}; the limit is {MAX_BODY_BYTES}")
            self._take(received, added.n_bytes)
            return await self._read(request, replace(wanted, parse=parse), content, added, place)

    async def _read(
        self,
        request: Request,
        wanted: Wanted,
        content: bytes,
        added: Size,
        place: Callable[[], AbstractContextManager[None]],
    ) -> _Made:
        if len(content) + added.n_bytes <= SMALL_BYTES:
            return _read(wanted, content, added)
        with place():
            return await unless_left(request, self._in_turn(wanted, content, added))

    async def _in_turn(self, wanted: Wanted, content: bytes, added: Size) -> _Made:
        if len(content) + added.n_bytes > LARGE_BYTES:
            return await self._large.read(wanted, content, added)
        thread = self._threads[len(content) + added.n_bytes > MIDDLE_BYTES]
        return await asyncio.get_running_loop().run_in_executor(thread, _read, wanted, content, added)

    def close(self) -> None:
        """End the process, if there is one, and the threads."""
        self._large.close()
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def _room(self) -> Iterator[_Received]:
        """Count the bytes of a body until it is read."""
        made = _Received(self._take)
        self._received[made] = None
        try:
            yield made
        finally:
            self._give_back(made)

    def _take(self, received: _Received, n: int) -> None:
        """Count bytes that have come, if need be in the room of bodies that have been on their way for long."""
        now_s = time.monotonic()
        if self._n_bytes + n > MAX_ALL_BYTES:
            for other in [one for one in self._received if one is not received and one.may_be_left(now_s)]:
                other.leave()
                self._give_back(other)
                if self._n_bytes + n <= MAX_ALL_BYTES:
                    break
        if self._n_bytes + n > MAX_ALL_BYTES:
            message = f"the bodies of other requests take up {self._n_bytes >> 20} MiB"
            raise OverloadedError(message, hint="try again in 2 s")
        if received in self._received:
            received.n_bytes += n
            self._n_bytes += n

    def _give_back(self, received: _Received) -> None:
        if received in self._received:
            del self._received[received]
            self._n_bytes -= received.n_bytes


class _Received:
    """A body that is being received. n_bytes: what is counted of it; take: counts more before it is kept."""

    def __init__(self, take: Callable[[_Received, int], None]) -> None:
        self.n_bytes = 0
        self._take = take
        self._since_s = time.monotonic()
        self._limit: asyncio.Timeout | None = None  # while it waits for more

    def may_be_left(self, now_s: float) -> bool:
        """Whether it is still not there after a time in which most are."""
        return self._limit is not None and now_s - self._since_s > SLOW_S

    def leave(self) -> None:
        """Give it up for others."""
        assert self._limit is not None
        self._limit.reschedule(0)
        self._limit = None

    async def read(self, request: Request) -> bytes:
        """Read a body of bounded size; one that says that it is larger, or is compressed, is refused unread."""
        _refuse_coded(request)
        too_large = HTTPException(413, TOO_LARGE)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(None) as self._limit:
                async for chunk in request.stream():
                    if len(body) + len(chunk) > MAX_BODY_BYTES:
                        raise too_large
                    self._take(self, len(chunk))
                    body += chunk
        except TimeoutError:
            raise OverloadedError(
                f"the body was not there after {SLOW_S:.0f} s, and others need its room", hint="try again in 2 s"
            ) from None
        finally:
            self._limit = None
        return bytes(body)


def _refuse_coded(request: Request) -> None:
    """Refuse a body that would have to be unpacked first: of how much it becomes its length says nothing."""
    codings = ", ".join(map(str.strip, request.headers.getlist("content-encoding")))
    if codings.lower() not in ("", "identity"):
        said = f"Content-Encoding {codings[:100]!r} is not supported; send the body as it is, without that header"
        raise HTTPException(415, said, {"accept-encoding": "identity"})  # as RFC 9110 has it, 15.5.16


def _read(wanted: Wanted, content: bytes, added: Size = NOTHING) -> _Made:
    with one_body(added.containers, added.values):
        body = parse_object(content)
        made = wanted.parse(body)
        return wanted.kept(body), made.measured(wanted.most_chars) if isinstance(made, Conversation) else made


# --- the process --------------------------------------------------------------------------------------

_BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from spark.apis import bodies; bodies.work()"
_Answer = _Made | SparkError


class _IdleEndError(Exception):
    """The process had nothing to do for _IDLE_S."""


class _Aside:
    """Reads large bodies in a process, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large bodies")
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    async def read(self, wanted: Wanted, content: bytes, added: Size = NOTHING) -> _Made:
        """Have a body read; `_read` in another process."""
        asked = (wanted, added)
        answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, asked, content)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self, asked: tuple[Wanted, Size], content: bytes) -> _Answer:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(_IdleEndError):
                return self._exchange(self._process, asked, content)
        return self._exchange(self._start(), asked, content)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            self._end(self._process)
        root = str(Path(__file__).resolve().parents[2])
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, root],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._process = process
        # Once it has ended by itself it would be a zombie until the next large body.
        threading.Thread(target=process.wait, name="end of large bodies", daemon=True).start()
        if self._closed:
            process.kill()
        return process

    def _exchange(self, process: subprocess.Popen[bytes], asked: tuple[Wanted, Size], content: bytes) -> _Answer:
        """Have a process read a body. _IdleEndError: it has just ended for want of work, and has read nothing.

        CapacityError: it took too long, or what it did ended it; another one would fare no better.
        """
        assert process.stdin and process.stdout
        late = threading.Timer(_READ_S, process.kill)
        late.start()
        try:
            _write(process.stdin, pickle.dumps(asked), content)
            answer, _ = _receive(process.stdout)
        except (OSError, EOFError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)
            self._end(process)
            if process.returncode == 0:
                raise _IdleEndError from None
            raise CapacityError("the body could not be read: the process that does it ended") from error
        finally:
            late.cancel()
        made: _Answer = pickle.loads(answer)
        return made

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()
        self._process = None


def _write(file: IO[bytes], first: bytes, second: bytes) -> None:
    file.write(_SIZES.pack(len(first), len(second)))
    file.write(first)
    file.write(second)
    file.flush()


def _receive(file: IO[bytes]) -> tuple[bytes, bytes]:
    """What `_write` wrote; raises EOFError."""

    def exactly(n: int) -> bytes:
        made = file.read(n)
        if len(made) < n:
            raise EOFError
        return made

    sizes = _SIZES.unpack(exactly(_SIZES.size))
    return exactly(sizes[0]), exactly(sizes[1])


def work() -> None:
    """Read bodies from stdin until it ends, or nothing comes for a while; the process's main function."""
    os.nice(5)  # replies that are being written come first
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while select.select([sys.stdin.buffer], [], [], _IDLE_S)[0]:
        try:
            asked, content = _receive(sys.stdin.buffer)
        except EOFError:
            return
        answer: _Answer
        try:
            wanted, added = pickle.loads(asked)
            answer = _read(wanted, content, added)
        except SparkError as error:
            answer = error
        except MemoryError:
            answer = CapacityError("there is not enough memory to read the body")
        del content
        _write(answers, pickle.dumps(answer, pickle.HIGHEST_PROTOCOL), b"")
        del answer
