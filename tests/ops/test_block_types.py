"""One record a block type: what a type needs is there, sizes are `gguf`'s, and a type without a record is refused."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from ctypes import c_int64
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats import block_types
from engine.formats.block_types import FLOAT_TYPES, NATIVE_TYPES, RECORDS, BlockType
from engine.formats.quants import QTensor
from engine.ground.cpu_library import BAD_TYPE, ExpertsRecord, KVRecord, MatrixRecord
from engine.ground.digest import kernels
from engine.ground.errors import SparkError, UnsupportedModelError
from engine.ground.kv_types import KV_TYPES, pair_of
from engine.memory.shape import KVGroup, group_bytes
from engine.ops import KV_BLOCK_TOKENS, arithmetic, blocks, cpu, cpu_workspace, reference
from engine.ops.cuda import library, routing
from engine.ops.cuda.counting import CountingDevice
from engine.ops.cuda.device import Module
from engine.ops.cuda.gemm import tile_bytes
from engine.ops.cuda.products import Products
from tests import gguf_files
from tests.op_cases import LIMITS, floats, weights
from tests.ops.test_ops import CASES, workspace

ROOT = Path(__file__).parents[2]
# The first type of the format that has no record, and the one that it might get.
NO_TYPE, SIZES = next((q, sizes) for q, sizes in gguf.GGML_QUANT_SIZES.items() if sizes[0] > 1 and q not in RECORDS)
NAME = NO_TYPE.name
NEW = BlockType(NAME, int(NO_TYPE), *SIZES, "WHOLE", 256, 8)
LINE = f"    X({NEW}) \\\n"


def lacks(t: BlockType) -> list[str]:
    """What a record needs besides itself and has not, each with its place."""
    qtype, is_float = QType(t.id), t.kind == "PLAIN"
    source = {p.name: p.read_text() for p in (*(ROOT / "cpu").iterdir(), *(ROOT / "cuda").iterdir())}
    written = {
        "docs/arithmetic.md": (ROOT / "docs" / "arithmetic.md").read_text().partition("\n## A row of a product")[2],
        "README.md": (ROOT / "README.md").read_text(),
    }
    parts = {
        "twin: a line of TWINS in engine/ops/blocks.py": is_float or qtype in blocks.TWINS,
        "CPU code: a format in cpu/formats.h": f"struct {t.name} : Record<SPARK_{t.name}>"
        in (source["product.h"] if is_float else source["formats.h"] + source["grid_formats.h"]),
        "CPU code: its weights in cpu/embed.cpp": f"void dequantize_{t.name}(" in source["embed.cpp"],
        "CUDA code: BlockCode in cuda/blocks.cuh": is_float or f"struct BlockCode<{t.name}>" in source["blocks.cuh"],
        "CUDA code: Format in cuda/dequantize.cuh": f"struct Format<{t.name}>" in source["dequantize.cuh"],
        "CUDA code: Element in cuda/embed.cu": f"struct Element<{t.name}>" in source["embed.cu"],
        "random blocks: a line in tests/gguf_files.py": qtype in gguf_files.BLOCK_SCALES | gguf_files.FLOAT_BITS,
        "case of an embedding": any(c.name == f"embed {t.name}" for c in CASES),
        "case of a product": any(c.name.startswith(f"product {t.name} [") for c in CASES),
        "case of an expert: a row of CASES": any(
            re.match(rf"expert_ffn (\S+/)?{t.name}[/ ]", c.name) for c in CASES
        ),
        **{f"word in {page}": bool(re.search(rf"\b{t.name}\b", text)) for page, text in written.items()},
    }  # fmt: skip
    return [f"{t.name} has no {part}" for part, there in parts.items() if not there]


@pytest.mark.parametrize("t", RECORDS.values(), ids=lambda t: t.name)
def test_a_record_is_that_of_the_format_and_has_all_that_it_needs(t: BlockType) -> None:
    qtype = QType[t.name]
    assert (qtype, (t.elements, t.n_bytes)) == (t.id, gguf.GGML_QUANT_SIZES[qtype])
    assert t.stage % t.elements == 0 == t.stage % 64 and t.stage_bytes % t.align == 0 < t.stage
    assert (t.scales > 0) == (t.kind != "PLAIN") == (qtype not in FLOAT_TYPES)
    assert lacks(t) == []
    if t.kind != "PLAIN":
        terms = blocks.integer_blocks(weights(qtype, 3, 256, 1))
        assert (terms.half_scale is not None) == (t.halves or t.kind == "SIXTEENS")
        assert terms.half_minimum is None or not (terms.half_scale is None or terms.minimum is None)


def test_a_new_record_is_told_what_it_lacks() -> None:
    found = lacks(NEW)
    assert len(found) == len(set(found)) == 12 and all(line.startswith(f"{NAME} has no ") for line in found)
    assert f"{NAME} has no CUDA code: BlockCode in cuda/blocks.cuh" in found


def test_records_are_read_as_they_are_compiled() -> None:
    """Python reads lines, the compilers macros; whatever Python would miss is an error, and the library is asked."""
    text = (block_types.FOLDER / "block_types.h").read_text()
    first = f"    X({next(iter(RECORDS.values()))})"
    assert first in text
    more = block_types.parse(text.replace(first, LINE + first))
    assert more == (NEW, *RECORDS.values())
    last = text.replace("256, 8)\n\n", "256, 8) \\\n" + LINE.rstrip("\\\n") + "\n\n")
    assert block_types.parse(last) == (*RECORDS.values(), NEW)
    twice = LINE.replace(" \\\n", f" {LINE.strip()}\n")
    for damaged in (twice, LINE.replace("256", "0x100"), "    X(Q2_K, 10, 256, 84) \\\n", "    /* */ \\\n"):
        with pytest.raises(ValueError, match=r"block_types.h: .* is not one record"):
            block_types.parse(text.replace(first, damaged + first))
    assert cpu_workspace.kernels().spark_block_types().decode().splitlines() == [str(t) for t in RECORDS.values()]


def test_a_library_with_other_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_types, "RECORDS", RECORDS | {NO_TYPE: NEW})
    cpu_workspace.kernels.cache_clear()
    with pytest.raises(SparkError, match=rf"built with other block types; they differ in {NAME}$") as caught:
        cpu.workspace(LIMITS, 1)
    assert "make setup" in str(caught.value.hint)
    monkeypatch.undo()
    cpu.workspace(LIMITS, 1).close()


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_cache_takes_the_bytes_of_its_block_type(kv_type: str) -> None:
    types = [RECORDS[QType[kind.name.upper()]] for kind in pair_of(kv_type)]
    group = KVGroup((0, 1, 2), 5, 96)
    rows = 3 * 5 * 7 * KV_BLOCK_TOKENS  # layers, heads, positions
    assert group_bytes(group, 7, kv_type) == rows * sum(96 // t.elements * t.n_bytes for t in types)


# --- types without a record -----------------------------------------------------------------------


def of_type(qtype: QType, rows: int = 2, cols: int = 256) -> QTensor:
    n, size = gguf.GGML_QUANT_SIZES[qtype]
    return QTensor("blk.3.w", qtype, (rows, cols), np.zeros(rows * cols // n * size, np.uint8))


def test_python_refuses_a_type_by_tensor_and_name() -> None:
    w, x, tokens = of_type(NO_TYPE), floats(1, 2, 256), np.zeros(2, np.int32)
    ws, device = workspace("portable"), CountingDevice()
    products = Products(device, LIMITS)
    empty = device.empty
    for call in (
        lambda: arithmetic.product(w, x),
        lambda: reference.embed(None, w, tokens, x),  # type: ignore[arg-type]
        lambda: cpu.product(ws, w, x, np.zeros((2, 2), np.float32)),
        lambda: cpu.embed(ws, w, tokens, x),
        lambda: routing.embed(device, w, empty((2,), np.int32), empty((2, 256), np.float32)),
        lambda: products.product(w, products.quantize(empty((2, 256), np.float32)), empty((2, 2), np.float32)),
        lambda: tile_bytes(NO_TYPE, 2, 64, 4),
    ):
        with pytest.raises(UnsupportedModelError, match=rf"type {NAME}, which has no kernels$") as caught:
            call()
        assert all(t.name in str(caught.value.hint) for t in NATIVE_TYPES)
    with pytest.raises(UnsupportedModelError, match=r"^tokens: .* type without kernels$"):
        cpu_workspace.check(BAD_TYPE, "tokens")


OUTPUT = 7.0
UNKNOWN = [t for t in (*range(-1, 42), 1 << 32, (1 << 32) + 12) if t not in [int(n) for n in NATIVE_TYPES]]


@pytest.mark.parametrize("number", UNKNOWN)
def test_no_entry_point_of_the_library_takes_an_unknown_type(number: int) -> None:
    """Every matrix of every operation, one after the other; outputs stay as they are."""
    ws = workspace("portable")
    good, out, x = MatrixRecord(), np.full(4096, OUTPUT, np.float32), np.ones(4096, np.float32)
    data, ints = np.zeros(1 << 16, np.uint8), np.zeros(64, np.int32)
    good.data, good.rows, good.cols, good.type = data.ctypes.data, 32, 32, int(QType.F32)
    bad = MatrixRecord(good.data, 32, 32, number)
    kv = KVRecord(data.ctypes.data, data.ctypes.data, None, None, 64, 1, 32, 0, 0)
    k, o, v, i = ws.kernels, out.ctypes.data, x.ctypes.data, ints.ctypes.data

    def m(position: int) -> list[Any]:
        """Addresses of four matrices, one of which is of the unknown type."""
        return [ctypes.addressof(bad if n == position else good) for n in range(4)]

    def bank(position: int) -> int:
        types = (c_int64 * 3)(*(number if n == position else 0 for n in range(3)))
        banks.append(ExpertsRecord(types, (c_int64 * 3)(4096, 4096, 4096), 32, 32, 1, 1, *[data.ctypes.data] * 3, 0, 0))
        return ctypes.addressof(banks[-1])

    banks: list[Any] = []
    results = [
        k.spark_product(ws.handle, m(0)[0], v, 1, o),
        k.spark_embed(ws.handle, m(0)[0], i, 1, o, 1.0),
        k.spark_attention_output(ws.handle, v, 1, m(0)[0], o, 0),
        k.spark_router(ws.handle, v, 1, v, 1e-5, m(0)[0], o, o),
        k.spark_head(ws.handle, v, 1, i, 1, v, 1e-5, m(0)[0], o, 0.0),
        k.spark_delta_output(ws.handle, v, 1, v, v, 32, 1e-5, m(0)[0], o),
        *(k.spark_delta_input(ws.handle, v, 1, v, 1e-5, *m(n), o, o, o, o) for n in range(4)),
        *(k.spark_dense_ffn(ws.handle, v, 1, *m(n), 0, o, 0) for n in range(4)),
        *(k.spark_expert_ffn(ws.handle, v, 1, 1, i, v, bank(n), i, i, o, 0) for n in range(3)),
        *(
            k.spark_attention_input(
                ws.handle, v, 1, v, 1e-5, *m(n)[:3], None, None, None, v, 1, 32, i, ctypes.addressof(kv), i, o, 32,
                m(n)[3], o,
            )
            for n in range(4)
        ),
    ]  # fmt: skip
    assert results == [BAD_TYPE] * len(results) and not data.any() and (out == OUTPUT).all()


@pytest.mark.parametrize("qtype", [t for t in NATIVE_TYPES if t not in FLOAT_TYPES], ids=lambda t: t.name)
def test_what_is_never_quantized_is_of_a_float_type(qtype: QType) -> None:
    """A router and a shared gate have no quantized activations to be multiplied with."""
    ws, x, out = workspace("portable"), np.ones((1, 256), np.float32), np.full(4096, OUTPUT, np.float32)
    gate = weights(qtype, 5, 256, 2)
    w = weights(QType.F32, 256, 256, 3)
    records = [MatrixRecord(t.data.ctypes.data, *t.shape, int(t.qtype)) for t in (w, w, w, gate)]
    up, gated = [ctypes.addressof(r) for r in records[:3]], ctypes.addressof(records[3])
    v, o = x.ctypes.data, out.ctypes.data
    assert ws.kernels.spark_router(ws.handle, v, 1, v, 1e-5, gated, o, o) == BAD_TYPE
    assert ws.kernels.spark_dense_ffn(ws.handle, v, 1, *up, gated, 0, o, 0) == BAD_TYPE
    assert (out == OUTPUT).all()


# --- a type that is added, step by step -----------------------------------------------------------


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with block_types.h that has a record more."""
    folder = tmp_path_factory.mktemp("record")
    text = (block_types.FOLDER / "block_types.h").read_text()
    (folder / "block_types.h").write_text(text.replace("BLOCK_TYPES(X) ", "BLOCK_TYPES(X) \\\n" + LINE.rstrip("\\\n ")))
    assert block_types.parse((folder / "block_types.h").read_text())[0] == NEW
    return folder


