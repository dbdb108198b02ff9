"""Claude Code's attachments: what the program put before the model beside what was typed.

Since 2.1.268 a record holds the text that was sent (`rendered`). Before that it holds the pieces, and the text is
made of them here, in the program's words as far as these are known. Kinds that are not known to be sent, or whose
words are not in the log (instructions of plan mode, which every version has its own of), give nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from spark.extract.blocks import user_parts
from spark.extract.intake import Intake, Part, as_object, as_text

_Fields = dict[str, Any]
_IDE_CHARACTERS = 2000  # of a selection; the program cuts it there
_RAW_RESULTS = (2, 1, 80)  # about where results of attached files stopped being quoted as JSON (1.x to 2.0 did)
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})")

# The text of kinds that are one sentence; a field that is missing or empty means that nothing was sent.
_SENTENCES = {
    "agent_mention": 'The user has expressed a desire to invoke the agent "{agentType}". Please invoke the agent '
    "appropriately, passing in the required context to it. ",
    "batching_reminder_sent": "{text}",
    "budget_usd": "USD budget: ${used}/${total}; ${remaining} remaining",
    "compact_file_reference": "Note: {filename} was read before the last conversation was summarized, but the contents "
    "are too large to include. Use Read tool if you need to access it.",
    "critical_system_reminder": "{content}",
    "date_change": "The date has changed. Today's date is now {newDate}. DO NOT mention this to the user explicitly "
    "because they are already aware.",
    "edited_text_file": "Note: {filename} was modified, either by the user or by a linter. This change was "
    "intentional, so make sure to take it into account as you proceed (ie. don't revert it unless the user asks you "
    "to). Don't tell the user this, since they are already aware. Here are the relevant changes (shown with line "
    "numbers):\n{snippet}",
    "hook_stopped_continuation": "{hookName} hook stopped continuation: {message}",
    "opened_file_in_ide": "The user opened the file {filename} in the IDE. This may or may not be related to the "
    "current task.",
    "output_style": "{style} output style is active. Remember to follow the specific guidelines for this style.",
    "plan_file_reference": "A plan file exists from plan mode at: {planFilePath}\n\nPlan contents:\n\n{planContent}"
    "\n\nIf this plan is relevant to the current work and not already complete, continue working on it.",
    "read_truncation_notice": "{banner}",
    "silent_turn_reminder": "{text}",
    "skill_listing": "The following skills are available for use with the Skill tool:\n\n{content}",
    "token_usage": "Token usage: {used}/{total}; {remaining} remaining",
    "total_tokens_reminder": "{text}",
    "ultramemory": "{content}",
}
_TODO_REMINDER = (
    "The TodoWrite tool hasn't been used recently. If you're working on tasks that would benefit from tracking "
    "progress, consider using the TodoWrite tool to track progress. Also consider cleaning up the todo list if has "
    "become stale and no longer matches what you are working on. Only use it if it's relevant to the current work. "
    "This is just a gentle reminder - ignore if not applicable. Make sure that you NEVER mention this reminder to the "
    "user\n"
)
_TASK_REMINDER = (
    "The task tools haven't been used recently. If you're working on tasks that would benefit from tracking progress, "
    "consider using TaskCreate to add new tasks and TaskUpdate to update task status (set to in_progress when "
    "starting, completed when done). Also consider cleaning up the task list if it has become stale. Only use these "
    "if relevant to the current work. This is just a gentle reminder - ignore if not applicable. Make sure that you "
    "NEVER mention this reminder to the user\n"
)
_DEFERRED = (
    "The following deferred tools are now available via ToolSearch. Their schemas are NOT loaded — calling them "
    'directly will fail with InputValidationError. Use ToolSearch with query "select:<name>[,<name>...]" to load tool '
    "schemas before calling them:\n"
)


def sent_parts(record: dict[str, Any], prompt: object, intake: Intake) -> list[Part]:
    """What was sent for an attachment's record, as one part at most; prompt: the user's words in it, None without."""
    inserted = prompt is None or record.get("isMeta") is True
    if prompt is not None and not isinstance(record.get("rendered"), list):
        return user_parts({"content": prompt}, intake, inserted=inserted)[0]
    sent = [{"type": "text", "text": text} for text in sent_texts(record)]
    parts, _ = user_parts({"content": sent}, intake, inserted=True)
    typed = [] if inserted else user_parts({"content": prompt}, intake.quiet(), inserted=False)[0]
    return [part._replace(typed=bool(typed) and typed[0].typed) for part in parts]


def sent_texts(record: dict[str, Any]) -> list[str]:
    """The texts that the program sent for an attachment's record, tags included; none where it sent or told none."""
    rendered = record.get("rendered")
    if isinstance(rendered, list):
        return [text for item in rendered if (text := _block_text(as_object(item).get("content")))]
    fields = as_object(record.get("attachment"))
    kind = as_text(fields.get("type"))
    if kind in _SENTENCES:
        texts = [_fill(_SENTENCES[kind], fields)]
    elif kind in _MAKERS:
        texts = _MAKERS[kind]({**fields, "version": record.get("version")})
    else:
        return []
    return [f"<system-reminder>\n{text}\n</system-reminder>" for text in texts if text]


