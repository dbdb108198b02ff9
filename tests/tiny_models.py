"""Tiny random models on disk, and their oracle: `transformers`, in float64.

What is special to a family is in family_NAME.py: `build(config)`, the `transformers` model, and `parameter(config,
weights, name)`, the value of one of its parameters, in published files' conventions. The oracles share no code with
the engine: weights reach them through the `gguf` package's reader.
"""

from __future__ import annotations

import functools
import importlib
import math
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
from engine.formats.block_types import FLOAT_TYPES, NATIVE_TYPES
from engine.formats.quants import QTensor
from engine.models import qwen3moe
from tests.family_qwen3moe import float_logits
from tests.gguf_files import random_blocks, write_gguf

__all__ = [
    "ALL_F32", "BLOCK_TYPES", "MODELS", "SMALL", "everything", "float_logits", "k_quant_mix", "nmse", "random_path",
    "read_weights", "tiny", "tiny_path", "transformers_choices", "transformers_logits", "write_tiny",
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
BLOCK_TYPES = tuple(t for t in NATIVE_TYPES if t not in FLOAT_TYPES)


# What the published converter can fuse in one tensor, and what it always does.
QKV, GATE_UP = ("attn_qkv", ("attn_q", "attn_k", "attn_v")), ("ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps"))
FUSED = {"gemma4": (GATE_UP,)}


def fuse(tensors: Tensors, *kinds: tuple[str, tuple[str, ...]]) -> Tensors:
    """The tensors with the rows of some of every layer in one, where the layer has them all."""
    out = dict(tensors)
    for whole, parts in kinds:
        for first in [name for name in tensors if f".{parts[0]}." in name]:
            names = [first.replace(parts[0], part) for part in parts]
            if all(name in tensors for name in names):
                out[first.replace(parts[0], whole)] = np.concatenate([out.pop(name) for name in names], axis=-2)
    return out


def tiny(arch: str, seed: int = 0, **changes: Any) -> tuple[Any, Tensors]:
    """`tiny` of an architecture: configuration and tensors, which are drawn once for the tests that take the same."""
    config, tensors = _drawn(arch, seed, tuple(sorted(changes.items())))
    return config, dict(tensors)


@functools.lru_cache(maxsize=12)
def _drawn(arch: str, seed: int, changes: tuple[tuple[str, Any], ...]) -> tuple[Any, Tensors]:
    config, tensors = models.find(arch).tiny(np.random.default_rng(seed), **dict(changes))
    for values in tensors.values():
        values.flags.writeable = False
    return config, tensors


def write_tiny(
    path: Path, types=ALL_F32, seed: int = 0, arch: ModuleType = qwen3moe, variant: dict[str, Any] | None = None,
    fused: tuple[tuple[str, tuple[str, ...]], ...] | None = None, **smaller: int,
) -> Path:  # fmt: skip
    """A tiny random model of an architecture with tensors of the given types, where they fit, and no tokenizer.

    variant: fields of its configuration that are to be other than in `tiny`. fused: tensors that are in one, as the
    published converter has them by default. smaller: fields that are to be less; tensors are cut to fit.
    """
    config, tensors = tiny(arch.ARCH, seed, **(variant or {}))
    config = replace(config, **smaller)
    tensors = {name: tensors[name][tuple(map(slice, shape))] for name, shape in config.tensors().items()}
    tensors = fuse(tensors, *(FUSED.get(arch.ARCH, ()) if fused is None else fused))
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
        "laguna", {"elements": True, "windowed": (False,) * 6, "window": 0, "scaling": None, "n_dense": 2},
    ),
    "gemma4-ragged": ("gemma4", {  # rows of 704 and 2112 at a smaller size
        "n_layer": 4, "n_head_kv": (3, 1, 3, 1), "windowed": (True, False) * 2, "n_ff": (1056,) * 4, "n_ff_exp": 352,
    }),
    "gemma4-dense": ("gemma4", {**DENSE, "k_eq_v": False, "n_head_kv": (3,) * 6, "n_shared": 0}),
}  # fmt: skip


# Every kind of layer of `MODELS`, and no more of it than quantizing, oracles and emulation have time for.
_LAGUNA = {"n_layer": 3, "n_head": (20, 12, 12), "windowed": (False, True, True), "n_expert_used": 2, "n_ff": 768}
SMALL: dict[str, dict[str, Any]] = {
    "laguna": _LAGUNA,
    "gemma4": {
        "n_layer": 4, "n_head_kv": (3, 1, 3, 1), "windowed": (True, False) * 2, "n_ff": (768,) * 4, "n_expert_used": 2,
    },
    "qwen35": {"n_layer": 3, "n_ff": 512},
    "qwen35moe": {"n_layer": 3, "n_expert_used": 2, "n_ff_shared": 256},
    "qwen3moe": {"n_layer": 2, "n_expert_used": 3},
    "laguna-elements": _LAGUNA | {"windowed": (False,) * 3},  # the first two dense
    "gemma4-ragged": {"n_expert": 7, "n_expert_used": 2},
    "gemma4-dense": {"n_layer": 4, "n_head_kv": (3,) * 4, "windowed": (True, False) * 2, "n_ff": (768,) * 4},
}  # fmt: skip


_folder = tempfile.TemporaryDirectory()  # until the tests end


@functools.cache
def tiny_path(name: str, types: Any = k_quant_mix, small: bool = False) -> Path:
    """A model of `MODELS`, or NAME-fused: one with all that can be fused; written once for all tests.

    small: with the fields of `SMALL`.
    """
    arch, variant = MODELS[name.removesuffix("-fused")]
    variant = variant | SMALL[name.removesuffix("-fused")] if small else variant
    fused = (QKV, GATE_UP) if name.endswith("-fused") else None
    path = Path(tempfile.mkdtemp(dir=_folder.name)) / f"{name}.gguf"
    return write_tiny(path, types, arch=models.find(arch), variant=variant, fused=fused)


@functools.cache
def random_path(name: str, qtypes: tuple[QType, ...], steady: tuple[str, ...] = (), **changes: Any) -> Path:
    """A model of `MODELS` whose matrices have random blocks, of each of these types in turn; written once.

    steady: matrices that have the same types in every layer, these in turn. changes: fields of its configuration.
    """
    arch, variant = MODELS[name]
    rng = np.random.default_rng(3)
    config, tensors = models.find(arch).tiny(rng, **variant | changes)
    matrices = [t for t in tensors if not is_float(t)]
    for i, t in enumerate(matrices):
        turn = next((at for at, part in enumerate(steady) if f".{part}." in t), i)
        qtype, shape = qtypes[turn % len(qtypes)], tensors[t].shape
        data = random_blocks(qtype, math.prod(shape[:-1]), shape[-1], rng).reshape(-1)
        tensors[t] = QTensor(t, qtype, shape, data)
    path = Path(tempfile.mkdtemp(dir=_folder.name)) / f"{name}.gguf"
    write_gguf(path, {"general.architecture": arch, "general.name": "random", **config.metadata()}, tensors)
    return path


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


def transformers_model(config: Any, weights: Tensors) -> Any:
    """The `transformers` model with these weights, in float64."""
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
    return model


def transformers_logits(config: Any, weights: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of the `transformers` model with these weights, in float64."""
    return transformers_choices(config, weights, tokens)[0]


def transformers_choices(
    config: Any, weights: Tensors, tokens: np.ndarray, imposed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] and what its routers choose, experts [L, T, A], of the `transformers` model, in float64.

    imposed: experts [L, T, A] used in place of that choice (their weights are still computed).
    """
    model = transformers_model(config, weights)
    with torch.no_grad():
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
