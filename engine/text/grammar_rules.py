"""Grammars of replies: JSON of a schema, and tool calls in the formats that models were trained to write.

A grammar is text in the Lark-like language of llguidance: rules in lower case, terminals (regular expressions) in upper
case, JSON schemas by `%json`, tokens by their id. Formats:

    hermes   <tool_call>\\n{"name": "NAME", "arguments": JSON}\\n</tool_call>
    xml      <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n ... </function>\\n</tool_call>
    laguna   <tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n ... </tool_call>
    gemma4   <|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>

VALUE of xml and laguna is the text itself where the schema allows a string, and JSON elsewhere. In gemma4 strings stand
between two <|"|>, keys are bare, the rest is as in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from llguidance import regex_to_lark

from engine.ground.errors import RequestError
from engine.text.circles import endless
from engine.text.ranges import held
from engine.text.schemas import closed, resolved, telling
from engine.text.tokenizer import Tokenizer

Format: TypeAlias = Literal["hermes", "xml", "laguna", "gemma4"]
Schema: TypeAlias = Mapping[str, Any] | bool

_BLANKS = r"[ \t]{1,2}|\n[ \t]{0,64}"  # between the marks of JSON: bounded, or a model may write blanks for ever
_TEXT = "/(?s:.*)/"
_QUOTE = '<|"|>'  # Gemma's quotation mark, a token of its own
_NOT_IN_KEYS = re.compile(r"[<>]")  # where values stand between tags
_NOT_IN_BARE_KEYS = re.compile(r"[<:]|^[\s,{}\"]|[\s\"]$|^$")  # Gemma's
_KEYS_OF_REFERENCES = frozenset(("$ref", "description", "title", "default", "$defs", "definitions"))
# Keywords with a meaning that the rules below do not express; where JSON stands, llguidance does.
_NOT_IN_OBJECTS = frozenset((
    "allOf", "anyOf", "dependencies", "dependentRequired", "dependentSchemas", "if", "maxProperties", "minProperties",
    "not", "oneOf", "patternProperties", "propertyNames", "unevaluatedProperties",
))  # fmt: skip
_NOT_IN_ARRAYS = frozenset(("allOf", "anyOf", "contains", "if", "not", "oneOf", "prefixItems", "uniqueItems"))
_NOT_IN_TEXT = frozenset(("allOf", "if", "not", "oneOf"))
_NOT_BESIDE_ANY_OF = frozenset(("maxLength", "minLength", "pattern", "type"))
_NOT_IN_VALUES = frozenset(("allOf", "if", "not", "oneOf"))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call; parameters: JSON schema of an object, None: any object."""

    name: str
    parameters: Schema | None = None


