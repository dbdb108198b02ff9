"""The small faults that `mutants.py` plants: where in a module each could be, and the module with one of them.

A fault is one change of the syntax tree: a comparison, an operator, a constant, a bound of a slice, a condition, a
keyword or a statement. Left alone are annotations, docstrings, imports, decorators, assertions (`strict=True` is one)
and what is written into messages; strings change only where they are compared, looked up or an index.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.FloorDiv, ast.Add), ast.FloorDiv: (ast.Mult,),
    ast.Div: (ast.Mult,), ast.Mod: (ast.FloorDiv,), ast.Pow: (ast.Mult,), ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,), ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,), ast.BitXor: (ast.BitAnd,),
}  # fmt: skip
_SWAPPED = {
    "min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum",
    "startswith": "endswith", "endswith": "startswith", "partition": "rpartition", "rpartition": "partition",
    "find": "rfind", "rfind": "find", "match": "search", "search": "match", "fullmatch": "match",
}  # fmt: skip
_STRINGS_IN = frozenset(("get", "pop", "startswith", "endswith", "setdefault", "removeprefix", "removesuffix"))
_UNSEEN = frozenset(("strict", "dtype"))  # keywords that are assertions, too
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of a module.

    number: among all that its source allows. line, end_line: of the statement that it is in, of a compound one the
    head alone. function: the outermost function whose body has it, by its qualified name, and that body's lines; None
    outside of any.
    what: the changed piece before and after.
    """

    number: int
    line: int
    end_line: int
    function: str | None
    function_lines: range
    operator: str
    what: str


@dataclass(frozen=True, slots=True)
class _Outer:
    name: str
    lines: range  # of its body


@dataclass(slots=True)
class _Place:
    statement: ast.stmt
    function: _Outer | None


_Change = tuple[str, ast.AST, Callable[[], None], _Place]  # operator, what it shows, how it is made, where


def possible(source: str) -> int:
    """How many faults a module's source allows."""
    return sum(1 for _ in _changes(ast.parse(source)))


def fault_of(source: str, number: int) -> Fault:
    """One of them, in the order of the text."""
    return _changed(source, number)[1]


def planted(source: str, fault: Fault) -> ast.Module:
    """The module with the fault, lines numbered as they were."""
    return _changed(source, fault.number)[0]


def _changed(source: str, number: int) -> tuple[ast.Module, Fault]:
    tree = ast.parse(source)
    operator, shown, change, place = next(islice(_changes(tree), number, None))
    before, (line, end) = ast.unparse(shown), _extent(place.statement)
    change()
    ast.fix_missing_locations(tree)
    after = "pass" if operator == "statement removed" else ast.unparse(shown)
    if after == before:  # what is shown was replaced by a constant
        after = operator.split()[-1]
    outer = place.function or _Outer("", range(0))
    shown_as = _difference(before, after)
    return tree, Fault(number, line, end, outer.name or None, outer.lines, operator, shown_as)


def _difference(before: str, after: str) -> str:
    """Both in a line, long ones cut to what surrounds the first difference."""
    before, after = (" ".join(text.split()) for text in (before, after))
    first = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
    begin = max(first - 40, 0) if max(len(before), len(after)) > 100 and after != "pass" else 0
    return " -> ".join(text[begin : begin + 100] for text in (before, after))


def _extent(statement: ast.stmt) -> tuple[int, int]:
    """Lines of a statement, of a compound one those of its head."""
    head: ast.AST = statement
    if isinstance(statement, ast.If | ast.While):
        head = statement.test
    elif isinstance(statement, ast.For):
        return statement.lineno, statement.iter.end_lineno or statement.lineno
    elif isinstance(statement, ast.With):
        return statement.lineno, statement.items[-1].context_expr.end_lineno or statement.lineno
    elif isinstance(statement, _Function | ast.ClassDef | ast.Try | ast.Match):
        return statement.lineno, statement.lineno
    return statement.lineno, head.end_lineno or statement.lineno  # type: ignore[attr-defined]


