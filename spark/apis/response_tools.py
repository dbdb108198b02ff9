"""Tools of /v1/responses: which of them the model may call, and what their calls and results look like to clients.

Functions, custom tools, and those that the client runs by a schema of OpenAI's (shells, patches, a search for tools)
are functions to the model. Of tools that run at OpenAI those that agents send whether they are wanted or not are left
out; the others are refused by name, since whoever asks for them waits for what they find.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from spark.speech import conversation as c
from spark.speech.conversation import WholeCall

Kind: TypeAlias = Literal["function", "custom", "shell", "local_shell", "apply_patch", "tool_search"]
Given: TypeAlias = tuple[str, Mapping[str, Any]]  # where a tool stands, and it

_TEXT, _INTEGER = {"type": "string"}, {"type": "integer"}
_TEXTS = {"type": "array", "items": _TEXT}
_ANY: dict[str, Any] = {"type": "object"}
_CUSTOM_SCHEMA = {"type": "object", "properties": {"input": _TEXT}, "required": ["input"]}
_CUSTOM_OPENS = '{"input":"'
# As much of the argument as is whole: what comes last may be a part of an escape.
_CUSTOM_BEGUN = re.compile(r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)')


def _object(properties: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


# Those that the client runs by a schema of OpenAI's: what each is for, and its schema.
_OWN: Mapping[str, tuple[str, dict[str, Any]]] = {
    "shell": (
        "Run commands in a shell, one after the other.",
        _object({"commands": _TEXTS, "timeout_ms": _INTEGER, "max_output_length": _INTEGER}, ["commands"]),
    ),
    "local_shell": (
        "Run a command: the program and its arguments.",
        _object({"command": _TEXTS, "working_directory": _TEXT, "timeout_ms": _INTEGER}, ["command"]),
    ),
    "apply_patch": (
        "Create, update or delete a file. diff: of create_file the lines, each behind a +; of update_file, behind @@, "
        "lines of the file behind a blank, those that go behind a -, those that come behind a +; of delete_file empty.",
        _object(
            {"type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]}, "path": _TEXT,
             "diff": _TEXT},
            ["type", "path", "diff"],
        ),
    ),
}  # fmt: skip
# Their calls, and that of a search for tools: the tool, and the field that its arguments are in.
_CALLS: Mapping[str, tuple[Kind, str]] = {
    "shell_call": ("shell", "action"),
    "local_shell_call": ("local_shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "tool_search_call": ("tool_search", "arguments"),
}
_OF_KINDS = {kind: (call, field) for call, (kind, field) in _CALLS.items()}
_PREFIXES: Mapping[Kind, str] = {
    "function": "fc", "custom": "ctc", "shell": "sh", "local_shell": "lsh", "apply_patch": "apc", "tool_search": "tsc"
}  # fmt: skip
_LEFT_OUT = ("web_search", "image_generation")  # what the types of tools begin with that agents send by themselves
_GIVE = "give functions, custom tools, shell, local_shell or apply_patch"


def full_name(name: str, namespace: str | None) -> str:
    """The name that the model knows a tool by."""
    return name if not namespace else f"{namespace}__{name}"


def named(where: str, record: Mapping[str, Any]) -> str:
    """The full name of the tool that a record names, which those of OpenAI's do by their type."""
    kind = record.get("type")
    if type(kind) is str and (kind in _OWN or kind == "tool_search"):
        return kind
    return full_name(c.get(record, "name", str, where=where), c.get(record, "namespace", str, None, where))


@dataclass(frozen=True, slots=True)
class Tool:
    """What a tool is to the client: its name, and the kind of its calls. known_as: its name to the model."""

    known_as: str
    name: str
    namespace: str | None
    kind: Kind


def offered(body: Mapping[str, Any], brought: Sequence[Given]) -> tuple[tuple[dict[str, Any], ...], tuple[Tool, ...]]:
    """The tools that the model may call, as templates take them, and what is not a plain function among them.

    brought: further ones, by items of the input. Raises RequestError that names the field.
    """
    given: list[Given] = [(f"tools[{i}]", tool) for i, tool in enumerate(c.records(body, "tools", c.MAX_TOOLS, []))]
    made: list[tuple[dict[str, Any], Tool]] = []
    for where, record in (*given, *brought):
        if record.get("type") != "namespace":
            made += _tool(where, record, None)
            continue
        namespace = c.get(record, "name", str, "", f"{where}.")
        for k, inner in enumerate(c.get(record, "tools", list, [], f"{where}.")):
            made += _tool(f"{where}.tools[{k}]", c.as_object(f"{where}.tools[{k}]", inner), namespace)
    if len(made) > c.MAX_TOOLS:
        raise c.refusal("tools", f"{len(made)} of them; the limit is {c.MAX_TOOLS}")
    definitions = c.unique_tools([definition for definition, _ in made])
    tools = {tool.known_as: tool for _, tool in reversed(made)}
    return definitions, tuple(tool for tool in tools.values() if tool.kind != "function" or tool.namespace)


