"""What the file of a DFlash drafter holds: a small model that guesses a block of tokens from another model's layers.

A drafter is no architecture that can be served: it has no layers without the features of a target, and as a rule
neither embedding nor head. Two dialects of files are read (docs/models.md, "Drafters"). Where metadata and weights
disagree, the weights are right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from gguf import GGMLQuantizationType as QType

from engine.formats.gguf import GGUFFile, StringArray, open_model
from engine.formats.quants import QTensor, row_bytes
from engine.ground.errors import ModelFormatError, UnsupportedModelError, WrongModelError
from engine.models.config import Keys, check_heads, check_rope
from engine.models.conventions import refuse_unsupported_keys
from engine.models.loading import AttentionWeights, Dense, Shapes, Tensors, attention_shapes, ffn_shapes
from engine.models.scaling import Scaling
from engine.ops import F32

WINDOW = 2048  # positions before a block that drafters are trained on, where a file does not say
MAX_BLOCK = 256  # tokens of a block: more than any drafter's
_ANOTHER = "give the drafter that was trained for this model"
# Tensors of drafters of other kinds, by what they are called.
_KINDS = (
    (r"markov_\w+\..*|conf_proj\..*|dflash\.dspark\..*", "DSpark"),
    (r"selector_.*|(blk\.\d+\.|dflash\.)?(\w+_)?conv_.*", "DFlash2"),
    (r"dflash\.domino\..*", "Domino"),
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a kind of file names things: keys of the block and the captured layers, two tensors.

    shift: what is added to the number of a layer, from 0, whose output is captured. mask: key of the mask token.
    """

    block: str
    layers: str
    shift: int
    mask: str
    fc: str
    norm: str


DIALECTS = {
    "dflash": Dialect(
        "block_size", "target_layers", 1, "tokenizer.ggml.mask_token_id", "fc.weight", "enc.output_norm.weight"
    ),
    "qwen35-dflash-draft": Dialect(
        "dflash.block_size", "dflash.target_layer_ids", 0, "qwen35-dflash-draft.dflash.mask_token_id",
        "dflash.fc.weight", "dflash.hidden_norm.weight",
    ),
}  # fmt: skip


class Target(Protocol):
    """What a drafter has to fit of a model's configuration."""

    @property
    def n_layer(self) -> int:
        """Layers."""

    @property
    def n_embd(self) -> int:
        """Width of the residual stream."""

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Hyper-parameters of a drafter.

    captured: layers of the target, from 0, whose outputs are its features, in order. block_tokens: of a block, the last
    token and masks. reach: positions that the first token of a block sees in each layer, itself among them. n_vocab:
    tokens of the target, 0 where the file does not say. n_draft: rows of its own head, 0 where it has none.
    """

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    eps: float
    rope_base: float
    n_rot: int
    scaling: Scaling | None
    scale: float
    captured: tuple[int, ...]
    block_tokens: int
    mask_token: int
    reach: tuple[int, ...]
    causal: bool
    embed_scale: float
    n_vocab: int
    n_draft: int

    def tensors(self, dialect: Dialect) -> Shapes:
        """Every tensor that the file may have, and its shape."""
        D, q, kv = self.n_embd, self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        shapes: Shapes = {dialect.fc: (D, len(self.captured) * D), dialect.norm: (D,), "output_norm.weight": (D,)}
        if self.n_vocab:
            shapes["token_embd.weight"] = (self.n_vocab, D)
        if self.n_draft:
            shapes |= {"output.weight": (self.n_draft, D), "d2t": (self.n_draft,)}
        for i in range(self.n_layer):
            p = f"blk.{i}."
            shapes |= attention_shapes(p, D, q, kv, self.head_dim) | {p + "ffn_norm.weight": (D,)}
            shapes |= ffn_shapes(p, D, self.n_ff)
        return shapes


@dataclass(frozen=True, slots=True)
class DrafterLayer:
    """Weights of one layer."""

    attention: AttentionWeights
    ffn_norm: F32
    ffn: Dense


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """All of a drafter's weights.

    fc: a matrix [D, D] for each captured layer; norm [D]: of what they give. token_embd, output: None where they are
    the target's. d2t: the target's token of each row of `output`, None where they are the same; it is read on the host.
    """

    fc: tuple[QTensor, ...]
    norm: F32
    layers: tuple[DrafterLayer, ...]
    output_norm: F32
    token_embd: QTensor | None
    output: QTensor | None
    d2t: list[int] | None


class DrafterFile(NamedTuple):
    """A drafter as its file has it."""

    config: DrafterConfig
    weights: DrafterWeights


def is_drafter(architecture: str) -> bool:
    """Whether files of this `general.architecture` are drafters."""
    return architecture in DIALECTS


def open_drafter(path: Path, target: Target) -> DrafterFile:
    """A drafter's configuration and weights, views of its mapped file; one that does not fit the target is refused."""
    with open_model(path) as file:
        if not is_drafter(file.architecture):
            raise UnsupportedModelError(
                f"{path}: its architecture is {file.architecture!r:.60}, expected a drafter: {' or '.join(DIALECTS)}; "
                "or a model's block in a file of its own",
                hint="convert a checkpoint with spark convert-drafter; a block in the model's file is --draft mtp",
            )
        config = read(file)
        check(config, target, path)
        return DrafterFile(config, load(file, config, target))


