"""What is on disk before anything is laid out: the model's file, its architecture, its mapped weights, its profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import models
from engine.drafting.drafter import DrafterFile, open_drafter
from engine.formats.gguf import GGUFFile, open_model
from engine.formats.profile import Profile
from engine.formats.profile import load as load_profile
from engine.ground.config import EngineConfig
from engine.ground.errors import UsageError
from engine.models import nextn
from engine.models.conventions import mtp_blocks
from engine.models.layers import Architecture, ModelConfig
from engine.models.loading import Weights
from engine.models.nextn import Block


@dataclass(frozen=True, slots=True)
class Source:
    """A model as its file has it.

    arch: the architecture's module; config: its configuration; weights: views of the mapped file. profile: the counts
    that were asked for, if any were. warnings: what the user should know of them. drafter: what its file has, if one
    was named. block: what drafts tokens, if that was asked for and the file has it; reasons: what is said of it.
    """

    file: GGUFFile
    arch: Architecture
    config: ModelConfig
    weights: Weights[Any]
    profile: Profile | None
    warnings: tuple[str, ...]
    drafter: DrafterFile | None = None
    block: Block | None = None
    reasons: tuple[str, ...] = ()

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The ids that end a turn, as the file's metadata names them."""
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        return tuple({self.file.value(key, int) for key in keys if key in self.file.metadata})


def open_profile(options: EngineConfig, file: GGUFFile, config: ModelConfig) -> tuple[Profile | None, tuple[str, ...]]:
    """The profile that is asked for, if any is, and what the user should know of it."""
    if options.profile is None:
        return None, ()
    return load_profile(options.profile, model_id=file.model_id, shape=(config.n_layer, config.n_expert))


def open_block(
    options: EngineConfig, file: GGUFFile, arch: Architecture, config: ModelConfig
) -> tuple[Block | None, tuple[str, ...], tuple[str, ...]]:
    """The block that drafts tokens, if that is asked for; what is said of it, and warnings where it is left out.

    UsageError where it is asked for and the file has none that can be run.
    """
    if options.predicts:
        found = nextn.find(file, arch, config)
        if found.block is None:
            raise UsageError(f"--draft mtp: {found.said}", hint="use --draft auto")
        return found.block, (found.said,), ()
    if not (mtp := mtp_blocks(file.metadata, file.architecture)):
        return None, (), ()
    blocks = ", ".join(f"blk.{i}" for i in mtp)
    return None, (), (f"{blocks} of the file, which predicts further tokens (MTP), is left out; --draft mtp uses it",)


def open_source(options: EngineConfig) -> Source:
    """Open the model, its profile and what drafts for it; options that they rule out are a UsageError."""
    file = open_model(options.model)
    try:
        arch = models.find(file.architecture)
        config = arch.Config.from_gguf(file)
        odd = [g.head_dim for g in config.kv_groups if g.head_dim % 32]
        if options.kv_type == "q8_0" and odd:
            raise UsageError(
                f"--kv-type q8_0 stores blocks of 32, and the model's heads have {odd[0]} dimensions",
                hint="use --kv-type f16",
            )
        profile, warnings = open_profile(options, file, config)
        drafter = None if options.drafter is None else open_drafter(options.drafter, config)
        block, reasons, more = open_block(options, file, arch, config)
        return Source(
            file, arch, config, arch.load(file, config), profile, (*warnings, *more), drafter, block, reasons
        )  # fmt: skip
    except BaseException:
        file.close()
        raise