def _tool(where: str, record: Mapping[str, Any], namespace: str | None) -> list[tuple[dict[str, Any], Tool]]:
    """One tool; none for those that are left out."""
    kind = c.get(record, "type", str, where=f"{where}.")
    if kind.startswith(_LEFT_OUT) or (kind == "tool_search" and record.get("execution") != "client"):
        return []  # what such a search would find is given at once
    description, parameters = record.get("description"), record.get("parameters")
    if kind in ("function", "custom"):
        name = c.get(record, "name", str, where=f"{where}.")
    elif kind in _OWN:
        environment = c.get(record, "environment", dict, {}, f"{where}.").get("type")
        if environment not in (None, "local"):
            raise c.refusal(f"{where}.environment.type", "there are no containers here", hint="'local' runs at yours")
        name, (description, parameters) = kind, _OWN[kind]
    elif kind == "tool_search":
        name, parameters = kind, _ANY if parameters is None else parameters
    else:
        of_mcp = "connect to it where the client runs, and give its tools as functions"
        raise c.refusal(f"{where}.type", f"{kind[:40]!r} is not supported", hint=of_mcp if kind == "mcp" else _GIVE)
    if kind == "custom":
        form = c.get(record, "format", dict, {}, f"{where}.")
        definition = c.get(form, "definition", str, "", f"{where}.format.")
        description = "\n\n".join(filter(None, (c.get(record, "description", str, "", f"{where}."), definition)))
        parameters = _CUSTOM_SCHEMA
    known_as = full_name(name, namespace)
    return [(c.tool(where, known_as, description, parameters), Tool(known_as, name, namespace, kind))]


_Choice: TypeAlias = tuple[Any, tuple[dict[str, Any], ...]]


def choice(value: Any, tools: tuple[dict[str, Any], ...]) -> _Choice:
    """The choice that a request makes, and the tools that it leaves; raises RequestError that names the field."""
    if (word := c.choice_by_word(value, tools)) is not None:
        return word, tools
    kind = value.get("type") if type(value) is dict else None
    if type(kind) is str and kind in _PREFIXES:
        where = "tool_choice.name" if kind in ("function", "custom") else "tool_choice.type"
        return c.chosen(named("tool_choice.", value), tools, where), tools
    if kind == "allowed_tools":
        own = [item for item in c.records(value, "tools", c.MAX_TOOLS) if item.get("type") in tuple(_PREFIXES)]
        return c.allowed({**value, "tools": own}, tools, "tool_choice.", named)
    raise c.refusal("tool_choice", "expected 'auto', 'none', 'required', a tool that is the client's, or allowed_tools")


# --- calls and results of the input -----------------------------------------------------------


