"""The grids of the IQ types are those of the `gguf` package, and no line of the header is passed over."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.formats import block_types
from engine.formats.grids import GRIDS, parse


@pytest.mark.parametrize("qtype", GRIDS, ids=lambda t: t.name)
def test_a_grid_is_that_of_the_package(qtype: QType) -> None:
    package = getattr(gguf.quants, qtype.name)
    package.init_grid()
    assert np.array_equal(GRIDS[qtype], package.grid.reshape(package.grid_shape))
    assert GRIDS[qtype].min() > 0  # CUDA's way to put signs to bytes has no zeros


def test_every_grid_is_read() -> None:
    text = (block_types.FOLDER / "grids.h").read_text()
    numbers = text.partition("_GRID \\\n")[2].count("0x")
    assert numbers == sum(len(g) for g in parse(text).values()) == 256 + 512 + 1024 + 256 + 512
    assert set(GRIDS) == {t for t in block_types.RECORDS if t.name.startswith(("IQ2", "IQ3"))}
