"""The standard library as the samples' subject: facts about a module, read off its source."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

LIBRARY = Path(ast.__file__).parent


@dataclass(frozen=True)
class Function:
    """A function or method; lines count from 1 and include the decorators' successor, the `def`, and the last line."""

    name: str
    first: int
    last: int
    body: int  # first line after the docstring
    arguments: tuple[str, ...]
    summary: str  # first sentence of the docstring
    calls: tuple[str, ...]
    raises: tuple[tuple[int, str, str], ...]  # line, exception, condition
    returns: tuple[tuple[int, str], ...]  # line, expression
    loops: tuple[int, ...]
    locals: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of lines."""
        return self.last - self.first + 1


@dataclass
class Module:
    """A source file; `lines` changes as the sample's user has it edited."""

    path: str
    lines: list[str]
    functions: tuple[Function, ...] = field(default=())

    @property
    def name(self) -> str:
        """Dotted name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def text(self) -> str:
        """The source."""
        return "\n".join(self.lines) + "\n"

    def numbered(self, first: int, last: int) -> list[tuple[int, str]]:
        """Lines with their numbers."""
        return list(enumerate(self.lines[first - 1 : last], first))

    def grep(self, pattern: str) -> list[tuple[int, str]]:
        """Lines that a regular expression occurs in, with their numbers."""
        return [(n, line) for n, line in enumerate(self.lines, 1) if re.search(pattern, line)]

    def where(self, line: int) -> str:
        """The function that a line is in, or where else it stands."""
        inside = [f for f in self.functions if f.first <= line <= f.last]
        return min(inside, key=lambda f: f.size).name if inside else "module level"


def read_module(path: str) -> Module:
    """A module of the library by its path."""
    text = (LIBRARY / path).read_text("utf-8")
    return Module(path, text.splitlines(), find_functions(text))


def find_functions(text: str) -> tuple[Function, ...]:
    """The functions and methods of a source, in order; nested ones are part of those around them."""
    found = []
    scopes: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    while scopes:
        prefix, scope = scopes.pop(0)
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, ast.ClassDef):
                scopes.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.FunctionDef):
                found.append(_function(prefix + node.name, node))
    return tuple(sorted(found, key=lambda f: f.first))


def _function(name: str, node: ast.FunctionDef) -> Function:
    parents = {child: parent for parent in ast.walk(node) for child in ast.iter_child_nodes(parent)}
    raises, returns, loops, calls, names = [], [], [], [], []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Raise) and inner.exc is not None:
            exception = inner.exc.func if isinstance(inner.exc, ast.Call) else inner.exc
            above = parents[inner]
            condition = ast.unparse(above.test) if isinstance(above, ast.If) and inner in above.body else ""
            raises.append((inner.lineno, ast.unparse(exception), condition))
        elif isinstance(inner, ast.Return) and inner.value is not None:
            returns.append((inner.lineno, ast.unparse(inner.value)))
        elif isinstance(inner, ast.For | ast.While):
            loops.append(inner.lineno)
        elif isinstance(inner, ast.Call) and len(ast.unparse(inner.func)) < 30:
            calls.append(ast.unparse(inner.func))
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.append(inner.id)
    docstring = ast.get_docstring(node) or ""
    start = node.body[1] if docstring and len(node.body) > 1 else node.body[0]
    body = min([start.lineno, *(d.lineno for d in getattr(start, "decorator_list", ()))])
    return Function(
        name=name,
        first=node.lineno,
        last=node.end_lineno or node.lineno,
        body=body,
        arguments=tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)),
        summary=re.split(r"(?<=\.)\s|\n\n", docstring, maxsplit=1)[0].replace("\n", " ").strip(),
        calls=tuple(dict.fromkeys(calls)),
        raises=tuple(sorted(raises)),
        returns=tuple(sorted(returns)),
        loops=tuple(sorted(loops)),
        locals=tuple(dict.fromkeys(names)),
    )
