"""Claude Code and Codex themselves, headless, against `spark serve`: what they send, and that it works.

    npm install --prefix DIR @anthropic-ai/claude-code @openai/codex
    python benchmarks/clients.py data/nano/nano.gguf --bin DIR/node_modules/.bin --json data/results/clients.json

The programs run in a temporary folder with settings of their own and talk to a proxy in front of the server. The proxy
notes the shape of each request (names, types, statuses, never a text) and checks the order of the events that come
back. A small model calls no tool by itself, so that the proxy changes what it passes on: the arguments of the tools
that may run are narrowed to harmless ones, the turns that a scenario is about get a `tool_choice`, and the others a
short form for the answer. The program does not notice: it runs the tool and sends the result.

The prompts of these programs are longer than the context of the reference model. It is served as a copy that says it
has a longer one, and that may have fewer layers (--layers): what the model says is nonsense either way.
"""

from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.client_proxy import ANSWER, PATIENCE_S, Json, Proxy, Session, proxied  # noqa: E402
from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from spark.results import write_json  # noqa: E402

PROGRAMS = ("claude", "codex")
AT_ONCE = 6  # of each program
LONG_TEXT_LINES = 900
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


# --- the model ------------------------------------------------------------------------------------


def widen(model: Path, out: Path, ctx_tokens: int, n_layer: int | None) -> None:
    """Copy a model's first layers (None: all), with another length of the context in its metadata."""
    reader = gguf.GGUFReader(model)
    arch = reader.fields["general.architecture"].contents()
    changed = {f"{arch}.context_length": ctx_tokens}
    if n_layer is not None:
        changed[f"{arch}.block_count"] = n_layer
    writer = gguf.GGUFWriter(out, arch)
    for name, value in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *inner = value.types
        writer.add_key_value(name, changed.get(name, value.contents()), kind, inner[-1] if inner else None)
    kept = [tensor for tensor in reader.tensors if _layer(tensor.name) < (n_layer or sys.maxsize)]
    for tensor in kept:
        writer.add_tensor_info(
            tensor.name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, tensor.tensor_type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in kept:
        writer.write_tensor_data(np.ascontiguousarray(tensor.data))
    writer.close()


def _layer(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


@contextlib.contextmanager
def serving(model: Path, ctx_tokens: int, log: Path) -> Iterator[str]:
    """`spark serve` on a free port; its URL."""
    command = [sys.executable, "-m", "spark.cli", "serve", str(model), "--device", "cpu"]
    command += ["--ctx", str(ctx_tokens), "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    try:
        yield _url(process, log)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s and process.poll() is None:
        found = re.search(r"served at (http://[^/\s]+)", log.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


# --- the programs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """One run of a program.

    calls: tools that it is made to call. changed: whether the proxy changes anything. may_leave: it may end while a
    reply of an agent of its is still coming. fails_with: what it says when it has understood why it was refused.
    """

    name: str
    program: str
    arguments: Sequence[str]
    calls: Sequence[str] = ()
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    changed: bool = True
    may_leave: bool = False
    fails_with: str = ""


def long_text() -> str:
    """About 30,000 tokens of the reference model's, or 60 KB."""
    return "".join(f"line {i}: the value of item {i * 7919 % 1000} is {i * 104729 % 997}, as before\n"
                   for i in range(LONG_TEXT_LINES))  # fmt: skip


def picture() -> bytes:
    """A PNG of one gray pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + crc

    head = (1).to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0\x80")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


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


class Runner:
    """Runs programs in a folder of their own."""

    def __init__(self, proxy: Proxy, url: str, home: Path, work: Path, programs: Mapping[str, str], model: str) -> None:
        self._proxy, self._url, self._home, self._work, self._model = proxy, url, home, work, model
        self._programs = programs
        self._number = 0

    def run(self, scenario: Scenario, home: str = "") -> Json:
        """Run a program; what it did, and what was wrong."""
        self._number += 1
        key = f"s{self._number}"
        session = Session(
            scenario.program, scenario.changed, scenario.may_leave, collections.deque(scenario.calls)
        )
        self._proxy.sessions[key] = session
        place = self._home / (home or scenario.program)
        place.mkdir(parents=True, exist_ok=True)
        arguments, env = list(scenario.arguments), {"PATH": os.environ["PATH"], "HOME": str(place), "TERM": "dumb"}
        env |= self._settings(scenario.program, f"{self._url}/{key}", place, arguments)
        began_s = time.monotonic()
        try:
            done = subprocess.run(
                [self._programs[scenario.program], *arguments], input=scenario.stdin, text=True, capture_output=True,
                cwd=self._work, env={**env, **scenario.env}, timeout=PATIENCE_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess([], 124, "", f"not done in {PATIENCE_S:.0f} s")
        problems, notices = (claude_said if scenario.program == "claude" else codex_said)(done.stdout)
        if done.returncode and not scenario.fails_with:
            problems.append(f"exit code {done.returncode}: {done.stderr.strip()[-300:]}")
        if session.calls:
            problems.append(f"not asked to call {', '.join(session.calls)}: no request had such a tool")
        elif session.n_answers < len(scenario.calls) - ("StructuredOutput" in scenario.calls):  # which ends a run
            problems.append(f"{session.n_answers} results of tools for {len(scenario.calls)} calls")
        problems = [*session.problems, *problems]
        if scenario.fails_with:
            understood = any(scenario.fails_with in problem for problem in problems)
            problems = [] if understood else [f"nothing said {scenario.fails_with!r}", *problems]
        made = {
            "program": scenario.program, "scenario": scenario.name, "requests": session.n_requests,
            "calls": len(scenario.calls), "results": session.n_answers, "seconds": round(time.monotonic() - began_s, 1),
            "notices": notices, "problems": problems,
        }  # fmt: skip
        note(f"{scenario.program}, {scenario.name}: {session.n_requests} requests, {session.n_answers} with results "
             f"of tools, {made['seconds']} s {made['problems'] or ''}")  # fmt: skip
        return made

    def _settings(self, program: str, url: str, place: Path, arguments: list[str]) -> dict[str, str]:
        if program == "claude":
            tiers = {f"ANTHROPIC_DEFAULT_{tier}_MODEL": self._model for tier in ("OPUS", "SONNET", "HAIKU")}
            return {
                "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": self._model, **tiers,
                "CLAUDE_CONFIG_DIR": str(place / ".claude"), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "CLAUDE_CODE_MAX_RETRIES": "0", "DISABLE_AUTOUPDATER": "1",
            }  # fmt: skip
        provider = f'{{name="spark",base_url="{url}/v1",wire_api="responses",'
        provider += "request_max_retries=0,stream_max_retries=0,stream_idle_timeout_ms=900000}"
        settings = [f"model_providers.spark={provider}", 'model_provider="spark"', f'model="{self._model}"',
                    'sandbox_mode="danger-full-access"', 'approval_policy="never"']  # fmt: skip
        arguments[1:1] = [word for setting in settings for word in ("-c", setting)]
        return {"CODEX_HOME": str(place)}


def _lines(stdout: str) -> tuple[list[Json], list[str]]:
    try:
        return [json.loads(line) for line in stdout.splitlines() if line], []
    except ValueError:
        return [], ["its output is not JSON"]


def claude_said(stdout: str) -> tuple[list[str], list[str]]:
    """Problems and notices in the output of Claude Code."""
    events, problems = _lines(stdout)
    finished = [event for event in events if event.get("type") == "result"]
    if len(finished) != 1:
        problems.append(f"{len(finished)} results")
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
    events, problems = _lines(stdout)
    if not any(event["type"] == "turn.completed" for event in events):
        problems.append("no turn.completed")
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    failed = [event for event in events if event["type"] in ("error", "turn.failed")]
    problems += [f"{event['type']}: {str(event)[:300]}" for event in failed]
    notices = [str(item.get("message"))[:200] for item in items if item["type"] == "error"]
    return problems, notices


def version_of(program: str) -> str:
    """What a program says its version is."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--bin", type=Path, metavar="DIR", help="where claude and codex are; else on PATH")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--only", metavar="TEXT", help="scenarios whose name has this")
    parser.add_argument("--layers", type=int, metavar="N", help="serve the first N layers only")
    parser.add_argument("--ctx", type=int, default=131072, metavar="N")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, metavar="N", help="of each program, at the end")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="keep the requests, texts and all")
    o = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is stopped too
    search = f"{o.bin}{os.pathsep}{os.environ['PATH']}" if o.bin else os.environ["PATH"]
    programs = {name: shutil.which(name, path=search) for name in o.programs}
    if missing := [name for name, found in programs.items() if found is None]:
        sys.exit(f"not found: {', '.join(missing)} (npm install @anthropic-ai/claude-code @openai/codex)")
    found = {name: str(Path(path).resolve()) for name, path in programs.items() if path}
    versions = {name: version_of(path) for name, path in found.items()}
    if o.dump:
        o.dump.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="spark-clients-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        work = folder / "work"
        work.mkdir()
        (work / "notes.txt").write_text("nothing of note\n")
        (work / "gray.png").write_bytes(picture())
        model = folder / o.model.name
        widen(o.model, model, o.ctx, o.layers)
        with serving(model, o.ctx, folder / "serve.log") as server:
            (work / "models.json").write_bytes(httpx.get(f"{server}/v1/models").content)
            proxy = Proxy(server, narrowed(work), dump=o.dump)
            with proxied(proxy) as url:
                runner = Runner(proxy, url, folder / "home", work, found, model.stem)
                rows = run_all(runner, {p: scenarios(work)[p] for p in o.programs}, o.only, o.at_once)
                alive = httpx.get(f"{server}/health").json()["daemon"]
    shapes = sorted(proxy.shapes.values(), key=lambda s: (s["program"], s["path"], -s["count"]))
    report = {
        "model": o.model.name, "layers": o.layers, "ctx_tokens": o.ctx, "programs": versions, "rows": rows,
        "most_at_once": proxy.most_at_once, "longest_prompt_tokens": proxy.prompt_tokens, "shapes": shapes,
        "events": dict(sorted(proxy.events.items())), "daemon": alive,
        "problems": sum(len(row["problems"]) for row in rows),
    }  # fmt: skip
    if o.json:
        write_json(o.json, report)
    note(f"{sum(s['count'] for s in shapes)} requests of {len(shapes)} shapes; at most {proxy.most_at_once} at once; "
         f"longest prompts {proxy.prompt_tokens}; {report['problems']} problems")  # fmt: skip
    if report["problems"] or alive != "ready":
        sys.exit(1)


def run_all(runner: Runner, wanted: Mapping[str, list[list[Scenario]]], only: str | None, at_once: int) -> list[Json]:
    """Run the scenarios one after the other, and some of each program at once in the end."""
    rows = []
    for conversations in wanted.values():
        for conversation in conversations:
            if only is None or any(only in scenario.name for scenario in conversation):
                rows += [runner.run(scenario) for scenario in conversation]
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
