"""Claude Code and Codex themselves, headless, against `spark serve`: what they send, and that it works.

    npm install --prefix DIR @anthropic-ai/claude-code @openai/codex
    python benchmarks/clients.py data/nano/nano.gguf --bin DIR/node_modules/.bin --json data/results/clients.json

How they are run and made to call tools is in client_runs.py; other_clients.py does the same with other programs.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.client_proxy import ANSWER, Json  # noqa: E402
from benchmarks.client_runs import (  # noqa: E402
    Program,
    Runner,
    Scenario,
    drive,
    lines_of,
    long_text,
    options,
    picture,
    run_one_by_one,
    version_of,
)

PROGRAMS = ("claude", "codex")
AT_ONCE = 6  # of each program
ASKS_FOR_MODELS = 'model_providers.spark.auth={command="echo",args=["none"]}'
# A server of the Model Context Protocol with one tool.
MCP_SERVER = """\
import json, sys
tool = {"name": "note", "description": "Read a note.", "inputSchema": {"type": "object", "properties": {}}}
for line in sys.stdin:
    asked = json.loads(line)
    version = asked.get("params", {}).get("protocolVersion")
    about = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "notes", "version": "1"}}
    said = {"content": [{"type": "text", "text": "a note"}]}
    answers = {"initialize": about, "tools/list": {"tools": [tool]}, "tools/call": said}
    if "id" in asked:
        result = answers.get(asked["method"], {})
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def narrowed(work: Path) -> dict[str, Json]:
    """The tools that may run, with the one thing that each may be called with."""
    notes = str(work / "notes.txt")
    return {
        "Bash": {"command": "cat notes.txt", "description": "Show the notes"},
        "Read": {"file_path": notes},
        "Write": {"file_path": str(work / "made.txt"), "content": "made\n"},
        "Agent": {"description": "Look", "prompt": "Say what notes.txt is.", "subagent_type": "general-purpose"},
        "WebSearch": {"query": "the weather"},
        "ToolSearch": {"query": "select:CronList", "max_results": 1},
        "exec_command": {"cmd": "cat notes.txt"},
        "multi_agent_v1__spawn_agent": {"message": "Say what notes.txt is."},
        "view_image": {"path": str(work / "gray.png")},
    }


