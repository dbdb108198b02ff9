"""Replacement rules on recorded routing: chosen on some sessions, judged on others, with 95% intervals over sessions.

    python benchmarks/policies.py MODEL.gguf --choose-on train.parquet --judge-on test.parquet \\
        --judge-on other.parquet --json data/results/policies.json

A set is a token file, sessions (JSONL), or the trace folder of an earlier `spark calibrate --trace`. Placements are
made from the counts of the sessions to choose on, and `spark` is what placing/evidence.py makes of them. Beside the
rules that the engine has (nothing pinned, 2**k steps remembered) stand those that were tried and dropped: a bucket in
each slot that leaks one a step, and heat that the profile warms. These run in NumPy, and slowly; --no-tried leaves
them out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note, parse_list  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from engine.formats.gguf import open_model  # noqa: E402
from engine.formats.profile import Choice  # noqa: E402
from engine.formats.trace import RoutingTrace, part_paths, read_routing  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.placing import evidence, placement, policy, simulate  # noqa: E402
from engine.placing.evidence import Candidate, Draws  # noqa: E402
from engine.placing.placement import Placement  # noqa: E402
from engine.placing.policies import LRU, SPARK, STATIC  # noqa: E402
from engine.placing.policy import RECENT_TOKENS, USE, Rule  # noqa: E402
from engine.placing.simulate import Recording, roots  # noqa: E402
from spark.daemon.client import Deadlines  # noqa: E402
from spark.pipeline import replay  # noqa: E402
from spark.pipeline.tokens import opened  # noqa: E402
from spark.results import write_json  # noqa: E402

MEMORIES = (0, 4, 5, 6, 7, 8)
BUCKETS = ((4, 32), (8, 64), (16, 256))
PRIORS = (0.3, 1.0)
Int64s = NDArray[np.int64]


def record(model: Path, given: Path, device: str, max_tokens: int | None) -> RoutingTrace:
    """The routing of a set; a trace folder is read as it is."""
    with open_model(model) as file:
        model_id = file.model_id
    if given.is_dir():
        return read_routing(given, model_id)
    config = EngineConfig(model, device=device)  # type: ignore[arg-type]
    with (
        tempfile.TemporaryDirectory(prefix="spark-policies-") as folder,
        opened(model, given, lambda *_: None) as file,
        replay.open_daemon(config, Deadlines(ready_s=300), lambda *_: None) as client,
    ):
        read = 0
        for window in file:
            if max_tokens is not None and read >= max_tokens:
                break
            read += len(window.tokens)
            replay.score(client, window, trace_dir=Path(folder))
        assert part_paths(Path(folder))
        return read_routing(Path(folder), model_id)


# --- what was tried -----------------------------------------------------------------------------------


class Bucket:
    """A resident expert's score gains `gain` a use, loses one a step, and is `cap` at most; gone with its slot."""

    def __init__(self, n_expert: int, gain: int, cap: int) -> None:
        self.score = np.zeros(n_expert, np.int64)
        self.gain, self.cap = gain, cap

    def step(self, clock: int, uses: Int64s, resident: NDArray[np.bool_]) -> Int64s:
        """What each expert's place is worth now; of those not resident, what they bid for one."""
        used = (uses > 0) & resident
        self.score[used] = np.minimum(np.maximum(self.score[used], clock) + self.gain, clock + self.cap)
        return np.where(resident, self.score, clock + self.gain + 1)

    def enter(self, clock: int, expert: int) -> None:
        """It begins as if it had been used once."""
        self.score[expert] = clock + min(self.gain, self.cap)


class WarmedHeat:
    """Heat as in docs/residency.md, and on top of it `weight` times what the profile's routing would make it."""

    def __init__(self, counts: Int64s, n_used: int, memory: int, weight: float) -> None:
        self.heat = np.zeros(counts.size, np.int64)
        expected = (n_used << memory) * USE * counts / max(1, counts.sum())  # what its heat would settle at
        self.prior = np.rint(weight * expected).astype(np.int64)
        self.memory = memory

    def step(self, clock: int, uses: Int64s, resident: NDArray[np.bool_]) -> Int64s:
        """As of `Bucket`."""
        self.heat += uses * USE - (self.heat >> self.memory)
        return self.heat + self.prior

    def enter(self, clock: int, expert: int) -> None:
        """Heat is of experts, not of slots."""


def tried(
    trace: RoutingTrace, placed: Placement, rule_of: Callable[[int], Bucket | WarmedHeat]
) -> tuple[Int64s, Int64s]:
    """Misses and moves of each root session [R], nothing pinned; rule_of: of a layer."""
    root, names = roots(trace)
    misses, moves = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    spans = list(simulate._spans(trace, simulate.CHUNK_TOKENS))
    for layer, residents in enumerate(placed.residents):
        rule, resident = rule_of(layer), np.zeros(trace.n_expert, np.bool_)
        resident[list(residents)] = True
        free = placed.slots_per_layer[layer] - len(residents)
        clock = 0
        for begin, end, generated in spans:
            steps = [(t, t + 1) for t in range(begin, end)] if generated else [(max(begin, end - RECENT_TOKENS), end)]
            for first, last in steps:
                clock += 1
                uses = np.bincount(trace.experts[first:last, layer].ravel(), minlength=trace.n_expert)
                worth = rule.step(clock, uses, resident)
                missing = np.flatnonzero((uses > 0) & ~resident)
                if generated:
                    misses[root[first]] += missing.size
                if not missing.size:
                    continue
                missing = missing[np.lexsort((missing, -uses[missing], -worth[missing]))]
                victims = np.flatnonzero(resident & (uses == 0))
                victims = victims[np.argsort(worth[victims], kind="stable")].tolist()
                for enters in missing.tolist():
                    if free:
                        free -= 1
                    elif victims and worth[enters] > worth[victims[0]]:
                        resident[victims.pop(0)] = False
                    else:
                        break
                    resident[enters] = True
                    rule.enter(clock, enters)
                    if generated:
                        moves[root[first]] += 1
    return misses, moves