# --- where changes can be -----------------------------------------------------------------------------


def _changes(tree: ast.Module) -> Iterator[_Change]:
    yield from _body(tree.body, None, ())


def _body(body: list[ast.stmt], function: _Outer | None, scope: tuple[str, ...]) -> Iterator[_Change]:
    for i, statement in enumerate(body):
        place = _Place(statement, function)
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.Assert | ast.Pass) or _is_docstring(statement, i):
            continue
        if isinstance(statement, ast.If) and _is_name(statement.test, "TYPE_CHECKING"):
            continue
        if isinstance(statement, ast.Assign) and _is_name(statement.targets[0], "__all__"):
            continue
        if _can_go(statement):
            yield "statement removed", statement, _replacing(body, i, ast.Pass()), place
        if isinstance(statement, ast.Return) and not _is_none(statement.value):
            yield "None returned", statement, _setting(statement, "value", ast.Constant(None)), place
        if isinstance(statement, ast.Continue):
            yield "continue to break", statement, _replacing(body, i, ast.Break()), place
        if isinstance(statement, ast.Break):
            yield "break to continue", statement, _replacing(body, i, ast.Continue()), place
        yield from _within(statement, place, scope)


def _within(statement: ast.stmt, place: _Place, scope: tuple[str, ...]) -> Iterator[_Change]:
    function = place.function
    if isinstance(statement, _Function):
        for default in (*statement.args.defaults, *filter(None, statement.args.kw_defaults)):
            yield from _expression(default, place, statement)
        name = ".".join((*scope, statement.name))
        outer = _Outer(name, range(statement.body[0].lineno, (statement.end_lineno or 0) + 1))
        yield from _body(statement.body, function or outer, (*scope, statement.name, "<locals>"))
        return
    if isinstance(statement, ast.ClassDef):
        yield from _body(statement.body, function, (*scope, statement.name))
        return
    if isinstance(statement, ast.Raise):
        return
    if isinstance(statement, ast.AugAssign):
        for other in _OPERATORS.get(type(statement.op), ()):
            yield "operator", statement, _setting(statement, "op", other()), place
    if isinstance(statement, ast.If | ast.While):
        values = (True, False) if isinstance(statement, ast.If) else (False,)
        for value in values:
            yield f"condition {value}", statement.test, _setting(statement, "test", ast.Constant(value)), place
    for name, value in ast.iter_fields(statement):
        if name in ("annotation", "type_comment", "decorator_list"):
            continue
        if isinstance(value, ast.expr):
            yield from _expression(value, place, statement)
        elif isinstance(value, list):
            if value and isinstance(value[0], ast.stmt):
                yield from _body(value, function, scope)
                continue
            for item in value:
                if isinstance(item, ast.expr):
                    yield from _expression(item, place, statement)
                elif isinstance(item, ast.ExceptHandler | ast.match_case):
                    yield from _body(item.body, function, scope)
                elif isinstance(item, ast.withitem):
                    yield from _expression(item.context_expr, place, item)


def _expression(node: ast.expr, place: _Place, parent: ast.AST) -> Iterator[_Change]:
    """Changes of an expression and of what it is made of."""
    yield from _of(node, place, parent)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            if not isinstance(node, ast.JoinedStr | ast.FormattedValue):
                yield from _expression(child, place, node)
        elif isinstance(child, ast.comprehension):
            for i, condition in enumerate(child.ifs):
                yield "condition dropped", condition, _replacing(child.ifs, i, ast.Constant(True)), place
            for part in (child.iter, *child.ifs):
                yield from _expression(part, place, child)
        elif isinstance(child, ast.keyword) and child.arg not in _UNSEEN:
            yield from _expression(child.value, place, child)


