"""Tiny models of every family as llama.cpp's own tools write them, and what it, `transformers` and Spark compute."""

from __future__ import annotations

import argparse
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
from engine.models.loading import fused_parts
from engine.models.scaling import Scaling
from engine.running.forward import MAX_ROWS
from engine.running.loaded import Loaded, load
from engine.running.stepping import Span, StepResult
from tests.tiny_models import nmse, read_weights, transformers_choices, transformers_model

WORKER = Path(__file__).with_name("llama_worker.py")
TIMEOUT_S = 300.0
# What llama.cpp wants otherwise than `tiny` has it: keys and values of a DeltaNet layer of one size, the bounds of YaRN
# that it takes for Laguna whatever a file says. And rows of Gemma 4 that are no multiple of 256, as published.
YARN = Scaling("yarn", factor=4.0, n_ctx=200)
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4": {"n_ff_exp": 352, "n_ff": (1056,) * 6},
    "laguna": {"scaling": YARN},
    "qwen35": {"d_k": 128},
    "qwen35moe": {"d_k": 128},
    "qwen3moe": {},
}
MTP_KEY = "mtp_num_hidden_layers"
F32_FILE = ("--outtype", "f32")
Tensors = dict[str, NDArray[np.float32]]
Logits = NDArray[Any]
Ids = NDArray[np.int32]


def llama_options(parser: argparse.ArgumentParser) -> None:
    """Add --source, --llama and --family."""
    parser.add_argument("--source", type=Path, required=True, metavar="LLAMA_CPP", help="llama.cpp's source tree")
    parser.add_argument("--llama", default=sys.executable, metavar="PYTHON", help="has llama-cpp-python")
    parser.add_argument("--family", choices=models.known(), action="append", help="only this one")


