"""Clients that come and go, a daemon that is killed, and what a server costs beside its daemon.

    python benchmarks/load.py data/nano/nano.gguf --device cpu --seconds 300 --json data/results/load.json

Overhead: the same requests, all at once, to the server and to a daemon without one, in turn; the median of the ratios
of their tokens/s. On the CPU twice: the daemon computes on all cores, and with one left to the server.

Load: clients stream from all APIs, short and long prompts, with tools and without, some under constraints; every fifth
request is left in the middle. Half-way the daemon is killed. What must hold: each request ends in an answer or, where
it was running when the daemon died, in a clear error; in the end no reply, no request and no connection is left, every
block of the cache is free or holds a known prefix, and memory has not grown.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note, rss_bytes, spread  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.serving import (  # noqa: E402
    BrokenError,
    Json,
    LeftError,
    RefusedError,
    Reply,
    Server,
    ask,
    drain,
    function_tools,
    get,
    metric,
    quantiles,
    sample,
    sample_sessions,
)
from engine.ground.config import Device, EngineConfig  # noqa: E402
from engine.ground.protocol import Done  # noqa: E402
from engine.placing import policies  # noqa: E402
from engine.text.tokenizer import load as load_tokenizer  # noqa: E402
from spark.daemon.client import DaemonClient, engine_command  # noqa: E402
from spark.results import write_json  # noqa: E402

APIS = ("chat", "completions", "responses", "messages")
PREFIX_GIB = 0.125  # little, so that its budget is reached and what grows beyond it is a leak
PATIENCE_S = 120.0  # for a sign of life; longer is stuck
LEFT, CONSTRAINED, WITH_TOOLS, LONG = 0.2, 0.1, 0.4, 0.4  # shares of the requests
DYING_S = 0.5  # after a kill, in which a request may still be sent to the daemon that dies
LONG_TEXTS = 6  # long prompts begin with one of so many texts
MOST_TOKENS = 160


# --- overhead -------------------------------------------------------------------------------------


def at_once(work: Sequence[Callable[[], int]]) -> tuple[int, float]:
    """Do all at the same time, in threads; what they returned in sum, and the seconds."""
    made: list[int] = []
    threads = [threading.Thread(target=lambda one=one: made.append(one())) for one in work]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(made) != len(work):
        raise SystemExit("a request of the overhead's measurement failed")
    return sum(made), time.monotonic() - began_s


def overhead(
    model: Path, device: Device, threads: int | None, text: str, *, runs: int, clients: int, n_tokens: int
) -> Json:
    """Tokens/s of the same requests through a server and through a daemon alone."""
    options = options_of(device, threads)
    config = EngineConfig(model=model, device=device, policy=policies.LRU.name, threads=threads)
    tokenizer = load_tokenizer(model)
    start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    rng = np.random.default_rng(21)

    def over_http(url: str, prompt: str) -> int:
        return drain(url, {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0})

    def directly(daemon: DaemonClient, prompt: str) -> int:
        done = None
        for event in daemon.generate([*start, *tokenizer.encode(prompt)], max_tokens=n_tokens):
            done = event
        assert isinstance(done, Done)
        return done.usage.completion_tokens

    rows: list[Json] = []
    with Server(model, *options) as server, DaemonClient(engine_command(config)) as daemon:
        process = psutil.Process(server.pid)
        made: Json = {"threads": daemon.ready.info["threads"], "cores": psutil.cpu_count(logical=False)}
        for i in range(runs + 1):
            prompts = [cut(text, int(rng.integers(300, 1500)), rng) for _ in range(clients)]
            found: dict[str, tuple[int, float]] = {}
            cpu_s = 0.0
            for side in ("server", "daemon") if i % 2 else ("daemon", "server"):
                before = process.cpu_times()
                if side == "server":
                    found[side] = at_once([lambda p=p: over_http(server.url, p) for p in prompts])
                    after = process.cpu_times()
                    cpu_s = after.user + after.system - before.user - before.system
                else:
                    found[side] = at_once([lambda p=p: directly(daemon, p) for p in prompts])
            if found["server"][0] != found["daemon"][0]:
                raise SystemExit(f"the server made {found['server'][0]} tokens, the daemon {found['daemon'][0]}")
            rates = {side: n / seconds for side, (n, seconds) in found.items()}
            if i:  # the first warms up
                rows.append({**rates, "share": 1 - rates["server"] / rates["daemon"],
                             "cpu_ms_per_token": 1e3 * cpu_s / found["server"][0]})  # fmt: skip
                note(f"server {rates['server']:.0f}, daemon {rates['daemon']:.0f} tokens/s")
    return made | {
        "at_once": clients, "max_tokens": n_tokens,
        "server_tokens_per_s": spread([r["server"] for r in rows]),
        "daemon_tokens_per_s": spread([r["daemon"] for r in rows]),
        "overhead": spread([r["share"] for r in rows]),
        "server_cpu_ms_per_token": spread([r["cpu_ms_per_token"] for r in rows]),
    }  # fmt: skip


def options_of(device: Device, threads: int | None) -> list[str]:
    """Options of `spark serve`."""
    return ["--device", device, *([] if threads is None else ["--threads", str(threads)])]


def cut(text: str, n: int, rng: np.random.Generator) -> str:
    """n characters from anywhere in a text."""
    at = int(rng.integers(0, len(text) - n))
    return text[at : at + n]


# --- load -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a request ended. how: ok, left, or the kind of an error; message: what an error said."""

    api: str
    long: bool
    began_s: float
    ended_s: float
    how: str
    message: str
    reply: Reply | None