class Rules:
    """The rules of one grammar, a line each.

    tokenizer: says which marks are control tokens. tool: whose rules are added now; `owner(i)` is that of line i.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tool = ""
        self._tokenizer = tokenizer
        self._lines: list[str] = []
        self._owners: list[str] = []
        self._values: dict[str, str] = {}  # rules of Gemma's values that others refer to

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def owner(self, line: int) -> str:
        """The tool that line 1, 2, ... belongs to, or ""."""
        return self._owners[line - 1] if 0 < line <= len(self._owners) else ""

    def add(self, body: str, name: str = "", options: str = "") -> str:
        """Add a rule, named if it is to have a certain name; its name."""
        name = name or f"r{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        self._owners.append(self.tool)
        return name

    def marks(self, text: str) -> str:
        """Text of a model's format; names of control tokens in it are these tokens."""
        parts: list[str] = []
        plain = ""
        for piece in self._tokenizer.split_special(text):
            name = piece if isinstance(piece, str) else self._tokenizer.decode([piece])
            if isinstance(piece, int) and self._tokenizer.is_control(name):
                parts += [quoted(plain)] * bool(plain) + [f"<[{piece}]>"]
                plain = ""
            else:
                plain += name
        return " ".join(parts + [quoted(plain)] * bool(plain))

    def until(self, mark: str, conditions: Sequence[str] = ()) -> str:
        """Text up to its first `mark`, and the mark; conditions: regular expressions, all of which the text matches."""
        marks, conditions = self.marks(mark), [*conditions]
        if marks == quoted(mark):
            # A lazy rule ends with the first mark that it can end with, which a condition can delay.
            conditions += [f"~({_TEXT} {marks} {_TEXT})"] if conditions else []
        elif not re.fullmatch(r"<\[\d+\]>", marks):
            raise RequestError(f"field 'grammar': {mark!r} is neither plain text nor one of the model's tokens")
        text = self.add(" & ".join(conditions or [_TEXT]), f"T{len(self._lines)}")
        return self.add(f"{text} {marks}", options="[lazy]" if marks == quoted(mark) else "")

    def json(self, schema: Schema, root: Schema | None = None) -> str:
        """JSON text of a schema; root: the schema that it is a part of, for what it refers to."""
        if schema is not False:
            try:
                made = closed({} if schema is True else schema, schema if root is None else root)
            except ValueError as error:
                raise self.refusal(str(error)) from None
            schema = {**made, "x-guidance": {"whitespace_pattern": _BLANKS}}
            json.dumps(schema, ensure_ascii=False).encode()  # half of a surrogate pair is an error here
        return self.add(f"%json {json.dumps(schema)}")

    # --- schemas where no JSON stands ---------------------------------------------------------------

    def refusal(self, reason: str) -> RequestError:
        """The error of a schema that cannot become rules."""
        of_tool = f" of tool {self.tool!r}" if self.tool else ""
        return RequestError(f"the schema{of_tool} cannot be enforced: {reason}")

    def check_ends(self, schema: Any) -> None:
        """Refuse a schema that a value would have no end by."""
        reference = endless(schema, lambda found: resolved(found["$ref"], schema))
        if reference is not None:
            raise self.refusal(
                f"the reference {reference!r} refers to itself in a circle, and no JSON that ends is valid by it; do "
                "not require what leads back, or give it another option by 'anyOf'"
            )

    def without(self, keywords: Collection[str], schema: Mapping[str, Any]) -> None:
        """Refuse a schema that has one of these keywords."""
        for found in sorted(set(keywords) & schema.keys()):
            raise self.refusal(f"{found!r} is not supported in this format")

    def resolved(self, schema: Any, root: Any) -> Any:
        """The schema that one which only refers to another means."""
        seen: set[int] = set()
        while id(schema) not in seen:
            seen.add(id(schema))
            if not isinstance(schema, dict | bool):
                raise self.refusal(f"{json.dumps(schema)[:80]} is no schema")
            if isinstance(schema, bool) or "$ref" not in schema:
                return schema
            reference, found = schema["$ref"], root
            if schema.keys() - _KEYS_OF_REFERENCES or not str(reference).startswith("#"):
                raise self.refusal(f"the reference {reference!r} is not supported in this format")
            for step in str(reference).split("/")[1:]:
                key = step.replace("~1", "/").replace("~0", "~")
                found = found.get(key) if isinstance(found, dict) else None
            if found is None:
                raise self.refusal(f"the reference {reference!r} leads nowhere")
            schema = found
        raise self.refusal("references go round in a circle")

    def properties(self, schema: Any, root: Any) -> list[tuple[str, Any, bool]]:
        """Name, schema and whether it is required, of each property of an object."""
        schema = self.resolved({} if schema is None else schema, root)
        if schema is False or (schema is not True and schema.get("type", "object") != "object"):
            raise self.refusal(f"{json.dumps(schema)[:80]} allows no object")
        schema = {} if schema is True else telling(schema)
        self.without(_NOT_IN_OBJECTS, schema)
        named, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(named, dict) or not isinstance(required, list) or not all(type(r) is str for r in required):
            raise self.refusal("'properties' is no object, or 'required' no list of names")
        named = named | {name: True for name in required if name not in named}
        return [(name, value, name in required) for name, value in named.items()]

    def text(self, schema: Any, root: Any, mark: str) -> str:
        """A string that `schema` allows, as it is, or null; up to `mark`, and the mark."""
        return self._any_of(self._texts(schema, root, mark, set()))

    def _texts(self, schema: Any, root: Any, mark: str, seen: set[int]) -> list[str]:
        """The texts that a schema allows; none of a schema that was `seen`: options may meet again."""
        schema = self.resolved(schema, root)
        if isinstance(schema, bool):
            return [self.until(mark)] if schema else []
        if id(schema) in seen:
            return []
        seen.add(id(schema))
        self.without(_NOT_IN_TEXT, schema)
        choices = _choices(schema)
        if choices is not None:
            texts = ["null" if choice is None else choice for choice in choices]
            return [f"{quoted(text)} {self.marks(mark)}" for text in texts if isinstance(text, str)]
        if "anyOf" in schema:
            self.without(_NOT_BESIDE_ANY_OF, schema)
            return [text for option in self._options(schema, "anyOf") for text in self._texts(option, root, mark, seen)]
        kinds = _kinds(schema)
        texts = [f"{quoted('null')} {self.marks(mark)}"] if "null" in kinds else []
        return [*texts, self.until(mark, self._conditions(schema))] if "string" in kinds else texts

    def _allows_text(self, schema: Any, root: Any, seen: set[int]) -> bool:
        schema = self.resolved(schema, root)
        if isinstance(schema, bool):
            return schema
        if id(schema) in seen:  # where it allowed text, nobody would ask again
            return False
        seen.add(id(schema))
        choices = _choices(schema)
        if choices is not None:
            return any(isinstance(choice, str) for choice in choices)
        options = [*self._options(schema, "anyOf"), *self._options(schema, "oneOf")]
        return any(self._allows_text(o, root, seen) for o in options) if options else "string" in _kinds(schema)

    def _options(self, schema: Mapping[str, Any], keyword: str) -> list[Any]:
        options = schema.get(keyword, [])
        if not isinstance(options, list):
            raise self.refusal(f"{keyword!r} is a list")
        return options

    def _conditions(self, schema: Mapping[str, Any]) -> list[str]:
        """Regular expressions for the keywords of strings."""
        found = []
        schema = self._held(schema)
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        if low or high != "":
            if type(low) is not int or type(high) not in (int, str):
                raise self.refusal("'minLength' and 'maxLength' are integers")
            found.append(f"/(?s:.{{{low},{high}}})/")
        if "pattern" in schema:
            found.append(self._pattern(schema["pattern"]))
        return found

    def _pattern(self, pattern: Any) -> str:
        """A regular expression of whole texts for a pattern, which may match anywhere in them."""
        if type(pattern) is not str:
            raise self.refusal("'pattern' is a string")
        ends = re.search(r"(?<!\\)(\\\\)*\$\Z", pattern) is not None
        middle = regex_to_lark((pattern[:-1] if ends else pattern).removeprefix("^"), "dw")
        return f"/{'' if pattern.startswith('^') else '(?s:.*)'}({middle}){'' if ends else '(?s:.*)'}/"

    def arguments(self, tool: Tool, before: str, between: str, after: str) -> str:
        """Properties one after the other, each with a line break behind it: `before`, name, `between`, value, `after`.

        As in speech/calls.py: a value is text where that is allowed at all, but null where that is, too; else JSON.
        """
        found = []
        for name, schema, required in self.properties(tool.parameters, tool.parameters):
            self._check_key(name, _NOT_IN_KEYS)
            if self._allows_text(schema, tool.parameters, set()):
                value = self.text(schema, tool.parameters, after)
            else:
                value = f"{self.json(schema, tool.parameters)} {self.marks(after)}"
            opened = f"{self.marks(before)} {quoted(name)} {self.marks(between)}"
            found.append(self.add(f'{opened} {value} "\\n"') + ("" if required else "?"))
        return " ".join(found)

    def _check_key(self, name: str, amiss: re.Pattern[str]) -> None:
        """Refuse a property that nobody could read back."""
        if found := amiss.search(name):
            raise self.refusal(f"the property {name[:80]!r} has {found[0]!r}, which this format has no way to write")

    def _held(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return held(schema)
        except ValueError as error:
            raise self.refusal(str(error)) from None

    # --- Gemma's values ------------------------------------------------------------------------------

    def value(self, schema: Any, root: Any) -> str:
        """A value as Gemma writes it; a rule for each schema that is referred to."""
        if isinstance(schema, dict) and "$ref" in schema:
            key = f"{self.tool} {schema['$ref']}"
            if key not in self._values:
                self._values[key] = name = f"v{len(self._values)}"
                self.add(self.value(self.resolved(schema, root), root), name)
            return self._values[key]
        schema = self.resolved(schema, root)
        if schema is False:
            raise self.refusal("a value that nothing is allowed for")
        schema = {} if schema is True else telling(schema)
        if _is_text(schema):
            return f"{self.marks(_QUOTE)} {self.text(schema, root, _QUOTE)}"
        self.without(_NOT_IN_VALUES, schema)
        if "const" in schema or "enum" in schema:
            return self._any_of([self._constant(choice) for choice in _choices(schema) or ()])
        if "anyOf" in schema:
            self.without(schema.keys() - {"anyOf", "$defs", "definitions", "description", "title", "default"}, schema)
            return self._any_of([self.value(option, root) for option in self._options(schema, "anyOf")])
        kinds = _kinds(schema)
        if len(kinds) > 1:
            return self._any_of([self.value({**schema, "type": kind}, root) for kind in kinds])
        kind = kinds[0]
        if kind == "array":
            return self._array(schema, root)
        if kind == "object":
            return self._object(schema, root)
        return self.json(schema)

    def _any_of(self, options: Sequence[str]) -> str:
        if not options:
            raise self.refusal("a choice among nothing")
        return self.add(" | ".join(options))

    def _anything(self) -> str:
        if "anything" not in self._values:
            self._values["anything"] = "anything"
            self.add(self.value({}, {}), "anything")
        return "anything"

    def _item(self, schema: Any, root: Any) -> str:
        return self._anything() if schema in (True, {}) else self.add(self.value(schema, root))

    def _array(self, schema: Mapping[str, Any], root: Any) -> str:
        schema = self._held(telling(schema))
        self.without(_NOT_IN_ARRAYS, schema)
        item, low, high = self._item(schema.get("items", True), root), schema.get("minItems", 0), schema.get("maxItems")
        if type(low) is not int or (high is not None and (type(high) is not int or not low <= high)):
            raise self.refusal("'minItems' and 'maxItems' are integers, in order")
        if high == 0:
            return '"[]"'
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        return self.add(f'"[" {item} {more} "]"' if low else f'"[" ({item} {more})? "]"')

    def _object(self, schema: Mapping[str, Any], root: Any) -> str:
        named = sorted(self.properties(schema, root))  # the order in which its chat template writes them
        if not named:
            others = schema.get("additionalProperties", "properties" not in schema)
            if others is False:
                return '"{}"'
            item = f'/[A-Za-z0-9_.-]+/ ":" {self._item(others, root)}'
            return self.add(f'"{{" ({item} ("," {item})*)? "}}"')
        # Of optional properties, with commas between those that are there: `first` is what may follow where none was
        # written yet, `later` where one was.
        first, later = "", ""
        for name, value, required in reversed(named):
            self._check_key(name, _NOT_IN_BARE_KEYS)
            item = self.add(f"{quoted(name + ':')} {self._item(value, root)}")
            alone = f"{item} {later}"
            first = self.add(alone if required else f"{alone} | {first}" if first else f"({alone})?")
            later = self.add(f'"," {alone}' if required else f'("," {item})? {later}')
        return self.add(f'"{{" {first} "}}"')

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.marks(_QUOTE)} {quoted(value)} {self.marks(_QUOTE)}"
        if isinstance(value, dict | list):
            raise self.refusal("a list or an object among the constants is not supported in this format")
        return quoted(json.dumps(value))


