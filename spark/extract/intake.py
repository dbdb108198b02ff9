"""What both log families share on the way in: lines that may be broken, text that may hold secrets.

Logs are read line by line. A line that cannot be used is counted under a reason and passed over.
The text that is kept is parked in a spool, in memory up to a limit and on disk beyond it, so that a
session can be put in order by small records while its text stays out of memory.
"""

from __future__ import annotations

import codecs
import io
import json
import marshal
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from spark.extract.dropped import Dropped
from spark.extract.redact import redact, redact_value
from spark.speech.sessions import Role

MAX_LINE_BYTES = 32 << 20
KNOWN_CHARACTERS = 1 << 20  # of texts whose redaction is kept: logs say most things twice, one after the other
SPOOL_MEMORY_BYTES = 32 << 20


def _finite(number: str) -> float | None:
    return value if isfinite(value := float(number)) else None


# NaN and infinities are not JSON; a number may be too large for a float.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite)
_JSON_SPACE = " \t\n\r"
_KNOWN_EXTRA = 200  # characters that a text's place there counts for, beside its own
_STEP_BYTES = 64 << 10  # of progress
_NO_TEXT = "\ufeff\0" + _JSON_SPACE
# How files in UTF-16 begin, as tools of Windows write them: with a mark, or with a record.
_UTF_16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be", b'{\0"\0': "utf-16-le", b'\0{\0"': "utf-16-be"}
_ZSTD = b"\x28\xb5\x2f\xfd"  # how files begin that Codex has compressed
COMPRESSED = ".zst"  # what it adds to their names
_RECORD = re.compile(r'\{"(?:type|parentUuid|timestamp)" ?:')  # how records begin
_MENDED = 1 << 20  # characters of a line in which records are looked for behind half a one
_MOST_STARTS = 64  # that are tried
_to_json = json.JSONEncoder(ensure_ascii=False).encode
_PLACE_BYTES = 96  # beside the data of a place, in memory
_SPOOLED = 2  # marshal's version without references, whose bytes depend on the values alone


@dataclass(slots=True)
class Intake:
    """What one run counts while it reads.

    advance: called with the number of bytes read, to show progress.
    spool_dir: where sessions that exceed the spool's memory go while they are read.
    sizes: how much of a file is read, of those that others read, too, and that may grow meanwhile.
    """

    redact: bool
    advance: Callable[[int], None]
    spool_dir: Path
    skipped: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    kinds: Dropped = field(default_factory=Dropped)
    sizes: Mapping[Path, int] = field(default_factory=dict)
    _known: dict[str, tuple[str, Counter[str]]] = field(default_factory=dict)  # texts that were redacted
    _known_size: int = 0

    def quiet(self) -> Intake:
        """An intake of the same settings whose counts are its own."""
        return Intake(self.redact, lambda _: None, self.spool_dir, sizes=self.sizes)

    def skip(self, reason: str, lines: int = 1) -> None:
        """Count lines that gave nothing to a session."""
        if lines:
            self.skipped[reason] += lines

    def pass_over(self, reason: str, kind: str, value: object) -> None:
        """Count a line of which nothing is in a session, under a reason and by kind with the text in it."""
        self.skip(reason)
        self.kinds.add(kind, value)

    def drop(self, reason: str, kind: str = "", value: object = None) -> None:
        """Count a block, inside a line, that gave nothing to a session; with a kind also the text in it."""
        self.dropped[reason] += 1
        if kind:
            self.kinds.add(kind, value)

    def text(self, value: object) -> str:
        """A string from a log without its secrets; anything else gives the empty string."""
        if not isinstance(value, str):
            return ""
        if not self.redact:
            return value
        known = self._known.get(value)
        if known is None:
            found = Counter[str]()
            known = redact(value, found), found
            self._known_size += len(value) + _KNOWN_EXTRA
            if self._known_size > KNOWN_CHARACTERS:
                self._known.clear()
                self._known_size = len(value) + _KNOWN_EXTRA
            self._known[value] = known
        if known[1]:
            self.redacted.update(known[1])
        return known[0]

    def value(self, value: Any) -> Any:
        """A JSON value from a log without its secrets."""
        return redact_value(value, self.redacted) if self.redact else value


def read_records(path: Path, intake: Intake) -> Iterator[dict[str, Any]]:
    """The JSON objects of a log, in file order; what is no object is counted by reason."""
    for line in read_lines(path, intake):
        yield from records_of(line, intake)


def records_of(line: bytes, intake: Intake) -> list[dict[str, Any]]:
    """The JSON objects of a line, as a rule one; what is none is counted by reason.

    A program that was killed, or whose disk was full, leaves half a record without a line end, and a power cut zeros;
    what is written next is whole, in the same line.
    """
    text = line.decode("utf-8", "replace").strip(_NO_TEXT)
    if not text:
        return []
    try:
        found = [parse_json(text)]
    except ValueError:
        found, is_left = _at_the_end(text)
        intake.skip("invalid_json", is_left)
    records = [record for record in found if isinstance(record, dict)]
    intake.skip("not_an_object", len(found) - len(records))
    return records


def _at_the_end(text: str) -> tuple[list[Any], bool]:
    """The records at the end of a line that is none, and whether there is anything before them."""
    found: list[Any] = []
    starts = [match.start() for match in _RECORD.finditer(text)] if len(text) <= _MENDED else []
    for at in starts[: -_MOST_STARTS - 1 : -1]:
        before = text[:at].rstrip(_NO_TEXT)
        try:
            record = parse_json(text[at:])
        except ValueError:
            continue
        if before.endswith(("[", ",", ":")) and not _is_of_a_log(record):  # as a block inside a record
            continue
        found.insert(0, record)
        text = before
    return found, bool(text)


def _is_of_a_log(record: object) -> bool:
    """Whether a record has what no block inside one has: Claude Code's sessions, Codex's envelopes."""
    fields = as_object(record)
    enveloped = "timestamp" in fields and isinstance(fields.get("payload"), dict)
    return enveloped or isinstance(fields.get("sessionId"), str)


def parse_json(text: str) -> Any:
    """The JSON value of a text, with strings that can be encoded again; raises ValueError."""
    text = text.strip(_JSON_SPACE)
    try:
        value, end = _DECODER.raw_decode(text)
        if end != len(text):
            raise ValueError(f"a second value at {end}")
        return _mend_surrogates(value) if "\\u" in text and ("\\ud" in text or "\\uD" in text) else value
    except RecursionError as error:  # from brackets nested without end
        raise ValueError("nested too deeply") from error


def read_lines(path: Path, intake: Intake) -> Iterator[bytes]:
    """The lines of a file, in UTF-8, that are not empty and not longer than MAX_LINE_BYTES.

    It may be compressed (zstd). Where it is gone, Codex has just compressed it, or unpacked it to go on.
    """
    done, left, advance = 0, intake.sizes.get(path, sys.maxsize), intake.advance
    try:
        with _open(path) as raw:
            file: io.BufferedReader = raw
            if raw.peek(4)[:4] == _ZSTD:
                if path.name.endswith(COMPRESSED):
                    left = sys.maxsize  # it does not grow, and its size is another
                file, advance = io.BufferedReader(_Unpacked(raw, intake.advance), _STEP_BYTES), _nothing
            if (encoding := _UTF_16.get(file.peek(4)[:4], _UTF_16.get(file.peek(2)[:2]))) is not None:
                file, left = io.BufferedReader(_Utf8(file, encoding, left)), sys.maxsize
            while line := file.readline(min(left, MAX_LINE_BYTES)):
                left -= len(line)
                done += len(line)
                while len(line) == MAX_LINE_BYTES and line.startswith(b"\0"):  # of a power cut, before what came next
                    line = line.lstrip(b"\0")
                    more = file.readline(min(left, MAX_LINE_BYTES - len(line)))
                    left -= len(more)
                    done += len(more)
                    line += more
                if done >= _STEP_BYTES:
                    advance(done)
                    done = 0
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    while rest := file.readline(min(left, MAX_LINE_BYTES)):
                        left -= len(rest)
                        advance(len(rest))
                        if rest.endswith(b"\n"):
                            break
                    intake.skip("oversized")
                elif not line.isspace():
                    yield line
    except OSError:
        intake.skip("unreadable_file")
    finally:
        advance(done)


def _open(path: Path) -> io.BufferedReader:
    """The file, or the same log in its other form."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        plain = path.name.removesuffix(COMPRESSED)
        return path.with_name(plain if plain != path.name else plain + COMPRESSED).open("rb")


def _nothing(n_bytes: int) -> None:
    """Instead of progress that is told elsewhere."""


class _Unpacked(io.RawIOBase):
    """What a file holds that is compressed; advance: told how much of the file was read."""

    def __init__(self, file: io.BufferedReader, advance: Callable[[int], None]) -> None:
        import pyarrow as pa

        self._file, self._advance, self._at = file, advance, 0
        self._stream = pa.CompressedInputStream(file, "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data: bytes = self._stream.read(len(buffer))
        at = self._file.tell()
        self._advance(at - self._at)
        self._at = at
        buffer[: len(data)] = data
        return len(data)


class _Utf8(io.RawIOBase):
    """A file in UTF-16, as far as it is read, as UTF-8."""

    def __init__(self, file: IO[bytes], encoding: str, size: int) -> None:
        self._file, self._left = file, size
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and (data := self._file.read(min(self._left, _STEP_BYTES))):
            self._left -= len(data)
            self._ready = self._decoder.decode(data).encode()
        n = min(len(buffer), len(self._ready))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n


def _mend_surrogates(value: Any) -> Any:
    """The value with lone halves of surrogate pairs, where a program cut a string, replaced by U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_mend_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_mend_surrogates(key): _mend_surrogates(item) for key, item in value.items()}
    return value


