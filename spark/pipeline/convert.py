"""From the checkpoint of a DFlash drafter to a GGUF file, in llama.cpp's dialect `dflash` (docs/models.md, "Drafters").

The configuration decides every number, and what it asks for that nobody computes is refused by name. The tensors have
to be those that follow from it, each of its shape and finite. The file appears whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as QType
from gguf.gguf_writer import WriterState
from safetensors import SafetensorError, safe_open

from engine.ground.errors import ModelFormatError, UnsupportedModelError
from engine.ground.files import replacing

Progress = Callable[[int, int], None]
Quantization = Literal["Q8_0", "F16", "F32"]
ARCH = "dflash"
MAX_LAYERS, MAX_BLOCK = 256, 256  # of what engine/drafting reads
_MAX_SIZE, _MAX_NUMBER = (1 << 31) - 1, float(np.finfo(np.float32).max)  # that a key of the file can hold
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
# Of `dflash_config`, and of what says how positions turn: what is read, or changes nothing.
_OWN = {
    "mask_token_id", "target_layer_ids", "block_size", "use_swa", "swa_window_size", "causal", "input_embedding_scale",
    "final_logit_softcapping", "num_target_layers",
}  # fmt: skip
_ROPE = {
    "rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "partial_rotary_factor", "mrope_section", "mrope_interleaved",
}  # fmt: skip
# What changes the computation unless it has this value or is not there.
_NEUTRAL = {
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rope_is_neox_style": True,
    "output_multiplier": 1.0, "markov_head_type": None, "conv_kernel_size": None, "attention_value_scale": None,
    "quantization_config": None,
}  # fmt: skip
_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written: layers of the drafter, those of its target that it reads, bytes."""

    n_layer: int
    captured: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a safetensors file, and where its bytes are."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> npt.NDArray[np.float32]:
        """Its values."""
        values = np.fromfile(self.path, _DTYPES[self.dtype], prod(self.shape), offset=self.offset).reshape(self.shape)
        if self.dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)