# --- the table ----------------------------------------------------------------------------------------


def judge(
    name: str, trace: RoutingTrace, counts: Int64s, choices: dict[float, Choice], sizes: list[int], with_tried: bool
) -> list[dict[str, Any]]:
    """A row for each rule at each residency on one set."""
    recording, n_used = Recording(trace), trace.experts.shape[2]
    kept = np.flatnonzero(recording.tokens)
    draws = Draws(recording.tokens[kept])
    rows = []
    for pct, choice in choices.items():
        budget = placement.residency_budget(trace.n_expert, sizes, pct)
        open_slots = evidence.place(counts, sizes, budget, n_used, Candidate(1.0, policy.DEFAULT))
        found: list[tuple[str, Int64s, Int64s | None]] = []

        def engine(label: str, placed: Placement, rule: Rule, found: list[Any] = found) -> None:
            result = recording.replay(placed, rule)
            found.append((label, result.root_misses, result.root_moves))

        engine(LRU.name, placement.lru(trace.n_expert, sizes, budget), LRU.rule)
        for label, candidate in (
            (STATIC.name, Candidate(0.0, STATIC.rule)),
            (f"{SPARK.name}: {choice.words}", Candidate(choice.cache_fraction, Rule(choice.memory))),
        ):
            engine(label, evidence.place(counts, sizes, budget, n_used, candidate), candidate.rule)
        for memory in MEMORIES:
            engine(f"memory {memory}", open_slots, Rule(memory))
        for share in (0.25, 0.5):
            candidate = Candidate(share, policy.DEFAULT)
            label = f"memory {policy.DEFAULT.memory}, {1 - share:.0%} pinned"
            engine(label, evidence.place(counts, sizes, budget, n_used, candidate), candidate.rule)
        engine("default, no profile", placement.lru(trace.n_expert, sizes, budget), policy.DEFAULT)
        if with_tried:
            for gain, cap in BUCKETS:
                made = tried(trace, open_slots, lambda _, g=gain, c=cap: Bucket(trace.n_expert, g, c))
                found.append((f"bucket {gain}/{cap} (tried)", *made))
            for weight in PRIORS:
                made = tried(trace, open_slots, lambda i, w=weight: WarmedHeat(counts[i], n_used, 6, w))
                found.append((f"memory 6 + {weight:g} profile (tried)", *made))
        bound = simulate.belady(trace, sizes, budget)
        if bound.root_misses is not None:
            found.append(("belady", bound.root_misses, None))
        lru = found[0][1][kept]
        for label, missed, moved in found:
            figure, more = draws.per_token(missed[kept]), draws.against(missed[kept], lru)
            rows.append({
                "set": name, "residency_pct": pct, "rule": label, "misses_per_token": figure.value,
                "misses_low": figure.low, "misses_high": figure.high, "against_lru_pct": 100 * more.value,
                "against_lru_low": 100 * more.low, "against_lru_high": 100 * more.high,
                "moves_per_token": None if moved is None else float(moved.sum() / draws.tokens.sum()),
                "generated_tokens": int(draws.tokens.sum()), "sessions": int(draws.tokens.size),
            })  # fmt: skip
            note(
                f"{name} {pct:3g}% {label:34s} {figure.value:7.3f} ({figure.low:.3f} to {figure.high:.3f})  "
                f"{100 * more.value:+6.1f}% ({100 * more.low:+.1f} to {100 * more.high:+.1f})"
            )
    return rows


def common_roots(one: RoutingTrace, other: RoutingTrace) -> list[str]:
    """Root sessions that two sets share: what is judged by the sessions that it was made from says nothing."""
    return sorted({*roots(one)[1]} & {*roots(other)[1]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--choose-on", type=Path, required=True, metavar="SET")
    parser.add_argument("--judge-on", type=Path, required=True, action="append", metavar="SET")
    parser.add_argument("--residency", default="10,30,60", help="percentages of the expert bytes")
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    parser.add_argument("--max-tokens", type=int, help="of each set")
    parser.add_argument("--no-tried", action="store_true", help="leave out the rules that the engine does not have")
    json_option(parser)
    o = parser.parse_args()
    percents = parse_list(o.residency)
    chosen_on = record(o.model, o.choose_on, o.device, o.max_tokens)
    sizes = [1] * len(chosen_on.layers)  # experts of one size: what is compared is rules, not budgets
    choices = {choice.residency_pct: choice for choice in evidence.choose(chosen_on, sizes, percents)}
    if not choices:
        sys.exit(f"{o.choose_on}: fewer than {evidence.MIN_ROOTS} sessions generate tokens")
    rows = []
    for given in o.judge_on:
        trace = record(o.model, given, o.device, o.max_tokens)
        if shared := common_roots(chosen_on, trace):
            sys.exit(f"{given}: {len(shared)} of its sessions are among those to choose on, {shared[0]!r} first")
        rows += judge(given.stem, trace, chosen_on.counts(), choices, sizes, not o.no_tried)
    if o.json:
        write_json(o.json, {"model": o.model.name, "chosen_on": o.choose_on.stem, "rows": rows})


if __name__ == "__main__":
    main()