@pytest.mark.parametrize(
    ("file", "words"), [("embed.cpp", f"dequantize_{NAME}"), ("kernels.cpp", NAME), ("workspace.cpp", "")]
)
def test_the_cpu_does_not_compile_without_code_for_a_record(added: Path, file: str, words: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folders = [f"-I{added}", f"-I{block_types.FOLDER}"]  # the first has only the records
    command = ["g++", "-std=c++17", "-fsyntax-only", "-w", "-DSPARK_KERNELS=k", *folders, str(ROOT / "cpu" / file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if words:
        assert done.returncode and re.search(rf"error: ‘?.*{words}.* not declared", done.stderr), done.stderr[:2000]
    else:
        assert done.returncode == 0, done.stderr[:2000]


SMALL = {"COLS": 256, "ROWS": 1, "STAGES": 1, "TOKENS": 32, "WARPS": 4, "SHARED": 0}
PRODUCT = (*((f"TYPE{i}", NAME) for i in range(3)), *((n, str(v)) for n, v in SMALL.items()))
WIDE = (*PRODUCT[:3], *((n, "1") for n in ("GROUPS", "QUADS", "STAGES", "SHARED")), ("COLS", "256"))
MODULES = [
    Module("embed.cu", (("TYPE", NAME),)),
    Module("gemm.cu", (("TYPE", NAME), ("TOKENS", "32"), ("WARPS", "4"))),
    Module("float_product.cu", (("TYPE", NAME),)),
    Module("router.cu", (("TYPE", NAME), ("COLS", "256"))),
    Module("experts.cu", (*(("GATE", NAME), ("UP", NAME), ("DOWN_FLOAT", "0")), *PRODUCT[3:])),
    Module("product.cu", tuple((n, "1" if n == "TOKENS" else v) for n, v in PRODUCT)),
    Module("wide.cu", WIDE),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.file)
@pytest.mark.parametrize("record", [False, True], ids=["no record", "no code"])
def test_cuda_does_not_compile_a_type_without_record_or_code(module: Module, record: bool, added: Path) -> None:
    nvrtc = library.find_nvrtc()
    text = library.source(module, (added, kernels()) if record else None)
    assert text.count("#define BLOCK_TYPES(X)") == 1 and (f"X({NAME}, " in text) == record
    with pytest.raises(SparkError, match=rf"{NAME}|no code for this type|not a float type") as caught:
        nvrtc.compile(text, module, "sm_80")
    assert record or f'identifier "{NAME}" is undefined' in str(caught.value)
