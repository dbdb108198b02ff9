"""Scripts as Claude Code would have logged them: records linked by `parentUuid`, one block a line in newer versions."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from script import Action, Turn

Record = dict[str, Any]
CWD = "/home/dev/cpython"
PROJECT = "-home-dev-cpython"
LETTERS = "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"


class ClaudeLog:
    """The records of one file under construction.

    blocks_apart: write each block of a response on its own line (newer versions) or all on one. agent: id of the
    subagent whose log it is; `sidechain` marks its records as such.
    """

    def __init__(
        self,
        seed: str,
        started: datetime,
        version: str,
        *,
        blocks_apart: bool = True,
        agent: str = "",
        cwd: str = CWD,
    ) -> None:
        self.rng = random.Random(seed)
        self.session = str(uuid.UUID(int=self.rng.getrandbits(128), version=4))
        self.records: list[Record] = []
        self.parent: str | None = None
        self.sidechain = bool(agent)
        self.agent = agent
        self.agent_logs: list[ClaudeLog] = []
        self.blocks_apart = blocks_apart
        self.cwd = cwd
        self._clock = started
        self._version = version

    def id(self, prefix: str) -> str:
        """A fresh id as the API makes them."""
        return prefix + "01" + "".join(self.rng.choices(LETTERS, k=22))

    def add(self, kind: str, message: Record | None = None, **fields: Any) -> Record:
        """Append a record that answers the one before it."""
        self._clock += timedelta(milliseconds=self.rng.randrange(300, 9000))
        own = str(uuid.UUID(int=self.rng.getrandbits(128), version=4))
        record: Record = {
            "parentUuid": self.parent,
            "isSidechain": self.sidechain,
            "userType": "external",
            "cwd": self.cwd,
            "sessionId": self.session,
            "version": self._version,
            "gitBranch": "main",
            **({"agentId": self.agent} if self.agent else {}),
            "type": kind,
            **({"message": message} if message is not None else {}),
            "uuid": own,
            "timestamp": self._clock.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z",
            **fields,
        }
        self.records.append(record)
        self.parent = own
        return record

    def note(self, kind: str, **fields: Any) -> None:
        """Append a line that is no part of the tree."""
        self.records.append({"type": kind, **fields})

    def user(self, content: str | list[Record], **fields: Any) -> Record:
        """A message from the user."""
        return self.add("user", {"role": "user", "content": content}, **fields)

    def assistant(self, blocks: list[Record], message_id: str = "", **fields: Any) -> None:
        """A response: one record, or one for each block."""
        message_id = message_id or self.id("msg_")
        request = {"requestId": self.id("req_")} if self.blocks_apart else {}
        usage = {"input_tokens": self.rng.randrange(4, 20), "output_tokens": self.rng.randrange(20, 900)}
        for i, group in enumerate([[b] for b in blocks] if self.blocks_apart else [blocks]):
            last = not self.blocks_apart or i == len(blocks) - 1
            reason = "tool_use" if any(b["type"] == "tool_use" for b in blocks) else "end_turn"
            message = {
                "id": message_id,
                "type": "message",
                "role": "assistant",
                "model": "claude-sonnet-4-20250514",
                "content": group,
                "stop_reason": reason if last else None,
                "usage": usage,
            }
            self.add("assistant", message, **request, **fields)

    def play(self, turns: Iterable[Turn], inline_agents: bool = False) -> None:
        """Log the turns of a script; subagents go to `agent_logs`, or (old versions) between the lines."""
        for turn in turns:
            if turn.user:
                self.user(turn.user)
                continue
            blocks: list[Record] = []
            if turn.thought:
                signature = "".join(self.rng.choices(LETTERS, k=40)) + "=="
                blocks.append({"type": "thinking", "thinking": turn.thought, "signature": signature})
            if turn.words:
                blocks.append({"type": "text", "text": turn.words})
            calls = [(self.id("toolu_"), action) for action in turn.actions]
            for call_id, action in calls:
                name, arguments = tool_input(action, self.cwd)
                blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": arguments})
            self.assistant(blocks)
            for call_id, action in calls:
                agent = self._subagent(action, inline_agents) if action.script is not None else ""
                self.result(call_id, action, agent)

    def result(self, call_id: str, action: Action, agent: str = "") -> Record:
        """What a tool returned, with the program's own copy of it; `agent` names the subagent that reported."""
        text, extra = tool_output(action, self.cwd)
        if agent:
            extra |= {"agentId": agent, "content": [{"type": "text", "text": text}]}
        content: Any = [{"type": "text", "text": text}] if action.kind == "task" else text
        block = {"tool_use_id": call_id, "type": "tool_result", "content": content}
        return self.user([block], toolUseResult=extra)

    def attach(self, path: str, lines: list[str]) -> None:
        """A file that the user named with `@`: the program puts it into the conversation."""
        file = {"filePath": f"{self.cwd}/{path}", "content": "\n".join(lines), "numLines": len(lines), "startLine": 1}
        content = {"type": "text", "file": {**file, "totalLines": len(lines)}}
        self.add("attachment", attachment={"type": "file", "filename": f"{self.cwd}/{path}", "content": content})

    def _subagent(self, action: Action, inline: bool) -> str:
        """Log what a subagent did; returns its id, nothing for one between the lines."""
        assert action.script is not None
        if inline:
            parent, self.parent, self.sidechain = self.parent, None, True
            self.play(action.script.turns)
            self.parent, self.sidechain = parent, False
            return ""
        agent = f"{self.rng.getrandbits(32):08x}"
        log = ClaudeLog(f"{self.session}-{agent}", self._clock, self._version, agent=agent, cwd=self.cwd)
        log.session = self.session
        log.play(action.script.turns)
        self.agent_logs.append(log)
        return agent


