"""Files in GGUF, and their headers: the oracle is the reader of the `gguf` package, on valid files."""

from __future__ import annotations

import hashlib
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.formats.gguf import StringArray, open_model
from engine.formats.quants import dequantize
from engine.ground.errors import ModelFormatError
from tests.gguf_files import (
    METADATA,
    RAW_ARCHITECTURE,
    model_tensors,
    random_blocks,
    raw_file,
    raw_key,
    raw_tensor,
    raw_text,
    write_gguf,
)

rng = np.random.default_rng(7)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", METADATA, model_tensors())[0]


def as_plain(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, StringArray) else value


def assert_reads_as_the_oracle(path: Path) -> None:
    oracle = gguf.GGUFReader(path)
    with open_model(path) as model:
        keys = [key for key in oracle.fields if not key.startswith("GGUF.")]
        assert list(model.metadata) == keys
        for key in keys:
            np.testing.assert_equal(as_plain(model.metadata[key]), oracle.fields[key].contents(), key)
        assert list(model.tensors) == [t.name for t in oracle.tensors]
        for t in oracle.tensors:
            info, found = model.tensors[t.name], model.tensor(t.name)
            assert info.shape == found.shape == tuple(reversed(t.shape.tolist()))
            assert (info.offset, info.nbytes, info.qtype) == (t.data_offset, t.n_bytes, t.tensor_type)
            assert found.data.tobytes() == t.data.tobytes()
            assert not found.data.flags.writeable


def test_reads_as_the_oracle(model_path: Path) -> None:
    assert_reads_as_the_oracle(model_path)


@pytest.mark.parametrize("version", [2, 3])
def test_versions(model_path: Path, tmp_path: Path, version: int) -> None:
    raw = bytearray(model_path.read_bytes())
    raw[4:8] = struct.pack("<I", version)
    path = tmp_path / "v.gguf"
    path.write_bytes(raw)
    assert_reads_as_the_oracle(path)


def test_python_types(model_path: Path) -> None:
    model = open_model(model_path)
    types = {key: type(model.metadata[key]) for key in model.metadata}
    assert types["t.u8"] is types["t.u64"] is types["t.i64"] is int
    assert types["t.f64"] is types["qwen3moe.rope.freq_base"] is float
    assert types["tokenizer.ggml.add_bos_token"] is bool
    assert types["general.name"] is str
    assert model.metadata["t.array.uint16"].dtype == np.uint16
    assert model.metadata["t.bools"].dtype == np.bool_


def test_every_tensor_type(tmp_path: Path) -> None:
    blocks = {}
    for qtype, (block, size) in gguf.GGML_QUANT_SIZES.items():
        data = rng.integers(0, 256, 6 * size, np.uint8)
        blocks[qtype.name] = (qtype, (3, 2 * block), data)
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "x")
    for name, (qtype, shape, data) in blocks.items():
        writer.add_tensor(name, data.reshape(3, -1), raw_shape=None, raw_dtype=qtype)
        assert shape[1] * gguf.GGML_QUANT_SIZES[qtype][1] // gguf.GGML_QUANT_SIZES[qtype][0] == data.size // 3
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_reads_as_the_oracle(path)
    with open_model(path) as model:
        assert {n: (t.qtype, t.shape) for n, t in model.tensors.items()} == {
            n: (q, shape) for n, (q, shape, _) in blocks.items()
        }


