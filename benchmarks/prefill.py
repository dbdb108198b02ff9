"""Prefill speed: whole prompts through the daemon, and a short new turn on a long prefix in the KV cache.

    python benchmarks/prefill.py model.gguf --json data/results/prefill.json

Prompts are random and none is sent twice; the first of each length warms up. The context has room for one, so each
takes the place of the one before; that is forgotten, unless --prefix-gib is above 0: then the time to keep it is in the
next one's. Turns are measured in this process, on the engine itself: one sequence is filled with the prefix, then new
tokens are run on it again and again, other tokens each time, its length set back in between. Beside each turn stands
the same number of tokens without a prefix: what the prefix costs is attention, and anything beyond that is a defect.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cuda_kernels import in_child
from benchmarks.driving import (
    PARTIAL,
    Prompts,
    generate,
    note,
    open_checked,
    parse_list,
    settings,
    shape_of,
    spread,
)
from benchmarks.figures import json_option
from engine.ground.config import EngineConfig
from engine.ground.kv_types import KV_TYPES
from engine.memory.blocks import Sequence
from engine.ops import KV_BLOCK_TOKENS
from engine.placing import policies
from engine.running.loaded import Loaded
from engine.running.stepping import Span
from engine.serving.scheduler import Engine
from spark.pipeline.bench import check_settings
from spark.results import write_json


def prompts_through_daemon(config: EngineConfig, prompts: Prompts, lengths: list[int], runs: int) -> Any:
    """A row for each prompt length, and the daemon's settings."""
    rows = []
    with open_checked(config) as client:
        for length in lengths:
            samples = [generate(client, prompts.next(length), 2) for _ in range(runs + 1)][1:]
            rate = spread([s.prefill_tokens_per_s for s in samples])
            rows.append({
                "residency_pct": client.ready.info["residency_pct"], "policy": config.policy, "prompt_tokens": length,
                "prefill_tokens_per_s": rate, "seconds": spread([s.done.timing.prefill_s for s in samples]),
            })  # fmt: skip
            note(f"{config.residency_pct:g}% resident, prompt of {length}: {rate['median']:.0f} tokens/s")
        return rows, settings(client)


def feed(loaded: Loaded, sequence: Sequence, tokens: list[int]) -> float:
    """Seconds until the logits of the last of `tokens` are here; chunks lie on the grid of absolute positions."""
    ids, size = np.asarray(tokens, np.int32), loaded.limits.max_tokens
    end = sequence.length + len(ids)
    began, at, result = time.perf_counter(), 0, None
    while at < len(ids):
        n = min(size - sequence.length % size, len(ids) - at)
        want = (n - 1,) if at + n == len(ids) else ()
        short = loaded.prefixes.short_rows(sequence.length, sequence.length + n, end)
        result = loaded.steps.run([Span(sequence, ids[at : at + n], np.zeros(n, np.bool_), want, short=short)])
        at += n
    assert result is not None
    if not np.isfinite(result.logits).all():
        raise SystemExit("logits are not finite")
    return time.perf_counter() - began


def of_cpu(loaded: Loaded) -> dict[str, Any]:
    """Where the CPU computes experts, what of long steps it has so far."""
    return {} if loaded.steps.misses is None else {"cpu_experts": loaded.steps.misses.stats()["long"]}


def turns(config: EngineConfig, prompts: Prompts, prefix: int, lengths: list[int], runs: int) -> Any:
    """A row for each number of new tokens on a prefix, and the engine's settings."""
    engine = Engine(config)
    try:
        info = engine.ready()
        check_settings(config, info)
        loaded = engine.loaded
        sequence = loaded.kv.sequence()
        prefix_s = feed(loaded, sequence, prompts.next(prefix))
        rows = []
        for length in lengths:
            times, cold = [], []
            for _ in range(runs + 1):
                sequence.length = prefix
                times.append(feed(loaded, sequence, prompts.next(length)))
            sequence.length = prefix
            for _ in range(runs + 1):
                other = loaded.kv.sequence()
                cold.append(feed(loaded, other, prompts.next(length)))
                other.release()
            seconds = spread(times[1:])
            rows.append({
                "residency_pct": info["residency_pct"], "policy": config.policy, "prefix_tokens": prefix,
                "prefix_s": prefix_s, "new_tokens": length, "seconds": seconds,
                "tokens_per_s": spread([length / t for t in times[1:]]), "without_prefix_s": spread(cold[1:]),
                "ratio": seconds["median"] / statistics.median(cold[1:]), **of_cpu(loaded),
            })  # fmt: skip
            ms, ratio = 1e3 * seconds["median"], rows[-1]["ratio"]
            note(f"{config.residency_pct:g}% resident, {length} new on {prefix}: {ms:.1f} ms, {ratio:.2f} x no prefix")
        sequence.release()
        return rows, {key: value for key, value in info.items() if key != "model"}
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kv-type", default="f16", choices=KV_TYPES)
    parser.add_argument("--chunk", type=int, metavar="N", help="tokens of a prefill step (default: the engine's)")
    parser.add_argument("--residency", default="100,60", help="percentages of the expert bytes")
    parser.add_argument("--policy", default=policies.SPARK.name, choices=PARTIAL, help="below 100 percent")
    parser.add_argument("--lengths", default="512,4096", help="prompt tokens; empty: leave prompts out")
    parser.add_argument("--turns", default="64,512", help="new tokens on the prefix; empty: leave turns out")
    parser.add_argument("--prefix", type=int, default=16384)
    parser.add_argument("--prefix-gib", type=float, default=0.0, metavar="GIB", help="to keep prompts in")
    parser.add_argument("--cpu-experts", default="off", help="as of `spark serve`; several, one after the other")
    parser.add_argument("--runs", type=int, default=5, help="measured repetitions of each kind")
    o = parser.parse_args()
    shape = shape_of(o.model)
    prompts = Prompts(shape.n_vocab, seed=2)
    lengths, news = [int(n) for n in parse_list(o.lengths)], [int(n) for n in parse_list(o.turns)]
    report: dict[str, Any] = {
        "model": shape.name, "model_bytes": shape.file_bytes, "prompts": [], "turns": [], "settings": [],
    }  # fmt: skip
    base = EngineConfig(model=o.model, device=o.device, kv_type=o.kv_type, prefix_gib=o.prefix_gib)
    if o.chunk is not None:
        base = replace(base, chunk_tokens=o.chunk)
    ways = o.cpu_experts.split(",")
    for percent, way in ((p, w) for p in parse_list(o.residency) for w in (ways if p < 100 else ways[:1])):
        policy = policies.ALL.name if percent == 100 else o.policy
        config = replace(base, policy=policy, residency_pct=percent, cpu_experts=way)
        for part, function, arguments, ctx in (
            ("prompts", prompts_through_daemon, (lengths,), max(lengths, default=0) + 2),
            # Room for the turn with a prefix and without one, each in whole blocks.
            ("turns", turns, (o.prefix, news), o.prefix + 2 * (max(news, default=0) + KV_BLOCK_TOKENS)),
        ):
            if not arguments[-1]:
                continue
            # A context of whole chunks, so that the engine does not shorten them.
            chunk = config.chunk_tokens or 1
            asked = replace(config, ctx_tokens=-(-ctx // chunk) * chunk)
            rows, made = in_child(function, asked, prompts, *arguments, o.runs)
            report[part] += rows
            report["settings"].append(made)
            if o.json:
                write_json(o.json, report)


if __name__ == "__main__":
    main()
