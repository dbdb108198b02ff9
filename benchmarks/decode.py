"""Decode speed through the daemon: all resident at two depths, and as a function of the share of misses.

    python benchmarks/full_shape.py qwen3-30b-a3b model.gguf
    python benchmarks/decode.py model.gguf --json data/results/decode.json

Every request has a random prompt of its own; the first of each kind warms up and is not reported. Rates are the
daemon's own timing of the tokens after the first. The curve over misses runs at --residency percent with fixed slots
(policy `uniform`, no cache) and imposed routing (docs/routing-model.md): one array holds a stretch for each request,
and the misses that the daemon reports for each layer must be those of that stretch, or the run fails. Beside the
measured time stands the line t0 + missed bytes / PCIe rate: what a system would take that overlaps nothing.
With several --cpu-experts, as `off,auto`, or --guesses, as `off,0.83:0.45` (the share of misses that are guessed a
layer ahead, and how many of the guesses are right), the curve is measured with each. Each row has its share of the
speed of the first curve at no misses, which is that of all resident, and the tokens have to be the same.

The last part replays sessions of the model of routing, one a request, under real policies at several residencies: plain
LRU, a profile's placement that stays, and what that profile's evidence says. Profile and evidence are of other sessions
and made as `spark calibrate` makes them. The misses are those that the policy made, not ones that were asked for.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.driving import (
    Prompts,
    Sample,
    Shape,
    generate,
    note,
    open_checked,
    parse_list,
    settings,
    shape_of,
    spread,
)
from benchmarks.figures import json_option
from benchmarks.routing import Routing, guessed, imposed, missed
from engine.formats import profile as profiles
from engine.formats.gguf import open_model
from engine.formats.profile import Profile
from engine.ground.config import EngineConfig
from engine.ground.kv_types import KV_TYPES
from engine.ops.cuda.landing import FIRST_TARGET, SLOTS
from engine.placing import evidence, placement, simulate
from engine.placing.policies import ALL, UNIFORM, find
from spark.daemon.client import DaemonClient
from spark.pipeline.ladder import place
from spark.results import write_json

RATES_PCT = "0,1,2,5,6.6,10,20,40"
PCIE_GB_PER_S = 51.4  # zero-copy reads, measured on the machine of the published figures
WARM_UPS = 2
CALIBRATION_SESSIONS = 12


def measure(client: DaemonClient, prompts: Prompts, depth: int, n_tokens: int, runs: int, warm_ups: int) -> Any:
    """Requests at one depth; the first `warm_ups` are left out."""
    return [generate(client, prompts.next(depth), n_tokens) for _ in range(warm_ups + runs)][warm_ups:]


def row_of(samples: list[Sample], depth: int) -> dict[str, Any]:
    return {
        "depth_tokens": depth,
        "generated_tokens": samples[0].done.usage.completion_tokens,
        "decode_tokens_per_s": spread([s.decode_tokens_per_s for s in samples]),
        "prefill_tokens_per_s": spread([s.prefill_tokens_per_s for s in samples]),
    }


def all_resident(config: EngineConfig, prompts: Prompts, depths: list[int], n_tokens: int, runs: int) -> Any:
    """Rows of the all-resident runs, and the daemon's settings."""
    rows = []
    with open_checked(config) as client:
        for depth in depths:
            samples = measure(client, prompts, depth, n_tokens, runs, WARM_UPS if not rows else 1)
            rows.append(row_of(samples, depth))
            rate = rows[-1]["decode_tokens_per_s"]
            note(f"all resident, depth {depth}: {rate['median']:.1f} ({rate['min']:.1f} to {rate['max']:.1f}) tokens/s")
        return rows, settings(client)


# --- the curve ----------------------------------------------------------------------------------------


