"""What is on disk before anything is laid out: the model's file, its architecture, its mapped weights, its profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import models
from engine.drafting.drafter import DrafterFile
from engine.formats.gguf import GGUFFile, open_model
from engine.formats.profile import Profile
from engine.formats.profile import load as load_profile
from engine.ground.config import EngineConfig
from engine.ground.errors import UnsupportedModelError, UsageError
from engine.ground.kv_types import pair_of
from engine.models import sidecar
from engine.models.layers import Architecture, ModelConfig
from engine.models.loading import Weights
from engine.models.nextn import Block
from engine.running import draft_files
from engine.running.draft_files import DraftFiles


@dataclass(frozen=True, slots=True)
class Source:
    """A model as its file has it.

    arch: the architecture's module; config: its configuration; weights: views of the mapped file. profile: the counts
    that were asked for, if any were. notes: what the user should know of it. drafts: what drafts tokens for it, as
    files have it.
    """

    file: GGUFFile
    arch: Architecture
    config: ModelConfig
    weights: Weights[Any]
    profile: Profile | None
    notes: tuple[str, ...]
    drafts: DraftFiles

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of all that."""
        return (*self.notes, *self.drafts.warnings)

    @property
    def drafter(self) -> DrafterFile | None:
        """A drafter that was named."""
        return self.drafts.drafter

    @property
    def block(self) -> Block | None:
        """The block that drafts, where one was asked for or found."""
        return self.drafts.block

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


def open_source(options: EngineConfig) -> Source:
    """Open the model, its profile and what drafts for it; options that they rule out are a UsageError."""
    file = open_model(options.model)
    try:
        if sidecar.is_sidecar(file):
            raise UnsupportedModelError(
                f"{options.model} holds a block that drafts for a model, and not the model",
                hint=f"give the model, and this file as --draft {options.model}",
            )
        arch = models.find(file.architecture)
        config = arch.Config.from_gguf(file)
        kinds = pair_of(options.kv_type)
        odd = [g.head_dim for g in config.kv_groups if not kinds.fits(g.head_dim)]
        if odd:
            block = max(kind.block for kind in kinds)
            raise UsageError(
                f"--kv-type {options.kv_type} stores blocks of {block}, and the model's heads have {odd[0]} dimensions",
                hint="use --kv-type f16",
            )
        profile, notes = open_profile(options, file, config)
        drafts = draft_files.find(options, file, arch, config)
        weights = arch.load(file, config)
        return Source(file, arch, config, weights, profile, notes, drafts)
    except BaseException:
        file.close()
        raise
