"""DFlash drafters for tests: random ones, and what they compute, in float64 NumPy, from the description alone.

The description (docs/models.md, "Drafters"): features of captured layers side by side -> fc -> RMS norm; each layer's
keys and values of the context are made of these, those of the block of its own normed stream; heads of Q and K are
normed and turned; the block sees the context and itself; a gated FFN; a last norm; rows 1.. of the head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as QType

from engine.formats.quants import QTensor
from tests.gguf_files import write_gguf

Tensors = dict[str, np.ndarray]
DIALECTS = ("dflash", "qwen35-dflash-draft")


@dataclass(frozen=True)
class Shape:
    """A drafter's sizes, no two of them equal. captured: of a target's layers, from 0, in the order of fc's inputs."""

    n_layer: int = 3
    n_embd: int = 256
    n_head: int = 6
    n_head_kv: int = 2
    head_dim: int = 32
    n_ff: int = 160
    n_vocab: int = 301
    block: int = 7
    mask: int = 299
    eps: float = 1e-5
    base: float = 50000.0
    captured: tuple[int, ...] = (1, 2, 0, 3)
    window: int = 0
    windowed: tuple[bool, ...] = ()
    causal: bool = False
    n_rot: int = 0  # 0: whole heads
    own: Tensors = field(default_factory=dict, compare=False)  # token_embd, output, d2t where the file has them

    def reach(self, layer: int) -> int:
        """Positions that the first token of a block sees, itself among them."""
        if self.windowed and not self.windowed[layer]:
            return max(2048, self.window)
        return self.window or 2048


def random_drafter(shape: Shape, rng: np.random.Generator) -> Tensors:
    """Random tensors by short names, norms around one."""
    s, D = shape, shape.n_embd
    q, kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim

    def matrix(n: int, k: int) -> np.ndarray:
        return (rng.standard_normal((n, k)) * 1.2 / np.sqrt(k)).astype(np.float32)

    def norm(n: int) -> np.ndarray:
        return (1 + 0.3 * rng.standard_normal(n)).astype(np.float32)

    tensors = {"fc": matrix(D, len(s.captured) * D), "hidden_norm": norm(D), "norm": norm(D)}
    for i in range(s.n_layer):
        tensors |= {
            f"{i}.attn_norm": norm(D), f"{i}.attn_q": matrix(q, D), f"{i}.attn_k": matrix(kv, D),
            f"{i}.attn_v": matrix(kv, D), f"{i}.attn_output": matrix(D, q), f"{i}.attn_q_norm": norm(s.head_dim),
            f"{i}.attn_k_norm": norm(s.head_dim), f"{i}.ffn_norm": norm(D), f"{i}.ffn_gate": matrix(s.n_ff, D),
            f"{i}.ffn_up": matrix(s.n_ff, D), f"{i}.ffn_down": matrix(D, s.n_ff),
        }  # fmt: skip
    return tensors


def metadata(shape: Shape, arch: str) -> dict[str, Any]:
    """The keys of a file in either dialect."""
    s, own = shape, {}
    own |= {
        "block_count": s.n_layer, "embedding_length": s.n_embd, "feed_forward_length": s.n_ff, "context_length": 32768,
        "attention.head_count": s.n_head, "attention.head_count_kv": s.n_head_kv, "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim, "attention.layer_norm_rms_epsilon": s.eps, "rope.freq_base": s.base,
        "vocab_size": s.n_vocab,
    }  # fmt: skip
    if s.window:
        own["attention.sliding_window"] = s.window
        own["attention.sliding_window_pattern"] = list(s.windowed or (True,) * s.n_layer)
    if s.causal:
        own["attention.causal"] = True
    if s.n_rot:
        own["rope.dimension_count"] = s.n_rot
    keys: dict[str, Any] = {"general.architecture": arch}
    if arch == "dflash":
        own |= {"block_size": s.block, "target_layers": [i + 1 for i in s.captured]}
        keys["tokenizer.ggml.mask_token_id"] = s.mask
    else:
        own |= {
            "dflash.block_size": s.block, "dflash.mask_token_id": s.mask, "dflash.n_target_layers": len(s.captured),
            "dflash.target_layer_ids": list(s.captured),
        }  # fmt: skip
    return keys | {f"{arch}.{key}": value for key, value in own.items()}


