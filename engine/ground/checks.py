"""Checks of values from outside: each gives the value back in the form we keep, or refuses it by name.

A check is a function of a field's name and of its value as `json` read it. It raises RequestError with
the name, what was expected and what was found, cut short.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeAlias

from engine.ground.errors import RequestError

Check: TypeAlias = Callable[[str, Any], Any]


def refusal(name: str, expected: str, value: object) -> RequestError:
    """Make the error that names a field, what it should have been and what it was."""
    return RequestError(f"field {name!r}: expected {expected}, found {reprlib.repr(value)}", field=name)


def integer(low: int, high: int) -> Check:
    """Check for an integer from `low` to `high`; true and 1.0 are none."""

    def check(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise refusal(name, f"an integer from {low} to {high}", value)
        return value

    return check


def number(low: float, high: float, *, above: bool = False) -> Check:
    """Check for a number of at least (`above`: more than) `low` and at most `high`, both finite."""

    def check(name: str, value: Any) -> float:
        # Compared before it is converted: an integer may lie beyond the floats.
        if type(value) not in (int, float) or not low <= value <= high or (above and value == low):
            raise refusal(name, f"a number {'above' if above else 'from'} {low:g} to {high:g}", value)
        return float(value)

    return check


def text(longest: int) -> Check:
    """Check for a string of at most `longest` characters."""

    def check(name: str, value: Any) -> str:
        if type(value) is not str or len(value) > longest:
            raise refusal(name, f"a string of at most {longest} characters", value)
        return value

    return check


def path(longest: int) -> Check:
    """Check for a string of at most `longest` characters that the file system can take as a path."""

    def check(name: str, value: Any) -> str:
        given: str = text(longest)(name, value)
        try:
            encoded = os.fsencode(given)
        except UnicodeEncodeError:
            encoded = b""
        if not encoded or b"\0" in encoded:
            raise refusal(name, "a path", value)
        return given

    return check


def boolean(name: str, value: Any) -> bool:
    """Check for true or false."""
    if type(value) is not bool:
        raise refusal(name, "true or false", value)
    return value


def choice(*allowed: str) -> Check:
    """Check for one of some strings."""

    def check(name: str, value: Any) -> str:
        if type(value) is not str or value not in allowed:
            raise refusal(name, f"one of {', '.join(allowed)}", value)
        return value

    return check


def items(item: Check, longest: int, *, shortest: int = 0) -> Check:
    """Check for a list of `shortest` to `longest` items, each of which passes `item`; gives a tuple."""

    def check(name: str, value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise refusal(name, "a list", value)
        if not shortest <= len(value) <= longest:
            raise RequestError(f"field {name!r}: expected {shortest} to {longest} items, found {len(value)}")
        return tuple([item(name, element) for element in value])

    return check


def integers(low: int, high: int, longest: int, *, shortest: int = 0) -> Check:
    """As `items` of `integer`, for lists of many: what has nothing to refuse is looked at as a whole."""
    one_by_one = items(integer(low, high), longest, shortest=shortest)

    def check(name: str, value: Any) -> tuple[int, ...]:
        is_many = type(value) is list and shortest <= len(value) <= longest and set(map(type, value)) == {int}
        if is_many and low <= min(value) and max(value) <= high:
            return tuple(value)
        made: tuple[int, ...] = one_by_one(name, value)
        return made

    return check


def pair(first: Check, second: Check) -> Check:
    """Check for a list of two items, one for each check; gives a tuple."""

    def check(name: str, value: Any) -> tuple[Any, Any]:
        if type(value) is not list or len(value) != 2:
            raise refusal(name, "a list of two items", value)
        return first(name, value[0]), second(name, value[1])

    return check


def optional(check: Check) -> Check:
    """Check that lets null through as None."""
    return lambda name, value: None if value is None else check(name, value)


def mapping(name: str, value: Any) -> dict[str, Any]:
    """Check for an object, whatever its fields."""
    if type(value) is not dict:
        raise refusal(name, "an object", value)
    return value


def record(cls: type[Any], checks: Mapping[str, Check]) -> Check:
    """Check for an object that has the fields of dataclass `cls` and no other; gives a `cls`.

    A field with a default may be missing. Where `cls` has a field `info`, it takes the others.
    """
    assert [f.name for f in fields(cls)] == list(checks), cls
    has_default = {f.name for f in fields(cls) if f.default is not MISSING or f.default_factory is not MISSING}
    required = [f.name for f in fields(cls) if f.name not in has_default and f.name != "info"]

    def check(name: str, value: Any) -> Any:
        prefix = f"{name}." if name else ""
        rest = dict(mapping(name, value))
        made = {key: checks[key](prefix + key, rest.pop(key)) for key in checks if key in rest}
        for key in required:
            if key not in made:
                raise RequestError(f"field {prefix + key!r} is missing")
        if "info" in checks:
            made["info"] = rest
        elif rest:
            unknown = reprlib.repr(prefix + next(iter(rest)))
            raise RequestError(f"field {unknown} is unknown", hint=f"known: {', '.join(checks)}")
        return cls(**made)

    return check
