"""Synthetic models with the shapes and block types of real ones, to measure what depends on shapes alone.

    python benchmarks/full_shape.py SHAPE OUT.gguf [--mixture NAME] [--layers N]

Weights are normal with variance 1 / columns, really quantized, so that activations keep their size: the residual
stream grows by a small factor over the model, routers spread their choices and logits are as peaked as a language
model's. Quantizing 30 billion weights would take an hour; instead a few million are quantized for each block type
and row length, and every expert (every piece of a large matrix) is a run of those blocks that begins elsewhere. One
thread a core writes the file, at the speed of the disk.

The vocabulary is byte-level BPE of the right size: all bytes, pairs, triples. The text such a model writes is noise.

Shapes are those of the published configurations (docs/models.md says where they come from).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import islice, product
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QType
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data.nano.quantizer import fitting, quantize  # noqa: E402
from engine.formats.quants import row_bytes  # noqa: E402
from engine.models import gemma4, laguna, nextn, qwen3moe, qwen35, qwen35moe  # noqa: E402
from engine.models.loading import fused_parts  # noqa: E402
from tests.dflash_twin import Shape as DrafterShape  # noqa: E402
from tests.dflash_twin import random_drafter, write_drafter  # noqa: E402
from tests.gguf_files import add_keys  # noqa: E402

QWEN35: dict[str, Any] = {
    "head_dim": 256, "n_vocab": 248320, "n_ctx_train": 262144, "rope_base": 1e7, "rope_dims": 64, "interval": 4,
    "kernel": 4, "n_head_k": 16, "d_k": 128, "d_v": 128, "eps": 1e-6,
}  # fmt: skip
SHAPES: dict[str, tuple[ModuleType, Any]] = {
    "qwen3-30b-a3b": (qwen3moe, qwen3moe.Config(
        n_layer=48, n_embd=2048, n_head=32, n_head_kv=4, head_dim=128, n_expert=128, n_expert_used=8, n_ff_exp=768,
        n_vocab=151936, n_ctx_train=40960, rope_base=1e6, eps=1e-6,
    )),
    "laguna-xs2": (laguna, laguna.Config(
        n_layer=40, n_embd=2048, n_head=(48, 64, 64, 64) * 10, n_head_kv=8, head_dim=128, n_dense=1, n_ff=8192,
        n_expert=256, n_expert_used=8, n_ff_exp=512, n_ff_shared=512, n_vocab=100352, n_ctx_train=262144,
        windowed=(False, True, True, True) * 10, window=512, rope_base=5e5, rope_dims=64, rope_base_swa=1e4,
        rope_dims_swa=128, scaling=laguna.Scaling("yarn", factor=32.0, n_ctx=8192, beta_fast=64.0), eps=1e-6,
        expert_scale=2.5,
    )),
    "qwen3.6-35b-a3b": (qwen35moe, qwen35.Config(
        n_layer=40, n_embd=2048, n_head=16, n_head_kv=2, n_head_v=32, n_expert=256, n_expert_used=8, n_ff_exp=512,
        n_ff_shared=512, **QWEN35,
    )),
    "qwen3.6-27b": (qwen35, qwen35.Config(
        n_layer=64, n_embd=5120, n_head=24, n_head_kv=4, n_head_v=48, n_ff=17408, **QWEN35,
    )),
    "gemma-4-26b-a4b": (gemma4, gemma4.Config(
        n_layer=30, n_embd=2816, n_head=16, n_head_kv=(8, 8, 8, 8, 8, 2) * 5, head_dim=512, head_dim_swa=256,
        n_ff=(2112,) * 30, n_vocab=262144, n_ctx_train=262144, windowed=(True, True, True, True, True, False) * 5,
        window=1024, n_shared=0, rope_base=1e6, rope_factors=(1.0,) * 64 + (1e30,) * 192, rope_base_swa=1e4,
        rope_dims_swa=256, eps=1e-6, softcap=30.0, n_expert=128, n_expert_used=8, n_ff_exp=704,
    )),
}  # fmt: skip
# DFlash drafters: the published one of Qwen3.6-27B (5 layers, 32 and 8 heads, blocks of 16), as wide as their targets.
DRAFTERS = {
    "dflash-2048": DrafterShape(
        n_layer=5, n_embd=2048, n_head=32, n_head_kv=8, head_dim=128, n_ff=6144, n_vocab=151936, block=16, mask=151935,
        eps=1e-6, base=1e6, captured=(1, 12, 23, 34, 45), window=2048,
    ),
}  # fmt: skip
PIECE_WEIGHTS = 768 * 2048  # of a matrix that is not an expert, written at once
POOL_PIECES = 3  # a pool is that many times its longest piece
LOGIT_STD = 3.0  # of the output matrix, whose input has unit variance: about a language model's
# What attention adds is alike for all tokens, since it averages values: undamped, it grows until all route alike.
ATTENTION_GAIN = 0.2
NORM_STD = 0.1
ALIGN_BYTES = 32  # GGUF's own
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Of the usual shape: definitions of tools in front, calls as JSON between tags.
TEMPLATE = """\
{%- if tools -%}<|im_start|>system
You can call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}A call is <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>
{% endif -%}
{%- for message in messages -%}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
TypeOf = Callable[[str], QType]
Job = tuple[int, memoryview]  # where in the file, what


