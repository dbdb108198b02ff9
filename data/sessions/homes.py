"""The files of a program's home folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def write(path: Path, records: Sequence[Record | str]) -> None:
    """Write a log; a string is a line as it stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (r if isinstance(r, str) else json.dumps(r, ensure_ascii=False, separators=(",", ":")) for r in records)
    path.write_text("".join(line + "\n" for line in lines), "utf-8")
