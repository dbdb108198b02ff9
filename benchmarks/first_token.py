"""The first token over HTTP beside that of the daemon alone: what a server adds to a prompt that was never sent before.

    python benchmarks/first_token.py data/nano/nano.gguf --json data/results/first_token.json
    python benchmarks/first_token.py data/nano/nano.gguf --instant --ctx 40000 --lengths 512,4096,16384 --prompts 40

Prompts of some lengths go to `spark serve` and to a daemon, the two in turn, as messages and as the tokens of such; no
two begin alike, so nothing is reused. For each: seconds to the first token, and what the server adds. Then each part of
that by itself, in this process: body, rendering and tokenizing, and the request on both sides of the pipe. `--apart`
runs one after the other, for models of which two have no room; then the one that is measured first has no neighbor.

`--instant` puts an engine that takes no time into both (benchmarks/instant.py), so that what is left is what is sought.
It adds the first tokens of 8 prompts that are sent together, and the tokens/s of 16 streams.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import instant
from benchmarks.driving import DEADLINES, note, spread
from benchmarks.figures import json_option
from benchmarks.serving import Server, ask, drain
from engine.ground import protocol
from engine.ground.config import EngineConfig
from engine.ground.protocol import Done, Tokens
from engine.ground.sampling import Sampling
from engine.text import tokenizer
from spark.apis import chat
from spark.daemon.client import DaemonClient, engine_command
from spark.results import write_json
from spark.speech.render import Renderer
from spark.speech.sessions import Message

WORDS = Path(__file__).read_text().split()
N_TOKENS = 8  # of each reply
SLACK_SHARE, SLACK_S = 0.03, 0.003  # what a server may add, whichever is more
PARTS_RUNS = 3
PAUSE_S = 0.004  # of an engine that takes no time, between the tokens of a reply that is timed
AT_ONCE, STREAMS, STREAM_TOKENS, ROUNDS = 8, 16, 400, 5
Ask = Callable[[str], float]


class Prompts:
    """Texts of words in no order, none given twice, whose prompts have a given length or a few tokens less."""

    def __init__(self, model: Path, seed: int) -> None:
        self.tokenizer = tokenizer.load(model)
        self._renderer = Renderer(self.tokenizer)
        self._random = random.Random(seed)

    def tokens(self, text: str) -> list[int]:
        """The prompt, as the server makes it of a message."""
        return self._renderer.opening([Message("user", text)]).tokens

    def next(self, n_tokens: int) -> str:
        """A text whose prompt has at most n_tokens."""
        begin = f"{self._random.getrandbits(64):016x} "
        room = n_tokens - len(self.tokens(begin))
        words = " ".join(self._random.choices(WORDS, k=n_tokens))
        text = begin + self.tokenizer.decode(self.tokenizer.encode(words)[:room])
        while (over := len(self.tokens(text)) - n_tokens) > 0:
            text = text[: -4 * over]
        return text


def over_http(url: str) -> Ask:
    def asked(text: str) -> float:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": N_TOKENS, "temperature": 0}
        reply = ask(url, "chat", body)
        if reply.reused_tokens or reply.first_s is None:
            raise SystemExit(f"{reply.reused_tokens} tokens were reused, first token after {reply.first_s} s")
        return reply.first_s

    return asked


def of_daemon(client: DaemonClient, prompts: Prompts) -> Ask:
    def asked(text: str) -> float:
        tokens = prompts.tokens(text)
        began_s, first_s, text = time.monotonic(), None, ""
        shown = prompts.tokenizer.stream(skip_special=True)
        for event in client.generate(tokens, max_tokens=N_TOKENS, sampling=Sampling(), stop_tokens=()):
            if isinstance(event, Tokens) and first_s is None:
                text += shown.push(event.tokens)
                first_s = time.monotonic() - began_s if text.strip() else None  # a server shows no blanks either
            if isinstance(event, Done) and event.usage.cached_tokens:
                raise SystemExit(f"{event.usage.cached_tokens} tokens were reused")
        if first_s is None:
            raise SystemExit(f"{N_TOKENS} tokens show nothing")
        return first_s

    return asked


def measure(ways: dict[str, Ask], prompts: Prompts, lengths: list[int], n: int) -> dict[int, dict[str, list[float]]]:
    """Seconds to the first token, of n prompts of each length, each way in turn; one before that are not counted."""
    for asked in ways.values():
        asked(prompts.next(64))
    found: dict[int, dict[str, list[float]]] = {length: {way: [] for way in ways} for length in lengths}
    for length in lengths:
        for i in range(n):
            order = list(ways) if i % 2 else list(reversed(ways))
            for way in order:
                found[length][way].append(ways[way](prompts.next(length)))
    return found


def parts(prompts: Prompts, model: Path, length: int) -> dict[str, float]:
    """Median seconds of what happens around the daemon's steps, each by itself."""
    texts = [prompts.next(length) for _ in range(PARTS_RUNS)]
    renderer = Renderer(prompts.tokenizer)  # one that remembers none of them
    took: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        made = work()
        took.setdefault(name, []).append(time.perf_counter() - began_s)
        return made

    for text in texts:
        body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        timed("body", lambda body=body: chat.parse(json.loads(body)))
        timed("encode", lambda text=text: prompts.tokenizer.encode(text))
        tokens = timed("render and encode", lambda text=text: renderer.opening([Message("user", text)]).tokens)
        request = protocol.Generate(1, tuple(tokens), 1, Sampling())
        line = timed("write request", lambda request=request: protocol.format_line(request))
        timed("read request", lambda line=line: protocol.parse_request(line))
    return {name: spread(seconds)["median"] for name, seconds in took.items()}


