"""What a decoded token takes at depth where it reads a part of its context, beside one that reads all.

    python benchmarks/recall_speed.py MODEL.gguf --depths 16384,131072 --json data/results/recall_speed.json

A reply decodes alone, ahead of the host, at depths that are reached without computing what came before: keys, values
and states are zeros, which takes as long as others, and the sketches by which blocks are chosen are of random keys.
*Flat*: the time at the largest depth by that at the least one. `--steps` times steps of several given tokens, too, for
which the host waits.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import Prompts, note, parse_list, spread  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.kv_pool import at_depth, zeroed  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.ground.kv_types import KV_TYPES  # noqa: E402
from engine.ground.sampling import Sampling  # noqa: E402
from engine.memory.blocks import Sequence  # noqa: E402
from engine.ops import KV_BLOCK_TOKENS  # noqa: E402
from engine.ops.sketches import sketch, sketch_bytes  # noqa: E402
from engine.placing import policies  # noqa: E402
from engine.running.loaded import Loaded  # noqa: E402
from engine.running.recall import Part  # noqa: E402
from engine.running.reply import Reply  # noqa: E402
from engine.running.stepping import Span  # noqa: E402
from engine.serving.scheduler import Engine  # noqa: E402
from spark.pipeline.bench import check_settings  # noqa: E402
from spark.results import write_json  # noqa: E402

BEGIN = 4  # tokens of a reply before it is timed
KINDS = 64  # of blocks, by their sketches
GREEDY = Sampling(temperature=0.0)


def opened(o: argparse.Namespace, depths: list[int], pool: str = "auto") -> Engine:
    config = EngineConfig(
        model=o.model, device=o.device, policy=policies.ALL.name, ctx_tokens=max(depths) + o.generate + 64,
        kv_type=o.kv_type, parallel=1, draft="off", chunk_tokens=512, kv_recall_blocks=0, kv_pool=pool,
    )  # fmt: skip
    engine = Engine(config)
    check_settings(config, engine.ready())
    return engine


def spoiled(loaded: Loaded, kinds: int = KINDS) -> None:
    """Everything that was computed for positions is 0, and sketches are some of random keys and taken for made."""
    zeroed(loaded)
    recalling, rng = loaded.forward.recalling, np.random.default_rng(7)
    assert recalling is not None
    for group in recalling.kv.full_groups:
        recalling.sketches.lacking(group, np.arange(recalling.kv.pools[group].n_blocks, dtype=np.int32))
        shape = recalling.kv.groups[group]
        some = np.empty((kinds, shape.n_head_kv, sketch_bytes(shape.head_dim)), np.uint8)
        for one in some:
            sketch(rng.standard_normal((KV_BLOCK_TOKENS, shape.n_head_kv, shape.head_dim), np.float32), one)
        for layer in recalling.sketches.owners[group]:
            sketches = recalling.sketches.of[layer]
            loaded.forward.device.write(sketches, some[rng.integers(kinds, size=len(sketches))])


def decoded(loaded: Loaded, sequence: Sequence, part: Part | None, n: int) -> float:
    """Seconds of a token of a reply of n behind what a sequence holds, which is released."""
    depth = sequence.length
    reply = Reply([1] * (depth + 1), GREEDY, n, sequence=sequence)
    reply.recall = part
    steps, began, first = loaded.decoder.alone(reply), 0.0, 0
    while not steps.ended:
        steps.advance()
        if not first and reply.made >= BEGIN:
            began, first = time.perf_counter(), reply.made
    took = time.perf_counter() - began
    assert reply.sequence is not None and reply.made == n
    reply.sequence.release()
    if part is not None and part.left(depth):
        assert reply.recalled.tokens == n and reply.recalled.blocks_read < reply.recalled.blocks
    return took / (n - first)


def given(loaded: Loaded, depth: int, part: Part | None, each: int, prompts: Prompts) -> float:
    """Seconds of a step of so many given tokens, behind another one, which makes the sketches of a new sequence."""
    sequence, took = at_depth(loaded, depth - each), 0.0
    for _ in range(2):
        span = Span(sequence, np.asarray(prompts.next(each), np.int32), np.zeros(each, np.bool_), (0,), recall=part)
        loaded.forward.device.synchronize()
        began = time.perf_counter()
        loaded.steps.run([span])
        loaded.forward.device.synchronize()
        took = time.perf_counter() - began
    sequence.release()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--depths", default="16384,32768,65536,131072,261120", help="positions before the reply")
    parser.add_argument("--blocks", default="64,256", help="N of --kv-recall-blocks; all is measured, too")
    parser.add_argument("--steps", default="8", help="tokens of steps that are given")
    parser.add_argument("--generate", type=int, default=96, help="tokens of a reply")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kv-type", default="f16", choices=KV_TYPES)
    json_option(parser)
    o = parser.parse_args()
    depths, blocks = [int(n) for n in parse_list(o.depths)], [int(n) for n in parse_list(o.blocks)]
    engine = opened(o, depths)
    loaded, rows = engine.loaded, list[dict[str, Any]]()
    prompts = Prompts(loaded.source.config.n_vocab, seed=5)
    spoiled(loaded)
    for depth in depths:
        for n in (None, *blocks):
            part = None if n is None else Part(n)
            decoded(loaded, at_depth(loaded, depth), part, 2 * BEGIN)  # captured
            row: dict[str, Any] = {"depth": depth, "blocks": n}
            row["seconds"] = spread(
                [decoded(loaded, at_depth(loaded, depth), part, o.generate) for _ in range(o.runs)]
            )
            row["steps"] = {
                each: spread([given(loaded, depth, part, each, prompts) for _ in range(o.runs + 1)][1:])
                for each in (int(t) for t in parse_list(o.steps))
            }
            rows.append(row)
            note(f"depth {depth}, {n or 'all'} blocks: {1e3 * row['seconds']['median']:.3f} ms a token")
    for n in (None, *blocks):
        own = [r["seconds"]["median"] for r in rows if r["blocks"] == n]
        note(f"{n or 'all'} blocks: {own[-1] / own[0]:.3f} of the time at the least depth")
    if o.json:
        write_json(o.json, {"model": o.model.name, "kv_type": o.kv_type, "generate": o.generate, "rows": rows})
    engine.close()


if __name__ == "__main__":
    main()
