"""Imports point one way (docs/design.md), and importing a package loads no accelerator library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DESIGN = (ROOT / "docs" / "design.md").read_text()


def order() -> dict[str, int]:
    """The rank of each engine module: it may import those of higher ranks, as the page says."""
    (block,) = re.findall(r"Imports point one way:\n\n((?:    .*\n)+)", DESIGN)
    rows = [re.findall(r"\w+", row) for row in block.split("->")]
    rank = {name: i for i, row in enumerate(rows) for name in row}
    assert len(rank) == sum(map(len, rows)) and len(rank) > 40
    return rank


RANK = order()
PUBLIC_TO_SPARK = {
    "protocol", "placement", "policy", "simulate", "evidence", "profile", "trace", "tokenizer", "template", "gguf",
    "quants", "errors", "config", "files", "install",
}  # fmt: skip


def engine_imports(path: Path) -> set[str]:
    """Top-level engine modules that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "engine":
                names = [f"engine.{a.name}" for a in node.names]
            else:
                names = [node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("engine.")}
    return found


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", modules("engine"), ids=lambda p: str(p.relative_to(ROOT)))
def test_engine_imports_point_down(path: Path) -> None:
    module = path.relative_to(ROOT / "engine").parts[0].removesuffix(".py")
    if module == "__init__":
        return
    assert module in RANK, f"{module} has no place in the order of imports: add it to docs/design.md"
    for other in engine_imports(path) - {module}:
        assert RANK[other] > RANK[module], f"engine.{module} imports engine.{other}, which lies above or beside it"


@pytest.mark.parametrize("path", modules("engine"), ids=lambda p: str(p.relative_to(ROOT)))
def test_engine_never_imports_spark(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        assert not any(n == "spark" or n.startswith("spark.") for n in names)


@pytest.mark.parametrize("path", modules("spark"), ids=lambda p: str(p.relative_to(ROOT)))
def test_spark_sees_only_the_public_engine(path: Path) -> None:
    assert engine_imports(path) <= PUBLIC_TO_SPARK


@pytest.mark.parametrize("package", ["spark.cli", "engine.scheduler", "engine.daemon"])
def test_import_loads_no_accelerator_library(package: str) -> None:
    code = f"import sys, {package}; bad = {{'torch', 'cupy', 'transformers'}} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
