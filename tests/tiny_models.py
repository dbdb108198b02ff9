"""Tiny random models on disk, and their oracle: `transformers`, in float64.

What is special to a family is in family_NAME.py: `build(config)`, the `transformers` model, and `parameter(config,
weights, name)`, the value of one of its parameters, in published files' conventions. The oracles share no code with
the engine: weights reach them through the `gguf` package's reader.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as QType

from data.nano.quantizer import fitting
from engine import models
from engine.models import qwen3moe
from tests.family_qwen3moe import float_logits
from tests.gguf_files import write_gguf

__all__ = [
    "ALL_F32", "MODELS", "everything", "float_logits", "k_quant_mix", "nmse", "read_weights", "tiny_path",
    "transformers_choices", "transformers_logits", "write_tiny",
]  # fmt: skip

Tensors = dict[str, np.ndarray]
DENSE = {"n_expert": 0, "n_expert_used": 0, "n_ff_exp": 0}

FLOATS = ("norm", "ffn_gate_inp", ".bias", ".scale", "ssm_a", "ssm_conv1d", "rope_freqs", "layer_output_scale")


def is_float(name: str) -> bool:
    """A vector, a router or a convolution, which every file keeps as F32."""
    return any(part in name for part in FLOATS) and "ssm_alpha" not in name


def k_quant_mix(name: str) -> QType:
    """The types of a published Q4_K_M file: Q6_K where it matters most, F32 for vectors and routers."""
    if is_float(name):
        return QType.F32
    if "ffn_down_exps" in name or name in ("output.weight", "token_embd.weight"):
        return QType.Q6_K
    return QType.Q4_K


def everything(qtype: QType):
    """Every matrix of one type."""
    return lambda name: QType.F32 if is_float(name) else qtype


ALL_F32 = everything(QType.F32)


def write_tiny(
    path: Path, types=ALL_F32, seed: int = 0, arch: ModuleType = qwen3moe, variant: dict[str, Any] | None = None,
    **smaller: int,
) -> Path:  # fmt: skip
    """A tiny random model of an architecture with tensors of the given types, where they fit, and no tokenizer.

    variant: fields of its configuration that are to be other than in `tiny`. smaller: those that are to be less;
    tensors are cut to fit.
    """
    config, tensors = arch.tiny(np.random.default_rng(seed), **(variant or {}))
    config = replace(config, **smaller)
    tensors = {name: tensors[name][tuple(map(slice, shape))] for name, shape in config.tensors().items()}
    metadata = {"general.architecture": arch.ARCH, "general.name": "tiny", **config.metadata()}
    written: dict[str, Any] = {}
    for name, values in tensors.items():
        qtype = fitting(types(name), values.shape[-1])
        factor = name.removesuffix("weight") + "scale"
        if qtype == QType.NVFP4 and factor not in tensors and name != "token_embd.weight":
            largest = np.abs(values).max(axis=(-1, -2))
            written[factor] = (largest / (6 * 448)).astype(np.float32).reshape(-1)  # as checkpoints have it
            written[factor.replace("scale", "input_scale")] = np.ones_like(written[factor])
            values = values / written[factor].reshape(*values.shape[:-2], 1, 1)
        written[name] = (values, qtype)
    write_gguf(path, metadata, written)
    return path


# Every family as `tiny` makes it, and its variants: architecture, fields of the configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in models.known()},
    "laguna-elements": (
        "laguna", {"elements": True, "windowed": (False,) * 6, "window": 0, "yarn": None, "n_dense": 2},
    ),
    "qwen35moe-fused": ("qwen35moe", {"fused": True}),
    "gemma4-ragged": ("gemma4", {  # rows of 704 and 2112 at a smaller size
        "n_layer": 4, "n_head_kv": (3, 1, 3, 1), "windowed": (True, False) * 2, "n_ff": (1056,) * 4, "n_ff_exp": 352,
        "fused": False,
    }),
    "gemma4-dense": ("gemma4", {**DENSE, "k_eq_v": False, "n_head_kv": (3,) * 6, "n_shared": 0}),
}  # fmt: skip


_folder = tempfile.TemporaryDirectory()  # until the tests end


@functools.cache
def tiny_path(name: str, types: Any = k_quant_mix) -> Path:
    """A model of `MODELS`, written once for all tests."""
    arch, variant = MODELS[name]
    path = Path(tempfile.mkdtemp(dir=_folder.name)) / f"{name}.gguf"
    return write_tiny(path, types, arch=models.find(arch), variant=variant)


def read_weights(path: Path) -> Tensors:
    """Every tensor of a file as float32, through the gguf package; NVFP4 ones times their factors."""
    reader = gguf.GGUFReader(path)
    out = {}
    for t in reader.tensors:
        shape = tuple(int(n) for n in reversed(t.shape))
        out[t.name] = gguf.dequantize(t.data, t.tensor_type).reshape(shape).astype(np.float32)
    for name in [t.name for t in reader.tensors if t.name.endswith(".input_scale")]:
        del out[name]
        base = name.removesuffix("input_scale")
        factor = out.pop(base + "scale")
        out[base + "weight"] *= factor.reshape(*(-1,) * (factor.size > 1), 1, 1)
    return out


class _Recorder(dict):
    """Weights that remember which of them were asked for."""

    def __init__(self, weights: Tensors) -> None:
        super().__init__(weights)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.used.add(name)
        return super().__getitem__(name)


def transformers_logits(config: Any, weights: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of the `transformers` model with these weights, in float64."""
    return transformers_choices(config, weights, tokens)[0]


def transformers_choices(
    config: Any, weights: Tensors, tokens: np.ndarray, imposed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] and what its routers choose, experts [L, T, A], of the `transformers` model, in float64.

    imposed: experts [L, T, A] used in place of that choice (their weights are still computed).
    """
    name = getattr(config, "arch", type(config).__module__.split(".")[-1])
    family = importlib.import_module(f"tests.family_{name}")
    model = family.build(config).double().eval()
    recorder = _Recorder(weights)
    with torch.no_grad():
        for key, parameter in model.state_dict().items():
            value = family.parameter(config, recorder, key)
            assert parameter.shape == value.shape, key
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))
        assert set(weights) - recorder.used <= {"rope_freqs.weight"}, "tensors that the oracle does not use"
        choices: list[torch.Tensor] = []
        choose = torch.topk

        def topk(scores: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
            """Every family's router picks its experts by this one call."""
            values, indices = choose(scores, k, dim=dim)
            choices.append(indices)
            if imposed is not None:
                indices = torch.from_numpy(imposed[len(choices) - 1].astype(np.int64))
                values = scores.gather(-1, indices)
            return values, indices

        torch.topk = topk
        try:
            # Hidden states are asked for because Gemma 4 with shared caches and no per-layer inputs fails without.
            logits = model(torch.from_numpy(tokens[None].astype(np.int64)), output_hidden_states=True).logits[0]
        finally:
            torch.topk = choose
    shape = (len(config.moe_layers), len(tokens), config.n_expert_used)
    return logits.numpy(), np.array([c.numpy() for c in choices], np.int64).reshape(shape)


def nmse(value: np.ndarray, oracle: np.ndarray) -> float:
    """Squared error over the oracle's squared magnitude."""
    return float(((value - oracle) ** 2).sum() / (oracle**2).sum())
