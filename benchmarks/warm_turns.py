"""The first token of a turn whose conversation lies elsewhere: in the pool, at home, in host memory or in files.

    python benchmarks/warm_turns.py MODEL.gguf --depths 35000,94000,180000 --json data/results/warm_turns.json
    python benchmarks/warm_turns.py MODEL.gguf --depths 100000 --sessions 32 --kv-type q8_0 --prefix-gib 33.5 --files

Conversations of a depth, each of tokens of its own, take turns of --new tokens and one reply token. *Own*: the turn of
one that is alone, with everything on the device. *Line*: that, and the bytes that must come back before it, as they lie
when the turn comes: those at home or in host memory over --host-gb-per-s, those in files at the rate at which such
files were read in the same run. Depths are reached without computing: keys, values and states are zeros.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.driving import Prompts, note, parse_list, shape_of, spread
from benchmarks.figures import json_option
from benchmarks.kv_pool import zeroed
from benchmarks.next_turn import Asking
from engine.ground.config import EngineConfig
from engine.memory.prefix_tree import Node
from engine.ops import KV_BLOCK_TOKENS
from engine.placing import policies
from engine.running.loaded import Loaded
from engine.serving.scheduler import Engine
from spark.pipeline.bench import check_settings
from spark.results import write_json


@contextlib.contextmanager
def opened(o: argparse.Namespace, ctx: int, pool: int | None, files: Path | None) -> Iterator[Engine]:
    config = EngineConfig(
        model=o.model, device=o.device, policy=policies.ALL.name, ctx_tokens=ctx, kv_type=o.kv_type, parallel=1,
        kv_pool="auto" if pool is None else str(pool), draft="off", chunk_tokens=o.chunk,
        prefix_gib=o.prefix_gib, cache_dir=files, cache_dir_gib=o.files_gib,
    )  # fmt: skip
    engine = Engine(config)
    try:
        check_settings(config, engine.ready())
        zeroed(engine.loaded)
        yield engine
    finally:
        engine.close()


def remember(loaded: Loaded, tokens: list[int]) -> None:
    """Let a conversation be there, as if it had been read and its sequence had ended."""
    step = loaded.prefixes.chunk_tokens
    sequence = loaded.kv.sequence()
    try:
        loaded.kv.hold(sequence, len(tokens) // step * step)
        loaded.prefixes.insert(sequence, np.asarray(tokens, np.int32))
        while loaded.prefixes.missed_s is not None:  # as a server does that has time
            if not loaded.prefixes.save_missed():
                time.sleep(loaded.prefixes.missed_s or 0.001)
        if loaded.prefixes._files is not None:
            loaded.prefixes._files.flush()
    finally:
        sequence.release()


def path_of(loaded: Loaded, tokens: list[int]) -> tuple[list[Node], int]:
    """The chunks of a conversation that are in memory, and how many follow in files."""
    tree = loaded.prefixes.tree
    match = loaded.prefixes.match(np.asarray(tokens, np.int32))
    path, node = [], tree.root
    for key in match.keys:
        child = node.children.get(key)
        if child is None:
            break
        path.append(node := child)
    return path, len(match.keys) - len(path)


def where(loaded: Loaded, tokens: list[int]) -> dict[str, int]:
    """Bytes that the next turn of a conversation needs and that are not on the device, by where they are."""
    kv = loaded.kv
    chunk_bytes = sum(kv.block_bytes(g) for g in kv.full_groups) * loaded.prefixes.chunk_tokens // KV_BLOCK_TOKENS
    path, n_files = path_of(loaded, tokens)
    found = {"home": 0, "host": 0, "files": n_files * chunk_bytes}
    for node in path:
        if node.blocks is None:
            found["host" if node.data is not None else "files"] += chunk_bytes
            continue
        for group, blocks in zip(kv.full_groups, node.blocks, strict=True):
            places = kv.pools[group].places
            if places is not None:
                found["home"] += len(places.away(np.asarray(blocks, np.int32))) * kv.block_bytes(group)
    if path or n_files:
        last = path[-1] if path and not n_files else None
        kind = "host" if last is not None and last.snapshot is not None else "files"
        found[kind] += kv.snapshot_bytes((len(path) + n_files) * loaded.prefixes.chunk_tokens)
    return found


def read_rate(files: Path | None) -> float | None:
    """Bytes a second at which the server's files can be read now, with nothing done to them."""
    if files is None:
        return None
    paths = sorted(files.rglob("*.blocks"))[:64]
    began, n_bytes = time.perf_counter(), 0
    for path in paths:
        n_bytes += len(path.read_bytes())
    return n_bytes / (time.perf_counter() - began) if n_bytes else None


