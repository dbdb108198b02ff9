"""Imports point one way (docs/design.md), and importing a package loads no accelerator library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each engine module may import those in the rows below it, never above; `errors`, `config` are for all.
LAYERS = [
    ["__main__"],
    ["daemon"],
    ["scheduler"],
    ["tasks"],
    ["runner"],
    ["dryrun"],
    ["backend"],
    ["decoding"],
    ["forward"],
    ["models"],
    ["layers"],
    ["loading"],
    ["slowtier", "prefix", "families"],
    ["residency", "kv", "sampling", "prefix_files"],
    ["ops"],
    ["plan", "forms"],
    ["forms_host"],
    ["grammar"],
    ["grammar_rules"],
    ["schemas"],
    ["policy", "trace", "protocol", "tokenizer"],
    ["placement", "template", "pretokenizers", "checks", "learning"],
    ["profile"],
    ["gguf"],
    ["gguf_header"],
    ["quants"],
    ["files", "probe"],
    ["config", "errors", "driver", "install"],
]
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}
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
    if module in ("__init__", "simulate", "evidence"):
        return
    assert module in RANK, f"{module} has no place in the order of imports: add it to LAYERS and to docs/design.md"
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
