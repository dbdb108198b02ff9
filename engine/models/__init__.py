"""Model architectures, one file each, found by the name that `general.architecture` holds.

A model module is an `Architecture` of `engine/models/layers.py`, where the loop over layers is, too; one with recurrent
layers is `Recurrent`. To add one, read `qwen3moe.py` and CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

from engine.ground.errors import UnsupportedModelError
from engine.models.layers import Architecture

# What the architectures are made of, and what goes beside them.
_SHARED = {"config", "conventions", "layers", "loading", "nextn", "scaling", "sidecar"}


def known() -> list[str]:
    """Names of the architectures that this engine implements."""
    return sorted({m.name for m in pkgutil.iter_modules(__path__)} - _SHARED)


def find(architecture: str) -> Architecture:
    """The module of an architecture; an unknown one raises UnsupportedModelError."""
    # The file's string is only ever compared with our own names, never imported.
    for name in known():
        if name == architecture:
            return cast(Architecture, importlib.import_module(f"{__name__}.{name}"))  # tests/test_protocols.py
    raise UnsupportedModelError(
        f"the model's architecture is {architecture!r:.60}; this engine implements {', '.join(known())}",
        hint="CONTRIBUTING.md says what a new architecture needs",
    )
