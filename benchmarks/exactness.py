"""Tokens at every residency, against those of a model that is wholly resident; CUDA against the CPU backend.

On the reference model: beginnings of held-out sessions, greedy and sampled, under every policy. On a full-shape model,
whose text means nothing: long prompts of random tokens. A slot is filled with NaN before it is filled again. With the
CPU backend's expert choices imposed, the logits of both backends are compared token by token.

    python benchmarks/exactness.py [FULL_SHAPE.gguf] --json data/results/exactness.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from engine.formats.profile import Profile  # noqa: E402
from engine.formats.profile import save as save_profile  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.ground.protocol import Generate, Tokens  # noqa: E402
from engine.ground.sampling import Sampling  # noqa: E402
from engine.placing import policies  # noqa: E402
from engine.running.loaded import Loaded, load  # noqa: E402
from engine.running.stepping import Span  # noqa: E402
from engine.serving.scheduler import Engine  # noqa: E402
from spark.extract import ExtractOptions, extract  # noqa: E402
from spark.pipeline.tokens import read_tokens, tokenize  # noqa: E402
from spark.results import write_json  # noqa: E402

NANO = ROOT / "data" / "nano" / "nano.gguf"
SAMPLED = Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=11)
Prompt = tuple[int, ...]


def held_out_prompts(folder: Path, n: int) -> list[Prompt]:
    """Beginnings of held-out sessions, each ending where the model would speak, of many lengths."""
    samples = ROOT / "data" / "sessions"
    extract(ExtractOptions(folder, "both", samples / "claude", samples / "codex", 0.4), lambda a, b: None)
    tokenize(NANO, folder / "test.jsonl", folder / "test.parquet", 1024)
    prompts: dict[Prompt, None] = {}
    for window in read_tokens(folder / "test.parquet"):
        begins = np.flatnonzero(np.diff(window.generated.astype(np.int8)) == 1) + 1
        for end in begins.tolist():
            length = min(end, 40 + 53 * len(prompts) % 700)
            prompts[tuple(window.tokens[end - length : end].tolist())] = None
    found = list(prompts)
    if len(found) < n:
        raise SystemExit(f"{len(found)} held-out prompts, expected {n}")
    return [found[i] for i in np.linspace(0, len(found) - 1, n).astype(int)]


def tokens_of(
    config: EngineConfig, requests: Sequence[tuple[Prompt, Sampling]], n: int
) -> tuple[list[list[int]], dict[str, int]]:
    """What is generated for each request; how many experts were missed, were the CPU's or divided, and were guessed."""
    engine = Engine(config)
    engine.warm_up()
    found = []
    for i, (prompt, sampling) in enumerate(requests):
        engine.submit(Generate(i, prompt, n, sampling, stop_tokens=()))
        events = []
        while engine.busy:
            events += engine.step()
        found.append([t for e in events if isinstance(e, Tokens) for t in e.tokens])
        assert len(found[-1]) == n, events[-1]
    stats = engine.stats()
    engine.close()
    came = {
        "misses": int(stats["misses"]), "of the CPU": int(stats["cpu_experts"].get("computed", 0)),
        "divided": int(stats["cpu_experts"].get("divided", 0)),
        "guessed": int(stats["guesses"].get("useful", 0)), "guesses": int(stats["guesses"].get("made", 0)),
    }  # fmt: skip
    return found, came


def compare(name: str, base: EngineConfig, others: list[dict[str, Any]], requests: Any, n: int) -> list[dict[str, Any]]:
    expected, *_ = tokens_of(base, requests, n)
    rows = []
    for options in others:
        found, came = tokens_of(EngineConfig(**{**_fields(base), **options}), requests, n)
        same = sum(a == b for a, b in zip(found, expected, strict=True))
        row = {
            "model": name, "policy": options["policy"], "residency_pct": options["residency_pct"],
            "requests": len(requests), "identical": same, "tokens_each": n, **came,
            "prompt_tokens": sorted({len(p) for p, _ in requests}),
        }  # fmt: skip
        rows.append(row)
        note(f"{name} {row['policy']} {row['residency_pct']:g}%: {same} of {len(requests)} identical, {came}")
    return rows


def _fields(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__}