def call(where: str, item: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The id, the tool's name and the arguments of a call of OpenAI's own tools; None: it is none.

    They are as the model will have written them: without what was added for the client, in the order of the schema.
    """
    kind = item.get("type")
    if type(kind) is not str or kind not in _CALLS or item.get("execution") == "server":
        return None
    name, field = _CALLS[kind]
    given = c.get(item, field, dict, where=f"{where}.")
    known = [*_OWN[name][1]["properties"]] if name in _OWN else [*given]
    arguments = {key: given[key] for key in known if given.get(key) is not None}
    if name == "apply_patch":
        arguments.setdefault("diff", "")
    return _call_id(where, item), name, json.dumps(arguments)


def result(where: str, item: Mapping[str, Any]) -> tuple[str, str] | None:
    """The call's id and the text of a result of such a call; None: it is none."""
    match item.get("type"):
        case "local_shell_call_output":  # by OpenAI's schema it has the id of the call as its own
            return _call_id(where, item), c.get(item, "output", str, "", f"{where}.")
        case "shell_call_output":
            chunks = c.get(item, "output", list, where=f"{where}.")
            texts = [_printed(f"{where}.output[{i}]", chunk) for i, chunk in enumerate(chunks)]
            return c.get(item, "call_id", str, where=f"{where}."), "\n".join(texts)
        case "apply_patch_call_output":
            status, said = c.get(item, "status", str, "", f"{where}."), c.get(item, "output", str, "", f"{where}.")
            text = said if said and status != "failed" else ": ".join(filter(None, (status, said)))
            return c.get(item, "call_id", str, where=f"{where}."), text
        case "tool_search_output" if item.get("call_id") is not None and item.get("execution") != "server":
            names = [tool.get("name") for tool in c.records(item, "tools", c.MAX_TOOLS, [])]
            text = ", ".join(name for name in names if type(name) is str)
            return c.get(item, "call_id", str, where=f"{where}."), f"found: {text or 'nothing'}"
    return None


def _call_id(where: str, item: Mapping[str, Any]) -> str:
    """The id of a call; old ones of local shells have that of the item alone."""
    found: str = c.get({"call_id": item.get("call_id") or item.get("id")}, "call_id", str, where=f"{where}.")
    return found


def _printed(where: str, chunk: Any) -> str:
    record = c.as_object(where, chunk)
    outcome = c.get(record, "outcome", dict, {}, f"{where}.")
    ended = ""
    if outcome.get("type") == "timeout":
        ended = "[timed out]"
    elif code := c.get(outcome, "exit_code", int, 0, f"{where}.outcome."):
        ended = f"[exit code {code}]"
    printed = [c.get(record, name, str, "", f"{where}.") for name in ("stdout", "stderr")]
    return "\n".join(filter(None, (*printed, ended)))


# --- calls of a reply ------------------------------------------------------------------------


def id_prefix(tool: Tool | None) -> str:
    """What the id of an item that calls it begins with."""
    return _PREFIXES["function" if tool is None else tool.kind]


def call_item(call: WholeCall, tool: Tool | None, status: str) -> dict[str, Any]:
    """The item of a call, as far as it is written; tool: None for a plain function."""
    common: dict[str, Any] = {"status": status, "call_id": call.id}
    if tool is None or tool.kind in ("function", "custom"):
        common["name"] = call.name if tool is None else tool.name
        if tool is not None and tool.namespace:
            common["namespace"] = tool.namespace
        if tool is not None and tool.kind == "custom":
            return {"type": "custom_tool_call", **common, "input": _custom_input(call)}
        return {"type": "function_call", **common, "arguments": call.arguments}
    kind, field = _OF_KINDS[tool.kind]
    given = call.input()
    made = {"type": kind, **common}
    match tool.kind:
        case "shell":
            action = {"commands": _strings(given.get("commands")), **_numbers(given, "timeout_ms", "max_output_length")}
            return {**made, field: action, "environment": {"type": "local"}}
        case "local_shell":
            place = given.get("working_directory")
            place = place if isinstance(place, str) else None
            command = _strings(given.get("command"))
            run: dict[str, Any] = {"type": "exec", "command": command, "env": {}, "working_directory": place}
            return {**made, field: {**run, **_numbers(given, "timeout_ms"), "user": None}}
        case "apply_patch":
            made["status"] = "in_progress" if status == "incomplete" else status  # it has no other
            texts = {name: given[name] for name in ("type", "path", "diff") if isinstance(given.get(name), str)}
            operation = {"type": "update_file", "path": "", "diff": "", **texts}
            if operation["type"] == "delete_file":
                del operation["diff"]
            return {**made, field: operation}
    return {**made, "execution": "client", field: given}


def _strings(value: object) -> list[str]:
    """What is to be a list of strings, as models write it."""
    if isinstance(value, str):
        return [value]
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _numbers(given: Mapping[str, Any], *names: str) -> dict[str, int | None]:
    return {name: given[name] if type(given.get(name)) is int else None for name in names}


def _custom_input(call: WholeCall) -> str:
    """What a custom tool is given, so far where the call was cut; all that was written if it is not that argument."""
    found = call.input().get("input")
    if isinstance(found, str):
        return found
    if begun := _CUSTOM_BEGUN.match(call.arguments):
        text = str(json.loads(f'"{begun[1]}"', strict=False))
        return text[:-1] if "\ud800" <= text[-1:] <= "\udbff" else text  # half of a character
    return "" if _CUSTOM_OPENS.startswith("".join(call.arguments.split())) else call.arguments
