"""Scripts as Codex would have logged them: bare items until September 2025, then `{timestamp, type, payload}` lines."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from script import Action, Turn

Record = dict[str, Any]
CWD = "/home/dev/cpython"
ENVIRONMENT = "<environment_context>\n  <cwd>/home/dev/cpython</cwd>\n  <shell>bash</shell>\n</environment_context>"
PERMISSIONS = (
    "<permissions instructions>\nCommands run in a sandbox; the network is off.\n</permissions instructions>"
)
INSTRUCTIONS = (
    "You are Codex, a coding agent that runs in a terminal. Read before you change, keep changes small, "
    "and say what you did. Use apply_patch to edit files."
)


class CodexLog:
    """The lines of one rollout under construction.

    era: "legacy" (bare items, tool `shell`), "wrapped" (envelopes, `shell`), "current" (envelopes, `exec_command`,
    freeform `apply_patch`, ordinals, encrypted reasoning beside the summary).
    """

    def __init__(self, seed: str, started: datetime, era: str, cwd: str = CWD) -> None:
        self.rng = random.Random(seed)
        self.thread = str(uuid.UUID(int=self.rng.getrandbits(128), version=4))
        self.era = era
        self.cwd = cwd
        self.started = self._clock = started
        self.lines: list[Record] = []
        self.threads: list[tuple[CodexLog, Action]] = []

    @property
    def file_name(self) -> str:
        """Name of the rollout file."""
        return f"rollout-{self.started:%Y-%m-%dT%H-%M-%S}-{self.thread}.jsonl"

    def stamp(self) -> str:
        """The time of the next line."""
        self._clock += timedelta(milliseconds=self.rng.randrange(50, 6000))
        return self._clock.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"

    def line(self, kind: str, payload: Record) -> None:
        """Append a line."""
        if self.era == "legacy":
            self.lines.append(payload)
            return
        ordinal = {"ordinal": len(self.lines)} if self.era == "current" else {}
        self.lines.append({"timestamp": self.stamp(), **ordinal, "type": kind, "payload": payload})

    def item(self, **payload: Any) -> None:
        """Append something the model saw or wrote."""
        self.line("response_item", payload)

    def event(self, **payload: Any) -> None:
        """Append an event of the user interface."""
        if self.era != "legacy":
            self.line("event_msg", payload)

    def head(self, **fields: Any) -> None:
        """The first lines: what the thread is, and its environment."""
        git = {"commit_hash": f"{self.rng.getrandbits(160):040x}", "branch": "main"}
        stamp = self.started.strftime("%Y-%m-%dT%H:%M:%S.000Z")
        if self.era == "legacy":
            self.lines += [{"id": self.thread, "timestamp": stamp, "instructions": None, "git": git}]
            self.lines += [{"record_type": "state"}]
        else:
            meta: Record = {"id": self.thread, "timestamp": stamp, "cwd": self.cwd, "originator": "codex_cli_rs"}
            if self.era == "wrapped":
                meta |= {"cli_version": "0.42.0", "instructions": None, "git": git}
            else:
                meta |= {"cli_version": "0.144.3", "source": "cli", "model_provider": "openai", "git": git}
                meta["base_instructions"] = {"text": INSTRUCTIONS}
            self.line("session_meta", {**meta, **fields})
        if self.era == "current":
            self.message("developer", PERMISSIONS)
        self.message("user", ENVIRONMENT.replace(CWD, self.cwd))

    def message(self, role: str, text: str, **fields: Any) -> None:
        """A message of the conversation."""
        kind = "output_text" if role == "assistant" else "input_text"
        self.item(type="message", role=role, content=[{"type": kind, "text": text}], **fields)

    def play(self, turns: Iterable[Turn]) -> None:
        """Log the turns of a script; subagents become threads of their own."""
        for turn in turns:
            if turn.user:
                self.user(turn.user)
                continue
            if turn.thought:
                self.reason(turn.thought)
            if turn.words:
                phase = {"phase": "commentary" if turn.actions else "final_answer"} if self.era == "current" else {}
                self.event(type="agent_message", message=turn.words)
                self.message("assistant", turn.words, **phase)
            for action in turn.actions:
                self.act(action)
            if not turn.actions:
                self.event(
                    type="token_count", info={"total_token_usage": {"total_tokens": self.rng.randrange(900, 9000)}}
                )

    def user(self, text: str) -> None:
        """What the user typed, with the lines that surround it."""
        if self.era != "legacy":
            self.line("turn_context", {"cwd": self.cwd, "approval_policy": "on-request", "model": "gpt-5-codex"})
        self.message("user", text)
        self.event(type="user_message", message=text)

    def reason(self, thought: str) -> None:
        """A summary of the model's reasoning."""
        secret = "".join(self.rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=60)) if self.era != "legacy" else None
        summary = [{"type": "summary_text", "text": thought}]
        self.event(type="agent_reasoning", text=thought)
        self.item(type="reasoning", summary=summary, content=None, encrypted_content=secret)

    def act(self, action: Action) -> None:
        """A call and what came back."""
        call = "call_" + "".join(self.rng.choices("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123456789", k=24))
        if action.kind == "task":
            self._spawn(call, action)
        elif action.kind == "tool":
            self._other_tool(call, action)
        elif action.kind in ("edit", "write") and self.era == "current":
            self.item(
                type="custom_tool_call", status="completed", call_id=call, name="apply_patch", input=patch(action)
            )
            self.item(type="custom_tool_call_output", call_id=call, output=_output(action))
        elif self.era == "current":
            arguments = json.dumps({"cmd": command(action)[-1], "workdir": self.cwd, "yield_time_ms": 10000})
            self.item(type="function_call", name="exec_command", arguments=arguments, call_id=call)
            chunk, seconds = f"{self.rng.getrandbits(24):06x}", self.rng.randrange(10, 900) / 1000
            head = f"Chunk ID: {chunk}\nWall time: {seconds:.4f} seconds\nProcess exited with code 0\nOutput:\n"
            output = head + _output(action)
            self.item(type="function_call_output", call_id=call, output=output)
        else:
            arguments = json.dumps({"command": command(action), "workdir": self.cwd})
            self.item(type="function_call", name="shell", arguments=arguments, call_id=call)
            metadata = {"exit_code": 0, "duration_seconds": self.rng.randrange(1, 30) / 10}
            output = json.dumps({"output": _output(action), "metadata": metadata})
            self.item(type="function_call_output", call_id=call, output=output)

    def _other_tool(self, call: str, action: Action) -> None:
        """A call of a tool that is not the shell: a search that the provider runs, a plan, a server's tool."""
        if action.pattern == "WebSearch":
            search = {"type": "search", "query": action.arguments["query"]}
            self.item(type="web_search_call", id=f"ws_{call[5:]}", status="completed", action=search)
            return
        server, _, name = action.pattern.rpartition("__")
        space = {"namespace": f"{server}__"} if server and self.era == "current" else {}
        name = {"TodoWrite": "update_plan"}.get(name, name) if space or not server else action.pattern
        arguments = json.dumps(action.arguments, ensure_ascii=False)
        self.item(type="function_call", **space, name=name, arguments=arguments, call_id=call)
        self.item(type="function_call_output", call_id=call, output=action.output)

    def _spawn(self, call: str, action: Action) -> None:
        """A subagent: its thread is written by the caller."""
        child = CodexLog(f"{self.thread}-{call}", self._clock, self.era, self.cwd)
        self.threads.append((child, action))
        self.item(
            type="function_call", name="spawn_agent", arguments=json.dumps({"message": action.command}), call_id=call
        )
        self.item(type="function_call_output", call_id=call, output=json.dumps({"agent_id": child.thread}))
        wait = call[:-1] + "w"
        self.item(type="function_call", name="wait", arguments=json.dumps({"ids": [child.thread]}), call_id=wait)
        status = {"status": {child.thread: {"completed": action.output}}, "timed_out": False}
        self.item(type="function_call_output", call_id=wait, output=json.dumps(status))


