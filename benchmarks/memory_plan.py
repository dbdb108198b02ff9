"""Device memory as planned and as the driver counts it, under several caps.

    python benchmarks/memory_plan.py model.gguf --vram 8,12,16,24 --json data/results/memory_plan.json

For each cap a daemon is started and made to use everything it has: a long prompt in whole chunks, a short one, greedy
and sampled tokens, a scored window. The driver's count is that of the daemon's process where it gives one, else what
the device's use grew by. The run fails where it is above the cap, or further from the plan than the tolerance.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.driving import (
    GIB,
    PARTIAL,
    Prompts,
    device_process_bytes,
    device_used_bytes,
    generate,
    note,
    open_checked,
    parse_list,
    settings,
    shape_of,
)
from benchmarks.figures import json_option
from engine.ground.config import EngineConfig
from engine.ground.sampling import Sampling
from engine.placing import policies
from spark.daemon.client import DaemonClient
from spark.results import write_json

MIB = 1 << 20


def exercise(client: DaemonClient, prompts: Prompts, longest: int) -> dict[str, float]:
    """Everything that takes memory when it is first used; rates of the second of two equal prompts."""
    generate(client, prompts.next(7), 40, Sampling(0.8, top_k=20, top_p=0.9, repetition_penalty=1.1, seed=3))
    client.score(prompts.next(min(longest, 700)), logprobs=True).result()
    samples = [generate(client, prompts.next(longest), 64) for _ in range(2)]
    return {
        "decode_tokens_per_s": samples[1].decode_tokens_per_s,
        "prefill_tokens_per_s": samples[1].prefill_tokens_per_s,
    }


def measure(config: EngineConfig, prompts: Prompts, vram_gib: float, longest: int) -> Any:
    """One cap's row, and the daemon's settings."""
    before = device_used_bytes()
    with open_checked(config) as client:
        rates = exercise(client, prompts, longest)
        process, after = device_process_bytes(client.pid), device_used_bytes()
        info = client.ready.info
        made = settings(client)
    if process is not None:
        measured, how = process, "process"
    elif before is not None and after is not None:
        measured, how = after - before, "difference"
    else:
        sys.exit("nvidia-smi does not say how much memory is used")
    planned, cap = info["plan"]["device_bytes"], round(vram_gib * GIB)
    row = {
        "vram_gib": vram_gib, "residency_pct": info["residency_pct"], "planned_bytes": planned,
        "measured_bytes": measured, "measured_by": how, "error_bytes": measured - planned,
        "cap_left_bytes": cap - measured, "chunk_tokens": info["chunk_tokens"], **rates,
    }  # fmt: skip
    note(
        f"--vram {vram_gib:g}: {info['residency_pct']:.1f}% resident, planned {planned / GIB:.3f} GiB, measured "
        f"{measured / GIB:.3f} GiB by {how} ({(measured - planned) / MIB:+.0f} MiB)"
    )
    return row, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--vram", default="8,12,16,24", help="caps in GiB")
    parser.add_argument("--ctx", type=int, default=16384)
    parser.add_argument("--policy", default=policies.SPARK.name, choices=PARTIAL)
    parser.add_argument("--tolerance-mib", type=float, default=128.0, help="how far the plan may be off")
    o = parser.parse_args()
    prompts = Prompts(shape_of(o.model).n_vocab, seed=3)
    rows, made, problems = [], [], []
    for vram in parse_list(o.vram):
        config = EngineConfig(model=o.model, device="cuda", policy=o.policy, ctx_tokens=o.ctx, vram_gib=vram)
        row, info = measure(config, prompts, vram, min(o.ctx - 64, 9000))
        rows.append(row)
        made.append(info)
        if row["cap_left_bytes"] < 0:
            problems.append(f"--vram {vram:g}: {-row['cap_left_bytes'] / MIB:.0f} MiB above the cap")
        if abs(row["error_bytes"]) > o.tolerance_mib * MIB:
            problems.append(f"--vram {vram:g}: the plan is off by {row['error_bytes'] / MIB:+.0f} MiB")
        if o.json:
            write_json(o.json, {
                "model": o.model.name, "ctx_tokens": o.ctx, "tolerance_mib": o.tolerance_mib, "rows": rows,
                "problems": problems, "settings": made,
            })  # fmt: skip
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
