"""The trained weights as a GGUF file of architecture qwen3moe, without a tokenizer: its tokens are numbers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as QType

from data.nano.model import Model
from data.nano.quantizer import fitting, quantize
from engine.ground.files import replacing
from engine.models import qwen3moe

NAME = "spark-recall"


def engine_config(model: Model) -> qwen3moe.Config:
    """What the engine reads of the file."""
    c = model.c
    return qwen3moe.Config(
        n_layer=c.n_layer, n_embd=c.n_embd, n_head=c.n_head, n_head_kv=c.n_head_kv, head_dim=c.head_dim,
        n_expert=c.n_expert, n_expert_used=c.n_expert_used, n_ff_exp=c.n_ff_exp, n_vocab=c.n_vocab,
        n_ctx_train=c.n_ctx, rope_base=c.rope_freq_base, eps=c.rms_eps,
    )  # fmt: skip


def tensor_type(name: str, cols: int, qtype: QType) -> QType:
    """F32 for norms and routers, else what is asked for where it fits."""
    return QType.F32 if "norm" in name or "ffn_gate_inp" in name else fitting(qtype, cols)


def write_model(path: Path, model: Model, qtype: QType) -> None:
    """Write the model with matrices of a type; the file is there whole, or what was there before."""
    with tempfile.TemporaryDirectory(prefix="spark-recall-") as folder:
        made = Path(folder) / path.name
        writer = gguf.GGUFWriter(made, qwen3moe.ARCH)
        writer.add_name(NAME)
        for key, value in engine_config(model).metadata().items():
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
        for name, parameter in model.named_parameters():
            values = parameter.detach().float().cpu().numpy()
            kind = tensor_type(name, values.shape[-1], qtype)
            if kind == QType.F32:
                writer.add_tensor(name, values)
            else:
                writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with replacing(path, "model") as file:
            file.write(made.read_bytes())
