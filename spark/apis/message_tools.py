"""Tools of Anthropic's messages: what of those that a request brings is the model's to call, and by which schema.

Tools that run at Anthropic are left out. Those whose schema its API keeps to itself and that the client runs all the
same (a shell, an editor, a memory) get a definition here. Messages of the system may bring further tools and take
others away: what counts is what holds at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spark.speech import conversation as c

CHANGES = ("tool_addition", "tool_removal")  # blocks of messages of the system
_TEXT, _INTEGER = {"type": "string"}, {"type": "integer"}
_LINES = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}
_EDITED = {
    "path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _INTEGER,
    "insert_text": _TEXT, "view_range": _LINES,
}  # fmt: skip


def _commands(names: Sequence[str], properties: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    command = {"type": "string", "enum": list(names)}
    return {"type": "object", "properties": {"command": command, **properties}, "required": ["command", *required]}


_EDITOR = (
    "View, create and edit text files. view: a file or folder, view_range: of its lines; create: file_text; "
    "str_replace: old_str, which occurs once, by new_str; insert: {} behind line insert_line."
)
_OLD_EDITOR = (
    _EDITOR.format("new_str") + " undo_edit: the last one.",
    _commands(
        ("view", "create", "str_replace", "insert", "undo_edit"),
        {name: schema for name, schema in _EDITED.items() if name != "insert_text"}, ("path",),
    ),
)  # fmt: skip
# By what their types begin with, the first that fits: what each is for, and its schema.
_OF_CLIENTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Run a command in a shell that goes on from one call to the next. restart: begin with a new one.",
        {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor_2024": _OLD_EDITOR,
    "text_editor_202501": _OLD_EDITOR,
    "text_editor_": (
        _EDITOR.format("insert_text"),
        _commands(("view", "create", "str_replace", "insert"), _EDITED, ("path",)),
    ),
    "memory_": (
        "Keep notes in files below /memories, which outlive the conversation. view: a file or folder; create: "
        "file_text; str_replace: old_str by new_str; insert: insert_text behind line insert_line; delete: path; "
        "rename: old_path to new_path.",
        _commands(
            ("view", "create", "str_replace", "insert", "delete", "rename"),
            {**_EDITED, "old_path": _TEXT, "new_path": _TEXT}, (),
        ),
    ),
}  # fmt: skip


def offered(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The tools that the model may call, as templates take them; raises RequestError that names the field."""
    given = list(enumerate(c.records(body, "tools", c.MAX_TOOLS, [])))
    # Tools that a search has found come last, so that prompts go on sharing what is before them.
    given.sort(key=lambda item: item[1].get("defer_loading") is True)
    found = [_tool(f"tools[{i}]", tool) for i, tool in given]
    tools = {made["function"]["name"]: made for made in c.unique_tools([tool for tool in found if tool is not None])}
    gone: set[str] = set()
    for where, block in _changes(messages):
        changed = c.get(block, "tool", dict, where=f"{where}.")
        if changed.get("type") == "tool_definition":
            where += ".tool.definition"
            if (made := _tool(where, c.get(changed, "definition", dict, where=where))) is None:
                continue
            name = made["function"]["name"]
            tools.pop(name, None)
            tools[name] = made
        elif changed.get("type") == "tool_reference":  # of one that is not the model's to call, too
            name = c.get(changed, "name", str, where=f"{where}.tool.")
        else:
            continue
        (gone.add if block["type"] == "tool_removal" else gone.discard)(name)
    if len(tools) > c.MAX_TOOLS:
        raise c.refusal("messages", f"with those of `tools` there are {len(tools)}; the limit is {c.MAX_TOOLS}")
    return tuple(made for name, made in tools.items() if name not in gone)


def _changes(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The blocks that bring tools or take them away, each with its place."""
    for i, message in enumerate(messages):
        content = message.get("content")
        if message.get("role") == "system" and type(content) is list:
            for k, block in enumerate(content):
                if type(block) is dict and block.get("type") in CHANGES:
                    yield f"messages[{i}].content[{k}]", block


def _tool(where: str, record: dict[str, Any]) -> dict[str, Any] | None:
    """A definition; None for a tool that runs at Anthropic."""
    kind = record.get("type")
    if kind in (None, "custom"):
        name = c.get(record, "name", str, where=f"{where}.")
        schema = c.get(record, "input_schema", dict, where=f"{where}.")
        return c.tool(where, name, record.get("description"), schema)
    known = (made for begin, made in _OF_CLIENTS.items() if type(kind) is str and kind.startswith(begin))
    if (found := next(known, None)) is None:
        return None
    return c.tool(where, c.get(record, "name", str, where=f"{where}."), *found)
