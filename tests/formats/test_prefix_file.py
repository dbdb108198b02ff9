"""Files of prefixes: what their headers may say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from engine.formats import prefix_file
from engine.formats.prefix_file import FORMAT

NAME = f"{'5' * 64}.state"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1.5"])
def test_a_header_has_no_fractions_nor_what_is_no_json(tmp_path: Path, number: str) -> None:
    arrays = [np.arange(7, dtype=np.uint8)]
    first = prefix_file.opening(NAME, {"format": FORMAT, "block": 77}, {}, None, arrays)
    pieces = list(prefix_file.encoded(first, arrays))
    (tmp_path / NAME).write_bytes(b"".join(pieces))
    assert prefix_file.check(tmp_path / NAME).key["block"] == 77
    (tmp_path / NAME).write_bytes(b"".join([re.sub(b"77", number.encode(), first), *pieces[1:]]))
    with pytest.raises(ValueError, match="does not begin as a file of prefixes does"):
        prefix_file.read_head(tmp_path / NAME)
