"""Closing JSON schemas: an object that has its properties and no others, unless its schema says otherwise.

JSON schema lets an object have whatever `properties` does not name. Models are asked for what is named, and what else
they wrote nobody would read. So where `additionalProperties` says nothing, an object has the properties that its schema
names anywhere for it: in `properties` or `required`, in the members of `allOf`, behind `$ref`, and in that option of
`anyOf` or `oneOf` which it takes. This is what `"unevaluatedProperties": false` says, in words that llguidance knows:
what is closed is the merged object, never a member by itself. `{"type": "object"}`, which names none, stays open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from engine.text.ranges import held

VALUES = ("additionalProperties", "items", "additionalItems", "contains", "unevaluatedItems")  # a schema each
MANY = ("properties", "patternProperties")  # schemas by name
OPTIONS = ("anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")
_IN_PLACE = {"$ref", "allOf", *OPTIONS}  # keywords whose schemas are of the same value
_MORE_IN_PLACE = {"$dynamicRef", "$recursiveRef", "if", "not", "dependentSchemas", "dependencies"}  # none is served
# Formats of strings that the library enforces.
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
MOST_CLOSED = 1 << 16  # schemas that one is made of: as many as there may be values in what was asked for
MOST_DEEP = 256  # schemas within each other, through references, too: the library's stack has room for some 900


@dataclass(frozen=True)
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
        return _merged((self, other))

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What it takes to close what it is beside."""
        return frozenset(self.names), frozenset(self.patterns), self.named, self.opens or self.options, self.shut


_NOTHING = _Known()


def closed(schema: Any, root: Any) -> Any:
    """A schema that allows what `schema` does, without properties that it does not name.

    root: the schema that it is a part of, for what it refers to. References that lead nowhere, or to other documents,
    are left as they are. Raises RecursionError for what is nested too deeply, and ValueError, which says why, for a
    number that the library does not hold (engine/text/ranges.py), and for what would be too large or too deep: of
    options behind options that name properties, each way through them is an object of its own.
    """
    if not isinstance(schema, dict):
        return schema
    closing = _Closing(root)
    made = closing.anew(schema)
    closing.define()
    closing.check_depth()
    kept = {key: root[key] for key in _DEFINITIONS if key in root} if closing.left and isinstance(root, dict) else {}
    definitions = kept.get("$defs", {})
    if closing.definitions:
        kept["$defs"] = {**(definitions if isinstance(definitions, dict) else {}), **closing.definitions}
    return {**kept, **{key: value for key, value in made.items() if key not in kept}}


def resolved(reference: Any, root: Any) -> Any:
    """The schema that a reference leads to in `root`; None where it leads nowhere, or to another document."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict | bool) else None


def telling(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without keywords that say nothing where they stand; the library refuses them or reads more into them.

    A `format` that the library does not know is an annotation, as by JSON Schema all are.
    Beside `additionalItems` it drops `prefixItems`, as of a draft that has none. It does not know
    `"unevaluatedProperties": false`, which is `additionalProperties` where no schema beside it is of the same value.
    """
    idle = set()
    if not isinstance(schema.get("items"), list):
        idle.add("additionalItems")
    if "if" not in schema:
        idle |= {"then", "else"}
    if "contains" not in schema:
        idle |= {"minContains", "maxContains"}
    if schema.get("uniqueItems") is False:
        idle.add("uniqueItems")
    if schema.get("format") not in FORMATS:
        idle.add("format")
    if schema.get("propertyNames") in (True, {}, {"type": "string"}):  # which names are
        idle.add("propertyNames")
    told = {key: value for key, value in schema.items() if key not in idle}
    if told.get("unevaluatedProperties") is False and (_IN_PLACE | _MORE_IN_PLACE).isdisjoint(told):
        del told["unevaluatedProperties"]
        told.setdefault("additionalProperties", False)
    return told


