"""Trace parts: what is written is read, parts are whole or refused, other models' are refused."""

import errno
import json
import os
import random
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats import trace
from engine.formats.trace import TraceWriter, iter_parts, read_routing
from engine.ground.errors import FileFormatError, SparkError, WrongModelError

ID, OTHER = "ab" * 32, "cd" * 32
LAYERS = (1, 2, 4)  # of 6: the others are dense
N_LAYER, N_EXPERT, A, D = 6, 11, 3, 5


def tokens(rng, n_token, hidden):
    """Routing of n_token tokens as the engine hands it over: positions, generated, experts, weights, hidden."""
    experts = rng.random((n_token, len(LAYERS), N_EXPERT)).argsort(axis=2)[:, :, :A]
    weights = rng.random((n_token, len(LAYERS), A), np.float32)
    residual = rng.normal(size=(n_token, len(LAYERS), D)).astype(np.float32) if hidden else None
    return np.arange(n_token), rng.random(n_token) < 0.5, experts, weights, residual


def open_writer(directory, hidden=False, model_id=ID):
    return TraceWriter(directory, model_id, A, D, hidden, n_layer=N_LAYER, n_expert=N_EXPERT)


def write(directory, sizes, hidden=False, seed=0):
    """Append one run of tokens per size, sessions a, b, a, b ...; returns what was appended, joined."""
    rng = np.random.default_rng(seed)
    runs = []
    with open_writer(directory, hidden) as writer:
        for i, size in enumerate(sizes):
            position, generated, experts, weights, residual = tokens(rng, size, hidden)
            writer.append("ab"[i % 2], position + 7, generated, LAYERS, experts, weights, residual)
            runs.append((position + 7, generated, experts, weights, residual, np.full(size, i % 2)))
    return [None if column[0] is None else np.concatenate(column) for column in zip(*runs, strict=True)]