def llama_of(options: argparse.Namespace) -> LlamaCpp:
    """What `llama_options` were given; where it lies on this machine is no part of the command that is published."""
    names = {str(options.source): "LLAMA_CPP", options.llama: "PYTHON"}
    sys.argv = [names.get(word, word) for word in sys.argv]
    return LlamaCpp(options.llama, options.source)


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
        if architecture.startswith("Qwen3_5") and MTP_KEY not in config:
            options += ("--no-nextn",)  # the converter looks for what published models have
        _run(sys.executable, "convert", self.source, folder, out, architecture, config["vocab_size"], *options)
        return out

    def quantize(self, path: Path, out: Path, ftype: int, *, importance: bool) -> Path:
        """A file in another mixture, by llama.cpp's quantizer."""
        _run(self.python, "quantize", path, out, ftype, *(["ones"] if importance else []))
        return out

    def types(self, path: Path, ftype: int, *, importance: bool) -> dict[str, str]:
        """The types that the quantizer would give the tensors of a file, whose weights are not read."""
        out = path.with_suffix(".json")
        _run(self.python, "types", path, out, ftype, *(["any"] if importance else []))
        found: dict[str, str] = json.loads(out.read_text())
        return found

    def logits(self, path: Path, tokens: Ids) -> Logits:
        """Logits float32 [T, V] of a file, by llama.cpp on one thread."""
        given, made = path.with_suffix(".tokens.npy"), path.with_suffix(".logits.npy")
        np.save(given, tokens)
        _run(self.python, "logits", path, given, made)
        found: Logits = np.load(made)
        return found

    def beside(self, path: Path, tokens: Ids, logits: Logits) -> dict[str, Any]:
        """The median over tokens of the NMSE of a token's logits beside llama.cpp's, or why it has none.

        That is the error of tokens for which no near tie of a router fell otherwise.
        """
        try:
            theirs = self.logits(path, tokens)
        except FailedError as error:
            return {"llama_cpp_fails": str(error)}
        return {"llama_cpp": float(np.median(((logits - theirs) ** 2).sum(-1) / (theirs**2).sum(-1)))}

    def version(self) -> str:
        """Of the package."""
        code = "import llama_cpp; print(llama_cpp.__version__)"
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _run(python: str, *arguments: Any) -> None:
    command = [python, str(WORKER), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise FailedError(f"{arguments[0]} took more than {TIMEOUT_S:g} s") from None
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        raise FailedError(f"{arguments[0]} ended with {done.returncode}: {words[-1] if words else ''}")


def tiny(arch: str, **changes: Any) -> tuple[Any, Tensors]:
    """A tiny model of a family that llama.cpp can compute, too."""
    return models.find(arch).tiny(np.random.default_rng(0), **VARIANTS[arch] | changes)


def save_transformers(folder: Path, config: Any, tensors: Tensors, *, mtp: bool = False) -> Path:
    """Write the model as `transformers` saves it; mtp: with a block that predicts further tokens, of attention."""
    from safetensors.numpy import load_file, save_file

    transformers_model(config, tensors).float().save_pretrained(folder)
    # One of the converters counts the rows of the embedding that have a token.
    vocabulary = {"model": {"vocab": {str(i): i for i in range(config.n_vocab)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    if mtp:
        path, settings = folder / "model.safetensors", folder / "config.json"
        state, last = load_file(path), f"layers.{config.interval - 1}."
        state |= {f"mtp.layers.0.{name.split(last)[1]}": values for name, values in state.items() if last in name}
        norm = np.ones(config.n_embd, np.float32)
        state |= {f"mtp.{name}.weight": norm for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        state["mtp.fc.weight"] = np.ones((config.n_embd, 2 * config.n_embd), np.float32)
        save_file(state, path, metadata={"format": "pt"})
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {MTP_KEY: 1}))
    return folder


def opened(path: Path, tokens: int, device: str = "cpu") -> Loaded:
    """A model in Spark, with a context for so many tokens."""
    chunk = min(tokens, MAX_ROWS)
    return load(EngineConfig(model=path, device=device, threads=1, ctx_tokens=tokens, chunk_tokens=chunk))


def step(loaded: Loaded, sequence: Any, tokens: Ids) -> StepResult:
    """A step with the logits of all its tokens."""
    return loaded.steps.run([Span(sequence, tokens, np.ones(len(tokens), bool), tuple(range(len(tokens))))])


def spark_run(path: Path, tokens: Ids, device: str = "cpu") -> tuple[Logits, NDArray[Any]]:
    """Logits float32 [T, V] and experts [L, T, A] of a file, by Spark."""
    loaded = opened(path, len(tokens), device)
    try:
        sequence, logits, experts = loaded.kv.sequence(), [], []
        for start in range(0, len(tokens), MAX_ROWS):
            made = step(loaded, sequence, tokens[start : start + MAX_ROWS])
            logits.append(np.array(made.logits))
            experts.append(np.array(made.experts))
        return np.concatenate(logits), np.concatenate(experts, axis=1)
    finally:
        loaded.close()


def beside_transformers(
    config: Any, weights: Tensors, tokens: Ids, logits: Logits, experts: NDArray[Any]
) -> dict[str, float]:
    """NMSE of logits beside the `transformers` model in float64 with the same experts imposed, and how many it chooses.

    Routers of random weights have near ties: without, the error would be that of other experts.
    """
    oracle, free = transformers_choices(config, weights, tokens, imposed=experts if experts.size else None)
    found = {"transformers": nmse(logits, oracle)}
    return found | ({"same_experts": float(np.mean(np.sort(experts) == np.sort(free)))} if experts.size else {})


def file_weights(path: Path, config: Any) -> Tensors:
    """The weights of a file, dequantized by the `gguf` package, in the shapes of the configuration's tensors."""
    shapes, found = config.tensors(), {}
    for name, values in read_weights(path).items():
        first, found[name] = 0, values
        for part, shape in fused_parts(shapes, name).items():
            found[part] = values[..., first : first + shape[-2], :]
            first += shape[-2]
    return {name: found[name].reshape(shape) for name, shape in shapes.items() if name in found}


def read_config(path: Path) -> Any:
    """What Spark reads of a file's header."""
    with open_model(path) as file:
        return models.find(file.architecture).Config.from_gguf(file)


def largest_difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Of any value of any tensor, relative to the tensor's largest; infinite where a tensor is missing."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(float(np.abs(found[k] - v).max() / np.abs(v).max()) for k, v in expected.items())