class _Closing:
    """definitions: schemas that are referred to, closed, by new names. left: a reference was left as it is."""

    def __init__(self, root: Any) -> None:
        self.definitions: dict[str, Any] = {}
        self.left = False
        self._root = root
        self._names: dict[tuple[Any, ...], str] = {}
        self._asked: list[tuple[str, Any, _Known, bool]] = []  # definitions that are not made yet
        self._targets: dict[str, Any] = {}
        self._of: dict[int, _Known] = {}  # by the identity of a schema: each is looked at once
        self._n_closed = 0
        self._making = ""  # the definition that is being made
        self._level = 0  # how deep in it
        self._refers: dict[str, list[tuple[str, int]]] = {"": []}  # definitions: to which others, from which level

    def anew(self, schema: Any) -> Any:
        """A schema of a value of its own."""
        return self._close(schema, _NOTHING, True)

    def define(self) -> None:
        """Make the definitions that are referred to, in a row: a chain of references may be longer than the stack."""
        while self._asked:
            name, target, beside, whole = self._asked.pop()
            self._making, self._level = name, 0
            self._refers[name] = []
            self.definitions[name] = self._close(target, beside, whole)

    def check_depth(self) -> None:
        """Refuse what a walk that follows each reference when it first meets it, as the library's, has no stack for."""
        met, path = {""}, [(0, iter(self._refers[""]))]
        while path:
            depth, rest = path[-1]
            for name, level in rest:
                if depth + level > MOST_DEEP:
                    raise ValueError(
                        f"its references lead more than {MOST_DEEP} schemas deep; let fewer lie in one another"
                    )
                if name not in met:
                    met.add(name)
                    path.append((depth + level, iter(self._refers[name])))
                    break
            else:
                path.pop()

    def _close(self, schema: Any, beside: _Known, whole: bool) -> Any:
        """A schema, where `beside` is known of the same value from elsewhere; whole: to be closed here."""
        if not isinstance(schema, dict):
            return schema
        self._n_closed += 1
        if self._n_closed > MOST_CLOSED:
            raise ValueError(
                f"its options and references make more than {MOST_CLOSED} different objects; name fewer properties "
                "beside options that lead to further options"
            )
        is_root = schema is self._root
        schema = telling(schema)
        target = self._target(schema)
        if isinstance(schema.get("$id"), str) and not is_root and _refers(schema):
            raise ValueError(
                f"the '$id' {schema['$id']!r} inside it changes what the references within mean; leave it out and "
                "refer to parts of the whole schema"
            )
        if target is not None and not schema.keys() - {"$ref", *_DEFINITIONS}:
            if target is False:  # what is left out for it, as an optional property, is so where it stands only
                return False
            return {"$ref": self._defined(schema["$ref"], target, beside, whole)}
        self._level += 1
        parts = self._parts(schema)
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _DEFINITIONS and isinstance(value, dict):
                continue
            if key in MANY and isinstance(value, dict):
                value = {name: self.anew(inner) for name, inner in value.items()}
            elif key in VALUES and isinstance(value, dict):
                value = self.anew(value)
            elif key in ("items", "prefixItems") and isinstance(value, list):
                value = [self.anew(inner) for inner in value]
            elif key == "allOf" and isinstance(value, list):
                known = self._beside_members(parts, beside, value)
                value = [self._close(inner, others, False) for inner, others in zip(value, known, strict=True)]
            elif key in OPTIONS and isinstance(value, list):
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
        self._level -= 1
        return held(made)

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
        return _merged((beside, *(part for name, part in parts.items() if name != but)))

    def _beside_members(
        self, parts: Mapping[tuple[str, int], _Known], beside: _Known, members: list[Any]
    ) -> list[_Known]:
        """What is known beside each member of `allOf`; nothing where the member would not ask."""
        asks = [isinstance(member, dict) and not _IN_PLACE.isdisjoint(member) for member in members]
        if not any(asks):
            return [_NOTHING] * len(members)
        after = [_NOTHING]
        for part in [*parts.values()][::-1]:
            after.append(part | after[-1])
        before, found = beside | parts["", 0], []
        for i, ask in enumerate(asks):
            found.append(before | after[len(parts) - 2 - i] if ask else _NOTHING)
            before = before | parts["allOf", i]
        return found

    def _parts(self, schema: Mapping[str, Any]) -> dict[tuple[str, int], _Known]:
        """What is known of an object by each of a schema's conditions."""
        parts = {("", 0): _own(schema)}
        for name, inner in self._conditions(schema).items():
            known = [self._known(each) for each in inner]
            merged = _merged(known)
            if name[0] in OPTIONS:
                opens = any(k.opens or k.options for k in known)
                merged = replace(merged, named=False, opens=False, shut=False, options=opens)
            parts[name] = merged
        return parts

    def _conditions(self, schema: Mapping[str, Any]) -> dict[tuple[str, int], list[Any]]:
        """The schemas that hold of the same value: each member of `allOf`, what is referred to, the options."""
        members = schema.get("allOf")
        found = {("allOf", i): [member] for i, member in enumerate(members if isinstance(members, list) else [])}
        target = self._target(schema)
        if target is not None:
            found["$ref", 0] = [target]
        for key in OPTIONS:
            if isinstance(schema.get(key), list):
                found[key, 0] = schema[key]
        return found

    def _inside(self, schema: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [each for inner in self._conditions(schema).values() for each in inner if isinstance(each, dict)]

    def _known(self, schema: Any) -> _Known:
        if not isinstance(schema, dict):
            return _NOTHING
        if id(schema) not in self._of:
            for group in _groups(schema, lambda one: [each for each in self._inside(one) if id(each) not in self._of]):
                self._learn(group)
        return self._of[id(schema)]

    def _learn(self, group: list[dict[str, Any]]) -> None:
        """Learn what is known by schemas that lead to each other, where all else that they lead to is known."""
        above: dict[int, list[dict[str, Any]]] = {id(schema): [] for schema in group}
        self._of |= dict.fromkeys(above, _NOTHING)
        for schema in group:
            for inner in self._inside(schema):
                if id(inner) in above:
                    above[id(inner)].append(schema)
        # All of them have all names. The rest says itself from one to the next, until nothing is new.
        every = _merged(part for schema in group for part in self._parts(schema).values())
        if not any(above.values()):
            self._of[id(group[0])] = every
            return
        self._of |= dict.fromkeys(above, _Known(every.names, every.patterns))
        waiting = [*group]
        while waiting:
            schema = waiting.pop()
            known = replace(_merged(self._parts(schema).values()), names=every.names, patterns=every.patterns)
            if known != self._of[id(schema)]:
                self._of[id(schema)] = known
                waiting += above[id(schema)]

    def _target(self, schema: Any) -> Any:
        """The schema that one refers to; None where it does not, or that cannot be told here."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if reference is None:
            return None
        if str(reference) not in self._targets:
            self._targets[str(reference)] = resolved(reference, self._root)
        found = self._targets[str(reference)]
        self.left = self.left or found is None
        return found

    def _defined(self, reference: str, target: Any, beside: _Known, whole: bool) -> str:
        """A reference to what `target` is beside something else."""
        key = (reference, *beside.key, whole)
        if key not in self._names:
            self._names[key] = f"closed{len(self._names)}"
            self._asked.append((self._names[key], target, beside, whole))
        self._refers[self._making].append((self._names[key], max(self._level, 1)))
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
    schema = telling(schema)
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
    known = [part for part in parts if part is not _NOTHING]
    if len(known) < 2:
        return known[0] if known else _NOTHING
    return _Known(
        _together(part.names for part in known),
        _together(part.patterns for part in known),
        any(part.named for part in known),
        any(part.opens for part in known),
        any(part.shut for part in known),
        any(part.options for part in known),
    )


def _together(parts: Iterable[Mapping[str, None]]) -> Mapping[str, None]:
    """The names of all parts; those of one that has them all are shared, as a chain of references hands them on."""
    distinct = [*{id(part): part for part in parts if part}.values()]
    if len(distinct) < 2:
        return distinct[0] if distinct else {}
    return dict.fromkeys(name for part in distinct for name in part)


def _groups(
    first: dict[str, Any], inside: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]
) -> Iterator[list[dict[str, Any]]]:
    """Schemas that lead to each other, those that others lead to first: Tarjan's algorithm, without recursion."""
    met, low = {id(first): 0}, {id(first): 0}
    open_, is_open = [first], {id(first)}
    path = [(first, iter(inside(first)))]
    while path:
        schema, rest = path[-1]
        for inner in rest:
            if id(inner) not in met:
                met[id(inner)] = low[id(inner)] = len(met)
                open_.append(inner)
                is_open.add(id(inner))
                path.append((inner, iter(inside(inner))))
                break
            if id(inner) in is_open:
                low[id(schema)] = min(low[id(schema)], met[id(inner)])
        else:
            path.pop()
            if path:
                above = id(path[-1][0])
                low[above] = min(low[above], low[id(schema)])
            if low[id(schema)] == met[id(schema)]:
                begin = next(n for n in range(len(open_) - 1, -1, -1) if open_[n] is schema)
                group, open_[begin:] = open_[begin:], []
                is_open -= {id(each) for each in group}
                yield group


def _refers(schema: Any) -> bool:
    """Whether there is a reference to a part of a document in a schema."""
    left = [schema]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            if str(found.get("$ref", "")).startswith("#"):
                return True
            left += found.values()
        elif isinstance(found, list):
            left += found
    return False


def _constants(option: Mapping[str, Any], name: str) -> set[str]:
    """Constants that an option requires a property to be, as text; none where it does not."""
    properties, required = option.get("properties"), option.get("required")
    value = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(value, dict) or not isinstance(required, list) or name not in required:
        return set()
    choices = [value["const"]] if "const" in value else value.get("enum")
    return {f"{type(c).__name__} {c}" for c in choices} if isinstance(choices, list) else set()
