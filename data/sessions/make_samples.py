"""Make the sample sessions: the home folders of two coding agents, with logs of every kind that has been seen.

    python data/sessions/make_samples.py [--set main|other] [--out DIR]

Nobody held these conversations. The words come from templates, the tools' results from the sources of the standard
library of the Python that runs this (3.11.7 made the committed files); everything is seeded, so the same Python makes
the same files. Every session has modules of its own, so that a held-out session is text that no other one has.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import scenes
from casts import cast_script
from claude_log import PROJECT, ClaudeLog
from codex_log import CodexLog
from homes import write
from other_set import make_other
from plays import EXCERPTS
from scenes import Scene, write_script
from script import Script, Turn

Record = dict[str, Any]
HERE = Path(__file__).resolve().parent


def split(turns: list[Turn], share: float) -> tuple[list[Turn], list[Turn]]:
    """Cut a script before the user's message that is nearest to a share of it."""
    starts = [i for i, turn in enumerate(turns) if turn.user][1:]
    at = min(starts, key=lambda i: abs(i - share * len(turns)))
    return turns[:at], turns[at:]


def summary_of(turns: list[Turn]) -> str:
    """What a compaction keeps of some turns."""
    asked = "\n".join(f"- {turn.user}" for turn in turns if turn.user)
    answers = [turn.words for turn in turns if turn.words and not turn.actions]
    return f"The user asked:\n{asked}\n\nThe last answer was:\n{answers[-1] if answers else 'none yet'}"


# --- Claude Code ---


def claude(number: int, paths: str, length: int, *required: Scene, old: bool = False) -> tuple[ClaudeLog, Script]:
    """A log that has its first lines, and the script to play."""
    seed = f"claude-{number}"
    when = datetime(2025, 6, 2 + number, 9, 15) if old else datetime(2026, 1, 5 + number, 14, 2)
    log = ClaudeLog(seed, when, "1.0.35" if old else "2.1.81", blocks_apart=not old)
    if old:
        log.note("summary", summary=f"Work on {paths.split()[0]}", leafUuid=log.session)
    else:
        snapshot = {"messageId": log.session, "trackedFileBackups": {}}
        log.note("file-history-snapshot", messageId=log.session, snapshot=snapshot, isSnapshotUpdate=False)
    return log, cast_script(seed, tuple(paths.split()), length, *required)


