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
from engine.models.conventions import mtp_blocks
from engine.models.layers import Architecture, ModelConfig
from engine.models.loading import Weights


@dataclass(frozen=True, slots=True)
class Source:
    """A model as its file has it.

    arch: the architecture's module; config: its configuration; weights: views of the mapped file. profile: the counts
    that were asked for, if any were. warnings: what the user should know of them. drafter: what its file has, if one
    was named.
    """

    file: GGUFFile
    arch: Architecture
    config: ModelConfig
    weights: Weights[Any]
    profile: Profile | None
    warnings: tuple[str, ...]
    drafter: DrafterFile | None = None

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The ids that end a turn, as the file's metadata names them."""
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        return tuple({self.file.value(key, int) for key in keys if key in self.file.metadata})


def open_profile(
    options: EngineConfig, file: GGUFFile, config: ModelConfig
) -> tuple[Profile | None, tuple[str, ...]]:
    """The profile that is asked for, if any is, and what the user should know of it and of the file."""
    profile: Profile | None = None
    warnings: tuple[str, ...] = ()
    if options.profile is not None:
        shape = config.n_layer, config.n_expert
        profile, warnings = load_profile(options.profile, model_id=file.model_id, shape=shape)
    if mtp := mtp_blocks(file.metadata, file.architecture):
        blocks = ", ".join(f"blk.{i}" for i in mtp)
        warnings = (*warnings, f"{blocks} of the file, which predicts further tokens (MTP), is left out")
    return profile, warnings


def open_source(options: EngineConfig) -> Source:
    """Open the model and its profile; options that they rule out are a UsageError."""
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
        return Source(file, arch, config, arch.load(file, config), profile, warnings, drafter)
    except BaseException:
        file.close()
        raise
