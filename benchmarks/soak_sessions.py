"""Minutes of conversations that do not fit together: what comes back is what was said, whatever happens meanwhile.

    python benchmarks/soak_sessions.py data/nano/nano.gguf --seconds 900 --json data/results/soak_sessions.json
    python benchmarks/soak_sessions.py data/nano/nano.gguf --recall-blocks 2 --draft auto --json FILE
    python benchmarks/soak_sessions.py MODEL.gguf --device cuda --seconds 480 --small-disk /mnt/small --json FILE

Clients of one server hold conversations that grow, turn by turn, to --grow times what its cache holds of all of them,
with a pool smaller than one of them, host memory for few, and the rest in files. Every turn's reply must be the one
that a server with room for everything gave before, without drafts. --recall-blocks, --draft: of the soaked server;
with recall a fourth of the conversations each has what the option says, more blocks and kept ranges, as much as leaves
0.15 of the mass out, and all. Meanwhile the daemon is killed, again and again; in the middle
third the disk of the files is full. --small-disk: where their folder is made, on a file system that the run may fill;
without it no disk is filled. A request that a kill meets may fail, and is sent again. Anything else that is wrong
ends the run: another reply, another error, no answer for a minute, memory that grows, blocks that nobody holds, a
file that is half written.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.driving import note
from benchmarks.figures import json_option
from benchmarks.load import cut, growth, kill_daemon, left_over, memory, options_of
from benchmarks.serving import PATHS, Json, RefusedError, Server, sample, sample_sessions
from spark.results import write_json
from spark.speech.conversation import Usage

PATIENCE_S = 60.0
DYING_S = 15.0  # from a kill until a new daemon is there, with room to spare
REPLY_TOKENS = 24
TURNS = 7
TOLERANCE_MIB = 48.0
NOTHING: Mapping[str, Any] = {}
RECALLED: tuple[Mapping[str, Any], ...] = (  # by conversation
    NOTHING, {"kv_recall": {"blocks": 4, "keep": [[130, 131], [200, 500]]}}, {"kv_recall": "off"},
    {"kv_recall": {"left_out": 0.15}},
)  # fmt: skip


def ask(url: str, prompt: str, more: Mapping[str, Any] = NOTHING, patience_s: float = PATIENCE_S) -> tuple[str, Json]:
    """A greedy reply and its usage; RefusedError for an answer that is none. more: fields of the request."""
    body = {"prompt": prompt, "max_tokens": REPLY_TOKENS, "temperature": 0, **more}
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=patience_s)) as connection:
        connection.request("POST", PATHS["completions"], json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        made = json.loads(response.read())
        if response.status != 200:
            raise RefusedError(str(response.status), made["error"]["message"])
        return made["choices"][0]["text"], made["usage"]


def conversations(text: str, n: int, longest: int, seed: int = 3) -> list[list[str]]:
    """What the user of each of n conversations says, turn by turn: texts of about `longest` characters together."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        shares = rng.dirichlet(np.full(TURNS, 2.0)) * longest
        made.append([cut(text, max(int(share), 40), rng) for share in shares])
    return made


def more_of(which: int, recall_blocks: int | None) -> Mapping[str, Any]:
    """What the requests of a conversation have more."""
    return NOTHING if recall_blocks is None else RECALLED[which % len(RECALLED)]


def replies(url: str, said: Sequence[str], more: Mapping[str, Any]) -> Iterator[str]:
    """The replies of a conversation, each to all that was said before."""
    whole = ""
    for text in said:
        reply, _ = ask(url, whole := whole + text, more)
        whole += reply
        yield reply