@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), part_tokens=st.integers(1, 8))
def test_routing_reads_as_written_however_it_falls_into_parts(tmp_path_factory, sizes, part_tokens):
    directory = tmp_path_factory.mktemp("trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "PART_ROWS", part_tokens * len(LAYERS) + 1)
        position, generated, experts, _, _, session = write(directory, sizes)
    parts = trace.part_paths(directory)
    assert len(parts) == -(-sum(sizes) // part_tokens)
    assert sorted(directory.iterdir()) == parts
    if not parts:
        return
    read = read_routing(directory, ID)
    assert read.experts.dtype == np.uint16 and np.array_equal(read.experts, experts)
    assert read.generated.dtype == bool and np.array_equal(read.generated, generated)
    assert read.position.dtype == np.int32 and np.array_equal(read.position, position)
    names = np.array(read.session_ids)[read.session]
    assert read.session.dtype == np.int32 and np.array_equal(names, np.array(["a", "b"])[session])
    assert (read.layers, read.model_id, read.n_expert, read.unfinished) == (LAYERS, ID, N_EXPERT, 0)


def test_parts_carry_weights_and_hidden_states(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "PART_BYTES", 3 * len(LAYERS) * trace.estimate_bytes(1, 1, A, D, True))
    position, _, experts, weights, hidden, _ = write(tmp_path, [4, 3], hidden=True)
    parts = list(iter_parts(tmp_path, ID, ("hidden", "experts", "weights")))
    assert [len(part.position) for part in parts] == [3, 3, 1]
    for name, expected in {"experts": experts, "weights": weights, "hidden": hidden}.items():
        values = np.concatenate([part.values[name] for part in parts])
        assert values.dtype == (np.uint16 if name == "experts" else np.float16)
        assert np.array_equal(values, expected.astype(values.dtype)), name
    assert np.array_equal(np.concatenate([part.position for part in parts]), position)
    assert [part.session_ids for part in parts] == [("a",), ("a", "b"), ("b",)]
    assert parts[0].model == trace.TraceModel(ID, N_LAYER, N_EXPERT, A, D, LAYERS, True)
    assert list(next(iter_parts(tmp_path, ID, ())).values) == []


def test_a_part_without_its_hidden_states_is_one_that_had_none(tmp_path):
    rng, other = np.random.default_rng(3), tmp_path / "other"
    position, generated, experts, weights, residual = tokens(rng, 6, True)
    for name, hidden in (("a", residual), ("b", None)):
        with open_writer(other / name, hidden is not None) as writer:
            writer.append("s", position, generated, LAYERS, experts, weights, hidden)
    (part,), (plain,) = (list((other / name).iterdir()) for name in "ab")
    assert trace.without_hidden(part, ID) == plain.read_bytes() == trace.without_hidden(plain, ID)
    with pytest.raises(WrongModelError):
        trace.without_hidden(part, OTHER)
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(FileFormatError, match=part.name):
        trace.without_hidden(part, ID)


def test_the_file_has_the_columns_that_other_programs_expect(tmp_path):
    write(tmp_path, [4], hidden=True)
    table = pq.read_table(tmp_path / "part-000000.parquet")
    row = table.slice(1, 1).to_pylist()[0]
    assert list(row) == ["session_id", "position", "generated", "layer", "experts", "weights", "hidden"]
    assert (row["session_id"], row["position"], row["layer"]) == ("a", 7, 2)
    assert (len(row["experts"]), len(row["weights"]), len(row["hidden"])) == (A, A, D)
    physical = pq.ParquetFile(tmp_path / "part-000000.parquet").schema
    assert str(physical.column(0).logical_type) == "String"
    assert table.schema.field("hidden").type.value_type == pa.float16()


def test_residuals_beyond_half_floats_are_clipped(tmp_path):
    rng = np.random.default_rng(0)
    position, generated, experts, weights, hidden = tokens(rng, 1, True)
    hidden[0, 0, :2] = 1e9, -1e9
    with open_writer(tmp_path, hidden=True) as writer:
        writer.append("a", position, generated, LAYERS, experts, weights, hidden)
    values = next(iter_parts(tmp_path, ID, ("hidden",))).values["hidden"]
    assert values[0, 0, :2].tolist() == [65504, -65504]


def test_the_arrays_may_change_after_append(tmp_path):
    position, generated, experts, weights, _ = tokens(np.random.default_rng(0), 2, False)
    before = experts.copy()
    with open_writer(tmp_path) as writer:
        writer.append("a", position, generated, LAYERS, experts, weights)
        experts[:] = 0
    assert np.array_equal(read_routing(tmp_path, ID).experts, before)


def test_a_writer_continues_a_folder_of_the_same_model_only(tmp_path):
    first = write(tmp_path, [3])
    second = write(tmp_path, [2], seed=1)
    read = read_routing(tmp_path, ID)
    assert np.array_equal(read.experts, np.concatenate([first[2], second[2]]))
    with pytest.raises(WrongModelError, match=f"{ID}.*{OTHER}"):
        open_writer(tmp_path, model_id=OTHER)
    with pytest.raises(FileFormatError, match="another kind"):
        open_writer(tmp_path, hidden=True)


def test_of_some_sessions_only_their_parts_are_read(tmp_path, monkeypatch):
    """But for the first, which says what there is."""
    monkeypatch.setattr(trace, "PART_ROWS", 3 * len(LAYERS))
    position, _, experts, *_, session = write(tmp_path, [3, 7, 6, 2])  # of a, b, a, b
    read, real = [], trace._read
    monkeypatch.setattr(trace, "_read", lambda path, *more: read.append(path.name) or real(path, *more))
    some = read_routing(tmp_path, ID, {"b"})
    assert np.array_equal(some.experts, experts[session == 1]) and np.array_equal(some.position, position[session == 1])
    assert some.session_ids[some.session[0]] == "b"
    assert read == [f"part-00000{i}.parquet" for i in (0, 1, 2, 3, 5)]
    none = read_routing(tmp_path, ID, {"c"})
    assert none.experts.shape == (0, len(LAYERS), A) and none.layers == LAYERS and read[5:] == ["part-000000.parquet"]


def test_a_trace_may_have_more_than_a_million_parts(tmp_path, monkeypatch):
    """Names grow then, and are in the order of their numbers all the same; here they begin with one digit."""
    monkeypatch.setattr(trace, "part_name", lambda number: f"part-{number}.parquet")
    monkeypatch.setattr(trace, "_PART_NAME", re.compile(trace._PART_NAME.pattern.replace("6", "1")))
    monkeypatch.setattr(trace, "PART_ROWS", len(LAYERS))
    position, *_ = write(tmp_path, [13])
    assert [path.name for path in trace.part_paths(tmp_path)][8:11] == [f"part-{i}.parquet" for i in (8, 9, 10)]
    assert np.array_equal(read_routing(tmp_path, ID).position, position)


def test_flush_writes_what_waits_and_counts_parts(tmp_path):
    run = tokens(np.random.default_rng(0), 2, False)
    with open_writer(tmp_path) as writer:
        assert writer.flush() == 0
        writer.append("a", *run[:2], LAYERS, *run[2:])
        assert not trace.part_paths(tmp_path)
        assert writer.flush() == 1
    assert len(trace.part_paths(tmp_path)) == 1


def test_an_exception_drops_what_waits(tmp_path):
    run = tokens(np.random.default_rng(0), 2, False)
    with pytest.raises(KeyError), open_writer(tmp_path) as writer:
        writer.append("a", *run[:2], LAYERS, *run[2:])
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_another_model_is_refused_with_both_ids(tmp_path):
    write(tmp_path, [3])
    with pytest.raises(WrongModelError, match=f"part-000000.*{ID}.*{OTHER}"):
        read_routing(tmp_path, OTHER)


def test_no_trace_a_missing_part_and_leftovers(tmp_path, monkeypatch):
    with pytest.raises(FileFormatError, match="found none"):
        read_routing(tmp_path, ID)
    with pytest.raises(FileFormatError, match="found none"):
        read_routing(tmp_path / "nowhere", ID)
    monkeypatch.setattr(trace, "PART_ROWS", len(LAYERS))
    _, _, experts, *_ = write(tmp_path, [3])
    (tmp_path / "part-000003.parquet.x1y2.tmp").write_bytes(b"half a part")
    (tmp_path / "notes.txt").write_text("not ours")
    read = read_routing(tmp_path, ID)
    assert read.unfinished == 1 and np.array_equal(read.experts, experts)
    (tmp_path / "part-000001.parquet").unlink()
    with pytest.raises(FileFormatError, match=r"expected part-000001.parquet, found part-000002.parquet"):
        read_routing(tmp_path, ID)


def test_hidden_states_that_were_not_traced(tmp_path):
    write(tmp_path, [3])
    with pytest.raises(FileFormatError, match="hidden states, found none") as error:
        list(iter_parts(tmp_path, ID, ("hidden",)))
    assert "--hidden" in error.value.hint


def test_every_truncation_is_refused_by_name(tmp_path):
    write(tmp_path, [4], hidden=True)
    path = tmp_path / "part-000000.parquet"
    whole = path.read_bytes()
    for length in {*range(0, len(whole), 61), len(whole) - 1, len(whole) - 8}:
        path.write_bytes(whole[:length])
        with pytest.raises(FileFormatError, match=r"part-000000.parquet"):
            read_routing(tmp_path, ID)


def test_garbage_is_refused_or_harmless(tmp_path):
    """Bytes changed at random: pages have checksums, so what is read is what was written."""
    expected = write(tmp_path, [40])[2]
    path = tmp_path / "part-000000.parquet"
    whole, rng, refused = path.read_bytes(), random.Random(3), 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 4, 40])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            assert np.array_equal(read_routing(tmp_path, ID).experts, expected)
        except (FileFormatError, WrongModelError) as error:
            refused += 1
            assert "part-000000.parquet" in error.message
    assert refused > 75