def version_of(text: str) -> tuple[int, ...]:
    """A version as numbers, none if it is not one."""
    found = _VERSION.match(text)
    return tuple(map(int, found.groups())) if found else ()


def _fill(sentence: str, fields: _Fields) -> str:
    """The sentence with its fields, nothing if one of them is missing."""
    found = {name: _scalar(fields.get(name)) for name in re.findall(r"\{(\w+)\}", sentence)}
    return re.sub(r"\{(\w+)\}", lambda name: found[name[1]], sentence) if all(found.values()) else ""


def _scalar(value: object) -> str:
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _count(value: object, default: int = 0) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 31 else default


def _strings(value: object) -> list[str]:
    """The strings of a list, or a string as the only one."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, str) and item]


def _objects(value: object) -> list[_Fields]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _block_text(content: object) -> str:
    """The text of a message's content, where pictures are named."""
    if isinstance(content, str):
        return content
    blocks = _objects(content)
    texts = (as_text(block.get("text")) or f"[{_scalar(block.get('type')) or 'unknown'}]" for block in blocks)
    return "\n".join(texts)


# --- Files ---


def _called(tool: str, arguments: _Fields) -> str:
    shown = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return f"Called the {tool} tool with the following input: {shown}"


def _old(fields: _Fields) -> bool:
    """Whether a version wrote the record that numbered lines with arrows and quoted results."""
    version = version_of(as_text(fields.get("version")))
    return () < version < _RAW_RESULTS


def _result(tool: str, text: str, *, old: bool) -> str:
    shown = f" {json.dumps(text, ensure_ascii=False)}" if old else f"\n{text}"
    return f"Result of calling the {tool} tool:{shown}"


def _file(fields: _Fields) -> list[str]:
    content, old = as_object(fields.get("content")), _old(fields)
    file = as_object(content.get("file"))
    kind = as_text(content.get("type"))
    if kind == "text":
        body = as_text(file.get("content"))
        lines = enumerate(body.split("\n"), _count(file.get("startLine"), 1))
        text = "\n".join(f"{n:6}→{line}" if old else f"{n}\t{line}" for n, line in lines) if body else ""
    elif kind == "notebook":
        text = json.dumps(file.get("cells"), ensure_ascii=False)
    else:
        text = {"image": "[image]", "pdf": "[document]"}.get(kind, as_text(fields.get("content")))
    path = as_text(fields.get("filename")) or as_text(file.get("filePath"))
    if not text:
        return []
    texts = [_called("Read", {"file_path": path}), _result("Read", text, old=old)]
    if fields.get("truncated") is True:
        texts.append(
            f"Note: The file {path} was too large and has been truncated to the first 2000 lines. Don't tell the user "
            "about this truncation. Use Read to read more of the file if you need."
        )
    return texts


def _directory(fields: _Fields) -> list[str]:
    path, listing = as_text(fields.get("path")), as_text(fields.get("content"))
    call = _called("Bash", {"command": f"ls {path}", "description": f"Lists files in {path}"})
    return [call, _result("Bash", listing, old=_old(fields))] if listing else []


def _mcp_resource(fields: _Fields) -> list[str]:
    contents = _objects(as_object(fields.get("content")).get("contents"))
    texts = [text for item in contents if (text := as_text(item.get("text")))]
    again = (
        "Do NOT read this resource again unless you think it may have changed, since you already have the full "
        "contents."
    )
    return [f"Full contents of resource:\n{text}\n{again}" for text in texts]


def _memory(fields: _Fields) -> list[str]:
    return [_fill("Contents of {path}:\n\n{content}", as_object(fields.get("content")))]


def _selection(fields: _Fields) -> list[str]:
    text = as_text(fields.get("content"))
    cut = text[:_IDE_CHARACTERS] + "\n... (truncated)" if len(text) > _IDE_CHARACTERS else text
    sentence = (
        "The user selected the lines {lineStart} to {lineEnd} from {filename}:\n{content}\n\n"
        "This may or may not be related to the current task."
    )
    return [_fill(sentence, {**fields, "content": cut})]


def _diagnostics(fields: _Fields) -> list[str]:
    files = []
    for file in _objects(fields.get("files")):
        lines = [_diagnostic(item) for item in _objects(file.get("diagnostics"))]
        if lines:
            files.append("\n".join([as_text(file.get("uri")).rsplit("/", 1)[-1] + ":", *lines]))
    found = "\n\n".join(files)
    head = "The following new diagnostic issues were detected:"
    return [f"<new-diagnostics>{head}\n\n{found}</new-diagnostics>"] if found else []