def tool_input(action: Action, cwd: str) -> tuple[str, Record]:
    """Name and input of the tool for an action."""
    path = f"{cwd}/{action.folder}{action.path}"
    if action.kind == "read":
        limit = action.last - action.first + 1
        return "Read", {"file_path": path, "offset": action.first, "limit": limit}
    if action.kind == "grep":
        return "Grep", {"pattern": action.pattern, "path": path, "output_mode": "content", "-n": True}
    if action.kind == "edit":
        return "Edit", {"file_path": path, "old_string": action.old, "new_string": action.new}
    if action.kind == "write":
        return "Write", {"file_path": f"{cwd}/{action.path}", "content": action.new}
    if action.kind == "task":
        return "Task", {"description": action.pattern, "prompt": action.command, "subagent_type": "general-purpose"}
    if action.kind == "tool":
        return action.pattern, action.arguments
    return "Bash", {"command": action.command, "description": f"Run {action.command.split()[0]}"}


def tool_output(action: Action, cwd: str) -> tuple[str, Any]:
    """What the model gets back, and what the program notes beside it."""
    numbered = "\n".join(f"{n:6}→{line}" for n, line in action.rows)
    if action.kind == "read":
        path = f"{cwd}/{action.folder}{action.path}"
        return numbered, {
            "type": "text",
            "file": {"filePath": path, "numLines": len(action.rows), "startLine": action.first},
        }
    if action.kind == "grep":
        found = "\n".join(f"{n}:{line}" for n, line in action.rows) or "No matches found"
        return found, {"mode": "content", "numLines": len(action.rows)}
    if action.kind == "edit":
        path = f"{cwd}/{action.folder}{action.path}"
        head = f"The file {path} has been updated. Here's the result of running `cat -n` on a snippet"
        return f"{head} of the edited file:\n{numbered}", {"filePath": path, "userModified": False}
    if action.kind == "write":
        return f"File created successfully at: {cwd}/{action.path}", {"type": "create"}
    if action.kind == "task":
        return action.output, {"status": "completed", "totalToolUseCount": 2}
    if action.kind == "tool":
        return action.output, {"type": "text", "text": action.output[:80]}
    return action.output, {"stdout": action.output, "stderr": "", "interrupted": False}
