"""The processes in which grammars are compiled and masks are made: one that knows the vocabulary, and one a form.

`text/forms.py` starts the host, a process of its own without a GPU. It lays out the model's vocabulary once and forks
for each form, which costs milliseconds and shares that memory; so a form that takes too much work or memory is killed,
and nobody else's is lost. The host itself never computes: it forks, kills and reaps, and tells how each child ended.
All of them end when the daemon does, however it does: the host at the end of its socket, its children with the host
(on Linux) or at the end of theirs.

Messages are frames: their length, uint32, then bytes. Numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine.formats.gguf import open_model
from engine.ground.errors import RequestError, SparkError, WrongModelError
from engine.text import tokenizer
from engine.text.grammar import Compiled, Grammar, Vocabulary

COMPILE_S = 10  # of processor time; what a form may take
MASK_S = 3  # and each of its masks
FORM_BYTES = 256 << 20  # a form, beyond the vocabulary that it shares
EXIT_MEMORY = 3  # of a child whose form took more

# To the host: fork a child for the socket that comes along, kill one. From it: what it is, how a child ended.
FORK, KILL, READY, FAILED, ENDED = b"F", b"K", b"R", b"E", b"D"
# To a child: a reply begins (its number, stop tokens, tokens so far), goes on by a token, is over.
BEGIN, ACCEPT, CLOSE = b"B", b"A", b"C"
# From it: the form is one, or is none; of a reply: whether anything can follow, its mask, an error.
COMPILED, REFUSED, STATE, MASK, BROKEN = b"O", b"N", b"S", b"M", b"X"
NUMBER = struct.Struct("<I")
HEAD = struct.Struct("<cIII")  # kind, the reply's number, its tokens, bytes that the form takes, in KiB
_LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1


def frame(*parts: bytes) -> bytes:
    """One message."""
    return b"".join((NUMBER.pack(sum(map(len, parts))), *parts))


def send(sock: socket.socket, *parts: bytes) -> None:
    """Send a frame; raises OSError where that is not possible within the socket's deadline."""
    sock.sendall(frame(*parts))


def receive(sock: socket.socket) -> bytes:
    """Wait for a frame; raises EOFError at the end, OSError after the socket's deadline."""
    return _exactly(sock, NUMBER.unpack(_exactly(sock, NUMBER.size))[0])


