"""The shape of the source tree, for the table in docs/design.md: counts that a change of structure is to bring down.

Run from the repository root: python benchmarks/structure.py [FOLDER]
FOLDER is another checkout of this repository, of an older commit, say. An `Any` counts where it stands for a record or
an object: not as an item of a container (`dict[str, Any]`), nor of an array. A passage is repeated when as many
statements' lines, names and constants aside, are in two model files.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import keyword
import tokenize
from pathlib import Path

LINES = 6
FAMILIES = ("gemma4", "laguna", "qwen35", "qwen35moe", "qwen3moe")
CONTAINERS = {"dict", "list", "tuple", "Mapping", "Sequence", "NDArray", "Iterable", "Iterator", "Callable"}


def bare_anys(path: Path) -> int:
    """Annotations of a file that say Any outside of containers and arrays."""
    tree = ast.parse(path.read_text())
    inside = {
        id(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", getattr(node.value, "attr", "")) in CONTAINERS
        for name in ast.walk(node.slice)
    }
    return sum(isinstance(n, ast.Name) and n.id == "Any" and id(n) not in inside for n in ast.walk(tree))


def shape(path: Path) -> list[str]:
    """The lines of a file with names and constants made alike; without comments, docstrings and imports."""
    source = path.read_text()
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.start[0] in skipped or not token.string.strip() or token.type == tokenize.COMMENT:
            continue
        text = token.string
        if token.type == tokenize.NAME and not keyword.iskeyword(text):
            text = "name"
        elif token.type in (tokenize.NUMBER, tokenize.STRING):
            text = "value"
        lines.setdefault(token.start[0], []).append(text)
    return [" ".join(lines[i]) for i in sorted(lines)]


def repeated(paths: list[Path]) -> int:
    """Passages of LINES lines or more that two files share; each as long as it goes."""
    shapes = [shape(path) for path in paths]
    found = 0
    for one, other in itertools.combinations(shapes, 2):
        begins = {(i, j) for i, a in enumerate(one) for j, b in enumerate(other) if a == b}
        for i, j in begins:
            if (i - 1, j - 1) in begins:
                continue
            n = 0
            while (i + n, j + n) in begins:
                n += 1
            # brackets alone are no passage
            found += n >= LINES and sum(len(line) > 12 for line in one[i : i + n]) >= LINES
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("folder", type=Path, nargs="?", default=Path())
    root = arguments.parse_args().folder
    models = [root / "engine" / "models" / f"{name}.py" for name in FAMILIES]
    engine, spark = (sorted((root / package).rglob("*.py")) for package in ("engine", "spark"))
    for path in models:
        print(f"lines of {path.name:14}{len(path.read_text().splitlines()):6}")
    print(f"repeated passages      {repeated(models):6}")
    for name, paths in (("engine", engine), ("spark", spark)):
        print(f"Any in {name:16}{sum(map(bare_anys, paths)):6}")
        print(f"files, over 600 lines  {len(paths):6}{sum(len(p.read_text().splitlines()) > 600 for p in paths):6}")


if __name__ == "__main__":
    main()
