"""Claude Code's logs for tests: records as the program writes them, and what an extraction makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spark.extract import ExtractOptions, Report, extract
from spark.speech.sessions import Session, read_sessions

Record = dict[str, Any]
SESSION = "11111111-1111-4111-8111-111111111111"
OTHER = "22222222-2222-4222-8222-222222222222"


def full(name: str | None) -> str | None:
    """A record id as long as real ones are."""
    return name and f"{name}-0000-4000-8000"


def record(kind: str, uuid: str, parent: str | None, message: Any = None, **fields: Any) -> Record:
    base = {"type": kind, "uuid": full(uuid), "parentUuid": full(parent), "sessionId": SESSION, "isSidechain": False}
    base |= {"timestamp": "2026-01-01T00:00:00Z", **({} if message is None else {"message": message})}
    return {**base, **fields}


def user(uuid: str, parent: str | None, content: Any, **fields: Any) -> Record:
    return record("user", uuid, parent, {"role": "user", "content": content}, **fields)


def text(words: str) -> Record:
    return {"type": "text", "text": words}


def call(call_id: str, name: str = "Bash", **arguments: Any) -> Record:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def answer(uuid: str, parent: str | None, message_id: str, *blocks: Record, **fields: Any) -> Record:
    message = {"id": message_id, "role": "assistant", "model": "m", "content": list(blocks), "usage": {"output": 3}}
    return record("assistant", uuid, parent, message, **fields)


def result(uuid: str, parent: str | None, call_id: str, content: Any, **fields: Any) -> Record:
    block = {"type": "tool_result", "tool_use_id": call_id, "content": content, "is_error": False}
    return user(uuid, parent, [block], **fields)


def write(home: Path, name: str, records: list[Record | str]) -> None:
    path = home / "projects" / "-p" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))


def run(home: Path) -> tuple[dict[str, Session], Report]:
    options = ExtractOptions(home / "out", "claude", claude_dir=home, test_frac=0, redact=False)
    report = extract(options, lambda done, total: None)
    return {s.session_id: s for s in read_sessions(home / "out" / "train.jsonl")}, report


def words(session: Session) -> list[str]:
    """The session in short: role and content, calls as name(arguments)."""
    out = []
    for m in session.messages:
        calls = [f"{c.name}({json.dumps(dict(c.arguments))})" for c in m.tool_calls]
        pieces = [m.role[0] + ":", m.reasoning and f"<{m.reasoning}>", m.content, *calls]
        out.append(" ".join(piece for piece in pieces if piece))
    return out


def progress(uuid: str, inner: Record, agent: str | None = "ab12", run: str | None = None) -> Record:
    """A record of a subagent as versions up to 2.1.x wrote it: the message alone, inside its parent's log."""
    data = {"type": "agent_progress", "message": {k: inner[k] for k in ("type", "message", "uuid") if k in inner}}
    named = {"agentId": agent} if agent else {}
    return record("progress", uuid, "a1", data=data | named, **({"parentToolUseID": run} if run else {}))


def attachment(uuid: str, parent: str | None, kind: str, /, **fields: Any) -> Record:
    """A record of what the program put in beside the messages; `rendered` and `version` are the record's own."""
    own = {key: fields.pop(key) for key in ("rendered", "version", "isSidechain", "agentId") if key in fields}
    return record("attachment", uuid, parent, attachment={"type": kind, **fields}, **own)