def together(n: int, work: Callable[[int], float]) -> list[float]:
    """What each of n threads returned that began together."""
    found: list[float] = []
    ready = threading.Barrier(n)

    def one(i: int) -> None:
        ready.wait()
        found.append(work(i))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) < n:
        raise SystemExit("a request failed")
    return found


def at_once(url: str, prompts: Prompts, length: int) -> dict[str, float]:
    """Seconds to the first token of prompts that are sent together."""
    asked, found = over_http(url), list[float]()
    for i in range(ROUNDS + 1):
        texts = [prompts.next(length) for _ in range(AT_ONCE)]
        seconds = together(AT_ONCE, lambda k, texts=texts: asked(texts[k]))
        found += seconds if i else []
    return spread(found)


def streams(url: str) -> dict[str, float]:
    """Tokens/s of several streams."""
    found = []
    for i in range(ROUNDS + 1):
        began_s = time.monotonic()
        body = {"prompt": "word", "max_tokens": STREAM_TOKENS, "temperature": 0}
        n = sum(together(STREAMS, lambda k, body=body: drain(url, body)))
        found += [n / (time.monotonic() - began_s)] if i else []
    return spread(found)


@contextlib.contextmanager
def serving(o: argparse.Namespace) -> Iterator[str]:
    if o.instant:
        with Server(o.model, command=instant.server(engine_config(o), PAUSE_S)) as server:
            yield server.url
        return
    options = ["--device", o.device, *(["--ctx", str(o.ctx)] if o.ctx else []), *o.option]
    with Server(o.model, *options) as server:
        yield server.url


def engine_config(o: argparse.Namespace) -> EngineConfig:
    return EngineConfig(model=o.model, device=o.device, ctx_tokens=o.ctx, vram_gib=o.vram_gib)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--ctx", type=int, help="context of both (default: the model's)")
    parser.add_argument("--lengths", default="512,16384,32768", help="tokens of prompts; longer ones are left out")
    parser.add_argument("--prompts", type=int, default=5, help="of each length and way")
    parser.add_argument("--option", action="append", default=[], help="one more word for `spark serve`")
    parser.add_argument("--vram-gib", type=float, help="of each of the two")
    parser.add_argument("--apart", action="store_true", help="one after the other")
    parser.add_argument("--instant", action="store_true", help="with an engine that takes no time")
    parser.add_argument("--seed", type=int, default=time.time_ns() & 0xFFFFFFFF)
    json_option(parser)
    o = parser.parse_args()
    o.model = o.model.absolute()  # the server runs elsewhere
    if o.vram_gib is not None:
        o.option += ["--vram", str(o.vram_gib)]
    prompts = Prompts(o.model, o.seed)
    config = engine_config(o)
    command = instant.command(config, PAUSE_S) if o.instant else engine_command(config)
    several: dict[str, Any] = {}
    with contextlib.ExitStack() as opened:
        client = opened.enter_context(DaemonClient(command, deadlines=DEADLINES))
        ready = dict(client.ready.info)
        n_ctx = int(ready["ctx_tokens"])
        lengths = [min(int(n), n_ctx - 2 * N_TOKENS) for n in o.lengths.split(",")]
        lengths = sorted(set(lengths))
        ways = {"daemon": of_daemon(client, prompts)}
        if o.apart:
            found = measure(ways, prompts, lengths, o.prompts)
            client.close()
            with serving(o) as url:
                more = measure({"http": over_http(url)}, prompts, lengths, o.prompts)
            for length in lengths:
                found[length] |= more[length]
        else:
            url = opened.enter_context(serving(o))
            ways["http"] = over_http(url)
            found = measure(ways, prompts, lengths, o.prompts)
            if o.instant:
                several["at_once_s"] = at_once(url, prompts, lengths[0])
    if o.instant:
        with Server(o.model, command=instant.server(config, 0.0)) as server:
            several["streams_tokens_per_s"] = streams(server.url)
        first, rate = several["at_once_s"], several["streams_tokens_per_s"]
    rows = []
    for length in lengths:
        http, daemon = spread(found[length]["http"]), spread(found[length]["daemon"])
        added_s = http["median"] - daemon["median"]
        within = added_s <= max(SLACK_S, SLACK_SHARE * daemon["median"])
        rows.append({"tokens": length, "http_s": http, "daemon_s": daemon, "added_s": added_s, "within": within})
        note(
            f"{length} tokens: HTTP {http['median'] * 1e3:.1f} ms ({http['min'] * 1e3:.1f} to {http['max'] * 1e3:.1f}),"
            f" daemon {daemon['median'] * 1e3:.1f} ms ({daemon['min'] * 1e3:.1f} to {daemon['max'] * 1e3:.1f}),"
            f" added {added_s * 1e3:.1f} ms{'' if within else ': too much'}"
        )
    if several:
        note(
            f"{AT_ONCE} at once: {first['median'] * 1e3:.1f} ms ({first['min'] * 1e3:.1f} to {first['max'] * 1e3:.1f});"
            f" {STREAMS} streams: {rate['median']:,.0f} tokens/s ({rate['min']:,.0f} to {rate['max']:,.0f})"
        )
    alone = {length: parts(prompts, o.model, length) for length in map(int, o.lengths.split(","))}
    for length, row in alone.items():
        note(f"{length} tokens: " + ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in row.items()))
    if o.json:
        settings = {key: value for key, value in ready.items() if key not in ("files", "model")}
        report = {"model": o.model.name, "settings": settings, "seed": o.seed, "apart": o.apart, "rows": rows}
        write_json(o.json, report | several | {"parts_s": alone})


if __name__ == "__main__":
    main()
