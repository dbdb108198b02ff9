"""A conversation that comes back from files says what one that never stopped says, at real depths and shapes.

    python benchmarks/restored.py MODEL.gguf --depths 35000,64000,114000,180000 --json data/results/restored.json

A prompt of random tokens and a turn behind it are read in one go, under a cache that holds all. Another engine reads
the prompt alone, writes its files, those that a slow disk missed in idle time, and ends; then for each pool in --pools
an engine of its own starts with those files and is asked for prompt and turn. Tokens and their log-probabilities have
to be the same, bit for bit; with too little reused the run fails, too. Times: of the turn's reply of a few tokens,
computed and restored.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.driving import Prompts, note, parse_list, shape_of
from benchmarks.figures import json_option
from benchmarks.next_turn import Asking
from engine.ground.config import EngineConfig
from engine.placing import policies
from engine.serving.scheduler import Engine
from spark.pipeline.bench import check_settings
from spark.results import write_json

REPLY_TOKENS = 12


def asked(o: argparse.Namespace, prompt: list[int], ctx: int, pool: str, files: Path | None) -> dict[str, Any]:
    """A reply of an engine that is started for it, and ends."""
    config = EngineConfig(
        model=o.model, device=o.device, policy=policies.ALL.name, ctx_tokens=ctx, kv_pool=pool, kv_type=o.kv_type,
        parallel=1, draft="off", chunk_tokens=o.chunk, prefix_gib=o.prefix_gib, cache_dir=files, cache_dir_gib=200.0,
    )  # fmt: skip
    engine = Engine(config)
    try:
        check_settings(config, engine.ready())
        engine.warm_up()
        began = time.perf_counter()
        tokens, logprobs, done = Asking(engine)(prompt, REPLY_TOKENS)
        seconds = time.perf_counter() - began
        idle(engine)
        return {
            "seconds": seconds, "tokens": tokens, "logprobs": logprobs, "reused": done.usage.cached_tokens,
            "pool_tokens": engine.loaded.shares.pool_tokens,
        }  # fmt: skip
    finally:
        engine.close()


def idle(engine: Engine, most_s: float = 60.0) -> None:
    """Let time pass in which files are written that the disk was too slow for."""
    until_s = time.perf_counter() + most_s
    while engine.loaded.prefixes.missed_s is not None and time.perf_counter() < until_s:
        if engine.idle_work:
            engine.step()
        else:
            time.sleep(min(engine.idle_s or 0.0, 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--depths", default="35000,64000,114000,180000")
    parser.add_argument("--new", type=int, default=500, help="tokens of the turn")
    parser.add_argument("--pools", default="auto,16384", help="as --kv-pool")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--prefix-gib", type=float, default=2.0)
    parser.add_argument("--least-reused", type=float, default=0.9, help="of the prompt's tokens")
    o = parser.parse_args()
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for depth in map(int, parse_list(o.depths)):
        prompts = Prompts(shape_of(o.model).n_vocab, seed=depth)
        prompt, turn = prompts.next(depth), prompts.next(o.new)
        ctx = depth + o.new + 2 * REPLY_TOKENS
        plain = asked(o, prompt + turn, ctx, "auto", None)
        for pool in o.pools.split(","):
            with tempfile.TemporaryDirectory(prefix="restored-") as folder:
                files = Path(folder) / "prefixes"
                asked(o, prompt, ctx, pool, files)
                again = asked(o, prompt + turn, ctx, pool, files)
            same = again["tokens"] == plain["tokens"] and again["logprobs"] == plain["logprobs"]
            note(
                f"depth {depth}, pool {pool}: {again['reused']} tokens reused, {plain['seconds']:.2f} s computed, "
                f"{again['seconds']:.2f} s restored, {'the same' if same else 'OTHER BITS'}"
            )
            if not same:
                problems.append(f"depth {depth}, pool {pool}: {again} for {plain}")
            if again["reused"] < o.least_reused * depth:
                problems.append(f"depth {depth}, pool {pool}: {again['reused']} tokens were reused")
            rows.append({
                "depth": depth, "pool": pool, "pool_tokens": again["pool_tokens"], "reused": again["reused"],
                "same": same, "computed_s": plain["seconds"], "restored_s": again["seconds"],
            })  # fmt: skip
    if o.json:
        write_json(o.json, {"model": o.model.name, "kv_type": o.kv_type, "new": o.new, "rows": rows})
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