def scenarios(work: Path) -> dict[str, list[list[Scenario]]]:
    """What each program is asked; runs in an inner list are of one conversation."""
    few = ["--tools", "Bash,Read,Write"]
    first, second = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"
    image = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture()).decode()}
    content = [{"type": "text", "text": "What is this?"}, {"type": "image", "source": image}]
    line = json.dumps({"type": "user", "message": {"role": "user", "content": content}}) + "\n"
    form = json.dumps(ANSWER)
    (work / "mcp_server.py").write_text(MCP_SERVER)
    mcp: Json = {"command": sys.executable, "args": [str(work / "mcp_server.py")]}
    (work / "form.json").write_text(form)

    def claude(name: str, prompt: str, *more: str, **fields: Any) -> Scenario:
        arguments = ["-p", *([prompt] if prompt else []), "--output-format", "stream-json", "--verbose"]
        arguments += ["--allowedTools=Bash,Read,Write,Agent,WebSearch,ToolSearch,mcp__notes", *more]
        return Scenario(name, "claude", arguments, **fields)

    catalog = ["-c", f'model_catalog_json="{work / "models.json"}"']

    def codex(name: str, prompt: str, *more: str, known: bool = True, **fields: Any) -> Scenario:
        arguments = ["exec", *(catalog if known else []), "--json", "--skip-git-repo-check", *more, prompt]
        return Scenario(name, "codex", arguments, **fields)

    return {
        "claude": [
            [claude("untouched", "Say hello.", "--tools", "Read", changed=False)],
            [claude("all tools, one call", "Show the notes.", calls=["Bash"])],
            [
                claude("three calls", "Work.", *few, "--session-id", first, calls=["Read", "Bash", "Write"]),
                claude("continued", "Go on.", *few, "--resume", first, calls=["Read"]),
                claude("compacted", "/compact", *few, "--resume", first),
                claude("after compaction", "Go on.", *few, "--resume", first, calls=["Bash"]),
            ],
            [claude("a subagent", "Ask.", "--tools", "Agent,Bash,Read", calls=["Agent", "Bash"])],
            [claude("no thinking", "Think.", *few, env={"MAX_THINKING_TOKENS": "0"}, calls=["Bash"])],
            [claude("budget of thinking", "Think.", *few, "--model", "claude-haiku-4-5", calls=["Read"],
                    env={"MAX_THINKING_TOKENS": "1024"})],
            [claude("low effort", "Think.", *few, "--effort", "low")],
            [claude("a form", "Answer.", *few, "--json-schema", form, calls=["StructuredOutput"])],
            [claude("a picture", "", *few, "--input-format", "stream-json", stdin=line)],
            [claude("a search at the vendor's", "Search.", "--tools", "WebSearch", calls=["WebSearch"])],
            [claude("tools looked for", "Look.", calls=["ToolSearch", "Bash"], env={"ENABLE_TOOL_SEARCH": "true"})],
            [claude("pieces and suggestions", "Say hello.", *few, "--include-partial-messages", "--prompt-suggestions",
                    "true", calls=["Bash"])],
            [claude("a tool of MCP", "Note.", *few, "--mcp-config", json.dumps({"mcpServers": {"notes": mcp}}),
                    calls=["mcp__notes__note"])],
            [claude("a plan", "Plan.", *few, "--permission-mode", "plan", calls=["Read"])],
            [
                claude("60 KB of input", "Sum up.", *few, "--session-id", second, stdin=long_text()),
                claude("count", "/context", *few, "--resume", second),
            ],
            [claude("more than the context", "Sum up.", *few, stdin=10 * long_text(),
                    fails_with="result: success: Prompt is too long")],
        ],
        "codex": [
            [codex("untouched", "Say hello.", "-c", 'sandbox_mode="read-only"', changed=False)],
            [codex("without a list of models", "Look.", known=False, calls=["exec_command"])],
            [codex("asking for the models", "Look.", "-c", ASKS_FOR_MODELS, known=False, calls=["exec_command"])],
            [
                codex("two calls", "Show the notes.", calls=["exec_command", "exec_command"]),
                codex("continued", "Go on.", "resume", "--last", calls=["exec_command"]),
            ],
            [codex("a patch", "Patch.", calls=["apply_patch"])],
            [codex("a picture", "What is this?", "--image", str(work / "gray.png"), "--", known=False)],
            [codex("a picture by tool", "Look.", calls=["view_image"])],
            [codex("high effort", "Think.", "-c", 'model_reasoning_effort="high"', calls=["exec_command"])],
            [codex("a form", "Answer.", "--output-schema", str(work / "form.json"))],
            [codex("a tool of MCP", "Note.", "-c", f"mcp_servers.notes={{command={json.dumps(sys.executable)},"
                   f"args={json.dumps(mcp['args'])}}}", calls=["mcp__notes__note"])],
            [codex("an agent", "Ask.", calls=["multi_agent_v1__spawn_agent"], may_leave=True)],
            [codex("a review", "Review.", "review", calls=["exec_command"])],
            [codex("60 KB of input", "Sum up.", stdin=long_text())],
            [codex("more than the context", "Sum up.", stdin=10 * long_text(), fails_with="Codex ran out of room")],
            [codex("compacted", "Work.", "-c", "model_auto_compact_token_limit=4000",
                   calls=["exec_command", "exec_command", "exec_command"])],
        ],
    }  # fmt: skip


def claude_settings(url: str, place: Path, model: str, arguments: list[str]) -> dict[str, str]:
    """The environment of Claude Code."""
    tiers = {f"ANTHROPIC_DEFAULT_{tier}_MODEL": model for tier in ("OPUS", "SONNET", "HAIKU")}
    return {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": model, **tiers,
        "CLAUDE_CONFIG_DIR": str(place / ".claude"), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0", "DISABLE_AUTOUPDATER": "1",
    }  # fmt: skip


