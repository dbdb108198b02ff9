"""A KV cache of which a part is at home in host memory: steps at depth, and prefill, beside one that is all on the GPU.

    python benchmarks/kv_pool.py MODEL.gguf --depths 32768,131072 --json data/results/kv_pool.json

Steps of a few tokens of one sequence, at depths that are reached without computing what came before: keys, values and
states are zeros, which takes as long as others. Of the sequence's blocks as many are sent home as --shares says; none
is brought back. *Line*: the step with everything on the GPU, and the absent bytes at --pcie-gb-per-s. Prefill is real:
random tokens, from the first on, under a pool of --prefill-pool tokens.
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
from benchmarks.given_tokens import step_seconds  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.ground.kv_types import KV_TYPES  # noqa: E402
from engine.memory.blocks import Sequence  # noqa: E402
from engine.ops import KV_BLOCK_TOKENS  # noqa: E402
from engine.placing import policies  # noqa: E402
from engine.running.loaded import Loaded  # noqa: E402
from engine.running.stepping import Span  # noqa: E402
from engine.serving.scheduler import Engine  # noqa: E402
from spark.pipeline.bench import check_settings  # noqa: E402
from spark.results import write_json  # noqa: E402


def opened(o: argparse.Namespace, ctx: int, pool: str) -> Engine:
    config = EngineConfig(
        model=o.model, device=o.device, policy=policies.ALL.name, ctx_tokens=ctx, kv_pool=pool, kv_type=o.kv_type,
        parallel=1, draft="off", chunk_tokens=o.chunk,
    )  # fmt: skip
    engine = Engine(config)
    check_settings(config, engine.ready())
    return engine


def zeroed(loaded: Loaded) -> None:
    """Everything that was computed for positions is 0."""
    kv, device = loaded.kv, loaded.forward.device
    states = [array for layer in kv.delta if layer is not None for array in (layer.conv, layer.state)]
    for array in (*(a for store in kv._stores.values() for a in store.pool), *states):
        device.set_bytes(device.pointer(array), 0, int(array.nbytes))


def at_depth(loaded: Loaded, depth: int) -> Sequence:
    """A sequence that holds so many positions, all in the pool."""
    sequence = loaded.kv.sequence()
    loaded.kv.hold(sequence, depth)
    return sequence


def send_home(loaded: Loaded, sequence: Sequence, share: float) -> int:
    """Leave a share of a sequence's blocks in the pool, the last ones; the absent bytes."""
    kv, absent = loaded.kv, 0
    for group in kv.full_groups:
        places = kv.pools[group].places
        if places is None:
            continue
        blocks = sequence.groups[group].blocks()
        # Where the pool is smaller some left it already.
        n = round(len(blocks) * (1 - share)) - len(places.away(blocks))
        if n > 0:
            kv._make_room(group, n)
        absent += len(places.away(blocks)) * kv.block_bytes(group)
    loaded.forward.device.synchronize()
    return absent


def prefill_seconds(loaded: Loaded, n_tokens: int) -> float:
    """Read a prompt of random tokens."""
    rng, sequence, most = np.random.default_rng(3), loaded.kv.sequence(), loaded.limits.max_tokens
    tokens = rng.integers(0, loaded.source.config.n_vocab, n_tokens).astype(np.int32)
    loaded.steps.run([Span(sequence, tokens[:most], np.ones(most, bool), (most - 1,))])  # the kernels are there
    loaded.forward.device.synchronize()
    sequence.release()
    sequence = loaded.kv.sequence()
    began = time.perf_counter()
    for start in range(0, n_tokens, most):
        part = tokens[start : start + most]
        result = loaded.steps.run([Span(sequence, part, np.ones(len(part), bool), (len(part) - 1,))])
        assert np.isfinite(result.last_residual).all()
    loaded.forward.device.synchronize()
    took = time.perf_counter() - began
    sequence.release()
    return took


def steps(o: argparse.Namespace, loaded: Loaded, depth: int, share: float) -> list[dict[str, Any]]:
    zeroed(loaded)
    sequence, prompts, rows = at_depth(loaded, depth), Prompts(loaded.source.config.n_vocab, seed=5), []
    absent = send_home(loaded, sequence, share)
    for n in (int(t) for t in parse_list(o.tokens)):
        seconds = spread(step_seconds(loaded, [sequence], n, prompts, o.runs))
        rows.append({"depth": depth, "share": share, "tokens": n, "absent_bytes": absent, "seconds": seconds})
        said = f"{1e3 * seconds['median']:.2f} ms, {absent / 1e9:.2f} GB absent"
        note(f"depth {depth}, {share:.0%} in the pool, {n} tokens: {said}")
    sequence.release()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--depths", default="32768,65536,131072,261120", help="positions before the step")
    parser.add_argument("--shares", default="1,0.5,0.1", help="of the blocks, in the pool")
    parser.add_argument("--tokens", default="1,8", help="of a step")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--chunk", type=int, help="tokens of a prefill step")
    parser.add_argument("--kv-type", default="f16", choices=KV_TYPES)
    parser.add_argument("--pcie-gb-per-s", type=float, default=51.4)
    parser.add_argument("--prefill", type=int, default=131072, help="tokens of a prompt; 0: none is read")
    parser.add_argument("--prefill-pool", type=int, default=16384)
    json_option(parser)
    o = parser.parse_args()
    depths, shares = [int(n) for n in parse_list(o.depths)], [float(n) for n in parse_list(o.shares)]
    ctx = max(*depths, o.prefill) + 1024
    prefill: dict[str, float] = {}
    whole = opened(o, ctx, str(ctx))
    rows = [r | {"homes": False} for depth in depths for r in steps(o, whole.loaded, depth, 1.0)]
    plain = {(r["depth"], r["tokens"]): r["seconds"]["median"] for r in rows}
    if o.prefill:
        prefill["whole_s"] = prefill_seconds(whole.loaded, o.prefill)
        note(f"prefill of {o.prefill} tokens: {prefill['whole_s']:.2f} s")
    whole.close()
    for share in shares:  # what is absent has room in the staging area where the pool is no larger than it has to be
        pooled = opened(o, ctx, str(min(round(share * ctx), ctx - KV_BLOCK_TOKENS)))
        pooled.loaded.kv.recall = lambda sequences: None  # type: ignore[method-assign]
        for depth in depths:
            rows += [r | {"homes": True} for r in steps(o, pooled.loaded, depth, share)]
        pooled.close()
    for r in rows:
        r["line_s"] = plain[r["depth"], r["tokens"]] + r["absent_bytes"] / (1e9 * o.pcie_gb_per_s)
        r["of_line"] = r["seconds"]["median"] / r["line_s"]
    if o.prefill:
        small = opened(o, ctx, str(o.prefill_pool))
        prefill |= {"tokens": o.prefill, "pool_tokens": o.prefill_pool}
        prefill["pooled_s"] = prefill_seconds(small.loaded, o.prefill)
        prefill["speed"] = prefill["whole_s"] / prefill["pooled_s"]
        note(f"with a pool of {o.prefill_pool}: {prefill['pooled_s']:.2f} s, {prefill['speed']:.3f} of the speed")
        small.close()
    for r in rows:
        if r["homes"]:
            note(f"depth {r['depth']}, {r['share']:.0%}, {r['tokens']} tokens: {r['of_line']:.3f} of the line")
    if o.json:
        made = {"model": o.model.name, "kv_type": o.kv_type, "pcie_gb_per_s": o.pcie_gb_per_s}
        write_json(o.json, made | {"rows": rows, "prefill": prefill})


if __name__ == "__main__":
    main()
