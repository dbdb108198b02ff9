"""Files beside a model's that hold the block which drafts for it, and no layer of its own: `mtp-NAME.gguf`.

llama.cpp's converter writes them of a model whose own file is written without that block. Names, keys and numbers are
those of one file that holds both, so the block is `blk.N` behind the model's N layers. Embedding, head and last norm
are in it so that it can be opened alone: copies of the model's, which are not read; the model's own serve the block.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.formats.gguf import GGUFFile, StringArray
from engine.ground.errors import UnsupportedModelError, WrongModelError
from engine.models.config import Keys
from engine.models.conventions import mtp_blocks, refuse_unsupported_keys
from engine.models.layers import Architecture, ModelConfig

PATTERN = "mtp-*.gguf"
_NEXT = re.compile(r"blk\.\d+\.nextn\..+")
_ENDS = ("token_embd.weight", "output.weight", "output_norm.weight")
# What a block does not depend on: contexts that are trained for, and how the model's own positions are stretched.
_FREE = ("n_ctx_train", "scaling")
_WORDS = {"n_layer": "layers", "n_embd": "width", "n_vocab": "tokens", "n_expert": "experts"}


def is_sidecar(file: GGUFFile) -> bool:
    """Whether a file holds a block that drafts, and not the model."""
    if file.absent or any(name.startswith("blk.0.") for name in file.tensors):  # which may be in another part
        return False
    return any(map(_NEXT.fullmatch, file.tensors))


def read(file: GGUFFile, arch: Any) -> ModelConfig:
    """The configuration of the model that a sidecar was made of; n_vocab is 0 where it does not say.

    ModelFormatError or UnsupportedModelError as `Config.from_gguf`.
    """
    keys = _Keys(file)
    config: ModelConfig = arch.Config.read(keys)
    refuse_unsupported_keys(file.metadata, file.architecture, keys.asked)
    return config


def refuse_unknown(file: GGUFFile) -> None:
    """UnsupportedModelError for a tensor of anything but blocks that draft; those of a block are checked with it."""
    blocks = mtp_blocks(file.metadata, file.architecture)
    for name in file.tensors:
        block = re.match(r"blk\.(\d{1,9})\.", name)
        if name not in _ENDS and not (block and int(block[1]) in blocks):
            raise UnsupportedModelError(f"tensor {name} is no part of a block that drafts for {file.architecture}")


def check(file: GGUFFile, arch: Architecture, of: str, config: ModelConfig) -> None:
    """Refuse, with a WrongModelError, a sidecar of another model than one of that architecture and configuration.

    Others as `read` and `refuse_unknown`.
    """
    path, hint = file.paths[0], "give the file that was made of this model"
    if file.architecture != of:
        raise WrongModelError(f"{path}: the block is of a {file.architecture} model, this one is {of}", hint=hint)
    found: Any = read(file, arch)
    for field in fields(found):
        has, expected = getattr(found, field.name), getattr(config, field.name)
        if field.name in _FREE or has == expected or (field.name == "n_vocab" and not has):
            continue
        word = _WORDS.get(field.name, field.name)
        raise WrongModelError(f"{path}: the block is of a model with {word} {has}, this one has {expected}", hint=hint)
    refuse_unknown(file)


class _Keys(Keys):
    """Those of a file that has tensors of the last blocks alone."""

    whole = False

    def vocabulary(self) -> int:
        """Rows of what has a row for each token, or the tokens that are listed."""
        p = f"blk.{mtp_blocks(self.file.metadata, self.arch).start}.nextn."
        for name in (*_ENDS[:2], f"{p}embed_tokens.weight", f"{p}shared_head_head.weight"):
            if name in self.file.tensors:
                return int(self.file.tensors[name].shape[0])
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if isinstance(tokens, StringArray) else 0


def beside(model: Path) -> list[Path]:
    """Files in a model's folder that are named like sidecars, in order."""
    return sorted(path for path in model.parent.glob(PATTERN) if path.is_file())
