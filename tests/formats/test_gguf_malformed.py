"""Malformed GGUF files: by hand, by hypothesis, and by ten thousand mutations of a good one.

`python -m tests.formats.test_gguf_malformed FILE COUNT` runs the mutations of a file in its own process.
"""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.formats.gguf import GGUFFile, StringArray, open_model
from engine.formats.quants import dequantize
from engine.ground.errors import ModelFormatError, SparkError
from tests.gguf_files import (
    METADATA,
    RAW_ARCHITECTURE,
    model_tensors,
    raw_file,
    raw_key,
    raw_tensor,
    raw_text,
    write_gguf,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", METADATA, model_tensors())[0]


# ---- by hand


MALFORMED = {
    "no magic": (raw_file(RAW_ARCHITECTURE, magic=b"GGML"), r"is not a GGUF file: it begins with b'GGML'"),
    "only magic": (b"GGUF", "ends inside the GGUF header"),
    "half a magic": (b"GG", "ends inside the GGUF header"),
    "version 1": (raw_file(RAW_ARCHITECTURE, version=1), "has GGUF version 1, expected 2 or 3"),
    "version 4": (raw_file(RAW_ARCHITECTURE, version=4), "has GGUF version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "key count": (raw_file(RAW_ARCHITECTURE, keys=2**63), f"the number of keys is {2**63}, but only"),
    "tensor count": (raw_file(RAW_ARCHITECTURE, rows=2**64 - 1), f"the number of tensors is {2**64 - 1}, but only"),
    "one key too many": (raw_file(RAW_ARCHITECTURE, keys=2, data=0), "key 1 has an empty name"),
    "no architecture": (raw_file(raw_key("a", 4, bytes(4))), r"key 'general\.architecture' is missing"),
    "importance matrix": (
        raw_file(raw_key("general.type", 8, raw_text("imatrix")), tensors=(raw_tensor("blk.0.attn_q.weight.in_sum2"),)),
        "is of type 'imatrix', expected a model",
    ),
    "architecture is a number": (
        raw_file(raw_key("general.architecture", 4, bytes(4))),
        r"key 'general\.architecture' is the int 0, expected str",
    ),
    "duplicate key": (raw_file(RAW_ARCHITECTURE, RAW_ARCHITECTURE), r"key 'general\.architecture' occurs twice"),
    "empty key": (raw_file(raw_key("", 4, bytes(4))), "key 0 has an empty name"),
    "key is not UTF-8": (raw_file(raw_key(b"\xff\xfe", 4, bytes(4))), r"the name of key 0 is not valid UTF-8"),
    "key is endless": (raw_file(raw_text(b"a", 2**40)), f"the length of the name of key 0 is {2**40}"),
    "key is too long": (
        raw_file(raw_key(b"k" * 70000, 4, bytes(4))),
        "the length of the name of key 0 is 70000, more than the 65535",
    ),
    "value type": (raw_file(raw_key("a", 13, bytes(8))), "key 'a' has the unknown value type 13"),
    "string length": (
        raw_file(raw_key("a.b", 8, raw_text(b"x", 2**63))),
        rf"the length of key 'a\.b' is {2**63}, but only",
    ),
    "string is not UTF-8": (
        raw_file(raw_key("a.b", 8, raw_text(b"\x80abc"))),
        r"key 'a\.b' is not valid UTF-8: b'\\x80abc'",
    ),
    "bool is 2": (raw_file(raw_key("a", 7, b"\2")), "key 'a' is a bool with the value 2"),
    "array item type": (
        raw_file(raw_key("a", 9, struct.pack("<IQ", 77, 1))),
        "the items of key 'a' has the unknown value type 77",
    ),
    "array length": (
        raw_file(raw_key("a", 9, struct.pack("<IQ", 4, 2**62))),
        f"the item count of key 'a' is {2**62}, but only",
    ),
    "array of 3 in 2 places": (
        raw_file(raw_key("a", 9, struct.pack("<IQ", 10, 3) + bytes(24)))[:-280],
        "the item count of key 'a' is 3",
    ),
    "array of bools": (
        raw_file(raw_key("a", 9, struct.pack("<IQ", 7, 2) + b"\1\3")),
        "'a' holds bools that are neither",
    ),
    "nested array": (raw_file(raw_key("a", 9, struct.pack("<IQ", 9, 1))), "key 'a' is an array of arrays"),
    "string array count": (
        raw_file(raw_key("a", 9, struct.pack("<IQ", 8, 2**61))),
        f"the item count of key 'a' is {2**61}, but only",
    ),
    "string array item": (
        raw_file(raw_key("a", 9, struct.pack("<IQ", 8, 2) + raw_text("ok") + raw_text("x", 2**64 - 1))),
        "string 1 of key 'a' reaches past byte",
    ),
    "string array ends early": (
        raw_file(raw_key("a", 9, struct.pack("<IQ", 8, 2) + raw_text("ok") + raw_text("")))[:-286],
        "string 1 of key 'a' reaches past byte",
    ),
    "duplicate tensor": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t"), raw_tensor("t", offset=32))),
        "tensor 't' occurs twice",
    ),
    "empty tensor name": (raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor(""),)), "tensor 0 has an empty name"),
    "tensor name": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor(b"\xc0"),)),
        "the name of tensor 0 is not valid UTF-8",
    ),
    "tensor name of two lines": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("a\nb"),)),
        r"the name of tensor 0 is not printable: 'a\\nb'",
    ),
    "key that clears the screen": (
        raw_file(raw_key("a\x1b[2J", 4, bytes(4))),
        r"the name of key 0 is not printable: 'a\\x1b\[2J'",
    ),
    "long tensor name": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("n" * 300),)),
        "the name of tensor 0 is 300, more than the 255",
    ),
    "no dimensions": (raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t", ()),)), "tensor 't' has 0 dimensions"),
    "five dimensions": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t", (1,) * 5),)),
        "tensor 't' has 5 dimensions",
    ),
    "forged dimensions": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_text("t") + struct.pack("<I", 2**32 - 1),)),
        "tensor 't' has 4294967295 dimensions",
    ),
    "empty dimension": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t", (8, 0)),)),
        r"tensor 't' has the empty shape \(0, 8\)",
    ),
    "dims overflow": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t", (2**62, 2**62, 4)),)),
        "tensor 't' ends at byte",
    ),
    "product wraps to 0": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t", (2**32, 2**32)),)),
        "tensor 't' ends at byte",
    ),
    "unknown type": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t", qtype=999),)),
        "tensor 't' has the unknown type 999",
    ),
    "dropped type": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t", qtype=31),)),
        r"tensor 't' has type Q4_0_4_4 \(31\)",
    ),
    "ragged row": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t", (40, 2), qtype=8),)),
        "tensor 't': a row of 40 weights is not a multiple of Q8_0's block of 32",
    ),
    "misaligned": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t", offset=8),)),
        "tensor 't' lies at offset 8, not a multiple of 32",
    ),
    "past the end": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t", offset=256),)),
        "tensor 't' ends at byte .*, but the file has",
    ),
    "offset overflow": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t", offset=2**64 - 32),)),
        "tensor 't' ends at byte",
    ),
    "overlap": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("b", offset=32), raw_tensor("a", (16,)))),
        "tensors 'a' and 'b' overlap at byte",
    ),
    "truncated table": (
        raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("t"),), data=0)[:80],
        "tensor 't' needs 20 bytes at byte",
    ),
    "alignment 0": (
        raw_file(RAW_ARCHITECTURE, raw_key("general.alignment", 4, bytes(4))),
        "is the int 0, expected a power of two",
    ),
    "alignment 48": (
        raw_file(RAW_ARCHITECTURE, raw_key("general.alignment", 4, struct.pack("<I", 48))),
        "is the int 48, expected a power of two",
    ),
    "alignment text": (
        raw_file(RAW_ARCHITECTURE, raw_key("general.alignment", 8, raw_text("32"))),
        "is the str '32', expected a power",
    ),
    "split count": (
        raw_file(RAW_ARCHITECTURE, raw_key("split.count", 8, raw_text("3"))),
        r"key 'split\.count' is the str '3'",
    ),
    "split count -1": (
        raw_file(RAW_ARCHITECTURE, raw_key("split.count", 5, b"\xff" * 4)),
        r"key 'split\.count' is the int -1",
    ),
    "split count 0": (
        raw_file(RAW_ARCHITECTURE, raw_key("split.count", 5, bytes(4))),
        r"key 'split\.count' says .* one of 0 parts",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(tmp_path: Path, name: str) -> None:
    raw, message = MALFORMED[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelFormatError, match=message) as caught:
        open_model(path)
    assert str(path) in caught.value.message


def test_the_handmade_file_is_valid_without_damage(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(raw_file(RAW_ARCHITECTURE, tensors=(raw_tensor("b", offset=32), raw_tensor("a")), data=64))
    assert open_model(path).tensors["b"].offset == path.stat().st_size - 32
    path.write_bytes(raw_file(RAW_ARCHITECTURE, raw_key("e", 9, struct.pack("<IQ", 4, 0)), data=0))
    assert len(open_model(path).metadata["e"]) == 0


def test_every_truncation_is_explained(model_path: Path, tmp_path: Path) -> None:
    raw = model_path.read_bytes()
    header = open_model(model_path).tensors["token_embd.weight"].offset
    path = tmp_path / "short.gguf"
    for size in [*range(1, header, 7), len(raw) - 1]:
        path.write_bytes(raw[:size])
        with pytest.raises(ModelFormatError, match=r"short\.gguf: "):
            open_model(path)


def test_invalid_utf8_in_a_string_array_is_found_when_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(
        raw_file(
            RAW_ARCHITECTURE,
            raw_key("v", 9, struct.pack("<IQ", 8, 3) + raw_text("ok") + raw_text(b"\xff") + raw_text("z")),
        )
    )
    strings = open_model(path).metadata["v"]
    assert strings[0] == "ok" and strings[2] == "z"
    for read in (lambda: strings[1], lambda: list(strings), lambda: strings[:2]):
        with pytest.raises(ModelFormatError, match=r"m\.gguf: key 'v': string 1 is not valid UTF-8"):
            read()


def test_things_that_are_not_model_files(tmp_path: Path) -> None:
    empty, pointer, pipe = tmp_path / "empty.gguf", tmp_path / "lfs.gguf", tmp_path / "pipe.gguf"
    empty.touch()
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    os.mkfifo(pipe)
    for path, message in [
        (empty, r"empty\.gguf: is empty"),
        (pointer, "is not a GGUF file"),
        (pipe, "is not a regular file"),
        (tmp_path, "is a directory"),
        (tmp_path / "absent.gguf", r"absent\.gguf: cannot be opened: No such file"),
        (tmp_path / "a\0b", "cannot be opened: embedded null"),
        (empty / "inside", "cannot be opened: Not a directory"),
    ]:
        with pytest.raises(ModelFormatError, match=message):
            open_model(path)
    with pytest.raises(ModelFormatError) as caught:
        open_model(pointer)
    assert "git lfs pull" in caught.value.hint


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.tuples(st.integers(0, 3), st.integers(0, 3)), body=st.binary(max_size=300))
def test_random_bytes(tmp_path: Path, counts: tuple[int, int], body: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + body)
    use(path)


# ---- ten thousand mutations


def use(path: Path) -> bool:
    """Open a file and read all of it; True if it opened. Only explained errors may come out."""
    try:
        model = open_model(path)
    except ModelFormatError:
        return False
    read_all(model)
    return True


def read_all(model: GGUFFile) -> None:
    assert len(model.file_id) == 64
    try:
        assert len(model.model_id) == 64
        for value in model.metadata.values():
            if isinstance(value, StringArray):
                list(value)
        for name in model.tensors:
            dequantize(model.tensor(name))
    except SparkError:
        pass


def mutate(raw: bytes, header: int, draw: np.random.Generator) -> bytes:
    mutant = bytearray(raw)
    kind = draw.integers(6)
    at = int(draw.integers(header if draw.random() < 0.9 else len(raw)))
    if kind == 0:
        for _ in range(draw.integers(1, 5)):
            mutant[int(draw.integers(header))] ^= 1 << int(draw.integers(8))
    elif kind == 1:
        del mutant[at:]
    elif kind == 2:  # a forged length, count or offset: eight bytes that mean something
        forged = [0, 1, 7, 2**16, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1, len(raw), len(raw) - at]
        mutant[at : at + 8] = struct.pack("<Q", forged[int(draw.integers(len(forged)))])
    elif kind == 3:  # a forged type or dimension count
        mutant[at : at + 4] = struct.pack("<I", int(draw.integers(16)))
    elif kind == 4:
        del mutant[at : at + int(draw.integers(1, 12))]
    else:
        mutant[at:at] = mutant[at : at + int(draw.integers(1, 40))]
    return bytes(mutant)


def rewrite(path: Path, raw: bytes) -> None:
    """What a file holds now; to give its room back first would take most of the time of a thousand mutations."""
    with path.open("r+b") as file:
        file.write(raw)
        file.truncate()


def fuzz(seed: Path, count: int) -> None:
    """Run `count` mutations of the file in this process, with 128 MiB of address space to spare."""
    raw = seed.read_bytes()
    header = min(t.offset for t in open_model(seed).tensors.values())
    read_all(open_model(seed))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (128 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    draw, path, opened, slowest = np.random.default_rng(1), seed.with_name("mutant.gguf"), 0, 0.0
    with path.open("wb", buffering=0) as file:  # written over: emptying a file first takes milliseconds
        for i in range(count):
            mutant = mutate(raw, header, draw)
            file.seek(0)
            file.write(mutant)
            file.truncate()
            start = time.perf_counter()
            try:
                opened += use(path)
            except BaseException:
                print(f"mutation {i}", file=sys.stderr)
                raise
            slowest = max(slowest, time.perf_counter() - start)
    print(opened, slowest)


@pytest.mark.slow
def test_ten_thousand_mutations(model_path: Path, tmp_path: Path) -> None:
    seed = tmp_path / "seed.gguf"
    seed.write_bytes(model_path.read_bytes())
    command = [sys.executable, "-W", "ignore", "-m", "tests.formats.test_gguf_malformed", str(seed), "10000"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-2000:]
    opened, slowest = run.stdout.split()
    assert 100 < int(opened) < 9000  # some mutations are harmless, most are not
    assert float(slowest) < 2


if __name__ == "__main__":
    fuzz(Path(sys.argv[1]), int(sys.argv[2]))
