"""What predicts a layer's experts from a residual that enters earlier: the file of pre-gates, and the model's routers.

docs/pregate.md has the file, who writes it (`spark train-pregate`) and how good its predictors are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.formats.gguf import GGUFFile
from engine.formats.quants import dequantize
from engine.ground.errors import FileFormatError, UnsupportedModelError, WrongModelError
from engine.ground.files import open_regular

VERSION = 1
METADATA = "spark.pregate"  # the one key of the file's metadata: several would be written in any order
TRAINED = ("linear", "mlp")
ROUTER_AHEAD = 2  # MoE layers between a residual and the router that is applied to it

# Architectures with a router, and the weights of the norm before it.
_ROUTER_NORMS = {
    "qwen3moe": "ffn_norm.weight",
    "qwen35moe": "post_attention_norm.weight",
    "laguna": "ffn_norm.weight",
    "gemma4": "ffn_gate_inp.scale",  # of a norm without weights; times 1 / sqrt(D)
}
_TENSORS = {
    "linear": ("weight", "bias"),
    "mlp": ("weight", "bias", "hidden.weight", "hidden.bias", "output.weight"),
}
_AGAIN = "train it again: spark train-pregate"

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Pair = tuple[int, int]  # the layer that a residual enters, the layer whose experts are predicted; indices in the model


def default_path(model_path: Path) -> Path:
    """Where a model's pre-gates lie: `<model>.gguf.pregate.safetensors`, beside the model."""
    return model_path.parent / f"{model_path.name}.pregate.safetensors"  # `.` has no name: who reads it says what it is


def unit(x: npt.NDArray[np.float16] | F32, eps: float) -> F32:
    """Rows [T, D] scaled to a mean square of one: what every predictor takes."""
    y = x.astype(np.float32)
    y /= np.sqrt(np.einsum("td,td->t", y, y) / y.shape[1] + eps)[:, None].astype(np.float32)
    return y


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """What chooses a layer's experts, for residuals of unit mean square: the largest scores.

    weight: float32 [E, D], the weights of the norm folded in. bias: float32 [E], added to scores; None: logits choose.
    softmax: whether those scores are shares, else sigmoids.
    """

    weight: F32
    bias: F32 | None = None
    softmax: bool = False

    def scores(self, x: F32) -> F32:
        """Of rows [T, D]: float32 [T, E]."""
        logits: F32 = x @ self.weight.T
        if self.bias is None:
            return logits
        if self.softmax:
            shares = np.exp(logits - logits.max(axis=1, keepdims=True))
            return np.asarray(shares / shares.sum(axis=1, keepdims=True) + self.bias, np.float32)
        return np.asarray(0.5 * (1 + np.tanh(0.5 * logits)) + self.bias, np.float32)


def read_router(file: GGUFFile, layer: int) -> Router:
    """The router of a layer that has one; UnsupportedModelError for an architecture whose routers we don't know."""
    arch, prefix = file.architecture, f"blk.{layer}."
    if arch not in _ROUTER_NORMS:
        raise UnsupportedModelError(
            f"no pre-gate knows the router of architecture {arch!r}, only of {', '.join(_ROUTER_NORMS)}"
        )
    norm = dequantize(file.tensor(prefix + _ROUTER_NORMS[arch]))
    weight = dequantize(file.tensor(prefix + "ffn_gate_inp.weight")) * norm
    if arch == "gemma4":
        weight *= np.float32(weight.shape[1] ** -0.5)
    if prefix + "exp_probs_b.bias" not in file.tensors:
        return Router(weight)
    softmax = file.value(f"{arch}.expert_gating_func", int, 2) == 1
    return Router(weight, dequantize(file.tensor(prefix + "exp_probs_b.bias")), softmax)


