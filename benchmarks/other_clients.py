"""opencode, pi, qwen-code, llm, Vercel's AI SDK and LangChain against `spark serve`: what they send, and that it works.

    npm install --prefix DIR opencode-ai @mariozechner/pi-coding-agent @qwen-code/qwen-code ai \\
        @ai-sdk/openai-compatible @ai-sdk/openai @ai-sdk/anthropic
    python -m venv VENV && VENV/bin/pip install langchain-openai langchain-anthropic llm
    python benchmarks/other_clients.py data/nano/nano.gguf --npm DIR --venv VENV --json data/results/other_clients.json

How they are run and made to call tools is in client_runs.py. The last two are no programs: client_ai.mjs and
client_langchain.py ask for one thing each. Nobody but the server is asked: updates, telemetry, lists of models are off.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.client_proxy import ANSWER, Json  # noqa: E402
from benchmarks.client_runs import (  # noqa: E402
    Program,
    Scenario,
    drive,
    lines_of,
    long_text,
    options,
    run_one_by_one,
)

PROGRAMS = ("opencode", "pi", "qwen", "llm", "ai", "langchain")
PI, QWEN, LANGCHAIN = (
    "@mariozechner/pi-coding-agent",
    "@qwen-code/qwen-code",
    ("langchain-openai", "langchain-anthropic"),
)
MODEL = "served"  # what programs call it; the server has one
REFUSED = {"embeddings": [404], "not kept": [404]}
LOOK = {"look": {"place": "here"}}
# APIs that a program speaks, by what it calls them.
PI_APIS = {"spark": "openai-completions", "spark-responses": "openai-responses", "spark-messages": "anthropic-messages"}
AI_APIS = ("compatible", "chat", "responses", "anthropic")
LANGCHAIN_APIS = ("chat", "responses", "anthropic")
AI_TYPES = {"spark": "@ai-sdk/openai-compatible", "spark-messages": "@ai-sdk/anthropic"}
LLM_TOOL = 'def look(place: str) -> str:\n    "Look somewhere."\n    return "nothing of note"\n'


# --- settings -------------------------------------------------------------------------------------


def opencode_settings(url: str, place: Path, model: str, arguments: list[str]) -> dict[str, str]:
    """The environment of opencode, which has its settings."""
    known = {
        "name": model, "attachment": True, "reasoning": True, "tool_call": True,
        "modalities": {"input": ["text", "image"], "output": ["text"]}, "limit": {"context": 131072, "output": 8192},
    }  # fmt: skip
    providers = {
        name: {
            "npm": npm,
            "name": name,
            "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
            "models": {MODEL: known},
        }
        for name, npm in AI_TYPES.items()
    }
    settings = {
        "provider": providers, "enabled_providers": list(providers), "model": f"spark/{MODEL}", "autoupdate": False,
        "small_model": f"spark/{MODEL}", "share": "disabled", "permission": {"*": "allow"}, "lsp": False,
    }  # fmt: skip
    off = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD", "CLAUDE_CODE", "SHARE")
    return {
        "OPENCODE_CONFIG_CONTENT": json.dumps(settings),
        **{f"OPENCODE_DISABLE_{name}": "1" for name in off},
    }


def pi_settings(url: str, place: Path, model: str, arguments: list[str]) -> dict[str, str]:
    """The environment of pi, and the file of models."""
    known = {"id": MODEL, "reasoning": True, "input": ["text", "image"], "contextWindow": 131072, "maxTokens": 8192}
    providers = {
        name: {
            "baseUrl": url if api == "anthropic-messages" else f"{url}/v1", "api": api, "apiKey": "none",
            "models": [known],
        }
        for name, api in PI_APIS.items()
    }  # fmt: skip
    (place / "models.json").write_text(json.dumps({"providers": providers}))
    (place / "settings.json").write_text(json.dumps({"retry": {"enabled": False}, "enableInstallTelemetry": False}))
    return {"PI_CODING_AGENT_DIR": str(place), "PI_OFFLINE": "1", "PI_TELEMETRY": "0"}


def qwen_settings(url: str, place: Path, model: str, arguments: list[str]) -> dict[str, str]:
    """The environment of qwen-code, and its settings."""
    known = {
        "id": model, "name": model, "envKey": "OPENAI_API_KEY", "baseUrl": f"{url}/v1",
        "generationConfig": {"modalities": {"image": True}, "contextWindowSize": 131072, "maxRetries": 0},
    }  # fmt: skip
    settings = {
        "modelProviders": {"openai": [known]},
        "model": {"name": model},
        "security": {"auth": {"selectedType": "openai"}},
        "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    (place / ".qwen").mkdir(exist_ok=True)
    (place / ".qwen" / "settings.json").write_text(json.dumps(settings))
    return {
        "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": model, "QWEN_CODE_NO_RELAUNCH": "1"
    }  # fmt: skip


def llm_settings(url: str, place: Path, model: str, arguments: list[str]) -> dict[str, str]:
    """The environment of llm, and its list of models, which is YAML and so may be JSON."""
    common = {"model_name": model, "api_base": f"{url}/v1", "vision": True, "supports_schema": True,
              "supports_tools": True, "reasoning": True}  # fmt: skip
    made = [{"model_id": "spark", **common}, {"model_id": "spark-responses", "responses": True, **common}]
    (place / "extra-openai-models.yaml").write_text(json.dumps(made))
    return {"LLM_USER_PATH": str(place), "OPENAI_API_KEY": "none"}


def script_settings(url: str, place: Path, model: str, arguments: list[str]) -> dict[str, str]:
    """What both scripts are told first."""
    arguments[:0] = [url, model]
    return {"LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"}


# --- what they say --------------------------------------------------------------------------------


def opencode_said(stdout: str) -> tuple[list[str], list[str]]:
    """Problems and notices in the events of opencode."""
    events, problems = lines_of(stdout)
    problems += [f"error: {str(event)[:300]}" for event in events if event["type"] == "error"]
    if not any(event["type"] == "step_finish" for event in events):
        problems.append("no step_finish")
    tools = [event["part"]["state"] for event in events if event["type"] == "tool_use"]
    return problems, [
        f"a tool failed: {str(state.get('error'))[:200]}" for state in tools if state["status"] == "error"
    ]


def pi_said(stdout: str) -> tuple[list[str], list[str]]:
    """Problems and notices in the events of pi."""
    events, problems = lines_of(stdout)
    ends = [event["message"] for event in events if event["type"] == "turn_end"]
    problems += [f"{end['stopReason']}: {end.get('errorMessage')}" for end in ends if "errorMessage" in end]
    if not ends:
        problems.append("no turn_end")
    failed = [event for event in events if event["type"] == "tool_execution_end" and event["isError"]]
    return problems, ["a tool failed"] * len(failed)


def qwen_said(stdout: str) -> tuple[list[str], list[str]]:
    """Problems and notices in the events of qwen-code."""
    events, problems = lines_of(stdout)
    results = [event for event in events if event.get("type") == "result"]
    if len(results) != 1:
        problems.append(f"{len(results)} results")
    problems += [f"result: {str(event)[:300]}" for event in results if event.get("is_error")]
    return problems, []


def llm_said(stdout: str) -> tuple[list[str], list[str]]:
    """Problems in what llm wrote."""
    return [] if stdout.strip() else ["it wrote nothing"], []


def script_said(stdout: str) -> tuple[list[str], list[str]]:
    """Problems in what a script wrote."""
    found, problems = lines_of(stdout)
    return problems or ([] if len(found) == 1 else [f"{len(found)} lines"]), []


# --- scenarios ------------------------------------------------------------------------------------


def of_opencode(work: Path) -> list[list[Scenario]]:
    """Both APIs; a conversation with a picture in it goes on."""
    image, shell = str(work / "gray.png"), {"command": "cat notes.txt", "description": "Show the notes"}
    tools: dict[str, Json] = {"bash": shell, "read": {"filePath": str(work / "notes.txt")}}
    shows: dict[str, Json] = {**tools, "read": {"filePath": image}}

    def run(name: str, prompt: str, *more: str, narrowed: Mapping[str, Json] = tools, **fields: Any) -> Scenario:
        return Scenario(
            name, "opencode", ["run", "--format", "json", "--title", "t", *more, "--", prompt], narrowed=narrowed,
            **fields,
        )  # fmt: skip

    made = [[run("interrupted", "Count.", changed=False, interrupted=True)]]
    for provider in AI_TYPES:
        model = ("--model", f"{provider}/{MODEL}")
        made += [
            [
                run(f"{provider}: prompt", "Say hello.", *model),
                run(f"{provider}: continued, two calls", "Work.", *model, "--continue", calls=["bash", "read"]),
                run(f"{provider}: a picture", "What is this?", *model, "--continue", "--file", image),
                run(f"{provider}: after the picture", "Go on.", *model, "--continue", calls=["bash"]),
            ],
            [
                run(f"{provider}: a picture by tool", "Look.", *model, narrowed=shows, calls=["read"]),
                run(f"{provider}: after that picture", "Go on.", *model, "--continue"),
            ],
        ]
    model = ("--model", f"spark/{MODEL}", "--variant", "low")
    made.append([run("low effort", "Think.", *model), run("after reasoning", "Again.", *model, "--continue")])
    titled = ["run", "--format", "json", "--", "Say hello."]
    return [*made, [Scenario("a title is made", "opencode", titled)]]


def of_pi(work: Path) -> list[list[Scenario]]:
    """All three APIs; a conversation with a picture in it goes on."""
    image = str(work / "gray.png")
    tools: dict[str, Json] = {"bash": {"command": "cat notes.txt"}, "read": {"path": str(work / "notes.txt")}}
    shows: dict[str, Json] = {"read": {"path": image}}

    def run(name: str, *more: str, narrowed: Mapping[str, Json] = tools, **fields: Any) -> Scenario:
        return Scenario(name, "pi", ["--mode", "json", *more], narrowed=narrowed, **fields)

    interrupted = run("interrupted", "--provider", "spark", "--model", MODEL, "Count.", changed=False, interrupted=True)
    made = [[interrupted]]
    for provider in PI_APIS:
        model = ("--provider", provider, "--model", MODEL)
        thinks = (*model, "--thinking", "low")
        made += [
            [
                run(f"{provider}: prompt", *model, "Say hello."),
                run(f"{provider}: continued, two calls", *thinks, "-c", "Work.", calls=["bash", "read"]),
                run(f"{provider}: a picture", *model, "-c", f"@{image}", "What is this?"),
                run(f"{provider}: after the picture", *thinks, "-c", "Go on.", calls=["bash"]),
            ],
            [
                run(f"{provider}: a picture by tool", *model, "Look.", narrowed=shows, calls=["read"]),
                run(f"{provider}: after that picture", *model, "-c", "Go on."),
            ],
        ]
    return made


def of_qwen(work: Path) -> list[list[Scenario]]:
    """Its API is that of chat completions."""
    image = str(work / "gray.png")
    shell = {"command": "cat notes.txt", "description": "Show the notes", "is_background": False}
    tools: dict[str, Json] = {"run_shell_command": shell, "read_file": {"file_path": str(work / "notes.txt")}}
    shows: dict[str, Json] = {"read_file": {"file_path": image}}
    form = json.dumps(ANSWER)

    def run(name: str, prompt: str, *more: str, narrowed: Mapping[str, Json] = tools, **fields: Any) -> Scenario:
        arguments = ["--output-format", "stream-json", "--yolo", *more, prompt]
        return Scenario(name, "qwen", arguments, narrowed=narrowed, **fields)

    return [
        [run("interrupted", "Count.", changed=False, interrupted=True)],
        [
            run("prompt", "Say hello."),
            run("continued, two calls", "Work.", "--continue", calls=["run_shell_command", "read_file"]),
            run("a picture", f"What is @{image}?", "--continue"),
            run("after the picture", "Go on.", "--continue", calls=["run_shell_command"]),
        ],
        [
            run("a picture by tool", "Look.", narrowed=shows, calls=["read_file"]),
            run("after that picture", "Go on.", "--continue"),
        ],
        [run("a form", "Answer.", "--json-schema", form, narrowed={"structured_output": {"answer": "done"}},
             calls=["structured_output"])],
        [run("pieces", "Say hello.", "--include-partial-messages")],
    ]  # fmt: skip


def of_llm(work: Path) -> list[list[Scenario]]:
    """Both APIs of OpenAI's."""
    image, form = str(work / "gray.png"), json.dumps(ANSWER)

    def run(name: str, *arguments: str, **fields: Any) -> Scenario:
        return Scenario(name, "llm", ["prompt", *arguments], narrowed=LOOK, **fields)

    made = [[run("interrupted", "-m", "spark", "Count.", changed=False, interrupted=True)]]
    for model in ("spark", "spark-responses"):
        m = ("-m", model)
        made += [
            [run(f"{model}: prompt", *m, "-s", "Be brief.", "Say hello.")],
            [run(f"{model}: not streamed", *m, "--no-stream", "Say hello.")],
            [run(f"{model}: 60 KB of input", *m, "Sum up.", stdin=long_text())],
            [run(f"{model}: a form", *m, "--schema", form, "Answer.")],
            [run(f"{model}: a tool", *m, "--functions", LLM_TOOL, "Look.", calls=["look"])],
            [
                run(f"{model}: a picture", *m, "-a", image, "What is this?"),
                run(f"{model}: after the picture", *m, "-c", "Go on."),
            ],
        ]
    return made


