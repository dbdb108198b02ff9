"""Which code made what is kept in files: other code may give other bits, and then nothing of it is used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np

from engine.ground.cpu_library import library_path

ENGINE = Path(__file__).parents[1]
OTHER_ROOMS = ("text",)  # a cache follows from tokens, however they came about


@cache
def kernels() -> Path:
    """The folder of the sources of the GPU's kernels: in the installed package, else in the source tree."""
    return next((p for p in (ENGINE / "cuda", ENGINE.parent / "cuda") if (p / "ptx.cuh").is_file()), ENGINE / "cuda")


def code_files() -> list[Path]:
    """Sources, kernels and the compiled library that decide the bits of a cache: all of the engine but its texts."""
    sources = (path for kind in ("*.py", "*.h") for path in ENGINE.rglob(kind))
    deciding = (path for path in sources if path.relative_to(ENGINE).parts[0] not in OTHER_ROOMS)
    return [*sorted(deciding), *sorted(kernels().glob("*.cu*")), library_path()]


def digest(files: Iterable[Path]) -> str:
    """A hash of files, and of NumPy, which makes tables and is the reference backend."""
    made = hashlib.sha256(f"NumPy {np.__version__}".encode())
    for path in files:
        content = path.read_bytes()  # the library is of its compiler's flags, too
        made.update(f"\n{path.name} {len(content)}\n".encode() + content)
    return made.hexdigest()


@cache
def code_digest() -> str:
    """The digest of `code_files`, read once; SparkError where the library is not built."""
    return digest(code_files())