def against_the_cpu(prompt: Prompt, folder: Path, device: str) -> dict[str, Any]:
    """NMSE of logits with the CPU's choices imposed, and how often the GPU's own choices agree."""
    tokens = np.array(prompt, np.int32)

    def run(loaded: Loaded) -> tuple[np.ndarray, np.ndarray]:
        sequence, logits, experts = loaded.kv.sequence(), [], []
        for token in tokens:
            result = loaded.steps.run([Span(sequence, np.array([token], np.int32), np.ones(1, bool), (0,))])
            logits.append(result.logits[0].copy())
            experts.append(result.experts[:, 0].copy())
        loaded.close()
        return np.stack(logits), np.stack(experts)

    expected, choices = run(load(EngineConfig(NANO, device="cpu")))
    _, own = run(load(EngineConfig(NANO, device=device)))
    np.save(folder / "choices.npy", choices)
    found, _ = run(load(EngineConfig(NANO, device=device, replay=folder / "choices.npy")))
    row = {
        "tokens": len(tokens),
        "logits_nmse": float(((found - expected) ** 2).sum() / (expected**2).sum()),
        "routing_agreement": float((np.sort(own, -1) == np.sort(choices, -1)).mean()),
    }
    note(f"against the CPU: logits NMSE {row['logits_nmse']:.2e}, routing agreement {row['routing_agreement']:.4f}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("full_shape", type=Path, nargs="?", metavar="FULL_SHAPE.gguf")
    json_option(parser)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48, help="generated for each prompt")
    parser.add_argument("--lengths", default="4096,16384,32000", help="of the long prompts")
    parser.add_argument("--residency", default="10,30,60")
    parser.add_argument("--cpu-experts", default="off", help="of the full shape, with fixed slots: auto, threads")
    parser.add_argument("--guess", default="off", help="on: missing experts are guessed where not all are resident")
    o = parser.parse_args()
    percents = [float(p) for p in o.residency.split(",")]
    report: dict[str, Any] = {"rows": []}
    with tempfile.TemporaryDirectory(prefix="spark-exactness-") as name:
        folder = Path(name)
        prompts = held_out_prompts(folder, o.prompts)
        profile = folder / "profile.csv"
        counts = (np.random.default_rng(3).pareto(1.0, (6, 32)) * 1000).astype(np.int64)
        save_profile(Profile(counts, n_expert_used=4), profile)
        requests = [(p, s) for p in prompts for s in (Sampling(), SAMPLED)]
        base = EngineConfig(NANO, device=o.device, ctx_tokens=2048, chunk_tokens=512, poison=True)
        others = [
            {"policy": p.name, "residency_pct": percent, "profile": profile if p.by_profile else None, "guess": o.guess}
            for percent in percents
            for p in policies.POLICIES
            if not p.whole
        ]
        report["rows"] += compare("spark-nano", base, others, requests, o.tokens)
        if o.device == "cuda":
            report["cpu"] = against_the_cpu(prompts[-1], folder, o.device)
    if o.full_shape:
        lengths = [int(n) for n in o.lengths.split(",")]
        rng = np.random.default_rng(5)
        long = [(tuple(rng.integers(0, 150_000, n).tolist()), Sampling()) for n in lengths]
        base = EngineConfig(
            o.full_shape, device=o.device, ctx_tokens=max(lengths) + o.tokens, chunk_tokens=4096, poison=True,
            cpu_experts=o.cpu_experts,  # of the resident model, too: by it a prompt has short rows
        )  # fmt: skip
        others = [{"policy": policies.LRU.name, "residency_pct": percent, "guess": o.guess} for percent in percents]
        if o.cpu_experts != "off":  # with plain LRU all that misses enters a slot
            fixed = {"policy": policies.UNIFORM.name, "cpu_experts": o.cpu_experts, "guess": o.guess}
            others += [fixed | {"residency_pct": percent} for percent in percents]
        report["rows"] += compare(o.full_shape.stem, base, others, long, o.tokens)
    if o.json:
        write_json(o.json, report)
    if any(row["identical"] != row["requests"] for row in report["rows"]):
        raise SystemExit("some tokens depend on residency")


if __name__ == "__main__":
    main()