class Client(threading.Thread):
    """One client; sends requests by a plan of its own until the time is over."""

    def __init__(self, url: str, number: int, text: str, tools: Sequence[Any], longest: int, end_s: float) -> None:
        super().__init__(daemon=True)
        self.outcomes: list[Outcome] = []
        self._url, self._text, self._tools, self._longest, self._end_s = url, text, tools, longest, end_s
        self._rng = np.random.default_rng((22, number))

    def run(self) -> None:
        """Send requests, one after the other."""
        while time.monotonic() < self._end_s:
            self._send()

    def _send(self) -> None:
        rng = self._rng
        api = APIS[int(rng.integers(len(APIS)))]
        long = bool(rng.random() < LONG)
        body = self._body(api, long)
        leaves: Json = {}
        if rng.random() < LEFT:
            leaves = (
                {"leave_after": int(rng.integers(0, 20))} if rng.random() < 0.5 else {"leave_s": rng.uniform(0.01, 2.0)}
            )
        began_s, how, message, reply = time.monotonic(), "ok", "", None
        try:
            reply = ask(self._url, api, body, patience_s=PATIENCE_S, **leaves)
        except LeftError:
            how = "left"
        except RefusedError as error:
            how, message = error.kind, str(error)
        except BrokenError as error:
            how, message = "broken", str(error)
        except TimeoutError:
            how, message = "stuck", f"nothing came for {PATIENCE_S:g} s"
        except Exception as error:  # whatever it is, it is what a load is for
            how, message = "unreadable", f"{type(error).__name__}: {error}"
        self.outcomes.append(Outcome(api, long, began_s, time.monotonic(), how, message, reply))

    def _body(self, api: str, long: bool) -> Json:
        rng = self._rng
        text = cut(self._text, int(rng.integers(20, 300)), rng)
        if long:
            n = int(rng.integers(self._longest // 4, self._longest))
            text = cut(self._text, self._longest, np.random.default_rng((23, int(rng.integers(LONG_TEXTS)))))[:n] + text
        body: Json = {"model": "any", "temperature": float(rng.choice([0.0, 0.8])), "top_p": 0.95}
        if api != "responses":
            body |= {"max_tokens": int(rng.integers(1, MOST_TOKENS))}
        else:
            body |= {"max_output_tokens": int(rng.integers(1, MOST_TOKENS)), "input": text}
        if api == "completions":
            return body | {"prompt": text}
        if api != "responses":
            body |= {"messages": [{"role": "user", "content": text}]}
        if rng.random() < WITH_TOOLS:
            body["tools"] = function_tools(api, self._tools)
            if rng.random() < CONSTRAINED / WITH_TOOLS:
                body["tool_choice"] = {"type": "any"} if api == "messages" else "required"
        return body


def kill_daemon(server: Server) -> float:
    """Kill the daemon as an out-of-memory killer would; when that was."""
    pid = server.daemon_pid()
    if pid is None:
        raise SystemExit("there is no daemon to kill")
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def memory(server: Server) -> Json:
    """Memory and open things of the server and its daemon, now; what prefixes take is not the daemon's own."""
    process = psutil.Process(server.pid)
    made: Json = {
        "seconds": time.monotonic(), "server_bytes": rss_bytes(server.pid), "server_threads": process.num_threads(),
        "server_files": process.num_fds(), "daemon_pid": server.daemon_pid(), "daemon_bytes": None,
    }  # fmt: skip
    try:
        engine = sample(server.url)[1]["engine"]
        if made["daemon_pid"] is not None and "prefixes" in engine:
            made["daemon_bytes"] = rss_bytes(made["daemon_pid"]) - engine["prefixes"]["host_bytes"]
    except (OSError, SystemExit, BrokenError):  # it died meanwhile
        pass
    return made


def growth(values: Sequence[int]) -> int | None:
    """By how much a column grew from its second quarter to its last; None where there is too little of it."""
    quarter = len(values) // 4
    if quarter == 0:
        return None
    return int(statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter]))


