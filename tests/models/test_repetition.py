"""What architectures have in common is written once: no passage of six lines, names aside, is in two model files."""

from __future__ import annotations

import ast
import io
import keyword
import tokenize
from itertools import combinations
from pathlib import Path

import pytest

from engine import models

FOLDER = Path(models.__file__).parent
PASSAGE_LINES = 6
LAYOUT = (
    tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip


def code(text: str) -> list[tuple[int, str]]:
    """Lines of code, numbered, every name replaced by one; without imports, docstrings and fields of records."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if docstring or field or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.start[0] not in left_out:
            named = token.type == tokenize.NAME and not keyword.iskeyword(token.string)
            lines.setdefault(token.start[0], []).append("name" if named else token.string)
    return [(number, " ".join(tokens)) for number, tokens in sorted(lines.items())]


def repeated(first: str, second: str) -> list[tuple[int, int]]:
    """Where passages begin, in each of two texts, that both have."""
    a, b = code(first), code(second)
    places: dict[tuple[str, ...], int] = {}
    for i in range(len(b) - PASSAGE_LINES + 1):
        places.setdefault(tuple(line for _, line in b[i : i + PASSAGE_LINES]), b[i][0])
    passages = ((a[i][0], tuple(line for _, line in a[i : i + PASSAGE_LINES])) for i in range(len(a)))
    return [(number, places[passage]) for number, passage in passages if passage in places]


@pytest.mark.parametrize(("first", "second"), list(combinations(sorted(FOLDER.glob("*.py")), 2)), ids=lambda p: p.stem)
def test_no_passage_is_in_two_model_files(first: Path, second: Path) -> None:
    assert repeated(first.read_text(), second.read_text()) == []


def test_a_passage_under_other_names_is_found() -> None:
    text = (FOLDER / "layers.py").read_text()
    copied = text[text.index("    def attention(") : text.index("    def _recalled(")].replace("    ", "", 1)
    renamed = "def f(\n" + copied.split("(\n", 1)[1].replace("attended", "given").replace("step", "now")
    assert repeated("import os\n\n\n" + renamed, text)
    assert not repeated("import os\n\n\ndef f(x):\n    return x\n", text)
