"""What a header says: headers of published shapes, parts of files, and that a model loads where nothing is missing.

`python -m tests.running.test_inspection COUNT` mutates so many headers, all in one process.
"""

from __future__ import annotations

import os
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine import models
from engine.formats.block_types import NATIVE_TYPES
from engine.formats.gguf import open_header, open_model
from engine.formats.gguf_header import UnfinishedHeaderError, read_header
from engine.ground.config import EngineConfig
from engine.ground.errors import CapacityError, ModelFormatError, SparkError
from engine.ops.cuda.counting import CountingDevice
from engine.placing import plan
from engine.running import dryrun, probe
from engine.running.inspection import UNREAD
from engine.running.source import open_source
from engine.text import tokenizer
from tests import published_headers
from tests.formats.test_gguf_malformed import mutate
from tests.gguf_files import raw_file, raw_key, raw_text
from tests.published_headers import HEADERS, Published
from tests.tiny_models import k_quant_mix, tiny_path

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "probe", lambda: probe.Missing("none"))


def inspected(path: Path, **options: Any) -> dict[str, Any]:
    return dryrun.plan_only(EngineConfig(path, "cuda", "lru", **options))


# --- published shapes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADERS)
def test_published_shapes(tmp_path: Path, name: str) -> None:
    model = HEADERS[name]
    paths = published_headers.write(tmp_path, name, n_vocab=400)
    found = inspected(paths[0], vram_gib=24.0, ctx_tokens=4096, chunk_tokens=512)
    file = found["file"]
    # The `gguf` package's reader is the oracle of types and bytes, the publisher of numbers of parameters.
    tensors = [t for path in paths for t in gguf.GGUFReader(path).tensors]
    rows = Counter({row["type"]: 0 for row in file["tensors"]})
    for row in file["tensors"]:
        rows[row["type"]] += row["bytes"]
    assert rows == Counter({q: sum(t.n_bytes for t in tensors if t.tensor_type.name == q) for q in rows})
    assert sum(row["tensors"] for row in file["tensors"]) == len(tensors) == len(model.shapes)
    assert 0 <= sum(path.stat().st_size for path in paths) - file["bytes"] < 32 * len(paths)
    assert file["missing_bytes"] == 0 and file["absent_files"] == [] and file["name"] == name
    whole, active = (file[key] / 1e9 for key in ("parameters", "active_parameters"))
    assert abs(whole - model.billions[0]) < 0.05 + 0.01 * model.billions[0]
    embedding = prod(model.shapes.get("token_embd.weight", (0,))) / 1e9  # which publishers count, or do not
    assert min(abs(active - model.billions[1]), abs(active - embedding - model.billions[1])) < 0.25
    assert file["architecture"] == model.arch
    for key in ("block_count", "embedding_length", "expert_count"):
        assert file["sizes"].get(key) == model.metadata.get(key)

    lacking = {t.tensor_type for t in tensors if t.tensor_type not in NATIVE_TYPES and not t.name.startswith("v.")}
    said = [error["message"] for error in file["missing"]]
    of_types = [match for message in said if (match := re.search("have type (.*), which has no kernels", message))]
    assert {match[1] for match in of_types} == {qtype.name for qtype in lacking}
    assert len(said) - len(of_types) == len(model.refused)
    for pattern in model.refused:
        assert any(re.search(pattern, message) for message in said), (pattern, said)
    assert (found["plan"] is None) == bool(said)
    if not said:
        experts = sum(row["bytes"] for row in file["tensors"] if row["role"].startswith("experts"))
        assert experts <= found["plan"]["experts_bytes"] < 1.001 * experts + 1
        assert found["plan"]["device_bytes"] <= 24 << 30


