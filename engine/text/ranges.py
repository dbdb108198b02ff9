"""Bounds and constants of a schema as the grammar library holds them, so that no reply breaks one.

The library reads every number as a double, and makes an integer's bound one of 64 bits: it takes `"minimum": 2**53 + 1`
for 2**53, writes 2**63 - 1 where a constant is 2**70, and does not end at the constant -2**63. So bounds are moved
inwards to the next that it holds, by 1,024 at most, and what it cannot hold is refused by name. An integer's maximum
beyond 2**63 - 1 becomes that: what is written is valid, though some of what is valid is not written. Lengths that no
reply has are left out.

Two more of its ways: within one unit, from 0 to 0.5, it takes an exclusive bound from below for an inclusive one; and
it reads decimal fractions without care for the last digit. So such a bound becomes an inclusive one at the next double
inside, any bound of a number one that is read as lying inside, and a constant that is read as another is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_EXACT = 1 << 53  # from it on not every integer that follows is a double
_LEAST, _MOST = -(1 << 63) + 1024, (1 << 63) - 1024  # doubles that the library can begin or end a range with
_LAST = (1 << 63) - 1  # a maximum that it takes, too: it is what 2**63 becomes
_SMALLEST = 1e-40  # of a bound that is not 0: the library's regular expressions nest once a digit, and not for ever
_LONGEST = 1 << 31  # no reply has so many characters, items or properties
_LONG = ("Length", "Items", "Properties")
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def held(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with bounds that the library holds; ValueError, which says what was found, where it holds none such.

    Of the schema itself, not of those in it.
    """
    made = dict(schema)
    for what in _LONG:
        if _is_number(made.get(f"max{what}")) and made[f"max{what}"] > _LONGEST:
            del made[f"max{what}"]
        least = made.get(f"min{what}", 0)
        if _is_number(least) and least > _LONGEST:
            raise ValueError(f"'min{what}': expected {_LONGEST} at most, found {least}; no reply is so long, lower it")
    if "const" in made:
        _check_constant(made["const"])
    if isinstance(made.get("enum"), list):
        _check_constant(made["enum"])
    kinds = made.get("type", "number")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    for keys, side in ((_LOW, 1), (_HIGH, -1)):
        plain, exclusive = keys
        if made.get(exclusive) is True and _is_number(made.get(plain)):  # as drafts before the sixth say it
            made[exclusive] = made.pop(plain)
        bounds = {key: made[key] for key in keys if _is_number(made.get(key))}
        if not bounds:
            continue
        if "number" in kinds:
            key, bound = _of_number(bounds, side)
        elif "integer" in kinds and any(abs(each) >= _EXACT for each in bounds.values()):
            key, bound = plain, _of_integer(bounds, side)
        else:
            continue
        for each in bounds:
            del made[each]
        made[key] = bound
    return made


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_number(bounds: Mapping[str, Any], side: int) -> tuple[str, int | float]:
    """The bound that binds, moved inwards; side: 1 of those from below, -1 of those from above."""
    key = max(bounds, key=lambda key: (side * bounds[key], key.startswith("exclusive")))
    bound, exclusive = bounds[key], key.startswith("exclusive")
    # Away from 0 the library does well with exclusive bounds, and badly with long inclusive ones: of 0.9999999999999999
    # it takes 0.9 for a part that lacks its end.
    as_plain = exclusive and side * bound >= 0
    found = _inside(bound, side, as_plain) if _LEAST <= bound <= _MOST else math.inf
    if not _LEAST <= found <= _MOST:
        raise ValueError(
            f"{key!r} of a number: expected {_LEAST} to {_MOST}, found {bound}; leave it out or move it inwards"
        )
    return (_LOW if side > 0 else _HIGH)[exclusive and not as_plain], found


def _inside(bound: int | float, side: int, exclusive: bool) -> int | float:
    """The next number from a bound on that the library reads as one inside."""
    found = float(bound)
    while (
        min(side * found, side * _read(found)) < side * bound  # as what it is, and as what it is read as
        or (exclusive and bound in (found, _read(found)))
        or 0 < abs(found) < _SMALLEST
    ):
        if abs(found) < _SMALLEST:  # each double of these would be a long way
            found = side * _SMALLEST if side * found >= 0 else 0.0
        else:
            found = math.nextafter(found, side * math.inf)
    return int(found) if found.is_integer() else found


def _read(value: float) -> float:
    """What the library reads for a double: the digits as one integer, then scaled, and rounded each time."""
    digits, _, power = repr(abs(value)).partition("e")
    whole, _, fraction = digits.partition(".")
    exponent = int(power or 0) - len(fraction)
    found = float(int(whole + fraction))
    if exponent < -308:
        found, exponent = found / 1e308, exponent + 308
    found = found * float(f"1e{exponent}") if exponent >= 0 else found / float(f"1e{-exponent}")
    return math.copysign(found, value)


def _of_integer(bounds: Mapping[str, Any], side: int) -> int:
    """The same of integers."""

    def whole(key: str) -> int | float:  # an integer, but for infinities
        bound: int | float = bounds[key]
        if isinstance(bound, float) and not math.isfinite(bound):
            return bound
        inner: int = math.ceil(bound) if side > 0 else math.floor(bound)
        return inner + side if key.startswith("exclusive") and inner == bound else inner

    key = max(bounds, key=lambda key: side * whole(key))
    bound = whole(key)
    if side < 0 and bound >= _LAST:
        return _LAST
    if not (_LEAST if side < 0 else -(1 << 63)) <= bound <= _MOST:
        raise ValueError(
            f"{key!r} of an integer: expected {-(1 << 63)} to {_MOST}, found {bounds[key]}; leave it out or move it "
            "inwards"
        )
    return max(_LEAST, min(_MOST, _inwards(int(bound), side)))


def _inwards(bound: int, side: int) -> int:
    """The next integer from a bound on that is a double."""
    found = float(bound)
    return int(found if side * int(found) >= side * bound else math.nextafter(found, side * math.inf))


def _check_constant(value: Any) -> None:
    """Refuse a number, wherever it is in a constant, that would become another one."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_constant(inner)
    if not _is_number(value) or value == _LAST:
        return
    if not _LEAST <= value <= _MOST or (isinstance(value, int) and int(float(value)) != value):
        raise ValueError(
            f"the constant {value}: expected a number that a double holds, and from {_LEAST} to {_LAST}, where the "
            "grammar library's integers end; make it a string"
        )
    if isinstance(value, float) and _read(value) != value:
        raise ValueError(
            f"the constant {value}: expected one of fewer digits, as it would become {_read(value)}; round it or make "
            "it a string"
        )
