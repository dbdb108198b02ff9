"""Tiny models with a block that predicts a further token, and what it computes, in float64 loops over positions.

The twin is written from the description of the files (docs/models.md) and shares no code with the engine.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.nano.quantizer import fitting
from engine import models
from engine.models import nextn
from engine.models.loading import random_tensors
from tests.gguf_files import write_gguf
from tests.tiny_models import Tensors, k_quant_mix, read_weights, transformers_model

FAMILIES = ("qwen35", "qwen35moe")
_folder = tempfile.TemporaryDirectory()  # until the tests end


def parts(arch: str, own: bool = True, **changes: Any) -> tuple[Any, dict[str, Any], Tensors]:
    """Configuration, metadata and tensors of a tiny model with a block; own: with all that is optional in it."""
    rng = np.random.default_rng(11)
    module = models.find(arch)
    config, tensors = module.tiny(rng, **changes)
    required, optional = nextn.shapes(module, config, config.n_layer)
    tensors |= random_tensors(required | (optional if own else {}), rng)
    metadata = {"general.architecture": arch, "general.name": "tiny", **config.metadata()}
    metadata |= {f"{arch}.block_count": config.n_layer + 1, f"{arch}.nextn_predict_layers": 1}
    return config, metadata, tensors


@functools.cache
def block_path(arch: str, types: Any = k_quant_mix, own: bool = True, **changes: int) -> Path:
    """Such a model in a file, with other fields than `tiny` has; written once for all tests."""
    _, metadata, tensors = parts(arch, own, **changes)
    path = Path(tempfile.mkdtemp(dir=_folder.name)) / f"{arch}.gguf"
    write_gguf(path, metadata, {name: (v, fitting(types(name), v.shape[-1])) for name, v in tensors.items()})
    return path


def apart(
    folder: Path, arch: str, types: Any = k_quant_mix, own: bool = True, name: str = "mtp-tiny.gguf",
    ends: bool = True, **changes: int,
) -> tuple[Path, Path]:  # fmt: skip
    """The same model in two files of a folder: without the block, and the block; ends: with the model's ends."""
    config, metadata, tensors = parts(arch, own, **changes)
    typed = {n: (v, fitting(types(n), v.shape[-1])) for n, v in tensors.items()}
    block = {n: v for n, v in typed.items() if n.startswith(f"blk.{config.n_layer}.")}
    model = {n: v for n, v in typed.items() if n not in block}
    alone = {"general.architecture": arch, "general.name": "tiny", **config.metadata()}
    write_gguf(folder / "tiny.gguf", alone, model)
    write_gguf(folder / name, metadata, block | {n: v for n, v in model.items() if ends and not n.startswith("blk.")})
    return folder / "tiny.gguf", folder / name


def states(config: Any, weights: Tensors, tokens: np.ndarray) -> np.ndarray:
    """The model's states [T, D] after its last norm, by `transformers` in float64."""
    own = {name: values for name, values in weights.items() if not name.startswith(f"blk.{config.n_layer}.")}
    model = transformers_model(config, own)
    with torch.no_grad():
        found = model.model(torch.from_numpy(tokens[None].astype(np.int64))).last_hidden_state
    return np.asarray(found[0].numpy())


class Twin:
    """The block, a position at a time: keys and values so far, in float64."""

    def __init__(self, config: Any, path: Path) -> None:
        self.config = config
        self.weights = {name: values.astype(np.float64) for name, values in read_weights(path).items()}
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def __getitem__(self, name: str) -> np.ndarray:
        return self.weights[f"blk.{self.config.n_layer}.{name}.weight"]

    def shared(self, name: str, of_model: str) -> np.ndarray:
        """The block's own matrix or norm, or that of the model."""
        found = self.weights.get(f"blk.{self.config.n_layer}.nextn.{name}.weight")
        return self.weights[f"{of_model}.weight"] if found is None else found

    def rms(self, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config.eps)

    def go_on(self, state: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One more position, of that state and with that token behind it: residual, state and logits."""
        embedded = self.rms(self.shared("embed_tokens", "token_embd")[token]) * self["nextn.enorm"]
        joined = np.concatenate([embedded, self.rms(state) * self["nextn.hnorm"]])
        x = self["nextn.eh_proj"] @ joined
        x = x + self.attention(self.rms(x) * self["attn_norm"])
        h = self.rms(x) * self["post_attention_norm"]
        x = x + (self.experts(h) if self.config.n_expert else ffn(h, *(self[f"ffn_{p}"] for p in PARTS)))
        state = self.rms(x) * self.shared("shared_head_norm", "output_norm")
        output = "output" if "output.weight" in self.weights else "token_embd"
        return x, state, self.shared("shared_head_head", output) @ state

    def attention(self, h: np.ndarray) -> np.ndarray:
        c = self.config
        both = (self["attn_q"] @ h).reshape(c.n_head, 2, c.head_dim)
        q = self.turned(self.rms(both[:, 0]) * self["attn_q_norm"])
        k = self.rms((self["attn_k"] @ h).reshape(c.n_head_kv, c.head_dim)) * self["attn_k_norm"]
        self.keys.append(self.turned(k))
        self.values.append((self["attn_v"] @ h).reshape(c.n_head_kv, c.head_dim))
        out = np.empty_like(q)
        for head in range(c.n_head):
            kv = head // (c.n_head // c.n_head_kv)
            scores = np.array([k[kv] @ q[head] for k in self.keys]) / np.sqrt(c.head_dim)
            chances = np.exp(scores - scores.max())
            out[head] = (chances / chances.sum()) @ np.array([v[kv] for v in self.values])
        return self["attn_output"] @ (out * sigmoid(both[:, 1])).reshape(-1)

    def turned(self, heads: np.ndarray) -> np.ndarray:
        """RoPE at the position at hand, which is as many as there were keys."""
        c, position = self.config, len(self.keys)
        half = c.rope_dims // 2
        angles = position * float(c.rope_base) ** (-2.0 * np.arange(half) / c.rope_dims)
        a, b, rest = heads[:, :half], heads[:, half : 2 * half], heads[:, 2 * half :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=1)

    def experts(self, h: np.ndarray) -> np.ndarray:
        scores = self["ffn_gate_inp"] @ h
        chosen = np.argsort(-scores)[: self.config.n_expert_used]
        weights = np.exp(scores[chosen] - scores.max())
        out = sigmoid(self["ffn_gate_inp_shexp"] @ h) * ffn(h, *(self[f"ffn_{p}_shexp"] for p in PARTS))
        for e, weight in zip(chosen, weights / weights.sum(), strict=True):
            out = out + weight * ffn(h, *(self[f"ffn_{p}_exps"][e] for p in PARTS))
        return np.asarray(out)


PARTS = ("gate", "up", "down")


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def ffn(h: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    g = gate @ h
    return np.asarray(down @ (g * sigmoid(g) * (up @ h)))
