"""Headers of published models: metadata and tensor tables of real shapes, and files as long as the real ones, all hole.

`python -m tests.published_headers [NAME ...]` writes them one after the other with vocabularies of the real size, runs
`spark inspect` on each, and prints what it says, in what time and memory.

Shapes are those of the published configurations, types by the rules of llama.cpp's quantizer where they are named so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QType

from benchmarks.full_shape import ALIGN_BYTES, SHAPES, is_vector, published, vocabulary
from engine.formats.quants import row_bytes

GOLDEN = Path(__file__).parent / "golden"
Shapes = Mapping[str, tuple[int, ...]]
TypeOf = Callable[[str, tuple[int, ...]], QType]
# What the quantizer takes for rows that do not fill blocks of 256.
FALLBACK = {QType.Q4_K: QType.Q5_0, QType.Q5_K: QType.Q5_1, QType.Q6_K: QType.Q8_0}


@dataclass(frozen=True)
class Published:
    """A model as somebody publishes it.

    arch, metadata: keys without the architecture's name, unless they begin with `general.` or `tokenizer.`. billions:
    parameters, and active ones, as its publisher gives them. refused: of what is missing besides types, one pattern
    each. template: a file of tests/golden. parts: files that it is split in.
    """

    arch: str
    metadata: Mapping[str, Any]
    shapes: Shapes
    types: TypeOf
    billions: tuple[float, float]
    refused: tuple[str, ...] = ()
    n_vocab: int = 151936
    template: str | None = None
    parts: int = 1


def more_bits(i: int, n: int) -> bool:
    """Layers that get better types: the first and last eighth, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def mixture(base: QType, better: QType, n_layer: int, output: QType = QType.Q6_K) -> TypeOf:
    """As Q4_K_M and Q5_K_M: V and down projections of some layers in the better type; vectors and routers F32."""

    def of(name: str, shape: tuple[int, ...]) -> QType:
        if len(shape) == 1 or is_vector(name) or "ffn_gate_inp" in name:
            return QType.F32
        block = re.match(r"blk\.(\d+)\.", name)
        favored = "attn_v" in name or "ffn_down" in name
        best = block and favored and more_bits(int(block[1]), n_layer)
        qtype = output if name == "output.weight" else better if best else base
        return FALLBACK.get(qtype, QType.IQ4_NL) if shape[-1] % gguf.GGML_QUANT_SIZES[qtype][0] else qtype

    return of


def experts_in(**types: QType) -> TypeOf:
    """Q8_0, the experts' gate, up and down in other types."""

    def of(name: str, shape: tuple[int, ...]) -> QType:
        part = re.search(r"ffn_(\w+)_exps\.weight", name)
        return types[part[1]] if part else mixture(QType.Q8_0, QType.Q8_0, 1, QType.Q8_0)(name, shape)

    return of


Q8_0 = mixture(QType.Q8_0, QType.Q8_0, 1, QType.Q8_0)


def q4_k_m(n_layer: int) -> TypeOf:
    return mixture(QType.Q4_K, QType.Q6_K, n_layer)


def ours(shape: str, types: TypeOf, billions: tuple[float, float], **more: Any) -> Published:
    """A model of a family that is implemented; more: fields of its record, or, as `config`, of its configuration."""
    arch, config = SHAPES[shape]
    config = replace(config, **more.pop("config", {}))
    metadata = {key.removeprefix(f"{arch.ARCH}."): value for key, value in config.metadata().items()}
    metadata |= more.pop("metadata", {})
    shapes = {**published(arch, config), **more.pop("shapes", {})}
    return Published(arch.ARCH, metadata, shapes, types, billions, n_vocab=config.n_vocab, **more)