def norm_epsilon(file: GGUFFile) -> float:
    """Of the norms before a model's routers."""
    return file.value(f"{file.architecture}.attention.layer_norm_rms_epsilon", float)


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A trained predictor: W x + b, of an MLP + V relu(U x + c).

    weight [E, D], bias [E]; hidden_weight [H, D], hidden_bias [H], output_weight [E, H] or None; float32.
    """

    weight: F32
    bias: F32
    hidden_weight: F32 | None = None
    hidden_bias: F32 | None = None
    output_weight: F32 | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, F32]) -> Trained:
        """From tensors by the names of the file."""
        return cls(**{name.replace(".", "_"): values for name, values in tensors.items()})

    def scores(self, x: F32) -> F32:
        """Of rows [T, D] of unit mean square: float32 [T, E]."""
        scores: F32 = x @ self.weight.T + self.bias
        if self.hidden_weight is not None and self.hidden_bias is not None and self.output_weight is not None:
            scores += np.maximum(x @ self.hidden_weight.T + self.hidden_bias, 0) @ self.output_weight.T
        return scores


@dataclass(frozen=True, slots=True)
class PregateModel:
    """The model that a file of pre-gates has to be of. layers: indices of the MoE layers."""

    model_id: str
    layers: tuple[int, ...]
    n_embd: int
    n_expert: int
    n_expert_used: int


@dataclass(frozen=True, slots=True, eq=False)
class Pregate:
    """A file of pre-gates.

    eps: of the norm of what predictors take. predictors: by kind, for each pair of layers. chances: knots and values of
    the tables (engine/placing/guesses.py: `Chances`) of these and of `router`, that also for ROUTER_AHEAD layers behind
    the first; empty in files that are older than they.
    """

    path: Path
    eps: float
    predictors: Mapping[str, Mapping[Pair, Trained]]
    chances: Mapping[str, Mapping[Pair, tuple[F64, F64]]]


def pairs(layers: Sequence[int], ahead: int = 1) -> list[Pair]:
    """Which layers' experts are predicted from the residual entering which: of the same, and of so many behind it."""
    return [(layer, target) for i, layer in enumerate(layers) for target in layers[i : i + ahead + 1]]


def read(path: Path, model: PregateModel) -> Pregate:
    """Read all of a file of pre-gates for a model; FileFormatError or WrongModelError says what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()
        with safe_open(path, "np") as file:
            known = _known(path, file.metadata() or {}, model)
            predictors = {kind: _tensors(path, file, kind, model) for kind in _list(path, known, "predictors")}
    except OSError as error:
        raise FileFormatError(f"cannot read pre-gates {path}: {error.strerror or error}", hint=_AGAIN) from error
    except SafetensorError as error:
        what = str(error).splitlines()[0]
        raise FileFormatError(f"{path} is no whole safetensors file: {what}", hint=_AGAIN) from error
    eps = known.get("eps")
    if not isinstance(eps, float) or not 0.0 <= eps < 1.0:
        raise _wrong(path, f"eps is {eps!r}, expected a small number")
    return Pregate(path, eps, predictors, _chances(path, known, model))


def hidden_units(path: Path) -> int:
    """The most hidden units of a file's MLPs, by its header; 0: it has none, or `read` refuses it."""
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()
        with safe_open(path, "np") as file:
            names = (name for name in file.keys() if name.endswith(".mlp.hidden.bias"))  # noqa: SIM118
            return max((file.get_slice(name).get_shape()[0] for name in names), default=0)
    except (FileFormatError, OSError, SafetensorError, IndexError):
        return 0


def _wrong(path: Path, what: str) -> FileFormatError:
    return FileFormatError(f"{path}: {what}", hint=_AGAIN)


