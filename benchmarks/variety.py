"""How alike sessions are: what placements and caches miss on held-out ones, and how far apart their routing lies.

    python -m benchmarks.variety MODEL.gguf --train TRACE --test TRACE [--test TRACE ...] [--json FILE]

TRACE: folders that `spark calibrate --trace` made. Static is placed by the counts of --train; LRU starts empty; Belady
is the bound of every layer and moment together. Divergence: Jensen-Shannon, in bits (0: alike, 1: nothing in common),
between the expert use of two sessions, mean over layers and all pairs; of generated tokens, sessions with 200 or more.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import json_option
from engine.formats import gguf
from engine.formats.trace import RoutingTrace, read_routing
from engine.placing import placement, simulate
from engine.placing.policy import DEFAULT, LRU
from spark.results import write_json

RESIDENCIES = (60, 30, 10)
MIN_TOKENS = 200


def root(session_id: str) -> str:
    """The root session that a session's id names: what is before the first `/`, `#` or `~`."""
    return session_id.replace("#", "/").replace("~", "/").split("/")[0]


def divergence(trace: RoutingTrace) -> dict[str, float]:
    """Pairwise Jensen-Shannon divergence of the root sessions' expert use."""
    roots = [root(session_id) for session_id in trace.session_ids]
    names = sorted(set(roots))
    owner = np.array([names.index(r) for r in roots])[trace.session]
    uses = np.zeros((len(names), len(trace.layers), trace.n_expert))
    for i in range(len(names)):
        chosen = trace.experts[(owner == i) & trace.generated]
        for layer in range(len(trace.layers)):
            uses[i, layer] = np.bincount(chosen[:, layer].ravel(), minlength=trace.n_expert)
    uses = uses[uses[:, 0].sum(axis=1) >= MIN_TOKENS * trace.experts.shape[2]]
    shares = uses / uses.sum(axis=2, keepdims=True)
    found = [np.mean(_entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2) for p, q in combinations(shares, 2)]
    whole = uses.sum(axis=0) / uses.sum(axis=(0, 2))[:, None]
    return {
        "sessions": float(len(shares)),
        "mean": float(np.mean(found)),
        "p90": float(np.percentile(found, 90)),
        "entropy_of_all": float(np.mean(_entropy(whole))),
        "entropy_of_one": float(np.mean([_entropy(p).mean() for p in shares])),
    }


def _entropy(shares: np.ndarray[Any, np.dtype[np.float64]]) -> Any:
    return -np.where(shares > 0, shares * np.log2(np.maximum(shares, 1e-300)), 0).sum(axis=-1)


def misses(train: RoutingTrace, test: RoutingTrace, residency: int) -> dict[str, float]:
    """Misses a generated token, by policy."""
    sizes = [1] * len(test.layers)
    budget = placement.residency_budget(test.n_expert, sizes, residency)
    n_used = test.experts.shape[2]
    tokens = int(test.generated.sum())
    fixed = placement.greedy(train.counts(), sizes, budget, n_expert_used=n_used)
    own = placement.greedy(test.counts(), sizes, budget, n_expert_used=n_used)
    empty = placement.lru(test.n_expert, sizes, budget)
    bound = simulate.belady(test, sizes, budget)
    results = {
        "static": simulate.simulate(test, fixed, LRU),
        "static_of_own_counts": simulate.simulate(test, own, LRU),
        "lru": simulate.simulate(test, empty, LRU),
        "default": simulate.simulate(test, empty, DEFAULT),
        "belady": bound,
    }
    return {name: int(result.misses.sum()) / tokens for name, result in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, action="append", required=True)
    json_option(parser)
    options = parser.parse_args()
    model_id = gguf.open_model(options.model).model_id
    train = read_routing(options.train, model_id)
    report: dict[str, Any] = {}
    for path in options.test:
        test = read_routing(path, model_id)
        rows = {str(residency): misses(train, test, residency) for residency in RESIDENCIES}
        report[path.name] = {"generated": int(test.generated.sum()), "divergence": divergence(test), "misses": rows}
        print(f"{path}: {report[path.name]['generated']:,} generated tokens")
        print("  divergence", {k: round(v, 4) for k, v in report[path.name]["divergence"].items()})
        for residency, row in rows.items():
            print(f"  {residency:>3}%  " + "  ".join(f"{name} {value:.2f}" for name, value in row.items()))
    if options.json:
        write_json(options.json, report)


if __name__ == "__main__":
    main()
