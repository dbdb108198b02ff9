"""Model architectures, one file each, found by the name that `general.architecture` holds.

A model module offers `Config.from_gguf(file)`, `load(file, config) -> Weights`, `rope_tables(config, n_ctx)`,
`layer(pass, i, weights of the layer)` and `tiny(rng)`; one with recurrent layers `replay`, too. The loop over layers is
that of `engine/layers.py`. To add one, read `qwen3moe.py` and CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from engine.errors import UnsupportedModelError


def known() -> list[str]:
    """Names of the architectures that this engine implements."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def find(architecture: str) -> ModuleType:
    """The module of an architecture; an unknown one raises UnsupportedModelError."""
    # The file's string is only ever compared with our own names, never imported.
    for name in known():
        if name == architecture:
            return importlib.import_module(f"{__name__}.{name}")
    raise UnsupportedModelError(
        f"the model's architecture is {architecture!r}; this engine implements {', '.join(known())}",
        hint="CONTRIBUTING.md says what a new architecture needs",
    )