def rewritten(path, change):
    """The part with its table, or the description in its metadata, changed."""
    table = pq.read_table(path)
    pq.write_table(change(table), path)


def described(**changes):
    def change(table):
        fields = json.loads(table.schema.metadata[b"spark.trace"]) | changes
        return table.replace_schema_metadata({b"spark.trace": json.dumps(fields)})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.slice(0, 8), "8 rows, no multiple of its 3 layers"),
        (lambda t: t.take([0, 1, 2, 3, 4, 3]), "a token without all of its layers"),
        (lambda t: t.take([0, 1, 5, 3, 4, 2]), "a token without all of its layers"),
        (lambda t: t.slice(1, 6), "a token without all of its layers"),
        (lambda t: t.replace_schema_metadata(None), "another kind of Parquet file"),
        (lambda t: t.replace_schema_metadata({b"spark.trace": b"{"}), "a damaged file"),
        (lambda t: t.replace_schema_metadata({b"spark.trace": b"[]"}), "a damaged file"),
        (described(version=2), "expected trace version 1, found 2"),
        (described(n_experts=4), "a damaged file"),
        (described(layers=7), "a damaged file"),
        (described(layers=[]), "other columns"),
        (described(n_expert_used="3"), "a damaged file"),
        (described(n_expert="11"), "a damaged file"),
        (described(layers=[1, 2, None]), "a damaged file"),
        (described(n_expert_used=4), "other columns"),
        (described(n_expert=3), "an expert of 3 or more"),
        (lambda t: t.drop_columns(["weights"]), "other columns"),
        (lambda t: t.append_column("more", t["layer"]), "other columns"),
        (lambda t: t.set_column(3, "layer", t["layer"].cast(pa.int32())), "other columns"),
    ],
)
def test_parts_that_are_well_formed_and_wrong(tmp_path, change, message):
    write(tmp_path, [3])
    rewritten(tmp_path / "part-000000.parquet", change)
    with pytest.raises(FileFormatError, match=f"part-000000.parquet.*{message}"):
        read_routing(tmp_path, ID)