def file_tensors(shape: Shape, tensors: Tensors, arch: str) -> Tensors:
    """The same tensors by the names of a file."""
    ends = {"fc": "fc.weight", "hidden_norm": "enc.output_norm.weight", "norm": "output_norm.weight"}
    if arch != "dflash":
        ends |= {"fc": "dflash.fc.weight", "hidden_norm": "dflash.hidden_norm.weight"}
    named = {ends.get(name, f"blk.{name}.weight"): values for name, values in tensors.items()}
    return named | {name if name == "d2t" else f"{name}.weight": v for name, v in shape.own.items()}


def write_drafter(
    path: Path, shape: Shape, tensors: Tensors, arch: str = "dflash", keys: dict[str, Any] | None = None,
    extra: Tensors | None = None, qtype: QType = QType.F32,
) -> Path:  # fmt: skip
    """Write a drafter; keys: other ones, None of which are left out; extra: tensors besides."""
    written = {key: v for key, v in (metadata(shape, arch) | (keys or {})).items() if v is not None}
    named = file_tensors(shape, tensors, arch) | (extra or {})
    typed: dict[str, Any] = {name: (v, qtype) if v.ndim == 2 else v for name, v in named.items()}
    if "d2t" in typed:
        rows = named["d2t"].astype(np.int64)
        typed["d2t"] = QTensor("d2t", QType.I64, rows.shape, rows.view(np.uint8))
    write_gguf(path, written, typed)
    return path


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _turn(x: np.ndarray, positions: np.ndarray, base: float, n_rot: int) -> np.ndarray:
    """RoPE of x [T, heads, head_dim]: dimension i of the first n_rot turns with i + n_rot / 2."""
    half = n_rot // 2
    angles = positions[:, None] * base ** (-np.arange(half) / half)
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:n_rot]
    return np.concatenate([a * c - b * s, a * s + b * c, x[..., n_rot:]], -1)


def twin_logits(
    shape: Shape, tensors: Tensors, features: np.ndarray, token: int, token_embd: np.ndarray, output: np.ndarray,
    first: int = 0,
) -> np.ndarray:  # fmt: skip
    """Logits [block - 1, V] behind `token`, float64.

    features: [n, T, D] of positions first.. of the captured layers in order; the block follows.
    """
    s, w = shape, {name: v.astype(np.float64) for name, v in tensors.items()}
    n_rot, end = s.n_rot or s.head_dim, first + features.shape[1]
    joined = np.concatenate(list(features.astype(np.float64)), axis=-1)
    context = _rms(joined @ w["fc"].T, w["hidden_norm"], s.eps)
    block = np.array([token] + [s.mask] * (s.block - 1))
    at, before = np.arange(end, end + s.block), np.arange(first, end)
    x = token_embd.astype(np.float64)[block]
    for i in range(s.n_layer):
        p = f"{i}."
        h = _rms(x, w[p + "attn_norm"], s.eps)

        def heads(values: np.ndarray, name: str, positions: np.ndarray, p: str = p) -> np.ndarray:
            split = (values @ w[p + "attn_" + name].T).reshape(len(values), -1, s.head_dim)
            if name == "v":
                return split
            return _turn(_rms(split, w[f"{p}attn_{name}_norm"], s.eps), positions, s.base, n_rot)

        q = heads(h, "q", at)
        k = np.concatenate([heads(context, "k", before), heads(h, "k", at)])
        v = np.concatenate([heads(context, "v", before), heads(h, "v", at)])
        out = np.zeros((s.block, s.n_head, s.head_dim))
        positions = np.concatenate([before, at])
        for t in range(s.block):
            if s.causal:
                seen = (positions <= at[t]) & (positions > at[t] - s.reach(i))
            else:  # as the first token of the block, and all of the block
                seen = positions > end - s.reach(i)
            for head in range(s.n_head):
                group = head * s.n_head_kv // s.n_head
                scores = k[seen, group] @ q[t, head] / np.sqrt(s.head_dim)
                weights = np.exp(scores - scores.max())
                out[t, head] = weights @ v[seen, group] / weights.sum()
        x = x + out.reshape(s.block, -1) @ w[p + "attn_output"].T
        h = _rms(x, w[p + "ffn_norm"], s.eps)
        gate = h @ w[p + "ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[p + "ffn_up"].T)) @ w[p + "ffn_down"].T
    return _rms(x[1:], w["norm"], s.eps) @ output.astype(np.float64).T
