"""What a model file is, and what stands in the way of running it, by its header alone.

What is missing is found by what loads models: a header without findings is one that loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from engine import models
from engine.drafting import drafter
from engine.formats.block_types import NATIVE_TYPES, NoKernelsError
from engine.formats.gguf import GGUFFile, StringArray
from engine.formats.gguf_header import TensorInfo
from engine.ground.errors import ModelFormatError, SparkError, UnsupportedModelError
from engine.models import nextn, sidecar
from engine.models.conventions import mtp_blocks
from engine.models.layers import Architecture, ModelConfig
from engine.models.loading import Weights

# Sizes that files of any architecture name alike, each after the architecture's name.
SIZE_KEYS = (
    "block_count", "nextn_predict_layers", "embedding_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.sliding_window", "feed_forward_length", "leading_dense_block_count",
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_count",
    "expert_shared_feed_forward_length", "context_length",
)  # fmt: skip
# What tensors are for, by their names, the first that fits; experts are what `expert_used_count` is a part of.
_BLOCK = r"blk\.\d+\."
EXPERTS = "experts"
UNREAD = ("pictures and sound", "further tokens")  # text does not need them
_ROLES = (
    (r"(v|a|mm)\..*", UNREAD[0]),
    (r"(dflash\.)?fc\.weight", "features"),
    (r"token_embd\.weight|per_layer_\w+\.weight", "embedding"),
    (r"output\.weight", "output"),
    (_BLOCK + r"ffn_gate_up_exps\.weight", f"{EXPERTS}: gate and up"),
    *((_BLOCK + rf"ffn_{part}_exps\.weight", f"{EXPERTS}: {part}") for part in ("gate", "up", "down")),
    (_BLOCK + r"ffn_(gate|up|down|gate_up)_(ch|sh)exps?\.weight", "shared experts"),
    (_BLOCK + r"ffn_gate_inp\w*\.weight", "routers"),
    (_BLOCK + r"ffn_(gate|up|down)\.weight", "dense FFN"),
    (_BLOCK + r"ssm_\w+\.weight", "recurrent layers"),
    (_BLOCK + r"attn_\w+\.weight", "attention"),
)
_VECTORS, _OTHERS = "norms and vectors", "others"
_TEXT, _VALUES = 200, 1024  # characters of a text, and layers that a size is given for, of what a file may say
DRAFTER, BLOCK = "drafter", "block"
_TOO_LARGE = "the sizes that the header names are larger than this machine's memory"
# Files that are no language model, by `general.type`, and what to do with them.
_BESIDE = {
    "mmproj": "it goes beside a language model's file; Spark reads text alone, and does not need it",
    "adapter": "merge it into its model's file first (llama-export-lora)",
}


class Loadable(NamedTuple):
    """A model as it would be loaded, with nothing behind its weights."""

    arch: Architecture
    config: ModelConfig
    weights: Weights[Any]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found: a report (docs/protocol.md has its fields), and the model, None where something is missing."""

    report: dict[str, Any]
    model: Loadable | None


def inspect(file: GGUFFile) -> Inspection:
    """Inspect a file of which `open_header` has read the header.

    A drafter, or a block in a file of its own, without findings is one that loads, beside the model that it was made
    for; it is no model itself.
    """
    kind, roles = _kind(file), list(_roles(file))
    model, drafts, missing = None, dict[str, Any](), list[SparkError]()
    try:
        if kind in (DRAFTER, BLOCK):
            drafts[kind] = _drafts(file) if kind == DRAFTER else _block(file)
        else:
            model = _load(file)
    except SparkError as error:
        missing.append(error)
    if model is None and not drafts:  # a type is named once, for all tensors that have it
        others = [error for error in missing if not isinstance(error, NoKernelsError)]
        missing = [*others, *_without_kernels(roles)] or missing
    n_experts = sum(row["parameters"] for row in roles if row["role"].startswith(EXPERTS))
    n_read = sum(row["parameters"] for row in roles if row["role"] not in UNREAD)
    sizes, name = _sizes(file), file.metadata.get("general.name")
    used, n_expert = (sizes.get(key) for key in ("expert_used_count", "expert_count"))
    share = used / n_expert if type(used) is int and type(n_expert) is int and 0 < used <= n_expert else 1.0
    report = {
        "kind": kind,
        "architecture": file.architecture[:_TEXT],
        "name": name[:_TEXT] if isinstance(name, str) else None,
        "files": [str(path) for path in file.paths],
        "absent_files": [str(path) for path in file.absent],
        "bytes": file.whole_bytes,
        "missing_bytes": file.missing_bytes,
        "parameters": n_read,
        "active_parameters": n_read - n_experts + round(n_experts * share),
        "sizes": sizes,
        "tensors": roles,
        "missing": [{"code": error.code, "message": error.message, "hint": error.hint} for error in missing],
    }
    return Inspection(report | drafts, model)


