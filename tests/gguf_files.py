"""Makes GGUF files and quantized data for tests and benchmarks."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QType
from gguf import GGUFValueType as ValueType

from data.nano.quantizer import quantize
from engine.formats.quants import QTensor, row_bytes

_VALUE_TYPES = {
    "uint8": ValueType.UINT8, "int8": ValueType.INT8, "uint16": ValueType.UINT16, "int16": ValueType.INT16,
    "uint32": ValueType.UINT32, "int32": ValueType.INT32, "uint64": ValueType.UINT64, "int64": ValueType.INT64,
    "float32": ValueType.FLOAT32, "float64": ValueType.FLOAT64, "bool": ValueType.BOOL,
}  # fmt: skip

# Where a block keeps its scales, and a size of them that makes weights of about +-0.05.
BLOCK_SCALES = {
    QType.Q8_0: ((0, 4e-4),), QType.Q4_0: ((0, 6e-3),), QType.Q4_1: ((0, 6e-3), (2, -5e-2)), QType.Q5_0: ((0, 3e-3),),
    QType.Q5_1: ((0, 3e-3), (2, -5e-2)), QType.Q2_K: ((80, 3e-3), (82, 4e-3)), QType.Q3_K: ((108, 8e-4),),
    QType.Q4_K: ((0, 2e-4), (2, 1.5e-3)), QType.Q5_K: ((0, 1e-4), (2, 1.5e-3)), QType.Q6_K: ((208, 3e-5),),
    QType.IQ2_XXS: ((0, 6e-4),), QType.IQ2_XS: ((0, 6e-4),), QType.IQ3_XXS: ((0, 2.5e-4),), QType.IQ4_NL: ((0, 5e-4),),
    QType.IQ3_S: ((0, 2.5e-4),), QType.IQ2_S: ((0, 6e-4),), QType.IQ4_XS: ((0, 4e-5),), QType.MXFP4: ((0, 4e-3),),
    QType.NVFP4: tuple((at, 4e-3) for at in range(4)),
}  # fmt: skip


def scale_bytes(qtype: QType, scales: np.ndarray) -> np.ndarray:
    """Scales [n] as a block of the type keeps them, uint8 [n, bytes]: an exponent, UE4M3, else binary16."""
    if qtype == QType.MXFP4:
        return (np.rint(np.log2(scales)) + 128).astype(np.uint8)[:, None]
    if qtype == QType.NVFP4:
        return gguf.quants.NVFP4.fp32_to_ue4m3((2 * scales).astype(np.float32))[:, None]
    return scales.astype(np.float16).view(np.uint8).reshape(-1, 2)


# For floats: the bits that stay random (sign, mantissa, one of the exponent) and the others.
FLOAT_BITS = {
    QType.F32: (np.uint32, np.uint32(0x80FFFFFF), np.uint32(0x3C000000)),
    QType.F16: (np.uint16, np.uint16(0x87FF), np.uint16(0x2000)),
    QType.BF16: (np.uint16, np.uint16(0x80FF), np.uint16(0x3C00)),
}

Tensor = np.ndarray | tuple[np.ndarray, QType] | QTensor
# Where the processes of a test session find what another has quantized; None: nothing is kept.
kept_in: Path | None = None


def quantized(values: np.ndarray, qtype: QType, name: str) -> np.ndarray:
    """What `quantize` makes of them, once for all tests: most models of theirs have the same few sets of values."""
    if kept_in is None or qtype in FLOAT_BITS or values.size < 1 << 12:
        return quantize(values, qtype, name=name)
    x = np.ascontiguousarray(values, np.float32)
    key = hashlib.sha1(repr((x.shape, qtype.name)).encode() + x.tobytes(), usedforsecurity=False).hexdigest()
    path = kept_in / key
    if not path.exists():
        made = quantize(x, qtype, name=name)
        own = path.with_suffix(f".{os.getpid()}")
        made.tofile(own)
        own.replace(path)
    return np.fromfile(path, np.uint8).reshape(*x.shape[:-1], row_bytes(qtype, x.shape[-1], name))


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], tensors_per_part: int = 0
) -> list[Path]:
    """Write a model, in parts of `tensors_per_part` where that is not 0; returns its files.

    metadata: as `add_keys` has it. tensors: a float array (F32), (float array, type), or a QTensor.
    """
    values = dict(metadata)
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", "tiny"), split_max_tensors=tensors_per_part)
    add_keys(writer, values)
    if "general.alignment" in values:
        writer.data_alignment = values["general.alignment"]
    for name, tensor in tensors.items():
        if isinstance(tensor, QTensor):
            data = tensor.data.reshape(*tensor.shape[:-1], tensor.row_bytes)
            writer.add_tensor(name, data, raw_dtype=tensor.qtype)
        else:
            array, qtype = tensor if isinstance(tensor, tuple) else (tensor, QType.F32)
            writer.add_tensor(name, quantized(array, qtype, name), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    files = [Path(f.name) for f in writer.fout]
    writer.close()
    return files


def add_keys(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    """Write metadata: NumPy scalars and 1-D arrays keep their type, lists are of int32, float32, bool or strings.

    int is written as uint32, as other engines want token ids and sizes, float as float32.
    """
    for key, value in values.items():
        if isinstance(value, np.ndarray):
            writer.add_key_value(key, value.tolist(), ValueType.ARRAY, _VALUE_TYPES[value.dtype.name])
        elif isinstance(value, list | tuple):
            writer.add_key_value(key, value, ValueType.ARRAY)
        elif isinstance(value, np.generic):
            writer.add_key_value(key, value.item(), _VALUE_TYPES[value.dtype.name])
        elif type(value) is int:
            writer.add_uint32(key, value)
        else:
            writer.add_key_value(key, value, ValueType.get_type(value))


def qtensor(values: np.ndarray, qtype: QType, name: str = "t") -> QTensor:
    """Float weights as a tensor of a type."""
    return QTensor(name, qtype, values.shape, quantize(values, qtype, name=name).reshape(-1))


def random_blocks(qtype: QType, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Random weights of about +-0.05, uint8 [rows, row_bytes], of any native type.

    Every bit is random except those of the scales, so all codes occur. Fast: about a second a GiB.
    """
    n_bytes = row_bytes(qtype, cols, "random")
    size = rows * n_bytes
    data = rng.integers(0, 1 << 64, -(-size // 8), np.uint64).view(np.uint8)[:size]
    if qtype in FLOAT_BITS:
        word, kept, exponent = FLOAT_BITS[qtype]
        words = data.view(word)
        words &= kept
        words |= exponent
    else:
        blocks = data.reshape(-1, gguf.GGML_QUANT_SIZES[qtype][1])
        for at, scale in BLOCK_SCALES[qtype]:
            scales = scale_bytes(qtype, rng.uniform(0.5, 1.5, len(blocks)) * scale)
            blocks[:, at : at + scales.shape[1]] = scales
    return data.reshape(rows, n_bytes)


# A small model that has a value of every type, one array of each, and experts.
METADATA = {
    "general.architecture": "qwen3moe",
    "general.name": "näno 🎈",
    "general.alignment": 64,
    "qwen3moe.block_count": 2,
    "qwen3moe.embedding_length": 256,
    "qwen3moe.attention.head_count": np.array([3, 5], np.uint32),
    "qwen3moe.expert_count": 3,
    "qwen3moe.rope.freq_base": 1e6,
    "tokenizer.ggml.tokens": ["<s>", "a", "Ġthe", "", "日本"],
    "tokenizer.ggml.add_bos_token": False,
    "t.u8": np.uint8(200),
    "t.i8": np.int8(-7),
    "t.u16": np.uint16(60000),
    "t.i16": np.int16(-30000),
    "t.i32": np.int32(-(2**31)),
    "t.u64": np.uint64(2**63 + 5),
    "t.i64": np.int64(-(2**62)),
    "t.f64": np.float64(1e300),
    "t.bools": [True, False, True],
    **{
        f"t.array.{name}": np.arange(4).astype(name)
        for name in ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64"]
    },
}


def model_tensors(seed: int = 0) -> dict:
    own = np.random.default_rng(seed)
    return {
        "token_embd.weight": (own.standard_normal((5, 256)), QType.Q6_K),
        "blk.0.ffn_gate_inp.weight": own.standard_normal((3, 256)),
        "blk.1.ffn_gate_inp.weight": own.standard_normal((3, 256)),
        "blk.1.ffn_up_exps.weight": (own.standard_normal((3, 2, 256)), QType.Q4_K),
        "output_norm.weight": own.standard_normal(256),
    }


# The format byte by byte, for files that no writer would write.


def raw_text(value: bytes | str, length: int | None = None) -> bytes:
    """A string: its length, which may be forged, and its bytes."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def raw_key(name: bytes | str, kind: int, payload: bytes) -> bytes:
    """A key and its value: the number of its type, then its bytes."""
    return raw_text(name) + struct.pack("<I", kind) + payload


def raw_tensor(name: bytes | str, dims: tuple[int, ...] = (8,), qtype: int = 0, offset: int = 0) -> bytes:
    """A row of the tensor table; dims in the file's order, fastest first."""
    return raw_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, qtype, offset)


RAW_ARCHITECTURE = raw_key("general.architecture", 8, raw_text("x"))


def raw_file(*entries: bytes, tensors: tuple[bytes, ...] = (), data: int = 256, keys: int | None = None,
             rows: int | None = None, magic: bytes = b"GGUF", version: int = 3) -> bytes:  # fmt: skip
    """A file of keys and tensor rows, and `data` zero bytes; `keys` and `rows` forge their counts."""
    n_keys = len(entries) if keys is None else keys
    n_rows = len(tensors) if rows is None else rows
    header = magic + struct.pack("<IQQ", version, n_rows, n_keys) + b"".join(entries + tensors)
    return header + bytes(-len(header) % 32) + bytes(data)
