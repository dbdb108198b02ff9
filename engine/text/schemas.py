"""Closing JSON schemas: an object that has its properties and no others, unless its schema says otherwise.

JSON schema lets an object have whatever `properties` does not name. Models are asked for what is named, and what else
they wrote nobody would read. So where `additionalProperties` says nothing, an object has the properties that its schema
names anywhere for it: in `properties` or `required`, in the members of `allOf`, behind `$ref`, and in that option of
`anyOf` or `oneOf` which it takes. This is what `"unevaluatedProperties": false` says, in words that llguidance knows:
what is closed is the merged object, never a member by itself. `{"type": "object"}`, which names none, stays open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

_VALUES = ("additionalProperties", "items", "additionalItems", "contains", "unevaluatedItems")  # a schema each
_MANY = ("properties", "patternProperties")  # schemas by name
_OPTIONS = ("anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of one object. names, patterns: of its properties, in order (the values say nothing).

    named: there is a `properties`. opens: it says that there may be others. shut: it says that there may not. options:
    in one of its options it opens. Of an object with several conditions, `named`, `opens` and `shut` are of those that
    hold in any case.
    """

    names: Mapping[str, None] = field(default_factory=dict)
    patterns: Mapping[str, None] = field(default_factory=dict)
    named: bool = False
    opens: bool = False
    shut: bool = False
    options: bool = False

    def __or__(self, other: _Known) -> _Known:
        return _Known(
            {**self.names, **other.names},
            {**self.patterns, **other.patterns},
            self.named or other.named,
            self.opens or other.opens,
            self.shut or other.shut,
            self.options or other.options,
        )

    @property
    def key(self) -> tuple[Any, ...]:
        return frozenset(self.names), frozenset(self.patterns), self.named, self.opens, self.shut


_NOTHING = _Known()


def closed(schema: Any, root: Any) -> Any:
    """A schema that allows what `schema` does, without properties that it does not name.

    root: the schema that it is a part of, for what it refers to. References that lead nowhere, or to other documents,
    are left as they are. Raises RecursionError for what is nested too deeply.
    """
    if not isinstance(schema, dict):
        return schema
    closing = _Closing(root)
    made = closing.anew(schema)
    kept = {key: root[key] for key in _DEFINITIONS if key in root} if closing.left and isinstance(root, dict) else {}
    definitions = kept.get("$defs", {})
    if closing.definitions:
        kept["$defs"] = {**(definitions if isinstance(definitions, dict) else {}), **closing.definitions}
    return {**kept, **{key: value for key, value in made.items() if key not in kept}}


