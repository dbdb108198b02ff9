"""Forms of replies: grammars that other processes compile, and masks that they make, so that none can stop the daemon.

What a schema costs nobody can tell by looking at it: the library takes minutes and gigabytes for some that fit in a
line. So what is too large is refused by its size (`engine.text.grammar.check`), and the rest is compiled, and asked for
masks, in processes that may be killed (text/forms_host.py), each with a limit of processor time and of memory. A form
is compiled once for all requests that have it, and kept for a while after the last. A process that ends for a reason of
its own is replaced: the new one is given the tokens that each reply has, and goes on with the same masks.

Everything here happens in the caller's thread, and nothing waits but `wait`, until a time that is given.
"""

from __future__ import annotations

import json
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import engine
from engine.ground.errors import RequestError, SparkError, from_code
from engine.text.forms_host import (
    ACCEPT,
    BEGIN,
    BROKEN,
    CLOSE,
    COMPILE_S,
    COMPILED,
    ENDED,
    EXIT_MEMORY,
    FAILED,
    FORK,
    FORM_BYTES,
    HEAD,
    KILL,
    MASK,
    MASK_S,
    NUMBER,
    READY,
    REFUSED,
    STATE,
    frame,
    receive,
    send,
)
from engine.text.grammar import check

COMPILING = 2  # forms that are compiled at a time
SLOW_S = 0.3  # of them, one that takes longer; the second place is for those that do not
AGED_S = 2.0  # a form that has waited for longer goes ahead of shorter ones
KEPT_FORMS = 16  # whose processes wait for the next request
KEPT_KIB = 128 << 10  # what these may take
KNOWN_FORMS = 256  # of which it is remembered whether they are any
WALL = 4  # seconds on the clock for each that a form may compute: the machine does other work, too
_MEMORY = f"{FORM_BYTES >> 20} MiB"
_START_S = 120.0  # until the vocabulary is laid out
_PATIENCE_S = 5.0  # for a process that has to read or write a frame
_STRIKES = 3  # how often a process may end, for no reason known, without an answer in between
_BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from engine.text.forms_host import main; main()"


class Form:
    """The form of one reply. accept, mask: as in `engine.text.grammar.Grammar`, but for the waiting.

    binds: the reply has to have it. is_ready: it is known whether there is such a form, so that `begin` may be called.
    is_done: nothing can follow any more, as far as is known.
    """

    def __init__(self, forms: Forms, shared: _Shared, number: int, stop: Collection[int], binds: bool) -> None:
        self.binds = binds
        self.is_done = False
        self.number, self.stop = number, sorted(stop)
        self.tokens: list[int] = []
        self.error: SparkError | None = None
        self._forms, self._shared = forms, shared
        self._heard = -1  # of how many tokens it is known whether anything can follow
        self._mask: tuple[int, NDArray[np.uint32]] = -1, np.zeros(0, np.uint32)  # of how many tokens

    @property
    def is_ready(self) -> bool:
        """Whether the form is compiled, or is known to be none."""
        return self._shared.known

    def begin(self) -> None:
        """Begin the reply, if it is bound; raises the form's error, if it is none."""
        if self._shared.error is not None:
            raise self._shared.error
        if self.binds:
            self._forms.begin(self._shared, self)

    def accept(self, token: int) -> None:
        """Go past a token that the last mask allowed, no stop token."""
        self.tokens.append(token)
        self._forms.tell(self._shared, self, ACCEPT, NUMBER.pack(token))

    def settle(self, until_s: float) -> bool:
        """Learn whether anything can follow; False where that takes beyond a time (as `time.monotonic` counts).

        Raises RequestError for a form that takes more than one may.
        """
        self._forms.wait(lambda: self.error is not None or self._heard == len(self.tokens), until_s)
        if self.error is not None:
            raise self.error
        return self._heard == len(self.tokens)

    def mask(self, until_s: float) -> NDArray[np.uint32] | None:
        """The tokens that may come next, as `Grammar.mask` has them; None where that takes beyond a time.

        Raises RequestError for a form that takes more than one may.
        """
        n = len(self.tokens)
        self._forms.wait(lambda: self.error is not None or self.is_done or self._mask[0] == n, until_s)
        if self.error is not None:
            raise self.error
        return self._mask[1] if self.is_done or self._mask[0] == n else None

    @property
    def is_late(self) -> bool:
        """Whether the mask is still being made."""
        self._forms.poll()
        return self.error is None and not self.is_done and self._mask[0] != len(self.tokens)

    def close(self) -> None:
        """Forget the reply."""
        self._forms.end(self._shared, self)

    def hear(self, kind: bytes, n: int, body: bytes) -> None:
        """Take what its process says of its first n tokens."""
        if kind == BROKEN:
            self.error = RequestError(body.decode())
        elif n == len(self.tokens):
            self._heard, self.is_done = n, bool(body[0])
            if kind == MASK:
                self._mask = n, np.frombuffer(body, np.uint32, offset=1)


