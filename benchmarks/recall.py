"""What reading a part of a context costs: logits beside those with all of it, by how blocks are chosen and how many.

    python benchmarks/recall.py --json data/results/recall.json

Held-out sessions of an agent, which quote what stands far back, go through the bundled model on the CPU backend as
prompts; their last tokens are then fed as replies are, each reading the first block, its tail, and N others, which are
chosen in the ways of benchmarks/choosing.py, the sketch that is served in others of its forms among them.

*Left out*: the share of softmax mass of the blocks that were not read, from all keys, and as the sketches estimate it:
of the served choice. Its rows must have the bits of the plain run where N is as many as there are.

With --left-out 0.05,0.1 rows read, in place of N blocks, as few as leave no more than such shares out, as is served.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.choosing import (  # noqa: E402
    BYTES,
    CHOICES,
    LAYERS,
    SKETCHES,
    Alike,
    Choice,
    Keys,
    Layers,
    Seen,
    choosing,
)
from benchmarks.driving import note, parse_list  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.kv_types import NANO, beside, held_out_windows  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.ops import F32, I32, KV_BLOCK_TOKENS, SMALL_TOKENS  # noqa: E402
from engine.running.loaded import Loaded, load  # noqa: E402
from engine.running.recall import Part, made_of  # noqa: E402
from engine.running.stepping import Span  # noqa: E402
from spark.results import write_json  # noqa: E402

CONTEXT = 4096
BLOCKS = (2, 4, 8, 16)
KVFLASH = "KVFlash"


def logits_of(loaded: Loaded, prompt: I32, n: int, part: Part | None) -> F32:
    """Logits of the last n tokens of a prompt, which read so much; the others are a prompt, remembered once read."""
    head = len(prompt) - n
    sequence, begin = loaded.resume(prompt[: head + 1])
    for first in range(begin, head, 512):
        some = prompt[first : min(first + 512, head)]
        loaded.steps.run([Span(sequence, some, np.zeros(len(some), bool))])
    loaded.prefixes.insert(sequence, prompt[:head])
    made = []
    for first in range(head, len(prompt), SMALL_TOKENS):
        some = prompt[first : first + SMALL_TOKENS]
        span = Span(sequence, some, np.zeros(len(some), bool), tuple(range(len(some))), recall=part)
        made.append(np.array(loaded.steps.run([span]).logits))
    sequence.release()
    return np.concatenate(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    json_option(parser)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64, help="at the end of each prompt, that read a part")
    parser.add_argument("--left-out", default="", help="shares of the mass, in place of numbers of blocks")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spark-recall-") as name:
        prompts = held_out_windows(Path(name), o.prompts, CONTEXT)
    options = EngineConfig(NANO, device="cpu", ctx_tokens=CONTEXT, chunk_tokens=512, draft="off", kv_recall_blocks=0)
    loaded = load(options)
    loaded.forward.ws.repeat = lambda noted, work: work()  # type: ignore[attr-defined]
    rows: list[dict[str, Any]] = []
    found: dict[tuple[str, float], list[tuple[F32, list[int]]]] = {}
    base: list[tuple[F32, list[int]]] = []
    ways: dict[str, Choice | Alike | Layers | None] = {**CHOICES, KVFLASH: None, **SKETCHES, **LAYERS}
    shares = [float(share) for share in parse_list(o.left_out)]
    seen = {(policy, n): Seen() for policy in ways for n in BLOCKS}
    if shares:
        seen = {("sketch", share): Seen() for share in shares}
    for i, prompt in enumerate(prompts):
        base.append((logits_of(loaded, prompt, o.rows, None), []))
        assert np.array_equal(base[-1][0], logits_of(loaded, prompt, o.rows, Part(CONTEXT // KV_BLOCK_TOKENS)))
        for (policy, n), of in seen.items():
            part, way = made_of(None, n) if shares else Part(int(n)), Alike() if policy == KVFLASH else ways[policy]
            if policy == KVFLASH:  # what the prompt's end asks for is to be seen again
                loaded.prefixes.clear()
            with choosing(way, int(n), Keys(), of):
                found.setdefault((policy, n), []).append((logits_of(loaded, prompt, o.rows, part), []))
        loaded.prefixes.clear()
        note(f"prompt {i + 1} of {len(prompts)}: {len(prompt)} tokens")
    loaded.close()
    for (policy, n), of in seen.items():
        made = beside(base, found[policy, n])
        row: dict[str, Any] = {
            "policy": policy,
            "bytes_share": BYTES.get(policy),
            "asked_left_out" if shares else "blocks": n,
            "read": float(np.mean(of.read)),
            "left_out": float(np.mean(of.true)),
        }
        row |= {name: made[name] for name in ("logits_nmse", "kl_nats", "likeliest_same")}
        if ways[policy] is None and policy != KVFLASH:
            ratio = np.array(of.estimated) / np.maximum(of.true, 1e-9)
            row |= {"estimated": float(np.mean(of.estimated)), "estimated_max": float(np.max(of.estimated))}
            row |= {"left_out_max": float(np.max(of.true)), "estimated_over_true": float(np.median(ratio))}
            if shares:
                row["above"] = float(np.mean(np.array(of.true) > n))
        rows.append(row)
        note(
            f"{policy} {n}: {row['read']:.1%} read, {row['left_out']:.1%} left out, NMSE {row['logits_nmse']:.2e}, "
            f"KL {row['kl_nats']:.2e}, likeliest the same {row['likeliest_same']:.2%}"
        )
    if o.json:
        write_json(o.json, {"prompts": [len(p) for p in prompts], "rows_each": o.rows, "rows": rows})


if __name__ == "__main__":
    main()