def test_a_pipe_in_the_place_of_a_part_is_refused_at_once(tmp_path):
    write(tmp_path, [3])
    (tmp_path / "part-000000.parquet").unlink()
    os.mkfifo(tmp_path / "part-000000.parquet")
    with pytest.raises(FileFormatError, match=r"part-000000.parquet.*a damaged file \(expected a regular file"):
        read_routing(tmp_path, ID)
    with pytest.raises(FileFormatError, match="expected a regular file"):
        open_writer(tmp_path)


def test_an_expert_twice_in_a_token(tmp_path):
    position, generated, experts, weights, _ = tokens(np.random.default_rng(0), 2, False)
    experts[1, 2, 0] = experts[1, 2, 2]
    with open_writer(tmp_path) as writer:
        writer.append("a", position, generated, LAYERS, experts, weights)
    with pytest.raises(FileFormatError, match="twice in a token"):
        read_routing(tmp_path, ID)


def test_parts_of_two_traces_do_not_mix(tmp_path):
    write(tmp_path / "x", [3])
    with TraceWriter(tmp_path / "y", ID, A, D, False, n_layer=N_LAYER, n_expert=N_EXPERT + 1) as writer:
        run = tokens(np.random.default_rng(0), 2, False)
        writer.append("a", *run[:2], LAYERS, *run[2:])
    (tmp_path / "y" / "part-000000.parquet").rename(tmp_path / "x" / "part-000001.parquet")
    with pytest.raises(
        FileFormatError, match=r"part-000001.parquet: expected .*n_expert=11.* found .*n_expert=12"
    ):
        read_routing(tmp_path / "x", ID)


def test_a_full_disk_leaves_the_parts_before_it(tmp_path, monkeypatch):
    _, _, experts, *_ = write(tmp_path, [3])

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(SparkError, match=r"cannot write the trace .*part-000001.parquet: No space left"):
        write(tmp_path, [2])
    assert [path.name for path in tmp_path.iterdir()] == ["part-000000.parquet"]
    assert np.array_equal(read_routing(tmp_path, ID).experts, experts)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SparkError, match="cannot make the trace folder"):
        open_writer(tmp_path / "file" / "trace")


def test_the_estimate_is_a_little_more_than_the_files(tmp_path):
    for hidden in (False, True):
        directory = tmp_path / str(hidden)
        write(directory, [3000], hidden)
        size = sum(path.stat().st_size for path in directory.iterdir())
        estimate = trace.estimate_bytes(3000, len(LAYERS), A, D, hidden)
        assert 0.4 * estimate < size < estimate
    # the size that the design speaks of: 171K tokens of a 40-layer model with hidden states
    assert 28e9 < trace.estimate_bytes(171_000, 40, 8, 2048, True) < 29e9


def test_a_part_of_a_trace_and_its_counts(tmp_path):
    _, generated, experts, *_ = write(tmp_path, [5, 6])
    read = read_routing(tmp_path, ID)
    half = read.part(5, 11)
    assert half.session.tolist() == [1] * 6 and half.position.tolist() == list(range(7, 13))
    expected = np.zeros((len(LAYERS), N_EXPERT), np.int64)
    for token in np.flatnonzero(generated):
        for layer in range(len(LAYERS)):
            expected[layer, experts[token, layer]] += 1
    assert np.array_equal(read.counts(), expected)
    prompt = read.part(int(np.flatnonzero(~generated)[0]), int(np.flatnonzero(~generated)[0]) + 1)
    assert prompt.counts().sum() == A * len(LAYERS)  # nothing generated: all tokens count