def of_ai(work: Path) -> list[list[Scenario]]:
    """Vercel's AI SDK: four providers."""
    features = ["prompt", "stream", "tools", "picture and after", "picture by tool", "form", "reasoning", "cancelled"]
    asked = [(api, what) for api in AI_APIS for what in features]
    asked += [("chat", "logprobs"), ("responses", "logprobs"), ("compatible", "embeddings")]
    asked += [("responses", what) for what in ("references", "previous response", "not kept")]
    return [[script("ai", api, what, str(work / "gray.png"))] for api, what in asked]


def of_langchain(work: Path) -> list[list[Scenario]]:
    """LangChain: three APIs."""
    features = ["prompt", "stream", "tools", "picture and after", "form", "form by a call", "reasoning", "cancelled"]
    asked = [(api, what) for api in LANGCHAIN_APIS for what in features]
    asked += [("chat", "two choices with log-probabilities"), ("chat", "embeddings")]
    return [[script("langchain", api, what, str(work / "gray.png"))] for api, what in asked]


def script(program: str, api: str, what: str, image: str) -> Scenario:
    """A run of a script."""
    calls = {"tools": ["look"], "picture by tool": ["look"]}.get(what, [])
    left = what == "cancelled"
    return Scenario(
        f"{api}: {what}", program, [api, what, image], calls, narrowed=LOOK, leaves=left,
        refusals=REFUSED.get(what, []),
    )  # fmt: skip


