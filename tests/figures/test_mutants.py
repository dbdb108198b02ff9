"""Faults that are planted by machine: where they are, that each changes the code, and what is left alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks import mutants
from benchmarks.mutations import fault_of, planted, possible

SOURCE = '''\
"""A module."""
LIMIT = 3
__all__ = ["first"]


def first(rows: list[int], most: int = 2) -> int | None:
    """The first of the rows."""
    assert most >= 0
    found = [row for row in rows if row > most]
    if not found and most < LIMIT:
        raise ValueError(f"none of {len(rows) + 1} is more than {most}")
    for row in sorted(found, reverse=True):
        return min(row, 9)
    return {"a": 1}.get("a")


class Box:
    @property
    def size(self) -> int:
        return len(self.rows[1:])
'''


def test_each_fault_is_a_change_of_its_own() -> None:
    whole = ast.unparse(ast.parse(SOURCE))
    faults = [fault_of(SOURCE, number) for number in range(possible(SOURCE))]
    changed = [ast.unparse(planted(SOURCE, fault)) for fault in faults]
    assert whole not in changed and len(set(changed)) == len(changed)
    for fault in faults:
        compile(planted(SOURCE, fault), "module", "exec")
        assert fault == fault_of(SOURCE, fault.number) and " -> " in fault.what
        assert fault.function in (None, "first", "Box.size")
        assert fault.function is None or fault.line in fault.function_lines
    what = {fault.what for fault in faults}
    both, one = "not found and most < LIMIT -> not found or most < LIMIT", "LIMIT = 3 -> LIMIT = 4"
    assert {both, one, "row > most -> row >= most", "min(row, 9) -> max(row, 9)", "1: -> :"} <= what
    assert any(fault.operator == "string" for fault in faults)


def test_checks_messages_and_annotations_are_left_alone() -> None:
    for fault in (fault_of(SOURCE, number) for number in range(possible(SOURCE))):
        changed = ast.unparse(planted(SOURCE, fault))
        assert "assert most >= 0" in changed and "__all__ = ['first']" in changed
        assert "rows: list[int]" in changed and "The first of the rows." in changed
        assert "{len(rows) + 1} is more than" in changed or fault.operator == "statement removed"


@pytest.mark.slow
def test_the_same_seed_draws_the_same_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, total), (again, _), (other, _) = (mutants.draw("sampling", 20, seed) for seed in (1, 1, 2))
    assert [plan.fault for plan in one] == [plan.fault for plan in again] != [plan.fault for plan in other]
    assert len(one) == 20 < total == len(mutants.draw("sampling", 10**6, 1)[0])


def test_a_fault_is_put_into_functions_that_are_there(tmp_path: Path) -> None:
    path, scope = tmp_path / "module.py", {}
    exec(compile(SOURCE, str(path), "exec"), scope)
    first = scope["first"]
    every = (fault_of(SOURCE, number) for number in range(possible(SOURCE)))
    fault = next(fault for fault in every if fault.what == "min(row, 9) -> max(row, 9)")
    assert first([1, 20]) == 9
    mutants.put_in(mutants.Planned(path, SOURCE, fault), [first])
    assert first([1, 20]) == 20


def test_modules_and_reasons_are_of_files_that_are_there() -> None:
    for files, tests in mutants.MODULES.values():
        assert all((mutants.ROOT / path).exists() for path in (*files, *tests))
    for line in (mutants.ROOT / "benchmarks" / "mutants.txt").read_text().splitlines():
        if not line.startswith("#"):
            module, function, part, why = line.split("\t")
            assert module in mutants.MODULES and function and part and why