def command(action: Action) -> list[str]:
    """The shell command of an action."""
    if action.kind == "read":
        return ["bash", "-lc", f"sed -n '{action.first},{action.last}p' {action.folder}{action.path}"]
    if action.kind == "grep":
        pattern = action.pattern.replace("'", "'\\''")
        return ["bash", "-lc", f"rg -n '{pattern}' {action.folder}{action.path}"]
    if action.kind in ("edit", "write"):
        return ["apply_patch", patch(action)]
    return ["bash", "-lc", action.command]


def patch(action: Action) -> str:
    """An edit in the format of apply_patch."""
    if action.kind == "write":
        added = "\n".join("+" + line for line in action.new.splitlines())
        return f"*** Begin Patch\n*** Add File: {action.path}\n{added}\n*** End Patch"
    lines = [" " + line for _, line in action.around]
    lines += ["-" + line for line in action.old.split("\n")]
    lines += ["+" + line for line in action.new.split("\n")]
    head = ["*** Begin Patch", f"*** Update File: {action.folder}{action.path}", "@@"]
    return "\n".join([*head, *lines, "*** End Patch"])


def _output(action: Action) -> str:
    if action.kind == "read":
        return "\n".join(line for _, line in action.rows)
    if action.kind == "grep":
        return "\n".join(f"{n}:{line}" for n, line in action.rows)
    if action.kind in ("edit", "write"):
        mark, path = ("M", f"{action.folder}{action.path}") if action.kind == "edit" else ("A", action.path)
        return f"Success. Updated the following files:\n{mark} {path}\n"
    return action.output
