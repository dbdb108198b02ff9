"""A generative model of routing, for measuring policies and misses where no real traces can be had.

The logit of expert e in layer l at a session's token t is

    z[t, l, e] = popularity[l, e] + topic[t, l, e] + recent[t, l, e] + noise[t, l, e]

and the A largest are chosen, in that order. `popularity` is Zipf's: -ZIPF * ln(rank), the ranks a permutation of each
layer's own; it belongs to the model and is the same in every session. `topic` and `recent` are Gaussian processes
with exponentially decaying correlation (AR(1), stationary): what the session is about, drifting over a thousand
tokens, and what its last sentences are about. `noise` is Gumbel's, new for every token: choosing the largest
then is drawing without replacement in proportion to exp(z - noise).

The constants are fitted so that, with Qwen3-30B-A3B's shapes and 40% of the expert bytes in slots, the rates are those
that have been published for such models (docs/routing-model.md; tests/figures/test_routing_model.py asserts them):
a placement from other sessions hits 68-73%, LRU 90-95%, the best placement for each prompt about 92%.

    python benchmarks/routing.py [--json FILE]      # the rates, at several residencies
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.figures import json_option  # noqa: E402
from engine.formats.trace import RoutingTrace  # noqa: E402
from engine.placing import placement, policy, simulate  # noqa: E402

ZIPF = 1.1
TOPIC_STD, TOPIC_TOKENS = 1.75, 1200.0
RECENT_STD, RECENT_TOKENS = 0.95, 40.0
SESSION_TOKENS = 1000  # of the sessions that the constants were fitted on
_BLOCK_TOKENS = 128

Float32s = NDArray[np.float32]


@dataclass(frozen=True)
class Routing:
    """One model's routing: shapes, and the seed of its popularity."""

    n_layer: int = 48
    n_expert: int = 128
    n_expert_used: int = 8
    seed: int = 0

    def popularity(self) -> Float32s:
        """Logits [L, E]."""
        rng = np.random.default_rng((self.seed, 0))
        rank = np.stack([rng.permutation(self.n_expert) + 1.0 for _ in range(self.n_layer)])
        return (-ZIPF * np.log(rank)).astype(np.float32)

    def session(self, n_tokens: int, number: int) -> NDArray[np.uint16]:
        """Experts uint16 [T, L, A] of session `number`, each token's in descending order of their logits."""
        rng = np.random.default_rng((self.seed, 1, number))
        shape = (self.n_layer, self.n_expert)
        popularity = self.popularity()
        topic = TOPIC_STD * rng.standard_normal(shape, np.float32)
        recent = RECENT_STD * rng.standard_normal(shape, np.float32)
        chosen = np.empty((n_tokens, self.n_layer, self.n_expert_used), np.uint16)
        for begin in range(0, n_tokens, _BLOCK_TOKENS):
            n = min(_BLOCK_TOKENS, n_tokens - begin)
            exponential = rng.standard_exponential((n, *shape), np.float32)
            logits = -np.log(np.maximum(exponential, np.finfo(np.float32).tiny))  # Gumbel
            for z in logits:
                topic = _drift(topic, TOPIC_STD, TOPIC_TOKENS, rng)
                recent = _drift(recent, RECENT_STD, RECENT_TOKENS, rng)
                z += popularity + topic + recent
            chosen[begin : begin + n] = _largest(logits, self.n_expert_used)
        return chosen

    def trace(self, n_sessions: int, n_tokens: int = SESSION_TOKENS, first: int = 0) -> RoutingTrace:
        """Sessions first .. first + n_sessions - 1, every token generated; other numbers are held-out sessions."""
        numbers = range(first, first + n_sessions)
        return RoutingTrace(
            experts=np.concatenate([self.session(n_tokens, number) for number in numbers]),
            layers=tuple(range(self.n_layer)),
            generated=np.ones(n_sessions * n_tokens, np.bool_),
            session=np.repeat(np.arange(n_sessions, dtype=np.int32), n_tokens),
            session_ids=tuple(f"synthetic-{number}" for number in numbers),
            position=np.tile(np.arange(n_tokens, dtype=np.int32), n_sessions),
            model_id="synthetic",
            n_expert=self.n_expert,
        )


