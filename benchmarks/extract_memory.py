"""Peak memory and speed of `spark extract-sessions` on a made-up tree of logs of a given size.

    python benchmarks/extract_memory.py --size-mb 1000 --json out.json

The tree is half Claude Code's and half Codex's logs; one Claude session has up to 200 MB. The text is the standard
library's sources, cut at random, so that redaction and JSON see what they see in real logs. The extraction runs in a
process of its own, whose peak resident set is reported.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.figures import json_option  # noqa: E402
from spark.results import write_json  # noqa: E402

LARGEST_MB = 200
USUAL_MB = 8

CHILD = """
import json, resource, sys, time
from pathlib import Path
from spark.extract import ExtractOptions, extract
imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.perf_counter()
home = Path(sys.argv[1])
options = ExtractOptions(home / "out", claude_dir=home / "claude", codex_dir=home / "codex", redact=sys.argv[2] == "1")
report = extract(options, lambda done, total: None)
seconds = time.perf_counter() - started
usage = resource.getrusage(resource.RUSAGE_SELF)
cpu = usage.ru_utime + usage.ru_stime
memory = {"peak_kb": usage.ru_maxrss, "imported_kb": imported}
print(json.dumps({"seconds": seconds, "cpu": cpu, **memory, "report": report.to_json()}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=300, help="size of the tree")
    parser.add_argument("--no-redact", action="store_true", help="leave secrets in")
    json_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spark-extract-") as folder:
        size, largest = make_tree(Path(folder), options.size_mb)
        command = [sys.executable, "-c", CHILD, folder, "0" if options.no_redact else "1"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        written = sum(path.stat().st_size for path in (Path(folder) / "out").iterdir())
    result = json.loads(done.stdout)
    row = {
        "size_mb": round(size / 1e6, 1),
        "largest_file_mb": round(largest / 1e6, 1),
        "written_mb": round(written / 1e6, 1),
        "seconds": round(result["seconds"], 2),
        "cpu_s": round(result["cpu"], 2),
        "mb_per_s": round(size / 1e6 / result["seconds"], 1),
        "peak_rss_mb": round(result["peak_kb"] * 1024 / 1e6, 1),
        "imported_rss_mb": round(result["imported_kb"] * 1024 / 1e6, 1),
        "files": result["report"]["files"],
        "messages": result["report"]["messages"],
    }
    print(json.dumps(row, indent=2))
    if options.json:
        write_json(options.json, {"rows": [row]})


def make_tree(home: Path, size_mb: int) -> tuple[int, int]:
    """Write the logs; returns their size and that of the largest, in bytes."""
    rng = random.Random(size_mb)
    library = Path(random.__file__).parent
    texts = [path.read_text("utf-8") for path in sorted(library.glob("*.py"))]
    project = home / "claude" / "projects" / "-home-dev-cpython"
    day = home / "codex" / "sessions" / "2026" / "03" / "01"
    project.mkdir(parents=True)
    day.mkdir(parents=True)
    half, total, largest = size_mb * 500_000, 0, 0
    plan = [(project, claude_lines, min(LARGEST_MB * 1_000_000, half // 2))]
    plan += [(project, claude_lines, USUAL_MB * 1_000_000)] * ((half - plan[0][2]) // (USUAL_MB * 1_000_000))
    plan += [(day, codex_lines, USUAL_MB * 1_000_000)] * (half // (USUAL_MB * 1_000_000))
    for folder, lines, limit in plan:
        session = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        name = f"{session}.jsonl" if lines is claude_lines else f"rollout-2026-03-01T09-00-00-{session}.jsonl"
        written = 0
        with (folder / name).open("wb") as file:
            for record in lines(session, rng, texts):
                written += file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
                if written >= limit:
                    break
        total += written
        largest = max(largest, written)
    return total, largest


def cut(rng: random.Random, texts: list[str], longest: int) -> str:
    """A piece of source, now and then with a character outside the 16-bit plane, which takes Python 4 bytes each."""
    text = rng.choice(texts)
    begin = rng.randrange(len(text))
    piece = text[begin : begin + rng.randrange(40, longest)]
    return piece + " \N{PARTY POPPER}" if rng.random() < 0.2 else piece


def claude_lines(session: str, rng: random.Random, texts: list[str]) -> Iterator[dict[str, Any]]:
    """A session without end: prompts, thoughts, calls, results, each result twice as in the real logs."""
    parent: str | None = None

    def line(kind: str, message: dict[str, Any], **extra: Any) -> dict[str, Any]:
        nonlocal parent
        own = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        record = {"parentUuid": parent, "isSidechain": False, "userType": "external", "cwd": "/home/dev/cpython"}
        record |= {"sessionId": session, "version": "2.1.81", "gitBranch": "main", "type": kind, "message": message}
        parent = own
        return {**record, "uuid": own, "timestamp": "2026-03-01T09:00:00.000Z", **extra}

    while True:
        yield line("user", {"role": "user", "content": cut(rng, texts, 300)})
        for _ in range(rng.randrange(1, 12)):
            message = f"msg_{rng.getrandbits(96):024x}"
            call = f"toolu_{rng.getrandbits(96):024x}"
            arguments = {"command": cut(rng, texts, 200)}
            for block in (
                {"type": "thinking", "thinking": cut(rng, texts, 800), "signature": "A" * 300},
                {"type": "tool_use", "id": call, "name": "Bash", "input": arguments},
            ):
                yield line("assistant", {"id": message, "role": "assistant", "model": "m", "content": [block]})
            text = cut(rng, texts, 12000)
            result = {"type": "tool_result", "tool_use_id": call, "content": text}
            yield line("user", {"role": "user", "content": [result]}, toolUseResult={"stdout": text, "stderr": ""})


def codex_lines(session: str, rng: random.Random, texts: list[str]) -> Iterator[dict[str, Any]]:
    """A thread without end, with the events that mirror its messages."""

    def line(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
        return {"timestamp": "2026-03-01T09:00:00.000Z", "type": kind, "payload": payload}

    yield line("session_meta", {"id": session, "cwd": "/home/dev/cpython", "base_instructions": {"text": "Be brief."}})
    while True:
        prompt = cut(rng, texts, 300)
        content = [{"type": "input_text", "text": prompt}]
        yield line("response_item", {"type": "message", "role": "user", "content": content})
        yield line("event_msg", {"type": "user_message", "message": prompt})
        for _ in range(rng.randrange(1, 12)):
            thought = cut(rng, texts, 800)
            summary = [{"type": "summary_text", "text": thought}]
            yield line("event_msg", {"type": "agent_reasoning", "text": thought})
            yield line("response_item", {"type": "reasoning", "summary": summary, "encrypted_content": "A" * 600})
            call = f"call_{rng.getrandbits(96):024x}"
            arguments = json.dumps({"cmd": cut(rng, texts, 200)})
            yield line(
                "response_item",
                {"type": "function_call", "name": "exec_command", "arguments": arguments, "call_id": call},
            )
            output = cut(rng, texts, 12000)
            yield line("response_item", {"type": "function_call_output", "call_id": call, "output": output})
            yield line("event_msg", {"type": "token_count", "info": {"total_token_usage": {"total_tokens": 1}}})


if __name__ == "__main__":
    main()