scalars = st.one_of(
    st.booleans(),
    st.text(max_size=20),
    st.integers(0, 2**32 - 1),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.floats(width=32, allow_nan=False),
)
arrays = st.one_of(
    st.lists(st.text(max_size=9), min_size=1, max_size=9),
    st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=9).map(lambda v: np.array(v, np.int16)),
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=9).map(np.array),
)
printable = st.characters(exclude_categories=("C", "Z"))  # names that are not are refused
keys = st.text(printable, min_size=1, max_size=12).map(lambda text: f"k.{text}")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    metadata=st.dictionaries(keys, scalars | arrays, max_size=6),
    rows=st.lists(st.integers(1, 3), max_size=4),
    per_part=st.integers(1, 3),
)
def test_round_trip(tmp_path: Path, metadata: dict, rows: list[int], per_part: int) -> None:
    tensors = {f"t{i}é": rng.standard_normal((n, 3 + i)).astype(np.float32) for i, n in enumerate(rows)}
    whole = open_model(write_gguf(tmp_path / "m.gguf", metadata, tensors)[0])
    files = write_gguf(tmp_path / "s.gguf", metadata, tensors, per_part)
    split = open_model(files[-1])
    assert split.paths == tuple(files)
    for model in (whole, split):
        own = {key: as_plain(model.metadata[key]) for key in metadata}
        assert own == {key: as_plain(value) for key, value in metadata.items()}
        assert set(model.tensors) == set(tensors)
        for name, values in tensors.items():
            np.testing.assert_array_equal(dequantize(model.tensor(name)), values)
    assert whole.model_id == split.model_id


# ---- typed access


def test_value(model_path: Path) -> None:
    model = open_model(model_path)
    assert model.value("qwen3moe.block_count", int) == 2
    assert model.value("qwen3moe.block_count", float) == 2.0
    assert type(model.value("qwen3moe.block_count", float)) is float
    assert model.value("absent", int, None) is None
    assert model.value("absent", str, "x") == "x"
    assert model.value("tokenizer.ggml.tokens", list) == METADATA["tokenizer.ggml.tokens"]
    assert model.value("tokenizer.ggml.tokens", StringArray)[1:4:2] == ["a", ""]
    assert model.value("tokenizer.ggml.tokens", StringArray)[-1] == "日本"
    assert model.value("qwen3moe.attention.head_count", np.ndarray).tolist() == [3, 5]
    assert model.value("qwen3moe.attention.head_count", list) == [3, 5]
    with pytest.raises(IndexError):
        model.value("tokenizer.ggml.tokens", StringArray)[5]
    with pytest.raises(ModelFormatError, match=r"m\.gguf: key 'absent' is missing"):
        model.value("absent", int)
    for key, kind, found in [
        ("tokenizer.ggml.add_bos_token", int, "the bool False, expected int"),
        ("general.name", int, "the str 'näno 🎈', expected int"),
        ("qwen3moe.rope.freq_base", int, r"the float 1000000\.0, expected int"),
        ("tokenizer.ggml.tokens", str, "an array of 5 strings, expected str"),
        ("qwen3moe.attention.head_count", int, "an array of 2 uint32, expected int"),
        ("general.name", list, "the str .*, expected list"),
        ("qwen3moe.block_count", bool, "the int 2, expected bool"),
    ]:
        with pytest.raises(ModelFormatError, match=f"key '{key}' is {found}"):
            model.value(key, kind, None)


def test_missing_tensor_is_named(model_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"tensor 'blk\.9\.x' is missing") as caught:
        open_model(model_path).tensor("blk.9.x")
    assert "5 tensors" in caught.value.hint


def test_views_outlive_close(model_path: Path) -> None:
    with open_model(model_path) as model:
        tensor = model.tensor("output_norm.weight")
        tokens = model.value("tokenizer.ggml.tokens", StringArray)
    np.testing.assert_array_equal(dequantize(tensor), model_tensors()["output_norm.weight"].astype(np.float32))
    assert tokens[2] == "Ġthe"


# ---- split files


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return write_gguf(tmp_path / "m.gguf", METADATA | {"general.alignment": 32}, model_tensors(), 2)


def test_any_part_opens_the_whole(parts: list[Path], tmp_path: Path) -> None:
    whole = open_model(write_gguf(tmp_path / "w.gguf", METADATA, model_tensors())[0])
    for path in parts:
        model = open_model(path)
        assert model.paths == tuple(parts) and len(parts) == 3
        assert model.size_bytes == sum(p.stat().st_size for p in parts)
        assert model.architecture == "qwen3moe"
        assert list(model.tensors) == list(whole.tensors)
        for name in whole.tensors:
            assert model.tensor(name).data.tobytes() == whole.tensor(name).data.tobytes()


