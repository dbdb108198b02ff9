"""What a cache that is too small for all of them does to several long conversations that take turns.

    python benchmarks/long_contexts.py data/nano/nano.gguf --json data/results/long_contexts.json

Each of N conversations begins with a text of its own that fills most of `--ctx`, the size of the cache that all of them
share; then they take turns, one after the other or all at once, each adding a short message and the reply to it. What a
turn reused of its prompt, and how long its first token took, under several budgets of host memory for prefixes.
"""

from __future__ import annotations

import argparse
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.serving import Json, Server, ask, quantiles  # noqa: E402
from spark.results import write_json  # noqa: E402

ROUNDS = 4
REPLY_TOKENS = 8


def text(seed: int, n_words: int) -> str:
    """Words of no meaning, other ones for each seed."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("aeioubcdfglmnprst", k=rng.randint(2, 6))) for _ in range(300)]
    return " ".join(rng.choices(words, k=n_words))


def conversation(seed: int, n_words: int) -> list[Json]:
    """The messages that a conversation begins with."""
    return [{"role": "user", "content": text(seed, n_words)}]


def turn(url: str, messages: list[Json], number: int) -> dict[str, Any]:
    """One turn, whose question is added to the conversation with an answer of fixed words."""
    reply = ask(url, "chat", {"messages": messages, "max_tokens": REPLY_TOKENS, "temperature": 0})
    messages += [{"role": "assistant", "content": "So it is."}, {"role": "user", "content": f"And then, {number}?"}]
    return {"first_s": reply.first_s, "prompt": reply.prompt_tokens, "reused": reply.reused_tokens}


def run(model: Path, options: list[str], n: int, n_words: int, at_once: bool) -> dict[str, Any]:
    """Turns of n conversations after each has had its first one."""
    with Server(model, *options) as server, ThreadPoolExecutor(n if at_once else 1) as pool:
        held = [conversation(seed, n_words) for seed in range(n)]
        turns: list[dict[str, Any]] = []
        for number in range(1 + ROUNDS):
            made = list(pool.map(lambda messages, number=number: turn(server.url, messages, number), held))
            turns += made if number else []
    prompt, reused = sum(t["prompt"] for t in turns), sum(t["reused"] for t in turns)
    return {
        "conversations": n, "at_once": at_once, "prompt_tokens": prompt // len(turns), "turns": len(turns),
        "reused_share": reused / prompt, "first_s": quantiles([t["first_s"] for t in turns]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--words", type=int, default=700, help="of the text that a conversation begins with")
    o = parser.parse_args()
    common = ["--device", o.device, "--ctx", str(o.ctx)]
    rows = []
    for n, at_once, gib in ((1, False, 0.0), (8, False, 0.0), (8, True, 0.0), (8, False, 2.0), (8, True, 2.0)):
        rows.append({"prefix_gib": gib, **run(o.model, [*common, "--prefix-gib", str(gib)], n, o.words, at_once)})
        row = rows[-1]
        together = " at once" if at_once else ""
        note(f"{n} conversations of {row['prompt_tokens']} tokens{together}, --prefix-gib {gib:g}: "
             f"{row['reused_share']:.0%} reused, first token {row['first_s']['p50']:.2f} s")  # fmt: skip
        if o.json is not None:
            write_json(o.json, {"model": o.model.name, "ctx_tokens": o.ctx, "device": o.device, "rows": rows})


if __name__ == "__main__":
    main()
