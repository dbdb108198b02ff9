"""The trained weights as a GGUF file: names and metadata of published qwen3moe files, K-quants, tokenizer inside."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as QType
from model import COARSE, Config, Model, q4_k_values
from quantizer import quantize
from streams import CONTROL_TOKENS, END, MARKUP_TOKENS, PRE, merges_of
from tokenizers import Tokenizer

NAME = "spark-nano"
PART_BYTES = 15 << 20


def tensor_type(name: str) -> QType:
    """Q4_K, with Q6_K for the down projections and both ends; F32 for norms and routers."""
    stem = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if stem in COARSE:
        return QType.Q4_K
    if stem in ("ffn_down_exps", "token_embd", "output"):
        return QType.Q6_K
    return QType.F32


def stored_values(model: Model, rounded: bool) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors to write, by name. rounded: the Q4_K ones as the last part of training saw them."""
    values = {}
    for name, parameter in model.named_parameters():
        w = parameter.detach().float()
        values[name] = (q4_k_values(w) if rounded and tensor_type(name) == QType.Q4_K else w).cpu().numpy()
    return values


def write_gguf(
    path: Path, c: Config, values: Mapping[str, npt.NDArray[np.float32]], tokenizer: Tokenizer, template: str
) -> None:
    """Write the model to `path`, atomically."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        unfinished = Path(folder) / path.name
        writer = gguf.GGUFWriter(unfinished, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN3MOE])
        _add_sizes(writer, c)
        _add_tokenizer(writer, tokenizer, template)
        for name, w in values.items():
            qtype = tensor_type(name)
            if qtype == QType.F32:
                writer.add_tensor(name, w)
            else:
                writer.add_tensor(name, quantize(w, qtype), raw_dtype=qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)


def _add_sizes(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(NAME)
    writer.add_description("Reference model of Spark, trained on the Python standard library")
    writer.add_license("PSF-2.0")
    writer.add_size_label(f"{c.n_expert}x{c.n_layer * c.n_ff_exp * c.n_embd * 3 / 1e6:.1f}M")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(c.n_layer)
    writer.add_context_length(c.n_ctx)
    writer.add_embedding_length(c.n_embd)
    writer.add_feed_forward_length(c.n_ff_exp * c.n_expert_used)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.n_head_kv)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_freq_base(c.rope_freq_base)
    writer.add_layer_norm_rms_eps(c.rms_eps)
    writer.add_expert_count(c.n_expert)
    writer.add_expert_used_count(c.n_expert_used)
    writer.add_expert_feed_forward_length(c.n_ff_exp)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, template: str) -> None:
    kinds = dict.fromkeys(CONTROL_TOKENS, gguf.TokenType.CONTROL) | dict.fromkeys(
        MARKUP_TOKENS, gguf.TokenType.USER_DEFINED
    )
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_token_merges(merges_of(tokenizer))
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
    writer.add_pad_token_id(tokenizer.token_to_id(END))
    writer.add_bos_token_id(tokenizer.token_to_id(END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)


def read_values(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The weights in a GGUF file, dequantised by the `gguf` package."""
    tensors = gguf.GGUFReader(path).tensors
    return {
        t.name: gguf.dequantize(t.data, t.tensor_type).reshape([int(n) for n in reversed(t.shape)]).astype(np.float32)
        for t in tensors
    }


def load_values(model: Model, values: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Put weights into the model, wherever its parameters live; every parameter must be there."""
    model.load_state_dict({name: torch.from_numpy(np.array(w)) for name, w in values.items()})


def split_parts(path: Path) -> list[Path]:
    """Cut a file into parts of 15 MiB beside it, to be joined by cat, and remove it."""
    data = path.read_bytes()
    parts = []
    for i, start in enumerate(range(0, len(data), PART_BYTES)):
        part = path.with_name(f"{path.name}.part{i}")
        part.write_bytes(data[start : start + PART_BYTES])
        parts.append(part)
    path.unlink()
    return parts