class _Closing:
    """definitions: schemas that are referred to, closed, by new names. left: a reference was left as it is."""

    def __init__(self, root: Any) -> None:
        self.definitions: dict[str, Any] = {}
        self.left = False
        self._root = root
        self._names: dict[tuple[Any, ...], str] = {}

    def anew(self, schema: Any) -> Any:
        """A schema of a value of its own."""
        return self._close(schema, _NOTHING, True)

    def _close(self, schema: Any, beside: _Known, whole: bool) -> Any:
        """A schema, where `beside` is known of the same value from elsewhere; whole: to be closed here."""
        if not isinstance(schema, dict):
            return schema
        target = self._target(schema)
        if target is not None and not schema.keys() - {"$ref", *_DEFINITIONS}:
            return {"$ref": self._defined(schema["$ref"], target, beside, whole)}
        parts = self._parts(schema, set())
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _DEFINITIONS and isinstance(value, dict):
                continue
            if key in _MANY and isinstance(value, dict):
                value = {name: self.anew(inner) for name, inner in value.items()}
            elif key in _VALUES and isinstance(value, dict):
                value = self.anew(value)
            elif key in ("items", "prefixItems") and isinstance(value, list):
                value = [self.anew(inner) for inner in value]
            elif key == "allOf" and isinstance(value, list):
                value = [self._close(inner, self._others(parts, beside, ("allOf", i)), False)
                         for i, inner in enumerate(value)]  # fmt: skip
            elif key in _OPTIONS and isinstance(value, list):
                others = self._others(parts, beside, (key, 0))
                if key == "oneOf" and not self._told_apart(value):
                    # One that is closed more than this might match alone where two of the schema's own do.
                    others = others | replace(parts[key, 0], named=False, opens=False, shut=False, options=False)
                value = [self._close(inner, others, True) for inner in value]
            made[key] = value
        if target is not None:
            reference = made.pop("$ref")
            to = self._defined(reference, target, self._others(parts, beside, ("$ref", 0)), False)
            members = made.get("allOf", [])
            made["allOf"] = [*(members if isinstance(members, list) else []), {"$ref": to}]
        everything = self._others(parts, beside, None)
        if whole and everything.named and not (everything.opens or everything.shut or everything.options):
            self._shut(made, everything)
        return made

    def _shut(self, schema: dict[str, Any], known: _Known) -> None:
        for key, names in (("properties", known.names), ("patternProperties", known.patterns)):
            own = schema.get(key, {})
            if not isinstance(own, dict):  # the library says what is wrong with it
                return
            if names:
                schema[key] = {**own, **{name: True for name in names if name not in own}}
        schema.setdefault("properties", {})
        schema["additionalProperties"] = False

    def _others(self, parts: Mapping[tuple[str, int], _Known], beside: _Known, but: tuple[str, int] | None) -> _Known:
        for name, part in parts.items():
            beside = beside | part if name != but else beside
        return beside

    def _parts(self, schema: Mapping[str, Any], seen: set[str]) -> dict[tuple[str, int], _Known]:
        """What is known of an object by each of a schema's conditions."""
        parts = {("", 0): _own(schema)}
        members = schema.get("allOf")
        for i, member in enumerate(members if isinstance(members, list) else []):
            parts["allOf", i] = self._known(member, seen)
        target = self._target(schema)
        if target is not None and schema["$ref"] not in seen:
            parts["$ref", 0] = self._known(target, seen | {schema["$ref"]})
        for key in _OPTIONS:
            options = schema.get(key)
            if isinstance(options, list):
                known = [self._known(option, seen) for option in options]
                maybe = _merged(known)
                opens = any(k.opens or k.options for k in known)
                parts[key, 0] = replace(maybe, named=False, opens=False, shut=False, options=opens)
        return parts

    def _known(self, schema: Any, seen: set[str]) -> _Known:
        return _merged(self._parts(schema, seen).values()) if isinstance(schema, dict) else _NOTHING

    def _target(self, schema: Any) -> Any:
        """The schema that one refers to; None where it does not, or that cannot be told here."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if reference is None:
            return None
        found = self._root
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            for step in unquote(reference).split("/")[1:]:
                key = step.replace("~1", "/").replace("~0", "~")
                if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                    found = found[int(key)]
                else:
                    found = found.get(key) if isinstance(found, dict) else None
            if isinstance(found, dict | bool):
                return found
        self.left = True
        return None

    def _defined(self, reference: str, target: Any, beside: _Known, whole: bool) -> str:
        """A reference to what `target` is beside something else."""
        key = (reference, *beside.key, whole)
        if key not in self._names:
            self._names[key] = name = f"closed{len(self._names)}"
            self.definitions[name] = self._close(target, beside, whole)
        return f"#/$defs/{self._names[key]}"

    def _told_apart(self, options: list[Any]) -> bool:
        """Whether each option requires another constant of one property, or is of another type."""
        found = [self._resolved(option) for option in options]
        types = [option.get("type") for option in found]
        if all(isinstance(kind, str) for kind in types) and len({*types}) == len(types):
            return not {"integer", "number"} <= {*types}
        for name in found[0].get("properties", {}) if found and isinstance(found[0].get("properties"), dict) else ():
            values = [_constants(option, name) for option in found]
            if all(values) and len({v for each in values for v in each}) == sum(map(len, values)):
                return True
        return False

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        for _ in range(16):
            target = self._target(schema)
            if target is None:
                break
            schema = target
        return schema if isinstance(schema, dict) else {}


def _own(schema: Mapping[str, Any]) -> _Known:
    """What a schema's own keywords say of an object."""
    named, patterns, required = (schema.get(key) for key in ("properties", "patternProperties", "required"))
    names = dict.fromkeys(named) if isinstance(named, dict) else {}
    if isinstance(required, list):
        names |= dict.fromkeys(name for name in required if isinstance(name, str))
    others = schema.get("additionalProperties")
    return _Known(
        names,
        dict.fromkeys(patterns) if isinstance(patterns, dict) else {},
        named=isinstance(named, dict),
        opens=others not in (None, False) or "unevaluatedProperties" in schema,
        shut=others is False,
    )


def _merged(parts: Iterable[_Known]) -> _Known:
    merged = _NOTHING
    for part in parts:
        merged = merged | part
    return merged


def _constants(option: Mapping[str, Any], name: str) -> set[str]:
    """Constants that an option requires a property to be, as text; none where it does not."""
    properties, required = option.get("properties"), option.get("required")
    value = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(value, dict) or not isinstance(required, list) or name not in required:
        return set()
    choices = [value["const"]] if "const" in value else value.get("enum")
    return {f"{type(c).__name__} {c}" for c in choices} if isinstance(choices, list) else set()