def first_token_s(ask: Asking, tokens: list[int]) -> tuple[float, int]:
    """Seconds until the reply's only token, and the reused tokens of the prompt."""
    began = time.perf_counter()
    _, _, done = ask(tokens, 1)
    return time.perf_counter() - began, done.usage.cached_tokens


def own(o: argparse.Namespace, depth: int, prompts: Prompts) -> list[float]:
    """Turns of a conversation that is alone, all of it on the device."""
    with opened(o, depth + (o.turns + 3) * (o.new + 1), None, None) as engine:
        ask, tokens, times = Asking(engine), prompts.next(depth), []
        remember(engine.loaded, tokens)
        for _ in range(o.turns + 1):
            tokens = tokens + prompts.next(o.new)
            seconds, reused = first_token_s(ask, tokens)
            assert reused > depth - 2 * engine.loaded.prefixes.chunk_tokens, f"{reused} of {depth} tokens were reused"
            times.append(seconds)
    return times[1:]


def alternating(o: argparse.Namespace, depth: int, prompts: Prompts, own_s: float) -> list[dict[str, Any]]:
    """Turns of several, one after the other."""
    rows = []
    ctx = depth + (o.turns + 3) * (o.new + 1)
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        files = Path(folder) / "prefixes" if o.files else None
        with opened(o, ctx, int(ctx * o.pool) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS, files) as engine:
            ask, sessions = Asking(engine), [prompts.next(depth) for _ in range(o.sessions)]
            for tokens in sessions:
                remember(engine.loaded, tokens)
            for turn in range(o.turns):
                for i in range(len(sessions)):
                    sessions[i] = sessions[i] + prompts.next(o.new)
                    there = where(engine.loaded, sessions[i])
                    rate = read_rate(files) if there["files"] else None
                    seconds, reused = first_token_s(ask, sessions[i])
                    line = own_s + (there["home"] + there["host"]) / (1e9 * o.host_gb_per_s)
                    line += there["files"] / rate if rate else 0.0
                    row = {"turn": turn, "session": i, "seconds": seconds, "line": line, "reused": reused}
                    rows.append(row | there)
        if files is not None:
            shutil.rmtree(files, ignore_errors=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--depths", default="35000,94000,180000")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--new", type=int, default=500, help="tokens of a turn")
    parser.add_argument("--pool", type=float, default=1.0, help="of a conversation's tokens, that are on the device")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--prefix-gib", type=float, default=64.0)
    parser.add_argument("--files", action="store_true", help="keep conversations in files, too")
    parser.add_argument("--files-gib", type=float, default=200.0)
    parser.add_argument("--host-gb-per-s", type=float, default=51.4)
    o = parser.parse_args()
    rows, n_vocab = [], shape_of(o.model).n_vocab
    for depth in map(int, parse_list(o.depths)):
        prompts = Prompts(n_vocab, seed=depth)
        mine = spread(own(o, depth, prompts))
        note(f"depth {depth}, alone: {1e3 * mine['median']:.1f} ms")
        turns = alternating(o, depth, prompts, mine["median"])
        ratios = spread([row["seconds"] / row["line"] for row in turns])
        note(
            f"depth {depth}, {o.sessions} in turn: {1e3 * spread([r['seconds'] for r in turns])['median']:.1f} ms, "
            f"{ratios['median']:.2f} ({ratios['min']:.2f} to {ratios['max']:.2f}) of the line"
        )
        rows.append({"depth": depth, "own": mine, "ratio": ratios, "turns": turns})
    if o.json:
        write_json(o.json, {"model": o.model.name, "sessions": o.sessions, "kv_type": o.kv_type, "rows": rows})


if __name__ == "__main__":
    main()