def test_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    for path in (parts[0], parts[2]):
        with pytest.raises(ModelFormatError, match=r"m-00002-of-00003\.gguf: this part of the model is missing"):
            open_model(path)


def test_renamed_part(parts: list[Path], tmp_path: Path) -> None:
    other = parts[1].rename(tmp_path / "other.gguf")
    with pytest.raises(ModelFormatError, match=r"other\.gguf.*'split\.count'.* one of 3 parts") as caught:
        open_model(other)
    assert "-00001-of-00003.gguf" in caught.value.hint


def test_swapped_parts(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelFormatError, match=r"00002-of-00003\.gguf: .* are 2 and 3, expected 1 and 3"):
        open_model(parts[0])


def test_parts_of_another_model(parts: list[Path], tmp_path: Path) -> None:
    names = ["a", "b", "c", "d", "blk.0.ffn_gate_inp.weight"]  # the last is a tensor of the first part
    foreign = write_gguf(tmp_path / "f.gguf", METADATA, {n: np.ones(3, np.float32) for n in names}, 2)
    parts[2].write_bytes(foreign[2].read_bytes())
    with pytest.raises(ModelFormatError, match=r"'split\.tensors\.count' is 5, .* 5 tensors with 4 different"):
        open_model(parts[0])


def test_damage_in_another_part_names_that_part(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-40])
    with pytest.raises(ModelFormatError, match=r"m-00003-of-00003\.gguf: tensor 'output_norm\.weight' ends at"):
        open_model(parts[0])


