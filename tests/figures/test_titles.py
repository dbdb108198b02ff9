"""Sections that are named elsewhere are there: of `X.md, "Title"`, in texts and in code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r'([A-Za-z-]+)\.md\)?(?:\]\([^)]*\))?,[\s#/]*"([^"\n]+(?:\n[\s#/]*[^"\n]+)?)"')
CODE = (".py", ".cu", ".cuh", ".cpp", ".h", ".md", ".js", ".html", ".toml")
LEFT_OUT = {".venv", ".git", "build", ".dev", "node_modules"}


@cache
def titles(name: str) -> set[str]:
    """Headings of a page, and what its paragraphs and points begin with in bold or italics."""
    paths = [path for path in (ROOT / f"{name}.md", ROOT / "docs" / f"{name}.md") if path.exists()]
    text = "\n".join(path.read_text() for path in paths)
    found = set(re.findall(r"^#+ (.+)$", text, re.M)) | set(re.findall(r"^(?:- )?\*{1,2}(.+?)[.:]?\*{1,2}", text, re.M))
    return {title.replace("`", "") for title in found}


def missing(text: str) -> list[str]:
    """Sections that a text names, and that are not there."""
    named = ((page, re.sub(r"[\s#/]*\n[\s#/]*", " ", title).replace("`", "")) for page, title in NAMED.findall(text))
    return [f'{page}.md, "{title}"' for page, title in named if titles(page) and title not in titles(page)]


def test_sections_that_are_named_are_there() -> None:
    files = (p for p in ROOT.rglob("*") if p.suffix in CODE and p != Path(__file__))
    paths = [p for p in files if not LEFT_OUT & set(p.relative_to(ROOT).parts)]
    found = {str(path.relative_to(ROOT)): missing(path.read_text(errors="replace")) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


def test_one_that_is_not_there_is_found() -> None:
    text = 'as docs/design.md, "Layout", and\n# docs/design.md, "The way of a token, and\n# of an expert" say'
    assert missing(text) == []
    assert missing('[kv.md](kv.md), "Nowhere"') == ['kv.md, "Nowhere"']