def _diagnostic(item: _Fields) -> str:
    mark = {"Error": "✘", "Warning": "⚠", "Info": "ℹ", "Hint": "★"}.get(as_text(item.get("severity")), "•")
    start = as_object(as_object(item.get("range")).get("start"))
    place = f"[Line {_count(start.get('line')) + 1}:{_count(start.get('character')) + 1}] " if start else ""
    code, source = _scalar(item.get("code")), as_text(item.get("source"))
    return f"  {mark} {place}{as_text(item.get('message'))}{code and f' [{code}]'}{source and f' ({source})'}"


# --- Lists of what there is ---


def _joined(*pieces: str) -> list[str]:
    return ["\n\n".join(piece for piece in pieces if piece)]


def _listed(head: str, lines: list[str], mark: str = "") -> str:
    """A list under its head, nothing if it is empty."""
    return head + "\n".join(mark + line for line in lines) if lines else ""


def _deferred_tools(fields: _Fields) -> list[str]:
    added = _strings(fields.get("addedLines")) or _strings(fields.get("addedNames"))
    gone = (
        "The following deferred tools are no longer available (their MCP server disconnected). Do not search for them "
        "— ToolSearch will return no match:\n"
    )
    return _joined(_listed(_DEFERRED, added), _listed(gone, _strings(fields.get("removedNames"))))


def _agents(fields: _Fields) -> list[str]:
    initial = fields.get("isInitial") is True
    head = f"{'Available agent types' if initial else 'New agent types are now available'} for the Agent tool:\n"
    note = (
        "When you launch multiple agents for independent work, send them in a single message with multiple tool uses "
        "so they run concurrently."
    )
    added = _listed(head, _strings(fields.get("addedLines")))
    gone = _listed("The following agent types are no longer available:\n", _strings(fields.get("removedTypes")), "- ")
    return _joined(added, gone, note if initial and fields.get("showConcurrencyNote") is True else "")


def _mcp_instructions(fields: _Fields) -> list[str]:
    blocks = "\n\n".join(_strings(fields.get("addedBlocks")))
    head = (
        "# MCP Server Instructions\n\n"
        "The following MCP servers have provided instructions for how to use their tools and resources:\n\n"
    )
    gone = "The following MCP servers have disconnected. Their instructions above no longer apply:\n"
    return _joined(head + blocks if blocks else "", _listed(gone, _strings(fields.get("removedNames"))))


def _invoked_skills(fields: _Fields) -> list[str]:
    skills = (_fill("### Skill: {name}\nPath: {path}\n\n{content}", item) for item in _objects(fields.get("skills")))
    head = "The following skills were invoked in this session. Continue to follow these guidelines:\n\n"
    shown = "\n\n---\n\n".join(skill for skill in skills if skill)
    return [head + shown] if shown else []


def _todos(fields: _Fields) -> list[str]:
    items = _objects(fields.get("content"))
    lines = [f"{i}. [{_scalar(t.get('status'))}] {_scalar(t.get('content'))}" for i, t in enumerate(items, 1)]
    found = "\n".join(lines)
    return [_TODO_REMINDER + (f"\n\nHere are the existing contents of your todo list:\n\n[{found}]" if found else "")]


def _tasks(fields: _Fields) -> list[str]:
    items = _objects(fields.get("content"))
    lines = [f"#{_scalar(t.get('id'))}. [{_scalar(t.get('status'))}] {_scalar(t.get('subject'))}" for t in items]
    return [_TASK_REMINDER + _listed("\n\nHere are the existing tasks:\n\n", lines)]


# --- Hooks ---


def _hook_success(fields: _Fields) -> list[str]:
    heard = fields.get("hookEvent") in ("SessionStart", "UserPromptSubmit", "UserPromptExpansion")
    return [_fill("{hookName} hook success: {content}", fields)] if heard else []


def _hook_context(fields: _Fields) -> list[str]:
    content = "\n".join(_strings(fields.get("content")))
    return [_fill("{hookName} hook additional context: {content}", {**fields, "content": content})]


def _hook_error(fields: _Fields) -> list[str]:
    error = as_object(fields.get("blockingError"))
    inner = {**error, "hookName": fields.get("hookName")}
    return [_fill('{hookName} hook blocking error from command: "{command}": {blockingError}', inner)]


def _hook_response(fields: _Fields) -> list[str]:
    response = as_object(fields.get("response"))
    extra = as_object(response.get("hookSpecificOutput")).get("additionalContext")
    return [*_strings(response.get("systemMessage")), *_strings(extra)]


_MAKERS: dict[str, Callable[[_Fields], list[str]]] = {
    "agent_listing_delta": _agents,
    "async_hook_response": _hook_response,
    "deferred_tools_delta": _deferred_tools,
    "diagnostics": _diagnostics,
    "directory": _directory,
    "file": _file,
    "hook_additional_context": _hook_context,
    "hook_blocking_error": _hook_error,
    "hook_success": _hook_success,
    "invoked_skills": _invoked_skills,
    "mcp_instructions_delta": _mcp_instructions,
    "mcp_resource": _mcp_resource,
    "nested_memory": _memory,
    "selected_lines_in_ide": _selection,
    "task_reminder": _tasks,
    "todo_reminder": _todos,
}