def test_first_part_without_tensors(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "x", split_max_tensors=2, small_first_shard=True)
    for name in "abc":
        writer.add_tensor(name, np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    files = [Path(f.name) for f in writer.fout]
    writer.close()
    model = open_model(files[2])
    assert list(model.tensors) == ["a", "b", "c"] and len(files) == 3
    assert len(model.file_id) == 64


# ---- a large vocabulary


@pytest.mark.slow
def test_large_vocabulary_opens_quickly_in_little_memory(tmp_path: Path) -> None:
    n = 151_936
    tokens = raw_key(
        "tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, n) + b"".join(raw_text(f"tök{i}") for i in range(n))
    )
    merges = raw_key(
        "tokenizer.ggml.merges", 9, struct.pack("<IQ", 8, n) + b"".join(raw_text(f"a{i} b") for i in range(n))
    )
    kinds = raw_key("tokenizer.ggml.token_type", 9, struct.pack("<IQ", 5, n) + bytes(4 * n))
    path = tmp_path / "vocab.gguf"
    path.write_bytes(raw_file(RAW_ARCHITECTURE, tokens, merges, kinds))
    tracemalloc.start()
    model = open_model(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        open_model(path)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1
    assert peak < 8 << 20
    strings = model.value("tokenizer.ggml.tokens", StringArray)
    assert (strings[0], strings[77_777], strings[-1]) == ("tök0", "tök77777", f"tök{n - 1}")
    assert model.value("tokenizer.ggml.merges", list)[-1] == f"a{n - 1} b"


# ---- ids


def ids_of(path: Path, metadata: dict, tensors: dict, per_part: int = 0) -> tuple[str, str]:
    with open_model(write_gguf(path, metadata, tensors, per_part)[0]) as model:
        return model.model_id, model.file_id


def test_model_id_is_that_of_the_model(tmp_path: Path) -> None:
    base_model, base_file = ids_of(tmp_path / "m.gguf", METADATA, model_tensors())
    up, router = "blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_inp.weight"

    def ids(tensors: dict | None = None, per_part: int = 0, **metadata: object) -> tuple[str, str]:
        keys = METADATA | {k.replace("__", "."): v for k, v in metadata.items()}
        return ids_of(tmp_path / "o.gguf", keys, model_tensors() | (tensors or {}), per_part)

    values = model_tensors()
    same = [
        ids({up: (values[up][0], QType.Q8_0)}),
        ids({up: (values[up][0] * 1.5, QType.Q4_K)}),
        ids_of(tmp_path / "o.gguf", METADATA, dict(reversed(values.items()))),
        ids(general__name="another"),
        ids(qwen3moe__context_length=4096),
    ]
    assert {model for model, _ in same} == {base_model}
    assert len({file for _, file in same} | {base_file}) == 6
    changed = values[router].copy()
    changed[1, 3] += 0.1
    other = [
        ids({router: changed}),
        ids({up: (values[up][0][:, :1], QType.Q4_K)}),
        ids({"extra.weight": np.ones(3)}),
        ids(qwen3moe__expert_count=4),
        ids(qwen3moe__attention__head_count=np.array([5, 3], np.uint32)),
        ids(general__architecture="qwen2moe"),
    ]
    assert len({model for model, _ in other} | {base_model}) == 7


def test_model_id_agrees_for_f32_and_bf16_routers(tmp_path: Path) -> None:
    router = "blk.0.ffn_gate_inp.weight"
    values = model_tensors()
    f32 = ids_of(tmp_path / "a.gguf", METADATA, values)
    bf16 = ids_of(tmp_path / "b.gguf", METADATA, values | {router: (values[router], QType.BF16)})
    assert f32[0] == bf16[0] and f32[1] != bf16[1]


def test_model_id_never_changes(tmp_path: Path) -> None:
    """Profiles on users' disks carry model ids: a new one would orphan them."""
    tensors = {
        "blk.0.ffn_gate_inp.weight": (np.arange(12, dtype=np.float32) / 7).reshape(3, 4),
        "blk.0.ffn_up_exps.weight": np.zeros((3, 2, 4), np.float32),
    }
    keys = {"general.architecture": "qwen3moe", "qwen3moe.expert_count": 3, "qwen3moe.block_count": 1}
    model_id, _ = ids_of(tmp_path / "m.gguf", keys, tensors)
    assert model_id == "21483995d1a1d9931b38297cbd4ecada9fd3b8a82483ecc1bc13bb5f8e377cb7"


def test_file_id_samples_the_data(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    size = 12 << 20
    path.write_bytes(raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t", (size // 4,)),), data=size))
    base = open_model(path).file_id
    begin = path.stat().st_size - size
    raw = path.read_bytes()
    samples = hashlib.sha256(b"spark file id 1\n" + struct.pack("<QQ", len(raw), begin) + raw[:begin])
    for at in (0, (size - (1 << 20)) // 2, size - (1 << 20)):
        samples.update(raw[begin + at : begin + at + (1 << 20)])
    assert base == samples.hexdigest()
    seen = {base}
    for at in (0, (1 << 20) - 1, size // 2, size - 1):
        changed = bytearray(raw)
        changed[begin + at] = 1
        path.write_bytes(changed)
        seen.add(open_model(path).file_id)
    path.write_bytes(raw + b"\0")
    seen.add(open_model(path).file_id)
    assert len(seen) == 6


def test_file_id_samples_straddle_parts(tmp_path: Path) -> None:
    """The samples are those of the parts' data laid end to end."""
    data = random_blocks(QType.F32, 7, 300_000, rng).view(np.float32)
    files = write_gguf(tmp_path / "m.gguf", {"general.alignment": 32}, {f"t{i}": data[i] for i in range(7)}, 3)
    expected = hashlib.sha256(b"spark file id 1\n")
    bodies = b""
    for path in files:
        raw = path.read_bytes()
        begin = min(t.data_offset for t in gguf.GGUFReader(path).tensors)
        expected.update(struct.pack("<QQ", len(raw), begin) + raw[:begin])
        bodies += raw[begin:]
    last = len(bodies) - (1 << 20)
    for at in (0, last // 2, last):
        expected.update(bodies[at : at + (1 << 20)])
    assert open_model(files[1]).file_id == expected.hexdigest()