class _Shared:
    """A form that several replies may have. error: why it is none; waiting: those that have not begun."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.known = False
        self.error: SparkError | None = None
        self.process: _Process | None = None
        self.queued, self.queued_s = False, 0.0
        self.waiting: set[int] = set()
        self.begun: dict[int, Form] = {}
        self.strikes = 0


class _Process:
    """A child of the host. due: the replies it owes a mask, in order, and when it began with the first."""

    def __init__(self, number: int, shared: _Shared, sock: socket.socket) -> None:
        self.number, self.shared, self.sock = number, shared, sock
        self.began_s = time.monotonic()
        self.compiled = self.slow = False
        self.due: deque[Form] = deque()
        self.unsent = bytearray()
        self.kib = 0
        self.silent_s: float | None = None  # since when its socket is at its end

    @property
    def late_s(self) -> float:
        """When it has had more than it may."""
        return self.began_s + WALL * (MASK_S if self.compiled else COMPILE_S)


class Forms:
    """The forms of a model's replies; processes are started when the first is asked for.

    model, file_id: the file whose tokenizer they know. n_vocab: the number of logits.
    """

    def __init__(self, model: Path, file_id: Callable[[], str], n_vocab: int) -> None:
        self._model, self._file_id, self._n_vocab = model, file_id, n_vocab
        self._known: OrderedDict[str, _Shared] = OrderedDict()  # the one used longest ago first
        self._queue: deque[_Shared] = deque()
        self._slow: deque[_Shared] = deque()  # those that others would have waited for too long
        self._processes: dict[int, _Process] = {}
        self._selector = selectors.DefaultSelector()
        self._host: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_up = self._is_closed = False
        self._started_s = 0.0
        self._lost_starts = 0
        self._numbers = 0

    # --- what replies ask for ---------------------------------------------------------------------

    def open(self, text: str, stop: Collection[int]) -> Form:
        """The form that a request describes, for a reply that the tokens of `stop` end; it is compiled meanwhile.

        Raises RequestError for what is malformed, or too large by its size alone.
        """
        text, binds = check(text)
        shared = self._known.get(text)
        if shared is None:
            shared = self._known[text] = _Shared(text)
        self._known.move_to_end(text)
        self._numbers += 1
        form = Form(self, shared, self._numbers, stop, binds)
        shared.waiting.add(form.number)
        if not shared.known:
            self._enqueue(shared)
        self._forget()
        return form

    def begin(self, shared: _Shared, form: Form) -> None:
        """Begin a reply, in the form's process or, where it has none, in the next."""
        shared.waiting.discard(form.number)
        shared.begun[form.number] = form
        self._known.move_to_end(shared.text)
        if shared.process is None:
            self._enqueue(shared)
        elif shared.process.compiled:
            self._begin(shared.process, form)

    def tell(self, shared: _Shared, form: Form, kind: bytes, *parts: bytes) -> None:
        """Say something to the process that has a reply; if there is none now, the next is told everything."""
        process = shared.process
        if process is not None and process.compiled and form.number in shared.begun and form.error is None:
            self._say(process, form if kind != CLOSE else None, kind, NUMBER.pack(form.number), *parts)

    def end(self, shared: _Shared, form: Form) -> None:
        """Forget a reply."""
        self.tell(shared, form, CLOSE)
        shared.waiting.discard(form.number)
        shared.begun.pop(form.number, None)
        process = shared.process
        if not shared.waiting and not shared.begun:
            if process is not None and not process.compiled:
                self._kill(process)  # nobody waits for it
            if not shared.known:
                for queue in (self._queue, self._slow):
                    if shared in queue:
                        queue.remove(shared)
                self._known.pop(shared.text, None)
        self._tidy()

    def wait(self, is_over: Callable[[], bool], until_s: float) -> None:
        """Take what the processes say until something is over, or until a time."""
        self.poll()
        while not is_over() and (left_s := until_s - time.monotonic()) > 0:
            self.poll(left_s)

    def poll(self, wait_s: float = 0.0) -> None:
        """Take what the processes have said, for `wait_s` seconds if they have not; start those whose turn it is."""
        if not self._processes and self._control is None and not self._queue and not self._slow:
            if wait_s:
                time.sleep(wait_s)
            return
        self._start()
        now = time.monotonic()
        dues = [process.late_s for process in self._processes.values() if process.due or not process.compiled]
        dues += [p.began_s + SLOW_S for p in self._processes.values() if not p.compiled and not p.slow]
        dues += [p.silent_s + 1 for p in self._processes.values() if p.silent_s is not None]
        wait_s = max(0.0, min([wait_s, *(due - now for due in dues if due > now)]))
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._control:
                self._hear_host()
                continue
            if events & selectors.EVENT_WRITE and key.data.silent_s is None:
                self._flush(key.data)
            if events & selectors.EVENT_READ and key.data.silent_s is None:
                self._hear(key.data)
        self._look()
        self._start()

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        self._down()
        self._selector.close()

    # --- processes --------------------------------------------------------------------------------

    def _enqueue(self, shared: _Shared) -> None:
        if shared.process is None and not shared.queued:
            shared.queued, shared.queued_s = True, time.monotonic()
            self._queue.append(shared)
            self._start()

    def _start(self) -> None:
        """Begin to compile what waits, as far as there is room."""
        if self._is_closed or not (self._queue or self._slow):
            return
        if self._control is None:
            self._up()
        if not self._is_up:
            return
        while True:
            compiling = [process for process in self._processes.values() if not process.compiled]
            any_slow = any(process.slow for process in compiling)
            queue = self._queue or (self._slow if not any_slow else None)
            if len(compiling) >= COMPILING or not queue or not self._is_up:
                return
            shared = queue[0] if queue is self._slow else self._next()
            queue.remove(shared)
            shared.queued = False
            self._fork(shared, slow=queue is self._slow)

    def _next(self) -> _Shared:
        """The shortest of what waits in the queue: who asks for little does not wait behind many who ask for much."""
        first = self._queue[0]
        is_aged = time.monotonic() > first.queued_s + AGED_S
        return first if is_aged else min(self._queue, key=lambda shared: len(shared.text))

    def _fork(self, shared: _Shared, slow: bool) -> None:
        ours, theirs = socket.socketpair()
        self._numbers += 1
        process = _Process(self._numbers, shared, ours)
        process.slow = slow
        _limit(ours)
        shared.process = self._processes[process.number] = process
        self._selector.register(ours, selectors.EVENT_READ, process)
        assert self._control is not None
        try:
            with theirs:
                socket.send_fds(self._control, [FORK + NUMBER.pack(process.number)], [theirs.fileno()])
                send(self._control, shared.text.encode())
        except OSError:
            self._down()

    def _begin(self, process: _Process, form: Form) -> None:
        self._say(process, form, BEGIN, NUMBER.pack(form.number), json.dumps([form.stop, form.tokens]).encode())

    def _say(self, process: _Process, due: Form | None, *parts: bytes) -> None:
        if process.silent_s is not None:
            return
        if due is not None:
            if not process.due:
                process.began_s = time.monotonic()
            process.due.append(due)
        process.unsent += frame(*parts)
        self._flush(process)

    def _flush(self, process: _Process) -> None:
        """Send what there is room for: tokens of a long reply may be more, and the process may be computing."""
        try:
            while process.unsent:
                del process.unsent[: process.sock.send(process.unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            self._silent(process)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
        self._selector.modify(process.sock, events, process)

    def _hear(self, process: _Process) -> None:
        """Take one message of a form's process."""
        try:
            message = receive(process.sock)
        except (EOFError, OSError):
            self._silent(process)
            return
        kind, number, n, process.kib = HEAD.unpack_from(message)
        body, shared = message[HEAD.size :], process.shared
        if kind in (COMPILED, REFUSED):
            shared.known = process.compiled = True
            shared.strikes = 0
            if kind == REFUSED:
                shared.error = RequestError(body.decode())
                self._lose(process)
                for form in shared.begun.values():
                    form.error = shared.error
                return
            for form in [*shared.begun.values()]:
                self._begin(process, form)
            self._tidy()
            return
        ended = shared.begun.get(number)
        if ended is not None:
            ended.hear(kind, n, body)
        if kind in (MASK, BROKEN) or (kind == STATE and body[0]):
            process.due.popleft()
            process.began_s, shared.strikes = time.monotonic(), 0

    def _silent(self, process: _Process) -> None:
        """Its socket is at its end: the host will say why."""
        if process.silent_s is None:
            process.silent_s = time.monotonic()
            self._selector.unregister(process.sock)

    def _look(self) -> None:
        """Kill what has had more time than it may, and what others wait for."""
        now = time.monotonic()
        if not self._is_up and self._control is not None and now > self._started_s + _START_S:
            self._fail_all(SparkError(f"the vocabulary of grammars was not laid out in {_START_S:.0f} s"))
            self._down()
        for process in [*self._processes.values()]:
            if process.silent_s is not None:
                if now > process.silent_s + 1:
                    self._ended(process, -signal.SIGKILL)
                continue
            if (process.due or not process.compiled) and now > process.late_s:
                self._kill(process)
                self._ended(process, -signal.SIGXCPU)
            elif not process.compiled and not process.slow and now > process.began_s + SLOW_S:
                others = [p for p in self._processes.values() if p.slow and not p.compiled]
                if not others:
                    process.slow = True
                elif self._queue:
                    self._kill(process)
                    process.shared.queued = True
                    self._slow.append(process.shared)

    def _kill(self, process: _Process) -> None:
        """End a process, which nobody hears any more."""
        if self._control is not None:
            try:
                self._control.sendall(KILL + NUMBER.pack(process.number))
            except OSError:
                self._down()
        self._lose(process)

    def _lose(self, process: _Process) -> None:
        self._processes.pop(process.number, None)
        if process.shared.process is process:
            process.shared.process = None
        if process.silent_s is None:
            process.silent_s = time.monotonic()
            self._selector.unregister(process.sock)
        process.sock.close()

    def _ended(self, process: _Process, code: int) -> None:
        """A process is gone: whose fault it was gets an error, everybody else another process."""
        self._lose(process)
        shared = process.shared
        shared.strikes += 1
        seconds = COMPILE_S if not process.compiled else MASK_S
        limits = {-signal.SIGXCPU: f"{seconds} s", -signal.SIGABRT: _MEMORY, EXIT_MEMORY: _MEMORY}
        limit = limits.get(code)
        if limit is None and shared.strikes >= _STRIKES:
            limit = f"{seconds} s or {_MEMORY}"
        if limit is not None and not process.compiled:
            shared.known, shared.error = True, _too_much("", limit)
            for form in shared.begun.values():
                form.error = shared.error
            return
        if limit is not None and process.due:
            process.due[0].error = _too_much(" for one token", limit)
            shared.begun.pop(process.due[0].number, None)
        if shared.begun or (shared.waiting and not shared.known):
            self._enqueue(shared)

    # --- the host ---------------------------------------------------------------------------------

    def _up(self) -> None:
        ours, theirs = socket.socketpair()
        root = Path(engine.__file__ or "").resolve().parents[1]
        arguments = [str(theirs.fileno()), str(self._model), self._file_id(), str(self._n_vocab)]
        with theirs:
            self._host = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(root), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        _limit(ours)
        self._control, self._is_up, self._started_s = ours, False, time.monotonic()
        self._selector.register(ours, selectors.EVENT_READ, None)

    def _hear_host(self) -> None:
        assert self._control is not None
        try:
            message = receive(self._control)
        except (EOFError, OSError):
            if not self._is_up:
                self._lost_starts += 1
                if self._lost_starts == _STRIKES:
                    self._lost_starts = 0
                    self._fail_all(SparkError("the process that compiles grammars ended while it started"))
            self._down()
            return
        kind = message[:1]
        if kind == READY:
            self._is_up, self._lost_starts = True, 0
        elif kind == FAILED:
            self._fail_all(from_code(*json.loads(message[1:])))
            self._down()
        elif kind == ENDED:
            process = self._processes.get(NUMBER.unpack_from(message, 1)[0])
            if process is not None:
                while process.silent_s is None:  # what it had said before
                    self._hear(process)
                if process.number in self._processes:
                    self._ended(process, struct.unpack_from("<i", message, 1 + NUMBER.size)[0])

    def _fail_all(self, error: SparkError) -> None:
        """All that wait for the host get an error; the next request tries again."""
        for shared in self._known.values():
            if not shared.known:
                shared.error, shared.known = error, True
            for form in shared.begun.values():
                form.error = error
        self._known.clear()
        self._queue.clear()
        self._slow.clear()

    def _down(self) -> None:
        """The host is gone, or goes now, and its children with it."""
        if self._control is not None:
            self._selector.unregister(self._control)
            self._control.close()
            self._control, self._is_up = None, False
        if self._host is not None:
            self._host.kill()
            self._host.wait()
            self._host = None
        processes, self._processes = self._processes, {}
        for process in processes.values():
            self._ended(process, -signal.SIGKILL)

    # --- what is kept -----------------------------------------------------------------------------

    def _tidy(self) -> None:
        """End the processes of forms that nobody has, those used longest ago first, as far as there are too many."""
        idle = [
            process
            for shared in self._known.values()
            if (process := shared.process) is not None and process.compiled and not shared.begun
        ]
        kib = sum(process.kib for process in idle)
        for n, process in enumerate(idle):
            if len(idle) - n > KEPT_FORMS or kib > KEPT_KIB:
                kib -= process.kib
                self._kill(process)

    def _forget(self) -> None:
        for text, shared in [*self._known.items()]:
            if len(self._known) <= KNOWN_FORMS:
                return
            if not shared.waiting and not shared.begun:
                if shared.process is not None:
                    self._kill(shared.process)
                del self._known[text]


def _limit(sock: socket.socket) -> None:
    """Let nothing be read or written for ever, whatever has become of the other side."""
    deadline = struct.pack("ll", int(_PATIENCE_S), 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, deadline)


def _too_much(what: str, limit: str) -> RequestError:
    return RequestError(
        f"the grammar takes more than {limit}{what}: the limit of a form", hint="ask for a simpler schema"
    )