def left_over(server: Server, patience_s: float = 20.0) -> tuple[Json, list[str]]:
    """What is still there when all clients are gone, and what of it must not be."""
    end_s = time.monotonic() + patience_s
    while True:
        text = get(server.url, "/metrics")
        made: Json = {"replies": metric(text, "spark_replies"), "queue": metric(text, "spark_queue")}
        made |= {"connections": server.connections(), "restarts": metric(text, "spark_daemon_restarts_total")}
        if not (made["replies"] or made["queue"] or made["connections"]) or time.monotonic() > end_s:
            break
        time.sleep(0.2)
    _, seen = sample(server.url)
    engine = seen["engine"]
    made |= {"kv_blocks": engine["kv_blocks"], "prefix_blocks": engine["prefixes"]["device_blocks"]}
    problems = [f"{name} at the end: {made[name]:g}" for name in ("replies", "queue", "connections") if made[name]]
    used = made["kv_blocks"]["total"] - made["kv_blocks"]["free"]
    if used != made["prefix_blocks"]:
        problems.append(f"{used} KV blocks are in use, and prefixes hold {made['prefix_blocks']}")
    if made["restarts"] != 1:
        problems.append(f"the daemon was started again {made['restarts']:g} times")
    return made, problems


def run_load(
    model: Path, options: Sequence[str], text: str, tools: Sequence[Any], *, seconds: float, clients: int,
    longest: int, tolerance_mib: float,
) -> Json:  # fmt: skip
    """The load and its figures; `problems` is empty if all is well."""
    samples: list[Json] = []
    with Server(model, "--prefix-gib", str(PREFIX_GIB), *options) as server:
        began_s = time.monotonic()
        threads = [Client(server.url, i, text, tools, longest, began_s + seconds) for i in range(clients)]
        for thread in threads:
            thread.start()
        killed_s: float | None = None
        while any(thread.is_alive() for thread in threads):
            time.sleep(min(2.0, seconds / 16))
            if killed_s is None and time.monotonic() >= began_s + seconds / 2:
                killed_s = kill_daemon(server)
            samples.append(memory(server))
            if time.monotonic() > began_s + seconds + 2 * PATIENCE_S:
                break
        ended_s = time.monotonic()
        outcomes = [outcome for thread in threads for outcome in thread.outcomes]
        problems = ["a client did not end" for thread in threads if thread.is_alive()]
        remains, more = left_over(server)
        problems += more
        for api in APIS:  # and it still answers
            ask(server.url, api, threads[0]._body(api, False), patience_s=PATIENCE_S)
        log = server.log()
    assert killed_s is not None
    for o in outcomes:
        met_the_kill = o.began_s <= killed_s + DYING_S and killed_s <= o.ended_s
        if o.how not in ("ok", "left") and not (met_the_kill and _is_clear(o)):
            problems.append(f"{o.api}: {o.message}")
    if "Traceback" in log:
        problems.append("the server's log has a traceback:\n" + log[log.index("Traceback") :][:3000])
    pid = samples[-1]["daemon_pid"]
    second = [s["daemon_bytes"] for s in samples if s["daemon_pid"] == pid and s["daemon_bytes"] is not None]
    grown = {"server": growth([s["server_bytes"] for s in samples]), "daemon": growth(second)}
    for who, n in grown.items():
        if n is not None and n > tolerance_mib * 2**20:
            problems.append(f"the {who} grew by {n / 2**20:.0f} MiB")
    for s in samples:
        s["seconds"] -= began_s
    return {
        "seconds": ended_s - began_s, "clients": clients, "requests": len(outcomes),
        **figures(outcomes, ended_s - began_s), "killed_after_s": killed_s - began_s,
        "running_when_killed": sum(o.began_s <= killed_s <= o.ended_s for o in outcomes),
        "growth_bytes": grown, "tolerance_mib": tolerance_mib, "left_over": remains, "problems": problems,
        "samples": samples,
    }  # fmt: skip


