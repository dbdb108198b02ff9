"""The grids of the IQ2 and IQ3 types: those of grids.h, which C++ and CUDA compile."""

from __future__ import annotations

import re

import numpy as np
from gguf import GGMLQuantizationType as QType
from numpy.typing import NDArray

from engine.formats.block_types import FOLDER

_DEFINE = re.compile(r"^#define (\w+) ((?:.*\\\n)*.*)$", re.MULTILINE)


def parse(text: str) -> dict[QType, NDArray[np.int16]]:
    """Magnitudes of each type's grid in the text of grids.h: int16 [entries, 8 (IQ2) or 4 (IQ3)]."""
    numbers = {
        name: np.array([int(n, 0) for n in re.findall(r"\w+", values)]) for name, values in _DEFINE.findall(text)
    }
    found = {}
    for name in (name.removesuffix("_GRID") for name in numbers if name.endswith("_GRID")):
        bits = 2 if name.startswith("IQ2") else 4
        levels = numbers[f"{name}_LEVELS" if f"{name}_LEVELS" in numbers else "IQ2_LEVELS"]
        codes = (numbers[f"{name}_GRID"][:, None] >> np.arange(0, 16, bits)) & ((1 << bits) - 1)
        found[QType[name]] = levels[codes].astype(np.int16)
    return found


GRIDS = parse((FOLDER / "grids.h").read_text(encoding="utf-8"))
