"""The whole pipeline on the bundled model and sample sessions: time, rate and peak memory of each command.

Every command runs as a user runs it, in a process of its own. Memory is the peak of the resident sizes of
the process and its children together, sampled every 10 ms (pages that two of them map count twice).

    python benchmarks/pipeline.py --json data/results/pipeline.json
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.figures import json_option  # noqa: E402
from engine.placing import policies  # noqa: E402
from spark.results import write_json  # noqa: E402

NANO = ROOT / "data" / "nano" / "nano.gguf"
SAMPLES = ROOT / "data" / "sessions"
SPARK = [sys.executable, "-m", "spark.cli"]


class Peak:
    """Watches the memory of a process tree in a thread; `mib` is the most that was seen."""

    def __init__(self, pid: int) -> None:
        self.mib = 0.0
        self._process = psutil.Process(pid)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            try:
                tree = [self._process, *self._process.children(recursive=True)]
                total = sum(p.memory_info().rss for p in tree if p.is_running())
            except psutil.NoSuchProcess:
                if not self._process.is_running():
                    return
                continue
            if total == 0:
                return
            self.mib = max(self.mib, total / 2**20)
            time.sleep(0.01)


def command(name: str, *arguments: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a command; its row (seconds, peak memory) and its own figures."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        words = [*SPARK, name, *map(str, arguments), "--json", str(figures)]
        began = time.monotonic()
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            peak = Peak(process.pid)
            _, stderr = process.communicate()
        if process.returncode:
            raise SystemExit(f"{' '.join(words)} failed with {process.returncode}:\n{stderr}")
        row = {"command": f"spark {name}", "seconds": time.monotonic() - began, "peak_mib": peak.mib}
        return row, json.loads(portable(figures.read_text(), folder))


def portable(text: str, folder: str) -> str:
    """The text without this machine's paths: relative to the source tree, temporary folders as OUT."""
    text = text.replace(f"{ROOT}/", "").replace(folder, "OUT")
    return re.sub(re.escape(tempfile.gettempdir()) + r"/spark-bench-[^/\"]+", "OUT", text)


def chat(port: int, text: str) -> dict[str, Any]:
    """One streamed completion: tokens, time to the first chunk and in all."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 128, "stream": True,
            "stream_options": {"include_usage": True}, "temperature": 0.7, "seed": 1}  # fmt: skip
    began = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    first_s, usage = 0.0, {}
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            first_s = first_s or time.monotonic() - began
            usage = json.loads(line[6:]).get("usage") or usage
    return {"first_s": first_s, "seconds": time.monotonic() - began, "tokens": usage["completion_tokens"]}


def serving(profile: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`spark serve --spark` at 60% residency under six different requests, the first not measured."""
    words = [*SPARK, "serve", str(NANO), "--spark", "--profile", str(profile), "--residency", "60", "--port", "0"]
    began = time.monotonic()
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        peak = Peak(process.pid)
        port = next(int(m[1]) for line in process.stderr if (m := re.search(r"http://[\d.]+:(\d+)", line)))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        modules = ("json", "argparse", "heapq", "asyncio", "zipfile", "difflib")
        replies = [chat(port, f"What does the module {name} do? Show its most important function.") for name in modules]
        process.terminate()
        process.wait(30)
    row = {"command": "spark serve", "seconds": time.monotonic() - began, "peak_mib": peak.mib}
    return row, replies[1:]


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    json_option(parser, required=True)
    parser.add_argument("--runs", type=int, default=3, help="calibrations timed")
    args = parser.parse_args()
    rows, results = [], {}
    with tempfile.TemporaryDirectory(prefix="spark-bench-") as folder:
        out = Path(folder)
        logs = ["--claude-dir", SAMPLES / "claude", "--codex-dir", SAMPLES / "codex", "--test-frac", "0.3"]
        row, results["extract-sessions"] = command("extract-sessions", "--out-dir", out, *logs)
        rows.append(row)
        for family in ("claude", "codex"):
            command("extract-sessions", "--out-dir", out / family, "--source", family, *logs)
        for name in ("train", "test", "claude/train", "claude/test", "codex/train", "codex/test"):
            row, figures = command("tokenize", NANO, out / f"{name}.jsonl", "--out", out / f"{name}.parquet")
            if name == "train":
                rows.append(row)
            results[f"tokenize {name}"] = figures
        profiles = {name: out / f"{name.replace('/', '-')}.csv" for name in ("train", "claude/train", "codex/train")}
        rates = []
        for _ in range(args.runs):
            row, figures = command("calibrate", NANO, out / "train.parquet", "--out", profiles["train"])
            rates.append(figures["tokens_per_s"])
        rows.append({**row, "tokens_per_s": spread(rates)})
        results["calibrate"] = figures
        for name in ("claude/train", "codex/train"):
            command("calibrate", NANO, out / f"{name}.parquet", "--out", profiles[name])
        row, results["validate"] = command(
            "validate", NANO, out / "test.parquet", "--profile", profiles["train"], "--residency", "10,30,60",
            "--prompts", "20", "--generate", "64",
        )  # fmt: skip
        rows.append(row)
        for own, other in (("claude", "codex"), ("codex", "claude")):
            _, results[f"cross {own}"] = command(
                "validate", NANO, out / own / "test.parquet", "--profile", profiles[f"{own}/train"],
                "--cross", profiles[f"{other}/train"], "--cross", profiles["train"], "--residency", "60",
                "--prompts", "2", "--generate", "8",
            )  # fmt: skip
        trace = out / "trace"
        command("calibrate", NANO, out / "train.parquet", "--out", out / "t.csv", "--trace", trace, "--hidden",
                "--max-tokens", "60000")  # fmt: skip
        row, results["train-pregate"] = command("train-pregate", NANO, trace, "--out", out / "pregate.safetensors")
        rows.append(row)
        row, replies = serving(profiles["train"])
        rows.append(row)
        results["serve"] = {
            "tokens_per_s": spread([r["tokens"] / r["seconds"] for r in replies]),
            "first_s": spread([r["first_s"] for r in replies]),
        }
        decode = next(r for r in results["validate"]["residencies"][-1]["rows"] if r["policy"] == policies.ALL.name)[
            "decode_tokens_per_s"
        ]
    report = {"rows": rows, "decode_tokens_per_s": decode, "results": results}
    write_json(args.json, report)
    for row in rows:
        print(f"{row['command']:24s} {row['seconds']:8.1f} s {row['peak_mib']:8.0f} MiB")
    print(f"calibrate {statistics.median(rates):,.0f} tokens/s, decode {decode:,.0f} tokens/s")


if __name__ == "__main__":
    main()
