"""What idle time brings a conversation on a GPU: the second turn, which repeats the reply to the first.

    python benchmarks/next_turn.py model.gguf --json data/results/next_turn.json

A prompt is answered, and asked again with the reply and some tokens more behind it. The reply was computed in the steps
of decoding; a prompt's have other bits. Three ways, in this process, on the engine itself, no prompt twice:

    reused       the second turn comes at once and reuses the reply as it was decoded
    exact        the same with --exact-prefixes: the reply is read with the second turn's prompt
    exact, idle  the same, but the engine is idle long enough to read the reply again before

`logits` tells whether the second turn's log-probabilities are, bit for bit, those of a server without prefixes.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cuda_kernels import in_child
from benchmarks.driving import Prompts, note, shape_of, spread
from benchmarks.figures import json_option
from engine.ground.config import EngineConfig
from engine.ground.protocol import Done, Generate, Tokens
from engine.ground.sampling import Sampling
from engine.serving.scheduler import Engine
from spark.results import write_json

WAYS = ("reused", "exact", "exact, idle")


class Asking:
    """An engine, and requests one after the other."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = 0

    def __call__(self, prompt: list[int], n_tokens: int) -> tuple[list[int], list[float], Done]:
        """Tokens, their log-probabilities, and how the request ended."""
        self._ids += 1
        self.engine.submit(Generate(self._ids, tuple(prompt), n_tokens, Sampling(0.8, seed=3), (), logprobs=0))
        tokens: list[int] = []
        logprobs: list[float] = []
        while True:
            for event in self.engine.step():
                if isinstance(event, Tokens):
                    tokens += event.tokens
                    logprobs += event.logprobs or ()
                if isinstance(event, Done):
                    return tokens, logprobs, event


def turns(config: EngineConfig, prompts: Prompts, o: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a way."""
    rows: list[dict[str, Any]] = []
    asked: list[list[tuple[list[int], list[float]]]] = []
    for way in WAYS:
        engine = Engine(replace(config, exact_prefixes=way != "reused"))
        ask = Asking(engine)
        first_s, idle_s, said = [], [], []
        for run in range(o.runs + 1):
            prompt = prompts.next(o.prompt)
            reply, _, _ = ask(prompt, o.reply)
            began = time.perf_counter()
            while way == "exact, idle" and engine.idle_work:
                engine.step()
            idle = time.perf_counter() - began
            second = [*prompt, *reply, *prompts.next(o.more)]
            _, logprobs, done = ask(second, 8)
            said.append((second, logprobs))
            if run:
                first_s.append(done.timing.prefill_s)
                idle_s.append(idle)
        inexact = engine.stats()["prefixes"]["inexact_tokens"]
        engine.close()
        asked.append(said)
        rows.append({"way": way, "seconds": spread(first_s), "idle_s": spread(idle_s), "inexact_tokens": inexact})
        note(f"{way}: {1e3 * rows[-1]['seconds']['median']:.1f} ms, idle {1e3 * rows[-1]['idle_s']['median']:.1f} ms")
    plain = Engine(replace(config, prefix_gib=0.0))
    ask = Asking(plain)
    for row, said in zip(rows, asked, strict=True):
        same = []
        for second, logprobs in said:
            ask(prompts.next(o.prompt), 1)  # takes the place of whatever is kept of another turn
            while plain.idle_work:
                plain.step()
            same.append(ask(second, 8)[1] == logprobs)
        row["logits"] = f"{sum(same)} of {len(same)}"
        note(f"{row['way']}: logits of {row['logits']} are those without prefixes")
    plain.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--reply", type=int, default=1024)
    parser.add_argument("--more", type=int, default=200, help="tokens behind the reply")
    parser.add_argument("--runs", type=int, default=4)
    o = parser.parse_args()
    shape = shape_of(o.model)
    ctx = -(-(o.prompt + o.reply + o.more + 64) // 512) * 512
    config = EngineConfig(model=o.model, device=o.device, policy="all", ctx_tokens=ctx, chunk_tokens=512)
    rows = in_child(turns, config, Prompts(shape.n_vocab, seed=5), o)
    if o.json:
        report = {"model": shape.name, "prompt": o.prompt, "reply": o.reply, "more": o.more, "chunk": 512, "rows": rows}
        write_json(o.json, report)


if __name__ == "__main__":
    main()
