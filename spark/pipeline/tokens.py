r"""Token files: what a model was given and generated in recorded sessions, cut in windows, as Parquet.

Made by `spark tokenize`, read by `spark calibrate` and `spark validate`. One row is one window:

    session_id  string      the session it comes from
    window      int32       number of the window within the session, from 0
    tokens      list<int32> at most `window` tokens, to be read by the model from an empty context
    generated   list<bool>  one for each token: the model itself decoded it

**What is stored.** For each turn of the model (speech/render.py) serving reads the rendering of everything before it
and decodes the answer. A server keeps what it has read, and so does this file: a session is a chain of turns, and of
each turn only what follows the prefix it shares with the turn before it is new. Mostly the new turn extends the last
one: prompt, answer, then the next prompt begins with both. Templates drop older reasoning, though, and where the
rendering of a turn departs from the one before it, even inside an older answer, a new window begins there: with the
rendering's tokens from that point on, as context. So the new tokens of all windows are exactly those that a server
with a perfect prefix cache would have computed, in that order, and each generated token is new once.

**Windows.** New tokens are cut in windows. Where fewer than a quarter of `window` would precede the next generated
token, the window begins earlier, with tokens that precede its first new one in the rendering: nothing is decoded
without a context. These leading tokens are not marked `generated`, whatever they were where they were new.
Therefore: every generated token appears once, and once only, marked `generated`; it has at least a quarter of
`window` before it, or all there is; and a window's tokens are consecutive tokens of one rendering.

Sessions begin alike, with a system prompt and tools that take several windows. Windows that a session begins with as an
earlier one of the file did, and in which nothing was generated, are there once, in the earlier one.

**Metadata** (of the Parquet schema): `spark.format` = `tokens`, `spark.version` = `1`, `spark.model_id`,
`spark.tokenizer` and `spark.template` (64 hex digits each), `spark.window`. A file made for another model, tokenizer
or template is refused. A file appears when it is whole, readable by its owner alone, as session files are.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.formats.gguf import open_model
from engine.ground.errors import FileFormatError, RequestError, SparkError, UsageError, WrongModelError
from engine.ground.files import open_regular, replacing, scratch
from engine.text.tokenizer import Tokenizer, load
from spark import storage
from spark.console import note
from spark.speech.render import Renderer, Tokens, Turn
from spark.speech.sessions import EXTRACT_HINT, Session, read_sessions, short_id

MIN_WINDOW, MAX_WINDOW = 16, 1 << 20  # what the daemon takes in one request
DEFAULT_WINDOW = 4096
_VERSION = "1"
_BATCH_TOKENS = 1 << 20  # of a row group: what is held in memory
_BATCH_ROWS = 64
_HINT = "make token files with `spark tokenize`"
_TWICE = "its routing would count twice; leave out one of the files"
_AGAIN = "its routing would count twice; leave out one of them"

_COLUMNS = pa.schema(
    [
        ("session_id", pa.string()),
        ("window", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("generated", pa.list_(pa.bool_())),
    ]
)


@dataclass(frozen=True, slots=True)
class Window:
    """One row of a token file. tokens: int32 [n], generated: bool [n], of the same length, at least 1."""

    session_id: str
    window: int
    tokens: Tokens
    generated: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a token file was made with: ids of 64 hex digits."""

    model_id: str
    tokenizer: str
    template: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What `tokenize` did.

    tokens: of all windows, repeated context included. generated_tokens, windows, sessions: counts. skipped_turns:
    turns that the chat template refused, counted by what it said.
    """

    tokens: int
    generated_tokens: int
    windows: int
    sessions: int
    skipped_turns: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The summary as `--json` has it."""
        return asdict(self)