def _drift(value: Float32s, std: float, tokens: float, rng: np.random.Generator) -> Float32s:
    """One step of a stationary AR(1) process whose correlation falls to 1/e in `tokens` steps."""
    kept = math.exp(-1.0 / tokens)
    fresh = np.float32(std * math.sqrt(1.0 - kept * kept))
    return np.float32(kept) * value + fresh * rng.standard_normal(value.shape, np.float32)


def _largest(logits: Float32s, n: int) -> NDArray[np.uint16]:
    """Indices of the n largest of the last axis, largest first."""
    found = np.argpartition(-logits, n - 1, axis=-1)[..., :n]
    order = np.argsort(-np.take_along_axis(logits, found, axis=-1), axis=-1)
    return np.take_along_axis(found, order, axis=-1).astype(np.uint16)


# --- choices with a given share of misses -------------------------------------------------------------


def imposed(
    resident: NDArray[np.bool_], n_tokens: int, n_expert_used: int, miss_rate: float, seed: int
) -> NDArray[np.int32]:
    """Choices int32 [n_tokens, L, A] for the engine's `--replay`, of which exactly the share `miss_rate` misses.

    resident: bool [L, E], the experts in slots that nothing moves. Which (token, layer, rank) miss is a random
    subset of the nearest whole number of them; the expert is drawn among those that are (not) resident, evenly and none
    twice. Raises ValueError where a layer has too few of them. Deterministic by seed.
    """
    rng = np.random.default_rng(seed)
    n_layer, A = len(resident), n_expert_used
    uses = n_tokens * n_layer * A
    misses = np.zeros(uses, np.bool_)
    misses[rng.permutation(uses)[: round(miss_rate * uses)]] = True
    misses = misses.reshape(n_tokens, n_layer, A)
    chosen = np.empty((n_tokens, n_layer, A), np.int32)
    for layer, inside in enumerate(resident):
        missing = misses[:, layer]
        for group, wanted in ((np.flatnonzero(~inside), missing), (np.flatnonzero(inside), ~missing)):
            most = int(wanted.sum(axis=1).max())
            if most > len(group):
                raise ValueError(f"layer {layer}: a token needs {most} of {len(group)} experts")
            if most == 0:
                continue
            drawn = group[np.argsort(rng.random((n_tokens, len(group)), np.float32), axis=1)[:, :most]]
            turn = np.cumsum(wanted, axis=1) - 1
            rows, ranks = np.nonzero(wanted)
            chosen[rows, layer, ranks] = drawn[rows, turn[rows, ranks]]
    return chosen


def guessed(
    chosen: NDArray[np.int32], resident: NDArray[np.bool_], recall: float, precision: float, most: int, seed: int
) -> NDArray[np.int32]:
    """Guesses int32 [n_tokens, L, most] for the engine's `--replay-guesses`, -1: none, in no order.

    Each choice that misses is guessed with the chance `recall`; others that are not resident are guessed as often as
    makes `precision` of all guesses right. What is more than `most` for a layer is cut. Deterministic by seed.
    """
    rng = np.random.default_rng((seed, 2))
    n_tokens, n_layer, _ = chosen.shape
    found = np.full((n_tokens, n_layer, most), -1, np.int32)
    each = missed(chosen, resident).mean() * recall * (1 / precision - 1)  # wrong ones of a layer
    for t, layer in np.ndindex(n_tokens, n_layer):
        away = np.flatnonzero(~resident[layer])
        inside = np.isin(away, chosen[t, layer])
        right = away[inside & (rng.random(len(away)) < recall)]
        wrong = rng.permutation(away[~inside])[: rng.poisson(each)]
        both = rng.permutation(np.concatenate([right, wrong]))[:most]
        found[t, layer, : len(both)] = both
    return found


