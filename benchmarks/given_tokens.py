"""The time of a step of several given tokens: what verifying drafts, or the rest of a prompt, costs.

    python benchmarks/given_tokens.py model.gguf --depths 512,32000 --json data/results/given_tokens.json

Tokens are random, others in each step, so experts are chosen as independently as the router lets them be; the
sequence's length is set back in between. `--sequences N` instead steps N sequences by one token each. Times are from
the call until the device is done, logits of all rows included.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.driving import Prompts, note, parse_list, spread
from benchmarks.figures import json_option
from benchmarks.prefill import feed
from engine.ground.config import EngineConfig
from engine.memory.blocks import Sequence
from engine.placing import policies
from engine.running.loaded import Loaded
from engine.running.stepping import Span
from engine.serving.scheduler import Engine
from spark.pipeline.bench import check_settings
from spark.results import write_json


def step_seconds(loaded: Loaded, sequences: list[Sequence], each: int, prompts: Prompts, runs: int) -> list[float]:
    """Seconds of steps of `each` tokens of every sequence, whose lengths stay."""
    times, lengths = [], [sequence.length for sequence in sequences]
    for _ in range(runs + 3):
        spans = [
            Span(s, np.asarray(prompts.next(each), np.int32), np.zeros(each, np.bool_), tuple(range(each)))
            for s in sequences
        ]
        loaded.backend.device.synchronize()
        began = time.perf_counter()
        loaded.steps.run(spans)
        loaded.backend.device.synchronize()
        times.append(time.perf_counter() - began)
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.length = length
    return times[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--depths", default="512", help="tokens in the cache, of each sequence")
    parser.add_argument("--tokens", default="1,2,4,8,16,32", help="of one sequence")
    parser.add_argument("--sequences", default="", help="numbers of sequences that step by a token each")
    parser.add_argument("--runs", type=int, default=40)
    json_option(parser)
    o = parser.parse_args()
    depths, counts = [int(n) for n in parse_list(o.depths)], [int(n) for n in parse_list(o.sequences)]
    most = max(counts, default=1)
    context = most * (max(depths) + 256)
    config = EngineConfig(
        model=o.model, device="cuda", policy=policies.ALL.name, residency_pct=100.0, ctx_tokens=context
    )
    engine = Engine(config)
    check_settings(config, engine.ready())
    loaded = engine.loaded
    prompts = Prompts(loaded.source.config.n_vocab, seed=5)
    sequences = [loaded.kv.sequence() for _ in range(most)]
    rows: list[dict[str, Any]] = []
    for depth in sorted(depths):
        for sequence in sequences:
            feed(loaded, sequence, prompts.next(depth - sequence.length))
        cases = [(1, int(n)) for n in parse_list(o.tokens)] + [(n, 1) for n in counts]
        for n_sequences, each in cases:
            seconds = spread(step_seconds(loaded, sequences[:n_sequences], each, prompts, o.runs))
            rows.append({"depth": depth, "sequences": n_sequences, "tokens_each": each, "seconds": seconds})
            note(f"depth {depth}, {n_sequences} x {each}: {1e3 * seconds['median']:.2f} ms")
    if o.json:
        write_json(o.json, {"model": o.model.name, "rows": rows})
    engine.close()


if __name__ == "__main__":
    main()
