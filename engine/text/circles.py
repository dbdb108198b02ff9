"""References that lead back to themselves without an end: no finite JSON is valid by them.

`{"$ref": "#"}` says nothing, and an object that requires one of its own kind has no last one. The grammar library takes
the second, and a model would write it until it may write no more. A circle is fine where a way out of it is allowed: a
property that may be left out, an empty list, another option.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.text.schemas import MANY, OPTIONS, VALUES

_Resolve = Callable[[dict[str, Any]], Any]


def endless(schema: Any, resolve: _Resolve) -> str | None:
    """A reference in a schema that no finite JSON is valid by, if there is one; every schema is looked at once.

    resolve: the schema that one with a `$ref` refers to, None where that is not known.
    """
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
        left += _within(found)
        left.append(resolve(found) if "$ref" in found else None)
    while ready:
        for need in users.get(ready.pop(), ()):
            if need:
                whose = need.pop()
                needs[whose] -= 1
                ready += [whose] * (not needs[whose])
    for identity, found in met.items():
        if needs[identity] and isinstance(found.get("$ref"), str):
            target = resolve(found)
            if isinstance(target, dict) and needs[id(target)]:
                return str(found["$ref"])
    return None


def _within(schema: dict[str, Any]) -> list[Any]:
    """The schemas that are written in one."""
    found = [schema.get(key) for key in VALUES if not isinstance(schema.get(key), list)]
    for key in ("items", "prefixItems", "allOf", *OPTIONS):
        found += schema[key] if isinstance(schema.get(key), list) else []
    for key in MANY:
        found += schema[key].values() if isinstance(schema.get(key), dict) else []
    return found


def _needed(schema: dict[str, Any], resolve: _Resolve) -> list[list[dict[str, Any]]]:
    """What has to have a finite value for a schema to have one: of each list, one schema."""
    needed: list[list[Any]] = []
    for key in OPTIONS:
        if isinstance(schema.get(key), list) and schema[key]:
            needed.append(schema[key])
    if isinstance(schema.get("allOf"), list):
        needed += [[member] for member in schema["allOf"]]
    if "$ref" in schema:
        needed.append([resolve(schema)])
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") == "object" and isinstance(properties, dict) and isinstance(required, list):
        needed += [[properties[name]] for name in required if isinstance(name, str) and name in properties]
    least = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(least, int):
        lists = [schema[key] for key in ("prefixItems", "items") if isinstance(schema.get(key), list)]
        first = lists[0] if lists else []
        needed += [[item] for item in first[: max(least, 0)]]
        if least > len(first):
            needed.append([schema.get("items")])
    # What is no object is left to the library.
    return [options for options in needed if all(isinstance(option, dict) for option in options)]