def missed(chosen: NDArray[np.integer], resident: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many of the choices [T, L, A] of each token and layer are not resident: int64 [T, L]."""
    layers = np.arange(len(resident))[:, None]
    return (~resident[layers, chosen]).sum(axis=2).astype(np.int64)


def distinct_missed(choices: NDArray[np.int32], resident: NDArray[np.bool_], rows: int) -> NDArray[np.float64]:
    """Distinct experts that a step of so many rows misses, float64 [L], mean over the array's steps."""
    steps = choices[: len(choices) // rows * rows].reshape(-1, rows, *choices.shape[1:])
    found = np.zeros(len(resident))
    for layer, inside in enumerate(resident):
        used = np.zeros((len(steps), len(inside)), np.bool_)
        used[np.arange(len(steps))[:, None], steps[:, :, layer].reshape(len(steps), -1)] = True
        found[layer] = (used & ~inside).sum(axis=1).mean()
    return found


def repeated(chosen: NDArray[np.int32], share: float, seed: int) -> NDArray[np.int32]:
    """Choices like `chosen` [T, L, A], of which each is that of the token before with the chance `share`.

    What another rank of the token has by then stays as it was, so no expert is there twice. Deterministic by seed.
    """
    rng, found = np.random.default_rng(seed), chosen.copy()
    for t in range(1, len(found)):
        before, now = found[t - 1], found[t]
        again = rng.random(now.shape) < share
        for rank in range(now.shape[1]):
            taken = (now == before[:, rank, None]).any(axis=1)
            now[:, rank] = np.where(again[:, rank] & ~taken, before[:, rank], now[:, rank])
    return found


# --- what the constants were fitted to ----------------------------------------------------------------


def rates(
    routing: Routing, residency_pct: float, *, calibration: int = 12, held_out: int = 4, n_tokens: int = SESSION_TOKENS
) -> dict[str, float]:
    """Hit rates at one residency, by the engine's own simulator, for experts of one size.

    static: placed by `calibration` other sessions; lru: empty slots at first, all sessions in turn; oracle: each
    session under the best placement for itself; previous_token: experts that the token before used too.
    """
    sizes = [1] * routing.n_layer
    budget = placement.residency_budget(routing.n_expert, sizes, residency_pct)
    train = routing.trace(calibration, n_tokens)
    test = routing.trace(held_out, n_tokens, first=calibration)

    def static(trace: RoutingTrace, counts: NDArray[np.int64]) -> float:
        placed = placement.greedy(counts, sizes, budget, n_expert_used=routing.n_expert_used)
        return simulate.simulate(trace, placed, policy.LRU).hit_rate

    parts = [test.part(i * n_tokens, (i + 1) * n_tokens) for i in range(held_out)]
    empty = placement.lru(routing.n_expert, sizes, budget)
    used = np.zeros((*test.experts.shape[:2], routing.n_expert), np.bool_)
    np.put_along_axis(used, test.experts.astype(np.int64), True, axis=2)
    again = (used[1:] & used[:-1]).sum(axis=2)[np.diff(test.session) == 0]
    return {
        "residency_pct": residency_pct,
        "static": static(test, train.counts()),
        "lru": simulate.simulate(test, empty, policy.LRU).hit_rate,
        "oracle": float(np.mean([static(part, part.counts()) for part in parts])),
        "previous_token": float(again.mean()) / routing.n_expert_used,
    }


def main() -> None:
    from spark.results import write_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    json_option(parser)
    parser.add_argument("--residency", default="20,40,60,80", help="percentages")
    options = parser.parse_args()
    rows = [rates(Routing(), float(percent)) for percent in options.residency.split(",")]
    for row in rows:
        print("  ".join(f"{name} {value:.3g}" for name, value in row.items()))
    if options.json:
        constants = {
            "zipf": ZIPF, "topic_std": TOPIC_STD, "topic_tokens": TOPIC_TOKENS, "recent_std": RECENT_STD,
            "recent_tokens": RECENT_TOKENS,
        }  # fmt: skip
        write_json(options.json, {"constants": constants, "rows": rows})


if __name__ == "__main__":
    main()
