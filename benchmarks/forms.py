"""Forms that take too long: what they cost the request that has them, and everybody else.

    python benchmarks/forms.py data/nano/nano.gguf --json data/results/forms.json

One client streams without a form, all the time; another sends forms, one kind after the other: harmless ones, those
that are refused by their size, those that pass for small ones and take all the time or memory there is, and many of
these at once with a harmless one behind them. For each: how long until its answer or refusal, the longest time between
two events of the other's tokens, and the most memory that daemon and forms took (USS: what each process has for
itself). The run fails if the other's tokens ever change.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.driving import note
from benchmarks.figures import json_option
from engine.ground.config import EngineConfig
from engine.ground.errors import SparkError
from engine.ground.protocol import Done, Tokens
from spark.daemon.client import DaemonClient, engine_command
from spark.results import write_json

PROMPT, LENGTH = list(range(40, 60)), 300
LOOK_S = 0.05


def patterns(n: int) -> dict[str, Any]:
    return {"type": "string", "allOf": [{"pattern": f"a{{{i},}}b.*c{{{i}}}"} for i in range(1, n + 1)]}


def properties(n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}}


def multiple(n: int) -> dict[str, Any]:
    """Two small numbers whose automaton is not small."""
    return {"type": "integer", "title": str(n), "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}


KINDS: dict[str, list[dict[str, Any]]] = {
    "no form": [],
    "a small form": [{"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 9}],
    "the same again": [{"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 9}],
    "29 patterns": [patterns(29)],
    "100 patterns": [patterns(100)],
    "5,000 optional properties": [properties(5000)],
    "2,048 optional properties": [properties(2048)],
    "a form without an end": [multiple(0)],
    "6 of these at once": [multiple(i) for i in range(1, 7)],
}


class Stream(threading.Thread):
    """A client without a form: the same request, again and again."""

    def __init__(self, client: DaemonClient) -> None:
        super().__init__(daemon=True)
        self.events_s: list[float] = []
        self.answers: set[tuple[int, ...]] = set()
        self.ended = False
        self._client = client

    def run(self) -> None:
        """Stream until told to end."""
        while not self.ended:
            tokens: list[int] = []
            for event in self._client.generate(PROMPT, max_tokens=LENGTH, stop_tokens=()):
                if isinstance(event, Tokens):
                    self.events_s.append(time.monotonic())
                    tokens += event.tokens
            self.answers.add(tuple(tokens))

    def longest_s(self, since_s: float) -> float:
        """The longest time between two events of tokens."""
        events = [since_s, *(s for s in self.events_s if s > since_s), time.monotonic()]
        return max(b - a for a, b in itertools.pairwise(events))


class Memory(threading.Thread):
    """Looks at what the daemon and its processes have for themselves."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.most_bytes = self.most_processes = 0
        self._daemon = psutil.Process(pid)

    def run(self) -> None:
        """Look until the daemon has ended."""
        with contextlib.suppress(psutil.Error):
            while True:
                processes, total = [self._daemon, *self._daemon.children(recursive=True)], 0
                for process in processes:
                    with contextlib.suppress(psutil.Error):
                        total += process.memory_full_info().uss
                self.most_bytes, self.most_processes = (
                    max(self.most_bytes, total),
                    max(self.most_processes, len(processes)),
                )
                time.sleep(LOOK_S)


def ask(client: DaemonClient, schema: dict[str, Any], answers: list[dict[str, Any]]) -> None:
    """Send a request that has a form; how it ended, and when."""
    began_s = time.monotonic()
    first_s, end = None, ""
    try:
        text = json.dumps({"kind": "json_schema", "schema": schema})
        for event in client.generate(PROMPT, max_tokens=20, grammar=text):
            if isinstance(event, Tokens) and first_s is None:
                first_s = time.monotonic() - began_s
            if isinstance(event, Done):
                end = event.finish_reason or "stop"
    except SparkError as error:
        end = f"{error.code}: {error.message}"
    answers.append({"seconds": time.monotonic() - began_s, "first_token_s": first_s, "end": end})


def measure(client: DaemonClient, stream: Stream, memory: Memory, schemas: list[dict[str, Any]]) -> dict[str, Any]:
    since_s = time.monotonic()
    memory.most_bytes = memory.most_processes = 0
    answers: list[dict[str, Any]] = []
    asking = [threading.Thread(target=ask, args=(client, schema, answers)) for schema in schemas]
    for thread in asking:
        thread.start()
    behind: list[dict[str, Any]] = []
    if len(schemas) > 1:
        time.sleep(0.5)
        ask(client, {"enum": ["behind", len(schemas)]}, behind)
    for thread in asking:
        thread.join()
    while time.monotonic() < since_s + 3:
        time.sleep(LOOK_S)
    return {
        "forms": len(schemas), "ends": sorted({a["end"] for a in answers}),
        "longest_s": max((a["seconds"] for a in answers), default=None),
        "median_s": statistics.median(a["seconds"] for a in answers) if answers else None,
        "behind_them_s": behind[0]["seconds"] if behind else None,
        "gap_s": stream.longest_s(since_s),
        "peak_bytes": memory.most_bytes, "processes": memory.most_processes,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--threads", type=int)
    json_option(parser)
    o = parser.parse_args()
    config = EngineConfig(model=o.model, device=o.device, threads=o.threads, ctx_tokens=512)
    rows: dict[str, Any] = {}
    with DaemonClient(engine_command(config)) as client:
        stream, memory = Stream(client), Memory(client.pid)
        stream.start()
        memory.start()
        time.sleep(1)
        for name, schemas in KINDS.items():
            rows[name] = row = measure(client, stream, memory, schemas)
            answer = "" if row["longest_s"] is None else f"{row['longest_s']:.2f} s: {'; '.join(row['ends'])[:90]}; "
            note(f"{name}: {answer}gap {row['gap_s'] * 1e3:.0f} ms, {row['peak_bytes'] / 2**20:.0f} MiB")
        stream.ended = True
        stream.join()
    report = {"model": o.model.name, "device": o.device, "kinds": rows, "answers": len(stream.answers)}
    if o.json:
        write_json(o.json, report)
    if len(stream.answers) != 1:
        sys.exit(f"the client without a form got {len(stream.answers)} different answers to one question")


if __name__ == "__main__":
    main()
