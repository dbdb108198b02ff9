"""What summaries of blocks of keys are worth: how much of the softmax mass the blocks have that each would read.

    python benchmarks/summaries.py --json data/results/summaries.json

Held-out sessions go through the bundled model on the CPU backend. Queries of the last positions of each prompt, in
every layer and head, are compared with the keys that they see. Read anyway are the first block and the last two; of the
others, 5, 10, 20 and 50%, by each summary's estimate, for a KV head's group of query heads together. *Exact*: the same
choice by the blocks' true masses, which no summary can beat. *Recent*: the latest blocks.

*Left out*: the true share of mass in blocks that were not read. *Bound over true*: the mass that blocks which were not
read have at most, over what they have, where 10% are read. *Until certain*: the share of the blocks that are read, the
largest bound first, before no row of a group can have left out more than some share of its mass. *Until estimated*: the
same by estimates, and by the true masses; what is read is known exactly either way. A mass above its bound ends the
program. Keys that are made up to be hard (spikes, sinks, blocks that repeat, channels of very different size) go the
same way.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.kv_types import NANO, held_out_windows  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.ops import KV_BLOCK_TOKENS, cpu  # noqa: E402
from engine.placing.summaries import KINDS, Summary, best, left_out, log_sum, true_masses  # noqa: E402
from engine.running.loaded import load  # noqa: E402
from engine.running.stepping import Span  # noqa: E402
from spark.results import write_json  # noqa: E402

SHARES = (0.05, 0.1, 0.2, 0.5)
FIRST, LAST = 1, 2  # blocks that are read anyway
RATIO_SHARE = 0.1  # where bounds are compared with the truth
MOST_RATIO = 69.0  # logarithm, beyond which a ratio is no number to compare
MOST_LEFT = (0.5, 0.2, 0.1, 0.05, 0.01, 0.001)  # shares of mass that may be left out
ROUNDING = 1e-9
Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Seen:
    """Queries [rows, head_dim] of a KV head's group at one position, and the keys [B, 64, head_dim] of whole blocks."""

    q: Array
    keys: Array
    scale: float


@dataclass(slots=True)
class Tally:
    """What was found of one way to choose blocks; by share of blocks read."""

    left: dict[float, list[float]] = field(default_factory=lambda: {share: [] for share in SHARES})
    ratios: list[float] = field(default_factory=list)
    certain: dict[float, list[float]] = field(default_factory=lambda: {most: [] for most in MOST_LEFT})
    estimated: dict[float, list[tuple[float, float]]] = field(default_factory=lambda: {most: [] for most in MOST_LEFT})
    cases: int = 0

    def row(self, name: str, n_bytes: int | None, block_bytes: int) -> dict[str, Any]:
        """For the table."""
        row: dict[str, Any] = {"name": name, "cases": self.cases}
        row["bytes_share"] = None if n_bytes is None else n_bytes / block_bytes
        row["left_out"] = {
            str(share): {"mean": float(np.mean(v)), "p99": float(np.quantile(v, 0.99)), "max": float(np.max(v))}
            for share, v in self.left.items()
        }
        if self.ratios:
            row["bound_over_true"] = {
                "median": float(np.median(self.ratios)),
                "p99": float(np.quantile(self.ratios, 0.99)),
            }
            row["read_until_certain"] = {str(most): float(np.mean(read)) for most, read in self.certain.items()}
        row["read_until_estimated"] = {  # and what was left out then, most of a row: the mean
            str(most): dict(zip(("read", "left_out"), np.mean(found, axis=0).tolist(), strict=True))
            for most, found in self.estimated.items() if found
        }  # fmt: skip
        return row


def of_model(prompts: int, length: int, positions: int) -> Iterator[Seen]:
    """What attention of the bundled model sees at the last positions of prompts, every layer and KV head."""
    found: list[Seen] = []
    plain = cpu.attention

    def attention(ws: Any, q: Any, kv: Any, table: Any, sequence: Any, at: Any, scale: float, *more: Any, **also: Any):
        if len(q) == positions:
            n = int(at[0]) // KV_BLOCK_TOKENS  # whole blocks that every row sees
            slots = (table[0, :n, None] * KV_BLOCK_TOKENS + np.arange(KV_BLOCK_TOKENS)).reshape(-1)
            keys = kv.k[slots].astype(np.float64).reshape(n, KV_BLOCK_TOKENS, *kv.k.shape[1:])
            group = q.shape[1] // keys.shape[2]
            for t in range(0, positions, 4):
                for head in range(keys.shape[2]):
                    rows = q[t, head * group : (head + 1) * group].astype(np.float64)
                    found.append(Seen(rows, keys[:, :, head], scale))
        return plain(ws, q, kv, table, sequence, at, scale, *more, **also)

    with tempfile.TemporaryDirectory() as folder:
        windows = held_out_windows(Path(folder), prompts, length)
    config = EngineConfig(NANO, device="cpu", ctx_tokens=length + 64, chunk_tokens=512, prefix_gib=0.0, draft="off")
    for tokens in windows:
        loaded = load(config)
        loaded.forward.ws.repeat = lambda noted, work: work()  # type: ignore[attr-defined]
        cpu.attention = attention  # type: ignore[assignment]
        try:
            sequence, cut = loaded.kv.sequence(), len(tokens) - positions
            for begin in [*range(0, cut, 512), cut]:
                some = tokens[begin : min(begin + 512, cut) if begin < cut else len(tokens)]
                loaded.steps.run([Span(sequence, some, np.zeros(len(some), bool), ())])
        finally:
            cpu.attention = plain
            loaded.close()
        yield from found
        found.clear()