def codex_settings(url: str, place: Path, model: str, arguments: list[str]) -> dict[str, str]:
    """The environment of Codex; its settings become arguments."""
    provider = f'{{name="spark",base_url="{url}/v1",wire_api="responses",'
    provider += "request_max_retries=0,stream_max_retries=0,stream_idle_timeout_ms=900000}"
    settings = [f"model_providers.spark={provider}", 'model_provider="spark"', f'model="{model}"',
                'sandbox_mode="danger-full-access"', 'approval_policy="never"']  # fmt: skip
    arguments[1:1] = [word for setting in settings for word in ("-c", setting)]
    return {"CODEX_HOME": str(place)}


def claude_said(stdout: str) -> tuple[list[str], list[str]]:
    """Problems and notices in the output of Claude Code."""
    events, problems = lines_of(stdout)
    finished = [event for event in events if event.get("type") == "result"]
    turns = [event for event in finished if "origin" not in event]  # others answer an agent that has ended
    if len(turns) != 1:
        problems.append(f"{len(turns)} results")
    for event in finished:
        if event.get("is_error") or event.get("subtype") != "success":
            problems.append(f"result: {event.get('subtype')}: {str(event.get('result'))[:300]}")
    results = [
        block
        for event in events
        if event.get("type") == "user" and isinstance(event["message"]["content"], list)
        for block in event["message"]["content"]
        if block.get("type") == "tool_result"
    ]
    # A tool may fail, as what the model wrote is nonsense; that the client could not read the call is another thing.
    failed = [str(block.get("content"))[:200] for block in results if block.get("is_error")]
    problems += [f"a call that cannot be read: {text}" for text in failed if "InputValidationError" in text]
    return problems, ["a tool failed"] * len(failed)


def codex_said(stdout: str) -> tuple[list[str], list[str]]:
    """Problems and notices in the output of Codex."""
    events, problems = lines_of(stdout)
    if not any(event["type"] == "turn.completed" for event in events):
        problems.append("no turn.completed")
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    failed = [event for event in events if event["type"] in ("error", "turn.failed")]
    problems += [f"{event['type']}: {str(event)[:300]}" for event in failed]
    notices = [str(item.get("message"))[:200] for item in items if item["type"] == "error"]
    return problems, notices


def main() -> None:
    parser = options(__doc__, PROGRAMS)
    parser.add_argument("--bin", type=Path, metavar="DIR", help="where claude and codex are; else on PATH")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, metavar="N", help="of each program, at the end")
    o = parser.parse_args()
    search = f"{o.bin}{os.pathsep}{os.environ['PATH']}" if o.bin else os.environ["PATH"]
    found = {name: shutil.which(name, path=search) for name in o.programs}
    if missing := [name for name, path in found.items() if path is None]:
        sys.exit(f"not found: {', '.join(missing)} (npm install @anthropic-ai/claude-code @openai/codex)")
    how = {"claude": (claude_settings, claude_said), "codex": (codex_settings, codex_said)}
    paths = {name: str(Path(path).resolve()) for name, path in found.items() if path}
    programs = {name: Program([path], version_of(path), *how[name]) for name, path in paths.items()}
    drive(o, programs, narrowed, lambda runner, work: run_all(
        runner, {p: scenarios(work)[p] for p in o.programs}, o.only, o.at_once
    ))  # fmt: skip


def run_all(runner: Runner, wanted: Mapping[str, list[list[Scenario]]], only: str | None, at_once: int) -> list[Json]:
    """Run the scenarios one after the other, and some of each program at once in the end."""
    rows: list[Json] = []
    for conversations in wanted.values():
        rows += run_one_by_one(runner, conversations, only)
    if at_once and only is None:
        tools = {"claude": ("three calls", "Bash"), "codex": ("two calls", "exec_command")}
        together = []
        for program, conversations in wanted.items():
            like, call = tools[program]
            base = next(s for conversation in conversations for s in conversation if s.name == like)
            arguments = [a for a in base.arguments if a != "--session-id" and not a.startswith("00000000-")]
            together += [
                (Scenario(f"at once {i + 1}", program, arguments, [call]), f"{program}-{i}") for i in range(at_once)
            ]
        with ThreadPoolExecutor(len(together)) as threads:
            rows += threads.map(lambda one: runner.run(*one), together)
    return rows


if __name__ == "__main__":
    main()