SCENARIOS = {
    "opencode": of_opencode,
    "pi": of_pi,
    "qwen": of_qwen,
    "llm": of_llm,
    "ai": of_ai,
    "langchain": of_langchain,
}


# --- the programs ---------------------------------------------------------------------------------


def main() -> None:
    parser = options(__doc__, PROGRAMS)
    parser.add_argument("--npm", type=Path, metavar="DIR", required=True, help="where node_modules is")
    parser.add_argument("--venv", type=Path, metavar="DIR", required=True, help="that of llm and LangChain")
    o = parser.parse_args()
    programs = {name: found(name, o.npm.resolve(), o.venv.absolute()) for name in o.programs}
    drive(o, programs, lambda work: {}, lambda runner, work: [
        row for name in o.programs for row in run_one_by_one(runner, SCENARIOS[name](work), o.only)
    ])  # fmt: skip


def found(name: str, npm: Path, venv: Path) -> Program:
    """A program where it was installed; exits where it is not there."""
    modules, scripts, python = npm / "node_modules", ROOT / "benchmarks", str(venv / "bin" / "python")
    native = {"x86_64": "opencode-linux-x64", "aarch64": "opencode-linux-arm64"}.get(platform.machine(), "?")
    ai = ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic")
    command, packages, settings, said = {
        "opencode": ([modules / native / "bin/opencode"], ["opencode-ai"], opencode_settings, opencode_said),
        "pi": (["node", modules / PI / "dist/cli.js"], [PI], pi_settings, pi_said),
        "qwen": (["node", modules / QWEN / "cli.js"], [QWEN], qwen_settings, qwen_said),
        "llm": ([venv / "bin/llm"], ["llm"], llm_settings, llm_said),
        "ai": (["node", scripts / "client_ai.mjs", npm], ai, script_settings, script_said),
        "langchain": ([python, scripts / "client_langchain.py"], LANGCHAIN, script_settings, script_said),
    }[name]
    if missing := [str(path) for path in command if isinstance(path, Path) and not path.exists()]:
        sys.exit(f"not found: {missing[0]}; how to install it is at the top of {Path(__file__).name}")
    version = _pip_version if name in ("llm", "langchain") else _npm_version
    versions = [version(python if version is _pip_version else modules, package) for package in packages]
    names = [f"{package} {number}" for package, number in zip(packages, versions, strict=True)]
    return Program([str(word) for word in command], ", ".join(names), settings, said)


def _npm_version(modules: Path, package: str) -> str:
    return str(json.loads((modules / package / "package.json").read_text())["version"])


def _pip_version(python: str, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip()


if __name__ == "__main__":
    main()