def _exactly(sock: socket.socket, n: int) -> bytes:
    parts = bytearray()
    while len(parts) < n:
        part = sock.recv(n - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


# --- the host ----------------------------------------------------------------------------------------


def main() -> None:
    """Run the host: `FD MODEL FILE_ID N_VOCAB` of the command line."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):  # these are the daemon's, which then ends the host
        signal.signal(number, signal.SIG_IGN)
    try:
        vocabulary = _vocabulary(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    except SparkError as error:
        send(control, FAILED, json.dumps([error.code, error.message, error.hint]).encode())
        return
    with contextlib.suppress(EOFError, OSError):
        send(control, READY)
        _Host(control, vocabulary).run()


def _vocabulary(model: Path, file_id: str, n_vocab: int) -> Vocabulary:
    try:
        with open_model(model) as file:
            if file.file_id != file_id:
                raise WrongModelError(
                    f"{model}: the file was replaced after the daemon had loaded it", hint="start the daemon again"
                )
            return Vocabulary(tokenizer.load(file), n_vocab)
    except OSError as error:
        raise SparkError(f"the model's vocabulary cannot be read again: {error}") from error


class _Host:
    def __init__(self, control: socket.socket, vocabulary: Vocabulary) -> None:
        self._control, self._vocabulary = control, vocabulary
        self._children: dict[int, int] = {}  # process ids by the numbers that the daemon gave
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Do as told until the socket ends, then kill what is left."""
        try:
            while True:
                readable, _, _ = select.select([self._control, self._woken], [], [])
                if self._woken in readable:
                    self._woken.recv(4096)
                    self._reap()
                if self._control in readable:
                    self._obey()
        finally:
            signal.set_wakeup_fd(-1)  # its other end may be gone before the signals of those that are killed come
            for pid in self._children.values():
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for number, pid in [*self._children.items()]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._children[number]
                code = os.waitstatus_to_exitcode(status)
                send(self._control, ENDED, NUMBER.pack(number), struct.pack("<i", code))

    def _obey(self) -> None:
        head, sockets, _, _ = socket.recv_fds(self._control, 1 + NUMBER.size, 1, socket.MSG_WAITALL)
        if len(head) < 1 + NUMBER.size:
            raise EOFError
        number = NUMBER.unpack_from(head, 1)[0]
        if head[:1] == KILL:
            if number in self._children:
                os.kill(self._children[number], signal.SIGKILL)
            return
        text = receive(self._control).decode()
        with socket.socket(fileno=sockets[0]) as own:
            host = os.getpid()
            try:
                pid = os.fork()
            except OSError:
                send(self._control, ENDED, NUMBER.pack(number), struct.pack("<i", -signal.SIGKILL))
                return
            if pid:
                self._children[number] = pid
                return
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (self._control, self._woken, self._wake):
                other.close()
            _run_child(own, text, self._vocabulary, host)


# --- a child -----------------------------------------------------------------------------------------


def _run_child(sock: socket.socket, text: str, vocabulary: Vocabulary, host: int) -> None:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # an abort of the library says nothing that the status does not
        _die_with(host)
        _limit_memory()
        _Child(sock, vocabulary).run(text)
        status = 0
    except (EOFError, OSError):
        status = 0  # the daemon does not want it any more
    except MemoryError:
        status = EXIT_MEMORY
    finally:
        os._exit(status)  # nothing of the host's is to be run down here


class _Child:
    """One form, and the replies that have it."""

    def __init__(self, sock: socket.socket, vocabulary: Vocabulary) -> None:
        self._sock, self._vocabulary = sock, vocabulary
        self._replies: dict[int, tuple[Grammar, int]] = {}  # with how many tokens they have
        self._before_kib = _peak_kib()

    def run(self, text: str) -> None:
        """Compile, then answer; raises EOFError at the end."""
        _allow_seconds(COMPILE_S)
        try:
            form = Compiled.from_text(text, self._vocabulary)
        except RequestError as error:
            self._say(REFUSED, 0, 0, error.message.encode())
            return
        self._say(COMPILED, 0, 0)
        while True:
            message = receive(self._sock)
            kind, number = message[:1], NUMBER.unpack_from(message, 1)[0]
            _allow_seconds(MASK_S if kind != BEGIN else MASK_S + COMPILE_S)
            if kind == CLOSE:
                self._replies.pop(number, None)
            elif kind == BEGIN:
                stop, tokens = json.loads(message[1 + NUMBER.size :])
                self._guarded(number, partial(self._begin, number, form.begin(stop), tokens))
            else:
                self._guarded(number, partial(self._accept, number, NUMBER.unpack_from(message, 1 + NUMBER.size)[0]))

    def _guarded(self, number: int, work: Callable[[], None]) -> None:
        try:
            work()
        except RequestError as error:
            self._replies.pop(number, None)
            self._say(BROKEN, number, 0, error.message.encode())

    def _begin(self, number: int, grammar: Grammar, tokens: list[int]) -> None:
        for token in tokens:
            grammar.accept(token)
        self._replies[number] = grammar, len(tokens)
        self._answer(number)

    def _accept(self, number: int, token: int) -> None:
        if number in self._replies:  # else it has failed, and its error is under way
            grammar, n = self._replies[number]
            grammar.accept(token)
            self._replies[number] = grammar, n + 1
            self._answer(number)

    def _answer(self, number: int) -> None:
        """Say whether anything can follow, at once, and the mask of what it is."""
        grammar, n = self._replies[number]
        self._say(STATE, number, n, bytes([grammar.is_done]))
        if not grammar.is_done:
            mask = grammar.mask()
            self._say(MASK, number, n, bytes([grammar.is_done]), mask.tobytes())

    def _say(self, kind: bytes, number: int, n: int, *parts: bytes) -> None:
        send(self._sock, HEAD.pack(kind, number, n, max(0, _peak_kib() - self._before_kib)), *parts)


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when `parent` has ended, where it can."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if _LINUX:  # elsewhere address space cannot be limited so; there the time that a form has bounds what it takes
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + FORM_BYTES, held + FORM_BYTES))


def _allow_seconds(seconds: int) -> None:
    """Let the kernel end this process after so much more processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, most))


def _peak_kib() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if _LINUX else peak // 1024