EXPERTS = ("experts: gate", "experts: up", "experts: down")
ROLES = {
    "Laguna-XS.2-Q4_K_M": {  # attention: Q, K, V, output and a gate; a bias of each router
        **dict.fromkeys(EXPERTS, 39), "embedding": 1, "output": 1, "shared experts": 3 * 39, "routers": 39,
        "dense FFN": 3, "attention": 5 * 40, "norms and vectors": 4 * 40 + 1 + 39,
    },
    "Qwen3.5-35B-A3B-Q5_K_M": {  # 10 layers of attention; 30 recurrent ones, each with two matrices named attn_
        **dict.fromkeys(EXPERTS, 40), "embedding": 1, "output": 1, "shared experts": 3 * 40, "routers": 40,
        "recurrent layers": 4 * 30, "attention": 4 * 10 + 2 * 30, "further tokens": 4,
        "norms and vectors": 2 * 10 + 3 * 30 + 3 * 40 + 1,
    },
    "Gemma-4-26B-A4B-with-vision": {  # 25 window layers; 5 full ones, without V
        "experts: gate and up": 30, "experts: down": 30, "embedding": 1, "routers": 30, "dense FFN": 3 * 30,
        "attention": 4 * 25 + 3 * 5, "pictures and sound": 1, "norms and vectors": 12 * 30 + 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROLES)
def test_roles(tmp_path: Path, name: str) -> None:
    found: Counter[str] = Counter()
    for row in inspected(published_headers.write(tmp_path, name, n_vocab=400)[0])["file"]["tensors"]:
        found[row["role"]] += row["tensors"]
    assert found == ROLES[name]


def test_there_are_twenty_headers_and_both_verdicts() -> None:
    refused = [name for name, model in HEADERS.items() if model.refused]
    assert len(HEADERS) >= 20 and len(refused) >= 8


def test_what_text_does_not_need_lacks_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, skipped = "Gemma-4-26B-A4B-with-vision", QType.IQ1_S
    model = HEADERS[name]
    odd = replace(
        model, shapes={**model.shapes, "v.blk.1.attn_q.weight": (1152, 1280)},
        types=lambda tensor, shape: skipped if tensor == "v.blk.1.attn_q.weight" else model.types(tensor, shape),
    )  # fmt: skip
    monkeypatch.setitem(HEADERS, name, odd)
    file = inspected(published_headers.write(tmp_path, name, n_vocab=400)[0])["file"]
    (row,) = (row for row in file["tensors"] if row["type"] == skipped.name)
    assert row["role"] == UNREAD[0] and not row["kernels"] and file["missing"] == []


# --- plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma4", "qwen35moe"])  # one reads values from tensors, one moves blocks
def test_a_plan_by_the_header_is_that_of_the_weights(name: str) -> None:
    options = EngineConfig(tiny_path(name), "cuda", "lru", vram_gib=1.0)
    source = open_source(options)
    sharing = dryrun.Sharing(options, source.arch, source.config, source.weights, 640, None, CountingDevice())
    decision = sharing.decide(cap_bytes=1 << 30, context_bytes=plan.CONTEXT_BYTES, context_measured=False)
    found = dryrun.plan_only(options)
    assert found["file"]["missing"] == [] and found["plan"] == decision.plan.to_json()


def test_guesses_are_left_out_where_they_have_no_room() -> None:
    """At every cap with a plan without them there is one with `auto`, and with them as soon as they fit."""
    options = EngineConfig(tiny_path("laguna"), "cuda", "uniform", ctx_tokens=128, parallel=1)
    source = open_source(options)
    model = source.arch, source.config, source.weights, 128, None, CountingDevice()
    sharings = {guess: dryrun.Sharing(replace(options, guess=guess), *model) for guess in ("off", "auto", "on")}

    def decided(guess: str, cap_bytes: int) -> dryrun.Decision | None:
        try:
            return sharings[guess].decide(cap_bytes=cap_bytes, context_bytes=0)
        except CapacityError:
            return None

    seen = set()
    for cap_bytes in range(0, 40 << 20, 1 << 15):
        off, auto, on = (decided(guess, cap_bytes) for guess in sharings)
        assert (off is None) == (auto is None)
        if off is None or auto is None:
            assert on is None
            continue
        is_whole = off.plan.share.resident > 0
        assert not off.has_guesses and auto.has_guesses == (on is not None and not is_whole)
        seen.add((auto.has_guesses, is_whole))
        assert any("no room for what makes them" in r for r in auto.reasons) == (not auto.has_guesses and not is_whole)
        assert auto.plan == (off if on is None else on).plan
        if is_whole:
            break
    assert seen == {(False, False), (True, False), (False, True)}


def test_weights_are_neither_read_nor_allocated(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = published_headers.write(tmp_path, "Qwen3.6-27B-Q4_K_M", n_vocab=400)[0]
    assert inspected(path, vram_gib=24.0)["plan"] is not None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    with open_header(path) as file:
        assert not file.tensor("blk.3.attn_q.weight").backed
        for identity in ("model_id", "file_id"):
            with pytest.raises(AssertionError):
                getattr(file, identity)


# --- downloads ----------------------------------------------------------------------------------------


def test_a_download_is_inspected_as_soon_as_its_header_is_there(tmp_path: Path) -> None:
    whole = tiny_path("qwen3moe").read_bytes()
    path, begin = tmp_path / "m.gguf.part", min(t.offset for t in open_model(tiny_path("qwen3moe")).tensors.values())
    told = inspected(tiny_path("qwen3moe"), vram_gib=1.0)
    for size in range(24, begin - 32, (begin - 24) // 40):
        path.write_bytes(whole[:size])
        with pytest.raises(UnfinishedHeaderError, match=rf"part: {size:,} bytes are there, .*: more are needed"):
            open_header(path)
    keys = whole.index(b"qwen3moe.block_count") - 8  # a download from several places leaves holes
    for there, words in ((0, "begins with zeros"), (keys, f" {keys + 8:,} bytes are there, and its header is longer")):
        path.write_bytes(whole[:there] + bytes(len(whole) - there))
        with pytest.raises(UnfinishedHeaderError, match=words):
            open_header(path)
    for size in (begin, begin + 1000, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:size])
        found = inspected(path, vram_gib=1.0)
        assert found["plan"] == told["plan"] and found["file"]["bytes"] == told["file"]["bytes"]
        assert found["file"]["missing_bytes"] == told["file"]["bytes"] - size
        with pytest.raises(ModelFormatError) if size < len(whole) else open_model(path):
            open_model(path)


def test_parts_that_are_not_there_yet(tmp_path: Path) -> None:
    paths = published_headers.write(tmp_path, "Qwen3-235B-A22B-Q4_K_M", n_vocab=400)
    whole = inspected(paths[2], vram_gib=24.0)
    assert whole["plan"] is not None and len(whole["file"]["files"]) == 3
    size = paths[1].stat().st_size
    os.truncate(paths[1], 1 << 20)
    found = inspected(paths[0], vram_gib=24.0)
    assert 0 <= size - (1 << 20) - found["file"]["missing_bytes"] < 32 and found["plan"] == whole["plan"]
    os.truncate(paths[1], 100)
    paths[2].unlink()
    found = inspected(paths[0], vram_gib=24.0)
    assert found["plan"] is None and found["file"]["missing"] == []
    assert found["file"]["absent_files"] == [str(paths[1]), str(paths[2])]
    assert found["file"]["bytes"] < whole["file"]["bytes"] / 2
    paths[0].unlink()
    with pytest.raises(ModelFormatError, match=r"00002-of-00003\.gguf: 100 bytes are there"):
        open_header(paths[1])


def test_a_type_or_a_convention_is_refused_by_the_first_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "Qwen3-30B-A3B-UD-IQ1_S"
    monkeypatch.setitem(HEADERS, name, replace(HEADERS[name], parts=2))
    first, second = published_headers.write(tmp_path, name, n_vocab=400)
    second.unlink()
    said = [error["message"] for error in inspected(first)["file"]["missing"]]
    assert len(said) == len({message.split()[-5] for message in said}) and any("type IQ1_S," in m for m in said)
    name = "MoE-with-scaled-experts"
    monkeypatch.setitem(HEADERS, name, replace(HEADERS[name], parts=2))
    first, second = published_headers.write(tmp_path, name, n_vocab=400)
    second.unlink()
    (error,) = inspected(first)["file"]["missing"]
    assert "expert_weights_scale" in error["message"]


def test_a_vocabulary_alone_is_whole(tmp_path: Path) -> None:
    """Files of a tokenizer and no tensors end without the padding that tensors would need."""
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(raw_file(raw_key("general.architecture", 8, raw_text("qwen3moe")), data=0).rstrip(b"\0"))
    with open_header(path) as file:
        assert (file.missing_bytes, file.whole_bytes) == (0, path.stat().st_size)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    closed = tmp_path / "closed.gguf"
    closed.write_bytes(tiny_path("qwen3moe").read_bytes()[:5000])
    closed.chmod(0)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:  # root may read everything
        try:
            if os.geteuid() == 0:
                tmp_path.chmod(0o755)
                os.setuid(65534)
            open_header(closed)
        except SparkError as error:
            os.write(writer, error.message.encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        assert said.read() == f"{closed}: cannot be opened: Permission denied"


def test_a_header_of_more_layers_than_any_model_has(tmp_path: Path) -> None:
    (path,) = published_headers.write(tmp_path, "deep", tiny("qwen3moe", n_layer=257), n_vocab=300)
    (error,) = inspected(path)["file"]["missing"]
    assert error["message"] == "qwen3moe.block_count is 257, more than 256"


def test_a_header_of_more_tokens_than_the_embedding_has_rows(tmp_path: Path) -> None:
    (path,) = published_headers.write(tmp_path, "short", tiny("qwen3moe"), n_vocab=302)
    (error,) = inspected(path)["file"]["missing"]
    assert error["message"] == "token_embd.weight has 301 rows, fewer than the 302 of tokenizer.ggml.tokens"


def test_a_window_that_no_layer_has_is_not_shown(tmp_path: Path) -> None:
    key, published = "attention.sliding_window_pattern", tiny("gemma4")
    for name, pattern in (("some", published.metadata[key]), ("none", [False] * len(published.metadata[key]))):
        keys = dict(published.metadata) | {key: pattern}
        (path,) = published_headers.write(tmp_path, name, replace(published, metadata=keys), n_vocab=300)
        assert ("attention.sliding_window" in inspected(path)["file"]["sizes"]) == (name == "some")


# --- mutations ----------------------------------------------------------------------------------------


def tiny(name: str, **fields: Any) -> Published:
    """A family's tiny model; fields: of its configuration, that are other there."""
    config, _ = models.find(name).tiny(np.random.default_rng(0))
    config = replace(config, **fields)
    keys = {key.removeprefix(f"{name}."): value for key, value in config.metadata().items()}
    return Published(name, keys, config.tensors(), lambda tensor, _: k_quant_mix(tensor), (0.0, 0.0))


def seeds(folder: Path) -> Iterator[tuple[Path, bytes, int]]:
    """Tiny models with a vocabulary, one in two parts among them: the (first) file, its header, and its bytes."""
    for name in models.known():
        (path,) = published_headers.write(folder, name, tiny(name), n_vocab=300)
        yield path, *_header(path)
    paths = published_headers.write(folder, "parts", replace(tiny("qwen3moe"), parts=2), n_vocab=300)
    yield paths[0], *_header(paths[0])


def _header(path: Path) -> tuple[bytes, int]:
    begin = read_header(path, partial=True).data_offset
    return path.read_bytes()[:begin], path.stat().st_size


def forge(header: bytes, draw: np.random.Generator) -> bytes:
    """A mutation of any place, or of a value of a key or a type of a tensor, which are what decides."""
    if draw.random() < 0.4:
        return mutate(header, len(header), draw)
    mutant = bytearray(header)
    names = [m.end() for m in re.finditer(rb"[a-z0-9]+\.[a-z_.]+(?=[\x04\x05\x06\x08]\0\0\0)", header)]
    tables = [m.end() for m in re.finditer(rb"blk\.\d+\.[a-z_.]+weight", header)]
    if draw.random() < 0.5:
        at = int(draw.choice(names)) + 4
        numbers = [0, 1, 2, 3, 5, 64, 256, 1000, 1 << 20, 1 << 31, (1 << 32) - 1]
        floats = [0.0, 1.0, -1.0, 2.5, 1e30, float("inf"), float("nan")]
        kind, values = ("<I", numbers) if draw.random() < 0.6 else ("<f", floats)
        mutant[at : at + 4] = struct.pack(kind, values[int(draw.integers(len(values)))])
    else:
        at = int(draw.choice(tables))
        (n_dims,) = struct.unpack_from("<I", header, at)
        place = at + 4 + int(draw.integers(n_dims + 1)) * 8
        if place == at + 4 + n_dims * 8:
            mutant[place : place + 4] = struct.pack("<I", int(draw.choice([q.value for q in QType])))
        else:
            mutant[place : place + 8] = struct.pack("<Q", int(draw.choice([0, 1, 32, 256, 512, 1 << 40])))
    return bytes(mutant)


def verdict(path: Path) -> str:
    """Why a model is refused by what loads it; empty if it is not."""
    try:
        source = open_source(EngineConfig(path))
        source.file.close()
        tokenizer.load(path)
    except SparkError as error:
        return error.message
    return ""


def told(path: Path, cap: float | None) -> str:
    """What its inspection says is missing."""
    try:
        found = inspected(path, vram_gib=cap)
        with open_header(path) as file:
            tokenizer.load(file)
    except SparkError as error:
        return error.message
    file = found["file"]
    return "; ".join(error["message"] for error in file["missing"]) or (
        "still downloading" if file["missing_bytes"] or file["absent_files"] else ""
    )


def fuzz(count: int, seed: int) -> None:
    """Compare verdicts on mutations; prints how many are accepted, the slowest, and MiB beyond what good ones take."""
    draw, slowest, accepted = np.random.default_rng(seed), 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        begun = list(seeds(Path(folder)))
        assert {(told(path, 1.0), verdict(path)) for path, _, _ in begun} == {("", "")}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for i in range(count):
            path, header, size = begun[int(draw.integers(len(begun)))]
            mutant = forge(header, draw)
            there = size if draw.random() < 0.8 else int(draw.integers(1, size))
            path.write_bytes(mutant[:there])
            os.truncate(path, there)
            start = time.perf_counter()
            try:
                said = told(path, 1.0 if draw.random() < 0.02 else None)
                slowest = max(slowest, time.perf_counter() - start)
                really = verdict(path)
                assert bool(said) == bool(really), (said, really)
                assert said.isprintable(), said
            except BaseException:
                kept = path.rename(Path(tempfile.mkdtemp()) / path.name)
                print(f"mutation {i} of seed {seed}: {kept}", file=sys.stderr)
                raise
            path.write_bytes(header)
            os.truncate(path, size)
            accepted += not said
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(accepted, slowest, used >> 10)


def run(count: int, seed: int) -> tuple[int, float, int]:
    program = ["-W", "error::RuntimeWarning", "-m", "tests.running.test_inspection"]
    command = [sys.executable, *program, str(count), str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]
    accepted, slowest, used = done.stdout.split()
    return int(accepted), float(slowest), int(used)


@pytest.mark.slow
def test_some_mutated_headers_load_as_their_inspection_says() -> None:
    accepted, slowest, used = run(200, 1)
    assert 10 < accepted < 150 and slowest < 2 and used < 300


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_thousands_of_mutated_headers_load_as_their_inspection_says() -> None:
    accepted, slowest, used = run(4000, 2)
    assert 200 < accepted < 2400 and slowest < 2 and used < 300


if __name__ == "__main__":
    probe.probe = lambda: probe.Missing("none")
    fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
