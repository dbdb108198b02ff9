"""Guessed experts, counted: what guesses find of the experts that are missing, and what they waste, in real decoding.

    python benchmarks/guesses.py --json data/results/guesses.json

The bundled model: pre-gates are trained by `spark train-pregate` on the sample sessions that are not held out, and what
it says of them is kept. Then beginnings of held-out sessions are decoded on the CPU backend, greedily, under the policy
`spark` without a profile, once alone and once with guesses counted beside every step: tokens and slots have to be the
same. Nothing is timed: on a CPU there is no link that a guess could hide.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note, parse_list  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.pipeline import NANO, SAMPLES, command  # noqa: E402
from engine.formats import pregate as pregates  # noqa: E402
from engine.formats.pregate import PregateModel  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.ground.protocol import Generate, Tokens  # noqa: E402
from engine.placing.policies import SPARK  # noqa: E402
from engine.running.guessing import Guessing, Way  # noqa: E402
from engine.serving.scheduler import Engine  # noqa: E402
from spark.pipeline.tokens import read_tokens  # noqa: E402
from spark.results import write_json  # noqa: E402

SOURCES = (("mlp", 0), ("mlp", 1), ("linear", 1), ("router", 0), ("router", 1), ("router", 2), ("previous", 1))
RULES = ((1, 0.0), (2, 0.0), (4, 0.0), (4, 0.3), (4, 0.5), (4, 0.8))  # experts a layer, and the least chance
WAYS = tuple(
    Way(source, ahead, budget, threshold)
    for source, ahead in SOURCES
    for budget, threshold in RULES
    if source != "previous" or not threshold
)
OF_DRAFTS = tuple(Way("draft", 0, budget) for budget in (1, 2, 4))
DRAWS = 2000
Prompt = tuple[int, ...]
Int64s = NDArray[np.int64]


def prepare(folder: Path, max_tokens: int) -> tuple[Path, dict[str, Any]]:
    """Train pre-gates as a user would; the file, and what is said of it. Held-out sessions are beside it."""
    logs = ["--claude-dir", SAMPLES / "claude", "--codex-dir", SAMPLES / "codex", "--test-frac", "0.3"]
    command("extract-sessions", "--out-dir", folder, *logs)
    for name in ("train", "test"):
        command("tokenize", NANO, folder / f"{name}.jsonl", "--out", folder / f"{name}.parquet")
    trace, out = folder / "trace", folder / "pregate.safetensors"
    command("calibrate", NANO, folder / "train.parquet", "--out", folder / "profile.csv", "--trace", trace, "--hidden",
            "--max-tokens", str(max_tokens))  # fmt: skip
    _, report = command("train-pregate", NANO, trace, "--out", out)
    return out, report


def prompts_of(path: Path, n: int) -> list[Prompt]:
    """Beginnings of sessions, each ending where the model would speak, of many lengths; one a window at most."""
    found = []
    for i, window in enumerate(read_tokens(path)):
        ends = np.flatnonzero(np.diff(window.generated.astype(np.int8)) == 1) + 1
        if len(ends):
            end = int(ends[i % len(ends)])
            length = min(end, 60 + 53 * i % 700)
            found.append(tuple(window.tokens[end - length : end].tolist()))
    if len(found) < n:
        raise SystemExit(f"{len(found)} held-out prompts, expected {n}")
    return [found[i] for i in np.linspace(0, len(found) - 1, n).astype(int)]


def decode(engine: Engine, prompts: list[Prompt], n: int, watching: Guessing | None) -> tuple[list[list[int]], Int64s]:
    """What is said, and by prompt and way what was counted: guesses, useful ones, misses, wasted bytes."""
    engine.loaded.decoder.guessing = engine.loaded.decoder.forecast = watching
    said, counted = [], []
    for i, prompt in enumerate(prompts):
        engine.submit(Generate(i, prompt, n, stop_tokens=()))
        events = []
        while engine.busy:
            events += engine.step()
        said.append([t for e in events if isinstance(e, Tokens) for t in e.tokens])
        if watching is not None:
            totals = [watching.totals(way) for way in watching.records]
            counted.append([[t["made"], t["useful"], t["misses"], t["wasted_bytes"]] for t in totals])
    return said, np.diff(np.array(counted, np.int64), axis=0, prepend=0) if counted else np.zeros((0, 0, 4), np.int64)


def measure(
    percent: float, prompts: list[Prompt], n: int, path: Path, ways: tuple[Way, ...] = WAYS, draft: str = "off"
) -> list[dict[str, Any]]:
    """A row for each way at a residency. With drafts, whose number time decides, slots go their own way each time."""
    config = EngineConfig(
        NANO, device="cpu", policy=SPARK.name, residency_pct=percent, ctx_tokens=2048, draft=draft, prefix_gib=0.0
    )
    alone, watched = Engine(config), Engine(config)
    r = watched.loaded
    c, sizes = r.source.config, [sum(e.part_bytes) for e in r.residency.experts]
    model = PregateModel(r.source.file.model_id, c.moe_layers, c.n_embd, c.n_expert, c.n_expert_used)
    watching = Guessing(
        ways, r.source.file, c.moe_layers, c.n_expert_used, r.residency, sizes, pregates.read(path, model)
    )
    plain, _ = decode(alone, prompts, n, None)
    said, counted = decode(watched, prompts, n, watching)
    slots = [engine.loaded.residency.state for engine in (alone, watched)]
    tokens = sum(len(one) - 1 for one in said)  # the first is drawn from a step of the prompt
    names = ("slot_of", "expert_of", "heat", "clock", "counts", "hits", "misses")
    same_slots = all(np.array_equal(*(getattr(state, name) for state in slots)) for name in names)
    draws = np.random.default_rng(0).integers(0, len(prompts), (DRAWS, len(prompts)))
    rows = []
    for w, way in enumerate(ways):
        of = counted[:, w]
        made, useful, misses, wasted_bytes = of.sum(axis=0).tolist()
        drawn = of[draws].sum(axis=1)
        row = {"residency_pct": percent, "source": way.source, "ahead": way.ahead, "budget": way.budget,
               "threshold": way.threshold, "guesses": made, "useful": useful, "misses": misses,
               "same_tokens": said == plain, "same_slots": same_slots, "tokens": tokens, "draft": draft,
               "steps": int(watching.records[way].steps.max())}  # fmt: skip
        for name, part, whole, total in (("precision", useful, made, 0), ("recall", useful, misses, 2)):
            shares = drawn[:, 1] / np.maximum(1, drawn[:, total])
            low, high = np.quantile(shares, (0.025, 0.975)).tolist()
            row[name] = {"value": part / max(1, whole), "low": low, "high": high}
        for name, total in (("misses", misses), ("useful", useful), ("guesses", made), ("wasted_bytes", wasted_bytes)):
            row[f"{name}_per_token"] = total / tokens
        rows.append(row)
        note(
            f"{percent:3g}% {way.source:8s} +{way.ahead} {way.budget} above {way.threshold:.0%}: precision "
            f"{row['precision']['value']:.1%}, recall {row['recall']['value']:.1%} of {misses} misses"
        )
    alone.close()
    watched.close()
    if said != plain or not (same_slots or draft != "off"):
        raise SystemExit("counting changed a token or a slot; that must never happen")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--residency", default="10,30,60", help="percentages of the expert bytes")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--generate", type=int, default=256, help="tokens after each prompt")
    parser.add_argument("--max-tokens", type=int, default=60_000, help="of the trace that pre-gates are trained on")
    json_option(parser)
    o = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="spark-guesses-") as folder:
        path, report = prepare(Path(folder), o.max_tokens)
        prompts = prompts_of(Path(folder) / "test.parquet", o.prompts)
        for percent in parse_list(o.residency):
            rows += measure(percent, prompts, o.generate, path)
            rows += measure(percent, prompts, o.generate, path, OF_DRAFTS, "lookup")
    trained = {key: report[key] for key in ("guesses", "train_tokens", "held_out_tokens", "held_out_sessions")}
    if o.json:
        write_json(
            o.json,
            {"model": NANO.name, "prompts": o.prompts, "generate": o.generate, "trained": trained, "rows": rows},
        )


if __name__ == "__main__":
    main()