def make_claude(home: Path) -> None:
    """Sixteen root sessions of Claude Code."""
    project = home / "projects" / PROJECT

    def save(log: ClaudeLog) -> None:
        write(project / f"{log.session}.jsonl", log.records)

    for number, paths, length, old in (  # as they should be
        (1, "textwrap.py", 8, False),
        (2, "shlex.py netrc.py", 10, True),
        (3, "heapq.py bisect.py", 12, False),
        (4, "csv.py", 3, True),
    ):
        log, script = claude(number, paths, length, old=old)
        log.play(script.turns)
        if not old:
            log.note("last-prompt", lastPrompt=script.turns[-2].user, sessionId=log.session)
        save(log)

    log, script = claude(5, "sched.py", 3, scenes.search_task, old=True)  # a subagent between the lines
    log.play(script.turns, inline_agents=True)
    save(log)

    log, script = claude(6, "mailcap.py", 2, scenes.search_task)  # a subagent's log beside the session's
    log.play(script.turns)
    save(log)
    for agent in log.agent_logs:
        write(project / f"agent-{agent.agent}.jsonl", agent.records)

    log, script = claude(7, "graphlib.py", 3, scenes.search_task)  # a subagent that was given the conversation so far
    log.play(script.turns)
    save(log)
    for agent in log.agent_logs:
        replayed = copy.deepcopy([r for r in log.records if r.get("message")][:5])
        for record in replayed:
            record |= {"isSidechain": True, "agentId": agent.agent, "requestId": agent.id("req_")}
        agent.records[0]["parentUuid"] = replayed[-1]["uuid"]
        write(project / log.session / "subagents" / f"agent-{agent.agent}.jsonl", [*replayed, *agent.records])

    log, script = claude(8, "fileinput.py", 7, scenes.search_task)  # a workflow's subagent; a long result kept aside
    log.play(script.turns)
    save(log)
    for agent in log.agent_logs:
        write(project / log.session / "subagents" / "workflows" / "w1" / f"agent-{agent.agent}.jsonl", agent.records)
    aside = project / log.session / "tool-results" / "b41c.txt"
    aside.parent.mkdir(parents=True)
    aside.write_text("\n".join(script.modules[0].lines[:40]) + "\n")

    log, script = claude(9, "cmd.py code.py", 14)  # a compaction
    before, after = split(script.turns, 0.6)
    log.play(before)
    last, log.parent = log.parent, None
    metadata = {"trigger": "auto", "preTokens": 167393}
    log.add("system", subtype="compact_boundary", content="Conversation compacted", logicalParentUuid=last,
            compactMetadata=metadata, level="info", isMeta=False)  # fmt: skip
    intro = "This session is being continued from a previous conversation that ran out of context.\n\n"
    log.user(intro + summary_of(before), isCompactSummary=True, isVisibleInTranscriptOnly=True)
    log.play(after)
    save(log)

    log, script = claude(10, "quopri.py", 4)  # a fork
    before, after = split(script.turns, 0.5)
    log.play(before)
    shared = len(log.records)
    log.play(after)
    save(log)
    fork = ClaudeLog("claude-10-fork", datetime(2026, 1, 16, 8, 0), "2.1.81")
    fork.records = copy.deepcopy([r for r in log.records[:shared] if "uuid" in r])
    for record in fork.records:
        record["forkedFrom"] = {"sessionId": log.session, "messageUuid": record["uuid"]}
        record["sessionId"] = fork.session
    fork.parent = fork.records[-1]["uuid"]
    fork.play(write_script("claude-10-fork", ("uu.py",), 2).turns)
    save(fork)

    log, script = claude(11, "plistlib.py", 9, old=True)  # resumed into a new file, as old versions did
    log.play(script.turns)
    save(log)
    resumed = ClaudeLog("claude-11-resumed", datetime(2025, 6, 14, 10, 0), "1.0.35", blocks_apart=False)
    resumed.records = copy.deepcopy(log.records[1:])
    for record in resumed.records:
        record["sessionId"] = resumed.session
    resumed.parent = resumed.records[-1]["uuid"]
    resumed.play(write_script("claude-11-resumed", ("sndhdr.py",), 2).turns)
    save(resumed)

    log, script = claude(12, "colorsys.py stat.py", 4)  # turns taken back
    before, after = split(script.turns, 0.5)
    log.play(before)
    here = log.parent
    log.play(after)
    log.parent = here
    log.play(write_script("claude-12-again", ("numbers.py",), 2).turns)
    save(log)

    log, script = claude(13, "getopt.py", 5)  # a prompt typed while the model was working, a file named with @
    before, after = split(script.turns, 0.4)
    log.play(before)
    log.user("How many lines has @theme.css, and where are its colors?")
    colors = (EXCERPTS / "theme.css").read_text("utf-8").splitlines()
    log.attach("theme.css", colors)
    log.play([Turn(words=f"{len(colors)} lines; the colors are variables of `:root`, in the first ten.")])
    prompt = f"also check that {script.modules[0].name} still imports on its own"
    log.note("queue-operation", operation="enqueue", sessionId=log.session, content=prompt)
    log.add("attachment", attachment={"type": "queued_command", "prompt": prompt, "commandMode": "prompt"})
    name = script.modules[0].name
    log.play([Turn(words=f"It does: I ran `import {name}` in a fresh interpreter and got no error.")])
    log.play(after)
    log.add("system", subtype="turn_duration", durationMs=61240, isMeta=False)
    save(log)

    log, script = claude(14, "reprlib.py", 4)  # a log that was damaged
    log.play(script.turns)
    broken: list[Record | str] = list(log.records)
    text = json.dumps(log.records[3])
    broken.insert(4, text[: len(text) // 2])
    broken.insert(9, "")
    broken.insert(12, '["not", "a record"]')
    broken.insert(15, {**log.records[2], "uuid": "00000000-0000-4000-8000-000000000001", "message": None})
    broken.insert(18, {"type": "hologram", "uuid": "00000000-0000-4000-8000-000000000002", "parentUuid": None})
    broken.append('{"type":"assistant","message":{"id":"msg_01cut')
    write(project / f"{log.session}.jsonl", broken)

    log, script = claude(15, "tabnanny.py symtable.py", 8)  # results that were written before their calls
    log.play(script.turns)
    for i in range(len(log.records) - 1):
        call, result = log.records[i], log.records[i + 1]
        if call["type"] == "assistant" and "toolUseResult" in result and i % 2:
            log.records[i : i + 2] = [result, call]
    save(log)

    log, script = claude(16, "rlcompleter.py", 3, scenes.search_task)  # progress lines, an image, a search, a password
    name = script.modules[0].name
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    log.user([{"type": "text", "text": f"This is what {name} shows on my screen. Is it documented?"}, picture])
    search = {
        "type": "server_tool_use",
        "id": "srvtoolu_01a",
        "name": "web_search",
        "input": {"query": f"{name} docs"},
    }
    page = {"type": "web_search_result", "title": f"{name}", "url": f"https://docs.python.org/3/library/{name}.html"}
    found = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_01a", "content": [page]}
    words = {"type": "text", "text": f"Yes: the documentation has a page on `{name}`."}
    log.assistant([{"type": "redacted_thinking", "data": "RGF0YQ=="}, search, found, words])
    log.user("The package index of the build machine is http://builder:tr0ub4dor@10.0.0.7/simple, in case you need it.")
    log.assistant([{"type": "text", "text": "Thanks, the standard library is enough for this."}])
    log.play(script.turns)
    for agent in log.agent_logs:
        for record in agent.records:
            inner = {key: record[key] for key in ("type", "message", "uuid", "timestamp")}
            data = {"type": "agent_progress", "agentId": agent.agent, "prompt": "", "message": inner}
            log.records.insert(-4, {"type": "progress", "parentUuid": None, "uuid": record["uuid"][::-1], "data": data})
    save(log)


# --- Codex ---


def codex(number: int, paths: str, length: int, era: str, *required: Scene) -> tuple[CodexLog, Script]:
    """A log without its first lines, and the script to play."""
    starts = {"legacy": datetime(2025, 7, 1, 11, 0), "wrapped": datetime(2025, 10, 1, 16, 30)}
    when = starts.get(era, datetime(2026, 3, 1, 9, 45))
    seed = f"codex-{number}"
    return CodexLog(seed, when.replace(day=number), era), cast_script(seed, tuple(paths.split()), length, *required)


def make_codex(home: Path) -> None:
    """Sixteen root threads of Codex."""

    def save(log: CodexLog, *extra: Record | str, archived: bool = False) -> None:
        folder = home / "archived_sessions" if archived else home / f"sessions/{log.started:%Y/%m/%d}"
        write(folder / log.file_name, [*log.lines, *extra])

    for number, paths, length, era in (  # as they should be
        (1, "fnmatch.py glob.py", 4, "legacy"),
        (2, "calendar.py", 10, "legacy"),
        (3, "string.py", 3, "wrapped"),
        (4, "queue.py", 8, "current"),
        (5, "statistics.py", 16, "current"),
    ):
        log, script = codex(number, paths, length, era)
        log.head()
        log.play(script.turns)
        save(log)

    log, script = codex(6, "hmac.py", 3, "legacy")  # the first shell tool
    log.head()
    log.play(script.turns)
    action = {"type": "exec", "command": ["git", "status", "--short"], "timeout_ms": 10000, "env": None}
    log.message("user", "Is the tree clean?")
    log.item(type="local_shell_call", call_id="call_status", status="completed", action=action)
    output = json.dumps({"output": "?? Lib/test/test_hmac_none.py\n", "metadata": {"exit_code": 0}})
    log.item(type="function_call_output", call_id="call_status", output=output)
    log.message("assistant", "One new file, `Lib/test/test_hmac_none.py`, is not added yet.")
    save(log)

    log, script = codex(7, "pprint.py", 14, "current")  # a compaction that lists what stays
    log.head(dynamic_tools=[DYNAMIC_TOOL])
    before, after = split(script.turns, 0.6)
    log.play(before)
    kept = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": summary_of(before)}]}]
    log.line("compacted", {"message": "", "replacement_history": kept})
    log.event(type="context_compacted")
    log.play(after)
    save(log)

    log, script = codex(8, "difflib.py", 10, "wrapped")  # a compaction that is only a summary
    log.head()
    before, after = split(script.turns, 0.5)
    log.play(before)
    log.line("compacted", {"message": summary_of(before)})
    log.play(after)
    save(log)

    log, script = codex(9, "copyreg.py", 4, "current")  # a fork
    log.head()
    before, after = split(script.turns, 0.5)
    log.play(before)
    shared = copy.deepcopy(log.lines)
    log.play(after)
    save(log)
    fork = CodexLog("codex-9-fork", datetime(2026, 3, 9, 18, 0), "current")
    fork.head(forked_from_id=log.thread, forked_from_ordinal_exclusive=len(shared))
    fork.lines = [fork.lines[0], *shared]
    fork.play(write_script("codex-9-fork", ("token.py",), 2).turns)
    save(fork)

    log, script = codex(10, "copy.py", 3, "current", scenes.search_task)  # a subagent
    log.head()
    log.play(script.turns)
    save(log)
    for child, task in log.threads:
        spawn = {"subagent": {"thread_spawn": {"parent_thread_id": log.thread, "depth": 1, "agent_role": "default"}}}
        child.head(source=spawn, thread_source="subagent")
        assert task.script is not None
        child.play(task.script.turns)
        save(child)

    log, script = codex(11, "imghdr.py", 4, "wrapped")  # a subagent that was given the conversation so far
    log.head()
    log.play(script.turns)
    save(log)
    child = CodexLog("codex-11-child", datetime(2025, 10, 11, 17, 0), "wrapped")
    child.head(source={"subagent": {"thread_spawn": {"parent_thread_id": log.thread}}}, forked_from_id=log.thread)
    said = [r for r in log.lines if r["type"] == "response_item" and r["payload"]["type"] == "message"]
    child.lines = [child.lines[0], log.lines[0], *copy.deepcopy(said)]
    child.play(write_script("codex-11-child", ("chunk.py",), 2).turns)
    save(child)

    log, script = codex(12, "contextlib.py", 8, "current")  # turns taken back
    log.head()
    before, after = split(script.turns, 0.7)
    log.play(before)
    log.play(after)
    log.event(type="thread_rolled_back", num_turns=sum(1 for turn in after if turn.user))
    log.play(write_script("codex-12-again", ("types.py",), 2).turns)
    save(log)

    log, script = codex(13, "linecache.py", 4, "current")  # archived, and a copy left behind
    log.head()
    log.play(script.turns)
    save(log, archived=True)
    save(log)

    log, script = codex(14, "timeit.py", 6, "current")  # tools that the provider runs, images, other agents
    log.head()
    name = script.modules[0].name
    picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    log.item(
        type="message",
        role="user",
        content=[{"type": "input_text", "text": f"What does {name} print here?"}, picture],
    )
    action = {"type": "search", "query": f"python {name} output format"}
    log.item(type="web_search_call", id="ws_1", status="completed", action=action)
    log.message("assistant", "The number of loops, the best of the repeats, and the time for one loop.")
    log.user("Is there a tool for charts?")
    chart = {
        "type": "function",
        "name": "draw_chart",
        "description": "Draw a chart.",
        "parameters": {"type": "object"},
    }
    log.item(
        type="tool_search_call", call_id="ts_1", status="completed", execution="client", arguments={"query": "chart"}
    )
    log.item(type="tool_search_output", call_id="ts_1", status="completed", execution="client", tools=[chart])
    log.item(
        type="image_generation_call",
        id="ig_1",
        status="completed",
        revised_prompt="a bar chart",
        result="iVBORw0KGgo=",
    )
    log.message("assistant", "Yes, `draw_chart`. I drew a bar chart as a trial.")
    told = {
        "author": "/root/timer",
        "recipient": "/root",
        "content": "The timing run is done: 200 loops.",
        "trigger_turn": True,
    }
    log.line("inter_agent_communication", told)
    log.message("assistant", "The other agent has finished its timing run of 200 loops.")
    log.line("world_state", {"full": True, "state": {"agents_md": ""}})
    log.play(script.turns)
    save(log)

    log, script = codex(15, "selectors.py", 7, "wrapped")  # a log that was damaged
    log.head()
    log.play(script.turns)
    log.lines.insert(6, {"timestamp": log.stamp(), "type": "response_item", "payload": None})
    log.lines.insert(9, {"timestamp": log.stamp(), "type": "constellation", "payload": {}})
    log.lines.insert(11, {"timestamp": log.stamp(), "type": "response_item", "payload": {"type": "hologram"}})
    save(
        log,
        "not json at all",
        '{"timestamp":"2025-10-15T16:40:00.000Z","type":"response_item","payload":{"type":"mes',
    )

    log, script = codex(16, "poplib.py mimetypes.py", 16, "current")  # a long one, with reasoning that is encrypted
    log.head()
    log.play(script.turns)
    log.user("Thanks, that is all.")
    log.item(type="reasoning", summary=[], content=None, encrypted_content="Z0FBQUFB")
    log.message("assistant", "You're welcome.", phase="final_answer")
    save(log)


DYNAMIC_TOOL = {
    "name": "run_tests",
    "description": "Run the tests of a module.",
    "input_schema": {"type": "object", "properties": {"module": {"type": "string"}}, "required": ["module"]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("main", "other"), default="main", help="the samples, or the other subjects")
    parser.add_argument("--out", type=Path, help="a folder without claude/ and codex/ to make them in")
    options = parser.parse_args()
    home = HERE if options.set == "main" else HERE.parent / "sessions_other"
    out = options.out or home
    for name in ("claude", "codex"):
        if out == home:
            shutil.rmtree(out / name, ignore_errors=True)
        elif (out / name).exists():
            parser.error(f"{out / name} exists")
    if options.set == "main":
        make_claude(out / "claude")
        make_codex(out / "codex")
    else:
        make_other(out)
    files = [path for name in ("claude", "codex") for path in (out / name).rglob("*.jsonl")]
    print(f"{len(files)} logs, {sum(path.stat().st_size for path in files):,} bytes, under {out}")


if __name__ == "__main__":
    main()
