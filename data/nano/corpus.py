"""The text that the reference model learns: the Python standard library, split by module.

Nothing of a held-out module (its source, its docstrings, dialogues about it) reaches the training text.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import keyword
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 0.04
SKIPPED = re.compile(r"(^|/)(site-packages|dist-packages|pydoc_data|config-[^/]*)/|(^|/)_sysconfigdata[^/]*$")
LINE_LIMIT = 1000  # characters; a longer line is data, not source

IDENTIFIER = re.compile(r"\b[A-Za-z_][A-Za-z0-9_]*\b")
FIXED_NAMES = frozenset(keyword.kwlist) | frozenset(keyword.softkwlist) | frozenset(dir(builtins)) | {"self", "cls"}


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or class in a module: lines count from 1, `last` is included."""

    name: str
    kind: str  # "function" or "class"
    first: int
    last: int
    body: int  # first line after the docstring
    docstring: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """A source file: its path inside the library, its text, and what the text says about itself.

    names: the identifiers its author chose, no keywords, builtins, dunder names or names under three letters.
    """

    path: str
    text: str
    docstring: str
    definitions: tuple[Definition, ...]
    names: frozenset[str]

    @property
    def lines(self) -> list[str]:
        """The text without line ends."""
        return self.text.split("\n")


@dataclass(frozen=True, slots=True)
class Page:
    """A piece of documentation: of a module (`path` names it) or a topic of the language reference."""

    path: str
    text: str


def is_held_out(path: str) -> bool:
    """Whether the module or topic at `path` (slashes, relative) is kept for measurement, by its SHA-256."""
    share = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") / 2**32
    return share < HELD_OUT_SHARE


def module_paths(library: Path) -> list[str]:
    """The sources under `library`, without installed packages and records of the build, in an arbitrary fixed order."""
    names = (p.relative_to(library).as_posix() for p in library.rglob("*.py"))
    wanted = [name for name in names if not SKIPPED.search(name)]
    return sorted(wanted, key=lambda name: hashlib.sha256(b"order" + name.encode()).digest())


def read_module(library: Path, path: str) -> Module | None:
    """One source; None for one that is not UTF-8 or not Python (some tests are neither) and for character tables."""
    try:
        text = (library / path).read_text("utf-8")
    except UnicodeDecodeError:
        return None
    if not text.strip() or "gencodec" in text[:3000] or max(map(len, text.split("\n"))) > LINE_LIMIT:
        return None
    return parse_module(path, text)


def parse_module(path: str, text: str) -> Module | None:
    """A module of this text; None if it is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    return Module(path, text, ast.get_docstring(tree) or "", tuple(_definitions(tree)), frozenset(_names(tree)))


def _definitions(tree: ast.AST) -> Iterable[Definition]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        docstring = ast.get_docstring(node) or ""
        after = node.body[1] if docstring and len(node.body) > 1 else node.body[0]
        if isinstance(node, ast.ClassDef):
            kind, parameters = "class", ()
        else:
            kind, parameters = "function", tuple(a.arg for a in node.args.args if a.arg not in ("self", "cls"))
        last = node.end_lineno or node.lineno
        yield Definition(node.name, kind, node.lineno, last, after.lineno, docstring, parameters)


def _names(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                pass
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case _:
                continue
        if len(name) > 2 and name not in FIXED_NAMES and not name.startswith("__"):
            yield name


def read_pages(library: Path, modules: Sequence[Module]) -> list[Page]:
    """The docstrings of each module as one page, and the topics of the language reference."""
    pages = []
    for module in modules:
        documented = [d for d in module.definitions if len(d.docstring) > 40]
        if len(module.docstring) + sum(len(d.docstring) for d in documented) < 400:
            continue
        name = module.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        parts = [f"Help on module {name}\n\n{module.docstring}".rstrip()]
        for d in documented:
            title = f"{d.name}({', '.join(d.parameters)})" if d.kind == "function" else f"class {d.name}"
            parts.append(title + "\n\n" + "\n".join("    " + line for line in d.docstring.split("\n")))
        pages.append(Page(module.path, "\n\n".join(parts)))
    topics = library / "pydoc_data" / "topics.py"
    if topics.exists():
        assignment = ast.parse(topics.read_text("utf-8")).body[-1]
        assert isinstance(assignment, ast.Assign), "topics.py ends with the table of topics"
        for name, text in ast.literal_eval(assignment.value).items():
            pages.append(Page(f"topics/{name}", inspect.cleandoc(text)))
    return pages


def _style(name: str) -> str:
    return "upper" if name.isupper() else "title" if name[0].isupper() else "lower"


def rename(module: Module, pool: Sequence[str], rng: random.Random) -> str:
    """The module's text with about half of its names replaced, each throughout, by names drawn from `pool`.

    A name gives way to one of its own style (lower, Title, UPPER). Names cannot be remembered from other
    epochs then, only looked up in the context, which is what an unseen file asks for.
    """
    by_style: dict[str, list[str]] = {"upper": [], "title": [], "lower": []}
    for name in rng.sample(list(pool), min(len(pool), 4000)):
        by_style[_style(name)].append(name)
    chosen = [n for n in sorted(module.names) if rng.random() < 0.5 and by_style[_style(n)]]
    new = {n: rng.choice(by_style[_style(n)]) for n in chosen}
    return IDENTIFIER.sub(lambda m: new.get(m[0], m[0]), module.text)