def adversarial(cases: int, seed: int) -> Iterator[Seen]:
    """Keys that summaries err on, and queries that look for one of them."""
    rng = np.random.default_rng(seed)
    for _ in range(cases):
        B, d = int(rng.integers(8, 40)), int(rng.choice([32, 64, 128]))
        keys = rng.standard_normal((B, KV_BLOCK_TOKENS, d)) * np.exp(rng.normal(0, 1.2, d))
        keys[np.arange(B), rng.integers(KV_BLOCK_TOKENS, size=B)] *= rng.choice([-15.0, 1.0, 20.0], B)[:, None]
        keys[0] *= 3.0
        keys[B // 2] = keys[B // 3]
        keys = keys.astype(np.float16).astype(np.float64)
        q = rng.standard_normal((4, d))
        q[:2] = keys[rng.integers(B, size=2), rng.integers(KV_BLOCK_TOKENS, size=2)]
        yield Seen(q * np.exp(rng.normal(0, 1)), keys, d**-0.5)


def judge(seen: Seen, tallies: dict[str, Tally]) -> None:
    """Let every way choose blocks of a case."""
    B, R = len(seen.keys), len(seen.q)
    kept = np.zeros(B, bool)
    kept[:FIRST], kept[B - LAST :] = True, True
    true = true_masses(seen.keys, seen.q, seen.scale)
    recent = np.broadcast_to(np.arange(B, dtype=np.float64), (R, B))
    ways: list[tuple[str, Array, Array | None]] = [("exact", true, None), ("recent", recent, None)]
    for kind in KINDS:
        estimated, at_most = kind.masses(kind.of(seen.keys), seen.q, seen.scale)
        if (true > at_most + ROUNDING * np.maximum(1.0, np.abs(true))).any():
            raise SystemExit(f"{kind.name}: a mass is above its bound by {float((true - at_most).max())}")
        ways.append((kind.name, estimated, at_most))
    others = B - FIRST - LAST
    for name, masses, at_most in ways:
        tally = tallies.setdefault(name, Tally())
        tally.cases += R
        for share in SHARES:
            read = best(masses, round(share * others), kept)
            left = left_out(log_sum(true[:, read]), log_sum(true[:, ~read]))
            tally.left[share] += left.tolist()
            if at_most is not None and share == RATIO_SHARE:
                over = log_sum(at_most[:, ~read]) - log_sum(true[:, ~read])
                tally.ratios += np.exp(np.minimum(over, MOST_RATIO)).tolist()
        if name == "recent":
            continue
        for most in MOST_LEFT:
            if at_most is not None:
                tally.certain[most].append(until(most, true, at_most, kept)[0])
            tally.estimated[most].append(until(most, true, masses, kept))


def until(most: float, true: Array, masses: Array, kept: Array) -> tuple[float, float]:
    """The share of the other blocks that are read, largest first, until by `masses` no row has left out more than that.

    And what was left out then in truth, most of a row.
    """
    share = np.where(kept, -np.inf, masses) - log_sum(true)[:, None]
    order = np.argsort(-share.max(axis=0), kind="stable")[: int((~kept).sum())]

    def left(n: int, of: Array) -> float:
        read = kept.copy()
        read[order[:n]] = True
        return float(left_out(log_sum(true[:, read]), log_sum(of[:, ~read])).max()) if n < len(order) else 0.0

    low, high = 0, len(order)
    while low < high:
        n = (low + high) // 2
        low, high = (low, n) if left(n, masses) <= most else (n + 1, high)
    return low / max(1, len(order)), left(low, true)


def measured(cases: Iterator[Seen], what: str) -> dict[str, Any]:
    tallies: dict[str, Tally] = {}
    head_dim = 0
    for seen in cases:
        head_dim = seen.keys.shape[2]
        judge(seen, tallies)
    sizes: dict[str, Summary] = {kind.name: kind for kind in KINDS}
    block_bytes = 2 * 2 * KV_BLOCK_TOKENS * head_dim  # keys and values in halves
    rows = [
        tally.row(name, sizes[name].n_bytes(head_dim) if name in sizes else None, block_bytes)
        for name, tally in tallies.items()
    ]
    for row in rows:
        note(f"{what}, {row['name']}: {row['left_out']['0.1']} {row.get('bound_over_true')}")
    return {"what": what, "head_dim": head_dim, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=23)
    parser.add_argument("--length", type=int, default=3584, help="tokens of a prompt, or down to half as many")
    parser.add_argument("--positions", type=int, default=384, help="the last of each, of which a fourth is looked at")
    parser.add_argument("--adversarial", type=int, default=6000, help="made-up cases, of four queries each")
    json_option(parser)
    o = parser.parse_args()
    parts = [
        measured(of_model(o.prompts, o.length, o.positions), "the bundled model"),
        measured(adversarial(o.adversarial, 1), "adversarial keys"),
    ]
    if o.json:
        write_json(o.json, {"prompts": o.prompts, "length": o.length, "parts": parts})


if __name__ == "__main__":
    main()