def _is_clear(outcome: Outcome) -> bool:
    """Whether an error says that the daemon is to blame: a status of 503, or an event of the stream."""
    return outcome.how.startswith(("503 ", "stream ")) and "daemon" in outcome.message


def figures(outcomes: Sequence[Outcome], seconds: float) -> Json:
    """Counts and times of what was answered."""
    replies = [(o.long, o.reply) for o in outcomes if o.reply is not None]
    first = {
        kind: quantiles([r.first_s for long, r in replies if r.first_s is not None and (kind == "all" or long == of)])
        for kind, of in (("all", None), ("short", False), ("long", True))
    }
    kinds = collections.Counter(o.how for o in outcomes)
    prompt, reused = sum(r.prompt_tokens for _, r in replies), sum(r.reused_tokens for _, r in replies)
    return {
        "outcomes": dict(kinds), "by_api": dict(collections.Counter(o.api for o in outcomes)),
        "time_to_first_token_s": first,
        "decode_tokens_per_s": quantiles([r.tokens_per_s for _, r in replies if r.tokens_per_s is not None]),
        "generated_tokens": sum(r.tokens for _, r in replies),
        "generated_tokens_per_s": sum(r.tokens for _, r in replies) / seconds,
        "prompt_tokens": prompt, "reused_tokens": reused,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=300.0, help="of the load; 0: leave it out")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--longest", type=int, default=7000, help="characters of the longest prompt")
    parser.add_argument("--runs", type=int, default=7, help="of each side of the overhead; 0: leave it out")
    parser.add_argument("--tokens", type=int, default=128, help="of a reply when the overhead is measured")
    parser.add_argument("--tolerance-mib", type=float, default=32.0, help="growth that is noise")
    o = parser.parse_args()
    sessions = sample_sessions()
    text = "".join(m.content for session in sessions for m in session.messages if m.role == "tool")
    report: Json = {"model": o.model.name, "device": o.device}
    problems: list[str] = []
    if o.runs:
        # All cores, and one left to the server: what a daemon on a GPU leaves, too.
        both = (None, max(1, (psutil.cpu_count(logical=False) or 2) - 1)) if o.device == "cpu" else (None,)
        report["overhead"] = [
            overhead(o.model, o.device, threads, text, runs=o.runs, clients=o.clients, n_tokens=o.tokens)
            for threads in both
        ]
        shares = [f"{r['overhead']['median']:.1%} with {r['threads']} threads" for r in report["overhead"]]
        note(f"overhead of the server: {', '.join(shares)}")
    if o.seconds:
        report["load"] = run_load(
            o.model, options_of(o.device, None), text, sessions[0].tools, seconds=o.seconds, clients=o.clients,
            longest=o.longest, tolerance_mib=o.tolerance_mib,
        )  # fmt: skip
        problems = report["load"]["problems"]
        note(f"{report['load']['requests']} requests: {report['load']['outcomes']}")
    if o.json:
        write_json(o.json, report)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
