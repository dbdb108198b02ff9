"""The section of RESULTS.md about caches that are larger than their pool."""

from __future__ import annotations

from benchmarks.markdown import Json, origin, table

POOL = """\
{model}, with Qwen3.6-35B-A3B's shapes (`full_shape.py qwen3.6-35b-a3b`), cache in {kv_type}. Steps of one sequence at a
depth, with a share of its blocks in the pool and the others at home in host memory; medians of {runs} and extremes, in
ms. *Line*: the same step with everything on the GPU, and the absent bytes at {rate} GB/s. *100%*: homes, and nothing
at home. A prompt of {tokens:,} tokens is read in {pooled:.2f} s under a pool of {pool:,}, in {whole:.2f} s without one:
{speed:.3f} of the speed."""


def pool(name: str, made: Json) -> list[str]:
    plain = {(r["depth"], r["tokens"]): r["seconds"]["median"] for r in made["rows"] if not r["homes"]}
    rows = []
    for r in made["rows"]:
        if r["homes"]:
            s = r["seconds"]
            took = f"{1e3 * s['median']:.2f} ({1e3 * s['min']:.2f} to {1e3 * s['max']:.2f})"
            rows.append([
                f"{r['depth']:,}", f"{r['share']:.0%}", r["tokens"], f"{1e3 * plain[r['depth'], r['tokens']]:.2f}",
                f"{r['absent_bytes'] / 1e9:.2f}", took, f"{r['of_line']:.3f}",
            ])  # fmt: skip
    p = made["prefill"]
    text = POOL.format(
        model=made["model"], kv_type=made["kv_type"], runs=made["rows"][0]["seconds"]["n"], rate=made["pcie_gb_per_s"],
        tokens=p["tokens"], pooled=p["pooled_s"], pool=p["pool_tokens"], whole=p["whole_s"], speed=p["speed"],
    )  # fmt: skip
    columns = ["depth", "in the pool", "tokens", "all on the GPU", "GB absent", "ms a step", "of the line"]
    return ["## A cache larger than its pool", "", *origin(name, made), text, "", *table(columns, rows)]


SECTIONS = {"kv_pool.json": pool}