class Stretches:
    """One array of imposed choices, a stretch for each request in the order in which they are sent.

    resident: bool [L, E]. A request that generates n tokens decodes n - 1 steps: the first comes from the prompt.
    """

    def __init__(self, resident: NDArray[np.bool_], n_used: int, rates: list[float], steps: int) -> None:
        made = [imposed(resident, steps, n_used, rate, seed) for seed, rate in enumerate(rates)]
        self.choices = np.concatenate(made)
        self._misses = missed(self.choices, resident)
        self._steps = steps
        self._at = 0

    def guesses(self, resident: NDArray[np.bool_], recall: float, precision: float) -> NDArray[np.int32]:
        """Guesses for all of them, of the layers that there can be any for; each stretch has its own rate."""
        parts = [self.choices[at : at + self._steps] for at in range(0, len(self.choices), self._steps)]
        made = [guessed(part, resident, recall, precision, SLOTS, seed) for seed, part in enumerate(parts)]
        found = np.concatenate(made)
        found[:, :FIRST_TARGET] = -1
        return found

    def check(self, reported: list[int]) -> None:
        """Raise unless the misses reported by layer are those of the next stretch."""
        expected = self._misses[self._at : self._at + self._steps].sum(axis=0).tolist()
        if reported != expected:
            n = len(self._misses)
            sums = np.cumsum(np.concatenate([np.zeros_like(self._misses[:1]), self._misses, self._misses]), axis=0)
            windows = sums[self._steps : self._steps + n] - sums[:n]
            found = np.flatnonzero((windows == reported).all(axis=1)).tolist()
            where = f"those of the steps from {found[0]}" if found else "of no stretch of the array"
            raise SystemExit(
                f"the daemon did not follow the imposed routing: expected {sum(expected)} misses, those of the steps "
                f"from {self._at}; it reports {sum(reported)}, {where}"
            )
        self._at = (self._at + self._steps) % len(self.choices)


def curve(
    config: EngineConfig, shape: Shape, prompts: Prompts, rates: list[float], depth: int, n_tokens: int, runs: int,
    pcie_gb_per_s: float, guesses: str = "off",
) -> Any:  # fmt: skip
    """Rows over the share of misses, the daemon's settings, and the tokens; config: policy `uniform`, no replay yet.

    guesses: `off`, or as "0.83:0.45" the recall and the precision of those that are imposed.
    """
    budget = placement.residency_budget(shape.n_expert, shape.expert_bytes, config.residency_pct)
    slots = placement.uniform(shape.n_expert, shape.expert_bytes, budget).slots_per_layer
    resident = np.arange(shape.n_expert) < np.array(slots)[:, None]  # `uniform` pins those of lowest index
    order = [0.0] * WARM_UPS + [rate for rate in rates for _ in range(runs)]
    stretches = Stretches(resident, shape.n_expert_used, order, n_tokens - 1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="spark-decode-") as folder:
        file = Path(folder) / "replay.npy"
        np.save(file, stretches.choices.astype(np.int32))
        config = replace(config, replay=file)
        if guesses != "off":
            guesses_file = Path(folder) / "guesses.npy"
            np.save(guesses_file, stretches.guesses(resident, *map(float, guesses.split(":"))))
            config = replace(config, guess="on", replay_guesses=guesses_file)
        with open_checked(config) as client:
            if tuple(client.ready.info["slots_per_layer"]) != slots:
                raise SystemExit("the daemon places other slots than the curve is made for")
            samples: list[Sample] = []
            handed: list[dict[str, float]] = []
            for i, rate in enumerate(order):
                before = client.stats()
                sample = generate(client, prompts.next(depth), n_tokens)
                after = client.stats()
                handed.append(handed_over(before, after) | landed(before, after))
                stretches.check(list(sample.done.residency["misses_by_layer"]))
                samples.append(sample)
                if i >= WARM_UPS and (i - WARM_UPS) % runs == runs - 1:
                    summed = {name: sum(each[name] for each in handed[-runs:]) for name in handed[-1]}
                    rows.append(curve_row(samples[-runs:], rate, shape, depth) | summed)
                    if (found := after.get("cpu_experts") or {}).get("why"):
                        rows[-1]["cpu_off"] = f"{found['state']}: {found['why']}"
            made = settings(client)
    base = next((row["ms_per_token"]["median"] for row in rows if row["asked_miss_pct"] == 0), None)
    for row in rows:
        row["cpu_experts"], row["guesses"] = config.cpu_experts, guesses
        if base is not None:
            row["line_ms"] = base + 1e3 * row["missed_bytes_per_token"] / (1e9 * pcie_gb_per_s)
            row["ratio"] = row["ms_per_token"]["median"] / row["line_ms"]
        rate, ms = row["decode_tokens_per_s"]["median"], row["ms_per_token"]["median"]
        line = f", {row['ratio']:.2f} of the line" if "ratio" in row else ""
        to_cpu = (
            f", {row['cpu_computed']:.0f} to the CPU, {row['cpu_divided']:.0f} divided" if "cpu_computed" in row else ""
        )
        came = f", {row['guess_useful']} of {row['guess_made']} guesses right" if "guess_made" in row else ""
        note(f"{row['miss_pct']:5.2f}% missed: {rate:.1f} tokens/s, {ms:.3f} ms{line}{to_cpu}{came}")
    return rows, made, [sample.tokens for sample in samples]