class _Config:
    """A configuration, whose values may stand in several places; `null` is as good as nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.values = json.loads(path.read_bytes())
        except OSError as error:
            raise ModelFormatError(
                f"{path}: {error.strerror or error}", hint="name the folder of a drafter's checkpoint"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ModelFormatError(f"{path} is no JSON: {error}") from error
        if not isinstance(self.values, dict):
            raise ModelFormatError(f"{path} is no JSON object")

    def group(self, name: str) -> dict[str, Any]:
        """An object in it, empty where there is none."""
        found = self.values.get(name)
        if found is not None and not isinstance(found, dict):
            raise ModelFormatError(f"{self.path}: {name} is {found!r:.60}, expected an object")
        return found or {}

    def value(self, kind: type[Any], *names: str, default: Any = None, needed: bool = True) -> Any:
        """The value under one of `names`, `GROUP.KEY` or `KEY`; those that are there have to agree."""
        found = {}
        for name in names:
            group, _, key = name.rpartition(".")
            value = (self.group(group) if group else self.values).get(key)
            if value is not None:
                found[name] = value
        for name, value in found.items():
            fits = isinstance(value, int | float if kind is float else kind)
            if not fits or (kind in (int, float) and isinstance(value, bool)):
                raise ModelFormatError(f"{self.path}: {name} is {value!r:.60}, expected {_KINDS[kind]}")
        if len({repr(value) for value in found.values()}) > 1:
            said = ", ".join(f"{name} {value!r:.60}" for name, value in found.items())
            raise ModelFormatError(f"{self.path} says different things: {said}")
        if not found and default is None and needed:
            raise ModelFormatError(f"{self.path} has no {' or '.join(names)}")
        return next(iter(found.values()), default)

    def size(self, *names: str, least: int = 1, most: int = _MAX_SIZE, default: int | None = None) -> int:
        """A whole number from `least` to `most`."""
        value: int = self.value(int, *names, default=default)
        if not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise ModelFormatError(f"{self.path}: {names[0]} is {value!r:.60}, expected {bound}")
        return value

    def number(
        self, *names: str, above: float | None = None, least: float = -_MAX_NUMBER, default: float | None = None
    ) -> float:
        """A number that is finite, of at least `least` and above a bound."""
        value = self.value(float, *names, default=default)
        # Compared before it is converted: a whole number may lie beyond the floats.
        if not least <= value <= _MAX_NUMBER or (above is not None and value <= above):
            bound = f" above {above:g}" if above is not None else f" of at least {least:g}" if least == 0 else ""
            raise ModelFormatError(f"{self.path}: {names[0]} is {value!r:.60}, expected a number{bound}")
        return float(value)

    def missing(self, what: str) -> UnsupportedModelError:
        """The error for what is not implemented."""
        return UnsupportedModelError(f"{self.path}: a drafter with {what} is not implemented")


def convert(folder: Path, out: Path, quantization: Quantization, progress: Progress) -> Converted:
    """Write the drafter of a checkpoint's folder as GGUF, its matrices in that type, its vectors in F32.

    progress: of bytes. ModelFormatError where configuration or tensors are not what a drafter has,
    UnsupportedModelError for another kind of drafter.
    """
    config = _Config(folder / "config.json")
    keys = _keys(config)
    stored = _stored(folder)
    shapes = _shapes(config, keys, stored)
    if beyond := sorted(stored.keys() - {name for name, _ in shapes.values()}):
        raise UnsupportedModelError(f"{stored[beyond[0]].path}: tensor {beyond[0]:.80} is of no plain DFlash drafter")
    qtype = QType[quantization]
    types = {name: qtype if len(shape) == 2 else QType.F32 for name, (_, shape) in shapes.items()}
    sizes = {name: _bytes(name, shape, types[name]) for name, (_, shape) in shapes.items()}
    writer = gguf.GGUFWriter(None, ARCH)
    writer.add_string("general.name", folder.resolve().name)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif type(value) is int:
            writer.add_uint32(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, (_, shape) in shapes.items():
        writer.add_tensor_info(name, shape, np.dtype(np.float32), sizes[name], types[name])
    done = 0
    with replacing(out, "the drafter") as file:
        writer.fout, writer.state = [file], WriterState.EMPTY  # a file that is open already, under another name
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, (source, _) in shapes.items():
            writer.write_tensor_data(_packed(stored[source], source, types[name]))
            done += sizes[name]
            progress(done, sum(sizes.values()))
        n_bytes = file.tell()
    captured = tuple(i - 1 for i in keys[f"{ARCH}.target_layers"])
    return Converted(keys[f"{ARCH}.block_count"], captured, n_bytes)


# --- the configuration --------------------------------------------------------------------------------


def _keys(c: _Config) -> dict[str, Any]:
    """The keys of the file."""
    kinds = c.value(list, "architectures", default=["DFlashDraftModel"])
    if kinds != ["DFlashDraftModel"]:
        raise c.missing(f"architectures {kinds!r:.80}")
    own, rope = c.group("dflash_config"), c.group("rope_parameters") or c.group("rope_scaling")
    for name, known, said in (("dflash_config", _OWN, own), ("rope_parameters", _ROPE, rope)):
        if others := [key for key, value in said.items() if key not in known and value not in (None, False)]:
            raise c.missing(f"{name}.{others[0]:.60}")
    for name, neutral in _NEUTRAL.items():
        if c.values.get(name, neutral) not in (neutral, None):
            raise c.missing(f"{name} {c.values[name]!r:.60}")
    n_layer, n_embd, n_head = (c.size(f) for f in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    n_head_kv = c.size("num_key_value_heads", default=n_head)
    head_dim = c.size("head_dim", least=2, default=n_embd // n_head)
    if n_head % n_head_kv or head_dim % 2:
        raise ModelFormatError(f"{c.path}: {n_head} heads of {head_dim}, {n_head_kv} of KV: they do not divide evenly")
    if n_layer > MAX_LAYERS:
        raise ModelFormatError(f"{c.path}: num_hidden_layers is {n_layer}, more than {MAX_LAYERS}")
    n_vocab = c.size("vocab_size")
    if (n_draft := c.size("draft_vocab_size", default=n_vocab)) != n_vocab:
        raise c.missing(f"draft_vocab_size {n_draft} of {n_vocab}")
    mask = c.size("dflash_config.mask_token_id", "mask_token_id", least=0)
    if mask >= n_vocab:
        raise ModelFormatError(f"{c.path}: mask_token_id is {mask}, expected one of {n_vocab} tokens")
    values: dict[str, Any] = {
        "block_count": n_layer,
        "embedding_length": n_embd,
        "feed_forward_length": c.size("intermediate_size"),
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": c.number("rms_norm_eps", least=0.0),
        "vocab_size": n_vocab,
        "context_length": c.size("max_position_embeddings"),
        "block_size": c.size("dflash_config.block_size", "block_size", least=2, most=MAX_BLOCK),
        "target_layers": [i + 1 for i in _captured(c)],
    }
    values |= _positions(c, rope, head_dim) | _windows(c, n_layer)
    causal = c.value(bool, "is_causal", "dflash_config.causal", needed=False)
    if causal is not None:
        values["attention.causal"] = causal
    for key, name, least in (
        ("embedding_scale", "input_embedding_scale", -_MAX_NUMBER),
        ("final_logit_softcapping", "final_logit_softcapping", 0.0),
    ):
        names = f"dflash_config.{name}", name
        if c.value(float, *names, needed=False) is not None:
            values[key] = c.number(*names, least=least)
    return {"tokenizer.ggml.mask_token_id": mask} | {f"{ARCH}.{key}": value for key, value in values.items()}


def _captured(c: _Config) -> list[int]:
    """The layers of the target whose outputs are read, from 0."""
    names = "dflash_config.target_layer_ids", "target_layer_ids"
    layers: list[int] = c.value(list, *names)
    end = c.value(int, "num_target_layers", "dflash_config.num_target_layers", needed=False)
    if not layers or any(type(i) is not int or not 0 <= i < _MAX_SIZE for i in layers) or len({*layers}) < len(layers):
        raise ModelFormatError(f"{c.path}: target_layer_ids is {layers!r:.80}, expected different numbers from 0 on")
    if end is not None and max(layers) >= end:
        said = f"{layers!r:.80}, expected layers of {end} (num_target_layers)"
        raise ModelFormatError(f"{c.path}: target_layer_ids is {said}")
    return layers


def _positions(c: _Config, rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """How heads are turned."""
    group = "rope_parameters" if c.group("rope_parameters") else "rope_scaling"
    values: dict[str, Any] = {"rope.freq_base": c.number("rope_parameters.rope_theta", "rope_theta", above=1.0)}
    if rope.get("partial_rotary_factor") is not None:
        turned = head_dim * c.number(f"{group}.partial_rotary_factor", above=0.0)
        if turned > head_dim or int(turned) < 2 or int(turned) % 2:
            raise ModelFormatError(
                f"{c.path}: partial_rotary_factor turns {turned:g} dimensions of {head_dim}, expected an even number"
            )
        values["rope.dimension_count"] = int(turned)
    kind = c.value(str, f"{group}.rope_type", f"{group}.type", default="default")
    if kind == "default":
        return values
    if kind not in ("linear", "yarn"):
        raise c.missing(f"positions scaled by {kind!r:.40}")
    values |= {"rope.scaling.type": kind, "rope.scaling.factor": c.number(f"{group}.factor", above=0.0)}
    if kind == "yarn":
        values["rope.scaling.original_context_length"] = c.size(f"{group}.original_max_position_embeddings")
        for speed, default in (("fast", 32.0), ("slow", 1.0)):
            values[f"rope.scaling.yarn_beta_{speed}"] = c.number(f"{group}.beta_{speed}", above=0.0, default=default)
    return values


def _windows(c: _Config, n_layer: int) -> dict[str, Any]:
    """Which layers have a window."""
    everywhere = c.value(bool, "dflash_config.use_swa", default=False)
    if not everywhere and not c.value(bool, "use_sliding_window", default=False):
        return {}
    window = c.size("dflash_config.swa_window_size" if everywhere else "sliding_window")
    kinds = c.value(list, "layer_types", default=[] if everywhere else None)
    pattern = [True] * n_layer if everywhere else [kind == "sliding_attention" for kind in kinds]
    if len(pattern) != n_layer or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ModelFormatError(f"{c.path}: layer_types is {kinds!r:.80}, expected a kind of attention for {n_layer}")
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": pattern}


# --- the tensors --------------------------------------------------------------------------------------


def _stored(folder: Path) -> dict[str, _Stored]:
    """The tensors of all safetensors files of a folder, by names without `model.`."""
    found: dict[str, _Stored] = {}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelFormatError(f"{folder} has no safetensors file", hint="name the folder of a drafter's checkpoint")
    if (beside := folder / "mask_embedding.pt").exists():
        raise UnsupportedModelError(f"{beside}: a drafter with a mask of its own is not implemented")
    for path in paths:
        for name, tensor in _of_file(path):
            short = name.removeprefix("model.")
            if short in found:
                raise ModelFormatError(f"{path}: tensor {name:.80} is also in {found[short].path}")
            if tensor.dtype not in _DTYPES:
                known = ", ".join(_DTYPES)
                raise UnsupportedModelError(f"{path}: tensor {name:.80} is {tensor.dtype}, expected one of {known}")
            found[short] = tensor
    return found


def _of_file(path: Path) -> Iterator[tuple[str, _Stored]]:
    """The tensors of a file, whose header the package has checked; NumPy has no BF16, so bytes are read here."""
    try:
        with safe_open(path, "np"), path.open("rb") as file:
            n = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(n))
    except (SafetensorError, OSError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelFormatError(f"{path} is no whole safetensors file: {first}", hint="download it again") from error
    for name, row in header.items():
        if name != "__metadata__":
            yield name, _Stored(path, row["dtype"], tuple(row["shape"]), 8 + n + row["data_offsets"][0])


def _shapes(c: _Config, keys: dict[str, Any], stored: dict[str, _Stored]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of the file: which of the checkpoint it is, and the shape that it has to have."""
    n = {key.removeprefix(f"{ARCH}."): value for key, value in keys.items()}
    D, F, V, dim = n["embedding_length"], n["feed_forward_length"], n["vocab_size"], n["attention.key_length"]
    q, kv = n["attention.head_count"] * dim, n["attention.head_count_kv"] * dim
    sizes = {
        "attn_q": (q, D), "attn_k": (kv, D), "attn_v": (kv, D), "attn_output": (D, q), "attn_q_norm": (dim,),
        "attn_k_norm": (dim,), "attn_norm": (D,), "ffn_norm": (D,), "ffn_gate": (F, D), "ffn_up": (F, D),
        "ffn_down": (D, F),
    }  # fmt: skip
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "fc.weight": ("fc.weight", (D, len(n["target_layers"]) * D)),
        "enc.output_norm.weight": ("hidden_norm.weight", (D,)),
        "output_norm.weight": ("norm.weight", (D,)),
    }
    if "embed_tokens.weight" in stored:
        shapes["token_embd.weight"] = "embed_tokens.weight", (V, D)
    if "lm_head.weight" in stored:
        shapes["output.weight"] = "lm_head.weight", (V, D)
    elif "embed_tokens.weight" in stored and not c.value(bool, "tie_word_embeddings", default=False):
        raise ModelFormatError(f"{c.path}: an embedding, no lm_head.weight, and tie_word_embeddings is not true")
    for i in range(n["block_count"]):
        for part, name in _PARTS.items():
            shapes[f"blk.{i}.{name}.weight"] = f"layers.{i}.{part}.weight", sizes[name]
    for name, shape in shapes.values():
        if name not in stored:
            raise ModelFormatError(f"{c.path.parent}: tensor {name} is missing; a DFlash drafter has it")
        if stored[name].shape != shape:
            raise ModelFormatError(
                f"{stored[name].path}: tensor {name} has shape {stored[name].shape}, config.json asks for {shape}"
            )
    return shapes


def _bytes(name: str, shape: tuple[int, ...], qtype: QType) -> int:
    """Bytes of a tensor; rows have to fill blocks, those of `fc` with each of its layers."""
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    n = shape[0] if name == "fc.weight" else shape[-1]
    if n % block:
        raise ModelFormatError(
            f"tensor {name}: rows of {n} do not fill blocks of {block}, as {qtype.name} has them",
            hint="use --quantize F16",
        )
    return int(prod(shape) // block * size)


def _packed(tensor: _Stored, name: str, qtype: QType) -> npt.NDArray[Any]:
    values = tensor.read()
    limit = np.finfo(np.float32 if qtype == QType.F32 else np.float16).max
    if not (np.abs(values) <= limit).all():
        raise ModelFormatError(f"{tensor.path}: tensor {name}: a weight that is NaN or beyond {limit:g}")
    packed: npt.NDArray[Any] = np.ascontiguousarray(gguf.quantize(values, qtype))
    return packed