def q4_k_mix(name: str) -> QType:
    """Q4_K; the output matrix and every second layer's down projections Q6_K; routers and vectors F32."""
    if is_vector(name) or "ffn_gate_inp" in name:
        return QType.F32
    down = "ffn_down_exps" in name or "ffn_down.weight" in name
    if name == "output.weight" or (down and int(name.split(".")[1]) % 2 == 0):
        return QType.Q6_K
    return QType.Q4_K


def q3_k_mix(name: str) -> QType:
    """Q3_K_M, as llama.cpp's quantizer has it where there are 48 layers."""
    plain = q4_k_mix(name)
    if name == "output.weight" or plain == QType.F32:
        return plain
    first = name.split(".")[1] in ("0", "1", "2")
    if "ffn_down" in name:
        return QType.Q5_K if first else QType.Q4_K
    if "attn_v" in name:
        return QType.Q5_K if first and ".2." not in name else QType.Q4_K
    return QType.Q4_K if "attn_output" in name else QType.Q3_K


def iq2_mix(name: str) -> QType:
    """Experts of 2 bits, the first layers' down of 3, beside attention of 4: much like "dynamic" IQ2_XXS files."""
    if "ffn_gate_exps" in name or "ffn_up_exps" in name:
        return QType.IQ2_XXS
    if "ffn_down_exps" in name:
        layer = int(name.split(".")[1])
        return QType.IQ3_XXS if layer < 6 else QType.IQ2_S if layer % 2 else QType.IQ2_XXS
    return q4_k_mix(name)


MIXTURES: dict[str, TypeOf] = {"Q4_K_M": q4_k_mix, "Q3_K_M": q3_k_mix, "UD-IQ2_XXS": iq2_mix}


def mix_of(config: Any, mix: TypeOf = q4_k_mix) -> TypeOf:
    """`mix` in a file of these shapes: a tied embedding has the output matrix's type, ragged rows blocks of 32."""
    shapes = config.tensors()

    def type_of(name: str) -> QType:
        tied = name == "token_embd.weight" and "output.weight" not in shapes
        shape = shapes[name] if name in shapes else next(iter(fused_parts(shapes, name).values()))
        return fitting(mix("output.weight" if tied else name), shape[-1])

    return type_of


def first_layers(config: Any, n_layer: int) -> Any:
    """The first layers of a configuration, fields with a value for each layer cut to match."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    per_layer = {name: v for name, v in values.items() if isinstance(v, tuple) and len(v) == config.n_layer}
    return replace(config, n_layer=n_layer, **{name: value[:n_layer] for name, value in per_layer.items()})


class WithNextn:
    """A configuration whose file also has a block that predicts further tokens, behind the last layer."""

    def __init__(self, arch: ModuleType, config: Any) -> None:
        self._arch, self._config = arch, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The model's, and those of the block."""
        required, _ = nextn.shapes(self._arch, self._config, self._config.n_layer)
        return {**self._config.tensors(), **required}

    def metadata(self) -> dict[str, Any]:
        """The model's, with one block more."""
        p = self._arch.ARCH
        own = {f"{p}.block_count": self._config.n_layer + 1, f"{p}.nextn_predict_layers": 1}
        return {**self._config.metadata(), **own}


VECTORS = ("norm", ".bias", ".scale", "ssm_a", "ssm_conv1d", "rope_freqs", "layer_output_scale")


def is_vector(name: str) -> bool:
    """A tensor that every file keeps as F32 and that is not a matrix: norms, biases, scales, convolutions."""
    return any(part in name for part in VECTORS) and "ssm_alpha" not in name