def _of(node: ast.expr, place: _Place, parent: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in _COMPARISONS[type(op)]:
                yield "comparison", node, _replacing(node.ops, i, other()), place
    elif isinstance(node, ast.BinOp):
        is_type = isinstance(node.op, ast.BitOr) and (_is_none(node.right) or _is_none(node.left))
        if not is_type and not any(_is_text(operand) for operand in (node.left, node.right)):
            for operator in _OPERATORS.get(type(node.op), ()):
                yield "operator", node, _setting(node, "op", operator()), place
    elif isinstance(node, ast.BoolOp):
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and, or", node, _setting(node, "op", swapped), place
        for i in range(len(node.values)):
            neutral = ast.Constant(isinstance(node.op, ast.And))
            yield "condition dropped", node, _replacing(node.values, i, neutral), place
    elif isinstance(node, ast.UnaryOp):
        if not isinstance(node.op, ast.UAdd):
            shown = parent if isinstance(parent, ast.expr) else place.statement
            yield "unary dropped", shown, _into(node, node.operand, parent), place
    elif isinstance(node, ast.IfExp):
        for value in (True, False):
            yield f"condition {value}", node, _setting(node, "test", ast.Constant(value)), place
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node, place, parent)
    elif isinstance(node, ast.Slice):
        for name in ("lower", "upper"):
            if getattr(node, name) is not None:
                yield "slice", node, _setting(node, name, None), place
    elif isinstance(node, ast.Call):
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if called in _SWAPPED:
            field = "id" if isinstance(node.func, ast.Name) else "attr"
            yield "call", node, _setting(node.func, field, _SWAPPED[called]), place
        for i, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, *_UNSEEN):
                yield "keyword dropped", node, _deleting(node.keywords, i), place
    elif isinstance(node, ast.Lambda):
        yield "None returned", node, _setting(node, "body", ast.Constant(None)), place


def _of_constant(node: ast.Constant, place: _Place, parent: ast.AST) -> Iterator[_Change]:
    shown = parent if isinstance(parent, ast.expr | ast.keyword) else place.statement
    if isinstance(parent, ast.FunctionDef | ast.keyword):
        shown = node
    value = node.value
    if isinstance(value, bool):
        yield "constant", shown, _setting(node, "value", not value), place
    elif isinstance(value, int | float):
        for other in (value + 1, value - 1):
            yield "constant", shown, _setting(node, "value", other), place
    elif isinstance(value, str) and value:
        looked_up = isinstance(parent, ast.Compare | ast.Subscript) or (
            isinstance(parent, ast.Call) and getattr(parent.func, "attr", "") in _STRINGS_IN
        )
        if looked_up:
            yield "string", shown, _setting(node, "value", value + "X"), place


def _is_none(node: ast.AST | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _can_go(statement: ast.stmt) -> bool:
    """Whether it can be removed without leaving names behind that nothing binds, which any test would notice."""
    if isinstance(statement, ast.Assign):
        names = [target for target in statement.targets if isinstance(target, ast.Name | ast.Tuple)]
        bound = {node.id for name in names for node in ast.walk(name) if isinstance(node, ast.Name)}
        return bound <= {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
    return isinstance(statement, ast.Expr | ast.AugAssign | ast.Raise | ast.Delete)


def _is_docstring(statement: ast.stmt, index: int) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or (index == 0 and is_text)


# --- how they are made --------------------------------------------------------------------------------


def _setting(node: ast.AST, field: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, field, value)


def _replacing(items: list[ast.AST], index: int, value: ast.AST) -> Callable[[], None]:  # type: ignore[type-arg]
    def change() -> None:
        items[index] = ast.copy_location(value, items[index]) if hasattr(items[index], "lineno") else value

    return change


def _deleting(items: list[ast.keyword], index: int) -> Callable[[], None]:
    def change() -> None:
        del items[index]

    return change


def _into(node: ast.expr, other: ast.expr, parent: ast.AST) -> Callable[[], None]:
    """Put `other` where `node` stands in its parent."""

    def change() -> None:
        for name, value in ast.iter_fields(parent):
            if value is node:
                setattr(parent, name, other)
                return
            if isinstance(value, list) and node in value:
                value[value.index(node)] = other
                return

    return change
