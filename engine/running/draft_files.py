"""Which files draft for a model: a drafter's that was named, the block in the model's own file, or one beside it.

Here alone is decided what `--draft` takes of what there is. What was asked for and cannot be had is an error; what
`auto` found and cannot have is left out with a warning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine.drafting.drafter import DrafterFile, open_drafter
from engine.formats.gguf import GGUFFile, open_header, open_model
from engine.ground.config import EngineConfig
from engine.ground.errors import SparkError, UsageError, WrongModelError
from engine.models import nextn, sidecar
from engine.models.conventions import mtp_blocks
from engine.models.layers import Architecture, ModelConfig
from engine.models.nextn import Block

# Whether `auto` has a block that the files hold, and not lookup alone: to be set when a GPU has shown that it pays.
AUTO_HAS_BLOCKS = False


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """What drafts for a model beside lookup.

    drafter: what its file has. block: of the model's file, or of the one in `path`, whose file id is block_id (empty
    where its header alone was read). is_found: nobody asked for the block. reasons: what is said of it; warnings: of
    what was left out.
    """

    drafter: DrafterFile | None = None
    block: Block | None = None
    path: Path | None = None
    block_id: str = ""
    is_found: bool = False
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def without_block(self, why: str) -> DraftFiles:
        """The same where the block has to be left out."""
        return replace(self, block=None, path=None, block_id="", reasons=(), warnings=(*self.warnings, why))


NO_DRAFTS = DraftFiles()


def find(options: EngineConfig, file: GGUFFile, arch: Architecture, config: ModelConfig) -> DraftFiles:
    """What the options ask for of what there is; of an open header, headers are read of blocks beside it, too.

    UsageError, or what is wrong with the file, where something was asked for that cannot be had.
    """
    if options.draft_file is not None:
        return _named(options.draft_file, file, arch, config)
    if options.draft == "mtp":
        return _block(file, arch, config, is_asked=True)
    if options.draft == "auto" and AUTO_HAS_BLOCKS:
        try:
            return _block(file, arch, config, is_asked=False)
        except SparkError as error:  # of a block that no file of this model would have
            return DraftFiles(warnings=(f"no block drafts: {error.message}",))
    return DraftFiles(warnings=_left_out(file))


def _left_out(file: GGUFFile) -> tuple[str, ...]:
    blocks = ", ".join(f"blk.{i}" for i in mtp_blocks(file.metadata, file.architecture))
    if not blocks:
        return ()
    return (f"{blocks} of the file, which predicts further tokens (MTP), is left out; --draft mtp uses it",)


def _named(path: Path, file: GGUFFile, arch: Architecture, config: ModelConfig) -> DraftFiles:
    """What a file that was named holds, a drafter or a block."""
    with open_header(path) as header:
        is_block = sidecar.is_sidecar(header)
    if is_block:
        return _beside(path, file, arch, config)
    return DraftFiles(open_drafter(path, config), warnings=_left_out(file))


def _beside(path: Path, file: GGUFFile, arch: Architecture, config: ModelConfig) -> DraftFiles:
    """The block in a file of its own, which has to be one for this model."""
    with (open_header if file.header_alone else open_model)(path) as other:
        sidecar.check(other, arch, file.architecture, config)
        found = nextn.find(other, arch, config)
        if found.block is None:
            raise UsageError(f"{path}: {found.said}", hint="give another file, or --draft auto")
        block_id = "" if other.header_alone else other.file_id
        return DraftFiles(None, found.block, path, block_id, reasons=(f"{path}: {found.said}",))


def _block(file: GGUFFile, arch: Architecture, config: ModelConfig, is_asked: bool) -> DraftFiles:
    """The block in the model's file, else the one that a file beside it holds; is_asked: none is an error."""
    own = nextn.find(file, arch, config)
    if own.block is not None:
        return DraftFiles(block=own.block, is_found=not is_asked, reasons=(own.said,))
    fitting, others = _search(file, arch, config)
    if len(fitting) == 1:
        return replace(fitting[0], is_found=not is_asked)
    why, hint = "; ".join([own.said, *(error.message for error in others)]), "use --draft auto"
    if fitting:
        why = f"{' and '.join(str(each.path) for each in fitting)} each hold a block for this model"
        hint = "name one of them: --draft FILE"
    if is_asked:
        raise UsageError(f"--draft mtp: {why}", hint=hint)
    of_others = all(isinstance(error, WrongModelError) for error in others)
    if not fitting and of_others and not mtp_blocks(file.metadata, file.architecture):
        return DraftFiles()
    return DraftFiles(warnings=(f"no block drafts: {why}",))


def _search(file: GGUFFile, arch: Architecture, config: ModelConfig) -> tuple[list[DraftFiles], list[SparkError]]:
    """The blocks for this model in files beside it, and why other files there, named like such, are none."""
    fitting, others, seen = list[DraftFiles](), list[SparkError](), {*file.paths}
    for path in sidecar.beside(file.paths[0]):
        if path in seen:
            continue
        try:
            with open_header(path) as header:
                seen.update(header.paths)
                is_block = sidecar.is_sidecar(header)
            if is_block:
                fitting.append(_beside(path, file, arch, config))
        except SparkError as error:
            others.append(error)
    return fitting, others
