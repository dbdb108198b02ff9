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
Rank = tuple[int, int]  # of the room, and in it


def order(package: str) -> dict[str, Rank]:
    """The rank of each module of a package, and of rooms without an order of their own: higher ones may be imported."""
    (rows,) = re.findall(rf"\| `{package}/` \| modules \|.*\n\| ---.*\n((?:\|.*\n)+)", DESIGN)
    rank = {}
    for i, row in enumerate(rows.splitlines()):
        room, modules = (cell.strip() for cell in row.split("|")[1:3])
        prefix = f"{package}." if room in ("top", "bottom") else f"{package}.{room.strip('`')}."
        rank[prefix.removesuffix(".")] = (i, 0)
        if "->" in modules or "," not in modules:
            for j, names in enumerate(modules.split("->")):
                rank |= {prefix + name: (i, j) for name in re.findall(r"\w+", names)}
    return rank


RANK = order("engine") | order("spark")


def public_to_spark() -> re.Pattern[str]:
    """What spark may import of the engine: whole rooms, and modules of others."""
    (said,) = re.findall(r"sees only a part of the engine: (.*?)\. Everything", DESIGN, re.DOTALL)
    names = [rf"\.{room}(\.\w+)?" for room in re.findall(r"`(\w+)`", said)]
    for room, modules in re.findall(r"`(\w+)\.{([^}]*)}`", said):
        names += (rf"\.{room}\.{module.strip()}" for module in modules.split(","))
    return re.compile(f"engine({'|'.join(names)})?")


PUBLIC_TO_SPARK = public_to_spark()


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path) for path in [*modules("engine"), *modules("spark")]}


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module
            names = {f"{node.module}.{a.name}" for a in node.names}
            found |= names & MODULES
            found |= {node.module} if names - MODULES else set()
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return {name for name in found if re.match(r"(engine|spark)\b", name)}


def ordered(room: str) -> bool:
    return any(name.startswith(f"{room}.") for name in RANK)


def rank(module: str) -> Rank | None:
    """Of a module, or of its room where that has no order; None: the package itself, which anyone may import."""
    if module in ("engine", "spark"):
        return None
    if module in RANK:
        return RANK[module]
    room = ".".join(module.split(".")[:2])
    assert room in RANK and not ordered(room), f"{module} has no place in the order of imports (docs/design.md)"
    return RANK[room]


def test_the_page_has_no_module_that_is_not_there():
    assert set(RANK) <= MODULES | {"engine.__main__", "spark", "engine"} and len(RANK) > 90


@pytest.mark.parametrize("path", [*modules("engine"), *modules("spark")], ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    own = name_of(path)
    mine = rank(own)
    if mine is None:
        return
    for other in imports(path) - {own}:
        theirs = rank(other)
        room = ".".join(own.split(".")[:2])
        free = f"{other}.".startswith(f"{room}.") and not ordered(room)
        if theirs is not None and other.split(".")[0] == own.split(".")[0] and not free:
            assert theirs > mine, f"{own} imports {other}, which lies above or beside it"


@pytest.mark.parametrize("path", modules("engine"), ids=lambda p: str(p.relative_to(ROOT)))
def test_engine_never_imports_spark(path: Path) -> None:
    assert not any(name.split(".")[0] == "spark" for name in imports(path))


@pytest.mark.parametrize("path", modules("spark"), ids=lambda p: str(p.relative_to(ROOT)))
def test_spark_sees_only_the_public_engine(path: Path) -> None:
    assert all(PUBLIC_TO_SPARK.fullmatch(name) for name in imports(path) if name.split(".")[0] == "engine")


@pytest.mark.parametrize("package", ["spark.cli", "engine.serving.scheduler", "engine.daemon"])
def test_import_loads_no_accelerator_library(package: str) -> None:
    code = f"import sys, {package}; bad = {{'torch', 'cupy', 'transformers'}} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