def quoted(text: str) -> str:
    """A literal of a rule."""
    return json.dumps(text, ensure_ascii=False)


def _choices(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) and choices else None


def _is_text(schema: Schema) -> bool:
    """Whether a schema allows strings alone."""
    if isinstance(schema, bool):
        return False
    choices = _choices(schema)
    return _kinds(schema) == ["string"] if choices is None else all(type(choice) is str for choice in choices)


def _kinds(schema: Mapping[str, Any]) -> Sequence[Any]:
    """The types that a schema names."""
    kinds = schema.get("type", ["string", "number", "boolean", "null", "array", "object"])
    return kinds if isinstance(kinds, list) and kinds else [kinds]


# --- calls ----------------------------------------------------------------------------------------

_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf")  # where a schema may say of what type its values are


_OPENS, _SHUTS = "<tool_call>", "</tool_call>"
_HERMES_END = f"}}\n{_SHUTS}"
_XML_END = f"</function>\n{_SHUTS}"


def _hermes(rules: Rules, tool: Tool) -> str:
    head = '\n{"name": ' + quoted(tool.name) + ', "arguments": '
    schema: Schema = {} if tool.parameters is None else tool.parameters
    if isinstance(schema, Mapping) and "$ref" not in schema:
        schema = {**schema, "type": "object"}  # also of the options of an `anyOf`
    return f"{rules.marks(_OPENS)} {quoted(head)} {rules.json(schema)} {rules.marks(_HERMES_END)}"


