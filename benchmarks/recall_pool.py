"""A token that reads a part of its context, most of which is at home, beside one that has all on the GPU.

    python benchmarks/recall_pool.py MODEL.gguf --depths 131072 --json data/results/recall_pool.json

As `recall_speed.py`, but all blocks have one sketch, so the first N candidates are chosen in every layer. Of these the
share that --away says is at home, and so is every block that nobody chooses. *Line*: the same token with all on the
GPU, and the bytes of the chosen blocks that are at home at --pcie-gb-per-s.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note, parse_list, spread  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.kv_pool import at_depth, zeroed  # noqa: E402
from benchmarks.recall_speed import BEGIN, decoded, opened, spoiled  # noqa: E402
from engine.ground.kv_types import KV_TYPES  # noqa: E402
from engine.memory.blocks import Sequence  # noqa: E402
from engine.ops import KV_BLOCK_TOKENS, TAIL_BLOCKS  # noqa: E402
from engine.running.loaded import Loaded  # noqa: E402
from engine.running.recall import Part  # noqa: E402
from spark.results import write_json  # noqa: E402

SPARE = 24  # blocks of the pool beside those that are chosen
FREE = 4  # of these, for what a reply writes


def placed(loaded: Loaded, depth: int, n: int, away: float) -> tuple[Sequence, int]:
    """A sequence of so many positions, of whose n first candidates a share is at home; the bytes of these.

    They are what is chosen, since all keys are alike: what other replies wrote to the pool would come home with a block
    that has its place, so it is 0 first. The first block and the tail are in the pool, which others fill that nobody
    reads.
    """
    kv, absent = loaded.kv, 0
    zeroed(loaded)
    sequence = at_depth(loaded, depth)
    for group in kv.full_groups:
        places, blocks = kv.pools[group].places, sequence.groups[group].blocks()
        assert places is not None
        kv._make_room(group, len(blocks))
        at_home = round(n * away)
        there = np.concatenate([blocks[:1], blocks[1 + at_home : 1 + n], blocks[-TAIL_BLOCKS - 2 :]])
        back = places.away(np.unique(there))
        others = np.setdiff1d(places.away(blocks[1 + n :]), back)
        back = np.concatenate([back, others[: max(0, places.free_places - len(back) - FREE)]])
        places.bring_back(back)
        kv.moves += 1
        kv._move(group, places.where[back], back, to_home=False)
        absent += at_home * kv.block_bytes(group)
    loaded.forward.device.synchronize()
    return sequence, absent


def brought(loaded: Loaded) -> list[int]:
    """Of each KV head of the last layer, how many blocks came from their homes in the last step."""
    recalling = loaded.forward.recalling
    assert recalling is not None
    n_heads = loaded.kv.groups[loaded.kv.full_groups[-1]].n_head_kv
    wanted = recalling.arrays.absent_of(n_heads, loaded.kv.most_staged)
    return [int(n) for n in loaded.forward.device.read(wanted)[:, 0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--depths", default="32768,131072,261120", help="positions before the reply")
    parser.add_argument("--blocks", default="64,256", help="N of --kv-recall-blocks")
    parser.add_argument("--away", default="0,0.01,0.05,0.5,1", help="of the chosen blocks, at home")
    parser.add_argument("--generate", type=int, default=48, help="tokens of a reply")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kv-type", default="f16", choices=KV_TYPES)
    parser.add_argument("--pcie-gb-per-s", type=float, default=51.4)
    json_option(parser)
    o = parser.parse_args()
    depths, blocks = [int(n) for n in parse_list(o.depths)], [int(n) for n in parse_list(o.blocks)]
    rows, whole = list[dict[str, Any]](), dict[tuple[int, int], float]()
    engine = opened(o, depths)
    spoiled(engine.loaded, kinds=1)
    for depth in depths:
        for n in blocks:
            decoded(engine.loaded, at_depth(engine.loaded, depth), Part(n), 2 * BEGIN)  # captured
            seconds = spread(
                [decoded(engine.loaded, at_depth(engine.loaded, depth), Part(n), o.generate) for _ in range(o.runs)]
            )
            whole[depth, n] = seconds["median"]
            rows.append({"depth": depth, "blocks": n, "away": None, "absent_bytes": 0, "seconds": seconds})
            note(f"depth {depth}, N = {n}, all on the GPU: {1e3 * seconds['median']:.3f} ms a token")
    engine.close()
    engine = opened(o, depths, str(KV_BLOCK_TOKENS * (max(blocks) + SPARE)))
    spoiled(engine.loaded, kinds=1)
    engine.loaded.kv.recall = lambda sequences: None  # type: ignore[method-assign]
    for depth in depths:
        for n in blocks:
            for away in (float(share) for share in parse_list(o.away)):
                sequence, absent = placed(engine.loaded, depth, n, away)
                decoded(engine.loaded, sequence, Part(n), 2 * BEGIN)
                seconds = spread(
                    [
                        decoded(engine.loaded, placed(engine.loaded, depth, n, away)[0], Part(n), o.generate)
                        for _ in range(o.runs)
                    ]
                )
                assert set(brought(engine.loaded)) == {round(n * away)}, brought(engine.loaded)
                line_s = whole[depth, n] + absent / (1e9 * o.pcie_gb_per_s)
                row = {"depth": depth, "blocks": n, "away": away, "absent_bytes": absent, "seconds": seconds}
                rows.append(row | {"line_s": line_s, "of_line": seconds["median"] / line_s})
                said = f"{1e3 * seconds['median']:.3f} ms a token, {rows[-1]['of_line']:.3f} of the line"
                note(f"depth {depth}, N = {n}, {away:.0%} at home: {said}")
    if o.json:
        made = {"model": o.model.name, "kv_type": o.kv_type, "generate": o.generate}
        write_json(o.json, made | {"pcie_gb_per_s": o.pcie_gb_per_s, "rows": rows})
    engine.close()


if __name__ == "__main__":
    main()