class Client(threading.Thread):
    """Holds conversation after conversation, with long pauses between turns, in which others take the room."""

    def __init__(
        self, url: str, number: int, said: list[list[str]], expected: list[list[str]], end_s: float,
        recall_blocks: int | None,
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self.counts: collections.Counter[str] = collections.Counter()
        self.usage = Usage(0, 0)
        self.failures: list[tuple[float, float, str]] = []  # when it was asked and answered, and what went wrong
        self.wrong: str | None = None
        self.now = "not begun"
        self._url, self._said, self._expected, self._end_s = url, said, expected, end_s
        self._recall_blocks = recall_blocks
        self._rng = np.random.default_rng((7, number))

    def run(self) -> None:
        """Take conversations in a random order until the time is over."""
        while time.monotonic() < self._end_s and self.wrong is None:
            self._hold(int(self._rng.integers(len(self._said))))

    def _hold(self, which: int) -> None:
        whole = ""
        for turn, (text, expected) in enumerate(zip(self._said[which], self._expected[which], strict=True)):
            whole += text
            reply = self._reply(whole, more_of(which, self._recall_blocks))
            if reply is None:
                return
            self.counts["turns"] += 1
            if reply != expected:
                self.wrong = f"turn {turn} of conversation {which}: {reply!r}, expected {expected!r}"
                return
            whole += reply
            time.sleep(float(self._rng.exponential(0.3)))

    def _reply(self, prompt: str, more: Mapping[str, Any]) -> str | None:
        """None where the time is over, or nothing came."""
        while time.monotonic() < self._end_s:
            began_s = time.monotonic()
            self.now = f"asked {len(prompt)} characters"
            try:
                reply, usage = ask(self._url, prompt, more)
            except TimeoutError:
                self.wrong = f"no answer for {PATIENCE_S:g} s"
                return None
            except (RefusedError, http.client.HTTPException, OSError, ValueError) as error:
                self.failures.append((began_s, time.monotonic(), f"{type(error).__name__}: {error}"))
                self.counts["asked again"] += 1
                time.sleep(0.5)
                continue
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            drafts, recall = usage.get("drafts", {}), usage.get("recall")
            self.usage += Usage(usage["prompt_tokens"], usage["completion_tokens"], cached, 0, drafts, recall)
            return reply
        return None


@contextlib.contextmanager
def files_folder(small_disk: Path | None) -> Iterator[Path]:
    """A new folder for the server's files."""
    with tempfile.TemporaryDirectory(prefix="soak-", dir=small_disk) as folder:
        yield Path(folder) / "prefixes"


def fill(disk: Path) -> Path:
    """A file that leaves nothing of a file system."""
    path = disk / "filler"
    with path.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))
    return path


