"""References that lead back to themselves without an end: no finite JSON is valid by them.

`{"$ref": "#"}` says nothing, and an object that requires one of its own kind has no last one. The grammar library takes
the second, and a model would write it until it may write no more. A circle is fine where a way out of it is allowed: a
property that may be left out, an empty list, another option.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from engine.text.schemas import MANY, OPTIONS, VALUES

_Resolve = Callable[[dict[str, Any]], Any]
_MOST_TOGETHER = 64  # schemas of one value that are looked at together; of more, less is known to be needed
_HAS_PARTS = frozenset(("object", "array"))
# Patterns that mean the same here as in JSON schema, and take no time, of names that they are asked about.
_PLAIN_PATTERN = re.compile(r"\^?(?:(?:[\w. -]|\[\^?(?:\w-\w|\w)+\])[*+?]?)*\$?", re.ASCII)
_MOST_REPEATS = 3
_PLAIN_NAME = re.compile(r"[ -~]*")


def endless(schema: Any, resolve: _Resolve) -> str | None:
    """A reference in a schema that no finite JSON is valid by, if there is one; every schema is looked at once.

    resolve: the schema that one with a `$ref` refers to, None where that is not known.
    """
    found = without_values(schema, resolve)
    identities = {id(each) for each in found}
    for each in found:
        if isinstance(each.get("$ref"), str) and id(resolve(each)) in identities:
            return str(each["$ref"])
    # What is referred to may have an end, but not with what is beside the reference.
    references = (part.get("$ref") for each in found for part in _together(each, resolve))
    return next((reference for reference in references if isinstance(reference, str)), None)


def without_values(schema: Any, resolve: _Resolve) -> list[dict[str, Any]]:
    """The schemas in a schema, itself and what it refers to included, that no finite JSON is valid by for a circle."""
    met: dict[int, dict[str, Any]] = {}
    left = [schema]
    needs: dict[int, int] = {}  # of each schema, how many of its needs are not known to be met
    users: dict[int, list[list[int]]] = {}  # of each schema, the needs that it meets: whose each is, nothing once met
    ready: list[int] = []
    while left:
        found = left.pop()
        if not isinstance(found, dict) or id(found) in met:
            continue
        met[id(found)] = found
        needed = _needed(found, resolve)
        needs[id(found)] = len(needed)
        ready += [id(found)] * (not needed)
        for options in needed:
            need = [id(found)]
            for option in options:
                users.setdefault(id(option), []).append(need)
            left += options
        left += _within(found)
        left.append(resolve(found) if "$ref" in found else None)
    while ready:
        for need in users.get(ready.pop(), ()):
            if need:
                whose = need.pop()
                needs[whose] -= 1
                ready += [whose] * (not needs[whose])
    return [found for identity, found in met.items() if needs[identity]]


def _within(schema: dict[str, Any]) -> list[Any]:
    """The schemas that are written in one."""
    found = [schema.get(key) for key in VALUES if not isinstance(schema.get(key), list)]
    for key in ("items", "prefixItems", "allOf", *OPTIONS):
        found += _list(schema, key)
    for key in MANY:
        found += _mapping(schema, key).values()
    return found


def _needed(schema: dict[str, Any], resolve: _Resolve) -> list[list[dict[str, Any]]]:
    """What has to have a finite value for a schema to have one: of each list, one schema."""
    needed: list[list[Any]] = [_list(schema, key) for key in OPTIONS]
    needed += [[member] for member in _list(schema, "allOf")]
    if "$ref" in schema:
        needed.append([resolve(schema)])
    parts = [*_together(schema, resolve)]
    kinds = _kinds(parts)
    if kinds and kinds <= _HAS_PARTS and not (len(parts) > 1 and schema.keys() <= {"$ref"}):
        of_kinds = [_of_object(parts) if kind == "object" else _of_array(parts) for kind in sorted(kinds)]
        if len(of_kinds) == 1:
            needed += of_kinds[0]
        else:  # either all that the one needs, or all that the other does
            needed.append([{"allOf": [{"anyOf": options} for options in each]} for each in of_kinds])
    # What is no object is left to the library.
    allowed = [[option for option in options if option is not False] for options in needed]
    return [options for options in allowed if options and all(isinstance(option, dict) for option in options)]


def _together(schema: dict[str, Any], resolve: _Resolve) -> Iterator[dict[str, Any]]:
    """The schemas that a value of one has to be valid by at once: itself, members of `allOf`, what is referred to."""
    met: set[int] = set()
    left: list[Any] = [schema]
    while left and len(met) < _MOST_TOGETHER:
        found = left.pop()
        if isinstance(found, dict) and id(found) not in met:
            met.add(id(found))
            yield found
            left += _list(found, "allOf")
            left.append(resolve(found) if "$ref" in found else None)


def _kinds(parts: list[dict[str, Any]]) -> set[str] | None:
    """The types that all of some schemas allow; None: any."""
    found: set[str] | None = None
    for part in parts:
        kinds = part.get("type")
        if isinstance(kinds, str | list):
            allowed = {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)}
            allowed |= {"integer"} if "number" in allowed else set()
            found = allowed if found is None else found & allowed
    return found


def _of_object(parts: list[dict[str, Any]]) -> list[list[Any]]:
    """What an object needs that is valid by all of some schemas."""
    names = dict.fromkeys(name for part in parts for name in _list(part, "required") if isinstance(name, str))
    needed = [[schema] for name in names for part in parts for schema in _of_property(part, name)]
    if any(_count(part, "minProperties") > 0 for part in parts):
        for part in parts:
            others = part.get("additionalProperties")
            if isinstance(others, dict) or others is False:
                needed.append([*(schema for key in MANY for schema in _mapping(part, key).values()), others])
    return needed


def _of_property(schema: dict[str, Any], name: str) -> Iterator[Any]:
    """The schemas that the property of a name is valid by."""
    named, others = _mapping(schema, "properties"), name not in _mapping(schema, "properties")
    if name in named:
        yield named[name]
    for pattern, value in _mapping(schema, "patternProperties").items():
        matches = _matches(pattern, name)
        if matches:
            yield value
        others = others and matches is False
    if others and "additionalProperties" in schema:
        yield schema["additionalProperties"]


def _matches(pattern: str, name: str) -> bool | None:
    """Whether a pattern matches in a name; None where that is not certain."""
    if not _PLAIN_PATTERN.fullmatch(pattern) or not _PLAIN_NAME.fullmatch(name):
        return None
    if sum(map(pattern.count, "*+?")) > _MOST_REPEATS:
        return None
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return None


def _of_array(parts: list[dict[str, Any]]) -> list[list[Any]]:
    """What an array needs that is valid by all of some schemas."""
    least = max(_count(part, "minItems") for part in parts)
    needed: list[list[Any]] = []
    for part in parts:
        form = "prefixItems" if isinstance(part.get("prefixItems"), list) else "items"
        first = _list(part, form)
        rest = part.get("additionalItems" if isinstance(part.get("items"), list) else "items")
        needed += [[item] for item in first[:least]]
        needed += [[rest]] * (least > len(first))
    return needed


def _count(schema: dict[str, Any], key: str) -> int:
    found = schema.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _mapping(schema: dict[str, Any], key: str) -> dict[str, Any]:
    found = schema.get(key)
    return found if isinstance(found, dict) else {}
