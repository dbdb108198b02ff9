"""What hostile and unlucky clients cost the others: one stream is watched while they do their worst.

    python benchmarks/hostile.py data/nano/nano.gguf --json data/results/hostile.json

Each scenario is one kind of client beside a reply that is streamed: bodies near the limit that hold ten million lists,
text, or a million objects, JSON in the arguments of a call, as many values as there may be, several of them at once,
chunks of a byte, connections that send nothing or half a request, readers that do not read, long predictions, many kept
ranges, and replies that are left as soon as they begin. All of it is done thrice: without drafts, with them, and with
recall beside them. Measured: the longest gap between two pieces of the watched reply, beside that of a reply that
nobody disturbs; the most memory of the server and the process that reads large bodies; how the clients were answered.
The watched reply must say the same each time, and with drafts what it says without.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.serving import PATHS, Json, LeftError, RefusedError, Server, ask, sample  # noqa: E402
from engine.ground.recall import MAX_KEPT  # noqa: E402
from spark.results import write_json  # noqa: E402
from spark.speech.conversation import MAX_MESSAGES  # noqa: E402
from spark.speech.json_text import MAX_VALUES  # noqa: E402

MIB = 1 << 20
MOST_GAP_S = 0.3
PATIENCE_S = 120.0
LEFT, RECALL = "replies that are left", "drafts and recall"
CONFIGURATIONS = {
    "no drafts": ("--draft", "off"), "drafts": ("--draft", "auto"),
    RECALL: ("--draft", "auto", "--kv-recall-blocks", "2"),
}  # fmt: skip


# --- bodies ---------------------------------------------------------------------------------------


def bodies() -> dict[str, bytes]:
    """Bodies of up to 31 MiB by name; all are JSON, and one of them is honest."""
    most = 31 * MIB
    line = json.dumps('1997,"Ford [E350]",{x},3000.00\n')[1:-1]
    message = '{"role":"user","content":""},'
    listed = 10_000_000
    strings = ",".join(f'"{i}"' for i in range(MAX_VALUES - 100))
    turns = ",".join('{"role":"user","content":"x"}' for _ in range(MAX_MESSAGES))
    kept = ",".join(f"[{i},-{i + 1}]" for i in range(MAX_KEPT))
    user, pairs = message[:-1], "[0,1]," * 1_000_000
    arguments = '{\\"a\\":[' + "[]," * 3_000_000 + "[]]}"
    return {
        "10M empty lists": b'{"messages":[' + b"[]," * listed + b"[]]}",
        "CSV in a string": f'{{"messages":[{{"role":"user","content":"{line * (most // len(line) - 9)}"}}]}}'.encode(),
        "1M objects": b'{"messages":[' + message.encode() * 1_000_000 + b"{}]}",
        "64K objects in a tool": b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":'
        b'{"name":"f","parameters":{"enum":[' + b'{"a":{}},' * 32_000 + b"{}]}}}]}",
        "3M lists in arguments": f'{{"messages":[{{"role":"user","content":"x"}},{{"role":"assistant","tool_calls":['
        f'{{"id":"c","function":{{"name":"f","arguments":"{arguments}"}}}}]}}]}}'.encode(),
        "512K strings in metadata": f'{{"max_tokens":1,"messages":[{{"role":"user","content":"x"}}],'
        f'"metadata":{{"a":[{strings}]}}}}'.encode(),
        "512K values in a tool": f'{{"messages":[{{"role":"user","content":"x"}}],"tools":[{{"type":"function",'
        f'"function":{{"name":"f","parameters":{{"enum":[0{",0" * (MAX_VALUES - 100)}]}}}}}}]}}'.encode(),
        "1M kept ranges": f'{{"messages":[{user}],"kv_recall":{{"keep":[{pairs}[0,1]]}}}}'.encode(),
        "16K messages, 64 ranges kept": f'{{"max_tokens":1,"messages":[{turns}],"kv_recall":'
        f'{{"keep_messages":[{kept}]}}}}'.encode(),
        "30 MiB of prediction": f'{{"messages":[{user}],"prediction":{{"type":"content","content":'
        f'"{"def f(x): " * (3 * MIB)}"}}}}'.encode(),
    }


def send(url: str, content: bytes) -> str:
    """Post a body; the status."""
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)) as connection:
        try:
            connection.request("POST", PATHS["chat"], content, {"content-type": "application/json"})
            response = connection.getresponse()
            response.read()
            return str(response.status)
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__


# --- what is watched --------------------------------------------------------------------------------


def watch(url: str, n_tokens: int) -> None:
    """Stream replies one after the other, and print when each piece came, and it; to be run as a process of its own."""
    body = {"prompt": "The quick brown fox", "max_tokens": n_tokens, "temperature": 1.0, "stream": True, "seed": 5}
    while True:
        with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)) as made:
            made.request("POST", PATHS["completions"], json.dumps(body), {"content-type": "application/json"})
            response = made.getresponse()
            if response.status != 200:
                raise SystemExit(f"status {response.status}")
            while line := response.readline():
                if line.startswith(b"data: "):
                    print(time.monotonic(), line.decode()[6:].strip(), flush=True)


class Watched:
    """A stream that another process follows, so that nothing here delays it."""

    def __init__(self, url: str, n_tokens: int) -> None:
        command = [sys.executable, __file__, "--watch", url, "--tokens", str(n_tokens), "-"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.times_s: list[float] = []
        self.texts = [""]  # of replies, the last as far as it came
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            time_s, _, piece = line.partition(" ")
            self.times_s.append(float(time_s))
            if piece.strip() == "[DONE]":
                self.texts.append("")
            else:
                self.texts[-1] += "".join(choice["text"] for choice in json.loads(piece)["choices"])

    def __enter__(self) -> Watched:
        while len(self.times_s) < 10:
            if self._process.poll() is not None:
                raise SystemExit("the watched stream failed")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    @property
    def alive(self) -> bool:
        """Whether it goes on."""
        return self._process.poll() is None

    def longest_gap_s(self, since_s: float, until_s: float) -> float:
        """The longest time without a piece between two moments, the time to the next reply's first one among it."""
        seen = [since_s, *(t for t in self.times_s if since_s <= t <= until_s), until_s]
        return max(b - a for a, b in itertools.pairwise(seen))