def vector_values(config: Any, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Values that leave activations, decays and the spread of routers' choices as a trained model's are."""
    normal = rng.standard_normal(shape)
    if "rope_freqs" in name:
        return np.asarray(config.rope_factors)
    if "ssm_a" in name:
        return -np.exp(normal)
    if "ssm_dt" in name:
        return normal
    if "ssm_conv1d" in name:
        return normal * config.kernel**-0.5
    if "exp_probs_b" in name:
        return 0.02 * normal
    if "ffn_gate_inp.scale" in name:
        return config.n_embd**0.5 * (1 + NORM_STD * normal)  # its product with 1 / sqrt(D) has unit variance
    return np.ones(shape) if "layer_output_scale" in name else 1 + NORM_STD * normal


def published(arch: ModuleType, config: Any) -> dict[str, tuple[int, ...]]:
    """The tensors of a published file: Gemma 4's converter leaves gate and up of the experts in one."""
    shapes: dict[str, tuple[int, ...]] = config.tensors()
    for i in config.moe_layers if arch is gemma4 else ():
        gate, up = (f"blk.{i}.ffn_{part}_exps.weight" for part in ("gate", "up"))
        E, F, D = shapes.pop(gate)
        shapes[f"blk.{i}.ffn_gate_up_exps.weight"] = E, F + shapes.pop(up)[1], D
    return shapes


def write_model(
    path: Path, config: Any, types: TypeOf = q4_k_mix, seed: int = 0, shape: str = "made-up",
    arch: ModuleType = qwen3moe,
) -> int:  # fmt: skip
    """Write a model of these shapes, whole or not at all; returns its bytes. shape: what its name says it is."""
    part = path.with_name(path.name + ".part")
    try:
        offsets, end = write_outline(part, config, types, shape, arch)
        with part.open("r+b") as file, ThreadPoolExecutor(os.cpu_count()) as threads:
            jobs = _jobs(config, published(arch, config), offsets, types, seed)
            for _ in threads.map(lambda job: _write_at(file.fileno(), *job), jobs):
                pass
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return end


def write_outline(
    path: Path, config: Any, types: TypeOf, shape: str = "made-up", arch: ModuleType = qwen3moe
) -> tuple[dict[str, int], int]:
    """Write a model without its weights, a hole as large as they are; returns where each tensor lies, and its bytes."""
    shapes = published(arch, config)
    sizes = {
        name: int(np.prod(shape[:-1], dtype=np.int64)) * row_bytes(types(name), shape[-1], name)
        for name, shape in shapes.items()
    }
    end = _write_header(path, f"{shape} shapes, synthetic weights", arch, config, shapes, sizes, types)
    offsets = {}
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // ALIGN_BYTES) * ALIGN_BYTES
    os.truncate(path, end)
    return offsets, end


def _write_at(fd: int, offset: int, data: memoryview) -> None:
    while data:
        n = os.pwrite(fd, data, offset)
        data, offset = data[n:], offset + n


def _write_header(
    path: Path, name: str, arch: ModuleType, config: Any, shapes: dict[str, tuple[int, ...]], sizes: dict[str, int],
    types: TypeOf,
) -> int:  # fmt: skip
    """Write metadata and tensor table; where the tensor data begins."""
    writer = gguf.GGUFWriter(path, arch.ARCH)
    writer.add_name(name)
    add_keys(writer, config.metadata() | vocabulary(config.n_vocab))
    for tensor, shape in shapes.items():
        writer.add_tensor_info(tensor, shape, np.dtype(np.float32), sizes[tensor], raw_dtype=types(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return -(-path.stat().st_size // ALIGN_BYTES) * ALIGN_BYTES


def vocabulary(n_vocab: int) -> dict[str, Any]:
    """Metadata of a byte-level BPE tokenizer: bytes, then pairs, then triples, then three control tokens."""
    if n_vocab < 256 + len(SPECIAL):
        raise SystemExit(f"a byte-level vocabulary has at least {256 + len(SPECIAL)} tokens, not {n_vocab}")
    letters = [chr(b) for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]
    n_merges = n_vocab - 256 - len(SPECIAL)
    merges = list(islice(product(letters, letters), n_merges))
    pairs = [a + b for a, b in merges]
    merges += islice(product(pairs, letters), n_merges - len(merges))
    if len(merges) < n_merges:
        raise SystemExit(f"{n_vocab} tokens are more than bytes, pairs and triples make")
    tokens = [*letters, *(a + b for a, b in merges), *SPECIAL]
    first = len(tokens) - len(SPECIAL)
    normal, control = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [normal] * first + [control] * len(SPECIAL),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


class _Pools:
    """Quantized blocks to cut pieces from: one pool for each block type, row length and size of the weights."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._pools: dict[tuple[QType, int, float], NDArray[np.uint8]] = {}

    def cut(self, qtype: QType, columns: int, std: float, n_pieces: int, piece_rows: int) -> Iterator[memoryview]:
        """n_pieces runs of piece_rows rows, no two beginning at the same block (while the pool has others)."""
        block = gguf.GGML_QUANT_SIZES[qtype][1] if qtype != QType.F32 else 4
        size = piece_rows * row_bytes(qtype, columns, "pool")
        key = (qtype, columns, std)
        pool = self._pools.get(key)
        if pool is None or len(pool) < POOL_PIECES * size:
            values = self._rng.standard_normal((POOL_PIECES * piece_rows, columns), np.float32) * np.float32(std)
            pool = self._pools[key] = quantize(values, qtype, name="pool").reshape(-1)
        view, n_starts = memoryview(pool), (len(pool) - size) // block
        starts = self._rng.choice(n_starts, n_pieces, replace=n_pieces > n_starts)
        for start in starts.tolist():
            yield view[start * block : start * block + size]


def _jobs(
    config: Any, shapes: dict[str, tuple[int, ...]], offsets: dict[str, int], types: TypeOf, seed: int
) -> Iterator[Job]:
    """What to write where, for every tensor."""
    rng = np.random.default_rng(seed)
    pools = _Pools(rng)
    for name, shape in shapes.items():
        at = offsets[name]
        if is_vector(name):
            values = np.ascontiguousarray(vector_values(config, name, shape, rng))
            yield at, memoryview(values.astype(np.float32)).cast("B")
            continue
        columns = shape[-1]
        gain = LOGIT_STD if name == "output.weight" else ATTENTION_GAIN if "attn_output" in name else 1.0
        # An output matrix that is the embedding too has the logits' size.
        tied = "output.weight" not in shapes
        std = (LOGIT_STD * columns**-0.5 if tied else 1.0) if name == "token_embd.weight" else gain * columns**-0.5
        experts = len(shape) == 3
        rows = int(np.prod(shape[:-1]))
        piece = shape[-2] if experts else min(rows, max(1, PIECE_WEIGHTS // columns))
        pieces = pools.cut(types(name), columns, std, -(-rows // piece), piece)
        end = at + rows * row_bytes(types(name), columns, name)
        for data in pieces:
            yield at, data[: end - at]
            at += len(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=(*SHAPES, *DRAFTERS))
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--mixture", choices=MIXTURES, default="Q4_K_M", help="types of the tensors")
    parser.add_argument("--layers", type=int, metavar="N", help="the first N layers only")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of its context (default: the published)")
    parser.add_argument("--nextn", action="store_true", help="with a block that predicts tokens (qwen35, qwen35moe)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.shape in DRAFTERS:
        drafter = DRAFTERS[options.shape]
        tensors = random_drafter(drafter, np.random.default_rng(options.seed))
        write_drafter(options.out, drafter, tensors, qtype=QType.Q8_0)
        return
    (arch, config), shape = SHAPES[options.shape], options.shape
    if options.context is not None:
        config, shape = replace(config, n_ctx_train=options.context), f"{shape} (context {options.context})"
    if options.mixture != "Q4_K_M":
        shape = f"{shape} {options.mixture}"
    if options.layers is not None:
        if not 1 <= options.layers <= config.n_layer:
            parser.error(f"--layers: {options.shape} has 1 to {config.n_layer}")
        config, shape = first_layers(config, options.layers), f"{shape} ({options.layers} layers)"
    if options.nextn:
        if not hasattr(arch, "next_shapes"):
            parser.error(f"--nextn: files of {arch.ARCH} have none")
        config, shape = WithNextn(arch, config), f"{shape}, with a block that predicts"
    began = time.perf_counter()
    n_bytes = write_model(options.out, config, mix_of(config, MIXTURES[options.mixture]), options.seed, shape, arch)
    seconds = time.perf_counter() - began
    print(f"{options.out}: {n_bytes / 2**30:.2f} GiB in {seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
