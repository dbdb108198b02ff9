"""Replies with drafts against replies without: every token, of every family, source, residency and way to sample.

    python benchmarks/draft_identity.py --device cpu --json data/results/draft_identity.json

Tiny models of each family with random weights, a random drafter, a random block; each request carries a prediction
that is right but for every thirteenth token. Twice: *gated*, as served, but for steps that are said to take what they
take on a GPU (a tiny model's steps are all overhead); and *forced*: drafts of random lengths, right up to a random
place and wrong from there. Half of the replies of a row run alone, half beside each other. `drafted`: by the row's
source.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from engine import models  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.ground.protocol import Done, Event, Generate, Tokens  # noqa: E402
from engine.ground.sampling import Sampling  # noqa: E402
from engine.serving.scheduler import Engine  # noqa: E402
from spark.results import write_json  # noqa: E402
from tests.dflash_twin import Shape, random_drafter, write_drafter  # noqa: E402
from tests.forced_drafts import force  # noqa: E402
from tests.nextn_models import FAMILIES, block_path  # noqa: E402
from tests.tiny_models import k_quant_mix, write_tiny  # noqa: E402

RESIDENCIES = (10.0, 60.0, 100.0)
STEP_MS = (1.48, 2.25, 3.17, 4.34, 6.28, 10.15)  # of 1, 2, 4, 8, 16 and 32 tokens: Qwen3-30B-A3B's shapes on an H200
N_PROMPT, N_TOKENS = (40, 120), 48


def requests_of(rng: np.random.Generator, n: int, is_greedy: bool) -> list[Generate]:
    """Random prompts, and options that differ."""
    made = []
    for i in range(n):
        prompt = rng.integers(0, 301, int(rng.integers(*N_PROMPT))).tolist()
        sampling = Sampling() if is_greedy else Sampling(0.7 + 0.1 * (i % 3), top_p=0.95, seed=i)
        made.append(Generate(i + 1, tuple(prompt), N_TOKENS, sampling, (), logprobs=1 if i % 4 == 3 else None))
    return made


def said(engine: Engine, requests: Sequence[Generate]) -> tuple[dict[int, list[int]], list[Event]]:
    """What is generated for each; the second half of them at once."""
    events: list[Event] = []
    half = len(requests) // 2
    for group in (*([r] for r in requests[:half]), requests[half:]):
        for request in group:
            engine.submit(request)
        while engine.busy:
            events += engine.step()
    found: dict[int, list[int]] = {r.id: [] for r in requests}
    for event in events:
        if isinstance(event, Tokens):
            found[event.id] += event.tokens
    assert all(len(tokens) == N_TOKENS for tokens in found.values())
    return found, events


def predicted(request: Generate, expected: list[int]) -> Generate:
    """With a prediction in which some tokens are wrong, so that drafts of it are, too."""
    wrong = [(token + 1) % 301 if i % 13 == request.id % 13 else token for i, token in enumerate(expected)]
    return replace(request, prediction=tuple(wrong))


def gate_as_on_a_gpu(engine: Engine) -> None:
    """Let drafts pay where they would on a GPU."""
    gate = engine.loaded.drafts._gate  # type: ignore[union-attr]
    gate.begin({k: float(np.interp(1 + k, (1, 2, 4, 8, 16, 32), STEP_MS)) / 1000 for k in range(32)})
    for n in range(17):  # 0: one that is sampled
        costs = gate.costs(max(n, 1), sampled=not n)
        costs.note_plain(STEP_MS[0] / 1000, 1)
        costs.note = costs.note_plain = lambda *_: None  # type: ignore[method-assign,assignment]
    for sampled in (False, True):  # and what is followed
        costs = gate.costs(1, sampled, followed=True)
        costs.note_plain(STEP_MS[0] / 1000, 1)
        costs.note = costs.note_plain = lambda *_: None  # type: ignore[method-assign,assignment]
    engine.loaded.drafts._weigh = lambda *_: None  # type: ignore[union-attr,method-assign]
    gate.made = lambda *_: None  # type: ignore[method-assign]


def rows_of(family: str, source: str, device: str, n: int) -> list[dict[str, Any]]:
    """A row for each residency, way to sample and mode."""
    with tempfile.TemporaryDirectory(prefix="spark-drafts-") as name:
        return _rows_of(family, source, Path(name), device, n)


def _rows_of(family: str, source: str, folder: Path, device: str, n: int) -> list[dict[str, Any]]:
    path = block_path(family) if source == "mtp" else folder / f"{family}.gguf"
    if source != "mtp":
        write_tiny(path, k_quant_mix, arch=models.find(family), n_ctx_train=8192)
    rows = []
    for residency in RESIDENCIES:
        base = {"model": path, "device": device, "ctx_tokens": 640, "chunk_tokens": 64, "poison": True}
        plain = Engine(EngineConfig(**base, draft="off"))
        c = plain.loaded.source.config
        if c.n_expert:
            base |= {"policy": "lru", "residency_pct": residency}
        elif residency < 100.0:  # nothing is placed
            plain.close()
            continue
        shape = Shape(n_embd=c.n_embd, n_vocab=c.n_vocab, captured=(c.n_layer - 1, 0), window=80)
        write_drafter(folder / "d.gguf", shape, random_drafter(shape, np.random.default_rng(3)))
        draft = {"dflash": str(folder / "d.gguf")}.get(source, source)
        for is_greedy in (True, False):
            requests = requests_of(np.random.default_rng([int(residency), is_greedy]), n, is_greedy)
            expected, _ = said(plain, requests)
            for mode in ("gated", "forced"):
                engine = Engine(EngineConfig(**base, draft=draft))
                gate_as_on_a_gpu(engine)
                if mode == "forced":
                    force(engine, {r.id: [*r.tokens, *expected[r.id]] for r in requests}, seed=int(residency))
                found, events = said(engine, [predicted(r, expected[r.id]) for r in requests])
                drafts = engine.stats()["drafts"]["tokens"]
                own = drafts.get(source if mode == "gated" else "lookup", {"drafted": 0})["drafted"]
                rejected = sum(d["drafted"] - d["accepted"] for d in drafts.values())
                rows.append({
                    "family": family, "source": source if mode == "gated" else "forced", "residency_pct": residency,
                    "sampling": "greedy" if is_greedy else "sampled", "mode": mode, "replies": n,
                    "identical": sum(found[r.id] == expected[r.id] for r in requests),
                    "drafted": own, "rejected": rejected,
                    "misses": sum(e.residency["misses"] for e in events if isinstance(e, Done)),
                })  # fmt: skip
                note(" ".join(str(value) for value in rows[-1].values()))
                engine.close()
        plain.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    json_option(parser)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--replies", type=int, default=10, help="of a row")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with an engine")
    o = parser.parse_args()
    cases = [(f, s) for f in models.known() for s in ("lookup", "dflash", *(["mtp"] if f in FAMILIES else []))]
    with ProcessPoolExecutor(o.jobs, multiprocessing.get_context("spawn")) as pool:
        made = [pool.submit(rows_of, family, source, o.device, o.replies) for family, source in cases]
        rows = [row for future in made for row in future.result()]
    wrong = [r for r in rows if r["identical"] < r["replies"] or not r["drafted"] or not r["rejected"]]
    total = sum(r["replies"] for r in rows)
    note(f"{total} replies in {len(rows)} rows; {len(wrong)} in which not all are identical or nothing was rejected")
    if o.json:
        write_json(o.json, {"device": o.device, "tokens_each": N_TOKENS, "replies": total, "rows": rows})
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