def _drafts(file: GGUFFile) -> dict[str, Any]:
    """What a drafter asks of the model beside it, read as it is loaded."""
    config = drafter.read(file)
    try:
        drafter.load(file, config)
    except MemoryError:
        raise ModelFormatError(_TOO_LARGE) from None
    return {
        "captured_layers": list(config.captured),
        "block_tokens": config.block_tokens,
        "mask_token": config.mask_token,
        "vocabulary": config.n_vocab or None,
        "window_tokens": max(config.reach),
    }


def _block(file: GGUFFile) -> dict[str, Any]:
    """What a block in a file of its own asks of the model beside it, read as it is loaded."""
    arch = models.find(file.architecture)
    config = sidecar.read(file, arch)
    sidecar.refuse_unknown(file)
    try:
        found = nextn.find(file, arch, config)
    except MemoryError:
        raise ModelFormatError(_TOO_LARGE) from None
    if found.block is None:
        raise UnsupportedModelError(found.said)
    return {
        "number": found.block.number,
        "bytes": found.block.nbytes,
        "embedding_length": config.n_embd,
        "vocabulary": config.n_vocab or None,
    }


def _load(file: GGUFFile) -> Loadable | None:
    """As a model is loaded; None where too little of it is there to tell, and nothing speaks against it."""
    kind = _kind(file)
    if kind != "model":
        raise UnsupportedModelError(f"the file is a {kind!r}, expected a 'model'", hint=_BESIDE.get(kind, ""))
    arch = models.find(file.architecture)
    try:
        config = arch.Config.from_gguf(file)
        return Loadable(arch, config, arch.load(file, config))
    except ModelFormatError:
        if not file.absent:
            raise
        return None  # what is asked for may be in another part
    except MemoryError:
        raise ModelFormatError(_TOO_LARGE) from None


def _roles(file: GGUFFile) -> Iterator[dict[str, Any]]:
    """A row for each role and type: tensors, parameters, bytes; in the order of _ROLES, the most bytes first."""
    found: dict[tuple[str, str], list[TensorInfo]] = {}
    counts = (file.metadata.get(f"{file.architecture}.{key}", 0) for key in SIZE_KEYS[:2])
    is_whole = all(type(n) is int for n in counts) and not sidecar.is_sidecar(file)
    mtp = mtp_blocks(file.metadata, file.architecture) if is_whole else range(0)
    for tensor in file.tensors.values():
        found.setdefault((_role(tensor, mtp), tensor.qtype.name), []).append(tensor)
    order = [*dict.fromkeys(role for _, role in _ROLES), UNREAD[1], _OTHERS, _VECTORS]
    sizes = {key: sum(t.nbytes for t in tensors) for key, tensors in found.items()}
    for role, qtype in sorted(found, key=lambda key: (order.index(key[0]), -sizes[key])):
        tensors = found[role, qtype]
        yield {
            "role": role,
            "type": qtype,
            "tensors": len(tensors),
            "parameters": sum(prod(t.shape) for t in tensors),
            "bytes": sizes[role, qtype],
            "kernels": tensors[0].qtype in NATIVE_TYPES,
        }


def _role(tensor: TensorInfo, mtp: range) -> str:
    """What a tensor is for; mtp: blocks that predict further tokens."""
    block = re.match(r"blk\.(\d{1,9})\.", tensor.name)
    if block and int(block[1]) in mtp:
        return UNREAD[1]
    role = next((role for pattern, role in _ROLES if re.fullmatch(pattern, tensor.name)), _OTHERS)
    return _VECTORS if len(tensor.shape) == 1 and role not in UNREAD else role


def _without_kernels(roles: list[dict[str, Any]]) -> list[SparkError]:
    """An error for each type without kernels of tensors that text needs."""
    lacking = [row for row in roles if not row["kernels"] and row["role"] not in UNREAD]
    errors: list[SparkError] = []
    for name in dict.fromkeys(row["type"] for row in lacking):
        rows = [row for row in lacking if row["type"] == name]
        n = sum(row["tensors"] for row in rows)
        of = ", ".join(row["role"] for row in rows)
        errors.append(NoKernelsError(f"{n} tensors ({of}) have type {name}, which has no kernels"))
    return errors


def _sizes(file: GGUFFile) -> dict[str, int | list[int]]:
    """Sizes by their keys; of one that differs from layer to layer, its different values."""
    sizes: dict[str, int | list[int]] = {}
    for key in SIZE_KEYS:
        value = file.metadata.get(f"{file.architecture}.{key}")
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and 0 < value.size <= _VALUES:
            values = np.unique(value).tolist()
            sizes[key] = values[0] if len(values) == 1 else values
        elif type(value) is int:
            sizes[key] = value
    pattern = file.metadata.get(f"{file.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and not pattern.any():  # a window that no layer has
        sizes.pop("attention.sliding_window", None)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringArray):
        sizes["vocabulary"] = len(tokens)
    return sizes


def _kind(file: GGUFFile) -> str:
    """`model`, `drafter`, `block` or one of _BESIDE; older vision encoders say it by their architecture alone."""
    if drafter.is_drafter(file.architecture):
        return DRAFTER
    if sidecar.is_sidecar(file):
        return BLOCK
    kind = "mmproj" if file.architecture == "clip" else file.metadata.get("general.type")
    return kind if isinstance(kind, str) and kind in _BESIDE else "model"