def as_object(value: object) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_text(value: object) -> str:
    """The value if it is a string, else the empty string."""
    return value if isinstance(value, str) else ""


_64_BITS = 2**64 - 1
# Tags that the programs write around what they put in: what the user types may begin with a tag, too.
_TAGS = (
    "environment_context environments user_instructions INSTRUCTIONS permissions\\sinstructions collaboration_mode "
    "turn_aborted user_shell_command user_action subagent_notification skill skills_instructions model_switch "
    "personality_spec ide_context hook_prompt "
    "command-(?:name|message|args|contents) local-command-(?:stdout|stderr|caveat) bash-(?:input|stdout|stderr) "
    "system-reminder system_reminder user-prompt-submit-hook session-start-hook post-tool-use-hook user-memory-input "
    "ide_opened_file ide_selection ide_diagnostics new-diagnostics teammate-message task-notification "
    "background-task-[a-z]+ tick"
)
_INSERTED = re.compile(rf"\s*(?:<(?:{'|'.join(_TAGS.split())})[ >]|# AGENTS\.md|Caveat: |\[Request interrupted)")


def is_inserted(text: str) -> bool:
    """Whether a user message was put in by the program: an environment, a command's output, instructions."""
    return _INSERTED.match(text) is not None


def fingerprint(text: str) -> int:
    """64 bits that stand for a text in this run; two texts of one disk's logs collide with probability 1e-7."""
    return hash(text) & _64_BITS