def _xml(rules: Rules, tool: Tool) -> str:
    head = f"\n<function={tool.name}>\n"
    arguments = rules.arguments(tool, "<parameter=", ">\n", "\n</parameter>")
    return f"{rules.marks(_OPENS)} {quoted(head)} {arguments} {rules.marks(_XML_END)}"


def _laguna(rules: Rules, tool: Tool) -> str:
    head = f"{tool.name}\n"
    arguments = rules.arguments(tool, "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
    return f"{rules.marks(_OPENS)} {quoted(head)} {arguments} {rules.marks(_SHUTS)}"


def _gemma4(rules: Rules, tool: Tool) -> str:
    head = f"call:{tool.name}"
    arguments = rules.value(tool.parameters, tool.parameters)
    return f"{rules.marks('<|tool_call>')} {quoted(head)} {arguments} {rules.marks('<tool_call|>')}"


def _of_objects(rules: Rules, schema: Schema | None) -> Schema:
    """What a tool's schema allows of objects: nothing else are arguments, and schemas need not say so."""
    if schema is None or schema is True:
        return {"type": "object"}
    if schema is False or not isinstance(schema, Mapping):
        return schema
    if "object" not in _kinds(schema):
        raise rules.refusal(f"{json.dumps(schema)[:80]} allows no object")
    return schema if any(name in schema for name in _ELSEWHERE) else {**schema, "type": "object"}


_FORMATS: Mapping[Format, tuple[Callable[[Rules, Tool], str], str]] = {
    "hermes": (_hermes, '"\\n"'),
    "xml": (_xml, '"\\n"'),
    "laguna": (_laguna, '"\\n"'),
    "gemma4": (_gemma4, ""),
}


def calls(rules: Rules, form: Format, tools: Sequence[Tool], parallel: bool) -> str:
    """Add the rules of one call of one of the tools, or of one call and more; the name of theirs."""
    write, between = _FORMATS[form]
    found = []
    for tool in tools:
        rules.tool = tool.name
        rules.check_ends(tool.parameters)
        found.append(rules.add(write(rules, replace(tool, parameters=_of_objects(rules, tool.parameters)))))
    rules.tool = ""
    call = rules.add(" | ".join(found))
    return rules.add(f"{call} ({between} {call})*" if parallel else call)