def tokenize(
    model: str | Path,
    sessions: str | Path,
    out: str | Path,
    window: int = DEFAULT_WINDOW,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Write the sessions of JSONL files as a token file for a model.

    sessions: a path, a folder, a pattern or a URL of one of them (spark/storage.py); the files hold different sessions.
    out: a path or a URL. window: most tokens a row. progress: called with the sessions done and their number. The file
    appears whole or not at all. Raises ModelFormatError or UnsupportedModelError for the model, FileFormatError for the
    sessions, also where they have no turn of the model or two files hold one session, UsageError for a window below
    MIN_WINDOW, SparkError if the template refuses every turn or the disk the file.
    """
    _check_window(window)
    renderer, origin = renderer_of(model)
    with storage.reading(sessions, (".jsonl",)) as files:
        return _tokenize(renderer, origin, sessions, files, out, window, progress)


def renderer_of(model: str | Path) -> tuple[Renderer, Origin]:
    """What renders conversations for a model, and what token files of it are made with."""
    with open_model(model) as file:
        renderer = Renderer(load(file))
        return renderer, Origin(file.model_id, renderer.tokenizer.hash, renderer.template_hash)


def _tokenize(
    renderer: Renderer, origin: Origin, sessions: str | Path, files: Sequence[storage.Found], out: str | Path,
    window: int, progress: Callable[[int, int], None],
) -> Summary:  # fmt: skip
    total = sum(_count_sessions(file) for file in files)
    if not total:
        raise FileFormatError(f"{sessions} holds no sessions", hint=EXTRACT_HINT)
    totals: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    openings: set[bytes] = set()

    def rows() -> Iterator[Window]:
        progress(0, total)
        for done, session in enumerate(different(files), 1):
            turns = _accepted(renderer.turns(session), skipped, totals)
            for row in unread(windows(session.session_id, turns, window), openings):
                totals.update(tokens=len(row.tokens), generated=int(row.generated.sum()), windows=1)
                yield row
            progress(done, total)

    with storage.writing(out, "token file", mode=0o600) as destination:
        write_windows(destination, rows(), origin, window)
        if skipped and not totals["turns"]:
            raise SparkError(
                f"{sessions}: the model's chat template refuses all {skipped.total()} turns of the model, "
                f"most often: {skipped.most_common(1)[0][0]}"
            )
        if not totals["tokens"]:
            raise FileFormatError(
                f"{sessions}: none of its {total} sessions has an assistant turn, so there is nothing to tokenize",
                hint=EXTRACT_HINT,
            )
    return Summary(totals["tokens"], totals["generated"], totals["windows"], total, dict(skipped))


def windows(session_id: str, turns: Iterable[Turn], window: int) -> Iterator[Window]:
    """The rows of one session, in order; see the head of this file for what they hold."""
    _check_window(window)
    number = 0
    context, mask = np.empty(0, np.int32), np.empty(0, np.bool_)  # the last rendering, and what of it was generated
    new = 0  # context[new:] has not been written yet

    def cut(whole: bool) -> Iterator[Window]:
        """Write full windows; with `whole`, the rest too."""
        nonlocal new, number
        while new < len(context):
            begin = min(new, max(0, new + int(mask[new:].argmax()) - window // 4))  # a turn ends in generated tokens
            end = min(begin + window, len(context))
            if end - begin < window and not whole:
                return
            generated = mask[begin:end].copy()
            generated[: new - begin] = False
            yield Window(session_id, number, context[begin:end], generated)
            new, number = end, number + 1

    for turn in turns:
        rendering = np.concatenate((turn.prompt, turn.generated))
        shared = common_prefix(context, turn.prompt)
        if shared < len(context):
            yield from cut(whole=True)
            new = shared
        context = rendering
        mask = np.concatenate((mask[:shared], np.zeros(len(rendering) - shared, np.bool_)))
        mask[len(turn.prompt) :] = True
        yield from cut(whole=False)
    yield from cut(whole=True)


def unread(rows: Iterable[Window], openings: set[bytes]) -> Iterator[Window]:
    """The windows of a session without those that it begins with as an earlier one did; the others keep their numbers.

    openings: a hash for each such beginning so far.
    """
    opening: bytes | None = b""
    for row in rows:
        if opening is not None:
            opening = None if row.generated.any() else hashlib.sha256(opening + row.tokens.tobytes()).digest()
        if opening is None:
            yield row
        elif opening not in openings:
            openings.add(opening)
            yield row


class TokensFile:
    """A token file: iterate it for its windows, any number of times, in bounded memory.

    origin: what it was made with. window: most tokens a row. n_windows, n_tokens: rows, and tokens in all of them.
    name: what messages call it, the sessions that it was made of for a moment, or its path. digest: SHA-256 of the
    file, 64 hex digits.
    """

    name: str | Path

    def __init__(self, path: Path, origin: Origin, window: int, n_windows: int, n_tokens: int) -> None:
        self.path, self.origin, self.window = path, origin, window
        self.n_windows, self.n_tokens = n_windows, n_tokens
        self.name = path

    @property
    def files(self) -> tuple[TokensFile, ...]:
        """Itself, or those that it is made of."""
        return (self,)

    @property
    def digest(self) -> str:
        """See the class."""
        with _reading(self.name), open_regular(self.path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def session_ids(self) -> set[str]:
        """The sessions whose windows it holds."""
        with (
            _reading(self.name), open_regular(self.path) as opened_file,
            pq.ParquetFile(opened_file, page_checksum_verification=True) as file,
        ):  # fmt: skip
            batches = file.iter_batches(columns=["session_id"])
            found = {value for batch in batches for value in pc.unique(batch.column(0)).to_pylist()}
        return {value and short_id(value) for value in found}

    def names(self) -> Iterator[tuple[str, int]]:
        """Session and number of each window, in order, without reading its tokens."""
        return ((name and short_id(name), number) for name, number in self.names_there())

    def names_there(self) -> Iterator[tuple[str, int]]:
        """`names` with ids as they are in the file: one that is too long for the engine has another name here."""
        with (
            _reading(self.name), open_regular(self.path) as opened_file,
            pq.ParquetFile(opened_file, page_checksum_verification=True) as file,
        ):  # fmt: skip
            for batch in file.iter_batches(columns=["session_id", "window"]):
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def __iter__(self) -> Iterator[Window]:
        with (
            _reading(self.name), open_regular(self.path) as opened_file,
            pq.ParquetFile(opened_file, page_checksum_verification=True) as file,
        ):  # fmt: skip
            for batch in file.iter_batches(max(1, min(_BATCH_ROWS, _BATCH_TOKENS // self.window))):
                for row in range(len(batch)):
                    yield self._window(*(column[row] for column in batch.columns))

    def _window(self, session: pa.Scalar, number: pa.Scalar, tokens: pa.Scalar, generated: pa.Scalar) -> Window:
        # Arrow's own arrays until it is known how long they are: a window in Python objects takes ten times as much.
        found = tokens.values, generated.values
        whole = session.is_valid and number.is_valid and not any(a is None or a.null_count for a in found)
        if not whole or not 0 < len(found[0]) == len(found[1]) <= self.window or pc.min(found[0]).as_py() < 0:
            raise FileFormatError(
                f"{self.name}: window {number.as_py()} of session {session.as_py()!r} is not 1 to {self.window} "
                "tokens with as many marks",
                hint=_HINT,
            )
        ids, marks = (a.to_numpy(zero_copy_only=False) for a in found)
        return Window(short_id(session.as_py()), number.as_py(), ids.astype(np.int32), marks.astype(np.bool_))


class JoinedTokens(TokensFile):
    """Token files of one model, tokenizer and template, and of different sessions, as one: the windows of each in turn.

    Raises WrongModelError and FileFormatError, naming two of them, where they are not. digest: of the files' digests.
    """

    def __init__(self, files: Sequence[TokensFile], name: str | Path) -> None:
        first, window = files[0], max(file.window for file in files)
        super().__init__(first.path, first.origin, window, *(sum(n) for n in zip(*map(_sizes, files), strict=True)))
        self.name = name
        self._files = tuple(files)
        seen: dict[str, TokensFile] = {}
        for file in files:
            if file.origin != first.origin:
                raise WrongModelError(
                    f"{file.name} was made with {file.origin}, {first.name} with {first.origin}",
                    hint="expected token files of one model; tokenize the sessions again with it",
                )
            ids = file.session_ids()
            if both := sorted(ids & seen.keys()):
                raise FileFormatError(f"{file.name}: session {both[0]!r} is also in {seen[both[0]].name}", hint=_TWICE)
            seen |= dict.fromkeys(ids, file)

    @property
    def files(self) -> tuple[TokensFile, ...]:
        """See TokensFile."""
        return self._files

    @property
    def digest(self) -> str:
        """See the class."""
        return hashlib.sha256("".join(file.digest for file in self._files).encode()).hexdigest()

    def session_ids(self) -> set[str]:
        """The sessions whose windows they hold."""
        return set().union(*(file.session_ids() for file in self._files))

    def names_there(self) -> Iterator[tuple[str, int]]:
        """See TokensFile."""
        return chain.from_iterable(file.names_there() for file in self._files)

    def __iter__(self) -> Iterator[Window]:
        return chain.from_iterable(self._files)


def _sizes(file: TokensFile) -> tuple[int, int]:
    return file.n_windows, file.n_tokens


def read_tokens(path: str | Path, expected: Origin | None = None, *, name: str | Path = "") -> TokensFile:
    """Open a token file.

    name: what messages call it; default: its path. expected: what it must have been made with; WrongModelError, showing
    both ids, if it was not. Raises FileFormatError for a file that is not a token file of this version; damage inside
    it shows when it is iterated.
    """
    path = Path(path)
    name = name or path
    with _reading(name), open_regular(path) as opened_file, pq.ParquetFile(opened_file) as file:
        schema, rows = file.schema_arrow, file.metadata
        groups = [rows.row_group(i) for i in range(rows.num_row_groups)]
        found = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    if found.get("spark.format") != "tokens" or not schema.remove_metadata().equals(_COLUMNS):
        raise FileFormatError(f"{name} is a Parquet file, but not one of tokens", hint=_HINT)
    if found.get("spark.version") != _VERSION:
        raise FileFormatError(
            f"{name} is of version {found.get('spark.version')!r} of the format, expected {_VERSION!r}", hint=_HINT
        )
    try:
        origin = Origin(found["spark.model_id"], found["spark.tokenizer"], found["spark.template"])
        window = int(found["spark.window"])
        if not 0 < window <= MAX_WINDOW:
            raise ValueError(f"windows of {window} tokens")
    except (KeyError, ValueError) as error:
        raise FileFormatError(f"{name}: metadata are missing or malformed: {error}", hint=_HINT) from error
    if expected is not None:
        for field_name in ("model_id", "tokenizer", "template"):
            ours, theirs = getattr(expected, field_name), getattr(origin, field_name)
            if ours != theirs:
                raise WrongModelError(
                    f"{name} was made for another model: its {field_name} is {theirs}, this model's is {ours}",
                    hint="tokenize the sessions again with this model",
                )
    in_groups = [_group_tokens(group, window, name) for group in groups]  # before any of them is in memory
    made = TokensFile(path, origin, window, rows.num_rows, sum(in_groups))
    made.name = name
    return made


def _group_tokens(group: pq.RowGroupMetaData, window: int, name: str | Path) -> int:
    """How many tokens a row group holds: no more than `write_windows` would put there, and as many marks."""
    tokens, marks = (int(group.column(_COLUMNS.get_field_index(n)).num_values) for n in ("tokens", "generated"))
    if tokens != marks:
        raise FileFormatError(f"{name}: expected as many marks as tokens, found {marks} and {tokens}", hint=_HINT)
    if tokens > group.num_rows * window:
        raise FileFormatError(
            f"{name}: expected windows of at most {window} tokens, found {tokens} tokens in {group.num_rows}",
            hint=_HINT,
        )
    most = _BATCH_TOKENS - 1 + window  # the window that fills a group may be a whole one
    if tokens > most:
        raise FileFormatError(
            f"{name}: expected row groups of at most {most} tokens, found {tokens} in one", hint=_HINT
        )
    return tokens


@contextlib.contextmanager
def opened(model: Path, given: storage.Given, progress: Callable[[str, int, int], None]) -> Iterator[TokensFile]:
    """Open token files as one, or what sessions (JSONL) are tokenized to, for as long as the context lasts.

    given: paths, folders, patterns or URLs of them (spark/storage.py). progress: of tokenizing. Raises what
    `storage.reading`, `tokenize`, `read_tokens` and JoinedTokens do, WrongModelError for token files of another model,
    FileFormatError for those without tokens.
    """
    with contextlib.ExitStack() as stack:
        found, name = stack.enter_context(storage.reading(given, (".parquet", ".jsonl"))), storage.named(given)
        if found[0].path.suffix == ".jsonl":
            path = stack.enter_context(scratch()) / "tokens.parquet"
            renderer, origin = renderer_of(model)
            _tokenize(renderer, origin, name, found, path, DEFAULT_WINDOW, lambda a, b: progress("tokenizing", a, b))
            found = [storage.Found(name, path)]
        files = [read_tokens(each.path, name=each.name) for each in found]
        file = files[0] if len(files) == 1 else JoinedTokens(files, name)
        with open_model(model) as opened_model:
            made_for, expected = file.origin.model_id, opened_model.model_id
        if made_for != expected:
            raise WrongModelError(
                f"{name} was made for model {made_for}, this is model {expected}",
                hint="tokenize the sessions again with this model",
            )
        if not file.n_tokens:
            raise FileFormatError(f"{name} holds no tokens", hint=_HINT)
        look_over(file)
        yield file


def look_over(file: TokensFile) -> None:
    """Raise FileFormatError where a file has a window twice, in whatever order they are; note ids that are too long."""
    runs: dict[str, tuple[int, int]] = {}  # a first window, and one behind the last that follows without a gap
    beyond: set[tuple[str, int]] = set()
    for session_id, number in file.names_there():
        if session_id is None or number is None:
            continue  # damage, which is named where it is read
        first, end = runs.get(session_id, (number, number))
        if first <= number < end or (session_id, number) in beyond:
            message = f"{file.name}: window {number} of session {short_id(session_id)!r} is there twice"
            raise FileFormatError(message, hint=_AGAIN)
        if number == end:
            runs[session_id] = first, end + 1
        else:
            beyond.add((session_id, number))
    if long := sorted(session_id for session_id in runs if short_id(session_id) != session_id):
        others = f" (and {len(long) - 1:,} more)" if len(long) > 1 else ""
        note(
            f"{file.name}: session {long[0][:40]!r}... has an id of {len(long[0]):,} characters, more than the engine "
            f"takes: it is counted under a shorter one{others}"
        )


def export_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    """Write a tokenizer as the `tokenizers` library's `tokenizer.json`; SparkError if the disk does not take it."""
    with replacing(Path(path), "tokenizer") as file:
        file.write(tokenizer.to_json().encode())


def write_windows(file: IO[bytes], rows: Iterable[Window], origin: Origin, window: int) -> None:
    """Write a Parquet file, a row group at a time."""
    metadata = {
        "spark.format": "tokens",
        "spark.version": _VERSION,
        "spark.model_id": origin.model_id,
        "spark.tokenizer": origin.tokenizer,
        "spark.template": origin.template,
        "spark.window": str(window),
    }
    schema = _COLUMNS.with_metadata(metadata)
    with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as parquet:
        held: list[Window] = []
        held_tokens = 0
        for row in rows:
            held.append(row)
            held_tokens += len(row.tokens)
            if held_tokens >= _BATCH_TOKENS:
                parquet.write_batch(_batch(held, schema))
                held, held_tokens = [], 0
        if held:
            parquet.write_batch(_batch(held, schema))


def _batch(rows: list[Window], schema: pa.Schema) -> pa.RecordBatch:
    columns = [[getattr(row, name) for row in rows] for name in schema.names]
    arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
    return pa.record_batch(arrays, schema=schema)


@contextlib.contextmanager
def _reading(name: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise FileFormatError(f"{name} cannot be read as a token file: {reason}", hint=_HINT) from error


def _accepted(turns: Iterable[Turn | RequestError], skipped: Counter[str], totals: Counter[str]) -> Iterator[Turn]:
    for turn in turns:
        if isinstance(turn, RequestError):
            skipped[turn.message] += 1
        else:
            totals["turns"] += 1
            yield turn


def _check_window(window: int) -> None:
    if not MIN_WINDOW <= window <= MAX_WINDOW:
        raise UsageError(f"a window of {window} tokens, expected {MIN_WINDOW} to {MAX_WINDOW}")


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many tokens two renderings have in common from the first on."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _count_sessions(found: storage.Found) -> int:
    try:
        with open_regular(found.path) as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise FileFormatError(f"{found.name} cannot be read: {error.strerror}") from error


def different(files: Sequence[storage.Found]) -> Iterator[Session]:
    """The sessions of each file in turn; FileFormatError where one is in two of them, or twice in one."""
    seen: dict[str, storage.Found] = {}
    for file in files:
        for session in read_sessions(file.path, file.name):
            if (other := seen.get(session.session_id)) is not None:
                where = "there twice" if other is file else f"also in {other.name}"
                message = f"{file.name}: session {session.session_id!r} is {where}"
                raise FileFormatError(message, hint=_AGAIN if other is file else _TWICE)
            seen[session.session_id] = file
            yield session