def soak(o: argparse.Namespace, said: list[list[str]], expected: list[list[str]], options: list[str]) -> Json:
    """The soak and its figures; `problems` is empty if all is well."""
    samples: list[Json] = []
    kills: list[float] = []
    problems: list[str] = []
    most_away = 0
    with files_folder(o.small_disk) as folder:
        with Server(o.model, *options, "--cache-dir", str(folder)) as server:
            began_s = time.monotonic()
            end_s = began_s + o.seconds
            clients = [Client(server.url, i, said, expected, end_s, o.recall_blocks) for i in range(o.clients)]
            for client in clients:
                client.start()
            filler: Path | None = None
            next_kill_s = began_s + o.kill_every
            while any(client.is_alive() for client in clients):
                time.sleep(2.0)
                now_s = time.monotonic()
                if now_s > next_kill_s and now_s < began_s + o.seconds - DYING_S and server.daemon_pid() is not None:
                    kills.append(kill_daemon(server))
                    next_kill_s = now_s + o.kill_every
                middle = began_s + o.seconds / 3 <= now_s <= began_s + o.seconds * 2 / 3
                if o.small_disk is not None and middle and filler is None:
                    filler = fill(o.small_disk)
                elif filler is not None and not middle and filler.exists():
                    filler.unlink()
                samples.append(memory(server))
                with contextlib.suppress(Exception):  # it was killed just now
                    most_away = max(most_away, sample(server.url)[1]["engine"]["kv_blocks"]["away"])
                if now_s > began_s + o.seconds + 2 * PATIENCE_S:
                    problems.append(f"a client did not end: {[c.now for c in clients if c.is_alive()]}")
                    break
            if filler is not None:
                filler.unlink(missing_ok=True)
            remains, more = left_over(server)
            problems += [text for text in more if "started again" not in text]
            again, _ = ask(server.url, said[0][0])
            problems += [] if again == expected[0][0] else ["it does not answer as before at the end"]
            log = server.log()
        # Those of the last kills go with the next start, a minute after.
        left = [path for path in folder.rglob("*.tmp") if time.time() - path.stat().st_mtime > 2 * PATIENCE_S]
        half_written = [path.name for path in left]
    problems += [client.wrong for client in clients if client.wrong is not None]
    for client in clients:
        for began, ended, error in client.failures:
            if not any(began <= killed + DYING_S and killed <= ended for killed in kills):
                problems.append(f"no kill was near: {error}")
    if "Traceback" in log:
        problems.append("the server's log has a traceback:\n" + log[log.index("Traceback") :][:3000])
    if half_written:
        problems.append(f"half-written files: {half_written}")
    grown = growth([s["server_bytes"] for s in samples])
    daemons: dict[int, list[int]] = collections.defaultdict(list)
    for s in samples:
        if s["daemon_pid"] is not None and s["daemon_bytes"] is not None:
            daemons[s["daemon_pid"]].append(s["daemon_bytes"])
    most = [max(values) for values in daemons.values()]
    if grown is not None and grown > TOLERANCE_MIB * 2**20:
        problems.append(f"the server grew by {grown / 2**20:.0f} MiB")
    used = sum((client.usage for client in clients), Usage(0, 0))
    return {
        "seconds": time.monotonic() - began_s, "clients": o.clients, "options": options, "kills": len(kills),
        "turns": sum(c.counts["turns"] for c in clients), "asked_again": sum(c.counts["asked again"] for c in clients),
        "prompt_tokens": used.prompt, "reused_share": used.cached / max(used.prompt, 1), "most_blocks_away": most_away,
        **used.shown_more(),
        "disk_was_filled": o.small_disk is not None, "server_growth_bytes": grown,
        "most_daemon_bytes": most, "left_over": remains, "problems": problems[:20],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--ctx", type=int, default=4096, help="tokens that a request may have, and that all homes hold")
    parser.add_argument("--pool", type=int, default=1280, help="tokens of them in the pool")
    parser.add_argument("--grow", type=float, default=3.0, help="how many times --ctx all conversations have together")
    parser.add_argument("--prefix-gib", type=float, default=0.004)
    parser.add_argument("--kill-every", type=float, default=70.0, metavar="SECONDS")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--draft", default="off")
    parser.add_argument("--recall-blocks", type=int, metavar="N")
    parser.add_argument("--small-disk", type=Path, metavar="DIR", help="on a file system that may be filled")
    o = parser.parse_args()
    o.model = o.model.absolute()  # servers run in folders of their own
    text = "".join(m.content for session in sample_sessions() for m in session.messages if m.role == "tool")
    device = [*options_of(o.device, o.threads), "--kv-type", o.kv_type]
    device += ["--parallel", "4", "--chunk", "128"]
    device += ["--exact-prefixes"] if o.device == "cuda" else []  # there what was decoded has bits of its own
    if o.recall_blocks is not None:
        device += ["--kv-recall-blocks", str(o.recall_blocks)]
    with Server(o.model, *device, "--draft", "off", "--ctx", str(o.ctx)) as server:  # characters of a token
        _, usage = ask(server.url, text[:2000])
        longest = int(o.grow * o.ctx / o.clients * 2000 / usage["prompt_tokens"])
        said = conversations(text, o.clients * 2, longest)
        expected = [list(replies(server.url, each, more_of(i, o.recall_blocks))) for i, each in enumerate(said)]
    note(f"{len(said)} conversations of {longest} characters, {TURNS} turns each")
    pool = ["--draft", o.draft, "--ctx", str(o.ctx), "--kv-pool", str(o.pool), "--prefix-gib", str(o.prefix_gib)]
    made = soak(o, said, expected, [*device, *pool])
    note(f"{made['turns']} turns, {made['kills']} kills, {made['reused_share']:.0%} of the prompts' tokens reused")
    if o.json:
        write_json(o.json, {"model": o.model.name, "device": o.device, **made})
    if made["problems"]:
        sys.exit("\n".join(made["problems"]))


if __name__ == "__main__":
    main()
