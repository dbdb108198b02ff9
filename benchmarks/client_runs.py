"""How clients.py and other_clients.py run programs: a server, a proxy before it, a folder, one scenario after another.

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
import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.client_proxy import ANSWER, LONG_ANSWER, PATIENCE_S, Json, Proxy, Session, proxied  # noqa: E402
from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from spark.results import write_json  # noqa: E402

LONG_TEXT_LINES = 900
ENDING = ("StructuredOutput", "structured_output")  # tools whose call ends a run
AT_REST_S = 20.0  # for the server to notice that a program has left


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


# --- the programs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A program and how it is driven.

    command: what it begins with. settings: makes its environment from the URL, a folder of its own, the model's
    name and the arguments, to which it may add. said: problems and notices in what it wrote.
    """

    command: Sequence[str]
    version: str
    settings: Callable[[str, Path, str, list[str]], dict[str, str]]
    said: Callable[[str], tuple[list[str], list[str]]]


@dataclass(frozen=True)
class Scenario:
    """One run of a program.

    calls: tools that it is made to call. changed: whether the proxy changes anything. may_leave: it may end while a
    reply of an agent of its is still coming. fails_with: what it says when it has understood why it was refused.
    refusals: statuses that it is to get. narrowed: tools that may run, with what each may be called with.
    interrupted: it gets SIGINT while its first reply comes. leaves: it shuts a reply's stream by itself.
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
    refusals: Sequence[int] = ()
    narrowed: Mapping[str, Json] = field(default_factory=dict)
    interrupted: bool = False
    leaves: bool = False


class Runner:
    """Runs programs in a folder of their own."""

    def __init__(
        self, proxy: Proxy, url: str, home: Path, work: Path, programs: Mapping[str, Program], model: str
    ) -> None:
        self._proxy, self._url, self._home, self._work, self._model = proxy, url, home, work, model
        self._programs = programs
        self._number = 0

    def run(self, scenario: Scenario, home: str = "") -> Json:
        """Run a program; what it did, and what was wrong."""
        self._number += 1
        key = f"s{self._number}"
        session = Session(
            scenario.program, scenario.changed, scenario.may_leave or scenario.interrupted or scenario.leaves,
            collections.deque(scenario.calls), scenario.refusals, scenario.narrowed,
            LONG_ANSWER if scenario.leaves else ANSWER,
        )  # fmt: skip
        self._proxy.sessions[key] = session
        place = self._home / (home or scenario.program)
        place.mkdir(parents=True, exist_ok=True)
        program = self._programs[scenario.program]
        arguments, env = list(scenario.arguments), {"PATH": os.environ["PATH"], "HOME": str(place), "TERM": "dumb"}
        env |= program.settings(f"{self._url}/{key}", place, self._model, arguments)
        began_s = time.monotonic()
        done = self._process([*program.command, *arguments], scenario, {**env, **scenario.env}, session)
        problems, notices = program.said(done.stdout) if not scenario.interrupted else ([], [])
        if done.returncode and not (scenario.fails_with or scenario.interrupted):
            problems.append(f"exit code {done.returncode}: {(done.stderr.strip() or done.stdout.strip())[-300:]}")
        if session.calls:
            problems.append(f"not asked to call {', '.join(session.calls)}: no request had such a tool")
        elif session.n_answers < sum(name not in ENDING for name in scenario.calls):
            problems.append(f"{session.n_answers} results of tools for {len(scenario.calls)} calls")
        if missing := set(scenario.refusals) - set(session.refused):
            problems.append(f"expected to be refused with {sorted(missing)}")
        if scenario.interrupted or scenario.leaves:
            problems += self._left_behind(session)
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

    def _process(
        self, command: list[str], scenario: Scenario, env: dict[str, str], session: Session
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; 124 is the exit code of one that had to be killed."""
        process = subprocess.Popen(
            command, cwd=self._work, env=env, text=True, start_new_session=True,
            stdin=subprocess.PIPE if scenario.stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        end_s = time.monotonic() + PATIENCE_S
        if scenario.interrupted:
            while not session.n_streaming and process.poll() is None and time.monotonic() < end_s:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
        try:
            stdout, stderr = process.communicate(scenario.stdin or None, timeout=max(end_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return subprocess.CompletedProcess([], 124, "", f"not done in {PATIENCE_S:.0f} s")
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def _left_behind(self, session: Session) -> list[str]:
        """What is wrong after a program has left in the middle: nobody may go on with its reply."""
        end_s = time.monotonic() + AT_REST_S
        idle = False
        while time.monotonic() < end_s and not (idle and session.n_left):
            time.sleep(0.1)
            found = httpx.get(f"{self._proxy.url}/metrics").text
            idle = re.search(r"^spark_replies 0\.0$", found, re.MULTILINE) is not None
        if not idle:
            return [f"the server still makes a reply {AT_REST_S:.0f} s after its client has left"]
        return [] if session.n_left else ["no request was left in the middle"]


def version_of(program: str) -> str:
    """What a program says its version is."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def lines_of(stdout: str) -> tuple[list[Json], list[str]]:
    """The JSON values in a program's output, one a line, and a problem where they are none."""
    try:
        return [json.loads(line) for line in stdout.splitlines() if line], []
    except ValueError:
        return [], [f"its output is not JSON: {stdout[-200:]}"]


def run_one_by_one(runner: Runner, conversations: Sequence[Sequence[Scenario]], only: str | None) -> list[Json]:
    """Run the conversations of which a scenario has a name that is wanted, one after the other."""
    wanted = [c for c in conversations if only is None or any(only in scenario.name for scenario in c)]
    return [runner.run(scenario) for conversation in wanted for scenario in conversation]


# --- a run ----------------------------------------------------------------------------------------


def options(description: str | None, programs: Sequence[str]) -> argparse.ArgumentParser:
    """The options of both drivers."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--programs", nargs="+", choices=programs, default=programs)
    parser.add_argument("--only", metavar="TEXT", help="scenarios whose name has this")
    parser.add_argument("--layers", type=int, metavar="N", help="serve the first N layers only")
    parser.add_argument("--ctx", type=int, default=131072, metavar="N")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="keep the requests, texts and all")
    return parser


def drive(
    o: argparse.Namespace,
    programs: Mapping[str, Program],
    narrowed: Callable[[Path], dict[str, Json]],
    run: Callable[[Runner, Path], list[Json]],
) -> None:
    """Serve the model, run programs in a folder, write what was seen; exits 1 where something was wrong.

    run: gets the folder that the programs work in, which has notes.txt, gray.png and models.json.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is stopped too
    # A shell has what it runs in the background ignore SIGINT, and the programs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
                rows = run(Runner(proxy, url, folder / "home", work, programs, model.stem), work)
                alive = httpx.get(f"{server}/health").json()["daemon"]
    shapes = sorted(proxy.shapes.values(), key=lambda s: (s["program"], s["path"], -s["count"]))
    report: dict[str, Any] = {
        "model": o.model.name, "layers": o.layers, "ctx_tokens": o.ctx,
        "programs": {name: program.version for name, program in programs.items()}, "rows": rows,
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
