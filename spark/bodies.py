"""Bodies of requests: read within bounds, and made objects of where it holds up nobody.

Reading JSON keeps the interpreter's lock for as long as it takes, and so do ten million empty lists that are thrown
away. So a body of more than `LARGE_BYTES` goes to a process of its own (`python -c`, on demand, which ends when it has
had nothing to do for a while): it counts what the text would become before it reads it, checks the request, and sends
back what that makes. A thread waits for it. Smaller bodies cannot hold much; a thread reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request

from engine.errors import CapacityError, OverloadedError, RequestError, SparkError
from spark.conversation import MAX_DEPTH, too_deep

MAX_BODY_BYTES = 32 << 20
MAX_ALL_BYTES = 4 * MAX_BODY_BYTES  # of bodies that are being received or read, over all connections
LARGE_BYTES = 256 << 10
MAX_CONTAINERS = 1 << 16  # lists and objects of one body
MAX_VALUES = 3 << 19  # a prompt of 2^20 tokens, and half as much
_READ_S = 60.0  # a process that takes longer is ended
_IDLE_S = 60.0  # and one that has had nothing to do for so long ends itself
_SLICE = 1 << 20
_SIZES = struct.Struct("<QQ")

_Made = TypeVar("_Made")
_Parse = Callable[[Mapping[str, Any]], Any]


class Size(NamedTuple):
    """How much JSON there is: bytes, lists and objects, values."""

    n_bytes: int = 0
    containers: int = 0
    values: int = 0


NOTHING = Size()
Again = Callable[[Any], tuple[_Parse, Size] | None]


class Bodies:
    """The bodies of a server's requests."""

    def __init__(self) -> None:
        self._n_bytes = 0
        self._large = _Aside()

    async def parsed(self, request: Request, parse: _Parse, again: Again = lambda made: None) -> tuple[Any, Any]:
        """Read a request's body; the object, and what `parse`, a function of a module, makes of it.

        again: is asked of what was made, on the event loop, whether the body refers to more: what to parse it with then
        (which has that), and how much it comes to, as often as it is referred to; it counts as if it were in the body.
        Raises what both do, RequestError for what is no JSON object or has too much in it, OverloadedError where too
        many bodies are there at once, HTTPException for one that is too large.
        """
        with self._room() as take:
            content = await _received(request, take)
            body, made = await self._read(parse, content, NOTHING)
            more = again(made)
            if more is None:
                return body, made
            parse, added = more
            if len(content) + added.n_bytes > MAX_BODY_BYTES:
                found = f"the body has {len(content)} bytes and refers to {added.n_bytes} more"
                raise RequestError(f"{found}; the limit is {MAX_BODY_BYTES}")
            take(added.n_bytes)
            return await self._read(parse, content, added)

    async def _read(self, parse: _Parse, content: bytes, added: Size) -> tuple[Any, Any]:
        if len(content) + added.n_bytes > LARGE_BYTES:
            return await self._large.read(parse, content, added)
        return await asyncio.to_thread(_read, parse, content, added)

    def close(self) -> None:
        """End the process, if there is one."""
        self._large.close()

    @contextlib.contextmanager
    def _room(self) -> Iterator[Callable[[int], None]]:
        """Count bytes that are held until the end."""
        held = 0

        def take(n: int) -> None:
            nonlocal held
            if self._n_bytes + n > MAX_ALL_BYTES:
                raise OverloadedError(
                    f"the bodies of other requests take up {self._n_bytes >> 20} MiB", hint="try again in 2 s"
                )
            held += n
            self._n_bytes += n

        try:
            yield take
        finally:
            self._n_bytes -= held


async def _received(request: Request, take: Callable[[int], None]) -> bytes:
    """Read a body of bounded size; one that says that it is larger is refused unread."""
    too_large = HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > MAX_BODY_BYTES:
            raise too_large
        take(len(chunk))
        body += chunk
    return bytes(body)


# --- from bytes to objects ----------------------------------------------------------------------------