class Memory(threading.Thread):
    """The most memory that the server, and its reader of bodies, have taken together, without the daemon."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.most_bytes = 0
        self.over = threading.Event()
        self._server = server

    def run(self) -> None:
        """Look until it is over."""
        while not self.over.wait(0.02):
            total = 0
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(self._server.pid)
                daemon = self._server.daemon_pid()
                for one in (process, *process.children()):
                    if one.pid != daemon:
                        with contextlib.suppress(psutil.Error):
                            total += one.memory_info().rss
            self.most_bytes = max(self.most_bytes, total)


def scenario(server: Server, n_tokens: int, work: Callable[[], Json]) -> Json:
    """Do one kind of work beside a stream; work returns what it has to tell."""
    memory = Memory(server)
    memory.start()
    with Watched(server.url, n_tokens) as watched:
        began_s = time.monotonic()
        told = work()
        ended_s = time.monotonic()
        time.sleep(0.3)
        gap_s = watched.longest_gap_s(began_s, max(ended_s, watched.times_s[-1]))
        failed = not watched.alive
        pieces = sum(began_s <= t <= ended_s for t in watched.times_s)
    memory.over.set()
    memory.join()
    return {
        "seconds": ended_s - began_s, "longest_gap_s": gap_s, "pieces": pieces, "most_bytes": memory.most_bytes,
        "failed": failed, "texts": watched.texts, **told,
    }  # fmt: skip


def posting(url: str, contents: Sequence[bytes]) -> Json:
    """Post bodies at once; how they were answered."""
    answers: list[str] = []
    threads = [threading.Thread(target=lambda c=c: answers.append(send(url, c))) for c in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"answers": dict(collections.Counter(answers))}


# --- connections --------------------------------------------------------------------------------------


def connect(url: str, sent: bytes, *, narrow: bool = False) -> socket.socket:
    where = urlsplit(url)
    made = socket.socket()
    made.settimeout(PATIENCE_S)
    if narrow:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    made.connect((where.hostname or "", where.port or 80))
    made.sendall(sent)
    return made


def head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n".encode()


def half_open(server: Server, n: int) -> Json:
    """Connections that send nothing, half a head, half a body; a request is served beside them, and they are ended."""
    with contextlib.ExitStack() as stack:
        for i in range(n):
            sent = (b"", b"GET / HTTP/1.1\r\nhost: loc", head(PATHS["messages"], 99) + b"{")[i % 3]
            stack.enter_context(contextlib.closing(connect(server.url, sent)))
        held, until_s = 0, time.monotonic() + 5.0
        while held < n and time.monotonic() < until_s:
            time.sleep(0.2)
            held = max(held, server.connections())
        began_s = time.monotonic()
        ask(server.url, "chat", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4})
        served_s = time.monotonic() - began_s
        while server.connections() > 2 and time.monotonic() < began_s + PATIENCE_S:
            time.sleep(0.2)
        return {
            "opened": n, "held": held, "request_s": served_s, "left": server.connections(),
            "ended_after_s": time.monotonic() - began_s,
        }  # fmt: skip


def not_read(server: Server, n: int) -> Json:
    """Clients that ask for megabytes in a row and read nothing; how long they are kept."""
    with contextlib.ExitStack() as stack:
        for _ in range(n):
            sent = b"GET /page.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000
            stack.enter_context(contextlib.closing(connect(server.url, sent, narrow=True)))
        while server.connections() < n:
            time.sleep(0.2)
        began_s = time.monotonic()
        while server.connections() > 2 and time.monotonic() < began_s + PATIENCE_S:
            time.sleep(0.2)
        return {"clients": n, "ended_after_s": time.monotonic() - began_s, "left": server.connections()}


def tiny_chunks(server: Server) -> Json:
    with contextlib.closing(connect(server.url, b"")) as made, contextlib.suppress(ConnectionError):
        made.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        made.sendall(b"1\r\n \r\n" * 2_000_000)
    return {}


def left(server: Server, n: int, more: Json) -> Json:
    """Replies to long prompts that are left with their first token, eight at a time; how many began."""
    text = "def f(x):\n    return x + 1\n\n\n" * 90
    answers: list[str] = []

    def leave(number: int) -> None:
        said = [{"role": "user", "content": f"{number}. {text}"}]
        body = {"messages": said, "prediction": {"type": "content", "content": text}, "max_tokens": 500, **more}
        try:
            ask(server.url, "chat", body, leave_after=3)
        except LeftError:
            answers.append("left")
        except RefusedError as error:
            answers.append(error.kind)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(n)))
    return {"answers": dict(collections.Counter(answers))}


def hostilities(server: Server, connections: int, more: Json) -> dict[str, Callable[[], Json]]:
    """What is done to a server, by name; more: fields of requests that may be served."""
    made = bodies()
    if max(map(len, made.values())) >= 32 * MIB:
        raise SystemExit("a body is above the limit, and would be refused for that")
    url = server.url
    work: dict[str, Callable[[], Json]] = {"nothing": lambda: time.sleep(3.0) or {}}
    work |= {name: lambda c=content: posting(url, [c]) for name, content in made.items()}
    return work | {
        "four at once: lists": lambda: posting(url, [made["10M empty lists"]] * 4),
        "one of each at once": lambda: posting(url, list(made.values())[:7]),
        "chunks of a byte": lambda: tiny_chunks(server),
        LEFT: lambda: left(server, 40, more),
        "half-open connections": lambda: half_open(server, connections),
        "clients that do not read": lambda: not_read(server, 20),
    }


def tried(o: argparse.Namespace, configuration: str) -> tuple[Json, list[str], list[str]]:
    """A configuration's figures, its problems, and what the watched replies said, the longest last."""
    options = CONFIGURATIONS[configuration]
    more = {"kv_recall": {"blocks": 1, "keep_messages": [0], "keep": [[64, 700]]}} if configuration == RECALL else {}
    made: Json = {"options": options, "scenarios": {}}
    problems, texts = [], [""]
    with Server(o.model, "--device", o.device, "--threads", o.threads, *options) as server:
        for name, one in hostilities(server, o.connections, more).items():
            where = f"{name} ({configuration})"
            try:
                row = scenario(server, o.tokens, one)
            except RefusedError as error:
                problems.append(f"{where}: {error}")
                continue
            said = sorted([*texts, *row.pop("texts")], key=len)
            if not all(said[-1].startswith(text) for text in said):
                problems.append(f"{where}: the watched reply says something else")
            texts = said
            made["scenarios"][name] = row
            note(f"{where}: longest gap {1e3 * row['longest_gap_s']:.0f} ms, {row['most_bytes'] / MIB:.0f} MiB, {row}")
            late = row["longest_gap_s"] > MOST_GAP_S and name != LEFT  # a step of prompts takes what it takes
            if late or row["failed"]:
                what = "the watched stream failed" if row["failed"] else f"a gap of {1e3 * row['longest_gap_s']:.0f} ms"
                problems.append(f"{where}: {what}")
        counted = sample(server.url)[1]["engine"]
        made |= {key: counted[key] for key in ("drafts", "recall") if key in counted}
        log = server.log()
    made["log_lines"] = len(log.splitlines())
    if "Traceback" in log:
        problems.append(log[log.index("Traceback") :][:3000])
    return made, problems, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--watch", metavar="URL", help=argparse.SUPPRESS)
    json_option(parser)
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    parser.add_argument("--threads", default="1", help="of the daemon: one core is the server's")
    parser.add_argument("--connections", type=int, default=1100)
    parser.add_argument("--tokens", type=int, default=3000, help="of one watched reply")
    o = parser.parse_args()
    if o.watch:
        watch(o.watch, o.tokens)
    report: Json = {"model": o.model.name, "device": o.device, "limit_s": MOST_GAP_S, "configurations": {}}
    problems: list[str] = []
    longest: dict[str, str] = {}
    for configuration in CONFIGURATIONS:
        report["configurations"][configuration], found, texts = tried(o, configuration)
        problems += found
        longest[configuration] = texts[-1]
    shorter, longer = sorted((longest["no drafts"], longest["drafts"]), key=len)
    if not longer.startswith(shorter):
        problems.append("the watched reply is another one with drafts")
    report["problems"] = problems
    if o.json:
        write_json(o.json, report)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