def handed_over(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """What the CPU computed of a request's misses, what was taken back, and seconds that were waited; or nothing."""
    a, b = before.get("cpu_experts") or {}, after.get("cpu_experts") or {}
    return {f"cpu_{name}": b[name] - a[name] for name in ("computed", "divided", "taken_back", "waited_s") if b}


def landed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """What came of a request's guesses, or nothing."""
    names = "made", "useful", "misses", "useful_bytes", "wasted_bytes"
    a, b = before.get("guesses") or {}, after.get("guesses") or {}
    return {f"guess_{name}": b[name] - a[name] for name in names if b}


def curve_row(samples: list[Sample], rate: float, shape: Shape, depth: int) -> dict[str, Any]:
    misses = np.sum([s.done.residency["misses_by_layer"] for s in samples], axis=0)
    hits = sum(s.done.residency["hits"] for s in samples)
    steps = sum(s.done.usage.completion_tokens - 1 for s in samples)
    return {
        "asked_miss_pct": 100 * rate,
        "miss_pct": 100 * int(misses.sum()) / (int(misses.sum()) + hits),
        "missed_bytes_per_token": float(misses @ np.array(shape.expert_bytes)) / steps,
        "ms_per_token": spread([1e3 / s.decode_tokens_per_s for s in samples]),
        **row_of(samples, depth),
    }


# --- policies -----------------------------------------------------------------------------------------


def policies(
    config: EngineConfig, shape: Shape, prompts: Prompts, names: list[str], percents: list[float],
    n_tokens: int, runs: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each policy at each residency, serving sessions of the model of routing.

    config: `residency_pct` is set here. A prompt is three tokens, so that hardly anything but the sessions moves the
    slots. The first request warms up.
    """
    routing = Routing(len(shape.moe_layers), shape.n_expert, shape.n_expert_used)
    train = routing.trace(CALIBRATION_SESSIONS)
    test = routing.trace(1 + runs, n_tokens - 1, first=CALIBRATION_SESSIONS)
    counts = np.zeros((shape.n_layer, shape.n_expert), np.int64)
    counts[list(shape.moe_layers)] = train.counts()
    choices = evidence.choose(train, shape.expert_bytes, percents)
    for choice in choices:
        about = f"{choice.misses:.2f} misses a token (LRU {choice.lru:.2f})"
        note(f"{choice.residency_pct:g}% resident: {choice.words}, {about}")
    with open_model(config.model) as file:
        profile = Profile(counts, shape.n_expert_used, file.model_id, count="generated", choices=choices)
    rows = []
    with tempfile.TemporaryDirectory(prefix="spark-decode-") as folder:
        paths = Path(folder) / "replay.npy", Path(folder) / "profile.csv"
        np.save(paths[0], test.experts.astype(np.int32))
        profiles.save(profile, paths[1])
        for percent, name in product(percents, names):
            rung = find(name)
            made_by = paths[1] if rung.by_profile else None
            asked = replace(config, policy=name, residency_pct=percent, profile=made_by, replay=paths[0])
            with open_checked(asked) as client:
                samples = measure(client, prompts, 3, n_tokens, runs, 1)
                slots = client.ready.info["slots_per_layer"], client.ready.info["cache_slots"]
            row = curve_row(samples, 0.0, shape, 3)
            del row["asked_miss_pct"], row["prefill_tokens_per_s"]
            placed, rule, _ = place(rung, train.counts(), profile, shape.expert_bytes, shape.n_expert_used, percent)
            simulated = simulate.simulate(test, placed, rule)
            choice = profile.choice_for(percent)
            rows.append({
                "policy": name, "residency_pct": percent, **row,
                "simulated_miss_pct": 100 * (1 - simulated.hit_rate),
                "simulated_moves_per_token": float(simulated.root_moves.sum()) / len(test.experts),
                "slots": sum(slots[0]), "cache_slots": sum(slots[1]),
                "choice": choice.words if rung.by_evidence and choice is not None else None,
            })  # fmt: skip
            note(
                f"{name}, {percent:g}% resident: {row['miss_pct']:.2f}% missed, "
                f"{row['decode_tokens_per_s']['median']:.1f} tokens/s"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kv-type", default="f16", choices=KV_TYPES)
    parser.add_argument("--runs", type=int, default=5, help="measured requests of each kind")
    parser.add_argument("--tokens", type=int, default=256, help="generated by each request")
    parser.add_argument("--depths", default="512,32768", help="prompt tokens, all resident; empty: leave this out")
    parser.add_argument("--rates", default=RATES_PCT, help="percent missed; empty: leave the curve out")
    parser.add_argument("--depth", type=int, default=512, help="prompt tokens of the curve")
    parser.add_argument("--residency", type=float, default=60.0, help="percent of the expert bytes, for the curve")
    parser.add_argument("--cpu-experts", default="off", help="of the curve: off, auto, threads; a curve each")
    parser.add_argument("--guesses", default="off", help="of the curve: off, RECALL:PRECISION; a curve each")
    parser.add_argument("--policies", default="lru,static,spark", help="served with sessions; empty: leave this out")
    parser.add_argument("--policy-residency", default="20,40,60", help="percent of the expert bytes, for the policies")
    parser.add_argument("--session", type=int, default=768, help="tokens of a session under the policies")
    parser.add_argument("--pcie-gb-per-s", type=float, default=PCIE_GB_PER_S)
    o = parser.parse_args()
    shape = shape_of(o.model)
    prompts = Prompts(shape.n_vocab, seed=1)
    depths, rates = [int(d) for d in parse_list(o.depths)], [rate / 100 for rate in parse_list(o.rates)]
    report: dict[str, Any] = {
        "model": shape.name, "model_bytes": shape.file_bytes, "pcie_gb_per_s": o.pcie_gb_per_s,
    }  # fmt: skip
    common = {"model": o.model, "device": o.device, "kv_type": o.kv_type, "prefix_gib": 0.0, "draft": "off"}
    if depths:
        config = EngineConfig(**common, policy=ALL.name, ctx_tokens=max(depths) + o.tokens)
        report["all_resident"], report["all_resident_settings"] = all_resident(
            config, prompts, depths, o.tokens, o.runs
        )
        write(o.json, report)
    if rates:
        config = EngineConfig(**common, policy=UNIFORM.name, residency_pct=o.residency, ctx_tokens=o.depth + o.tokens)
        expected: list[list[int]] = []
        for cpu_experts, guesses in product(o.cpu_experts.split(","), o.guesses.split(",")):
            asked = replace(config, cpu_experts=cpu_experts)
            same = Prompts(shape.n_vocab, seed=2)  # of each curve, and so have its tokens to be
            note(f"--cpu-experts {cpu_experts}, guesses {guesses}")
            rows, made, told = curve(asked, shape, same, rates, o.depth, o.tokens, o.runs, o.pcie_gb_per_s, guesses)
            if told != (expected := expected or told):
                raise SystemExit(f"--cpu-experts {cpu_experts}, guesses {guesses} changed tokens")
            report["curve"] = shares([*report.get("curve", []), *rows])
            report.setdefault("curve_settings", made)
            if cpu_experts != "off":
                report.setdefault("cpu_experts", {})[cpu_experts] = made["cpu_experts"] or made["reasons"]
            write(o.json, report)
    if o.policies:
        config = EngineConfig(**common, ctx_tokens=o.session + 3)
        percents = parse_list(o.policy_residency)
        report["policies"] = policies(config, shape, prompts, o.policies.split(","), percents, o.session, o.runs)
        write(o.json, report)


def shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their share of the speed without misses, of the first of them."""
    rate = next((r["decode_tokens_per_s"]["median"] for r in rows if r["asked_miss_pct"] == 0), None)
    if rate is None:
        return rows
    return [row | {"share": row["decode_tokens_per_s"]["median"] / rate} for row in rows]


def write(path: Path | None, report: dict[str, Any]) -> None:
    """After each part, so that a later failure leaves what was measured."""
    if path is not None:
        write_json(path, report)


if __name__ == "__main__":
    main()
