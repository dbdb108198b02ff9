"""Tiny models of every family as llama.cpp's own tools write them, and what it, `transformers` and Spark compute."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import models
from engine.formats.gguf import open_model
from engine.ground.config import EngineConfig
from engine.running.loaded import Loaded, load
from engine.running.stepping import Span
from tests.tiny_models import nmse, read_weights, transformers_logits, transformers_model

WORKER = Path(__file__).with_name("llama_worker.py")
TIMEOUT_S = 300.0
# What llama.cpp wants otherwise than `tiny` has it: keys and values of a DeltaNet layer of one size; rows of Gemma 4
# that are no multiple of 256, as the published ones; the rest by its converter's own rules.
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4": {"n_ff_exp": 352, "n_ff": (1056,) * 6},
    "laguna": {},
    "qwen35": {"d_k": 128},
    "qwen35moe": {"d_k": 128},
    "qwen3moe": {},
}
MTP = ("qwen35", "qwen35moe")  # families whose published models predict further tokens
Tensors = dict[str, NDArray[np.float32]]
Logits = NDArray[Any]


class FailedError(Exception):
    """A tool of llama.cpp that ended otherwise than well, and its last words."""


@dataclass(frozen=True)
class LlamaCpp:
    """python: an interpreter that has `llama-cpp-python`; source: its source tree, where the converter is."""

    python: str
    source: Path

    def convert(self, folder: Path, out: Path, *options: str) -> Path:
        """A `transformers` model in a folder as a GGUF file, by llama.cpp's converter."""
        config = json.loads((folder / "config.json").read_text())
        (architecture,) = config["architectures"]
        _run(sys.executable, "convert", self.source, folder, out, architecture, config["vocab_size"], *options)
        return out

    def quantize(self, path: Path, out: Path, ftype: int, *, importance: bool) -> Path:
        """A file in another mixture, by llama.cpp's quantizer."""
        _run(self.python, "quantize", path, out, ftype, *(["ones"] if importance else []))
        return out

    def logits(self, path: Path, tokens: NDArray[np.int32]) -> Logits:
        """Logits float32 [T, V] of a file, by llama.cpp on one thread."""
        given, made = path.with_suffix(".tokens.npy"), path.with_suffix(".logits.npy")
        np.save(given, tokens)
        _run(self.python, "logits", path, given, made)
        found: Logits = np.load(made)
        return found

    def version(self) -> str:
        """Of the package."""
        code = "import llama_cpp; print(llama_cpp.__version__)"
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _run(python: str, *arguments: Any) -> None:
    command = [python, str(WORKER), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        raise FailedError(f"{arguments[0]} ended with {done.returncode}: {words[-1] if words else ''}")


def tiny(arch: str, **changes: Any) -> tuple[Any, Tensors]:
    """A tiny model of a family that llama.cpp can compute, too."""
    return models.find(arch).tiny(np.random.default_rng(0), **VARIANTS[arch] | changes)


def save_transformers(folder: Path, config: Any, tensors: Tensors, *, mtp: bool = False) -> Logits:
    """Write the model as `transformers` saves it, with a block that predicts further tokens if `mtp`; returns nothing."""
    import torch
    from safetensors.torch import load_file, save_file

    model = transformers_model(config, tensors).float()
    model.save_pretrained(folder)
    if mtp:
        path = folder / "model.safetensors"
        state = load_file(path)
        last = f"layers.{config.n_layer - config.n_layer % config.interval - 1}."  # of full attention
        more = {"mtp.layers.0." + k.split(last)[1]: v.clone() for k, v in state.items() if last in k}
        more |= {f"mtp.{name}.weight": torch.ones(config.n_embd) for name in ("norm", *_MTP_NORMS)}
        more["mtp.fc.weight"] = torch.ones(config.n_embd, 2 * config.n_embd)
        save_file(state | more, path, metadata={"format": "pt"})
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"mtp_num_hidden_layers": 1}))