def _known(path: Path, metadata: Mapping[str, str], model: PregateModel) -> dict[str, Any]:
    """What the file says of itself, which fits the model."""
    if METADATA not in metadata:
        raise _wrong(path, f"expected pre-gates, with {METADATA} in the metadata; found {sorted(metadata)[:5]}")
    try:
        known = json.loads(metadata[METADATA])
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"{METADATA} is no JSON") from error
    if not isinstance(known, dict):
        raise _wrong(path, f"{METADATA} is no JSON object")
    if known.get("version") != VERSION:
        raise _wrong(path, f"pre-gates of version {known.get('version')!r}, expected {VERSION}")
    if known.get("model_id") != model.model_id:
        raise WrongModelError(
            f"{path} holds pre-gates of model {known.get('model_id')!r}, expected {model.model_id}", hint=_AGAIN
        )
    expected = {
        "layers": list(model.layers), "n_embd": model.n_embd, "n_expert": model.n_expert,
        "n_expert_used": model.n_expert_used,
    }  # fmt: skip
    for key, value in expected.items():
        if known.get(key) != value:
            raise _wrong(path, f"{key} is {known.get(key)!r}, expected {value} as in the model")
    return known


def _list(path: Path, known: dict[str, Any], key: str) -> list[Any]:
    found = known.get(key)
    if not isinstance(found, list) or not all(kind in TRAINED for kind in found):
        raise _wrong(path, f"{key} is {found!r}, expected a list of {', '.join(TRAINED)}")
    return found


def _tensors(path: Path, file: Any, kind: str, model: PregateModel) -> dict[Pair, Trained]:
    """The predictors of a kind, their shapes checked."""
    found: dict[Pair, Trained] = {}
    there = set(file.keys())
    for layer, target in pairs(model.layers):
        prefix = f"layers.{layer}.target.{target}.{kind}."
        tensors: dict[str, F32] = {}
        E, D, H = model.n_expert, model.n_embd, 0
        for name in _TENSORS[kind]:
            if prefix + name not in there:
                raise _wrong(path, f"expected a tensor {prefix}{name}, found none")
            lies = file.get_slice(prefix + name)
            shape, kept_as = tuple(lies.get_shape()), lies.get_dtype()
            if name == "hidden.weight":
                H = shape[0] if shape else 0
            expected = {"weight": (E, D), "bias": (E,), "hidden.weight": (H, D), "hidden.bias": (H,)}.get(name, (E, H))
            if shape != expected or kept_as != "F32":
                raise _wrong(path, f"{prefix}{name} is {kept_as} {shape}, expected F32 {expected}")
            tensors[name] = file.get_tensor(prefix + name)
            if not np.isfinite(tensors[name]).all():
                raise _wrong(path, f"{prefix}{name} has values that are not finite")
        found[layer, target] = Trained.of(tensors)
    return found


def _chances(path: Path, known: dict[str, Any], model: PregateModel) -> dict[str, dict[Pair, tuple[F64, F64]]]:
    """The tables, none of them in an older file."""
    found: dict[str, dict[Pair, tuple[F64, F64]]] = {}
    expected = {kind: set(pairs(model.layers)) for kind in TRAINED} | {"router": set(pairs(model.layers, ROUTER_AHEAD))}
    given = known.get("chances", [])
    if not isinstance(given, list):
        raise _wrong(path, "chances are no list")
    for entry in given:
        try:
            pair = int(entry["layer"]), int(entry["target_layer"])
            table = np.array(entry["knots"], np.float64), np.array(entry["values"], np.float64)
            kind = str(entry["predictor"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _wrong(path, f"chances hold {str(entry)[:80]}, expected a table of a predictor") from error
        if pair not in expected.get(kind, ()) or not _rises(*table):
            raise _wrong(path, f"the chances of {kind} for layers {pair} are no table that rises from 0 to 1")
        found.setdefault(kind, {})[pair] = table
    for kind, tables in found.items():
        if set(tables) != expected[kind]:
            raise _wrong(path, f"chances of {kind} for {len(tables)} pairs of layers, expected {len(expected[kind])}")
    return found


def _rises(knots: F64, values: F64) -> bool:
    fits = knots.ndim == 1 and knots.shape == values.shape and knots.size > 0 and bool(np.isfinite(knots).all())
    return fits and bool(
        (np.diff(knots) > 0).all() and (np.diff(values) >= 0).all() and values[0] >= 0 and values[-1] <= 1
    )