def parse_object(body: bytes, added: Size = NOTHING) -> dict[str, Any]:
    """Read a body as a JSON object of bounded depth and contents; raises RequestError. added: what it refers to."""
    if len(body) + added.values > MAX_CONTAINERS:  # a byte opens no more than one
        containers, values = count(body)
        containers, values = containers + added.containers, values + added.values
        if containers > MAX_CONTAINERS:
            raise RequestError(f"the body's JSON has {containers} lists and objects; the limit is {MAX_CONTAINERS}")
        if values > MAX_VALUES:
            raise RequestError(f"the body's JSON has {values} values; the limit is {MAX_VALUES}")
    try:
        # Text of models and users may hold halves of surrogate pairs, in UTF-8 too.
        text = body.decode("utf-8-sig", "surrogatepass")
        made = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {_without_text(error)}") from None
    if type(made) is not dict:
        raise RequestError("the body is not a JSON object")
    if too_deep(made):
        raise RequestError(f"the body is nested more than {MAX_DEPTH} levels deep")
    return made


def count(body: bytes) -> tuple[int, int]:
    """Lists and objects of a JSON text, and values: what follows `[`, `{`, `,` or `:`, keys too.

    Of a text that is not JSON: at least as many as come before the place where that shows.
    """
    # An escaped backslash escapes nothing, and an escaped quote ends nothing; backslashes are in strings alone.
    if b"\\" in body:
        body = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    containers = values = 0
    inside = np.uint8(0)  # a string, at the beginning of the slice
    for at in range(0, len(body), _SLICE):
        piece = np.frombuffer(body, np.uint8, min(_SLICE, len(body) - at), at)
        quotes = (piece == ord('"')).view(np.uint8)
        shut = (np.bitwise_xor.accumulate(quotes) ^ inside) == 0
        inside ^= np.bitwise_xor.reduce(quotes)
        opened = int(np.count_nonzero(((piece == ord("[")) | (piece == ord("{"))) & shut))
        containers += opened
        values += opened + int(np.count_nonzero(((piece == ord(",")) | (piece == ord(":"))) & shut))
    return containers, values


def _without_text(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"{error}"


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number is too large")
    return value


def _read(parse: Callable[[Mapping[str, Any]], _Made], content: bytes, added: Size) -> tuple[Any, _Made]:
    body = parse_object(content, added)
    return body, parse(body)


# --- the process --------------------------------------------------------------------------------------

_BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from spark import bodies; bodies.work()"
_Answer = tuple[bool, Any]  # whether it is an error, and what it is


class _Aside:
    """Reads large bodies in a process, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large bodies")
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    async def read(self, parse: _Parse, content: bytes, added: Size = NOTHING) -> tuple[Any, Any]:
        """Have a body read; `_read` in another process."""
        asked = (parse, added)
        answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, asked, content)
        failed, made = answer
        if failed:
            raise made
        body, result = made
        return body, result

    def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self, asked: tuple[_Parse, Size], content: bytes) -> _Answer:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(BrokenPipeError):  # it has just ended for want of work
                return self._exchange(self._process, asked, content)
        process = self._start()
        try:
            return self._exchange(process, asked, content)
        except (OSError, EOFError) as error:
            self._end(process)
            raise CapacityError("the body could not be read: the process that does it ended") from error

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            self._end(self._process)
        root = str(Path(__file__).resolve().parents[1])
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, root],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._process = process
        if self._closed:
            process.kill()
        return process

    def _exchange(self, process: subprocess.Popen[bytes], asked: tuple[_Parse, Size], content: bytes) -> _Answer:
        assert process.stdin and process.stdout
        late = threading.Timer(_READ_S, process.kill)
        late.start()
        try:
            _write(process.stdin, pickle.dumps(asked), content)
            answer, _ = _receive(process.stdout)
        except EOFError:
            self._end(process)
            raise BrokenPipeError from None
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
            parse, added = pickle.loads(asked)
            answer = (False, _read(parse, content, added))
        except SparkError as error:
            answer = (True, error)
        except MemoryError:
            answer = (True, CapacityError("there is not enough memory to read the body"))
        del content
        _write(answers, pickle.dumps(answer, pickle.HIGHEST_PROTOCOL), b"")
        del answer
