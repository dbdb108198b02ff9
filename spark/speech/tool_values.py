"""Values that a model wrote without saying their type, which the schema of the tool's arguments says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

PYTHON = {"True": "true", "False": "false", "None": "null"}  # its words for JSON's constants
_TYPES = {"string", "number", "integer", "boolean", "null", "object", "array"}
_MOST_SCHEMAS = 100  # looked at for one value


def no_constant(name: str) -> Any:
    """Refuse NaN and the infinities, which Python would read as JSON."""
    raise ValueError(name)


def types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a tool's schema allows under a key; none where it does not say."""
    properties = schema.get("properties")
    found: set[str] = set()
    left = [properties.get(key)] if isinstance(properties, Mapping) else []
    for looked in range(_MOST_SCHEMAS):
        if looked >= len(left):
            break
        value = left[looked]
        if not isinstance(value, Mapping):
            continue
        named = value.get("type")
        found |= {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
        for item in [*_list(value.get("enum")), *([value["const"]] if "const" in value else [])]:
            found.add(_type_of(item))
        for several in ("anyOf", "oneOf", "allOf"):
            left += _list(value.get(several))
        if isinstance(value.get("$ref"), str):
            left.append(_resolved(schema, value["$ref"]))
    return frozenset(found & _TYPES)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolved(schema: Any, reference: str) -> Any:
    for step in reference.removeprefix("#/").split("/"):
        schema = schema.get(step) if isinstance(schema, Mapping) else None
    return schema


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def coerced(text: str, allowed: frozenset[str]) -> str:
    """JSON text of a bare value: of an allowed type if it can be read as one, otherwise a string.

    Where strings are allowed beside other types, only `null` is not one.
    """
    bare = text.strip()
    try:
        value = json.loads(PYTHON.get(bare, bare), strict=False, parse_constant=no_constant)
        kind = _type_of(value)
        if "string" in allowed:
            fits = kind == "null" and kind in allowed
        else:
            fits = kind in allowed or (kind == "integer" and "number" in allowed)
            if kind == "number" and "number" not in allowed and "integer" in allowed and value == int(value):
                value, fits = int(value), True
        if fits:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, OverflowError, RecursionError):
        if "boolean" in allowed and bare.lower() in ("true", "false"):
            return bare.lower()
    return json.dumps(text, ensure_ascii=False)