class Part(NamedTuple):
    """A piece of a message: `text` of a role, `reasoning`, a `call` of a tool, or a call's `result`.

    typed: a text that the user typed, not one that the program put in on the user's behalf.
    """

    kind: Literal["text", "reasoning", "call", "result"]
    text: str = ""
    role: Role = "assistant"
    typed: bool = False
    call_id: str = ""
    name: str = ""
    arguments: dict[str, Any] = {}  # noqa: RUF012 (never changed)


class Spool:
    """Parts of messages, parked until their order is known; use as a context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._memory: dict[int, bytes] = {}
        self._file: IO[bytes] | None = None  # for what is beyond the limit
        self._end = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.clear()
        if self._file is not None:
            self._file.close()

    def put(self, parts: list[Part]) -> tuple[int, int]:
        """Park some parts; returns where they are and a fingerprint of what they say."""
        # Arguments as JSON: marshal takes what is nested more deeply than JSON can be written again.
        rows = [(*part[:-1], _to_json(part.arguments) if part.arguments else "") for part in parts]
        data = marshal.dumps(rows, _SPOOLED)
        at, self._end = self._end, self._end + len(data) + _PLACE_BYTES
        if self._end <= SPOOL_MEMORY_BYTES:
            self._memory[at] = data
        else:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
            self._file.seek(at)  # the file has a hole where the memory is
            self._file.write(len(data).to_bytes(_PLACE_BYTES, "little") + data)
        return at, hash(data) & _64_BITS

    def get(self, at: int) -> list[Part]:
        """The parts that `put` parked there."""
        data = self._memory.get(at)
        if data is None:
            assert self._file is not None
            self._file.seek(at)
            data = self._file.read(int.from_bytes(self._file.read(_PLACE_BYTES), "little"))
        rows: list[list[Any]] = marshal.loads(data)
        return [Part._make((*fields, json.loads(arguments) if arguments else {})) for *fields, arguments in rows]