def read(file: GGUFFile) -> DrafterConfig:
    """The configuration of a drafter's file; another kind of drafter is refused by name."""
    _refuse_kinds(file)
    keys, dialect = Keys(file), DIALECTS[file.architecture]
    n_layer, n_embd, n_head = keys.layers(), keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.head_dim(n_embd // n_head)
    n_rot = keys.size("rope.dimension_count", 2, head_dim)
    n_vocab, n_draft = _vocabulary(file, keys)
    config = DrafterConfig(
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=keys.size("attention.head_count_kv"),
        head_dim=head_dim,
        n_ff=keys.size("feed_forward_length"),
        eps=keys.real("attention.layer_norm_rms_epsilon", least=0.0),
        rope_base=keys.positive("rope.freq_base", above=1.0),
        n_rot=n_rot,
        scaling=keys.scaling(),
        scale=keys.real("attention.scale", 0.0) or head_dim**-0.5,
        captured=_captured(file, keys, dialect, n_embd),
        block_tokens=keys.size(dialect.block, 2),
        mask_token=file.value(dialect.mask, int),
        reach=_reach(keys, n_layer),
        causal=keys.flag("attention.causal", False),
        embed_scale=keys.real("embedding_scale", 0.0) or 1.0,
        n_vocab=n_vocab,
        n_draft=n_draft,
    )
    check_heads(config.n_head, config.n_head_kv)
    check_rope(n_rot, head_dim)
    if config.block_tokens > MAX_BLOCK:
        raise ModelFormatError(f"{keys.arch}.{dialect.block} is {config.block_tokens}, expected at most {MAX_BLOCK}")
    if config.mask_token < 0 or 0 < n_vocab <= config.mask_token:
        raise ModelFormatError(f"{dialect.mask} is {config.mask_token}, expected one of {n_vocab} tokens")
    if any(sections := keys.items("rope.dimension_sections", [])) and sections != [n_rot // 2, 0, 0, 0]:
        raise keys.missing(f"rope.dimension_sections {sections!r:.60}")
    if (activation := keys.word("hidden_activation", "silu")) != "silu":
        raise keys.missing(f"hidden_activation {activation!r:.40}")
    for key in ("sample_from_anchor", "has_confidence_head"):  # of DSpark, where they are so
        if keys.flag(key, False):
            raise keys.missing(f"{key} true")
    # A cap and a factor of logits change no largest one.
    if keys.real("final_logit_softcapping", 0.0) < 0 or keys.real("logit_scale", 1.0) < 0:
        raise keys.missing("logits that are turned around")
    refuse_unsupported_keys(file.metadata, file.architecture, keys.asked)
    return config


def _refuse_kinds(file: GGUFFile) -> None:
    for pattern, kind in _KINDS:
        found = [name for name in file.tensors if re.fullmatch(pattern, name)]
        if found:
            raise UnsupportedModelError(
                f"tensor {found[0]:.60} is of a {kind} drafter, which is not implemented; expected plain DFlash",
                hint="give a drafter of the same model that is DFlash",
            )


def _vocabulary(file: GGUFFile, keys: Keys) -> tuple[int, int]:
    """Tokens of the target, 0 where nothing says, and rows of the drafter's own head, 0 where it has none."""
    rows = [file.tensors[n].shape[0] if n in file.tensors else 0 for n in ("token_embd.weight", "output.weight")]
    said = keys.size("vocab_size", 0, 0)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    listed = len(tokens) if isinstance(tokens, StringArray) else 0
    if "d2t" in file.tensors and not rows[1]:
        raise ModelFormatError("the file has d2t, a token for each of the rows of output.weight, and no output.weight")
    n_vocab = rows[0] or (0 if "d2t" in file.tensors else rows[1]) or said or listed
    if "d2t" not in file.tensors and rows[1] and rows[1] != n_vocab:
        raise ModelFormatError(f"output.weight has {rows[1]} rows for {n_vocab} tokens, and the file has no d2t")
    return n_vocab, rows[1] or (rows[0] if "d2t" not in file.tensors else 0)


def _captured(file: GGUFFile, keys: Keys, dialect: Dialect, n_embd: int) -> tuple[int, ...]:
    """The captured layers, as many as `fc` has inputs for, whatever the file counts."""
    if dialect.fc not in file.tensors:
        raise ModelFormatError(f"tensor {dialect.fc} is missing; a drafter of {file.architecture} has it")
    width = file.tensors[dialect.fc].shape[-1]
    if width % n_embd:
        raise ModelFormatError(f"{dialect.fc} has {width} inputs, expected a multiple of the width {n_embd}")
    name, n = f"{keys.arch}.{dialect.layers}", width // n_embd
    said = keys.items(dialect.layers)
    layers = [i - dialect.shift for i in said if type(i) is int]
    if len(said) != n or len(set(layers)) != n or min(layers) < 0:
        raise ModelFormatError(
            f"{name} is {said!r:.60}, and {dialect.fc} has inputs of {n} layers; expected as many different ones from "
            f"{dialect.shift} on",
            hint="convert the checkpoint again with spark convert-drafter",
        )
    return tuple(layers)


def _reach(keys: Keys, n_layer: int) -> tuple[int, ...]:
    """Positions that each layer sees."""
    window = keys.size("attention.sliding_window", 0, 0)
    pattern = "attention.sliding_window_pattern"
    named = f"{keys.arch}.{pattern}" in keys.file.metadata
    windowed = keys.flags(pattern, n_layer) if named else (window > 0,) * n_layer
    if any(windowed) and not window:
        raise ModelFormatError(f"{keys.arch}.{pattern} names layers with a window, and attention.sliding_window is 0")
    return tuple(window if w else max(window, WINDOW) for w in windowed)


def check(config: DrafterConfig, target: Target, path: Path) -> None:
    """Refuse, with a WrongModelError, a drafter that was trained for a model of other sizes."""
    found = (
        (config.n_embd == target.n_embd, f"features of width {config.n_embd}", f"width {target.n_embd}"),
        (config.n_vocab in (0, target.n_vocab), f"{config.n_vocab} tokens", f"{target.n_vocab} tokens"),
        (max(config.captured) < target.n_layer, f"layer {max(config.captured)}", f"layers 0 to {target.n_layer - 1}"),
        (config.mask_token < target.n_vocab, f"mask token {config.mask_token}", f"{target.n_vocab} tokens"),
    )
    for fits, has, expected in found:
        if not fits:
            raise WrongModelError(f"{path}: the drafter is for {has}, the model has {expected}", hint=_ANOTHER)


def load(file: GGUFFile, config: DrafterConfig, target: Target | None = None) -> DrafterWeights:
    """Map every tensor with its shape checked; an unknown tensor is refused, not ignored."""
    dialect = DIALECTS[file.architecture]
    tensors = Tensors(file, config.tensors(dialect))
    layers = [
        DrafterLayer(t.attention(), t.values("ffn_norm.weight"), t.ffn())
        for t in map(tensors.layer, range(config.n_layer))
    ]
    embedding, head = (tensors.matrix(n) if tensors.has(n) else None for n in ("token_embd.weight", "output.weight"))
    d2t = _d2t(file, config, target) if "d2t" in file.tensors else None
    return DrafterWeights(
        fc=columns(tensors.matrix(dialect.fc), len(config.captured)),
        norm=tensors.values(dialect.norm),
        layers=tuple(layers),
        output_norm=tensors.values("output_norm.weight"),
        token_embd=embedding,
        output=embedding if head is None else head,
        d2t=d2t,
    )


def _d2t(file: GGUFFile, config: DrafterConfig, target: Target | None) -> list[int]:
    """The target's token of each row of the head; of a header alone, nothing is known of them."""
    tensor = file.tensor("d2t")
    kinds = {QType.I32: np.int32, QType.I64: np.int64}
    if tensor.qtype not in kinds or tensor.shape != (config.n_draft,):
        raise ModelFormatError(
            f"tensor d2t is {tensor.qtype.name} {tensor.shape}, expected I32 or I64 for {config.n_draft} rows of "
            "output.weight"
        )
    if not tensor.backed:
        return []
    tokens = tensor.data.view(kinds[tensor.qtype])
    n_vocab = config.n_vocab if target is None else target.n_vocab
    if n_vocab and not ((tokens >= 0) & (tokens < n_vocab)).all():
        said = f"{tokens.min()} to {tokens.max()}"
        raise ModelFormatError(f"tensor d2t has tokens of {said}, expected 0 to {n_vocab - 1}")
    found: list[int] = tokens.tolist()
    return found


def columns(matrix: QTensor, n: int) -> tuple[QTensor, ...]:
    """A matrix [N, n * K] as n matrices [N, K], whose products add up to its own: copies."""
    rows, width = matrix.shape
    size = row_bytes(matrix.qtype, width // n, matrix.name)  # a part has to fill blocks of its own
    parts = matrix.data.reshape(rows, n, size)
    return tuple(matrix.reordered(f"{matrix.name}[{k}]", (rows, width // n), parts[:, k]) for k in range(n))