def attention(p: str, d: int, heads: int, kv: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    q, k = heads * head_dim, kv * head_dim
    names = {"attn_q": (q, d), "attn_k": (k, d), "attn_v": (k, d), "attn_output": (d, q)}
    return {f"{p}attn_norm.weight": (d,), **{f"{p}{name}.weight": shape for name, shape in names.items()}}


def ffn(p: str, d: int, f: int, kind: str = "", *lead: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (*lead, f, d), "up": (*lead, f, d), "down": (*lead, d, f)}
    return {f"{p}ffn_{part}{kind}.weight": shape for part, shape in shapes.items()}


def others(
    arch: str, n_layer: int, d: int, n_vocab: int, layer: Callable[[int], Mapping[str, tuple[int, ...]]], **keys: Any
) -> dict[str, Any]:
    """The fields of a record of a family that is not implemented; layer: tensors of one."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, d), "output_norm.weight": (d,)}
    shapes |= {"output.weight": (n_vocab, d)}
    for i in range(n_layer):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer(i).items()}
    metadata = {"block_count": n_layer, "embedding_length": d, "context_length": 131072}
    metadata |= {key.replace("__", "."): value for key, value in keys.items()}
    refused = (rf"architecture is '{re.escape(arch)}'; this engine implements gemma4, ",)
    return {"arch": arch, "metadata": metadata, "shapes": shapes, "n_vocab": n_vocab, "refused": refused}


def gpt_oss(n_layer: int, n_expert: int) -> dict[str, Any]:
    d, e = 2880, n_expert

    def layer(i: int) -> dict[str, tuple[int, ...]]:
        biases = {"attn_q.bias": (4096,), "attn_k.bias": (512,), "attn_v.bias": (512,), "attn_output.bias": (d,)}
        biases |= {f"ffn_{part}_exps.bias": (e, d) for part in ("gate", "up", "down")}
        biases |= {"ffn_gate_inp.bias": (e,), "attn_sinks.weight": (64,), "post_attention_norm.weight": (d,)}
        return attention("", d, 64, 8, 64) | ffn("", d, d, "_exps", e) | {"ffn_gate_inp.weight": (e, d)} | biases

    return others(
        "gpt-oss", n_layer, d, 201088, layer, attention__head_count=64, attention__head_count_kv=8,
        attention__key_length=64, expert_count=e, expert_used_count=4, expert_feed_forward_length=d,
    )  # fmt: skip


def deepseek2_lite() -> dict[str, Any]:
    d = 2048

    def layer(i: int) -> dict[str, tuple[int, ...]]:
        mla = {
            "attn_norm.weight": (d,), "attn_q.weight": (16 * 192, d), "attn_kv_a_mqa.weight": (576, d),
            "attn_kv_a_norm.weight": (512,), "attn_kv_b.weight": (16 * 256, 512), "attn_output.weight": (d, 2048),
            "ffn_norm.weight": (d,),
        }  # fmt: skip
        if i == 0:
            return mla | ffn("", d, 10944)
        return mla | ffn("", d, 1408, "_exps", 64) | ffn("", d, 2816, "_shexp") | {"ffn_gate_inp.weight": (64, d)}

    return others(
        "deepseek2", 27, d, 102400, layer, attention__head_count=16, leading_dense_block_count=1, expert_count=64,
        expert_used_count=6, expert_shared_count=2, expert_feed_forward_length=1408, feed_forward_length=10944,
    )  # fmt: skip


def llama(n_vocab: int, n_expert: int = 0) -> dict[str, Any]:
    def layer(i: int) -> dict[str, tuple[int, ...]]:
        attended = attention("", 4096, 32, 8, 128) | {"ffn_norm.weight": (4096,)}
        if not n_expert:
            return attended | ffn("", 4096, 14336)
        return attended | ffn("", 4096, 14336, "_exps", n_expert) | {"ffn_gate_inp.weight": (n_expert, 4096)}

    keys = {"expert_count": n_expert, "expert_used_count": 2} if n_expert else {}
    return others("llama", 32, 4096, n_vocab, layer, attention__head_count=32, feed_forward_length=14336, **keys)


def projector(kind: dict[str, Any]) -> Published:
    """A vision encoder of 27 layers, 1,152 wide, and what takes its outputs to a language model's width."""
    shapes: dict[str, tuple[int, ...]] = {"v.patch_embd.weight": (1152, 3, 16, 16), "mm.0.weight": (4608, 4608)}
    for i in range(27):
        shapes |= {f"v.blk.{i}.attn_qkv.weight": (3456, 1152), f"v.blk.{i}.attn_out.weight": (1152, 1152)}
        shapes |= {f"v.blk.{i}.ffn_up.weight": (4304, 1152), f"v.blk.{i}.ffn_down.weight": (1152, 4304)}
    return Published(
        "clip", {"vision.block_count": 27, "has_vision_encoder": True, **kind}, shapes,
        lambda name, shape: QType.F16, (0.0, 0.0), (r"the file is a 'mmproj', expected a 'model'",),
    )  # fmt: skip


QWEN3, CODER = (30.5, 3.3), {"n_ctx_train": 262144, "rope_base": 1e7}
GEMMA, QWEN36 = (25.2, 3.8), (35.0, 3.0)
HEADERS: dict[str, Published] = {
    "Qwen3-30B-A3B-Q4_K_M": ours("qwen3-30b-a3b", q4_k_m(48), QWEN3),
    "Qwen3-Coder-30B-A3B-Q8_0": ours("qwen3-30b-a3b", Q8_0, QWEN3, config=CODER, template="qwen35.jinja"),
    "Qwen3-235B-A22B-Q4_K_M": ours(
        "qwen3-30b-a3b", q4_k_m(94), (235.1, 22.2), parts=3,
        config={"n_layer": 94, "n_embd": 4096, "n_head": 64, "n_ff_exp": 1536},
    ),
    "Qwen3-30B-A3B-IQ4_XS": ours("qwen3-30b-a3b", mixture(QType.IQ4_XS, QType.Q5_K, 48), QWEN3),
    "Qwen3-30B-A3B-Q3_K_M": ours("qwen3-30b-a3b", mixture(QType.Q3_K, QType.Q4_K, 48), QWEN3),
    "Qwen3-30B-A3B-UD-IQ2": ours(
        "qwen3-30b-a3b", experts_in(gate=QType.IQ2_XXS, up=QType.IQ2_S, down=QType.IQ3_XXS), QWEN3
    ),
    "Qwen3-30B-A3B-UD-IQ1_S": ours(
        "qwen3-30b-a3b", experts_in(gate=QType.IQ1_S, up=QType.IQ1_M, down=QType.IQ2_XXS), QWEN3
    ),
    "Qwen3-30B-A3B-TQ1_0": ours("qwen3-30b-a3b", mixture(QType.TQ1_0, QType.TQ1_0, 48), QWEN3),
    "Qwen3-30B-A3B-MXFP4_MOE": ours(
        "qwen3-30b-a3b", experts_in(gate=QType.MXFP4, up=QType.MXFP4, down=QType.MXFP4), QWEN3
    ),
    "Laguna-XS.2-Q4_K_M": ours("laguna-xs2", q4_k_m(40), (33.4, 3.0), template="laguna.jinja"),
    "Qwen3.6-35B-A3B-Q4_K_M": ours("qwen3.6-35b-a3b", q4_k_m(40), QWEN36, template="qwen35.jinja"),
    "Qwen3.5-35B-A3B-Q5_K_M": ours(
        "qwen3.6-35b-a3b", mixture(QType.Q5_K, QType.Q6_K, 40), QWEN36, template="qwen35.jinja",
        metadata={"block_count": 41, "nextn_predict_layers": 1},
        shapes={"blk.40.nextn.eh_proj.weight": (2048, 4096), **ffn("blk.40.", 2048, 512, "_exps", 256)},
    ),
    "Qwen3.6-27B-Q4_K_M": ours("qwen3.6-27b", q4_k_m(64), (26.9, 26.9), template="qwen35.jinja"),
    "Gemma-4-26B-A4B-Q8_0": ours("gemma-4-26b-a4b", Q8_0, GEMMA, template="gemma4.jinja"),
    "Gemma-4-26B-A4B-Q4_K_M": ours("gemma-4-26b-a4b", q4_k_m(30), GEMMA, template="gemma4.jinja"),
    "Gemma-4-26B-A4B-IQ4_XS": ours(
        "gemma-4-26b-a4b", mixture(QType.IQ4_XS, QType.Q5_K, 30), GEMMA, template="gemma4.jinja"
    ),
    "Gemma-4-26B-A4B-with-vision": ours(
        "gemma-4-26b-a4b", Q8_0, GEMMA, template="gemma4.jinja", shapes={"v.blk.0.attn_q.weight": (1152, 1152)}
    ),
    "gpt-oss-20b-MXFP4": Published(
        **gpt_oss(24, 32), types=experts_in(gate=QType.MXFP4, up=QType.MXFP4, down=QType.MXFP4), billions=(20.9, 3.6)
    ),
    "gpt-oss-120b-MXFP4": Published(
        **gpt_oss(36, 128), types=experts_in(gate=QType.MXFP4, up=QType.MXFP4, down=QType.MXFP4),
        billions=(116.8, 5.7),
    ),
    "DeepSeek-V2-Lite-Q4_K_M": Published(**deepseek2_lite(), types=q4_k_m(27), billions=(15.7, 2.7)),
    "Llama-3.1-8B-Q4_K_M": Published(**llama(128256), types=q4_k_m(32), billions=(8.0, 8.0)),
    "Mixtral-8x7B-Q4_K_M": Published(**llama(32000, 8), types=q4_k_m(32), billions=(46.7, 12.9)),
    "mmproj-F16": projector({"general.type": "mmproj"}),
    "mmproj-F16-of-2024": projector({}),
    "MoE-with-another-router": ours(
        "qwen3-30b-a3b", Q8_0, QWEN3, shapes={"blk.47.exp_probs_b.bias": (128,)},
        refused=(r"tensor blk\.47\.exp_probs_b\.bias is not part of qwen3moe",),
    ),
    "MoE-with-scaled-experts": ours(
        "qwen3-30b-a3b", Q8_0, QWEN3, metadata={"expert_weights_scale": 2.5},
        refused=("expert_weights_scale",),
    ),
    "Gemma-4-E4B": ours(
        "gemma-4-26b-a4b", Q8_0, GEMMA, metadata={"embedding_length_per_layer_input": 256}, refused=("E2B, E4B",)
    ),
}  # fmt: skip


def write(folder: Path, name: str, model: Published | None = None, n_vocab: int | None = None) -> list[Path]:
    """Write the header of a model, by default the one of that name; its files, each as long as the real one.

    n_vocab: tokens of the vocabulary.
    """
    model = HEADERS[name] if model is None else model
    tensors = list(model.shapes.items())
    per_part = -(-len(tensors) // model.parts)
    count = f"-of-{model.parts:05}.gguf"
    paths = []
    for no in range(model.parts):
        path = folder / (f"{name}-{no + 1:05}{count}" if model.parts > 1 else f"{name}.gguf")
        writer = gguf.GGUFWriter(path, model.arch)
        if no == 0:
            _metadata(writer, model, name, model.n_vocab if n_vocab is None else n_vocab)
        if model.parts > 1:
            writer.add_uint16("split.no", no)
            writer.add_uint16("split.count", model.parts)
            writer.add_int32("split.tensors.count", len(tensors))
        end = 0
        for tensor, shape in tensors[no * per_part : (no + 1) * per_part]:
            qtype = model.types(tensor, shape)
            size = prod(shape[:-1]) * row_bytes(qtype, shape[-1], tensor)
            writer.add_tensor_info(tensor, shape, np.dtype(np.float32), size, raw_dtype=qtype)
            end += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        os.truncate(path, data_offset(path) + end)
        paths.append(path)
    return paths


def data_offset(header: Path) -> int:
    """Where tensor data begins, behind a header."""
    return -(-header.stat().st_size // ALIGN_BYTES) * ALIGN_BYTES


def _metadata(writer: gguf.GGUFWriter, model: Published, name: str, n_vocab: int) -> None:
    writer.add_name(name)
    values = dict(model.metadata)
    if model.arch != "clip":
        values = vocabulary(n_vocab) | values
        if model.template is not None:
            values["tokenizer.chat_template"] = (GOLDEN / model.template).read_text()
    for key, value in values.items():
        whole = key if key.startswith(("general.", "tokenizer.")) else f"{model.arch}.{key}"
        if type(value) is int:
            writer.add_uint32(whole, value)
        else:
            writer.add_key_value(whole, value, gguf.GGUFValueType.get_type(value))


def main(names: list[str]) -> None:
    for name in names or HEADERS:
        with tempfile.TemporaryDirectory() as folder:
            path, found = write(Path(folder), name)[0], Path(folder) / "found.json"
            command = [sys.executable, "-m", "spark.cli", "inspect", str(path), "--vram", "12", "--json", str(found)]
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - began
            report = json.loads(found.read_text())
        says = "; ".join(error["message"] for error in report["missing"]) or "can be served"
        size = f"{report['bytes'] / 2**30:.1f} GiB, {report['parameters'] / 1e9:.1f} B"
        cost = f"{seconds:.1f} s, {used.ru_maxrss >> 10} MiB"
        print(f"{name}: exit {os.waitstatus_to_exitcode(status)}; {size}; {cost}; {says}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
