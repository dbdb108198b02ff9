"""The trace: which experts each token was routed to and, if asked for, the residual that it was routed by.

A folder of small Parquet files (docs/formats.md). A part is written under a temporary name, renamed when it is
complete, and holds whole tokens: a killed run leaves whole parts of whole tokens. A row is one token in one MoE
layer; the rows of a token follow each other in the order of the layers.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.ground.errors import FileFormatError, SparkError, WrongModelError
from engine.ground.files import open_regular, replacing

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

VERSION = 1
PART_ROWS = 65_536
PART_BYTES = 64 << 20

_PART_NAME = re.compile(r"part-\d{6,}\.parquet")
_METADATA = b"spark.trace"
_HALF_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class TraceModel:
    """What every part of a folder says about the model.

    layers: indices of the MoE layers among the model's n_layer; hidden: whether residuals were traced.
    """

    model_id: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    n_embd: int
    layers: tuple[int, ...]
    hidden: bool
    version: int = VERSION


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """The routing of T tokens in L MoE layers.

    experts: uint16 [T, L, A], the A of a token and layer distinct. layers: their indices in the model, [L].
    generated: bool [T]. session: int32 [T], into session_ids. position: int32 [T]. n_expert: E.
    unfinished: temporary files that a killed run left, which were not read.
    """

    experts: npt.NDArray[np.uint16]
    layers: tuple[int, ...]
    generated: npt.NDArray[np.bool_]
    session: npt.NDArray[np.int32]
    session_ids: tuple[str, ...]
    position: npt.NDArray[np.int32]
    model_id: str
    n_expert: int
    unfinished: int = 0

    def part(self, begin: int, end: int) -> RoutingTrace:
        """The tokens begin .. end-1 of the trace."""
        return replace(
            self,
            experts=self.experts[begin:end],
            generated=self.generated[begin:end],
            session=self.session[begin:end],
            position=self.position[begin:end],
        )

    def in_order(self, order: Mapping[tuple[str, int], int], ctx_tokens: int) -> RoutingTrace:
        """The same, a cluster's, say, as one machine records it, which all that is chosen depends on.

        order: places of windows in their file, by session and number. A window's number is in the positions of its
        tokens, multiples of ctx_tokens + 1, and these come in order.
        """
        windows = np.stack([self.session, self.position // (ctx_tokens + 1)])
        pairs, index = np.unique(windows, axis=1, return_inverse=True)
        places = np.array([order[self.session_ids[session], window] for session, window in pairs.T.tolist()])
        by_file = np.argsort(places[index.ravel()], kind="stable")
        ordered = replace(
            self,
            experts=self.experts[by_file],
            generated=self.generated[by_file],
            position=self.position[by_file],
            session=self.session[by_file],
        )
        return ordered.named()

    def named(self) -> RoutingTrace:
        """The same, of the sessions that have tokens alone, numbered in the order in which their tokens come."""
        first = dict.fromkeys(self.session.tolist())
        number = np.zeros(len(self.session_ids), np.int32)
        number[list(first)] = np.arange(len(first))
        return replace(self, session=number[self.session], session_ids=tuple(self.session_ids[i] for i in first))

    def counts(self) -> npt.NDArray[np.int64]:
        """Each expert's uses by generated tokens, by all tokens if none is generated: int64 [L, E]."""
        experts = self.experts[self.generated] if self.generated.any() else self.experts
        rows = [np.bincount(experts[:, i].ravel(), minlength=self.n_expert) for i in range(len(self.layers))]
        return np.array(rows, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class TracePart:
    """T tokens, one part's, with the columns that were asked for.

    values: `experts` uint16 and `weights` float16 [T, L, A], `hidden` float16 [T, L, D], the residual entering
    the layer. The rest is as in RoutingTrace; session_ids are the part's own.
    """

    path: Path
    model: TraceModel
    generated: npt.NDArray[np.bool_]
    session: npt.NDArray[np.int32]
    session_ids: tuple[str, ...]
    position: npt.NDArray[np.int32]
    values: dict[str, npt.NDArray[Any]]


def estimate_bytes(tokens: int, layers: int, n_expert_used: int, n_embd: int, hidden: bool) -> int:
    """About what a trace takes on disk, at most; `layers` are MoE layers."""
    return tokens * layers * _row_bytes(n_expert_used, n_embd, hidden)


def part_paths(directory: Path) -> list[Path]:
    """The parts of a trace in order; FileFormatError if there is a gap in their numbers."""
    found = [path for path in directory.glob("part-*") if _PART_NAME.fullmatch(path.name)]
    found.sort(key=lambda path: (len(path.name), path.name))
    for number, path in enumerate(found):
        if path.name != part_name(number):
            raise FileFormatError(f"{directory}: expected {part_name(number)}, found {path.name} next")
    return found


def n_parts(directory: Path, known: int = 0) -> int:
    """How many parts a trace has, of which so many are known: one look at each that came since."""
    while (directory / part_name(known)).exists():
        known += 1
    return known


class TraceWriter:
    """Adds tokens to a trace folder; a context manager.

    Tokens wait in memory until they fill a part, `flush` is called or the context ends; if it ends by an
    exception they are dropped. A folder that has parts already is continued if they are of the same model
    (else WrongModelError). A write that fails raises SparkError and leaves the other parts whole.
    """

    def __init__(
        self,
        directory: Path,
        model_id: str,
        n_expert_used: int,
        n_embd: int,
        hidden: bool,
        *,
        n_layer: int,
        n_expert: int,
    ) -> None:
        self._directory = directory
        self._model = TraceModel(model_id, n_layer, n_expert, n_expert_used, n_embd, (), hidden)
        self._waiting: list[_Tokens] = []
        self._n_waiting = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SparkError(f"cannot make the trace folder {directory}: {error.strerror}") from error
        parts = part_paths(directory)
        self._next = len(parts)
        if parts:
            with _opened(parts[-1], model_id) as (_, written):
                pass
            if replace(written, layers=()) != self._model:
                raise FileFormatError(
                    f"{directory} has a trace of another kind: expected {self._model}, found {written}",
                    hint="name another folder",
                )
            self._model = written

    def append(
        self,
        session_id: str,
        positions: npt.NDArray[np.integer],
        generated: npt.NDArray[np.bool_],
        layer_indices: Sequence[int],
        experts: npt.NDArray[np.integer],
        weights: npt.NDArray[np.floating],
        hidden: npt.NDArray[np.floating] | None = None,
    ) -> None:
        """Add T tokens of one session; the arrays are copied.

        positions, generated: [T]. layer_indices: the model's MoE layers, the same L in every call. experts,
        weights: [T, L, A]. hidden: [T, L, D] if the trace has residuals; clipped to the range of float16.
        """
        layers = tuple(int(layer) for layer in layer_indices)
        self._model = model = replace(self._model, layers=self._model.layers or layers)
        shape = (len(positions), len(layers))
        assert layers == model.layers
        assert experts.shape == weights.shape == (*shape, model.n_expert_used)
        assert (hidden is not None) == model.hidden
        assert hidden is None or hidden.shape == (*shape, model.n_embd)
        row_bytes = _row_bytes(model.n_expert_used, model.n_embd, model.hidden)
        part_tokens = max(1, min(PART_ROWS, PART_BYTES // row_bytes) // len(layers))
        begin = 0
        while begin < shape[0]:
            end = min(shape[0], begin + part_tokens - self._n_waiting)
            part = slice(begin, end)
            values: dict[str, npt.NDArray[Any]] = {
                "experts": experts[part].astype(np.uint16),
                "weights": weights[part].astype(np.float16),
            }
            if hidden is not None:
                values["hidden"] = np.clip(hidden[part], -_HALF_MAX, _HALF_MAX).astype(np.float16)
            position, is_generated = positions[part].astype(np.int32), generated[part].astype(np.bool_)
            self._waiting.append(_Tokens(session_id, position, is_generated, values))
            self._n_waiting += end - begin
            begin = end
            if self._n_waiting == part_tokens:
                self.flush()

    def flush(self) -> int:
        """Write the tokens that wait, if any, as a part; returns the number of parts in the folder."""
        if self._waiting:
            tokens, self._waiting, self._n_waiting = self._waiting, [], 0
            _write(_table(tokens, self._model), self._directory / part_name(self._next))
            self._next += 1
        return self._next

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.flush()


def read_routing(directory: Path, model_id: str, sessions: Container[str] | None = None) -> RoutingTrace:
    """Read the routing of a whole trace, or of some sessions of it: of no tokens, if it has none of theirs.

    Of parts that have none of the sessions that are asked for, names are read and no more. Raises WrongModelError if it
    is of another model; FileFormatError, naming the part, if there is none, one is missing, truncated or garbled, or a
    token lacks a layer.
    """
    found = iter_parts(directory, model_id, ("experts",), sessions)
    parts = [_of_sessions(part, sessions) for part in found]
    numbers: dict[str, int] = {}
    session = []
    for part in parts:
        in_part = [numbers.setdefault(name, len(numbers)) for name in part.session_ids]
        session.append(np.array(in_part, np.int32)[part.session])
    return RoutingTrace(
        experts=np.concatenate([part.values["experts"] for part in parts]),
        layers=parts[0].model.layers,
        generated=np.concatenate([part.generated for part in parts]),
        session=np.concatenate(session),
        session_ids=tuple(numbers),
        position=np.concatenate([part.position for part in parts]),
        model_id=model_id,
        n_expert=parts[0].model.n_expert,
        unfinished=len(list(directory.glob("part-*.tmp"))),
    )


def _of_sessions(part: TracePart, sessions: Container[str] | None) -> TracePart:
    """The tokens of a part that are of some sessions."""
    if sessions is None or all(name in sessions for name in part.session_ids):
        return part
    wanted = np.array([name in sessions for name in part.session_ids])[part.session]
    return replace(
        part,
        generated=part.generated[wanted],
        session=part.session[wanted],
        position=part.position[wanted],
        values={name: value[wanted] for name, value in part.values.items()},
    )


def iter_parts(
    directory: Path, model_id: str, columns: Collection[str], sessions: Container[str] | None = None
) -> Iterator[TracePart]:
    """Read a trace part by part, with those of the columns experts, weights and hidden that are asked for.

    sessions: parts that have none of theirs are left out, but for the first. Every part is checked as it is read.
    Raises as `read_routing` does, and FileFormatError if hidden states are
    asked for that were not traced.
    """
    paths = part_paths(directory)
    if not paths:
        hint = "`spark calibrate --trace` writes one"
        raise FileFormatError(f"{directory}: expected the parts of a trace, found none", hint=hint)
    expected: TraceModel | None = None
    for number, path in enumerate(paths):
        with _opened(path, model_id) as (file, model):
            expected = expected or model
            if model != expected:
                raise FileFormatError(f"{path}: expected {expected} as in the first part, found {model}")
            if "hidden" in columns and not model.hidden:
                hint = "`spark calibrate --trace DIR --hidden` records them"
                raise FileFormatError(f"{path}: expected hidden states, found none", hint=hint)
            if number and sessions is not None and not any(name in sessions for name in _sessions_of(path, file)):
                continue
            part = _read(path, file, model, columns)
        yield part


def without_hidden(path: Path, model_id: str) -> bytes:
    """What a part would be that was traced without hidden states; raises as `read_routing` does."""
    import pyarrow as pa

    with _opened(path, model_id) as (file, model):
        schema = _schema(replace(model, hidden=False))
        try:
            columns = file.read(schema.names).columns
        except (pa.ArrowException, OSError) as error:
            raise _broken(path, f"a damaged file ({error})") from error
    made = io.BytesIO()
    _write_table(pa.table(columns, schema=schema), made)
    return made.getvalue()


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """Tokens of one session on their way to a part; values as in TracePart."""

    session_id: str
    position: npt.NDArray[np.int32]
    generated: npt.NDArray[np.bool_]
    values: dict[str, npt.NDArray[Any]]


def _row_bytes(n_expert_used: int, n_embd: int, hidden: bool) -> int:
    """Bytes of a row: ids and weights of its experts, the residual, and 12 at most for all else."""
    return 12 + 4 * n_expert_used + (2 * n_embd if hidden else 0)


def part_name(number: int) -> str:
    """The name of a part, from 0 on; of more than a million they grow longer."""
    return f"part-{number:06d}.parquet"


def _schema(model: TraceModel) -> pa.Schema:
    """Columns and types of a part, with the model in the metadata."""
    import pyarrow as pa

    def vector(kind: pa.DataType, width: int) -> pa.DataType:
        return pa.list_(pa.field("element", kind, nullable=False), width)

    types = {
        "session_id": pa.dictionary(pa.int32(), pa.string()),  # plain strings in the file
        "position": pa.int32(),
        "generated": pa.bool_(),
        "layer": pa.int16(),
        "experts": vector(pa.uint16(), model.n_expert_used),
        "weights": vector(pa.float16(), model.n_expert_used),
    }
    if model.hidden:
        types["hidden"] = vector(pa.float16(), model.n_embd)
    fields = [pa.field(name, kind, nullable=False) for name, kind in types.items()]
    return pa.schema(fields, metadata={_METADATA: json.dumps(asdict(model))})


def _table(tokens: Sequence[_Tokens], model: TraceModel) -> pa.Table:
    """The rows of a part."""
    import pyarrow as pa

    schema, n_layer = _schema(model), len(model.layers)
    names = list(dict.fromkeys(t.session_id for t in tokens))
    n_tokens = [len(t.position) for t in tokens]
    session = np.repeat(np.array([names.index(t.session_id) for t in tokens], np.int32), n_tokens)
    columns = [
        pa.DictionaryArray.from_arrays(pa.array(np.repeat(session, n_layer)), pa.array(names, pa.string())),
        pa.array(np.repeat(np.concatenate([t.position for t in tokens]), n_layer)),
        pa.array(np.repeat(np.concatenate([t.generated for t in tokens]), n_layer)),
        pa.array(np.tile(np.array(model.layers, np.int16), sum(n_tokens))),
    ]
    for name in schema.names[len(columns) :]:
        values = np.concatenate([t.values[name] for t in tokens])
        vector = schema.field(name).type
        columns.append(pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), type=vector))
    return pa.table(columns, schema=schema)


def _write(table: pa.Table, path: Path) -> None:
    """Write a part atomically."""
    with replacing(path, "the trace", mode=0o600, hint="the parts before it are whole") as file:
        _write_table(table, file)


def _write_table(table: pa.Table, file: IO[bytes]) -> None:
    import pyarrow.parquet as pq

    pq.write_table(
        table,
        file,
        # Dictionaries pack what repeats into a few bits; half floats hardly compress by any means,
        # and their statistics would take most of the time.
        use_dictionary=["session_id", "position", "layer", "experts.list.element"],
        compression="none",
        write_statistics=False,
        write_page_checksum=True,
    )


def _broken(path: Path, found: object) -> FileFormatError:
    hint = "delete the part and those after it, and trace again"
    return FileFormatError(f"{path}: expected a whole part of a trace, found {found}", hint=hint)


@contextlib.contextmanager
def _opened(path: Path, model_id: str) -> Iterator[tuple[pq.ParquetFile, TraceModel]]:
    """A part, and what it says about its model."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as stack:
        try:
            with open_regular(path):
                pass
            # Arrow's threads may let go of what they have read when the interpreter ends: of a file of Python's that
            # ends the process with SIGABRT.
            file = pq.ParquetFile(stack.enter_context(pa.OSFile(os.fsencode(path))), page_checksum_verification=True)
            model = _described(path, file.schema_arrow)
            matches = file.schema_arrow.equals(_schema(model))
        except OSError as error:
            raise _broken(path, f"a damaged file ({error.strerror or error})") from error
        except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
            raise _broken(path, f"a damaged file ({error})") from error
        if model.model_id != model_id:
            raise WrongModelError(
                f"{path} is of model {model.model_id}, this is model {model_id}", hint="name this model's trace"
            )
        if not matches or not model.layers:
            raise _broken(path, f"other columns: {file.schema_arrow.names}")
        yield file, model


def _described(path: Path, schema: pa.Schema) -> TraceModel:
    """What the metadata of a part say; ValueError, KeyError or TypeError where they are none."""
    metadata = (schema.metadata or {}).get(_METADATA)
    if metadata is None:
        raise _broken(path, "another kind of Parquet file")
    fields = json.loads(metadata)
    if fields["version"] != VERSION:
        raise FileFormatError(f"{path}: expected trace version {VERSION}, found {fields['version']!r}")
    model = TraceModel(**fields | {"layers": tuple(fields["layers"])})
    sizes = (model.n_layer, model.n_expert, model.n_expert_used, model.n_embd, *model.layers)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"impossible sizes {sizes}")
    return model


def _sessions_of(path: Path, file: pq.ParquetFile) -> list[str]:
    """The sessions of a part, without reading what they were routed to."""
    import pyarrow as pa

    try:
        found = file.read(["session_id"]).column("session_id").combine_chunks()
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, f"a damaged file ({error})") from error
    names: list[str] = found.dictionary.to_pylist()
    return names


def _read(path: Path, file: pq.ParquetFile, model: TraceModel, columns: Collection[str]) -> TracePart:
    """Read a part, and check that its tokens have all their layers, and possible experts."""
    import pyarrow as pa

    n_layer = len(model.layers)
    try:
        table = file.read(["session_id", "position", "generated", "layer", *columns])
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, f"a damaged file ({error})") from error
    n_token, rest = divmod(table.num_rows, n_layer)
    if rest:
        raise _broken(path, f"{table.num_rows} rows, no multiple of its {n_layer} layers")

    def column(name: str) -> pa.Array:
        return table.column(name).combine_chunks()

    session = column("session_id")
    arrays = {"session": session.indices} | {name: column(name) for name in ("position", "generated", "layer")}
    rows = {name: array.to_numpy(zero_copy_only=False).reshape(n_token, n_layer) for name, array in arrays.items()}
    same = all((rows[name] == rows[name][:, :1]).all() for name in ("session", "position", "generated"))
    if not same or (rows["layer"] != np.array(model.layers)).any():
        raise _broken(path, "a token without all of its layers")
    values = {}
    for name in columns:
        vectors = column(name)
        shape = (n_token, n_layer, vectors.type.list_size)
        values[name] = vectors.values.to_numpy(zero_copy_only=False).reshape(shape)
    if "experts" in values and n_token:
        ordered = np.sort(values["experts"], axis=2)
        if ordered[..., -1].max() >= model.n_expert or (ordered[..., 1:] == ordered[..., :-1]).any():
            raise _broken(path, f"an expert of {model.n_expert} or more, or twice in a token")
    return TracePart(
        path=path,
        model=model,
        generated=rows["generated"][:, 0],
        session=rows["session"][:, 0],
        session_ids=tuple(session.dictionary.to_pylist()),
        position=rows["position"][:, 0],
        values=values,
    )
